"""torch.while_loop on data: condition and body in one graph, compiled once."""
import pytest
import torch
from torch._higher_order_ops.while_loop import while_loop

import firesteel as fs
from firesteel.testing import CompileCounter

STEP = torch.linspace(0.1, 0.4, 4)


def looped(i, x):
    i, x = while_loop(lambda i, x: (x.sum() < 100) & (i < 50), lambda i, x: (i + 1, x * 2 + STEP.sum()), (i, x + 1))
    return i, x.sin()


def plain(i, x):
    x = x + 1
    while (x.sum() < 100) & (i < 50):
        i, x = i + 1, x * 2 + STEP.sum()
    return i, x.sin()


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph(dynamic):
    compiled = fs.compile(looped, fullgraph=True, dynamic=dynamic)
    for n, start in ((4, 1.0), (4, 3.0), (4, 50.0), (5, 1.0), (7, 0.5)):
        x, i = torch.full((n,), start), torch.tensor(0)
        torch.testing.assert_close(compiled(i, x), plain(i, x))
    counter = CompileCounter()
    fs.compile(looped, backend=counter, fullgraph=True)(i, x)
    assert counter.frame_count == 1


def test_without_gradients_of_a_parameter():
    w = torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        ours = fs.compile(lambda x: while_loop(lambda x: x.sum() < 50, lambda x: (x + w,), (x * w,)), fullgraph=True)(STEP)
    want = STEP * w
    while want.sum() < 50:
        want = want + w
    torch.testing.assert_close(ours, (want.detach(),))


def test_gradients_make_it_the_python_that_it_means():
    x = STEP.clone().requires_grad_()
    got = fs.compile(lambda x: while_loop(lambda x: x.sum() < 50, lambda x: (x * 2,), (x,)))(x)[0]
    (grad,) = torch.autograd.grad(got.sum(), x)
    assert torch.equal(grad, (got / x).detach())
