"""Policies of selective checkpointing, asked while a region is traced (autograd/regions.py).

A policy is asked below autograd and above tensor subclasses, decompositions and the functional forms of in-place operators, once a call in
program order: it sees the operators that it would see in eager, with `ctx.is_recompute` False.  Its answer is the tag of all
nodes that were recorded for the operator.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from firesteel.autograd.regions import WISHES
from firesteel.graph.functional import Unfollowable
from firesteel.graph.spec import Spec, contiguous_strides

aten = torch.ops.aten
Policy = Callable[..., Any]
_RANK = {wish: rank for rank, wish in enumerate(WISHES.values())}
_CONTEXT: Any = torch.utils.checkpoint.SelectiveCheckpointContext
_PASSES_OUTPUT = "op_output" in inspect.signature(_CONTEXT).parameters       # newer versions of torch pass the result to a policy
_IGNORED: Collection[Any] = getattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", frozenset())


class OtherContexts(Unfollowable):
    """The contexts of a checkpoint are none of selective checkpointing: only eager can run under them."""


def policy_of(context_fn: Callable[[], Any]) -> Policy | None:
    """The policy function behind a context_fn of selective checkpointing; None where its contexts do nothing."""
    contexts = context_fn()
    pair = contexts if type(contexts) is tuple and len(contexts) == 2 else (None, None)
    if isinstance(pair[0], torch.utils.checkpoint._CachingTorchDispatchMode):
        return pair[0].policy_fn
    if all(isinstance(context, nullcontext) for context in pair):
        return None
    raise OtherContexts("checkpoint_contexts", "The context_fn of a checkpoint must generate a tuple of two `TorchDispatchMode`s of selective "
                        f"checkpointing, which {contexts!r} is not")


def wish_of(answer: Any) -> str:
    """The tag for a policy's answer.  Eager saves for the two that say so and for True."""
    if isinstance(answer, bool):
        return "never" if answer else "prefer"
    return WISHES.get(getattr(answer, "name", ""), "prefer")


class Asking(TorchDispatchMode):
    """Asks one region's policy about each operator, and tags the nodes that were recorded for it."""

    def __init__(self, graph: Graph, policy: Policy):
        super().__init__()
        self.graph, self.policy = graph, policy

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False        # as in AbstractMode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        last = _last(self.graph)
        out = op(*args, **kwargs)
        if op not in _IGNORED:
            context = _CONTEXT(is_recompute=False, op_output=out) if _PASSES_OUTPUT else _CONTEXT(is_recompute=False)
            self._tag(last, wish_of(self.policy(context, op, *args, **kwargs)))
        return out

    def _tag(self, last: Node, wish: str) -> None:
        """Tags the nodes behind `last`; an outer region's policy may have tagged them already."""
        node = last.next
        while node.op != "root":
            meta = node.meta
            if meta.get("phase") == "forward" and node.op != "placeholder" and _RANK[wish] > _RANK[meta.get("recompute", "must")]:
                meta["recompute"] = wish
            node = node.next


def _last(graph: Graph) -> Node:
    return graph._root.prev


# ---------------------------------------------------------------- tensors that are read for their sizes alone

# operator -> the one that takes sizes in place of a tensor, and the value that all elements get
_BY_SIZES: dict[Any, tuple[Any, tuple[Any, ...]]] = {
    aten.empty_like.default: (aten.empty_strided.default, ()), aten.zeros_like.default: (aten.full.default, (0,)),
    aten.ones_like.default: (aten.full.default, (1,)), aten.rand_like.default: (aten.rand.default, ()),
    aten.randn_like.default: (aten.randn.default, ()),
}


def by_sizes(op: Any, kwargs: Mapping[str, Any], spec: Spec) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The same tensor made from sizes: the mask of a dropout must not have its input recomputed for its shape."""
    found = _BY_SIZES.get(op)
    contiguous = spec.strides == contiguous_strides(spec.shape)
    if found is None or kwargs.get("pin_memory") or not (contiguous or found[0] is aten.empty_strided.default):
        return None
    strides = (list(spec.strides),) if found[0] is aten.empty_strided.default else ()
    return found[0], (list(spec.shape), *strides, *found[1]), {"dtype": spec.dtype, "device": spec.device}
