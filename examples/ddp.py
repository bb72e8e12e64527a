"""Data parallel training on two processes of this machine, compiled.

    python examples/ddp.py
"""
from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import firesteel as fs

RANKS = 2


def train(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1)))
    compiled = fs.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)         # each rank has data of its own
    for step in range(5):
        batch = torch.randn(16, 8, generator=generator)
        loss = (compiled(batch).squeeze(1) - batch.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    total = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()]).sum()
    every = [torch.empty_like(total) for _ in range(RANKS)]
    dist.all_gather(every, total)
    assert all(torch.equal(one, total) for one in every), "the ranks' parameters differ"
    if rank == 0:
        print("the ranks have equal parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (os.path.join(folder, "meeting"),), RANKS)
