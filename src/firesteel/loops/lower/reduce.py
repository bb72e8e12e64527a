"""Lowerings of reductions and scans.

A reduction is one nest: the kept dimensions are its parallel axes; a reduce phase sweeps the reduced dimensions; a last phase
stores.  More than one sweep (variance, softmax, the position of a maximum) is more phases of the same nest, so a row of
data is read again while it is in the cache.

    sum over dim 1 of x[n, m]:   nest [i0 < n]   reduce [r1 < m] a0 = sum(load(x, i0, r1))   map out[i0] = acc(a0)
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel.loops.ir import Axis, Phase, Reduce, Store, acc
from firesteel.loops.lower.build import LOWERINGS, Builder, exprs, supported
from firesteel.loops.lower.pointwise import truth
from firesteel.loops.lower.value import Index, Tensor
from firesteel.loops.ops import SHORT, S, compute_dtype, highest, is_float, literal, number, to
from firesteel.sym.expr import Expr, Size, as_expr, const, min_, product

aten = torch.ops.aten


class Sweeps:
    """Builds one reduction nest over `shape`, of which `dims` are reduced: first any number of `reduce`, then `store`s."""

    def __init__(self, b: Builder, shape: tuple[Size, ...], dims: Sequence[int] | int | None):
        self.b, self.shape, self.rank = b, shape, len(shape)
        self.dims = _dims(dims, self.rank)
        self.axes = {d: Axis(f"i{d}", n) for d, n in enumerate(shape) if d not in self.dims and n != 1}
        self.phases: list[Phase] = []
        self.stores: list[Store] = []

    def count(self) -> Size:
        """How many elements go into one result."""
        return product(self.shape[d] for d in sorted(self.dims))

    def _sweep(self) -> tuple[tuple[Axis, ...], Index]:
        """Fresh axes for one more phase, and the index of the element they point to."""
        mark = "rstuvwxyz"[len(self.phases)]
        inner = {d: Axis(f"{mark}{d}", self.shape[d]) for d in sorted(self.dims) if self.shape[d] != 1}
        every = {**self.axes, **inner}
        return tuple(inner.values()), tuple([every[d].value if d in every else 0 for d in range(self.rank)])

    def reduce(self, op: str, dtype: str, body: Callable[[Index], Expr]) -> Expr:
        """One more sweep; gives the accumulator's final value."""
        axes, index = self._sweep()
        reduce = Reduce(f"a{len(self.phases)}", op, to(body(index), dtype), dtype)
        self.phases.append(Phase("reduce", axes, (reduce,), ()))
        return acc(reduce)

    def result_index(self, keepdim: bool) -> Index:
        at = [self.axes[d].value if d in self.axes else 0 for d in range(self.rank)]
        return tuple(at if keepdim else [i for d, i in enumerate(at) if d not in self.dims])

    def store(self, out: Any, value: Expr, keepdim: bool) -> Tensor | None:
        """Stores one value a result, in the nest's last phase.  Without a Spec nobody reads it."""
        if out is None:
            return None
        buffer = self.b.buffer(out)
        self.stores.append(Store(buffer.name, exprs(self.result_index(keepdim)), to(value, buffer.dtype, self.b.loose)))
        return Tensor.of(buffer, out)

    def map(self, out: Any, body: Callable[[Index], Expr]) -> Tensor:
        """A last sweep that stores an element of `out` for each element swept over."""
        axes, index = self._sweep()
        buffer = self.b.buffer(out)
        store = Store(buffer.name, exprs(index), to(body(index), buffer.dtype, self.b.loose))
        self.phases.append(Phase("map", axes, (), (store,)))
        return Tensor.of(buffer, out)

    def emit(self) -> None:
        last = (Phase("map", (), (), tuple(self.stores)),) if self.stores else ()
        self.b.nest(self.axes.values(), *self.phases, *last)


def _dims(dims: Sequence[int] | int | None, rank: int) -> set[int]:
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return set(range(rank))
    asked = [dims] if isinstance(dims, int) else dims
    return {d + rank if d < 0 else d for d in asked} if rank else set()


def _fits(out: Any, x: Tensor) -> bool:
    return supported(SHORT.get(out.dtype, ""), x.dtype)


# ---------------------------------------------------------------- one sweep

def _simple(b: Builder, out: Any, x: Tensor, op: str, dims: Any, keepdim: bool, dtype: str,
            element: Callable[[Expr], Expr], finish: Callable[[Expr, Size], Expr] = lambda a, n: a) -> Any:
    if not _fits(out, x):
        return NotImplemented
    x = b.readable(x)
    sweeps = Sweeps(b, x.shape, dims)
    total = sweeps.reduce(op, dtype, lambda i: element(x.load(i)))
    result = sweeps.store(out, finish(total, sweeps.count()), keepdim)
    sweeps.emit()
    return result


