"""Iterators: over sequences, zips, maps, generators, and the user's own iterator objects.

An iterator made inside the region is rebuilt, at a break, as a real iterator that is as far along.  A real list, tuple or
range iterator that comes in (after a break in a loop) is not specialised on its position: elements are *peeked*
(`Peek` sources), "is there another" is a guard, and the real iterator is advanced by an effect.  So a loop with a break in it
needs a few entries, not one an iteration.
"""
from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any

from firesteel.capture.effects import REPLAY
from firesteel.capture.guards import Guard
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Applied, Source, is_stack_item
from firesteel.capture.values.base import LazyValue, Value
from firesteel.capture.values.const import FALSE, TRUE, ConstValue
from firesteel.capture.values.containers import TupleValue
from firesteel.errors import Break


# -- helpers of generated code ------------------------------------------------------------------------------------------
def advance(iterator: Iterator[Any], steps: int) -> Iterator[Any]:
    """The iterator, `steps` elements later."""
    for _ in itertools.islice(iterator, steps):
        pass
    return iterator


CHANGED = (None,)       # stands for what a dict or set gives that changed while it was iterated over


def sequence_of(iterator: Any) -> tuple[Any, int]:
    """What an iterator runs over, and how far it is; an exhausted one runs over ().  Of a dict or a set it is a list of what is left."""
    try:
        state = iterator.__reduce__()
    except RuntimeError:        # the dict has another size now
        return CHANGED, 0
    if len(state) < 3:
        return state[1][0], 0
    return state[1][0], state[2] or 0       # a range iterator's range is what is left of it; its state is None from 3.12 on


def parts_of(iterator: Any) -> Any:
    """What a zip, enumerate, map or filter object was made of."""
    return iterator.__reduce__()[1]


def is_strict(iterator: Any) -> bool:
    return len(iterator.__reduce__()) > 2


def is_peekable(iterator: Any) -> bool:
    """Can its next elements be looked at without advancing it?"""
    if type(iterator) is enumerate:
        return is_peekable(parts_of(iterator)[0])
    if type(iterator) is zip:
        parts = parts_of(iterator)
        return bool(parts) and not is_strict(iterator) and len({id(part) for part in parts}) == len(parts) and all(map(is_peekable, parts))
    return type(iterator) in PEEKABLE


def peek(iterator: Any, ahead: int) -> Any:
    """The element that the (ahead+1)-th next() will give."""
    if type(iterator) is enumerate:
        inner, count = parts_of(iterator)
        return count + ahead, peek(inner, ahead)
    if type(iterator) is zip:
        return tuple(peek(part, ahead) for part in parts_of(iterator))
    sequence, index = sequence_of(iterator)
    return sequence[index + ahead]


def has_more(iterator: Any, ahead: int) -> bool | None:
    """None where only the real next() decides: it will raise."""
    if type(iterator) is enumerate:
        return has_more(parts_of(iterator)[0], ahead)
    if type(iterator) is zip:
        return all(has_more(part, ahead) for part in parts_of(iterator))
    sequence, index = sequence_of(iterator)
    return None if sequence is CHANGED else index + ahead < len(sequence)


REPLAY.add("advance", lambda e, target, data, name: f"{e.constant(advance)}({target}, 1)")


class Peek(Applied):
    """The element that an iterator gives after `key` others, without advancing it."""

    __slots__ = ()
    function = staticmethod(peek)

    @property
    def name(self) -> str:
        if is_stack_item(self.base):
            return "the loop's next value" if self.key == 0 else f"the loop's value after {self.key} others"
        return f"next({self.base.name})" if self.key == 0 else f"peek({self.base.name}, {self.key})"


class HasMore(Applied):
    """Does an iterator give more than `key` elements?"""

    __slots__ = ()
    function = staticmethod(has_more)

    @property
    def name(self) -> str:
        return f"more than {self.key} left in {'the loop' if is_stack_item(self.base) else self.base.name}"


LIST_ITERATOR: type = type(iter([]))
PEEKABLE: tuple[type, ...] = (
    type(iter([])), type(iter(())), type(iter(range(1))), type(iter("")), type(iter("\u0100")), type(iter(range(1 << 70))), type(iter({})),
    type(iter({}.values())), type(iter({}.items())), type(iter(collections.OrderedDict())), type(iter(set())))


# -- values -------------------------------------------------------------------------------------------------------------
class IteratorValue(Value):
    """What all iterators share."""

    words = "iterator"
    always_true = True

    def iterator(self, m: Machine) -> Value:
        return self

    def iterate(self, m: Machine) -> list[Value]:
        return m.drain(self)

    def contains(self, m: Machine, item: Value) -> Value:
        while (mine := m.next_now(self)) is not None:
            if m.equal(mine, item):
                return TRUE
        return FALSE

    def getattr(self, m: Machine, name: str) -> Value:
        if name == "__next__":
            return m.bound_builtin(next, self)
        if name == "__iter__":
            return m.bound_builtin(iter, self)
        return super().getattr(m, name)


