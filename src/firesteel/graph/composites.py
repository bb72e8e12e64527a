"""Functions that torch's C++ code puts together from others with sizes as plain numbers: the same, by operators that take symbols.

Each is a row of `functions.py`.  Most are used where a size is a symbol, and leave wrong calls to the function itself, which says what is wrong.

    torch.kron(a, b)        # a: f32[s0, 3], b: f32[s1, 2] -> f32[s0*s1, 6]
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firesteel.graph import factories  # noqa: F401  # its rows
from firesteel.graph.functions import FUNCTIONS, has_symbols, symbolic_row
from firesteel.graph.rules.base import wrap_dim
from firesteel.graph.sizes import hint
from firesteel.sym.symint import from_sym
from firesteel.targets import on_host

aten = torch.ops.aten
Number = (int, float, torch.SymInt, torch.SymFloat)


# ---------------------------------------------------------------- matrices

@symbolic_row(torch.kron, Tensor.kron)
def kron(input: Tensor, other: Tensor) -> Any:      # noqa: A002
    ndim = max(input.dim(), other.dim())
    a, b = ([1] * (ndim - t.dim()) + list(t.shape) for t in (input, other))
    apart = (input.reshape([n for size in a for n in (size, 1)]), other.reshape([n for size in b for n in (1, size)]))
    return (apart[0] * apart[1]).reshape([n * m for n, m in zip(a, b)])


@symbolic_row(torch.block_diag)
def block_diag(*tensors: Tensor) -> Any:
    if any(not isinstance(t, Tensor) or t.dim() > 2 for t in tensors):
        return NotImplemented
    dtype = tensors[0].dtype
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    blocks = [t.reshape(1, -1) if t.dim() < 2 else t for t in tensors]
    width, rows, before = sum(t.shape[1] for t in blocks), [], 0
    for t in blocks:
        rows.append(F.pad(t.to(dtype), (before, width - before - t.shape[1])))
        before = before + t.shape[1]
    return torch.cat(rows)


@symbolic_row(torch.linalg.multi_dot, torch.chain_matmul)
def multi_dot(tensors: Any, *more: Tensor, out: Any = None) -> Any:
    """The order of products is the one that is cheapest for the sizes of the example call."""
    factors: list[Tensor] = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors, *more]
    if out is not None or len(factors) < 2 or any(t.dim() != 2 for t in factors[1:-1]) or any(t.dim() not in (1, 2) for t in factors):
        return NotImplemented
    first, last = factors[0].dim() == 1, factors[-1].dim() == 1
    factors[0] = factors[0][None] if first else factors[0]
    factors[-1] = factors[-1][:, None] if last else factors[-1]
    sizes = [hint(from_sym(t.shape[0])) for t in factors] + [hint(from_sym(factors[-1].shape[1]))]
    product = _cheapest_product(factors, sizes)
    return product.reshape([n for n, gone in zip(product.shape, (first, last)) if not gone]) if first or last else product


def _cheapest_product(factors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Where to cut a chain of matrices [i..j], by the number of multiplications."""
    cost: dict[tuple[int, int], tuple[int, int]] = {(i, i): (0, i) for i in range(len(factors))}
    for length in range(1, len(factors)):
        for i in range(len(factors) - length):
            j = i + length
            cost[i, j] = min((cost[i, k][0] + cost[k + 1, j][0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j))

    def chain(i: int, j: int) -> Tensor:
        cut = cost[i, j][1]
        return factors[i] if i == j else torch.mm(chain(i, cut), chain(cut + 1, j))
    return chain(0, len(factors) - 1)


_NORMS = {"fro": 2, "nuc": 0, 1: 1, -1: 1, 2: 2, -2: 2, math.inf: 1, -math.inf: 1}


@symbolic_row(torch.linalg.matrix_norm)
def matrix_norm(A: Tensor, ord: Any = "fro", dim: Sequence[int] = (-2, -1), keepdim: bool = False, *, dtype: Any = None, out: Any = None) -> Any:
    if out is not None or ord not in _NORMS or len(dim) != 2 or A.dim() < 2 or not (A.is_floating_point() or A.is_complex()):
        return NotImplemented
    A, (rows, columns) = A if dtype is None else A.to(dtype), (wrap_dim(d, A.dim()) for d in dim)
    if rows == columns:
        return NotImplemented
    if ord == "fro":
        return torch.linalg.vector_norm(A, 2, (rows, columns), keepdim)
    if ord in ("nuc", 2, -2):
        values = torch.linalg.svdvals(A.movedim((rows, columns), (-2, -1)))
        result = values.sum(-1) if ord == "nuc" else values.amax(-1) if ord > 0 else values.amin(-1)
        return result.unsqueeze(min(rows, columns)).unsqueeze(max(rows, columns)) if keepdim else result
    summed, chosen = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = torch.linalg.vector_norm(A, 1, (summed,), True)
    return sums.amax((summed, chosen), keepdim) if ord > 0 else sums.amin((summed, chosen), keepdim)


@symbolic_row(torch.linalg.norm)
def norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None) -> Any:
    """Of matrices; that of vectors takes symbols itself."""
    if ord is None or dim is None and A.dim() != 2 or dim is not None and (isinstance(dim, int) or len(dim) != 2):
        return NotImplemented
    return matrix_norm(A, ord, (0, 1) if dim is None else dim, keepdim, dtype=dtype, out=out)


