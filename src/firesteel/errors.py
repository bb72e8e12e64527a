"""Every error a user can see, and every kind of graph break: a fixed sentence, a hint, the user's source line.

`Break` is not an error but a signal inside capture: "this cannot be put into the graph".  It becomes a split of the
program, or, under fullgraph=True, an `Unsupported` with the same text.  Its kinds are the rows of `BREAKS`.
"""
from __future__ import annotations

import linecache

from firesteel.records import dataclass
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
    """More variants of one function than fs.config.recompile_limit under fullgraph=True, or where settings forbid it."""


class BackendError(FiresteelError):
    """A backend (ours or the user's) failed on a graph."""

    def __init__(self, message: str, location: Location | None = None, hint: str = "", ours: bool = False):
        self.ours = ours
        super().__init__(message, location, hint)


class ConstraintViolation(FiresteelError):
    """A size that the user marked as dynamic was fixed by the program."""


class DifferentPrograms(FiresteelError):
    """Ranks of a process group compile different collectives, and would wait for each other for ever."""


class PackageError(UserError):
    """A package that cannot be written, cannot be used here, or is called with what it was not recorded for."""


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


for _kind, (_sentence, _hint) in {
    # -- what the user asks for
    "asked": ("fs.graph_break was called{text}.", "Remove the call to get one graph."),
    "disabled": ("{name} is marked with fs.disable{text}.", "Remove the mark to compile it, or call it outside."),
    "forbidden": ("{name} is marked with fs.forbid_in_graph.", "Call it outside of the compiled function, or remove the mark."),
    # -- what only run time knows
    "data_branch": ("A branch depends on the data of a tensor ({value}).", "Use torch.where, or compute the condition outside."),
    "data_scalar": ("{name} turns the data of a tensor into a Python number.", "Keep the value a tensor, or set fs.config.capture_scalar_outputs."),
    "data_read": ("{name} reads the data of a tensor{text}, which is known at run time only.",
                  "Call it outside of the compiled function, or give it numbers instead of tensors."),
    "data_shape": ("The output size of {name} depends on data.", "Set fs.config.capture_dynamic_output_shape_ops, or call it outside."),
    "constant": ("A number, a text or another constant is needed here, which {value} is not while capturing.",
                 "Compute it outside of the compiled function and pass the value."),
    "introspection": ("{name} asks for what only the running program has.", "Ask outside of the compiled function and pass the answer."),
    # -- effects that a graph cannot hold
    "output": ("{name} writes output, which a graph cannot hold.", "Print outside of the compiled function, or drop the call."),
    "outside": ("{name} works on the world outside of the program: files, processes, a debugger.", "Call it outside of the compiled function."),
    "warning": ("{name} is not captured: the program continues with the result of the warning.", "Let warnings be shown, or warn outside."),
    "code": ("{name} makes or runs code that does not exist yet while capturing.", "Make the function outside, and call it in the compiled one."),
    "cache": ("{name} is not captured: its cache would be filled at another time.", "Call the function behind the cache, or fill the cache outside."),
    "store": ("Storing {name} on {value} is not captured.", "Do it outside of the compiled function."),
    # -- Python
    "opcode": ("The bytecode instruction {name} is not captured.", "Move this construct out of the compiled function."),
    "call": ("A call of {name} is not captured.", "Call it outside of the compiled function, or wrap a tensor function with fs.allow_in_graph."),
    "arguments": ("A call of {name} with these arguments is not captured.", "Check the arguments; give them as plain positional ones."),
    "attribute": ("Attribute {name} of {value} is not captured.", "Read it outside of the compiled function and pass the value."),
    "object": ("An object of type {name} is not captured.", "Pass tensors, numbers, containers or modules instead."),
    "instance": ("An instance of {name} is not made while capturing.", "Make the object outside of the compiled function and pass it."),
    "class_making": ("The making of a class is not captured: {name}.", "Make the class outside of the compiled function."),
    "copy": ("A copy is not captured: {name}.", "Copy outside of the compiled function; tensors have clone()."),
    "operator": ("The operator {name} on {value} is not captured.", "Compute it outside of the compiled function."),
    "iterate": ("Iterating over {value} is not captured.", "Iterate over a list, a tuple, a dict or a range."),
    "generator": ("A generator's {name} is not captured.",
                  "Run the generator to its end inside of the compiled function, or make a list of it outside."),
    "coroutine": ("{name} is a coroutine.", "Compile the functions that it awaits instead."),
    "context": ("The context manager {name} is not captured.", "Enter it outside of the compiled function."),
    "frames": ("{name} looks at the frames of its callers.", "Pass what it looks for as an argument, or call it outside."),
    "depth": ("Calls are nested deeper than {limit}.", "Unroll the recursion, or compile an inner function."),
    # -- torch
    "argument": ("A call of a torch function with {name} as an argument is not captured.",
                 "Call it outside of the compiled function, or wrap a tensor function with fs.allow_in_graph."),
    "abstract_failure": ("{name} failed on abstract tensors: {text}",
                         "If eager runs it, report it: firesteel does not know the operator well enough. Otherwise fix the call."),
    "storage": ("{name} reaches for the storage of a tensor, which exists at run time only.", "Call it outside of the compiled function."),
    "torch_state": ("{name} changes a state of torch, or reads one that no guard can check.",
                    "Set states of torch outside of the compiled function; grad modes and autocast may be entered inside."),
    "random_state": ("{name} works on the state of a random number generator in a way that is not captured.",
                     "Seed, save and restore generators outside of the compiled function."),
    "leaf": ("A leaf tensor is not made while capturing: {name}.", "Make parameters and leaves outside of the compiled function."),
    "gradient": ("A gradient taken inside is not captured: {name}.", "Call backward outside of the compiled function; the forward stays one graph."),
    "hook": ("A hook is not captured: {name}.", "Register hooks before the call of the compiled function."),
    "autograd_function": ("A torch.autograd.Function is not captured: {name}.",
                          "Let forward and backward only compute on their tensors, and give a gradient or None for each argument."),
    "transform": ("A function transform {name} is not captured.",
                  "Transform a plain function of tensors by torch.func.grad, vmap, vjp, jvp, jacrev or jacfwd, or call the transform outside."),
    "override": ("An override of torch's functions is not captured: {name}.",
                 "Enter the mode, or make the subclass, outside of the compiled function."),
    "region": ("A checkpointed region is left to eager's checkpointing: {text}",
               "Move what is not captured out of the checkpointed function; the rest is compiled."),
    # -- NumPy
    "numpy": ("{name} hands data to NumPy.", "Use the function of torch that does the same, or call NumPy outside."),
    "array": ("{name} takes or gives an array in a way that is not captured.", "Make a tensor of the array outside, by torch.from_numpy."),
}.items():
    BREAKS.add(_kind, BreakKind(_sentence, _hint))
