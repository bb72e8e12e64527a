"""Forward-mode AD that is entered inside: one graph, tangents and their gradients as eager has them, and no level left behind."""
import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import nn

import firesteel as fs

BACKENDS = ["eager", "aot_eager", "native"]
LAYER = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))


def tangent(x, t):
    with fwAD.dual_level():
        out = LAYER(fwAD.make_dual(x, t))
        parts = fwAD.unpack_dual(out)
        return parts.tangent, parts.primal * 2


def columns(x, t):
    found = []
    for i in range(3):
        with fwAD.dual_level():
            dual = fwAD.make_dual(x, torch.zeros_like(x).index_fill(1, torch.tensor(i), 1.0))
            found.append(fwAD.unpack_dual((dual * 2 * dual.sin() + 1).sigmoid())[1])
    return torch.stack(found)


def not_dual(x, t):
    with fwAD.dual_level() as level:
        dual = fwAD.make_dual(x, t)
        nothing = fwAD.unpack_dual(x * 2).tangent
        seen = dual.exp()
    return nothing is None, level, seen * 2


def caught(x, t):
    try:
        with fwAD.dual_level():
            dual = fwAD.make_dual(x, t)
            raise ValueError
    except ValueError:
        return dual.detach() * x


def with_gradients(x, t):
    with torch.no_grad():
        y = x + 1
    with fwAD.dual_level():
        primal, moved = fwAD.unpack_dual(torch.linalg.norm(fwAD.make_dual(x, t), dim=1).exp())
    return primal + moved, y


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", [tangent, columns, not_dual, caught, with_gradients], ids=lambda p: p.__name__)
def test_one_graph(program, backend):
    fs.reset()
    compiled = fs.compile(program, backend=backend, fullgraph=True)
    for seed in range(2):
        torch.manual_seed(seed)
        x, t = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        results = []
        for fn in (program, compiled):
            out = torch.utils._pytree.tree_leaves(fn(x, t))
            loss = sum(part.pow(2).sum() for part in out if isinstance(part, torch.Tensor) and part.requires_grad)
            results.append((out, torch.autograd.grad(loss, [x, t], allow_unused=True)))
        torch.testing.assert_close(results[1], results[0])
        assert fwAD._current_level == -1
    assert fs.counters["stats"]["unique_graphs"] == 1


def test_a_break_inside_is_made_where_the_block_is_entered():
    def f(x, t):
        y = x * 2
        with fwAD.dual_level():
            dual = fwAD.make_dual(y, t).sin()
            fs.graph_break()
            return fwAD.unpack_dual(dual).tangent
    x, t = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(fs.compile(f)(x, t), f(x, t))
    assert fwAD._current_level == -1


def test_a_level_of_the_caller_s_stays():
    compiled = fs.compile(lambda x: x.sin() * 2)
    x, t = torch.randn(3), torch.randn(3)
    with fwAD.dual_level():
        out = fwAD.unpack_dual(compiled(fwAD.make_dual(x, t))).tangent
        assert fwAD._current_level == 0
        torch.testing.assert_close(out, 2 * x.cos() * t)


def test_a_failure_leaves_no_level():
    def f(x, t):
        with fwAD.dual_level():
            return fwAD.unpack_dual(fwAD.make_dual(x, t).sin()).tangent

    def backend(gm, inputs):
        raise ValueError("no")
    with pytest.raises(fs.errors.BackendError):
        fs.compile(f, backend=backend)(torch.ones(2), torch.ones(2))
    assert fwAD._current_level == -1
