"""Trains a small GPT on a text, eagerly and compiled, and shows that both learn the same, and what was compiled.

    python examples/demo.py [--steps 300]
"""
from __future__ import annotations

import argparse
import copy
import pathlib
import statistics
import sys
import tempfile
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import programs  # noqa: E402

import firesteel as fs  # noqa: E402


def batches(text: str, steps: int, batch: int, length: int):
    """Pairs of (ids, next ids), the same in every run."""
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(c) for c in text])
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(ids) - length - 1, (steps, batch), generator=generator)
    for row in starts:
        window = torch.stack([ids[s:s + length + 1] for s in row])
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def train(model, parameters, data) -> tuple[list[float], list[float]]:
    """Losses and seconds of every step."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses, seconds = [], []
    for number, (ids, targets) in enumerate(data):
        if number % 20 == 0:
            print(".", end="", flush=True)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    print()
    return losses, seconds


def program_text(model, ids, targets) -> list[str]:
    """The fused program of one forward, as the compiler prints it."""
    fs.reset()
    with tempfile.TemporaryDirectory() as folder, fs.config.patch(dump_dir=folder):
        fs.compile(model)(ids, targets)
        lines = next(pathlib.Path(folder).rglob("*fuse.loops")).read_text().splitlines()[1:]
        return [line.removeprefix("# ") for line in lines if line.startswith("# ")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()

    text = (ROOT / "examples" / "firesteel.txt").read_text()
    data = list(batches(text, options.steps, options.batch, options.length))
    torch.manual_seed(0)
    model = programs.GPT(vocabulary=len(set(text)), width=128, heads=4, layers=4, context=options.length)
    twin = copy.deepcopy(model)
    count = sum(p.numel() for p in model.parameters())
    print(f"A GPT with {count:,} parameters, {options.steps} steps of {options.batch} x {options.length} letters\n")

    print("training eagerly ", end="", flush=True)
    eager_losses, eager_seconds = train(model, list(model.parameters()), data)
    print("training with firesteel ", end="", flush=True)
    losses, seconds = train(fs.compile(twin), list(twin.parameters()), data)

    print(f"\n{'step':>6} {'loss, eager':>14} {'loss, firesteel':>17}")
    for step in sorted({0, 1, 9, 49, 99, 199, options.steps - 1}):
        if step < options.steps:
            print(f"{step + 1:>6} {eager_losses[step]:>14.6f} {losses[step]:>17.6f}")
    print(f"\n{'':18} {'eager':>10} {'firesteel':>10}")
    print(f"{'first step':18} {eager_seconds[0]:>8.2f} s {seconds[0]:>8.2f} s   (compiling included)")
    print(f"{'later steps':18} {statistics.median(eager_seconds[1:]) * 1e3:>7.1f} ms {statistics.median(seconds[1:]) * 1e3:>7.1f} ms   (median)")

    native = fs.counters["native"]
    print(f"\ncompiled: {fs.counters['stats']['unique_graphs']} graph, {native['kernels']} kernels "
          f"({native['distinct_kernels']} distinct), {native['library_calls']} library calls, {native['fallbacks']} fall-backs")
    for stage, spent in sorted(fs.stage_times().items(), key=lambda row: -row[1])[:8]:
        print(f"  {stage:12} {spent * 1e3:8.1f} ms")

    print("\nthe first kernels of the forward (FIRESTEEL_DUMP_DIR=folder writes every stage of everything):")
    for line in program_text(twin, *data[0])[:14]:
        print(f"  {line if len(line) < 130 else line[:126] + ' ...'}")

    worst = max(abs(a - b) / abs(a) for a, b in zip(eager_losses[:20], losses[:20]))
    print(f"\nlargest relative difference of the loss in the first 20 steps: {worst:.1e}")
    if worst > 1e-3:
        print("the losses differ: this is a bug", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
