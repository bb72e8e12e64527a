"""Recurrent layers and cells by plain operators: torch.lstm, gru, rnn_tanh and rnn_relu, and their cells, as rows of `functions.py`.

Torch's own code takes sizes as numbers, and hands whole layers to library calls that work eagerly only.  Unrolled, the steps between
the products are fused like any other code.  A kind of cell is a row of `CELLS`: from the input's share of the gates, the state and the
state's share of the gates to the new state, whose first part is the output.  Where the length of the sequence is a symbol, and for
packed sequences, whose lengths are data, the layers are one call: `recurrent_library.py`.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firesteel.graph.functions import FUNCTIONS
from firesteel.graph.recurrent_library import over_symbolic_time
from firesteel.graph.recurrent_steps import Weights, weights_of
from firesteel.table import Table

State = tuple[Tensor, ...]
CELLS: Table[Callable[[Tensor, State, Tensor], State]] = Table("recurrent cell", "graph/recurrent.py")


@CELLS.row("lstm")
def lstm(inside: Tensor, state: State, outside: Tensor) -> State:
    enter, forget, new, leave = (inside + outside).chunk(4, 1)
    cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


@CELLS.row("gru")
def gru(inside: Tensor, state: State, outside: Tensor) -> State:
    (reset_in, update_in, new_in), (reset_out, update_out, new_out) = inside.chunk(3, 1), outside.chunk(3, 1)
    new = torch.tanh(new_in + torch.sigmoid(reset_in + reset_out) * new_out)
    return ((state[0] - new) * torch.sigmoid(update_in + update_out) + new,)


CELLS.add("rnn_tanh", lambda inside, state, outside: (torch.tanh(inside + outside),))
CELLS.add("rnn_relu", lambda inside, state, outside: (torch.relu(inside + outside),))


def _cell_function(kind: str) -> Callable[..., Any]:
    """torch.lstm_cell and the like: one step."""
    def cell(input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None) -> Any:
        state = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
        made = CELLS[kind](F.linear(input, w_ih, b_ih), state, F.linear(state[0], w_hh, b_hh))
        return made if kind == "lstm" else made[0]
    return cell


def _layer_function(kind: str) -> Callable[..., Any]:
    """torch.lstm and the like: layers over a sequence."""
    def layers(input: Tensor, hx: Any, params: Any, has_biases: Any, num_layers: int, dropout: float, train: bool, bidirectional: bool,
               batch_first: Any = None) -> Any:
        if isinstance(has_biases, (list, tuple)):       # torch.lstm(data, batch_sizes, hx, params, has_biases, ...)
            # each argument is one place further on
            return _packed(kind, input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)     # type: ignore[arg-type]
        if batch_first is None or isinstance(params, Tensor) or isinstance(hx, Tensor) != (kind != "lstm") or input.dim() != 3:
            return NotImplemented           # a mistake
        states = tuple(hx) if kind == "lstm" else (hx,)
        weights = weights_of(params, has_biases, num_layers * (2 if bidirectional else 1))
        if weights is None or states[0].shape[0] != len(weights):
            return NotImplemented
        x = input.transpose(0, 1) if batch_first else input
        if type(x.shape[0]) is torch.SymInt:
            output, *ends = _by_library(kind, x, states, params, bool(has_biases), num_layers, dropout if train else 0.0, bool(bidirectional))
        else:
            output, *ends = _unrolled(kind, x, states, weights, num_layers, dropout if train else 0.0)
        return (output.transpose(0, 1) if batch_first else output, *ends)
    return layers


def _packed(kind: str, data: Tensor, batch_sizes: Tensor, hx: Any, params: Sequence[Tensor], has_biases: Any, num_layers: int, dropout: float,
            train: bool, bidirectional: bool) -> Any:
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    return _by_library(kind, data, states, params, bool(has_biases), num_layers, dropout if train else 0.0, bool(bidirectional), batch_sizes)


def _by_library(kind: str, x: Tensor, states: State, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float, bidirectional: bool,
                batch_sizes: Tensor | None = None) -> State:
    """One call, or one for each layer where random numbers are drawn between them."""
    if dropout and num_layers > 1:
        each, directions, ends = len(params) // num_layers, 2 if bidirectional else 1, []
        for n in range(num_layers):
            start = tuple(part[n * directions:(n + 1) * directions] for part in states)
            x, *end = _by_library(kind, x, start, params[n * each:(n + 1) * each], has_biases, 1, 0.0, bidirectional, batch_sizes)
            x = torch.dropout(x, dropout, True) if n < num_layers - 1 else x
            ends.append(end)
        return (x, *[torch.cat(part) for part in zip(*ends)])

    def unrolled(x: Tensor, states: State, params: Sequence[Tensor]) -> State:
        weights = weights_of(params, has_biases, num_layers * (2 if bidirectional else 1))
        assert weights is not None and batch_sizes is None
        return _unrolled(kind, x, states, weights, num_layers, 0.0)
    settings = (kind, has_biases, num_layers, bidirectional)
    return over_symbolic_time(settings, x, states, params, batch_sizes, unrolled if batch_sizes is None else None)


def _unrolled(kind: str, x: Tensor, states: State, weights: list[Weights], num_layers: int, dropout: float) -> State:
    """All layers, time first: outputs, and last states."""
    starts = list(zip(*[part.unbind(0) for part in states]))
    directions = len(weights) // num_layers
    ends = []
    for layer in range(num_layers):
        outputs = []
        for n in range(layer * directions, (layer + 1) * directions):
            output, end = _run(CELLS[kind], x, starts[n], weights[n], reverse=n % directions == 1)
            outputs.append(output)
            ends.append(end)
        x = torch.cat(outputs, 2) if directions == 2 else outputs[0]
        if dropout and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return (x, *[torch.stack(part) for part in zip(*ends)])


def _run(cell: Callable[[Tensor, State, Tensor], State], x: Tensor, state: State, weights: Weights, reverse: bool) -> tuple[Tensor, State]:
    """One layer in one direction: its outputs in the order of time, and its last state."""
    w_ih, w_hh, b_ih, b_hh, projection = weights
    steps: list[Tensor] = list(F.linear(x, w_ih, b_ih).unbind(0))
    outputs = []
    for inside in reversed(steps) if reverse else steps:
        state = cell(inside, state, F.linear(state[0], w_hh, b_hh))
        if projection is not None:
            state = (F.linear(state[0], projection), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


for _kind in CELLS:
    FUNCTIONS.add(getattr(torch, f"{_kind}_cell"), _cell_function(_kind))
    FUNCTIONS.add(getattr(torch, _kind), _layer_function(_kind))
