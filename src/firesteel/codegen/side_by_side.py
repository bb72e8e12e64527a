"""Kernels that do not wait for each other, as one launch: a row of GpuKernels -> fewer GpuKernels.

In: a Plan and the kernels of its nests.  Out: those kernels, some of them replaced by joint ones, each under the name of its first nest.  A small
kernel takes a GPU two microseconds, most of which it waits; three products of one vector take as long together as one of them.  A joint kernel's
programs are those of its members, one member's after the other's; a member is a function of its own program's number.

What always holds
 1. Members stand in one row of launches (nothing but kernels between them, `host.rows_of`), and no member reads or writes bytes that another one
    writes.  One that is moved to an earlier launch is moved across none that it shares written bytes with.
 2. Members are small, of known size, one function each and without scratch memory.

    side_by_side(plan, kernels)
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import field

from firesteel.codegen import host
from firesteel.codegen.triton import PROGRAMS, TITLE, GpuKernel, Pass
from firesteel.loops.ir import Nest
from firesteel.loops.plan import Alloc, Plan, numbytes
from firesteel.records import dataclass

MOST_BYTES = 16 << 20       # that a member reads and writes: a larger one keeps the machine busy by itself
MOST_MEMBERS = 24


@dataclass
class _Launch:
    """Kernels that are launched together, and the memory that they read and write."""
    kernels: list[GpuKernel]
    reads: set[str]
    writes: set[str] = field(default_factory=set)
    small: bool = True

    def waits_for(self, other: _Launch) -> bool:
        return not self.writes.isdisjoint(other.reads | other.writes) or not self.reads.isdisjoint(other.writes)


def side_by_side(plan: Plan, kernels: Sequence[GpuKernel]) -> list[GpuKernel]:
    """The kernels of a plan, in the order of their launches."""
    by_name = {kernel.name: kernel for kernel in kernels}
    owners = _owners(plan)
    launches = [launch for row in host.rows_of(plan) for launch in _launches(row, by_name, plan, owners)]
    return [joint(launch.kernels) if len(launch.kernels) > 1 else launch.kernels[0] for launch in launches]


def _owners(plan: Plan) -> dict[str, str]:
    """Buffer -> the one whose memory it took over."""
    owners: dict[str, str] = {}
    for step in plan.steps:
        if isinstance(step, Alloc) and step.reuse is not None:
            owners[step.buffer] = owners.get(step.reuse, step.reuse)
    return owners


def _launches(row: Iterable[Nest], kernels: dict[str, GpuKernel], plan: Plan, owners: dict[str, str]) -> list[_Launch]:
    launches: list[_Launch] = []
    for nest in row:
        kernel, buffers = kernels[nest.name], plan.program.buffers
        sizes = [numbytes(buffers[name]) for name in kernel.buffers]
        small = len(kernel.passes) == 1 and not kernel.symbols and not kernel.scratch and all(isinstance(size, int) for size in sizes) \
            and sum(sizes) <= MOST_BYTES
        reads, writes = ({owners.get(name, name) for name in names} for names in (nest.reads(), nest.writes()))
        new = _Launch([kernel], reads, writes, small)
        place = _place(launches, new) if small else None
        if place is None:
            launches.append(new)
        else:
            place.kernels.append(kernel)
            place.reads |= reads
            place.writes |= writes
    return launches


def _place(launches: Sequence[_Launch], new: _Launch) -> _Launch | None:
    """The earliest launch that a kernel may be part of."""
    found = None
    for launch in reversed(launches):
        if new.waits_for(launch):
            break
        if launch.small and len(launch.kernels) < MOST_MEMBERS:
            found = launch
    return found


def joint(members: Sequence[GpuKernel]) -> GpuKernel:
    """One kernel that does what these do."""
    names = list(dict.fromkeys(name for kernel in members for name in kernel.buffers))
    kinds = {name: kind for kernel in members for name, kind in zip(kernel.buffers, kernel.signature)}
    signature = (*(kinds[name] for name in names), "*i64")
    parts = {kernel.symbol: kernel for kernel in members}
    numbers = {symbol: number for number, symbol in enumerate(parts)}
    head = ", ".join([*(f"p{k}" for k in range(len(names))), "error"])
    body, first, end = ["pid = tl.program_id(0)"], 0, len(members) - 1
    for number, kernel in enumerate(members):
        arguments = ", ".join([f"pid - {first}", *(f"p{names.index(name)}" for name in kernel.buffers), "error"])
        test = "if" if number == 0 else "elif"
        first += programs_of(kernel)
        body += [f"{test} pid < {first}:" if number < end else "else:", f"    KERNEL_part_{numbers[kernel.symbol]}({arguments})"]
    warps = max(kernel.passes[0].warps for kernel in members) if first < PROGRAMS else max(members, key=programs_of).passes[0].warps
    whole = "\n    ".join([f"def KERNEL_0({head}):    # {warps} warps", *body])
    text = "\n\n\n".join([*(_part(number, kernel) for number, kernel in enumerate(parts.values())), whole]) + "\n"
    symbol = "k_" + hashlib.sha256(repr((text, signature)).encode()).hexdigest()[:24]
    title = "_and_".join(dict.fromkeys(kernel.title for kernel in members))[:TITLE]
    return GpuKernel(members[0].name, symbol, text.replace("KERNEL", symbol), (Pass(f"{symbol}_0", first, warps),), signature, tuple(names), (), (),
                     any(kernel.can_fail for kernel in members), title)


def programs_of(kernel: GpuKernel) -> int:
    """How many there are, of a kernel of known size."""
    programs = kernel.passes[0].programs
    assert isinstance(programs, int), programs
    return programs


def _part(number: int, kernel: GpuKernel) -> str:
    """A kernel as a function of the number of its program."""
    text = kernel.text.rstrip().replace(f"def {kernel.passes[0].function}(", f"@jit\ndef KERNEL_part_{number}(program, ")
    return text.replace("tl.program_id(0)", "program")
