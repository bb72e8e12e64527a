"""Arithmetic in half precision is done in vectors of floats: the machine's own conversions of f16, shifts and additions for bf16, no calls.

x86's instruction that rounds to bf16 takes numbers below the smallest normal one for zeros, which eager does not: it is not used."""
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


def assembly(dtype, triple, target):
    out, x, y = (native_nests.contiguous(name, (1024,), dtype) for name in ("out", "x", "y"))
    nest = native_nests.pointwise(lambda a, b: to(S.mul(S.add(to(a, "f32"), to(b, "f32")), 2.0), dtype), out, x, y)
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
    text = assembly(dtype, triple, target)
    assert not re.search(r"__(?:trunc|extend)\w+", text)
    assert "vcvtneps2bf16" not in text
    wide = r"zmm\d" if target.vector_bytes == 64 else r"ymm\d" if target.vector_bytes == 32 else r"v\d+\.4s"
    if dtype == "f16":
        assert all(instruction in text for instruction in conversions)
    assert re.search(wide, text)
