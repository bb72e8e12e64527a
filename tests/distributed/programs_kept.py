"""Programs of two ranks whose regions and programs are kept between processes."""
import os

import torch
import torch.distributed as dist
from ranks import compared

import firesteel as fs
from firesteel.artifacts import counters

RANK = dist.get_rank()
X = torch.arange(12.).reshape(4, 3) + RANK
OTHER = dist.new_group([0, 1])


def found(fn, *args, **more):
    """Compared with eager, and how many regions and programs the cache had."""
    counters["native"].clear()
    with fs.config.patch(**{"cache_dir": fs.config.cache_dir + "/lost"} if os.environ["LOST"] == str(RANK) else {}):
        result = compared(fn, *args, tolerance=1e-6, **more)
    native = counters["native"]
    return {**result, "found": [native["region_hits"], native["program_hits"]], "not kept": dict(counters["regions_not_kept"])}


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
