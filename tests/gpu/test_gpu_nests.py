"""The nests of tests/codegen/test_llvm_nests.py as GPU kernels: emulated without a GPU, on it where there is one."""
from __future__ import annotations

import gpu_nests
import pytest
import test_llvm_nests as llvm_nests
import torch
from native_nests import buffer, contiguous, layernorm, pointwise, reduction, softmax

# what does not ask how the CPU does it: no null pointers, threads or LLVM text
from test_llvm_nests import (  # noqa: F401
    test_a_float_symbol_and_a_size_as_value,
    test_a_phase_reads_what_an_earlier_one_stored,
    test_a_sweep_over_nothing_holds_up_no_other_phase,
    test_add_with_collisions,
    test_an_axis_as_a_value,
    test_argmax_as_two_reductions,
    test_broadcast_of_a_bias_and_a_scalar,
    test_cat_with_masks_reads_nothing_outside,
    test_deep_chain_does_not_recurse,
    test_div_and_mod_of_an_axis,
    test_embedding,
    test_extremes_keep_nan,
    test_full_reduction_then_use,
    test_index_into_nothing_is_reported,
    test_index_out_of_range_is_reported,
    test_long_column_sums_are_accurate,
    test_long_sums_are_accurate,
    test_masked_scalar_load,
    test_masked_storage_types,
    test_pointwise_shapes,
    test_reductions,
    test_reductions_of_other_types,
    test_scan,
    test_scan_without_parallel_axes,
    test_scatter_store,
    test_softmax_and_layernorm,
    test_strided_inputs_and_outputs,
    test_symbolic_reductions,
    test_symbolic_sizes_and_zero,
    test_symbolic_strides,
    test_two_accumulators_in_one_sweep,
    test_two_stores_of_different_dtypes,
)

from firesteel.codegen.flat import flatten
from firesteel.codegen.triton import choose, print_nest
from firesteel.errors import InternalError
from firesteel.loops.ir import Axis, Nest, Phase, Reduce, Store, acc, axis, load
from firesteel.loops.scalars import DTYPES, REDUCE_OPS, SHORT, S, to
from firesteel.sym.expr import const, symbol


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch):
    monkeypatch.setattr(llvm_nests, "run", gpu_nests.run)
    monkeypatch.setattr(llvm_nests, "Runner", gpu_nests.Runner)


def tiling(nest_and_buffers):
    return choose(flatten(*nest_and_buffers)[0])


# ---------------------------------------------------------------- how nests become tiles

def test_a_short_row_is_read_once():
    text = print_nest(*softmax(1000, 512)).text
    assert text.count("tl.load") == 1 and "for " not in text


def test_a_long_row_is_swept():
    text = print_nest(*softmax(1000, 50_000)).text
    assert text.count("for start in range") == 3


def test_a_row_that_fits_registers_is_not_swept_again():
    assert print_nest(*softmax(1000, 8192)).text.count("tl.load") == 1


def test_a_value_stored_for_a_row_stays_in_registers():
    """The second phase reads what the first one stored, which others read too: no load, no barrier."""
    n, m = 30, 70
    x, y, z = llvm_nests.randn(n, m), torch.empty(n, m), torch.empty(n, m)
    X, Y, Z, i = buffer("x", x), buffer("y", y), buffer("z", z), axis("i")
    total = Reduce("t", "sum", S.exp(load(X, (i, axis("a")))), "f32")
    phases = (Phase("reduce", (Axis("a", m),), (total,), (Store("y", (i, axis("a")), S.exp(load(X, (i, axis("a"))))),)),
              Phase("map", (Axis("b", m),), (), (Store("z", (i, axis("b")), S.div(load(Y, (i, axis("b"))), acc(total))),)))
    nest, buffers = Nest("n", (Axis("i", n),), phases), {"x": X, "y": Y, "z": Z}
    text = print_nest(nest, buffers).text
    assert text.count("tl.load") == 1 and "barrier" not in text
    assert gpu_nests.run(nest, buffers, {"x": x, "y": y, "z": z}) == 0
    llvm_nests.near(y, x.exp(), 1e-5)
    llvm_nests.near(z, x.softmax(1), 1e-5)


