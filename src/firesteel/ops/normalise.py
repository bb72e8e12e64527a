"""Normalisations and their gradients: layer, RMS, group, batch.

Half precision is computed in float32, as eager does; the statistics that are saved have eager's dtypes."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import cast, in_format_of, in_order, in_strides_of, shaped, widen
from firesteel.graph.rules.base import RULES, check, suggested
from firesteel.graph.rules.refusals import as_many, must_be_float, same_shape
from firesteel.graph.sizes import must_match
from firesteel.graph.spec import Spec, channels_last_strides, fresh, like, only_channels_last, wide_dtype
from firesteel.ops.block import decomposition, device_rule, operator, refuses
from firesteel.sym.expr import Size, product
from firesteel.targets import on_gpu, on_host

aten = torch.ops.aten

operator("native_layer_norm.*", recompute="reduce")


def stats_dtype(x: Any, weight: Any) -> torch.dtype:
    """The dtype of the saved statistics (of Specs or tensors)."""
    return wide_dtype(x.dtype) if not on_host(x) or _mixed(x, weight) else x.dtype


def group_stats_dtype(x: Any, weight: Any) -> torch.dtype:
    """The same for group normalisation, which saves in the input's dtype on every device."""
    return wide_dtype(x.dtype) if _mixed(x, weight) else x.dtype


def _mixed(x: Spec, weight: Spec | None) -> bool:
    return weight is not None and weight.dtype is not x.dtype


def same_or_wider(x: Spec, *parameters: Spec | None) -> None:
    """Parameters of a normalisation on the CPU: in the input's dtype, or in float32 where the input is narrower."""
    wider = x.dtype in (torch.float16, torch.bfloat16)
    for p in parameters:
        check(p is None or not on_host(x) or p.dtype is x.dtype or wider and p.dtype is torch.float32,
              "mixed dtype (CPU): expect parameter to have scalar type of Float")


def _like_input(grad: Spec, x: Spec) -> None:
    same_shape(grad.shape, x.shape, f"Expected grad to have the size of the input; but {list(grad.shape)} does not equal {list(x.shape)}")


