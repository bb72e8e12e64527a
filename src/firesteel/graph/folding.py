"""Scales and shifts behind a convolution or a matrix product become part of its weight and bias, where all of them are frozen (frozen.py).

In: a functional graph and its known nodes.  Out: the graph, in which what is multiplied with, divided by, added to or subtracted from each channel
of a product is done to its weight and bias, in double precision, rounded once.  Batch normalisation by running statistics is such a chain, and so are
a layer's own scale and a bias that is added later.

    (conv(x, w, b) - mean) * r * g + h      ->      conv(x, w * r * g, (b - mean) * r * g + h)

What always holds: nothing else reads the product or what is between; the value that is replaced has the product's dtype and layout.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from firesteel.graph.build import append_call
from firesteel.graph.known import KnownNodes, numbers, rounds
from firesteel.graph.passes import arguments, spec
from firesteel.graph.spec import Shape, contiguous_strides
from firesteel.records import dataclass
from firesteel.table import Table

aten = torch.ops.aten
PRECISE = torch.float64


def fold(graph: Graph, known: KnownNodes) -> int:
    """Folds every chain that it can; says how many."""
    nodes = [node for node in graph.nodes if node.target in PRODUCTS]
    return sum((product := PRODUCTS[node.target](node, known)) is not None and _fold(graph, product, known) for node in nodes)


# ---------------------------------------------------------------- products

@dataclass(frozen=True)
class Product:
    """A convolution or a matrix product: `axis` is that of its channels, `weight_axis` the same of its weight."""
    node: Node
    weight: Node
    bias: Node | None
    axis: int
    weight_axis: int
    again: Callable[[Node, Node | None], tuple[Any, tuple]]     # its operator and arguments with another weight and bias

    @property
    def channels(self) -> int:
        own: Any = numbers(self.weight.meta["val"])
        return own.shape[self.weight_axis]


PRODUCTS: Table[Callable[[Node, KnownNodes], Product | None]] = Table("product with a weight", "graph/folding.py")


@PRODUCTS.row(aten.convolution.default)
def _convolution(node: Node, known: KnownNodes) -> Product | None:
    x, weight, bias, *how = arguments(node)
    transposed, groups = how[3], how[5]
    batched = len(_shape(x)) == len(_shape(weight))
    if not _are_known(known, weight, bias) or not batched or transposed and groups != 1:
        return None
    return Product(node, weight, bias, 1, int(transposed), lambda w, b: (aten.convolution.default, (x, w, b, *how)))


@PRODUCTS.row(aten.mm.default)
def _mm(node: Node, known: KnownNodes) -> Product | None:
    x, weight = arguments(node)
    return _linear(node, x, weight, None, known)


@PRODUCTS.row(aten.addmm.default)
def _addmm(node: Node, known: KnownNodes) -> Product | None:
    bias, x, weight = arguments(node)
    return _linear(node, x, weight, bias, known) if not node.kwargs and _shape(bias) == _shape(weight)[1:] else None


def _linear(node: Node, x: Node, weight: Node, bias: Node | None, known: KnownNodes) -> Product | None:
    def again(w: Node, b: Node | None) -> tuple[Any, tuple]:
        return (aten.mm.default, (x, w)) if b is None else (aten.addmm.default, (b, x, w))
    return Product(node, weight, bias, -1, 1, again) if _are_known(known, weight, bias) else None


def _are_known(known: KnownNodes, weight: Node, bias: Node | None) -> bool:
    own: Any = spec(weight)
    return weight in known and (bias is None or bias in known) and own.dtype.is_floating_point


def _shape(node: Node) -> Shape:
    own: Any = spec(node)
    return own.shape


# ---------------------------------------------------------------- chains

@dataclass(frozen=True)
class Step:
    """A node of a chain: a change of each channel, or none (a cast, a view)."""
    node: Node
    change: Callable[[Affine, Any], None] | None = None
    operand: Any = None
    is_view: bool = False


def _fold(graph: Graph, product: Product, known: KnownNodes) -> bool:
    steps = _chain(product, known)
    if not steps:
        return False
    last = steps[-1].node
    with graph.inserting_before(last):
        affine = Affine(product, known)
        for step in steps:
            if step.change is not None:
                step.change(affine, affine.vector(step.operand))
        target, args = product.again(affine.weight(), affine.bias())
        made = _made(graph, target, args, known, last)
        for step in steps:
            if step.is_view:
                made = _made(graph, aten.view.default, (made, *step.node.args[1:]), known, last)
    last.replace_all_uses_with(made)
    for step in reversed(steps):
        graph.erase_node(step.node)
    graph.erase_node(product.node)
    return True


def _made(graph: Graph, target: Any, args: tuple, known: KnownNodes, like: Node) -> Node:
    node = append_call(graph, target, args, {})
    node.meta = {**like.meta, "val": known.value(target, args, {})}
    return node


def _chain(product: Product, known: KnownNodes) -> list[Step]:
    """The steps behind a product, up to the last change whose value is laid out as a product's is."""
    here, steps, end, changed = product.node, list[Step](), 0, False
    while len(here.users) == 1 and not rounds(here):
        user = next(iter(here.users))
        row = STEPS.get(user.target)
        step = row(user, here, product, known) if row is not None else None
        if step is None:
            break
        steps.append(step)
        here, changed = user, changed or step.change is not None
        if changed and _is_laid_out(spec(here), spec(product.node)):
            end, changed = len(steps), False
    return steps[:end]


