"""Frozen weights in the format of the library that convolves and multiplies, oneDNN, so that it does not reorder them at each call (frozen.py).

In: a functional graph and its known nodes.  Out: the graph, in which convolutions of channels-last images and matrix products call oneDNN's own
operators, on weights that another of its operators has reordered: that one is known, and is computed once.  An activation behind a convolution that
the library applies on the way, and as eager does, becomes part of the call.

    conv(x, w, b), hardswish    ->    mkldnn._convolution_pointwise(x, mkldnn._reorder_convolution_weight(w), b, "hardswish")

What always holds: a result has the layout that it had.  Where torch was built without oneDNN, or it is turned off, nothing is done.
"""
from __future__ import annotations

import math
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from firesteel.graph.build import append_call
from firesteel.graph.known import KnownNodes, rounds
from firesteel.graph.passes import arguments, spec
from firesteel.graph.spec import Spec, channels_last_strides, contiguous_strides
from firesteel.table import Table
from firesteel.targets import on_host

aten = torch.ops.aten
LARGE = 1 << 23         # products of floats with fewer multiplications are quicker as they are: oneDNN's call costs 10 us more


def reorder(graph: Graph, known: KnownNodes) -> int:
    """Rewrites all that pays; says how many."""
    nodes = [node for node in graph.nodes if node.target in ROWS] if is_available() else []
    return sum(ROWS[node.target](graph, node, known) for node in nodes)


def is_available() -> bool:
    """Measured on x86 alone."""
    return platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled() \
        and hasattr(torch.ops.mkldnn, "_convolution_pointwise")


def is_opaque(node: Node) -> bool:
    """Is it a weight in the library's own format, which has no strides?"""
    return getattr(node.target, "namespace", "") == "mkldnn"


def takes(dtype: torch.dtype) -> bool:
    supported = SUPPORTED.get(dtype)
    return supported is not None and supported()


# dtype -> does the library have kernels for it on this processor?
SUPPORTED: dict[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: lambda: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
ROWS: Table[Callable[[Graph, Node, KnownNodes], bool]] = Table("call on a reordered weight", "graph/reordering.py")


# ---------------------------------------------------------------- convolutions

@ROWS.row(aten.convolution.default)
def reorder_convolution(graph: Graph, node: Node, known: KnownNodes) -> bool:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = arguments(node)
    if transposed or weight not in known or not _are_images(spec(x), spec(node)) or not _has_dtype(spec(node), spec(weight), bias):
        return False
    shape = spec(x).shape       # type: ignore[union-attr]  # an image
    how = padding, stride, dilation, groups
    sizes = list(shape) if all(type(size) is int for size in shape) else None
    last, name, scalars = _activation(node)
    with graph.inserting_before(node):
        reordered = known.call(torch.ops.mkldnn._reorder_convolution_weight.default, (weight, *how, sizes))
    _put(graph, node, last, torch.ops.mkldnn._convolution_pointwise.default, (x, reordered, bias, *how, name, scalars, ""))
    return True


def _are_images(x: Spec | None, result: Spec | None) -> bool:
    return x is not None and result is not None and len(x.shape) in (4, 5) and all(
        own.strides == channels_last_strides(own.shape) and own.strides != contiguous_strides(own.shape) for own in (x, result))


def _has_dtype(result: Spec | None, weight: Spec | None, bias: Node | None) -> bool:
    return result is not None and weight is not None and takes(result.dtype) and weight.dtype is result.dtype and (
        bias is None or spec(bias).dtype is result.dtype)       # type: ignore[union-attr]  # a tensor


# activation -> (its name in the library, the numbers it takes there), of those for which the library gives what eager does: its relu, clamp and hard
# sigmoid give a number for NaN.  Sums with a residual and relu were measured, too: no faster than a loop of ours behind the call
ACTIVATIONS: Table[Callable[..., tuple[str, list[float]]]] = Table("activation of the library", "graph/reordering.py")
ACTIVATIONS.rows({
    aten.hardswish.default: lambda: ("hardswish", []),
    aten.leaky_relu.default: lambda slope=0.01: ("leaky_relu", [slope]),
})


def _activation(node: Node) -> tuple[Node, str, list[float]]:
    """The only reader of a product, where the library can do its work; else the product and nothing."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    row = ACTIVATIONS.get(user.target) if user is not None else None
    if user is None or row is None or user.kwargs or spec(user) != spec(node) or rounds(node):
        return node, "none", []
    return user, *row(*user.args[1:])


def _put(graph: Graph, node: Node, last: Node, target: Any, args: tuple) -> None:
    """A call in the place of a product and of what it does too."""
    with graph.inserting_before(last):
        made = append_call(graph, target, args, {})
    made.meta = dict(last.meta)
    last.replace_all_uses_with(made)
    for old in dict.fromkeys((last, node)):
        graph.erase_node(old)


# ---------------------------------------------------------------- matrix products

@ROWS.row(aten.mm.default)
def reorder_mm(graph: Graph, node: Node, known: KnownNodes) -> bool:
    x, weight = arguments(node)
    return _reorder_linear(graph, node, x, weight, None, known)


@ROWS.row(aten.addmm.default)
def reorder_addmm(graph: Graph, node: Node, known: KnownNodes) -> bool:
    bias, x, weight = arguments(node)
    fits = not node.kwargs and spec(bias) is not None and len(spec(bias).shape) == 1        # type: ignore[union-attr]  # a tensor
    return fits and _reorder_linear(graph, node, x, weight, bias, known)


def _reorder_linear(graph: Graph, node: Node, x: Node, weight: Node, bias: Node | None, known: KnownNodes) -> bool:
    if weight not in known or not _has_dtype(spec(node), spec(weight), bias) or not _is_large(spec(x), spec(node)):
        return False
    rows = spec(x).shape[0]     # type: ignore[union-attr]  # a matrix
    with graph.inserting_before(node):
        turned = known.call(aten.clone.default, (known.call(aten.t.default, (weight,)),), memory_format=torch.contiguous_format)
        reordered = known.call(torch.ops.mkldnn._reorder_linear_weight.default, (turned, rows if type(rows) is int else None))
    _put(graph, node, node, torch.ops.mkldnn._linear_pointwise.default, (x, reordered, bias, "none", [], ""))
    return True


def _is_large(x: Spec | None, result: Spec | None) -> bool:
    """Of floats only large products pay; others are oneDNN's in any case."""
    if x is None or result is None or result.strides != contiguous_strides(result.shape) or not on_host(result):
        return False
    sizes = (*x.shape, result.shape[1])
    return result.dtype is not torch.float32 or all(type(size) is int for size in sizes) and math.prod(sizes) >= LARGE
