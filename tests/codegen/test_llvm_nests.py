"""Whole nests through the LLVM printer: shapes, strides, masks, reductions, scans, gathers, symbols, threads."""
from __future__ import annotations

import math

import pytest
import torch
from native_nests import Runner, buffer, contiguous, layernorm, pointwise, reduction, run, softmax

from firesteel.codegen.llvm import print_nest
from firesteel.codegen.target import this_machine
from firesteel.loops.ir import Axis, Buffer, Nest, Phase, Reduce, Store, acc, axis, check_index, load, masked, zero
from firesteel.loops.scalars import S, literal, to
from firesteel.runtime import threads
from firesteel.sym.expr import make, symbol


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(got, want, tol=2e-6):
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


# ---------------------------------------------------------------- pointwise

@pytest.mark.parametrize("shape", [(1,), (15,), (16,), (17,), (1000,), (3, 5), (64, 64), (7, 1, 9), (2, 3, 4, 5), (0,), (4, 0)])
def test_pointwise_shapes(shape):
    x, y = randn(*shape), torch.full(shape, 7.0)
    run(*pointwise(lambda v: S.add(S.mul(v, 2.0), 1.0), buffer("y", y), buffer("x", x)), {"x": x, "y": y})
    assert torch.equal(y, x * 2.0 + 1.0)


@pytest.mark.parametrize("name,make_x", [
    ("transposed", lambda: randn(40, 30).t()), ("stepped", lambda: randn(30, 80)[:, ::2]), ("rows", lambda: randn(60, 40)[::2]),
    ("permuted", lambda: randn(40, 5, 6).permute(1, 2, 0).reshape(30, 40)), ("expanded", lambda: randn(30, 1).expand(30, 40)), ("row", lambda: randn(1, 40).expand(30, 40)),
])
def test_strided_inputs_and_outputs(name, make_x):
    x = make_x()
    y = torch.empty(30, 40)
    run(*pointwise(lambda v: S.exp(v), buffer("y", y), buffer("x", x)), {"x": x, "y": y})
    near(y, x.exp())
    z = torch.empty(40, 30).t()
    run(*pointwise(lambda v: S.exp(v), buffer("y", z), buffer("x", x)), {"x": x, "y": z})
    near(z, x.exp())


