"""Which nests become one, when one cannot simply be put into the other.

In: a Program after inlining, and some fuel.  Out: a Program whose nests are groups of the former ones.

A `Group` is a set of nests that share parallel axes.  It is *soft* while it is pointwise: any of its axes may still be moved from the
nest into its phases.  A group with a reduction is *hard*: its parallel axes are those of the reduction.

Numbered rules of what may be one group (`unite`)
 1. There is a one-to-one match of axes with equal extents, under which all parallel axes of the one are axes of the other.  An axis
    may be split for that: rows n < 8*i of the one are rows (i, j) of the other.
 2. What one writes and the other reads is read at the same point of the common parallel axes.
 3. No third step is on a path between the two; so the steps can still be put in an order (ancestors are bitsets).
 4. Neither writes what the other one writes, or what an earlier one reads.
 5. Scans and stores that add are left alone.
 6. On the CPU, a result that an input receives (`Program.into`) comes after the input's earlier readers, and those of its own group read
    the input at the place where it is written: so the plan can give it the input's memory.
Whether it is worth it: they have a producer and its reader among them, or read one large buffer at the same place; the axes moved
inwards must include the one along which memory is contiguous; the parallel axes that are left must keep the cores busy.

    nest sum [i]  a = sum(r: x[i, r])  s[i] = acc(a)         nest [i]  sweep r: a = sum(x[i, r])
    nest div [i, j]  y[i, j] = x[i, j] / s[i]         ->               sweep r: y[i, r] = x[i, r] / acc(a)
"""
from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from firesteel.loops import access, cost
from firesteel.loops.inline import Fuel
from firesteel.loops.ir import CHECKING, Axis, Buffer, Nest, Program, ProgramStep, Reduce, Store
from firesteel.loops.match import Group, Match, Renaming, group_of, joined_by, matched, unused
from firesteel.loops.phases import Statement, arrange
from firesteel.loops.plan import may_fail
from firesteel.loops.scalars import ITEMSIZE
from firesteel.loops.simplify import has_indices_to_simplify, simplify_nest
from firesteel.operators import collective
from firesteel.targets import CPU

CHECK = torch.ops.aten._assert_scalar.default
MOST_STATEMENTS = 96
MOST_BUFFERS = 48
HEAD_START = 24         # steps by which a kernel may overtake library calls
EARLY_BYTES = 1 << 16   # what such a kernel may write, if it does not read more that is temporary
NEAR = 8                # steps by which a kernel may move forward to one that reads the same: its results are held for as long
SHORT_RUN = 16          # elements in a row that fill a vector
MUCH = 8                # times the work of another group
RECENT_READERS = 3      # how many groups that read the same buffer are tried


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


def _breaks_rows(group: Group, other: Group, buffers: dict[str, Buffer]) -> bool:
    """Does it write memory in short runs now, its axis split to fit a much smaller group?  Lanes of a CPU along so few elements stand idle."""
    if group.work < MUCH * other.work:
        return False
    parts = [part for store in group.writes.values() for stride, part in zip(buffers[store.buffer].strides, store.index)
             if part.op != "axis" and type(stride) is int and stride == 1 and buffers[store.buffer].device == CPU]
    runs = [joined_by(part, {**group.rows, **group.inner}) for part in parts]
    return any(type(run) is int and run < SHORT_RUN for run in runs)


def _run_across(first: Group, second: Group, match: Match, buffers: dict[str, Buffer]) -> bool:
    """Are both large reductions, of which one runs through memory along another axis than the other?  The lanes of one nest suit only one of them."""
    if first.soft or second.soft or min(first.work, second.work) < cost.SMALL * MUCH:
        return False
    ours, theirs = _run_of(first, buffers), _run_of(second, buffers)
    return ours is not None and theirs is not None and match.names.get(theirs) != ours


def _run_of(group: Group, buffers: dict[str, Buffer]) -> str | None:
    """The axis along which it reads its largest buffer in a row."""
    name = max(group.reads, key=lambda name: cost.elements(buffers[name]), default=None)
    if name is None or buffers[name].device != CPU:
        return None
    parts = [part for load in group.reads[name] for part, stride in zip(access.load_index(load), buffers[name].strides) if stride == 1]
    return parts[0].attr if parts and parts[0].op == "axis" and len(set(parts)) == 1 else None


