"""Shapes of the results of library operators whose dtypes, layouts and refusals torch's meta kernel tells.

A row has the signature of its operator, as a rule has, and returns the shape of the result, or a list of shapes, None for a result that is not
there.  With plain sizes such an operator needs no row.  With symbols the meta kernel is asked for the sizes of the example call, and each result
gets the row's shape in the order of dimensions that the kernel chose: no size is fixed.

    shape("linalg_cross")       # two batches of vectors -> their broadcast shape
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from firesteel.errors import InternalError
from firesteel.graph.rules.base import RULES, broadcast, broadcast_all, find, wrap_dim
from firesteel.graph.rules.reduce import reduce_shape, reduced_dims
from firesteel.graph.sizes import hint, less, product, same
from firesteel.graph.spec import Shape, Spec, strides_in_order
from firesteel.sym.expr import Size
from firesteel.table import Table

SHAPES: Table[Callable[..., Any]] = Table("shape of a library operator's results", "graph/rules/shapes.py")


def shape(names: str) -> Callable[[Callable], Callable]:
    """Decorator: a row for each of the operators named, those of other torch versions left out."""
    def register(function: Callable) -> Callable:
        for name in names.split():
            op = find(name)
            if op is not None:
                SHAPES.add(op, function)
        return function
    return register


def with_shapes(op: OpOverload, shapes: Any, example: Any) -> Any:
    """The Specs of the results: `example` has them for the sizes of the example call, `shapes` are the row's."""
    if type(example) is Spec:
        return _with_shape(op, tuple(shapes), example)
    if not isinstance(example, (list, tuple)):
        return example
    if len(shapes) != len(example):
        raise InternalError(f"{op} has {len(example)} results; its row in graph/rules/shapes.py tells of {len(shapes)}")
    return type(example)(with_shapes(op, s, e) if s is not None else None for s, e in zip(shapes, example))


def _with_shape(op: OpOverload, sizes: Shape, example: Spec) -> Spec:
    if tuple(hint(s) for s in sizes) != example.shape:
        raise InternalError(f"{op} gives {list(example.shape)}; its row in graph/rules/shapes.py says {list(sizes)}")
    if sizes == example.shape:
        return example
    order = sorted(range(len(sizes)), key=lambda d: (example.strides[d], example.shape[d], -d))
    return example._replace(shape=sizes, strides=strides_in_order(sizes, order))


# ---------------------------------------------------------------- the same shape, or none

@shape("""cholesky cholesky_inverse linalg_matrix_exp linalg_householder_product renorm _conj_physical channel_shuffle mvlgamma
          _unsafe_masked_index_put_accumulate""")
def as_first(x: Spec, *rest: Any, **options: Any) -> Shape:
    return x.shape


@shape("""_adaptive_avg_pool3d_backward adaptive_max_pool3d_backward fractional_max_pool2d_backward _pdist_backward
          rrelu_with_noise_backward linalg_cholesky_backward""")
def as_second(grad: Spec, x: Spec, *rest: Any, **options: Any) -> Shape:
    return x.shape


@shape("ormqr _segment_reduce_backward")
def as_third(a: Spec, b: Spec, x: Spec, *rest: Any, **options: Any) -> Shape:
    return x.shape


@shape("dist")
def single(*args: Any) -> Shape:
    return ()


@shape("hash_tensor")
def reduced(x: Spec, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0) -> Shape:
    return reduce_shape(x, reduced_dims(x, dim), keepdim)


@shape("multi_margin_loss")
def multi_margin_loss(x: Spec, target: Spec, p: Any = 1, margin: Any = 1, weight: Spec | None = None, reduction: int = 1) -> Shape:
    return target.shape if reduction == 0 else ()


@shape("masked_scatter_backward")
def masked_scatter_backward(grad: Spec, mask: Spec, sizes: Sequence[Size]) -> Shape:
    return tuple(sizes)


@shape("nonzero_static")
def nonzero_static(x: Spec, *, size: Size, fill_value: int = -1) -> Shape:
    return size, len(x.shape)


