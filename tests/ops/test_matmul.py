"""Products.  On a CPU small ones are loops of ours, and of large batches every matrix has dense rows or columns before the library sees it; those of one row
are loops of a GPU's programs, here by the same loops on the CPU."""
from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tracing import trace

import firesteel as fs
from firesteel.loops.lower.graph import lower_graph
from firesteel.ops import matmul


@pytest.fixture(autouse=True)
def afresh():
    fs.reset()
    yield
    fs.reset()


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(matmul, "on_gpu", lambda x: True)


def weights(n, k, dtype=torch.bfloat16):
    return torch.randn(n, k).to(dtype)


def compare(fn, *args, calls):
    with torch.no_grad():
        got, want, exact = fs.compile(fn, fullgraph=True)(*args), fn(*args), fn(*(x.double() for x in args))
    assert got.stride() == want.stride() and got.dtype == want.dtype
    assert (got - exact).abs().max() <= (want - exact).abs().max() + exact.abs().max() * 2 ** -9
    assert fs.counters["native"]["library_calls"] == calls


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_by_weights_is_a_loop(dtype, bias):
    x, w, b = weights(1, 96, dtype), weights(40, 96, dtype), weights(1, 40, dtype)[0]
    compare(lambda x, w, b: F.linear(x, w, b if bias else None), x, w, b, calls=0)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_is_behind_the_product_is_in_its_loop():
    x, gate, up = weights(1, 64), weights(48, 64), weights(48, 64)
    compare(lambda x, gate, up: F.silu(x @ gate.t()) * (x @ up.t()), x, gate, up, calls=0)
    assert fs.counters["native"]["kernels"] == 1


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("a,b", [(weights(2, 64), weights(48, 64).t()), (weights(1, 64), weights(64, 48)), (weights(1, 64).float(), weights(48, 64).float().t())],
                         ids=["two rows", "rows are dense", "single precision"])
def test_other_products_are_calls(a, b):
    compare(torch.mm, a, b, calls=1)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_row_of_no_columns():
    compare(torch.mm, weights(1, 0), weights(3, 0).t(), calls=1)


# ---------------------------------------------------------------- on a CPU

LAYOUTS = {
    "rows": lambda *shape: torch.randn(shape),
    "columns": lambda *shape: torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2),
    "batch last": lambda *shape: torch.randn(*shape[-2:], *shape[:-2]).movedim((0, 1), (-2, -1)),
    "every other": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
    "one row": lambda *shape: torch.randn(*shape[:-2], 1, shape[-1]).expand(shape),
}
SIZES = [(1, 1, 1), (3, 4, 5), (16, 16, 16), (7, 40, 8), (2, 33, 9), (0, 3, 4), (3, 0, 4), (3, 4, 0), (5, 3, 1), (1, 16, 3)]


def same(fn, *args, dynamic=None):
    got, want = fs.compile(fn, fullgraph=True, dynamic=dynamic)(*args), fn(*args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert [r.stride() for r in got] == [r.stride() for r in want]


def calls():
    return fs.counters["native"]["library_calls"]


@pytest.mark.parametrize("left,right", itertools.product(LAYOUTS, repeat=2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_products_of_every_layout(left, right, dtype):
    def program(*pairs):
        return [part for a, b, c in pairs for part in (a @ b + 1, torch.baddbmm(c, a, b) if a.dim() == 3 else torch.addmm(c, a, b))]
    made = [(LAYOUTS[left](*batch, m, k), LAYOUTS[right](*batch, k, n), torch.randn(1, n)) for m, k, n in SIZES[::2] for batch in ((), (6,))]
    same(program, *[tuple(x.to(dtype) for x in row) for row in made], dynamic=left == right)


@pytest.mark.parametrize("m,k,n", SIZES)
def test_sizes_of_small_products(m, k, n):
    same(lambda a, b, c: [a @ b, torch.addmm(c, a, b), torch.addmm(c, a, b, beta=2, alpha=3)], torch.randn(m, k), torch.randn(k, n), torch.randn(n))


def test_small_products_are_fused_with_what_is_around_them():
    def program(a, b, c):
        for _ in range(3):
            a = torch.tanh(torch.addmm(c, a, b))
        return a.sum(0)
    with torch.no_grad():
        same(lambda *args: [program(*args)], torch.randn(8, 8), torch.randn(8, 8), torch.randn(8))
    assert calls() == 0


def test_larger_products_are_calls():
    with torch.no_grad():
        same(lambda a, b: [a @ b], torch.randn(65, 65), torch.randn(65, 65))
    assert calls() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.int64])
def test_products_of_other_dtypes_are_calls(dtype):
    a, b = (torch.randn(4, 4).mul(5).to(dtype) for _ in range(2))
    fs_result = fs.compile(torch.mm)(a, b)
    torch.testing.assert_close(fs_result, a @ b)
    assert calls() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("left,right", itertools.product(LAYOUTS, repeat=2))
def test_matrices_of_large_batches_are_dense(left, right, dtype):
    a, b = LAYOUTS[left](3, 20, 70).to(dtype), LAYOUTS[right](3, 70, 30).to(dtype)
    call = next(step.call for step in lower_graph(trace(torch.bmm, [a, b]).gm, [a, b]).steps if step.call and step.call.name == "bmm" and step.call.out)
    for view in call.args:
        (rows, columns), (down, along) = view.shape[1:], view.strides[1:]
        assert along == 1 and down >= columns or down == 1 and along >= rows
    got = fs.compile(torch.bmm)(a, b)
    torch.testing.assert_close(got, torch.bmm(a, b), rtol=2e-2, atol=2e-1 if dtype is torch.bfloat16 else 1e-4)


class Cell(nn.Module):
    """A recurrence of small products, with gradients through all of them."""

    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(5, 7), nn.Linear(7, 7, bias=False)

    def forward(self, xs):
        h = torch.zeros(xs.shape[1], 7)
        for x in xs:
            h = torch.tanh(self.inside(x) + self.outside(h))
        return h


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_small_products(dynamic):
    cell, results = Cell(), []
    for fn in (cell, fs.compile(cell, fullgraph=True, dynamic=dynamic)):
        cell.zero_grad()
        xs = torch.linspace(-1, 1, 4 * 6 * 5).reshape(4, 6, 5).requires_grad_()
        fn(xs).square().sum().backward()
        results.append([xs.grad, *(p.grad for p in cell.parameters())])
    torch.testing.assert_close(*results)
