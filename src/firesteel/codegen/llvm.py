"""Nest -> LLVM text: the loops.  Values are written by `llvm_code.py`, operators spelled in `llvm_ops.py`.

In:  a Nest and its Buffers.  Out: a `Kernel` whose text defines `void SYMBOL(ptr args)`; see docs/contracts.md for `args`.
The kernel computes how many points there are; slices of them run on torch's threads (runtime/threads.py):

    points nests     a slice of the flattened parallel axes; each point (or vector of points) runs all phases.  One function has both
                     roles, since a second one would cost a sixth of the compile time: called with args it has `fs_run` call it
                     again with a slice, whose address is made odd to tell it from args
    split nests      no parallel axis: one body a phase, a slice of the phase's outermost axis; `fs_launch` runs
                     `body(args, begin, end, chunk, extra)`; partial accumulators of the chunks are combined in order, so that the
                     result depends on the number of chunks and on nothing else

Equal nests print equal text: no name of the nest appears in it, and the symbol is a digest of the rest.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from firesteel.codegen.flat import FlatNest, FlatPhase, FlatStore, flatten, mul, product, topological
from firesteel.codegen.lanes import Shape, adds, choose
from firesteel.codegen.llvm_code import Code, Val, iota
from firesteel.codegen.llvm_ops import FLOAT, REGISTER, SPELL, combine, literal
from firesteel.codegen.printer import Kernel, decompose, weight
from firesteel.codegen.target import Target, host
from firesteel.loops.ir import Axis, Buffer, Nest
from firesteel.loops.ops import REDUCE_OPS
from firesteel.sym.expr import Expr, Size, make

TILE = 4096             # elements of the lane axis in one point of work
BLOCK = 256             # vectors (or rows) added up before they are added to the total: keeps float sums accurate
CHUNKS = 256            # the most slices that fs_launch makes
_LEAF_OPS = frozenset({"const", "symbol", "axis", "at", "at_masked", "check_index", "acc"})


def print_nest(nest: Nest, buffers: Mapping[str, Buffer], target: Target | None = None) -> Kernel:
    """The kernel of a nest, for this machine if no target is given."""
    flat, names = flatten(nest, buffers)
    symbol, text, symbols, can_fail = _print_flat(flat, target or host())
    return Kernel(nest.name, symbol, text, names, symbols, can_fail)


@functools.lru_cache(maxsize=4096)
def _print_flat(flat: FlatNest, target: Target) -> tuple[str, str, tuple[str, ...], bool]:
    """(symbol, text, size symbols, can it fail)"""
    printed = _Printer(decompose(flat, _is_spelled), target)
    body = printed.run()
    symbol = "k_" + hashlib.sha256(body.encode()).hexdigest()[:24]
    return symbol, body.replace("@KERNEL", "@" + symbol), tuple(s for s, _ in printed.symbols), printed.can_fail


def _is_spelled(node: Expr) -> bool:
    if node.op in _LEAF_OPS or node.op in SPELL:
        return True
    return node.op == "floordiv" and node.dtype not in FLOAT


class _Printer:
    """State of one `print_nest`: what the functions of the kernel share."""

    def __init__(self, nest: FlatNest, target: Target):
        self.nest, self.target = nest, target
        self.shape: Shape = choose(nest, target)
        self.symbols: list[tuple[str, str]] = []
        self.declarations: dict[str, str] = {}
        self.can_fail = False
        self.adds = bool(adds(nest))
        self.serial = self.adds and (self.shape.points is None or self.shape.width == 1)    # see _points
        stored = {s.buffer for p in nest.phases for s in p.stores}
        self.rereads = bool(stored & set(self._loaded()))

    def _loaded(self) -> Iterator[int]:
        from_nest = (n for p in self.nest.phases for n in _nodes(p))
        return (n.attr[0] for n in from_nest if n.op in ("at", "at_masked"))

    def run(self) -> str:
        functions = _split(self) if not self.nest.axes else _points(self)
        # the error slot stands after the symbols, whose number is known only now
        slot = len(self.nest.dtypes) + len(self.symbols)
        text = "\n".join(functions).replace("%ERROR_SLOT", str(slot))
        declared = [self.declarations[k] for k in sorted(self.declarations)]
        declared.append("declare i64 @fs_launch(ptr, ptr, i64, i64, ptr)" if not self.nest.axes else "declare void @fs_run(ptr, ptr, i64, i64)")
        tail = ["attributes #0 = { nounwind }", "attributes #1 = { nounwind willreturn memory(none) }", '!0 = !{!"branch_weights", i32 1, i32 100000}']
        return "\n".join([text, *declared, *tail]) + "\n"

    def code(self) -> Code:
        w = Code(self.nest, self.symbols, self.declarations, self.target)
        for k in range(len(self.nest.dtypes)):
            place = w.new(f"getelementptr i64, ptr %args, i64 {k}")
            w.remember(("buffer", k), w.new(f"load ptr, ptr {place}, align 8"), 0, 0)
        return w

    def body(self, w: Code, suffix: str) -> str:
        """The function around a phase of a split nest."""
        head = f"define internal void @KERNEL.{suffix}(ptr %args, i64 %begin, i64 %end, i64 %chunk, ptr %extra) #0 {{"
        return "\n".join([head, "entry:", *w.allocas, *w.scopes[0].lines, "  ret void", *self.failure(w), "}"])

    def failure(self, w: Code) -> list[str]:
        """Where a failed index check goes."""
        if not w.failing:
            return []
        self.can_fail = True
        return ["fail:", "  %slot = getelementptr i64, ptr %args, i64 %ERROR_SLOT", "  %error = load ptr, ptr %slot, align 8",
                "  store i64 1, ptr %error, align 8", "  ret void"]

    def both_roles(self, w: Code, points: Size) -> str:
        """The function of a points nest: called with args, and called again with a slice."""
        d = self.driver()
        total = d.size(points).name
        work = "0" if self.serial else d.size(_work(self.nest)).name
        d.line(f"call void @fs_run(ptr @KERNEL, ptr %given, i64 {total}, i64 {work})")
        start = [line.replace("%args", "%given").replace("%v", "%d") for line in d.scopes[0].lines]
        return "\n".join([_HEAD, *w.allocas, _WHICH_ROLE, *start, "  ret void", "slice:", *_SLICE, *w.scopes[0].lines, "  ret void", *self.failure(w), "}"])

    def driver(self) -> Code:
        """Code of the exported function: sizes only."""
        return Code(self.nest, self.symbols, self.declarations, self.target)


_HEAD = "define void @KERNEL(ptr %given) #0 {\nentry:"      # allocas must stand first to become registers
_WHICH_ROLE = """  %bits = ptrtoint ptr %given to i64
  %odd = trunc i64 %bits to i1
  br i1 %odd, label %slice, label %start
