"""Reductions: which dimensions go, and which dtype comes out.

A reduction is one nest: the kept dimensions are its axes, each sweep over the reduced ones is a phase."""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel.graph.rules.base import TO_REAL, broadcast, check, is_integral, promote, wrap_dim, wrap_dims
from firesteel.graph.rules.refusals import known, within
from firesteel.graph.sizes import must, same
from firesteel.graph.spec import Shape, Spec, contiguous_strides, fresh
from firesteel.loops.lower.build import Builder, fits, supported
from firesteel.loops.lower.pointwise import truth
from firesteel.loops.lower.sweeps import Sweeps, out_dtype
from firesteel.loops.lower.value import Index, Operand
from firesteel.loops.scalars import DTYPES, S, compute_dtype, highest, is_float, number, to
from firesteel.ops.block import decomposition, device_rule, lowering, operator, probed_rule, refuses, rule, shape
from firesteel.sym.expr import Expr, Size, as_expr, const, ne

aten = torch.ops.aten

operator("kthvalue.* median.* nanmedian.* mode.* max.* min.* argmax.* argmin.*", decides=True)
operator("kthvalue.* median.* mode.*", library=True)
operator("sum.* mean.* amax.* amin.* prod.* any.* all.* argmax.* argmin.* linalg_vector_norm.* max.* min.* "
         "count_nonzero.* nansum.*", recompute="reduce")
Dims = int | Sequence[int] | None


def reduced(x: Spec, dim: Dims, keepdim: bool, dtype: torch.dtype) -> Spec:
    shape = reduce_shape(x, reduced_dims(x, dim), keepdim)
    return Spec(shape, contiguous_strides(shape), 0, dtype, x.device)


def reduce_shape(x: Spec, dims: Sequence[int], keepdim: bool) -> Shape:
    if keepdim:
        return tuple(1 if d in dims else s for d, s in enumerate(x.shape))
    return tuple(s for d, s in enumerate(x.shape) if d not in dims)


