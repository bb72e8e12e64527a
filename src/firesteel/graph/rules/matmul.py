"""Rules of matrix products, convolution and attention: the library calls."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firesteel.graph.rules.base import check, expands_to, rule
from firesteel.graph.sizes import must_match, same
from firesteel.graph.spec import (
    Shape,
    Spec,
    channels_last_strides,
    contiguous_strides,
    fresh,
    is_contiguous,
    is_empty,
    preserved_strides,
    strides_in_order,
    suggests_channels_last,
)
from firesteel.sym.expr import Size


def _same_dtype(a: Spec, b: Spec) -> None:
    check(a.dtype is b.dtype, f"expected m1 and m2 to have the same dtype, but got: {a.dtype} != {b.dtype}")


# ---------------------------------------------------------------- products

@rule("mm")
def mm(a: Spec, b: Spec) -> Spec:
    check(len(a.shape) == 2 and len(b.shape) == 2, f"self and mat2 must be matrices, got {len(a.shape)}-D and {len(b.shape)}-D")
    must_match(a.shape[1], b.shape[0], f"mat1 and mat2 shapes cannot be multiplied ({a.shape} and {b.shape})")
    _same_dtype(a, b)
    shape = (a.shape[0], b.shape[1])
    return Spec(shape, contiguous_strides(shape), 0, a.dtype, a.device)


@rule("mm.dtype")
def mm_dtype(a: Spec, b: Spec, out_dtype: torch.dtype) -> Spec:
    return mm(a, b).to(out_dtype)


@rule("bmm")
def bmm(a: Spec, b: Spec) -> Spec:
    check(len(a.shape) == 3 and len(b.shape) == 3, "batch1 and batch2 must be 3D tensors")
    message = f"Expected size for first two dimensions of batch2 tensor to be: {[a.shape[0], a.shape[2]]} but got: {list(b.shape[:2])}."
    must_match(a.shape[0], b.shape[0], message)
    must_match(a.shape[2], b.shape[1], message)
    _same_dtype(a, b)
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return Spec(shape, contiguous_strides(shape), 0, a.dtype, a.device)


@rule("addmm _addmm_activation")
def addmm(x: Spec, a: Spec, b: Spec, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False) -> Spec:
    result = mm(a, b)
    check(expands_to(x.shape, result.shape), f"The expanded size of the tensor {x.shape} must match {result.shape}")
    _same_dtype(x, a)
    return result


@rule("baddbmm")
def baddbmm(x: Spec, a: Spec, b: Spec, *, beta: Any = 1, alpha: Any = 1) -> Spec:
    result = bmm(a, b)
    check(expands_to(x.shape, result.shape), f"The expanded size of the tensor {x.shape} must match {result.shape}")
    return result


@rule("addbmm")
def addbmm(x: Spec, a: Spec, b: Spec, *, beta: Any = 1, alpha: Any = 1) -> Spec:
    return fresh(x, (a.shape[1], b.shape[2]))


@rule("mv")
def mv(a: Spec, b: Spec) -> Spec:
    check(len(a.shape) == 2 and len(b.shape) == 1, f"size mismatch, got {a.shape} and {b.shape}")
    must_match(a.shape[1], b.shape[0], f"size mismatch, got {a.shape} and {b.shape}")
    return fresh(a, (a.shape[0],))


@rule("addmv")
def addmv(x: Spec, a: Spec, b: Spec, *, beta: Any = 1, alpha: Any = 1) -> Spec:
    """Without a product the result has the shape of `x`, which eager does not expand then."""
    result = mv(a, b)
    return fresh(x) if is_empty(a) and beta != 0 else result


@rule("addr")
def addr(x: Spec, a: Spec, b: Spec, *, beta: Any = 1, alpha: Any = 1) -> Spec:
    return fresh(x, (a.shape[0], b.shape[0]), torch.promote_types(x.dtype, torch.promote_types(a.dtype, b.dtype)))


@rule("dot vdot")
def dot(a: Spec, b: Spec) -> Spec:
    check(len(a.shape) == 1 and len(b.shape) == 1, f"inconsistent tensor size, got {a.shape} and {b.shape}")
    must_match(a.shape[0], b.shape[0], f"inconsistent tensor size, got {a.shape} and {b.shape}")
    _same_dtype(a, b)
    return fresh(a, ())


# ---------------------------------------------------------------- convolution

def _pair(value: Any, n: int) -> list[Size]:
    if not isinstance(value, (list, tuple)):
        return [value] * n
    return list(value) * n if len(value) == 1 else list(value)


def conv_shape(x: Spec, weight: Spec, stride, padding, dilation, transposed: bool, output_padding, groups: int) -> Shape:
    n = len(weight.shape) - 2
    batch = x.shape[:1] if len(x.shape) == n + 2 else ()
    spatial = x.shape[len(x.shape) - n:]
    stride, padding, dilation, extra = (_pair(v, n) for v in (stride, padding, dilation, output_padding))
    sizes = []
    for i, size in enumerate(spatial):
        reach = dilation[i] * (weight.shape[i + 2] - 1)
        if transposed:
            sizes.append((size - 1) * stride[i] - 2 * padding[i] + reach + extra[i] + 1)
        else:
            sizes.append((size + 2 * padding[i] - reach - 1) // stride[i] + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return (*batch, channels, *sizes)


def _as_image(x: Spec) -> Spec:
    """A signal as an image of height one."""
    (batch, channels, width), (s0, s1, s2) = x.shape, x.strides
    return x._replace(shape=(batch, channels, 1, width), strides=(s0, s1, width * s2, s2))


def _convolved_strides(shape: Shape, x: Spec, weight: Spec) -> Shape:
    """Strides of a convolution's results: channels-last where input or weight are, but not of doubles on a GPU.  Signals are convolved as
    images, the input made contiguous."""
    if len(shape) == 3:
        x = x if is_contiguous(x) else fresh(x)
        image = _convolved_strides((*shape[:2], 1, shape[2]), _as_image(x), _as_image(weight))
        return (*image[:2], image[3])
    plain = len(shape) not in (4, 5) or (x.device.type == "cuda" and x.dtype is torch.float64)
    last = not plain and (suggests_channels_last(x) or suggests_channels_last(weight))
    return channels_last_strides(shape) if last else contiguous_strides(shape)


@rule("convolution convolution_overrideable _convolution")
def convolution(x: Spec, weight: Spec, bias: Spec | None, stride, padding, dilation, transposed: bool, output_padding,
                groups: int, *flags: bool) -> Spec:
    n = len(weight.shape) - 2
    check(len(x.shape) in (n + 1, n + 2), f"Expected {n + 1}D (unbatched) or {n + 2}D (batched) input, but got input of size: {list(x.shape)}")
    _same_dtype(x, weight)
    channels = x.shape[len(x.shape) - n - 1]
    wanted = weight.shape[0] if transposed else weight.shape[1] * groups
    must_match(channels, wanted, f"Given groups={groups}, weight of size {list(weight.shape)}, expected input{list(x.shape)} to have "
          f"{wanted} channels, but got {channels} channels instead")
    shape = conv_shape(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    return Spec(shape, _convolved_strides(shape, x, weight), 0, x.dtype, x.device)


@rule("convolution_backward")
def convolution_backward(grad: Spec, x: Spec, weight: Spec, bias_sizes, stride, padding, dilation, transposed: bool,
                         output_padding, groups: int, mask: Sequence[bool]) -> tuple[Spec | None, ...]:
    def laid(spec: Spec) -> Spec:
        return Spec(spec.shape, _convolved_strides(spec.shape, x, weight), 0, spec.dtype, spec.device)
    bias = fresh(grad, (grad.shape[1],)) if mask[2] else None
    return laid(x) if mask[0] else None, laid(weight) if mask[1] else None, bias


# ---------------------------------------------------------------- attention

def _transposed_heads(shape: Shape) -> Shape:
    """Strides of a tensor [batch, heads, length, width] that was made as [batch, length, heads, width]."""
    return strides_in_order(shape, (3, 1, 2, 0))


def _attention_output(q: Spec, v: Spec) -> Spec:
    shape = (*q.shape[:3], v.shape[3])
    return Spec(shape, _transposed_heads(shape), 0, q.dtype, q.device)


def _attention_like(q: Spec, v: Spec) -> Spec:
    """An output in the layout of the queries."""
    shape = (*q.shape[:3], v.shape[3])
    strides = preserved_strides(q) if same(q.shape[3], v.shape[3]) else contiguous_strides(shape)
    return Spec(shape, strides, 0, q.dtype, q.device)


@rule("_scaled_dot_product_flash_attention_for_cpu")
def flash_attention_cpu(q: Spec, k: Spec, v: Spec, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Spec | None = None,
                        scale: float | None = None) -> tuple[Spec, Spec]:
    lse = q.shape[:3]
    dtype = torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
    output = Spec(q.shape, preserved_strides(q), 0, q.dtype, q.device)      # the kernel's output is like its query
    return output, Spec(lse, strides_in_order(lse, (1, 2, 0)), 0, dtype, q.device)


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_attention_cpu_backward(grad: Spec, q: Spec, k: Spec, v: Spec, *args: Any, **kwargs: Any) -> tuple[Spec, ...]:
    return tuple(Spec(x.shape, _transposed_heads(x.shape), 0, x.dtype, x.device) for x in (q, k, v))


def _seed(like: Spec, shape: Shape, dtype: torch.dtype, device: torch.device) -> Spec:
    return Spec(shape, contiguous_strides(shape), 0, dtype, device)


@rule("_scaled_dot_product_flash_attention")
def flash_attention_cuda(q: Spec, k: Spec, v: Spec, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
                         *, scale: float | None = None) -> tuple:
    lse = fresh(q, q.shape[:3], torch.float32)
    empty = fresh(q, (0,))
    rng = _seed(q, (2,), torch.uint64, q.device)
    return (_attention_like(q, v), lse, None, None, q.shape[2], k.shape[2], rng, _seed(q, (), torch.uint64, q.device), empty)


@rule("_scaled_dot_product_efficient_attention")
def efficient_attention(q: Spec, k: Spec, v: Spec, bias: Spec | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
                        is_causal: bool = False, *, scale: float | None = None) -> tuple[Spec, ...]:
    length = (q.shape[2] + 31) // 32 * 32 if compute_log_sumexp else 0
    lse = fresh(q, (*q.shape[:2], length), torch.float32)
    host = torch.device("cpu")
    return _attention_output(q, v), lse, _seed(q, (), torch.int64, host), _seed(q, (), torch.int64, host)


@rule("_scaled_dot_product_cudnn_attention")
def cudnn_attention(q: Spec, k: Spec, v: Spec, bias: Spec | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
                    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None) -> tuple:
    lse = fresh(q, (*q.shape[:3], 1), torch.float32) if compute_log_sumexp else fresh(q, (0,), torch.float32)
    seed = _seed(q, (), torch.int64, q.device)
    shape = (*q.shape[:3], v.shape[3])
    out = Spec(shape, _like_order(q, shape), 0, q.dtype, q.device)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, seed, None


def _like_order(q: Spec, shape: Shape) -> Shape:
    return strides_in_order(shape, (3, 1, 2, 0)) if q.strides != contiguous_strides(q.shape) else contiguous_strides(shape)


@rule("_scaled_dot_product_flash_attention_backward _scaled_dot_product_cudnn_attention_backward")
def attention_backward_like(grad: Spec, q: Spec, k: Spec, v: Spec, *args: Any, **kwargs: Any) -> tuple[Spec, ...]:
    return tuple(Spec(x.shape, preserved_strides(x), 0, x.dtype, x.device) for x in (q, k, v))


@rule("_scaled_dot_product_efficient_attention_backward")
def efficient_attention_backward(grad: Spec, q: Spec, k: Spec, v: Spec, bias: Spec | None, out: Spec, lse: Spec, seed: Spec,
                                 offset: Spec, dropout_p: float, mask: Sequence[bool], *args: Any, **kwargs: Any) -> tuple:
    grads = [Spec(x.shape, _transposed_heads(x.shape), 0, x.dtype, x.device) for x in (q, k, v)]
    return (*grads, fresh(bias) if bias is not None and mask[3] else None)
