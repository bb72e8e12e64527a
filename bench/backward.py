"""Compiled autograd on the reference programs: what a captured backward costs beside the plain compiled one, and what its capture costs.

    python bench/backward.py [--programs gpt mlp]

For each program, in one process and alternating call by call (medians): the training step with eager forward and backward, with the
compiled forward and its own compiled backward, and the same under fs.compiled_autograd, where the backward is a cache hit.  Then, in ms, a
captured backward without its code generation (capture of the engine's nodes, of the graph, joint trace), and the joint
trace and partition of the plain compiled training step: the first of the process, and the best of the following, each after fs.reset().
The cache on disk is switched off: a program that is found there is not traced.
"""
from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from programs import PROGRAMS, step

import firesteel as fs

REPEAT = 15
FRESH = 6       # captures and joint traces
TRACE = ("joint", "trace_forward", "trace_backward", "partition", "clean")


def timed(fn) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def stages(before: dict, *names: str) -> float:
    after = fs.stage_times()
    return sum(after.get(name, 0.0) - before.get(name, 0.0) for name in names) * 1e3


def measure(name: str) -> str:
    program = PROGRAMS[name]()
    compiled = fs.compile(program.fn)

    def eager() -> None:
        step(program.fn, program, True)

    def plain() -> None:
        step(compiled, program, True)

    def captured() -> None:
        with fs.compiled_autograd():
            step(compiled, program, True)
    joints, captures = zip(*(compiling(plain, captured) for _ in range(FRESH)))
    rows: dict = {eager: [], plain: [], captured: []}
    for fn in rows:
        fn()
    for _ in range(REPEAT):
        for fn, times in rows.items():
            times.append(timed(fn))
    e, p, c = (statistics.median(times) * 1e3 for times in rows.values())
    return f"{name:10} step {e:8.2f} / {p:8.2f} / {c:8.2f} ms (captured / plain {c / p:.3f})   " \
        f"capture {captures[0]:6.1f}, then {min(captures[1:]):6.1f} ms; joint trace {joints[0]:6.1f}, then {min(joints[1:]):6.1f} ms"


def compiling(plain: Callable[[], None], captured: Callable[[], None]) -> tuple[float, float]:
    """(joint trace, capture) of a process that has compiled nothing of it."""
    fs.reset()
    before = fs.stage_times()
    plain()
    joint = stages(before, *TRACE)
    before = fs.stage_times()
    captured()
    return joint, stages(before, "capture", "describe", *TRACE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS))
    torch.manual_seed(0)
    fs.config.cache_dir = ""
    print("program    eager / compiled / compiled with a captured backward")
    for name in parser.parse_args().programs:
        print(measure(name), flush=True)


if __name__ == "__main__":
    main()
