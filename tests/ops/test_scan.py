"""Running sums and products: along the lanes by shuffles, elsewhere lane by lane."""
from __future__ import annotations

import fractions

import pytest
import torch

import firesteel as fs

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_running_sums_and_products(dtype, dynamic):
    torch.manual_seed(0)
    for shape in ((5, 64), (3, 7), (2, 3, 33), (130,), (4, 1), (0, 3), (3, 0)):
        x = (torch.rand(shape) * 2).to(dtype)
        for dim in range(len(shape)):
            fn = lambda x: (x.cumsum(dim), x.cumprod(dim), (x + x).transpose(0, -1).cumsum(dim))      # noqa: B023  # called at once
            for got, want in zip(fs.compile(fn, dynamic=dynamic)(x), fn(x)):
                torch.testing.assert_close(got, want)
                assert got.stride() == want.stride() or not x.numel()


def test_what_is_not_finite_is_seen_behind_it_only():
    x = torch.ones(4, 40)
    x[0, 3], x[1, 20], x[2, 5], x[2, 30], x[3] = torch.nan, torch.inf, torch.inf, -torch.inf, -0.0
    for fn in (lambda x: x.cumsum(-1), lambda x: x.cumprod(-1)):
        got, want = fs.compile(fn)(x), fn(x)
        torch.testing.assert_close(got, want, equal_nan=True)
        assert torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_sums_are_as_near_as_eager(dtype):
    torch.manual_seed(0)
    x = torch.randn(8, 5000, dtype=dtype)
    exact = x.double().cumsum(-1) if dtype is torch.float32 else torch.stack([torch.tensor(_exact(row)) for row in x.tolist()])
    error = lambda y: (y.double() - exact).abs().max()
    assert error(fs.compile(lambda x: x.cumsum(-1))(x)) <= error(x.cumsum(-1)) * 1.01 + 1e-15


def _exact(row):
    total, found = fractions.Fraction(0), []
    for value in row:
        total += fractions.Fraction(value)
        found.append(float(total))
    return found