def _is_laid_out(here: Any, product: Any) -> bool:
    """As the product, or as a view of it."""
    return here.dtype is product.dtype and (here == product or (here.strides, product.strides) == (
        contiguous_strides(here.shape), contiguous_strides(product.shape)))


STEPS: Table[Callable[[Node, Node, Product, KnownNodes], Step | None]] = Table("step behind a product", "graph/folding.py")


def _changes(forward: Callable[[Affine, Any], None], backward: Callable[[Affine, Any], None] | None) -> Callable[..., Step | None]:
    """The row of an operator of two arguments: what it does with the product's value first, and second."""
    def row(user: Node, here: Node, product: Product, known: KnownNodes) -> Step | None:
        if len(user.args) != 2 or user.kwargs:
            return None
        change, operand = (forward, user.args[1]) if user.args[0] is here else (backward, user.args[0])
        fits = change is not None and operand is not here and spec(user) is not None and _shape(user) == _shape(here)
        return Step(user, change, operand) if fits and _is_of_channels(operand, here, product, known) else None
    return row


def _is_of_channels(operand: Any, here: Node, product: Product, known: KnownNodes) -> bool:
    """A number, or one for each channel?"""
    if not isinstance(operand, Node):
        return type(operand) in (int, float)
    own = spec(operand)
    if own is None or operand not in known or not own.dtype.is_floating_point:
        return False
    axis = product.axis % len(_shape(here)) if product.axis > 0 else len(_shape(here)) - 1
    missing = len(_shape(here)) - len(own.shape)
    return all(size == 1 or dim + missing == axis for dim, size in enumerate(own.shape))


STEPS.rows({
    aten.add.Tensor: _changes(lambda affine, o: affine.shift_by(o), lambda affine, o: affine.shift_by(o)),
    aten.sub.Tensor: _changes(lambda affine, o: affine.shift_by(affine.negative(o)), lambda affine, o: affine.take_from(o)),
    aten.mul.Tensor: _changes(lambda affine, o: affine.scale_by(o), lambda affine, o: affine.scale_by(o)),
    aten.div.Tensor: _changes(lambda affine, o: affine.scale_by(affine.reciprocal(o)), None),
})


