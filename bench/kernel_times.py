"""Typical fusions with eager, torch.compile and firesteel, each in a fresh process.

    python bench/kernel_times.py [--only softmax,rotary] [--impl eager,torch,firesteel] [--seconds 0.3] [--threads 1]

A row a fusion: milliseconds of processor time of the first call, microseconds of processor time of the later ones (the lower quartile; the
processes take turns, a short window each), and ours against eager's and the peer's: above 1 is faster.  A result that differs
from eager's is marked.  Rows marked with ' are a forward and its backward.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

R, IMPLS = torch.randn, ("eager", "torch", "firesteel")


# ---------------------------------------------------------------- the fusions

def rms_norm(x, g):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * g


def rotary(q, cos, sin):
    left, right = q.chunk(2, -1)
    return q * cos + torch.cat((-right, left), -1) * sin


def masked_scores(q, k, mask):
    return torch.softmax((q @ k.transpose(-1, -2) / 8).masked_fill(mask, -math.inf), -1)


def gru_cell(x, h, w, u):
    (a, b, c), (d, e, f) = (x @ w).chunk(3, -1), (h @ u).chunk(3, -1)
    reset, update = torch.sigmoid(a + d), torch.sigmoid(b + e)
    new = torch.tanh(c + reset * f)
    return new + update * (h - new)


def distances(a, b):
    return (a[:, None] - b[None]).pow(2).sum(-1).add(1e-6).sqrt()


def bf16_chain(x, w):
    return (F.gelu(x * 2 + 1) * torch.sigmoid(w)).relu() + x


def best_rows(x, values):
    return values.gather(0, x.argmax(-1)[:, None].expand(-1, values.shape[1]))


def bias_dropout(x, bias):
    return F.dropout(F.gelu(x + bias), 0.1)


def smooth(logits, labels):
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def wavelet(x):
    a, b, c, d = x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]
    return torch.cat([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d], 1) / 2


def rotated(q, v):
    twice = torch.linalg.cross(q[:, :3], v) * 2
    return v + q[:, 3:] * twice + torch.linalg.cross(q[:, :3], twice)


def cases() -> dict[str, tuple[Callable, Callable[[], tuple], bool]]:
    """name -> (function, inputs, with its backward?)"""
    square, rows = (lambda: (R(1000, 1000),)), (lambda: (R(512, 1024),))
    heads = lambda: (R(8, 64, 64), R(8, 64, 64), torch.ones(64, 64, dtype=torch.bool).triu(1))     # noqa: E731
    return {
        "add": (lambda x: x + 1.0, square, False),
        "tanh chain": (lambda x, w: torch.tanh(x * 2 + w) * (x - 1), lambda: (R(1000, 1000), R(1000)), False),
        "silu and exp": (lambda x: F.silu(x) + torch.exp(-x.abs()) * 0.5, square, False),
        "gelu": (F.gelu, square, False),
        "softmax": (lambda x: torch.softmax(x, 1), rows, False),
        "softmax of columns": (lambda x: torch.softmax(x, 0), rows, False),
        "log softmax'": (lambda x: F.log_softmax(x * 0.5, 1), rows, True),
        "layer norm": (lambda x, g, b: F.layer_norm(x, (1024,), g, b), lambda: (R(512, 1024), R(1024), R(1024)), False),
        "layer norm'": (lambda x, g, b: F.layer_norm(x, (1024,), g, b), lambda: (R(512, 1024), R(1024), R(1024)), True),
        "rms norm'": (rms_norm, lambda: (R(512, 1024), R(1024)), True),
        "group norm and silu'": (lambda x, g, b: F.silu(F.group_norm(x, 8, g, b)), lambda: (R(4, 32, 32, 32), R(32), R(32)), True),
        "bias, gelu, dropout'": (bias_dropout, lambda: (R(512, 1024), R(1024)), True),
        "rotary": (rotary, lambda: (R(8, 128, 8, 64), R(128, 1, 64), R(128, 1, 64)), False),
        "cross entropy'": (smooth, lambda: (R(256, 2000), torch.randint(0, 2000, (256,))), True),
        "masked scores": (masked_scores, heads, False),
        "column sum": (lambda x: x.sum(0), square, False),
        "row sum": (lambda x: x.sum(1), square, False),
        "sum of squares": (lambda x: (x * x).sum(), square, False),
        "column max": (lambda x: x.amax(0), square, False),
        "variance over the first axis": (lambda x: x.var(0), square, False),
        "cumulative sum": (lambda x: (x * 2).cumsum(1).relu(), rows, False),
        "argmax and gather": (best_rows, lambda: (R(512, 1024), R(1024, 64)), False),
        "transpose": (lambda x: (x.t() * 2.0).contiguous(), square, False),
        "two layouts": (lambda x, y: torch.relu(x + y.t()) * 2, lambda: (R(1000, 1000), R(1000, 1000)), False),
        "bf16 chain": (bf16_chain, lambda: (R(1000, 1000).bfloat16(), R(1000).bfloat16()), False),
        "interpolation": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear") * 2, lambda: (R(2, 16, 64, 64),), False),
        "embedding and scale": (lambda w, i: w[i] * 8 + 1, lambda: (R(5000, 256), torch.randint(0, 5000, (1024,))), False),
        "pairwise distances'": (distances, lambda: (R(128, 16), R(128, 16)), True),
        "small products": (lambda a, b: torch.relu(a @ b), lambda: (R(256, 16, 16), R(256, 16, 16)), False),
        "GRU cell": (gru_cell, lambda: (R(64, 128), R(64, 128), R(128, 384), R(128, 384)), False),
        "scatter and add": (lambda x, i, s: torch.relu(x.index_add(0, i, s * 2)),
                            lambda: (R(1000, 256), torch.randint(0, 1000, (2000,)), R(2000, 256)), False),
        "tiny products": (lambda a, b: torch.tanh(a @ b), lambda: (R(4096, 4, 4), R(4096, 4, 4)), False),
        "products over leading axes": (lambda a, b: torch.einsum("bixy,ioxy->boxy", a * 2, b), lambda: (R(4, 16, 8, 8), R(16, 16, 8, 8)), False),
        "flipped rows": (lambda x: torch.log1p(x.abs()).flip(-1), square, False),
        "rolled differences": (lambda x: torch.roll(x, 1, 1) + torch.roll(x, -1, 1) - 2 * x, square, False),
        "reflected padding": (lambda x: torch.tanh(F.pad(x, (3, 3, 3, 3), mode="reflect")), lambda: (R(4, 16, 64, 64),), False),
        "parts one behind the other": (lambda a, b: torch.cat([a.sin(), b.exp()]) * 2, lambda: (R(256, 1024), R(256, 1024)), False),
        "wavelet": (wavelet, lambda: (R(4, 3, 96, 96),), False),
        "three in turns": (lambda a, b, c: torch.stack([a + 1, b * 2, c], -1), lambda: (R(512, 400), R(512, 400), R(512, 400)), False),
        "vectors rotated": (rotated, lambda: (R(8192, 4), R(8192, 3)), False),
        "pixels out of channels": (lambda x: F.pixel_shuffle(x, 2) + 1, lambda: (R(4, 64, 32, 32),), False),
        "average pooling'": (lambda x: F.avg_pool2d(x, 5, 1, 2) * 2, lambda: (R(2, 8, 48, 48),), True),
        "remainders": (lambda x, y: torch.remainder(x, y) + 1, lambda: (R(256, 256), R(256, 256)), False),
        "bytes to pixels": (lambda x: (x.view(-1, 64, 64, 3).permute(0, 3, 1, 2) / 255 - 0.45) / 0.22,
                            lambda: (torch.randint(0, 256, (16, 3, 64, 64), dtype=torch.uint8),), False),
    }


# ---------------------------------------------------------------- in the fresh process

def compiler(impl: str) -> Callable[[Callable], Callable]:
    if impl == "firesteel":
        import firesteel as fs
        return fs.compile
    return torch.compile if impl == "torch" else lambda fn: fn


def step_of(impl: str, name: str) -> Callable[[], torch.Tensor]:
    fn, inputs, train = cases()[name]
    torch.manual_seed(0)
    args = inputs()
    compiled = compiler(impl)(fn)
    if not train:
        return lambda: compiled(*args)
    leaves = [x.requires_grad_() for x in args if x.is_floating_point()]

    def both() -> torch.Tensor:
        result = compiled(*args)
        return torch.autograd.grad(result.sum() if result.dim() else result, leaves)[0]
    return both


def serve(impl: str) -> None:
    """Answers "name seconds" with one line each."""
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    for line in sys.stdin:
        name, seconds = json.loads(line)
        answer: dict[str, object] = {}
        if name not in steps:
            step, start = step_of(impl, name), time.process_time()
            torch.manual_seed(1)
            result = step()
            answer = {"first": (time.process_time() - start) * 1e3, "values": result.double().flatten()[::997].tolist()}
            steps[name] = step
        times, end = [], time.process_time() + seconds
        while len(times) < 5 or time.process_time() < end:
            start = time.process_time()
            steps[name]()
            times.append((time.process_time() - start) * 1e6)
        print(json.dumps({**answer, "times": times}), flush=True)


# ---------------------------------------------------------------- around it

class Live:
    """A process of one implementation, with caches of its own."""

    def __init__(self, impl: str, threads: int, cache: str):
        env = {**os.environ, "FIRESTEEL_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen([sys.executable, str(pathlib.Path(__file__).resolve()), "--serve", impl], env=env, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, name: str, seconds: float) -> dict:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, seconds]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def measure(name: str, lives: dict[str, Live], seconds: float) -> dict[str, dict]:
    rows = {impl: live.ask(name, seconds / 3) for impl, live in lives.items()}
    for _ in range(2):
        for impl, live in lives.items():
            rows[impl]["times"] += live.ask(name, seconds / 3)["times"]
    for row in rows.values():
        times = sorted(row["times"])
        row["us"] = times[len(times) // 4]
    return rows


def shown(name: str, rows: dict[str, dict]) -> str:
    ours = rows.get("firesteel", {}).get("us", math.nan)
    cells = "".join(f"{rows[impl]['first']:9.0f} {rows[impl]['us']:9.1f}" if impl in rows else " " * 19 for impl in IMPLS)
    ratios = "".join(f"{rows[impl]['us'] / ours:7.2f}" if impl in rows else " " * 7 for impl in ("eager", "torch"))
    wanted, got = (torch.tensor(rows.get(impl, {}).get("values", [])) for impl in ("eager", "firesteel"))
    same = len(wanted) != len(got) or torch.allclose(wanted, got, rtol=2e-2, atol=5e-2 if "bf16" in name else 1e-3, equal_nan=True)
    return f"{name:30}{cells}{ratios}{'' if same else '   differs'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of fusions, or parts of them, with commas between")
    parser.add_argument("--impl", default=",".join(IMPLS))
    parser.add_argument("--seconds", type=float, default=0.3, help="of each fusion and implementation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--serve", default="")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    names = [name for name in cases() if not options.only or any(part in name for part in options.only.split(","))]
    print(f"{'':30}" + "".join(f"{impl + ' ms':>9} {'us':>9}" for impl in ("eager", "peer", "ours")) + f"{'/eager':>7}{'/peer':>7}")
    logs: dict[str, list[float]] = {impl: [] for impl in ("eager", "torch")}
    with tempfile.TemporaryDirectory() as folder:
        lives = {impl: Live(impl, options.threads, folder) for impl in options.impl.split(",")}
        for name in names:
            rows = measure(name, lives, options.seconds)
            print(shown(name, rows), flush=True)
            for impl in set(logs) & set(rows) if "firesteel" in rows else ():
                logs[impl].append(math.log(rows[impl]["us"] / rows["firesteel"]["us"]))
        for live in lives.values():
            live.process.stdin.close()          # type: ignore[union-attr]
            live.process.wait()
    for impl, values in logs.items():
        if values:
            print(f"geometric mean of {len(values)}: {math.exp(sum(values) / len(values)):.2f} times the speed of {impl}")


if __name__ == "__main__":
    main()
