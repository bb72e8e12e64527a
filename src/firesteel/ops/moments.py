"""Variance and standard deviation."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import cast, widen, wrap
from firesteel.graph.rules.base import check
from firesteel.graph.spec import Spec
from firesteel.loops.lower.build import Builder, fits
from firesteel.loops.lower.sweeps import Sweeps, out_dtype
from firesteel.loops.lower.value import Operand
from firesteel.loops.scalars import S, compute_dtype, is_float, literal, number, to
from firesteel.ops.block import decomposition, lowering, operator, refuses, rule
from firesteel.ops.reduce import Dims, real, reduced
from firesteel.sym.expr import Expr, Size
from firesteel.targets import on_host

aten = torch.ops.aten

operator("var.* std.* var_mean.* std_mean.*", recompute="reduce")
rule("var std")(lambda x, unbiased=True: reduced(x, None, False, real(x.dtype)))
rule("var.dim std.dim")(lambda x, dim, unbiased=True, keepdim=False: reduced(x, dim, keepdim, real(x.dtype)))


@rule("var.correction std.correction")
def var_correction(x: Spec, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Spec:
    check(x.dtype.is_floating_point or x.dtype.is_complex, "std and var only support floating point and complex dtypes")
    return reduced(x, dim, keepdim, real(x.dtype))


@rule("var_mean.correction std_mean.correction")
def var_mean(x: Spec, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Spec, Spec]:
    result = reduced(x, dim, keepdim, real(x.dtype))
    return result, result.to(x.dtype)


@refuses("var std var.dim std.dim var.correction std.correction var_mean.correction std_mean.correction")
def refuse_moments(x: Spec, *rest: Any, **options: Any) -> None:
    check(x.dtype.is_floating_point or x.dtype.is_complex, "std and var only support floating point and complex dtypes")


decomposition("var.correction", core=False)(
    lambda x, dim=None, *, correction=None, keepdim=False: aten.var_mean.correction(x, dim, correction=correction, keepdim=keepdim)[0])


@decomposition("std.correction", core=False)
def decompose_std(x: Tensor, dim=None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return aten.sqrt.default(aten.var_mean.correction(x, dim, correction=correction, keepdim=keepdim)[0])


@decomposition("var_mean.correction", core=False)
def decompose_var_mean(x: Tensor, dim=None, *, correction: Any = None, keepdim: bool = False):
    dims = list(range(x.dim())) if not dim else [wrap(d, x.dim()) for d in dim]
    wide = widen(x)
    count = 1
    for d in dims:
        count = count * x.shape[d]
    mean = aten.sum.dim_IntList(wide, dims, True) / count
    centered = wide - mean
    degrees = count - (1 if correction is None else correction)
    variance = aten.sum.dim_IntList(centered * centered, dims, keepdim) / max(degrees, 0) if isinstance(degrees, (int, float)) and degrees > 0 \
        else aten.sum.dim_IntList(centered * centered, dims, keepdim) / degrees
    return cast(variance, x.dtype), cast(mean if keepdim else aten.squeeze.dims(mean, dims), x.dtype)


def _variance(b: Builder, outs: dict[str, Any], x: Operand, dims: Any, correction: float | None, keepdim: bool,
              root: bool) -> dict[str, Operand] | None:
    spec = next(iter(outs.values()))
    if not all(fits(out, x) for out in outs.values()) or not is_float(x.dtype):
        return None
    x = b.readable(x)
    sweeps = Sweeps(b, x.shape, dims)
    mean, squares = _moments(sweeps, x, "f64" if on_host(spec) else out_dtype(spec))
    variance = S.div(squares, _degrees(sweeps.count(), 1 if correction is None else correction, squares.dtype))
    values = {"var": S.sqrt(variance) if root else variance, "mean": mean}
    read = dict(zip(outs, b.read_only(tuple(outs.values()))))
    stored = {name: sweeps.store(out, values[name], keepdim) for name, out in read.items()}
    sweeps.emit()
    return stored   # type: ignore[return-value]  # none is None: each fits, as asked above


def _degrees(count: Size, correction: float | Expr, dtype: str) -> Expr:
    if isinstance(count, Expr) or isinstance(correction, Expr):
        return S.max(S.sub(number(count, dtype), number(correction, dtype)), 0)
    return literal(max(count - correction, 0), dtype)


def _moments(sweeps: Sweeps, x: Operand, kind: str) -> tuple[Expr, Expr]:
    """(the mean, the sum of the squared distances from it), in `kind`.

    Elements are divided by their number before they are added up, and distances are scaled by a power of two that fits the
    elements' size, so that no sum overflows and no square vanishes.  The first sweep's mean is rounded: off by c, it would add
    n * c**2 to the squares; the sum of the distances (n * c, itself nearly exact) corrects both."""
    own, count = compute_dtype(x.dtype), sweeps.count()
    value, share = lambda i: to(x.load(i), own), _reciprocal(count, own)
    center, size = sweeps.reduces("sum", lambda i: (S.mul(value(i), share), S.mul(S.abs(value(i)), share)))
    scale = _fitting_scale(size)
    distance = lambda i: S.mul(S.sub(value(i), center), scale)
    squares, off = [to(e, kind) for e in sweeps.reduces("sum", lambda i: (_square(distance(i)), distance(i)))]
    shift, back = S.div(off, number(count, kind)), S.recip(to(scale, kind))
    squares = S.abs(S.sub(squares, S.mul(off, shift)))      # below 0 by rounding only
    return S.add(to(center, kind), S.mul(shift, back)), S.mul(S.mul(squares, back), back)


def _square(e: Expr) -> Expr:
    return S.mul(e, e)


# For f32 and f64: the mean size of the elements from which on a scale is used, ascending.  Scaled, a size and the 1e-7th part of it have
# squares of which neither 2**20 nor one leave the range.
_SCALES = {"f32": ((-math.inf, 2.0**100), (2.0**-75, 2.0**50), (2.0**-30, 1.0), (2.0**45, 2.0**-80)),
           "f64": ((-math.inf, 2.0**800), (2.0**-400, 1.0), (2.0**400, 2.0**-600))}


def _fitting_scale(size: Expr) -> Expr:
    (_, first), *others = _SCALES[size.dtype]
    scale = literal(first, size.dtype)
    for bound, other in others:
        scale = S.where(S.ge(size, bound), other, scale)
    return scale


def _reciprocal(count: Size, dtype: str) -> Expr:
    if isinstance(count, Expr):
        return S.recip(number(count, dtype))
    return literal(1 / count if count else math.nan, dtype)


def _is_root(b: Builder) -> bool:
    return b.target.__name__.startswith("std")


@lowering("var.correction std.correction")
def lower_var(b: Builder, out: Any, x: Operand, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    stored = _variance(b, {"var": out}, x, dims, correction, keepdim, _is_root(b))
    return stored["var"] if stored else NotImplemented


lowering("var.dim std.dim")(
    lambda b, out, x, dims=None, unbiased=True, keepdim=False: lower_var(b, out, x, dims, correction=int(unbiased), keepdim=keepdim))
lowering("var std")(lambda b, out, x, unbiased=True: lower_var(b, out, x, None, correction=int(unbiased)))


@lowering("var_mean.correction std_mean.correction")
def lower_var_mean(b: Builder, out: Any, x: Operand, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    stored = _variance(b, {"var": out[0], "mean": out[1]}, x, dims, correction, keepdim, _is_root(b))
    return (stored["var"], stored["mean"]) if stored else NotImplemented
