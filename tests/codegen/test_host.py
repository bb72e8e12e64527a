"""The host function on hand-made programs with hand-written kernels: allocation, launches, library calls, views, errors."""
import ctypes
import gc
import threading
import weakref

import pytest
import torch
from tracing import trace

import firesteel as fs
from firesteel.codegen import hosted
from firesteel.codegen.host import Launch, build
from firesteel.loops.ir import Axis, Buffer, Extern, Nest, Phase, Program, Store, View, axis, load
from firesteel.loops.plan import plan
from firesteel.loops.scalars import S
from firesteel.operators import OWN
from firesteel.pipeline import compile_native
from firesteel.runtime import cpu
from firesteel.sym.expr import as_expr, symbol

aten = torch.ops.aten
KERNELS: dict[str, object] = {}


@pytest.fixture(scope="module")
def compile_text():
    """JIT of a piece of LLVM text.  The runtime's own: the host keeps the launcher's address for the life of the process."""
    return cpu.compile_text


def buffer(name, shape, kind="temp", dtype="f32"):
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return Buffer(name, dtype, tuple(shape), tuple(reversed(strides)), kind)


def whole(b: Buffer) -> View:
    return View(b.name, b.shape, b.strides, 0, b.dtype)


def python_kernel(function, pointers: int, symbols: int = 1) -> int:
    """A kernel written in Python: function(pointers, sizes) returns the error code."""
    def kernel(args):
        words = (ctypes.c_int64 * (pointers + symbols + 1)).from_address(args)
        error = function(list(words[:pointers]), list(words[pointers:-1]))
        if error:
            ctypes.c_int64.from_address(words[-1]).value = error
    made = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel)
    KERNELS[id(made)] = made
    return ctypes.cast(made, ctypes.c_void_p).value


def floats(address: int, count: int):
    return (ctypes.c_float * count).from_address(address) if count else []


def double(pointers, sizes):
    """y[i] = 2 * x[i], i < n."""
    x, y = (floats(p, sizes[0]) for p in pointers)
    for i in range(sizes[0]):
        y[i] = 2 * x[i]


def copy_nest(name, source, target):
    n = target.shape[0]
    return Nest(name, (Axis("i", n),), (Phase("map", stores=(Store(target.name, (axis("i"),), S.mul(load(source, (axis("i"),)), 2.0)),)),))


def doubling_chain(n):
    """x -> t0 -> t1 -> t2 -> y, each twice the one before."""
    names = ["x", "t0", "t1", "t2", "y"]
    kinds = ["input", "temp", "temp", "temp", "output"]
    buffers = {name: buffer(name, (n,), kind) for name, kind in zip(names, kinds)}
    steps = tuple(copy_nest(f"k{i}", buffers[a], buffers[b]) for i, (a, b) in enumerate(zip(names, names[1:])))
    symbols = {} if isinstance(n, int) else {"s0": (0, "shape", 0)}
    return Program(buffers, steps, ("x",), (whole(buffers["y"]),), symbols)


def doubling_launches(program, n):
    fixed = isinstance(n, int)
    address = python_kernel((lambda pointers, _: double(pointers, [n])) if fixed else double, 2, 0 if fixed else 1)
    symbols = () if fixed else (n.attr,)
    return {step.name: Launch(address, (step.phases[0].stores[0].value.args[0].attr, step.phases[0].stores[0].buffer), symbols) for step in program.steps}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("n", [5, 0])
def test_kernels_in_a_row_are_one_launch(n, native, compile_text):
    program = doubling_chain(n)
    call = build(plan(program), doubling_launches(program, n), compile_text if native else None)
    x = torch.randn(n)
    y, = call(x)
    assert torch.equal(y, x * 16)
    assert call.source.count("run_") == (1 if n else 0)        # a nest without points is not launched


@pytest.mark.parametrize("native", [True, False])
def test_symbols_are_read_from_the_inputs(native, compile_text):
    n = symbol("s0")
    program = doubling_chain(n)
    call = build(plan(program), doubling_launches(program, n), compile_text if native else None)
    for size in (3, 8, 0, 1):
        x = torch.randn(size)
        assert torch.equal(call(x)[0], x * 16)
    assert "s0 = x0.shape[0]" in call.source


def test_temporaries_share_the_arena():
    text = str(plan(doubling_chain(100)))
    assert text.splitlines()[0] == "arena 448 bytes"     # one place of 400 bytes, rounded up: each kernel overwrites what it reads
    assert text.count(" at 0") == 3 and text.count("reusing") == 2


