"""When memory is taken, used and given back: Program -> Plan.

In: a Program in execution order.  Out: a Plan, a flat list of steps over its Buffers:

    Alloc b            b becomes memory: a tensor of its own, a place in the arena, or the memory of a dead buffer
    Run step           a Nest or an Extern; results of an Extern that does not write into `out` need no Alloc
    Free b             nobody reads b any more
    Return outputs

What always holds
 1. A buffer is allocated before its first writer runs, and freed right after its last user; inputs and constants are neither.
 2. Outputs, and buffers that outputs are views of, have tensors of their own and are never freed.
 3. Two buffers share bytes only if the first is freed before the second is allocated.
 4. Temporaries of the CPU that only Nests touch lie in the arena: one allocation a call, places aligned to 64 bytes.  What a
    library call touches is a tensor; such a tensor is taken over by a later buffer of the very same layout, unless a call may
    have returned an alias of it.
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
from dataclasses import dataclass
from typing import Any

from firesteel.loops import access
from firesteel.loops.ir import Buffer, Extern, Nest, Program, View
from firesteel.loops.ops import ITEMSIZE
from firesteel.sym.expr import Size

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Alloc:
    """`at`: byte offset in the arena (None: a tensor).  `reuse`: the freed buffer whose tensor this becomes."""
    buffer: str
    at: Size | None = None
    reuse: str | None = None

    def __str__(self) -> str:
        place = f" at {self.at}" if self.at is not None else f" reusing {self.reuse}" if self.reuse else ""
        return f"alloc {self.buffer}{place}"


@dataclass(frozen=True, slots=True)
class Run:
    step: Nest | Extern

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
    """`arena` is the number of bytes that all arena places need."""
    program: Program
    steps: tuple[PlanStep, ...]
    arena: Size

    def __str__(self) -> str:
        head = [f"arena {self.arena} bytes"] if self.arena != 0 else []
        return "\n".join([*head, *map(str, self.steps)])


def plan(program: Program) -> Plan:
    """Alloc, Run, Free and Return for the steps of the program, memory used again where it is dead."""
    return _Planner(program).run()


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

_PURE_CALLS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")  # never return an alias of an argument


def _target_name(extern: Extern) -> str:
    packet = getattr(extern.target, "overloadpacket", None)
    return getattr(packet, "__name__", "") if packet is not None else ""


class _Planner:
    """Walks the steps once; a builder."""

    def __init__(self, program: Program):
        self.program, self.buffers = program, program.buffers
        self.pinned = access.output_buffers(program)
        self.uses = [(step, access.reads(step), access.writes(step)) for step in program.steps]
        self.arena = _Arena()
        self.places: dict[str, tuple[str, int, Size]] = {}
        self.dead: dict[tuple, list[str]] = {}      # layout -> freed tensors
        self.steps: list[PlanStep] = []
        self.last: dict[str, int] = {}
        self.tensors: set[str] = set(self.pinned)   # buffers that must be tensors
        self.lent: set[str] = set()                 # tensors that a call may have returned an alias of
        self.made: set[str] = set()
        self._scan()

    def _scan(self) -> None:
        for number, (step, reads, writes) in enumerate(self.uses):
            for name in (*reads, *writes):
                self.last[name] = number
            if isinstance(step, Extern):
                self.tensors.update(reads, writes)
                if _target_name(step) not in _PURE_CALLS:
                    self.lent.update(reads, writes)
        told = {name for step, _, _ in self.uses for name in access.bound_symbols(step, self.buffers)}
        for name, buffer in self.buffers.items():
            if told and not told.isdisjoint(access.symbols((*buffer.shape, *buffer.strides))):
                self.tensors.add(name)      # the arena is made before its size is known
            if buffer.kind not in ("temp", "output") or buffer.device != "cpu":
                self.tensors.add(name)

    def run(self) -> Plan:
        for number, (step, reads, writes) in enumerate(self.uses):
            for name in writes:
                self._allocate(name, step)
            self.steps.append(Run(step))
            for name in dict.fromkeys((*reads, *writes)):
                if self.last[name] == number:
                    self._free(name)
        self.steps.append(Return(self.program.outputs))
        offsets = self.arena.offsets()
        return Plan(self.program, tuple(self._placed(step, offsets) for step in self.steps), offsets[-1])

    def _owned(self, name: str) -> bool:
        return name in self.buffers and self.buffers[name].kind in ("temp", "output")

    def _allocate(self, name: str, step: Nest | Extern) -> None:
        if name in self.made or not self._owned(name):
            return
        self.made.add(name)
        if isinstance(step, Extern) and not step.out and name in step.outputs:
            return      # the call makes the tensor
        buffer = self.buffers[name]
        if name not in self.tensors:
            self.places[name] = self.arena.take(numbytes(buffer))
            self.steps.append(Alloc(name))
            return
        dead = self.dead.get(_layout(buffer)) if name not in self.pinned else None
        self.steps.append(Alloc(name, reuse=dead.pop() if dead else None))

    def _free(self, name: str) -> None:
        if name in self.pinned or not self._owned(name):
            return
        self.steps.append(Free(name))
        if name in self.places:
            self.arena.give(self.places[name])
        elif name not in self.lent:
            self.dead.setdefault(_layout(self.buffers[name]), []).append(name)

    def _placed(self, step: PlanStep, offsets: list[Size]) -> PlanStep:
        """The Alloc with its byte offset, known only when all places are."""
        if not isinstance(step, Alloc) or step.buffer not in self.places:
            return step
        kind, where, _ = self.places[step.buffer]
        return Alloc(step.buffer, where if kind == "known" else offsets[where])


def _layout(buffer: Buffer) -> tuple:
    return buffer.dtype, buffer.shape, buffer.strides, buffer.device
