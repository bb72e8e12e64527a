"""Pointwise operators: the result has the broadcast shape, a promoted dtype and eager's strides; the body is a scalar formula."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import cast
from firesteel.graph.meta import as_first
from firesteel.graph.rules.base import (
    TO_REAL,
    binary,
    broadcast,
    check,
    elementwise,
    floating,
    into_empty_like,
    joined,
    real_dtype,
    result_dtype,
    same_dtype,
    tensors_of,
    to_bool,
    unary,
)
from firesteel.graph.rules.refusals import fits_in, surely_holds
from firesteel.graph.spec import Spec, contiguous_strides, fresh, like
from firesteel.loops.ir import check_index
from firesteel.loops.lower.build import Builder
from firesteel.loops.lower.pointwise import Impossible, as_element, lower_pointwise, times, truth
from firesteel.loops.lower.value import Operand
from firesteel.loops.scalars import DTYPES, S, is_float, literal, to
from firesteel.ops.block import decomposition, lowering, operator, pointwise, probed_rule, refuses, shape
from firesteel.sym.expr import Expr
from firesteel.targets import on_host

aten = torch.ops.aten


# ---------------------------------------------------------------- functions of one number

for _name in ("sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
              "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", "lgamma", "digamma"):
    pointwise(_name, unary(floating))(getattr(S, _name))
pointwise("reciprocal", unary(floating))(S.recip)
for _name in ("i0", "special_i0e", "special_i1", "special_i1e", "special_erfcx", "special_log_ndtr"):
    pointwise(_name)(getattr(S, _name.removeprefix("special_")))


pointwise("neg", unary(same_dtype))(S.neg)
pointwise("abs", lambda x: (like if x.dtype.is_complex else unary(real_dtype))(x, dtype=real_dtype(x.dtype)))(
    lambda x: x if x.dtype in ("bool", "u8") else S.abs(x))

pointwise("positive", unary(same_dtype))(lambda x: x)
pointwise("square", unary(same_dtype))(lambda x: x if x.dtype == "bool" else S.mul(x, x))
pointwise("sign sgn", unary(same_dtype), decides=True)(lambda x: x if x.dtype == "bool" else S.sign(x))
pointwise("signbit", unary(to_bool), convert="own")(
    lambda x: S.signbit(x) if is_float(x.dtype) else literal(False, "bool") if x.dtype in ("bool", "u8") else S.lt(x, 0))


@probed_rule("angle")
def angle(x: Spec) -> Spec:
    if x.dtype in TO_REAL:      # eager resizes an empty result, which forgets the operand's strides
        return Spec(x.shape, contiguous_strides(x.shape), 0, TO_REAL[x.dtype], x.device)
    return elementwise([x], floating(x.dtype))


pointwise("angle")(lambda x: S.where(S.isnan(x), x, S.where(S.lt(x, 0), literal(math.pi, x.dtype), 0.0)))
pointwise("deg2rad", lambda x: like(x, dtype=floating(x.dtype)))(lambda x: S.mul(x, math.pi / 180))
pointwise("rad2deg", lambda x: like(x, dtype=floating(x.dtype)))(lambda x: S.mul(x, 180 / math.pi))


@pointwise("sinc", unary(floating))
def compute_sinc(x):
    scaled = S.mul(x, math.pi)
    return S.where(S.eq(x, 0), 1, S.div(S.sin(scaled), scaled))


@pointwise("special_entr", unary(floating))
def compute_entr(x):
    value = S.where(S.eq(x, 0), 0, S.neg(S.mul(x, S.log(x))))
    return S.where(S.isnan(x), x, S.where(S.lt(x, 0), literal(-math.inf, x.dtype), value))


probed_rule("special_erfcx special_i0e special_i1 special_i1e special_ndtri special_log_ndtr i0 special_bessel_j0 special_bessel_j1 "
            "special_bessel_y0 special_bessel_y1 special_airy_ai special_modified_bessel_i0 special_modified_bessel_i1 "
            "special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 "
            "special_spherical_bessel_j0")(unary(floating))
probed_rule("conj_physical")(like)
probed_rule("nan_to_num")(into_empty_like)
shape("mvlgamma")(as_first)
probed_rule("polygamma")(lambda n, x: elementwise([x], floating(x.dtype)))


@pointwise("polygamma")
def compute_polygamma(n, x):
    if isinstance(n, Expr) or n not in (0, 1):
        raise Impossible
    return S.trigamma(x) if n else S.digamma(x)


probed_rule("frexp.Tensor")(lambda x: (like(x), like(x, dtype=torch.int32)))
probed_rule("complex")(lambda real, imag: elementwise([real, imag], torch.promote_types(real.dtype, torch.complex32)))
probed_rule("polar")(lambda length, angle: elementwise([length, angle], torch.promote_types(length.dtype, torch.complex32)))


# ---------------------------------------------------------------- arithmetic

@pointwise("add.Tensor add.Scalar", binary(same_dtype), rounds=(0, 1, "alpha"))
def compute_add(x, y, alpha=1):
    if _is_bool(x, y):
        return S.or_(x, S.and_(y, bool(alpha))) if alpha != 1 else S.or_(x, y)
    return S.add(x, times(y, alpha))


pointwise("sub.Tensor sub.Scalar", binary(same_dtype), rounds=(0, 1, "alpha"))(lambda x, y, alpha=1: S.sub(x, times(y, alpha)))
pointwise("rsub.Tensor rsub.Scalar", lambda x, y, alpha=1: binary(same_dtype)(y, x), rounds=(0, 1, 2, "alpha"))(
    lambda x, y, alpha=1: S.sub(y, times(x, alpha)))


@decomposition("rsub.Tensor rsub.Scalar", core=False)
def decompose_rsub(x: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    scaled = x if alpha == 1 else x * alpha     # `number - tensor` would arrive here again
    return aten.sub.Tensor(other, scaled) if isinstance(other, Tensor) else aten.add.Tensor(aten.neg.default(scaled), other)


# eager multiplies by a second number, and divides by one, unrounded
pointwise("mul.Tensor mul.Scalar", binary(same_dtype), rounds=(0,))(lambda x, y: S.and_(x, y) if _is_bool(x, y) else S.mul(x, y))


def _is_bool(*values: Any) -> bool:
    return all(v.dtype == "bool" if isinstance(v, Expr) else isinstance(v, bool) for v in values)


probed_rule("div.Tensor div.Scalar special_zeta special_zeta.other_scalar special_zeta.self_scalar")(binary(floating))
pointwise("div.Tensor div.Scalar true_divide.Tensor", rounds=(0,))(S.div)


@probed_rule("div.Tensor_mode div.Scalar_mode")
def div_mode(a: Spec, b: Any, rounding_mode: str | None = None) -> Spec:
    dtype = result_dtype((a, b))
    return elementwise(tensors_of(a, b), dtype if rounding_mode else floating(dtype))


def _compute_div_mode(divisor: Callable[[Any, Any], Any], x: Any, y: Any, rounding_mode: str | None = None) -> Expr:
    if rounding_mode is None:
        return S.div(x, y)
    y = divisor(x, y)
    if rounding_mode == "floor":
        return S.floordiv(x, y)
    if is_float(x.dtype):
        return S.trunc(S.div(x, y))
    y = as_element(y, x)
    down = S.floordiv(x, y)     # integer division towards zero: one more where rounding down went away from it
    rest = S.sub(x, S.mul(down, y))
    return S.add(down, to(S.and_(S.ne(rest, 0), S.ne(S.lt(x, 0), S.lt(y, 0))), rest.dtype))


@decomposition("div.Tensor_mode div.Scalar_mode")
def decompose_div_mode(x: Tensor, y: Any, *, rounding_mode: str | None = None) -> Any:
    """Eager rounds the quotient of 16-bit floats before it is truncated, but for a divisor that is one number."""
    if rounding_mode != "trunc" or not isinstance(y, Tensor) or not y.dim() or torch.result_type(x, y) not in (torch.float16, torch.bfloat16):
        return NotImplemented
    return aten.trunc.default(x / y)


def _constant_divisor(x: Any, y: Any) -> Any:
    """An integer divided by zero is no number of eager's; only a constant divisor is known not to be zero."""
    dtype = x.dtype if isinstance(x, Expr) else y.dtype
    if not is_float(dtype) and (isinstance(y, Expr) and y.op != "const" or not isinstance(y, Expr) and int(y) == 0):
        raise Impossible
    return y