start:"""
_SLICE = ("  %facts = getelementptr i8, ptr %given, i64 -1", "  %args = load ptr, ptr %facts, align 8",
          "  %at.begin = getelementptr i64, ptr %facts, i64 1", "  %begin = load i64, ptr %at.begin, align 8",
          "  %at.end = getelementptr i64, ptr %facts, i64 2", "  %end = load i64, ptr %at.end, align 8")


def _nodes(phase: FlatPhase) -> list[Expr]:
    return topological(phase.roots())


# ---------------------------------------------------------------- loops

@contextlib.contextmanager
def _loop(w: Code, start: str, stop: str, step: int, may_be_empty: bool) -> Iterator[str]:
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


def _bind(w: Code, axis: str, value: str) -> None:
    w.remember(("axis", axis), value, 0, w.level)


def _lanes(w: Code, axis: Axis, start: str, stop: str, width: int, may_be_empty: bool, inside: Callable[[], None]) -> None:
    """A loop over an axis, `width` at a time.  Where the extent is no multiple, lanes past its end are masked: in every
    iteration if the machine does that for nothing, else in one iteration after the loop."""
    if width == 1 or _divides(width, axis.extent):
        _lane_loop(w, axis, start, stop, width, False, may_be_empty, inside)
    elif w.target.masks:
        _lane_loop(w, axis, start, stop, width, True, may_be_empty, inside)
    else:
        whole = w.new(f"and i64 {w.new(f'sub i64 {stop}, {start}')}, {-width}")
        rest = w.new(f"add i64 {start}, {whole}")
        _lane_loop(w, axis, start, rest, width, False, True, inside)
        _lane_loop(w, axis, rest, stop, width, True, True, inside)


def _lane_loop(w: Code, axis: Axis, start: str, stop: str, width: int, masked: bool, may_be_empty: bool, inside: Callable[[], None]) -> None:
    with _loop(w, start, stop, width, may_be_empty) as i:
        _bind(w, axis.name, i)
        before = w.lane_axis, w.width, w.mask, w.mask_level
        w.lane_axis, w.width = axis.name, width if width > 1 else 0
        w.mask, w.mask_level = None, w.level
        if masked:
            w.mask = _first_lanes(w, w.new(f"sub i64 {stop}, {i}"), width)
        inside()
        w.lane_axis, w.width, w.mask, w.mask_level = before


def _first_lanes(w: Code, count: str, width: int) -> str:
    """The mask of the first `count` lanes, compared in the smallest integers that can count them."""
    small = "i8" if width <= 64 else "i16"
    left = w.new(f"trunc i64 {_smaller(w, count, str(width))} to {small}")
    wide = w.splat(Val(left, 0, w.level), small, width)
    return w.new(f"icmp ult <{width} x {small}> {iota(width, small)}, {wide}")


def _may_be_empty(extent: Size) -> bool:
    return not (isinstance(extent, int) and extent > 0)


def _divides(width: int, extent: Size) -> bool:
    return isinstance(extent, int) and extent % width == 0


def _smaller(w: Code, a: str, b: str) -> str:
    return w.new(f"select i1 {w.new(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")


# ---------------------------------------------------------------- points nests

def _points(p: _Printer) -> list[str]:
    """Body over a slice of the flattened parallel axes, and the function that launches it.

    Where points add to the same elements, only pieces of an axis that tells elements apart run at the same time."""
    lane = next((a for a in p.nest.axes if a.name == p.shape.points), None)
    outer = [a for a in p.nest.axes if a is not lane]
    if p.adds and lane and not p.serial:
        return _pieces(p, lane, outer)
    swept = any(ph.axes for ph in p.nest.phases)
    tile = max(p.shape.width, 1) if swept else TILE
    w = p.code()
    with _loop(w, "%begin", "%end", 1, False) as point:
        rest = point
        tiles = _tiles(lane.extent, tile) if lane else 1
        start, stop = "0", ""
        if lane:
            start, stop, rest = _tile_range(w, lane, tile, tiles, rest, bool(outer))
        _decode(w, outer, rest)
        if lane is None:
            _phases(p, w)
        else:
            _lanes(w, lane, start, stop, p.shape.width, False, lambda: _phases(p, w))
    return [p.both_roles(w, product([tiles, *(a.extent for a in outer)]))]


def _pieces(p: _Printer, lane: Axis, outer: list[Axis]) -> list[str]:
    """A point is a piece of the lane axis; the other axes are loops inside."""
    tile = 4 * p.shape.width
    tiles = _tiles(lane.extent, tile)
    w = p.code()

    def inside(axes: list[Axis], start: str, stop: str) -> None:
        if not axes:
            _lanes(w, lane, start, stop, p.shape.width, False, lambda: _phases(p, w))
            return
        with _loop(w, "0", w.size(axes[0].extent).name, 1, _may_be_empty(axes[0].extent)) as i:
            _bind(w, axes[0].name, i)
            inside(axes[1:], start, stop)

    with _loop(w, "%begin", "%end", 1, False) as point:
        start, stop, _ = _tile_range(w, lane, tile, tiles, point, False)
        inside(outer, start, stop)
    return [p.both_roles(w, tiles)]


def _tiles(extent: Size, tile: int) -> Size:
    return -(-extent // tile) if isinstance(extent, int) else (extent + (tile - 1)) // tile


def _tile_range(w: Code, lane: Axis, tile: int, tiles: Size, point: str, has_outer: bool) -> tuple[str, str, str]:
    """(first, end, the rest of the point number) of the tile that a point number means."""
    extent = w.size(lane.extent).name
    if isinstance(tiles, int) and tiles == 1:
        return "0", extent, point
    index = point
    if has_outer:
        count = w.size(tiles).name
        index, point = w.new(f"urem i64 {point}, {count}"), w.new(f"udiv i64 {point}, {count}")
    start = w.new(f"mul i64 {index}, {tile}")
    end = w.new(f"add i64 {start}, {tile}")
    return start, end if _divides(tile, lane.extent) else _smaller(w, end, extent), point


def _decode(w: Code, axes: list[Axis], point: str) -> None:
    """Axes from their flattened number, innermost fastest."""
    for i, axis in enumerate(reversed(axes)):
        if i == len(axes) - 1:
            _bind(w, axis.name, point)
            return
        extent = w.size(axis.extent).name
        _bind(w, axis.name, w.new(f"urem i64 {point}, {extent}"))
        point = w.new(f"udiv i64 {point}, {extent}")


def _exported(w: Code) -> str:
    return "\n".join(["define void @KERNEL(ptr %args) #0 {", "entry:", *w.allocas, *w.scopes[0].lines, "  ret void", "}"])


def _work(nest: FlatNest) -> Size:
    total: Size = 0
    for phase in nest.phases:
        total = total + mul(weight(phase), product(a.extent for a in phase.axes))
    return mul(total, product(a.extent for a in nest.axes))


# ---------------------------------------------------------------- split nests

def _split(p: _Printer) -> list[str]:
    """One body a phase, and a driver that launches them in order and combines the partial accumulators.

    `extra` holds, for each accumulator, its value (8 bytes) and then one partial value a chunk."""
    slots: dict[str, int] = {}
    functions: list[str] = []
    driver = p.driver()
    for number, phase in enumerate(p.nest.phases):
        before = dict(slots)
        for r in phase.reduces:
            slots[r.name] = len(slots) * (CHUNKS + 1)
        total, text = _split_body(p, number, phase, before, slots)
        functions.append(text)
        _split_launch(p, driver, number, phase, total, slots)
    count = max(len(slots), 1) * (CHUNKS + 1)
    driver.allocas.append(f"  %extra = alloca [{count} x i64], align 8")
    return [*functions, _exported(driver)]


def _split_axis(p: _Printer, number: int, phase: FlatPhase) -> Axis | None:
    """The axis whose range is sliced: the outermost; nothing in a scan or where stores may collide."""
    if phase.kind == "scan" or p.serial or not phase.axes:
        return None
    return _loop_order(phase, p.shape.rows[number])[0]


def _split_body(p: _Printer, number: int, phase: FlatPhase, before: dict[str, int], slots: dict[str, int]) -> tuple[Size, str]:
    w = p.code()
    for earlier in p.nest.phases[:number]:
        for r in earlier.reduces:
            place = w.new(f"getelementptr i64, ptr %extra, i64 {before[r.name]}")
            w.remember(make("acc", r.dtype, (), r.name), w.new(f"load {REGISTER[r.dtype]}, ptr {place}"), 0, 0)
    axis = _split_axis(p, number, phase)
    lane = p.shape.rows[number]
    step = p.shape.widths[number] * BLOCK if axis and axis.name == lane else 1
    window = None
    if axis:
        start = w.new(f"mul i64 %begin, {step}")
        window = axis.name, start, _smaller(w, w.new(f"mul i64 %end, {step}"), w.size(axis.extent).name)
    _phase(p, w, number, phase, window)
    for r in phase.reduces:
        place = w.new(f"getelementptr i64, ptr %extra, i64 {slots[r.name] + 1}")
        mine = w.new(f"getelementptr i64, ptr {place}, i64 %chunk")
        w.line(f"store {REGISTER[r.dtype]} {w.memo[make('acc', r.dtype, (), r.name)].name}, ptr {mine}")
    return (_tiles(axis.extent, step) if axis else 1), p.body(w, f"body{number}")


def _split_launch(p: _Printer, w: Code, number: int, phase: FlatPhase, total: Size, slots: dict[str, int]) -> None:
    count = w.size(total).name
    work = w.size(mul(weight(phase), product(a.extent for a in phase.axes))).name if not p.serial else "0"
    for r in phase.reduces:       # no chunk at all leaves the identity
        place = w.new(f"getelementptr i64, ptr %extra, i64 {slots[r.name]}")
        w.line(f"store {REGISTER[r.dtype]} {literal(REDUCE_OPS[r.op].identity(r.dtype), r.dtype)}, ptr {place}")
    chunks = w.new(f"call i64 @fs_launch(ptr @KERNEL.body{number}, ptr %args, i64 {count}, i64 {work}, ptr %extra)")
    if not phase.reduces:
        return
    with _loop(w, "0", chunks, 1, True) as chunk:
        for r in phase.reduces:
            ty = REGISTER[r.dtype]
            place = w.new(f"getelementptr i64, ptr %extra, i64 {slots[r.name]}")
            first = w.new(f"getelementptr i64, ptr %extra, i64 {slots[r.name] + 1}")
            part = w.new(f"load {ty}, ptr {w.new(f'getelementptr i64, ptr {first}, i64 {chunk}')}")
            total_so_far = w.new(f"load {ty}, ptr {place}")
            w.line(f"store {ty} {combine(w, r.op, r.dtype, 0, total_so_far, part)}, ptr {place}")


# ---------------------------------------------------------------- phases

def _phases(p: _Printer, w: Code) -> None:
    for number, phase in enumerate(p.nest.phases):
        _phase(p, w, number, phase, None)
        if p.rereads and number + 1 < len(p.nest.phases):
            w.forget_memory()


def _loop_order(phase: FlatPhase, lane: str | None) -> list[Axis]:
    """A phase's axes, that of the lanes innermost."""
    return sorted(phase.axes, key=lambda a: a.name == lane)


