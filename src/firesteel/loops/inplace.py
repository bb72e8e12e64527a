"""Inputs mutated in place: Program -> Program.

In: a simplified Program that ends with copies into inputs (`copy_`), or whose caller makes them (`Program.into`).  Out: the same, where a
buffer that begins as a copy of an input and is copied back into it in the end is that input: of a cache of which one row is written, one
row is written.

Numbered rules of when b is x
 1. The first writer of b copies all of x into it, and b has x's layout.
 2. Besides that nobody reads x, and besides the copy back nobody writes it.
 3. Nests write b, and no library call does; b is no output, and is copied into x alone.
Of results that the caller copies (`write_to_inputs`, behind inlining), these say more:
 4. The first writer may change a box of x: where(lo <= i <= hi, v, load(x, i)) becomes a nest over the box.  v reads x at its own place alone.
 5. Other readers of x stand before the first writer.
 6. A call that fails is run again by eager, on its inputs: behind the first write only stores into b may fail, and then nothing that
    is written depends on x, so that writing it again changes nothing.  (What may fail before it stays before it: `group.py`, and a launch
    ends with the first kernel that fails.)
 7. A result that is another than x everywhere stays what it is, on the CPU and where nothing behind it may fail: it may become one nest with
    others (`group.py`), and has x's memory from the plan on.

    b[i, j] = load(x, i, j);  b[k, j] = v[j];  y = sum(load(b, i, j));  copy_(x, b)      ->      x[k, j] = v[j];  y = sum(load(x, i, j))
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from firesteel.loops import access
from firesteel.loops.inline import is_permutation, only_store
from firesteel.loops.ir import (
    AXES,
    LOADING,
    LOADS,
    Axis,
    Buffer,
    Extern,
    Nest,
    Phase,
    Program,
    ProgramStep,
    Store,
    View,
    all_loads,
    idle_axes,
    load,
)
from firesteel.loops.plan import is_large, may_fail
from firesteel.loops.simplify import map_nest, simplify_nest
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size, as_expr, as_size, bits, context_of, make, max_, min_, rebuild
from firesteel.targets import CPU

COPY = torch.ops.aten.copy_.default


def write_in_place(program: Program) -> Program:
    """Copies that are not needed left out."""
    backs = [(number, step.call) for number, step in enumerate(program.steps) if step.call and step.call.target is COPY]
    names: dict[str, str] = {}
    dropped: set[int] = set()
    for number, back in backs:
        x, b = back.args[:2]
        if not (isinstance(x, View) and isinstance(b, View) and _is_whole(x, program) and _is_whole(b, program)):
            continue
        first = _only_copy(program, x.buffer, b.buffer, number)
        if first is not None:
            names[b.buffer] = x.buffer
            dropped |= {first, number}
    kept = [_as_nest(step, program) for number, step in enumerate(program.steps) if number not in dropped]
    return _with_names(program, kept, names) if backs else program


def _as_nest(step: ProgramStep, program: Program) -> ProgramStep:
    """A small copy into an input of another device than the CPU as a kernel: a library call starts a transfer, which takes longer than the bytes."""
    if not step.call or step.call.target is not COPY or any(step.call.outputs):
        return step
    given = step.call.args[:2]
    if not all(isinstance(arg, View) and _is_whole(arg, program) for arg in given):
        return step
    x, b = (program.buffers[arg.buffer] for arg in given)
    if x.kind != "input" or CPU in (x.device, b.device) or is_large(x) or (x.dtype, x.shape, x.device) != (b.dtype, b.shape, b.device):
        return step
    axes = tuple([Axis(f"i{dim}", size) for dim, size in enumerate(x.shape)])
    index = tuple([axis.value for axis in axes])
    if idle_axes(index, axes) or any(isinstance(stride, int) and stride == 0 for stride in x.strides):
        return step
    return Nest(step.name, axes, (Phase("map", (), (), (Store(x.name, index, load(b, index)),)),), step.call.origin)


def _with_names(program: Program, steps: list[ProgramStep], names: dict[str, str]) -> Program:
    """The program of other steps, with some buffers in the place of others."""
    return replace(program, steps=tuple([_renamed(step, names) for step in steps]), outputs=_in_views(program.outputs, names),
                   buffers={name: buffer for name, buffer in program.buffers.items() if name not in names},
                   into=tuple([(names.get(b, b), x) for b, x in program.into]))


def _is_whole(view: View, program: Program) -> bool:
    return _layout(view) == _layout(program.buffers[view.buffer]) and isinstance(view.offset, int) and view.offset == 0


def _layout(what: View | Buffer) -> tuple:
    return what.dtype, what.shape, what.strides, what.offset


def _only_copy(program: Program, x: str, b: str, back: int) -> int | None:
    """The number of the nest that copies x into b, where all rules hold."""
    buffers = program.buffers
    if buffers[x].kind != "input" or buffers[b].kind != "temp" or _layout(buffers[x]) != _layout(buffers[b]) or b in access.output_buffers(program):
        return None
    others = [(number, step) for number, step in enumerate(program.steps) if number != back]
    writers = [(number, step) for number, step in others if b in step.writes()]
    if not writers or any(step.nest is None for _, step in writers) or any(x in step.writes() for _, step in others):
        return None
    first, copy = writers[0]
    readers = [number for number, step in others if x in step.reads()]
    last = max(number for number, step in others if b in (*step.reads(), *step.writes()))
    return first if _copies(copy.nest, x) and readers == [first] and last < back else None


def _copies(nest: Nest | None, x: str) -> bool:
    """Does a nest store all elements of x at their places in another buffer?"""
    store = only_store(nest) if nest is not None else None
    if store is None or nest is None or not is_permutation(store.index, nest.axes):
        return False
    return store.value.op == "load" and store.value.attr == x and store.value.args == store.index


def _renamed(step: ProgramStep, names: dict[str, str]) -> ProgramStep:
    """A step over other buffers."""
    if isinstance(step, Extern):
        return replace(step, args=_in_views(step.args, names), kwargs={key: _in_views(value, names) for key, value in step.kwargs.items()})
    return step.map(lambda nest: _renamed_nest(nest, names))


def _in_views(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, View):
        return replace(value, buffer=names.get(value.buffer, value.buffer))
    return type(value)(_in_views(item, names) for item in value) if isinstance(value, (tuple, list)) else value


def _renamed_nest(nest: Nest, names: dict[str, str]) -> Nest:
    if names.keys().isdisjoint((*nest.reads(), *nest.writes())):
        return nest
    memo: dict[Expr, Expr] = {}

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        return make(node.op, node.dtype, args, names[node.attr]) if node.op in LOADS and node.attr in names else None

    new = map_nest(nest, lambda expr: rebuild(expr, change, memo, LOADING))
    phases = [replace(phase, stores=tuple(replace(s, buffer=names.get(s.buffer, s.buffer)) for s in phase.stores)) for phase in new.phases]
    return replace(new, phases=tuple(phases))


# ---------------------------------------------------------------- results that the caller copies into inputs

def write_to_inputs(program: Program) -> Program:
    """Results that inputs receive, written there: what stays as it was is neither read nor written."""
    uses = Uses(program) if program.into else None
    for b, x in program.into:
        assert uses is not None
        changed = _written_to_input(program, uses, x, b)
        if changed is not None:
            program, uses = changed, Uses(changed)
    return program


class Uses:
    """Numbers of the steps that read and write each buffer, and of those that may fail: an optimiser's step has thousands of both."""

    def __init__(self, program: Program):
        self.readers: dict[str, list[int]] = {}
        self.writers: dict[str, list[int]] = {}
        self.failing: list[int] = []
        for number, step in enumerate(program.steps):
            for uses, buffers in ((self.readers, step.reads()), (self.writers, step.writes())):
                for buffer in buffers:
                    uses.setdefault(buffer, []).append(number)
            if may_fail(step):
                self.failing.append(number)


