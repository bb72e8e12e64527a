"""The loop IR: all that a compiled program can contain, on two pages.

    Program  = Buffer* , (Nest | Extern)*            in execution order
    Buffer   = name, dtype, shape, strides, offset, kind
    Nest     = name, axes (parallel), phases         one kernel
    Phase    = kind, axes, reduces, stores           one sweep over its own axes, for each point of the nest's axes
    Reduce   = name, op, value, dtype                an accumulator; read by later phases as acc(name)
    Store    = buffer, index, value, mode
    Extern   = outputs, target, args, kwargs         a library call

Scalars are `sym.expr.Expr`s with the operators of `loops/scalars.py`, and four leaves that only exist here:

    axis(a)                   the current value of an axis (i64)
    load(buffer, index...)    element of a buffer at a multi-dimensional index; `masked` below for guarded reads
    acc(name)                 the value of a Reduce: its final value in later phases; its running value (the current
                              element included) in the stores of the same phase if that phase is a scan
    check_index(i, n)         i, wrapped once if negative; an i outside of [-n, n) makes the kernel report IndexError;
                              with attr "strict" a negative i is an error too

What always holds
 1. Indices are multi-dimensional, one Expr a dimension of the buffer; strides are applied by the printers alone.  So a
    producer `b[i, j] = e(i, j)` is inlined into a consumer's `load(b, x, y)` by substituting i := x, j := y.
 2. Every store of a nest writes each element at most once ("set"), or adds to it ("add"; then points may collide).  Points of a "set" may
    collide where a check_index stands in the index: eager too leaves open which of two writes stays.
 3. Points of the parallel axes are independent of each other.  A phase may load what an earlier phase of the same nest
    stored, but only at the same point of the parallel axes.
 4. Axis names are unique in a nest; a phase's axes are visible in that phase alone.
 5. Masked loads never touch memory where the mask is false.
 6. Sizes are ints or integer Exprs over symbols; no load stands in a size.
 7. A dtype of bf16 or f16 is a storage type: arithmetic on it is done in f32, and `to` rounds.  A rounding with attr
    "loose" stands where eager only stores between two operators: to(f32, to(bf16, e, "loose")) may become e.  One with
    attr None was asked for by the program (or by config.eager_rounding), or is of a value that a comparison, an index, a branch
    or a tie sees (autograd/exact.py), and is never dropped.
 8. A store's index is, for each dimension, an axis of the nest or phase, the constant 0 (a dimension of size 1), or any
    other Expr where a view is written; a nest that writes a whole buffer has the first two only.

Softmax over the rows of x[n, m], as one nest of three phases:

    nest softmax  [i < n]
      reduce [r < m]   m0 = max(load(x, i, r))
      reduce [r1 < m]  s0 = sum(exp(load(x, i, r1) - acc(m0)))
      map    [r2 < m]  y[i, r2] = exp(load(x, i, r2) - acc(m0)) / acc(s0)
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any, Literal

from firesteel.records import dataclass
from firesteel.sym.expr import Expr, Size, as_expr, bits, const, make, postorder
from firesteel.sym.node import set_loads
from firesteel.targets import CPU

BufferKind = Literal["input", "temp", "output", "constant"]
PhaseKind = Literal["map", "reduce", "scan"]
StoreMode = Literal["set", "add"]


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop: 0 <= name < extent."""
    name: str
    extent: Size

    @property
    def value(self) -> Expr:
        return axis(self.name)

    def __str__(self) -> str:
        return f"{self.name} < {self.extent}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of one storage.  `shape` and `strides` are those of its elements as stored; strides in elements."""
    name: str
    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    kind: BufferKind = "temp"
    device: str = CPU
    offset: Size = 0            # in elements; other than 0 only for inputs that are views
    value: Any = field(default=None, compare=False)     # the tensor of a "constant"


@dataclass(frozen=True, slots=True)
class Reduce:
    """`name` accumulates `op` over the phase's axes, starting from the op's identity.  ops: REDUCE_OPS of loops/scalars.py."""
    name: str
    op: str
    value: Expr
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} = {self.op}({self.value})"


@dataclass(frozen=True, slots=True)
class Store:
    buffer: str
    index: tuple[Expr, ...]
    value: Expr
    mode: StoreMode = "set"

    def __str__(self) -> str:
        return f"{self.buffer}[{', '.join(map(str, self.index))}] {'+=' if self.mode == 'add' else '='} {self.value}"