class _Accumulator:
    """One Reduce of a phase while its loops are written: an alloca; for long float sums a second one for the current block,
    and a third for what rounding took away when blocks were added up (Kahan's way: cheap, since blocks are long)."""

    def __init__(self, w: Code, reduce, lanes: int, blocked: bool):
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


def _phase(p: _Printer, w: Code, number: int, phase: FlatPhase, window: tuple[str, str, str] | None) -> None:
    """One phase inside the scopes that are open.  `window`: (axis, first, end) replaces that axis' range."""
    lane = p.shape.rows[number]
    width = p.shape.widths[number]
    lanes = width if width > 1 and (p.shape.points or lane) else 0
    long = phase.kind == "reduce" and _is_long(phase.axes, width if lane else 1)
    accumulators = [_Accumulator(w, r, lanes, long and r.op == "sum" and r.dtype in FLOAT) for r in phase.reduces]
    _sweep(w, phase, _loop_order(phase, lane), lane, width, accumulators, window)
    for a in accumulators:
        a.finish(w, lane is not None)


def _is_long(axes: Sequence[Axis], width: int) -> bool:
    steps = product(a.extent for a in axes)
    return not isinstance(steps, int) or steps > BLOCK * width


def _range(w: Code, axis: Axis, window: tuple[str, str, str] | None) -> tuple[str, str, bool]:
    if window and window[0] == axis.name:
        return window[1], window[2], False
    return "0", w.size(axis.extent).name, _may_be_empty(axis.extent)


