"""Passes over functional ATen graphs: each walks the graph once, edits it in place, and returns how many nodes it removed.

    clean(gm)       # fold, remove what does nothing, merge equal nodes, remove what nobody reads

What always holds: the graph's outputs keep their values, dtypes, shapes and strides, and two outputs that were different nodes, or views of
different nodes, stay so (a merged node would give the caller one memory twice).  Draws of random numbers are neither merged nor,
while fs.config.eager_rng holds, removed: eager would have drawn them.
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from firesteel.config import config
from firesteel.graph.abstract import AbstractTensor
from firesteel.graph.build import append_call
from firesteel.graph.rules.base import wrap_dim
from firesteel.graph.schemas import facts
from firesteel.graph.spec import Spec
from firesteel.operators import collective
from firesteel.table import Table

aten = torch.ops.aten


def clean(gm: GraphModule) -> int:
    """All passes, in the order in which each helps the next."""
    removed = fold_constants(gm.graph) + remove_noops(gm.graph) + merge_equal(gm.graph) + remove_dead(gm.graph)
    if removed:
        gm.recompile()
    return removed


def spec(node: Any) -> Spec | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.spec if type(value) is AbstractTensor else None


def arguments(node: Node) -> tuple[Any, ...]:
    """What the operator's schema says they are; torch's type for them is a union of all that may be an argument of anything."""
    return node.args


def outputs_of(graph: Graph) -> set[Node]:
    return set(next(iter(reversed(graph.nodes))).all_input_nodes)


# ---------------------------------------------------------------- dead nodes

def remove_dead(graph: Graph) -> int:
    """Removes nodes without readers, from the last to the first."""
    removed = 0
    for node in reversed(graph.nodes):
        if not node.users and is_removable(node):
            graph.erase_node(node)
            removed += 1
    return removed


def is_removable(node: Node) -> bool:
    """May the node be dropped when nobody reads it?"""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    drawn = facts(target).random and config.eager_rng
    return bool(target._schema.returns) and not target._schema.is_mutable and not drawn and collective(target) is None


# ---------------------------------------------------------------- equal nodes

def merge_equal(graph: Graph) -> int:
    """One node for every computation: later equal nodes give way to the first, but where the caller would get one memory twice, and where
    the backward would read a result that eager's does not: the caller may overwrite it before."""
    kept: dict[Any, Node] = {}
    outputs = outputs_of(graph)
    outputs |= set(map(viewed, outputs))
    removed = 0
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr") or not is_mergeable(node):
            continue
        first = kept.setdefault(key := _key(node), node)
        if first in outputs and (first.meta.get("phase"), node.meta.get("phase")) == ("forward", "backward") and viewed(first) is first:
            first = kept.setdefault((key, "backward"), node)
        if first is node or (node in outputs and first in outputs):
            continue
        if node in outputs:
            outputs.add(first)
        if node.meta.get("phase") == "forward":
            first.meta["phase"] = "forward"     # a gradient asked for inside of the forward came first
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        removed += 1
    return removed


def viewed(node: Node) -> Node:
    """The base of a view, or itself."""
    return view_chain(node)[-1]


def view_chain(node: Node) -> list[Node]:
    """The node, what it is a view of, and so on to their base."""
    base: Any = node
    chain = [base]
    while is_getitem(base) or base.target is aten._unsafe_view.default or isinstance(base.target, OpOverload) and facts(base.target).kind == "view":
        base = base.args[0]
        chain.append(base)
    return chain


def is_mergeable(node: Node) -> bool:
    target = node.target
    if "unbacked" in node.meta:     # each has symbols of its own
        return False
    if isinstance(target, OpOverload):
        return not facts(target).random and not target._schema.is_mutable and bool(target._schema.returns) and collective(target) is None
    return True


def _key(node: Node) -> tuple:
    """Equal for equal computations, but not for those of two checkpointed regions: shared, the value would have to be kept for the second."""
    target = node.target if isinstance(node.target, str) else id(node.target)
    return target, frozen(node.args), frozen(node.kwargs), node.meta.get("phase") if node.op == "get_attr" else node.meta.get("region")


def frozen(value: Any, names: Mapping[Node, Any] | None = None) -> Any:
    """A hashable twin; numbers keep their type (1, 1.0 and True are different arguments), nodes may get names."""
    if isinstance(value, Node):
        return value if names is None else names[value]
    if isinstance(value, (list, tuple)):
        return tuple(frozen(v, names) for v in value)
    if isinstance(value, dict):
        return tuple((k, frozen(v, names)) for k, v in value.items())
    return type(value), repr(value) if isinstance(value, (float, complex, slice)) else value


# ---------------------------------------------------------------- nodes that do nothing

NOOPS: Table[Callable[[Node], Node | None]] = Table("test for doing nothing", "graph/passes.py")


def remove_noops(graph: Graph) -> int:
    """Replaces views with the Spec of their argument by the argument, and parts that were just written by what was written.  A result stays in
    its memory: the other may be a result too."""
    removed = 0
    shown = {node for output in outputs_of(graph) for node in view_chain(output)}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        test = NOOPS.get(node.target)
        same = test(node) if test is not None else None
        if same is not None and node in shown and viewed(same) is not viewed(node):
            continue
        if same is not None and _alike(spec(same), spec(node)) and move_views(node, spec(same)):
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            removed += 1
    return removed


