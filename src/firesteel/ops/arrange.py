"""Tensors concatenated or rearranged by position: cat, stack, pad, flip, roll, repeat, triangles.

Each element of the result comes from one of several inputs, chosen by its index alone: a masked load from each."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import as_suggested, positions, shaped, wrap
from firesteel.graph.rules.base import check, each, promote, suggested, wrap_dim, wrap_dims
from firesteel.graph.rules.refusals import fits_in, within
from firesteel.graph.sizes import must, must_match, same, unbacked, unknown
from firesteel.graph.spec import Shape, Spec, channels_last_strides, contiguous_strides, fresh, is_empty, like, suggests_channels_last
from firesteel.graph.tensor import to_spec
from firesteel.loops import cost
from firesteel.loops.lower.build import Builder, choose, fits, moved
from firesteel.loops.lower.value import Index, Operand
from firesteel.loops.lower.views import reshape_index
from firesteel.loops.scalars import SHORT, literal, number, to
from firesteel.ops.block import decomposition, device_rule, loop_lowering, lowering, operator, refuses, rule, shape
from firesteel.ops.views import transpose, view
from firesteel.sym.expr import Expr, Size, and_, as_expr, eq, ge, le, lt, min_, ne, product
from firesteel.targets import on_host

aten = torch.ops.aten

operator("cat.* stack.* constant_pad_nd.* flip.* roll.* repeat.* tril.* triu.* reflection_pad1d.* reflection_pad2d.* "
         "replication_pad1d.* replication_pad2d.* pixel_shuffle.* pixel_unshuffle.* channel_shuffle.*", recompute="move")


# ---------------------------------------------------------------- joining

@device_rule("cat")
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
    for place, t in enumerate(parts):
        check(len(t.shape) == len(first.shape),
              f"Expected {len(first.shape)}-D tensors, but got {len(t.shape)}-D for tensor number {place} in the list")
        message = f"Sizes of tensors must match except in dimension {dim}. Expected {first.shape} but got {t.shape}."
        for d, (a, b) in enumerate(zip(t.shape, first.shape)):
            if d != dim:
                must_match(a, b, message)
        total = total + t.shape[dim]
    shape = (*first.shape[:dim], total, *first.shape[dim + 1:])
    last = len(shape) in (4, 5) and all(suggests_channels_last(t) for t in tensors)
    return Spec(shape, channels_last_strides(shape) if last else contiguous_strides(shape), 0, dtype, first.device)


operator("concat.*", library=True)      # a cat that is one copy by the library: graph/sums.py
CAT_BY_MASK = 4     # so many inputs of a cat are chosen among for each element; more are written one after the other


@lowering("cat")
def lower_cat(b: Builder, out: Any, tensors: Sequence[Operand], dim: int = 0) -> Any:
    tensors = [t for t in tensors if t.shape != (0,)]       # eager skips these, whatever the others' rank
    if not fits(out, *tensors) or not tensors:
        return NotImplemented
    dim = dim + len(out.shape) if dim < 0 else dim
    parts = [b.readable(t) for t in tensors]
    short = type(out.shape[dim]) is int and dim == len(out.shape) - 1 and out.shape[dim] <= cost.SHORT_ROW
    return _cat_by_mask(b, out, parts, dim) if short or len(parts) <= CAT_BY_MASK else _cat_by_parts(b, out, parts, dim)


def _cat_by_mask(b: Builder, out: Any, parts: list[Operand], dim: int) -> Operand:
    dtype = SHORT[out.dtype]

    def element(i: Index) -> Expr:
        end = out.shape[dim]
        value: Expr = literal(0, dtype)
        for n, part in reversed(list(enumerate(parts))):        # by number: one tensor may be several parts
            start = end - part.shape[dim]
            inside = lt(as_expr(i[dim]), end) if n < len(parts) - 1 else True
            inside = and_(inside, ge(as_expr(i[dim]), start)) if n > 0 else inside
            value = choose(inside, part, moved(i, dim, start), value, dtype)
            end = start
        return value
    return b.map(out, element)


def _cat_by_parts(b: Builder, out: Any, parts: list[Operand], dim: int) -> Operand:
    buffer, dtype = b.buffer(out), SHORT[out.dtype]
    start: Size = 0
    for part in parts:
        b.store_into(buffer, part.shape, lambda i: moved(i, dim, -start), lambda i: to(part.load(i), dtype))
        start = start + part.shape[dim]
    return Operand.of(buffer, out)


@shape("_chunk_cat")
def chunk_cat(tensors: Sequence[Spec], dim: int, chunks: int) -> Shape:
    """Each tensor is cut into chunks, the last one filled up; the chunks of one number are flattened and stand side by side."""
    dim = wrap_dim(dim, len(tensors[0].shape))
    return (*tensors[0].shape[:dim], chunks, sum((-(-t.shape[dim] // chunks) * product(t.shape[dim + 1:]) for t in tensors), 0))


@device_rule("block_diag")
def block_diag(tensors: Sequence[Spec]) -> Spec:
    blocks, dtype = [(1, 1, *t.shape)[-2:] for t in tensors], None
    for place, t in enumerate(tensors):
        check(len(t.shape) <= 2, f"torch.block_diag: Input tensors must have 2 or fewer dimensions. Input {place} has {len(t.shape)} dimensions")
        dtype = promote(dtype, t.dtype)
    return fresh(tensors[0], tuple(sum(sizes[1:], sizes[0]) for sizes in zip(*blocks)), dtype)


@device_rule("stack")
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
    shape = (*first.shape[:dim], len(tensors), *first.shape[dim:])
    return fresh(first, shape, dtype) if dim == len(first.shape) else view(cat(tensors, dim), shape)


@decomposition("stack")
def decompose_stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Joined along the dimension behind the new one, which keeps eager's strides: those of channels-last where all tensors have them."""
    first = tensors[0]
    dim = wrap(dim, first.dim() + 1)
    if dim < first.dim():
        return aten.view.default(aten.cat.default(list(tensors), dim), [*first.shape[:dim], len(tensors), *first.shape[dim:]])
    return aten.cat.default([aten.unsqueeze.default(t, dim) for t in tensors], dim)


