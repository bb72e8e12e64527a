"""Nest -> LLVM text: the functions.  Phases are written by `llvm_phases.py`, values by `llvm_code.py`, operators by `llvm_ops.py`.

In:  a Nest and its Buffers.  Out: a `Kernel` whose text defines `void SYMBOL(ptr args)`; see docs/contracts.md for `args`.
The kernel computes how many points there are; slices of them run on torch's threads (runtime/threads.py):

    points nests     a slice of the flattened parallel axes; each point (or vector of points) runs all phases.  One function has both
                     roles, since a second one would cost a sixth of the compile time: called with args it has `fs_run` call it
                     again with a slice, whose address has its lowest bit set to distinguish it from args
    split nests      no parallel axis: one body a phase, a slice of the phase's outermost axis; `fs_launch` runs
                     `body(args, begin, end, chunk, extra)`; partial accumulators of the chunks are combined in order, so that the
                     result depends on the number of chunks and on nothing else

Equal nests print equal text: no name of the nest appears in it, and the symbol is a digest of the rest.
"""
from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping

from firesteel.codegen.flat import FlatNest, FlatPhase, flatten
from firesteel.codegen.lane_masks import smaller
from firesteel.codegen.lanes import Shape, adds, choose, turned_loads
from firesteel.codegen.llvm_code import LlvmFunction
from firesteel.codegen.llvm_ops import FLOAT, REGISTER, SPELL, combine, literal
from firesteel.codegen.llvm_phases import (
    BLOCK,
    bind,
    can_be_empty,
    divides,
    loop_order,
    write_lanes,
    write_loop,
    write_phase,
    write_phases,
    write_vector,
)
from firesteel.codegen.printer import Kernel, decompose, weight
from firesteel.codegen.strided import is_apart
from firesteel.codegen.target import Target, this_machine
from firesteel.codegen.turning import write_squares
from firesteel.loops.ir import Axis, Buffer, Nest
from firesteel.loops.scalars import REDUCE_OPS
from firesteel.sym.expr import Expr, Size, make, postorder, product

TILE = 4096             # elements of the lane axis in one point of work
PATCH = 256, 64         # elements of the lane axis and of the one across in a point of work that turns loads
CHUNKS = 256            # the most slices that fs_launch makes
_LEAF_OPS = frozenset({"const", "symbol", "axis", "at", "at_masked", "check_index", "acc"})


def print_nest(nest: Nest, buffers: Mapping[str, Buffer], target: Target | None = None) -> Kernel:
    """The kernel of a nest, for this machine if no target is given."""
    flat, names = flatten(nest, buffers)
    symbol, text, symbols, can_fail = _print_flat(flat, target or this_machine())
    return Kernel(nest.name, symbol, text, names, symbols, can_fail)


@functools.lru_cache(maxsize=4096)
def _print_flat(flat: FlatNest, target: Target) -> tuple[str, str, tuple[str, ...], bool]:
    """(symbol, text, size symbols, can it fail)"""
    printed = _LlvmPrinter(decompose(flat, _is_spelled), target)
    body = printed.run()
    symbol = "k_" + hashlib.sha256(body.encode()).hexdigest()[:24]
    return symbol, body.replace("@KERNEL", "@" + symbol), tuple(s for s, _ in printed.symbols), printed.can_fail


def _is_spelled(node: Expr) -> bool:
    if node.op in _LEAF_OPS or node.op in SPELL:
        return True
    return node.op == "floordiv" and node.dtype not in FLOAT