def _checked_divisor(x: Any, y: Any) -> Any:
    """On the host a divisor of zero is an error: the kernel reports an index out of range, and eager says what is wrong."""
    if not isinstance(y, Expr) or y.op == "const" or y.dtype == "bool" or is_float(y.dtype):
        return _constant_divisor(x, y)
    found = check_index(S.where(S.eq(y, 0), literal(2, "i64"), 1), 2, strict=True)
    return S.where(S.eq(found, 1), y, 1)


pointwise("div.Tensor_mode div.Scalar_mode", rounds=(0,), cuda=functools.partial(_compute_div_mode, _constant_divisor))(
    functools.partial(_compute_div_mode, _checked_divisor))


def _divided(op: Callable[[Any, Any], Expr], divisor: Callable[[Any, Any], Any], x: Any, y: Any) -> Expr:
    return op(x, divisor(x, y))


for _names, _op in (("floor_divide floor_divide.Scalar", S.floordiv), ("fmod.Tensor fmod.Scalar", S.fmod),
                    ("remainder.Tensor remainder.Scalar remainder.Scalar_Tensor", S.mod)):
    pointwise(_names, binary(same_dtype), decides=True, rounds=(0,) if _op is S.floordiv else (0, 1),
              cuda=functools.partial(_divided, _op, _constant_divisor))(functools.partial(_divided, _op, _checked_divisor))


