"""`while` on data: one round is executed symbolically, and the loop becomes one call of the graph (`loop_of` of autograd/branches.py).

At a jump on data of which one way leads into a cycle, a round is followed from there to where it comes again, or leaves.  What it changes and is
a tensor or a number is *carried*: the round is followed again with new tensors and symbols in these places, until it changes nothing else.
Exits inside of it (`break`, a second condition) are branches whose ways end at different places (`Merge.going` of joins.py); whether another round
comes is the last result of the body.

    while x.sum() < 100: x = x * 2          # loop((False,), lt, x);   the body: (x) -> (x * 2, lt)

What always holds: where a loop cannot be captured, nothing has changed, and the question is a break as it always was.  It cannot where a carried
value changes its type, shape, dtype or strides, where a list grows or an iterator is advanced, or where an arm of joins.py could not be.
"""
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.fx

from firesteel.autograd.branches import joined_like, loop_of
from firesteel.capture.arms import GOING, LEFT_AT, Arm, AtJump, NotJoined, NumberPicture, Round, SequencePicture, TensorPicture
from firesteel.capture.control_flow import Cycle, cycle_entered, meeting_places
from firesteel.capture.frames import Frame, restore_frame
from firesteel.capture.instr import Instr
from firesteel.capture.joins import DTYPES, Merge, as_number, join_ways, may_join, truth_of
from firesteel.capture.liveness import live_slots
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import Unjoinable, Value
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.number import SymNumber
from firesteel.capture.values.tensor import TensorValue, wrap_item
from firesteel.capture.values.torch_calls import run_abstract
from firesteel.capture.values.transforms import argument
from firesteel.errors import Break
from firesteel.sym.symint import SYMBOLIC, to_symint

TRIES = 5       # rounds followed until one changes only what is carried


def join_loop(m: Machine, f: Frame, i: Instr, condition: Value) -> bool:
    """Goes on behind the loop; False, with nothing changed, where the jump enters none or it cannot be captured."""
    if m.world.env is None or not may_join(m, f, condition):
        return False
    cycle = cycle_entered(f.code, i.index, Round.ends_in(m, f))
    if cycle is None:
        return False
    mark, state, step = m.checkpoint(), (f.pc, list(f.stack), dict(f.slots)), m.steps
    m.joining += 1
    try:
        going = truth_of(m, condition, negated=(cycle.start == i.target.index) != (i.opname == "POP_JUMP_IF_TRUE"))
        Loop(m, f, cycle, condition, step).go_on(going)
        return True
    except Unjoinable:
        raise Unjoinable(step) from None
    except (NotJoined, Break):
        m.rollback(mark)
        restore_frame(f, state)
        return False
    finally:
        m.joining -= 1