class SequenceIterator(IteratorValue):
    """Over a container or constant of the region; sees items that are appended while it runs, as in Python."""

    cls: type = type(iter([]))

    def __init__(self, owner: Value, index: int = 0, items: list[Value] | None = None):
        self.owner, self.index, self.items = owner, index, items
        self.size = owner.size_now()

    def all_items(self) -> list[Value]:
        return self.owner.items if self.items is None else self.items      # type: ignore[attr-defined]  # a sequence, without `items`

    def next(self, m: Machine) -> Value | None:
        items = self.all_items()
        if self.owner.size_now() != self.size:
            raise m.raise_real(RuntimeError(f"{self.owner.size_name} changed size during iteration"))
        if self.index >= len(items):
            return None
        item = m.look(items[self.index])
        m.effects.change(self, "index", self.index + 1)
        return item

    def rebuild(self, e: Emitter) -> str:
        start = f"iter({e.expr(self.owner)})"
        return start if self.index == 0 else f"{e.constant(advance)}({start}, {self.index})"


class RealIterator(IteratorValue):
    """An iterator over a container of the user's (or of ours, from before a break)."""

    def __init__(self, obj: Any, source: Source):
        self.obj, self.source, self.taken = obj, source, 0

    def python_type(self) -> type:
        return type(self.obj)

    def next(self, m: Machine) -> Value | None:
        container = m.same_object(sequence_of(self.obj)[0]) if type(self.obj) is LIST_ITERATOR else None
        if container is not None and any(effect.target is container for effect in m.effects.entries):
            raise Break("iterate", value="a list that was changed meanwhile")
        more = has_more(self.obj, self.taken)
        if more is None:
            raise Break("iterate", value="what changed its size while it was iterated over")
        m.guard(Guard(HasMore(self.source, self.taken), "truth", more))
        if not more:
            return None
        item = m.look(LazyValue(peek(self.obj, self.taken), Peek(self.source, self.taken)))
        m.effects.change(self, "taken", self.taken + 1)
        m.effects.log("advance", self)
        return item


class ZipIterator(IteratorValue):
    """zip(*iterables)"""

    cls = zip

    def __init__(self, parts: list[Value], strict: bool = False, source: Source | None = None, obj: Any = None):
        self.parts, self.strict, self.source, self.obj = parts, strict, source, obj

    def next(self, m: Machine) -> Value | None:
        found: list[Value] = []
        for part in self.parts:
            item = m.next_now(part)
            if item is None:
                if self.strict:
                    self._check_ends(m, len(found))
                return None
            found.append(item)
        return TupleValue(found) if self.parts else None

    def _check_ends(self, m: Machine, ended: int) -> None:
        """The part with this index is exhausted: with strict, all others must be."""
        before = "argument 1" if ended == 1 else f"arguments 1-{ended}"
        if ended:
            raise m.raise_real(ValueError(f"zip() argument {ended + 1} is shorter than {before}"))
        for n, part in enumerate(self.parts[1:], 2):
            if m.next_now(part) is not None:
                before = "argument 1" if n == 2 else f"arguments 1-{n - 1}"
                raise m.raise_real(ValueError(f"zip() argument {n} is longer than {before}"))

    def rebuild(self, e: Emitter) -> str:
        return f"zip({', '.join(e.expr(p) for p in self.parts)}{', strict=True' if self.strict else ''})"


class EnumerateIterator(IteratorValue):
    """enumerate(iterable, start)"""

    cls = enumerate
    form = "enumerate({part}, {count})"

    def __init__(self, part: Value, count: Value):
        self.part, self.count = part, count

    def next(self, m: Machine) -> Value | None:
        item = m.next_now(self.part)
        if item is None:
            return None
        pair = TupleValue([self.count, item])
        m.effects.change(self, "count", m.binary("+", self.count, ConstValue(1)))
        return pair


class MapIterator(IteratorValue):
    """map(fn, *iterables)"""

    cls = map
    form = "map({fn}, {parts})"

    def __init__(self, fn: Value, parts: list[Value], source: Source | None = None, obj: Any = None):
        self.fn, self.parts, self.source, self.obj = fn, parts, source, obj

    def next(self, m: Machine) -> Value | None:
        items: list[Value] = []
        for part in self.parts:
            item = m.next_now(part)
            if item is None:
                return None
            items.append(item)
        return m.call_now(self.fn, items, {})


class FilterIterator(IteratorValue):
    """filter(fn, iterable)"""

    cls = filter
    form = "filter({fn}, {part})"

    def __init__(self, fn: Value, part: Value, source: Source | None = None, obj: Any = None):
        self.fn, self.part, self.source, self.obj = fn, part, source, obj

    def next(self, m: Machine) -> Value | None:
        while (item := m.next_now(self.part)) is not None:
            kept = item if self.fn.is_constant() else m.call_now(self.fn, [item], {})
            if kept.truth(m):
                return item
        return None
