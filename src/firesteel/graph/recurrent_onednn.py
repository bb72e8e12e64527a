"""Dense LSTM layers by oneDNN, as eager runs them, without torch's engine: a forward that keeps oneDNN's workspaces, and that backward.

`mkldnn_rnn_layer` is one layer in one direction.  The backward reads the caller's inputs, states and weights again; `Kept` has the rest.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

layer, layer_backward = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default
LSTM = 2                # oneDNN's number of the kind
NO_SIZES: list[int] = []    # of steps: the batch is dense


class Kept(NamedTuple):
    """Of each layer and direction."""
    inputs: list[Tensor | None]                                 # None: the caller's own
    results: list[tuple[Tensor, Tensor, Tensor, Tensor]]        # output, last state and cell, workspace


@functools.cache
def dtypes() -> tuple[torch.dtype, ...]:
    """Those that eager gives to oneDNN on this machine."""
    if not torch.backends.mkldnn.is_available():
        return ()
    return (torch.float32, torch.bfloat16) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else (torch.float32,)


def fit(x: Any, states: Sequence[Any], params: Sequence[Any], has_biases: bool, bidirectional: bool) -> bool:
    """Do sizes and dtypes belong together?  The library does not look."""
    each, hidden, directions = 4 if has_biases else 2, states[0].shape[2], 2 if bidirectional else 1
    sizes: list[Any] = [(len(params) // each, x.shape[1], hidden)] * 2
    for n in range(len(params) // each):
        inside = x.shape[2] if n < directions else hidden * directions
        sizes += [(4 * hidden, inside), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)][:each]
    given = (*states, *params)
    return all(t.dtype is x.dtype for t in given) and [tuple(t.shape) for t in given] == sizes


def takes(x: Tensor) -> bool:
    """Does eager give it to oneDNN on this machine?"""
    return x.dtype in dtypes() and x.numel() > 0


def _weights(params: Sequence[Tensor], has_biases: bool, n: int) -> Sequence[Tensor]:
    if has_biases:
        return params[4 * n:4 * n + 4]
    inside, outside = params[2 * n:2 * n + 2]
    return inside, outside, torch.zeros_like(inside), torch.zeros_like(outside)


def forward(x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
            bidirectional: bool) -> tuple[list[Tensor], Kept]:
    """Outputs, last states and cells; what the backward needs."""
    before = torch.is_grad_enabled()
    with torch._C._AutoDispatchBelowAutograd():
        torch._C._set_grad_enabled(True)        # without this flag the library keeps no workspace
        try:
            return _forward(x, states, params, has_biases, num_layers, bidirectional)
        finally:
            torch._C._set_grad_enabled(before)


def _forward(x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
             bidirectional: bool) -> tuple[list[Tensor], Kept]:
    directions, hidden, kept, current = 2 if bidirectional else 1, states[0].shape[2], Kept([], []), x.contiguous()
    for n in range(num_layers * directions):
        kept.inputs.append(None if current is x else current)
        starts = [state[n].contiguous() for state in states]
        made = layer(current, *_weights(params, has_biases, n), *starts, n % directions == 1, NO_SIZES, LSTM, hidden, num_layers, has_biases,
                     bidirectional, False, True)
        kept.results.append(made)
        if n % directions == directions - 1:
            current = made[0] if directions == 1 else torch.cat((kept.results[-2][0], made[0]), 2)
    return [current, *(torch.stack([made[place] for made in kept.results]) for place in (1, 2))], kept


def backward(gradients: Sequence[Tensor | None], kept: Kept, x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor],
             has_biases: bool, num_layers: int, bidirectional: bool, wanted: Sequence[bool]) -> list[Tensor]:
    """Those wanted of the gradients of the input, the states and the weights."""
    directions, hidden, each = 2 if bidirectional else 1, states[0].shape[2], 4 if has_biases else 2
    arrived, of_states = gradients[0], [part if part is None else part.contiguous() for part in gradients[1:]]
    found: list[Any] = [None] * (num_layers * directions)
    for n in reversed(range(len(found))):
        direction, given = n % directions, kept.inputs[n]
        share = arrived if arrived is None or directions == 1 else arrived[..., direction * hidden:(direction + 1) * hidden]
        *results, workspace = kept.results[n]
        found[n] = layer_backward(
            x if given is None else given, *_weights(params, has_biases, n), *(state[n].contiguous() for state in states), *results,
            share if share is None else share.contiguous(), *(part if part is None else part[n] for part in of_states), direction == 1, LSTM, hidden,
            num_layers, has_biases, True, bidirectional, NO_SIZES, False, workspace)
        if direction == 0:
            arrived = found[n][0] if directions == 1 else found[n][0] + found[n + 1][0]
    of_inputs = [arrived, *(torch.stack([row[place] for row in found]) if asked else None for place, asked in zip((5, 6), wanted[1:3]))]
    made: Any = (*of_inputs, *(part for row in found for part in row[1:1 + each]))
    made = [part for part, asked in zip(made, wanted, strict=True) if asked]
    return made if x.dtype is torch.float32 else [part.to(x.dtype) for part in made]        # the library's are floats
