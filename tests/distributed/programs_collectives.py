"""Collectives in compiled functions."""
import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as nn
from ranks import compared

import firesteel as fs
from firesteel.artifacts import logger

RANK = dist.get_rank()
X = torch.arange(12.).reshape(4, 3) + RANK
OTHER = dist.new_group([0, 1])


def program_all_reduce():
    def f(x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1
    return compared(f, X)


def program_all_reduce_of_an_argument():
    def f(x):
        dist.all_reduce(x, dist.ReduceOp.MAX, group=OTHER)
        return x + 1, x
    return compared(f, X)


def program_asynchronous():
    def f(x):
        y = x * 2
        work = dist.all_reduce(y, async_op=True)
        z = torch.tanh(x)
        done = work.wait()
        return y + z, done
    return compared(f, X, tolerance=1e-6)


def program_futures():
    def f(x):
        y = x * 2
        future = dist.all_reduce(y, async_op=True).get_future()
        halved = future.then(lambda done: done.value()[0] / 2)
        left = future.then(lambda done: done.value()[0] + 1)
        return halved.wait() + future.wait()[0], future.done(), left
    made = lambda call: lambda x: (lambda total, done, left: (total, done, torch.futures.collect_all([left]).wait()[0].wait()))(*call(x))   # noqa: E731
    return compared(made(f), X, compiled=lambda eager: made(fs.compile(f)), tolerance=1e-6)


def program_waits_are_late():
    """Between the start and the wait lies what does not read the result."""
    def f(x, w):
        y = x * 2
        dist.all_reduce(y)
        z = torch.mm(w, w)
        return y + z.sum()
    with fs.config.patch(keep_stages=True):
        compiled = fs.compile(f)
        compiled(X.clone(), torch.ones(70, 70))
    entry = only_entry(compiled)
    plan = next(record.product for record in entry.stages if record.stage.name == "plan")
    return {"calls": [step.step.call.target._schema.name for step in plan.steps if hasattr(step, "step") and step.step.call]}


def only_entry(compiled):
    entry, = [entry for region in compiled.__firesteel_root__.all_regions() for entry in region.variants()]
    return entry


def program_work_leaves():
    def f(x):
        y = x * 2
        return y, dist.all_reduce(y, async_op=True)

    def g(x):
        y, work = f(x)
        work.wait()
        return y
    return compared(g, X, compiled=lambda g: lambda x: (lambda made: (made[1].wait(), made[0])[1])(fs.compile(f)(x)))


def program_all_gather():
    def f(x):
        whole = torch.empty(2 * x.shape[0], x.shape[1])
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather_into_tensor(whole, x * 2)
        dist.all_gather(parts, x + 1)
        return whole.relu(), parts[0] - parts[1]
    return compared(f, X)


def program_reduce_scatter():
    def f(x):
        half = torch.empty(x.shape[0] // 2, x.shape[1])
        dist.reduce_scatter_tensor(half, x * 2, op=dist.ReduceOp.SUM)
        part = torch.empty_like(half)
        dist.reduce_scatter(part, list(x.chunk(2)))
        return half.relu(), part
    return compared(f, X)


def program_reduce_scatter_of_parts():
    """Of a size for each rank."""
    def f(x):
        y = x.new_empty(2 + dist.get_rank(), 3)
        dist.reduce_scatter(y, [x[:2] * 2, x[1:]])
        return y + 1
    return compared(f, X)


def program_all_to_all():
    def f(x):
        got = torch.empty_like(x)
        dist.all_to_all_single(got, x * 2)
        return got + 1
    return compared(f, X)


def program_lists_of_all_to_all():
    def f(x):
        parts = [torch.empty_like(x), torch.empty_like(x)]
        dist.all_to_all(parts, [x * 2, x * 3], async_op=True).wait()
        return parts[0] - parts[1]
    return compared(f, X)


def program_reduce():
    def f(x):
        y = x * 2
        dist.reduce(y, 0, op=dist.ReduceOp.MAX)
        z = x + 1
        work = dist.reduce(z, 1, group=OTHER, async_op=True)
        work.wait()
        return y + 1 if RANK == 0 else z + 1
    return compared(f, X)


def program_gather_and_scatter():
    def f(x):
        parts = [torch.empty_like(x) for _ in range(2)] if RANK == 0 else None
        dist.gather(x * 2, parts)
        got = torch.empty_like(x)
        dist.scatter(got, [x * 2, x.t().contiguous().view(4, 3)] if RANK == 1 else None, src=1)
        return got + 1 if parts is None else parts[0] + parts[1] + got
    return compared(f, X)


def program_coalesced():
    def f(x):
        y, z = x * 2, x[:2] * 3
        dist.all_reduce_coalesced([y, z])
        parts = [[torch.empty_like(y), torch.empty_like(z)] for _ in range(2)]
        dist.all_gather_coalesced(parts, [y, z + RANK])
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(y)
            dist.all_reduce(z)
        manager.wait()
        return y, z, parts[0][1] - parts[1][1]
    return compared(f, X)


def program_send_and_receive():
    def f(x):
        if RANK == 0:
            dist.send(x * 2, 1, tag=3)
            return x
        got = torch.empty_like(x)
        return dist.recv(got, 0, tag=3), got + 1
    return compared(f, X)


def exchanged(x):
    """Both ranks send first: neither may wait before it receives."""
    y, got = x * 2, torch.empty_like(x)
    works = dist.isend(y, 1 - RANK), dist.irecv(got, 1 - RANK)
    return got, x.relu(), works


def program_exchange():
    def f(x):
        got, z, works = exchanged(x)
        for work in works:
            work.wait()
        return got + z
    return compared(f, torch.randn(1024, 1024))


def program_exchange_goes_on_outside():
    def f(x, exchanged=exchanged):
        got, z, works = exchanged(x)
        assert all(work.wait() for work in works) and all(work.is_completed() for work in works)
        return got + z
    return compared(f, torch.randn(1024, 1024), compiled=lambda f: lambda x: f(x, fs.compile(exchanged)))


def program_batch_of_exchanges():
    def f(x):
        got = torch.empty_like(x)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x * 2, 1 - RANK), dist.P2POp(dist.irecv, got, 1 - RANK)]):
            work.wait()
        return got + 1
    return compared(f, torch.randn(1024, 1024))


