"""Classes as objects: their attributes, calling them to make instances, and super().

A class of the user is taken as fixed, but for attributes that programs use as variables, which are read through sources.
(Class statements inside of the region: classes.py.)
"""
from __future__ import annotations

import enum
import operator
import threading
import types
import weakref
from typing import Any

import numpy as np
import torch

from firesteel.capture.meanings import CALLS, Sort, meaning
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Source
from firesteel.capture.values.attributes import MISSING, bind, is_data_descriptor, mro_lookup, written_in_class
from firesteel.capture.values.base import FixedObject, Value
from firesteel.capture.values.const import NONE, ConstValue, boolean, fresh
from firesteel.capture.values.containers import NamedTupleValue, TupleValue
from firesteel.capture.values.exceptions import ExceptionValue
from firesteel.capture.values.functions import Args, BoundMethodValue, Kwargs, call_row
from firesteel.capture.values.objects import ObjectValue
from firesteel.errors import Break
from firesteel.homes import is_library
from firesteel.table import Table

# attributes of `type` that may change
CLASS_NAMES = frozenset({"__name__", "__qualname__", "__module__", "__doc__", "__bases__", "__mro__", "__dict__", "__annotations__"})


class ClassValue(Value):
    """A class."""

    words = "class {self.cls.__qualname__}"
    always_true = True
    form = "{cls}"

    def __init__(self, cls: type, source: Source | None = None):
        self.cls, self.source = cls, source

    def python_type(self) -> type:
        return type(self.cls)

    def identity(self) -> Any:
        return self.cls

    def is_constant(self) -> bool:
        return True

    def constant(self) -> Any:
        return self.cls

    def hash_key(self, m: Machine) -> Any:
        return self.cls

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        if op not in ("==", "!=") or not isinstance(other, ClassValue):
            return None
        return boolean((self.cls is other.cls) == (op == "=="))

    def getattr(self, m: Machine, name: str) -> Value:
        written = written_in_class(m, self.cls, name)
        if written is not None:
            return written
        meta = mro_lookup(type(self.cls), name)
        if isinstance(meta, property) and is_untrusted(type(self.cls)):
            return bind(m, meta, self, type(self.cls), name)
        if meta is not MISSING and is_data_descriptor(meta):
            return m.read_attribute(self, name) if self._may_change(name) else m.static_attribute(self.cls, name)
        found = mro_lookup(self.cls, name)
        if found is MISSING:
            if isinstance(meta, types.FunctionType):
                return BoundMethodValue(m.constant_object(meta), self, name=name)
            if meta is not MISSING and is_untrusted(type(self.cls)):
                return bind(m, meta, self, type(self.cls), name)
            return self._missing(m, name)
        if is_changeable(found):
            return m.read_class_attribute(self.cls, name, found)
        return bind(m, found, None, self.cls, name)

    def _may_change(self, name: str) -> bool:
        """Is it one of those, of a class of the program's?"""
        return self.source is not None and is_untrusted(self.cls) and name in CLASS_NAMES

    def _missing(self, m: Machine, name: str) -> Value:
        fallback = mro_lookup(type(self.cls), "__getattr__")
        if isinstance(fallback, types.FunctionType) and is_untrusted(type(self.cls)):
            return m.constant_object(fallback).call(m, [self, ConstValue(name)], {})
        return m.static_attribute(self.cls, name)

    def setattr(self, m: Machine, name: str, value: Value) -> None:
        if type(self.cls).__setattr__ is not type.__setattr__ or self.source is None:
            raise Break("store", name=f"attribute {name}", value=self.describe())
        m.effects.store_attr(self, name, value)
        m.effects.change(m.effects, "writes_classes", True)

    def _by_metaclass(self, m: Machine, name: str, *args: Value) -> Value | None:
        """What a metaclass of the user's makes of an operator."""
        found = mro_lookup(type(self.cls), name)
        if not isinstance(found, types.FunctionType) or not is_untrusted(type(self.cls)):
            return None
        return m.call_now(m.constant_object(found), [self, *args], {})

    def getitem(self, m: Machine, key: Value) -> Value:
        given = self._by_metaclass(m, "__getitem__", key)
        return given if given is not None else m.constant_object(m.run_real(operator.getitem, self.cls, m.known(key)))

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        if op != "|" or not other.is_constant():        # int | None
            return None
        parts = (other.constant(), self.cls) if reflected else (self.cls, other.constant())
        return m.constant_object(m.run_real(operator.or_, *parts))

    def iterate(self, m: Machine) -> list[Value]:
        given = self._by_metaclass(m, "__iter__")
        return [fresh(m, member) for member in self.cls] if given is None else given.iterate(m)

    def iterator(self, m: Machine) -> Value:
        return m.iterate_over(TupleValue(self.iterate(m)))

    def length(self, m: Machine) -> Value:
        return self._by_metaclass(m, "__len__") or ConstValue(len(self.cls))

    def contains(self, m: Machine, item: Value) -> Value:
        given = self._by_metaclass(m, "__contains__", item)
        return boolean(item.constant() in self.cls if given is None else given.truth(m))

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        found = meaning(self.cls)
        if found.sort is Sort.HANDLED:
            return call_row(m, self.cls, found.data, args, kwargs)
        return instantiate(m, self.cls, args, kwargs)

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        given = DTYPES.get(self.cls, self.cls)
        return given, given


