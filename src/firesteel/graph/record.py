"""How each kind of operator is recorded: pure, view, in place, out=, and those with a way of their own.

Each function here is a `OperatorHandler` (`abstract.py`): it gets the world, the operator's facts and its arguments, appends nodes, and returns the
operator's result.  `KINDS` has a row for every kind of operator, `RECORDERS` one for every operator that needs its own.
"""
from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from firesteel.graph.abstract import (
    HANDLERS,
    AbstractTensor,
    OperatorHandler,
    bits_of_view,
    call_rule,
    check_written,
    number_as_tensor,
    reshaped_spec,
    returned,
    set_spec,
    to_spec,
    zero_tangent,
)
from firesteel.graph.autofunctional import functional_form
from firesteel.graph.decomp import in_format_of
from firesteel.graph.functional import SCATTERED, Alias, MadeBy, Unfollowable, ViewStep, parts, show, spec_of_node, viewable
from firesteel.graph.reshape import infer_size, view_strides
from firesteel.graph.rules.base import RULES
from firesteel.graph.schemas import HIDDEN_WRITES, Facts, facts
from firesteel.graph.sizes import less, same, unknown
from firesteel.graph.spec import Spec, contiguous_strides, differ_idly, is_dense, repeats
from firesteel.graph.storage import reach, within_storage
from firesteel.graph.tensor import tensors_in
from firesteel.sym.expr import Size
from firesteel.sym.symint import SYMBOLIC, from_sym, to_symint
from firesteel.table import Table

if TYPE_CHECKING:       # trace.py imports this file
    from firesteel.graph.trace import TraceWorld

aten = torch.ops.aten


