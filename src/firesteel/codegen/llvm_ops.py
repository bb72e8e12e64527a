"""How LLVM text spells each scalar operator: the table `SPELL`.

A row is `fn(w, node, args) -> name`: `w` is the `LlvmFunction` being written (its `new` adds an instruction and returns the name
of the result, `type` gives the node's register type, scalar or vector), `args` are names or literals already of one shape.
What has no row here is decomposed by `loops/decompose.py` before printing.

Registers: bf16 and f16 values are held as float, bool as i1.  Integers wrap; floats are strict (nothing is reassociated).
"""
from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from firesteel.codegen.lane_masks import inside
from firesteel.codegen.target import VECTOR_FUNCTIONS
from firesteel.loops import special
from firesteel.loops.scalars import BITS_OF, REDUCE_OPS, STORAGE_FLOATS, S, to
from firesteel.sym.expr import Expr
from firesteel.table import Table

if TYPE_CHECKING:
    from firesteel.codegen.llvm_code import LlvmFunction

REGISTER = {"f32": "float", "f64": "double", "bf16": "float", "f16": "float",
            "i64": "i64", "i32": "i32", "i16": "i16", "i8": "i8", "u8": "i8", "bool": "i1"}
MEMORY = {**REGISTER, "bf16": "i16", "f16": "half", "bool": "i8"}
BYTES = {"f32": 4, "f64": 8, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1}
FLOAT = frozenset({"f32", "f64", "bf16", "f16"})
UNSIGNED = frozenset({"u8", "bool"})
BITS = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "u8": 8, "bool": 1}

Spelling = Callable[["LlvmFunction", Expr, list[str]], str]
SPELL: Table[Spelling] = Table("LLVM spelling", "codegen/llvm_ops.py")


