"""Rules of neural-network operators that are neither pointwise nor matrix products: normalisation, softmax, losses, pooling."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firesteel.graph.rules.base import broadcast, check, expands_to, floating, result_dtype, rule, wrap_dim
from firesteel.graph.rules.pointwise import elementwise
from firesteel.graph.sizes import less, product, same
from firesteel.graph.spec import Spec, channels_last_strides, contiguous_strides, fresh, is_channels_last, like, suggests_channels_last
from firesteel.sym.expr import Size

_HALF = (torch.float16, torch.bfloat16)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which eager computes statistics."""
    return torch.float32 if dtype in _HALF else dtype


def suggested(x: Spec, shape: tuple[Size, ...] | None = None, dtype: torch.dtype | None = None) -> Spec:
    """A fresh tensor in the memory format that eager would suggest for x."""
    shape = x.shape if shape is None else shape
    strides = channels_last_strides(shape) if len(shape) in (4, 5) and suggests_channels_last(x) else contiguous_strides(shape)
    return Spec(shape, strides, 0, dtype or x.dtype, x.device)


# ---------------------------------------------------------------- softmax

@rule("_softmax _log_softmax")
def softmax(x: Spec, dim: int, half_to_float: bool) -> Spec:
    wrap_dim(dim, len(x.shape))
    return like(fresh(x, dtype=torch.float32 if half_to_float else x.dtype), memory_format=torch.contiguous_format)


@rule("_safe_softmax")
def safe_softmax(x: Spec, dim: int, dtype: torch.dtype | None = None) -> Spec:
    return fresh(x, dtype=dtype)


@rule("_softmax_backward_data _log_softmax_backward_data")
def softmax_backward(grad: Spec, output: Spec, dim: int, input_dtype: torch.dtype) -> Spec:
    return fresh(grad, dtype=input_dtype)


# ---------------------------------------------------------------- normalisation

@rule("native_layer_norm")
def native_layer_norm(x: Spec, normalized: Sequence[Size], weight: Spec | None, bias: Spec | None, eps: float) -> tuple[Spec, Spec, Spec]:
    n = len(normalized)
    check(len(x.shape) >= n, f"Given normalized_shape={list(normalized)}, expected input with shape [*, ...], but got {x.shape}")
    stats = fresh(x, (*x.shape[:len(x.shape) - n], *(1,) * n), stats_dtype(x, weight))
    return fresh(x), stats, stats


def stats_dtype(x: Any, weight: Any) -> torch.dtype:
    """The dtype of the saved statistics (of Specs or tensors)."""
    return accumulate_dtype(x.dtype) if x.device.type != "cpu" or _mixed(x, weight) else x.dtype


def group_stats_dtype(x: Any, weight: Any) -> torch.dtype:
    """The same for group normalisation, which saves in the input's dtype on every device."""
    return accumulate_dtype(x.dtype) if _mixed(x, weight) else x.dtype


def _mixed(x: Spec, weight: Spec | None) -> bool:
    return weight is not None and weight.dtype is not x.dtype


@rule("native_layer_norm_backward")
def native_layer_norm_backward(grad: Spec, x: Spec, normalized, mean: Spec, rstd: Spec, weight: Spec | None, bias: Spec | None,
                               mask: Sequence[bool]) -> tuple[Spec | None, ...]:
    return (fresh(x) if mask[0] else None,
            fresh(weight) if mask[1] and weight is not None else None,
            fresh(bias) if mask[2] and bias is not None else None)


@rule("_fused_rms_norm")
def fused_rms_norm(x: Spec, normalized: Sequence[Size], weight: Spec | None, eps: float | None) -> tuple[Spec, Spec]:
    n = len(normalized)
    return fresh(x), fresh(x, (*x.shape[:len(x.shape) - n], *(1,) * n), accumulate_dtype(x.dtype))


@rule("_fused_rms_norm_backward")
def fused_rms_norm_backward(grad: Spec, x: Spec, normalized, rstd: Spec, weight: Spec | None, mask: Sequence[bool]) -> tuple:
    return fresh(x) if mask[0] else None, fresh(weight) if mask[1] and weight is not None else None


@rule("native_group_norm")
def native_group_norm(x: Spec, weight: Spec | None, bias: Spec | None, n: Size, c: Size, hxw: Size, group: int, eps: float) -> tuple:
    stats = fresh(x, (n, group), group_stats_dtype(x, weight))
    return suggested(x), stats, stats


@rule("native_group_norm_backward")
def native_group_norm_backward(grad: Spec, x: Spec, mean: Spec, rstd: Spec, weight: Spec | None, n, c, hxw, group, mask) -> tuple:
    parameter = fresh(weight) if weight is not None else fresh(x, (c,))
    return suggested(x) if mask[0] else None, parameter if mask[1] else None, parameter if mask[2] else None


