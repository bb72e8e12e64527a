"""Reading where data says: indexing, gathering, embedding."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel.graph.meta import as_first
from firesteel.graph.rules.base import RULES, broadcast_all, check, wrap_dim
from firesteel.graph.rules.refusals import same_shape, within
from firesteel.graph.sizes import must_match, unbacked, where_known
from firesteel.graph.spec import Shape, Spec, contiguous_strides, elementwise_order, fresh, preserved_strides, strides_in_order
from firesteel.loops.checks import keep_checks
from firesteel.loops.ir import check_index
from firesteel.loops.lower.build import Builder, broadcast_index
from firesteel.loops.lower.value import Index, Operand
from firesteel.loops.lower.views import reshape_index
from firesteel.loops.scalars import SHORT, S, literal, to
from firesteel.ops.block import device_rule, loop_lowering, operator, refuses, rule, shape
from firesteel.ops.sized_by_data import masked_places, vector
from firesteel.ops.views import expand, view
from firesteel.sym.expr import Expr, Size, product
from firesteel.targets import on_host

operator("masked_select.*", decides=True)
operator("embedding_dense_backward.* masked_select.* _embedding_bag*", library=True)
operator("index.* index_select.* gather.* embedding.* _unsafe_index.*", recompute="move")


SHORTEST_ROW = 16       # elements that a CPU adds by a loop rather than by the library


def is_index(index: Spec, name: str) -> None:
    check(index.dtype in (torch.int64, torch.int32) or 0 in index.shape, f"{name}(): Expected dtype int32/int64 for index, but got {index.dtype}")


def is_vector_index(index: Spec, name: str, dtypes: Sequence[torch.dtype] = (torch.int64, torch.int32)) -> None:
    check(len(index.shape) <= 1, f"{name}(): Index is supposed to be a vector")
    check(index.dtype in dtypes, f"{name}(): Expected dtype int32/int64 for index")


def same_rank(index: Spec, other: Spec, name: str) -> None:
    check(0 in index.shape or max(len(index.shape), 1) == max(len(other.shape), 1), f"Index tensor must have as many dimensions as {name} tensor")


def no_larger(index: Spec, other: Spec, but: int | None, name: str) -> None:
    if 0 in index.shape:
        return
    for d, (a, b) in enumerate(zip(index.shape, other.shape)):
        if d != but:
            within(a, None, b, f"Size does not match at dimension {d}: expected index {list(index.shape)} to be no larger than {name}")


def of_source_dtype(x: Spec, source: Spec, name: str) -> None:
    check(x.dtype is source.dtype, f"{name}(): self and source expected to have the same dtype, but got (self) {x.dtype} and (source) {source.dtype}")


def place_at(indices: Operand, index: Index, size: Size, strict: bool = False) -> Expr:
    """The checked place that an index tensor names."""
    return check_index(to(indices.load(broadcast_index(index, indices.shape)), "i64"), size, strict)


def _element(x: Operand, index: Index) -> Expr:
    """An element at checked places: x may be a view that reads one element for all of them."""
    return keep_checks(x.load(index), index)


# ---------------------------------------------------------------- indexing with tensors

@rule("index.Tensor _unsafe_index.Tensor")
def index(x: Spec, indices: Sequence[Spec | None]) -> Spec:
    check(len(indices) <= len(x.shape), f"too many indices for tensor of dimension {len(x.shape)} (got {len(indices)})")
    check(all(i is None or not i.dtype.is_floating_point for i in indices),
          "tensors used as indices must be long, int, byte or bool tensors")
    indices = masked_places(indices)
    check(len(indices) <= len(x.shape), f"too many indices for tensor of dimension {len(x.shape)} (got {len(indices)})")
    shape, strides = _indexed(x, list(indices) + [None] * (len(x.shape) - len(indices)))
    return Spec(shape, strides, 0, x.dtype, x.device)


def _indexed(x: Spec, indices: list[Spec | None]) -> tuple[Shape, Shape]:
    """Indexed dimensions stay in place if they are adjacent, else move to the front, as in NumPy."""
    places = [d for d, i in enumerate(indices) if i is not None]
    joint = broadcast_all(i.shape for i in indices if i is not None)
    order = list(range(len(x.shape)))
    adjacent = not places or places[-1] - places[0] + 1 == len(places)
    if not adjacent:
        order = places + [d for d in order if d not in places]
    first = places[0] if adjacent and places else 0
    rest = [d for d in order if indices[d] is None]
    before, after = rest[:first], rest[first:]
    shape = (*(x.shape[d] for d in before), *joint, *(x.shape[d] for d in after))
    return shape, _indexed_strides(x, indices, before, joint, after, shape)


def _indexed_strides(x: Spec, indices: list[Spec | None], before: list[int], joint: Shape, after: list[int], shape: Shape) -> Shape:
    """The result of an iterator over the source, indexed dimensions with stride 0, and the indices."""
    indexed = (0,) * len(joint)
    source = Spec(shape, (*(x.strides[d] for d in before), *indexed, *(x.strides[d] for d in after)), 0, x.dtype, x.device)
    operands = [source]
    for i in indices:
        if i is not None:       # expanded and reshaped: beside a size of 1 of the source the strides of the new dimensions count
            operands.append(view(expand(i, joint), (*(1,) * len(before), *joint, *(1,) * len(after))))
    order = where_known(elementwise_order, shape, operands, shape=shape)
    order = elementwise_order(shape, operands) if order is None else order
    return contiguous_strides(shape) if order == [*range(len(shape))][::-1] else strides_in_order(shape, order)


MASKS = (torch.bool, torch.uint8)


@refuses("index.Tensor _unsafe_index.Tensor")
def refuse_are_indices(x: Spec, indices: Sequence[Spec | None]) -> None:
    """A mask stands for as many dimensions as it has, whose sizes are its own."""
    place = 0
    for index in indices:
        if index is None or index.dtype not in MASKS:
            known_kind = index is None or index.dtype in (torch.int64, torch.int32)
            if not known_kind:
                raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
            place += 1
            continue
        for size in index.shape:
            if place < len(x.shape):
                must_match(size, x.shape[place], f"The shape of the mask {list(index.shape)} does not match the indexed tensor {list(x.shape)}")
            place += 1
    if place > len(x.shape):
        raise IndexError(f"too many indices for tensor of dimension {len(x.shape)}")


@loop_lowering("index.Tensor _unsafe_index.Tensor")
def lower_index(b: Builder, out: Any, x: Operand, indices: Sequence[Operand | None]) -> Any:
    places = places_of(x, indices)
    return NotImplemented if places is None else b.map(out, lambda i: _element(x, places.of(i)))


class Places:
    """torch's rule of indexing with tensors: which element of x an index of the result means.  The tensors are broadcast
    together; their dimensions stand where the first of them stood if all stood side by side, else in front."""

    def __init__(self, x_shape: tuple[Size, ...], indices: Sequence[Operand | None]):
        self.shape, self.indices = x_shape, list(indices) + [None] * (len(x_shape) - len(indices))
        self.where = [d for d, t in enumerate(self.indices) if t is not None]
        self.rank = max((len(t.shape) for t in self.indices if t is not None), default=0)
        together = self.where == list(range(self.where[0], self.where[-1] + 1))
        self.front = self.where[0] if together else 0

    def of(self, index: Index) -> Index:
        named = index[self.front:self.front + self.rank]
        others = iter(index[:self.front] + index[self.front + self.rank:])
        return tuple([next(others) if t is None else place_at(t, named, self.shape[d]) for d, t in enumerate(self.indices)])

    def result_shape(self) -> tuple[Size, ...]:
        rest = [n for n, t in zip(self.shape, self.indices) if t is None]
        named: list[Size] = [1] * self.rank
        for tensor in (t for t in self.indices if t is not None):
            for d, n in enumerate(tensor.shape):
                if n != 1:
                    named[self.rank - len(tensor.shape) + d] = n
        return (*rest[:self.front], *named, *rest[self.front:])


def places_of(x: Operand, indices: Sequence[Operand | None]) -> Places | None:
    """None where a mask is among the indices: how many elements it names only its data says."""
    tensors = [t for t in indices if t is not None]
    if not tensors or any(t.dtype in ("bool", "u8") for t in tensors) or len(indices) > len(x.shape):
        return None
    return Places(x.shape, indices)


# ---------------------------------------------------------------- along a dimension

@device_rule("index_select")
def index_select(x: Spec, dim: int, index: Spec) -> Spec:
    check(len(index.shape) <= 1, "index_select(): Index is supposed to be a vector")
    if not x.shape:
        return fresh(x)
    dim = wrap_dim(dim, len(x.shape))
    return fresh(x, (*x.shape[:dim], index.numel(), *x.shape[dim + 1:]))


refuses("index_select")(lambda x, dim, index: is_vector_index(index, "index_select"))


@loop_lowering("index_select")
def lower_index_select(b: Builder, out: Any, x: Operand, dim: int, indices: Operand) -> Any:
    if not x.shape:
        return NotImplemented
    dim, rank = dim + len(x.shape) if dim < 0 else dim, len(indices.shape)
    return b.map(out, lambda i: _element(x, (*i[:dim], place_at(indices, i[dim:dim + rank], x.shape[dim], strict=True), *i[dim + 1:])))


@device_rule("gather")
def gather(x: Spec, dim: int, index: Spec, *, sparse_grad: bool = False) -> Spec:
    wrap_dim(dim, len(x.shape))
    check(len(x.shape) == len(index.shape) or not x.shape or not index.shape or 0 in index.shape,
          "Index tensor must have the same number of dimensions as input tensor")
    check(index.dtype in (torch.int64, torch.int32) or 0 in index.shape, "gather(): Expected dtype int64 for index")
    return fresh(x, index.shape)


@refuses("gather")
def refuse_gather(x: Spec, dim: int, index: Spec, *, sparse_grad: bool = False) -> None:
    is_index(index, "gather")
    same_rank(index, x, "input")
    no_larger(index, x, wrap_dim(dim, len(x.shape)), "self")


@loop_lowering("gather")
def lower_gather(b: Builder, out: Any, x: Operand, dim: int, indices: Operand, **_: Any) -> Any:
    rank = len(x.shape)
    if not rank or len(indices.shape) != rank:
        return NotImplemented if rank or indices.shape else b.map(out, lambda i: keep_checks(x.load(()), (place_at(indices, (), 1, strict=True),)))
    dim = dim + rank if dim < 0 else dim
    return b.map(out, lambda i: _element(x, (*i[:dim], place_at(indices, i, x.shape[dim], strict=True), *i[dim + 1:])))


device_rule("take")(lambda x, index: fresh(x, index.shape))


@refuses("take")
def refuse_take(x: Spec, index: Spec) -> None:
    check(index.dtype is torch.int64, f"take(): Expected a long tensor for index, but got {index.dtype}")
    if 0 in x.shape and 0 not in index.shape:
        raise IndexError("take(): tried to take from an empty tensor")


@loop_lowering("take")
def lower_take(b: Builder, out: Any, x: Operand, indices: Operand) -> Any:
    """x read as one row, in the order of its dimensions."""
    count = product(x.shape)
    place = reshape_index(x.shape, (count,))
    return b.map(out, lambda i: _taken(x, place, place_at(indices, i, count)))


def _taken(x: Operand, place: Callable[[Index], Index], at: Expr) -> Expr:
    return keep_checks(x.load(place((at,))), (at,))


# ---------------------------------------------------------------- embedding

@device_rule("embedding")
def embedding(weight: Spec, indices: Spec, padding_idx: Any = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> Spec:
    check(len(weight.shape) == 2, "'weight' must be 2-D")
    check(indices.dtype in (torch.int64, torch.int32), "indices must be integers of 64 or 32 bits")
    return fresh(weight, (*indices.shape, weight.shape[1]))


@loop_lowering("embedding")
def lower_embedding(b: Builder, out: Any, weight: Operand, indices: Operand, *_: Any, **__: Any) -> Any:
    return b.map(out, lambda i: _element(weight, (place_at(indices, i[:-1], weight.shape[0], strict=True), i[-1])))


device_rule("embedding_dense_backward")(lambda grad, indices, num_weights, padding_idx, scale: fresh(grad, (num_weights, grad.shape[-1])))


@refuses("embedding_dense_backward")
def refuse_embedding_backward(grad: Spec, indices: Spec, *rest: Any) -> None:
    same_shape(grad.shape[:-1], indices.shape, f"Expected a gradient for {list(indices.shape)} rows, got {list(grad.shape)}")


@loop_lowering("embedding_dense_backward")
def lower_embedding_backward(b: Builder, out: Any, grad: Operand, indices: Operand, rows: Size, padding: int, by_count: bool) -> Any:
    if by_count or adds_by_library(out, grad.shape[-1]):
        return NotImplemented

    def element(i: Index) -> Expr:
        value = grad.load(i)
        return value if padding < 0 else S.where(S.eq(to(indices.load(i[:-1]), "i64"), padding), literal(0, value.dtype), value)
    row = lambda i: place_at(indices, i[:-1], out.shape[0], strict=True)
    return b.added(out, lambda i: literal(0, SHORT[out.dtype]), grad.shape, lambda i: (row(i), i[-1]), element)


def adds_by_library(out: Any, row: Size = 0) -> bool:
    """On a CPU points that may collide are added one after the other: by loops of ours where each adds a row that is a vector or more."""
    if not on_host(out):
        return False
    return SHORT[out.dtype] not in ("f32", "f64") or out.strides[-1] != 1 or type(row) is int and row < SHORTEST_ROW


@rule("_embedding_bag _embedding_bag_forward_only")
def embedding_bag(weight: Spec, indices: Spec, offsets: Spec, scale_grad_by_freq: bool = False, mode: int = 0, sparse: bool = False,
                  per_sample_weights: Spec | None = None, include_last_offset: bool = False, padding_idx: int = -1) -> tuple[Spec, ...]:
    """Results, which bag an index is in (left out where sums are taken straight from the rows), sizes of bags, places of maxima."""
    bags = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]
    straight = (mode == 0 and padding_idx < 0 and on_host(weight) and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
                and weight.strides[1] == 1 and (per_sample_weights is None or per_sample_weights.strides[0] == 1))
    maxima = (bags, weight.shape[1]) if mode == 2 else (bags,)
    return (fresh(weight, (bags, weight.shape[1])), fresh(indices, (0,) if straight else indices.shape),
            fresh(indices, (bags,)), fresh(indices, maxima))


@shape("_embedding_bag_backward _embedding_bag_dense_backward")
def embedding_bag_backward(grad: Spec, indices: Spec, *rest: Any) -> Shape:
    """The gradient of the table, whose height is the first number among the arguments."""
    return next(v for v in rest if not isinstance(v, Spec)), grad.shape[1]


shape("_embedding_bag_per_sample_weights_backward")(lambda grad, weight, indices, *rest: indices.shape)


# ---------------------------------------------------------------- masks

@rule("masked_select")
def masked_select(x: Spec, mask: Spec) -> Spec:
    check(mask.dtype is torch.bool, f"masked_select: expected BoolTensor for mask, got {mask.dtype}")
    return vector(x, unbacked("masked_select"))


device_rule("masked_select_backward")(lambda grad, x, mask: Spec(x.shape, preserved_strides(x), 0, x.dtype, x.device))
shape("_unsafe_masked_index")(lambda x, mask, indices, fill: RULES[torch.ops.aten.index.Tensor](x, indices).shape)
shape("_unsafe_masked_index_put_accumulate")(as_first)
