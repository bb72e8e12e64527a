"""The verifier of the loop IR: every rule of `loops/ir.py` that can be seen without running.

In: a Program (or one Nest with its buffers).  Out: nothing, or an InternalError that names the rule and prints the offender.
dtypes are derived again from the rows of `OPS`, never trusted.  Cost: linear in the number of different nodes.

    verify_program(program)
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from firesteel.errors import InternalError
from firesteel.loops.ir import Buffer, Extern, Nest, Phase, Program, ProgramStep, Store, View, idle_axes, names_by_data
from firesteel.loops.scalars import LOOP_DTYPES, OPS, REDUCE_OPS, result_dtype
from firesteel.sym.expr import Expr, postorder

HERE_ONLY = frozenset({"axis", "load", "masked", "acc", "check_index"})


def verify_program(program: Program) -> None:
    """Checks all steps in order, then the outputs."""
    # symbols that run time can know: read from inputs, or given by a library call
    known = set(program.symbols).union(*[step.bound_symbols(program.buffers) for step in program.steps])
    written = {name for name, buffer in program.buffers.items() if buffer.kind in ("input", "constant")}
    for name, buffer in program.buffers.items():
        _verify_buffer(name, buffer)
    for step in program.steps:
        written |= VERIFIERS[type(step)](step, program.buffers, written, known)
    for output in program.outputs:
        _verify_argument(output, "an output", program.buffers, written)
    for given in program.inputs:
        _require(given is None or given in program.buffers or given in program.symbols, "an input is a buffer or a symbol", given)


def _require(holds: bool, rule: str, *shown: Any) -> None:
    if not holds:
        raise InternalError(f"loop IR: {rule}: " + ", ".join(map(repr, shown)))


# ---------------------------------------------------------------- buffers and library calls

def _verify_buffer(name: str, buffer: Buffer) -> None:
    _require(name == buffer.name, "a buffer stands under its own name", name, buffer)
    _require(len(buffer.shape) == len(buffer.strides), "a buffer has a stride for each dimension", buffer)
    _require(buffer.kind in ("input", "constant") or buffer.offset == 0, "only inputs and constants have an offset", buffer)
    for size in (*buffer.shape, *buffer.strides, buffer.offset):
        _verify_size(size, buffer)


def _verify_size(size: Any, where: Any, known: set[str] | None = None) -> None:
    if type(size) is int:
        return
    _require(isinstance(size, Expr) and size.dtype == "i64", "a size is an int or an integer Expr", size, where)
    for node in postorder(size):
        _require(node.op not in HERE_ONLY, "a size holds no axis, load or accumulator", size, where)
        if known is not None and node.op == "symbol":
            _require(node.attr in known, "a symbol is read from an input", node.attr, where)


def _verify_extern(step: Extern, buffers: Mapping[str, Buffer], written: set[str], known: set[str]) -> set[str]:
    for argument in (*step.args, *step.kwargs.values()):
        _verify_argument(argument, step.name, buffers, written)
    for name in step.mutates:
        _require(name in written, "a call mutates a buffer that exists", name, step.name)
    return {name for name in step.outputs if name is not None and name in buffers}


def _verify_argument(value: Any, where: str, buffers: Mapping[str, Buffer], written: set[str]) -> None:
    if isinstance(value, (list, tuple)):
        for v in value:
            _verify_argument(v, where, buffers, written)
    elif isinstance(value, View):
        _require(value.buffer in buffers, "a view is of a buffer", value, where)
        _require(value.buffer in written, "a buffer is written before it is read", value, where)
        _require(len(value.shape) == len(value.strides), "a view has a stride for each dimension", value, where)
        for size in (*value.shape, *value.strides, value.offset):
            _verify_size(size, where)
        _require(_is_inside(value, buffers[value.buffer]), "a view is inside of its buffer", value, where)


def _is_inside(view: View, buffer: Buffer) -> bool:
    """Judged where all sizes are numbers; inputs and constants are windows on storages that may be larger."""
    if buffer.kind in ("input", "constant") or view.dtype != buffer.dtype:
        return True
    last, end = _reach(view.shape, view.strides, view.offset), _reach(buffer.shape, buffer.strides, 0)
    return last is None or end is None or last <= end


def _reach(shape: Sequence[Any], strides: Sequence[Any], offset: Any) -> int | None:
    """Storage offset of the last element, from the start; -1 for none, None where symbols decide."""
    if 0 in shape:
        return -1
    if not all(type(n) is int for n in (*shape, *strides, offset)):
        return None
    return offset + sum((n - 1) * s for n, s in zip(shape, strides))


# ---------------------------------------------------------------- nests

def verify_nest(nest: Nest, buffers: Mapping[str, Buffer], written: Iterable[str] | None = None, symbols: set[str] | None = None) -> set[str]:
    """Checks one nest; `written` are the buffers that hold data by then (None: all).  Returns those it writes."""
    have = set(buffers if written is None else written)
    outer, inner = [a.name for a in nest.axes], [a.name for p in nest.phases for a in p.axes]
    _require(bool(nest.phases), "a nest has a phase", nest.name)
    _require(len(set(outer + inner)) == len(outer + inner), "axis names are unique in a nest", nest.name, outer + inner)
    for axis in (*nest.axes, *(a for p in nest.phases for a in p.axes)):
        _verify_size(axis.extent, nest.name, symbols)
    seen = Seen(nest, buffers, symbols)
    stored: set[str] = set()
    for phase in nest.phases:
        _verify_phase(nest, phase, seen, have | stored)
        stored |= {store.buffer for store in phase.stores}
    return stored


class Seen:
    """What the nest's Exprs may refer to.  A node already found right in the same scope is not checked again."""

    def __init__(self, nest: Nest, buffers: Mapping[str, Buffer], symbols: set[str] | None):
        self.nest, self.buffers, self.symbols = nest, buffers, symbols
        self.accumulators: dict[str, str] = {}      # name -> dtype, of earlier phases


