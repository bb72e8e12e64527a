"""A row of statements over common parallel axes -> the phases of one nest.

In: `Statement`s in an order in which producers come first, each a Store or a Reduce with the inner axes it sweeps; inner axes that
mean the same have the same name.  Out: phases, as few sweeps as the data flow allows.

How
 1. A statement's level is the sweep it can run in: one after that of every accumulator it reads, and one after that of every store
    it reads back at another place; a value stored at the same place may be used in the same sweep.
 2. Statements of one level over the same axes are one phase; those without axes stand together at the end.
 3. A stored value read again at the same place in a later sweep is recomputed if that is cheap, or if no other sweep needs
    it; otherwise it is read back (the row is still in the cache).
 4. Stores that nobody reads any more are dropped, then accumulators that nobody reads.

    a = sum(r: x[i,r]);  t[i,r] = x[i,r] - acc(a);  b = sum(r: t[i,r]);  u = max(r: x[i,r])
    sweep 0: a, u      sweep 1: b = sum(x[i,r] - acc(a))
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firesteel.loops import cost
from firesteel.loops.inline import ROUNDING, widened
from firesteel.loops.ir import ACCUMULATORS, AXES, LOADING, Axis, Buffer, Phase, Reduce, Store, acc, axis
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size, postorder, rebuild


@dataclass(frozen=True, slots=True)
class Statement:
    """A Reduce or a Store, and the names of the inner axes it sweeps over."""
    axes: tuple[str, ...]
    what: Reduce | Store

    def exprs(self) -> tuple[Expr, ...]:
        return (self.what.value,) if isinstance(self.what, Reduce) else (self.what.value, *self.what.index)


def arrange(statements: list[Statement], extents: dict[str, Size], escaping: set[str], buffers: Mapping[str, Buffer]) -> tuple[Phase, ...]:
    """The phases; `extents` of the inner axes, `escaping` the stored buffers that others read too."""
    return _Arranger(_without_equal_reductions(statements), extents, escaping, buffers).run()


def _without_equal_reductions(statements: list[Statement]) -> list[Statement]:
    """Of reductions that do the same the first stays, and the others' readers read it."""
    first: dict[tuple, Expr] = {}
    memo: dict[Expr, Expr] = {}         # accumulators that are gone -> those that stay; then all that was rebuilt
    result = []
    for statement in statements:
        what = _rebuilt(statement.what, memo) if memo else statement.what
        if isinstance(what, Reduce):
            kept = first.setdefault((statement.axes, what.op, what.dtype, what.value), acc(what))
            if kept.attr != what.name:
                memo[acc(what)] = kept
                continue
        result.append(Statement(statement.axes, what))
    return result


def _rebuilt(what: Reduce | Store, memo: dict[Expr, Expr]) -> Reduce | Store:
    value = rebuild(what.value, lambda node, args: None, memo, ACCUMULATORS)
    return Reduce(what.name, what.op, value, what.dtype) if isinstance(what, Reduce) else Store(what.buffer, what.index, value, what.mode)


