"""Dicts and sets, holding Values; see `containers.py` for what containers share.

The user's dict is guarded by what is asked of it: one key, or all keys and their order.
"""
from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable
from typing import Any

from firesteel.capture.effects import DELETED
from firesteel.capture.guards import Guard
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Source
from firesteel.capture.values.base import ObjectKey, Value
from firesteel.capture.values.const import FRESH, NONE, ConstValue, boolean, fresh
from firesteel.capture.values.containers import METHODS, Args, Container, Kwargs, NamedTupleValue, TupleValue, gives_none
from firesteel.errors import Break

# -- dicts --------------------------------------------------------------------------------------------------------------
MISSING: Any = object()


class Hashed(Container):
    """Entries by hash key."""

    entries: dict[Any, Any]

    def size_now(self) -> int:
        return len(self.entries)

    def change(self, m: Machine, entries: dict[Any, Any], kind: str, *data: Value) -> None:
        """The object has these entries now; `kind` is the effect that does it to the real one."""
        m.effects.change(self, "entries", entries)
        m.effects.log(kind, self, *data)


class DictValue(Hashed):
    """A dict (or OrderedDict, defaultdict): hash key -> (key, value).  The user's own is guarded by what is asked of it."""

    cls: type = dict
    size_name = "dictionary"

    def __init__(self, entries: dict[Any, tuple[Value, Value]], source: Any = None, obj: Any = None, cls: type = dict,
                 factory: Value | None = None):
        self.entries, self.source, self.obj, self.cls, self.factory = entries, source, obj, cls, factory

    def is_constant(self) -> bool:
        return all(k.is_constant() and v.is_constant() for k, v in self.entries.values())

    def constant(self) -> Any:
        pairs = {k.constant(): v.constant() for k, v in self.entries.values()}
        return pairs if self.cls is dict else collections.OrderedDict(pairs)

    def getattr(self, m: Machine, name: str) -> Value:
        if self.cls is not collections.OrderedDict or hasattr(self.cls, name):
            return super().getattr(m, name)
        written = m.effects.written(self, name)         # one has attributes of its own: the _metadata of a state_dict
        if written is not None and written is not DELETED:
            return written
        if written is None and name in getattr(self.obj, "__dict__", ()):
            return m.read_attribute(self, name)
        if written is None and self.source is not None:
            m.guard_no_attribute(self, name)
        return super().getattr(m, name)

    def setattr(self, m: Machine, name: str, value: Value) -> Value | None:
        if self.cls is not collections.OrderedDict or hasattr(self.cls, name):
            return super().setattr(m, name, value)
        m.effects.store_attr(self, name, value)
        return None

    def find(self, m: Machine, key: Value) -> Value | None:
        """The value of a key, looked at; None where there is none.  The user's dict is guarded for this key."""
        key = key.as_key(m, self)
        hashed = key.hash_key(m)
        entry = self.entries.get(hashed)
        m.guard_key(self, key, hashed, entry is not None)
        if entry is None:
            return None
        value = m.look(entry[1])
        self.entries[hashed] = (entry[0], value)
        return value

    def know_all(self, m: Machine) -> dict[Any, tuple[Value, Value]]:
        """All entries; the user's dict is guarded for its keys and their order."""
        m.guard_keys(self)
        return self.entries

    def getitem(self, m: Machine, key: Value) -> Value:
        found = self.find(m, key)
        if found is not None:
            return found
        if self.factory is not None:
            made = m.call_now(self.factory, [], {})
            self.setitem(m, key, made)
            return made
        raise m.raise_real(KeyError(key.constant() if key.is_constant() else key.describe()))

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        key = key.as_key(m, self)
        hashed = key.hash_key(m)
        old = self.entries.get(hashed, MISSING)
        m.guard_key(self, key, hashed, old is not MISSING)
        self.entries[hashed] = (key if old is MISSING else old[0], value)
        m.effects.on_undo(restore_entry, self.entries, hashed, old)
        m.effects.log("setitem", self, key, value)

    def delitem(self, m: Machine, key: Value) -> None:
        if self.find(m, key) is None:
            raise m.raise_real(KeyError(key.constant() if key.is_constant() else key.describe()))
        key = key.as_key(m, self)
        hashed = key.hash_key(m)
        self.change(m, {k: e for k, e in self.entries.items() if k != hashed}, "delitem", key)

    def contains(self, m: Machine, item: Value) -> Value:
        return boolean(self.find(m, item) is not None)

    def length(self, m: Machine) -> Value:
        return ConstValue(len(self.know_all(m)))

    def iterate(self, m: Machine) -> list[Value]:
        return [key for key, _ in self.know_all(m).values()]

    def equals(self, m: Machine, other: Container) -> bool:
        if not isinstance(other, DictValue) or self.know_all(m).keys() != other.know_all(m).keys():
            return False
        return all(m.equal(m.look(v), m.look(other.entries[k][1])) for k, (_, v) in self.entries.items())

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        if op != "|" or reflected or not isinstance(other, DictValue):
            return None
        return DictValue({**self.know_all(m), **other.know_all(m)}, cls=self.cls, factory=self.factory)

    def inplace(self, m: Machine, op: str, other: Value) -> Value | None:
        if op != "|":
            return None
        dict_update(m, self, [other], {})
        return self

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        pairs = {k.constant(): m.look(v).as_arg(m) for k, v in self.know_all(m).values()}
        return {k: p[0] for k, p in pairs.items()}, {k: p[1] for k, p in pairs.items()}

    def rebuild(self, e: Emitter) -> str:
        text = "{" + ", ".join(f"{e.expr(k)}: {e.expr(v)}" for k, v in self.entries.values()) + "}"
        if self.cls is dict:
            return text
        factory = "" if self.factory is None else f"{e.expr(self.factory)}, "
        if self.cls is collections.defaultdict and self.factory is None:
            factory = "None, "
        made = f"{e.constant(self.cls)}({factory}{text})"
        return e.with_attributes(self, e.assign(made)) if self.cls is collections.OrderedDict else made


