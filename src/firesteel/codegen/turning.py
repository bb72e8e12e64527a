"""Square blocks transposed in registers: how lanes read what is contiguous along another axis than theirs.

In: a points nest whose Shape has `across`, the parallel axis along which some loads are rows, and the ranges of both axes.  Out: loops over
squares of them.  In front of each square `width` rows of each such load are read, turned by shuffles and laid on the stack, where the points of
the square read them as rows of the lanes.  Without it every lane fetches an element of another row: a transpose took 4 times as long.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from firesteel.codegen.lane_masks import first_lanes, smaller
from firesteel.codegen.llvm_code import LlvmFunction
from firesteel.codegen.llvm_ops import BYTES, MEMORY
from firesteel.codegen.llvm_phases import bind, divides, write_lanes, write_loop
from firesteel.loops.ir import Axis
from firesteel.sym.expr import Expr


def write_squares(w: LlvmFunction, loads: Sequence[Expr], lane: Axis, lanes: tuple[str, str], across: Axis, points: tuple[str, str], width: int,
                  inside: Callable[[], None]) -> None:
    """`inside` for the points of both ranges, the turned loads known.  Squares follow each other along the lanes: what is written is written in rows.
    Where masks cost something, parts of squares are read element by element."""
    (first, end), whole = points, divides(width, across.extent)

    def plain() -> None:
        with write_loop(w, first, end, 1, True) as i:
            bind(w, across.name, i)
            inside()

    if whole or w.target.masks:
        rest = end
    else:
        count = w.new(f"and i64 {w.new(f'sub i64 {end}, {first}')}, {-width}")
        rest = w.new(f"add i64 {first}, {count}")
    with write_loop(w, first, rest, width, rest != end) as corner:
        limit = w.new(f"add i64 {corner}, {width}")
        last = limit if whole or rest != end else smaller(w, limit, end)
        write_lanes(w, lane, *lanes, width, False, lambda: _square(w, loads, across, (corner, last), lanes[1], last != limit, inside))
    if rest != end:
        first = rest
        write_lanes(w, lane, *lanes, width, False, plain)


def _square(w: LlvmFunction, loads: Sequence[Expr], across: Axis, points: tuple[str, str], stop: str, partial: bool,
            inside: Callable[[], None]) -> None:
    """The points of one square; `stop` is the end of the lanes' range."""
    corner, last = points
    squares: list[str] = []
    if w.target.masks or not w.mask:
        bind(w, across.name, corner)
        mask = first_lanes(w, w.new(f"sub i64 {last}, {corner}"), w.width) if partial else None
        squares = [_read_square(w, node, mask, stop) for node in loads]
    with write_loop(w, corner, last, 1, False) as i:
        bind(w, across.name, i)
        place = w.new(f"mul i64 {w.new(f'sub i64 {i}, {corner}')}, {w.width}")
        for node, square in zip(loads, squares):
            element, ty = MEMORY[node.dtype], w.vector(MEMORY[node.dtype], w.width)
            row = w.new(f"load {ty}, ptr {w.new(f'getelementptr {element}, ptr {square}, i64 {place}')}")
            w.keep_stored(node, row, w.width)
            w.remember(node, w.from_memory(row, node.dtype, w.width), w.width, w.level)
        inside()


def _read_square(w: LlvmFunction, node: Expr, mask: str | None, stop: str) -> str:
    """The stack memory that holds the transposed block.  Rows past the lanes' range repeat the last one."""
    buffer, address = node.attr
    element, width, lane = MEMORY[node.dtype], w.width, w.lane_axis
    assert lane is not None
    corner, _ = w.pointer(buffer, address, (), w.level)
    step, last = w.size(address.coefficient(lane)).name, None
    if w.mask:
        last = w.new(f"sub i64 {w.new(f'sub i64 {stop}, 1')}, {w.memo['axis', lane].name}")
    rows = []
    for k in range(width):
        number = smaller(w, str(k), last) if last and k else str(k)
        place = w.new(f"getelementptr {element}, ptr {corner.name}, i64 {w.new(f'mul i64 {number}, {step}')}")
        rows.append(w.read(buffer, w.scalar(place), None, width, "row", mask))
    square = w.alloca(f"[{width} x {w.vector(element, width)}], align 64")
    for k, row in enumerate(turned(w, rows, element, width, BYTES[node.dtype])):
        place = w.new(f"getelementptr {element}, ptr {square}, i64 {k * width}")
        w.line(f"store {w.vector(element, width)} {row}, ptr {place}")
    return square


# ---------------------------------------------------------------- in registers

def turned(w: LlvmFunction, rows: list[str], element: str, width: int, itemsize: int) -> list[str]:
    """The columns.  First inside of the 16-byte blocks that shuffles of all machines are fast in, then the blocks."""
    block = min(16 // itemsize, width)
    step = 1
    while step < block:
        for i in range(width):
            if not i & step:
                pair = rows[i], rows[i + step]
                rows[i], rows[i + step] = (_pick(w, pair, element, width, _interleaved(width, block, step, half)) for half in (0, 1))
        step *= 2
    rows = [rows[i - i % block + _reversed_bits(i % block, block)] for i in range(width)]
    while step < width:             # even and odd blocks of two rows of blocks, until each row has one block of each
        for i in range(width):
            if not i & step:
                pair = rows[i], rows[i + step]
                rows[i], rows[i + step] = (_pick(w, pair, element, width, _every_other(width, block, odd)) for odd in (0, 1))
        step *= 2
    return rows


def _reversed_bits(number: int, below: int) -> int:
    return sum(below >> bit + 1 for bit in range(below.bit_length()) if number >> bit & 1)


def _interleaved(width: int, block: int, step: int, half: int) -> list[int]:
    """Runs of `step` elements of two rows in turns, of the lower or upper half of each block."""
    runs = range(half * block // 2, (half + 1) * block // 2, step)
    return [start + run + side * width + k for start in range(0, width, block) for run in runs for side in (0, 1) for k in range(step)]


def _every_other(width: int, block: int, odd: int) -> list[int]:
    return [start + k for start in range(odd * block, 2 * width, 2 * block) for k in range(block)]


def _pick(w: LlvmFunction, pair: tuple[str, str], element: str, width: int, picks: list[int]) -> str:
    ty = f"<{width} x {element}>"
    return w.new(f"shufflevector {ty} {pair[0]}, {ty} {pair[1]}, <{width} x i32> <{', '.join(f'i32 {p}' for p in picks)}>")
