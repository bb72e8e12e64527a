"""Loops, accumulators and stores of LLVM kernels: one phase of a nest, written into an `LlvmFunction`.

In: an LlvmFunction whose open scopes bind the parallel axes, a phase, and the Shape that says which axis the lanes run along.  Out: the
phase's loops in the function's text, and its accumulators' values in its memo, where later phases find them.
Float sums are added up in blocks, whose sums are added in float64, so that a long sum is at least as accurate as eager's.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from firesteel.codegen.flat import Address, FlatPhase, FlatStore
from firesteel.codegen.lane_masks import first_lanes, smaller
from firesteel.codegen.lanes import Shape
from firesteel.codegen.llvm_code import LlvmFunction
from firesteel.codegen.llvm_ops import FLOAT, MEMORY, REGISTER, combine, convert
from firesteel.codegen.printer import weight
from firesteel.codegen.strided import is_apart, windows, woven, woven_homes
from firesteel.loops.ir import Axis, Reduce
from firesteel.loops.scalars import REDUCE_OPS
from firesteel.sym.expr import Size, make, product

LIGHT = 8               # operations a point of a reduction that a mask would slow down
BLOCK = 16              # vectors (or rows) added up before they are added to the total: keeps float sums accurate


# ---------------------------------------------------------------- loops

@contextlib.contextmanager
def write_loop(w: LlvmFunction, start: str, stop: str, step: int, may_be_empty: bool) -> Iterator[str]:
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


def bind(w: LlvmFunction, axis: str, value: str) -> None:
    w.remember(("axis", axis), value, 0, w.level)


def write_lanes(w: LlvmFunction, axis: Axis, start: str, stop: str, width: int, may_be_empty: bool, inside: Callable[[], None],
                light: bool = False) -> None:
    """A loop over an axis, `width` at a time.  Where the extent is no multiple, lanes past its end are masked: in every
    iteration if the machine does that for nothing and the inside is not so light that it is felt, else in one iteration after the loop."""
    if width == 1 or divides(width, axis.extent):
        _lane_loop(w, axis, start, stop, width, False, may_be_empty, inside)
    elif w.target.masks and not light:
        _lane_loop(w, axis, start, stop, width, True, may_be_empty, inside)
    else:
        whole = w.new(f"and i64 {w.new(f'sub i64 {stop}, {start}')}, {-width}")
        rest = w.new(f"add i64 {start}, {whole}")
        _lane_loop(w, axis, start, rest, width, False, True, inside)
        _lane_loop(w, axis, rest, stop, width, True, True, inside)


def _lane_loop(w: LlvmFunction, axis: Axis, start: str, stop: str, width: int, masked: bool, may_be_empty: bool, inside: Callable[[], None]) -> None:
    with write_loop(w, start, stop, width, may_be_empty) as i:
        bind(w, axis.name, i)
        before = w.lane_axis, w.width, w.mask, w.mask_level
        w.lane_axis, w.width = axis.name, width if width > 1 else 0
        w.mask, w.mask_level = None, w.level
        if masked:
            w.mask = first_lanes(w, w.new(f"sub i64 {stop}, {i}"), width)
        inside()
        w.lane_axis, w.width, w.mask, w.mask_level = before


def write_vector(w: LlvmFunction, axis: Axis, start: str, stop: str, width: int, inside: Callable[[], None]) -> None:
    """The one vector of [start, stop) on an axis that has room for a vector: one that would go past the axis' end starts earlier, and the lanes
    that an earlier vector has too are not stored.  So no sweep inside of it needs a mask."""
    assert isinstance(axis.extent, int)
    first = smaller(w, start, str(axis.extent - width))
    with write_loop(w, first, stop, width, False) as i:
        bind(w, axis.name, i)
        before = w.lane_axis, w.width, w.mask, w.mask_level, w.inside
        w.lane_axis, w.width, w.mask_level, w.inside = axis.name, width, w.level, True
        w.mask = w.new(f"xor <{width} x i1> {first_lanes(w, w.new(f'sub i64 {start}, {i}'), width)}, splat (i1 true)")
        inside()
        w.lane_axis, w.width, w.mask, w.mask_level, w.inside = before


def can_be_empty(extent: Size) -> bool:
    return not (isinstance(extent, int) and extent > 0)


def divides(width: int, extent: Size) -> bool:
    return isinstance(extent, int) and extent % width == 0


# ---------------------------------------------------------------- phases

def write_phases(w: LlvmFunction, shape: Shape, rereads: bool) -> None:
    """All phases of the nest, for the point whose axes are bound.  `rereads`: a phase may load what an earlier one stored."""
    for number, phase in enumerate(w.nest.phases):
        write_phase(w, shape, number, phase, None)
        if rereads and number + 1 < len(w.nest.phases):
            w.forget_memory()


def loop_order(phase: FlatPhase, lane: str | None) -> list[Axis]:
    """A phase's axes, that of the lanes innermost."""
    return sorted(phase.axes, key=lambda a: a.name == lane)


