"""Matrix products and distances: library calls, but for products of small matrices on a CPU and of one row on a GPU, which are loops of ours."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp import cast, widen
from firesteel.graph.meta import as_second
from firesteel.graph.rules.base import broadcast, broadcast_all, check, elementwise, expands_to, floating
from firesteel.graph.sizes import must_match
from firesteel.graph.spec import Shape, Spec, contiguous_strides, fresh, is_empty
from firesteel.loops.lower.build import Builder, fits, supported
from firesteel.loops.lower.library import OUT_VARIANTS, lower_call
from firesteel.loops.lower.sweeps import Sweeps
from firesteel.loops.lower.value import Operand
from firesteel.loops.scalars import SHORT, S
from firesteel.ops.block import decomposition, device_rule, lowering, operator, refuses, shape
from firesteel.ops.linalg import batches
from firesteel.sym.expr import Expr, Size
from firesteel.targets import on_gpu

aten = torch.ops.aten

operator("mm.* bmm.* addmm.* baddbmm.* addmv.* mv.* dot.* vdot.* addbmm.* ger.* outer.* _addmm_activation.* _int_mm.* "
         "linear.* _scaled_mm.* _cdist_forward.* _cdist_backward.* _grouped_mm* _pdist* mkldnn::_linear_pointwise.*", library=True)


def one_dtype(a: Spec, b: Spec) -> None:
    check(a.dtype is b.dtype, f"expected m1 and m2 to have the same dtype, but got: {a.dtype} != {b.dtype}")


# ---------------------------------------------------------------- matrices

@device_rule("mm")
def mm(a: Spec, b: Spec) -> Spec:
    check(len(a.shape) == 2 and len(b.shape) == 2, f"self and mat2 must be matrices, got {len(a.shape)}-D and {len(b.shape)}-D")
    must_match(a.shape[1], b.shape[0], f"mat1 and mat2 shapes cannot be multiplied ({a.shape} and {b.shape})")
    one_dtype(a, b)
    shape = (a.shape[0], b.shape[1])
    return Spec(shape, contiguous_strides(shape), 0, a.dtype, a.device)


HALF = (torch.float16, torch.bfloat16)


def _row_by_columns(a: Tensor, b: Tensor) -> Tensor | None:
    """One row by a matrix whose columns are dense, as transposed weights are, unrounded: reading that matrix bounds it, so on a GPU it is a sum of
    ours, which is fused with its neighbours.  None for other products."""
    static = all(type(n) is int and n > 0 for x in (a, b) for n in x.shape)
    if not (on_gpu(a) and a.dtype in HALF and static and a.shape[0] == 1 and b.stride() == (1, b.shape[0])):
        return None
    return aten.unsqueeze.default(aten.sum.dim_IntList(widen(a) * widen(aten.permute.default(b, [1, 0])), [1]), 0)


@decomposition("mm")
def decompose_mm(a: Tensor, b: Tensor) -> Tensor:
    columns = _row_by_columns(a, b)
    return NotImplemented if columns is None else cast(columns, a.dtype)


@decomposition("addmm")
def decompose_addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    columns = _row_by_columns(a, b) if beta == 1 and alpha == 1 else None
    return NotImplemented if columns is None else cast(columns + widen(x), a.dtype)


@device_rule("mkldnn::_linear_pointwise")
def linear_pointwise(x: Spec, weight: Spec, bias: Spec | None, *activation: Any) -> Spec:
    """Of a weight that the library has reordered."""
    return fresh(x, (*x.shape[:-1], weight.shape[0]))


device_rule("mm.dtype")(lambda a, b, out_dtype: mm(a, b).to(out_dtype))


@device_rule("bmm")
def bmm(a: Spec, b: Spec) -> Spec:
    check(len(a.shape) == 3 and len(b.shape) == 3, "batch1 and batch2 must be 3D tensors")
    message = f"Expected size for first two dimensions of batch2 tensor to be: {[a.shape[0], a.shape[2]]} but got: {list(b.shape[:2])}."
    must_match(a.shape[0], b.shape[0], message)
    must_match(a.shape[2], b.shape[1], message)
    one_dtype(a, b)
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return Spec(shape, contiguous_strides(shape), 0, a.dtype, a.device)


@device_rule("addmm _addmm_activation")
def addmm(x: Spec, a: Spec, b: Spec, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False) -> Spec:
    result = mm(a, b)
    check(expands_to(x.shape, result.shape), f"The expanded size of the tensor {x.shape} must match {result.shape}")
    one_dtype(x, a)
    return result


@device_rule("baddbmm")
def baddbmm(x: Spec, a: Spec, b: Spec, *, beta: Any = 1, alpha: Any = 1) -> Spec:
    result = bmm(a, b)
    check(expands_to(x.shape, result.shape), f"The expanded size of the tensor {x.shape} must match {result.shape}")
    return result


device_rule("addbmm")(lambda x, a, b, *, beta=1, alpha=1: fresh(x, (a.shape[1], b.shape[2])))


@refuses("baddbmm addbmm")
def refuse_baddbmm(x: Spec, a: Spec, b: Spec, **options: Any) -> None:
    check(len(a.shape) == 3 and len(b.shape) == 3, "batch1 and batch2 must be 3D tensors")
    check(x.dtype is a.dtype and a.dtype is b.dtype, f"expected one dtype, got {x.dtype}, {a.dtype} and {b.dtype}")
    must_match(a.shape[0], b.shape[0], "batch1 and batch2 must have same number of batches")
    must_match(a.shape[2], b.shape[1], "Incompatible matrix sizes for bmm")


for _name in ("mm", "bmm", "addmm", "baddbmm"):
    OUT_VARIANTS.named(_name)(getattr(aten, _name).out)

MOST = 1 << 16      # multiplications in a small product
LANES = 8           # columns up to which the library is slow


@lowering("mm bmm addmm baddbmm")
def lower_product(b: Builder, out: Any, *given: Operand, **factors: Any) -> Any:
    *added, left, right = given
    if on_gpu(out):
        return NotImplemented
    if b.loose and all(factor == 1 for factor in factors.values()) and fits(out, *given) and is_small_product(left.spec, right.spec):
        return _sums_of_products(b, out, left, right, added)
    left, right = (_with_dense_matrices(b, x) if len(out.shape) == 3 else x for x in (left, right))
    return lower_call(b, out, b.target, (*added, left, right), factors)


def is_small_product(left: Spec, right: Spec) -> bool:
    """Does the library take longer to be called for each matrix, or to arrange them, than loops take to compute it?  Measured for matrices of 8 to 64
    rows and columns, alone and in batches; loops are fused with their neighbours besides."""
    *rows, inside = left.shape
    columns = right.shape[-1]
    if left.dtype not in (torch.float32, torch.float64) or not all(type(n) is int and n > 0 for n in (inside, columns)):
        return False
    if inside <= 16 and inside * columns <= 1024 or inside <= 64 and columns <= LANES:
        return True
    return all(type(n) is int for n in rows) and math.prod((*rows, inside, columns)) <= MOST


def _sums_of_products(b: Builder, out: Any, left: Operand, right: Operand, added: Sequence[Operand]) -> Operand:
    """Columns of the result lie side by side, so the right side is read along its rows: it is copied where these are not dense and read more than a
    few times."""
    left, right, rows = b.readable(left), b.readable(right), left.shape[-2]
    if right.spec.strides[-1] != 1 and right.shape[-1] != 1 and not (type(rows) is int and rows < 4):
        right = b.copy(right, fresh(right.spec))
    sweeps = Sweeps(b, (*left.shape, right.shape[-1]), len(out.shape) - 1)
    kind = SHORT[out.dtype]
    total = sweeps.reduce("sum", kind, lambda i: S.mul(left.load(i[:-1]), right.load((*i[:-3], *i[-2:]))))
    for term in added:
        total = S.add(total, b.value(term, sweeps.result_index(False), kind))
    return sweeps.emit(sweeps.store(out, total, False))


def _with_dense_matrices(b: Builder, x: Operand) -> Operand:
    """A batch of matrices whose rows or columns are dense: of others torch's product copies each on its own."""
    (rows, columns), (down, along) = x.shape[1:], x.spec.strides[1:]
    if along == 1 and _reaches(down, columns, rows) or down == 1 and _reaches(along, rows, columns):
        return x
    return b.copy(x, fresh(x.spec)) if supported(x.dtype) else b.contiguous(x)