@STEPS.row(aten._to_copy.default)
def _cast(user: Node, here: Node, product: Product, known: KnownNodes) -> Step | None:
    """To a wider float, and back."""
    own, before, base = spec(user), spec(here), spec(product.node)
    if own is None or before is None or base is None or set(user.kwargs) != {"dtype"} or not own.dtype.is_floating_point:
        return None
    return Step(user) if own.dtype.itemsize >= base.dtype.itemsize and own.strides == before.strides else None


@STEPS.row(aten.view.default, aten._unsafe_view.default)
def _view(user: Node, here: Node, product: Product, known: KnownNodes) -> Step | None:
    """Of a matrix product's result as more dimensions: the last stays."""
    own = spec(user)
    return Step(user, is_view=True) if product.axis == -1 and own is not None and own.shape and own.shape[-1] == _shape(here)[-1] else None


class Affine:
    """What a chain does with each channel, `scale * channel + shift`: numbers, or known vectors of doubles.  A builder."""

    def __init__(self, product: Product, known: KnownNodes):
        self.product, self.known = product, known
        self.scale: Any = 1.0
        self.shift: Any = 0.0

    def shift_by(self, operand: Any) -> None:
        self.shift = self._sum(self.shift, operand)

    def scale_by(self, operand: Any) -> None:
        self.scale = self._times(self.scale, operand)
        self.shift = self._times(self.shift, operand) if isinstance(self.shift, Node) or self.shift else 0.0

    def take_from(self, operand: Any) -> None:
        self.scale_by(-1.0)
        self.shift_by(operand)

    def negative(self, operand: Any) -> Any:
        return self._times(operand, -1.0)

    def reciprocal(self, operand: Any) -> Any:
        return self.known.call(aten.reciprocal.default, (operand,)) if isinstance(operand, Node) else 1.0 / operand if operand else float("inf")

    def vector(self, operand: Any) -> Any:
        """An operand of the chain as a number or a vector."""
        if not isinstance(operand, Node):
            return float(operand)
        flat = self.known.call(aten.view.default, (operand, [-1]))
        return self._cast(flat, PRECISE)

    def weight(self) -> Node:
        own: Any = spec(self.product.weight)
        if self.scale == 1.0:
            return self.product.weight
        scale = self.scale
        if isinstance(scale, Node):
            shape = [1] * len(own.shape)
            shape[self.product.weight_axis] = -1
            scale = self.known.call(aten.view.default, (scale, shape))
        return self._cast(self._times(self._cast(self.product.weight, PRECISE), scale), own.dtype)

    def bias(self) -> Node | None:
        product, own = self.product, spec(self.product.weight)
        shift = self.shift
        if product.bias is not None:
            shift = self._sum(self._times(self._cast(product.bias, PRECISE), self.scale), shift)
        if not isinstance(shift, Node):
            if shift == 0.0:
                return None
            shift = self._filled(shift)
        whole = self.known.call(aten.expand.default, (shift, [product.channels]))
        return self._cast(whole, own.dtype if product.bias is None else spec(product.bias).dtype)      # type: ignore[union-attr]  # tensors

    def _filled(self, number: float) -> Node:
        return self.known.call(aten.full.default, ([1], number), dtype=PRECISE, device=spec(self.product.weight).device)      # type: ignore[union-attr]

    def _times(self, a: Any, b: Any) -> Any:
        return self._joined(aten.mul.Tensor, a, b, 1.0, lambda x, y: x * y)

    def _sum(self, a: Any, b: Any) -> Any:
        return self._joined(aten.add.Tensor, a, b, 0.0, lambda x, y: x + y)

    def _joined(self, op: Any, a: Any, b: Any, neutral: float, of_numbers: Callable[[float, float], float]) -> Any:
        if not isinstance(a, Node):
            a, b = b, a
        if not isinstance(a, Node):
            return of_numbers(a, b)
        return a if not isinstance(b, Node) and b == neutral else self.known.call(op, (a, b))

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        return self.known.call(aten._to_copy.default, (node,), dtype=dtype)
