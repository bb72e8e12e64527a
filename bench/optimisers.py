"""Steps of torch.optim's optimisers, compiled, beside eager and torch.compile: microseconds of processor time of a step.

    python bench/optimisers.py [--only SGD,Adam] [--forms plain,foreach,fused] [--peer] [--layers 8] [--width 256] [--seconds 0.5]

Each optimiser steps `layers` matrices of width x width and as many vectors; eager, ours and, with --peer, torch.compile take turns in one process, a
short window each, after twelve steps (RAdam changes its rule at the sixth); the figure is the lower quartile.  `graphs` and `breaks` are those of ours
over all steps, `kernels` those of the graphs; `late` is how many graphs were compiled behind the twelfth step, which should be none.
"""
from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch

import firesteel as fs

ROWS: dict[str, tuple[str, dict]] = {
    "SGD": ("SGD", {}), "SGD momentum": ("SGD", {"momentum": 0.9}), "SGD nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": ("Adam", {}), "AdamW": ("AdamW", {}), "AdamW amsgrad": ("AdamW", {"amsgrad": True}), "Adagrad": ("Adagrad", {}), "Adadelta": ("Adadelta", {}),
    "Adamax": ("Adamax", {}), "Adafactor": ("Adafactor", {}), "ASGD": ("ASGD", {}), "NAdam": ("NAdam", {}), "RAdam": ("RAdam", {}),
    "RMSprop": ("RMSprop", {"momentum": 0.9}), "Rprop": ("Rprop", {})}
FORMS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
WARM, WINDOW = 12, 0.1


def optimiser(row: str, form: str, layers: int, width: int) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    name, settings = ROWS[row]
    made = [torch.nn.Parameter(torch.randn(shape)) for _ in range(layers) for shape in ((width, width), (width,))]
    for p in made:
        p.grad = torch.randn_like(p)
    return getattr(torch.optim, name)(made, lr=1e-3, **settings, **FORMS[form])


def times(step: Callable[[], object], seconds: float) -> list[float]:
    found, end = [], time.process_time() + seconds
    while len(found) < 5 or time.process_time() < end:
        start = time.process_time()
        step()
        found.append((time.process_time() - start) * 1e6)
    return found


def measure(row: str, form: str, options: argparse.Namespace) -> tuple[str, dict[str, float]]:
    compilers = {"eager": lambda fn: fn, **({"peer": torch.compile} if options.peer else {}), "ours": fs.compile}
    optimisers = {who: optimiser(row, form, options.layers, options.width) for who in compilers}
    fs.counters.clear()
    steps = {who: compile_(optimisers[who].step) for who, compile_ in compilers.items()}
    for step in steps.values():
        for _ in range(WARM):
            step()
    graphs = fs.counters["stats"]["unique_graphs"]
    found: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(max(3, round(options.seconds / WINDOW))):
        for who, step in steps.items():
            found[who] += times(step, WINDOW)
    spent = {who: statistics.quantiles(some, n=4)[0] for who, some in found.items()}
    late = fs.counters["stats"]["unique_graphs"] - graphs
    breaks = sum(fs.counters["graph_break"].values())
    facts = f"{graphs:7} {breaks:7} {fs.counters['native']['kernels']:8} {late:5}"
    cells = "".join(f"{spent.get(who, math.nan):9.0f}" for who in ("eager", "peer", "ours"))
    ratios = "".join(f"{spent.get(who, math.nan) / spent['ours']:8.2f}" for who in ("eager", "peer"))
    return f"{row:15}{form:8}{cells}{ratios}{facts}", spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(ROWS), help="names of rows, with commas between")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':23}{'eager':>9}{'peer':>9}{'ours':>9}{'/eager':>8}{'/peer':>8}{'graphs':>7}{'breaks':>8}{'kernels':>9}{'late':>6}")
    for row in options.only.split(","):
        for form in options.forms.split(","):
            if form != "fused" or ROWS[row][0] in FUSED:
                print(measure(row, form, options)[0], flush=True)
                fs.reset()


if __name__ == "__main__":
    main()