class Copied(torch.autograd.Function):
    """As tensor-parallel libraries write it: nothing forward, a sum of gradients backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def program_functions_with_groups():
    def f(x):
        Copied.apply(x.sin(), OTHER).square().sum().backward()
        return x.grad
    return compared(f, X.clone().requires_grad_(), tolerance=1e-6)


def program_differentiable_collectives():
    """torch.distributed.nn: its functions refuse the peer, and not us."""
    def f(x):
        y = nn.all_reduce(x.sin()) + nn.broadcast(x.cos(), 0) + nn.reduce(x.tanh(), 1)
        z = [*nn.all_gather(x.cos()), *nn.all_to_all([torch.empty(2, 3), torch.empty(2, 3)], list(x.sin().chunk(2))),
             nn.reduce_scatter(torch.empty(2, 3), list(x.sin().chunk(2))), nn.all_to_all_single(torch.empty(4, 3), x * 2)]
        (y.square().sum() + sum((part * part).sum() for part in z)).backward()
        return x.grad
    return compared(f, X.clone().requires_grad_(), tolerance=1e-4)


def program_broadcast_and_barrier():
    def f(x):
        y = x + dist.get_rank() * dist.get_world_size()
        dist.broadcast(y, 1)
        dist.barrier()
        return y * 2
    return compared(f, X)


def program_barrier_with_devices():
    """An argument that a graph does not know is not dropped: eager refuses it for gloo, or obeys it."""
    def f(x):
        y = x + 1
        dist.barrier(device_ids=[0])
        return y
    errors = []
    for g in (f, fs.compile(f)):
        try:
            g(X)
        except ValueError as error:
            errors.append(str(error))
    return {"errors": len(errors), "same": len(set(errors)) == 1}


def program_functional():
    def f(x):
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        z = functional.all_gather_tensor(x, 0, OTHER)
        return y + 1, functional.reduce_scatter_tensor(z, "sum", 0, dist.group.WORLD)
    return compared(f, X)


def program_functional_gradients():
    def f(x):
        y = functional.all_gather_tensor_autograd(x.sin(), 0, dist.group.WORLD)
        z = functional.reduce_scatter_tensor_autograd(y * y, "sum", 0, dist.group.WORLD)
        (z * (RANK + 1)).sum().backward()
        return z, x.grad
    return compared(f, X.clone().requires_grad_(), tolerance=1e-6)


def program_gradients_past_a_collective():
    """What a collective writes has eager's gradient: that of the value before."""
    def f(x):
        y = x * 3
        dist.all_reduce(y)
        (y * y.detach()).sum().backward()
        return y, x.grad
    return compared(f, X.clone().requires_grad_())


