"""Triton text -> CUDA functions and their launches.

In: GpuKernels (codegen/triton.py).  Out: launches for the host function; cuda.py loads machine code and launches it.
 - One text is compiled once in a process, and once for a machine where fs.config.cache_dir allows it: cubins are kept under a
   digest of the text, the Triton version, the processor's kind and the settings that change code.  Triton is imported
   only to compile: a process that finds all its kernels in the cache never loads it.
 - Several kernels are compiled at the same time (runtime/cubins.py).
 - The twin for addresses that are not aligned is compiled when it is first needed.

    launches = load([(kernel, "cuda:0")])
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

import firesteel.runtime.diskcache as diskcache
from firesteel.artifacts import counters, timed
from firesteel.codegen import hosted
from firesteel.codegen.host import DeviceLaunch, Setup
from firesteel.codegen.triton import GpuKernel, Pass
from firesteel.codegen.triton_ops import HELPER_NAMES, HELPERS
from firesteel.config import config
from firesteel.loops.scalars import ITEMSIZE
from firesteel.runtime import cpu, cubins, cuda
from firesteel.runtime.cuda import ALIGNMENT, Binary, Function
from firesteel.sym.expr import Size
from firesteel.targets import CUDA

SCRATCH_ALIGNMENT = 256
EXPECTED = 4            # kernels of a program that is not known yet
_VERSION = 2            # of what is done to a text before it is code


# ---------------------------------------------------------------- Triton text -> cubin

Wanted = tuple[GpuKernel, Pass, bool, int]      # a function of a kernel, whether addresses are aligned, the processor's kind


def _job(kernel: GpuKernel, one: Pass, aligned: bool, capability: int) -> cubins.Job:
    """What Triton needs to know, as plain values."""
    name = f"{kernel.title}_{kernel.symbol[2:10]}" if kernel.title else kernel.symbol
    pointers = [i for i, kind in enumerate(kernel.signature[:-1]) if kind.startswith("*")]
    # a product is not contracted into a sum: where the same product is stored too, their difference would not be 0, as it is in eager
    options = {"num_warps": one.warps, "enable_fp_fusion": False, "enable_reflect_ftz": False}
    return {"text": kernel.text.replace(kernel.symbol, name), "function": one.function.replace(kernel.symbol, name),
            "signature": list(kernel.signature), "pointers": pointers, "alignment": ALIGNMENT if aligned else 0, "target": CUDA,
            "capability": capability, "options": options, "helpers": HELPERS, "helper_names": list(HELPER_NAMES)}


def _cache_key(kernel: GpuKernel, one: Pass, aligned: bool, capability: int) -> str:
    return repr((_VERSION, kernel.text, kernel.signature, one.function, one.warps, aligned, capability, cuda.triton_version(), config.code_key()))


def _from_cache(key: str) -> Binary | None:
    found = diskcache.kernels(".cubin").get(key)
    if found is None:
        return None
    head, _, cubin = found.partition(b"\n")
    name, shared = json.loads(head)
    return Binary(name, shared, cubin)


def binaries(wanted: Sequence[Wanted]) -> list[Binary]:
    """Out of the disk cache, or compiled."""
    keys = [_cache_key(*one) for one in wanted]
    found = {key: None if key in _ahead else _from_cache(key) for key in keys}
    missing = [key for key, binary in found.items() if binary is None]
    counters["native"]["cache_hits"] += len(found) - len(missing)
    begun = _begin(dict(zip(keys, wanted)), missing)
    for key in missing:
        _ahead.pop(key, None)
        found[key] = binary = Binary(*begun[key].result())
        diskcache.kernels(".cubin").put(key, json.dumps([binary.name, binary.shared]).encode() + b"\n" + binary.cubin)
    counters["native"]["compiled"] += len(missing)
    return [one for key in keys if (one := found[key]) is not None]


_ahead: dict[str, Future[cubins.Made]] = {}     # by `_cache_key`: what is being compiled
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ahead.clear)


def _begin(wanted: Mapping[str, Wanted], keys: Sequence[str]) -> dict[str, Future[cubins.Made]]:
    """What is not being compiled yet begins to be."""
    running = {key: made for key in keys if (made := _ahead.get(key)) is not None}
    new = [key for key in keys if key not in running]
    begun = dict(zip(new, cubins.begin([_job(*wanted[key]) for key in new])))
    _ahead.update(begun)
    return running | begun


def compile_ahead(kernels: Sequence[tuple[GpuKernel, str]]) -> bool:
    """Has kernels compiled that will be loaded later.  Is there one?"""
    owners = [(kernel, cuda.device(device_index(where))) for kernel, where in kernels]
    asked = {_cache_key(*wanted): wanted for kernel, own in owners for one in kernel.passes if key_of(one, True) not in own.loaded
             for wanted in [(kernel, one, True, own.capability)]}
    kept = diskcache.kernels(".cubin")
    begun = _begin(asked, [key for key in asked if kept.get(key) is None])
    if begun:       # what a launch needs takes a while too
        _launcher()
        hosted.launcher([0, 1], cpu.compile_text)
        cuda.flag()
    return bool(begun)


def expect_kernels() -> None:
    """Starts Triton's processes before the first call, where nothing was ever compiled: they take some tenths of a second to load."""
    if diskcache.kernels(".cubin").is_empty():
        cubins.workers.start(EXPECTED)