def _optional(x: Tensor | None) -> Tensor | None:
    return None if x is None else widen(x)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _moments(wide: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """(variance, mean) in the dtype of `wide`, as eager's kernels of layer and group norm have them.

    The mean is rounded: off by c, it would add c**2 to the variance.  The mean distance from it (c, nearly exact) corrects both."""
    center = aten.mean.dim(wide, dims, True)
    distance = wide - center
    off = aten.mean.dim(distance, dims, True)
    variance = aten.mean.dim(distance * distance, dims, True) - off * off
    return aten.abs.default(variance), center + off         # below 0 by rounding only


def _summed(x: Tensor, dims: list[int]) -> Tensor:
    return aten.sum.dim_IntList(x, dims) if dims else aten.clone.default(x)


# ---------------------------------------------------------------- layer norm

@device_rule("native_layer_norm")
def native_layer_norm(x: Spec, normalized: Sequence[Size], weight: Spec | None, bias: Spec | None, eps: float) -> tuple[Spec, Spec, Spec]:
    n = len(normalized)
    check(len(x.shape) >= n, f"Given normalized_shape={list(normalized)}, expected input with shape [*, ...], but got {x.shape}")
    stats = fresh(x, (*x.shape[:len(x.shape) - n], *(1,) * n), stats_dtype(x, weight))
    return fresh(x), stats, stats


@refuses("native_layer_norm")
def refuse_native_layer_norm(x: Spec, normalized: Sequence[Size], weight: Spec | None, bias: Spec | None, eps: float) -> None:
    _normalized(x, normalized, weight)
    must_be_float(x, "layer_norm")
    same_or_wider(x, weight, bias)
    _normalized(x, normalized, bias)


@decomposition("native_layer_norm")
def decompose_native_layer_norm(x: Tensor, normalized: Sequence[Any], weight: Tensor | None, bias: Tensor | None, eps: float):
    stats = stats_dtype(x, weight)
    wide = widen(x)
    dims = list(range(x.dim() - len(normalized), x.dim()))
    var, mean = _moments(wide, dims)
    rstd = aten.rsqrt.default(var + eps)
    out = _scaled((wide - mean) * rstd, _optional(weight), _optional(bias))
    return in_order(cast(out, x.dtype)), cast(mean, stats), cast(rstd, stats)


@device_rule("native_layer_norm_backward")
def native_layer_norm_backward(grad: Spec, x: Spec, normalized, mean: Spec, rstd: Spec, weight: Spec | None, bias: Spec | None,
                               mask: Sequence[bool]) -> tuple[Spec | None, ...]:
    return (fresh(x) if mask[0] else None,
            fresh(weight) if mask[1] and weight is not None else None,
            fresh(bias) if mask[2] and bias is not None else None)


@refuses("native_layer_norm_backward")
def refuse_layer_norm_backward(grad: Spec, x: Spec, normalized: Sequence[Size], mean: Spec, rstd: Spec, weight: Spec | None, bias: Spec | None,
                        mask: Any) -> None:
    _like_input(grad, x)
    RULES[aten.native_layer_norm.default](x, normalized, weight, bias, 0.0)
    _normalized(x, normalized, weight, mean, rstd)


def _normalized(x: Spec, normalized: Sequence[Size], weight: Spec | None, *statistics: Spec) -> None:
    n = len(normalized)
    check(0 < n <= len(x.shape), f"Given normalized_shape={list(normalized)}, got input of size {list(x.shape)}")
    same_shape(x.shape[len(x.shape) - n:], normalized, f"Given normalized_shape={list(normalized)}, got input of size {list(x.shape)}")
    if weight is not None:
        same_shape(weight.shape, normalized, f"Expected a parameter of size {list(normalized)}, got {list(weight.shape)}")
    for part in statistics:
        as_many(part, product(x.shape[:len(x.shape) - n]), "statistics")


@decomposition("native_layer_norm_backward")
def decompose_native_layer_norm_backward(grad: Tensor, x: Tensor, normalized: Sequence[Any], mean: Tensor, rstd: Tensor, weight: Tensor | None,
                               bias: Tensor | None, mask: Sequence[bool]):
    inner = list(range(x.dim() - len(normalized), x.dim()))
    outer = list(range(x.dim() - len(normalized)))
    grad_wide, mean, rstd = widen(grad), widen(mean), widen(rstd)
    normal = (widen(x) - mean) * rstd
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        scaled = grad_wide if weight is None else grad_wide * widen(weight)
        grad_x = in_order(cast(_normal_grad(scaled, normal, rstd, inner), x.dtype))
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


# ---------------------------------------------------------------- RMS norm

@device_rule("_fused_rms_norm")
def fused_rms_norm(x: Spec, normalized: Sequence[Size], weight: Spec | None, eps: float | None) -> tuple[Spec, Spec]:
    n = len(normalized)
    return fresh(x), fresh(x, (*x.shape[:len(x.shape) - n], *(1,) * n), wide_dtype(x.dtype))


@refuses("_fused_rms_norm")
def refuse_rms_norm(x: Spec, normalized: Sequence[Size], weight: Spec | None, eps: float | None) -> None:
    must_be_float(x, "rms_norm", torch.complex64, torch.complex128)
    _normalized(x, _without_symbols(x, normalized), weight)


def _without_symbols(x: Spec, normalized: Sequence[Size]) -> Sequence[Size]:
    """The schema has plain ints: torch, which has compared them with the input's sizes before, hands on the bits of symbolic ones."""
    return [own if type(size) is int and size < -2 ** 62 else size for own, size in zip(x.shape[len(x.shape) - len(normalized):], normalized)]


@decomposition("_fused_rms_norm")
def decompose_fused_rms_norm(x: Tensor, normalized: Sequence[Any], weight: Tensor | None, eps: float | None):
    wide = widen(x)
    dims = list(range(x.dim() - len(normalized), x.dim()))
    rstd = aten.rsqrt.default(aten.mean.dim(wide * wide, dims, True) + (torch.finfo(wide.dtype).eps if eps is None else eps))
    return in_order(cast(_scaled(wide * rstd, _optional(weight), None), x.dtype)), rstd


@device_rule("_fused_rms_norm_backward")
def fused_rms_norm_backward(grad: Spec, x: Spec, normalized, rstd: Spec, weight: Spec | None, mask: Sequence[bool]) -> tuple:
    return fresh(x) if mask[0] else None, fresh(weight) if mask[1] and weight is not None else None


@refuses("_fused_rms_norm_backward")
def refuse_rms_norm_backward(grad: Spec, x: Spec, normalized: Sequence[Size], rstd: Spec, weight: Spec | None, mask: Any) -> None:
    _like_input(grad, x)
    _normalized(x, _without_symbols(x, normalized), weight, rstd)


@decomposition("_fused_rms_norm_backward")
def decompose_fused_rms_norm_backward(grad: Tensor, x: Tensor, normalized: Sequence[Any], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]):
    inner = list(range(x.dim() - len(normalized), x.dim()))
    outer = list(range(x.dim() - len(normalized)))
    wide, normal = widen(grad), widen(x) * rstd
    scaled = wide if weight is None else wide * widen(weight)
    grad_x = in_order(cast((scaled - normal * aten.mean.dim(scaled * normal, inner, True)) * rstd, x.dtype)) if mask[0] else None
    grad_weight = cast(_summed(wide * normal, outer), weight.dtype) if mask[1] and weight is not None else None
    return grad_x, grad_weight


