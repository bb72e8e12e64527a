"""Functions whose C++ code takes a float as a plain number: the same by operators that take it as a symbol, so that blocks of a model that differ
in it (an eps, a momentum, a chance of dropping, the scale of attention) share one graph.

Each is a row of `functions.py`, used where an argument is a symbolic float.  Other calls of these functions run as they are: a guard fixes the float.

    F.layer_norm(x, (8,), eps=s0)       # the decomposition of native_layer_norm, with s0 as an argument of its kernel
"""
# ruff: noqa: A001, A002      the names are those of the functions
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firesteel.graph.decomp import DECOMPOSITIONS
from firesteel.graph.functions import FUNCTIONS
from firesteel.graph.products import attention as attention_of_sizes
from firesteel.graph.products import in_older, left_alone, masked
from firesteel.graph.random_state import ZEROS_AND_ONES
from firesteel.graph.schemas import facts
from firesteel.graph.tensor import to_spec
from firesteel.targets import on_host

aten = torch.ops.aten
NONE, MEAN = 0, 1       # reductions, as the C++ code of losses counts them


def float_row(*functions: Any, otherwise: Callable = left_alone) -> Callable[[Callable], Callable]:
    """Rows that are used where an argument is a symbolic float; `otherwise`: the row for plain numbers."""
    def add(row: Callable) -> Callable:
        @wraps(row)
        def where_symbolic(*args: Any, **kwargs: Any) -> Any:
            symbolic = any(type(v) is torch.SymFloat for v in args) or any(type(v) is torch.SymFloat for v in kwargs.values())
            return (row if symbolic else otherwise)(*args, **kwargs)
        for function in functions:
            FUNCTIONS.add(function, where_symbolic)
        return where_symbolic
    return add


def decomposed(op: Any, *args: Any) -> Any:
    """The operator by its decomposition, where its rule, which has eager's checks, takes the arguments."""
    rule = facts(op).rule
    assert rule is not None, op
    rule(*map(to_spec, args))
    return DECOMPOSITIONS[op](*args)


def as_tensor(number: Any, like: Tensor) -> Tensor:
    """The number as a tensor without dimensions, which promotes nothing."""
    return torch.full((), number, dtype=like.dtype, device=like.device)


# ---------------------------------------------------------------- normalisations

@float_row(torch.layer_norm)
def layer_norm(input: Tensor, normalized_shape: Sequence[Any], weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn: bool = True) -> Any:
    return decomposed(aten.native_layer_norm.default, input, list(normalized_shape), weight, bias, eps)[0]


@float_row(torch.rms_norm)
def rms_norm(input: Tensor, normalized_shape: Sequence[Any], weight: Any = None, eps: Any = None) -> Any:
    if weight is not None and weight.dtype is not input.dtype:
        return NotImplemented       # eager promotes
    return decomposed(aten._fused_rms_norm.default, input, list(normalized_shape), weight, eps)[0]


@float_row(torch.group_norm)
def group_norm(input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn: bool = True) -> Any:
    n, c = input.shape[:2]
    if num_groups <= 0 or c % num_groups != 0:
        return NotImplemented       # eager says so
    return decomposed(aten.native_group_norm.default, input, weight, bias, n, c, math.prod(input.shape[2:]), num_groups, eps)[0]


@float_row(torch.batch_norm)
def batch_norm(input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: Any, eps: Any, cudnn: bool = True) -> Any:
    if input.dim() < 2 or (mean is None) != (var is None) or not training and mean is None:
        return NotImplemented       # eager says what is wrong
    if not training or mean is None:
        return decomposed(aten.native_batch_norm.default, input, weight, bias, mean, var, training, momentum, eps)[0]
    made = decomposed(aten._native_batch_norm_legit_functional.default, input, weight, bias, mean, var, True, momentum, eps)
    with torch.no_grad():
        mean.copy_(made[3])
        var.copy_(made[4])
    return made[0]


@float_row(torch.instance_norm)
def instance_norm(input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, use_input_stats: bool, momentum: Any, eps: Any, cudnn: bool) -> Any:
    """A batch norm of one batch, as eager's."""
    if mean is not None or var is not None or not use_input_stats:
        return NotImplemented
    n, c = input.shape[:2]
    weight, bias = (None if p is None else p.repeat(n) for p in (weight, bias))
    flat = input.contiguous().view(1, n * c, *input.shape[2:])
    return batch_norm(flat, weight, bias, None, None, True, momentum, eps).view(input.shape)


