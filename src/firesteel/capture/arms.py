"""What the two ways of a branch on data leave: an arm is followed from the jump, and what it left is kept as pictures (joins.py joins these).

    before = AtJump(m, frame, stack)            # what may not be changed by an arm
    before.follow(start, meet)                  # Arm: its nodes as a graph, and what local variables, the stack and places of objects hold then

What always holds: following an arm leaves the capture as it was.  NotJoined: it breaks, raises, or changes something that is no place.
"""
from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx

from firesteel.capture.control_flow import EXIT
from firesteel.capture.effects import DELETED, Effect
from firesteel.capture.frames import Frame, restore_frame
from firesteel.capture.liveness import live_slots
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import NULL, Unjoinable, UserRaise, Value
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.containers import ListValue, TupleValue, drop_last
from firesteel.capture.values.either import OfTwo
from firesteel.capture.values.functions import CellValue
from firesteel.capture.values.iterators import IteratorValue
from firesteel.capture.values.mappings import MISSING, DictValue, restore_entry
from firesteel.capture.values.number import SymNumber
from firesteel.capture.values.objects import ObjectValue
from firesteel.capture.values.tensor import TensorValue
from firesteel.errors import Break
from firesteel.records import dataclass
from firesteel.torchstate import is_stale

Node = torch.fx.Node


class NotJoined(Exception):
    """The arms cannot be joined."""


class Differ(NotJoined):
    """They leave different things that are not tensors: perhaps they can be joined behind the branch that asks for these."""


# -- places that arms change ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class CellPlace:
    """The content of a cell, which must be decided."""
    cell: CellValue

    def read(self, m: Machine) -> Value | None:
        return None if self.cell.content is None else m.look(self.cell.content)

    def write(self, m: Machine, value: Value) -> None:
        m.effects.change(self.cell, "content", value)


@dataclass(frozen=True, eq=False)
class AttributePlace:
    """An attribute of an object made here."""
    owner: ObjectValue
    name: str

    def read(self, m: Machine) -> Value | None:
        return m.effects.attributes(self.owner).get(self.name, DELETED)

    def write(self, m: Machine, value: Value) -> None:
        m.effects.shadow(self.owner, self.name, value)


@dataclass(frozen=True, eq=False)
class ItemsPlace:
    """The items of a list made here, which must be decided."""
    owner: ListValue

    def read(self, m: Machine) -> Value | None:
        return TupleValue(list(self.owner.items))

    def write(self, m: Machine, value: Value) -> None:
        m.effects.change(self.owner, "items", list(value.items))        # type: ignore[attr-defined]  # as it was read


def is_list_made_here(value: Any) -> bool:
    return type(value) is ListValue and value.source is None


@dataclass(frozen=True, eq=False)
class EntryPlace:
    """An entry of a dict made here; `new` is the key of one that both arms add."""
    entries: dict[Any, tuple[Value, Value]]
    key: Any
    new: Any

    def read(self, m: Machine) -> Value | None:
        return self.entries[self.key][1] if self.key in self.entries else None

    def write(self, m: Machine, value: Value) -> None:
        old = self.entries.get(self.key, MISSING)
        self.entries[self.key] = (self.new if old is MISSING else old[0], value)
        m.effects.on_undo(restore_entry, self.entries, self.key, old)


@dataclass(frozen=True, eq=False)
class StorePlace:
    """An attribute or an entry of an object of the user's, by the effect that stores it: stored once, behind the branch."""
    effect: Effect

    @property
    def key(self) -> tuple[int, Any]:
        return id(self.effect.target.identity()), self.effect.name or self.effect.data[0].constant()

    def owner(self, m: Machine) -> Any:
        return m.read(self.effect.target.identity(), self.effect.target.source)

    def read(self, m: Machine) -> Value | None:
        effect, owner = self.effect, self.owner(m)
        try:
            return m.look(owner.getattr(m, effect.name) if effect.name else owner.getitem(m, effect.data[0]))
        except UserRaise:       # there is none yet
            return None

    def write(self, m: Machine, value: Value) -> None:
        if self.effect.name:
            m.effects.store_attr(self.owner(m), self.effect.name, value, self.effect.kind)
        else:
            self.owner(m).setitem(m, self.effect.data[0], value)


