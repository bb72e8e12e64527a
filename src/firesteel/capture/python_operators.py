"""Python's operators by the symbols that instructions have: `OPERATORS["+="]` is operator.iadd."""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

IN_PLACE = {f"{symbol}=": getattr(operator, f"i{name}") for symbol, name in {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "@": "matmul", "**": "pow",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift"}.items()}
BINARY = {f"{symbol}": getattr(operator, name) for symbol, name in {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "@": "matmul", "**": "pow",
    "&": "and_", "|": "or_", "^": "xor", "<<": "lshift", ">>": "rshift"}.items()}
COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge}
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {**BINARY, **IN_PLACE, **COMPARE}
UNARY_OPERATORS: dict[str, Callable[[Any], Any]] = {"-": operator.neg, "+": operator.pos, "~": operator.invert, "not": operator.not_}
