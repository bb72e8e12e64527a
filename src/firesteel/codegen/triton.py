"""Nest -> Triton kernels: tiles and phases.  Values are written by `triton_code.py`, operators spelled in `triton_ops.py`.

In: a Nest and its Buffers (after fuse and plan).  Out: a `GpuKernel`: text of one or more functions, and for each how many
programs and warps run it.  A function's parameters are the buffers' addresses (p0, ...), scratch memory (q0, ...), sizes (n0, ...)
and the address of the error flag.

    points      no phase sweeps: a program computes a block of the flattened parallel axes
    rows        phases sweep: a program computes a block of points, [X, R] elements at a time.  A sweep that fits a tile is read
                once and stays in registers for all phases; a longer one is a loop with accumulators [X, R]
    split       few points but long sweeps: one function a phase, its sweep cut into slices that run as programs of their own.
                Accumulators of the slices go to scratch memory [points, slices] and are combined by the functions that read them

Equal nests print equal text: no name of the nest appears in it, and the symbol is a digest of the text and the signature.  Machine code is
named after the operators (`title`) and the beginning of that digest.
"""
from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from firesteel.codegen.bounds import NestIntervals
from firesteel.codegen.flat import Address, FlatNest, FlatPhase, FlatStore, addresses, flatten
from firesteel.codegen.one_pass import SAMPLES, in_one_pass
from firesteel.codegen.printer import decompose
from firesteel.codegen.triton_code import LIMIT, POINTS, SWEEP, TileSweep, TritonFunction, TritonValue
from firesteel.codegen.triton_ops import ATOMIC, POINTER, REGISTER, accumulator_dtype, combine_function, convert, identity, is_spelled
from firesteel.errors import InternalError
from firesteel.loops import cost
from firesteel.loops.cost import is_heavy
from firesteel.loops.ir import Axis, Buffer, Nest, Reduce, axis
from firesteel.loops.scalars import ITEMSIZE
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size, make, postorder, product, rebuild

BLOCK = 1024            # points of a program that sweeps nothing
TILE = 2048             # elements of a tile that is one of many in a sweep
ROWS = 1024             # elements of a tile of whole rows, where the rows are short
WHOLE = 32768           # elements that stay in registers: those of a sweep in one tile, times the arrays that it reads
PARTS = 4096            # partial results that are combined in one tile
COLUMNS, LEAST_COLUMNS = 64, 16     # points side by side where memory runs along the points; fewer where the machine would be idle
PROGRAMS = 264          # fewer than this leave a GPU idle (two for each of 132 processors)
SLICES = 512            # the most slices of a sweep
MOST_SUMS = 3           # of a sweep over columns of wide elements
LEAST_POINTS, MOST_POINTS = 256, 4096       # points of a program that sweeps nothing, where they are measured
MOST_CALLS = 32         # of the math library in a thread's text
TITLE = 60              # characters of a kernel's name in profiles, without its number


@dataclass(frozen=True, slots=True)
class Pass:
    """One function of a kernel: its name, how many programs run it, and warps in each."""
    function: str
    programs: Size
    warps: int


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """Printed code of one nest.  Equal texts and signatures are one kernel: `symbol` is a digest of both."""
    name: str                           # the nest's
    symbol: str
    text: str
    passes: tuple[Pass, ...]            # run in this order
    signature: tuple[str, ...]          # Triton's type of each parameter
    buffers: tuple[str, ...]            # parameters: the address of element [0, ..., 0] of each,
    scratch: tuple[tuple[str, Size], ...]   # then of scratch memory for (dtype, number of elements),
    symbols: tuple[str, ...]            # then the value of each, last the address of the error flag
    can_fail: bool
    title: str = ""                     # for profiles: the first of equal kernels gives machine code its name


def title_of(nest: Nest) -> str:
    """The operators that a nest came from, each once, as part of a function's name."""
    stems = [re.sub(r"(_\d+)+$", "", re.sub(r"\W", "_", name)) for name in nest.origin]
    telling = [stem for stem in stems if stem not in ("to_copy", "clone", "view")]
    return "_".join(dict.fromkeys(telling or stems))[:TITLE] or "kernel"


def print_nest(nest: Nest, buffers: Mapping[str, Buffer], number: int = 0) -> GpuKernel:
    """The kernel of a nest, by one of its `tilings`."""
    flat, names = flatten(nest, buffers)
    symbol, text, passes, signature, scratch, symbols, can_fail = _print_flat(flat, number)
    return GpuKernel(nest.name, symbol, text, passes, signature, names, scratch, symbols, can_fail, title_of(nest))


