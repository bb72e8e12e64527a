"""Generated CPU kernels against eager, and what it costs to compile them.

    python bench/kernel_times.py [--threads N]

A row a kernel: milliseconds of processor time to print, compile and load it, microseconds of ours and of eager (best of
many), and the ratio.  The nests are what fusion makes of the expression in the last column.
"""
from __future__ import annotations

import argparse
import ctypes
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "codegen"))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from native_nests import Runner, contiguous, layernorm, pointwise, reduction, softmax  # noqa: E402

from firesteel.codegen.llvm import print_nest  # noqa: E402
from firesteel.config import config  # noqa: E402
from firesteel.loops.scalars import S  # noqa: E402
from firesteel.runtime import cpu  # noqa: E402


def gelu(v):
    return S.mul(S.mul(v, 0.5), S.add(S.erf(S.mul(v, 0.7071067811865476)), 1.0))


def chain(v, w):
    return S.mul(S.tanh(S.add(S.mul(v, 2.0), w)), S.sub(v, 1.0))


def silu_chain(v):
    return S.add(S.mul(v, S.sigmoid(v)), S.mul(S.exp(S.neg(S.abs(v))), 0.5))


def cases():
    """name -> (nest and buffers, tensors, eager)"""
    x, y, w = torch.randn(1000, 1000), torch.empty(1000, 1000), torch.randn(1000)
    big, small = contiguous("x", (1000, 1000)), torch.empty(1000)
    rows, out, g = torch.randn(512, 1024), torch.empty(512, 1024), torch.randn(1024)
    return {
        "add": (pointwise(lambda v: S.add(v, 1.0), contiguous("y", (1000, 1000)), big), {"x": x, "y": y}, lambda: x + 1.0),
        "chain": (pointwise(chain, contiguous("y", (1000, 1000)), big, contiguous("w", (1000,))), {"x": x, "y": y, "w": w},
                  lambda: torch.tanh(x * 2 + w) * (x - 1)),
        "silu+exp": (pointwise(silu_chain, contiguous("y", (1000, 1000)), big), {"x": x, "y": y}, lambda: F.silu(x) + torch.exp(-x.abs()) * 0.5),
        "gelu": (pointwise(gelu, contiguous("y", (1000, 1000)), big), {"x": x, "y": y}, lambda: F.gelu(x)),
        "softmax": (softmax(512, 1024), {"x": rows, "y": out}, lambda: torch.softmax(rows, 1)),
        "layernorm": (layernorm(512, 1024), {"x": rows, "y": out, "g": g}, lambda: F.layer_norm(rows, (1024,), g)),
        "column sum": (reduction("sum", big, (0,)), {"x": x, "y": small}, lambda: x.sum(0)),
        "row sum": (reduction("sum", big, (1,)), {"x": x, "y": small}, lambda: x.sum(1)),
        "full sum of squares": (reduction("sum", big, (0, 1), lambda v: S.mul(v, v)), {"x": x, "y": small}, lambda: (x * x).sum()),
        "column max": (reduction("max", big, (0,)), {"x": x, "y": small}, lambda: x.amax(0)),
        "transpose": (pointwise(lambda v: S.mul(v, 2.0), contiguous("y", (1000, 1000)), _transposed(big)), {"x": x, "y": y},
                      lambda: (x.t() * 2.0).contiguous()),
    }


def _transposed(b):
    return type(b)(b.name, b.dtype, b.shape[::-1], b.strides[::-1])


def best(fn, seconds: float = 0.3) -> float:
    fn()
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 20 or time.perf_counter() < end:
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def cost(fn) -> tuple[float, object]:
    start = time.process_time()
    result = fn()
    return (time.process_time() - start) * 1e3, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    config.cache_dir = ""
    cpu.jit()
    print(f"{'kernel':22} {'print ms':>9} {'compile ms':>11} {'ours us':>9} {'eager us':>9} {'ratio':>6}")
    for name, (nest, tensors, eager) in cases().items():
        printing, kernel = cost(lambda: print_nest(*nest))
        compiling, _ = cost(lambda: cpu.load([kernel]))
        runner = Runner(*nest)
        words, _error = runner.arguments(tensors)
        place = ctypes.addressof(words)
        ours, theirs = best(lambda: runner.function(place)), best(eager)
        print(f"{name:22} {printing:9.2f} {compiling:11.2f} {ours:9.1f} {theirs:9.1f} {theirs / ours:6.2f}")


if __name__ == "__main__":
    main()
