"""Pooling and its gradients: averages and maxima of small windows are loops, of which each element reads its window; the rest are library calls."""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from firesteel.graph.meta import as_second
from firesteel.graph.rules.base import check, each, suggested
from firesteel.graph.rules.refusals import same_shape, within
from firesteel.graph.sizes import less, must_match
from firesteel.graph.spec import Shape, Spec, channels_last_strides, fresh, is_channels_last, is_contiguous
from firesteel.loops.lower.build import Builder, choose, fits
from firesteel.loops.lower.value import Operand
from firesteel.loops.scalars import S, compute_dtype, is_float, literal, number
from firesteel.ops.block import device_rule, lowering, operator, refuses, rule, shape
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size, and_, as_expr, ge, lt, max_, min_, product
from firesteel.targets import on_gpu

operator("max_pool1d_with_indices.* max_pool2d_with_indices.* max_pool3d_with_indices.* adaptive_max_pool1d.* "
         "adaptive_max_pool2d.* adaptive_max_pool3d.* fractional_max_pool2d.* fractional_max_pool3d.*", decides=True)
operator("max_pool2d_with_indices.* max_pool2d_with_indices_backward.* max_pool3d_with_indices.* "
         "max_pool3d_with_indices_backward.* avg_pool2d.* avg_pool2d_backward.* avg_pool3d.* avg_pool3d_backward.* "
         "adaptive_* _adaptive_* max_unpool* fractional_max_pool*", library=True)


