"""Instances of user classes, the classes themselves, super(), exceptions, and Python modules.

Attribute access follows Python's own algorithm: data descriptors of the class, the instance's dict, other class attributes,
`__getattr__`.  Classes are taken as fixed; instances are read through sources and guarded by what is read.
"""
from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from firesteel.capture.effects import DELETED
from firesteel.capture.polyfills import items_by_index
from firesteel.capture.source import Source
from firesteel.capture.values.base import ObjectKey, UserRaise, Value
from firesteel.capture.values.const import NONE, ConstValue, boolean, fresh
from firesteel.capture.values.containers import ListValue, NamedTupleValue, TupleValue
from firesteel.capture.values.functions import CALLS, Args, BoundMethodValue, Kwargs, find_call
from firesteel.capture.values.mappings import DictValue
from firesteel.errors import Break
from firesteel.table import Table

if TYPE_CHECKING:
    from firesteel.capture.emit import Emitter
    from firesteel.capture.machine import Machine

BINARY_METHODS = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "@": "matmul", "**": "pow",
                  "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift"}
COMPARE_METHODS = {"<": "__lt__", "<=": "__le__", "==": "__eq__", "!=": "__ne__", ">": "__gt__", ">=": "__ge__"}
UNARY_METHODS = {"-": "__neg__", "+": "__pos__", "~": "__invert__"}
MISSING: Any = object()
REPLACEABLE = (types.FunctionType, staticmethod, property)     # class attributes that programs replace at run time


def mro_lookup(cls: type, name: str) -> Any:
    """What type(x) has under a name, unbound; MISSING where nothing."""
    for base in cls.__mro__:
        found = base.__dict__.get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING


def instance_dict(obj: Any) -> dict[str, Any] | None:
    """obj.__dict__, whatever its class's __getattribute__ says; None where it has none."""
    try:
        return object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None


def is_data_descriptor(attribute: Any) -> bool:
    return hasattr(type(attribute), "__set__") or hasattr(type(attribute), "__delete__")


def bind(m: Machine, attribute: Any, owner: Value | None, cls: type, name: str) -> Value:
    """A class attribute as seen through an instance (or through the class, with owner None)."""
    if isinstance(attribute, REPLACEABLE):
        m.guard_class_attribute(cls, name, attribute)
    if isinstance(attribute, staticmethod):
        return m.constant_object(attribute.__func__)
    if isinstance(attribute, classmethod):
        return BoundMethodValue(m.constant_object(attribute.__func__), m.constant_object(cls), name="")
    if owner is None:
        return bind_to_class(m, attribute, cls)
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
    getter = mro_lookup(type(attribute), "__get__")
    if isinstance(getter, types.FunctionType):
        args = [m.constant_object(attribute), owner, m.constant_object(cls)]
        return m.constant_object(getter).call(m, args, {})
    if getter is not MISSING:
        raise Break("attribute", name=name, value=owner.describe())
    return m.class_constant(cls, name, attribute)


def bind_to_class(m: Machine, attribute: Any, cls: type) -> Value:
    """cls.attribute"""
    getter = mro_lookup(type(attribute), "__get__")
    if isinstance(attribute, property):
        return m.opaque_constant(attribute)
    if isinstance(attribute, types.ClassMethodDescriptorType):
        return m.constant_object(attribute.__get__(None, cls))
    if isinstance(getter, types.FunctionType) and not isinstance(attribute, functools.cached_property):
        return m.constant_object(getter).call(m, [m.constant_object(attribute), ConstValue(None), m.constant_object(cls)], {})
    return m.constant_object(attribute)


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


