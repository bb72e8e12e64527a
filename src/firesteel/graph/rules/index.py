"""Rules of indexing, gathering, scattering, joining and padding."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firesteel.graph.rules.base import broadcast, broadcast_all, check, promote, rule, wrap_dim
from firesteel.graph.rules.data import masked_places
from firesteel.graph.rules.views import transpose
from firesteel.graph.sizes import must, must_match, unbacked, where_known
from firesteel.graph.spec import (
    Shape,
    Spec,
    channels_last_strides,
    contiguous_strides,
    elementwise_order,
    fresh,
    like,
    preserved_strides,
    strides_in_order,
    suggests_channels_last,
)
from firesteel.sym.expr import Size, ge

# ---------------------------------------------------------------- index

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
        if i is not None:
            padded_shape = (*(1,) * len(before), *(1,) * (len(joint) - len(i.shape)), *i.shape, *(1,) * len(after))
            padded = (*(0,) * len(before), *(0,) * (len(joint) - len(i.shape)), *i.strides, *(0,) * len(after))
            operands.append(Spec(padded_shape, padded, 0, i.dtype, i.device))
    order = where_known(elementwise_order, shape, operands, shape=shape)
    return strides_in_order(shape, elementwise_order(shape, operands) if order is None else order)


@rule("index_put _unsafe_index_put")
def index_put(x: Spec, indices: Sequence[Spec | None], values: Spec, accumulate: bool = False) -> Spec:
    check(x.dtype is values.dtype, f"Index put requires the source and destination dtypes match, got {x.dtype} for the destination and "
          f"{values.dtype} for the source.")
    return like(x)


@rule("index_select")
def index_select(x: Spec, dim: int, index: Spec) -> Spec:
    check(len(index.shape) <= 1, "index_select(): Index is supposed to be a vector")
    if not x.shape:
        return fresh(x)
    dim = wrap_dim(dim, len(x.shape))
    return fresh(x, (*x.shape[:dim], index.numel(), *x.shape[dim + 1:]))


@rule("gather")
def gather(x: Spec, dim: int, index: Spec, *, sparse_grad: bool = False) -> Spec:
    wrap_dim(dim, len(x.shape))
    check(len(x.shape) == len(index.shape) or not x.shape or not index.shape or 0 in index.shape,
          "Index tensor must have the same number of dimensions as input tensor")
    check(index.dtype in (torch.int64, torch.int32) or 0 in index.shape, "gather(): Expected dtype int64 for index")
    return fresh(x, index.shape)


@rule("scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add scatter_reduce.two index_add index_copy index_reduce")
def scatter(x: Spec, *args: Any, **kwargs: Any) -> Spec:
    return fresh(x)


@rule("index_fill.int_Scalar index_fill.int_Tensor put")
def index_fill(x: Spec, *args: Any, **kwargs: Any) -> Spec:
    return like(x)


@rule("masked_scatter")
def masked_scatter(x: Spec, mask: Spec, source: Spec) -> Spec:
    return fresh(x, broadcast(x.shape, mask.shape))


@rule("take")
def take(x: Spec, index: Spec) -> Spec:
    return fresh(x, index.shape)


@rule("embedding")
def embedding(weight: Spec, indices: Spec, padding_idx: Any = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> Spec:
    check(len(weight.shape) == 2, "'weight' must be 2-D")
    check(indices.dtype in (torch.int64, torch.int32), "indices must be integers of 64 or 32 bits")
    return fresh(weight, (*indices.shape, weight.shape[1]))


@rule("embedding_dense_backward")
def embedding_dense_backward(grad: Spec, indices: Spec, num_weights: Size, padding_idx: Any, scale: bool) -> Spec:
    return fresh(grad, (num_weights, grad.shape[-1]))


@rule("bucketize.Tensor")
def bucketize(x: Spec, boundaries: Spec, *, out_int32: bool = False, right: bool = False) -> Spec:
    return fresh(x, dtype=torch.int32 if out_int32 else torch.int64)


@rule("searchsorted.Tensor")
def searchsorted(boundaries: Spec, x: Spec, *, out_int32: bool = False, right: bool = False, side=None, sorter=None) -> Spec:
    return fresh(x, dtype=torch.int32 if out_int32 else torch.int64)


# ---------------------------------------------------------------- joining

@rule("cat")
def cat(tensors: Sequence[Spec], dim: int = 0) -> Spec:
    check(len(tensors) > 0, "expected a non-empty list of Tensors")
    dtype: Any = None
    for t in tensors:
        dtype = promote(dtype, t.dtype)
    parts = [t for t in tensors if not (len(t.shape) == 1 and type(t.shape[0]) is int and t.shape[0] == 0)]
    if not parts:
        return fresh(tensors[0], (0,), dtype)
    first = parts[0]
    check(len(first.shape) > 0, "zero-dimensional tensor (at position 0) cannot be concatenated")
    dim = wrap_dim(dim, len(first.shape))
    total: Size = 0
    for number, t in enumerate(parts):
        check(len(t.shape) == len(first.shape),
              f"Expected {len(first.shape)}-D tensors, but got {len(t.shape)}-D for tensor number {number} in the list")
        message = f"Sizes of tensors must match except in dimension {dim}. Expected {first.shape} but got {t.shape}."
        for d, (a, b) in enumerate(zip(t.shape, first.shape)):
            if d != dim:
                must_match(a, b, message)
        total = total + t.shape[dim]
    shape = (*first.shape[:dim], total, *first.shape[dim + 1:])
    last = len(shape) in (4, 5) and all(suggests_channels_last(t) for t in tensors)
    return Spec(shape, channels_last_strides(shape) if last else contiguous_strides(shape), 0, dtype, first.device)


@rule("stack")
def stack(tensors: Sequence[Spec], dim: int = 0) -> Spec:
    check(len(tensors) > 0, "stack expects a non-empty TensorList")
    first, dtype = tensors[0], None
    dim = wrap_dim(dim, len(first.shape) + 1)
    for t in tensors:
        message = f"stack expects each tensor to be equal size, but got {first.shape} and {t.shape}"
        check(len(t.shape) == len(first.shape), message)
        for a, b in zip(t.shape, first.shape):
            must_match(a, b, message)
        dtype = promote(dtype, t.dtype)
    return fresh(first, (*first.shape[:dim], len(tensors), *first.shape[dim:]), dtype)


@rule("repeat")
def repeat(x: Spec, repeats: Sequence[Size]) -> Spec:
    check(len(repeats) >= len(x.shape), "Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor")
    padded = (1,) * (len(repeats) - len(x.shape)) + x.shape
    return fresh(x, tuple(a * b for a, b in zip(padded, repeats)))


@rule("repeat_interleave.Tensor")
def repeat_interleave(repeats: Spec, *, output_size: Size | None = None) -> Spec:
    return fresh(repeats, (unbacked("repeat_interleave") if output_size is None else output_size,), torch.int64)


@rule("roll")
def roll(x: Spec, shifts: Any, dims: Sequence[int] = ()) -> Spec:
    """On the CPU two parts are joined."""
    joined = len(x.shape) in (4, 5) and len(dims) > 0 and x.device.type == "cpu" and suggests_channels_last(x)
    return like(x, memory_format=torch.channels_last if len(x.shape) == 4 else torch.channels_last_3d) if joined else fresh(x)


@rule("flip")
def flip(x: Spec, dims: Sequence[int]) -> Spec:
    return like(x)


@rule("rot90")
def rot90(x: Spec, k: int = 1, dims: Sequence[int] = (0, 1)) -> Spec:
    a, b = (wrap_dim(d, len(x.shape)) for d in dims)
    if k % 4 == 0:
        return fresh(x)
    flipped = like(x)
    return transpose(flipped, a, b) if k % 2 else flipped


# ---------------------------------------------------------------- padding

@rule("constant_pad_nd")
def constant_pad_nd(x: Spec, pad: Sequence[Size], value: Any = 0) -> Spec:
    check(len(pad) % 2 == 0 and len(pad) // 2 <= len(x.shape), f"Length of pad must be even and at most twice the dimensions, got {len(pad)}")
    shape = list(x.shape)
    only_cuts = True
    for i in range(len(pad) // 2):
        d = len(shape) - 1 - i
        only_cuts = only_cuts and all(type(p) is int and p <= 0 for p in pad[2 * i:2 * i + 2])
        shape[d] = shape[d] + pad[2 * i] + pad[2 * i + 1]
        must(ge(shape[d], 0), f"The input size {x.shape[d]}, plus negative padding, resulted in a negative output size")
    if only_cuts and pad:       # a copy of a slice
        return like(x._replace(shape=tuple(shape)))
    spec = fresh(x, tuple(shape))
    return like(spec, memory_format=torch.channels_last) if len(shape) == 4 and suggests_channels_last(x) else spec


@rule("reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d")
def edge_pad(x: Spec, pad: Sequence[Size]) -> Spec:
    shape = list(x.shape)
    for i in range(len(pad) // 2):
        d = len(shape) - 1 - i
        shape[d] = shape[d] + pad[2 * i] + pad[2 * i + 1]
    spec = fresh(x, tuple(shape))
    return like(spec, memory_format=torch.channels_last) if len(shape) == 4 and suggests_channels_last(x) else spec


@rule("""reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
         replication_pad2d_backward replication_pad3d_backward""")
def edge_pad_backward(grad: Spec, x: Spec, pad: Sequence[Size]) -> Spec:
    return like(fresh(x), memory_format=torch.channels_last) if len(x.shape) == 4 and suggests_channels_last(x) else fresh(x)


@rule("pixel_shuffle")
def pixel_shuffle(x: Spec, factor: int) -> Spec:
    *batch, c, h, w = x.shape
    return fresh(x, (*batch, c // (factor * factor), h * factor, w * factor))


@rule("pixel_unshuffle")
def pixel_unshuffle(x: Spec, factor: int) -> Spec:
    *batch, c, h, w = x.shape
    return fresh(x, (*batch, c * factor * factor, h // factor, w // factor))


@rule("masked_select_backward")
def masked_select_backward(grad: Spec, x: Spec, mask: Spec) -> Spec:
    return Spec(x.shape, preserved_strides(x), 0, x.dtype, x.device)
