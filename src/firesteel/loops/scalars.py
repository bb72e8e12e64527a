"""The scalar operators of loop bodies: one row an operator, all facts about it together.

In: nothing.  Out: `OPS` (what may stand in a body), `REDUCE_OPS` (what an accumulator may do), `DTYPES` (short names <-> torch
dtypes), and builders.  `decompose.py` writes operators in terms of simpler ones, for targets that cannot spell them.

What always holds
 - A body is typed: `result_dtype` derives the dtype of a node from those of its arguments, or raises TypeError.
 - All arguments of arithmetic have one dtype; `to` converts.  bf16 and f16 are storage dtypes: `to`, `where`, loads and
   constants may carry them, and `as_i16` takes their bits; arithmetic may not.
 - `meaning` is the operator on torch tensors of exactly these dtypes: eager's own kernels are the specification.  Integers wrap.
 - `mod` has the sign of the divisor (Python), `fmod` that of the dividend (C); `min`/`max` give NaN if an argument is NaN.

    S.where(S.gt(x, 0), x, S.expm1(x))      # elu of an f32 Expr; plain numbers become constants of the others' dtype
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from firesteel.records import dataclass
from firesteel.sym.expr import Expr, const, make, postorder
from firesteel.table import Table

# ---------------------------------------------------------------- dtypes

DTYPES: Table[torch.dtype] = Table("dtype", "loops/scalars.py")
DTYPES.rows({
    "f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
    "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
    "c32": torch.complex32, "c64": torch.complex64, "c128": torch.complex128,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
})
SHORT: dict[torch.dtype, str] = {dtype: str(name) for name, dtype in DTYPES.items()}

FLOATS = frozenset({"f32", "f64"})
STORAGE_FLOATS = frozenset({"f16", "bf16"})
INTS = frozenset({"i64", "i32", "i16", "i8", "u8"})
BOOL = frozenset({"bool"})
LOOP_DTYPES = FLOATS | STORAGE_FLOATS | INTS | BOOL     # what a Nest can hold; others are left to library calls
ITEMSIZE = {name: dtype.itemsize for name, dtype in DTYPES.items()}


def short_dtype(dtype: torch.dtype) -> str:
    """The short name; a dtype without one (quantised, packed) is named by torch's own word for it."""
    return SHORT.get(dtype) or str(dtype).removeprefix("torch.")


def compute_dtype(name: str) -> str:
    """The dtype in which arithmetic on values stored as `name` is done."""
    return "f32" if name in STORAGE_FLOATS else name


def is_float(name: str) -> bool:
    return name in FLOATS or name in STORAGE_FLOATS


# ---------------------------------------------------------------- dtype rules: (argument dtypes, allowed dtypes) -> dtype

DtypeRule = Callable[[tuple[str, ...], frozenset[str]], str]


def _same(dtypes: tuple[str, ...], allowed: frozenset[str]) -> str:
    first = dtypes[0]
    if first not in allowed or any(d != first for d in dtypes):
        raise TypeError(f"takes arguments of one dtype out of {sorted(allowed)}, not {dtypes}")
    return first


def _to_bool(dtypes: tuple[str, ...], allowed: frozenset[str]) -> str:
    _same(dtypes, allowed)
    return "bool"


def _bits_as(dtype: str) -> DtypeRule:
    def rule(dtypes: tuple[str, ...], allowed: frozenset[str]) -> str:
        _same(dtypes, allowed)
        return dtype
    return rule


def _select(dtypes: tuple[str, ...], allowed: frozenset[str]) -> str:
    if dtypes[0] != "bool":
        raise TypeError(f"takes a bool first, not {dtypes[0]}")
    return _same(dtypes[1:], allowed)


# ---------------------------------------------------------------- the operators

@dataclass(frozen=True)
class Op:
    """One scalar operator.  `domain`: an interval for each argument from which tests sample."""
    name: str
    arity: int
    rule: DtypeRule
    allowed: frozenset[str]
    meaning: Callable[..., torch.Tensor]
    domain: tuple[tuple[float, float], ...]


OPS: Table[Op] = Table("scalar operator", "loops/scalars.py")

_ALL = FLOATS | INTS | BOOL
_NUMBERS = FLOATS | INTS
_BITS = INTS | BOOL
_REAL = (-20.0, 20.0)


