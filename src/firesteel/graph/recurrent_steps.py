"""Recurrent layers on real tensors, for training: a forward that keeps what the backward needs, and that backward.

The rows of all steps stand behind each other, `sizes[t]` of them for step t; sizes never grow with time (a packed sequence), or are all alike.  A
step of the forward is a product and a few operators in place on its rows of the layer's workspace.  The backward turns the workspace into
derivatives first, all rows at once, so that a step back is a product and a few multiplications; gradients of weights are products over all rows at
the end.  Torch's engine has some thirty nodes for a step instead.

Buffers hold the state of every row of the batch: a step works on the first `sizes[t]`.  Rows that ended keep their last state; those that have not
begun, going back in time, their first; likewise gradients.  So a buffer ends up with what the caller wants.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from firesteel.table import Table

sigmoid_slope, tanh_slope = torch.ops.aten.sigmoid_backward.grad_input, torch.ops.aten.tanh_backward.grad_input


class Weights(NamedTuple):
    """Those of a layer in one direction."""
    inside: Tensor
    outside: Tensor
    bias_in: Tensor | None = None
    bias_out: Tensor | None = None
    projection: Tensor | None = None

    def biases(self, first: int | None = None, last: int | None = None) -> Tensor | None:
        """Their sum, or of that a part."""
        return None if self.bias_in is None or self.bias_out is None else self.bias_in[first:last] + self.bias_out[first:last]


def weights_of(params: Sequence[Tensor], has_biases: bool, count: int) -> list[Weights] | None:
    """Those of each layer and direction; None where the list has another length."""
    each = len(params) // count
    with_bias = 4 if has_biases else 2
    if each * count != len(params) or each not in (with_bias, with_bias + 1):
        return None
    names = ["inside", "outside", *(["bias_in", "bias_out"] if has_biases else []), *(["projection"] if each > with_bias else [])]
    return [Weights(**dict(zip(names, params[n * each:(n + 1) * each]))) for n in range(count)]


class LayerRun(NamedTuple):
    """A layer in one direction: its rows, and the order of its steps."""
    x: Tensor
    sizes: list[int]
    order: Sequence[int]
    starts: Sequence[Tensor]        # a state's rows
    weights: Weights
    work: Tensor                    # (rows, columns of the kind * hidden)
    out: Tensor

    def parts(self, *columns: tuple[int, int], of: Tensor | None = None) -> list[Sequence[Tensor]]:
        """For each range of columns, counted in hidden sizes, its rows step by step."""
        of, hidden = self.work if of is None else of, self.starts[-1].shape[1]
        return [of[:, first * hidden:last * hidden].split(self.sizes) for first, last in columns]

    def walk(self, buffers: Sequence[Tensor], made: Sequence[Sequence[Tensor]]) -> Iterator[tuple[int, list[Tensor]]]:
        """Each step, with the states before it; `made` are those behind each step, which the buffers get where the number of rows changes."""
        last = None
        for t in self.order:
            if last is not None and self.sizes[t] == self.sizes[last]:
                before = [rows[last] for rows in made]
            else:
                _keep(buffers, made, last)
                before = [buffer[:self.sizes[t]] for buffer in buffers]
            yield t, before
            last = t
        _keep(buffers, made, last)

    def before(self, made: Tensor, start: Tensor) -> Tensor:
        """Of a state behind each step that before it."""
        rows, sizes, pieces = made.split(self.sizes), self.sizes, []
        for t in range(len(sizes)):
            other = t + self.order[0] - self.order[1] if len(sizes) > 1 else -1
            known = rows[other] if 0 <= other < len(sizes) else start[:0]
            pieces += [known if known.shape[0] <= sizes[t] else known[:sizes[t]]] if known.shape[0] else []
            pieces += [start[known.shape[0]:sizes[t]]] if known.shape[0] < sizes[t] else []
        return torch.cat(pieces or [start[:0]])


def _keep(buffers: Sequence[Tensor], made: Sequence[Sequence[Tensor]], last: int | None) -> None:
    if last is not None:
        for buffer, rows in zip(buffers, made):
            buffer[:rows[last].shape[0]].copy_(rows[last])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


# ---------------------------------------------------------------- kinds

class LayerKind(NamedTuple):
    """forward(run, buffers) fills work and out.  backward(run, gradient rows of the output step by step, buffers of gradients of states) gives the
    gradients of the input's and of the state's share of the gates, and of the projection."""
    columns: int
    forward: Callable[[LayerRun, Sequence[Tensor]], None]
    backward: Callable[[LayerRun, Sequence[Tensor] | None, Sequence[Tensor]], tuple[Tensor, Tensor, Tensor | None]]


KINDS: Table[LayerKind] = Table("recurrent layer", "graph/recurrent_steps.py")


def lstm(run: LayerRun, buffers: Sequence[Tensor]) -> None:
    """work: input, forget, new and output gate, cell, tanh(cell)."""
    w, hidden = run.weights, run.starts[1].shape[1]
    _product(run.x, w.inside, w.biases(), run.work[:, :4 * hidden])
    gates, early, enter, forget, new, leave, cells, tanhs = run.parts((0, 4), (0, 2), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6))
    outs, turned = run.out.split(run.sizes), w.outside.t()
    for t, (h, cell) in run.walk(buffers, (outs, cells)):
        gates[t].addmm_(h, turned)
        early[t].sigmoid_()
        new[t].tanh_()
        leave[t].sigmoid_()
        torch.mul(forget[t], cell, out=cells[t]).addcmul_(enter[t], new[t])
        torch.tanh(cells[t], out=tanhs[t])
        if w.projection is None:
            torch.mul(leave[t], tanhs[t], out=outs[t])
        else:
            torch.mm(leave[t] * tanhs[t], w.projection.t(), out=outs[t])


def lstm_backward(run: LayerRun, arrived: Sequence[Tensor] | None, buffers: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    hidden, projection = run.starts[1].shape[1], run.weights.projection
    enter, forget, new, leave, cell, tanh = run.work.split(hidden, 1)
    slopes, of_cell = torch.empty_like(run.work[:, :4 * hidden], memory_format=torch.contiguous_format), tanh.new_empty(tanh.shape)
    for slope, part, factor, place in ((sigmoid_slope, enter, new, 0), (sigmoid_slope, forget, run.before(cell, run.starts[1]), 1),
                                       (tanh_slope, new, enter, 2), (sigmoid_slope, leave, tanh, 3)):
        slope(factor, part, grad_input=slopes[:, place * hidden:(place + 1) * hidden])
    tanh_slope(leave, tanh, grad_input=of_cell)
    gates, last = run.parts((0, 4), (3, 4), of=slopes)
    first = slopes[:, :3 * hidden].unflatten(1, (3, hidden)).split(run.sizes)
    (kept,), through, whole = run.parts((1, 2)), of_cell.split(run.sizes), run.out.new_empty(run.out.shape if projection is not None else 0)
    entering = whole.split(run.sizes) if projection is not None else ()
    for t in reversed(run.order):
        dh, dc = (buffer[:run.sizes[t]] for buffer in buffers)
        if arrived is not None:
            dh.add_(arrived[t])
        gradient = dh
        if projection is not None:
            entering[t].copy_(dh)
            gradient = dh @ projection
        dc.addcmul_(gradient, through[t])
        first[t].mul_(dc.unsqueeze(1))
        last[t].mul_(gradient)
        dc.mul_(kept[t])
        torch.mm(gates[t], run.weights.outside, out=dh)
    return slopes, slopes, None if projection is None else whole.t() @ (leave * tanh)


def gru(run: LayerRun, buffers: Sequence[Tensor]) -> None:
    """work: reset and update gate, the state's share of the new gate, the new gate."""
    w, hidden = run.weights, run.starts[0].shape[1]
    _product(run.x, w.inside[:2 * hidden], w.biases(0, 2 * hidden), run.work[:, :2 * hidden])
    _product(run.x, w.inside[2 * hidden:], None if w.bias_in is None else w.bias_in[2 * hidden:], run.work[:, 3 * hidden:])
    run.work[:, 2 * hidden:3 * hidden] = 0 if w.bias_out is None else w.bias_out[2 * hidden:]
    gates, early, reset, update, share, new = run.parts((0, 3), (0, 2), (0, 1), (1, 2), (2, 3), (3, 4))
    outs, turned = run.out.split(run.sizes), w.outside.t()
    for t, (h,) in run.walk(buffers, (outs,)):
        gates[t].addmm_(h, turned)
        early[t].sigmoid_()
        new[t].addcmul_(reset[t], share[t]).tanh_()
        torch.lerp(new[t], h, update[t], out=outs[t])


