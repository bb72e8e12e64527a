"""Builds nests and runs them natively on tensors: what the tests of codegen/ and runtime/ and the kernel bench share."""
from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping

import torch

from firesteel.codegen.llvm import print_nest
from firesteel.codegen.printer import Kernel
from firesteel.codegen.target import Target
from firesteel.loops.ir import Axis, Buffer, Nest, Phase, Reduce, Store, acc, axis, load
from firesteel.loops.scalars import S, short_dtype
from firesteel.runtime import cpu
from firesteel.sym.expr import Size

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Runner:
    """A compiled kernel: `runner(tensors, symbols)` runs it and returns the error slot."""

    target: Target | None = None        # print for this machine instead of the one we run on (which must be able to run it)

    def __init__(self, nest: Nest, buffers: Mapping[str, Buffer]):
        self.kernel: Kernel = print_nest(nest, buffers, Runner.target)
        (self.address,) = cpu.load([self.kernel])
        self.function = _FUNCTION(self.address)

    def arguments(self, tensors: Mapping[str, torch.Tensor], symbols: Mapping[str, int | float] = {}):
        error = ctypes.c_int64(0)
        words = [tensors[name].data_ptr() for name in self.kernel.buffers]
        for name in self.kernel.symbols:
            value = symbols[name]
            words.append(struct.unpack("<q", struct.pack("<d", value))[0] if isinstance(value, float) else value)
        words.append(ctypes.addressof(error))
        return (ctypes.c_int64 * len(words))(*words), error

    def __call__(self, tensors: Mapping[str, torch.Tensor], symbols: Mapping[str, int | float] = {}) -> int:
        words, error = self.arguments(tensors, symbols)
        self.function(ctypes.addressof(words))
        return error.value


def run(nest: Nest, buffers: Mapping[str, Buffer], tensors: Mapping[str, torch.Tensor], symbols: Mapping[str, int | float] = {}) -> int:
    return Runner(nest, buffers)(tensors, symbols)


def buffer(name: str, tensor: torch.Tensor) -> Buffer:
    return Buffer(name, short_dtype(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()))


def contiguous(name: str, shape: tuple[Size, ...], dtype: str = "f32") -> Buffer:
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size
    return Buffer(name, dtype, shape, tuple(strides))


def pointwise(fn, out: Buffer, *inputs: Buffer) -> tuple[Nest, dict[str, Buffer]]:
    """out[i, j, ...] = fn(in0[i, j, ...], ...), inputs broadcast from the right."""
    axes = [Axis(f"i{d}", n) for d, n in enumerate(out.shape)]
    at = [a.value for a in axes]
    value = fn(*(load(b, tuple(at[len(at) - len(b.shape):])) for b in inputs))
    phase = Phase("map", (), (), (Store(out.name, tuple(at), value),))
    return Nest("pointwise", tuple(axes), (phase,)), {b.name: b for b in (out, *inputs)}


def softmax(n: Size, m: Size) -> tuple[Nest, dict[str, Buffer]]:
    x, y, i = contiguous("x", (n, m)), contiguous("y", (n, m)), axis("i")
    top = Reduce("top", "max", load(x, (i, axis("a"))), "f32")
    total = Reduce("total", "sum", S.exp(S.sub(load(x, (i, axis("b"))), acc(top))), "f32")
    value = S.div(S.exp(S.sub(load(x, (i, axis("c"))), acc(top))), acc(total))
    phases = (Phase("reduce", (Axis("a", m),), (top,)), Phase("reduce", (Axis("b", m),), (total,)),
              Phase("map", (Axis("c", m),), (), (Store("y", (i, axis("c")), value),)))
    return Nest("softmax", (Axis("i", n),), phases), {"x": x, "y": y}


def layernorm(n: Size, m: int) -> tuple[Nest, dict[str, Buffer]]:
    x, y, g, i = contiguous("x", (n, m)), contiguous("y", (n, m)), contiguous("g", (m,)), axis("i")
    total = Reduce("total", "sum", load(x, (i, axis("a"))), "f32")
    mean = S.mul(acc(total), 1 / m)
    away = S.sub(load(x, (i, axis("b"))), mean)
    square = Reduce("square", "sum", S.mul(away, away), "f32")
    scale = S.rsqrt(S.add(S.mul(acc(square), 1 / m), 1e-5))
    value = S.mul(S.mul(S.sub(load(x, (i, axis("c"))), mean), scale), load(g, (axis("c"),)))
    phases = (Phase("reduce", (Axis("a", m),), (total,)), Phase("reduce", (Axis("b", m),), (square,)),
              Phase("map", (Axis("c", m),), (), (Store("y", (i, axis("c")), value),)))
    return Nest("layernorm", (Axis("i", n),), phases), {"x": x, "y": y, "g": g}


def reduction(op: str, x: Buffer, dims: tuple[int, ...], fn=lambda v: v, dtype: str | None = None) -> tuple[Nest, dict[str, Buffer]]:
    """y[...] = op over dims of fn(x)."""
    axes = [Axis(f"i{d}", n) for d, n in enumerate(x.shape)]
    kept = [a for d, a in enumerate(axes) if d not in dims]
    swept = [a for d, a in enumerate(axes) if d in dims]
    value = fn(load(x, tuple(a.value for a in axes)))
    result = Reduce("r", op, value, value.dtype)
    y = contiguous("y", tuple(a.extent for a in kept), dtype or value.dtype)
    stores = (Store("y", tuple(a.value for a in kept), acc(result)),)
    return Nest("reduction", tuple(kept), (Phase("reduce", tuple(swept), (result,)), Phase("map", (), (), stores))), {"x": x, "y": y}
