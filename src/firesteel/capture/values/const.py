"""ConstValue: a Python object that is known exactly and cannot change (numbers, strings, None, dtypes, devices, ...).

Operations on constants are executed while capturing.  What an operation makes (`fresh`) is again made of Values.

    ConstValue(3).binary(m, "+", ConstValue(4))         # <Const 7>
    ConstValue("a b").getattr(m, "split").call(m, [], {})   # a ListValue of two constants
"""
from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.python_operators import OPERATORS, UNARY_OPERATORS
from firesteel.capture.values.base import CallableObject, IdKey, MethodOfOwner, UserRaise, Value
from firesteel.errors import Break
from firesteel.table import Table

BARE = (int, float, bool, str, type(None))      # written as they are once they are guarded
LITERALS = (int, bool, str, bytes, type(None), type(Ellipsis))

CONSTANT_TYPES: tuple[type, ...] = (
    int, float, bool, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range, frozenset,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo, types.CodeType,
    *{np.dtype(code).type for code in np.typecodes["AllInteger"] + "efdFD?"},
)
CONSTANT_TYPE_SET = frozenset(CONSTANT_TYPES)

# type of a freshly made Python object -> function(machine, object) -> Value; rows are added beside each value kind
FRESH: Table[Callable[[Machine, Any], Value]] = Table("fresh object", "capture/values/")


def is_constant_object(obj: Any) -> bool:
    return type(obj) in CONSTANT_TYPE_SET or isinstance(obj, enum.Enum)


def fresh(m: Machine, obj: Any) -> Value:
    """The Value of an object that was made just now, by executing something on constants."""
    if is_constant_object(obj):
        return ConstValue(obj)
    row = FRESH.get(type(obj))
    if row is None:
        raise Break("object", name=type(obj).__qualname__)
    return row(m, obj)


def fold(m: Machine, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
    """fn(*args) executed now; an exception of it is the program's."""
    return fresh(m, run_for_program(m, fn, *args, **kwargs))


def run_for_program(m: Machine, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    except (Break, UserRaise):
        raise
    except Exception as error:      # what the user's own code would have met here
        raise m.raise_real(error) from None


NONE: Any = None


class ConstValue(Value):
    """A known immutable object."""

    __slots__ = ("value", "source", "holder")

    def __new__(cls, value: Any, source: Any = None) -> ConstValue:
        return NONE if value is None and source is None and NONE is not None else super().__new__(cls)      # there is one None

    def __init__(self, value: Any, source: Any = None):
        self.value, self.source, self.holder = value, source, None

    def python_type(self) -> type:
        return type(self.value)

    def describe(self) -> str:
        return f"{type(self.value).__name__} {self.value!r:.60}"

    def is_constant(self) -> bool:
        return True

    def constant(self) -> Any:
        return self.value

    def identity(self) -> Any:
        return self.value

    def hash_key(self, m: Machine) -> Any:
        return self.value

    def as_key(self, m: Machine, container: Any) -> Value:
        if type(self.value) is int and any(isinstance(key, IdKey) for key in container.entries):
            raise Break("introspection", name="id")
        return self

    def truth(self, m: Machine) -> bool:
        return bool(self.value)

    def getattr(self, m: Machine, name: str) -> Value:
        if isinstance(self.value, enum.Enum):       # its methods may take what is not known
            attribute = m.class_attribute(type(self.value), name)
            if attribute is not None:
                return m.bind(attribute, self, type(self.value), name)
        if name == "__class__":
            return m.constant_object(type(self.value))
        found = run_for_program(m, getattr, self.value, name)
        if callable(found) and not isinstance(found, enum.Enum):
            return ConstMethod(self, name)
        return fresh(m, found)

    def getitem(self, m: Machine, key: Value) -> Value:
        if not key.is_constant():
            return super().getitem(m, key)
        return fold(m, lambda: self.value[key.constant()])

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        if not isinstance(other, ConstValue) and not (op == "%" and other.is_constant()):
            return None
        a, b = (other.constant(), self.value) if reflected else (self.value, other.constant())
        return fold(m, OPERATORS[op], a, b)

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        if not isinstance(other, ConstValue):
            return None
        return fold(m, OPERATORS[op], self.value, other.value)

    def unary(self, m: Machine, op: str) -> Value:
        return fold(m, UNARY_OPERATORS[op], self.value)

    def contains(self, m: Machine, item: Value) -> Value:
        known = item.constant() if item.is_constant() else item.identity() if isinstance(item, CallableObject) else None
        if known is None and not item.is_constant():
            return super().contains(m, item)
        return fold(m, lambda: known in self.value)

    def length(self, m: Machine) -> Value:
        return fold(m, len, self.value)

    def iterate(self, m: Machine) -> list[Value]:
        return [fresh(m, item) for item in run_for_program(m, list, self.value)]

    def iterator(self, m: Machine) -> Value:
        return m.iterate_over(self)

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        value = self.value.item() if isinstance(self.value, np.generic) else self.value
        return value, value

    def rebuild(self, e: Emitter) -> str:
        if type(self.value) in LITERALS and len(text := repr(self.value)) < 200:
            return text if text[0] != "-" else f"({text})"
        if isinstance(self.value, enum.Enum) and e.is_made_here(type(self.value)) and self.value._name_ in type(self.value).__members__:
            return f"{e.class_text(type(self.value))}[{self.value._name_!r}]"
        return e.constant(self.value)


class UnusedConstant(ConstValue):
    """A constant of the user's that is only handed on so far: its type is guarded, its value from the first question about it on."""

    __slots__ = ("obj", "notice")

    def __new__(cls, obj: Any, source: Any, notice: Callable[[], None]) -> UnusedConstant:
        return object.__new__(cls)

    def __init__(self, obj: Any, source: Any, notice: Callable[[], None]):
        self.obj, self.source, self.notice, self.holder = obj, source, notice, None

    @property
    def value(self) -> Any:
        self.notice()
        if type(self.obj) in BARE:
            self.source = None
        return self.obj

    def python_type(self) -> type:
        return type(self.obj)

    def describe(self) -> str:
        return f"{type(self.obj).__name__} {self.obj!r:.60}"


class ConstMethod(MethodOfOwner):
    """A bound method of a constant, such as "{}".format; executed while capturing when its arguments are known."""

    form = "({owner}).{name}"

    def python_type(self) -> type:
        return type(getattr(self.owner.value, self.name))

    def describe(self) -> str:
        return f"{type(self.owner.value).__name__}.{self.name}"

    def call(self, m: Machine, args: list[Value], kwargs: dict[str, Value]) -> Value:
        arguments = [m.known_items(a) for a in args]
        named = {k: m.known(v) for k, v in kwargs.items()}
        return fold(m, getattr(self.owner.value, self.name), *arguments, **named)


NONE = ConstValue(None)
TRUE, FALSE = ConstValue(True), ConstValue(False)


def boolean(answer: bool) -> ConstValue:
    return TRUE if answer else FALSE


def is_none(value: Value) -> bool:
    return isinstance(value, ConstValue) and value.value is None
