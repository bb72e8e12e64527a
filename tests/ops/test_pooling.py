"""Average pooling as loops, forward and backward, in both formats of images."""
from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from image_checks import FORMATS, check

import firesteel as fs


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("kernel, stride, padding", [(2, None, 0), (3, 2, 1), (3, 1, 1), ((2, 3), (3, 2), (1, 0)), (1, 2, 0)])
def test_averages(kernel, stride, padding, layout):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 9, 8).contiguous(memory_format=layout)
    for ceil, include, divisor in itertools.product((False, True), (False, True), (None, 3)):
        check(lambda x: F.avg_pool2d(x * 1.5, kernel, stride, padding, ceil, include, divisor), x)


def test_averages_of_other_shapes():
    torch.manual_seed(0)
    check(lambda x: F.avg_pool3d(x, 2, 1), torch.randn(2, 3, 4, 5, 4))
    check(lambda x: F.avg_pool1d(x, 3, 2, 1), torch.randn(2, 3, 8))
    check(lambda x: F.avg_pool2d(x, 2), torch.randn(3, 8, 6).bfloat16())
    check(lambda x: F.avg_pool2d(x, 7, 1), torch.randn(1, 2, 9, 9), library_calls=2)      # a large window is the library's


def test_averages_of_symbolic_sizes():
    compiled = fs.compile(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), dynamic=True)
    for size in (7, 10, 12):
        x = torch.randn(2, 3, size, size + 1)
        torch.testing.assert_close(compiled(x), F.avg_pool2d(x, 3, 2, 1, count_include_pad=False))