# ---------------------------------------------------------------- group norm

@device_rule("native_group_norm")
def native_group_norm(x: Spec, weight: Spec | None, bias: Spec | None, n: Size, c: Size, hxw: Size, group: int, eps: float) -> tuple:
    stats = fresh(x, (n, group), group_stats_dtype(x, weight))
    return suggested(x), stats, stats


@refuses("native_group_norm")
def refuse_native_group_norm(x: Spec, weight: Spec | None, bias: Spec | None, n: Size, c: Size, hxw: Size, group: int, eps: float) -> None:
    same_or_wider(x, weight, bias)
    must_match(c % group, 0, f"Expected number of channels in input to be divisible by num_groups, but got {c} and {group}")
    must_match(x.numel(), n * c * hxw, "Expected X.numel() == N * C * HxW to be true, but got false.")
    for p in (weight, bias):
        if p is not None:
            check(len(p.shape) == 1, "Expected weight to be a vector of size equal to the number of channels in input")
            must_match(p.shape[0], c, "Expected weight to be a vector of size equal to the number of channels in input")


def _grouped(x: Tensor, n: Any, c: Any, hxw: Any, group: int) -> list[Any]:
    """The shape with the channels split: a view in every layout, where pixels keep their own dimensions."""
    return [n, group, c // group, *(x.shape[2:] if x.shape[:2] == (n, c) else [hxw])]


def _by_channels(x: Tensor, n: Any, c: Any) -> bool:
    """Normalised channel by channel?  CPU images may become channels-last later (graph/layouts.py), where a group is a short run; a scale and a
    shift for each channel, as eager has them, keep the loops along all channels."""
    return on_host(x) and x.dim() > 2 and x.shape[:2] == (n, c)


class _Groups:
    """Statistics [n, group] of an image, and the values [n, c, 1, ...] that each channel has of them."""

    def __init__(self, x: Tensor, n: Any, c: Any, group: int):
        self.pixels = list(range(2, x.dim()))
        self.groups, self.channels = [n, group, c // group], [n, c, *[1] * len(self.pixels)]

    def mean(self, image: Tensor) -> Tensor:
        return aten.mean.dim(shaped(aten.mean.dim(image, self.pixels), self.groups), [2])

    def spread(self, statistic: Tensor) -> Tensor:
        return shaped(aten.expand.default(aten.unsqueeze.default(statistic, 2), self.groups), self.channels)

    def parameter(self, p: Tensor) -> Tensor:
        return aten.view.default(widen(p), [1, *self.channels[1:]])


@decomposition("native_group_norm")
def decompose_native_group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, n: Any, c: Any, hxw: Any, group: int, eps: float):
    normalised = _normalised_by_channels if _by_channels(x, n, c) else _normalised_by_groups
    out, mean, rstd = normalised(x, weight, bias, n, c, hxw, group, eps)
    stats = group_stats_dtype(x, weight)
    return in_format_of(cast(out, x.dtype), x), *(cast(aten.view.default(s, [n, group]), stats) for s in (mean, rstd))


def _normalised_by_groups(x: Tensor, weight: Tensor | None, bias: Tensor | None, n: Any, c: Any, hxw: Any, group: int, eps: float):
    grouped = _grouped(x, n, c, hxw, group)
    wide = shaped(widen(x), grouped)
    var, mean = _moments(wide, list(range(2, len(grouped))))
    rstd = aten.rsqrt.default(var + eps)
    pixels = grouped[3:]
    normal = shaped((wide - mean) * rstd, [n, c, *pixels])
    channel = [1, c, *[1] * len(pixels)]
    out = _scaled(normal, *(None if p is None else aten.view.default(widen(p), channel) for p in (weight, bias)))
    return shaped(out, list(x.shape)), mean, rstd


def _normalised_by_channels(x: Tensor, weight: Tensor | None, bias: Tensor | None, n: Any, c: Any, hxw: Any, group: int, eps: float):
    of, wide = _Groups(x, n, c, group), widen(x)
    center = of.mean(wide)
    distance = wide - of.spread(center)
    off = of.mean(distance)
    rstd = aten.rsqrt.default(aten.abs.default(of.mean(distance * distance) - off * off) + eps)
    mean = center + off             # see _moments
    scale = of.spread(rstd) if weight is None else of.spread(rstd) * of.parameter(weight)
    shift = -(of.spread(mean) * scale)
    return wide * scale + (shift if bias is None else of.parameter(bias) + shift), mean, rstd


@device_rule("native_group_norm_backward")
def native_group_norm_backward(grad: Spec, x: Spec, mean: Spec, rstd: Spec, weight: Spec | None, n, c, hxw, group, mask) -> tuple:
    parameter = fresh(weight) if weight is not None else fresh(x, (c,))
    return suggested(x) if mask[0] else None, parameter if mask[1] else None, parameter if mask[2] else None


@refuses("native_group_norm_backward")
def refuse_group_norm_backward(grad: Spec, x: Spec, mean: Spec, rstd: Spec, weight: Spec | None, n: Size, c: Size, hxw: Size, group: int,
                               mask: Any) -> None:
    _like_input(grad, x)
    must_match(x.numel(), n * c * hxw, f"Expected {n} * {c} * {hxw} elements, got {list(x.shape)}")
    for part in (mean, rstd):
        as_many(part, n * group, "statistics")
    as_many(weight, c, "weight")


@decomposition("native_group_norm_backward")
def decompose_native_group_norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: Any, c: Any, hxw: Any,
                               group: int, mask: Sequence[bool]):
    dtype = x.dtype if weight is None else weight.dtype
    differentiated = _differentiated_by_channels if _by_channels(x, n, c) else _differentiated_by_groups
    grad_x, grad_weight, grad_bias = differentiated(widen(grad), widen(x), widen(mean), widen(rstd), weight, n, c, hxw, group, mask)
    return (in_format_of(cast(shaped(grad_x, list(x.shape)), x.dtype), x) if mask[0] else None,
            cast(shaped(grad_weight, [c]), dtype) if mask[1] else None, cast(shaped(grad_bias, [c]), dtype) if mask[2] else None)