def test_library_calls_take_views_and_outputs_alias_inputs():
    x, w, y = buffer("x", (4, 3), "input"), buffer("w", (5, 3), "input"), buffer("y", (4, 5), "output")
    step = Extern("mm", ("y",), aten.mm.default, (whole(x), View("w", (3, 5), (1, 3), 0, "f32")))
    outputs = (whole(y), View("x", (3, 4), (1, 3), 0, "f32"), View("y", (2, 5), (10, 1), 5, "f32"), None, 7)
    call = build(plan(Program({"x": x, "w": w, "y": y}, (step,), ("x", "w"), outputs, {})), {})
    tx, tw = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    y, xt, rows, none, seven = call(tx, tw)
    torch.testing.assert_close(y, tx @ tw.t())
    assert not y.requires_grad and torch.equal(xt, tx.t()) and xt.data_ptr() == tx.data_ptr()
    assert torch.equal(rows, y[1::2]) and rows.data_ptr() == y[1].data_ptr()
    assert none is None and seven == 7


def test_an_input_that_is_a_view_keeps_its_own_offset():
    x, y = Buffer("x", "f32", (3, 4), (4, 1), "input", offset=4), buffer("y", (4, 4), "output")
    step = Extern("mm", ("y",), aten.mm.default, (View("x", (4, 3), (1, 4), 4, "f32"), View("x", (3, 4), (4, 1), 4, "f32")))
    call = build(plan(Program({"x": x, "y": y}, (step,), ("x",), (whole(y),), {})), {})
    base = torch.randn(6, 4)
    for part in (base[1:4], base[2:5]):
        torch.testing.assert_close(call(part)[0], part.t() @ part)


def test_results_in_other_strides_are_laid_out():
    x, y = buffer("x", (4, 3), "input"), Buffer("y", "f32", (4, 3), (1, 4), "output")
    step = Extern("clone", ("y",), aten.clone.default, (whole(x),))
    call = build(plan(Program({"x": x, "y": y}, (step,), ("x",), (whole(y),), {})), {})
    tx = torch.randn(4, 3)
    assert torch.equal(call(tx)[0], tx) and call(tx)[0].stride() == (1, 4)


def test_calls_with_several_results_and_scalars():
    x = buffer("x", (4, 3), "input")
    v, i = buffer("v", (4, 2), "output"), buffer("i", (4, 2), "output", "i64")
    n = symbol("s0")
    step = Extern("topk", ("v", "i"), aten.topk.default, (whole(x), n), {"largest": False})
    call = build(plan(Program({"x": x, "v": v, "i": i}, (step,), ("x", "s0"), (whole(v), whole(i)), {"s0": (1, "value", 0)})), {})
    tx = torch.randn(4, 3)
    want = tx.topk(2, largest=False)
    got = call(tx, 2)
    assert torch.equal(got[0], want.values) and torch.equal(got[1], want.indices)


def test_calls_that_write_into_out():
    x, t, y = buffer("x", (4, 4), "input"), buffer("t", (4, 4)), buffer("y", (4, 4), "output")
    steps = tuple(Extern(name, (b.name,), aten.mm.out, (whole(a), whole(x)), out=True) for name, a, b in (("a", x, t), ("b", t, y)))
    p = plan(Program({"x": x, "t": t, "y": y}, steps, ("x",), (whole(y),), {}))
    tx = torch.randn(4, 4)
    torch.testing.assert_close(build(p, {})(tx)[0], tx @ tx @ tx)
    assert str(p).splitlines() == ["alloc t", "run a", "alloc y", "run b", "free t", "return y"]


def test_dead_tensors_are_taken_over_or_let_go():
    names = ["x", "t0", "t1", "t2", "y"]
    buffers = {name: buffer(name, (4, 4), {"x": "input", "y": "output"}.get(name, "temp")) for name in names}
    steps = tuple(Extern(f"m{i}", (b,), aten.mm.out, (whole(buffers[a]), whole(buffers["x"])), out=True) for i, (a, b) in enumerate(zip(names, names[1:])))
    p = plan(Program(buffers, steps, ("x",), (whole(buffers["y"]),), {}))
    assert "alloc t2 reusing t0" in str(p) and "alloc y\n" in str(p)
    call = build(p, {})
    tx = torch.randn(4, 4)
    torch.testing.assert_close(call(tx)[0], tx @ tx @ tx @ tx @ tx)
    assert call.source.count("del") == 1 and "del b_t1" in call.source


