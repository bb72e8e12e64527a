"""`if` on data: both arms are executed symbolically, and become one call of the graph (autograd/branches.py).

The arms are followed from the jump to the place where they meet, or until the function returns.  What each records is taken out of the graph
and becomes a body; local variables and stack items that differ there and are tensors described alike, or numbers of one type, become results of
the call.  Where they leave different flags (`skip = True`), they are followed past the branch that asks for the flag, if that can be done.

Attributes and entries may differ in any way (a cache that one arm fills), and so may local variables that the program only hands on: an `Undecided`
stands there, which the run function decides when it makes the object, or stores there if it is one of the user's, and which nobody may look at
before.  A tensor from before that an arm writes is written by the body, which is given it: it needs no result.

What always holds: where the arms cannot be joined the capture is as before, and the branch is a break as it always was.  They cannot where one
breaks, raises, changes lists of the user's or the states of torch, or where they leave lists of different lengths.
An arm by which a tensor made before gets a history or another shape leaves abstract tensors changed: the capture then starts again with a break
here (`Unjoinable`).
A result may be the same tensor as an input, which no later write may be in doubt about: `refuse_written` checks that at the end.

    if x.sum() > 0: y = x.sin()             # branch(gt, x); y = getitem(branch, 0)
    else: y = x.cos()

Where one arm only raises, the branch is a check, and that arm runs in eager from there (`exit_writer` of translate.py).

    if not (x > 0).all(): raise ValueError(f"{x} is not positive")          # check(all, x)
"""
from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx

from firesteel.autograd.branches import branch_of, check_of, joined_like
from firesteel.autograd.regions import module_of
from firesteel.capture.code import program
from firesteel.capture.control_flow import EXIT, meeting_places, only_raises
from firesteel.capture.effects import DELETED, Effect
from firesteel.capture.frames import Frame, restore_frame
from firesteel.capture.instr import Instr
from firesteel.capture.liveness import live_slots
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import NULL, CannotRebuild, LazyValue, Undecided, Unjoinable, UserRaise, Value
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.containers import ListValue, TupleValue, drop_last
from firesteel.capture.values.functions import CellValue
from firesteel.capture.values.mappings import DictValue, restore_entry
from firesteel.capture.values.number import SymNumber, fits
from firesteel.capture.values.objects import ObjectValue
from firesteel.capture.values.tensor import TensorValue, wrap_item
from firesteel.capture.values.torch_calls import run_abstract
from firesteel.capture.values.wrappers import is_wrapper_class
from firesteel.errors import Break
from firesteel.records import dataclass
from firesteel.sym.symint import SYMBOLIC, to_symint

