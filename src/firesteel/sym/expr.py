"""Expr: the one expression type, used for sizes, strides, indices and the scalar bodies of loops.

An Expr is (op, dtype, args, attr), frozen and hash-consed: two equal expressions are the same object, so `is` and `==`
mean structural equality, and a dict keyed by Exprs is a cache.  `make` builds a node as it is; the functions and
operators below it fold constants and apply the rules of `sym/rules.py`, for integer and boolean expressions only:
floating-point bodies are never rearranged.

A `Size` is a plain `int` or an integer Expr that is not a constant: every function here takes both and returns a plain
int wherever the result is known, so code over sizes costs nothing when sizes are static.

    n = symbol("s0")
    (n + 3) - n          # 3
    (n * 4) // 4         # n
    n < n + 1            # True
    n == m               # identity, never a question; `sym.env` asks questions and records guards

dtypes are short names: i64 (every size and index), bool, f64; loop bodies also f32 f16 bf16 i32 i16 i8 u8.
"""
from __future__ import annotations

from typing import Any, Union

Size = Union[int, "Expr"]


class Expr:
    """A node; made by `make` alone."""

    __slots__ = ("op", "dtype", "args", "attr", "_hash")
    op: str
    dtype: str
    args: tuple["Expr", ...]
    attr: Any

    def __hash__(self) -> int:
        return self._hash

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("an Expr is frozen")

    def __reduce__(self):
        return make, (self.op, self.dtype, self.args, self.attr)

    def __copy__(self) -> "Expr":
        return self

    def __deepcopy__(self, memo: dict) -> "Expr":
        return self


_nodes: dict[tuple, Expr] = {}
_set = object.__setattr__


def make(op: str, dtype: str, args: tuple[Expr, ...] = (), attr: Any = None) -> Expr:
    """The node (op, dtype, args, attr), as it is: no rule is applied."""
    # the attr's type is part of the key: 1, 1.0 and True are equal in Python; so are 0.0 and -0.0, told apart by repr
    key = (op, dtype, args, attr, type(attr) if type(attr) is not float else repr(attr))
    node = _nodes.get(key)
    if node is None:
        node = Expr.__new__(Expr)
        _set(node, "op", op)
        _set(node, "dtype", dtype)
        _set(node, "args", args)
        _set(node, "attr", attr)
        _set(node, "_hash", hash(key))
        node = _nodes.setdefault(key, node)
    return node


def const(value: int | float | bool, dtype: str | None = None) -> Expr:
    """A literal as a node (for loop bodies and for code that wants Exprs only)."""
    if dtype is None:
        dtype = {bool: "bool", int: "i64", float: "f64"}[type(value)]
    return make("const", dtype, (), value)


def symbol(name: str, dtype: str = "i64") -> Expr:
    """A named unknown: a size `s0`, an unbacked size `u0`, a float `f0`."""
    return make("symbol", dtype, (), name)


def as_expr(value: Size | float | bool) -> Expr:
    return value if isinstance(value, Expr) else const(value)


def as_size(expr: Size) -> Size:
    """A constant node becomes a plain number; everything else stays."""
    return expr.attr if isinstance(expr, Expr) and expr.op == "const" else expr
