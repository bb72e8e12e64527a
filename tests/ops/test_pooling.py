"""Pooling as loops, forward and backward, in both formats of images."""
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


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("kernel, stride, padding", [(7, 1, 0), (5, 1, 2), (9, 3, 4), ((1, 11), (2, 1), (0, 5)), ((4, 3), (4, 3), 0), ((12, 11), 1, 0)])
def test_averages_of_large_windows(kernel, stride, padding, layout):
    """One dimension after the other; of one whole image at once."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 11).contiguous(memory_format=layout)
    for ceil, include in itertools.product((False, True), (False, True)):
        check(lambda x: F.avg_pool2d(x.tanh(), kernel, stride, padding, ceil, include), x)
        check(lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, include, -3), x)
    check(lambda x: F.avg_pool1d(x, 25, 1, 12), torch.randn(2, 3, 40))
    check(lambda x: F.avg_pool3d(x, 3, 2, 1), torch.randn(2, 3, 5, 6, 7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_large_windows_are_summed_in_float32_at_least(dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 20, 21, dtype=torch.float64).to(dtype)
    for fn in (lambda x: F.avg_pool2d(x, 9, 1, 4), lambda x: F.adaptive_avg_pool2d(x, (3, 4))):
        exact, want, got = fn(x.double()), fn(x), fs.compile(fn)(x)
        assert got.dtype == dtype
        assert (got.double() - exact).abs().max() <= (want.double() - exact).abs().max() + 1e-15


def test_special_values_in_large_windows():
    x = torch.randn(1, 2, 20, 20)
    x[0, 0, 3, 3], x[0, 1, 9, 9], x[0, 1, 10, 9] = torch.nan, torch.inf, -torch.inf
    for fn in (lambda x: F.avg_pool2d(x, 5, 1, 2), lambda x: F.adaptive_avg_pool2d(x, 6), lambda x: F.adaptive_max_pool2d(x, 6)):
        torch.testing.assert_close(fs.compile(fn)(x), fn(x), equal_nan=True)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("size", [7, 1, (3, 5), (16, 4), (1, 9), (12, 8), (24, 16)])
def test_adaptive_averages(size, layout):
    """Sizes that divide and that do not, and that grow."""
    torch.manual_seed(0)
    check(lambda x: F.adaptive_avg_pool2d(x * 2, size), torch.randn(2, 5, 12, 8).contiguous(memory_format=layout))


def test_adaptive_averages_of_other_shapes():
    torch.manual_seed(0)
    check(lambda x: F.adaptive_avg_pool1d(x, 7), torch.randn(2, 3, 30))
    check(lambda x: F.adaptive_avg_pool3d(x, (2, 3, 5)), torch.randn(2, 3, 6, 7, 4))
    check(lambda x: F.adaptive_avg_pool2d(x, 3), torch.randn(3, 7, 8).transpose(1, 2))


def test_adaptive_pooling_of_symbolic_sizes():
    fs.reset()
    for pool in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
        compiled = fs.compile(lambda x: pool(x, (4, 5)), dynamic=True)         # noqa: B023  # called at once
        for size in (4, 7, 10, 25):
            x = torch.randn(2, 3, size, size + 3, requires_grad=pool is F.adaptive_avg_pool2d)
            got, want = compiled(x), pool(x, (4, 5))
            torch.testing.assert_close(got, want)
            if x.requires_grad:
                weights = torch.randn_like(want)
                torch.testing.assert_close(torch.autograd.grad(got, x, weights)[0], torch.autograd.grad(want, x, weights)[0])


@pytest.mark.parametrize("layout", FORMATS)
def test_adaptive_maxima_without_places(layout):
    """Where places are read, by a gradient too, the library finds them."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 12, 8).contiguous(memory_format=layout)
    with torch.no_grad():
        for size in (7, 1, (3, 5), (16, 4)):
            fn = lambda x: F.adaptive_max_pool2d(x + 1, size)      # noqa: B023  # called at once
            fs.reset()
            got, want = fs.compile(fn)(x), fn(x)
            torch.testing.assert_close(got, want, rtol=0, atol=0)
            assert got.stride() == want.stride() and fs.counters["native"]["library_calls"] == 0


def test_averages_of_symbolic_sizes():
    compiled = fs.compile(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), dynamic=True)
    for size in (7, 10, 12):
        x = torch.randn(2, 3, size, size + 1)
        torch.testing.assert_close(compiled(x), F.avg_pool2d(x, 3, 2, 1, count_include_pad=False))


SPECIAL = {
    "plain": lambda x: x, "ties": torch.round, "nan": lambda x: x.masked_fill(x > 0.8, float("nan")),
    "infinite": lambda x: x.masked_fill(x > -0.5, float("-inf")),
}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("kernel,stride,padding,ceil_mode,dilation", [
    (2, 2, 0, False, 1), (3, 2, 1, False, 1), (3, 2, 1, True, 1), (2, 1, 0, True, 1), (1, 1, 0, False, 1), (2, 2, 0, False, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maxima(special, kernel, stride, padding, ceil_mode, dilation, dtype):
    """Values and places are eager's, of both formats."""
    for n, pool, last in ((2, F.max_pool2d, torch.channels_last), (3, F.max_pool3d, torch.channels_last_3d)):
        x = SPECIAL[special](torch.randn(2, 3, *(6, 9, 7)[-n:])).to(dtype)
        for given in (x, x.contiguous(memory_format=last)):
            fn = lambda x: pool(x, kernel, stride, padding, dilation, ceil_mode, return_indices=True)      # noqa: B023  # called at once
            for got, want in zip(fs.compile(fn, fullgraph=True)(given), fn(given), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
                assert got.stride() == want.stride()


@pytest.mark.parametrize("kernel,stride,padding", [(2, 2, 0), (3, 2, 1), (3, 1, 1)])
@pytest.mark.parametrize("n,memory_format", [(2, torch.contiguous_format), (2, torch.channels_last), (3, torch.contiguous_format), (3, torch.channels_last_3d)])
def test_gradients_of_maxima(kernel, stride, padding, n, memory_format):
    pool = F.max_pool2d if n == 2 else F.max_pool3d
    fn = lambda x: pool(x.tanh(), kernel, stride, padding).square().sum()
    gradients = []
    for call in (fn, fs.compile(fn, fullgraph=True), fs.compile(fn, fullgraph=True, dynamic=True)):
        x = torch.linspace(-2, 2, 2 * 4 * 6 * 7 * 8).sin().reshape(2, 4, *((6, 7, 8) if n == 3 else (42, 8))).contiguous(memory_format=memory_format)
        gradients.append(torch.autograd.grad(call(x.requires_grad_()), x)[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


def test_maxima_are_fused_with_their_neighbours():
    fs.reset()
    with torch.no_grad():
        x = torch.randn(2, 4, 16, 16)
        fn = lambda x: F.max_pool2d(x.relu() * 2, 2) + 1
        torch.testing.assert_close(fs.compile(fn)(x), fn(x))
    assert (fs.counters["native"]["library_calls"], fs.counters["native"]["kernels"]) == (0, 1)
