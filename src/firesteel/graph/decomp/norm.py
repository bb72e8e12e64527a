"""Decompositions of normalisations, softmax, and their gradients.

Half-precision inputs are computed in float32 and rounded once, as eager does.  Statistics have the dtype that eager's kernels
give them (the rules of `graph/rules/nn.py`).
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp.table import aten, cast, decomposition, in_format_of, is_nothing, shaped, widen, wrap
from firesteel.graph.rules.nn import group_stats_dtype, stats_dtype


def _optional(x: Tensor | None) -> Tensor | None:
    return None if x is None else widen(x)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


# ---------------------------------------------------------------- layer norm

@decomposition("native_layer_norm")
def native_layer_norm(x: Tensor, normalized: Sequence[Any], weight: Tensor | None, bias: Tensor | None, eps: float):
    stats = stats_dtype(x, weight)
    wide = widen(x)
    dims = list(range(x.dim() - len(normalized), x.dim()))
    var, mean = aten.var_mean.correction(wide, dims, correction=0, keepdim=True)
    rstd = aten.rsqrt.default(var + eps)
    out = _scaled((wide - mean) * rstd, _optional(weight), _optional(bias))
    return _contiguous(cast(out, x.dtype)), cast(mean, stats), cast(rstd, stats)


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else aten.clone.default(x, memory_format=torch.contiguous_format)


@decomposition("native_layer_norm_backward")
def native_layer_norm_backward(grad: Tensor, x: Tensor, normalized: Sequence[Any], mean: Tensor, rstd: Tensor, weight: Tensor | None,
                               bias: Tensor | None, mask: Sequence[bool]):
    inner = list(range(x.dim() - len(normalized), x.dim()))
    outer = list(range(x.dim() - len(normalized)))
    grad_wide, mean, rstd = widen(grad), widen(mean), widen(rstd)
    normal = (widen(x) - mean) * rstd
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        scaled = grad_wide if weight is None else grad_wide * widen(weight)
        grad_x = _contiguous(cast(_normal_grad(scaled, normal, rstd, inner), x.dtype))
    if mask[1] and weight is not None:
        grad_weight = cast(_summed(grad_wide * normal, outer), weight.dtype)
    if mask[2] and bias is not None:
        grad_bias = cast(_summed(grad_wide, outer), bias.dtype)
    return grad_x, grad_weight, grad_bias


def _normal_grad(scaled: Tensor, normal: Tensor, rstd: Tensor, dims: list[int]) -> Tensor:
    """The gradient of (x - mean) * rstd, where mean and rstd are taken over dims."""
    first = aten.mean.dim(scaled, dims, True)
    second = aten.mean.dim(scaled * normal, dims, True)
    return (scaled - first - normal * second) * rstd


def _summed(x: Tensor, dims: list[int]) -> Tensor:
    return aten.sum.dim_IntList(x, dims) if dims else aten.clone.default(x)


# ---------------------------------------------------------------- rms norm

@decomposition("_fused_rms_norm")
def fused_rms_norm(x: Tensor, normalized: Sequence[Any], weight: Tensor | None, eps: float | None):
    wide = widen(x)
    dims = list(range(x.dim() - len(normalized), x.dim()))
    rstd = aten.rsqrt.default(aten.mean.dim(wide * wide, dims, True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    return cast(_scaled(wide * rstd, _optional(weight), None), x.dtype), rstd


@decomposition("_fused_rms_norm_backward")
def fused_rms_norm_backward(grad: Tensor, x: Tensor, normalized: Sequence[Any], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]):
    inner = list(range(x.dim() - len(normalized), x.dim()))
    outer = list(range(x.dim() - len(normalized)))
    wide, normal = widen(grad), widen(x) * rstd
    scaled = wide if weight is None else wide * widen(weight)
    grad_x = cast((scaled - normal * aten.mean.dim(scaled * normal, inner, True)) * rstd, x.dtype) if mask[0] else None
    grad_weight = cast(_summed(wide * normal, outer), weight.dtype) if mask[1] and weight is not None else None
    return grad_x, grad_weight


# ---------------------------------------------------------------- group norm

@decomposition("native_group_norm")
def native_group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, n: Any, c: Any, hxw: Any, group: int, eps: float):
    wide = shaped(widen(x), [n, group, c // group * hxw])
    var, mean = aten.var_mean.correction(wide, [2], correction=0, keepdim=True)
    rstd = aten.rsqrt.default(var + eps)
    normal = shaped((wide - mean) * rstd, list(x.shape))
    channel = [1, c] + [1] * (x.dim() - 2)
    out = _scaled(normal, *(None if p is None else aten.view.default(widen(p), channel) for p in (weight, bias)))
    stats = group_stats_dtype(x, weight)
    return in_format_of(cast(out, x.dtype), x), *(cast(aten.view.default(s, [n, group]), stats) for s in (mean, rstd))


@decomposition("native_group_norm_backward")
def native_group_norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: Any, c: Any, hxw: Any,
                               group: int, mask: Sequence[bool]):
    per = c // group
    grouped = [n, group, per, hxw]
    mean, rstd = (aten.view.default(widen(s), [n, group, 1, 1]) for s in (mean, rstd))
    wide = shaped(widen(grad), grouped)
    normal = (shaped(widen(x), grouped) - mean) * rstd
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        scaled = wide if weight is None else wide * aten.view.default(widen(weight), [1, group, per, 1])
        grad_x = in_format_of(cast(shaped(_normal_grad(scaled, normal, rstd, [2, 3]), list(x.shape)), x.dtype), x)
    dtype = x.dtype if weight is None else weight.dtype
    if mask[1]:
        grad_weight = cast(shaped(aten.sum.dim_IntList(wide * normal, [0, 3]), [c]), dtype)
    if mask[2]:
        grad_bias = cast(shaped(aten.sum.dim_IntList(wide, [0, 3]), [c]), dtype)
    return grad_x, grad_weight, grad_bias


# ---------------------------------------------------------------- batch norm

def _channel(stat: Tensor, ndim: int) -> Tensor:
    """A vector over channels, to be broadcast against [batch, channel, ...]."""
    return aten.view.default(stat, [1, -1] + [1] * (ndim - 2)) if ndim > 2 else aten.unsqueeze.default(stat, 0)


def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Any, var: Any, training: bool,
                momentum: float, eps: float):
    """(output, saved mean, saved 1/std, new running mean, new running variance)"""
    ndim, wide = x.dim(), widen(x)
    dims = [0, *range(2, ndim)]
    new_mean, new_var = mean, var
    if training:
        batch_var, batch_mean = aten.var_mean.correction(wide, dims, correction=0, keepdim=False)
        invstd = aten.rsqrt.default(batch_var + eps)
        save_mean, save_invstd = (cast(s, stats_dtype(x, weight)) for s in (batch_mean, invstd))
        if mean is not None:
            count = x.numel() // x.shape[1]
            new_mean = cast(batch_mean * momentum + widen(mean) * (1 - momentum), mean.dtype)
            new_var = cast(aten.mul.Tensor(batch_var, momentum * count / (count - 1)) + widen(var) * (1 - momentum), var.dtype)
    else:
        batch_mean, invstd = cast(mean, wide.dtype), aten.rsqrt.default(cast(var, wide.dtype) + eps)
        shape = [x.shape[1]] if x.device.type == "cuda" else [0]        # nobody reads them, but eager makes them
        save_mean = save_invstd = aten.new_empty.default(x, shape, dtype=stats_dtype(x, weight))
    normal = (wide - _channel(batch_mean, ndim)) * _channel(invstd, ndim)
    out = _scaled(normal, *(None if p is None else _channel(widen(p), ndim) for p in (weight, bias)))
    return in_format_of(cast(out, x.dtype), x), save_mean, save_invstd, new_mean, new_var


@decomposition("native_batch_norm")
def native_batch_norm(x, weight, bias, mean, var, training: bool, momentum: float, eps: float):
    if training and mean is not None:
        return NotImplemented       # the recorder turns it into the functional form
    return _batch_norm(x, weight, bias, mean, var, training, momentum, eps)[:3]


@decomposition("_native_batch_norm_legit.no_stats")
def native_batch_norm_no_stats(x, weight, bias, training: bool, momentum: float, eps: float):
    return _batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


@decomposition("_native_batch_norm_legit_no_training")
def native_batch_norm_no_training(x, weight, bias, mean, var, momentum: float, eps: float):
    return _batch_norm(x, weight, bias, mean, var, False, momentum, eps)[:3]


@decomposition("_native_batch_norm_legit_functional")
def native_batch_norm_functional(x, weight, bias, mean, var, training: bool, momentum: float, eps: float):
    return _batch_norm(x, weight, bias, mean, var, training, momentum, eps)


@decomposition("cudnn_batch_norm")
def cudnn_batch_norm(x, weight, bias, mean, var, training: bool, momentum: float, eps: float):
    if training and mean is not None:
        return NotImplemented
    out = _batch_norm(x, weight, bias, mean, var, training, momentum, eps)[:3]
    return *out, aten.new_empty.default(x, [0], dtype=torch.uint8)


@decomposition("native_batch_norm_backward")
def native_batch_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, mean, var, save_mean, save_invstd, train: bool, eps: float,
                               mask: Sequence[bool]):
    ndim = x.dim()
    dims = [0, *range(2, ndim)]
    wide = widen(grad)
    dtype = wide.dtype
    if not train:
        save_mean, save_invstd = cast(mean, dtype), aten.rsqrt.default(cast(var, dtype) + eps)
    center, invstd = _channel(cast(save_mean, dtype), ndim), _channel(cast(save_invstd, dtype), ndim)
    normal = (widen(x) - center) * invstd
    bias_sum = aten.sum.dim_IntList(wide, dims)
    weight_sum = aten.sum.dim_IntList(wide * normal, dims)
    grad_x = None
    if mask[0]:
        factor = invstd if weight is None else invstd * _channel(widen(weight), ndim)
        inner = wide
        if train:
            share = 1.0 / (x.numel() // x.shape[1])
            inner = wide - _channel(bias_sum, ndim) * share - normal * (_channel(weight_sum, ndim) * share)
        grad_x = in_format_of(cast(inner * factor, x.dtype), grad if x.device.type == "cuda" and not train else x)
    kind = stats_dtype(x, None) if weight is None else weight.dtype
    return grad_x, cast(weight_sum, kind) if mask[1] else None, cast(bias_sum, kind) if mask[2] else None


@decomposition("cudnn_batch_norm_backward")
def cudnn_batch_norm_backward(x, grad, weight, mean, var, save_mean, save_invstd, eps: float, reserve):
    return native_batch_norm_backward(grad, x, weight, mean, var, save_mean, save_invstd, True, eps, [True, True, True])


# ---------------------------------------------------------------- softmax

def _shifted(x: Tensor, dim: int) -> Tensor:
    return x - aten.amax.default(x, [dim], True)


@decomposition("_softmax", core=False)
def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widen(x)
    result = torch.float32 if half_to_float else x.dtype
    if is_nothing(x):
        return aten.empty_like.default(x, dtype=result, memory_format=torch.contiguous_format)
    exps = aten.exp.default(_shifted(wide, wrap(dim, x.dim())) if x.dim() else wide - wide)
    return _contiguous(cast(exps / aten.sum.dim_IntList(exps, [dim] if x.dim() else [], True), result))


@decomposition("_log_softmax")
def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    result = torch.float32 if half_to_float else x.dtype
    if x.dim() == 0 or is_nothing(x):
        return NotImplemented
    shifted = _shifted(widen(x), wrap(dim, x.dim()))
    total = aten.log.default(aten.sum.dim_IntList(aten.exp.default(shifted), [dim], True))
    return _contiguous(cast(shifted - total, result))


@decomposition("_softmax_backward_data", core=False)
def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    wide = widen(output)
    product = widen(grad) * wide
    return _contiguous(cast(product - wide * aten.sum.dim_IntList(product, [dim], True), input_dtype))


@decomposition("_log_softmax_backward_data")
def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    wide = widen(grad)
    total = aten.sum.dim_IntList(wide, [dim], True)
    return _contiguous(cast(wide - aten.exp.default(widen(output)) * total, input_dtype))


@decomposition("_safe_softmax")
def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax in which a row of -inf gives zeros."""
    out = aten._softmax.default(cast(x, dtype or x.dtype), dim, False)
    blocked = aten.all.dim(x == -math.inf, dim, True)
    return aten.where.self(blocked, aten.scalar_tensor.default(0, dtype=out.dtype, device=x.device), out)


@decomposition("logsumexp", core=False)
def logsumexp(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    wide = x if x.dtype.is_floating_point else cast(x, torch.get_default_dtype())
    top = aten.amax.default(wide, dims, True)
    top = aten.where.self(aten.isinf.default(top), aten.zeros_like.default(top), top)
    total = aten.log.default(aten.sum.dim_IntList(aten.exp.default(wide - top), dims, keepdim))
    return total + (top if keepdim else aten.squeeze.dims(top, dims))


# ---------------------------------------------------------------- moments

@decomposition("var.correction", core=False)
def var(x: Tensor, dim=None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return aten.var_mean.correction(x, dim, correction=correction, keepdim=keepdim)[0]


@decomposition("std.correction", core=False)
def std(x: Tensor, dim=None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return aten.sqrt.default(aten.var_mean.correction(x, dim, correction=correction, keepdim=keepdim)[0])


@decomposition("var_mean.correction", core=False)
def var_mean(x: Tensor, dim=None, *, correction: Any = None, keepdim: bool = False):
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