def _verify_phase(nest: Nest, phase: Phase, seen: Seen, readable: set[str]) -> None:
    _require(phase.kind in ("map", "reduce", "scan"), "a phase is map, reduce or scan", nest.name, phase.kind)
    _require(phase.kind != "map" or not phase.reduces, "a map phase has no accumulators", nest.name)
    _require(phase.kind != "scan" or len(phase.axes) == 1, "a scan has one axis", nest.name, phase.axes)
    axes = {a.name for a in (*nest.axes, *phase.axes)}
    names = [r.name for r in phase.reduces]
    _require(len(set(names)) == len(names), "accumulators have different names", nest.name, names)
    for reduce in phase.reduces:
        _require(reduce.op in REDUCE_OPS, "an accumulator has a row in REDUCE_OPS", nest.name, reduce.op)
        _require(reduce.name not in seen.accumulators, "accumulators have different names", nest.name, reduce.name)
        _require(reduce.value.dtype == reduce.dtype, "an accumulator takes values of its own dtype", nest.name, reduce)
        verify_body(reduce.value, seen, axes, readable)
    if phase.kind == "scan":
        seen.accumulators.update({r.name: r.dtype for r in phase.reduces})
    for store in phase.stores:
        _verify_store(nest, phase, store, seen, axes, readable)
    seen.accumulators.update({r.name: r.dtype for r in phase.reduces})


def _verify_store(nest: Nest, phase: Phase, store: Store, seen: Seen, axes: set[str], readable: set[str]) -> None:
    buffer = seen.buffers.get(store.buffer)
    _require(buffer is not None, "a store is into a buffer", nest.name, store)
    assert buffer is not None
    _require(buffer.kind != "constant", "constants are not written", nest.name, store)
    _require(len(store.index) == len(buffer.shape), "an index has an Expr for each dimension", nest.name, store, buffer)
    _require(store.value.dtype == buffer.dtype, "a store has the buffer's dtype", nest.name, store, buffer)
    _require(store.mode in ("set", "add"), "a store sets or adds", nest.name, store.mode)
    verify_body(store.value, seen, axes, readable)
    for index in store.index:
        _require(index.dtype == "i64", "an index is i64", nest.name, store)
        verify_body(index, seen, axes, readable)
    if store.mode == "set" and not names_by_data(store.index):
        idle = idle_axes(store.index, nest.axes + phase.axes)
        _require(not idle, "each element is set at most once, so every axis stands in the index", nest.name, store, idle)


