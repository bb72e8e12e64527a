"""Instances of user classes, and their `__dict__`.

Attribute access follows Python's own algorithm: data descriptors of the class, the instance's dict, other class attributes,
`__getattr__`.  What classes were asked for is guarded by class (class_reads.py); instances are read through sources and guarded by what is read.
"""
from __future__ import annotations

import threading
import types
from typing import Any

from firesteel.capture.effects import DELETED
from firesteel.capture.meanings import CALLS
from firesteel.capture.polyfills import items_by_index
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Source
from firesteel.capture.values.attributes import (
    MISSING,
    bind,
    bind_written,
    instance_dict,
    is_data_descriptor,
    mro_lookup,
    written_in_class,
)
from firesteel.capture.values.base import ObjectKey, Undecided, UserRaise, Value
from firesteel.capture.values.const import NONE, ConstValue, boolean
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.mappings import DictValue
from firesteel.errors import Break

BINARY_METHODS = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "@": "matmul", "**": "pow",
                  "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift"}
COMPARE_METHODS = {"<": "__lt__", "<=": "__le__", "==": "__eq__", "!=": "__ne__", ">": "__gt__", ">=": "__ge__"}
UNARY_METHODS = {"-": "__neg__", "+": "__pos__", "~": "__invert__"}
# methods that do what object's do
GENERIC = {name: tuple(getattr(cls, name) for cls in (object, types.SimpleNamespace, threading.local)) for name in ("__setattr__", "__delattr__")}


def is_asked_first(right: Value, left: Value, name: str) -> bool:
    """Python asks the right operand first where its class is a subclass of the other's with a method of its own."""
    if not right.asks_its_class or left.cls is right.cls and left.cls is not None:
        return False
    own, other = right.python_type(), left.python_type()
    return own is not other and issubclass(own, other) and getattr(own, name, None) is not getattr(other, name, None)