class _Accumulator:
    """One Reduce of a phase while its loops are written: an alloca; a long float sum has a second one for the current block.
    The blocks of an f32 sum are added in double; those of an f64 sum with a third alloca for what rounding took away (Kahan)."""

    def __init__(self, w: LlvmFunction, reduce: Reduce, lanes: int, blocked: bool, across: bool):
        self.reduce, self.lanes, self.blocked = reduce, lanes, blocked
        self.across = across                                # are lanes parts of one value?
        self.wide = "f64" if blocked else reduce.dtype      # the total's dtype
        self.type = w.shape(reduce.dtype, lanes)
        self.identity = self._identity(w, reduce.dtype)
        self.total = w.alloca(w.shape(self.wide, lanes))
        self.running = w.alloca(self.type) if blocked else self.total
        self.lost = w.alloca(self.type) if blocked and reduce.dtype == "f64" else ""
        w.line(f"store {w.shape(self.wide, lanes)} {self._identity(w, self.wide)}, ptr {self.total}")
        for place in (self.running, self.lost) if self.lost else (self.running,) if blocked else ():
            w.line(f"store {self.type} {self.identity}, ptr {place}")

    def _identity(self, w: LlvmFunction, dtype: str, lanes: int | None = None) -> str:
        lanes = self.lanes if lanes is None else lanes
        return w.constant(REDUCE_OPS[self.reduce.op].identity(dtype), make("acc", dtype, (), self.reduce.name), lanes)

    def _neutral(self, w: LlvmFunction, lanes: int) -> str:
        """What changes no value.  Of float sums -0.0: LLVM shifts zeros in by an instruction that is slow."""
        if self.reduce.op == "sum" and self.reduce.dtype in FLOAT:
            return w.constant(-0.0, make("acc", self.reduce.dtype, (), self.reduce.name), lanes)
        return self._identity(w, self.reduce.dtype, lanes)

    def scan(self, w: LlvmFunction, value: str) -> str:
        """The running values of all lanes: within the vector in log2(lanes) steps, then with that of the vector before, for which each waits."""
        op, dtype, lanes, ty = self.reduce.op, self.reduce.dtype, w.width, w.shape(self.reduce.dtype, w.width)
        neutral = self._neutral(w, lanes)
        if w.mask:
            value = w.new(f"select {w.shape('bool', lanes)} {w.mask}, {ty} {value}, {ty} {neutral}")
        step = 1
        while step < lanes:
            picks = ", ".join(f"i32 {lane - step if lane >= step else lanes}" for lane in range(lanes))
            earlier = w.new(f"shufflevector {ty} {value}, {ty} {neutral}, <{lanes} x i32> <{picks}>")
            value, step = combine(w, op, dtype, lanes, earlier, value), 2 * step
        before = w.new(f"load {self.type}, ptr {self.total}")
        last = w.new(f"extractelement {ty} {value}, i64 {lanes - 1}")
        w.line(f"store {self.type} {combine(w, op, dtype, 0, before, last)}, ptr {self.total}")
        return combine(w, op, dtype, lanes, w.spread(before, REGISTER[dtype], lanes), value)

    def take(self, w: LlvmFunction, value: str) -> str:
        old = w.new(f"load {self.type}, ptr {self.running}")
        new = self._with_product(w, old) or combine(w, self.reduce.op, self.reduce.dtype, self.lanes, old, value)
        if self.across and self.lanes and w.mask:
            new = w.new(f"select {w.shape('bool', self.lanes)} {w.mask}, {self.type} {new}, {self.type} {old}")
        w.line(f"store {self.type} {new}, ptr {self.running}")
        return new

    def _with_product(self, w: LlvmFunction, old: str) -> str | None:
        """old + a * b, rounded once, where a sum of products is asked for and the machine has the instruction."""
        value = self.reduce.value
        if value.op != "mul" or self.reduce.op != "sum" or self.reduce.dtype not in FLOAT or not w.target.fma or len(value.args) != 2:
            return None
        return w.intrinsic("fma", self.reduce.dtype, self.lanes, [*(w.shaped(w.memo[a], a, self.lanes) for a in value.args), old])

    def flush(self, w: LlvmFunction) -> None:
        """Adds the block to the total."""
        if not self.blocked:
            return
        block, ty = w.new(f"load {self.type}, ptr {self.running}"), w.shape(self.wide, self.lanes)
        total = w.new(f"load {ty}, ptr {self.total}")
        new = self._compensated(w, total, block) if self.lost else w.new(f"fadd {ty} {total}, {w.new(f'fpext {self.type} {block} to {ty}')}")
        w.line(f"store {ty} {new}, ptr {self.total}")
        w.line(f"store {self.type} {self.identity}, ptr {self.running}")

    def _compensated(self, w: LlvmFunction, total: str, block: str) -> str:
        """total + block, with what the last addition lost."""
        part = w.new(f"fsub {self.type} {block}, {w.new(f'load {self.type}, ptr {self.lost}')}")
        new = w.new(f"fadd {self.type} {total}, {part}")
        gained = w.new(f"fsub {self.type} {new}, {total}")
        still_lost = w.new(f"fsub {self.type} {gained}, {part}")
        # an infinite total would make the correction NaN
        finite = w.new(f"fcmp ord {self.type} {still_lost}, {still_lost}")
        kept = w.new(f"select {w.shape('bool', self.lanes)} {finite}, {self.type} {still_lost}, {self.type} {self.identity}")
        w.line(f"store {self.type} {kept}, ptr {self.lost}")
        return new

    def finish(self, w: LlvmFunction) -> None:
        """The final value becomes what acc(name) reads."""
        name, lanes = w.new(f"load {w.shape(self.wide, self.lanes)}, ptr {self.total}"), self.lanes
        if self.across and lanes:
            name, lanes = _across(w, self.reduce.op, self.wide, lanes, name), 0
        name = convert(w, name, self.wide, self.reduce.dtype, lanes)
        w.remember(make("acc", self.reduce.dtype, (), self.reduce.name), name, lanes, w.level)


