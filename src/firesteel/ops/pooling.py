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
from firesteel.graph.spec import Spec, channels_last_strides, fresh, is_channels_last, is_contiguous
from firesteel.loops.lower.build import Builder, choose, fits
from firesteel.loops.lower.value import Operand
from firesteel.loops.scalars import S, compute_dtype, is_float, literal, number, to
from firesteel.ops.block import device_rule, lowering, operator, refuses, rule, shape
from firesteel.ops.windows import Window, between, fold, in_order, sweep
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
MOST_AT_ONCE = 9    # the same where one dimension after the other is another way


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

    def place(self, window: Size, k: Size) -> tuple[Size, Any, None]:
        """The element k of a window, and whether it is there."""
        at = window * self.stride - self.padding + k
        return at, True if not self.padding and not self.ceil_mode else and_(ge(at, 0), lt(at, self.size)), None

    def places(self, window: Size) -> list[tuple[Size, Any]]:
        return [self.place(window, k)[:2] for k in range(self.kernel)]

    @property
    def overlap(self) -> int:
        """How many windows may contain an element."""
        most = -(-self.kernel // self.stride)
        return min(most, self.count) if isinstance(self.count, int) else most

    def window(self, place: Size, k: Size) -> tuple[Size, Any, None]:
        """The window k of those that may contain an element, in order, and whether it is there and does."""
        if isinstance(self.count, int) and self.overlap == self.count:
            start = k * self.stride - self.padding
            return k, and_(ge(place, start), lt(place, start + self.kernel)), None
        w = (place + self.padding) // self.stride - (self.overlap - 1 - k)
        inside = and_(ge(w, 0), lt(w, self.count))
        return w, and_(inside, lt(place, w * self.stride - self.padding + self.kernel)) if self.kernel % self.stride else inside, None

    @property
    def whole(self) -> bool:
        """Is there one, of all elements?"""
        return self.count == 1 and not self.padding and not self.ceil_mode

    def windows(self, place: Size) -> list[tuple[Size, Any]]:
        return [self.window(place, k)[:2] for k in range(self.overlap)]

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

    def far(b: Builder, out: Any, x: Operand, windows: list[_Window], finish: Callable[[Expr, Any], Expr]) -> Any:
        along = [Window(d - n, w.count, w.kernel, w.place, w.stride > 2) for d, w in enumerate(windows) if (w.kernel, w.stride) != (1, 1)]
        return sweep(b, out, x, along, "sum", finish) if all(w.whole for w in windows) else fold(b, out, x, along, finish)

    @lowering(f"avg_pool{n}d")
    def lower_avg_pool(b: Builder, out: Any, x: Operand, *options: Any, **named: Any) -> Any:
        windows = _windows(x.shape[-n:], out.shape[-n:], *options, **named)
        if windows is None or not fits(out, x) or not is_float(x.dtype):
            return NotImplemented
        x, kind, divisor = b.readable(x), compute_dtype(x.dtype), _divisor(options[5:], named)
        if product([w.kernel for w in windows]) > (MOST_TERMS if on_gpu(out) else MOST_AT_ONCE):
            return NotImplemented if on_gpu(out) else far(b, out, x, windows, lambda value, i: divided(value, windows, i[-n:], divisor))

        def element(i: Any) -> Expr:
            found = itertools.product(*(w.places(at) for w, at in zip(windows, i[-n:])))
            total = _summed((_there(x, i[:-n], places, kind) for places in found), kind)
            return divided(total, windows, i[-n:], divisor)
        return b.map(out, element)

    @lowering(f"avg_pool{n}d_backward")
    def lower_avg_pool_backward(b: Builder, out: Any, grad: Operand, x: Operand, *options: Any, **named: Any) -> Any:
        windows = _windows(x.shape[-n:], grad.shape[-n:], *options, **named)
        if windows is None or not fits(out, grad) or not is_float(x.dtype):
            return NotImplemented
        grad, kind, divisor = b.readable(grad), compute_dtype(x.dtype), _divisor(options[5:], named)
        apart = any(w.overlap > 1 and w.stride > 1 for w in windows)
        if product([w.overlap for w in windows]) > (MOST_TERMS if on_gpu(out) else 3 if apart else MOST_AT_ONCE):
            if on_gpu(out):
                return NotImplemented
            parts = b.map(between(out, grad.shape, kind), lambda i: divided(to(grad.load(i), kind), windows, i[-n:], divisor))
            along = [Window(d - n, w.size, w.overlap, w.window) for d, w in enumerate(windows) if (w.kernel, w.stride) != (1, 1)]
            return fold(b, out, parts, along[::-1])

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
        if windows is None or product([w.overlap for w in windows]) > MOST_TERMS or not fits(out, grad, indices) \
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


def _refuse_adaptive(n: int) -> None:
    @refuses(f"_adaptive_avg_pool{n}d adaptive_max_pool{n}d")
    def refuse_adaptive_pool(x: Spec, size: Sequence[Size]) -> None:
        check(len(size) == n, f"adaptive_pool{n}d(): output_size must be {n}")
        check(len(x.shape) in (n + 1, n + 2), f"adaptive_pool{n}d(): Expected {n + 1}D or {n + 2}D tensor, but got {list(x.shape)}")
        check(0 not in x.shape[-n - 1:], f"adaptive_pool{n}d(): Expected non-zero size for non-batch dimensions, but input has sizes {list(x.shape)}")
        for s in size:
            within(s, 0, None, f"Trying to create tensor with negative dimension {s}")

    @refuses(f"_adaptive_avg_pool{n}d_backward")
    def refuse_adaptive_backward(grad: Spec, x: Spec) -> None:
        same_shape(grad.shape[:-n], x.shape[:-n], f"Expected a gradient of as many images and channels as the input, got {list(grad.shape)}")
        check(0 not in grad.shape[-n - 1:], f"Expected grad_output to have non-zero sizes, got {list(grad.shape)}")


_refuse_adaptive(2)
_refuse_adaptive(3)


@device_rule("adaptive_max_pool2d")
def adaptive_max_pool2d(x: Spec, size: Sequence[Size]) -> tuple[Spec, Spec]:
    out = suggested(x, (*x.shape[:-2], *size))
    return out, out.to(torch.int64)



# ---------------------------------------------------------------- averages of windows whose sizes follow from the results

@dataclass(frozen=True)
class _Share:
    """One dimension of `size` elements, of which each of `count` results has a share; neighbours' shares may overlap.  The results that have a share
    in an element are found in the same way, with the two numbers exchanged."""
    size: Size
    count: Size

    @property
    def even(self) -> int | None:
        """The size of each share, where all are the same."""
        known = isinstance(self.size, int) and isinstance(self.count, int) and self.size % self.count == 0
        return self.size // self.count if known else None       # type: ignore[return-value]

    def start(self, result: Size) -> Size:
        return result * self.even if self.even else result * self.size // self.count

    def end(self, result: Size) -> Size:
        return (result + 1) * self.even if self.even else ((result + 1) * self.size + (self.count - 1)) // self.count

    @property
    def length(self) -> Size:
        """Of the largest share."""
        if isinstance(self.size, int) and isinstance(self.count, int):
            return self.even or max(self.end(at) - self.start(at) for at in range(self.count))
        return (self.size + (self.count - 1)) // self.count + 1

    def place(self, result: Size, k: Size) -> tuple[Size, Any, None]:
        at = self.start(result) + k
        return at, True if self.even else lt(at, self.end(result)), None

    def window(self, dim: int) -> Window:
        return Window(dim, self.count, self.length, self.place, self.even != 1)


def _shares(b: Builder, out: Any, x: Operand, n: int, finish: Callable[[Expr, Any], Expr], shrinks: bool, reduction: str = "sum") -> Operand:
    shares = [_Share(s, c) for s, c in zip(x.shape[-n:], out.shape[-n:])]
    windows = [share.window(d - n) for d, share in enumerate(shares)]
    if all(s.count == 1 for s in shares):
        return sweep(b, out, x, windows, reduction, finish)
    changed = [w for w, s in zip(windows, shares) if s.size != s.count]
    return fold(b, out, x, in_order(changed or windows[-1:], x.shape, shrinks), finish, reduction)


def _adaptive(n: int) -> None:
    def divided(value: Expr, sizes: Sequence[Size], counts: Sequence[Size], at: Sequence[Size]) -> Expr:
        shares = [_Share(s, c) for s, c in zip(sizes, counts)]
        return S.div(value, number(product([s.end(i) - s.start(i) for s, i in zip(shares, at)]), value.dtype))

    def loops(out: Any, x: Operand) -> bool:
        return fits(out, x) and is_float(x.dtype) and not on_gpu(out) and 0 not in (*x.shape, *out.shape)

    @lowering(f"_adaptive_avg_pool{n}d")
    def lower_adaptive_avg_pool(b: Builder, out: Any, x: Operand, size: Sequence[Size]) -> Any:
        if not loops(out, x):
            return NotImplemented
        return _shares(b, out, x, n, lambda value, i: divided(value, x.shape[-n:], out.shape[-n:], i[-n:]), True)

    @lowering(f"_adaptive_avg_pool{n}d_backward")
    def lower_adaptive_avg_pool_backward(b: Builder, out: Any, grad: Operand, x: Operand) -> Any:
        if not loops(out, grad):
            return NotImplemented
        grad, kind = b.readable(grad), compute_dtype(grad.dtype)
        parts = b.map(between(out, grad.shape, kind), lambda i: divided(to(grad.load(i), kind), out.shape[-n:], grad.shape[-n:], i[-n:]))
        return _shares(b, out, parts, n, lambda value, i: value, False)


_adaptive(2)
_adaptive(3)


@lowering("adaptive_max_pool2d adaptive_max_pool3d")
def lower_adaptive_max_pool(b: Builder, out: Any, x: Operand, size: Sequence[Size]) -> Any:
    """Only where nobody reads the places."""
    values, indices = b.read_only(out)
    if indices is not None or not fits(values, x) or not is_float(x.dtype) or on_gpu(values) or 0 in (*x.shape, *values.shape):
        return NotImplemented
    return _shares(b, values, x, len(size), lambda value, i: value, True, "max"), None


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


@device_rule("_adaptive_avg_pool3d")
def adaptive_pool3d(x: Spec, size: Sequence[Size]) -> Spec:
    """Contiguous, whatever the input's layout."""
    return fresh(x, (*x.shape[:-3], *size))


device_rule("_adaptive_avg_pool3d_backward")(lambda grad, x: fresh(x))
device_rule("adaptive_max_pool3d")(lambda x, size: (adaptive_pool3d(x, size), adaptive_pool3d(x, size).to(torch.int64)))
shape("adaptive_max_pool3d_backward fractional_max_pool2d_backward")(as_second)
shape("fractional_max_pool2d fractional_max_pool3d")(lambda x, kernel, size, random: [(*x.shape[:-len(size)], *size)] * 2)
shape("max_unpool3d")(lambda x, indices, size, *rest: (*x.shape[:-3], *size))
