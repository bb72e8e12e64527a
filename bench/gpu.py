"""Times programs of the size of a GPU's with eager, torch.compile and firesteel, each in fresh processes.

    python bench/gpu.py [--rows softmax_norm,gpt2] [--impl eager,torch,firesteel] [--modes infer,train] [--profile 8] [--jobs 4] [--json OUT]

A row a program and mode: the first call with empty caches, the steady state by a host clock (median), the time that kernels ran in a step
(the profiler's), and for programs that are bound by memory which fraction of the bandwidth of a large copy they reach: the least bytes
that must be read and written, over the kernels' time.  `torch-best` and `firesteel-best` are the compilers in the best of their modes.  `--profile N` prints
the N longest kernels of a step.  `--jobs N` compiles N at the same time and measures one at a time: then first calls are not comparable.
"""
from __future__ import annotations

import concurrent.futures
import fcntl
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from more_programs import unet
from programs import GPT, Program, ResNet, step
from reference import fresh, table_options
from torch import Tensor, nn

IMPLS = ("eager", "torch", "torch-best", "firesteel", "firesteel-best")
BF16 = torch.bfloat16
HEAD, CONTEXT = 64, 1024


# ---------------------------------------------------------------- what memory bounds

def pointwise_sum(x: Tensor, y: Tensor) -> Tensor:
    return (torch.sigmoid(x) * torch.tanh(y) + x * 0.5).sum()


def softmax_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(F.softmax(x, -1), weight.shape, weight, bias)


def column_statistics(x: Tensor) -> Tensor:
    """Columns normalised by their own mean and variance."""
    return (x - x.mean(0)) * torch.rsqrt(x.var(0) + 1e-5)


def of_tensors(fn: Callable, *shapes: tuple[int, ...]) -> Program:
    inputs = tuple(torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes)
    return Program(fn, inputs, list(inputs))


# ---------------------------------------------------------------- networks

def of_module(model: nn.Module, *inputs: Tensor) -> Program:
    model.to("cuda", BF16)
    return Program(model, tuple(x.to("cuda", BF16 if x.is_floating_point() else x.dtype) for x in inputs), list(model.parameters()))


