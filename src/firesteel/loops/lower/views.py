"""Lowerings of views: an index map on the same buffer, never a loop nest.

A view's Spec says how it lies in the storage (for library calls and outputs); its index map says which element of the viewed
tensor an index means (for loads inside of nests).  Reshapes are split at the places where both shapes have the same
number of elements so far; only inside of such a group are indices multiplied out, and taken apart by // and %.

    view of x[4, 6, 5] as [24, 5]:  (i, j) -> (i // 6, i % 6, j)
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel.loops.lower.build import LOWERINGS, Builder
from firesteel.loops.lower.value import Index, IndexMap, Tensor
from firesteel.loops.ops import LOOP_DTYPES
from firesteel.sym.expr import Expr, Size, lt, max_, min_, product, row_major, sum_, where

aten = torch.ops.aten


def _dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


# ---------------------------------------------------------------- the same elements in another order

@LOWERINGS.row(aten.permute.default)
def lower_permute(b: Builder, out: Any, x: Tensor, dims: Sequence[int]) -> Tensor:
    rank = len(x.shape)
    place = {_dim(d, rank): n for n, d in enumerate(dims)}
    order = [place[d] for d in range(rank)]
    return x.through(out, lambda i: tuple([i[n] for n in order]))


@LOWERINGS.row(aten.transpose.int)
def lower_transpose(b: Builder, out: Any, x: Tensor, dim0: int, dim1: int) -> Tensor:
    dims = list(range(len(x.shape)))
    if dims:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return lower_permute(b, out, x, dims)


@LOWERINGS.row(aten.t.default, aten.numpy_T.default, aten.mT.default)
def lower_t(b: Builder, out: Any, x: Tensor) -> Tensor:
    rank = len(x.shape)
    return lower_permute(b, out, x, tuple(range(rank))[::-1] if rank <= 2 else (*range(rank - 2), rank - 1, rank - 2))


@LOWERINGS.row(aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.lift.default, aten.view_as.default,
               aten.resolve_conj.default, aten.resolve_neg.default)
def lower_alias(b: Builder, out: Any, x: Tensor, *_: Any) -> Tensor:
    return x


# ---------------------------------------------------------------- dimensions of size 1, and repeated ones

@LOWERINGS.row(aten.expand.default)
def lower_expand(b: Builder, out: Any, x: Tensor, sizes: Sequence[Size], implicit: bool = False) -> Tensor:
    drop = len(out.shape) - len(x.shape)
    if not drop and tuple(out.shape) == x.shape:
        return x
    kept = [n != 1 for n in x.shape]
    return x.through(out, lambda i: tuple([k if keep else 0 for keep, k in zip(kept, i[drop:])]))


@LOWERINGS.row(aten.unsqueeze.default)
def lower_unsqueeze(b: Builder, out: Any, x: Tensor, dim: int) -> Tensor:
    dim = _dim(dim, len(x.shape) + 1)
    return x.through(out, lambda i: i[:dim] + i[dim + 1:])


@LOWERINGS.row(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def lower_squeeze(b: Builder, out: Any, x: Tensor, dims: int | Sequence[int] | None = None) -> Tensor:
    rank = len(x.shape)
    if len(out.shape) == rank:
        return x
    asked = range(rank) if dims is None else {_dim(d, rank) for d in ([dims] if isinstance(dims, int) else dims)}
    gone = {d for d in asked if x.shape[d] == 1}

    def index(i: Index) -> Index:
        rest = iter(i)
        return tuple([0 if d in gone else next(rest) for d in range(rank)])
    return x.through(out, index)


# ---------------------------------------------------------------- reshapes

@LOWERINGS.row(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default, aten.flatten.using_ints)
def lower_view(b: Builder, out: Any, x: Tensor, *_: Any) -> Tensor:
    """A reshape of a reshape is one reshape.  Strided only if the layout really is a view of x's (`reshape` may copy)."""
    source = x.reshaped or x
    shape = tuple(out.shape)
    if source.shape == shape and source.spec.strides == out.strides:
        return source
    strided = x.strided and _is_view_of(out, x.spec)
    return source.through(out, reshape_index(source.shape, shape), strided, reshaped=source)


def _is_view_of(out: Any, spec: Any) -> bool:
    """Does reshaping the layout `spec` into out's shape give out's strides?  Only `reshape` of a tensor that no view
    fits can differ; then the Spec is contiguous while the original is not."""
    if tuple(spec.strides) == row_major(spec.shape):
        return True
    linear = reshape_index(tuple(spec.shape), tuple(out.shape))
    for dim, size in enumerate(out.shape):
        if isinstance(size, Expr):
            return tuple(out.strides) != row_major(out.shape)
        if size <= 1:
            continue
        for step in {1, size - 1}:
            at = linear(tuple(step if d == dim else 0 for d in range(len(out.shape))))
            if sum((i * s for i, s in zip(at, spec.strides)), 0) != step * out.strides[dim]:
                return False
    return True


