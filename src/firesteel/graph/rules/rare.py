"""Rules of operators for which torch has no meta kernel, or one whose strides are not those of the CPU's kernel: linear algebra,
histograms, Fourier transforms, bags of embeddings, backwards of seldom used losses."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firesteel.errors import DataAccess
from firesteel.graph.rules.base import broadcast, rule, wrap_dim
from firesteel.graph.rules.nn import suggested
from firesteel.graph.sizes import current, less, product
from firesteel.graph.spec import Spec, contiguous_strides, fresh, like, sort_dims
from firesteel.sym.expr import Size


def _contiguous(x: Spec, shape: Sequence[Size], dtype: torch.dtype | None = None) -> Spec:
    return Spec(tuple(shape), contiguous_strides(tuple(shape)), 0, dtype or x.dtype, x.device)


@rule("multi_margin_loss_backward multilabel_margin_loss_backward fractional_max_pool3d_backward _ctc_loss_backward _ctc_loss_backward.Tensor")
def like_second(grad: Spec, x: Spec, *rest: Any, **options: Any) -> Spec:
    return _contiguous(x, x.shape)


@rule("multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(x: Spec, target: Spec, reduction: int) -> tuple[Spec, Spec]:
    each = x.shape[:1] if reduction == 0 and len(x.shape) == 2 else ()
    return _contiguous(x, each), _contiguous(x, target.shape)


# ---------------------------------------------------------------- linear algebra

def _by_columns(x: Spec, shape: Sequence[Size], dtype: torch.dtype | None = None) -> Spec:
    """A fresh batch of matrices stored by columns, as LAPACK does."""
    *batch, rows, columns = shape
    flat = contiguous_strides((*batch, columns, rows))
    return Spec(tuple(shape), (*flat[:-2], flat[-1], flat[-2]), 0, dtype or x.dtype, x.device)


@rule("geqrf")
def geqrf(x: Spec) -> tuple[Spec, Spec]:
    """The factors, and one coefficient a reflection."""
    *batch, rows, columns = x.shape
    return _by_columns(x, x.shape), _contiguous(x, (*batch, columns if less(columns, rows) else rows))


@rule("_linalg_svd")
def svd(x: Spec, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> tuple[Spec, Spec, Spec]:
    *batch, rows, columns = x.shape
    count = columns if less(columns, rows) else rows
    values = _contiguous(x, (*batch, count), torch.empty((), dtype=x.dtype).real.dtype)
    if not compute_uv:
        return _contiguous(x, (0,)), values, _contiguous(x, (0,))
    right = (*batch, columns if full_matrices else count, columns)
    left = _by_columns(x, (*batch, rows, rows if full_matrices else count))
    return left, values, _contiguous(x, right) if x.device.type == "cuda" else _by_columns(x, right)


@rule("linalg_eig")
def eig(x: Spec) -> tuple[Spec, Spec]:
    dtype = torch.complex64 if x.dtype in (torch.float32, torch.complex64) else torch.complex128
    return _contiguous(x, x.shape[:-1], dtype), _by_columns(x, x.shape, dtype)


@rule("linalg_cholesky_ex linalg_inv_ex")
def with_info(x: Spec, *options: Any, **named: Any) -> tuple[Spec, Spec]:
    """A matrix of the same shape, and a word that tells whether it went well."""
    return _by_columns(x, x.shape), _contiguous(x, x.shape[:-2], torch.int32)


@rule("_ctc_loss _ctc_loss.Tensor")
def ctc_loss(log_probs: Spec, targets: Spec, input_lengths: Any, target_lengths: Any, blank: int = 0,
             zero_infinity: bool = False) -> tuple[Spec, Spec]:
    """The losses, and the logarithms of the probabilities of all beginnings, twice as many as the longest target has places; in one of both forms
    the lengths of targets stand in a tensor."""
    steps, batch = log_probs.shape[:2]
    if isinstance(target_lengths, list):
        beginnings: Size = 2 * max(target_lengths, default=0) + 1
    else:
        beginnings = current.env.create_unbacked(1, None, "ctc_loss")
    return _contiguous(log_probs, (batch,)), _contiguous(log_probs, (batch, steps, beginnings))


@rule("_linalg_check_errors")
def check_errors(info: Spec, name: str, *, is_matrix: bool) -> None:
    """Raises at run time."""


@rule("_linalg_det")
def det(x: Spec) -> tuple[Spec, Spec, Spec]:
    """The determinant, the factors, the pivots."""
    return _contiguous(x, x.shape[:-2]), _by_columns(x, x.shape), _contiguous(x, x.shape[:-1], torch.int32)


@rule("linalg_qr")
def qr(x: Spec, mode: str = "reduced") -> tuple[Spec, Spec]:
    *batch, rows, columns = x.shape
    count = rows if mode == "complete" or less(rows, columns) else columns
    left = _by_columns(x, (*batch, rows, count)) if mode != "r" else _contiguous(x, (0,))
    return left, _by_columns(x, (*batch, count, columns))


@rule("_linalg_eigh")
def eigh(x: Spec, UPLO: str = "L", compute_v: bool = True) -> tuple[Spec, Spec]:
    values = _contiguous(x, x.shape[:-1], torch.empty((), dtype=x.dtype).real.dtype)
    return values, _by_columns(x, x.shape) if compute_v else _contiguous(x, (0,))


@rule("linalg_lstsq")
def lstsq(a: Spec, b: Spec, rcond: float | None = None, *, driver: str | None = None) -> tuple[Spec, Spec, Spec, Spec]:
    """Solution, residuals, rank, singular values; what the driver does not compute is empty.  The solution is the upper part of a
    matrix with as many rows as the larger side of `a`, stored by columns."""
    rows, columns = a.shape[-2:]
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    is_vector = len(b.shape) == len(a.shape) - 1
    count = 1 if is_vector else b.shape[-1]
    batch = a.shape[:-2] if is_vector else broadcast(a.shape[:-2], b.shape[:-2])
    tall = less(columns, rows)
    if tall and driver in ("gelsd", "gelss"):
        raise DataAccess(f"linalg.lstsq (driver {driver}, whose residuals are there for full rank only)")
    height = rows if tall else columns
    outer = [s * height * count for s in contiguous_strides(batch)]
    solution = fresh(a, (*batch, columns) if is_vector else (*batch, columns, count))
    solution = solution._replace(strides=(*outer, 1) if is_vector else (*outer, 1, height))
    residuals = (*batch, count) if tall and driver == "gels" else (0,)
    rank = (0,) if driver == "gels" else a.shape[:-2]
    singular = (*a.shape[:-2], columns if tall else rows) if driver in ("gelsd", "gelss") else (0,)
    return solution, _contiguous(a, residuals), _contiguous(a, rank, torch.int64), _contiguous(a, singular)


# ---------------------------------------------------------------- histograms

@rule("histc")
def histc(x: Spec, bins: int = 100, *limits: Any) -> Spec:
    return _contiguous(x, (bins,))


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


# ---------------------------------------------------------------- networks

@rule("grid_sampler_2d grid_sampler_3d")
def grid_sampler(x: Spec, grid: Spec, *options: Any) -> Spec:
    return _contiguous(x, (*x.shape[:2], *grid.shape[1:-1]))


@rule("isin.Tensor_Tensor")
def isin(x: Spec, among: Spec, **options: Any) -> Spec:
    return _contiguous(x, x.shape, torch.bool)


@rule("max_unpool2d")
def max_unpool2d(x: Spec, indices: Spec, output_size: Sequence[Size]) -> Spec:
    return suggested(x, (*x.shape[:-2], *output_size))


@rule("_embedding_bag _embedding_bag_forward_only")
def embedding_bag(weight: Spec, indices: Spec, offsets: Spec, scale_grad_by_freq: bool = False, mode: int = 0, sparse: bool = False,
                  per_sample_weights: Spec | None = None, include_last_offset: bool = False, padding_idx: int = -1) -> tuple[Spec, ...]:
    """Results, which bag an index is in (left out where sums are taken straight from the rows), sizes of bags, places of maxima."""
    bags = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]
    straight = (mode == 0 and padding_idx < 0 and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
                and weight.strides[1] == 1 and (per_sample_weights is None or per_sample_weights.strides[0] == 1))
    maxima = (bags, weight.shape[1]) if mode == 2 else (bags,)
    return (_contiguous(weight, (bags, weight.shape[1])), _contiguous(indices, (0,) if straight else indices.shape),
            _contiguous(indices, (bags,)), _contiguous(indices, maxima))


# ---------------------------------------------------------------- Fourier transforms

def _slowest_first(dims: Sequence[int], x: Spec) -> list[int]:
    """Dimensions by falling stride, those of one stride as they were."""
    return sort_dims(list(dims)[::-1], x.strides)[::-1]


def _untransformed(ndim: int, dims: Sequence[int]) -> list[int]:
    """The other dimensions in the order in which the library's partition leaves them: it fills each gap from the end."""
    order, first, last = list(range(ndim)), 0, ndim
    while first < last:
        if order[first] not in dims:
            first += 1
            continue
        last -= 1
        order[first], order[last] = order[last], order[first]
    return order[:first]