def verify_body(body: Expr, seen: Seen, axes: set[str], readable: set[str]) -> None:
    """Every node: its leaf rule, or the dtype that its row derives."""
    name = seen.nest.name
    for node in postorder(body):
        check = LEAVES.get(node.op)
        if check is not None:
            check(node, seen, axes, readable)
        elif node.op == "const":
            _require(node.dtype in LOOP_DTYPES, "a constant has a loop dtype", name, node.dtype)
        elif node.op == "symbol":
            _require(seen.symbols is None or node.attr in seen.symbols, "a symbol is read from an input", name, node)
        else:
            _verify_operator(node, name)


def _verify_operator(node: Expr, name: str) -> None:
    _require(node.op == "to" or node.op in OPS, "an operator has a row in OPS", name, node.op)
    try:
        derived = result_dtype(node)
    except TypeError as error:
        raise InternalError(f"loop IR: {error} in {name}: {node!r}") from None
    _require(derived == node.dtype, "a node has the dtype that its row derives", name, node, derived, node.dtype)


# ---------------------------------------------------------------- the leaves

def _verify_axis(node: Expr, seen: Seen, axes: set[str], readable: set[str]) -> None:
    _require(node.attr in axes, "an axis is visible in its own phase, or is the nest's", seen.nest.name, node.attr)


def _verify_load(node: Expr, seen: Seen, axes: set[str], readable: set[str], skip: int = 0) -> None:
    buffer = seen.buffers.get(node.attr)
    _require(buffer is not None, "a load is from a buffer", seen.nest.name, node.attr)
    assert buffer is not None
    index = node.args[skip:]
    _require(buffer.dtype in LOOP_DTYPES and node.dtype == buffer.dtype, "a load has the buffer's dtype", seen.nest.name, node, buffer)
    _require(len(index) == len(buffer.shape), "an index has an Expr for each dimension", seen.nest.name, node, buffer)
    _require(all(i.dtype == "i64" for i in index), "an index is i64", seen.nest.name, node)
    _require(node.attr in readable, "a buffer is written before it is read", seen.nest.name, node.attr)


def _verify_masked(node: Expr, seen: Seen, axes: set[str], readable: set[str]) -> None:
    mask, other = node.args[:2]
    _require(mask.dtype == "bool" and other.dtype == node.dtype, "a masked load takes a bool and a value of its dtype", seen.nest.name, node)
    _verify_load(node, seen, axes, readable, skip=2)


def _verify_acc(node: Expr, seen: Seen, axes: set[str], readable: set[str]) -> None:
    dtype = seen.accumulators.get(node.attr)
    _require(dtype is not None, "an accumulator is read after its phase", seen.nest.name, node.attr)
    _require(dtype == node.dtype, "an accumulator is read in its dtype", seen.nest.name, node, dtype)


def _verify_check(node: Expr, seen: Seen, axes: set[str], readable: set[str]) -> None:
    _require([a.dtype for a in node.args] == ["i64", "i64"], "check_index takes two i64", seen.nest.name, node)
    _require(node.attr in (None, "strict"), "check_index is strict or not", seen.nest.name, node.attr)


LEAVES = {"axis": _verify_axis, "load": _verify_load, "masked": _verify_masked, "acc": _verify_acc, "check_index": _verify_check}


VERIFIERS: dict[type[ProgramStep], Callable[..., set[str]]] = {Nest: verify_nest, Extern: _verify_extern}
