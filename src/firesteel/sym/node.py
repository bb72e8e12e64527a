"""The node itself: what an Expr is made of, and walks over it.  Everybody else imports these names from `sym.expr`.

An Expr is (op, dtype, args, attr), frozen and hash-consed by `make`: equal is identical, so hashing and comparing are
those of the object, at C speed.  Every op has a fixed number of arguments: a sum of four terms is three `add`s.

    n = symbol("s0")
    make("add", "i64", (n, const(1))) is make("add", "i64", (n, const(1)))     # True
"""
from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Container, Reversible
from typing import TYPE_CHECKING, Any, Union, final

Size = Union[int, "Expr"]


@final
class Expr:
    """A node; made by `make` alone.  `holds` has the bits (see `bits`) of the operators at and below it; `_order`, `_poly` and
    `_loads` are caches of `order` below, of `sym.poly` and of `loops.ir`."""

    __slots__ = ("op", "dtype", "args", "attr", "holds", "_order", "_poly", "_loads")
    op: str
    dtype: str
    args: tuple[Expr, ...]
    attr: Any
    holds: int
    _order: tuple[int, str, int]
    _poly: dict
    _loads: tuple[Expr, ...]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("an Expr is frozen")

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is not a known truth value: ask it with sym.env (`true`, `ShapeEnv.decide`)")

    def __reduce__(self):
        return make, (self.op, self.dtype, self.args, self.attr)

    if TYPE_CHECKING:       # the operators are put on by sym.expr, which knows the rules; a type checker wants to see them here
        def __add__(self, other: Size) -> Size: ...
        def __sub__(self, other: Size) -> Size: ...
        def __mul__(self, other: Size) -> Size: ...
        def __floordiv__(self, other: Size) -> Size: ...
        def __mod__(self, other: Size) -> Size: ...
        def __radd__(self, other: Size) -> Size: ...
        def __rsub__(self, other: Size) -> Size: ...
        def __rmul__(self, other: Size) -> Size: ...
        def __rfloordiv__(self, other: Size) -> Size: ...
        def __rmod__(self, other: Size) -> Size: ...
        def __neg__(self) -> Size: ...
        def __lt__(self, other: Size) -> Any: ...
        def __le__(self, other: Size) -> Any: ...
        def __gt__(self, other: Size) -> Any: ...
        def __ge__(self, other: Size) -> Any: ...

    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, memo: dict) -> Expr:
        return self


_nodes: dict[tuple, Expr] = {}
_bits: dict[str, int] = {}
_next_bit = itertools.count()


def bits(*ops: str) -> int:
    """A set of operators: one bit each.  `node.holds & bits("load")`: is there a load at or below the node?"""
    found = 0
    for op in ops:
        if op not in _bits:
            _bits.setdefault(op, 1 << next(_next_bit))      # threads that compile at once have bits of their own
        found |= _bits[op]
    return found


_set_op, _set_dtype, _set_args, _set_attr, _set_holds, set_order, set_poly, set_loads = (vars(Expr)[slot].__set__ for slot in Expr.__slots__)


def make(op: str, dtype: str, args: tuple[Expr, ...] = (), attr: Any = None) -> Expr:
    """The node (op, dtype, args, attr), as it is: no rule is applied."""
    # the attr's type is part of the key: 1, 1.0 and True are equal in Python; 0.0 and -0.0 are equal and NaN is not
    # even equal to itself, so floats are distinguished by their text
    kind = type(attr)
    key = (op, dtype, args, repr(attr) if kind is float else attr, kind)
    node = _nodes.get(key)
    if node is None:
        node = Expr.__new__(Expr)
        _set_op(node, op)
        _set_dtype(node, dtype)
        _set_args(node, args)
        _set_attr(node, attr)
        holds = bits(op)
        for arg in args:
            holds |= arg.holds
        _set_holds(node, holds)
        node = _nodes.setdefault(key, node)
    return node


_DTYPE_OF = {bool: "bool", int: "i64", float: "f64"}


def const(value: int | float | bool, dtype: str | None = None) -> Expr:
    """A literal as a node (for loop bodies and for code that wants Exprs only)."""
    return make("const", dtype or _DTYPE_OF[type(value)], (), value)


def symbol(name: str, dtype: str = "i64") -> Expr:
    """A named unknown: a size `s0`, an unbacked size `u0`, a float `f0`."""
    return make("symbol", dtype, (), name)


def as_expr(value: Size | float | bool) -> Expr:
    return value if type(value) is Expr else const(value)


def as_size(expr: Size) -> Size:
    """A constant node becomes a plain number; everything else stays."""
    return expr.attr if type(expr) is Expr and expr.op == "const" else expr


def is_const(value: object) -> bool:
    return type(value) is not Expr or value.op == "const"


EVERY = -1      # bits of all operators


def postorder(*roots: Any, known: Container[Any] = frozenset(), below: Callable[[Expr], Reversible[Expr]] | None = None,
              only: int = EVERY) -> list[Expr]:
    """Every node below (and with) the roots once, arguments before users.  Plain numbers among the roots are skipped, and so are `known`
    nodes with what only they need, and subtrees that hold no operator of `only`.  `below` says what a node needs, if not its arguments.
    Not recursive: a sum, or a chain of fused operators, may be deeper than Python's stack."""
    order: list[Expr] = []
    seen: set[Expr] = set()
    stack: list[Any] = [root for root in reversed(roots) if type(root) is Expr]
    while stack:
        node = stack.pop()
        if node is None:                # the arguments of the next are done
            order.append(stack.pop())
        elif node not in seen and node.holds & only and node not in known:
            seen.add(node)
            parts = node.args if below is None else below(node)
            if parts:
                stack += (node, None, *reversed(parts))
            else:
                order.append(node)
    return order


def rebuild(root: Expr, change: Callable[[Expr, tuple[Expr, ...]], Expr | None], memo: dict[Expr, Expr], only: int = EVERY) -> Expr:
    """`root` with every node replaced by change(node, new arguments), or by the same node over those where that gives None.  `memo`
    holds what was replaced before, or is to be.  Subtrees that hold no operator of `only` stay as they are."""
    stack = [root] if root.holds & only else []
    while stack:
        node = stack[-1]
        if node not in memo:
            missing = [arg for arg in node.args if arg.holds & only and arg not in memo]
            if missing:
                stack += reversed(missing)
                continue
            args = tuple([memo.get(arg, arg) for arg in node.args])
            new = change(node, args)
            memo[node] = new if new is not None else (node if args == node.args else make(node.op, node.dtype, args, node.attr))
        stack.pop()
    return memo.get(root, root)


def free_symbols(*roots: object) -> set[Expr]:
    """The `symbol` leaves below the roots."""
    return {node for node in postorder(*roots, only=bits("symbol")) if node.op == "symbol"}


def order(node: Expr) -> tuple[int, str, int]:
    """A total order that is the same in every process: leaves by name, then the rest by a structural hash.  (Two
    different nodes with the same hash would only cost a missed simplification.)"""
    try:
        return node._order
    except AttributeError:
        pass
    text = f"{node.op}.{node.dtype}.{node.attr}".encode()
    if node.args:
        key = (1, "", hash((zlib.crc32(text), *[order(arg)[2] for arg in node.args])))
    else:
        key = (0, str(node.attr), zlib.crc32(text))
    set_order(node, key)
    return key
