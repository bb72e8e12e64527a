"""Reductions over a run of memory that a kept dimension continues: two sweeps, with eager's values."""
import pytest
import torch

import firesteel as fs
from firesteel.graph.spec import Spec, contiguous_strides
from firesteel.ops.reduce import _far_dims

IMAGE = (2, 3, 4, 5, 6)         # groups of four channels
CHANNELS_LAST = (360, 4, 1, 72, 12)


def spec(shape, strides):
    return Spec(shape, strides, 0, torch.float32, torch.device("cpu"))


def test_what_is_reduced_first():
    assert _far_dims(spec(IMAGE, CHANNELS_LAST), {2, 3, 4}) == [4, 3]
    assert _far_dims(spec(IMAGE, contiguous_strides(IMAGE)), {2, 3, 4}) == []       # one run
    assert _far_dims(spec(IMAGE, CHANNELS_LAST), {3, 4}) == []                      # memory runs along what is kept
    assert _far_dims(spec(IMAGE, CHANNELS_LAST), {1, 2, 3, 4}) == []                # nothing kept continues the run
    assert _far_dims(spec((2, 3, 100, 5, 6), (9000, 100, 1, 1800, 300)), {2, 3, 4}) == []       # a long run


REDUCED = {
    "sum": lambda x: x.sum((2, 3, 4)),
    "mean": lambda x: (x * 2).mean((2, 3, 4), keepdim=True) if x.is_floating_point() else x.sum((2, 4)),
    "amax": lambda x: x.amax((2, 3, 4)),
    "wide": lambda x: x.sum((2, 3, 4), dtype=torch.float64) if x.dtype != torch.bool else x.all(4).all(3),
    "any": lambda x: (x > 1).any(2).any(-1) | (x > 2).amax((2, 3, 4)).unsqueeze(-1),
    "count": lambda x: torch.count_nonzero(x, (2, 3, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", REDUCED)
def test_equals_eager(name, dtype):
    torch.manual_seed(0)
    x = (torch.randn(2, 5, 6, 3, 4) * 2).to(dtype).permute(0, 3, 4, 1, 2)
    assert x.stride() == CHANNELS_LAST
    torch.testing.assert_close(fs.compile(REDUCED[name])(x), REDUCED[name](x))


def test_group_norm_of_a_channels_last_image():
    torch.manual_seed(0)
    norm = torch.nn.GroupNorm(3, 12)
    x = torch.randn(2, 12, 5, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    results = []
    for fn in (norm, fs.compile(norm)):
        out = fn(x)
        results.append((out, out.stride(), *torch.autograd.grad(out.sin().sum(), [x, *norm.parameters()])))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_a_sum_of_negative_zeros_is_zero(n):
    x = torch.full((300, n), -0.0)

    def function(x):
        return x.sum(-1), x.sum(0), x.mean(-1), x.cumsum(-1), x.prod(-1)

    for got, want in zip(fs.compile(function)(x), function(x), strict=True):
        assert torch.equal(got.signbit(), want.signbit())