Place = CellPlace | ItemsPlace | AttributePlace | EntryPlace | StorePlace
STORES = {"setattr": ObjectValue, "set_plain": ObjectValue, "set_own": ObjectValue, "setitem": DictValue}      # effect -> what it is made on


def stores(entries: Iterable[Effect]) -> dict[tuple[int, Any], StorePlace]:
    """The places that effects of an arm store; refuses all other effects."""
    places = [StorePlace(effect) for effect in entries]
    for effect in (place.effect for place in places):
        kind = STORES.get(effect.kind)
        if kind is None or not isinstance(effect.target, kind) or not effect.name and not effect.data[0].is_constant():
            raise NotJoined
    return {place.key: place for place in places}


# -- rounds of a loop (rounds.py) ------------------------------------------------------------------------------------------
GOING, LEFT_AT = ".going", ".left at"       # slots at the end of a round: comes another?  The exit that was taken, where there are several


@dataclass(frozen=True, eq=False)
class Round:
    """While a round of a loop is followed in a frame, it ends where the next begins, and at exits."""
    frame: Frame
    start: int
    exits: frozenset[int]

    @property
    def ends(self) -> frozenset[int]:
        return self.exits | {self.start}

    @staticmethod
    def ends_in(m: Machine, f: Frame) -> frozenset[int]:
        """Where the round that is followed in this frame ends."""
        return m.round.ends if m.round is not None and m.round.frame is f else frozenset()

    def end(self, m: Machine) -> tuple[dict[str, Value], list[Value]]:
        """What is left at the end."""
        f = self.frame
        live = {GOING, LEFT_AT}.union(*(live_slots(f.code, place) for place in self.ends))
        slots = {name: value for name, value in f.slots.items() if name in live}
        if GOING not in slots:
            slots[GOING] = ConstValue(f.pc == self.start)
            if f.pc != self.start and LEFT_AT in slots:
                slots[LEFT_AT] = ConstValue(f.pc)
        return slots, f.stack


# -- an arm ------------------------------------------------------------------------------------------------------------
@dataclass
class Arm:
    """What one arm left, and its nodes, copied before the capture goes back."""
    graph: torch.fx.Graph
    lifted: dict[Node, Node]                    # nodes outside -> placeholders
    copies: dict[Node, Node]
    slots: dict[str, Any]
    stack: list[Any]
    changes: dict[tuple[int, Any], tuple[Place, Any]]