def _reaches(step: Size, size: Size, count: Size) -> bool:
    """Do `count` runs of `size` elements, so far apart, not overlap?  With symbols it is taken so."""
    return type(step) is not int or type(size) is not int or step >= size or count == 1


# ---------------------------------------------------------------- vectors

@device_rule("mv")
def mv(a: Spec, b: Spec) -> Spec:
    check(len(a.shape) == 2 and len(b.shape) == 1, f"size mismatch, got {a.shape} and {b.shape}")
    must_match(a.shape[1], b.shape[0], f"size mismatch, got {a.shape} and {b.shape}")
    return fresh(a, (a.shape[0],))


refuses("mv")(lambda a, b: check(a.dtype is b.dtype, f"expected one dtype, got {a.dtype} and {b.dtype}"))


@decomposition("mv")
def decompose_mv(a: Tensor, b: Tensor) -> Tensor:
    if not a.dtype.is_floating_point:
        return NotImplemented
    return aten.squeeze.dim(aten.mm.default(a, aten.unsqueeze.default(b, 1)), 1)


@device_rule("addmv")
def addmv(x: Spec, a: Spec, b: Spec, *, beta: Any = 1, alpha: Any = 1) -> Spec:
    """Without a product the result has the shape of `x`, which eager does not expand then."""
    result = mv(a, b)
    return fresh(x) if is_empty(a) and beta != 0 else result


