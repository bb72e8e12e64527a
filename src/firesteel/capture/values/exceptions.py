"""Exceptions as objects: made inside of the region or met there, their arguments, causes and notes.

    ExceptionValue(ValueError, [ConstValue("no")])          # ValueError("no")
"""
from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from firesteel.capture.effects import DELETED
from firesteel.capture.guards import Guard
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Call, Fixed, Source
from firesteel.capture.values.attributes import mro_lookup
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import NONE, boolean
from firesteel.capture.values.containers import ListValue, TupleValue
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.objects import ObjectValue
from firesteel.errors import Break
from firesteel.tracebacks import CodeLine, located


def is_handled(module: Any) -> bool:
    """Is the compiled function called where an exception is handled?"""
    return module.exception() is not None


def handled_exception(m: Machine, asker: str) -> Value:
    """The exception that is being handled here; one that a caller handles is asked for where the program continues."""
    if m.handling is NONE:
        if is_handled(sys):
            raise Break("introspection", name=asker)
        m.guard(Guard(Call(Fixed(sys), is_handled), "equals", False))
    return m.handling


class ExceptionValue(ObjectValue):
    """An exception object; made inside (class and arguments), or real."""

    def __init__(self, cls: type, args: list[Value], obj: Any = None, source: Source | None = None):
        super().__init__(cls, obj, source)
        self.args = args
        self.passed: list[tuple[Any, CodeLine]] = []       # frames that it went through, and where they were: the outermost first

    def getattr(self, m: Machine, name: str) -> Value:
        written = m.effects.written(self, name)
        if written is not None:
            return m.look(written) if written is not DELETED else super().getattr(m, name)
        if name == "__traceback__":
            raise Break("attribute", name=name, value=self.describe())
        row = EXCEPTION_ATTRIBUTES.get(name)
        found = row(m, self) if row is not None else None
        if found is not None:
            return found
        native = isinstance(mro_lookup(self.cls, name), (types.MemberDescriptorType, types.GetSetDescriptorType))
        if self.obj is None and native and name != "__class__":
            raise Break("attribute", name=name, value=self.describe())
        return super().getattr(m, name)

    def setattr(self, m: Machine, name: str, value: Value) -> Value | None:
        if mro_lookup(self.cls, "__setattr__") is not BaseException.__setattr__ or isinstance(mro_lookup(self.cls, name), property):
            return super().setattr(m, name, value)
        if name == "__traceback__":     # generated code has a traceback of its own
            return None
        if name == "args":
            m.effects.change(self, "args", value.iterate(m))
        m.effects.store_attr(self, name, value)
        return None

    def is_constant(self) -> bool:
        init = self.cls.__init__
        return not isinstance(init, types.FunctionType) and all(a.is_constant() for a in self.args)

    def constant(self) -> Any:
        """A copy for formatting; never the object itself."""
        return make_exception(self.cls, tuple(a.constant() for a in self.args), {})

    def rebuild(self, e: Emitter) -> str:
        args = "".join(f"{e.expr(arg)}, " for arg in self.args)
        made = f"{e.constant(make_exception)}({e.class_text(self.cls)}, ({args}), {{{self.attributes_text(e)}}})"
        return f"{e.constant(located)}({made}, {tuple(place for _, place in self.passed)!r})" if self.passed else made


def make_exception(cls: type, args: tuple, attributes: dict[str, Any]) -> BaseException:
    made = cls.__new__(cls, *args)
    made.args = args
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def _chained(name: str) -> Callable[[Machine, ExceptionValue], Value | None]:
    return lambda m, error: NONE if error.obj is None else m.read_attribute(error, name)


def _suppresses(m: Machine, error: ExceptionValue) -> Value:
    if m.effects.written(error, "__cause__") is not None:
        return boolean(True)
    return boolean(False) if error.obj is None else m.read_attribute(error, "__suppress_context__")


def _group_part(index: int, m: Machine, error: ExceptionValue) -> Value | None:
    if not issubclass(error.cls, BaseExceptionGroup):
        return None
    value = m.look(error.args[index])
    return value if index == 0 else TupleValue(value.iterate(m))


EXCEPTION_ATTRIBUTES: dict[str, Callable[[Any, ExceptionValue], Value | None]] = {
    "args": lambda m, error: TupleValue(list(error.args)), "__cause__": _chained("__cause__"), "__context__": _chained("__context__"),
    "__suppress_context__": _suppresses, "message": functools.partial(_group_part, 0), "exceptions": functools.partial(_group_part, 1),
    "value": lambda m, error: (error.args[0] if error.args else NONE) if issubclass(error.cls, StopIteration) else None,
}


CALLS.row(BaseException.with_traceback)(lambda m, args, kwargs: args[0])


@CALLS.row(BaseException.add_note)
def call_add_note(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    before = m.effects.written(args[0], "__notes__")
    if before is None and args[0].identity() is not None:
        raise Break("introspection", name="add_note")
    args[0].setattr(m, "__notes__", ListValue([*(before.iterate(m) if before is not None else []), args[1]]))
    return NONE