def _out_dtype(out: Any) -> str:
    return compute_dtype(SHORT.get(out.dtype, "f32"))


@LOWERINGS.row(aten.sum.default, aten.sum.dim_IntList)
def lower_sum(b: Builder, out: Any, x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    kind = _out_dtype(out)
    return _simple(b, out, x, "sum", dims, keepdim, kind, lambda e: to(e, kind))


@LOWERINGS.row(aten.nansum.default)
def lower_nansum(b: Builder, out: Any, x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    kind = _out_dtype(out)
    number_or_zero = lambda e: S.where(S.isnan(e), 0, e) if is_float(e.dtype) else e
    return _simple(b, out, x, "sum", dims, keepdim, kind, lambda e: to(number_or_zero(to(e, compute_dtype(e.dtype))), kind))


@LOWERINGS.row(aten.trace.default)
def lower_trace(b: Builder, out: Any, x: Tensor) -> Any:
    if not _fits(out, x):
        return NotImplemented
    x, kind = b.readable(x), _out_dtype(out)
    sweeps = Sweeps(b, (min_(*x.shape),), None)
    total = sweeps.reduce("sum", kind, lambda i: to(x.load((i[0], i[0])), kind))
    result = sweeps.store(out, total, False)
    sweeps.emit()
    return result


@LOWERINGS.row(aten.mean.default, aten.mean.dim)
def lower_mean(b: Builder, out: Any, x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    kind = _out_dtype(out)
    return _simple(b, out, x, "sum", dims, keepdim, kind, lambda e: to(e, kind), lambda total, n: S.div(total, number(n, kind)))


@LOWERINGS.row(aten.prod.default, aten.prod.dim_int)
def lower_prod(b: Builder, out: Any, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    kind = _out_dtype(out)
    return _simple(b, out, x, "prod", dim, keepdim, kind, lambda e: to(e, kind))


@LOWERINGS.row(aten.amax.default)
def lower_amax(b: Builder, out: Any, x: Tensor, dims: Any = None, keepdim: bool = False) -> Any:
    kind = _out_dtype(out)
    return _simple(b, out, x, "max", dims, keepdim, kind, lambda e: to(e, kind))


@LOWERINGS.row(aten.amin.default)
def lower_amin(b: Builder, out: Any, x: Tensor, dims: Any = None, keepdim: bool = False) -> Any:
    kind = _out_dtype(out)
    return _simple(b, out, x, "min", dims, keepdim, kind, lambda e: to(e, kind))


LOWERINGS.add(aten.max.default, lambda b, out, x: lower_amax(b, out, x))
LOWERINGS.add(aten.min.default, lambda b, out, x: lower_amin(b, out, x))


@LOWERINGS.row(aten.any.default, aten.any.dim, aten.any.dims)
def lower_any(b: Builder, out: Any, x: Tensor, dims: Any = None, keepdim: bool = False) -> Any:
    return _simple(b, out, x, "any", dims, keepdim, "bool", truth)


@LOWERINGS.row(aten.all.default, aten.all.dim, aten.all.dims)
def lower_all(b: Builder, out: Any, x: Tensor, dims: Any = None, keepdim: bool = False) -> Any:
    return _simple(b, out, x, "all", dims, keepdim, "bool", truth)


@LOWERINGS.row(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def lower_count_nonzero(b: Builder, out: Any, x: Tensor, dims: Any = None) -> Any:
    return _simple(b, out, x, "sum", dims, False, "i64", lambda e: to(truth(e), "i64"))


@LOWERINGS.row(aten.linalg_vector_norm.default)
def lower_vector_norm(b: Builder, out: Any, x: Tensor, ord: float = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    kind = _out_dtype(out)
    if not is_float(kind) or not _fits(out, x):
        return NotImplemented
    op, element, finish = NORMS.get(float(ord)) or _norm(float(ord))
    return _simple(b, out, x, op, dims, keepdim, kind, lambda e: element(to(e, kind)), lambda total, n: finish(total))


def _norm(p: float) -> tuple[str, Callable[[Expr], Expr], Callable[[Expr], Expr]]:
    return "sum", lambda e: S.pow(S.abs(e), p), lambda total: S.pow(total, 1 / p)


NORMS: dict[float, tuple[str, Callable[[Expr], Expr], Callable[[Expr], Expr]]] = {
    2.0: ("sum", lambda e: S.mul(e, e), lambda total: S.sqrt(total)),
    1.0: ("sum", lambda e: S.abs(e), lambda total: total),
    0.0: ("sum", lambda e: to(S.ne(e, 0), e.dtype), lambda total: total),
    math.inf: ("max", lambda e: S.abs(e), lambda total: total),
    -math.inf: ("min", lambda e: S.abs(e), lambda total: total),
}


# ---------------------------------------------------------------- variance: the mean, then the squared distances from it

def _variance(b: Builder, outs: dict[str, Any], x: Tensor, dims: Any, correction: float | None, keepdim: bool,
              root: bool) -> dict[str, Tensor] | None:
    spec = next(iter(outs.values()))
    if not all(_fits(out, x) for out in outs.values()) or not is_float(x.dtype):
        return None
    x, kind = b.readable(x), _out_dtype(spec)
    sweeps = Sweeps(b, x.shape, dims)
    count, value = sweeps.count(), lambda i: to(x.load(i), kind)
    mean = S.div(sweeps.reduce("sum", kind, value), number(count, kind))
    squares = sweeps.reduce("sum", kind, lambda i: S.mul(S.sub(value(i), mean), S.sub(value(i), mean)))
    variance = S.div(squares, _degrees(count, 1 if correction is None else correction, kind))
    values = {"var": S.sqrt(variance) if root else variance, "mean": mean}
    read = dict(zip(outs, b.read_only(tuple(outs.values()))))
    stored = {name: sweeps.store(out, values[name], keepdim) for name, out in read.items()}
    sweeps.emit()
    return stored   # type: ignore[return-value]  # none is None: each fits, as asked above


def _degrees(count: Size, correction: float, dtype: str) -> Expr:
    if isinstance(count, Expr):
        return S.max(S.sub(number(count, dtype), correction), 0)
    return literal(max(count - correction, 0), dtype)


def _is_root(b: Builder) -> bool:
    return b.target.__name__.startswith("std")


@LOWERINGS.row(aten.var.correction, aten.std.correction)
def lower_var(b: Builder, out: Any, x: Tensor, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    stored = _variance(b, {"var": out}, x, dims, correction, keepdim, _is_root(b))
    return stored["var"] if stored else NotImplemented


@LOWERINGS.row(aten.var.dim, aten.std.dim)
def lower_var_dim(b: Builder, out: Any, x: Tensor, dims: Any = None, unbiased: bool = True, keepdim: bool = False) -> Any:
    return lower_var(b, out, x, dims, correction=int(unbiased), keepdim=keepdim)


@LOWERINGS.row(aten.var.default, aten.std.default)
def lower_var_all(b: Builder, out: Any, x: Tensor, unbiased: bool = True) -> Any:
    return lower_var(b, out, x, None, correction=int(unbiased))


@LOWERINGS.row(aten.var_mean.correction, aten.std_mean.correction)
def lower_var_mean(b: Builder, out: Any, x: Tensor, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    stored = _variance(b, {"var": out[0], "mean": out[1]}, x, dims, correction, keepdim, _is_root(b))
    return (stored["var"], stored["mean"]) if stored else NotImplemented


# ---------------------------------------------------------------- positions: the extreme value, then the first place that has it

def _position(sweeps: Sweeps, x: Tensor, op: str, kind: str) -> tuple[Expr, Expr]:
    """(the extreme, its position).  NaN beats every number, so the first NaN is the place looked for."""
    value = lambda i: to(x.load(i), kind)
    best = sweeps.reduce(op, kind, value)

    def place(i: Index) -> Expr:
        element, at = value(i), as_expr(_linear(i, x.shape, sweeps.dims))
        found = S.eq(element, best)
        if is_float(kind):
            found = S.or_(found, S.isnan(element))
        return S.where(found, at, const(highest("i64")))
    return best, sweeps.reduce("min", "i64", place)


def _linear(index: Index, shape: tuple[Size, ...], dims: set[int]) -> Size:
    """The position among the reduced dimensions, in row-major order."""
    at: Size = 0
    for d in sorted(dims):
        at = at * shape[d] + index[d]
    return at


@LOWERINGS.row(aten.argmax.default, aten.argmin.default)
def lower_argmax(b: Builder, out: Any, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    if not supported(x.dtype) or x.dtype == "bool":
        return NotImplemented
    x = b.readable(x)
    sweeps = Sweeps(b, x.shape, dim)
    _, at = _position(sweeps, x, "max" if "max" in b.target.__name__ else "min", compute_dtype(x.dtype))
    result = sweeps.store(out, at, keepdim)
    sweeps.emit()
    return result


@LOWERINGS.row(aten.max.dim, aten.min.dim)
def lower_max_dim(b: Builder, out: Any, x: Tensor, dim: int, keepdim: bool = False) -> Any:
    if not supported(x.dtype):
        return NotImplemented
    x = b.readable(x)
    sweeps = Sweeps(b, x.shape, dim)
    best, at = _position(sweeps, x, "max" if "max" in b.target.__name__ else "min", compute_dtype(x.dtype))
    out = b.read_only(out)
    results = sweeps.store(out[0], best, keepdim), sweeps.store(out[1], at, keepdim)
    sweeps.emit()
    return results


@LOWERINGS.row(aten.aminmax.default)
def lower_aminmax(b: Builder, out: Any, x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    if not supported(x.dtype):
        return NotImplemented
    x, kind = b.readable(x), compute_dtype(x.dtype)
    sweeps = Sweeps(b, x.shape, dim)
    extremes = [sweeps.reduce(op, kind, lambda i: to(x.load(i), kind)) for op in ("min", "max")]
    results = tuple(sweeps.store(spec, value, keepdim) for spec, value in zip(b.read_only(out), extremes))
    sweeps.emit()
    return results


# ---------------------------------------------------------------- softmax and its kin, where they come whole

@LOWERINGS.row(aten._softmax.default, aten._log_softmax.default)
def lower_softmax(b: Builder, out: Any, x: Tensor, dim: int, half_to_float: Any = False) -> Any:
    if not _fits(out, x) or not is_float(x.dtype):
        return NotImplemented
    x, kind = b.readable(x), compute_dtype(x.dtype)
    sweeps, value = Sweeps(b, x.shape, dim), lambda i: to(x.load(i), kind)
    top = sweeps.reduce("max", kind, value)
    total = sweeps.reduce("sum", kind, lambda i: S.exp(S.sub(value(i), top)))
    if b.target is aten._log_softmax.default:
        result = sweeps.map(out, lambda i: S.sub(S.sub(value(i), top), S.log(total)))
    else:
        result = sweeps.map(out, lambda i: S.div(S.exp(S.sub(value(i), top)), total))
    sweeps.emit()
    return result


@LOWERINGS.row(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def lower_softmax_backward(b: Builder, out: Any, grad: Tensor, y: Tensor, dim: int, input_dtype: Any) -> Any:
    if not _fits(out, grad) or not _fits(out, y):
        return NotImplemented
    grad, y, kind = b.readable(grad), b.readable(y), compute_dtype(y.dtype)
    sweeps = Sweeps(b, y.shape, dim)
    g, v = lambda i: to(grad.load(i), kind), lambda i: to(y.load(i), kind)
    if b.target is aten._log_softmax_backward_data.default:
        total = sweeps.reduce("sum", kind, g)
        result = sweeps.map(out, lambda i: S.sub(g(i), S.mul(S.exp(v(i)), total)))
    else:
        total = sweeps.reduce("sum", kind, lambda i: S.mul(g(i), v(i)))
        result = sweeps.map(out, lambda i: S.mul(v(i), S.sub(g(i), total)))
    sweeps.emit()
    return result


@LOWERINGS.row(aten.logsumexp.default)
def lower_logsumexp(b: Builder, out: Any, x: Tensor, dims: Any, keepdim: bool = False) -> Any:
    if not _fits(out, x):
        return NotImplemented
    x, kind = b.readable(x), _out_dtype(out)
    sweeps, value = Sweeps(b, x.shape, dims), lambda i: to(x.load(i), kind)
    top = sweeps.reduce("max", kind, value)
    top = S.where(S.isinf(top), 0, top)
    total = sweeps.reduce("sum", kind, lambda i: S.exp(S.sub(value(i), top)))
    result = sweeps.store(out, S.add(S.log(total), top), keepdim)
    sweeps.emit()
    return result


# ---------------------------------------------------------------- scans

def _scan(b: Builder, out: Any, x: Tensor, dim: int, op: str) -> Any:
    if not _fits(out, x):
        return NotImplemented
    x, rank = b.readable(x), len(x.shape)
    dtype = SHORT[out.dtype]
    kind = "f64" if is_float(dtype) else dtype      # eager's running value is a double for every float
    if not rank:
        return b.map(out, lambda i: to(to(x.load(i), kind), dtype))
    dim = dim + rank if dim < 0 else dim
    axes = {d: Axis(f"i{d}" if d != dim else f"r{d}", n) for d, n in enumerate(x.shape) if n != 1 or d == dim}
    index = tuple([axes[d].value if d in axes else 0 for d in range(rank)])
    running = Reduce("a0", op, to(x.load(index), kind), kind)
    buffer = b.buffer(out)
    store = Store(buffer.name, exprs(index), to(acc(running), dtype, b.loose))
    outer = [a for d, a in axes.items() if d != dim]
    b.nest(outer, Phase("scan", (axes[dim],), (running,), (store,)))
    return Tensor.of(buffer, out)


@LOWERINGS.row(aten.cumsum.default)
def lower_cumsum(b: Builder, out: Any, x: Tensor, dim: int, *, dtype: Any = None) -> Any:
    return _scan(b, out, x, dim, "sum")


@LOWERINGS.row(aten.cumprod.default)
def lower_cumprod(b: Builder, out: Any, x: Tensor, dim: int, *, dtype: Any = None) -> Any:
    return _scan(b, out, x, dim, "prod")
