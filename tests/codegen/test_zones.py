"""Guard zones: what a kernel writes outside of its buffers is told, with the kernel's name; users see nothing of the zones."""
from __future__ import annotations

import ctypes

import pytest
import torch
from test_host import buffer, copy_nest, double, doubling_chain, doubling_launches, floats, python_kernel, whole
from tracing import trace

import firesteel as fs
from firesteel.codegen.host import Launch, build
from firesteel.codegen.zones import ZONE
from firesteel.errors import InternalError
from firesteel.loops.ir import Extern, Program, View
from firesteel.loops.plan import plan
from firesteel.pipeline import compile_native
from firesteel.runtime import cpu
from firesteel.sym.expr import symbol

aten = torch.ops.aten


def writing_at(place: int, inner):
    """A kernel that also writes one byte at that distance from its result."""
    def kernel(pointers, sizes):
        inner(pointers, sizes)
        ctypes.c_uint8.from_address(pointers[1] + place).value ^= 0xFF
    return kernel


@pytest.mark.parametrize("number,result", [(0, "t0"), (1, "t1"), (2, "t2"), (3, "b_y")])
@pytest.mark.parametrize("place,where", [(-1, "before"), (-ZONE, "before"), (20, "behind"), (20 + ZONE - 1, "behind")])
@pytest.mark.parametrize("n", [5, symbol("s0")])
def test_a_hit_names_the_kernel_and_the_buffer(n, number, result, place, where):
    """Temporaries in the arena and tensors alike."""
    program = doubling_chain(n)
    launches = doubling_launches(program, n)
    fixed = isinstance(n, int)
    kernel = writing_at(place, (lambda pointers, _: double(pointers, [n])) if fixed else double)
    old = launches[f"k{number}"]
    launches[f"k{number}"] = Launch(python_kernel(kernel, 2, 0 if fixed else 1), old.buffers, old.symbols)
    with pytest.raises(InternalError, match=f"The kernel k{number} wrote {where} the buffer {result}: 1 bytes"):
        build(plan(program, ZONE), launches, cpu.compile_text)(torch.randn(5))
    build(plan(doubling_chain(n)), launches, cpu.compile_text)


@pytest.mark.parametrize("n", [5, 0, symbol("s0")])
def test_results_and_their_storages_are_those_without_zones(n):
    program = doubling_chain(n)
    call = build(plan(program, ZONE), doubling_launches(program, n), cpu.compile_text)
    for size in (n,) if isinstance(n, int) else (3, 0, 1, 8):
        x = torch.randn(size)
        y, = call(x)
        assert torch.equal(y, 16 * x) and y.storage_offset() == 0 and y.untyped_storage().nbytes() == 4 * size
        y.resize_(100)
    assert call.source.count("zones.check") == (4 if n != 0 else 0)        # a nest without points is not launched


def test_a_library_call_is_named():
    x, y = buffer("x", (4, 4), "input"), buffer("y", (4, 4), "output")
    step = Extern("mm", ("y",), aten.mm.out, (whole(x), whole(x)), out=True)
    p = plan(Program({"x": x, "y": y}, (step,), ("x",), (whole(y), View("y", (4,), (5,), 0, "f32")), {}), ZONE)
    t = torch.randn(4, 4)
    product, diagonal = build(p, {})(t)
    torch.testing.assert_close(product, t @ t)
    assert diagonal.data_ptr() == product.data_ptr() and torch.equal(diagonal, product.diagonal())

    def wrong(a, b, out):
        floats(out.data_ptr() + 64, 1)[0] = 1.0
    step = Extern("wrong", ("y",), aten.mm.out, (whole(x), whole(x)), out=True)
    call = build(plan(Program({"x": x, "y": y}, (step,), ("x",), (whole(y),), {}), ZONE), {})
    name = next(k for k, v in call.__globals__.items() if v is torch.mm)
    call.__globals__[name] = wrong
    with pytest.raises(InternalError, match="The library call wrong wrote behind the buffer b_y"):
        call(t)


@pytest.mark.parametrize("returned", [lambda given: given[:3], lambda given: given.double()])
def test_a_library_call_returns_what_its_rule_says(returned):
    x, y = buffer("x", (4,), "input"), buffer("y", (4,), "output")
    p = plan(Program({"x": x, "y": y}, (Extern("half", ("y",), returned, (whole(x),)),), ("x",), (whole(y),), {}), ZONE)
    with pytest.raises(InternalError, match=r"The library call half returned torch.float\d\d \[\d\], its rule says torch.float32 \[4\]"):
        build(p, {})(torch.randn(4))


def test_an_alias_that_a_library_call_returns_leaves_the_zones():
    x, t, y = buffer("x", (4,), "input"), buffer("t", (4,)), buffer("y", (4,), "output")
    steps = (copy_nest("k", x, t), Extern("same", ("y",), lambda given: given, (whole(t),)))
    p = plan(Program({"x": x, "t": t, "y": y}, steps, ("x",), (whole(y),), {}), ZONE)
    launch = Launch(python_kernel(lambda pointers, _: double(pointers, [4]), 2, 0), ("x", "t"))
    tx = torch.randn(4)
    result, = build(p, {"k": launch})(tx)
    assert torch.equal(result, 2 * tx) and result.storage_offset() == 0 and result.untyped_storage().nbytes() == 16


@pytest.mark.parametrize("verify", [True, False])
def test_zones_are_there_where_verifiers_run(verify):
    x = torch.randn(3, 4)
    with fs.config.patch(verify=verify):
        call = compile_native(trace(lambda x: (x.sin() @ x.t()).relu().t(), [x]).gm, [x])
    assert ("zones" in call.source) == verify
    y, = call(x)
    torch.testing.assert_close(y, (x.sin() @ x.t()).relu().t())
    assert y.stride() == (1, 3) and y.storage_offset() == 0 and y.untyped_storage().nbytes() == 36
