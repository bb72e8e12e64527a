"""Sums of products as one product: weights that are used several times."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tracing import trace

import firesteel as fs
from firesteel.graph.sums import join_products

aten = torch.ops.aten


def products(function, *inputs) -> tuple[int, int]:
    """How many products a graph has before and after."""
    gm = trace(function, list(inputs)).gm
    before = len(gm.graph.find_nodes(op="call_function", target=aten.mm.default))
    join_products(gm)
    gm.graph.lint()
    return before, len(gm.graph.find_nodes(op="call_function", target=aten.mm.default))


def summed(*pairs):
    return sum((a.t() @ b for a, b in pairs[1:]), pairs[0][0].t() @ pairs[0][1])


def pairs(count: int, deep: int = 4, rows: int = 16, columns: int = 12) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(deep + n % 2, width) for n in range(count) for width in (rows, columns)]


@pytest.mark.parametrize("count, left", [(2, 2), (3, 1), (7, 1)])
def test_several_are_one(count, left):
    given = pairs(count)
    assert products(lambda *x: summed(*zip(x[::2], x[1::2])), *given) == (count, left)


def test_transposed_products_and_other_terms_are_added():
    given = pairs(4)

    def function(*x):
        a, b, c, d = (p.t() @ q for p, q in zip(x[::2], x[1::2]))
        return (a + b.t().t() + c + x[0][:1].t() * x[1][:1] + d).cos()
    torch.testing.assert_close(fs.compile(function)(*given), function(*given), rtol=1e-4, atol=1e-5)


def test_what_others_read_or_what_is_deep_stays():
    given = pairs(4)

    def shared(*x):
        parts = [p.t() @ q for p, q in zip(x[::2], x[1::2])]
        return parts[0] + parts[1] + parts[2] + parts[3], parts[1], parts[2]
    assert products(shared, *given) == (4, 4)
    assert products(lambda *x: summed(*zip(x[::2], x[1::2])), *pairs(4, deep=64)) == (4, 4)


class Steps(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRUCell(6, 24)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 24)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return F.softmax(h, 1)


def test_gradients_of_a_recurrent_cell():
    torch.manual_seed(0)
    model, x = Steps(), torch.randn(3, 6, 6, requires_grad=True)
    found = []
    for fn in (model, fs.compile(model, fullgraph=True)):
        out = fn(x)
        grads = torch.autograd.grad(out.sin().sum(), [x, *model.parameters()])
        found.append((out, *grads, [g.stride() for g in grads]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