def count_tilings(nest: Nest, buffers: Mapping[str, Buffer]) -> int:
    """How many kernels there are of a nest: `print_nest` takes a number below it."""
    return len(tilings(_prepared(flatten(nest, buffers)[0])))


@functools.lru_cache(maxsize=4096)
def _print_flat(flat: FlatNest, number: int) -> tuple:
    flat = _prepared(flat)
    printer = _TritonPrinter(flat, tilings(flat)[number] if number else choose(flat))
    text = "\n\n\n".join(printer.run()) + "\n"
    signature = (*(POINTER[d] for d in flat.dtypes), *(POINTER[d] for d, _ in printer.scratch),
                 *({"i64": "i64", "f64": "fp64"}[d] for _, d in printer.symbols), "*i64")
    # the text does not name the types of what it loads
    symbol = "k_" + hashlib.sha256(repr((text, signature)).encode()).hexdigest()[:24]
    passes = tuple(Pass(f"{symbol}_{k}", programs, warps) for k, (programs, warps) in enumerate(printer.passes))
    return (symbol, text.replace("KERNEL", symbol), passes, signature, tuple(printer.scratch),
            tuple(name for name, _ in printer.symbols), printer.can_fail)


def _prepared(flat: FlatNest) -> FlatNest:
    """In operators that Triton has, and with fewer sweeps where rows do not stay in registers."""
    flat = decompose(flat, is_spelled)
    blocks = choose(flat).blocks
    return in_one_pass(flat, [k for k, phase in enumerate(flat.phases) if phase.axes and not _one_tile(phase, blocks[k])])


# ---------------------------------------------------------------- sizes of tiles

