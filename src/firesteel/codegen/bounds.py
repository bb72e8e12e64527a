"""What is known about the integers of a nest: which are never negative, and how large they get.

Used to pick cheap division and narrow index types.  The arithmetic is that of `sym/bounds.py`; what is made of data may wrap around, so an
interval that does not fit an int64 says nothing there.  An axis is in [0, extent); None is no bound (a symbolic extent).

    NestIntervals(nest).of(axis("a0") * 4)      # (0, 4 * (extent - 1))
"""
from __future__ import annotations

from math import inf

from firesteel.codegen.flat import FlatNest
from firesteel.sym.bounds import INTERVALS, Interval
from firesteel.sym.expr import Expr, postorder

INT64: Interval = (-2**63, 2**63 - 1)


class NestIntervals:
    def __init__(self, nest: FlatNest):
        self.extents = {a.name: a.extent for a in (*nest.axes, *(a for p in nest.phases for a in p.axes))}
        self.known: dict[Expr, Interval] = {}
        self.exact: set[Expr] = set()       # made of axes and constants alone: these do not wrap around

    def of(self, root: Expr) -> Interval:
        """(least, greatest) value of an integer; None where there is no bound."""
        for node in postorder(root, known=self.known):
            self.known[node] = self._of(node)
        return self.known[root]

    def _of(self, node: Expr) -> Interval:
        if node.op in ("const", "axis") or node.args and self.exact.issuperset(node.args):
            self.exact.add(node)
        if node.op == "const":
            return (node.attr, node.attr) if type(node.attr) is int else INT64
        if node.op == "axis":
            extent = self.extents[node.attr]
            return 0, extent - 1 if isinstance(extent, int) else None
        row = INTERVALS.get(node.op) if node.dtype == "i64" else None
        found = INT64 if row is None else row(*[self.known[arg] for arg in node.args])
        return found if node in self.exact or _inside(found, *INT64) else INT64

    def natural(self, node: Expr) -> bool:
        """Are all its arguments never negative?"""
        return all(low is not None and low >= 0 for low, _ in map(self.of, node.args))

    def fits(self, node: Expr, least: int, greatest: int) -> bool:
        return _inside(self.of(node), least, greatest)

    def reach(self, node: Expr) -> float:
        """The largest absolute value."""
        return max(inf if end is None else abs(end) for end in self.of(node))


def _inside(interval: Interval, least: int | None, greatest: int | None) -> bool:
    low, high = interval
    return low is not None and high is not None and least is not None and greatest is not None and least <= low and high <= greatest
