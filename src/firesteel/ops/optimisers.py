"""Steps of optimisers, and fake quantisation.  Fused steps are loops on the host, and library calls elsewhere."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import cast, widen
from firesteel.graph.rules.base import check
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


@rule("_fused_moving_avg_obs_fq_helper")
def observed_quantize(x: Spec, observer_on: Spec, fake_on: Spec, low: Spec, *settings: Any) -> tuple[Spec, Spec]:
    """Observes the range, and quantises by it.  At the first call the observer's tensors get their size, a row each, which no graph can give them."""
    check(low.shape != (0,), "the observer has no size yet: a first call runs eagerly")
    return like(x), like(x, dtype=torch.bool)


rule("_fused_moving_avg_obs_fq_helper_functional")(
    lambda x, observer_on, fake_on, *state: (*observed_quantize(x, observer_on, fake_on, *state), *state[:4]))


def _fused_step(lists: int) -> Any:
    """The first lists of arguments come back changed."""
    return lambda *args, **kwargs: tuple([list(specs) for specs in args[:lists]])


for _names, _lists in (("_fused_adam _fused_adam.tensor_lr _fused_adamw _fused_adamw.tensor_lr", 5),
                       ("_fused_sgd _fused_sgd.tensor_lr _fused_adagrad.tensor_lr", 3), ("_fused_adagrad", 4)):
    rule(_names)(_fused_step(_lists))


@dataclass(frozen=True)
class _OptimiserStep:
    """The settings that all fused steps have; formulas are those of eager's kernels for the CPU."""
    lr: Any
    weight_decay: float
    maximize: bool
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """As it is written back, and as the step sees it."""
        scaled = grad if self.grad_scale is None else grad / self.grad_scale
        return scaled, -scaled if self.maximize else scaled

    def kept(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
        """New values in the dtypes of the old ones, which stay where a gradient was infinite."""
        rounded = [cast(b, a.dtype) for a, b in zip(old, new)]
        return rounded if self.found_inf is None else [aten.where.self(self.found_inf == 1, a, b) for a, b in zip(old, rounded)]


@dataclass(frozen=True)
class _Sgd(_OptimiserStep):
    momentum: float
    dampening: float
    nesterov: bool
    is_first_step: bool

    def stepped(self, *old: Tensor) -> list[Tensor]:
        """Of a parameter, its gradient and, with momentum, its average."""
        param, grad, *average = map(widen, old)
        scaled, grad = self.gradients(grad)
        grad = grad + param * self.weight_decay if self.weight_decay else grad
        if self.momentum:
            average = [grad if self.is_first_step else average[0] * self.momentum + grad * (1 - self.dampening)]
            grad = grad + average[0] * self.momentum if self.nesterov else average[0]
        return self.kept(old, [param - grad * self.lr, scaled, *average])


@dataclass(frozen=True)
class _Adagrad(_OptimiserStep):
    lr_decay: float
    eps: float

    def stepped(self, param: Tensor, grad: Tensor, total: Tensor, count: Tensor) -> list[Tensor]:
        old = [param, grad, total]
        param, grad, total = map(widen, old)
        scaled, grad = self.gradients(grad)
        rate = cast(self.lr / (1 + (cast(count, torch.float64) - 1) * self.lr_decay), param.dtype)
        grad = grad + param * self.weight_decay if self.weight_decay else grad
        total = total + grad * grad
        return self.kept(old, [param - rate * grad / (aten.sqrt.default(total) + self.eps), scaled, total])


@dataclass(frozen=True)
class _Adam(_OptimiserStep):
    decoupled: bool
    beta1: float
    beta2: float
    eps: float

    def stepped(self, param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, largest: Tensor | None, count: Tensor) -> list[Tensor]:
        old = [param, grad, mean, square] + ([] if largest is None else [largest])
        param, grad, mean, square = map(widen, old[:4])
        scaled, grad = self.gradients(grad)
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
        return self.kept(old, [param, scaled, mean, square] + ([] if largest is None else [top]))


def _rate(lr: Any) -> Any:
    return cast(lr, torch.float64) if isinstance(lr, Tensor) else lr


def _columns(rows: list[list[Tensor]], count: int) -> list[list[Tensor]]:
    """Lists of what each parameter has of one kind."""
    return [[row[k] for row in rows] for k in range(count)]


def _adam_step(names: str, decoupled: bool) -> None:
    @decomposition(names)
    def decompose_fused_adam(params: Sequence[Tensor], grads: Sequence[Tensor], means: Sequence[Tensor], squares: Sequence[Tensor],
                             largest: Sequence[Tensor], counts: Sequence[Tensor], *, lr: Any, beta1: float, beta2: float, weight_decay: float,
                             eps: float, amsgrad: bool, maximize: bool, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> Any:
        if not all(map(on_host, params)):
            return NotImplemented       # one kernel of the library for all of them
        adam = _Adam(_rate(lr), weight_decay, maximize, grad_scale, found_inf, decoupled, beta1, beta2, eps)
        rows = [adam.stepped(p, g, m, s, largest[k] if amsgrad else None, n) for k, (p, g, m, s, n) in
                enumerate(zip(params, grads, means, squares, counts))]
        return (*_columns(rows, 5 if amsgrad else 4), *([] if amsgrad else [list(largest)]))


_adam_step("_fused_adam _fused_adam.tensor_lr", False)
_adam_step("_fused_adamw _fused_adamw.tensor_lr", True)


@decomposition("_fused_sgd _fused_sgd.tensor_lr")
def decompose_fused_sgd(params: Sequence[Tensor], grads: Sequence[Tensor], averages: Sequence[Tensor], *, weight_decay: float, momentum: float,
                        lr: Any, dampening: float, nesterov: bool, maximize: bool, is_first_step: bool, grad_scale: Tensor | None = None,
                        found_inf: Tensor | None = None) -> Any:
    if not all(map(on_host, params)):
        return NotImplemented
    rate = cast(lr, params[0].dtype) if isinstance(lr, Tensor) and params else lr
    sgd = _Sgd(rate, weight_decay, maximize, grad_scale, found_inf, momentum, dampening, nesterov, is_first_step)
    rows = [sgd.stepped(*row) for row in (zip(params, grads, averages) if momentum else zip(params, grads))]
    return (*_columns(rows, 3 if momentum else 2), *([] if momentum else [list(averages)]))


@decomposition("_fused_adagrad _fused_adagrad.tensor_lr")
def decompose_fused_adagrad(params: Sequence[Tensor], grads: Sequence[Tensor], totals: Sequence[Tensor], counts: Sequence[Tensor], *, lr: Any,
                            lr_decay: float, weight_decay: float, eps: float, maximize: bool, grad_scale: Tensor | None = None,
                            found_inf: Tensor | None = None) -> Any:
    if not all(map(on_host, params)):
        return NotImplemented
    adagrad = _Adagrad(_rate(lr), weight_decay, maximize, grad_scale, found_inf, lr_decay, eps)
    columns = _columns([adagrad.stepped(*row) for row in zip(params, grads, totals, counts)], 3)
    return tuple(columns) if isinstance(lr, Tensor) else (*columns, list(counts))
