"""Sums of matrix products as one product: the gradient of a weight that a recurrent network uses at every step.

In: a functional graph.  Out: the same graph, where a sum of several small products (possibly transposed, each read by the sum alone) is one product
of their factors side by side.  The library is faster on one long product than on many short ones, and the partial sums are gone.

    mm(a, x) + mm(b, y) + mm(c, z)   ->   mm(concat([a, b, c], 1), concat([x, y, z], 0))

Factors stand side by side by one copy of the library (`concat`): loops would be a kernel for each.  Those that are transposed are joined before
they are transposed, so that each is copied in its memory order.
"""
from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from firesteel.graph.build import append_call
from firesteel.graph.passes import arguments, remove_dead, spec
from firesteel.graph.spec import Shape, Spec, contiguous_strides

aten = torch.ops.aten
FEWEST = 3              # products that are worth a copy of their factors
Pair = tuple[Node, Node]        # (p, q) of a product: transposed(p) times q


def join_products(gm: GraphModule) -> None:
    """Rewrites every sum of the graph that is worth it."""
    inner: set[Node] = set()
    joined = False
    for node in reversed(list(gm.graph.nodes)):
        if node not in inner and _is_sum(node):
            terms = [(term, _pair(term)) for term in _terms(node, inner)]
            pairs = [pair for _, pair in terms if pair is not None]
            if len(pairs) >= FEWEST and _is_worth_it(node, pairs):
                _join(gm, node, [term for term, pair in terms if pair is None], pairs)
                joined = True
    if joined:
        remove_dead(gm.graph)
        gm.recompile()


def _shape(node: Node) -> Shape | None:
    """Of a matrix of known sizes."""
    own = spec(node)
    return own.shape if own is not None and len(own.shape) == 2 and all(type(size) is int for size in own.shape) else None


def _is_sum(node: Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and _shape(node) is not None and all(
        isinstance(arg, Node) and _shape(arg) == _shape(node) and _dtype(arg) is _dtype(node) for arg in node.args)


def _dtype(node: Node) -> torch.dtype | None:
    own = spec(node)
    return own.dtype if own is not None else None


def _terms(node: Node, inner: set[Node]) -> Iterator[Node]:
    """What a sum adds up, from left to right; partial sums that nobody else reads are `inner`."""
    for arg in arguments(node):
        if _is_sum(arg) and len(arg.users) == 1:
            inner.add(arg)
            yield from _terms(arg, inner)
        else:
            yield arg


def _transposed(node: Node) -> Node | None:
    """The matrix of which the node is the transposed one."""
    swaps = node.target is aten.t.default or node.target is aten.permute.default and list(arguments(node)[1]) == [1, 0] or (
        node.target is aten.transpose.int and {d % 2 for d in arguments(node)[1:]} == {0, 1})
    return arguments(node)[0] if swaps and _shape(node) is not None else None


def _pair(term: Node) -> Pair | None:
    """(p, q) where the term is transposed(p) times q, and nobody else reads that product."""
    product = _transposed(term) or term
    if product.target is not aten.mm.default or len(product.users) != 1 or len(term.users) != 1 or _shape(product) is None:
        return None
    left, right = arguments(product)
    base = _transposed(left)
    return None if base is None else (base, right) if product is term else (right, base)       # transposed(l r) is transposed(r) transposed(l)


def _is_worth_it(node: Node, pairs: list[Pair]) -> bool:
    """Is there less to copy than to add?  One checkpointed region is not mixed with another."""
    rows, columns = _shape(node) or (0, 0)
    deep = sum((_shape(q) or (0, 0))[0] for _, q in pairs)
    regions = {n.meta.get("region") for n in (node, *(p for pair in pairs for p in pair))}
    return deep * (rows + columns) <= len(pairs) * rows * columns and len(regions) == 1 and _order(node) is not None


def _order(node: Node) -> bool | None:
    """Has the sum the strides of its transposed one?  None: it is dense in no order."""
    own: Any = spec(node)
    if own.strides == contiguous_strides(own.shape):
        return False
    return True if own.strides == contiguous_strides(own.shape[::-1])[::-1] else None


def _join(gm: GraphModule, node: Node, others: list[Node], pairs: list[Pair]) -> None:
    own: Any = spec(node)

    def call(op: Any, args: tuple, shape: Shape, strides: Shape | None = None) -> Node:
        made = append_call(gm.graph, op, args, {})
        made.meta = {name: item for name, item in node.meta.items() if name not in ("val", "relaid", "unbacked")}
        made.meta["val"] = node.meta["val"].world.make(Spec(shape, strides or contiguous_strides(shape), 0, own.dtype, own.device))
        return made

    def turned(matrix: Node) -> Node:
        was: Any = spec(matrix)
        return call(aten.permute.default, (matrix, [1, 0]), was.shape[::-1], was.strides[::-1])

    with gm.graph.inserting_before(node):
        deep = sum((_shape(q) or (0, 0))[0] for _, q in pairs)
        left, right = (call(aten.concat.default, ([pair[k] for pair in pairs],), (deep, own.shape[k])) for k in (0, 1))
        if _order(node):
            total = turned(call(aten.mm.default, (turned(right), left), own.shape[::-1]))
        else:
            total = call(aten.mm.default, (turned(left), right), own.shape)
        total = functools.reduce(lambda a, b: call(aten.add.Tensor, (a, b), own.shape, own.strides), others, total)
    node.replace_all_uses_with(total)