class ObjectValue(Value):
    """An instance of a class written in Python; the user's (with a source) or one made inside."""

    def __init__(self, cls: type, obj: Any = None, source: Source | None = None):
        self.cls, self.obj, self.source = cls, obj, source

    def python_type(self) -> type:
        return self.cls

    def describe(self) -> str:
        return f"{self.cls.__qualname__} object"

    def identity(self) -> Any:
        return self.obj

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
        return None

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
        if own is not None and name in own:
            return m.read_own(self, name, own[name])
        return None

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
        if setter is not object.__setattr__:
            raise Break("store", name=f"attribute {name}", value=self.describe())
        return self.plain_setattr(m, name, value)

    def plain_setattr(self, m: Machine, name: str, value: Value) -> Value | None:
        """object.__setattr__"""
        attribute = mro_lookup(self.cls, name)
        if isinstance(attribute, property):
            if attribute.fset is None:
                raise m.raise_real(AttributeError(f"property {name!r} of {self.cls.__name__!r} object has no setter"))
            return m.constant_object(attribute.fset).call(m, [self, value], {})
        setter = mro_lookup(type(attribute), "__set__") if attribute is not MISSING else MISSING
        if isinstance(setter, types.FunctionType):
            return m.constant_object(setter).call(m, [m.constant_object(attribute), self, value], {})
        if attribute is not MISSING and is_data_descriptor(attribute) and not isinstance(attribute, types.MemberDescriptorType):
            raise Break("store", name=f"attribute {name}", value=self.describe())
        kind = "setattr" if mro_lookup(self.cls, "__setattr__") is object.__setattr__ else "set_plain"
        m.effects.store_attr(self, name, value, kind)
        return None

    def delattr(self, m: Machine, name: str) -> Value | None:
        deleter = mro_lookup(self.cls, "__delattr__")
        if isinstance(deleter, types.FunctionType):
            return m.constant_object(deleter).call(m, [self, ConstValue(name)], {})
        if deleter is not object.__delattr__:
            raise Break("store", name=f"deletion of {name}", value=self.describe())
        return self.plain_delattr(m, name)

    def plain_delattr(self, m: Machine, name: str) -> Value | None:
        """object.__delattr__"""
        attribute = mro_lookup(self.cls, name)
        if isinstance(attribute, property) and attribute.fdel is not None:
            return m.constant_object(attribute.fdel).call(m, [self], {})
        deleter = mro_lookup(type(attribute), "__delete__") if attribute is not MISSING else MISSING
        if isinstance(deleter, types.FunctionType):
            return m.constant_object(deleter).call(m, [m.constant_object(attribute), self], {})
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
        if result is None and op == "!=":
            equal = self._operate(m, "__eq__", other)
            return boolean(not m.truth_now(equal)) if equal is not None else None
        return result

    def unary(self, m: Machine, op: str) -> Value:
        if op == "not":
            return boolean(not m.truth_now(self))
        result = self._operate(m, UNARY_METHODS[op])
        return result if result is not None else super().unary(m, op)

    def truth(self, m: Machine) -> bool:
        for name, kind in (("__bool__", bool), ("__len__", int)):
            result = self._operate(m, name)
            if result is not None:
                given = result.python_type()
                if not issubclass(given, kind):
                    raise m.raise_real(TypeError(f"{name} should return {kind.__name__}, returned {given.__name__}"))
                return m.truth_now(result)
        self._refuse_builtin_base("bool()")
        return True

    def _refuse_builtin_base(self, what: str) -> None:
        """A subclass of list, dict, ... has behaviour that its Python methods do not show."""
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
            return boolean(m.truth_now(result))
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
        return m.iterate(iterator) if iterator is not self else self._drain(m)

    def _drain(self, m: Machine) -> list[Value]:
        items = []
        while (item := self.next(m)) is not None:
            items.append(item)
            m.check_length(len(items))
        return items

    def next(self, m: Machine) -> Value | None:
        try:
            return self._operate(m, "__next__")
        except UserRaise as raised:
            if raised.value.python_type() is StopIteration:
                return None
            raise

    def rebuild(self, e: Emitter) -> str:
        return e.new_object(self)


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
        return {name: value for name, value in found.items() if value is not DELETED}

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


