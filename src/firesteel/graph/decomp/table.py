"""DECOMPOSITIONS, its registration by name, and the small helpers that decompositions share."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from firesteel.graph.rules.base import find
from firesteel.table import Table

aten = torch.ops.aten
DECOMPOSITIONS: Table[Callable[..., Any]] = Table("decomposition", "graph/decomp/")
_WHOLE: set[OpOverload] = set()     # those that the native backend lowers better as a whole


def decomposition(names: str, *, core: bool = True) -> Callable[[Callable], Callable]:
    """Decorator: a row for each operator named.  core=False: a row for those who ask, not for the native backend."""
    def register(function: Callable) -> Callable:
        for name in names.split():
            op = find(name)
            if op is not None:
                DECOMPOSITIONS.add(op, function)
                if not core:
                    _WHOLE.add(op)
        return function
    return register


_core: dict[OpOverload, Callable[..., Any]] = {}


def core_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """What the native backend decomposes."""
    if len(_core) != len(DECOMPOSITIONS) - len(_WHOLE):
        _core.update({op: fn for op, fn in DECOMPOSITIONS.items() if op not in _WHOLE})
    return _core


# ---------------------------------------------------------------- helpers

def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which eager computes on values of this dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


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
    """value in the memory format that eager gives the results of operators that follow their argument's suggestion."""
    wanted = torch.contiguous_format
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.dim())
    if last is not None and not like.is_contiguous() and like.is_contiguous(memory_format=last):
        wanted = last
    return value if value.is_contiguous(memory_format=wanted) else aten.clone.default(value, memory_format=wanted)
