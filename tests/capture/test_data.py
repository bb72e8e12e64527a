"""tensor.data = other inside of the captured function: one graph, and whoever holds the tensor or its old memory sees what eager leaves."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import firesteel as fs

BACKENDS = ["eager", "aot_eager", "native"]


def swapped(p, q):
    p.data, q.data = q.data, p.data
    return p * 2 + q


def shared_with_what_was_stored(p, q):
    p.data = q
    q.add_(1)
    return p * 2, q


def written_through_the_tensor(p, q):
    y = q * 2
    p.data = y
    p.add_(1)
    return p * 2, y + 0, y


def old_memory_is_kept(p, q):
    part, old = p[:2], p.data
    p.data = q * 3
    p.mul_(2)
    return part, old + 1, p


def made_inside(p, q):
    y = p * 2
    y.data = torch.ones_like(q)
    return y + 1, y


PROGRAMS: list[Callable[..., Any]] = [swapped, shared_with_what_was_stored, written_through_the_tensor, old_memory_is_kept, made_inside]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=[p.__name__ for p in PROGRAMS])
def test_without_gradients(program, backend):
    def run(fn):
        p, q = torch.arange(3.0), torch.full((3,), 5.0)
        old, seen = p.data, []
        for _ in range(3):
            seen.append([t.clone() for t in torch.utils._pytree.tree_leaves(fn(p, q))])
        return seen, p, q, old

    torch.testing.assert_close(run(fs.compile(program, backend=backend, fullgraph=True)), run(program))


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameter_gets_the_gradient_of_both_contents(backend):
    def step(p, x):
        y = (p * p * x).sum()
        p.data = p.data * 3
        return y + (p * p * x).sum()

    def run(fn):
        p, x = torch.nn.Parameter(torch.ones(3)), torch.arange(3.0)
        old = p.data
        for _ in range(2):
            fn(p, x).backward()
        return p.grad, p.data, old

    torch.testing.assert_close(run(fs.compile(step, backend=backend, fullgraph=True)), run(step))


@pytest.mark.parametrize("change", [lambda q: q.double(), lambda q: torch.cat([q, q])], ids=["dtype", "size"])
def test_other_metadata(change):
    """Of a tensor without gradients; a parameter breaks once."""
    def f(p, q):
        p.data = change(q + 1)
        return p * 2

    for make in (torch.clone, torch.nn.Parameter):
        fs.reset()
        p, expected = make(torch.ones(3)), make(torch.ones(3))
        torch.testing.assert_close(fs.compile(f, backend="eager", fullgraph=make is torch.clone)(p, torch.ones(3)), f(expected, torch.ones(3)))
        torch.testing.assert_close(p, expected)
        assert sum(fs.counters["graph_break"].values()) == (make is torch.nn.Parameter)
