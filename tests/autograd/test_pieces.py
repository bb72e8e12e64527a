"""A backward in pieces gives eager's gradients, hands them on in eager's order, and is one node where nobody asked."""
import contextlib

import pytest
import torch
from torch import nn

import firesteel as fs
from firesteel.autograd import pieces


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch):
    """As if inside of a forward of DistributedDataParallel whose buckets are small."""
    fs.reset()
    monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", object())
    monkeypatch.setattr(pieces, "FIRST_BYTES", 16)
    monkeypatch.setattr(pieces, "LATER_BYTES", 16)
    with fs.config.patch(rank_wait=0.0):        # there is no other rank to compare with
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.position = nn.Parameter(torch.randn(5, 4))         # its gradient goes on to what lies below
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        x = x + self.layers[2](x)
        x = x + self.position
        for layer in self.layers:           # the last is used twice
            x = x + torch.tanh(layer(self.norm(x)))
        return x


def made():
    torch.manual_seed(0)
    return Net().double(), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)


def gradients(model, x):
    return [x.grad, *(p.grad for p in model.parameters())]


def check(run):
    """The same of eager and of compiled models; (events of compiled, of eager)."""
    model, x = made()
    theirs = run(model, model, x), gradients(model, x)
    model, x = made()
    ours = run(fs.compile(model, fullgraph=True), model, x), gradients(model, x)
    torch.testing.assert_close(ours, theirs)


@pytest.fixture
def ran(monkeypatch):
    """Numbers of the pieces that ran, in order."""
    numbers = []
    compiled = pieces.Pieces.compiled
    monkeypatch.setattr(pieces.Pieces, "compiled", lambda self, number: numbers.append(number) or compiled(self, number))
    return numbers


def test_gradients(ran):
    check(lambda call, model, x: call(x).square().sum().backward())
    assert ran == list(range(len(ran))) and len(ran) > 3


def test_accumulators_run_between_pieces(ran):
    seen = []
    model, x = made()
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, len(ran))))
    fs.compile(model)(x).square().sum().backward()
    assert [number for _, number in seen] == sorted(number for _, number in seen)
    assert seen[0][1] < seen[-1][1] == len(ran)


def test_a_hook_that_overwrites_the_gradient():
    """What later pieces read is not what left."""
    def overwrite(p):
        p.grad.zero_()

    def run(call, model, x):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(overwrite)
        call(x).square().sum().backward()
    check(run)


def test_twice(ran):
    def run(call, model, x):
        loss = call(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    check(run)


def test_some_inputs_only():
    def run(call, model, x):
        loss = call(x).square().sum()
        first = torch.autograd.grad(loss, [model.layers[2].weight], retain_graph=True)
        second = torch.autograd.grad(loss, [x, model.position], retain_graph=True)
        loss.backward(inputs=[model.norm.weight])
        return first, second
    check(run)


def test_second_order():
    def run(call, model, x):
        found = torch.autograd.grad(call(x).square().sum(), list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in found).backward()
    check(run)


def test_frozen_parameters(ran):
    def run(call, model, x):
        for p in model.layers[1].parameters():
            p.requires_grad_(False)
        call(x).square().sum().backward()
    check(run)


def test_a_tangent_that_does_not_arrive():
    a, b, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(3, 4)

    def f(x):
        y = a(x).tanh()
        return y, b(y)

    def run(call):
        for p in (*a.parameters(), *b.parameters()):
            p.grad = None
        call(x)[0].sum().backward()
        return [p.grad for p in (*a.parameters(), *b.parameters())]
    torch.testing.assert_close(run(fs.compile(f)), run(f))


def test_one_node_elsewhere(ran, monkeypatch):
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    check(lambda call, model, x: call(x).square().sum().backward())
    assert ran == []


def test_compiled_autograd_runs_it_by_the_engine():
    def run(call, model, x):
        loss = call(x).square().sum()
        with fs.compiled_autograd() if call is not model else contextlib.nullcontext():
            loss.backward()
    check(run)