def _ops(rule: DtypeRule, allowed: frozenset[str], arity: int, rows: dict[str, Any]) -> None:
    """Adds rows name: meaning, or name: (meaning, interval or intervals)."""
    for name, row in rows.items():
        meaning, domain = row if isinstance(row, tuple) else (row, _REAL)
        intervals = domain if isinstance(domain[0], tuple) else (domain,) * arity
        OPS.add(name, Op(name, arity, rule, allowed, meaning, intervals))


_ops(_same, _NUMBERS, 2, {"add": torch.add, "mul": torch.mul})
_ops(_same, _ALL, 2, {"min": torch.minimum, "max": torch.maximum})
_ops(_same, _NUMBERS, 2, {
    "sub": torch.sub,
    "floordiv": (lambda x, y: torch.div(x, y, rounding_mode="floor"), (_REAL, (1.0, 9.0))),
    "mod": (torch.remainder, (_REAL, (1.0, 9.0))),
    "fmod": (torch.fmod, (_REAL, (1.0, 9.0))),
})
_ops(_same, _NUMBERS, 1, {"neg": torch.neg, "abs": torch.abs, "sign": torch.sign})
_ops(_same, FLOATS, 2, {
    "div": (torch.div, (_REAL, (0.5, 9.0))),
    "pow": (torch.pow, ((0.1, 5.0), (-3.0, 3.0))),
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "copysign": torch.copysign,
    "nextafter": torch.nextafter,
})
_ops(_same, FLOATS, 3, {"muladd": (lambda x, y, z: x * y + z, (0.5, 9.0))})        # rounded once where the machine can
_ops(_same, FLOATS, 1, {
    "sqrt": (torch.sqrt, (0.0, 90.0)), "rsqrt": (torch.rsqrt, (0.1, 90.0)), "recip": (torch.reciprocal, (0.1, 90.0)),
    "exp": (torch.exp, (-30.0, 30.0)), "exp2": torch.exp2, "expm1": torch.expm1,
    "log": (torch.log, (0.01, 90.0)), "log2": (torch.log2, (0.01, 90.0)), "log10": (torch.log10, (0.01, 90.0)),
    "log1p": (torch.log1p, (-0.9, 90.0)),
    "sin": torch.sin, "cos": torch.cos, "tan": (torch.tan, (-1.4, 1.4)),
    "asin": (torch.asin, (-1.0, 1.0)), "acos": (torch.acos, (-1.0, 1.0)), "atan": torch.atan,
    "sinh": (torch.sinh, (-9.0, 9.0)), "cosh": (torch.cosh, (-9.0, 9.0)), "tanh": torch.tanh,
    "asinh": torch.asinh, "acosh": (torch.acosh, (1.0, 90.0)), "atanh": (torch.atanh, (-0.99, 0.99)),
    "sigmoid": torch.sigmoid, "erf": (torch.erf, (-4.0, 4.0)), "erfc": (torch.erfc, (-4.0, 4.0)),
    "erfinv": (torch.erfinv, (-0.999, 0.999)), "lgamma": (torch.lgamma, (0.05, 30.0)), "digamma": (torch.digamma, (0.05, 30.0)),
    "trigamma": (functools.partial(torch.polygamma, 1), (0.05, 30.0)), "i0": torch.special.i0, "i0e": torch.special.i0e,
    "i1": torch.special.i1, "i1e": torch.special.i1e, "erfcx": (torch.special.erfcx, (-4.0, 20.0)), "log_ndtr": torch.special.log_ndtr,
    "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc,
})
_ops(_to_bool, FLOATS, 1, {"isnan": torch.isnan, "isinf": torch.isinf, "signbit": torch.signbit})
_ops(_to_bool, _ALL, 2, {
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
})
_ops(_same, _BITS, 2, {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor})
_ops(_same, _BITS, 1, {"not": torch.bitwise_not})
_ops(_same, INTS, 2, {
    "shl": (torch.bitwise_left_shift, (_REAL, (0.0, 7.0))),
    "shr": (torch.bitwise_right_shift, (_REAL, (0.0, 7.0))),
})
_ops(_select, LOOP_DTYPES, 3, {"where": (torch.where, ((0.0, 1.0), _REAL, _REAL))})

