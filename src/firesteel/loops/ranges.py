"""A nest whose values differ from range to range of an axis becomes one nest a range: Program -> Program.

What is concatenated or padded chooses among its parts at every element, and computes all of them. Inside of a range there is nothing left to
choose: conditions are known there, masked loads are plain ones, and reflected or wrapped places follow each other.

In: a fused Program.  Out: a Program of the same meaning.  Only nests of one map on the CPU, cut along axes of known size; `cost.py` says what
an element costs, and ranges are made where that pays.  Points of a map are independent of each other, so its ranges may be run one after the other.

    nest y [i < 10, j < 64]  y[i, j] = exp(load(a, i, j)) if i <= 3 else load(b, i - 4, j)
    nest y    [i < 4, j < 64]  y[i, j] = exp(load(a, i, j))
    nest y_1  [i < 6, j < 64]  y[i + 4, j] = load(b, i, j)
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from firesteel.loops import cost
from firesteel.loops.access import load_index
from firesteel.loops.inline import Fuel
from firesteel.loops.ir import AXES, CHECKING, LOADS, Axis, Buffer, Nest, Program, ProgramStep, axes_of
from firesteel.loops.simplify import map_nest, simplify_nest
from firesteel.loops.spread import free_name
from firesteel.sym.expr import Expr, as_expr, as_size, bits, postorder, rebuild
from firesteel.sym.poly import poly
from firesteel.targets import CPU

FEWEST_POINTS = 1 << 13     # of a nest, for which several kernels are worth their start
MOST_RANGES = 6             # of one axis
MOST_NESTS = 9              # that one may become
GAIN = 0.8                  # of the cost, what ranges may have at most
SCALAR = 4                  # times what an element costs where the elements of a row are too few for lanes
LANES = 8                   # elements of a row that are worth a vector
CHOOSING = bits("where", "masked", "abs", "min", "max", "mod", "floordiv")


def by_ranges(program: Program, fuel: Fuel) -> Program:
    """Every nest for which it pays, range by range."""
    steps, taken = list[ProgramStep](), {step.name for step in program.steps}
    for step in program.steps:
        nest = step.nest
        steps += _apart(nest, program.buffers, fuel, taken, MOST_NESTS) if nest is not None and _may_be(nest, program.buffers) else [step]
    return replace(program, steps=tuple(steps))


def _may_be(nest: Nest, buffers: Mapping[str, Buffer]) -> bool:
    """A map on the CPU that chooses by place, and checks no data."""
    if len(nest.phases) != 1 or nest.phases[0].kind != "map" or nest.phases[0].axes or cost.points(nest.axes) < FEWEST_POINTS:
        return False
    exprs, stores = nest.exprs(), nest.stores()
    return (any(e.holds & CHOOSING for e in exprs) and not any(e.holds & CHECKING for e in exprs)
            and all(store.mode == "set" and buffers[store.buffer].device == CPU for store in stores))


def _apart(nest: Nest, buffers: Mapping[str, Buffer], fuel: Fuel, taken: set[str], room: int) -> list[Nest]:
    """The nest, or its ranges along the axis for which they cost least, each taken apart again.  At most `room` nests."""
    lane = _lane(nest, buffers)
    before = cost.SMALL + _cost(nest, lane)
    found = [parts for parts in (_ranges(nest, axis) for axis in nest.axes) if 1 < len(parts) <= min(room, MOST_RANGES)]
    costs = [sum(cost.SMALL + _cost(part, lane) for part in parts) for parts in found]
    if not found or min(costs) >= GAIN * before or not fuel.take(lambda: f"{nest.name} in ranges"):
        return [nest]
    parts = found[costs.index(min(costs))]
    names = [nest.name]
    for _ in parts[1:]:
        names.append(free_name(nest.name, taken))
        taken.add(names[-1])
    return [piece for part, name in zip(parts, names) for piece in _apart(replace(part, name=name), buffers, fuel, taken, room // len(parts))]


# ---------------------------------------------------------------- where values change

def _cuts(nest: Nest, axis: Axis) -> list[int]:
    """The places at which a condition on the axis alone becomes another, or the sign of what `abs` takes, and so on."""
    found: set[int] = set()
    if type(axis.extent) is not int:
        return []
    for node in postorder(*nest.exprs(), only=CHOOSING):
        for gap in _gaps(node):
            place = _sign_change(gap, axis)
            if place is not None and 0 < place < axis.extent:
                found.add(place)
    return sorted(found)


def _gaps(node: Expr) -> Iterator[Expr]:
    """Whole numbers on whose sign the value of a node depends."""
    row = _GAPS.get(node.op)
    if row is not None:
        yield from row(node)


COMPARED = {"le": (0,), "lt": (1,), "eq": (0, 1), "ne": (0, 1)}     # x <= y changes with the sign of y - x, x < y with that of y - x - 1


def _conditions(node: Expr) -> Iterator[Expr]:
    for part in postorder(node.args[0]):
        if part.op in COMPARED and part.args[0].dtype == "i64":
            yield from (as_expr(as_size(part.args[1]) - as_size(part.args[0]) - less) for less in COMPARED[part.op])


def _of_two(node: Expr) -> Iterator[Expr]:
    if node.dtype == "i64":
        yield as_expr(as_size(node.args[1]) - as_size(node.args[0]))


def _of_one(node: Expr) -> Iterator[Expr]:
    if node.dtype == "i64":
        yield node.args[0]


def _periods(node: Expr) -> Iterator[Expr]:
    """Rolled places begin anew at one multiple of the divisor.  (Repeated ones are left to `split_axes`.)"""
    if node.dtype == "i64" and node.args[1].op == "const" and node.args[0].op != "axis":
        for turn in (0, 1):
            yield as_expr(as_size(node.args[0]) - turn * node.args[1].attr)


_GAPS = {"where": _conditions, "masked": _conditions, "min": _of_two, "max": _of_two, "abs": _of_one, "mod": _periods, "floordiv": _periods}


def _sign_change(gap: Expr, axis: Axis) -> int | None:
    """The first place at which count * axis + base >= 0 is no longer what it was."""
    terms = dict(poly(as_size(gap)))
    base, count = terms.pop((), 0), terms.pop((axis.value,), 0)
    if terms or not count:
        return None
    return -(base // count) if count > 0 else base // -count + 1


def _ranges(nest: Nest, axis: Axis) -> list[Nest]:
    """Between the cuts; inside of a range there may be further ones, since places of places are simpler there."""
    cuts = _cuts(nest, axis)
    if not cuts or len(cuts) >= MOST_RANGES:
        return [nest]
    parts = [_range(nest, axis, start, end) for start, end in pairwise([0, *cuts, cost.hint(axis.extent)])]
    return [piece for part in parts for piece in _ranges(part, next((a for a in part.axes if a.name == axis.name), Axis(axis.name, 1)))]


def _range(nest: Nest, axis: Axis, start: int, end: int) -> Nest:
    memo: dict[Expr, Expr] = {axis.value: as_expr(axis.value + start)}
    moved = map_nest(nest, lambda expr: rebuild(expr, lambda node, args: None, memo, AXES)) if start else nest
    return simplify_nest(replace(moved, axes=tuple([Axis(a.name, end - start) if a.name == axis.name else a for a in nest.axes])), True)


# ---------------------------------------------------------------- what it costs

def _lane(nest: Nest, buffers: Mapping[str, Buffer]) -> str | None:
    """The axis along which elements are stored in a row."""
    for store in nest.stores():
        for part, stride in zip(store.index, buffers[store.buffer].strides):
            if stride == 1 and axes_of(part):
                return min(axes_of(part))
    return None


def _cost(nest: Nest, lane: str | None) -> int:
    """Of all its points."""
    extent = next((cost.hint(axis.extent) for axis in nest.axes if axis.name == lane), 1)
    nodes = postorder(*nest.exprs(), below=lambda node: node.args[:2] if node.op == "masked" else _but_loads(node))
    each = sum(_of_node(node, lane) for node in nodes)
    return cost.points(nest.axes) * each * (SCALAR if extent < LANES else 1)


def _but_loads(node: Expr) -> tuple[Expr, ...]:
    return () if node.op in LOADS else node.args


def _of_node(node: Expr, lane: str | None) -> int:
    if node.op not in LOADS:
        return cost.op_cost(node)
    apart = any(part.op in _GAPS and lane in axes_of(part) for index in load_index(node) for part in postorder(index))
    masked = node.op == "masked" and lane in axes_of(node.args[0])
    return cost.GATHER if apart else cost.LOAD * 2 if masked else cost.LOAD
