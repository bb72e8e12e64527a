"""Sorting, and searching in what is sorted: library calls."""
from __future__ import annotations

from typing import Any

import torch

from firesteel.graph.rules.base import check, wrap_dim
from firesteel.graph.rules.refusals import within
from firesteel.graph.sizes import must_match
from firesteel.graph.spec import Spec, fresh, preserved_strides
from firesteel.ops.block import device_rule, operator, probed_rule, refuses, rule

operator("sort.* argsort.* msort.* topk.* searchsorted.* bucketize.*", decides=True)
operator("sort.* topk.* searchsorted.* bucketize.* msort.* argsort.*", library=True)
operator("bucketize.*", recompute="pointwise")
probed_rule("sort")(lambda x, dim=-1, descending=False: _sorted(x, dim))


def _sorted(x: Spec, dim: int) -> tuple[Spec, Spec]:
    wrap_dim(dim, len(x.shape))
    values = Spec(x.shape, preserved_strides(x), 0, x.dtype, x.device)
    return values, values.to(torch.int64)


probed_rule("sort.stable")(lambda x, *, stable=None, dim=-1, descending=False: _sorted(x, dim))


@rule("topk")
def topk(x: Spec, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Spec, Spec]:
    dim = wrap_dim(dim, len(x.shape))
    if not x.shape:
        return fresh(x), fresh(x, dtype=torch.int64)
    values = fresh(x, (*x.shape[:dim], k, *x.shape[dim + 1:]))
    return values, values.to(torch.int64)


@refuses("topk")
def refuse_topk(x: Spec, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> None:
    size = x.shape[wrap_dim(dim, len(x.shape))] if x.shape else 1
    within(k, 0, size, "selected index k out of range")


device_rule("bucketize.Tensor")(
    lambda x, boundaries, *, out_int32=False, right=False: fresh(x, dtype=torch.int32 if out_int32 else torch.int64))


@refuses("bucketize.Tensor")
def refuse_bucketize(x: Any, boundaries: Spec, **options: Any) -> None:
    check(len(boundaries.shape) == 1, f"boundaries tensor must be 1 dimension, but got dim({len(boundaries.shape)})")


@device_rule("searchsorted.Tensor")
def searchsorted(boundaries: Spec, x: Spec, *, out_int32: bool = False, right: bool = False, side=None, sorter=None) -> Spec:
    return fresh(x, dtype=torch.int32 if out_int32 else torch.int64)


@refuses("searchsorted.Tensor")
def refuse_searchsorted(boundaries: Spec, x: Spec, **options: Any) -> None:
    message = "the first N-1 dimensions of boundaries tensor and input value tensor must match"
    check(len(boundaries.shape) == 1 or len(boundaries.shape) == len(x.shape), message)
    for a, b in zip(boundaries.shape[:-1], x.shape):
        must_match(a, b, message)


rule("isin.Tensor_Tensor")(lambda x, among, **options: fresh(x, x.shape, torch.bool))
