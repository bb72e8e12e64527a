"""Lowerings that put tensors together or take them apart by position: cat, pad, flip, repeat, scatter of slices.

Each element of the result comes from one of several places, told by its index alone: a masked load from each, which touches
memory only where its mask holds.  Many inputs of a `cat` are written by a nest each instead.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firesteel.loops.lower.build import LOWERINGS, Builder, supported
from firesteel.loops.lower.value import Index, IndexMap, Tensor
from firesteel.loops.lower.views import first_place, from_end, reshape_index
from firesteel.loops.ops import SHORT, S, compute_dtype, literal, number, to
from firesteel.sym.expr import Expr, Size, and_, as_expr, ge, le, lt, product

aten = torch.ops.aten

CAT_BY_MASK = 4     # so many inputs of a cat are chosen among for each element; more are written one after the other


def _fits(out: Any, *tensors: Tensor) -> bool:
    return supported(SHORT.get(out.dtype, ""), *[t.dtype for t in tensors]) and all(t.spec.device == out.device for t in tensors)


def _moved(index: Index, dim: int, by: Size) -> Index:
    return (*index[:dim], index[dim] - by, *index[dim + 1:])


def _mover(dim: int, by: Size) -> IndexMap:
    return lambda index: _moved(index, dim, by)


# ---------------------------------------------------------------- cat

@LOWERINGS.row(aten.cat.default)
def lower_cat(b: Builder, out: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    tensors = [t for t in tensors if t.shape != (0,)]       # eager skips these, whatever the others' rank
    if not _fits(out, *tensors) or not tensors:
        return NotImplemented
    dim = dim + len(out.shape) if dim < 0 else dim
    parts = [b.readable(t) for t in tensors]
    return _cat_by_mask(b, out, parts, dim) if len(parts) <= CAT_BY_MASK else _cat_by_parts(b, out, parts, dim)


def _cat_by_mask(b: Builder, out: Any, parts: list[Tensor], dim: int) -> Tensor:
    dtype = SHORT[out.dtype]

    def element(i: Index) -> Expr:
        end = out.shape[dim]
        value: Expr = literal(0, dtype)
        for n, part in reversed(list(enumerate(parts))):        # by number: one tensor may be several parts
            start = end - part.shape[dim]
            inside = lt(as_expr(i[dim]), end) if n < len(parts) - 1 else True
            inside = and_(inside, ge(as_expr(i[dim]), start)) if n > 0 else inside
            value = _choose(inside, part, _moved(i, dim, start), value, dtype)
            end = start
        return value
    return b.map(out, element)


def _choose(inside: Any, part: Tensor, index: Index, other: Expr, dtype: str) -> Expr:
    """The part's element where the index is inside of it, else `other`; in `dtype`."""
    if inside is True:
        return to(part.load(index), dtype)
    if inside is False:
        return other
    if part.dtype == dtype:
        return part.masked(index, inside, other)
    return S.where(inside, to(part.masked(index, inside, literal(0, part.dtype)), dtype), other)


def _cat_by_parts(b: Builder, out: Any, parts: list[Tensor], dim: int) -> Tensor:
    buffer, dtype = b.buffer(out), SHORT[out.dtype]
    start: Size = 0
    for part in parts:
        b.store_into(buffer, part.shape, _mover(dim, -start), lambda i: to(part.load(i), dtype))
        start = start + part.shape[dim]
    return Tensor.of(buffer, out)


# ---------------------------------------------------------------- writing into a part

