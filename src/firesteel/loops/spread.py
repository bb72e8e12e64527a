"""Sweeps of few rows, spread over the cores: Program -> Program.

A nest's parallel axes are what threads share.  Where they have few points for much work, as the sums of a batch norm have, one core would do all
of it: lanes along 64 channels are one point.  Such a nest is taken apart here.  Each long phase becomes a nest of its own, whose outermost swept
axis is parallel; accumulators become a buffer of parts, one for each point of that axis, which the nest behind it adds up, always in the same
order: results depend on no number of threads.  What a later nest reads of an accumulator is stored once.

In: a fused Program.  Out: a Program of the same meaning, up to the order of additions.  Only on the CPU, and only for sizes that are known.

    nest s [c < 64]                                       nest s [n < 32, c < 64]
      reduce [n < 32, h < 56]  a = sum(load(x, n, c, h))    reduce [h < 56]  a = sum(load(x, n, c, h))
      map []                   s[c] = acc(a)                map []           a_parts[n, c] = acc(a)
                                                          nest s [c < 64]
                                                            reduce [k < 32]  a = sum(load(a_parts, k, c))
                                                            map []           s[c] = acc(a)
"""
from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from dataclasses import replace

from firesteel.loops.cost import CORE_LANES, FEW_POINTS, LONG_SWEEP, MOST_PARTS, points
from firesteel.loops.ir import (
    ACCUMULATORS,
    AXES,
    Axis,
    Buffer,
    Nest,
    Phase,
    Program,
    ProgramStep,
    Reduce,
    Store,
    acc,
    all_loads,
    axes_of,
    load,
)
from firesteel.loops.scalars import to
from firesteel.sym.expr import Expr, as_expr, postorder, rebuild, row_major
from firesteel.targets import CPU


def spread(program: Program) -> Program:
    """Every nest of few points and long sweeps in parts."""
    buffers, steps, taken = dict(program.buffers), list[ProgramStep](), {step.name for step in program.steps}
    for step in program.steps:
        nest = step.nest
        steps += _Spreading(nest, buffers, taken).run() if nest is not None and _is_narrow(nest, buffers) else [step]
    return program if len(steps) == len(program.steps) else replace(program, buffers=buffers, steps=tuple(steps))


# ---------------------------------------------------------------- which

def _is_narrow(nest: Nest, buffers: Mapping[str, Buffer]) -> bool:
    """Is much swept for few points of work?  A nest without parallel axes is sliced by its printer."""
    if not nest.axes or not any(_is_long(nest, phase) for phase in nest.phases) or any(phase.kind == "scan" for phase in nest.phases):
        return False
    on_cpu = all(buffers[name].device == CPU for name in nest.writes())
    return on_cpu and all(store.mode == "set" for store in nest.stores()) and _points_of_work(nest, buffers) < FEW_POINTS


def _is_long(nest: Nest, phase: Phase) -> bool:
    axes = (*nest.axes, *phase.axes)
    return bool(phase.axes) and all(type(a.extent) is int for a in axes) and points(axes) >= LONG_SWEEP and _cut(phase) is not None


