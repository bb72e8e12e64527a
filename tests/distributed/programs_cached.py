"""A program whose ranks differ in rank, data, port and addresses, and compile the same kernels."""
import os

import torch
import torch.distributed as dist
from torch import nn

import firesteel as fs
from firesteel.artifacts import counters


def program_trained():
    rank = dist.get_rank()
    [object() for _ in range(1000 * rank)]
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))

    def step(x):
        y = model(x)
        dist.all_reduce(y)
        return y + 1
    with fs.config.patch(cache_dir=os.path.join(fs.config.cache_dir, str(rank)), verify=False):
        fs.compile(step)(torch.randn(4, 8) + rank).sum().backward()
    return {"kernels": counters["native"]["kernels"] > 0}
