"""Fourier transforms with symbolic sizes, as rows of `functions.py`.

The input of a transform of a given length is cut or filled up to that length; torch asks which, and so makes a guard of it.  Here it is cut to the
smaller and filled up to the larger of both.  Transforms of short frames, which torch computes with plain sizes, are put together here.
"""
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firesteel.graph.functions import symbolic_row

aten = torch.ops.aten


# ---------------------------------------------------------------- transforms of a given length

def _with_length(x: Tensor, dim: int, length: Any) -> Tensor:
    size = x.shape[dim]
    if isinstance(length, int) and isinstance(size, int) or length is size:
        return x        # torch knows which it is
    dim = dim % x.dim()
    kept = torch.sym_min(size, length)
    return F.pad(aten.slice(x, dim, 0, kept), [0, 0] * (x.dim() - 1 - dim) + [0, length - kept])


def _transform(fn: Callable[..., Any], halved: bool) -> None:
    """One dimension.  `halved`: the input has the half of the places, the others follow from them."""
    def row(input: Tensor, n: Any = None, dim: int = -1, norm: str | None = None, *, out: Any = None) -> Any:     # noqa: A002
        if n is None or out is not None or input.dim() == 0 or not -input.dim() <= dim < input.dim():
            return NotImplemented
        x = _with_length(input, dim, n // 2 + 1 if halved else n)
        return NotImplemented if x is input else fn(x, n, dim, norm)
    symbolic_row(fn)(row)


def _transforms(fn: Callable[..., Any], halved: bool, dims: tuple[int, ...] | None) -> None:
    """Several dimensions, of which the last may be halved."""
    def row(input: Tensor, s: Any = None, dim: Any = dims, norm: str | None = None, *, out: Any = None) -> Any:     # noqa: A002
        if s is None or out is not None:
            return NotImplemented
        sizes = [s] if isinstance(s, (int, torch.SymInt)) else list(s)
        places = range(-len(sizes), 0) if dim is None else [dim] if isinstance(dim, int) else list(dim)
        if len(sizes) != len(places) or any(not -input.dim() <= d < input.dim() for d in places) or any(isinstance(n, int) and n < 1 for n in sizes):
            return NotImplemented
        x = input
        for place, (d, n) in enumerate(zip(places, sizes)):
            x = _with_length(x, d, n // 2 + 1 if halved and place == len(sizes) - 1 else n)
        return NotImplemented if x is input else fn(x, s, dim, norm)
    symbolic_row(fn)(row)


for _name in ("fft", "ifft", "rfft", "ihfft", "irfft", "hfft"):
    _halved = _name in ("irfft", "hfft")
    _transform(getattr(torch.fft, _name), _halved)
    _transforms(getattr(torch.fft, _name + "2"), _halved, (-2, -1))
    _transforms(getattr(torch.fft, _name + "n"), _halved, None)


# ---------------------------------------------------------------- short frames

# name of an option -> its default, in the order of torch's signature
FRAMED: dict[str, Any] = {"hop_length": None, "win_length": None, "window": None, "center": True}
FORTH: dict[str, Any] = {**FRAMED, "pad_mode": "reflect", "normalized": False, "onesided": None, "return_complex": None, "align_to_window": None}
BACK: dict[str, Any] = {**FRAMED, "normalized": False, "onesided": None, "length": None, "return_complex": False}


def _options(defaults: dict[str, Any], n_fft: int, given: tuple[Any, ...], named: dict[str, Any]) -> SimpleNamespace | None:
    """The options of a call; None for one that torch is to refuse."""
    if len(given) > len(defaults) or not named.keys() <= defaults.keys():
        return None
    made = SimpleNamespace(**{**defaults, **dict(zip(defaults, given)), **named})
    made.hop, made.width = made.hop_length or n_fft // 4, made.win_length or n_fft
    return made if 0 < made.width <= n_fft and made.hop > 0 and (made.window is None or made.window.dim() == 1) else None


@symbolic_row(torch.stft, Tensor.stft)
def stft(input: Tensor, n_fft: int, *given: Any, **named: Any) -> Any:
    o = _options(FORTH, n_fft, given, named)
    if o is None or o.return_complex is None or o.align_to_window or input.dim() not in (1, 2):
        return NotImplemented
    is_complex = input.is_complex() or o.window is not None and o.window.is_complex()
    if is_complex and o.onesided:
        return NotImplemented
    x = input if input.dim() == 2 else input[None]
    if o.center:
        x = F.pad(x[:, None], (n_fft // 2, n_fft // 2), o.pad_mode)[:, 0]
    torch._check(x.shape[-1] >= n_fft, lambda: f"stft: a signal of {x.shape[-1]} is shorter than a frame of {n_fft}")
    frames = x.unfold(-1, n_fft, o.hop)
    shape = _window(o.window, o.width, n_fft, x)
    frames = frames if shape is None else frames * shape
    scaling = 1 if o.normalized else 0
    if is_complex:
        result = aten._fft_c2c(frames, [2], scaling, True)
    else:
        result = aten._fft_r2c(frames, [2], scaling, o.onesided is not False)
    result = result.transpose(1, 2)
    result = result if input.dim() == 2 else result[0]
    return result if o.return_complex else torch.view_as_real(result)


def _window(window: Tensor | None, width: int, n_fft: int, like: Tensor) -> Any:
    """A window in the middle of the transform; None where it changes nothing."""
    if width == n_fft:
        return window
    left = (n_fft - width) // 2
    found = like.new_ones(width) if window is None else window
    return F.pad(found, (left, n_fft - width - left))


@symbolic_row(torch.istft, Tensor.istft)
def istft(input: Tensor, n_fft: int, *given: Any, **named: Any) -> Any:
    """Each frame is transformed back, the frames are added at their offsets, and divided by the sum of the windows there."""
    o = _options(BACK, n_fft, given, named)
    if o is None or input.dim() not in (2, 3) or not input.is_complex() or o.hop > o.width:
        return NotImplemented
    x = (input if input.dim() == 3 else input[None]).transpose(1, 2)
    bins = x.shape[2]
    half = bool(bins != n_fft) if o.onesided is None else o.onesided
    if o.return_complex and half or not isinstance(bins, int) and bool(bins != (n_fft // 2 + 1 if half else n_fft)):
        return NotImplemented
    plain = o.window is None and o.width == n_fft
    shape = torch.ones(n_fft, dtype=x.real.dtype, device=x.device) if plain else _window(o.window, o.width, n_fft, x.real)
    scaling = 1 if o.normalized else 2
    if o.return_complex:
        frames = aten._fft_c2c(x, [2], scaling, False)
    else:
        frames = aten._fft_c2r(x if half else x[..., :n_fft // 2 + 1], [2], scaling, n_fft)
    count = x.shape[1]
    total = n_fft + o.hop * (count - 1)
    signal = aten.unfold_backward(frames * shape, [x.shape[0], total], 1, n_fft, o.hop)
    weight = aten.unfold_backward(shape.pow(2).expand(1, count, n_fft), [1, total], 1, n_fft, o.hop)
    start = n_fft // 2 if o.center else 0
    end = total - start if o.length is None else start + o.length
    kept = end if o.length is None else torch.sym_min(end, total)
    signal, weight = (aten.slice(t, 1, start, kept) for t in (signal, weight))
    torch._assert_async(weight.abs().min() >= 1e-11, "window overlap add min: 1")
    signal = signal / weight
    if o.length is not None:
        signal = F.pad(signal, (0, end - kept))
    return signal if input.dim() == 3 else signal[0]
