"""Checks of indices survive what is done to the element that they name.

An element that does not depend on its index (of a constant tensor, of an expanded one, along a dimension of size 1) is computed without it; the
index must still be in range.  `keep_checks` puts the checks that a value lost back around it.

    keep_checks(const(0.0), (check_index(load(idx, i), 4),))        # where(check_index(where(-4 <= idx[i] < 4, 1, 2), 2) == 1, 0.0, 0.0)
"""
from __future__ import annotations

from collections.abc import Iterable

from firesteel.loops.ir import CHECKING, check_index, zero
from firesteel.loops.scalars import S, literal
from firesteel.sym.expr import Expr, make, postorder


def keep_checks(value: Expr, index: Iterable[Expr | int]) -> Expr:
    """The value, made to depend on every check_index of `index` that it does not hold."""
    checked = [part for part in index if type(part) is Expr and part.holds & CHECKING]
    wanted = [node for part in checked for node in postorder(part, only=CHECKING) if node.op == "check_index"]
    if not wanted:
        return value
    held = set(postorder(value, only=CHECKING))
    for check in dict.fromkeys(wanted):
        if check not in held:
            value = make("where", value.dtype, (S.eq(as_choice(check), 1), value, zero(value.dtype)))
    return value


def as_choice(check: Expr) -> Expr:
    """The same check as a number that is 1 wherever it passes, and of which no bound says so: it is not simplified away."""
    index, size = check.args
    least = 0 if check.attr == "strict" else S.neg(size)
    return check_index(S.where(S.and_(S.ge(index, least), S.lt(index, size)), literal(1, "i64"), 2), 2, strict=True)
