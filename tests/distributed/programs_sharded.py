"""DTensor, tensor parallelism, FSDP and DDP around compiled modules, and inside of them."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import compared
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import firesteel as fs
from firesteel.artifacts import counters
from firesteel.layouts import is_loss_parallel

RANK = dist.get_rank()
MESH = init_device_mesh("cpu", (2,))
WHOLE = torch.arange(16.).reshape(4, 4) - 4
PART = distribute_tensor(WHOLE, MESH, [Shard(0)])


def compiled_backwards(fn, backward):
    """Values, gradients and their placements, and how many programs were traced: one, where its own backward ran."""
    def run(call):
        def steps():
            x = distribute_tensor(WHOLE.sin(), MESH, [Shard(0)]).requires_grad_()
            out = call(x)
            backward(out)
            return out, x.grad, str(x.grad.placements)
        return steps
    counters["aot"].clear()
    result = compared(run(fn), compiled=lambda eager: run(fs.compile(fn)), tolerance=1e-5)
    return {**result, "traced": counters["aot"]["total"]}


def program_backwards_of_dtensors():
    results = [compiled_backwards(fn, backward) for fn, backward in [
        (lambda x: (x * 2).sin().sum(), lambda out: out.backward()),        # each rank has a term
        (lambda x: (x * 2).t().sin(), lambda out: (out * out).sum().backward()),
        (lambda x: (x @ x.t()).sin(), lambda out: out.full_tensor().square().sum().backward()),
        (lambda x: (x * 3).sin(), lambda out: out.to_local().sum().backward()),
        (lambda x: (x * 3).redistribute(placements=[Replicate()]).sin(), lambda out: out.sum().backward())]]
    replicated = compiled_backwards(lambda x: (x * 2).sin() * x, lambda out: out.sum().backward())       # the gradient is laid out in another way
    return {"results": results, "of another layout": replicated}


def loss_of_shards(x, target):
    logits = DTensor.from_local(x, MESH, [Shard(1)], run_check=False)
    with loss_parallel():
        return F.cross_entropy(logits * 2, target)


def program_loss_parallel():
    def run(fn):
        def steps():
            x = WHOLE.sin()[:, 2 * RANK:2 * RANK + 2].clone().requires_grad_()
            loss = fn(x, torch.tensor([0, 3, 2, 1]))
            with loss_parallel():
                loss.backward()
            return loss, x.grad, is_loss_parallel()
        return steps
    return compared(run(loss_of_shards), compiled=lambda eager: run(fs.compile(loss_of_shards)), tolerance=1e-5)


def program_loss_parallel_with_a_break():
    def f(x, target):
        logits = DTensor.from_local(x, MESH, [Shard(1)], run_check=False)
        with loss_parallel():
            logits = logits * 2
            fs.graph_break()
            loss = F.cross_entropy(logits, target)
        return loss.full_tensor()
    result = compared(f, WHOLE[:, :2].sin(), torch.tensor([0, 3, 2, 1]), tolerance=1e-5)
    return {**result, "left": not is_loss_parallel()}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, unused=False):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.unused = nn.Linear(2, 2) if unused else None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def trained(make, compile=fs.compile, same_data=False, step=None, tolerance=1e-5):
    """A model, made twice from the same numbers: output and gradients after two steps, compiled and not."""
    def steps(around):
        torch.manual_seed(0)
        model = make()
        call = around(model)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0 if same_data else RANK))
        if step is not None:
            return step(call, model, x)
        for _ in range(2):
            model.zero_grad()
            out = call(x)
            out.square().mean().backward()
        return out, [p.grad for p in model.parameters() if p.grad is not None]
    return compared(lambda: steps(lambda model: model), compiled=lambda eager: lambda: steps(compile), tolerance=tolerance)


def program_operators():
    return compared(lambda t: torch.tanh(t @ t.t()) * 2, PART, tolerance=1e-6)


def program_relu():
    return compared(torch.relu, PART)


def program_conversions():
    def f(x):
        t = DTensor.from_local(x, MESH, [Shard(0)])
        if t.placements != (Shard(0),):
            return x
        return t.redistribute(placements=[Replicate()]).to_local() + 1, t.sum().full_tensor()
    return compared(f, WHOLE)


def program_distributed_inside():
    return compared(lambda x: (distribute_tensor(x, MESH, [Shard(0)]) * 2, distribute_tensor(x + RANK, MESH, [Replicate()]) + 1), WHOLE)


def program_facts_of_dtensors():
    def f(t):
        place, = t.placements
        if not place.is_shard() or place.is_replicate() or t.device_mesh.size() != MESH.shape[0]:
            return t
        y = t.to_local() * (place.dim + 2) + t.device_mesh.get_coordinate()[0] + t.device_mesh.get_local_rank()
        dist.all_reduce(y, group=t.device_mesh.get_group())
        return y
    return compared(f, PART)


def program_local_results():
    """What a custom function returns as a view is attached to its value."""
    def f(x):
        t = DTensor.from_local(x, MESH, [Shard(0)]) * 2
        return t.to_local(), t.redistribute(placements=[Replicate()]).to_local(), (t @ t.t()).full_tensor()

    def steps(call):
        def step(x):
            results = call(x)
            sum(result.square().sum() for result in results).backward()
            return *results, x.grad, [result._is_view() for result in results], results[0].grad_fn.name()
        return step
    return compared(steps(f), WHOLE.clone().requires_grad_(), compiled=lambda eager: steps(fs.compile(f)), tolerance=1e-5)


def program_inputs_that_arrive_late():
    """What eager's asynchronous collectives return has arrived where a graph reads it: an input, and a gradient."""
    def f(x):
        return x.sin() + x.cos() * 2

    def steps(call):
        def step(x):
            late = DTensor.from_local(x * 2, MESH, [Partial()]).redistribute(placements=[Replicate()], async_op=True).to_local()
            kind = type(late).__name__
            out = call(late)
            done = late.completed
            out.register_hook(lambda gradient: all_reduce(gradient.contiguous(), "sum", dist.group.WORLD))
            out.square().sum().backward()
            with torch.no_grad():
                quiet = call(all_reduce(x * 3, "sum", dist.group.WORLD))
            return out, x.grad, quiet, kind, done
        return step
    return compared(steps(f), WHOLE.sin().requires_grad_(), compiled=lambda eager: steps(fs.compile(f)), tolerance=1e-5)