class _LlvmPrinter:
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
        from_nest = (n for p in self.nest.phases for n in postorder(*p.roots()))
        return (n.attr[0] for n in from_nest if n.op in ("at", "at_masked"))

    def run(self) -> str:
        functions = _split(self) if not self.nest.axes else _points(self)
        # the error slot stands after the symbols, whose number is known only now
        slot = len(self.nest.dtypes) + len(self.symbols)
        text = "\n".join(functions).replace("%ERROR_SLOT", str(slot))
        declared = [self.declarations[k] for k in sorted(self.declarations)]
        declared.append("declare i64 @fs_launch(ptr, ptr, i64, i64, ptr)" if not self.nest.axes else "declare void @fs_run(ptr, ptr, i64, i64)")
        # vectors that spill must not cross cache lines: depending on the stack pointer, that cost a third of the time
        aligned = max(self.target.vector_bytes, 16)
        tail = [f"attributes #0 = {{ nounwind alignstack={aligned} }}", "attributes #1 = { nounwind willreturn memory(none) }",
                '!0 = !{!"branch_weights", i32 1, i32 100000}']
        return "\n".join([text, *declared, *tail]) + "\n"

    def code(self) -> LlvmFunction:
        w = LlvmFunction(self.nest, self.symbols, self.declarations, self.target)
        for k in range(len(self.nest.dtypes)):
            place = w.new(f"getelementptr i64, ptr %args, i64 {k}")
            w.remember(("buffer", k), w.new(f"load ptr, ptr {place}, align 8"), 0, 0)
        return w

    def body(self, w: LlvmFunction, suffix: str) -> str:
        """The function around a phase of a split nest."""
        head = f"define internal void @KERNEL.{suffix}(ptr %args, i64 %begin, i64 %end, i64 %chunk, ptr %extra) #0 {{"
        return "\n".join([head, "entry:", *w.allocas, *w.scopes[0].lines, "  ret void", *self.failure(w), "}"])

    def failure(self, w: LlvmFunction) -> list[str]:
        """Where a failed index check goes."""
        if not w.failing:
            return []
        self.can_fail = True
        return ["fail:", "  %slot = getelementptr i64, ptr %args, i64 %ERROR_SLOT", "  %error = load ptr, ptr %slot, align 8",
                "  store i64 1, ptr %error, align 8", "  ret void"]

    def both_roles(self, w: LlvmFunction, points: Size) -> str:
        """The function of a points nest: called with args, and called again with a slice."""
        d = self.driver()
        total = d.size(points).name
        work = "0" if self.serial else d.size(_work(self.nest)).name
        d.line(f"call void @fs_run(ptr @KERNEL, ptr %given, i64 {total}, i64 {work})")
        start = [line.replace("%args", "%given").replace("%v", "%d") for line in d.scopes[0].lines]
        body = [*start, "  ret void", "slice:", *_SLICE, *w.scopes[0].lines, "  ret void"]
        return "\n".join([_HEAD, *w.allocas, _WHICH_ROLE, *body, *self.failure(w), "}"])

    def driver(self) -> LlvmFunction:
        """The text of the exported function: sizes only."""
        return LlvmFunction(self.nest, self.symbols, self.declarations, self.target)


_HEAD = "define void @KERNEL(ptr %given) #0 {\nentry:"      # allocas must stand first to become registers
_WHICH_ROLE = """  %bits = ptrtoint ptr %given to i64
  %odd = trunc i64 %bits to i1
  br i1 %odd, label %slice, label %start
start:"""
_SLICE = ("  %facts = getelementptr i8, ptr %given, i64 -1", "  %args = load ptr, ptr %facts, align 8",
          "  %at.begin = getelementptr i64, ptr %facts, i64 1", "  %begin = load i64, ptr %at.begin, align 8",
          "  %at.end = getelementptr i64, ptr %facts, i64 2", "  %end = load i64, ptr %at.end, align 8")


# ---------------------------------------------------------------- points nests

