"""Rows for small libraries of Python: itertools and operator (by polyfills), functools, collections, heapq, typing, sys."""
from __future__ import annotations

import collections
import contextvars
import functools
import heapq
import itertools
import json
import logging
import re
import sys
import typing
import weakref
from typing import Any

from firesteel.capture import polyfills
from firesteel.capture.effects import DELETED, REPLAY
from firesteel.capture.guards import Guard
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Call
from firesteel.capture.values.base import LazyValue, ObjectKey, UserRaise, Value
from firesteel.capture.values.class_objects import INSTANTIATE, ClassValue
from firesteel.capture.values.const import FRESH, NONE, ConstValue, fold
from firesteel.capture.values.containers import METHODS, ListValue, TupleValue, gives_none, list_pop, sorted_items
from firesteel.capture.values.exceptions import handled_exception
from firesteel.capture.values.functions import Args, FunctionValue, Kwargs
from firesteel.capture.values.mappings import DictValue, call_fromkeys
from firesteel.capture.values.objects import InstanceDict, ObjectValue
from firesteel.errors import Break

for _original, _fn in polyfills.POLYFILLS.items():
    CALLS.add(_original, lambda m, args, kwargs, fn=_fn: m.constant_object(fn).call(m, args, kwargs))


def _arrangements(fn: Any, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """A finite arrangement of items: made at once."""
    settings = {name: m.known(value) for name, value in kwargs.items()}
    if fn is itertools.product:
        rows = fn(*[a.iterate(m) for a in args], **settings)
    else:
        rows = fn(args[0].iterate(m), *map(m.known, args[1:]), **settings)
    return m.iterate_over(TupleValue([TupleValue(list(row)) for row in rows]))


for _fn in (itertools.product, itertools.permutations, itertools.combinations, itertools.combinations_with_replacement):
    CALLS.add(_fn, functools.partial(_arrangements, _fn))


@CALLS.row(itertools.tee)
def call_tee(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    items = args[0].iterate(m)
    count = m.known(args[1]) if len(args) > 1 else 2
    return TupleValue([m.iterate_over(TupleValue(list(items))) for _ in range(count)])


# -- functools ----------------------------------------------------------------------------------------------------------
@CALLS.row(functools.update_wrapper)
def call_update_wrapper(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """Copies names and attributes of the wrapped function, what it lacks left out."""
    given = dict(zip(("wrapper", "wrapped", "assigned", "updated"), args)) | kwargs
    wrapper, wrapped = given["wrapper"], given["wrapped"]
    names = m.known(given["assigned"]) if "assigned" in given else functools.WRAPPER_ASSIGNMENTS
    for name in names:
        try:
            wrapper.setattr(m, name, m.finish_now(wrapped.getattr(m, name)))
        except UserRaise as raised:
            if not issubclass(raised.value.python_type(), AttributeError):
                raise
    for name, value in own_attributes(m, wrapped).items():
        wrapper.setattr(m, name, value)
    wrapper.setattr(m, "__wrapped__", wrapped)
    return wrapper


def own_attributes(m: Machine, fn: Value) -> dict[str, Value]:
    """What is in a function's __dict__."""
    if not isinstance(fn, FunctionValue):
        return {}
    real = {name: m.read_attribute(fn, name) for name in vars(fn.fn)} if fn.fn is not None else {}
    stored = {name: value for name, value in m.effects.attributes(fn).items() if name not in functools.WRAPPER_ASSIGNMENTS}
    return {name: value for name, value in {**real, **stored}.items() if value is not DELETED}


# -- collections --------------------------------------------------------------------------------------------------------
def refill(deque: collections.deque, items: list[Any]) -> None:
    deque.clear()
    deque.extend(items)


REPLAY.add("refill", lambda e, target, data, name: f"{e.constant(refill)}({target}, {data[0]})")


class DequeValue(ListValue):
    """A collections.deque; a change of the user's is replayed by refilling it."""

    cls = collections.deque

    def __init__(self, items: list[Value], maxlen: int | None = None, source: Any = None, obj: Any = None):
        super().__init__(items if maxlen is None else items[max(0, len(items) - maxlen):], source, obj)
        self.maxlen = maxlen

    def like(self, items: list[Value]) -> DequeValue:
        return DequeValue(items, self.maxlen)

    def make(self, items: list[Any]) -> Any:
        return collections.deque(items, self.maxlen)

    def change(self, m: Machine, items: list[Value], kind: str, *data: Value, left: bool = False) -> None:
        if self.maxlen is not None:
            items = items[:self.maxlen] if left else items[max(0, len(items) - self.maxlen):]
        m.effects.change(self, "items", items)
        m.effects.log("refill", self, ListValue(list(items)))

    def getattr(self, m: Machine, name: str) -> Value:
        return ConstValue(self.maxlen) if name == "maxlen" else super().getattr(m, name)

    def _added(self) -> type:
        return collections.deque

    def rebuild(self, e: Emitter) -> str:
        return f"{e.constant(collections.deque)}({super().rebuild(e)}, {self.maxlen})"


@CALLS.row(collections.deque)
def call_deque(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    given = dict(zip(("iterable", "maxlen"), args)) | kwargs
    items = given["iterable"].iterate(m) if "iterable" in given else []
    return DequeValue(list(items), m.known(given.get("maxlen", NONE)))


for _name, _change in {
    "append": lambda m, self, args, kwargs: self.change(m, [*self.items, args[0]], "append"),
    "appendleft": lambda m, self, args, kwargs: self.change(m, [args[0], *self.items], "append", left=True),
    "extendleft": lambda m, self, args, kwargs: self.change(m, [*args[0].iterate(m)[::-1], *self.items], "extend", left=True),
}.items():
    METHODS.add((DequeValue, _name), gives_none(_change))


@METHODS.row((DequeValue, "popleft"))
def deque_popleft(m: Machine, self: DequeValue, args: Args, kwargs: Kwargs) -> Value:
    if not self.items:
        raise m.raise_real(IndexError("pop from an empty deque"))
    return list_pop(m, self, [ConstValue(0)], {})


@METHODS.row((DequeValue, "rotate"))
def deque_rotate(m: Machine, self: DequeValue, args: Args, kwargs: Kwargs) -> Value:
    turned = collections.deque(self.items)
    turned.rotate(m.known_index(args[0]) if args else 1)
    self.change(m, list(turned), "assign")
    return NONE


METHODS.row((DequeValue, "copy"))(lambda m, self, args, kwargs: DequeValue(list(self.items), self.maxlen))


@CALLS.row(collections._count_elements)     # type: ignore[attr-defined]  # what Counter calls
def call_count_elements(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """What collections.Counter does with an iterable."""
    for item in args[1].iterate(m):
        key = m.look(item)
        before = m.finish_now(args[0].getattr(m, "get").call(m, [key, ConstValue(0)], {}))
        args[0].setitem(m, key, m.binary("+", before, ConstValue(1)))
    return NONE


for _cls in (dict, collections.OrderedDict, collections.defaultdict):
    CALLS.add(_cls.fromkeys, functools.partial(call_fromkeys, cls=_cls))


@CALLS.row(collections.namedtuple)
def call_namedtuple(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """One class for all calls of the region's code."""
    settings = {name: m.known(value) for name, value in kwargs.items()}
    settings.setdefault("module", m.frames[-1].scope.get("__name__"))
    return m.constant_object(m.run_real(collections.namedtuple, *map(m.known, args), **settings))


def _extremes(reverse: bool, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    given = dict(zip(("n", "iterable", "key"), args)) | kwargs
    settings = {"key": given.get("key", NONE), "reverse": ConstValue(reverse)}
    return ListValue(sorted_items(m, given["iterable"].iterate(m), settings)[:m.known_index(given["n"])])


CALLS.add(heapq.nlargest, functools.partial(_extremes, True))
CALLS.add(heapq.nsmallest, functools.partial(_extremes, False))


# -- introspection ------------------------------------------------------------------------------------------------------
def _folded(fn: Any, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """A function of known arguments that looks at nothing else."""
    return fold(m, fn, *map(m.known, args), **{k: m.known(v) for k, v in kwargs.items()})


for _fn in (json.dumps, json.loads, re.compile, re.match, re.fullmatch, re.search, re.sub, re.split, re.findall, re.finditer, re.escape,
            logging.getLogger, typing.TypeVar):
    CALLS.add(_fn, functools.partial(_folded, _fn))
FRESH.row(re.Pattern, re.Match, logging.Logger, typing.TypeVar)(lambda m, obj: m.constant_object(obj))
FRESH.add(type(re.finditer("", "")), lambda m, obj: ListValue([m.fresh(found) for found in obj]).iterator(m))
CALLS.row(locals)(lambda m, args, kwargs: DictValue({name: (ConstValue(name), value) for name, value in m.local_variables().items()}))
CALLS.row(globals)(lambda m, args, kwargs: m.scope_value(m.frames[-1].scope))


@CALLS.row(dir)
def call_dir(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if not args:
        return m.fresh(sorted(m.local_variables()))
    if isinstance(args[0], ObjectValue) and args[0].cls.__dir__ is object.__dir__:
        own = [key.constant() for key, _ in InstanceDict(args[0]).know_all(m).values()]
        m.guard_class_names(args[0].cls)
        return m.fresh(sorted({*dir(args[0].cls), *own}))
    if isinstance(args[0], ClassValue):
        m.guard_class_names(args[0].cls)
    if isinstance(args[0], ClassValue) or args[0].is_constant():
        return m.fresh(dir(args[0].constant()))
    raise Break("introspection", name="dir")


def referent(reference: weakref.ref) -> Any:
    return reference()


class WeakReference(Value):
    """weakref.ref(x) of an object made inside, or of the user's."""

    cls = weakref.ref
    always_true = True
    form = "{cls}({owner}, {callback})"

    def __init__(self, owner: Value, source: Any = None, obj: Any = None, callback: Value = NONE):
        self.owner, self.source, self.obj, self.callback = owner, source, obj, callback

    def hash_key(self, m: Machine) -> Any:
        """A reference is equal to others of its object, where that is equal to itself alone."""
        key = m.look(self.owner).hash_key(m)
        if not isinstance(key, ObjectKey):
            raise Break("operator", name="hash()", value="weak reference")
        return weakref.ref, key

    def as_key(self, m: Machine, container: Any) -> Value:
        owner = m.look(self.owner)
        if self.hash_key(m) not in container.entries and owner.source is not None:
            m.guard(Guard(owner.source, "identity", owner.identity()))     # another object may be in the set
        return self

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        return m.look(self.owner)


@CALLS.row(weakref.ref)
def call_weakref(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    callback = args[1] if len(args) > 1 else NONE
    m.look(args[0]).watched = True
    if callback is not NONE and m.look(args[0]).identity() is None:
        raise Break("introspection", name="weakref.ref with a callback, of an object made inside")      # it may be called inside
    return WeakReference(args[0], callback=callback)


@INSTANTIATE.row("weak reference of another class")
def new_reference(m: Machine, cls: Any, args: Args, kwargs: Kwargs) -> Value | None:
    """weakref.KeyedRef(x, callback, key), which is made for real."""
    if issubclass(cls, weakref.ref) and args:
        m.look(args[0]).watched = True
    return None


class LazyProperty(Value):
    """Categorical.logits, asked of the class: a distribution looks at the type alone, to know what it need not check."""

    form = "{cls}({wrapped})"

    def __init__(self, cls: type, wrapped: Value):
        self.cls, self.wrapped = cls, wrapped


@INSTANTIATE.row("lazy property of a distribution")
def new_lazy_property(m: Machine, cls: Any, args: Args, kwargs: Kwargs) -> Value | None:
    is_one = cls.__module__ == "torch.distributions.utils" and issubclass(cls, property) and len(args) == 1 and not kwargs
    return LazyProperty(cls, args[0]) if is_one else None


@CALLS.row(sys.exc_info)
def call_exc_info(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if handled_exception(m, "sys.exc_info") is not NONE:
        raise Break("introspection", name="sys.exc_info")
    return TupleValue([NONE, NONE, NONE])


CALLS.row(sys.exception)(lambda m, args, kwargs: handled_exception(m, "sys.exception"))


def context_variable(variable: contextvars.ContextVar) -> Any:
    try:
        return variable.get()
    except LookupError:
        return DELETED


@CALLS.row(contextvars.ContextVar.get)
def call_context_variable_get(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """Its value is read in each call; a variable without one is not captured."""
    variable = args[0].identity()
    if variable is None or len(args) > 1 or context_variable(variable) is DELETED:
        raise Break("introspection", name="ContextVar.get")
    return m.look(LazyValue(variable.get(), Call(args[0].source, context_variable)))


CALLS.row(typing.cast)(lambda m, args, kwargs: args[1] if len(args) > 1 else kwargs["val"])
