"""Fused attention and its gradients: library calls, whose layouts depend on the device, but for one query on a GPU, which is loops of ours."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import cast, widen
from firesteel.graph.sizes import same
from firesteel.graph.spec import Shape, Spec, contiguous_strides, fresh, preserved_strides, strides_in_order
from firesteel.ops.block import decomposition, device_rule, operator
from firesteel.targets import HOST

aten = torch.ops.aten

operator("scaled_dot_product_attention.* _scaled_dot_product_attention_math.* _scaled_dot_product_flash_attention.* "
         "_scaled_dot_product_flash_attention_backward.* _scaled_dot_product_flash_attention_for_cpu.* "
         "_scaled_dot_product_flash_attention_for_cpu_backward.* _scaled_dot_product_efficient_attention.* "
         "_scaled_dot_product_efficient_attention_backward.* _scaled_dot_product_cudnn_attention.* "
         "_scaled_dot_product_cudnn_attention_backward.* _flash_attention* _efficient_attention*", library=True)


@device_rule("_scaled_dot_product_flash_attention_for_cpu")
def flash_attention_cpu(q: Spec, k: Spec, v: Spec, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Spec | None = None,
                        scale: float | None = None) -> tuple[Spec, Spec]:
    lse = q.shape[:3]
    dtype = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
    output = Spec(q.shape, preserved_strides(q), 0, q.dtype, q.device)      # the kernel's output is like its query
    return output, Spec(lse, strides_in_order(lse, (1, 2, 0)), 0, dtype, q.device)


def _transposed_heads(shape: Shape) -> Shape:
    """Strides of a tensor [batch, heads, length, width] that was made as [batch, length, heads, width]."""
    return strides_in_order(shape, (3, 1, 2, 0))


device_rule("_scaled_dot_product_flash_attention_for_cpu_backward")(
    lambda grad, q, k, v, *args, **kwargs: tuple(Spec(x.shape, _transposed_heads(x.shape), 0, x.dtype, x.device) for x in (q, k, v)))


def _attention_like(q: Spec, v: Spec) -> Spec:
    """An output in the layout of the queries."""
    shape = (*q.shape[:3], v.shape[3])
    strides = preserved_strides(q) if same(q.shape[3], v.shape[3]) else contiguous_strides(shape)
    return Spec(shape, strides, 0, q.dtype, q.device)


def _seed(shape: Shape, dtype: torch.dtype, device: torch.device) -> Spec:
    return Spec(shape, contiguous_strides(shape), 0, dtype, device)


@device_rule("_scaled_dot_product_flash_attention")
def flash_attention_cuda(q: Spec, k: Spec, v: Spec, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
                         *, scale: float | None = None) -> tuple:
    lse = fresh(q, q.shape[:3], torch.float32)
    empty = fresh(q, (0,))
    rng = _seed((2,), torch.uint64, q.device)
    return (_attention_like(q, v), lse, None, None, q.shape[2], k.shape[2], rng, _seed((), torch.uint64, q.device), empty)


device_rule("_scaled_dot_product_flash_attention_backward _scaled_dot_product_cudnn_attention_backward")(
    lambda grad, q, k, v, *args, **kwargs: tuple(Spec(x.shape, preserved_strides(x), 0, x.dtype, x.device) for x in (q, k, v)))


def _attention_output(q: Spec, v: Spec) -> Spec:
    shape = (*q.shape[:3], v.shape[3])
    return Spec(shape, _transposed_heads(shape), 0, q.dtype, q.device)


@device_rule("_scaled_dot_product_efficient_attention")
def efficient_attention(q: Spec, k: Spec, v: Spec, bias: Spec | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
                        is_causal: bool = False, *, scale: float | None = None) -> tuple[Spec, ...]:
    length = (q.shape[2] + 31) // 32 * 32 if compute_log_sumexp else 0
    lse = fresh(q, (*q.shape[:2], length), torch.float32)
    host = HOST
    return _attention_output(q, v), lse, _seed((), torch.int64, host), _seed((), torch.int64, host)


@device_rule("_scaled_dot_product_efficient_attention_backward")
def efficient_attention_backward(grad: Spec, q: Spec, k: Spec, v: Spec, bias: Spec | None, out: Spec, lse: Spec, seed: Spec,
                                 offset: Spec, dropout_p: float, mask: Sequence[bool], *args: Any, **kwargs: Any) -> tuple:
    grads = [Spec(x.shape, _transposed_heads(x.shape), 0, x.dtype, x.device) for x in (q, k, v)]
    return (*grads, fresh(bias) if bias is not None and mask[3] else None)


@device_rule("_scaled_dot_product_cudnn_attention")
def cudnn_attention(q: Spec, k: Spec, v: Spec, bias: Spec | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
                    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None) -> tuple:
    lse = fresh(q, (*q.shape[:3], 1), torch.float32) if compute_log_sumexp else fresh(q, (0,), torch.float32)
    seed = _seed((), torch.int64, q.device)
    shape = (*q.shape[:3], v.shape[3])
    strides = contiguous_strides(shape) if q.strides == contiguous_strides(q.shape) else strides_in_order(shape, (3, 1, 2, 0))
    return Spec(shape, strides, 0, q.dtype, q.device), lse, None, None, q.shape[2], k.shape[2], seed, seed, None


# ---------------------------------------------------------------- one query

@decomposition("_scaled_dot_product_efficient_attention")
def decompose_efficient_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
                                  is_causal: bool = False, *, scale: float | None = None) -> Any:
    if compute_log_sumexp or dropout_p or is_causal or not _is_one_query(q, k):
        return NotImplemented
    nothing = aten.new_empty.default(q, [*q.shape[:2], 0], dtype=torch.float32)
    number = aten.full.default([], 0, dtype=torch.int64, device=HOST)
    return one_query(q, k, v, bias, scale, transposed=True), nothing, number, number


@decomposition("_scaled_dot_product_cudnn_attention")
def decompose_cudnn_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
                              is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None) -> Any:
    if compute_log_sumexp or dropout_p or is_causal or return_debug_mask or not _is_one_query(q, k):
        return NotImplemented
    nothing, number = aten.new_empty.default(q, [0], dtype=torch.float32), aten.new_zeros.default(q, [], dtype=torch.int64)
    out = one_query(q, k, v, bias, scale, transposed=not q.is_contiguous())
    return out, nothing, None, None, q.shape[2], k.shape[2], number, number, None


def _is_one_query(q: Tensor, k: Tensor) -> bool:
    return all(type(n) is int and n > 0 for x in (q, k) for n in x.shape) and q.shape[2] == 1


def one_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None, transposed: bool) -> Tensor:
    """Attention of one query, as when a text is generated.  Reading keys and values bounds it: loops read them in place, so that heads which
    share them need no copies, and are fused with what makes the mask.  A query whose keys are all masked gives zeros."""
    scores = aten.sum.dim_IntList(widen(q) * widen(k), [3]) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if bias is not None:
        scores = scores + aten.squeeze.dim(aten.expand.default(bias, [*q.shape[:3], k.shape[2]]), 2)
    weights = aten.unsqueeze.default(aten._safe_softmax.default(scores, 2), 3)
    heads = cast(aten.sum.dim_IntList(weights * widen(v), [2]), q.dtype)
    return aten.permute.default(aten.unsqueeze.default(heads, 1), [0, 2, 1, 3]) if transposed else aten.unsqueeze.default(heads, 2)
