"""The same Program with every nest in normal form, which fusion and printers count on.

In: a Program as lowered or as changed by fusion.  Out: the same steps, where for each nest
 1. its name is unique in the program;
 2. no axis has the constant extent 1;
 3. a nest of one map phase has no phase axes: all of them are parallel;
 4. indices and the masks of loads are simplified under the ranges of the axes: (i*8 + j) // 8 is i where j < 8.

Merging axes and putting strides in is left to the printers (`codegen/flat.py`), which see one nest at a time.
Values are not touched: floating-point bodies are never rearranged, integer data may wrap.

    nest a [i < n, j < 1]  map [k < 8]  y[i, j, k] = load(x, (i*8 + k) // 8)
    nest a [i < n, k < 8]  map          y[i, 0, k] = load(x, i)
"""
from __future__ import annotations

from dataclasses import replace

from firesteel.loops.access import LOADS, rebuild
from firesteel.loops.ir import Axis, Nest, Phase, Program, Reduce, Store
from firesteel.sym.expr import Expr, as_expr, as_size, const, context_of, make

ZERO = const(0)
PLAIN = ("axis", "const", "symbol")


def simplify(program: Program) -> Program:
    """Every nest of the program in normal form."""
    seen: dict[str, int] = {}
    steps = []
    for step in program.steps:
        step = simplify_nest(step) if isinstance(step, Nest) else step
        count = seen[step.name] = seen.get(step.name, 0) + 1
        steps.append(step if count == 1 else replace(step, name=_fresh(step.name, count, seen)))
    return replace(program, steps=tuple(steps))


def _fresh(name: str, count: int, seen: dict[str, int]) -> str:
    while f"{name}_{count}" in seen:
        count += 1
    seen[f"{name}_{count}"] = 1
    return f"{name}_{count}"


def simplify_nest(nest: Nest) -> Nest:
    nest = _without_inner_axes(nest)
    unit = {axis.value for axis in all_axes(nest) if as_size(axis.extent) == 1}
    if not unit and not has_indices_to_simplify(nest):
        return nest
    ranges = {axis.value: (0, axis.extent - 1) for axis in all_axes(nest) if axis.value not in unit}
    context = context_of(ranges)
    memo: dict[Expr, Expr] = dict.fromkeys(unit, ZERO)

    def index(expr: Expr) -> Expr:
        return expr if expr.op in PLAIN else as_expr(context.simplify(expr))

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op not in LOADS or all(arg.op in PLAIN for arg in args):
            return None
        if node.op == "load":
            return make(node.op, node.dtype, tuple([index(arg) for arg in args]), node.attr)
        return _masked(node, index(args[0]), args[1], tuple([index(arg) for arg in args[2:]]))

    return map_nest(nest, lambda expr: rebuild(expr, change, memo), index, unit)


def _masked(node: Expr, mask: Expr, other: Expr, index: tuple[Expr, ...]) -> Expr:
    """A mask that is known makes a plain load, or none."""
    if mask.op == "const":
        return make("load", node.dtype, index, node.attr) if mask.attr else other
    return make("masked", node.dtype, (mask, other, *index), node.attr)


def all_axes(nest: Nest) -> list[Axis]:
    return [*nest.axes, *(axis for phase in nest.phases for axis in phase.axes)]


def _without_inner_axes(nest: Nest) -> Nest:
    """One map phase: its axes become the nest's."""
    if len(nest.phases) == 1 and nest.phases[0].kind == "map" and nest.phases[0].axes:
        return replace(nest, axes=(*nest.axes, *nest.phases[0].axes), phases=(replace(nest.phases[0], axes=()),))
    return nest


def has_indices_to_simplify(nest: Nest) -> bool:
    """Is there an index other than axes and constants?  Most nests have none, and are left as they are."""
    seen: set[Expr] = set()
    stack: list[Expr] = []
    for phase in nest.phases:
        stack += [reduce.value for reduce in phase.reduces]
        for store in phase.stores:
            stack.append(store.value)
            if not all(part.op in PLAIN for part in store.index):
                return True
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op in LOADS and (node.op == "masked" or not all(arg.op in PLAIN for arg in node.args)):
            return True
        stack.extend(node.args)
    return False


def map_nest(nest: Nest, value, index=None, dropped: set[Expr] | frozenset = frozenset()) -> Nest:
    """The nest with every Expr passed through `value` (indices of stores through `index` after it), without dropped axes."""
    index = index or (lambda expr: expr)

    def stored(store: Store) -> Store:
        return Store(store.buffer, tuple([index(value(part)) for part in store.index]), value(store.value), store.mode)

    def kept(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple([axis for axis in axes if axis.value not in dropped])

    phases = tuple([Phase(phase.kind, kept(phase.axes) if phase.kind != "scan" else phase.axes,
                          tuple([Reduce(r.name, r.op, value(r.value), r.dtype) for r in phase.reduces]),
                          tuple([stored(store) for store in phase.stores])) for phase in nest.phases])
    return Nest(nest.name, kept(nest.axes), phases, nest.origin)