@LOWERINGS.row(aten.slice_scatter.default)
def lower_slice_scatter(b: Builder, out: Any, x: Tensor, source: Tensor, dim: int = 0, start: Size | None = None,
                        end: Size | None = None, step: int = 1) -> Any:
    if not _fits(out, x, source):
        return NotImplemented
    x, source = b.readable(x), b.readable(source)
    dim = dim + len(x.shape) if dim < 0 else dim
    size = x.shape[dim]
    first = first_place(b, start, size)
    length, dtype = source.shape[dim], SHORT[out.dtype]

    def element(i: Index) -> Expr:
        away = i[dim] - first
        inside: Any = and_(ge(as_expr(i[dim]), first), lt(as_expr(away), length * step))
        if step != 1:
            inside = and_(inside, as_expr(S.eq(as_expr(away % step), as_expr(0))) if isinstance(away % step, Expr) else away % step == 0)
        return _choose(inside, source, (*i[:dim], away // step, *i[dim + 1:]), x.load(i), dtype)
    return b.map(out, element)


@LOWERINGS.row(aten.select_scatter.default)
def lower_select_scatter(b: Builder, out: Any, x: Tensor, source: Tensor, dim: int, index: Size) -> Any:
    if not _fits(out, x, source):
        return NotImplemented
    x, source = b.readable(x), b.readable(source)
    dim = dim + len(x.shape) if dim < 0 else dim
    at = from_end(b, index, x.shape[dim])
    dtype = SHORT[out.dtype]
    return b.map(out, lambda i: _choose(_equal(i[dim], at), source, (*i[:dim], *i[dim + 1:]), x.load(i), dtype))


def _equal(a: Size, b: Size) -> Any:
    return a == b if isinstance(a, int) and isinstance(b, int) else S.eq(as_expr(a), as_expr(b))


@LOWERINGS.row(aten.diagonal_scatter.default)
def lower_diagonal_scatter(b: Builder, out: Any, x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    if not _fits(out, x, source):
        return NotImplemented
    x, source, rank = b.readable(x), b.readable(source), len(x.shape)
    row, column = dim1 % rank, dim2 % rank
    down, dtype = max(-offset, 0), SHORT[out.dtype]

    def element(i: Index) -> Expr:
        others = tuple([k for d, k in enumerate(i) if d not in (row, column)])
        return _choose(_equal(i[column] - i[row], offset), source, (*others, i[row] - down), x.load(i), dtype)
    return b.map(out, element)


@LOWERINGS.row(aten.diag_embed.default)
def lower_diag_embed(b: Builder, out: Any, x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    if not _fits(out, x):
        return NotImplemented
    x, rank, dtype = b.readable(x), len(out.shape), SHORT[out.dtype]
    row, column = dim1 % rank, dim2 % rank
    down = max(-offset, 0)

    def element(i: Index) -> Expr:
        others = tuple([k for d, k in enumerate(i) if d not in (row, column)])
        return _choose(_equal(i[column] - i[row], offset), x, (*others, i[row] - down), literal(0, dtype), dtype)
    return b.map(out, element)


# ---------------------------------------------------------------- padding

@LOWERINGS.row(aten.constant_pad_nd.default)
def lower_pad(b: Builder, out: Any, x: Tensor, pad: Sequence[Size], value: Any = 0) -> Any:
    """`pad` is (before, after) for each dimension, the last first; negative numbers cut."""
    if not _fits(out, x):
        return NotImplemented
    x, rank, dtype = b.readable(x), len(x.shape), SHORT[out.dtype]
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
        return _choose(inside, x, at, fill, dtype)
    return b.map(out, element)


# ---------------------------------------------------------------- the same elements elsewhere

@LOWERINGS.row(aten.flip.default)
def lower_flip(b: Builder, out: Any, x: Tensor, dims: Sequence[int]) -> Any:
    if not _fits(out, x):
        return NotImplemented
    x, rank = b.readable(x), len(x.shape)
    turned = {d % rank for d in dims} if rank else set()
    return b.map(out, lambda i: x.load(tuple([n - 1 - k if d in turned and n != 1 else k for d, (k, n) in enumerate(zip(i, x.shape))])))


@LOWERINGS.row(aten.rot90.default)
def lower_rot90(b: Builder, out: Any, x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    if not _fits(out, x):
        return NotImplemented
    x, rank, turns = b.readable(x), len(x.shape), k % 4
    first, second = dims[0] % rank, dims[1] % rank

    def element(i: Index) -> Expr:
        at = list(i)
        if turns % 2:
            at[first], at[second] = i[second], i[first]
        for d in (first, second):
            if turns == 2 or (turns == 1 and d == second) or (turns == 3 and d == first):
                at[d] = x.shape[d] - 1 - at[d]
        return x.load(tuple(at))
    return b.map(out, element)


@LOWERINGS.row(aten.glu.default)
def lower_glu(b: Builder, out: Any, x: Tensor, dim: int = -1) -> Any:
    if not _fits(out, x):
        return NotImplemented
    x, dim, kind = b.readable(x), dim % len(x.shape), compute_dtype(x.dtype)
    half = out.shape[dim]
    return b.map(out, lambda i: S.mul(to(x.load(i), kind), S.sigmoid(to(x.load(_moved(i, dim, -half)), kind))))


@LOWERINGS.row(aten.roll.default)
def lower_roll(b: Builder, out: Any, x: Tensor, shifts: Any, dims: Any = ()) -> Any:
    dims, shifts = [dims] if isinstance(dims, int) else list(dims), [shifts] if not isinstance(shifts, (list, tuple)) else list(shifts)
    if not _fits(out, x) or 0 in x.shape:
        return NotImplemented
    x, rank = b.readable(x), len(x.shape)
    if not dims:        # rolled as one long row
        count = product(x.shape)
        row, place = reshape_index(tuple(out.shape), (count,)), reshape_index((count,), tuple(out.shape))
        return b.map(out, lambda i: x.load(row(((place(i)[0] - shifts[0]) % count,))))
    by: dict[int, Size] = {}
    for d, s in zip(dims, shifts):
        by[d % rank] = by.get(d % rank, 0) + s
    return b.map(out, lambda i: x.load(tuple([(k - by[d]) % x.shape[d] if d in by else k for d, k in enumerate(i)])))


@LOWERINGS.row(aten.repeat.default)
def lower_repeat(b: Builder, out: Any, x: Tensor, repeats: Sequence[Size]) -> Any:
    if not _fits(out, x) or 0 in x.shape:
        return NotImplemented
    x, drop = b.readable(x), len(repeats) - len(x.shape)
    times = repeats[drop:]
    return b.map(out, lambda i: x.load(tuple([0 if n == 1 else k if r == 1 else k % n for k, n, r in zip(i[drop:], x.shape, times)])))


# ---------------------------------------------------------------- triangles

@LOWERINGS.row(aten.tril.default)
def lower_tril(b: Builder, out: Any, x: Tensor, diagonal: Size = 0) -> Any:
    return _triangle(b, out, x, lambda row, column: le(as_expr(column - row), diagonal))


@LOWERINGS.row(aten.triu.default)
def lower_triu(b: Builder, out: Any, x: Tensor, diagonal: Size = 0) -> Any:
    return _triangle(b, out, x, lambda row, column: ge(as_expr(column - row), diagonal))


def _triangle(b: Builder, out: Any, x: Tensor, kept: Any) -> Any:
    if not _fits(out, x):
        return NotImplemented
    x, dtype = b.readable(x), SHORT[out.dtype]
    return b.map(out, lambda i: _choose(kept(i[-2], i[-1]), x, i, literal(0, dtype), dtype))
