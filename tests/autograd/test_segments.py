"""Graphs that are compiled in stretches: each knows the sizes that it uses, also where nothing that it reads has them."""
import pytest
import torch

import firesteel as fs


def folded(x, w):
    """Returns what it goes on with, so it is cut there; the second stretch reads sizes that are computed from the input's."""
    y = (x * w).unfold(0, 4, 2).contiguous()
    return y, y.sum(1) * x.shape[0]


def hooked(x, w):
    y = torch.nn.functional.pad((x * w)[::3], (1, 0))
    y.register_hook(lambda g: g * 2)
    return y.cumsum(0) + x.shape[0]


@pytest.mark.parametrize("program", [folded, hooked], ids=lambda p: p.__name__)
@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_sizes_reach_every_stretch(program, backend):
    compiled = fs.compile(program, backend=backend, dynamic=True)
    fs.counters.clear()
    for n in (9, 12, 20, 31):
        found = []
        for fn in (program, compiled):
            x, w = torch.arange(float(n)).requires_grad_(), torch.full((), 0.5, requires_grad=True)
            out = fn(x, w)
            sum(t.square().sum() for t in (out if isinstance(out, tuple) else (out,))).backward()
            found.append((out, x.grad, w.grad))
        torch.testing.assert_close(found[1], found[0])
    assert fs.counters["stats"]["unique_graphs"] == 1


def test_a_view_of_a_written_tensor_goes_into_a_stretch():
    def program(x, m):
        y = x * 2
        view = y[:, :2]
        y.mul_(3)
        return y, torch.where(m, view, 0.0).sum() + y.sum()

    def run(fn):
        x = torch.ones(3, 4, requires_grad=True)
        first, second = fn(x, torch.ones(3, 2, dtype=torch.bool))
        (first.sum() + second).backward()
        return first, second, x.grad

    torch.testing.assert_close(run(fs.compile(program)), run(program))