class AtJump:
    """The capture at the jump: what may not be changed by an arm."""

    def __init__(self, m: Machine, f: Frame, stack: list[Value]):
        self.m, self.f, self.stack = m, f, stack
        self.slots, self.pc, self.old_stack = dict(f.slots), f.pc, list(f.stack)
        self.known = reachable([m.modes, m.leaves, m, *(part for one in m.frames for part in (one, one.slots, one.stack, one.closure)),
                                *m.known_values(Value), *m.effects.overlays()])
        self.tensors = [(t, t._version, t.requires_grad, layout(t)) for t, _ in m.record.tensors.values()]
        self.states, self.asserts = m.states.changed(), assert_count(m)

    def changed(self, undo: Iterable[tuple[Callable[..., Any], tuple[Any, ...]]], stored: set[int],
                gone: frozenset[int]) -> dict[tuple[int, Any], Place]:
        """The places of objects from before that an arm changed; refuses all other changes of such objects, but of those `stored`."""
        owners = {id(attributes): target for target, attributes in self.m.effects.overlays()}
        first: dict[tuple[int, Any], tuple[Any, str, Any]] = {}
        places: dict[tuple[int, Any], Place] = {}
        for fn, args in undo:
            owner = getattr(fn, "__self__", None)
            target = owners.get(id(owner)) or (args[0] if fn is setattr or owner is None or isinstance(owner, type(gc)) else owner)
            if fn is setattr:
                first.setdefault((id(target), args[1]), args)
            elif id(target) in self.known and id(target) not in stored:
                places[id(target), "items" if fn is drop_last else args[fn is restore_entry]] = self._place(fn, target, args)
        for (key, name), (target, _, old) in first.items():
            new = getattr(target, name)
            if key not in self.known or key in gone or new is old or not isinstance(target, Value) and new == old:
                continue
            if isinstance(target, CellValue) and name == "content" and new is not None:
                places[key, name] = CellPlace(target)
            elif is_list_made_here(target) and name == "items":
                places[key, name] = ItemsPlace(target)
            else:
                raise NotJoined
        return places

    def _place(self, fn: Callable[..., Any], target: Any, args: tuple[Any, ...]) -> Place:
        if fn is restore_entry:
            return self._entry(*args)
        if isinstance(target, ObjectValue) and getattr(fn, "__self__", None) is self.m.effects.attributes(target):
            return AttributePlace(target, args[0])
        if fn is drop_last and is_list_made_here(target):
            return ItemsPlace(target)
        raise NotJoined

    def _entry(self, entries: dict[Any, tuple[Value, Value]], key: Any, old: Any) -> EntryPlace:
        if key not in entries or old is MISSING and not entries[key][0].is_constant():
            raise NotJoined
        return EntryPlace(entries, key, entries[key][0] if old is MISSING else None)

    def _left_behind(self, *held: Any) -> frozenset[int]:
        """The iterators of loops that an arm has left, with what only they hold."""
        loops = [item for item in self.stack if isinstance(item, IteratorValue)]
        if not loops:
            return frozenset()
        outer = [part for one in self.m.frames for part in (one.slots, one.stack, one.closure) if one is not self.f]
        others = reachable([*held, self.slots, self.f.closure, *outer, *self.m.known_values(Value), *self.m.effects.overlays()])
        return frozenset(reachable(loops).keys() - others.keys())

    def check(self, mark: tuple[Any, ...], gone: frozenset[int]) -> dict[tuple[int, Any], Place]:
        """The places that an arm changed; what has `gone` nobody sees."""
        m = self.m
        other = any(t.requires_grad != tracked or t._version != version and layout(t) != before for t, version, tracked, before in self.tensors)
        if other or self.asserts != assert_count(m):
            raise Unjoinable(m.steps)
        if m.states.changed() != self.states or m.handling is not mark[3]:
            raise NotJoined
        places = stores(m.effects.entries[mark[1][0]:])
        targets: list[Any] = [place.effect.target for place in places.values()]
        return {**self.changed(m.effects.undo_since(mark[1]), {id(getattr(target, "entries", target)) for target in targets}, gone), **places}

    def follow(self, start: int, meet: int) -> Arm:
        m, f = self.m, self.f
        if meet == EXIT and m.round is not None and m.round.frame is f:
            return self._follow(start, m.round.ends, self.slots, self.stack, lambda _: m.round.end(self.m))
        if meet == EXIT:
            return self._follow(start, None, self.slots, self.stack, lambda returned: ({}, [returned]))
        return self._follow(start, frozenset({meet}), self.slots, self.stack,
                            lambda _: ({name: f.slots[name] for name in f.slots if name in live_slots(f.code, meet)}, f.stack))

    def follow_round(self, one: Round, slots: dict[str, Value], stack: list[Value]) -> Arm:
        """A round of a loop, from values that may be others than those at the jump."""
        m, outer, known = self.m, self.m.round, self.m.answers
        m.round, m.answers = one, ()        # an earlier round may have written a condition
        try:
            return self._follow(one.start, one.ends, slots, stack, lambda _: one.end(m), moving=True)
        finally:
            m.round, m.answers = outer, known

    def _follow(self, start: int, stops: frozenset[int] | None, slots: dict[str, Value], stack: list[Value],
                left: Callable[[Value], tuple[dict[str, Value], list[Value]]], moving: bool = False) -> Arm:
        """From `start` until the frame comes to one of `stops`, or returns; `left` says what is of interest then."""
        m, f = self.m, self.f
        mark, depth = m.checkpoint(), len(m.frames) - 1
        restore_frame(f, (start, stack, slots))
        try:
            returned = m.run(depth, None if stops is None else (f, stops), moving)
            places = self.check(mark, self._left_behind(*((returned,) if stops is None else (f.stack, f.slots))))
            return self._arm(mark[0][0], *left(returned), places)
        except (Break, UserRaise):
            raise NotJoined from None
        finally:
            m.frames[depth:] = [f]
            m.rollback(mark)
            restore_frame(f, (self.pc, self.old_stack, self.slots))

    def _arm(self, start: int, slots: dict[str, Value], stack: list[Value], places: dict[tuple[int, Any], Place]) -> Arm:
        graph, lifted, copies = torch.fx.Graph(), {}, {}
        seen: dict[int, Any] = {}
        pictures = ({name: self.picture(value, seen) for name, value in slots.items()}, [self.picture(value, seen) for value in stack],
                    {key: (place, self.content(place, seen)) for key, place in places.items()})
        nodes = self.m.record.nodes[start:]
        inside = set(nodes)
        for read in dict.fromkeys(before for node in nodes for before in node.all_input_nodes if before not in inside):
            lifted[read] = copies[read] = placeholder_for(graph, read)
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return Arm(graph, lifted, copies, *pictures)

    def content(self, place: Place, seen: dict[int, Any]) -> Any:
        value = place.read(self.m)
        if value is None:
            raise NotJoined
        return self._sequence(value, seen) if isinstance(place, ItemsPlace) else self.picture(value, seen)

    def picture(self, value: Value, seen: dict[int, Any]) -> Any:
        """A value as it is now: going back undoes changes of what was made on the way."""
        if id(value) not in seen:
            seen[id(value)] = self._drawn(value, seen)
        return seen[id(value)]

    def _drawn(self, value: Value, seen: dict[int, Any]) -> Any:
        if isinstance(value, TensorValue):
            return TensorPicture(value, value.node, value.abstract)
        if value is NULL or value is DELETED or id(value) in self.known or value.is_constant() or value.source is not None:
            return value
        if isinstance(value, SymNumber):
            return NumberPicture(value.python_type(), value.as_arg(self.m)[0])
        if isinstance(value, OfTwo):
            return EitherPicture(self.picture(value.flag, seen), value.number, self.picture(value.other, seen))
        if isinstance(value, (TupleValue, ListValue)) and type(value) in (TupleValue, ListValue):
            return self._sequence(value, seen)
        return Other(value)

    def _sequence(self, value: Any, seen: dict[int, Any]) -> SequencePicture:
        return SequencePicture(type(value), [self.picture(self.m.look(item), seen) for item in value.items])


