"""The engine: builds integer and boolean expressions by the rows of `sym/rules.py` and `sym/logic.py`, under what is known of the leaves.

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

from collections.abc import Callable, Mapping, Reversible

from firesteel.records import dataclass
from firesteel.sym.bounds import Bounds
from firesteel.sym.meaning import MEANING, meaning
from firesteel.sym.node import Expr, Size, as_expr, as_size, make, postorder
from firesteel.sym.poly import Poly, accumulate, plus, poly
from firesteel.table import Table

Ranges = Mapping[Expr, tuple["Size | None", "Size | None"]]
Rule = Callable[..., "Size | bool | None"]


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """One rewrite rule.  `pattern` is for people and for the test that checks it on numbers."""
    op: str
    pattern: str
    apply: Rule


RULES: Table[RewriteRule] = Table("rewrite rule", "sym/rules.py or sym/logic.py")
_by_op: dict[str, list[Rule]] = {}
SUMS = frozenset(("add", "sub", "mul", "neg"))
_EXACT = frozenset(("i64", "bool"))
_FOLDED = frozenset(("i64", "bool", "f64"))
CONNECTIVES = frozenset(("and", "or", "not"))
BOOLEAN = CONNECTIVES | {"eq", "ne", "lt", "le"}


def rule(op: str, pattern: str) -> Callable[[Rule], Rule]:
    """Decorator: adds a row to RULES; the rows of an op are tried in the order in which they stand."""
    def register(apply: Rule) -> Rule:
        RULES.add((op, pattern), RewriteRule(op, pattern, apply))
        _by_op.setdefault(op, []).append(apply)
        return apply
    return register


_sum_rule: list[Callable[[Context, Poly], Size]] = []


def sum_builder(function: Callable) -> Callable:
    """Decorator: the rule that turns collected terms into a Size, for sums of any length."""
    _sum_rule.append(function)
    return function


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
        key = (op, *args) if op != "where" else (op, *args, type(args[1]), type(args[2]))      # True == 1, but they make other nodes
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self.apply(op, args)
        return found

    def apply(self, op: str, args: tuple) -> Size:
        """`build` without looking it up."""
        if type(args[0]) is not Expr and not any(type(arg) is Expr for arg in args):
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

    def sum(self, terms: Poly) -> Size:
        """The Size of a sum whose atoms are canonical; takes the terms over."""
        return _sum_rule[0](self, terms)

    # questions about canonical Sizes
    def nonneg(self, a: Size) -> bool:
        """Is a >= 0 for certain?"""
        return self.bounds.nonneg(a) if type(a) is Expr else a >= 0

    def positive(self, a: Size) -> bool:
        if type(a) is int:
            return a > 0
        low = self.bounds.interval(a)[0]
        return (low is not None and low > 0) or (bool(self.bounds.ranges) and self.less(0, a))

    def less(self, a: Size, b: Size) -> bool:
        """Is a < b for certain?"""
        gap = plus(poly(b), poly(a), -1)
        accumulate(gap, {(): -1})
        return self.bounds.prove(gap)

    def simplify(self, root: Size) -> Size:
        """The same value, rebuilt by the rules from the leaves up."""
        if type(root) is not Expr:
            return root
        done = self.simplified
        found = done.get(root)
        if found is None:
            for node in postorder(root, known=done, below=parts):
                done[node] = self._rebuild(node, done)
            found = done[root]
        return found

    def _rebuild(self, node: Expr, done: dict) -> Size:
        if not node.args:
            return self._leaf(node)
        if node.op in SUMS and node.dtype == "i64":
            return self._rebuild_sum(node, done)
        args = [done[arg] for arg in node.args]
        try:
            if node.op in _by_op and node.dtype in _EXACT and all(arg.dtype in _EXACT for arg in node.args) and not _is_bitwise(node):
                return self.build(node.op, *args)
            folded = node.dtype in _FOLDED and (node.op in MEANING or node.op == "to") and not _is_bitwise(node)
            if folded and not any(type(arg) is Expr for arg in args):
                return meaning(node.op, node.dtype).compute(*args)
        except (ArithmeticError, ValueError):       # an error of the program's, if it is ever reached: stays as it is
            pass
        nodes = tuple(new if type(new) is Expr else make("const", old.dtype, (), new) for new, old in zip(args, node.args))
        return self.known(node if nodes == node.args else make(node.op, node.dtype, nodes, node.attr))

    def _rebuild_sum(self, node: Expr, done: dict) -> Size:
        """All terms of a sum at once."""
        terms = poly(node)
        if (node,) in terms:            # a product too large to expand
            return self.mul(*[done[arg] for arg in node.args])
        total: Poly = {}
        for monomial, count in terms.items():
            if all(done[atom] is atom for atom in monomial):
                accumulate(total, {monomial: count})
                continue
            product: Size = count
            for atom in monomial:
                product = self.mul(product, done[atom])
            accumulate(total, poly(product))
        return self.sum(total)

    def _leaf(self, node: Expr) -> Size:
        if node.op == "const" and node.dtype in ("i64", "bool"):
            return as_size(node)
        if node.dtype == "i64":
            low, high = self.bounds.interval(node)
            return low if low is not None and low == high else node
        return node


def parts(node: Expr) -> Reversible[Expr]:
    """What must be simplified before the node: the atoms of a sum, the arguments of anything else."""
    if node.op in SUMS and node.dtype == "i64":
        terms = poly(node)
        if (node,) not in terms:
            return {atom: None for monomial in terms for atom in monomial}
    return node.args


def _is_bitwise(node: Expr) -> bool:
    """The connectives of a kernel work on the bits of integers too; here they are those of truth values."""
    return node.op in CONNECTIVES and node.dtype != "bool"


FREE = Context()
