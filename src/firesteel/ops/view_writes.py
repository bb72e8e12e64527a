"""Writing through a view, as a value: a tensor with a part replaced, and the gradients of views."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import shaped, wrap
from firesteel.graph.rules.base import RULES, check, wrap_dim
from firesteel.graph.rules.refusals import same_shape
from firesteel.graph.spec import Spec, fresh, like, make_spec
from firesteel.loops.lower.build import Builder, choose, equal
from firesteel.loops.lower.value import Index, Operand
from firesteel.loops.lower.views import first_place, from_end
from firesteel.loops.scalars import SHORT, S
from firesteel.ops.block import decomposition, device_rule, loop_lowering, operator, refuses
from firesteel.sym.expr import Expr, Size, and_, as_expr, ge, lt

aten = torch.ops.aten

operator("slice_scatter.* select_scatter.* diagonal_scatter.* as_strided_scatter.* slice_backward.* "
         "select_backward.*", recompute="move")


@device_rule("slice_scatter select_scatter diagonal_scatter as_strided_scatter")
def scatter_into(x: Spec, source: Spec, *args, **kwargs) -> Spec:
    """The strides of x, unless it repeats elements in memory."""
    return like(x) if 0 in x.strides else Spec(x.shape, x.strides, 0, x.dtype, x.device)


def _fills_view(view: Any, /, x: Spec, source: Spec, *args: Any, **kwargs: Any) -> None:
    """A row of an operator that writes a source to `view` of the same arguments."""
    shown = RULES[view](x, *args, **kwargs).shape
    same_shape(source.shape, shown, f"expected src to have a size equal to the slice of self. src size = {list(source.shape)}, "
                                    f"slice size = {list(shown)}")


for _name, _view in (("slice_scatter", aten.slice.Tensor), ("select_scatter", aten.select.int), ("diagonal_scatter", aten.diagonal.default)):
    refuses(_name)(functools.partial(_fills_view, _view))


# ---------------------------------------------------------------- parts

@loop_lowering("slice_scatter")
def lower_slice_scatter(b: Builder, out: Any, x: Operand, source: Operand, dim: int = 0, start: Size | None = None,
                        end: Size | None = None, step: int = 1) -> Any:
    dim = dim + len(x.shape) if dim < 0 else dim
    size = x.shape[dim]
    first = first_place(b, start, size)
    length, dtype = source.shape[dim], SHORT[out.dtype]

    def element(i: Index) -> Expr:
        away = i[dim] - first
        inside: Any = and_(ge(as_expr(i[dim]), first), lt(as_expr(away), length * step))
        if step != 1:
            inside = and_(inside, as_expr(S.eq(as_expr(away % step), as_expr(0))) if isinstance(away % step, Expr) else away % step == 0)
        return choose(inside, source, (*i[:dim], away // step, *i[dim + 1:]), x.load(i), dtype)
    return b.map(out, element)


@loop_lowering("select_scatter")
def lower_select_scatter(b: Builder, out: Any, x: Operand, source: Operand, dim: int, index: Size) -> Any:
    dim = dim + len(x.shape) if dim < 0 else dim
    at = from_end(b, index, x.shape[dim])
    dtype = SHORT[out.dtype]
    return b.map(out, lambda i: choose(equal(i[dim], at), source, (*i[:dim], *i[dim + 1:]), x.load(i), dtype))


@loop_lowering("diagonal_scatter")
def lower_diagonal_scatter(b: Builder, out: Any, x: Operand, source: Operand, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    row, column = dim1 % len(x.shape), dim2 % len(x.shape)
    down, dtype = max(-offset, 0), SHORT[out.dtype]

    def element(i: Index) -> Expr:
        others = tuple([k for d, k in enumerate(i) if d not in (row, column)])
        return choose(equal(i[column] - i[row], offset), source, (*others, i[row] - down), x.load(i), dtype)
    return b.map(out, element)


@device_rule("diag_embed")
def diag_embed(x: Spec, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Spec:
    ndim = len(x.shape) + 1
    a, b = wrap_dim(dim1, ndim), wrap_dim(dim2, ndim)
    check(a != b, "diagonal dimensions cannot be identical")
    return fresh(x, embedded_shape(x.shape, offset, a, b))


def embedded_shape(shape: Any, offset: int, first: int, second: int) -> list[Any]:
    """Of a tensor with diagonals of the last dimension's size."""
    made = list(shape[:-1])
    for d in sorted((first, second)):
        made.insert(d, shape[-1] + abs(offset))
    return made


@decomposition("diag_embed")
def decompose_diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    ndim = x.dim() + 1
    first, second = wrap(dim1, ndim), wrap(dim2, ndim)
    return aten.diagonal_scatter.default(aten.new_zeros.default(x, embedded_shape(x.shape, offset, first, second)), x, offset, first, second)


# ---------------------------------------------------------------- gradients of views

def _gradient_of_view(view: Any, /, grad: Spec, sizes: Sequence[Size], *args: Any, **kwargs: Any) -> None:
    """A row of the gradient of a view: it has the view's shape."""
    shown = RULES[view](make_spec(tuple(sizes), grad.dtype, grad.device), *args, **kwargs).shape
    same_shape(grad.shape, shown, f"expected a gradient of size {list(shown)}, got {list(grad.shape)}")


for _name, _view in (("slice_backward", aten.slice.Tensor), ("select_backward", aten.select.int), ("diagonal_backward", aten.diagonal.default),
                     ("unfold_backward", aten.unfold.default)):
    refuses(_name)(functools.partial(_gradient_of_view, _view))


device_rule("slice_backward")(lambda grad, sizes, dim, start, end, step: fresh(grad, sizes))


@decomposition("slice_backward")
def decompose_slice_backward(grad: Tensor, sizes: Sequence[Any], dim: int, start: Any, end: Any, step: Any) -> Tensor:
    return aten.slice_scatter.default(aten.new_zeros.default(grad, list(sizes)), grad, dim, start, end, step)


device_rule("select_backward")(lambda grad, sizes, dim, index: fresh(grad, sizes))
decomposition("select_backward")(
    lambda grad, sizes, dim, index: aten.select_scatter.default(aten.new_zeros.default(grad, list(sizes)), grad, dim, index))
device_rule("diagonal_backward")(lambda grad, sizes, offset, dim1, dim2: fresh(grad, sizes))


@decomposition("diagonal_backward")
def decompose_diagonal_backward(grad: Tensor, sizes: Sequence[Any], offset: int, dim1: int, dim2: int) -> Tensor:
    return aten.diagonal_scatter.default(aten.new_zeros.default(grad, list(sizes)), grad, offset, dim1, dim2)


device_rule("unfold_backward")(lambda grad, sizes, dim, size, step: fresh(grad, sizes))


@decomposition("unfold_backward")
def decompose_unfold_backward(grad: Tensor, sizes: Sequence[Any], dim: int, size: Any, step: Any) -> Tensor:
    """Where windows overlap, their gradients add up."""
    if not sizes:
        return aten.squeeze.dim(grad, 0)
    dim = wrap(dim, len(sizes))
    places = aten.arange.start_step(0, sizes[dim], 1, dtype=torch.int64, device=grad.device)
    windows = aten.slice.Tensor(aten.unfold.default(places, 0, size, step), 0, 0, None)
    moved = aten.movedim.int(grad, grad.dim() - 1, dim + 1)
    flat = shaped(moved, [*sizes[:dim], -1, *sizes[dim + 1:]])
    index = shaped(windows, [-1])
    return aten.index_put.default(aten.new_zeros.default(grad, list(sizes)), [None] * dim + [index], flat, True)
