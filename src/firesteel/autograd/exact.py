"""Which values must be the same to the last bit wherever they are computed.

In: a graph, joint or for inference, as traced.  Out: the same, with meta["exact"] on each float value that a decision sees: a
comparison, an index, a branch, a tie, a step function.  Recomputed in another way, such a value would not be equal to the copy that
was saved, and an element would lose the tie with itself.  So
 - its rounding to bf16 or f16 is never dropped, as kernels do with results that they keep in f32 (loops/ir.py, rule 7);
 - the backward does not compute a reduction of it again (partition.py), since another kernel adds in another order; of other functions kernels
   make the same bits, in a lane as in a scalar (codegen/llvm_code.py).

A value is exact if a deciding operator reads it, or an operator whose result is exact.  Marked before the graph is cut in two, so that
forward and backward agree.  Not looked behind heavy operators: their results are stored once, and their sums are not eager's to the last
bit in any case.

    t = tanh(x); where(t == t.amax(1, keepdim=True), t, 0)      # t and its amax are exact
"""
from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from firesteel.autograd.recompute import op_class
from firesteel.operators import Facet

_OURS = ("aten", "prims")

DECIDES: Facet[bool] = Facet("decides by its floats")


def mark_exact(gm: GraphModule) -> None:
    """Sets meta["exact"].  One walk from the results to the inputs."""
    exact: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node in exact and op_class(node) not in ("heavy", "random") or _decides(node):
            exact.update(read for read in node.all_input_nodes if any(d.is_floating_point or d.is_complex for d in _dtypes(read)))
    for node in exact:
        node.meta["exact"] = True


def _decides(node: Node) -> bool:
    """Does the operator make something of its floats that a small change of them may change wholly?"""
    known = _ALWAYS.get(node.target)
    if known is None:
        known = _ALWAYS[node.target] = _always(node)
    if known in (True, False):
        return known
    return node.kwargs.get("rounding_mode") is not None or any(not dtype.is_floating_point and not dtype.is_complex for dtype in _dtypes(node))


_ALWAYS: dict[Any, bool | str] = {}     # operator -> does it decide always, never, or "perhaps": where it makes integers of floats


def _always(node: Node) -> bool | str:
    target, kind = node.target, op_class(node)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if DECIDES.of(target):
        return True
    if kind == "heavy":
        return target.namespace not in _OURS
    return False if kind in ("random", "create", "size") else "perhaps"


def _dtypes(node: Node) -> list[torch.dtype]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v.dtype for v in values if isinstance(v, torch.Tensor)]
