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


def test_gradients_pass_through_all_rounds():
    """Also where only what the body reads outside has one, so that the first round takes a tensor without."""
    def looped(x, w):
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, (y * w).tanh()), (torch.tensor(0), x))[1] * x

    def plain(x, w):
        y = x
        for _ in range(3):
            y = (y * w).tanh()
        return y * x
    compiled = fs.compile(looped, fullgraph=True)
    for tracked in (False, True):
        x, w = STEP.clone().requires_grad_(tracked), (STEP + 1).requires_grad_()
        wanted = [x, w] if tracked else [w]
        first = [torch.autograd.grad(fn(x, w).sum(), wanted, create_graph=True) for fn in (compiled, plain)]
        torch.testing.assert_close(*first)
        torch.testing.assert_close(*(torch.autograd.grad(sum(g.sum() for g in grads), wanted) for grads in first))


def test_gradients_of_a_loop_of_no_round_and_of_many():
    compiled = fs.compile(lambda x: while_loop(lambda x: x.sum() < 50, lambda x: (x * 2,), (x,)), fullgraph=True)
    for scale in (1, 100, 0.01):
        x = (STEP * scale).requires_grad_()
        got = compiled(x)[0]
        (grad,) = torch.autograd.grad(got.sum(), x)
        torch.testing.assert_close(grad, (got / x).detach())
