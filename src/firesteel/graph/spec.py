"""Spec: what is known of a tensor without its data, and the layout questions that rules ask about it.

A Spec is a frozen record of shape, strides, storage offset (in elements), dtype and device.  Sizes are ints or Exprs.
Equal Specs are equal values, so a rule that changes nothing returns its argument.

    x = make_spec((2, 3), torch.float32, torch.device("cpu"))
    x.strides            # (3, 1)
    is_contiguous(x)     # True
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from firesteel.graph.sizes import layout_less as less
from firesteel.graph.sizes import layout_same as same
from firesteel.graph.sizes import product, static, where_known
from firesteel.sym import layout
from firesteel.sym.expr import Expr, Size, row_major
from firesteel.targets import HOST

Shape = tuple[Size, ...]


class Spec(NamedTuple):
    """What is known of a strided tensor without data."""
    shape: Shape
    strides: Shape
    offset: Size
    dtype: torch.dtype
    device: torch.device

    def numel(self) -> Size:
        return product(self.shape)

    def to(self, dtype: torch.dtype) -> Spec:
        return self if dtype is self.dtype else Spec(self.shape, self.strides, self.offset, dtype, self.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}@{list(self.strides)}"


@functools.cache
def contiguous_strides(shape: Shape) -> Shape:
    return row_major(shape)


def channels_last_strides(shape: Shape) -> Shape:
    """Strides of the channels-last format of a 4- or 5-dimensional shape."""
    order = (1, *range(len(shape) - 1, 1, -1), 0)
    return strides_in_order(shape, order)


def strides_in_order(shape: Shape, fastest_first: tuple[int, ...] | list[int]) -> Shape:
    """Dense strides in which the dimensions are laid out in the given order, fastest first.  Behind a size of 0 they are 0, as eager's are: row-major
    order alone counts it as 1."""
    strides: list[Size] = [1] * len(shape)
    step: Size = 1
    for dim in fastest_first:
        strides[dim] = step
        step = step * shape[dim]
    return tuple(strides)


def make_spec(shape: Shape, dtype: torch.dtype, device: torch.device) -> Spec:
    """A fresh contiguous tensor."""
    return Spec(shape, contiguous_strides(shape), 0, dtype, device)


def fresh(like: Spec, shape: Sequence[Size] | None = None, dtype: torch.dtype | None = None) -> Spec:
    """A fresh contiguous tensor on the device of `like`, with its shape and dtype unless others are given."""
    shape = like.shape if shape is None else tuple(shape)
    return Spec(shape, contiguous_strides(shape), 0, dtype or like.dtype, like.device)


def is_contiguous(spec: Spec) -> bool:
    return spec.strides == contiguous_strides(spec.shape) or follows(spec, spec.shape, range(len(spec.shape) - 1, -1, -1))


def is_channels_last(spec: Spec) -> bool:
    """Is the tensor in the channels-last format (4 or 5 dimensions)?"""
    ndim = len(spec.shape)
    if ndim not in (4, 5) or is_empty(spec):
        return False
    return follows(spec, spec.shape, (1, *range(ndim - 1, 1, -1), 0))


def suggests_channels_last(spec: Spec) -> bool:
    """Would eager's suggest_memory_format say channels-last?  Stricter about size-1 dimensions than the format itself."""
    ndim = len(spec.shape)
    if ndim not in (4, 5):
        return False
    least: Size = 0
    if same(spec.strides[1], 0):
        return False
    for dim in (1, *range(ndim - 1, 1, -1), 0):
        size, stride = spec.shape[dim], spec.strides[dim]
        if size == 0 or less(stride, least):
            return False
        if dim == 0 and same(least, spec.strides[1]):   # N111: ambiguous, and then contiguous is preferred
            return False
        least = stride * size
    return True


def only_channels_last(spec: Spec) -> bool:
    """Channels-last, dense or by suggestion, and not contiguous too."""
    return len(spec.shape) in (4, 5) and not is_contiguous(spec) and (is_channels_last(spec) or suggests_channels_last(spec))


def is_empty(spec: Spec) -> bool:
    """Has it a size that is known to be 0?  A symbol is not asked: that would be one more guard for every tensor."""
    return 0 in spec.shape


