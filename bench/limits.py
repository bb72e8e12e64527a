"""How near each kernel of the reference programs comes to what this machine can do.

    OMP_NUM_THREADS=1 python bench/limits.py [--programs gpt,unet] [--modes infer,train] [--worst 10] [--calls] [--show]

Measured first: the speed of a copy, for several sizes (a small one stays in a cache), and the multiply-add peak, by a matrix product.  Then every
step of a program's host function runs with a clock around it.  A row a kernel: microseconds (the least of many calls), bytes of the buffers that it
reads and writes, scalar operations (a transcendental function counts as ten), and the fraction of the limit reached: the time that the machine needs
for the larger of the two, over the time that was taken.  `--calls` shows library calls too, without a fraction; `--show` the loops of the worst.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import more_programs
import programs
import torch

import firesteel as fs
from firesteel.codegen import host
from firesteel.codegen.flat import flatten
from firesteel.codegen.llvm import _work
from firesteel.loops.plan import Run, numbytes

SIZES = [1 << k for k in range(18, 28, 2)]      # bytes of copies; below, the call takes longer than the copy
clock = time.process_time_ns           # of the processor: with one thread, what else runs on the machine does not count


# ---------------------------------------------------------------- the machine

@dataclass
class Machine:
    copies: dict[int, float]        # bytes read and written -> bytes a nanosecond
    operations: float               # multiply-adds count as two; a nanosecond

    def nanoseconds(self, moved: int, operations: int) -> float:
        """The least time for so many bytes and operations."""
        size = min(self.copies, key=lambda known: abs(known - moved))
        return max(moved / self.copies[size], operations / self.operations)


def best(run: Callable[[], Any], seconds: float = 0.1) -> int:
    least, end = 1 << 62, clock() + int(seconds * 1e9)
    while clock() < end:
        start = clock()
        run()
        least = min(least, clock() - start)
    return least


def measure_machine() -> Machine:
    copies = {}
    for size in SIZES:
        a, b = torch.ones(size // 8), torch.empty(size // 8)
        copies[size] = size / max(best(lambda a=a, b=b: b.copy_(a)), 1)
    square, out = torch.randn(768, 768), torch.empty(768, 768)
    return Machine(copies, 2 * 768 ** 3 / best(lambda: torch.mm(square, square, out=out), 0.5))


# ---------------------------------------------------------------- clocks around steps

@dataclass
class Timed:
    """One step of a host function."""
    name: str
    program: str
    moved: int = 0
    operations: int = 0
    text: str = ""
    nanoseconds: list[int] = field(default_factory=list)

    @property
    def least(self) -> int:
        return min(self.nanoseconds)


class Clocks:
    """Has every host function that is built from now on time its steps."""

    def __init__(self) -> None:
        self.steps: list[Timed] = []
        self.program = ""
        write = host._STEP_WRITERS[Run]
        host._STEP_WRITERS.remove(Run)
        host._STEP_WRITERS.add(Run, lambda writer, step: self.write(write, writer, step))

    def write(self, write: Callable, writer: Any, step: Run) -> None:
        timed = self.timed(step, writer.buffers)
        self.steps.append(timed)
        spent = writer._object(timed.nanoseconds.append, "spent")
        writer.scope["clock"] = clock
        writer._flush()
        writer.lines.append("started = clock()")
        write(writer, step)
        writer._flush()
        writer.lines.append(f"{spent}(clock() - started)")

    def timed(self, step: Run, buffers: Any) -> Timed:
        nest = step.step.nest
        if nest is None:
            return Timed(str(step.step)[:110], self.program)
        flat, names = flatten(nest, buffers)
        work = _work(flat)
        return Timed(nest.name, self.program, sum(_bytes(numbytes(buffers[n])) for n in names), work if isinstance(work, int) else 0, str(nest))


def _bytes(size: Any) -> int:
    return size if isinstance(size, int) else 0


def steps_of(clocks: Clocks, name: str, train: bool, seconds: float) -> list[Timed]:
    """The steps of a program, timed."""
    program = (programs.PROGRAMS | more_programs.MORE)[name]()
    clocks.program = f"{name} {'train' if train else 'infer'}"
    first = len(clocks.steps)
    fn = fs.compile(program.fn)
    for _ in range(3):
        programs.step(fn, program, train)
    found = clocks.steps[first:]
    for timed in found:
        timed.nanoseconds.clear()
    end, calls = time.monotonic() + seconds, 0
    while calls < 10 or time.monotonic() < end:
        programs.step(fn, program, train)
        calls += 1
    return [timed for timed in found if timed.nanoseconds]


# ---------------------------------------------------------------- the table

def show(steps: list[Timed], machine: Machine) -> str:
    """A row each, those in front that lose the most time."""
    lines = ["| program | kernel | us | KB | operations | of the limit | lost us |", "|---|---|---|---|---|---|---|"]
    for timed in sorted(steps, key=lambda t: -lost(t, machine)):
        limit = machine.nanoseconds(timed.moved, timed.operations) if timed.text else 0.0
        part = f"{limit / timed.least:.2f}" if timed.text else "-"
        lines.append(f"| {timed.program} | {timed.name} | {timed.least / 1e3:.1f} | {timed.moved / 1024:.0f} | {timed.operations} | {part} | "
                     f"{lost(timed, machine) / 1e3:.1f} |")
    return "\n".join(lines)


def lost(timed: Timed, machine: Machine) -> float:
    return timed.least - machine.nanoseconds(timed.moved, timed.operations)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default=",".join(programs.PROGRAMS | more_programs.MORE))
    parser.add_argument("--modes", default="infer,train")
    parser.add_argument("--seconds", type=float, default=0.5, help="of steady state for each program")
    parser.add_argument("--worst", type=int, default=10, help="how many rows; 0: all")
    parser.add_argument("--calls", action="store_true", help="library calls too")
    parser.add_argument("--show", action="store_true", help="the loops of the rows shown")
    options = parser.parse_args()
    machine = measure_machine()
    print("copy, GB/s: " + ", ".join(f"{size >> 10} KB {speed:.0f}" for size, speed in machine.copies.items()))
    print(f"multiply-add peak: {machine.operations:.0f} G operations/s\n")
    clocks, steps = Clocks(), []
    for name in options.programs.split(","):
        for mode in options.modes.split(","):
            torch.manual_seed(0)
            steps += steps_of(clocks, name, mode == "train", options.seconds)
    kernels = [timed for timed in steps if timed.text or options.calls]
    worst = sorted(kernels, key=lambda t: -lost(t, machine))[:options.worst or None]
    print(show(worst, machine))
    print(f"\n{sum(t.least for t in steps if t.text) / 1e3:.0f} us in {sum(bool(t.text) for t in steps)} kernels, "
          f"{sum(t.least for t in steps if not t.text) / 1e3:.0f} us in {sum(not t.text for t in steps)} library calls")
    if options.show:
        print("\n".join(f"\n{timed.program}, {timed.least / 1e3:.1f} us\n{timed.text}" for timed in worst))
    return 0


if __name__ == "__main__":
    sys.exit(main())
