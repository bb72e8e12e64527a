"""A use of a third-party package is a function of `compile`, which it calls where a user would call torch.compile; it returns what it computed.

    @use("einops", graphs=1)
    def test_patches(compile): ...

It runs twice from the same seeds: with a `compile` that does nothing, then with torch.compile after fs.install().  Values must be equal, and
graphs and breaks at most as many as said: steps that depend on data may break.  Skipped where the package is not installed;
`make test-packages` installs them all.
"""
import functools
import random

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

import firesteel as fs


def seeded(fn, *args):
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return fn(*args)


def assert_same(found, expected, rtol=1e-4, atol=1e-5):
    found, expected = tree_flatten(found), tree_flatten(expected)
    assert found[1] == expected[1]
    for have, want in zip(found[0], expected[0]):
        if isinstance(want, (torch.Tensor, float)):
            torch.testing.assert_close(have, want, rtol=rtol, atol=atol)
        else:
            assert have == want


def installed(fn):
    fs.reset()
    fs.counters.clear()
    fs.install()
    try:
        return seeded(fn, torch.compile)
    finally:
        fs.uninstall()


def use(*packages, graphs, breaks=0, rtol=1e-4, atol=1e-5):
    def make(fn):
        @pytest.mark.filterwarnings("ignore")
        @functools.wraps(fn)
        def test():
            for package in packages:
                pytest.importorskip(package)
            expected = seeded(fn, lambda model=None, **keywords: model if model is not None else lambda model: model)
            found = installed(fn)
            assert_same(found, expected, rtol, atol)
            assert sum(fs.counters["graph_break"].values()) <= breaks, dict(fs.counters["graph_break"])
            assert 0 < fs.counters["stats"]["unique_graphs"] <= graphs
            assert not fs.counters["suppressed"] and not fs.counters["recompile_limit"] and not fs.counters["eager_calls"]
        del test.__wrapped__        # pytest would take `compile` for a fixture
        return test
    return make


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def trained(module, step, count=3, lr=1e-2):
    """Losses and parameters after a few steps of SGD, whose steps are as large as the gradients differ."""
    optimizer, losses = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr), []
    for _ in range(count):
        loss = step()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in module.parameters()]
