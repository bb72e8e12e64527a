"""Classes made inside of the region, and the descriptors that class bodies make (property, staticmethod, classmethod).

Such a class is a real *stand-in* class: its functions are empty shells, and what cannot be known is a placeholder; both are remembered
as the Values they stand for, so lookups through the class's mro find those.  A class that leaves the region is made anew by generated
code; the stand-in never does.  (The statement itself: class_statements.py.)

    class Scaler: ...           # LocalClass(<stand-in>, namespace)
"""
from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
from typing import Any

from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.values.attributes import MISSING, mro_lookup
from firesteel.capture.values.base import CannotRebuild, Value
from firesteel.capture.values.class_objects import AliasValue, ClassValue
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.containers import TupleValue
from firesteel.capture.values.functions import Args, CellValue, FunctionValue, Kwargs, PartialValue
from firesteel.capture.values.mappings import DictValue, ProxyValue
from firesteel.capture.values.objects import ObjectValue
from firesteel.errors import Break


class Placeholder:
    """Stands for a value in the stand-in class."""


def placeholder(value: Value) -> Placeholder:
    """One that is a descriptor where the value is one."""
    cls = value.cls if isinstance(value, ObjectValue) else object
    methods = {name: found for name in ("__get__", "__set__", "__delete__") if (found := mro_lookup(cls, name)) is not MISSING}
    return type("Placeholder", (Placeholder,), methods)() if methods else Placeholder()


def make_class_again(name: str, bases: tuple[Any, ...], settings: dict[str, Any], entries: dict[str, Any]) -> type:
    """For generated code: the class statement with this body."""
    def fill(namespace: Any) -> None:
        for key, value in entries.items():
            namespace[key] = value
    return types.new_class(name, bases, settings, fill)


# -- descriptors --------------------------------------------------------------------------------------------------------
class DescriptorValue(Value):
    """property(...), staticmethod(f), classmethod(f) or cached_property(f), made inside."""

    words = "{self.cls.__name__}"
    always_true = True
    form = "{cls}({parts})"

    def __init__(self, cls: type, parts: list[Value]):
        self.cls, self.parts = cls, parts

    def getattr(self, m: Machine, name: str) -> Value:
        if name in ("__func__", "__wrapped__") and self.cls in (staticmethod, classmethod):
            return self.parts[0]
        if self.cls is property and name in PROPERTY_PARTS:
            return PropertyMethod(self, PROPERTY_PARTS.index(name))
        return super().getattr(m, name)

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        return self.parts[0].call(m, args, kwargs) if self.cls is staticmethod else super().call(m, args, kwargs)


PROPERTY_PARTS = ("getter", "setter", "deleter")


class PropertyMethod(Value):
    """prop.setter and the like: a property with one function exchanged."""

    def __init__(self, owner: DescriptorValue, index: int):
        self.owner, self.index = owner, index

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        parts = self.owner.parts + [ConstValue(None)] * (3 - len(self.owner.parts))
        parts[self.index] = args[0]
        return DescriptorValue(property, parts)