def _points(p: _LlvmPrinter) -> list[str]:
    """Body over a slice of the flattened parallel axes, and the function that launches it.

    Where points add to the same elements, only slices of an axis that indexes distinct elements run concurrently."""
    lane = next((a for a in p.nest.axes if a.name == p.shape.points), None)
    outer = [a for a in p.nest.axes if a is not lane]
    if p.adds and lane and not p.serial:
        return _pieces(p, lane, outer)
    if p.shape.across and lane:
        return _patches(p, lane, outer)
    if p.shape.down and lane:
        return _columns(p, lane, outer)
    swept = any(ph.axes for ph in p.nest.phases)
    tile = max(p.shape.width, 1) if swept else TILE
    w = p.code()
    with write_loop(w, "%begin", "%end", 1, False) as point:
        rest = point
        tiles = _tiles(lane.extent, tile) if lane else 1
        start, stop = "0", ""
        if lane:
            start, stop, rest = _tile_range(w, lane, tile, tiles, rest, bool(outer))
        _decode(w, outer, rest)
        phases = lambda: write_phases(w, p.shape, p.rereads)      # noqa: E731
        if lane is None:
            phases()
        elif swept and p.target.masks and isinstance(lane.extent, int) and lane.extent % tile and lane.extent > tile > 1:
            write_vector(w, lane, start, stop, tile, phases)
        else:
            write_lanes(w, lane, start, stop, p.shape.width, False, phases, any(is_apart(phase, lane.name) for phase in p.nest.phases))
    return [p.both_roles(w, product([tiles, *(a.extent for a in outer)]))]


def _pieces(p: _LlvmPrinter, lane: Axis, outer: list[Axis]) -> list[str]:
    """A slice is a piece of the lane axis; the other axes are loops around it, so that what one point adds is one row."""
    tile = p.shape.width
    w = p.code()
    start, stop = w.new(f"mul i64 %begin, {tile}"), smaller(w, w.new(f"mul i64 %end, {tile}"), w.size(lane.extent).name)

    def inside(axes: list[Axis]) -> None:
        if not axes:
            write_lanes(w, lane, start, stop, tile, False, lambda: write_phases(w, p.shape, p.rereads))
            return
        with write_loop(w, "0", w.size(axes[0].extent).name, 1, can_be_empty(axes[0].extent)) as i:
            bind(w, axes[0].name, i)
            inside(axes[1:])

    inside(outer)
    return [p.both_roles(w, _tiles(lane.extent, tile))]


def _patches(p: _LlvmPrinter, lane: Axis, outer: list[Axis]) -> list[str]:
    """A point is a patch of the lane axis and the one across, in which loads are turned."""
    across = next(a for a in outer if a.name == p.shape.across)
    rest = [a for a in outer if a is not across]
    loads = turned_loads(p.nest, lane.name, across.name)
    tiles = [_tiles(a.extent, n) for a, n in zip((lane, across), PATCH)]
    w = p.code()
    with write_loop(w, "%begin", "%end", 1, False) as point:
        start, stop, point = _tile_range(w, lane, PATCH[0], tiles[0], point, True)
        first, end, point = _tile_range(w, across, PATCH[1], tiles[1], point, bool(rest))
        _decode(w, rest, point)
        write_squares(w, loads, lane, (start, stop), across, (first, end), p.shape.width, lambda: write_phases(w, p.shape, p.rereads))
    return [p.both_roles(w, product([*tiles, *(a.extent for a in rest)]))]


def _columns(p: _LlvmPrinter, lane: Axis, outer: list[Axis]) -> list[str]:
    """A point is a patch of the lane axis and another one.  The lanes stay for all of the other: what they compute for it, they compute once."""
    down = next(a for a in outer if a.name == p.shape.down)
    rest = [a for a in outer if a is not down]
    tiles = [_tiles(a.extent, n) for a, n in zip((lane, down), PATCH)]
    w = p.code()
    with write_loop(w, "%begin", "%end", 1, False) as point:
        start, stop, point = _tile_range(w, lane, PATCH[0], tiles[0], point, True)
        first, end, point = _tile_range(w, down, PATCH[1], tiles[1], point, bool(rest))
        _decode(w, rest, point)

        def inside() -> None:
            with write_loop(w, first, end, 1, False) as i:
                bind(w, down.name, i)
                write_phases(w, p.shape, p.rereads)
        write_lanes(w, lane, start, stop, p.shape.width, False, inside)
    return [p.both_roles(w, product([*tiles, *(a.extent for a in rest)]))]


