"""The rewrite rules of sums, products and divisions, one row each; `sym/rewrite.py` applies them.

Rows of an op are tried in the order in which they stand.  `c` is the context (ranges of the leaves); a `None` result means
that the rule does not apply.  Every division assumes a divisor other than 0, as eager raises there; everything else holds for
all integers.  Note [Floor]: `//` rounds towards minus infinity, so for all integers x, y and positive p, q

    (p*y + r) // p == y + r // p        (x // p) // q == x // (p*q)        x == (x // p) * p + x % p

and each rule below is one of these facts, or 0 <= r < p.
"""
from __future__ import annotations

from math import gcd

from firesteel.sym.node import Expr, Size, as_expr, as_size, make, order
from firesteel.sym.poly import (
    Monomial,
    Poly,
    accumulate,
    divide_by_term,
    divide_exactly,
    divided,
    from_poly,
    multiply,
    plus,
    poly,
    scale,
    without,
)
from firesteel.sym.rewrite import Context, rule, sum_builder

# ---------------------------------------------------------------- sums and products


rule("add", "x + y: collected terms; k*(x//d)*d + k*(x%d) -> k*x")(lambda c, a, b: sum_of_terms(c, plus(poly(a), poly(b))))
rule("sub", "x - y: collected terms")(lambda c, a, b: sum_of_terms(c, plus(poly(a), poly(b), -1)))
rule("neg", "-x: collected terms")(lambda c, a: from_poly(scale(poly(a), -1)))


@rule("mul", "x * y: expanded and collected, unless that has too many terms")
def mul(c: Context, a: Size, b: Size) -> Size:
    product = multiply(poly(a), poly(b))
    if product is not None:
        return sum_of_terms(c, product)
    left, right = sorted((as_expr(a), as_expr(b)), key=order)
    return make("mul", "i64", (left, right))


@sum_builder
def sum_of_terms(c: Context, terms: Poly) -> Size:
    """k*(x//d)*d + k*(x%d) becomes k*x, as long as there is one."""
    while True:
        found = _find_divmod(c, terms)
        if found is None:
            return from_poly(terms)
        terms = found


def _find_divmod(c: Context, terms: Poly) -> Poly | None:
    for monomial, count in terms.items():
        for atom in monomial:
            if not atom.args:
                continue
            joined = None
            if atom.op == "mod":
                joined = _join_one(c, terms, monomial, count, atom)
            elif atom.op == "floordiv" and c.facts:
                joined = _undo_exact_division(c, terms, monomial, count, atom)
            if joined is not None:
                return joined
    return None


