"""What symbols cost: the reference programs compiled with dynamic=True against static sizes.

    python bench/dynamic.py [--programs gpt,mlp] [--rounds 40]

For each program: the processor time of both versions on one thread, calls interleaved so that a noisy machine slows both alike (medians
and their ratio); and that of capturing and tracing, forward and backward, interleaved too.  Aims: steady at most 1.10, tracing of gpt at most 1.5.
"""
from __future__ import annotations

import argparse
import statistics
import time

import programs
import torch

import firesteel as fs

# tracing costs the same for all sizes; running the traced graph, which is taken off, does not
SMALL: dict[str, dict[str, int]] = {"pointwise": {"rows": 8, "columns": 16}, "mlp": {"batch": 2, "width": 16}, "resnet": {"batch": 2, "size": 16},
                                    "gpt": {"batch": 2, "length": 8, "width": 32, "vocabulary": 20}, "lstm": {"batch": 2, "inside": 8, "hidden": 12}}


def steady(name: str, train: bool, rounds: int) -> tuple[float, float]:
    """Median seconds a step, static and dynamic, alternating."""
    program = programs.PROGRAMS[name]()
    versions = [fs.compile(program.fn, dynamic=dynamic) for dynamic in (False, True)]
    times: list[list[float]] = [[], []]
    for fn in versions:
        for _ in range(3):
            programs.step(fn, program, train)
    for _ in range(rounds):
        for fn, taken in zip(versions, times):
            start = time.process_time()
            programs.step(fn, program, train)
            taken.append(time.process_time() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def tracing(name: str, dynamic: bool) -> float:
    """Processor seconds of capture, tracing and partition of one training step; kernels are not compiled."""
    fs.reset()
    program = programs.PROGRAMS[name](**SMALL[name])
    fn = fs.compile(program.fn, dynamic=dynamic, backend="aot_eager_partitioned")
    start = time.process_time()
    fn(*program.inputs)
    return time.process_time() - start - eager_seconds(program)


def eager_seconds(program: programs.Program) -> float:
    """What running the traced graph by PyTorch costs, about."""
    start = time.process_time()
    program.fn(*program.inputs)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=",".join(programs.PROGRAMS))
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'program':12}{'mode':8}{'static ms':>11}{'dynamic ms':>12}{'ratio':>8}")
    for name in options.programs.split(","):
        for train in (False, True):
            fs.reset()
            static, dynamic = steady(name, train, options.rounds)
            print(f"{name:12}{'train' if train else 'infer':8}{static * 1e3:11.3f}{dynamic * 1e3:12.3f}{dynamic / static:8.2f}", flush=True)
    for name in options.programs.split(","):
        tracing(name, False)
        rounds = [(tracing(name, False), tracing(name, True)) for _ in range(5)]
        static, dynamic = (min(times) for times in zip(*rounds))
        print(f"{name:12}{'trace':8}{static * 1e3:11.1f}{dynamic * 1e3:12.1f}{dynamic / static:8.2f}", flush=True)


if __name__ == "__main__":
    main()