def _record_pure(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    return world.record_pure(fact, args, kwargs)


# ---------------------------------------------------------------- kinds of operators

def record_decomposition(decomposition: Callable, world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    # nobody sees which way a decomposition goes
    with world._mode, (world.env.in_general() if world.env is not None else nullcontext()):
        result = decomposition(*args, **kwargs)
    if result is NotImplemented:
        return world._plain_way(fact)(world, fact, args, kwargs)
    return _with_eager_strides(world, fact, args, kwargs, result)


def _with_eager_strides(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict, result: Any) -> Any:
    """What a decomposition gave, with the strides that eager's results have in dimensions of size 1 or where they are empty, by the operator's rule:
    no element depends on them, but the caller sees them, and pointwise operators follow them."""
    results = [result] if type(result) is AbstractTensor else result if isinstance(result, (list, tuple)) else ()
    if fact.rule is None or not any(type(r) is AbstractTensor and (1 in r.spec.shape or 0 in r.spec.shape) for r in results):
        return result
    specs = call_rule(fact, args, kwargs)
    given = {t.record.cell for t in tensors_in((args, kwargs)) if t.record is not None}
    made = [_restrided(world, one, spec, given) for one, spec in zip(results, [specs] if type(specs) is Spec else specs)]
    return made[0] if type(result) is AbstractTensor else type(result)(made)


def _restrided(world: TraceWorld, made: Any, wanted: Any, given: set) -> Any:
    if type(made) is not AbstractTensor or type(wanted) is not Spec or made.record.steps or made.record.cell in given \
            or not differ_idly(made.spec, wanted, world.env):
        return made
    shown = world.make(made.spec._replace(strides=wanted.strides))
    shown.record, shown.bits = made.record, made.bits
    shown.record.cell.spec = shown.spec
    return shown


def record_composite(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    with world._mode:
        return fact.op.decompose(*args, **kwargs)


def _record_view(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    base = args[0]
    if type(base) is not AbstractTensor:
        return world.record_pure(fact, args, kwargs)
    base.value = None
    specs = call_rule(fact, args, kwargs)
    if type(specs) is list:
        return _record_parts(world, fact, args, kwargs, specs)
    result = world.make(specs)
    result.bits = bits_of_view(world, fact, base)
    place = base.record
    rest = tuple(_plain(a) for a in args[1:])
    plain = {k: _plain(v) for k, v in kwargs.items()}
    via = MadeBy(place, fact.op, rest, plain, None, torch.is_grad_enabled())
    world.leaves_made += not via.recorded and base.requires_grad
    if fact.empty:
        result.record = Alias(place.cell, place.steps, place.node, place.version, via)
        return result
    node = world.to_node(base)
    if spec_of_node(node) != base.spec:
        node = viewable(node, fact.op, rest, world.emit)
    if fact.op is aten.as_strided.default:
        result.record = _place_strided(world, place, specs)
        result.record.via = via
        return result
    op = SOLID.get(fact.op, fact.op)
    # a copy has its own layout
    shown = _as_in_graph(world, fact, [result], args, kwargs, node)[0] if op is fact.op else world.make(call_rule(facts(op), (node.meta["val"],), {}))
    view = world.node(op, (node, *(world.to_node(a) for a in rest)), {k: world.to_node(v) for k, v in plain.items()}, shown)
    result.record = Alias(place.cell, (*place.steps, ViewStep(op, rest, plain, base.spec)), view, place.version, via)
    return result


def _as_in_graph(world: TraceWorld, fact: Facts, views: list[AbstractTensor], args: tuple, kwargs: dict, node: Any) -> list[AbstractTensor]:
    """The views as the graph has them: a value that replaced an input's content begins at another place of its storage than the input
    does, and one that was computed where eager sets a bit has strides of its own."""
    if spec_of_node(node) == args[0].spec and not any(view.bits for view in views):
        return views
    specs = call_rule(fact, (node.meta["val"], *args[1:]), kwargs)
    return [world.make(spec) for spec in (specs if type(specs) is list else [specs])]


def laid_as_eager(world: TraceWorld, args: tuple) -> tuple:
    """The arguments of a draw, which fills memory in the order of its argument's strides: copies where the graph has another layout than eager."""
    return tuple([world.record_pure(facts(aten.clone.default), (arg,), {}) if _is_relaid(arg, world) else arg for arg in args])


def _is_relaid(arg: Any, world: TraceWorld) -> bool:
    return type(arg) is AbstractTensor and spec_of_node(world.to_node(arg)).strides != arg.spec.strides


def mark_layout(node: Node, args: Sequence[Any], nodes: Sequence[Any]) -> None:
    """Marks for the verifier where the graph has an argument in another layout than eager: one that was computed where eager sets a bit, or that
    replaced an input's content.  The rule was asked with eager's."""
    for arg, given in zip(args, nodes):
        if isinstance(arg, (list, tuple)):
            mark_layout(node, arg, given)
        elif type(arg) is AbstractTensor and spec_of_node(given).strides != arg.spec.strides:
            node.meta["relaid"] = True


# Views that only set a bit are recorded as what they mean.
SOLID = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}


def _plain(value: Any) -> Any:
    if type(value) in SYMBOLIC:
        return from_sym(value)
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _place_strided(world: TraceWorld, place: Alias, spec: Spec) -> Alias:
    """as_strided looks at the whole storage, whatever view it is called on."""
    within_storage([place.cell.spec], spec.dtype, spec.shape, spec.strides, spec.offset)
    fresh = Alias(place.cell, strided_steps(place, spec), place.node, -1)
    show(fresh, world.emit)
    return fresh


def strided_steps(place: Alias, spec: Spec) -> tuple[ViewStep, ...]:
    """From the whole storage to a view of this Spec: what the steps of a place mean but for where they look, which is the dtype in which
    the storage is read, and the bits that are set."""
    base, steps = place.cell.spec, []

    def view(op: Any, *args: Any) -> None:
        nonlocal base
        steps.append(ViewStep(op, args, {}, base))
        base = RULES[op](base, *args)
    shape, strides, offset = list(spec.shape), list(spec.strides), spec.offset
    wider = spec.dtype.itemsize // base.dtype.itemsize
    if REAL_PARTS.get(base.dtype) is spec.dtype:
        view(aten.view_as_real.default)
    elif not wider:
        view(aten.as_strided.default, [reach(base.shape, base.strides, 0)], [1], base.offset)
        view(aten.view.dtype, spec.dtype)
    if wider > 1:       # an element is a row of those of the storage
        shape, strides, offset = [*shape, wider], [*(s * wider for s in strides), 1], offset * wider
    view(aten.as_strided.default, shape, strides, offset)
    if REAL_PARTS.get(spec.dtype) is base.dtype:
        view(aten.view_as_complex.default)
    elif base.dtype is not spec.dtype:
        view(aten.view.dtype, spec.dtype)
        if wider > 1:
            view(aten.squeeze.dim, -1)
    for op in SOLID.values():
        if sum(step.op is op and step.before.dtype is spec.dtype for step in place.steps) % 2:
            steps.append(ViewStep(op, (), {}, spec))
    return tuple(steps)


REAL_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}


def _record_parts(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict, specs: list[Spec]) -> list[AbstractTensor]:
    base = args[0]
    results = [world.make(s) for s in specs]
    for result in results:
        result.bits = bits_of_view(world, fact, base)
    place = base.record
    whole = world.to_node(base)
    shown = _as_in_graph(world, fact, results, args, kwargs, whole)
    node = world.node(fact.op, (whole, *(world.to_node(a) for a in args[1:])), {k: world.to_node(v) for k, v in kwargs.items()}, shown)
    plain_args, plain_kwargs = tuple(_plain(a) for a in args[1:]), {k: _plain(v) for k, v in kwargs.items()}
    steps = parts(fact.op, base.spec, plain_args, plain_kwargs, specs)
    for i, (result, (op, rest)) in enumerate(zip(results, steps)):
        item = world.node(operator.getitem, (node, i), {}, shown[i])
        via = MadeBy(place, fact.op, plain_args, plain_kwargs, i, torch.is_grad_enabled())
        world.leaves_made += not via.recorded and base.requires_grad
        result.record = Alias(place.cell, (*place.steps, ViewStep(op, rest, {}, base.spec)), item, place.version, via)
    return results


def _record_inplace(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    if fact.twin is None:
        raise NotImplementedError(f"{fact.op} writes its argument and has no functional twin")
    _check_overlaps(fact, args[0], (args[1:], kwargs))
    if fact.twin in world.decompositions:
        return _record_decomposed(world, fact, args, kwargs)
    twin = facts(fact.twin)
    values = call_rule(twin, args, kwargs)
    target = args[fact.writes[0]]       # type: ignore[index]  # a name only where the kind is "out"
    check_written(target, values)
    _check_own_overlap(fact, target)
    nodes = tuple(world.to_node(a) for a in args)
    if fact.random and _is_relaid(target, world):       # what is drawn depends on the layout alone
        shape, strides = list(target.spec.shape), list(target.spec.strides)
        nodes = (world.emit(aten.empty_strided.default, shape, strides, dtype=target.spec.dtype, device=target.spec.device), *nodes[1:])
    node_kwargs = {k: world.to_node(v) for k, v in kwargs.items()}
    result = world.from_specs(values)
    node = world.node(twin.op, nodes, node_kwargs, result)
    if world.verifies:
        mark_layout(node, args, nodes)
    if type(values) is Spec:
        world.assign(target, node)
    else:
        _assign_all(world, fact, args, node, result)
    return returned(fact, args, kwargs)


def _record_decomposed(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """An in-place operator whose twin has a decomposition: that is run, and its results are written."""
    with world._mode:
        results = fact.twin(*args, **kwargs)        # type: ignore[misc]  # the caller has seen that it has one
    written: Any = [args[p] for p in fact.writes]       # type: ignore[index]  # places, as above
    if len(written) == 1 and isinstance(written[0], (list, tuple)):
        written = written[0]
    for target, result in zip(written, results if isinstance(results, (list, tuple)) else [results]):
        for one, new in zip(target, result) if isinstance(target, (list, tuple)) else ((target, result),):
            check_written(one, new.spec)
            world.assign(one, world.to_node(new))
    return returned(fact, args, kwargs)


def _assign_all(world: TraceWorld, fact: Facts, args: tuple, node: Node, results: Any) -> None:
    """Writes the results of a twin that gives several: a list for one written list, or one result a written argument."""
    written = [args[p] for p in fact.writes]        # type: ignore[index]  # places, as above
    items: list[Any] = world._unpack(node, results)
    if len(written) == 1:
        for target, item in zip(written[0], items):
            world.assign(target, item)
        return
    for target, item, result in zip(written, items, results):
        if isinstance(result, (list, tuple)):
            for t, value in zip(target, result):
                world.assign(t, world.to_node(value))
        else:
            world.assign(target, item)


def _record_update(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """Fresh results, and arguments written beside: the functional form gives both, the results first."""
    if fact.twin is None:
        raise NotImplementedError(f"{fact.op} writes its arguments and has no functional form")
    schema = fact.op._schema
    given = {**dict(zip([a.name for a in schema.arguments], args)), **kwargs}
    names = [schema.arguments[p].name if isinstance(p, int) else p for p in fact.writes]
    written = {name: given.get(name) for name in names}
    absent = frozenset(name for name, target in written.items() if target is None)
    twin = functional_form(fact.op, absent) if absent and fact.op.namespace != "aten" else fact.twin
    with world._mode:
        results = twin(*args, **kwargs)
    targets = [target for target in written.values() if target is not None]
    fresh = sum(1 for r in schema.returns if r.alias_info is None)
    results = (results,) if fresh + len(targets) == 1 else results or ()
    for target, value in zip(targets, results[fresh:]):
        for one, new in zip(target, value) if isinstance(target, (list, tuple)) else ((target, value),):
            world.assign(one, world.to_node(new))
    return _returned(schema, written, results[:fresh])


def _returned(schema: Any, written: dict[str, Any], fresh: Sequence[Any]) -> Any:
    """Fresh results and written arguments, in the order of the schema's returns."""
    rest, kept = iter(fresh), iter(written.values())
    out = tuple(next(rest) if r.alias_info is None else next(kept) for r in schema.returns)
    return None if not out else out[0] if len(out) == 1 else out


def _record_out(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    if fact.twin is None:
        raise NotImplementedError(f"{fact.op} has no functional twin")
    rest = {k: v for k, v in kwargs.items() if k not in fact.writes}
    with world._mode:
        results = fact.twin(*args, **rest)
    results = results if isinstance(results, (list, tuple)) else (results,)
    for place, result in zip(fact.writes, results):
        _check_overlaps(fact, kwargs[place], (args, rest))
        _check_out(fact, kwargs[place].spec, result.spec)
        _assign_out(world, kwargs[place], result)
    return returned(fact, args, kwargs)


# Operators whose out= tensor must have the result's own dtype; others convert.
EXACT_OUT = frozenset({aten.gather.default, aten.aminmax.default, aten.amax.default, aten.amin.default, aten.complex.default,
                       aten.multinomial.default})


def _check_out(fact: Facts, out: Spec, result: Spec) -> None:
    if fact.twin in EXACT_OUT and out.dtype is not result.dtype:
        raise RuntimeError(f"Expected out tensor to have dtype {result.dtype}, but got {out.dtype} instead")


def _assign_out(world: TraceWorld, out: AbstractTensor, result: AbstractTensor) -> None:
    if len(out.spec.shape) != len(result.spec.shape) or not all(map(same, out.spec.shape, result.spec.shape)):
        if out.record.steps:
            raise Unfollowable("reshaped_inputs", "out= is a view, which is resized")
        _keep_value(world, out, out.spec)
        set_spec(out, result.spec._replace(dtype=out.spec.dtype))
        cell = out.record.cell
        cell.spec, out.record.steps = out.spec, ()      # the old content is gone
    world.assign(out, world.to_node(result))


def _record_reshape(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """An operator that changes the metadata of its argument: the tensor moves to another place."""
    target = args[0]
    spec = reshaped_spec(fact, args, kwargs)
    before, place, target.value = target.spec, target.record, None
    _keep_value(world, target, before)
    if fact.op is aten.set_.source_Tensor:
        source = args[1].record
        target.record = Alias(source.cell, source.steps, source.node, source.version)
    elif fact.op in (aten.resize_.default, aten.resize_as_.default):
        if not same(spec.numel(), before.numel()):
            raise Unfollowable("reshaped_inputs", "resize_ to another number of elements")
        if spec != before:
            target.record = _place_strided(world, place, spec)
    elif fact.twin is not None:
        rest = tuple(_plain(a) for a in args[1:])
        step = ViewStep(fact.twin, rest, {k: _plain(v) for k, v in kwargs.items()}, before)
        target.record = Alias(place.cell, (*place.steps, step), place.node, -1)
        if fact.twin is aten.as_strided.default:
            target.record = _place_strided(world, place, spec)
    if spec != before:
        set_spec(target, spec)
    return target


def _keep_value(world: TraceWorld, target: AbstractTensor, spec: Spec) -> None:
    """The node that has the tensor itself as its value gets another one, which keeps the metadata that it has."""
    if target.born is not None:
        target.born.meta["val"] = world.make(spec)
        target.born = None


KINDS: dict[str, OperatorHandler] = {
    "pure": _record_pure, "view": _record_view, "inplace": _record_inplace, "update": _record_update, "out": _record_out,
    "reshape": _record_reshape}


# ---------------------------------------------------------------- operators with their own way of being recorded

RECORDERS: Table[OperatorHandler] = Table("recorder of an operator", "graph/record.py")


def _check_own_overlap(fact: Facts, target: Any) -> None:
    """Most operators refuse to write to a self-overlapping tensor, some write it in an order of their own: eager does either."""
    if type(target) is AbstractTensor and repeats(target.spec):
        raise Unfollowable("overlapping_writes", f"{fact.op} writes to a self-overlapping tensor")


# Operators that refuse to write to a tensor that an argument shares any element with.
REFUSING = frozenset({aten.index_put_.default, aten.index_add_.default, aten.index_copy_.default, aten.scatter_.src, aten.scatter_add_.default,
                      aten.scatter_.reduce, aten.scatter_reduce_.two})


# Operators that read what they have written where an argument shares the storage, in the order in which their kernel goes.
SEQUENTIAL = frozenset({aten.masked_scatter_.default})


def _check_overlaps(fact: Facts, target: Any, others: Any) -> None:
    if fact.op in SEQUENTIAL and any(type(t) is AbstractTensor and t.record.cell is target.record.cell for t in tensors_in(others)):
        raise Unfollowable("overlapping_writes", f"{fact.op} writes to what it reads")
    if type(target) is AbstractTensor and (torch.Tag.pointwise in fact.op.tags or fact.op in REFUSING):
        for other in tensors_in(others):
            _check_overlap(target, other, fact.op in REFUSING)


def _check_overlap(target: AbstractTensor, source: Any, refusing: bool = False) -> None:
    """Eager refuses to compute a dense view, element by element, from another of its storage that shares elements in another order or only in part;
    `REFUSING` refuses one that shares any."""
    if type(source) is not AbstractTensor or source is target and not refusing or source.record.cell is not target.record.cell:
        return
    a, b = target.spec, source.spec
    if a == b and not refusing or not (is_dense(a) and is_dense(b)):
        return
    starts, ends = [s.offset * s.dtype.itemsize for s in (a, b)], [(s.offset + s.numel()) * s.dtype.itemsize for s in (a, b)]
    if unknown(*starts, *ends) or not all(less(start, end) for start in starts for end in ends):
        return
    if refusing or a.strides != b.strides or not same(*starts) or not same(*ends):
        raise RuntimeError("unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
                           "Please clone() the tensor before performing the operation.")


WRITES_VIEW = "torch::autograd::CopySlices"     # the name of the node that a write through a view leaves in the history of its base


@RECORDERS.row(aten.as_strided.default)
def _record_strided(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    if len(args) == 4 and args[3] is not None and (shift := _offset_of_replayed(world)) != 0:
        args = (*args[:3], args[3] - to_symint(shift, world.env))
    return _record_view(world, fact, args, kwargs)


def _offset_of_replayed(world: TraceWorld) -> Size:
    """Where torch's backward of a write through a view replays that view, on a fresh gradient that begins at 0: the offset of the input that was
    written, which the view counted in."""
    node: Any = torch._C._current_autograd_node()
    if node is None or node.name() != WRITES_VIEW or not world.taken:
        return 0
    for tensor in world.taken:
        write: Any = (tensor if tensor._base is None else tensor._base).grad_fn
        while write is not None and write.name() == WRITES_VIEW:
            if write._sequence_nr() == node._sequence_nr():
                return tensor.spec.offset
            write = write.next_functions[0][0]
    raise Unfollowable("strided_writes", "a write through as_strided is differentiated, and an input begins inside of its storage")


@RECORDERS.row(aten.copy_.default, aten.fill_.Tensor)
def _record_copy(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """The new value is the source, expanded and converted; it does not depend on the old one."""
    target, source = args[:2]
    if type(source) is AbstractTensor and source.record.cell is target.record.cell and source.spec == target.spec:
        return target       # the same memory
    _check_own_overlap(fact, target)
    _check_overlap(target, source)
    node = world.to_node(source)
    have, want = spec_of_node(node), target.spec
    if len(have.shape) != len(want.shape) or not all(map(same, have.shape, want.shape)):
        node = world.emit(aten.expand.default, node, list(want.shape))
    convert = {}
    if have.dtype is not want.dtype:
        convert["dtype"] = want.dtype
    if have.device != want.device:
        convert["device"] = want.device
    if convert:
        node = world.emit(aten._to_copy.default, node, **convert)
    elif not any(step.op in SCATTERED for step in target.record.steps):       # else the new value would be the source's memory
        node = world.emit(aten.clone.default, node)
    world.assign(target, node)
    return target


@RECORDERS.row(aten.fill_.Scalar, aten.zero_.default)
def _record_fill(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    target = args[0]
    _check_own_overlap(fact, target)
    value = args[1] if len(args) > 1 else 0
    spec = target.spec
    world.assign(target, world.emit(aten.full.default, list(spec.shape), _plain(value), dtype=spec.dtype, device=spec.device))
    return target


RECORDERS.row(aten.resize_as_.default)(
    lambda world, fact, args, kwargs: _record_reshape(world, facts(aten.resize_.default), (args[0], list(to_spec(args[1]).shape)), {}))


@RECORDERS.row(aten.bernoulli_.float)
def _record_bernoulli(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """Dispatch leaves out arguments that equal their defaults; the functional twin has no default for p.  The twin draws in the order of
    a contiguous result: for other layouts, where eager draws in another order, the operator itself works on a copy."""
    spec = to_spec(args[0])
    if spec.strides != contiguous_strides(spec.shape):
        fact = dataclasses.replace(fact, twin=functional_form(fact.op))
    return _record_inplace(world, fact, args if len(args) > 1 else (args[0], 0.5), kwargs)


@RECORDERS.row(aten.polygamma_.default)
def _record_polygamma(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """The functional twin takes the same arguments in another order."""
    target, order = args
    node = world.emit(aten.polygamma.default, order, world.to_node(target))
    check_written(target, spec_of_node(node))
    world.assign(target, node)
    return target


RECORDERS.add(aten._efficientzerotensor.default, zero_tangent(_record_pure))


@RECORDERS.row(aten.lift_fresh.default)
def _record_lift(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """A literal such as torch.tensor(3): a constant, copied so that writing it does not change the next call's."""
    if type(args[0]) is AbstractTensor:
        return _record_view(world, fact, args, kwargs)
    result = world.record_pure(facts(aten.lift_fresh_copy.default), args, kwargs)
    result.value = args[0]
    return result


@RECORDERS.row(aten.reshape.default)
def _record_reshaped(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """Decompositions call it.  Which it is, a view or a copy, decides what a write to the result reaches."""
    x, shape = args
    if view_strides(to_spec(x), infer_size(_plain(shape), to_spec(x).numel())) is None:
        return world.record_pure(fact, args, kwargs)
    return _record_view(world, facts(aten.view.default), args, kwargs)


@RECORDERS.row(aten._to_copy.default)
def _record_convert(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    return world.record_pure(fact, args, kwargs) if isinstance(args[0], torch.Tensor) else number_as_tensor(world, args[0], kwargs)


@RECORDERS.row(aten._local_scalar_dense.default)
def _record_number(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """A number read from data: the node that reads it gives the symbol."""
    number = HANDLERS[fact.op](world, fact, args, kwargs)
    if type(number) in SYMBOLIC:
        world.node(fact.op, (world.to_node(args[0]),), {}, number)
    return number


@RECORDERS.row(aten._assert_scalar.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)
def _record_condition(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> None:
    """The environment learns it; what it cannot know becomes a check."""
    HANDLERS[fact.op](world, fact, args, kwargs)
    world._check()


@RECORDERS.row(*HIDDEN_WRITES)
def _record_batch_norm(world: TraceWorld, fact: Facts, args: tuple, kwargs: dict) -> Any:
    """Batch normalisation updates its running statistics without saying so: recorded as the functional form that returns them."""
    x, weight, bias, mean, var, training, momentum, eps = args[:8]
    if mean is None or not training:
        return world.record_pure(fact, args, kwargs)
    with world._mode:
        if fact.op is aten.cudnn_batch_norm.default:
            x = in_format_of(x, x)
        out, save_mean, save_invstd, new_mean, new_var = aten._native_batch_norm_legit_functional.default(
            x, weight, bias, mean, var, training, momentum, eps)
        reserve = (aten.new_empty.default(x, (0,), dtype=torch.uint8),) if len(fact.op._schema.returns) == 4 else ()
    world.assign(mean, world.to_node(new_mean))
    world.assign(var, world.to_node(new_var))
    return (out, save_mean, save_invstd, *reserve)
