"""Recurrent layers and cells by plain operators: torch.lstm, gru, rnn_tanh and rnn_relu, and their cells, as rows of `functions.py`.

Torch's own code takes sizes as numbers, and hands whole layers to library calls that work eagerly only.  Unrolled, the steps between
the products are fused like any other code.  A kind of cell is a row of `CELLS`: from the input's share of the gates, the state and the
state's share of the gates to the new state, whose first part is the output.  Packed sequences are left to torch.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firesteel.graph.functions import FUNCTIONS
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
        if batch_first is None or isinstance(params, Tensor) or isinstance(hx, Tensor) != (kind != "lstm") or input.dim() != 3:
            return NotImplemented           # a packed sequence, or a mistake
        states = list(zip(*[part.unbind(0) for part in (hx if kind == "lstm" else (hx,))]))
        directions = 2 if bidirectional else 1
        weights = _weights(params, has_biases, num_layers * directions)
        if weights is None or len(states) != len(weights):
            return NotImplemented
        x, ends = input.transpose(0, 1) if batch_first else input, []
        for layer in range(num_layers):
            outputs = []
            for n in range(layer * directions, (layer + 1) * directions):
                output, end = _run(CELLS[kind], x, states[n], weights[n], reverse=n % directions == 1)
                outputs.append(output)
                ends.append(end)
            x = torch.cat(outputs, 2) if bidirectional else outputs[0]
            if dropout and train and layer < num_layers - 1:
                x = torch.dropout(x, dropout, train)
        return (x.transpose(0, 1) if batch_first else x, *[torch.stack(part) for part in zip(*ends)])
    return layers


def _weights(params: Sequence[Tensor], has_biases: bool, count: int) -> list[tuple[Any, ...]] | None:
    """(w_ih, w_hh, b_ih, b_hh, projection) of each layer and direction; None where the list has another length."""
    each = len(params) // count
    with_bias = 4 if has_biases else 2
    if each * count != len(params) or each not in (with_bias, with_bias + 1):
        return None
    rows = [tuple(params[n * each:(n + 1) * each]) for n in range(count)]
    return [(*row[:with_bias], *(() if has_biases else (None, None)), row[with_bias] if each > with_bias else None) for row in rows]


def _run(cell: Callable[[Tensor, State, Tensor], State], x: Tensor, state: State, weights: tuple[Any, ...], reverse: bool) -> tuple[Tensor, State]:
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
