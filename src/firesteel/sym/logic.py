"""The rewrite rules of choices, comparisons and logic, one row each; `sym/rewrite.py` applies them.

Of the comparisons of integers only `eq`, `ne` and `le` remain, with all terms positive and without common factor, so that
equal questions are the same node: `2*n < 5`, `n <= 2` and `not n > 2` are one.
"""
from __future__ import annotations

from math import gcd

from firesteel.sym.node import Expr, Size, as_expr, as_size, make, order
from firesteel.sym.poly import Poly, divided, from_poly, plus, poly, scale, sort_key
from firesteel.sym.rewrite import Context, rule

# ---------------------------------------------------------------- minimum, maximum, choice

rule("min", "min(x, y) -> the one that is known to be smaller; sorted")(lambda c, a, b: _pick(c, "min", a, b, c.sub(b, a)))
rule("max", "max(x, y) -> the one that is known to be greater; sorted")(lambda c, a, b: _pick(c, "max", a, b, c.sub(a, b)))


def _pick(c: Context, op: str, a: Size, b: Size, gap: Size) -> Size | None:
    """`gap` >= 0 means that a is the answer."""
    if c.nonneg(gap):
        return a
    if c.nonneg(c.sub(0, gap)):
        return b
    left, right = as_expr(a), as_expr(b)
    if left.op == op and right in left.args:
        return a
    if right.op == op and left in right.args:
        return b
    if left.op == "const" or (right.op != "const" and order(right) < order(left)):
        return c.build(op, b, a)
    return None


@rule("abs", "abs(x) -> x where x >= 0;  -> -x where x <= 0")
def abs_(c: Context, a: Size) -> Size | None:
    if c.nonneg(a):
        return a
    minus = c.sub(0, a)
    if c.nonneg(minus):
        return minus
    return c.build("abs", minus) if _first_negative(a) and not _first_negative(minus) else None


def _first_negative(a: Size) -> bool:
    """Of x and -x, one has a negative first term: the other is the canonical one."""
    terms = poly(a)
    first = min((m for m in terms if m), key=sort_key)
    return terms[first] < 0


@rule("where", "where(True, x, y) -> x;  where(c, x, x) -> x;  where(not c, x, y) -> where(c, y, x);  of bools -> (c and x) or (not c and y)")
def where(c: Context, condition: Size, yes: Size, no: Size) -> Size | None:
    if type(condition) is not Expr:
        return yes if condition else no
    if _is_truth(yes) and _is_truth(no):
        return c.build("or", c.build("and", condition, yes), c.build("and", c.build("not", condition), no))
    if yes is no or (type(yes) is int and type(no) is int and yes == no):
        return yes
    if condition.op == "not":
        return c.build("where", condition.args[0], no, yes)
    return None


def _is_truth(value: Size) -> bool:
    return type(value) is bool or type(value) is Expr and value.dtype == "bool"


@rule("pow", "x ** k -> x * x * ...")
def pow_(c: Context, x: Size, k: Size) -> Size | None:
    if type(k) is not int or not 0 <= k <= 4:
        return None
    result: Size = 1
    for _ in range(k):
        result = c.mul(result, x)
    return result


rule("lshift", "x << k -> x * 2**k")(lambda c, x, k: c.mul(x, 1 << k) if type(k) is int and k >= 0 else None)
rule("rshift", "x >> k -> x // 2**k")(lambda c, x, k: c.floordiv(x, 1 << k) if type(k) is int and k >= 0 else None)


# ---------------------------------------------------------------- comparisons: only eq, ne and le remain

