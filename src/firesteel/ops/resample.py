"""Resampling: each output element reads one input element at a computed index; or a few, by a library call."""
from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import as_suggested, cast, positions
from firesteel.graph.rules.base import check, suggested
from firesteel.graph.rules.refusals import must_be_float, same_shape, within
from firesteel.graph.spec import Spec, fresh
from firesteel.loops.lower.build import Builder, fits
from firesteel.loops.lower.value import Operand
from firesteel.loops.scalars import S, compute_dtype, is_float, number, to
from firesteel.ops.block import decomposition, device_rule, lowering, operator, refuses, rule, shape
from firesteel.sym.expr import Expr, Size, as_expr, min_, product

aten = torch.ops.aten

operator("grid_sampler_2d.* grid_sampler_2d_backward.* upsample_* _upsample_*", library=True)
operator("upsample_nearest1d.* upsample_nearest2d.* upsample_nearest3d.* _upsample_nearest_exact1d.* _upsample_nearest_exact2d.* "
         "_upsample_nearest_exact3d.*", recompute="move")
device_rule("upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d")(lambda x, size, *scales: fresh(x, (*x.shape[:2], *size)))


@refuses("""upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
            upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa""")
def refuse_upsample(x: Spec, size: Sequence[Size], *rest: Any) -> None:
    must_be_float(x, "upsample", torch.uint8)
    check(len(x.shape) == len(size) + 2, f"It is expected that input has {len(size) + 2} dimensions, but got {list(x.shape)}")
    for s in (*size, *x.shape[2:]):
        within(s, 1, None, f"Input and output sizes should be greater than 0, but got input {list(x.shape[2:])} output {list(size)}")


def _nearest(out: Any, size: Any, scale: float | None, x: Tensor, exact: bool) -> Tensor:
    """Indices into a dimension of `size` for `out` positions; in float32, as eager computes them."""
    factor = 1 / scale if scale is not None and scale > 0 else size / out
    place = positions(out, x, torch.float32)
    place = (place + 0.5) * factor if exact else place * factor
    return aten.clamp_max.default(cast(aten.floor.default(place), torch.int64), size - 1)


def _upsample(x: Tensor, sizes: Sequence[Any], scales: Sequence[float | None], exact: bool) -> Tensor:
    n = len(sizes)
    indices: list[Tensor | None] = [None] * (x.dim() - n)
    for i, (size, scale) in enumerate(zip(sizes, scales)):
        index = _nearest(size, x.shape[x.dim() - n + i], scale, x, exact)
        indices.append(aten.view.default(index, [size] + [1] * (n - 1 - i)))
    return as_suggested(aten.index.Tensor(x, indices), x)


decomposition("upsample_nearest1d", core=False)(lambda x, size, scales=None: _upsample(x, size, [scales], False))
device_rule("upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_bilinear2d upsample_bicubic2d "
             "upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa")(
    lambda x, size, *options, **named: suggested(x, (*x.shape[:2], *size)))
decomposition("upsample_nearest2d", core=False)(
    lambda x, size, scales_h=None, scales_w=None: _upsample(x, size, [scales_h, scales_w], False))


NEAREST = ("upsample_nearest1d upsample_nearest2d upsample_nearest3d",
           "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d")
MOST_TERMS = 16     # elements of which a gradient is the sum


def _repeats(size: Size, count: Size, scale: float | None, exact: bool) -> int | None:
    """How often each of `size` elements is repeated, where each is as often; as eager's indices are rounded."""
    if not (type(size) is type(count) is int) or not size or count % size:
        return None
    place = torch.arange(count, dtype=torch.float32)
    factor = 1 / scale if scale is not None and scale > 0 else size / count
    source = ((place + 0.5 if exact else place) * factor).floor().clamp_max(size - 1)
    return count // size if torch.equal(source.long(), torch.arange(count) // (count // size)) else None


