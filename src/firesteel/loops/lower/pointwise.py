"""Lowerings of the operators that compute each element of the result from the elements at the same place.

A row says only the scalar body.  Tensors arrive in it as Exprs, broadcast and converted; plain numbers stay numbers (the
builders of `S` make constants of them); a size of the graph arrives as an Expr converted like a tensor's element.  The
result is rounded to the dtype of the node's Spec, which is torch's promoted one.

How arguments are converted (`to`):
    "result"   to the compute dtype of the result: arithmetic
    "common"   to the compute dtype of the arguments' common dtype: comparisons
    "bool"     to truth values: logical operators
    "own"      to the compute dtype of each argument itself
`raw` names argument positions that are handed over without conversion (the condition of `where`).
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from firesteel.loops.lower.build import LOWERINGS, Builder, broadcast_index, supported
from firesteel.loops.lower.value import Index, Tensor
from firesteel.loops.ops import DTYPES, SHORT, S, compute_dtype, from_size, is_float, literal, number, to
from firesteel.sym.expr import Expr

aten = torch.ops.aten


# ---------------------------------------------------------------- the machinery

def pointwise(*targets: Any, convert: str = "result", raw: tuple[int, ...] = ()) -> Callable:
    """Registers a scalar body as the lowering of the targets."""
    def register(body: Callable[..., Expr]) -> Callable[..., Expr]:
        def lower(b: Builder, out: Any, *args: Any, **kwargs: Any) -> Any:
            return lower_pointwise(b, out, body, convert, raw, args, kwargs)
        for target in targets:
            LOWERINGS.add(target, lower)
        return body
    return register


def lower_pointwise(b: Builder, out: Any, body: Callable, convert: str, raw: tuple[int, ...], args: tuple, kwargs: dict) -> Any:
    result = SHORT.get(out.dtype, "")
    tensors = [a for a in args if type(a) is Tensor] + [a for a in kwargs.values() if type(a) is Tensor]
    if not supported(result, *[t.dtype for t in tensors]) or not _one_device(out, tensors) or not any(type(a) in (Tensor, Expr) for a in args):
        return NotImplemented       # numbers alone are computed by the library
    dtype = CONVERSIONS[convert](result, args)
    sources = [b.readable(a) if type(a) is Tensor else a for a in args]
    options = {k: b.readable(v) if type(v) is Tensor else v for k, v in kwargs.items()}

    def element(index: Index) -> Expr:
        values = [_scalar(a, index, None if n in raw else dtype) for n, a in enumerate(sources)]
        named = {k: _scalar(v, index, dtype) for k, v in options.items()}
        return body(*values, **named)
    try:
        return b.map(out, element)
    except Impossible:
        return NotImplemented


class Impossible(Exception):
    """Raised by a body for which no loop nest will do; nothing has been emitted by then."""


def _one_device(out: Any, tensors: list[Tensor]) -> bool:
    """Kernels read memory of one device; eager also takes CPU scalars beside GPU tensors."""
    return all(t.spec.device == out.device for t in tensors)


def _scalar(value: Any, index: Index, dtype: str | None) -> Any:
    if type(value) is Tensor:
        loaded = value.load(broadcast_index(index, value.shape))
        return loaded if dtype is None else truth(loaded) if dtype == "truth" else to(loaded, dtype or compute_dtype(value.dtype))
    if isinstance(value, Expr) and dtype is not None:
        return number(value, dtype or value.dtype) if dtype != "truth" else truth(from_size(value))
    return value


def truth(value: Expr) -> Expr:
    """value != 0, in the dtype in which it can be compared."""
    if value.dtype == "bool":
        return value
    return S.ne(to(value, compute_dtype(value.dtype)), 0)


CONVERSIONS: dict[str, Callable[[str, tuple], str]] = {
    "result": lambda result, args: compute_dtype(result),
    "common": lambda result, args: compute_dtype(common_dtype(args)),
    "bool": lambda result, args: "truth",
    "own": lambda result, args: "",
}

_promoted: dict[tuple[str, str], str] = {}


def promote(x: str, y: str) -> str:
    if x == y or not y:
        return x
    found = _promoted.get((x, y))
    if found is None:
        found = _promoted[x, y] = SHORT[torch.promote_types(DTYPES[x], DTYPES[y])] if x else y
    return found


def common_dtype(args: tuple) -> str:
    """torch's promotion: dimensioned tensors first; 0-d tensors, then numbers, only count if of a higher kind."""
    dimensioned = zero_d = number = ""
    for a in args:
        if type(a) is Tensor:
            if a.shape:
                dimensioned = promote(a.dtype, dimensioned)
            else:
                zero_d = promote(a.dtype, zero_d)
        elif a is not None:
            number = promote(_number_dtype(a), number)
    result = dimensioned
    for weaker in (zero_d, number):
        if weaker and (not result or _kind(weaker) > _kind(result)):
            result = weaker
    return result


