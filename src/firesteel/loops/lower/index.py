"""Lowerings that read or write where data says: indexing, gathering, scattering.

Indices are loaded inside of the nest and checked there (`check_index`): one outside of its dimension makes the kernel report
an IndexError.  Writing is done in two steps: a nest that copies the original, then one that stores at the places.  Adding
with colliding places is left to torch on the CPU (it is exact there, and in eager's order), and is a nest elsewhere.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firesteel.loops.ir import StoreMode, check_index
from firesteel.loops.lower.build import LOWERINGS, Builder, broadcast_index, supported
from firesteel.loops.lower.value import Index, Tensor
from firesteel.loops.lower.views import reshape_index
from firesteel.loops.ops import SHORT, S, literal, number, to
from firesteel.sym.expr import Expr, Size, product

aten = torch.ops.aten


def _at(indices: Tensor, index: Index, size: Size, strict: bool = False) -> Expr:
    """The checked place that an index tensor names."""
    return check_index(to(indices.load(broadcast_index(index, indices.shape)), "i64"), size, strict)


def _fits(out: Any, *tensors: Tensor) -> bool:
    return supported(SHORT.get(out.dtype, ""), *[t.dtype for t in tensors]) and all(t.spec.device == out.device for t in tensors)


# ---------------------------------------------------------------- reading

@LOWERINGS.row(aten.embedding.default)
def lower_embedding(b: Builder, out: Any, weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Any:
    if not _fits(out, weight, indices):
        return NotImplemented
    weight, indices = b.readable(weight), b.readable(indices)
    return b.map(out, lambda i: weight.load((_at(indices, i[:-1], weight.shape[0], strict=True), i[-1])))


@LOWERINGS.row(aten.gather.default)
def lower_gather(b: Builder, out: Any, x: Tensor, dim: int, indices: Tensor, **_: Any) -> Any:
    if not _fits(out, x, indices):
        return NotImplemented
    x, indices, rank = b.readable(x), b.readable(indices), len(x.shape)
    if not rank or len(indices.shape) != rank:
        return NotImplemented if rank or indices.shape else b.map(out, x.load)
    dim = dim + rank if dim < 0 else dim
    return b.map(out, lambda i: x.load((*i[:dim], _at(indices, i, x.shape[dim], strict=True), *i[dim + 1:])))


@LOWERINGS.row(aten.index_select.default)
def lower_index_select(b: Builder, out: Any, x: Tensor, dim: int, indices: Tensor) -> Any:
    if not _fits(out, x, indices) or not x.shape:
        return NotImplemented
    x, indices = b.readable(x), b.readable(indices)
    dim, rank = dim + len(x.shape) if dim < 0 else dim, len(indices.shape)
    return b.map(out, lambda i: x.load((*i[:dim], _at(indices, i[dim:dim + rank], x.shape[dim], strict=True), *i[dim + 1:])))


@LOWERINGS.row(aten.take.default)
def lower_take(b: Builder, out: Any, x: Tensor, indices: Tensor) -> Any:
    """x read as one row, in the order of its dimensions."""
    if not _fits(out, x, indices):
        return NotImplemented
    x, indices = b.readable(x), b.readable(indices)
    count = product(x.shape)
    place = reshape_index(x.shape, (count,))
    return b.map(out, lambda i: x.load(place((_at(indices, i, count),))))


class Places:
    """torch's rule of indexing with tensors: which element of x an index of the result means.  The tensors are broadcast
    together; their dimensions stand where the first of them stood if all stood side by side, else in front."""

    def __init__(self, x_shape: tuple[Size, ...], indices: Sequence[Tensor | None]):
        self.shape, self.indices = x_shape, list(indices) + [None] * (len(x_shape) - len(indices))
        self.where = [d for d, t in enumerate(self.indices) if t is not None]
        self.rank = max((len(t.shape) for t in self.indices if t is not None), default=0)
        together = self.where == list(range(self.where[0], self.where[-1] + 1))
        self.front = self.where[0] if together else 0

    def of(self, index: Index) -> Index:
        named = index[self.front:self.front + self.rank]
        others = iter(index[:self.front] + index[self.front + self.rank:])
        return tuple([next(others) if t is None else _at(t, named, self.shape[d]) for d, t in enumerate(self.indices)])

    def result_shape(self) -> tuple[Size, ...]:
        rest = [n for n, t in zip(self.shape, self.indices) if t is None]
        named: list[Size] = [1] * self.rank
        for tensor in (t for t in self.indices if t is not None):
            for d, n in enumerate(tensor.shape):
                if n != 1:
                    named[self.rank - len(tensor.shape) + d] = n
        return (*rest[:self.front], *named, *rest[self.front:])


def _places(b: Builder, x: Tensor, indices: Sequence[Tensor | None]) -> Places | None:
    """None where a mask is among the indices: how many elements it names only its data says."""
    tensors = [t for t in indices if t is not None]
    if not tensors or any(t.dtype in ("bool", "u8") for t in tensors) or len(indices) > len(x.shape):
        return None
    return Places(x.shape, [None if t is None else b.readable(t) for t in indices])


@LOWERINGS.row(aten.index.Tensor, aten._unsafe_index.Tensor)
def lower_index(b: Builder, out: Any, x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    if not _fits(out, x, *[t for t in indices if t is not None]):
        return NotImplemented
    places = _places(b, x, indices)
    if places is None:
        return NotImplemented
    x = b.readable(x)
    return b.map(out, lambda i: x.load(places.of(i)))


# ---------------------------------------------------------------- writing

def _written(b: Builder, out: Any, x: Tensor) -> Tensor:
    """A fresh copy of x to write into."""
    return b.copy(x, out)


def _adds_by_library(out: Any) -> bool:
    return out.device.type == "cpu"


@LOWERINGS.row(aten.index_put.default, aten._unsafe_index_put.default)
def lower_index_put(b: Builder, out: Any, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    tensors = [t for t in indices if t is not None]
    if not _fits(out, x, values, *tensors) or (accumulate and _adds_by_library(out)):
        return NotImplemented
    masked = _masked_put(b, out, x, indices, values, accumulate)
    places = _places(b, x, indices) if masked is None else None
    if places is None:
        return masked if masked is not None else NotImplemented
    values = b.readable(values)
    result = _written(b, out, x)
    b.store_into(result.buffer, places.result_shape(), places.of, lambda i: values.load(broadcast_index(i, values.shape)),
                 "add" if accumulate else "set")
    return result


def _masked_put(b: Builder, out: Any, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> Tensor | None:
    """x[mask] = one value is a `where`: no positions are needed."""
    if len(indices) != 1 or indices[0] is None or indices[0].dtype != "bool" or values.shape not in ((), (1,)) or accumulate:
        return None
    mask, x, values = b.readable(indices[0]), b.readable(x), b.readable(values)
    rank, dtype = len(mask.shape), SHORT[out.dtype]
    return b.map(out, lambda i: S.where(mask.load(i[:rank]), to(values.load((0,) * len(values.shape)), dtype), x.load(i)))


@LOWERINGS.row(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def lower_index_fill(b: Builder, out: Any, x: Tensor, dim: int, indices: Tensor, value: Any) -> Any:
    tensors = [x, indices] + ([value] if type(value) is Tensor else [])
    if not _fits(out, *tensors) or not x.shape or len(indices.shape) != 1:
        return NotImplemented
    dim, dtype = dim + len(x.shape) if dim < 0 else dim, SHORT[out.dtype]
    indices, value = b.readable(indices), b.readable(value) if type(value) is Tensor else value
    result = _written(b, out, x)
    shape = (*x.shape[:dim], indices.shape[0], *x.shape[dim + 1:])
    b.store_into(result.buffer, shape, lambda i: (*i[:dim], _at(indices, (i[dim],), x.shape[dim]), *i[dim + 1:]),
                 lambda i: value.load(()) if type(value) is Tensor else number(value, dtype))
    return result


@LOWERINGS.row(aten.index_copy.default)
def lower_index_copy(b: Builder, out: Any, x: Tensor, dim: int, indices: Tensor, source: Tensor) -> Any:
    if not _fits(out, x, indices, source) or not x.shape or len(indices.shape) != 1:
        return NotImplemented
    dim = dim + len(x.shape) if dim < 0 else dim
    indices, source = b.readable(indices), b.readable(source)
    result = _written(b, out, x)
    b.store_into(result.buffer, source.shape, lambda i: (*i[:dim], _at(indices, (i[dim],), x.shape[dim], strict=True), *i[dim + 1:]), source.load)
    return result


def _scatter(b: Builder, out: Any, x: Tensor, dim: int, indices: Tensor, value: Any, mode: StoreMode) -> Any:
    """out[.., indices[i], ..] = value[i] for every i of the index tensor's shape."""
    tensors = [x, indices] + ([value] if type(value) is Tensor else [])
    if not _fits(out, *tensors) or not x.shape or len(indices.shape) != len(x.shape) or (mode == "add" and _adds_by_library(out)):
        return NotImplemented
    dim = dim + len(x.shape) if dim < 0 else dim
    indices, dtype = b.readable(indices), SHORT[out.dtype]
    value = b.readable(value) if type(value) is Tensor else value
    result = _written(b, out, x)

    def element(i: Index) -> Expr:
        if type(value) is Tensor:
            return value.load(i)
        return number(value, dtype)
    b.store_into(result.buffer, indices.shape, lambda i: (*i[:dim], _at(indices, i, x.shape[dim], strict=True), *i[dim + 1:]), element, mode)
    return result