def _descriptor(cls: type, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if kwargs:
        raise Break("class_making", name=cls.__name__)
    return DescriptorValue(cls, list(args))


for _cls in (property, staticmethod, classmethod, functools.cached_property):
    CALLS.add(_cls, functools.partial(_descriptor, _cls))


# -- classes ------------------------------------------------------------------------------------------------------------
class LocalClass(ClassValue):
    """A class made inside; `cls` is the stand-in."""

    is_local = True

    def __init__(self, cls: type, bases: list[Value], namespace: dict[str, Value], cell: CellValue | None, settings: Kwargs,
                 birth: int, writable: bool = True):
        super().__init__(cls)
        self.bases, self.namespace, self.cell, self.settings, self.birth = bases, namespace, cell, settings, birth
        self.writable = writable        # False: making it runs code of the user's, whose effects must not come twice
        self.decorators: list[tuple[Any, dict[str, Any]]] = []      # executed again when it is made for real

    def getattr(self, m: Machine, name: str) -> Value:
        if name == "__dict__":
            entries: Any = {key: (ConstValue(key), m.constant_object(value)) for key, value in vars(self.cls).items()}
            return ProxyValue(entries, None, None, types.MappingProxyType)
        return super().getattr(m, name)

    def setattr(self, m: Machine, name: str, value: Value) -> None:
        if type(self.cls).__setattr__ is not type.__setattr__:
            raise Break("store", name=f"attribute {name}", value=self.describe())
        before = self.cls.__dict__.get(name, MISSING)
        setattr(self.cls, name, stand_in(m, value))
        m.effects.on_undo(_restore, self.cls, name, before)
        m.effects.change(self, "namespace", {**self.namespace, name: value})

    def getitem(self, m: Machine, key: Value) -> Value:
        if isinstance(self.cls, enum.EnumMeta) or mro_lookup(type(self.cls), "__getitem__") is not MISSING:
            return super().getitem(m, key)
        if isinstance(own := mro_lookup(self.cls, "__class_getitem__"), classmethod) and m.same_object(own.__func__) is not None:
            return m.same_object(own.__func__).call(m, [self, key], {})
        return LocalAlias(m.run_real(operator.getitem, self.cls, m.known(key)), self, key)

    def rebuild(self, e: Emitter) -> str:
        """Cells through which the class's functions see the class itself are filled at the end."""
        cells = [cell for fn in self.namespace.values() for cell in closure_of(fn) if cell is self.cell or cell.content is self]
        names = {id(cell): e.write_as(cell, e.assign(f"{e.constant(types.CellType)}()")) for cell in cells if cell.source is None}
        if not self.writable:
            raise CannotRebuild(self, self.birth)
        bases = "".join(f"{e.expr(base)}, " for base in self.bases)
        entries, settings = (", ".join(f"{name!r}: {e.expr(value)}" for name, value in given.items()) for given in (self.namespace, self.settings))
        parts = f"{self.cls.__name__!r}, ({bases}), {{{settings}}}, {{{entries}}}"
        name = e.write_as(self, e.assign(f"{e.constant(make_class_again)}({parts})"))
        for text in dict.fromkeys(names.values()):
            e.line(f"{text}.cell_contents = {name}")
        for decorator, options in self.decorators:
            e.line(f"{e.constant(decorator)}({name}, **{e.constants.bind(options, 'settings')})")
        return name


class LocalAlias(AliasValue):
    """Box[int], of a generic class made inside."""

    form = "{origin}[{key}]"

    def __init__(self, alias: Any, origin: LocalClass, key: Value):
        super().__init__(alias, None)
        self.origin, self.key = origin, key


class AutoValue(Value):
    """enum.auto() in a class body: a number once the class is made."""

    cls = enum.auto
    form = "{cls}()"


CALLS.row(enum.auto)(lambda m, args, kwargs: AutoValue())


def closure_of(value: Value) -> list[CellValue]:
    if isinstance(value, DescriptorValue):
        return [cell for part in value.parts for cell in closure_of(part)]
    return value.closure if isinstance(value, FunctionValue) and value.fn is None else []


def _restore(cls: type, name: str, before: Any) -> None:
    if before is MISSING:
        delattr(cls, name)
    else:
        setattr(cls, name, before)


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
    if isinstance(value, AutoValue):
        return enum.auto()
    obj = value.identity()
    made = placeholder(value) if obj is None or value.source is None else obj
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

    cls = dataclasses.Field

    def __init__(self, settings: dict[str, Any]):
        self.settings, self.obj = settings, dataclasses.field(**settings)

    def rebuild(self, e: Emitter) -> str:
        return f"{e.constant(dataclasses.field)}(**{e.constants.bind(self.settings, 'settings')})"


CALLS.row(dataclasses.field)(lambda m, args, kwargs: FieldValue({name: m.real_object(value) for name, value in kwargs.items()}))


# -- decorators that are executed on the stand-in -----------------------------------------------------------------------
@CALLS.row(dataclasses.dataclass)
def call_dataclass(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if not args or args[0].is_constant() and args[0].constant() is None:
        return PartialValue(functools.partial, m.constant_object(dataclasses.dataclass), [], dict(kwargs))
    cls, settings = args[0], {name: m.known(value) for name, value in kwargs.items()}
    if not isinstance(cls, LocalClass) or settings.get("slots"):
        raise Break("class_making", name="dataclasses.dataclass")
    m.run_real(dataclasses.dataclass, cls.cls, **settings)
    m.effects.change(cls, "decorators", [*cls.decorators, (dataclasses.dataclass, settings)])
    return cls
