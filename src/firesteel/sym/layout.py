"""Layouts: what sizes and strides say about how a tensor lies in memory, for plain and symbolic sizes alike.

Comes in: sizes and strides (Sizes).  Goes out: a bool, or a boolean Expr where it depends on symbols; nothing is guarded here
but in `is_dense`, whose sorting asks.  The definitions are eager's: a dimension of size 1 may have any stride, a tensor
without elements is contiguous.

    is_contiguous((s0, 4), (4, 1))      # True
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from firesteel.sym.expr import Expr, Size, and_, eq, le, max_, mul, ne, or_

Answer = bool | Expr
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


def _empty(sizes: Sequence[Size]) -> Answer:
    answer: Any = False
    for size in sizes:
        answer = or_(answer, eq(size, 0))
    return answer


def is_contiguous(sizes: Sequence[Size], strides: Sequence[Size]) -> Answer:
    packed = _packed(sizes, strides, range(len(sizes) - 1, -1, -1))
    return True if packed is True else or_(packed, _empty(sizes))


def is_channels_last_contiguous(sizes: Sequence[Size], strides: Sequence[Size], dims: int) -> Answer:
    """Contiguous with the channel (dimension 1) fastest; `dims` is 4 for images, 5 for volumes."""
    if len(sizes) != dims:
        return False
    packed = _packed(sizes, strides, CHANNELS_LAST[dims])
    return True if packed is True else or_(packed, _empty(sizes))


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


def is_dense(sizes: Sequence[Size], strides: Sequence[Size], ask: Callable[[Answer], bool]) -> bool:
    """Non-overlapping and dense: some order of the dimensions is packed.  `ask` decides questions about symbols."""
    if len(sizes) == 1:
        return ask(le(sizes[0], 1)) or ask(eq(strides[0], 1))
    order: list[int] = []
    for d in range(len(sizes)):
        if ask(le(sizes[d], 1)):
            if ask(eq(sizes[d], 0)):
                return True
            continue        # a size of 1: its stride does not matter
        at = len(order)
        while at and not ask(le(strides[order[at - 1]], strides[d])):
            at -= 1
        order.insert(at, d)
    expected: Size = 1
    for d in order:
        if not ask(eq(strides[d], expected)):
            return False
        expected = mul(expected, sizes[d])
    return True
