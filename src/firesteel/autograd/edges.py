"""What is between a compiled graph and its callers, and needs no graph: gradients fitted to the trace, inputs without their history, outputs in
their places, automatic casting turned off.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch.autograd import forward_ad

from firesteel.autograd.alias import AliasPlan
from firesteel.graph.wrappers import Pack
from firesteel.records import dataclass


@dataclass(frozen=True)
class Dense:
    """Strides over symbolic sizes: dense in this order of dimensions."""
    order: tuple[int, ...]          # slowest first
    back: tuple[int, ...]           # the inverse of the order


@dataclass(frozen=True)
class Tangent:
    """What the backward graph expects for one forward output."""
    value: int                      # which forward output; of a TrainingGraph: which output of its autograd function
    strides: tuple | Dense | None   # as traced; None where they hold symbols and are contiguous
    pack: Pack | None = None        # where the output is a tensor subclass
    parts: tuple = ()               # the strides of its parts


def fit(tangent: torch.Tensor, strides: tuple | Dense | None) -> torch.Tensor:
    if tangent.is_conj() or tangent.is_neg():
        tangent = tangent.resolve_conj().resolve_neg()
    if strides is None:
        return tangent.contiguous()
    if isinstance(strides, Dense):
        return tangent.permute(strides.order).contiguous().permute(strides.back)
    if tangent.stride() == strides:
        return tangent
    return torch.empty_strided(tangent.shape, strides, dtype=tangent.dtype, device=tangent.device).copy_(tangent)


def detaching(apply: Callable, severed: Sequence[int]) -> Callable:
    """The function with no edge to what made these inputs: the engine would still run nodes behind an edge without a gradient.  Results
    require one even where no other input does, as those of a view that was taken under no_grad."""
    return lambda *inputs: apply(*[t.detach().requires_grad_(t.requires_grad) if i in severed else t for i, t in enumerate(inputs)])


def in_all_places(apply: Callable, plan: AliasPlan) -> Callable:
    """The function's outputs as forward outputs, with None for those that it does not give."""
    recorded = plan.recorded_values()
    places = {value: place for place, value in enumerate(sorted(recorded))}
    pick = operator.itemgetter(*(places.get(value, len(places)) for value in range(plan.num_values)))       # at least two
    return lambda *inputs: pick((*apply(*inputs), None))


casts = torch._C._is_any_autocast_enabled
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph      # does the caller want a second backward?


def without_casting(fn: Callable) -> Callable:
    def run(*args):
        with torch._C._DisableAutocast():
            return fn(*args)
    return run


peek_transform = torch._C._functorch.peek_interpreter_stack


def is_transformed() -> bool:
    """Is a function transform (vmap, grad, forward-mode) at work?  Then tensors may be wrapped: the program itself is run."""
    return peek_transform() is not None or forward_ad._current_level >= 0
