"""Pooling and resampling with symbolic sizes, as rows of `functions.py`."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firesteel.graph.functions import FUNCTIONS, has_symbols, symbolic_row
from firesteel.targets import on_host

aten = torch.ops.aten


# ---------------------------------------------------------------- pooling

@FUNCTIONS.row(torch.max_pool1d, F.max_pool1d)
def max_pool1d(input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
               return_indices: bool = False) -> Any:
    """Without gradients the CPU has a kernel of its own, whose result is contiguous and no view; the general one keeps the layout of its input."""
    if return_indices:
        return NotImplemented
    if not on_host(input) or (input.requires_grad and torch.is_grad_enabled()):
        window = [_each(v, 1) for v in (kernel_size, stride, padding, dilation)]
        return _pooled_as_image(input, window, ceil_mode) if has_symbols(input) else NotImplemented
    if not input.is_floating_point():
        raise NotImplementedError(f'"max_pool1d_impl" not implemented for {input.dtype}')
    pooled = torch.max_pool1d_with_indices(input.contiguous(), kernel_size, [] if stride is None else stride, padding, dilation, ceil_mode)[0]
    return aten._unsafe_view(pooled, pooled.shape)


def _pooled_as_image(x: Tensor, window: list[Any], ceil_mode: bool) -> Any:
    if None in window:
        return NotImplemented
    (kernel,), (stride,), (padding,), (dilation,) = window
    steps: Any = [1, stride] if stride is not None else []
    return torch.max_pool2d(x.unsqueeze(-2), [1, kernel], steps, [0, padding], [1, dilation], ceil_mode).squeeze(-2)


# ---------------------------------------------------------------- resampling
# (dimensions, mode, antialias) -> operator, and does it take align_corners
RESAMPLERS = {
    (3, "nearest", False): (aten.upsample_nearest1d.default, False),
    (4, "nearest", False): (aten.upsample_nearest2d.default, False),
    (5, "nearest", False): (aten.upsample_nearest3d.default, False),
    (3, "nearest-exact", False): (aten._upsample_nearest_exact1d.default, False),
    (4, "nearest-exact", False): (aten._upsample_nearest_exact2d.default, False),
    (5, "nearest-exact", False): (aten._upsample_nearest_exact3d.default, False),
    (3, "linear", False): (aten.upsample_linear1d.default, True),
    (4, "bilinear", False): (aten.upsample_bilinear2d.default, True),
    (4, "bicubic", False): (aten.upsample_bicubic2d.default, True),
    (5, "trilinear", False): (aten.upsample_trilinear3d.default, True),
    (4, "bilinear", True): (aten._upsample_bilinear2d_aa.default, True),
    (4, "bicubic", True): (aten._upsample_bicubic2d_aa.default, True),
}


@FUNCTIONS.row(F.interpolate)
def interpolate(input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
                recompute_scale_factor: bool | None = None, antialias: bool = False) -> Any:
    """What is wrong, or has no row, is left to the function itself."""
    if mode == "area" and has_symbols(input):
        return _averaged(input, size, scale_factor) if align_corners is None and not antialias else NotImplemented
    op, has_corners = RESAMPLERS.get((input.dim(), mode, antialias), (None, False))
    given = _each(size if size is not None else scale_factor, input.dim() - 2)
    if op is None or given is None or (size is None) == (scale_factor is None) or (align_corners is not None and not has_corners):
        return NotImplemented
    sizes = given
    scales: list[float | None] = [None] * len(given)
    if size is None:
        sizes = [torch.sym_int(n * scale) for n, scale in zip(input.shape[2:], given)]
        scales = scales if recompute_scale_factor else [float(scale) for scale in given]
    return op(input, sizes, *([bool(align_corners)] if has_corners else []), *scales)


def _averaged(x: Tensor, size: Any, scale_factor: Any) -> Any:
    given = _each(size if size is not None else scale_factor, x.dim() - 2)
    if given is None or (size is None) == (scale_factor is None) or not 3 <= x.dim() <= 5:
        return NotImplemented
    sizes = given if size is not None else [torch.sym_int(n * scale) for n, scale in zip(x.shape[2:], given)]
    if x.dim() == 3:
        return aten._adaptive_avg_pool2d(x.unsqueeze(-2), [1, *sizes]).squeeze(-2)
    return (aten._adaptive_avg_pool2d if x.dim() == 4 else aten._adaptive_avg_pool3d)(x, sizes)


def _each(value: Any, count: int) -> list[Any] | None:
    """One value for each dimension; None where there are too many or too few."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    return values if len(values) == count else None


