"""Rules of operators for which torch has no meta kernel: histograms, least squares, backwards of seldom used losses."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firesteel.graph.rules.base import DataAccess, rule
from firesteel.graph.sizes import less, product
from firesteel.graph.spec import Spec, contiguous_strides, fresh
from firesteel.sym.expr import Size


def _contiguous(x: Spec, shape: Sequence[Size], dtype: torch.dtype | None = None) -> Spec:
    return Spec(tuple(shape), contiguous_strides(tuple(shape)), 0, dtype or x.dtype, x.device)


@rule("multi_margin_loss_backward multilabel_margin_loss_backward fractional_max_pool3d_backward _ctc_loss_backward _ctc_loss_backward.Tensor")
def like_second(grad: Spec, x: Spec, *rest: Any, **options: Any) -> Spec:
    return _contiguous(x, x.shape)


# ---------------------------------------------------------------- linear algebra

@rule("geqrf")
def geqrf(x: Spec) -> tuple[Spec, Spec]:
    """The factors stored by columns, and one coefficient a reflection."""
    *batch, rows, columns = x.shape
    strides = (*(s * rows * columns for s in contiguous_strides(tuple(batch))), 1, rows)
    return fresh(x)._replace(strides=strides), _contiguous(x, (*batch, columns if less(columns, rows) else rows))


@rule("linalg_lstsq")
def lstsq(a: Spec, b: Spec, rcond: float | None = None, *, driver: str | None = None) -> tuple[Spec, Spec, Spec, Spec]:
    """Solution, residuals, rank, singular values; what the driver does not compute is empty.  The solution is the upper part of a
    matrix with as many rows as the larger side of `a`, stored by columns."""
    *batch, rows, columns = a.shape
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    is_vector = len(b.shape) == len(a.shape) - 1
    count = 1 if is_vector else b.shape[-1]
    tall = less(columns, rows)
    if tall and driver in ("gelsd", "gelss"):
        raise DataAccess(f"linalg.lstsq (driver {driver}, whose residuals are there for full rank only)")
    height = rows if tall else columns
    outer = [s * height * count for s in contiguous_strides(tuple(batch))]
    solution = fresh(a, (*batch, columns) if is_vector else (*batch, columns, count))
    solution = solution._replace(strides=(*outer, 1) if is_vector else (*outer, 1, height))
    residuals = (*batch, count) if tall and driver == "gels" else (0,)
    rank = (0,) if driver == "gels" else tuple(batch)
    singular = (*batch, columns if tall else rows) if driver in ("gelsd", "gelss") else (0,)
    return solution, _contiguous(a, residuals), _contiguous(a, rank, torch.int64), _contiguous(a, singular)


# ---------------------------------------------------------------- histograms

@rule("histogram.bin_ct")
def histogram(x: Spec, bins: int = 100, **options: Any) -> tuple[Spec, Spec]:
    return _contiguous(x, (bins,)), _contiguous(x, (bins + 1,))


@rule("histogram.bins_tensor")
def histogram_between(x: Spec, bins: Spec, **options: Any) -> tuple[Spec, Spec]:
    return _contiguous(x, (product(bins.shape) - 1,)), _contiguous(x, bins.shape)


@rule("_histogramdd_bin_edges")
def bin_edges(x: Spec, bins: Sequence[int], **options: Any) -> list[Spec]:
    return [_contiguous(x, (n + 1,)) for n in bins]


@rule("_histogramdd_from_bin_cts")
def histogram_of_counts(x: Spec, bins: Sequence[int], **options: Any) -> Spec:
    return _contiguous(x, bins)


@rule("_histogramdd_from_bin_tensors")
def histogram_of_edges(x: Spec, bins: Sequence[Spec], **options: Any) -> Spec:
    return _contiguous(x, [product(edges.shape) - 1 for edges in bins])
