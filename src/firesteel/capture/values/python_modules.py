"""Imported modules as objects: an attribute of one is a global of it."""
from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from firesteel.capture.source import Attr, Fixed, Source
from firesteel.capture.values.base import ObjectKey, Value

if TYPE_CHECKING:
    from firesteel.capture.emit import Emitter
    from firesteel.capture.machine import Machine


class PythonModuleValue(Value):
    """An imported module: its attributes are globals of it."""

    def __init__(self, module: types.ModuleType, source: Source | None = None):
        self.module, self.source = module, source

    def python_type(self) -> type:
        return types.ModuleType

    def describe(self) -> str:
        return f"module {self.module.__name__}"

    def identity(self) -> Any:
        return self.module

    def truth(self, m: Machine) -> bool:
        return True

    def hash_key(self, m: Machine) -> Any:
        return ObjectKey(self.module)

    def getattr(self, m: Machine, name: str) -> Value:
        own = self.module.__dict__
        if name in own:
            m.guard_library(own, name, m.frames[-1].scope if m.frames else own)
            return m.read_global(own, name)
        if not callable(getattr(type(self.module), name, len)):     # a property of the module's class: torch.backends.cudnn.enabled
            return m.read(getattr(self.module, name), Attr(Fixed(self.module, self.module.__name__), name))
        return m.static_attribute(self.module, name)

    def setattr(self, m: Machine, name: str, value: Value) -> None:
        m.store_global(self.module.__dict__, name, value)

    def rebuild(self, e: Emitter) -> str:
        return e.constant(self.module)
