"""Rules of pointwise operators: the result has the broadcast shape, a promoted dtype, and eager's strides.

A family is a set of names and a dtype rule; operators with further conditions stand below, each with its function.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from firesteel.graph.rules.base import TO_REAL, broadcast, check, expands_to, floating, result_dtype, rule
from firesteel.graph.spec import Spec, contiguous_strides, elementwise_strides, like, make_spec, preserved_strides

DtypeRule = Callable[[torch.dtype], torch.dtype]


def elementwise(operands: list[Spec], dtype: torch.dtype) -> Spec:
    """The fresh result of a pointwise operator over tensors; without any, it is one number."""
    if not operands:
        return make_spec((), dtype, torch.device("cpu"))
    first = operands[0]
    shape, device = first.shape, first.device
    if all(op.shape == shape and op.strides == first.strides for op in operands) and first.strides == contiguous_strides(shape):
        return _with(first, dtype) if device == operands[-1].device else _checked_device(operands, shape, first.strides, dtype)
    for op in operands[1:]:
        shape = broadcast(shape, op.shape)
    return _checked_device(operands, shape, elementwise_strides(shape, operands), dtype)


def _with(spec: Spec, dtype: torch.dtype) -> Spec:
    if spec.dtype is dtype and spec.offset == 0:   # an Expr is never equal to a number
        return spec
    return Spec(spec.shape, spec.strides, 0, dtype, spec.device)


def _checked_device(operands: list[Spec], shape, strides, dtype: torch.dtype) -> Spec:
    return Spec(shape, strides, 0, dtype, common_device(operands))


def common_device(operands: list[Spec]) -> torch.device:
    """The device of the operands; a 0-dim CPU tensor may join any."""
    device = operands[0].device
    for op in operands[1:]:
        if op.device != device:
            if not op.shape and op.device.type == "cpu":
                continue
            check(device.type == "cpu" and all(not o.shape for o in operands if o.device == device),
                  f"Expected all tensors to be on the same device, but found at least two devices, {device} and {op.device}!")
            device = op.device
    return device


def converted(operand: Spec, dtype: torch.dtype) -> Spec:
    """On CPU an operand of another dtype is copied first, which makes a non-dense one dense."""
    if operand.dtype is dtype or operand.device.type != "cpu" or operand.strides == contiguous_strides(operand.shape):
        return operand
    return operand._replace(strides=preserved_strides(operand))


def tensors_of(*args: Any) -> list[Spec]:
    return [a for a in args if type(a) is Spec]


# ---------------------------------------------------------------- unary

def _unary(names: str, dtype_rule: DtypeRule) -> None:
    @rule(names)
    def unary(x: Spec, *args: Any, **kwargs: Any) -> Spec:
        dtype = dtype_rule(x.dtype)
        if x.strides == contiguous_strides(x.shape):
            return _with(x, dtype)
        return Spec(x.shape, elementwise_strides(x.shape, [x]), 0, dtype, x.device)


_unary("""relu neg positive sign sgn square bitwise_not relu6 hardtanh conj_physical round round.decimals floor ceil trunc frac
          threshold silu mish elu hardswish hardsigmoid leaky_relu softplus hardshrink softshrink gelu nan_to_num fill.Scalar zero
          celu selu""",
       lambda d: d)
_unary("""sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sigmoid
          reciprocal erf erfc erfinv lgamma digamma logit sinc special_erfcx special_i0e special_i1 special_i1e special_ndtri
          special_log_ndtr i0 special_entr special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_airy_ai
          special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
          special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 deg2rad rad2deg""", floating)
_unary("isnan isinf isposinf isneginf signbit logical_not eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar",
       lambda d: torch.bool)
_unary("abs", lambda d: TO_REAL.get(d, d))
_unary("angle", lambda d: TO_REAL.get(d, floating(d)))


@rule("polygamma")
def polygamma(n: int, x: Spec) -> Spec:
    return elementwise([x], floating(x.dtype))


@rule("frexp.Tensor")
def frexp(x: Spec) -> tuple[Spec, Spec]:
    return elementwise([x], x.dtype), elementwise([x], torch.int32)


@rule("log_sigmoid_forward")
def log_sigmoid_forward(x: Spec) -> tuple[Spec, Spec]:
    result = elementwise([x], x.dtype)
    buffer = result if x.device.type == "cpu" else Spec((0,), (1,), 0, x.dtype, x.device)
    return result, buffer


# ---------------------------------------------------------------- binary and ternary

def _binary(names: str, dtype_rule: DtypeRule) -> None:
    @rule(names)
    def binary(a: Any, b: Any = None, *args: Any, **kwargs: Any) -> Spec:
        if type(a) is Spec and type(b) is Spec:
            if a.dtype is b.dtype:
                return elementwise([a, b], dtype_rule(a.dtype))
            common = result_dtype((a, b))
            return elementwise([converted(a, common), converted(b, common)], dtype_rule(common))
        return elementwise(tensors_of(a, b), dtype_rule(result_dtype((a, b))))


_binary("""add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar rsub.Tensor rsub.Scalar maximum minimum fmax fmin
           remainder.Tensor remainder.Scalar remainder.Scalar_Tensor fmod.Tensor fmod.Scalar floor_divide floor_divide.Scalar
           pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar bitwise_and.Tensor bitwise_and.Scalar bitwise_and.Scalar_Tensor
           bitwise_or.Tensor bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_xor.Tensor bitwise_xor.Scalar
           bitwise_xor.Scalar_Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_left_shift.Scalar_Tensor
           bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_right_shift.Scalar_Tensor __lshift__.Tensor
           __lshift__.Scalar __rshift__.Tensor __rshift__.Scalar hypot gcd lcm heaviside nextafter igamma igammac
           clamp_min.Tensor clamp_max.Tensor clamp_min clamp_max""", lambda d: d)
_binary("""div.Tensor div.Scalar atan2 xlogy.Tensor xlogy.Scalar_Other xlogy.Scalar_Self logaddexp logaddexp2
           special_xlog1py special_xlog1py.other_scalar special_xlog1py.self_scalar special_zeta special_zeta.other_scalar
           special_zeta.self_scalar""", floating)
POLYNOMIALS = ("chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w", "hermite_polynomial_h",
               "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p", "shifted_chebyshev_polynomial_t",
               "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v", "shifted_chebyshev_polynomial_w")
_binary(" ".join(f"special_{name}{overload}" for name in POLYNOMIALS for overload in ("", ".x_scalar", ".n_scalar")), floating)
_binary("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and logical_or logical_xor", lambda d: torch.bool)


@rule("ldexp.Tensor")
def ldexp(a: Spec, b: Spec) -> Spec:
    return elementwise([a, b], floating(result_dtype((a, b))))


@rule("div.Tensor_mode div.Scalar_mode")
def div_mode(a: Spec, b: Any, rounding_mode: str | None = None) -> Spec:
    dtype = result_dtype((a, b))
    return elementwise(tensors_of(a, b), dtype if rounding_mode else floating(dtype))


@rule("copysign.Tensor copysign.Scalar")
def copysign(a: Spec, b: Any) -> Spec:
    return elementwise(tensors_of(a, b), floating(result_dtype((a, b))))


@rule("float_power.Tensor_Tensor float_power.Tensor_Scalar float_power.Scalar")
def float_power(a: Any, b: Any) -> Spec:
    return elementwise(tensors_of(a, b), torch.complex128 if result_dtype((a, b)).is_complex else torch.float64)


@rule("clamp clamp.Tensor")
def clamp(x: Spec, low: Any = None, high: Any = None) -> Spec:
    check(low is not None or high is not None, "torch.clamp: At least one of 'min' or 'max' must not be None")
    return elementwise(tensors_of(x, low, high), result_dtype((x, low, high)))


@rule("where.self where.ScalarSelf where.ScalarOther where.Scalar")
def where(condition: Spec, a: Any, b: Any) -> Spec:
    operands = tensors_of(condition, a, b)
    dtype = result_dtype((a, b))
    if len(operands) == 3 and len(condition.shape) == 0 and condition.device.type == "cpu":
        operands = operands[1:] or operands
    return elementwise(operands, dtype)


@rule("masked_fill.Scalar masked_fill.Tensor")
def masked_fill(x: Spec, mask: Spec, value: Any) -> Spec:
    check(mask.dtype is torch.bool, f"masked_fill_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    shape = broadcast(x.shape, mask.shape)
    return Spec(shape, contiguous_strides(shape), 0, x.dtype, x.device)


@rule("addcmul addcdiv")
def addcmul(x: Spec, a: Spec, b: Spec, value: Any = 1) -> Spec:
    return elementwise([x, a, b], result_dtype((x, a, b)))


@rule("lerp.Scalar lerp.Tensor")
def lerp(x: Spec, end: Spec, weight: Any) -> Spec:
    check(x.dtype is end.dtype, f"expected dtype {x.dtype} for `end` but got dtype {end.dtype}")
    return elementwise(tensors_of(x, end, weight), x.dtype)


@rule("complex")
def complex_(real: Spec, imag: Spec) -> Spec:
    return elementwise([real, imag], torch.promote_types(real.dtype, torch.complex32))


@rule("polar")
def polar(length: Spec, angle: Spec) -> Spec:
    return elementwise([length, angle], torch.promote_types(length.dtype, torch.complex32))


@rule("_prelu_kernel")
def prelu(x: Spec, weight: Spec) -> Spec:
    return elementwise([x, weight], x.dtype)


@rule("_prelu_kernel_backward")
def prelu_backward(grad: Spec, x: Spec, weight: Spec) -> tuple[Spec, Spec]:
    result = elementwise([grad, x, weight], x.dtype)
    return result, result


# ---------------------------------------------------------------- gradients that are pointwise

@rule("""threshold_backward gelu_backward silu_backward mish_backward leaky_relu_backward hardtanh_backward hardsigmoid_backward
         hardswish_backward softplus_backward tanh_backward sigmoid_backward logit_backward hardshrink_backward
         softshrink_backward""")
def activation_backward(grad: Spec, x: Spec, *args: Any, **kwargs: Any) -> Spec:
    return elementwise([grad, x], result_dtype((grad, x)))


@rule("elu_backward")
def elu_backward(grad: Spec, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Spec) -> Spec:
    return elementwise([grad, x], result_dtype((grad, x)))


@rule("log_sigmoid_backward")
def log_sigmoid_backward(grad: Spec, x: Spec, buffer: Spec) -> Spec:
    return elementwise([x, grad], x.dtype)


@rule("native_dropout_backward")
def native_dropout_backward(grad: Spec, mask: Spec, scale: float) -> Spec:
    return elementwise([grad, mask], floating(result_dtype((grad, mask))))


@rule("_amp_update_scale_")
def _reject_amp(*args: Any) -> Spec:
    raise RuntimeError("loss scaling updates are not captured")


# ---------------------------------------------------------------- copies and conversions

@rule("copy")
def copy(x: Spec, source: Spec, non_blocking: bool = False) -> Spec:
    check(expands_to(source.shape, x.shape), f"The expanded size of the tensor {x.shape} must match {source.shape}")
    return Spec(x.shape, x.strides, 0, x.dtype, x.device)


@rule("fill.Tensor")
def fill(x: Spec, value: Spec) -> Spec:
    check(not value.shape, "fill_ only supports 0-dimension value tensor")
    return elementwise([x], x.dtype)


@rule("clone")
def clone(x: Spec, *, memory_format: torch.memory_format | None = None) -> Spec:
    return like(x, memory_format=memory_format)


@rule("_to_copy")
def to_copy(x: Spec, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None) -> Spec:
    return like(x, dtype=dtype, device=device, memory_format=memory_format)


@rule("lift_fresh_copy lift")
def lift(x: Spec) -> Spec:
    return like(x)
