"""Comparing the rules with eager: the same operator on real and on abstract tensors."""
from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from firesteel.graph.abstract import AbstractTensor, AbstractWorld
from firesteel.graph.schemas import facts
from firesteel.graph.spec import Spec, spec_of


def abstract(world: AbstractWorld, value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: world.wrap(t, "x", None), value)


def specs(value: Any) -> Any:
    """Results with Specs for tensors, real or abstract; lists and tuples alike."""
    if type(value) is Spec:
        return value
    if isinstance(value, (list, tuple)):
        return [specs(v) for v in value]
    if type(value) is AbstractTensor:
        assert Spec(tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype, value.device) == value.spec
        return value.spec
    return spec_of(value) if isinstance(value, torch.Tensor) else value


def loose(value: Any) -> Any:
    """Without the strides of dimensions that have at most one element: nothing depends on them."""
    if isinstance(value, list):
        return [loose(v) for v in value]
    if type(value) is not Spec:
        return value
    if 0 in value.shape:
        return value._replace(strides=(), offset=0)
    return value._replace(strides=tuple(st for s, st in zip(value.shape, value.strides) if s > 1))


def check_rule(op: Any, args: tuple, kwargs: dict, exact: bool = False) -> None:
    """The abstract run of an operator knows what the real run gives."""
    world = AbstractWorld()
    fake_args, fake_kwargs = abstract(world, (args, kwargs))
    expected = specs(op(*args, **kwargs))
    with world.active():
        found = specs(op(*fake_args, **fake_kwargs))
    view = (lambda x: x) if exact else loose
    assert view(found) == view(expected), f"{op}\n rule  {found}\n eager {expected}"


class RuleChecker(TorchDispatchMode):
    """Runs a program on real tensors and compares every operator's results with its rule.  `wrong` collects differences."""

    def __init__(self, view: Any = lambda x: x) -> None:
        super().__init__()
        self.view = view
        self.wrong: list[str] = []
        self.checked: set[Any] = set()
        self.without_rule: set[Any] = set()

    @classmethod
    def _should_skip_dynamo(cls):
        return False        # else torch imports its compiler, which takes seconds

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        fact = facts(op)
        before = specs((list(args), list(kwargs.values())))
        result = op(*args, **kwargs)
        if fact.rule is None:
            self.without_rule.add(op)
        elif fact.kind in ("pure", "view", "update"):
            self._compare(op, fact, before, list(kwargs), result)
        return result

    def _compare(self, op: Any, fact: Any, before: list, names: list[str], result: Any) -> None:
        try:
            found = fact.rule(*before[0], **dict(zip(names, before[1])))
        except Exception as error:
            self.wrong.append(f"{op}{before}: {type(error).__name__}: {error}")
            return
        self.checked.add(op)
        found, expected = specs(found), specs(result)
        if self.view(found) != self.view(expected):
            self.wrong.append(f"{op}{before}\n rule  {found}\n eager {expected}")


def run_with_grads(function: Any, tensors: Any) -> list[Any]:
    """The tensors that a function gives, and the gradients of a weighted sum of them."""
    results = [r for r in pytree.tree_leaves(function(*tensors)) if isinstance(r, torch.Tensor)]
    roots = [r for r in results if r.requires_grad]
    leaves = [t for t in tensors if t.requires_grad]
    if not roots or not leaves:
        return results
    weights = [torch.arange(r.numel(), dtype=torch.float32).reshape(r.shape) % 5 - 1.5 for r in roots]
    loss = sum((r.float() * w).sum() for r, w in zip(roots, weights))
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return results + [g for g in grads if g is not None]


def fresh_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same data in the same layout, as a leaf."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor.detach())
    return made.requires_grad_(tensor.requires_grad)