def literal(value: int | float | bool, dtype: str) -> str:
    """A constant as LLVM writes it."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype not in FLOAT:
        bits = BITS[dtype]
        return str((int(value) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1))
    value = float(value)
    if math.isnan(value):
        return "0x7FF8000000000000"
    if REGISTER[dtype] == "float":
        value = _round_to_float(value)
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def _round_to_float(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def intrinsic_suffix(dtype: str, lanes: int) -> str:
    short = {"float": "f32", "double": "f64"}.get(REGISTER[dtype], REGISTER[dtype])
    return f"v{lanes}{short}" if lanes else short


# ---------------------------------------------------------------- arithmetic

def _chain(integer: str, real: str, w: LlvmFunction, node: Expr, args: list[str]) -> str:
    name = args[0]
    for arg in args[1:]:
        name = w.new(f"{real if node.dtype in FLOAT else integer} {w.type(node)} {name}, {arg}")
    return name


def combine(w: LlvmFunction, op: str, dtype: str, lanes: int, a: str, b: str) -> str:
    """One step of a reduction (`op` is a row of REDUCE_OPS) or a binary min/max/add/mul/and/or on registers."""
    op = REDUCE_OPS[op].combine if op in REDUCE_OPS else op
    ty = w.shape(dtype, lanes)
    real = dtype in FLOAT
    if op in ("add", "mul"):
        return w.new(f"{'f' if real else ''}{op} {ty} {a}, {b}")
    if op in ("and", "or"):
        return w.new(f"{op} {ty} {a}, {b}")
    if dtype == "bool":
        return w.new(f"{'or' if op == 'max' else 'and'} {ty} {a}, {b}")
    if not real:
        sign = "u" if dtype in UNSIGNED else "s"
        return w.intrinsic(f"{sign}{op}", dtype, lanes, [a, b])
    # NaN of either side wins: the compare gives b where unordered, so only a NaN in a needs its own select
    better = w.new(f"fcmp {'ogt' if op == 'max' else 'olt'} {ty} {a}, {b}")
    mask = w.shape("bool", lanes)
    picked = w.new(f"select {mask} {better}, {ty} {a}, {ty} {b}")
    nan = w.new(f"fcmp uno {ty} {a}, {a}")
    return w.new(f"select {mask} {nan}, {ty} {a}, {ty} {picked}")


def _combined(op: str, w: LlvmFunction, node: Expr, args: list[str]) -> str:
    name = args[0]
    for arg in args[1:]:
        name = combine(w, op, node.dtype, w.lanes_of(node), name, arg)
    return name


SPELL.rows({
    "add": functools.partial(_chain, "add", "fadd"), "sub": functools.partial(_chain, "sub", "fsub"), "mul": functools.partial(_chain, "mul", "fmul"),
    "and": functools.partial(_chain, "and", ""), "or": functools.partial(_chain, "or", ""), "xor": functools.partial(_chain, "xor", ""),
    "min": functools.partial(_combined, "min"), "max": functools.partial(_combined, "max"), "div": functools.partial(_chain, "", "fdiv"),
})


@SPELL.row("neg")
def _neg(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    if node.dtype in FLOAT:
        return w.new(f"fneg {w.type(node)} {args[0]}")
    return w.new(f"sub {w.type(node)} {w.constant(0, node)}, {args[0]}")


@SPELL.row("abs")
def _abs(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    if node.dtype in FLOAT:
        return w.intrinsic("fabs", node.dtype, w.lanes_of(node), args)
    if node.dtype in UNSIGNED:
        return args[0]
    negative = w.new(f"sub {w.type(node)} {w.constant(0, node)}, {args[0]}")
    return w.intrinsic("smax", node.dtype, w.lanes_of(node), [args[0], negative])


SPELL.row("not")(lambda w, node, args: w.new(f"xor {w.type(node)} {args[0]}, {w.constant(True if node.dtype == 'bool' else -1, node)}"))


@SPELL.row("recip")
def _recip(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    return w.new(f"fdiv {w.type(node)} {w.constant(1.0, node)}, {args[0]}")


@SPELL.row("rsqrt")
def _rsqrt(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    root = w.intrinsic("sqrt", node.dtype, w.lanes_of(node), args)
    return _recip(w, node, [root])


def _shift(left: bool, w: LlvmFunction, node: Expr, args: list[str]) -> str:
    """Shifting by the width or more gives 0 (or the sign): LLVM leaves it undefined, torch does not."""
    bits, ty = BITS[node.dtype], w.type(node)
    over = w.new(f"icmp uge {ty} {args[1]}, {w.constant(bits, node)}")
    mask = w.shape("bool", w.lanes_of(node))
    if left:
        safe = w.new(f"select {mask} {over}, {ty} {w.constant(0, node)}, {ty} {args[1]}")
        value = w.new(f"shl {ty} {args[0]}, {safe}")
        return w.new(f"select {mask} {over}, {ty} {w.constant(0, node)}, {ty} {value}")
    safe = w.new(f"select {mask} {over}, {ty} {w.constant(bits - 1, node)}, {ty} {args[1]}")
    value = w.new(f"{'lshr' if node.dtype in UNSIGNED else 'ashr'} {ty} {args[0]}, {safe}")
    if node.dtype not in UNSIGNED:
        return value
    return w.new(f"select {mask} {over}, {ty} {w.constant(0, node)}, {ty} {value}")


SPELL.add("shl", functools.partial(_shift, True))
SPELL.add("shr", functools.partial(_shift, False))


@SPELL.row("muladd")
def _muladd(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    if w.target.fma:
        return w.intrinsic("fma", node.dtype, w.lanes_of(node), args)
    return w.new(f"fadd {w.type(node)} {w.new(f'fmul {w.type(node)} {args[0]}, {args[1]}')}, {args[2]}")


# ---------------------------------------------------------------- integer division

def _divided(w: LlvmFunction, node: Expr, args: list[str], remainder: bool) -> str:
    """Truncating quotient or remainder that never traps: a zero divisor gives some value, and -1 is a negation."""
    ty, lanes = w.type(node), w.lanes_of(node)
    if node.dtype in UNSIGNED or w.intervals.natural(node):
        positive = node.args[1].op == "const" and node.args[1].attr > 0
        divisor = args[1] if positive else _nonzero(w, node, args[1])
        if node.dtype == "u8" and lanes and not positive:
            return _rest(w, node, args[0], divisor, _float_quotient(w, node, args[0], divisor), remainder)
        return _narrow_division(w, node, args[0], divisor, remainder)
    if node.args[1].op == "const" and node.args[1].attr not in (0, -1):
        return w.new(f"{'srem' if remainder else 'sdiv'} {ty} {args[0]}, {args[1]}")
    mask = w.shape("bool", lanes)
    minus = w.new(f"icmp eq {ty} {args[1]}, {w.constant(-1, node)}")
    one = w.new(f"select {mask} {minus}, {ty} {w.constant(1, node)}, {ty} {args[1]}")
    divisor = _nonzero(w, node, one)
    if lanes and (node.dtype != "i64" or w.target.masks):
        value = _rest(w, node, args[0], divisor, _float_quotient(w, node, args[0], divisor), remainder)
    else:
        value = w.new(f"{'srem' if remainder else 'sdiv'} {ty} {args[0]}, {divisor}")
    if remainder:
        return value
    negative = w.new(f"sub {ty} {w.constant(0, node)}, {args[0]}")
    return w.new(f"select {mask} {minus}, {ty} {negative}, {ty} {value}")


def _rest(w: LlvmFunction, node: Expr, a: str, b: str, quotient: str, remainder: bool) -> str:
    """What is left of a, or the quotient itself."""
    ty = w.type(node)
    return w.new(f"sub {ty} {a}, {w.new(f'mul {ty} {quotient}, {b}')}") if remainder else quotient


def _float_quotient(w: LlvmFunction, node: Expr, a: str, b: str) -> str:
    """By floats with more digits than the integers, so that no quotient is rounded up to the next integer; vectors of them are divided at once."""
    ty, lanes = w.type(node), w.lanes_of(node)
    wide, whole = (w.shape("f64", lanes), ty) if BITS[node.dtype] >= 32 else (w.shape("f32", lanes), w.shape("i32", lanes))
    x, y = (w.new(f"{'uitofp' if node.dtype in UNSIGNED else 'sitofp'} {ty} {v} to {wide}") for v in (a, b))
    quotient = w.new(f"fptosi {wide} {w.new(f'fdiv {wide} {x}, {y}')} to {whole}")
    if node.dtype == "i64":
        return _long_quotient(w, node, a, b, quotient)
    return quotient if whole == ty else w.new(f"trunc {whole} {quotient} to {ty}")


def _long_quotient(w: LlvmFunction, node: Expr, a: str, b: str, quotient: str) -> str:
    """Below 2^53 the quotient is one too far from 0 at most, and the rest then has the other sign; larger numbers are divided one by one."""
    ty, lanes = w.type(node), w.lanes_of(node)
    mask, zero = w.shape("bool", lanes), w.constant(0, node)
    rest = _rest(w, node, a, b, quotient, True)
    far = w.new(f"icmp slt {ty} {w.new(f'xor {ty} {rest}, {a}')}, {zero}")
    far = w.new(f"and {mask} {far}, {w.new(f'icmp ne {ty} {rest}, {zero}')}")
    differ = w.new(f"xor {ty} {a}, {b}")
    sign = w.new(f"or {ty} {w.new(f'ashr {ty} {differ}, {w.constant(63, node)}')}, {w.constant(1, node)}")
    usual = w.new(f"sub {ty} {quotient}, {w.new(f'select {mask} {far}, {ty} {sign}, {ty} {zero}')}")
    large = [w.new(f"icmp ugt {ty} {w.new(f'add {ty} {v}, {w.constant(1 << 53, node)}')}, {w.constant(1 << 54, node)}") for v in (a, b)]
    return w.rarely(w.new(f"or {mask} {large[0]}, {large[1]}"), ty, lanes, usual, lambda: w.new(f"sdiv {ty} {a}, {b}"))


def _nonzero(w: LlvmFunction, node: Expr, divisor: str) -> str:
    ty = w.type(node)
    zero = w.new(f"icmp eq {ty} {divisor}, {w.constant(0, node)}")
    return w.new(f"select {w.shape('bool', w.lanes_of(node))} {zero}, {ty} {w.constant(1, node)}, {ty} {divisor}")


def _narrow_division(w: LlvmFunction, node: Expr, a: str, b: str, remainder: bool) -> str:
    """Unsigned division; in 32 bits where the values are known to fit, which vector units do far faster."""
    op, ty, lanes = "urem" if remainder else "udiv", w.type(node), w.lanes_of(node)
    if node.dtype != "i64" or not all(w.intervals.fits(arg, 0, (1 << 31) - 1) for arg in node.args):
        return w.new(f"{op} {ty} {a}, {b}")
    small = w.shape("i32", lanes)
    x = w.new(f"trunc {ty} {a} to {small}")
    y = w.new(f"trunc {ty} {b} to {small}")
    return w.new(f"zext {small} {w.new(f'{op} {small} {x}, {y}')} to {ty}")


@SPELL.row("fmod")
def _fmod(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    if node.dtype in FLOAT:
        return w.call_math("fmod", node, args)
    return _divided(w, node, args, remainder=True)


@SPELL.row("mod")
def _mod(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    """The remainder with the sign of the divisor."""
    ty, real = w.type(node), node.dtype in FLOAT
    rest = _fmod(w, node, args)
    if node.dtype in UNSIGNED or (not real and w.intervals.natural(node)):
        return rest
    wrong = _sign_differs(w, node, rest, args[1])
    moved = w.new(f"{'fadd' if real else 'add'} {ty} {rest}, {args[1]}")
    return w.new(f"select {w.shape('bool', w.lanes_of(node))} {wrong}, {ty} {moved}, {ty} {rest}")


def _sign_differs(w: LlvmFunction, node: Expr, rest: str, divisor: str) -> str:
    """rest is not 0 and its sign is not the divisor's"""
    ty, mask, zero = w.type(node), w.shape("bool", w.lanes_of(node)), w.constant(0, node)
    compare = "fcmp" if node.dtype in FLOAT else "icmp"
    less, unequal = ("olt", "une") if compare == "fcmp" else ("slt", "ne")
    signs = w.new(f"xor {mask} {w.new(f'{compare} {less} {ty} {rest}, {zero}')}, {w.new(f'{compare} {less} {ty} {divisor}, {zero}')}")
    return w.new(f"and {mask} {signs}, {w.new(f'{compare} {unequal} {ty} {rest}, {zero}')}")


