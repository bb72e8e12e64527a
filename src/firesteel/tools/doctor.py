"""`firesteel doctor`: what was found on this machine, and what to do about what is missing.

A check is a row: it returns what was found and, where something is to be done, a sentence that says what.  Only checks marked as `needed`
decide the exit status.
"""
from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import shutil
from collections.abc import Callable

import torch

import firesteel
from firesteel import support
from firesteel.artifacts import LOG_NAMES
from firesteel.capture.versions import PYTHON, SUPPORTED
from firesteel.config import KNOBS, OTHER_VARIABLES, config
from firesteel.errors import UserError
from firesteel.records import dataclass
from firesteel.runtime import diskcache
from firesteel.table import Table

ENOUGH = 64 << 20               # bytes free for the cache


@dataclass(frozen=True)
class Found:
    text: str
    remedy: str = ""
    needed: bool = False        # does nothing work without it?


CHECKS: Table[Callable[[], Found]] = Table("check", "tools/doctor.py")


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@CHECKS.row("firesteel")
def check_self() -> Found:
    return Found(f"{firesteel.__version__} in {pathlib.Path(firesteel.__file__).parent}")


@CHECKS.row("python")
def check_python() -> Found:
    known, shown = PYTHON in SUPPORTED, ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    return Found(f"{platform.python_version()} on {platform.system()} {platform.machine()}",
                 "" if known else f"Capture knows the bytecode of {shown}; use one of these.", not known)


@CHECKS.row("torch")
def check_torch() -> Found:
    newest = f"{support.NEWEST[0]}.{support.NEWEST[1]}"
    newer = support.release(torch.__version__) > support.NEWEST
    return Found(f"{torch.__version__}, {torch.get_num_threads()} threads",
                 f"It was tried up to torch {newest}; use that if results differ." if newer else "")


@CHECKS.row("llvmlite")
def check_llvmlite() -> Found:
    found = version("llvmlite")
    return Found(found or "not installed", "" if found else "Kernels of the CPU need it: pip install llvmlite", not found)


@CHECKS.row("numpy")
def check_numpy() -> Found:
    found = version("numpy")
    return Found(found or "not installed", "" if found else "Capture needs it: pip install numpy", not found)


@CHECKS.row("processor")
def check_processor() -> Found:
    try:
        from firesteel.codegen.target import this_machine, vector_library  # needs llvmlite
        machine = this_machine()
    except (ImportError, UserError):
        return Found(platform.processor() or "unknown")
    slow = vector_library() is None
    return Found(f"{machine.cpu}, vectors of {machine.vector_bytes} bytes, {'no ' if slow else ''}vector math library",
                 "exp, tanh and the like run one by one without glibc's libmvec." if slow else "")


@CHECKS.row("GPU")
def check_gpu() -> Found:
    if torch.cuda.is_available():
        return Found(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    if torch.version.cuda is None:
        return Found("none: this torch is built for the CPU", "Nothing, unless you want a GPU: then install a CUDA build of torch.")
    return Found(f"none, though torch is built for CUDA {torch.version.cuda}", "Look whether nvidia-smi finds the driver and the device.")


@CHECKS.row("triton")
def check_triton() -> Found:
    found, wanted = version("triton"), torch.cuda.is_available()
    return Found(found or "not installed", "Kernels of the GPU need it: pip install triton" if wanted and not found else "", wanted and not found)


@CHECKS.row("cache")
def check_cache() -> Found:
    if not config.cache_dir:
        return Found("off", "Kernels are compiled anew in each process; set FIRESTEEL_CACHE_DIR to a folder of yours.")
    folder = pathlib.Path(config.cache_dir)
    there = next(f for f in (folder, *folder.parents) if f.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "cannot be written" if there.is_dir() else f"is no folder: {there} is a file"
        return Found(f"{folder}, which {why}", "Set FIRESTEEL_CACHE_DIR to a folder that you can write.")
    free = shutil.disk_usage(there).free
    shown = "; ".join(diskcache.kernels(suffix).show().split(": ", 1)[1] + f" {suffix}" for suffix in diskcache.SUFFIXES)
    return Found(f"{folder}: {shown}", f"Only {free / 1e6:.0f} MB are free there." if free < ENOUGH else "")


@CHECKS.row("settings")
def check_settings() -> Found:
    """Variables of the environment that would be ignored without a word."""
    known = {f"FIRESTEEL_{name.upper()}" for name in KNOBS} | set(OTHER_VARIABLES)
    given = sorted(name for name in os.environ if name.startswith("FIRESTEEL_"))
    unknown = [name for name in given if name not in known]
    logs = [n for n in os.environ.get("FIRESTEEL_LOGS", "").split(",") if n.strip() and n.strip() not in LOG_NAMES]
    remedies = [f"There is no setting {', '.join(unknown)}." if unknown else "", f"There is no log {', '.join(logs)}." if logs else ""]
    return Found(", ".join(f"{name}={os.environ[name]}" for name in given) or "all at their defaults", " ".join(filter(None, remedies)))


@CHECKS.row("a kernel")
def check_kernel() -> Found:
    """Compiles and runs one."""
    try:
        made = firesteel.compile(lambda x: (x * 2 + 1).relu(), fullgraph=True)(torch.ones(64))
    except Exception as error:
        return Found(f"fails: {type(error).__name__}: {str(error).splitlines()[0]}", "See the lines above; else this is a bug of firesteel.", True)
    return Found("compiled and ran") if made.tolist() == [3.0] * 64 else Found("is wrong", "This is a bug of firesteel.", True)


def examine(write: Callable[[str], None] = print) -> bool:
    """Prints every check.  Does everything that is needed work?"""
    good = True
    for name, check in CHECKS.items():
        found = check()
        write(f"{name:10} {found.text}")
        if found.remedy:
            write(f"{'':10} -> {found.remedy}")
        good = good and not found.needed
    return good
