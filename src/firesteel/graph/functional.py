"""Views and writes as values: how an in-place program becomes a functional one.

A `StorageValue` is a storage: the graph node that holds its present value.  A tensor's `Alias` says which cell it belongs to and by which
view steps it is seen.  A write computes the cell's new value: the written part is put back step by step, from the last view to
the first, by the rows of `PUT_BACK`; the cell's version rises, and every other view of it is replayed at its next use.

    v = x[1]; v.add_(1)          # Alias(cell of x, [select 0 1])
    # new value of the cell:  select_scatter(x, add(select(x, 0, 1), 1), 0, 1)
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from firesteel.graph.reshape import infer_size, view_strides
from firesteel.graph.rules.base import wrap_dim
from firesteel.graph.schemas import EMPTY_VIEWS
from firesteel.graph.sizes import less, same
from firesteel.graph.spec import Shape, Spec, contiguous_strides, is_dense, sort_dims
from firesteel.records import dataclass
from firesteel.sym.expr import Size
from firesteel.table import Table

aten = torch.ops.aten
Emit = Callable[..., Node]      # emit(op, *args, **kwargs): appends a node, its Spec found by rule


class Unfollowable(Exception):
    """A program that no trace can follow, although eager runs it."""

    def __init__(self, counter: str, reason: str):
        super().__init__(reason)
        self.counter = counter


class StorageValue:
    """A storage and its present value.  `source` is the number of the input it came from, None for what the program made."""

    __slots__ = ("node", "spec", "version", "source")

    def __init__(self, node: Node, spec: Spec, source: int | None = None):
        self.node, self.spec, self.version, self.source = node, spec, 0, source


class ViewStep(NamedTuple):
    """One view operator; `before` is the Spec it was applied to."""
    op: Any
    args: tuple
    kwargs: dict
    before: Spec


class MadeBy(NamedTuple):
    """How a tensor came out of another that it shares memory with: by which call, which of its results it is, and whether autograd was recording."""
    parent: Alias
    op: Any
    args: tuple
    kwargs: dict
    item: int | None
    recorded: bool


@dataclass(slots=True, eq=False)
class Alias:
    """The storage of a tensor.  `node` is its value as of the cell's `version`.  `via` is None for the result of an operator."""
    cell: StorageValue
    steps: tuple[ViewStep, ...]
    node: Node
    version: int
    via: MadeBy | None = None


def spec_of_node(node: Node) -> Spec:
    return node.meta["val"].spec


# ---------------------------------------------------------------- reading

def show(place: Alias, emit: Emit) -> Node:
    """The node of a tensor's present value; views of a cell that was written since are replayed."""
    if place.version != place.cell.version:
        node = place.cell.node
        if node.op == "call_function":
            _check_strides(place.cell, place.steps)
        for step in place.steps:
            node = apply(step, node, emit)
        place.node, place.version = node, place.cell.version
    return place.node


def apply(step: ViewStep, node: Node, emit: Emit) -> Node:
    if step.op is aten.as_strided.default:
        return emit(step.op, node, *_shifted(step, node))
    return emit(step.op, viewable(node, step.op, step.args, emit), *step.args, **step.kwargs)


def _check_strides(cell: StorageValue, steps: Sequence[ViewStep]) -> None:
    """A value holds the elements of its tensor, and so does what is written back to an input: memory before the first of them or between
    them, which strides may name, is known of an input alone, and only until that is written."""
    for step in steps:
        if step.op is aten.as_strided.default and (not is_dense(cell.spec) or less(step.args[2], step.before.offset)):
            raise Unfollowable("strided_writes", "a view by strides reaches outside of a tensor's elements, and one of the two is mutated")


RESHAPES = (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)


def viewable(node: Node, op: Any, args: tuple, emit: Emit) -> Node:
    """The node, or a copy where eager's layout allows a view that the graph's does not: eager sets a bit where the graph computes."""
    spec = spec_of_node(node)
    if op not in RESHAPES or view_strides(spec, infer_size(args[0], spec.numel())) is not None:
        return node
    return emit(aten.clone.default, node, memory_format=torch.contiguous_format)


def _shifted(step: ViewStep, node: Node) -> tuple:
    """as_strided counts from the storage's start, which differs between an input and the value that replaced it."""
    size, stride, offset = step.args
    return size, stride, offset - step.before.offset + spec_of_node(node).offset


# ---------------------------------------------------------------- writing

def write(place: Alias, value: Node, emit: Emit) -> None:
    """Makes `value` (of the tensor's shape and dtype) the new content of the tensor."""
    cell, steps = place.cell, place.steps
    if steps and steps[-1].op in EMPTY_VIEWS:
        steps = tuple(s for s in steps if s.op not in EMPTY_VIEWS)
    _check_strides(cell, steps)
    bases = [cell.node]
    for step in steps[:-1]:
        bases.append(apply(step, bases[-1], emit))
    whole = value
    for step, base in zip(reversed(steps), reversed(bases)):
        whole = PUT_BACK[step.op](emit, base, whole, step)
    cell.node = with_strides(whole, cell.spec, cell.node, emit)
    cell.version += 1
    if not steps:
        place.node, place.version = cell.node, cell.version


