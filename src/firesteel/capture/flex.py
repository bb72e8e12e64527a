"""torch.nn.attention.flex_attention: what the operator means, as Python that the machine inlines (a row of HIGHER_ORDER of polyfills.py).

The functions of scores and of masks are functions of scalars, which torch.vmap makes functions of tensors: they become part of the graph, and
of the loops that the softmax around them is fused into.  A block mask says nothing that its function does not.

    flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + bias[h, i - j])
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from firesteel.capture.meanings import BY_NAME
from firesteel.capture.polyfills import HIGHER_ORDER
from firesteel.capture.protocols import Args, Kwargs, Machine
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import NONE

# which of (batch, head, row, column) each of the four torch.vmap goes over, the innermost first
DIMS = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None))


class ItemsByIndex(TorchFunctionMode):
    """table[i] of a scalar tensor is a look-up: reading `i` as a number, as it else would be, is not possible under torch.vmap."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(place, (torch.Tensor, int)) for place in places):
                return torch.ops.aten.index(args[0], [
                    place if isinstance(place, torch.Tensor) else torch.tensor(place, device=args[0].device) for place in places])
        return func(*args, **(kwargs or {}))


def over_all(fn: Callable[..., Any], before: tuple[int, ...], count: int) -> Callable[..., Any]:
    """A function of scalars for every batch, head, row and column; the last `count` arguments are tables."""
    for dims in DIMS:
        fn = torch.vmap(fn, in_dims=(*before, *dims, *(None,) * count))
    return fn


def flex_attention(query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: float, kernel_options: Any,
                   score_mod_other_buffers: Any = (), mask_mod_other_buffers: Any = ()) -> Any:
    groups, precision = query.size(1) // key.size(1), torch.float64 if query.dtype == torch.float64 else torch.float32
    if query.size(0) != key.size(0) and key.size(0) != 1:
        raise RuntimeError(f"Bq and Bkv must broadcast. Got Bq={query.size(0)} and Bkv={key.size(0)}")
    if groups > 1:
        key, value = torch.repeat_interleave(key, groups, dim=1), torch.repeat_interleave(value, groups, dim=1)
    key, value = key.expand((query.size(0), *key.size()[1:])), value.expand((query.size(0), *value.size()[1:]))
    scores = (query.to(precision) @ key.to(precision).transpose(-2, -1) * scale).to(precision)
    places = [torch.arange(0, scores.size(dim), device=scores.device) for dim in range(4)]
    with ItemsByIndex():
        changed = over_all(score_mod, (0,), len(score_mod_other_buffers))(scores, *places, *score_mod_other_buffers)
        kept = over_all(block_mask[-1], (), len(mask_mod_other_buffers))(*places, *mask_mod_other_buffers)
        scores = torch.where(kept, changed, torch.tensor(-float("inf"), dtype=precision, device=scores.device))
    total = torch.where(torch.all(scores == -float("inf"), dim=-1), -float("inf"), scores.logsumexp(dim=-1))
    weights = torch._safe_softmax(scores, dim=-1)
    greatest = torch.max(scores, dim=-1)[0]
    return weights.to(query.dtype) @ value.to(query.dtype), total / math.log(2), greatest / math.log(2)


HIGHER_ORDER["flex_attention"] = flex_attention


@BY_NAME.row("torch.nn.attention.flex_attention._validate_device")
def call_validate_device(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """Eager has no backward on the CPU and says so; this one has."""
    return NONE