def _worth(first: Group, second: Group, match: Match, buffers: dict[str, Buffer]) -> bool:
    if _breaks_rows(first, second, buffers) or _breaks_rows(second, first, buffers) or _run_across(first, second, match, buffers):
        return False
    back = {ours: theirs for theirs, ours in match.names.items()}
    theirs = {back[name] for name in match.rows}
    if first.soft and not _contiguous_inside(first, _inner_of(first, set(match.rows)), buffers):
        return False
    if second.soft and not _contiguous_inside(second, _inner_of(second, theirs), buffers):
        return False
    moved = len(match.rows) < len(first.rows) or len(match.rows) < len(second.rows)
    if moved and not cost.enough_rows([Axis(n, e) for n, e in match.rows.items()], max(first.work, second.work)):
        return False
    buffers_used = len(first.reads) + len(first.writes) + len(second.reads) + len(second.writes)
    if len(first.statements) + len(second.statements) > MOST_STATEMENTS or buffers_used > MOST_BUFFERS:
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
            names[name] = unused(name, taken)
        taken.add(names[name])
    change = Renaming(names, _fresh_accumulators(first, second))
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


# ---------------------------------------------------------------- the walk over the program

class Grouper:
    """Processes the steps in order; each tries to join the groups of its producers, then groups that read what it reads."""

    def __init__(self, program: Program, fuel: Fuel, rewritten: set[str]):
        self.program, self.fuel, self.rewritten = program, fuel, rewritten
        self.outputs = access.output_buffers(program)
        self.into = {b: x for b, x in program.into if b != x and program.buffers[x].device == CPU}
        self.group_at: list[Group] = []             # step -> its group
        self.before: dict[int, int] = {}            # group number -> bits of all steps it depends on
        self.direct: dict[int, set[int]] = {}       # group number -> steps it depends on directly
        self.writer: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        self.bound_at: dict[str, int] = {}              # unbacked symbol -> the step that binds it
        self.last_in_order: int | None = None       # the last step that draws random numbers or starts a collective
        self.failing: list[int] = []                # steps that may raise
        self.dead = 0                               # bits of the steps whose results nobody reads

    def run(self) -> Program:
        for number, step in enumerate(self.program.steps):
            self._enter(number, step)
            if not self.group_at[number].frozen:
                self._join(number)
        return self._program()

    def _enter(self, number: int, step: ProgramStep) -> None:
        """The step as a group of its own, with what it depends on (also: later writers of what others read or wrote)."""
        group, writes = group_of(number, step), step.writes()
        if not self.rewritten.isdisjoint(writes):
            group.frozen = True
        reads = group.reads if not group.frozen else step.reads()
        direct = {self.writer[name] for name in reads if name in self.writer}
        if self.bound_at:
            used = [name for name in access.step_symbols(step, self.program.buffers) if name in self.bound_at]
            direct.update(self.bound_at[name] for name in used)
            if step.call and step.call.target is CHECK:       # nobody relies on a condition before it is checked
                binders = {self.bound_at[name] for name in used}
                self.bound_at.update(dict.fromkeys(used, number))
                self.writer.update({name: number for name, writer in self.writer.items() if writer in binders})
        if step.call and keeps_order(step.call.target):       # each draw mutates a generator, which is no buffer; ranks meet in one order
            direct.update(() if self.last_in_order is None else (self.last_in_order,))
            self.last_in_order = number
        self.bound_at.update(dict.fromkeys(step.bound_symbols(self.program.buffers), number))
        if any(self.program.buffers[name].kind == "input" for name in writes if name in self.program.buffers):
            direct.update(self.failing)     # after an error inputs are as they were, for eager to run the program again
        if may_fail(step):
            self.failing.append(number)
        for name in writes:
            if name in self.rewritten:
                direct.update(n for n in (self.writer.get(name), *self.readers.get(name, ())) if n is not None)
            if name in self.into:
                direct.update((*self.readers.get(self.into[name], ()), *self.failing))
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
            recent.update(dict.fromkeys(self.group_at[r].number for r in self.readers[name][-RECENT_READERS - 1:-1] if number - r <= NEAR))
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
        first, second, match = matched(first, second)
        if match is None or not self._in_place(first, second, match) or not _worth(first, second, match, self.program.buffers):
            return
        if self.fuel.take(lambda: f"{first} with {second}"):
            unite(first, second, match)
            self._merge(first, second)

    def _in_place(self, first: Group, second: Group, match: Match) -> bool:
        """Rule 6."""
        if not self.into:
            return True
        change = Renaming(match.names)
        stores = [*first.writes.values(), *map(change.store, second.writes.values())]
        given = {self.into[store.buffer]: store.index for store in stores if store.buffer in self.into}
        loads = [load for name in given for load in (*first.reads.get(name, ()), *map(change.expr, second.reads.get(name, ())))]
        return all(access.load_index(load) == given[load.attr] for load in loads)

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
        self._find_dead(order)
        steps = [self._step(group, dropped) for group in order if not group.members & self.dead]
        dropped.update(name for group in order if group.members & self.dead for name in group.writes)
        buffers = {name: buffer for name, buffer in self.program.buffers.items() if name not in dropped}
        return replace(self.program, buffers=buffers, steps=tuple(steps))

    def _order(self) -> list[Group]:
        """Groups so that each comes after what it depends on; otherwise by their first member, kernels a little earlier than library
        calls, so that more of them stand in a row and are one launch."""
        groups = {group.number: group for group in self.group_at}
        waiting: dict[int, int] = {}
        users: dict[int, list[int]] = {}
        for number in groups:
            needs = {self.group_at[d].number for d in self.direct[number]}
            waiting[number] = len(needs)
            for need in needs:
                users.setdefault(need, []).append(number)
        first = {number: (group.members & -group.members).bit_length() - (0 if self._takes_memory(group) else HEAD_START)
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

    def _takes_memory(self, group: Group) -> bool:
        """Is it a library call, or a kernel that would hold much memory longer if it ran early?"""
        call = group.last.call
        if group.last.nest is None:         # what runs meanwhile comes after the start of a collective
            return call is None or collective(call.target) != "start" and not call.is_number(self.program.buffers)
        written = sum(self._bytes(name) for name in group.writes)
        return written > EARLY_BYTES and written > sum(self._bytes(name) for name in group.reads if self.program.buffers[name].kind == "temp")

    def _bytes(self, name: str) -> int:
        buffer = self.program.buffers[name]
        return cost.elements(buffer) * ITEMSIZE[buffer.dtype]

    def _step(self, group: Group, dropped: set[str]) -> ProgramStep:
        if not group.united:
            return group.last
        escaping = {name for name in group.writes if self._escapes(name, group)} or set(group.writes)
        phases = arrange(group.statements, group.inner, escaping, self.program.buffers)
        kept = {store.buffer for phase in phases for store in phase.stores}
        dropped.update(name for name in group.writes if name not in kept)
        nest = Nest(group.last.name, tuple([Axis(n, e) for n, e in group.rows.items()]), phases, tuple(dict.fromkeys(group.origin)))
        return simplify_nest(nest) if has_indices_to_simplify(nest) else nest

    def _find_dead(self, order: list[Group]) -> None:
        """Groups that nobody reads, last first: where indices were simplified, loads have vanished (a triangle above all rows is 0).
        One that checks indices stays: eager raises whether or not the result is read."""
        for group in reversed(order):
            if not group.frozen and not any(self._escapes(name, group) for name in group.writes) and not _checks(group):
                self.dead |= group.members

    def _escapes(self, name: str, group: Group) -> bool:
        inside = group.members | self.dead
        return name in self.outputs or any(not inside >> reader & 1 for reader in self.readers.get(name, ()))


@functools.cache
def keeps_order(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags or collective(target) == "start"


def _checks(group: Group) -> bool:
    return any(expr.holds & CHECKING for s in group.statements for expr in s.exprs())


def _bits(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def group(program: Program, fuel: Fuel, rewritten: set[str]) -> Program:
    """`rewritten`: the buffers that `inline.written_again` found."""
    return Grouper(program, fuel, rewritten).run()
