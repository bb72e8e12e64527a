"""Index maps of views: which element of the base an element of a reshape, a slice or a strided window is."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from firesteel.loops.lower.build import Builder
from firesteel.loops.lower.value import Index, IndexMap, Operand
from firesteel.loops.scalars import SHORT, as_bits, shares_bits
from firesteel.sym.expr import Size, lt, max_, min_, product, sum_, where
from firesteel.sym.layout import dense_order

# ---------------------------------------------------------------- reshapes

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


# ---------------------------------------------------------------- any other window

def lower_bits(b: Builder, out: Any, x: Operand, dtype: Any) -> Operand:
    """A view as another dtype: the bits of each element where loops can read them, else a window."""
    if x.opaque or not shares_bits(x.dtype if x.buffer is None else x.buffer.dtype, SHORT.get(out.dtype, "")):
        return lower_window(b, out, x)
    body = x.body
    if body is not None:
        return Operand.lazy(out, lambda i: as_bits(body(i), SHORT[out.dtype]))
    return Operand(out, x.buffer, x.index, None, x.strided)


def lower_window(b: Builder, out: Any, x: Operand, *_: Any, **__: Any) -> Operand:
    """A view of which only the Spec is known: as_strided, views as another dtype, views of operators without a row."""
    x = b.strided(x)
    if out.dtype is not x.spec.dtype or x.opaque:       # the buffer's elements are not the view's
        return Operand(out, x.buffer, None, None, opaque=True)
    index = _window_index(out, x.buffer)
    return Operand(out, x.buffer, index, None, opaque=index is None)


def _window_index(out: Any, buffer: Any) -> IndexMap | None:
    """The window's place in the storage, taken apart again by the buffer's strides; None where these have gaps or overlap."""
    dims = dense_order([d for d, n in enumerate(buffer.shape) if n != 1], buffer.shape, buffer.strides)
    start = out.offset - buffer.offset
    if dims is None or (buffer.kind in ("input", "constant") and not _stays_inside(out, start, product(buffer.shape))):
        return None

    def index(i: Index) -> Index:
        place = sum_([start, *(k * s for k, s in zip(i, out.strides))])
        result: list[Size] = [0] * len(buffer.shape)
        for n, d in enumerate(reversed(dims)):
            at = place // buffer.strides[d]
            result[d] = at % buffer.shape[d] if n else at
        return tuple(result)
    return index


def _stays_inside(out: Any, start: Size, count: Size) -> bool:
    """Is the window known to be inside of the tensor that was given?  Its storage may be larger on both sides."""
    last = sum_([start, *((n - 1) * s for n, s in zip(out.shape, out.strides))])
    return 0 in out.shape or all(isinstance(n, int) for n in (start, last, count)) and start >= 0 and last < count
