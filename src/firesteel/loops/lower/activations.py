"""Lowerings of activation functions and other compositions, and of their derivatives as autograd calls them.

Rows as in `pointwise.py`: a scalar body each, in eager's order of operations.
"""
from __future__ import annotations

import math
from typing import Any

import torch

from firesteel.loops.lower.build import LOWERINGS, Builder
from firesteel.loops.lower.pointwise import Impossible, as_element, lower_pointwise, pointwise, times
from firesteel.loops.lower.value import Tensor
from firesteel.loops.ops import S, literal
from firesteel.sym.expr import Expr

aten = torch.ops.aten


# ---------------------------------------------------------------- activations, and their derivatives as autograd calls them

@pointwise(aten.relu.default)
def relu(x):
    return S.max(x, 0)


@pointwise(aten.relu6.default)
def relu6(x):
    return S.min(S.max(x, 0), 6)


@pointwise(aten.hardtanh.default)
def hardtanh(x, min_val=-1, max_val=1):
    return S.min(S.max(x, min_val), max_val)


@pointwise(aten.hardtanh_backward.default)
def hardtanh_backward(grad, x, min_val, max_val):
    return S.where(S.or_(S.le(x, min_val), S.ge(x, max_val)), 0, grad)


@pointwise(aten.hardsigmoid.default)
def hardsigmoid(x):
    return S.div(S.min(S.max(S.add(x, 3), 0), 6), 6)