def _transformed(x: Spec, shape: Sequence[Size], dims: Sequence[int], dtype: torch.dtype) -> Spec:
    """Batch dimensions in the order of their strides, then the transformed ones: so the libraries lay out their results."""
    order = [*_slowest_first(_untransformed(len(shape), dims), x), *dims]
    strides = dict(zip(order, contiguous_strides(tuple(shape[d] for d in order))))
    return Spec(tuple(shape), tuple(strides[d] for d in range(len(shape))), 0, dtype, x.device)


def _complex_steps(x: Spec, dims: list[int]) -> Spec:
    """Transforms from complex to complex: all dimensions at once on the CPU, up to three at a time by the GPU's library."""
    while dims:
        dims = _slowest_first(dims, x)
        now = dims if x.device.type == "cpu" else dims[-3:]
        x, dims = _transformed(x, x.shape, now, x.dtype), dims[:len(dims) - len(now)]
    return x


@rule("_fft_c2c")
def complex_to_complex(x: Spec, dim: Sequence[int], normalization: int, forward: bool) -> Spec:
    return _complex_steps(x, [wrap_dim(d, len(x.shape)) for d in dim]) if dim else like(x)


def _at_once(dims: list[int]) -> bool:
    """Does the GPU's library make real transforms of these dimensions in one step?"""
    return len(dims) <= 3 and dims[:2] != [0, 1]


