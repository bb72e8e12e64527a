"""A captured graph in stretches, each compiled on its own: between seams, and behind results that a hook may be put on later.  Where the
backward of a user's operator or function reads data, so that it cannot be traced, that call is a seam too.

    run = compile_in_segments(gm, backend)              # backend(part, example_inputs) -> callable

What a stretch knows is what it reads.  A symbolic size that it uses and that none of the tensors it reads has (the length of a wave, where
only features are read) is handed to it as a number, read off the first tensor of the whole graph that has it.

Kernels read memory, and what an earlier stretch gives may be a view with the conjugate or negative bit.  A stretch is given such a tensor with
the bit flipped, which is a view of the same memory, and flips it back.
"""
from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from firesteel.autograd.backwards import ResultOfOperator
from firesteel.autograd.branches import StateCall, compile_bodies, has_bodies, inside_bodies
from firesteel.autograd.regions import module_of
from firesteel.autograd.seams import is_seam_function
from firesteel.autograd.symbols import environment
from firesteel.graph.build import results_of
from firesteel.graph.sizenodes import sizes_in
from firesteel.graph.tensor import AbstractTensor, memory_of, tensors_in
from firesteel.records import dataclass
from firesteel.sym.expr import Expr
from firesteel.sym.node import free_symbols
from firesteel.sym.symint import SYMBOLIC, from_sym
from firesteel.torchstate import is_stale


def is_seam(node: Node) -> bool:
    return node.op == "call_function" and is_seam_function(node.target)


def has_seams(gm: GraphModule) -> bool:
    return any(is_seam(node) for node in gm.graph.nodes)


def results_gone_on_with(gm: GraphModule) -> frozenset[Node]:
    """The nodes that are returned, require a gradient and from which others that do are made: the caller may put a hook on such a tensor,
    which must see the gradient of all that was made from it."""
    results = {node for node in results_of(gm) if isinstance(node, Node) and is_tracked(node)}
    return frozenset(node for node in results if any(map(may_be_tracked, node.users)))


def may_be_tracked(node: Node) -> bool:
    """Is the node's value, or part of it, differentiable?"""
    return any(isinstance(val, torch.Tensor) and val.requires_grad for val in pytree.tree_leaves(node.meta.get("val")))


def is_tracked(node: Node) -> bool:
    val = node.meta.get("val")
    return node.op != "placeholder" and isinstance(val, torch.Tensor) and val.requires_grad


def compile_in_segments(gm: GraphModule, backend: Callable[[GraphModule, list], Callable], cuts: Collection[Node] = (),
                        seams: Callable[[Node], bool] = is_seam) -> Callable[..., tuple]:
    """A graph with seams as a callable: every stretch between seams, and behind a node of `cuts`, is compiled by `backend`; seams are
    called as they are."""
    mark_held(gm)
    parts = [part for part in with_states(with_bits(stretches(gm, cuts, seams))) if not all("state" in node.meta for node in part.nodes)]
    bind_sizes(gm, parts)
    given = {node for part in parts for node in part.read_nodes()}.union(node for node in results_of(gm) if isinstance(node, Node))
    histories = Histories()
    bodies: dict[Any, Callable] = {}
    steps = [make_step(part, [node for node in part.nodes if node in given], backend, any(map(seams, part.nodes)), histories, bodies)
             for part in parts]
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    results = results_of(gm)
    last_use = {node: n for n, part in enumerate(parts) for node in part.read_nodes()}
    dead = [[node for node in part.read_nodes() if last_use[node] == n and node not in results] for n, part in enumerate(parts)]

    def run(*inputs: Any) -> tuple:
        values = dict(zip(placeholders, inputs))
        for step, over in zip(steps, dead):
            step.run(values)
            for node in over:
                del values[node]
        return tuple([values[node] if isinstance(node, Node) else node for node in results])
    return run


def mark_held(gm: GraphModule) -> None:
    """Marks what a later stretch may overwrite before the backward of an earlier one runs.  Of parameters only those that the graph writes, under
    whatever name: `.data` has a version of its own."""
    written = {id(memory_of(val)) for node in gm.graph.nodes for val in tensors_in(node.meta.get("val")) if val._version}
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and (node.op != "placeholder" or not getattr(val, "_is_param", False) or id(memory_of(val)) in written):
            node.meta["held"] = True


