"""How lanes read memory that is no plain row: backwards, every other element, at computed places; and views of dense memory in other sizes.  Buffers end
where a page ends behind which nothing may be read, and begin behind such a page."""
from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys

import pytest
import torch
from native_nests import Runner

from firesteel.codegen.flat import flatten
from firesteel.codegen.target import this_machine
from firesteel.loops.ir import Axis, Buffer, Nest, Phase, Store, axis, load
from firesteel.loops.scalars import DTYPES, S
from firesteel.sym.expr import as_expr

PAGE = mmap.PAGESIZE
SIZES = (1, 5, 15, 16, 17, 31, 32, 33, 64, 100, 160, 257)


def place(kind, i, n):
    """(index of x, how many elements x has)"""
    backwards = as_expr(n) - 1 - i
    return {"backwards": (backwards, n), "every other": (2 * i, 2 * n - 1), "every other, backwards": (2 * backwards, 2 * n - 1),
            "every third": (3 * i, 3 * n - 2), "rolled": (S.mod(i + 3, as_expr(n)), n),
            "reflected": (as_expr(n) - 1 - S.abs(as_expr(n) - 1 - S.abs(i - n // 3)), n),
            "clamped": (S.min(S.max(i - 4, as_expr(0)), as_expr(n - 1)), n), "constant": (S.mul(S.mod(i, as_expr(1)), as_expr(5)), n)}[kind]


KINDS = ("backwards", "every other", "every other, backwards", "every third", "rolled", "reflected", "clamped", "constant")


def nest_of(kind, dtype, n):
    i = axis("i")
    index, size = place(kind, i, n)
    x, y = Buffer("x", dtype, (size,), (1,)), Buffer("y", dtype, (n,), (1,))
    return Nest("reads", (Axis("i", n),), (Phase("map", (), (), (Store("y", (i,), load(x, (index,))),)),)), {"x": x, "y": y}, size


def at_edge(content: torch.Tensor, of_end: bool) -> torch.Tensor:
    """A copy of it in memory beside which nothing may be read."""
    size = content.numel() * content.itemsize
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    KEPT.append(memory)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (0, pages + 1):
        assert libc.mprotect(ctypes.c_void_p(begin + page * PAGE), PAGE, 0) == 0
    offset = PAGE + (pages * PAGE - size if of_end else 0)
    inside = torch.frombuffer(memory, dtype=content.dtype, count=content.numel(), offset=offset)
    inside.copy_(content)
    return inside


KEPT: list[mmap.mmap] = []


def check(kind: str, dtype: str) -> None:
    for n in SIZES:
        nest, buffers, size = nest_of(kind, dtype, n)
        runner = Runner(nest, buffers)
        content = torch.arange(size).remainder(2 if dtype == "bool" else 100).to(DTYPES[dtype])
        want = torch.tensor([content[_evaluated(kind, k, n)].item() for k in range(n)]).to(content.dtype)
        for of_end in (False, True):
            y = torch.zeros(n, dtype=content.dtype)
            assert runner({"x": at_edge(content, of_end), "y": y}) == 0
            assert torch.equal(y, want), (kind, dtype, n)


def _evaluated(kind: str, k: int, n: int) -> int:
    return {"backwards": n - 1 - k, "every other": 2 * k, "every other, backwards": 2 * (n - 1 - k), "every third": 3 * k, "rolled": (k + 3) % n,
            "reflected": n - 1 - abs(n - 1 - abs(k - n // 3)), "clamped": min(max(k - 4, 0), n - 1), "constant": 0}[kind]


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages as Linux does")
@pytest.mark.parametrize("kind", KINDS)
def test_reads_stay_inside(kind):
    """In a process of its own: what reads outside ends it."""
    code = f"import test_llvm_reads as t\nfor dtype in ('f32', 'f64', 'bf16', 'u8', 'bool', 'i64'): t.check({kind!r}, dtype)"
    found = subprocess.run([sys.executable, "-c", code], cwd=__file__.rpartition("/")[0], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]


def test_rows_backwards_are_not_gathered():
    texts = [Runner(*nest_of(kind, "f32", 160)[:2]).kernel.text for kind in ("backwards", "every other")]
    assert this_machine().lanes(4) == 1 or not any("gather" in text for text in texts)


def test_a_view_in_other_sizes_is_one_row():
    """x as [8, 6] read as [12, 4]: the places follow each other."""
    rows, columns = axis("a"), axis("b")
    flat = 4 * rows + columns
    x, y = Buffer("x", "f32", (8, 6), (6, 1)), Buffer("y", "f32", (12, 4), (4, 1))
    value = load(x, (S.floordiv(flat, as_expr(6)), S.mod(flat, as_expr(6))))
    nest = Nest("view", (Axis("a", 12), Axis("b", 4)), (Phase("map", (), (), (Store("y", (rows, columns), value),)),))
    read = flatten(nest, {"x": x, "y": y})[0].phases[0].stores[0].value
    assert read.op == "at" and not read.args
    content, got = torch.randn(8, 6), torch.zeros(12, 4)
    Runner(nest, {"x": x, "y": y})({"x": content, "y": got})
    assert torch.equal(got, content.view(12, 4))