def _written_to_input(program: Program, uses: Uses, x: str, b: str) -> Program | None:
    steps, given, writers = program.steps, program.buffers[x], uses.writers.get(b, [])
    if not writers or any(steps[number].nest is None for number in writers) or given.offset != 0 or x in uses.writers:
        return None
    first, start = writers[0], steps[writers[0]].nest
    parts = None if start is None or max(uses.readers.get(x, [-1])) > first else _changed_part(start, x)
    if parts is None:
        return None
    failing = [*filter(may_fail, parts), *[steps[number] for number in uses.failing if number > first]]
    if not _can_run_again(failing, parts, x, b) or _waits(failing, parts, given, start):
        return None
    return _with_names(program, [*steps[:first], *parts, *steps[first + 1:]], {b: x})


def _waits(failing: list[ProgramStep], parts: list[ProgramStep], given: Buffer, start: Nest | None) -> bool:
    """Rule 7."""
    whole = any(part.nest and start and part.nest.axes == start.axes for part in parts)
    return whole and given.device == CPU and not failing


def _can_run_again(failing: list[ProgramStep], parts: list[ProgramStep], x: str, b: str) -> bool:
    """Rule 6; no step behind the parts reads x (rule 5)."""
    return not failing or all(x not in step.reads() for step in parts) and all(
        step.nest is not None and step.writes() == (b,) and b not in step.reads() for step in failing)


