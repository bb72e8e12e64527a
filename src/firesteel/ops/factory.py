"""Tensors made from sizes and numbers.  They are computed where they are read: no memory, no nest."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from firesteel.graph.rules.base import check, clamp_size, into_empty_like, scalar_dtype
from firesteel.graph.rules.refusals import fits_in, known, within
from firesteel.graph.sizes import ask, must
from firesteel.graph.spec import Shape, Spec, contiguous_strides, device_of, is_dense, like, make_spec, repeats
from firesteel.loops.lower.build import Builder, supported
from firesteel.loops.lower.value import Operand
from firesteel.loops.scalars import SHORT, S, compute_dtype, is_float, literal, number, to
from firesteel.ops.block import lowering, operator, probed_rule, refuses, rule
from firesteel.sym.expr import Expr, Size, as_expr, ceil, floor, ge, gt, truediv
from firesteel.targets import HOST

operator("full.* zeros.* ones.* empty.* arange.* linspace.* logspace.* eye.* scalar_tensor.* full_like.* "
         "zeros_like.* ones_like.* empty_like.* new_full.* new_zeros.* new_ones.* new_empty.* empty_strided.* "
         "new_empty_strided.* tril_indices.* triu_indices.*", recompute="create")


def made(shape: Sequence[Size], dtype: torch.dtype | None, device: Any, memory_format: torch.memory_format | None = None) -> Spec:
    shape = as_sizes(shape)
    spec = make_spec(shape, dtype or torch.get_default_dtype(), device_of(device, default_device()))
    return spec if memory_format is None else like(spec, memory_format=memory_format)


def default_device() -> torch.device:
    return HOST


def as_sizes(shape: Sequence[Size]) -> Shape:
    """A shape that the program computed: no size may be negative."""
    shape = tuple(shape)
    for size in shape:
        if type(size) is Expr or size < 0:
            must(ge(size, 0), f"Trying to create tensor with negative dimension {size}: {list(shape)}")
    return shape


# ---------------------------------------------------------------- one value

@rule("zeros ones empty.memory_format")
def zeros(size: Sequence[Size], *, generator=None, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> Spec:
    return made(size, dtype, device, memory_format)


@rule("zeros_like ones_like empty_like full_like")
def zeros_like(x: Spec, *numbers: Any, generator=None, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> Spec:
    return like(x, dtype=dtype, device=device, memory_format=memory_format)


@rule("new_empty new_zeros new_ones new_full")
def new_empty(x: Spec, size: Sequence[Size], *value: Any, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return make_spec(as_sizes(size), dtype or x.dtype, device_of(device, x.device))


lowering("zero zeros zeros_like new_zeros _efficientzerotensor")(lambda b, out, *_, **__: filled(out, 0))
lowering("ones ones_like new_ones")(lambda b, out, *_, **__: filled(out, 1))


@lowering("empty.memory_format empty_like new_empty new_empty_strided empty_strided empty_permuted")
def lower_empty(b: Builder, out: Any, *_: Any, **__: Any) -> Any:
    """Any values will do: zeros cost nothing where they are not read.  Deterministic algorithms fill the memory."""
    if repeats(out) or all(type(n) is int for n in (*out.shape, *out.strides)) and not is_dense(out):
        return NotImplemented
    if not (torch.are_deterministic_algorithms_enabled() and torch._C._get_deterministic_fill_uninitialized_memory()):
        return filled(out, 0)
    inexact = out.dtype.is_floating_point or out.dtype.is_complex
    return filled(out, math.nan if inexact else out.dtype is torch.bool or torch.iinfo(out.dtype).max)


rule("full")(lambda size, value, *, dtype=None, layout=None, device=None, pin_memory=None: made(size, dtype or scalar_dtype(value), device))
refuses("full")(lambda size, value, *, dtype=None, **options: fits_in(value, dtype or scalar_dtype(value)))


refuses("full_like fill.Scalar")(lambda x, value, *, dtype=None, **options: fits_in(value, dtype or x.dtype))
refuses("new_full")(lambda x, size, value, *, dtype=None, **options: fits_in(value, dtype or x.dtype))


@lowering("full full_like new_full")
def lower_full(b: Builder, out: Any, like: Any, *rest: Any, **_: Any) -> Any:
    """The value is the last positional argument: full(size, v), full_like(x, v), new_full(x, size, v)."""
    return filled(out, rest[-1])


def filled(out: Any, value: Any) -> Any:
    """A tensor of one value."""
    dtype = SHORT.get(out.dtype, "")
    if not supported(dtype) or isinstance(value, complex):
        return NotImplemented
    element = number(value, dtype)
    return Operand.lazy(out, lambda i: element)


rule("scalar_tensor")(lambda value, *, dtype=None, layout=None, device=None, pin_memory=None: made((), dtype, device))
refuses("scalar_tensor")(lambda value, *, dtype=None, **options: fits_in(value, dtype or torch.get_default_dtype()))
lowering("scalar_tensor")(lambda b, out, value, **_: filled(out, value))
probed_rule("fill.Scalar zero")(into_empty_like)


@probed_rule("fill.Tensor")
def fill(x: Spec, value: Spec) -> Spec:
    check(not value.shape, "fill_ only supports 0-dimension value tensor")
    return like(x)


lowering("fill.Scalar")(lambda b, out, x, value: filled(out, value))


@lowering("fill.Tensor")
def lower_fill_tensor(b: Builder, out: Any, x: Operand, value: Operand) -> Any:
    if not supported(SHORT.get(out.dtype, ""), value.dtype) or value.spec.device != out.device:
        return NotImplemented
    dtype, value = SHORT[out.dtype], b.readable(value)
    return b.map(out, lambda i: to(value.load(()), dtype))


# ---------------------------------------------------------------- memory

@rule("empty_strided")
def empty_strided(size: Sequence[Size], stride: Sequence[Size], *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return made(size, dtype, device)._replace(strides=tuple(stride))


@refuses("empty_strided")
def refuse_empty_strided(size: Sequence[Size], stride: Sequence[Size], **options: Any) -> None:
    check(len(size) == len(stride), f"dimensionality of sizes ({len(size)}) must match dimensionality of strides ({len(stride)})")
    for s in stride:
        within(s, 0, None, f"Storage size calculation overflowed with sizes={list(size)} and strides={list(stride)}")


@rule("new_empty_strided")
def new_empty_strided(x: Spec, size: Sequence[Size], stride: Sequence[Size], *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return Spec(as_sizes(size), tuple(stride), 0, dtype or x.dtype, device_of(device, x.device))


refuses("new_empty_strided")(lambda x, size, stride, **options: refuse_empty_strided(size, stride))


@rule("empty_permuted")
def empty_permuted(size: Sequence[Size], order: Sequence[int], *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    inner = contiguous_strides(tuple(size[d] for d in order))
    strides = [inner[order.index(d)] for d in range(len(size))]
    return made(size, dtype, device)._replace(strides=tuple(strides))


@refuses("empty_permuted")
def refuse_empty_permuted(size: Sequence[Size], order: Sequence[int], **options: Any) -> None:
    check(sorted(order) == list(range(len(size))), f"the physical layout {list(order)} has to name each of {len(size)} dimensions once")


# ---------------------------------------------------------------- counters

rule("arange")(lambda end, *, dtype=None, layout=None, device=None, pin_memory=None: _range(0, end, 1, dtype, device))
rule("arange.start")(lambda start, end, *, dtype=None, layout=None, device=None, pin_memory=None: _range(start, end, 1, dtype, device))
rule("arange.start_step")(
    lambda start, end, step=1, *, dtype=None, layout=None, device=None, pin_memory=None: _range(start, end, step, dtype, device))


def _range(start: Any, end: Any, step: Any, dtype: torch.dtype | None, device: Any) -> Spec:
    check(type(step) is Expr or step != 0, "step must be nonzero")
    if dtype is None:
        kinds = [scalar_dtype(v) for v in (start, end, step)]
        dtype = torch.int64 if all(not k.is_floating_point for k in kinds) else torch.get_default_dtype()
    if dtype is torch.int64 and _cut(step) != 0:       # of 64-bit integers eager counts what is cast
        start, end, step = map(_cut, (start, end, step))
    if all(_is_integer(v) for v in (start, end, step)):
        count = (end - start) if type(step) is int and step == 1 else (end - start + step + (-1 if _positive(step) else 1)) // step
    else:
        steps = truediv(end - start, step)
        must(ge(steps, 0), "upper bound and lower bound inconsistent with step sign")
        count = ceil(steps)
    must(ge(count, 0), "upper bound and lower bound inconsistent with step sign")
    return make_spec((count,), dtype, device_of(device, default_device()))


def _cut(value: Any) -> Any:
    return int(value) if type(value) is float else value


def _is_integer(value: Any) -> bool:
    return value.dtype == "i64" if type(value) is Expr else isinstance(value, int)


def _positive(step: Any) -> bool:
    return ask(gt(step, 0)) if type(step) is Expr else step > 0


@refuses("arange.start_step")
def refuse_arange_step(start: Any, end: Any, step: Any = 1, **options: Any) -> None:
    if all(known(v) for v in (start, end, step)):
        if step == 0:
            raise ValueError("step must be nonzero")
        check((end - start) * step >= 0, "upper bound and lower bound inconsistent with step sign")


def counted(out: Any, start: Any, step: Any) -> Any:
    """start + i*step.  Integers in 64 bits; floats in double before they are rounded, as eager does it."""
    dtype = SHORT.get(out.dtype, "")
    if not supported(dtype) or dtype == "bool":
        return NotImplemented
    if is_float(dtype):
        wide = "f64"
        return Operand.lazy(out, lambda i: to(S.add(number(start, wide), S.mul(number(i[0], wide), number(step, wide))), dtype))
    return Operand.lazy(out, lambda i: to(as_expr(i[0] * _cut(step) + _cut(start)), dtype))


lowering("arange.start_step")(lambda b, out, start, end, step=1, **_: counted(out, start, step))
lowering("arange.start")(lambda b, out, start, end, **_: counted(out, start, 1))
lowering("arange")(lambda b, out, end, **_: counted(out, 0, 1))
lowering("prims::iota")(lambda b, out, length, *, start, step, **_: counted(out, start, step))
rule("linspace")(lambda start, end, steps, *, dtype=None, layout=None, device=None, pin_memory=None: made((steps,), dtype, device))


@lowering("linspace")
def lower_linspace(b: Builder, out: Any, start: Any, end: Any, steps: Any, **_: Any) -> Any:
    """Counted from the nearer end, as eager does."""
    dtype = SHORT.get(out.dtype, "")
    if not is_float(dtype) or any(isinstance(v, (Expr, Operand)) for v in (start, end, steps)):
        return NotImplemented
    kind = compute_dtype(dtype)
    step = (end - start) / (steps - 1) if steps > 1 else 0.0

    def element(i: Any) -> Expr:
        at = as_expr(i[0])
        up = S.add(literal(start, kind), S.mul(to(at, kind), literal(step, kind)))
        down = S.sub(literal(end, kind), S.mul(to(S.sub(steps - 1, at), kind), literal(step, kind)))
        return to(S.where(S.lt(at, (steps + 1) // 2), up, down), dtype)
    return Operand.lazy(out, element)


rule("logspace")(
    lambda start, end, steps, base=10.0, *, dtype=None, layout=None, device=None, pin_memory=None: made((steps,), dtype, device))


@rule("range range.step")
def range_(start: Any, end: Any, step: Any = 1, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    """The end is part of it."""
    whole = all(_is_integer(v) for v in (start, end, step))
    count = (end - start) // step + 1 if whole else floor(truediv(end - start, step)) + 1
    return made((count,), dtype, device)


rule("bartlett_window bartlett_window.periodic blackman_window blackman_window.periodic hann_window hann_window.periodic hamming_window "
     "hamming_window.periodic hamming_window.periodic_alpha hamming_window.periodic_alpha_beta kaiser_window kaiser_window.periodic "
     "kaiser_window.beta fft_fftfreq")(
    lambda length, *numbers, dtype=None, layout=None, device=None, pin_memory=None: made((length,), dtype, device))
rule("fft_rfftfreq")(lambda n, d=1.0, *, dtype=None, layout=None, device=None, pin_memory=None: made((n // 2 + 1,), dtype, device))


# ---------------------------------------------------------------- matrices

rule("eye")(lambda n, *, dtype=None, layout=None, device=None, pin_memory=None: made((n, n), dtype, device))
rule("eye.m")(lambda n, m, *, dtype=None, layout=None, device=None, pin_memory=None: made((n, m), dtype, device))


@refuses("eye")
def refuse_eye(n: Size, **options: Any) -> None:
    within(n, 0, None, f"n must be greater or equal to 0, got {n}")


@refuses("eye.m")
def refuse_eye_m(n: Size, m: Size, **options: Any) -> None:
    refuse_eye(n)
    within(m, 0, None, f"m must be greater or equal to 0, got {m}")


@lowering("eye eye.m")
def lower_eye(b: Builder, out: Any, *_: Any, **__: Any) -> Any:
    dtype = SHORT.get(out.dtype, "")
    if not supported(dtype):
        return NotImplemented
    return Operand.lazy(out, lambda i: S.where(S.eq(as_expr(i[0]), as_expr(i[1])), literal(1, dtype), literal(0, dtype)))


@rule("tril_indices")
def tril_indices(row: Size, col: Size, offset: Size = 0, *, dtype=torch.int64, layout=None, device=None, pin_memory=None) -> Spec:
    return made((2, _below(row, col, offset)), dtype or torch.int64, device)


@rule("triu_indices")
def triu_indices(row: Size, col: Size, offset: Size = 0, *, dtype=torch.int64, layout=None, device=None, pin_memory=None) -> Spec:
    return made((2, row * col - _below(row, col, offset - 1)), dtype or torch.int64, device)


def _below(rows: Size, columns: Size, offset: Size) -> Size:
    """How many places (i, j) there are with j - i <= offset: rows that grow by one, then rows that are whole."""
    first = clamp_size(-offset, 0, rows)
    whole = clamp_size(columns - offset - 1, first, rows)       # the first row that is whole
    growing = whole - first
    return growing * (2 * (first + offset + 1) + growing - 1) // 2 + (rows - whole) * columns


@refuses("tril_indices triu_indices")
def refuse_triangle_indices(row: Size, col: Size, offset: Size = 0, **options: Any) -> None:
    within(row, 0, None, f"row must be non-negative, got {row}")
    within(col, 0, None, f"col must be non-negative, got {col}")
