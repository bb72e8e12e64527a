"""Random models, compiled natively, against eager: values, gradients, buffers and random numbers, for two batch sizes.

A model is a list of steps drawn from `STEPS`; each step takes the activations (batch, channels, height, width) and gives such
activations back, so any list is a program.  `FIRESTEEL_RANDOM_MODELS=500` runs more of them.
"""
import copy
import os
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firesteel as fs

COUNT = int(os.environ.get("FIRESTEEL_RANDOM_MODELS", "24"))
CHANNELS, HEIGHT, WIDTH = 6, 8, 8


class Step(nn.Module):
    """One step: a function of the activations and of layers of its own."""

    def __init__(self, fn, **layers):
        super().__init__()
        self.fn, self.layers = fn, nn.ModuleDict(layers)

    def forward(self, x):
        return self.fn(x, self.layers)


def layer_step(make, fn=lambda x, layers: layers["a"](x)):
    return lambda rng: Step(fn, a=make(rng))


def plain(fn):
    return lambda rng: Step(lambda x, layers: fn(x))


def _attention(x, layers):
    b, c, h, w = x.shape
    tokens = x.flatten(2).transpose(1, 2)
    q, k, v = layers["a"](tokens).chunk(3, dim=-1)
    heads = [t.view(b, h * w, 2, c // 2).transpose(1, 2) for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads, is_causal=True)
    return out.transpose(1, 2).reshape(b, h * w, c).transpose(1, 2).view(b, c, h, w)


def _written(x):
    y = x.clone()
    y[:, 1:3] *= 2
    y[..., 0] = x.sum(-1)
    y.add_(1).clamp_(-4, 4)
    return y


def _branch(x):
    return torch.sin(x) if x.shape[0] > 4 else torch.cos(x)


STEPS = {
    "linear": layer_step(lambda rng: nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7)),
    "conv": layer_step(lambda rng: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=rng.choice([1, 2, 3]))),
    "transposed": layer_step(lambda rng: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1)),
    "batch norm": layer_step(lambda rng: nn.BatchNorm2d(CHANNELS, affine=rng.random() < 0.5)),
    "layer norm": layer_step(lambda rng: nn.LayerNorm([HEIGHT, WIDTH] if rng.random() < 0.5 else WIDTH)),
    "group norm": layer_step(lambda rng: nn.GroupNorm(rng.choice([1, 2, 3]), CHANNELS)),
    "instance norm": layer_step(lambda rng: nn.InstanceNorm2d(CHANNELS)),
    "dropout": layer_step(lambda rng: nn.Dropout(0.3)),
    "activation": layer_step(lambda rng: rng.choice([nn.ReLU(), nn.GELU(), nn.SiLU(), nn.ELU(), nn.Hardswish(), nn.Softplus(), nn.PReLU(), nn.Mish(),
                                                     nn.LeakyReLU(0.1), nn.Tanh(), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Softmax(1)])),
    "attention": layer_step(lambda rng: nn.Linear(CHANNELS, 3 * CHANNELS), _attention),
    "lstm cell": layer_step(lambda rng: nn.LSTMCell(WIDTH, WIDTH), lambda x, layers: torch.stack(
        [layers["a"](row)[0] for row in x.flatten(0, 1).unbind(1)], 1).view_as(x)),
    "recurrent": layer_step(lambda rng: rng.choice([nn.LSTM, nn.GRU, nn.RNN])(WIDTH, WIDTH // 2, bidirectional=True, num_layers=rng.choice([1, 2])),
                            lambda x, layers: layers["a"](x.flatten(0, 1))[0].view_as(x)),
    "max pool": plain(lambda x: F.interpolate(F.max_pool2d(x, 2), scale_factor=2)),
    "mean pool": plain(lambda x: F.interpolate(F.avg_pool2d(x, 3, 1, 1), size=(HEIGHT, WIDTH), mode="bilinear")),
    "adaptive pool": plain(lambda x: x * torch.sigmoid(F.adaptive_avg_pool2d(x, 1))),
    "pad and slice": plain(lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect")[:, :, 1:-2, 2:-1]),
    "flip and roll": plain(lambda x: torch.roll(x.flip(-1), (1, -2), (2, 3))),
    "cat": plain(lambda x: torch.cat([x[:, 3:], x[:, :3].exp().clamp(max=5)], 1)),
    "stack": plain(lambda x: torch.stack([x, x.square(), x.abs().sqrt()], 0).mean(0)),
    "permute": plain(lambda x: x.permute(0, 1, 3, 2).contiguous()),
    "gather": plain(lambda x: x.gather(1, x.argsort(1))),
    "index": plain(lambda x: x[:, torch.tensor([3, 1, 0, 5, 5, 2])]),
    "where": plain(lambda x: torch.where(x > x.mean((2, 3), keepdim=True), x, x * 0.1)),
    "top": plain(lambda x: x + x.amax(1, keepdim=True) - x.amin((2, 3), keepdim=True)),
    "cumulative": plain(lambda x: torch.cumsum(x, -1) * 0.2),
    "normalised": plain(lambda x: F.normalize(x, dim=1)),
    "log softmax": plain(lambda x: F.log_softmax(x, -1)),
    "variance": plain(lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1)),
    "einsum": plain(lambda x: torch.einsum("bchw,bdhw->bcd", x, x)[:, :, :, None].mul(0.05).sum(2, keepdim=True) + x),
    "matmul": plain(lambda x: (x @ x.transpose(-1, -2)) * 0.1),
    "written": plain(_written),
    "branch": plain(_branch),
    "unfold": plain(lambda x: F.fold(F.unfold(x, 2, stride=2), (HEIGHT, WIDTH), 2, stride=2)),
    "noise": plain(lambda x: x + 0.1 * torch.randn_like(x)),
    "rounded": plain(lambda x: x + (x.round() - x).detach()),
    "embedding": layer_step(lambda rng: nn.Embedding(7, WIDTH), lambda x, layers: x + layers["a"]((x[..., 0] * 3).long().remainder(7))),
    "half": plain(lambda x: x.to(torch.float64).sin().to(x.dtype)),
}


def make_model(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    names = rng.choices(list(STEPS), k=rng.randint(3, 9))
    return nn.Sequential(*[STEPS[name](rng) for name in names]).double(), names


def run(model, call, x, train):
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    model.train(train)
    model.zero_grad()
    out = call(x * 1)       # no leaf, so that any step may write it
    (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    return [out.detach(), x.grad, *gradients, *[b.clone() for b in model.buffers()], torch.rand(2)]


@pytest.mark.parametrize("seed", range(COUNT))
def test_equals_eager(seed):
    fs.reset()
    expected, names = make_model(seed)
    model = copy.deepcopy(expected)
    compiled = fs.compile(model, fullgraph=True)
    for batch, train in ((3, True), (5, True), (5, False)):
        x = torch.randn(batch, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64)
        for got, want in zip(run(model, compiled, x, train), run(expected, expected, x, train), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-8, equal_nan=True, msg=lambda text: f"{names}, batch {batch}, train {train}\n{text}")
