"""Pieces: a compiled backward that hands gradients on while it runs.

An autograd function gives all gradients when it ends.  Around DistributedDataParallel that is late: its reducer sends a bucket of gradients as
soon as the accumulators of their parameters ran.  So there the backward graph is cut into pieces, each a node of the engine's graph, one behind
the other; after each the engine runs accumulators first, with all hooks on them.

    outputs <- first piece <- second piece <- ...       # each is also what the engine runs before the parameters that it has gradients for

What always holds: the forward runs once, and the first piece's node saves what all of them read.  A piece computes what its gradients need and no
earlier piece did; what later ones read of it is handed to them.  A gradient that a later piece reads too leaves as a copy: its owner may overwrite
it.  Where not all tangents arrive, or gradients are to be differentiated, the first piece computes all, and the others give theirs of these.
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from firesteel import transaction
from firesteel.autograd.arrived import PartWriter
from firesteel.autograd.partition import has_effect
from firesteel.autograd.recompute import base_of, op_class
from firesteel.graph.build import results_of
from firesteel.records import dataclass
from firesteel.tracebacks import hiding

if TYPE_CHECKING:
    from firesteel.autograd.function import TrainingGraph

FIRST_BYTES = 1 << 20           # of gradients, as in the reducer's first bucket; later pieces have as many as all before them,
LATER_BYTES = 25 << 20          # up to those of its other buckets: so few pieces serve buckets of any size
CHEAP = frozenset({"view", "create", "size"})       # classes of what every piece makes for itself
clone = torch.ops.aten.clone.default


@dataclass(frozen=True)
class Piece:
    """`reads` and `exports` are places among the nodes of the backward graph, `gives` among its results."""
    gm: GraphModule
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    exports: tuple[int, ...]


def pieces_of(bw: GraphModule) -> list[Piece]:
    """The backward graph in pieces; one where it cannot be cut: sizes are symbols, or calls must keep their order."""
    nodes, results = list(bw.graph.nodes)[:-1], results_of(bw)
    whole = [list(range(len(results)))]
    kept = any(node.op == "call_function" and has_effect(node) for node in nodes)
    fixed = all(isinstance(val := node.meta.get("val"), torch.Tensor) and all(type(n) is int for n in (*val.shape, *val.stride()))
                for node in nodes if node.op == "placeholder")
    return Cutter(bw, nodes, results, buckets(nodes, results) if fixed and not kept else whole).pieces()


def buckets(nodes: Sequence[Node], results: Sequence[Node]) -> list[list[int]]:
    """The results in the order in which they are made, in pieces that grow."""
    place = {node: number for number, node in enumerate(nodes)}
    found: list[list[int]] = [[]]
    size = before = 0
    for k in sorted(range(len(results)), key=lambda k: place[results[k]]):
        if size >= min(max(FIRST_BYTES, before), LATER_BYTES):
            found, before, size = [*found, []], before + size, 0
        found[-1].append(k)
        spec = results[k].meta["val"].spec
        size += spec.dtype.itemsize * torch.Size(spec.shape).numel()
    return found


class Cutter:
    """Mutable: walks from the results of one piece after the other."""

    def __init__(self, bw: GraphModule, nodes: list[Node], results: list[Node], groups: list[list[int]]):
        self.bw, self.nodes, self.results, self.groups = bw, nodes, results, groups
        self.place = {node: number for number, node in enumerate(nodes)}
        self.home: dict[Node, int] = {}         # what is not cheap -> the piece that makes it

    def pieces(self) -> list[Piece]:
        walked = [self._walk(number, [self.results[k] for k in group]) for number, group in enumerate(self.groups)]
        return [self._write(number, group, *walked[number], {node for _, reads in walked[number + 1:] for node in reads})
                for number, group in enumerate(self.groups)]

    def _walk(self, number: int, roots: list[Node]) -> tuple[set[Node], set[Node]]:
        """(the nodes of a piece, what it reads of inputs and earlier pieces)."""
        made: set[Node] = set()
        reads: set[Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node.op == "placeholder" or self.home.get(node, number) < number:
                reads.add(node)
            elif node not in made:
                made.add(node)
                stack += node.all_input_nodes
                if node.op != "get_attr" and op_class(node) not in CHEAP:
                    self.home[node] = number
                    stack += [user for user in node.users if user.target is operator.getitem]     # all results are made where the call is
        return made, reads

    def _write(self, number: int, group: list[int], made: set[Node], reads: set[Node], later: set[Node]) -> Piece:
        inputs = sorted(reads, key=self.place.__getitem__)
        exports = sorted((node for node in later if self.home.get(node) == number), key=self.place.__getitem__)
        writer = PartWriter([])
        for node in inputs:
            writer.copies[node] = copy = writer.graph.placeholder(node.name)
            copy.meta["val"] = node.meta["val"]
        for node in self.nodes:
            if node in made:
                writer.copies[node] = writer.graph.node_copy(node, writer.copies.__getitem__)
        own = [self._owned(writer, self.results[k], set(exports)) for k in group]
        gm = writer.module(self.bw, [*own, *(writer.copies[node] for node in exports)])
        return Piece(gm, tuple(map(self.place.__getitem__, inputs)), tuple(group), tuple(map(self.place.__getitem__, exports)))

    def _owned(self, writer: PartWriter, result: Node, exports: set[Node]) -> Node:
        """The gradient in memory that no later piece reads."""
        copy = writer.copies[result]
        return writer.call(clone, (copy,), {}, result.meta["val"]) if base_of(result) in exports else copy


# ---------------------------------------------------------------- at run time

class RunningBackward:
    """One backward of one call: what pieces hand on, and the gradients so far."""

    def __init__(self, owner: Pieces):
        self.owner, self.done = owner, 0
        self.values: dict[int, Any] = {}            # place among the nodes -> value
        self.results: dict[int, Any] = {}
        self.all: Sequence[Any] | None = None       # one gradient an input, where the first piece computed all

    def take(self, args: list[Any]) -> None:
        """The inputs of the backward graph."""
        self.values = dict(enumerate(args))         # its first nodes

    def gradient(self, place: int) -> Any:
        """Of an input."""
        if self.all is not None:
            return self.all[place]
        k = self.owner.graph.gradients[place]
        return None if k is None else self.results.pop(k) if self.owner.shared[k] == 1 else self.results[k]

    def advance(self, number: int) -> None:
        """Runs the pieces up to this one."""
        while self.all is None and self.done <= number:
            piece = self.owner.pieces[self.done]
            args = [(self.values.pop if self.owner.last_reader[place] == self.done else self.values.get)(place) for place in piece.reads]
            results = self.owner.compiled(self.done)(args)
            self.results.update(zip(piece.gives, results))
            self.values.update(zip(piece.exports, results[len(piece.gives):]))
            self.done += 1


class Pieces:
    """The pieces of a TrainingGraph's backward, each compiled at its first use."""

    def __init__(self, graph: TrainingGraph):
        self.graph = graph
        self.pieces = pieces_of(graph.backward_graph)
        home = {k: number for number, piece in enumerate(self.pieces) for k in piece.gives}
        self.home = [None if k is None else home[k] for k in graph.gradients]       # input -> piece
        self.inputs = [[i for i, one in enumerate(self.home) if one == number] for number in range(len(self.pieces))]
        self.shared = {k: graph.gradients.count(k) for k in home}
        self.last_reader = {place: number for number, piece in enumerate(self.pieces) for place in piece.reads}
        self._compiled: list[Any] = [None] * len(self.pieces)

    def compiled(self, number: int) -> Callable[[list[Any]], Sequence[Any]]:
        return self._compiled[number] or transaction.atomic(self.graph.lock.holding, self._compile, number)

    def _compile(self, number: int) -> Callable[[list[Any]], Sequence[Any]]:
        if self._compiled[number] is None:
            self._compiled[number] = self.graph.compile_part(self.pieces[number].gm, self.graph.backward_graph)
        return self._compiled[number]


