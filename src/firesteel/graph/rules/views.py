"""Rules of views: a new shape, strides and offset over the same storage.

That an operator is a view is read from its schema, not said here; a rule gives the Spec alone.  `split`, `unbind` and their
kind give lists.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from firesteel.graph.rules.base import check, clamp_size, rule, wrap_dim, wrap_dims
from firesteel.graph.sizes import current, expands_alone, fixed, layout_less, layout_same, less, must, must_match, product, same, unknown
from firesteel.graph.spec import Shape, Spec, contiguous_strides, is_contiguous, like
from firesteel.sym.expr import Expr, Size, and_, free_symbols, ge, le, lt, ne, where


def _viewed(x: Spec, shape: Shape, strides: Shape, offset: Size | None = None) -> Spec:
    return Spec(shape, strides, x.offset if offset is None else offset, x.dtype, x.device)


# ---------------------------------------------------------------- reshaping

def infer_size(shape: Sequence[Size], numel: Size) -> Shape:
    """The shape with its -1, if there is one, filled in; checks the number of elements."""
    shape = tuple(shape)
    if any(type(s) is int and s == -1 for s in shape):
        place = shape.index(-1)
        others = product(s for i, s in enumerate(shape) if i != place)
        for other in (s for i, s in enumerate(shape) if i != place):      # one by one: small facts are worth more
            must(ne(other, 0), f"cannot reshape tensor of 0 elements into shape {list(shape)} because the unspecified dimension size -1 "
                 "can be any value and is ambiguous")
        shape = (*shape[:place], numel // others, *shape[place + 1:])
    must_match(product(shape), numel, f"shape '{list(shape)}' is invalid for input of size {numel}")
    return shape


def view_strides(x: Spec, shape: Shape) -> Shape | None:
    """The strides with which the storage of x shows as `shape`; None where only a copy can."""
    if x.strides == contiguous_strides(x.shape):
        return contiguous_strides(shape)
    if 0 in x.shape:
        return x.strides if x.shape == shape else contiguous_strides(shape)
    strides: list[Size] = []
    rest = list(shape)                      # sizes of the new shape not yet laid out, slowest first
    for numel, step in _memory_runs(x):
        laid: Size = 1
        while rest and (same(rest[-1], 1) or less(laid, numel)):
            strides.append(laid * step)
            laid = laid * rest.pop()
        if not same(laid, numel):
            return None
    return None if rest else tuple(reversed(strides))


def _memory_runs(x: Spec) -> list[tuple[Size, Size]]:
    """(elements, stride of the fastest) of each run of dimensions that lie evenly in memory, fastest run first."""
    runs: list[tuple[Size, Size]] = []
    numel: Size = 1
    step: Size = x.strides[-1] if x.shape else 1
    for dim in range(len(x.shape) - 1, -1, -1):
        numel = numel * x.shape[dim]
        if dim and (same(x.shape[dim - 1], 1) or same(x.strides[dim - 1], numel * step)):
            continue
        runs.append((numel, step))
        if dim:
            numel, step = 1, x.strides[dim - 1]
    return runs or [(1, 1)]


@rule("view _reshape_alias")
def view(x: Spec, shape: Sequence[Size], strides: Sequence[Size] | None = None) -> Spec:
    shape = infer_size(shape, x.numel())
    new = view_strides(x, shape)
    if new is None and not unknown(x.numel()) and same(x.numel(), 0):      # symbolic sizes that make nothing: any strides will do
        new = contiguous_strides(shape)
    check(new is not None, "view size is not compatible with input tensor's size and stride "
          "(at least one dimension spans across two contiguous subspaces). Use .reshape(...) instead.")
    return _viewed(x, shape, new)      # type: ignore[arg-type]  # checked above


@rule("_unsafe_view")
def unsafe_view(x: Spec, shape: Sequence[Size]) -> Spec:
    return view(x, shape)


@rule("reshape")
def reshape(x: Spec, shape: Sequence[Size]) -> Spec:
    shape = infer_size(shape, x.numel())
    new = view_strides(x, shape)
    return _viewed(x, shape, new) if new is not None else Spec(shape, contiguous_strides(shape), 0, x.dtype, x.device)


@rule("view_copy _reshape_copy")
def view_copy(x: Spec, shape: Sequence[Size]) -> Spec:
    shape = infer_size(shape, x.numel())
    return Spec(shape, contiguous_strides(shape), 0, x.dtype, x.device)


@rule("view.dtype")
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

@rule("alias detach lift_fresh")
def alias(x: Spec) -> Spec:
    return x


@rule("permute")
def permute(x: Spec, dims: Sequence[int]) -> Spec:
    order = wrap_dims(dims, len(x.shape))
    check(len(order) == len(x.shape), "permute(sparse_coo): number of dimensions in the tensor input does not match the length of dims")
    return _viewed(x, tuple(x.shape[d] for d in order), tuple(x.strides[d] for d in order))


@rule("transpose.int")
def transpose(x: Spec, a: int, b: int) -> Spec:
    ndim = len(x.shape)
    a, b = wrap_dim(a, ndim), wrap_dim(b, ndim)
    if a == b:
        return x
    shape, strides = list(x.shape), list(x.strides)
    shape[a], shape[b] = shape[b], shape[a]
    strides[a], strides[b] = strides[b], strides[a]
    return _viewed(x, tuple(shape), tuple(strides))


@rule("t")
def t(x: Spec) -> Spec:
    check(len(x.shape) <= 2, f"t() expects a tensor with <= 2 dimensions, but self is {len(x.shape)}D")
    return _viewed(x, x.shape[::-1], x.strides[::-1])


@rule("expand")
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
    """Fills in one dimension; the faster ones are done.  `dim` is the dimension of x that it shows, negative if it is new."""
    size = shape[i]
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


@rule("unsqueeze")
def unsqueeze(x: Spec, dim: int) -> Spec:
    dim = wrap_dim(dim, len(x.shape) + 1)
    step = x.shape[dim] * x.strides[dim] if dim < len(x.shape) else 1
    return _viewed(x, (*x.shape[:dim], 1, *x.shape[dim:]), (*x.strides[:dim], step, *x.strides[dim:]))


@rule("squeeze squeeze.dim squeeze.dims")
def squeeze(x: Spec, dim: int | Sequence[int] | None = None) -> Spec:
    ndim = len(x.shape)
    dims = range(ndim) if dim is None else wrap_dims([dim] if isinstance(dim, int) else dim, ndim)
    # an answer that only run time knows is an error: the rank depends on it
    keep = [d for d in range(ndim) if d not in dims or not same(x.shape[d], 1)]
    return _viewed(x, tuple(x.shape[d] for d in keep), tuple(x.strides[d] for d in keep))


# ---------------------------------------------------------------- parts

@rule("slice.Tensor")
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


@rule("select.int")
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


@rule("unbind.int")
def unbind(x: Spec, dim: int = 0) -> list[Spec]:
    dim = wrap_dim(dim, len(x.shape))
    return [select(x, dim, i) for i in range(fixed(x.shape[dim]))]


@rule("split.Tensor")
def split(x: Spec, size: Size, dim: int = 0) -> list[Spec]:
    dim = wrap_dim(dim, len(x.shape))
    must(ge(size, 0), "split expects split_size be non-negative")
    if same(x.shape[dim], 0) and same(size, 0):
        return [slice_(x, dim, 0, 0)]
    count = max(fixed((x.shape[dim] + size - 1) // size), 1)
    starts = [size * i for i in range(count)]
    return [slice_(x, dim, s, e) for s, e in zip(starts, [*starts[1:], x.shape[dim]])]


@rule("split_with_sizes")
def split_with_sizes(x: Spec, sizes: Sequence[Size], dim: int = 0) -> list[Spec]:
    dim = wrap_dim(dim, len(x.shape))
    total: Size = 0
    result = []
    for size in sizes:
        result.append(slice_(x, dim, total, total + size))
        total = total + size
    must_match(total, x.shape[dim], f"split_with_sizes expects split_sizes to sum exactly to {x.shape[dim]}, but got {list(sizes)}")
    return result


@rule("diagonal")
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


@rule("unfold")
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


@rule("as_strided")
def as_strided(x: Spec, shape: Sequence[Size], strides: Sequence[Size], offset: Size | None = None) -> Spec:
    check(len(shape) == len(strides), "mismatch in length of strides and shape")
    return _viewed(x, tuple(shape), tuple(strides), offset)


# ---------------------------------------------------------------- complex numbers

@rule("view_as_real")
def view_as_real(x: Spec) -> Spec:
    dtype = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}.get(x.dtype)
    check(dtype is not None, "view_as_real is only supported for complex tensors")
    return Spec((*x.shape, 2), (*(s * 2 for s in x.strides), 1), x.offset * 2, dtype, x.device)     # type: ignore[arg-type]  # checked above


@rule("view_as_complex")
def view_as_complex(x: Spec) -> Spec:
    dtype = {torch.float32: torch.complex64, torch.float64: torch.complex128, torch.float16: torch.complex32}.get(x.dtype)
    check(dtype is not None and bool(x.shape) and same(x.shape[-1], 2) and same(x.strides[-1], 1),
          "view_as_complex takes a floating tensor whose last dimension has size 2 and stride 1")
    return Spec(x.shape[:-1], tuple(s // 2 for s in x.strides[:-1]), x.offset // 2, dtype, x.device)     # type: ignore[arg-type]  # checked above


@rule("_conj _neg_view")
def conj(x: Spec | complex) -> Spec:
    """Eager sets a bit and shares the storage; abstract tensors have no such bits, and what is recorded computes."""
    return like(x) if type(x) is Spec else Spec((), (), 0, torch.complex128, torch.device("cpu"))


# ---------------------------------------------------------------- writing through a view, as a value

@rule("slice_scatter select_scatter diagonal_scatter as_strided_scatter")
def scatter_into(x: Spec, source: Spec, *args, **kwargs) -> Spec:
    """The strides of x, unless it repeats elements in memory."""
    return like(x) if 0 in x.strides else Spec(x.shape, x.strides, 0, x.dtype, x.device)


@rule("slice_backward")
def slice_backward(grad: Spec, sizes: Sequence[Size], dim: int, start: Size, end: Size, step: Size) -> Spec:
    return _contiguous(grad, sizes)


@rule("select_backward")
def select_backward(grad: Spec, sizes: Sequence[Size], dim: int, index: Size) -> Spec:
    return _contiguous(grad, sizes)


@rule("diagonal_backward")
def diagonal_backward(grad: Spec, sizes: Sequence[Size], offset: int, dim1: int, dim2: int) -> Spec:
    return _contiguous(grad, sizes)


@rule("unfold_backward")
def unfold_backward(grad: Spec, sizes: Sequence[Size], dim: int, size: Size, step: Size) -> Spec:
    return _contiguous(grad, sizes)


def _contiguous(grad: Spec, sizes: Sequence[Size]) -> Spec:
    shape = tuple(sizes)
    return Spec(shape, contiguous_strides(shape), 0, grad.dtype, grad.device)


def must_be_contiguous(x: Spec) -> None:
    check(is_contiguous(x), "input is not contiguous")


# ---------------------------------------------------------------- the same parts as fresh tensors

def _copy_rule(view_rule):
    def copy_rule(x: Spec, *args, **kwargs):
        result = view_rule(x, *args, **kwargs)
        made = [_contiguous(x, r.shape).to(r.dtype) for r in (result if type(result) is list else [result])]
        return made if type(result) is list else made[0]
    return copy_rule


for _name, _view in {"alias": alias, "permute": permute, "transpose": transpose, "t": t, "expand": expand, "unsqueeze": unsqueeze,
                     "squeeze": squeeze, "slice": slice_, "select": select, "unbind": unbind, "split": split,
                     "split_with_sizes": split_with_sizes, "diagonal": diagonal, "unfold": unfold, "as_strided": as_strided,
                     "detach": alias, "view_as_real": view_as_real, "view_as_complex": view_as_complex}.items():
    for _overload in ("", ".dim", ".dims", ".int", ".Tensor"):
        rule(f"{_name}_copy{_overload}")(_copy_rule(_view))

rule("unsafe_split.Tensor")(split)
rule("unsafe_split_with_sizes")(split_with_sizes)


@rule("narrow_copy")
def narrow_copy(x: Spec, dim: int, start: Size, length: Size) -> Spec:
    return _contiguous(x, slice_(x, dim, start, start + length).shape)


@rule("diag_embed")
def diag_embed(x: Spec, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Spec:
    ndim = len(x.shape) + 1
    a, b = wrap_dim(dim1, ndim), wrap_dim(dim2, ndim)
    check(a != b, "diagonal dimensions cannot be identical")
    size = x.shape[-1] + abs(offset)
    shape = list(x.shape[:-1])
    for d in sorted((a, b)):
        shape.insert(d, size)
    return _contiguous(x, shape)


@rule("trace")
def trace(x: Spec) -> Spec:
    check(len(x.shape) == 2, "trace: expected a matrix")
    return _contiguous(x, ()).to(torch.int64 if not (x.dtype.is_floating_point or x.dtype.is_complex) else x.dtype)