class ProxyValue(DictValue):
    """A mappingproxy: a dict that cannot be changed through it."""

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        raise m.raise_real(TypeError("'mappingproxy' object does not support item assignment"))

    def delitem(self, m: Machine, key: Value) -> None:
        raise m.raise_real(TypeError("'mappingproxy' object does not support item deletion"))


def restore_entry(entries: dict[Any, Any], key: Any, old: Any) -> None:
    if old is MISSING:
        del entries[key]
    else:
        entries[key] = old


@METHODS.row((DictValue, "get"))
def dict_get(m: Machine, self: DictValue, args: Args, kwargs: Kwargs) -> Value:
    found = self.find(m, args[0])
    return found if found is not None else args[1] if len(args) > 1 else NONE


@METHODS.row((DictValue, "setdefault"))
def dict_setdefault(m: Machine, self: DictValue, args: Args, kwargs: Kwargs) -> Value:
    found = self.find(m, args[0])
    if found is None:
        found = args[1] if len(args) > 1 else NONE
        self.setitem(m, args[0], found)
    return found


@METHODS.row((DictValue, "pop"))
def dict_pop(m: Machine, self: DictValue, args: Args, kwargs: Kwargs) -> Value:
    found = self.find(m, args[0])
    if found is None and len(args) > 1:
        return args[1]
    self.delitem(m, args[0])
    return found        # type: ignore[return-value]  # else delitem has raised


@METHODS.row((DictValue, "popitem"))
def dict_popitem(m: Machine, self: DictValue, args: Args, kwargs: Kwargs) -> Value:
    if not self.know_all(m):
        raise m.raise_real(KeyError("popitem(): dictionary is empty"))
    last = args[0] if args else kwargs.get("last")      # of an OrderedDict
    key, value = list(self.entries.values())[-1 if last is None or last.truth(m) else 0]
    value = m.look(value)
    self.delitem(m, key)
    return TupleValue([key, value])


@METHODS.row((DictValue, "move_to_end"))
def dict_move_to_end(m: Machine, self: DictValue, args: Args, kwargs: Kwargs) -> Value:
    if self.cls is not collections.OrderedDict or self.source is not None:
        raise Break("attribute", name="move_to_end", value=self.describe())
    hashed, last = args[0].hash_key(m), args[1] if len(args) > 1 else kwargs.get("last")
    if hashed not in self.entries:
        raise m.raise_real(KeyError(m.known(args[0])))
    entries = dict(self.entries)
    moved = {hashed: entries.pop(hashed)}
    m.effects.change(self, "entries", {**entries, **moved} if last is None or last.truth(m) else {**moved, **entries})
    return NONE


def call_fromkeys(m: Machine, args: Args, kwargs: Kwargs, cls: type = dict) -> Value:
    """cls.fromkeys(keys, value)"""
    value = args[1] if len(args) > 1 else kwargs.get("value", NONE)
    keys = [m.look(key) for key in args[0].iterate(m)]
    return DictValue({key.hash_key(m): (key, value) for key in keys}, cls=cls)