def follows(spec: Spec, shape: Shape, fastest_first) -> bool:
    """Are the strides dense in this order of dimensions?  Size-1 dimensions do not matter; an empty tensor always follows."""
    step: Size = 1
    for dim in fastest_first:
        size, stride = shape[dim], spec.strides[dim]
        if stride != step:      # else a size of 1 makes no difference, and is not asked for
            if same(size, 1):
                continue
            if not same(stride, step):
                return 0 in shape
        step = step * size
    return True


def differ_idly(a: Spec, b: Spec, env: Any) -> bool:
    """Have tensors of one shape other strides, of which no element depends: those of dimensions of size 1, or of an empty tensor?  Sizes are compared
    by what `env` has learnt."""
    if a.strides == b.strides:
        return False
    now = lambda sizes: [env.simplify(size) if type(size) is Expr else size for size in sizes]
    shape, other_shape, strides, others = map(now, (a.shape, b.shape, a.strides, b.strides))
    return strides != others and shape == other_shape and (is_empty(a) or all(s == t or n == 1 for n, s, t in zip(shape, strides, others)))


def dense_order(spec: Spec) -> list[int] | None:
    """Its dimensions, fastest first, if it is dense whatever the sizes are."""
    return layout.dense_order(range(len(spec.shape)), spec.shape, spec.strides)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which eager computes on values of this dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _surely_dense(spec: Spec) -> bool:
    return spec.strides == contiguous_strides(spec.shape) or dense_order(spec) is not None


def is_dense(spec: Spec) -> bool:
    """Non-overlapping and dense: some order of the dimensions covers the memory without holes."""
    return _surely_dense(spec) or layout.is_dense(spec.shape, spec.strides, same, less)


def repeats(spec: Spec) -> bool:
    """Has it a dimension of stride 0?"""
    return not is_empty(spec) and any(type(s) is int and s == 0 and not (type(n) is int and n == 1) for n, s in zip(spec.shape, spec.strides))


def overlaps_itself(spec: Spec) -> bool:
    """May it be self-overlapping?  No, where each stride steps over all that the smaller ones reach."""
    if _surely_dense(spec):
        return False
    reach: Size = 0
    for dim in sort_dims([d for d in range(len(spec.shape)) if not same(spec.shape[d], 1)], spec.strides):
        if not less(reach, spec.strides[dim]):
            return True
        reach = reach + (spec.shape[dim] - 1) * spec.strides[dim]
    return False


def sort_dims(dims: list[int], strides: Shape) -> list[int]:
    """Dimensions by increasing stride."""
    return layout.by_stride(dims, strides, less)


def preserved_strides(spec: Spec) -> Shape:
    """Strides of a fresh tensor "like" this one (memory format preserve): the same where dense, else in the same order."""
    if spec.strides == contiguous_strides(spec.shape) or is_dense(spec):
        return spec.strides
    return elementwise_strides(spec.shape, [spec])


def elementwise_strides(shape: Shape, operands: list[Spec]) -> Shape:
    """Strides of the fresh result of a pointwise operator.  Note [Pointwise strides]

    Eager's rule: contiguous operands of one shape give a contiguous result, channels-last ones a channels-last result,
    and dense operands with the same strides keep these.  Otherwise dimensions are ordered by the strides of the
    operands, an earlier operand before a later one, broadcast dimensions (stride 0) saying nothing, and the result is
    dense in that order.
    """
    contiguous = contiguous_strides(shape)
    if all(op.strides == contiguous_strides(op.shape) for op in operands) and 0 not in shape:
        return contiguous       # each operand puts its dimensions in this order, or says nothing of them
    row_major = list(range(len(shape) - 1, -1, -1))
    if not static(shape):       # fewer questions: operands in this order give a contiguous result by each of the ways below
        order = where_known(elementwise_order, shape, operands, shape=shape)
        if order is None and not all(map(_surely_dense, operands)):
            order = elementwise_order(shape, operands)
        if order == row_major:
            return contiguous
    if all(len(op.shape) == len(shape) and all(map(same, op.shape, shape)) for op in operands):
        strides = _same_shape_strides(shape, contiguous, operands)
        if strides is not None:
            return strides
    order = elementwise_order(shape, operands)
    return contiguous if order == row_major else strides_in_order(shape, order)


