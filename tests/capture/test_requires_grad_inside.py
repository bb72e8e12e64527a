"""`requires_grad_` inside of the compiled function, and programs that take gradients of what they made leaves of."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.functional as AF
import torch.nn.functional as F
from harness import same
from torch import nn

import firesteel as fs

BACKENDS = ["eager", "aot_eager", "native"]


class World:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.other = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4))
        self.opt, self.opt2 = torch.optim.Adam(self.net.parameters()), torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9)
        self.x, self.y, self.w = torch.randn(5, 4), torch.randn(5, 4), nn.Parameter(torch.randn(4))
        self.kept: list[Any] = []

    def left(self) -> Any:
        leaves = [*self.net.parameters(), *self.other.parameters(), self.w, self.x]
        return [(p.detach(), p.grad, p.requires_grad) for p in leaves], [(z.detach(), z.grad, z.is_leaf) for z in self.kept]


def gradient_penalty(s: World) -> Any:
    a = torch.rand(5, 1)
    mixed = (a * s.x + (1 - a) * s.y).requires_grad_(True)
    slope, = torch.autograd.grad(s.net(mixed).sum(), mixed, create_graph=True)
    loss = s.net(s.y).mean() - s.net(s.x).mean() + 10 * ((slope.norm(2, 1) - 1) ** 2).mean()
    s.opt.zero_grad()
    loss.backward()
    s.opt.step()
    return loss.detach()


def second_derivatives(s: World) -> Any:
    x = s.x.clone().requires_grad_(True)
    first, = torch.autograd.grad(s.net(x).sum(), x, create_graph=True)
    second, = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    s.opt.zero_grad()
    (first[:, 1] - second[:, 0]).square().mean().backward()
    s.opt.step()
    return x.is_leaf, first.grad_fn is None, x.grad_fn is None, x.grad


def inner_steps(s: World) -> Any:
    fast = dict(s.net.named_parameters())
    for _ in range(2):
        loss = torch.func.functional_call(s.net, fast, (s.x,)).square().mean()
        slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes)}
    outer = torch.func.functional_call(s.net, fast, (s.y,)).square().mean()
    s.opt.zero_grad()
    outer.backward()
    s.opt.step()
    return outer.detach()


def two_optimisers(s: World) -> Any:
    fake = s.other(torch.randn(5, 2))
    s.opt.zero_grad()
    judged = F.softplus(s.net(fake.detach())).mean() + F.softplus(-s.net(s.x)).mean()
    judged.backward()
    s.opt.step()
    for p in s.net.parameters():
        p.requires_grad_(False)
    s.opt2.zero_grad()
    fooled = F.softplus(-s.net(fake)).mean()
    fooled.backward()
    s.opt2.step()
    s.net.requires_grad_(True)
    return judged.detach(), fooled.detach()


def there_and_back(s: World) -> Any:
    loss = s.net(s.x).square().mean()
    loss.backward()
    with torch.no_grad():
        steps = [p.grad * 0.05 for p in s.net.parameters()]
        for p, step in zip(s.net.parameters(), steps):
            p.add_(step)
    s.opt.zero_grad()
    s.net(s.x).square().mean().backward()
    with torch.no_grad():
        for p, step in zip(s.net.parameters(), steps):
            p.sub_(step)
    s.opt.step()
    return loss.detach()


def attack(s: World) -> Any:
    moved = s.x.clone()
    for _ in range(2):
        moved = moved.detach().requires_grad_(True)
        slope, = torch.autograd.grad(s.net(moved).square().sum(), moved)
        moved = (moved + 0.01 * slope.sign()).clamp(-1, 1)
    return moved, moved.requires_grad


def attribute(s: World) -> Any:
    z = s.x * 2
    z.requires_grad = True
    (z * z).sum().backward()
    return z.grad


def of_an_alias(s: World) -> Any:
    z = s.x.detach().requires_grad_()
    (z * z * s.w).sum().backward()
    return z.grad


def an_optimiser_made_inside(s: World) -> Any:
    z = s.x.clone().requires_grad_()
    opt = torch.optim.SGD([z], lr=0.1)
    for _ in range(2):
        opt.zero_grad()
        (z ** 2).sum().backward()
        opt.step()
    return z.detach()


def of_an_input(s: World) -> Any:
    s.x.requires_grad_()
    (s.x * s.w).sum().backward()


def of_an_input_with_a_result(s: World) -> Any:
    s.x.requires_grad_()
    return (s.x * s.w).sum(), s.x[1:]


def a_result_only(s: World) -> Any:
    return (s.x.clone().requires_grad_() * 2).sum()


def returned(s: World) -> Any:
    z = (s.x * 2).detach().requires_grad_()
    return s.net(z).sum(), z


def returned_alias(s: World) -> Any:
    z = s.x.detach()[1:].requires_grad_()
    return (z * 3).sum(), z


def kept(s: World) -> Any:
    z = (s.x + 1).requires_grad_()
    s.kept.append(z)
    (z * z).sum().backward()


def frozen(s: World) -> Any:
    before = s.net(s.x).sum()
    s.net.requires_grad_(False)
    return before, s.net(s.x).sum()


def cut_off(s: World) -> Any:
    y = s.w * 2
    y.detach_()
    (y * s.w).sum().backward()
    return y.requires_grad


def functional(s: World) -> Any:
    def f(t: torch.Tensor) -> torch.Tensor:
        return (t * s.w).sin()

    v = s.y[0]
    second = AF.hessian(lambda t: f(t).sum(), s.x[0])
    AF.jacobian(f, s.x[0], create_graph=True).square().sum().backward()
    return second, AF.vjp(f, s.x[0], v), AF.jvp(f, s.x[0], v), AF.jacobian(f, s.x[0])


PROGRAMS = [gradient_penalty, second_derivatives, inner_steps, two_optimisers, there_and_back, attack, attribute, of_an_alias,
            an_optimiser_made_inside, of_an_input, of_an_input_with_a_result, a_result_only, returned, returned_alias, kept, frozen, cut_off, functional]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_eager(program: Callable[[World], Any], backend: str) -> None:
    ours, theirs = World(), World()
    compiled = fs.compile(program, backend=backend, fullgraph=True)
    for n in range(3):
        torch.manual_seed(n)
        got = compiled(ours)
        torch.manual_seed(n)
        wanted = program(theirs)
        same(got, wanted)
        for results in (got, wanted):       # what can be differentiated still can
            if isinstance(results, tuple) and isinstance(results[0], torch.Tensor) and results[0].requires_grad:
                results[0].sum().backward()
        same(ours.left(), theirs.left())


def used_before(s: World) -> Any:
    plain = s.x * 2
    s.x.requires_grad_()
    return (s.x * s.w).sum(), plain


def with_views(s: World) -> Any:
    z = s.x.clone()
    view = z[1:]
    z.requires_grad_()
    (z * z).sum().backward()
    return z.grad, view


def across_a_break(s: World) -> Any:
    z = (s.x + 1).requires_grad_()
    loss = (z * z * s.w).sum()
    fs.graph_break()
    loss.backward()
    return z.grad


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("program", [used_before, with_views, across_a_break], ids=lambda p: p.__name__)
def test_honest_breaks(program: Callable[[World], Any], backend: str) -> None:
    ours, theirs = World(), World()
    same(fs.compile(program, backend=backend)(ours), program(theirs))
    same(ours.left(), theirs.left())


def test_an_alias_of_an_input_shares_its_memory() -> None:
    s = World()
    z = fs.compile(returned_alias, fullgraph=True)(s)[1]
    assert z.data_ptr() == s.x[1:].data_ptr()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_errors_are_those_of_eager(fullgraph: bool) -> None:
    def result(w: torch.Tensor) -> None:
        (w * 2).requires_grad_(False)

    def integers(w: torch.Tensor) -> None:
        w.long().requires_grad_()

    for fn in (result, integers):
        told = []
        for run in (fn, fs.compile(fn, fullgraph=fullgraph)):
            with pytest.raises(RuntimeError) as error:
                run(torch.ones(3, requires_grad=True))
            told.append(str(error.value))
        same(*told)
