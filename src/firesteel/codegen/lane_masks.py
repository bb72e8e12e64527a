"""Masks of lanes: which of them exist, and which places along them are inside of a bound.

`i + 3 <= n` of an axis whose values the lanes are holds for the first lanes, `n <= i` for the last: how many is one number, and the compare is of
the lanes' own numbers, in the smallest integers that can count them.  Places compared in 64 bits took 8 registers where this takes one.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from firesteel.sym.expr import Expr

if TYPE_CHECKING:
    from firesteel.codegen.llvm_code import LlvmFunction

FAR = 1 << 40           # places beyond which sums of axes and constants are not trusted to stay inside of 64 bits


def iota(lanes: int, ty: str = "i64") -> str:
    return "<" + ", ".join(f"{ty} {k}" for k in range(lanes)) + ">"


def smaller(w: LlvmFunction, a: str, b: str) -> str:
    return w.new(f"select i1 {w.new(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")


def first_lanes(w: LlvmFunction, count: str, width: int) -> str:
    """The mask of the first `count` lanes, compared in the smallest integers that can count them and fill a register: the compare of
    a shorter vector is widened, and then true for lanes that do not exist."""
    return _counted(w, "ult", smaller(w, count, str(width)), width)


def _counted(w: LlvmFunction, how: str, count: str, width: int) -> str:
    """Compares the lanes' numbers with a count between 0 and all of them."""
    bits = max(8 if width <= 64 else 16, 128 // width)
    small = f"i{bits}"
    left = count if bits == 64 else w.new(f"trunc i64 {count} to {small}")
    return w.new(f"icmp {how} <{width} x {small}> {iota(width, small)}, {w.spread(left, small, width)}")


# ---------------------------------------------------------------- places and bounds

def inside(w: LlvmFunction, node: Expr) -> str | None:
    """The mask of a comparison (`lt` or `le` of int64) of which one side follows the lanes and the other is one number; None of any other."""
    low, high = node.args
    if node.op not in ("lt", "le") or low.dtype != "i64" or not w.width:
        return None
    first = w.memo[low].lanes != 0
    if first and w.memo[high].lanes:
        return None
    varying, bound = (low, high) if first else (high, low)
    place = _Place(w)
    if not place.add(varying, 1) or place.step < 1:
        return None
    room = _saturating(w, "sub", w.memo[bound].name, place.start())
    if first == (node.op == "le"):          # i <= n: one more than n - i;  n < i: one more too
        room = _saturating(w, "add", room, "1")
    most = place.step * w.width
    count = _intrinsic(w, "smin", _intrinsic(w, "smax", room, "0"), str(most))
    if place.step > 1:
        count = w.new(f"udiv i64 {w.new(f'add i64 {count}, {place.step - 1}')}, {place.step}")
    return _counted(w, "ult" if first else "uge", count, w.width)


def _saturating(w: LlvmFunction, op: str, a: str, b: str) -> str:
    return _intrinsic(w, f"s{op}.sat", a, b)


def _intrinsic(w: LlvmFunction, name: str, a: str, b: str) -> str:
    full = w.declare(f"@llvm.{name}.i64", f"i64 @llvm.{name}.i64(i64, i64)")
    return w.new(f"call i64 {full}(i64 {a}, i64 {b})")


class _Place:
    """A sum of axes and constants: its step from lane to lane, and the parts of the first lane's value."""

    def __init__(self, w: LlvmFunction):
        self.w, self.step, self.constant = w, 0, 0
        self.axes: dict[str, int] = {}

    def add(self, node: Expr, scale: int) -> bool:
        """Takes a term in; False where it is none of these."""
        term = _TERMS.get(node.op)
        return term is not None and abs(scale) < FAR and term(self, node, scale)

    def _const(self, node: Expr, scale: int) -> bool:
        self.constant += node.attr * scale
        return abs(node.attr * scale) < FAR

    def _axis(self, node: Expr, scale: int) -> bool:
        self.axes[node.attr] = self.axes.get(node.attr, 0) + scale
        self.step += scale if node.attr == self.w.lane_axis else 0
        return True

    def _sum(self, node: Expr, scale: int) -> bool:
        return all(self.add(arg, scale) for arg in node.args)

    def _difference(self, node: Expr, scale: int) -> bool:
        return self.add(node.args[0], scale) and self.add(node.args[1], -scale)

    def _product(self, node: Expr, scale: int) -> bool:
        factors = [arg.attr for arg in node.args if arg.op == "const"]
        rest = [arg for arg in node.args if arg.op != "const"]
        return len(factors) == len(rest) == 1 and self.add(rest[0], scale * factors[0])

    def start(self) -> str:
        total = str(self.constant)
        for name, scale in self.axes.items():
            value = self.w.memo["axis", name].name
            total = self.w.new(f"add i64 {total}, {value if scale == 1 else self.w.new(f'mul i64 {value}, {scale}')}")
        return total


_TERMS: dict[str, Callable[..., bool]] = {
    "const": _Place._const, "axis": _Place._axis, "add": _Place._sum, "sub": _Place._difference, "mul": _Place._product,
}
