"""What eager says of a call that went wrong: the captured graph, run by torch on copies of its inputs.

A graph that cannot be compiled, or whose kernels find an index out of range, is most often a mistake in the call.  Eager's own error
is the one that its user knows, so it is raised where eager raises one too; nothing of the caller's is touched to learn it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def eager_error(graph: Callable[..., Any], inputs: Sequence[Any]) -> Exception | None:
    """The error that the graph raises when torch runs it; None where it runs."""
    with torch.random.fork_rng(devices=[]):
        try:
            graph(*[_copy(x) for x in inputs])
        except Exception as error:
            return error.with_traceback(None)
    return None


def as_eager_says(graph: Callable[..., Any], error: Exception, inputs: Sequence[Any]) -> Exception:
    """Eager's error in place of a kernel's, which knows neither the operator nor the index."""
    found = eager_error(graph, inputs)
    return found if isinstance(found, (IndexError, RuntimeError)) else error


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone()
    return copy.requires_grad_().clone() if value.requires_grad else copy      # no leaf: the graph may write it
