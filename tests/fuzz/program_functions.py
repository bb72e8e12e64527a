"""What random programs call beside torch: autograd functions of a user's, and a place to print to."""
from __future__ import annotations

import io
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import firesteel as fs

SINK = io.StringIO()


class Cubed(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, = ctx.saved_tensors
        return 3 * x * x * grad


class Squashed(torch.autograd.Function):
    """Saves its result; a number as an argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        y = torch.tanh(x * by)
        ctx.save_for_backward(y)
        ctx.by = by
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        y, = ctx.saved_tensors
        return (1 - y * y) * grad * ctx.by, None


class Doubled(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Parts(torch.autograd.Function):
    """Two results, one of which has no gradient; a tangent that does not arrive is None."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs)

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * y, x > y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, _: Any) -> Any:
        if grad is None:
            return None, None
        x, y = ctx.saved_tensors
        return (grad * y).sum_to_size(x.shape), (grad * x).sum_to_size(y.shape)


NAMES = {"fs": fs, "checkpoint": checkpoint, "SINK": SINK, "Cubed": Cubed, "Squashed": Squashed, "Doubled": Doubled, "Parts": Parts}
