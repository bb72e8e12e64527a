"""Cells of recurrent layers, which come as one library call on a GPU."""
from __future__ import annotations

from firesteel.graph.spec import Spec, fresh, like
from firesteel.ops.block import device_rule, operator

operator("firesteel::recurrent.* firesteel::recurrent_backward.*", library=True)


@device_rule("_thnn_fused_lstm_cell")
def fused_lstm_cell(input_gates: Spec, hidden_gates: Spec, cx: Spec, input_bias=None, hidden_bias=None) -> tuple[Spec, Spec, Spec]:
    return like(cx), like(cx), fresh(cx, (cx.shape[0], cx.shape[1] * 4))


device_rule("_thnn_fused_gru_cell")(
    lambda input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None: (like(hx), fresh(hx, (hx.shape[0], hx.shape[1] * 5))))


@device_rule("_thnn_fused_gru_cell_backward")
def fused_gru_cell_backward(grad: Spec, workspace: Spec, has_bias: bool) -> tuple[Spec | None, ...]:
    batch, width = workspace.shape[0], workspace.shape[1] // 5
    gates = fresh(workspace, (batch, width * 3))
    bias = fresh(workspace, (width * 3,)) if has_bias else None
    return gates, gates, fresh(workspace, (batch, width)), bias, bias
