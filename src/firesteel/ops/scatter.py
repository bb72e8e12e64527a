"""Writing where data says: index_put, scatter, index_add and their kind."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel.graph.meta import as_third
from firesteel.graph.rules.base import RULES, broadcast, check, expands_to, wrap_dim
from firesteel.graph.rules.refusals import fits_in, surely_holds
from firesteel.graph.sizes import must_match
from firesteel.graph.spec import Shape, Spec, fresh, like
from firesteel.loops.lower.build import Builder, broadcast_index
from firesteel.loops.lower.pointwise import times
from firesteel.loops.lower.value import Body, Index, Operand
from firesteel.loops.scalars import SHORT, S, compute_dtype, number, to
from firesteel.ops.block import device_rule, loop_lowering, operator, refuses, rule, shape
from firesteel.ops.index import (
    MASKS,
    adds_by_library,
    is_index,
    is_vector_index,
    no_larger,
    of_source_dtype,
    place_at,
    places_of,
    refuse_are_indices,
    same_rank,
)
from firesteel.sym.expr import product

operator("scatter_add.* index_put.* index_add.* scatter_reduce.*", library=True)
operator("index_put.*", recompute="move")


def _written(b: Builder, out: Any, x: Operand, shape: Shape, where: Callable[[Index], Index], body: Body, add: bool = False) -> Operand:
    """A copy of x in which body(i) is written to where(i), or added to what is there, for every i of `shape`."""
    if add:
        return b.added(out, x.load, shape, where, body)
    result = b.copy(x, out)
    b.store_into(result.buffer, shape, where, body)
    return result


# ---------------------------------------------------------------- index_put

@rule("index_put _unsafe_index_put")
def index_put(x: Spec, indices: Sequence[Spec | None], values: Spec, accumulate: bool = False) -> Spec:
    check(x.dtype is values.dtype, f"Index put requires the source and destination dtypes match, got {x.dtype} for the destination and "
          f"{values.dtype} for the source.")
    return like(x)


@refuses("index_put _unsafe_index_put")
def refuse_index_put(x: Spec, indices: Sequence[Spec | None], values: Spec, accumulate: bool = False) -> None:
    refuse_are_indices(x, indices)
    if not any(i is not None and i.dtype in MASKS for i in indices):
        shape = RULES[torch.ops.aten.index.Tensor](x, indices).shape
        check(expands_to(values.shape, shape),
              f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of shape {list(shape)}")


@loop_lowering("index_put _unsafe_index_put")
def lower_index_put(b: Builder, out: Any, x: Operand, indices: Sequence[Operand | None], values: Operand, accumulate: bool = False) -> Any:
    row = x.shape[-1] if len(indices) < len(x.shape) or indices and indices[-1] is None else 0
    if accumulate and adds_by_library(out, row):
        return NotImplemented
    masked = _masked_put(b, out, x, indices, values, accumulate)
    places = places_of(x, indices) if masked is None else None
    if places is None:
        return masked if masked is not None else NotImplemented
    return _written(b, out, x, places.result_shape(), places.of, lambda i: values.load(broadcast_index(i, values.shape)), accumulate)


def _masked_put(b: Builder, out: Any, x: Operand, indices: Sequence[Operand | None], values: Operand, accumulate: bool) -> Operand | None:
    """x[mask] = one value is a `where`: no positions are needed."""
    if len(indices) != 1 or indices[0] is None or indices[0].dtype != "bool" or values.shape not in ((), (1,)) or accumulate:
        return None
    mask, rank, dtype = indices[0], len(indices[0].shape), SHORT[out.dtype]
    return b.map(out, lambda i: S.where(mask.load(i[:rank]), to(values.load((0,) * len(values.shape)), dtype), x.load(i)))


# ---------------------------------------------------------------- along a dimension

device_rule("scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add scatter_reduce.two index_add index_copy index_reduce")(
    lambda x, *args, **kwargs: fresh(x))


@refuses("scatter.src scatter.reduce scatter_add scatter_reduce.two scatter.value scatter.value_reduce")
def refuse_scatter(x: Spec, dim: int, index: Spec, src: Any, reduce: str | None = None, **options: Any) -> None:
    is_index(index, "scatter")
    place = wrap_dim(dim, len(x.shape))
    same_rank(index, x, "self")
    no_larger(index, x, place, "self")
    if type(src) is Spec:
        same_rank(index, src, "src")
        no_larger(index, src, None, "src")
        check(src.dtype is x.dtype, "scatter(): Expected self.dtype to be equal to src.dtype")
    else:
        fits_in(src, x.dtype)


loop_lowering("scatter.src scatter.value")(lambda b, out, x, dim, indices, value: _scatter(b, out, x, dim, indices, value, add=False))
loop_lowering("scatter_add")(lambda b, out, x, dim, indices, value: _scatter(b, out, x, dim, indices, value, add=True))


def _scatter(b: Builder, out: Any, x: Operand, dim: int, indices: Operand, value: Any, add: bool) -> Any:
    """out[.., indices[i], ..] = value[i] for every i of the index tensor's shape."""
    ranks = {len(t.shape) for t in (x, indices, value) if type(t) is Operand}
    if not x.shape or len(ranks) > 1 or (add and adds_by_library(out)):
        return NotImplemented
    dim = dim + len(x.shape) if dim < 0 else dim
    element = value.load if type(value) is Operand else lambda i: number(value, SHORT[out.dtype])
    return _written(b, out, x, indices.shape, lambda i: (*i[:dim], place_at(indices, i, x.shape[dim], strict=True), *i[dim + 1:]), element, add)


