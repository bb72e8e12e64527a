"""Scalar operators in terms of simpler ones, for targets that have no spelling of their own for them.

A row takes the arguments as Exprs and gives an Expr of the same dtype that does not contain the operator itself; a printer
replaces what it cannot spell, again and again.  Errors are a few units in the last place of f32, and of f64 where the
building blocks are as good.

    DECOMPOSED["sigmoid"](x)      # 1 / (1 + exp(-x))
"""
from __future__ import annotations

import math
from collections.abc import Callable

from firesteel.loops import special
from firesteel.loops.scalars import S, is_float, literal
from firesteel.loops.special import polynomial
from firesteel.sym.expr import Expr
from firesteel.table import Table

DECOMPOSED: Table[Callable[..., Expr]] = Table("scalar decomposition", "loops/decompose.py")


def _spelled(**rows: Callable[..., Expr]) -> None:
    for name, body in rows.items():
        DECOMPOSED.add(name, body)


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
    near = S.mul(a, polynomial(S.mul(a, a), _ERF_SERIES))
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


def _round(x: Expr) -> Expr:
    """Half to even: floor(x + 1/2), one less where that went up from a tie to an odd number."""
    up = S.floor(S.add(x, 0.5))
    tie = S.eq(S.sub(up, x), 0.5)
    odd = S.ne(S.fmod(up, literal(2, x.dtype)), 0)
    near = S.where(S.and_(tie, odd), S.sub(up, 1), up)
    whole = 2.0 ** (23 if x.dtype == "f32" else 52)     # from here on every float is an integer
    return S.copysign(S.where(S.lt(S.abs(x), whole), near, x), x)


_spelled(
    muladd=lambda x, y, z: S.add(S.mul(x, y), z),
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
    erf=_erf, erfc=_erfc, erfinv=special.erfinv, lgamma=special.lgamma, digamma=special.digamma,
    mod=_mod, floordiv=_floordiv,
    trigamma=special.trigamma, i0=special.i0, i0e=special.i0e, i1=special.i1, i1e=special.i1e, erfcx=special.erfcx, log_ndtr=special.log_ndtr,
    trunc=lambda x: S.copysign(S.floor(S.abs(x)), x), ceil=lambda x: S.neg(S.floor(S.neg(x))), round=_round,
    isnan=lambda x: S.ne(x, x), isinf=lambda x: S.eq(S.abs(x), math.inf),
)
