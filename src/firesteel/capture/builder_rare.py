"""Rows of `WRAPPERS` for kinds of objects that programs have less often: iterators, contexts, random generators, handles, forms of typing."""
from __future__ import annotations

import collections.abc
import contextlib
import contextvars
import functools
import gc
import inspect
import operator
import re
import types
import typing
import weakref
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from firesteel.capture.builder import BASES, WRAPPERS, guard, guarded, opaque, wrap_fixed, wrap_object
from firesteel.capture.protocols import Machine
from firesteel.capture.source import Attr, Call, Fixed, Item, Source
from firesteel.capture.values.arrays import ArrayValue
from firesteel.capture.values.base import FixedObject, LazyValue, Value
from firesteel.capture.values.class_objects import AliasValue
from firesteel.capture.values.contexts import AUTOCAST_PARTS, AUTOCASTS, ExitValue, ModeExit, context_of
from firesteel.capture.values.hooks import RealHandle
from firesteel.capture.values.iterators import (
    PEEKABLE,
    FilterIterator,
    MapIterator,
    RealIterator,
    ZipIterator,
    is_peekable,
    is_strict,
    parts_of,
)
from firesteel.capture.values.library import WeakReference, referent
from firesteel.capture.values.mappings import DictValue, DictView
from firesteel.capture.values.natives import builtin_part
from firesteel.capture.values.python_random import RANDOM, PythonRandom
from firesteel.capture.values.randomness import RandomGenerator

# -- NumPy --------------------------------------------------------------------------------------------------------------
WRAPPERS.add(np.ndarray, guarded("type", ArrayValue))
BASES.add(np.dtype, wrap_fixed)         # there is one object of each that torch knows


# -- views of dictionaries ----------------------------------------------------------------------------------------------
def viewed(view: Any) -> Any:
    """The dictionary behind d.keys(), d.values() or d.items()."""
    return gc.get_referents(view)[0]


def wrap_view(kind: str, m: Machine, obj: Any, source: Source) -> Value:
    guard(m, source, "type", type(obj))
    owner = builtin_part(m.read(viewed(obj), Call(source, viewed)))
    return DictView(owner, kind, source, obj) if isinstance(owner, DictValue) else opaque(m, obj, source)


for _kind in DictView.TYPES:
    for _dict in (dict, collections.OrderedDict):
        WRAPPERS.add(type(getattr(_dict(), _kind)()), functools.partial(wrap_view, _kind))


# a match that was found while capturing is known; one that comes in is another in each call
WRAPPERS.row(re.Match)(lambda m, obj, source: FixedObject(obj, source) if type(source) is Fixed else opaque(m, obj, source))


# -- iterators, and what is made by a call --------------------------------------------------------------------------------
@WRAPPERS.row(operator.itemgetter, operator.attrgetter, operator.methodcaller)
def wrap_getter(m: Machine, obj: Any, source: Source) -> Value:
    """operator.itemgetter and its relatives are known by how they were made."""
    guard(m, source, "identity", obj)
    made, args = obj.__reduce__()
    kwargs = made.keywords if isinstance(made, functools.partial) else {}
    return m.call_now(m.constant_object(type(obj)), [m.constant_object(arg) for arg in args], {k: m.constant_object(v) for k, v in kwargs.items()})


@WRAPPERS.row(weakref.ReferenceType)
def wrap_weak_reference(m: Machine, obj: Any, source: Source) -> Value:
    """Its referent is read in each call."""
    guard(m, source, "type", weakref.ReferenceType)
    return WeakReference(LazyValue(obj(), Call(source, referent)), source, obj)


wrap_iterator = guarded("type", RealIterator)
WRAPPERS.row(*dict.fromkeys(PEEKABLE))(wrap_iterator)