# ---------------------------------------------------------------- attention, dropout, random numbers

@float_row(F.scaled_dot_product_attention, otherwise=in_older(attention_of_sizes))
def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: bool = False, scale: Any = None,
              enable_gqa: bool = False) -> Any:
    """The scale goes into the query; half precision would round it there.  Dropping needs the scores, which eager's CPU makes then too."""
    if query.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    if isinstance(scale, torch.SymFloat):
        factor: Any = scale
        return _attention(query * factor, key, value, attn_mask, dropout_p, is_causal, 1.0, enable_gqa)
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout_p: Any, is_causal: bool, scale: Any, enable_gqa: bool) -> Any:
    if type(dropout_p) is not torch.SymFloat or dropout_p == 0:
        plain = dropout_p if type(dropout_p) is not torch.SymFloat else 0.0
        return F.scaled_dot_product_attention(query, key, value, mask, plain, is_causal, scale=scale, enable_gqa=enable_gqa)
    if not on_host(query) or enable_gqa or is_causal and mask is not None:
        return NotImplemented
    if is_causal:
        mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)      # the two sides, as eager's
    scores = torch.matmul(query * factor, (key * factor).transpose(-2, -1))
    weights = aten._safe_softmax(masked(scores, mask), -1)
    return torch.matmul(dropout(weights, dropout_p, True), value)


def _noise(input: Tensor, shape: Sequence[Any], kept: Any) -> Tensor:
    with torch.no_grad():
        return ZEROS_AND_ONES(input.new_empty(shape) if shape != input.shape else input, kept)


@float_row(torch.dropout, F.dropout)
def dropout(input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """As eager's on the CPU."""
    return _dropout(input, p, training, inplace, input.shape)


@float_row(torch.feature_dropout)
def feature_dropout(input: Tensor, p: Any, training: bool) -> Any:
    return _dropout(input, p, training, False, _channels(input)) if input.dim() > 1 else NotImplemented


def _channels(input: Tensor) -> list[Any]:
    return [*input.shape[:2], *[1] * (input.dim() - 2)]


def _dropout(input: Tensor, p: Any, training: bool, inplace: bool, shape: Sequence[Any]) -> Any:
    if not training and 0 <= p <= 1:
        return input
    if inplace or not 0 < p < 1 or not on_host(input):
        return NotImplemented
    return input * _noise(input, shape, 1 - p).div_(1 - p)


@float_row(torch.alpha_dropout)
def alpha_dropout(input: Tensor, p: Any, training: bool) -> Any:
    return _alpha_dropout(input, p, training, input.shape)


@float_row(torch.feature_alpha_dropout)
def feature_alpha_dropout(input: Tensor, p: Any, training: bool) -> Any:
    return _alpha_dropout(input, p, training, _channels(input)) if input.dim() > 1 else NotImplemented


def _alpha_dropout(input: Tensor, p: Any, training: bool, shape: Sequence[Any]) -> Any:
    if not training or not 0 < p < 1 or not on_host(input):
        return input if not training and 0 <= p <= 1 else NotImplemented
    alpha = 1.7580993408473766
    scale = 1 / ((alpha * alpha * p + 1) * (1 - p)) ** 0.5
    noise = _noise(input, shape, 1 - p)
    return input * (noise * scale) + ((noise - 1) * (alpha * scale) + alpha * scale * p)


@float_row(Tensor.bernoulli_)
def bernoulli_(self: Tensor, p: Any = 0.5, *, generator: Any = None) -> Any:
    if generator is not None or not 0 <= p <= 1 or not on_host(self):
        return NotImplemented
    return self.copy_(_noise(self, self.shape, p))


@float_row(torch.bernoulli, Tensor.bernoulli)
def bernoulli(input: Tensor, p: Any, *, generator: Any = None, out: Any = None) -> Any:
    if generator is not None or out is not None or not 0 <= p <= 1 or not on_host(input) or input.requires_grad:     # of which there is no gradient
        return NotImplemented
    return _noise(input, input.shape, p)


@float_row(Tensor.exponential_)
def exponential_(self: Tensor, lambd: Any = 1.0, *, generator: Any = None) -> Any:
    return self.exponential_(generator=generator).div_(lambd) if lambd > 0 else NotImplemented


@float_row(Tensor.normal_)
def normal_(self: Tensor, mean: Any = 0.0, std: Any = 1.0, *, generator: Any = None) -> Any:
    return self.normal_(generator=generator).mul_(std).add_(mean) if std >= 0 else NotImplemented


@float_row(torch.normal)
def normal(mean: Any, std: Any, size: Any = None, *, generator: Any = None, out: Any = None, **options: Any) -> Any:
    if size is None or out is not None or isinstance(std, Tensor) or isinstance(mean, Tensor) or not std >= 0:
        return NotImplemented
    return torch.randn(size, generator=generator, **options) * std + mean


@float_row(Tensor.uniform_)
def uniform_(self: Tensor, low: Any = 0.0, high: Any = 1.0, *, generator: Any = None) -> Any:
    return self.uniform_(generator=generator).mul_(high - low).add_(low) if low <= high else NotImplemented


# ---------------------------------------------------------------- losses

@float_row(torch._C._nn.smooth_l1_loss)
def smooth_l1_loss(input: Tensor, target: Tensor, reduction: int, beta: Any) -> Any:
    return decomposed(aten.smooth_l1_loss.default, input, target, reduction, beta) if beta > 0 else NotImplemented


@float_row(torch._C._nn.huber_loss)
def huber_loss(input: Tensor, target: Tensor, reduction: int, delta: Any) -> Any:
    return decomposed(aten.huber_loss.default, input, target, reduction, delta) if delta > 0 else NotImplemented


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    return loss if reduction == NONE else loss.mean() if reduction == MEAN else loss.sum()


@float_row(torch._C._nn.cross_entropy_loss)
def cross_entropy(input: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int, smoothing: Any) -> Any:
    if not 0 < smoothing <= 1:
        return NotImplemented
    classes = 0 if input.dim() == 1 else 1
    share = smoothing / input.shape[classes]
    plain: Any = torch._C._nn.cross_entropy_loss
    if target.dtype.is_floating_point:
        return plain(input, target * (1 - smoothing) + share, weight, reduction, ignore_index, 0.0)
    logs, ignored = torch.log_softmax(input, classes), target == ignore_index
    weighted = logs if weight is None else logs * weight.view([-1] + [1] * (input.dim() - classes - 1))
    smooth = -weighted.sum(classes).masked_fill(ignored, 0)
    if reduction == MEAN:
        counted = torch.ones_like(smooth) if weight is None else weight[target.masked_fill(ignored, 0)]
        smooth = smooth.sum() / counted.masked_fill(ignored, 0).sum()
    elif reduction != NONE:
        smooth = smooth.sum()
    return plain(input, target, weight, reduction, ignore_index, 0.0) * (1 - smoothing) + smooth * share


@float_row(torch.margin_ranking_loss)
def margin_ranking_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: Any = 0.0, reduction: int = MEAN) -> Any:
    return _reduced((-target * (input1 - input2) + margin).clamp_min(0), reduction)


