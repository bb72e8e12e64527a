"""Leaves made inside of the program: torch.nn.Parameter(tensor), torch.ones(3, requires_grad=True), tensor.requires_grad_().

1. Gradients may arrive at a leaf after the region has ended, so it is a real tensor, and one of the graph's inputs: its source makes a new,
   empty one in each call, which the graph fills.  A leaf over a tensor that came in is made over the real one.  A leaf that is filled shares
   no memory with what it was made of, so that tensor is not used again; where it is, the capture starts again with a break at the step that
   made the leaf.
2. `requires_grad_` is a node, and a leaf that it makes of an intermediate tensor is one in the graph only: the program takes its gradients itself.
   Where such a leaf leaves the region after all, the capture starts again, and the same step makes one as in rule 1.
3. On a tensor that came in it is an effect too.  Where a result could still be differentiated with respect to a tensor that came in without a
   gradient, it happens before the graph is called; if the tensor was used before, the capture starts again with a break at that step.
"""
from __future__ import annotations

from typing import Any

import torch

from firesteel.autograd.backwards import gradients, history_of, is_spent
from firesteel.capture.effects import REPLAY
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Call, Fixed
from firesteel.capture.values.base import CannotRebuild, Value
from firesteel.capture.values.class_objects import INSTANTIATE
from firesteel.capture.values.const import NONE, ConstValue
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.number import ask
from firesteel.capture.values.tensor import TENSOR_METHODS, TENSOR_STORES, TensorValue
from firesteel.capture.values.torch_calls import call_graph
from firesteel.errors import Break
from firesteel.records import dataclass
from firesteel.torchstate import is_tracked


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


def new_leaf(m: Machine, data: TensorValue, kind: Any, name: str) -> Any:
    """A new leaf with the contents of a tensor."""
    if m.modes.inference:
        raise Break("leaf", name=f"{name} in inference mode")
    if data.source is not None and type(data.real) in (torch.Tensor, torch.nn.Parameter):
        return m.read(kind(data.real), Call(data.source, kind))
    inside = data.abstract
    if data.python_type() is not torch.Tensor:
        raise Break("leaf", name=f"{name} of another kind of tensor")
    sizes, strides = (tuple(ask(int, n) for n in numbers) for numbers in (inside.shape, inside.stride()))      # they become constants
    for given in m.record.inputs:
        if isinstance(given.abstract, torch.Tensor) and m.world.memory(inside) == m.world.memory(given.abstract):
            return leaf_over(m, given, inside, sizes, strides, kind, name)
    form = Form(kind, sizes, strides, inside.dtype, inside.device)
    real = empty_leaf(form)
    if torch._debug_has_internal_overlap(real):
        raise Break("leaf", name=f"{name} of a tensor that is not dense")
    leaf: Any = m.read(real, Call(Fixed(form), empty_leaf))
    content = call_graph(m, "call_function", getattr, [leaf, ConstValue("data")], {})
    filled: Any = call_graph(m, "call_method", "copy_", [content, call_graph(m, "call_method", "detach", [data], {})], {})
    m.effects.change(m.leaves, "filled", (*m.leaves.filled, Filled(leaf, inside, filled.node, m.steps)))
    return leaf