def _source(i: Size, size: Size, count: Size, scale: float | None, exact: bool) -> Size:
    """The index of the element that is repeated at place i; in float32, as eager computes it."""
    if repeats := _repeats(size, count, scale, exact):
        return i // repeats
    factor = number(1 / scale, "f32") if scale is not None and scale > 0 else S.div(number(size, "f32"), number(count, "f32"))
    place = to(as_expr(i), "f32")
    return min_(to(S.floor(S.mul(S.add(place, 0.5) if exact else place, factor)), "i64"), size - 1)


def _is_in_doubt(size: Size, count: Size, scale: float | None) -> bool:
    """Do eager's kernels disagree?  Some take a factor of 1 or 2 where the sizes have it, whatever the scale; layout and size choose the kernel."""
    if scale is None or scale <= 0:
        return False
    if type(size) is type(count) is int:
        return count in (size, 2 * size) and _repeats(size, count, scale, False) is None
    return 1 < scale < 1.5 or 2 < scale < 2.5       # then there are such sizes


def _lower_nearest(names: str, exact: bool) -> None:
    @lowering(names)
    def lower_upsample(b: Builder, out: Any, x: Operand, size: Sequence[Size], *scales: float | None) -> Any:
        if not fits(out, x) or any(isinstance(s, Expr) for s in scales):
            return NotImplemented
        x, n = b.readable(x), len(size)
        sizes = list(zip(x.shape[-n:], out.shape[-n:], [*scales, *[None] * n]))
        if not exact and any(_is_in_doubt(*known) for known in sizes):
            return NotImplemented
        return b.map(out, lambda i: x.load((*i[:-n], *(_source(at, *known, exact) for at, known in zip(i[-n:], sizes)))))

    @lowering(" ".join(f"{name}_backward" for name in names.split()))
    def lower_upsample_backward(b: Builder, out: Any, grad: Operand, size: Sequence[Size], of: Sequence[Size], *scales: float | None) -> Any:
        n = len(size)
        times = [_repeats(a, c, s, exact) for a, c, s in zip(out.shape[-n:], grad.shape[-n:], [*scales, *[None] * n]) if not isinstance(s, Expr)]
        if None in times or len(times) < n or product(times) > MOST_TERMS or not fits(out, grad) or not is_float(grad.dtype):  # type: ignore[arg-type]
            return NotImplemented
        grad, kind = b.readable(grad), compute_dtype(grad.dtype)

        def element(i: Any) -> Expr:
            places = itertools.product(*(range(t) for t in times if t))
            found = [(*i[:-n], *(at * t + k for at, t, k in zip(i[-n:], times, place))) for place in places]
            return functools.reduce(S.add, [to(grad.load(index), kind) for index in found])
        return b.map(out, element)


for _exact, _names in enumerate(NEAREST):
    _lower_nearest(_names, bool(_exact))


device_rule("upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward _upsample_nearest_exact1d_backward "
            "_upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward upsample_linear1d_backward upsample_bilinear2d_backward "
            "upsample_bicubic2d_backward upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward")(
    lambda grad, out_size, in_size, *options, **named: suggested(grad, tuple(in_size)))


@refuses(" ".join(f"{name}_backward" for names in NEAREST for name in names.split()))
def refuse_upsample_backward(grad: Spec, out_size: Sequence[Size], in_size: Sequence[Size], *options: Any) -> None:
    same_shape(grad.shape, (*in_size[:2], *out_size), f"Expected grad_output to have the size of the result, got {list(grad.shape)}")


rule("grid_sampler_2d grid_sampler_3d")(lambda x, grid, *options: fresh(x, (*x.shape[:2], *grid.shape[1:-1])))
shape("grid_sampler_2d_backward grid_sampler_3d_backward")(
    lambda grad, x, grid, interpolation, padding, align_corners, mask: [x.shape if mask[0] else None, grid.shape])
shape("affine_grid_generator")(lambda theta, size, align_corners: (size[0], *size[2:], len(size) - 2))
decomposition("_upsample_nearest_exact2d", core=False)(
    lambda x, size, scales_h=None, scales_w=None: _upsample(x, size, [scales_h, scales_w], True))
