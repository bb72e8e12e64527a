"""Prints: short texts of functions, classes and modules, equal in two processes where their code is the same.

In: objects that a capture relied on.  Out: a digest for each.  What always holds
 - No address, path, hash seed or time is in a print.
 - Code of the user's is printed whole: instructions, constants, names, lines, defaults, what its closure holds.  Code of torch and of the standard
   library, whose versions are part of every key, is printed by where it is written: a function that somebody put in its place is another one.
 - What is printed is noted: `codes` and `functions`, all that a print covers; `homes`, the modules that they were written in.
 - An object of another kind has no print: `NoPrint` says which.

    Prints().of(Model)      # "6ab0..."
"""
from __future__ import annotations

import abc
import functools
import hashlib
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch

from firesteel.capture import marks
from firesteel.homes import is_in_package, is_library
from firesteel.layouts import DeviceMesh, mesh_text
from firesteel.table import Table


class NoPrint(Exception):
    """What has no print, in words."""


LITERALS = (bool, int, float, complex, str, bytes, type(None), type(...))
NAMED = (torch.dtype, torch.layout, torch.memory_format, torch.device)
# attributes of classes that do not depend on their code, or change as a program runs
UNPRINTED = frozenset({"__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl", "__annotations__", "__firstlineno__",
                       "__static_attributes__", "__parameters__", "__orig_bases__", "__module__"})
NATIVE = tuple(dict.fromkeys((types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.MethodWrapperType,
                              types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType)))
ADDRESSES = ("__source__", "_torchdynamo_wrapper_id")     # attributes of functions that differ from process to process
OF_CODE = ("co_qualname", "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount", "co_posonlyargcount",
           "co_kwonlyargcount", "co_exceptiontable", "co_firstlineno", "co_linetable")
DEPTH = 8       # functions in closures of functions


class Prints:
    """Mutable; `of` and `attributes` may be asked again and again."""

    def __init__(self) -> None:
        self.codes: set[types.CodeType] = set()
        self.functions: dict[int, types.FunctionType] = {}
        self.homes: dict[str, dict[str, Any]] = {}      # name of a module -> its globals
        self._known: dict[int, tuple[Any, str]] = {}
        self._classes: dict[type, str] = {}
        self._open: list[types.FunctionType] = []       # those being printed

    def of(self, obj: Any) -> str:
        """Of something that can be called, or a module."""
        known = self._known.get(id(obj))
        if known is None:
            known = self._known[id(obj)] = obj, digest(self._whole(obj))
        return known[1]

    def _whole(self, obj: Any) -> str:
        if isinstance(obj, type):
            return f"class {[self._class(cls) for cls in obj.__mro__ if cls is not object]}"
        kind = types.ModuleType if isinstance(obj, types.ModuleType) else type(obj)
        if kind in KINDS:
            return KINDS[kind](self, obj)
        raise NoPrint(f"an object of the type {type(obj).__module__}.{type(obj).__qualname__}")

    def part(self, obj: Any, depth: int = 0) -> str:
        """Of what a function, a class or a module holds; of objects that are no code the type alone, since their contents are guarded where they
        are read."""
        kind = type(obj)
        if kind is types.FunctionType and depth < DEPTH:
            return self.function(obj, depth + 1)
        if kind in LITERALS:
            return repr(obj)
        if kind in KINDS and depth < DEPTH:
            return KINDS[kind](self, obj)
        if isinstance(obj, type):
            return f"{obj.__module__}.{obj.__qualname__}"
        if kind is tuple:
            return f"({', '.join(self.part(item, depth) for item in obj)})"
        return str(obj) if kind in NAMED else f"a {kind.__module__}.{kind.__qualname__}"

    def _class(self, cls: type) -> str:
        known = self._classes.get(cls)
        if known is None:
            if not is_library(type(cls).__module__):
                raise NoPrint(f"the class {cls.__qualname__}, which {type(cls).__qualname__} made")
            own = {name: value for name, value in vars(cls).items() if name not in UNPRINTED and not is_native_of(cls, name, value)}
            known = self._classes[cls] = digest(f"{self.part(cls)} {self.attributes(own)} {registered(cls)}")
            self._note(cls.__module__)
        return known

    def attributes(self, own: Mapping[str, Any]) -> str:
        return str([f"{name} {self.part(value)}" for name, value in sorted(own.items())])

    def _note(self, name: str, scope: dict[str, Any] | None = None) -> None:
        if name not in self.homes and not is_in_package(name, "firesteel"):
            self.homes[name] = scope if scope is not None else {}

    def function(self, fn: types.FunctionType, depth: int = 0) -> str:
        if fn in self._open:        # functions hold each other: those that torch disables, once its compiler is loaded
            return f"function {fn.__module__} {fn.__qualname__} again"
        self._open.append(fn)
        try:
            return self._function(fn, depth)
        finally:
            self._open.pop()

    def _function(self, fn: types.FunctionType, depth: int) -> str:
        home = str(fn.__globals__.get("__name__", ""))
        self._note(home, fn.__globals__)
        self.functions[id(fn)] = fn
        if is_library(home) and fn.__closure__ is None and not fn.__dict__:
            return f"function {fn.__module__} {self.code(fn.__code__, home)} {marked(fn)}"
        held = [self._content(cell, depth) for cell in fn.__closure__ or ()]
        more = {name: value for name, value in vars(fn).items() if name not in ADDRESSES}
        defaults = [self.part(value, depth) for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).items())]
        return f"function {fn.__module__} {fn.__qualname__} {self.code(fn.__code__, home)} {defaults} {held} {self.attributes(more)} {marked(fn)}"

    def _content(self, cell: types.CellType, depth: int) -> str:
        try:
            return self.part(cell.cell_contents, depth)
        except ValueError:
            return "empty"

    def code(self, code: types.CodeType, home: str) -> str:
        self.note_code(code)
        if is_library(home):
            return f"{code.co_qualname} {os.path.basename(code.co_filename)} {code.co_firstlineno} {len(code.co_code)}"
        return digest(self._code_text(code))

    def note_code(self, code: types.CodeType) -> None:
        if code not in self.codes:
            self.codes.add(code)
            for value in code.co_consts:
                if isinstance(value, types.CodeType):
                    self.note_code(value)

    def _code_text(self, code: types.CodeType) -> str:
        consts = [self._code_text(value) if isinstance(value, types.CodeType) else constant_text(value) for value in code.co_consts]
        return repr((consts, *(getattr(code, name) for name in OF_CODE)))