def _tiles(extent: Size, tile: int) -> Size:
    return -(-extent // tile) if isinstance(extent, int) else (extent + (tile - 1)) // tile


def _tile_range(w: LlvmFunction, lane: Axis, tile: int, tiles: Size, point: str, has_outer: bool) -> tuple[str, str, str]:
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
    return start, end if divides(tile, lane.extent) else smaller(w, end, extent), point


def _decode(w: LlvmFunction, axes: list[Axis], point: str) -> None:
    """Axes from their flattened number, innermost fastest."""
    for i, axis in enumerate(reversed(axes)):
        if i == len(axes) - 1:
            bind(w, axis.name, point)
            return
        extent = w.size(axis.extent).name
        bind(w, axis.name, w.new(f"urem i64 {point}, {extent}"))
        point = w.new(f"udiv i64 {point}, {extent}")


def _work(nest: FlatNest) -> Size:
    total: Size = 0
    for phase in nest.phases:
        total = total + weight(phase) * product(a.extent for a in phase.axes)
    return total * product(a.extent for a in nest.axes)


# ---------------------------------------------------------------- split nests

def _split(p: _LlvmPrinter) -> list[str]:
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
    body = ["entry:", *driver.allocas, *driver.scopes[0].lines, "  ret void"]
    return [*functions, "\n".join(["define void @KERNEL(ptr %args) #0 {", *body, "}"])]


def _split_axis(p: _LlvmPrinter, number: int, phase: FlatPhase) -> Axis | None:
    """The axis whose range is sliced: the outermost; nothing in a scan or where stores may collide."""
    if phase.kind == "scan" or p.serial or not phase.axes:
        return None
    return loop_order(phase, p.shape.rows[number])[0]


def _split_body(p: _LlvmPrinter, number: int, phase: FlatPhase, before: dict[str, int], slots: dict[str, int]) -> tuple[Size, str]:
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
        window = axis.name, start, smaller(w, w.new(f"mul i64 %end, {step}"), w.size(axis.extent).name)
    write_phase(w, p.shape, number, phase, window)
    for r in phase.reduces:
        place = w.new(f"getelementptr i64, ptr %extra, i64 {slots[r.name] + 1}")
        mine = w.new(f"getelementptr i64, ptr {place}, i64 %chunk")
        w.line(f"store {REGISTER[r.dtype]} {w.memo[make('acc', r.dtype, (), r.name)].name}, ptr {mine}")
    return (_tiles(axis.extent, step) if axis else 1), p.body(w, f"body{number}")


def _split_launch(p: _LlvmPrinter, w: LlvmFunction, number: int, phase: FlatPhase, total: Size, slots: dict[str, int]) -> None:
    count = w.size(total).name
    work = w.size(weight(phase) * product(a.extent for a in phase.axes)).name if not p.serial else "0"
    for r in phase.reduces:       # no chunk at all leaves the identity
        place = w.new(f"getelementptr i64, ptr %extra, i64 {slots[r.name]}")
        w.line(f"store {REGISTER[r.dtype]} {literal(REDUCE_OPS[r.op].identity(r.dtype), r.dtype)}, ptr {place}")
    chunks = w.new(f"call i64 @fs_launch(ptr @KERNEL.body{number}, ptr %args, i64 {count}, i64 {work}, ptr %extra)")
    if not phase.reduces:
        return
    with write_loop(w, "0", chunks, 1, True) as chunk:
        for r in phase.reduces:
            ty = REGISTER[r.dtype]
            place = w.new(f"getelementptr i64, ptr %extra, i64 {slots[r.name]}")
            first = w.new(f"getelementptr i64, ptr %extra, i64 {slots[r.name] + 1}")
            part = w.new(f"load {ty}, ptr {w.new(f'getelementptr i64, ptr {first}, i64 {chunk}')}")
            total_so_far = w.new(f"load {ty}, ptr {place}")
            w.line(f"store {ty} {combine(w, r.op, r.dtype, 0, total_so_far, part)}, ptr {place}")