probed_rule("addcmul addcdiv")(lambda x, a, b, value=1: joined(x, a, b))
decomposition("addcmul", core=False)(lambda x, a, b, value=1: x + (a * b if value == 1 else a * b * value))
pointwise("addcmul", rounds=(0, 1, 2))(lambda x, t1, t2, value=1: S.add(x, S.mul(times(t1, value), t2)))
decomposition("addcdiv", core=False)(lambda x, a, b, value=1: x + (a / b if value == 1 else (a / b) * value))
pointwise("addcdiv", rounds=(0, 1, 2))(lambda x, t1, t2, value=1: S.add(x, S.div(times(t1, value), t2)))


@probed_rule("lerp.Scalar lerp.Tensor")
def lerp(x: Spec, end: Spec, weight: Any) -> Spec:
    check(x.dtype is end.dtype, f"expected dtype {x.dtype} for `end` but got dtype {end.dtype}")
    return elementwise(tensors_of(x, end, weight), result_dtype((x, end, weight)) if type(weight) is Spec else x.dtype)


@decomposition("lerp.Scalar", core=False)
def decompose_lerp_scalar(x: Tensor, end: Tensor, weight: float) -> Tensor:
    """From the nearer end, as eager does, so that both ends are exact."""
    return x + (end - x) * weight if weight < 0.5 else end - (end - x) * (1 - weight)


decomposition("lerp.Tensor", core=False)(
    lambda x, end, weight: aten.where.self(aten.abs.default(weight) < 0.5, x + weight * (end - x), end - (end - x) * (1 - weight)))


@pointwise("lerp.Scalar")
@pointwise("lerp.Tensor", rounds=(0, 1, 2))
def compute_lerp(x, end, weight):
    """Eager starts from the nearer end."""
    distance = S.sub(end, x)
    near, far = S.add(x, S.mul(distance, weight)), S.sub(end, S.mul(distance, S.sub(1.0, weight) if isinstance(weight, Expr) else 1.0 - weight))
    if isinstance(weight, Expr):
        return S.where(S.lt(S.abs(weight), 0.5), near, far)
    return near if abs(weight) < 0.5 else far


# ---------------------------------------------------------------- functions of two numbers

pointwise("atan2", binary(floating), rounds=(0, 1))(S.atan2)
pointwise("hypot", binary(same_dtype), rounds=(0, 1))(S.hypot)


@lowering("nextafter")
def lower_nextafter(b: Builder, out: Any, *args: Any) -> Any:
    """Kernels compute 16-bit floats in 32 bits, where the next number is another one."""
    return lower_pointwise(b, out, S.nextafter, "result", (), args, {}) if out.dtype in (torch.float32, torch.float64) else NotImplemented


