"""What is known about the integers of a nest: which are never negative, and how large they get.

Used to pick cheap division and narrow index types.  Sizes are ints or symbols; an axis lies in [0, extent).

    Bounds(nest).of(axis("a0") * 4)      # 4 * (extent - 1), inf for a symbolic extent, None if it may be negative
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from firesteel.codegen.flat import FlatNest
from firesteel.sym.expr import Expr, postorder

_JOINED: dict[str, Callable[[Iterable[Any]], Any]] = {"add": sum, "mul": math.prod, "min": min, "max": max}


class Bounds:
    def __init__(self, nest: FlatNest):
        self.extents = {a.name: a.extent for a in (*nest.axes, *(a for p in nest.phases for a in p.axes))}
        self.known: dict[Expr, float | None] = {}

    def of(self, node: Expr) -> float | None:
        """The largest value of an integer that is never negative (inf if it has no bound), else None."""
        if node not in self.known:
            for part in postorder(node):        # one by one: sums may be long
                if part not in self.known:
                    self.known[part] = self._of(part)
        return self.known[node]

    def _of(self, node: Expr) -> float | None:
        if node.op == "const":
            return node.attr if node.attr >= 0 else None
        if node.op == "axis":
            extent = self.extents[node.attr]
            return extent - 1 if isinstance(extent, int) else math.inf
        if node.op not in ("add", "mul", "floordiv", "mod", "min", "max") or node.dtype != "i64":
            return None
        parts = [p for a in node.args if (p := self.of(a)) is not None]
        if len(parts) < len(node.args):
            return None
        if node.op == "floordiv":
            divisor = node.args[1]
            return parts[0] // divisor.attr if divisor.op == "const" and divisor.attr > 0 and parts[0] != math.inf else parts[0]
        if node.op == "mod":
            return min(parts)
        return _JOINED[node.op](parts)

    def natural(self, node: Expr) -> bool:
        """Are all its arguments never negative?"""
        return all(self.of(a) is not None for a in node.args)

    def fits(self, node: Expr, limit: int) -> bool:
        bound = self.of(node)
        return bound is not None and bound < limit
