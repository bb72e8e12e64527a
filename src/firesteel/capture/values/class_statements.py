"""The class statement inside of the region: bases, metaclass, body, `__set_name__`, `__init_subclass__`, in Python's order.

The body runs symbolically into a namespace, and so does what the user wrote for making classes (a metaclass's methods, `__init_subclass__`,
`__set_name__`).  Metaclasses of Python and torch are executed on the stand-in (`classes.py`).  A class whose making runs code of
the user's is not written by generated code, for that would run it twice: where it leaves the region, the statement breaks.

    class Scaler(Base, scale=2, metaclass=Registry): ...
"""
from __future__ import annotations

import abc
import builtins
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable
from typing import Any

import torch

from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Machine
from firesteel.capture.values.attributes import MISSING, mro_lookup
from firesteel.capture.values.base import FixedObject, Value
from firesteel.capture.values.class_objects import INSTANTIATE, initialised
from firesteel.capture.values.classes import DescriptorValue, LocalClass, Placeholder, closure_of, stand_in
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.containers import TupleValue
from firesteel.capture.values.functions import Args, CellValue, FunctionValue, Kwargs
from firesteel.capture.values.mappings import DictValue
from firesteel.capture.values.objects import ObjectValue
from firesteel.errors import Break

# executed for real, on the stand-in's empty functions
KNOWN_METACLASSES = (type, abc.ABCMeta, enum.EnumMeta, type(typing.Protocol), type(torch.Tensor), type(torch.autograd.Function),
                     *(getattr(typing, name) for name in ("NamedTupleMeta", "_TypedDictMeta")))
KNOWN_HOOKS = ("typing", "enum")                # modules whose __init_subclass__ is executed for real
BY_ENUM = ("__new__", "__init__", "_generate_next_value_", "_missing_")      # methods that making or searching an enum calls
QUIET = (property, Placeholder, dataclasses.Field, functools.cached_property)      # their __set_name__ may run on the stand-in


def not_captured(name: str, why: str = "") -> Break:
    return Break("class_making", name=f"the class statement of {name}{why}")


