"""A Case: a captured graph and the values it was called with, as a function that is compiled again, cut smaller, or written as a file.

    case = Case(gm, inputs)
    case.failure()                  # None, or a Failure: compiled code raises, or computes something else than eager
    case.upto(5).failure()          # the same of the first five calls, whose values are results
    print(case.file("why"))         # a Python program that reproduces it

What always holds: a Case is run on copies of its inputs, whose storages are shared as theirs are, so it can be run again.  Its function is
text that is executed: what a file will do is what was tried.
"""
from __future__ import annotations

import copy
import itertools
import linecache
import math
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from firesteel import api, dumps
from firesteel.autograd.backwards import gradients, history_of
from firesteel.errors import Location, UserError
from firesteel.records import dataclass
from firesteel.targets import CPU, on_host
from firesteel.testing import CALLS, same
from firesteel.tracebacks import places_of

TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-4, torch.complex64: 1e-4}      # else 2e-2
TORCH, OURS = os.path.dirname(torch.__file__), os.path.dirname(api.__file__)
PLAIN = (torch.Tensor, int, float, complex, str, type(None))     # what is compared
SHOWN = 64          # elements of an input whose data a file holds, where random numbers do not reproduce the failure


# ---------------------------------------------------------------- what a run makes

def copied(values: Sequence[Any]) -> list[Any]:
    """Copies that share storages as the originals do, leaves and results as autograd knows these."""
    plain = copy.deepcopy([value.detach() if isinstance(value, torch.Tensor) else value for value in values])
    return [dumps.as_autograd_knows(new, old, new.detach().clone) if isinstance(old, torch.Tensor) and old.requires_grad else new
            for new, old in zip(plain, values)]


