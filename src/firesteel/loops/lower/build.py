"""The builder of a Program: buffers, nests and library calls in order, and the table of lowerings.

In: one graph node at a time, its arguments already lowered.  Out: what the node's value is (a `Operand`, a tuple of them, a
size).  A row of `LOWERINGS` is `fn(b, out, *args, **kwargs)`: `b` the Builder, `out` the node's Spec (or a tuple of
Specs); it returns the value, or NotImplemented where a loop nest cannot do it: then the operator itself is called.

    @lowering("flip")
    def lower_flip(b, out, x, dims):
        return b.map(out, lambda i: x.load(tuple(n - 1 - k if d in dims else k for d, (k, n) in enumerate(zip(i, x.shape)))))
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from firesteel.config import config
from firesteel.loops.ir import Axis, Buffer, BufferKind, Extern, Nest, Phase, ProgramStep, Store, StoreMode
from firesteel.loops.lower.value import Body, Index, Operand, TensorSpec
from firesteel.loops.scalars import DTYPES, LOOP_DTYPES, SHORT, S, compute_dtype, literal, short_dtype, to
from firesteel.operators import Facet
from firesteel.sym.expr import Expr, Size, as_expr, lt, row_major

LOWERINGS: Facet[Callable[..., Any]] = Facet("lowering")
lowering = LOWERINGS.named

_grids: dict[tuple[Size, ...], tuple[tuple[Axis, ...], Index]] = {}


def grid(shape: tuple[Size, ...], prefix: str = "i") -> tuple[tuple[Axis, ...], Index]:
    """An axis for each dimension other than those of size 1, whose index is always 0."""
    found = _grids.get(shape) if prefix == "i" else None
    if found is None:
        axes = {d: Axis(f"{prefix}{d}", n) for d, n in enumerate(shape) if n != 1}
        found = tuple(axes.values()), tuple(axes[d].value if d in axes else 0 for d in range(len(shape)))
        if prefix == "i":
            _grids[shape] = found
    return found


def broadcast_index(index: Index, shape: tuple[Size, ...]) -> Index:
    """The index into a tensor of `shape` that is broadcast to where `index` points."""
    drop = len(index) - len(shape)
    if not drop and 1 not in shape:
        return index
    return tuple([0 if n == 1 else index[drop + d] for d, n in enumerate(shape)])


def exprs(index: Index) -> tuple[Expr, ...]:
    return tuple([as_expr(i) for i in index])


class Builder:
    """Grows a Program.  `node` is the graph node being lowered: nests and buffers are named after it."""

    def __init__(self, env: Any = None) -> None:
        self.env = env                          # the ShapeEnv that knows what the sizes may be
        self.buffers: dict[str, Buffer] = {}
        self.steps: list[ProgramStep] = []
        self.node: str = ""
        self.target: Any = None
        self.used: set[int] | None = None       # of the results of the node, if it has several; None: all
        self.loose = not config.eager_rounding

    def is_negative(self, number: Size) -> bool | None:
        """Is an index negative?  None where only run time knows; without an environment symbols are sizes."""
        if type(number) is not Expr:
            return number < 0
        return False if self.env is None else self.env.known(lt(number, 0))

    # ------------------------------------------------------------ buffers

    def unique(self, name: str) -> str:
        if name not in self.buffers:
            return name
        number = 1
        while f"{name}_{number}" in self.buffers:
            number += 1
        return f"{name}_{number}"

    def buffer(self, spec: Any, kind: BufferKind = "temp", name: str = "", value: Any = None) -> Buffer:
        """A new buffer with the Spec's layout.  Only inputs and constants may start inside of a storage."""
        offset = spec.offset if kind in ("input", "constant") else 0
        name = self.unique(name or self.node)
        made = Buffer(name, SHORT.get(spec.dtype) or short_dtype(spec.dtype), tuple(spec.shape), tuple(spec.strides), kind,
                      device_name(spec.device), offset, value)
        self.buffers[name] = made
        return made

    # ------------------------------------------------------------ nests

    def nest(self, axes: Iterable[Axis], *phases: Phase) -> None:
        self.steps.append(Nest(self.node, tuple(axes), phases, (self.node,)))

    def map(self, out: Any, body: Body) -> Operand:
        """out[i] = body(i), rounded to the dtype of `out`."""
        axes, index = grid(tuple(out.shape))
        buffer = self.buffer(out)
        store = Store(buffer.name, exprs(index), to(body(index), buffer.dtype, self.loose))
        self.nest(axes, Phase("map", (), (), (store,)))
        return Operand.of(buffer, _from_start(out))

    def store_into(self, buffer: Buffer, shape: tuple[Size, ...], where: Callable[[Index], Index], body: Body, mode: StoreMode = "set") -> None:
        """buffer[where(i)] = body(i) (or += with mode "add") for all i of `shape`."""
        axes, index = grid(shape)
        value = to(body(index), buffer.dtype, self.loose)
        self.nest(axes, Phase("map", (), (), (Store(buffer.name, exprs(where(index)), value, mode),)))

    def added(self, out: Any, start: Body, shape: tuple[Size, ...], where: Callable[[Index], Index], body: Body) -> Operand:
        """out[i] = start(i), plus body(j) for every j of `shape` with where(j) = i: added in the dtype in which to compute, rounded once."""
        result = self.map(TensorSpec(out.shape, out.strides, 0, DTYPES[compute_dtype(SHORT[out.dtype])], out.device), start)
        self.store_into(result.buffer, shape, where, body, "add")
        return result if result.dtype == SHORT[out.dtype] else self.copy(result, out)

    # ------------------------------------------------------------ reading tensors in other ways

    def readable(self, x: Operand) -> Operand:
        """x, or a copy of it where its elements cannot be addressed by an index map."""
        return self.contiguous(x) if x.opaque else x

    def contiguous(self, x: Operand) -> Operand:
        """A copy by the library, for what loops cannot read."""
        return self.call(torch.ops.aten.clone.default, (x,), {"memory_format": torch.contiguous_format}, _contiguous(x.spec))

    def all_readable(self, value: Any) -> Any:
        """An argument with the tensors in it readable."""
        if isinstance(value, (list, tuple)):
            return [self.all_readable(item) for item in value]
        return self.readable(value) if type(value) is Operand else value

    def strided(self, x: Operand) -> Operand:
        """x as a window on a buffer, materialised where it is none."""
        return x if x.strided else self.copy(x, x.spec if all(s != 0 for s in x.spec.strides) else _contiguous(x.spec))

    def copy(self, x: Operand, out: Any) -> Operand:
        x = self.readable(x)
        return self.map(out, x.load)

    def value(self, x: Operand, index: Index, dtype: str | None = None) -> Expr:
        """The element of x that is broadcast to `index`, in the dtype (or x's own) in which to compute."""
        loaded = self.readable(x).load(broadcast_index(index, x.shape))
        return to(loaded, dtype or compute_dtype(x.dtype))

    # ------------------------------------------------------------ library calls

    def argument(self, value: Any) -> Any:
        """A lowered argument as an Extern holds it."""
        kind = type(value)
        if kind is Operand:
            return self.strided(value).view()
        if kind in (list, tuple):
            return kind(self.argument(v) for v in value)
        return value

    def call(self, target: Any, args: tuple, kwargs: dict, out: Any, *, writes_out: bool = False, written: Sequence[Operand] = ()) -> Any:
        """outputs = target(*args, **kwargs), each output with the layout of its Spec; `written` are arguments changed in place."""
        views = tuple(self.argument(a) for a in args)
        named = {k: self.argument(v) for k, v in kwargs.items()}
        mutated = tuple(dict.fromkeys(t.buffer.name for t in written if t.strided))
        value, names = self._outputs(self.read_only(out))
        self.steps.append(Extern(self.node, tuple(names), target, views, named, mutated, writes_out, (self.node,)))
        return value

    def read_only(self, out: Any) -> Any:
        """The Specs of a node's results, None in place of those that nobody reads; of lists all are read."""
        if self.used is None or not is_group(out) or any(map(is_group, out)):
            return out
        return tuple([spec if n in self.used else None for n, spec in enumerate(out)])

    def _outputs(self, out: Any) -> tuple[Any, list[str | None]]:
        if out is None:
            return None, [None]
        if isinstance(out, Expr):
            return out, [out.attr]
        if is_group(out):
            parts = [self._outputs(o) for o in out]
            return tuple(p[0] for p in parts), [n for p in parts for n in p[1]]
        buffer = self.buffer(out)
        return Operand.of(buffer, _from_start(out)), [buffer.name]


