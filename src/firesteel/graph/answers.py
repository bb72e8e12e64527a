"""Calls that branch on data, on abstract tensors: made for every way to answer their questions.  All must give tensors of the same metadata.

    every_way(module, (x,), {})     # module asks bool(x.sum() > 0): called twice
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from firesteel.errors import DataAccess
from firesteel.graph.tensor import AbstractTensor, memory_of, tensors_in

MOST_QUESTIONS = 6      # about data, of one call: 64 ways


class Answers(TorchDispatchMode):
    """Answers questions for the truth of a tensor, in order; those that are not in the list are answered, and added, as True."""

    def __init__(self, given: list[bool]):
        super().__init__()
        self.given, self.asked = given, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_question = op is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool
        if not is_question or getattr(args[0], "value", None) is not None:
            return op(*args, **kwargs or {})
        self.asked += 1
        if self.asked > MOST_QUESTIONS:
            raise DataAccess("a loop")
        if self.asked > len(self.given):
            self.given.append(True)
        return self.given[self.asked - 1]


def every_way(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the call gives, however the data is that it asks for."""
    answers: list[bool] = []
    results: list[Any] = []
    while not results or answers:
        with Answers(answers):
            results.append(fn(*args, **kwargs))
        while answers and not answers[-1]:
            answers.pop()
        if answers:
            answers[-1] = False
    memories = {id(memory_of(given)) for given in tensors_in((args, kwargs))}
    if any(described(result, memories) != described(results[0], memories) for result in results[1:]):
        raise DataAccess("a branch whose ways give different kinds of tensors")
    return results[0]


def described(result: Any, memories: set[int]) -> tuple[Any, ...]:
    leaves, structure = tree_flatten(result)
    return structure, *((one.spec, one.requires_grad, id(memory_of(one)) if id(memory_of(one)) in memories else None)
                        if type(one) is AbstractTensor else one for one in leaves)
