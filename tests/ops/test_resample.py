"""Nearest resampling as loops, forward and backward, in both formats of images."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from image_checks import FORMATS, check

import firesteel as fs


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("how, whole", [({"scale_factor": 2.0}, True), ({"size": (16, 12)}, True), ({"scale_factor": (3.0, 2.0)}, True),
                                        ({"scale_factor": 1.5}, False), ({"size": (7, 13)}, False), ({"size": (4, 3)}, False)])
def test_nearest(how, whole, mode, layout):
    """By other than whole factors the gradient is the library's."""
    torch.manual_seed(0)
    check(lambda x: F.interpolate(x * 2, mode=mode, **how).sin(), torch.randn(2, 4, 8, 6).contiguous(memory_format=layout), 0 if whole else 1)


def test_nearest_of_other_shapes():
    torch.manual_seed(0)
    check(lambda x: F.interpolate(x, scale_factor=2.0), torch.randn(2, 3, 5))
    check(lambda x: F.interpolate(x, scale_factor=2.0), torch.randn(1, 2, 3, 4, 5))
    compiled = fs.compile(lambda x: F.interpolate(x, scale_factor=1.7), dynamic=True)
    for size in (5, 9, 300):
        x = torch.randn(1, 2, size, size + 1)
        torch.testing.assert_close(compiled(x), F.interpolate(x, scale_factor=1.7))


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_that_have_another_factor_than_the_scale(dynamic, layout):
    """8 rows by 1.1 are 8: eager's kernel for small images copies them, its others do not."""
    for scale in (1.1, 2.05):
        compiled = fs.compile(lambda x, scale=scale: F.interpolate(x, scale_factor=scale), dynamic=dynamic)
        for shape in ((1, 4, 8, 16), (1, 2, 9, 150), (2, 4, 40, 3)):
            x = torch.randn(shape).contiguous(memory_format=layout)
            assert torch.equal(compiled(x), F.interpolate(x, scale_factor=scale)), (scale, shape)
    x = torch.randn(2, 3, 8)
    assert torch.equal(fs.compile(lambda x: F.interpolate(x, scale_factor=1.1))(x), F.interpolate(x, scale_factor=1.1))
