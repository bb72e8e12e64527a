"""Lanes that are a few elements apart: what is read whole and picked apart, what is woven and stored whole, and that neither leaves its buffer."""
from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from native_nests import Runner
from test_llvm_reads import at_edge

from firesteel.codegen.flat import flatten
from firesteel.codegen.lanes import choose
from firesteel.codegen.strided import windows, woven
from firesteel.codegen.target import this_machine
from firesteel.loops.ir import Axis, Buffer, Nest, Phase, Reduce, Store, acc, axis, load
from firesteel.loops.scalars import DTYPES
from firesteel.sym.expr import const

SIZES = (1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 257)
READ = {                # step between points, and which elements of a point's row
    "a column of two": (2, [0]), "both of two": (2, [0, 1]), "the last of two": (2, [1]), "all of three": (3, [0, 1, 2]), "ends of three": (3, [2, 0]),
    "past a row": (2, [0, 1, 2, 3, 4]), "four": (4, [3, 1]), "one of five": (5, [1]), "most of seven": (7, [0, 1, 2, 4, 5, 6]), "twelve": (12, [*range(12)]),
}


def nest_of(step: int, chosen: list[int], dtype: str, n: int) -> tuple[Nest, dict[str, Buffer]]:
    """y[i, k] = x[step * i + chosen[k]]"""
    i = axis("i")
    x, y = Buffer("x", dtype, (step * (n - 1) + max(chosen) + 1,), (1,)), Buffer("y", dtype, (n, len(chosen)), (len(chosen), 1))
    stores = tuple([Store("y", (i, const(k)), load(x, (step * i + place,))) for k, place in enumerate(chosen)])
    return Nest("strided", (Axis("i", n),), (Phase("map", (), (), stores),)), {"x": x, "y": y}


def check(name: str, dtype: str) -> None:
    step, chosen = READ[name]
    for n in SIZES:
        nest, buffers = nest_of(step, chosen, dtype, n)
        runner = Runner(nest, buffers)
        content = torch.arange(buffers["x"].shape[0]).remainder(2 if dtype == "bool" else 100).to(DTYPES[dtype])
        want = torch.stack([content[place::step][:n] for place in chosen], 1)
        for of_end in (False, True):
            y = at_edge(torch.zeros(n * len(chosen), dtype=content.dtype), of_end)
            assert runner({"x": at_edge(content, of_end), "y": y}) == 0
            assert torch.equal(y.view(n, -1), want), (name, dtype, n)


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages as Linux does")
@pytest.mark.parametrize("name", READ)
def test_values_and_edges(name):
    """In a process of its own: what touches memory outside ends it."""
    code = f"import test_llvm_strided as t\nfor dtype in ('f32', 'f64', 'bf16', 'u8', 'bool', 'i64'): t.check({name!r}, dtype)"
    found = subprocess.run([sys.executable, "-c", code], cwd=__file__.rpartition("/")[0], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]


def test_whole_rows_are_not_gathered():
    text = Runner(*nest_of(3, [0, 1, 2], "f32", 1024)).kernel.text
    assert this_machine().lanes(4) == 1 or "gather" not in text and "scatter" not in text
    apart = Runner(*nest_of(3, [0, 2], "f32", 1024)).kernel.text
    assert this_machine().lanes(4) == 1 or "gather" not in apart


def test_windows_and_woven_stores():
    flat, _ = flatten(*nest_of(2, [0, 1, 2, 3, 4], "f32", 1024))
    lane = flat.axes[0].name
    found = windows(flat.phases[0], lane).values()
    assert {(window.first, window.last) for window in found} == {(0, 1), (2, 3), (4, 4)}
    assert [len(stores) for stores in woven(flat.phases[0].stores, lane)] == [5]
    assert choose(flat, this_machine()).points == lane


def test_a_phase_reads_what_one_before_it_stored():
    """The vectors of a window are read again: y[i, 0] and y[i, 1] are stored, then summed and swapped."""
    i, n = axis("i"), 1000
    x, y, z = Buffer("x", "f32", (n,), (1,)), Buffer("y", "f32", (n, 2), (2, 1)), Buffer("z", "f32", (n, 2), (2, 1))
    first = Phase("map", (), (), (Store("y", (i, const(0)), load(x, (i,))), Store("y", (i, const(1)), load(y, (i, const(0))))))
    second = Phase("map", (), (), (Store("z", (i, const(0)), load(y, (i, const(1)))), Store("z", (i, const(1)), load(y, (i, const(0))))))
    a, b, c = torch.randn(n), torch.randn(n, 2), torch.zeros(n, 2)
    want = torch.stack([b[:, 0].clone(), a], 1)
    assert Runner(Nest("twice", (Axis("i", n),), (first, second)), {"x": x, "y": y, "z": z})({"x": a, "y": b, "z": c}) == 0
    assert torch.equal(c, want)


@pytest.mark.parametrize("rows,columns", [(3, 100), (5, 33), (40, 7)])
def test_sums_of_columns_of_pairs(rows, columns):
    """A sweep whose lanes are two elements apart."""
    i, r = axis("i"), axis("r")
    x, y = Buffer("x", "f32", (rows, columns, 2), (columns * 2, 2, 1)), Buffer("y", "f32", (rows, 2), (2, 1))
    sums = tuple([Reduce(f"a{k}", "sum", load(x, (i, r, const(k))), "f32") for k in (0, 1)])
    stores = tuple([Store("y", (i, const(k)), acc(total)) for k, total in enumerate(sums)])
    nest = Nest("pairs", (Axis("i", rows),), (Phase("reduce", (Axis("r", columns),), sums), Phase("map", (), (), stores)))
    content, got = torch.randn(rows, columns, 2), torch.zeros(rows, 2)
    assert Runner(nest, {"x": x, "y": y})({"x": content, "y": got}) == 0
    torch.testing.assert_close(got, content.sum(1))