# ---------------------------------------------------------------- the same elements elsewhere

@device_rule("repeat")
def repeat(x: Spec, repeats: Sequence[Size]) -> Spec:
    check(len(repeats) >= len(x.shape), "Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor")
    padded = (1,) * (len(repeats) - len(x.shape)) + x.shape
    return fresh(x, tuple(a * b for a, b in zip(padded, repeats)))


@refuses("repeat")
def refuse_repeat(x: Spec, repeats: Sequence[Size]) -> None:
    for n in repeats:
        within(n, 0, None, f"Trying to create tensor with negative dimension: repeats {list(repeats)}")


@loop_lowering("repeat")
def lower_repeat(b: Builder, out: Any, x: Operand, repeats: Sequence[Size]) -> Any:
    if 0 in x.shape:
        return NotImplemented
    drop = len(repeats) - len(x.shape)
    times = repeats[drop:]
    return b.map(out, lambda i: x.load(tuple([0 if n == 1 else k if r == 1 else k % n for k, n, r in zip(i[drop:], x.shape, times)])))


@device_rule("repeat_interleave.Tensor")
def repeat_interleave(repeats: Spec, *, output_size: Size | None = None) -> Spec:
    return fresh(repeats, (unbacked("repeat_interleave") if output_size is None else output_size,), torch.int64)


@device_rule("roll")
def roll(x: Spec, shifts: Any, dims: Sequence[int] = ()) -> Spec:
    """On the CPU two parts are joined, of which an empty one is never channels-last; an empty tensor is cloned."""
    if is_empty(x):
        return like(x)
    joined = len(x.shape) in (4, 5) and len(dims) > 0 and on_host(x) and suggests_channels_last(x)
    joined = joined and not any(same(by % x.shape[d], 0) for by, d in zip(each(shifts, 1), dims))
    return like(x, memory_format=torch.channels_last if len(x.shape) == 4 else torch.channels_last_3d) if joined else fresh(x)


HALVES = (torch.float16, torch.bfloat16)