def _across(w: LlvmFunction, op: str, dtype: str, lanes: int, name: str) -> str:
    """One value out of the lanes: halves are combined until one is left."""
    while lanes > 1:
        half = lanes // 2
        low = w.shuffle(name, REGISTER[dtype], lanes, range(half))
        high = w.shuffle(name, REGISTER[dtype], lanes, range(half, lanes))
        name, lanes = combine(w, op, dtype, half, low, high), half
    return w.new(f"extractelement <1 x {REGISTER[dtype]}> {name}, i64 0")


def write_phase(w: LlvmFunction, shape: Shape, number: int, phase: FlatPhase, window: tuple[str, str, str] | None) -> None:
    """One phase inside the scopes that are open.  `window`: (axis, first, end) replaces that axis' range."""
    lane = shape.rows[number]
    width = shape.widths[number]
    lanes = width if width > 1 and (shape.points or lane) else 0
    w.windows = windows(phase, shape.points or lane) if lanes else {}
    lanes = 0 if phase.kind == "scan" and lane else lanes       # one running value goes from vector to vector
    long = phase.kind == "reduce" and _is_long(phase.axes, width if lane else 1)
    accumulators = [_Accumulator(w, r, lanes, long and r.op == "sum" and r.dtype in FLOAT, lane is not None) for r in phase.reduces]
    _sweep(w, phase, loop_order(phase, lane), lane, width, accumulators, window)
    for a in accumulators:
        a.finish(w)