BITS_OF = {"i16": STORAGE_FLOATS, "i32": {"f32"}, "i64": {"f64"}, "f16": {"i16"}, "bf16": {"i16"}, "f32": {"i32"}, "f64": {"i64"}}
for _dtype, _from in BITS_OF.items():       # the same bits, read as another dtype
    _ops(_bits_as(_dtype), frozenset(_from), 1, {f"as_{_dtype}": functools.partial(torch.Tensor.view, dtype=DTYPES[_dtype])})
# dtypes of results that those of the arguments do not change
FIXED = {name: "bool" for name, row in OPS.items() if row.rule is _to_bool} | {f"as_{dtype}": dtype for dtype in BITS_OF}


def result_dtype(node: Expr) -> str:
    """The dtype that the row of `node.op` gives for the dtypes of its arguments; TypeError where they do not fit.
    `to` is not a row: its dtype is what it converts to."""
    if node.op == "to":
        return _converted(node)
    row = OPS[node.op]
    if len(node.args) != row.arity:
        raise TypeError(f"{node.op} takes {row.arity} arguments, not {len(node.args)}")
    try:
        return row.rule(tuple(a.dtype for a in node.args), row.allowed)
    except TypeError as error:
        raise TypeError(f"{node.op} {error}") from None


def _converted(node: Expr) -> str:
    if len(node.args) != 1 or node.dtype not in LOOP_DTYPES or node.args[0].dtype not in LOOP_DTYPES:
        raise TypeError(f"to({node.dtype}) of {[a.dtype for a in node.args]}")
    return node.dtype


# ---------------------------------------------------------------- reductions

@dataclass(frozen=True)
class ReduceOp:
    """An accumulator: starts at `identity(dtype)`, takes elements in with the scalar operator `combine`.  `along` reduces
    dimensions of a tensor (the meaning of a reduce phase), `running` is the meaning of a scan.  Which index holds an
    extreme value (argmax) is written as two reductions: the extreme, then the least position that has it."""
    name: str
    combine: str
    identity: Callable[[str], int | float | bool]
    along: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]
    running: Callable[[torch.Tensor, int], torch.Tensor]


REDUCE_OPS: Table[ReduceOp] = Table("reduction", "loops/scalars.py")


