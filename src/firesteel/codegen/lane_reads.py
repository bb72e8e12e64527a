"""Reads of lanes whose places are computed: what turns out at run time to lie together is read as a row.

Places that follow each other (rolled, reflected: all but a few vectors) are a row.  Places that are within a register's length from the first (each
element twice, interpolation) are a row whose elements are permuted; processors gather much more slowly.  All else is gathered.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from firesteel.codegen.lane_masks import iota
from firesteel.codegen.llvm_ops import MEMORY
from firesteel.sym.expr import Expr, postorder

if TYPE_CHECKING:
    from firesteel.codegen.llvm_code import LlvmFunction
    from firesteel.codegen.llvm_text import LlvmValue

# (element, lanes) -> the variant of processors, the permutation of one register, the integers that say where elements come from
PERMUTATIONS = {
    ("float", 16): ("e", "avx512.permvar.sf.512", "i32"), ("double", 8): ("e", "avx512.permvar.df.512", "i64"),
    ("i16", 16): ("e", "avx512.permvar.hi.256", "i16"), ("float", 8): ("d", "avx2.permps", "i32"),
}


def is_computed(irregular: Sequence[Expr]) -> bool:
    """Is the place computed from axes and sizes alone?"""
    return bool(irregular) and not any(node.op in ("at", "at_masked") for node in postorder(*irregular))


def _repeats(irregular: Sequence[Expr]) -> bool:
    """Is it one for several lanes?"""
    return any(node.op == "floordiv" for node in postorder(*irregular))


def read_computed(w: LlvmFunction, buffer: int, pointer: LlvmValue, offsets: str, irregular: Sequence[Expr], lanes: int, mask: str | None) -> str:
    """`mask`: the lanes that are read.  What the first lane means counts for the others, also where it is not read itself."""
    element = MEMORY[w.nest.dtypes[buffer]]
    variant, permute, small = PERMUTATIONS.get((element, lanes), ("", "", ""))
    ways = [_following] if not _repeats(irregular) else []
    if variant and variant == w.target.variant:
        ways.append(_near)
    if not ways:
        return w.read(buffer, pointer, offsets, lanes, "apart", mask)
    ty, wide, done = f"<{lanes} x {element}>", f"<{lanes} x i64>", w.label("read")
    found, first = w.alloca(ty), w.new(f"extractelement {wide} {offsets}, i64 0")
    begin = w.scalar(w.new(f"getelementptr {element}, ptr {pointer.name}, i64 {first}"))
    steps = w.new(f"sub {wide} {offsets}, {w.spread(first, 'i64', lanes)}")
    for way in ways:
        together, apart = w.label("together"), w.label("apart")
        w.line(f"br i1 {_all(w, way(w, steps, lanes), lanes, mask)}, label %{together}, label %{apart}")
        w.mark(together)
        if way is _following:
            row = w.read(buffer, begin, None, lanes, "row", mask)
        else:
            places = w.new(f"trunc {wide} {steps} to <{lanes} x {small}>") if small != "i64" else steps
            row = w.read(buffer, begin, None, lanes, "row", _reached(w, places, small, lanes, mask))
            row = _permuted(w, f"@llvm.x86.{permute}", row, ty, places, f"<{lanes} x {small}>")
        w.line(f"store {ty} {row}, ptr {found}")
        w.line(f"br label %{done}")
        w.mark(apart)
    w.line(f"store {ty} {w.read(buffer, pointer, offsets, lanes, 'apart', mask)}, ptr {found}")
    w.line(f"br label %{done}")
    w.mark(done)
    return w.new(f"load {ty}, ptr {found}")


def _following(w: LlvmFunction, steps: str, lanes: int) -> str:
    return w.new(f"icmp eq <{lanes} x i64> {steps}, {iota(lanes)}")


def _near(w: LlvmFunction, steps: str, lanes: int) -> str:
    return w.new(f"icmp ult <{lanes} x i64> {steps}, splat (i64 {lanes})")


def _all(w: LlvmFunction, holds: str, lanes: int, mask: str | None) -> str:
    masks = f"<{lanes} x i1>"
    if mask:
        holds = w.new(f"select {masks} {mask}, {masks} {holds}, {masks} splat (i1 true)")
    full = w.declare(f"@llvm.vector.reduce.and.v{lanes}i1", f"i1 @llvm.vector.reduce.and.v{lanes}i1({masks})")
    return w.new(f"call i1 {full}({masks} {holds})")


def _reached(w: LlvmFunction, places: str, small: str, lanes: int, mask: str | None) -> str:
    """The elements of the row from the first that a lane reads to the last: all of these are the buffer's."""
    ty, masks = f"<{lanes} x {small}>", f"<{lanes} x i1>"

    def extreme(op: str, other: int) -> str:
        read = w.new(f"select {masks} {mask}, {ty} {places}, {ty} splat ({small} {other})") if mask else places
        full = w.declare(f"@llvm.vector.reduce.{op}.v{lanes}{small}", f"{small} @llvm.vector.reduce.{op}.v{lanes}{small}({ty})")
        return w.spread(w.new(f"call {small} {full}({ty} {read})"), small, lanes)
    below = w.new(f"icmp ule {ty} {iota(lanes, small)}, {extreme('umax', 0)}")
    if not mask:
        return below
    above = w.new(f"icmp uge {ty} {iota(lanes, small)}, {extreme('umin', lanes)}")
    return w.new(f"and {masks} {below}, {above}")


def _permuted(w: LlvmFunction, name: str, row: str, ty: str, places: str, integers: str) -> str:
    return w.new(f"call {ty} {w.declare(name, f'{ty} {name}({ty}, {integers})')}({ty} {row}, {integers} {places})")
