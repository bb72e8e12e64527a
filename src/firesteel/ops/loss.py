"""Losses and their gradients.  `reduction` is eager's number: 0 none, 1 mean, 2 sum."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import cast, in_order, in_strides_of
from firesteel.graph.rules.base import check, elementwise, expands_to, result_dtype
from firesteel.graph.rules.refusals import as_many, known, must_be_float, same_shape
from firesteel.graph.sizes import current, must_match
from firesteel.graph.spec import Spec, fresh, is_contiguous, like
from firesteel.ops.block import decomposition, device_rule, operator, refuses, rule, shape
from firesteel.sym.expr import Size, product

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2


def _loss(operands: list[Spec], reduction: int, dtype: torch.dtype) -> Spec:
    full = elementwise(operands, dtype)
    return full if reduction == 0 else fresh(full, ())


def _loss_in_target(x: Spec, target: Spec, reduction: int, dtype: torch.dtype) -> Spec:
    """A loss that eager computes in place, in a copy of the target with this dtype."""
    check(expands_to(x.shape, target.shape), f"The size of tensor a {list(x.shape)} must match the size of tensor b {list(target.shape)}")
    check(torch.can_cast(result_dtype((x, target)), dtype), f"result type can't be cast to the desired output type {dtype}")
    return like(target, dtype=dtype) if reduction == 0 else fresh(target, (), dtype)


def _reduce(loss: Tensor, reduction: int) -> Tensor:
    if reduction == MEAN:
        return aten.mean.default(loss)
    return aten.sum.default(loss) if reduction == SUM else loss


def _share(grad: Tensor, count: Any, reduction: int) -> Tensor:
    """The gradient of one element's loss."""
    return grad / count if reduction == MEAN else grad


# ---------------------------------------------------------------- negative log likelihood

@device_rule("nll_loss_forward")
def nll_loss_forward(x: Spec, target: Spec, weight: Spec | None, reduction: int, ignore_index: Size) -> tuple[Spec, Spec]:
    check(0 < len(x.shape) <= 2, "input tensor should be 1D or 2D")
    shape = x.shape[:1] if reduction == 0 and len(x.shape) == 2 else ()
    return fresh(x, shape), fresh(x, ())


@device_rule("nll_loss2d_forward")
def nll_loss2d_forward(x: Spec, target: Spec, weight: Spec | None, reduction: int, ignore_index: Size) -> tuple[Spec, Spec]:
    shape = (x.shape[0], *x.shape[2:]) if reduction == 0 else ()
    return fresh(x, shape), fresh(x, ())


@refuses("nll_loss_forward")
def refuse_nll_loss(x: Spec, target: Spec, weight: Spec | None, reduction: int, ignore_index: Size) -> None:
    must_be_float(x, "nll_loss")
    check(target.dtype in (torch.int64, torch.uint8), f"expected target dtype to be Long or Byte, but got {target.dtype}")
    check(len(target.shape) == max(len(x.shape) - 1, 0) or len(x.shape) == 1 and len(target.shape) == 1, "target has a wrong number of dimensions")
    for a, b in zip(target.shape, (*x.shape[:1], *x.shape[2:]) if len(x.shape) > 1 else (1,)):
        must_match(a, b, f"size mismatch (got input: {list(x.shape)}, target: {list(target.shape)})")
    if weight is not None:
        check(weight.dtype is x.dtype, f"expected scalar type {x.dtype} but found {weight.dtype}")
        check(len(weight.shape) == 1, "weight tensor should be defined either for all classes or no classes")
        must_match(weight.shape[0], x.shape[1] if len(x.shape) > 1 else x.shape[0], "weight tensor should be defined for all classes or no classes")


@refuses("nll_loss2d_forward")
def refuse_nll_loss2d(x: Spec, target: Spec, weight: Spec | None, reduction: int, ignore_index: Size) -> None:
    refuse_nll_loss(x, target, weight, reduction, ignore_index)
    check(target.dtype is torch.int64, f"expected scalar type Long but found {target.dtype}")


decomposition("nll_loss_forward nll_loss2d_forward")(
    lambda x, target, weight, reduction, ignore_index: _nll(x, target, weight, reduction, ignore_index))


def _nll(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: Any):
    counted, safe, each, dim = _nll_parts(x, target, weight, ignore)
    picked = aten.squeeze.dim(aten.gather.default(x, dim, aten.unsqueeze.default(safe, dim)), dim)
    # a target that is not counted gives 0 even where the element is infinite
    loss = aten.where.self(counted, aten.neg.default(picked) * each, aten.zeros_like.default(picked))
    if reduction == NONE and x.dim() > 1:
        return loss.contiguous(), aten.new_zeros.default(x, [])
    total = aten.sum.default(each)
    summed = aten.sum.default(loss)
    return summed / total if reduction == MEAN else summed, total


