"""What a graph's tensors are while it is lowered.

In: Specs (anything with shape, strides, offset, dtype, device).  Out: `Operand`, which answers "the element at this index" with
an Expr.  A Operand stands on a buffer, possibly through an index map (views), or is computed where it is read (`full`,
`arange`).  What always holds: a buffer has the strides that the Spec of its first node says, so every view's own Spec gives
the strided window that a library call or an output needs.

    row = Operand.of(buffer, spec).through(spec_of_row, lambda i: (3, i[0]))     # x[3]
    row.load((j,))                                                             # load(x, 3, j)
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from firesteel.loops.ir import Buffer, View, load, masked
from firesteel.loops.scalars import SHORT, S, as_bits, literal, short_dtype
from firesteel.sym.expr import Expr, Size

Index = tuple[Size, ...]
IndexMap = Callable[[Index], Index]
Body = Callable[[Index], Expr]


class TensorSpec(NamedTuple):
    """A Spec of our own, for tensors that come without one."""
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    dtype: torch.dtype
    device: torch.device


def spec_of(value: Any) -> Any:
    """The Spec of an abstract tensor, or of a real one."""
    spec = getattr(value, "spec", None)
    if spec is None:
        spec = TensorSpec(tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype, value.device)
    return spec


class Operand:
    """A tensor of the graph.  Exactly one of `buffer` and `body` is set.  `index` maps an index of this tensor to one of
    the buffer (None: the same); of a buffer of another dtype the bits are read.
    `strided`: spec.strides/offset describe it as a window on the buffer's storage.
    `reshaped`: the tensor of which this is a plain reshape, so that a reshape of a reshape is one step.
    `opaque`: no index map is known; only library calls can read it (by its strides, so it is `strided`)."""

    __slots__ = ("spec", "dtype", "buffer", "index", "body", "strided", "reshaped", "opaque")

    def __init__(self, spec: Any, buffer: Buffer | None, index: IndexMap | None, body: Body | None,
                 strided: bool = True, reshaped: Operand | None = None, opaque: bool = False):
        self.spec, self.index, self.body = spec, index, body
        self.buffer: Any = buffer       # a Buffer, but for what is computed where it is read
        self.dtype = SHORT.get(spec.dtype) or short_dtype(spec.dtype)
        self.strided, self.reshaped, self.opaque = strided, reshaped, opaque

    @property
    def shape(self) -> tuple[Size, ...]:
        return self.spec.shape

    @classmethod
    def of(cls, buffer: Buffer, spec: Any) -> Operand:
        return cls(spec, buffer, None, None)

    @classmethod
    def lazy(cls, spec: Any, body: Body) -> Operand:
        """Computed where it is read; `body` gives an Expr of the tensor's dtype."""
        return cls(spec, None, None, body, strided=False)

    def load(self, index: Index) -> Expr:
        if self.body is not None:
            return self.body(index)
        loaded = load(self.buffer, self.index(index) if self.index is not None else index)
        return loaded if loaded.dtype == self.dtype else as_bits(loaded, self.dtype)

    def masked(self, index: Index, mask: Expr, other: Expr) -> Expr:
        """The element where the mask holds; memory is not touched where it does not."""
        if self.body is not None:
            return S.where(mask, self.body(index), other)
        place = self.index(index) if self.index is not None else index
        if self.buffer.dtype == self.dtype:
            return masked(self.buffer, place, mask, other)
        return S.where(mask, as_bits(masked(self.buffer, place, mask, literal(0, self.buffer.dtype)), self.dtype), other)

    def through(self, spec: Any, index: IndexMap, strided: bool = True, reshaped: Operand | None = None) -> Operand:
        """A view: `index` takes an index of the view to one of this tensor."""
        inner = self.index
        if self.body is not None:
            body = self.body
            return Operand.lazy(spec, lambda i: body(index(i)))
        composed = index if inner is None else lambda i: inner(index(i))
        return Operand(spec, self.buffer, composed, None, strided and self.strided, reshaped, self.opaque)

    def view(self) -> View:
        """The strided window; only where `strided`."""
        spec = self.spec
        return View(self.buffer.name, spec.shape, spec.strides, spec.offset, self.dtype)
