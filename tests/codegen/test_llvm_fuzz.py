"""Random nests through the LLVM printer and through the reference interpreter: both must give the same memory.

A seed makes a nest: up to three parallel axes, up to three phases (maps, reductions, scans), buffers with permuted, stepped
and shifted layouts, gathers, guarded loads, index arithmetic; extents are numbers or symbols.  A failing seed is printed.  Every buffer
lies between guard zones.
"""
from __future__ import annotations

import dataclasses
import functools
import random

import native_nests
import pytest
import torch
from interp import Interpreter
from native_nests import Runner

from firesteel.codegen.target import this_machine
from firesteel.codegen.zones import Zones
from firesteel.loops.ir import Axis, Buffer, Nest, Phase, Program, Reduce, Store, acc, check_index, load, masked, zero
from firesteel.loops.scalars import DTYPES, S, literal, to
from firesteel.loops.verify import verify_nest
from firesteel.sym.expr import as_expr, evaluate, symbol

EXTENTS = (1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 100)


class Maker:
    """One random nest and the tensors it runs on."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.zones = Zones(lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype))
        self.sizes: dict[str, int] = {}
        self.buffers: dict[str, Buffer] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.axes = tuple(self.axis() for _ in range(self.random.choice((0, 1, 1, 2, 2, 3))))
        self.accs: list[Reduce] = []
        self.nest = Nest("fuzz", self.axes, tuple(self.phase(k) for k in range(self.random.choice((1, 1, 2, 3)))))

    def axis(self) -> Axis:
        name = f"i{len(self.sizes)}"
        size = self.random.choice(EXTENTS)
        self.sizes[name] = size
        if self.random.random() < 0.25:
            self.sizes[f"n_{name}"] = size
            return Axis(name, symbol(f"n_{name}"))
        return Axis(name, size)

    def number(self, size) -> int:
        return evaluate(size, self.sizes)

    # ------------------------------------------------------------ memory

    def buffer(self, shape, dtype: str, stored: bool = False) -> Buffer:
        """A buffer of any layout; an input is filled with small numbers."""
        name = f"b{len(self.buffers)}"
        order = list(range(len(shape)))
        if self.random.random() < 0.4:
            self.random.shuffle(order)
        strides = [0] * len(shape)
        step = self.random.choice((1, 1, 1, 2)) if not stored else 1
        for d in reversed(order):
            strides[d] = step
            step = step * shape[d] if not isinstance(step, int) or step != 1 else shape[d]
        sizes = [self.number(n) for n in shape]
        tensor = self.zones.empty(name, tuple(sizes), tuple(self.number(s) for s in strides), DTYPES[dtype])
        tensor.copy_(torch.randint(-3, 4, sizes, generator=self.torch) if dtype in ("i64", "i32", "bool") else torch.randn(sizes, generator=self.torch))
        self.buffers[name] = Buffer(name, dtype, tuple(shape), tuple(strides), "output" if stored else "input")
        self.tensors[name] = tensor
        return self.buffers[name]

    def place(self, axis: Axis):
        """(size, index, mask) of a dimension that is read along an axis."""
        i, n, real = axis.value, axis.extent, self.number(axis.extent)
        kind = self.random.choice(("plain", "plain", "plain", "shift", "flip", "div", "mod", "masked", "gather"))
        if kind == "shift":
            return n + 2, S.add(i, 2), None
        if kind == "flip":
            return n, S.sub(S.sub(as_expr(n), 1), i), None
        if kind == "div":
            return (n + 2) // 3, S.floordiv(i, 3), None
        if kind == "mod":
            return 4, S.mod(i, 4), None
        if kind == "masked" and real > 2:
            return n - 2, S.sub(i, 2), S.ge(i, 2)
        if kind == "gather":
            where = self.buffer((n,), "i64")
            self.tensors[where.name].copy_(torch.randint(-6, 6, (real,), generator=self.torch))
            return 6, check_index(load(where, (i,)), 6), None
        return n, i, None

    def read(self, axes: list[Axis]):
        used = [a for a in axes if self.random.random() < 0.8]
        self.random.shuffle(used)
        places = [self.place(a) for a in used]
        if len(used) > 1 and self.random.random() < 0.15:       # two axes in one dimension
            a, b = used[:2]
            places[:2] = [(a.extent * b.extent, S.add(S.mul(a.value, as_expr(b.extent)), b.value), None)]
        dtype = self.random.choice(("f32", "f32", "f32", "f64", "bf16", "i64", "bool"))
        source = self.buffer(tuple(p[0] for p in places), dtype)
        index = tuple(p[1] for p in places)
        masks = [p[2] for p in places if p[2] is not None]
        if masks:
            mask = functools.reduce(S.and_, masks)
            return to(masked(source, index, mask, zero(dtype)), "f32")
        return to(load(source, index), "f32")

    # ------------------------------------------------------------ values

    def value(self, axes: list[Axis], depth: int = 3):
        choice = self.random.random()
        if depth == 0 or choice < 0.35:
            return self.leaf(axes)
        a = self.value(axes, depth - 1)
        unary = {0: lambda: S.tanh(a), 1: lambda: S.exp(S.neg(S.abs(a))), 2: lambda: S.abs(a), 3: lambda: S.floor(a), 4: lambda: to(to(a, "bf16"), "f32")}
        if choice < 0.5:
            return unary[self.random.randrange(5)]()
        b = self.value(axes, depth - 1)
        binary = {0: lambda: S.add(a, b), 1: lambda: S.sub(a, b), 2: lambda: S.mul(S.tanh(a), b), 3: lambda: S.max(a, b), 4: lambda: S.min(a, b), 5: lambda: S.where(S.lt(a, b), a, S.neg(b))}
        return binary[self.random.randrange(6)]()

    def leaf(self, axes: list[Axis]):
        choice = self.random.random()
        if choice < 0.1:
            return literal(self.random.choice((0.0, 1.5, -2.25)), "f32")
        if choice < 0.2 and axes:
            return to(self.random.choice(axes).value, "f32")
        if choice < 0.4 and self.accs:
            return to(acc(self.random.choice(self.accs)), "f32")
        return self.read(axes)

    # ------------------------------------------------------------ phases

    def phase(self, number: int) -> Phase:
        kind = self.random.choice(("map", "map", "reduce", "reduce", "scan")) if number < 2 else "map"
        own = () if kind == "map" and self.random.random() < 0.5 else tuple(self.axis() for _ in range(1 if kind == "scan" else self.random.choice((1, 1, 2))))
        axes = [*self.axes, *own]
        if kind == "map":
            return Phase("map", own, (), tuple(self.store(axes) for _ in range(self.random.choice((1, 2)))))
        made = []
        for _ in range(self.random.choice((1, 2))):
            op = self.random.choice(("sum", "max", "min")) if kind == "reduce" else self.random.choice(("sum", "max"))
            made.append(Reduce(f"r{number}_{len(made)}", op, self.value(axes, 2), "f32"))
        if kind == "scan":
            self.accs += made
            return Phase("scan", own, tuple(made), (self.store(axes),))
        stores = (self.store(axes),) if self.random.random() < 0.3 else ()
        self.accs += made
        return Phase("reduce", own, tuple(made), stores)

    def store(self, axes: list[Axis]) -> Store:
        order = list(axes)
        if self.random.random() < 0.3:
            self.random.shuffle(order)
        dtype = self.random.choice(("f32", "f32", "f64", "bf16", "bool"))
        target = self.buffer(tuple(a.extent for a in order), dtype, True)
        return Store(target.name, tuple(a.value for a in order), to(self.value(axes), dtype))


def reference(maker: Maker) -> dict[str, torch.Tensor]:
    """What the interpreter leaves in the buffers."""
    program = Program(maker.buffers, (maker.nest,), tuple(maker.buffers), (), {})
    machine = Interpreter(program, [t.clone() for t in maker.tensors.values()])
    machine.symbols = dict(maker.sizes)
    machine.step(maker.nest)
    return machine.memory


def check(seed: int) -> None:
    maker = Maker(seed)
    verify_nest(maker.nest, maker.buffers)
    want = reference(maker)
    runner = Runner(maker.nest, maker.buffers)
    assert runner(maker.tensors, maker.sizes) == 0
    maker.zones.check(f"kernel of seed {seed}")
    for name, buffer in maker.buffers.items():
        tolerance = 2e-2 if buffer.dtype == "bf16" else 2e-5
        scale = want[name].abs().max().item() if want[name].numel() and buffer.dtype != "bool" else 1.0
        torch.testing.assert_close(maker.tensors[name], want[name], rtol=tolerance, atol=tolerance * max(scale, 1.0), msg=lambda m: f"seed {seed}\n{maker.nest}\n{m}")


@pytest.mark.parametrize("seed", range(80))
def test_random_nest(seed):
    check(seed)


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_random_nest_without_masks(seed, monkeypatch):
    if this_machine().vector_bytes < 64:
        pytest.skip("this machine cannot run what is printed for others")
    monkeypatch.setattr(native_nests.Runner, "target", dataclasses.replace(this_machine(), vector_bytes=32, masks=False, variant="d"))
    check(seed)