def _divide_gap(terms: Poly) -> tuple[Poly, int]:
    """The terms without their constant, divided by their common factor; and that factor."""
    factor = gcd(*[count for monomial, count in terms.items() if monomial])
    return {m: count // factor for m, count in terms.items() if m}, factor


def _cancel(c: Context, terms: Poly) -> Poly:
    """The terms without the factors that all of them share and that are positive: n*x <= n*y asks x <= y."""
    if len(terms) < 2 or () in terms:
        return terms
    for atom in next(iter(terms)):
        if all(atom in monomial for monomial in terms) and c.positive(atom):
            return _cancel(c, {divided(monomial, (atom,)): count for monomial, count in terms.items()})
    return terms


def _two_sides(terms: Poly, constant: int) -> tuple[Size, Size]:
    """(left, right) such that `left <= right` says terms + constant >= 0, without negative factors."""
    left = {m: -count for m, count in terms.items() if count < 0}
    right = {m: count for m, count in terms.items() if count > 0}
    if constant:
        # the number stands alone if one side is empty, otherwise where it is positive
        on_right = not right if not (left and right) else constant > 0
        (right if on_right else left)[()] = constant if on_right else -constant
    return from_poly(left), from_poly(right)


def _without_quotients(gap: Poly) -> Poly:
    """The same question without x//k, for numbers k > 0: x//k + r >= 0 asks x + k*r >= 0, and r - x//k >= 0 asks k*r + k - 1 - x >= 0."""
    for monomial, count in gap.items():
        atom = monomial[0] if len(monomial) == 1 and count in (1, -1) else None
        if atom is None or atom.op != "floordiv" or any(atom in other for other in gap if other is not monomial):
            continue
        x, k = map(as_size, atom.args)
        if type(k) is int and k > 0:
            rest = scale({m: n for m, n in gap.items() if m is not monomial}, k)
            return _without_quotients(plus(plus(rest, poly(x), count), {(): k - 1} if count < 0 else {}))
    return gap


@rule("le", "x <= y: one form for all equal questions, or the answer")
def le(c: Context, a: Size, b: Size) -> Size | bool | None:
    gap = _without_quotients(plus(poly(b), poly(a), -1))
    constant = gap.get((), 0)
    if len(gap) == (constant != 0):
        return constant >= 0
    if constant in (0, -1):     # n*g >= 0 and n*g >= 1 ask the same of g, if n > 0
        gap = plus(_cancel(c, {m: count for m, count in gap.items() if m}), {(): constant} if constant else {})
        constant = gap.get((), 0)
    if c.bounds.prove(gap):
        return True
    terms, factor = _divide_gap(gap)
    constant //= factor
    if c.bounds.prove(plus(scale(terms, -1), {(): -constant - 1})):
        return False
    left, right = _two_sides(terms, constant)
    return c.known(make("le", "bool", (as_expr(left), as_expr(right))))


rule("lt", "x < y -> x + 1 <= y")(lambda c, a, b: c.build("le", c.add(a, 1), b))


@rule("eq", "x == y: one form for all equal questions, or the answer")
def eq(c: Context, a: Size, b: Size) -> Size | bool | None:
    if _is_truth(a) or _is_truth(b):
        return _eq_bool(c, a, b)
    gap = _prefer_mod(c, _cancel(c, plus(poly(b), poly(a), -1)))
    constant = gap.get((), 0)
    if len(gap) == (constant != 0):
        return constant == 0
    terms, factor = _divide_gap(gap)
    if constant % factor:
        return False
    constant //= factor
    whole = dict(terms)
    if constant:
        whole[()] = constant
    if c.bounds.prove(plus(whole, {(): -1})) or c.bounds.prove(plus(scale(whole, -1), {(): -1})):
        return False
    first = min(terms, key=sort_key)
    if terms[first] > 0:
        terms, constant = scale(terms, -1), -constant
    left, right = _two_sides(terms, constant)
    return c.known(make("eq", "bool", (as_expr(left), as_expr(right))))


def _prefer_mod(c: Context, gap: Poly) -> Poly:
    """x - d*(x//d) is x % d: `x == x//8*8` is the question `x % 8 == 0`."""
    for monomial in gap:
        for atom in monomial:
            if atom.op == "floordiv":
                x, d = map(as_size, atom.args)
                whole = poly(c.sub(x, c.mul(d, atom)))
                if gap == whole or gap == scale(whole, -1):
                    return poly(c.mod(x, d))
    return gap


rule("ne", "x != y -> not (x == y)")(lambda c, a, b: c.build("not", c.build("eq", a, b)))


def _eq_bool(c: Context, a: Size, b: Size) -> Size | bool | None:
    if a is b:
        return True
    for known, other in ((a, b), (b, a)):
        if type(known) is bool:
            return other if known else c.build("not", other)
    return None


# ---------------------------------------------------------------- logic

@rule("not", "not not x -> x;  not (x <= y) -> y + 1 <= x;  not (x == y) -> x != y")
def not_(c: Context, a: Expr) -> Size | bool | None:
    args = a.args
    if a.op == "not":
        return args[0]
    if a.op == "le" and args[0].dtype == "i64":
        return c.build("le", c.add(as_size(args[1]), 1), as_size(args[0]))
    if a.op == "eq":
        return c.known(make("ne", "bool", args))
    return c.known(make("eq", "bool", args)) if a.op == "ne" else None


rule("and", "True and x -> x;  False and x -> False;  x and x -> x;  sorted")(lambda c, a, b: _connect(c, "and", a, b, True))
rule("or", "False or x -> x;  True or x -> True;  x or x -> x;  sorted")(lambda c, a, b: _connect(c, "or", a, b, False))


def _connect(c: Context, op: str, a: Size, b: Size, neutral: bool) -> Size | bool | None:
    for known, other in ((a, b), (b, a)):
        if type(known) is bool:
            return other if known is neutral else known
    assert type(a) is Expr and type(b) is Expr, (a, b)
    if a is b or a in b.args:
        return b if a is b or b.op == op else None
    if b in a.args and a.op == op:
        return a
    if c.build("not", a) is b:
        return not neutral
    return c.build(op, b, a) if order(b) < order(a) else None
