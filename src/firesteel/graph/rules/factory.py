"""Rules of factories: tensors made from sizes and numbers."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firesteel.graph.rules.base import check, clamp_size, rule, scalar_dtype
from firesteel.graph.sizes import ask, must
from firesteel.graph.spec import Shape, Spec, contiguous_strides, device_of, fresh, like, make_spec
from firesteel.sym.expr import Expr, Size, ceil, floor, ge, gt, truediv

CPU = torch.device("cpu")


def _made(shape: Sequence[Size], dtype: torch.dtype | None, device: Any, memory_format: torch.memory_format | None = None) -> Spec:
    shape = as_sizes(shape)
    spec = make_spec(shape, dtype or torch.get_default_dtype(), device_of(device, default_device()))
    return spec if memory_format is None else like(spec, memory_format=memory_format)


def as_sizes(shape: Sequence[Size]) -> Shape:
    """A shape that the program computed: no size may be negative."""
    shape = tuple(shape)
    for size in shape:
        if type(size) is Expr or size < 0:
            must(ge(size, 0), f"Trying to create tensor with negative dimension {size}: {list(shape)}")
    return shape


def default_device() -> torch.device:
    return CPU


@rule("zeros ones empty.memory_format rand randn rand.generator randn.generator")
def zeros(size: Sequence[Size], *, generator=None, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> Spec:
    return _made(size, dtype, device, memory_format)


@rule("empty_strided")
def empty_strided(size: Sequence[Size], stride: Sequence[Size], *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return _made(size, dtype, device)._replace(strides=tuple(stride))


@rule("empty_permuted")
def empty_permuted(size: Sequence[Size], order: Sequence[int], *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    inner = contiguous_strides(tuple(size[d] for d in order))
    strides = [inner[order.index(d)] for d in range(len(size))]
    return _made(size, dtype, device)._replace(strides=tuple(strides))


@rule("full")
def full(size: Sequence[Size], value: Any, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return _made(size, dtype or scalar_dtype(value), device)


@rule("scalar_tensor")
def scalar_tensor(value: Any, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return _made((), dtype, device)


@rule("zeros_like ones_like empty_like rand_like randn_like rand_like.generator randn_like.generator")
def zeros_like(x: Spec, *, generator=None, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> Spec:
    return like(x, dtype=dtype, device=device, memory_format=memory_format)


@rule("full_like")
def full_like(x: Spec, value: Any, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> Spec:
    return like(x, dtype=dtype, device=device, memory_format=memory_format)


@rule("randint_like randint_like.generator")
def randint_like(x: Spec, high: Any, *, generator=None, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> Spec:
    return like(x, dtype=dtype, device=device, memory_format=memory_format)


@rule("randint_like.low_dtype randint_like.low_generator_dtype")
def randint_like_low(x: Spec, low: Any, high: Any, *, generator=None, dtype=None, layout=None, device=None, pin_memory=None,
                     memory_format=None) -> Spec:
    return like(x, dtype=dtype, device=device, memory_format=memory_format)


@rule("new_empty new_zeros new_ones")
def new_empty(x: Spec, size: Sequence[Size], *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return make_spec(as_sizes(size), dtype or x.dtype, device_of(device, x.device))


@rule("new_full")
def new_full(x: Spec, size: Sequence[Size], value: Any, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return make_spec(as_sizes(size), dtype or x.dtype, device_of(device, x.device))


@rule("new_empty_strided")
def new_empty_strided(x: Spec, size: Sequence[Size], stride: Sequence[Size], *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return Spec(as_sizes(size), tuple(stride), 0, dtype or x.dtype, device_of(device, x.device))


# ---------------------------------------------------------------- ranges

def _range(start: Any, end: Any, step: Any, dtype: torch.dtype | None, device: Any) -> Spec:
    check(type(step) is Expr or step != 0, "step must be nonzero")
    if dtype is None:
        kinds = [scalar_dtype(v) for v in (start, end, step)]
        dtype = torch.int64 if all(not k.is_floating_point for k in kinds) else torch.get_default_dtype()
    if all(_is_integer(v) for v in (start, end, step)):
        count = (end - start) if type(step) is int and step == 1 else (end - start + step + (-1 if _positive(step) else 1)) // step
    else:
        count = ceil(truediv(end - start, step))
    must(ge(count, 0), "upper bound and lower bound inconsistent with step sign")
    return make_spec((count,), dtype, device_of(device, default_device()))


def _positive(step: Any) -> bool:
    return ask(gt(step, 0)) if type(step) is Expr else step > 0


def _is_integer(value: Any) -> bool:
    return value.dtype == "i64" if type(value) is Expr else isinstance(value, int)


@rule("arange")
def arange(end: Any, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return _range(0, end, 1, dtype, device)


@rule("arange.start")
def arange_start(start: Any, end: Any, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return _range(start, end, 1, dtype, device)


@rule("arange.start_step")
def arange_step(start: Any, end: Any, step: Any = 1, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return _range(start, end, step, dtype, device)


@rule("linspace")
def linspace(start: Any, end: Any, steps: Size, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return _made((steps,), dtype, device)


@rule("logspace")
def logspace(start: Any, end: Any, steps: Size, base: float = 10.0, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return _made((steps,), dtype, device)


@rule("range range.step")
def range_(start: Any, end: Any, step: Any = 1, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    """The end is part of it."""
    whole = all(_is_integer(v) for v in (start, end, step))
    count = (end - start) // step + 1 if whole else floor(truediv(end - start, step)) + 1
    return _made((count,), dtype, device)


@rule("bartlett_window bartlett_window.periodic blackman_window blackman_window.periodic hann_window hann_window.periodic hamming_window "
      "hamming_window.periodic hamming_window.periodic_alpha hamming_window.periodic_alpha_beta kaiser_window kaiser_window.periodic "
      "kaiser_window.beta fft_fftfreq")
def window(length: Size, *numbers: Any, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return _made((length,), dtype, device)


@rule("fft_rfftfreq")
def rfftfreq(n: Size, d: float = 1.0, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return _made((n // 2 + 1,), dtype, device)


@rule("eye")
def eye(n: Size, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return _made((n, n), dtype, device)


@rule("eye.m")
def eye_m(n: Size, m: Size, *, dtype=None, layout=None, device=None, pin_memory=None) -> Spec:
    return _made((n, m), dtype, device)


@rule("tril triu")
def tril(x: Spec, diagonal: int = 0) -> Spec:
    check(len(x.shape) >= 2, "tril: input tensor must have at least 2 dimensions")
    return fresh(x)


def _below(rows: Size, columns: Size, offset: Size) -> Size:
    """How many places (i, j) there are with j - i <= offset: rows that grow by one, then rows that are whole."""
    first = clamp_size(-offset, 0, rows)
    whole = clamp_size(columns - offset - 1, first, rows)       # the first row that is whole
    growing = whole - first
    return growing * (2 * (first + offset + 1) + growing - 1) // 2 + (rows - whole) * columns


@rule("tril_indices")
def tril_indices(row: Size, col: Size, offset: Size = 0, *, dtype=torch.int64, layout=None, device=None, pin_memory=None) -> Spec:
    return _made((2, _below(row, col, offset)), dtype or torch.int64, device)


@rule("triu_indices")
def triu_indices(row: Size, col: Size, offset: Size = 0, *, dtype=torch.int64, layout=None, device=None, pin_memory=None) -> Spec:
    return _made((2, row * col - _below(row, col, offset - 1)), dtype or torch.int64, device)
