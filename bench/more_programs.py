"""Eight further kinds of programs, as `programs.py` has them: `python bench/reference.py --programs more`.

    unet        convolutions, group norm, SiLU, average pooling, nearest resampling, concatenation
    dlrm        embeddings of many tables, their interactions by a batched product, two small networks
    gru         GRU cells over the steps of a sequence
    pairwise    distances and forces between all pairs of bodies
    mobilenet   depthwise and pointwise convolutions, batch norm, hard swish, squeeze and excitation
    convnext    7x7 depthwise convolutions, layer norm over channels, GELU
    bert        an encoder with a mask over padding, post-norm
    vit         patches, a class token, pre-norm layers
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from programs import Layer, Program
from torch import Tensor, nn


def program_of(model: nn.Module, *inputs: Tensor) -> Program:
    return Program(model, inputs, list(model.parameters()))


class Smooth(nn.Sequential):
    def __init__(self, inside: int, outside: int):
        layers = [(nn.Conv2d(n, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU()) for n in (inside, outside)]
        super().__init__(*(part for layer in layers for part in layer))


class UNet(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.down1, self.down2, self.down3 = Smooth(3, width), Smooth(width, 2 * width), Smooth(2 * width, 4 * width)
        self.up2, self.up1 = Smooth(6 * width, 2 * width), Smooth(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        large = self.down1(x)
        middle = self.down2(F.avg_pool2d(large, 2))
        small = self.down3(F.avg_pool2d(middle, 2))
        y = self.up2(torch.cat([F.interpolate(small, scale_factor=2.0), middle], 1))
        return self.out(self.up1(torch.cat([F.interpolate(y, scale_factor=2.0), large], 1)))


def unet(dtype=torch.float32, batch: int = 2, size: int = 64, width: int = 16) -> Program:
    torch.manual_seed(0)
    return program_of(UNet(width).to(dtype), torch.randn(batch, 3, size, size, dtype=dtype))


class DLRM(nn.Module):
    def __init__(self, tables: int, rows: int, width: int, dense: int):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + (tables + 1) * tables // 2, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = self.bottom(dense)
        features = torch.stack([first, *(table(ids[:, k]) for k, table in enumerate(self.tables))], 1)
        products = features @ features.transpose(1, 2)
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([first, crossed], 1)))


def dlrm(dtype=torch.float32, batch: int = 256, tables: int = 8, rows: int = 1000, width: int = 32, dense: int = 13) -> Program:
    torch.manual_seed(0)
    return program_of(DLRM(tables, rows, width, dense).to(dtype), torch.randn(batch, dense, dtype=dtype), torch.randint(0, rows, (batch, tables)))


class GRU(nn.Module):
    def __init__(self, inside: int, hidden: int):
        super().__init__()
        self.cell = nn.GRUCell(inside, hidden)
        self.head = nn.Linear(hidden, inside)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.cell.hidden_size)
        out = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            out.append(self.head(h))
        return torch.stack(out, 1)


def gru(dtype=torch.float32, batch: int = 32, steps: int = 16, inside: int = 64, hidden: int = 128) -> Program:
    torch.manual_seed(0)
    return program_of(GRU(inside, hidden).to(dtype), torch.randn(batch, steps, inside, dtype=dtype))


def energy(places: Tensor, masses: Tensor, softening: Tensor) -> Tensor:
    """Of bodies that attract and repel each other."""
    apart = places[:, None] - places[None]
    squared = apart.square().sum(-1) + softening.square()
    attraction = -(masses[:, None] * masses[None]) * squared.rsqrt()
    repulsion = torch.exp(-squared) * squared.reciprocal()
    return torch.triu(attraction + repulsion, 1).sum(1)


def pairwise(dtype=torch.float32, bodies: int = 600) -> Program:
    torch.manual_seed(0)
    places, masses = torch.randn(bodies, 3, dtype=dtype, requires_grad=True), torch.rand(bodies, dtype=dtype, requires_grad=True)
    softening = torch.full((), 0.1, dtype=dtype, requires_grad=True)
    return Program(energy, (places, masses, softening), [places, masses, softening])


class Inverted(nn.Module):
    """MobileNet's block."""

    def __init__(self, width: int, wide: int):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        self.depth = nn.Sequential(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        self.squeeze = nn.Sequential(nn.Conv2d(wide, wide // 4, 1), nn.ReLU(), nn.Conv2d(wide // 4, wide, 1), nn.Hardsigmoid())
        self.project = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        return x + self.project(y * self.squeeze(y.mean((2, 3), keepdim=True)))


def mobilenet(dtype=torch.float32, batch: int = 8, size: int = 28, width: int = 24, layers: int = 3) -> Program:
    torch.manual_seed(0)
    return program_of(nn.Sequential(*(Inverted(width, 4 * width) for _ in range(layers))).to(dtype), torch.randn(batch, width, size, size, dtype=dtype))


class Wide(nn.Module):
    """ConvNeXt's block."""

    def __init__(self, width: int):
        super().__init__()
        self.depth = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.feed(self.norm(self.depth(x).permute(0, 2, 3, 1)))
        return x + (self.scale * y).permute(0, 3, 1, 2)


def convnext(dtype=torch.float32, batch: int = 4, size: int = 28, width: int = 48, layers: int = 3) -> Program:
    torch.manual_seed(0)
    return program_of(nn.Sequential(*(Wide(width) for _ in range(layers))).to(dtype), torch.randn(batch, width, size, size, dtype=dtype))


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, vocabulary: int):
        super().__init__()
        self.tokens, self.places, self.norm = nn.Embedding(vocabulary, width), nn.Embedding(512, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(PostNorm(width, heads) for _ in range(layers))
        self.pool = nn.Linear(width, width)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        steps = torch.arange(ids.shape[1], device=ids.device)
        seen = (steps < lengths[:, None])[:, None, None]
        x = self.norm(self.tokens(ids) + self.places(steps))
        for layer in self.layers:
            x = layer(x, seen)
        return torch.tanh(self.pool(x[:, 0]))


class PostNorm(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.feed(x))


def bert(dtype=torch.float32, batch: int = 4, length: int = 64, layers: int = 4, width: int = 192, vocabulary: int = 1000) -> Program:
    torch.manual_seed(0)
    model = Encoder(width, 6, layers, vocabulary).to(dtype)
    return program_of(model, torch.randint(0, vocabulary, (batch, length)), torch.randint(length // 2, length + 1, (batch,)))


class ViT(nn.Module):
    def __init__(self, size: int, patch: int, width: int, layers: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.layers = nn.Sequential(*(Bidirectional(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


class Bidirectional(Layer):
    """The GPT's layer without its mask."""

    def forward(self, x: Tensor) -> Tensor:
        attention = self.attention
        q, k, v = (part.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for part in attention.qkv(self.norm1(x)).chunk(3, -1))
        x = x + attention.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


def vit(dtype=torch.float32, batch: int = 8, size: int = 32, patch: int = 4, width: int = 128, layers: int = 4) -> Program:
    torch.manual_seed(0)
    return program_of(ViT(size, patch, width, layers).to(dtype), torch.randn(batch, 3, size, size, dtype=dtype))


MORE: dict[str, Callable[..., Program]] = {
    "unet": unet, "dlrm": dlrm, "gru": gru, "pairwise": pairwise, "mobilenet": mobilenet, "convnext": convnext, "bert": bert, "vit": vit,
}

# for tests
SMALL: dict[str, dict[str, int]] = {
    "unet": {"batch": 1, "size": 16, "width": 4}, "dlrm": {"batch": 6, "tables": 3, "rows": 11, "width": 4}, "gru": {"batch": 3, "steps": 4, "inside": 5, "hidden": 6},
    "pairwise": {"bodies": 19}, "mobilenet": {"batch": 2, "size": 6, "width": 8, "layers": 2}, "convnext": {"batch": 2, "size": 8, "width": 8, "layers": 2},
    "bert": {"batch": 2, "length": 9, "layers": 2, "width": 24, "vocabulary": 20}, "vit": {"batch": 2, "size": 8, "width": 16, "layers": 2},
}
