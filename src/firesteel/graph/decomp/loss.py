"""Decompositions of losses and their gradients.  `reduction` is eager's number: 0 none, 1 mean, 2 sum."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from firesteel.graph.decomp.table import aten, decomposition

NONE, MEAN, SUM = 0, 1, 2


def _reduce(loss: Tensor, reduction: int) -> Tensor:
    if reduction == MEAN:
        return aten.mean.default(loss)
    return aten.sum.default(loss) if reduction == SUM else loss


def _share(grad: Tensor, count: Any, reduction: int) -> Tensor:
    """The gradient of one element's loss."""
    return grad / count if reduction == MEAN else grad


# ---------------------------------------------------------------- negative log likelihood

def _nll_parts(x: Tensor, target: Tensor, weight: Tensor | None, ignore: Any) -> tuple[Tensor, Tensor, Tensor, int]:
    """(is the target counted?, the target or 0, its weight, the dimension of classes)"""
    dim = 1 if x.dim() > 1 else 0
    counted = target != ignore
    safe = aten.where.self(counted, target, aten.zeros_like.default(target))
    ones = aten.full.default([], 1, dtype=x.dtype, device=x.device)
    each = ones if weight is None else aten.index.Tensor(weight, [safe])
    each = aten.where.self(counted, each, aten.zeros_like.default(each))
    return counted, safe, each, dim


def _nll(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: Any):
    counted, safe, each, dim = _nll_parts(x, target, weight, ignore)
    picked = aten.squeeze.dim(aten.gather.default(x, dim, aten.unsqueeze.default(safe, dim)), dim)
    # a target that is not counted gives 0 even where the element is infinite
    loss = aten.where.self(counted, aten.neg.default(picked) * each, aten.zeros_like.default(picked))
    if reduction == NONE and x.dim() > 1:
        return loss, aten.new_zeros.default(x, [])
    total = aten.sum.default(each)
    summed = aten.sum.default(loss)
    return summed / total if reduction == MEAN else summed, total


@decomposition("nll_loss_forward nll_loss2d_forward")
def nll_loss_forward(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: Any):
    return _nll(x, target, weight, reduction, ignore_index)


@decomposition("nll_loss_backward nll_loss2d_backward")
def nll_loss_backward(grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: Any,
                      total_weight: Tensor) -> Tensor:
    """Each class is compared with the target: pointwise, so that it fuses with what reads it."""
    counted, safe, each, dim = _nll_parts(x, target, weight, ignore_index)
    grad = grad / total_weight if reduction == MEAN else grad
    value = aten.neg.default(grad * each)
    classes = aten.arange.start_step(0, x.shape[dim], 1, dtype=target.dtype, device=x.device)
    if dim == 1:
        classes = aten.view.default(classes, [x.shape[1]] + [1] * (x.dim() - 2))
        safe, value, counted = (aten.unsqueeze.default(t, 1) for t in (safe, value, counted))
    hit = aten.logical_and.default(classes == safe, counted)
    return aten.where.self(hit, value, aten.scalar_tensor.default(0, dtype=x.dtype, device=x.device))


# ---------------------------------------------------------------- differences

@decomposition("mse_loss")
def mse_loss(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    difference = x - target
    return _reduce(difference * difference, reduction)


@decomposition("mse_loss_backward")
def mse_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    difference = x - target
    return difference * (_share(grad, difference.numel(), reduction) * 2)


@decomposition("smooth_l1_loss")
def smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    away = aten.abs.default(x - target)
    if beta == 0:
        return _reduce(away, reduction)
    return _reduce(aten.where.self(away < beta, away * away * (0.5 / beta), away - 0.5 * beta), reduction)


@decomposition("smooth_l1_loss_backward")
def smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    difference = x - target
    share = _share(grad, difference.numel(), reduction)
    if beta == 0:
        return aten.sign.default(difference) * share
    return aten.clamp.default(difference / beta, -1, 1) * share


@decomposition("huber_loss")
def huber_loss(x: Tensor, target: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    away = aten.abs.default(x - target)
    return _reduce(aten.where.self(away < delta, away * away * 0.5, (away - 0.5 * delta) * delta), reduction)


@decomposition("huber_loss_backward")
def huber_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    difference = x - target
    return aten.clamp.default(difference, -delta, delta) * _share(grad, difference.numel(), reduction)


@decomposition("soft_margin_loss")
def soft_margin_loss(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    return _reduce(aten.log1p.default(aten.exp.default(aten.neg.default(x) * target)), reduction)


@decomposition("soft_margin_loss_backward")
def soft_margin_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    z = aten.exp.default(aten.neg.default(target) * x)
    return aten.neg.default(target) * z * _share(grad, x.numel(), reduction) / (z + 1)


# ---------------------------------------------------------------- cross entropy of probabilities

@decomposition("binary_cross_entropy")
def binary_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:
    """Logarithms are cut off at -100, as in eager."""
    log_x = aten.clamp_min.default(aten.log.default(x), -100)
    log_rest = aten.clamp_min.default(aten.log1p.default(aten.neg.default(x)), -100)
    loss = (target - 1) * log_rest - target * log_x
    return _reduce(loss if weight is None else loss * weight, reduction)


@decomposition("binary_cross_entropy_backward")
def binary_cross_entropy_backward(grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:
    result = grad * (x - target) / aten.clamp_min.default((1 - x) * x, 1e-12)
    result = result if weight is None else result * weight
    return _share(result, x.numel(), reduction)


@decomposition("binary_cross_entropy_with_logits")
def bce_with_logits(x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None,
                    reduction: int = MEAN) -> Tensor:
    # log(sigmoid(x)) without overflow
    log_sigmoid = aten.minimum.default(x, aten.zeros_like.default(x)) - aten.log1p.default(aten.exp.default(aten.neg.default(aten.abs.default(x))))
    if pos_weight is None:
        loss = (1 - target) * x - log_sigmoid
    else:
        loss = (1 - target) * x - ((pos_weight - 1) * target + 1) * log_sigmoid
    return _reduce(loss if weight is None else loss * weight, reduction)
