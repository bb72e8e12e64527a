"""A graph traced with symbolic sizes computes what eager computes, for other sizes too."""
import operator

import pytest
import torch
import torch.nn.functional as F
from graph_compare import fresh_copy
from tracing import trace

import firesteel as fs
from firesteel.errors import InternalError
from firesteel.graph import sizes
from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.decomp import core_decompositions
from firesteel.graph.passes import clean
from firesteel.graph.trace import TraceWorld
from firesteel.graph.verify import verify
from firesteel.sym.env import ShapeEnv
from firesteel.sym.symint import to_symint

aten = torch.ops.aten


def grads(fn):
    def run(*tensors):
        out = fn(*tensors)
        outs = out if isinstance(out, (list, tuple)) else [out]
        loss = sum(o.float().square().sum() for o in outs if o.requires_grad)
        return [*outs, *torch.autograd.grad(loss, [t for t in tensors if t.requires_grad])]
    return run


def r(*shape, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(grad)


PROGRAMS = {
    "mlp": (lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda n: [r(n, 6), r(5, 6), r(5)]),
    "norms": (lambda x, w: F.layer_norm(F.softmax(x, -1), (6,), w), lambda n: [r(n, 3, 6), r(6)]),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), lambda n: [r(n, 3, 4, 4), r(3), r(3)]),
    "loss": (lambda x, t: F.cross_entropy(x, t, reduction="mean"), lambda n: [r(n, 5), torch.arange(n) % 5]),
    "views": (lambda x: x.view(-1, 2, 3).transpose(0, 1)[:, 1:].reshape(2, -1), lambda n: [r(n, 6)]),
    "joins": (lambda x, y: torch.cat([x, y * 2], 0)[: x.shape[0] + 1], lambda n: [r(n, 4), r(n, 4)]),
    "means": (lambda x: x.mean() + x.var(0).sum() + x.sum() / x.shape[0], lambda n: [r(n, 4)]),
    "writes": (lambda x: _writes(x), lambda n: [r(n, 4)]),
    "attention": (lambda x: _attention(x), lambda n: [r(2, n, 48)]),
    "ranges": (lambda x: x + torch.arange(x.shape[0])[:, None] + torch.ones(x.shape[0], 1), lambda n: [r(n, 4)]),
    "split": (lambda x: torch.cat(x.split([2, x.shape[0] - 2]), 0) + x.flip(0), lambda n: [r(n, 4)]),
    "pool": (lambda x: F.max_pool2d(F.pad(x, (1, 1)), 2), lambda n: [r(n, 2, 6, 6)]),
}


def _writes(x):
    y = x * 2
    y[1:].mul_(3)
    y[:, 0] = 1.0
    return y.t()


def _attention(x):
    q, k, v = (t.view(2, x.shape[1], 2, 8).transpose(1, 2) for t in x.split(16, 2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, x.shape[1], 16)


def traced_with(program, size, decompositions):
    fn, make = PROGRAMS[program]
    world = AbstractWorld(ShapeEnv())
    tensors, others = make(size), make(size + 1)
    dims = [tuple("dynamic" if a != b else "static" for a, b in zip(t.shape, o.shape)) for t, o in zip(tensors, others)]
    inputs = [world.wrap(t, f"x{i}", d) for i, (t, d) in enumerate(zip(tensors, dims))]
    return trace(grads(fn), inputs, decompositions=decompositions), world


@pytest.mark.parametrize("table", ["plain", "core"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_graph_for_many_sizes(program, table):
    traced, world = traced_with(program, 8, core_decompositions() if table == "core" else None)
    verify(traced.gm, "joint")
    clean(traced.gm)
    verify(traced.gm, "joint")
    fn, make = PROGRAMS[program]
    for size in (8, 5, 13):
        tensors = make(size)
        found = traced.gm(*[t.detach() for t in tensors])
        expected = grads(fn)(*[fresh_copy(t) for t in tensors])
        for got, want in zip(found, expected):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-5)
            assert got.stride() == want.stride()
    guards = [g.text() for g in world.env.guards()]
    assert not any("== 8" in g for g in guards), f"the size was fixed: {guards}"


def test_sizes_are_read_once_and_computed_once():
    def fn(x):
        n = x.shape[0]
        return [torch.zeros(n * 2), torch.ones(n * 2 + 1), x.new_zeros(n * 2)]
    world = AbstractWorld(ShapeEnv())
    traced = trace(fn, [world.wrap(torch.randn(8, 3), "x", ("dynamic", "static"))])
    assert len(traced.gm.graph.find_nodes(op="call_function", target=aten.sym_size.int)) == 1
    assert len(traced.gm.graph.find_nodes(op="call_function", target=operator.mul)) == 1
    assert [tuple(t.shape) for t in traced.gm(torch.zeros(5, 3))] == [(10,), (11,), (10,)]


def test_an_int_input_is_a_size():
    world = AbstractWorld(ShapeEnv())
    n = to_symint(world.env.create_symbol(8, "n"), world.env)
    traced = trace(lambda x, n: [torch.zeros(n + 1) + x], [world.wrap(torch.randn(1), "x", None), n])
    assert traced.gm(torch.zeros(1), 4)[0].shape == (5,)


def test_a_symbol_from_nowhere_is_an_internal_error():
    world = AbstractWorld(ShapeEnv())
    stray = world.env.create_symbol(8, "elsewhere")
    with pytest.raises(InternalError, match="not known from any input"):
        trace(lambda x: [torch.zeros(to_symint(stray, world.env))], [world.wrap(torch.randn(3), "x", None)])


def normed(x, w):
    y = F.layer_norm(x.t(), (x.shape[0],)) @ w
    return y.reshape(-1)[:x.shape[1]].sum(), y.permute(1, 0) * 2, x.split(2)[0].cumsum(0), w.unfold(0, 2, 1)


@pytest.mark.parametrize("wanted", [(0,), (1, 3), (0, 1, 2, 3)])
def test_nobody_asks_for_sizes_outside_of_an_environment(wanted, monkeypatch):
    """Who answers is said by each dispatch, and by `asking` elsewhere; here it is forgotten behind each dispatch, so that a question outside fails."""
    for world in (AbstractWorld, TraceWorld):
        def run(self, *args, _run=world.run):
            with sizes.asking(sizes.current.env):
                return _run(self, *args)
        monkeypatch.setattr(world, "run", run)
    monkeypatch.setattr(sizes.current, "env", None)
    compiled = fs.compile(normed, dynamic=True)
    for n in (4, 6):
        found = []
        for function in (normed, compiled):
            x, w = (torch.linspace(-1, 2, m * n, dtype=torch.float64).view(n, m).requires_grad_() for m in (5, 3))
            results = function(x * 1, w * 1)
            first = torch.autograd.grad(sum(results[k].sum() for k in wanted), (x, w), create_graph=True, allow_unused=True)
            found.append([*first, *torch.autograd.grad(sum((g * g).sum() for g in first if g is not None), (x, w), allow_unused=True)])
        for got, want in zip(found[1], found[0]):
            assert (got is None) == (want is None)
            torch.testing.assert_close(got, want)