@pytest.mark.parametrize("native", [True, False])
def test_a_bad_index_raises_as_eager_does(native, compile_text):
    x, y = buffer("x", (3,), "input"), buffer("y", (3,), "output")
    program = Program({"x": x, "y": y}, (copy_nest("k", x, y),), ("x",), (whole(y),), {})
    address = python_kernel(lambda pointers, sizes: 1, 2, 0)
    call = build(plan(program), {"k": Launch(address, ("x", "y"))}, compile_text if native else None)
    with pytest.raises(IndexError, match="index out of range in self"):
        call(torch.zeros(3))


def test_constants_are_kept_alive():
    c, y = torch.randn(3), buffer("y", (3,), "output")
    x = Buffer("c", "f32", (3,), (1,), "constant", value=c)
    program = Program({"c": x, "y": y}, (copy_nest("k", x, y),), (), (whole(y), whole(x)), {})
    call = build(plan(program), {"k": Launch(python_kernel(lambda pointers, _: double(pointers, [3]), 2, 0), ("c", "y"))})
    want, watch = c * 2, weakref.ref(c)
    del c, x, program
    gc.collect()
    assert torch.equal(call()[0], want) and watch() is not None


def test_float_symbols_travel_as_bits():
    assert ctypes.c_double.from_buffer_copy(ctypes.c_int64(hosted.as_word(0.1))).value == 0.1 and hosted.as_word(7) == 7


# ---------------------------------------------------------------- with the real printer and JIT

def native(fn, *inputs):
    return compile_native(trace(fn, list(inputs)).gm, list(inputs))


