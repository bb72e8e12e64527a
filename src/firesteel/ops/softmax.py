"""Softmax, its logarithm, log-sum-exp, and their gradients."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import cast, in_order, is_nothing, widen, wrap
from firesteel.graph.rules.base import floating, wrap_dim
from firesteel.graph.rules.refusals import must_be_float, same_shape
from firesteel.graph.spec import Spec, fresh, like
from firesteel.loops.lower.build import Builder
from firesteel.loops.lower.sweeps import Sweeps, out_dtype
from firesteel.loops.lower.value import Operand
from firesteel.loops.scalars import S, compute_dtype, is_float, to
from firesteel.ops.block import decomposition, device_rule, loop_lowering, operator, probed_rule, refuses
from firesteel.ops.reduce import reduce_shape, reduced_dims

aten = torch.ops.aten

operator("_log_softmax_backward_data.* _softmax_backward_data.*", recompute="pointwise")
operator("logsumexp.* _softmax.* _log_softmax.*", recompute="reduce")
probed_rule("logsumexp")(lambda x, dim, keepdim=False: fresh(x, reduce_shape(x, reduced_dims(x, dim), keepdim), floating(x.dtype)))


@decomposition("logsumexp", core=False)
def decompose_logsumexp(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    wide = x if x.dtype.is_floating_point else cast(x, torch.get_default_dtype())
    top = aten.amax.default(wide, dims, True)
    top = aten.where.self(aten.isinf.default(top), aten.zeros_like.default(top), top)
    total = aten.log.default(aten.sum.dim_IntList(aten.exp.default(wide - top), dims, keepdim))
    return total + (top if keepdim else aten.squeeze.dims(top, dims))


@loop_lowering("logsumexp")
def lower_logsumexp(b: Builder, out: Any, x: Operand, dims: Any, keepdim: bool = False) -> Any:
    kind = out_dtype(out)
    sweeps, value = Sweeps(b, x.shape, dims), lambda i: to(x.load(i), kind)
    top = sweeps.reduce("max", kind, value)
    top = S.where(S.isinf(top), 0, top)
    total = sweeps.reduce("sum", kind, lambda i: S.exp(S.sub(value(i), top)))
    return sweeps.emit(sweeps.store(out, S.add(S.log(total), top), keepdim))


@device_rule("_softmax _log_softmax", probed=True)
def softmax(x: Spec, dim: int, half_to_float: bool) -> Spec:
    wrap_dim(dim, len(x.shape))
    return like(fresh(x, dtype=torch.float32 if half_to_float else x.dtype), memory_format=torch.contiguous_format)


device_rule("_safe_softmax")(lambda x, dim, dtype=None: fresh(x, dtype=dtype))


@refuses("_safe_softmax")
def refuse_safe_softmax(x: Spec, dim: int, dtype: torch.dtype | None = None) -> None:
    wrap_dim(dim, len(x.shape))
    must_be_float(x if dtype is None else x.to(dtype), "softmax")


def _shifted(x: Tensor, dim: int) -> Tensor:
    return x - aten.amax.default(x, [dim], True)


@decomposition("_softmax", core=False)
def decompose_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widen(x)
    result = torch.float32 if half_to_float else x.dtype
    if is_nothing(x):
        return aten.empty_like.default(x, dtype=result, memory_format=torch.contiguous_format)
    exps = aten.exp.default(_shifted(wide, wrap(dim, x.dim())) if x.dim() else wide - wide)
    return in_order(cast(exps / aten.sum.dim_IntList(exps, [dim] if x.dim() else [], True), result))


@decomposition("_log_softmax")
def decompose_log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    result = torch.float32 if half_to_float else x.dtype
    if x.dim() == 0 or is_nothing(x):
        return NotImplemented
    shifted = _shifted(widen(x), wrap(dim, x.dim()))
    total = aten.log.default(aten.sum.dim_IntList(aten.exp.default(shifted), [dim], True))
    return in_order(cast(shifted - total, result))


@decomposition("_safe_softmax")
def decompose_safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax in which a row of -inf gives zeros."""
    out = aten._softmax.default(cast(x, dtype or x.dtype), dim, False)
    blocked = aten.all.dim(x == -math.inf, dim, True)
    return aten.where.self(blocked, aten.scalar_tensor.default(0, dtype=out.dtype, device=x.device), out)


@loop_lowering("_softmax _log_softmax")
def lower_softmax(b: Builder, out: Any, x: Operand, dim: int, half_to_float: Any = False) -> Any:
    if not is_float(x.dtype):
        return NotImplemented
    kind = compute_dtype(x.dtype)
    sweeps, value = Sweeps(b, x.shape, dim), lambda i: to(x.load(i), kind)
    top = sweeps.reduce("max", kind, value)
    total = sweeps.reduce("sum", kind, lambda i: S.exp(S.sub(value(i), top)))
    if b.target is aten._log_softmax.default:
        return sweeps.emit(sweeps.map(out, lambda i: S.sub(S.sub(value(i), top), S.log(total))))
    return sweeps.emit(sweeps.map(out, lambda i: S.div(S.exp(S.sub(value(i), top)), total)))


def gradient_dtype(grad: torch.dtype, input_dtype: torch.dtype) -> torch.dtype:
    """Eager gives the gradient's dtype, whatever that of the input is said to be, but for CUDA's softmax from half to float."""
    return input_dtype if (grad, input_dtype) == (torch.float32, torch.float16) else grad


device_rule("_softmax_backward_data _log_softmax_backward_data", probed=True)(
    lambda grad, output, dim, input_dtype: fresh(grad, dtype=gradient_dtype(grad.dtype, input_dtype)))


@refuses("_softmax_backward_data _log_softmax_backward_data")
def refuse_softmax_backward(grad: Spec, output: Spec, dim: int, input_dtype: torch.dtype) -> None:
    wrap_dim(dim, len(grad.shape))
    same_shape(grad.shape, output.shape, f"Expected grad to have the size of output; but {list(grad.shape)} does not equal {list(output.shape)}")


@decomposition("_softmax_backward_data", core=False)
def decompose_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    wide = widen(output)
    product = widen(grad) * wide
    return in_order(cast(product - wide * aten.sum.dim_IntList(product, [dim], True), gradient_dtype(grad.dtype, input_dtype)))


@decomposition("_log_softmax_backward_data")
def decompose_log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    wide = widen(grad)
    total = aten.sum.dim_IntList(wide, [dim], True)
    return in_order(cast(wide - aten.exp.default(widen(output)) * total, gradient_dtype(grad.dtype, input_dtype)))


@loop_lowering("_softmax_backward_data _log_softmax_backward_data")
def lower_softmax_backward(b: Builder, out: Any, grad: Operand, y: Operand, dim: int, input_dtype: Any) -> Any:
    sweeps, kind = Sweeps(b, y.shape, dim), compute_dtype(y.dtype)
    g, v = lambda i: to(grad.load(i), kind), lambda i: to(y.load(i), kind)
    if b.target is aten._log_softmax_backward_data.default:
        total = sweeps.reduce("sum", kind, g)
        return sweeps.emit(sweeps.map(out, lambda i: S.sub(g(i), S.mul(S.exp(v(i)), total))))
    total = sweeps.reduce("sum", kind, lambda i: S.mul(g(i), v(i)))
    return sweeps.emit(sweeps.map(out, lambda i: S.mul(v(i), S.sub(g(i), total))))