def _changed_part(nest: Nest, x: str) -> list[ProgramStep] | None:
    """Rule 4: the nest over the points at which it stores something else than x's own element; None where those are no box."""
    store = only_store(nest)
    if store is None or not is_permutation(store.index, nest.axes):
        return None
    place = Place(x, store.index)
    conditions, value = _difference(store.value, place, frozenset())
    if value is None:
        return []
    box = _box(conditions, nest.axes)
    if box is None or not all(place.named_by(load, conditions) for load in all_loads([value]) if load.attr == x):
        return None
    memo = {axis.value: as_expr(axis.value + box[axis.name][0]) for axis in nest.axes}
    axes = tuple([Axis(axis.name, box[axis.name][1]) for axis in nest.axes])
    changed = replace(nest, axes=axes, phases=(Phase("map", (), (), (Store(store.buffer, store.index, value),)),))
    changed = simplify_nest(map_nest(changed, lambda expr: rebuild(expr, lambda node, args: None, memo, AXES)))
    return [changed] if not idle_axes(changed.stores()[0].index, changed.axes) else None     # an axis of at most one point, or none


@dataclass(frozen=True, slots=True)
class Place:
    """An element of a buffer."""
    buffer: str
    index: tuple[Expr, ...]

    def named_by(self, load: Expr, given: frozenset[Expr]) -> bool:
        """Does a load read it, where conditions hold?  An index may be known then: i is 0 where i <= 0."""
        if load.op not in LOADS or load.attr != self.buffer:
            return False
        others = [(own.attr, part) for part, own in zip(access.load_index(load), self.index) if part is not own]
        known = {(name, as_expr(low or 0)) for name, low, end in filter(None, map(_bound, given if others else ()))
                 if end is not None and (end == 1 if low is None else end - low == 1)}
        return known.issuperset(others)


def _terms(condition: Expr) -> frozenset[Expr]:
    return _terms(condition.args[0]) | _terms(condition.args[1]) if condition.op == "and" else frozenset({condition})


def _difference(value: Expr, place: Place, given: frozenset[Expr]) -> tuple[frozenset[Expr], Expr | None]:
    """The conditions under which a value is another than the element at a place, and what it is then; None where it never is."""
    value = _under(value, given)
    if value.op == "load" and place.named_by(value, given):
        return given, None
    if value.op in ("where", "masked"):
        condition, otherwise = value.args[0], value.args[2 if value.op == "where" else 1]
        while otherwise.op == "where" and _terms(otherwise.args[0]) >= _terms(condition):       # the same condition, or a stricter one
            otherwise = otherwise.args[2]
        if _difference(otherwise, place, given)[1] is None:
            return _difference(value.args[1] if value.op == "where" else value, place, given | _terms(condition))
    return given, value


def _under(value: Expr, given: frozenset[Expr]) -> Expr:
    """The value where all conditions hold."""
    def change(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op not in ("where", "masked") or not _terms(args[0]) <= given:
            return None
        return args[1] if node.op == "where" else make("load", node.dtype, args[2:], node.attr)
    return rebuild(value, change, {}, bits("where", "masked")) if given else value


def _box(conditions: frozenset[Expr], axes: tuple[Axis, ...]) -> dict[str, tuple[Size, Size]] | None:
    """The first point and the extent of each axis, where each condition bounds one of them."""
    context = context_of({axis.value: (0, axis.extent - 1) for axis in axes})
    bounds: dict[str, tuple[Size, Size]] = {axis.name: (0, axis.extent) for axis in axes}
    for condition in conditions:
        found = _bound(condition)
        if found is None:
            return None
        name, low, end = found
        first, last = bounds[name]
        low = first if low is None or context.nonneg(as_size(first - low)) else low if context.nonneg(as_size(low - first)) else max_(first, low)
        end = last if end is None or context.nonneg(as_size(end - last)) else end if context.nonneg(as_size(last - end)) else min_(last, end)
        bounds[name] = low, end
    sizes = {name: (low, as_size(end - low)) for name, (low, end) in bounds.items()}
    return {name: (low, size if context.nonneg(size) else max_(size, 0)) for name, (low, size) in sizes.items()}


def _bound(condition: Expr) -> tuple[str, Size | None, Size | None] | None:
    """The axis of a comparison with something that has no axes: its name, the first point, the one behind the last."""
    if condition.op not in _BOUNDS or not all(arg.dtype == "i64" for arg in condition.args):
        return None
    (left, right), op = condition.args, condition.op
    if left.op != "axis":
        left, right, op = right, left, _MIRRORED[op]
    if left.op != "axis" or right.holds & (AXES | LOADING):
        return None
    return (left.attr, *_BOUNDS[op](as_size(right)))


_BOUNDS: dict[str, Any] = {"ge": lambda n: (n, None), "gt": lambda n: (n + 1, None), "le": lambda n: (None, n + 1), "lt": lambda n: (None, n),
                           "eq": lambda n: (n, n + 1)}
_MIRRORED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt", "eq": "eq"}
