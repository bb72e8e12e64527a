"""Scalar operators in terms of simpler ones, for targets that have no spelling of their own for them.

A row takes the arguments as Exprs and gives an Expr of the same dtype that does not contain the operator itself; a printer
replaces what it cannot spell, again and again.  Errors are a few units in the last place of f32, and of f64 where the
building blocks are as good.

    DECOMPOSED["sigmoid"](x)      # 1 / (1 + exp(-x))
"""
from __future__ import annotations

import math
from collections.abc import Callable

from firesteel.loops.scalars import S, is_float, literal
from firesteel.sym.expr import Expr
from firesteel.table import Table

DECOMPOSED: Table[Callable[..., Expr]] = Table("scalar decomposition", "loops/decompose.py")


def _spelled(**rows: Callable[..., Expr]) -> None:
    for name, body in rows.items():
        DECOMPOSED.add(name, body)


def _polynomial(x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """Horner's scheme, highest power first."""
    result = literal(coefficients[0], x.dtype)
    for c in coefficients[1:]:
        result = S.add(S.mul(result, x), c)
    return result


def _signs_differ(x: Expr, y: Expr) -> Expr:
    return S.ne(S.lt(x, 0), S.lt(y, 0))


def _mod(x: Expr, y: Expr) -> Expr:
    rest = S.fmod(x, y)
    return S.where(S.and_(S.ne(rest, 0), _signs_differ(rest, y)), S.add(rest, y), rest)


def _floordiv(x: Expr, y: Expr) -> Expr:
    """For floats: exact where the quotient is an integer, as torch computes it from the remainder."""
    rest = S.fmod(x, y)
    quotient = S.div(S.sub(x, rest), y)
    quotient = S.where(S.and_(S.ne(rest, 0), _signs_differ(rest, y)), S.sub(quotient, 1), quotient)
    floor = S.floor(quotient)
    floor = S.where(S.gt(S.sub(quotient, floor), 0.5), S.add(floor, 1), floor)
    ratio = S.div(x, y)
    result = S.where(S.eq(quotient, 0), S.copysign(literal(0, x.dtype), ratio), floor)
    return S.where(S.eq(y, 0), ratio, result)


def _tanh(x: Expr) -> Expr:
    """1 - 2/(exp(2|x|)+1) with the sign put back: no overflow, and expm1 keeps small arguments exact."""
    e = S.expm1(S.mul(S.abs(x), 2))
    return S.copysign(S.where(S.isinf(e), literal(1, x.dtype), S.div(e, S.add(e, 2))), x)


def _sinh(x: Expr) -> Expr:
    half = S.exp(S.mul(S.abs(x), 0.5))      # two halves: exp(x) itself would overflow before sinh does
    e = S.expm1(S.abs(x))
    small = S.mul(S.add(e, S.div(e, S.add(e, 1))), 0.5)
    return S.copysign(S.where(S.gt(S.abs(x), 1), S.sub(S.mul(S.mul(half, 0.5), half), S.div(S.div(literal(0.5, x.dtype), half), half)), small), x)


def _cosh(x: Expr) -> Expr:
    half = S.exp(S.mul(S.abs(x), 0.5))
    return S.add(S.mul(S.mul(half, 0.5), half), S.div(S.div(literal(0.5, x.dtype), half), half))


def _asinh(x: Expr) -> Expr:
    a = S.abs(x)
    big = S.add(S.log(a), math.log(2.0))
    square = S.mul(a, a)
    small = S.log1p(S.add(a, S.div(square, S.add(S.sqrt(S.add(square, 1)), 1))))
    return S.copysign(S.where(S.gt(a, 1e9), big, small), x)


def _acosh(x: Expr) -> Expr:
    less = S.sub(x, 1)
    small = S.log1p(S.add(less, S.sqrt(S.add(S.mul(less, less), S.mul(less, 2)))))
    return S.where(S.gt(x, 1e9), S.add(S.log(x), math.log(2.0)), small)


def _erf(x: Expr) -> Expr:
    """A rational approximation (Abramowitz and Stegun 7.1.26 has 1.5e-7 of error) is too rough: a Maclaurin series near 0,
    the complement's continued fraction further out."""
    a = S.abs(x)
    near = S.mul(a, _polynomial(S.mul(a, a), _ERF_SERIES))
    return S.copysign(S.where(S.lt(a, 2.0), near, S.sub(1.0, _erfc_tail(a))), x)


_ERF_SERIES = tuple(2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(27, -1, -1))


def _erfc_tail(a: Expr) -> Expr:
    """exp(-a*a)/sqrt(pi) / (a + (1/2)/(a + 1/(a + (3/2)/(a + ...)))), for a >= 2."""
    fraction = a
    for k in range(30, 0, -1):
        fraction = S.add(a, S.div(literal(k / 2, a.dtype), fraction))
    return S.div(S.mul(S.exp(S.neg(S.mul(a, a))), 1 / math.sqrt(math.pi)), fraction)


def _erfc(x: Expr) -> Expr:
    a = S.abs(x)
    tail = _erfc_tail(S.max(a, literal(2, x.dtype)))
    far = S.where(S.lt(x, 0), S.sub(2.0, tail), tail)
    return S.where(S.lt(a, 2.0), S.sub(1.0, S.erf(x)), far)


def _erfinv(x: Expr) -> Expr:
    """Giles' two polynomials in log(1-x*x), then steps of Newton: for erf(y) = x, and near 1, where that has no digits left, for
    log(erfc(y)) = log(1-x)."""
    a = S.abs(x)
    rest = S.sub(1.0, a)
    w = S.neg(S.log(S.mul(rest, S.add(a, 1))))
    centre = _polynomial(S.sub(w, 2.5), (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
                                        -0.00125372503, -0.00417768164, 0.246640727, 1.50140941))
    tail = _polynomial(S.sub(S.sqrt(S.max(w, literal(5, x.dtype))), 3.0),
                       (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
                        -0.0076224613, 0.00943887047, 1.00167406, 2.83297682))
    near = far = S.mul(S.where(S.lt(w, 5), centre, tail), a)
    for _ in range(2):
        near = S.sub(near, S.div(S.sub(S.erf(near), a), _slope_of_erf(near)))
    for _ in range(2 if x.dtype == "f32" else 4):
        left = S.erfc(far)
        far = S.add(far, S.mul(S.div(left, _slope_of_erf(far)), S.log(S.div(left, rest))))
    edge = S.where(S.eq(a, 1), literal(math.inf, x.dtype), literal(math.nan, x.dtype))
    return S.copysign(S.where(S.lt(a, 0.75), near, S.where(S.lt(a, 1), far, edge)), x)


def _slope_of_erf(y: Expr) -> Expr:
    return S.mul(S.exp(S.neg(S.mul(y, y))), 2 / math.sqrt(math.pi))


def _lgamma(x: Expr) -> Expr:
    """Stirling's series after moving the argument up to 8; the reflection formula below 1/2."""
    mirrored = S.lt(x, 0.5)
    y = S.where(mirrored, S.sub(1.0, x), x)
    product, z = literal(1, x.dtype), y
    for _ in range(8):
        small = S.lt(z, 8)
        product, z = S.where(small, S.mul(product, z), product), S.where(small, S.add(z, 1), z)
    inverse = S.recip(z)
    series = S.mul(inverse, _polynomial(S.mul(inverse, inverse), (-1 / 1680, 1 / 1260, -1 / 360, 1 / 12)))
    start = S.add(S.sub(S.mul(S.sub(z, 0.5), S.log(z)), z), literal(0.5 * math.log(2 * math.pi), x.dtype))
    value = S.sub(S.add(start, series), S.log(product))
    turn = S.abs(S.sin(S.mul(S.sub(x, S.floor(x)), math.pi)))
    reflected = S.sub(S.sub(literal(math.log(math.pi), x.dtype), S.log(turn)), value)
    value = S.where(mirrored, reflected, value)
    return S.where(S.isinf(x), literal(math.inf, x.dtype), value)


def _digamma(x: Expr) -> Expr:
    mirrored = S.lt(x, 0)
    y = S.where(mirrored, S.sub(1.0, x), x)
    total = literal(0, x.dtype)
    for _ in range(10):
        small = S.lt(y, 10)
        total = S.where(small, S.sub(total, S.recip(y)), total)
        y = S.where(small, S.add(y, 1), y)
    inverse = S.recip(S.mul(y, y))
    series = S.mul(inverse, _polynomial(inverse, (-691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)))
    value = S.sub(S.add(total, S.log(y)), S.add(S.div(literal(0.5, x.dtype), y), series))
    reflected = S.sub(value, S.div(literal(math.pi, x.dtype), S.tan(S.mul(S.sub(x, S.round(x)), math.pi))))
    value = S.where(mirrored, S.where(S.eq(x, S.trunc(x)), math.nan, reflected), value)
    return S.where(S.eq(x, 0), S.copysign(literal(math.inf, x.dtype), S.neg(x)), value)


def _round(x: Expr) -> Expr:
    """Half to even: floor(x + 1/2), one less where that went up from a tie to an odd number."""
    up = S.floor(S.add(x, 0.5))
    tie = S.eq(S.sub(up, x), 0.5)
    odd = S.ne(S.fmod(up, literal(2, x.dtype)), 0)
    near = S.where(S.and_(tie, odd), S.sub(up, 1), up)
    whole = 2.0 ** (23 if x.dtype == "f32" else 52)     # from here on every float is an integer
    return S.copysign(S.where(S.lt(S.abs(x), whole), near, x), x)


_spelled(
    sigmoid=lambda x: S.recip(S.add(S.exp(S.neg(x)), 1)),
    recip=lambda x: S.div(literal(1, x.dtype), x),
    rsqrt=lambda x: S.recip(S.sqrt(x)),
    neg=lambda x: S.sub(literal(-0.0 if is_float(x.dtype) else 0, x.dtype), x),
    sign=lambda x: S.where(S.gt(x, 0), literal(1, x.dtype), S.where(S.lt(x, 0), literal(-1 if x.dtype != "u8" else 0, x.dtype), 0)),
    exp2=lambda x: S.exp(S.mul(x, math.log(2.0))),
    expm1=lambda x: S.sub(S.exp(x), 1),
    log2=lambda x: S.mul(S.log(x), 1 / math.log(2.0)),
    log10=lambda x: S.mul(S.log(x), 1 / math.log(10.0)),
    log1p=lambda x: S.log(S.add(x, 1)),
    tan=lambda x: S.div(S.sin(x), S.cos(x)),
    asin=lambda x: S.atan2(x, S.sqrt(S.mul(S.sub(1.0, x), S.add(x, 1)))),
    acos=lambda x: S.atan2(S.sqrt(S.mul(S.sub(1.0, x), S.add(x, 1))), x),
    sinh=_sinh, cosh=_cosh, tanh=_tanh, asinh=_asinh, acosh=_acosh,
    atanh=lambda x: S.mul(S.log1p(S.div(S.mul(x, 2), S.sub(1.0, x))), 0.5),
    pow=lambda x, y: S.exp(S.mul(S.log(x), y)),
    hypot=lambda x, y: S.sqrt(S.add(S.mul(x, x), S.mul(y, y))),
    erf=_erf, erfc=_erfc, erfinv=_erfinv, lgamma=_lgamma, digamma=_digamma,
    mod=_mod, floordiv=_floordiv,
    trunc=lambda x: S.copysign(S.floor(S.abs(x)), x), ceil=lambda x: S.neg(S.floor(S.neg(x))), round=_round,
    isnan=lambda x: S.ne(x, x), isinf=lambda x: S.eq(S.abs(x), math.inf),
)
