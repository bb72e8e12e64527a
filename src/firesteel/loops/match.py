"""Groups of nests, and how the axes of two of them fit together.

In: nests.  Out: `Group`s (statements over named axes), and for two of them a `Match`: which axes are the same, and which are the common
parallel ones.  Axes are matched where one group reads what the other wrote, then where both read the same buffer, then
in their order; always with equal extents.  An axis that runs through two of the other group's is split.

    x[n] written, x[8*i + j] read, n < 24, i < 3, j < 8:      n becomes 8*n + n_r; i = n, j = n_r
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field, replace

from firesteel.loops import access, cost
from firesteel.loops.ir import ACCUMULATORS, AXES, Axis, Nest, ProgramStep, Reduce, Store, all_loads, axes_of, axis
from firesteel.loops.phases import Statement
from firesteel.loops.simplify import Simplifier, divides
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size, as_expr, as_size, make, postorder, rebuild
from firesteel.sym.poly import from_poly, poly
from firesteel.sym.rewrite import FREE

MOST_SPLITS = 4         # axes split to make two groups fit


@dataclass(slots=True)
class Group:
    """Nests that will be one.  `number` is its place in the tables; members are bits of step numbers."""
    number: int
    members: int
    last: ProgramStep                           # the step it ends with: gives the name
    rows: dict[str, Size] = field(default_factory=dict)         # parallel axes
    inner: dict[str, Size] = field(default_factory=dict)        # all axes of phases
    soft: bool = True
    frozen: bool = True
    statements: list[Statement] = field(default_factory=list)
    reads: dict[str, list[Expr]] = field(default_factory=dict)  # buffer -> distinct loads
    writes: dict[str, Store] = field(default_factory=dict)
    accumulators: set[str] = field(default_factory=set)
    work: int = 1                               # points of its largest sweep, all rows together
    origin: list[str] = field(default_factory=list)
    united: bool = False

    def __str__(self) -> str:
        return ", ".join(self.origin)


# ---------------------------------------------------------------- a nest as a group

def group_of(number: int, step: ProgramStep) -> Group:
    group = Group(number, 1 << number, step)
    nest = step.nest
    if nest is None or not all(phase.kind != "scan" and all(store.mode == "set" for store in phase.stores) for phase in nest.phases):
        return group
    group.frozen, group.origin = False, list(nest.origin)
    group.rows = {a.name: a.extent for a in nest.axes}
    group.soft = all(phase.kind == "map" and not phase.axes for phase in nest.phases)
    _add_statements(group, nest)
    group.writes = {s.what.buffer: s.what for s in group.statements if isinstance(s.what, Store)}
    group.accumulators = {s.what.name for s in group.statements if isinstance(s.what, Reduce)}
    for load in all_loads([expr for s in group.statements for expr in s.exprs()]):
        group.reads.setdefault(load.attr, []).append(load)
    swept = [cost.hint_product(group.inner[a] for a in s.axes) for s in group.statements]
    group.work = cost.hint_product(group.rows.values()) * max(swept, default=1)
    return group


def _add_statements(group: Group, nest: Nest) -> None:
    """Phases that sweep over equal extents share the names of their axes, so that their sweeps can become one."""
    by_extents: dict[tuple[Size, ...], tuple[str, ...]] = {}
    for phase in nest.phases:
        extents = tuple([a.extent for a in phase.axes])
        names = by_extents.setdefault(extents, tuple([a.name for a in phase.axes]))
        group.inner.update(zip(names, extents))
        change = Renaming({a.name: name for a, name in zip(phase.axes, names) if a.name != name})
        group.statements += [Statement(names, change.reduce(r)) for r in phase.reduces]
        group.statements += [Statement(names, change.store(s)) for s in phase.stores]


class Renaming:
    """Axes and accumulators under new names."""

    def __init__(self, axes: dict[str, str], accumulators: dict[str, str] | None = None):
        self.accumulators = accumulators or {}
        self.memo: dict[Expr, Expr] = {axis(old): axis(new) for old, new in axes.items() if old != new}
        self.nothing = not self.memo and not self.accumulators
        self.touched = AXES | ACCUMULATORS

    def expr(self, expr: Expr) -> Expr:
        return expr if self.nothing else rebuild(expr, self._change, self.memo, self.touched)

    def _change(self, node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op == "acc" and node.attr in self.accumulators:
            return make("acc", node.dtype, (), self.accumulators[node.attr])
        if node.op == "load" and args != node.args:
            return make("load", node.dtype, tuple([_canonical(arg) for arg in args]), node.attr)
        return None

    def reduce(self, r: Reduce) -> Reduce:
        return r if self.nothing else Reduce(self.accumulators.get(r.name, r.name), r.op, self.expr(r.value), r.dtype)

    def store(self, s: Store) -> Store:
        return s if self.nothing else Store(s.buffer, tuple([_canonical(self.expr(part)) for part in s.index]), self.expr(s.value), s.mode)

    def statement(self, s: Statement, axes: tuple[str, ...]) -> Statement:
        return Statement(axes, self.reduce(s.what) if isinstance(s.what, Reduce) else self.store(s.what))


def _canonical(index: Expr) -> Expr:
    """Sums are sorted by the names of axes: under new names in a new order."""
    return as_expr(FREE.simplify(index)) if index.op in ("add", "mul", "floordiv", "mod") else index


# ---------------------------------------------------------------- matching axes

@dataclass(slots=True)
class Match:
    """How `second` fits `first`: names of second's axes -> names of first's, and the common parallel axes (first's names)."""
    names: dict[str, str]
    rows: dict[str, Size]


class Matcher:
    def __init__(self, first: Group, second: Group):
        self.first, self.second = first, second
        self.ours = {**first.rows, **first.inner}
        self.theirs = {**second.rows, **second.inner}
        self.names: dict[str, str] = {}
        self.used: set[str] = set()
        self.wish: tuple[Group, str, Size] | None = None    # an axis that would fit if it were split: (group, axis, divisor)

    def match(self) -> Match | None:
        if not self._from_producers():
            return None
        self._from_common_reads()
        self._in_order(self.second.rows, [name for name in self.first.rows if name not in self.used])
        rows = self._rows()
        if rows is None:
            return None
        self._inner_in_order(rows)
        match = Match(self.names, rows)
        return match if self._reads_its_own_row(match) else None

    def _pair(self, theirs: str, ours: str) -> bool:
        """Matches two axes; False if that contradicts what was matched before."""
        known = self.names.get(theirs)
        if known is not None or ours in self.used:
            return known == ours
        if self.theirs[theirs] != self.ours[ours]:
            return False
        self.names[theirs] = ours
        self.used.add(ours)
        return True

    def _from_producers(self) -> bool:
        """Where one reads what the other wrote, the indices say which axes are the same."""
        for _, store, loads in self._produced():
            for load in loads:
                if load.op == "masked":
                    return False
                for ours, theirs in zip(store.index, load.args):
                    if ours.op == "axis" and theirs.op == "axis" and not self._pair(theirs.attr, ours.attr):
                        return False
                    self._wish(ours, theirs)
        return True

    def _wish(self, ours: Expr, theirs: Expr) -> None:
        """One side has an axis where the other has two that run through it: n against 8*i + j, or i against n // 8."""
        if self.wish is None and (ours.op == "axis") != (theirs.op == "axis"):
            group, extents, other = (self.first, self.ours, self.theirs) if ours.op == "axis" else (self.second, self.theirs, self.ours)
            plain, joined = (ours, theirs) if ours.op == "axis" else (theirs, ours)
            divisor = joined_by(joined, other)
            if divisor is not None and divides(divisor, extents[plain.attr]):
                self.wish = group, plain.attr, divisor
            elif joined.op in ("floordiv", "mod") and joined.args[0].op == "axis":
                name, divisor = joined.args[0].attr, as_size(joined.args[1])
                if divides(divisor, other[name]):
                    self.wish = self.second if group is self.first else self.first, name, divisor

    def _produced(self) -> Iterator[tuple[str, Store, list[Expr]]]:
        """What first writes and second reads."""
        for name, loads in self.second.reads.items():
            if name in self.first.writes:
                yield name, self.first.writes[name], loads

    def _from_common_reads(self) -> None:
        for name, loads in self.second.reads.items():
            for ours, theirs in zip(self.first.reads.get(name, ())[:1], loads[:1]):
                for a, b in zip(access.load_index(ours), access.load_index(theirs)):
                    if a.op == "axis" and b.op == "axis":
                        self._pair(b.attr, a.attr)
                    self._wish(a, b)

    def _in_order(self, theirs: Iterable[str], ours: list[str]) -> None:
        for name in theirs:
            if name not in self.names:
                fitting = next((o for o in ours if o not in self.used and self.ours[o] == self.theirs[name]), None)
                if fitting is not None:
                    self._pair(name, fitting)

    def _rows(self) -> dict[str, Size] | None:
        """The parallel axes of both together, or None where rule 1 fails."""
        first, second = self.first, self.second
        image = [self.names[name] for name in second.rows if name in self.names]
        if not second.soft and (len(image) < len(second.rows) or not set(image) <= set(first.rows)):
            return None
        if not first.soft and not set(first.rows) <= set(image):
            return None
        if first.soft and second.soft and not set(first.rows) <= set(image):
            return None
        common = set(image) & set(first.rows)
        return {name: extent for name, extent in first.rows.items() if name in common}

    def _inner_in_order(self, rows: dict[str, Size]) -> None:
        """Sweeps over equal extents are matched in their order."""
        ours = {**{n: e for n, e in self.first.rows.items() if n not in rows}, **self.first.inner}
        theirs = [n for n in self.second.rows if self.names.get(n) not in rows] + list(self.second.inner)
        self._in_order(theirs, list(ours))

    def _reads_its_own_row(self, match: Match) -> bool:
        """Rule 2: at the dimensions that parallel axes index when written, a read has the same index."""
        change = Renaming(match.names)
        for _, store, loads in self._produced():
            held = [(place, part) for place, part in enumerate(store.index)
                    if not match.rows.keys().isdisjoint(axes_of(part))]
            for load in loads:
                for place, part in held:
                    theirs = change.expr(load.args[place])
                    if theirs is not part and (theirs.op in ("axis", "const") or poly(theirs) != poly(part)):
                        return False
        return True


def joined_by(expr: Expr, extents: dict[str, Size]) -> Size | None:
    """c, if the expression is c*i + j with j < c."""
    terms = poly(expr)
    inner = [monomial for monomial, count in terms.items() if count == 1 and len(monomial) == 1 and monomial[0].op == "axis"]
    if len(terms) != 2 or () in terms or not inner:
        return None
    for small in inner:
        extent = extents[small[0].attr]
        rest, = [from_poly({monomial: count}) for monomial, count in terms.items() if monomial != small]
        for outer in [atom for atom in postorder(as_expr(rest)) if atom.op == "axis"]:
            if outer * extent == rest:
                return extent
    return None


def split_group(group: Group, name: str, divisor: Size) -> Group:
    """A copy in which the axis is two: name < extent // divisor, and another < divisor."""
    rest = unused(f"{name}_r", {*group.rows, *group.inner})

    def apart(extents: dict[str, Size]) -> dict[str, Size]:
        parts = [((name, extent // divisor), (rest, divisor)) if old == name else ((old, extent),) for old, extent in extents.items()]
        return dict(part for pair in parts for part in pair)

    rows, inner = apart(group.rows), apart(group.inner)
    simplifier = Simplifier([Axis(n, e) for n, e in (*rows.items(), *inner.items())])
    memo: dict[Expr, Expr] = {axis(name): as_expr(axis(name) * divisor + axis(rest))}

    def new(expr: Expr) -> Expr:
        return simplifier.value(rebuild(expr, lambda node, args: None, memo, AXES))

    def changed(what: Reduce | Store) -> Reduce | Store:
        if isinstance(what, Reduce):
            return Reduce(what.name, what.op, new(what.value), what.dtype)
        return Store(what.buffer, tuple([simplifier.index(new(part)) for part in what.index]), new(what.value), what.mode)

    def inner_axes(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple([new for old in names for new in ((name, rest) if old == name else (old,))])

    statements = [Statement(inner_axes(s.axes), changed(s.what)) for s in group.statements]
    return replace(group, rows=rows, inner=inner, statements=statements, origin=list(group.origin), accumulators=set(group.accumulators),
                   writes={s.what.buffer: s.what for s in statements if isinstance(s.what, Store)},
                   reads={buffer: [new(load) for load in loads] for buffer, loads in group.reads.items()})


def matched(first: Group, second: Group) -> tuple[Group, Group, Match | None]:
    """The groups and how they fit; where that takes it, copies of them with an axis split."""
    for _ in range(MOST_SPLITS):
        matcher = Matcher(first, second)
        match = matcher.match()
        if match is not None or matcher.wish is None:
            return first, second, match
        group, name, divisor = matcher.wish
        split = split_group(group, name, divisor)
        first, second = (split, second) if group is first else (first, split)
    return first, second, None


def unused(name: str, taken: set[str]) -> str:
    number = 0
    new = name
    while new in taken:
        number += 1
        new = f"{name}{'abcdefgh'[number % 8]}{number // 8 or ''}"
    return new