def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def _tiles(extent: Size, block: Size) -> Size:
    return -(-extent // block) if isinstance(extent, int) else (extent + (block - 1)) // block


def _extent(axes: Sequence[Axis]) -> Size:
    return product(a.extent for a in axes)


def _runs_along_points(nest: FlatNest) -> bool:
    """Do more of the accesses that vary along both step through memory along a parallel axis than along the sweeps?  One that does not vary along
    some axis reads less, and counts for less."""
    votes = 0
    points = {a.name: a.extent for a in nest.axes}
    for phase in nest.phases:
        sweeps = {a.name: a.extent for a in phase.axes}
        for _, address, _, _ in addresses(phase) if phase.axes else ():
            swept, spread = ([address.coefficient(name) for name in names] for names in (sweeps, points))
            if any(c != 0 for c in swept) and any(c != 0 for c in spread):
                extents = [e for name, e in (points | sweeps).items() if address.coefficient(name) != 0]
                votes += (any(c == 1 for c in spread) - any(c == 1 for c in swept)) * cost.hint_product(extents)
    return votes > 0


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How many points a program has, the block of each phase's sweep, and into how many slices it is cut (0: not split)."""
    points: int
    blocks: tuple[int, ...]
    slices: tuple[int, ...]

    @property
    def split(self) -> bool:
        return any(self.slices)


def tilings(nest: FlatNest) -> list[_Tiling]:
    """The cost model's choice, then others that may be quicker: tiles of more or fewer points, longer or shorter pieces of a sweep, more or fewer
    slices."""
    chosen, total, found = choose(nest), _extent(nest.axes), list[_Tiling]()
    extents = [extent for p in nest.phases if isinstance(extent := _extent(p.axes), int)]
    if not isinstance(total, int) or len(extents) < len(nest.phases):
        return [chosen]
    swept = any(p.axes for p in nest.phases)
    for factor in (0.5, 2, 4):
        points = int(chosen.points * factor)
        blocks = tuple(max(int(b * factor), 1) if b < e else b for b, e in zip(chosen.blocks, extents))
        slices = tuple(max(int(s * factor), 2) if s > 1 else s for s in chosen.slices)
        if 1 <= points <= power_of_two(total) and (swept or LEAST_POINTS <= points <= MOST_POINTS):
            found.append(_Tiling(points, chosen.blocks, chosen.slices))
        found += [_Tiling(chosen.points, blocks, chosen.slices)] * (not chosen.split) + [_Tiling(chosen.points, chosen.blocks, slices)]
    return [chosen, *(tiling for tiling in dict.fromkeys(found) if tiling != chosen and _is_printable(tiling, extents))]


def _is_printable(tiling: _Tiling, extents: Sequence[int]) -> bool:
    """Does a tile fit into registers, has each slice something to do, and can all slices be combined in one tile?"""
    small = tiling.points * max(tiling.blocks) <= WHOLE // 2 and tiling.points * max(tiling.slices) <= PARTS
    return small and all(s <= e // (2 * b) for s, e, b in zip(tiling.slices, extents, tiling.blocks) if s > 1)


def choose(nest: FlatNest) -> _Tiling:
    """Sizes from what is known; an unknown size is taken for large."""
    total = _extent(nest.axes)
    if not any(p.axes for p in nest.phases):
        block = BLOCK if not isinstance(total, int) else min(BLOCK, power_of_two(total))
        return _Tiling(block, (1,) * len(nest.phases), (0,) * len(nest.phases))
    columns = _columns(nest) if _runs_along_points(nest) else 0
    extents = [_extent(p.axes) for p in nest.phases]
    longest = max(e if isinstance(e, int) else LIMIT for e, p in zip(extents, nest.phases) if p.axes)
    points = _points_block(total, longest, columns)
    tiling = _tiled(nest, extents, longest, columns, total, points)
    while columns and points > LEAST_COLUMNS and not _keeps_busy(total, tiling):
        points //= 2
        tiling = _tiled(nest, extents, longest, columns, total, points)
    return tiling


def _tiled(nest: FlatNest, extents: Sequence[Size], longest: int, columns: int, total: Size, points: int) -> _Tiling:
    most = max(TILE * columns // COLUMNS // points, 1) if columns else power_of_two(longest) if _stays_in_registers(nest, longest, total) else TILE
    blocks = tuple(min(power_of_two(e), most) if isinstance(e, int) else min(most, BLOCK) for e in extents)
    busy = 2 * PROGRAMS * (COLUMNS // (columns or COLUMNS))         # programs: more of smaller ones
    slices = tuple(_slices(p, e, b, total, points, busy) for p, e, b in zip(nest.phases, extents, blocks))
    return _Tiling(points, blocks, slices if any(s > 1 for s in slices) else (0,) * len(slices))


def _keeps_busy(total: Size, tiling: _Tiling) -> bool:
    programs = _tiles(total, tiling.points)
    return not isinstance(programs, int) or programs * max(*tiling.slices, 1) >= PROGRAMS


def _columns(nest: FlatNest) -> int:
    """Points side by side.  Half as many where a sweep has more sums of wide elements than keep four of its programs on a processor: 42 instead of
    58 us for mean and variance of 65536 x 512 floats on an H200; of half-precision elements they would read half a line of memory."""
    swept = [p for p in nest.phases if p.axes]
    read = [ITEMSIZE[nest.dtypes[buffer]] for p in swept for buffer, address, _, stored in addresses(p)
            if not stored and any(address.coefficient(a.name) != 0 for a in p.axes)]
    return COLUMNS // 2 if max(len(p.reduces) for p in swept) > MOST_SUMS and min(read, default=0) >= 4 else COLUMNS


def _points_block(total: Size, longest: int, columns: int) -> int:
    wanted = columns or max(ROWS // power_of_two(longest), 1)
    if isinstance(total, int):
        wanted = min(wanted, power_of_two(total))
        while not columns and wanted > 1 and total // wanted < PROGRAMS:
            wanted //= 2
    return wanted


def _slices(phase: FlatPhase, extent: Size, block: int, total: Size, points: int, busy: int) -> int:
    """Into how many slices a phase's sweep is cut so that the machine is busy with that many programs."""
    programs = _tiles(total, points)
    if not phase.axes or phase.kind == "scan" or not isinstance(programs, int) or programs >= PROGRAMS:
        return 1
    wanted = min(busy // max(programs, 1), SLICES, max(PARTS // points, 1))
    if isinstance(extent, int):
        wanted = min(wanted, extent // (2 * block))
    return 1 << max(wanted, 1).bit_length() - 1


def _stays_in_registers(nest: FlatNest, longest: int, total: Size) -> bool:
    """Is a sweep read once for all phases?  Each buffer that varies along it counts.  Few rows that are long are rather split."""
    if isinstance(total, int) and total < PROGRAMS:
        return longest <= PARTS
    read = {(buffer, address) for p in nest.phases for buffer, address, _, stored in addresses(p) if not stored and len(address.terms) > 1}
    return power_of_two(longest) * max(len({buffer for buffer, _ in read}), 2) <= WHOLE


def _row_warps(elements: int, programs: Size) -> int:
    """For whole rows in registers: few, so that rows are combined by few; more where that would leave the machine idle."""
    idle = isinstance(programs, int) and programs < PROGRAMS
    return min(max(elements // (256 if idle else 1024), 1), 16)


def _spread(warps: int, elements: int, calls: int, rows: bool) -> int:
    """More warps where threads would have many calls: each is written out for each element of a thread, and Triton takes long over such a text.
    Rows that have four warps are as quick with eight (softmax of 4096 floats on an H200: 133 us either way, 160 instead of 217 ms to compile)."""
    while warps < 8 and elements * calls > 32 * warps * (MOST_CALLS // 2 if rows and warps >= 4 else MOST_CALLS):
        warps *= 2
    return warps


# ---------------------------------------------------------------- the printer

class _TritonPrinter:
    """State of one nest: what its functions share."""

    def __init__(self, nest: FlatNest, tiling: _Tiling):
        self.tiling = tiling
        self.nest = nest = nest if self.tiling.split else _share_axes(nest, self.tiling)
        self.intervals = NestIntervals(nest)
        self.narrow = _addresses_fit(nest, self.intervals)
        self.symbols: dict[tuple[str, str], str] = {}
        self.scratch: list[tuple[str, Size]] = []
        self.passes: list[tuple[Size, int]] = []
        self.can_fail = False
        self.total = _extent(nest.axes)
        self.calls = sum(is_heavy(node.op) for node in postorder(*(root for phase in nest.phases for root in phase.roots())))
        _check_adds(nest)

    def run(self) -> list[str]:
        bodies = self.split() if self.tiling.split else [self.whole()]
        # parameters are known only when all is written
        names = [f"p{k}" for k in range(len(self.nest.dtypes))] + [f"q{k}" for k in range(len(self.scratch))] + list(self.symbols.values())
        head = ", ".join([*names, "error"])
        return [f"def KERNEL_{k}({head}):    # {warps} warps\n" + "\n".join(lines) for k, (lines, (_, warps)) in enumerate(zip(bodies, self.passes))]

    def code(self, flat: bool = False) -> TritonFunction:
        return TritonFunction(self.nest, self.intervals, self.narrow, self.tiling.points, flat, self.symbols)

    def finish(self, w: TritonFunction, programs: Size, elements: int, rows: bool = False) -> list[str]:
        self.can_fail |= w.can_fail
        warps = _row_warps(elements, programs) if rows else min(max(elements // 256, 1), 8)
        self.passes.append((programs, _spread(warps, elements, self.calls, rows)))
        return w.lines

    def whole(self) -> list[str]:
        """One function for all phases."""
        w = self.code(flat=not any(p.axes for p in self.nest.phases))
        w.points("tl.program_id(0)", self.total)
        for number, phase in enumerate(self.nest.phases):
            _phase(w, phase, self.tiling.blocks[number], None)
            w.forget_stored()
            if any(w.is_reread(n) for later in self.nest.phases[number + 1:] for n in postorder(*later.roots())):
                w.barrier()
        programs, elements = _tiles(self.total, self.tiling.points), self.tiling.points * max(self.tiling.blocks)
        rows = any(p.axes for p in self.nest.phases) and all(_one_tile(p, b) for p, b in zip(self.nest.phases, self.tiling.blocks))
        return self.finish(w, programs, elements, rows)

    # ------------------------------------------------------------ split nests

    def split(self) -> list[list[str]]:
        """A function for each phase that sweeps; phases without a sweep, and short reductions, stand at the front of the next one, or at the
        end."""
        bodies, waiting = [], []
        places: dict[str, tuple[int, int, Reduce]] = {}     # accumulator -> (scratch number, slices, itself)
        for number, phase in enumerate(self.nest.phases):
            if not phase.axes or phase.kind == "reduce" and _one_tile(phase, min(self.tiling.blocks[number], SAMPLES)):
                waiting.append(phase)
                continue
            bodies.append(self.slice_body(number, phase, waiting, places))
            waiting = []
        if waiting:
            bodies.append(self.slice_body(None, None, waiting, places))
        return bodies

    def slice_body(self, number: int | None, phase: FlatPhase | None, waiting: list[FlatPhase], places: dict) -> list[str]:
        """The function of one phase; `waiting` run before it, their stores in the first slice alone."""
        w = self.code()
        block: int = 1 if number is None else self.tiling.blocks[number]
        tiles, slices = (False, 1) if number is None or phase is None else self._pieces(number, phase, bool(waiting))
        w.line("pid = tl.program_id(0)")
        if slices != 1:
            w.line(f"cut = pid % {w.size(slices)}")
            w.once = "cut == 0"
        w.points(f"(pid // {w.size(slices)})" if slices != 1 else "pid", self.total)
        used = [n.attr for p in (*waiting, *([phase] if phase else [])) for n in postorder(*p.roots()) if n.op == "acc"]
        for name in dict.fromkeys(used):
            if name in places:
                _combined(w, *places[name])
        for early in waiting:
            _phase(w, early, power_of_two(int(_extent(early.axes))) if early.axes else 1, None)     # type: ignore[arg-type]
        w.once = ""
        if phase is not None:
            _phase(w, phase, block, None if slices == 1 else (slices, tiles))
            for r in phase.reduces:
                self._keep(w, r, slices, places)
        for early in waiting:       # read again by later functions
            for r in early.reduces:
                self._keep(w, r, 1, places)
        combined = [places[name][1] for name in used if name in places]
        most = max([block, *(parts for parts in combined if isinstance(parts, int))])
        return self.finish(w, _tiles(self.total, self.tiling.points) * slices, self.tiling.points * most)

    def _pieces(self, number: int, phase: FlatPhase, waited_for: bool) -> tuple[bool, Size]:
        """(is each one tile, how many) slices of a phase: a map has one for each tile.  One that may be empty has a slice more, which may
        be empty, where others wait for its function to run."""
        if phase.kind != "map":
            return False, self.tiling.slices[number]
        extent = _extent(phase.axes)
        spare = waited_for and not (isinstance(extent, int) and extent > 0)
        return not spare, _tiles(extent + 1 if spare else extent, self.tiling.blocks[number])

    def _keep(self, w: TritonFunction, r: Reduce, slices: Size, places: dict) -> None:
        """The accumulator of this slice into scratch memory."""
        dtype = accumulator_dtype(r.dtype)
        places[r.name] = (len(self.scratch), slices, r)
        self.scratch.append((dtype, self.total * slices))
        value = w.memo[make("acc", r.dtype, (), r.name)]
        name = f"{value.name}.to({REGISTER[dtype]})" if dtype != r.dtype else value.name
        mask = w.mask(POINTS)
        place = f"q{places[r.name][0]} + x * {slices}" + (" + cut" if slices != 1 else "")
        w.line(f"tl.store({place}, {w.widened(name, value.dims, POINTS)}{', mask=' + mask if mask else ''})")


def _combined(w: TritonFunction, place: int, slices: int, r: Reduce) -> None:
    """The value of an accumulator out of what its slices kept.  That of a single point is a scalar: a block of one element would be spread over
    the threads as its parts were, and brought from there to a whole tile through shared memory."""
    parts = f"tl.arange(0, {slices})"
    if w.block == 1:
        total = w.new(f"tl.reduce(tl.load(q{place} + {w.first} * {slices} + {parts}), 0, {combine_function(r.op)})")
        w.memo[make("acc", r.dtype, (), r.name)] = TritonValue(_released(w, r, total))
        return
    mask = w.mask(POINTS)
    loaded = w.new(f"tl.load(q{place} + x * {slices} + {parts}[None, :]{f', mask={mask}' if mask else ''})")
    _remember(w, r, w.new(f"tl.reduce({loaded}, 1, {combine_function(r.op)}, keep_dims=True)"))


def _remember(w: TritonFunction, r: Reduce, name: str) -> None:
    """`name` holds the final value of an accumulator, a column in its holding type."""
    w.memo[make("acc", r.dtype, (), r.name)] = TritonValue(_released(w, r, name), POINTS)


def _released(w: TritonFunction, r: Reduce, name: str) -> str:
    """From the type in which it is accumulated to its own."""
    held = accumulator_dtype(r.dtype)
    return name if held == r.dtype or r.dtype in ("bf16", "f16") else w.new(convert(name, held, r.dtype))


# ---------------------------------------------------------------- phases

def _phase(w: TritonFunction, phase: FlatPhase, block: int, window: tuple[Size, bool] | None) -> None:
    """One phase for the tile of points.  `window`: (number of slices, is each one tile): the sweep is the slice `cut`."""
    if not phase.axes:
        w.values([r.value for r in phase.reduces])
        for r in phase.reduces:       # over axes that all have size 1: the value itself
            _remember(w, r, _held(w, r))
        _stores(w, phase)
        return
    extent = _extent(phase.axes)
    if isinstance(extent, int) and extent == 0:     # nothing is loaded either, also where the index does not vary along the sweep
        for r in phase.reduces:
            _remember(w, r, w.new(f"tl.broadcast_to({identity(r.op, r.dtype)}, {w.shape(POINTS)})"))
        return
    w.sweep = TileSweep(phase.axes, block)
    aligned = isinstance(extent, int) and extent > 0 and extent % block == 0
    if _one_tile(phase, block):
        _tile(w, phase, "", None if aligned else str(extent))
    elif window is not None and window[1]:
        _tile(w, phase, f"cut.to({w.index_type}) * {block}", None if aligned else w.size(extent))
    else:
        _loop(w, phase, block, window, extent, aligned)
    w.leave()


def _one_tile(phase: FlatPhase, block: int) -> bool:
    extent = _extent(phase.axes)
    return isinstance(extent, int) and extent <= block


def _tile(w: TritonFunction, phase: FlatPhase, start: str, end: str | None) -> None:
    """A sweep of a single tile."""
    w.sweep_tile(start, end)
    w.values([r.value for r in phase.reduces])
    elements = [(r, _full(w, r), combine_function(r.op)) for r in phase.reduces]
    if phase.kind == "scan":
        for r, value, combine in elements:
            _remember_running(w, r, w.new(f"tl.associative_scan({value}, 1, {combine})"))
        _stores(w, phase)
        w.forget_memory()       # what was computed from the running values
    for r, value, combine in elements:
        _remember(w, r, w.new(f"tl.reduce({value}, 1, {combine}, keep_dims=True)"))
    if phase.kind != "scan":
        _stores(w, phase)


def _loop(w: TritonFunction, phase: FlatPhase, block: int, window: tuple[Size, bool] | None, extent: Size, aligned: bool) -> None:
    """A sweep tile by tile; accumulators are carried, a scan's running value across tiles too."""
    begin, end, limit = "0" if w.narrow else "tl.full([], 0, tl.int64)", w.size(extent), w.size(extent)
    if window is not None:
        length = _tiles(_tiles(extent, window[0]), block) * block
        begin = w.new(f"cut.to({w.index_type}) * {w.size(length)}")
        end = w.new(f"tl.minimum({begin} + {w.size(length)}, {limit})")
    scan = phase.kind == "scan"
    carried = {r.name: f"{r.name}_run" for r in phase.reduces}
    for r in phase.reduces:
        shape = w.shape(POINTS if scan else POINTS | SWEEP)
        w.line(f"{carried[r.name]} = tl.broadcast_to({identity(r.op, r.dtype)}, {shape})")
    head = len(w.lines)
    w.in_loop, w.before = True, []
    w.sweep_tile("start", None if aligned else limit)
    w.values([r.value for r in phase.reduces])
    for r in phase.reduces:
        _accumulate(w, r, carried[r.name], scan)
    _stores(w, phase)
    w.lines[head:head] = [*w.before, f"    for start in range({begin}, {end}, {block}):"]
    w.leave()
    for r in phase.reduces:
        name = carried[r.name]
        _remember(w, r, name if scan else w.new(f"tl.reduce({name}, 1, {combine_function(r.op)}, keep_dims=True)"))


def _accumulate(w: TritonFunction, r: Reduce, carried: str, scan: bool) -> None:
    """One tile into an accumulator."""
    value, combine = _full(w, r), combine_function(r.op)
    if not scan:
        w.line(f"{carried} = {combine}({carried}, {value})")
        return
    inside = w.new(f"tl.associative_scan({value}, 1, {combine})")
    _remember_running(w, r, w.new(f"{combine}({carried}, {inside})"))
    w.line(f"{carried} = {combine}({carried}, tl.reduce({value}, 1, {combine}, keep_dims=True))")


def _held(w: TritonFunction, r: Reduce) -> str:
    """The element in the type in which it is accumulated, a column or block."""
    val, held = w.memo[r.value], accumulator_dtype(r.dtype)
    name = w.wide(val)
    if held != r.dtype and r.dtype not in ("bf16", "f16"):
        name = f"{name}.to({REGISTER[held]})"
    return w.new(w.widened(name, val.dims, val.dims | POINTS))


def _full(w: TritonFunction, r: Reduce) -> str:
    """The elements of a whole tile, the identity where there are none."""
    name = w.widened(_held(w, r), w.memo[r.value].dims | POINTS, POINTS | SWEEP)
    mask = w.masks[SWEEP]
    return w.new(f"tl.where({mask}, {name}, {identity(r.op, r.dtype)})" if mask else name)


def _remember_running(w: TritonFunction, r: Reduce, name: str) -> None:
    """What acc(name) is inside of its scan."""
    w.memo[make("acc", r.dtype, (), r.name)] = TritonValue(_released(w, r, name), POINTS | SWEEP, False, w.in_loop)


def _stores(w: TritonFunction, phase: FlatPhase) -> None:
    w.values([e for s in phase.stores for e in (*s.irregular, s.value)])
    everywhere = POINTS | (SWEEP if phase.axes else 0)
    for s in phase.stores:
        w.store(s.buffer, s.address, s.irregular, s.value, s.mode == "add", everywhere)


# ---------------------------------------------------------------- facts and small rewrites

def _addresses_fit(nest: FlatNest, intervals: NestIntervals) -> bool:
    """Is every address, and every number of points, known to be below 2**31?"""
    counts = [_extent(nest.axes), *(_extent(p.axes) for p in nest.phases)]
    if not all(isinstance(c, int) and c <= LIMIT - PARTS * TILE for c in counts):
        return False
    return all(_reach(a, irregular, intervals) <= LIMIT for _, a, irregular, _ in addresses(nest))


def _reach(address: Address, irregular: Sequence[Expr], intervals: NestIntervals) -> float:
    """A bound on the absolute value of the address and of each of its partial sums."""
    parts: list[tuple[Any, Any]] = [(c, intervals.extents[n]) for n, c in address.terms]
    if not isinstance(address.base, int) or not all(isinstance(c, int) and isinstance(n, int) for c, n in parts):
        return float("inf")
    total: float = abs(address.base) + sum(abs(c) * max(n - 1, 0) for c, n in parts)
    for e, scale in zip(irregular, address.scales):
        if not isinstance(scale, int):
            return float("inf")
        total += abs(scale) * intervals.reach(e)
    return total


def _check_adds(nest: FlatNest) -> None:
    for phase in nest.phases:
        for s in phase.stores:
            if s.mode == "add" and nest.dtypes[s.buffer] not in ATOMIC:
                raise InternalError(f"GPU kernels cannot add to elements of type {nest.dtypes[s.buffer]} in memory")


def _share_axes(nest: FlatNest, tiling: _Tiling) -> FlatNest:
    """Sweeps of one tile over the same extents get the same axes, so that what one has loaded the next one knows."""
    known: dict[tuple[Size, ...], tuple[Axis, ...]] = {}
    phases = []
    for phase, block in zip(nest.phases, tiling.blocks):
        if not phase.axes or not _one_tile(phase, block):
            phases.append(phase)
            continue
        axes = known.setdefault(tuple(a.extent for a in phase.axes), phase.axes)
        phases.append(phase if axes is phase.axes else _with_axes(phase, axes))
    return FlatNest(nest.axes, tuple(phases), nest.dtypes)


def _with_axes(phase: FlatPhase, axes: tuple[Axis, ...]) -> FlatPhase:
    names = {old.name: new.name for old, new in zip(phase.axes, axes)}
    memo: dict[Expr, Expr] = {}

    def moved(address: Address) -> Address:
        return Address(tuple((names.get(n, n), c) for n, c in address.terms), address.base, address.scales)

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op == "axis":
            return axis(names.get(node.attr, node.attr))
        if node.op in ("at", "at_masked"):
            return make(node.op, node.dtype, args, (node.attr[0], moved(node.attr[1])))
        return None

    for root in phase.roots():
        rebuild(root, change, memo)
    reduces = tuple(Reduce(r.name, r.op, memo[r.value], r.dtype) for r in phase.reduces)
    stores = tuple(FlatStore(s.buffer, moved(s.address), tuple(memo[i] for i in s.irregular), memo[s.value], s.mode, s.private) for s in phase.stores)
    return FlatPhase(phase.kind, axes, reduces, stores)