@refuses("index_add index_reduce")
def refuse_index_add(x: Spec, dim: int, index: Spec, source: Spec, *rest: Any, **options: Any) -> None:
    is_vector_index(index, "index_add")
    of_source_dtype(x, source, "index_add")
    place = wrap_dim(dim, len(x.shape))
    message = "source tensor shape must match self tensor shape, excluding the specified dimension."
    check(len(x.shape) == len(source.shape) or not x.shape or not source.shape, message)
    for d, (a, b) in enumerate(zip(x.shape, source.shape)):
        if d != place:
            must_match(a, b, message)
    if source.shape:
        must_match(index.numel(), source.shape[place], "index_add_(): Number of indices should be equal to source.size(dim)")


@loop_lowering("index_add")
def lower_index_add(b: Builder, out: Any, x: Operand, dim: int, indices: Operand, source: Operand, alpha: Any = 1) -> Any:
    rank = len(x.shape)
    dim = dim + rank if dim < 0 else dim
    if len(indices.shape) != 1 or len(source.shape) != rank or rank < 1 or adds_by_library(out, x.shape[-1] if dim < rank - 1 else 0):
        return NotImplemented
    return _written(b, out, x, source.shape, lambda i: (*i[:dim], place_at(indices, (i[dim],), x.shape[dim], strict=True), *i[dim + 1:]),
                    lambda i: times(to(source.load(i), compute_dtype(source.dtype)), alpha), add=True)


@refuses("index_copy")
def refuse_index_copy(x: Spec, dim: int, index: Spec, source: Spec) -> None:
    is_vector_index(index, "index_copy", (torch.int64,))
    of_source_dtype(x, source, "index_copy")
    place = wrap_dim(dim, len(x.shape))
    check(len(x.shape) == len(source.shape) or not x.shape or not source.shape,
          "index_copy_(): When source and destination are not scalars, their dimensionality must match.")
    for d, (a, b) in enumerate(zip(x.shape, source.shape)):
        if d != place:
            must_match(a, b, "index_copy_(): Source/destination tensor must have same slice shapes.")
    must_match(index.numel(), source.shape[place] if source.shape else 1, "index_copy_(): Number of indices should be equal to source.size(dim)")


@loop_lowering("index_copy")
def lower_index_copy(b: Builder, out: Any, x: Operand, dim: int, indices: Operand, source: Operand) -> Any:
    if not x.shape or not source.shape or len(indices.shape) != 1:
        return NotImplemented
    dim = dim + len(x.shape) if dim < 0 else dim
    return _written(b, out, x, source.shape, lambda i: (*i[:dim], place_at(indices, (i[dim],), x.shape[dim], strict=True), *i[dim + 1:]), source.load)


device_rule("index_fill.int_Scalar index_fill.int_Tensor put")(lambda x, *args, **kwargs: like(x))


@refuses("index_fill.int_Scalar")
def refuse_index_fill(x: Spec, dim: int, index: Spec, value: Any) -> None:
    check(len(index.shape) <= 1, "Index has to be a vector/scalar")
    check(index.dtype is torch.int64, "index_fill_(): Expected dtype int64 for index.")
    fits_in(value, x.dtype)
    wrap_dim(dim, len(x.shape))


@refuses("index_fill.int_Tensor")
def refuse_index_fill_tensor(x: Spec, dim: int, index: Spec, value: Spec) -> None:
    check(not value.shape, "index_fill_ only supports a 0-dimensional value tensor")
    refuse_index_fill(x, dim, index, None)
    surely_holds(value, x.dtype)


@loop_lowering("index_fill.int_Scalar index_fill.int_Tensor")
def lower_index_fill(b: Builder, out: Any, x: Operand, dim: int, indices: Operand, value: Any) -> Any:
    if not x.shape or len(indices.shape) != 1:
        return NotImplemented
    dim, dtype = dim + len(x.shape) if dim < 0 else dim, SHORT[out.dtype]
    shape = (*x.shape[:dim], indices.shape[0], *x.shape[dim + 1:])
    return _written(b, out, x, shape, lambda i: (*i[:dim], place_at(indices, (i[dim],), x.shape[dim]), *i[dim + 1:]),
                    lambda i: value.load(()) if type(value) is Operand else number(value, dtype))


@refuses("put")
def refuse_put(x: Spec, index: Spec, source: Spec, accumulate: bool = False) -> None:
    check(index.dtype is torch.int64, f"put_(): Expected a long tensor for index, but got {index.dtype}")
    of_source_dtype(x, source, "put_")
    must_match(product(index.shape), product(source.shape), "put_(): Expected source and index to have the same number of elements")


@shape("segment_reduce")
def segment_reduce(x: Spec, reduce: str, *, lengths: Spec | None = None, indices: Spec | None = None, offsets: Spec | None = None, axis: int = 0,
                   unsafe: bool = False, initial: Any = None) -> Shape:
    if lengths is not None:
        segments = lengths.shape
    else:
        assert offsets is not None      # the kernel refuses other calls
        segments = (*offsets.shape[:-1], offsets.shape[-1] - 1)
    return *segments, *x.shape[wrap_dim(axis, len(x.shape)) + 1:]


shape("_segment_reduce_backward")(as_third)


# ---------------------------------------------------------------- masks

device_rule("masked_scatter")(lambda x, mask, source: fresh(x, broadcast(x.shape, mask.shape)))


@refuses("masked_scatter")
def refuse_masked_scatter(x: Spec, mask: Spec, source: Spec) -> None:
    check(mask.dtype is torch.bool, f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    check(x.dtype is source.dtype, "masked_scatter: expected self and source to have same dtypes")


shape("masked_scatter_backward")(lambda grad, mask, sizes: tuple(sizes))
