"""How Triton spells each scalar operator: the table `SPELL`, and the few functions that kernels share (`HELPERS`).

A row maps a kind of element to a template over {0}, {1}, {2} (names of values of one dtype), {t} (the type) and {bits}.  Kinds
are looked up from the narrow to the wide: a dtype, then "real", "signed", "unsigned" or "bool", then "whole", then "any".
What has no row here is decomposed by `loops/decompose.py` before printing.

Registers: bf16 and f16 values are held as float32, bool as int1.  Division, square root and the functions of the CUDA
library are those that eager's kernels call, so that values agree with eager's to the last bits.  A row divided by one number is multiplied
by its reciprocal and corrected by the rest (`fs_div`), which gives the same bits without a division for each element; the number is first
brought near 1, so that reciprocals are finite and normal.  What is not a number then (0, infinities) is what the product says.

    spell(div of f32, ["a", "b"])      # "tl.div_rn(a, b)"
"""
from __future__ import annotations

import math

from firesteel.loops.scalars import REDUCE_OPS
from firesteel.sym.expr import Expr
from firesteel.table import Table

REGISTER = {"f32": "tl.float32", "f64": "tl.float64", "bf16": "tl.float32", "f16": "tl.float32", "i64": "tl.int64", "i32": "tl.int32",
            "i16": "tl.int16", "i8": "tl.int8", "u8": "tl.uint8", "bool": "tl.int1"}
MEMORY = {**REGISTER, "bf16": "tl.bfloat16", "f16": "tl.float16"}
POINTER = {"f32": "*fp32", "f64": "*fp64", "bf16": "*bf16", "f16": "*fp16", "i64": "*i64", "i32": "*i32", "i16": "*i16", "i8": "*i8",
           "u8": "*u8", "bool": "*i1"}
BITS = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "u8": 8, "bool": 1}
FLOAT = frozenset({"f32", "f64", "bf16", "f16"})
SMALL = frozenset({"i16", "i8", "u8", "bool"})      # accumulated and scanned as int32
ATOMIC = frozenset({"f32", "f64", "bf16", "f16", "i64", "i32"})     # what the hardware adds to memory

HELPERS = '''
def fs_add(a, b):
    return a + b


def fs_mul(a, b):
    return a * b


def fs_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


def fs_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


def fs_or(a, b):
    return a | b


def fs_and(a, b):
    return a & b


def fs_scale(b):
    small, large = 5.421010862427522e-20, 1.8446744073709552e+19        # 2**-64, 2**64
    return tl.where(tl.abs(b) < small, large, tl.where(tl.abs(b) > large, small, 1.0))


def fs_div(a, scale, b, reciprocal):
    a = a * scale
    first = a * reciprocal
    better = tl.fma(tl.fma(first * -1.0, b, a), reciprocal, first)
    return tl.where((better == better) & (first != 0.0), better, first)     # keeps the sign of 0


def fs_recip(b):
    first = 1.0 / b
    better = tl.fma(tl.fma(first * -1.0, b, 1.0), first, first)
    return tl.where(better == better, better, first)


def fs_mod(a, b):
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def fs_floordiv(a, b):
    quotient = a // b
    rest = a - quotient * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)
'''
HELPER_NAMES = ("fs_add", "fs_mul", "fs_max", "fs_min", "fs_or", "fs_and", "fs_scale", "fs_div", "fs_recip", "fs_mod", "fs_floordiv")


def kinds(dtype: str) -> tuple[str, ...]:
    """Keys of a row for elements of a dtype, the narrowest first."""
    if dtype in FLOAT:
        return dtype, "f64" if dtype == "f64" else "f32", "real", "any"
    if dtype == "bool":
        return "bool", "any"
    return dtype, "unsigned" if dtype == "u8" else "signed", "whole", "any"


SPELL: Table[dict[str, str]] = Table("Triton spelling", "codegen/triton_ops.py")

_IN_RANGE = "({1} >= 0) & ({1} < {bits})"
SPELL.rows({
    "add": {"any": "{0} + {1}"}, "sub": {"any": "{0} - {1}"}, "mul": {"any": "{0} * {1}"},
    "and": {"any": "{0} & {1}"}, "or": {"any": "{0} | {1}"}, "xor": {"any": "{0} ^ {1}"}, "not": {"any": "~{0}"},
    "neg": {"real": "{0} * -1.0", "whole": "0 - {0}"},      # 0.0 - x would lose the sign of zero
    "abs": {"unsigned": "{0}", "any": "tl.abs({0})"},
    "min": {"real": "fs_min({0}, {1})", "whole": "tl.minimum({0}, {1})", "bool": "{0} & {1}"},
    "max": {"real": "fs_max({0}, {1})", "whole": "tl.maximum({0}, {1})", "bool": "{0} | {1}"},
    "div": {"f32": "tl.div_rn({0}, {1})", "f64": "{0} / {1}"},
    "recip": {"f32": "fs_recip({0})", "f64": "1.0 / {0}"},
    "sqrt": {"f32": "tl.sqrt_rn({0})", "f64": "libdevice.sqrt({0})"},
    "fmod": {"real": "libdevice.fmod({0}, {1})", "whole": "{0} % {1}"},
    "mod": {"whole": "fs_mod({0}, {1})", "unsigned": "{0} % {1}"},
    "floordiv": {"whole": "fs_floordiv({0}, {1})", "unsigned": "{0} // {1}"},
    # a shift by the width or more is undefined on the machine, but not in torch
    "shl": {"whole": "tl.where(" + _IN_RANGE + ", {0} << {1}, tl.full([], 0, {t}))"},
    "shr": {"signed": "tl.where(" + _IN_RANGE + ", {0} >> {1}, {0} >> ({bits} - 1))",
            "unsigned": "tl.where(" + _IN_RANGE + ", {0} >> {1}, tl.full([], 0, {t}))"},
    "isnan": {"any": "{0} != {0}"}, "isinf": {"any": "tl.abs({0}) == float('inf')"},
    "signbit": {"f32": "{0}.to(tl.int32, bitcast=True) < 0", "f64": "{0}.to(tl.int64, bitcast=True) < 0"},
    "as_i32": {"any": "{0}.to(tl.int32, bitcast=True)"}, "as_f32": {"any": "{0}.to(tl.float32, bitcast=True)"},
    "as_i64": {"any": "{0}.to(tl.int64, bitcast=True)"}, "as_f64": {"any": "{0}.to(tl.float64, bitcast=True)"},
    "as_f16": {"any": "{0}.to(tl.float16, bitcast=True).to(tl.float32)"}, "as_bf16": {"any": "{0}.to(tl.bfloat16, bitcast=True).to(tl.float32)"},
    "as_i16": {"f16": "{0}.to(tl.float16).to(tl.int16, bitcast=True)", "bf16": "{0}.to(tl.bfloat16).to(tl.int16, bitcast=True)"},
    "where": {"any": "tl.where({0}, {1}, {2})"},
    "floor": {"any": "tl.floor({0})"}, "ceil": {"any": "tl.ceil({0})"},
    "round": {"any": "libdevice.rint({0})"}, "trunc": {"any": "libdevice.trunc({0})"},
})

