"""Tuples, lists, dicts, sets, slices and their relatives, holding Values.

A container with a source is the user's: its items are read lazily, and every change of it is an effect that is
replayed on the real object.  One without was made inside the region and is rebuilt in its last state.  Methods are rows
of `METHODS`, keyed by (Value class, name).

    ListValue([a, b]).getattr(m, "append").call(m, [c], {})
"""
from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from firesteel.capture import polyfills
from firesteel.capture.guards import Guard
from firesteel.capture.protocols import Args, Emitter, Kwargs, Machine
from firesteel.capture.python_operators import OPERATORS
from firesteel.capture.values.base import PENDING, MethodOfOwner, Value
from firesteel.capture.values.const import FRESH, NONE, ConstValue, boolean, fresh, run_for_program
from firesteel.capture.values.number import SymNumber
from firesteel.errors import Break
from firesteel.table import Table

# (Value class, method name) -> function(machine, container, args, kwargs) -> Value
METHODS: Table[Callable[..., Value]] = Table("container method", "capture/values/containers.py")


class ContainerMethod(MethodOfOwner):
    """A bound method of a container."""

    cls: type = type([].append)

    def describe(self) -> str:
        return f"{self.owner.python_type().__name__}.{self.name}"


def gives_none(act: Callable[..., Any]) -> Callable[..., Value]:
    """A row of METHODS, or of CALLS, that acts and returns None."""
    def run(m: Machine, *given: Any) -> Value:
        if act(m, *given) is PENDING:       # a user's method acts
            m.finish_now(PENDING)
        return NONE
    return run


class Container(Value):
    """What containers share: methods by table, comparisons by contents."""

    words = "{self.cls.__name__}"
    cls: type = object

    def truth(self, m: Machine) -> bool:
        return bool(self.length(m).truth(m))

    def getattr(self, m: Machine, name: str) -> Value:
        for cls in type(self).__mro__:
            row = METHODS.get((cls, name))
            if row is not None:
                return ContainerMethod(self, name, row)
        if name == "__class__":
            return m.constant_object(self.cls)
        if not hasattr(self.cls, name):
            raise m.raise_real(AttributeError(f"{self.cls.__name__!r} object has no attribute {name!r}"))
        raise Break("attribute", name=name, value=self.describe())

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        if not isinstance(other, Container):
            return None
        if self.is_constant() and other.is_constant():
            return fresh(m, run_for_program(m, OPERATORS[op], self.constant(), other.constant()))
        if op in ("==", "!="):
            return boolean(self.equals(m, other) == (op == "=="))
        return None

    def equals(self, m: Machine, other: Container) -> bool:
        raise Break("operator", name="==", value=self.describe())

    def iterator(self, m: Machine) -> Value:
        return m.iterate_over(self)


# -- sequences ----------------------------------------------------------------------------------------------------------


class Sequence(Container):
    """Items in order."""

    def __init__(self, items: list[Value], source: Any = None, obj: Any = None):
        self.items, self.source, self.obj = items, source, obj

    def is_constant(self) -> bool:
        return all(item.is_constant() for item in self.items)

    def constant(self) -> Any:
        return self.make([item.constant() for item in self.items])

    def make(self, items: list[Any]) -> Any:
        """A real object of this type with these items."""
        return self.cls(items)

    def like(self, items: list[Value]) -> Sequence:
        """What slicing and adding give."""
        return type(self)(items)

    def length(self, m: Machine) -> Value:
        return ConstValue(len(self.items))

    def iterate(self, m: Machine) -> list[Value]:
        return list(self.items)

    def at(self, m: Machine, index: int) -> Value:
        """One item, looked at."""
        item = m.look(self.items[index])
        self.items[index] = item        # not a change: the same object, now known
        return item

    def getitem(self, m: Machine, key: Value) -> Value:
        if isinstance(key, SliceValue):
            return self.like(self.items[key.known(m)])
        index = m.known_index(key)
        if not -len(self.items) <= index < len(self.items):
            raise m.raise_real(IndexError(f"{'tuple' if issubclass(self.cls, tuple) else self.cls.__name__} index out of range"))
        return self.at(m, index)

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        if op == "+" and isinstance(other, Sequence) and issubclass(other.cls, self._added()):
            parts = (other.items + self.items) if reflected else (self.items + other.items)
            return self.like(parts)
        if op == "*" and other.python_type() in (int, bool):
            return self.like(self.items * m.known_index(other))
        return None

    def _added(self) -> type:
        return tuple if issubclass(self.cls, tuple) else list

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        found = super().compare(m, op, other)
        if found is not None or op in ("==", "!=") or not isinstance(other, Sequence) or not issubclass(other.cls, self._added()):
            return found
        for mine, its in zip(self.items, other.items):
            a, b = m.look(mine), m.look(its)
            if not m.equal(a, b):
                return m.compare(op, a, b)      # the first that differ decide
        return fresh(m, OPERATORS[op](len(self.items), len(other.items)))

    def contains(self, m: Machine, item: Value) -> Value:
        return boolean(any(m.equal(m.look(mine), item) for mine in self.items))

    def equals(self, m: Machine, other: Container) -> bool:
        return (isinstance(other, Sequence) and issubclass(other.cls, self._added()) and len(self.items) == len(other.items)
                and all(m.equal(m.look(a), m.look(b)) for a, b in zip(self.items, other.items)))

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        pairs = [m.look(item).as_arg(m) for item in self.items]
        return (tuple if issubclass(self.cls, tuple) else list)(node for node, _ in pairs), self.make([real for _, real in pairs])


