"""Decompositions: operators written in terms of the primitives that have lowerings, and the small helpers that such functions share.

`DECOMPOSITIONS` maps an OpOverload to a Python function over tensors.  `core_decompositions()` is the part of it that the
native backend asks for: rows for which a lowering of the whole operator would be better are left out.

The primitives: pointwise operators, sum, mean, var_mean, amax, amin, prod, any, all, argmax, argmin, cumsum, views, index, gather,
embedding, index_put, scatter, where, full, arange, cat, constant_pad_nd, and the library calls (matrix products, convolution,
attention, pooling, random numbers).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.sizes import static
from firesteel.graph.spec import channels_last_strides, contiguous_strides, only_channels_last, suggests_channels_last, wide_dtype
from firesteel.graph.tensor import to_spec
from firesteel.operators import Facet

aten = torch.ops.aten
DECOMPOSITIONS: Facet[Callable[..., Any]] = Facet("decomposition")
CORE: Facet[Callable[..., Any]] = Facet("decomposition for the native backend")


def decomposition(names: str, *, core: bool = True) -> Callable[[Callable], Callable]:
    """Decorator: a row for each operator named.  core=False: a row for those who ask, not for the native backend."""
    def register(function: Callable) -> Callable:
        if core:
            CORE.named(names)(function)
        return DECOMPOSITIONS.named(names)(function)
    return register


def core_decompositions() -> Facet[Callable[..., Any]]:
    """What the native backend decomposes."""
    return CORE


# ---------------------------------------------------------------- helpers

def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else aten._to_copy.default(x, dtype=dtype)


def widen(x: Tensor) -> Tensor:
    return cast(x, wide_dtype(x.dtype))


def wrap(dim: int, ndim: int) -> int:
    return dim % ndim if ndim else 0


def is_nothing(x: Tensor) -> bool:
    """Has it a size that is known to be 0?  A symbol is not asked."""
    return any(type(size) is int and size == 0 for size in x.shape)


def shaped(x: Tensor, shape: list[Any]) -> Tensor:
    """x with another shape, as a view where possible."""
    return aten.reshape.default(x, shape)


def in_format_of(value: Tensor, like: Tensor) -> Tensor:
    """value in the memory format of the results of eager's batch and group norms."""
    return _in_format(value, only_channels_last(to_spec(like)))


def as_suggested(value: Tensor, like: Tensor) -> Tensor:
    """value in the memory format that eager gives the results of operators that follow their argument's suggestion."""
    return _in_format(value, suggests_channels_last(to_spec(like)))


def _in_format(value: Tensor, last: bool) -> Tensor:
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}[value.dim()] if last else torch.contiguous_format
    spec = to_spec(value)       # a size that is an expression may be 1 at run time, with any stride: asked for its format, it would be specialised
    exact = spec.strides == (channels_last_strides if last else contiguous_strides)(spec.shape)
    is_laid = exact or static(spec.shape) and value.is_contiguous(memory_format=wanted)
    return value if is_laid else aten.clone.default(value, memory_format=wanted)


def in_strides_of(value: Tensor, like: Tensor) -> Tensor:
    """value in the strides of `empty_like(like)`."""
    made = aten.empty_like.default(like)
    return value if value.stride() == made.stride() else aten.copy.default(made, value)


def in_order(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else aten.clone.default(x, memory_format=torch.contiguous_format)


def positions(size: Any, x: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    return aten.arange.start_step(0, size, 1, dtype=dtype, device=x.device)
