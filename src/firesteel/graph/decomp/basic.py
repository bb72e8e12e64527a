"""Decompositions of the common rest: joining, splitting, gradients of views, arithmetic composites, activations.

Activations that `loops/lower` has as one scalar formula have rows here too (core=False), for users' own backends.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp.table import aten, cast, decomposition, shaped, widen, wrap

# ---------------------------------------------------------------- joining and splitting


@decomposition("stack")
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim = wrap(dim, tensors[0].dim() + 1)
    return aten.cat.default([aten.unsqueeze.default(t, dim) for t in tensors], dim)


@decomposition("pixel_shuffle")
def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    *batch, c, h, w = x.shape
    n = len(batch)
    split = shaped(x, [*batch, c // (factor * factor), factor, factor, h, w])
    mixed = aten.permute.default(split, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return shaped(aten.clone.default(mixed, memory_format=torch.contiguous_format), [*batch, c // (factor * factor), h * factor, w * factor])


@decomposition("pixel_unshuffle")
def pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    *batch, c, h, w = x.shape
    n = len(batch)
    split = shaped(x, [*batch, c, h // factor, factor, w // factor, factor])
    mixed = aten.permute.default(split, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return shaped(aten.clone.default(mixed, memory_format=torch.contiguous_format), [*batch, c * factor * factor, h // factor, w // factor])


# ---------------------------------------------------------------- gradients of views

@decomposition("slice_backward")
def slice_backward(grad: Tensor, sizes: Sequence[Any], dim: int, start: Any, end: Any, step: Any) -> Tensor:
    return aten.slice_scatter.default(aten.new_zeros.default(grad, list(sizes)), grad, dim, start, end, step)


@decomposition("select_backward")
def select_backward(grad: Tensor, sizes: Sequence[Any], dim: int, index: Any) -> Tensor:
    return aten.select_scatter.default(aten.new_zeros.default(grad, list(sizes)), grad, dim, index)


@decomposition("diagonal_backward")
def diagonal_backward(grad: Tensor, sizes: Sequence[Any], offset: int, dim1: int, dim2: int) -> Tensor:
    return aten.diagonal_scatter.default(aten.new_zeros.default(grad, list(sizes)), grad, offset, dim1, dim2)


@decomposition("unfold_backward")
def unfold_backward(grad: Tensor, sizes: Sequence[Any], dim: int, size: Any, step: Any) -> Tensor:
    """Where windows overlap, their gradients add up."""
    if not sizes:
        return aten.squeeze.dim(grad, 0)
    dim = wrap(dim, len(sizes))
    places = aten.arange.start_step(0, sizes[dim], 1, dtype=torch.int64, device=grad.device)
    windows = aten.slice.Tensor(aten.unfold.default(places, 0, size, step), 0, 0, None)
    moved = aten.movedim.int(grad, grad.dim() - 1, dim + 1)
    flat = shaped(moved, [*sizes[:dim], -1, *sizes[dim + 1:]])
    index = shaped(windows, [-1])
    return aten.index_put.default(aten.new_zeros.default(grad, list(sizes)), [None] * dim + [index], flat, True)


# ---------------------------------------------------------------- arithmetic

@decomposition("addcmul", core=False)
def addcmul(x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
    return x + (a * b if value == 1 else a * b * value)


@decomposition("addcdiv", core=False)
def addcdiv(x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
    return x + (a / b if value == 1 else (a / b) * value)


@decomposition("lerp.Scalar", core=False)
def lerp_scalar(x: Tensor, end: Tensor, weight: float) -> Tensor:
    """From the nearer end, as eager does, so that both ends are exact."""
    return x + (end - x) * weight if weight < 0.5 else end - (end - x) * (1 - weight)


@decomposition("lerp.Tensor", core=False)
def lerp_tensor(x: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    return aten.where.self(aten.abs.default(weight) < 0.5, x + weight * (end - x), end - (end - x) * (1 - weight))


@decomposition("rsub.Tensor rsub.Scalar", core=False)
def rsub(x: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    scaled = x if alpha == 1 else x * alpha     # `number - tensor` would arrive here again
    return aten.sub.Tensor(other, scaled) if isinstance(other, Tensor) else aten.add.Tensor(aten.neg.default(scaled), other)


@decomposition("masked_fill.Scalar masked_fill.Tensor", core=False)
def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        value = aten.scalar_tensor.default(value, dtype=x.dtype, device=x.device)
    return aten.where.self(mask, cast(value, x.dtype), x)


@decomposition("addmv")
def addmv(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if not x.dtype.is_floating_point:
        return NotImplemented
    if beta != 0 and any(type(n) is int and n == 0 for n in a.shape):
        return x * beta     # which eager does not expand
    product = aten.mv.default(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else (x if beta == 1 else x * beta) + product


@decomposition("mv")
def mv(a: Tensor, b: Tensor) -> Tensor:
    if not a.dtype.is_floating_point:
        return NotImplemented
    return aten.squeeze.dim(aten.mm.default(a, aten.unsqueeze.default(b, 1)), 1)


@decomposition("addr")
def addr(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = aten.unsqueeze.default(a, 1) * b
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else (x if beta == 1 else x * beta) + product


@decomposition("dot vdot")
def dot(a: Tensor, b: Tensor) -> Tensor:
    return NotImplemented if a.dtype.is_complex else cast(aten.sum.default(widen(a) * widen(b)), a.dtype)


@decomposition("glu")
def glu(x: Tensor, dim: int = -1) -> Tensor:
    half = x.shape[dim] // 2
    return aten.slice.Tensor(x, dim, 0, half) * aten.sigmoid.default(aten.slice.Tensor(x, dim, half, 2 * half))


@decomposition("glu_backward")
def glu_backward(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    half = x.shape[dim] // 2
    left, gate = aten.slice.Tensor(x, dim, 0, half), aten.sigmoid.default(aten.slice.Tensor(x, dim, half, 2 * half))
    return aten.cat.default([grad * gate, grad * left * gate * (1 - gate)], wrap(dim, x.dim()))


@decomposition("trace")
def trace(x: Tensor) -> Tensor:
    return aten.sum.default(aten.diagonal.default(x))


@decomposition("diag_embed")
def diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    ndim = x.dim() + 1
    first, second = wrap(dim1, ndim), wrap(dim2, ndim)
    size = x.shape[-1] + abs(offset)
    shape = list(x.shape[:-1])
    for d in sorted((first, second)):
        shape.insert(d, size)
    return aten.diagonal_scatter.default(aten.new_zeros.default(x, shape), x, offset, first, second)


@decomposition("native_dropout_backward")
def native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad * (cast(mask, grad.dtype) * scale)


# ---------------------------------------------------------------- activations

@decomposition("silu", core=False)
def silu(x: Tensor) -> Tensor:
    wide = widen(x)
    return cast(wide * aten.sigmoid.default(wide), x.dtype)


@decomposition("silu_backward", core=False)
def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    wide = widen(x)
    gate = aten.sigmoid.default(wide)
    return cast(widen(grad) * gate * (wide * (1 - gate) + 1), grad.dtype)


@decomposition("mish_backward")
def mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    wide = widen(x)
    inner = aten.tanh.default(aten.log1p.default(aten.exp.default(wide)))
    gate = aten.sigmoid.default(wide)
    return cast(widen(grad) * (inner + wide * gate * (1 - inner * inner)), x.dtype)


@decomposition("gelu", core=False)
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    wide = widen(x)
    if approximate == "tanh":
        inner = (wide + 0.044715 * wide * wide * wide) * math.sqrt(2 / math.pi)
        return cast(0.5 * wide * (1 + aten.tanh.default(inner)), x.dtype)
    return cast(wide * 0.5 * (1 + aten.erf.default(wide * math.sqrt(0.5))), x.dtype)


@decomposition("gelu_backward", core=False)
def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    wide, slope = widen(x), widen(grad)
    if approximate == "tanh":
        scale = math.sqrt(2 / math.pi)
        inner = aten.tanh.default(scale * (wide + 0.044715 * wide * wide * wide))
        left = 0.5 * (1 + inner)
        right = 0.5 * wide * (1 - inner * inner) * scale * (1 + 3 * 0.044715 * wide * wide)
        return cast(slope * (left + right), x.dtype)
    cumulative = 0.5 * (1 + aten.erf.default(wide * math.sqrt(0.5)))
    density = aten.exp.default(wide * wide * -0.5) * (1 / math.sqrt(2 * math.pi))
    return cast(slope * (cumulative + wide * density), x.dtype)


@decomposition("sigmoid_backward", core=False)
def sigmoid_backward(grad: Tensor, output: Tensor) -> Tensor:
    return grad * (1 - output) * output


@decomposition("tanh_backward", core=False)
def tanh_backward(grad: Tensor, output: Tensor) -> Tensor:
    return grad * (1 - output * output)


@decomposition("threshold_backward", core=False)
def threshold_backward(grad: Tensor, x: Tensor, threshold: Any) -> Tensor:
    return aten.where.self(x <= threshold, aten.zeros_like.default(grad), grad)


@decomposition("leaky_relu_backward", core=False)
def leaky_relu_backward(grad: Tensor, x: Tensor, slope: float, is_result: bool) -> Tensor:
    return aten.where.self(x > 0, grad, grad * slope)


@decomposition("hardtanh_backward", core=False)
def hardtanh_backward(grad: Tensor, x: Tensor, low: Any, high: Any) -> Tensor:
    return aten.where.self(aten.logical_or.default(x <= low, x >= high), aten.zeros_like.default(grad), grad)


@decomposition("hardswish_backward", core=False)
def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    wide, slope = widen(x), widen(grad)
    middle = aten.where.self(wide < 3, slope * (wide / 3 + 0.5), slope)
    return cast(aten.where.self(wide <= -3, aten.zeros_like.default(slope), middle), grad.dtype)


@decomposition("hardsigmoid_backward", core=False)
def hardsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    inside = aten.logical_and.default(x > -3, x < 3)
    return aten.where.self(inside, grad * (1 / 6), aten.zeros_like.default(grad))


@decomposition("softplus_backward", core=False)
def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    z = aten.exp.default(x * beta)
    return aten.where.self(x * beta > threshold, grad, grad * z / (z + 1))


@decomposition("elu_backward", core=False)
def elu_backward(grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor) -> Tensor:
    negative = alpha * scale
    if is_result:
        inner = grad * input_scale * (x + negative)
    else:
        inner = grad * (input_scale * negative) * aten.exp.default(x * input_scale)
    return aten.where.self(x <= 0, inner, grad * scale)


@decomposition("log_sigmoid_forward")
def log_sigmoid_forward(x: Tensor):
    decay = aten.exp.default(aten.neg.default(aten.abs.default(x)))
    result = aten.minimum.default(x, aten.zeros_like.default(x)) - aten.log1p.default(decay)
    return result, decay if x.device.type == "cpu" else aten.new_empty.default(x, [0])


@decomposition("log_sigmoid_backward")
def log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    decay = aten.exp.default(aten.neg.default(aten.abs.default(x)))
    negative = x < 0
    slope = aten.where.self(negative, aten.ones_like.default(x), aten.zeros_like.default(x))
    sign = aten.where.self(negative, aten.ones_like.default(x), aten.full_like.default(x, -1))
    return grad * (slope - sign * (decay / (1 + decay)))


@decomposition("_prelu_kernel_backward")
def prelu_backward(grad: Tensor, x: Tensor, weight: Tensor):
    zero = aten.zeros_like.default(x)
    return aten.where.self(x > 0, grad, weight * grad), aten.where.self(x > 0, zero, x * grad)

