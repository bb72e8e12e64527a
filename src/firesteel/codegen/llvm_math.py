"""Inline vector code for the functions that compiled programs spend their time in: exp, log, tanh, erf, sigmoid; and for fmod and
nextafter, which no vector library has.

A call into a vector library saves and restores every vector register; these few instructions do not.  f32 has all of them
(relative errors below 4e-7, checked in tests over the whole range); f64 takes them only where the machine has no vector library.

 exp    2^n * exp(r), n = round(x / ln 2), |r| <= ln(2)/2: 1 + r + r*r*q(r), q fitted (f32) or Taylor's (f64)
 log    exponent and mantissa m in [sqrt(1/2), sqrt(2)); s = (m-1)/(m+1); log(m) = 2s + 2s^3/3 + 2s^5/5 + ...
 tanh   x * P(x^2) / Q(x^2) for |x| <= 9, where it is 1 to the last bit; fitted for the least relative error
 erf    the same for |x| <= 4
"""
from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from firesteel.codegen.llvm_ops import REGISTER, literal

if TYPE_CHECKING:
    from firesteel.codegen.llvm_code import LlvmFunction

_EXP_F32 = (0.0013950521843960097, 0.008368908422321297, 0.04166620534054321, 0.1666651868066814, 0.5000000095330525)
_EXP_F64 = tuple(1 / math.factorial(k) for k in range(13, 1, -1))
_TANH = ((1.8255333009142838e-11, -1.2780470903805963e-08, 9.267429049941711e-06, 0.00292076263576746, 0.1291922926902771, 0.9999999403953552),
         (0.00022810031077824533, 0.023763172328472137, 0.4625251293182373, 1.0))
_ERF = ((1.986750703508733e-06, 0.0002845664566848427, 0.0038834286388009787, 0.05310201272368431, 0.19354723393917084, 1.1283791065216064),
        (3.7419868021970615e-05, 0.0011855888878926635, 0.015207425691187382, 0.1153508797287941, 0.5048593282699585, 1.0))
_LN2_HIGH = {"f32": 0.693359375, "f64": float.fromhex("0x1.62e42fee00000p-1")}    # few bits: n * this is exact
_LN2_LOW = {"f32": -2.1219444005469057e-04, "f64": 1.9082149292705877e-10}
_EXP_RANGE = {"f32": (-104.0, 89.0), "f64": (-746.0, 710.0)}    # outside, the result is 0 or inf