# what torch takes a class of Python's for
DTYPES: dict[type, Any] = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class AliasValue(FixedObject):
    """Box[int]: called, it makes an object of the class."""

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        made = m.call_now(m.constant_object(self.obj.__origin__), args, kwargs)
        plain = isinstance(made, ObjectValue) and made.obj is None and mro_lookup(made.cls, "__setattr__") is object.__setattr__
        if plain and made.python_type().__dictoffset__:
            m.effects.store_attr(made, "__orig_class__", self)
        return made


def is_untrusted(cls: type) -> bool:
    """Is it a class of the user's, whose methods are not executed while capturing?"""
    return not is_library(cls.__module__) or cls.__module__ == "__main__"


def is_changeable(attribute: Any) -> bool:
    """A class attribute that programs use as a variable, so it is read through a source and guarded."""
    if isinstance(attribute, enum.Enum):
        return False
    return isinstance(attribute, (bool, int, float, str, list, dict, set, type(None))) and not isinstance(attribute, types.FunctionType)


# kind of class -> function(machine, class, args, kwargs) -> Value or None
INSTANTIATE: Table[Any] = Table("way of making an instance", "capture/values/")


def instantiate(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value:
    """cls(*args, **kwargs)"""
    if issubclass(cls, BaseException):
        return new_exception(m, cls, args, kwargs)
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and cls.__init__ is object.__init__:
        return new_namedtuple(m, cls, args, kwargs)
    if mro_lookup(type(cls), "__call__") is dict:       # a TypedDict, also of typing_extensions
        return CALLS[dict](m, args, kwargs)
    if cls.__module__ == "torch.return_types" and len(args) == 1:
        return NamedTupleValue(cls, args[0].iterate(m))
    for special in INSTANTIATE.values():
        if (made := special(m, cls, args, kwargs)) is not None:
            return made
    if is_constant_object_type(cls):
        return fresh(m, m.run_real(cls, *map(m.known, args), **{k: m.known(v) for k, v in kwargs.items()}))
    if isinstance(caller := mro_lookup(type(cls), "__call__"), types.FunctionType):
        return m.constant_object(caller).call(m, [m.constant_object(cls), *args], kwargs)
    return new_instance(m, cls, args, kwargs)


@CALLS.row(type.__call__)
def call_type_call(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """super().__call__(*args) of a metaclass"""
    return new_instance(m, args[0].constant(), args[1:], kwargs)


def maker_of(cls: type) -> Any:
    """cls.__new__"""
    maker = mro_lookup(cls, "__new__")
    return maker.__func__ if isinstance(maker, staticmethod) else maker


def new_instance(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value:
    """type.__call__ for classes written in Python"""
    if not is_plain(cls):
        raise Break("instance", name=cls.__qualname__)
    if getattr(cls, "__abstractmethods__", None):
        raise m.raise_real(TypeError(f"Can't instantiate abstract class {cls.__name__}"))
    maker = maker_of(cls)
    if isinstance(maker, types.FunctionType):
        return new_then_init(m, cls, args, kwargs)
    if cls is types.SimpleNamespace and not args:
        made = ObjectValue(cls)
        for name, value in kwargs.items():
            m.effects.store_attr(made, name, value)
        return made
    if maker is not object.__new__:
        raise Break("instance", name=cls.__qualname__)
    return initialised(m, ObjectValue(cls), cls, args, kwargs)


def new_then_init(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value:
    """A class with a __new__ of its own."""
    made = m.call_now(m.constant_object(maker_of(cls)), [m.constant_object(cls), *args], kwargs)
    if not issubclass(made.python_type(), cls) or mro_lookup(cls, "__init__") is object.__init__:
        return made
    return initialised(m, made, cls, args, kwargs)


def initialised(m: Machine, made: Value, cls: type, args: Args, kwargs: Kwargs) -> Value:
    init = mro_lookup(cls, "__init__")
    if isinstance(init, types.FunctionType):
        return m.call_returning(m.constant_object(init), [made, *args], kwargs, made)
    if args or kwargs:
        raise m.raise_real(TypeError(f"{cls.__name__}() takes no arguments"))
    return made


def is_plain(cls: type) -> bool:
    """Only Python classes over object, whose instances are a dict or slots of their own."""
    return all(base in PLAIN_BASES or is_python_class(base) for base in cls.__mro__) and cls.__module__ != "torch._C"


PLAIN_BASES = (object, types.SimpleNamespace, threading.local)
_python_classes: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def is_python_class(cls: type) -> bool:
    """Made by a class statement: none of its methods is written in C for it."""
    known = _python_classes.get(cls)
    if known is None:
        known = _python_classes[cls] = bool(cls.__flags__ & (1 << 9)) and not any(
            isinstance(v, (types.MethodDescriptorType, types.WrapperDescriptorType)) and v.__objclass__ is cls for v in vars(cls).values())
    return known


def is_constant_object_type(cls: type) -> bool:
    from_enum = getattr(cls, "_member_map_", None)
    return from_enum is not None or issubclass(cls, np.generic) or cls in (torch.device, torch.finfo, torch.iinfo, torch.dtype)


def new_exception(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value:
    made = ExceptionValue(cls, list(args))
    init = mro_lookup(cls, "__init__")
    if isinstance(init, types.FunctionType):
        return m.call_returning(m.constant_object(init), [made, *args], kwargs, made)
    if kwargs:
        raise Break("instance", name=cls.__qualname__)
    return made


def new_namedtuple(m: Machine, cls: Any, args: Args, kwargs: Kwargs) -> Value:
    fields, defaults = cls._fields, cls._field_defaults
    home = getattr(cls.__new__, "__globals__", {}).get("__name__", "")
    by_library = any(home == f"namedtuple_{base.__name__}" for base in cls.__mro__)     # so collections calls the scope of a __new__ that it makes
    if not by_library and isinstance(cls.__new__, types.FunctionType):
        return m.constant_object(cls.__new__).call(m, [m.constant_object(cls), *args], kwargs)
    if not by_library or len(args) > len(fields) or not set(kwargs) <= set(fields[len(args):]):
        raise Break("instance", name=cls.__qualname__)
    items = list(args)
    for name in fields[len(args):]:
        if name not in kwargs and name not in defaults:
            raise Break("instance", name=cls.__qualname__)
        items.append(kwargs[name] if name in kwargs else m.constant_object(defaults[name]))
    return NamedTupleValue(cls, items)


@CALLS.row(object.__new__)
def call_object_new(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if not isinstance(args[0], ClassValue) or not is_plain(args[0].cls):
        raise Break("instance", name="object.__new__")
    return ObjectValue(args[0].cls)


class SuperValue(Value):
    """super(cls, self)"""

    words = "super of {self.cls.__qualname__}"

    def __init__(self, cls: type, owner: Value):
        self.cls, self.owner = cls, owner

    def python_type(self) -> type:
        return super

    def getattr(self, m: Machine, name: str) -> Value:
        is_class = isinstance(self.owner, ClassValue) and issubclass(self.owner.cls, self.cls)     # not so in a metaclass
        start = self.owner.constant() if is_class else self.owner.python_type()
        mro = start.__mro__
        for base in mro[mro.index(self.cls) + 1:]:
            if name in base.__dict__:
                return self._found(m, base, base.__dict__[name], name, start, is_class)
        raise m.raise_real(AttributeError(f"'super' object has no attribute {name!r}"))

    def _found(self, m: Machine, base: type, attribute: Any, name: str, start: type, is_class: bool) -> Value:
        native = name in ("__init__", "__init_subclass__") and base in (object, type)
        if native or isinstance(self.owner, ExceptionValue) and not isinstance(attribute, types.FunctionType):
            return NativeInit(self.owner, base)
        if name in ("__setattr__", "__getattribute__") and base is object:
            return BoundMethodValue(m.constant_object(attribute), self.owner, name="")
        if name == "__new__":
            return m.constant_object(attribute.__func__ if isinstance(attribute, staticmethod) else attribute)
        bound = bind(m, attribute, None if is_class else self.owner, start, name)
        if isinstance(bound, BoundMethodValue):
            bound.name = ""       # obj.name would find the method of the subclass
        return bound

    def rebuild(self, e: Emitter) -> str:
        return f"super({e.class_text(self.cls)}, {e.expr(self.owner)})"


class NativeInit(Value):
    """The __init__ of object, of type or of a builtin exception, bound."""

    def __init__(self, owner: Value, base: type):
        self.owner, self.base = owner, base

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if isinstance(self.owner, ExceptionValue):
            m.effects.change(self.owner, "args", list(args))
        elif self.base is not type and (args or kwargs or self.base is not object):
            raise Break("instance", name=f"{self.base.__qualname__}.__init__")
        return NONE


CALLS.row(super)(lambda m, args, kwargs: SuperValue(args[0].constant(), args[1]) if args else m.implicit_super())
