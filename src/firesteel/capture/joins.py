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

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from firesteel.autograd.branches import branch_of, check_of, joined_like
from firesteel.autograd.regions import module_of
from firesteel.capture.arms import (
    GOING,
    Arm,
    AtJump,
    CellPlace,
    Differ,
    EitherPicture,
    EntryPlace,
    FullPicture,
    ItemsPlace,
    NotJoined,
    NumberPicture,
    Other,
    Place,
    Round,
    SequencePicture,
    TensorPicture,
    UndecidedPicture,
    placeholder_for,
)
from firesteel.capture.code import program
from firesteel.capture.control_flow import EXIT, meeting_places, only_raises, successors
from firesteel.capture.frames import Frame
from firesteel.capture.instr import Instr
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import CannotRebuild, LazyValue, Undecided, Unjoinable, Value
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.containers import TupleValue
from firesteel.capture.values.either import Either, IntOrFloat
from firesteel.capture.values.iterators import IteratorValue, SequenceIterator
from firesteel.capture.values.number import SymNumber, fits, symbolic_call, writes_to
from firesteel.capture.values.tensor import TensorValue, wrap_item
from firesteel.capture.values.torch_calls import call_graph, run_abstract
from firesteel.capture.values.wrappers import is_wrapper_class
from firesteel.errors import Break
from firesteel.sym.symint import SYMBOLIC, to_symint

Node = torch.fx.Node
DEPTH = 6       # of branches inside of branches
FEW = 3         # elements of a loop
PLACES = 3      # at which a branch that is inside of no other is tried to be joined


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
            if (found := self._either(self._looked(one), self._looked(other))) is not None:
                return found
            return UndecidedPicture((self._of_one(one, 0), self._of_one(other, 1)))

    def _of_one(self, picture: Any, arm: int) -> Any:
        if isinstance(picture, SequencePicture):
            return SequencePicture(picture.kind, [self._of_one(item, arm) for item in picture.items])
        if isinstance(picture, (NumberPicture, EitherPicture, Other)):
            raise NotJoined
        if not isinstance(picture, TensorPicture):
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
        if self.loose and (found := self._either(one, other)) is not None:
            return found
        numbers = as_number(self.m, one), as_number(self.m, other)
        if numbers[0] is None or numbers[1] is None or numbers[0].type is not numbers[1].type or self.m.world.env is None \
                or numbers[0].type is bool and not self.loose:
            raise Differ
        self.results.append(numbers)
        return len(self.results) - 1

    def _either(self, one: Any, other: Any) -> EitherPicture | None:
        """A number, a tensor, or one of the two, in each of the arms: a flag and a tensor as results."""
        a, b = as_either(one), as_either(other)
        if a is None or b is None or a.number is not None and b.number is not None and not same_number(a.number, b.number):
            return self._int_or_float(one, other)
        number, tensor = a.number or b.number, a.tensor or b.tensor
        if number is None or tensor is None or not all(Either.may_be(number, part.tensor.abstract) for part in (a, b) if part.tensor is not None):
            return None
        self._flags(a.flag, b.flag)
        self.results.append((as_full(tensor.abstract, a.tensor), as_full(tensor.abstract, b.tensor)))
        return EitherPicture(len(self.results) - 2, number, len(self.results) - 1)

    def _int_or_float(self, one: Any, other: Any) -> EitherPicture | None:
        a, b = as_int_or_float(self.m, one), as_int_or_float(self.m, other)
        if a is None or b is None or self.m.world.env is None:
            return None
        number = a.number or b.number
        if number is None or a.flag is b.flag is True or a.number is not None and b.number is not None and not same_number(a.number, b.number):
            return None
        self._flags(a.flag, b.flag)
        self.results.append((a.tensor, b.tensor))
        return EitherPicture(len(self.results) - 2, number, len(self.results) - 1)

    def _flags(self, one: Any, other: Any) -> None:
        like = run_abstract(self.m, torch.full, [[], True], {"dtype": torch.bool}, "a branch")
        self.results.append((as_full(like, one), as_full(like, other)))

    def going(self, one: Any, other: Any) -> Any:
        """Does another round come?  One that ends in both ways of the last question asks that."""
        flags = [isinstance(picture, ConstValue) for picture in (one, other)]
        if all(flags) and one.constant() != other.constant():
            return truth_of(self.m, self.condition, negated=one.constant())
        if any(flags) and any(isinstance(picture, TensorPicture) for picture in (one, other)):
            like = (other if flags[0] else one).abstract
            one, other = (FullPicture(like, picture.constant()) if flag else picture for flag, picture in zip(flags, (one, other)))
            self.results.append((one, other))
            return len(self.results) - 1
        return self.merged(one, other)

    def finished(self, nest: Any, made: list[Value]) -> Value:
        if isinstance(nest, int):
            return made[nest]
        if isinstance(nest, EitherPicture):
            made_of: Any = IntOrFloat if isinstance(made[nest.tensor], SymNumber) else Either
            return made_of(made[nest.flag], nest.number, made[nest.tensor])
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
        bodies = [self.body(place, arm, outside) for place, arm in enumerate(self.arms)]
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

    def body(self, place: int, arm: Arm, outside: list[Node]) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        given = {node: placeholder_for(graph, node) for node in outside}
        copies = {inner: given[node] for node, inner in arm.lifted.items()}
        for node in arm.graph.nodes:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        wanted = [self._filled(graph, picture) if isinstance(picture := pair[place], FullPicture) else
                  picture.node if picture else self._nothing(graph, pair[not place]) for pair in self.results]
        graph.output(tuple(copies[arm.copies[node]] if node in arm.copies else given.get(node, node) for node in wanted))
        return module_of(graph, "Body")

    def _filled(self, graph: torch.fx.Graph, picture: FullPicture) -> Node:
        args, kwargs = (list(picture.abstract.shape), int(picture.flag)), {"dtype": picture.abstract.dtype, "device": picture.abstract.device}
        made = graph.call_function(torch.full, args, kwargs)        # type: ignore[arg-type]
        made.meta["val"] = run_abstract(self.m, torch.full, list(args), kwargs, "a branch")
        return made

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