def is_group(out: Any) -> bool:
    """Several results; a Spec is a tuple too."""
    return isinstance(out, (tuple, list)) and not hasattr(out, "strides")


device_name: Callable[[Any], str] = functools.cache(str)


def _contiguous(spec: Any) -> Any:
    return TensorSpec(spec.shape, row_major(spec.shape), 0, spec.dtype, spec.device)


def _from_start(spec: Any) -> Any:
    """A computed result is a buffer of its own: it starts at offset 0."""
    if type(spec.offset) is int and spec.offset == 0:
        return spec
    return TensorSpec(spec.shape, spec.strides, 0, spec.dtype, spec.device)


def supported(*dtypes: str) -> bool:
    """Can loop nests hold these dtypes?"""
    return LOOP_DTYPES.issuperset(dtypes)


def fits(out: Any, *tensors: Operand) -> bool:
    return supported(SHORT.get(out.dtype, ""), *[t.dtype for t in tensors]) and all(t.spec.device == out.device for t in tensors)


def loop_lowering(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a lowering that reads its tensors element by element, and gets them readable.  Where one does not fit into the nest, the operator
    itself is called."""
    def register(row: Callable[..., Any]) -> Callable[..., Any]:
        def lower(b: Builder, out: Any, *args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            tensors = [t for a in given for t in (a if isinstance(a, (list, tuple)) else (a,)) if type(t) is Operand]
            if not fits(out, *tensors):
                return NotImplemented
            return row(b, out, *map(b.all_readable, args), **{name: b.all_readable(value) for name, value in kwargs.items()})
        lowering(names)(lower)
        return row
    return register


def moved(index: Index, dim: int, by: Size) -> Index:
    return (*index[:dim], index[dim] - by, *index[dim + 1:])


def choose(inside: Any, part: Operand, index: Index, other: Expr, dtype: str) -> Expr:
    """The part's element where the index is inside of it, else `other`; in `dtype`."""
    if inside is True:
        return to(part.load(index), dtype)
    if inside is False:
        return other
    if part.dtype == dtype:
        return part.masked(index, inside, other)
    return S.where(inside, to(part.masked(index, inside, literal(0, part.dtype)), dtype), other)


def equal(a: Size, b: Size) -> Any:
    return a == b if isinstance(a, int) and isinstance(b, int) else S.eq(as_expr(a), as_expr(b))
