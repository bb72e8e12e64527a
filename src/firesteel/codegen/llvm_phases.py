"""Loops, accumulators and stores of LLVM kernels: one phase of a nest, written into a `Code`.

In: a Code whose open scopes bind the parallel axes, a phase, and the Shape that says which axis the lanes run along.  Out: the
phase's loops in the Code's text, and its accumulators' values in the Code's memo, where later phases find them.
Float sums are added up in blocks, so that a long sum is as accurate as eager's.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from firesteel.codegen.flat import FlatPhase, FlatReduce, FlatStore, product
from firesteel.codegen.lanes import Shape
from firesteel.codegen.llvm_code import Code, Val, iota
from firesteel.codegen.llvm_ops import FLOAT, REGISTER, combine
from firesteel.loops.ir import Axis
from firesteel.loops.ops import REDUCE_OPS
from firesteel.sym.expr import Size, make

BLOCK = 256             # vectors (or rows) added up before they are added to the total: keeps float sums accurate


# ---------------------------------------------------------------- loops

@contextlib.contextmanager
def write_loop(w: Code, start: str, stop: str, step: int, may_be_empty: bool) -> Iterator[str]:
    """The inside runs for start, start + step, ... < stop; yields the counter's name."""
    counter, body, done = w.alloca("i64"), w.label("loop"), w.label("done")
    guard_before = w.guard
    if may_be_empty:
        with_guard = w.begin()
        w.guard = w.level
        some, inside = w.name(), w.label("some")
        with_guard.opening += [f"  {some} = icmp slt i64 {start}, {stop}", f"  br i1 {some}, label %{inside}, label %{done}", f"{inside}:"]
    scope = w.begin()
    scope.opening += [f"  store i64 {start}, ptr {counter}", f"  br label %{body}", f"{body}:"]
    i = w.new(f"load i64, ptr {counter}")
    yield i
    following = w.new(f"add nsw i64 {i}, {step}")
    w.line(f"store i64 {following}, ptr {counter}")
    more = w.new(f"icmp slt i64 {following}, {stop}")
    w.line(f"br i1 {more}, label %{body}, label %{done}")
    w.end()
    if may_be_empty:
        w.end()
    w.mark(done)
    w.guard = guard_before


def bind(w: Code, axis: str, value: str) -> None:
    w.remember(("axis", axis), value, 0, w.level)


def write_lanes(w: Code, axis: Axis, start: str, stop: str, width: int, may_be_empty: bool, inside: Callable[[], None]) -> None:
    """A loop over an axis, `width` at a time.  Where the extent is no multiple, lanes past its end are masked: in every
    iteration if the machine does that for nothing, else in one iteration after the loop."""
    if width == 1 or divides(width, axis.extent):
        _lane_loop(w, axis, start, stop, width, False, may_be_empty, inside)
    elif w.target.masks:
        _lane_loop(w, axis, start, stop, width, True, may_be_empty, inside)
    else:
        whole = w.new(f"and i64 {w.new(f'sub i64 {stop}, {start}')}, {-width}")
        rest = w.new(f"add i64 {start}, {whole}")
        _lane_loop(w, axis, start, rest, width, False, True, inside)
        _lane_loop(w, axis, rest, stop, width, True, True, inside)


def _lane_loop(w: Code, axis: Axis, start: str, stop: str, width: int, masked: bool, may_be_empty: bool, inside: Callable[[], None]) -> None:
    with write_loop(w, start, stop, width, may_be_empty) as i:
        bind(w, axis.name, i)
        before = w.lane_axis, w.width, w.mask, w.mask_level
        w.lane_axis, w.width = axis.name, width if width > 1 else 0
        w.mask, w.mask_level = None, w.level
        if masked:
            w.mask = _firstwrite_lanes(w, w.new(f"sub i64 {stop}, {i}"), width)
        inside()
        w.lane_axis, w.width, w.mask, w.mask_level = before


def _firstwrite_lanes(w: Code, count: str, width: int) -> str:
    """The mask of the first `count` lanes, compared in the smallest integers that can count them."""
    small = "i8" if width <= 64 else "i16"
    left = w.new(f"trunc i64 {smaller(w, count, str(width))} to {small}")
    wide = w.splat(Val(left, 0, w.level), small, width)
    return w.new(f"icmp ult <{width} x {small}> {iota(width, small)}, {wide}")


