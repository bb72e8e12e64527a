"""Reductions are at least as accurate as eager's: against float64 over means, scales, dtypes and layouts of the reduced dimensions.

An error is counted in half units in the last place of the result's dtype, relative to the size of the terms where a sum cancels.
Ours may be as large as eager's, or `HALF_ULPS` where eager happens to be luckier.
"""
import functools
import math
from fractions import Fraction

import pytest
import torch

import firesteel as fs

HALF_ULPS = 3           # a sum, a division and a root are rounded, each by at most one half unit
DTYPES = (torch.float32, torch.float16, torch.bfloat16)      # float64 is compared with fractions below
PLACES = {"inner": ((3, 1500), 1), "outer": ((1500, 3), 0), "full": ((30, 50), (0, 1)), "short": ((5, 37), 1)}
MEANS, SCALES = (0.0, 1.0, 1e3, 1e7), (1e-30, 1.0, 1e30)
REDUCTIONS = {
    "sum": lambda x, d: x.sum(d), "mean": lambda x, d: x.mean(d), "var": lambda x, d: x.var(d), "std": lambda x, d: x.std(d),
    "var_mean": lambda x, d: torch.var_mean(x, d)[1], "std_mean": lambda x, d: torch.std_mean(x, d)[0],
    "norm": lambda x, d: torch.linalg.vector_norm(x, 2, d), "logsumexp": lambda x, d: x.logsumexp(d),
}

SIZES = {"sum": REDUCTIONS["sum"], "mean": REDUCTIONS["mean"], "var_mean": REDUCTIONS["mean"]}      # of the terms, where they may cancel


def _half_ulps(found: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> float:
    """The largest error, relative to the larger of the value and the size of what was added up."""
    if not bool((found.isfinite() == exact.to(found.dtype).isfinite()).all()):
        return math.inf
    error = (found.double() - exact).abs() / torch.maximum(exact.abs(), size)
    return float(error.nan_to_num(0.0, math.inf, math.inf).max()) / (torch.finfo(found.dtype).eps / 2)


def _samples(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    for mean in MEANS:
        for scale in SCALES:
            x = ((torch.randn(shape, dtype=torch.float64, generator=generator) + mean) * scale).to(dtype)
            if x.isfinite().all() and (dtype is not torch.float16 or scale == 1):
                yield x


@functools.cache
def _compiled(name: str, dynamic: bool):
    return fs.compile(REDUCTIONS[name], dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_are_as_accurate_as_eager(name, place, dynamic):
    shape, dims = PLACES[place]
    function, compiled = REDUCTIONS[name], _compiled(name, dynamic)
    for dtype in DTYPES:
        for x in _samples(shape, dtype):
            exact = function(x.double(), dims)
            size = SIZES[name](x.double().abs(), dims) if name in SIZES else torch.zeros(())
            size = size.clamp(min=torch.finfo(dtype).tiny)
            eager, ours = (_half_ulps(f(x, dims), exact, size) for f in (function, compiled))
            assert ours <= max(eager, HALF_ULPS), (dtype, float(x.double().mean()), float(x.double().std()), eager, ours)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("place", ["inner", "outer"])
def test_moments_of_doubles_against_fractions(place, mean):
    x = torch.randn(700, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + mean
    terms = [Fraction(v) for v in x.tolist()]
    center = sum(terms) / len(terms)
    variance = sum((t - center) ** 2 for t in terms) / (len(terms) - 1)
    wide = x.unsqueeze(0) if place == "inner" else x.unsqueeze(1).repeat(1, 9)
    dim = 1 if place == "inner" else 0
    for function, exact in ((torch.var_mean, variance), (lambda x, d: (x.mean(d),), center), (lambda x, d: torch.var_mean(x, d)[1:], center)):
        eager, ours = (abs(Fraction(f(wide, dim)[0][0].item()) - exact) for f in (function, fs.compile(function)))
        assert ours <= max(eager, HALF_ULPS * abs(exact) / 2**53, Fraction(1, 2**56))


@pytest.mark.parametrize("threads", [1, 2])
def test_small_differences_of_large_numbers(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = 1e7 + (torch.arange(10_000) % 3).float()
        for function in (torch.var, torch.std, torch.mean):
            torch.testing.assert_close(fs.compile(function)(x), function(x.double()).float(), rtol=2e-7, atol=0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_equal_rows_have_no_deviation(dtype):
    row = torch.rand(1, 5, generator=torch.Generator().manual_seed(0)) + 100
    x = row.expand(9, 5).to(dtype).contiguous().requires_grad_()
    out = fs.compile(lambda x: x.std(0))(x)
    assert torch.equal(out, torch.zeros(5, dtype=dtype))
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros(9, 5, dtype=dtype))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_gradient_of_a_deviation_at_the_ends_of_the_range(scale):
    x = (torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * scale).requires_grad_()
    eager, = torch.autograd.grad(x.std(1).sum(), x)
    ours, = torch.autograd.grad(fs.compile(lambda x: x.std(1).sum())(x), x)
    torch.testing.assert_close(ours, eager)


def test_constant_rows_are_normalised_to_nothing():
    x = torch.full((4, 700), 1e4 / 3)
    for function in (lambda x: torch.nn.functional.layer_norm(x, (700,)), lambda x: torch.nn.functional.group_norm(x.view(2, 2, 700), 1),
                     lambda x: torch.nn.functional.batch_norm(x.t().contiguous(), None, None, training=True)):
        assert float(fs.compile(function)(x).abs().max()) <= 1e-6


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_statistics_of_a_batch_norm_keep_their_range(scale):
    x = torch.randn(40, 3, 5, generator=torch.Generator().manual_seed(0)) * scale + 100 * scale
    function = lambda x: torch.nn.functional.batch_norm(x, None, None, training=True)
    exact = function(x.double())
    eager, ours = ((f(x).double() - exact).abs().max() for f in (function, fs.compile(function)))
    assert ours <= max(eager, 1e-5)
