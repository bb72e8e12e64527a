"""Processors that packages can hold machine code for: a row a name, with what the processor must have.

The levels of x86-64 are those that compilers and Linux distributions use; every AArch64 has what its row asks for.  What this machine has is
read from the system, without LLVM.  Code is made for processors of this machine's kind.  GPUs have architectures instead of rows: `sm_90` is that
of compute capability 9.0.

    best_of(["x86-64-v3", "x86-64-v4"])     # the greatest that this machine runs
"""
from __future__ import annotations

import functools
import platform
import re
import sys
from collections.abc import Sequence

from firesteel.codegen.target import Target, vector_math
from firesteel.errors import PackageError
from firesteel.records import dataclass
from firesteel.table import Table


@dataclass(frozen=True)
class Processor:
    flags: frozenset[str]       # as the Linux kernel names them
    vector_bytes: int
    masks: bool
    fma: bool
    variant: str                # letter of the vector function ABI
    machine: str = "x86_64"

    def target(self, name: str) -> Target:
        return Target(name, "", self.vector_bytes, self.masks, self.fma, self.variant, vector_math(self.vector_bytes, self.variant))


_V2 = frozenset(["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"])
_V3 = _V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
PROCESSORS: Table[Processor] = Table("processor", "shipping/processors.py")      # from the least to the greatest
PROCESSORS.rows({"x86-64-v2": Processor(_V2, 16, False, False, "b"), "x86-64-v3": Processor(_V3, 32, False, True, "d"),
                    "x86-64-v4": Processor(_V4, 64, True, True, "e"),
                    "armv8-a": Processor(frozenset(["fp", "asimd"]), 16, False, True, "n", "aarch64")})


LISTS = {"x86_64": "flags", "aarch64": "Features"}      # what Linux calls them


@functools.cache
def flags() -> frozenset[str]:
    """What this machine's processor has."""
    if sys.platform != "linux" or platform.machine() not in LISTS:
        raise PackageError(f"Packages are made and loaded on Linux on {' or '.join(LISTS)}, not on {sys.platform} on {platform.machine()}.",
                           hint="Use fs.compile here.")
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as facts:
        found = re.search(rf"^{LISTS[platform.machine()]}\s*:(.*)$", facts.read(), flags=re.MULTILINE)
    return frozenset(found[1].split()) if found is not None else frozenset()


def runs_here(name: str) -> bool:
    return PROCESSORS[name].machine == platform.machine() and PROCESSORS[name].flags <= flags()


def best_of(names: Sequence[str]) -> str:
    """The greatest of the processors whose code runs here."""
    known = [name for name in PROCESSORS if name in names]
    usable = [name for name in known if runs_here(name)]
    if not usable:
        missing = sorted(PROCESSORS[known[0]].flags - flags()) if known else []
        lacks = f": it lacks {', '.join(missing)}" if missing else ""
        raise PackageError(f"The package has machine code for {', '.join(names)}, which this processor does not run{lacks}.",
                           hint="Make the package with processors=[...] that name this one.")
    return usable[-1]


# ---------------------------------------------------------------- GPUs

EXACT = 90      # from here on, machine code is for one architecture alone


def capability_of(name: str) -> int | None:
    """90 of sm_90; None of what is no architecture of a GPU."""
    found = re.fullmatch(r"sm_(\d+)", name)
    return int(found[1]) if found is not None else None


def runs_on(name: str, capability: int) -> bool:
    """Does a GPU of this capability run code for the architecture?  Later ones of a generation do; new generations have instructions of their own."""
    made = capability_of(name)
    return made == capability or made is not None and made < capability < EXACT and made // 10 == capability // 10


def best_architecture(names: Sequence[str], capability: int) -> str:
    """The greatest of the architectures whose code the GPU runs."""
    usable = sorted((name for name in names if runs_on(name, capability)), key=lambda name: capability_of(name) or 0)
    if not usable:
        raise PackageError(f"The package has machine code for GPUs of the architecture {', '.join(names)}; this one is sm_{capability}.",
                           hint=f'Make the package with processors=["sm_{capability}"].')
    return usable[-1]
