"""Nest -> FlatNest: what every printer prints.  Indices become linear addresses, trivial axes vanish, neighbours merge.

In:  a `loops.ir.Nest` and its Buffers.  Out: a `FlatNest` and the names of its buffers.  What always holds of a FlatNest:
 1. A load is `at(buffer number, Address)`, a guarded one `at_masked`; their args are (mask, other,) and the irregular
    parts of the address (those that are not linear in the axes: gathered indices, floordiv, mod).
 2. No axis has the constant extent 1; axes that run through memory together are one axis.
 3. Buffers are numbered in the order of their first use, axes and accumulators named by their position: nests that differ
    in names only become equal FlatNests, which are printed and compiled once.

    x[i, j] of a contiguous [n, 8] buffer  ->  at(0, 8*i + j)  ->  at(0, ij) with ij < n*8
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firesteel.loops.ir import Axis, Buffer, Nest, Phase, Reduce, axis
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size, as_size, const, make, postorder, product, rebuild


@dataclass(frozen=True, slots=True)
class Address:
    """base + sum of coefficient * axis + sum of scale * irregular part; in elements."""
    terms: tuple[tuple[str, Size], ...]
    base: Size
    scales: tuple[Size, ...] = ()

    def coefficient(self, axis: str) -> Size:
        for name, value in self.terms:
            if name == axis:
                return value
        return 0


@dataclass(frozen=True, slots=True)
class FlatStore:
    buffer: int
    address: Address
    irregular: tuple[Expr, ...]
    value: Expr
    mode: str
    private: frozenset[str]     # axes that index a dimension of the buffer alone: different values never collide


@dataclass(frozen=True, slots=True)
class FlatPhase:
    kind: str
    axes: tuple[Axis, ...]
    reduces: tuple[Reduce, ...]
    stores: tuple[FlatStore, ...]

    def roots(self) -> list[Expr]:
        found = [r.value for r in self.reduces]
        for s in self.stores:
            found += (*s.irregular, s.value)
        return found


@dataclass(frozen=True, slots=True)
class FlatNest:
    axes: tuple[Axis, ...]
    phases: tuple[FlatPhase, ...]
    dtypes: tuple[str, ...]         # of the buffers, by number


def flatten(nest: Nest, buffers: Mapping[str, Buffer]) -> tuple[FlatNest, tuple[str, ...]]:
    """The nest with linear addresses, canonical names and merged axes; and its buffers' names by number."""
    flattener = _Flattener(nest, buffers)
    flat = flattener.run()
    surveys = [_Survey(p) for p in flat.phases]
    return merge_axes(order_axes(flat, surveys), surveys), tuple(flattener.numbers)


# ---------------------------------------------------------------- linear addresses

class _Linear:
    """A sum under construction."""

    __slots__ = ("terms", "base", "irregular")

    def __init__(self) -> None:
        self.terms: dict[str, Size] = {}
        self.base: Size = 0
        self.irregular: dict[Expr, Size] = {}

    def add(self, other: _Linear, scale: Size) -> None:
        for name, value in other.terms.items():
            self.terms[name] = self.terms.get(name, 0) + value * scale
        for expr, value in other.irregular.items():
            self.irregular[expr] = self.irregular.get(expr, 0) + value * scale
        self.base = self.base + other.base * scale


