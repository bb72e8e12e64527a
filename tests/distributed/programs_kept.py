"""Programs of two ranks whose regions and programs are kept between processes."""
import os

import torch
import torch.distributed as dist
from ranks import compared
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import firesteel as fs
from firesteel.artifacts import counters

RANK = dist.get_rank()
X = torch.arange(12.).reshape(4, 3) + RANK
OTHER = dist.new_group([0, 1])
MESH = init_device_mesh("cpu", (2,))


def found(fn, *args, **more):
    """Compared with eager, and how many regions and programs the cache had."""
    counters["native"].clear()
    with fs.config.patch(**{"cache_dir": fs.config.cache_dir + "/lost"} if os.environ["LOST"] == str(RANK) else {}):
        result = compared(fn, *args, tolerance=1e-6, **more)
    native = counters["native"]
    hits = [0, 0]
    dist.all_gather_object(hits, native["program_hits"])
    return {**result, "found": [native["region_hits"], native["program_hits"]], "by both": sum(hits), "not kept": dict(counters["regions_not_kept"])}


def all_reduce(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def step(x, w):
    out = (x @ w).sin()
    dist.all_reduce(out.detach())
    return out


def rank_as_a_constant(x):
    y = x * 2
    dist.all_reduce(y)
    return y - (1 if dist.get_rank() == 0 else 100)


def groups_and_sizes(x):
    y = x / dist.get_world_size(OTHER)
    dist.all_reduce(y, group=OTHER)
    print("a break")
    dist.reduce(y, 0)
    return y * dist.get_world_size() if RANK == 0 else x


def program_groups_and_sizes():
    return found(groups_and_sizes, X)


def program_all_reduce():
    return found(all_reduce, X)


def program_gradients():
    def trained(fn):
        def run(x, w):
            out = fn(x, w)
            out.sum().backward()
            return out.detach(), w.grad
        return run
    return found(trained(step), X, torch.ones(3, 2, requires_grad=True), compiled=lambda fn: trained(fs.compile(step)))


def program_rank_as_a_constant():
    result = found(rank_as_a_constant, torch.ones(2) * (RANK + 1))
    return {**result, "value": rank_as_a_constant(torch.ones(2) * (RANK + 1))[0].item()}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def trained(make):
    """Output and gradients of a module after two steps, compiled and not."""
    def run(compile):
        torch.manual_seed(0)
        model = make()
        call = compile(model)
        for _ in range(2):
            out = call(torch.ones(2, 4))
            out.sum().backward()
        return out, [p.grad for p in model.parameters()]
    return found(lambda: run(lambda model: model), compiled=lambda eager: lambda: run(fs.compile))


def program_tensor_parallel():
    return trained(lambda: parallelize_module(Block(), MESH, {"up": ColwiseParallel(), "down": RowwiseParallel()}))


def program_sharded_modules():
    def make():
        model = nn.Sequential(Block(), Block())
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)
    return trained(make)


def own_rows(x):
    """Which ones depends on the rank, and nothing else does."""
    whole = DTensor.from_local(x, MESH, [Replicate()])
    return whole.redistribute(placements=[Shard(0)]).to_local() * 2


def program_own_rows():
    return found(own_rows, X - RANK)


def program_rows_of_an_embedding():
    """Of the same sizes on both ranks; where they begin depends on the rank."""
    table = parallelize_module(nn.Sequential(nn.Embedding(8, 4)), MESH, {"0": RowwiseParallel(input_layouts=Replicate())})
    return found(lambda x: table(x), torch.tensor([0, 3, 4, 7]))
