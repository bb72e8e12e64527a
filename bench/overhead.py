"""What a call of compiled code costs beside its kernels: microseconds a call, against torch.compile and eager.

Two programs: `a + b` on four elements, and a 12-layer transformer in inference at a tiny size, whose graph is the same for both.  Each
measurement is a fresh process; the number is the median over rounds of the process's CPU time a call.  "guards" and "run" are
ours taken apart: the guard function alone, and the run function on what it read.

    python bench/overhead.py                 # all, as a table
    python bench/overhead.py add firesteel   # one, as JSON
"""
from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import firesteel as fs

WHO = ("eager", "torch", "firesteel")


class Block(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, w = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, w))
        return x + self.mlp(self.norm2(x))


def add() -> tuple[Callable, tuple]:
    return (lambda a, b: a + b), (torch.randn(4), torch.randn(4))


def transformer() -> tuple[Callable, tuple]:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(16, 2) for _ in range(12)]).eval(), (torch.randn(1, 4, 16),)


PROGRAMS = {"add": add, "transformer": transformer}
COMPILERS = {"eager": lambda fn: fn, "torch": lambda fn: torch.compile(fn), "firesteel": lambda fn: fs.compile(fn)}


def per_call(fn: Callable, args: tuple, rounds: int = 25, seconds: float = 0.02) -> float:
    """Median CPU microseconds a call."""
    begun = time.process_time()
    fn(*args)
    calls = max(5, int(seconds / max(time.process_time() - begun, 1e-6)))
    times = []
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(calls):
            fn(*args)
        times.append((time.process_time() - begun) / calls)
    return statistics.median(times) * 1e6


def measure(program: str, who: str) -> dict[str, float]:
    torch.set_num_threads(1)
    fn, args = PROGRAMS[program]()
    compiled = COMPILERS[who](fn)
    with torch.no_grad():
        for _ in range(5):
            compiled(*args)
        result = {"total": per_call(compiled, args)}
        if who == "firesteel":
            result |= apart(compiled, fn, args)
    return result


def apart(compiled: Callable, fn: Callable, args: tuple) -> dict[str, float]:
    """Our call taken apart: guards, run."""
    root = getattr(compiled, "_firesteel_call", compiled).__firesteel_root__
    (entry,) = [entry for region in root.all_regions() for entry in region.entries]
    inputs = (fn, *args) if isinstance(fn, nn.Module) else args
    values = entry.check(*inputs)
    return {"guards": per_call(entry.check, inputs), "run": per_call(entry.run, values)}


def in_fresh_process(program: str, who: str) -> dict[str, float]:
    out = subprocess.run([sys.executable, __file__, program, who], capture_output=True, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(measure(*sys.argv[1:])))
        return
    for program in PROGRAMS:
        for who in WHO:
            found = in_fresh_process(program, who)
            print(f"{program:12} {who:10}", "  ".join(f"{name} {value:8.1f} us" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
