"""Nearest resampling as loops, forward and backward, in both formats of images."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import firesteel as fs

FORMATS = (torch.contiguous_format, torch.channels_last)


def check(function, x):
    """Values, strides and gradients are eager's, without a library call."""
    found = []
    for fn in (function, fs.compile(function, fullgraph=True)):
        given = x.detach().clone().requires_grad_()
        out = fn(given)
        grad, = torch.autograd.grad(out, given, torch.cos(out.detach()))
        found.append((out, out.stride(), grad, grad.stride()))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("how", [{"scale_factor": 2.0}, {"size": (16, 12)}, {"scale_factor": 1.5}, {"size": (7, 13)}, {"scale_factor": (3.0, 2.0)}, {"size": (4, 3)}])
def test_nearest(how, mode, layout):
    torch.manual_seed(0)
    check(lambda x: F.interpolate(x * 2, mode=mode, **how).sin(), torch.randn(2, 4, 8, 6).contiguous(memory_format=layout))


def test_nearest_of_other_shapes():
    torch.manual_seed(0)
    check(lambda x: F.interpolate(x, scale_factor=2.0), torch.randn(2, 3, 5))
    check(lambda x: F.interpolate(x, scale_factor=2.0), torch.randn(1, 2, 3, 4, 5))
    compiled = fs.compile(lambda x: F.interpolate(x, scale_factor=1.7), dynamic=True)
    for size in (5, 9, 300):
        x = torch.randn(1, 2, size, size + 1)
        torch.testing.assert_close(compiled(x), F.interpolate(x, scale_factor=1.7))