def _alike(a: Spec | None, b: Spec | None) -> bool:
    """The same but for the place in the storage, which is no part of a value."""
    return a is not None and b is not None and a._replace(offset=0) == b._replace(offset=0)


def move_views(node: Node, base: Any) -> bool:
    """Views of a node that is to be replaced by another begin where that one begins.  False where one of them counts from the
    storage's start: then it must stay."""
    shift = base.offset - node.meta["val"].spec.offset
    views = [] if type(shift) is int and shift == 0 else _views_of(node)
    if any(view.target is aten.as_strided.default for view in views):
        return False
    for view in views:
        view.meta["val"] = moved(view.meta["val"], shift, base.dtype)
    return True


def _views_of(node: Node) -> list[Node]:
    """The views of a node, and views of these."""
    found = []
    for user in node.users:
        if is_getitem(user) or isinstance(user.target, OpOverload) and facts(user.target).kind == "view" and user.args[0] is node:
            found += [user, *_views_of(user)]
    return found


def moved(value: Any, shift: Any, dtype: torch.dtype) -> Any:
    """A value, or several, at another place of the storage: `shift` elements of `dtype` further."""
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, shift, dtype) for v in value)
    return value.world.make(value.spec._replace(offset=value.spec.offset + counted_in(value.spec.dtype, shift, dtype)))


def counted_in(wanted: torch.dtype, count: Any, dtype: torch.dtype) -> Any:
    """So many elements of `dtype`, in elements of another."""
    return count if wanted.itemsize == dtype.itemsize else count * dtype.itemsize // wanted.itemsize


@NOOPS.row(aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.expand.default, aten.view.default, aten._unsafe_view.default,
           aten.slice.Tensor, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.as_strided.default)
def _same_spec(node: Node) -> Node | None:
    """A view with the Spec of its argument, the offset included, has the same elements."""
    base = node.args[0]
    return base if isinstance(base, Node) and spec(base) == spec(node) else None


@NOOPS.row(aten.permute.default)
def _identity_permutation(node: Node) -> Node | None:
    base, dims = arguments(node)
    return base if [wrap_dim(d, len(dims)) for d in dims] == list(range(len(dims))) else None


@NOOPS.row(aten.t.default)
def _t_of_t(node: Node) -> Node | None:
    inner = arguments(node)[0]
    return inner.args[0] if inner.op == "call_function" and inner.target is aten.t.default else None


@NOOPS.row(aten.transpose.int)
def _transpose_of_transpose(node: Node) -> Node | None:
    inner, own = arguments(node)[0], spec(node)
    if inner.op != "call_function" or inner.target is not aten.transpose.int or own is None:
        return None
    ndim = len(own.shape)
    dims = [{wrap_dim(d, ndim) for d in arguments(n)[1:]} for n in (node, inner)]
    return inner.args[0] if dims[0] == dims[1] else None


def _part_of_scatter(scatter: OpOverload, node: Node) -> Node | None:
    """Reading back the part that was just written gives what was written."""
    base = arguments(node)[0]
    if base.op != "call_function" or base.target is not scatter or base.kwargs != node.kwargs:
        return _same_spec(node) if node.target is aten.slice.Tensor else None
    return base.args[1] if tuple(base.args[2:]) == tuple(node.args[1:]) else None


NOOPS.remove(aten.slice.Tensor)
NOOPS.add(aten.slice.Tensor, functools.partial(_part_of_scatter, aten.slice_scatter.default))
NOOPS.add(aten.select.int, functools.partial(_part_of_scatter, aten.select_scatter.default))


# ---------------------------------------------------------------- constants

def fold_constants(graph: Graph) -> int:
    """Literals such as torch.tensor(2.0) become `full`, which later stages put into the code; conversions of `full` vanish."""
    removed = 0
    module = graph.owning_module
    for node in list(graph.nodes):
        replacement = _folded(graph, module, node) if node.op == "call_function" else None
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
            removed += 1
    return removed


def _folded(graph: Graph, module: Any, node: Node) -> Node | None:
    if node.target is not aten.lift_fresh_copy.default and node.target is not aten._to_copy.default:
        return None
    first, own = arguments(node)[0], spec(node)
    if own is None or not isinstance(first, Node):
        return None
    if node.target is aten.lift_fresh_copy.default:
        tensor = getattr(module, str(first.target), None) if first.op == "get_attr" else None
        return _full(graph, node, tensor.item(), own) if type(tensor) is torch.Tensor and tensor.ndim == 0 else None
    if first.target is aten.full.default and not own.shape and own.dtype.is_floating_point:
        value, made = first.args[1], spec(first)
        if isinstance(value, (int, float, bool)) and made is not None and (not made.dtype.is_floating_point or _exact(value, made.dtype)):
            return _full(graph, node, value, own)
    return None


def _exact(value: float, dtype: torch.dtype) -> bool:
    """Does the narrower dtype of the first `full` hold the value exactly?  Else converting it directly would round less."""
    return torch.full((), value, dtype=dtype).item() == value


def _full(graph: Graph, node: Node, value: Any, own: Spec) -> Node:
    with graph.inserting_before(node):
        made = append_call(graph, aten.full.default, ([], value), {"dtype": own.dtype, "device": own.device})
    made.meta.update(node.meta)
    return made


def is_getitem(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem
