"""The engine: builds integer and boolean expressions by the rows of `sym/rules.py`, under what is known of the leaves.

A `Context` is a mapping leaf -> (lo, hi) with what follows from it: memoised results, and the bounds of `sym/bounds.py`.
`build(op, *args)` tries the op's rules in order; the first that answers wins, otherwise the node is made as it stands.
A rule is `fn(context, *args) -> Size | None`, None for "does not apply".  Rules must hold for all integers within the
context's ranges (and divisors other than 0), and must terminate: each makes its result smaller or moves it towards the
canonical form.

    context = Context({i: (0, T - 1)})
    context.build("floordiv", b * T + i, T)         # b

`FREE` knows nothing; the operators of Expr build under it.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from firesteel.sym.bounds import Bounds
from firesteel.sym.meaning import MEANING, meaning
from firesteel.sym.node import Expr, Size, as_expr, as_size, make, postorder
from firesteel.table import Table

Ranges = Mapping[Expr, tuple["Size | None", "Size | None"]]
Rule = Callable[..., "Size | bool | None"]


@dataclass(frozen=True, slots=True)
class Row:
    """One rewrite rule.  `pattern` is for people and for the test that checks it on numbers."""
    op: str
    pattern: str
    apply: Rule


RULES: Table[Row] = Table("rewrite rule", "sym/rules.py")
_by_op: dict[str, list[Rule]] = {}
_EXACT = frozenset(("i64", "bool"))
_FOLDED = frozenset(("i64", "bool", "f64"))
BOOLEAN = frozenset(("eq", "ne", "lt", "le", "and", "or", "not"))


def rule(op: str, pattern: str) -> Callable[[Rule], Rule]:
    """Decorator: adds a row to RULES; the rows of an op are tried in the order in which they stand."""
    def register(apply: Rule) -> Rule:
        RULES.add((op, pattern), Row(op, pattern, apply))
        _by_op.setdefault(op, []).append(apply)
        return apply
    return register


class Context:
    """Ranges of leaves, and everything derived from them.  Grows caches, otherwise immutable."""

    __slots__ = ("bounds", "facts", "memo", "simplified")

    def __init__(self, ranges: Ranges | None = None, facts: Mapping[Expr, Size] | None = None, relations: Ranges | None = None):
        self.bounds = Bounds(ranges or {}, self, relations or {})
        self.facts = facts if facts is not None else {}     # canonical node -> its value, where that is known otherwise
        self.memo: dict[tuple, Size | bool] = {}
        self.simplified: dict[Expr, Size | bool] = {}

    def build(self, op: str, *args: Size) -> Size:
        """`op` applied to args that are canonical in this context.  Arguments of boolean ops other than comparisons are
        bools or boolean Exprs, all others ints or integer Exprs."""
        key = (op, *args)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._build(op, args)
        return found

    def _build(self, op: str, args: tuple) -> Size:
        if not any(type(arg) is Expr for arg in args):
            return MEANING[op].compute(*args)
        for apply in _by_op.get(op, ()):
            found = apply(self, *args)
            if found is not None:
                return found
        return self.known(make(op, "bool" if op in BOOLEAN else "i64", tuple(as_expr(arg) for arg in args)))

    def known(self, node: Expr) -> Size:
        """What rules put in place of a node that they made: the value given as a fact, or the node."""
        return self.facts.get(node, node) if self.facts else node

    # the operations that rules use most
    def add(self, a: Size, b: Size) -> Size:
        return a + b if type(a) is int and type(b) is int else self.build("add", a, b)

    def sub(self, a: Size, b: Size) -> Size:
        return a - b if type(a) is int and type(b) is int else self.build("sub", a, b)

    def mul(self, a: Size, b: Size) -> Size:
        return a * b if type(a) is int and type(b) is int else self.build("mul", a, b)

    def floordiv(self, a: Size, b: Size) -> Size:
        return self.build("floordiv", a, b)

    def mod(self, a: Size, b: Size) -> Size:
        return self.build("mod", a, b)

    # questions about canonical Sizes
    def nonneg(self, a: Size) -> bool:
        """Is a >= 0 for certain?"""
        return a >= 0 if type(a) is int else self.bounds.nonneg(a)

    def positive(self, a: Size) -> bool:
        return a > 0 if type(a) is int else self.bounds.nonneg(self.sub(a, 1))

    def less(self, a: Size, b: Size) -> bool:
        """Is a < b for certain?"""
        return self.nonneg(self.sub(self.sub(b, a), 1))

    def simplify(self, root: Size) -> Size:
        """The same value, rebuilt by the rules from the leaves up."""
        if type(root) is not Expr:
            return root
        done = self.simplified
        if root not in done:
            for node in postorder(root):
                if node not in done:
                    done[node] = self._rebuild(node, done)
        return done[root]

    def _rebuild(self, node: Expr, done: dict) -> Size:
        if not node.args:
            return self._leaf(node)
        args = [done[arg] for arg in node.args]
        try:
            if node.op in _by_op and _ours(node):
                return self.build(node.op, *args)
            if node.dtype in _FOLDED and (node.op in MEANING or node.op == "to") and not any(type(arg) is Expr for arg in args):
                return meaning(node.op, node.dtype).compute(*args)
        except (ArithmeticError, ValueError):       # an error of the program's, if it is ever reached: stays as it is
            pass
        nodes = tuple(new if type(new) is Expr else make("const", old.dtype, (), new) for new, old in zip(args, node.args))
        return self.known(node if nodes == node.args else make(node.op, node.dtype, nodes, node.attr))

    def _leaf(self, node: Expr) -> Size:
        if node.op == "const" and node.dtype in ("i64", "bool"):
            return as_size(node)
        if node.dtype == "i64":
            low, high = self.bounds.interval(node)
            return low if low is not None and low == high else node
        return node


def _ours(node: Expr) -> bool:
    return node.dtype in _EXACT and all(arg.dtype in _EXACT for arg in node.args)


FREE = Context()