def test_a_row_divided_by_one_number_has_the_bits_of_a_division():
    numbers = [0.0, -0.0, 1.0, -3.0, float("inf"), float("-inf"), float("nan"), 1e-45, 1e-40, -1e-20, 1e20, 3e38, 2.0**-64, 2.0**64]
    wide = llvm_nests.randn(9, 60) * torch.exp(10 * llvm_nests.randn(9, 60))
    b = torch.tensor([*numbers, *wide[:, 0]])
    x = torch.cat([torch.tensor([0.0, -0.0, 1.0, float("inf"), float("nan"), 3e38]).expand(len(b), -1), wide.flatten().expand(len(b), -1)], 1).contiguous()
    X, B, Y = buffer("x", x), buffer("b", b), buffer("y", y := torch.empty_like(x))
    store = Store("y", (axis("i"), axis("r")), S.div(load(X, (axis("i"), axis("r"))), load(B, (axis("i"),))))
    nest, buffers = Nest("n", (Axis("i", len(b)),), (Phase("map", (Axis("r", x.shape[1]),), (), (store,)),)), {"x": X, "b": B, "y": Y}
    assert "div_rn" in print_nest(nest, buffers).text and "fs_div" in print_nest(nest, buffers).text
    assert gpu_nests.run(nest, buffers, {"x": x, "b": b, "y": y}) == 0
    want = x / b[:, None]
    assert torch.equal(y.nan_to_num(7.0), want.nan_to_num(7.0)) and torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.signbit() & ~y.isnan(), want.signbit() & ~want.isnan())


def test_reciprocals_are_as_near_as_divisions():
    x = torch.cat([torch.tensor([1.0, -1.0, float("inf"), float("nan"), 1e30, 1e-30, 1.7e38]), llvm_nests.randn(500)])
    nest, buffers = pointwise(lambda v: S.recip(v), contiguous("y", x.shape), contiguous("x", x.shape))
    y = torch.empty_like(x)
    assert gpu_nests.run(nest, buffers, {"x": x, "y": y}) == 0
    near = torch.isclose(y, 1 / x, rtol=1.2e-7, atol=1e-45, equal_nan=True)
    assert near.all(), x[~near]


def test_an_axis_that_is_one_for_a_whole_tile_is_a_scalar():
    """A weight for each channel of images: one load for a tile of one channel."""
    X, W, Y = contiguous("x", (2, 3, 4096)), contiguous("w", (3,)), contiguous("y", (2, 3, 4096))
    at = (axis("n"), axis("c"), axis("i"))
    store = Store("y", at, S.mul(load(X, at), load(W, (axis("c"),))))
    nest, buffers = Nest("n", tuple(Axis(n, e) for n, e in zip("nci", X.shape)), (Phase("map", (), (), (store,)),)), {"x": X, "w": W, "y": Y}
    text = print_nest(nest, buffers).text
    assert "p0 + (x)" in text and "// 4096) % 3" in text and "x //" not in text
    x, w, y = llvm_nests.randn(2, 3, 4096), llvm_nests.randn(3), torch.empty(2, 3, 4096)
    assert gpu_nests.run(nest, buffers, {"x": x, "w": w, "y": y}) == 0
    assert torch.equal(y, x * w[:, None])


def test_a_sweep_over_nothing_loads_nothing():
    """Not even what lies at one place for all of it: that place may not exist."""
    X, Y, Z = contiguous("x", (1,)), contiguous("y", (3, 0)), contiguous("z", (3,))
    beyond = load(X, (const(1),))
    total = Reduce("t", "sum", beyond, "f32")
    phases = (Phase("reduce", (Axis("r", 0),), (total,), (Store("y", (axis("i"), axis("r")), beyond),)), Phase("map", (), (), (Store("z", (axis("i"),), acc(total)),)))
    nest, buffers = Nest("n", (Axis("i", 3),), phases), {"x": X, "y": Y, "z": Z}
    assert "tl.load" not in print_nest(nest, buffers).text
    x, y, z = torch.ones(1), torch.empty(3, 0), torch.ones(3)
    assert gpu_nests.run(nest, buffers, {"x": x, "y": y, "z": z}) == 0 and torch.equal(z, torch.zeros(3))


def test_few_points_and_long_sweeps_are_split():
    kernel = print_nest(*reduction("sum", contiguous("x", (1000, 1000)), (0, 1)))
    assert len(kernel.passes) == 2 and kernel.passes[0].programs >= 100 and kernel.scratch == (("f32", kernel.passes[0].programs),)
    assert tiling(softmax(100_000, 512)).split is False


