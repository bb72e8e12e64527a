"""When memory is taken, used and given back: Program -> Plan.

In: a Program in execution order.  Out: a Plan, a flat list of steps over its Buffers:

    Alloc b            b becomes memory: a tensor of its own, a place in the arena, or the memory of a dead buffer
    Run step           a Nest or an Extern; results of an Extern that does not write into `out` need no Alloc.  A Nest without points does nothing
    Free b             nobody reads b any more
    Return outputs

What always holds
 1. A buffer is allocated before its first writer runs, and freed right after its last user; inputs and constants are neither, but for the inputs of a
    boxed program, which are freed.
 2. Outputs, and buffers that outputs are views of, have tensors of their own and are never freed.
 3. Two buffers share bytes only if the first is freed before the second is allocated, or if the second is written by the last reader of
    the first, each element by the point that reads it (`may_overwrite`); then the Alloc is also the end of the first.
 4. Small temporaries of the CPU that only Nests touch are placed in the arena: one allocation a call, places aligned to 64 bytes.  What a
    library call touches, and what is so large that the arena would hold it for too long, is a tensor.  A tensor is taken over by a later
    buffer of the very same layout, unless a call may have returned an alias of it.  A large one waits for that only while no other memory
    is taken, so that waiting never adds to the peak.
 5. Symbolic sizes: a place in the arena is used again only by a buffer whose size is the same Expr.

    alloc t0 at 0
    run mul_1
    alloc y
    run relu_2
    free t0
    return y
"""
from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from firesteel.loops import access
from firesteel.loops.ir import CHECKING, Buffer, Extern, Nest, Program, ProgramStep, View, all_loads, axes_of, idle_axes, names_by_data
from firesteel.loops.scalars import ITEMSIZE
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size
from firesteel.sym.poly import Poly, poly
from firesteel.targets import CPU, has_arena

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Alloc:
    """`at`: byte offset in the arena (None: a tensor).  `reuse`: the buffer whose memory this becomes: a freed tensor, or one that the next
    step overwrites while it reads it."""
    buffer: str
    at: Size | None = None
    reuse: str | None = None

    def __str__(self) -> str:
        place = f" at {self.at}" if self.at is not None else ""
        return f"alloc {self.buffer}{place}{f' reusing {self.reuse}' if self.reuse else ''}"


@dataclass(frozen=True, slots=True)
class Run:
    step: ProgramStep

    def __str__(self) -> str:
        return f"run {self.step.name}"


@dataclass(frozen=True, slots=True)
class Free:
    buffer: str

    def __str__(self) -> str:
        return f"free {self.buffer}"


@dataclass(frozen=True, slots=True)
class Return:
    outputs: tuple[Any, ...]

    def __str__(self) -> str:
        return f"return {', '.join(o.buffer if isinstance(o, View) else str(o) for o in self.outputs)}"


PlanStep = Alloc | Run | Free | Return


@dataclass(frozen=True, slots=True)
class Plan:
    """`arena` is the number of bytes that all arena places need, `zone` how many of them are kept free on both sides of each place."""
    program: Program
    steps: tuple[PlanStep, ...]
    arena: Size
    zone: int = 0

    def __str__(self) -> str:
        head = [f"arena {self.arena} bytes"] if self.arena != 0 else []
        return "\n".join([*head, *map(str, self.steps)])


def plan(program: Program, zone: int = 0) -> Plan:
    """Alloc, Run, Free and Return for the steps of the program, memory used again where it is dead.  `zone`: bytes between the places of
    the arena (a multiple of ALIGNMENT), which nothing may write."""
    return _Planner(program, zone).run()


def extent(buffer: Buffer) -> Size:
    """Elements from the first to behind the last of the buffer; 0 if it has none."""
    last: Size = 1
    for size, stride in zip(buffer.shape, buffer.strides):
        if isinstance(size, int) and size == 0:
            return 0
        last = last + (size - 1) * stride
    return last


def numbytes(buffer: Buffer) -> Size:
    return extent(buffer) * ITEMSIZE[buffer.dtype]


# ---------------------------------------------------------------- the arena

