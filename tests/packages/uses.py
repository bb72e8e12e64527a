"""A use of a third-party package is a function of `compile`, which it calls where a user would call torch.compile; it returns what it computed.

    @use("einops", graphs=1)
    def test_patches(compile): ...

It runs twice from the same seeds: with a `compile` that does nothing, then with torch.compile after fs.install().  Values must be equal, and
graphs and breaks at most as many as said: steps that depend on data may break.  Skipped where the package is not installed;
`make test-packages` installs them all.  With COUNT_USES=ours or =peer only graphs and breaks are counted and said (peer.py).
"""
import functools
import os
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


def by_peer(fn):
    """Under torch's own compiler, whose backend "eager" needs no C++ compiler."""
    whole = torch.compile

    def compile(model=None, *, fullgraph=False, dynamic=None, backend=None, mode=None, options=None):
        return whole(model, dynamic=dynamic, backend="eager")
    torch.compile = compile
    try:
        return seeded(fn, compile)
    finally:
        torch.compile = whole


def count(fn, who):
    counters = fs.counters
    if who == "ours":
        installed(fn)
    else:
        by_peer(fn)
        from torch._dynamo.utils import counters
    print(f"COUNTED {counters['stats']['unique_graphs']}/{sum(counters['graph_break'].values())}", flush=True)
    for text, times in counters["graph_break"].items():
        print("BREAK", times, text.splitlines()[:4], flush=True)


def use(*packages, graphs, breaks=0, rtol=1e-4, atol=1e-5):
    def make(fn):
        @pytest.mark.filterwarnings("ignore")
        @functools.wraps(fn)
        def test():
            for package in packages:
                pytest.importorskip(package)
            if who := os.environ.get("COUNT_USES"):
                count(fn, who)
                return
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