def _number_dtype(value: Any) -> str:
    if isinstance(value, Expr):
        return value.dtype if value.dtype != "f64" else SHORT[torch.get_default_dtype()]
    return "bool" if isinstance(value, bool) else "i64" if isinstance(value, int) else SHORT[torch.get_default_dtype()]


def _kind(dtype: str) -> int:
    return 2 if is_float(dtype) else 0 if dtype == "bool" else 1


# ---------------------------------------------------------------- one operator, one scalar row

for _name in ("sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
              "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", "lgamma", "digamma"):
    pointwise(getattr(aten, _name).default)(getattr(S, _name))
pointwise(aten.reciprocal.default)(S.recip)
pointwise(aten.atan2.default)(S.atan2)
pointwise(aten.hypot.default)(S.hypot)


def _nextafter(b: Builder, out: Any, *args: Any) -> Any:
    """Kernels compute 16-bit floats in 32 bits, where the next number is another one."""
    return lower_pointwise(b, out, S.nextafter, "result", (), args, {}) if out.dtype in (torch.float32, torch.float64) else NotImplemented


LOWERINGS.add(aten.nextafter.default, _nextafter)

for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _packet = getattr(aten, _name)
    pointwise(_packet.Tensor, _packet.Scalar, convert="common")(getattr(S, _name))

for _name in ("and", "or", "xor"):
    pointwise(getattr(aten, f"logical_{_name}").default, convert="bool")(getattr(S, _name))
    _packet = getattr(aten, f"bitwise_{_name}")
    pointwise(_packet.Tensor, _packet.Scalar, _packet.Scalar_Tensor)(getattr(S, _name))
pointwise(aten.logical_not.default, convert="bool")(S.not_)
pointwise(aten.bitwise_not.default)(S.not_)


# ---------------------------------------------------------------- arithmetic

@pointwise(aten.add.Tensor, aten.add.Scalar)
def add(x, y, alpha=1):
    if _is_bool(x, y):
        return S.or_(x, S.and_(y, bool(alpha))) if alpha != 1 else S.or_(x, y)
    return S.add(x, times(y, alpha))


@pointwise(aten.sub.Tensor, aten.sub.Scalar)
def sub(x, y, alpha=1):
    return S.sub(x, times(y, alpha))