def _same_shape_strides(shape: Shape, contiguous: Shape, operands: list[Spec]) -> Shape | None:
    if all(is_contiguous(op) for op in operands):
        return contiguous
    if len(shape) == 4 and all(is_channels_last(op) for op in operands):      # eager asks this of four dimensions alone
        return channels_last_strides(shape)
    first = operands[0]
    if is_dense(first) and all(_equal_sizes(op.strides, first.strides) for op in operands[1:]):
        return first.strides
    return None


def _equal_sizes(a: Shape, b: Shape) -> bool:
    return a == b or (len(a) == len(b) and all(map(same, a, b)))


def elementwise_order(shape: Shape, operands: list[Spec]) -> list[int]:
    """The order of dimensions, fastest first, by insertion sort over the pairwise rule of Note [Pointwise strides]."""
    ndim = len(shape)
    rows = [_broadcast_strides(op, shape) for op in operands]
    order = list(range(ndim - 1, -1, -1))
    for i in range(1, ndim):
        moving = i
        for other in range(i - 1, -1, -1):
            verdict = _compare(order[other], order[moving], shape, rows)
            if verdict > 0:
                order[other], order[moving] = order[moving], order[other]
                moving = other
            elif verdict < 0:
                break
    return order


def _broadcast_strides(op: Spec, shape: Shape) -> Shape:
    missing = len(shape) - len(op.shape)
    return (0,) * missing + tuple(
        0 if (stride != 0 and size is not full and same(size, 1) and (type(full) is Expr or full != 1)) else stride
        for size, stride, full in zip(op.shape, op.strides, shape[missing:]))


def _compare(a: int, b: int, shape: Shape, rows: list[Shape]) -> int:
    """-1: dimension a is faster; 1: b is; 0: nothing says."""
    for strides in rows:
        x, y = strides[a], strides[b]
        if type(x) is Expr or type(y) is Expr:      # one around the other: their strides are equal only for an inner size of 1, with any stride
            if x == y * shape[b]:
                return 1
            if y == x * shape[a]:
                return -1
        if same(x, 0) or same(y, 0):
            continue
        if less(x, y):
            return -1
        if not same(x, y):
            return 1
        if less(shape[b], shape[a]):
            return 1
    return 0


def spec_of(tensor: torch.Tensor) -> Spec:
    """The Spec of a real tensor."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotImplementedError(f"a tensor of layout {tensor.layout} and dtype {tensor.dtype} has no abstract form")
    offset: Any = tensor.storage_offset()       # torch says it may be a SymInt; a real tensor's is a number
    return Spec(tuple(tensor.shape), tuple(tensor.stride()), offset, tensor.dtype, tensor.device)


def device_of(device: torch.device | str | int | None, default: torch.device) -> torch.device:
    """A device argument as a device with an index, as tensors report it."""
    if device is None:
        return default
    if type(device) is not torch.device:
        device = torch.device(device)
    if device.index is None and device.type not in (HOST.type, "meta"):
        index = default.index if default.type == device.type else None
        return torch.device(device.type, torch.accelerator.current_device_index() if index is None else index)
    return device


def like(x: Spec, *, dtype: torch.dtype | None = None, device=None, memory_format: torch.memory_format | None = None) -> Spec:
    """A fresh tensor of the shape of `x`, in the memory format asked for (None: preserve)."""
    if memory_format is None or memory_format is torch.preserve_format:
        strides = preserved_strides(x)
    elif memory_format is torch.contiguous_format:
        strides = contiguous_strides(x.shape)
    else:
        rank = 4 if memory_format is torch.channels_last else 5
        if len(x.shape) != rank:
            raise RuntimeError(f"required rank {rank} tensor to use {str(memory_format).removeprefix('torch.')} format")
        strides = channels_last_strides(x.shape)
    return Spec(x.shape, strides, 0, dtype or x.dtype, device_of(device, x.device))
