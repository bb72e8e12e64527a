"""Pointwise operators whose errors depend on data."""
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
