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
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from firesteel import artifacts
from firesteel.artifacts import counters
from firesteel.autograd import backward_calls as calls
from firesteel.autograd.backward_calls import BackwardOp
from firesteel.autograd.function import InlinedBackward
from firesteel.graph.sizenodes import size_function
from firesteel.sym.env import ShapeEnv
from firesteel.sym.expr import Expr
from firesteel.sym.node import as_size
from firesteel.sym.symint import SYMBOLIC, from_sym, to_symint

PLACEHOLDERS = ("inputs", "sizes", "scalars", "hooks", "packed")

# The engine names each derivative once in a process, and later only calls it by its name.
OPS: dict[str, BackwardOp] = {}


class Refused(Exception):
    """This backward is the eager engine's."""


@dataclass(frozen=True)
class CapturedGraph:
    """A backward as a graph of the five lists, its nodes in the order of the door."""
    graph: Graph
    root: torch.nn.Module
    names: tuple[str, ...]      # of the engine's nodes
    dynamic: bool               # are there sizes that change between calls?
    first_order: bool           # it cannot be differentiated: compiled backwards or saved-tensor hooks are part of it
    observable: bool            # is there more than one call of code of the user's, so that their order matters?

    def module(self, ranks: Sequence[int] | None) -> GraphModule:
        """The graph with the engine's nodes in the order of these ranks."""
        graph = Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        sum_gradients(graph, ranks)
        if ranks is not None:
            order_nodes(graph, ranks)
        drop_unread(graph)
        graph.lint()
        gm = GraphModule(self.root, graph, "CapturedBackward")
        gm.meta["boxed"] = True         # the first list may be emptied: nobody else holds what was saved
        artifacts.log("autograd", lambda: "captured backward\n" + annotated(gm, self.names, ranks))
        return gm


class BackwardCapture:
    """What the engine talks to.  Method names and arguments are the engine's."""

    def __init__(self, finish: Callable[[CapturedGraph], tuple[Callable, Any]]):
        self.finish = finish
        self.graph = Graph()
        self.root = torch.nn.Module()
        self.env = ShapeEnv()
        self.nodes: dict[int, Node] = {}            # by the id of a stand-in
        self.kept: list[torch.Tensor] = []          # stand-ins, kept so that no other object gets their id
        self.sizes: dict[Expr, Node] = {}
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
        self.lists = {name: self.graph.placeholder(name) for name in PLACEHOLDERS}
        self.dynamic = bool(sizes)
        stand_ins = [self.stand_in(self.item("inputs", i)) for i in range(len(inputs))]
        return ("0", stand_ins, [self.symbol("sizes", i, value) for i, value in enumerate(sizes)],
                [self.symbol("scalars", i, value) for i, value in enumerate(scalars)])

    def end_capture(self, outputs: Sequence[torch.Tensor | None]) -> tuple[Callable, Any]:
        self.modes.close()
        if self.refusal is not None:
            raise Refused(self.refusal)
        self.graph.output([self.node(out) for out in outputs])
        observable = sum(node.op == "call_function" and node.target in calls.OF_THE_USER for node in self.graph.nodes) > 1
        return self.finish(CapturedGraph(self.graph, self.root, tuple(self.names), self.dynamic, self.first_order, observable))

    def close(self) -> None:
        self.modes.close()
        self.nodes.clear()
        self.kept.clear()

    def set_node_origin(self, name: str, index: int, function: Any) -> None:
        self.origin = index
        self.names.append(name)

    def log_compile_reasons(self, reasons: Sequence[str]) -> None:
        """All reasons for captures of this structure, the last one for this capture; given where `Reasons` listens."""
        artifacts.log("autograd", lambda: f"captures a backward: {in_words(reasons[-1])}")

    # ------------------------------------------------------------ stand-ins and nodes

    def call(self, fn: Callable, *args: Any) -> Node:
        node = self.graph.call_function(fn, tuple(self.node(arg) for arg in args))
        node.meta["origin"] = self.origin
        return node

    def item(self, name: str, place: int) -> Node:
        return self.call(operator.getitem, self.lists[name], place)

    def items(self, node: Node, count: int) -> list[Node]:
        return [self.call(operator.getitem, node, i) for i in range(count)]

    def stand_in(self, node: Node) -> torch.Tensor:
        made = torch.empty(0)
        self.nodes[id(made)] = node
        self.kept.append(made)
        return made

    def stand_ins(self, node: Node, count: int) -> list[torch.Tensor]:
        return [self.stand_in(item) for item in self.items(node, count)]

    def symbol(self, name: str, place: int, value: int | float) -> Any:
        expr = self.env.create_symbol(value, f"{name}[{place}]", lo=None, dtype="f64" if isinstance(value, float) else "i64")
        self.sizes[expr] = self.item(name, place)
        return to_symint(expr, self.env)

    def node(self, value: Any) -> Any:
        """A value that the engine hands over, as the graph has it."""
        if isinstance(value, torch.Tensor):
            found = self.nodes.get(id(value))
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

    def constant(self, tensor: torch.Tensor) -> Node:
        """A tensor that belongs to the structure: a function of C++ holds it."""
        name = f"constant{len(self.root._buffers)}"
        self.root.register_buffer(name, tensor)
        return self.graph.get_attr(name)

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
        if not any(out is not None for out in outputs):
            return outputs
        node = self.call(OPS["validate_outputs"], list(outputs), *args)
        return [None if out is None else self.stand_in(self.call(operator.getitem, node, i)) for i, out in enumerate(outputs)]

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.zeros.default:
            return func(*args, **(kwargs or {}))
        about = kwargs or {}
        return self.capture.stand_in(self.capture.call(calls.zeros_of, list(args[0]), about.get("dtype"), about.get("device")))


# ---------------------------------------------------------------- order

def contributions(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Stands in a captured graph for a sum of gradients, each added when its node has run."""
    raise AssertionError("sum_gradients replaces it")


def sum_gradients(graph: Graph, ranks: Sequence[int] | None) -> None:
    """Adds gradients in the order in which they arrive."""
    for node in [n for n in graph.nodes if n.target is contributions]:
        if not any(user.target is contributions for user in node.users):
            parts = sorted(parts_of(node), key=lambda part: rank_of(part, ranks))
            with graph.inserting_before(node):
                total = parts[0]
                for part in parts[1:]:
                    total = graph.call_function(calls.add_gradients, (total, part))
                    total.meta["origin"] = part.meta["origin"]
            node.replace_all_uses_with(total)
    for node in reversed([n for n in graph.nodes if n.target is contributions]):
        graph.erase_node(node)


def parts_of(node: Any) -> list[Node]:
    return [part for arg in node.args for part in parts_of(arg)] if node.target is contributions else [node]


def rank_of(node: Node, ranks: Sequence[int] | None) -> int:
    origin = node.meta.get("origin", -1)
    return origin if ranks is None or origin < 0 else ranks[origin]


def order_nodes(graph: Graph, ranks: Sequence[int]) -> None:
    """Puts the calls of each of the engine's nodes at its rank; among themselves they stay as they are."""
    output = graph.output_node()
    for node in sorted((n for n in graph.nodes if n.op == "call_function"), key=lambda n: rank_of(n, ranks)):
        output.prepend(node)


def drop_unread(graph: Graph) -> None:
    """Items of the five lists that nobody reads, and size arithmetic that only the engine looked at."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.target in (operator.getitem, *SIZE_CALLS):
            graph.erase_node(node)


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
    """Told of what was not found in the engine's cache.  While one is set, the engine also gives the reasons to each capture."""

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
