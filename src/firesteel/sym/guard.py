"""Guard: a condition on symbols under which compiled code is valid; and the least list of guards that says the same as a longer one.

    least([s0 >= 0, s1 >= 0], [s0 != 0, s0 != 1, s1 <= 8, s1 <= 12])      # s0 >= 2, s1 <= 8
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from firesteel.errors import Location
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, ge, le, python_text, substitute
from firesteel.sym.rewrite import Context

RANGE = "a bound that every symbol of its kind has"        # why a declared range is guarded


@dataclass(frozen=True, slots=True)
class SizeGuard:
    """`expr` must be true for the compiled code to be valid; asked for at `location` because of `why`."""
    expr: Expr
    location: Location | None = field(default=None, compare=False)
    why: str = field(default="", compare=False)

    def text(self, names: Mapping[str, str] | None = None) -> str:
        """Python source of the check; `names` says how each symbol is spelled."""
        return python_text(self.expr, names)


def least(declared: Sequence[SizeGuard], recorded: Sequence[SizeGuard]) -> list[SizeGuard]:
    """Bounds first, merged, then what does not follow from others.  Of the declared ranges, that no size is negative need not be checked."""
    ranges, rest = _merge_ranges([*declared, *recorded])
    while len(rest) > len(rest := [guard for guard in rest if not _moves_an_end(ranges, guard)]):
        pass        # `!= 1` moves an end only once `!= 0` has
    context = Context({leaf: tuple(side and side[0] for side in sides) for leaf, sides in ranges.items()})
    fixed = dict(pair for pair in map(_fixed_value, rest) if pair is not None)
    rest = [guard for guard in dict.fromkeys(rest) if context.simplify(guard.expr) is not True and
            (guard.expr.op == "eq" or context.simplify(substitute(guard.expr, fixed)) is not True)]
    certain = {guard for guard in declared if type(guard.expr) is Expr and (_simple_bound(guard.expr) or (None,))[1:] == (0, False)}
    return [*[side[1] for sides in ranges.values() for side in sides if side is not None and side[1] not in certain], *rest]


def _merge_ranges(guards: list[SizeGuard]) -> tuple[dict[Expr, list], list[SizeGuard]]:
    """symbol -> [(lo, guard) or None, (hi, guard) or None] with the tightest numbers; and the guards that are no ranges."""
    ranges: dict[Expr, list] = {}
    rest = []
    for guard in guards:
        found = _simple_bound(guard.expr) if type(guard.expr) is Expr else None
        if found is None:
            rest.append(guard)
            continue
        leaf, bound, upper = found
        sides = ranges.setdefault(leaf, [None, None])
        if sides[upper] is None or (bound < sides[upper][0] if upper else bound > sides[upper][0]):
            sides[upper] = (bound, guard)
    return ranges, rest


def _moves_an_end(ranges: dict[Expr, list], guard: SizeGuard) -> bool:
    """Does it say that a symbol is not the end of its range?  Then the range is made smaller."""
    if type(guard.expr) is not Expr or guard.expr.op != "ne":
        return False
    for leaf, value in (guard.expr.args, guard.expr.args[::-1]):
        for upper, side in enumerate(ranges.get(leaf, ())):
            if side is not None and value.op == "const" and value.attr == side[0]:
                bound = side[0] - 1 if upper else side[0] + 1
                ranges[leaf][upper] = (bound, SizeGuard(le(leaf, bound) if upper else ge(leaf, bound), guard.location, guard.why))
                return True
    return False


def _fixed_value(guard: SizeGuard) -> tuple[Expr, Any] | None:
    """(expression, number) of a guard that says they are equal."""
    if type(guard.expr) is not Expr or guard.expr.op != "eq":
        return None
    left, right = guard.expr.args
    return (left, right.attr) if right.op == "const" else (right, left.attr) if left.op == "const" else None


def _simple_bound(expr: Expr) -> tuple[Expr, int, bool] | None:
    """(symbol, number, is it an upper bound?) of `s <= 5` and `s >= 5`."""
    if expr.op != "le":
        return None
    left, right = expr.args
    if left.op == "symbol" and right.op == "const":
        return left, right.attr, True
    if left.op == "const" and right.op == "symbol":
        return right, left.attr, False
    return None