@CALLS.row(builtins.__build_class__)
def call_build_class(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    body, name, given = args[0], m.known(args[1]), [m.look(base) for base in args[2:]]
    if not isinstance(body, FunctionValue):
        raise not_captured(name)
    bases = resolved_bases(m, name, given)
    settings = {key: value for key, value in kwargs.items() if key != "metaclass"}
    meta, birth = metaclass_of(m, name, bases, kwargs.get("metaclass")), m.steps
    namespace = prepared(m, meta, name, bases, settings)
    m.run_class_body(body, namespace)
    if meta in KNOWN_METACLASSES:
        return make_class(m, meta, name, given, bases, entries_of(m, name, namespace), settings, birth)
    return m.finish_now(m.constant_object(meta).call(m, [ConstValue(name), TupleValue(list(bases)), namespace], settings))


def resolved_bases(m: Machine, name: str, given: list[Value]) -> list[Value]:
    """Generic[T], NamedTuple and the like name other classes as the bases."""
    real = tuple(real_base(base) for base in given)
    if not all(isinstance(base, type) or getattr(type(base) if isinstance(value, FixedObject) else base, "__module__", "") in ("typing", "types")
               for base, value in zip(real, given)):
        raise not_captured(name)
    return [m.constant_object(base) for base in m.run_real(types.resolve_bases, real)]


def real_base(value: Value) -> Any:
    return value.constant() if value.is_constant() else value.identity()


def metaclass_of(m: Machine, name: str, bases: list[Value], given: Value | None) -> Any:
    """The most derived one, as Python chooses it."""
    winner = m.look(given).constant() if given is not None else type
    for base in bases:
        meta = type(base.constant())
        if issubclass(meta, winner):
            winner = meta
        elif not issubclass(winner, meta):
            raise not_captured(name)
    return winner


def prepared(m: Machine, meta: Any, name: str, bases: list[Value], settings: Kwargs) -> Value:
    """The namespace in which the body runs."""
    prepare = mro_lookup(meta, "__prepare__")
    if meta in KNOWN_METACLASSES or not isinstance(prepare, classmethod):
        return DictValue({})
    return m.call_now(m.constant_object(prepare.__func__), [m.constant_object(meta), ConstValue(name), TupleValue(list(bases))], settings)


def entries_of(m: Machine, name: str, namespace: Value) -> dict[str, Value]:
    if not isinstance(namespace, DictValue):
        raise not_captured(name)
    return {m.known(key): m.look(value) for key, value in namespace.know_all(m).values()}


def make_class_of(m: Machine, name: Value, bases: Value, namespace: Value) -> Value:
    """type(name, bases, namespace)"""
    parents = [m.look(base) for base in bases.iterate(m)]
    meta = metaclass_of(m, m.known(name), parents, None)
    if meta not in KNOWN_METACLASSES:
        return m.finish_now(m.constant_object(meta).call(m, [name, TupleValue(parents), namespace], {}))
    return make_class(m, meta, m.known(name), parents, parents, entries_of(m, m.known(name), namespace), {}, m.steps)


CALLS.row(type.__prepare__)(lambda m, args, kwargs: DictValue({}))


# -- metaclasses of the user --------------------------------------------------------------------------------------------
@INSTANTIATE.row("class")
def new_class(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value | None:
    """A call of a metaclass."""
    if not issubclass(cls, type) or cls in KNOWN_METACLASSES:
        return None
    maker = getattr(mro_lookup(cls, "__new__"), "__func__", type.__new__)
    made = m.call_now(m.constant_object(maker), [m.constant_object(cls), *args], kwargs)
    if not isinstance(mro_lookup(cls, "__init__"), types.FunctionType) or not issubclass(made.python_type(), cls):
        return made
    return m.finish_now(initialised(m, made, cls, args, kwargs))


def _class_maker(maker: Callable[..., type], m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """super().__new__(mcs, name, bases, namespace) of a metaclass"""
    meta, name, bases, namespace = args
    parents = [m.look(base) for base in bases.iterate(m)]
    real = functools.partial(maker, meta.constant())
    return make_class(m, real, m.known(name), parents, parents, entries_of(m, m.known(name), namespace), kwargs, m.steps, False)


for _maker in (type.__new__, abc.ABCMeta.__new__):
    CALLS.add(_maker, functools.partial(_class_maker, _maker))


# -- making the class ---------------------------------------------------------------------------------------------------
class Silent:
    """A first base that keeps `type.__new__` from running an __init_subclass__ of the user's."""

    def __init_subclass__(cls, **settings: Any) -> None:
        pass


class SilentABC(abc.ABC):  # noqa: B024
    """The same for bases that are laid out as abc.ABC is."""

    def __init_subclass__(cls, **settings: Any) -> None:  # noqa: B027
        pass


def make_class(m: Machine, meta: Callable[..., type], name: str, given: list[Value], bases: list[Value], namespace: dict[str, Value],
               settings: Kwargs, birth: int, writable: bool = True) -> Value:
    """`meta` makes the stand-in; `given` are the bases as they were written."""
    cell: Any = namespace.pop("__classcell__", None)
    stand_ins = {key: stand_in(m, value) for key, value in namespace.items()}
    if [id(value) for value in given] != [id(value) for value in bases]:
        stand_ins["__orig_bases__"] = tuple(map(real_base, given))
    refuse_unknown_behaviour(name, stand_ins, namespace, bases)
    silent = any(is_custom_hook(mro_lookup(base.constant(), "__init_subclass__")) for base in bases)
    known = {} if silent else {key: m.known(value) for key, value in settings.items()}
    real = m.run_real(create, meta, name, tuple(base.constant() for base in bases), stand_ins, known, silent)
    objects = [(key, value) for key, value in namespace.items() if isinstance(value, ObjectValue)]
    named = [(key, value) for key, value in objects if mro_lookup(value.cls, "__set_name__") is not MISSING]
    made = LocalClass(real, given, namespace, cell, settings, birth, writable and not silent and not named)
    m.remember(real, made)
    if isinstance(cell, CellValue):
        cell.set(m, made)
    for key, value in named:
        m.call_now(value.getattr(m, "__set_name__"), [made, ConstValue(key)], {})
    if silent:
        notify_bases(m, made, settings)
    return made


def create(meta: Callable[..., type], name: str, bases: tuple[type, ...], entries: dict[str, Any], settings: dict[str, Any], silent: bool) -> type:
    def make(parents: tuple[type, ...]) -> type:
        namespace = getattr(meta, "__prepare__", _plain)(name, parents, **settings)
        for key, value in entries.items():
            namespace[key] = value
        return meta(name, parents, namespace, **settings)

    if not silent:
        return make(bases)
    for first in (Silent, SilentABC):
        made = make((first, *bases))
        try:
            made.__bases__ = bases
        except TypeError:           # the layouts differ
            continue
        return made
    raise not_captured(name, ", whose bases have an __init_subclass__")


def _plain(name: str, bases: tuple[type, ...]) -> dict[str, Any]:
    return {}


def is_custom_hook(hook: Any) -> bool:
    return isinstance(hook, classmethod) and hook.__func__.__module__ not in KNOWN_HOOKS


def notify_bases(m: Machine, made: LocalClass, settings: Kwargs) -> None:
    """super(cls, cls).__init_subclass__(**settings)"""
    hook = next(vars(base)["__init_subclass__"] for base in made.cls.__mro__[1:] if "__init_subclass__" in vars(base))
    if is_custom_hook(hook):
        m.call_now(m.constant_object(hook.__func__), [made], settings)
    else:
        m.run_real(hook.__get__(None, made.cls), **{key: m.known(value) for key, value in settings.items()})


def refuse_unknown_behaviour(name: str, stand_ins: dict[str, Any], namespace: dict[str, Value], bases: list[Value]) -> None:
    """What would run for real while capturing, or what runs the class's functions for real."""
    for key, value in stand_ins.items():
        if not isinstance(value, QUIET) and mro_lookup(type(value), "__set_name__") is not MISSING:
            raise not_captured(name, f", whose attribute {key} has a __set_name__")
    parts = {key for key, value in namespace.items() if not is_complete(value)}
    methods = {key for key in parts if isinstance(namespace[key], (FunctionValue, DescriptorValue)) and key not in BY_ENUM}
    if parts and any(issubclass(base.constant(), torch.autograd.Function) for base in bases):
        raise not_captured(name, ", an autograd.Function that reads variables of the function around it")
    if parts - methods and any(issubclass(base.constant(), enum.Enum) for base in bases):
        raise not_captured(name, ", an enum with members that are not constant")


def is_complete(value: Value) -> bool:
    """Is the stand-in the object itself?"""
    parts = value.parts if isinstance(value, DescriptorValue) else [value]
    known = all(part.is_constant() or isinstance(part, FunctionValue) and not closure_of(part) for part in parts)
    return known or value.python_type() in (enum.auto, dict)