def registered(cls: type) -> list[str]:
    """The classes registered as virtual subclasses of an abstract one."""
    known = abc._get_dump(cls)[0] if isinstance(cls, abc.ABCMeta) else ()       # type: ignore[attr-defined]  # CPython's
    return sorted(f"{one.__module__}.{one.__qualname__}" for ref in known if (one := ref()) is not None)


def marked(fn: Any) -> list[str]:
    """Marks of the user's that are no attributes of the function."""
    noted = marks.NOTED or sys.modules.get("torch._dynamo.trace_rules") is not None      # boundary: where the peer notes functions by their id
    return [mark for mark in marks.PEER_MARKS if marks.is_marked(fn, mark)] if noted else []


def constant_text(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(constant_text, value))})"
    return f"({', '.join(map(constant_text, value))},)" if type(value) is tuple else repr(value)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _native(prints: Prints, obj: Any) -> str:
    owner = getattr(obj, "__objclass__", None) or getattr(obj, "__self__", None)
    whose: Any = owner if isinstance(owner, (type, types.ModuleType)) or owner is None else type(owner)
    place = f"{getattr(whose, '__module__', '')} {getattr(whose, '__qualname__', None) or getattr(whose, '__name__', '')}"
    return f"native {type(obj).__name__} {obj.__name__} of {place} {marked(obj)}"


def is_native_of(cls: type, name: str, value: Any) -> bool:
    """Is it the method or member that C code gave this class under this name?"""
    return getattr(value, "__objclass__", None) is cls and type(value) in NATIVE and value.__name__ == name


def _property(prints: Prints, obj: Any) -> str:
    return f"property {[prints.part(one) for one in (obj.fget, obj.fset, obj.fdel)]}"


# kind of object -> function(prints, object): what is code
KINDS: Table[Callable[..., str]] = Table("kind of object that has a print", "capture/prints.py")
KINDS.add(types.FunctionType, Prints.function)
KINDS.row(*NATIVE)(_native)
KINDS.add(property, _property)
KINDS.row(staticmethod, classmethod)(lambda prints, obj: f"{type(obj).__name__} {prints.part(obj.__func__)}")
KINDS.add(functools.cached_property, lambda prints, obj: f"cached {prints.part(obj.func)}")
KINDS.add(functools._lru_cache_wrapper, lambda prints, obj: f"remembered {prints.part(obj.__wrapped__)}")
KINDS.add(typing._SpecialForm, lambda prints, obj: str(obj))
KINDS.add(types.MethodType, lambda prints, obj: f"method {prints.part(obj.__func__)}")
if DeviceMesh is not None:
    KINDS.add(DeviceMesh, lambda prints, obj: f"mesh {mesh_text(obj)}")
KINDS.add(types.ModuleType, lambda prints, obj: f"module {obj.__name__}")
KINDS.row(torch._ops.OpOverload, torch._ops.OpOverloadPacket)(lambda prints, obj: f"operator {obj}")
