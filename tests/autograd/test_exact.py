"""Values that a comparison, an index, a branch or a tie sees are the same to the last bit wherever they are computed."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tracing import trace

import firesteel as fs
from firesteel.autograd import aot
from firesteel.autograd.exact import DECIDES, mark_exact

aten = torch.ops.aten


def exact_nodes(fn, *inputs: torch.Tensor) -> set[str]:
    gm = trace(fn, list(inputs)).gm
    mark_exact(gm)
    return {node.target.overloadpacket.__name__ for node in gm.graph.nodes if node.meta.get("exact") and node.op == "call_function"}


@pytest.mark.parametrize("fn,want", [
    (lambda x: x.tanh().exp(), set()),
    (lambda x: (x.sin() - x.sin().amax(1, keepdim=True)).exp(), set()),                        # a softmax: nothing is decided
    (lambda x: (x.sin() > 0, x.cos()), {"sin"}),
    (lambda x: torch.where(x.exp().tanh() == x.amax(), x.sin(), 0), {"exp", "tanh", "amax"}),
    (lambda x: (x * 2).floor(), {"mul"}),
    (lambda x: (x * 2).to(torch.int64), {"mul"}),
    (lambda x: torch.div(x.exp(), 2, rounding_mode="floor"), {"exp"}),
    (lambda x: x.exp().sort(1)[0], {"exp"}),
    (lambda x: x.exp().max(1)[1], {"exp"}),
    (lambda x: x.exp().view(torch.int16), {"exp"}),
    (lambda x: (x.exp() @ x.t()).tanh() > 0, {"mm", "tanh", "t"}),                               # not what goes into the product
    (lambda x: torch.zeros_like(x.exp(), dtype=torch.bool), set()),
])
def test_what_is_marked(fn, want):
    assert exact_nodes(fn, torch.randn(4, 4, dtype=torch.bfloat16)) - {"t"} == want - {"t"}


def test_tables_name_operators():
    assert DECIDES.of(aten.floor.default) and DECIDES.of(aten.sort.stable) and not DECIDES.of(aten.add.Tensor)


def masked_by_maximum(x):
    t = torch.tanh(x)
    return torch.where(t == t.amax(1, keepdim=True), t, torch.zeros_like(t))


def above_the_mean(x):
    t = torch.tanh(x)
    return t * (t >= t.mean(1, keepdim=True))


def whole_parts(x):
    t = torch.tanh(x) * 3
    return t.floor() + t.round() + t.to(torch.int64)


PROGRAMS = {
    "softplus amax": lambda x: F.softplus(x).amax(0), "gelu max": lambda x: F.gelu(x).max(1).values, "masked by maximum": masked_by_maximum,
    "argmax": lambda x: (lambda t: t.argmax(1) + t.max(1).values)(x.sigmoid()), "above the mean": above_the_mean, "whole parts": whole_parts,
    "wide maximum": lambda x: F.silu(x).float().amax(1), "chain": lambda x: (x * 1.7 + 0.3).tanh().exp().amin(0),
    "cummax": lambda x: torch.tanh(x * 1.7).cummax(1).values, "log_softmax amax": lambda x: torch.log_softmax(x, -1).amax(0),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients(name, dtype):
    fn = PROGRAMS[name]
    for shape, dynamic in (((9, 3), False), ((16, 40), None)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        results = []
        for run in (fn, fs.compile(lambda x: fn(x), dynamic=dynamic)):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            y.float().sum().backward()
            results.append((y.detach(), leaf.grad))
        for got, want in zip(results[1], results[0]):
            torch.testing.assert_close(got, want, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=2e-2 if dtype != torch.float32 else 1e-5)


def test_an_exact_reduction_is_not_computed_again():
    """Its sum would be added up in another order, and no element would be equal to the maximum any more."""
    saved = []

    def compiler(gm, inputs):
        saved.append([node for node in gm.graph.nodes if node.op == "call_function" and node.target is aten._log_softmax.default])
        return gm.forward
    x = torch.randn(9, 3, requires_grad=True)
    y = aot.function(lambda x: torch.log_softmax(x, -1).amax(0), fw_compiler=compiler, bw_compiler=compiler, partition_fn=aot.min_cut_partition)(x)
    y.sum().backward()
    assert saved[0] and not saved[1]