def reduced_dims(x: Spec, dim: Dims) -> list[int]:
    """The dimensions a `dim` argument names; None and, mostly, an empty list name all."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(len(x.shape)))
    return [wrap_dim(dim, len(x.shape))] if isinstance(dim, int) else wrap_dims(dim, len(x.shape))


def _simple(b: Builder, out: Any, x: Operand, op: str, dims: Any, keepdim: bool, dtype: str,
            element: Callable[[Expr], Expr], finish: Callable[[Expr, Size], Expr] = lambda a, n: a) -> Any:
    if not fits(out, x):
        return NotImplemented
    x = b.readable(x)
    sweeps = Sweeps(b, x.shape, dims)
    count, load = sweeps.count(), lambda i: element(x.load(i))
    if isinstance(count, int) and 1 < count <= MOST_TERMS and op in COMBINE:
        start = [number(0.0, dtype)] if op == "sum" and is_float(dtype) else []        # a sum of zeros is 0, also one of negative zeros
        return _written_out(b, out, x.shape, sweeps.dims, keepdim,
                            lambda terms: finish(functools.reduce(COMBINE[op], [*start, *map(load, terms)]), count))
    if far := _far_dims(x.spec, sweeps.dims):
        part = _partial(b, x.spec, op, far, dtype, load)
        sweeps, load = Sweeps(b, part.shape, dims), part.load
    return sweeps.emit(sweeps.store(out, finish(sweeps.reduce(op, dtype, load), count), keepdim))


MOST_TERMS = 4      # elements whose reduction is written out: then it is pointwise, and computed where it is read
COMBINE = {"sum": S.add, "prod": S.mul, "max": S.max, "min": S.min}


def _written_out(b: Builder, out: Any, shape: tuple[Size, ...], dims: set[int], keepdim: bool, combined: Callable[[list[Index]], Expr]) -> Operand:
    places = list(itertools.product(*(range(n) if d in dims else (None,) for d, n in enumerate(shape))))    # type: ignore[arg-type]  # known sizes

    def element(i: Index) -> Expr:
        kept = iter([part for d, part in enumerate(i) if not keepdim or d not in dims])
        own = [None if d in dims else next(kept) for d in range(len(shape))]
        return combined([tuple([at if at is not None else mine for at, mine in zip(place, own)]) for place in places])  # type: ignore[misc]
    return b.map(out, element)


def _partial(b: Builder, x: Spec, op: str, dims: Sequence[int], dtype: str, load: Callable[[Index], Expr]) -> Operand:
    """A nest that reduces some of the dimensions to size 1."""
    shape = tuple([1 if d in dims else n for d, n in enumerate(x.shape)])
    sweeps = Sweeps(b, x.shape, dims)
    result = sweeps.store(Spec(shape, contiguous_strides(shape), 0, DTYPES[dtype], x.device), sweeps.reduce(op, dtype, load), True)
    sweeps.emit()
    assert result is not None
    return result


SHORT_RUN = 64      # elements in a row that are enough for a sweep along them


def _far_dims(spec: Spec, dims: set[int]) -> list[int]:
    """What to reduce first, where one reduced dimension is a short run in memory that a kept one continues: channels of a group, of a
    channels-last image.  The first sweep then reads memory along both."""
    if not all(type(n) is int for n in (*spec.shape, *spec.strides)):
        return []
    steps = {d: spec.strides[d] for d in range(len(spec.shape)) if spec.shape[d] > 1}
    swept = sorted((d for d in dims if d in steps), key=steps.__getitem__)
    if len(swept) < 2 or steps[swept[0]] <= 0 or spec.shape[swept[0]] >= SHORT_RUN:
        return []
    run = steps[swept[0]] * spec.shape[swept[0]]
    return swept[1:] if steps[swept[1]] > run and any(steps[d] == run for d in steps if d not in dims) else []


def not_nothing(x: Spec) -> None:
    for size in x.shape:
        must(ne(size, 0), "Expected reduction dim to be specified for input.numel() == 0.")


def not_empty(x: Spec, dims: Sequence[int]) -> None:
    for dim in dims:
        place = wrap_dim(dim, len(x.shape))
        if x.shape and same(x.shape[place], 0):
            raise IndexError(f"Expected reduction dim {place} to have non-zero size.")


# ---------------------------------------------------------------- sums and products

probed_rule("sum prod nansum")(lambda x, dim=None, keepdim=False, *, dtype=None: reduced(x, dim, keepdim, dtype or sum_dtype(x.dtype)))
probed_rule("sum.dim_IntList prod.dim_int")(
    lambda x, dim, keepdim=False, *, dtype=None: reduced(x, dim, keepdim, dtype or sum_dtype(x.dtype)))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if is_integral(dtype) else dtype


def _total(op: str, b: Builder, out: Any, x: Operand, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    kind = out_dtype(out)
    return _simple(b, out, x, op, dims, keepdim, kind, lambda e: to(e, kind))


lowering("sum sum.dim_IntList")(functools.partial(_total, "sum"))
lowering("prod prod.dim_int")(functools.partial(_total, "prod"))


@lowering("nansum")
def lower_nansum(b: Builder, out: Any, x: Operand, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    kind = out_dtype(out)
    number_or_zero = lambda e: S.where(S.isnan(e), 0, e) if is_float(e.dtype) else e
    return _simple(b, out, x, "sum", dims, keepdim, kind, lambda e: to(number_or_zero(to(e, compute_dtype(e.dtype))), kind))


@probed_rule("mean mean.dim")
def mean(x: Spec, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Spec:
    check((dtype or x.dtype).is_floating_point or (dtype or x.dtype).is_complex,
          f"mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype. Got: {x.dtype}")
    return reduced(x, dim, keepdim, dtype or x.dtype)


@lowering("mean mean.dim")
def lower_mean(b: Builder, out: Any, x: Operand, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    kind = out_dtype(out)
    return _simple(b, out, x, "sum", dims, keepdim, kind, lambda e: to(e, kind), lambda total, n: S.div(total, number(n, kind)))


probed_rule("count_nonzero count_nonzero.dim_IntList")(lambda x, dim=None: reduced(x, dim, False, torch.int64))
lowering("count_nonzero count_nonzero.dim_IntList")(
    lambda b, out, x, dims=None: _simple(b, out, x, "sum", dims, False, "i64", lambda e: to(truth(e), "i64")))


@device_rule("trace", probed=True)
def trace(x: Spec) -> Spec:
    check(len(x.shape) == 2, "trace: expected a matrix")
    return fresh(x, ()).to(torch.int64 if not (x.dtype.is_floating_point or x.dtype.is_complex) else x.dtype)


decomposition("trace")(lambda x: aten.sum.default(aten.diagonal.default(x)))
@probed_rule("dist")
def dist(a: Spec, b: Spec, p: float = 2) -> Spec:
    dtype: Any = promote(a.dtype, b.dtype)
    broadcast(a.shape, b.shape)
    return fresh(a, (), TO_REAL.get(dtype, dtype))
shape("hash_tensor")(lambda x, dim=(), *, keepdim=False, mode=0: reduce_shape(x, reduced_dims(x, dim), keepdim))


# ---------------------------------------------------------------- extremes

MOST_DIMS = 64      # of a tensor that a reduction's bit set of dimensions can name


probed_rule("amax amin")(lambda x, dim=(), keepdim=False: reduced(x, dim, keepdim, x.dtype))


@probed_rule("aminmax")
def aminmax(x: Spec, *, dim: int | None = None, keepdim: bool = False) -> tuple[Spec, Spec]:
    result = fresh(x, reduce_shape(x, reduced_dims(x, dim), keepdim))
    return result, result


@refuses("amax amin aminmax")
def refuse_amax(x: Spec, dim: Any = (), keepdim: bool = False) -> None:
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    check(len(x.shape) <= MOST_DIMS, f"only tensors with up to {MOST_DIMS} dims are supported")
    check(not x.dtype.is_complex, "amax is not implemented for complex tensors")
    if not dims:
        not_nothing(x)
    not_empty(x, dims)


@lowering("amax amin max min")
def lower_extreme(b: Builder, out: Any, x: Operand, dims: Any = None, keepdim: bool = False) -> Any:
    kind = out_dtype(out)
    return _simple(b, out, x, _extreme(b), dims, keepdim, kind, lambda e: to(e, kind))


def _extreme(b: Builder) -> str:
    return "max" if "max" in b.target.__name__ else "min"


@lowering("aminmax")
def lower_aminmax(b: Builder, out: Any, x: Operand, *, dim: int | None = None, keepdim: bool = False) -> Any:
    if not supported(x.dtype):
        return NotImplemented
    x, kind = b.readable(x), compute_dtype(x.dtype)
    sweeps = Sweeps(b, x.shape, dim)
    extremes = [sweeps.reduce(op, kind, lambda i: to(x.load(i), kind)) for op in ("min", "max")]
    return sweeps.emit(tuple(sweeps.store(spec, value, keepdim) for spec, value in zip(b.read_only(out), extremes)))


probed_rule("max min median nanmedian")(lambda x: fresh(x, ()))


@refuses("max min")
def refuse_max_all(x: Spec) -> None:
    check(not x.dtype.is_complex, "max is not implemented for complex tensors")
    not_nothing(x)


@probed_rule("max.dim min.dim")
def max_dim(x: Spec, dim: int, keepdim: bool = False) -> tuple[Spec, Spec]:
    values = fresh(x, reduce_shape(x, reduced_dims(x, dim), keepdim))
    return values, values.to(torch.int64)


@refuses("max.dim min.dim argmax argmin")
def refuse_max_dim(x: Spec, dim: int | None = None, keepdim: bool = False) -> None:
    check(not x.dtype.is_complex, "max is not implemented for complex tensors")
    if dim is None:
        not_nothing(x)
    else:
        not_empty(x, [dim])


def _position(sweeps: Sweeps, x: Operand, op: str, kind: str) -> tuple[Expr, Expr]:
    """(the extreme, its position).  NaN beats every number, so the first NaN is the place looked for."""
    value = lambda i: to(x.load(i), kind)
    best = sweeps.reduce(op, kind, value)

    def place(i: Index) -> Expr:
        element, at = value(i), as_expr(_linear(i, x.shape, sweeps.dims))
        found = S.eq(element, best)
        if is_float(kind):
            found = S.or_(found, S.isnan(element))
        return S.where(found, at, const(highest("i64")))
    return best, sweeps.reduce("min", "i64", place)


def _linear(index: Index, shape: tuple[Size, ...], dims: set[int]) -> Size:
    """The position among the reduced dimensions, in row-major order."""
    at: Size = 0
    for d in sorted(dims):
        at = at * shape[d] + index[d]
    return at


@lowering("max.dim min.dim")
def lower_max_dim(b: Builder, out: Any, x: Operand, dim: int, keepdim: bool = False) -> Any:
    if not supported(x.dtype):
        return NotImplemented
    x = b.readable(x)
    sweeps = Sweeps(b, x.shape, dim)
    best, at = _position(sweeps, x, _extreme(b), compute_dtype(x.dtype))
    out = b.read_only(out)
    return sweeps.emit((sweeps.store(out[0], best, keepdim), sweeps.store(out[1], at, keepdim)))


probed_rule("argmax argmin")(lambda x, dim=None, keepdim=False: reduced(x, dim, keepdim, torch.int64))


@lowering("argmax argmin")
def lower_argmax(b: Builder, out: Any, x: Operand, dim: int | None = None, keepdim: bool = False) -> Any:
    if not supported(x.dtype) or x.dtype == "bool":
        return NotImplemented
    x = b.readable(x)
    sweeps = Sweeps(b, x.shape, dim)
    _, at = _position(sweeps, x, _extreme(b), compute_dtype(x.dtype))
    return sweeps.emit(sweeps.store(out, at, keepdim))


# ---------------------------------------------------------------- truth

@probed_rule("any any.dim any.dims all all.dim all.dims")
def any_all(x: Spec, dim: Any = None, keepdim: bool = False) -> Spec:
    dtype = torch.uint8 if x.dtype is torch.uint8 else torch.bool
    return fresh(x, x.shape, dtype) if _is_empty(dim) else reduced(x, dim, keepdim, dtype)


def _is_empty(dims: Any) -> bool:
    """No dimensions: other than a sum's, these mean that nothing is reduced."""
    return isinstance(dims, (list, tuple)) and not dims


