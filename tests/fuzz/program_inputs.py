"""The inputs of random programs: tensors of every layout, dtype and kind of gradient, made from a seed.

    made = tensor((4, 5), torch.float32, "transposed", "inner", seed=3)
    made.arg        # what the program is called with
    made.leaf       # whose `.grad` is looked at afterwards, or None

A layout is a row of `LAYOUTS`: a function of the shape and of `fill(shape)`, which makes the contiguous tensor that the layout is a view of.
A shape that a layout has no meaning for (channels-last of a matrix) gets a contiguous tensor.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Fill = Callable[[tuple], torch.Tensor]


@dataclass
class Made:
    arg: torch.Tensor
    leaf: torch.Tensor | None


def _transposed(shape: tuple, fill: Fill) -> torch.Tensor:
    return fill((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2) if len(shape) > 1 else fill(shape)


def _stepped(shape: tuple, fill: Fill) -> torch.Tensor:
    return fill((*shape[:-1], 2 * shape[-1]))[..., ::2] if shape else fill(shape)


def _rows(shape: tuple, fill: Fill) -> torch.Tensor:
    return fill((3 * shape[0], *shape[1:]))[::3] if shape else fill(shape)


def _window(shape: tuple, fill: Fill) -> torch.Tensor:
    whole = fill(tuple(n + 2 for n in shape))
    return whole[tuple(slice(1, n + 1) for n in shape)]


def _expanded(shape: tuple, fill: Fill) -> torch.Tensor:
    return fill((1, *shape[1:])).expand(shape) if shape else fill(shape)


def _repeated(shape: tuple, fill: Fill) -> torch.Tensor:
    return fill((*shape[:-1], 1)).expand(shape) if shape else fill(shape)


def _offset(shape: tuple, fill: Fill) -> torch.Tensor:
    return fill((math.prod(shape) + 5,))[5:].view(shape)


def _channels_last(shape: tuple, fill: Fill) -> torch.Tensor:
    return fill((shape[0], *shape[2:], shape[1])).permute(0, -1, *range(1, len(shape) - 1)) if len(shape) in (3, 4) else fill(shape)


def _diagonal(shape: tuple, fill: Fill) -> torch.Tensor:
    return fill((*shape, shape[-1])).diagonal(0, -2, -1) if shape else fill(shape)


def _windows(shape: tuple, fill: Fill) -> torch.Tensor:
    """Self-overlapping: neighbouring rows share all but one element."""
    if len(shape) != 2 or 0 in shape:
        return fill(shape)
    return fill((shape[0] + shape[1] - 1,)).unfold(0, shape[1], 1)


LAYOUTS: dict[str, Callable[[tuple, Fill], torch.Tensor]] = {
    "contiguous": lambda shape, fill: fill(shape),
    "transposed": _transposed,
    "reversed": lambda shape, fill: fill(shape[::-1]).permute(tuple(range(len(shape)))[::-1]),
    "stepped": _stepped,
    "rows": _rows,
    "window": _window,
    "expanded": _expanded,
    "repeated": _repeated,
    "offset": _offset,
    "channels_last": _channels_last,
    "diagonal": _diagonal,
    "windows": _windows,
}

# what may be made of a complex tensor of that layout: for float32 and float64 alone
PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": lambda z: z.conj().imag,
    "real": lambda z: z.real,
}
COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def numbers(shape: tuple, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Always the same numbers, whatever the default dtype and device are."""
    generator = torch.Generator("cpu").manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, device="cpu").bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-4, 5, shape, generator=generator, device="cpu", dtype=dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, device="cpu", dtype=dtype)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float64).to(dtype)


def tensor(shape: tuple, dtype: torch.dtype, layout: str = "contiguous", grad: str = "", part: str = "", seed: int = 0, device: str = "cpu") -> Made:
    """`grad`: "" none, "leaf" the argument is a leaf, "inner" it is a view of a function of one.  `part`: a row of PARTS, or "conj" of a complex one."""
    kind = COMPLEX[dtype] if part in PARTS else dtype
    leaves: list[torch.Tensor] = []

    def fill(wanted: tuple) -> torch.Tensor:
        t = numbers(wanted, kind, seed).to(device)
        if grad != "inner":
            return t
        leaves.append(t.requires_grad_())
        return t * 1

    t = LAYOUTS[layout](shape, fill)
    t = t.conj() if part == "conj" else PARTS[part](t) if part else t
    if grad == "leaf":
        t = t.detach().requires_grad_()
        leaves.append(t)
    return Made(t, leaves[0] if leaves else None)