def _batch_stats(x: Spec, weight: Spec | None, training: bool) -> Spec:
    return fresh(x, (x.shape[1],) if training or x.device.type == "cuda" else (0,), stats_dtype(x, weight))


@rule("native_batch_norm _native_batch_norm_legit")
def native_batch_norm(x: Spec, weight: Spec | None, bias: Spec | None, running_mean: Spec | None, running_var: Spec | None,
                      training: bool, momentum: float, eps: float) -> tuple[Spec, Spec, Spec]:
    stats = _batch_stats(x, weight, training)
    return batch_norm_output(x), stats, stats


def batch_norm_output(x: Spec) -> Spec:
    return suggested(x)


@rule("_native_batch_norm_legit.no_stats")
def native_batch_norm_no_stats(x: Spec, weight, bias, training: bool, momentum: float, eps: float) -> tuple[Spec, Spec, Spec]:
    return native_batch_norm(x, weight, bias, None, None, training, momentum, eps)


@rule("_native_batch_norm_legit_no_training")
def native_batch_norm_no_training(x: Spec, weight, bias, mean: Spec, var: Spec, momentum: float, eps: float) -> tuple[Spec, Spec, Spec]:
    return native_batch_norm(x, weight, bias, mean, var, False, momentum, eps)


@rule("_native_batch_norm_legit_functional")
def native_batch_norm_functional(x: Spec, weight, bias, mean: Spec, var: Spec, training: bool, momentum: float, eps: float) -> tuple:
    return (*native_batch_norm(x, weight, bias, mean, var, training, momentum, eps), like(mean), like(var))


@rule("native_batch_norm_backward")
def native_batch_norm_backward(grad: Spec, x: Spec, weight: Spec | None, mean, var, save_mean, save_invstd, train: bool, eps: float,
                               mask: Sequence[bool]) -> tuple[Spec | None, ...]:
    parameter = fresh(weight) if weight is not None else fresh(x, (x.shape[1],), stats_dtype(x, None))
    grad_x = like(grad) if x.device.type == "cuda" and not train else batch_norm_output(x)
    return grad_x if mask[0] else None, parameter if mask[1] else None, parameter if mask[2] else None


@rule("cudnn_batch_norm")
def cudnn_batch_norm(x: Spec, weight: Spec, bias: Spec | None, mean, var, training: bool, factor: float, eps: float) -> tuple:
    stats = fresh(weight, (x.shape[1],) if training else (0,))
    return batch_norm_output(x), stats, stats, fresh(x, (0,), torch.uint8)


@rule("cudnn_batch_norm_backward")
def cudnn_batch_norm_backward(x: Spec, grad: Spec, weight: Spec, *rest: Any) -> tuple[Spec, Spec, Spec]:
    return batch_norm_output(x), fresh(weight), fresh(weight)


# ---------------------------------------------------------------- losses

@rule("nll_loss_forward")
def nll_loss_forward(x: Spec, target: Spec, weight: Spec | None, reduction: int, ignore_index: Size) -> tuple[Spec, Spec]:
    check(0 < len(x.shape) <= 2, "input tensor should be 1D or 2D")
    shape = x.shape[:1] if reduction == 0 and len(x.shape) == 2 else ()
    return fresh(x, shape), fresh(x, ())


@rule("nll_loss2d_forward")
def nll_loss2d_forward(x: Spec, target: Spec, weight: Spec | None, reduction: int, ignore_index: Size) -> tuple[Spec, Spec]:
    shape = (x.shape[0], *x.shape[2:]) if reduction == 0 else ()
    return fresh(x, shape), fresh(x, ())


@rule("nll_loss_backward nll_loss2d_backward")
def nll_loss_backward(grad: Spec, x: Spec, *rest: Any) -> Spec:
    return fresh(x)


def _loss(operands: list[Spec], reduction: int, dtype: torch.dtype) -> Spec:
    full = elementwise(operands, dtype)
    return full if reduction == 0 else fresh(full, ())


def _loss_in_target(x: Spec, target: Spec, reduction: int, dtype: torch.dtype) -> Spec:
    """A loss that eager computes in place, in a copy of the target with this dtype."""
    check(expands_to(x.shape, target.shape), f"The size of tensor a {list(x.shape)} must match the size of tensor b {list(target.shape)}")
    check(torch.can_cast(result_dtype((x, target)), dtype), f"result type can't be cast to the desired output type {dtype}")
    return _loss([target], reduction, dtype)


@rule("mse_loss smooth_l1_loss")
def mse_loss(x: Spec, target: Spec, reduction: int = 1, *args: Any) -> Spec:
    return _loss([x, target], reduction, result_dtype((x, target)))


@rule("huber_loss")
def huber_loss(x: Spec, target: Spec, reduction: int = 1, delta: float = 1.0) -> Spec:
    return _loss([x, target], reduction, x.dtype)