@pointwise(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(x, y, alpha=1):
    return S.sub(y, times(x, alpha))


@pointwise(aten.mul.Tensor, aten.mul.Scalar)
def mul(x, y):
    return S.and_(x, y) if _is_bool(x, y) else S.mul(x, y)


def _is_bool(*values: Any) -> bool:
    return all(v.dtype == "bool" if isinstance(v, Expr) else isinstance(v, bool) for v in values)


def times(value: Any, factor: Any) -> Any:
    """value * factor, without the multiplication where the factor is 1."""
    if isinstance(factor, Expr):
        return S.mul(value, to(factor, value.dtype)) if isinstance(value, Expr) else S.mul(literal(value, factor.dtype), factor)
    if factor == 1:
        return value
    return S.mul(value, factor) if isinstance(value, Expr) else value * factor


@pointwise(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def div(x, y):
    return S.div(x, y)


@pointwise(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(x, y, rounding_mode=None):
    if rounding_mode is None:
        return S.div(x, y)
    _refuse_zero_divisor(x, y)
    if rounding_mode == "floor":
        return S.floordiv(x, y)
    if is_float(x.dtype):
        return S.trunc(S.div(x, y))
    return _truncated(x, y)


def _truncated(x: Expr, y: Any) -> Expr:
    """Integer division towards zero: what is left after taking C's remainder off divides exactly."""
    return S.floordiv(S.sub(x, S.fmod(x, y)), y)


def as_element(value: Any, like: Expr) -> Expr:
    return value if isinstance(value, Expr) else literal(value, like.dtype)


def _refuse_zero_divisor(x: Any, y: Any) -> None:
    """An integer divided by zero is an error in eager; only a constant divisor is known not to be zero."""
    dtype = x.dtype if isinstance(x, Expr) else y.dtype
    if not is_float(dtype) and (isinstance(y, Expr) and y.op != "const" or not isinstance(y, Expr) and int(y) == 0):
        raise Impossible


@pointwise(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(x, y):
    _refuse_zero_divisor(x, y)
    return S.floordiv(x, y)


@pointwise(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(x, y):
    _refuse_zero_divisor(x, y)
    return S.mod(x, y)


@pointwise(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(x, y):
    _refuse_zero_divisor(x, y)
    return S.fmod(x, y)


@pointwise(aten.neg.default, aten._neg_view.default)
def neg(x):
    return S.neg(x)


@pointwise(aten.abs.default)
def abs_(x):
    return x if x.dtype in ("bool", "u8") else S.abs(x)


@pointwise(aten.positive.default, aten.lift_fresh_copy.default)
def positive(x):
    return x


@pointwise(aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor)
def maximum(x, y):
    return S.max(x, y)


@pointwise(aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor)
def minimum(x, y):
    return S.min(x, y)


@pointwise(aten.fmax.default)
def fmax(x, y):
    return S.where(S.isnan(x), y, S.where(S.isnan(y), x, S.max(x, y))) if is_float(x.dtype) else S.max(x, y)


@pointwise(aten.fmin.default)
def fmin(x, y):
    return S.where(S.isnan(x), y, S.where(S.isnan(y), x, S.min(x, y))) if is_float(x.dtype) else S.min(x, y)


@pointwise(aten.clamp.default, aten.clamp.Tensor)
def clamp(x, min=None, max=None):
    x = x if min is None else S.max(x, min)
    return x if max is None else S.min(x, max)


@pointwise(aten.sign.default, aten.sgn.default)
def sign(x):
    return x if x.dtype == "bool" else S.sign(x)


@pointwise(aten.signbit.default, convert="own")
def signbit(x):
    return S.signbit(x) if is_float(x.dtype) else literal(False, "bool") if x.dtype in ("bool", "u8") else S.lt(x, 0)


@pointwise(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(x, y):
    return S.copysign(x, y)


@pointwise(aten.square.default)
def square(x):
    return x if x.dtype == "bool" else S.mul(x, x)


@pointwise(aten.addcmul.default)
def addcmul(x, t1, t2, value=1):
    return S.add(x, S.mul(times(t1, value), t2))


@pointwise(aten.addcdiv.default)
def addcdiv(x, t1, t2, value=1):
    return S.add(x, S.div(times(t1, value), t2))


@pointwise(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(x, end, weight):
    """Eager starts from the nearer end."""
    distance = S.sub(end, x)
    near, far = S.add(x, S.mul(distance, weight)), S.sub(end, S.mul(distance, S.sub(1.0, weight) if isinstance(weight, Expr) else 1.0 - weight))
    if isinstance(weight, Expr):
        return S.where(S.lt(S.abs(weight), 0.5), near, far)
    return near if abs(weight) < 0.5 else far


# ---------------------------------------------------------------- powers

@pointwise(aten.pow.Tensor_Scalar)
def pow_scalar(x, exponent):
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


@pointwise(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(x, exponent):
    if not is_float(exponent.dtype):
        raise Impossible
    return S.pow(x, exponent)


# ---------------------------------------------------------------- rounding, bits, tests

def _rounding(name: str) -> None:
    pointwise(getattr(aten, name).default)(lambda x: getattr(S, name)(x) if is_float(x.dtype) else x)


for _name in ("floor", "ceil", "round", "trunc"):
    _rounding(_name)
pointwise(aten.fix.default)(lambda x: S.trunc(x) if is_float(x.dtype) else x)


@pointwise(aten.round.decimals)
def round_decimals(x, decimals=0):
    if not is_float(x.dtype):
        raise Impossible
    if decimals == 0:
        return S.round(x)
    scale = 10.0 ** abs(decimals)
    return S.div(S.round(S.mul(x, scale)), scale) if decimals > 0 else S.mul(S.round(S.div(x, scale)), scale)


@pointwise(aten.frac.default)
def frac(x):
    return S.sub(x, S.trunc(x))


@pointwise(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_left_shift.Scalar_Tensor,
           aten.__lshift__.Tensor, aten.__lshift__.Scalar)
def shift_left(x, y):
    return _shift(x, y, S.shl, lambda x: literal(0, x.dtype))


@pointwise(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.bitwise_right_shift.Scalar_Tensor,
           aten.__rshift__.Tensor, aten.__rshift__.Scalar)
def shift_right(x, y):
    return _shift(x, y, S.shr, lambda x: S.shr(x, torch.iinfo(DTYPES[x.dtype]).bits - 1))


def _shift(x: Expr, y: Any, shift: Callable, beyond: Callable[[Expr], Expr]) -> Expr:
    """Shifting by the width or more, or by a negative number, gives what is left after all bits went."""
    x = as_element(x, y)
    if x.dtype == "bool" or is_float(x.dtype):
        raise Impossible
    bits = torch.iinfo(DTYPES[x.dtype]).bits
    if not isinstance(y, Expr):
        return shift(x, y) if 0 <= y < bits else beyond(x)
    inside = S.lt(y, bits) if x.dtype == "u8" else S.and_(S.ge(y, 0), S.lt(y, bits))
    return S.where(inside, shift(x, S.where(inside, y, 0)), beyond(x))


def _float_test(test: Callable[[Expr], Expr], otherwise: bool) -> Callable[[Expr], Expr]:
    return lambda x: test(x) if is_float(x.dtype) else literal(otherwise, "bool")


pointwise(aten.isnan.default, convert="own")(_float_test(S.isnan, False))
pointwise(aten.isinf.default, convert="own")(_float_test(S.isinf, False))
pointwise(aten.isfinite.default, convert="own")(_float_test(lambda x: S.lt(S.abs(x), math.inf), True))
pointwise(aten.isposinf.default, convert="own")(_float_test(lambda x: S.eq(x, math.inf), False))
pointwise(aten.isneginf.default, convert="own")(_float_test(lambda x: S.eq(x, -math.inf), False))


@pointwise(aten.nan_to_num.default)
def nan_to_num(x, nan=None, posinf=None, neginf=None):
    if not is_float(x.dtype):
        return x
    largest = torch.finfo(DTYPES[x.dtype]).max
    x1 = S.where(S.isnan(x), literal(nan or 0.0, x.dtype), x)
    x2 = S.where(S.eq(x, math.inf), literal(largest if posinf is None else posinf, x.dtype), x1)
    return S.where(S.eq(x, -math.inf), literal(-largest if neginf is None else neginf, x.dtype), x2)


# ---------------------------------------------------------------- choosing

@pointwise(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, raw=(0,))
def where(condition, x, y):
    return S.where(truth(condition), x, y)


@pointwise(aten.masked_fill.Scalar, aten.masked_fill.Tensor, raw=(1,))
def masked_fill(x, mask, value):
    return S.where(truth(mask), as_element(value, x), x)


@pointwise(aten.heaviside.default)
def heaviside(x, values):
    return S.where(S.eq(x, 0), values, to(S.gt(x, 0), x.dtype))


# ---------------------------------------------------------------- copies and conversions

def lower_copy(b: Builder, out: Any, x: Tensor, *_: Any, **__: Any) -> Any:
    """A copy in the layout and dtype of `out`.  The rounding was asked for by the program: it is never loose."""
    if not supported(SHORT.get(out.dtype, ""), x.dtype) or x.spec.device != out.device:
        return NotImplemented
    x, dtype = b.readable(x), SHORT[out.dtype]
    return b.map(out, lambda index: to(x.load(index), dtype))


for _target in (aten.clone.default, aten._to_copy.default, aten.contiguous.default):
    LOWERINGS.add(_target, lower_copy)


@LOWERINGS.row(aten.copy.default)
def lower_copy_onto(b: Builder, out: Any, x: Tensor, source: Tensor, *_: Any) -> Any:
    """copy(x, source): source's values, broadcast, in x's place and dtype."""
    if not supported(SHORT.get(out.dtype, ""), source.dtype) or source.spec.device != out.device:
        return NotImplemented
    source, dtype = b.readable(source), SHORT[out.dtype]
    return b.map(out, lambda index: to(source.load(broadcast_index(index, source.shape)), dtype))
