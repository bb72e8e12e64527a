"""Products of one row, which a GPU's programs sum in loops of ours; here by the same loops on the CPU."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import firesteel as fs
from firesteel.ops import matmul


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    fs.reset()
    monkeypatch.setattr(matmul, "on_gpu", lambda x: True)
    with fs.config.patch(cache_dir=""):
        yield
    fs.reset()


def weights(n, k, dtype=torch.bfloat16):
    return torch.randn(n, k).to(dtype)


def compare(fn, *args, calls):
    with torch.no_grad():
        got, want, exact = fs.compile(fn, fullgraph=True)(*args), fn(*args), fn(*(x.double() for x in args))
    assert got.stride() == want.stride() and got.dtype == want.dtype
    assert (got - exact).abs().max() <= (want - exact).abs().max() + exact.abs().max() * 2 ** -9
    assert fs.counters["native"]["library_calls"] == calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_by_weights_is_a_loop(dtype, bias):
    x, w, b = weights(1, 96, dtype), weights(40, 96, dtype), weights(1, 40, dtype)[0]
    compare(lambda x, w, b: F.linear(x, w, b if bias else None), x, w, b, calls=0)


def test_what_is_behind_the_product_is_in_its_loop():
    x, gate, up = weights(1, 64), weights(48, 64), weights(48, 64)
    compare(lambda x, gate, up: F.silu(x @ gate.t()) * (x @ up.t()), x, gate, up, calls=0)
    assert fs.counters["native"]["kernels"] == 1


@pytest.mark.parametrize("a,b", [(weights(2, 64), weights(48, 64).t()), (weights(1, 64), weights(64, 48)), (weights(1, 64).float(), weights(48, 64).float().t())],
                         ids=["two rows", "rows are dense", "single precision"])
def test_other_products_are_calls(a, b):
    compare(torch.mm, a, b, calls=1)


def test_a_row_of_no_columns():
    compare(torch.mm, weights(1, 0), weights(3, 0).t(), calls=1)
