"""Calls whose gradient is sparse are made for real; what stands around them is compiled."""
import copy

import pytest
import torch
import torch.nn.functional as F

import firesteel as fs


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()
    torch.manual_seed(0)


class Sparse(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(20, 4, sparse=True)
        self.bags = torch.nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, places, x):
        return self.linear(self.table(places) * x.sin() + self.bags(places[:, None])).relu().square().sum()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_tables_get_sparse_gradients(fullgraph):
    model = Sparse()
    twin, places = copy.deepcopy(model), torch.tensor([3, 7, 3, 19])
    compiled = fs.compile(twin, fullgraph=fullgraph)
    steps = [torch.optim.SparseAdam([m.table.weight, m.bags.weight], lr=0.1) for m in (model, twin)]
    for _ in range(2):
        x = torch.randn(4, 4)
        for fn, step in zip((model, compiled), steps):
            step.zero_grad()
            fn(places, x).backward()
            step.step()
        for one, other in zip(model.parameters(), twin.parameters()):
            assert one.grad.layout is other.grad.layout
            torch.testing.assert_close(other.grad.to_dense(), one.grad.to_dense())
            torch.testing.assert_close(other, one)
    assert fs.counters["native"]["kernels"] and not fs.counters["aot"]["untraceable_backwards"]


@pytest.mark.parametrize("before", [lambda a: a, lambda a: a * 2, torch.sin], ids=["leaf", "scaled", "sine"])
def test_gather(before):
    a, places = torch.randn(4, 5, requires_grad=True), torch.tensor([[1], [0], [4], [1]])
    fn = lambda a: torch.gather(before(a), 1, places, sparse_grad=True).exp()
    got, want = (torch.autograd.grad(f(a).sum(), a)[0] for f in (fs.compile(fn, fullgraph=True), fn))
    assert got.layout is want.layout
    torch.testing.assert_close(got.to_dense(), want.to_dense())


def test_without_gradients_they_are_compiled():
    weight, places = torch.randn(5, 3), torch.tensor([1, 2])
    fn = lambda weight: F.embedding(places, weight, sparse=True) * 2
    torch.testing.assert_close(fs.compile(fn, fullgraph=True)(weight), fn(weight))
    assert fs.counters["native"]["kernels"] == 1 and not fs.counters["aot"]["backwards_by_eager"]
