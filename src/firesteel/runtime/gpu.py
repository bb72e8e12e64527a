"""Triton text -> loaded CUDA functions."""
from __future__ import annotations

import functools
import linecache
from typing import Any

from firesteel.codegen.triton import GpuKernel
from firesteel.codegen.triton_ops import HELPER_NAMES, HELPERS


def executed(name: str, text: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Runs a text whose functions Triton will read: it asks `inspect`, which asks `linecache`."""
    file = f"<firesteel {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope["__name__"] = f"firesteel.kernels.{name}"
    exec(compile(text, file, "exec"), scope)
    return scope


@functools.cache
def _common() -> dict[str, Any]:
    """What kernels may name: Triton's language, the CUDA math library, and our helpers."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    scope = executed("helpers", HELPERS, {"tl": tl, "libdevice": libdevice})
    scope.update({name: triton.jit(scope[name]) for name in HELPER_NAMES})
    return {name: scope[name] for name in ("tl", "libdevice", *HELPER_NAMES)}


def functions(kernel: GpuKernel) -> list[Any]:
    """The functions of a kernel as Triton's jit makes them."""
    import triton
    scope = executed(kernel.symbol, kernel.text, dict(_common()))
    return [triton.jit(scope[p.function]) for p in kernel.passes]