def leaf_of(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_leaf else history_of([value]).leaves[0]


def uneven(value: torch.Tensor) -> torch.Tensor:
    """Tangents for it.  For ones the gradient of a normalisation is rounding errors alone, which no two programs share."""
    if type(value) is not torch.Tensor:
        return torch.ones_like(value)
    return (1 + torch.arange(value.numel(), device=value.device) % 8 / 8).reshape(value.shape).to(value.dtype)


Values = dict[tuple[str, str], Any]       # (forward or backward, what it is) -> value


def outcome(run: Callable[..., Any], inputs: dict[str, Any]) -> Values:
    """Results, what became of the inputs, and gradients, of a run on these very inputs with the random numbers of one seed."""
    leaves = {name: leaf_of(value) for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.requires_grad}
    torch.manual_seed(0)
    results = pytree.tree_leaves(run(*inputs.values()))
    values: Values = {("forward", f"result {n}"): value for n, value in enumerate(results)}
    values |= {("forward", f"{name} afterwards"): value for name, value in inputs.items()}
    values = {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in values.items() if isinstance(value, PLAIN)}
    recorded = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
    if recorded and leaves:
        found = gradients(recorded, [uneven(value) for value in recorded], list(leaves.values()), False, False)
        values |= {("backward", f"the gradient of {name}"): value for name, value in zip(leaves, found)}
    return values


@dataclass(frozen=True)
class Failure:
    """How compiled code and eager differ: `error`, or the first value that does."""
    phase: str                      # forward or backward
    what: str                       # "result 0", "the gradient of w"
    text: str                       # a sentence
    error: str = ""                 # kind of exception

    def alike(self, other: Failure | None) -> bool:
        """Is it the same failure, of a smaller program?"""
        return other is not None and (self.error, self.error or self.phase) == (other.error, other.error or other.phase)


def first_difference(got: Values, wanted: Values) -> Failure | None:
    """The first value that is not eager's to within the rounding of its type."""
    for (phase, what), value in wanted.items():
        other = got.get((phase, what))
        tolerance = TOLERANCE.get(value.dtype, 2e-2) if isinstance(value, torch.Tensor) else 0.0
        if not same(other, value, tolerance):
            return Failure(phase, what, in_words(other, value))
    return None


def in_words(got: Any, wanted: Any) -> str:
    """Which element differs most, or what else is different."""
    if not isinstance(got, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return f"{got!r} instead of {wanted!r}"
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{got.dtype} {list(got.shape)} instead of {wanted.dtype} {list(wanted.shape)}"
    tolerance = TOLERANCE.get(wanted.dtype, 2e-2)
    wrong = ~torch.isclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    place = tuple(wrong.nonzero()[0].tolist())
    return f"element {list(place)} is {got[place].item()} instead of {wanted[place].item()} ({int(wrong.sum())} of {wrong.numel()} differ)"


# ---------------------------------------------------------------- cases

_numbers = itertools.count(1)
PROGRAM = "program"
FILE = """\
# {why}
# Written by firesteel {version}.  `python FILE` reproduces it; `python FILE --minify` makes a smaller one.
import math
import operator
import sys

import torch
from torch import inf, nan

import firesteel as fs
from firesteel.dumps import constant, find


{source}

def inputs():
    torch.manual_seed(0)
    return [
{inputs}
    ]


if __name__ == "__main__":
    sys.exit(fs.debug.show({name}, inputs(), {settings}minify="--minify" in sys.argv))
"""


@dataclass(frozen=True)
class Case:
    """See the module's text."""
    gm: GraphModule
    inputs: tuple[Any, ...]
    backend: str = "native"
    dynamic: bool = False

    @property
    def calls(self) -> list[Node]:
        return [node for node in self.gm.graph.nodes if node.op in CALLS]

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.gm.graph.find_nodes(op="placeholder")]

    # -- text --------------------------------------------------------------------------------------------------------
    def source(self) -> str:
        """The graph as a Python function."""
        constants, body, result = [], [], ""
        for node in self.gm.graph.nodes:
            if node.op == "get_attr":
                constants.append(f"{node.name} = {dumps.TextWriter().text(dumps.attribute(self.gm, node))}")
            elif node.op in CALLS:
                place = location(node)
                body.append(f"    {node.name} = {dumps.call_text(node)}{f'      # {place}' if place else ''}")
            elif node.op == "output":
                result = f"    return {dumps.TextWriter().text(tuple(node.args[0]))}"
        return "\n".join([*constants, f"def {PROGRAM}({', '.join(self.names)}):", *body, result, ""])

    def function(self) -> Callable[..., Any]:
        """The text, executed; its lines are known to tracebacks."""
        text, file = self.source(), f"<case {next(_numbers)}>"
        if "unreadable(" in text:
            raise UserError("The graph calls what no import finds, so no file can hold it.", hint="Call functions of modules in the program.")
        names: dict[str, Any] = {"torch": torch, "find": dumps.find, "constant": dumps.constant, "inf": math.inf, "nan": math.nan,
                                 "math": math, "operator": operator, "__name__": "case"}
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        exec(compile(text, file, "exec"), names)
        return names[PROGRAM]

    def file(self, why: str, version: str, data: bool = False) -> str:
        """A program that reproduces the failure; with `data`, small inputs are written out."""
        settings = f"backend={self.backend!r}, dynamic=True, " if self.dynamic else f"backend={self.backend!r}, "
        given = "\n".join(f"        {input_text(place, value, data)}," for place, value in enumerate(self.inputs))
        return FILE.format(why=why.replace("\n", "\n# "), version=version, source=self.source(), inputs=given, name=PROGRAM, settings=settings)

    # -- running -----------------------------------------------------------------------------------------------------
    def failure(self) -> Failure | None:
        """How compiled code fails; None where it does not, or where eager fails too."""
        function = self.function()
        try:
            wanted = outcome(function, dict(zip(self.names, copied(self.inputs))))
        except Exception:
            return None
        compiled = api.compile(function, backend=self.backend, dynamic=self.dynamic or None, fullgraph=True, isolate_recompiles=True)
        try:
            got = outcome(compiled, dict(zip(self.names, copied(self.inputs))))
        except Exception as error:
            return Failure("forward", "", f"{type(error).__name__}: {error}", type(error.__cause__ or error).__name__)
        return first_difference(got, wanted)

    def values(self) -> dict[Node, Any]:
        """Of each node, as eager computes them."""
        steps = StepByStep(self.gm)
        torch.manual_seed(0)
        steps.run(*copied(self.inputs))
        return steps.seen

    # -- smaller ones ------------------------------------------------------------------------------------------------
    def rebuilt(self, calls: Sequence[Node], results: Sequence[Node], given: dict[Node, Any] | None = None) -> Case:
        """These calls with these results; nodes of `given` are inputs with these values."""
        graph, known, inputs = Graph(), {}, []
        old = dict(zip(self.gm.graph.find_nodes(op="placeholder"), self.inputs)) | (given or {})
        kept = needed(calls, results, old)
        for node in self.gm.graph.nodes:
            if node in old and node in kept:
                known[node] = graph.placeholder(node.name)
                known[node].meta = dict(node.meta)
                inputs.append(old[node])
        for node in self.gm.graph.nodes:
            if node in kept and node not in old:
                known[node] = graph.node_copy(node, known.__getitem__)
        graph.output(tuple(known[node] for node in results))
        return Case(GraphModule(self.gm, graph), tuple(inputs), self.backend, self.dynamic)

    def results(self) -> list[Node]:
        return [node for node in pytree.tree_leaves(list(self.gm.graph.find_nodes(op="output")[0].args)) if isinstance(node, Node)]

    def upto(self, count: int) -> Case:
        """The first calls; what later ones or the results read of theirs are the results."""
        first = set(self.calls[:count])
        ends = [node for node in self.calls[:count] if any(user not in first for user in node.users) and is_tensor(node)]
        return self.rebuilt(self.calls[:count], ends)

    def first_failing(self) -> tuple[int, Failure] | None:
        """How many calls it takes to fail, found by halving, and how that fails."""
        found = self.failure()
        low, high = 0, len(self.calls)
        if found is None:
            return None
        while low + 1 < high:
            middle = (low + high) // 2
            failure = self.upto(middle).failure()
            if failure is not None:
                high, found = middle, failure
            else:
                low = middle
        return high, found


def needed(calls: Sequence[Node], results: Sequence[Node], given: dict[Node, Any]) -> set[Node]:
    """What the results are computed of, and calls that write in place."""
    kept, waiting = set(), [*results, *(node for node in calls if writes(node))]
    while waiting:
        node = waiting.pop()
        if node not in kept:
            kept.add(node)
            waiting += [] if node in given else node.all_input_nodes
    return kept


def writes(node: Node) -> bool:
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return name.endswith("_") and not name.endswith("__") or name in ("setitem", "__setitem__")


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def location(node: Node) -> Location | None:
    """The line that a node comes from: the innermost of the user's, or of a library where that is all there is."""
    places = places_of(node.meta.get("stack_trace"))
    own = [place for place in places if not place[0].startswith((TORCH, OURS))]
    return Location(*(own or places)[-1]) if places else None


class StepByStep(Interpreter):
    """Runs a graph and keeps a copy of each node's value."""

    def __init__(self, gm: GraphModule):
        super().__init__(gm)
        self.extra_traceback = False
        self.seen: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.seen[n] = value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
        return value


# ---------------------------------------------------------------- inputs of a file

def grad_of(value: torch.Tensor) -> str:
    return "" if not value.requires_grad else "leaf" if value.is_leaf else "result"


def input_text(place: int, value: Any, data: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return dumps.TextWriter().text(value)
    rest = f", device={str(value.device)!r}" if not on_host(value) else ""
    rest += f", offset={value.storage_offset()}" if value.storage_offset() else ""
    rest += f", grad={grad_of(value)!r}" if value.requires_grad else ""
    if data:
        rest += f", data={value.detach().flatten().tolist()}" if value.numel() <= SHOWN else f", data=torch.load(__file__[:-2] + 'pt')[{place}]"
    return f"fs.debug.tensor({value.dtype}, {tuple(value.shape)}, {value.stride()}{rest})"


def tensor(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], *, device: str = CPU, offset: int = 0, grad: str = "",
           data: Any = None) -> torch.Tensor:
    """An input of such a file: random where it has no data; `grad`: "leaf" or "result" of an operator, where it needs a gradient."""
    made = dumps.random_tensor(shape, strides, dtype, device, offset)
    if data is not None:
        made.copy_(torch.as_tensor(data, dtype=dtype).reshape(tuple(shape)))
    return dumps.as_autograd_knows(made, GradientNeed(bool(grad), grad != "result"), made.detach().clone)


@dataclass(frozen=True)
class GradientNeed:
    requires_grad: bool
    is_leaf: bool
