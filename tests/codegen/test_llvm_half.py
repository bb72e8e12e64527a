"""Arithmetic in half precision is done in vectors of floats: the machine's own conversions of f16, shifts and additions for bf16, no calls.

x86's instruction that rounds to bf16 takes numbers below the smallest normal one for zeros, which eager does not: it is not used.  Other kernels, too, are vectors
of the machine's own width: texts for machines that need not be this one."""
import dataclasses
import re

import llvmlite.binding as llvm
import native_nests
import pytest

from firesteel.codegen.target import Target
from firesteel.loops.scalars import S, to

MACHINES = {        # name: (triple, target, conversions from and to f16)
    "avx2": ("x86_64-unknown-linux-gnu", Target("haswell", "", 32, False, True, "d", frozenset()), ("vcvtph2ps", "vcvtps2ph")),
    "avx512": ("x86_64-unknown-linux-gnu", Target("skylake-avx512", "", 64, True, True, "e", frozenset()), ("vcvtph2ps", "vcvtps2ph")),
    "avx512 with bf16": ("x86_64-unknown-linux-gnu", Target("sapphirerapids", "", 64, True, True, "e", frozenset()), ("vcvtph2ps", "vcvtps2ph")),
    "neon": ("aarch64-unknown-linux-gnu", Target("neoverse-n1", "", 16, False, True, "n", frozenset()), ("fcvtl", "fcvtn")),
}


WIDE = {64: r"zmm\d", 32: r"ymm\d", 16: r"v\d+\.(?:4s|2d)"}     # bytes of a register -> its name


def halves(dtype):
    out, x, y = (native_nests.contiguous(name, (1024,), dtype) for name in ("out", "x", "y"))
    return native_nests.pointwise(lambda a, b: to(S.mul(S.add(to(a, "f32"), to(b, "f32")), 2.0), dtype), out, x, y)


def assembly(nest, triple, target):
    """What LLVM makes of a nest for a machine that need not be this one."""
    kernel = native_nests.print_nest(*nest, target)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=target.cpu, features=target.features, opt=3)
    module = llvm.parse_assembly(kernel.text)
    module.triple = triple
    return machine.emit_assembly(module)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", MACHINES)
def test_conversions_are_vectors(name, dtype):
    triple, target, conversions = MACHINES[name]
    text = assembly(halves(dtype), triple, target)
    assert not re.search(r"__(?:trunc|extend)\w+", text)
    assert "vcvtneps2bf16" not in text
    if dtype == "f16":
        assert all(instruction in text for instruction in conversions)
    assert re.search(WIDE[target.vector_bytes], text)


def transposed():
    x = native_nests.contiguous("x", (64, 64))
    out = dataclasses.replace(native_nests.contiguous("out", (64, 64)), strides=(1, 64))
    return native_nests.pointwise(lambda a: a, out, x)


NESTS = {
    "pointwise": lambda: native_nests.pointwise(lambda a: S.mul(a, 2.0), *(native_nests.contiguous(name, (1000,)) for name in ("out", "x"))),
    "doubles": lambda: native_nests.pointwise(lambda a: S.add(a, 2.0), *(native_nests.contiguous(name, (1000,), "f64") for name in ("out", "x"))),
    "softmax": lambda: native_nests.softmax(8, 100), "layer norm": lambda: native_nests.layernorm(8, 100), "transpose": transposed,
    "sum": lambda: native_nests.reduction("sum", native_nests.contiguous("x", (33, 170)), (1,)),
}


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("name", MACHINES)
def test_kernels_are_vectors_of_the_machine(name, nest):
    """Registers of the machine's own width; a shuffle turns rows, no lane is fetched on its own."""
    triple, target, _ = MACHINES[name]
    text = assembly(NESTS[nest](), triple, target)
    assert re.search(WIDE[target.vector_bytes], text)
    if nest == "transpose":
        assert re.search(r"unpck|vperm|vshuf|trn[12]|zip[12]", text) and "gather" not in text