def stretches(gm: GraphModule, cuts: Collection[Node], seams: Callable[[Node], bool]) -> list[list[Node]]:
    """The calls of a graph in order, cut before and behind each seam and behind `cuts`.  Item reads stay with the call they read."""
    parts: list[list[Node]] = [[]]
    home: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if seams(node):
            parts += [[node], []]
            home[node] = parts[-2]
        elif node.target is operator.getitem and isinstance(node.args[0], Node) and isinstance(node.args[0].meta.get("val"), (tuple, list)):
            home[node] = home[node.args[0]]
            home[node].append(node)
        else:
            home[node] = parts[-1]
            parts[-1].append(node)
        if node in cuts:
            parts.append([])
    return [part for part in parts if part]


BITS = frozenset({torch._neg_view, torch._conj})       # how an input whose negative or conjugate bit is set is read


def with_bits(parts: list[list[Node]]) -> list[list[Node]]:
    """Each stretch with the calls that set the bits of tensors it reads: a stretch is given memory, where the bit is not seen."""
    return [[*dict.fromkeys(n for node in part for n in node.all_input_nodes if n.target in BITS and n not in part), *part] for part in parts]


# -- stretches ----------------------------------------------------------------------------------------------------------
class SymbolPlace(NamedTuple):
    """Where a symbol is read: a node, and how to ask its value."""
    node: Node
    ask: Callable[[Any], Any]

    def example(self) -> Any:
        return self.ask(self.node.meta["val"])

    def read(self, values: dict[Node, Any]) -> Any:
        return self.ask(values[self.node])


@dataclass
class Stretch:
    """Nodes that follow each other, with states of torch to set before them and to put back behind them.  Mutable: `sizes` are filled in."""
    before: list[StateCall]
    nodes: list[Node]
    behind: list[StateCall]

    def __post_init__(self) -> None:
        inside = set(self.nodes)
        self.reads = list(dict.fromkeys(n for node in self.nodes for n in node.all_input_nodes if n not in inside))
        self.sizes: list[SymbolPlace] = []         # of symbols that no node of `reads` binds

    def read_nodes(self) -> list[Node]:
        return list(dict.fromkeys([*self.reads, *(size.node for size in self.sizes)]))


def with_states(parts: list[list[Node]]) -> list[Stretch]:
    """Each stretch with the states of torch (grad mode, autocast) to set before it and to put back behind it: a stretch is compiled
    for the states in which the region began."""
    found: list[Stretch] = []
    current: dict[Any, tuple[StateCall, StateCall]] = {}        # state -> (as it is now, as it was at first)
    for part in parts:
        before = [now for now, _ in current.values()]
        for node in part:
            if "state" in node.meta:
                key, first = node.meta["state"]
                began = current[key][1] if key in current else (node.target, (*node.args[:-1], first), (key, first))
                current[key] = ((node.target, node.args, began[2]), began)
        found.append(Stretch(before, part, [began for _, began in current.values()]))
    return found


def bind_sizes(gm: GraphModule, parts: Iterable[Stretch]) -> None:
    """Finds for each stretch the symbols that it uses and does not learn from what it reads.  A symbol that the environment has learnt to be an
    expression of others stands for these."""
    env = environment(gm.graph.nodes)
    if env is None:
        return
    binders: dict[Expr, SymbolPlace] = {}
    for node in gm.graph.nodes:
        for symbol, size in _bound_by(node, env):
            binders.setdefault(symbol, size)
    for part in parts:
        used = free_symbols(*(env.simplify(size) for node in (*part.reads, *part.nodes, *inside_bodies(part.nodes))
                              for size in sizes_in(node.meta.get("val"))))
        bound = {symbol for node in part.reads for symbol, _ in _bound_by(node, env)}
        inside = set(part.nodes)
        sizes = [binders[symbol] for symbol in sorted(used - bound, key=str) if symbol in binders]
        part.sizes = [size for size in sizes if size.node not in inside]