def _lower_truth(op: str, b: Builder, out: Any, x: Operand, dims: Any = None, keepdim: bool = False) -> Any:
    if _is_empty(dims) and x.shape:
        return b.map(out, lambda i: truth(b.readable(x).load(i))) if fits(out, x) else NotImplemented
    return _simple(b, out, x, op, dims, keepdim, "bool", truth)


for _op in ("any", "all"):
    probed_rule(f"_is_{_op}_true")(lambda x: reduced(x, None, False, torch.bool))
    lowering(f"{_op} {_op}.dim {_op}.dims _is_{_op}_true")(functools.partial(_lower_truth, _op))


# ---------------------------------------------------------------- ranks

probed_rule("median.dim nanmedian.dim mode")(lambda x, dim=-1, keepdim=False: max_dim(x, dim, keepdim))
refuses("median nanmedian")(lambda x: check(not x.dtype.is_complex, "median is not implemented for complex tensors"))
refuses("median.dim nanmedian.dim mode")(lambda x, dim=-1, keepdim=False: not_empty(x, [dim]))
rule("kthvalue")(lambda x, k, dim=-1, keepdim=False: max_dim(x, dim, keepdim))


@refuses("kthvalue")
def refuse_kthvalue(x: Spec, k: Any, dim: int = -1, keepdim: bool = False) -> None:
    size = x.shape[wrap_dim(dim, len(x.shape))] if x.shape else 1
    within(k, 1, size, f"kthvalue(): selected number k out of range for dimension {dim}")


