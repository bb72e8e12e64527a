"""Rows of a few elements are made element by element, at each point at once: Program -> Program.

Vectors of three numbers, what is stacked along a last dimension, a softmax over some channels: a sweep over so few elements leaves lanes idle, and
computes and loads again what fits in registers. Here its loop is written out. Lanes then go along the points, and where these lie a few elements
apart, `codegen/strided.py` reads whole vectors and weaves what is stored.

In: a fused Program.  Out: a Program of the same meaning, up to the rounding of products that are summed.  What is written out is
 1. a nest whose every sweep has at most `cost.SHORT_ROW` elements, as one map phase: accumulators are the Exprs that they were the value of, and
    what a phase loads that an earlier one stored is the Expr that was stored;
 2. a map whose rows in memory are so short, where they are not as good as one long row.
Only on the CPU, for many points, without data that are checked.

    nest y [i < 999]  reduce [r < 2]  a0 = sum(load(x, i, r))          nest y [i < 999]  y[i, 0] = load(x, i, 0) / (0 + load(x, i, 0) + load(x, i, 1))
                      map [k < 2]     y[i, k] = load(x, i, k) / a0                       y[i, 1] = load(x, i, 1) / (0 + load(x, i, 0) + load(x, i, 1))
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from firesteel.loops import cost
from firesteel.loops.access import load_index, output_buffers
from firesteel.loops.inline import Fuel
from firesteel.loops.ir import (
    ACCUMULATORS,
    AXES,
    CHECKING,
    LOADING,
    LOADS,
    Axis,
    Buffer,
    Nest,
    Phase,
    Program,
    Reduce,
    Store,
    acc,
    all_loads,
    axes_of,
)
from firesteel.loops.scalars import REDUCE_OPS, literal
from firesteel.loops.simplify import Simplifier
from firesteel.sym.expr import Expr, Size, as_size, const, make, postorder, rebuild
from firesteel.sym.poly import poly
from firesteel.targets import CPU

FEWEST_POINTS = 1 << 11     # for which the text of a whole row is worth compiling
LANES = 8                   # elements of a row that are worth a vector


def short_rows(program: Program, fuel: Fuel) -> Program:
    """Every nest that sweeps over a few elements at many points, with these written out."""
    changed = replace(program, steps=tuple([step.map(lambda nest: _written_out(nest, program.buffers, fuel)) for step in program.steps]))
    return _without_dead_stores(changed, {name for old, new in zip(program.steps, changed.steps) if old is not new for name in new.writes()})


def _without_dead_stores(program: Program, among: set[str]) -> Program:
    """Values that phases left for each other are no longer loaded."""
    read = {name for step in program.steps for name in step.reads()} | output_buffers(program)
    dead = {name for name in among - read if program.buffers[name].kind == "temp"}
    if not dead:
        return program
    steps = tuple([step.map(lambda nest: _without(nest, dead)) for step in program.steps])
    return replace(program, steps=steps, buffers={name: buffer for name, buffer in program.buffers.items() if name not in dead})


def _without(nest: Nest, dead: set[str]) -> Nest:
    if dead.isdisjoint(nest.writes()):
        return nest
    phase, = nest.phases
    return replace(nest, phases=(replace(phase, stores=tuple([store for store in phase.stores if store.buffer not in dead])),))


def _written_out(nest: Nest, buffers: Mapping[str, Buffer], fuel: Fuel) -> Nest:
    swept = _with_rows(nest, buffers)
    if swept is None or not _may_be(swept, buffers):
        return nest
    found = _RowWriter(swept).run()
    return found if found is not None and fuel.take(lambda: f"rows of {nest.name} written out") else nest


def will_be_written_out(nest: Nest, divisor: int, buffers: Mapping[str, Buffer]) -> bool:
    """Is it a map, of whose rows so many elements at a time may be?"""
    if len(nest.phases) != 1 or nest.phases[0].kind != "map" or nest.phases[0].axes or divisor > cost.SHORT_ROW:
        return False
    few = divisor * cost.measure(*nest.exprs())[1] <= cost.MOST_NODES
    return few and cost.points(nest.axes) >= divisor * FEWEST_POINTS and _is_plain(nest, buffers)


def _is_plain(nest: Nest, buffers: Mapping[str, Buffer]) -> bool:
    return (all(store.mode == "set" and buffers[store.buffer].device == CPU for store in nest.stores())
            and not any(expr.holds & CHECKING for expr in nest.exprs()))


def _may_be(nest: Nest, buffers: Mapping[str, Buffer]) -> bool:
    if not nest.axes or cost.points(nest.axes) < FEWEST_POINTS or not _is_plain(nest, buffers):
        return False
    extents = [cost.hint_product([axis.extent for axis in phase.axes]) for phase in nest.phases]
    known = all(type(axis.extent) is int for phase in nest.phases for axis in phase.axes)
    if not known or not all(0 < extent <= cost.SHORT_ROW for extent in extents):
        return False
    nodes = sum(extent * cost.measure(*phase.exprs())[1] for extent, phase in zip(extents, nest.phases))
    return nodes <= cost.MOST_NODES


# ---------------------------------------------------------------- which rows

def _with_rows(nest: Nest, buffers: Mapping[str, Buffer]) -> Nest | None:
    """The nest with its short rows as sweeps; None where it has none."""
    if any(phase.axes for phase in nest.phases):
        return nest
    row = _row(nest, buffers) if len(nest.phases) == 1 and len(nest.axes) > 1 else None
    if row is None:
        return None
    return replace(nest, axes=tuple([axis for axis in nest.axes if axis is not row]), phases=(replace(nest.phases[0], axes=(row,)),))


def _row(nest: Nest, buffers: Mapping[str, Buffer]) -> Axis | None:
    """The axis along which a map stores in a row, where that is short and not as good as one long row."""
    steps = [_steps(buffers[store.buffer], store.index) or {} for store in nest.stores()]
    axis = next((a for a in nest.axes if any(row.get(a.value) == 1 for row in steps)), None)
    if axis is None or type(axis.extent) is not int or axis.extent > cost.SHORT_ROW or _are_one_row(nest, axis, buffers):
        return None
    return axis if axis.extent < LANES or any(axis.name in axes_of(node.args[0]) for node in _choices(nest)) else None


def _choices(nest: Nest) -> Iterator[Expr]:
    return (node for node in postorder(*nest.exprs()) if node.op in ("where", "masked"))


def _are_one_row(nest: Nest, axis: Axis, buffers: Mapping[str, Buffer]) -> bool:
    """Does every access run through memory from row to row, and is nothing but places made of the axis?"""
    outside = postorder(*[store.value for store in nest.stores()], below=_but_places)
    if axis.value in outside:
        return False
    places = [(store.buffer, store.index) for store in nest.stores()] + [(load.attr, load_index(load)) for load in all_loads(nest.exprs())]
    steps = [_steps(buffers[name], index) for name, index in places]
    others = [a.value for a in nest.axes if a is not axis]
    return any(all(row is not None and row.get(other, 0) == row.get(axis.value, 0) * axis.extent for row in steps) for other in others)


def _but_places(node: Expr) -> tuple[Expr, ...]:
    return node.args if node.op not in LOADS else node.args[:2] if node.op == "masked" else ()


def _steps(buffer: Buffer, index: tuple[Expr, ...]) -> dict[Expr, Size] | None:
    """By how many elements of memory neighbours along each axis are apart; None where that is not the same everywhere."""
    total: dict[Expr, Size] = {}
    for part, stride in zip(index, buffer.strides):
        for monomial, count in poly(as_size(part)).items():
            if len(monomial) == 1 and monomial[0].op == "axis":
                total[monomial[0]] = total.get(monomial[0], 0) + stride * count
            elif monomial:
                return None
    return total


# ---------------------------------------------------------------- writing out

class _RowWriter:
    """One nest.  `values`: what stands for accumulators so far; `stored`: what earlier phases stored where."""

    def __init__(self, nest: Nest):
        self.nest = nest
        self.simplifier = Simplifier(list(nest.axes))
        self.values: dict[Expr, Expr] = {}
        self.stored: dict[tuple[str, tuple[Expr, ...]], Expr] = {}
        self.written = frozenset(nest.writes())
        self.lost = False           # was something loaded that is stored, but not as a value at the same place?

    def run(self) -> Nest | None:
        stores: list[Store] = []
        for phase in self.nest.phases:
            new = [store for point in self._points(phase) for store in self._point(phase, point)]
            self.stored.update({(store.buffer, store.index): store.value for store in new})
            stores += new
        return None if self.lost else replace(self.nest, phases=(Phase("map", (), (), tuple(stores)),))

    def _points(self, phase: Phase) -> Iterator[dict[Expr, Expr]]:
        """Of a sweep, in order; before the first one accumulators have their identities."""
        self.values.update({acc(reduce): literal(REDUCE_OPS[reduce.op].identity(reduce.dtype), reduce.dtype) for reduce in phase.reduces})
        for place in itertools.product(*[range(cost.hint(axis.extent)) for axis in phase.axes]):
            yield {axis.value: const(k) for axis, k in zip(phase.axes, place)}

    def _point(self, phase: Phase, point: dict[Expr, Expr]) -> list[Store]:
        """Accumulates, then stores, as a sweep does."""
        memo = point | self.values
        taken = [(reduce, self._value(reduce.value, memo)) for reduce in phase.reduces]
        for reduce, value in taken:
            self.values[acc(reduce)] = _combined(reduce, self.values[acc(reduce)], value)
        if phase.kind == "scan":
            memo = point | self.values
        return [Store(s.buffer, tuple([self.simplifier.index(self._value(part, memo)) for part in s.index]), self._value(s.value, memo), s.mode)
                for s in phase.stores]

    def _value(self, expr: Expr, memo: dict[Expr, Expr]) -> Expr:
        moved = self.simplifier.value(rebuild(expr, lambda node, args: None, memo, AXES | ACCUMULATORS))
        return rebuild(moved, self._loaded, {}, LOADING) if moved.holds & LOADING and self.stored else moved

    def _loaded(self, node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        """What this point has stored itself.  (Its nest may load elsewhere only what it does not write.)"""
        if node.op not in LOADS or node.attr not in self.written:
            return None
        found = self.stored.get((node.attr, args)) if node.op == "load" else None
        self.lost |= found is None and any(name == node.attr for name, _ in self.stored)
        return found


def _combined(reduce: Reduce, total: Expr, value: Expr) -> Expr:
    return make(REDUCE_OPS[reduce.op].combine, reduce.dtype, (total, value))