@pytest.mark.parametrize("shape", [(16, 16), (33, 300), (300, 33), (8, 1000), (5, 9, 70), (64, 20, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.int16])
def test_rows_of_another_axis_are_turned(shape, dtype):
    x, z = (randn(*shape, seed=seed).mul(10).to(dtype) for seed in (0, 1))
    x, z = x.transpose(-1, -2).contiguous().transpose(-1, -2), z.transpose(0, 1).contiguous().transpose(0, 1)
    y = torch.zeros(shape, dtype=dtype)
    fn = getattr(S, "or") if dtype == torch.bool else S.add
    run(*pointwise(fn, buffer("y", y), buffer("x", x), buffer("z", z)), {"x": x, "y": y, "z": z})
    assert torch.equal(y, x | z if dtype == torch.bool else x + z)


def test_turned_rows_of_symbolic_sizes_stay_inside():
    n, m = symbol("n"), symbol("m")
    nest, buffers = pointwise(lambda v: v, contiguous("y", (n, m)), Buffer("x", "f32", (n, m), (1, n)))
    runner = Runner(nest, buffers)
    for rows, columns in ((1, 1), (17, 40), (64, 257), (0, 3), (130, 15)):
        x, y = randn(columns, rows).t(), torch.full((rows * columns + 64,), 7.0)
        runner({"x": x, "y": y}, {"n": rows, "m": columns})
        assert torch.equal(y[:rows * columns].view(rows, columns), x) and (y[rows * columns:] == 7).all()


def test_broadcast_of_a_bias_and_a_scalar():
    x, b, s, y = randn(20, 33), randn(33, seed=1), randn(1, seed=2).reshape(()), torch.empty(20, 33)
    run(*pointwise(lambda v, w, u: S.mul(S.add(v, w), u), buffer("y", y), buffer("x", x), buffer("b", b), buffer("s", s)), {"x": x, "b": b, "s": s, "y": y})
    assert torch.equal(y, (x + b) * s)


def test_two_stores_of_different_dtypes():
    x, y, z = randn(101), torch.empty(101), torch.empty(101, dtype=torch.bool)
    nest, buffers = pointwise(lambda v: S.tanh(v), buffer("y", y), buffer("x", x))
    phase = nest.phases[0]
    more = Store("z", phase.stores[0].index, S.gt(load(buffers["x"], phase.stores[0].index), 0))
    nest = Nest("two", nest.axes, (Phase("map", (), (), (*phase.stores, more)),))
    run(nest, {**buffers, "z": buffer("z", z)}, {"x": x, "y": y, "z": z})
    near(y, x.tanh())
    assert torch.equal(z, x > 0)


def test_an_axis_as_a_value():
    y = torch.empty(5, 21, dtype=torch.int64)
    nest, buffers = pointwise(lambda: S.add(S.mul(axis("i0"), 100), axis("i1")), buffer("y", y))
    run(nest, buffers, {"y": y})
    assert torch.equal(y, torch.arange(5)[:, None] * 100 + torch.arange(21))


def test_deep_chain_does_not_recurse():
    x, y = randn(40), torch.empty(40)
    def deep(v):
        for _ in range(3000):
            v = S.add(S.mul(v, 0.5), 0.25)
        return v
    run(*pointwise(deep, buffer("y", y), buffer("x", x)), {"x": x, "y": y})
    near(y, torch.full((40,), 0.5))


# ---------------------------------------------------------------- masks, gathers, index checks

def test_cat_with_masks_reads_nothing_outside():
    a, b, y = randn(6, 5), randn(6, 12, seed=1), torch.empty(6, 17)
    A, B, Y = buffer("a", a), buffer("b", b), buffer("y", y)
    i, j = axis("i"), axis("j")
    left = masked(A, (i, j), S.lt(j, 5), zero("f32"))
    right = masked(B, (i, S.sub(j, 5)), S.ge(j, 5), zero("f32"))
    nest = Nest("cat", (Axis("i", 6), Axis("j", 17)), (Phase("map", (), (), (Store("y", (i, j), S.where(S.lt(j, 5), left, right)),)),))
    run(nest, {"a": A, "b": B, "y": Y}, {"a": a, "b": b, "y": y})
    assert torch.equal(y, torch.cat([a, b], 1))


def test_masked_load_of_nothing_does_not_touch_memory():
    """A null pointer stands where the mask is false everywhere."""
    class Nothing:
        def data_ptr(self):
            return 0
    y = torch.empty(33)
    X, Y = contiguous("x", (33,)), buffer("y", y)
    nest = Nest("none", (Axis("i", 33),), (Phase("map", (), (), (Store("y", (axis("i"),), masked(X, (axis("i"),), S.lt(axis("i"), 0), literal(3.5, "f32"))),)),))
    run(nest, {"x": X, "y": Y}, {"x": Nothing(), "y": y})
    assert torch.equal(y, torch.full((33,), 3.5))


def test_masked_scalar_load():
    """The mask and the address do not depend on the lanes."""
    x, y = randn(4), torch.empty(6, 20)
    X, Y = buffer("x", x), buffer("y", y)
    value = masked(X, (axis("i"),), S.lt(axis("i"), 4), literal(-1.0, "f32"))
    nest = Nest("m", (Axis("i", 6), Axis("j", 20)), (Phase("map", (), (), (Store("y", (axis("i"), axis("j")), value),)),))
    run(nest, {"x": X, "y": Y}, {"x": x, "y": y})
    assert torch.equal(y, torch.cat([x, torch.tensor([-1.0, -1.0])])[:, None].expand(6, 20))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "bool", "f64"])