operator("nextafter.*", decides=True)
probed_rule("gcd lcm nextafter igamma igammac")(binary(same_dtype))
pointwise("copysign.Tensor copysign.Scalar", binary(floating))(S.copysign)
probed_rule("ldexp.Tensor")(lambda a, b: elementwise([a, fresh(b)], floating(result_dtype((a, b)))))     # a * 2 ** b
pointwise("ldexp.Tensor")(lambda x, exponent: S.mul(x, S.pow(literal(2, x.dtype), exponent)))


def _log_of_sum(log: Callable[[Expr], Expr], x: Any, y: Any) -> Expr:
    """`log` of minus the distance is what the smaller one adds to the larger."""
    summed = S.add(S.max(x, y), log(S.neg(S.abs(S.sub(x, y)))))
    return S.where(S.and_(S.isinf(x), S.eq(x, y)), x, summed)


pointwise("logaddexp", binary(floating))(functools.partial(_log_of_sum, lambda z: S.log1p(S.exp(z))))
pointwise("logaddexp2", binary(floating))(functools.partial(_log_of_sum, lambda z: S.mul(S.log1p(S.exp2(z)), 1 / math.log(2.0))))


def _times_log(log: Callable[[Any], Expr], x: Any, y: Any) -> Expr:
    x, y = as_element(x, y if isinstance(y, Expr) else x), as_element(y, x if isinstance(x, Expr) else y)
    return S.where(S.isnan(y), y, S.where(S.eq(x, 0), 0, S.mul(x, log(y))))


pointwise("xlogy.Tensor xlogy.Scalar_Self xlogy.Scalar_Other", binary(floating), rounds=(0, 1))(functools.partial(_times_log, S.log))
pointwise("special_xlog1py special_xlog1py.self_scalar special_xlog1py.other_scalar", binary(floating), rounds=(0, 1))(
    functools.partial(_times_log, S.log1p))


POLYNOMIALS = ("chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w", "hermite_polynomial_h",
               "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p", "shifted_chebyshev_polynomial_t",
               "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v", "shifted_chebyshev_polynomial_w")
probed_rule(" ".join(f"special_{name}{overload}" for name in POLYNOMIALS for overload in ("", ".x_scalar", ".n_scalar")))(binary(floating))


# ---------------------------------------------------------------- powers

@pointwise("pow.Tensor_Scalar", binary(same_dtype, numbers=False), rounds=(1,))
def compute_pow_scalar(x, exponent):
    if isinstance(exponent, Expr):
        if is_float(x.dtype):
            return S.pow(x, exponent)
        raise Impossible
    if is_float(x.dtype):
        short = FLOAT_POWERS.get(float(exponent))
        return short(x) if short is not None else S.pow(x, exponent)
    if x.dtype == "bool" or exponent < 0:
        raise Impossible
    return _whole_power(x, int(exponent))


FLOAT_POWERS: dict[float, Callable[[Expr], Expr]] = {      # those that eager computes without pow
    0.0: lambda x: literal(1, x.dtype),
    0.5: lambda x: S.sqrt(x),
    1.0: lambda x: x,
    2.0: lambda x: S.mul(x, x),
    3.0: lambda x: S.mul(S.mul(x, x), x),
    -0.5: lambda x: S.rsqrt(x),
    -1.0: lambda x: S.recip(x),
    -2.0: lambda x: S.recip(S.mul(x, x)),
}


def _whole_power(x: Expr, exponent: int) -> Expr:
    """By squaring; wraps as repeated multiplication does."""
    result = literal(1, x.dtype)
    while exponent:
        if exponent & 1:
            result = x if result.op == "const" else S.mul(result, x)
        exponent >>= 1
        x = S.mul(x, x) if exponent else x
    return result


probed_rule("pow.Scalar")(lambda base, exponent: fresh(exponent, dtype=result_dtype((base, exponent))))


@pointwise("pow.Tensor_Tensor", binary(same_dtype), rounds=(0, 1))
@pointwise("pow.Scalar", rounds=(0,))
def compute_pow_tensor(x, exponent):
    if not is_float(exponent.dtype):
        raise Impossible
    return S.pow(x, exponent)