@SPELL.row("floordiv:int")
def _floordiv(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    quotient = _divided(w, node, args, remainder=False)
    if node.dtype in UNSIGNED or w.intervals.natural(node):
        return quotient
    ty = w.type(node)
    back = w.new(f"mul {ty} {quotient}, {args[1]}")
    rest = w.new(f"sub {ty} {args[0]}, {back}")
    wrong = _sign_differs(w, node, rest, args[1])
    lower = w.new(f"sub {ty} {quotient}, {w.constant(1, node)}")
    return w.new(f"select {w.shape('bool', w.lanes_of(node))} {wrong}, {ty} {lower}, {ty} {quotient}")


# ---------------------------------------------------------------- comparisons, selection

_COMPARE = {"eq": ("oeq", "eq", "eq"), "ne": ("une", "ne", "ne"), "lt": ("olt", "slt", "ult"), "le": ("ole", "sle", "ule"),
            "gt": ("ogt", "sgt", "ugt"), "ge": ("oge", "sge", "uge")}


@SPELL.row(*_COMPARE)
def _compare(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    dtype = node.args[0].dtype
    mask = inside(w, node)
    if mask is not None:
        return mask
    kind = 0 if dtype in FLOAT else 2 if dtype in UNSIGNED else 1
    return w.new(f"{'icmp' if kind else 'fcmp'} {_COMPARE[node.op][kind]} {w.shape(dtype, w.lanes_of(node))} {args[0]}, {args[1]}")


SPELL.row("isnan")(lambda w, node, args: w.new(f"fcmp uno {w.shape(node.args[0].dtype, w.lanes_of(node))} {args[0]}, {args[0]}"))


@SPELL.row("isinf")
def _isinf(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    dtype, lanes = node.args[0].dtype, w.lanes_of(node)
    size = w.intrinsic("fabs", dtype, lanes, args)
    return w.new(f"fcmp oeq {w.shape(dtype, lanes)} {size}, {w.constant(math.inf, node.args[0], lanes)}")


@SPELL.row("signbit")
def _signbit(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    dtype, lanes = node.args[0].dtype, w.lanes_of(node)
    whole = "i64" if dtype == "f64" else "i32"
    bits = w.new(f"bitcast {w.shape(dtype, lanes)} {args[0]} to {w.shape(whole, lanes)}")
    return w.new(f"icmp slt {w.shape(whole, lanes)} {bits}, {w.zero(lanes)}")


@SPELL.row("where")
def _where(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    lanes, ty = w.lanes_of(node), w.type(node)
    mask = w.shape("bool", lanes)
    if node.dtype in STORAGE_FLOATS:
        yes, no, bits = w.stored(node.args[1], lanes), w.stored(node.args[2], lanes), w.vector(MEMORY[node.dtype], lanes)
        w.keep_stored(node, w.new(f"select {mask} {args[0]}, {bits} {yes}, {bits} {no}"), lanes)
    return w.new(f"select {mask} {args[0]}, {ty} {args[1]}, {ty} {args[2]}")


# ---------------------------------------------------------------- functions

INTRINSICS = {"sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "round": "roundeven", "trunc": "trunc", "copysign": "copysign"}
SPELL.row(*INTRINSICS)(lambda w, node, args: w.intrinsic(INTRINSICS[node.op], node.dtype, w.lanes_of(node), args))
SPELL.row(*VECTOR_FUNCTIONS, "nextafter")(lambda w, node, args: w.call_math(node.op, node, args))


@SPELL.row("sigmoid")
def _sigmoid(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    ty, one = w.type(node), w.constant(1.0, node)
    e = w.call_math("exp", node, [w.new(f"fneg {ty} {args[0]}")])
    return w.new(f"fdiv {ty} {one}, {w.new(f'fadd {ty} {e}, {one}')}")


@SPELL.row("lgamma", "digamma", "trigamma", "i0", "i0e", "i1", "i1e", "erfcx", "log_ndtr")
def _special(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    """f32 in f64, where what cancels leaves digits enough; lgamma in f64 by the C library in between its zeros below -2."""
    function, (x,), lanes = getattr(special, node.op), node.args, w.lanes_of(node)
    if node.dtype != "f64":
        return w.formula(to(function(to(x, "f64"), "f32"), "f32"))
    value = w.formula(function(x))
    if node.op != "lgamma":
        return value
    between = S.and_(S.gt(x, -20), S.lt(x, -2))
    zeros, asked = w.formula(between), w.formula(S.where(between, x, 1))        # of 1 the library knows the answer at once
    return w.rarely(zeros, w.type(node), lanes, value, lambda: w.call_lanes("lgamma", "double", lanes, [asked]))


# ---------------------------------------------------------------- conversions

@SPELL.row("to")
def _to(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    source, lanes = node.args[0].dtype, w.lanes_of(node)
    if node.dtype not in STORAGE_FLOATS:
        return convert(w, args[0], source, node.dtype, lanes)
    half = _sign_changed(w, node, lanes) or w.to_memory(_to_float(w, args[0], source, "f32", lanes), node.dtype, lanes)
    w.keep_stored(node, half, lanes)
    return w.from_memory(half, node.dtype, lanes)


def _sign_changed(w: LlvmFunction, node: Expr, lanes: int) -> str | None:
    """neg and abs of a 16-bit float change a bit of what memory holds: nothing is rounded."""
    changed = node.args[0]
    if changed.op not in ("neg", "abs") or changed.args[0].op != "to" or changed.args[0].args[0].dtype != node.dtype:
        return None
    held, bits = w.vector(MEMORY[node.dtype], lanes), w.shape("i16", lanes)
    value = w.new(f"bitcast {held} {w.stored(changed.args[0].args[0], lanes)} to {bits}")
    change, by = ("xor", -0x8000) if changed.op == "neg" else ("and", 0x7fff)
    value = w.new(f"{change} {bits} {value}, {w.integer(by, 'i16', lanes)}")
    return w.new(f"bitcast {bits} {value} to {held}")


def convert(w: LlvmFunction, value: str, source: str, target: str, lanes: int) -> str:
    """To another dtype that is not a 16-bit float."""
    assert target not in STORAGE_FLOATS
    if source == target:
        return value
    if target in FLOAT:
        return _to_float(w, value, source, target, lanes)
    ty, out = w.shape(source, lanes), w.shape(target, lanes)
    if target == "bool":
        return w.new(f"{'fcmp une' if source in FLOAT else 'icmp ne'} {ty} {value}, zeroinitializer")
    if source in FLOAT:
        if BITS[target] >= 32:
            return w.new(f"fptosi {ty} {value} to {out}")
        wide = w.shape("i64" if (source, target) == ("f64", "u8") else "i32", lanes)        # as eager's own conversions go
        return w.new(f"trunc {wide} {w.new(f'fptosi {ty} {value} to {wide}')} to {out}")
    if BITS[source] == BITS[target]:
        return value
    if BITS[source] > BITS[target]:
        return w.new(f"trunc {ty} {value} to {out}")
    return w.new(f"{'zext' if source in UNSIGNED else 'sext'} {ty} {value} to {out}")


def _to_float(w: LlvmFunction, value: str, source: str, target: str, lanes: int) -> str:
    ty, out = w.shape(source, lanes), w.shape(target, lanes)
    if source not in FLOAT:
        return w.new(f"{'uitofp' if source in UNSIGNED else 'sitofp'} {ty} {value} to {out}")
    if REGISTER[source] != REGISTER[target]:
        return w.new(f"{'fpext' if REGISTER[target] == 'double' else 'fptrunc'} {ty} {value} to {out}")
    return value


@SPELL.row(*[f"as_{dtype}" for dtype in BITS_OF])
def _as_bits(w: LlvmFunction, node: Expr, args: list[str]) -> str:
    """From what memory would hold to what it would hold then."""
    source, lanes = node.args[0], w.lanes_of(node)
    held, wanted = MEMORY[source.dtype], MEMORY[node.dtype]
    bits = w.stored(source, lanes)
    if held != wanted:
        bits = w.new(f"bitcast {w.vector(held, lanes)} {bits} to {w.vector(wanted, lanes)}")
    w.keep_stored(node, bits, lanes)
    return w.from_memory(bits, node.dtype, lanes)


def bf16_to_float(w: LlvmFunction, half: str, lanes: int) -> str:
    """i16 bits -> float"""
    i16, i32 = w.shape("i16", lanes), w.shape("i32", lanes)
    wide = w.new(f"zext {i16} {half} to {i32}")
    bits = w.new(f"shl {i32} {wide}, {w.integer(16, 'i32', lanes)}")
    return w.new(f"bitcast {i32} {bits} to {w.shape('f32', lanes)}")


def float_to_bf16(w: LlvmFunction, value: str, lanes: int) -> str:
    """float -> i16 bits, nearest, ties to even; NaN stays NaN"""
    i32, f32, mask = w.shape("i32", lanes), w.shape("f32", lanes), w.shape("bool", lanes)
    bits = w.new(f"bitcast {f32} {value} to {i32}")
    high = w.new(f"lshr {i32} {bits}, {w.integer(16, 'i32', lanes)}")
    odd = w.new(f"and {i32} {high}, {w.integer(1, 'i32', lanes)}")
    bias = w.new(f"add {i32} {odd}, {w.integer(0x7fff, 'i32', lanes)}")
    moved = w.new(f"add {i32} {bits}, {bias}")
    nan = w.new(f"fcmp uno {f32} {value}, {value}")
    safe = w.new(f"select {mask} {nan}, {i32} {w.integer(0x7fc00000, 'i32', lanes)}, {i32} {moved}")
    return w.new(f"trunc {i32} {w.new(f'lshr {i32} {safe}, ' + w.integer(16, 'i32', lanes))} to {w.shape('i16', lanes)}")