def pooled_size(size: Size, kernel: Size, stride: Size, padding: Size, dilation: Size, ceil_mode: bool) -> Size:
    reach = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return reach // stride + 1
    out = -(-reach // stride) + 1
    return out if less((out - 1) * stride, size + padding) else out - 1


def pooled(x: Spec, n: int, kernel, stride, padding, dilation, ceil_mode: bool) -> tuple[Size, ...]:
    kernel = each(kernel, n)
    stride, padding, dilation = each(stride, n) if stride else kernel, each(padding, n), each(dilation, n)
    check(len(x.shape) in (n + 1, n + 2), f"Expected {n + 1}D or {n + 2}D tensor, but got: {list(x.shape)}")
    spatial = x.shape[-n:]
    return (*x.shape[:-n], *(pooled_size(s, k, st, p, d, ceil_mode) for s, k, st, p, d in zip(spatial, kernel, stride, padding, dilation)))


def pool(n: int, name: str, x: Spec, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1) -> None:
    """A window's numbers: (kernel, stride, padding, dilation) of `n` dimensions, each given once or for each."""
    check(x.dtype is not torch.bool and not x.dtype.is_complex, f'"{name}" not implemented for {x.dtype}')
    kernel, padding, dilation = each(kernel, n), each(padding, n), each(dilation, n)
    stride = each(stride, n) if stride != () and stride != [] else kernel
    for given, what in ((kernel, "kernel_size"), (stride, "stride"), (padding, "padding"), (dilation, "dilation")):
        check(len(given) == n, f"{name}: {what} must either be a single int, or a tuple of {n} ints")
    for k, s, p, d in zip(kernel, stride, padding, dilation):
        within(k, 1, None, "kernel size should be greater than zero")
        within(s, 1, None, "stride should not be zero")
        within(d, 1, None, "dilation should be greater than zero")
        within(p, 0, None, f"pad must be non-negative, but got pad: {p}")
        within(2 * p, None, d * (k - 1) + 1, f"pad should be at most half of effective kernel size, but got pad={p}")
    check(0 not in x.shape[-n - 1:], f"Expected input's non-batch dimensions to have positive length, but input has a shape of {list(x.shape)}")


def large_enough(out: Spec, n: int, x: Spec) -> None:
    for size in out.shape[-n:]:
        within(size, 1, None, f"Given input size: {list(x.shape)}. Calculated output size: {list(out.shape)}. Output size is too small")


def _max_pool(n: int) -> None:
    @device_rule(f"max_pool{n}d_with_indices")
    def max_pool(x: Spec, kernel, stride=(), padding=0, dilation=1, ceil_mode: bool = False) -> tuple[Spec, Spec]:
        shape = pooled(x, n, kernel, stride, padding, dilation, ceil_mode)
        if n == 3 and len(shape) == 4:
            out = fresh(x, shape)
            if not is_contiguous(x) and is_channels_last(x._replace(shape=(1, *x.shape), strides=(0, *x.strides))):     # a batch of one
                out = out._replace(strides=channels_last_strides((1, *shape))[1:])
        else:
            out = suggested(x, shape)
        return out, out.to(torch.int64)

    @refuses(f"max_pool{n}d_with_indices")
    def refuse_max_pool(x: Spec, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> None:
        pool(n, f"max_pool{n}d", x, kernel, stride, padding, dilation)
        large_enough(max_pool(x, kernel, stride, padding, dilation, ceil_mode)[0], n, x)


def _avg_pool(n: int, made: Callable[..., Spec]) -> None:
    """In three dimensions the results are contiguous, whatever the input's layout."""
    @device_rule(f"avg_pool{n}d")
    def avg_pool(x: Spec, kernel, stride=(), padding=0, ceil_mode: bool = False, include: bool = True, divisor=None) -> Spec:
        return made(x, pooled(x, n, kernel, stride, padding, 1, ceil_mode))

    @refuses(f"avg_pool{n}d")
    def refuse_avg_pool(x: Spec, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False, include: bool = True,
                        divisor: Any = None) -> None:
        check(divisor is None or divisor != 0, "divisor must be not zero")
        pool(n, f"avg_pool{n}d", x, kernel, stride, padding)
        large_enough(avg_pool(x, kernel, stride, padding, ceil_mode), n, x)

    @device_rule(f"avg_pool{n}d_backward")
    def avg_pool_backward(grad: Spec, x: Spec, *rest: Any) -> Spec:
        return made(x)

    @refuses(f"avg_pool{n}d_backward")
    def refuse_avg_pool_backward(grad: Spec, x: Spec, *window: Any) -> None:
        refuse_avg_pool(x, *window)
        same_shape(grad.shape, avg_pool(x, *window).shape, f"Expected a gradient of the size of the result, got {list(grad.shape)}")


for _n, _made in ((2, suggested), (3, fresh)):
    _max_pool(_n)
    _avg_pool(_n, _made)


MOST_TERMS = 16     # elements that are read for one: each is a load in the kernel's text


@dataclass(frozen=True)
class _Window:
    """The windows of an average along one dimension of `size` elements, of which there are `count`."""
    size: Size
    count: Size
    kernel: int
    stride: int
    padding: int
    ceil_mode: bool
    include: bool       # does padding count?

    def places(self, window: Size) -> list[tuple[Size, Any]]:
        """The elements of a window, and whether each is there."""
        start = window * self.stride - self.padding
        if not self.padding and not self.ceil_mode:
            return [(start + k, True) for k in range(self.kernel)]
        return [(start + k, and_(ge(start + k, 0), lt(start + k, self.size))) for k in range(self.kernel)]

    def windows(self, place: Size) -> list[tuple[Size, Any]]:
        """The windows that may contain an element, in order, and whether each is there and does."""
        last = (place + self.padding) // self.stride
        found = [last - back for back in reversed(range(-(-self.kernel // self.stride)))]
        return [(w, and_(and_(ge(w, 0), lt(w, self.count)), lt(place, w * self.stride - self.padding + self.kernel))) for w in found]

    def elements(self, window: Size) -> Size:
        """How many an average over it counts; not 0 for a window that is not there."""
        if not self.ceil_mode and (self.include or not self.padding):
            return self.kernel
        start = window * self.stride - self.padding
        end = min_(start + self.kernel, self.size + (self.padding if self.include else 0))
        return max_(end - (start if self.include else max_(start, 0)), 1)


def _windows(sizes: Sequence[Size], counts: Sequence[Size], kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
             count_include_pad: bool = True, divisor_override: Any = None) -> list[_Window] | None:
    n = len(sizes)
    numbers = [each(v, n) for v in (kernel_size, stride or kernel_size, padding)]
    if not all(type(v) is int for row in numbers for v in row):
        return None
    return [_Window(s, c, k, st, p, ceil_mode, count_include_pad) for s, c, k, st, p in zip(sizes, counts, *numbers)]


def _summed(terms: Iterable[Expr], kind: str) -> Expr:
    return functools.reduce(S.add, terms, literal(0, kind))


def _average(n: int) -> None:
    def divided(value: Expr, windows: list[_Window], at: Sequence[Size], divisor: Any) -> Expr:
        return S.div(value, number(divisor or product([w.elements(i) for w, i in zip(windows, at)]), value.dtype))

    @lowering(f"avg_pool{n}d")
    def lower_avg_pool(b: Builder, out: Any, x: Operand, *options: Any, **named: Any) -> Any:
        windows = _windows(x.shape[-n:], out.shape[-n:], *options, **named)
        if windows is None or product([w.kernel for w in windows]) > MOST_TERMS or not fits(out, x) or not is_float(x.dtype):
            return NotImplemented
        x, kind, divisor = b.readable(x), compute_dtype(x.dtype), _divisor(options[5:], named)

        def element(i: Any) -> Expr:
            found = itertools.product(*(w.places(at) for w, at in zip(windows, i[-n:])))
            total = _summed((_there(x, i[:-n], places, kind) for places in found), kind)
            return divided(total, windows, i[-n:], divisor)
        return b.map(out, element)

    @lowering(f"avg_pool{n}d_backward")
    def lower_avg_pool_backward(b: Builder, out: Any, grad: Operand, x: Operand, *options: Any, **named: Any) -> Any:
        windows = _windows(x.shape[-n:], grad.shape[-n:], *options, **named)
        if windows is None or product([-(-w.kernel // w.stride) for w in windows]) > MOST_TERMS or not fits(out, grad) or not is_float(x.dtype):
            return NotImplemented
        grad, kind, divisor = b.readable(grad), compute_dtype(x.dtype), _divisor(options[5:], named)

        def element(i: Any) -> Expr:
            found = itertools.product(*(w.windows(at) for w, at in zip(windows, i[-n:])))
            return _summed((divided(_there(grad, i[:-n], places, kind), windows, [at for at, _ in places], divisor) for places in found), kind)
        return b.map(out, element)


def _divisor(options: Sequence[Any], named: dict[str, Any]) -> Any:
    return options[0] if options else named.get("divisor_override")


def _there(x: Operand, outer: Any, places: Sequence[tuple[Size, Any]], kind: str, other: float = 0) -> Expr:
    """The element at some places of the last dimensions, `other` where one is not there."""
    inside = functools.reduce(and_, [there for _, there in places])
    return choose(inside, x, (*outer, *(at for at, _ in places)), literal(other, kind), kind)


_average(2)
_average(3)


def _maximum(n: int) -> None:
    def windows_of(out: Any, x: Operand, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> Any:
        """None where loops cannot do it.  Of three dimensions with channels last eager counts places in its own way where all elements are -inf."""
        dense = is_float(x.dtype) and all(d == 1 for d in each(dilation, n)) and not on_gpu(out) and (n == 2 or x.spec.strides[-1] == 1)
        return _windows(x.shape[-n:], out.shape[-n:], kernel, stride, padding, ceil_mode) if dense else None

    @lowering(f"max_pool{n}d_with_indices")
    def lower_max_pool(b: Builder, out: Any, x: Operand, *options: Any, **named: Any) -> Any:
        """As eager counts: the last NaN of a window, else the first of its largest elements."""
        windows = windows_of(out[0], x, *options, **named)
        if windows is None or product([w.kernel for w in windows]) > MOST_TERMS or not fits(out[0], x):
            return NotImplemented
        x, kind = b.readable(x), compute_dtype(x.dtype)

        def elements(i: Any) -> list[tuple[list[Size], Expr]]:
            """Places in a window, and what is there."""
            found = itertools.product(*(w.places(at) for w, at in zip(windows, i[-n:])))
            return [([at for at, _ in places], _there(x, i[:-n], places, kind, -math.inf)) for places in found]

        def index(i: Any) -> Expr:
            best = literal(-math.inf, kind)
            at = as_expr(_flat([max_(at * w.stride - w.padding, 0) for w, at in zip(windows, i[-n:])], x.shape))
            for places, value in elements(i):
                better = getattr(S, "or")(S.gt(value, best), S.isnan(value))
                best, at = S.where(better, value, best), S.where(better, as_expr(_flat(places, x.shape)), at)
            return at
        values, indices = b.read_only(out)
        return (values and b.map(values, lambda i: functools.reduce(S.max, [value for _, value in elements(i)])), indices and b.map(indices, index))

    @lowering(f"max_pool{n}d_with_indices_backward")
    def lower_max_pool_backward(b: Builder, out: Any, grad: Operand, x: Operand, *options: Any, **named: Any) -> Any:
        """An element takes the gradients of the windows that chose it.  Where neighbours in memory are in one window, lanes would gather, and the
        library is quicker."""
        *window, indices = (*options, *named.values())
        windows = windows_of(grad.spec, x, *window)
        if windows is None or product([-(-w.kernel // w.stride) for w in windows]) > MOST_TERMS or not fits(out, grad, indices) \
                or out.strides[-1] == 1 and windows[-1].stride != 1:
            return NotImplemented
        grad, indices, kind = b.readable(grad), b.readable(indices), compute_dtype(x.dtype)

        def element(i: Any) -> Expr:
            own, outer = as_expr(_flat(i[-n:], x.shape)), i[:-n]
            found = itertools.product(*(w.windows(at) for w, at in zip(windows, i[-n:])))
            return _summed((S.where(S.eq(_there(indices, outer, places, "i64", -1), own), _there(grad, outer, places, kind), literal(0, kind))
                            for places in found), kind)
        return b.map(out, element)


def _flat(places: Sequence[Size], shape: Sequence[Size]) -> Size:
    """The number of an element among those of the last dimensions."""
    total: Size = 0
    for place, size in zip(places, shape[-len(places):]):
        total = total * size + place
    return total


_maximum(2)
_maximum(3)
device_rule("max_pool2d_with_indices_backward max_pool3d_with_indices_backward _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward")(
    lambda grad, x, *rest: suggested(x))
device_rule("_adaptive_avg_pool2d")(lambda x, size: suggested(x, (*x.shape[:-2], *size)))


@refuses("_adaptive_avg_pool2d adaptive_max_pool2d")
def refuse_adaptive_pool2d(x: Spec, size: Sequence[Size]) -> None:
    check(len(size) == 2, "adaptive_pool2d(): output_size must be 2")
    check(len(x.shape) in (3, 4), f"adaptive_pool2d(): Expected 3D or 4D tensor, but got {list(x.shape)}")
    check(0 not in x.shape[1:], f"adaptive_pool2d(): Expected non-zero size for non-batch dimensions, but input has sizes {list(x.shape)}")
    for s in size:
        within(s, 0, None, f"Trying to create tensor with negative dimension {s}")


@device_rule("adaptive_max_pool2d")
def adaptive_max_pool2d(x: Spec, size: Sequence[Size]) -> tuple[Spec, Spec]:
    out = suggested(x, (*x.shape[:-2], *size))
    return out, out.to(torch.int64)


rule("fractional_max_pool3d_backward")(lambda grad, x, *rest, **options: fresh(x))
rule("max_unpool2d")(lambda x, indices, output_size: suggested(x, (*x.shape[:-2], *output_size)))


@refuses("max_unpool2d")
def refuse_max_unpool2d(x: Spec, indices: Spec, output_size: Sequence[Size]) -> None:
    check(indices.dtype is torch.int64, f"elements in indices should be type int64 but got: {indices.dtype}")
    message = f"Expected shape of indices to be same as that of the input tensor ({list(x.shape)})"
    check(len(x.shape) == len(indices.shape), message)
    for a, b in zip(x.shape, indices.shape):
        must_match(a, b, message)
    check(len(output_size) == 2, "There should be exactly two elements (height, width) in output_size")
    check(len(x.shape) in (3, 4), f"Input to max_unpooling2d should be a 3d or 4d Tensor, but got a tensor with {len(x.shape)} dimensions.")


@shape("_adaptive_avg_pool3d")
def adaptive_pool3d(x: Spec, size: Sequence[Size]) -> Shape:
    return *x.shape[:-3], *size


shape("_adaptive_avg_pool3d_backward adaptive_max_pool3d_backward fractional_max_pool2d_backward")(as_second)
shape("adaptive_max_pool3d")(lambda x, size: [adaptive_pool3d(x, size)] * 2)
shape("fractional_max_pool2d fractional_max_pool3d")(lambda x, kernel, size, random: [(*x.shape[:-len(size)], *size)] * 2)
shape("max_unpool3d")(lambda x, indices, size, *rest: (*x.shape[:-3], *size))
