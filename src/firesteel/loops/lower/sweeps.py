"""Reductions as sweeps: the kept dimensions are axes of a nest, each sweep over the reduced ones is a phase of it."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from firesteel.loops.ir import Axis, Phase, Reduce, Store, acc
from firesteel.loops.lower.build import Builder, exprs
from firesteel.loops.lower.value import Index, Operand
from firesteel.loops.scalars import SHORT, compute_dtype, to
from firesteel.sym.expr import Expr, Size, product


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
        return self.reduces(op, lambda i: (to(body(i), dtype),))[0]

    def reduces(self, op: str, body: Callable[[Index], Sequence[Expr]]) -> list[Expr]:
        """One more sweep with an accumulator for each value of the body; gives their final values."""
        axes, index = self._sweep()
        name = f"a{len(self.phases)}"
        parts = tuple([Reduce(f"{name}_{k}" if k else name, op, value, value.dtype) for k, value in enumerate(body(index))])
        self.phases.append(Phase("reduce", axes, parts, ()))
        return [acc(part) for part in parts]

    def result_index(self, keepdim: bool) -> Index:
        at = [self.axes[d].value if d in self.axes else 0 for d in range(self.rank)]
        return tuple(at if keepdim else [i for d, i in enumerate(at) if d not in self.dims])

    def store(self, out: Any, value: Expr, keepdim: bool) -> Operand | None:
        """Stores one value a result, in the nest's last phase.  Without a Spec nobody reads it."""
        if out is None:
            return None
        buffer = self.b.buffer(out)
        self.stores.append(Store(buffer.name, exprs(self.result_index(keepdim)), to(value, buffer.dtype, self.b.loose)))
        return Operand.of(buffer, out)

    def map(self, out: Any, body: Callable[[Index], Expr]) -> Operand:
        """A last sweep that stores an element of `out` for each element swept over."""
        axes, index = self._sweep()
        buffer = self.b.buffer(out)
        store = Store(buffer.name, exprs(index), to(body(index), buffer.dtype, self.b.loose))
        self.phases.append(Phase("map", axes, (), (store,)))
        return Operand.of(buffer, out)

    def emit(self, result: Any = None) -> Any:
        """Emits the nest; what it stores is the result."""
        last = (Phase("map", (), (), tuple(self.stores)),) if self.stores else ()
        self.b.nest(self.axes.values(), *self.phases, *last)
        return result


def _dims(dims: Sequence[int] | int | None, rank: int) -> set[int]:
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return set(range(rank))
    asked = [dims] if isinstance(dims, int) else dims
    return {d + rank if d < 0 else d for d in asked} if rank else set()


# ---------------------------------------------------------------- one sweep

def out_dtype(out: Any) -> str:
    return compute_dtype(SHORT.get(out.dtype, "f32"))
