"""Lowerings of tensors made from nothing: constants and counters.  They are computed where they are read; a buffer exists
only where a library call or an output needs one.

    full([n, m], 2.0) + x     ->     out[i, j] = 2.0 + load(x, i, j)
"""
from __future__ import annotations

from typing import Any

import torch

from firesteel.loops.lower.build import LOWERINGS, Builder, supported
from firesteel.loops.lower.value import Tensor
from firesteel.loops.ops import SHORT, S, compute_dtype, is_float, literal, number, to
from firesteel.sym.expr import Expr, as_expr

aten = torch.ops.aten


def filled(out: Any, value: Any) -> Any:
    """A tensor of one value."""
    dtype = SHORT.get(out.dtype, "")
    if not supported(dtype) or isinstance(value, complex):
        return NotImplemented
    element = number(value, dtype)
    return Tensor.lazy(out, lambda i: element)


@LOWERINGS.row(aten.full.default, aten.full_like.default, aten.new_full.default)
def lower_full(b: Builder, out: Any, like: Any, *rest: Any, **_: Any) -> Any:
    """The value is the last positional argument: full(size, v), full_like(x, v), new_full(x, size, v)."""
    return filled(out, rest[-1])


@LOWERINGS.row(aten.zero.default, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten._efficientzerotensor.default)
def lower_zeros(b: Builder, out: Any, *_: Any, **__: Any) -> Any:
    return filled(out, 0)


@LOWERINGS.row(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def lower_ones(b: Builder, out: Any, *_: Any, **__: Any) -> Any:
    return filled(out, 1)


@LOWERINGS.row(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default, aten.empty_strided.default)
def lower_empty(b: Builder, out: Any, *_: Any, **__: Any) -> Any:
    """Any values will do: zeros cost nothing where they are not read."""
    return filled(out, 0)


@LOWERINGS.row(aten.scalar_tensor.default)
def lower_scalar_tensor(b: Builder, out: Any, value: Any, **_: Any) -> Any:
    return filled(out, value)


@LOWERINGS.row(aten.fill.Scalar)
def lower_fill(b: Builder, out: Any, x: Tensor, value: Any) -> Any:
    return filled(out, value)


@LOWERINGS.row(aten.fill.Tensor)
def lower_fill_tensor(b: Builder, out: Any, x: Tensor, value: Tensor) -> Any:
    if not supported(SHORT.get(out.dtype, ""), value.dtype) or value.spec.device != out.device:
        return NotImplemented
    dtype, value = SHORT[out.dtype], b.readable(value)
    return b.map(out, lambda i: to(value.load(()), dtype))


def counted(out: Any, start: Any, step: Any) -> Any:
    """start + i*step.  Integers in 64 bits; floats in double before they are rounded, as eager does it."""
    dtype = SHORT.get(out.dtype, "")
    if not supported(dtype) or dtype == "bool":
        return NotImplemented
    if is_float(dtype):
        wide = "f64"
        return Tensor.lazy(out, lambda i: to(_line(i[0], start, step, wide), dtype))
    return Tensor.lazy(out, lambda i: to(as_expr(i[0] * step + start), dtype))


def _line(i: Any, start: Any, step: Any, dtype: str) -> Expr:
    return S.add(number(start, dtype), S.mul(number(i, dtype), number(step, dtype)))


@LOWERINGS.row(aten.arange.start_step)
def lower_arange(b: Builder, out: Any, start: Any, end: Any, step: Any = 1, **_: Any) -> Any:
    return counted(out, start, step)


@LOWERINGS.row(aten.arange.start)
def lower_arange_from(b: Builder, out: Any, start: Any, end: Any, **_: Any) -> Any:
    return counted(out, start, 1)


@LOWERINGS.row(aten.arange.default)
def lower_arange_to(b: Builder, out: Any, end: Any, **_: Any) -> Any:
    return counted(out, 0, 1)


@LOWERINGS.row(torch.ops.prims.iota.default)
def lower_iota(b: Builder, out: Any, length: Any, *, start: Any, step: Any, **_: Any) -> Any:
    return counted(out, start, step)


@LOWERINGS.row(aten.linspace.default)
def lower_linspace(b: Builder, out: Any, start: Any, end: Any, steps: Any, **_: Any) -> Any:
    """Counted from the nearer end, as eager does."""
    dtype = SHORT.get(out.dtype, "")
    if not is_float(dtype) or any(isinstance(v, (Expr, Tensor)) for v in (start, end, steps)):
        return NotImplemented
    kind = compute_dtype(dtype)
    step = (end - start) / (steps - 1) if steps > 1 else 0.0

    def element(i: Any) -> Expr:
        at = as_expr(i[0])
        up = S.add(literal(start, kind), S.mul(to(at, kind), literal(step, kind)))
        down = S.sub(literal(end, kind), S.mul(to(S.sub(steps - 1, at), kind), literal(step, kind)))
        return to(S.where(S.lt(at, (steps + 1) // 2), up, down), dtype)
    return Tensor.lazy(out, element)


@LOWERINGS.row(aten.eye.default, aten.eye.m)
def lower_eye(b: Builder, out: Any, *_: Any, **__: Any) -> Any:
    dtype = SHORT.get(out.dtype, "")
    if not supported(dtype):
        return NotImplemented
    return Tensor.lazy(out, lambda i: S.where(S.eq(as_expr(i[0]), as_expr(i[1])), literal(1, dtype), literal(0, dtype)))
