"""Processor time of windows, resampling and running sums, eager's kernels against compiled ones, on one thread.

    OMP_NUM_THREADS=1 python bench/windows.py --match "avg.*" --seconds 0.05

A row an operator: microseconds of a call in inference, and of a forward and its backward. Both are measured in turns, the least of a few times is shown.
"""
from __future__ import annotations

import argparse
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from functions import least

import firesteel as fs

Shape = tuple[int, ...]
CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Shape]] = {
    "avg_pool2d 5, 1, 2": (lambda x: F.avg_pool2d(x, 5, 1, 2), (2, 8, 48, 48)),
    "avg_pool2d 3, 2, 1": (lambda x: F.avg_pool2d(x, 3, 2, 1), (4, 16, 64, 64)),
    "avg_pool2d 11, 1, 5": (lambda x: F.avg_pool2d(x, 11, 1, 5), (2, 8, 48, 48)),
    "avg_pool1d 25, 1, 12": (lambda x: F.avg_pool1d(x, 25, 1, 12), (8, 16, 512)),
    "avg_pool3d 3, 2, 1": (lambda x: F.avg_pool3d(x, 3, 2, 1), (2, 8, 16, 32, 32)),
    "max_pool2d 3, 2, 1": (lambda x: F.max_pool2d(x, 3, 2, 1), (4, 16, 64, 64)),
    "adaptive_avg_pool2d 7": (lambda x: F.adaptive_avg_pool2d(x, 7), (8, 64, 28, 28)),
    "adaptive_avg_pool2d 5": (lambda x: F.adaptive_avg_pool2d(x, 5), (8, 64, 28, 28)),
    "adaptive_max_pool2d 7": (lambda x: F.adaptive_max_pool2d(x, 7), (8, 64, 28, 28)),
    "nearest x 2": (lambda x: F.interpolate(x, scale_factor=2), (4, 16, 40, 40)),
    "bilinear x 2": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (4, 16, 40, 40)),
    "bilinear to 65 x 71": (lambda x: F.interpolate(x, size=(65, 71), mode="bilinear"), (4, 16, 40, 40)),
    "bicubic x 2": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (4, 16, 40, 40)),
    "trilinear x 2": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (2, 8, 12, 12, 12)),
    "unfold 3": (lambda x: F.unfold(x, 3, padding=1), (2, 16, 40, 40)),
    "fold 3": (lambda x: F.fold(x, (40, 40), 3, padding=1), (2, 144, 1600)),
    "pixel_shuffle 2": (lambda x: F.pixel_shuffle(x, 2) + 1, (4, 64, 32, 32)),
    "reflected by 2": (lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect") * 2, (8, 16, 60, 60)),
    "cumsum * 2": (lambda x: x.cumsum(-1) * 2, (512, 512)),
    "cumprod": (lambda x: x.cumprod(-1), (512, 512)),
}


def steps(function: Callable[[torch.Tensor], torch.Tensor], shape: Shape, train: bool) -> tuple[Callable, Callable]:
    """A call of eager's and of the compiled function, with the backward where `train` says so."""
    x = torch.randn(shape, requires_grad=train)
    grad = torch.randn_like(function(x)) if train else None
    fs.reset()

    def step(one: Callable) -> Callable:
        return (lambda: torch.autograd.grad(one(x), x, grad)) if train else (lambda: one(x))
    return step(function), step(fs.compile(lambda given: function(given)))


def measured(function: Callable[[torch.Tensor], torch.Tensor], shape: Shape, train: bool, seconds: float) -> str:
    eager, ours = steps(function, shape, train)
    ours()
    rounds = [(least(eager, seconds), least(ours, seconds)) for _ in range(5)]
    first, second = (min(column) for column in zip(*rounds))
    return f"{first:8.0f} / {second:6.0f} ({first / second:5.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default=".*", help="operators whose whole name matches")
    parser.add_argument("--seconds", type=float, default=0.03, help="of each of five turns")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'operator':24s} {'inference: eager / ours us':28s} with the backward")
    for name, (function, shape) in CASES.items():
        if re.fullmatch(options.match, name):
            print(f"{name:24s} {measured(function, shape, False, options.seconds):28s} {measured(function, shape, True, options.seconds)}", flush=True)


if __name__ == "__main__":
    main()