def leaf_over(m: Machine, given: Any, view: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], kind: Any, name: str) -> Any:
    """A leaf in the memory of a tensor that came in."""
    if type(given.real) not in (torch.Tensor, torch.nn.Parameter) or view.dtype != given.real.dtype or given.abstract._version:
        raise Break("leaf", name=f"{name} of a view of a tensor that came in")
    shift, flips = ask(int, view.storage_offset() - given.abstract.storage_offset()), getattr(view, "bits", ())

    def make(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().as_strided(sizes, strides, tensor.storage_offset() + shift)
        for flip in flips:      # its conjugate or negative bit, which what came in does not have
            made = flip(made)
        return kind(made.detach())
    return m.read(make(given.real), Call(given.source, make))


def refuse_shared(m: Machine, e: Emitter) -> None:
    """At the end: what a leaf was made of must not have been used again, since the two share memory in eager."""
    for made in m.leaves.filled:
        nodes = m.record.nodes
        later = [a for node in nodes[nodes.index(made.fill) + 1:] for a in node.all_input_nodes]
        for node in (*later, *e.outputs):
            val = node.meta.get("val")
            if isinstance(val, torch.Tensor) and m.world.memory(val) == m.world.memory(made.data):
                raise CannotRebuild(made.leaf, made.birth)


# -- requires_grad ------------------------------------------------------------------------------------------------------
class LeavesRegion(CannotRebuild):
    """A leaf of rule 2 is needed outside: the step that made it makes a real one instead."""


@dataclass(frozen=True, eq=False)
class Turned:
    """A tensor whose requires_grad was set at the step `birth`."""
    tensor: TensorValue
    before: bool
    birth: int
    node: torch.fx.Node


def set_requires_grad(m: Machine, tensor: TensorValue, wanted: bool) -> Value:
    """Rules 2 and 3."""
    before = tensor.abstract.requires_grad
    if wanted == before:
        return tensor
    if not tensor.abstract.is_leaf:
        raise Break("abstract_failure", name="Tensor.requires_grad_", text="only of a leaf it can be changed")
    if m.modes.inference or tensor.inference or tensor.python_type() not in (torch.Tensor, torch.nn.Parameter):
        raise Break("leaf", name="Tensor.requires_grad_ of such a tensor")
    if any(made._base is tensor.abstract for made, _ in m.record.tensors.values()):     # torch has rules of its own for these
        raise Break("leaf", name="Tensor.requires_grad_ of a tensor that has views")
    if m.steps in m.leaves.real:
        return become_leaf(m, tensor)
    m.effects.on_undo(tensor.abstract.requires_grad_, before)
    made: Any = call_graph(m, "call_method", "requires_grad_", [tensor, ConstValue(wanted)], {})
    m.effects.change(m.leaves, "turned", (*m.leaves.turned, Turned(tensor, before, m.steps, made.node)))
    m.effects.log("requires_grad", tensor, ConstValue(wanted))
    return tensor


REPLAY.add("requires_grad", lambda e, t, d, n: f"{t}.requires_grad_({d[0]})")


def become_leaf(m: Machine, tensor: TensorValue) -> Value:
    """The tensor is a real leaf from now on."""
    leaf = new_leaf(m, tensor, requiring_grad, "Tensor.requires_grad_")
    for name in ("node", "abstract", "source", "real"):
        m.effects.change(tensor, name, getattr(leaf, name))
    m.record.own(leaf.abstract, tensor)
    return tensor


@TENSOR_METHODS.row("requires_grad_")
def method_requires_grad_(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    given = [*args, *kwargs.values()]
    return set_requires_grad(m, tensor, m.look(given[0]).truth(m) if given else True)


@TENSOR_STORES.row("requires_grad")
def store_requires_grad(m: Machine, tensor: TensorValue, value: Value) -> None:
    set_requires_grad(m, tensor, value.truth(m))


@TENSOR_METHODS.row("detach_")
def method_detach_(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    if tensor.source is not None and tensor.abstract.requires_grad:
        raise Break("leaf", name="Tensor.detach_ of a tensor that came in")
    return call_graph(m, "call_method", "detach_", [tensor], {})


def refuse_turned(m: Machine, e: Emitter) -> None:
    """At the end: rules 2 and 3."""
    if not m.leaves.turned:
        return
    inside = {id(made.tensor.abstract): made for made in m.leaves.turned if made.tensor.source is None}
    outside = {id(made.tensor.abstract): made for made in m.leaves.turned if made.tensor.source is not None and not made.before}
    for node in e.outputs:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.requires_grad:
            if id(val) in inside:
                raise LeavesRegion(inside[id(val)].tensor, inside[id(val)].birth)
            reached = [outside[id(leaf)] for leaf in history_of([val]).leaves if id(leaf) in outside] if outside and is_tracked(val) else []
            if reached and not is_used_up(m, val):
                for made in reached:
                    turn_at_once(m, e, made)


def turn_at_once(m: Machine, e: Emitter, made: Turned) -> None:
    """Rule 3: as nobody has used the tensor before, it may have required a gradient from the start."""
    if made in m.leaves.at_once:
        return
    placeholder = next(given.node for given in m.record.inputs if given.abstract is made.tensor.abstract)
    used = min(map(m.record.nodes.index, placeholder.users))
    if m.record.nodes[used] is not made.node or sum(other.tensor is made.tensor for other in m.leaves.turned) > 1:
        raise CannotRebuild(made.tensor, made.birth)
    e.before.append(f"{e.expr(made.tensor)}.requires_grad_()")
    m.leaves.at_once.append(made)


def is_used_up(m: Machine, result: torch.Tensor) -> bool:
    """Would torch refuse a backward from here?"""
    try:
        with m.world.active():
            gradients((result,), (torch.ones_like(result),), history_of([result]).leaves, True, False)
    except RuntimeError as error:
        if not is_spent(error):
            raise
        return True
    return False


def put_back_flags(m: Machine) -> None:
    """The tensors that came in are again as they came: so a backend is to see them."""
    for made in reversed(m.leaves.turned):
        if made.tensor.source is not None and made not in m.leaves.at_once:
            made.tensor.abstract.requires_grad_(made.before)


def requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


@INSTANTIATE.row("parameter")
def new_parameter(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value | None:
    if cls is not torch.nn.Parameter:
        return None
    given = dict(zip(("data", "requires_grad"), args)) | kwargs
    data = m.look(given.get("data", NONE))
    if not isinstance(data, TensorValue):
        raise Break("leaf", name="Parameter")
    wanted = given["requires_grad"].truth(m) if "requires_grad" in given else True
    # a new function for each parameter: one made twice of a tensor that came in has two sources
    return new_leaf(m, data, lambda tensor: torch.nn.Parameter(tensor, wanted), "Parameter")
