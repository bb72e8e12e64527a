"""Decompositions of gradients have eager's values and strides, whatever the layouts of gradient, operand and target are."""
import itertools

import pytest
import torch
from tracing import trace

import firesteel as fs
from firesteel.graph.decomp import DECOMPOSITIONS
from firesteel.graph.trace import interpret

aten = torch.ops.aten
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "stepped": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t[:1].expand(t.shape),
}


def made(shape, layout, seed):
    return LAYOUTS[layout](torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1)


CALLS = {
    "binary_cross_entropy": lambda g, x, y: aten.binary_cross_entropy_backward.default(g, x, y, None, 0),
    "binary_cross_entropy of a sum": lambda g, x, y: aten.binary_cross_entropy_backward.default(g.sum(), x, y, y, 2),
    "log_sigmoid": lambda g, x, y: aten.log_sigmoid_backward.default(g, x - 0.5, torch.exp(-(x - 0.5).abs())),
    "_prelu_kernel": lambda g, x, y: aten._prelu_kernel_backward.default(g, x - 0.5, y),
    "mse_loss": lambda g, x, y: aten.mse_loss_backward.default(g, x, y, 0),
    "smooth_l1_loss": lambda g, x, y: aten.smooth_l1_loss_backward.default(g, x, y, 0, 0.5),
    "huber_loss": lambda g, x, y: aten.huber_loss_backward.default(g, x, y, 0, 0.5),
    "soft_margin_loss": lambda g, x, y: aten.soft_margin_loss_backward.default(g, x, y, 0),
    "nll_loss": lambda g, x, y: aten.nll_loss_backward.default(g.sum(), x.flatten(1), torch.zeros(len(x), dtype=torch.int64), None, 1, -100, y.sum()),
}


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_strides_of_gradients(name, shape):
    wrong = []
    for layouts in itertools.product(LAYOUTS, repeat=3):
        args = [made(shape, layout, seed) for seed, layout in enumerate(layouts)]
        traced = trace(lambda *args: CALLS[name](*args), args, decompositions=dict(DECOMPOSITIONS.items()))
        for found, expected in zip(*(r if isinstance(r, (tuple, list)) else (r,) for r in (interpret(traced.gm, *args), CALLS[name](*args)))):
            torch.testing.assert_close(found, expected)
            wrong += [f"{layouts}: {found.stride()}, eager {expected.stride()}"] if found.stride() != expected.stride() else []
    assert not wrong, wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_a_loss_over_images(layout):
    """Where the gradient made like the input is not contiguous, eager refuses."""
    def loss(x):
        return torch.nn.functional.nll_loss(x, torch.zeros(2, 4, 5, dtype=torch.int64))
    found = []
    for function in (loss, fs.compile(loss)):
        x = made((2, 3, 4, 5), layout, 0).requires_grad_()
        try:
            found.append(torch.autograd.grad(function(x), x)[0])
        except RuntimeError as error:
            found.append(str(error))
    if isinstance(found[0], str):
        assert found[1] == found[0]
    else:
        torch.testing.assert_close(found[1], found[0], check_stride=True)
