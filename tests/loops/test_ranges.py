"""What chooses by place becomes a nest a range: what is taken apart, and that the meaning stays."""
import random
from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F
from traced import check, nests, text

import firesteel as fs
from firesteel.loops import ranges


def test_a_concatenation():
    assert text(check(lambda a, b: torch.cat([a.exp(), b]) * 2, torch.randn(40, 512), torch.randn(24, 512))) == dedent("""
        nest mul [i0 < 40, i1 < 512]
          map []
            mul[i0, i1] = math.exp(load(arg0_1, i0, i1)) * 2.0
        nest mul_1 [i0 < 24, i1 < 512]
          map []
            mul[i0 + 40, i1] = load(arg1_1, i0, i1) * 2.0
        return mul""").strip()


def test_a_reflected_row():
    assert text(check(lambda x: x[:, 255 - ((torch.arange(264) - 4).abs() - 255).abs()], torch.randn(64, 256))) == dedent("""
        nest index [i0 < 64, i1 < 4]
          map []
            index[i0, i1] = load(arg0_1, i0, -i1 + 4)
        nest index_1 [i0 < 64, i1 < 255]
          map []
            index[i0, i1 + 4] = load(arg0_1, i0, i1)
        nest index_2 [i0 < 64, i1 < 5]
          map []
            index[i0, i1 + 259] = load(arg0_1, i0, -i1 + 255)
        return index""").strip()


def quarters(x):
    a, b, c, d = x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]
    return torch.cat([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d], 1) / 2


IMAGE = torch.randn(2, 3, 64, 64)
APART = {
    "wavelet": (quarters, (IMAGE,), 4),
    "rolled": (lambda x: torch.roll(x, (3, 5), (1, 2)) + 1, (torch.randn(8, 64, 64),), 2),
    "rolled over everything": (lambda x: torch.roll(x, 0, 1) + 1, (torch.randn(64, 256),), 1),
    "edges repeated": (lambda x: x[..., (torch.arange(68) - 2).clamp(0, 63)] * 2, (IMAGE,), 3),
    "zeros around": (lambda x: F.pad(x.exp(), (0, 0, 32, 32)) + 1, (IMAGE,), 3),
    "beside each other": (lambda a, b: (torch.cat([a, b], 1) * 2, torch.cat([a, b], 1) + 1), (torch.randn(64, 64), torch.randn(64, 96)), 2),
    "a part of no elements": (lambda a, b: torch.cat([a, b[:, :0], b], 1) + 1, (torch.randn(64, 64), torch.randn(64, 96)), 2),
    "bfloat16": (lambda a, b: torch.cat([a, b]) * 2, (torch.randn(64, 128).bfloat16(), torch.randn(64, 128).bfloat16()), 2),
    "a mask of places": (lambda x: torch.where(torch.arange(256) < 64, x.exp(), x.sin()), (torch.randn(64, 256),), 2),
    "rows of any number": (lambda a, b: torch.cat([a.exp(), b], 1), (torch.randn(100, 64), torch.randn(100, 64)), 2),
}


@pytest.mark.parametrize("name", APART)
def test_meaning_stays(name):
    function, inputs, count = APART[name]
    assert len(nests(check(function, *inputs))) == count


LEFT = {
    "little work": (lambda a, b: torch.cat([a.exp(), b]), (torch.randn(16, 16), torch.randn(16, 16))),
    "many turns": (lambda x: torch.where(torch.arange(512) % 7 < 3, x.exp(), x.sin()), (torch.randn(64, 512),)),
    "data choose": (lambda x, y: torch.where(y < 3, x.exp(), x.sin()), (torch.randn(64, 512), torch.arange(512))),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_they_are(name):
    function, inputs = LEFT[name]
    assert len(nests(check(function, *inputs))) == 1


def test_fuel_limits_them():
    with fs.config.patch(fusion_fuel=1):        # the product into the concatenation
        program = check(lambda a, b: torch.cat([a, b]) * 2, torch.randn(64, 128), torch.randn(64, 128))
    assert len(nests(program)) == 1


def _moved(draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """x under one random operator that chooses by place."""
    dim = draw.randrange(-x.dim(), 0)
    size = x.shape[dim]
    kind = draw.choice(("cat", "roll", "flip", "slice", "pad", "reflect", "tril", "where", "stack"))
    if kind == "cat":
        return torch.cat([x.narrow(dim, 0, draw.randint(0, size)), -x, x.narrow(dim, size // 2, 1)], dim)
    if kind == "reflect":
        place = (torch.arange(size + 3) - draw.randint(0, 3)).abs()
        return x.index_select(dim, (size - 1 - (size - 1 - place).abs()).clamp(0, size - 1))
    simple = {"roll": lambda: x.roll(draw.randint(-size, size), dim), "flip": lambda: x.flip(dim) + 1, "slice": lambda: x.narrow(dim, size // 3, size - size // 3),
              "pad": lambda: F.pad(x, (draw.randint(-1, 2), draw.randint(0, 3)), value=0.5), "tril": lambda: x.tril(draw.randint(-2, 2)),
              "where": lambda: torch.where(torch.arange(x.shape[-1]) < draw.randint(0, x.shape[-1]), x * 2, 1 - x),
              "stack": lambda: torch.stack([x, x * 3], dim).flatten(dim - 1, dim) if dim < -1 else torch.stack([x, x * 3], -1).flatten(-2)}
    return simple[kind]()


@pytest.mark.parametrize("seed", range(40))
def test_random_places(seed, monkeypatch):
    """Ranges wherever there may be some, worth it or not."""
    monkeypatch.setattr(ranges, "FEWEST_POINTS", 0)
    monkeypatch.setattr(ranges, "GAIN", 100)

    def function(x):
        draw = random.Random(seed)
        for _ in range(draw.randint(1, 4)):
            x = _moved(draw, x)
        return x * 2

    draw = random.Random(seed)
    x = torch.randn(3, draw.randint(2, 9), draw.randint(2, 20))
    check(function, x)
    assert torch.equal(fs.compile(function)(x), function(x))