@LOWERINGS.row(aten.scatter.src, aten.scatter.value)
def lower_scatter(b: Builder, out: Any, x: Tensor, dim: int, indices: Tensor, value: Any) -> Any:
    return _scatter(b, out, x, dim, indices, value, "set")


@LOWERINGS.row(aten.scatter_add.default)
def lower_scatter_add(b: Builder, out: Any, x: Tensor, dim: int, indices: Tensor, value: Tensor) -> Any:
    return _scatter(b, out, x, dim, indices, value, "add")


@LOWERINGS.row(aten.embedding_dense_backward.default)
def lower_embedding_backward(b: Builder, out: Any, grad: Tensor, indices: Tensor, rows: Size, padding: int, by_count: bool) -> Any:
    if by_count or _adds_by_library(out) or not _fits(out, grad, indices):
        return NotImplemented
    grad, indices = b.readable(grad), b.readable(indices)
    result = b.map(out, lambda i: literal(0, SHORT[out.dtype]))

    def element(i: Index) -> Expr:
        value = grad.load(i)
        return value if padding < 0 else S.where(S.eq(to(indices.load(i[:-1]), "i64"), padding), literal(0, value.dtype), value)
    b.store_into(result.buffer, grad.shape, lambda i: (_at(indices, i[:-1], out.shape[0], strict=True), i[-1]), element, "add")
    return result