class TupleValue(Sequence):
    """A tuple."""

    cls: type = tuple

    def hash_key(self, m: Machine) -> Any:
        return tuple(m.look(item).hash_key(m) for item in self.items)

    def rebuild(self, e: Emitter) -> str:
        return f"({''.join(e.expr(item) + ', ' for item in self.items)})"


class SizeValue(TupleValue):
    """A torch.Size."""

    cls = torch.Size

    def make(self, items: list[Any]) -> Any:
        return torch.Size(items) if all(type(i) is int for i in items) else tuple(items)

    def rebuild(self, e: Emitter) -> str:
        return f"{e.constant(torch.Size)}({super().rebuild(e)})"


class NamedTupleValue(TupleValue):
    """A namedtuple, or a structure that torch returns (torch.return_types.max); `cls` is its type."""

    def __init__(self, cls: type, items: list[Value], source: Any = None, obj: Any = None):
        super().__init__(items, source, obj)
        self.cls = cls

    @property
    def fields(self) -> list[str]:
        named = getattr(self.cls, "_fields", None)
        if named is not None:
            return list(named)
        return [n for n in vars(self.cls) if isinstance(vars(self.cls)[n], types.MemberDescriptorType)][:len(self.items)]

    def like(self, items: list[Value]) -> Sequence:
        return TupleValue(items)

    def make(self, items: list[Any]) -> Any:
        return self.cls(*items) if hasattr(self.cls, "_fields") else self.cls(items)

    def getattr(self, m: Machine, name: str) -> Value:
        found = m.class_attribute(self.cls, name)
        if found is None and name in self.fields:       # a class over it may have a property of that name
            return self.at(m, self.fields.index(name))
        if name == "_fields":
            return fresh(m, self.cls._fields)       # type: ignore[attr-defined]  # of every named tuple
        written = m.effects.written(self, name)
        if written is not None:
            return written
        if name in getattr(self.obj, "__dict__", ()):
            return m.read_attribute(self, name)
        return super().getattr(m, name) if found is None else m.bind(found, self, self.cls, name)

    def setattr(self, m: Machine, name: str, value: Value) -> None:
        if not self.cls.__dictoffset__ or hasattr(self.cls, name) or self.cls.__setattr__ is not object.__setattr__:
            raise Break("store", name=f"attribute {name}", value=self.describe())
        m.effects.store_attr(self, name, value)

    def rebuild(self, e: Emitter) -> str:
        items = "".join(f"{e.expr(item)}, " for item in self.items)
        if not hasattr(self.cls, "_fields"):
            return f"{e.constant(self.cls)}(({items}))"
        return e.with_attributes(self, e.assign(f"tuple.__new__({e.class_text(self.cls)}, ({items}))"))


@METHODS.row((NamedTupleValue, "_replace"))
def namedtuple_replace(m: Machine, self: NamedTupleValue, args: Args, kwargs: Kwargs) -> Value:
    items = [kwargs.get(name, item) for name, item in zip(self.fields, self.items)]
    return NamedTupleValue(self.cls, items)


