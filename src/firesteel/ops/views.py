"""Views: a new shape, strides and offset over the same storage; lowered to an index map, never to a nest.

That an operator is a view is read from its schema, not said here.  `split`, `unbind` and their kind give lists."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel.graph.meta import as_first
from firesteel.graph.reshape import infer_size, view_strides
from firesteel.graph.rules.base import RULES, check, clamp_size, wrap_dim, wrap_dims
from firesteel.graph.rules.refusals import known, within
from firesteel.graph.sizes import current, expands_alone, fixed, layout_less, layout_same, less, must, must_match, same, unknown
from firesteel.graph.spec import Shape, Spec, contiguous_strides, fresh, like
from firesteel.loops.lower.build import LOWERINGS, Builder
from firesteel.loops.lower.value import Index, Operand
from firesteel.loops.lower.views import first_place, from_end, lower_bits, lower_window, reshape_index
from firesteel.loops.scalars import LOOP_DTYPES, S
from firesteel.operators import find
from firesteel.ops.block import device_rule, lowering, operator, pointwise, probed_rule, refuses, shape
from firesteel.sym.expr import Expr, Size, and_, free_symbols, ge, le, lt, row_major, where
from firesteel.targets import HOST

aten = torch.ops.aten

operator("lift_fresh_copy.* expand_copy.* view_copy.* _unsafe_view.*", recompute="move")


def _viewed(x: Spec, shape: Shape, strides: Shape, offset: Size | None = None) -> Spec:
    return Spec(shape, strides, x.offset if offset is None else offset, x.dtype, x.device)


def _dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


# ---------------------------------------------------------------- reshaping

@device_rule("view _reshape_alias")
def view(x: Spec, shape: Sequence[Size], strides: Sequence[Size] | None = None) -> Spec:
    shape = infer_size(shape, x.numel())
    new = view_strides(x, shape)
    if new is None and not unknown(x.numel()) and same(x.numel(), 0):      # symbolic sizes that make nothing: any strides will do
        new = contiguous_strides(shape)
    check(new is not None, "view size is not compatible with input tensor's size and stride "
          "(at least one dimension spans across two contiguous subspaces). Use .reshape(...) instead.")
    return _viewed(x, shape, new)      # type: ignore[arg-type]  # checked above


device_rule("_unsafe_view")(lambda x, shape: view(x, shape))


@device_rule("reshape")
def reshape(x: Spec, shape: Sequence[Size]) -> Spec:
    shape = infer_size(shape, x.numel())
    new = view_strides(x, shape)
    return _viewed(x, shape, new) if new is not None else Spec(shape, contiguous_strides(shape), 0, x.dtype, x.device)


@device_rule("view_copy _reshape_copy")
def view_copy(x: Spec, shape: Sequence[Size]) -> Spec:
    shape = infer_size(shape, x.numel())
    return Spec(shape, contiguous_strides(shape), 0, x.dtype, x.device)


@refuses("view _reshape_alias _unsafe_view reshape view_copy _reshape_copy")
def refuse_view(x: Spec, shape: Sequence[Size], strides: Any = None) -> None:
    check(all(type(s) is not int or s >= -1 for s in shape), f"invalid shape dimension in {list(shape)}")
    check(sum(type(s) is int and s == -1 for s in shape) <= 1, "only one dimension can be inferred")


ALWAYS_VIEWS = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}     # `reshape` may copy


@lowering("view _unsafe_view reshape _reshape_alias flatten.using_ints view_as")
def lower_view(b: Builder, out: Any, x: Operand, *_: Any) -> Operand:
    """A reshape of a reshape is one reshape.  Strided only if the layout really is a view of x's."""
    source = x.reshaped or x
    shape = tuple(out.shape)
    if source.shape == shape and source.spec.strides == out.strides:
        return source
    strided = x.strided and (b.target in ALWAYS_VIEWS or _is_view_of(out, x.spec))
    if not strided and x.dtype not in LOOP_DTYPES:
        source, strided = b.contiguous(source), True
    source = source if strided else b.readable(source)
    return source.through(out, reshape_index(source.shape, shape), strided, reshaped=source)


