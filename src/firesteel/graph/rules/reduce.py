"""Rules of reductions and scans: which dimensions go, and which dtype comes out.

Reductions give contiguous results whatever the strides of their argument.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firesteel.graph.rules.base import TO_REAL, check, floating, is_integral, rule, wrap_dim, wrap_dims
from firesteel.graph.spec import Shape, Spec, contiguous_strides, fresh, preserved_strides

Dims = int | Sequence[int] | None


def reduced_dims(x: Spec, dim: Dims) -> list[int]:
    """The dimensions a `dim` argument names; None and, mostly, an empty list name all."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(len(x.shape)))
    return [wrap_dim(dim, len(x.shape))] if isinstance(dim, int) else wrap_dims(dim, len(x.shape))


def reduce_shape(x: Spec, dims: Sequence[int], keepdim: bool) -> Shape:
    if keepdim:
        return tuple(1 if d in dims else s for d, s in enumerate(x.shape))
    return tuple(s for d, s in enumerate(x.shape) if d not in dims)


def reduced(x: Spec, dim: Dims, keepdim: bool, dtype: torch.dtype) -> Spec:
    shape = reduce_shape(x, reduced_dims(x, dim), keepdim)
    return Spec(shape, contiguous_strides(shape), 0, dtype, x.device)


# ---------------------------------------------------------------- sums and their kind

def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if is_integral(dtype) else dtype


@rule("sum prod nansum")
def sum_all(x: Spec, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Spec:
    return reduced(x, dim, keepdim, dtype or _sum_dtype(x.dtype))


@rule("sum.dim_IntList prod.dim_int")
def sum_dim(x: Spec, dim: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Spec:
    return reduced(x, dim, keepdim, dtype or _sum_dtype(x.dtype))


@rule("mean mean.dim")
def mean(x: Spec, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Spec:
    check((dtype or x.dtype).is_floating_point or (dtype or x.dtype).is_complex,
          f"mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype. Got: {x.dtype}")
    return reduced(x, dim, keepdim, dtype or x.dtype)


@rule("amax amin")
def amax(x: Spec, dim: Dims = (), keepdim: bool = False) -> Spec:
    return reduced(x, dim, keepdim, x.dtype)


@rule("aminmax")
def aminmax(x: Spec, *, dim: int | None = None, keepdim: bool = False) -> tuple[Spec, Spec]:
    result = fresh(x, reduce_shape(x, reduced_dims(x, dim), keepdim))
    return result, result


@rule("any any.dim any.dims all all.dim all.dims")
def any_(x: Spec, dim: Dims = None, keepdim: bool = False) -> Spec:
    return reduced(x, dim, keepdim, torch.uint8 if x.dtype is torch.uint8 else torch.bool)


@rule("count_nonzero count_nonzero.dim_IntList")
def count_nonzero(x: Spec, dim: Dims = None) -> Spec:
    return reduced(x, dim, False, torch.int64)


@rule("max min median nanmedian")
def max_all(x: Spec) -> Spec:
    return fresh(x, ())


@rule("argmax argmin")
def argmax(x: Spec, dim: int | None = None, keepdim: bool = False) -> Spec:
    return reduced(x, dim, keepdim, torch.int64)


@rule("max.dim min.dim")
def max_dim(x: Spec, dim: int, keepdim: bool = False) -> tuple[Spec, Spec]:
    values = fresh(x, reduce_shape(x, reduced_dims(x, dim), keepdim))
    return values, values.to(torch.int64)


@rule("median.dim nanmedian.dim mode")
def median_dim(x: Spec, dim: int = -1, keepdim: bool = False) -> tuple[Spec, Spec]:
    return max_dim(x, dim, keepdim)


@rule("kthvalue")
def kthvalue(x: Spec, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Spec, Spec]:
    return max_dim(x, dim, keepdim)


@rule("logsumexp")
def logsumexp(x: Spec, dim: Dims, keepdim: bool = False) -> Spec:
    return fresh(x, reduce_shape(x, reduced_dims(x, dim), keepdim), floating(x.dtype))


# ---------------------------------------------------------------- moments and norms

def _real(dtype: torch.dtype) -> torch.dtype:
    return TO_REAL.get(dtype, dtype)


@rule("var std")
def var_all(x: Spec, unbiased: bool = True) -> Spec:
    return reduced(x, None, False, _real(x.dtype))


@rule("var.dim std.dim")
def var_dim(x: Spec, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Spec:
    return reduced(x, dim, keepdim, _real(x.dtype))


@rule("var.correction std.correction")
def var_correction(x: Spec, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Spec:
    check(x.dtype.is_floating_point or x.dtype.is_complex, "std and var only support floating point and complex dtypes")
    return reduced(x, dim, keepdim, _real(x.dtype))


@rule("var_mean.correction std_mean.correction")
def var_mean(x: Spec, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Spec, Spec]:
    result = reduced(x, dim, keepdim, _real(x.dtype))
    return result, result.to(x.dtype)


@rule("linalg_vector_norm")
def vector_norm(x: Spec, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Spec:
    return reduced(x, dim, keepdim, _real(dtype or x.dtype))


@rule("norm.Scalar")
def norm_all(x: Spec, p: Any = 2) -> Spec:
    return reduced(x, None, False, _real(x.dtype))


@rule("norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype")
def norm_dim(x: Spec, p: Any, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Spec:
    return reduced(x, dim, keepdim, _real(dtype or x.dtype))


# ---------------------------------------------------------------- scans, sorting

@rule("cumsum cumprod")
def cumsum(x: Spec, dim: int, *, dtype: torch.dtype | None = None) -> Spec:
    wrap_dim(dim, len(x.shape))
    return fresh(x, dtype=dtype or _sum_dtype(x.dtype))


@rule("logcumsumexp")
def logcumsumexp(x: Spec, dim: int) -> Spec:
    wrap_dim(dim, len(x.shape))
    return fresh(x)


@rule("cummax cummin")
def cummax(x: Spec, dim: int) -> tuple[Spec, Spec]:
    wrap_dim(dim, len(x.shape))
    values = fresh(x)
    return values, values.to(torch.int64)


@rule("sort")
def sort(x: Spec, dim: int = -1, descending: bool = False) -> tuple[Spec, Spec]:
    return _sorted(x, dim)


@rule("sort.stable")
def sort_stable(x: Spec, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Spec, Spec]:
    return _sorted(x, dim)


def _sorted(x: Spec, dim: int) -> tuple[Spec, Spec]:
    wrap_dim(dim, len(x.shape))
    values = Spec(x.shape, preserved_strides(x), 0, x.dtype, x.device)
    return values, values.to(torch.int64)


@rule("topk")
def topk(x: Spec, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Spec, Spec]:
    dim = wrap_dim(dim, len(x.shape))
    if not x.shape:
        return fresh(x), fresh(x, dtype=torch.int64)
    values = fresh(x, (*x.shape[:dim], k, *x.shape[dim + 1:]))
    return values, values.to(torch.int64)