@float_row(torch.hinge_embedding_loss)
def hinge_embedding_loss(input: Tensor, target: Tensor, margin: Any = 1.0, reduction: int = MEAN) -> Any:
    zeros = torch.zeros_like(input)
    return _reduced(torch.where(target != 1, (margin - input).clamp_min(0), zeros) + torch.where(target != -1, input, zeros), reduction)


@float_row(torch.cosine_embedding_loss)
def cosine_embedding_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: Any = 0.0, reduction: int = MEAN) -> Any:
    if not input1.dim() == input2.dim() == target.dim() + 1 or target.dim() > 1:
        return NotImplemented       # eager says what is wrong
    dim = target.dim()
    squares = [(x * x).sum(dim) + 1e-12 for x in (input1, input2)]
    cosine = (input1 * input2).sum(dim) / (squares[0] * squares[1]).sqrt()
    zeros = torch.zeros_like(cosine)
    return _reduced(torch.where(target == 1, 1 - cosine, zeros) + torch.where(target == -1, (cosine - margin).clamp_min(0), zeros), reduction)


@float_row(torch.pairwise_distance)
def pairwise_distance(x1: Tensor, x2: Tensor, p: Any = 2.0, eps: Any = 1e-6, keepdim: bool = False) -> Any:
    return _distance(x1, x2, p, eps, keepdim) if type(p) is not torch.SymFloat else NotImplemented


def _distance(x1: Tensor, x2: Tensor, p: Any, eps: Any, keepdim: bool = False) -> Tensor:
    return torch.norm(x1 - x2 + eps, p, max(x1.dim(), x2.dim()) - 1, keepdim)