def _bound_by(node: Node, env: Any) -> list[tuple[Expr, SymbolPlace]]:
    """The symbols that can be read off a node's value as they are."""
    val = node.meta.get("val")
    asks: list[Callable[[Any], Any]] = [itself]
    if isinstance(val, torch.Tensor):
        asks = [functools.partial(ask, dim=dim) for ask in (torch.Tensor.size, torch.Tensor.stride) for dim in range(val.dim())]
    found = [(env.simplify(from_sym(size)), SymbolPlace(node, ask)) for ask in asks if type(size := ask(val)) in SYMBOLIC]
    return [(symbol, place) for symbol, place in found if type(symbol) is Expr and symbol.op == "symbol"]


def itself(value: Any) -> Any:
    return value


# -- steps --------------------------------------------------------------------------------------------------------------
class SegmentStep:
    """One compiled stretch, or one seam: reads values of nodes, adds values of nodes.  `flips`: places among what it reads, and the functions
    that flip the bits there."""

    def __init__(self, fn: Callable[..., Sequence[Any]], stretch: Stretch, writes: list[Node], flips: Sequence[tuple[int, Sequence[Callable]]] = ()):
        self.fn, self.reads, self.sizes, self.writes, self.flips = fn, stretch.reads, stretch.sizes, writes, flips

    def run(self, values: dict[Node, Any]) -> None:
        args = [*[values[node] for node in self.reads], *[size.read(values) for size in self.sizes]]
        for node, result in zip(self.writes, self.fn(*flipped(args, self.flips))):
            values[node] = result


def flipped(args: Sequence[Any], flips: Iterable[tuple[int, Sequence[Callable]]]) -> list[Any]:
    """The arguments, those at the places in `flips` through the functions there."""
    args = list(args)
    for place, functions in flips:
        for flip in functions:
            args[place] = flip(args[place])
    return args


class SeamStep(SegmentStep):
    """Code of the user's may give a tensor with a bit, of which the trace knew nothing."""

    def run(self, values: dict[Node, Any]) -> None:
        super().run(values)
        for node in self.writes:
            if isinstance(value := values[node], torch.Tensor) and not bits(node) and (value.is_conj() or value.is_neg()):
                values[node] = value.resolve_conj().resolve_neg()


FLIPS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.ops.aten._conj.default: torch._conj, torch.ops.aten._neg_view.default: torch._neg_view}


def bits(node: Node) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The functions that flip the bits which a captured node's tensor has; those of a placeholder are flipped before the graph."""
    return bits_of(node.meta.get("val")) if node.op != "placeholder" else []


def bits_of(val: Any) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    return [FLIPS[op] for op in FLIPS if op in val.bits] if type(val) is AbstractTensor else []


class Histories:
    """What is known of nodes when a stretch begins: those that a write gave a history, and those that have none so far.  Capture's tensors know
    only what they are when it ends."""

    def __init__(self) -> None:
        self.tracked: set[Node] = set()
        self.untracked: set[Node] = set()

    def add(self, stretch: Stretch, writes: list[Node], module: GraphModule) -> None:
        """Adds what compiling the stretch has shown."""
        written = [stretch.reads[place] for place in module.meta.get("given_histories", ())]
        self.tracked.update(written)
        self.untracked.update(writes[place] for place in module.meta.get("untracked", ()))
        self.may_track(written)

    def may_track(self, nodes: Iterable[Node]) -> None:
        """Nothing is known any longer of what shares memory with these."""
        memories = {id(memory_of(val)) for node in nodes for val in tensors_in(node.meta.get("val"))}
        self.untracked = {node for node in self.untracked if memories.isdisjoint(id(memory_of(val)) for val in tensors_in(node.meta["val"]))}


def make_step(stretch: Stretch, writes: list[Node], backend: Callable[[GraphModule, list], Callable], seam: bool, known: Histories,
              bodies: dict[Any, Callable]) -> SegmentStep:
    """A seam runs as it is, but for the bodies of branches."""
    if seam:
        known.may_track(stretch.reads)
        return SeamStep(seam_module(stretch, writes, backend, bodies).forward, stretch, writes)
    flips = {node: found for node in stretch.reads if (found := bits(node))}
    literals = literals_read(stretch)
    examples = [*(example(node, literals.get(node), known) for node in stretch.reads), *(size.example() for size in stretch.sizes)]
    module = as_module(stretch, writes, flips)
    compiled = backend(module, examples)
    known.add(stretch, writes, module)
    return SegmentStep(compiled, stretch, writes, [(place, flips[node]) for place, node in enumerate(stretch.reads) if node in flips])