def _upsample_with_scales(op: Any, has_corners: bool) -> Callable[..., Any]:
    """The overload that takes scales, which torch computes with plain sizes; a call in another form is left to it."""
    def upsample(input: Tensor, output_size: Any, *rest: Any, **named: Any) -> Any:     # noqa: A002
        corners = [named["align_corners"] if "align_corners" in named else rest[0]] if has_corners and (rest or "align_corners" in named) else []
        scales = named["scale_factors"] if "scale_factors" in named else rest[-1] if len(rest) > len(corners) - ("align_corners" in named) else None
        if len(corners) == has_corners and output_size is not None and "scale_factors" in named and scales is None:
            return op(input, output_size, *corners)
        if len(corners) != has_corners or output_size is not None or not isinstance(scales, (list, tuple)) or len(scales) != input.dim() - 2:
            return NotImplemented
        sizes = [torch.sym_int(n * scale) for n, scale in zip(input.shape[2:], scales)]
        return op(input, sizes, *corners, *[float(s) for s in scales])
    return upsample


for _op, _has_corners in RESAMPLERS.values():
    if "vec" in _op.overloadpacket.overloads():
        symbolic_row(_op.overloadpacket.vec, _op.overloadpacket)(_upsample_with_scales(_op, _has_corners))


symbolic_row(F.upsample)(lambda input, size=None, scale_factor=None, mode="nearest", align_corners=None: interpolate(
    input, size, scale_factor, mode, align_corners))
symbolic_row(F.upsample_nearest)(lambda input, size=None, scale_factor=None: interpolate(input, size, scale_factor))
symbolic_row(F.upsample_bilinear)(lambda input, size=None, scale_factor=None: interpolate(input, size, scale_factor, "bilinear", True))


# ---------------------------------------------------------------- pooling to a size

@symbolic_row(torch.adaptive_avg_pool1d)
def adaptive_avg_pool1d(input: Tensor, output_size: Any) -> Any:        # noqa: A002
    size = _each(output_size, 1)
    if size is None or type(size[0]) is not torch.SymInt:
        return NotImplemented
    return aten._adaptive_avg_pool2d(input.unsqueeze(-2), [1, size[0]]).squeeze(-2)


def _adaptive_max_pool(count: int) -> Callable[..., Any]:
    """Along a dimension whose size is kept (None) there is nothing to pool: it becomes one of the batch."""
    def pool(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:     # noqa: A002
        sizes = _each(output_size, count)
        if sizes is None or None not in sizes or input.dim() not in (count + 1, count + 2):
            return NotImplemented
        kept, pooled = [d - count for d in range(count) if sizes[d] is None], [n for n in sizes if n is not None]
        front = list(range(len(kept)))
        x = input.movedim(kept, front)
        inner = x.shape[-len(pooled) - 1:]
        flat = x.reshape(-1, *inner)
        best, places = _POOLS[len(pooled)](flat, pooled)
        best, places = (t.reshape(*x.shape[:x.dim() - len(pooled)], *pooled).movedim(front, kept).contiguous() for t in (best, places))
        return (best, _flat_places(places, input, sizes)) if return_indices else best
    return pool


_POOLS: dict[int, Callable[..., Any]] = {
    0: lambda x, sizes: (x.clone(), torch.zeros_like(x, dtype=torch.int64)),
    1: lambda x, sizes: F.adaptive_max_pool1d(x, sizes, True),
    2: lambda x, sizes: F.adaptive_max_pool2d(x, sizes, True),
}


def _flat_places(places: Tensor, x: Tensor, sizes: list[Any]) -> Tensor:
    """Places among the pooled dimensions as places among all of them."""
    flat, step = torch.zeros_like(places), 1
    for d in range(-1, -1 - len(sizes), -1):
        size = x.shape[d]
        if sizes[d] is None:
            at = aten.arange(size, device=x.device).reshape([-1] + [1] * (-1 - d))
        else:
            at, places = places % size, places // size
        flat, step = flat + at * step, step * size
    return flat


symbolic_row(F.adaptive_max_pool2d)(_adaptive_max_pool(2))
symbolic_row(F.adaptive_max_pool3d)(_adaptive_max_pool(3))
