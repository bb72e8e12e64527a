"""The same Program with every nest in normal form, which fusion and printers count on.

In: a Program as lowered or as changed by fusion.  Out: the same steps, where for each nest
 1. its name is unique in the program;
 2. no axis has the constant extent 1;
 3. a nest of one map phase has no phase axes: all of them are parallel;
 4. indices and the masks of loads are simplified under the ranges of the axes: (i*8 + j) // 8 is i where j < 8.

`split_axes` is for the end of the line: an axis that is taken apart by // and % becomes two, whose indices are then linear again.

Merging axes and putting strides in is left to the printers (`codegen/flat.py`), which see one nest at a time.
Values are not touched: floating-point bodies are never rearranged, integer data may wrap.

    nest a [i < n, j < 1]  map [k < 8]  y[i, j, k] = load(x, (i*8 + k) // 8)
    nest a [i < n, k < 8]  map          y[i, 0, k] = load(x, i)
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from firesteel.loops.access import load_index
from firesteel.loops.ir import (
    ACCUMULATORS,
    AXES,
    CHECKING,
    LOADING,
    LOADS,
    Axis,
    Buffer,
    Nest,
    Phase,
    Program,
    Reduce,
    Store,
    all_loads,
    idle_axes,
    names_by_data,
)
from firesteel.sym.expr import Expr, Size, as_expr, as_size, bits, const, context_of, make, postorder, rebuild
from firesteel.sym.poly import from_poly, plus, poly
from firesteel.sym.rewrite import Context
from firesteel.targets import CPU

ZERO = const(0)
PLAIN = ("axis", "const", "symbol")
MASKED, DIVIDING, WITH_INDICES = bits("masked"), bits("floordiv", "mod"), bits("load", "masked", "where", "check_index")
MOST_SPLITS = 8     # of one nest
SHORT_RUNS = (2, 4, 8)      # divisors that are shifts, and leave fewer elements than a vector has


def simplify(program: Program) -> Program:
    """Every nest of the program in normal form."""
    seen: dict[str, int] = {}
    steps = []
    for step in program.steps:
        step = step.map(simplify_nest)
        count = seen[step.name] = seen.get(step.name, 0) + 1
        steps.append(step if count == 1 else replace(step, name=_fresh(step.name, count, seen)))
    return replace(program, steps=tuple(steps))


def _fresh(name: str, count: int, seen: dict[str, int]) -> str:
    while f"{name}_{count}" in seen:
        count += 1
    seen[f"{name}_{count}"] = 1
    return f"{name}_{count}"


def simplify_nest(nest: Nest, conditions: bool = False) -> Nest:
    """`conditions`: those of plain choices may be known too, which few nests have."""
    nest = _without_inner_axes(nest)
    unit = {axis.value for axis in all_axes(nest) if as_size(axis.extent) == 1}
    if not unit and not conditions and not has_indices_to_simplify(nest):
        return nest
    simplifier = Simplifier(all_axes(nest), unit)
    return map_nest(nest, simplifier.value, simplifier.index, unit)


class Simplifier:
    """Simplifies the indices and masks in Exprs over some axes; those in `unit` are always 0."""

    def __init__(self, axes: list[Axis], unit: Collection[Expr] = ()):
        self.context = context_of({axis.value: (0, axis.extent - 1) for axis in axes if axis.value not in unit})
        self.memo: dict[Expr, Expr] = dict.fromkeys(unit, ZERO)
        self.touched = WITH_INDICES | AXES if unit else WITH_INDICES

    def value(self, expr: Expr) -> Expr:
        return rebuild(expr, self._change, self.memo, self.touched)

    def index(self, expr: Expr) -> Expr:
        return expr if expr.op in PLAIN else as_expr(self.context.simplify(expr))

    def condition(self, expr: Expr) -> Expr:
        return rebuild(self.index(expr), lambda node, args: _without_remainder(self.context, args) if node.op == "le" else None, {}, bits("le"))

    def _change(self, node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        row = _CHANGES.get(node.op)
        return None if row is None else row(self, node, args)

    def _load(self, node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if all(arg.op in PLAIN for arg in args):
            return None
        return make(node.op, node.dtype, tuple([self.index(arg) for arg in args]), node.attr)

    def _masked(self, node: Expr, args: tuple[Expr, ...]) -> Expr:
        """A mask that is known makes a plain load, or none."""
        mask, index = self.condition(args[0]), tuple([self.index(arg) for arg in args[2:]])
        if mask.op == "const":
            return make("load", node.dtype, index, node.attr) if mask.attr else args[1]
        return make("masked", node.dtype, (mask, args[1], *index), node.attr)

    def _where(self, node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if not _of_axes(args[0]):
            return None
        condition = self.condition(args[0])
        if condition.op == "const":
            return args[1] if condition.attr else args[2]
        return make("where", node.dtype, (condition, *args[1:]))

    def _check_index(self, node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        """What is known to be inside needs no check, and what is known to be counted from the end no choice."""
        if not _of_axes(args[0]):
            return None
        context = self.context
        index, size = context.simplify(as_size(args[0])), as_size(args[1])
        if node.attr is None and context.less(index, 0):
            index = context.simplify(index + size)
        return as_expr(index) if context.nonneg(index) and context.less(index, size) else None


_CHANGES = {"load": Simplifier._load, "masked": Simplifier._masked, "where": Simplifier._where, "check_index": Simplifier._check_index}


def _of_axes(expr: Expr) -> bool:
    """Is it made of axes, symbols and constants alone?"""
    return not expr.holds & (LOADING | ACCUMULATORS | CHECKING) and all(node.dtype in ("i64", "bool") for node in postorder(expr))


def _without_remainder(context: Context, args: tuple[Expr, ...]) -> Expr | None:
    """32*i + j <= 255 with 0 <= j < 32 is i <= 7: what is smaller than a common factor of the rest is rounded away."""
    if args[0].dtype != "i64":
        return None
    gap = plus(poly(as_size(args[1])), poly(as_size(args[0])), -1)      # the question is gap >= 0
    factor = max((abs(count) for monomial, count in gap.items() if monomial), default=1)
    whole = {monomial: count // factor for monomial, count in gap.items() if monomial and count % factor == 0}
    if factor == 1 or len(whole) == len(gap) - (() in gap):
        return None
    low, high = context.bounds.interval_of_poly({m: count for m, count in gap.items() if m not in whole})
    if low is None or high is None or low // factor != high // factor:
        return None
    return as_expr(context.build("le", from_poly({m: -count for m, count in whole.items()}), low // factor))


def all_axes(nest: Nest) -> list[Axis]:
    return [*nest.axes, *(axis for phase in nest.phases for axis in phase.axes)]


def _without_inner_axes(nest: Nest) -> Nest:
    """One map phase: its axes become the nest's."""
    if len(nest.phases) == 1 and nest.phases[0].kind == "map" and nest.phases[0].axes:
        return replace(nest, axes=(*nest.axes, *nest.phases[0].axes), phases=(replace(nest.phases[0], axes=()),))
    return nest