def tokens(vocabulary: int, batch: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, vocabulary, (batch, CONTEXT + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: the two halves of a head turned against each other."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, shared: int, hidden: int):
        super().__init__()
        self.heads, self.shared = heads, shared
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv = nn.Linear(width, heads * HEAD, bias=False), nn.Linear(width, 2 * shared * HEAD, bias=False)
        self.out = nn.Linear(heads * HEAD, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None = None, at: Tensor | None = None,
                seen: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        q = rotated(self.q(y).unflatten(-1, (self.heads, HEAD)).transpose(1, 2), cos, sin)
        k, v = (part.unflatten(-1, (self.shared, HEAD)).transpose(1, 2) for part in self.kv(y).chunk(2, -1))
        k = rotated(k, cos, sin)
        if cache is not None:
            k, v = cache[0].index_copy_(2, at, k), cache[1].index_copy_(2, at, v)
        k, v = (part.repeat_interleave(self.heads // self.shared, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=cache is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """With targets the cross-entropy, with caches the logits of one more token."""

    def __init__(self, vocabulary: int = 32000, width: int = 768, layers: int = 12, heads: int = 12, shared: int = 4, hidden: int = 3072):
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, shared, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        angles = torch.arange(CONTEXT)[:, None] * 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def decode(self, ids: Tensor, at: Tensor, *caches: Tensor) -> Tensor:
        x, cos, sin = self.tokens(ids), self.cos[at], self.sin[at]
        seen = (torch.arange(CONTEXT, device=ids.device) <= at)[None]
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, (caches[2 * number], caches[2 * number + 1]), at, seen)
        return self.head(self.norm(x))


def llama_decode() -> Program:
    program = of_module(Llama(), torch.randint(0, 32000, (4, 1)))
    caches = [torch.zeros(4, 4, CONTEXT, HEAD, device="cuda", dtype=BF16) for _ in range(24)]
    return Program(program.fn.decode, (*program.inputs, torch.tensor([500], device="cuda"), *caches), program.leaves)


@dataclass(frozen=True)
class Row:
    make: Callable[[], Program]
    bytes: int = 0                      # the least that inference must move, where memory bounds it
    modes: tuple[str, ...] = ("infer", "train")


ROWS = {
    "pointwise_sum": Row(lambda: of_tensors(pointwise_sum, (1 << 26,), (1 << 26,)), 2 << 28),
    "softmax_norm": Row(lambda: of_tensors(softmax_norm, (1 << 14, 1 << 12), (1 << 12,), (1 << 12,)), 2 << 28),
    "columns": Row(lambda: of_tensors(column_statistics, (1 << 16, 512)), 2 << 27),
    "resnet": Row(lambda: of_module(ResNet(64), torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,)))),
    "unet": Row(lambda: (lambda p: of_module(p.fn, *p.inputs))(unet(batch=32, size=128, width=32))),
    "gpt2": Row(lambda: of_module(GPT(50304, 768, 12, 12, CONTEXT), *tokens(50304, 16))),
    "llama": Row(lambda: of_module(Llama(), *tokens(32000, 8))),
    "decode": Row(llama_decode, modes=("infer",)),
}


# ---------------------------------------------------------------- in the fresh process

def compiler(impl: str, mode: str) -> Callable:
    if impl.startswith("torch"):
        best: dict[str, Any] = {"mode": "reduce-overhead" if mode == "infer" else "max-autotune-no-cudagraphs"} if impl == "torch-best" else {}
        return lambda fn: torch.compile(fn, **best)
    if impl == "eager":
        return lambda fn: fn
    import firesteel as fs
    return lambda fn: fs.compile(fn, mode="reduce-overhead" if impl == "firesteel-best" else None)


def steady(step, seconds: float, sync) -> float:
    """The median time of a step."""
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 10 or time.perf_counter() < deadline and len(times) < 2000:
        start = time.perf_counter()
        step()
        sync()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def worker(name: str, mode: str, impl: str, seconds: float, shown: int, lock: str) -> dict:
    torch.manual_seed(0)
    program, row = ROWS[name].make(), {}
    fn, train = compiler(impl, mode)(program.fn), mode == "train"

    def one() -> Tensor:
        return step(fn, program, train)

    start = time.perf_counter()
    one()
    torch.cuda.synchronize()
    row["first"] = time.perf_counter() - start
    with open(lock, "w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        for _ in range(3):
            one()
        row["steady"] = steady(one, seconds, torch.cuda.synchronize)
        kernels = profiled(one)
        row["device"] = sum(spent for _, spent, _ in kernels)
        row["peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
        row["kernels"] = kernels[:shown]
        if ROWS[name].bytes and mode == "infer":
            row["fraction"] = ROWS[name].bytes / row["device"] / copy_bandwidth()
    return row


def profiled(one: Callable[[], Any], steps: int = 5) -> list[tuple[str, float, int]]:
    """(name, seconds, launches) of a step's kernels, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            one()
        torch.cuda.synchronize()
    found = [(e.key, e.self_device_time_total * 1e-6 / steps, e.count // steps) for e in profile.key_averages() if e.self_device_time_total]
    return sorted(found, key=lambda kernel: -kernel[1])


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    spent = profiled(lambda: target.copy_(source))[0][1]
    return 2 * source.nbytes / spent


# ---------------------------------------------------------------- the driver

def measure(name: str, mode: str, impl: str, options: Any, lock: str) -> dict:
    print(f"  {name} {mode} {impl} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as cache:
        return fresh(__file__, [name, mode, impl, options.seconds, options.profile, lock], cache)


def show(name: str, mode: str, found: dict[str, dict]) -> str:
    """Rows of the table, then the longest kernels."""
    lines = []
    for impl, row in found.items():
        if "error" in row:
            lines.append(f"| {name} {mode} | {impl} | {row['error']} |")
            continue
        fraction = f"{row['fraction']:.0%}" if "fraction" in row else ""
        lines.append(f"| {name} {mode} | {impl} | {row['first']:.2f} | {row['steady'] * 1e3:.3f} | {row['device'] * 1e3:.3f} | {fraction} | {row['peak_mb']:.0f} |")
    for impl, row in found.items():
        lines += [f"    {impl:10} {spent * 1e6:9.1f} us {count:4} x {kernel[:110]}" for kernel, spent, count in row.get("kernels", ())]
    return "\n".join(lines)


def main() -> int:
    parser = table_options(__doc__, list(ROWS), ("infer", "train"), list(IMPLS), rows="--rows")
    parser.add_argument("--seconds", type=float, default=0.5, help="of steady state in each process")
    parser.add_argument("--profile", type=int, default=0, help="how many kernels of each are shown")
    parser.add_argument("--jobs", type=int, default=1, help="processes at the same time")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(*json.loads(options.worker))))
        return 0
    print("| program | compiler | first call s | steady ms | kernels ms | of copy bandwidth | peak MB |\n|---|---|---|---|---|---|---|")
    wanted = [(name, mode) for name in options.rows.split(",") for mode in options.modes.split(",") if mode in ROWS[name].modes]
    rows = {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool, tempfile.NamedTemporaryFile() as lock:
        asked = {row: {impl: pool.submit(measure, *row, impl, options, lock.name) for impl in options.impl.split(",")} for row in wanted}
        for row, impls in asked.items():
            found = rows[" ".join(row)] = {impl: future.result() for impl, future in impls.items()}
            print(show(*row, found), flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