def seam_module(stretch: Stretch, writes: list[Node], backend: Callable[[GraphModule, list], Callable], bodies: dict[Any, Callable]) -> GraphModule:
    if not any(map(has_bodies, stretch.nodes)):
        return as_module(stretch, writes, {})

    def compiler(body: GraphModule) -> Callable:
        inputs = body.graph.find_nodes(op="placeholder")
        if all(node.op in ("placeholder", "output") for node in body.graph.nodes):
            return body.forward
        flips = {place: found for place, node in enumerate(inputs) if (found := bits_of(node.meta["val"]))}
        body = with_flips(body, flips) if flips else body
        compiled = compile_in_segments(body, backend) if has_seams(body) else backend(body, [example(node, None, Histories()) for node in inputs])
        return (lambda *args: compiled(*flipped(args, flips.items()))) if flips else compiled
    bare = Stretch([], stretch.nodes, [])       # the bodies set the states of torch themselves
    bare.sizes = stretch.sizes
    module = as_module(bare, writes, {})
    sizes = module.graph.find_nodes(op="placeholder")[len(bare.reads):]
    compile_bodies(list(module.graph.nodes), compiler, sizes, stretch.before, stretch.behind, bodies)
    module.recompile()
    return module


def with_flips(body: GraphModule, flips: Mapping[int, Sequence[Callable]]) -> GraphModule:
    """The body of a branch as a graph that is given the flipped tensors."""
    graph = torch.fx.Graph()
    inputs = body.graph.find_nodes(op="placeholder")
    copies = {node: graph.node_copy(node) for node in inputs}
    for place, functions in flips.items():
        for flip in functions:
            copies[inputs[place]] = graph.call_function(flip, (copies[inputs[place]],))
            copies[inputs[place]].meta = dict(inputs[place].meta)
    for node in body.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return module_of(graph, "Body")


def literals_read(stretch: Stretch) -> dict[Node, torch.Tensor]:
    """What is read of earlier stretches and is a literal of the program.  Its value is that of the first call that reads it."""
    first: dict[Node, torch.Tensor | None] = {}
    for node in stretch.nodes:
        for read, data in zip(node.all_input_nodes, node.meta.get("literals") or [None] * len(node.all_input_nodes)):
            first.setdefault(read, data)
    return {read: data for read, data in first.items() if data is not None}


def example(node: Node, literal: torch.Tensor | None, histories: Histories) -> Any:
    """The value of a node as a stretch reads it.  A view that is stale when capture ends was not yet."""
    val = node.meta["val"]
    if type(val) is not AbstractTensor:
        return val
    tracked, untracked = node in histories.tracked, node in histories.untracked
    if not untracked and (tracked and not val.requires_grad or is_stale(val)):
        fresh = functools.partial(val.world.make, val.spec)
        with torch.enable_grad():
            return ResultOfOperator.apply(fresh().requires_grad_(True), fresh)
    if literal is None and not (untracked and (val.requires_grad or is_stale(val))):
        return val
    made = val.world.make(val.spec)
    made.given = literal
    return made.requires_grad_(val.requires_grad and not untracked)


def as_module(stretch: Stretch, writes: list[Node], flips: Mapping[Node, Sequence[Callable]]) -> GraphModule:
    """The stretch as a graph of its own, which gives the values of `writes`.  Of `flips` it is given the flipped tensors."""
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for node in stretch.reads:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for n, size in enumerate(stretch.sizes):
        graph.placeholder(f"size_{n}").meta["val"] = size.example()
    for node, functions in flips.items():
        for flip in functions:
            copies[node] = graph.call_function(flip, (copies[node],))
            copies[node].meta = dict(node.meta)
    first = list(itertools.takewhile(lambda node: node.target in BITS, stretch.nodes))      # inputs are as they were when the region began
    for node in first:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for fn, args, state in stretch.before:
        graph.call_function(fn, args).meta.update(val=None, state=state)
    for node in stretch.nodes[len(first):]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for fn, args, state in stretch.behind:
        graph.call_function(fn, args).meta.update(val=None, state=state)
    graph.output(tuple(copies[node] for node in writes))
    return module_of(graph, "Segment")