def _sweep(w: Code, phase: FlatPhase, axes: list[Axis], lane: str | None, width: int, accumulators: list[_Accumulator],
           window: tuple[str, str, str] | None) -> None:
    """Loops over the axes, outermost first, around one point.  `width`: of the steps along the lane axis."""
    if not axes:
        _point(w, phase, accumulators)
        return
    axis, *inner = axes
    start, stop, may_be_empty = _range(w, axis, window)
    if inner:
        with _loop(w, start, stop, 1, may_be_empty) as i:
            _bind(w, axis.name, i)
            _sweep(w, phase, inner, lane, width, accumulators, window)
        return
    step = width if axis.name == lane else 1
    blocked = any(a.running != a.total for a in accumulators)
    if blocked and _is_long([axis], step):
        with _loop(w, start, stop, step * BLOCK, may_be_empty) as first:
            end = _smaller(w, w.new(f"add i64 {first}, {step * BLOCK}"), stop)
            _innermost(w, phase, axis, step, accumulators, first, end, False)
    else:
        _innermost(w, phase, axis, step, accumulators, start, stop, may_be_empty)


def _innermost(w: Code, phase: FlatPhase, axis: Axis, step: int, accumulators: list[_Accumulator], start: str, stop: str,
               may_be_empty: bool) -> None:
    if step > 1:
        _lanes(w, axis, start, stop, step, may_be_empty, lambda: _point(w, phase, accumulators))
    else:
        with _loop(w, start, stop, 1, may_be_empty) as i:
            _bind(w, axis.name, i)
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
