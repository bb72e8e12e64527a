"""Leaves made inside: parameters and tensors with requires_grad=True are real, new and filled, as eager leaves them."""
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from harness import same
from torch import nn

import firesteel as fs

BACKENDS = ["eager", "aot_eager", "native"]


def used_only(x: torch.Tensor) -> Any:
    w = nn.Parameter(torch.ones(3))
    return F.linear(x, w[None])


def returned(x: torch.Tensor) -> Any:
    w = nn.Parameter(torch.arange(3.0) + 1)
    return F.linear(x, w[None]), w


def of_a_result(x: torch.Tensor) -> Any:
    w = nn.Parameter(x * 2)
    return (x * w).sum(), w, isinstance(w, nn.Parameter), w.is_leaf, w.requires_grad, w.grad


def without_gradient(x: torch.Tensor) -> Any:
    w = nn.Parameter(torch.ones(3), requires_grad=False)
    return (x * w).sum(), w


def of_an_input(x: torch.Tensor) -> Any:
    w = nn.Parameter(x)
    return (x * w).sum(), w


def written_later(x: torch.Tensor) -> Any:
    w = nn.Parameter(torch.empty(3))
    nn.init.constant_(w, 2.5)
    return (x * w).sum(), w


def two(x: torch.Tensor) -> Any:
    v, w = nn.Parameter(x.detach()), nn.Parameter(torch.ones(3))
    u = nn.Parameter(torch.ones(3))
    u.note = "mine"
    return (x * w + v * u).sum(), u, v, w, v is w, u is u, u.note


def transposed(x: torch.Tensor) -> Any:
    w = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    return (x @ w).sum(), w


def without_recording(x: torch.Tensor) -> Any:
    with torch.no_grad():
        w = nn.Parameter(torch.ones(3))
        y = w + 1
    return (x * w).sum(), w, y


def factory(x: torch.Tensor) -> Any:
    w = torch.full((3,), 2.0, requires_grad=True)
    v = torch.zeros_like(x, requires_grad=True)
    return (x * w + v).sum(), w, v, w.is_leaf


def hooked(x: torch.Tensor) -> Any:
    w = nn.Parameter(torch.ones(3))
    w.register_hook(lambda grad: grad * 10)
    return (x * w).sum(), w


def layer(x: torch.Tensor) -> Any:
    made = nn.Linear(3, 2)
    return made(x).sum(), made.weight, made.bias


PROGRAMS = [used_only, returned, of_a_result, without_gradient, of_an_input, written_later, two, transposed, without_recording, factory, hooked,
            layer]


def observed(fn: Callable[..., Any], x: torch.Tensor) -> Any:
    """Results, and the gradients of all tensors among them."""
    torch.manual_seed(0)
    out = fn(x)
    out = out if isinstance(out, tuple) else (out,)
    if out[0].requires_grad:
        out[0].sum().backward()
    tensors = [t for t in out if isinstance(t, torch.Tensor)]
    facts = [(type(t).__name__, t.requires_grad, t.is_leaf, t.stride(), t.grad if t.is_leaf else None, t.detach()) for t in tensors]
    return facts, x.grad, [t for t in out if not isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "differentiable"])
@pytest.mark.parametrize("program", PROGRAMS, ids=[p.__name__ for p in PROGRAMS])
def test_a_leaf_made_inside(program: Callable[..., Any], requires_grad: bool, backend: str) -> None:
    ours = fs.compile(program, fullgraph=True, backend=backend)
    for n in (1.0, 2.0):
        theirs, mine = (torch.tensor([n, 2.0, 3.0], requires_grad=requires_grad) for _ in range(2))
        same(observed(ours, mine), observed(program, theirs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_call_makes_new_ones(backend: str) -> None:
    ours = fs.compile(returned, fullgraph=True, backend=backend)
    made = [ours(torch.ones(3))[1] for _ in range(3)]
    with torch.no_grad():
        made[0].zero_()
    assert all(a is not b for a, b in itertools.combinations(made, 2))
    assert made[1].tolist() == made[2].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_over_an_input_shares_its_memory(backend: str) -> None:
    def program(x: torch.Tensor) -> Any:
        v, w = nn.Parameter(x, requires_grad=False), nn.Parameter(x)
        x.add_(1)
        return w * 2, w, v, v is w

    for fn in (program, fs.compile(program, fullgraph=True, backend=backend)):
        x = torch.ones(3)
        doubled, w, v, one = fn(x)
        assert doubled.tolist() == [4.0] * 3 and not one and v is not w
        assert w.data_ptr() == x.data_ptr() == v.data_ptr() and w.requires_grad and not v.requires_grad
        doubled.sum().backward()
        assert w.grad is not None and w.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_it_was_made_of_is_used_again(backend: str) -> None:
    def program(x: torch.Tensor) -> Any:
        data = x * 2
        w = nn.Parameter(data)
        data.add_(1)
        return w * x, w

    x = torch.arange(3.0)
    torch.testing.assert_close(fs.compile(program, backend=backend)(x), program(x))
    with pytest.raises(fs.errors.Unsupported, match=r"w = nn\.Parameter\(data\)"):
        fs.compile(program, backend=backend, fullgraph=True)(x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_across_a_break(backend: str) -> None:
    def program(x: torch.Tensor) -> Any:
        w = nn.Parameter(torch.ones(3))
        y = x * w
        fs.graph_break()
        return (y * w).sum(), w

    ours = fs.compile(program, backend=backend)
    same(observed(ours, torch.arange(3.0)), observed(program, torch.arange(3.0)))


def checkpointed(x: torch.Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda x: (x * nn.Parameter(torch.ones(3))).sum(), x, use_reentrant=False)


def differentiated(x: torch.Tensor) -> Any:
    return torch.func.grad(lambda x: (x * nn.Parameter(torch.ones(3))).sum())(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", [checkpointed, differentiated], ids=["checkpointed", "differentiated"])
def test_in_a_transformed_function(program: Callable[..., Any], backend: str) -> None:
    theirs, mine = (torch.arange(3.0, requires_grad=True) for _ in range(2))
    same(observed(fs.compile(program, backend=backend, fullgraph=program is checkpointed), mine), observed(program, theirs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", [of_a_result, of_an_input, factory], ids=["result", "input", "factory"])
def test_other_sizes(program: Callable[..., Any], backend: str) -> None:
    def sized(x: torch.Tensor) -> Any:
        return program(x[:3]) if program is factory else program(x)

    ours = fs.compile(sized, fullgraph=True, backend=backend)
    for n in (3, 4, 5):
        same(observed(ours, torch.arange(float(n))), observed(sized, torch.arange(float(n))))