def iterator_parts(m: Machine, obj: Any, source: Source) -> list[Value]:
    """What a zip, map or filter object was made of; these have no state of their own, so advancing the parts advances them."""
    guard(m, source, "type", type(obj))
    parts = parts_of(obj)
    guard(m, Call(source, parts_of), "length", len(parts))
    return [m.look(LazyValue(part, Item(Call(source, parts_of), i))) for i, part in enumerate(parts)]


@WRAPPERS.row(zip)
def wrap_zip(m: Machine, obj: Any, source: Source) -> Value:
    guard(m, Call(source, is_strict), "equals", is_strict(obj))
    return ZipIterator(iterator_parts(m, obj, source), is_strict(obj), source, obj)


@WRAPPERS.row(map)
def wrap_map(m: Machine, obj: Any, source: Source) -> Value:
    fn, *parts = iterator_parts(m, obj, source)
    return MapIterator(fn, parts, source, obj)


@WRAPPERS.row(filter)
def wrap_filter(m: Machine, obj: Any, source: Source) -> Value:
    fn, part = iterator_parts(m, obj, source)
    return FilterIterator(fn, part, source, obj)


@WRAPPERS.row(enumerate)
def wrap_enumerate(m: Machine, obj: Any, source: Source) -> Value:
    if not is_peekable(obj):
        return opaque(m, obj, source)
    guard(m, Call(source, is_peekable), "truth", True)
    return wrap_iterator(m, obj, source)


# -- contexts and hooks --------------------------------------------------------------------------------------------------
wrap_context = guarded("type", context_of)
WRAPPERS.row(torch.no_grad, torch.enable_grad, torch.autograd.profiler.record_function)(wrap_context)


@WRAPPERS.row(torch.inference_mode)
def wrap_inference_mode(m: Machine, obj: Any, source: Source) -> Value:
    guard(m, Attr(source, "mode"), "equals", obj.mode)
    return wrap_context(m, obj, source)


@WRAPPERS.row(*AUTOCASTS)
def wrap_autocast(m: Machine, obj: Any, source: Source) -> Value:
    for name in AUTOCAST_PARTS:
        guard(m, Attr(source, name), "equals", getattr(obj, name))
    return wrap_context(m, obj, source)


@WRAPPERS.row(ModeExit)
def wrap_exit(m: Machine, obj: ModeExit, source: Source) -> Value:
    guard(m, Attr(source, "restore"), "equals", obj.restore)
    return ExitValue(obj.restore, source, obj)


WRAPPERS.add(types.CoroutineType, opaque)
BASES.add(contextlib.AbstractContextManager, wrap_object)
WRAPPERS.add(RemovableHandle, guarded("type", RealHandle))


# -- random numbers ------------------------------------------------------------------------------------------------------
@WRAPPERS.row(torch.Generator)
def wrap_random_generator(m: Machine, obj: torch.Generator, source: Source) -> Value:
    guard(m, source, "type", torch.Generator)
    guard(m, Attr(source, "device"), "equals", obj.device)
    return RandomGenerator(m, obj, source)


WRAPPERS.row(*RANDOM)(guarded("type", PythonRandom))


# -- forms of typing -----------------------------------------------------------------------------------------------------
for _form in dict.fromkeys([typing.TypeVar, typing.ParamSpec, typing.ParamSpecArgs, typing.ParamSpecKwargs, typing.TypeVarTuple,
                            *(type(getattr(typing, name)) for name in ("Any", "Optional", "Callable", "List", "Tuple")),
                            type(typing.Union), type(typing.Union[int, str]), types.UnionType,
                            inspect.Signature, inspect.Parameter, types.GetSetDescriptorType, re.Pattern, contextvars.ContextVar,
                            type(collections.abc.Callable[[int], str])]):
    if _form is not type and _form not in WRAPPERS:
        WRAPPERS.add(_form, wrap_fixed)


WRAPPERS.row(types.GenericAlias, type(typing.List[int]))(guarded("identity", AliasValue))       # noqa: UP006  Box[int]
