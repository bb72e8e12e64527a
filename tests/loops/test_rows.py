"""Rows of a few elements are written out: which, and that the meaning stays."""
import random
from textwrap import dedent

import pytest
import torch
from traced import check, nests, text

import firesteel as fs
from firesteel.loops import rows

POINTS, OTHER = torch.randn(3000, 3), torch.randn(3000, 3)


def test_a_stack():
    assert text(check(lambda a, b: torch.cat([a + 1, b * 2], -1), torch.randn(3000, 1), torch.randn(3000, 1))) == dedent("""
        nest cat [i0 < 3000]
          map []
            cat[i0, 0] = load(arg0_1, i0, 0) + 1.0
            cat[i0, 1] = load(arg1_1, i0, 0) * 2.0
        return cat""").strip()


def test_a_sum_and_what_is_made_of_it():
    """The squares' sum is no sweep any more; what only the nest itself read is not stored."""
    assert text(check(lambda x: (x / x.sum(-1, keepdim=True)).exp(), torch.rand(3000, 2) + 1)) == dedent("""
        nest exp [i0 < 3000]
          map []
            exp[i0, 0] = math.exp(div(load(arg0_1, i0, 0), 0.0 + load(arg0_1, i0, 0) + load(arg0_1, i0, 1)))
            exp[i0, 1] = math.exp(div(load(arg0_1, i0, 1), 0.0 + load(arg0_1, i0, 0) + load(arg0_1, i0, 1)))
        return exp""").strip()


def swapped(x):
    a, b, c = x.unbind(-1)
    return torch.stack([b, c, a, a * b, b - c], -1)


WRITTEN = {
    "softmax": (lambda x: x.softmax(-1), (POINTS,)),
    "softmax of channels": (lambda x: x.softmax(1), (torch.randn(2, 5, 40, 40),)),
    "layer norm": (lambda x: torch.layer_norm(x, (3,)), (POINTS,)),
    "cross": (lambda a, b: torch.linalg.cross(a, b) + a, (POINTS, OTHER)),
    "swapped": (swapped, (POINTS,)),
    "beside a row's number": (lambda x, m: x * m[:, None], (POINTS, torch.randn(3000))),
    "running sum": (lambda x: x.cumsum(-1) * 2, (POINTS,)),
    "largest": (lambda x: (x.amax(-1), x.argmax(-1)), (POINTS,)),
    "any and all": (lambda x: ((x > 0).any(-1), (x > 0).all(-1)), (POINTS,)),
    "product": (lambda x: x.prod(-1), (POINTS,)),
    "bfloat16": (lambda x: x.softmax(-1), (POINTS.bfloat16(),)),
    "integers": (lambda x: x.sum(-1), (torch.arange(9000).view(3000, 3),)),
    "two results": (lambda x: (x - x.mean(-1, keepdim=True), x.var(-1)), (POINTS,)),
    "columns of one memory": (lambda x: x[:, 1:3].softmax(-1), (torch.randn(3000, 4),)),
    "rows of another order": (lambda x: x.t().softmax(-1), (torch.randn(3, 3000),)),
}


def woven(a, b):
    y = torch.zeros(a.shape[0], 2 * a.shape[1])
    y[:, ::2], y[:, 1::2] = a, b
    return y + 1


TAKEN_APART = {
    "every other element": (woven, (torch.randn(64, 100), torch.randn(64, 100)), 1),
    "each element again": (lambda x: x.repeat_interleave(4, 1) + 1, (torch.randn(64, 100),), 1),
    "pixels of channels": (lambda x: x.permute(0, 1, 4, 2, 5, 3).reshape(2, 3, 60, 60) + 1, (torch.randn(2, 3, 2, 2, 30, 30),), 1),
    "moved": (lambda x: x[:, (torch.arange(256) + 1) // 2] * 2, (torch.randn(64, 200),), 1),
    "too long to write out": (lambda x: x.repeat_interleave(40, 1) + 1, (torch.randn(64, 100),), 1),
    "few points": (lambda x: x.repeat_interleave(2, 1) + 1, (torch.randn(8, 10),), 1),
}


@pytest.mark.parametrize("name", TAKEN_APART)
def test_places_that_are_divided(name):
    function, inputs, count = TAKEN_APART[name]
    assert len(nests(check(function, *inputs))) == count


@pytest.mark.parametrize("name", WRITTEN)
def test_meaning_stays(name):
    function, inputs = WRITTEN[name]
    tolerance = 2e-2 if inputs[0].dtype is torch.bfloat16 else 1e-4
    found = nests(check(function, *inputs, tolerance=tolerance))
    assert all(not phase.axes for nest in found for phase in nest.phases)


LEFT = {
    "one long row": (lambda x, y: x * y + 1, (POINTS, OTHER)),
    "longer rows": (lambda x: x.softmax(-1), (torch.randn(3000, 40),)),
    "rows of nothing": (lambda x: (x.cumsum(-1), x.sum(-1)), (torch.randn(3000, 0),)),
    "few points": (lambda x: x.softmax(-1), (torch.randn(100, 3),)),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_they_are(name):
    function, inputs = LEFT[name]
    before = [nest.axes for nest in nests(check(function, *inputs))]
    with fs.config.patch(fusion_fuel=0):
        assert [nest.axes for nest in nests(check(function, *inputs))][-1:] == before[-1:]


def _short(draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """x of [n, k] under one random operator over rows of few elements."""
    k = x.shape[-1]
    return draw.choice((
        lambda: x.softmax(-1), lambda: x - x.mean(-1, keepdim=True), lambda: torch.stack([x[:, 0], x[:, -1] * 2, x.sum(-1)], -1), lambda: x.flip(-1) * 2,
        lambda: x.roll(1, -1) + x, lambda: torch.cat([x, x[:, :1]], -1)[:, :6], lambda: x.cumsum(-1), lambda: x * x[:, :1], lambda: x / x.norm(dim=-1, keepdim=True),
        lambda: x.amax(-1, keepdim=True) - x, lambda: torch.where(torch.arange(k) % 2 == 0, x, -x), lambda: x[:, :: 2].repeat(1, 2),
        lambda: x.view(-1, 2, k).sum(1) if len(x) % 2 == 0 else x + 1, lambda: torch.linalg.cross(x[:, :3], x[:, -3:]) if k >= 3 else x))()


@pytest.mark.parametrize("seed", range(40))
def test_random_rows(seed, monkeypatch):
    """Rows written out wherever there are some, worth it or not."""
    monkeypatch.setattr(rows, "FEWEST_POINTS", 0)

    def function(x):
        draw = random.Random(seed)
        found = []
        for _ in range(draw.randint(1, 5)):
            x = _short(draw, x)
            found.append(x)
        return found[-1], found[0].square()

    draw = random.Random(seed)
    x = torch.rand(draw.choice((8, 40, 77)), draw.randint(1, 7)) + 0.5
    for got, want in zip(fs.compile(function)(x), function(x), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    check(function, x)
