"""Attention of one query, which a GPU's programs compute in loops of ours."""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import firesteel as fs
from firesteel.graph.spec import contiguous_strides, strides_in_order
from firesteel.ops import attention

gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
aten = torch.ops.aten


def tensors(dtype=torch.float32, device="cpu", shared=1, width=8):
    """[batch, heads, length, width]; `shared` heads have the same keys and values."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 1, width), torch.randn(2, 6 // shared, 16, width), torch.randn(2, 6 // shared, 16, width)
    bias = torch.randn(2, 1, 1, 16)
    bias[0, 0, 0, 3:] = -math.inf
    bias[1] = -math.inf
    return [t.to(device, dtype) for t in (q, k, v, bias)]


def repeated(x, count):
    return x[:, :, None].expand(*x.shape[:2], count, *x.shape[2:]).reshape(x.shape[0], -1, *x.shape[2:])


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_query_is_as_exact_as_eager(dtype, biased, scale):
    q, k, v, bias = tensors(dtype)
    bias = bias if biased else None
    exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), attn_mask=None if bias is None else bias.double(), scale=scale)
    eager = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    for transposed in (True, False):
        got = attention.one_query(q, k, v, bias, scale, transposed)
        assert got.dtype is dtype and got.stride() == (strides_in_order(got.shape, (3, 1, 2, 0)) if transposed else contiguous_strides(got.shape))
        assert (got - exact).abs().max() <= (eager - exact).abs().max() + 1e-6


@pytest.mark.parametrize("call", [
    lambda q, k, v, bias: attention.decompose_efficient_attention(q, k, v, bias, True), lambda q, k, v, bias: attention.decompose_efficient_attention(q, k, v, bias, False, 0.1),
    lambda q, k, v, bias: attention.decompose_efficient_attention(q, k, v, None, False, is_causal=True), lambda q, k, v, bias: attention.decompose_cudnn_attention(k, k, v, None, False),
    lambda q, k, v, bias: attention.decompose_cudnn_attention(q, k[:, :, :0], v[:, :, :0], None, False)],
    ids=["for a backward", "dropout", "causal", "many queries", "no keys"])
def test_other_attention_is_a_call(call):
    assert call(*tensors()) is NotImplemented


@gpu_only
@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=lambda b: b.name)
def test_one_query_on_a_gpu(backend, shared):
    fs.reset()
    q, k, v, bias = tensors(torch.bfloat16, "cuda", shared, 64)

    def attend(q, k, v, bias):
        return F.scaled_dot_product_attention(q, repeated(k, shared), repeated(v, shared), attn_mask=bias)
    with torch.no_grad(), sdpa_kernel(backend):
        got, want = fs.compile(attend, fullgraph=True)(q, k, v, bias), attend(q, k, v, bias)
    exact = F.scaled_dot_product_attention(q.double(), repeated(k, shared).double(), repeated(v, shared).double(), attn_mask=bias.double())
    assert got.stride() == want.stride() and fs.counters["native"]["library_calls"] == 0
    assert (got - exact).abs().max() <= (want - exact).nan_to_num().abs().max() + 1e-3