@refuses("addmv")
def refuse_addmv(x: Spec, a: Spec, b: Spec, **options: Any) -> None:
    check(len(a.shape) == 2 and len(b.shape) == 1, f"vector + matrix @ vector expected, got {len(x.shape)}, {len(a.shape)}, {len(b.shape)}")
    check(broadcast(x.shape, a.shape[:1]) == a.shape[:1] or any(type(s) is Expr for s in (*x.shape, *a.shape)), "size mismatch")
    check(x.dtype is a.dtype and a.dtype is b.dtype, f"addmv: expected one dtype, got {x.dtype}, {a.dtype} and {b.dtype}")


@decomposition("addmv")
def decompose_addmv(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if not x.dtype.is_floating_point:
        return NotImplemented
    if beta != 0 and any(type(n) is int and n == 0 for n in a.shape):
        return x * beta     # which eager does not expand
    product = aten.mv.default(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else (x if beta == 1 else x * beta) + product


@device_rule("addr", probed=True)
def addr(x: Spec, a: Spec, b: Spec, *, beta: Any = 1, alpha: Any = 1) -> Spec:
    column = Spec((a.shape[0], 1), (a.strides[0], a.strides[0]), 0, a.dtype, a.device)
    return elementwise([x, column, b], torch.promote_types(x.dtype, torch.promote_types(a.dtype, b.dtype)))


@refuses("addr")
def refuse_addr(x: Spec, a: Spec, b: Spec, **options: Any) -> None:
    check(len(a.shape) == 1 and len(b.shape) == 1, f"addr: Expected 1-D vectors, got {len(a.shape)}-D and {len(b.shape)}-D")
    check(expands_to(x.shape, (a.shape[0], b.shape[0])), f"The expanded size of the tensor {list(x.shape)} must match its outer product")


@decomposition("addr")
def decompose_addr(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """In the dtype of all three; of bools, numbers are true or not."""
    dtype = torch.promote_types(x.dtype, torch.promote_types(a.dtype, b.dtype))
    x, a, b = (cast(t, dtype) for t in (x, a, b))
    beta, alpha = (bool(n) if dtype is torch.bool else n for n in (beta, alpha))
    product = aten.unsqueeze.default(a, 1) * b
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return (x if beta == 1 else x * beta) + product


@device_rule("dot vdot", probed=True)
def dot(a: Spec, b: Spec) -> Spec:
    check(len(a.shape) == 1 and len(b.shape) == 1, f"inconsistent tensor size, got {a.shape} and {b.shape}")
    must_match(a.shape[0], b.shape[0], f"inconsistent tensor size, got {a.shape} and {b.shape}")
    one_dtype(a, b)
    return fresh(a, ())


decomposition("dot vdot")(lambda a, b: NotImplemented if a.dtype.is_complex else cast(aten.sum.default(widen(a) * widen(b)), a.dtype))


@shape("_trilinear")
def trilinear(a: Spec, b: Spec, c: Spec, expand1: Sequence[int], expand2: Sequence[int], expand3: Sequence[int], summed: Sequence[int],
              unroll_dim: int = 1) -> Shape:
    """The three are multiplied with dimensions of size 1 put in where `expand` says, and summed."""
    count = len(a.shape) + len(expand1)
    full = broadcast_all(_with_ones(x.shape, dims, count) for x, dims in ((a, expand1), (b, expand2), (c, expand3)))
    return tuple(size for d, size in enumerate(full) if d not in summed)


def _with_ones(sizes: Shape, dims: Sequence[int], count: int) -> Shape:
    rest = iter(sizes)
    return tuple(1 if d in dims else next(rest) for d in range(count))


# ---------------------------------------------------------------- distances

device_rule("_cdist_forward")(
    lambda a, b, p, mode: fresh(a, (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2]), floating(a.dtype)))


@device_rule("_cdist_backward")
def cdist_backward(grad: Spec, a: Spec, b: Spec, p: float, distances: Spec) -> Spec:
    """An empty batch is not expanded."""
    return fresh(a, a.shape if 0 in (*a.shape, *b.shape) else (*batches(a, b), *a.shape[-2:]))


shape("_euclidean_dist")(lambda a, b: (*batches(a, b), a.shape[-2], b.shape[-2]))
shape("_pdist_forward")(lambda x, p=2: (x.shape[0] * (x.shape[0] - 1) // 2,))
shape("_pdist_backward")(as_second)