def _nll_parts(x: Tensor, target: Tensor, weight: Tensor | None, ignore: Any) -> tuple[Tensor, Tensor, Tensor, int]:
    """(is the target counted?, the target or 0, its weight, the dimension of classes)"""
    dim, target = 1 if x.dim() > 1 else 0, cast(target, torch.int64)
    counted = target != ignore
    safe = aten.where.self(counted, target, aten.zeros_like.default(target))
    ones = aten.full.default([], 1, dtype=x.dtype, device=x.device)
    each = ones if weight is None else aten.index.Tensor(weight, [safe])
    each = aten.where.self(counted, each, aten.zeros_like.default(each))
    return counted, safe, each, dim


device_rule("nll_loss_backward nll_loss2d_backward")(lambda grad, x, *rest: fresh(x))


@refuses("nll_loss2d_backward")
def refuse_nll_loss2d_backward(grad: Spec, x: Spec, *rest: Any) -> None:
    refuse_nll_loss_backward(grad, x, *rest)
    check(is_contiguous(like(x)), "grad_input must be contiguous")       # eager makes it like x


@refuses("nll_loss_backward")
def refuse_nll_loss_backward(grad: Spec, x: Spec, target: Spec, weight: Spec | None, reduction: int, ignore_index: Size, total: Spec) -> None:
    refuse_nll_loss(x, target, weight, reduction, ignore_index)
    if reduction == 0 and len(x.shape) > 1:
        same_shape(grad.shape, target.shape, f"Expected a gradient of size {list(target.shape)}, got {list(grad.shape)}")
    else:
        as_many(grad, 1, "gradient")
    as_many(total, 1, "total weight")


