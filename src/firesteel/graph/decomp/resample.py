"""Decompositions of resampling and of padding by the edge: each output element reads one input element at a computed index."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.decomp.table import aten, cast, decomposition


def _range(size: Any, x: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    return aten.arange.start_step(0, size, 1, dtype=dtype, device=x.device)


def _nearest(out: Any, size: Any, scale: float | None, x: Tensor, exact: bool) -> Tensor:
    """Indices into a dimension of `size` for `out` positions; in float32, as eager computes them."""
    factor = 1 / scale if scale is not None and scale > 0 else size / out
    place = _range(out, x, torch.float32)
    place = (place + 0.5) * factor if exact else place * factor
    return aten.clamp_max.default(cast(aten.floor.default(place), torch.int64), size - 1)


def _upsample(x: Tensor, sizes: Sequence[Any], scales: Sequence[float | None], exact: bool) -> Tensor:
    n = len(sizes)
    indices: list[Tensor | None] = [None] * (x.dim() - n)
    for i, (size, scale) in enumerate(zip(sizes, scales)):
        index = _nearest(size, x.shape[x.dim() - n + i], scale, x, exact)
        indices.append(aten.view.default(index, [size] + [1] * (n - 1 - i)))
    result = aten.index.Tensor(x, indices)
    if n == 2 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        return aten.clone.default(result, memory_format=torch.channels_last)
    return result


@decomposition("upsample_nearest1d")
def upsample_nearest1d(x: Tensor, size: Sequence[Any], scales: float | None = None) -> Tensor:
    return _upsample(x, size, [scales], False)


@decomposition("upsample_nearest2d")
def upsample_nearest2d(x: Tensor, size: Sequence[Any], scales_h: float | None = None, scales_w: float | None = None) -> Tensor:
    return _upsample(x, size, [scales_h, scales_w], False)


@decomposition("_upsample_nearest_exact2d")
def upsample_nearest_exact2d(x: Tensor, size: Sequence[Any], scales_h: float | None = None, scales_w: float | None = None) -> Tensor:
    return _upsample(x, size, [scales_h, scales_w], True)


def _reflected(size: Any, low: Any, high: Any, x: Tensor) -> Tensor:
    """... 2 1 0 1 2 ... n-1 n-2 ..."""
    place = aten.abs.default(_range(size + low + high, x) - low)
    return (size - 1) - aten.abs.default((size - 1) - place)


def _clamped(size: Any, low: Any, high: Any, x: Tensor) -> Tensor:
    return aten.clamp.default(_range(size + low + high, x) - low, 0, size - 1)


def _pad_by(x: Tensor, pad: Sequence[Any], index: Any) -> Tensor:
    for i in range(len(pad) // 2):
        dim = x.dim() - 1 - i
        indices: list[Tensor | None] = [None] * dim
        x = aten.index.Tensor(x, [*indices, index(x.shape[dim], pad[2 * i], pad[2 * i + 1], x)])
    return x


@decomposition("reflection_pad1d reflection_pad2d reflection_pad3d")
def reflection_pad(x: Tensor, pad: Sequence[Any]) -> Tensor:
    return _pad_by(x, pad, _reflected) if x.is_contiguous() else NotImplemented


@decomposition("replication_pad1d replication_pad2d replication_pad3d")
def replication_pad(x: Tensor, pad: Sequence[Any]) -> Tensor:
    return _pad_by(x, pad, _clamped) if x.is_contiguous() else NotImplemented