class _Flattener:
    """State of one `flatten`: buffer numbers, and the memo of rewritten nodes."""

    def __init__(self, nest: Nest, buffers: Mapping[str, Buffer]):
        self.nest, self.buffers = nest, buffers
        self.numbers: dict[str, int] = {}
        self.memo: dict[Expr, Expr] = {}
        self.linear_memo: dict[Expr, _Linear] = {}
        self.divided: dict[Expr, Expr] = {}         # rest of a division, as it is printed -> what is divided
        self.pure: dict[Expr, bool] = {}
        every = [*nest.axes, *(a for p in nest.phases for a in p.axes)]
        self.unit = {a.name for a in every if as_size(a.extent) == 1}
        self.axis_names = {a.name: f"a{i}" for i, a in enumerate(every)}
        self.acc_names = {r.name: f"r{i}" for i, r in enumerate(r for p in nest.phases for r in p.reduces)}

    def run(self) -> FlatNest:
        phases = tuple(self.phase(p) for p in self.nest.phases)
        return FlatNest(self.kept(self.nest.axes), phases, tuple(self.buffers[n].dtype for n in self.numbers))

    def kept(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(Axis(self.axis_names[a.name], as_size(a.extent)) for a in axes if a.name not in self.unit)

    def phase(self, phase: Phase) -> FlatPhase:
        roots = [r.value for r in phase.reduces]
        for s in phase.stores:
            roots += (*s.index, s.value)
        for root in roots:
            rebuild(root, self.change, self.memo)
        reduces = tuple(Reduce(self.acc_names[r.name], r.op, self.memo[r.value], r.dtype) for r in phase.reduces)
        return FlatPhase(phase.kind, self.kept(phase.axes), reduces, tuple(self.store(s) for s in phase.stores))

    def store(self, store) -> FlatStore:
        address, irregular = self.address(store.buffer, store.index)
        private = frozenset(self.axis_names[i.attr] for i in store.index if i.op == "axis")
        return FlatStore(self.number(store.buffer), address, irregular, self.memo[store.value], store.mode, private)

    def number(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def change(self, node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op == "axis":
            return const(0) if node.attr in self.unit else axis(self.axis_names[node.attr])
        if node.op == "acc":
            return make("acc", node.dtype, (), self.acc_names[node.attr])
        if node.op == "load":
            address, irregular = self.address(node.attr, node.args)
            return make("at", node.dtype, irregular, (self.number(node.attr), address))
        if node.op == "masked":
            address, irregular = self.address(node.attr, node.args[2:])
            return make("at_masked", node.dtype, (args[0], args[1], *irregular), (self.number(node.attr), address))
        return None

    def address(self, name: str, index: tuple[Expr, ...]) -> tuple[Address, tuple[Expr, ...]]:
        total = _Linear()
        for part, stride in zip(index, self.buffers[name].strides, strict=True):
            total.add(self.linear(part), as_size(stride))
        self.rejoin(total)
        terms = tuple((n, c) for n, c in total.terms.items() if not _is_zero(c))
        irregular = {e: c for e, c in total.irregular.items() if not _is_zero(c)}
        return Address(terms, total.base, tuple(irregular.values())), tuple(irregular)

    def rejoin(self, total: _Linear) -> None:
        """x // n * n + x % n is x: a view of dense memory in other sizes."""
        rests = [e for e in total.irregular if e.op == "mod"]
        while rests:
            rest = rests.pop()
            whole = make("floordiv", rest.dtype, rest.args)
            factor, size = total.irregular.get(rest, 0), rest.args[1]
            if size.op == "const" and whole in total.irregular and total.irregular[whole] == factor * size.attr:
                del total.irregular[whole], total.irregular[rest]
                inside = self.linear(self.divided[rest])
                total.add(inside, factor)
                rests += [e for e in total.irregular if e.op == "mod"]

    def linear(self, e: Expr) -> _Linear:
        found = self.linear_memo.get(e)
        if found is None:
            found = self.linear_memo[e] = self._linear(e)
        return found

    def _linear(self, e: Expr) -> _Linear:
        out = _Linear()
        if e.op == "axis":
            if e.attr not in self.unit:
                out.terms[self.axis_names[e.attr]] = 1
        elif self.is_pure(e):
            out.base = as_size(e)
        elif e.op == "add":
            for a in e.args:
                out.add(self.linear(a), 1)
        elif e.op == "sub":
            out.add(self.linear(e.args[0]), 1)
            out.add(self.linear(e.args[1]), -1)
        elif e.op == "neg":
            out.add(self.linear(e.args[0]), -1)
        elif e.op == "mul" and any(self.is_pure(a) for a in e.args):
            varying = [a for a in e.args if not self.is_pure(a)]
            if len(varying) == 1:
                out.add(self.linear(varying[0]), product(as_size(a) for a in e.args if self.is_pure(a)))
            else:
                out.irregular[self.memo[e]] = 1
        else:
            out.irregular[self.memo[e]] = 1
            if e.op == "mod":
                self.divided[self.memo[e]] = e.args[0]
        return out

    def is_pure(self, e: Expr) -> bool:
        """Is it made of constants and symbols alone?"""
        known = self.pure.get(e)
        if known is None:
            leaf = e.op in ("axis", "load", "masked", "acc", "check_index")
            known = self.pure[e] = not leaf and all(self.is_pure(a) for a in e.args)
        return known


def _is_zero(size: Size) -> bool:
    return isinstance(size, int) and size == 0


# ---------------------------------------------------------------- order and merge of axes

Access = tuple[int, Address, tuple[Expr, ...], bool]       # buffer, address, its irregular parts, is it a store?


class _Survey:
    """What a phase accesses, and its raw axes: those used other than linearly in addresses, which cannot be merged."""

    def __init__(self, phase: FlatPhase):
        self.accesses: list[Access] = []
        self.raw: set[str] = set()
        for node in postorder(*phase.roots()):
            if node.op == "at":
                self.accesses.append((*node.attr, node.args, False))
            elif node.op == "at_masked":
                self.accesses.append((*node.attr, node.args[2:], False))
            elif node.op == "axis":
                self.raw.add(node.attr)
        self.accesses += [(s.buffer, s.address, s.irregular, True) for s in phase.stores]


def addresses(nest: FlatNest | FlatPhase) -> list[Access]:
    """Every access of a nest or a phase, each load once in a phase."""
    phases = nest.phases if isinstance(nest, FlatNest) else (nest,)
    return [access for phase in phases for access in _Survey(phase).accesses]


def order_axes(nest: FlatNest, surveys: Sequence[_Survey]) -> FlatNest:
    """Axes with the largest step in the widest store (else load) outermost: they then merge and stream.  Parallel axes, and those of sweeps that
    may go in any order."""
    axes = _by_step(nest.axes, [a for s in surveys for a in s.accesses])
    phases = tuple(_order_sweep(phase, survey) for phase, survey in zip(nest.phases, surveys, strict=True))
    if axes is nest.axes and all(new is old for new, old in zip(phases, nest.phases)):
        return nest
    return FlatNest(axes, phases, nest.dtypes)


def _order_sweep(phase: FlatPhase, survey: _Survey) -> FlatPhase:
    names = {a.name for a in phase.axes}
    if len(names) < 2 or phase.kind == "scan" or not all(names <= store.private for store in phase.stores):
        return phase
    axes = _by_step(phase.axes, survey.accesses)
    return phase if axes is phase.axes else FlatPhase(phase.kind, axes, phase.reduces, phase.stores)


def _by_step(axes: tuple[Axis, ...], accesses: Sequence[Access]) -> tuple[Axis, ...]:
    if len(axes) < 2 or not accesses:
        return axes
    names = {a.name for a in axes}
    widest = max(accesses, key=lambda a: (sum(name in names for name, _ in a[1].terms), a[3]))
    steps: list[Any] = [widest[1].coefficient(a.name) for a in axes]
    if not all(isinstance(s, int) for s in steps):
        return axes
    # an axis that the widest access does not step along stays where it is relative to its outer neighbour
    for i, step in enumerate(steps):
        if step == 0:
            steps[i] = steps[i - 1] if i else max(steps)
    order = sorted(range(len(steps)), key=lambda i: -abs(steps[i]))
    return axes if order == list(range(len(order))) else tuple(axes[i] for i in order)


def merge_axes(nest: FlatNest, surveys: Sequence[_Survey]) -> FlatNest:
    """Joins neighbouring axes whose addresses are those of one longer axis."""
    gone: dict[str, str] = {}
    axes = nest.axes
    if len(axes) > 1:
        axes, gone = _merge_group(axes, [a[1] for s in surveys for a in s.accesses], set().union(*(s.raw for s in surveys)))
    phases = []
    for phase, survey in zip(nest.phases, surveys, strict=True):
        own = phase.axes
        if len(own) > 1:
            own, lost = _merge_group(own, [a[1] for a in survey.accesses], survey.raw)
            gone |= lost
        phases.append(phase if own is phase.axes else FlatPhase(phase.kind, own, phase.reduces, phase.stores))
    return FlatNest(axes, _without_axes(phases, gone), nest.dtypes) if gone else nest


def _merge_group(axes: tuple[Axis, ...], where: list[Address], raw: set[str]) -> tuple[tuple[Axis, ...], dict[str, str]]:
    """The axes that remain, and for each that went the one it became a part of."""
    kept: list[Axis] = []
    gone: dict[str, str] = {}
    for inner in reversed(axes):
        if kept and _continues(inner, kept[-1], where, raw):
            last = kept.pop()
            kept.append(Axis(last.name, inner.extent * last.extent))
            gone[inner.name] = last.name
        else:
            kept.append(inner)
    return tuple(reversed(kept)), gone


def _continues(outer: Axis, inner: Axis, where: list[Address], raw: set[str]) -> bool:
    if outer.name in raw or inner.name in raw:
        return False
    return all(a.coefficient(outer.name) == a.coefficient(inner.name) * inner.extent for a in where)


def _without_axes(phases: list[FlatPhase], gone: dict[str, str]) -> tuple[FlatPhase, ...]:
    memo: dict[Expr, Expr] = {}

    def strip(address: Address) -> Address:
        return Address(tuple((n, c) for n, c in address.terms if n not in gone), address.base, address.scales)

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op in ("at", "at_masked"):
            return make(node.op, node.dtype, args, (node.attr[0], strip(node.attr[1])))
        return None

    def still_private(private: frozenset[str]) -> frozenset[str]:
        """A merged axis indexes distinct elements only if each of its parts did."""
        return private - set(gone) - {kept for part, kept in gone.items() if part not in private}

    for root in [r for p in phases for r in p.roots()]:
        rebuild(root, change, memo)
    return tuple(FlatPhase(
        p.kind, p.axes,
        tuple(Reduce(r.name, r.op, memo[r.value], r.dtype) for r in p.reduces),
        tuple(FlatStore(s.buffer, strip(s.address), tuple(memo[i] for i in s.irregular), memo[s.value], s.mode, still_private(s.private))
              for s in p.stores),
    ) for p in phases)