class ObjectValue(Value):
    """An instance of a class written in Python; the user's (with a source) or one made inside."""

    words = "{self.cls.__qualname__} object"
    asks_its_class = True

    def __init__(self, cls: type, obj: Any = None, source: Source | None = None):
        self.cls, self.obj, self.source = cls, obj, source

    # -- attributes ------------------------------------------------------------------------------------------------
    def getattr(self, m: Machine, name: str) -> Value:
        custom = mro_lookup(self.cls, "__getattribute__")
        if isinstance(custom, types.FunctionType):
            return self._custom_getattr(m, m.constant_object(custom), name)
        found = self.plain_getattr(m, name)
        return self._missing(m, name) if found is None else found

    def _custom_getattr(self, m: Machine, custom: Value, name: str) -> Value:
        """The class's own __getattribute__, and its __getattr__ where that finds nothing."""
        if mro_lookup(self.cls, "__getattr__") is MISSING:
            return custom.call(m, [self, ConstValue(name)], {})
        try:
            return m.call_now(custom, [self, ConstValue(name)], {})
        except UserRaise as raised:
            if issubclass(raised.value.python_type(), AttributeError):
                return self._missing(m, name)
            raise

    def plain_getattr(self, m: Machine, name: str) -> Value | None:
        """object.__getattribute__; None where it finds nothing."""
        if (written := written_in_class(m, self.cls, name)) is not None:
            return self.own_attribute(m, name) or bind_written(written, self)
        attribute = mro_lookup(self.cls, name)
        if attribute is not MISSING and is_data_descriptor(attribute):
            written = m.effects.written(self, name)
            if isinstance(attribute, types.MemberDescriptorType) and written is not None and written is not DELETED:
                return written
            return self._special(m, name) or bind(m, attribute, self, self.cls, name)
        found = self.own_attribute(m, name)
        if found is not None:
            return found
        if attribute is not MISSING:
            m.guard_not_own(self, name)
            return bind(m, attribute, self, self.cls, name)
        return self._special(m, name)       # threading.local has a __dict__ without a descriptor

    def _special(self, m: Machine, name: str) -> Value | None:
        if name == "__dict__" and (self.obj is None or instance_dict(self.obj) is not None):
            return InstanceDict(self)
        return m.constant_object(self.cls) if name == "__class__" else None

    def own_attribute(self, m: Machine, name: str) -> Value | None:
        """From the instance's own dict, what was stored here included."""
        if not isinstance(mro_lookup(self.cls, "__getattribute__"), (types.FunctionType, types.WrapperDescriptorType)):
            raise Break("attribute", name=name, value=self.describe())
        written = m.effects.written(self, name)
        if written is not None:
            return None if written is DELETED else m.look(written)
        own = instance_dict(self.obj) if self.obj is not None else None
        return m.read_own(self, name, own[name]) if own is not None and name in own else None

    def _missing(self, m: Machine, name: str) -> Value:
        fallback = mro_lookup(self.cls, "__getattr__")
        self.guard_missing(m, name)
        if isinstance(fallback, types.FunctionType):
            return m.constant_object(fallback).call(m, [self, ConstValue(name)], {})
        raise m.raise_real(AttributeError(f"{self.cls.__name__!r} object has no attribute {name!r}"))

    def guard_missing(self, m: Machine, name: str) -> None:
        if self.obj is not None and self.source is not None and m.effects.written(self, name) is None:
            m.guard_no_attribute(self, name)

    def setattr(self, m: Machine, name: str, value: Value) -> Value | None:
        setter = mro_lookup(self.cls, "__setattr__")
        if isinstance(setter, types.FunctionType):
            return m.constant_object(setter).call(m, [self, ConstValue(name), value], {})
        if setter not in GENERIC["__setattr__"]:
            raise Break("store", name=f"attribute {name}", value=self.describe())
        return self.plain_setattr(m, name, value)

    def plain_setattr(self, m: Machine, name: str, value: Value) -> Value | None:
        """object.__setattr__"""
        attribute = mro_lookup(self.cls, name)
        setter = mro_lookup(type(attribute), "__set__") if attribute is not MISSING else MISSING
        if isinstance(setter, types.FunctionType):
            return m.constant_object(setter).call(m, [m.constant_object(attribute), self, value], {})
        if isinstance(attribute, property):
            if attribute.fset is None:
                raise m.raise_real(AttributeError(f"property {name!r} of {self.cls.__name__!r} object has no setter"))
            return m.constant_object(attribute.fset).call(m, [self, value], {})
        if attribute is not MISSING and is_data_descriptor(attribute) and not isinstance(attribute, types.MemberDescriptorType):
            raise Break("store", name=f"attribute {name}", value=self.describe())
        slotted = mro_lookup(self.cls, "__dict__") is MISSING and not issubclass(self.cls, threading.local)
        if slotted and not isinstance(attribute, types.MemberDescriptorType):
            raise m.raise_real(AttributeError(f"{self.cls.__name__!r} object has no attribute {name!r}"))
        kind = "setattr" if mro_lookup(self.cls, "__setattr__") in GENERIC["__setattr__"] else "set_plain"
        m.effects.store_attr(self, name, value, kind)
        return None

    def delattr(self, m: Machine, name: str) -> Value | None:
        deleter = mro_lookup(self.cls, "__delattr__")
        if isinstance(deleter, types.FunctionType):
            return m.constant_object(deleter).call(m, [self, ConstValue(name)], {})
        if deleter not in GENERIC["__delattr__"]:
            raise Break("store", name=f"deletion of {name}", value=self.describe())
        return self.plain_delattr(m, name)

    def plain_delattr(self, m: Machine, name: str) -> Value | None:
        """object.__delattr__"""
        attribute = mro_lookup(self.cls, name)
        deleter = mro_lookup(type(attribute), "__delete__") if attribute is not MISSING else MISSING
        if isinstance(deleter, types.FunctionType):
            return m.constant_object(deleter).call(m, [m.constant_object(attribute), self], {})
        if isinstance(attribute, property) and attribute.fdel is not None:
            return m.constant_object(attribute.fdel).call(m, [self], {})
        if attribute is not MISSING and is_data_descriptor(attribute):
            raise Break("store", name=f"deletion of {name}", value=self.describe())
        if self.own_attribute(m, name) is None:
            self.guard_missing(m, name)
            raise m.raise_real(AttributeError(f"{self.cls.__name__!r} object has no attribute {name!r}"))
        m.effects.delete_attr(self, name)
        return None

    # -- operators through the class's methods ---------------------------------------------------------------------
    def method(self, m: Machine, name: str) -> Value | None:
        """A special method, bound; None where the class has none (or only object's)."""
        found = mro_lookup(self.cls, name)
        if found is MISSING or found is None or isinstance(found, (types.WrapperDescriptorType, types.MethodDescriptorType)):
            return None
        return bind(m, found, self, self.cls, name)

    def _operate(self, m: Machine, name: str, *args: Value) -> Value | None:
        method = self.method(m, name)
        if method is None:
            return None
        result = m.call_now(method, list(args), {})
        return None if result.is_constant() and result.constant() is NotImplemented else result

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        return self._operate(m, f"__{'r' if reflected else ''}{BINARY_METHODS[op]}__", other)

    def inplace(self, m: Machine, op: str, other: Value) -> Value | None:
        return self._operate(m, f"__i{BINARY_METHODS[op]}__", other)

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        result = self._operate(m, COMPARE_METHODS[op], other)
        if result is None and mro_lookup(self.cls, "__eq__") is types.SimpleNamespace.__eq__:
            raise Break("operator", name=op, value=self.describe())
        if result is None and op == "!=":
            equal = self._operate(m, "__eq__", other)
            return boolean(not equal.truth(m)) if equal is not None else None
        return result

    def unary(self, m: Machine, op: str) -> Value:
        if op == "not":
            return boolean(not self.truth(m))
        result = self._operate(m, UNARY_METHODS[op])
        return result if result is not None else super().unary(m, op)

    def truth(self, m: Machine) -> bool:
        for name, kind in (("__bool__", bool), ("__len__", int)):
            result = self._operate(m, name)
            if result is not None:
                given = result.python_type()
                if not issubclass(given, kind):
                    raise m.raise_real(TypeError(f"{name} should return {kind.__name__}, returned {given.__name__}"))
                return result.truth(m)
        self._refuse_builtin_base("bool()")
        return True

    def _refuse_builtin_base(self, what: str) -> None:
        """A subclass of list, dict, ... has behaviour besides its Python methods."""
        base = self.cls.__mro__[-2] if len(self.cls.__mro__) > 1 else object
        if base.__module__ == "builtins" and base is not object and not issubclass(base, BaseException):
            raise Break("operator", name=what, value=self.describe())

    def hash_key(self, m: Machine) -> Any:
        method = mro_lookup(self.cls, "__hash__")
        if method is None:
            raise m.raise_real(TypeError(f"unhashable type: {self.cls.__name__!r}"))
        if isinstance(method, types.FunctionType):
            return UserKey(m, self, m.known(m.call_now(m.constant_object(method), [self], {})))
        if method is not object.__hash__:
            raise Break("operator", name="hash()", value=self.describe())
        return ObjectKey(self.obj if self.obj is not None else self)

    def _tail(self, m: Machine, name: str, args: Args, what: str) -> Value:
        method = self.method(m, name)
        if method is None:
            raise Break("operator", name=what, value=self.describe())
        return method.call(m, args, {})

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        method = self.method(m, "__call__")
        if method is None:
            raise Break("call", name=self.describe())
        return method.call(m, args, kwargs)

    def getitem(self, m: Machine, key: Value) -> Value:
        return self._tail(m, "__getitem__", [key], "[]")

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        m.call_now(self.method(m, "__setitem__") or lacking(m, self, "item assignment"), [key, value], {})

    def delitem(self, m: Machine, key: Value) -> None:
        m.call_now(self.method(m, "__delitem__") or lacking(m, self, "item deletion"), [key], {})

    def length(self, m: Machine) -> Value:
        return self._tail(m, "__len__", [], "len()")

    def contains(self, m: Machine, item: Value) -> Value:
        result = self._operate(m, "__contains__", item)
        if result is not None:
            return boolean(result.truth(m))
        return boolean(any(m.equal(m.look(mine), item) for mine in self.iterate(m)))

    def iterator(self, m: Machine) -> Value:
        result = self._operate(m, "__iter__")
        if result is None and self.method(m, "__getitem__") is not None:
            return m.call_now(m.constant_object(items_by_index), [self], {})
        if result is None:
            raise Break("iterate", value=self.describe())
        return result

    def iterate(self, m: Machine) -> list[Value]:
        iterator = self.iterator(m)
        return iterator.iterate(m) if iterator is not self else m.drain(self)

    def next(self, m: Machine) -> Value | None:
        try:
            return self._operate(m, "__next__")
        except UserRaise as raised:
            if raised.value.python_type() is StopIteration:
                return None
            raise

    def rebuild(self, e: Emitter) -> str:
        cls = e.class_text(self.cls)
        maker = cls if self.cls is types.SimpleNamespace else "object"
        return self.filled(e, e.write_as(self, e.assign(f"{maker}.__new__({cls})")))

    def filled(self, e: Emitter, name: str) -> str:
        """The object under its name, its attributes set."""
        if attributes := self.attributes_text(e):
            e.line(f"{e.constant(set_attributes)}({name}, {{{attributes}}})")
        return name

    def attributes_text(self, e: Emitter) -> str:
        return ", ".join(f"{name!r}: {e.expr(value)}" for name, value in e.m.effects.attributes(self).items() if value is not DELETED)


