"""Activation functions and their gradients: one scalar formula each, in eager's order of operations."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import cast, in_strides_of, widen, wrap
from firesteel.graph.meta import as_second
from firesteel.graph.rules.base import RULES, check, elementwise, floating, into_empty_like, result_dtype, same_dtype, unary, wrap_dim
from firesteel.graph.rules.refusals import known, must_be_float, same_shape
from firesteel.graph.sizes import same
from firesteel.graph.spec import Spec, fresh, like
from firesteel.loops.lower.pointwise import as_element, times
from firesteel.loops.scalars import S, literal
from firesteel.ops.block import decomposition, device_rule, operator, pointwise, probed_rule, refuses, shape
from firesteel.ops.pointwise import compute_clamp
from firesteel.targets import on_host

aten = torch.ops.aten


@probed_rule("mish_backward")
def activation_backward(grad: Spec, x: Spec, *args: Any, **kwargs: Any) -> Spec:
    return elementwise([grad, x], result_dtype((grad, x)))


# ---------------------------------------------------------------- ramps

pointwise("relu", unary(same_dtype))(lambda x: compute_clamp(x, 0))
pointwise("relu6", into_empty_like)(lambda x: compute_clamp(x, 0, 6))
pointwise("hardtanh", into_empty_like)(lambda x, min_val=-1, max_val=1: compute_clamp(x, min_val, max_val))
decomposition("hardtanh_backward", core=False)(
    lambda grad, x, low, high: aten.where.self(aten.logical_or.default(x <= low, x >= high), aten.zeros_like.default(grad), grad))
pointwise("hardtanh_backward", activation_backward, decides=True, recompute="pointwise")(
    lambda grad, x, min_val, max_val: S.where(S.or_(S.le(x, min_val), S.ge(x, max_val)), 0, grad))
pointwise("threshold", unary(same_dtype), decides=True)(lambda x, threshold, value: S.where(S.le(x, threshold), as_element(value, x), x))
decomposition("threshold_backward", core=False)(
    lambda grad, x, threshold: aten.where.self(x <= threshold, aten.zeros_like.default(grad), grad))
pointwise("threshold_backward", activation_backward, decides=True)(
    lambda grad, x, threshold: S.where(S.le(x, threshold), literal(0, grad.dtype), grad))
pointwise("leaky_relu", unary(same_dtype))(lambda x, negative_slope=0.01: S.where(S.gt(x, 0), x, S.mul(x, negative_slope)))
decomposition("leaky_relu_backward", core=False)(lambda grad, x, slope, is_result: aten.where.self(x > 0, grad, grad * slope))
pointwise("leaky_relu_backward", activation_backward, decides=True, recompute="pointwise")(
    lambda grad, x, negative_slope, self_is_result: S.where(S.gt(x, 0), grad, S.mul(grad, negative_slope)))
pointwise("_prelu_kernel", into_empty_like)(lambda x, weight: S.where(S.gt(x, 0), x, S.mul(weight, x)))
operator("_prelu_kernel_backward.*", decides=True)


@probed_rule("_prelu_kernel_backward")
def prelu_backward(grad: Spec, x: Spec, weight: Spec) -> tuple[Spec, Spec]:
    result = elementwise([x, weight, grad], x.dtype)
    return result, result


@decomposition("_prelu_kernel_backward")
def decompose_prelu_backward(grad: Tensor, x: Tensor, weight: Tensor):
    zero, like = aten.zeros_like.default(x), aten.addcmul.default(x, weight, grad)      # a result of all three has eager's strides
    results = aten.where.self(x > 0, grad, weight * grad), aten.where.self(x > 0, zero, x * grad)
    return tuple(in_strides_of(result, like) for result in results)


device_rule("rrelu_with_noise")(lambda x, noise, *args, **kwargs: like(x))
device_rule("rrelu_with_noise_functional")(lambda x, noise, *args, **kwargs: (like(x), like(noise)))
operator("rrelu_with_noise_functional.*", library=True)
shape("rrelu_with_noise_backward")(as_second)
pointwise("hardshrink", unary(same_dtype), decides=True, rounds=(1,))(lambda x, lambd=0.5: S.where(S.and_(S.ge(x, -lambd), S.le(x, lambd)), 0, x))
refuses("softshrink")(
    lambda x, lambd=0.5: check(not known(lambd) or lambd >= 0, f"lambda must be greater or equal to 0, but found to be {lambd}."))
pointwise("softshrink", unary(same_dtype))(
    lambda x, lambd=0.5: S.where(S.gt(x, lambd), S.sub(x, lambd), S.where(S.lt(x, -lambd), S.add(x, lambd), S.where(S.isnan(x), x, 0))))
pointwise("softshrink_backward hardshrink_backward", activation_backward, decides=True, rounds=(2,))(
    lambda grad, x, lambd: S.where(S.and_(S.ge(x, -lambd), S.le(x, lambd)), 0, grad))


# ---------------------------------------------------------------- exponentials

pointwise("elu", unary(same_dtype))(
    lambda x, alpha=1, scale=1, input_scale=1: S.where(S.gt(x, 0), times(x, scale), S.mul(S.expm1(times(x, input_scale)), alpha * scale)))
probed_rule("elu_backward")(lambda grad, alpha, scale, input_scale, is_result, x: elementwise([grad, x], result_dtype((grad, x))))


@decomposition("elu_backward", core=False)
def decompose_elu_backward(grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor) -> Tensor:
    negative = alpha * scale
    if is_result:
        inner = grad * input_scale * (x + negative)
    else:
        inner = grad * (input_scale * negative) * aten.exp.default(x * input_scale)
    return aten.where.self(x <= 0, inner, grad * scale)


@pointwise("elu_backward", decides=True, recompute="pointwise")
def compute_elu_backward(grad, alpha, scale, input_scale, is_result, x):
    if is_result:
        return S.where(S.le(x, 0), S.mul(S.mul(grad, input_scale), S.add(x, alpha * scale)), S.mul(grad, scale))
    inner = S.mul(S.mul(grad, input_scale * alpha * scale), S.exp(S.mul(x, input_scale)))
    return S.where(S.le(x, 0), inner, S.mul(grad, scale))


pointwise("celu", unary(same_dtype))(lambda x, alpha=1.0: S.where(S.gt(x, 0), x, S.mul(S.expm1(S.div(x, alpha)), alpha)))
probed_rule("selu")(unary(same_dtype))


@pointwise("softplus", unary(same_dtype))
def compute_softplus(x, beta=1, threshold=20):
    scaled = times(x, beta)
    return S.where(S.gt(scaled, threshold), x, S.div(S.log1p(S.exp(scaled)), beta))


@decomposition("softplus_backward", core=False)
def decompose_softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    z = aten.exp.default(x * beta)
    return aten.where.self(x * beta > threshold, grad, grad * z / (z + 1))


@pointwise("softplus_backward", activation_backward, recompute="pointwise")
def compute_softplus_backward(grad, x, beta, threshold):
    scaled = S.mul(x, beta)
    z = S.exp(scaled)
    return S.where(S.gt(scaled, threshold), grad, S.div(S.mul(grad, z), S.add(z, 1)))


pointwise("mish", unary(same_dtype))(lambda x: S.mul(x, S.tanh(S.log1p(S.exp(x)))))


@decomposition("mish_backward")
def decompose_mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    wide = widen(x)
    inner = aten.tanh.default(aten.log1p.default(aten.exp.default(wide)))
    gate = aten.sigmoid.default(wide)
    return cast(widen(grad) * (inner + wide * gate * (1 - inner * inner)), x.dtype)


# ---------------------------------------------------------------- sigmoid and tanh

decomposition("sigmoid_backward", core=False)(lambda grad, output: grad * (1 - output) * output)
pointwise("sigmoid_backward", activation_backward)(lambda grad, y: S.mul(S.mul(grad, S.sub(1.0, y)), y))
decomposition("tanh_backward", core=False)(lambda grad, output: grad * (1 - output * output))
pointwise("tanh_backward", activation_backward)(lambda grad, y: S.mul(grad, S.sub(1.0, S.mul(y, y))))


@probed_rule("log_sigmoid_forward")
def log_sigmoid_forward(x: Spec) -> tuple[Spec, Spec]:
    if on_host(x):      # its kernel first makes its operand contiguous
        return fresh(x), fresh(x)
    return elementwise([x], x.dtype), Spec((0,), (1,), 0, x.dtype, x.device)


@decomposition("log_sigmoid_forward")
def decompose_log_sigmoid_forward(x: Tensor):
    x = aten.clone.default(x, memory_format=torch.contiguous_format) if on_host(x) and not x.is_contiguous() else x
    decay = aten.exp.default(aten.neg.default(aten.abs.default(x)))
    result = aten.minimum.default(x, aten.zeros_like.default(x)) - aten.log1p.default(decay)
    return result, decay if on_host(x) else aten.new_empty.default(x, [0])


probed_rule("log_sigmoid_backward")(lambda grad, x, buffer: like(grad, dtype=elementwise([x, grad], x.dtype).dtype))


@decomposition("log_sigmoid_backward")
def decompose_log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    decay = aten.exp.default(aten.neg.default(aten.abs.default(x)))
    negative = x < 0
    slope = aten.where.self(negative, aten.ones_like.default(x), aten.zeros_like.default(x))
    sign = aten.where.self(negative, aten.ones_like.default(x), aten.full_like.default(x, -1))
    return in_strides_of(grad * (slope - sign * (decay / (1 + decay))), grad)


@pointwise("logit", unary(floating))
def compute_logit(x, eps=None):
    x = x if eps is None else S.where(S.lt(x, eps), eps, S.where(S.gt(x, 1.0 - eps), 1.0 - eps, x))        # in this order: eps may be above 0.5
    return S.log(S.div(x, S.sub(1.0, x)))


@pointwise("logit_backward", activation_backward, decides=True)
def compute_logit_backward(grad, x, eps=None):
    slope = S.div(grad, S.mul(x, S.sub(1.0, x)))
    low, high = (0.0, 1.0) if eps is None else (eps, 1.0 - eps)
    return S.where(S.or_(S.lt(x, low), S.gt(x, high)), math.nan if eps is None else 0.0, slope)


SIXTH = literal(1 / 6, "f32").attr      # eager's is a float also for doubles, where it multiplies by one


pointwise("hardsigmoid", unary(same_dtype), cuda=lambda x: S.mul(S.min(S.max(S.add(x, 3), 0), 6), SIXTH))(
    lambda x: S.div(S.min(S.max(S.add(x, 3), 0), 6), 6))


@decomposition("hardsigmoid_backward", core=False)
def decompose_hardsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    inside = aten.logical_and.default(x > -3, x < 3)
    return aten.where.self(inside, grad * (1 / 6), aten.zeros_like.default(grad))


pointwise("hardsigmoid_backward", activation_backward, decides=True, recompute="pointwise")(
    lambda grad, x: S.where(S.and_(S.gt(x, -3), S.lt(x, 3)), S.mul(grad, SIXTH), 0))
pointwise("hardswish", unary(same_dtype), cuda=lambda x: S.mul(S.mul(x, S.min(S.max(S.add(x, 3), 0), 6)), SIXTH))(
    lambda x: S.div(S.mul(x, S.min(S.max(S.add(x, 3), 0), 6)), 6))


@decomposition("hardswish_backward", core=False)
def decompose_hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    wide, slope = widen(x), widen(grad)
    middle = aten.where.self(wide < 3, slope * (wide / 3 + 0.5), slope)
    return cast(aten.where.self(wide <= -3, aten.zeros_like.default(slope), middle), grad.dtype)


@pointwise("hardswish_backward", activation_backward, decides=True, recompute="pointwise")
def compute_hardswish_backward(grad, x):
    inner = S.mul(grad, S.add(S.div(x, 3), 0.5))
    return S.where(S.le(x, -3), 0, S.where(S.lt(x, 3), inner, grad))


# ---------------------------------------------------------------- gates

@decomposition("silu", core=False)
def decompose_silu(x: Tensor) -> Tensor:
    wide = widen(x)
    return cast(wide * aten.sigmoid.default(wide), x.dtype)


pointwise("silu", unary(same_dtype))(lambda x: S.div(x, S.add(S.exp(S.neg(x)), 1)))


@decomposition("silu_backward", core=False)
def decompose_silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    wide = widen(x)
    gate = aten.sigmoid.default(wide)
    return cast(widen(grad) * gate * (wide * (1 - gate) + 1), grad.dtype)


@pointwise("silu_backward", activation_backward)
def compute_silu_backward(grad, x):
    s = S.sigmoid(x)
    return S.mul(S.mul(grad, s), S.add(S.mul(x, S.sub(1.0, s)), 1))


GELU_CUBE, GELU_SCALE = 0.044715, math.sqrt(2 / math.pi)


refuses("gelu")(
    lambda x, *, approximate='none': check(approximate in ("none", "tanh"), "approximate argument must be either none or tanh."))


@decomposition("gelu", core=False)
def decompose_gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    wide = widen(x)
    if approximate == "tanh":
        inner = (wide + 0.044715 * wide * wide * wide) * math.sqrt(2 / math.pi)
        return cast(0.5 * wide * (1 + aten.tanh.default(inner)), x.dtype)
    return cast(wide * 0.5 * (1 + aten.erf.default(wide * math.sqrt(0.5))), x.dtype)


@pointwise("gelu", unary(same_dtype))
def compute_gelu(x, approximate="none"):
    if approximate == "tanh":
        inner = S.mul(S.add(x, S.mul(S.mul(S.mul(x, x), x), GELU_CUBE)), GELU_SCALE)
        return S.mul(S.mul(x, 0.5), S.add(S.tanh(inner), 1))
    return S.mul(S.mul(x, 0.5), S.add(S.erf(S.mul(x, math.sqrt(0.5))), 1))


@decomposition("gelu_backward", core=False)
def decompose_gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
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


@pointwise("gelu_backward", activation_backward)
def compute_gelu_backward(grad, x, approximate="none"):
    if approximate == "tanh":
        square = S.mul(x, x)
        t = S.tanh(S.mul(S.add(x, S.mul(S.mul(square, x), GELU_CUBE)), GELU_SCALE))
        left = S.mul(S.add(t, 1), 0.5)
        inner = S.mul(S.add(S.mul(square, 3 * GELU_CUBE), 1), GELU_SCALE)
        return S.mul(grad, S.add(left, S.mul(S.mul(S.mul(x, 0.5), S.sub(1.0, S.mul(t, t))), inner)))
    cdf = S.mul(S.add(S.erf(S.mul(x, math.sqrt(0.5))), 1), 0.5)
    pdf = S.mul(S.exp(S.mul(S.mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return S.mul(grad, S.add(cdf, S.mul(x, pdf)))


@device_rule("glu")
def glu(x: Spec, dim: int = -1) -> Spec:
    dim = wrap_dim(dim, len(x.shape))
    check(same(x.shape[dim] % 2, 0), f"Halving dimension must be even, but dimension {dim} is size {x.shape[dim]}")
    halved = x._replace(shape=(*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1:]))
    return elementwise([halved], x.dtype)


@refuses("glu")
def refuse_glu(x: Spec, dim: int = -1) -> None:
    check(len(x.shape) > 0, "glu does not support 0-dimensional tensors")
    must_be_float(x, "glu")


@decomposition("glu")
def decompose_glu(x: Tensor, dim: int = -1) -> Tensor:
    half = x.shape[dim] // 2
    return aten.slice.Tensor(x, dim, 0, half) * aten.sigmoid.default(aten.slice.Tensor(x, dim, half, 2 * half))


device_rule("glu_backward")(lambda grad, x, dim: fresh(x))


@refuses("glu_backward")
def refuse_glu_backward(grad: Spec, x: Spec, dim: int) -> None:
    same_shape(grad.shape, RULES[aten.glu.default](x, dim).shape, f"expected a gradient of half of {list(x.shape)}, got {list(grad.shape)}")


@decomposition("glu_backward")
def decompose_glu_backward(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    half = x.shape[dim] // 2
    left, gate = aten.slice.Tensor(x, dim, 0, half), aten.sigmoid.default(aten.slice.Tensor(x, dim, half, 2 * half))
    return aten.cat.default([grad * gate, grad * left * gate * (1 - gate)], wrap(dim, x.dim()))