@METHODS.row((Sequence, "index"))
def sequence_index(m: Machine, self: Sequence, args: Args, kwargs: Kwargs) -> Value:
    for i, item in enumerate(self.items):
        if m.equal(m.look(item), args[0]):
            return ConstValue(i)
    shown = repr(args[0].constant()) if args[0].is_constant() else args[0].describe()
    raise m.raise_real(ValueError(f"{shown} is not in list" if self.cls is list else "tuple.index(x): x not in tuple"))


METHODS.row((Sequence, "count"))(lambda m, self, args, kwargs: ConstValue(sum(m.equal(m.look(item), args[0]) for item in self.items)))
METHODS.row((Container, "__len__"))(lambda m, self, args, kwargs: self.length(m))
METHODS.row((Container, "__contains__"))(lambda m, self, args, kwargs: self.contains(m, args[0]))
METHODS.row((Container, "__getitem__"))(lambda m, self, args, kwargs: self.getitem(m, args[0]))
METHODS.row((Container, "__setitem__"))(gives_none(lambda m, self, args, kwargs: self.setitem(m, args[0], args[1])))
METHODS.row((Container, "__iter__"))(lambda m, self, args, kwargs: self.iterator(m))


@METHODS.row((SizeValue, "numel"))
def size_numel(m: Machine, self: SizeValue, args: Args, kwargs: Kwargs) -> Value:
    total: Value = ConstValue(1)
    for item in self.items:
        total = m.binary("*", total, m.look(item))
    return total


# -- lists --------------------------------------------------------------------------------------------------------------
class ListValue(Sequence):
    """A list.  The length of the user's is guarded when its items are first asked for: appending needs no guard."""

    cls: type = list
    form = "[{items}]"

    def __init__(self, items: list[Value], source: Any = None, obj: Any = None, know: Callable[[], None] | None = None):
        self._items, self.source, self.obj, self._know = items, source, obj, know

    @property
    def items(self) -> list[Value]:
        if self._know is not None:
            self._know()
            self._know = None
        return self._items

    @items.setter
    def items(self, items: list[Value]) -> None:
        self._items = items

    def truth(self, m: Machine) -> bool:
        """Of the user's list only whether it is empty is guarded; as long as its items were not asked for, it can only have grown here."""
        if self._know is None or len(self._items) > len(self.obj):
            return bool(self._items)
        m.guard(Guard(self.source, "truth", bool(self.obj)))
        return bool(self.obj)

    def change(self, m: Machine, items: list[Value], kind: str, *data: Value) -> None:
        """The list becomes `items`; `kind` is the effect that does it to the real one."""
        m.effects.change(self, "items", items)
        m.effects.log(kind, self, *data)

    def assign(self, m: Machine, items: list[Value]) -> None:
        self.change(m, items, "assign", ListValue(items))

    def inplace(self, m: Machine, op: str, other: Value) -> Value | None:
        if op == "+":
            added = other.iterate(m)
            self.change(m, self.items + added, "extend", ListValue(added))
            return self
        return None

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        items = list(self.items)
        if isinstance(key, SliceValue):
            items[key.known(m)] = value.iterate(m)
            self.assign(m, items)
            return
        index = m.known_index(key)
        if not -len(items) <= index < len(items):
            raise m.raise_real(IndexError("list assignment index out of range"))
        items[index] = value
        self.change(m, items, "setitem", ConstValue(index), value)

    def delitem(self, m: Machine, key: Value) -> None:
        items = list(self.items)
        run_for_program(m, items.__delitem__, key.known(m) if isinstance(key, SliceValue) else m.known_index(key))
        self.assign(m, items)


def drop_last(items: ListValue) -> None:
    items._items.pop()


@METHODS.row((ListValue, "append"))
def list_append(m: Machine, self: ListValue, args: Args, kwargs: Kwargs) -> Value:
    self._items.append(args[0])
    m.effects.on_undo(drop_last, self)
    m.effects.log("append", self, args[0])
    return NONE


@METHODS.row((ListValue, "extend"))
def list_extend(m: Machine, self: ListValue, args: Args, kwargs: Kwargs) -> Value:
    mark = m.checkpoint()
    try:
        self.inplace(m, "+", args[0])
    except Break as stop:
        if not stop.inside:
            raise
        m.rollback(mark)
        return m.constant_object(polyfills.extend_steps).call(m, [self, args[0]], {})
    return NONE