class _Arena:
    """Hands out byte ranges.  Ranges of known size: best fit, neighbours merge when freed.  Symbolic sizes: a range is
    used again for the same size only; they are laid out behind the known part."""

    def __init__(self) -> None:
        self.known = 0                              # bytes of the known part
        self.holes: list[tuple[int, int]] = []      # (start, bytes), sorted, never adjacent
        self.symbolic: list[Size] = []              # sizes of the symbolic places, in order
        self.idle: dict[Size, list[int]] = {}       # size -> numbers of free symbolic places

    def take(self, size: Size) -> tuple[str, int, Size]:
        if not isinstance(size, int):
            return self._take_symbolic(size)
        size = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
        fits = [hole for hole in self.holes if hole[1] >= size]
        if fits:
            start, room = min(fits, key=lambda hole: (hole[1], hole[0]))
            self.holes.remove((start, room))
            if room > size:
                bisect.insort(self.holes, (start + size, room - size))
            return "known", start, size
        return self._grow(size)

    def _grow(self, size: int) -> tuple[str, int, Size]:
        """New bytes at the end, a hole that ends there included."""
        start = self.known
        if self.holes and sum(self.holes[-1]) == self.known:
            start = self.holes.pop()[0]
        self.known = start + size
        return "known", start, size

    def _take_symbolic(self, size: Size) -> tuple[str, int, Size]:
        if numbers := self.idle.get(size):
            return "symbolic", numbers.pop(), size
        self.symbolic.append(size)
        return "symbolic", len(self.symbolic) - 1, size

    def give(self, place: tuple[str, int, Size]) -> None:
        kind, where, size = place
        if kind == "symbolic":
            self.idle.setdefault(size, []).append(where)
            return
        at = bisect.bisect(self.holes, (where, 0))
        if at < len(self.holes) and self.holes[at][0] == where + size:
            size += self.holes.pop(at)[1]
        if at and sum(self.holes[at - 1]) == where:
            at -= 1
            where, before = self.holes.pop(at)
            size += before
        self.holes.insert(at, (where, size))        # type: ignore[arg-type]  # only symbolic places have Exprs as sizes

    def offsets(self) -> list[Size]:
        """Byte offset of each symbolic place, and of the end."""
        result: list[Size] = [self.known]
        for size in self.symbolic:
            result.append(result[-1] + (size + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT)
        return result


# ---------------------------------------------------------------- liveness

LARGE = 1 << 16     # bytes: beyond that an allocation costs nothing beside the kernel that fills it, and dead memory is not kept for later
# these never return an alias of an argument
_PURE_CALLS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_convolution_pointwise", "_linear_pointwise")


def _target_name(extern: Extern) -> str:
    packet = getattr(extern.target, "overloadpacket", None)
    return getattr(packet, "__name__", "") if packet is not None else ""


def may_overwrite(nest: Nest, new: Buffer, old: Buffer) -> bool:
    """May `new`, which the nest writes, have the memory of `old`, which it reads and which is as large?  Each element must be read before it
    is written: by the same point of the same phase (a CPU's kernels compute all values of a phase at a point before they store them; others store one
    after the other), or by an earlier phase for the same row."""
    found = [(number, phase, store) for number, phase in enumerate(nest.phases) for store in phase.stores if store.buffer == new.name]
    if len(found) != 1:
        return False
    number, phase, store = found[0]
    if store.mode != "set" or phase.kind == "scan" or names_by_data(store.index) or idle_axes(store.index, (*nest.axes, *phase.axes)):
        return False
    behind = [s.value for s in phase.stores[phase.stores.index(store) + 1:]] if old.device != CPU else []
    late = [*behind, *(e for later in nest.phases[number + 1:] for e in later.exprs())]
    before = (e for earlier in nest.phases[:number] for e in earlier.exprs())
    place = _address(store.index, new)
    return not _indices(late, old) and all(_address(index, old) == place for index in _indices(phase.exprs(), old)) and all(
        _same_row(nest, index, store.index) and old.shape == new.shape and old.strides == new.strides for index in _indices(before, old))


def _indices(exprs: Iterable[Expr], buffer: Buffer) -> list[tuple[Expr, ...]]:
    """Where they load the buffer."""
    return [access.load_index(load) for load in all_loads(exprs) if load.attr == buffer.name]


def _address(index: tuple[Expr, ...], buffer: Buffer) -> Poly:
    total: Size = 0
    for part, stride in zip(index, buffer.strides):
        total = total + part * stride
    return poly(total)


def _same_row(nest: Nest, index: tuple[Expr, ...], written: tuple[Expr, ...]) -> bool:
    """Are only elements loaded that the same point of the parallel axes writes?"""
    rows = {axis.name for axis in nest.axes if axis.extent != 1}
    parts = [(part, own) for part, own in zip(index, written) if not rows.isdisjoint(axes_of(part, own))]
    return all(part is own and own.op == "axis" for part, own in parts) and rows == {own.attr for _, own in parts}


class _Planner:
    """Walks the steps once; a builder."""

    def __init__(self, program: Program, zone: int):
        self.program, self.buffers, self.zone = program, program.buffers, zone
        self.pinned = access.output_buffers(program)
        self.uses = [(step, step.reads(), step.writes()) for step in program.steps]
        self.arena = _Arena()
        self.places: dict[str, tuple[str, int, Size]] = {}
        self.dead: dict[tuple, list[str]] = {}      # layout -> freed tensors that are small
        self.waiting: dict[tuple, list[str]] = {}   # the same for large ones, freed since memory was last taken
        self.steps: list[PlanStep] = []
        self.last: dict[str, int] = {}
        self.tensors: set[str] = set(self.pinned)   # buffers that must be tensors
        self.lent: set[str] = set()                 # tensors that a call may have returned an alias of
        self.made: set[str] = set()
        self.overwritten: set[str] = set()          # buffers whose memory their last reader takes over
        self.into = dict(program.into)
        self.sure = max([number for number, step in enumerate(program.steps) if may_fail(step)], default=-1)
        self._scan()

    def _scan(self) -> None:
        for number, (step, reads, writes) in enumerate(self.uses):
            for name in (*reads, *writes):
                self.last[name] = number
            if step.call:
                self.tensors.update(reads, writes)
                if _target_name(step.call) not in _PURE_CALLS:
                    self.lent.update(reads, writes)
        bound = {name for step, _, _ in self.uses for name in step.bound_symbols(self.buffers)}
        for name, buffer in self.buffers.items():
            if bound and not bound.isdisjoint(access.symbols((*buffer.shape, *buffer.strides))):
                self.tensors.add(name)      # the arena is made before its size is known
            if buffer.kind not in ("temp", "output") or not has_arena(buffer.device) or is_large(buffer):
                self.tensors.add(name)

    def run(self) -> Plan:
        for number, (step, reads, writes) in enumerate(self.uses):
            for name in writes:
                self._allocate(name, number)
            if (running := _without_empty(step)) is not None:
                self.steps.append(Run(running))
            for name in dict.fromkeys((*reads, *writes)):
                if self.last[name] == number and name not in self.overwritten:
                    self._free(name)
        self.steps.append(Return(self.program.outputs))
        offsets = self.arena.offsets()
        return Plan(self.program, tuple(self._placed(step, offsets) for step in self.steps), offsets[-1], self.zone)

    def _owned(self, name: str) -> bool:
        return name in self.buffers and self.buffers[name].kind in ("temp", "output")

    def _allocate(self, name: str, number: int) -> None:
        if name in self.made or not self._owned(name):
            return
        self.made.add(name)
        step = self.uses[number][0]
        if step.makes(name):
            self.waiting.clear()
            return      # the call makes the tensor
        if (given := self._written_input(name, number)) is not None:
            self.tensors.add(name)
            self.steps.append(Alloc(name, reuse=given))
            return
        old = self._overwritable(name, number)
        if old is not None:
            self.overwritten.add(old)
            if old in self.places:
                self.places[name] = self.places[old]
            else:
                self.tensors.add(name)
            self.steps.append(Alloc(name, reuse=old))
        elif name not in self.tensors:
            self.places[name] = self.arena.take(numbytes(self.buffers[name]) + 2 * self.zone)
            self.steps.append(Alloc(name))
        else:
            dead = self._dead(name) if name not in self.pinned else None
            if not dead:
                self.waiting.clear()
            self.steps.append(Alloc(name, reuse=dead.pop() if dead else None))

    def _written_input(self, name: str, number: int) -> str | None:
        """The input that this result is written to, where nobody reads its old value later on.  Where a step fails, eager runs the program on its
        inputs again, which must be as they were."""
        given, nest = self.into.get(name), self.uses[number][0].nest
        if given is None or nest is None or self.last.get(given, -1) > number or number <= self.sure:
            return None
        read = self.last.get(given, -1) == number
        return given if not read or may_overwrite(nest, self.buffers[name], self.buffers[given]) else None

    def _dead(self, name: str) -> list[str]:
        """The freed tensors of this layout."""
        buffer = self.buffers[name]
        return (self.dead if _is_small(buffer) else self.waiting).setdefault(_layout(buffer), [])

    def _overwritable(self, name: str, number: int) -> str | None:
        """A buffer that this step is the last to read, and whose memory it can write this one to."""
        step, reads, writes = self.uses[number]
        if step.nest is None or name in self.pinned:
            return None
        new = self.buffers[name]
        for old in reads:
            if self.last[old] == number and self._replaceable(old) and old not in writes and (old in self.tensors or name not in self.tensors) \
                    and self._worth_it(old, new) and may_overwrite(step.nest, new, self.buffers[old]):
                return old
        return None

    def _worth_it(self, old: str, new: Buffer) -> bool:
        """Is it as large?  A small tensor of another shape would cost a view at each call, where a freed one of its own shape costs nothing."""
        before = self.buffers[old]
        as_large = (before.dtype, before.device, numbytes(before)) == (new.dtype, new.device, numbytes(new))
        return as_large and (old in self.places or not _is_small(new) or _layout(before) == _layout(new))

    def _replaceable(self, name: str) -> bool:
        return self._owned(name) and name not in self.pinned and name not in self.lent and name not in self.overwritten

    def _free(self, name: str) -> None:
        if name in self.pinned or not self._owned(name):
            if self.program.boxed and name in self.buffers and name not in self.pinned and self.buffers[name].kind == "input":
                self.steps.append(Free(name))
            return
        self.steps.append(Free(name))
        if name in self.places:
            self.arena.give(self.places[name])
        elif name not in self.lent:
            self._dead(name).append(name)

    def _placed(self, step: PlanStep, offsets: list[Size]) -> PlanStep:
        """The Alloc with its byte offset, known only when all places are."""
        if not isinstance(step, Alloc) or step.buffer not in self.places:
            return step
        kind, where, _ = self.places[step.buffer]
        return Alloc(step.buffer, (where if kind == "known" else offsets[where]) + self.zone, step.reuse)


def may_fail(step: ProgramStep) -> bool:
    """May it raise at run time, though the inputs have the sizes that guards ask for?"""
    if step.call:
        return _target_name(step.call) not in (*_PURE_CALLS, "_local_scalar_dense", "_scaled_dot_product_flash_attention_for_cpu")
    return step.nest is not None and any(expr.holds & CHECKING for expr in step.nest.exprs())


def _layout(buffer: Buffer) -> tuple:
    return buffer.dtype, buffer.shape, buffer.strides, buffer.device


def _without_empty(step: ProgramStep) -> ProgramStep | None:
    """The step without stores along an axis of extent 0, or None where nothing is left: printers need not care for the strides of empty buffers,
    which may be 0 along other axes."""
    if step.nest is None:
        return step
    phases = [replace(phase, stores=()) if _is_empty((*step.nest.axes, *phase.axes)) else phase for phase in step.nest.phases]
    left = tuple(phase for phase in phases if phase.reduces or phase.stores)
    if not any(phase.stores for phase in left):
        return None
    return step if left == step.nest.phases else step.map(lambda nest: replace(nest, phases=left))


def _is_empty(axes: Iterable[Any]) -> bool:
    return any(isinstance(axis.extent, int) and axis.extent == 0 for axis in axes)


def _is_small(buffer: Buffer) -> bool:
    size = numbytes(buffer)
    return isinstance(size, int) and size <= LARGE


def is_large(buffer: Buffer) -> bool:
    size = numbytes(buffer)
    return isinstance(size, int) and size > LARGE
