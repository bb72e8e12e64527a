"""Products with symbolic sizes, as older versions of torch need them: eager's values and layouts, no size fixed."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from firesteel.graph import products
from firesteel.graph.abstract import AbstractWorld
from firesteel.sym.env import ShapeEnv

SHAPES = [((5, 3, 4), (4, 6)), ((5, 3, 4), (4,)), ((4,), (5, 4, 6)), ((3, 4), (5, 4, 6)), ((5, 3, 4), (5, 4, 6)), ((2, 5, 3, 4), (5, 4, 6)),
          ((5, 3, 4), (1, 4, 6)), ((2, 1, 3, 4), (5, 4, 6)), ((2, 5, 3, 4), (4, 6))]


def hints(sizes):
    return [s.node.hint if isinstance(s, torch.SymInt) else s for s in sizes]


def pair(left, right, grad):
    return torch.randn(left, dtype=torch.float64, requires_grad=grad), torch.randn(right, dtype=torch.float64, requires_grad=grad)


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(products, "_has_symbols", lambda *tensors: True)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("left,right", SHAPES)
def test_matmul_has_eagers_values(left, right, grad, always):
    a, b = pair(left, right, grad)
    for x, y in ((a, b), (a.mT.contiguous().mT if a.dim() > 1 else a, b)):
        torch.testing.assert_close(products.matmul(x, y), x @ y)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("left,right", SHAPES)
def test_matmul_fixes_no_size(left, right, grad):
    real = pair(left, right, grad)
    world = AbstractWorld(ShapeEnv())
    a, b = (world.wrap(t, f"x{k}", ("dynamic",) * t.dim()) for k, t in enumerate(real))
    with world.active():
        out = products.matmul(a, b)
    want = real[0] @ real[1]
    assert hints(out.shape) == list(want.shape) and hints(out.stride()) == list(want.stride())
    assert all(isinstance(s, torch.SymInt) for s in out.shape)


def test_linear(always):
    x, w, b = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(products.linear(x, w), F.linear(x, w))
    torch.testing.assert_close(products.linear(x, w, b), F.linear(x, w, b))


@pytest.mark.parametrize("causal,mask,scale", [(True, None, None), (False, "bool", None), (False, "float", 0.3), (False, None, -0.2)])
def test_attention(causal, mask, scale, always):
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    given = {None: None, "bool": torch.ones(5, 7).tril(1).bool(), "float": torch.randn(5, 7, dtype=torch.float64)}[mask]
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(q, k, v, given, 0.0, causal, scale=scale)
        torch.testing.assert_close(products.attention(q, k, v, given, 0.0, causal, scale), want)