def _is_view_of(out: Any, spec: Any) -> bool:
    """Does reshaping the layout `spec` into out's shape give out's strides?  Only `reshape` of a tensor that no view
    fits can differ; then the Spec is contiguous while the original is not."""
    if tuple(spec.strides) == row_major(spec.shape):
        return True
    linear = reshape_index(tuple(spec.shape), tuple(out.shape))
    for dim, size in enumerate(out.shape):
        if isinstance(size, Expr):
            return tuple(out.strides) != row_major(out.shape)
        if size <= 1:
            continue
        for step in {1, size - 1}:
            at = linear(tuple(step if d == dim else 0 for d in range(len(out.shape))))
            if sum((i * s for i, s in zip(at, spec.strides)), 0) != step * out.strides[dim]:
                return False
    return True


@device_rule("view.dtype")
def view_dtype(x: Spec, dtype: torch.dtype) -> Spec:
    old, new = x.dtype.itemsize, dtype.itemsize
    if old == new:
        return x.to(dtype)
    check(len(x.shape) > 0, "self.dim() cannot be 0 to view a tensor of another element size")
    check(same(x.strides[-1], 1), "self.stride(-1) must be 1 to view a tensor of another element size")
    if old > new:
        k = old // new
        return Spec((*x.shape[:-1], x.shape[-1] * k), (*(s * k for s in x.strides[:-1]), 1), x.offset * k, dtype, x.device)
    k = new // old
    check(same(x.shape[-1] % k, 0) and all(same(s % k, 0) for s in x.strides[:-1]) and same(x.offset % k, 0),
          "self.size(-1), strides and offset must be divisible to view a tensor of a larger element size")
    return Spec((*x.shape[:-1], x.shape[-1] // k), (*(s // k for s in x.strides[:-1]), 1), x.offset // k, dtype, x.device)


# ---------------------------------------------------------------- the same elements in another order

device_rule("alias detach lift_fresh")(lambda x: x)
lowering("alias detach lift_fresh lift resolve_conj resolve_neg")(lambda b, out, x, *_: x)
probed_rule("lift_fresh_copy lift")(lambda x: like(x))
pointwise("lift_fresh_copy")(lambda x: x)


@device_rule("permute")
def permute(x: Spec, dims: Sequence[int]) -> Spec:
    order = wrap_dims(dims, len(x.shape))
    check(len(order) == len(x.shape), "permute(sparse_coo): number of dimensions in the tensor input does not match the length of dims")
    return _viewed(x, tuple(x.shape[d] for d in order), tuple(x.strides[d] for d in order))


@lowering("permute")
def lower_permute(b: Builder, out: Any, x: Operand, dims: Sequence[int]) -> Operand:
    rank = len(x.shape)
    place = {_dim(d, rank): n for n, d in enumerate(dims)}
    order = [place[d] for d in range(rank)]
    return x.through(out, lambda i: tuple([i[n] for n in order]))


@device_rule("transpose.int")
def transpose(x: Spec, a: int, b: int) -> Spec:
    ndim = len(x.shape)
    a, b = wrap_dim(a, ndim), wrap_dim(b, ndim)
    if a == b:
        return x
    shape, strides = list(x.shape), list(x.strides)
    shape[a], shape[b] = shape[b], shape[a]
    strides[a], strides[b] = strides[b], strides[a]
    return _viewed(x, tuple(shape), tuple(strides))


@lowering("transpose.int")
def lower_transpose(b: Builder, out: Any, x: Operand, dim0: int, dim1: int) -> Operand:
    dims = list(range(len(x.shape)))
    if dims:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return lower_permute(b, out, x, dims)


@device_rule("t")
def t(x: Spec) -> Spec:
    check(len(x.shape) <= 2, f"t() expects a tensor with <= 2 dimensions, but self is {len(x.shape)}D")
    return _viewed(x, x.shape[::-1], x.strides[::-1])


@lowering("t numpy_T mT")
def lower_t(b: Builder, out: Any, x: Operand) -> Operand:
    rank = len(x.shape)
    return lower_permute(b, out, x, tuple(range(rank))[::-1] if rank <= 2 else (*range(rank - 2), rank - 1, rank - 2))


@device_rule("expand")
def expand(x: Spec, sizes: Sequence[Size], *, implicit: bool = False) -> Spec:
    missing = len(sizes) - len(x.shape)
    check(missing >= 0, f"expand: the number of sizes provided ({len(sizes)}) must be greater or equal to the number of dimensions "
          f"in the tensor ({len(x.shape)})")
    shape: list[Size] = list(sizes)
    strides: list[Size] = [0] * len(sizes)
    for i in range(len(sizes) - 1, -1, -1):
        _expand_dim(x, i, i - missing, shape, strides)
    return _viewed(x, tuple(shape), tuple(strides))


def _expand_dim(x: Spec, i: int, dim: int, shape: list[Size], strides: list[Size]) -> None:
    """Fills in one dimension; the faster ones are done.  `dim` is the dimension of x that it comes from, negative if it is new."""
    size = shape[i]
    if type(size) is Expr and not unknown(size) and less(size, 0):      # a symbol may be -1, too
        size = shape[i] = fixed(size)
    check(type(size) is not int or size >= -1, f"expand: invalid size {size}")
    if dim < 0:
        check(type(size) is not int or size != -1, "expand: -1 is not allowed in a leading, non-existing dimension")
        if x.shape and type(size) is int and size == 1:     # laid out as if contiguous
            strides[i] = shape[i + 1] * strides[i + 1]
        return
    old = x.shape[dim]
    if type(size) is int and size == -1 or (not (type(old) is int and old == 1) and expands_alone(size, old)) or size == 1 == old:
        shape[i], strides[i] = old, x.strides[dim]
        return
    check(same(old, 1), f"The expanded size of the tensor ({size}) must match the existing size ({old}) at non-singleton dimension {i}.")


@lowering("expand")
def lower_expand(b: Builder, out: Any, x: Operand, sizes: Sequence[Size], implicit: bool = False) -> Operand:
    drop = len(out.shape) - len(x.shape)
    if not drop and tuple(out.shape) == x.shape:
        return x
    kept = [n != 1 for n in x.shape]
    return x.through(out, lambda i: tuple([k if keep else 0 for keep, k in zip(kept, i[drop:])]))


@device_rule("unsqueeze")
def unsqueeze(x: Spec, dim: int) -> Spec:
    dim = wrap_dim(dim, len(x.shape) + 1)
    step = x.shape[dim] * x.strides[dim] if dim < len(x.shape) else 1
    return _viewed(x, (*x.shape[:dim], 1, *x.shape[dim:]), (*x.strides[:dim], step, *x.strides[dim:]))


@lowering("unsqueeze")
def lower_unsqueeze(b: Builder, out: Any, x: Operand, dim: int) -> Operand:
    dim = _dim(dim, len(x.shape) + 1)
    return x.through(out, lambda i: i[:dim] + i[dim + 1:])


@device_rule("squeeze squeeze.dim squeeze.dims")
def squeeze(x: Spec, dim: int | Sequence[int] | None = None) -> Spec:
    ndim = len(x.shape)
    dims = range(ndim) if dim is None else wrap_dims([dim] if isinstance(dim, int) else dim, ndim)
    # an answer that only run time knows is an error: the rank depends on it
    keep = [d for d in range(ndim) if d not in dims or not same(x.shape[d], 1)]
    return _viewed(x, tuple(x.shape[d] for d in keep), tuple(x.strides[d] for d in keep))


@lowering("squeeze squeeze.dim squeeze.dims")
def lower_squeeze(b: Builder, out: Any, x: Operand, dims: int | Sequence[int] | None = None) -> Operand:
    rank = len(x.shape)
    if len(out.shape) == rank:
        return x
    asked = range(rank) if dims is None else {_dim(d, rank) for d in ([dims] if isinstance(dims, int) else dims)}
    gone = {d for d in asked if x.shape[d] == 1}

    def index(i: Index) -> Index:
        rest = iter(i)
        return tuple([0 if d in gone else next(rest) for d in range(rank)])
    return x.through(out, index)


# ---------------------------------------------------------------- parts

@device_rule("slice.Tensor")
def slice_(x: Spec, dim: int = 0, start: Size | None = None, end: Size | None = None, step: int = 1) -> Spec:
    check(len(x.shape) > 0, "slice() cannot be applied to a 0-dim tensor.")
    dim = wrap_dim(dim, len(x.shape))
    check(less(0, step), "slice step must be positive")
    size = x.shape[dim]
    start = _slice_bound(0 if start is None else start, size)
    end = size if end is None or (type(end) is int and end >= 2**62) else _slice_bound(end, size)
    if end is not size:
        end = clamp_size(end, start, None)
    length = end - start if type(step) is int and step == 1 else (end - start + step - 1) // step
    return _viewed(x, (*x.shape[:dim], length, *x.shape[dim + 1:]), (*x.strides[:dim], x.strides[dim] * step, *x.strides[dim + 1:]),
                   x.offset + start * x.strides[dim])


def _slice_bound(bound: Size, size: Size) -> Size:
    if type(bound) is int and bound == 0 or bound is size:
        return bound
    return clamp_size(_counted_from_end(bound, size), 0, size)


def _counted_from_end(bound: Size, size: Size) -> Size:
    """Negative bounds count from the end; where the sign is known at run time only, or is that of a difference, which may change
    between calls, both cases stay in the expression."""
    if type(bound) is Expr and (len(free_symbols(bound)) > 1 or unknown(bound)) and current.env.known(ge(bound, 0)) is None:
        return where(lt(bound, 0), bound + size, bound)
    return bound + size if less(bound, 0) else bound


@lowering("slice.Tensor")
def lower_slice(b: Builder, out: Any, x: Operand, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1) -> Operand:
    dim = _dim(dim, len(x.shape))
    return _part(out, x, dim, first_place(b, start, x.shape[dim]), step)


def _part(out: Any, x: Operand, dim: int, start: Size, step: Size = 1, strided: bool = True) -> Operand:
    if type(start) is int and start == 0 and step == 1 and tuple(out.shape) == x.shape:
        return x

    def index(i: Index) -> Index:
        at = i[dim] if step == 1 else i[dim] * step
        return (*i[:dim], at + start, *i[dim + 1:])
    return x.through(out, index, strided)


device_rule("narrow_copy")(lambda x, dim, start, length: fresh(x, slice_(x, dim, start, start + length).shape))


@refuses("narrow_copy")
def refuse_narrow_copy(x: Spec, dim: int, start: Size, length: Size) -> None:
    check(len(x.shape) > 0, "narrow() cannot be applied to a 0-dim tensor.")
    size = x.shape[wrap_dim(dim, len(x.shape))]
    if known(start) and known(size) and not -size <= start <= size:
        raise IndexError(f"start out of range (expected to be in range of [{-size}, {size}], but got {start})")
    begin = start + size if known(start) and start < 0 else start
    within(length, 0, size - begin, f"start ({start}) + length ({length}) exceeds dimension size ({size}).")


@lowering("narrow")
def lower_narrow(b: Builder, out: Any, x: Operand, dim: int, start: Size, length: Size) -> Operand:
    dim = _dim(dim, len(x.shape))
    return _part(out, x, dim, first_place(b, start, x.shape[dim]))


@device_rule("select.int")
def select(x: Spec, dim: int, index: Size) -> Spec:
    if not x.shape:
        raise IndexError("select() cannot be applied to a 0-dim tensor.")
    dim = wrap_dim(dim, len(x.shape))
    size = x.shape[dim]
    text = f"select(): index {index} out of range for tensor of size {list(x.shape)} at dimension {dim}"
    if unknown(index, size):
        must(and_(le(-size, index), lt(index, size)), text)
    elif less(index, -size) or not less(index, size):
        raise IndexError(text)
    index = _counted_from_end(index, size)
    return _viewed(x, x.shape[:dim] + x.shape[dim + 1:], x.strides[:dim] + x.strides[dim + 1:], x.offset + index * x.strides[dim])


@lowering("select.int")
def lower_select(b: Builder, out: Any, x: Operand, dim: int, index: Size) -> Operand:
    dim = _dim(dim, len(x.shape))
    at = from_end(b, index, x.shape[dim])
    return x.through(out, lambda i: (*i[:dim], at, *i[dim:]))


@device_rule("unbind.int")
def unbind(x: Spec, dim: int = 0) -> list[Spec]:
    dim = wrap_dim(dim, len(x.shape))
    return [select(x, dim, i) for i in range(fixed(x.shape[dim]))]


lowering("unbind.int")(lambda b, out, x, dim=0: tuple(lower_select(b, spec, x, dim, n) for n, spec in enumerate(out)))


@device_rule("split.Tensor")
def split(x: Spec, size: Size, dim: int = 0) -> list[Spec]:
    dim = wrap_dim(dim, len(x.shape))
    must(ge(size, 0), "split expects split_size be non-negative")
    if same(x.shape[dim], 0) and same(size, 0):
        return [slice_(x, dim, 0, 0)]
    count = max(fixed((x.shape[dim] + size - 1) // size), 1)
    starts = [size * i for i in range(count)]
    return [slice_(x, dim, s, e) for s, e in zip(starts, [*starts[1:], x.shape[dim]])]


@device_rule("split_with_sizes")
def split_with_sizes(x: Spec, sizes: Sequence[Size], dim: int = 0) -> list[Spec]:
    dim = wrap_dim(dim, len(x.shape))
    total: Size = 0
    result = []
    for size in sizes:
        result.append(slice_(x, dim, total, total + size))
        total = total + size
    must_match(total, x.shape[dim], f"split_with_sizes expects split_sizes to sum exactly to {x.shape[dim]}, but got {list(sizes)}")
    return result


device_rule("unsafe_split.Tensor")(split)
device_rule("unsafe_split_with_sizes")(split_with_sizes)


@refuses("split_with_sizes split_with_sizes_copy unsafe_split_with_sizes")
def refuse_split_with_sizes(x: Spec, sizes: Sequence[Size], dim: int = 0) -> None:
    for size in sizes:
        within(size, 0, None, f"split_with_sizes expects split_sizes have only non-negative entries, but got {list(sizes)}")


UNSAFE_SPLITS = (aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)


@lowering("split.Tensor split_with_sizes chunk split.sizes tensor_split.sections unsafe_split.Tensor unsafe_split_with_sizes")
def lower_split(b: Builder, out: Any, x: Operand, sizes: Any, dim: int = 0) -> tuple[Operand, ...]:
    """However the sizes were given, the Specs say them.  The parts of `unsafe_split` need not alias x, and none is x itself."""
    if b.target in UNSAFE_SPLITS and any(spec.shape == x.shape for spec in out):
        return NotImplemented
    dim = _dim(dim, len(x.shape))
    parts: list[Operand] = []
    start: Size = 0
    for spec in out:
        strided = spec.offset == x.spec.offset + start * x.spec.strides[dim]
        parts.append(_part(spec, x if strided else b.readable(x), dim, start, strided=strided))
        start = start + spec.shape[dim]
    return tuple(parts)


@device_rule("diagonal")
def diagonal(x: Spec, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Spec:
    ndim = len(x.shape)
    a, b = wrap_dim(dim1, ndim), wrap_dim(dim2, ndim)
    check(a != b, "diagonal dimensions cannot be identical")
    rows, columns = x.shape[a], x.shape[b]
    length = _least(rows, columns - offset) if offset >= 0 else _least(rows + offset, columns)
    length = clamp_size(length, 0, None)
    start = x.offset
    if layout_less(0, length) or not layout_same(length, 0):
        start = start + (offset * x.strides[b] if offset >= 0 else -offset * x.strides[a])
    keep = [d for d in range(ndim) if d not in (a, b)]
    return _viewed(x, (*(x.shape[d] for d in keep), length), (*(x.strides[d] for d in keep), x.strides[a] + x.strides[b]), start)


def _least(a: Size, b: Size) -> Size:
    return clamp_size(a, None, b)


@lowering("diagonal")
def lower_diagonal(b: Builder, out: Any, x: Operand, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Operand:
    rank = len(x.shape)
    row, column = _dim(dim1, rank), _dim(dim2, rank)
    down, right = max(-offset, 0), max(offset, 0)

    def index(i: Index) -> Index:
        rest = iter(i[:-1])
        return tuple([i[-1] + down if d == row else i[-1] + right if d == column else next(rest) for d in range(rank)])
    return x.through(out, index)


@device_rule("unfold")
def unfold(x: Spec, dim: int, size: Size, step: Size) -> Spec:
    dim = wrap_dim(dim, len(x.shape))
    if not x.shape:
        check(not less(1, size), f"maximum size for tensor at dimension 0 is 1 but size is {size}")
        return _viewed(x, (size,), (1,))
    must(le(size, x.shape[dim]), f"maximum size for tensor at dimension {dim} is {x.shape[dim]} but size is {size}")
    check(less(0, step), f"step is {step} but must be > 0")
    count = (x.shape[dim] - size) // step + 1
    return _viewed(x, (*x.shape[:dim], count, *x.shape[dim + 1:], size),
                   (*x.strides[:dim], x.strides[dim] * step, *x.strides[dim + 1:], x.strides[dim]))


@refuses("unfold unfold_copy")
def refuse_unfold(x: Spec, dim: int, size: Size, step: Size) -> None:
    within(size, 0, None, f"size is {size} but must be >= 0")
    within(step, 1, None, f"step is {step} but must be > 0")


@lowering("unfold")
def lower_unfold(b: Builder, out: Any, x: Operand, dim: int, size: int, step: int) -> Operand:
    if not x.shape:
        return x.through(out, lambda i: ())
    dim = _dim(dim, len(x.shape))
    return x.through(out, lambda i: (*i[:dim], i[dim] * step + i[-1], *i[dim + 1:-1]))


@device_rule("as_strided")
def as_strided(x: Spec, shape: Sequence[Size], strides: Sequence[Size], offset: Size | None = None) -> Spec:
    check(len(shape) == len(strides), "mismatch in length of strides and shape")
    return _viewed(x, tuple(shape), tuple(strides), offset)


lowering("view.dtype")(lower_bits)
lowering("as_strided view_as_real view_as_complex real")(lower_window)


# ---------------------------------------------------------------- complex numbers

@device_rule("view_as_real")
def view_as_real(x: Spec) -> Spec:
    dtype = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}.get(x.dtype)
    check(dtype is not None, "view_as_real is only supported for complex tensors")
    return Spec((*x.shape, 2), (*(s * 2 for s in x.strides), 1), x.offset * 2, dtype, x.device)     # type: ignore[arg-type]  # checked above


@device_rule("view_as_complex")
def view_as_complex(x: Spec) -> Spec:
    dtype = {torch.float32: torch.complex64, torch.float64: torch.complex128, torch.float16: torch.complex32}.get(x.dtype)
    check(dtype is not None and bool(x.shape) and same(x.shape[-1], 2) and same(x.strides[-1], 1),
          "view_as_complex takes a floating tensor whose last dimension has size 2 and stride 1")
    return Spec(x.shape[:-1], tuple(s // 2 for s in x.strides[:-1]), x.offset // 2, dtype, x.device)     # type: ignore[arg-type]  # checked above


@device_rule("_conj _neg_view")
def conj(x: Spec | complex) -> Spec:
    """Eager sets a bit and shares the storage; abstract tensors have no such bits, and what is recorded computes."""
    return x if type(x) is Spec else Spec((), (), 0, torch.complex128, HOST)


@lowering("_conj")
def lower_conj(b: Builder, out: Any, x: Any) -> Any:
    """A lazy conjugate shares its argument's bytes but not its values: it is computed.  A number's gradient formula asks for that of the number."""
    if type(x) is not Operand:
        return b.call(aten.scalar_tensor.default, (complex(x).conjugate(),), {"dtype": out.dtype}, out)
    return b.call(aten._conj_physical.default, (x,), {}, out)


shape("_conj_physical")(as_first)
pointwise("_neg_view")(S.neg)


# ---------------------------------------------------------------- the same parts as fresh tensors

def _copy_rule(view_rule, /, x: Spec, *args, **kwargs):
    result = view_rule(x, *args, **kwargs)
    made = [fresh(x, r.shape).to(r.dtype) for r in (result if type(result) is list else [result])]
    return made if type(result) is list else made[0]


for _name in ("alias", "permute", "transpose.int", "t", "expand", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims", "slice.Tensor", "select.int",
              "unbind.int", "split.Tensor", "split_with_sizes", "diagonal", "unfold", "as_strided", "detach", "view_as_real", "view_as_complex"):
    _packet, *_overload = _name.split(".")
    device_rule(".".join([f"{_packet}_copy", *_overload]))(functools.partial(_copy_rule, RULES[find(_name)]))


def _copied(view: Callable[..., Any], /, b: Builder, out: Any, x: Operand, *args: Any, **kwargs: Any) -> Any:
    """The lowering of `<view>_copy`: the view's elements in memory of their own."""
    if x.dtype not in LOOP_DTYPES:
        return NotImplemented
    if hasattr(out, "strides"):
        return b.copy(view(b, out, x, *args, **kwargs), out)
    return tuple([b.copy(part, spec) for spec, part in zip(out, view(b, out, x, *args, **kwargs))])


for _name in ("permute", "transpose.int", "t", "alias", "detach", "expand", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims", "view",
              "slice.Tensor", "select.int", "unbind.int", "split.Tensor", "split_with_sizes", "diagonal", "unfold"):
    _packet, *_overload = _name.split(".")
    lowering(".".join([f"{_packet}_copy", *_overload]))(functools.partial(_copied, LOWERINGS[find(_name)]))
