"""Class statements inside of the region, and the descriptors that class bodies make (property, staticmethod, classmethod).

The body runs symbolically into a namespace.  The class is then a real *stand-in* class: its functions are empty shells, and what
cannot be known is a placeholder; both are remembered as the Values they stand for, so lookups through the class's mro find those.  A
class that leaves the region is made anew by generated code; the stand-in never does.

    class Scaler: ...           # LocalClass(<stand-in>, namespace)
"""
from __future__ import annotations

import abc
import builtins
import dataclasses
import functools
import types
from typing import TYPE_CHECKING, Any

from firesteel.capture.values.attributes import MISSING, mro_lookup
from firesteel.capture.values.base import Value
from firesteel.capture.values.class_objects import ClassValue
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.containers import TupleValue
from firesteel.capture.values.functions import CALLS, Args, CellValue, FunctionValue, Kwargs, PartialValue
from firesteel.capture.values.mappings import DictValue
from firesteel.errors import Break

if TYPE_CHECKING:
    from firesteel.capture.emit import Emitter
    from firesteel.capture.machine import Machine

KNOWN_METACLASSES = (type, abc.ABCMeta)


class Placeholder:
    """Stands for a value in the stand-in class."""


# -- descriptors --------------------------------------------------------------------------------------------------------
class DescriptorValue(Value):
    """property(...), staticmethod(f) or classmethod(f), made inside."""

    def __init__(self, cls: type, parts: list[Value]):
        self.cls, self.parts = cls, parts

    def python_type(self) -> type:
        return self.cls

    def describe(self) -> str:
        return self.cls.__name__

    def truth(self, m: Machine) -> bool:
        return True

    def getattr(self, m: Machine, name: str) -> Value:
        if name in ("__func__", "__wrapped__") and self.cls is not property:
            return self.parts[0]
        if self.cls is property and name in PROPERTY_PARTS:
            return PropertyMethod(self, PROPERTY_PARTS.index(name))
        return super().getattr(m, name)

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        return self.parts[0].call(m, args, kwargs) if self.cls is staticmethod else super().call(m, args, kwargs)

    def rebuild(self, e: Emitter) -> str:
        return f"{e.constant(self.cls)}({', '.join(map(e.expr, self.parts))})"


PROPERTY_PARTS = ("getter", "setter", "deleter")


class PropertyMethod(Value):
    """prop.setter and the like: a property with one function exchanged."""

    def __init__(self, owner: DescriptorValue, index: int):
        self.owner, self.index = owner, index

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        parts = self.owner.parts + [ConstValue(None)] * (3 - len(self.owner.parts))
        parts[self.index] = args[0]
        return DescriptorValue(property, parts)


