"""Facts about the CPU that kernels are compiled for: vector length, features, which vector math functions can be called.

`this_machine()` looks at this machine once.  Tests print for other machines by making a Target themselves.

    this_machine().lanes(4)      # 16 on a machine with AVX-512: floats in a vector register
"""
from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

from firesteel.errors import UserError
from firesteel.records import dataclass
from firesteel.transaction import aside


@dataclass(frozen=True)
class Target:
    cpu: str
    features: str
    vector_bytes: int
    masks: bool             # are guarded vector loads and stores as fast as plain ones?
    fma: bool               # is multiply-add one instruction?
    variant: str            # letter of the vector function ABI: b SSE, d AVX2, e AVX-512, n Advanced SIMD; "" none
    vector_math: frozenset[str]     # C names (expf, exp) that have a vector variant of the full length

    def lanes(self, itemsize: int) -> int:
        return max(self.vector_bytes // itemsize, 1)

    def vector_function(self, name: str, arity: int, lanes: int) -> str:
        return f"_ZGV{self.variant}N{lanes}{'v' * arity}_{name}"


# C names of the functions that vector libraries are asked for, with their arity
VECTOR_FUNCTIONS = {
    "exp": 1, "exp2": 1, "expm1": 1, "log": 1, "log2": 1, "log10": 1, "log1p": 1, "sin": 1, "cos": 1, "tan": 1,
    "asin": 1, "acos": 1, "atan": 1, "sinh": 1, "cosh": 1, "tanh": 1, "asinh": 1, "acosh": 1, "atanh": 1,
    "erf": 1, "erfc": 1, "pow": 2, "atan2": 2, "hypot": 2,
}


@functools.cache
def vector_library() -> ctypes.CDLL | None:
    """glibc's libmvec, where this system has it."""
    try:
        return ctypes.CDLL("libmvec.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None


def _register_kind(features: dict[str, bool]) -> tuple[int, bool, str]:
    """(vector bytes, fast masks, variant letter)"""
    if platform.machine() in ("aarch64", "arm64"):
        return 16, False, "n"
    if features.get("avx512f") and features.get("avx512vl") and features.get("avx512dq") and features.get("avx512bw"):
        return 64, True, "e"
    if features.get("avx2"):
        return 32, False, "d"
    return 16, False, "b"


def vector_math(width: int, variant: str) -> frozenset[str]:
    library = vector_library()
    if library is None:
        return frozenset()
    found = set()
    for base, arity in VECTOR_FUNCTIONS.items():
        for name, lanes in ((base + "f", width // 4), (base, width // 8)):
            if hasattr(library, f"_ZGV{variant}N{lanes}{'v' * arity}_{name}"):
                found.add(name)
    return frozenset(found)


@functools.cache
def this_machine() -> Target:
    """This machine."""
    return aside(_look)


def llvm_binding() -> Any:
    """llvmlite, which compiles the kernels of the CPU: loaded at the first that is not in the cache."""
    try:
        import llvmlite.binding
    except (ImportError, OSError) as error:     # OSError: its library was found and cannot be loaded
        raise UserError(f"Kernels of the CPU need llvmlite, which cannot be imported: {str(error).rstrip('.')}.",
                        hint='pip install llvmlite; backend="aot_eager" needs none.') from None
    return llvmlite.binding


def _look() -> Target:
    llvm = llvm_binding()
    features = llvm.get_host_cpu_features()
    width, masks, variant = _register_kind(features)
    fma = variant == "n" or bool(features.get("fma"))
    return Target(llvm.get_host_cpu_name(), features.flatten(), width, masks, fma, variant, vector_math(width, variant))
