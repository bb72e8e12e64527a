"""LlvmFunction: the text of one function (`llvm_text.py`) that knows values and memory; `llvm.py` knows loops and phases.

Every value is written into the
outermost scope in which it can be computed, so what does not change in a loop stands before it; nothing is written twice
in a scope (`memo`: Expr -> LlvmValue).  A value is a scalar, or a vector over the lanes of one axis.  One of a 16-bit float is kept
in both its forms, ("stored", Expr) -> the other: what is moved only keeps its bits, those of a NaN too, and nothing is rounded twice.
Loop counters and accumulators
live in allocas, which LLVM's first pass turns into registers: so no phi and no block name has to be known here.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from firesteel.codegen.bounds import NestIntervals
from firesteel.codegen.flat import Address, FlatNest
from firesteel.codegen.lane_masks import iota
from firesteel.codegen.lane_reads import is_computed, read_computed
from firesteel.codegen.llvm_math import INLINE, INLINE_F32, INLINE_OTHER
from firesteel.codegen.llvm_ops import BYTES, MEMORY, REGISTER, SPELL, bf16_to_float, float_to_bf16, intrinsic_suffix, literal
from firesteel.codegen.llvm_text import LlvmText, LlvmValue
from firesteel.codegen.strided import ReadWindow
from firesteel.codegen.target import VECTOR_FUNCTIONS, Target
from firesteel.loops.scalars import STORAGE_FLOATS
from firesteel.sym.expr import Expr, Size, as_expr, postorder


class LlvmFunction(LlvmText):
    """One function."""

    def __init__(self, nest: FlatNest, symbols: list[tuple[str, str]], declarations: dict[str, str], target: Target):
        super().__init__(declarations)
        self.nest, self.target, self.symbols = nest, target, symbols        # symbols: shared by the functions of a kernel
        self.lane_axis: str | None = None
        self.width = 0                      # lanes of a vector, 0 where nothing is vectorised
        self.mask: str | None = None        # which lanes exist; None: all
        self.inside = False                 # are lanes that do not exist points all the same, of a vector before?  Then they are read, and not stored
        self.mask_level = 0
        self.guard = 0                      # memory is not read in scopes further out than this one
        self.windows: dict[tuple[int, Address], ReadWindow] = {}     # of the loads of the phase at hand, see strided.py
        self.intervals = NestIntervals(nest)
        self.failing = False

    def forget_memory(self) -> None:
        """After a phase that stored into a buffer which the nest also reads: what was computed from loads is stale."""
        for key in [k for k in self.memo if isinstance(k, Expr) and k.op not in ("axis", "acc", "symbol") or type(k) is tuple and k[0] == "row"]:
            del self.memo[key]
            self.memo.pop(("stored", key), None)


    # ------------------------------------------------------------ types and constants

    def shape(self, dtype: str, lanes: int) -> str:
        return self.vector(REGISTER[dtype], lanes)

    def type(self, node: Expr) -> str:
        return self.shape(node.dtype, self.lanes_of(node))

    current_lanes = 0

    def lanes_of(self, node: Expr) -> int:
        """Of the node being written: of the widest of its arguments."""
        return self.current_lanes

    def constant(self, value: int | float | bool, node: Expr, lanes: int | None = None) -> str:
        lanes = self.lanes_of(node) if lanes is None else lanes
        text = literal(value, node.dtype)
        return f"splat ({REGISTER[node.dtype]} {text})" if lanes else text

    def intrinsic(self, name: str, dtype: str, lanes: int, args: Sequence[str]) -> str:
        ty, full = self.shape(dtype, lanes), f"@llvm.{name}.{intrinsic_suffix(dtype, lanes)}"
        self.declare(full, f"{ty} {full}({', '.join([ty] * len(args))})")
        return self.new(f"call {ty} {full}({', '.join(f'{ty} {a}' for a in args)})")

    def call_math(self, name: str, node: Expr, args: Sequence[str]) -> str:
        """Inline code, or a function of the C library: its vector variant piece by piece, or one call a lane where there is none.  A scalar takes
        the way that a lane takes: the variants differ in the last bit, and a value that is computed twice must be equal to itself."""
        lanes = self.lanes_of(node)
        scalar = REGISTER[node.dtype]
        c_name = name + "f" if scalar == "float" else name
        inline = INLINE.get(name) or (INLINE_F32.get(name) if scalar == "float" else None)
        if inline is None and c_name not in self.target.vector_math:
            inline = INLINE_OTHER.get((name, "f32" if scalar == "float" else "f64"))
        if inline is not None:
            return inline(self, node.dtype, lanes, *args)
        piece = self.target.lanes(4 if scalar == "float" else 8)
        if c_name not in self.target.vector_math:
            return self.call_lanes(c_name, scalar, lanes, args)
        function = "@" + self.target.vector_function(c_name, VECTOR_FUNCTIONS[name], piece)
        return self.by_pieces(args, scalar, lanes, piece, lambda part: self._call(function, f"<{piece} x {scalar}>", part))

    def call_lanes(self, c_name: str, scalar: str, lanes: int, args: Sequence[str]) -> str:
        """One call of the C library a lane."""
        return self.by_pieces(args, scalar, lanes, 1, lambda part: self._call(f"@{c_name}", scalar, part))

    def _call(self, function: str, ty: str, args: Sequence[str]) -> str:
        self.declare(function, f"{ty} {function}({', '.join([ty] * len(args))}) #1")
        return self.new(f"call {ty} {function}({', '.join(f'{ty} {a}' for a in args)})")

    def by_pieces(self, args: Sequence[str], scalar: str, lanes: int, piece: int, call) -> str:
        """Applies `call` to runs of `piece` lanes; a vector shorter than a piece is padded, and so is a scalar."""
        if piece == (lanes or 1):
            return call(args)
        if not lanes:
            wide = [self.splat(LlvmValue(a, 0, self.level), scalar, piece) for a in args]
            return self.new(f"extractelement <{piece} x {scalar}> {call(wide)}, i64 0")
        whole = f"<{lanes} x {scalar}>"
        if piece == 1:
            result = "poison"
            for k in range(lanes):
                value = call([self.new(f"extractelement {whole} {a}, i64 {k}") for a in args])
                result = self.new(f"insertelement {whole} {result}, {scalar} {value}, i64 {k}")
            return result
        if lanes < piece:
            wide = [self.shuffle(a, scalar, lanes, [min(k, lanes - 1) for k in range(piece)]) for a in args]
            return self.shuffle(call(wide), scalar, piece, range(lanes))
        parts = [call([self.shuffle(a, scalar, lanes, range(s, s + piece)) for a in args]) for s in range(0, lanes, piece)]
        while len(parts) > 1:
            n = lanes // len(parts)
            parts = [self.join(parts[i], parts[i + 1], scalar, n) for i in range(0, len(parts), 2)]
        return parts[0]

    # ------------------------------------------------------------ values

    def values(self, roots: Iterable[Expr]) -> list[LlvmValue]:
        """Writes what is missing of the roots."""
        roots = list(roots)
        for node in postorder(*roots, known=self.memo):
            self.write(node)
        return [self.memo[r] for r in roots]

    def value(self, root: Expr) -> LlvmValue:
        return self.values([root])[0]

    def formula(self, root: Expr) -> str:
        """In the middle of writing a node: an expression over its arguments."""
        lanes = self.current_lanes
        val = self.value(root)
        self.current_lanes = lanes
        return self.shaped(val, root, lanes)

    def size(self, size: Size) -> LlvmValue:
        return self.value(as_expr(size))

    def write(self, node: Expr) -> None:
        before = self.level
        special = _LEAVES.get(node.op)
        if special is not None:
            special(self, node)
        else:
            args = [self.memo[a] for a in node.args]
            self.current_lanes = max([a.lanes for a in args], default=0)
            shaped = [self.shaped(a, e, self.current_lanes) for a, e in zip(args, node.args)]
            self.level = max([a.level for a in args], default=0)
            key = "floordiv:int" if node.op == "floordiv" else node.op
            name = SPELL[key](self, node, shaped)
            self.remember(node, name, self.current_lanes, self.level)
        self.level = before

    def shaped(self, val: LlvmValue, node: Expr, lanes: int) -> str:
        """The value's name, as a vector if `lanes` asks for one."""
        if val.lanes == lanes or not lanes:
            return val.name
        if node.op == "const":
            return self.constant(node.attr, node, lanes)
        return self.splat(val, REGISTER[node.dtype], lanes)

    def stored(self, node: Expr, lanes: int) -> str:
        """The value as memory holds it, as a vector if `lanes` asks for one."""
        known = self.memo.get(("stored", node))
        if known is None:
            return self.to_memory(self.shaped(self.memo[node], node, lanes), node.dtype, lanes)
        return known.name if known.lanes == lanes or not lanes else self.splat(known, MEMORY[node.dtype], lanes)

    def keep_stored(self, node: Expr, name: str, lanes: int) -> None:
        """Of the node being written: what memory would hold."""
        if node.dtype in STORAGE_FLOATS:
            self.remember(("stored", node), name, lanes, self.level)

    def splat(self, val: LlvmValue, ty: str, lanes: int) -> str:
        if not val.name.startswith("%"):
            return f"splat ({ty} {val.name})"
        known = self.memo.get(("splat", val.name, lanes))
        if known is None:
            before, self.level = self.level, val.level
            one = self.new(f"insertelement <{lanes} x {ty}> poison, {ty} {val.name}, i64 0")
            name = self.new(f"shufflevector <{lanes} x {ty}> {one}, <{lanes} x {ty}> poison, <{lanes} x i32> zeroinitializer")
            known = self.remember(("splat", val.name, lanes), name, lanes, val.level)
            self.level = before
        return known.name

    def scalar(self, name: str) -> LlvmValue:
        """One of this scope."""
        return LlvmValue(name, 0, self.level)

    def spread(self, name: str, ty: str, lanes: int) -> str:
        return self.splat(self.scalar(name), ty, lanes)

    def once(self, key: tuple, level: int, text: str) -> LlvmValue:
        """An i64 scalar instruction, written once at that level."""
        known = self.memo.get(key)
        if known is None:
            before, self.level = self.level, level
            known = self.remember(key, self.new(text), 0, level)
            self.level = before
        return known

    # ------------------------------------------------------------ addresses and memory

    def pointer(self, buffer: int, address: Address, irregular: Sequence[Expr], level: int) -> tuple[LlvmValue, str | None]:
        """(scalar pointer, vector of element offsets from it or None).  None: the lanes follow each other (or there are none)."""
        terms = sorted(((self.memo[("axis", n)].level, i, n, c) for i, (n, c) in enumerate(address.terms)))
        total = self.size(address.base) if address.base != 0 else None
        for _, _, name, coefficient in terms:
            axis = self.memo[("axis", name)]
            total = self._sum(total, self._scaled(axis, coefficient))
        offsets = self._lane_offsets(address)
        in_step = self.width and self.lane_axis and address.coefficient(self.lane_axis) == 1
        if offsets is None and in_step and any(self.memo[e].lanes for e in irregular):
            offsets = iota(self.width)      # the lanes are apart: their own step of 1 is part of the offsets too
        for expr, scale in zip(irregular, address.scales, strict=True):
            val = self.memo[expr]
            if val.lanes:
                offsets = self._vector_term(offsets, val, scale)
            else:
                total = self._sum(total, self._scaled(val, scale))
        base = self.memo[("buffer", buffer)]
        ty = MEMORY[self.nest.dtypes[buffer]]
        if total is not None:
            where = max(total.level, base.level)
            base = self.once(("gep", buffer, total.name), where, f"getelementptr {ty}, ptr {base.name}, i64 {total.name}")
        return base, offsets

    def _scaled(self, val: LlvmValue, scale: Size) -> LlvmValue:
        if isinstance(scale, int) and scale == 1:
            return val
        factor = self.size(scale)
        level = max(val.level, factor.level)
        return self.once(("mul", val.name, factor.name), level, f"mul i64 {val.name}, {factor.name}")

    def _sum(self, a: LlvmValue | None, b: LlvmValue) -> LlvmValue:
        if a is None:
            return b
        return self.once(("add", a.name, b.name), max(a.level, b.level), f"add i64 {a.name}, {b.name}")

    def _lane_offsets(self, address: Address) -> str | None:
        """Offsets of the lanes where the lane axis steps by other than 1."""
        step = address.coefficient(self.lane_axis) if self.width and self.lane_axis else 0
        if isinstance(step, int) and step in (0, 1):
            return None
        if isinstance(step, int):
            return steps(self.width, step)
        factor = self.size(step)
        wide = self.splat(factor, "i64", self.width)
        known = self.once(("steps", factor.name, self.width), factor.level, f"mul <{self.width} x i64> {wide}, {iota(self.width)}")
        return known.name

    def _vector_term(self, offsets: str | None, val: LlvmValue, scale: Size) -> str:
        ty = f"<{self.width} x i64>"
        name = val.name
        if not (isinstance(scale, int) and scale == 1):
            factor = self.size(scale)
            name = self.new(f"mul {ty} {name}, {self.splat(factor, 'i64', self.width)}")
        return name if offsets is None else self.new(f"add {ty} {name}, {offsets}")

    def access_level(self, address: Address, irregular: Sequence[Expr], others: Sequence[Expr] = ()) -> tuple[int, int]:
        """(scope, lanes) of a load."""
        vals = [self.memo[("axis", n)] for n, _ in address.terms] + [self.memo[e] for e in (*irregular, *others)]
        level = max([self.guard, *(v.level for v in vals)])
        stepped = self.width and self.lane_axis and address.coefficient(self.lane_axis) != 0
        lanes = self.width if stepped or any(v.lanes for v in vals) else 0
        if lanes:
            level = max(level, self.mask_level)
        return level, lanes

    def lane_kind(self, address: Address, irregular: Sequence[Expr], offsets: str | None) -> str:
        """The access pattern of the lanes: "one" (broadcast), "row" (contiguous) or "apart" (gather or scatter)."""
        if offsets is not None or any(self.memo[e].lanes for e in irregular):
            return "apart"
        return "row" if self.lane_axis and address.coefficient(self.lane_axis) != 0 else "one"

    def read(self, buffer: int, pointer: LlvmValue, offsets: str | None, lanes: int, kind: str, mask: str | None) -> str:
        """The element(s) in memory form; where `mask` is false, zero and no access."""
        dtype = self.nest.dtypes[buffer]
        element, align = MEMORY[dtype], BYTES[dtype]
        if not lanes or kind == "one":
            return self._read_scalar(element, align, pointer, lanes, mask)
        ty = f"<{lanes} x {element}>"
        suffix = f"v{lanes}{_memory_suffix(element)}"
        if kind == "row":
            if mask is None:
                return self.new(f"load {ty}, ptr {pointer.name}, align {align}")
            full = self.declare(f"@llvm.masked.load.{suffix}.p0", f"{ty} @llvm.masked.load.{suffix}.p0(ptr, i32, <{lanes} x i1>, {ty})")
            return self.new(f"call {ty} {full}(ptr {pointer.name}, i32 {align}, <{lanes} x i1> {mask}, {ty} zeroinitializer)")
        if offsets == steps(lanes, -1):
            first = self.new(f"getelementptr {element}, ptr {pointer.name}, i64 {1 - lanes}")
            turned = mask and self.reversed(mask, "i1", lanes)
            return self.reversed(self.read(buffer, LlvmValue(first, 0, self.level), None, lanes, "row", turned), element, lanes)
        if offsets == steps(lanes, 2):
            return self._every_other(buffer, pointer, lanes, mask)
        pointers = self.new(f"getelementptr {element}, ptr {pointer.name}, <{lanes} x i64> {offsets}")
        return self._gather(element, align, pointers, lanes, mask or "splat (i1 true)")

    def read_window(self, buffer: int, address: Address, window: ReadWindow, level: int) -> str:
        """Elements a few apart, out of vectors that all loads of the window share."""
        rows, mask = [], None if self.inside else self.mask
        for start in window.starts(self.width):
            key = ("row", buffer, address.terms, window, start)
            if key not in self.memo:
                pointer, _ = self.pointer(buffer, Address(address.terms, window.first + start), (), level)
                wanted = mask and self.spread_mask(mask, window.owners(start, self.width))
                self.remember(key, self.read(buffer, pointer, None, self.width, "row", wanted), self.width, level)
            rows.append(self.memo[key].name)
        return self.picked(rows, MEMORY[self.nest.dtypes[buffer]], window.homes(address, self.width))

    def _every_other(self, buffer: int, pointer: LlvmValue, lanes: int, mask: str | None) -> str:
        """Two vectors in a row, the second of which ends with the last element that is read."""
        element = MEMORY[self.nest.dtypes[buffer]]
        ty = f"<{lanes} x {element}>"
        behind = LlvmValue(self.new(f"getelementptr {element}, ptr {pointer.name}, i64 {lanes - 1}"), 0, self.level)
        halves = []
        for number, start in enumerate((pointer, behind)):
            wanted = mask and self._doubled(mask, lanes, number)
            halves.append(self.read(buffer, start, None, lanes, "row", wanted))
        chosen = ", ".join(f"i32 {2 * k if 2 * k < lanes else 2 * k + 1}" for k in range(lanes))
        return self.new(f"shufflevector {ty} {halves[0]}, {ty} {halves[1]}, <{lanes} x i32> <{chosen}>")

    def _doubled(self, mask: str, lanes: int, second: int) -> str:
        """The mask of the vector in whose even elements (the second: odd ones) the first (second) half of the lanes stand."""
        picks = [lanes if (k + second) % 2 else (k + second * lanes) // 2 for k in range(lanes)]
        ty = f"<{lanes} x i1>"
        return self.new(f"shufflevector {ty} {mask}, {ty} zeroinitializer, <{lanes} x i32> <{', '.join(f'i32 {k}' for k in picks)}>")

    def _gather(self, element: str, align: int, pointers: str, lanes: int, mask: str) -> str:
        ty, masks = f"<{lanes} x {element}>", f"<{lanes} x i1>"
        name = f"@llvm.masked.gather.v{lanes}{_memory_suffix(element)}.v{lanes}p0"
        full = self.declare(name, f"{ty} {name}(<{lanes} x ptr>, i32, {masks}, {ty})")
        return self.new(f"call {ty} {full}(<{lanes} x ptr> {pointers}, i32 {align}, {masks} {mask}, {ty} zeroinitializer)")

    def _read_scalar(self, element: str, align: int, pointer: LlvmValue, lanes: int, mask: str | None) -> str:
        """One element; a guarded one is read as a vector of one lane, which LLVM turns into a branch."""
        if mask is None:
            name = self.new(f"load {element}, ptr {pointer.name}, align {align}")
            return self.splat(LlvmValue(name, 0, self.level), element, lanes) if lanes else name
        if lanes:
            # a guarded element for all lanes: gather it, each lane under its own mask
            return self._gather(element, align, self.splat(pointer, "ptr", lanes), lanes, mask)
        one = self.new(f"insertelement <1 x i1> poison, i1 {mask}, i64 0")
        ty, suffix = f"<1 x {element}>", f"v1{_memory_suffix(element)}"
        full = self.declare(f"@llvm.masked.load.{suffix}.p0", f"{ty} @llvm.masked.load.{suffix}.p0(ptr, i32, <1 x i1>, {ty})")
        name = self.new(f"call {ty} {full}(ptr {pointer.name}, i32 {align}, <1 x i1> {one}, {ty} zeroinitializer)")
        return self.new(f"extractelement {ty} {name}, i64 0")

    def from_memory(self, name: str, dtype: str, lanes: int) -> str:
        if dtype == "bool":
            return self.new(f"icmp ne {self.vector('i8', lanes)} {name}, {self.zero(lanes)}")
        if dtype == "bf16":
            return bf16_to_float(self, name, lanes)
        if dtype == "f16":
            return self.new(f"fpext {self.vector('half', lanes)} {name} to {self.shape('f32', lanes)}")
        return name

    def to_memory(self, name: str, dtype: str, lanes: int) -> str:
        if dtype == "bool":
            return self.new(f"zext {self.shape('bool', lanes)} {name} to {self.vector('i8', lanes)}")
        if dtype == "bf16":
            return float_to_bf16(self, name, lanes)
        if dtype == "f16":
            return self.new(f"fptrunc {self.shape('f32', lanes)} {name} to {self.vector('half', lanes)}")
        return name

    def put(self, buffer: int, pointer: LlvmValue, offsets: str | None, lanes: int, kind: str, value: str) -> None:
        """Stores memory-form elements; lanes that do not exist are left out."""
        dtype = self.nest.dtypes[buffer]
        element, align = MEMORY[dtype], BYTES[dtype]
        ty = self.vector(element, lanes)
        if not lanes or (kind == "row" and self.mask is None):
            self.line(f"store {ty} {value}, ptr {pointer.name}, align {align}")
            return
        suffix = f"v{lanes}{_memory_suffix(element)}"
        mask = self.mask or "splat (i1 true)"
        if kind == "row":
            full = self.declare(f"@llvm.masked.store.{suffix}.p0", f"void @llvm.masked.store.{suffix}.p0({ty}, ptr, i32, <{lanes} x i1>)")
            self.line(f"call void {full}({ty} {value}, ptr {pointer.name}, i32 {align}, <{lanes} x i1> {mask})")
            return
        pointers = self.new(f"getelementptr {element}, ptr {pointer.name}, <{lanes} x i64> {offsets}")
        name = f"@llvm.masked.scatter.{suffix}.v{lanes}p0"
        full = self.declare(name, f"void {name}({ty}, <{lanes} x ptr>, i32, <{lanes} x i1>)")
        self.line(f"call void {full}({ty} {value}, <{lanes} x ptr> {pointers}, i32 {align}, <{lanes} x i1> {mask})")


def steps(lanes: int, step: int) -> str:
    """Offsets of lanes that are `step` elements apart."""
    return "<" + ", ".join(f"i64 {k * step}" for k in range(lanes)) + ">"


def _memory_suffix(element: str) -> str:
    return {"float": "f32", "double": "f64", "half": "f16"}.get(element, element)


# ---------------------------------------------------------------- leaves

def _write_const(w: LlvmFunction, node: Expr) -> None:
    w.remember(node, literal(node.attr, node.dtype), 0, 0)


def _write_symbol(w: LlvmFunction, node: Expr) -> None:
    """The value of a symbol: an element of the argument array after the buffers."""
    key = (node.attr, node.dtype)
    if key not in w.symbols:
        w.symbols.append(key)
    w.level = 0
    ty = {"i64": "i64", "f64": "double"}[node.dtype]
    place = w.new(f"getelementptr i64, ptr %args, i64 {len(w.nest.dtypes) + w.symbols.index(key)}")
    w.remember(node, w.new(f"load {ty}, ptr {place}, align 8"), 0, 0)


def _write_axis(w: LlvmFunction, node: Expr) -> None:
    """An axis as a number; the lane axis as a vector of numbers."""
    start = w.memo[("axis", node.attr)]
    if not w.width or node.attr != w.lane_axis:
        w.remember(node, start.name, 0, start.level)
        return
    wide = w.splat(start, "i64", w.width)
    w.level = start.level
    w.remember(node, w.new(f"add <{w.width} x i64> {wide}, {iota(w.width)}"), w.width, start.level)


def _write_at(w: LlvmFunction, node: Expr) -> None:
    buffer, address = node.attr
    level, lanes = w.access_level(address, node.args)
    w.level = level
    pointer, offsets = w.pointer(buffer, address, node.args, level)
    kind = w.lane_kind(address, node.args, offsets)
    window = w.windows.get((buffer, address)) if lanes and not node.args else None
    if window is not None:
        raw = w.read_window(buffer, address, window, level)
    elif kind == "apart" and offsets is not None and is_computed(node.args):
        raw = read_computed(w, buffer, pointer, offsets, node.args, lanes, w.mask)
    else:
        raw = w.read(buffer, pointer, offsets, lanes, kind, w.mask if lanes and not (w.inside and kind == "row") else None)
    w.keep_stored(node, raw, lanes)
    w.remember(node, w.from_memory(raw, node.dtype, lanes), lanes, level)


def _write_at_masked(w: LlvmFunction, node: Expr) -> None:
    (buffer, address), (mask, other, *irregular) = node.attr, node.args
    level, lanes = w.access_level(address, irregular, (mask, other))
    w.level = level
    pointer, offsets = w.pointer(buffer, address, irregular, level)
    wanted = w.shaped(w.memo[mask], mask, lanes)
    if lanes and w.mask:
        wanted = w.new(f"and <{lanes} x i1> {wanted}, {w.mask}")
    kind = w.lane_kind(address, irregular, offsets)
    if kind == "apart" and offsets is not None and is_computed(irregular):
        raw = read_computed(w, buffer, pointer, offsets, irregular, lanes, wanted)
    else:
        raw = w.read(buffer, pointer, offsets, lanes, kind, wanted)
    if node.dtype in STORAGE_FLOATS:
        bits = w.vector(MEMORY[node.dtype], lanes)
        w.keep_stored(node, w.new(f"select {w.shape('bool', lanes)} {wanted}, {bits} {raw}, {bits} {w.stored(other, lanes)}"), lanes)
    value = w.from_memory(raw, node.dtype, lanes)
    ty = w.shape(node.dtype, lanes)
    instead = w.shaped(w.memo[other], other, lanes)
    w.remember(node, w.new(f"select {w.shape('bool', lanes)} {wanted}, {ty} {value}, {ty} {instead}"), lanes, level)


def _write_check_index(w: LlvmFunction, node: Expr) -> None:
    """Wraps a negative index (a strict check does not); an index out of range ends this worker with the error slot set."""
    index, size = (w.memo[a] for a in node.args)
    lanes = max(index.lanes, size.lanes)
    level = w.level = max(index.level, size.level, w.guard, w.mask_level if lanes else 0)
    ty, mask = w.shape("i64", lanes), w.shape("bool", lanes)
    i, n = (w.shaped(v, e, lanes) for v, e in zip((index, size), node.args))
    wrapped = i
    if node.attr != "strict":
        negative = w.new(f"icmp slt {ty} {i}, {w.zero(lanes)}")
        wrapped = w.new(f"select {mask} {negative}, {ty} {w.new(f'add {ty} {i}, {n}')}, {ty} {i}")
    bad = w.new(f"icmp uge {ty} {wrapped}, {n}")
    if lanes and w.mask:
        bad = w.new(f"and {mask} {bad}, {w.mask}")
    going_on = w.label("ok")
    w.line(f"br i1 {w.any(bad, lanes)}, label %fail, label %{going_on}, !prof !0")
    w.mark(going_on)
    w.failing = True
    w.remember(node, wrapped, lanes, level)


def _write_acc(w: LlvmFunction, node: Expr) -> None:
    raise AssertionError(f"acc({node.attr}) is read before the phase that computes it")


_LEAVES = {
    "const": _write_const, "symbol": _write_symbol, "axis": _write_axis, "at": _write_at, "at_masked": _write_at_masked,
    "check_index": _write_check_index, "acc": _write_acc,
}