def reshape_index(old: tuple[Size, ...], new: tuple[Size, ...]) -> IndexMap:
    """The map from an index of shape `new` to one of shape `old`, both of the same number of elements."""
    if 0 in old or 0 in new:
        return lambda i: (0,) * len(old)        # nothing is ever loaded
    parts = [_group_index(old, o, new, n) for o, n in _groups(old, new)]

    def index(i: Index) -> Index:
        result: list[Size] = [0] * len(old)
        for part in parts:
            part(i, result)
        return tuple(result)
    return index


def _groups(old: tuple[Size, ...], new: tuple[Size, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions (of size other than 1) with equal products, as short as they can be found."""
    old_dims, new_dims = [d for d, n in enumerate(old) if n != 1], [d for d, n in enumerate(new) if n != 1]
    old_ends, new_ends = _products(old, old_dims), _products(new, new_dims)
    new_at = {total: k for k, total in enumerate(new_ends)}
    groups: list[tuple[list[int], list[int]]] = []
    o = n = 0
    for k, total in enumerate(old_ends):
        end = new_at.get(total)
        if k + 1 == len(old_ends):
            end = len(new_ends) - 1
        if end is not None and end >= n:
            groups.append((old_dims[o:k + 1], new_dims[n:end + 1]))
            o, n = k + 1, end + 1
    return groups


def _products(shape: tuple[Size, ...], dims: list[int]) -> list[Size]:
    total: Size = 1
    result = []
    for d in dims:
        total = total * shape[d]
        result.append(total)
    return result


def _group_index(old: tuple[Size, ...], old_dims: list[int], new: tuple[Size, ...], new_dims: list[int]) -> Callable[[Index, list[Size]], None]:
    if len(old_dims) == len(new_dims) == 1:
        return lambda i, result: result.__setitem__(old_dims[0], i[new_dims[0]])

    def fill(i: Index, result: list[Size]) -> None:
        linear: Size = 0
        for d in new_dims:
            linear = linear * new[d] + i[d]
        for d in old_dims[:0:-1]:
            result[d] = linear % old[d]
            linear = linear // old[d]
        result[old_dims[0]] = linear
    return fill


# ---------------------------------------------------------------- parts

def first_place(b: Builder, start: Size | None, size: Size) -> Size:
    """Where a slice begins.  A start beyond the end makes the view empty: then nothing is loaded and it does not matter."""
    if start is None:
        return 0
    if b.is_negative(start) is None:        # only run time knows: the view may be one of memory, so it must begin inside
        return min_(max_(from_end(b, start, size), 0), size)
    return max_(size + start, 0) if b.is_negative(start) else start


def from_end(b: Builder, index: Size, size: Size) -> Size:
    """An index that counts from the end where it is negative."""
    negative = b.is_negative(index)
    if negative is None:
        return where(lt(index, 0), index + size, index)
    return index + size if negative else index


def _part(out: Any, x: Tensor, dim: int, start: Size, step: Size = 1, strided: bool = True) -> Tensor:
    if type(start) is int and start == 0 and step == 1 and tuple(out.shape) == x.shape:
        return x

    def index(i: Index) -> Index:
        at = i[dim] if step == 1 else i[dim] * step
        return (*i[:dim], at + start, *i[dim + 1:])
    return x.through(out, index, strided)


@LOWERINGS.row(aten.slice.Tensor)
def lower_slice(b: Builder, out: Any, x: Tensor, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1) -> Tensor:
    dim = _dim(dim, len(x.shape))
    return _part(out, x, dim, first_place(b, start, x.shape[dim]), step)


@LOWERINGS.row(aten.narrow.default)
def lower_narrow(b: Builder, out: Any, x: Tensor, dim: int, start: Size, length: Size) -> Tensor:
    dim = _dim(dim, len(x.shape))
    return _part(out, x, dim, first_place(b, start, x.shape[dim]))


@LOWERINGS.row(aten.select.int)
def lower_select(b: Builder, out: Any, x: Tensor, dim: int, index: Size) -> Tensor:
    dim = _dim(dim, len(x.shape))
    at = from_end(b, index, x.shape[dim])
    return x.through(out, lambda i: (*i[:dim], at, *i[dim:]))


@LOWERINGS.row(aten.unbind.int)
def lower_unbind(b: Builder, out: Any, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(lower_select(b, spec, x, dim, n) for n, spec in enumerate(out))


@LOWERINGS.row(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes, aten.tensor_split.sections,
               aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
def lower_split(b: Builder, out: Any, x: Tensor, sizes: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """However the sizes were given, the Specs say them.  The parts of `unsafe_split` need not lie in x's storage."""
    dim = _dim(dim, len(x.shape))
    parts: list[Tensor] = []
    start: Size = 0
    for spec in out:
        parts.append(_part(spec, x, dim, start, strided=spec.offset == x.spec.offset + start * x.spec.strides[dim]))
        start = start + spec.shape[dim]
    return tuple(parts)


@LOWERINGS.row(aten.diagonal.default)
def lower_diagonal(b: Builder, out: Any, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rank = len(x.shape)
    row, column = _dim(dim1, rank), _dim(dim2, rank)
    down, right = max(-offset, 0), max(offset, 0)

    def index(i: Index) -> Index:
        rest = iter(i[:-1])
        return tuple([i[-1] + down if d == row else i[-1] + right if d == column else next(rest) for d in range(rank)])
    return x.through(out, index)


@LOWERINGS.row(aten.unfold.default)
def lower_unfold(b: Builder, out: Any, x: Tensor, dim: int, size: int, step: int) -> Tensor:
    if not x.shape:
        return x.through(out, lambda i: ())
    dim = _dim(dim, len(x.shape))
    return x.through(out, lambda i: (*i[:dim], i[dim] * step + i[-1], *i[dim + 1:-1]))


# ---------------------------------------------------------------- any other window

def lower_window(b: Builder, out: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """A view of which only the Spec is known: as_strided, views as another dtype, views of operators without a row."""
    x = b.strided(x)
    if out.dtype is not x.spec.dtype:
        return Tensor(out, x.buffer, None, None, opaque=True)
    index = _window_index(out, x.buffer)
    return Tensor(out, x.buffer, index, None, opaque=index is None)


for _target in (aten.as_strided.default, aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default, aten.real.default):
    LOWERINGS.add(_target, lower_window)


def _window_index(out: Any, buffer: Any) -> IndexMap | None:
    """The window's place in the storage, taken apart again by the buffer's strides; None where these have gaps or overlap."""
    dims = _dense_order(buffer)
    start = out.offset - buffer.offset
    if dims is None or (buffer.kind in ("input", "constant") and not _stays_inside(out, start, product(buffer.shape))):
        return None

    def index(i: Index) -> Index:
        place = sum_([start, *(k * s for k, s in zip(i, out.strides))])
        result: list[Size] = [0] * len(buffer.shape)
        for n, d in enumerate(dims):
            at = place // buffer.strides[d]
            result[d] = at % buffer.shape[d] if n else at
        return tuple(result)
    return index


def _stays_inside(out: Any, start: Size, count: Size) -> bool:
    """Is the window known to lie within the tensor that was given?  Its storage may be larger on both sides."""
    last = sum_([start, *((n - 1) * s for n, s in zip(out.shape, out.strides))])
    return 0 in out.shape or all(isinstance(n, int) for n in (start, last, count)) and start >= 0 and last < count


def _dense_order(buffer: Any) -> list[int] | None:
    """The dimensions from the slowest to the fastest, if the buffer fills its storage without gaps."""
    left = [d for d, n in enumerate(buffer.shape) if n != 1]
    order: list[int] = []
    step: Size = 1
    while left:
        found = next((d for d in left if buffer.strides[d] == step), None)
        if found is None:
            return None
        left.remove(found)
        order.insert(0, found)
        step = step * buffer.shape[found]
    return order


# ---------------------------------------------------------------- views that are asked for as copies

def _copied(view: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of `<view>_copy`: the view's elements in memory of their own."""
    def lower(b: Builder, out: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in LOOP_DTYPES:
            return NotImplemented
        if hasattr(out, "strides"):
            return b.copy(view(b, out, x, *args, **kwargs), out)
        return tuple([b.copy(part, spec) for spec, part in zip(out, view(b, out, x, *args, **kwargs))])
    return lower


for _name in ("permute", "transpose.int", "t", "alias", "detach", "expand", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims", "view",
              "slice.Tensor", "select.int", "unbind.int", "split.Tensor", "split_with_sizes", "diagonal", "unfold"):
    _packet, _, _overload = _name.partition(".")
    _view, _copy = (getattr(getattr(aten, n), _overload or "default") for n in (_packet, f"{_packet}_copy"))
    LOWERINGS.add(_copy, _copied(LOWERINGS[_view]))