for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    SPELL.add(_name, {"any": f"{{0}} {_sign} {{1}}", "bool": f"{{0}}.to(tl.int8) {_sign} {{1}}.to(tl.int8)"})

for _name in ("rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh",
              "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma"):
    SPELL.add(_name, {"any": f"libdevice.{_name}({{0}})"})
for _name in ("pow", "atan2", "hypot", "copysign", "nextafter"):
    SPELL.add(_name, {"any": f"libdevice.{_name}({{0}}, {{1}})"})

_FOLDED = frozenset({"add", "mul", "min", "max", "and", "or", "xor"})   # may have more than two arguments
_LEAVES = frozenset({"const", "symbol", "axis", "at", "at_masked", "check_index", "acc", "to"})


def is_spelled(node: Expr) -> bool:
    return node.op in _LEAVES or _template(node) is not None


def _template(node: Expr) -> str | None:
    row = SPELL.get(node.op)
    return None if row is None else next((row[k] for k in kinds(node.args[-1].dtype) if k in row), None)


def spell(node: Expr, args: list[str], natural: bool = False, narrow: bool = False) -> str:
    """The text of a node over the names of its arguments.  `natural`: they are never negative; `narrow`: they are int32."""
    if len(args) == 4:      # a division whose divisor was prepared
        return f"fs_div({', '.join(args)})"
    if node.op == "div" and _is_power_of_two(node.args[1]):
        return f"{args[0]} * {1 / node.args[1].attr!r}"
    if natural and node.op in ("mod", "floordiv"):
        return f"{args[0]} {'%' if node.op == 'mod' else '//'} {args[1]}"
    dtype = "i32" if narrow else node.args[-1].dtype
    template = _template(node)
    assert template is not None, node
    text = template.format(*args, t=REGISTER[dtype], bits=BITS.get(dtype, 0))
    for arg in args[2:] if node.op in _FOLDED else ():
        text = template.format(f"({text})", arg, t=REGISTER[dtype], bits=BITS.get(dtype, 0))
    return text


def _is_power_of_two(divisor: Expr) -> bool:
    """Is multiplying by the reciprocal the same to the last bit?"""
    return divisor.op == "const" and abs(math.frexp(divisor.attr)[0]) == 0.5 and 1e-30 < abs(divisor.attr) < 1e30


def literal(value: int | float | bool, dtype: str) -> str:
    """A constant of exactly this type."""
    if dtype not in FLOAT:
        return f"tl.full([], {int(value)}, {REGISTER[dtype]})"
    value = float(value)
    if value == 0 and math.copysign(1.0, value) < 0:
        return f"tl.full([], 0.0, {REGISTER[dtype]}) * -1.0"
    text = repr(value) if math.isfinite(value) else f"float('{value}')"
    return f"tl.full([], {text}, {REGISTER[dtype]})"


def convert(name: str, source: str, target: str) -> str:
    """The text of a conversion as torch does it."""
    if target == "bool":
        return f"{name} != 0"
    if target in ("bf16", "f16"):
        return f"{name}.to({MEMORY[target]}).to(tl.float32)"
    if target in FLOAT or source not in FLOAT:
        return f"{name}.to({REGISTER[target]})"
    # torch takes small integers through a wide one, so that negative numbers wrap
    wide = {"u8": "tl.int64", "i8": "tl.int32", "i16": "tl.int32"}.get(target)
    return f"{name}.to({wide}).to({REGISTER[target]})" if wide else f"{name}.to({REGISTER[target]})"


# ---------------------------------------------------------------- accumulators

COMBINE = {"add": "fs_add", "mul": "fs_mul", "max": "fs_max", "min": "fs_min", "or": "fs_or", "and": "fs_and"}


def combine_function(op: str) -> str:
    return COMBINE[REDUCE_OPS[op].combine]


def accumulator_dtype(dtype: str) -> str:
    """The type in which an accumulator is held."""
    return "i32" if dtype in SMALL else "f32" if dtype in ("bf16", "f16") else dtype


def identity(op: str, dtype: str) -> str:
    return literal(REDUCE_OPS[op].identity(dtype), accumulator_dtype(dtype))
