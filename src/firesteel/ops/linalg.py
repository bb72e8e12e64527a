"""Linear algebra: library calls, but for products of vectors.  Strides are those of the library, which stores matrices by columns."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from firesteel.errors import DataAccess
from firesteel.graph.meta import as_first, as_third
from firesteel.graph.rules.base import broadcast, check, device_rule, real_dtype, wrap_dim
from firesteel.graph.sizes import less, must, must_match, same
from firesteel.graph.spec import Shape, Spec, contiguous_strides, fresh
from firesteel.loops.lower.build import Builder, broadcast_index, loop_lowering
from firesteel.loops.lower.value import Index, Operand
from firesteel.loops.scalars import SHORT, STORAGE_FLOATS, S
from firesteel.ops.block import operator, refuses, rule, shape
from firesteel.sym.expr import Expr, Size, eq
from firesteel.targets import on_gpu, on_host

operator("lu_unpack.* triangular_solve.* linalg_* _linalg_* cholesky*", library=True)


def _by_columns(x: Spec, shape: Sequence[Size], dtype: torch.dtype | None = None) -> Spec:
    """A fresh batch of matrices stored by columns, as LAPACK does."""
    *batch, rows, columns = shape
    flat = contiguous_strides((*batch, columns, rows))
    return Spec(tuple(shape), (*flat[:-2], flat[-1], flat[-2]), 0, dtype or x.dtype, x.device)


@rule("geqrf")
def geqrf(x: Spec) -> tuple[Spec, Spec]:
    """The factors, and one coefficient a reflection."""
    *batch, rows, columns = x.shape
    return _by_columns(x, x.shape), fresh(x, (*batch, columns if less(columns, rows) else rows))


@rule("_linalg_svd")
def svd(x: Spec, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> tuple[Spec, Spec, Spec]:
    *batch, rows, columns = x.shape
    count = columns if less(columns, rows) else rows
    values = fresh(x, (*batch, count), torch.empty((), dtype=x.dtype).real.dtype)
    if not compute_uv:
        return fresh(x, (0,)), values, fresh(x, (0,))
    right = (*batch, columns if full_matrices else count, columns)
    left = _by_columns(x, (*batch, rows, rows if full_matrices else count))
    return left, values, fresh(x, right) if on_gpu(x) else _by_columns(x, right)


@rule("linalg_eig")
def eig(x: Spec) -> tuple[Spec, Spec]:
    dtype = torch.complex64 if x.dtype in (torch.float32, torch.complex64) else torch.complex128
    return fresh(x, x.shape[:-1], dtype), _by_columns(x, x.shape, dtype)


@rule("linalg_cholesky_ex linalg_inv_ex")
def with_info(x: Spec, *options: Any, **named: Any) -> tuple[Spec, Spec]:
    """A matrix of the same shape, and an error code."""
    return _by_columns(x, x.shape), fresh(x, x.shape[:-2], torch.int32)


@rule("_linalg_check_errors")
def check_errors(info: Spec, name: str, *, is_matrix: bool) -> None:
    """Raises at run time."""


@rule("_linalg_det")
def det(x: Spec) -> tuple[Spec, Spec, Spec]:
    """The determinant, the factors, the pivots."""
    return fresh(x, x.shape[:-2]), _by_columns(x, x.shape), fresh(x, x.shape[:-1], torch.int32)


@rule("linalg_qr")
def qr(x: Spec, mode: str = "reduced") -> tuple[Spec, Spec]:
    *batch, rows, columns = x.shape
    count = rows if mode == "complete" or less(rows, columns) else columns
    left = _by_columns(x, (*batch, rows, count)) if mode != "r" else fresh(x, (0,))
    return left, _by_columns(x, (*batch, count, columns))


@rule("_linalg_eigh")
def eigh(x: Spec, UPLO: str = "L", compute_v: bool = True) -> tuple[Spec, Spec]:
    values = fresh(x, x.shape[:-1], torch.empty((), dtype=x.dtype).real.dtype)
    return values, _by_columns(x, x.shape) if compute_v else fresh(x, (0,))


@rule("linalg_lstsq")
def lstsq(a: Spec, b: Spec, rcond: float | None = None, *, driver: str | None = None) -> tuple[Spec, Spec, Spec, Spec]:
    """Solution, residuals, rank, singular values; what the driver does not compute is empty.  The solution is the upper part of a
    matrix with as many rows as the larger side of `a`, stored by columns."""
    rows, columns = a.shape[-2:]
    driver = driver or ("gelsy" if on_host(a) else "gels")
    is_vector = len(b.shape) == len(a.shape) - 1
    count = 1 if is_vector else b.shape[-1]
    batch = a.shape[:-2] if is_vector else broadcast(a.shape[:-2], b.shape[:-2])
    tall = less(columns, rows)
    if tall and driver in ("gelsd", "gelss"):
        raise DataAccess(f"linalg.lstsq (driver {driver}, whose residuals are there for full rank only)")
    height = rows if tall else columns
    outer = [s * height * count for s in contiguous_strides(batch)]
    solution = fresh(a, (*batch, columns) if is_vector else (*batch, columns, count))
    solution = solution._replace(strides=(*outer, 1) if is_vector else (*outer, 1, height))
    residuals = (*batch, count) if tall and driver == "gels" else (0,)
    rank = (0,) if driver == "gels" else a.shape[:-2]
    singular = (*a.shape[:-2], columns if tall else rows) if driver in ("gelsd", "gelss") else (0,)
    real = real_dtype(a.dtype)
    return solution, fresh(a, residuals, real), fresh(a, rank, torch.int64), fresh(a, singular, real)


@refuses("linalg_lstsq")
def refuse_lstsq(a: Spec, b: Spec, rcond: Any = None, *, driver: str | None = None) -> None:
    check(len(a.shape) >= 2 and len(b.shape) >= 1, "input must have at least 2 dimensions, other at least 1")
    check(len(a.shape) - len(b.shape) in (0, 1), "input.dim() must be greater or equal to other.dim() and (input.dim() - other.dim()) <= 1")
    is_vector = len(b.shape) < len(a.shape)
    must_match(a.shape[-2], b.shape[-1 if is_vector else -2], "input.size(-2) should match other.size(-2)")
    if is_vector:
        for n, m in zip(a.shape[:-2], b.shape):
            must_match(n, m, "input.size(-2) should match other.size(-2)")
    check(a.dtype is b.dtype, f"Expected input and other to have the same dtype, but got {a.dtype} and {b.dtype}")
    check(driver in (None, "gels", "gelsy", "gelsd", "gelss"), "parameter `driver` should be one of (gels, gelsy, gelsd, gelss)")


shape("cholesky cholesky_inverse linalg_matrix_exp linalg_householder_product renorm")(as_first)
shape("ormqr")(as_third)


@refuses("linalg_cross")
def refuse_cross(x: Spec, y: Spec, *, dim: int = -1) -> None:
    check(len(x.shape) == len(y.shape), "linalg.cross: inputs must have the same number of dimensions.")
    d = wrap_dim(dim, len(x.shape))
    for vectors in (x, y):
        must(eq(vectors.shape[d], 3), f"linalg.cross: inputs dimension {dim} must have length 3. Got {x.shape[d]} and {y.shape[d]}")
    check(x.dtype is y.dtype, f"expected scalar type {x.dtype} but found {y.dtype}")
    check(x.dtype is not torch.bool, '"cross" not implemented for \'Bool\'')


device_rule("linalg_cross")(lambda x, y, *, dim=-1: fresh(x, broadcast(x.shape, y.shape)))


@loop_lowering("linalg_cross")
def lower_cross(b: Builder, out: Any, x: Operand, y: Operand, dim: int = -1) -> Any:
    """Element k is x[k+1] * y[k+2] - x[k+2] * y[k+1], numbered round and round.  Halves are rounded at each step by eager: a library call."""
    dtype = SHORT[out.dtype]
    if dtype in STORAGE_FLOATS or not x.dtype == y.dtype == dtype:
        return NotImplemented

    def factor(part: Operand, i: Index, by: int) -> Expr:
        place = tuple([(k + by) % 3 if d == dim % len(i) else k for d, k in enumerate(i)])
        return part.load(broadcast_index(place, part.shape))
    return b.map(out, lambda i: S.sub(S.mul(factor(x, i, 1), factor(y, i, 2)), S.mul(factor(x, i, 2), factor(y, i, 1))))


def batches(a: Spec, b: Spec) -> Shape:
    return broadcast(a.shape[:-2], b.shape[:-2])


shape("cholesky_solve")(lambda b, a, upper=False: (*batches(a, b), *b.shape[-2:]))
shape("linalg_solve_triangular")(lambda a, b, *, upper, left=True, unitriangular=False: (*batches(a, b), *b.shape[-2:]))


@shape("triangular_solve")
def triangular_solve(b: Spec, a: Spec, *options: bool) -> list[Shape]:
    batch = batches(a, b)
    return [(*batch, *b.shape[-2:]), (*batch, *a.shape[-2:])]


shape("linalg_lu_solve linalg_ldl_solve")(lambda factors, pivots, b, **options: (*batches(factors, b), *b.shape[-2:]))


@shape("_linalg_solve_ex")
def solve(a: Spec, b: Spec, *, left: bool = True, check_errors: bool = False) -> list[Shape]:
    """Solution, factors, pivots, errors.  A batch of vectors is one where it has the shape of the batch of matrices less its columns."""
    is_vector = len(b.shape) == 1 or len(b.shape) == len(a.shape) - 1 and all(map(same, a.shape[:-1], b.shape))
    if is_vector:
        solution: Shape = (*broadcast(a.shape[:-2], b.shape[:-1]), b.shape[-1])
    else:
        solution = (*batches(a, b), *b.shape[-2:])
    return [solution, a.shape, a.shape[:-1], a.shape[:-2]]


def _smaller(a: Size, b: Size) -> Size:
    return a if less(a, b) else b


shape("linalg_lu_factor_ex")(lambda x, **options: [x.shape, (*x.shape[:-2], _smaller(*x.shape[-2:])), x.shape[:-2]])
shape("linalg_ldl_factor_ex")(lambda x, **options: [x.shape, x.shape[:-1], x.shape[:-2]])
shape("linalg_lu")(lambda x, *, pivot=True: _unpacked(x, pivot, True))


def _unpacked(x: Spec, permutation: bool, factors: bool) -> list[Shape]:
    *batch, rows, columns = x.shape
    count = _smaller(rows, columns)
    return [(*batch, rows, rows) if permutation else (0,), *([(*batch, rows, count), (*batch, count, columns)] if factors else [(0,), (0,)])]


shape("lu_unpack")(lambda x, pivots, unpack_data=True, unpack_pivots=True: _unpacked(x, unpack_pivots, unpack_data))


@shape("_linalg_slogdet")
def slogdet(x: Spec) -> list[Shape]:
    """Sign, logarithm, factors, pivots."""
    return [x.shape[:-2], x.shape[:-2], x.shape, x.shape[:-1]]


shape("linalg_pinv.atol_rtol_tensor")(lambda x, **options: (*x.shape[:-2], x.shape[-1], x.shape[-2]))
shape("_weight_norm_interface")(lambda v, g, dim=0: [v.shape, g.shape])
shape("_weight_norm_interface_backward")(lambda grad, v, g, norms, dim: [v.shape, g.shape])
