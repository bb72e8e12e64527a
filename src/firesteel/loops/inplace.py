"""Inputs written where they lie: Program -> Program.

In: a simplified Program that ends with copies into inputs (`copy_`).  Out: the same, where a buffer that begins as a copy of an input and
is copied back into it in the end is that input: of a cache of which one row is written, one row is written.

Numbered rules of when b is x
 1. The first writer of b copies all of x into it, and b has x's layout.
 2. Besides that nobody reads x, and besides the copy back nobody writes it.
 3. Nests write b, and no library call does; b is no output, and is copied into x alone.

    b[i, j] = load(x, i, j);  b[k, j] = v[j];  y = sum(load(b, i, j));  copy_(x, b)      ->      x[k, j] = v[j];  y = sum(load(x, i, j))
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from firesteel.loops import access
from firesteel.loops.inline import is_permutation, only_store
from firesteel.loops.ir import LOADING, LOADS, Buffer, Extern, Nest, Program, ProgramStep, View
from firesteel.loops.simplify import map_nest
from firesteel.sym.expr import Expr, make, rebuild

COPY = torch.ops.aten.copy_.default


def write_in_place(program: Program) -> Program:
    """Copies that are not needed left out."""
    backs = [(number, step.call) for number, step in enumerate(program.steps) if step.call and step.call.target is COPY]
    names: dict[str, str] = {}
    dropped: set[int] = set()
    for number, back in backs:
        x, b = back.args[:2]
        if not (isinstance(x, View) and isinstance(b, View) and _is_whole(x, program) and _is_whole(b, program)):
            continue
        first = _only_copy(program, x.buffer, b.buffer, number)
        if first is not None:
            names[b.buffer] = x.buffer
            dropped |= {first, number}
    if not names:
        return program
    steps = [_renamed(step, names) for number, step in enumerate(program.steps) if number not in dropped]
    return replace(program, steps=tuple(steps), buffers={name: buffer for name, buffer in program.buffers.items() if name not in names})


def _is_whole(view: View, program: Program) -> bool:
    return _layout(view) == _layout(program.buffers[view.buffer]) and isinstance(view.offset, int) and view.offset == 0


def _layout(what: View | Buffer) -> tuple:
    return what.dtype, what.shape, what.strides, what.offset


def _only_copy(program: Program, x: str, b: str, back: int) -> int | None:
    """The number of the nest that copies x into b, where all rules hold."""
    buffers = program.buffers
    if buffers[x].kind != "input" or buffers[b].kind != "temp" or _layout(buffers[x]) != _layout(buffers[b]) or b in access.output_buffers(program):
        return None
    others = [(number, step) for number, step in enumerate(program.steps) if number != back]
    writers = [(number, step) for number, step in others if b in step.writes()]
    if not writers or any(step.nest is None for _, step in writers) or any(x in step.writes() for _, step in others):
        return None
    first, copy = writers[0]
    readers = [number for number, step in others if x in step.reads()]
    last = max(number for number, step in others if b in (*step.reads(), *step.writes()))
    return first if _copies(copy.nest, x) and readers == [first] and last < back else None


def _copies(nest: Nest | None, x: str) -> bool:
    """Does a nest store all elements of x at their places in another buffer?"""
    store = only_store(nest) if nest is not None else None
    if store is None or nest is None or not is_permutation(store.index, nest.axes):
        return False
    return store.value.op == "load" and store.value.attr == x and store.value.args == store.index


def _renamed(step: ProgramStep, names: dict[str, str]) -> ProgramStep:
    """A step over other buffers."""
    if isinstance(step, Extern):
        return replace(step, args=_in_views(step.args, names), kwargs={key: _in_views(value, names) for key, value in step.kwargs.items()})
    return step.map(lambda nest: _renamed_nest(nest, names))


def _in_views(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, View):
        return replace(value, buffer=names.get(value.buffer, value.buffer))
    return type(value)(_in_views(item, names) for item in value) if isinstance(value, (tuple, list)) else value


def _renamed_nest(nest: Nest, names: dict[str, str]) -> Nest:
    if names.keys().isdisjoint((*nest.reads(), *nest.writes())):
        return nest
    memo: dict[Expr, Expr] = {}

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        return make(node.op, node.dtype, args, names[node.attr]) if node.op in LOADS and node.attr in names else None

    new = map_nest(nest, lambda expr: rebuild(expr, change, memo, LOADING))
    phases = [replace(phase, stores=tuple(replace(s, buffer=names.get(s.buffer, s.buffer)) for s in phase.stores)) for phase in new.phases]
    return replace(new, phases=tuple(phases))
