"""Sums of distances from a mean, in the sweep that computes the mean: FlatNest -> FlatNest, for kernels that cannot keep a row in registers.

    reduce [r < n]  a = sum(v(r) / n)                      reduce [k < 32] s = sum(v(k * step) / 32)
    reduce [r < n]  b = sum((v(r) - a) * f)           ->   reduce [r < n]  a = sum(v(r) / n);  t = sum(v(r) - s);  u = sum((v(r) - s) ** 2)
                    c = sum(((v(r) - a) * f) ** 2)         b = f * (t - n * (a - s));  c = f * f * max(u - (a - s) * (2 * t - n * (a - s)), 0)

A variance is then read from memory once, as by eager's kernels.  What is subtracted first, s, must only be near: off by d, it loses as many digits
as d * d has more than the variance.  The mean of 32 elements is that near, whatever the others are like: those far from the mean are few, or add to
the variance as they do to d * d.  The step is odd, so that the elements are not all of one column of an image.

What always holds: f and a vary along no sweep; the sweeps have one axis of the same known length; nothing is stored in between.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping

from firesteel.codegen.flat import Address, FlatNest, FlatPhase
from firesteel.codegen.printer import renamed
from firesteel.loops.ir import Axis, Reduce, acc, axis
from firesteel.loops.scalars import S
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, const, make, postorder, rebuild

SAMPLES = 32
LEAST = 8 * SAMPLES         # elements of a sweep that is worth it


@dataclass(frozen=True, slots=True)
class _Distance:
    """(value - center) * factor, perhaps squared; None is no factor."""
    value: Expr
    center: Expr
    factor: Expr | None = None
    squared: bool = False


def in_one_pass(nest: FlatNest, long: Collection[int]) -> FlatNest:
    """`long`: the numbers of phases whose sweep is a loop."""
    for number, (first, second) in enumerate(zip(nest.phases, nest.phases[1:])):
        if number in long and number + 1 in long and _fit(first, second):
            found = [_distance(r, second.axes[0].name) for r in second.reduces]
            distances = [one for one in found if one is not None]
            if len(distances) == len(found) and len({one.value for one in distances}) == 1:
                return _joined(nest, number, distances)
    return nest


def _fit(first: FlatPhase, second: FlatPhase) -> bool:
    plain = first.kind == second.kind == "reduce" and not first.stores and not second.stores and len(first.axes) == len(second.axes) == 1
    return plain and type(first.axes[0].extent) is int and first.axes[0].extent == second.axes[0].extent and first.axes[0].extent >= LEAST


# ---------------------------------------------------------------- what is summed

def _distance(r: Reduce, sweep: str) -> _Distance | None:
    if r.op != "sum" or r.dtype not in ("f32", "f64"):
        return None
    varies: dict[Expr, bool] = {}
    for node in postorder(r.value):
        own = node.op == "axis" and node.attr == sweep or node.op in ("at", "at_masked") and node.attr[1].coefficient(sweep) != 0
        varies[node] = own or any(varies[arg] for arg in node.args)
        if node.op == "check_index" and varies[node]:
            return None
    value = r.value
    squared = value.op == "mul" and len(value.args) == 2 and value.args[0] is value.args[1]
    found = _shifted(value.args[0] if squared else value, varies)
    return found and _Distance(found.value, found.center, found.factor, squared)


def _shifted(node: Expr, varies: Mapping[Expr, bool]) -> _Distance | None:
    """A difference from what does not vary, times what does not vary."""
    if node.op == "sub" and varies[node.args[0]] and not varies[node.args[1]]:
        return _Distance(node.args[0], node.args[1])
    if node.op == "mul" and len(node.args) == 2 and varies[node.args[0]] != varies[node.args[1]]:
        inner, factor = node.args if varies[node.args[0]] else reversed(node.args)
        found = _shifted(inner, varies)
        return found and _Distance(found.value, found.center, factor if found.factor is None else S.mul(found.factor, factor))
    return None


# ---------------------------------------------------------------- one sweep of two

def _joined(nest: FlatNest, number: int, distances: list[_Distance]) -> FlatNest:
    first, second = nest.phases[number:number + 2]
    sweep, count, dtype = first.axes[0], first.axes[0].extent, second.reduces[0].dtype
    assert isinstance(count, int)
    samples, step = Axis(f"{sweep.name}_s", SAMPLES), (count - 1) // (SAMPLES - 1) - 1 | 1
    value = distances[0].value
    near = Reduce("s0", "sum", S.mul(_along(value, second.axes[0].name, samples.name, step), const(1 / SAMPLES, dtype)), dtype)
    shifted = S.sub(_along(value, second.axes[0].name, sweep.name, 1), acc(near))
    total, squares = Reduce("s1", "sum", shifted, dtype), Reduce("s2", "sum", S.mul(shifted, shifted), dtype)
    n, t, u, zero = const(float(count), dtype), acc(total), acc(squares), const(0.0, dtype)
    known: dict[Expr, Expr] = {}
    for r, one in zip(second.reduces, distances):
        d = S.sub(one.center, acc(near))
        whole = S.max(S.sub(u, S.mul(d, S.sub(S.add(t, t), S.mul(n, d)))), zero) if one.squared else S.sub(t, S.mul(n, d))
        for factor in ([one.factor] if one.factor is not None else []) * (1 + one.squared):
            whole = S.mul(whole, factor)
        known[acc(r)] = whole
    phases = (FlatPhase("reduce", (samples,), (near,), ()), FlatPhase("reduce", first.axes, (*first.reduces, total, squares), ()))
    return FlatNest(nest.axes, (*nest.phases[:number], *phases, *(_with(p, known) for p in nest.phases[number + 2:])), nest.dtypes)


def _along(value: Expr, old: str, new: str, step: int) -> Expr:
    """With another axis in the place of one, of which it takes every step-th point."""
    def change(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op == "axis" and node.attr == old:
            return axis(new) if step == 1 else S.mul(axis(new), const(step, "i64"))
        if node.op in ("at", "at_masked"):
            buffer, address = node.attr
            terms = tuple((new, c * step) if name == old else (name, c) for name, c in address.terms)
            return make(node.op, node.dtype, args, (buffer, Address(terms, address.base, address.scales)))
        return None
    return rebuild(value, change, {})


def _with(phase: FlatPhase, known: Mapping[Expr, Expr]) -> FlatPhase:
    memo: dict[Expr, Expr] = {}
    for root in phase.roots():
        rebuild(root, lambda node, args: known.get(node), memo)
    return renamed(phase, memo)