@refuses("roll")
def refuse_roll(x: Spec, shifts: Any, dims: Sequence[int] = ()) -> None:
    shifts, dims = each(shifts, 1), each(dims, 1)
    check(len(shifts) > 0, "`shifts` required")
    casts = x.dtype in HALVES and on_host(x) and torch.is_autocast_enabled(x.device.type)      # eager's kernel for the host calls cat
    check(not casts or x.dtype is torch.get_autocast_dtype(x.device.type), "Unexpected floating ScalarType in at::autocast::prioritize")
    if not dims and len(shifts) == 1:
        return
    check(len(shifts) == len(dims), f"shifts and dimensions must align. shifts: {len(shifts)}, dims:{len(dims)}")
    if 0 in x.shape and len(dims) == 1:
        return
    for dim in dims:
        if not x.shape:
            raise IndexError(f"Dimension specified as {dim} but tensor has no dimensions")
        wrap_dim(dim, len(x.shape))


@loop_lowering("roll")
def lower_roll(b: Builder, out: Any, x: Operand, shifts: Any, dims: Any = ()) -> Any:
    dims, shifts, rank = each(dims, 1), each(shifts, 1), len(x.shape)
    if 0 in x.shape:
        return NotImplemented
    if not dims:        # rolled as one long row
        count = product(x.shape)
        row, place = reshape_index(tuple(out.shape), (count,)), reshape_index((count,), tuple(out.shape))
        return b.map(out, lambda i: x.load(row(((place(i)[0] - shifts[0]) % count,))))
    by: dict[int, Size] = {}
    for d, s in zip(dims, shifts):
        by[d % rank] = by.get(d % rank, 0) + s
    return b.map(out, lambda i: x.load(tuple([(k - by[d]) % x.shape[d] if d in by else k for d, k in enumerate(i)])))


device_rule("flip")(lambda x, dims: like(x))


@refuses("flip")
def refuse_flip(x: Spec, dims: Sequence[int]) -> None:
    wrap_dims(dims, len(x.shape))


@loop_lowering("flip")
def lower_flip(b: Builder, out: Any, x: Operand, dims: Sequence[int]) -> Any:
    turned = {d % len(x.shape) for d in dims} if x.shape else set()
    return b.map(out, lambda i: x.load(tuple([n - 1 - k if d in turned and n != 1 else k for d, (k, n) in enumerate(zip(i, x.shape))])))


@device_rule("rot90")
def rot90(x: Spec, k: int = 1, dims: Sequence[int] = (0, 1)) -> Spec:
    a, b = (wrap_dim(d, len(x.shape)) for d in dims)
    if k % 4 == 0:
        return fresh(x)
    flipped = like(x)
    return transpose(flipped, a, b) if k % 2 else flipped


@refuses("rot90")
def refuse_rot90(x: Spec, k: int = 1, dims: Sequence[int] = (0, 1)) -> None:
    check(len(dims) == 2, f"expected total rotation dims == 2, but got dims = {len(dims)}")
    check(len(x.shape) >= 2, f"expected total dims >= 2, but got total dims = {len(x.shape)}")
    check(wrap_dim(dims[0], len(x.shape)) != wrap_dim(dims[1], len(x.shape)), "expected rotation dims to be different")