# ---------------------------------------------------------------- norms

def real(dtype: torch.dtype) -> torch.dtype:
    return TO_REAL.get(dtype, dtype)


probed_rule("linalg_vector_norm")(lambda x, ord=2, dim=None, keepdim=False, *, dtype=None: reduced(x, dim, keepdim, real(dtype or x.dtype)))


@refuses("linalg_vector_norm norm.Scalar norm.ScalarOpt_dim")
def refuse_vector_norm(x: Spec, order: Any = 2, dim: Any = None, *rest: Any, **options: Any) -> None:
    check(x.dtype.is_floating_point or x.dtype.is_complex, f"norm: Expected a floating point or complex tensor as input. Got {x.dtype}")
    if known(order) and (order < 0 or order == float("inf")):       # these have no identity
        for d in ([dim] if isinstance(dim, int) else dim) or range(len(x.shape)):
            must(ne(x.shape[wrap_dim(d, len(x.shape))], 0) if x.shape else True, f"linalg.vector_norm cannot compute the {order} norm of no elements")


@lowering("linalg_vector_norm")
def lower_vector_norm(b: Builder, out: Any, x: Operand, ord: float = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    kind = out_dtype(out)
    if not is_float(kind) or not fits(out, x) or isinstance(ord, Expr) or math.isnan(ord):        # the order decides what is computed
        return NotImplemented
    op, element, finish = NORMS.get(float(ord)) or _norm(float(ord))
    return _simple(b, out, x, op, dims, keepdim, kind, lambda e: element(to(e, kind)), lambda total, n: finish(total))


NORMS: dict[float, tuple[str, Callable[[Expr], Expr], Callable[[Expr], Expr]]] = {
    2.0: ("sum", lambda e: S.mul(e, e), lambda total: S.sqrt(total)),
    1.0: ("sum", lambda e: S.abs(e), lambda total: total),
    0.0: ("sum", lambda e: to(S.ne(e, 0), e.dtype), lambda total: total),
    math.inf: ("max", lambda e: S.abs(e), lambda total: total),
    -math.inf: ("min", lambda e: S.abs(e), lambda total: total),
}


def _norm(p: float) -> tuple[str, Callable[[Expr], Expr], Callable[[Expr], Expr]]:
    return "sum", lambda e: S.pow(S.abs(e), p), lambda total: S.pow(total, 1 / p)


probed_rule("norm.Scalar")(lambda x, p=2: reduced(x, None, False, real(x.dtype)))
probed_rule("norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype")(
    lambda x, p, dim=None, keepdim=False, *, dtype=None: reduced(x, dim, keepdim, real(dtype or x.dtype)))
