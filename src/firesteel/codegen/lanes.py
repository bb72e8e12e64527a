"""Which axis of a nest becomes the lanes of vectors, and how many.

In: a FlatNest and a Target.  Out: a `Shape`.  Either the lanes run along a parallel axis in all phases ("points": each
lane is another point, accumulators are vectors), or along an axis of each phase ("rows": accumulators are added up
across lanes at the end).  Judged by the memory access pattern of the lanes: contiguous, broadcast or strided.  Loads that lie in a row along
another parallel axis are turned (`turning.py`).
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from firesteel.codegen.flat import FlatNest, FlatPhase, FlatStore, addresses
from firesteel.codegen.llvm_ops import BYTES, FLOAT
from firesteel.codegen.printer import weight
from firesteel.codegen.strided import ALONE, lane_step
from firesteel.codegen.target import Target
from firesteel.loops.ir import Axis
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, postorder

FEWEST_SCANNED = 4      # lanes whose running values are worth the shuffles


@dataclass(frozen=True, slots=True)
class Shape:
    points: str | None                  # the parallel axis of the lanes, or None for rows
    rows: tuple[str | None, ...]        # for each phase, the axis of its lanes
    widths: tuple[int, ...]             # lanes of each phase; 1 is scalar code; all the same for points
    across: str | None = None           # the parallel axis along which turned loads are rows
    down: str | None = None             # the parallel axis of the innermost loop, in which places that the lanes compute are the same

    @property
    def width(self) -> int:
        return self.widths[0]


def choose(nest: FlatNest, target: Target) -> Shape:
    width, fewest = target.lanes(_element_bytes(nest)), fewest_lanes(nest.dtypes, target)
    if adds(nest):
        return _adding_shape(nest, width, fewest)
    swept = [p for p in nest.phases if p.axes]
    points = _best(nest.axes, nest.phases, not swept)
    if not swept:
        return _computing(nest, _turning(nest, _points_shape(nest, points, width, fewest, False)))
    rows = [_best(() if p.kind == "scan" and width < FEWEST_SCANNED else p.axes, [p]) for p in nest.phases]
    overlap = points is not None and points[0] >= 2         # overlapping windows are rows either way: points need no sum over the lanes
    if points and (overlap or points[0] > _rows_score(nest, rows)):
        return _points_shape(nest, points, width, fewest, True)
    widths = tuple(_row_width(p, r[1], width, fewest) if r else 1 for p, r in zip(nest.phases, rows))
    return Shape(None, tuple(r[1].name if r else None for r in rows), widths)


def fewest_lanes(dtypes: Iterable[str], target: Target) -> int:
    """Lanes below which a vector of the narrowest element in memory is shorter than a register (16 bytes).

    LLVM widens a masked access of a shorter vector, and its mask with it: `kmovb` clears the new lanes, but is taken for a plain copy
    where the mask is spilled, so that the lanes come back switched on and are stored.  Whole registers need no wider mask."""
    return 16 // min((BYTES[d] for d in dtypes), default=16) if target.masks else 1


def _adding_shape(nest: FlatNest, width: int, fewest: int) -> Shape:
    """Lanes only along an axis on which added elements are distinct; else scalar code."""
    apart = [a for a in nest.axes if all(a.name in s.private for s in adds(nest))]
    if apart and not any(p.axes for p in nest.phases):
        return _points_shape(nest, _best(tuple(apart), nest.phases), width, fewest, False)
    return _points_shape(nest, _best(nest.axes, nest.phases), 1, 1, False)


def adds(nest: FlatNest) -> list[FlatStore]:
    """Stores whose points may collide."""
    return [s for p in nest.phases for s in p.stores if s.mode == "add"]


def _row_width(phase: FlatPhase, axis: Axis, width: int, fewest: int) -> int:
    """A light reduction waits for its own additions and for memory: several vectors at a time keep both busy."""
    if width == 1:
        return width
    width = max(width, fewest)
    if not phase.reduces or phase.kind == "scan":
        return width
    wide = width * (4 if weight(phase) <= 8 else 2 if weight(phase) <= 24 else 1)
    while wide > width and isinstance(axis.extent, int) and (axis.extent < 2 * wide or (axis.extent % wide and not axis.extent % width)):
        wide //= 2
    return wide


def _points_shape(nest: FlatNest, points: tuple[float, Axis] | None, width: int, fewest: int, swept: bool) -> Shape:
    if points is None:
        return Shape(None, (None,) * len(nest.phases), (1,) * len(nest.phases))
    if width > 1:
        width = max(width * (4 if swept else 1), fewest)        # a column sum streams longer pieces of each row and has independent accumulators
        extent = points[1].extent
        while isinstance(extent, int) and width > fewest and width >= 2 * extent:
            width //= 2
    return Shape(points[1].name, (None,) * len(nest.phases), (width,) * len(nest.phases))


def _turning(nest: FlatNest, shape: Shape) -> Shape:
    """With the axis along which most loads that are apart for the lanes are rows."""
    if shape.points is None or shape.width < 4:
        return shape
    axes = [a.name for a in nest.axes if a.name != shape.points and not _is_short(a)]
    found = [(len(turned_loads(nest, shape.points, name)), name) for name in axes]
    most, name = max(found, default=(0, None))
    return replace(shape, across=name) if most else shape


def _computing(nest: FlatNest, shape: Shape) -> Shape:
    """With the innermost axis along which no place changes that is computed for each lane."""
    if shape.points is None or shape.width < 4 or shape.across:
        return shape
    lane = shape.points
    computed = [e for p in nest.phases for _, _, irregular, _ in addresses(p) for e in irregular if _depends(e, lane)]
    if not computed or any(n.op in ("at", "at_masked") for n in postorder(*computed)):
        return shape
    fixed = [a.name for a in nest.axes if a.name != lane and not _is_short(a) and not any(_depends(e, a.name) for e in computed)]
    return replace(shape, down=fixed[-1]) if fixed else shape


def turned_loads(nest: FlatNest, lane: str, across: str) -> list[Expr]:
    """Loads that are apart for the lanes and in a row across them, of buffers that the nest does not write."""
    stored = {s.buffer for p in nest.phases for s in p.stores}
    nodes = postorder(*(root for p in nest.phases for root in p.roots()))
    return [n for n in nodes if n.op == "at" and not n.args and n.attr[0] not in stored
            and n.attr[1].coefficient(lane) not in (0, 1) and n.attr[1].coefficient(across) == 1]


def _rows_score(nest: FlatNest, rows: list[tuple[float, Axis] | None]) -> float:
    """The mean over the phases that sweep."""
    scores = [-3.0 if r is None else r[0] for p, r in zip(nest.phases, rows) if p.axes]
    return sum(scores) / len(scores)


def _best(axes: tuple[Axis, ...], phases: Iterable[FlatPhase], turning: bool = False) -> tuple[float, Axis] | None:
    """(score, axis); `turning`: loads that are rows along another of the axes can be turned."""
    accesses = [a for p in phases for a in addresses(p)]
    rows = {a.name for a in axes if turning and not _is_short(a)}
    scored = [(_score(axis, accesses, rows - {axis.name}), i, axis) for i, axis in enumerate(axes)]
    return (lambda best: (best[0], best[2]))(max(scored, key=lambda s: s[:2])) if scored else None


def _is_short(axis: Axis) -> bool:
    return isinstance(axis.extent, int) and axis.extent < 8


def _score(axis: Axis, accesses: list, rows: set[str]) -> float:
    """2 for neighbours in memory (loads: also backwards), 1 for one element for all lanes, 0 for what is turned or shuffled, -3 for elements apart;
    stores count double."""
    total = count = 0.0
    together = Counter((buffer, address.terms) for buffer, address, irregular, stores in accesses if stores and not irregular)
    for buffer, address, irregular, stores in accesses:
        factor = 2 if stores else 1
        step = address.coefficient(axis.name)
        near = lane_step(address, irregular, axis.name)
        apart = any(_depends(e, axis.name) for e in irregular)
        turned = not irregular and not stores and any(n in rows and c == 1 for n, c in address.terms)
        turned |= near > 0 and (near <= ALONE if not stores else together[buffer, address.terms] == near)
        total += factor * (-3 if apart else 2 if step == 1 or step == -1 and not stores else 1 if step == 0 else 0 if turned else -3)
        count += factor
    score = total / max(count, 1)
    if _is_short(axis):
        score -= 2          # lanes would stand idle
    return score


def _depends(root: Expr, axis: str) -> bool:
    return any((n.op == "axis" and n.attr == axis) or (n.op in ("at", "at_masked") and n.attr[1].coefficient(axis) != 0) for n in postorder(root))


def _element_bytes(nest: FlatNest) -> int:
    """Of the widest float type that is computed with, else of the widest integer in memory; at least 4.  What is made of sizes
    and constants is computed once, not in lanes; what follows after all sweeps is computed seldom."""
    floats, whole = [4], [4]
    varying: set[Expr] = set()
    for phase in [p for p in nest.phases if p.axes] or nest.phases:
        for node in postorder(*phase.roots()):
            if node.op in ("at", "at_masked", "axis") or any(a in varying for a in node.args):
                varying.add(node)
                if node.dtype in FLOAT:
                    floats.append(BYTES[node.dtype])
                elif node.op in ("at", "at_masked"):
                    whole.append(BYTES[node.dtype])
    return max(floats) if len(floats) > 1 else max(whole)
