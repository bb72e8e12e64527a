"""Masked loads and stores, gathers and scatters of narrow elements: at every tail length nothing outside the buffers is written.

A vector math call stands between the mask and the store, so that masks are spilled: there LLVM lost the lanes that it had cleared.
"""
from __future__ import annotations

import dataclasses
import re

import native_nests
import pytest
import torch
from native_nests import Runner

from firesteel.codegen.lanes import fewest_lanes
from firesteel.codegen.target import Target, this_machine
from firesteel.loops.ir import Axis, Buffer, Nest, Phase, Store, axis, load, masked
from firesteel.loops.scalars import DTYPES, ITEMSIZE, S, literal
from firesteel.sym.expr import Size, as_expr, symbol

NARROW = ("bool", "i8", "u8", "i16", "bf16", "f16")
HOW = ("row", "gather", "scatter", "masked")
TAILS = (*range(1, 36), 63, 64, 65, 100, 129)
EXTENTS = (2, 3, 5, 6, 7, 8, 9, 12, 15, 17)
OTHERS = {"AVX2": {"vector_bytes": 32, "masks": False, "variant": "d"}, "16 bytes": {"vector_bytes": 16, "masks": False, "variant": "b", "vector_math": frozenset()}}
ZONE, PATTERN = 64, 0xA5


def nest_of(dtype: str, compute: str, how: str, n: Size) -> tuple[Nest, dict[str, Buffer]]:
    """z[i] = erf(sin(log(c[i]))), y[i] = x[i] where z > -1 (always): the store of y waits for z."""
    i = axis("i")
    steps = {"gather": (2, 1), "scatter": (1, 2)}.get(how, (1, 1))
    x, y = (Buffer(name, dtype, (n,), (step,)) for name, step in zip("xy", steps))
    c, z = (Buffer(name, compute, (n,), (1,)) for name in "cz")
    value = S.erf(S.sin(S.log(load(c, (i,)))))
    element = masked(x, (i,), S.lt(i, as_expr(n) - 2), literal(1, dtype)) if how == "masked" else load(x, (i,))
    picked = S.where(S.gt(value, literal(-2.0, compute)), element, literal(0, dtype))
    phase = Phase("map", (), (), (Store("z", (i,), value), Store("y", (i,), picked)))
    return Nest("masks", (Axis("i", n),), (phase,)), {b.name: b for b in (x, y, c, z)}


def guarded(content: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes with a zone on either side, the tensor between them)"""
    size = content.numel() * content.itemsize
    raw = torch.full((size + 2 * ZONE,), PATTERN, dtype=torch.uint8)
    inside = raw[ZONE:ZONE + size].view(content.dtype)
    inside.copy_(content)
    return raw, inside


def check(runner: Runner, dtype: str, compute: str, how: str, n: int) -> None:
    content = torch.arange(n).remainder(2 if dtype == "bool" else 100).to(DTYPES[dtype])
    spread = content.repeat_interleave(2)
    memory = {"x": guarded(spread if how == "gather" else content), "y": guarded(torch.zeros_like(spread if how == "scatter" else content)),
              "c": guarded(torch.linspace(1.5, 3.0, n, dtype=DTYPES[compute])), "z": guarded(torch.zeros(n, dtype=DTYPES[compute]))}
    assert runner({name: inside for name, (_, inside) in memory.items()}, {"n": n}) == 0
    got = memory["y"][1]
    if how == "masked":
        content[max(n - 2, 0):] = 1
    assert torch.equal(got[::2] if how == "scatter" else got, content), n
    assert how != "scatter" or not got[1::2].any(), n
    for name, (raw, _) in memory.items():
        assert (raw[:ZONE] == PATTERN).all() and (raw[-ZONE:] == PATTERN).all(), (name, n)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("compute", ["f32", "f64"])
@pytest.mark.parametrize("how", HOW)
def test_every_tail(dtype, compute, how):
    runner = Runner(*nest_of(dtype, compute, how, symbol("n")))
    for n in TAILS:
        check(runner, dtype, compute, how, n)


@pytest.mark.parametrize("dtype", ["bool", "bf16"])
@pytest.mark.parametrize("compute", ["f32", "f64"])
@pytest.mark.parametrize("how", ["row", "masked"])
def test_widths_of_short_axes(dtype, compute, how):
    for n in EXTENTS:
        check(Runner(*nest_of(dtype, compute, how, n)), dtype, compute, how, n)


@pytest.mark.parametrize("machine", OTHERS)
@pytest.mark.parametrize("dtype", ["bool", "bf16"])
def test_other_machines(dtype, machine, monkeypatch):
    if this_machine().vector_bytes < 64:
        pytest.skip("this machine cannot run what is printed for others")
    monkeypatch.setattr(native_nests.Runner, "target", dataclasses.replace(this_machine(), **OTHERS[machine]))
    for how in HOW:
        test_every_tail(dtype, "f64", how)


MASKED_ACCESS = re.compile(r"call .*@llvm\.masked\.(?:load|store)\.v(\d+)([if])(\d+)\.")
WITH_MASKS = Target("skylake-avx512", "", 64, True, True, "e", frozenset())


@pytest.mark.parametrize("dtype", [*NARROW, "i32", "f32", "f64"])
@pytest.mark.parametrize("compute", ["f32", "f64"])
def test_masked_vectors_fill_a_register(dtype, compute):
    """LLVM widens shorter ones together with their masks."""
    for n in (symbol("n"), *EXTENTS):
        text = native_nests.print_nest(*nest_of(dtype, compute, "masked", n), WITH_MASKS).text
        sizes = [int(lanes) * int(bits) for lanes, _, bits in MASKED_ACCESS.findall(text)]
        assert sizes and min(sizes) >= 128, (n, sizes)


def test_fewest_lanes():
    assert fewest_lanes(("f64", "bool"), WITH_MASKS) == 16
    assert fewest_lanes(("f64", "bf16"), WITH_MASKS) == 8
    assert fewest_lanes(("f64",), WITH_MASKS) == 2
    assert fewest_lanes(("f64", "bool"), dataclasses.replace(WITH_MASKS, masks=False)) == 1
    assert {d: 16 // ITEMSIZE[d] for d in NARROW} == {d: fewest_lanes((d,), WITH_MASKS) for d in NARROW}
