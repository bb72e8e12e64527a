"""Attributes as Python finds them: through a class's mro, and bound to an instance or to the class.

    bind(m, mro_lookup(cls, name), owner, cls, name)        # owner.name, for what stands in the class
"""
from __future__ import annotations

import enum
import functools
import threading
import types
from typing import Any

from firesteel.capture.class_reads import MISSING, mro_lookup
from firesteel.capture.effects import DELETED
from firesteel.capture.guards import Guard
from firesteel.capture.protocols import Machine
from firesteel.capture.source import Fixed, OwnDict
from firesteel.capture.values.base import OpaqueValue, Value
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.functions import BoundMethodValue, FunctionValue
from firesteel.errors import Break

# class attributes that programs replace at run time
REPLACEABLE = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property, functools._lru_cache_wrapper)


def written_in_class(m: Machine, cls: type, name: str) -> Value | None:
    """What the program itself has put into a class of the mro; None where that is not what a lookup finds."""
    if not m.effects.writes_classes:
        return None
    for base in cls.__mro__:
        known = m.same_object(base)
        written = m.effects.written(known, name) if known is not None else None
        if written is not None:
            return None if written is DELETED else written
        if name in vars(base):
            return None
    return None


def bind_written(value: Value, owner: Value) -> Value:
    """A class attribute that the program has written, as seen through an instance."""
    if isinstance(value, FunctionValue):
        return BoundMethodValue(value, owner, name="")
    if mro_lookup(value.python_type(), "__get__") is not MISSING:
        raise Break("attribute", name="a descriptor put into a class", value=owner.describe())
    return value


def instance_dict(obj: Any) -> dict[str, Any] | None:
    """obj.__dict__, whatever its class's __getattribute__ says; None where it has none."""
    if isinstance(obj, threading.local):
        return obj.__dict__         # this thread's
    try:
        return object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None


def is_data_descriptor(attribute: Any) -> bool:
    return any(mro_lookup(type(attribute), name) is not MISSING for name in ("__set__", "__delete__"))


def bind(m: Machine, attribute: Any, owner: Value | None, cls: type, name: str) -> Value:
    """A class attribute as seen through an instance (or through the class, with owner None)."""
    if has_own_getter(attribute):
        return call_getter(m, attribute, owner, cls, name)
    if isinstance(attribute, REPLACEABLE):
        m.guard_class_attribute(cls, name, attribute)
    if isinstance(attribute, staticmethod):
        return m.constant_object(attribute.__func__)
    if isinstance(attribute, classmethod):
        return BoundMethodValue(m.constant_object(attribute.__func__), m.constant_object(cls), name="")
    if owner is None or isinstance(attribute, types.ClassMethodDescriptorType):
        return bind_to_class(m, attribute, cls, name)
    if isinstance(attribute, (types.FunctionType, functools._lru_cache_wrapper)):
        return BoundMethodValue(m.constant_object(attribute), owner, name=name)
    if isinstance(attribute, property):
        if attribute.fget is None:
            raise m.raise_real(AttributeError(f"property {name!r} has no getter"))
        return m.constant_object(attribute.fget).call(m, [owner], {})
    if isinstance(attribute, types.MemberDescriptorType):
        return read_slot(m, owner, name)
    if isinstance(attribute, (types.WrapperDescriptorType, types.MethodDescriptorType)):
        return BoundMethodValue(m.constant_object(attribute), owner, name=name)
    if isinstance(attribute, functools.cached_property):
        return read_cached(m, attribute, owner)
    if mro_lookup(type(attribute), "__get__") is not MISSING:
        raise Break("attribute", name=name, value=owner.describe())
    return m.class_constant(cls, name, attribute)


READ_WITHOUT_EFFECT = (types.FunctionType, types.MethodDescriptorType, classmethod, staticmethod, property)


def attribute_of_opaque(m: Machine, owner: Value, name: str) -> Value | None:
    """A method of an object that is only passed around, found as Python finds it: a break is the call of one written in C, not the read too.
    None where a read may be anything else."""
    cls, own = owner.python_type(), instance_dict(owner.obj)
    found = mro_lookup(cls, name)
    if not isinstance(found, READ_WITHOUT_EFFECT) or mro_lookup(cls, "__getattribute__") is not object.__getattribute__ or name in (own or ()):
        return None
    if own is not None:
        m.guard(Guard(OwnDict(owner.source), "no_key", name))
    return bind(m, found, owner, cls, name)


def bind_to_class(m: Machine, attribute: Any, cls: type, name: str) -> Value:
    """cls.attribute"""
    if isinstance(attribute, property):
        return OpaqueValue(attribute, Fixed(attribute))
    if isinstance(attribute, types.ClassMethodDescriptorType):
        return m.constant_object(attribute.__get__(None, cls))
    getter = mro_lookup(type(attribute), "__get__")
    return m.class_constant(cls, name, attribute) if getter is MISSING and not isinstance(attribute, enum.Enum) else m.constant_object(attribute)


def has_own_getter(attribute: Any) -> bool:
    """Is it a descriptor of the user's, perhaps of a subclass of property?"""
    getter = mro_lookup(type(attribute), "__get__")
    return isinstance(getter, types.FunctionType) and getter is not functools.cached_property.__get__


def call_getter(m: Machine, attribute: Any, owner: Value | None, cls: type, name: str) -> Value:
    m.guard_descriptor(cls, name, attribute)
    getter = m.constant_object(mro_lookup(type(attribute), "__get__"))
    return getter.call(m, [m.constant_object(attribute), owner or ConstValue(None), m.constant_object(cls)], {})


def read_cached(m: Machine, attribute: functools.cached_property, owner: Value) -> Value:
    """The first read of a cached_property: computed, and stored in the instance."""
    value = m.call_now(m.constant_object(attribute.func), [owner], {})
    m.effects.store_attr(owner, str(attribute.attrname), value, "set_own")
    return value


def read_slot(m: Machine, owner: Value, name: str) -> Value:
    obj = owner.identity()
    if obj is None or not hasattr(obj, name):
        raise m.raise_real(AttributeError(name))
    return m.read_attribute(owner, name)
