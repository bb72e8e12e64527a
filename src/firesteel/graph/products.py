"""Products of tensors with symbolic sizes, for versions of torch (before 2.13) whose C++ code of them takes sizes as plain numbers.

The rows make the operators that eager makes: a batch times a matrix is one product of matrices where nothing has to be copied for it
(or where a batched product would make a large gradient), all else is a batched product.

    torch.matmul(x, w)      # x: f32[s0, s1, 8], w: f32[8, 4] -> view, mm, _unsafe_view
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firesteel.graph.functions import FUNCTIONS, has_symbols

aten = torch.ops.aten
TAKES_SYMBOLS = (2, 13)     # the first version that computes these with symbols itself
MATH = 0                    # _fused_sdp_choice: no fused kernel


def row(*functions: Any) -> Callable[[Callable], Callable]:
    """Rows for older versions alone."""
    def add(product: Callable) -> Callable:
        if _version() < TAKES_SYMBOLS:
            for function in functions:
                FUNCTIONS.add(function, product)
        return product
    return add


def left_alone(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def in_older(product: Callable) -> Callable:
    """The row in older versions."""
    return product if _version() < TAKES_SYMBOLS else left_alone


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _has_symbols(*tensors: Any) -> bool:
    return all(isinstance(t, Tensor) for t in tensors) and has_symbols(*tensors)


# ---------------------------------------------------------------- matmul

@row(torch.matmul, operator.matmul, Tensor.matmul)
def matmul(a: Any, b: Any, *, out: Any = None) -> Any:
    if out is not None or not _has_symbols(a, b) or min(a.dim(), b.dim()) == 0 or max(a.dim(), b.dim()) <= 2:
        return NotImplemented
    if _folds(a, b):
        return _folded(a, b) if a.dim() >= b.dim() else _folded(b.mT, a.t()).mT.contiguous() if a.dim() == 2 else _folded(b.mT, a)
    return _batched(a, b)


def _times(a: Tensor, b: Tensor) -> Tensor:
    product = matmul(a, b)
    return torch.matmul(a, b) if product is NotImplemented else product


def _folds(a: Tensor, b: Tensor) -> bool:
    """Is this a product of matrices, the batch being rows of one?"""
    large, small = (a, b) if a.dim() >= b.dim() else (b.mT, a)
    if small.dim() > 2:
        return False
    if small.requires_grad:
        return True
    if a.dim() == 2:
        return False
    steps = zip(large.stride()[:-2], large.stride()[1:-1], large.shape[1:-1])
    return all(bool(outer == inner * size) for outer, inner, size in steps)


def _folded(large: Tensor, small: Tensor) -> Tensor:
    *rows, inside = large.shape
    flat = large.reshape(math.prod(rows), inside)
    if small.dim() == 1:
        return aten._unsafe_view(flat.mv(small), rows)
    return aten._unsafe_view(flat.mm(small), [*rows, small.shape[1]])


def _batched(a: Tensor, b: Tensor) -> Tensor:
    left, right = a if a.dim() > 1 else a[None, :], b if b.dim() > 1 else b[:, None]
    batch = _broadcast(left.shape[:-2], right.shape[:-2])
    count = math.prod(batch)
    left, right = (t.expand(*batch, *t.shape[-2:]).reshape(count, *t.shape[-2:]) for t in (left, right))
    rows, columns = left.shape[1:2] if a.dim() > 1 else (), right.shape[2:] if b.dim() > 1 else ()
    return aten._unsafe_view(left.bmm(right), [*batch, *rows, *columns])


def _broadcast(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """Sizes of both; `expand` finds out what does not match."""
    missing = len(a) - len(b)
    a, b = [*[1] * -missing, *a], [*[1] * missing, *b]
    return [y if isinstance(x, int) and x == 1 else x if isinstance(y, int) and y == 1 or x == y else y if x == 1 else x for x, y in zip(a, b)]


# ---------------------------------------------------------------- linear, attention

@row(F.linear)
def linear(input: Any, weight: Any, bias: Any = None) -> Any:       # noqa: A002
    if not _has_symbols(input, weight) or input.dim() <= 2 or weight.dim() != 2 or (bias is not None and input.dim() == 3 and input.is_contiguous()):
        return NotImplemented
    product = _times(input, weight.t())
    return product if bias is None else product + bias


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
              enable_gqa: bool = False) -> Any:
    """Attention without a fused kernel; half precision, grouped heads and wrong calls are left to the function.  Its row is in float_arguments.py."""
    if not _has_symbols(query, key, value) or enable_gqa or query.dtype not in (torch.float32, torch.float64) or is_causal and attn_mask is not None:
        return NotImplemented
    if aten._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, scale=scale) != MATH:
        return NotImplemented
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    scores = _times(query * (-factor if scale is not None and scale < 0 else factor), key.transpose(-2, -1) * factor)
    scores = masked(scores, query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril() if is_causal else attn_mask)
    weights = aten._safe_softmax(scores, -1)
    return _times(F.dropout(weights, dropout_p) if dropout_p > 0 else weights, value)


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    return scores + (torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(mask.logical_not(), -math.inf) if mask.dtype is torch.bool else mask)
