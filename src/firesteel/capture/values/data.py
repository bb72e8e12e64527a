"""tensor.data = other: from then on the tensor has the other's memory.

The store is a seam (autograd/seams.py): it is made for real between two compiled graphs, so that whoever else holds the tensor, its old
memory or the other tensor sees what eager leaves.  What follows uses the seam's result, which is the tensor itself.  Captured where the
tensor keeps its metadata and is a leaf or needs no gradient.  One without gradients that gets other metadata is the other's data from then
on, and the user's own tensor becomes so when the graph has run.  All else breaks.

    p.data = p.data * 0.9
"""
from __future__ import annotations

from typing import Any

import torch

from firesteel.autograd.seams import set_data_here
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.tensor import TENSOR_STORES, TensorValue
from firesteel.capture.values.torch_calls import call_graph, run_abstract
from firesteel.capture.values.wrappers import is_wrapper_class
from firesteel.errors import Break


@TENSOR_STORES.row("data")
def set_data(m: Machine, tensor: TensorValue, value: Value) -> None:
    data = m.look(value)
    if isinstance(data, TensorValue) and not m.modes.inference and not tensor.abstract.requires_grad and not is_alike(tensor.abstract, data.abstract):
        become(m, tensor, data)
        return
    if not isinstance(data, TensorValue) or m.modes.inference or not is_alike(tensor.abstract, data.abstract):
        raise Break("store", name="attribute data", value=tensor.describe())
    after = run_abstract(m, alias_of, [data.abstract, tensor.abstract.requires_grad], {}, "Tensor.data")
    node = m.record.call_function(set_data_here, (tensor.node, data.node), {}, after)
    m.effects.change(tensor, "abstract", after)
    m.record.renode(tensor, node)
    m.record.own(after, tensor)


def become(m: Machine, tensor: TensorValue, data: TensorValue) -> None:
    made = call_graph(m, "call_function", getattr, [data, ConstValue("data")], {})
    m.effects.log("setattr", tensor, made, name="data")
    for field in ("node", "abstract"):
        m.effects.change(tensor, field, getattr(made, field))
    m.record.own(tensor.abstract, tensor)


def is_alike(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Is the tensor after the store described as before?"""
    plain = not is_wrapper_class(type(tensor)) and not is_wrapper_class(type(data))
    return plain and (tensor.is_leaf or not tensor.requires_grad) and all(facts(tensor)[n] == fact for n, fact in enumerate(facts(data)))


def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout


def alias_of(data: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return data.detach().requires_grad_(requires_grad)