@FUNCTIONS.row(torch.cov, Tensor.cov)
def cov(input: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:      # noqa: A002
    """Without weights nothing depends on data; eager asks for it all the same."""
    if fweights is not None or aweights is not None or input.dim() > 2 or input.dtype is torch.bool:
        return NotImplemented
    x = input.reshape(1, -1) if input.dim() < 2 else input
    freedom = x.shape[1] - correction
    if not freedom > 0:
        return NotImplemented       # eager warns
    x = x - (x.sum(1) / x.shape[1]).unsqueeze(1)
    return (torch.mm(x, x.t().conj()) / freedom).squeeze()


@FUNCTIONS.row(torch.corrcoef, Tensor.corrcoef)
def corrcoef(input: Tensor) -> Any:     # noqa: A002
    c = cov(input)
    if c is NotImplemented:
        return c
    if c.dim() == 0:
        return c / c
    d = c.diag()
    stddev = torch.sqrt(torch.real(d) if d.is_complex() else d)
    c = c / stddev.view(-1, 1) / stddev.view(1, -1)
    return torch.complex(torch.real(c).clip(-1, 1), torch.imag(c).clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


# ---------------------------------------------------------------- along a dimension

@symbolic_row(torch.take_along_dim, Tensor.take_along_dim)
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None, *, out: Any = None) -> Any:      # noqa: A002
    if out is not None or indices.dtype is not torch.int64 or dim is not None and input.dim() != indices.dim():
        return NotImplemented
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    dim = wrap_dim(dim, input.dim())
    shape = list(torch.broadcast_shapes(_with_size(input.shape, dim, 1), _with_size(indices.shape, dim, 1)))
    places = torch.remainder(indices, input.shape[dim])         # eager wraps indices as often as it takes
    return input.expand(_with_size(shape, dim, input.shape[dim])).gather(dim, places.expand(_with_size(shape, dim, indices.shape[dim])))


def _with_size(shape: Sequence[Any], dim: int, size: Any) -> list[Any]:
    return [size if d == dim else n for d, n in enumerate(shape)]


@symbolic_row(torch.gradient)
def gradient(input: Tensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> Any:       # noqa: A002
    """Central differences; differences to one side at the ends."""
    dims = [wrap_dim(d, input.dim()) for d in ([dim] if isinstance(dim, int) else range(input.dim()) if dim is None else dim)]
    steps = [1 if spacing is None else spacing] * len(dims) if spacing is None or isinstance(spacing, Number) else list(spacing)
    if len(steps) != len(dims) or len(set(dims)) != len(dims) or edge_order not in (1, 2) or input.dtype is torch.uint8:
        return NotImplemented
    for d in dims:
        torch._check(input.shape[d] >= edge_order + 1, lambda: "torch.gradient expected each dimension size to be at least edge_order+1")
    for d, step in zip(dims, steps):
        if isinstance(step, Tensor) and step.dim():
            torch._check(step.dim() == 1 and step.shape[0] == input.shape[d], lambda: "torch.gradient expected a coordinate for each place")
    return [_difference(input, d, step, edge_order) for d, step in zip(dims, steps)]


def _difference(x: Tensor, dim: int, step: Any, order: int) -> Tensor:
    even = not isinstance(step, Tensor) or step.dim() == 0

    def at(start: int, stop: int | None) -> Tensor:
        return aten.slice(x, dim, start, stop)
    if even:
        inside = (at(2, None) - at(0, -2)) / (step * 2)
        left = right = None
    else:
        gaps = step.diff().reshape([-1] + [1] * (x.dim() - dim - 1))
        left, right = (aten.slice(gaps, 0, *part) for part in ((0, -1), (1, None)))
        inside = (at(0, -2) * (-right / (left * (left + right))) + at(1, -1) * ((right - left) / (left * right))
                  + at(2, None) * (left / (right * (left + right))))
    ends = [_at_end(at, step if even else gaps, order, last) for last in (False, True)]
    return torch.cat([ends[0], inside, ends[1]], dim)


def _at_end(at: Any, step: Any, order: int, last: bool) -> Tensor:
    """The difference at the first place or the last one.  `step` is a number, or a tensor of all the steps along its first dimension."""
    def nth(n: int) -> Tensor:
        """Counted from that end."""
        return at(-1 - n, -n or None) if last else at(n, n + 1)

    def gap(n: int) -> Any:
        if not isinstance(step, Tensor) or step.dim() == 0:
            return step
        return aten.slice(step, 0, -1 - n, -n or None) if last else aten.slice(step, 0, n, n + 1)
    sign = -1 if last else 1
    if order == 1:
        return (nth(1) - nth(0)) / gap(0) * sign
    near, far = gap(0), gap(1)
    both = near + far
    return (nth(0) * (-(near + both) / (near * both)) + nth(1) * (both / (near * far)) - nth(2) * (near / (far * both))) * sign


class _Cumprod(torch.autograd.Function):
    """Products of all elements so far.  torch's gradient of it is a loop over the elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        out = torch.cumprod(x, dim)
        ctx.save_for_backward(x, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, out = (t.conj() if t.is_complex() else t for t in ctx.saved_tensors)
        return (_cumprod_gradient_again if torch.is_grad_enabled() else _cumprod_gradient)(grad, x, out, ctx.dim), None


def _sum_from(x: Tensor, dim: int) -> Tensor:
    """The sum of each element and all behind it."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _cumprod_gradient(grad: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """Before the first zero a product over its factor; at the first zero the product of all the others; 0 behind it."""
    zero = x == 0
    count = zero.cumsum(dim)
    first = zero & (count == 1)
    one = torch.ones((), dtype=x.dtype, device=x.device)
    before = _sum_from(grad * out, dim) / torch.where(zero, one, x)
    at_zero = _sum_from(grad * torch.cumprod(torch.where(first, one, x), dim), dim)
    return torch.where(count == 0, before, torch.where(first, at_zero, torch.zeros_like(one)))


def _cumprod_gradient_again(grad: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """The same in a form that can be differentiated at zeros too: a row for each factor, in which that factor is 1."""
    x, grad = x.movedim(dim, -1), grad.movedim(dim, -1)
    size = x.shape[-1]
    one = torch.ones((), dtype=x.dtype, device=x.device)
    own = torch.eye(size, dtype=torch.bool, device=x.device)
    others = _Cumprod.apply(torch.where(own, one, x.unsqueeze(-2)), -1)
    return (others * grad.unsqueeze(-2)).triu().sum(-1).movedim(-1, dim)


@FUNCTIONS.row(torch.cumprod, Tensor.cumprod)
def cumprod(input: Tensor, dim: int, *, dtype: Any = None, out: Any = None) -> Any:     # noqa: A002
    x = input if dtype is None else input.to(dtype)
    if out is not None or not x.requires_grad or not torch.is_grad_enabled() or x.dim() == 0 or not isinstance(dim, int):
        return NotImplemented
    return _Cumprod.apply(x, wrap_dim(dim, x.dim()))


# ---------------------------------------------------------------- others

@symbolic_row(torch.masked_select, Tensor.masked_select)
def masked_select(input: Tensor, mask: Tensor, *, out: Any = None) -> Any:      # noqa: A002
    if out is not None or mask.dtype is not torch.bool or max(input.dim(), mask.dim()) == 0:
        return NotImplemented
    x, where = torch.broadcast_tensors(input, mask)
    return x[where]


symbolic_row(torch.sgn, Tensor.sgn)(
    lambda input, *, out=None: NotImplemented if out is not None or input.is_complex() else torch.sign(input))


@symbolic_row(torch.as_strided_copy)
def as_strided_copy(input: Tensor, size: Any, stride: Any, storage_offset: Any = None, *, out: Any = None) -> Any:      # noqa: A002
    return NotImplemented if out is not None else input.as_strided(size, stride, storage_offset).clone(memory_format=torch.contiguous_format)


FUNCTIONS.row(torch.narrow, Tensor.narrow)(
    lambda input, dim, start, length: input.narrow(dim, _read(start), length) if isinstance(start, Tensor) else NotImplemented)


def _read(number: Tensor) -> Any:
    return number.item()


@FUNCTIONS.row(torch.tensor_split, Tensor.tensor_split)
def tensor_split(input: Tensor, indices_or_sections: Any, dim: int = 0) -> Any:     # noqa: A002
    """Sections or indices that stand in a tensor are read.  The first sections have one place more where it does not come out even."""
    given = indices_or_sections
    if isinstance(given, int) and given > 0 and input.dim() > 0 and has_symbols(input):
        whole, rest = input.shape[dim] // given, input.shape[dim] % given
        bounds = [n * whole + torch.sym_min(n, rest) for n in range(given + 1)]
        return tuple(aten.slice(input, dim, start, end) for start, end in zip(bounds, bounds[1:]))
    if not isinstance(given, Tensor) or given.dim() > 1:
        return NotImplemented
    return input.tensor_split(_read(given) if given.dim() == 0 else [_read(given[n]) for n in range(int(given.shape[0]))], dim)


@symbolic_row(torch.unsafe_chunk, Tensor.unsafe_chunk)
def unsafe_chunk(input: Tensor, chunks: int, dim: int = 0) -> Any:      # noqa: A002
    if input.dim() == 0 or chunks <= 0:
        return NotImplemented
    if type(input.shape[dim]) is int and input.shape[dim] == 0:
        return torch.unsafe_split_with_sizes(input, [0] * chunks, dim)
    return torch.unsafe_split(input, torch.sym_max((input.shape[dim] + chunks - 1) // chunks, 1), dim)


@symbolic_row(torch.combinations)
def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Any:     # noqa: A002
    """How many there are depends on the size alone; for more than two the graph finds it out when it runs."""
    if input.dim() != 1 or r < 1:
        return NotImplemented
    size = input.shape[0]
    if r == 1:
        return input.reshape(-1, 1).clone()
    if r == 2:
        return torch.stack([input[at] for at in triangle(size, size, 0 if with_replacement else 1, device=input.device)], 1)
    places: Any = torch.meshgrid([aten.arange(size, device=input.device)] * r, indexing="ij")
    chosen = torch.stack([a <= b if with_replacement else a < b for a, b in zip(places, places[1:])]).all(0)
    return input[chosen.nonzero()].contiguous()


def triangle(*sizes: Any, device: Any) -> Tensor:
    made = FUNCTIONS[torch.triu_indices](*sizes, device=device)
    return torch.triu_indices(*sizes, device=device) if made is NotImplemented else made


@FUNCTIONS.row(F.one_hot)
def one_hot(tensor: Tensor, num_classes: Any = -1) -> Any:
    """Without a number of classes the largest one is read."""
    if tensor.dtype is not torch.int64:
        return NotImplemented
    if type(num_classes) is int and (num_classes == 0 or num_classes < -1):
        raise RuntimeError("Class values must be smaller than num_classes.")
    if type(num_classes) is int and num_classes == -1:
        num_classes = _read(tensor.max()) + 1
    classes = aten.arange(num_classes, device=tensor.device)
    known = classes.index_select(0, tensor.reshape(-1)).reshape(tensor.shape)       # the same number; one that is no class is out of range here
    return (known.unsqueeze(-1) == classes).to(torch.int64)


@symbolic_row(torch.conv_tbc)
def conv_tbc(input: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Any:     # noqa: A002
    if input.dim() != 3 or weight.dim() != 3 or bias.dim() != 1:
        return NotImplemented
    return F.conv1d(input.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad).permute(2, 0, 1).contiguous()


@FUNCTIONS.row(torch.ctc_loss)
def ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
             zero_infinity: bool = False) -> Any:
    """With lengths in lists; torch makes tensors of them that it fills itself."""
    if isinstance(input_lengths, Tensor) or isinstance(target_lengths, Tensor) or not on_host(log_probs) or log_probs.dim() not in (2, 3):
        return NotImplemented
    batched = log_probs.dim() == 3
    x, targets = (log_probs, targets) if batched else (log_probs.unsqueeze(1), targets.unsqueeze(0))
    loss = aten._ctc_loss(x, targets.to(torch.int64), list(input_lengths), list(target_lengths), blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == math.inf, torch.zeros_like(loss), loss)
    if reduction == 1:
        return (loss / torch.tensor(list(target_lengths)).to(loss.dtype).clamp_min(1)).mean()
    return loss.sum() if reduction == 2 else loss if batched else loss.squeeze(0)


# ---------------------------------------------------------------- what eager's C++ code asks of its surroundings

@FUNCTIONS.row(torch.linalg.pinv)
def pinv(A: Tensor, *args: Any, **kwargs: Any) -> Any:      # noqa: N803
    """Autocast lowers the product inside of eager's kernel, which dispatch does not see."""
    device = A.device.type
    if A.dtype is not torch.float32 or not torch.is_autocast_enabled(device) or kwargs.get("out") is not None:
        return NotImplemented
    return torch.linalg.pinv(A, *args, **kwargs).to(torch.get_autocast_dtype(device))


# ---------------------------------------------------------------- shapes of several tensors

@symbolic_row(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> Any:
    """Of one shape: nothing is asked."""
    tensors = tuple(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    shapes = [[from_sym(size) for size in t.shape] for t in tensors]
    return tuple(t.expand(t.shape) for t in tensors) if all(shape == shapes[0] for shape in shapes) else NotImplemented
