"""Bounds: what is known of the value of an integer expression, given ranges of its leaves.

Comes in: leaf -> (lo, hi), both inclusive, each an int, None (no bound), or an Expr (such as `extent - 1` of a loop).
Goes out: `interval(x)` in plain ints, `nonneg(x)` (a proof that x >= 0, also between symbols), `divisor(x)` (an int that
divides x for certain).  A `False` or a `None` means "not known".

    b = Context({i: (0, T - 1), T: (1, None)}).bounds
    b.interval(2 * T + 3)       # (5, None)
    b.nonneg(T - i - 1)         # True

How `nonneg` proves T - i - 1 >= 0: i has the symbolic bound i <= T - 1 and stands with a negative factor, so the expression
is at least T - (T - 1) - 1 = 0.  Atoms with symbolic bounds are replaced one after the other, then intervals decide.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd, inf
from typing import Protocol

from firesteel.sym.node import Expr, Size, as_size
from firesteel.sym.poly import Monomial, Poly, from_poly, multiply, plus, poly, without
from firesteel.table import Table


class Arithmetic(Protocol):
    """What bounds ask of the engine, which asks for bounds (rewrite.py)."""
    def sub(self, a: Size, b: Size) -> Size: ...
    def floordiv(self, a: Size, b: Size) -> Size: ...
    def positive(self, x: Size) -> bool: ...


Bound = int | None
Interval = tuple[Bound, Bound]
ANY: Interval = (None, None)
MAX_STEPS = 12          # replacements in one proof: more has never helped and costs time


# ---------------------------------------------------------------- arithmetic of intervals

def mul_intervals(a: Interval, b: Interval) -> Interval:
    """The hull of all products."""
    if a == b == ANY:
        return ANY
    left = (-inf if a[0] is None else a[0], inf if a[1] is None else a[1])
    right = (-inf if b[0] is None else b[0], inf if b[1] is None else b[1])
    corners = [x * y if x and y else 0 for x in left for y in right]
    low, high = min(corners), max(corners)
    return None if low == -inf else int(low), None if high == inf else int(high)


def _if_known(pick: Callable[..., int], *values: Bound) -> Bound:
    """The lowest or highest of bounds, where there are all of them."""
    return None if None in values else pick(values)


def meet(a: Interval, b: Interval) -> Interval:
    """Both hold."""
    lows = [x for x in (a[0], b[0]) if x is not None]
    highs = [x for x in (a[1], b[1]) if x is not None]
    return max(lows, default=None), min(highs, default=None)


# ---------------------------------------------------------------- intervals of the ops

INTERVALS: Table[Callable[..., Interval]] = Table("interval of an op", "sym/bounds.py")


@INTERVALS.row("add")
def _add(a: Interval, b: Interval) -> Interval:
    return None if a[0] is None or b[0] is None else a[0] + b[0], None if a[1] is None or b[1] is None else a[1] + b[1]


@INTERVALS.row("neg")
def _neg(a: Interval) -> Interval:
    return None if a[1] is None else -a[1], None if a[0] is None else -a[0]


INTERVALS.row("sub")(lambda a, b: _add(a, _neg(b)))
INTERVALS.row("where")(lambda condition, yes, no: (_if_known(min, yes[0], no[0]), _if_known(max, yes[1], no[1])))


@INTERVALS.row("floordiv")
def _floordiv(a: Interval, b: Interval) -> Interval:
    if b[0] is None or b[0] <= 0:
        return ANY
    low, high = a
    # the divisor's end that makes the quotient extreme depends on the sign of the dividend
    return (None if low is None else low // b[0] if low < 0 else 0 if b[1] is None else low // b[1],
            None if high is None else high // b[0] if high >= 0 else -1 if b[1] is None else high // b[1])


@INTERVALS.row("mod")
def _mod(a: Interval, b: Interval) -> Interval:
    if b[0] is not None and b[0] > 0:
        top = None if b[1] is None else b[1] - 1
        if a[0] is not None and a[0] >= 0 and a[1] is not None:
            top = a[1] if top is None else min(top, a[1])
        return 0, top
    if b[1] is not None and b[1] < 0:
        return None if b[0] is None else b[0] + 1, 0
    return ANY


INTERVALS.row("min")(lambda a, b: (_if_known(min, a[0], b[0]), meet((None, a[1]), (None, b[1]))[1]))
INTERVALS.row("max")(lambda a, b: (meet((a[0], None), (b[0], None))[0], _if_known(max, a[1], b[1])))


@INTERVALS.row("abs")
def _abs(a: Interval) -> Interval:
    low, high = a
    top = None if low is None or high is None else max(abs(low), abs(high))
    if low is not None and low >= 0:
        return low, top
    return (-high if high is not None and high <= 0 else 0), top


INTERVALS.add("mul", mul_intervals)
INTERVALS.row("check_index")(lambda a, b: (0, None if b[1] is None else b[1] - 1))


# ---------------------------------------------------------------- the bounds of one context

class Bounds:
    """Answers for one set of ranges; remembers its answers."""

    __slots__ = ("ranges", "symbolic", "context", "_intervals", "_nonneg", "_atoms")

    def __init__(self, ranges: Mapping[Expr, tuple[Size | None, Size | None]], context: Arithmetic,
                 relations: Mapping[Expr, tuple[Size | None, Size | None]]):
        """`relations` are further symbolic bounds of leaves that have a range in numbers."""
        self.context = context
        self._intervals: dict[Expr, Interval] = {}
        self._nonneg: dict[Expr, bool] = {}
        self._atoms: dict[tuple[Expr, bool], Size | None] = {}
        self.ranges: dict[Expr, Interval] = {}
        self.symbolic: dict[Expr, tuple[Size | None, Size | None]] = {}
        for leaf, (low, high) in ranges.items():
            self.ranges[leaf] = (low if type(low) is int else None, high if type(high) is int else None)
            if type(low) is Expr or type(high) is Expr:
                self.symbolic[leaf] = (low if type(low) is Expr else None, high if type(high) is Expr else None)
        self.symbolic.update(relations)
        for leaf in self.symbolic:
            self._learn_not_empty(leaf)

    def _learn_not_empty(self, leaf: Expr) -> None:
        """A leaf between lo and hi exists, so hi - lo >= 0: with hi = T - 1 and lo = 0, T >= 1."""
        given, high = self.symbolic[leaf]
        low: Size | None = self.ranges.get(leaf, ANY)[0] if given is None else given
        if low is None or high is None:
            return
        gap = plus(poly(high), poly(low), -1)
        needed = -gap.get((), 0)
        terms = [(m, k) for m, k in gap.items() if m]
        if len(terms) != 1 or terms[0][1] <= 0:
            return
        monomial, count = terms[0]
        if len(monomial) == 1:
            self._narrow(monomial[0], (-(-needed // count), None))
        elif needed > 0 and all(self.nonneg(atom) for atom in monomial):
            for atom in monomial:       # a product of numbers >= 0 that is not 0
                self._narrow(atom, (1, None))

    def _narrow(self, atom: Expr, to: Interval) -> None:
        self.ranges[atom] = meet(self.ranges.get(atom, ANY), to)
        self._intervals.clear()
        self._nonneg.clear()

    # ------------------------------------------------------------ intervals

    def interval(self, size: Size) -> Interval:
        """(lo, hi) in plain ints; None where there is no bound."""
        if type(size) is not Expr:
            return size, size
        found = self._intervals.get(size)
        if found is None:
            self._intervals[size] = ANY         # a range that mentions its own leaf ends here
            found = self._intervals[size] = self._interval(size)
        return found

    def _interval(self, node: Expr) -> Interval:
        if node.dtype == "bool":
            return 0, 1
        terms = poly(node)
        if terms.get((node,)) != 1 or len(terms) != 1:
            return self.interval_of_poly(terms)
        found = self.ranges.get(node, ANY)
        bounds = self.symbolic.get(node)
        if bounds is not None:
            low, high = bounds
            found = meet(found, (None if low is None else self.interval(low)[0],
                                 None if high is None else self.interval(high)[1]))
        row = INTERVALS.get(node.op)
        return found if row is None else meet(found, row(*[self.interval(arg) for arg in node.args]))

    def interval_of_poly(self, terms: Poly) -> Interval:
        low: Bound = 0
        high: Bound = 0
        for monomial, count in terms.items():
            if not monomial:
                one: Interval = (1, 1)
            elif len(monomial) == 1:
                one = self.interval(monomial[0])
            else:
                one = self._interval_of_monomial(monomial)
            first, last = one if count > 0 else (one[1], one[0])
            low = None if low is None or first is None else low + first * count
            high = None if high is None or last is None else high + last * count
            if low is None and high is None:
                return ANY
        return low, high

    def _interval_of_monomial(self, monomial: Monomial) -> Interval:
        result: Interval = (1, 1)
        position = 0
        while position < len(monomial):
            atom = monomial[position]
            power = monomial.count(atom)
            one = self.interval(atom)
            whole = one
            for _ in range(power - 1):
                whole = mul_intervals(whole, one)
            if power % 2 == 0:
                whole = meet(whole, (0, None))
            result = mul_intervals(result, whole)
            position += power               # monomials are sorted: equal atoms stand together
        return result

    # ------------------------------------------------------------ proofs

    def nonneg(self, node: Expr) -> bool:
        """Is node >= 0 for certain?"""
        found = self._nonneg.get(node)
        if found is None:
            self._nonneg[node] = False          # a question inside its own proof: not known
            found = self._nonneg[node] = self.prove(poly(node))
        return found

    def prove(self, terms: Poly) -> bool:
        """Is the sum of the terms >= 0 for certain?"""
        for _ in range(MAX_STEPS):
            low = self.interval_of_poly(terms)[0]
            if low is not None and low >= 0:
                return True
            if not self.ranges:
                return False        # nothing is known of any leaf: replacing atoms cannot help
            smaller = self._replace_one(terms)
            if smaller is None:
                return False
            terms = smaller
        return False

    def _replace_one(self, terms: Poly) -> Poly | None:
        """The terms with one atom replaced by the bound that makes the value smaller."""
        for atom in dict.fromkeys(atom for monomial in terms for atom in monomial):
            if atom.op == "symbol" and atom not in self.symbolic:
                continue
            factor, rest = _split(terms, atom)
            if factor is None:
                continue
            low, high = self.interval_of_poly(factor)
            bound = (self.symbolic_bound(atom, False) if low is not None and low >= 0 else
                     self.symbolic_bound(atom, True) if high is not None and high <= 0 else None)
            if bound is None:
                continue
            product = multiply(factor, poly(bound))
            if product is not None:
                return plus(rest, product)
        return self._without_a_quotient(terms)

    def _without_a_quotient(self, terms: Poly) -> Poly | None:
        """n*k*(x//k) is between n*(x - k + 1) and n*x."""
        for monomial, count in terms.items():
            if len(monomial) != 1 or monomial[0].op != "floordiv":
                continue
            x, k = map(as_size, monomial[0].args)
            if type(k) is int and k > 0 and count % k == 0 and all(monomial[0] not in other for other in terms if other is not monomial):
                n = count // k
                return plus({m: c for m, c in terms.items() if m is not monomial}, plus(poly(x), {(): 1 - k} if n > 0 else {}), n)
        return None

    def symbolic_bound(self, atom: Expr, upper: bool) -> Size | None:
        """An expression that the atom is never above (below), free of the atom; None if there is none."""
        key = (atom, upper)
        if key not in self._atoms:
            self._atoms[key] = None
            self._atoms[key] = self._symbolic_bound(atom, upper)
        return self._atoms[key]

    def _symbolic_bound(self, atom: Expr, upper: bool) -> Size | None:
        given = self.symbolic.get(atom, (None, None))[upper]
        if given is not None:
            return given
        number = self.interval(atom)[upper]
        if number is not None:
            return number
        row = SYMBOLIC_BOUNDS.get(atom.op)
        return None if row is None else row(self, atom, upper)

    def extreme(self, size: Size, upper: bool) -> Size | None:
        """A bound of a whole expression in terms of free symbols; None where a sign is not known."""
        if type(size) is int:
            return size
        terms = poly(size)
        sign = -1 if upper else 1
        terms = {monomial: sign * count for monomial, count in terms.items()}
        for _ in range(MAX_STEPS):
            smaller = self._replace_one(terms)
            if smaller is None:
                return from_poly({monomial: sign * count for monomial, count in terms.items()})
            terms = smaller
        return None

    # ------------------------------------------------------------ divisibility

    def divisor(self, size: Size) -> int:
        """A positive int that divides the value for certain (0 for the value 0)."""
        if type(size) is int:
            return abs(size)
        result = 0
        for monomial, count in poly(size).items():
            product = abs(count)
            for atom in monomial:
                product *= self._divisor_of_atom(atom)
            result = gcd(result, product)
        return result

    def _divisor_of_atom(self, atom: Expr) -> int:
        if atom.op in ("min", "max", "mod"):        # x % m differs from x by a multiple of m
            return gcd(*[self.divisor(as_size(arg)) for arg in atom.args]) or 1
        if atom.op == "where":
            return gcd(*[self.divisor(as_size(arg)) for arg in atom.args[1:]]) or 1
        return 1


def _split(terms: Poly, atom: Expr) -> tuple[Poly | None, Poly]:
    """(factor, rest) with terms == factor * atom + rest; factor None where the atom stands in a higher power."""
    factor: Poly = {}
    rest: Poly = {}
    for monomial, count in terms.items():
        left = without(monomial, (atom,))
        if left is None:
            rest[monomial] = count
        elif atom in left:
            return None, rest
        else:
            factor[left] = count
    return factor, rest


SYMBOLIC_BOUNDS: Table[Callable[[Bounds, Expr, bool], Size | None]] = Table("symbolic bound of an op", "sym/bounds.py")


@SYMBOLIC_BOUNDS.row("mod")
def _bound_mod(bounds: Bounds, atom: Expr, upper: bool) -> Size | None:
    """x % d <= d - 1 where d > 0."""
    divisor = as_size(atom.args[1])
    return bounds.context.sub(divisor, 1) if upper and bounds.context.positive(divisor) else None


@SYMBOLIC_BOUNDS.row("floordiv")
def _bound_floordiv(bounds: Bounds, atom: Expr, upper: bool) -> Size | None:
    """x // d <= max(x) // d where d > 0."""
    x, divisor = map(as_size, atom.args)
    if not bounds.context.positive(divisor):
        return None
    extreme = bounds.extreme(x, upper)
    return None if extreme is None or extreme is x else bounds.context.floordiv(extreme, divisor)


SYMBOLIC_BOUNDS.row("check_index")(lambda bounds, atom, upper: bounds.context.sub(as_size(atom.args[1]), 1) if upper else 0)
SYMBOLIC_BOUNDS.row("min")(lambda bounds, atom, upper: as_size(atom.args[0]) if upper else None)
SYMBOLIC_BOUNDS.row("max")(lambda bounds, atom, upper: None if upper else as_size(atom.args[0]))
