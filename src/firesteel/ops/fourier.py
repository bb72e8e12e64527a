"""Fourier transforms: library calls, whose layouts depend on the order of strides."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from firesteel.graph.rules.base import wrap_dim
from firesteel.graph.spec import Spec, contiguous_strides, fresh, like, sort_dims
from firesteel.ops.block import operator, rule
from firesteel.sym.expr import Size
from firesteel.targets import on_host

operator("stft.* _fft_*", library=True)


def _complex_steps(x: Spec, dims: list[int]) -> Spec:
    """Transforms from complex to complex: all dimensions at once on the CPU, up to three at a time by the GPU's library."""
    while dims:
        dims = _slowest_first(dims, x)
        now = dims if on_host(x) else dims[-3:]
        x, dims = _transformed(x, x.shape, now, x.dtype), dims[:len(dims) - len(now)]
    return x


rule("_fft_c2c")(lambda x, dim, normalization, forward: _complex_steps(x, [wrap_dim(d, len(x.shape)) for d in dim]) if dim else like(x))


def _slowest_first(dims: Sequence[int], x: Spec) -> list[int]:
    """Dimensions by falling stride, those of one stride as they were."""
    return sort_dims(list(dims)[::-1], x.strides)[::-1]


def _untransformed(ndim: int, dims: Sequence[int]) -> list[int]:
    """The other dimensions in the order in which the library's partition leaves them: it fills each gap from the end."""
    order, first, last = list(range(ndim)), 0, ndim
    while first < last:
        if order[first] not in dims:
            first += 1
            continue
        last -= 1
        order[first], order[last] = order[last], order[first]
    return order[:first]


def _transformed(x: Spec, shape: Sequence[Size], dims: Sequence[int], dtype: torch.dtype) -> Spec:
    """Batch dimensions in the order of their strides, then the transformed ones: so the libraries lay out their results."""
    order = [*_slowest_first(_untransformed(len(shape), dims), x), *dims]
    strides = dict(zip(order, contiguous_strides(tuple(shape[d] for d in order))))
    return Spec(tuple(shape), tuple(strides[d] for d in range(len(shape))), 0, dtype, x.device)


def _at_once(dims: list[int]) -> bool:
    """Does the GPU's library make real transforms of these dimensions in one step?"""
    return len(dims) <= 3 and dims[:2] != [0, 1]


@rule("_fft_r2c")
def real_to_complex(x: Spec, dim: Sequence[int], normalization: int, onesided: bool) -> Spec:
    """The last of `dim` is the one that is halved; the GPU's library transforms it before the others, or all in the order given."""
    dims = [wrap_dim(d, len(x.shape)) for d in dim]
    *others, last = dims
    shape = [n // 2 + 1 if d == last and onesided else n for d, n in enumerate(x.shape)]
    dtype = x.dtype.to_complex()
    if on_host(x):
        return _transformed(x, shape, [*_slowest_first(others, x), last], dtype)
    return _transformed(x, shape, dims, dtype) if _at_once(dims) else _complex_steps(_transformed(x, shape, [last], dtype), others)


@rule("_fft_c2r")
def complex_to_real(x: Spec, dim: Sequence[int], normalization: int, last_dim_size: Size) -> Spec:
    """All dimensions but the last go from complex to complex first; in one step the GPU's library reads a contiguous copy."""
    dims = [wrap_dim(d, len(x.shape)) for d in dim]
    shape = [last_dim_size if d == dims[-1] else n for d, n in enumerate(x.shape)]
    if not on_host(x) and _at_once(dims):
        return _transformed(fresh(x), shape, dims, x.dtype.to_real())
    return _transformed(_complex_steps(x, dims[:-1]), shape, dims[-1:], x.dtype.to_real())