def program_sizes_that_change():
    def f(x):
        y = x * 2
        dist.all_reduce(y)
        whole = torch.empty(2 * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(whole, y)
        return whole.sum(0)
    results = [f(X[:n].clone()) for n in (2, 3, 4)]
    compiled = fs.compile(f, dynamic=True, fullgraph=True)
    made = [compiled(X[:n].clone()) for n in (2, 3, 4)]
    only_entry(compiled)
    return {"equal": all(map(torch.equal, results, made))}


def program_unread_results_are_not_dropped():
    def f(x):
        y = x * 2
        dist.all_reduce(y)          # nobody reads it; the other rank waits for it
        dist.all_reduce(x)
        return x
    return compared(f, X)


def refused(f):
    fs.reset()
    try:
        fs.compile(f)(X.clone())
    except fs.errors.FiresteelError as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": "none"}


def program_other_collectives_on_other_ranks():
    def f(x):
        y = x * 2
        dist.all_reduce(y)
        if dist.get_rank() == 0:
            dist.all_reduce(y)
        else:
            dist.broadcast(y, 0)
        return y
    return refused(f)


def program_other_sizes_on_other_ranks():
    def f(x):
        y = x[:dist.get_rank() + 1] * 2
        dist.all_reduce(y)
        return y
    return refused(f)


def program_others_behind_a_break():
    def f(x):
        dist.all_reduce(x)
        print("a break")
        if dist.get_rank() == 0:
            dist.all_reduce(x)
        else:
            dist.broadcast(x, 0)
        return x
    return refused(f)


def program_others_in_a_later_compilation():
    def f(x, n):
        for _ in range(n):
            dist.all_reduce(x)
        return x
    f(X.clone(), 1), f(X.clone(), 2)
    compiled = fs.compile(f)
    compiled(X.clone(), 1), compiled(X.clone(), 2)
    return refused(lambda x: compiled(x, 3 + dist.get_rank()))


def program_breaks_of_one_rank():
    """Rank 0 has two breaks more, and both have two; which of the branches is taken depends on data.  No rank waits in vain."""
    def f(x, flag):
        if dist.get_rank() == 0:
            print("rank 0")
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            print("rank 0")
        dist.all_reduce(x)
        print("both")
        y = x * 2
        if flag[0] > 0: print("yes"); y = x + 1     # noqa: E701, E702
        else: print("no"); y = x + 2                # noqa: E701, E702
        dist.all_reduce(y)
        return y
    said = []
    logger.addFilter(lambda record: said.append(record.getMessage()) or False)
    result = compared(f, X, torch.tensor([float(RANK)]))
    logger.filters.clear()
    return {"equal": result["equal"], "said": said}


def program_other_work_on_other_ranks():
    """All that the ranks do together is the same; one has a break, too."""
    def f(x):
        y = x * 2
        dist.all_reduce(y)
        if dist.get_rank() == 1:
            y = y.sin().cos()
            print("rank 1")
        dist.all_reduce(y)
        return y
    return {name: value for name, value in compared(f, X, tolerance=1e-5).items() if name == "equal"}


def program_kernels():
    """Ranks that differ in rank, data and addresses compile the same kernels."""
    fs.reset()
    kept = [object() for _ in range(1000 * RANK)]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))

    def step(x):
        y = model(x)
        dist.all_reduce(y)
        return y + 1
    with fs.config.patch(cache_dir=os.path.join(os.environ["KERNELS"], str(RANK)), verify=False):
        fs.compile(step)(torch.randn(4, 8) + RANK).sum().backward()
    return len(kept)


def program_kernels_are_made_once():
    """Ranks with a common folder: how many kernels both compile."""
    fs.reset()

    def step(x, y):
        z = (x @ y).sin().softmax(-1)
        dist.all_reduce(z)
        return z.cos() + 1
    with fs.config.patch(cache_dir=os.path.join(os.environ["KERNELS"], "common"), verify=False):
        fs.counters["native"].clear()
        dist.barrier()
        fs.compile(step)(torch.randn(4, 8), torch.randn(8, 5))
        made = [None, None]
        dist.all_gather_object(made, fs.counters["native"]["compiled"])
    return sum(made)