def has_indices_to_simplify(nest: Nest) -> bool:
    """Is there an index other than axes and constants?  Most nests have none, and are left as they are."""
    if not all(part.op in PLAIN for store in nest.stores() for part in store.index):
        return True
    exprs = nest.exprs()
    if any(expr.holds & MASKED for expr in exprs):
        return True
    checks = [node for node in postorder(*exprs, only=CHECKING) if node.op == "check_index"]
    return any(arg.op not in PLAIN for node in (*all_loads(exprs), *checks) for arg in node.args)


def map_nest(nest: Nest, value: Callable[[Expr], Expr], index: Callable[[Expr], Expr] | None = None,
             dropped: Collection[Expr] = ()) -> Nest:
    """The nest with every Expr passed through `value` (indices of stores through `index` after it), without dropped axes."""
    index = index or (lambda expr: expr)

    def stored(store: Store, axes: tuple[Axis, ...]) -> Store:
        places = tuple([index(value(part)) for part in store.index])
        if store.mode == "set" and names_by_data(store.index) and idle_axes(places, kept(axes)):
            places = tuple([as_checked(part, place, value) for part, place in zip(store.index, places)])
        return Store(store.buffer, places, value(store.value), store.mode)

    def kept(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple([axis for axis in axes if axis.value not in dropped]) if dropped else axes

    phases = tuple([Phase(phase.kind, kept(phase.axes) if phase.kind != "scan" else phase.axes,
                          tuple([Reduce(r.name, r.op, value(r.value), r.dtype) for r in phase.reduces]),
                          tuple([stored(store, nest.axes + phase.axes) for store in phase.stores])) for phase in nest.phases])
    return Nest(nest.name, kept(nest.axes), phases, nest.origin)


def as_checked(part: Expr, place: Expr, value: Callable[[Expr], Expr]) -> Expr:
    """A place that was checked stays so, though it is known to be inside: the check says that points may collide there."""
    if part.op != "check_index" or place.op == "check_index":
        return place
    return make("check_index", "i64", (place, value(part.args[1])), part.attr)


# ---------------------------------------------------------------- axes that are taken apart

Woven = Callable[[Nest, int, Mapping[str, Buffer]], bool]      # will so short rows of a nest be written out?


def _never(nest: Nest, divisor: int, buffers: Mapping[str, Buffer]) -> bool:
    return False


def split_axes(program: Program, woven: Woven = _never) -> Program:
    """Every nest without i // c and i % c in its indices, where c divides the extent of i."""
    return replace(program, steps=tuple([step.map(lambda nest: split_nest(nest, program.buffers, woven)) for step in program.steps]))


def split_nest(nest: Nest, buffers: Mapping[str, Buffer], woven: Woven = _never) -> Nest:
    """Each round takes one factor off an axis: i < 24*32 becomes 32*i + i_r with i < 24, i_r < 32."""
    for _ in range(MOST_SPLITS):
        found = _divided_axis(nest, buffers, woven)
        if found is None:
            return nest
        nest = simplify_nest(_split(nest, *found))
    return nest


def _divided_axis(nest: Nest, buffers: Mapping[str, Buffer], woven: Woven) -> tuple[Axis, Size] | None:
    """An axis of a map or reduce phase, and a divisor of its extent by which some index takes it apart."""
    if not any(expr.holds & DIVIDING for expr in nest.exprs()):
        return None
    axes = {axis.value: axis for axis in nest.axes}
    axes.update((axis.value, axis) for phase in nest.phases if phase.kind != "scan" for axis in phase.axes)
    indices = [part for store in nest.stores() for part in store.index] + [part for load in all_loads(nest.exprs()) for part in load_index(load)]
    for node in postorder(*indices, below=lambda node: node.args if node.op not in LOADS else (), only=DIVIDING):
        moved = _moved_axis(node) if node.op in ("floordiv", "mod") else None
        axis = axes.get(moved) if moved is not None else None
        if axis is None or not divides(divisor := as_size(node.args[1]), axis.extent):
            continue
        plain = node.args[0] is axis.value
        if plain and divisor not in SHORT_RUNS:
            return axis, divisor
        if type(divisor) is int and (woven(nest, divisor, buffers) if _stored_along(nest, axis, buffers) else plain):
            return axis, divisor
    return None


def _moved_axis(node: Expr) -> Expr | None:
    """Of what is taken apart: i, or i and a number."""
    terms = poly(as_size(node.args[0]))
    found = [monomial for monomial in terms if monomial]
    return found[0][0] if len(found) == 1 and len(found[0]) == 1 and terms[found[0]] == 1 else None


def _stored_along(nest: Nest, axis: Axis, buffers: Mapping[str, Buffer]) -> bool:
    """Do all stores of the nest write memory in a row along the axis, on a machine whose lanes must?  Lanes along a few elements would stand idle."""
    def in_a_row(store: Store) -> bool:
        buffer = buffers[store.buffer]
        return buffer.device == CPU and any(part is axis.value and stride == 1 for part, stride in zip(store.index, buffer.strides))
    return all(map(in_a_row, nest.stores()))


def divides(divisor: Size, extent: Size) -> bool:
    if isinstance(divisor, int) and isinstance(extent, int):
        return 1 < divisor < extent and extent % divisor == 0
    quotient = extent // divisor
    return quotient * divisor == extent and quotient != 1


def _split(nest: Nest, axis: Axis, divisor: Size) -> Nest:
    rest = Axis(f"{axis.name}_r", divisor)
    taken = {a.name for a in all_axes(nest)}
    while rest.name in taken:
        rest = Axis(rest.name + "_", divisor)
    memo: dict[Expr, Expr] = {axis.value: as_expr(axis.value * divisor + rest.value)}
    new = map_nest(nest, lambda expr: rebuild(expr, lambda node, args: None, memo, AXES))

    def apart(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple([part for a in axes for part in ((Axis(a.name, a.extent // divisor), rest) if a.name == axis.name else (a,))])

    return replace(new, axes=apart(new.axes), phases=tuple([replace(p, axes=apart(p.axes)) for p in new.phases]))