probed_rule("float_power.Tensor_Tensor float_power.Tensor_Scalar float_power.Scalar")(
    lambda a, b: elementwise(tensors_of(a, b), torch.complex128 if result_dtype((a, b)).is_complex else torch.float64))


# ---------------------------------------------------------------- extremes

pointwise("maximum", binary(same_dtype))(S.max)
pointwise("minimum", binary(same_dtype))(S.min)


@pointwise("fmax", binary(same_dtype))
def compute_fmax(x, y):
    """Of equal numbers (zeros of both signs) the first."""
    return S.where(S.or_(S.isnan(x), S.lt(x, y)), y, x) if is_float(x.dtype) else S.max(x, y)


pointwise("fmin", binary(same_dtype))(lambda x, y: S.where(S.or_(S.isnan(x), S.gt(x, y)), y, x) if is_float(x.dtype) else S.min(x, y))


@probed_rule("clamp clamp.Tensor")
def clamp(x: Spec, low: Any = None, high: Any = None) -> Spec:
    check(low is not None or high is not None, "torch.clamp: At least one of 'min' or 'max' must not be None")
    return joined(x, low, high)


@pointwise("clamp clamp.Tensor")
def compute_clamp(x, min=None, max=None):
    """The element comes second: of equal numbers that one is taken, so that -0 stays what it is."""
    x = x if min is None else S.max(min, x)
    return x if max is None else S.min(max, x)


pointwise("clamp_min clamp_min.Tensor", binary(same_dtype, numbers=False))(lambda x, min: compute_clamp(x, min))
pointwise("clamp_max clamp_max.Tensor", binary(same_dtype, numbers=False))(lambda x, max: compute_clamp(x, None, max))


# ---------------------------------------------------------------- rounding

for _name in ("floor", "ceil", "round", "trunc"):
    pointwise(_name, unary(same_dtype), decides=True)(lambda x, name=_name: getattr(S, name)(x) if is_float(x.dtype) else x)
pointwise("fix", decides=True)(lambda x: S.trunc(x) if is_float(x.dtype) else x)


@pointwise("round.decimals", unary(same_dtype), decides=True)
def compute_round_decimals(x, decimals=0):
    if not is_float(x.dtype):
        raise Impossible
    if decimals == 0:
        return S.round(x)
    scale = 10.0 ** abs(decimals)
    return S.div(S.round(S.mul(x, scale)), scale) if decimals > 0 else S.mul(S.round(S.div(x, scale)), scale)


pointwise("frac", unary(same_dtype), decides=True)(lambda x: S.sub(x, S.trunc(x)))


# ---------------------------------------------------------------- comparisons, logic, bits

for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    pointwise(f"{_name}.Tensor {_name}.Scalar", binary(to_bool), convert="common", rounds=(0, 1))(getattr(S, _name))
for _name in ("and", "or", "xor"):
    pointwise(f"logical_{_name}", binary(to_bool), convert="bool")(getattr(S, _name))
    pointwise(f"bitwise_{_name}.Tensor bitwise_{_name}.Scalar bitwise_{_name}.Scalar_Tensor", binary(same_dtype))(getattr(S, _name))
pointwise("logical_not", unary(to_bool), convert="bool")(S.not_)
pointwise("bitwise_not", unary(same_dtype))(S.not_)
pointwise("bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_left_shift.Scalar_Tensor __lshift__.Tensor "
          "__lshift__.Scalar", binary(same_dtype))(lambda x, y: _shift(x, y, S.shl, lambda x: literal(0, x.dtype)))
pointwise("bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_right_shift.Scalar_Tensor __rshift__.Tensor "
          "__rshift__.Scalar", binary(same_dtype))(
    lambda x, y: _shift(x, y, S.shr, lambda x: literal(0, "u8") if x.dtype == "u8" else S.shr(x, torch.iinfo(DTYPES[x.dtype]).bits - 1)))


def _shift(x: Expr, y: Any, shift: Callable, beyond: Callable[[Expr], Expr]) -> Expr:
    """Shifting by the width or more, or by a negative number, gives what is left after all bits went."""
    x = as_element(x, y)
    if x.dtype == "bool" or is_float(x.dtype):
        raise Impossible
    limits = torch.iinfo(DTYPES[x.dtype])
    bits = limits.bits
    if not isinstance(y, Expr):
        y = (int(y) - limits.min) % (1 << bits) + limits.min        # eager converts the number first
        return shift(x, y) if 0 <= y < bits else beyond(x)
    inside = S.lt(y, bits) if x.dtype == "u8" else S.and_(S.ge(y, 0), S.lt(y, bits))
    return S.where(inside, shift(x, S.where(inside, y, 0)), beyond(x))


