"""What each operation on sizes computes, in Python: one row an op, used to fold constants, to evaluate, and to print.

A row is (number of arguments, function on plain numbers, text template, binding strength of that text).  The integer
operations are Python's own: `//` and `%` round towards minus infinity.  The op `to` is a conversion to the node's
dtype; float to integer drops the fraction.

    MEANING["floordiv"].compute(-7, 2)      # -4
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable

from firesteel.records import dataclass
from firesteel.table import Table


@dataclass(frozen=True, slots=True)
class OpMeaning:
    arity: int
    compute: Callable
    text: str               # Python source over {0}, {1}, ...
    strength: int = 9       # as in Python's grammar: 1 or, 2 and, 3 not, 4 comparison, 5 + -, 6 * // %, 7 unary, 8 **, 9 call


def _is_integer(x: float) -> bool:
    return x.is_integer()


def _where(condition: bool, yes, no):
    return yes if condition else no


MEANING: Table[OpMeaning] = Table("meaning of a size operation", "sym/meaning.py")
MEANING.rows({
    "add": OpMeaning(2, operator.add, "{0} + {1}", 5),
    "sub": OpMeaning(2, operator.sub, "{0} - {1}", 5),
    "mul": OpMeaning(2, operator.mul, "{0} * {1}", 6),
    "neg": OpMeaning(1, operator.neg, "-{0}", 7),
    "floordiv": OpMeaning(2, operator.floordiv, "{0} // {1}", 6),
    "mod": OpMeaning(2, operator.mod, "{0} % {1}", 6),
    "truediv": OpMeaning(2, operator.truediv, "{0} / {1}", 6),
    "pow": OpMeaning(2, operator.pow, "pow({0}, {1})"),
    "min": OpMeaning(2, min, "min({0}, {1})"),
    "max": OpMeaning(2, max, "max({0}, {1})"),
    "abs": OpMeaning(1, abs, "abs({0})"),
    "lshift": OpMeaning(2, operator.lshift, "({0} << {1})"),
    "rshift": OpMeaning(2, operator.rshift, "({0} >> {1})"),
    "bitand": OpMeaning(2, operator.and_, "({0} & {1})"),
    "bitor": OpMeaning(2, operator.or_, "({0} | {1})"),
    "bitxor": OpMeaning(2, operator.xor, "({0} ^ {1})"),
    "eq": OpMeaning(2, operator.eq, "{0} == {1}", 4),
    "ne": OpMeaning(2, operator.ne, "{0} != {1}", 4),
    "lt": OpMeaning(2, operator.lt, "{0} < {1}", 4),
    "le": OpMeaning(2, operator.le, "{0} <= {1}", 4),
    "and": OpMeaning(2, lambda a, b: a and b, "{0} and {1}", 2),
    "or": OpMeaning(2, lambda a, b: a or b, "{0} or {1}", 1),
    "not": OpMeaning(1, operator.not_, "not {0}", 3),
    "where": OpMeaning(3, _where, "({1} if {0} else {2})"),
    "floor": OpMeaning(1, lambda x: float(math.floor(x)) if math.isfinite(x) else x, "float(math.floor({0}))"),
    "ceil": OpMeaning(1, lambda x: float(math.ceil(x)) if math.isfinite(x) else x, "float(math.ceil({0}))"),
    "trunc": OpMeaning(1, lambda x: float(math.trunc(x)), "float(math.trunc({0}))"),
    "round": OpMeaning(1, lambda x: float(round(x)), "float(round({0}))"),
    "round_digits": OpMeaning(2, round, "round({0}, {1})"),
    "is_integer": OpMeaning(1, _is_integer, "{0}.is_integer()"),
})

MATH_FUNCTIONS = ("sqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
                  "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "gamma")
for _op in MATH_FUNCTIONS:
    if hasattr(math, _op):
        MEANING.add(_op, OpMeaning(1, getattr(math, _op), f"math.{_op}({{0}})"))

CONVERT: Table[OpMeaning] = Table("conversion of a size", "sym/meaning.py")
CONVERT.add("f64", OpMeaning(1, float, "float({0})"))
CONVERT.add("i64", OpMeaning(1, int, "int({0})"))
CONVERT.add("bool", OpMeaning(1, bool, "bool({0})"))


def meaning(op: str, dtype: str) -> OpMeaning:
    return CONVERT[dtype] if op == "to" else MEANING[op]