@rule("_fft_r2c")
def real_to_complex(x: Spec, dim: Sequence[int], normalization: int, onesided: bool) -> Spec:
    """The last of `dim` is the one that is halved; the GPU's library transforms it before the others, or all in the order given."""
    dims = [wrap_dim(d, len(x.shape)) for d in dim]
    *others, last = dims
    shape = [n // 2 + 1 if d == last and onesided else n for d, n in enumerate(x.shape)]
    dtype = x.dtype.to_complex()
    if x.device.type == "cpu":
        return _transformed(x, shape, [*_slowest_first(others, x), last], dtype)
    return _transformed(x, shape, dims, dtype) if _at_once(dims) else _complex_steps(_transformed(x, shape, [last], dtype), others)


@rule("_fft_c2r")
def complex_to_real(x: Spec, dim: Sequence[int], normalization: int, last_dim_size: Size) -> Spec:
    """All dimensions but the last go from complex to complex first; in one step the GPU's library reads a contiguous copy."""
    dims = [wrap_dim(d, len(x.shape)) for d in dim]
    shape = [last_dim_size if d == dims[-1] else n for d, n in enumerate(x.shape)]
    if x.device.type != "cpu" and _at_once(dims):
        return _transformed(fresh(x), shape, dims, x.dtype.to_real())
    return _transformed(_complex_steps(x, dims[:-1]), shape, dims[-1:], x.dtype.to_real())


# ---------------------------------------------------------------- fake quantisation

@rule("fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask "
      "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def fake_quantize(x: Spec, *settings: Any) -> tuple[Spec, Spec]:
    """The values, and where they lay within the range."""
    return like(x), like(x, dtype=torch.bool)


# ---------------------------------------------------------------- steps of optimisers

def _fused_step(lists: int) -> Any:
    """The first lists of arguments come back changed."""
    return lambda *args, **kwargs: tuple([list(specs) for specs in args[:lists]])


for _names, _lists in (("_fused_adam _fused_adam.tensor_lr _fused_adamw _fused_adamw.tensor_lr", 5),
                       ("_fused_sgd _fused_sgd.tensor_lr _fused_adagrad _fused_adagrad.tensor_lr", 3)):
    rule(_names)(_fused_step(_lists))
