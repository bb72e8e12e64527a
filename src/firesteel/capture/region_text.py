"""Regions as JSON, and back: guards with their sources, and the objects that guards and run functions name.

In: the guards of a captured region and the names of its run function, as they are in one process.  Out: the same in another one, over its own
objects.  What always holds
 - Nothing is pickled, and nothing but modules of ours is imported to read: an object is found again as a name of a loaded module, or where a
   guard's source reads it now, and is taken only where its print (`prints.py`) is the one it had.
 - A guard that cannot be written makes the whole region `Unwritable`, with the reason; what cannot be found again is a `Changed`.
 - Of tensors their facts are written.  The tensors there are now become the examples, after a comparison with the facts.

    writer = RegionWriter(guards, own);  rows = [writer.guard(guard) for guard in guards];  data = writer.tables()
    reader = RegionReader(data, arguments, own);  [reader.guard(row) for row in rows]
"""
from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import operator
import sys
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from firesteel.capture import source as sources
from firesteel.capture.class_reads import ClassFacts, lookup
from firesteel.capture.guards import GlobalState, Guard, SizeQuestion, StateQuery, TensorFacts
from firesteel.capture.marks import dimension_wishes
from firesteel.capture.overlap import Overlap
from firesteel.capture.prints import NoPrint, Prints
from firesteel.capture.region_code import FrameSpec
from firesteel.capture.source import Fixed, Source
from firesteel.homes import is_in_package
from firesteel.layouts import is_named_tuple, new_placement, placement_parts, sharded_classes, unsharded
from firesteel.sym.node import Expr, make


class Unwritable(Exception):
    """Why a region cannot be kept."""


class Changed(Exception):
    """What is not as it was."""


PLAIN = (bool, int, str, type(None))
NAMED = (torch.dtype, torch.layout, torch.memory_format)
SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset, "Size": torch.Size}
STEPS = {cls.__name__: cls for cls in (sources.Attr, sources.Item, sources.OwnDict, sources.HiddenDict, sources.Type, sources.Call,
                                       sources.CellContents, sources.Nth, sources.DimSize, sources.Stride, sources.StorageOffset)}
RARE_STEPS = {"Peek": "iterators", "HasMore": "iterators", "NativeItem": "natives"}      # name -> its module among capture's values
INTERPRETERS = {cls: name for name, cls in vars(types).items() if isinstance(cls, type)}       # types that builtins has no names for
OF_BASE_ALONE = (sources.OwnDict, sources.HiddenDict, sources.Type, sources.StorageOffset)
OF_TENSORS = ("tensor", "part")     # kinds of guards
FACTS = ("cls", "dtype", "device", "layout", "requires_grad", "sizes", "strides", "bits")       # of a tensor
RECORDS = {cls.__name__: cls for cls in (SizeQuestion, StateQuery, Overlap, FrameSpec)}       # written by their fields


