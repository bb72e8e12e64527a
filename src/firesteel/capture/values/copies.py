"""copy.copy and copy.deepcopy on Values: structure is copied, what cannot change is shared.

A class's own `__copy__` / `__deepcopy__` runs; objects of Python classes get their attributes copied; tensors without gradients are
cloned (shared by copy.copy); tensors with gradients, modules and anything unknown break, so that the real copy is made.  An
attribute nobody has looked at yet and that cannot change stays unread: only its type is guarded.
"""
from __future__ import annotations

import copy
import types
from collections.abc import Callable

import torch

from firesteel.capture.guards import Guard
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Machine
from firesteel.capture.values.attributes import MISSING, mro_lookup
from firesteel.capture.values.base import FixedObject, LazyValue, Value
from firesteel.capture.values.class_objects import ClassValue
from firesteel.capture.values.const import ConstValue, is_constant_object
from firesteel.capture.values.containers import ListValue, NamedTupleValue, SizeValue, SliceValue, TupleValue
from firesteel.capture.values.exceptions import ExceptionValue
from firesteel.capture.values.functions import Args, BuiltinValue, FunctionValue, Kwargs
from firesteel.capture.values.mappings import DictValue, SetValue
from firesteel.capture.values.modules import ModuleValue
from firesteel.capture.values.natives import IMMUTABLE, NativeObject
from firesteel.capture.values.number import SymNumber
from firesteel.capture.values.objects import InstanceDict, ObjectValue
from firesteel.capture.values.python_modules import PythonModuleValue
from firesteel.capture.values.tensor import TensorValue
from firesteel.capture.values.torch_calls import TorchFunctionValue, call_graph
from firesteel.errors import Break

ATOMS = (ConstValue, SymNumber, ClassValue, FunctionValue, BuiltinValue, TorchFunctionValue, FixedObject, SizeValue, PythonModuleValue)
PICKLING = {"__reduce_ex__": object.__reduce_ex__, "__reduce__": object.__reduce__, "__getstate__": getattr(object, "__getstate__", MISSING),
            "__setstate__": MISSING}
Each = Callable[[Value], Value]


class ObjectCopier:
    """One call of deepcopy: the same object is copied once."""

    def __init__(self, m: Machine):
        self.m = m
        self.done: dict[int, tuple[Value, Value]] = {}

    def __call__(self, value: Value) -> Value:
        if type(value) is LazyValue and is_constant_object(value.obj):
            self.m.guard(Guard(value.source, "type", type(value.obj)))
            return value
        value = self.m.look(value)
        if isinstance(value, ATOMS):
            return value
        known = self.done.get(id(value))
        if known is None and isinstance(value, TensorValue):
            return self._remember(value, call_graph(self.m, "call_method", "clone", [copied(self.m, value, self, self.done)], {}))
        return known[1] if known is not None else self._remember(value, copied(self.m, value, self, self.done))

    def _remember(self, value: Value, made: Value) -> Value:
        self.done[id(value)] = (value, made)
        return made


def copied(m: Machine, value: Value, each: Each, done: dict[int, tuple[Value, Value]]) -> Value:
    """A copy whose parts are `each` of its parts; `done` is called for an object before its parts are copied."""
    if isinstance(value, ObjectValue) and not isinstance(value, (ModuleValue, ExceptionValue)):
        return copied_object(m, value, each, done)
    if isinstance(value, InstanceDict):
        return DictValue({k: (key, each(item)) for k, (key, item) in value.know_all(m).items()})
    if isinstance(value, DictValue):
        made = DictValue({}, cls=value.cls, factory=value.factory)
        done[id(value)] = (value, made)
        made.entries.update({k: (key, each(item)) for k, (key, item) in value.know_all(m).items()})
        return made
    if isinstance(value, ListValue):
        new = ListValue([])
        done[id(value)] = (value, new)
        new.items.extend(each(item) for item in value.items)
        return new
    if isinstance(value, NamedTupleValue):
        return NamedTupleValue(value.cls, [each(item) for item in value.items])
    if isinstance(value, TupleValue):
        return TupleValue([each(item) for item in value.items])
    if isinstance(value, SetValue):
        return SetValue(dict(value.entries), cls=value.cls)
    if isinstance(value, SliceValue):
        return value
    if isinstance(value, TensorValue) and value.python_type() is torch.Tensor and not value.abstract.requires_grad:
        return call_graph(m, "call_method", "detach", [value], {})      # shares the data, as copy.copy does
    raise Break("copy", name=value.describe())


def copied_object(m: Machine, value: ObjectValue, each: Each, done: dict[int, tuple[Value, Value]]) -> Value:
    for name, plain in PICKLING.items():
        if mro_lookup(value.cls, name) is not plain:
            raise Break("copy", name=f"{value.describe()} has {name}")
    if any(isinstance(vars(c).get(n), types.MemberDescriptorType) for c in value.cls.__mro__ for n in vars(c) if c is not object):
        raise Break("copy", name=f"{value.describe()} has slots")
    if isinstance(value, NativeObject):
        if value.base in IMMUTABLE:
            raise Break("copy", name=value.describe())
        made: ObjectValue = NativeObject(value.cls, value.base, copied(m, value.payload, each, {}))
    else:
        made = ObjectValue(value.cls)
    done[id(value)] = (value, made)
    for name, attribute in InstanceDict(value).unread(m).items():
        m.effects.store_attr(made, name, each(attribute))
    return made


def own_method(m: Machine, value: Value, name: str) -> Value | None:
    if not isinstance(value, ObjectValue) or not isinstance(mro_lookup(value.cls, name), types.FunctionType):
        return None
    return value.method(m, name)


@CALLS.row(copy.copy)
def call_copy(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    value = args[0]
    method = own_method(m, value, "__copy__")
    if method is not None:
        return method.call(m, [], {})
    if isinstance(value, ATOMS) or type(value) is TupleValue:
        return value
    return copied(m, value, lambda item: item, {})


@CALLS.row(copy.deepcopy)
def call_deepcopy(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if len(args) > 1 or kwargs:
        raise Break("copy", name="deepcopy with a memo")
    value = args[0]
    method = own_method(m, value, "__deepcopy__")
    if method is not None:
        return method.call(m, [DictValue({})], {})
    return ObjectCopier(m)(value)
