"""Sizes as graph nodes: which Python function computes each operation on sizes.

    size_function(s0 * 4)       # operator.mul
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from firesteel.errors import InternalError
from firesteel.graph.abstract import AbstractTensor
from firesteel.sym.expr import Expr
from firesteel.sym.meaning import MEANING
from firesteel.sym.symint import FLOAT_FUNCTIONS, MATH_ON_SYMBOLS, SYMBOLIC, from_sym, sym_ite


def sizes_in(value: Any) -> list[Expr]:
    """The symbolic sizes of an abstract value."""
    if type(value) is AbstractTensor:
        spec = value.spec
        return [s for s in (*spec.shape, *spec.strides, spec.offset) if type(s) is Expr]
    if isinstance(value, (list, tuple)):
        return [s for v in value for s in sizes_in(v)]
    size = from_sym(value) if type(value) in SYMBOLIC else None
    return [size] if type(size) is Expr else []


SIZE_FUNCTIONS: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "floordiv": operator.floordiv,
    "mod": operator.mod, "truediv": operator.truediv, "pow": operator.pow, "abs": operator.abs, "min": torch.sym_min,
    "max": torch.sym_max, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "not": torch.sym_not,
    "and": operator.and_, "or": operator.or_, "where": sym_ite, "lshift": operator.lshift, "rshift": operator.rshift,
    "bitand": operator.and_, "bitor": operator.or_, "bitxor": operator.xor,
}
SIZE_FUNCTIONS.update(MATH_ON_SYMBOLS)
SIZE_FUNCTIONS.update({_op: row.compute for _op, row in MEANING.items() if _op not in SIZE_FUNCTIONS})
_CONVERSIONS = {"f64": torch.sym_float, "i64": torch.sym_int}


def size_function(size: Expr) -> Callable:
    """The Python function that computes one operation on sizes."""
    if size.op == "to":
        return _CONVERSIONS[size.dtype]
    found = (FLOAT_FUNCTIONS if size.dtype == "f64" and size.op in FLOAT_FUNCTIONS else SIZE_FUNCTIONS).get(size.op)
    if found is None:
        raise InternalError(f"no Python function for the size operation {size.op}: add a row in graph/sizenodes.py")
    return found
