"""Imported modules as objects: an attribute of one is a global of it."""
from __future__ import annotations

from firesteel.capture.meanings import handler_of
from firesteel.capture.protocols import Machine
from firesteel.capture.source import Attr, Fixed
from firesteel.capture.values.base import RealObject, Value


class PythonModuleValue(RealObject):
    """An imported module: its attributes are globals of it."""

    words = "module {self.obj.__name__}"
    always_true = True
    form = "{obj}"

    def getattr(self, m: Machine, name: str) -> Value:
        own = self.obj.__dict__
        if name in own:
            m.guard_library(own, name, m.frames[-1].scope if m.frames else own)
            return m.read_global(own, name)
        # a property of the module's class: torch.backends.cudnn.enabled
        found = getattr(vars(type(self.obj)).get(name), "getter", None)
        if handler_of(found) is not None:       # a state that the program may have set
            return m.constant_object(found).call(m, [], {})
        if not callable(getattr(type(self.obj), name, len)) and hasattr(self.obj, name):
            return m.read(getattr(self.obj, name), Attr(Fixed(self.obj, self.obj.__name__), name))
        return m.static_attribute(self.obj, name)

    def setattr(self, m: Machine, name: str, value: Value) -> None:
        m.store_global(self.obj.__dict__, name, value)