def can_be_empty(extent: Size) -> bool:
    return not (isinstance(extent, int) and extent > 0)


def divides(width: int, extent: Size) -> bool:
    return isinstance(extent, int) and extent % width == 0


def smaller(w: Code, a: str, b: str) -> str:
    return w.new(f"select i1 {w.new(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")


# ---------------------------------------------------------------- phases

def write_phases(w: Code, shape: Shape, rereads: bool) -> None:
    """All phases of the nest, for the point whose axes are bound.  `rereads`: a phase may load what an earlier one stored."""
    for number, phase in enumerate(w.nest.phases):
        write_phase(w, shape, number, phase, None)
        if rereads and number + 1 < len(w.nest.phases):
            w.forget_memory()


def loop_order(phase: FlatPhase, lane: str | None) -> list[Axis]:
    """A phase's axes, that of the lanes innermost."""
    return sorted(phase.axes, key=lambda a: a.name == lane)


class _Accumulator:
    """One Reduce of a phase while its loops are written: an alloca; for long float sums a second one for the current block,
    and a third for what rounding took away when blocks were added up (Kahan's way: cheap, since blocks are long)."""

    def __init__(self, w: Code, reduce: FlatReduce, lanes: int, blocked: bool):
        self.reduce, self.lanes = reduce, lanes
        self.type = w.shape(reduce.dtype, lanes)
        self.identity = w.constant(REDUCE_OPS[reduce.op].identity(reduce.dtype), make("acc", reduce.dtype, (), reduce.name), lanes)
        self.total = w.alloca(self.type)
        self.running = w.alloca(self.type) if blocked else self.total
        self.lost = w.alloca(self.type) if blocked else self.total
        for place in dict.fromkeys((self.total, self.running, self.lost)):
            w.line(f"store {self.type} {self.identity}, ptr {place}")

    def take(self, w: Code, value: str) -> str:
        old = w.new(f"load {self.type}, ptr {self.running}")
        new = combine(w, self.reduce.op, self.reduce.dtype, self.lanes, old, value)
        if self.lanes and w.mask:
            new = w.new(f"select {w.shape('bool', self.lanes)} {w.mask}, {self.type} {new}, {self.type} {old}")
        w.line(f"store {self.type} {new}, ptr {self.running}")
        return new

    def flush(self, w: Code) -> None:
        """Adds the block to the total."""
        if self.running == self.total:
            return
        total, block, lost = (w.new(f"load {self.type}, ptr {place}") for place in (self.total, self.running, self.lost))
        part = w.new(f"fsub {self.type} {block}, {lost}")
        new = w.new(f"fadd {self.type} {total}, {part}")
        gained = w.new(f"fsub {self.type} {new}, {total}")
        still_lost = w.new(f"fsub {self.type} {gained}, {part}")
        # an infinite total would make the correction NaN
        finite = w.new(f"fcmp ord {self.type} {still_lost}, {still_lost}")
        kept = w.new(f"select {w.shape('bool', self.lanes)} {finite}, {self.type} {still_lost}, {self.type} {self.identity}")
        for value, place in ((new, self.total), (kept, self.lost), (self.identity, self.running)):
            w.line(f"store {self.type} {value}, ptr {place}")

    def finish(self, w: Code, across: bool) -> None:
        """The final value becomes what acc(name) reads; `across`: lanes are parts of one value."""
        name, lanes = w.new(f"load {self.type}, ptr {self.total}"), self.lanes
        if across and lanes:
            name, lanes = _across(w, self.reduce.op, self.reduce.dtype, lanes, name), 0
        w.remember(make("acc", self.reduce.dtype, (), self.reduce.name), name, lanes, w.level)


def _across(w: Code, op: str, dtype: str, lanes: int, name: str) -> str:
    """One value out of the lanes: halves are combined until one is left."""
    while lanes > 1:
        half = lanes // 2
        low = w.shuffle(name, REGISTER[dtype], lanes, range(half))
        high = w.shuffle(name, REGISTER[dtype], lanes, range(half, lanes))
        name, lanes = combine(w, op, dtype, half, low, high), half
    return w.new(f"extractelement <1 x {REGISTER[dtype]}> {name}, i64 0")


