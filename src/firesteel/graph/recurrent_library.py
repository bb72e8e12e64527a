"""Recurrent layers over a sequence whose length is a symbol, or data: one library operator, since steps can be unrolled for a known number only.

`firesteel::recurrent` runs torch's own layers, time first.  Where gradients are wanted the layers are those of `recurrent_steps.py` instead, whose
further results `firesteel::recurrent_backward` needs.  A dense LSTM is oneDNN's, as in eager (`recurrent_onednn.py`): what its layers keep for their
backward lives with a token of one byte, and the layers run again where the token is a copy.  What oneDNN does not take, and all on a GPU, are torch's
own layers, which its engine runs again in the backward.  Both are rows of the shape rules.  `over_symbolic_time` is what `recurrent.py` calls.  A
gradient that is to be differentiated again is taken of the unrolled steps, whose number is then fixed by a guard.

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

from firesteel.graph import recurrent_onednn, recurrent_steps
from firesteel.graph.autofunctional import library
from firesteel.graph.recurrent_steps import KINDS, weights_of
from firesteel.graph.rules.base import RULES
from firesteel.graph.sizes import must
from firesteel.graph.spec import Spec, contiguous_strides
from firesteel.operators import OWN
from firesteel.sym.expr import ne, product
from firesteel.targets import on_host

SETTINGS = "str kind, bool has_biases, int num_layers, bool bidirectional, str trained_by, bool[] wanted"


@functools.cache
def operators() -> tuple[Any, Any]:
    """(forward, backward)."""
    arguments = f"Tensor input, Tensor? batch_sizes, Tensor[] states, Tensor[] params, {SETTINGS}"
    library.define(f"recurrent({arguments}) -> Tensor[]")
    library.define(f"recurrent_backward(Tensor?[] gradients, Tensor[] kept, {arguments}) -> Tensor[]")
    library.impl("recurrent", _run, "CompositeExplicitAutograd")
    library.impl("recurrent_backward", _run_backward, "CompositeExplicitAutograd")
    forward, backward = torch.ops.firesteel.recurrent.default, torch.ops.firesteel.recurrent_backward.default
    OWN.rows({forward: _run, backward: _run_backward})
    RULES.add(forward, _shapes)
    RULES.add(backward, lambda gradients, kept, inputs, batch_sizes, states, params, *settings: [
        _like(t) for t, wanted in zip((inputs, *states, *params), settings[-1]) if wanted])
    return forward, backward


# ---------------------------------------------------------------- what they do

def _layers(train: bool, inputs: Tensor, batch_sizes: Tensor | None, states: Sequence[Tensor], params: Sequence[Tensor], kind: str, has_biases: bool,
            num_layers: int, bidirectional: bool) -> tuple[Tensor, ...]:
    first: Any = list(states) if kind == "lstm" else states[0]
    settings = (list(params), has_biases, num_layers, 0.0, train, bidirectional)
    if batch_sizes is not None:
        return getattr(torch, kind)(inputs, batch_sizes, first, *settings)
    return getattr(torch, kind)(inputs, first, *settings, False)


def _token(kept: recurrent_onednn.Kept) -> Tensor:
    """One byte, and what goes on living with it: torch keeps a tensor's object, with its attributes, as long as the tensor lives."""
    token = torch.empty(1, dtype=torch.uint8)
    token.kept = kept       # type: ignore[attr-defined]
    return token


def _trained_by(inputs: Any, batch_sizes: Any, states: Any, params: Sequence[Any], kind: str, has_biases: bool, num_layers: int,
                bidirectional: bool) -> str:
    """What runs the layers and their backward; decided where they are traced, the same on every machine."""
    if not on_host(inputs):
        return "engine"
    projected = len(params) != num_layers * (2 if bidirectional else 1) * (4 if has_biases else 2)
    if kind != "lstm" or batch_sizes is not None or projected:
        return "steps"
    return "oneDNN" if recurrent_onednn.fit(inputs, states, params, has_biases, bidirectional) else "engine"


