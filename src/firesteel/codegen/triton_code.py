"""TritonFunction: one Triton function under construction.  Knows values, tiles and memory; `triton.py` knows phases and launches.

Every value lives on a tile [points, sweep]: `dims` says along which of the two it varies (0 neither: a scalar, POINTS a column
[X, 1], SWEEP a row [1, R], both a block).  A function without sweeps has tiles of points only, of one dimension.
Nothing is written twice (`memo`: Expr -> TritonValue); what does not vary along a sweep stands before its loop.  What was stored is known
to a later load of the same place (`kept`), so that a row which fits a tile stays in registers from phase to phase.

Integers: the IR's indices are i64.  Where all addresses of a nest fit into 31 bits, index arithmetic whose values are known to fit is
done in int32 (`TritonValue.narrow`), and widened where a value leaves it.

check_index: an index out of range sets the error flag and is replaced by 0; loads and stores that it places are masked.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from firesteel.codegen.bounds import NestIntervals
from firesteel.codegen.flat import Address, FlatNest
from firesteel.codegen.triton_ops import MEMORY, REGISTER, convert, literal, spell
from firesteel.loops.ir import Axis
from firesteel.loops.scalars import from_size
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size, as_expr, postorder, product

POINTS, SWEEP = 1, 2
LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TritonValue:
    name: str
    dims: int = 0
    narrow: bool = False        # an i64 held as int32
    inside: bool = False        # written in a loop: gone when it ends


@dataclass(frozen=True, slots=True)
class TileSweep:
    """The axes of a phase, flattened, and how many points of them a tile has."""
    axes: tuple[Axis, ...]
    block: int

    @property
    def extent(self) -> Size:
        return product(a.extent for a in self.axes)


class TritonFunction:
    """Builder of one function.  `x` is the tile of points; `enter` and `leave` a sweep."""

    def __init__(self, nest: FlatNest, intervals: NestIntervals, narrow: bool, block: int, flat: bool, symbols: dict[tuple[str, str], str]):
        self.nest, self.intervals, self.narrow, self.block, self.flat = nest, intervals, narrow, block, flat
        self.symbols = symbols                  # shared by the functions of a kernel: (name, dtype) -> parameter
        self.memo: dict[object, TritonValue] = {}
        self.splits: dict[str, tuple[str, Size, Size | None, int, int]] = {}    # axis -> flattened number, what is inside, extent, dims, its tile's
        self.tiles: dict[int, tuple[str, dict[str, Size]]] = {}     # dims -> flattened number, and what is inside of each of its axes
        self.lines: list[str] = []
        self.before: list[str] = []             # lines in front of the loop that is open
        self.sweep: TileSweep | None = None
        self.in_loop = False
        self.count = 0
        self.masks: dict[int, str | None] = {POINTS: None, SWEEP: None}     # which elements exist; None: all
        self.valid: dict[Expr, str] = {}        # check_index -> the mask of good indices
        self.can_fail = False
        self.sweeps = 0                         # opened so far
        self.first = ""                         # the number of the tile's first point
        self.once = ""                          # a scalar condition under which stores are made
        self.kept: dict[tuple, TritonValue] = {}        # place -> what was stored there
        self.fresh: set[int] = set()            # buffers written in this phase,
        self.unseen: set[int] = set()           # and in earlier ones since the last barrier

    # ------------------------------------------------------------ text

    def line(self, text: str) -> None:
        self.lines.append(("        " if self.in_loop else "    ") + text)

    def new(self, text: str, outside: bool = False) -> str:
        """A name for the value of a text, written before the open loop where `outside` says that it may."""
        if text.isidentifier():
            return text
        self.count += 1
        name = f"t{self.count}"
        if self.in_loop and outside:
            self.before.append(f"    {name} = {text}")
        else:
            self.line(f"{name} = {text}")
        return name

    def put(self, key: object, text: str, dims: int = 0, narrow: bool = False, outside: bool = False) -> TritonValue:
        """A new value; `outside`: it may stand before the loop."""
        inside = self.in_loop and not outside
        val = self.memo[key] = TritonValue(self.new(text, not inside), dims, narrow, inside)
        return val

    @property
    def index_type(self) -> str:
        return "tl.int32" if self.narrow else "tl.int64"

    def shape(self, dims: int) -> str:
        if self.flat:
            return f"[{self.block}]"
        sweep = self.sweep.block if self.sweep else 1
        return f"[{self.block if dims & POINTS else 1}, {sweep if dims & SWEEP else 1}]"

    def widened(self, name: str, dims: int, wanted: int) -> str:
        return name if dims == wanted or not wanted else f"tl.broadcast_to({name}, {self.shape(wanted)})"

    # ------------------------------------------------------------ tiles

    def points(self, tile: str, total: Size) -> None:
        """The points of tile number `tile`."""
        arange = f"tl.arange(0, {self.block})"
        self.first = start = self.new(f"{tile}.to({self.index_type}) * {self.block}")
        self.line(f"x = {start} + {arange}" if self.flat else f"x = ({start} + {arange})[:, None]")
        if not (isinstance(total, int) and total % self.block == 0):
            self.line(f"x_mask = x < {self.size(total)}")
            self.masks[POINTS] = "x_mask"
        self._split_index("x", self.nest.axes, POINTS, start, self.block)

    def sweep_tile(self, start: str, end: str | None) -> None:
        """The points of the open sweep from `start` on; those from `end` on do not exist (None: all do)."""
        assert self.sweep is not None
        arange = f"tl.arange(0, {self.sweep.block})" + ("" if self.narrow else ".to(tl.int64)")
        self.sweeps += 1
        r = "r" if self.sweeps == 1 else f"r_{self.sweeps}"       # each its own: a name that a loop carries keeps its shape
        self.line(f"{r} = {f'({start} + {arange})' if start else arange}[None, :]")
        self.masks[SWEEP] = None
        if end is not None:
            self.line(f"{r}_mask = {r} < {end}")
            self.masks[SWEEP] = f"{r}_mask"
        self._split_index(r, self.sweep.axes, SWEEP, start, self.sweep.block)

    def _split_index(self, index: str, axes: Sequence[Axis], dims: int, start: str, block: int) -> None:
        """The axes from their flattened number, innermost fastest; each is written where it is first needed.  An axis that is the same for a
        whole tile (`start` is a multiple of `block`) is a scalar."""
        inner: Size = 1
        steps: dict[str, Size] = {}
        self.tiles[dims] = index, steps
        for k, axis in reversed(list(enumerate(axes))):
            steps[axis.name] = inner
            same = bool(start) and isinstance(inner, int) and inner % block == 0
            self.splits[axis.name] = (start if same else index, inner, axis.extent if k else None, 0 if same else dims, dims)
            self.memo.pop(("axis", axis.name), None)
            inner = product([inner, axis.extent])

    def axis(self, name: str) -> TritonValue:
        found = self.memo.get(("axis", name))
        if found is None:
            text, inner, extent, dims, along = self.splits[name]
            if inner != 1:
                text = f"{text} // {self.size(inner)}"
            if extent is not None:
                text = f"({text}) % {self.size(extent)}"
            found = self.put(("axis", name), text, dims, self.narrow, outside=not along & SWEEP)
        return found

    def leave(self) -> None:
        """Ends a sweep: what was written in its loop is gone, and without a loop only what varies along it stays known."""
        if self.in_loop:
            self.memo = {k: v for k, v in self.memo.items() if not v.inside}
            self.valid = {k: v for k, v in self.valid.items() if k in self.memo}
        self.in_loop = False
        self.sweep = None
        self.masks[SWEEP] = None

    def forget_memory(self) -> None:
        """After stores into a buffer that is read again: what was computed from loads is stale."""
        self.memo = {k: v for k, v in self.memo.items() if not isinstance(k, Expr) or k.op in ("acc", "symbol", "const")}
        self.valid.clear()

    def forget_stored(self) -> None:
        """Behind a phase: what was computed from loads of the buffers that it stored into is stale."""
        stale: dict[Expr, bool] = {}
        for node in postorder(*(k for k in self.memo if isinstance(k, Expr))) if self.fresh else ():
            stale[node] = self._reads(node) and node.attr[0] in self.fresh or any(stale[a] for a in node.args)
        self.memo = {k: v for k, v in self.memo.items() if not (isinstance(k, Expr) and stale.get(k))}
        self.valid = {k: v for k, v in self.valid.items() if not stale.get(k)}
        self.unseen |= self.fresh
        self.fresh = set()

    def barrier(self) -> None:
        """All threads see what was stored."""
        self.line("tl.debug_barrier()")
        self.unseen.clear()

    @staticmethod
    def _reads(node: Expr) -> bool:
        return node.op in ("at", "at_masked")

    def is_reread(self, node: Expr) -> bool:
        """Does it load from memory what other threads may have stored?"""
        return self._reads(node) and node.attr[0] in self.unseen and (node.op != "at" or bool(node.args) or _place(*node.attr) not in self.kept)

    # ------------------------------------------------------------ values

    def values(self, roots: Iterable[Expr]) -> list[TritonValue]:
        roots = list(roots)
        for node in postorder(*roots, known=self.memo):
            _LEAVES.get(node.op, TritonFunction.operator)(self, node)
        return [self.memo[r] for r in roots]

    def value(self, root: Expr) -> TritonValue:
        return self.values([root])[0]

    def size(self, size: Size) -> str:
        """A size as text: a number, or the name of an int64 scalar."""
        return str(size) if isinstance(size, int) else self.value(from_size(as_expr(size))).name

    def operator(self, node: Expr) -> None:
        args = [self.memo[a] for a in node.args]
        dims = 0
        for a in args:
            dims |= a.dims
        whole = [a for a, e in zip(args, node.args) if e.dtype == "i64"]
        narrow = bool(whole) and all(a.narrow for a in whole) and (node.dtype != "i64" or self._fits(node))
        names = [a.name if narrow or not a.narrow else f"{a.name}.to(tl.int64)" for a in args]
        natural = node.op in ("mod", "floordiv") and self.intervals.natural(node)
        if node.op == "div" and args[0].dims & SWEEP & ~args[1].dims and REGISTER.get(node.dtype) == REGISTER["f32"]:
            names[1:] = self._reciprocal(node.args[1])
        self.put(node, spell(node, names, natural, narrow), dims, narrow and node.dtype == "i64", outside=not any(a.inside for a in args))

    def _reciprocal(self, divisor: Expr) -> list[str]:
        """What a whole row is divided by, prepared once: a power of two that brings it near 1, it times that, and the reciprocal of the product."""
        val, found = self.memo[divisor], list[str]()
        for key, text in ("scale", "fs_scale({0})"), ("scaled", "{0} * {1}"), ("reciprocal", "tl.div_rn(1.0, {2})"):
            known = self.memo.get((key, divisor)) or self.put((key, divisor), text.format(val.name, *found), val.dims, outside=not val.inside)
            found.append(known.name)
        return found

    def _fits(self, node: Expr) -> bool:
        return self.intervals.fits(node, -LIMIT, LIMIT)

    def constant(self, node: Expr) -> None:
        narrow = node.dtype == "i64" and self.narrow and abs(node.attr) <= LIMIT
        self.put(node, literal(node.attr, "i32" if narrow else node.dtype), 0, narrow, outside=True)

    def symbol(self, node: Expr) -> None:
        key = (node.attr, node.dtype)
        self.memo[node] = TritonValue(self.symbols.setdefault(key, f"n{len(self.symbols)}"))

    def axis_value(self, node: Expr) -> None:
        self.memo[node] = self.axis(node.attr)

    def accumulator(self, node: Expr) -> None:
        raise AssertionError(f"acc({node.attr}) is read before the phase that computes it")

    def conversion(self, node: Expr) -> None:
        arg = self.memo[node.args[0]]
        if node.dtype == node.args[0].dtype:
            self.memo[node] = arg
            return
        self.put(node, convert(arg.name, node.args[0].dtype, node.dtype), arg.dims, outside=not arg.inside)

    def wide(self, val: TritonValue) -> str:
        return f"{val.name}.to(tl.int64)" if val.narrow else val.name

    # ------------------------------------------------------------ memory

    def offset(self, address: Address, irregular: Sequence[Expr]) -> tuple[str, int, bool]:
        """(text of the element offset, the dims it varies along, does it change in the loop)"""
        terms, dims, inside = [], 0, False
        if not (isinstance(address.base, int) and address.base == 0):
            terms.append(self.size(address.base))
        parts = [*self._flattened(address)] + [(self.memo[e], scale) for e, scale in zip(irregular, address.scales, strict=True)]
        for val, scale in parts:
            dims |= val.dims
            inside |= val.inside
            name = val.name if self.narrow else self.wide(val)
            terms.append(name if isinstance(scale, int) and scale == 1 else f"{name} * {self.size(scale)}")
        return " + ".join(terms) or "0", dims, inside

    def _flattened(self, address: Address) -> Iterator[tuple[TritonValue, Size]]:
        """The axes of an address with their scales; those of a tile that run through memory as they are numbered, by that number."""
        left = dict(address.terms)
        for dims, (index, steps) in self.tiles.items():
            scale = left.get(next(iter(steps), ""), 0)
            if len(steps) > 1 and all(left.get(name) == inner * scale for name, inner in steps.items()):
                yield TritonValue(index, dims, self.narrow, self.in_loop and bool(dims & SWEEP)), scale
                left = {name: scale for name, scale in left.items() if name not in steps}
        yield from [(self.axis(name), scale) for name, scale in left.items()]

    def pointer(self, buffer: int, offset: str, dims: int, wanted: int) -> str:
        if offset == "0":
            return self.widened(f"p{buffer}", 0, wanted)
        return self.widened(f"p{buffer} + ({offset})", dims, wanted)

    def mask(self, dims: int, more: Iterable[str] = ()) -> str:
        """The condition under which the elements of a tile exist, "" for always."""
        masks = [m for bit, m in self.masks.items() if m and dims & bit]
        return " & ".join([*masks, *(f"({m})" for m in more)])

    def checks(self, irregular: Iterable[Expr]) -> list[str]:
        """Masks of the good ones among the indices that place an access."""
        return list(dict.fromkeys(self.valid[n] for n in postorder(*irregular) if n.op == "check_index"))

    def load(self, node: Expr) -> None:
        buffer, address = node.attr
        if not node.args and (kept := self.kept.get(_place(buffer, address))) is not None:
            self.memo[node] = kept
            return
        offset, dims, inside = self.offset(address, node.args)
        mask = self.mask(dims, self.checks(node.args))
        self._read(node, buffer, self.pointer(buffer, offset, dims, dims), mask, "", dims, inside)

    def masked_load(self, node: Expr) -> None:
        (buffer, address), (condition, other, *irregular) = node.attr, node.args
        offset, dims, inside = self.offset(address, irregular)
        wanted, instead = self.memo[condition], self.memo[other]
        full = dims | wanted.dims | instead.dims
        inside |= wanted.inside or instead.inside
        mask = self.mask(full, [wanted.name, *self.checks(irregular)])
        self._read(node, buffer, self.pointer(buffer, offset, dims, full), mask, instead.name, full, inside)

    def _read(self, node: Expr, buffer: int, pointer: str, mask: str, other: str, dims: int, inside: bool) -> None:
        arguments = [pointer, *([f"mask={mask}"] if mask else []), *([f"other={other}"] if other else [])]
        dtype = self.nest.dtypes[buffer]
        text = f"tl.load({', '.join(arguments)})"
        if MEMORY[dtype] != REGISTER[dtype]:
            text += ".to(tl.float32)"
        # a loop that runs not even once must not have its loads made before it
        self.put(node, text, dims, outside=not inside and not self.sweep_may_be_empty())

    def sweep_may_be_empty(self) -> bool:
        return self.sweep is not None and not (isinstance(self.sweep.extent, int) and self.sweep.extent > 0)

    def check_index(self, node: Expr) -> None:
        """The index, wrapped once if negative; a bad one sets the flag and becomes 0."""
        self.can_fail = True
        index, size = (self.memo[a] for a in node.args)
        dims, outside = index.dims | size.dims, not (index.inside or size.inside or self.sweep_may_be_empty())
        i, n = self.wide(index), self.wide(size)
        wrapped = i if node.attr == "strict" else self.new(f"tl.where({i} < 0, {i} + {n}, {i})", outside)
        valid = self.new(f"({wrapped} >= 0) & ({wrapped} < {n})", outside)
        flag = self.widened("error", 0, dims)
        store = f"tl.store({flag}, 1, mask={self.mask(dims, [f'~{valid}'])})"
        (self.before if self.in_loop and outside else self.lines).append(("        " if self.in_loop and not outside else "    ") + store)
        self.valid[node] = valid
        narrow = self.narrow and self._fits(node)
        zero = "tl.full([], 0, tl.int64)"
        self.put(node, f"tl.where({valid}, {wrapped}, {zero})" + (".to(tl.int32)" if narrow else ""), dims, narrow, outside)

    def store(self, buffer: int, address: Address, irregular: Sequence[Expr], value: Expr, add: bool, everywhere: int) -> None:
        """Writes a value; an addition happens at every point (`everywhere`: the dims of the phase)."""
        offset, dims, _ = self.offset(address, irregular)
        val = self.memo[value]
        full = dims | val.dims | (everywhere if add else 0)
        dtype = self.nest.dtypes[buffer]
        name = self.wide(val) if not add and val.narrow else val.name
        name = f"{name}.to({MEMORY[dtype]})" if MEMORY[dtype] != REGISTER[dtype] or (add and val.narrow) else name
        mask = self.mask(full, [*self.checks(irregular), *([self.once] if self.once else [])])
        arguments = [self.pointer(buffer, offset, dims, full), self.widened(name, val.dims, full), *([f"mask={mask}"] if mask else [])]
        if add:
            arguments.append("sem='relaxed'")
        self.line(f"tl.{'atomic_add' if add else 'store'}({', '.join(arguments)})")
        self.fresh.add(buffer)
        self.kept = {place: kept for place, kept in self.kept.items() if place[0] != buffer}
        if not (add or irregular or self.once or val.inside or val.narrow):
            self.kept[_place(buffer, address)] = val


def _place(buffer: int, address: Address) -> tuple:
    return buffer, frozenset(address.terms), address.base


_LEAVES = {
    "const": TritonFunction.constant, "symbol": TritonFunction.symbol, "axis": TritonFunction.axis_value, "acc": TritonFunction.accumulator,
    "to": TritonFunction.conversion, "at": TritonFunction.load, "at_masked": TritonFunction.masked_load, "check_index": TritonFunction.check_index}