def as_full(like: torch.Tensor, part: Any) -> Any:
    return part if isinstance(part, TensorPicture) else FullPicture(like, part is not False)


def as_either(picture: Any) -> EitherPicture | None:
    """What one arm left: the flag is known where that is a number, or a tensor."""
    if isinstance(picture, TensorPicture):
        return EitherPicture(False, None, picture)
    if isinstance(picture, ConstValue | SymNumber):
        return EitherPicture(True, picture, None)
    return picture if isinstance(picture, EitherPicture) and isinstance(picture.tensor, TensorPicture) else None


def as_int_or_float(m: Machine, picture: Any) -> EitherPicture | None:
    """The same of an int that is known and a float, in whose place both are a float."""
    if isinstance(picture, ConstValue) and IntOrFloat.may_be(picture):
        return EitherPicture(True, picture, NumberPicture(float, float(picture.constant())))
    if (number := as_number(m, picture)) is not None and number.type is float:
        return EitherPicture(False, None, number)
    return picture if isinstance(picture, EitherPicture) and isinstance(picture.tensor, NumberPicture) else None


def same_number(one: Value, other: Value) -> bool:
    return one is other or one.is_constant() and other.is_constant() and is_same(one.constant(), other.constant())


def is_same(one: Any, other: Any) -> bool:
    return one is other or type(one) is type(other) and one == other and repr(one) == repr(other)


def join(m: Machine, f: Frame, i: Instr, condition: Value) -> bool:
    """Goes on behind the branch, where both arms have been captured; False, with nothing changed, where they cannot be joined."""
    if is_readable(condition) and _checked(m, f, i, condition):
        return True
    if not may_join(m, f, condition):
        return False
    jumps = i.opname == "POP_JUMP_IF_TRUE"
    ways = (i.index + 1, i.target.index)
    ends = Round.ends_in(m, f)
    places = meeting_places(f.code, successors(i), ends, i.index)
    if not places and not ends and is_nearly_over(f):
        places = meeting_places(f.code, successors(i))
    return join_ways(m, f, ways if jumps else ways[::-1], f.stack[:-1], condition, places, m.steps)


def is_nearly_over(f: Frame) -> bool:
    """Has the loop that the frame is in only a few elements left?  What leaves it in their midst may be joined then."""
    loops = [item for item in f.stack if isinstance(item, IteratorValue)]
    return bool(loops) and type(loops[-1]) is SequenceIterator and len(loops[-1].all_items()) - loops[-1].index <= FEW


def may_join(m: Machine, f: Frame, condition: Value) -> bool:
    return m.steps not in m.unjoined and m.joining < DEPTH and f.generator is None and f.namespace is None and is_readable(condition)