@rule("soft_margin_loss")
def soft_margin_loss(x: Spec, target: Spec, reduction: int = 1) -> Spec:
    return _loss_in_target(x, target, reduction, x.dtype)


@rule("binary_cross_entropy")
def binary_cross_entropy(x: Spec, target: Spec, weight: Spec | None = None, reduction: int = 1) -> Spec:
    return like(x) if reduction == 0 else fresh(x, ())


@rule("binary_cross_entropy_with_logits")
def bce_with_logits(x: Spec, target: Spec, weight: Spec | None = None, pos_weight: Spec | None = None, reduction: int = 1) -> Spec:
    return _loss_in_target(x, target, reduction, target.dtype)


@rule("mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward")
def mse_loss_backward(grad: Spec, x: Spec, target: Spec, *args: Any) -> Spec:
    return elementwise([x, target, grad], result_dtype((x, target)))


@rule("binary_cross_entropy_backward")
def bce_backward(grad: Spec, x: Spec, target: Spec, weight: Spec | None = None, reduction: int = 1) -> Spec:
    return like(x)


@rule("_cdist_forward")
def cdist_forward(a: Spec, b: Spec, p: float, mode: Any) -> Spec:
    return fresh(a, (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2]), floating(a.dtype))


# ---------------------------------------------------------------- pooling

def _pair(value: Any, n: int) -> list[Size]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * n if len(values) == 1 else values


