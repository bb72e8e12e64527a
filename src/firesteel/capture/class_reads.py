"""What classes of a program have under the names that capture asked them for, and whether that is still so.

Reading an attribute, calling, comparing and constructing ask classes for names; capture asks them through `mro_lookup` alone.  While a
`recording` is open the answers are noted, and each class of the program is guarded by one `ClassFacts`: methods and descriptors are the same
objects, and names that were missing still are.  A plain value is guarded where it is read; here it only has to be one.  Python gives a class
another number each time it, or a base of it, is changed, so that a look costs one comparison:

    facts = ClassFacts(cls, {"forward": function, "__len__": MISSING})
    facts.hold()
"""
from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from firesteel import transaction

MISSING: Any = object()
PLAIN: Any = object()       # a value that a class hands out as it is
VERSION_AT = 48 * 8         # in the C structure of a class, where objects begin with a count and their type
NO_VERSION = (1 << 32) - 1  # Python gives the number 0 to classes that have none

_here = threading.local()


def mro_lookup(cls: type, name: str) -> Any:
    """What type(x) has under a name, unbound; MISSING where nothing."""
    found = lookup(cls, name)
    noted = getattr(_here, "noted", None)
    if noted is not None:
        noted.setdefault(cls, {})[name] = found
    return found


def lookup(cls: type, name: str) -> Any:
    """The same, not noted."""
    for base in cls.__mro__:
        found = base.__dict__.get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING


@transaction.context
def recording(noted: dict[type, dict[str, Any]]) -> Iterator[None]:
    """Inside, what this thread finds in classes is noted: by class, then by name."""
    before = getattr(_here, "noted", None)
    _here.noted = noted
    try:
        yield
    finally:
        _here.noted = before


def version_of(cls: type) -> ctypes.c_uint:
    """Python's number of a class's version, as long as the class is alive."""
    return ctypes.c_uint.from_address(id(cls) + VERSION_AT)


def sort_of(found: Any) -> Any:
    """What has to stay: the object itself, MISSING or PLAIN."""
    return found if found is MISSING or lookup(type(found), "__get__") is not MISSING else PLAIN


class ClassFacts:
    """Mutable: the version at which all held."""

    def __init__(self, cls: type, found: Mapping[str, Any]):
        self.cls, self.found = cls, {name: sort_of(value) for name, value in found.items()}
        self._version, self.seen = version_of(cls), ctypes.c_uint(NO_VERSION)

    def hold(self) -> bool:
        return self._version.value == self.seen.value or self._look()

    def _look(self) -> bool:
        type.__getattribute__(self.cls, "__init__")     # gives a class that was changed its new number
        version = self._version.value
        if self.changed():
            return False
        self.seen.value = version or NO_VERSION
        return True

    def changed(self) -> str:
        """The first name under which there is something else; empty where there is none."""
        return next((name for name, then in self.found.items() if sort_of(lookup(self.cls, name)) is not then), "")

    def sorts(self) -> dict[str, str]:
        """In words, for other processes."""
        return {name: "missing" if then is MISSING else "plain" if then is PLAIN else "object" for name, then in self.found.items()}

    def difference(self) -> str:
        name = self.changed()
        now = lookup(self.cls, name)
        return f"{self.cls.__qualname__}.{name} is {'gone' if now is MISSING else 'new' if self.found.get(name) is MISSING else 'another object'}"