@loop_lowering("rot90")
def lower_rot90(b: Builder, out: Any, x: Operand, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    turns, first, second = k % 4, dims[0] % len(x.shape), dims[1] % len(x.shape)

    def element(i: Index) -> Expr:
        at = list(i)
        if turns % 2:
            at[first], at[second] = i[second], i[first]
        for d in (first, second):
            if turns == 2 or (turns == 1 and d == second) or (turns == 3 and d == first):
                at[d] = x.shape[d] - 1 - at[d]
        return x.load(tuple(at))
    return b.map(out, element)


def _as_suggested(x: Spec, shape: Shape) -> Spec:
    """The CPU's kernels keep channels-last."""
    return suggested(x, shape) if on_host(x) else fresh(x, shape)


def _laid_out(mixed: Tensor, shape: list[Any], x: Tensor) -> Tensor:
    made = shaped(aten.clone.default(mixed, memory_format=torch.contiguous_format), shape)
    return as_suggested(made, x) if on_host(x) else made


@device_rule("pixel_shuffle")
def pixel_shuffle(x: Spec, factor: int) -> Spec:
    *batch, c, h, w = x.shape
    return _as_suggested(x, (*batch, c // (factor * factor), h * factor, w * factor))


@refuses("pixel_shuffle")
def refuse_pixel_shuffle(x: Spec, factor: int) -> None:
    check(len(x.shape) >= 3, f"pixel_shuffle expects input to have at least 3 dimensions, but got input with {len(x.shape)} dimension(s)")
    within(factor, 1, None, f"pixel_shuffle expects a positive upscale_factor, but got {factor}")
    must(eq(x.shape[-3] % (factor * factor), 0), f"pixel_shuffle expects channels divisible by {factor} * {factor}, but got {x.shape[-3]}")


@decomposition("pixel_shuffle")
def decompose_pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    *batch, c, h, w = x.shape
    n = len(batch)
    split = shaped(x, [*batch, c // (factor * factor), factor, factor, h, w])
    mixed = aten.permute.default(split, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return _laid_out(mixed, [*batch, c // (factor * factor), h * factor, w * factor], x)


def _only_copied(x: Spec) -> bool:
    """Eager's CPU kernel of pixel_unshuffle copies an empty tensor as it is."""
    return on_host(x) and not unknown(x.numel()) and same(x.numel(), 0)


@device_rule("pixel_unshuffle")
def pixel_unshuffle(x: Spec, factor: int) -> Spec:
    if _only_copied(x):
        return like(x)
    *batch, c, h, w = x.shape
    return _as_suggested(x, (*batch, c * factor * factor, h // factor, w // factor))


@refuses("pixel_unshuffle")
def refuse_pixel_unshuffle(x: Spec, factor: int) -> None:
    check(len(x.shape) >= 3, f"pixel_unshuffle expects input to have at least 3 dimensions, but got input with {len(x.shape)} dimension(s)")
    within(factor, 1, None, f"pixel_unshuffle expects a positive downscale_factor, but got {factor}")
    for size in x.shape[-2:]:
        must(eq(size % factor, 0), f"pixel_unshuffle expects height and width divisible by {factor}, but got {list(x.shape)}")


@decomposition("pixel_unshuffle")
def decompose_pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    if _only_copied(to_spec(x)):
        return aten.clone.default(x)
    *batch, c, h, w = x.shape
    n = len(batch)
    split = shaped(x, [*batch, c, h // factor, factor, w // factor, factor])
    mixed = aten.permute.default(split, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return _laid_out(mixed, [*batch, c * factor * factor, h // factor, w // factor], x)


device_rule("channel_shuffle")(lambda x, groups: _as_suggested(x, x.shape))


@refuses("channel_shuffle")
def refuse_channel_shuffle(x: Spec, groups: int) -> None:
    check(len(x.shape) > 2, f"channel_shuffle expects input with > 2 dims, but got input with sizes {list(x.shape)}")
    within(groups, 1, None, f"Number of groups to divide channels in must be positive. Value of groups:{groups}")
    must(eq(x.shape[1] % groups, 0), f"Number of channels must be divisible by groups. Got {x.shape[1]} channels and {groups} groups.")


# ---------------------------------------------------------------- padding

@device_rule("constant_pad_nd")
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


@refuses("constant_pad_nd")
def refuse_constant_pad_nd(x: Spec, pad: Sequence[Size], value: Any = 0) -> None:
    """What is cut off, first from the left, must be there."""
    fits_in(value, x.dtype)
    for d, left, right in zip(range(len(x.shape) - 1, -1, -1), pad[::2], pad[1::2]):
        if any(type(p) is Expr or p < 0 for p in (left, right)):
            cut = x.shape[d] + _cut(left)
            within(cut, 0, None, "narrow(): length must be non-negative.")
            within(cut + _cut(right), 0, None, "narrow(): length must be non-negative.")


def _cut(padding: Size) -> Size:
    """Which sign it has is not asked: that would be a guard."""
    return min_(padding, 0) if type(padding) is Expr else min(padding, 0)


@loop_lowering("constant_pad_nd")
def lower_pad(b: Builder, out: Any, x: Operand, pad: Sequence[Size], value: Any = 0) -> Any:
    """`pad` is (before, after) for each dimension, the last first; negative numbers cut."""
    rank, dtype = len(x.shape), SHORT[out.dtype]
    before = {rank - 1 - n: pad[2 * n] for n in range(len(pad) // 2)}
    after = {rank - 1 - n: pad[2 * n + 1] for n in range(len(pad) // 2)}
    fill = number(value, dtype)

    def element(i: Index) -> Expr:
        at = tuple([k - before.get(d, 0) for d, k in enumerate(i)])
        inside: Any = True
        for d in before:
            if not (isinstance(before[d], int) and before[d] <= 0):
                inside = and_(inside, le(0, as_expr(at[d])))
            if not (isinstance(after[d], int) and after[d] <= 0):
                inside = and_(inside, lt(as_expr(at[d]), x.shape[d]))
        return choose(inside, x, at, fill, dtype)
    return b.map(out, element)


@device_rule("reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d")
def edge_pad(x: Spec, pad: Sequence[Size]) -> Spec:
    shape = list(x.shape)
    for i in range(len(pad) // 2):
        d = len(shape) - 1 - i
        shape[d] = shape[d] + pad[2 * i] + pad[2 * i + 1]
    spec = fresh(x, tuple(shape))
    return like(spec, memory_format=torch.channels_last) if len(shape) == 4 and suggests_channels_last(x) else spec


def _edges(n: int, reflects: bool, x: Spec, pad: Sequence[Size]) -> None:
    check(len(pad) == 2 * n, f"padding size is expected to be {2 * n}, but got: {len(pad)}")
    check(x.dtype is not torch.bool, f"padding not implemented for {x.dtype}")
    check(len(x.shape) in (n + 1, n + 2), f"Expected {n + 1}D or {n + 2}D (batch mode) tensor, but got: {list(x.shape)}")
    for size in x.shape[len(x.shape) - n - 1:]:
        must(ne(size, 0), f"Expected a tensor with possibly 0 batch size and other non-zero dimensions for input, but got: {list(x.shape)}")
    for d, left, right in zip(range(len(x.shape) - 1, -1, -1), pad[::2], pad[1::2]):
        if reflects:
            for p in (left, right):
                within(p, None, x.shape[d] - 1, f"Padding size should be less than the corresponding input dimension, but got: {list(pad)}")
        within(x.shape[d] + left + right, 1, None, f"input {list(x.shape)} is too small for the padding {list(pad)}")


for _n in (1, 2, 3):
    refuses(f"reflection_pad{_n}d")(functools.partial(_edges, _n, True))
    refuses(f"replication_pad{_n}d")(functools.partial(_edges, _n, False))


def _reflected(size: Any, low: Any, high: Any, x: Tensor) -> Tensor:
    """... 2 1 0 1 2 ... n-1 n-2 ..."""
    place = aten.abs.default(positions(size + low + high, x) - low)
    return (size - 1) - aten.abs.default((size - 1) - place)


def _clamped(size: Any, low: Any, high: Any, x: Tensor) -> Tensor:
    return aten.clamp.default(positions(size + low + high, x) - low, 0, size - 1)


def _pad_by(x: Tensor, pad: Sequence[Any], index: Any) -> Tensor:
    for i in range(len(pad) // 2):
        dim = x.dim() - 1 - i
        indices: list[Tensor | None] = [None] * dim
        x = aten.index.Tensor(x, [*indices, index(x.shape[dim], pad[2 * i], pad[2 * i + 1], x)])
    return x


decomposition("reflection_pad1d reflection_pad2d reflection_pad3d")(
    lambda x, pad: _pad_by(x, pad, _reflected) if x.is_contiguous() else NotImplemented)
decomposition("replication_pad1d replication_pad2d replication_pad3d")(
    lambda x, pad: _pad_by(x, pad, _clamped) if x.is_contiguous() else NotImplemented)
device_rule("""reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
        replication_pad2d_backward replication_pad3d_backward""")(
    lambda grad, x, pad: like(fresh(x), memory_format=torch.channels_last) if len(x.shape) == 4 and suggests_channels_last(x) else fresh(x))


# ---------------------------------------------------------------- triangles

@rule("tril triu")
def tril(x: Spec, diagonal: int = 0) -> Spec:
    check(len(x.shape) >= 2, "tril: input tensor must have at least 2 dimensions")
    return fresh(x)


loop_lowering("tril")(lambda b, out, x, diagonal=0: _triangle(b, out, x, lambda row, column: le(as_expr(column - row), diagonal)))
loop_lowering("triu")(lambda b, out, x, diagonal=0: _triangle(b, out, x, lambda row, column: ge(as_expr(column - row), diagonal)))


def _triangle(b: Builder, out: Any, x: Operand, kept: Any) -> Any:
    dtype = SHORT[out.dtype]
    return b.map(out, lambda i: choose(kept(i[-2], i[-1]), x, i, literal(0, dtype), dtype))