def test_columns_are_read_side_by_side():
    assert tiling(reduction("sum", contiguous("x", (4096, 4096)), (0,))).points >= 16
    assert tiling(reduction("sum", contiguous("x", (4096, 4096)), (1,))).points == 1
    # numbers for each row have no say: there are few of them
    X, M, R, Y = contiguous("x", (16384, 768)), contiguous("m", (16384,)), contiguous("s", (16384,)), contiguous("y", (768,))
    value = S.mul(S.sub(load(X, (axis("r"), axis("i"))), load(M, (axis("r"),))), load(R, (axis("r"),)))
    phases = (Phase("reduce", (Axis("r", 16384),), (total := Reduce("t", "sum", value, "f32"),)), Phase("map", (), (), (Store("y", (axis("i"),), acc(total)),)))
    assert tiling((Nest("n", (Axis("i", 768),), phases), {"x": X, "m": M, "s": R, "y": Y})).points >= 16


def test_small_addresses_are_int32_and_large_ones_int64():
    small = print_nest(*pointwise(lambda v: S.exp(v), contiguous("y", (1000,)), contiguous("x", (1000,)))).text
    large = print_nest(*pointwise(lambda v: S.exp(v), contiguous("y", (3, 2**30)), contiguous("x", (3, 2**30)))).text
    unknown = print_nest(*pointwise(lambda v: S.exp(v), contiguous("y", (symbol("s0"),)), contiguous("x", (symbol("s0"),)))).text
    assert "int64" not in small and "program_id(0).to(tl.int64)" in large and "program_id(0).to(tl.int64)" in unknown


def test_equal_nests_give_one_kernel():
    first = print_nest(*reduction("sum", contiguous("x", (64, 32)), (1,)))
    nest, buffers = reduction("sum", contiguous("x", (64, 32)), (1,))
    second = print_nest(Nest("other", nest.axes, nest.phases), buffers)
    assert first.symbol == second.symbol and second.name == "other"


def test_kernels_are_titled_by_their_operators():
    nest, buffers = softmax(8, 8)
    titled = Nest(nest.name, nest.axes, nest.phases, ("to_copy_3", "softmax", "mean_1", "mean_2", "rsqrt_12"))
    first, second = print_nest(nest, buffers), print_nest(titled, buffers)
    assert first.symbol == second.symbol and second.title == "softmax_mean_rsqrt" and first.title


def test_kernels_of_other_types_have_other_names():
    """Their texts are equal: Triton takes the types from the signature."""
    kernels = [print_nest(*pointwise(lambda v: S.add(v, v), contiguous("y", (64,), d), contiguous("x", (64,), d))) for d in ("f64", "i64", "i32")]
    assert len({k.symbol for k in kernels}) == 3 and len({k.text.replace(k.symbol, "") for k in kernels}) < 3


def test_adding_to_small_elements_is_refused():
    X, Y = contiguous("x", (8,), "i8"), contiguous("y", (4,), "i8")
    nest = Nest("n", (Axis("i", 8),), (Phase("map", (), (), (Store("y", (S.mod(axis("i"), 4),), load(X, (axis("i"),)), "add"),)),))
    with pytest.raises(InternalError, match="cannot add"):
        print_nest(nest, {"x": X, "y": Y})


# ---------------------------------------------------------------- split nests

@pytest.mark.parametrize("shape,dims", [((8, 16, 2000), (0, 2)), ((20_000, 3), (0,)), ((3, 20_000), (1,)), ((50, 1000), (0, 1)), ((2, 3, 9000), (2,))])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_split_reductions(shape, dims, op):
    x = llvm_nests.randn(*shape)
    want = {"sum": torch.sum, "max": torch.amax}[op](x.double(), dims).float()
    y = torch.full(want.shape, 99.0)
    nest = reduction(op, buffer("x", x), dims)
    assert len(print_nest(*nest).passes) == 2
    assert gpu_nests.run(*nest, {"x": x, "y": y}) == 0
    llvm_nests.near(y, want, 3e-5)