def _points_of_work(nest: Nest, buffers: Mapping[str, Buffer]) -> int:
    """Points of the parallel axes; those that lie in a row in memory are lanes, a few vectors of which are one point."""
    lanes = {part.attr for phase in nest.phases for read in all_loads(phase.exprs()) if read.op == "load"
             for part, stride in zip(read.args, buffers[read.attr].strides) if part.op == "axis" and stride == 1 and phase.axes}
    total = 1
    for axis in nest.axes:
        total *= -(-points([axis]) // CORE_LANES) if axis.name in lanes else points([axis])
    return total


def _cut(phase: Phase) -> tuple[Axis, tuple[Axis, ...], dict[Expr, Expr]] | None:
    """(the axis that becomes parallel, those that stay, what stands for the old ones): the outermost axis, or a factor of a long one."""
    first, *rest = phase.axes
    assert type(first.extent) is int
    if first.extent <= MOST_PARTS and rest:
        return (first, tuple(rest), {}) if first.extent >= FEW_POINTS else None
    parts = next((n for n in range(MOST_PARTS, FEW_POINTS - 1, -1) if first.extent % n == 0), None)
    if parts is None:
        return None
    outer, inner = Axis(f"{first.name}_part", parts), Axis(first.name, first.extent // parts)
    return outer, (inner, *rest), {first.value: as_expr(outer.value * inner.extent + inner.value)}


# ---------------------------------------------------------------- taking apart

class _Spreading:
    """One nest.  `pending`: the phases of the next nest over the old axes, and `here` what stands in it for the accumulators that it has;
    `known`: what later nests read for an accumulator, or for what was made of some."""

    def __init__(self, nest: Nest, buffers: dict[str, Buffer], taken: set[str]):
        self.nest, self.buffers, self.taken = nest, buffers, taken      # `taken`: names of steps
        self.index = tuple([axis.value for axis in nest.axes])
        self.pending: list[Phase] = []
        self.here: dict[Expr, Expr] = {}
        self.known: dict[Expr, Expr] = {}
        self.steps: list[Nest] = []

    def run(self) -> list[Nest]:
        for number, phase in enumerate(self.nest.phases):
            if _is_long(self.nest, phase):
                self.flush(self.nest.phases[number:])
                self.sweep(phase)
            else:
                self.pending.append(_changed(phase, self.known | self.here, phase.axes))
                self.here.update({acc(reduce): acc(reduce) for reduce in phase.reduces})
        self.flush(())
        return [*self.steps[:-1], replace(self.steps[-1], name=self.nest.name)]

    def sweep(self, phase: Phase) -> None:
        """A long phase as a nest of its own; the sums of its parts are the next nest's first phase."""
        cut = _cut(phase)
        assert cut is not None
        outer, inner, places = cut
        swept = _changed(phase, self.known | places, inner)
        parts = [self.buffer(f"{reduce.name}_parts", reduce.dtype, (outer, *self.nest.axes)) for reduce in phase.reduces]
        kept = tuple([Store(part.name, (outer.value, *self.index), acc(reduce)) for part, reduce in zip(parts, phase.reduces)])
        self.add((outer, *self.nest.axes), [swept, *([Phase("map", (), (), kept)] if kept else [])])
        if parts:
            k = Axis(outer.name, outer.extent)
            sums = [_of_parts(reduce, load(part, (k.value, *self.index))) for reduce, part in zip(phase.reduces, parts)]
            self.pending = [Phase("reduce", (k,), tuple(sums))]
            self.here = {acc(reduce): to(acc(total), reduce.dtype) for reduce, total in zip(phase.reduces, sums)}

    def flush(self, later: tuple[Phase, ...]) -> None:
        """The pending phases as a nest, which stores what the next phase makes of accumulators for a whole row, and accumulators that others read."""
        read = {node for phase in later[1:] for node in postorder(*phase.exprs(), only=ACCUMULATORS)}
        values = dict.fromkeys([*(self.of_rows(later[0]) if later else ()), *[value for value in self.here if value in read]])
        wanted = [value for value in values if value not in self.known]
        if not self.pending and not wanted:
            return
        totals = [self.buffer("row", value.dtype, self.nest.axes) for value in wanted]
        stores = tuple([Store(total.name, self.index, value) for total, value in zip(totals, wanted)])
        self.add(self.nest.axes, [*self.pending, *([_changed(Phase("map", (), (), stores), self.known | self.here, ())] if stores else [])])
        self.known.update({value: load(total, self.index) for total, value in zip(totals, wanted)})
        self.pending, self.here = [], {}

    def of_rows(self, phase: Phase) -> list[Expr]:
        """The largest parts of a phase's Exprs that hold accumulators and are the same for a whole row."""
        axes, found, left = {axis.name for axis in self.nest.axes}, list[Expr](), phase.exprs()[::-1]
        while left:
            node = left.pop()
            if not node.holds & ACCUMULATORS:
                continue
            if axes_of(node) <= axes:
                found.append(node)
            else:
                left += node.args[::-1]
        return found

    def add(self, axes: tuple[Axis, ...], phases: list[Phase]) -> None:
        name = free_name(self.nest.name, self.taken)
        self.taken.add(name)
        self.steps.append(Nest(name, axes, tuple(phases), self.nest.origin))

    def buffer(self, name: str, dtype: str, axes: tuple[Axis, ...]) -> Buffer:
        name = free_name(f"{self.nest.name}_{name}", self.buffers)
        shape = tuple([axis.extent for axis in axes])
        made = self.buffers[name] = Buffer(name, dtype, shape, row_major(shape))
        return made


def _of_parts(reduce: Reduce, part: Expr) -> Reduce:
    """The whole out of the parts; a few of them are added in float64, since their rounding would not even out."""
    wide = "f64" if reduce.op == "sum" and reduce.dtype == "f32" else reduce.dtype
    return Reduce(reduce.name, reduce.op, to(part, wide), wide)


def free_name(name: str, taken: Container[str]) -> str:
    return name if name not in taken else next(f"{name}_{n}" for n in itertools.count(1) if f"{name}_{n}" not in taken)


def _changed(phase: Phase, values: Mapping[Expr, Expr], axes: tuple[Axis, ...]) -> Phase:
    """Over other axes, with Exprs in the place of others."""
    memo = dict(values)

    def change(expr: Expr) -> Expr:
        return rebuild(expr, lambda node, args: None, memo, AXES | ACCUMULATORS)

    reduces = tuple([replace(reduce, value=change(reduce.value)) for reduce in phase.reduces])
    stores = tuple([replace(store, index=tuple(map(change, store.index)), value=change(store.value)) for store in phase.stores])
    return Phase(phase.kind, axes, reduces, stores)
