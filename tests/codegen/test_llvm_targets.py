"""The same nests printed for machines with shorter vectors, without masks, without a vector library: results do not change."""
from __future__ import annotations

import dataclasses

import native_nests
import pytest
import test_llvm_nests
import test_llvm_ops
import test_llvm_strided
import torch
from native_nests import buffer, pointwise, run

from firesteel.codegen.target import this_machine
from firesteel.loops.scalars import S

TARGETS = {
    "AVX2": {"vector_bytes": 32, "masks": False, "variant": "d"},
    "no vector library": {"vector_math": frozenset()},
    "16 bytes": {"vector_bytes": 16, "masks": False, "variant": "b", "vector_math": frozenset(), "fma": False},
}


@pytest.fixture(params=TARGETS, autouse=True)
def machine(request, monkeypatch):
    if this_machine().vector_bytes < 64:
        pytest.skip("this machine cannot run what is printed for others")
    monkeypatch.setattr(native_nests.Runner, "target", dataclasses.replace(this_machine(), **TARGETS[request.param]))


@pytest.mark.parametrize("shape", [(17,), (1000,), (3, 5), (64, 64)])
def test_pointwise(shape):
    test_llvm_nests.test_pointwise_shapes(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_turned_rows(dtype):
    for shape in ((33, 300), (5, 9, 70)):
        test_llvm_nests.test_rows_of_another_axis_are_turned(shape, dtype)
    test_llvm_nests.test_turned_rows_of_symbolic_sizes_stay_inside()


@pytest.mark.parametrize("name", test_llvm_strided.READ)
def test_lanes_a_few_elements_apart(name):
    for dtype in ("f32", "u8"):
        test_llvm_strided.check(name, dtype)


@pytest.mark.parametrize("shape,dims", [((33, 17), (0,)), ((33, 17), (1,)), ((33, 17), (0, 1)), ((300, 9, 7), (0, 2)), ((5000,), (0,)), ((70000,), (0,))])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_reductions(shape, dims, op):
    test_llvm_nests.test_reductions(shape, dims, op)


@pytest.mark.parametrize("n,m", [(3, 5), (40, 100), (7, 1024)])
def test_softmax_and_layernorm(n, m):
    test_llvm_nests.test_softmax_and_layernorm(n, m)


def test_symbolic():
    test_llvm_nests.test_symbolic_sizes_and_zero()


def test_masks_and_gathers():
    test_llvm_nests.test_cat_with_masks_reads_nothing_outside()
    test_llvm_nests.test_masked_load_of_nothing_does_not_touch_memory()
    test_llvm_nests.test_embedding(5)
    test_llvm_nests.test_index_out_of_range_is_reported(64, 50)
    test_llvm_nests.test_masked_storage_types("bool")


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", ["exp", "log", "tanh", "erf", "sigmoid", "sin", "log1p", "pow", "expm1"])
def test_functions(name, dtype):
    test_llvm_ops.test_operator(name, dtype)
    test_llvm_ops.test_scalars_have_the_bits_of_lanes(name, dtype)
    if name != "pow":
        test_llvm_ops.test_special_values(name, dtype)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_exact_functions(dtype):
    for kind in ("bits", "near", "denormal", "special"):
        test_llvm_ops.test_fmod_is_exact(kind, dtype)
    test_llvm_ops.test_nextafter_is_exact(dtype)


@pytest.mark.parametrize("dtype", ["i64", "i32", "i16", "i8", "u8"])
def test_integer_division(dtype):
    for name in ("floordiv", "mod", "fmod"):
        test_llvm_ops.test_integer_division_of_all_sizes(name, dtype)


@pytest.mark.parametrize("name", ["lgamma", "digamma", "erfinv", "i0", "i1", "erfcx"])
def test_special_functions(name):
    for dtype in ("f32", "f64"):
        test_llvm_ops.test_operator(name, dtype)
        test_llvm_ops.test_scalars_have_the_bits_of_lanes(name, dtype)
        test_llvm_ops.test_special_functions_at_their_edges(name, dtype)
    test_llvm_ops.test_special_functions_in_f32(name)


@pytest.mark.parametrize("name,low,high", [("exp", -110.0, 90.0), ("tanh", -12.0, 12.0), ("erf", -6.0, 6.0), ("sigmoid", -87.0, 100.0), ("log", 1e-40, 10.0), ("log", 1e-10, 1e30)])
def test_inline_functions_over_their_range(name, low, high):
    """Relative error against f64, dense over the range and close to 0."""
    x = torch.cat([torch.linspace(low, high, 20001), torch.logspace(-38, 0, 4001), -torch.logspace(-38, 0, 4001)])
    x = x[(x >= low) & (x <= high)]
    y = torch.empty_like(x)
    run(*pointwise(lambda v: getattr(S, name)(v), buffer("y", y), buffer("x", x)), {"x": x, "y": y})
    want = getattr(torch, name)(x.double())
    assert torch.equal(y.isinf(), want.float().isinf())
    y, want = y[~y.isinf()], want[~y.isinf()]
    normal = want.abs() > 1.2e-38
    error = ((y.double() - want) / want)[normal].abs().max().item()
    assert error < (4e-7 if name != "log" else 6e-7), error
    assert (y.double() - want)[~normal].abs().max().item() <= 2e-45 if (~normal).any() else True
    if name in ("tanh", "erf"):
        assert y.abs().max() <= 1.0


@pytest.mark.parametrize("source,target", [("f32", "bf16"), ("bf16", "f32"), ("f64", "i64"), ("bool", "f32"), ("i64", "f32")])
def test_conversions(source, target):
    test_llvm_ops.test_conversion(source, target)