def write_phase(w: Code, shape: Shape, number: int, phase: FlatPhase, window: tuple[str, str, str] | None) -> None:
    """One phase inside the scopes that are open.  `window`: (axis, first, end) replaces that axis' range."""
    lane = shape.rows[number]
    width = shape.widths[number]
    lanes = width if width > 1 and (shape.points or lane) else 0
    long = phase.kind == "reduce" and _is_long(phase.axes, width if lane else 1)
    accumulators = [_Accumulator(w, r, lanes, long and r.op == "sum" and r.dtype in FLOAT) for r in phase.reduces]
    _sweep(w, phase, loop_order(phase, lane), lane, width, accumulators, window)
    for a in accumulators:
        a.finish(w, lane is not None)


def _is_long(axes: Sequence[Axis], width: int) -> bool:
    steps = product(a.extent for a in axes)
    return not isinstance(steps, int) or steps > BLOCK * width


def _range(w: Code, axis: Axis, window: tuple[str, str, str] | None) -> tuple[str, str, bool]:
    if window and window[0] == axis.name:
        return window[1], window[2], False
    return "0", w.size(axis.extent).name, can_be_empty(axis.extent)


def _sweep(w: Code, phase: FlatPhase, axes: list[Axis], lane: str | None, width: int, accumulators: list[_Accumulator],
           window: tuple[str, str, str] | None) -> None:
    """Loops over the axes, outermost first, around one point.  `width`: of the steps along the lane axis."""
    if not axes:
        _point(w, phase, accumulators)
        return
    axis, *inner = axes
    start, stop, may_be_empty = _range(w, axis, window)
    if inner:
        with write_loop(w, start, stop, 1, may_be_empty) as i:
            bind(w, axis.name, i)
            _sweep(w, phase, inner, lane, width, accumulators, window)
        return
    step = width if axis.name == lane else 1
    blocked = any(a.running != a.total for a in accumulators)
    if blocked and _is_long([axis], step):
        with write_loop(w, start, stop, step * BLOCK, may_be_empty) as first:
            end = smaller(w, w.new(f"add i64 {first}, {step * BLOCK}"), stop)
            _innermost(w, phase, axis, step, accumulators, first, end, False)
    else:
        _innermost(w, phase, axis, step, accumulators, start, stop, may_be_empty)


def _innermost(w: Code, phase: FlatPhase, axis: Axis, step: int, accumulators: list[_Accumulator], start: str, stop: str,
               may_be_empty: bool) -> None:
    if step > 1:
        write_lanes(w, axis, start, stop, step, may_be_empty, lambda: _point(w, phase, accumulators))
    else:
        with write_loop(w, start, stop, 1, may_be_empty) as i:
            bind(w, axis.name, i)
            _point(w, phase, accumulators)
    for a in accumulators:
        a.flush(w)


def _point(w: Code, phase: FlatPhase, accumulators: list[_Accumulator]) -> None:
    """Accumulate, then store; a scan's stores see the running value."""
    vals = w.values([a.reduce.value for a in accumulators])
    for a, val in zip(accumulators, vals, strict=True):
        running = a.take(w, w.shaped(val, a.reduce.value, a.lanes))
        if phase.kind == "scan":
            w.remember(make("acc", a.reduce.dtype, (), a.reduce.name), running, a.lanes, w.level)
    w.values([e for s in phase.stores for e in (*s.irregular, s.value)])
    for s in phase.stores:
        _store(w, s)


def _store(w: Code, s: FlatStore) -> None:
    pointer, offsets = w.pointer(s.buffer, s.address, s.irregular, w.level)
    kind = w.lane_kind(s.address, s.irregular, offsets)
    lanes = w.width if w.width and kind != "one" else 0
    dtype = w.nest.dtypes[s.buffer]
    value = w.shaped(w.memo[s.value], s.value, lanes)
    if s.mode == "add":
        raw = w.read(s.buffer, pointer, offsets, lanes, kind, w.mask if lanes else None)
        value = combine(w, "or" if dtype == "bool" else "add", dtype, lanes, w.from_memory(raw, dtype, lanes), value)
    w.put(s.buffer, pointer, offsets, lanes, kind, w.to_memory(value, dtype, lanes))