def pooled_size(size: Size, kernel: Size, stride: Size, padding: Size, dilation: Size, ceil_mode: bool) -> Size:
    reach = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return reach // stride + 1
    out = -(-reach // stride) + 1
    return out if less((out - 1) * stride, size + padding) else out - 1


def _pooled(x: Spec, n: int, kernel, stride, padding, dilation, ceil_mode: bool) -> tuple[Size, ...]:
    kernel = _pair(kernel, n)
    stride, padding, dilation = _pair(stride, n) if stride else kernel, _pair(padding, n), _pair(dilation, n)
    check(len(x.shape) in (n + 1, n + 2), f"Expected {n + 1}D or {n + 2}D tensor, but got: {list(x.shape)}")
    spatial = x.shape[-n:]
    return (*x.shape[:-n], *(pooled_size(s, k, st, p, d, ceil_mode) for s, k, st, p, d in zip(spatial, kernel, stride, padding, dilation)))


@rule("max_pool2d_with_indices")
def max_pool2d(x: Spec, kernel, stride=(), padding=0, dilation=1, ceil_mode: bool = False) -> tuple[Spec, Spec]:
    out = suggested(x, _pooled(x, 2, kernel, stride, padding, dilation, ceil_mode))
    return out, out.to(torch.int64)


@rule("max_pool3d_with_indices")
def max_pool3d(x: Spec, kernel, stride=(), padding=0, dilation=1, ceil_mode: bool = False) -> tuple[Spec, Spec]:
    out = suggested(x, _pooled(x, 3, kernel, stride, padding, dilation, ceil_mode))
    return out, out.to(torch.int64)


@rule("max_pool2d_with_indices_backward max_pool3d_with_indices_backward")
def max_pool_backward(grad: Spec, x: Spec, *rest: Any) -> Spec:
    return suggested(x)


@rule("avg_pool2d")
def avg_pool2d(x: Spec, kernel, stride=(), padding=0, ceil_mode: bool = False, include: bool = True, divisor=None) -> Spec:
    return suggested(x, _pooled(x, 2, kernel, stride, padding, 1, ceil_mode))


@rule("avg_pool3d")
def avg_pool3d(x: Spec, kernel, stride=(), padding=0, ceil_mode: bool = False, include: bool = True, divisor=None) -> Spec:
    return fresh(x, _pooled(x, 3, kernel, stride, padding, 1, ceil_mode))


@rule("avg_pool2d_backward")
def avg_pool2d_backward(grad: Spec, x: Spec, *rest: Any) -> Spec:
    return suggested(x)


@rule("avg_pool3d_backward")
def avg_pool3d_backward(grad: Spec, x: Spec, *rest: Any) -> Spec:
    return fresh(x)


@rule("_adaptive_avg_pool2d")
def adaptive_avg_pool2d(x: Spec, size: Sequence[Size]) -> Spec:
    return suggested(x, (*x.shape[:-2], *size))


@rule("_adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(grad: Spec, x: Spec) -> Spec:
    return suggested(x)


@rule("adaptive_max_pool2d")
def adaptive_max_pool2d(x: Spec, size: Sequence[Size]) -> tuple[Spec, Spec]:
    out = suggested(x, (*x.shape[:-2], *size))
    return out, out.to(torch.int64)


@rule("adaptive_max_pool2d_backward")
def adaptive_max_pool2d_backward(grad: Spec, x: Spec, indices: Spec) -> Spec:
    return suggested(x)


# ---------------------------------------------------------------- resampling

@rule("upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d")
def upsample_nearest1d(x: Spec, size: Sequence[Size], *scales: Any) -> Spec:
    return fresh(x, (*x.shape[:2], *size))


@rule("upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d")
def upsample_nearest2d(x: Spec, size: Sequence[Size], *scales: Any) -> Spec:
    return suggested(x, (*x.shape[:2], *size))


@rule("upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa")
def upsample_bilinear2d(x: Spec, size: Sequence[Size], align_corners: bool, *scales: Any) -> Spec:
    return suggested(x, (*x.shape[:2], *size))


@rule("upsample_nearest2d_backward upsample_nearest1d_backward upsample_nearest3d_backward _upsample_nearest_exact1d_backward "
      "_upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward")
def upsample_nearest_backward(grad: Spec, out_size, in_size: Sequence[Size], *scales: Any) -> Spec:
    return suggested(grad, tuple(in_size))


@rule("upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_linear1d_backward upsample_trilinear3d_backward "
      "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward")
def upsample_bilinear_backward(grad: Spec, out_size, in_size: Sequence[Size], align_corners: bool, *scales: Any) -> Spec:
    return suggested(grad, tuple(in_size))


@rule("glu")
def glu(x: Spec, dim: int = -1) -> Spec:
    dim = wrap_dim(dim, len(x.shape))
    check(same(x.shape[dim] % 2, 0), f"Halving dimension must be even, but dimension {dim} is size {x.shape[dim]}")
    halved = x._replace(shape=(*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1:]))
    return elementwise([halved], x.dtype)


@rule("glu_backward")
def glu_backward(grad: Spec, x: Spec, dim: int) -> Spec:
    return fresh(x)


@rule("batch_norm_backward")
def batch_norm_backward(grad: Spec, x: Spec, weight: Spec, mean, var, save_mean, save_var, update: bool, eps: float,
                        mask: Sequence[bool], reserve: Spec) -> tuple[Spec | None, ...]:
    return native_batch_norm_backward(grad, x, weight, mean, var, save_mean, save_var, update, eps, mask)


@rule("_batch_norm_with_update")
def batch_norm_with_update(x: Spec, weight, bias, mean, var, momentum: float, eps: float) -> tuple[Spec, ...]:
    return (*native_batch_norm(x, weight, bias, mean, var, True, momentum, eps), fresh(x, (0,), torch.uint8))


@rule("_batch_norm_with_update_functional")
def batch_norm_with_update_functional(x: Spec, weight, bias, mean, var, momentum: float, eps: float) -> tuple[Spec, ...]:
    return (*batch_norm_with_update(x, weight, bias, mean, var, momentum, eps), like(mean), like(var))


@rule("rrelu_with_noise")
def rrelu_with_noise(x: Spec, noise: Spec, *args: Any, **kwargs: Any) -> Spec:
    return like(x)


@rule("rrelu_with_noise_functional")
def rrelu_with_noise_functional(x: Spec, noise: Spec, *args: Any, **kwargs: Any) -> tuple[Spec, Spec]:
    return like(x), like(noise)


# ---------------------------------------------------------------- recurrent cells

@rule("_thnn_fused_lstm_cell")
def fused_lstm_cell(input_gates: Spec, hidden_gates: Spec, cx: Spec, input_bias=None, hidden_bias=None) -> tuple[Spec, Spec, Spec]:
    return like(cx), like(cx), fresh(cx, (cx.shape[0], cx.shape[1] * 4))


@rule("_thnn_fused_gru_cell")
def fused_gru_cell(input_gates: Spec, hidden_gates: Spec, hx: Spec, input_bias=None, hidden_bias=None) -> tuple[Spec, Spec]:
    return like(hx), fresh(hx, (hx.shape[0], hx.shape[1] * 5))


@rule("_thnn_fused_gru_cell_backward")
def fused_gru_cell_backward(grad: Spec, workspace: Spec, has_bias: bool) -> tuple[Spec | None, ...]:
    batch, width = workspace.shape[0], workspace.shape[1] // 5
    gates = fresh(workspace, (batch, width * 3))
    bias = fresh(workspace, (width * 3,)) if has_bias else None
    return gates, gates, fresh(workspace, (batch, width)), bias, bias


@rule("im2col")
def im2col(x: Spec, kernel, dilation, padding, stride) -> Spec:
    spatial = _pooled(x, 2, kernel, stride, padding, dilation, False)[-2:]
    return fresh(x, (*x.shape[:-3], x.shape[-3] * product(kernel), product(spatial)))


def channels_last(x: Spec) -> bool:
    return is_channels_last(x)