def with_strides(node: Node, wanted: Spec, old: Node, emit: Emit) -> Node:
    """The same value laid out as `wanted`, so that views recorded against it stay legal."""
    spec = spec_of_node(node)
    if spec.strides == wanted.strides or all(same(size, 1) or same(s, t) for size, s, t in zip(spec.shape, spec.strides, wanted.strides)):
        return node
    if wanted.strides == contiguous_strides(wanted.shape):
        return emit(aten.clone.default, node, memory_format=torch.contiguous_format)
    if is_dense(wanted):
        order = list(reversed(sort_dims(list(range(len(wanted.shape) - 1, -1, -1)), wanted.strides)))
        inverse = [order.index(d) for d in range(len(order))]
        permuted = emit(aten.permute.default, node, order)
        return emit(aten.permute.default, emit(aten.clone.default, permuted, memory_format=torch.contiguous_format), inverse)
    return emit(aten.copy.default, old, node)


def reshape(node: Node, shape: Shape, emit: Emit) -> Node:
    """`node` with another shape, copied only where its strides ask for it."""
    spec = spec_of_node(node)
    if spec.shape == shape:
        return node
    if view_strides(spec, shape) is None:
        node = emit(aten.clone.default, node, memory_format=torch.contiguous_format)
    return emit(aten.view.default, node, list(shape))


# ---------------------------------------------------------------- putting back

PUT_BACK: Table[Callable[[Emit, Node, Node, ViewStep], Node]] = Table("way to write through a view", "graph/functional.py")
PUT_BACK.row(*EMPTY_VIEWS)(lambda emit, base, value, step: value)


PUT_BACK.row(*RESHAPES, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)(
    lambda emit, base, value, step: reshape(value, step.before.shape, emit))


@PUT_BACK.row(aten.permute.default)
def _permuted(emit: Emit, base: Node, value: Node, step: ViewStep) -> Node:
    dims = [wrap_dim(d, len(step.before.shape)) for d in step.args[0]]
    return emit(aten.permute.default, value, [dims.index(d) for d in range(len(dims))])


PUT_BACK.row(aten.transpose.int, aten.t.default)(lambda emit, base, value, step: emit(step.op, value, *step.args))


@PUT_BACK.row(aten.expand.default)
def _expanded(emit: Emit, base: Node, value: Node, step: ViewStep) -> Node:
    shape, before = spec_of_node(value).shape, step.before.shape
    if len(shape) != len(before) or not all(map(same, shape, before)):
        raise RuntimeError("unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
                           "Please clone() the tensor before performing the operation.")
    return value


def _scatter(op: Any, emit: Emit, base: Node, value: Node, step: ViewStep) -> Node:
    return emit(op, base, value, *step.args, **step.kwargs)


PUT_BACK.add(aten.slice.Tensor, functools.partial(_scatter, aten.slice_scatter.default))
PUT_BACK.add(aten.select.int, functools.partial(_scatter, aten.select_scatter.default))
PUT_BACK.add(aten.diagonal.default, functools.partial(_scatter, aten.diagonal_scatter.default))


# Views through which a write makes a new value; through others the written value itself is put back, in another shape.
SCATTERED = frozenset({aten.slice.Tensor, aten.select.int, aten.diagonal.default, aten.as_strided.default, aten.unfold.default})


def _apart(base: Node, emit: Emit, layout: torch.memory_format) -> Node:
    """The base as a tensor with a storage of its own, whose elements can be addressed by strides: that of an input begins elsewhere, and torch
    refuses to scatter into one that requires grad."""
    spec = spec_of_node(base)
    if base.op != "placeholder" and is_dense(spec) and type(spec.offset) is int and spec.offset == 0:
        return base
    return emit(aten.clone.default, base, memory_format=layout)


@PUT_BACK.row(aten.as_strided.default)
def _strided(emit: Emit, base: Node, value: Node, step: ViewStep) -> Node:
    base = _apart(base, emit, torch.preserve_format)
    return emit(aten.as_strided_scatter.default, base, value, *_shifted(step, base))


@PUT_BACK.row(aten.unfold.default)
def _unfolded(emit: Emit, base: Node, value: Node, step: ViewStep) -> Node:
    base = _apart(base, emit, torch.contiguous_format)
    spec = spec_of_node(base)
    dim, size, stride = step.args
    d = wrap_dim(dim, len(spec.shape))
    shape = spec_of_node(value).shape
    strides = (*spec.strides[:d], spec.strides[d] * stride, *spec.strides[d + 1:], spec.strides[d])
    return emit(aten.as_strided_scatter.default, base, value, list(shape), list(strides), spec.offset)


PUT_BACK.row(aten.view.dtype)(lambda emit, base, value, step: emit(aten.view.dtype, value, step.before.dtype))
PUT_BACK.row(aten.view_as_real.default)(lambda emit, base, value, step: emit(aten.view_as_complex.default, value))
PUT_BACK.row(aten.view_as_complex.default)(lambda emit, base, value, step: emit(aten.view_as_real.default, value))
PUT_BACK.row(aten.conj_physical.default, aten.neg.default)(lambda emit, base, value, step: emit(step.op, value))


# ---------------------------------------------------------------- views that give lists

def parts(op: Any, spec: Spec, args: Sequence[Any], kwargs: dict[str, Any], results: list[Spec]) -> list[tuple[Any, tuple]]:
    """Each result of a list-giving view (split, unbind, ...) as a single view operator."""
    dim = wrap_dim(kwargs.get("dim", args[-1] if len(args) > _SIZED[op] else 0), len(spec.shape))
    if op is aten.unbind.int:
        return [(aten.select.int, (dim, i)) for i in range(len(results))]
    start: Size = 0
    steps = []
    for result in results:
        steps.append((aten.slice.Tensor, (dim, start, start + result.shape[dim], 1)))
        start = start + result.shape[dim]
    return steps


# how many arguments after the tensor come before `dim`
_SIZED = {aten.unbind.int: 0, aten.split.Tensor: 1, aten.split_with_sizes.default: 1}