def _undo_exact_division(c: Context, terms: Poly, monomial: Monomial, count: int, atom: Expr) -> Poly | None:
    """d*(x//d) becomes x - r, where x % d is known to be r."""
    x, d = map(as_size, atom.args)
    term = single_term(d)
    rest = without(divided(monomial, (atom,)), term[0]) if term else None
    if term is None or rest is None or count % term[1]:
        return None
    remainder = c.mod(x, d)
    if type(remainder) is not int:
        return None
    whole = multiply({rest: count // term[1]}, poly(c.sub(x, remainder)))
    return None if whole is None else plus({m: n for m, n in terms.items() if m != monomial}, whole)


def _join_one(c: Context, terms: Poly, monomial: Monomial, count: int, atom: Expr) -> Poly | None:
    """Replaces count*rest*(x%d) and count*rest*d*(x//d) by count*rest*x, if the second is there too."""
    x, divisor = map(as_size, atom.args)
    rest = {divided(monomial, (atom,)): count}
    quotient = c.mul(c.floordiv(x, divisor), divisor)
    wanted = multiply(rest, poly(quotient))
    if not wanted or any(_share(terms.get(m, 0), k) == 0 for m, k in wanted.items() if m):
        return None
    whole = multiply(rest, poly(x))
    if whole is None:
        return None
    result = plus(terms, wanted, -1)
    accumulate(result, {monomial: count}, -1)
    accumulate(result, whole)
    return result


def _share(have: int, wanted: int) -> int:
    """How often `wanted` is contained in `have`, at most once."""
    return 1 if have * wanted > 0 and abs(have) >= abs(wanted) else 0


# ---------------------------------------------------------------- floor division

def single_term(divisor: Size) -> tuple[Monomial, int] | None:
    """(monomial, factor) of a divisor with one term."""
    terms = poly(divisor)
    return next(iter(terms.items())) if len(terms) == 1 else None


@rule("floordiv", "x // 1 -> x;  x // -k -> (-x) // k")
def floordiv_sign(c: Context, x: Size, d: Size) -> Size | None:
    if type(d) is not int:
        return None
    if d == 0:
        raise ZeroDivisionError(f"{x!r} // 0")
    if d == 1:
        return x
    return c.floordiv(c.sub(0, x), -d) if d < 0 else None


@rule("floordiv", "(d*y + r) // d -> y + r // d")
def floordiv_split(c: Context, x: Size, d: Size) -> Size | None:
    term = single_term(d)
    if term is None:
        quotient = divide_exactly(poly(x), poly(d))
        return from_poly(quotient) if quotient is not None else None
    quotient, rest = divide_by_term(poly(x), *term)
    return c.add(from_poly(quotient), c.floordiv(from_poly(rest), d)) if quotient else None


@rule("floordiv", "(k*x + j) // (k*d) -> (x + j//k) // d where d > 0 or j % k == 0")
def floordiv_common(c: Context, x: Size, d: Size) -> Size | None:
    common = _without_common(c, x, d)
    return None if common is None else c.floordiv(*common[:2])


def _without_common(c: Context, x: Size, d: Size) -> tuple[Size, Size, Size, int] | None:
    """(x + j//k, d, k, j % k) of k*x + j and k*d: k is an int > 0 that divides all terms but the constant, times atoms that divide all terms."""
    term = single_term(d)
    if term is None:
        return None
    terms = poly(x)
    k = gcd(term[1], *[count for monomial, count in terms.items() if monomial])
    shared = _shared_atoms(terms, term[0])
    if k == 1 and not shared:
        return None
    d = from_poly({divided(term[0], shared): term[1] // k})
    rest = terms.get((), 0) % k
    if rest and not c.positive(d):
        return None         # rounding j/k down first is right for a positive divisor only
    numerator = {divided(m, shared): count // k for m, count in terms.items() if count // k}
    return from_poly(numerator), d, from_poly({shared: k}), rest


def _shared_atoms(terms: Poly, factors: Monomial) -> Monomial:
    """The atoms of `factors` that divide every term."""
    shared: list[Expr] = []
    rest = list(terms)
    for atom in factors:
        if rest and all(atom in m for m in rest):
            shared.append(atom)
            rest = [divided(m, (atom,)) for m in rest]
    return tuple(shared)


@rule("floordiv", "(r + y % d) // d -> (r + y) // d - y // d where d divides r + y")
def floordiv_with_mod(c: Context, x: Size, d: Size) -> Size | None:
    """What is filled up to a multiple: (n + -n % 4) // 4."""
    if type(d) is not int:
        return None
    for monomial, count in poly(x).items():
        if count == 1 and len(monomial) == 1 and monomial[0].op == "mod" and as_size(monomial[0].args[1]) == d:
            y = as_size(monomial[0].args[0])
            whole = c.add(from_poly({m: n for m, n in poly(x).items() if m is not monomial}), y)
            if c.bounds.divisor(whole) % d == 0:
                return c.sub(c.floordiv(whole, d), c.floordiv(y, d))
    return None


@rule("floordiv", "x // d -> q where lo//d == hi//d == q")
def floordiv_constant(c: Context, x: Size, d: Size) -> Size | None:
    if type(d) is not int:
        return None
    low, high = c.bounds.interval(x)
    return low // d if low is not None and high is not None and low // d == high // d else None


@rule("floordiv", "x // d -> 0 where 0 <= x < d;  -> -1 where -d <= x < 0")
def floordiv_small(c: Context, x: Size, d: Size) -> Size | None:
    if type(x) is int and x == 0:
        return 0
    if c.nonneg(x):
        return 0 if c.less(x, d) else None
    return -1 if c.less(x, 0) and c.positive(d) and c.nonneg(c.add(x, d)) else None


@rule("floordiv", "(x // p) // q -> x // (p*q) where p, q > 0")
def floordiv_nested(c: Context, x: Size, d: Size) -> Size | None:
    if type(x) is not Expr or x.op != "floordiv":
        return None
    inner, p = map(as_size, x.args)
    return c.floordiv(inner, c.mul(p, d)) if c.positive(p) and c.positive(d) else None


@rule("floordiv", "(x % (p*q)) // q -> (x // q) % p where p, q > 0")
def floordiv_of_mod(c: Context, x: Size, d: Size) -> Size | None:
    if type(x) is not Expr or x.op != "mod":
        return None
    inner, modulus = map(as_size, x.args)
    p = exact_quotient(modulus, d)
    if p is None or not (c.positive(d) and c.positive(p)):
        return None
    return c.mod(c.floordiv(inner, d), p)


@rule("floordiv", "(p*y + r) // (p*q) -> y // q where 0 <= r < p and p, q > 0")
def floordiv_peel(c: Context, x: Size, d: Size) -> Size | None:
    for p, q, term in _factorings(x, d):
        quotient, rest = divide_by_term(poly(x), *term)
        if quotient and _is_remainder(c, from_poly(rest), p) and c.positive(p) and c.positive(q):
            return c.floordiv(from_poly(quotient), q)
    return None


def _is_remainder(c: Context, r: Size, p: Size) -> bool:
    return c.nonneg(r) and c.less(r, p)


def _factorings(x: Size, d: Size) -> list[tuple[Size, Size, tuple[Monomial, int]]]:
    """Ways to write d as p*q with p dividing some term of x, neither p nor q being 1; p is one term, which comes third."""
    term = single_term(d)
    if term is None:
        return []
    monomial, count = term
    ways: dict[Size, tuple[Size, Size, tuple[Monomial, int]]] = {}
    for terms, n in poly(x).items():
        k = gcd(n, count)
        atoms = _common(terms, monomial)
        p = from_poly({atoms: k})
        if p != 1 and p is not d and p != d:
            ways[p] = p, from_poly({divided(monomial, atoms): count // k}), (atoms, k)
    return list(ways.values())


def _common(a: Monomial, b: Monomial) -> Monomial:
    """The greatest common divisor of two monomials."""
    rest, shared = list(b), []
    for atom in a:
        if atom in rest:
            rest.remove(atom)
            shared.append(atom)
    return tuple(shared)


def exact_quotient(a: Size, b: Size) -> Size | None:
    """a / b where b divides a term by term."""
    if b == 0:
        return None
    quotient = divide_exactly(poly(a), poly(b))
    return None if quotient is None else from_poly(quotient)


# ---------------------------------------------------------------- remainder

@rule("mod", "x % 1 -> 0;  x % -k -> -((-x) % k)")
def mod_sign(c: Context, x: Size, d: Size) -> Size | None:
    if type(d) is not int:
        return None
    if d == 0:
        raise ZeroDivisionError(f"{x!r} % 0")
    if d == 1:
        return 0
    return c.sub(0, c.mod(c.sub(0, x), -d)) if d < 0 else None


@rule("mod", "(d*y + r) % d -> r % d")
def mod_split(c: Context, x: Size, d: Size) -> Size | None:
    term = single_term(d)
    if term is None:
        return 0 if divide_exactly(poly(x), poly(d)) is not None else None
    quotient, rest = divide_by_term(poly(x), *term)
    if not term[0]:         # a number: (5*x + 9) % 4 -> (x + 1) % 4
        rest = {m: count % term[1] if abs(count) >= term[1] or not m else count for m, count in rest.items()}
    return None if rest == poly(x) else c.mod(from_poly(rest), d)


@rule("mod", "(k*x + j) % (k*d) -> k*((x + j//k) % d) + j%k where d > 0 or j % k == 0")
def mod_common(c: Context, x: Size, d: Size) -> Size | None:
    common = _without_common(c, x, d)
    return None if common is None else c.add(c.mul(c.mod(*common[:2]), common[2]), common[3])


@rule("mod", "x % d -> x - d*(x//d) where x // d is a known number")
def mod_constant(c: Context, x: Size, d: Size) -> Size | None:
    found = floordiv_constant(c, x, d)
    if found is None:
        found = floordiv_small(c, x, d)
    return None if found is None else c.sub(x, c.mul(found, d))


@rule("mod", "(k*(x % (p*d)) + y) % d -> (k*x + y) % d")
def mod_nested(c: Context, x: Size, d: Size) -> Size | None:
    terms = poly(x)
    for monomial, count in terms.items():
        for atom in monomial:
            if atom.op == "mod" and exact_quotient(as_size(atom.args[1]), d) is not None:
                rest = {m: n for m, n in terms.items() if m is not monomial}
                whole = multiply({divided(monomial, (atom,)): count}, poly(as_size(atom.args[0])))
                if whole is not None:
                    return c.mod(from_poly(plus(rest, whole)), d)
    return None


@rule("mod", "(p*y + r) % (p*q) -> p*(y % q) + r where 0 <= r < p and p, q > 0")
def mod_peel(c: Context, x: Size, d: Size) -> Size | None:
    for p, q, term in _factorings(x, d):
        quotient, rest = divide_by_term(poly(x), *term)
        r = from_poly(rest)
        if quotient and _is_remainder(c, r, p) and c.positive(p) and c.positive(q):
            return c.add(c.mul(c.mod(from_poly(quotient), q), p), r)
    return None
