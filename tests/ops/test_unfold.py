"""Patches of images as columns and back, as loops, forward and backward."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from image_checks import FORMATS, check

import firesteel as fs

HOW = [(3, 1, 1, 1), (2, 1, 0, 2), ((3, 2), 1, (1, 0), (2, 1)), ((1, 4), 1, 0, 3)]


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("kernel, dilation, padding, stride", HOW)
def test_patches(kernel, dilation, padding, stride, layout):
    torch.manual_seed(0)
    check(lambda x: F.unfold(x * 2, kernel, dilation, padding, stride).sin(), torch.randn(2, 3, 9, 8).contiguous(memory_format=layout))
    check(lambda x: F.unfold(x, kernel, dilation, padding, stride), torch.randn(3, 7, 8), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel, dilation, padding, stride", HOW)
def test_columns_become_images(kernel, dilation, padding, stride):
    torch.manual_seed(0)
    columns = F.unfold(torch.randn(2, 3, 9, 8), kernel, dilation, padding, stride)
    check(lambda x: F.fold(x * 2, (9, 8), kernel, dilation, padding, stride), columns)
    check(lambda x: F.fold(x, (9, 8), kernel, dilation, padding, stride), columns.transpose(1, 2).contiguous().transpose(1, 2))


def test_other_dtypes():
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.bool):
        x = (torch.randn(2, 3, 9, 8) * 2).to(dtype)
        torch.testing.assert_close(fs.compile(lambda x: F.unfold(x, 3, padding=1))(x), F.unfold(x, 3, padding=1), rtol=0, atol=0)
    with pytest.raises(NotImplementedError):
        fs.compile(lambda x: F.unfold(x, 3))(torch.ones(1, 4, 4, dtype=torch.int64))
    with pytest.raises(RuntimeError):
        fs.compile(lambda x: F.fold(x, (9, 8), 3))(torch.ones(1, 9, 41))


def test_symbolic_sizes():
    compiled = fs.compile(lambda x: F.fold(F.unfold(x, 3, padding=1, stride=2).relu(), x.shape[-2:], 3, padding=1, stride=2), dynamic=True)
    for size in (5, 8, 30):
        x = torch.randn(2, 3, size, size + 1)
        torch.testing.assert_close(compiled(x), F.fold(F.unfold(x, 3, padding=1, stride=2).relu(), x.shape[-2:], 3, padding=1, stride=2))


def test_a_product_reads_the_columns():
    x, weight = torch.randn(2, 3, 9, 8), torch.randn(5, 27)
    torch.testing.assert_close(fs.compile(lambda x, w: w @ F.unfold(x, 3, padding=1))(x, weight), weight @ F.unfold(x, 3, padding=1))
