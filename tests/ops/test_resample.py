"""Resampling as loops, forward and backward, in both formats of images."""
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


HOW = [{"scale_factor": 2.0}, {"scale_factor": (3.0, 0.5)}, {"scale_factor": 1.7}, {"size": (16, 12)}, {"size": (7, 13)}, {"size": (4, 3)}, {"size": (8, 9)},
       {"size": (1, 2)}, {"size": (8, 6)}, {"scale_factor": 1.7, "recompute_scale_factor": True}]


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_interpolation(mode, corners, layout):
    torch.manual_seed(0)
    for how in HOW:
        x = torch.randn(2, 4, 8, 6).contiguous(memory_format=layout)
        check(lambda x: F.interpolate(x * 2, mode=mode, align_corners=corners, **how), x, rtol=1e-4, atol=3e-5)      # noqa: B023


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_interpolation_of_one_element(mode):
    for corners in (False, True):
        check(lambda x: F.interpolate(x, size=(5, 3), mode=mode, align_corners=corners), torch.randn(2, 3, 1, 1))       # noqa: B023
        check(lambda x: F.interpolate(x, size=(1, 1), mode=mode, align_corners=corners), torch.randn(2, 3, 7, 6))       # noqa: B023


def test_interpolation_of_other_shapes():
    torch.manual_seed(0)
    for corners in (False, True):
        check(lambda x: F.interpolate(x, scale_factor=2.0, mode="linear", align_corners=corners), torch.randn(2, 3, 37))                  # noqa: B023
        check(lambda x: F.interpolate(x, size=(5, 4, 9), mode="trilinear", align_corners=corners), torch.randn(1, 2, 3, 4, 5))          # noqa: B023
        check(lambda x: F.interpolate(x, size=(33, 70), mode="bilinear", align_corners=corners), torch.randn(1, 2, 40, 50).transpose(2, 3))   # noqa: B023


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_interpolation_of_other_dtypes(dtype):
    torch.manual_seed(0)
    for mode in ("bilinear", "bicubic"):
        fn = lambda x: F.interpolate(x, size=(19, 23), mode=mode)      # noqa: B023  # called at once
        x = torch.randn(2, 3, 9, 31).to(dtype)
        got, want = fs.compile(fn)(x), fn(x)
        exact = fn(x.double())
        assert got.dtype == dtype and (got.double() - exact).abs().max() <= (want.double() - exact).abs().max() + 1e-12


def test_gradients_that_are_contiguous_whatever_the_layout():
    x = torch.randn(2, 4, 3, 4, 5).contiguous(memory_format=torch.channels_last_3d)
    check(lambda x: F.interpolate(x, scale_factor=2.0), x)
    check(lambda x: F.interpolate(x, scale_factor=2.0, mode="trilinear"), x)
    check(lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"), torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last))


def test_interpolation_of_symbolic_sizes():
    """One program, with its gradients; a size that happens to be kept is copied, infinities too."""
    for how in ({"size": (9, 28)}, {"scale_factor": 2.0}, {"scale_factor": 1.3}):
        compiled = fs.compile(lambda x, how=how: F.interpolate(x, mode="bilinear", **how), dynamic=True)
        for height, width in ((9, 5), (4, 28), (40, 7), (2, 2)):
            x = torch.randn(2, 3, height, width)
            x[0, 0, 1, 1] = torch.inf
            torch.testing.assert_close(compiled(x), F.interpolate(x, mode="bilinear", **how), equal_nan=True)
            gradients = []
            for fn in (compiled, lambda x, how=how: F.interpolate(x, mode="bilinear", **how)):
                given = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1)).requires_grad_()
                gradients += torch.autograd.grad(fn(given).square().sum(), given)
            torch.testing.assert_close(*gradients)


def test_interpolated_values_are_fused_with_their_neighbours():
    fs.reset()
    x = torch.randn(2, 4, 16, 16)
    with torch.no_grad():
        fn = lambda x: F.interpolate(x.relu(), scale_factor=2, mode="bilinear") + 1
        torch.testing.assert_close(fs.compile(fn)(x), fn(x))
    assert fs.counters["native"]["library_calls"] == 0
