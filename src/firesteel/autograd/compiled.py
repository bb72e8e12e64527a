"""Compiled autograd: a backward that the engine is about to run, as one graph.

torch's engine has a door: where a compiler is set, it does not run a backward but describes it, node by node in the order in which it
would run, to an object with the methods of `BackwardCapture`.  It keeps what it got back under a key of the graph's structure (kinds
of nodes, their constants, which inputs are wanted, kinds of hooks) and calls it for later backwards of the same structure, with their
tensors, sizes, numbers and hooks.

    engine's nodes --BackwardCapture--> GraphModule(inputs, sizes, scalars, hooks, packed) --compiler--> callable

What always holds
  - the captured graph holds no tensor, hook or context of the backward that it was made from: all come in through the five lists
  - the engine is handed stand-ins (empty tensors and size symbols); each stands for one node of the graph
  - a node's calls stay together: pre-hooks, derivative, post-hooks; nodes stand in the order of the eager engine
"""
from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from firesteel import artifacts
from firesteel.artifacts import counters
from firesteel.autograd import backward_calls as calls
from firesteel.autograd.backward_calls import BackwardOp
from firesteel.autograd.backwards import late_after_hooks, late_gradient_hooks
from firesteel.autograd.inlined import InlinedBackward
from firesteel.autograd.recomputations import Regions, recompute
from firesteel.graph.build import append_call
from firesteel.graph.sizenodes import size_function
from firesteel.records import dataclass
from firesteel.sym.env import ShapeEnv
from firesteel.sym.expr import Expr
from firesteel.sym.node import as_size
from firesteel.sym.symint import SYMBOLIC, from_sym, to_symint

PLACEHOLDERS = ("inputs", "sizes", "scalars", "hooks", "packed")

# The engine names each derivative once in a process, and later only calls it by its name.
OPS: dict[str, BackwardOp] = {}


class Refused(Exception):
    """This backward is the eager engine's."""


class DescribedCall:
    """A call of the graph that is described, before it is known where its engine node stands.  Its arguments are other calls, and constants."""

    __slots__ = ("target", "args", "origin")

    def __init__(self, target: Any, args: tuple, origin: int = -1):
        self.target, self.args = target, args       # the name of one of the five lists, an attribute's behind a point, or a function
        self.origin = origin                        # which of the engine's nodes makes it; -1: none


@dataclass(frozen=True)
class CapturedGraph:
    """A backward as calls on the five lists, its nodes in the order of the door."""
    calls: list[DescribedCall]
    outputs: list[Any]          # calls, and None
    root: torch.nn.Module
    names: tuple[str, ...]      # of the engine's nodes
    dynamic: bool               # are there sizes that change between calls?
    first_order: bool           # it cannot be differentiated: compiled backwards or saved-tensor hooks are part of it

    @functools.cached_property
    def unpacks(self) -> dict[DescribedCall, tuple[int, int]]:
        """Calls that unpack saved tensors, with their places in `hooks` and `packed`."""
        return {call: tuple(item.args[1] for item in call.args) for call in self.calls if call.target is calls.unpack_hook}

    @functools.cached_property
    def observable(self) -> bool:
        """Is there more than one call of code of the user's, so that their order matters?"""
        return sum(call.target in calls.OF_THE_USER for call in self.calls) > 1

    @functools.cached_property
    def looking(self) -> list[DescribedCall]:
        """The calls; where some are of the user's code, which may put hooks on leaves, each leaf is looked at for these."""
        return with_late_hooks(self.calls) if any(call.target in calls.OF_THE_USER for call in self.calls) else self.calls

    def module(self, ranks: Sequence[int] | None, regions: Regions | None = None) -> GraphModule:
        """The graph with the engine's nodes in the order of these ranks; the calls of one node stay as they are among themselves."""
        rank = (lambda origin: origin) if ranks is None else (lambda origin: origin if origin < 0 else ranks[origin])
        summed, sums = sum_gradients(self.looking, rank)
        ordered = sorted(summed, key=lambda call: rank(call.origin))
        if regions is not None:
            ordered = recompute_regions(ordered, dict(zip(self.unpacks, regions.unpacked)), regions, sums)
        gm = GraphModule(self.root, graph_of(read_calls(ordered, self.outputs, sums), self.outputs, sums), "CapturedBackward")
        gm.meta["boxed"] = True         # the first list may be emptied: nobody else holds what was saved
        artifacts.log("autograd", lambda: "captured backward\n" + annotated(gm, self.names, ranks))
        return gm


