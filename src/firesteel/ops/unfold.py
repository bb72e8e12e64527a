"""Patches of images as columns (`im2col`, the unfold of images), and the sum of columns back into images (`col2im`): loops on the CPU."""
from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from firesteel.graph.rules.base import check
from firesteel.graph.rules.refusals import within
from firesteel.graph.sizes import must_match
from firesteel.graph.spec import Spec, contiguous_strides, fresh
from firesteel.loops.lower.build import Builder, choose, fits
from firesteel.loops.lower.value import Operand, TensorSpec
from firesteel.loops.scalars import S, compute_dtype, is_float, literal
from firesteel.ops.block import device_rule, lowering, refuses
from firesteel.ops.pooling import pooled
from firesteel.ops.views import lower_view
from firesteel.sym.expr import Expr, Size, and_, ge, lt, product
from firesteel.targets import on_gpu

MOST_TERMS = 25     # columns that are added for one element: each is a load in the kernel's text


@device_rule("im2col")
def im2col(x: Spec, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Spec:
    return fresh(x, (*x.shape[:-3], x.shape[-3] * product(kernel), product(_places(x, kernel, dilation, padding, stride))))


def _places(x: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> tuple[Size, ...]:
    return pooled(x, 2, kernel, stride, padding, dilation, False)[-2:]


@device_rule("col2im")
def col2im(x: Spec, size: Sequence[Size], kernel: Any, dilation: Any, padding: Any, stride: Any) -> Spec:
    return fresh(x, (*x.shape[:-2], x.shape[-2] // product(kernel), *size))


def _window(name: str, x: Spec, kernel: Any, dilation: Any, padding: Any, stride: Any) -> None:
    check(x.dtype is torch.bool or x.dtype.is_floating_point or x.dtype.is_complex, f'"{name}_out_cpu" not implemented for {x.dtype}')
    for given, what, least in ((kernel, "kernel", 1), (dilation, "dilation", 1), (stride, "stride", 1), (padding, "padding", 0)):
        check(len(given) == 2, f"It is expected {what} equals to 2, but got size {len(given)}")
        for n in given:
            within(n, least, None, f"{what} should be at least {least}, but got {list(given)}")


@refuses("im2col")
def refuse_im2col(x: Spec, kernel: Any, dilation: Any, padding: Any, stride: Any) -> None:
    _window("im2col", x, kernel, dilation, padding, stride)
    check(len(x.shape) in (3, 4) and 0 not in x.shape[-3:], f"Expected a 3D or 4D tensor without empty dimensions, but got {list(x.shape)}")
    for n in _places(x, kernel, dilation, padding, stride):
        within(n, 1, None, f"Given input with spatial size {list(x.shape[-2:])}, the array of sliding blocks would have no element")


@refuses("col2im")
def refuse_col2im(x: Spec, size: Sequence[Size], kernel: Any, dilation: Any, padding: Any, stride: Any) -> None:
    _window("col2im", x, kernel, dilation, padding, stride)
    check(len(size) == 2 and len(x.shape) in (2, 3) and 0 not in x.shape[-2:], f"Expected 2D or 3D (batch mode) columns, but got {list(x.shape)}")
    must_match(x.shape[-2] % product(kernel), 0, f"Expected size of input's dimension 1 to be divisible by {product(kernel)}, but got {x.shape[-2]}")
    blocks = product(_places(fresh(x, (1, *size)), kernel, dilation, padding, stride))
    must_match(x.shape[-1], blocks, f"Given output_size={list(size)}, expected {blocks} sliding blocks, but got {x.shape[-1]}")


def _loops(out: Any, x: Operand, *numbers: Any) -> bool:
    return fits(out, x) and (is_float(x.dtype) or x.dtype == "bool") and not on_gpu(out) and all(type(n) is int for row in numbers for n in row)


@lowering("im2col")
def lower_im2col(b: Builder, out: Any, x: Operand, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """One axis for each of channel, row and column in the kernel, row and column of the patch."""
    if not _loops(out, x, kernel, dilation, padding, stride):
        return NotImplemented
    x, places = b.readable(x), _places(x, kernel, dilation, padding, stride)
    shape = (*x.shape[:-2], *kernel, *places)

    def element(i: Any) -> Expr:
        at = [p * s - pad + k * d for p, s, pad, k, d in zip(i[-2:], stride, padding, i[-4:-2], dilation)]
        return choose(_inside(at, x.shape[-2:]) if any(padding) else True, x, (*i[:-4], *at), literal(0, x.dtype), x.dtype)
    columns = b.map(TensorSpec(shape, contiguous_strides(shape), 0, out.dtype, out.device), element)
    return lower_view(b, out, columns)


def _inside(at: Sequence[Size], sizes: Sequence[Size]) -> Any:
    return functools.reduce(and_, [and_(ge(p, 0), lt(p, n)) for p, n in zip(at, sizes)])


@lowering("col2im")
def lower_col2im(b: Builder, out: Any, x: Operand, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """Each element of the image adds what the patches have of it."""
    if not _loops(out, x, kernel, dilation, padding, stride) or set(dilation) != {1} or not is_float(x.dtype):
        return NotImplemented
    reach = [-(-k // s) for k, s in zip(kernel, stride)]
    if product(reach) > MOST_TERMS:
        return NotImplemented
    kind, places = compute_dtype(x.dtype), _places(out, kernel, dilation, padding, stride)
    shape = (*out.shape[:-2], *kernel, *places)
    x = b.readable(x)
    columns = lower_view(b, TensorSpec(shape, contiguous_strides(shape), 0, out.dtype, out.device), x)

    def element(i: Any) -> Expr:
        padded = [at + pad for at, pad in zip(i[-2:], padding)]
        terms = []
        for back in itertools.product(*(reversed(range(r)) for r in reach)):
            patch = [p // s - n for p, s, n in zip(padded, stride, back)]
            inner = [p - w * s for p, w, s in zip(padded, patch, stride)]
            terms.append(choose(and_(_inside(patch, places), _inside(inner, kernel)), columns, (*i[:-2], *inner, *patch), literal(0, kind), kind))
        return functools.reduce(S.add, terms, literal(0, kind))
    return b.map(out, element)