# ---------------------------------------------------------------- loading

def load_functions(own: cuda.Device, wanted: Sequence[tuple[GpuKernel, Pass, bool]]) -> None:
    """Compiles what is new, several at a time, and loads it."""
    new = {key: job for job in wanted if (key := key_of(job[1], job[2])) not in own.loaded}
    jobs = [(*job, own.capability) for job in new.values()]
    for key, job, binary in zip(new, jobs, binaries(jobs)):
        _load(own, key, job, binary)


def _load(own: cuda.Device, key: tuple, job: Wanted, binary: Binary) -> None:
    """What came out of the cache may not fit the driver: it is compiled again, once."""
    try:
        own.known(key, binary)
    except RuntimeError:
        diskcache.kernels(".cubin").forget(_cache_key(*job))
        own.known(key, *binaries([job]))


def key_of(one: Pass, aligned: bool) -> tuple:
    return cuda.key_of(one.function, one.warps, aligned)


def function_of(kernel: GpuKernel, one: Pass, own: cuda.Device) -> Function:
    """A loaded function."""
    def twin() -> tuple[int, int]:
        load_functions(own, [(kernel, one, False)])
        return own.loaded[key_of(one, False)]
    key = key_of(one, True)
    found = Function(*own.loaded[key], cuda.twins.number((own.index, *key), twin), own.index)
    KNOWN[found.twin] = kernel, one, found
    return found


KNOWN: dict[int, tuple[GpuKernel, Pass, Function]] = {}        # by the number of the twin


# ---------------------------------------------------------------- launching

def _launcher() -> int:
    return cpu.compile_text(cuda.LAUNCHER, "fs_cuda_launch")


def load(kernels: Sequence[tuple[GpuKernel, str]]) -> dict[str, tuple[DeviceLaunch, ...]]:
    """The launches of kernels on their devices, by the nests' names."""
    with timed("compile_kernels"):
        by_device: dict[int, list[tuple[GpuKernel, Pass, bool]]] = {}
        for kernel, where in kernels:
            by_device.setdefault(device_index(where), []).extend((kernel, one, True) for one in kernel.passes)
        for index, wanted in by_device.items():
            load_functions(cuda.device(index), wanted)
        return {kernel.name: launches(kernel, where) for kernel, where in kernels}


def launches(kernel: GpuKernel, where: str) -> tuple[DeviceLaunch, ...]:
    """How the functions of a loaded kernel are launched."""
    own = cuda.device(device_index(where))
    places, total = scratch_places(kernel)
    return tuple(_launch(kernel, one, own, where, places, total) for one in kernel.passes)


def _launch(kernel: GpuKernel, one: Pass, own: cuda.Device, where: str, places: tuple[Size, ...], total: Size) -> DeviceLaunch:
    function = function_of(kernel, one, own)

    def word(kind: str) -> int:
        return cuda.word(kind, function, function.twin)
    # Triton's functions have two more parameters, scratch memory that ours never use
    before = (word("table"), word("function"), word("twin"), len(kernel.buffers), one.programs, 32 * one.warps, word("shared"),
              f"stream_{own.index}", word("context"), len(kernel.signature) + 2)
    return DeviceLaunch(_launcher(), kernel.buffers, kernel.symbols, where, before, places, total, (word("flag"), 0, 0))


def scratch_places(kernel: GpuKernel) -> tuple[tuple[Size, ...], Size]:
    """(byte offset of each piece of scratch memory, bytes of all)"""
    places: list[Size] = []
    total: Size = 0
    for dtype, count in kernel.scratch:
        places.append(total)
        total = total + (count * ITEMSIZE[dtype] + SCRATCH_ALIGNMENT - 1) // SCRATCH_ALIGNMENT * SCRATCH_ALIGNMENT
    return tuple(places), total


def device_index(where: str) -> int:
    found = torch.device(where).index
    return torch.cuda.current_device() if found is None else found


def setup(devices: Sequence[str]) -> Setup:
    """The start of a host function: late errors, and the streams that are current."""
    indices = sorted({device_index(where) for where in devices})
    lines = ("if flag.value: raise index_error_of_earlier()", *(f"stream_{i} = current_stream({i})" for i in indices))
    return Setup(lines, cuda.scope())


# ---------------------------------------------------------------- functions between processes

def kept_functions(numbers: Iterable[int]) -> list[tuple[dict[str, Any], bytes]] | None:
    """What makes functions again, and their machine code, out of the cache on disk; None where one is not there."""
    found = []
    for kernel, one, function in map(KNOWN.__getitem__, numbers):
        binary = _from_cache(_cache_key(kernel, one, True, cuda.device(function.place).capability))
        if binary is None:
            return None
        about = {"symbol": kernel.symbol, "text": kernel.text, "signature": kernel.signature, "title": kernel.title, "function": one.function,
                 "warps": one.warps, "index": function.place, "name": binary.name, "shared": binary.shared}
        found.append((about, binary.cubin))
    return found


def kept_twin(about: Mapping[str, Any]) -> tuple[int, int]:
    """The twin of a function that was kept so."""
    own, one = cuda.device(about["index"]), Pass(about["function"], 0, about["warps"])
    kernel = GpuKernel("", about["symbol"], about["text"], (one,), tuple(about["signature"]), (), (), (), False, about["title"])
    load_functions(own, [(kernel, one, False)])
    return own.loaded[key_of(one, False)]
