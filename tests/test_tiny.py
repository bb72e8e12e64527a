"""Seconds before each commit: one small model through the whole path, static and dynamic, and one graph break."""
import pytest
import torch

import firesteel as fs


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()


def train(model, x):
    model.zero_grad()
    result = model(x)
    result.sum().backward()
    return [result.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_partitioned", "native"])
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_small_model_trains(backend, dynamic):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    compiled = fs.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
    for batch in (5, 7, 5):
        x = torch.randn(batch, 8)
        torch.testing.assert_close(train(compiled, x), train(model, x))


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_break_makes_one_split(backend, capsys):
    def f(x):
        y = x.sin() + 1
        print("between")
        return y.cos() * 2

    counter = fs.testing.CompileCounterWithBackend(backend)
    x = torch.randn(10)
    torch.testing.assert_close(fs.compile(f, backend=counter)(x), f(x))
    assert counter.frame_count == 2
    assert capsys.readouterr().out == "between\n" * 2
