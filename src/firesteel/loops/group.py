"""Which nests become one, when one cannot simply be put into the other.

In: a Program after inlining, and some fuel.  Out: a Program whose nests are groups of the former ones.

A `Group` is a set of nests that share parallel axes.  It is *soft* while it is pointwise: any of its axes may still be moved from the
nest into its phases.  A group with a reduction is *hard*: its parallel axes are those of the reduction.

Numbered rules of what may be one group (`unite`)
 1. There is a one-to-one match of axes with equal extents, under which all parallel axes of the one are axes of the other.  An axis
    may be split for that: rows n < 8*i of the one are rows (i, j) of the other.
 2. What one writes and the other reads is read at the same point of the common parallel axes.
 3. No third step lies on a path between the two; so the steps can still be put in an order (ancestors are bitsets).
 4. Neither writes what the other one writes, or what an earlier one reads.
 5. Scans and stores that add are left alone.
Whether it is worth it: they have a producer and its reader among them, or read one large buffer at the same place; the axes moved
inwards must include the one along which memory is contiguous; the parallel axes that are left must keep the cores busy.

    nest sum [i]  a = sum(r: x[i, r])  s[i] = acc(a)         nest [i]  sweep r: a = sum(x[i, r])
    nest div [i, j]  y[i, j] = x[i, j] / s[i]         ->               sweep r: y[i, r] = x[i, r] / acc(a)
"""
from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from firesteel.loops import access, cost
from firesteel.loops.inline import Fuel
from firesteel.loops.ir import Axis, Buffer, Extern, Nest, Program, Reduce, Store, axis
from firesteel.loops.phases import Statement, arrange
from firesteel.loops.simplify import Simplifier, divides, has_indices_to_simplify, simplify_nest
from firesteel.sym.expr import Expr, Size, as_expr, as_size, make
from firesteel.sym.poly import from_poly, poly
from firesteel.sym.rewrite import FREE

MOST_STATEMENTS = 96
MOST_BUFFERS = 48
MOST_SPLITS = 4         # axes split to make two groups fit
HEAD_START = 24         # steps by which a kernel may overtake library calls
RECENT_READERS = 3      # how many groups that read the same buffer are tried


@dataclass(slots=True)
class Group:
    """Nests that will be one.  `number` is its place in the tables; members are bits of step numbers."""
    number: int
    members: int
    last: Nest | Extern                         # the step it ends with: gives the name
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


# ---------------------------------------------------------------- a nest as a group

def group_of(number: int, step: Nest | Extern) -> Group:
    group = Group(number, 1 << number, step)
    if isinstance(step, Extern) or not _groupable(step):
        return group
    group.frozen, group.origin = False, list(step.origin)
    group.rows = {a.name: a.extent for a in step.axes}
    group.soft = all(phase.kind == "map" and not phase.axes for phase in step.phases)
    _add_statements(group, step)
    group.writes = {s.what.buffer: s.what for s in group.statements if isinstance(s.what, Store)}
    group.accumulators = {s.what.name for s in group.statements if isinstance(s.what, Reduce)}
    for load in access.loads([expr for s in group.statements for expr in s.exprs()]):
        group.reads.setdefault(load.attr, []).append(load)
    group.work = cost.hint_product(group.rows.values()) * max([cost.hint_product(group.inner[a] for a in s.axes) for s in group.statements], default=1)
    return group


def _groupable(nest: Nest) -> bool:
    return all(phase.kind != "scan" and all(store.mode == "set" for store in phase.stores) for phase in nest.phases)


def _add_statements(group: Group, nest: Nest) -> None:
    """Phases that sweep over equal extents share the names of their axes, so that their sweeps can become one."""
    by_extents: dict[tuple[Size, ...], tuple[str, ...]] = {}
    for phase in nest.phases:
        extents = tuple([a.extent for a in phase.axes])
        names = by_extents.setdefault(extents, tuple([a.name for a in phase.axes]))
        group.inner.update(zip(names, extents))
        change = _Renaming({a.name: name for a, name in zip(phase.axes, names) if a.name != name})
        group.statements += [Statement(names, change.reduce(r)) for r in phase.reduces]
        group.statements += [Statement(names, change.store(s)) for s in phase.stores]


