"""Windows of several dimensions, one dimension after the other: sums of 5 rows and then of 5 columns read 10 elements where the window has 25.

In: a tensor, and for each dimension a `Window`: which elements of it make one of the result, and their weights.  Out: nests, one a dimension, with
the values between them in the dtype in which to compute.  Few terms are written out; many are a sweep, whose length may be a size that only run
time knows.  What is cheap enough to be computed again is put into its readers by fusion, as all else.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from firesteel.graph.spec import channels_last_strides, contiguous_strides
from firesteel.loops.ir import Axis, Phase, Reduce, Store, acc
from firesteel.loops.lower.build import Builder, choose, exprs, grid
from firesteel.loops.lower.value import Index, Operand, TensorSpec
from firesteel.loops.scalars import DTYPES, REDUCE_OPS, S, compute_dtype, literal, op, to
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size, and_

MOST_WRITTEN = 8        # terms that stand one by one in the text; more are a loop

Term = tuple[Size, Any, Any]            # an element's place, is it there (True, or an Expr), its weight (None: 1)


@dataclass(frozen=True)
class Window:
    """One dimension, counted from the last: `count` results of up to `length` terms each."""
    dim: int
    count: Size
    length: Size
    term: Callable[[Size, Size], Term]      # (the result's place, the number of the term)
    apart: bool = False                     # are the elements of neighbours far from each other?


def fold(b: Builder, out: Any, x: Operand, windows: Sequence[Window], finish: Callable[[Expr, Index], Expr] = lambda value, i: value,
         reduction: str = "sum") -> Operand:
    """Reduces x along the dimensions in the order given; `finish` makes the results of it."""
    kind = compute_dtype(x.dtype)
    x, shape = b.readable(x), list(x.shape)
    gathers = windows[-1].apart and out.strides[windows[-1].dim] == 1
    for window in windows[:-1]:
        shape[window.dim] = window.count
        x = _along(b, between(out, tuple(shape), kind), x, window, reduction, lambda value, i: value, gathers)
    return _along(b, out, x, windows[-1], reduction, finish)


def in_order(windows: Sequence[Window], sizes: Sequence[Size], shrinks: bool = True) -> list[Window]:
    """Dimensions that shrink first, and what grows last: rows are read as they lie, and few elements are gathered.  `shrinks` is for symbols."""
    def turn(window: Window) -> int:
        size, count = sizes[window.dim], window.count
        known = isinstance(size, int) and isinstance(count, int)
        return 0 if window.dim == -1 else -1 if (count <= size if known else shrinks) else 1
    return sorted(windows, key=turn)


def between(out: Any, shape: tuple[Size, ...], kind: str) -> TensorSpec:
    """What lies between two dimensions, in the format of the result."""
    last = len(shape) in (4, 5) and out.strides[1] == 1 and out.strides[-1] != 1
    strides = channels_last_strides(shape) if last else contiguous_strides(shape)
    return TensorSpec(shape, strides, 0, DTYPES[kind], out.device)


def _along(b: Builder, out: Any, x: Operand, window: Window, reduction: str, finish: Callable[[Expr, Index], Expr], swept: bool = False) -> Operand:
    """`swept`: as a loop, which is not put into a reader whose lanes would gather all of its terms."""
    length = window.length
    if swept or not isinstance(length, int) or length > MOST_WRITTEN:
        return sweep(b, out, x, [window], reduction, finish)
    combine = functools.partial(op, REDUCE_OPS[reduction].combine)
    return b.map(out, lambda i: finish(functools.reduce(combine, [_term(x, i, [window], [k], reduction) for k in range(length)]), i))


def sweep(b: Builder, out: Any, x: Operand, windows: Sequence[Window], reduction: str, finish: Callable[[Expr, Index], Expr]) -> Operand:
    """Reduces x along all of the dimensions at once, by loops over the terms."""
    axes, index = grid(tuple(out.shape))
    inner = [Axis(f"k{number}", window.length) for number, window in enumerate(windows)]
    value = _term(x, index, windows, [axis.value for axis in inner], reduction)
    total = Reduce("a0", reduction, value, value.dtype)
    buffer = b.buffer(out)
    store = Store(buffer.name, exprs(index), to(finish(acc(total), index), buffer.dtype, b.loose))
    b.nest(axes, Phase("reduce", tuple(inner), (total,), ()), Phase("map", (), (), (store,)))
    return Operand.of(buffer, out)


def _term(x: Operand, i: Index, windows: Sequence[Window], numbers: Sequence[Size], reduction: str) -> Expr:
    """One element of a window, times its weight; what changes nothing where it is not there."""
    kind, at, inside, weights = compute_dtype(x.dtype), list(i), True, []
    for window, k in zip(windows, numbers):
        at[window.dim], there, weight = window.term(i[window.dim], k)
        inside = and_(inside, there)
        weights += [weight] if weight is not None else []
    value = choose(inside, x, tuple(at), literal(REDUCE_OPS[reduction].identity(kind), kind), kind)
    return functools.reduce(S.mul, weights, value)
