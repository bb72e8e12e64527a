"""Resampling: each output element reads one input element at a computed index, or is an average of a few, with weights from tables."""
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
from firesteel.loops.lower.build import Builder, equal, fits
from firesteel.loops.lower.value import Operand, TensorSpec
from firesteel.loops.scalars import DTYPES, S, compute_dtype, is_float, literal, number, to
from firesteel.ops.block import decomposition, device_rule, lowering, operator, refuses, rule, shape
from firesteel.ops.windows import Window, fold, in_order
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size, and_, as_expr, ge, lt, max_, min_, product
from firesteel.targets import on_gpu

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
INTERPOLATED = "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"
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


device_rule("upsample_nearest1d_backward upsample_nearest2d_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward "
            "upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward")(
    lambda grad, out_size, in_size, *options, **named: suggested(grad, tuple(in_size)))
device_rule("upsample_nearest3d_backward _upsample_nearest_exact3d_backward upsample_bicubic2d_backward _upsample_bicubic2d_aa_backward")(
    lambda grad, out_size, in_size, *options, **named: fresh(grad, tuple(in_size)))


@refuses(" ".join(f"{name}_backward" for names in (*NEAREST, INTERPOLATED) for name in names.split()))
def refuse_upsample_backward(grad: Spec, out_size: Sequence[Size], in_size: Sequence[Size], *options: Any) -> None:
    same_shape(grad.shape, (*in_size[:2], *out_size), f"Expected grad_output to have the size of the result, got {list(grad.shape)}")


rule("grid_sampler_2d grid_sampler_3d")(lambda x, grid, *options: fresh(x, (*x.shape[:2], *grid.shape[1:-1])))
shape("grid_sampler_2d_backward grid_sampler_3d_backward")(
    lambda grad, x, grid, interpolation, padding, align_corners, mask: [x.shape if mask[0] else None, grid.shape])
shape("affine_grid_generator")(lambda theta, size, align_corners: (size[0], *size[2:], len(size) - 2))
decomposition("_upsample_nearest_exact2d", core=False)(
    lambda x, size, scales_h=None, scales_w=None: _upsample(x, size, [scales_h, scales_w], True))


# ---------------------------------------------------------------- linear and cubic interpolation

