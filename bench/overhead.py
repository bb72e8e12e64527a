"""What a call of compiled code costs beside its kernels: microseconds a call, against torch.compile and eager.

Programs: `a + b` on four elements; a 12-layer transformer in inference at a tiny size, whose graph is the same for both; GPT-2 of
`transformers`, two layers, in inference; forward and backward of a tiny function.  Each measurement is a fresh process; the number is the least
over rounds of the process's CPU time a call, and the least over several processes taken in turns, since other work on the machine only adds.
"guards" and "run" are ours taken apart: the guard function alone, and the run function on what it read, each by itself in a loop.

    python bench/overhead.py                 # all, as a table
    python bench/overhead.py add firesteel   # one, as JSON
"""
from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

import firesteel as fs

WHO = ("eager", "torch", "firesteel")
PROCESSES = 3
HERE = pathlib.Path(__file__).resolve().parent


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


@dataclass
class Program:
    """What is compiled, and its arguments.  `backward`: the result is summed and differentiated, too."""
    fn: Callable
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    backward: bool = False

    def call(self, compiled: Callable) -> Callable[[], object]:
        if not self.backward:
            return lambda: compiled(*self.args, **self.kwargs)
        return lambda: compiled(*self.args, **self.kwargs).backward()


def add() -> Program:
    return Program(lambda a, b: a + b, (torch.randn(4), torch.randn(4)))


def transformer() -> Program:
    return Program(nn.Sequential(*[Block(16, 2) for _ in range(12)]).eval(), (torch.randn(1, 4, 16),))


def gpt2() -> Program:
    sys.path = [path for path in sys.path if pathlib.Path(path).resolve() != HERE]      # transformers takes a module `kernels` for another one
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    return Program(GPT2LMHeadModel(config).eval(), (), {"input_ids": torch.randint(1, 97, (2, 7)), "use_cache": False})


def step() -> Program:
    return Program(lambda x, w: (x * w).sum(), (torch.randn(4), torch.randn(4, requires_grad=True)), backward=True)


PROGRAMS = {"add": add, "transformer": transformer, "gpt2": gpt2, "step": step}
COMPILERS = {"eager": lambda fn: fn, "torch": lambda fn: torch.compile(fn), "firesteel": lambda fn: fs.compile(fn)}


def per_call(fn: Callable, args: tuple = (), rounds: int = 60, seconds: float = 0.02) -> float:
    """Least CPU microseconds a call."""
    begun = time.process_time()
    fn(*args)
    calls = max(5, int(seconds / max(time.process_time() - begun, 1e-6)))
    times = []
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(calls):
            fn(*args)
        times.append((time.process_time() - begun) / calls)
    return min(times) * 1e6


def measure(name: str, who: str) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    program = PROGRAMS[name]()
    compiled = COMPILERS[who](program.fn)
    call = program.call(compiled)
    with torch.set_grad_enabled(program.backward):
        for _ in range(5):
            call()
        result = {"total": per_call(call)}
        if who == "firesteel":
            result |= apart(compiled, program)
    return result


def apart(compiled: Callable, program: Program) -> dict[str, float]:
    """Our call taken apart: guards, run."""
    root = getattr(compiled, "_firesteel_call", compiled).__firesteel_root__
    (entry,) = [entry for region in root.all_regions() for entry in region.entries]
    inputs = (*([program.fn] if isinstance(program.fn, nn.Module) else []), *program.args, *program.kwargs.values())
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
        rounds = [{who: in_fresh_process(program, who) for who in WHO} for _ in range(PROCESSES)]
        for who in WHO:
            least = {name: min(found[who][name] for found in rounds) for name in rounds[0][who]}
            print(f"{program:12} {who:10}", "  ".join(f"{name} {value:8.1f} us" for name, value in least.items()), flush=True)


if __name__ == "__main__":
    main()
