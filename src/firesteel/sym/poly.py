"""The canonical form of integer sums: a polynomial over atoms, kept on the node and collected term by term.

A Poly maps a monomial (a sorted tuple of atoms, with repetition; () is the constant) to an int other than 0.  An atom is any
integer Expr that is not a sum or a product.  `poly(x)` reads a Size, `from_poly(p)` makes the one Size for p: terms
sorted, the constant last.  Polys are shared: never change one that you did not just make.

    poly(2*n*m + 3)                 # {(m, n): 2, (): 3}
    from_poly({(n,): 0, (): 3})     # 3
"""
from __future__ import annotations

import functools

from firesteel.sym.node import Expr, Size, const, make, order, set_poly

Monomial = tuple[Expr, ...]
Poly = dict[Monomial, int]

EXPAND_LIMIT = 64       # a product with more terms than this stays a product: expanding many factors is exponential


def poly(size: Size) -> Poly:
    """The terms of a Size."""
    if type(size) is not Expr:
        return {(): size} if size else {}
    try:
        return size._poly
    except AttributeError:
        pass
    found = _read(size)
    set_poly(size, found)
    return found


def _read(node: Expr) -> Poly:
    if node.op == "const":
        return {(): node.attr} if node.attr else {}
    if node.dtype != "i64":
        raise TypeError(f"{node!r} of dtype {node.dtype} is not an integer expression")
    if node.op == "add":
        return _read_sum(node)
    if node.op == "mul":
        product = multiply(poly(node.args[0]), poly(node.args[1]))
        return {(node,): 1} if product is None else product
    if node.op == "sub":
        return plus(poly(node.args[0]), poly(node.args[1]), -1)
    if node.op == "neg":
        return scale(poly(node.args[0]), -1)
    return {(node,): 1}


def _read_sum(node: Expr) -> Poly:
    """Walks the left spine of adds without recursion: sums may be long."""
    right = []
    while node.op == "add" and not hasattr(node, "_poly"):
        right.append(node.args[1])
        node = node.args[0]
    total = dict(poly(node))
    for arg in right:
        accumulate(total, poly(arg))
    return total


def accumulate(total: Poly, other: Poly, factor: int = 1) -> None:
    """total += factor * other, in place."""
    for monomial, count in other.items():
        new = total.get(monomial, 0) + count * factor
        if new:
            total[monomial] = new
        else:
            total.pop(monomial, None)


def plus(a: Poly, b: Poly, factor: int = 1) -> Poly:
    """a + factor * b."""
    total = dict(a)
    accumulate(total, b, factor)
    return total


def scale(a: Poly, factor: int) -> Poly:
    return {monomial: count * factor for monomial, count in a.items()} if factor else {}


def join(a: Monomial, b: Monomial) -> Monomial:
    """The product of two monomials."""
    return tuple(sorted(a + b, key=order)) if a and b else a or b


def multiply(a: Poly, b: Poly) -> Poly | None:
    """a * b expanded; None when that has too many terms."""
    if len(a) * len(b) > EXPAND_LIMIT and len(a) > 1 and len(b) > 1:
        return None
    total: Poly = {}
    for left, m in a.items():
        for right, n in b.items():
            monomial = join(left, right)
            new = total.get(monomial, 0) + m * n
            if new:
                total[monomial] = new
            else:
                total.pop(monomial, None)
    return total


def without(monomial: Monomial, factors: Monomial) -> Monomial | None:
    """monomial / factors; None when it does not divide."""
    if not factors:
        return monomial
    if len(factors) > len(monomial):
        return None
    if len(monomial) == 1:
        return () if monomial[0] is factors[0] else None
    rest = list(monomial)
    for factor in factors:
        if factor not in rest:
            return None
        rest.remove(factor)
    return tuple(rest)


def divided(monomial: Monomial, factors: Monomial) -> Monomial:
    """monomial / factors, which are known to divide it."""
    rest = without(monomial, factors)
    assert rest is not None, (monomial, factors)
    return rest


def divide_by_term(a: Poly, monomial: Monomial, count: int) -> tuple[Poly, Poly]:
    """(q, r) with a == q * term + r, q taking every term that divides exactly."""
    quotient: Poly = {}
    rest: Poly = {}
    for term, n in a.items():
        left = without(term, monomial) if n % count == 0 else None
        if left is None:
            rest[term] = n
        else:
            quotient[left] = n // count
    return quotient, rest


def _leading(a: Poly) -> Monomial:
    return max(a, key=lambda m: (len(m), sort_key(m)))


def divide_exactly(a: Poly, b: Poly) -> Poly | None:
    """q with a == q * b, where there is one (multivariate long division)."""
    lead = _leading(b)
    quotient: Poly = {}
    rest = dict(a)
    for _ in range(4 * len(a) + 16):        # more steps than that is no simplification
        if not rest:
            return quotient
        top = _leading(rest)
        left = without(top, lead)
        if left is None or rest[top] % b[lead]:
            return None
        count = rest[top] // b[lead]
        quotient[left] = count
        accumulate(rest, {join(left, m): n for m, n in b.items()}, -count)
    return None


def _term(monomial: Monomial, count: int) -> Expr:
    node = monomial[0]
    for atom in monomial[1:]:
        node = make("mul", "i64", (node, atom))
    return node if count == 1 else make("mul", "i64", (node, const(count)))


@functools.cache
def sort_key(monomial: Monomial) -> tuple:
    """Monomials in the order in which they are written."""
    return tuple([order(atom) for atom in monomial])


def from_poly(terms: Poly) -> Size:
    """The canonical Size of a Poly; keeps the Poly, so the caller must not change it afterwards."""
    if not terms:
        return 0
    if len(terms) == 1:
        (monomial, count), = terms.items()
        if not monomial:
            return count
        node = _term(monomial, count)
    else:
        monomials = [m for m in terms if m]
        if len(monomials) > 1:
            monomials.sort(key=sort_key)
        node = _term(monomials[0], terms[monomials[0]])
        for monomial in monomials[1:]:
            node = make("add", "i64", (node, _term(monomial, terms[monomial])))
        if () in terms:
            node = make("add", "i64", (node, const(terms[()])))
    if not hasattr(node, "_poly"):
        set_poly(node, terms)
    return node
