"""The five reference programs, each in inference and in training.

`PROGRAMS[name](dtype=..., **sizes)` gives a `Program`: a callable, the inputs it is called with, and the parameters that it
trains.  `step(fn, program, train)` runs it once: forward, and for training also `backward()` of the loss.  Nothing here
knows who compiles the callable.

    program = PROGRAMS["mlp"]()
    step(program.fn, program, train=True)
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Program:
    fn: Callable            # function or module; its result is a loss, or a tensor of which `step` makes one
    inputs: tuple
    leaves: list[Tensor]    # what receives gradients


def step(fn: Callable, program: Program, train: bool) -> Tensor:
    """One inference, or one forward and backward; returns the result."""
    if not train:
        with torch.no_grad():
            return fn(*program.inputs)
    for leaf in program.leaves:
        leaf.grad = None
    result = fn(*program.inputs)
    loss = result if result.ndim == 0 else torch.sin(result).mean()
    loss.backward()
    return result.detach()


def pointwise_chain(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    a = torch.sin(x) * torch.cos(y) + torch.exp(-x.abs())
    b = torch.tanh(a * scale) + F.gelu(a - y)
    c = torch.where(b > 0, torch.log1p(b.abs()), b * 0.1)
    return (c * torch.sigmoid(x)).sum(dim=-1)


def pointwise(dtype=torch.float32, rows: int = 1000, columns: int = 1000) -> Program:
    torch.manual_seed(0)
    x = torch.randn(rows, columns, dtype=dtype, requires_grad=True)
    y = torch.randn(rows, columns, dtype=dtype, requires_grad=True)
    scale = torch.randn(columns, dtype=dtype, requires_grad=True)
    return Program(pointwise_chain, (x, y, scale), [x, y, scale])


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.linear(x)))


def mlp(dtype=torch.float32, batch: int = 64, width: int = 256, layers: int = 4) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(layers)]).to(dtype)
    return Program(model, (torch.randn(batch, width, dtype=dtype),), list(model.parameters()))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.short = None
        if stride != 1 or inside != outside:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.short is None else self.short(x)))


class ResNet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stages = nn.Sequential(Residual(width, width), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stages(F.relu(self.norm(self.stem(x))))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return F.cross_entropy(self.head(x), target)


def resnet(dtype=torch.float32, batch: int = 8, size: int = 32) -> Program:
    torch.manual_seed(0)
    model = ResNet().to(dtype)
    inputs = (torch.randn(batch, 3, size, size, dtype=dtype), torch.randint(0, 10, (batch,)))
    return Program(model, inputs, list(model.parameters()))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """A small decoder; with targets it returns the cross-entropy, without them the logits."""

    def __init__(self, vocabulary: int = 1000, width: int = 256, heads: int = 8, layers: int = 4, context: int = 512):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def gpt(dtype=torch.float32, batch: int = 4, length: int = 128, layers: int = 4, width: int = 256, vocabulary: int = 1000) -> Program:
    torch.manual_seed(0)
    model = GPT(vocabulary=vocabulary, width=width, layers=layers).to(dtype)
    ids = torch.randint(0, vocabulary, (batch, length + 1))
    return Program(model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), list(model.parameters()))


class UnrolledLSTM(nn.Module):
    """An LSTM cell written out, run over the steps of a sequence by a Python loop."""

    def __init__(self, inside: int, hidden: int):
        super().__init__()
        self.hidden = hidden
        self.from_input = nn.Linear(inside, 4 * hidden)
        self.from_state = nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.hidden)
        c = x.new_zeros(x.shape[0], self.hidden)
        for t in range(x.shape[1]):
            i, f, g, o = (self.from_input(x[:, t]) + self.from_state(h)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


def lstm(dtype=torch.float32, batch: int = 32, steps: int = 20, inside: int = 64, hidden: int = 128) -> Program:
    torch.manual_seed(0)
    model = UnrolledLSTM(inside, hidden).to(dtype)
    return Program(model, (torch.randn(batch, steps, inside, dtype=dtype),), list(model.parameters()))


PROGRAMS: dict[str, Callable[..., Program]] = {"pointwise": pointwise, "mlp": mlp, "resnet": resnet, "gpt": gpt, "lstm": lstm}

# two small sizes each, for tests
SMALL: dict[str, list[dict[str, int]]] = {
    "pointwise": [{"rows": 37, "columns": 50}, {"rows": 24, "columns": 50}],
    "mlp": [{"batch": 9, "width": 32, "layers": 2}, {"batch": 13, "width": 32, "layers": 2}],
    "resnet": [{"batch": 3, "size": 16}, {"batch": 5, "size": 16}],
    "gpt": [{"batch": 2, "length": 17, "layers": 2, "width": 64, "vocabulary": 50},
            {"batch": 3, "length": 23, "layers": 2, "width": 64, "vocabulary": 50}],
    "lstm": [{"batch": 4, "steps": 5, "inside": 8, "hidden": 12}, {"batch": 6, "steps": 5, "inside": 8, "hidden": 12}],
}
