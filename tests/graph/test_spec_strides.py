"""Strides of results without data are eager's, those of dimensions of size 1 too: later operators order their dimensions by them.

Every program runs on inputs of each layout that sizes of 1 make ambiguous; capture tells the strides, eager is asked for the same.
"""
import pytest
import torch
import torch.nn.functional as F

import firesteel as fs

SHAPES = [(3, 1), (1, 3), (3, 1, 4), (8, 1, 4, 4), (1, 3, 2, 1), (6, 3, 1, 1), (2, 4, 4, 6)]
LAYOUTS = {
    "reversed": lambda x: x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1]),
    "transposed": lambda x: x.mT.contiguous().mT,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "window": lambda x: F.pad(x, (1, 1) * x.dim())[(slice(1, -1),) * x.dim()],
    "channels-last window": lambda x: F.pad(x, (1, 1) * 4).contiguous(memory_format=torch.channels_last)[(slice(1, -1),) * 4] if x.dim() == 4 else x,
    "expanded": lambda x: x[:1].expand(x.shape),
    "gap": lambda x: torch.stack([x, x], -1)[..., 0],
}
OPERATORS = {
    "number": [lambda x: x + 1, lambda x: 1 - x, lambda x: x / 2, lambda x: x % 3, lambda x: x > 0, lambda x: x.long() & 3, lambda x: x.long() / 2, lambda x: torch.copysign(x, -1.0)],
    "power": [lambda x: x ** 2, lambda x: x ** 1, lambda x: 2 ** x, lambda x: x ** x.abs()],
    "bounds": [lambda x: x.clamp(0, 1), lambda x: x.clamp_min(0), F.hardtanh, F.relu6, torch.nan_to_num, lambda x: F.prelu(x, torch.tensor(0.2))],
    "pointwise": [torch.exp, F.logsigmoid, lambda x: x + x, lambda x: x + x[0], lambda x: x.contiguous() + x, lambda x: torch.where(x > 0, x, 0.5), torch.clone, torch.zeros_like],
    "index": [lambda x: x[x.long() % x.shape[0]], lambda x: x[None][:, x.long() % x.shape[0]], lambda x: x[..., torch.tensor([[0], [0]])], lambda x: x[torch.tensor([0, 0])]],
    "joined": [lambda x: x.roll(1, 0), lambda x: x.roll((1, 2), (0, -1)), lambda x: torch.cat([x, x]), lambda x: torch.stack([x, x], 1)],
    "image": [lambda x: F.batch_norm(x, None, None, training=True), lambda x: F.group_norm(x, 1), lambda x: F.pixel_unshuffle(x, 2), lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
              lambda x: F.interpolate(x, scale_factor=2), lambda x: F.max_pool2d(x, 1), lambda x: F.avg_pool2d(x, 1)],
}


def strides_of(programs, x):
    found = []
    for program in programs:
        y = program(x)
        found.append((y.shape, y.stride()))
    return found


def runs(program, x):
    try:
        program(x)
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", OPERATORS)
def test_strides_of_results(family, layout):
    for shape in SHAPES:
        x = LAYOUTS[layout](torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape))
        programs = [program for program in OPERATORS[family] if runs(program, x)]
        fs.reset()
        got = fs.compile(strides_of, backend="eager")(programs, x)
        differ = [(number, a, b) for number, (a, b) in enumerate(zip(got, strides_of(programs, x))) if a != b]
        assert not differ, (shape, x.stride(), differ)