# ---------------------------------------------------------------- tests of floats

def _float_test(test: Callable[[Expr], Expr], otherwise: bool) -> Callable[[Expr], Expr]:
    return lambda x: test(x) if is_float(x.dtype) else literal(otherwise, "bool")


pointwise("isnan", unary(to_bool), convert="own")(_float_test(S.isnan, False))
pointwise("isinf", unary(to_bool), convert="own")(_float_test(S.isinf, False))
pointwise("isfinite", convert="own")(_float_test(lambda x: S.lt(S.abs(x), math.inf), True))
pointwise("isposinf", unary(to_bool), convert="own")(_float_test(lambda x: S.eq(x, math.inf), False))
pointwise("isneginf", unary(to_bool), convert="own")(_float_test(lambda x: S.eq(x, -math.inf), False))


@lowering("nan_to_num")
def lower_nan_to_num(b: Builder, out: Any, x: Operand, *args: Any, **kwargs: Any) -> Any:
    """The largest number is that of the tensor's dtype, also where kernels compute in a wider one."""
    body = functools.partial(nan_to_num, largest=torch.finfo(out.dtype).max if out.dtype.is_floating_point else 0)
    return lower_pointwise(b, out, body, "result", (), (x, *args), kwargs)


def nan_to_num(x, nan=None, posinf=None, neginf=None, largest=0.0):
    if not is_float(x.dtype):
        return x
    x1 = S.where(S.isnan(x), literal(nan or 0.0, x.dtype), x)
    x2 = S.where(S.eq(x, math.inf), literal(largest if posinf is None else posinf, x.dtype), x1)
    return S.where(S.eq(x, -math.inf), literal(-largest if neginf is None else neginf, x.dtype), x2)


# ---------------------------------------------------------------- choosing

@probed_rule("where.self where.ScalarSelf where.ScalarOther where.Scalar")
def where(condition: Spec, a: Any, b: Any) -> Spec:
    operands = tensors_of(condition, a, b)
    dtype = result_dtype((a, b))
    if len(operands) == 3 and len(condition.shape) == 0 and on_host(condition):
        operands = operands[1:] or operands
    return elementwise(operands, dtype)


pointwise("where.self where.ScalarOther where.ScalarSelf", raw=(0,))(lambda condition, x, y: S.where(truth(condition), x, y))


@probed_rule("masked_fill.Scalar masked_fill.Tensor")
def masked_fill(x: Spec, mask: Spec, value: Any) -> Spec:
    check(mask.dtype is torch.bool, f"masked_fill_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    shape = broadcast(x.shape, mask.shape)
    return Spec(shape, contiguous_strides(shape), 0, x.dtype, x.device)


@refuses("masked_fill.Tensor")
def refuse_masked_fill_tensor(x: Spec, mask: Spec, value: Spec) -> None:
    check(not value.shape, f"masked_fill_ only supports a 0-dimensional value tensor, but got tensor with {len(value.shape)} dimension(s).")
    check(torch.can_cast(value.dtype, x.dtype) or not value.dtype.is_complex, f"value cannot be converted to type {x.dtype} without overflow")
    surely_holds(value, x.dtype)


refuses("masked_fill.Scalar")(lambda x, mask, value: fits_in(value, x.dtype))


@decomposition("masked_fill.Scalar masked_fill.Tensor", core=False)
def decompose_masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        value = aten.scalar_tensor.default(value, dtype=x.dtype, device=x.device)
    return aten.where.self(mask, cast(value, x.dtype), x)


pointwise("masked_fill.Scalar masked_fill.Tensor", raw=(1,))(lambda x, mask, value: S.where(truth(mask), as_element(value, x), x))
pointwise("heaviside", binary(same_dtype), decides=True)(lambda x, values: S.where(S.eq(x, 0), values, to(S.gt(x, 0), x.dtype)))