@shape("_unsafe_masked_index")
def unsafe_masked_index(x: Spec, mask: Spec, indices: Sequence[Spec | None], fill: Any) -> Shape:
    return RULES[torch.ops.aten.index.Tensor](x, indices).shape


@shape("_chunk_cat")
def chunk_cat(tensors: Sequence[Spec], dim: int, chunks: int) -> Shape:
    """Each tensor is cut into chunks, the last one filled up; the chunks of one number are flattened and stand side by side."""
    dim = wrap_dim(dim, len(tensors[0].shape))
    return (*tensors[0].shape[:dim], chunks, sum((-(-t.shape[dim] // chunks) * product(t.shape[dim + 1:]) for t in tensors), 0))


# ---------------------------------------------------------------- linear algebra

def _smaller(a: Size, b: Size) -> Size:
    return a if less(a, b) else b


def _batches(a: Spec, b: Spec) -> Shape:
    return broadcast(a.shape[:-2], b.shape[:-2])


@shape("linalg_cross")
def cross(a: Spec, b: Spec, *, dim: int = -1) -> Shape:
    return broadcast(a.shape, b.shape)


@shape("cholesky_solve")
def cholesky_solve(b: Spec, a: Spec, upper: bool = False) -> Shape:
    return *_batches(a, b), *b.shape[-2:]


@shape("linalg_solve_triangular")
def solve_triangular(a: Spec, b: Spec, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Shape:
    return *_batches(a, b), *b.shape[-2:]


@shape("triangular_solve")
def triangular_solve(b: Spec, a: Spec, *options: bool) -> list[Shape]:
    batch = _batches(a, b)
    return [(*batch, *b.shape[-2:]), (*batch, *a.shape[-2:])]


@shape("linalg_lu_solve linalg_ldl_solve")
def factored_solve(factors: Spec, pivots: Spec, b: Spec, **options: bool) -> Shape:
    return *_batches(factors, b), *b.shape[-2:]


@shape("_linalg_solve_ex")
def solve(a: Spec, b: Spec, *, left: bool = True, check_errors: bool = False) -> list[Shape]:
    """Solution, factors, pivots, errors.  A batch of vectors is one where it has the shape of the batch of matrices less its columns."""
    is_vector = len(b.shape) == 1 or len(b.shape) == len(a.shape) - 1 and all(map(same, a.shape[:-1], b.shape))
    if is_vector:
        solution: Shape = (*broadcast(a.shape[:-2], b.shape[:-1]), b.shape[-1])
    else:
        solution = (*_batches(a, b), *b.shape[-2:])
    return [solution, a.shape, a.shape[:-1], a.shape[:-2]]


@shape("linalg_lu_factor_ex")
def lu_factor(x: Spec, **options: bool) -> list[Shape]:
    return [x.shape, (*x.shape[:-2], _smaller(*x.shape[-2:])), x.shape[:-2]]


@shape("linalg_ldl_factor_ex")
def ldl_factor(x: Spec, **options: bool) -> list[Shape]:
    return [x.shape, x.shape[:-1], x.shape[:-2]]


@shape("linalg_lu")
def lu(x: Spec, *, pivot: bool = True) -> list[Shape]:
    return _unpacked(x, pivot, True)


@shape("lu_unpack")
def lu_unpack(x: Spec, pivots: Spec, unpack_data: bool = True, unpack_pivots: bool = True) -> list[Shape]:
    return _unpacked(x, unpack_pivots, unpack_data)


def _unpacked(x: Spec, permutation: bool, factors: bool) -> list[Shape]:
    *batch, rows, columns = x.shape
    count = _smaller(rows, columns)
    return [(*batch, rows, rows) if permutation else (0,), *([(*batch, rows, count), (*batch, count, columns)] if factors else [(0,), (0,)])]


@shape("_linalg_slogdet")
def slogdet(x: Spec) -> list[Shape]:
    """Sign, logarithm, factors, pivots."""
    return [x.shape[:-2], x.shape[:-2], x.shape, x.shape[:-1]]


@shape("linalg_pinv.atol_rtol_tensor")
def pinv(x: Spec, **options: Any) -> Shape:
    return *x.shape[:-2], x.shape[-1], x.shape[-2]


# ---------------------------------------------------------------- networks

@shape("_adaptive_avg_pool3d")
def adaptive_pool3d(x: Spec, size: Sequence[Size]) -> Shape:
    return *x.shape[:-3], *size


@shape("adaptive_max_pool3d")
def adaptive_max_pool3d(x: Spec, size: Sequence[Size]) -> list[Shape]:
    return [adaptive_pool3d(x, size)] * 2


@shape("fractional_max_pool2d fractional_max_pool3d")
def fractional_max_pool(x: Spec, kernel: Sequence[int], size: Sequence[Size], random: Spec) -> list[Shape]:
    return [(*x.shape[:-len(size)], *size)] * 2


@shape("col2im")
def col2im(x: Spec, size: Sequence[Size], kernel: Sequence[Size], *rest: Any) -> Shape:
    return *x.shape[:-2], x.shape[-2] // product(kernel), *size


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


@shape("max_unpool3d")
def max_unpool3d(x: Spec, indices: Spec, size: Sequence[Size], *rest: Any) -> Shape:
    return *x.shape[:-3], *size


@shape("affine_grid_generator")
def affine_grid(theta: Spec, size: Sequence[Size], align_corners: bool) -> Shape:
    return size[0], *size[2:], len(size) - 2


@shape("_embedding_bag_backward _embedding_bag_dense_backward")
def embedding_bag_backward(grad: Spec, indices: Spec, *rest: Any) -> Shape:
    """The gradient of the table, whose height is the first number among the arguments."""
    return next(v for v in rest if not isinstance(v, Spec)), grad.shape[1]


@shape("_embedding_bag_per_sample_weights_backward")
def per_sample_weights_backward(grad: Spec, weight: Spec, indices: Spec, *rest: Any) -> Shape:
    return indices.shape


@shape("_weight_norm_interface")
def weight_norm(v: Spec, g: Spec, dim: int = 0) -> list[Shape]:
    return [v.shape, g.shape]


@shape("_weight_norm_interface_backward")
def weight_norm_backward(grad: Spec, v: Spec, g: Spec, norms: Spec, dim: int) -> list[Shape]:
    return [v.shape, g.shape]


@shape("_euclidean_dist")
def euclidean_dist(a: Spec, b: Spec) -> Shape:
    return *_batches(a, b), a.shape[-2], b.shape[-2]


@shape("_pdist_forward")
def pdist(x: Spec, p: float = 2) -> Shape:
    return (x.shape[0] * (x.shape[0] - 1) // 2,)


@shape("_cdist_backward")
def cdist_backward(grad: Spec, a: Spec, b: Spec, p: float, distances: Spec) -> Shape:
    """An empty batch is not expanded."""
    return a.shape if 0 in (*a.shape, *b.shape) else (*_batches(a, b), *a.shape[-2:])


@shape("grid_sampler_2d_backward grid_sampler_3d_backward")
def grid_sampler_backward(grad: Spec, x: Spec, grid: Spec, interpolation: int, padding: int, align_corners: bool,
                          mask: Sequence[bool]) -> list[Shape | None]:
    return [x.shape if mask[0] else None, grid.shape]


@shape("segment_reduce")
def segment_reduce(x: Spec, reduce: str, *, lengths: Spec | None = None, indices: Spec | None = None, offsets: Spec | None = None, axis: int = 0,
                   unsafe: bool = False, initial: Any = None) -> Shape:
    if lengths is not None:
        segments = lengths.shape
    else:
        assert offsets is not None      # the kernel refuses other calls
        segments = (*offsets.shape[:-1], offsets.shape[-1] - 1)
    return *segments, *x.shape[wrap_dim(axis, len(x.shape)) + 1:]