def program_sizes_of_dtensors():
    """Constants, also where those of local tensors are symbols."""
    weight = distribute_tensor(WHOLE.sin(), MESH, [Shard(0)])

    def f(x):
        return F.linear(DTensor.from_local(x * 2, MESH, [Replicate()]), weight).redistribute(placements=[Replicate()]).to_local() + x.shape[1]

    def several(call):
        return lambda: [call(torch.arange(8. * n).reshape(2, n, 4).cos()) for n in (3, 5, 7)]
    return compared(several(f), compiled=lambda eager: several(fs.compile(f)), tolerance=1e-5)


def program_masked_results():
    """What is still to be masked is eager's, whose placements keep the mask; eager's calls behind it find none of ours.  Likewise chunks, whose gradient
    torch wants for all of them."""
    table = distribute_tensor(WHOLE.sin(), MESH, [Shard(0)]).requires_grad_()
    places = distribute_tensor(torch.tensor([0, 3, 2, 1]), MESH, [Replicate()])

    def steps(call, chunks):
        def step():
            out = call(places, table).redistribute(placements=[Replicate()])
            grad, = torch.autograd.grad(out.square().sum(), table)
            parts = chunks(table)
            return out, grad, *torch.autograd.grad((parts[0] * 2).sum() + parts[1].square().sum(), table)
        return step
    embed, chunks = lambda places, table: F.embedding(places, table), lambda table: table.chunk(2, 1)
    return compared(steps(embed, chunks), compiled=lambda eager: steps(fs.compile(embed), fs.compile(chunks)), calls=2)


def program_optimisers_of_dtensors():
    """With lists of tensors: the numbers of the step are tensors while it is compiled."""
    def run(compile):
        weights = [distribute_tensor(WHOLE.sin() + k, MESH, [Shard(k)]).requires_grad_() for k in range(2)]
        optimizer = torch.optim.AdamW(weights, lr=0.1, foreach=True)
        step = compile(optimizer.step)
        for k in range(2):
            for weight in weights:
                weight.grad = weight.detach() * (k + 1)
            step()
        return weights
    return compared(lambda: run(lambda step: step), compiled=lambda eager: lambda: run(fs.compile), tolerance=1e-5)


def program_gradients_of_dtensors():
    def f(x):
        t = DTensor.from_local(x, MESH, [Shard(0)])
        (t * t.sum()).sum().full_tensor().backward()
        return x.grad
    return compared(f, WHOLE.clone().requires_grad_())


def program_tensor_parallel():
    return trained(lambda: parallelize_module(Block(), MESH, {"up": ColwiseParallel(), "down": RowwiseParallel()}), same_data=True)


def sharded():
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def by_layer(model):
    for layer in model.layers:
        layer.forward = fs.compile(layer.forward, fullgraph=True)
    return model


def program_fsdp2():
    return trained(sharded)


def program_fsdp2_by_layer():
    return trained(sharded, by_layer)


def program_fsdp1():
    return trained(lambda: FullyShardedDataParallel(Net(), device_id=torch.device("cpu")))


def program_ddp():
    return trained(lambda: DistributedDataParallel(Net()))


def program_ddp_around_compiled():
    def compile(model):
        model.module = fs.compile(model.module, fullgraph=True)
        return model
    return trained(lambda: DistributedDataParallel(Net()), compile)


def program_ddp_static_graph():
    return trained(lambda: DistributedDataParallel(Net(), static_graph=True))


def program_ddp_unused_parameters():
    return trained(lambda: DistributedDataParallel(Net(unused=True), find_unused_parameters=True))


def halved(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0] / 2)


def program_ddp_communication_hook():
    def make():
        model = DistributedDataParallel(Net())
        model.register_comm_hook(None, halved)
        return model
    return trained(make)


def program_ddp_no_sync():
    def step(call, model, x):
        with model.no_sync():
            call(x).square().mean().backward()
        alone = [p.grad.clone() for p in model.parameters()]
        call(x).square().mean().backward()
        return alone, [p.grad for p in model.parameters()]
    return trained(lambda: DistributedDataParallel(Net()), step=step)


def program_zero():
    def step(call, model, x):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            call(x).square().mean().backward()
            optimizer.step()
        return list(model.parameters())
    return trained(lambda: DistributedDataParallel(Net()), step=step)


def events_of(compile):
    """In which order pieces of the backward run and buckets are sent."""
    from firesteel.autograd import pieces
    events = []
    advance = pieces.Pieces.compiled
    pieces.Pieces.compiled = lambda self, number: events.append("piece") or advance(self, number)

    def send(state, bucket):
        events.append("bucket")
        return halved(state, bucket)
    try:
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))))      # 1 MiB a layer
        model.register_comm_hook(None, send)
        call = compile(model)
        for _ in range(3):
            events.clear()
            call(torch.ones(2, 512)).square().mean().backward()
    finally:
        pieces.Pieces.compiled = advance
    return events


def compile_inside(model):
    model.module = fs.compile(model.module)
    return model


def program_ddp_buckets_leave_early():
    return {"outside": events_of(fs.compile), "inside": events_of(compile_inside)}
