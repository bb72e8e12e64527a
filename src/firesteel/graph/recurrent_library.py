"""Recurrent layers over a sequence whose length is a symbol, or data: one library operator, since steps can be unrolled for a known number only.

`firesteel::recurrent` runs torch's own layers, time first, and `firesteel::recurrent_backward` runs them again in order to take the gradients;
both are rows of the shape rules.  `over_symbolic_time` is what `recurrent.py` calls.  A gradient that is to be differentiated
again is taken of the unrolled steps, whose number is then fixed by a guard.

    output, h, c = over_symbolic_time(("lstm", True, 1, False), x, (h0, c0), params, None, unrolled)        # x: f32[s0, 4, 8]
    output, h, c = over_symbolic_time(("lstm", True, 1, False), data, (h0, c0), params, batch_sizes, None)      # a packed sequence
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.autofunctional import library
from firesteel.graph.rules.base import RULES
from firesteel.graph.sizes import must
from firesteel.graph.spec import Spec, contiguous_strides
from firesteel.sym.expr import ne

SETTINGS = "str kind, bool has_biases, int num_layers, bool bidirectional"


@functools.cache
def operators() -> tuple[Any, Any]:
    """(forward, backward), defined at the first use."""
    arguments = f"Tensor input, Tensor? batch_sizes, Tensor[] states, Tensor[] params, {SETTINGS}"
    library.define(f"recurrent({arguments}) -> Tensor[]")
    library.define(f"recurrent_backward(Tensor[] gradients, {arguments}) -> Tensor[]")
    library.impl("recurrent", _run, "CompositeExplicitAutograd")
    library.impl("recurrent_backward", _run_backward, "CompositeExplicitAutograd")
    forward, backward = torch.ops.firesteel.recurrent.default, torch.ops.firesteel.recurrent_backward.default
    RULES.add(forward, _shapes)
    RULES.add(backward, lambda gradients, inputs, batch_sizes, states, params, *settings: [_like(t) for t in (inputs, *states, *params)])
    return forward, backward


# ---------------------------------------------------------------- what they do

def _layers(train: bool, inputs: Tensor, batch_sizes: Tensor | None, states: Sequence[Tensor], params: Sequence[Tensor], kind: str, has_biases: bool,
            num_layers: int, bidirectional: bool) -> tuple[Tensor, ...]:
    first: Any = list(states) if kind == "lstm" else states[0]
    settings = (list(params), has_biases, num_layers, 0.0, train, bidirectional)
    if batch_sizes is not None:
        return getattr(torch, kind)(inputs, batch_sizes, first, *settings)
    return getattr(torch, kind)(inputs, first, *settings, False)


def _run(*args: Any) -> list[Tensor]:
    with torch.no_grad():
        return [t.contiguous() for t in _layers(False, *args)]


def _run_backward(gradients: Sequence[Tensor], inputs: Tensor, batch_sizes: Tensor | None, states: Sequence[Tensor], params: Sequence[Tensor],
                  *settings: Any) -> list[Tensor]:
    with _recording():
        leaves = [t.detach().requires_grad_() for t in (inputs, *states, *params)]
        count = 1 + len(states)
        results = _layers(True, leaves[0], batch_sizes, leaves[1:count], leaves[count:], *settings)
        found = torch.autograd.grad(results, leaves, list(gradients))
    return [t.contiguous() for t in found]


@contextmanager
def _recording() -> Any:
    """Autograd at work, whoever calls."""
    keys = torch._C.DispatchKey
    with torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False), \
            torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False), torch.enable_grad():
        yield


# ---------------------------------------------------------------- shapes

def _like(x: Spec, shape: Any = None) -> Spec:
    shape = x.shape if shape is None else shape
    return Spec(shape, contiguous_strides(shape), 0, x.dtype, x.device)


def _shapes(inputs: Spec, batch_sizes: Spec | None, states: Sequence[Spec], params: Sequence[Spec], kind: str, has_biases: bool, num_layers: int,
            bidirectional: bool) -> list[Spec]:
    must(ne(inputs.shape[0], 0), "Expected sequence length to be larger than 0 in RNN")
    width = states[0].shape[2] * (2 if bidirectional else 1)
    return [_like(inputs, (*inputs.shape[:-1], width)), *map(_like, states)]


# ---------------------------------------------------------------- what a trace records

def over_symbolic_time(settings: tuple[str, bool, int, bool], inputs: Tensor, states: Sequence[Tensor], params: Sequence[Tensor],
                       batch_sizes: Tensor | None, unrolled: Callable[..., tuple[Tensor, ...]] | None) -> tuple[Tensor, ...]:
    """Outputs, time first, and last states.  `unrolled(inputs, states, params)` computes the same step by step."""
    return _Recurrent.apply(settings, unrolled, batch_sizes, len(states), inputs, *states, *params)


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: tuple, unrolled: Any, batch_sizes: Tensor | None, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.settings, ctx.unrolled, ctx.batch_sizes, ctx.count = settings, unrolled, batch_sizes, count
        ctx.save_for_backward(*tensors)
        return tuple(operators()[0](tensors[0], batch_sizes, list(tensors[1:1 + count]), list(tensors[1 + count:]), *settings))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensors, split = ctx.saved_tensors, 1 + ctx.count
        if torch.is_grad_enabled():
            return (None, None, None, None, *_second_order(ctx, tensors, split, gradients))
        made = operators()[1](list(gradients), tensors[0], ctx.batch_sizes, list(tensors[1:split]), list(tensors[split:]), *ctx.settings)
        return (None, None, None, None, *made)


def _second_order(ctx: Any, tensors: Sequence[Tensor], split: int, gradients: Sequence[Tensor]) -> list[Tensor | None]:
    if ctx.unrolled is None:
        raise NotImplementedError("second-order gradients of a recurrent layer over a packed sequence")
    wanted = [t for t in tensors if t.requires_grad]
    results = ctx.unrolled(tensors[0], tensors[1:split], tensors[split:])
    engine = torch.autograd.Variable._execution_engine      # the public function imports a symbolic algebra package
    found = iter(engine.run_backward(tuple(results), tuple(gradients), True, True, tuple(wanted), True, accumulate_grad=False))
    return [next(found) if t.requires_grad else None for t in tensors]
