"""Producers into consumers: a pointwise value is computed where it is read, and its buffer disappears.

In: a simplified Program and some fuel.  Out: a Program with fewer nests and the same meaning.

Numbered rules of what may be inlined
 1. The producer is one map phase with one "set" store, whose index is its axes, each once (or 0): then `load(b, x, y)` is its value
    with i := x, j := y.  It is the only writer of b.
 2. Every reader of b is a Nest, and b is no output: all readers take the value, and the nest is dropped.
 3. No buffer that the value loads is written again later.
 4. Through a masked load, every load of the value gets the mask too; a value whose computation may fault (integer division,
    check_index) does not go through one.
 5. A rounding that stands only where eager stores between two operators (`to` marked loose) is dropped when the reader widens it again.
 6. A value with a check_index goes only where all of it is read; a load with one keeps it, also where the value does not depend on the index.
Whether it is worth it is `cost.worth_inlining`'s question; a value read at more points than it has elements must be cheap.

    t[i, j] = exp(load(x, i, j));  y[a] = sum(r: load(t, r, a))      ->      y[a] = sum(r: exp(load(x, r, a)))
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from firesteel import artifacts
from firesteel.config import config
from firesteel.loops import access, cost
from firesteel.loops.checks import keep_checks
from firesteel.loops.ir import AXES, LOADING, LOADS, Axis, Buffer, Nest, Phase, Program, ProgramStep, Store, all_loads, axes_of, zero
from firesteel.loops.simplify import DIVIDING, map_nest, simplify_nest
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, bits, make, postorder, rebuild
from firesteel.targets import CPU

CHEAP_BROADCAST = 8     # cost up to which a value may be recomputed at every point it is broadcast to
CHEAP_IN_LANES = 5      # the same where it differs from lane to lane, so that no loop's start is a place for it: no division, no root
OFTEN = 4               # times that an element is read for which a copy in another order pays
MOST_ORIGINS = 16       # names of graph nodes that a nest remembers
FAULTS = ("floordiv", "mod", "fmod", "check_index")
ROUNDING = bits("to")


class Fuel:
    """How many fusions may still be made; below 0 there is no limit."""

    def __init__(self, amount: int):
        self.left = amount
        self.taken = 0

    def take(self, what: Callable[[], str]) -> bool:
        """One more fusion?  `what` says which, for logs."""
        if self.left == 0:
            return False
        self.left -= self.left > 0
        self.taken += 1
        artifacts.log("schedule", lambda: f"fusion {self.taken}: {what()}")
        return True


@dataclass(slots=True)
class Use:
    """How the program reads a buffer."""
    count: int = 0              # distinct loads, each phase for itself
    points: int = 0             # elements that these read, all together
    broadcast: bool = False     # some load is at fewer indices than its phase has points
    lanes: int = 0              # points of phases in which a broadcast load goes along the elements that are side by side in memory
    masked: bool = False
    partial: bool = False       # some load is not at plain axes: perhaps not all elements are read


@dataclass(frozen=True, slots=True)
class Definition:
    index: tuple[Expr, ...]
    value: Expr
    cost: int
    nodes: int


def inline(program: Program, fuel: Fuel, rewritten: set[str]) -> Program:
    """`rewritten`: the buffers that `written_again` found."""
    return _Inliner(program, fuel, rewritten).run()


def written_again(program: Program) -> set[str]:
    """Buffers that are not written once and for all before they are read."""
    writers: dict[str, int] = {}
    for step in program.steps:
        for name in step.writes():
            writers[name] = writers.get(name, 0) + 1
    owned = ("temp", "output")
    return {name for name, count in writers.items() if count > 1 or name not in program.buffers or program.buffers[name].kind not in owned}


class _Inliner:
    """One walk over the steps; `definitions` are the values of the buffers dropped so far."""

    def __init__(self, program: Program, fuel: Fuel, rewritten: set[str]):
        self.program, self.fuel, self.rewritten = program, fuel, rewritten
        self.fixed = access.output_buffers(program) | self.rewritten    # buffers that must stay
        self.uses: dict[str, Use] = {}
        self.definitions: dict[str, Definition] = {}
        self.origins: dict[str, tuple[str, ...]] = {}
        self.results: dict[Expr, Expr] = {}         # load -> the value in its place
        self.loaded: list[list[Expr]] = []          # step -> its loads
        self.until: dict[str, int] = {}             # buffer written again -> its last writer
        self.number = 0                             # of the step at hand
        self.moved = False                          # did a value change its indices in the step at hand, or may it stand in one?
        self._scan()

    def _scan(self) -> None:
        for number, step in enumerate(self.program.steps):
            self.loaded.append([])
            self.until.update(dict.fromkeys(self.rewritten.intersection(step.writes()), number))
            if step.nest is None:
                self.fixed.update(step.reads())
                continue
            for phase in step.nest.phases:
                loaded = all_loads(phase.exprs())
                self.loaded[-1] += loaded
                self._scan_phase(step.nest, phase, loaded)

    def _scan_phase(self, nest: Nest, phase: Phase, loads: list[Expr]) -> None:
        points = {axis.name for axis in (*nest.axes, *phase.axes)}
        number = cost.points((*nest.axes, *phase.axes))
        for load in loads:
            use = self.uses.setdefault(load.attr, Use())
            index = access.load_index(load)
            use.count += 1
            use.points += number
            use.masked |= load.op == "masked"
            if all(part.op in ("axis", "const") for part in index):
                along = {part.attr for part in index}
                if not points <= along:
                    use.broadcast = True
                    use.lanes += 0 if self._lanes(phase).isdisjoint(along) else number
            else:
                use.partial = True
                use.broadcast |= not points <= axes_of(*index) or _repeats(index)

    def _lanes(self, phase: Phase) -> set[str]:
        """The axes along which a processor's kernel stores side by side."""
        stored = [(store.index, self.program.buffers[store.buffer]) for store in phase.stores if store.buffer in self.program.buffers]
        return {part.attr for index, buffer in stored if buffer.device == CPU
                for part, stride in zip(index, buffer.strides) if stride == 1 and part.op == "axis"}

    def run(self) -> Program:
        steps: list[ProgramStep] = []
        for number, (step, loaded) in enumerate(zip(self.program.steps, self.loaded)):
            self.number = number
            new = step.map(lambda nest: self._step(nest, loaded))
            if new is not None:
                steps.append(new)
        buffers = {name: buffer for name, buffer in self.program.buffers.items() if name not in self.definitions}
        return replace(self.program, buffers=buffers, steps=tuple(steps))

    def _step(self, nest: Nest, loads: list[Expr]) -> Nest | None:
        """The nest with definitions put in; None if it became one itself."""
        taken = [load.attr for load in loads if load.attr in self.definitions]
        new = nest
        if taken:
            self.moved = False
            memo: dict[Expr, Expr] = {}
            new = map_nest(nest, lambda expr: rebuild(expr, self._change, memo, LOADING | ROUNDING))
            if self.moved:
                new = simplify_nest(new)
            origins = dict.fromkeys([origin for name in taken for origin in self.origins[name]] + [*nest.origin])
            new = replace(new, origin=tuple(origins)[-MOST_ORIGINS:])
        definition = self._definition(nest, new, taken)
        if definition is None:
            return new
        name = new.phases[0].stores[0].buffer
        self.definitions[name] = definition
        self.origins[name] = new.origin
        return None

    # ------------------------------------------------ may it, and is it worth it

    def _definition(self, nest: Nest, new: Nest, taken: list[str]) -> Definition | None:
        store = only_store(nest)
        if store is None or store.buffer in self.fixed or not is_permutation(store.index, nest.axes):
            return None
        use = self.uses.get(store.buffer, Use())
        own, size = cost.measure(store.value)
        parts = [self.definitions[name] for name in taken]
        total = own - cost.LOAD * len(parts) + sum(part.cost for part in parts)
        nodes = size + sum(part.nodes for part in parts)
        value = new.phases[0].stores[0].value
        if not self._worth(total, nodes, store.buffer, use) or not self._sound(value, use):
            return None
        if use.broadcast and self.program.buffers[store.buffer].device == CPU and (_takes_apart(value) or self._turns(store, value, use)):
            return None
        if not self.fuel.take(lambda: f"{nest.name} ({', '.join(nest.origin)}) into its readers"):
            return None
        return Definition(store.index, value, total, nodes)

    def _worth(self, total: int, nodes: int, name: str, use: Use) -> bool:
        if nodes > cost.MOST_NODES or use.broadcast and total > (CHEAP_IN_LANES if use.lanes >= cost.SMALL * 8 else CHEAP_BROADCAST):
            return False
        buffer = self.program.buffers[name]
        return cost.worth_inlining(total, buffer, min(use.count, self._often(name, use)))     # a window's loads read each element once

    def _often(self, name: str, use: Use) -> int:
        """How often each element is read."""
        return -(-use.points // max(cost.elements(self.program.buffers[name]), 1))

    def _turns(self, store: Store, value: Expr, use: Use) -> bool:
        """Is it a matrix that is stored by rows, read by columns, and read often?"""
        if self._often(store.buffer, use) < OFTEN or value.op != "load":
            return False
        buffers = self.program.buffers
        return _densest(store.index, buffers[store.buffer]) is not _densest(access.load_index(value), buffers[value.attr])

    def _sound(self, value: Expr, use: Use) -> bool:
        """Rules 3, 4 and 6.  Walks the value only where something in the program asks for it."""
        if not (self.until or use.masked or use.partial):
            return True
        for node in postorder(value):
            if node.op in LOADS and self.until.get(node.attr, -1) >= self.number:
                return False
            if use.masked and node.op in FAULTS and node.dtype[0] != "f" or use.partial and node.op == "check_index":
                return False
        return True

    # ------------------------------------------------ putting values in

    def _change(self, node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op in LOADS:
            definition = self.definitions.get(node.attr)
            return None if definition is None else self._value(make(node.op, node.dtype, args, node.attr), definition)
        return widened(node, args)

    def _value(self, load: Expr, definition: Definition) -> Expr:
        found = self.results.get(load)
        if found is None:
            found = self.results[load] = self._substitute(load, definition)
        else:
            self.moved |= found is not definition.value or found.dtype == "i64"
        return found

    def _substitute(self, load: Expr, definition: Definition) -> Expr:
        index = access.load_index(load)
        changed = {old: new for old, new in zip(definition.index, index) if old.op == "axis" and old is not new}
        value = definition.value
        self.moved |= value.dtype == "i64"
        if changed:
            self.moved = True
            value = rebuild(value, lambda node, args: changed.get(node), {}, AXES)
        value = keep_checks(value, index)
        if load.op == "masked":
            mask, other = load.args[:2]
            return make("where", value.dtype, (mask, rebuild(value, functools.partial(_guarding, mask), {}, LOADING), other))
        return value


def _densest(index: tuple[Expr, ...], buffer: Buffer) -> Expr | None:
    """The axis along which elements of the buffer lie side by side."""
    return next((part for part, stride in zip(index, buffer.strides) if stride == 1 and part.op == "axis"), None)


def _takes_apart(value: Expr) -> bool:
    """Would the lanes of its readers gather, where they read its buffer in a row?"""
    return any(part.holds & DIVIDING for load in all_loads([value]) for part in access.load_index(load))


def _repeats(index: tuple[Expr, ...]) -> bool:
    """Is an element read again and again along an axis: i // 2 without i % 2?"""
    return any(part.holds & bits("floordiv") for part in index) and not any(part.holds & bits("mod") for part in index)


def _guarding(mask: Expr, node: Expr, args: tuple[Expr, ...]) -> Expr | None:
    """Puts a mask on loads."""
    if node.op == "load":
        return make("masked", node.dtype, (mask, zero(node.dtype), *args), node.attr)
    if node.op == "masked":
        both = args[0] if args[0] is mask else make("and", "bool", (args[0], mask))
        return make("masked", node.dtype, (both, *args[1:]), node.attr)
    return None


def widened(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
    """to(wide, to(narrow, v, loose)) is v."""
    if node.op != "to" or args[0].op != "to" or args[0].attr != "loose" or config.eager_rounding:
        return None
    inside = args[0].args[0]
    return inside if inside.dtype == node.dtype else None


def only_store(nest: Nest) -> Store | None:
    """The store of a nest that is nothing but one."""
    if len(nest.phases) != 1 or nest.phases[0].kind != "map" or nest.phases[0].axes or len(nest.phases[0].stores) != 1:
        return None
    store = nest.phases[0].stores[0]
    return store if store.mode == "set" else None


def is_permutation(index: tuple[Expr, ...], axes: tuple[Axis, ...]) -> bool:
    """Is each axis the index of exactly one dimension, and 0 that of the others?"""
    used = [part.attr for part in index if part.op == "axis"]
    rest = [part for part in index if part.op != "axis"]
    return sorted(used) == sorted(axis.name for axis in axes) and all(part.op == "const" and part.attr == 0 for part in rest)
