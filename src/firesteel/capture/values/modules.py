"""nn.Module as a Value: parameters, buffers and children through their tables, calls through `forward`.

A module is guarded by its type and by what is read of it, never by identity: layers of the same make share an Entry.
Calling one without hooks calls its forward; with hooks, torch's own `_call_impl` is inlined, so eager's order holds.
"""
from __future__ import annotations

import collections
import types
from typing import Any

import torch
import torch.nn.modules.module as module_internals

from firesteel.capture import marks
from firesteel.capture.effects import DELETED
from firesteel.capture.guards import Guard
from firesteel.capture.protocols import Machine
from firesteel.capture.source import MODULE_HOOKS, MODULE_TABLES, OwnDict, Source
from firesteel.capture.values.attributes import MISSING, bind, is_data_descriptor, mro_lookup
from firesteel.capture.values.base import ObjectKey, Value
from firesteel.capture.values.class_objects import INSTANTIATE, maker_of
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.functions import Args, BoundMethodValue, Kwargs
from firesteel.capture.values.hooks import FLAG_TABLES, has_hooks_from_here, hook_table
from firesteel.capture.values.objects import ObjectValue
from firesteel.errors import Break

TABLES_OF_HOOKS = frozenset({*MODULE_HOOKS, *FLAG_TABLES})


class ModuleValue(ObjectValue):
    """A module of the user's."""

    words = "module {self.cls.__qualname__}"

    def __init__(self, obj: torch.nn.Module, source: Source):
        super().__init__(type(obj), obj, source)

    def hash_key(self, m: Machine) -> Any:
        return ObjectKey(self.obj)

    def own_attribute(self, m: Machine, name: str) -> Value | None:
        written = m.effects.written(self, name)
        if written is not None:
            return None if written is DELETED else m.look(written)
        own = self.obj.__dict__
        if name in TABLES_OF_HOOKS and name in own:
            return hook_table(m, self.obj, self.source, name)
        return m.read_own(self, name, own[name]) if name in own else None

    def _missing(self, m: Machine, name: str) -> Value:
        reader = mro_lookup(self.cls, "__getattr__")
        m.guard_class_attribute(self.cls, "__getattr__", reader)
        return self.from_tables(m, name) if is_of_torch_modules(reader) else super()._missing(m, name)

    def from_tables(self, m: Machine, name: str) -> Value:
        """torch.nn.Module.__getattr__"""
        for table in MODULE_TABLES:
            entries = self.obj.__dict__.get(table)
            if entries is None:
                continue
            touched = m.same_object(entries)        # the program reads, and may have changed, the table itself
            if touched is None and type(entries) not in (dict, collections.OrderedDict):
                touched = self.own_attribute(m, table)          # a dict of the user's kind
            if touched is not None:
                if touched.contains(m, ConstValue(name)).truth(m):
                    return touched.getitem(m, ConstValue(name))
            elif name in entries:
                return m.read_table(self, table, name, entries[name])
        if m.effects.written(self, name) is None:
            m.guard_no_attribute(self, name)
        raise m.raise_real(AttributeError(f"{self.cls.__name__!r} object has no attribute {name!r}"))

    def setattr(self, m: Machine, name: str, value: Value) -> Value | None:
        if not is_of_torch_modules(mro_lookup(self.cls, "__setattr__")):
            return super().setattr(m, name, value)
        special = issubclass(value.python_type(), (torch.nn.Module, torch.nn.Parameter))
        if is_data_descriptor(mro_lookup(self.cls, name)) and not special:
            return self.plain_setattr(m, name, value)
        touched = any(m.same_object(self.obj.__dict__.get(table)) is not None for table in MODULE_TABLES)
        if special or touched or name in self.obj._parameters or name in self.obj._modules:
            return super().setattr(m, name, value)      # torch's own method decides
        if name in self.obj._buffers:
            self._set_buffer(m, name, value)
        else:
            m.effects.store_attr(self, name, value)
        return None

    def _set_buffer(self, m: Machine, name: str, value: Value) -> None:
        if not issubclass(value.python_type(), (torch.Tensor, type(None))) or module_internals._global_buffer_registration_hooks:
            raise Break("store", name=f"buffer {name}", value=self.describe())
        self.own_attribute(m, "_buffers").setitem(m, ConstValue(name), value)       # type: ignore[union-attr]  # every module has it

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if marks.is_module_of_the_peer(self.cls):
            return self.from_tables(m, "_orig_mod").call(m, args, kwargs)
        for name in ("__call__", "_call_impl"):
            m.guard_class_attribute(torch.nn.Module, name, vars(torch.nn.Module)[name])
        if not all(is_of_torch_modules(mro_lookup(self.cls, name)) for name in ("__call__", "_call_impl")):
            return super().call(m, args, kwargs)
        if has_legacy_hooks(self.obj):
            raise Break("hook", name=f"{self.describe()} with hooks of register_backward_hook")
        hooked = any(getattr(self.obj, table) for table in MODULE_HOOKS) or has_hooks_from_here(m, self.obj)
        if hooked or module_internals._has_any_global_hook():
            implementation = BoundMethodValue(m.constant_object(torch.nn.Module._call_impl), self, name="_call_impl")
            return m.call_in_module(self, implementation, args, kwargs)
        m.guard(Guard(OwnDict(self.source), "no_hooks"))
        return m.call_in_module(self, self.forward(m), args, kwargs)

    def forward(self, m: Machine) -> Value:
        own = self.own_attribute(m, "forward")
        if own is not None:
            return own
        m.guard_not_own(self, "forward")
        found = mro_lookup(self.cls, "forward")
        return bind(m, found, self, self.cls, "forward")

    def method(self, m: Machine, name: str) -> Value | None:
        found = mro_lookup(self.cls, name)
        if found is MISSING or isinstance(found, types.WrapperDescriptorType):
            return None
        return bind(m, found, self, self.cls, name)

    def truth(self, m: Machine) -> bool:
        if mro_lookup(self.cls, "__len__") is MISSING and mro_lookup(self.cls, "__bool__") is MISSING:
            return True
        return super().truth(m)


def is_of_torch_modules(method: Any) -> bool:
    """Is it what torch.nn.Module came with?  A program may have put its own there."""
    return isinstance(method, types.FunctionType) and method.__globals__ is vars(module_internals)


def has_legacy_hooks(module: torch.nn.Module) -> bool:
    """Backward hooks of the old kind sit on whatever node made the output."""
    own = module._backward_hooks and module._is_full_backward_hook is False
    return bool(own or module_internals._global_backward_hooks and module_internals._global_is_full_backward_hook is False)


@INSTANTIATE.row("module")
def new_module(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value | None:
    """A module made inside (a loss, a layer).  One whose __init__ breaks is made for real as a whole."""
    init = mro_lookup(cls, "__init__")
    if not issubclass(cls, torch.nn.Module) or maker_of(cls) is not object.__new__ or not isinstance(init, types.FunctionType):
        return None
    made = ObjectValue(cls)
    m.call_now(m.constant_object(init), [made, *args], kwargs)
    return made
