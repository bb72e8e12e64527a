"""Layouts: contiguity, channels-last order and density, from sizes and strides, for plain and symbolic sizes alike.

Comes in: sizes and strides (Sizes).  Goes out: a bool, or a boolean Expr where it depends on symbols; nothing is guarded here
but by the comparisons that `is_dense` and `by_stride` are given.  The definitions are eager's: a dimension of size 1 may have any stride, a tensor
without elements is contiguous.

    is_contiguous((s0, 4), (4, 1))      # True
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from firesteel.sym.expr import Expr, Size, and_, eq, le, max_, mul, ne, or_

Answer = bool | Expr
Compare = Callable[[Size, Size], bool]
CHANNELS_LAST = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}       # dimensions from the fastest to the slowest


def _packed(sizes: Sequence[Size], strides: Sequence[Size], order: Sequence[int]) -> Answer:
    """Do the dimensions, fastest first, follow each other without a gap?"""
    answer: Any = True
    expected: Size = 1
    for d in order:
        answer = and_(answer, or_(eq(strides[d], expected), eq(sizes[d], 1)))
        if answer is False:
            return False
        expected = mul(expected, sizes[d])
    return answer


def is_empty(sizes: Sequence[Size]) -> Answer:
    answer: Any = False
    for size in sizes:
        answer = or_(answer, eq(size, 0))
    return answer


def is_contiguous(sizes: Sequence[Size], strides: Sequence[Size]) -> Answer:
    packed = _packed(sizes, strides, range(len(sizes) - 1, -1, -1))
    return True if packed is True else or_(packed, is_empty(sizes))


def is_channels_last_contiguous(sizes: Sequence[Size], strides: Sequence[Size], dims: int) -> Answer:
    """Contiguous with the channel (dimension 1) fastest; `dims` is 4 for images, 5 for volumes."""
    if len(sizes) != dims:
        return False
    packed = _packed(sizes, strides, CHANNELS_LAST[dims])
    return True if packed is True else or_(packed, is_empty(sizes))


def is_channels_last_strides(sizes: Sequence[Size], strides: Sequence[Size], dims: int) -> Answer:
    """Do the strides grow in channels-last order?  Where sizes of 1 leave it open, the answer is no."""
    if len(sizes) != dims:
        return False
    answer = ne(strides[1], 0)
    least: Size = 0
    for d in CHANNELS_LAST[dims]:
        answer = and_(answer, and_(ne(sizes[d], 0), le(least, strides[d])))
        if d == 0:
            answer = and_(answer, ne(least, strides[1]))
        if answer is False:
            return False
        least = mul(strides[d], max_(sizes[d], 1))
    return answer


def by_stride(dims: Sequence[int], strides: Sequence[Size], less: Compare) -> list[int]:
    """Dimensions by increasing stride (insertion sort: few dimensions, and each comparison may be a guard)."""
    order: list[int] = []
    for d in dims:
        at = len(order)
        while at and less(strides[d], strides[order[at - 1]]):
            at -= 1
        order.insert(at, d)
    return order


def dense_order(dims: Iterable[int], sizes: Sequence[Size], strides: Sequence[Size]) -> list[int] | None:
    """The dimensions, fastest first, if they are dense whatever the sizes are.  Nothing is asked: each stride has to be the product of the
    sizes before it."""
    left = sorted(dims, key=lambda d: sizes[d] != 1)        # sizes of 1 first: they move nothing
    order: list[int] = []
    step: Size = 1
    while left:
        found = next((d for d in left if strides[d] == step), None)
        if found is None:
            return None
        left.remove(found)
        order.append(found)
        step = mul(step, sizes[found])
    return order


def is_dense(sizes: Sequence[Size], strides: Sequence[Size], same: Compare, less: Compare) -> bool:
    """Non-overlapping and dense: some order of the dimensions is packed.  `same` and `less` decide whether symbols are guarded; a size that may
    be 0 is not asked for."""
    if any(type(size) is int and size == 0 for size in sizes):
        return True
    expected: Size = 1
    for d in by_stride([d for d in range(len(sizes)) if not same(sizes[d], 1)], strides, less):
        if not same(strides[d], expected):
            return False
        expected = mul(expected, sizes[d])
    return True