def _is_long(axes: Sequence[Axis], width: int) -> bool:
    steps = product(a.extent for a in axes)
    return not isinstance(steps, int) or steps > BLOCK * width


def _range(w: LlvmFunction, axis: Axis, window: tuple[str, str, str] | None) -> tuple[str, str, bool]:
    if window and window[0] == axis.name:
        return window[1], window[2], False
    return "0", w.size(axis.extent).name, can_be_empty(axis.extent)


def _sweep(w: LlvmFunction, phase: FlatPhase, axes: list[Axis], lane: str | None, width: int, accumulators: list[_Accumulator],
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
    blocked = any(a.blocked for a in accumulators)
    if blocked and _is_long([axis], step):
        with write_loop(w, start, stop, step * BLOCK, may_be_empty) as first:
            end = smaller(w, w.new(f"add i64 {first}, {step * BLOCK}"), stop)
            _innermost(w, phase, axis, step, accumulators, first, end, False)
    else:
        _innermost(w, phase, axis, step, accumulators, start, stop, may_be_empty)


def _innermost(w: LlvmFunction, phase: FlatPhase, axis: Axis, step: int, accumulators: list[_Accumulator], start: str, stop: str,
               may_be_empty: bool) -> None:
    if step > 1:
        light = bool(accumulators) and weight(phase) <= LIGHT or is_apart(phase, axis.name)
        write_lanes(w, axis, start, stop, step, may_be_empty, lambda: _point(w, phase, accumulators), light)
    else:
        with write_loop(w, start, stop, 1, may_be_empty) as i:
            bind(w, axis.name, i)
            _point(w, phase, accumulators)
    for a in accumulators:
        a.flush(w)


def _point(w: LlvmFunction, phase: FlatPhase, accumulators: list[_Accumulator]) -> None:
    """Accumulate, then store; a scan's stores see the running value."""
    vals = w.values([a.reduce.value for a in accumulators])
    for a, val in zip(accumulators, vals, strict=True):
        along = w.width if phase.kind == "scan" and not a.lanes else 0
        running = a.scan(w, w.shaped(val, a.reduce.value, along)) if along else a.take(w, w.shaped(val, a.reduce.value, a.lanes))
        if phase.kind == "scan":
            w.remember(make("acc", a.reduce.dtype, (), a.reduce.name), running, along or a.lanes, w.level)
    w.values([e for s in phase.stores for e in (*s.irregular, s.value)])
    for stores in woven(phase.stores, w.lane_axis if w.width else None):
        if len(stores) > 1:
            _store_woven(w, stores)
        else:
            _store(w, stores[0])


def _store(w: LlvmFunction, s: FlatStore) -> None:
    pointer, offsets = w.pointer(s.buffer, s.address, s.irregular, w.level)
    kind = w.lane_kind(s.address, s.irregular, offsets)
    lanes = w.width if w.width and kind != "one" else 0
    dtype = w.nest.dtypes[s.buffer]
    if s.mode == "add":
        value = w.shaped(w.memo[s.value], s.value, lanes)
        raw = w.read(s.buffer, pointer, offsets, lanes, kind, w.mask if lanes else None)
        total = combine(w, "or" if dtype == "bool" else "add", dtype, lanes, w.from_memory(raw, dtype, lanes), value)
        w.put(s.buffer, pointer, offsets, lanes, kind, w.to_memory(total, dtype, lanes))
    else:
        w.put(s.buffer, pointer, offsets, lanes, kind, w.stored(s.value, lanes))


def _store_woven(w: LlvmFunction, stores: Sequence[FlatStore]) -> None:
    """Values that together fill memory without gaps, in whole vectors."""
    first, dtype, mask = stores[0], w.nest.dtypes[stores[0].buffer], w.mask
    values = [w.stored(store.value, w.width) for store in stores]
    for part in range(len(stores)):
        homes = woven_homes(len(stores), part, w.width)
        row = w.picked(values, MEMORY[dtype], homes)
        pointer, _ = w.pointer(first.buffer, Address(first.address.terms, first.address.base + part * w.width), (), w.level)
        w.mask = mask and w.spread_mask(mask, [lane for _, lane in homes])
        w.put(first.buffer, pointer, None, w.width, "row", row)
    w.mask = mask