@dataclass(frozen=True)
class _Taps:
    """One dimension: each of `count` results is an average of 2 neighbours among `size` elements, or of 4 with cubic weights; places and weights are
    computed in float32 (in float64 for float64), as eager's are."""
    size: Size
    count: Size
    scale: float | None
    corners: bool
    cubic: bool
    kind: str

    @property
    def length(self) -> int:
        return 4 if self.cubic else 2

    def factor(self) -> Expr:
        if self.corners:
            steps = [number(n - 1, self.kind) for n in (self.size, self.count)]
            return S.where(S.gt(steps[1], 0), S.div(*steps), literal(0, self.kind))
        if self.scale is not None and self.scale > 0:
            return literal(1 / self.scale, self.kind)
        return S.div(number(self.size, self.kind), number(self.count, self.kind))

    def position(self, result: Size) -> Expr:
        """Where a result lies among the elements."""
        at = to(as_expr(result), self.kind)
        if self.corners:
            return S.mul(at, self.factor())
        place = S.sub(S.mul(S.add(at, 0.5), self.factor()), 0.5)
        return place if self.cubic else _choice(equal(self.size, self.count), at, S.max(place, literal(0, self.kind)))

    def first(self, result: Size) -> Expr:
        return as_expr(min_(to(S.floor(self.position(result)), "i64"), self.size - 1))

    def place(self, first: Size, k: Size) -> Size:
        """The element k that has a part in a result; one outside is that at the edge."""
        if self.cubic:
            return max_(min_(first + k - 1, self.size - 1), 0)
        same = equal(self.size, self.count)         # then both are the element itself, as eager has it
        return min_(first + (S.where(same, 0, as_expr(k)) if isinstance(same, Expr) else 0 if same else k), self.size - 1)

    def weights(self, result: Size) -> list[Expr]:
        rest = S.sub(self.position(result), to(self.first(result), self.kind))
        rest = S.min(S.max(rest, literal(0, self.kind)), literal(1, self.kind))
        back = S.sub(1.0, rest)
        return [_outer(S.add(rest, 1.0)), _inner(rest), _inner(back), _outer(S.add(back, 1.0))] if self.cubic else [back, rest]

    def window(self, b: Builder, out: Any, dim: int) -> Window:
        """Weights are a table.  Places are computed where they are read: neighbours' are near each other, which a table would not say."""
        spec = TensorSpec((self.length, self.count), (self.count, 1), 0, DTYPES[self.kind], out.device)
        weights = b.map(spec, lambda i: _pick(i[0], self.weights(i[1])))
        return Window(dim, self.count, self.length, lambda at, k: (self.place(self.first(at), k), True, weights.load((k, at))), True)

    def readers(self, element: Size) -> Size:
        """The first of the results in which an element may have a part, as sizes are rounded."""
        reach = self.length // 2
        if self.corners:
            return (element - reach) * (self.count - 1) // (self.size - 1) + 1 if self.size != 1 else element * 0
        if isinstance(self.size, int) and isinstance(self.count, int) and self.count % self.size == 0:
            times = self.count // self.size
            return element * times + ((1 - 2 * reach) * times - 1) // 2 + 1
        return ((element * 2 + (1 - 2 * reach)) * self.count - self.size) // (self.size * 2) + 1

    def reading(self) -> tuple[int, Size] | None:
        """(how much earlier than `readers` says, how many at most) results read an element; None where sizes and scale do not tell."""
        if not (isinstance(self.size, int) and isinstance(self.count, int)):
            return None if self.corners or self.scale is not None else (1, self.count * self.length // self.size + 4)
        first, last = self.readers_by_data(self.size, self.count)
        for early in range(4):
            start = [self.readers(h) - early for h in range(self.size)]
            if all(s <= f for s, f in zip(start, first)):
                return early, max(max(f - s + 1 for f, s in zip(last, start)), 1)
        return None

    def readers_by_data(self, size: int, count: int) -> tuple[list[int], list[int]]:
        """The first and the last result that reads each element, as eager computes them."""
        dtype = DTYPES[self.kind]
        place = torch.arange(count, dtype=dtype)
        if self.corners:
            place = place * (torch.tensor(float(size - 1), dtype=dtype) / max(count - 1, 1))
        else:
            factor = torch.tensor(1 / self.scale, dtype=dtype) if self.scale else torch.tensor(float(size), dtype=dtype) / count
            if self.cubic or size != count:
                place = ((place + 0.5) * factor - 0.5).clamp_min(-torch.inf if self.cubic else 0)
        found = place.floor().clamp_max(size - 1).long()
        first, last = torch.full((size,), count), torch.full((size,), -1)
        for k in range(-1, 3) if self.cubic else range(2):
            element = (found + k).clamp(0, size - 1)
            first.scatter_reduce_(0, element, torch.arange(count), "amin")
            last.scatter_reduce_(0, element, torch.arange(count), "amax")
        return first.tolist(), last.tolist()

    def part(self, result: Size, element: Size) -> Expr:
        """The weight that an element has in a result."""
        first, zero = self.first(result), literal(0, self.kind)
        parts = [S.where(S.eq(as_expr(self.place(first, k)), as_expr(element)), w, zero) for k, w in enumerate(self.weights(result))]
        return _choice(and_(ge(result, 0), lt(result, self.count)), functools.reduce(S.add, parts), zero)

    def back(self, b: Builder, out: Any, dim: int, early: int, most: Size) -> Window:
        """The gradient: an element takes from all the results in which it has a part."""
        spec = TensorSpec((most, self.size), (self.size, 1), 0, DTYPES[self.kind], out.device)
        weights = b.map(spec, lambda i: self.part(self.readers(i[1]) - early + i[0], i[1]))

        def term(at: Size, k: Size) -> tuple[Size, Any, Expr]:
            weight = weights.load((k, at))
            return self.readers(at) - early + k, S.ne(weight, 0.0), weight
        return Window(dim, self.size, most, term, True)


SHARPNESS = -0.75       # of cubic weights


def _inner(x: Expr) -> Expr:
    """The cubic weight of an element at a distance up to 1."""
    return S.add(S.mul(S.mul(S.sub(S.mul(x, SHARPNESS + 2), SHARPNESS + 3), x), x), 1.0)


def _outer(x: Expr) -> Expr:
    """At a distance from 1 to 2."""
    return S.sub(S.mul(S.add(S.mul(S.sub(S.mul(x, SHARPNESS), 5 * SHARPNESS), x), 8 * SHARPNESS), x), 4 * SHARPNESS)


def _choice(condition: Any, yes: Expr, no: Expr) -> Expr:
    return S.where(condition, yes, no) if isinstance(condition, Expr) else yes if condition else no


def _pick(which: Size, values: Sequence[Expr]) -> Expr:
    return functools.reduce(lambda rest, k: S.where(S.eq(as_expr(which), k), values[k], rest), range(len(values) - 1), values[-1])


def _all_taps(x: Any, sizes: Sequence[Size], counts: Sequence[Size], corners: bool, scales: Sequence[Any], cubic: bool) -> list[_Taps] | None:
    if not is_float(x.dtype) or any(isinstance(s, Expr) for s in scales) or 0 in (*sizes, *counts):
        return None
    return [_Taps(*known, corners, cubic, compute_dtype(x.dtype)) for known in zip(sizes, counts, [*scales, *[None] * len(sizes)])]


def _lower_interpolation(name: str, n: int, cubic: bool) -> None:
    @lowering(name)
    def lower_interpolation(b: Builder, out: Any, x: Operand, size: Sequence[Size], corners: bool, *scales: Any, **named: Any) -> Any:
        taps = _all_taps(x, x.shape[-n:], out.shape[-n:], corners, [*scales, *named.values()], cubic)
        if taps is None or not fits(out, x) or on_gpu(out):
            return NotImplemented
        return fold(b, out, x, in_order([t.window(b, out, d - n) for d, t in enumerate(taps)], x.shape, False))

    @lowering(f"{name}_backward")
    def lower_interpolation_backward(b: Builder, out: Any, grad: Operand, size: Sequence[Size], of: Sequence[Size], corners: bool,
                                     *scales: Any, **named: Any) -> Any:
        taps = _all_taps(grad, out.shape[-n:], grad.shape[-n:], corners, [*scales, *named.values()], cubic)
        known = [(t, reading) for t in taps or () if (reading := t.reading())]
        if len(known) < n or not fits(out, grad) or on_gpu(out):
            return NotImplemented
        return fold(b, out, grad, in_order([t.back(b, out, d - n, *reading) for d, (t, reading) in enumerate(known)], grad.shape))


for _name in INTERPOLATED.split():
    _lower_interpolation(_name, int(_name[-2]), "cubic" in _name)
