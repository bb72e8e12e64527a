"""Operators whose result's size depends on data: each such size is a fresh unbacked symbol with what is known of its range.
Numbers that Python reads stand here too."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from firesteel.graph.rules.base import wrap_dim
from firesteel.graph.rules.refusals import within
from firesteel.graph.sizes import unbacked
from firesteel.graph.spec import Spec, contiguous_strides, fresh
from firesteel.ops.block import operator, refuses, rule
from firesteel.sym.expr import Size, product

operator("_local_scalar_dense.*", library=True, decides=True)
operator("equal.*", decides=True)
operator("sym_size.* sym_stride.* sym_numel.* sym_storage_offset.*", recompute="size")
operator("unique_dim.* unique_consecutive.* _unique.* _unique2.* nonzero.* histc.*", decides=True)
operator("histc.* nonzero.* unique* _unique* histogram*", library=True)


def vector(like: Spec, size: Size, dtype: torch.dtype | None = None) -> Spec:
    return Spec((size,), (1,), 0, dtype or like.dtype, like.device)


def masked_places(indices: Sequence[Spec | None]) -> list[Spec | None]:
    """Indices in which each mask is replaced by the places of its true elements, one index a dimension of the mask."""
    result: list[Spec | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            result.append(index)
        else:
            count = unbacked("indexing with a mask", 0, product(index.shape))
            result += [vector(index, count, torch.int64)] * len(index.shape)
    return result


# ---------------------------------------------------------------- places

@rule("nonzero")
def nonzero(x: Spec) -> Spec:
    """One row an element, stored by columns as eager does."""
    count = unbacked("nonzero", 0, product(x.shape))
    return Spec((count, len(x.shape)), (1, count), 0, torch.int64, x.device)


refuses("nonzero_static")(lambda x, *, size, fill_value=-1: within(size, 0, None, "nonzero_static: 'size' must be an non-negative integer"))
rule("nonzero_static")(lambda x, *, size, fill_value=-1: fresh(x, (size, len(x.shape)), torch.int64))


# ---------------------------------------------------------------- different values

@rule("_unique2")
def unique(x: Spec, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> tuple[Spec, Spec, Spec]:
    count = unbacked("unique", 0, product(x.shape))
    inverse = fresh(x, x.shape, torch.int64) if return_inverse or return_counts else vector(x, 0, torch.int64)
    return vector(x, count), inverse, vector(x, count if return_counts else 0, torch.int64)


rule("_unique")(lambda x, sorted=True, return_inverse=False: unique(x, sorted, return_inverse)[:2])


@rule("unique_dim unique_dim_consecutive")
def unique_dim(x: Spec, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> tuple[Spec, Spec, Spec]:
    dim = wrap_dim(dim, len(x.shape))
    count = unbacked("unique", 0, x.shape[dim])
    shape = (*x.shape[:dim], count, *x.shape[dim + 1:])
    order = [dim, *(d for d in range(len(shape)) if d != dim)]      # sorted with that dimension in front
    strides = dict(zip(order, contiguous_strides(tuple(shape[d] for d in order))))
    values = Spec(shape, tuple(strides[d] for d in range(len(shape))), 0, x.dtype, x.device)
    return values, vector(x, x.shape[dim], torch.int64), vector(x, count, torch.int64)


@rule("unique_consecutive")
def unique_consecutive(x: Spec, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None) -> tuple[Spec, Spec, Spec]:
    if dim is not None:
        return unique_dim(x, dim)
    count = unbacked("unique_consecutive", 0, product(x.shape))
    inverse = fresh(x, x.shape, torch.int64) if return_inverse else vector(x, 0, torch.int64)
    return vector(x, count), inverse, vector(x, count if return_counts else 0, torch.int64)


# ---------------------------------------------------------------- counts

@rule("bincount")
def bincount(x: Spec, weights: Spec | None = None, minlength: Size = 0) -> Spec:
    dtype = torch.int64 if weights is None else weights.dtype if weights.dtype is torch.float32 else torch.float64
    return vector(x, unbacked("bincount", minlength if type(minlength) is int else 0), dtype)


rule("histc")(lambda x, bins=100, *limits: fresh(x, (bins,)))
rule("histogram.bin_ct")(lambda x, bins=100, **options: (fresh(x, (bins,)), fresh(x, (bins + 1,))))
rule("histogram.bins_tensor")(lambda x, bins, **options: (fresh(x, (product(bins.shape) - 1,)), fresh(x, bins.shape)))
rule("_histogramdd_bin_edges")(lambda x, bins, **options: [fresh(x, (n + 1,)) for n in bins])
rule("_histogramdd_from_bin_cts")(lambda x, bins, **options: fresh(x, bins))
rule("_histogramdd_from_bin_tensors")(lambda x, bins, **options: fresh(x, [product(edges.shape) - 1 for edges in bins]))


# ---------------------------------------------------------------- jagged values

operator("_jagged_to_padded_dense_forward.* _padded_dense_to_jagged_forward.*", library=True)
rule("_jagged_to_padded_dense_forward")(
    lambda values, offsets, max_lengths, padding_value=0.0: fresh(values, (offsets[0].shape[0] - 1, *max_lengths, *values.shape[1:])))


@rule("_padded_dense_to_jagged_forward")
def padded_to_jagged(dense: Spec, offsets: Sequence[Spec], total_L: Size | None = None) -> Spec:
    total = unbacked("the number of values", 0, None) if total_L is None else total_L
    return fresh(dense, (total, *dense.shape[1 + len(offsets):]))