class BackwardCapture:
    """What the engine talks to.  Method names and arguments are the engine's."""

    def __init__(self, finish: Callable[[CapturedGraph], tuple[Callable, Any]]):
        self.finish = finish
        self.calls: list[DescribedCall] = []
        self.root = torch.nn.Module()
        self.env = ShapeEnv()
        self.made: dict[int, DescribedCall] = {}             # by the id of a stand-in
        self.kept: list[torch.Tensor] = []          # stand-ins, kept so that no other object gets their id
        self.sizes: dict[Expr, DescribedCall] = {}
        self.origin = -1                            # which of the engine's nodes is described; -1: none yet
        self.names: list[str] = []
        self.first_order = False                    # can the results of the graph not be differentiated?
        self.modes = contextlib.ExitStack()         # on while the engine describes
        self.refusal: str | None = None             # why the eager engine must run it; raised at the end, when the engine has its tensors back

    # ------------------------------------------------------------ start and end

    def begin_capture(self, inputs: list[torch.Tensor], sizes: Sequence[int], scalars: Sequence[int | float], origins: Any,
                      *rest: Any) -> tuple[str, list, list, list]:
        counters["compiled_autograd"]["captures"] += 1
        self.modes.enter_context(ZerosMode(self))
        self.lists = {name: DescribedCall(name, ()) for name in PLACEHOLDERS}
        self.dynamic = bool(sizes)
        stand_ins = [self.stand_in(self.item("inputs", i)) for i in range(len(inputs))]
        return ("0", stand_ins, [self.symbol("sizes", i, value) for i, value in enumerate(sizes)],
                [self.symbol("scalars", i, value) for i, value in enumerate(scalars)])

    def end_capture(self, outputs: Sequence[torch.Tensor | None]) -> tuple[Callable, Any]:
        self.modes.close()
        if self.refusal is not None:
            raise Refused(self.refusal)
        return self.finish(CapturedGraph(self.calls, self.node(outputs), self.root, tuple(self.names), self.dynamic, self.first_order))

    def close(self) -> None:
        self.modes.close()
        self.made.clear()
        self.kept.clear()

    def set_node_origin(self, name: str, index: int, function: Any) -> None:
        self.origin = index
        self.names.append(name)

    def log_compile_reasons(self, reasons: Sequence[str]) -> None:
        """All reasons for captures of this structure, the last one for this capture; given where `Reasons` listens."""
        artifacts.log("autograd", lambda: f"captures a backward: {in_words(reasons[-1])}")

    # ------------------------------------------------------------ stand-ins and calls

    def call(self, fn: Callable, *args: Any) -> DescribedCall:
        call = DescribedCall(fn, self.node(args), self.origin)
        self.calls.append(call)
        return call

    def item(self, name: str, place: int) -> DescribedCall:
        return self.call(operator.getitem, self.lists[name], place)

    def stand_in(self, call: DescribedCall) -> torch.Tensor:
        made = torch.empty(0)
        self.made[id(made)] = call
        self.kept.append(made)
        return made

    def stand_ins(self, call: DescribedCall, count: int) -> list[torch.Tensor]:
        return [self.stand_in(self.call(operator.getitem, call, i)) for i in range(count)]

    def symbol(self, name: str, place: int, value: int | float) -> Any:
        expr = self.env.create_symbol(value, f"{name}[{place}]", lo=None, dtype="f64" if isinstance(value, float) else "i64")
        self.sizes[expr] = self.item(name, place)
        return to_symint(expr, self.env)

    def node(self, value: Any) -> Any:
        """A value that the engine hands over, as the graph has it."""
        if isinstance(value, torch.Tensor):
            found = self.made.get(id(value))
            return self.constant(value) if found is None else found
        if isinstance(value, SYMBOLIC):
            return self.size(from_sym(value))
        if isinstance(value, (list, tuple)):
            return type(value)(self.node(item) for item in value)
        return value

    def size(self, size: Any) -> Any:
        size = as_size(size)
        if not isinstance(size, Expr):
            return size
        found = self.sizes.get(size)
        if found is None:
            found = self.sizes[size] = self.call(size_function(size), *(self.size(arg) for arg in size.args))
        return found

    def constant(self, tensor: torch.Tensor) -> DescribedCall:
        """A tensor that belongs to the structure: a function of C++ holds it."""
        name = f"constant{len(self.root._buffers)}"
        self.root.register_buffer(name, tensor)
        return DescribedCall(f".{name}", ())

    # ------------------------------------------------------------ derivatives

    def bind_function(self, name: str, fn: Callable, is_custom: bool, is_traceable: bool) -> str:
        """The engine's function for a kind of node.  Each custom function of C++ is a kind of its own."""
        if is_custom:
            name = f"Custom{name}{len(OPS)}"
        OPS[name] = BackwardOp(name, fn, is_custom)
        return name

    def apply_functional(self, name: str, grads: Sequence[torch.Tensor | None], args: Sequence[Any], metadata: Sequence[Any]) -> list[torch.Tensor]:
        return self.stand_ins(self.call(OPS[name], list(grads), *args), len(metadata))

    def validate_outputs(self, name: str, outputs: Sequence[torch.Tensor | None], args: Sequence[Any], metadata: Sequence[Any]) -> Sequence[Any]:
        """Brings results to the shapes, types and devices that the inputs had, as the engine does behind each node."""
        if all(out is None or self.gives_what_fits(out) for out in outputs):
            return outputs
        node = self.call(OPS["validate_outputs"], list(outputs), *args)
        return [None if out is None else self.stand_in(self.call(operator.getitem, node, i)) for i, out in enumerate(outputs)]

    def gives_what_fits(self, out: torch.Tensor) -> bool:
        """Is it a gradient of an inlined backward?  It was traced for an input of that shape, type and device."""
        made = self.made.get(id(out))
        return made is not None and made.target is operator.getitem and isinstance(made.args[0].target, InlinedBackward)

    def accumulate(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The sum of what reaches one input of a node; in which order, is decided with that of the nodes."""
        return self.stand_in(self.call(contributions, old, new))

    def accumulate_grad(self, leaf: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        """(grad, has it post hooks?); in newer torch behind the gradient that the leaf has, which the graph reads itself, and with a result."""
        made = self.stand_in(self.call(calls.accumulate_grad, leaf, rest[-2]))
        return None if len(rest) == 2 else made

    def proxy_call_backward(self, grads: Sequence[Any], metadata: Sequence[Any], saved: Sequence[Any], place: int, ctx: Any, *rest: Any) -> tuple:
        """A custom function of Python's.  One that we compiled is inlined, from the graph of its backward."""
        graph = getattr(ctx._forward_cls, "compiled", None)
        if getattr(ctx._forward_cls, "in_pieces", False):
            self.refusal = "a compiled backward in pieces, which hands gradients on to DistributedDataParallel"
        if graph is None:
            zeros = calls.makes_zeros(ctx)
            if zeros is None:
                self.refusal = "a custom function that cannot be asked whether it wants zeros for missing gradients"
            node = self.call(calls.custom_backward, self.item("hooks", place), list(saved), zeros or [False] * len(grads), *grads)
        else:
            self.first_order = True
            backward = InlinedBackward(graph)
            if not backward.fits(grads):
                self.refusal = "a compiled backward over tensor subclasses, or with a gradient of unknown size that does not arrive"
            node = self.call(backward, list(saved), list(ctx._get_compiled_autograd_symints()), list(grads))
        return tuple(None if about is None else self.stand_in(self.call(operator.getitem, node, i)) for i, about in enumerate(metadata))

    def call_copy_slices_prologue(self, grads: Sequence[Any], *geometry: Any) -> list[torch.Tensor]:
        return self.stand_ins(self.call(calls.copy_slices_prologue, list(grads), *geometry), 3)

    def call_copy_slices_epilogue(self, wanted: Sequence[bool], whole: Any, results: Sequence[Any], part: Any) -> list[torch.Tensor]:
        return self.stand_ins(self.call(calls.copy_slices_epilogue, list(wanted), whole, list(results), part), len(wanted))

    # ------------------------------------------------------------ hooks

    def unpack_hook(self, hook: int, packed: int) -> torch.Tensor:
        """The engine would give what comes out the history of what was saved, which the graph does not know."""
        self.first_order = True
        return self.stand_in(self.call(calls.unpack_hook, self.item("hooks", hook), self.item("packed", packed)))

    def tensor_pre_hook(self, grads: list[torch.Tensor], hook: int, place: int) -> list[torch.Tensor]:
        grads[place] = self.stand_in(self.call(calls.tensor_hook, self.item("hooks", hook), grads[place]))
        return grads

    def cpp_tensor_pre_hook(self, grads: list[torch.Tensor], hook: int, place: int) -> list[torch.Tensor]:
        grads[place] = self.stand_in(self.call(calls.native_hooks, hook, grads[place]))
        return grads

    def pre_hook(self, grads: Sequence[torch.Tensor | None], hook: int) -> list[torch.Tensor]:
        return self.stand_ins(self.call(calls.node_pre_hook, self.item("hooks", hook), list(grads)), len(grads))

    def post_hook(self, results: Sequence[torch.Tensor | None], grads: Sequence[torch.Tensor | None], hook: int) -> list[torch.Tensor]:
        return self.stand_ins(self.call(calls.node_post_hook, self.item("hooks", hook), list(results), list(grads)), len(results))

    def post_acc_grad_hook(self, leaf: torch.Tensor, hook: int) -> list[torch.Tensor]:
        return [self.stand_in(self.call(calls.accumulated_hook, self.item("hooks", hook), leaf))]


class ZerosMode(TorchDispatchMode):
    """Zeros that the engine makes for gradients that are not there become calls of the graph: their sizes may be symbols."""

    def __init__(self, capture: BackwardCapture):
        super().__init__()
        self.capture = capture

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False        # as in AbstractMode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.zeros.default:
            return func(*args, **(kwargs or {}))
        about = kwargs or {}
        return self.capture.stand_in(self.capture.call(calls.zeros_of, list(args[0]), about.get("dtype"), about.get("device")))


# ---------------------------------------------------------------- order

def contributions(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Stands in a captured graph for a sum of gradients, each added when its node has run."""
    raise AssertionError("sum_gradients replaces it")


def sum_gradients(described: Sequence[DescribedCall], rank: Callable[[int], int]) -> tuple[list[DescribedCall], dict[DescribedCall, DescribedCall]]:
    """(The calls with gradients added in the order in which they arrive, contributions -> their sum)."""
    inner = {arg for call in described if call.target is contributions for arg in call.args}
    result: list[DescribedCall] = []
    sums: dict[DescribedCall, DescribedCall] = {}
    for call in described:
        if call.target is not contributions:
            result.append(call)
        elif call not in inner:
            total, *parts = sorted(parts_of(call), key=lambda part: rank(part.origin))
            for part in parts:
                total = DescribedCall(calls.add_gradients, (total, part), part.origin)
                result.append(total)
            sums[call] = total
    return result, sums


def with_late_hooks(described: Sequence[DescribedCall]) -> list[DescribedCall]:
    """The calls, with looks at each leaf for hooks that were put on it while the backward ran."""
    result: list[DescribedCall] = []
    for _, group in itertools.groupby(described, key=lambda call: call.origin):
        node = list(group)
        accumulates = [place for place, call in enumerate(node) if call.target is calls.accumulate_grad]
        result += looking_at_leaf(node, accumulates[0]) if accumulates else node
    return result


def looking_at_leaf(node: list[DescribedCall], place: int) -> list[DescribedCall]:
    """The calls of an AccumulateGrad.  As in eager, which hooks of a kind run is settled before the first of them runs."""
    call = node[place]
    leaf, grad = call.args
    before, behind = (DescribedCall(look, (leaf, sum(other.target is kind for other in node)), call.origin)
                      for look, kind in ((late_gradient_hooks, calls.tensor_hook), (late_after_hooks, calls.accumulated_hook)))
    call.target, call.args = calls.hooked_accumulate_grad, (leaf, grad, before)
    last = DescribedCall(calls.late_accumulated_hooks, (leaf, grad, behind), call.origin)
    return [before, *node[:place + 1], behind, *node[place + 1:], last]


def parts_of(call: DescribedCall) -> list[DescribedCall]:
    return [part for arg in call.args for part in parts_of(arg)] if call.target is contributions else [call]


def recompute_regions(ordered: Sequence[DescribedCall], of: Mapping[DescribedCall, tuple[int, int] | None], regions: Regions,
                      replaced: dict[DescribedCall, DescribedCall]) -> list[DescribedCall]:
    """The calls with each region recomputed as a whole before the first call that unpacks a tensor of it; `replaced` learns what stands for these."""
    items = [[item_of("hooks", hook), *(item_of("inputs", place) for place in arguments)] for hook, arguments in regions.calls]
    result = [item for region in items for item in region]          # read at the start: the list may be emptied then
    made: dict[int, DescribedCall] = {}
    for call in ordered:
        place = of.get(call)
        if place is not None:
            number, position = place
            if number not in made:
                made[number] = DescribedCall(recompute, (items[number][0], items[number][1:]), call.origin)
                result.append(made[number])
            replaced[call] = DescribedCall(operator.getitem, (made[number], position), call.origin)
        result.append(replaced.get(call, call))
    return result


def item_of(name: str, place: int) -> DescribedCall:
    return DescribedCall(operator.getitem, (DescribedCall(name, ()), place))


def read_calls(ordered: Sequence[DescribedCall], outputs: Sequence[Any], sums: Mapping[DescribedCall, DescribedCall]) -> list[DescribedCall]:
    """Without items of the five lists that nobody reads, and size arithmetic that only the engine looked at."""
    read, kept = set(), []

    def reads(value: Any) -> None:
        if isinstance(value, DescribedCall):
            read.add(sums.get(value, value))
        elif isinstance(value, (list, tuple)):
            for item in value:
                reads(item)
    reads(outputs)
    for call in reversed(ordered):
        if call in read or call.target is not operator.getitem and call.target not in SIZE_CALLS:
            kept.append(call)
            reads(call.args)
    return kept[::-1]


def graph_of(ordered: Sequence[DescribedCall], outputs: Sequence[Any], sums: Mapping[DescribedCall, DescribedCall]) -> Graph:
    graph = Graph()
    nodes: dict[Any, Node] = {name: graph.placeholder(name) for name in PLACEHOLDERS}

    def arg(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(arg(item) for item in value)
        if not isinstance(value, DescribedCall):
            return value
        key = value.target if isinstance(value.target, str) else sums.get(value, value)
        if key not in nodes and isinstance(key, str):
            nodes[key] = graph.get_attr(key[1:])
        return nodes[key]
    for call in ordered:
        node = nodes[call] = append_call(graph, call.target, arg(call.args), {})
        node.meta["origin"] = call.origin
    graph.output(arg(outputs))
    return graph


SIZE_CALLS = (operator.add, operator.mul, operator.sub, operator.floordiv, operator.eq, operator.ne, operator.lt, operator.le)


# ---------------------------------------------------------------- what the log says

def annotated(gm: GraphModule, names: Sequence[str], ranks: Sequence[int] | None) -> str:
    """The code of a captured graph, each of the engine's nodes by its name before its calls."""
    origins = {node.name: node.meta.get("origin", -1) for node in gm.graph.nodes}
    lines, before = [], -1
    for line in gm.code.strip().splitlines():
        origin = origins.get(line.strip().partition(" ")[0], -1)
        if origin not in (-1, before):
            before = origin
            lines.append(f"    # node {origin if ranks is None else ranks[origin]}: {bare_name(names[origin])}")
        lines.append(line)
    return "\n".join(lines)


def bare_name(name: str) -> str:
    """Without C++'s namespaces."""
    return name.rpartition("::")[2]


class Reasons:
    """Called for what was not found in the engine's cache.  While one is set, the engine also gives the reasons to each capture."""

    def debug(self, text: str) -> None:
        """The same text goes to `log_compile_reasons`."""


REASONS = Reasons()         # the engine does not keep it alive

# what the engine says -> what that means
WORDS = (
    (r"new autograd node: (?P<name>\S+) \(NodeCall (?P<place>\d+)\) .*sizes=\[\]",
     "no backward so far had {name} as node {place} behind the same nodes"),
    (r"new autograd node: (?P<name>\S+) \(NodeCall (?P<place>\d+)\)", "node {place}, {name}, has other constants, hooks or inputs than before"),
    (r"(?P<some>\d+) changed tensor shapes \(total of (?P<all>\d+)\)", "{some} of {all} sizes have changed and are symbols from now on"))


def in_words(reason: str) -> str:
    for pattern, words in WORDS:
        found = re.search(pattern, reason)
        if found:
            return words.format(**{name: bare_name(text) for name, text in found.groupdict().items()})
    return reason
