"""Every error a user can see, and every kind of graph break: a fixed sentence, a hint, the user's source line.

`Break` is not an error but a signal inside capture: "this cannot be put into the graph".  It becomes a split of the
program, or, under fullgraph=True, an `Unsupported` with the same text.  Its kinds are the rows of `BREAKS`.
"""
from __future__ import annotations

import linecache
from dataclasses import dataclass

from firesteel.table import Table


@dataclass(frozen=True)
class Location:
    """A place in the user's program."""
    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return f"{where} in {self.function}" if self.function else where

    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


class FiresteelError(RuntimeError):
    """Base of all errors of ours; the message ends with the user's line where one is known."""

    def __init__(self, message: str, location: Location | None = None, hint: str = ""):
        self.reason, self.location, self.hint = message, location, hint
        super().__init__(self._render())

    def _render(self) -> str:
        parts = [self.reason]
        if self.location is not None:
            parts.append(f"  at {self.location}")
            if source := self.location.source():
                parts.append(f"    {source}")
        if self.hint:
            parts.append(f"  Hint: {self.hint}")
        return "\n".join(parts)


class Unsupported(FiresteelError):
    """A graph break under fullgraph=True."""


class UserError(FiresteelError):
    """The program asks for something that has no meaning here."""


class RecompileError(FiresteelError):
    """A recompile where settings or the stance forbid it."""


class RecompileLimitExceeded(FiresteelError):
    """More variants of one function than fs.config.recompile_limit under fullgraph=True."""


class BackendError(FiresteelError):
    """A backend (ours or the user's) failed on a graph."""


class ConstraintViolation(FiresteelError):
    """A size that the user marked as dynamic was fixed by the program."""


class DataDependentError(FiresteelError):
    """The program asks a yes/no question about a value that only run time knows."""


class InternalError(FiresteelError):
    """A verifier or an assertion of ours failed: a bug in firesteel."""


class DataAccess(Exception):
    """Inside: the program asks for the data of a tensor that has none yet.  `operator` names what asked."""

    def __init__(self, operator: str):
        self.operator, self.is_pointer = operator, operator == "data_ptr"
        self.what = "Cannot access data pointer" if self.is_pointer else operator
        super().__init__(f"{self.what}{'' if self.is_pointer else ' reads the data'} of a tensor, which is known at run time only")


@dataclass(frozen=True)
class BreakKind:
    sentence: str   # a format string over the values given when raised
    hint: str


BREAKS: Table[BreakKind] = Table("break kind", "errors.py")


class Break(Exception):
    """Raised in capture where a thing cannot be captured.  `kind` is a row of BREAKS; `values` fill its sentence."""

    def __init__(self, kind: str, location: Location | None = None, error: DataDependentError | None = None, **values: object):
        row = BREAKS[kind]
        self.error = error      # what it is under fullgraph=True, where that says more
        self.inside = False     # did a function break that a builtin called, which needs its result at once?
        self.kind, self.location, self.hint = kind, location, row.hint
        self.sentence = row.sentence.format(**values)
        super().__init__(self.sentence)

    def unsupported(self) -> FiresteelError:
        """The same text as an error, for fullgraph=True."""
        if self.error is not None:
            return DataDependentError(self.error.reason, self.location, self.error.hint)
        return Unsupported(self.sentence, self.location, self.hint)


for _kind, _row in {
    "opcode": BreakKind("The bytecode instruction {name} is not captured.", "Move this construct out of the compiled function."),
    "call": BreakKind("A call of {name} is not captured.",
                      "Call it outside of the compiled function, or wrap a tensor function with fs.allow_in_graph."),
    "argument": BreakKind("A call of a torch function with {name} as an argument is not captured.",
                          "Call it outside of the compiled function, or wrap a tensor function with fs.allow_in_graph."),
    "output": BreakKind("{name} writes output, which a graph cannot hold.", "Print outside of the compiled function, or drop the call."),
    "asked": BreakKind("fs.graph_break was called{text}.", "Remove the call to get one graph."),
    "disabled": BreakKind("{name} is marked with fs.disable{text}.", "Remove the mark to compile it, or call it outside."),
    "data_branch": BreakKind("A branch depends on the data of a tensor ({value}).",
                             "Use torch.where, or compute the condition outside."),
    "data_scalar": BreakKind("{name} turns the data of a tensor into a Python number.",
                             "Keep the value a tensor, or set fs.config.capture_scalar_outputs."),
    "data_read": BreakKind("{name} reads the data of a tensor{text}, which is known at run time only.",
                           "Call it outside of the compiled function, or give it numbers instead of tensors."),
    "numpy": BreakKind("{name} hands data to NumPy.", "Use the function of torch that does the same, or call NumPy outside."),
    "data_shape": BreakKind("The output size of {name} depends on data.", "Set fs.config.capture_dynamic_output_shape_ops, or call it outside."),
    "attribute": BreakKind("Attribute {name} of {value} is not captured.", "Read it outside of the compiled function and pass the value."),
    "object": BreakKind("An object of type {name} is not captured.", "Pass tensors, numbers, containers or modules instead."),
    "constant": BreakKind("A number, a text or another constant is needed here, which {value} is not while capturing.",
                          "Compute it outside of the compiled function and pass the value."),
    "operator": BreakKind("The operator {name} on {value} is not captured.", "Compute it outside of the compiled function."),
    "store": BreakKind("Storing {name} on {value} is not captured.", "Do it outside of the compiled function."),
    "iterate": BreakKind("Iterating over {value} is not captured.", "Iterate over a list, a tuple, a dict or a range."),
    "abstract_failure": BreakKind("{name} failed on abstract tensors: {text}",
                                  "If eager runs it, this is a missing rule in graph/; otherwise fix the call."),
    "context": BreakKind("The context manager {name} is not captured.", "Enter it outside of the compiled function."),
    "depth": BreakKind("Calls are nested deeper than {limit}.", "Unroll the recursion, or compile an inner function."),
}.items():
    BREAKS.add(_kind, _row)