def join_ways(m: Machine, f: Frame, ways: Sequence[int], stack: list[Value], condition: Value, places: list[int], step: int) -> bool:
    """Two ways, where the condition is False and where it is True, that meet at `places`."""
    differing = []
    for meet in farther(f.code, places, 1 if m.joining else PLACES):
        try:
            if _joined_at(m, f, ways, stack, condition, meet, step, loose=False):
                return True
        except Differ:
            differing.append(meet)
    return any(_joined_at(m, f, ways, stack, condition, meet, step, loose=True) for meet in differing)


def farther(code: types.CodeType, places: list[int], count: int) -> list[int]:
    """The nearest place, and those behind a later branch: flags that the arms set are not read any more there."""
    jumps = [place for place, before in zip(places[1:], places) if before != EXIT and program(code)[before].target is not None]
    return [*places[:1], *jumps][:count]


def _joined_at(m: Machine, f: Frame, ways: Sequence[int], stack: list[Value], condition: Value, meet: int, step: int, loose: bool) -> bool:
    mark = m.checkpoint()
    m.joining += 1
    try:
        before = AtJump(m, f, stack)
        chosen = condition.as_arg(m)[0]
        arms = _followed(before, ways[0], meet, condition, False), _followed(before, ways[1], meet, condition, True)
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


def _followed(before: AtJump, way: int, meet: int, condition: Value, answer: bool) -> Arm:
    """One way; a later question about the same condition has the same answer there."""
    m, known = before.m, before.m.answers
    m.answers = (*known, (condition, writes_to(condition), answer))
    try:
        return before.follow(way, meet)
    finally:
        m.answers = known


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
    if len(one.stack) != len(other.stack) or one.slots.keys() != other.slots.keys() or added(one) != added(other):
        raise NotJoined
    returns = meet == EXIT and not Round.ends_in(m, f)
    stack = [(merge.placed(None, a, b) if returns and len(m.frames) == 1 else merge.merged(a, b)) for a, b in zip(one.stack, other.stack)]
    slots = {name: merge.going(value, other.slots[name]) if name == GOING else merge.placed(None, value, other.slots[name])
             for name, value in one.slots.items()}
    places = {key: place for arm in merge.arms for key, (place, _) in arm.changes.items()}
    contents = {key: merge.placed(place, *(arm.changes[key][1] if key in arm.changes else before.content(place, {}) for arm in merge.arms))
                for key, place in places.items()}
    if any(isinstance(held, UndecidedPicture) for held in (*stack, *slots.values(), *contents.values())) and isinstance(merge.condition, TensorValue):
        if (count := writes_to(merge.condition)) is None:       # the run function asks it at the end
            raise NotJoined
        m.undecided.append((merge.step, merge.condition, count))
    made = merge.call(condition) if merge.results or any(arm.copies.keys() - arm.lifted.keys() for arm in merge.arms) else []
    for key, place in places.items():
        place.write(m, merge.finished(contents[key], made))
    values = [merge.finished(item, made) for item in stack]
    if returns:
        m.frames.pop()
        m.give(f, values[0])
    else:
        f.pc, f.stack, f.slots = m.round.start if meet == EXIT else meet, values, {name: merge.finished(item, made) for name, item in slots.items()}
    return True


def added(arm: Arm) -> list[Any]:
    """The entries that an arm adds to dicts made before, in order."""
    return [key for key, (place, _) in arm.changes.items() if isinstance(place, EntryPlace) and place.new is not None]


def is_readable(condition: Value) -> bool:
    """One number, whose truth only run time knows."""
    return isinstance(condition, SymNumber) or isinstance(condition, TensorValue) and condition.abstract.shape.numel() == 1 \
        and not is_wrapper_class(type(condition.abstract))


def truth_of(m: Machine, condition: Value, negated: bool) -> Value:
    """The answer to the question, or the other one, as something that a graph has."""
    if not negated:
        return condition
    if isinstance(condition, SymNumber):
        return symbolic_call(m, torch.sym_not, [condition])
    return call_graph(m, "call_function", torch.logical_not, [condition], {})


def refuse_written(m: Machine) -> None:
    """No write behind a branch may touch a tensor that is, perhaps, one of its results and one of its inputs, or a condition that the run function
    asks at the end."""
    for step, tensors in m.aliases:
        if any(t._version != version for t, version in tensors):
            raise Unjoinable(step)
    for step, condition, count in m.undecided:
        if writes_to(condition) != count:
            raise Unjoinable(step)