def handing_on(apply: Callable, graph: TrainingGraph, whole: Any, gradients: Callable) -> Callable:
    """The function as a row of nodes, where it runs in a forward of DistributedDataParallel.  `gradients` is what its backward does."""
    first, later = make_functions(graph, whole, gradients)
    made = functools.cache(lambda: Pieces(graph))       # at the first call that needs it
    wrapper: Any = torch.nn.parallel.DistributedDataParallel

    def run(*inputs):
        if not (graph.hands_on or wrapper._active_ddp_module is not None) or not torch.is_grad_enabled() or len(made().pieces) == 1:
            return apply(*inputs)
        pieces = made()
        call = PiecesCall(pieces, inputs[pieces.inputs[0][0]].device)
        carrier = call.carrier()
        for number in range(len(pieces.pieces) - 1, 0, -1):
            carrier = later.apply(call, number, carrier, *[inputs[i] for i in pieces.inputs[number]])
        return first.apply(*[inputs[i].detach() if home else inputs[i] for i, home in enumerate(pieces.home)], carrier, call, inputs)
    return run


class PiecesCall:
    """One call of a compiled function, for its nodes: the backwards through it that are on their way."""

    def __init__(self, pieces: Pieces, device: torch.device):
        self.pieces, self.device = pieces, device
        self.backwards: dict[int, RunningBackward] = {}        # by the engine's number

    def carrier(self) -> torch.Tensor:
        """On the device of the gradients, in whose thread and stream the engine then runs all pieces."""
        return torch.empty(0, dtype=torch.float32, device=self.device)

    def start(self) -> RunningBackward:
        made = self.backwards[torch._C._current_graph_task_id()] = RunningBackward(self.pieces)
        return made

    def gradients(self, number: int) -> list[Any]:
        """Of the inputs of a piece."""
        task = torch._C._current_graph_task_id()
        backward = self.backwards[task]
        if number == len(self.pieces.pieces) - 1:
            del self.backwards[task]
        backward.advance(number)
        return [backward.gradient(i) for i in self.pieces.inputs[number]]


def make_functions(graph: TrainingGraph, whole: Any, gradients: Callable) -> tuple[Any, Any]:
    """The autograd functions of the first piece, (inputs, carrier, PiecesCall, all inputs) -> outputs, and of others, (PiecesCall, number, carrier,
    inputs) -> carrier.  A carrier is an empty tensor: the edge from one node to the next."""
    class FirstPiece(whole):
        in_pieces = True

        @staticmethod
        def forward(ctx, *given):
            ctx.call = given[-2]
            return whole.forward(ctx, *given[-1])

        @staticmethod
        @hiding
        def backward(ctx, *tangents):
            made = ctx.call.start()
            made.all = gradients(graph, ctx, tangents, made.take)
            found = dict(zip(ctx.call.pieces.inputs[0], ctx.call.gradients(0)))
            return (*[found.get(i) for i in range(len(graph.gradients))], ctx.call.carrier(), None, None)

    class LaterPiece(torch.autograd.Function):
        in_pieces = True

        @staticmethod
        def forward(ctx, call, number, carrier, *inputs):
            ctx.call, ctx.number = call, number
            ctx.set_materialize_grads(False)
            return call.carrier()

        @staticmethod
        @hiding
        def backward(ctx, carrier):
            return (None, None, ctx.call.carrier(), *ctx.call.gradients(ctx.number))
    return FirstPiece, LaterPiece
