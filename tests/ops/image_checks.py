"""What the tests of pooling and resampling share: both formats of images, and a comparison with eager."""
from __future__ import annotations

import torch

import firesteel as fs

FORMATS = (torch.contiguous_format, torch.channels_last)


def check(function, x, library_calls=0, **tolerance):
    """Values, strides and gradients are eager's; so many calls of a library, forward and backward, none where loops compute all of it."""
    found = []
    before = fs.counters["native"]["library_calls"]
    for fn in (function, fs.compile(function, fullgraph=True)):
        given = x.detach().clone().requires_grad_()
        out = fn(given)
        grad, = torch.autograd.grad(out, given, torch.cos(out.detach()))
        found.append((out, out.stride(), grad, grad.stride()))
    torch.testing.assert_close(found[1], found[0], **tolerance)
    assert fs.counters["native"]["library_calls"] - before == library_calls
