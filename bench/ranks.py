"""Steps of two gloo ranks on this machine, eager and compiled in turns: FSDP2 by layer and outside, FSDP1, tensor parallel, DDP.

    python bench/ranks.py [fsdp2 ddp ...]       # milliseconds a training step on rank 0, medians; the numbers of threads are those of OMP_NUM_THREADS

Both kinds run in one process, one step of each after the other, so that what disturbs the machine disturbs both.
"""
from __future__ import annotations

import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import firesteel as fs

SIZE, LAYERS, STEPS, WARM = 256, 4, 16, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x):
        query, key, value = self.mix(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def blocks(kind=Block):
    return nn.Sequential(*(kind() for _ in range(LAYERS)))


def sharded():
    model = blocks()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel():
    mesh, model = init_device_mesh("cpu", (2,)), blocks(Wide)
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def by_layer(model):
    for layer in model:
        layer.forward = fs.compile(layer.forward, fullgraph=True)
    return model


def inside(model):
    model.module = fs.compile(model.module)
    return model


CASES = {"fsdp2": (sharded, fs.compile), "fsdp2_by_layer": (sharded, by_layer), "tensor_parallel": (tensor_parallel, fs.compile),
         "fsdp1": (lambda: FullyShardedDataParallel(blocks(), device_id=torch.device("cpu")), fs.compile),
         "ddp": (lambda: DistributedDataParallel(blocks()), fs.compile), "ddp_inside": (lambda: DistributedDataParallel(blocks()), inside)}


def measured(make, compile):
    """Milliseconds of forward and backward together: eager, compiled."""
    models = [make(), make()]
    calls, times = [models[0], compile(models[1])], ([], [])
    x = torch.randn(4, 64, SIZE)
    for step in range(STEPS):
        for model, call, spent in zip(models, calls, times):
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            call(x).square().mean().backward()
            if step >= WARM:
                spent.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(spent) for spent in times]


def rank(names):
    dist.init_process_group("gloo", os.environ["RENDEZVOUS"], datetime.timedelta(seconds=60), 2, int(os.environ["RANK"]))
    for name in names:
        eager, ours = measured(*CASES[name])
        if dist.get_rank() == 0:
            print(f"{name:16} eager {eager:7.1f}   compiled {ours:7.1f}", flush=True)
    dist.barrier()
    os._exit(0)         # gloo's threads may abort a process that ends in the usual way


def main(names):
    with tempfile.TemporaryDirectory() as folder:
        common = {"OMP_NUM_THREADS": "1", **os.environ, "RENDEZVOUS": f"file://{folder}/store", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [subprocess.Popen([sys.executable, __file__, *names], env={**common, "RANK": str(number)}) for number in range(2)]
        return max(one.wait() for one in ranks)


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(CASES)
    sys.exit(rank(chosen) if "RENDEZVOUS" in os.environ else main(chosen))
