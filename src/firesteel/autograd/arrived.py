"""The backward of those tangents that arrived.

Eager's engine does not run nodes behind a result that got no gradient: it does not unpack what was saved there, which may have been
overwritten since, and an infinite derivative there does not meet a zero.  So a call of the backward in which tangents are missing runs a
smaller graph.  A value that depends on missing tangents alone is none: a sum drops it, and what else reads it reads zeros.

    part = backward_of(bw, numbers=[0, 1], arrived=0b01, asked=[0, 1])
    part.gm         # reads the inputs of bw at places part.reads, gives the results of bw at places part.gives

Which tangents a gradient belongs to is asked of the engine (`engine_reach`): the gradient of `sgn`, or of `y - y`, is zeros to which no
value of the graph leads.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from firesteel.autograd.backwards import dependencies, is_accumulator
from firesteel.autograd.symbols import environment, is_symbol, missing_symbols, sizes_of, where_bound
from firesteel.errors import InternalError
from firesteel.graph.build import LazyModule, append_call, results_of
from firesteel.graph.sizenodes import size_function
from firesteel.graph.sizes import asking
from firesteel.graph.spec import contiguous_strides, dense_order
from firesteel.records import dataclass
from firesteel.sym.expr import Expr
from firesteel.sym.node import as_size, is_const
from firesteel.sym.symint import to_symint

aten = torch.ops.aten


@dataclass(frozen=True)
class BackwardPart:
    """A backward graph over some inputs of another, for some of its results."""
    gm: GraphModule
    reads: tuple[int, ...]      # places among the inputs of the whole graph
    gives: tuple[int, ...]      # places among its results


def tangent_bits(bw: GraphModule, numbers: Sequence[int]) -> dict[Node, int]:
    """For each node the bit set of tangents that it depends on.  `numbers` are those of the last placeholders."""
    nodes = list(bw.graph.nodes)[:-1]
    placeholders = [node for node in nodes if node.op == "placeholder"]
    return spread(nodes, {node: 1 << k for k, node in zip(numbers, placeholders[len(placeholders) - len(numbers):])})


def spread(nodes: Iterable[Node], bits: dict[Node, int]) -> dict[Node, int]:
    """Adds to `bits` those of `nodes`, in order: a node has those of what it reads."""
    for node in nodes:
        if node not in bits:
            found = 0
            for before in node.all_input_nodes:
                found |= bits.get(before, 0)
            bits[node] = found
    return bits


def backward_of(bw: GraphModule, numbers: Sequence[int], arrived: int, asked: Collection[int | None]) -> BackwardPart:
    """`asked`: the results that are asked for."""
    with asking(environment(bw.graph.nodes)):       # which layouts are dense may be a question about sizes
        return _part(bw, numbers, arrived, asked)


def _part(bw: GraphModule, numbers: Sequence[int], arrived: int, asked: Collection[int | None]) -> BackwardPart:
    bits, results = tangent_bits(bw, numbers), results_of(bw)
    none = {node for node, found in bits.items() if found and not found & arrived}
    gives = tuple(k for k, node in enumerate(results) if node not in none and k in asked)
    nodes = list(bw.graph.nodes)[:-1]
    cut = Cut(bw, none)
    cut.need([*(results[k] for k in gives), *(node for node in nodes if node.op == "call_function" and not node.users and node not in none)])
    placeholders = [node for node in nodes if node.op == "placeholder"]
    reads = cut.inputs(placeholders)
    return BackwardPart(cut.copy([placeholders[place] for place in reads], [results[k] for k in gives]), reads, gives)


class Cut:
    """A backward graph without the values `none`.  Mutable: `need` fills the sets."""

    def __init__(self, bw: GraphModule, none: set[Node]):
        self.bw, self.none = bw, none
        self.same = self._dropped_sums()
        self.needed: set[Node] = set()
        self.zeros: set[Node] = set()       # values that are none and that others read

    def _dropped_sums(self) -> dict[Node, Node]:
        """Sums of two gradients of which one is none, and the other.  Sums of sums are followed to the end."""
        same: dict[Node, Node] = {}
        for node in self.bw.graph.nodes:
            if node.target is aten.add.Tensor and node not in self.none and not node.kwargs:
                left: Any = [arg for arg in node.args if arg not in self.none]
                if len(left) == 1 and len(node.args) == 2 and _can_stand_for(left[0], node):
                    same[node] = same.get(left[0], left[0])
        return same

    def need(self, roots: Sequence[Node]) -> None:
        stack = list(roots)
        while stack:
            node = stack.pop()
            node = self.same.get(node, node)
            if node in self.none and node.op != "placeholder" and _can_be_filled(node):
                self.zeros.add(node)
            elif node not in self.needed:
                self.needed.add(node)
                stack += node.all_input_nodes

    def inputs(self, placeholders: Sequence[Node]) -> tuple[int, ...]:
        """The places of the placeholders that are read, or bind a size: of these tangents and numbers before saved tensors."""
        found = {node for node in placeholders if node in self.needed}
        env = environment(placeholders)
        if env is not None:
            missing = set(missing_symbols(self.needed | self.zeros, found, env))
            for node in reversed(placeholders):
                bound = missing & {size for size in sizes_of(node.meta.get("val"), env) if is_symbol(size)}
                if bound:
                    found.add(node)
                    missing -= bound
        return tuple(place for place, node in enumerate(placeholders) if node in found)

    def copy(self, inputs: Sequence[Node], results: Sequence[Node]) -> GraphModule:
        writer = PartWriter(inputs)
        read = {before for node in self.needed for before in node.all_input_nodes}
        for node in self.bw.graph.nodes:
            if node in self.zeros:
                writer.fill(node)
            elif node in self.same:
                if node in read:
                    writer.stand_for(node, self.same[node])
            elif node in self.needed and node.op != "placeholder":
                writer.copies[node] = writer.graph.node_copy(node, writer.copies.__getitem__)
        return writer.finish(self.bw, [self.same.get(node, node) for node in results])


def _can_stand_for(value: Any, node: Node) -> bool:
    """Has the value the sum's shape and dtype, and can it be given the sum's strides?"""
    if not isinstance(value, Node):
        return False
    have, want = value.meta["val"].spec, node.meta["val"].spec
    return have.dtype == want.dtype and have.shape == want.shape and (have == want or dense_order(want) is not None)


def _can_be_filled(node: Node) -> bool:
    """Is it a dense tensor?  Of a view, say, the base is filled."""
    spec = getattr(node.meta["val"], "spec", None)
    return spec is not None and spec.offset == 0 and dense_order(spec) is not None


class PartWriter:
    """Writes the smaller graph, node by node."""

    def __init__(self, inputs: Sequence[Node]):
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        for node in inputs:
            self.copies[node] = self.graph.node_copy(node)
        self.env = environment(inputs)
        self.sizes: dict[Any, Node] = {}

    def fill(self, node: Node) -> None:
        """Zeros in the place of a value."""
        like = node.meta["val"]
        plain = like.spec._replace(strides=contiguous_strides(like.spec.shape))
        shape = [self.size(size) for size in like.spec.shape]
        filled = self.call(aten.full.default, (shape, 0), {"dtype": plain.dtype, "device": plain.device}, like.world.make(plain))
        self.copies[node] = self.laid_out(filled, like)

    def stand_for(self, total: Node, value: Node) -> None:
        self.copies[total] = self.laid_out(self.copies[value], total.meta["val"])

    def laid_out(self, value: Node, like: Any) -> Node:
        """The value with the strides of the one in whose place it comes: those that read it were traced for them."""
        have, want, make = value.meta["val"].spec, like.spec, like.world.make
        if have == want:
            return value
        order = (dense_order(want) or [])[::-1]
        shape = tuple(want.shape[d] for d in order)
        turned = have._replace(shape=shape, strides=tuple(have.strides[d] for d in order))
        value = self.call(aten.permute.default, (value, order), {}, make(turned))
        value = self.call(aten.clone.default, (value,), {"memory_format": torch.contiguous_format},
                          make(turned._replace(strides=contiguous_strides(shape), offset=0)))
        return self.call(aten.permute.default, (value, [order.index(d) for d in range(len(order))]), {}, make(want))

    def size(self, size: Any) -> Any:
        """A size as a number, or as a node that computes it from symbols that the inputs bind."""
        size = self.env.simplify(size) if isinstance(size, Expr) else size
        if not isinstance(size, Expr) or is_const(size):
            return as_size(size)
        found = self.sizes.get(size)
        if found is None:
            found = self.sizes[size] = self.ask(size) if is_symbol(size) else self.call(
                size_function(size), tuple(self.size(arg) for arg in size.args), {}, to_symint(size, self.env))
        return found

    def ask(self, symbol: Expr) -> Node:
        for node, copy in self.copies.items():
            if node.op == "placeholder" and isinstance(node.meta["val"], torch.SymInt) and next(sizes_of(node.meta["val"], self.env)) is symbol:
                return copy
        found = where_bound(symbol, (node for node in self.copies if node.op == "placeholder"), self.env)
        if found is None:
            raise InternalError(f"The backward of some tangents needs the size {symbol}, which no input has.")
        node, op, dim = found
        return self.call(op, (self.copies[node], dim), {}, to_symint(symbol, self.env))

    def call(self, target: Any, args: tuple, kwargs: dict[str, Any], val: Any) -> Node:
        node = append_call(self.graph, target, args, kwargs)
        node.meta["val"] = val
        return node

    def finish(self, bw: GraphModule, results: Sequence[Node]) -> GraphModule:
        return self.module(bw, [self.copies[node] for node in results])

    def module(self, bw: GraphModule, given: Sequence[Node]) -> GraphModule:
        """The graph with these of its nodes as results."""
        output = self.graph.output(tuple(given))
        output.meta["val"] = tuple(node.meta.get("val") for node in given)
        return LazyModule(bw, self.graph)


# ---------------------------------------------------------------- what the engine reaches

def engine_reach(roots: Sequence[Any], leaves: Sequence[Any], known: Sequence[int], alone: Callable[[int], Sequence[Any]]) -> list[int]:
    """For each leaf the bit set of roots from which the engine gives it a gradient.  `known` are bits that hold in any case; where a history
    has a path that they do not have, `alone(k)`, the gradients of root k on its own, has it."""
    ways = paths(roots)
    open_ = [ways.get(id(leaf), 0) & ~bits for leaf, bits in zip(leaves, known)]
    found = list(known)
    for k in range(len(roots)):
        if any(bits >> k & 1 for bits in open_):
            for place, gradient in enumerate(alone(k)):
                found[place] |= (gradient is not None) << k
    return found


def paths(roots: Sequence[Any]) -> dict[int, int]:
    """id of a leaf -> bit set of the roots whose history leads to it."""
    bits: dict[Any, int] = {}
    leaves = {id(root): 1 << k for k, root in enumerate(roots) if root.grad_fn is None}
    for k, root in enumerate(roots):
        if root.grad_fn is not None:
            bits[root.grad_fn] = bits.get(root.grad_fn, 0) | 1 << k
    for fn in _in_order(list(bits)):
        for after, _ in fn.next_functions:
            if after is not None:
                bits[after] = bits.get(after, 0) | bits[fn]
        if is_accumulator(fn):
            leaves[id(fn.variable)] = leaves.get(id(fn.variable), 0) | bits[fn]
    return leaves


def _in_order(starts: Sequence[Any]) -> list[Any]:
    """The functions of a history, each before those that it leads to."""
    waiting, order = dependencies(list(starts)), []
    ready = [fn for fn in starts if not waiting[fn]]
    while ready:
        order.append(fn := ready.pop())
        for after, _ in fn.next_functions:
            if after is not None:
                waiting[after] -= 1
                if not waiting[after]:
                    ready.append(after)
    return order