def gru_backward(run: LayerRun, arrived: Sequence[Tensor] | None, buffers: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    hidden = run.starts[0].shape[1]
    reset, update, share, new = run.work.split(hidden, 1)
    slopes = torch.empty_like(run.work)
    of_reset, of_update, of_share, of_new = slopes.split(hidden, 1)
    tanh_slope(1 - update, new, grad_input=of_new)
    sigmoid_slope(run.before(run.out, run.starts[0]) - new, update, grad_input=of_update)
    torch.mul(of_new, reset, out=of_share)
    sigmoid_slope(of_new * share, reset, grad_input=of_reset)
    (gates,), (kept,) = run.parts((0, 3), of=slopes), run.parts((1, 2))
    whole = slopes.unflatten(1, (4, hidden)).split(run.sizes)
    for t in reversed(run.order):
        dh = buffers[0][:run.sizes[t]]
        if arrived is not None:
            dh.add_(arrived[t])
        whole[t].mul_(dh.unsqueeze(1))
        dh.mul_(kept[t]).addmm_(gates[t], run.weights.outside)
    return torch.cat((slopes[:, :2 * hidden], of_new), 1), slopes[:, :3 * hidden], None


def _simple(activation: Callable[..., Any], slope: Callable[[Tensor, Tensor], Any]) -> LayerKind:
    """work: the state.  slope(state, its derivative)"""
    def forward(run: LayerRun, buffers: Sequence[Tensor]) -> None:
        w = run.weights
        _product(run.x, w.inside, w.biases(), run.work)
        rows, turned = run.work.split(run.sizes), w.outside.t()
        for t, (h,) in run.walk(buffers, (rows,)):
            activation(rows[t].addmm_(h, turned))
        run.out.copy_(run.work)

    def backward(run: LayerRun, arrived: Sequence[Tensor] | None, buffers: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        slopes = torch.empty_like(run.work)
        slope(run.work, slopes)
        rows = slopes.split(run.sizes)
        for t in reversed(run.order):
            dh = buffers[0][:run.sizes[t]]
            if arrived is not None:
                dh.add_(arrived[t])
            torch.mm(rows[t].mul_(dh), run.weights.outside, out=dh)
        return slopes, slopes, None
    return LayerKind(1, forward, backward)


KINDS.add("lstm", LayerKind(6, lstm, lstm_backward))
KINDS.add("gru", LayerKind(4, gru, gru_backward))
KINDS.add("rnn_tanh", _simple(torch.tanh_, lambda state, into: tanh_slope(torch.ones_like(state), state, grad_input=into)))
KINDS.add("rnn_relu", _simple(torch.relu_, lambda state, into: into.copy_(state > 0)))


# ---------------------------------------------------------------- all layers

def forward(kind: str, x: Tensor, sizes: list[int], states: Sequence[Tensor], weights: list[Weights], num_layers: int) -> list[Tensor]:
    """The output, the last states; then what the backward needs: outputs of the layers before the last, the workspace of each layer and direction."""
    ends = [state.clone(memory_format=torch.contiguous_format) for state in states]
    works = [x.new_empty(x.shape[0], KINDS[kind].columns * states[-1].shape[2]) for _ in weights]
    outs = [x.new_empty(x.shape[0], states[0].shape[2] * len(weights) // num_layers) for _ in range(num_layers)]
    for _, n, run in _runs(x, sizes, states, weights, works, outs):
        KINDS[kind].forward(run, [end[n] for end in ends])
    return [outs[-1], *ends, *outs[:-1], *works]


def backward(kind: str, gradients: Sequence[Tensor | None], output: Tensor, kept: Sequence[Tensor], wanted: Sequence[bool],
             x: Tensor, sizes: list[int], states: Sequence[Tensor], weights: list[Weights], num_layers: int) -> list[Tensor]:
    """Those wanted of the gradients of the input, the states and the weights."""
    outs, works = [*kept[:num_layers - 1], output], kept[num_layers - 1:]
    of_states = [state.new_zeros(state.shape) if gradient is None else gradient.clone(memory_format=torch.contiguous_format)
                 for state, gradient in zip(states, gradients[1:])]
    arrived, below, of_weights = gradients[0], None, []
    for direction, n, run in reversed(list(_runs(x, sizes, states, weights, works, outs))):
        width = run.starts[0].shape[1]
        share = None if arrived is None else arrived[:, direction * width:(direction + 1) * width].split(sizes)
        with torch._C._InferenceMode(True):     # views without accounts
            inside, outside, projection = KINDS[kind].backward(run, share, [part[n] for part in of_states])
        of_weights.append(_of_weights(run, inside, outside, projection))
        if run.x is not x or wanted[0]:
            below = inside @ run.weights.inside if below is None else below.addmm_(inside, run.weights.inside)
        if direction == 0:
            arrived, below = below, None
    makers = [make for row in reversed(of_weights) for make in row]
    rest = [make() for make, asked in zip(makers, wanted[1 + len(states):], strict=True) if asked]
    return [*(part for part, asked in zip((arrived, *of_states), wanted) if asked and part is not None), *rest]


def _of_weights(run: LayerRun, inside: Tensor, outside: Tensor, projection: Tensor | None) -> list[Callable[[], Tensor]]:
    """What makes the gradient of each weight that there is."""
    made = {"inside": lambda: inside.t() @ run.x, "outside": lambda: outside.t() @ run.before(run.out, run.starts[0]),
            "bias_in": lambda: inside.sum(0), "bias_out": lambda: outside.sum(0), "projection": lambda: projection.clone()}       # type: ignore[union-attr]
    return [made[name] for name, weight in zip(run.weights._fields, run.weights) if weight is not None]


def _runs(x: Tensor, sizes: list[int], states: Sequence[Tensor], weights: list[Weights], works: Sequence[Tensor],
          outs: Sequence[Tensor]) -> Iterator[tuple[int, int, LayerRun]]:
    """(direction, number, LayerRun) of each layer and direction."""
    directions, width = len(weights) // len(outs), states[0].shape[2]
    for layer, out in enumerate(outs):
        for direction in range(directions):
            n = layer * directions + direction
            order = range(len(sizes)) if direction == 0 else range(len(sizes) - 1, -1, -1)
            part = out[:, direction * width:(direction + 1) * width] if directions > 1 else out
            yield direction, n, LayerRun(outs[layer - 1] if layer else x, sizes, order, [state[n] for state in states], weights[n], works[n], part)