@METHODS.row((ListValue, "insert"))
def list_insert(m: Machine, self: ListValue, args: Args, kwargs: Kwargs) -> Value:
    items = list(self.items)
    items.insert(m.known_index(args[0]), args[1])
    self.assign(m, items)
    return NONE


@METHODS.row((ListValue, "pop"))
def list_pop(m: Machine, self: ListValue, args: Args, kwargs: Kwargs) -> Value:
    index = m.known_index(args[0]) if args else -1
    items = list(self.items)
    item = m.look(run_for_program(m, items.pop, index))
    self.change(m, items, "pop", ConstValue(index))
    return item


METHODS.row((ListValue, "remove"))(gives_none(lambda m, self, args, kwargs: self.delitem(m, sequence_index(m, self, args, {}))))
METHODS.row((ListValue, "clear"))(gives_none(lambda m, self, args, kwargs: self.assign(m, [])))
METHODS.row((ListValue, "copy"))(lambda m, self, args, kwargs: ListValue(list(self.items)))
METHODS.row((ListValue, "reverse"))(gives_none(lambda m, self, args, kwargs: self.assign(m, self.items[::-1])))
METHODS.row((ListValue, "sort"))(gives_none(lambda m, self, args, kwargs: self.assign(m, sorted_items(m, self.items, kwargs))))


def sorted_items(m: Machine, items: list[Value], kwargs: Kwargs) -> list[Value]:
    """Items in order of known keys."""
    key = kwargs.get("key", NONE)
    looked = [m.look(item) for item in items]
    keys = looked if key.is_constant() else [m.call_now(key, [item], {}) for item in looked]
    ordered: list[Any] = [ByComparison(m, k) for k in keys] if any(needs_comparing(m, k) for k in keys) else [m.known(k) for k in keys]
    order = run_for_program(m, sorted, range(len(items)), key=ordered.__getitem__, reverse=bool(m.known(kwargs.get("reverse", NONE))))
    return [looked[i] for i in order]


def needs_comparing(m: Machine, key: Value) -> bool:
    """May a method of the user's or of a tensor have to say which of two keys is smaller?"""
    key = m.look(key)
    if isinstance(key, Sequence):
        return any(needs_comparing(m, item) for item in key.items)
    return not key.is_constant() and not isinstance(key, SymNumber)


class ByComparison:
    """A sort key that asks the program."""

    def __init__(self, m: Machine, value: Value):
        self.m, self.value = m, value

    def __lt__(self, other: ByComparison) -> bool:
        return self.m.finish_now(self.m.compare("<", self.value, other.value)).truth(self.m)


# -- slices -------------------------------------------------------------------------------------------------------------
class SliceValue(Value):
    """slice(start, stop, step)."""

    cls = slice
    form = "slice({parts})"

    def __init__(self, start: Value, stop: Value, step: Value):
        self.parts = (start, stop, step)

    def is_constant(self) -> bool:
        return all(part.is_constant() for part in self.parts)

    def constant(self) -> Any:
        return slice(*(part.constant() for part in self.parts))

    def known(self, m: Machine) -> slice:
        """The slice with numbers, symbols fixed under a guard."""
        return slice(*(m.known(part) for part in self.parts))

    def getattr(self, m: Machine, name: str) -> Value:
        if name in ("start", "stop", "step"):
            return self.parts[("start", "stop", "step").index(name)]
        if name == "indices":
            return ConstValue(self.known(m)).getattr(m, name)
        return super().getattr(m, name)

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        pairs = [part.as_arg(m) for part in self.parts]
        return slice(*(node for node, _ in pairs)), slice(*(real for _, real in pairs))


# -- objects that constant folding makes --------------------------------------------------------------------------------
FRESH.row(tuple)(lambda m, obj: TupleValue([fresh(m, item) for item in obj]))
FRESH.row(torch.Size)(lambda m, obj: SizeValue([fresh(m, item) for item in obj]))
FRESH.row(list)(lambda m, obj: ListValue([fresh(m, item) for item in obj]))
FRESH.row(slice)(lambda m, obj: SliceValue(fresh(m, obj.start), fresh(m, obj.stop), fresh(m, obj.step)))