def _rows(inputs: Tensor, batch_sizes: Tensor | None, states: Sequence[Tensor], params: Sequence[Tensor], kind: str, has_biases: bool,
          num_layers: int, bidirectional: bool) -> tuple[Any, ...]:
    """The input as rows, how many each step has, states, weights, number of layers."""
    sizes = [inputs.shape[1]] * inputs.shape[0] if batch_sizes is None else batch_sizes.tolist()
    weights = weights_of(params, has_biases, num_layers * (2 if bidirectional else 1))
    return inputs.reshape(-1, inputs.shape[-1]), sizes, states, weights, num_layers


def _run(*args: Any) -> list[Tensor]:
    *given, trained_by, wanted = args
    inputs, batch_sizes, states, params, kind, *settings = given
    if trained_by == "oneDNN" and recurrent_onednn.takes(inputs):
        results, kept = recurrent_onednn.forward(inputs, states, params, *settings)
        return [*results, _token(kept)]
    if trained_by == "steps":
        with torch.no_grad():
            output, *rest = recurrent_steps.forward(kind, *_rows(*given))
        return [output.view(*inputs.shape[:-1], output.shape[-1]), *rest]
    with torch._C._AutoDispatchBelowAutograd(), torch._C._SetExcludeDispatchKeyGuard(VIEWS, True):      # a small layer is a sixth faster so
        results = [t.contiguous() for t in _layers(False, *given)]
    return [*results, inputs.new_zeros(1, dtype=torch.uint8)] if trained_by else results


VIEWS = torch._C.DispatchKey.ADInplaceOrView        # accounts of views and versions


def _run_backward(gradients: Sequence[Tensor | None], kept: Sequence[Tensor], *args: Any) -> list[Tensor]:
    *given, trained_by, wanted = args
    inputs, batch_sizes, states, params, kind, has_biases, num_layers, bidirectional = given
    with torch.no_grad():
        if trained_by == "oneDNN":
            own = getattr(kept[-1], "kept", None)
            if own is None and recurrent_onednn.takes(inputs):
                own = recurrent_onednn.forward(inputs, states, params, has_biases, num_layers, bidirectional)[1]
            if own is not None:
                return recurrent_onednn.backward(gradients, own, inputs, states, params, has_biases, num_layers, bidirectional, wanted)
        if trained_by != "steps":
            return _by_engine(gradients, *given, wanted)
        first, *others = gradients
        output = kept[0].flatten(0, -2)
        arrived = [None if first is None else first.reshape(output.shape), *others]
        made = recurrent_steps.backward(kind, arrived, output, kept[1:], wanted, *_rows(*given))
    return [made[0].view(inputs.shape), *made[1:]] if wanted[0] else made


def _by_engine(gradients: Sequence[Tensor | None], inputs: Tensor, batch_sizes: Tensor | None, states: Sequence[Tensor], params: Sequence[Tensor],
               *settings: Any) -> list[Tensor]:
    """Runs the layers again, and torch's engine back from their results."""
    with _recording():
        copies = [t.detach().clone().requires_grad_(wanted) for t, wanted in zip((inputs, *states, *params), settings[-1], strict=True)]
        count = 1 + len(states)
        results = _layers(True, copies[0], batch_sizes, copies[1:count], copies[count:], *settings[:-1])
        arrived = [(result, gradient) for result, gradient in zip(results, gradients) if gradient is not None]
        # with its gradients in the leaves the engine need not look which nodes lead to them
        torch.autograd.backward([result for result, _ in arrived], [gradient for _, gradient in arrived])
    return [torch.zeros_like(t) if t.grad is None else t.grad.contiguous() for t in copies if t.requires_grad]


@contextmanager
def _recording() -> Any:
    """Autograd is on inside, in whatever mode the caller is."""
    keys = torch._C.DispatchKey
    with torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False), \
            torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False), torch.enable_grad():
        yield


