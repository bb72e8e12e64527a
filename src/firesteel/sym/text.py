"""Text: an expression as Python source, for generated host code, for guards, and for people.

    python_text(2 * n * m - 1)                                  # "2*s0*s1 - 1"
    python_text(n > 3, {"s0": "L['x'].size()[0]"})              # "L['x'].size()[0] >= 4"

The source computes exactly what `sym.expr.evaluate` does; it may use `math`.  Shared parts are written out each time.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from firesteel.sym.meaning import meaning
from firesteel.sym.node import Expr, as_size

_SWAPPED = {"le": ">=", "lt": ">"}


def python_text(expr: Any, names: Mapping[str, str] | None = None) -> str:
    """Python source that computes the expression; leaves are written by name, or as `names` says."""
    return _text(expr, names or {})[0]


def _text(expr: Any, names: Mapping[str, str]) -> tuple[str, int]:
    """(source, binding strength)."""
    if type(expr) is not Expr or expr.op == "const":
        return _number_text(as_size(expr))
    if expr.op in ("symbol", "axis"):
        return names.get(expr.attr, str(expr.attr)), 9
    if expr.op == "add":
        return _sum_text(expr, names), 5
    if expr.op in _SWAPPED and expr.args[0].op == "const" and expr.args[1].op != "const":
        return f"{_inside(expr.args[1], 5, names)} {_SWAPPED[expr.op]} {_inside(expr.args[0], 5, names)}", 4
    if expr.op == "mul" and expr.dtype == "i64":
        return _product_text(expr, names), 6
    return _call_text(expr, names)


def _number_text(value: Any) -> tuple[str, int]:
    if type(value) is float and not math.isfinite(value):
        return f"float('{value}')", 9
    return repr(value), 9 if not (value < 0) else 7


def _inside(expr: Expr, strength: int, names: Mapping[str, str]) -> str:
    text, own = _text(expr, names)
    return text if own >= strength else f"({text})"


def _product_text(expr: Expr, names: Mapping[str, str]) -> str:
    factors = []
    while expr.op == "mul":
        factors.append(expr.args[1])
        expr = expr.args[0]
    factors.append(expr)
    texts = [_inside(factor, 7, names) for factor in reversed(factors) if factor.op != "const"]
    for factor in factors:
        if factor.op == "const" and factor.attr == -1:
            texts[0] = "-" + texts[0]
        elif factor.op == "const":
            texts.insert(0, str(factor.attr))
    return "*".join(texts)


def _is_negative(term: Expr) -> bool:
    factor = term.args[1] if term.op == "mul" else term
    return term.dtype == "i64" and factor.op == "const" and factor.attr < 0


def _sum_text(expr: Expr, names: Mapping[str, str]) -> str:
    terms = []
    while expr.op == "add":
        terms.append(expr.args[1])
        expr = expr.args[0]
    text = _inside(expr, 5, names)
    for term in reversed(terms):
        own = _inside(term, 6, names)
        text += f" - {own[1:]}" if _is_negative(term) else f" + {own}"
    return text


def _call_text(expr: Expr, names: Mapping[str, str]) -> tuple[str, int]:
    try:
        row = meaning(expr.op, expr.dtype)
    except KeyError:        # an op of loop bodies: for people only
        inside = ", ".join([*([str(expr.attr)] if expr.attr is not None else []), *[_text(arg, names)[0] for arg in expr.args]])
        return f"{expr.op}({inside})", 9
    if row.strength == 9:
        return row.text.format(*[_text(arg, names)[0] for arg in expr.args]), 9
    # the right side of // and % binds tighter than the operator itself; comparisons do not chain
    first = row.strength + (row.strength in (3, 4))
    texts = [_inside(arg, first if i == 0 else row.strength + 1, names) for i, arg in enumerate(expr.args)]
    return row.text.format(*texts), row.strength
