"""What eager says of a call that went wrong: the captured graph, run by torch on copies of its inputs.

A graph that cannot be compiled, or fails when it runs, is most often a mistake in the call.  Eager's own error
is the one that its user knows, so it is raised where eager raises one too; nothing of the caller's is touched to learn it.
"""
from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.fx

from firesteel import transaction
from firesteel.autograd.seams import runs_users_code
from firesteel.errors import FiresteelError
from firesteel.tracebacks import located, places_of


def eager_error(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Exception | None:
    """The error that the graph raises when torch runs it, at the user's line; None where it runs, or where the program goes on meanwhile and draws
    from the generators."""
    if transaction.is_beside():
        return None
    steps = _Steps(graph)
    with torch.random.fork_rng(devices=[]):
        try:
            steps.run(*[_copy(x) for x in inputs])
        except Exception as error:
            return located(error.with_traceback(None), places_of(steps.at.stack_trace if steps.at is not None else None))     # type: ignore[return-value]  # the same error
    return None


def as_eager_says(graph: torch.fx.GraphModule, error: Exception, inputs: Sequence[Any]) -> Exception:
    """Eager's error in place of a kernel's or a library's, which know neither the user's line nor, some, the operator and the index."""
    if isinstance(error, (FiresteelError, torch.OutOfMemoryError)) or any(map(runs_users_code, graph.graph.nodes)):      # which would run twice
        return error
    found = eager_error(graph, inputs)
    return found if isinstance(found, (IndexError, RuntimeError)) else error


class _Steps(torch.fx.Interpreter):
    """Runs a graph node by node; `at` is the one that runs."""

    def __init__(self, graph: torch.fx.GraphModule):
        super().__init__(graph)
        self.at: torch.fx.Node | None = None
        self.extra_traceback = False        # the error's text stays as it is

    def run_node(self, n: torch.fx.Node) -> Any:
        self.at = n
        return super().run_node(n)


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy = deepcopy(value.detach()) if 0 in value.stride() else value.detach().clone()      # self-overlapping as it is
    return copy.requires_grad_().clone() if value.requires_grad else copy      # no leaf: the graph may write it