@float_row(torch.triplet_margin_loss)
def triplet_margin_loss(anchor: Tensor, positive: Tensor, negative: Tensor, margin: Any, p: Any, eps: Any, swap: bool, reduction: int) -> Any:
    if not anchor.dim() == positive.dim() == negative.dim() or type(p) is torch.SymFloat:
        return NotImplemented
    far = _distance(anchor, negative, p, eps)
    if swap:
        far = torch.min(_distance(positive, negative, p, eps), far)
    return _reduced((margin + _distance(anchor, positive, p, eps) - far).clamp_min(0), reduction)


# ---------------------------------------------------------------- pointwise

@float_row(torch.lerp, Tensor.lerp)
def lerp(input: Tensor, end: Tensor, weight: Any) -> Any:
    return torch.lerp(input, end, as_tensor(weight, input))


@float_row(torch.pow, Tensor.pow, operator.pow)
def power(input: Any, exponent: Any) -> Any:
    """torch's derivative asks whether the exponent is 0; that of a tensor does not."""
    if not isinstance(input, Tensor) or not input.dtype.is_floating_point or not input.requires_grad:
        return NotImplemented
    return torch.pow(input, as_tensor(exponent, input))


@float_row(torch.celu, F.celu)
def celu(input: Tensor, alpha: Any = 1.0, inplace: bool = False) -> Any:
    return torch._C._nn.elu(input, alpha, 1.0, 1 / alpha) if not inplace and alpha != 0 else NotImplemented


@float_row(torch.rrelu, F.rrelu)
def rrelu(input: Tensor, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False, inplace: Any = False) -> Any:
    """While training, how many numbers are drawn depends on the data: the kernel that draws them takes plain bounds."""
    return F.leaky_relu(input, (lower + upper) / 2) if not training and not inplace else NotImplemented


@float_row(F.pad, torch._C._nn.pad)
def pad(input: Tensor, pad: Sequence[Any], mode: str = "constant", value: Any = None) -> Any:
    return torch.constant_pad_nd(input, list(pad), value) if mode == "constant" else NotImplemented


@float_row(torch.quantile, Tensor.quantile)
def quantile(input: Tensor, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear", out: Any = None) -> Any:
    return _quantile(torch.quantile, input, q, dim, keepdim, interpolation, out)


@float_row(torch.nanquantile, Tensor.nanquantile)
def nanquantile(input: Tensor, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear", out: Any = None) -> Any:
    return _quantile(torch.nanquantile, input, q, dim, keepdim, interpolation, out)


def _quantile(function: Callable, input: Tensor, q: Any, dim: Any, keepdim: bool, interpolation: str, out: Any) -> Any:
    """As eager's, which makes a tensor of the number too."""
    if out is not None or not 0 <= q <= 1:
        return NotImplemented
    return function(input, as_tensor(q, input), dim, keepdim, interpolation=interpolation)


@float_row(torch.logit, Tensor.logit)
def logit(input: Tensor, eps: Any = None) -> Any:
    if not 0 <= eps <= 0.5:
        return NotImplemented       # the ends have changed places
    clamped = input.clamp(eps, 1 - eps)
    return torch.log(clamped / (1 - clamped))


@float_row(torch.nan_to_num, Tensor.nan_to_num)
def nan_to_num(input: Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    if not input.dtype.is_floating_point:
        return NotImplemented
    limits = torch.finfo(input.dtype)
    for found, number in ((input != input, 0.0 if nan is None else nan), (input == math.inf, limits.max if posinf is None else posinf),
                          (input == -math.inf, limits.min if neginf is None else neginf)):
        input = input.masked_fill(found, number)
    return input


@float_row(torch.isclose, Tensor.isclose)
def isclose(input: Tensor, other: Tensor, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False) -> Any:
    if not input.dtype.is_floating_point or input.dtype is not other.dtype or equal_nan or not (rtol >= 0 and atol >= 0):
        return NotImplemented
    away = (input - other).abs()
    return (input == other) | (away.isfinite() & (away <= atol + (rtol * other).abs()))


@float_row(torch.cosine_similarity)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: Any = 1e-8) -> Any:
    if not x1.dtype.is_floating_point or x1.dtype is not x2.dtype:
        return NotImplemented
    sides = []
    for x in torch.broadcast_tensors(x1, x2):
        norm = torch.linalg.vector_norm(x, 2, dim, True).clone()
        with torch.no_grad():
            norm.clamp_min_(eps)
        sides.append(x / norm)
    return (sides[0] * sides[1]).sum(dim)