Node = torch.fx.Node
DEPTH = 6       # of branches inside of branches
PLACES = 3      # at which a branch that is inside of no other is tried to be joined


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
    """An entry of a dict made here."""
    entries: dict[Any, tuple[Value, Value]]
    key: Any

    def read(self, m: Machine) -> Value | None:
        return self.entries[self.key][1] if self.key in self.entries else None

    def write(self, m: Machine, value: Value) -> None:
        old = self.entries[self.key]
        self.entries[self.key] = (old[0], value)
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

    def changed(self, undo: Iterable[tuple[Callable[..., Any], tuple[Any, ...]]], stored: set[int]) -> dict[tuple[int, Any], Place]:
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
            if key not in self.known or new is old or not isinstance(target, Value) and new == old:
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
            return EntryPlace(target, args[1])
        if isinstance(target, ObjectValue) and getattr(fn, "__self__", None) is self.m.effects.attributes(target):
            return AttributePlace(target, args[0])
        if fn is drop_last and is_list_made_here(target):
            return ItemsPlace(target)
        raise NotJoined

    def check(self, mark: tuple[Any, ...]) -> dict[tuple[int, Any], Place]:
        m = self.m
        other = any(t.requires_grad != tracked or t._version != version and layout(t) != before for t, version, tracked, before in self.tensors)
        if other or self.asserts != assert_count(m):
            raise Unjoinable(m.steps)
        if m.states.changed() != self.states or m.handling is not mark[3]:
            raise NotJoined
        places = stores(m.effects.entries[mark[1][0]:])
        targets: list[Any] = [place.effect.target for place in places.values()]
        return {**self.changed(m.effects.undo_since(mark[1]), {id(getattr(target, "entries", target)) for target in targets}), **places}

    def follow(self, start: int, meet: int) -> Arm:
        m, f = self.m, self.f
        mark, depth = m.checkpoint(), len(m.frames) - 1
        restore_frame(f, (start, self.stack, self.slots))
        try:
            returned = m.run(depth, None if meet == EXIT else (f, meet))
            places = self.check(mark)
            return self._arm(mark[0][0], {} if meet == EXIT else {name: f.slots[name] for name in f.slots if name in live_slots(f.code, meet)},
                             [returned] if meet == EXIT else f.stack, places)
        except (Break, UserRaise):
            raise NotJoined from None
        finally:
            m.frames[depth:] = [f]
            m.rollback(mark)
            restore_frame(f, (self.pc, self.old_stack, self.slots))

    def _arm(self, start: int, slots: dict[str, Value], stack: list[Value], places: dict[tuple[int, Any], Place]) -> Arm:
        graph, lifted, copies = torch.fx.Graph(), {}, {}
        seen: dict[int, Any] = {}
        pictures = ({name: self._picture(value, seen) for name, value in slots.items()}, [self._picture(value, seen) for value in stack],
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
        return self._sequence(value, seen) if isinstance(place, ItemsPlace) else self._picture(value, seen)

    def _picture(self, value: Value, seen: dict[int, Any]) -> Any:
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
        if isinstance(value, (TupleValue, ListValue)) and type(value) in (TupleValue, ListValue):
            return self._sequence(value, seen)
        return Other(value)

    def _sequence(self, value: Any, seen: dict[int, Any]) -> SequencePicture:
        return SequencePicture(type(value), [self._picture(self.m.look(item), seen) for item in value.items])


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
class SequencePicture:
    kind: type
    items: list[Any]


@dataclass(eq=False)
class UndecidedPicture:
    """What a place holds: as each arm left it."""
    arms: tuple[Any, Any]


@dataclass(eq=False)
class Other:
    """Something that only one arm knows."""
    value: Value


def layout(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.storage_offset()


def placeholder_for(graph: torch.fx.Graph, node: Node) -> Node:
    made = graph.placeholder(node.name)
    val = node.meta.get("val")
    parameter = isinstance(val, torch.Tensor) and val.is_leaf and val.requires_grad
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
            todo += [other for other in gc.get_referents(one) if isinstance(other, WALKED)] if isinstance(one, WALKED) else ()
    return seen


# -- joining ------------------------------------------------------------------------------------------------------------
class Merge:
    """The results of the call, in order, and what the program continues with."""

    def __init__(self, m: Machine, arms: tuple[Arm, Arm], step: int, condition: Value, loose: bool):
        self.m, self.arms, self.step, self.condition = m, arms, step, condition
        self.loose = loose          # may local variables differ in any way?
        self.results: list[tuple[Any, Any]] = []        # TensorPictures or NumberPictures; None: only the other arm has one
        self._seen: dict[tuple[int, int], Any] = {}

    def merged(self, one: Any, other: Any) -> Any:
        """A Value, or the place of a result, or a picture of these."""
        if one is other:
            return one.value if isinstance(one, TensorPicture) else one
        key = id(one), id(other)
        if key not in self._seen:
            self._seen[key] = self._merge(one, other)
        return self._seen[key]

    def placed(self, place: Place | None, one: Any, other: Any) -> Any:
        """What a place, or a local variable, holds then: decided, where it can be."""
        try:
            return self.merged(one, other)
        except NotJoined:
            if isinstance(place, (CellPlace, ItemsPlace)) or place is None and not self.loose:
                raise
            return UndecidedPicture((self._of_one(one, 0), self._of_one(other, 1)))

    def _of_one(self, picture: Any, arm: int) -> Any:
        if not isinstance(picture, TensorPicture):
            if isinstance(picture, (SequencePicture, NumberPicture, Other)):
                raise NotJoined
            return picture
        self.results.append((picture, None) if arm == 0 else (None, picture))
        return len(self.results) - 1

    def _looked(self, picture: Any) -> Any:
        """An object of the user's that only one arm has looked at, or a tuple from before."""
        value = self.m.look(picture) if type(picture) is LazyValue else picture
        if type(value) is TupleValue:
            return SequencePicture(TupleValue, [self._looked(self.m.look(item)) for item in value.items])
        return TensorPicture(value, value.node, value.abstract) if isinstance(value, TensorValue) else value

    def _merge(self, one: Any, other: Any) -> Any:
        one, other = self._looked(one), self._looked(other)
        if one is other:
            return one
        if isinstance(one, TensorPicture) and isinstance(other, TensorPicture):
            if one.value is other.value:        # perhaps written
                return one.value
            if type(one.abstract) is not type(other.abstract) or is_wrapper_class(type(one.abstract)) or one.value.inference != other.value.inference:
                raise NotJoined
            self.results.append((one, other))
            return len(self.results) - 1
        if isinstance(one, SequencePicture) and isinstance(other, SequencePicture) and one.kind is other.kind and len(one.items) == len(other.items):
            return SequencePicture(one.kind, [self.merged(a, b) for a, b in zip(one.items, other.items)])
        if isinstance(one, ConstValue) and isinstance(other, ConstValue) and is_same(one.constant(), other.constant()):
            return one
        numbers = as_number(self.m, one), as_number(self.m, other)
        if numbers[0] is None or numbers[1] is None or numbers[0].type is not numbers[1].type or self.m.world.env is None \
                or numbers[0].type is bool and not self.loose:
            raise Differ
        self.results.append(numbers)
        return len(self.results) - 1

    def finished(self, nest: Any, made: list[Value]) -> Value:
        if isinstance(nest, int):
            return made[nest]
        if isinstance(nest, UndecidedPicture):
            return Undecided(self.step, self.condition, *(self.finished(item, made) for item in nest.arms))
        return nest.kind([self.finished(item, made) for item in nest.items]) if isinstance(nest, SequencePicture) else nest

    def call(self, condition: Node) -> list[Value]:
        """The call of the graph; its results."""
        m = self.m
        symbols = 0 if m.world.env is None else len(m.world.env.symbols)
        out = tuple(self._result(*pair) for pair in self.results)
        passed = [picture.node for pair in self.results for arm, picture in zip(self.arms, pair) if picture and picture.node not in arm.copies]
        outside = list(dict.fromkeys([*(node for arm in self.arms for node in arm.lifted), *(node for node in passed if isinstance(node, Node))]))
        bodies = [self._body(place, arm, outside) for place, arm in enumerate(self.arms)]
        self._note_aliases(out, [node.meta["val"] for node in outside])
        node = m.record.call_function(branch_of(*bodies), (condition, *outside), {}, out)
        if any(isinstance(val, SYMBOLIC) for val in out):
            node.meta["unbacked"] = m.world.env.unbacked_since(symbols)
        return [wrap_item(m, val, node, place) for place, val in enumerate(out)]

    def _result(self, one: Any, other: Any) -> Any:
        """What describes a result of both arms: an abstract tensor, or a number known at run time."""
        one, other = one or other, other or one
        if isinstance(one, NumberPicture):
            env = self.m.world.env
            known = sorted(picture.node for picture in (one, other) if type(picture.node) is int)
            return to_symint(env.create_unbacked(*(known if len(known) == 2 else (None, None)), "a branch", DTYPES[one.type]), env)
        val = run_abstract(self.m, joined_like, [one.abstract, other.abstract], {}, "a branch")
        if val is None:
            raise NotJoined
        return val

    def _note_aliases(self, vals: tuple[Any, ...], inputs: list[Any]) -> None:
        """Notes which results may share memory with one another or with an input."""
        m = self.m
        tensors = [(m.world.memory(t), t) for t in inputs if isinstance(t, torch.Tensor)]
        found = [t for arm in zip(*self.results) for n, picture in enumerate(arm) if isinstance(picture, TensorPicture)
                 for t in self._sharing(m.world.memory(picture.abstract), tensors,
                                        [m.world.memory(p.abstract) if isinstance(p, TensorPicture) else None for p in arm], vals, n)]
        if found:
            m.aliases.append((self.step, [(t, t._version) for t in found]))

    def _sharing(self, memory: int, inputs: list[tuple[int, torch.Tensor]], others: list[int | None], vals: tuple[Any, ...],
                 n: int) -> list[torch.Tensor]:
        found = [t for one, t in inputs if one == memory] + [t for k, t in enumerate(vals) if k != n and others[k] == memory]
        return [vals[n], *found] if found else []

    def _body(self, place: int, arm: Arm, outside: list[Node]) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        given = {node: placeholder_for(graph, node) for node in outside}
        copies = {inner: given[node] for node, inner in arm.lifted.items()}
        for node in arm.graph.nodes:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        wanted = [pair[place].node if pair[place] else self._nothing(graph, pair[not place]) for pair in self.results]
        graph.output(tuple(copies[arm.copies[node]] if node in arm.copies else given.get(node, node) for node in wanted))
        return module_of(graph, "Body")

    def _nothing(self, graph: torch.fx.Graph, other: TensorPicture) -> Node:
        """In the place of a tensor that only the other arm makes: an empty one, which nobody reads."""
        kwargs: dict[str, Any] = {"dtype": other.abstract.dtype, "device": other.abstract.device}
        made = graph.call_function(torch.empty, (0,), kwargs)
        made.meta.update(other.node.meta, val=run_abstract(self.m, torch.empty, [0], kwargs, "a branch"))
        return made


DTYPES = {int: "i64", float: "f64", bool: "bool"}


def as_number(m: Machine, picture: Any) -> NumberPicture | None:
    """The picture of a number; None where it is none."""
    if isinstance(picture, SymNumber):
        return NumberPicture(picture.python_type(), picture.as_arg(m)[0])
    if isinstance(picture, ConstValue) and type(number := picture.constant()) in DTYPES and fits(number):
        return NumberPicture(type(number), number)
    return picture if isinstance(picture, NumberPicture) else None


def is_same(one: Any, other: Any) -> bool:
    return one is other or type(one) is type(other) and one == other and repr(one) == repr(other)


def join(m: Machine, f: Frame, i: Instr, condition: Value) -> bool:
    """Goes on behind the branch, where both arms have been captured; False, with nothing changed, where they cannot be joined."""
    if is_readable(condition) and _checked(m, f, i, condition):
        return True
    if m.steps in m.unjoined or m.joining >= DEPTH or f.generator is not None or f.namespace is not None or not is_readable(condition):
        return False
    places, step = meeting_places(f.code, i.index), m.steps
    differ = False
    for meet in farther(f.code, places, 1 if m.joining else PLACES):
        try:
            if _joined_at(m, f, i, condition, meet, step, loose=False):
                return True
        except Differ:
            differ = True
    return differ and _joined_at(m, f, i, condition, places[0], step, loose=True)


def farther(code: types.CodeType, places: list[int], count: int) -> list[int]:
    """The nearest place, and those behind a later branch: flags that the arms set are not read any more there."""
    jumps = [place for place, before in zip(places[1:], places) if program(code)[before].target is not None]
    return [*places[:1], *jumps][:count]


def _joined_at(m: Machine, f: Frame, i: Instr, condition: Value, meet: int, step: int, loose: bool) -> bool:
    mark = m.checkpoint()
    m.joining += 1
    try:
        before = AtJump(m, f, f.stack[:-1])
        chosen = condition.as_arg(m)[0]
        jumps, goes_on = before.follow(i.target.index, meet), before.follow(i.index + 1, meet)
        arms = (goes_on, jumps) if i.opname == "POP_JUMP_IF_TRUE" else (jumps, goes_on)
        return _go_on(m, f, meet, before, Merge(m, arms, step, condition, loose), chosen)
    except Unjoinable:
        raise Unjoinable(step) from None
    except (NotJoined, Break) as error:
        m.rollback(mark)
        if isinstance(error, Differ) and not loose:
            raise
        return False
    finally:
        m.joining -= 1


def _checked(m: Machine, f: Frame, i: Instr, condition: Value) -> bool:
    """An arm that only raises is not followed: it runs in eager, from here, when the data says so."""
    starts = {i.opname == "POP_JUMP_IF_TRUE": i.target.index, i.opname != "POP_JUMP_IF_TRUE": i.index + 1}
    leaving = [truth for truth, start in starts.items() if only_raises(f.code, start)]
    modes = m.modes
    if m.exit is None or len(leaving) != 1 or m.draws or m.leaves.filled or m.leaves.turned or modes.entered or modes.asking or modes.inference:
        return False
    mark, pc = m.checkpoint(), f.pc
    try:
        f.pc = i.index
        chosen, (left, nodes) = condition.as_arg(m)[0], m.exit(starts[leaving[0]])
    except (Break, CannotRebuild):
        m.rollback(mark)
        return False
    finally:
        f.pc = pc
    m.record.call_function(check_of(left, leaving[0]), (chosen, *nodes), {}, None)
    f.stack.pop()
    f.pc = starts[not leaving[0]]
    return True


def _go_on(m: Machine, f: Frame, meet: int, before: AtJump, merge: Merge, condition: Node) -> bool:
    one, other = merge.arms
    if len(one.stack) != len(other.stack) or one.slots.keys() != other.slots.keys():
        raise NotJoined
    stack = [(merge.placed(None, a, b) if meet == EXIT and len(m.frames) == 1 else merge.merged(a, b)) for a, b in zip(one.stack, other.stack)]
    slots = {name: merge.placed(None, value, other.slots[name]) for name, value in one.slots.items()}
    places = {key: place for arm in merge.arms for key, (place, _) in arm.changes.items()}
    contents = {key: merge.placed(place, *(arm.changes[key][1] if key in arm.changes else before.content(place, {}) for arm in merge.arms))
                for key, place in places.items()}
    if any(isinstance(held, UndecidedPicture) for held in (*stack, *slots.values(), *contents.values())) and isinstance(merge.condition, TensorValue):
        m.aliases.append((merge.step, [(merge.condition.abstract, merge.condition.abstract._version)]))
    made = merge.call(condition)
    for key, place in places.items():
        place.write(m, merge.finished(contents[key], made))
    values = [merge.finished(item, made) for item in stack]
    if meet == EXIT:
        m.frames.pop()
        m.give(f, values[0])
    else:
        f.pc, f.stack, f.slots = meet, values, {name: merge.finished(item, made) for name, item in slots.items()}
    return True


def is_readable(condition: Value) -> bool:
    """One number, whose truth only run time knows."""
    return isinstance(condition, SymNumber) or isinstance(condition, TensorValue) and condition.abstract.shape.numel() == 1 \
        and not is_wrapper_class(type(condition.abstract))


def refuse_written(m: Machine) -> None:
    """No write behind a branch may touch a tensor that is, perhaps, one of its results and one of its inputs."""
    for step, tensors in m.aliases:
        if any(t._version != version for t, version in tensors):
            raise Unjoinable(step)
