"""Operators whose results depend on the exact dtype they are computed in, compiled natively, against eager."""
import pytest
import torch
import torch.nn.functional as F

import firesteel as fs

CASES = {
    "nextafter": (lambda x: torch.nextafter(x, torch.zeros_like(x)), (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    "addmv with a number": (lambda x: torch.addmv(x[0], x, x[0], beta=2, alpha=3), (torch.int64, torch.int32, torch.float64)),
    "a mask of truths": (lambda x: (x.float() + torch.where(torch.ones(5, 5, dtype=torch.bool).tril(), 0.0, -1.0)).sum(-1) == 1, (torch.float64, torch.int64)),
    "shifts by what does not fit": (lambda x: torch.stack([x << n for n in (1, 257, 300, -1, 2**40)] + [x >> n for n in (1, 257, -1, 2**40)]),
                                    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)),
    "lerp by one number": (lambda x: torch.lerp(x, x * 3, torch.tensor(0.25)), (torch.int64, torch.int32, torch.float32, torch.float64)),
    "a product with a large whole number": (lambda x: x * torch.tensor(2**40) + x / torch.tensor(2**40), (torch.float16, torch.bfloat16)),
    "addr": (lambda x: torch.addr(x, x[0], x[1], beta=2, alpha=3), (torch.int64, torch.int32, torch.float64)),
}


@pytest.mark.parametrize("name, dtype", [(name, dtype) for name, (_, dtypes) in CASES.items() for dtype in dtypes], ids=str)
def test_equals_eager(name, dtype):
    fn = CASES[name][0]
    x = torch.linspace(-40, 40, 25).reshape(5, 5).to(dtype)
    got, want = fs.compile(fn, fullgraph=True)(x), fn(x)
    assert got.dtype is want.dtype and torch.equal(got, want)


NEAR = 2.0003       # is 2 in float16 and in bfloat16
ROUNDED = {         # of a half tensor with twos in it, and a number or a tensor without dimensions
    "comparisons": lambda x, c: (x == c, x != c, x < c, x >= c, c > x, torch.le(x, c)),
    "sums": lambda x, c: (x + c, c + x, x - c, c - x, torch.sub(x, c, alpha=3), x.clone().add_(c)),
    "products": lambda x, c: (x * c, c * x, x / c, x.clone().mul_(c), torch.div(x, c, rounding_mode="trunc"), x // c, torch.floor_divide(x, c)),
    "remainders": lambda x, c: (x % c, c % x, torch.fmod(x, c), torch.remainder(x, c)),
    "powers": lambda x, c: (x.abs() ** c, c ** x),
    "of three": lambda x, c: (torch.addcmul(x, x, c), torch.addcdiv(x, x, c)) if isinstance(c, torch.Tensor) else (),
}


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", ROUNDED)
def test_numbers_beside_halves_are_rounded_as_eager_does(name, dtype):
    """Decisions see it: x == 2.0003 is true of 2 in float16."""
    x = torch.cat([torch.full((40,), 2.0), torch.linspace(-9, 9, 61)]).to(dtype)
    for number in (NEAR, torch.tensor(NEAR), torch.tensor(NEAR, dtype=torch.float64)):
        for ours, eager in zip(fs.compile(ROUNDED[name])(x, number), ROUNDED[name](x, number), strict=True):
            assert ours.dtype is eager.dtype and torch.equal(ours.nan_to_num(7), eager.nan_to_num(7)), (number, ours, eager)


def test_shrinking_by_a_number_that_rounds_up():
    x = torch.tensor([2.0, -2.0, 1.5, 3.0], dtype=torch.float16, requires_grad=True)

    def shrunk(x):
        y = F.hardshrink(x, 1.9997)
        return y, torch.autograd.grad(y.sum(), x)[0]
    for ours, eager in zip(fs.compile(shrunk)(x), shrunk(x), strict=True):
        assert torch.equal(ours, eager)
