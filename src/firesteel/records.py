"""`dataclass`, as in the standard library, but quick to define: with the library's own, 130 records are a third of importing the compiler.

The library compiles five or six functions of each class from text when the class is defined.  Here comparing, hashing and printing are shared
functions, and `__init__` is compiled when the first object is made.  What is not used here is not there (ordering, keyword-only fields, InitVar).
`field`, `fields` and `replace` are the library's.

    @dataclass(frozen=True, slots=True)
    class Axis:
        name: str
        extent: Size
"""
from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    def dataclass(cls=None, *, frozen=False, slots=False, eq=True):
        return _define(cls, frozen, slots, eq) if cls is not None else lambda cls: _define(cls, frozen, slots, eq)


def _define(cls: type, frozen: bool, slots: bool, eq: bool) -> type:
    own = _own_fields(cls)
    fields = {name: row for base in reversed(cls.__mro__[1:]) for name, row in getattr(base, "__dataclass_fields__", {}).items()} | own
    if slots:
        body = {name: value for name, value in vars(cls).items() if name not in own and name not in ("__dict__", "__weakref__")}
        cls = type(cls)(cls.__name__, cls.__bases__, {**body, "__slots__": tuple(own), "__qualname__": cls.__qualname__})
    else:
        for name, row in own.items():
            if row.default is not MISSING:
                setattr(cls, name, row.default)
            elif name in vars(cls):
                delattr(cls, name)
    methods: dict[str, Any] = {"__init__": _first_init(cls, frozen), "__repr__": _repr, "__match_args__": tuple(fields)}
    if eq:
        methods |= _comparing([row.name for row in fields.values() if row.compare], frozen)
    if frozen:
        methods |= _frozen(cls, fields)
    if frozen and slots:
        methods |= {"__getstate__": _state, "__setstate__": _set_state}
    for name, value in methods.items():
        if vars(cls).get(name) is None:
            setattr(cls, name, value)
    cls.__dataclass_fields__ = fields       # type: ignore[attr-defined]  # after _first_init: `fields` and `replace` of the library ask for it
    return cls


def _own_fields(cls: type) -> dict[str, Field]:
    rows = {}
    for name, kind in vars(cls).get("__annotations__", {}).items():
        default = vars(cls).get(name, MISSING)
        row: Any = default if isinstance(default, Field) else dataclasses.field(default=default)
        if type(row.default).__hash__ is None:
            raise ValueError(f"the default of {cls.__name__}.{name} is mutable: use default_factory")
        row.name, row.type, row._field_type = name, kind, dataclasses._FIELD        # type: ignore[attr-defined]
        rows[name] = row
    return rows


def _first_init(cls: Any, frozen: bool) -> Callable[..., None]:
    """Compiles the real one, puts it in its own place, and calls it."""
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__ = init = _init(cls, frozen)
        init(self, *args, **kwargs)
    return __init__


def _init(cls: Any, frozen: bool) -> Callable[..., None]:
    scope: dict[str, Any] = {"MISSING": MISSING, "set_": object.__setattr__}
    parameters, lines = ["self"], []
    for name, row in cls.__dataclass_fields__.items():
        value = name
        scope |= {f"default_{name}": row.default, f"make_{name}": row.default_factory}
        if not row.init:
            value = f"make_{name}()" if row.default_factory is not MISSING else f"default_{name}" if row.default is not MISSING else ""
        elif row.default_factory is not MISSING:
            parameters.append(f"{name}=MISSING")
            value = f"make_{name}() if {name} is MISSING else {name}"
        else:
            parameters.append(name if row.default is MISSING else f"{name}=default_{name}")
        if value and frozen:
            slot: Any = getattr(cls, name, None)
            slotted = type(slot) is MemberDescriptorType
            scope[f"set_{name}"] = slot.__set__ if slotted else None
            lines.append(f"set_{name}(self, {value})" if slotted else f"set_(self, {name!r}, {value})")
        elif value:
            lines.append(f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n    " + "\n    ".join(lines or ["pass"]), scope)
    return scope["__init__"]


def _comparing(names: list[str], frozen: bool) -> dict[str, Any]:
    getter = operator.attrgetter(*names) if names else lambda self: ()
    key = getter if len(names) != 1 else lambda self: (getter(self),)

    def __eq__(self: Any, other: Any) -> Any:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(key(self))
    return {"__eq__": __eq__, "__hash__": __hash__ if frozen else None}


def _frozen(cls: type, fields: dict[str, Field]) -> dict[str, Any]:
    """As in the library, a subclass may have attributes of its own."""
    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in fields:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in fields:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        object.__delattr__(self, name)
    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def _repr(self: Any) -> str:
    return f"{type(self).__qualname__}({', '.join(f'{row.name}={getattr(self, row.name)!r}' for row in dataclasses.fields(self) if row.repr)})"


def _state(self: Any) -> list[Any]:
    return [getattr(self, row.name) for row in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for row, value in zip(dataclasses.fields(self), state):
        object.__setattr__(self, row.name, value)