@pytest.mark.parametrize("channels", [3, 16])
def test_batch_norm_of_few_channels(channels):
    """Mean, variance, statistics kept, normalised: five phases, a function for each sweep."""
    n, hw = 6, 1700
    x, y = llvm_nests.randn(n, channels, hw), torch.empty(n, channels, hw)
    mean, var = torch.empty(channels), torch.empty(channels)
    X, Y, c = buffer("x", x), buffer("y", y), axis("c")
    total = Reduce("t", "sum", load(X, (axis("a"), c, axis("b"))), "f32")
    middle = S.mul(acc(total), 1 / (n * hw))
    away = S.sub(load(X, (axis("d"), c, axis("e"))), middle)
    square = Reduce("q", "sum", S.mul(away, away), "f32")
    spread = S.mul(acc(square), 1 / (n * hw))
    value = S.mul(S.sub(load(X, (axis("g"), c, axis("h"))), middle), S.rsqrt(S.add(spread, 1e-5)))
    phases = (Phase("reduce", (Axis("a", n), Axis("b", hw)), (total,)), Phase("map", (), (), (Store("mean", (c,), middle),)),
              Phase("reduce", (Axis("d", n), Axis("e", hw)), (square,)), Phase("map", (), (), (Store("var", (c,), spread),)),
              Phase("map", (Axis("g", n), Axis("h", hw)), (), (Store("y", (axis("g"), c, axis("h")), value),)))
    buffers = {"x": X, "y": Y, "mean": buffer("mean", mean), "var": buffer("var", var)}
    nest = Nest("bn", (Axis("c", channels),), phases)
    assert len(print_nest(nest, buffers).passes) == 3
    gpu_nests.run(nest, buffers, {"x": x, "y": y, "mean": mean, "var": var})
    llvm_nests.near(mean, x.mean((0, 2)), 1e-5)
    llvm_nests.near(var, x.var((0, 2), unbiased=False), 1e-5)
    llvm_nests.near(y, torch.nn.functional.batch_norm(x, None, None, training=True), 1e-5)


def variance(shape, sweep, dtype="f32", scaled=False):
    """Mean and sum of squared distances along one dimension, in two sweeps."""
    X, kept = contiguous("x", shape, dtype=dtype), 1 - sweep
    n = shape[sweep]

    def element(name):
        index = (axis(name), axis("i")) if sweep == 0 else (axis("i"), axis(name))
        return to(load(X, index), "f32")
    mean = Reduce("m", "sum", S.mul(element("a"), 1 / n), "f32")
    size = Reduce("z", "sum", S.mul(S.abs(element("a")), 1 / n), "f32")
    away = S.sub(element("b"), acc(mean))
    if scaled:
        away = S.mul(away, S.where(S.ge(acc(size), 8.0), const(0.5, "f32"), 2.0))
    off, square = Reduce("o", "sum", away, "f32"), Reduce("q", "sum", S.mul(away, away), "f32")
    stores = tuple(Store(name, (axis("i"),), value) for name, value in (("mean", acc(mean)), ("off", acc(off)), ("square", acc(square))))
    buffers = {"x": X, **{name: contiguous(name, (shape[kept],)) for name in ("mean", "off", "square")}}
    phases = (Phase("reduce", (Axis("a", n),), (mean, size)), Phase("reduce", (Axis("b", n),), (off, square)), Phase("map", (), (), stores))
    return Nest("variance", (Axis("i", shape[kept]),), phases), buffers


@pytest.mark.parametrize("shape,sweep,passes", [((2000, 24), 0, 2), ((5001, 70), 0, 2), ((3, 40_000), 1, 2), ((300, 20_000), 1, 1)])
@pytest.mark.parametrize("dtype,scaled", [("f32", False), ("f32", True), ("bf16", False)])
def test_a_variance_is_swept_once(shape, sweep, passes, dtype, scaled):
    nest, buffers = variance(shape, sweep, dtype, scaled)
    runner = gpu_nests.Runner(nest, buffers)
    assert len(runner.kernel.passes) == passes and runner.kernel.text.count("for start in") == 1
    x = llvm_nests.randn(*shape) * 3 + 50
    x[(slice(0, 1), slice(None)) if sweep == 0 else (slice(None), slice(0, 1))] = 0       # far from the others, and a sample
    x = x.to(DTYPES[dtype])
    mean, off, square = (torch.empty(shape[1 - sweep]) for _ in range(3))
    assert runner({"x": x, "mean": mean, "off": off, "square": square}) == 0
    exact = x.double()
    want = (exact - exact.mean(sweep, keepdim=True)).square().sum(sweep)
    factor = 0.5 if scaled else 1.0
    llvm_nests.near(mean, exact.mean(sweep).float(), 1e-5)
    torch.testing.assert_close(square, (want * factor**2).float(), rtol=1e-5, atol=0)
    assert (off.abs() <= 1e-5 * 50 * shape[sweep] * factor).all()


