"""Attributes of torch.Tensor that the program has replaced by its own: `torch.Tensor.relu = mine`.

`replaced()` has them by name.  They mean what the program says, not what an operator of torch means: capture inlines methods and breaks at the
rest; where the compiler itself asks a tensor for one (`needed()`), the call runs eagerly.  `state()` is "" where there are none; else a text
of this very set, which the state guard of a captured region compares.  The class is looked at only where Python's own number of its version
has changed.
"""
from __future__ import annotations

import time
import types
from typing import Any

import torch

from firesteel.capture.class_reads import version_of
from firesteel.homes import is_in_package

version = version_of(torch.Tensor)
LAYOUT = frozenset({"size", "stride", "dim", "numel", "storage_offset", "is_contiguous", "data_ptr", "untyped_storage", "is_conj", "is_neg",
                    "is_complex", "element_size", "as_strided", "detach"})
_seen: int | None = None
untouched: int | None = None      # the version at which nothing was replaced
_found: dict[str, Any] = {}
_state = ""


def _is_torchs(value: Any) -> bool:
    """By the module whose globals its code sees: `functools.wraps` does not change that."""
    value = value.fget if type(value) is property else getattr(value, "__func__", value)
    return not isinstance(value, types.FunctionType) or is_in_package(value.__globals__.get("__name__", ""), "torch", "firesteel")


def _look() -> None:
    global _seen, _found, _state, untouched
    found = {name: value for name, value in vars(torch.Tensor).items() if not _is_torchs(value)}
    hasattr(torch.Tensor, "shape")      # gives a class that was changed its new number
    _seen = version.value or None      # 0: it has none
    if found != _found:
        _found, _state = found, f"{' '.join(found)} ({time.time_ns()})" if found else ""
    untouched = None if found else _seen


def replaced() -> dict[str, Any]:
    if version.value != _seen:
        _look()
    return _found


def needed() -> list[str]:
    """Those that guards and compiled code ask for: torch's properties, and methods about a tensor's layout."""
    return [name for name in replaced() if name in LAYOUT or isinstance(vars(torch._C.TensorBase).get(name), types.GetSetDescriptorType)]


def state() -> str:
    if version.value != _seen:
        _look()
    return _state
