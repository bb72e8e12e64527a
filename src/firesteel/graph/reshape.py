"""Strided elements in another shape: the size that -1 stands for, and strides without a copy."""
from __future__ import annotations

from collections.abc import Sequence

from firesteel.graph.sizes import less, must, must_match, product, same
from firesteel.graph.spec import Shape, Spec, contiguous_strides
from firesteel.sym.expr import Size, ne


def infer_size(shape: Sequence[Size], numel: Size) -> Shape:
    """The shape with its -1, if there is one, filled in; checks the number of elements."""
    shape = tuple(shape)
    if any(type(s) is int and s == -1 for s in shape):
        place = shape.index(-1)
        others = product(s for i, s in enumerate(shape) if i != place)
        for other in (s for i, s in enumerate(shape) if i != place):      # one by one: small facts are worth more
            must(ne(other, 0), f"cannot reshape tensor of 0 elements into shape {list(shape)} because the unspecified dimension size -1 "
                 "can be any value and is ambiguous")
        shape = (*shape[:place], numel // others, *shape[place + 1:])
    must_match(product(shape), numel, f"shape '{list(shape)}' is invalid for input of size {numel}")
    return shape


def view_strides(x: Spec, shape: Shape) -> Shape | None:
    """The strides of a view of x as `shape`; None where it needs a copy."""
    if x.strides == contiguous_strides(x.shape):
        return contiguous_strides(shape)
    if 0 in x.shape:
        return x.strides if x.shape == shape else contiguous_strides(shape)
    strides: list[Size] = []
    rest = list(shape)                      # sizes of the new shape not yet laid out, slowest first
    for numel, step in _memory_runs(x):
        laid: Size = 1
        while rest and (same(rest[-1], 1) or less(laid, numel)):
            strides.append(laid * step)
            laid = laid * rest.pop()
        if not same(laid, numel):
            return None
    return None if rest else tuple(reversed(strides))


def _memory_runs(x: Spec) -> list[tuple[Size, Size]]:
    """(elements, stride of the fastest) of each run of dimensions that is contiguous up to one stride, fastest run first."""
    runs: list[tuple[Size, Size]] = []
    numel: Size = 1
    step: Size = x.strides[-1] if x.shape else 1
    for dim in range(len(x.shape) - 1, -1, -1):
        numel = numel * x.shape[dim]
        if dim and (same(x.shape[dim - 1], 1) or same(x.strides[dim - 1], numel * step)):
            continue
        runs.append((numel, step))
        if dim:
            numel, step = 1, x.strides[dim - 1]
    return runs or [(1, 1)]
