"""Steps of optimisers, and fake quantisation.  The fused steps of Adam are loops on the host; the rest are library calls."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import cast, widen
from firesteel.graph.spec import Spec, like
from firesteel.ops.block import decomposition, rule
from firesteel.records import dataclass
from firesteel.targets import on_host

aten = torch.ops.aten


@rule("_amp_update_scale_")
def _reject_amp(*args: Any) -> Spec:
    raise RuntimeError("loss scaling updates are not captured")


@rule("fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask "
      "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def fake_quantize(x: Spec, *settings: Any) -> tuple[Spec, Spec]:
    """The values, and where they lay within the range."""
    return like(x), like(x, dtype=torch.bool)


def _fused_step(lists: int) -> Any:
    """The first lists of arguments come back changed."""
    return lambda *args, **kwargs: tuple([list(specs) for specs in args[:lists]])


for _names, _lists in (("_fused_adam _fused_adam.tensor_lr _fused_adamw _fused_adamw.tensor_lr", 5),
                       ("_fused_sgd _fused_sgd.tensor_lr _fused_adagrad _fused_adagrad.tensor_lr", 3)):
    rule(_names)(_fused_step(_lists))


@dataclass(frozen=True)
class _Adam:
    """The settings of a step, and the formulas of eager's kernel for the CPU."""
    decoupled: bool
    lr: Any
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    maximize: bool
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def stepped(self, param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, largest: Tensor | None, count: Tensor) -> list[Tensor]:
        old = [param, grad, mean, square] + ([] if largest is None else [largest])
        param, grad, mean, square = map(widen, old[:4])
        scaled = grad = grad if self.grad_scale is None else grad / self.grad_scale
        grad = -grad if self.maximize else grad
        number = cast(count, torch.float64)
        size = cast(self.lr / (1 - aten.pow.Scalar(self.beta1, number)), param.dtype)
        root = cast(aten.sqrt.default(1 - aten.pow.Scalar(self.beta2, number)), param.dtype)
        if self.weight_decay:
            decay = self.lr * self.weight_decay if self.decoupled else self.weight_decay
            decay = cast(decay, param.dtype) if isinstance(decay, Tensor) else decay
            param, grad = (param - param * decay, grad) if self.decoupled else (param, grad + param * decay)
        mean = aten.lerp.Scalar(mean, grad, 1 - self.beta1)
        square = square * self.beta2 + grad * grad * (1 - self.beta2)
        top = square if largest is None else aten.maximum.default(widen(largest), square)
        param = param - mean * size / (aten.sqrt.default(top) / root + self.eps)
        new = [param, scaled, mean, square] + ([] if largest is None else [top])
        return [self._unless_infinite(cast(b, a.dtype), a) for a, b in zip(old, new)]

    def _unless_infinite(self, new: Tensor, old: Tensor) -> Tensor:
        return new if self.found_inf is None else aten.where.self(self.found_inf == 1, old, new)


def _adam_step(names: str, decoupled: bool) -> None:
    @decomposition(names)
    def decompose_fused_adam(params: Sequence[Tensor], grads: Sequence[Tensor], means: Sequence[Tensor], squares: Sequence[Tensor],
                             largest: Sequence[Tensor], counts: Sequence[Tensor], *, lr: Any, beta1: float, beta2: float, weight_decay: float,
                             eps: float, amsgrad: bool, maximize: bool, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> Any:
        if not all(map(on_host, params)):
            return NotImplemented       # one kernel of the library for all of them
        rate = cast(lr, torch.float64) if isinstance(lr, Tensor) else lr
        adam = _Adam(decoupled, rate, beta1, beta2, weight_decay, eps, maximize, grad_scale, found_inf)
        rows = [adam.stepped(p, g, m, s, largest[k] if amsgrad else None, n) for k, (p, g, m, s, n) in
                enumerate(zip(params, grads, means, squares, counts))]
        columns = [list(column) for column in zip(*rows)] or [[], [], [], []]
        return (*columns[:4], columns[4] if amsgrad and rows else list(largest))


_adam_step("_fused_adam _fused_adam.tensor_lr", False)
_adam_step("_fused_adamw _fused_adamw.tensor_lr", True)