class _Float:
    """Float instructions of one dtype and number of lanes."""

    def __init__(self, w: LlvmFunction, dtype: str, lanes: int):
        self.w, self.dtype, self.lanes = w, dtype, lanes
        self.type = w.shape(dtype, lanes)
        self.whole = "i64" if REGISTER[dtype] == "double" else "i32"     # an integer of the same size
        self.mantissa, self.bias = (52, 1023) if self.whole == "i64" else (23, 127)

    def const(self, value: float) -> str:
        text = literal(value, self.dtype)
        return f"splat ({REGISTER[self.dtype]} {text})" if self.lanes else text

    def op(self, name: str, a: str, b: str) -> str:
        return self.w.new(f"{name} {self.type} {a}, {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        if self.w.target.fma:
            return self.w.intrinsic("fma", self.dtype, self.lanes, [a, b, c])
        return self.op("fadd", self.op("fmul", a, b), c)

    def polynomial(self, x: str, coefficients: tuple[float, ...]) -> str:
        """Highest power first."""
        value = self.const(coefficients[0])
        for c in coefficients[1:]:
            value = self.fma(value, x, self.const(c))
        return value

    def select(self, test: str, a: str, b: str) -> str:
        return self.w.new(f"select {self.w.shape('bool', self.lanes)} {test}, {self.type} {a}, {self.type} {b}")

    def both(self, a: str, b: str) -> str:
        return self.w.new(f"and {self.w.shape('bool', self.lanes)} {a}, {b}")

    def compare(self, kind: str, a: str, b: str) -> str:
        return self.w.new(f"fcmp {kind} {self.type} {a}, {b}")

    def clamp(self, x: str, low: float, high: float) -> str:
        """NaN stays NaN: an ordered compare with it is false, and that side is x."""
        above = self.select(self.compare("olt", self.const(high), x), self.const(high), x)
        return self.select(self.compare("ogt", self.const(low), above), self.const(low), above)

    def integer(self, value: int) -> str:
        return self.w.integer(value, self.whole, self.lanes)

    def int_op(self, name: str, a: str, b: str) -> str:
        return self.w.new(f"{name} {self.w.shape(self.whole, self.lanes)} {a}, {b}")

    def bits(self, x: str) -> str:
        return self.w.new(f"bitcast {self.type} {x} to {self.w.shape(self.whole, self.lanes)}")

    def from_bits(self, i: str) -> str:
        return self.w.new(f"bitcast {self.w.shape(self.whole, self.lanes)} {i} to {self.type}")

    def times_power(self, x: str, n: str) -> str:
        """x * 2^n for a float n that is an integer."""
        if self.lanes and self.w.target.masks:
            return self._scalef(x, n)
        i = self.w.new(f"fptosi {self.type} {n} to {self.w.shape(self.whole, self.lanes)}")
        i = self.w.new(f"freeze {self.w.shape(self.whole, self.lanes)} {i}")    # NaN has no integer; the product is NaN in any case
        half = self.int_op("ashr", i, self.integer(1))
        for part in (half, self.int_op("sub", i, half)):        # in two steps: 2^n itself may not be a float
            power = self.int_op("shl", self.int_op("add", part, self.integer(self.bias)), self.integer(self.mantissa))
            x = self.op("fmul", x, self.from_bits(power))
        return x

    def _scalef(self, x: str, n: str) -> str:
        """The instruction that AVX-512 has for this."""
        scalar, piece = REGISTER[self.dtype], 64 // (8 if self.whole == "i64" else 4)
        ty, mask = f"<{piece} x {scalar}>", "i8" if piece == 8 else "i16"
        name = f"@llvm.x86.avx512.mask.scalef.{'pd' if piece == 8 else 'ps'}.512"
        self.w.declare(name, f"{ty} {name}({ty}, {ty}, {ty}, {mask}, i32)")
        return self.w.by_pieces([x, n], scalar, self.lanes, piece,
                                lambda a: self.w.new(f"call {ty} {name}({ty} {a[0]}, {ty} {a[1]}, {ty} zeroinitializer, {mask} -1, i32 4)"))


def exp(w: LlvmFunction, dtype: str, lanes: int, x: str) -> str:
    f = _Float(w, dtype, lanes)
    kind = "f64" if f.whole == "i64" else "f32"
    x = f.clamp(x, *_EXP_RANGE[kind])
    n = w.intrinsic("roundeven", dtype, lanes, [f.op("fmul", x, f.const(1 / math.log(2)))])
    r = f.fma(n, f.const(-_LN2_HIGH[kind]), x)
    r = f.fma(n, f.const(-_LN2_LOW[kind]), r)
    q = f.polynomial(r, _EXP_F64 if kind == "f64" else _EXP_F32)
    value = f.op("fadd", f.fma(q, f.op("fmul", r, r), r), f.const(1.0))
    return f.times_power(value, n)


def log(w: LlvmFunction, dtype: str, lanes: int, x: str) -> str:
    f = _Float(w, dtype, lanes)
    kind = "f64" if f.whole == "i64" else "f32"
    tiny = f.compare("olt", x, f.const(2.0 ** (1 - f.bias)))
    scaled = f.select(tiny, f.op("fmul", x, f.const(2.0 ** f.mantissa)), x)     # denormals have no exponent of their own
    bits = f.bits(scaled)
    # the exponent of m in [sqrt(1/2), sqrt(2)): move sqrt(1/2) to a whole power of two, then cut
    start = int.from_bytes(struct.pack("<d" if kind == "f64" else "<f", math.sqrt(0.5)), "little")
    moved = f.int_op("sub", bits, f.integer(start))
    exponent = f.int_op("ashr", moved, f.integer(f.mantissa))
    m = f.from_bits(f.int_op("sub", bits, f.int_op("shl", exponent, f.integer(f.mantissa))))
    n = w.new(f"sitofp {w.shape(f.whole, lanes)} {exponent} to {f.type}")
    n = f.select(tiny, f.op("fsub", n, f.const(float(f.mantissa))), n)
    less = f.op("fsub", m, f.const(1.0))
    s = f.op("fdiv", less, f.op("fadd", m, f.const(1.0)))
    z = f.op("fmul", s, s)
    series = f.polynomial(z, tuple(2 / (2 * k + 1) for k in range(11 if kind == "f64" else 4, 0, -1)))
    # 2s = less - s*less keeps the leading term exact
    small = f.op("fmul", s, f.op("fsub", f.op("fmul", z, series), less))
    value = f.fma(n, f.const(_LN2_HIGH[kind]), f.op("fadd", less, f.fma(n, f.const(_LN2_LOW[kind]), small)))
    value = f.select(f.compare("ueq", x, f.const(math.inf)), x, value)      # inf and NaN are themselves
    value = f.select(f.compare("oeq", x, f.const(0.0)), f.const(-math.inf), value)
    return f.select(f.compare("olt", x, f.const(0.0)), f.const(math.nan), value)


def _rational(w: LlvmFunction, dtype: str, lanes: int, x: str, limit: float, top: tuple[float, ...], bottom: tuple[float, ...]) -> str:
    f = _Float(w, dtype, lanes)
    x = f.clamp(x, -limit, limit)
    z = f.op("fmul", x, x)
    value = f.op("fdiv", f.op("fmul", x, f.polynomial(z, top)), f.polynomial(z, bottom))
    return f.clamp(value, -1.0, 1.0)


def tanh(w: LlvmFunction, dtype: str, lanes: int, x: str) -> str:
    return _rational(w, dtype, lanes, x, 9.0, *_TANH)


def erf(w: LlvmFunction, dtype: str, lanes: int, x: str) -> str:
    return _rational(w, dtype, lanes, x, 4.0, *_ERF)


def fmod(w: LlvmFunction, dtype: str, lanes: int, x: str, y: str) -> str:
    """x - trunc(x / y) * y, exactly, with the sign of x.  While the quotient has no more bits than a mantissa, its rounding is off by one at most;
    the rest is a multiple of y's last bit and at most y, so the multiply-add is exact, and so is adding y back.  Where a lane has a larger quotient,
    the C library's function is called for all of them."""
    f = _Float(w, dtype, lanes)
    if not w.target.fma:
        return f.op("frem", x, y)
    a, b = (w.intrinsic("fabs", dtype, lanes, [v]) for v in (x, y))
    ratio = f.op("fdiv", a, b)
    rest = f.fma(w.new(f"fneg {f.type} {w.intrinsic('trunc', dtype, lanes, [ratio])}"), b, a)
    rest = f.select(f.compare("olt", rest, f.const(0.0)), f.op("fadd", rest, b), rest)
    rest = f.select(f.compare("olt", a, b), a, rest)        # infinity times 0 is no rest
    usual = w.intrinsic("copysign", dtype, lanes, [rest, x])
    numbers = f.both(f.compare("olt", a, f.const(math.inf)), f.compare("ogt", b, f.const(0.0)))
    large = f.both(f.compare("oge", ratio, f.const(2.0 ** (f.mantissa + 1))), numbers)
    return w.rarely(large, f.type, lanes, usual, lambda: f.op("frem", x, y))


def nextafter(w: LlvmFunction, dtype: str, lanes: int, x: str, y: str) -> str:
    """Bits count from 0 outwards: one more away from 0, one less towards it; from 0 itself, the least number of y's sign."""
    f = _Float(w, dtype, lanes)
    mask = w.shape("bool", lanes)
    outwards = w.new(f"xor {mask} {f.compare('ogt', x, f.const(0.0))}, {f.compare('ogt', x, y)}")
    step = w.new(f"select {mask} {outwards}, {w.shape(f.whole, lanes)} {f.integer(1)}, {w.shape(f.whole, lanes)} {f.integer(-1)}")
    moved = f.from_bits(f.int_op("add", f.bits(x), step))
    least = w.intrinsic("copysign", dtype, lanes, [f.from_bits(f.integer(1)), y])
    moved = f.select(f.compare("oeq", x, f.const(0.0)), least, moved)
    moved = f.select(f.compare("oeq", x, y), y, moved)
    return f.select(f.compare("uno", x, y), f.op("fadd", x, y), moved)


Inline = Callable[..., str]     # (function, dtype, lanes, arguments)
INLINE: dict[str, Inline] = {"fmod": fmod, "nextafter": nextafter}                                             # used on every machine
INLINE_F32: dict[str, Inline] = {"exp": exp, "tanh": tanh, "erf": erf}                 # the same, in f32
INLINE_OTHER: dict[tuple[str, str], Inline] = {("log", "f32"): log, ("log", "f64"): log, ("exp", "f64"): exp}     # without a vector library
