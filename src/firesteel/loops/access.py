"""What a step of a Program reads and writes: the questions that fusion, planning and the host function ask.

In: Exprs, Phases, Nests, Externs.  Out: loads, buffer names, symbol names.  Walks share subtrees (Exprs are hash-consed), so
each costs the number of distinct nodes, not the size of the tree written out; answers about single Exprs are kept.

    reads(nest)      # ('x', 'w'): buffers loaded, in the order of their first load
    writes(nest)     # ('y',)
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from firesteel.loops.ir import Buffer, Extern, Nest, Phase, Program, Store, View
from firesteel.sym.expr import Expr, make

LOADS = ("load", "masked")


def walk(*roots: Expr) -> list[Expr]:
    """Every distinct node below the roots, users before arguments."""
    found: dict[Expr, None] = {}
    stack = list(roots)
    stack.reverse()
    while stack:
        node = stack.pop()
        if node not in found:
            found[node] = None
            stack += node.args[::-1]
    return list(found)


def rebuild(root: Expr, change: Callable[[Expr, tuple[Expr, ...]], Expr | None], memo: dict[Expr, Expr]) -> Expr:
    """`root` with every node replaced by change(node, new arguments), or made again from those where that gives None."""
    stack = [root]
    while stack:
        node = stack[-1]
        if node in memo:
            stack.pop()
            continue
        args = node.args
        missing = [arg for arg in args if arg not in memo]
        if missing:
            stack += missing
            continue
        stack.pop()
        args = tuple([memo[arg] for arg in args])
        new = change(node, args)
        if new is None:
            new = node if args == node.args else make(node.op, node.dtype, args, node.attr)
        memo[node] = new
    return memo[root]


def phase_exprs(phase: Phase) -> Iterator[Expr]:
    """All Exprs of a phase: accumulators' values, then each store's value and index."""
    for reduce in phase.reduces:
        yield reduce.value
    for store in phase.stores:
        yield store.value
        yield from store.index


def nest_exprs(nest: Nest) -> Iterator[Expr]:
    for phase in nest.phases:
        yield from phase_exprs(phase)


def loads(exprs: Iterable[Expr]) -> list[Expr]:
    """Distinct loads, plain and masked, those in the indices of others included."""
    found: list[Expr] = []
    seen: set[Expr] = set()
    stack = list(exprs)
    stack.reverse()
    while stack:
        node = stack.pop()
        if node.args:
            if node in seen:
                continue
            seen.add(node)
            stack.extend(node.args[::-1])
            if node.op == "load" or node.op == "masked":
                found.append(node)
        elif node.op == "load" and node not in seen:    # of a buffer without dimensions
            seen.add(node)
            found.append(node)
    return found


def load_index(load: Expr) -> tuple[Expr, ...]:
    return load.args if load.op == "load" else load.args[2:]


def stores(nest: Nest) -> Iterator[Store]:
    for phase in nest.phases:
        yield from phase.stores


def extern_views(extern: Extern) -> list[View]:
    """The Views among the arguments of a library call, however nested."""
    found: list[View] = []
    _collect_views((*extern.args, *extern.kwargs.values()), found)
    return found


def _collect_views(value: Any, found: list[View]) -> None:
    if isinstance(value, View):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect_views(item, found)


def reads(step: Nest | Extern) -> tuple[str, ...]:
    """Buffers whose contents the step may read.  A store that adds reads too."""
    if isinstance(step, Extern):
        return tuple(dict.fromkeys(view.buffer for view in extern_views(step)))
    names = dict.fromkeys(node.attr for node in loads(nest_exprs(step)))
    names.update(dict.fromkeys(store.buffer for store in stores(step) if store.mode == "add"))
    return tuple(names)


def writes(step: Nest | Extern) -> tuple[str, ...]:
    if isinstance(step, Extern):
        return tuple(dict.fromkeys((*(name for name in step.outputs if name is not None), *step.mutates)))
    return tuple(dict.fromkeys(store.buffer for store in stores(step)))


def bound_symbols(step: Nest | Extern, buffers: Mapping[str, Buffer]) -> tuple[str, ...]:
    """Symbols whose values a library call gives: those read off its results, and results that are numbers themselves."""
    if not isinstance(step, Extern):
        return ()
    return (*[bind[0] for bind in step.binds], *[name for name in step.outputs if name is not None and name not in buffers])


def step_symbols(step: Nest | Extern, buffers: Mapping[str, Buffer]) -> tuple[str, ...]:
    """Symbols whose values must be known before the step runs."""
    if isinstance(step, Extern):
        values = _numbers((*step.args, *step.kwargs.values()))
        touched = [name for name in step.outputs if name is not None and name in buffers] if step.out else []
    else:
        axes = [*step.axes, *(axis for phase in step.phases for axis in phase.axes)]
        values = [*(axis.extent for axis in axes), *nest_exprs(step)]
        touched = [name for name in (*reads(step), *writes(step)) if name in buffers]
    for name in touched:
        values += [*buffers[name].shape, *buffers[name].strides]
    return symbols(values)


def _numbers(value: Any) -> list[Any]:
    """All sizes and numbers among the arguments of a library call."""
    if isinstance(value, View):
        return [*value.shape, *value.strides, value.offset]
    if isinstance(value, (tuple, list)):
        return [number for item in value for number in _numbers(item)]
    return [value]


def output_buffers(program: Program) -> set[str]:
    """Buffers that outlive the call: those that an output is a View of."""
    return {view.buffer for view in program.outputs if isinstance(view, View)}


def symbols(values: Iterable[Any]) -> tuple[str, ...]:
    """Names of the symbols in Exprs (plain numbers have none), in order of appearance."""
    roots = [value for value in values if isinstance(value, Expr)]
    return tuple(dict.fromkeys(node.attr for node in walk(*roots) if node.op == "symbol"))