@dataclass(eq=False)
class TensorPicture:
    value: TensorValue
    node: Node
    abstract: torch.Tensor


@dataclass(eq=False)
class NumberPicture:
    """A number that an arm computed, or one of two constants."""
    type: type
    node: Any               # of the graph, or the number


@dataclass(eq=False)
class FullPicture:
    """A flag as a tensor like that of the other arm."""
    abstract: torch.Tensor
    flag: bool
    node: None = None


@dataclass(eq=False)
class SequencePicture:
    kind: type
    items: list[Any]


@dataclass(eq=False)
class UndecidedPicture:
    """What a place holds: as each arm left it."""
    arms: tuple[Any, Any]


@dataclass(eq=False)
class EitherPicture:
    """A number or a tensor: pictures of the flag and of the tensor, or their places among the results; None for what an arm has not."""
    flag: Any
    number: Value | None
    tensor: Any


@dataclass(eq=False)
class Other:
    """Something that only one arm knows."""
    value: Value


def layout(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.storage_offset()


def placeholder_for(graph: torch.fx.Graph, node: Node) -> Node:
    made = graph.placeholder(node.name)
    val = node.meta.get("val")
    parameter = isinstance(val, torch.Tensor) and val.requires_grad and not is_stale(val) and val.is_leaf
    made.meta = dict(node.meta) if parameter else {**node.meta, "held": True}
    return made


def assert_count(m: Machine) -> int:
    """How many facts about data the program has stated."""
    return 0 if m.world.env is None else len(m.world.env.asserts)


WALKED = (Value, Frame, list, dict, tuple, set)


def reachable(roots: Iterable[Any]) -> dict[int, Any]:
    """The Values, frames and containers that can be reached, by their ids; held, so that no later object gets one of these."""
    seen: dict[int, Any] = {}
    todo = list(roots)
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            # not isinstance, which asks an object for its class: it may warn
            todo += [other for other in gc.get_referents(one) if issubclass(type(other), WALKED)] if issubclass(type(one), WALKED) else ()
    return seen