class _Renaming:
    """Axes and accumulators under new names."""

    def __init__(self, axes: dict[str, str], accumulators: dict[str, str] | None = None):
        self.accumulators = accumulators or {}
        self.memo: dict[Expr, Expr] = {axis(old): axis(new) for old, new in axes.items() if old != new}
        self.nothing = not self.memo and not self.accumulators

    def expr(self, expr: Expr) -> Expr:
        return expr if self.nothing else access.rebuild(expr, self._change, self.memo)

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


class _Matcher:
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
        change = _Renaming(match.names)
        for _, store, loads in self._produced():
            held = [(place, part) for place, part in enumerate(store.index) if any(n.op == "axis" and n.attr in match.rows for n in access.walk(part))]
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
        for outer in [atom for atom in access.walk(rest) if atom.op == "axis"]:
            if outer * extent == rest:
                return extent
    return None


def split_group(group: Group, name: str, divisor: Size) -> Group:
    """A copy in which the axis is two: name < extent // divisor, and another < divisor."""
    rest = _unused(f"{name}_r", {*group.rows, *group.inner})

    def apart(extents: dict[str, Size]) -> dict[str, Size]:
        return {n: e for old, extent in extents.items() for n, e in (((name, extent // divisor), (rest, divisor)) if old == name else ((old, extent),))}

    rows, inner = apart(group.rows), apart(group.inner)
    simplifier = Simplifier([Axis(n, e) for n, e in (*rows.items(), *inner.items())])
    memo: dict[Expr, Expr] = {axis(name): as_expr(axis(name) * divisor + axis(rest))}

    def new(expr: Expr) -> Expr:
        return simplifier.value(access.rebuild(expr, lambda node, args: None, memo))

    def changed(what: Reduce | Store) -> Reduce | Store:
        if isinstance(what, Reduce):
            return Reduce(what.name, what.op, new(what.value), what.dtype)
        return Store(what.buffer, tuple([simplifier.index(new(part)) for part in what.index]), new(what.value), what.mode)

    statements = [Statement(tuple([n for a in s.axes for n in ((name, rest) if a == name else (a,))]), changed(s.what)) for s in group.statements]
    return replace(group, rows=rows, inner=inner, statements=statements, origin=list(group.origin), accumulators=set(group.accumulators),
                   writes={s.what.buffer: s.what for s in statements if isinstance(s.what, Store)},
                   reads={buffer: [new(load) for load in loads] for buffer, loads in group.reads.items()})


# ---------------------------------------------------------------- is it worth it

def _inner_of(group: Group, rows: set[str]) -> set[str]:
    """Parallel axes of a soft group that would become inner ones."""
    return set(group.rows) - rows


def _contiguous_inside(group: Group, inner: set[str], buffers: dict[str, Buffer]) -> bool:
    """Do the axes moved inwards include the one along which the group's stores are contiguous?"""
    if not inner:
        return True
    for store in group.writes.values():
        steps = [(stride, part) for stride, part in zip(buffers[store.buffer].strides, store.index) if part.op == "axis"]
        unit = [part.attr for stride, part in steps if isinstance(stride, int) and stride == 1]
        if unit and unit[0] not in inner:
            return False
    return True


def _worth(first: Group, second: Group, match: Match, buffers: dict[str, Buffer]) -> bool:
    back = {ours: theirs for theirs, ours in match.names.items()}
    theirs = {back[name] for name in match.rows}
    if first.soft and not _contiguous_inside(first, _inner_of(first, set(match.rows)), buffers):
        return False
    if second.soft and not _contiguous_inside(second, _inner_of(second, theirs), buffers):
        return False
    moved = len(match.rows) < len(first.rows) or len(match.rows) < len(second.rows)
    if moved and not cost.enough_rows([Axis(n, e) for n, e in match.rows.items()], max(first.work, second.work)):
        return False
    if len(first.statements) + len(second.statements) > MOST_STATEMENTS or len(first.reads) + len(first.writes) + len(second.reads) + len(second.writes) > MOST_BUFFERS:
        return False
    return any(name in first.writes for name in second.reads) or _share_a_large_read(first, second, match, buffers)


def _share_a_large_read(first: Group, second: Group, match: Match, buffers: dict[str, Buffer]) -> bool:
    enough = min(first.work, second.work) // 4
    for name, loads in second.reads.items():
        if name in first.reads and cost.elements(buffers[name]) >= enough:
            places = {tuple([match.names.get(p.attr) if p.op == "axis" else p for p in access.load_index(load)]) for load in loads}
            if any(tuple([p.attr if p.op == "axis" else p for p in access.load_index(load)]) in places for load in first.reads[name]):
                return True
    return False


# ---------------------------------------------------------------- two groups as one

def unite(first: Group, second: Group, match: Match) -> None:
    """`second` becomes a part of `first`, after it and in its names.  Changes `first`; cost goes with the size of `second`."""
    names = dict(match.names)
    taken = first.rows.keys() | first.inner.keys()
    for name in (*second.rows, *second.inner):
        if name not in names:
            names[name] = _unused(name, taken)
        taken.add(names[name])
    change = _Renaming(names, _fresh_accumulators(first, second))
    kept = [name for name in first.rows if name not in match.rows]
    moved = [name for name in second.rows if names[name] not in match.rows]
    if kept:
        first.statements = [Statement((*kept, *s.axes), s.what) for s in first.statements]
        first.inner = {**{name: first.rows[name] for name in kept}, **first.inner}
    added = [change.statement(s, tuple([names[a] for a in (*moved, *s.axes)])) for s in second.statements]
    first.statements += added
    first.inner.update((names[n], e) for n, e in (*second.rows.items(), *second.inner.items()) if names[n] not in match.rows)
    first.rows = match.rows
    first.soft = first.soft and second.soft and not kept and not moved
    first.writes.update((s.what.buffer, s.what) for s in added if isinstance(s.what, Store))
    first.accumulators.update(s.what.name for s in added if isinstance(s.what, Reduce))
    for name, loads in second.reads.items():
        known = first.reads.setdefault(name, [])
        known += [load for load in map(change.expr, loads) if load not in known]
    first.work = max(first.work, second.work)
    first.origin += second.origin
    first.members |= second.members
    first.last, first.united = second.last, True


def _unused(name: str, taken: set[str]) -> str:
    number = 0
    new = name
    while new in taken:
        number += 1
        new = f"{name}{'abcdefgh'[number % 8]}{number // 8 or ''}"
    return new


def _fresh_accumulators(first: Group, second: Group) -> dict[str, str]:
    """New names for those of second's accumulators that first has too."""
    names: dict[str, str] = {}
    number = len(first.accumulators)
    for name in sorted(second.accumulators & first.accumulators):
        while f"a{number}" in first.accumulators or f"a{number}" in second.accumulators:
            number += 1
        names[name] = f"a{number}"
        number += 1
    return names


def _matched(first: Group, second: Group) -> tuple[Group, Group, Match | None]:
    """The groups and how they fit; where that takes it, copies of them with an axis split."""
    for _ in range(MOST_SPLITS):
        matcher = _Matcher(first, second)
        match = matcher.match()
        if match is not None or matcher.wish is None:
            return first, second, match
        group, name, divisor = matcher.wish
        split = split_group(group, name, divisor)
        first, second = (split, second) if group is first else (first, split)
    return first, second, None


# ---------------------------------------------------------------- the walk over the program

class Grouper:
    """Processes the steps in order; each tries to join the groups of its producers, then groups that read what it reads."""

    def __init__(self, program: Program, fuel: Fuel, rewritten: set[str]):
        self.program, self.fuel, self.rewritten = program, fuel, rewritten
        self.outputs = access.output_buffers(program)
        self.group_at: list[Group] = []             # step -> its group
        self.before: dict[int, int] = {}            # group number -> bits of all steps it depends on
        self.direct: dict[int, set[int]] = {}       # group number -> steps it depends on directly
        self.writer: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}

    def run(self) -> Program:
        for number, step in enumerate(self.program.steps):
            self._enter(number, step)
            if not self.group_at[number].frozen:
                self._join(number)
        return self._program()

    def _enter(self, number: int, step: Nest | Extern) -> None:
        """The step as a group of its own, with what it depends on (also: later writers of what others read or wrote)."""
        group, writes = group_of(number, step), access.writes(step)
        if not self.rewritten.isdisjoint(writes):
            group.frozen = True
        reads = group.reads if not group.frozen else access.reads(step)
        direct = {self.writer[name] for name in reads if name in self.writer}
        for name in writes:
            if name in self.rewritten:
                direct.update(n for n in (self.writer.get(name), *self.readers.get(name, ())) if n is not None)
            self.writer[name] = number
        for name in reads:
            self.readers.setdefault(name, []).append(number)
        direct.discard(number)
        self.group_at.append(group)
        self.direct[number] = direct
        before = 0
        for other in {self.group_at[d].number: self.group_at[d] for d in direct}.values():
            before |= self.before[other.number] | other.members
        self.before[number] = before

    def _join(self, number: int) -> None:
        candidates = sorted({self.group_at[d].number for d in self.direct[number]}, reverse=True)
        recent: dict[int, None] = {}
        for name in self.group_at[number].reads:
            recent.update(dict.fromkeys(self.group_at[r].number for r in self.readers[name][-RECENT_READERS - 1:-1]))
        for other in (*candidates, *sorted(recent, reverse=True)):
            self._try(other, number)

    def _try(self, other: int, number: int) -> None:
        first, second = self.group_at[other], self.group_at[number]
        if first.number == second.number or first.frozen or self._between(first, second) or self._between(second, first):
            return
        if self.before[first.number] & second.members:
            first, second = second, first
        if not first.writes.keys().isdisjoint(second.writes) or not first.reads.keys().isdisjoint(second.writes):
            return
        first, second, match = _matched(first, second)
        if match is not None and _worth(first, second, match, self.program.buffers) and self.fuel.take():
            unite(first, second, match)
            self._merge(first, second)

    def _between(self, first: Group, second: Group) -> bool:
        """Does a path lead from first through a third step to second?"""
        both = first.members | second.members
        for step in self.direct[second.number]:
            other = self.group_at[step]
            if not other.members & both and self.before[other.number] & first.members:
                return True
        return False

    def _merge(self, group: Group, gone: Group) -> None:
        """The tables after `gone` became a part of `group`.  What depends on either now depends on all of both; such steps
        come later, and mostly soon."""
        before = self.before[group.number] = (self.before[group.number] | self.before.pop(gone.number)) & ~group.members
        self.direct[group.number] = {d for d in self.direct[group.number] | self.direct.pop(gone.number) if not group.members >> d & 1}
        for member in _bits(group.members if self.group_at[group.number] is not group else gone.members):
            self.group_at[member] = group
        known = before | group.members
        for other in self.group_at[(group.members & -group.members).bit_length():]:
            if self.before[other.number] & group.members and other is not group:
                self.before[other.number] |= known

    # ------------------------------------------------ out

    def _program(self) -> Program:
        order = self._order()
        dropped: set[str] = set()
        steps = [self._step(group, dropped) for group in order]
        buffers = {name: buffer for name, buffer in self.program.buffers.items() if name not in dropped}
        return replace(self.program, buffers=buffers, steps=tuple(steps))

    def _order(self) -> list[Group]:
        """Groups so that each comes after what it depends on; otherwise by their first member, kernels a little earlier than library
        calls, so that more of them stand in a row and are one launch."""
        groups = {group.number: group for group in self.group_at}
        waiting: dict[int, int] = {}
        users: dict[int, list[int]] = {}
        for number, group in groups.items():
            needs = {self.group_at[d].number for d in self.direct[number]}
            waiting[number] = len(needs)
            for need in needs:
                users.setdefault(need, []).append(number)
        first = {number: (group.members & -group.members).bit_length() - (HEAD_START if isinstance(group.last, Nest) else 0)
                 for number, group in groups.items()}
        ready = [(first[n], n) for n, count in waiting.items() if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            _, number = heapq.heappop(ready)
            order.append(groups[number])
            for user in users.get(number, ()):
                waiting[user] -= 1
                if not waiting[user]:
                    heapq.heappush(ready, (first[user], user))
        assert len(order) == len(groups), "groups depend on each other in a circle"
        return order

    def _step(self, group: Group, dropped: set[str]) -> Nest | Extern:
        if not group.united:
            return group.last
        escaping = {name for name in group.writes if self._escapes(name, group)}
        phases = arrange(group.statements, group.inner, escaping, self.program.buffers)
        kept = {store.buffer for phase in phases for store in phase.stores}
        dropped.update(name for name in group.writes if name not in kept)
        nest = Nest(group.last.name, tuple([Axis(n, e) for n, e in group.rows.items()]), phases, tuple(dict.fromkeys(group.origin)))
        return simplify_nest(nest) if has_indices_to_simplify(nest) else nest

    def _escapes(self, name: str, group: Group) -> bool:
        return name in self.outputs or any(not group.members >> reader & 1 for reader in self.readers.get(name, ()))


def _bits(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def group(program: Program, fuel: Fuel, rewritten: set[str]) -> Program:
    """`rewritten`: the buffers that `inline.written_again` found."""
    return Grouper(program, fuel, rewritten).run()