@METHODS.row((DictValue, "update"))
def dict_update(m: Machine, self: DictValue, args: Args, kwargs: Kwargs) -> Value:
    for source in args:
        for key, value in pairs_of(m, source):
            self.setitem(m, key, value)
    for name, value in kwargs.items():
        self.setitem(m, ConstValue(name), value)
    return NONE


METHODS.row((DictValue, "clear"))(gives_none(lambda m, self, args, kwargs: self.change(m, {}, "clear")))
METHODS.row((DictValue, "copy"))(lambda m, self, args, kwargs: DictValue(dict(self.know_all(m)), cls=self.cls, factory=self.factory))


def pairs_of(m: Machine, source: Value) -> list[tuple[Value, Value]]:
    """The entries that dict.update would take from an object."""
    if isinstance(source, DictValue):
        return list(source.know_all(m).values())
    if hasattr(source.python_type(), "keys"):
        keys = [m.look(k) for k in m.call_now(source.getattr(m, "keys"), [], {}).iterate(m)]
        return [(k, m.finish_now(source.getitem(m, k))) for k in keys]
    pairs = [m.look(pair).iterate(m) for pair in source.iterate(m)]
    return [(m.look(k), v) for k, v in pairs]


class DictView(Container):
    """d.keys(), d.values() or d.items()."""

    form = "{owner}.{kind}()"

    TYPES = {"keys": type({}.keys()), "values": type({}.values()), "items": type({}.items())}
    size_name = "dictionary"

    def __init__(self, owner: DictValue, kind: str, source: Source | None = None, obj: Any = None):
        self.owner, self.kind, self.source, self.obj = owner, kind, source, obj
        self.cls = self.TYPES[kind] if obj is None else type(obj)

    def size_now(self) -> int:
        return self.owner.size_now()

    def iterate(self, m: Machine) -> list[Value]:
        entries = self.owner.know_all(m).values()
        if self.kind == "items":
            return [TupleValue([k, v]) for k, v in entries]
        return [k if self.kind == "keys" else v for k, v in entries]

    def length(self, m: Machine) -> Value:
        return self.owner.length(m)

    def contains(self, m: Machine, item: Value) -> Value:
        if self.kind == "keys":
            return self.owner.contains(m, item)
        return boolean(any(m.equal(m.look(mine), item) for mine in self.iterate(m)))

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        if self.kind == "values" or not isinstance(other, (DictView, SetValue)):
            return super().compare(m, op, other)
        return SetValue.of(m, self.iterate(m)).compare(m, op, SetValue.of(m, other.iterate(m)))

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        return SetValue.of(m, self.iterate(m)).binary(m, op, SetValue.of(m, other.iterate(m)), reflected)


for _kind in DictView.TYPES:
    METHODS.add((DictValue, _kind), lambda m, self, args, kwargs, kind=_kind: DictView(self, kind))


# -- sets ---------------------------------------------------------------------------------------------------------------
class SetValue(Hashed):
    """A set: hash key -> item."""

    size_name = "Set"

    def __init__(self, entries: dict[Any, Value], source: Any = None, obj: Any = None, cls: type = set):
        self.entries, self.source, self.obj, self.cls = entries, source, obj, cls

    @staticmethod
    def of(m: Machine, items: list[Value], cls: type = set) -> SetValue:
        looked = [m.look(item) for item in items]
        return SetValue({item.hash_key(m): item for item in looked}, cls=cls)

    def is_constant(self) -> bool:
        return all(item.is_constant() for item in self.entries.values())

    def constant(self) -> Any:
        return self.cls(item.constant() for item in self.entries.values())

    def length(self, m: Machine) -> Value:
        return ConstValue(len(self.entries))

    def iterate(self, m: Machine) -> list[Value]:
        if self.source is None and self.is_constant():     # in the order of a real set
            items = {item.constant(): item for item in self.entries.values()}
            return [items[key] for key in self.constant()]
        return list(self.entries.values())

    def contains(self, m: Machine, item: Value) -> Value:
        key = item.as_key(m, self)
        found = key.hash_key(m) in self.entries
        if not found and self.source is not None and key.source is not None and isinstance(key.hash_key(m), ObjectKey):
            m.guard(Guard(key.source, "identity", key.obj))     # another object may be in the set
        return boolean(found)

    def inplace(self, m: Machine, op: str, other: Value) -> Value | None:
        if self.cls is not set:
            return None
        result: Any = self.binary(m, op, other)
        if result is None:
            return None
        self.change(m, result.entries, "clear")
        for item in result.entries.values():
            m.effects.log("add", self, item)
        return self

    def hash_key(self, m: Machine) -> Any:
        return frozenset(self.entries)

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        return super().compare(m, op, set_like(m, other))

    def equals(self, m: Machine, other: Container) -> bool:
        return isinstance(other, SetValue) and self.entries.keys() == other.entries.keys()

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        other = set_like(m, other)
        if not isinstance(other, SetValue) or op not in SET_OPERATIONS:
            return None
        a, b = (other, self) if reflected else (self, other)
        keys = SET_OPERATIONS[op](a.entries, b.entries)
        return SetValue({k: a.entries.get(k) or b.entries[k] for k in keys}, cls=a.cls)

    def rebuild(self, e: Emitter) -> str:
        return f"{e.constant(self.cls)}([{', '.join(e.expr(item) for item in self.entries.values())}])"