class Loop:
    """A loop while its rounds are followed."""

    def __init__(self, m: Machine, f: Frame, cycle: Cycle, condition: Value, step: int):
        self.m, self.f, self.cycle, self.condition, self.step = m, f, cycle, condition, step
        live = frozenset().union(*(live_slots(f.code, place) for place in (cycle.start, *cycle.exits)))
        self.slots = {name: value for name, value in f.slots.items() if name in live}
        self.before = AtJump(m, f, f.stack[:-1])
        if len(cycle.exits) > 1:
            self.slots[LEFT_AT] = ConstValue(cycle.exits[0])
        seen: dict[int, Any] = {}
        self.first = ({name: self.before.picture(value, seen) for name, value in self.slots.items()},
                      [self.before.picture(value, seen) for value in self.before.stack])
        self.merge, self.arm, self.nodes, self.leaves = self._settle()

    def _settle(self) -> tuple[Merge, Arm, list[torch.fx.Node], list[Any]]:
        """Follows rounds until one changes only what is carried, with gradients where these come in."""
        self.nest: Any = None
        self.places: dict[Any, Any] = {}
        pairs: list[Any] = []
        tracked: list[bool] = []
        for _ in range(TRIES):
            mark = self.m.checkpoint()
            leaves, made, nodes = self._carried(pairs, tracked)
            arm = self._round(made)
            self.m.rollback(mark)
            merge = Merge(self.m, (arm, arm), self.step, self.condition, loose=True)
            nest = self._merged(merge, arm)
            grown = [isinstance(after, TensorPicture) and after.abstract.requires_grad for _, after in merge.results]
            same = self.nest is not None and shape_of(nest) == shape_of(self.nest)
            if same and not any(new and not is_tracked(leaf) for new, leaf in zip(grown, leaves)):
                return merge, arm, nodes, leaves
            tracked = [new or was for new, was in zip(grown, tracked)] if same else grown
            self.nest, pairs = nest, merge.results
        raise NotJoined

    def _carried(self, pairs: list[Any], tracked: list[bool]) -> tuple[list[Any], list[Value], list[torch.fx.Node]]:
        """New tensors and symbols in the places of what is carried: (abstract values, Values, nodes)."""
        m = self.m
        leaves: list[Any] = []
        made: list[Value] = []
        nodes: list[torch.fx.Node] = []
        for place, ((first, _), grows) in enumerate(zip(pairs, tracked)):
            if isinstance(first, NumberPicture):
                leaf = to_symint(m.world.env.create_unbacked(None, None, "a loop", DTYPES[first.type]), m.world.env)
            else:
                leaf = run_abstract(m, copy_of, [first.abstract, grows], {}, "a loop")
            node = m.record.call_function(argument, (place,), {}, leaf)
            value: Any = SymNumber(leaf, partial(itself, node)) if isinstance(first, NumberPicture) else TensorValue(node, leaf)
            if isinstance(value, TensorValue):
                value.inference = first.value.inference
                m.record.own(leaf, value)
            leaves.append(leaf)
            made.append(value)
            nodes.append(node)
        return leaves, made, nodes

    def _round(self, made: list[Value]) -> Arm:
        slots, stack = self.slots, self.before.stack
        if self.nest is not None:
            slots, stack, contents = self._finished(made)
            for key, place in self.places.items():
                place.write(self.m, contents[key])
        return self.before.follow_round(Round(self.f, self.cycle.start, frozenset(self.cycle.exits)), slots, stack)

    def _finished(self, made: list[Value]) -> tuple[dict[str, Value], list[Value], dict[Any, Value]]:
        merge = Merge(self.m, None, self.step, self.condition, loose=True)      # type: ignore[arg-type]  # its arms are not asked for
        slots, stack, contents = self.nest
        return ({name: merge.finished(item, made) for name, item in slots.items()}, [merge.finished(item, made) for item in stack],
                {key: merge.finished(item, made) for key, item in contents.items()})

    def _merged(self, merge: Merge, arm: Arm) -> Any:
        """What the rounds after the first start with, as nests of places of carried values."""
        slots, stack = self.first
        left = {name: value for name, value in arm.slots.items() if name != GOING}
        if left.keys() != slots.keys() or len(arm.stack) != len(stack):
            raise NotJoined
        self.places.update((key, place) for key, (place, _) in arm.changes.items())
        now = {key: arm.changes[key][1] if key in arm.changes else self.before.content(place, {}) for key, place in self.places.items()}
        return ({name: merge.merged(slots[name], value) for name, value in left.items()}, [merge.merged(*both) for both in zip(stack, arm.stack)],
                {key: merge.merged(self.before.content(place, {}), now[key]) for key, place in self.places.items()})

    def go_on(self, going: Value) -> None:
        m, f, merge = self.m, self.f, self.merge
        symbols = len(m.world.env.symbols)
        out = tuple(self._result(leaf, *pair) for leaf, pair in zip(self.leaves, merge.results))
        again = self.arm.slots[GOING]
        again = again if isinstance(again, TensorPicture) else as_number(m, again)
        if again is None or not isinstance(again.node, torch.fx.Node):
            raise NotJoined         # it never leaves, or never stays
        first = [pair[0].node for pair in merge.results]
        merge.results.append((again, again))
        read = dict.fromkeys([*self.arm.lifted, *(after.node for _, after in merge.results if after.node not in self.arm.copies)])
        outside = [node for node in read if isinstance(node, torch.fx.Node) and node not in self.nodes]
        body = merge.body(1, self.arm, [*self.nodes, *outside])
        self._note_aliases(out, merge.results, outside)
        node = m.record.call_function(loop_of(body), (tuple(map(is_tracked, self.leaves)), going.as_arg(m)[0], *first, *outside), {}, out)
        if any(isinstance(val, SYMBOLIC) for val in out):
            node.meta["unbacked"] = m.world.env.unbacked_since(symbols)
        slots, stack, contents = self._finished([wrap_item(m, val, node, place) for place, val in enumerate(out)])
        for key, place in self.places.items():
            place.write(m, contents[key])
        left = slots.pop(LEFT_AT, None)
        f.pc, f.stack, f.slots = self.cycle.exits[0], stack, slots
        if left is not None:
            self._choose_exit(left)

    def _choose_exit(self, left: Value) -> None:
        m, f, exits = self.m, self.f, self.cycle.exits
        question: Any = left.compare(m, "==", ConstValue(exits[1]))
        if not join_ways(m, f, exits, f.stack, question, meeting_places(f.code, exits, Round.ends_in(m, f)), self.step):
            raise NotJoined

    def _result(self, leaf: Any, first: Any, after: Any) -> Any:
        if isinstance(after, NumberPicture):
            return to_symint(self.m.world.env.create_unbacked(None, None, "a loop", DTYPES[after.type]), self.m.world.env)
        val = run_abstract(self.m, joined_like, [first.abstract, after.abstract], {}, "a loop")
        if val is None or leaf._version:
            raise NotJoined         # described in another way, or written
        return val

    def _note_aliases(self, out: tuple[Any, ...], pairs: list[Any], outside: list[torch.fx.Node]) -> None:
        """A result is what came in, where there is no round; results may share memory with one another and with what the body reads."""
        memory = self.m.world.memory
        tensors = [(memory(val), val) for val in (node.meta["val"] for node in outside) if isinstance(val, torch.Tensor)]
        shared = [(memory(pair[1].abstract), val) for val, pair in zip(out, pairs) if isinstance(val, torch.Tensor)]
        found = [t for val, (first, _) in zip(out, pairs) if isinstance(val, torch.Tensor) for t in (val, first.abstract)]
        found += [t for one, val in shared for other, t in (*tensors, *shared) if t is not val and one == other]
        if found:
            self.m.aliases.append((self.step, [(t, t._version) for t in found]))


def shape_of(nest: Any) -> Any:
    """Where a nest has carried values."""
    if isinstance(nest, dict):
        return {key: shape_of(item) for key, item in nest.items()}
    items = nest.items if isinstance(nest, SequencePicture) else nest if isinstance(nest, (list, tuple)) else None
    return (nest if isinstance(nest, int) else None) if items is None else tuple(map(shape_of, items))


def itself(node: torch.fx.Node) -> torch.fx.Node:
    return node


def copy_of(tensor: torch.Tensor, tracked: bool) -> torch.Tensor:
    """A tensor for a round to work on."""
    return tensor.detach().requires_grad_().clone() if tracked and not tensor.requires_grad else tensor.clone()


def is_tracked(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