def set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    """For generated code."""
    for name, value in attributes.items():
        if value is not DELETED:        # an attribute that only the other arm of a branch sets
            object.__setattr__(obj, name, value)


def lacking(m: Machine, value: Value, what: str) -> Value:
    raise m.raise_real(TypeError(f"{value.python_type().__name__!r} object does not support {what}"))


class UserKey:
    """A key whose hash and equality are methods of the user's."""

    __slots__ = ("m", "value", "hashed")

    def __init__(self, m: Machine, value: Value, hashed: int):
        self.m, self.value, self.hashed = m, value, hashed

    def __hash__(self) -> int:
        return self.hashed

    def __eq__(self, other: object) -> bool:
        theirs = other.value if isinstance(other, UserKey) else ConstValue(other)
        return self.m.equal(self.value, theirs)


class InstanceDict(DictValue):
    """obj.__dict__ of an ObjectValue: no state of its own, each question goes to the object."""

    def __init__(self, owner: ObjectValue):
        super().__init__({})
        self.owner = owner

    @property
    def entries(self) -> dict[Any, tuple[Value, Value]]:
        return {}

    @entries.setter
    def entries(self, entries: dict[Any, tuple[Value, Value]]) -> None:
        if entries:
            raise Break("store", name="__dict__", value=self.owner.describe())

    def identity(self) -> Any:
        return instance_dict(self.owner.obj) if self.owner.obj is not None else None

    def is_constant(self) -> bool:
        return False

    def find(self, m: Machine, key: Value) -> Value | None:
        name = m.known(key)
        found = self.owner.own_attribute(m, name) if isinstance(name, str) else None
        if found is None and isinstance(name, str):
            m.guard_not_own(self.owner, name)
        return found

    def know_all(self, m: Machine) -> dict[Any, tuple[Value, Value]]:
        own: Any = instance_dict(self.owner.obj) if self.owner.obj is not None else {}
        if self.owner.source is not None:
            m.guard_own_names(self.owner, tuple(own))
        names = [*own, *(n for n in m.effects.attributes(self.owner) if n not in own)]
        return {n: (ConstValue(n), v) for n in names if (v := self.owner.own_attribute(m, n)) is not None}

    def unread(self, m: Machine) -> dict[str, Value]:
        """All entries as they are, looked at or not."""
        own: Any = instance_dict(self.owner.obj) if self.owner.obj is not None else {}
        if self.owner.source is not None:
            m.guard_own_names(self.owner, tuple(own))
        found = {name: m.lazy_own(self.owner, name, obj) for name, obj in own.items()}
        found.update(m.effects.attributes(self.owner))
        return {name: m.look(value) if isinstance(value, Undecided) else value for name, value in found.items() if value is not DELETED}

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        m.effects.store_attr(self.owner, m.known(key), value, "set_own")

    def delitem(self, m: Machine, key: Value) -> None:
        if self.find(m, key) is None:
            raise m.raise_real(KeyError(m.known(key)))
        m.effects.delete_attr(self.owner, m.known(key))

    def change(self, m: Machine, entries: dict[Any, tuple[Value, Value]], kind: str, *data: Value) -> None:
        raise Break("store", name=f"{kind} of __dict__", value=self.owner.describe())

    def rebuild(self, e: Emitter) -> str:
        return f"{e.expr(self.owner)}.__dict__"


CALLS.row(vars)(lambda m, args, kwargs: args[0].getattr(m, "__dict__") if args else CALLS[locals](m, [], {}))


@CALLS.row(object.__setattr__)
def call_object_setattr(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if not isinstance(args[0], ObjectValue):
        raise Break("store", name="an attribute", value=args[0].describe())
    m.finish_now(args[0].plain_setattr(m, args[1].constant(), args[2]) or NONE)
    return NONE


@CALLS.row(object.__delattr__)
def call_object_delattr(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if not isinstance(args[0], ObjectValue):
        raise Break("store", name="deletion of an attribute", value=args[0].describe())
    m.finish_now(args[0].plain_delattr(m, m.known(args[1])) or NONE)
    return NONE


@CALLS.row(object.__getattribute__)
def call_object_getattribute(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if not isinstance(args[0], ObjectValue):
        raise Break("attribute", name=str(args[1].constant()), value=args[0].describe())
    name = m.known(args[1])
    found = args[0].plain_getattr(m, name)
    if found is not None:
        return found
    args[0].guard_missing(m, name)
    raise m.raise_real(AttributeError(f"{args[0].cls.__name__!r} object has no attribute {name!r}"))


CALLS.row(object.__init__)(lambda m, args, kwargs: NONE)