def set_like(m: Machine, other: Value) -> Value:
    """The keys or items of a dict are compared and combined with sets as a set is."""
    return SetValue.of(m, other.iterate(m)) if isinstance(other, DictView) and other.kind != "values" else other


SET_OPERATIONS: dict[str, Callable[[dict, dict], list]] = {
    "|": lambda a, b: [*a, *(k for k in b if k not in a)],
    "&": lambda a, b: [k for k in a if k in b],
    "-": lambda a, b: [k for k in a if k not in b],
    "^": lambda a, b: [*(k for k in a if k not in b), *(k for k in b if k not in a)],
}


@METHODS.row((SetValue, "add"))
def set_add(m: Machine, self: SetValue, args: Args, kwargs: Kwargs) -> Value:
    self.change(m, {**self.entries, args[0].hash_key(m): args[0]}, "add", args[0])
    return NONE


@METHODS.row((SetValue, "discard"))
def set_discard(m: Machine, self: SetValue, args: Args, kwargs: Kwargs) -> Value:
    gone = args[0].hash_key(m)
    if gone in self.entries:
        self.change(m, {k: v for k, v in self.entries.items() if k != gone}, "discard", args[0])
    return NONE


@METHODS.row((SetValue, "remove"))
def set_remove(m: Machine, self: SetValue, args: Args, kwargs: Kwargs) -> Value:
    if args[0].hash_key(m) not in self.entries:
        raise m.raise_real(KeyError(args[0].constant()))
    return set_discard(m, self, args, kwargs)


@METHODS.row((SetValue, "update"))
def set_update(m: Machine, self: SetValue, args: Args, kwargs: Kwargs) -> Value:
    for source in args:
        for item in source.iterate(m):
            set_add(m, self, [m.look(item)], {})
    return NONE


METHODS.row((SetValue, "copy"))(lambda m, self, args, kwargs: SetValue(dict(self.entries), cls=self.cls))
METHODS.row((SetValue, "clear"))(gives_none(lambda m, self, args, kwargs: self.change(m, {}, "clear")))


def _set_method(op: str, m: Machine, self: SetValue, args: Args, kwargs: Kwargs) -> Value:
    result: Any = SetValue(dict(self.entries), cls=self.cls)
    for other in args:
        result = result.binary(m, op, SetValue.of(m, other.iterate(m)))
    return result


for _name, _op in {"union": "|", "intersection": "&", "difference": "-", "symmetric_difference": "^"}.items():
    METHODS.add((SetValue, _name), functools.partial(_set_method, _op))


for _name, _holds in {"issuperset": operator.ge, "issubset": operator.le, "isdisjoint": lambda a, b: not a & b}.items():
    METHODS.add((SetValue, _name), lambda m, self, args, kwargs, holds=_holds: boolean(
        holds(self.entries.keys(), SetValue.of(m, args[0].iterate(m)).entries.keys())))


@METHODS.row((SetValue, "pop"))
def set_pop(m: Machine, self: SetValue, args: Args, kwargs: Kwargs) -> Value:
    if not self.is_constant() or self.source is not None:
        raise Break("introspection", name="set.pop")     # which one it gives is the real set's choice
    if not self.entries:
        raise m.raise_real(KeyError("pop from an empty set"))
    item = m.fresh(self.constant().pop())
    set_discard(m, self, [item], {})
    return item


METHODS.row((NamedTupleValue, "_asdict"))(lambda m, self, args, kwargs: DictValue(
    {name: (ConstValue(name), item) for name, item in zip(self.fields, self.items)}))
FRESH.row(dict)(lambda m, obj: DictValue({k: (fresh(m, k), fresh(m, v)) for k, v in obj.items()}))
FRESH.row(set)(lambda m, obj: SetValue({item: fresh(m, item) for item in obj}))