@pointwise(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(grad, x):
    return S.where(S.and_(S.gt(x, -3), S.lt(x, 3)), S.mul(grad, 1 / 6), 0)


@pointwise(aten.hardswish.default)
def hardswish(x):
    return S.div(S.mul(x, S.min(S.max(S.add(x, 3), 0), 6)), 6)


@pointwise(aten.hardswish_backward.default)
def hardswish_backward(grad, x):
    inner = S.mul(grad, S.add(S.div(x, 3), 0.5))
    return S.where(S.le(x, -3), 0, S.where(S.lt(x, 3), inner, grad))


@pointwise(aten.leaky_relu.default)
def leaky_relu(x, negative_slope=0.01):
    return S.where(S.gt(x, 0), x, S.mul(x, negative_slope))


@pointwise(aten.leaky_relu_backward.default)
def leaky_relu_backward(grad, x, negative_slope, self_is_result):
    return S.where(S.gt(x, 0), grad, S.mul(grad, negative_slope))


@pointwise(aten._prelu_kernel.default)
def prelu(x, weight):
    return S.where(S.gt(x, 0), x, S.mul(weight, x))


@pointwise(aten.elu.default)
def elu(x, alpha=1, scale=1, input_scale=1):
    return S.where(S.gt(x, 0), times(x, scale), S.mul(S.expm1(times(x, input_scale)), alpha * scale))


@pointwise(aten.celu.default)
def celu(x, alpha=1.0):
    return S.where(S.gt(x, 0), x, S.mul(S.expm1(S.div(x, alpha)), alpha))


@pointwise(aten.elu_backward.default)
def elu_backward(grad, alpha, scale, input_scale, is_result, x):
    if is_result:
        return S.where(S.le(x, 0), S.mul(S.mul(grad, input_scale), S.add(x, alpha * scale)), S.mul(grad, scale))
    inner = S.mul(S.mul(grad, input_scale * alpha * scale), S.exp(S.mul(x, input_scale)))
    return S.where(S.le(x, 0), inner, S.mul(grad, scale))


@pointwise(aten.softplus.default)
def softplus(x, beta=1, threshold=20):
    scaled = times(x, beta)
    return S.where(S.gt(scaled, threshold), x, S.div(S.log1p(S.exp(scaled)), beta))


@pointwise(aten.softplus_backward.default)
def softplus_backward(grad, x, beta, threshold):
    scaled = S.mul(x, beta)
    z = S.exp(scaled)
    return S.where(S.gt(scaled, threshold), grad, S.mul(grad, S.div(z, S.add(z, 1))))


@pointwise(aten.softshrink.default)
def softshrink(x, lambd=0.5):
    return S.where(S.gt(x, lambd), S.sub(x, lambd), S.where(S.lt(x, -lambd), S.add(x, lambd), S.mul(x, 0)))


@pointwise(aten.hardshrink.default)
def hardshrink(x, lambd=0.5):
    return S.where(S.and_(S.ge(x, -lambd), S.le(x, lambd)), 0, x)


@pointwise(aten.softshrink_backward.default, aten.hardshrink_backward.default)
def shrink_backward(grad, x, lambd):
    return S.where(S.and_(S.ge(x, -lambd), S.le(x, lambd)), 0, grad)


@LOWERINGS.row(aten.log_sigmoid_forward.default)
def lower_log_sigmoid(b: Builder, out: Any, x: Tensor) -> Any:
    """(the value, exp(-|x|) kept for the backward pass; a GPU keeps nothing)."""
    value = lower_pointwise(b, out[0], lambda x: S.sub(S.min(x, 0), S.log1p(_kept(x))), "result", (), (x,), {})
    kept = lower_pointwise(b, out[1], _kept, "result", (), (x,), {}) if tuple(out[1].shape) == x.shape else None
    return NotImplemented if value is NotImplemented else (value, kept)


def _kept(x: Expr) -> Expr:
    return S.exp(S.neg(S.abs(x)))


@LOWERINGS.row(aten.log_sigmoid_backward.default)
def lower_log_sigmoid_backward(b: Builder, out: Any, grad: Tensor, x: Tensor, kept: Tensor) -> Any:
    args = (grad, x, kept) if kept.shape == x.shape else (grad, x)
    return lower_pointwise(b, out, log_sigmoid_backward, "result", (), args, {})


def log_sigmoid_backward(grad, x, kept=None):
    z = _kept(x) if kept is None else kept
    share = S.div(z, S.add(z, 1))
    return S.mul(grad, S.where(S.lt(x, 0), S.sub(1.0, share), share))


@pointwise(aten.threshold.default)
def threshold(x, threshold, value):
    return S.where(S.le(x, threshold), as_element(value, x), x)


@pointwise(aten.threshold_backward.default)
def threshold_backward(grad, x, threshold):
    return S.where(S.le(x, threshold), literal(0, grad.dtype), grad)


@pointwise(aten.silu.default)
def silu(x):
    return S.div(x, S.add(S.exp(S.neg(x)), 1))


@pointwise(aten.silu_backward.default)
def silu_backward(grad, x):
    s = S.sigmoid(x)
    return S.mul(S.mul(grad, s), S.add(S.mul(x, S.sub(1.0, s)), 1))


@pointwise(aten.mish.default)
def mish(x):
    return S.mul(x, S.tanh(S.log1p(S.exp(x))))


GELU_CUBE, GELU_SCALE = 0.044715, math.sqrt(2 / math.pi)


@pointwise(aten.gelu.default)
def gelu(x, approximate="none"):
    if approximate == "tanh":
        inner = S.mul(S.add(x, S.mul(S.mul(S.mul(x, x), x), GELU_CUBE)), GELU_SCALE)
        return S.mul(S.mul(x, 0.5), S.add(S.tanh(inner), 1))
    return S.mul(S.mul(x, 0.5), S.add(S.erf(S.mul(x, math.sqrt(0.5))), 1))


@pointwise(aten.gelu_backward.default)
def gelu_backward(grad, x, approximate="none"):
    if approximate == "tanh":
        square = S.mul(x, x)
        t = S.tanh(S.mul(S.add(x, S.mul(S.mul(square, x), GELU_CUBE)), GELU_SCALE))
        left = S.mul(S.add(t, 1), 0.5)
        inner = S.mul(S.add(S.mul(square, 3 * GELU_CUBE), 1), GELU_SCALE)
        return S.mul(grad, S.add(left, S.mul(S.mul(S.mul(x, 0.5), S.sub(1.0, S.mul(t, t))), inner)))
    cdf = S.mul(S.add(S.erf(S.mul(x, math.sqrt(0.5))), 1), 0.5)
    pdf = S.mul(S.exp(S.mul(S.mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return S.mul(grad, S.add(cdf, S.mul(x, pdf)))


@pointwise(aten.sigmoid_backward.default)
def sigmoid_backward(grad, y):
    return S.mul(grad, S.mul(S.sub(1.0, y), y))


@pointwise(aten.tanh_backward.default)
def tanh_backward(grad, y):
    return S.mul(grad, S.sub(1.0, S.mul(y, y)))


@pointwise(aten.logit.default)
def logit(x, eps=None):
    x = x if eps is None else S.min(S.max(x, eps), 1.0 - eps)
    return S.log(S.div(x, S.sub(1.0, x)))


@pointwise(aten.logit_backward.default)
def logit_backward(grad, x, eps=None):
    slope = S.div(grad, S.mul(x, S.sub(1.0, x)))
    low, high = (0.0, 1.0) if eps is None else (eps, 1.0 - eps)
    return S.where(S.or_(S.lt(x, low), S.gt(x, high)), math.nan if eps is None else 0.0, slope)


@pointwise(aten.angle.default)
def angle(x):
    return S.where(S.isnan(x), x, S.where(S.lt(x, 0), literal(math.pi, x.dtype), 0.0))


@pointwise(aten.ldexp.Tensor)
def ldexp(x, exponent):
    return S.mul(x, S.pow(literal(2, x.dtype), exponent))


@pointwise(aten.logaddexp.default)
def logaddexp(x, y):
    top = S.max(x, y)
    summed = S.add(top, S.log1p(S.exp(S.neg(S.abs(S.sub(x, y))))))
    return S.where(S.and_(S.isinf(x), S.eq(x, y)), x, summed)


@pointwise(aten.logaddexp2.default)
def logaddexp2(x, y):
    top = S.max(x, y)
    summed = S.add(top, S.mul(S.log1p(S.exp2(S.neg(S.abs(S.sub(x, y))))), 1 / math.log(2.0)))
    return S.where(S.and_(S.isinf(x), S.eq(x, y)), x, summed)


@pointwise(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)
def xlogy(x, y):
    x, y = as_element(x, y if isinstance(y, Expr) else x), as_element(y, x if isinstance(x, Expr) else y)
    return S.where(S.isnan(y), y, S.where(S.eq(x, 0), 0, S.mul(x, S.log(y))))


@pointwise(aten.special_xlog1py.default, aten.special_xlog1py.self_scalar, aten.special_xlog1py.other_scalar)
def xlog1py(x, y):
    x, y = as_element(x, y if isinstance(y, Expr) else x), as_element(y, x if isinstance(x, Expr) else y)
    return S.where(S.isnan(y), y, S.where(S.eq(x, 0), 0, S.mul(x, S.log1p(y))))


@pointwise(aten.deg2rad.default)
def deg2rad(x):
    return S.mul(x, math.pi / 180)


@pointwise(aten.rad2deg.default)
def rad2deg(x):
    return S.mul(x, 180 / math.pi)


@pointwise(aten.sinc.default)
def sinc(x):
    scaled = S.mul(x, math.pi)
    return S.where(S.eq(x, 0), 1, S.div(S.sin(scaled), scaled))


@pointwise(aten.special_entr.default)
def entr(x):
    value = S.where(S.eq(x, 0), 0, S.neg(S.mul(x, S.log(x))))
    return S.where(S.isnan(x), x, S.where(S.lt(x, 0), literal(-math.inf, x.dtype), value))


# ---------------------------------------------------------------- losses that come whole

@pointwise(aten.mse_loss.default)
def mse_loss(x, target, reduction=1):
    if reduction != 0:
        raise Impossible
    return S.mul(S.sub(x, target), S.sub(x, target))


@pointwise(aten.smooth_l1_loss.default)
def smooth_l1_loss(x, target, reduction=1, beta=1.0):
    if reduction != 0:
        raise Impossible
    z = S.abs(S.sub(x, target))
    return z if beta == 0 else S.where(S.lt(z, beta), S.div(S.mul(S.mul(z, 0.5), z), beta), S.sub(z, 0.5 * beta))
