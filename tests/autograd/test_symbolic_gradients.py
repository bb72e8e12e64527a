"""Symbolic sizes through ahead-of-time autograd: one compilation serves several sizes, with eager's values and gradients."""
import pytest
import torch
import torch.nn.functional as F

from firesteel.autograd import aot
from firesteel.autograd.symbols import environment, missing_symbols

PARTITIONERS = {"default": aot.default_partition, "min_cut": aot.min_cut_partition}

PROGRAMS = {
    "sin": lambda x: x.sin() * 2,
    "sum": lambda x: x.sin().sum(0),
    "mean": lambda x: (x * x).mean(),
    "matmul": lambda x: x @ x.t(),
    "view": lambda x: (x * 2).view(-1),
    "views": lambda x: (lambda y: (y, y.view(-1), y[1:]))(x * 2),
    "view_of_input": lambda x: (x.view(-1), x.t(), x * 2),
    "size_output": lambda x: (x * x.shape[0], x.shape[1]),
    "size_arithmetic": lambda x: x * (x.shape[0] * x.shape[1] + 1),
    "softmax": lambda x: F.softmax(x, -1),
    "cat": lambda x: torch.cat([x, x.sin()], 0),
    "expand": lambda x: x.sum(0, keepdim=True).expand(x.shape[0], -1) * x,
    "slice": lambda x: x[: x.shape[0] // 2] * 2,
    "layer_norm": lambda x: F.layer_norm(x, (x.shape[1],)),
}


def run(fn, x):
    x = x.clone().requires_grad_()
    outputs = fn(x)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    sum(o.square().sum() for o in outputs if isinstance(o, torch.Tensor)).backward()
    return outputs, x.grad


@pytest.mark.parametrize("partition", PARTITIONERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_sizes(name, partition):
    fn, graphs = PROGRAMS[name], []
    compiled = aot.function(fn, lambda gm, inputs: graphs.append(gm) or gm.forward, partition_fn=PARTITIONERS[partition], dynamic=True)
    for shape in ((4, 6), (6, 8), (10, 6), (6, 12)):
        x = torch.randn(*shape)
        want, want_grad = run(fn, x)
        got, got_grad = run(compiled, x)
        assert torch.allclose(got_grad, want_grad, atol=1e-5)
        for g, w in zip(got, want):
            if isinstance(w, torch.Tensor):
                assert torch.allclose(g, w, atol=1e-5) and g.stride() == w.stride()
            else:
                assert g == w
    assert len(graphs) == 2, "one forward and one backward"


def test_a_new_guard_compiles_again():
    graphs = []
    compiled = aot.function(lambda x: x * 2 if x.shape[0] > 5 else x * 3, lambda gm, inputs: graphs.append(gm) or gm.forward, dynamic=True)
    for n, factor in ((4, 3), (5, 3), (8, 2), (3, 3), (9, 2)):
        assert torch.equal(compiled(torch.ones(n)), torch.full((n,), float(factor)))
    assert len(graphs) == 2


def test_sizes_are_saved_as_ints():
    graphs = []
    compiled = aot.function(lambda x, w: (x.sum(0) * w).sum(), aot.nop, lambda gm, inputs: graphs.append(gm) or gm.forward, dynamic=True,
                            partition_fn=aot.min_cut_partition)
    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    compiled(x, w).backward()
    values = [node.meta["val"] for node in graphs[0].graph.nodes if node.op == "placeholder"]
    assert any(isinstance(v, torch.SymInt) for v in values)
    assert torch.allclose(x.grad, w.expand(4, 6)) and torch.allclose(w.grad, x.sum(0))


def test_second_order_with_symbols():
    compiled = aot.function(lambda x: (x ** 3).sum(), aot.nop, dynamic=True)
    for n in (4, 7):
        x = torch.randn(n, requires_grad=True)
        g, = torch.autograd.grad(compiled(x), x, create_graph=True)
        h, = torch.autograd.grad(g.sum(), x)
        assert torch.allclose(h, 6 * x)


def test_every_symbol_of_the_backward_can_be_read_from_its_inputs():
    graphs = []
    compiled = aot.function(lambda x: torch.cat([x, x, x]).exp().sum(), aot.nop, lambda gm, inputs: graphs.append(gm) or gm.forward, dynamic=True)
    x = torch.randn(4, requires_grad=True)
    compiled(x).backward()
    placeholders = [node for node in graphs[0].graph.nodes if node.op == "placeholder"]
    assert missing_symbols(graphs[0].graph.nodes, placeholders, environment(placeholders)) == []
    assert torch.allclose(x.grad, 3 * x.exp())