class _Arranger:
    def __init__(self, statements: list[Statement], extents: dict[str, Size], escaping: set[str], buffers: Mapping[str, Buffer]):
        self.statements, self.extents, self.escaping, self.buffers = statements, extents, escaping, buffers
        self.stored: dict[str, int] = {}            # buffer -> number of its statement
        self.reduced: dict[str, int] = {}           # accumulator -> number of its statement
        self.levels: list[int] = []
        self.again: dict[str, set[int]] = {}        # buffer -> levels that read it at the place where it was stored
        self.elsewhere: set[str] = set()            # buffers read back at another place
        for number, statement in enumerate(statements):
            self.levels.append(self._level(statement))
            table = self.reduced if isinstance(statement.what, Reduce) else self.stored
            table[statement.what.name if isinstance(statement.what, Reduce) else statement.what.buffer] = number
        self.values: list[dict[str, Expr]] = [{} for _ in range(max(self.levels) + 1)]      # level -> buffer -> value there
        self.memos: list[dict[Expr, Expr]] = [{} for _ in self.values]

    # ------------------------------------------------ levels

    def _level(self, statement: Statement) -> int:
        level = 0
        here: list[str] = []
        for node in postorder(*statement.exprs(), only=ACCUMULATORS | LOADING):
            if node.op == "acc" and node.attr in self.reduced:
                level = max(level, self.levels[self.reduced[node.attr]] + 1)
            elif node.op in ("load", "masked") and node.attr in self.stored:
                producer = self.stored[node.attr]
                if self._same_place(node, statement):
                    level = max(level, self.levels[producer])
                    here.append(node.attr)
                else:
                    level = max(level, self.levels[producer] + 1)
                    self.elsewhere.add(node.attr)
        for name in here:
            self.again.setdefault(name, set()).add(level)
        return level

    def _same_place(self, load: Expr, reader: Statement) -> bool:
        producer = self.statements[self.stored[load.attr]]
        store: Any = producer.what      # never a Reduce: those are not in `stored`
        return load.op == "load" and load.args == store.index and (not producer.axes or set(producer.axes) == set(reader.axes))

    # ------------------------------------------------ values

    def _is_value(self, name: str, level: int) -> bool:
        """Is the buffer's value put in place of a load of it at that level?"""
        number = self.stored[name]
        statement, own = self.statements[number], self.levels[number]
        if level == own or not statement.axes:
            return True
        if name not in self.escaping and name not in self.elsewhere and self.again.get(name) == {level}:
            return True
        stored_anyway = name in self.escaping or name in self.elsewhere
        return cost.worth_recomputing(cost.body_cost(self.values[own][name]), self.buffers[name], stored_anyway)

    def _resolved(self, expr: Expr, level: int, reader: Statement) -> Expr:
        def change(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
            if node.op == "load" and node.attr in self.values[level] and self._same_place(node, reader):
                return self.values[level][node.attr]
            return widened(node, args)
        return rebuild(expr, change, self.memos[level], LOADING | ROUNDING)

    def _resolve_values(self) -> None:
        """values[level][buffer] for all levels from the buffer's own on, in the order of the statements."""
        for number, statement in enumerate(self.statements):
            if isinstance(statement.what, Store):
                for level in range(self.levels[number], len(self.values)):
                    if self._is_value(statement.what.buffer, level):
                        self.values[level][statement.what.buffer] = self._resolved(statement.what.value, level, statement)

    # ------------------------------------------------ phases

    def run(self) -> tuple[Phase, ...]:
        self._resolve_values()
        final = [Statement(s.axes, self._final(s, self.levels[n])) for n, s in enumerate(self.statements)]
        alive = self._alive(final)
        phases: dict[tuple, list[int]] = {}
        for number in alive:
            statement = final[number]
            last = not statement.axes and isinstance(statement.what, Store) and statement.what.buffer not in self.elsewhere
            phases.setdefault((len(self.values) if last else self.levels[number], frozenset(statement.axes)), []).append(number)
        order = sorted(phases, key=lambda key: (key[0], phases[key][0]))
        return _unique_axes([self._phase([final[n] for n in phases[key]]) for key in order])

    def _final(self, statement: Statement, level: int) -> Reduce | Store:
        what = statement.what
        value = self._resolved(what.value, level, statement)
        if isinstance(what, Reduce):
            return Reduce(what.name, what.op, value, what.dtype)
        return Store(what.buffer, tuple([self._resolved(part, level, statement) for part in what.index]), value, what.mode)

    def _alive(self, final: list[Statement]) -> list[int]:
        """Numbers of the live statements; readers come after what they read, so one backward walk finds them."""
        needed = set(self.escaping)
        alive = []
        seen: set[Expr] = set()
        for number in reversed(range(len(final))):
            what = final[number].what
            if (what.name if isinstance(what, Reduce) else what.buffer) not in needed:
                continue
            alive.append(number)
            nodes = postorder(*final[number].exprs(), known=seen, only=ACCUMULATORS | LOADING)
            seen.update(nodes)
            needed.update(node.attr for node in nodes if node.op in ("acc", "load", "masked"))
        return alive[::-1]

    def _phase(self, statements: list[Statement]) -> Phase:
        axes = tuple([Axis(name, self.extents[name]) for name in statements[0].axes])
        reduces = tuple([s.what for s in statements if isinstance(s.what, Reduce)])
        return Phase("reduce" if reduces else "map", axes, reduces, tuple([s.what for s in statements if isinstance(s.what, Store)]))


def _unique_axes(phases: list[Phase]) -> tuple[Phase, ...]:
    """Inner axes renamed so that no two phases share a name."""
    taken: set[str] = set()
    result = []
    for number, phase in enumerate(phases):
        clash = {a.name: f"{a.name}_{number}" for a in phase.axes if a.name in taken}
        result.append(_renamed(phase, clash) if clash else phase)
        taken.update(a.name for a in result[-1].axes)
    return tuple(result)


def _renamed(phase: Phase, names: dict[str, str]) -> Phase:
    memo: dict[Expr, Expr] = {axis(old): axis(new) for old, new in names.items()}

    def new(expr: Expr) -> Expr:
        return rebuild(expr, lambda node, args: None, memo, AXES)

    return Phase(phase.kind, tuple([Axis(names.get(a.name, a.name), a.extent) for a in phase.axes]),
                 tuple([Reduce(r.name, r.op, new(r.value), r.dtype) for r in phase.reduces]),
                 tuple([Store(s.buffer, tuple([new(part) for part in s.index]), new(s.value), s.mode) for s in phase.stores]))