def _descriptor(cls: type) -> Any:
    def make(m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if kwargs:
            raise Break("call", name=cls.__name__)
        return DescriptorValue(cls, list(args))
    return make


for _cls in (property, staticmethod, classmethod):
    CALLS.add(_cls, _descriptor(_cls))


# -- classes ------------------------------------------------------------------------------------------------------------
class LocalClass(ClassValue):
    """A class made inside; `cls` is the stand-in."""

    is_local = True

    def __init__(self, cls: type, bases: list[Value], namespace: dict[str, Value], cell: CellValue | None):
        super().__init__(cls)
        self.bases, self.namespace, self.cell = bases, namespace, cell
        self.decorators: list[tuple[Any, dict[str, Any]]] = []      # executed again when it is made for real

    def setattr(self, m: Machine, name: str, value: Value) -> None:
        before = self.cls.__dict__.get(name, MISSING)
        setattr(self.cls, name, stand_in(m, value))
        m.effects.on_undo(_restore, self.cls, name, before)
        m.effects.change(self, "namespace", {**self.namespace, name: value})

    def rebuild(self, e: Emitter) -> str:
        """Cells through which the class's functions see the class itself are filled at the end."""
        cells = [cell for fn in self.namespace.values() for cell in closure_of(fn) if cell is self.cell or cell.content is self]
        names = {id(cell): e.write_as(cell, e.assign(f"{e.helper(types.CellType)}()")) for cell in cells if cell.source is None}
        bases = "".join(f"{e.expr(base)}, " for base in self.bases)
        entries = ", ".join(f"{name!r}: {e.expr(value)}" for name, value in self.namespace.items())
        name = e.write_as(self, e.assign(f"{e.constant(type(self.cls))}({self.cls.__name__!r}, ({bases}), {{{entries}}})"))
        for text in dict.fromkeys(names.values()):
            e.line(f"{text}.cell_contents = {name}")
        for decorator, settings in self.decorators:
            e.line(f"{e.constant(decorator)}({name}, **{e.constants.bind(settings, 'settings')})")
        return name


def closure_of(value: Value) -> list[CellValue]:
    if isinstance(value, DescriptorValue):
        return [cell for part in value.parts for cell in closure_of(part)]
    return value.closure if isinstance(value, FunctionValue) and value.fn is None else []


def _restore(cls: type, name: str, before: Any) -> None:
    if before is MISSING:
        delattr(cls, name)
    else:
        setattr(cls, name, before)


@CALLS.row(builtins.__build_class__)
def call_build_class(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    body, name = args[0], m.known(args[1])
    bases: list[Any] = [m.look(base) for base in args[2:]]
    if kwargs or not isinstance(body, FunctionValue) or not all(isinstance(base, ClassValue) for base in bases):
        raise Break("call", name=f"the class statement of {name}")
    real = tuple(base.cls for base in bases)
    refuse_unknown_behaviour(name, real)
    namespace = run_body(m, body)
    cell = namespace.pop("__classcell__", None)
    return make_class(m, name, bases, namespace, cell)


def make_class_of(m: Machine, name: Value, bases: Value, namespace: Value) -> Value:
    """type(name, bases, namespace)"""
    parents: list[Any] = [m.look(base) for base in m.iterate(bases)]
    if not isinstance(namespace, DictValue) or not all(isinstance(base, ClassValue) for base in parents):
        raise Break("call", name="type with three arguments")
    refuse_unknown_behaviour(m.known(name), tuple(base.cls for base in parents))
    return make_class(m, m.known(name), parents, {m.known(key): m.look(value) for key, value in namespace.know_all(m).values()}, None)


def refuse_unknown_behaviour(name: str, bases: tuple[type, ...]) -> None:
    """A metaclass or an __init_subclass__ of the user's would run for real while capturing."""
    for base in bases:
        custom = next((c for c in base.__mro__ if "__init_subclass__" in vars(c) and c is not object and c.__module__ != "typing"), None)
        if type(base) not in KNOWN_METACLASSES or custom is not None:
            raise Break("call", name=f"the class statement of {name}")


def run_body(m: Machine, body: FunctionValue) -> dict[str, Value]:
    namespace = DictValue({})
    m.run_class_body(body, namespace)
    return {key.constant(): m.look(value) for key, value in namespace.entries.values()}


def make_class(m: Machine, name: str, bases: list[Any], namespace: dict[str, Value], cell: Any) -> LocalClass:
    stand_ins = {key: stand_in(m, value) for key, value in namespace.items()}
    for key, value in stand_ins.items():
        if not isinstance(value, (property, Placeholder, dataclasses.Field)) and mro_lookup(type(value), "__set_name__") is not MISSING:
            raise Break("call", name=f"the class statement of {name}, whose attribute {key} has a __set_name__")
    real = m.run_real(types.new_class, name, tuple(base.cls for base in bases), {}, lambda ns: ns.update(stand_ins))
    made = LocalClass(real, bases, namespace, cell)
    m.remember(real, made)
    if isinstance(cell, CellValue):
        cell.set(m, made)
    return made


def stand_in(m: Machine, value: Value) -> Any:
    """A real object for the stand-in class, remembered as the Value."""
    if isinstance(value, (ConstValue, ClassValue, TupleValue)) and value.is_constant():
        return value.constant()
    if isinstance(value, FunctionValue):
        return value.fn if value.fn is not None else _function(m, value)
    if isinstance(value, DescriptorValue):
        return value.cls(*[stand_in(m, part) for part in value.parts])
    if isinstance(value, DictValue) and all(k.is_constant() and v.is_constant() for k, v in value.entries.values()):
        return {k.constant(): v.constant() for k, v in value.entries.values()}      # __annotations__
    if isinstance(value, FieldValue):
        return value.obj
    obj = value.identity()
    made = Placeholder() if obj is None or value.source is None else obj
    m.remember(made, value)
    return made


def _function(m: Machine, value: FunctionValue) -> types.FunctionType:
    known = value.shell
    if known is None:
        cells = tuple(types.CellType() for _ in value.code.co_freevars)
        known = value.shell = types.FunctionType(value.code, value.scope, value.name, tuple(stand_in(m, m.look(d)) for d in value.defaults), cells)
        known.__dict__.update({n: v.constant() for n, v in m.effects.attributes(value).items() if v.is_constant() and not hasattr(type(known), n)})
        known.__kwdefaults__ = {k: stand_in(m, m.look(d)) for k, d in value.kwdefaults.items()} or None
        m.remember(known, value)
    return known


class FieldValue(Value):
    """dataclasses.field(...) with known settings."""

    def __init__(self, settings: dict[str, Any]):
        self.settings, self.obj = settings, dataclasses.field(**settings)

    def python_type(self) -> type:
        return dataclasses.Field

    def rebuild(self, e: Emitter) -> str:
        return f"{e.constant(dataclasses.field)}(**{e.constants.bind(self.settings, 'settings')})"


@CALLS.row(dataclasses.field)
def call_field(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    return FieldValue({name: m.real_object(value) for name, value in kwargs.items()})


# -- decorators that are executed on the stand-in -----------------------------------------------------------------------
@CALLS.row(dataclasses.dataclass)
def call_dataclass(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if not args or args[0].is_constant() and args[0].constant() is None:
        return PartialValue(functools.partial, m.constant_object(dataclasses.dataclass), [], dict(kwargs))
    cls, settings = args[0], {name: m.known(value) for name, value in kwargs.items()}
    if not isinstance(cls, LocalClass) or settings.get("slots"):
        raise Break("call", name="dataclasses.dataclass")
    m.run_real(dataclasses.dataclass, cls.cls, **settings)
    m.effects.change(cls, "decorators", [*cls.decorators, (dataclasses.dataclass, settings)])
    return cls
