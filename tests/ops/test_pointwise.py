"""Pointwise operators whose errors or formulas depend on more than dtypes."""
from __future__ import annotations

import pytest
import torch

import firesteel as fs

DIVISIONS = {
    "floor_divide": torch.floor_divide, "remainder": torch.remainder, "fmod": torch.fmod,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "number": lambda x, y: 1000 // y,
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("name", DIVISIONS)
def test_integers_are_divided_in_loops(name, dtype):
    """Of every size, beside multiples of the divisor too."""
    compiled = fs.compile(lambda x, y: DIVISIONS[name](x, y))
    g = torch.Generator().manual_seed(0)
    x, y = ((torch.randint(-2**62, 2**62, (4001,), generator=g) >> torch.randint(0, 63, (4001,), generator=g)).to(dtype) for _ in range(2))
    y[(y == 0) | (y == -1)] = 3
    y[::50] = -1 if dtype.is_signed else 1
    near = x // y * y
    fs.counters.clear()
    for a in (x, near, near + 1, near - 1):
        a = a.where(a != torch.iinfo(dtype).min, torch.ones_like(a))
        assert torch.equal(compiled(a, y), DIVISIONS[name](a, y))
    assert not fs.counters["native"]["fallbacks"]


@pytest.mark.parametrize("name", DIVISIONS)
def test_an_integer_divided_by_zero_is_eagers_error(name):
    x, y = torch.arange(1, 100), torch.arange(-49, 50)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        DIVISIONS[name](x, y)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fs.compile(lambda x, y: DIVISIONS[name](x, y) + 1)(x, y)


def test_what_is_not_chosen_is_divided_all_the_same():
    x, y = torch.arange(1, 100), torch.arange(0, 99)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fs.compile(lambda x, y: torch.where(y == 0, x, x // y))(x, y)
    padded = fs.compile(lambda x, y: torch.cat((x // y, y)) + torch.nn.functional.pad(x % y, (0, 99)))
    assert torch.equal(padded(x, y + 1), torch.cat((x // (y + 1), y + 1)) + torch.nn.functional.pad(x % (y + 1), (0, 99)))


def test_polygamma_of_each_order():
    compiled = fs.compile(lambda x, n: torch.polygamma(n, x) * 2, dynamic=True)
    x = torch.rand(50, generator=torch.Generator().manual_seed(0)) + 0.5
    for n in (0, 1, 2, 3):
        torch.testing.assert_close(compiled(x, n), torch.polygamma(n, x) * 2)
    torch.testing.assert_close(compiled(torch.arange(1, 9), 1), torch.polygamma(1, torch.arange(1, 9)) * 2)


def test_gradients_of_the_gamma_functions_are_loops():
    def loss(a, b):
        return (torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b) + a * torch.digamma(a) + torch.special.i0e(b)).square().sum()
    values = [torch.rand(400, generator=torch.Generator().manual_seed(s)) + 0.5 for s in (0, 1)]
    fs.counters.clear()
    gradients = []
    for function, dtype in ((loss, torch.float64), (fs.compile(loss), torch.float32)):
        given = [v.to(dtype).clone().requires_grad_() for v in values]
        function(*given).backward()
        gradients.append([g.grad.double() for g in given])
    for want, got in zip(*gradients):
        torch.testing.assert_close(got, want, rtol=3e-6, atol=1e-6)
    assert not fs.counters["native"]["fallbacks"]
