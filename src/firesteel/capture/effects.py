"""Effects: everything that the captured program changes, in order, without touching the user's objects.

While capturing, a change goes to shadow state (the Value's own items, or the attribute overlay here).  If the object
existed before the region, the change is also an `Effect`, replayed by the generated code after the graph call, in order.
A change of an object made inside needs no effect: the object is rebuilt in its last state.

    m.effects.store_attr(module_value, "steps", ConstValue(3))
    m.effects.log("append", list_value, item)
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from firesteel.capture.values.base import Value
from firesteel.records import dataclass
from firesteel.table import Table


class _Deleted(Value):
    """In the attribute overlay: the attribute was deleted."""

    def rebuild(self, e: Any) -> str:
        return e.constant(self)


DELETED = _Deleted()


class Literal(Value):
    """A fixed object as data of an effect."""

    def __init__(self, obj: Any):
        self.obj = obj

    def rebuild(self, e: Any) -> str:
        return e.constant(self.obj)


@dataclass(frozen=True)
class Effect:
    kind: str                   # a row of REPLAY
    target: Value
    data: tuple[Value, ...]
    name: str = ""


# kind -> function(emitter, target text, data texts, name) -> a statement
REPLAY: Table[Callable[[Any, str, list[str], str], str]] = Table("effect", "capture/effects.py")

REPLAY.rows({
    "append": lambda e, t, d, n: f"{t}.append({d[0]})",
    "extend": lambda e, t, d, n: f"{t}.extend({d[0]})",
    "assign": lambda e, t, d, n: f"{t}[:] = {d[0]}",
    "pop": lambda e, t, d, n: f"{t}.pop({d[0]})",
    "clear": lambda e, t, d, n: f"{t}.clear()",
    "add": lambda e, t, d, n: f"{t}.add({d[0]})",
    "discard": lambda e, t, d, n: f"{t}.discard({d[0]})",
    "setitem": lambda e, t, d, n: f"{t}[{d[0]}] = {d[1]}",
    "delitem": lambda e, t, d, n: f"del {t}[{d[0]}]",
    "setattr": lambda e, t, d, n: f"{t}.{n} = {d[0]}" if n.isidentifier() else f"setattr({t}, {n!r}, {d[0]})",
    "set_plain": lambda e, t, d, n: f"object.__setattr__({t}, {n!r}, {d[0]})",
    "set_own": lambda e, t, d, n: f"object.__getattribute__({t}, '__dict__')[{n!r}] = {d[0]}",
    "delattr": lambda e, t, d, n: f"del {t}.{n}",
    "cell": lambda e, t, d, n: f"{t}.cell_contents = {d[0]}",
    "empty_cell": lambda e, t, d, n: f"del {t}.cell_contents",
    "statement": lambda e, t, d, n: n.format(*d),
})


# effect on the builtin part of an object -> the builtin's method that does it
NATIVE_METHOD = {"append": "append", "extend": "extend", "pop": "pop", "clear": "clear", "add": "add", "discard": "discard",
                 "setitem": "__setitem__", "delitem": "__delitem__"}


REPLAY.row("native")(lambda e, target, data, name: f"{data[0]}.{name}({', '.join([target, *data[1:]])})")
REPLAY.row("native_assign")(lambda e, target, data, name: f"{data[0]}.__setitem__({target}, slice(None), {data[1]})")


class Effects:
    """The effects of one capture; undoable back to a mark."""

    def __init__(self) -> None:
        self.entries: list[Effect] = []
        self.writes_classes = False         # has an attribute of a class of the user's been set?
        self._attributes: dict[int, tuple[Value, dict[str, Value]]] = {}
        self._undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    # -- recording -------------------------------------------------------------------------------------------------
    def log(self, kind: str, target: Value, *data: Value, name: str = "") -> None:
        """An effect on `target`; nothing to replay where it was made inside."""
        if target.source is None:
            return
        holder = getattr(target, "holder", None)
        if holder is not None and kind in NATIVE_METHOD:        # past the methods of the class, which have run
            self.entries.append(Effect("native", target, (Literal(holder.base), *data), NATIVE_METHOD[kind]))
        elif holder is not None and kind == "assign":
            self.entries.append(Effect("native_assign", target, (Literal(holder.base), *data)))
        else:
            self.entries.append(Effect(kind, target, data, name))

    def do(self, kind: str, target: Value, *data: Value) -> None:
        """An effect on an object that only the generated code makes."""
        self.entries.append(Effect(kind, target, data))

    def change(self, obj: Any, field: str, new: Any) -> None:
        """Shadow state: obj.field = new."""
        self._undo.append((setattr, (obj, field, getattr(obj, field))))
        setattr(obj, field, new)

    def on_undo(self, fn: Callable[..., Any], *args: Any) -> None:
        self._undo.append((fn, args))

    # -- attributes ------------------------------------------------------------------------------------------------
    def attributes(self, target: Value) -> dict[str, Value]:
        """Name -> Value (or DELETED) of what was stored on an object here."""
        found = self._attributes.get(id(target))
        if found is None:
            found = self._attributes[id(target)] = (target, {})
        return found[1]

    def written(self, target: Value, name: str) -> Value | None:
        found = self._attributes.get(id(target))
        return found[1].get(name) if found is not None else None

    def store_attr(self, target: Value, name: str, value: Value, kind: str = "setattr") -> None:
        self.shadow(target, name, value)
        self.log(kind, target, value, name=name)

    def delete_attr(self, target: Value, name: str) -> None:
        self.shadow(target, name, DELETED)
        self.log("delattr", target, name=name)

    def shadow(self, target: Value, name: str, value: Value) -> None:
        """What reads find; nothing is replayed."""
        stored = self.attributes(target)
        old = stored.pop(name, None) if stored.get(name) is DELETED else stored.get(name)
        stored[name] = value        # one that was deleted comes back at the end
        self._undo.append((stored.pop, (name,)) if old is None else (stored.__setitem__, (name, old)))

    # -- speculation -----------------------------------------------------------------------------------------------
    def mark(self) -> tuple[int, int]:
        return len(self.entries), len(self._undo)

    def undo_since(self, mark: tuple[int, int]) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
        return self._undo[mark[1]:]

    def overlays(self) -> list[tuple[Value, dict[str, Value]]]:
        """Every object on which attributes were stored here, with these."""
        return list(self._attributes.values())

    def rollback(self, mark: tuple[int, int]) -> None:
        entries, undo = mark
        while len(self._undo) > undo:
            fn, args = self._undo.pop()
            fn(*args)
        del self.entries[entries:]

    # -- replay ----------------------------------------------------------------------------------------------------
    def emit(self, e: Any) -> None:
        """Writes the statements that do it all to the real objects."""
        for effect in self.entries:
            target = e.expr(effect.target)
            data = [e.expr(value) for value in effect.data]
            if statement := REPLAY[effect.kind](e, target, data, effect.name):
                e.line(statement)
