"""Inference with frozen parameters: each program in eval mode, as it is, compiled, compiled with fs.config.freeze, and, with --peer, by torch.compile
with and without its freezing.

    python bench/freeze.py [--programs resnet,bert] [--threads 1] [--rounds 40] [--peer]

All ways of a program take turns in one process, some hundredths of a second each; the figure is the lower quartile of all turns' processor time a call
(of wall-clock time where there are several threads).  Read the ratios of one row.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import more_programs
import programs
import torch

import firesteel as fs

NAMES = "resnet,mobilenet,unet,convnext,mlp,bert,vit,gpt"
TURN = 0.03         # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=NAMES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--peer", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.threads == 1 else time.perf_counter
    for name in given.programs.split(","):
        program = (programs.PROGRAMS | more_programs.MORE)[name]()
        program.fn.eval()
        ways = ways_of(program.fn, given.peer)
        with torch.no_grad():
            found = in_turns({way: lambda fn=fn: fn(*program.inputs) for way, fn in ways.items()}, given.rounds, clock)
        print(f"{name}: " + ", ".join(f"{way} {seconds * 1e6:.0f} us" for way, seconds in found.items()), flush=True)


def ways_of(model: torch.nn.Module, peer: bool) -> dict[str, Callable]:
    ways: dict[str, Callable] = {"eager": model, "firesteel": fs.compile(model, options={"freeze": False}, isolate_recompiles=True),
                                 "frozen": fs.compile(model, options={"freeze": True}, isolate_recompiles=True)}
    if peer:
        ways |= {"torch.compile": torch.compile(model), "torch.compile, freezing": torch.compile(model, options={"freezing": True})}
    return ways


def in_turns(calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    times: dict[str, list[float]] = {way: [] for way in calls}
    for call in calls.values():
        call()
        call()
    for _ in range(rounds):
        for way, call in calls.items():
            start, count = clock(), 0
            while clock() - start < TURN:
                call()
                count += 1
            times[way].append((clock() - start) / count)
    return {way: sorted(found)[len(found) // 4] for way, found in times.items()}


if __name__ == "__main__":
    main()