def test_many_sums_of_wide_columns_are_swept_by_small_programs():
    """Those that were measured to be quickest."""
    found = {dtype: [(one.programs, one.warps) for one in print_nest(*variance(shape, 0, dtype)).passes][0]
             for shape, dtype in (((65536, 512), "f32"), ((16384, 256), "bf16"))}
    assert found == {"f32": (1024, 4), "bf16": (512, 8)}


def test_a_sweep_that_stays_in_registers_is_left_as_it_is():
    nest, buffers = variance((300, 2000), 1)
    assert "for start in" not in print_nest(nest, buffers).text


def test_distances_that_are_gathered_or_cubed_are_swept_again():
    nest, buffers = variance((2000, 24), 0)
    off, square = nest.phases[1].reduces
    cube = Reduce("q", "sum", S.mul(square.value, off.value), "f32")
    changed = Nest(nest.name, nest.axes, (nest.phases[0], Phase("reduce", nest.phases[1].axes, (off, cube)), nest.phases[2]))
    assert print_nest(changed, buffers).text.count("for start in") == 2


def test_a_split_nest_of_unknown_length():
    s = symbol("s0")
    runner = gpu_nests.Runner(*reduction("sum", contiguous("x", (s, 10)), (0,)))
    assert len(runner.kernel.passes) == 2
    for n in (0, 1, 5, 4097, 30_000):
        x, y = llvm_nests.randn(n, 10), torch.full((10,), 7.0)
        runner({"x": x, "y": y}, {"s0": n})
        llvm_nests.near(y, x.double().sum(0).float(), 1e-4)


# ---------------------------------------------------------------- storage types

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_computed_in_float(dtype):
    x, y = llvm_nests.randn(70, 300).to(dtype), torch.empty(70, 300, dtype=dtype)
    short = "bf16" if dtype is torch.bfloat16 else "f16"
    nest = pointwise(lambda v: to(S.exp(S.mul(to(v, "f32"), 0.5)), short), buffer("y", y), buffer("x", x))
    gpu_nests.run(*nest, {"x": x, "y": y})
    torch.testing.assert_close(y, (x.float() * 0.5).exp().to(dtype), rtol=1e-2, atol=0)
    assert (y != (x.float() * 0.5).exp().to(dtype)).float().mean() < 0.01


def test_layernorm_of_many_rows():
    x, g, y = llvm_nests.randn(700, 300), llvm_nests.randn(300, seed=1), torch.empty(700, 300)
    gpu_nests.run(*layernorm(700, 300), {"x": x, "g": g, "y": y})
    llvm_nests.near(y, torch.nn.functional.layer_norm(x, (300,), g), 1e-5)


@pytest.mark.parametrize("length", [100, 5000])
@pytest.mark.parametrize("op,dtype", [("sum", torch.int64), ("max", torch.uint8), ("sum", torch.int8)])
def test_scans_of_integers(op, dtype, length):
    x = torch.randint(0, 5, (3, length), generator=torch.Generator().manual_seed(0)).to(dtype)
    y = torch.zeros_like(x)
    X, index = buffer("x", x), (axis("i"), axis("r"))
    running = Reduce("s", op, load(X, index), SHORT[dtype])
    nest = Nest("scan", (Axis("i", 3),), (Phase("scan", (Axis("r", length),), (running,), (Store("y", index, acc(running)),)),))
    gpu_nests.run(nest, {"x": X, "y": buffer("y", y)}, {"x": x, "y": y})
    assert torch.equal(y, REDUCE_OPS[op].running(x, 1))


def test_a_loop_behind_a_sweep_of_one_tile():
    x, y, z = llvm_nests.randn(600, 300), torch.empty(600, 300), torch.empty(600, 5000)
    X, Y = buffer("x", x), buffer("y", y)
    total = Reduce("s", "sum", load(X, (axis("i"), axis("r"))), "f32")
    phases = (Phase("reduce", (Axis("r", 300),), (total,)),
              Phase("map", (Axis("k", 300),), (), (Store("y", (axis("i"), axis("k")), S.mul(load(X, (axis("i"), axis("k"))), acc(total))),)),
              Phase("map", (Axis("m", 5000),), (), (Store("z", (axis("i"), axis("m")), acc(total)),)))
    gpu_nests.run(Nest("rows", (Axis("i", 600),), phases), {"x": X, "y": Y, "z": buffer("z", z)}, {"x": x, "y": y, "z": z})
    llvm_nests.near(y, x * x.sum(1, keepdim=True), 1e-4)
    llvm_nests.near(z, x.sum(1, keepdim=True).expand(600, 5000), 1e-4)