@CALLS.row(vars)
def call_vars(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if not args:
        return CALLS[locals](m, [], {})
    return args[0].getattr(m, "__dict__")


class ExceptionValue(ObjectValue):
    """An exception object; made inside (class and arguments), or real."""

    def __init__(self, cls: type, args: list[Value], obj: Any = None, source: Source | None = None):
        super().__init__(cls, obj, source)
        self.args = args

    def getattr(self, m: Machine, name: str) -> Value:
        written = m.effects.written(self, name)
        if written is not None:
            return m.look(written) if written is not DELETED else super().getattr(m, name)
        if name == "__traceback__":
            raise Break("attribute", name=name, value=self.describe())
        row = EXCEPTION_ATTRIBUTES.get(name)
        found = row(m, self) if row is not None else None
        if found is not None:
            return found
        if self.obj is None and isinstance(mro_lookup(self.cls, name), (types.MemberDescriptorType, types.GetSetDescriptorType)) and name != "__class__":
            raise Break("attribute", name=name, value=self.describe())
        return super().getattr(m, name)

    def setattr(self, m: Machine, name: str, value: Value) -> Value | None:
        if mro_lookup(self.cls, "__setattr__") is not BaseException.__setattr__ or isinstance(mro_lookup(self.cls, name), property):
            return super().setattr(m, name, value)
        if name == "__traceback__":     # generated code has a traceback of its own
            return None
        if name == "args":
            m.effects.change(self, "args", m.iterate(value))
        m.effects.store_attr(self, name, value)
        return None

    def is_constant(self) -> bool:
        init = self.cls.__init__        # type: ignore[misc]  # of the class itself: it is looked at, not called
        return not isinstance(init, types.FunctionType) and all(a.is_constant() for a in self.args)

    def constant(self) -> Any:
        """A copy for formatting; never the object itself."""
        args = tuple(a.constant() for a in self.args)
        made = self.cls.__new__(self.cls, *args)
        made.args = args
        return made

    def rebuild(self, e: Emitter) -> str:
        return e.new_exception(self)


def _chained(name: str) -> Callable[[Machine, ExceptionValue], Value | None]:
    return lambda m, error: NONE if error.obj is None else m.read_attribute(error, name)


def _suppresses(m: Machine, error: ExceptionValue) -> Value:
    if m.effects.written(error, "__cause__") is not None:
        return boolean(True)
    return boolean(False) if error.obj is None else m.read_attribute(error, "__suppress_context__")


def _group_part(index: int) -> Callable[[Machine, ExceptionValue], Value | None]:
    def part(m: Machine, error: ExceptionValue) -> Value | None:
        if not issubclass(error.cls, BaseExceptionGroup):
            return None
        value = m.look(error.args[index])
        return value if index == 0 else TupleValue(m.iterate(value))
    return part


EXCEPTION_ATTRIBUTES: dict[str, Callable[[Any, ExceptionValue], Value | None]] = {
    "args": lambda m, error: TupleValue(list(error.args)), "__cause__": _chained("__cause__"), "__context__": _chained("__context__"),
    "__suppress_context__": _suppresses, "message": _group_part(0), "exceptions": _group_part(1),
    "value": lambda m, error: (error.args[0] if error.args else NONE) if issubclass(error.cls, StopIteration) else None,
}


@CALLS.row(BaseException.with_traceback)
def call_with_traceback(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    return args[0]


@CALLS.row(BaseException.add_note)
def call_add_note(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    before = m.effects.written(args[0], "__notes__")
    if before is None and args[0].identity() is not None:
        raise Break("call", name="add_note")
    args[0].setattr(m, "__notes__", ListValue([*(m.iterate(before) if before is not None else []), args[1]]))
    return NONE


# -- classes ------------------------------------------------------------------------------------------------------------
class ClassValue(Value):
    """A class."""

    def __init__(self, cls: type, source: Source | None = None):
        self.cls, self.source = cls, source

    def python_type(self) -> type:
        return type(self.cls)

    def describe(self) -> str:
        return f"class {self.cls.__qualname__}"

    def identity(self) -> Any:
        return self.cls

    def is_constant(self) -> bool:
        return True

    def constant(self) -> Any:
        return self.cls

    def hash_key(self, m: Machine) -> Any:
        return self.cls

    def truth(self, m: Machine) -> bool:
        return True

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        if op not in ("==", "!=") or not isinstance(other, ClassValue):
            return None
        return boolean((self.cls is other.cls) == (op == "=="))

    def getattr(self, m: Machine, name: str) -> Value:
        written = m.effects.written(self, name)
        if written is not None and written is not DELETED:
            return written
        meta = mro_lookup(type(self.cls), name)
        if meta is not MISSING and is_data_descriptor(meta):
            return m.static_attribute(self.cls, name)
        found = mro_lookup(self.cls, name)
        if found is MISSING:
            if meta is not MISSING and isinstance(meta, types.FunctionType):
                return BoundMethodValue(m.constant_object(meta), self, name=name)
            return m.static_attribute(self.cls, name)
        if is_changeable(found):
            return m.read_class_attribute(self.cls, name, found)
        return bind(m, found, None, self.cls, name)

    def setattr(self, m: Machine, name: str, value: Value) -> None:
        if type(self.cls).__setattr__ is not type.__setattr__ or self.source is None:
            raise Break("store", name=f"attribute {name}", value=self.describe())
        m.effects.store_attr(self, name, value)

    def getitem(self, m: Machine, key: Value) -> Value:
        return m.constant_object(m.run_real(operator.getitem, self.cls, m.known(key)))

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        if op != "|" or not other.is_constant():        # int | None
            return None
        parts = (other.constant(), self.cls) if reflected else (self.cls, other.constant())
        return m.constant_object(m.run_real(operator.or_, *parts))

    def iterate(self, m: Machine) -> list[Value]:
        return [fresh(m, member) for member in self.cls]        # type: ignore[attr-defined]  # an enum

    def iterator(self, m: Machine) -> Value:
        return m.iterate_over(TupleValue(self.iterate(m)))

    def length(self, m: Machine) -> Value:
        return ConstValue(len(self.cls))        # type: ignore[arg-type]  # an enum

    def contains(self, m: Machine, item: Value) -> Value:
        return boolean(item.constant() in self.cls)     # type: ignore[operator]  # an enum

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        row = find_call(self.cls)
        if row is not None:
            return row(m, args, kwargs)
        return instantiate(m, self.cls, args, kwargs)

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        return self.cls, self.cls

    def rebuild(self, e: Emitter) -> str:
        return e.constant(self.cls)


def is_changeable(attribute: Any) -> bool:
    """A class attribute that programs use as a variable, so it is read through a source and guarded."""
    return isinstance(attribute, (bool, int, float, str, list, dict, set, type(None))) and not isinstance(attribute, types.FunctionType)


# kind of class -> function(machine, class, args, kwargs) -> Value or None
INSTANTIATE: Table[Any] = Table("way of making an instance", "capture/values/")


def instantiate(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value:
    """cls(*args, **kwargs)"""
    if issubclass(cls, BaseException):
        return new_exception(m, cls, args, kwargs)
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and cls.__init__ is object.__init__:
        return new_namedtuple(m, cls, args, kwargs)
    if cls.__module__ == "torch.return_types" and len(args) == 1:
        return NamedTupleValue(cls, m.iterate(args[0]))
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


def new_instance(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value:
    """type.__call__ for classes written in Python"""
    if not is_plain(cls):
        raise Break("call", name=cls.__qualname__)
    if getattr(cls, "__abstractmethods__", None):
        raise m.raise_real(TypeError(f"Can't instantiate abstract class {cls.__name__}"))
    if isinstance(cls.__new__, types.FunctionType):
        return new_then_init(m, cls, args, kwargs)
    if cls.__new__ is not object.__new__:
        raise Break("call", name=cls.__qualname__)
    return initialised(m, ObjectValue(cls), cls, args, kwargs)


def new_then_init(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value:
    """A class with a __new__ of its own."""
    made = m.call_now(m.constant_object(cls.__new__), [m.constant_object(cls), *args], kwargs)
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
    return all(base is object or is_python_class(base) for base in cls.__mro__) and cls.__module__ != "torch._C"


def is_python_class(cls: type) -> bool:
    """Made by a class statement: none of its methods is written in C for it."""
    if not cls.__flags__ & (1 << 9):
        return False
    return not any(isinstance(v, (types.MethodDescriptorType, types.WrapperDescriptorType)) and v.__objclass__ is cls for v in vars(cls).values())


def is_constant_object_type(cls: type) -> bool:
    from_enum = getattr(cls, "_member_map_", None)
    return from_enum is not None or cls.__module__ == "torch" and cls.__name__ in ("device", "finfo", "iinfo", "dtype")


def new_exception(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value:
    made = ExceptionValue(cls, list(args))
    init = mro_lookup(cls, "__init__")
    if isinstance(init, types.FunctionType):
        return m.call_returning(m.constant_object(init), [made, *args], kwargs, made)
    if kwargs:
        raise Break("call", name=cls.__qualname__)
    return made


def new_namedtuple(m: Machine, cls: Any, args: Args, kwargs: Kwargs) -> Value:
    fields, defaults = cls._fields, cls._field_defaults
    home = getattr(cls.__new__, "__globals__", {}).get("__name__", "")
    if not home.startswith("namedtuple_") or len(args) > len(fields) or not set(kwargs) <= set(fields[len(args):]):
        raise Break("call", name=cls.__qualname__)
    items = list(args)
    for name in fields[len(args):]:
        if name not in kwargs and name not in defaults:
            raise Break("call", name=cls.__qualname__)
        items.append(kwargs[name] if name in kwargs else m.constant_object(defaults[name]))
    return NamedTupleValue(cls, items)


class SuperValue(Value):
    """super(cls, self)"""

    def __init__(self, cls: type, owner: Value):
        self.cls, self.owner = cls, owner

    def describe(self) -> str:
        return f"super of {self.cls.__qualname__}"

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
        if name == "__init__" and base is object or isinstance(self.owner, ExceptionValue) and not isinstance(attribute, types.FunctionType):
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
        return f"super({e.constant(self.cls)}, {e.expr(self.owner)})"


class NativeInit(Value):
    """The __init__ of object or of a builtin exception, bound."""

    def __init__(self, owner: Value, base: type):
        self.owner, self.base = owner, base

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if isinstance(self.owner, ExceptionValue):
            m.effects.change(self.owner, "args", list(args))
        elif args or kwargs or self.base is not object:
            raise Break("call", name=f"{self.base.__qualname__}.__init__")
        return NONE


# -- Python modules -----------------------------------------------------------------------------------------------------
class PythonModuleValue(Value):
    """An imported module: its attributes are globals of it."""

    def __init__(self, module: types.ModuleType, source: Source | None = None):
        self.module, self.source = module, source

    def python_type(self) -> type:
        return types.ModuleType

    def describe(self) -> str:
        return f"module {self.module.__name__}"

    def identity(self) -> Any:
        return self.module

    def truth(self, m: Machine) -> bool:
        return True

    def hash_key(self, m: Machine) -> Any:
        return ObjectKey(self.module)

    def getattr(self, m: Machine, name: str) -> Value:
        own = self.module.__dict__
        if name in own:
            return m.read_global(own, name)
        return m.static_attribute(self.module, name)

    def setattr(self, m: Machine, name: str, value: Value) -> None:
        m.store_global(self.module.__dict__, name, value)

    def rebuild(self, e: Emitter) -> str:
        return e.constant(self.module)


@CALLS.row(object.__new__)
def call_object_new(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if not isinstance(args[0], ClassValue) or not is_plain(args[0].cls):
        raise Break("call", name="object.__new__")
    return ObjectValue(args[0].cls)


@CALLS.row(object.__setattr__)
def call_object_setattr(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if not isinstance(args[0], ObjectValue):
        raise Break("store", name="an attribute", value=args[0].describe())
    args[0].plain_setattr(m, args[1].constant(), args[2])
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


@CALLS.row(super)
def call_super(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if args:
        return SuperValue(args[0].constant(), args[1])
    return m.implicit_super()


@CALLS.row(object.__init__)
def call_object_init(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    return NONE

