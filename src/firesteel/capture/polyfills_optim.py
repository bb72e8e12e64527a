"""Steps of optimisers that ask tensors for numbers, written with tensors alone: one graph, however many steps there were.

ASGD and RAdam have such a form themselves, for CUDA graphs (`capturable`); Adafactor gets one here.  The forms with lists of tensors become those of
single tensors, whose kernels are the same.

What always holds: where eager compares Python's numbers, NaN included, `torch.where` chooses the same.
"""
from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import _adafactor, asgd, radam
from torch.optim.optimizer import _to_scalar


def with_tensors(module: types.ModuleType, name: str) -> dict[Any, Callable[..., None]]:
    """Rows for an optimiser's two forms: its capturable form of single tensors, where its states are on the parameters' device."""
    forms = [getattr(module, f"_{kind}_tensor_{name}") for kind in ("single", "multi")]
    single, multi = (types.FunctionType(form.__code__, form.__globals__, form.__name__, form.__defaults__) for form in forms)

    def step(original: Callable[..., None]) -> Callable[..., None]:
        def stepped(params: list[Tensor], *states: list[Tensor], capturable: bool, **settings: Any) -> None:
            beside = [step.device for step in states[-1]] == [p.device for p in params]
            (single if beside else original)(params, *states, capturable=capturable or beside, **settings)
        return stepped
    return dict(zip(forms, map(step, (single, multi))))


def adafactor(params: list[Tensor], grads: list[Tensor], row_vars: list[Any], col_vars: list[Any], variances: list[Any], state_steps: list[Tensor],
              grad_scale: Tensor | None, found_inf: Tensor | None, *, d: float, lr: Any, beta2_decay: float, weight_decay: float,
              eps1: float | None, eps2: float, maximize: bool, has_complex: bool) -> None:
    """torch.optim's formulas; its Python numbers are tensors of double precision."""
    if grad_scale is not None or found_inf is not None:
        raise AssertionError("Grad scaling should occur outside of optimizer.step()")
    lr = _to_scalar(lr)
    for param, given, row_var, col_var, variance, step in zip(params, grads, row_vars, col_vars, variances, state_steps):
        grad = -given if maximize else given
        least = torch.finfo(param.dtype).eps if eps1 is None else eps1
        step += 1
        count = step.double()
        rate = 1 / count ** 0.5
        rate = torch.where(rate < lr, rate, lr)
        size = param.norm(2).double() / param.numel() ** 0.5
        alpha = torch.where(size > eps2, size, eps2) * rate
        if weight_decay != 0:
            param.mul_(1 - lr * weight_decay)
        new = (count ** beta2_decay).to(param)
        if grad.dim() > 1:
            row_var.lerp_(torch.norm(grad, dim=-1, keepdim=True).square() / grad.size(-1), new)
            col_var.lerp_(torch.norm(grad, dim=-2, keepdim=True).square() / grad.size(-2), new)
            estimate = row_var * col_var / row_var.mean(dim=-2, keepdim=True).clamp(min=least)
        else:
            variance.lerp_(grad * grad, new)
            estimate = variance
        update = estimate.clamp(min=least * least).rsqrt() * grad
        excess = update.norm(2).double() / (update.numel() ** 0.5 * d)
        param.sub_(update * (alpha / torch.where(excess > 1.0, excess, 1.0)).to(param))


STEPS: dict[Any, Callable[..., None]] = {
    **with_tensors(asgd, "asgd"), **with_tensors(radam, "radam"), _adafactor._single_tensor_adafactor: adafactor,
    _adafactor._multi_tensor_adafactor: adafactor}