class RegionWriter:
    """Mutable.  `own` are objects of this project's that stand in the text by a name."""

    def __init__(self, guards: Sequence[Guard], own: Mapping[str, Any], prints: Prints, homes: dict[types.CodeType, str]):
        self.prints, self.own, self.homes = prints, {id(value): name for name, value in own.items()}, homes
        self.sources: list[Any] = []
        self.objects: list[Any] = []
        self._places: dict[Source, int] = {}
        self._numbers: dict[int, int] = {}
        self._under_way: set[int] = set()
        self._read_by: dict[int, Source] = {}       # where a guard reads an object that has no name
        self._classes = {guard.data for guard in guards if guard.kind == "type"}
        for guard in guards:
            if guard.kind == "type":
                self._read_by.setdefault(id(guard.data), sources.Type(guard.source))
            elif guard.kind in ("identity", "code"):
                self._read_by.setdefault(id(guard.data), guard.source if guard.kind == "identity" else sources.Attr(guard.source, "__code__"))

    def tables(self) -> dict[str, Any]:
        return {"sources": self.sources, "objects": self.objects}

    # -- guards ----------------------------------------------------------------------------------------------------
    def guard(self, guard: Guard) -> list[Any]:
        place = None if guard.source is None else self.source(guard.source)
        if guard.kind in OF_TENSORS:
            return [place, guard.kind, self._facts(guard)]
        if guard.kind == "class":
            return [place, guard.kind, guard.data.sorts()]
        data = [list(row) for row in guard.data.values] if guard.kind == "state" else guard.data
        return [place, guard.kind, self.value(data)]

    def _facts(self, guard: Guard) -> list[Any]:
        facts: TensorFacts = guard.data
        example = facts.example()
        if example is None or type(example) not in (torch.Tensor, torch.nn.Parameter) and not hasattr(example, "__tensor_flatten__"):
            raise Unwritable(f"{guard.name} is a {facts.cls.__name__}")
        return [self.value(one) for one in (*(getattr(facts, name) for name in FACTS), keys_of(example), wishes_of(example))]

    # -- sources ---------------------------------------------------------------------------------------------------
    def source(self, source: Source) -> int:
        known = self._places.get(source)
        if known is None:
            row = self._step(source)
            known = self._places[source] = len(self.sources)
            self.sources.append(row)
        return known

    def _step(self, source: Source) -> list[Any]:
        if type(source) is sources.Local:
            return ["Local", None, source.key]
        if type(source) is Fixed:
            return ["Fixed", None, self.value(source.key), source.label]
        if step_of(type(source).__name__) is not type(source):
            raise Unwritable(f"{source.name} is read by {type(source).__name__}")
        row = [type(source).__name__, self.source(source.base), self.value(source.key)]
        return [*row, source.label] if isinstance(source, sources.CellContents) else row

    # -- values ----------------------------------------------------------------------------------------------------
    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind is complex:
            return {"complex": [self.value(value.real), self.value(value.imag)]}
        if kind.__name__ in SEQUENCES and SEQUENCES[kind.__name__] is kind:
            return {kind.__name__: [self.value(item) for item in value]}
        if is_named_tuple(value):
            return {"named": [self.value(kind), [self.value(item) for item in value]]}
        if (parts := placement_parts(value)) is not None:
            return {"placement": parts}
        if kind in (slice, range):
            return {kind.__name__: [self.value(part) for part in (value.start, value.stop, value.step)]}
        if isinstance(value, NAMED):
            return {"torch": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        if value is Ellipsis:
            return {"ellipsis": None}
        if isinstance(value, Source):
            return {"source": self.source(value)}
        if kind is Expr:
            return {"expr": [value.op, value.dtype, [self.value(arg) for arg in value.args], self.value(value.attr)]}
        if RECORDS.get(kind.__name__) is kind:
            if kind is FrameSpec:
                self.homes.setdefault(value.code, str(value.scope.get("__name__", "")))
            return {"record": [kind.__name__, [self.value(getattr(value, field.name)) for field in dataclasses.fields(value)]]}
        return {"object": self.object(value)}

    def object(self, obj: Any) -> int:
        known = self._numbers.get(id(obj))
        if known is None:
            if id(obj) in self._under_way:
                raise Unwritable(f"{described(obj)} is found by itself alone")
            self._under_way.add(id(obj))
            row = self._object(obj)
            known = self._numbers[id(obj)] = len(self.objects)
            self.objects.append(row)
        return known

    def is_found(self, obj: Any) -> bool:
        """Does a name or a guard lead to it?"""
        return id(obj) in self._read_by or path_of(obj) is not None or isinstance(obj, type) and unsharded(obj) is not None

    @functools.cached_property
    def _members(self) -> dict[int, tuple[str, str, str]]:
        """Functions that were put into a class under another name than their own: module and name of the class, name in it."""
        classes = {cls: path for known in self._classes for cls in known.__mro__ if (path := path_of(cls)) is not None}
        parts = [(path, name, value) for cls, path in classes.items() for name, value in vars(cls).items()]
        return {id(value): (*path, name) for path, name, value in parts if isinstance(value, types.FunctionType)}

    def _object(self, obj: Any) -> list[Any]:
        if id(obj) in self.own:
            return ["own", self.own[id(obj)]]
        if type(obj) is dict and (home := scope_name(obj)) is not None:
            return ["scope", home]
        try:
            text = self.prints.code(obj, "") if isinstance(obj, types.CodeType) else self.prints.of(obj)
        except NoPrint as reason:
            raise Unwritable(f"it holds {reason}") from None
        if isinstance(obj, types.ModuleType):
            return ["module", obj.__name__]
        if (path := path_of(obj)) is not None:
            return ["path", *path, text]
        if id(obj) in self._read_by:
            return ["source", self.source(self._read_by[id(obj)]), text]
        if isinstance(obj, type) and (base := unsharded(obj)) is not None and (path := path_of(base)) is not None:
            return ["sharded", *path, text]
        if id(obj) in self._members:
            return ["member", *self._members[id(obj)], text]
        if isinstance(obj, types.CodeType) and any(code is obj for code in codes_at(self.homes.get(obj, ""), obj.co_qualname)):
            return ["code", self.homes[obj], obj.co_qualname, text]
        raise Unwritable(f"no name and no guard leads to {described(obj)}")


def step_of(name: str) -> type[Source] | None:
    if name in RARE_STEPS:
        return getattr(importlib.import_module(f"firesteel.capture.values.{RARE_STEPS[name]}"), name)
    return STEPS.get(name)


def operators_of(home: str) -> Any:
    """torch's namespace of operators of this name, which is a module from its first use on; None where it is none."""
    return getattr(torch.ops, home.removeprefix("torch.ops.")) if is_in_package(home, "torch.ops") and home != "torch.ops" else None


def described(obj: Any) -> str:
    return f"{getattr(obj, '__qualname__', None) or getattr(obj, 'co_qualname', None) or 'an object'} ({type(obj).__name__})"


def keys_of(tensor: torch.Tensor) -> str:
    """What the C++ check of tensors compares besides the facts."""
    return str(torch._C._dispatch_keys(tensor).raw_repr())


def wishes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The user's marks on its sizes."""
    return tuple(sorted(dimension_wishes(tensor).items()))


def scope_name(scope: dict[str, Any]) -> str | None:
    """The name of the loaded module whose globals these are."""
    name = scope.get("__name__")
    return name if isinstance(name, str) and getattr(sys.modules.get(name), "__dict__", None) is scope else None


def path_of(obj: Any) -> tuple[str, str] | None:
    """The loaded module and the name in it that lead to an object."""
    if isinstance(obj, type) and obj in INTERPRETERS:
        return "types", INTERPRETERS[obj]
    home, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    return (home, name) if isinstance(home, str) and isinstance(name, str) and at_path(home, name) is obj else None


def loaded(home: str) -> Any:
    """A module by its name; ours are loaded where they are asked for."""
    if home not in sys.modules and is_in_package(home, "firesteel"):
        importlib.import_module(home)
    return sys.modules.get(home)


def at_path(home: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(loaded(home))
    except AttributeError:
        return None


def codes_at(home: str, name: str) -> list[types.CodeType]:
    """Code with this name: of a function, below what decorates it, or of functions that it makes."""
    found = at_path(home, name.partition(".<locals>.")[0])
    code = getattr(inspect.unwrap(found), "__code__", None) if callable(found) else None
    return [one for one in inside(code) if one.co_qualname == name] if isinstance(code, types.CodeType) else []


def inside(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from inside(value)


class RegionReader:
    """What a writer wrote, over the objects of this process.  Mutable; raises Changed."""

    def __init__(self, tables: Mapping[str, Any], arguments: Mapping[str, Any], own: Mapping[str, Any], prints: Prints):
        self.rows, self.object_rows, self.arguments, self.own, self.prints = tables["sources"], tables["objects"], arguments, own, prints
        self._sources: dict[int, Source] = {}
        self._objects: dict[int, Any] = {}
        self._values: dict[Source, Any] = {}

    def guard(self, row: Sequence[Any]) -> Guard:
        place, kind, data = row
        source = None if place is None else self.source(place)
        if kind in OF_TENSORS:
            assert source is not None
            return Guard(source, kind, self._facts(source, data))
        if kind == "class":
            assert source is not None
            return Guard(source, kind, self._class_facts(self.fetch(source), data))
        return Guard(source, kind, self._state(self.value(data)) if kind == "state" else self.value(data))

    def _state(self, then: list[list[Any]]) -> GlobalState:
        now = GlobalState.now()
        if now.values != tuple(map(tuple, then)):
            raise Changed(GlobalState(tuple((name, value) for name, value in then)).difference())
        return now

    def _facts(self, source: Source, data: Sequence[Any]) -> TensorFacts:
        now = self.fetch(source)
        *facts, keys, wishes = map(self.value, data)
        if not isinstance(now, torch.Tensor):
            raise Changed(f"{source.name} is a {type(now).__qualname__}; it was a tensor")
        made = TensorFacts(**dict(zip(FACTS, facts)), example=weakref.ref(now))
        mine = TensorFacts.of(now) if now.layout is torch.strided else None
        if mine is None or not all(is_as(getattr(made, name), getattr(mine, name)) for name in FACTS) or keys_of(now) != keys:
            raise Changed(made.difference(source.name, now))
        if wishes_of(now) != wishes:
            raise Changed(f"the marks on sizes of {source.name} are others")
        return made

    def _class_facts(self, cls: type, then: dict[str, str]) -> ClassFacts:
        """The class itself was compared by its print."""
        facts = ClassFacts(cls, {name: lookup(cls, name) for name in then})
        if facts.sorts() != then:
            raise Changed(f"{cls.__qualname__} has other attributes")
        return facts

    def fetch(self, source: Source) -> Any:
        """The value there is now."""
        if source not in self._values:
            base = self.fetch(source.base) if source.base is not None else self.arguments
            try:
                self._values[source] = source.step(base)
            except Exception as error:      # whatever a program's attribute raises: it is not where it was
                raise Changed(f"{source.name} cannot be read ({type(error).__name__}: {error})") from None
        return self._values[source]

    def source(self, place: int) -> Source:
        known = self._sources.get(place)
        if known is None:
            known = self._sources[place] = self._step(*self.rows[place])
        return known

    def _step(self, name: str, base: int | None, key: Any, label: str = "") -> Source:
        if base is None:
            root: Any = getattr(sources, name)
            return root(self.value(key), label) if root is Fixed else root(self.value(key))
        cls: Any = step_of(name)
        inner = self.source(base)
        if cls in OF_BASE_ALONE:
            return cls(inner)
        return cls(inner, label if cls is sources.CellContents else self.value(key))

    def value(self, data: Any) -> Any:
        if type(data) is list:
            return [self.value(item) for item in data]
        if type(data) is not dict:
            return data
        (kind, content), = data.items()
        return READERS[kind](self, content) if kind in READERS else SEQUENCES[kind](map(self.value, content))

    def object(self, number: int) -> Any:
        if number not in self._objects:
            self._objects[number] = self._object(*self.object_rows[number])
        return self._objects[number]

    def _object(self, how: str, *about: Any) -> Any:
        if how == "own":
            return self.own[about[0]]
        if how in ("scope", "module"):
            found: Any = loaded(about[0]) or operators_of(about[0])
            if found is None:
                raise Changed(f"the module {about[0]} is not loaded")
            return found if how == "module" else found.__dict__
        found = self.fetch(self.source(about[0])) if how == "source" else at_path(*about[:2])
        if how == "code":
            found = next((code for code in codes_at(*about[:2]) if self._print(code) == about[2]), None)
        if how == "sharded":
            found = sharded_classes().get(found)
        if how == "member":
            found = getattr(found, "__dict__", {}).get(about[2])
        name = self.source(about[0]).name if how == "source" else ".".join(about[:-1])
        if found is None:
            raise Changed(f"{name} is not loaded")
        if self._print(found) != about[-1]:
            raise Changed(f"the code of {name} is another one")
        return found

    def _print(self, found: Any) -> str:
        try:
            return self.prints.code(found, "") if isinstance(found, types.CodeType) else self.prints.of(found)
        except NoPrint:
            return ""


def is_as(then: Any, now: Any) -> bool:
    """Equal; a size or stride that may change is None."""
    if type(then) is not tuple or type(now) is not tuple:
        return bool(then == now)
    return len(then) == len(now) and all(old is None or old == new for old, new in zip(then, now))


def read_expr(reader: RegionReader, row: Sequence[Any]) -> Expr:
    op, dtype, args, attr = row
    return make(op, dtype, tuple(map(reader.value, args)), reader.value(attr))


READERS: dict[str, Any] = {
    "float": lambda reader, text: float(text), "bytes": lambda reader, text: bytes.fromhex(text),
    "complex": lambda reader, parts: complex(*map(reader.value, parts)), "slice": lambda reader, parts: slice(*map(reader.value, parts)),
    "range": lambda reader, parts: range(*parts),
    "torch": lambda reader, name: getattr(torch, name), "device": lambda reader, text: torch.device(text), "ellipsis": lambda reader, _: ...,
    "source": lambda reader, place: reader.source(place), "object": lambda reader, number: reader.object(number),
    "named": lambda reader, row: reader.value(row[0])(*map(reader.value, row[1])), "placement": lambda reader, row: new_placement(*row),
    "expr": read_expr, "record": lambda reader, row: RECORDS[row[0]](*map(reader.value, row[1])),
}