# ---------------------------------------------------------------- shapes

def _like(x: Spec, shape: Any = None) -> Spec:
    shape = x.shape if shape is None else shape
    return Spec(shape, contiguous_strides(shape), 0, x.dtype, x.device)


def _shapes(inputs: Spec, batch_sizes: Spec | None, states: Sequence[Spec], params: Sequence[Spec], kind: str, has_biases: bool, num_layers: int,
            bidirectional: bool, trained_by: str, wanted: Sequence[bool]) -> list[Spec]:
    must(ne(inputs.shape[0], 0), "Expected sequence length to be larger than 0 in RNN")
    width = states[0].shape[2] * (2 if bidirectional else 1)
    kept = []
    if trained_by == "steps":
        rows, columns = product(inputs.shape[:-1]), KINDS[kind].columns * states[-1].shape[2]
        kept = [_like(inputs, (rows, width))] * (num_layers - 1) + [_like(inputs, (rows, columns))] * (num_layers * (2 if bidirectional else 1))
    elif trained_by:
        kept = [Spec((1,), (1,), 0, torch.uint8, inputs.device)]
    return [_like(inputs, (*inputs.shape[:-1], width)), *map(_like, states), *kept]


# ---------------------------------------------------------------- what a trace records

def over_symbolic_time(settings: tuple[str, bool, int, bool], inputs: Tensor, states: Sequence[Tensor], params: Sequence[Tensor],
                       batch_sizes: Tensor | None, unrolled: Callable[..., tuple[Tensor, ...]] | None) -> tuple[Tensor, ...]:
    """Outputs, time first, and last states.  `unrolled(inputs, states, params)` computes the same step by step."""
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in (inputs, *states, *params)]
    trained_by = _trained_by(inputs, batch_sizes, states, params, *settings) if any(wanted) else ""
    return _Recurrent.apply((*settings, trained_by, wanted), unrolled, batch_sizes, len(states), inputs, *states, *params)


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: tuple, unrolled: Any, batch_sizes: Tensor | None, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.settings, ctx.unrolled, ctx.batch_sizes, ctx.count = settings, unrolled, batch_sizes, count
        results = operators()[0](tensors[0], batch_sizes, list(tensors[1:1 + count]), list(tensors[1 + count:]), *settings)
        ctx.set_materialize_grads(False)
        kept = [results[0], *results[1 + count:]] if len(results) > 1 + count else []
        ctx.save_for_backward(*tensors, *kept)
        return tuple(results[:1 + count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        split, last = 1 + ctx.count, len(ctx.settings[-1])
        tensors, kept = ctx.saved_tensors[:last], ctx.saved_tensors[last:]
        if torch.is_grad_enabled():
            return (None, None, None, None, *_second_order(ctx, tensors, split, gradients))
        made = operators()[1](list(gradients), list(kept), tensors[0], ctx.batch_sizes, list(tensors[1:split]), list(tensors[split:]), *ctx.settings)
        found = iter(made)
        return (None, None, None, None, *(next(found) if wanted else None for wanted in ctx.settings[-1]))


def _second_order(ctx: Any, tensors: Sequence[Tensor], split: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    if ctx.unrolled is None:
        raise NotImplementedError("second-order gradients of a recurrent layer over a packed sequence")
    wanted = [t for t in tensors if t.requires_grad]
    made = ctx.unrolled(tensors[0], tensors[1:split], tensors[split:])
    results, gradients = zip(*[(result, gradient) for result, gradient in zip(made, gradients) if gradient is not None])
    engine = torch.autograd.Variable._execution_engine      # the public function imports a symbolic algebra package
    found = iter(engine.run_backward(tuple(results), tuple(gradients), True, True, tuple(wanted), True, accumulate_grad=False))
    return [next(found) if t.requires_grad else None for t in tensors]


operators()     # defined here: kept programs name them by text
