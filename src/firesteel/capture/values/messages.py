"""Logging and warnings: calls whose only result is a message.  They are effects, replayed in order after the graph, so they do not break.

`functools.lru_cache` belongs here because of its use as "say it once": a cached function is inlined where it changes nothing; where it
only gives messages, the cached function itself is replayed, so that its cache decides as in eager; anything else breaks.

    logger.warning_once("...")      # replayed: c_warning_once(c_logger, "...")
"""
from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

from firesteel.capture.effects import REPLAY
from firesteel.capture.guards import Guard
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Call, Fixed
from firesteel.capture.values.base import CallableObject, Value
from firesteel.capture.values.const import NONE
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.errors import Break


@REPLAY.row("call")
def replay_call(e: Any, target: str, data: list[str], name: str) -> str:
    """target(*data); the last values are keywords, named by `name`."""
    keywords = name.split()
    plain = data[:len(data) - len(keywords)]
    return f"{target}({', '.join([*plain, *(f'{k}={d}' for k, d in zip(keywords, data[len(plain):]))])})"


class Replayed(Value):
    """A function that is called after the graph."""

    def __init__(self, fn: Any):
        self.fn, self.source = fn, Fixed(fn)

    def rebuild(self, e: Emitter) -> str:
        return e.constant(self.fn)


def replay(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Value:
    m.effects.log("call", Replayed(fn), *args, *kwargs.values(), name=" ".join(kwargs))
    return NONE


for _fn in (logging.Logger.debug, logging.Logger.info, logging.Logger.warning, logging.Logger.error, logging.Logger.critical,
            logging.Logger.log, logging.Logger.exception, logging.debug, logging.info, logging.warning, logging.error, logging.critical,
            logging.log, warnings._filters_mutated):     # type: ignore[attr-defined]  # after a change of the filters
    CALLS.add(_fn, functools.partial(lambda m, args, kwargs, fn: replay(m, fn, args, kwargs), fn=_fn))


def may_raise(module: Any) -> bool:
    """Is there a filter that makes errors of warnings?"""
    return any(given[0] == "error" for given in module.filters)


def is_recorded(m: Machine) -> bool:
    """Does a function made inside print warnings?"""
    written: list[Any] = [m.effects.written(m.scope_value(vars(warnings)), name) for name in ("showwarning", "_showwarnmsg_impl")]
    return any(value is not None and value.source is None and getattr(value, "owner", value).source is None for value in written)


def may_raise_inside(m: Machine) -> bool:
    """As `may_raise`, for filters that the program has set."""
    filters: Any = m.effects.written(m.scope_value(vars(warnings)), "filters")
    return filters is not None and any(m.known(m.look(given))[0] == "error" for given in filters.iterate(m))


@CALLS.row(warnings.warn)
def call_warn(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """Where warnings are recorded or raised, the program continues with the result of it."""
    if may_raise(warnings) or is_recorded(m) or may_raise_inside(m):
        raise Break("warning", name="warnings.warn where warnings are recorded or raised")
    m.guard(Guard(Call(Fixed(warnings), may_raise), "equals", False))
    return replay(m, warnings.warn, args, kwargs)


class MadeCache(Value):
    """functools.lru_cache(...)(fn), made inside: known results are found by their arguments."""

    cls = functools._lru_cache_wrapper
    always_true = True

    def __init__(self, fn: Value, maxsize: Value, typed: Value):
        self.fn, self.maxsize, self.typed = fn, maxsize, typed
        self.known: dict[Any, Value] = {}

    def getattr(self, m: Machine, name: str) -> Value:
        written = m.effects.written(self, name)
        if written is not None:
            return written
        return self.fn if name == "__wrapped__" else super().getattr(m, name)

    def setattr(self, m: Machine, name: str, value: Value) -> None:
        m.effects.store_attr(self, name, value)

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if m.known(self.maxsize) is not None and len(self.known) >= m.known(self.maxsize):
            raise Break("cache", name="a cached function whose cache is full")
        key = (*[a.hash_key(m) for a in args], *[(name, v.hash_key(m)) for name, v in kwargs.items()])
        if key not in self.known:
            result = m.call_now(self.fn, args, kwargs)
            m.effects.change(self, "known", {**self.known, key: result})
        return self.known[key]

    def rebuild(self, e: Emitter) -> str:
        if self.known:
            raise Break("object", name="a cached function that was called")
        return f"{e.constant(functools.lru_cache)}({e.expr(self.maxsize)}, {e.expr(self.typed)})({e.expr(self.fn)})"


CALLS.row(functools._lru_cache_wrapper)(lambda m, args, kwargs: MadeCache(*args[:3]))


class CachedFunction(CallableObject):
    """A function under functools.lru_cache."""

    def describe(self) -> str:
        return f"cached function {getattr(self.fn, '__qualname__', '')}"

    def getattr(self, m: Machine, name: str) -> Value:
        if name in ("cache_info", "cache_clear", "cache_parameters"):
            raise Break("attribute", name=name, value=self.describe())
        return super().getattr(m, name)

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if not hasattr(self.fn, "__wrapped__"):     # it is being made: functools.wraps comes after this
            raise Break("cache", name=self.describe())
        mark = m.checkpoint()
        result = m.call_now(m.constant_object(self.fn.__wrapped__), args, kwargs)
        made = m.effects.entries[mark[1][0]:]
        if not made:
            return result
        only_messages = all(effect.kind == "call" for effect in made) and result is NONE
        m.rollback(mark)
        if not only_messages:
            raise Break("cache", name=f"{self.describe()}, which changes objects")
        return replay(m, self.fn, args, kwargs)