def _differentiated_by_groups(wide: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: Any, c: Any, hxw: Any, group: int,
                              mask: Sequence[bool]) -> tuple:
    grouped = _grouped(x, n, c, hxw, group)
    pixels = list(range(3, len(grouped)))
    ones = [1] * len(pixels)
    mean, rstd = (aten.view.default(s, [n, group, 1, *ones]) for s in (mean, rstd))
    wide = shaped(wide, grouped)
    normal = (shaped(x, grouped) - mean) * rstd
    scaled = wide if weight is None else wide * aten.view.default(widen(weight), [1, group, c // group, *ones])
    return (_normal_grad(scaled, normal, rstd, [2, *pixels]) if mask[0] else None,
            aten.sum.dim_IntList(wide * normal, [0, *pixels]) if mask[1] else None, aten.sum.dim_IntList(wide, [0, *pixels]) if mask[2] else None)


def _differentiated_by_channels(wide: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: Any, c: Any, hxw: Any, group: int,
                                mask: Sequence[bool]) -> tuple:
    """With sums over each channel's pixels; the image's gradient is the sum of the two images, each with a factor for each channel, and a shift."""
    of = _Groups(x, n, c, group)
    mean, rstd = of.spread(aten.view.default(mean, [n, group])), of.spread(aten.view.default(rstd, [n, group]))
    along, total = (aten.sum.dim_IntList(t, of.pixels, True) for t in (wide * (x - mean), wide))
    grad_x = None
    if mask[0]:
        factor = rstd if weight is None else rstd * of.parameter(weight)
        weighted = (shaped(t if weight is None else t * of.parameter(weight), of.groups) for t in (along, total))
        of_along, of_total = (of.spread(aten.sum.dim_IntList(t, [2]) / (c // group * hxw)) for t in weighted)
        slope = -(of_along * rstd * rstd * rstd)
        grad_x = wide * factor + (x * slope - (mean * slope + rstd * of_total))
    return grad_x, aten.sum.dim_IntList(along * rstd, [0]) if mask[1] else None, aten.sum.dim_IntList(total, [0]) if mask[2] else None


# ---------------------------------------------------------------- batch norm

@device_rule("native_batch_norm _native_batch_norm_legit")
def native_batch_norm(x: Spec, weight: Spec | None, bias: Spec | None, running_mean: Spec | None, running_var: Spec | None,
                      training: bool, momentum: float, eps: float) -> tuple[Spec, Spec, Spec]:
    stats = fresh(x, (x.shape[1],) if training or on_gpu(x) else (0,), stats_dtype(x, weight))
    return batch_norm_output(x), stats, stats


def batch_norm_output(x: Spec) -> Spec:
    """CUDA's kernel keeps the strides; the CPU's asks first whether they are contiguous."""
    if on_gpu(x):
        return like(x)
    return x._replace(strides=channels_last_strides(x.shape), offset=0) if only_channels_last(x) else fresh(x)


device_rule("_native_batch_norm_legit.no_stats")(
    lambda x, weight, bias, training, momentum, eps: native_batch_norm(x, weight, bias, None, None, training, momentum, eps))
device_rule("_native_batch_norm_legit_no_training")(
    lambda x, weight, bias, mean, var, momentum, eps: native_batch_norm(x, weight, bias, mean, var, False, momentum, eps))

device_rule("_native_batch_norm_legit_functional")(lambda x, weight, bias, mean, var, training, momentum, eps: (
    *native_batch_norm(x, weight, bias, mean, var, training, momentum, eps), like(mean), like(var)))


@device_rule("cudnn_batch_norm")
def cudnn_batch_norm(x: Spec, weight: Spec, bias: Spec | None, mean, var, training: bool, factor: float, eps: float) -> tuple:
    stats = fresh(weight, (x.shape[1],) if training else (0,))
    return suggested(x), stats, stats, fresh(x, (0,), torch.uint8)


@device_rule("_batch_norm_with_update")
def batch_norm_with_update(x: Spec, weight, bias, mean, var, momentum: float, eps: float) -> tuple[Spec, ...]:
    return (*native_batch_norm(x, weight, bias, mean, var, True, momentum, eps), fresh(x, (0,), torch.uint8))


device_rule("_batch_norm_with_update_functional")(lambda x, weight, bias, mean, var, momentum, eps: (
    *batch_norm_with_update(x, weight, bias, mean, var, momentum, eps), like(mean), like(var)))


@refuses("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional")
def refuse_native_batch_norm(x: Spec, weight: Spec | None, bias: Spec | None, mean: Spec | None, var: Spec | None, *rest: Any) -> None:
    must_be_float(x, "batch_norm")
    same_or_wider(x, weight, bias, mean, var)
    check(len(x.shape) >= 2, "Expected at least 2 dimensions")
    check(0 not in x.shape, f"input tensor must have at least one element, but got input_sizes = {list(x.shape)}")
    for p in (weight, bias, mean, var):
        if p is not None:
            check(len(p.shape) == 1, f"TensorAccessor expected 1 dims but tensor has {len(p.shape)}")
            must_match(p.shape[0], x.shape[1], f"expected a vector of {x.shape[1]} elements, one a channel, not of {p.shape[0]}")


refuses("_native_batch_norm_legit.no_stats")(lambda x, weight, bias, *rest: refuse_native_batch_norm(x, weight, bias, None, None))
refuses("_native_batch_norm_legit_no_training")(
    lambda x, weight, bias, mean, var, *rest: refuse_native_batch_norm(x, weight, bias, mean, var))


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
            unbiased = math.nan if type(count) is int and count == 1 else momentum * count / (count - 1)
            new_var = cast(aten.mul.Tensor(batch_var, unbiased) + widen(var) * (1 - momentum), var.dtype)
    else:
        batch_mean, invstd = cast(mean, wide.dtype), aten.rsqrt.default(cast(var, wide.dtype) + eps)
        shape = [x.shape[1]] if on_gpu(x) else [0]        # nobody reads them, but eager makes them
        save_mean = save_invstd = aten.new_empty.default(x, shape, dtype=stats_dtype(x, weight))
    normal = (wide - _channel(batch_mean, ndim)) * _channel(invstd, ndim)
    out = _scaled(normal, *(None if p is None else _channel(widen(p), ndim) for p in (weight, bias)))
    laid_out = in_strides_of if on_gpu(x) else in_format_of       # as eager's kernels do
    return laid_out(cast(out, x.dtype), x), save_mean, save_invstd, new_mean, new_var


def _channel(stat: Tensor, ndim: int) -> Tensor:
    """A vector over channels, to be broadcast against [batch, channel, ...]."""
    return aten.view.default(stat, [1, -1] + [1] * (ndim - 2)) if ndim > 2 else aten.unsqueeze.default(stat, 0)


@decomposition("native_batch_norm")
def decompose_native_batch_norm(x, weight, bias, mean, var, training: bool, momentum: float, eps: float):
    if training and mean is not None:
        return NotImplemented       # the recorder turns it into the functional form
    return _batch_norm(x, weight, bias, mean, var, training, momentum, eps)[:3]


decomposition("_native_batch_norm_legit.no_stats")(
    lambda x, weight, bias, training, momentum, eps: _batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3])
decomposition("_native_batch_norm_legit_no_training")(
    lambda x, weight, bias, mean, var, momentum, eps: _batch_norm(x, weight, bias, mean, var, False, momentum, eps)[:3])
decomposition("_native_batch_norm_legit_functional")(
    lambda x, weight, bias, mean, var, training, momentum, eps: _batch_norm(x, weight, bias, mean, var, training, momentum, eps))


@decomposition("cudnn_batch_norm")
def decompose_cudnn_batch_norm(x, weight, bias, mean, var, training: bool, momentum: float, eps: float):
    if training and mean is not None:
        return NotImplemented
    out = _batch_norm(in_format_of(x, x), weight, bias, mean, var, training, momentum, eps)[:3]
    return *out, aten.new_empty.default(x, [0], dtype=torch.uint8)


@device_rule("native_batch_norm_backward")
def native_batch_norm_backward(grad: Spec, x: Spec, weight: Spec | None, mean, var, save_mean, save_invstd, train: bool, eps: float,
                               mask: Sequence[bool]) -> tuple[Spec | None, ...]:
    parameter = fresh(weight) if weight is not None else fresh(x, (x.shape[1],), stats_dtype(x, None))
    grad_x = like(grad) if on_gpu(x) and not train else suggested(x)
    return grad_x if mask[0] else None, parameter if mask[1] else None, parameter if mask[2] else None


device_rule("cudnn_batch_norm_backward")(lambda x, grad, weight, *rest: (suggested(x), fresh(weight), fresh(weight)))


@device_rule("batch_norm_backward")
def batch_norm_backward(grad: Spec, x: Spec, weight: Spec, mean, var, save_mean, save_var, update: bool, eps: float,
                        mask: Sequence[bool], reserve: Spec) -> tuple[Spec | None, ...]:
    return native_batch_norm_backward(grad, x, weight, mean, var, save_mean, save_var, update, eps, mask)


@refuses("native_batch_norm_backward")
def refuse_batch_norm_backward(grad: Spec, x: Spec, weight: Spec | None, mean: Spec | None, var: Spec | None, save_mean: Spec | None,
                        save_invstd: Spec | None, train: bool, eps: float, mask: Any) -> None:
    _like_input(grad, x)
    for part in (weight, mean, var, *((save_mean, save_invstd) if train else ())):
        as_many(part, x.shape[1], "statistics")


@decomposition("native_batch_norm_backward")
def decompose_native_batch_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, mean, var, save_mean, save_invstd, train: bool, eps: float,
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
        grad_x = in_format_of(cast(inner * factor, x.dtype), grad if on_gpu(x) and not train else x)
    kind = stats_dtype(x, None) if weight is None else weight.dtype
    return grad_x, cast(weight_sum, kind) if mask[1] else None, cast(bias_sum, kind) if mask[2] else None


@decomposition("cudnn_batch_norm_backward")
def decompose_cudnn_batch_norm_backward(x, grad, weight, mean, var, save_mean, save_invstd, eps: float, reserve):
    return decompose_native_batch_norm_backward(grad, x, weight, mean, var, save_mean, save_invstd, True, eps, [True, True, True])