@decomposition("nll_loss2d_backward")
def decompose_nll_loss2d_backward(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """Refused here too: a backward is traced with decompositions, which do not ask the rule."""
    if not aten.empty_like.default(x).is_contiguous():
        raise RuntimeError("grad_input must be contiguous")
    return decompose_nll_loss_backward(grad, x, *rest)


@decomposition("nll_loss_backward")
def decompose_nll_loss_backward(grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: Any,
                      total_weight: Tensor) -> Tensor:
    """Each class is compared with the target: pointwise, so that it fuses with what reads it."""
    counted, safe, each, dim = _nll_parts(x, target, weight, ignore_index)
    grad = grad / total_weight if reduction == MEAN else grad
    value = aten.neg.default(grad * each)
    classes = aten.arange.start_step(0, x.shape[dim], 1, dtype=safe.dtype, device=x.device)
    if dim == 1:
        classes = aten.view.default(classes, [x.shape[1]] + [1] * (x.dim() - 2))
        safe, value, counted = (aten.unsqueeze.default(t, 1) for t in (safe, value, counted))
    hit = aten.logical_and.default(classes == safe, counted)
    return in_order(aten.where.self(hit, value, aten.scalar_tensor.default(0, dtype=x.dtype, device=x.device)))


# ---------------------------------------------------------------- distances

device_rule("mse_loss smooth_l1_loss", probed=True)(
    lambda x, target, reduction=1, *args: _loss([x, target], reduction, result_dtype((x, target))))


def _difference(x: Tensor, target: Tensor) -> Tensor:
    """Bools are subtracted as numbers."""
    x, target = (cast(t, other.dtype) if t.dtype is torch.bool else t for t, other in ((x, target), (target, x)))
    return x - target


@decomposition("mse_loss")
def decompose_mse_loss(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    difference = _difference(x, target)
    return _reduce(difference * difference, reduction)


@device_rule("mse_loss_backward smooth_l1_loss_backward huber_loss_backward")
def mse_loss_backward(grad: Spec, x: Spec, target: Spec, *args: Any) -> Spec:
    """Eager writes it to contiguous memory."""
    return fresh(elementwise([x, target, grad], result_dtype((x, target))))


device_rule("soft_margin_loss_backward")(lambda grad, x, target, *args: elementwise([x, target, grad], result_dtype((x, target))))


@decomposition("mse_loss_backward")
def decompose_mse_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    difference = _difference(x, target)
    return in_order(difference * (_share(grad, difference.numel(), reduction) * 2))


@refuses("smooth_l1_loss")
def refuse_smooth_l1_loss(x: Spec, target: Spec, reduction: int = 1, beta: float = 1.0) -> None:
    check(not known(beta) or beta >= 0, "smooth_l1_loss does not support negative values for beta.")


@decomposition("smooth_l1_loss")
def decompose_smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    away = aten.abs.default(_difference(x, target))
    if beta == 0:
        return _reduce(away, reduction)
    return _reduce(aten.where.self(away < beta, away * away * (0.5 / beta), away - 0.5 * beta), reduction)


@decomposition("smooth_l1_loss_backward")
def decompose_smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    difference = _difference(x, target)
    share = _share(grad, difference.numel(), reduction)
    if beta == 0:
        return in_order(aten.sign.default(difference) * share)
    return in_order(aten.clamp.default(difference / beta, -1, 1) * share)


device_rule("huber_loss", probed=True)(
    lambda x, target, reduction=1, delta=1.0: like(x) if reduction == 0 and x.shape == target.shape else _loss([x, target], reduction, x.dtype))


@refuses("huber_loss")
def refuse_huber_loss(x: Spec, target: Spec, reduction: int = 1, delta: float = 1.0) -> None:
    check(not known(delta) or delta > 0, "huber_loss does not support non-positive values for delta.")


@decomposition("huber_loss")
def decompose_huber_loss(x: Tensor, target: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    away = aten.abs.default(_difference(x, target))
    return _reduce(cast(aten.where.self(away < delta, away * away * 0.5, (away - 0.5 * delta) * delta), x.dtype), reduction)


@decomposition("huber_loss_backward")
def decompose_huber_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    check(x.dtype is target.dtype, f"Found dtype {target.dtype} but expected {x.dtype}")
    difference = _difference(x, target)
    return in_order(aten.clamp.default(difference, -delta, delta) * _share(grad, difference.numel(), reduction))


# ---------------------------------------------------------------- margins

@device_rule("soft_margin_loss", probed=True)
def soft_margin_loss(x: Spec, target: Spec, reduction: int = 1) -> Spec:
    return _loss_in_target(target, x, reduction, x.dtype)       # computed in place in a copy of x


decomposition("soft_margin_loss")(
    lambda x, target, reduction=MEAN: _reduce(aten.log1p.default(aten.exp.default(cast(aten.neg.default(x) * target, x.dtype))), reduction))


@decomposition("soft_margin_loss_backward")
def decompose_soft_margin_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    z = aten.exp.default(aten.neg.default(target) * x)
    return aten.neg.default(target) * z * _share(grad, x.numel(), reduction) / (z + 1)


shape("multi_margin_loss")(lambda x, target, p=1, margin=1, weight=None, reduction=1: target.shape if reduction == 0 else ())


@rule("multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(x: Spec, target: Spec, reduction: int) -> tuple[Spec, Spec]:
    each = x.shape[:1] if reduction == 0 and len(x.shape) == 2 else ()
    return fresh(x, each), fresh(x, target.shape)


@refuses("multilabel_margin_loss_forward")
def refuse_multilabel_margin_loss_forward(x: Spec, target: Spec, reduction: int) -> None:
    shapes = f"target size: {list(target.shape)} for input of size: {list(x.shape)}"
    check(len(x.shape) <= 2 and x.shape[-1:] != (0,), f"Expected non-empty vector or matrix with optional 0-dim batch size, but got: {list(x.shape)}")
    check(len(target.shape) == len(x.shape) or len(x.shape) < 2 and product(target.shape) == product(x.shape), f"inconsistent {shapes}")
    for wanted, given in zip(x.shape, target.shape):
        must_match(wanted, given, f"inconsistent {shapes}")


rule("multi_margin_loss_backward multilabel_margin_loss_backward _ctc_loss_backward _ctc_loss_backward.Tensor")(
    lambda grad, x, *rest, **options: fresh(x, x.shape))


# ---------------------------------------------------------------- cross entropy of probabilities

device_rule("binary_cross_entropy", probed=True)(lambda x, target, weight=None, reduction=1: like(x) if reduction == 0 else fresh(x, ()))


@refuses("binary_cross_entropy")
def refuse_binary_cross_entropy(x: Spec, target: Spec, weight: Spec | None = None, reduction: int = 1) -> None:
    check(x.dtype is target.dtype, f"Found dtype {target.dtype} but expected {x.dtype}")
    same_shape(x.shape, target.shape, f"Using a target size ({list(target.shape)}) that is different to the input size ({list(x.shape)})")
    weighs(weight, x)


def weighs(weight: Spec | None, loss: Spec) -> None:
    """The weight of a loss, multiplied in place."""
    if weight is not None:
        check(expands_to(weight.shape, loss.shape), f"output with shape {list(loss.shape)} doesn't match the broadcast shape of {list(weight.shape)}")
        check(torch.can_cast(weight.dtype, loss.dtype), f"result type {weight.dtype} can't be cast to the desired output type {loss.dtype}")


def checked(result: Tensor, right: Tensor) -> Tensor:
    """The result; where `right` does not hold everywhere, the kernel that computes it reports an index out of range, and eager says what is wrong.
    How often it does not hold is counted in floats, which fuses with the sum of a loss."""
    wrong = aten.sum.default(cast(aten.logical_not.default(right), torch.float64 if result.dtype is torch.float64 else torch.float32))
    place = aten.take.default(aten.arange.default(2, device=result.device), aten.where.Scalar(wrong == 0, 1, 2))
    return aten.where.self(place == 1, result, aten.zeros_like.default(result))


@decomposition("binary_cross_entropy")
def decompose_binary_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:
    """Logarithms are cut off at -100, as in eager."""
    right = (x >= 0) & (x <= 1) & (target >= 0) & (target <= 1)
    log_x = aten.clamp_min.default(aten.log.default(x), -100)
    log_rest = aten.clamp_min.default(aten.log1p.default(aten.neg.default(x)), -100)
    loss = (target - 1) * log_rest - target * log_x
    return checked(_reduce(loss if weight is None else loss * weight, reduction), right)


device_rule("binary_cross_entropy_backward")(lambda grad, x, target, weight=None, reduction=1: like(x))


@refuses("binary_cross_entropy_backward")
def refuse_bce_backward(grad: Spec, x: Spec, target: Spec, weight: Spec | None = None, reduction: int = 1) -> None:
    refuse_binary_cross_entropy(x, target, weight)
    check(expands_to(grad.shape, x.shape), f"Expected a gradient of size {list(x.shape)}, got {list(grad.shape)}")


@decomposition("binary_cross_entropy_backward")
def decompose_binary_cross_entropy_backward(grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:
    result = grad * (x - target) / aten.clamp_min.default((1 - x) * x, 1e-12)
    result = result if weight is None else result * weight
    return in_strides_of(_share(result, x.numel(), reduction), x)


device_rule("binary_cross_entropy_with_logits", probed=True)(
    lambda x, target, weight=None, pos_weight=None, reduction=1: _loss_in_target(x, target, reduction, target.dtype))


@refuses("binary_cross_entropy_with_logits")
def refuse_bce_with_logits(x: Spec, target: Spec, weight: Spec | None = None, pos_weight: Spec | None = None, reduction: int = 1) -> None:
    must_be_float(x, "log_sigmoid")
    weighs(weight, target)


@decomposition("binary_cross_entropy_with_logits")
def decompose_bce_with_logits(x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None,
                    reduction: int = MEAN) -> Tensor:
    """In the dtype of the target, in which eager writes in place."""
    # log(sigmoid(x)) without overflow
    log_sigmoid = aten.minimum.default(x, aten.zeros_like.default(x)) - aten.log1p.default(aten.exp.default(aten.neg.default(aten.abs.default(x))))
    log_sigmoid = log_sigmoid if pos_weight is None else ((pos_weight - 1) * target + 1) * log_sigmoid
    loss = cast(cast((1 - target) * x, target.dtype) - log_sigmoid, target.dtype)
    return _reduce(loss if weight is None else cast(loss * weight, target.dtype), reduction)


# ---------------------------------------------------------------- sequences

operator("_ctc_loss.* _ctc_loss_backward.*", library=True)


@rule("_ctc_loss _ctc_loss.Tensor")
def ctc_loss(log_probs: Spec, targets: Spec, input_lengths: Any, target_lengths: Any, blank: int = 0,
             zero_infinity: bool = False) -> tuple[Spec, Spec]:
    """The losses, and the logarithms of the probabilities of all beginnings, twice as many as the longest target has places; in one of both forms
    the lengths of targets stand in a tensor."""
    steps, batch = log_probs.shape[:2]
    if isinstance(target_lengths, list):
        beginnings: Size = 2 * max(target_lengths, default=0) + 1
    else:
        beginnings = current.env.create_unbacked(1, None, "ctc_loss")
    return fresh(log_probs, (batch,)), fresh(log_probs, (batch, steps, beginnings))