@dataclass(frozen=True, slots=True)
class Phase:
    """map: stores only.  reduce: accumulators, and stores that read earlier accumulators.  scan: like reduce, one axis,
    in order, stores see the running value.  A phase without axes runs once for each point of the nest."""
    kind: PhaseKind
    axes: tuple[Axis, ...] = ()
    reduces: tuple[Reduce, ...] = ()
    stores: tuple[Store, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"  {self.kind} [{', '.join(map(str, self.axes))}]", *(f"    {part}" for part in (*self.reduces, *self.stores))])

    def exprs(self) -> list[Expr]:
        """Accumulators' values, then each store's value and index."""
        return [*[reduce.value for reduce in self.reduces], *[expr for store in self.stores for expr in (store.value, *store.index)]]


class ProgramStep:
    """What the stages ask of a step of a Program; a further kind of step answers these too."""
    __slots__ = ()
    name: str

    @property
    def nest(self) -> Nest | None:
        """The loops, where it is a kernel."""
        return None

    @property
    def call(self) -> Extern | None:
        """The library call, where it is one: it takes and gives whole tensors."""
        return None

    def map(self, change: Callable[[Nest], Any]) -> Any:
        """With its loops changed."""
        return self

    def reads(self) -> tuple[str, ...]:
        """Buffers whose contents the step may read."""
        raise NotImplementedError

    def writes(self) -> tuple[str, ...]:
        raise NotImplementedError

    def makes(self, buffer: str) -> bool:
        """Is the buffer's memory made by the step itself?"""
        return False

    def bound_symbols(self, buffers: Mapping[str, Buffer]) -> tuple[str, ...]:
        """Symbols that the step gives a value."""
        return ()

    def values(self, buffers: Mapping[str, Buffer]) -> list[Any]:
        """Sizes and numbers that must be known before the step runs."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Nest(ProgramStep):
    """One kernel.  `origin` names the graph nodes it came from, for people."""
    name: str
    axes: tuple[Axis, ...]
    phases: tuple[Phase, ...]
    origin: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return "\n".join([f"nest {self.name} [{', '.join(map(str, self.axes))}]", *map(str, self.phases)])

    @property
    def nest(self) -> Nest:
        return self

    def map(self, change: Callable[[Nest], Any]) -> Any:
        return change(self)

    def exprs(self) -> list[Expr]:
        return [expr for phase in self.phases for expr in phase.exprs()]

    def stores(self) -> list[Store]:
        return [store for phase in self.phases for store in phase.stores]

    def reads(self) -> tuple[str, ...]:
        """A store that adds reads too."""
        added = [store.buffer for store in self.stores() if store.mode == "add"]
        return tuple(dict.fromkeys([*[load.attr for load in all_loads(self.exprs())], *added]))

    def writes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([store.buffer for store in self.stores()]))

    def values(self, buffers: Mapping[str, Buffer]) -> list[Any]:
        axes = [*self.axes, *(axis for phase in self.phases for axis in phase.axes)]
        return [*(axis.extent for axis in axes), *self.exprs(), *_layouts((*self.reads(), *self.writes()), buffers)]


@dataclass(frozen=True, slots=True)
class View:
    """A strided window on a buffer's storage, as a library call sees it.  Strides and offset are in elements, counted
    from the start of the buffer's storage.  `dtype` differs from the buffer's only for view-as-dtype."""
    buffer: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    dtype: str


@dataclass(frozen=True, slots=True)
class Given:
    """An input, by its number, that is neither a tensor nor a number: a generator of random numbers.  Only library calls take it."""
    number: int


@dataclass(frozen=True, slots=True)
class Extern(ProgramStep):
    """outputs = target(*args, **kwargs).  Arguments are Views, Exprs, Givens, plain Python values, and lists of these.  `outputs`
    name the buffers that the results become, flattened in order (None for a result nobody reads); a name that is no
    buffer's is a symbol, whose value the result is.  `mutates`: buffers written in place by the call (their Views are
    among the arguments)."""
    name: str
    outputs: tuple[str | None, ...]
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    mutates: tuple[str, ...] = ()
    out: bool = False           # the target takes out=: it writes into preallocated outputs
    origin: tuple[str, ...] = field(default=(), compare=False)
    # unbacked symbols that the results bind: (symbol, output buffer, "shape" | "stride", dimension).  An output that is no buffer
    # is a symbol too: the call returns its value.
    binds: tuple[tuple[str, str, str, int], ...] = ()

    def __str__(self) -> str:
        given = [_shown(arg) for arg in self.args] + [f"{key}={_shown(value)}" for key, value in self.kwargs.items()]
        return f"call {', '.join(map(str, self.outputs))} = {self.target}({', '.join(given)})"

    @property
    def call(self) -> Extern:
        return self

    def arguments(self) -> list[Any]:
        """Views, sizes and plain values, however nested."""
        return list(_leaves((*self.args, *self.kwargs.values())))

    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([arg.buffer for arg in self.arguments() if isinstance(arg, View)]))

    def writes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*[name for name in self.outputs if name is not None], *self.mutates]))

    def makes(self, buffer: str) -> bool:
        return not self.out and buffer in self.outputs

    def is_number(self, buffers: Mapping[str, Buffer]) -> bool:
        """Is it Python's computation of a number from numbers?"""
        return len(self.outputs) == 1 and not self.reads() and not self.mutates and self.outputs[0] is not None and self.outputs[0] not in buffers

    def bound_symbols(self, buffers: Mapping[str, Buffer]) -> tuple[str, ...]:
        """Those read off its results, and results that are numbers themselves."""
        return (*[bind[0] for bind in self.binds], *[name for name in self.outputs if name is not None and name not in buffers])

    def values(self, buffers: Mapping[str, Buffer]) -> list[Any]:
        numbers = [n for arg in self.arguments() for n in ((*arg.shape, *arg.strides, arg.offset) if isinstance(arg, View) else (arg,))]
        return numbers + (_layouts([name for name in self.outputs if name is not None], buffers) if self.out else [])


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _layouts(names: Iterable[str], buffers: Mapping[str, Buffer]) -> list[Size]:
    return [size for name in names if name in buffers for size in (*buffers[name].shape, *buffers[name].strides)]


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered graph.  `inputs` are names of buffers or of scalar symbols, in the graph's order (None: unused);
    `outputs` are Views, Exprs (scalars), or plain values such as None.  `symbols` says where each size symbol is read
    at run time: (input number, "shape" | "stride" | "offset" | "value", dimension).  `boxed`: the inputs come in one list, which is emptied:
    each is freed behind its last reader.  `into`: (result, input) buffers of one layout, where the result is what the caller writes to the input, and
    nobody else wants it; (input, input) where steps write it there."""
    buffers: dict[str, Buffer]
    steps: tuple[ProgramStep, ...]
    inputs: tuple[str | None, ...]
    outputs: tuple[Any, ...]
    symbols: dict[str, tuple[int, str, int]]
    boxed: bool = False
    into: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return "\n".join([*map(str, self.steps), f"return {', '.join(map(_shown, self.outputs))}"])


def _shown(value: Any) -> str:
    """An argument of a library call, or an output, for people."""
    if isinstance(value, View):
        return value.buffer
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value)


# ---------------------------------------------------------------- leaves

LOADS = ("load", "masked")
LOADING, CHECKING, AXES, ACCUMULATORS = bits(*LOADS), bits("check_index"), bits("axis"), bits("acc")      # for `Expr.holds`


def all_loads(exprs: Iterable[Expr]) -> list[Expr]:
    """Distinct loads, plain and masked, those in the indices of others included."""
    found: dict[Expr, None] = {}
    for expr in exprs:
        if expr.holds & LOADING:
            try:
                loads = expr._loads
            except AttributeError:
                loads = tuple([node for node in postorder(expr, only=LOADING) if node.op in LOADS])
                set_loads(expr, loads)
            found.update(dict.fromkeys(loads))
    return list(found)


def axis(name: str) -> Expr:
    return make("axis", "i64", (), name)


def load(buffer: Buffer, index: tuple[Size, ...]) -> Expr:
    return make("load", buffer.dtype, tuple(as_expr(i) for i in index), buffer.name)


def masked(buffer: Buffer, index: tuple[Size, ...], mask: Expr, other: Expr) -> Expr:
    """The element where `mask` holds, else `other`; args are (mask, other, *index)."""
    return make("masked", buffer.dtype, (mask, other, *(as_expr(i) for i in index)), buffer.name)


def acc(reduce: Reduce) -> Expr:
    return make("acc", reduce.dtype, (), reduce.name)


def check_index(index: Expr, size: Size, strict: bool = False) -> Expr:
    return make("check_index", "i64", (index, as_expr(size)), "strict" if strict else None)


def names_by_data(index: tuple[Expr, ...]) -> bool:
    """Does data say the place, so that points may collide there?"""
    return any(part.holds & CHECKING for part in index)


def axes_of(*exprs: Expr) -> set[str]:
    """Names of the axes that they depend on."""
    return {node.attr for node in postorder(*exprs, only=AXES) if node.op == "axis"}


def idle_axes(index: tuple[Expr, ...], axes: tuple[Axis, ...]) -> set[str]:
    """The axes of more than one point that an index does not depend on."""
    used = axes_of(*index)
    return {axis.name for axis in axes if not (type(axis.extent) is int and axis.extent <= 1)} - used


def zero(dtype: str) -> Expr:
    return const({"bool": False, "f": 0.0, "b": 0.0}.get(dtype if dtype == "bool" else dtype[0], 0), dtype)
