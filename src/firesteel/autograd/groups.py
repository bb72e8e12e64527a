"""Groups: a compiled graph as several nodes of the engine's graph.

The engine continues from a node to what made each of its inputs, also those that get no gradient.  An operator of eager that it finds there unpacks
its saved tensors, which the program may have overwritten, though nothing that was asked for depends on it.  So results that have no input in
common are results of different autograd functions.

    t1 = eager_sin(x); return compiled(x, t1)       # x.add_(1).exp(), t1.clamp_(0): two groups, and a backward of the first does not come to t1

Leaves have no history, so their graph is one node.  Torch frees all that a node saved when a backward came through it; what groups without a gradient
there need is spared for theirs.

What always holds: the forward runs once; each node saves what its own backward reads; a result that another group saved is saved without its history.
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from firesteel.records import dataclass
from firesteel.tracebacks import hiding

if TYPE_CHECKING:
    from firesteel.autograd.function import PartialBackward, TrainingGraph


class Look(NamedTuple):
    """What zeros in place of a tangent need."""
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class GradientGroup:
    """Results of a graph, and inputs, whose gradients have nothing to do with those of others."""
    number: int
    tangents: int                   # bit set
    values: frozenset[int]          # outputs of the autograd function
    inputs: frozenset[int]


def groups_of(graph: TrainingGraph) -> list[GradientGroup]:
    """Results belong together where an input gets a gradient from both.  What gets none goes with the first group."""
    bits: list[int] = []
    for reach in graph.reaches if graph.packs is None else ():
        met = [one for one in bits if one & reach]
        bits = [functools.reduce(operator.or_, met, reach), *(one for one in bits if not one & reach)]
    values = [frozenset(t.value for k, t in enumerate(graph.tangents) if one >> k & 1) for one in bits]
    inputs = [frozenset(i for i, k in enumerate(graph.gradients) if k is not None and graph.reaches[k] & one) for one in bits]
    return [GradientGroup(number, *about) for number, about in enumerate(zip(bits, values, inputs))]


def in_groups(apply: Callable, graph: TrainingGraph, whole: type[torch.autograd.Function]) -> Callable:
    """The function as one node for each group, where inputs have a history."""
    asked, groups = [i for i, k in enumerate(graph.gradients) if k is not None], graph.groups
    owner = {value: group.number for group in groups for value in group.values}
    function = make_group_function(graph, whole)

    def run(*inputs):
        if all(inputs[i].is_leaf for i in asked):
            return apply(*inputs)
        made = ForwardRun()
        with torch.no_grad():
            made.values = whole.forward(made, *inputs)
        cut = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]
        found = [function.apply(*[inputs[i] if i in group.inputs else t for i, t in enumerate(cut)], made, group) for group in groups]
        return tuple([found[owner.get(k, 0)][k] for k in range(len(made.values))])
    return run


class ForwardRun:
    """Stands for the context of an autograd function: keeps what its forward says."""
    values: Sequence[Any]
    saved: Sequence[torch.Tensor]

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """They are in no group."""

    def set_materialize_grads(self, value: bool) -> None:
        assert not value


def make_group_function(graph: TrainingGraph, whole: Any) -> type[torch.autograd.Function]:
    """The autograd function of a group: (inputs, ForwardRun, GradientGroup) -> all outputs, those of other groups without a history."""
    placeholders = graph.backward_graph.graph.find_nodes(op="placeholder")[:graph.num_saved_tensors]
    sized = {place for place, node in enumerate(placeholders) if not all(type(n) is int for n in node.meta["val"].shape)}

    class GroupFunction(whole):
        @staticmethod
        def _compiled_autograd_key(ctx):
            return graph.structure(ctx.group), *whole._compiled_autograd_key(ctx)[1:]

        @staticmethod
        def forward(ctx, *given):
            made, group = given[-2:]
            vars(ctx).update({name: value for name, value in vars(made).items() if name not in ("values", "saved")}, group=group.number)
            ctx.looks = [Look(v.shape, v.dtype, v.device) if isinstance(v, torch.Tensor) else None for v in made.values]
            part = graph.part(group.tangents)
            foreign = {id(v) for k, v in enumerate(made.values) if isinstance(v, torch.Tensor) and k not in group.values}
            read = sized.union(part.read) if part is not None else range(len(made.saved))
            ctx.save_for_backward(*[None if place not in read else t.detach() if id(t) in foreign else t for place, t in enumerate(made.saved)])
            values = [v.detach() if id(v) in foreign and group.number else v for v in made.values]
            ctx.mark_non_differentiable(*[v for k, v in enumerate(values) if isinstance(v, torch.Tensor) and k not in group.values])
            ctx.set_materialize_grads(False)
            return tuple(values)

        @staticmethod
        @hiding
        def backward(ctx, *tangents):
            return (*whole.backward(ctx, *tangents), None, None)

    return GroupFunction


@dataclass(frozen=True)
class Spared:
    """Saved tensors of one node, for groups through which no backward came so far."""
    tangents: int                           # bit set
    tensors: list[torch.Tensor | None]      # None where none of these groups reads it, or where it was overwritten before
    versions: list[int]

    def unpack(self, part: PartialBackward | None) -> list[torch.Tensor | None]:
        for place in range(len(self.tensors)) if part is None else part.read:
            tensor = self.tensors[place]
            if tensor is None or tensor._version != self.versions[place]:
                raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace operation")
        return list(self.tensors)


def spare(graph: TrainingGraph, ctx: Any, arrived: int, saved: Sequence[torch.Tensor | None]) -> bool:
    """Keeps of the saved tensors, which torch will free, those of groups without a gradient in this backward, if there are any."""
    if hasattr(ctx, "group") or len(graph.groups) == 1:
        return False
    before: Spared | None = getattr(ctx, "spared", None)
    left = sum(group.tangents for group in graph.groups if not group.tangents & arrived) & (-1 if before is None else before.tangents)
    rest = graph.part(left) if left else None
    read = rest.read if rest is not None else ()
    kept = [t.detach() if t is not None and place in read else None for place, t in enumerate(saved if before is None else before.tensors)]
    ctx.spared = Spared(left, kept, [-1 if t is None else t._version for t in kept] if before is None else before.versions)
    return bool(left)
