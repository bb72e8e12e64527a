"""Leaves made inside of the program: torch.nn.Parameter(tensor), torch.ones(3, requires_grad=True).

Gradients arrive at a leaf after the region has ended, so it is a real tensor, and one of the graph's inputs: its source makes a new, empty
one in each call, which the graph fills.  A leaf over a tensor that came in is made over the real one.  What always holds: a leaf that is
filled shares no memory with what it was made of, so that tensor is not used again; where it is, the capture starts again with a break at
the step that made the leaf.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from firesteel.capture.source import Call, Fixed
from firesteel.capture.values.base import CannotRebuild, Value
from firesteel.capture.values.class_objects import INSTANTIATE
from firesteel.capture.values.const import NONE, ConstValue
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.number import ask
from firesteel.capture.values.tensor import TensorValue
from firesteel.capture.values.torch_calls import call_graph
from firesteel.errors import Break

if TYPE_CHECKING:
    from firesteel.capture.emit import Emitter
    from firesteel.capture.machine import Machine


@dataclass(frozen=True, eq=False)
class Form:
    """What an empty leaf is to be; one object a leaf, so that no two are taken for the same."""
    kind: Any                   # function(tensor) -> leaf
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def empty_leaf(form: Form) -> torch.Tensor:
    return form.kind(torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=form.device))


@dataclass(frozen=True, eq=False)
class Filled:
    """A leaf that was filled from `data` by the node `fill`, at the step `birth`."""
    leaf: Value
    data: torch.Tensor
    fill: torch.fx.Node
    birth: int


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def new_leaf(m: Machine, data: TensorValue, kind: Any, name: str) -> Value:
    """A new leaf with the contents of a tensor."""
    if m.inference:
        raise Break("call", name=f"{name} in inference mode")
    if data.source is not None and type(data.real) in (torch.Tensor, torch.nn.Parameter):
        return m.read(kind(data.real), Call(data.source, kind))
    inside = data.abstract
    if data.python_type() is not torch.Tensor or any(storage_of(inside) == storage_of(i.abstract) for i in m.record.inputs
                                                     if isinstance(i.abstract, torch.Tensor)):
        raise Break("call", name=f"{name} of a view of a tensor that came in")
    sizes, strides = (tuple(ask(int, n) for n in numbers) for numbers in (inside.shape, inside.stride()))      # they become constants
    form = Form(kind, sizes, strides, inside.dtype, inside.device)
    real = empty_leaf(form)
    if torch._debug_has_internal_overlap(real):
        raise Break("call", name=f"{name} of a tensor that is not dense")
    leaf: Any = m.read(real, Call(Fixed(form), empty_leaf))
    content = call_graph(m, "call_function", getattr, [leaf, ConstValue("data")], {})
    filled: Any = call_graph(m, "call_method", "copy_", [content, call_graph(m, "call_method", "detach", [data], {})], {})
    m.effects.change(m, "filled_leaves", (*m.filled_leaves, Filled(leaf, inside, filled.node, m.steps)))
    return leaf


def refuse_shared(m: Machine, e: Emitter) -> None:
    """At the end: what a leaf was made of must not have been used again, since the two share memory in eager."""
    for made in m.filled_leaves:
        nodes = m.record.nodes
        later = [a for node in nodes[nodes.index(made.fill) + 1:] for a in node.all_input_nodes]
        for node in (*later, *e.outputs):
            val = node.meta.get("val")
            if isinstance(val, torch.Tensor) and storage_of(val) == storage_of(made.data):
                raise CannotRebuild(made.leaf, made.birth)


def parameter_maker(requires_grad: bool) -> Any:
    """A new function for each parameter: one made twice of a tensor that came in has two sources."""
    return lambda tensor: torch.nn.Parameter(tensor, requires_grad)


def requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


@INSTANTIATE.row("parameter")
def new_parameter(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value | None:
    if cls is not torch.nn.Parameter:
        return None
    given = dict(zip(("data", "requires_grad"), args)) | kwargs
    data = m.look(given.get("data", NONE))
    if not isinstance(data, TensorValue):
        raise Break("call", name="Parameter")
    wanted = m.truth_now(given["requires_grad"]) if "requires_grad" in given else True
    return new_leaf(m, data, parameter_maker(wanted), "Parameter")
