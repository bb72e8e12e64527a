"""How the nests of a CPU read memory: what lanes can read in a row, they read in a row.

In: nests and their buffers.  Out: nests of the same meaning, in which
 - a masked load that is inside of its buffer anyway is a plain one, chosen by the mask: lanes that load one element under a mask each gather it;
 - a small buffer that is read again and again along a dimension other than its last one is read from a copy that has that dimension last.

    nest [i < 600, j < 600]  d[i, j] = load(x, i, 0) - load(x, j, 0)       x is [600, 3]
    nest [a < 3, b < 600]    x_rows[a, b] = load(x, b, a)
    nest [i < 600, j < 600]  d[i, j] = load(x_rows, 0, i) - load(x_rows, 0, j)
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from firesteel.loops import cost
from firesteel.loops.access import load_index
from firesteel.loops.ir import LOADING, Axis, Buffer, Nest, Phase, Program, ProgramStep, Store, all_loads, load
from firesteel.loops.simplify import map_nest
from firesteel.sym.expr import Expr, Size, bits, make, rebuild, row_major
from firesteel.targets import CPU

FEWEST = 8          # elements along an axis that are worth a vector, and times that each element of a copy is read


# ---------------------------------------------------------------- masks

def without_needless_masks(program: Program) -> Program:
    return replace(program, steps=tuple([step.map(lambda nest: _unmasked(nest, program.buffers)) for step in program.steps]))


def _unmasked(nest: Nest, buffers: Mapping[str, Buffer]) -> Nest:
    if not any(expr.holds & bits("masked") for expr in nest.exprs()):
        return nest
    extents = {axis.value: axis.extent for phase in nest.phases for axis in (*nest.axes, *phase.axes)}

    def change(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op != "masked" or not _is_inside(args[2:], buffers[node.attr], extents):
            return None
        return make("where", node.dtype, (args[0], make("load", node.dtype, args[2:], node.attr), args[1]))

    memo: dict[Expr, Expr] = {}
    return map_nest(nest, lambda expr: rebuild(expr, change, memo, LOADING))


def _is_inside(index: tuple[Expr, ...], buffer: Buffer, extents: Mapping[Expr, Size]) -> bool:
    return buffer.device == CPU and all(extents.get(part) == size if part.op == "axis" else part.op == "const" and _below(part.attr, size)
                                        for part, size in zip(index, buffer.shape))


def _below(place: int, size: Size) -> bool:
    return isinstance(size, int) and 0 <= place < size


# ---------------------------------------------------------------- copies

def read_in_rows(program: Program, rewritten: set[str]) -> Program:
    """`rewritten`: buffers that are not written once and for all before they are read."""
    buffers = dict(program.buffers)
    copies: dict[tuple[str, int], Buffer] = {}      # (buffer, its innermost dimension) -> the copy
    steps: list[ProgramStep] = []
    for step in program.steps:
        found = dict(_strided(step.nest, buffers)) if step.nest else {}
        found = {node: dim for node, dim in found.items() if node.attr not in rewritten}
        for key in dict.fromkeys((node.attr, dim) for node, dim in found.items()):
            if key not in copies:
                copies[key] = _copy_of(buffers, *key)
                steps.append(_copying(buffers[key[0]], copies[key], key[1]))
        steps.append(step.map(lambda nest: _reading(nest, found, copies)) if found else step)
    return replace(program, buffers=buffers, steps=tuple(steps)) if copies else program


def _strided(nest: Nest, buffers: Mapping[str, Buffer]) -> Iterator[tuple[Expr, int]]:
    """Loads to be made from a copy, and the dimension that is to be its last one."""
    for phase in nest.phases:
        axes = (*nest.axes, *phase.axes)
        loads = all_loads(phase.exprs())
        if not all(isinstance(axis.extent, int) for axis in axes) or cost.points(axes) < cost.SMALL:
            continue
        lanes = {axis.value for axis in axes if cost.hint(axis.extent) >= FEWEST}
        rows = set(_along(((buffers[node.attr], load_index(node)) for node in loads), lanes)) | set(
            _along(((buffers[store.buffer], store.index) for store in nest.stores()), lanes))
        written = nest.writes()
        for node in loads:
            buffer = buffers[node.attr]
            steps = {d: stride for d, stride in enumerate(buffer.strides) if load_index(node)[d] in lanes}
            if node.op == "load" and node.attr not in written and _is_small(buffer, cost.points(axes)) and steps:
                dim = min(steps, key=lambda d: cost.hint(steps[d]))
                if steps[dim] != 1 and node.args[dim] in rows:
                    yield node, dim


def _along(accesses: Iterable[tuple[Buffer, tuple[Expr, ...]]], lanes: set[Expr]) -> Iterator[Expr]:
    """Axes along which memory is read or written in a row."""
    return (part for buffer, index in accesses for part, stride in zip(index, buffer.strides) if stride == 1 and part in lanes)


def _is_small(buffer: Buffer, points: int) -> bool:
    return buffer.device == CPU and all(isinstance(n, int) for n in buffer.shape) and cost.elements(buffer) * FEWEST <= points


def _last(items: tuple, dim: int) -> tuple:
    return (*items[:dim], *items[dim + 1:], items[dim])


def _copy_of(buffers: dict[str, Buffer], name: str, dim: int) -> Buffer:
    old = buffers[name]
    shape, new = _last(old.shape, dim), f"{name}_rows"
    while new in buffers:
        new += "_"
    buffers[new] = Buffer(new, old.dtype, shape, row_major(shape), "temp", old.device)
    return buffers[new]


def _copying(old: Buffer, new: Buffer, dim: int) -> Nest:
    axes = tuple([Axis(f"i{d}", size) for d, size in enumerate(old.shape)])
    index = tuple([axis.value for axis in axes])
    return Nest(new.name, axes, (Phase("map", (), (), (Store(new.name, _last(index, dim), load(old, index)),)),))


def _reading(nest: Nest, found: Mapping[Expr, int], copies: Mapping[tuple[str, int], Buffer]) -> Nest:
    memo: dict[Expr, Expr] = {node: load(copies[node.attr, dim], _last(node.args, dim)) for node, dim in found.items()}
    return map_nest(nest, lambda expr: rebuild(expr, lambda node, args: None, memo, LOADING))
