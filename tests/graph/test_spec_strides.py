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
              lambda x: F.interpolate(x, scale_factor=2), lambda x: F.max_pool2d(x, 1), lambda x: F.avg_pool2d(x, 1), lambda x: F.channel_shuffle(x, 1), lambda x: F.max_pool3d(x, 1), lambda x: -x[None]],
    "like": [torch.deg2rad, torch.rad2deg, lambda x: torch.fill(x, 2), lambda x: torch.frexp(x)[0], lambda x: F.huber_loss(x, x, reduction="none"),
             lambda x: F.binary_cross_entropy_with_logits(x, x, reduction="none"), lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: torch.nonzero_static(x, size=2)],
    "two": [lambda x: torch.rsub(x, x[0]), lambda x: torch.rsub(x, x.contiguous()), lambda x: torch.ldexp(x, x[..., :1]), lambda x: torch.ldexp(x.contiguous(), x), lambda x: torch.addr(x, x[:, 0], x[0])],
    "written": [lambda x: torch.empty_like(x).fill_(1), lambda x: torch.empty_like(x).copy_(torch.ones(x.shape)), lambda x: torch.empty_like(x).zero_() + 1, lambda x: x.clone().add_(x.contiguous())],
    "nothing": [lambda x: x[:0] + 1, lambda x: x[:0].contiguous() < 1, lambda x: x[..., :0].roll(1, 0), lambda x: x[:, :0][torch.tensor([0])], lambda x: F.pixel_unshuffle(x[:0], 1), lambda x: (x[:0] + 1).add_(1),
                lambda x: x[:0].clone(memory_format=torch.channels_last)],
}


def strides_of(programs, x):
    found = []
    for program in programs:
        y = program(x)
        found.append((y.shape, y.stride()))
    return found


def native_strides(programs, x):
    """Of tensors that kernels and library calls made."""
    made = fs.compile(lambda programs, x: [program(x) for program in programs])(programs, x)
    return [(y.shape, y.stride()) for y in made]


compiled_strides = {"eager": fs.compile(strides_of, backend="eager"), "native": native_strides}


def runs(program, x):
    try:
        program(x)
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def test_a_decomposition_of_a_batch_norm_of_one_element():
    stats = torch.zeros(2), torch.ones(2)
    native = lambda x, mean, var: (torch.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5), mean, var)
    (got, *means), (want, *expected) = fs.compile(native)(torch.ones(1, 2), *(s.clone() for s in stats)), native(torch.ones(1, 2), *stats)
    torch.testing.assert_close((*got, *means), (*want, *expected), equal_nan=True)       # the running variance is 0 / 0


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", OPERATORS)
def test_strides_of_results(family, layout, backend):
    for shape in SHAPES:
        x = LAYOUTS[layout](torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape))
        programs = [program for program in OPERATORS[family] if runs(program, x)]
        fs.reset()
        got = compiled_strides[backend](programs, x)
        differ = [(number, a, b) for number, (a, b) in enumerate(zip(got, strides_of(programs, x))) if a != b]
        assert not differ, (shape, x.stride(), differ)