def test_masked_storage_types(dtype):
    x = (randn(10) > 0) if dtype == "bool" else randn(10).to({"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}[dtype])
    y = torch.empty(25, dtype=x.dtype)
    X, Y, i = buffer("x", x), buffer("y", y), axis("i")
    inside = S.and_(S.ge(i, 7), S.lt(i, 17))
    nest = Nest("pad", (Axis("i", 25),), (Phase("map", (), (), (Store("y", (i,), masked(X, (S.sub(i, 7),), inside, zero(dtype))),)),))
    run(nest, {"x": X, "y": Y}, {"x": x, "y": y})
    assert torch.equal(y, torch.cat([x.new_zeros(7), x, x.new_zeros(8)]))


def embedding(rows: int, width: int, n: int):
    W, I, Y = contiguous("w", (rows, width)), contiguous("i", (n,), "i64"), contiguous("y", (n, width))
    row = check_index(load(I, (axis("a"),)), rows)
    nest = Nest("embedding", (Axis("a", n), Axis("b", width)), (Phase("map", (), (), (Store("y", (axis("a"), axis("b")), load(W, (row, axis("b")))),)),))
    return nest, {"w": W, "i": I, "y": Y}


@pytest.mark.parametrize("width", [1, 5, 64])
def test_embedding(width):
    w, i, y = randn(50, width), torch.tensor([0, 49, -1, -50, 7] * 5), torch.empty(25, width)
    assert run(*embedding(50, width, 25), {"w": w, "i": i, "y": y}) == 0
    assert torch.equal(y, w[i])


@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("bad", [50, -51, 2**62, -2**63])
def test_index_out_of_range_is_reported(width, bad):
    w, i, y = randn(50, width), torch.tensor([1] * 24 + [bad]), torch.empty(25, width)
    assert run(*embedding(50, width, 25), {"w": w, "i": i, "y": y}) == 1


def test_index_into_nothing_is_reported():
    w, i, y = randn(0, 4), torch.tensor([0]), torch.empty(1, 4)
    assert run(*embedding(0, 4, 1), {"w": w, "i": i, "y": y}) == 1


def test_div_and_mod_of_an_axis():
    """A view folded into indices: y[i] = x[i // 7, i % 7], transposed."""
    x, y = randn(7, 30), torch.empty(210)
    X, Y, i = buffer("x", x), buffer("y", y), axis("i")
    nest = Nest("t", (Axis("i", 210),), (Phase("map", (), (), (Store("y", (i,), load(X, (S.mod(i, 7), S.floordiv(i, 7)))),)),))
    run(nest, {"x": X, "y": Y}, {"x": x, "y": y})
    assert torch.equal(y, x.t().reshape(-1))


@pytest.mark.parametrize("width", [1, 5, 40])
def test_add_with_collisions(width):
    g, i, w = randn(60, width), torch.randint(0, 9, (60,), generator=torch.Generator().manual_seed(3)), randn(9, width, seed=5)
    want = w.clone().index_add_(0, i, g)
    G, I, W = buffer("g", g), buffer("i", i), buffer("w", w)
    row = check_index(load(I, (axis("a"),)), 9)
    nest = Nest("grad", (Axis("a", 60), Axis("b", width)), (Phase("map", (), (), (Store("w", (row, axis("b")), load(G, (axis("a"), axis("b"))), "add"),)),))
    assert run(nest, {"g": G, "i": I, "w": W}, {"g": g, "i": i, "w": w}) == 0
    near(w, want)


def test_adds_of_wide_rows_run_on_threads():
    """Collisions are among rows: columns are independent, so they are vectors and slices."""
    g, i, w = randn(500, 300), torch.randint(0, 9, (500,), generator=torch.Generator().manual_seed(3)), torch.zeros(9, 300)
    G, I, W = buffer("g", g), buffer("i", i), buffer("w", w)
    row = check_index(load(I, (axis("a"),)), 9)
    nest = Nest("grad", (Axis("a", 500), Axis("b", 300)), (Phase("map", (), (), (Store("w", (row, axis("b")), load(G, (axis("a"), axis("b"))), "add"),)),))
    runner = Runner(nest, {"g": G, "i": I, "w": W})
    assert "x float>" in runner.kernel.text
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    runner({"g": g, "i": i, "w": w})
    torch.set_num_threads(before)
    near(w, torch.zeros(9, 300).index_add_(0, i, g), 1e-5)


def test_scatter_store():
    x, i, y = randn(30), torch.randperm(30, generator=torch.Generator().manual_seed(0)), torch.empty(30)
    X, I, Y = buffer("x", x), buffer("i", i), buffer("y", y)
    nest = Nest("scatter", (Axis("a", 30),), (Phase("map", (), (), (Store("y", (check_index(load(I, (axis("a"),)), 30),), load(X, (axis("a"),))),)),))
    run(nest, {"x": X, "i": I, "y": Y}, {"x": x, "i": i, "y": y})
    assert torch.equal(y[i], x)


# ---------------------------------------------------------------- reductions

def test_a_last_vector_of_columns_stores_its_own_lanes_alone():
    """It starts earlier than its first column.  A sum written over what is summed: a column that is stored twice is summed twice."""
    x = randn(50, 100)
    want, i, r, s = x * x.sum(0), axis("i"), axis("r"), axis("s")
    X = buffer("x", x)
    total = Reduce("t", "sum", load(X, (r, i)), "f32")
    phases = (Phase("reduce", (Axis("r", 50),), (total,)), Phase("map", (Axis("s", 50),), (), (Store("x", (s, i), S.mul(load(X, (s, i)), acc(total))),)))
    run(Nest("scaled", (Axis("i", 100),), phases), {"x": X}, {"x": x})
    near(x, want, 1e-5)


@pytest.mark.parametrize("shape,dims", [((33, 17), (0,)), ((33, 17), (1,)), ((33, 17), (0, 1)), ((4, 5, 6), (1,)), ((4, 5, 6), (0, 2)), ((300, 9, 7), (0, 2)),
                                        ((5000,), (0,)), ((1, 1), (0, 1)), ((3, 0), (1,)), ((3, 0), (0, 1)), ((0, 3), (0,)), ((70000,), (0,)),
                                        ((40, 100), (0,)), ((300, 1000), (0,)), ((20, 1000), (1,)), ((3, 5000), (1,)), ((3, 40, 67), (1,))])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_reductions(shape, dims, op):
    if 0 in shape and op != "sum":
        pytest.skip("torch has no such value")
    x = randn(*shape)
    want = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[op](x.double(), dims).float()
    y = torch.full(want.shape, 99.0)
    run(*reduction(op, buffer("x", x), dims), {"x": x, "y": y})
    near(y, want, 1e-5)


@pytest.mark.parametrize("op,dtype", [("sum", "i64"), ("sum", "i32"), ("prod", "i64"), ("max", "i64"), ("min", "i32"), ("max", "u8"), ("any", "bool"), ("all", "bool"),
                                      ("max", "bool"), ("prod", "f32"), ("sum", "f64"), ("prod", "f64")])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_reductions_of_other_types(op, dtype, dims):
    from firesteel.loops.scalars import DTYPES, REDUCE_OPS
    x = (randn(19, 23) * 1.5).abs().to(DTYPES[dtype]) if dtype != "bool" else randn(19, 23) > (2 if op != "all" else -2)
    if op == "prod" and dtype != "i64":
        x = 1 + randn(19, 23).to(DTYPES[dtype]) * 0.01
    want = REDUCE_OPS[op].along(x, dims)
    y = torch.zeros(want.shape, dtype=x.dtype)
    run(*reduction(op, buffer("x", x), dims), {"x": x, "y": y})
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("at", [(0, 0), (5, 20), (18, 22), (18, 3)])
def test_extremes_keep_nan(op, dims, at):
    x = randn(19, 23)
    x[at] = math.nan
    want = {"max": torch.amax, "min": torch.amin}[op](x, dims)
    y = torch.empty(want.shape)
    run(*reduction(op, buffer("x", x), dims), {"x": x, "y": y})
    torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)


def test_long_sums_are_accurate():
    x = torch.rand(3_000_000, generator=torch.Generator().manual_seed(0))
    y = torch.empty(())
    run(*reduction("sum", buffer("x", x), (0,)), {"x": x, "y": y})
    exact = x.double().sum().item()
    assert abs(y.item() - exact) <= max(2 * abs(x.sum().item() - exact), 2e-7 * exact)


def test_long_column_sums_are_accurate():
    x = torch.rand(200_000, 8, generator=torch.Generator().manual_seed(0))
    y = torch.empty(8)
    run(*reduction("sum", buffer("x", x), (0,)), {"x": x, "y": y})
    torch.testing.assert_close(y.double(), x.double().sum(0), rtol=3e-7, atol=0)


def test_argmax_as_two_reductions():
    x = torch.randint(0, 6, (40, 37), generator=torch.Generator().manual_seed(0)).float()
    y = torch.empty(40, dtype=torch.int64)
    X, Y = buffer("x", x), buffer("y", y)
    top = Reduce("top", "max", load(X, (axis("i"), axis("a"))), "f32")
    here = S.where(S.eq(load(X, (axis("i"), axis("b"))), acc(top)), axis("b"), literal(2**62, "i64"))
    first = Reduce("first", "min", here, "i64")
    nest = Nest("argmax", (Axis("i", 40),), (Phase("reduce", (Axis("a", 37),), (top,)), Phase("reduce", (Axis("b", 37),), (first,)),
                                            Phase("map", (), (), (Store("y", (axis("i"),), acc(first)),))))
    run(nest, {"x": X, "y": Y}, {"x": x, "y": y})
    assert torch.equal(y, x.argmax(1))


@pytest.mark.parametrize("n,m", [(1, 1), (3, 5), (40, 100), (33, 1000), (7, 1024), (2, 5000)])
def test_softmax_and_layernorm(n, m):
    x, g, y = randn(n, m), randn(m, seed=1), torch.empty(n, m)
    run(*softmax(n, m), {"x": x, "y": y})
    near(y, torch.softmax(x, 1), 1e-6)
    run(*layernorm(n, m), {"x": x, "g": g, "y": y})
    near(y, torch.nn.functional.layer_norm(x, (m,), g), 1e-5)


def test_two_accumulators_in_one_sweep():
    x, y, z = randn(9, 130), torch.empty(9), torch.empty(9)
    X = buffer("x", x)
    v = load(X, (axis("i"), axis("r")))
    a, b = Reduce("a", "sum", v, "f32"), Reduce("b", "max", S.abs(v), "f32")
    stores = (Store("y", (axis("i"),), acc(a)), Store("z", (axis("i"),), S.add(acc(a), acc(b))))
    nest = Nest("two", (Axis("i", 9),), (Phase("reduce", (Axis("r", 130),), (a, b)), Phase("map", (), (), stores)))
    run(nest, {"x": X, "y": buffer("y", y), "z": buffer("z", z)}, {"x": x, "y": y, "z": z})
    near(y, x.sum(1), 1e-5)
    near(z, x.sum(1) + x.abs().amax(1), 1e-5)


def test_full_reduction_then_use():
    """No parallel axis: y = x / sum(x) runs phase by phase."""
    x, y = torch.rand(5000, generator=torch.Generator().manual_seed(0)), torch.empty(5000)
    X, Y = buffer("x", x), buffer("y", y)
    total = Reduce("t", "sum", load(X, (axis("r"),)), "f32")
    nest = Nest("norm", (), (Phase("reduce", (Axis("r", 5000),), (total,)), Phase("map", (Axis("k", 5000),), (), (Store("y", (axis("k"),), S.div(load(X, (axis("k"),)), acc(total))),))))
    run(nest, {"x": X, "y": Y}, {"x": x, "y": y})
    near(y, x / x.sum())


def test_a_phase_reads_what_an_earlier_one_stored():
    x, y, z = randn(12, 50), torch.empty(12, 50), torch.empty(12)
    X, Y, Z = buffer("x", x), buffer("y", y), buffer("z", z)
    store = Phase("map", (Axis("a", 50),), (), (Store("y", (axis("i"), axis("a")), S.mul(load(X, (axis("i"), axis("a"))), 2.0)),))
    total = Reduce("t", "sum", load(Y, (axis("i"), axis("b"))), "f32")
    nest = Nest("reread", (Axis("i", 12),), (store, Phase("reduce", (Axis("b", 50),), (total,)), Phase("map", (), (), (Store("z", (axis("i"),), acc(total)),))))
    run(nest, {"x": X, "y": Y, "z": Z}, {"x": x, "y": y, "z": z})
    near(z, (x * 2).sum(1), 1e-5)


@pytest.mark.parametrize("points,known", [(3, True), (3, False), (16, False)])
def test_a_sweep_over_nothing_holds_up_no_other_phase(points, known):
    """Those before it store, and those behind it read their accumulators.  It loads nothing itself, also at a place that is the same for all of it."""
    n, m, i, k = symbol("s0"), 0 if known else symbol("s1"), axis("i"), axis("k")
    X, V, Y, Z, W = contiguous("x", (points, n)), contiguous("v", (m,)), contiguous("y", (points, m)), contiguous("z", (points,)), contiguous("w", (points,))
    total = Reduce("t", "sum", load(X, (i, axis("r"))), "f32")
    twice = Reduce("u", "max", S.mul(acc(total), 2.0), "f32")
    phases = (Phase("reduce", (Axis("r", n),), (total,)), Phase("reduce", (), (twice,), (Store("z", (i,), acc(total)),)),
              Phase("map", (Axis("k", m),), (), (Store("y", (i, k), S.add(S.add(load(V, (k,)), load(V, (m - 1,))), acc(twice))),)),
              Phase("map", (), (), (Store("w", (i,), acc(twice)),)))
    r = Runner(Nest("n", (Axis("i", points),), phases), {b.name: b for b in (X, V, Y, Z, W)})
    for size in (0,) if known else (0, 1, 63, 64, 1023, 1024, 1025, 2048):
        x, v, y, z, w = randn(points, 70), randn(size), torch.full((points, size), 99.0), torch.full((points,), 99.0), torch.full((points,), 99.0)
        assert r({"x": x, "v": v, "y": y, "z": z, "w": w}, {"s0": 70, "s1": size}) == 0
        near(z, x.sum(1), 1e-5)
        near(w, 2 * x.sum(1), 1e-5)
        near(y, v + v[-1:] + 2 * x.sum(1, keepdim=True), 1e-5)


# ---------------------------------------------------------------- scans

@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("op", ["sum", "max", "prod"])
def test_scan(dim, op):
    x = 1 + randn(30, 41) * 0.1
    y = torch.empty_like(x)
    X, Y = buffer("x", x), buffer("y", y)
    other = axis("i")
    index = (other, axis("r")) if dim == 1 else (axis("r"), other)
    running = Reduce("s", op, load(X, index), "f32")
    nest = Nest("scan", (Axis("i", x.shape[1 - dim]),), (Phase("scan", (Axis("r", x.shape[dim]),), (running,), (Store("y", index, acc(running)),)),))
    run(nest, {"x": X, "y": Y}, {"x": x, "y": y})
    near(y, {"sum": torch.cumsum, "max": lambda x, d: torch.cummax(x, d).values, "prod": torch.cumprod}[op](x, dim), 1e-5)


def test_scan_without_parallel_axes():
    x, y = randn(1000), torch.empty(1000)
    X, Y = buffer("x", x), buffer("y", y)
    running = Reduce("s", "sum", load(X, (axis("r"),)), "f32")
    nest = Nest("scan", (), (Phase("scan", (Axis("r", 1000),), (running,), (Store("y", (axis("r"),), acc(running)),)),))
    run(nest, {"x": X, "y": Y}, {"x": x, "y": y})
    near(y, x.cumsum(0), 1e-4)


# ---------------------------------------------------------------- symbols

def test_symbolic_sizes_and_zero():
    n, m = symbol("s0"), symbol("s1")
    r = Runner(*softmax(n, m))
    assert set(r.kernel.symbols) == {"s0", "s1"}
    for shape in [(5, 9), (1, 1), (33, 64), (0, 4), (4, 0), (100, 1000)]:
        x, y = randn(*shape), torch.empty(shape)
        assert r({"x": x, "y": y}, {"s0": shape[0], "s1": shape[1]}) == 0
        near(y, torch.softmax(x, 1), 1e-6)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_symbolic_reductions(dims):
    r = Runner(*reduction("sum", contiguous("x", (symbol("s0"), symbol("s1"))), dims))
    for shape in [(5, 9), (1, 1), (300, 64), (0, 4), (4, 0), (2000, 37)]:
        x = randn(*shape)
        want = x.double().sum(dims).float()
        y = torch.full(want.shape, 5.0)
        r({"x": x, "y": y}, {"s0": shape[0], "s1": shape[1]})
        near(y, want, 3e-5)


def test_symbolic_contiguous_pointwise_is_one_loop():
    n, m = symbol("s0"), symbol("s1")
    r = Runner(*pointwise(lambda v: S.mul(v, 3.0), contiguous("y", (n, m)), contiguous("x", (n, m))))
    assert r.kernel.text.count("loop") // 3 <= 3 and "urem" not in r.kernel.text
    for shape in [(5, 9), (0, 3), (200, 333)]:
        x, y = randn(*shape), torch.empty(shape)
        r({"x": x, "y": y}, {"s0": shape[0], "s1": shape[1]})
        assert torch.equal(y, x * 3.0)


def test_symbolic_strides():
    x, y = randn(20, 60)[:, ::3], torch.empty(20, 20)
    X = Buffer("x", "f32", (20, 20), (symbol("s0"), symbol("s1")))
    r = Runner(*pointwise(lambda v: S.mul(v, 3.0), buffer("y", y), X))
    r({"x": x, "y": y}, {"s0": 60, "s1": 3})
    assert torch.equal(y, x * 3.0)


def test_a_float_symbol_and_a_size_as_value():
    x, y = randn(30), torch.empty(30)
    f, n = symbol("f0", "f64"), symbol("s0")
    r = Runner(*pointwise(lambda v: S.add(S.mul(v, to(f, "f32")), to(n, "f32")), contiguous("y", (n,)), contiguous("x", (n,))))
    r({"x": x, "y": y}, {"f0": 0.75, "s0": 30})
    near(y, x * 0.75 + 30)


def test_a_size_in_f64_does_not_narrow_the_lanes():
    n = symbol("s0")
    nest, buffers = pointwise(lambda v: S.mul(v, to(S.recip(to(n, "f64")), "f32")), contiguous("y", (n,)), contiguous("x", (n,)))
    assert f"<{this_machine().lanes(4)} x float>" in print_nest(nest, buffers).text
    x, y = randn(30), torch.empty(30)
    run(nest, buffers, {"x": x, "y": y}, {"s0": 30})
    near(y, x / 30)


def test_a_hoisted_load_is_not_made_for_an_empty_loop():
    """y[i] = sum over r < n of x[i] * w[r]: with n = 0 and x nothing at all, x must not be read."""
    class Nothing:
        def data_ptr(self):
            return 0
    n, y = symbol("s0"), torch.full((4,), 9.0)
    X, W = contiguous("x", (4,)), contiguous("w", (n,))
    total = Reduce("t", "sum", S.mul(load(X, (axis("i"),)), load(W, (axis("r"),))), "f32")
    nest = Nest("dot", (Axis("i", 4),), (Phase("reduce", (Axis("r", n),), (total,)), Phase("map", (), (), (Store("y", (axis("i"),), acc(total)),))))
    run(nest, {"x": X, "w": W, "y": buffer("y", y)}, {"x": Nothing(), "w": Nothing(), "y": y}, {"s0": 0})
    assert torch.equal(y, torch.zeros(4))


# ---------------------------------------------------------------- text and threads

def test_equal_nests_give_one_kernel():
    x = contiguous("x", (64, 32))
    a, _ = reduction("sum", x, (1,))
    def renamed(e):
        return make(e.op, e.dtype, tuple(renamed(p) for p in e.args), f"other_{e.attr}" if e.op in ("axis", "load", "acc") else e.attr)
    phases = tuple(Phase(p.kind, tuple(Axis("other_" + q.name, q.extent) for q in p.axes), tuple(Reduce("other_" + q.name, q.op, renamed(q.value), q.dtype) for q in p.reduces),
                         tuple(Store("other_" + q.buffer, tuple(renamed(e) for e in q.index), renamed(q.value)) for q in p.stores)) for p in a.phases)
    b = Nest("b", tuple(Axis("other_" + q.name, q.extent) for q in a.axes), phases)
    names = {"x": x, "y": contiguous("y", (64,))}
    others = {"other_" + k: Buffer("other_" + k, v.dtype, v.shape, v.strides) for k, v in names.items()}
    first, second = print_nest(a, names), print_nest(b, others)
    assert first.text == second.text and first.symbol == second.symbol and first.buffers == ("x", "y") and second.buffers == ("other_x", "other_y")


def test_invariants_stand_outside_of_loops():
    """The scale of layernorm does not depend on the column: its square root is taken once a row."""
    text = print_nest(*layernorm(64, 512)).text
    assert text.count("llvm.sqrt") == 2 and "llvm.sqrt.f32" in text       # one call, one declaration, scalar


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


CASES = {
    "softmax": lambda: softmax(700, 300),
    "chain": lambda: pointwise(lambda v: S.tanh(S.exp(v)), contiguous("y", (700, 300)), contiguous("x", (700, 300))),
    "columns": lambda: reduction("sum", contiguous("x", (700, 300)), (0,)),
    "rows": lambda: reduction("sum", contiguous("x", (700, 300)), (1,)),
}


@pytest.mark.parametrize("name", CASES)
def test_threads_do_not_change_results(name, two_threads):
    r = Runner(*CASES[name]())
    x = randn(700, 300)
    shape = {"columns": (300,), "rows": (700,)}.get(name, (700, 300))
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        y = torch.empty(shape)
        r({"x": x, "y": y})
        results.append(y)
    assert torch.equal(*results)


def test_full_sum_depends_on_the_number_of_threads_only(two_threads):
    r = Runner(*reduction("sum", contiguous("x", (1000, 1000)), (0, 1)))
    x = randn(1000, 1000)
    def total():
        y = torch.empty(())
        r({"x": x, "y": y})
        return y.item()
    assert total() == total()
    torch.set_num_threads(1)
    one = total()
    assert one == total() and abs(one - x.double().sum().item()) < 1e-2


def test_there_is_an_openmp_library():
    assert threads.openmp(), "torch's OpenMP library was not found: kernels would run on one thread"


def test_kernels_inside_of_a_thread_of_python():
    import concurrent.futures
    r = Runner(*softmax(300, 200))
    x = randn(300, 200)
    def work(_):
        y = torch.empty(300, 200)
        r({"x": x, "y": y})
        return y
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(work, range(6)))
    for y in results:
        near(y, torch.softmax(x, 1), 1e-6)
