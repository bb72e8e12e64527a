"""Tensor subclasses that wrap tensors (`__tensor_flatten__`): in the graph they are tensors like others, the class's own dispatch runs inside.

A wrapper that comes in is one placeholder; its abstract value is an object of the same class over abstract parts.  What is guarded is the wrapper's
metadata, its context, and the metadata of its parts; sizes are constants.  A `__torch_function__` of the class's own runs inside too, as its dispatch
does: when the program is compiled, and not in later calls.

    TwoTensor(x.sin(), y)           # a node
    t.a                             # a node: getattr(t, "a")
"""
from __future__ import annotations

import types
from typing import Any

import torch

from firesteel.capture.guards import KINDS, RELATION, Guard, Kind, TensorFacts
from firesteel.capture.protocols import Machine
from firesteel.capture.source import Source
from firesteel.capture.values.base import Value
from firesteel.capture.values.class_objects import INSTANTIATE
from firesteel.capture.values.const import ConstValue, is_constant_object
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.objects import MISSING, bind
from firesteel.capture.values.torch_calls import call_graph
from firesteel.layouts import is_layout


def is_wrapper_class(cls: type) -> bool:
    return hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


@INSTANTIATE.row("wrapper of tensors")
def new_wrapper(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value | None:
    if not issubclass(cls, torch.Tensor) or not is_wrapper_class(cls) or any(is_layout(m.look(value).identity()) for value in args):
        return None
    return call_graph(m, "call_function", cls, args, kwargs)


def wrapper_attribute(m: Machine, owner: Any, name: str) -> Value | None:
    """What the class adds to a tensor: parts, methods, properties, and constants of the object."""
    made = owner.abstract
    if name in made.__tensor_flatten__()[0]:
        part = getattr(made, name)      # the mesh of a DTensor is guarded by identity
        return call_graph(m, "call_function", getattr, [owner, ConstValue(name)], {}) if isinstance(part, torch.Tensor) else m.constant_object(part)
    added = type(made).__mro__[:type(made).__mro__.index(torch.Tensor)]
    attribute = next((vars(cls)[name] for cls in added if name in vars(cls)), MISSING)
    if isinstance(attribute, (types.FunctionType, property, classmethod, staticmethod)):
        return bind(m, attribute, owner, type(made), name)
    found = getattr(made, name) if isinstance(attribute, types.MemberDescriptorType) else vars(made).get(name, attribute)
    if found is MISSING or isinstance(found, torch.Tensor):
        return None
    return ConstValue(found) if is_constant_object(found) else m.constant_object(found)     # the guards on how it is made determine it


def guard_parts(m: Machine, tensor: torch.Tensor, source: Source) -> None:
    names, context = tensor.__tensor_flatten__()        # type: ignore[attr-defined]
    m.guard(Guard(source, "wrapper", (tuple(names), context)))
    for name in names:
        part = getattr(tensor, name)
        if not isinstance(part, torch.Tensor):
            m.guard(Guard(source.attr(name), "identity", part))
            continue
        m.guard(Guard(source.attr(name), "part", TensorFacts.of(part)))
        if is_wrapper_class(type(part)):
            guard_parts(m, part, source.attr(name))


def same_make(tensor: Any, make: tuple[tuple[str, ...], Any]) -> bool:
    names, context = tensor.__tensor_flatten__()
    return (tuple(names), context) == make


KINDS.add("wrapper", Kind(RELATION, lambda x, data, w: f"{w.bind(same_make, 'same_make')}({x}, {w.bind(data, 'make')})",
                          lambda name, data, now: f"{name} is made in another way than {data!r}"))
KINDS.add("part", Kind(RELATION, lambda x, data, w: data.write(x, w), lambda name, data, now: data.difference(name, now), uses=7))