@pytest.mark.parametrize("shape", [(8, 16), (1, 5), (0, 4), (4, 0)])
def test_native_programs_equal_eager(shape):
    def fn(x, w):
        h = torch.nn.functional.gelu(x * w)
        s = (h - h.sum(1, keepdim=True)) @ h.t()
        return s.exp().sum(0), h, s.t(), h.reshape(-1)[1:]
    inputs = torch.randn(shape), torch.randn(shape[1])
    for got, want in zip(native(fn, *inputs)(*inputs), fn(*inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert got.stride() == want.stride() and got.storage_offset() == want.storage_offset()


def test_outputs_of_one_buffer_share_it():
    call = native(lambda x: (lambda y: (y, y.t(), y[1]))(x * 2), torch.randn(3, 4))
    y, yt, row = call(torch.randn(3, 4))
    assert y.data_ptr() == yt.data_ptr() and row.data_ptr() == y[1].data_ptr() and not yt._is_view()


def test_a_bad_index_raises_from_native_code():
    weights = torch.randn(5, 3)
    call = native(lambda i, w: torch.nn.functional.embedding(i, w) * 2, torch.tensor([0, 4]), weights)
    assert torch.equal(call(torch.tensor([1, 2]), weights)[0], weights[1:3] * 2)
    with pytest.raises(IndexError, match="index out of range in self"):
        call(torch.tensor([1, 5]), weights)
    assert torch.equal(call(torch.tensor([1, 2]), weights)[0], weights[1:3] * 2)


def test_threads_may_call_at_the_same_time():
    def fn(x):
        return torch.softmax(x @ x.t(), 1).sin() @ x
    x = torch.randn(32, 32)
    call, want, failures = native(fn, x), {}, []
    inputs = [torch.randn(32, 32) for _ in range(4)]

    def work(number):
        for _ in range(50):
            if not torch.allclose(call(inputs[number])[0], want[number], atol=1e-4):
                failures.append(number)
    for number, value in enumerate(inputs):
        want[number] = fn(value)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("number", [2**63, -2**63 - 1, 2**200, "not a number"])
def test_no_kernel_runs_with_a_number_that_does_not_fit(number, compile_text):
    ran = []
    address = python_kernel(lambda pointers, sizes: ran.append(sizes), 0)
    run = hosted.launcher([1, 2, address, 2, 0, 0, -1, 0], compile_text)
    assert run(-1) == 0 and ran == [[-1]]
    with pytest.raises((OverflowError, TypeError)):
        run(number)
    assert ran == [[-1]]


def test_what_kernels_are_the_last_to_read_is_freed_before_memory_is_taken():
    """The product a dies in the kernel; the next product is allocated only after that ran."""
    n = 256
    x, a, s, y = (buffer(name, shape, kind) for name, shape, kind in (
        ("x", (n, n), "input"), ("a", (n, n), "temp"), ("s", (n,), "output"), ("y", (n, n), "output")))
    first = load(a, (axis("i"), as_expr(0)))
    steps = (Extern("m0", ("a",), aten.mm.out, (whole(x), whole(x)), out=True),
             Nest("k", (Axis("i", n),), (Phase("map", stores=(Store("s", (axis("i"),), first),)),)),
             Extern("m1", ("y",), aten.mm.out, (whole(x), whole(x)), out=True))
    program = Program({b.name: b for b in (x, a, s, y)}, steps, ("x",), (whole(s), whole(y)), {})

    def column(pointers, _):
        source, target = floats(pointers[0], n * n), floats(pointers[1], n)
        for i in range(n):
            target[i] = source[i * n]
    call = build(plan(program), {"k": Launch(python_kernel(column, 2, 0), ("a", "s"))})
    value = torch.randn(n, n)
    got = call(value)
    torch.testing.assert_close(got, ((value @ value)[:, 0], value @ value))
    assert call.source.index("del b_a") < call.source.index("b_y = ")


def test_what_a_kernel_reads_outlives_the_memory_that_is_taken_for_it():
    """k1 is the last to read the product b, and writes s in its memory; before memory for y is taken, k0 runs and a is let go, but not b."""
    n = 256
    x, a, b, r, s, y, z = (buffer(name, shape, kind) for name, shape, kind in (
        ("x", (n, n), "input"), ("a", (n, n), "temp"), ("b", (n, n), "temp"), ("r", (n, n), "output"), ("s", (1, n, n), "temp"), ("y", (n, n), "output"),
        ("z", (1, n, n), "output")))
    here, axes = (axis("i"), axis("j")), (Axis("i", n), Axis("j", n))
    twice = S.mul(load(b, here), 2.0)
    steps = (Extern("m0", ("a",), aten.mm.out, (whole(x), whole(x)), out=True), Extern("m1", ("b",), aten.mm.out, (whole(x), whole(x)), out=True),
             Nest("k0", axes, (Phase("map", stores=(Store("r", here, S.mul(load(a, here), 2.0)),)),)),
             Nest("k1", axes, (Phase("map", stores=(Store("s", (as_expr(0), *here), twice), Store("y", here, twice))),)),
             Extern("m2", ("z",), aten.bmm.out, (whole(s), whole(s)), out=True))
    program = Program({one.name: one for one in (x, a, b, r, s, y, z)}, steps, ("x",), (whole(r), whole(y), whole(z)), {})

    def twice_into(pointers, _):
        source, *targets = (torch.frombuffer(floats(p, n * n), dtype=torch.float32) for p in pointers)
        for target in reversed(targets):
            torch.mul(source, 2, out=target)
    p = plan(program)
    assert "alloc s reusing b" in str(p)
    call = build(p, {name: Launch(python_kernel(twice_into, len(used), 0), used) for name, used in (("k0", ("a", "r")), ("k1", ("b", "s", "y")))})
    value = torch.randn(n, n)
    want = 2 * (value @ value)
    torch.testing.assert_close(call(value), (want, want, (want @ want)[None]))


@pytest.mark.parametrize("program", [lambda x, w: x @ w, lambda x, w: torch.addmm(x, x, w), lambda x, w: (x[None] @ w[None])[0], lambda x, w: (x @ w).view(-1)])
def test_a_result_of_a_product_counts_no_writes(program):
    x = torch.randn(4, 4)
    with fs.config.patch(verify=False):
        assert fs.compile(program)(x, x)._version == 0


def test_an_operator_of_ours_is_called_as_the_function_that_it_is():
    x, y = buffer("x", (3,), "input"), buffer("y", (3,), "output")
    step = Extern("own", ("y",), torch.ops.aten.neg.default, (whole(x),))
    program = plan(Program({"x": x, "y": y}, (step,), ("x",), (whole(y),), {}))
    given = torch.randn(3)
    assert torch.equal(build(program, {})(given)[0], -given)
    OWN.add(torch.ops.aten.neg.default, lambda t: t + 5)
    try:
        assert torch.equal(build(program, {})(given)[0], given + 5)
    finally:
        OWN.remove(torch.ops.aten.neg.default)


def test_recurrent_layers_are_called_past_the_dispatcher():
    layer, packed = torch.nn.GRU(3, 4), torch.nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 3), torch.tensor([5, 3]))
    states = torch.zeros(1, 2, 4)
    compiled, called = fs.compile(lambda packed, states: layer(packed, states)[1]), []
    with torch.no_grad():
        for _ in range(2):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                result = compiled(packed, states)
            called = [event.key for event in profile.key_averages()]
        torch.testing.assert_close(result, layer(packed, states)[1])
    assert "aten::gru" in called and "firesteel::recurrent" not in called