def _one_dim_at_a_time(reduce: Callable[..., torch.Tensor], x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    for dim in sorted(dims, reverse=True):
        x = reduce(x, dim)
    return x


def lowest(dtype: str) -> int | float | bool:
    """The identity of max."""
    return False if dtype == "bool" else -math.inf if is_float(dtype) else torch.iinfo(DTYPES[dtype]).min


def highest(dtype: str) -> int | float | bool:
    """The identity of min."""
    return True if dtype == "bool" else math.inf if is_float(dtype) else torch.iinfo(DTYPES[dtype]).max


def _number(value: int) -> Callable[[str], int | float | bool]:
    return lambda dtype: float(value) if is_float(dtype) else bool(value) if dtype == "bool" else value


for _reduce in (
    ReduceOp("sum", "add", _number(0), lambda x, d: torch.sum(x, d, dtype=x.dtype), lambda x, d: torch.cumsum(x, d, dtype=x.dtype)),
    ReduceOp("prod", "mul", _number(1), functools.partial(_one_dim_at_a_time, lambda x, d: torch.prod(x, d, dtype=x.dtype)),
             lambda x, d: torch.cumprod(x, d, dtype=x.dtype)),
    ReduceOp("max", "max", lowest, torch.amax, lambda x, d: torch.cummax(x, d).values),
    ReduceOp("min", "min", highest, torch.amin, lambda x, d: torch.cummin(x, d).values),
    ReduceOp("any", "or", _number(0), torch.any, lambda x, d: torch.cummax(x, d).values),
    ReduceOp("all", "and", _number(1), torch.all, lambda x, d: torch.cummin(x, d).values),
):
    REDUCE_OPS.add(_reduce.name, _reduce)


# ---------------------------------------------------------------- builders

@functools.cache
def _rounded(value: float, dtype: str, negative: bool) -> float:
    return torch.tensor(float(value), dtype=torch.float64).to(DTYPES[dtype]).item()


def literal(value: int | float | bool, dtype: str) -> Expr:
    """A constant of the dtype, its value one that the dtype has."""
    if dtype == "bool":
        return const(bool(value), "bool")
    if not is_float(dtype):
        return const(int(value), dtype)
    if dtype == "f64":
        return const(float(value), "f64")
    if value != value:
        return const(math.nan, dtype)
    return const(_rounded(value, dtype, value == 0 and math.copysign(1.0, value) < 0), dtype)      # 0.0 and -0.0 are equal


def op(name: str, *args: Expr | int | float | bool) -> Expr:
    """The node of operator `name`; plain numbers become constants of the dtype of the Expr arguments."""
    nodes: tuple[Any, ...] = args
    for arg in args:
        if type(arg) is not Expr:
            kind = next(a.dtype for a in args[name == "where":] if type(a) is Expr)
            nodes = tuple([a if type(a) is Expr else literal(a, kind) for a in args])
            break
    return make(name, FIXED.get(name) or nodes[-1].dtype, nodes)


def to(value: Expr, dtype: str, loose: bool = False) -> Expr:
    """Conversion as torch does it.  A `loose` rounding to bf16 or f16 stands where eager stores between two operators: it may be
    dropped when the value is used at once in f32.  A strict one was asked for by the program and is never dropped."""
    if value.dtype == dtype:
        return value
    if value.op == "const" and _in_range(value, dtype):
        return literal(value.attr, dtype)
    return make("to", dtype, (value,), "loose" if loose and dtype in STORAGE_FLOATS else None)


def shares_bits(old: str, new: str) -> bool:
    """Can the bits of one dtype be read as the other in a loop?"""
    return old == new or INTS.issuperset((old, new)) and ITEMSIZE[old] == ITEMSIZE[new] or old in BITS_OF.get(new, ()) or {old, new} == STORAGE_FLOATS


def as_bits(value: Expr, dtype: str) -> Expr:
    """The value's bits, read as another dtype: `Tensor.view(dtype)` of one element."""
    if value.dtype == dtype or INTS.issuperset((value.dtype, dtype)):
        return to(value, dtype)
    return op(f"as_{dtype}", value if value.dtype in BITS_OF[dtype] else as_bits(value, "i16"))


def _in_range(value: Expr, dtype: str) -> bool:
    """Is the conversion of a constant here the one of torch?  Not out of an integer's range, and not from NaN to one."""
    if is_float(dtype) or dtype == "bool":
        return True
    return math.isfinite(value.attr) and lowest(dtype) <= int(value.attr) <= highest(dtype)


class Scalars:
    """`S.exp(x)`: a builder for each row of OPS, made on first use.  Python's keywords get an underscore: `S.and_`."""

    def __getattr__(self, name: str) -> Callable[..., Expr]:
        row = OPS[name.rstrip("_")]
        builder = lambda *args: op(row.name, *args)
        setattr(self, name, builder)
        return builder


S: Scalars = Scalars()


SIZE_OPS: dict[str, Callable[..., Expr]] = {      # operators on sizes that bodies know under another name
    "truediv": lambda x, y: S.div(to(x, "f64"), to(y, "f64")),
    "lshift": lambda x, y: S.shl(x, y), "rshift": lambda x, y: S.shr(x, y),
    "bitand": lambda x, y: S.and_(x, y), "bitor": lambda x, y: S.or_(x, y), "bitxor": lambda x, y: S.xor(x, y),
}
_as_bodies: dict[Expr, Expr] = {}


def from_size(size: Expr) -> Expr:
    """An expression over sizes, as the body of a loop may hold it."""
    found = _as_bodies.get(size)
    if found is None:
        for node in postorder(size):
            args = tuple([_as_bodies[a] for a in node.args])
            spelled = SIZE_OPS.get(node.op)
            _as_bodies[node] = spelled(*args) if spelled else node if args == node.args else make(node.op, node.dtype, args, node.attr)
        found = _as_bodies[size]
    return found


def number(value: int | float | bool | Expr, dtype: str) -> Expr:
    """A number of the program as an element: a constant, or a size converted at run time."""
    return to(from_size(value), dtype) if isinstance(value, Expr) else literal(value, dtype)
