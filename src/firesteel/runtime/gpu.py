"""Triton text -> CUDA functions, and how they are launched.

In: GpuKernels (codegen/triton.py).  Out: launches for the host function: machine code (`LAUNCHER`) that hands a kernel to the
driver on the stream that is current at the call, without the GIL.
 - One text is compiled once in a process, and once for a machine where fs.config.cache_dir allows it: cubins are kept under a
   digest of the text, the Triton version, the processor's kind and the settings that change code.  Triton is imported
   only to compile: a process that finds all its kernels in the cache never loads it.
 - Several kernels are compiled at the same time (runtime/cubins.py).
 - Kernels are compiled for addresses that are multiples of 16, which all fresh tensors have.  A launch with another address
   (an input that is a view) runs a twin that assumes nothing, compiled when it is first needed.
 - An index out of range sets a flag in host memory.  A launch does not wait, so neither does the check: IndexError is raised by the
   next call of a program compiled for a GPU, or logged when the process ends.  (Eager's assertion on the device would end the process's use of it.)

    launches = load([(kernel, "cuda:0")])
"""
from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.metadata
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import firesteel.runtime.diskcache as diskcache
from firesteel import transaction
from firesteel.artifacts import counters, logger, timed
from firesteel.codegen.host import DeviceLaunch, Setup
from firesteel.codegen.triton import GpuKernel, Pass
from firesteel.codegen.triton_ops import HELPER_NAMES, HELPERS
from firesteel.config import config
from firesteel.loops.scalars import ITEMSIZE
from firesteel.native_method import with_fetches
from firesteel.records import dataclass
from firesteel.runtime import cpu, cubins
from firesteel.sym.expr import Size
from firesteel.targets import CUDA

ALIGNMENT = 16          # of the addresses that kernels are compiled for
SCRATCH_ALIGNMENT = 256
EXPECTED = 4            # kernels of a program that is not known yet
_VERSION = 2            # of what is done to a text before it is code


# ---------------------------------------------------------------- Triton text -> cubin

@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code of one function."""
    name: str
    shared: int         # bytes of shared memory
    cubin: bytes


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
    return repr((_VERSION, kernel.text, kernel.signature, one.function, one.warps, aligned, capability, _triton_version(), config.code_key()))


def _from_cache(wanted: Wanted) -> Binary | None:
    found = diskcache.kernels(".cubin").get(_cache_key(*wanted))
    if found is None:
        return None
    counters["native"]["cache_hits"] += 1
    head, _, cubin = found.partition(b"\n")
    name, shared = json.loads(head)
    return Binary(name, shared, cubin)


def binaries(wanted: Sequence[Wanted]) -> list[Binary]:
    """Out of the disk cache, or compiled."""
    found = {place: _from_cache(one) for place, one in enumerate(wanted)}
    missing = [place for place, binary in found.items() if binary is None]
    made = cubins.compile_all([_job(*wanted[place]) for place in missing])
    counters["native"]["compiled"] += len(made)
    for place, binary in zip(missing, itertools.starmap(Binary, made)):
        diskcache.kernels(".cubin").put(_cache_key(*wanted[place]), json.dumps([binary.name, binary.shared]).encode() + b"\n" + binary.cubin)
        found[place] = binary
    return [binary for binary in found.values() if binary is not None]


def expect_kernels() -> None:
    """Starts Triton's processes while graphs are traced, where nothing was ever compiled: they take a tenth of a second to load."""
    if diskcache.kernels(".cubin").is_empty():
        cubins.workers.start(EXPECTED)


@functools.cache
def _triton_version() -> str:
    """Without importing Triton."""
    for name in ("triton", "pytorch-triton"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "?"


# ---------------------------------------------------------------- the driver

class Driver:
    """The CUDA driver's library, loaded once."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.library, name)(*args)
        if code:
            raise RuntimeError(f"{name} failed: CUDA driver error {code}")

    def address(self, name: str) -> int:
        return ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0


@functools.cache
def driver() -> Driver:
    return Driver()


class Device:
    """One GPU: its context, and the functions that were loaded into it."""

    def __init__(self, index: int):
        torch.cuda.init()
        self.index = index
        major, minor = torch.cuda.get_device_capability(index)
        self.capability = 10 * major + minor
        self.context = ctypes.c_void_p()
        handle = ctypes.c_int()
        driver().call("cuInit", 0)
        driver().call("cuDeviceGet", ctypes.byref(handle), index)
        driver().call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), handle)
        self.lock = transaction.Lock()
        self.loaded: dict[tuple, tuple[int, int]] = {}      # `_key` -> (handle, shared bytes)

    def load(self, wanted: Sequence[tuple[GpuKernel, Pass, bool]]) -> None:
        """Compiles what is new, several at a time, and loads it."""
        new = {key: job for job in wanted if (key := _key(job[1], job[2])) not in self.loaded}
        if not new:
            return
        jobs = [(*job, self.capability) for job in new.values()]
        self.lock.holding(self._keep, new, jobs, binaries(jobs))

    def _keep(self, keys: Iterable[tuple], jobs: Sequence[Wanted], made: Sequence[Binary]) -> None:
        for key, job, binary in zip(keys, jobs, made):
            self.loaded.setdefault(key, (self._loaded(job, binary), binary.shared))

    def _loaded(self, job: Wanted, binary: Binary) -> int:
        """What came out of the cache may not fit the driver: it is compiled again, once."""
        try:
            return self._function(binary)
        except RuntimeError:
            diskcache.kernels(".cubin").forget(_cache_key(*job))
            return self._function(*binaries([job]))

    def function(self, one: Pass, aligned: bool) -> tuple[int, int]:
        """(handle, bytes of shared memory) of a loaded function."""
        return self.loaded[_key(one, aligned)]

    def _function(self, binary: Binary) -> int:
        """The handle of a function, loaded into this device's context."""
        module, function, popped = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        call = driver().call
        call("cuCtxPushCurrent_v2", self.context)
        try:
            call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(binary.cubin))
            call("cuModuleGetFunction", ctypes.byref(function), module, binary.name.encode())
            if binary.shared > 48 * 1024:
                call("cuFuncSetAttribute", function, 8, binary.shared)      # the most dynamic shared memory that it may have
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(popped))
        return function.value or 0


def _key(one: Pass, aligned: bool) -> tuple:
    """What one piece of machine code is known by."""
    return one.function, one.warps, aligned, config.code_key()


@functools.cache
def device(index: int) -> Device:
    return Device(index)


# ---------------------------------------------------------------- launching

# Arguments of the launcher, each an i64: the table of functions; the kernel, and the number of its twin for any address; how many
# addresses there are, programs, threads, bytes of shared memory; stream, context; the number of parameters, and the parameters,
# addresses first; the host's error slot.
LAUNCHER = with_fetches(r"""
define void @fs_cuda_launch(ptr %args) {
entry:
  %table = load ptr, ptr %args
  %function = fetch ptr, i64, ptr %args, i64 1
  %twin = fetch i64, i64, ptr %args, i64 2
  %addresses = fetch i64, i64, ptr %args, i64 3
  %programs = fetch i64, i64, ptr %args, i64 4
  %threads = fetch i64, i64, ptr %args, i64 5
  %shared = fetch i64, i64, ptr %args, i64 6
  %stream = fetch ptr, i64, ptr %args, i64 7
  %context = fetch ptr, i64, ptr %args, i64 8
  %count = fetch i64, i64, ptr %args, i64 9
  %first = getelementptr i64, ptr %args, i64 10
  %places = alloca ptr, i64 %count
  %popped = alloca ptr
  %shared.found = alloca i64
  %some = icmp sgt i64 %programs, 0
  br i1 %some, label %next, label %done
next:
  %i = phi i64 [0, %entry], [%i.next, %take]
  %bits = phi i64 [0, %entry], [%bits.next, %take]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %take, label %ready
take:
  %place = getelementptr i64, ptr %first, i64 %i
  %slot = getelementptr ptr, ptr %places, i64 %i
  store ptr %place, ptr %slot
  %value = load i64, ptr %place
  %is.address = icmp slt i64 %i, %addresses
  %low = select i1 %is.address, i64 %value, i64 0
  %bits.next = or i64 %bits, %low
  %i.next = add i64 %i, 1
  br label %next
ready:
  %rest = and i64 %bits, 15
  %aligned = icmp eq i64 %rest, 0
  br i1 %aligned, label %launch, label %unaligned
unaligned:
  %find = fetch ptr, ptr, ptr %table, i64 3
  %found = call ptr %find(i64 %twin, ptr %shared.found)
  %shared.twin = load i64, ptr %shared.found
  br label %launch
launch:
  %chosen = phi ptr [%function, %ready], [%found, %unaligned]
  %bytes = phi i64 [%shared, %ready], [%shared.twin, %unaligned]
  %push = fetch ptr, ptr, ptr %table, i64 1
  %pop = fetch ptr, ptr, ptr %table, i64 2
  %run = load ptr, ptr %table
  %x = trunc i64 %programs to i32
  %t = trunc i64 %threads to i32
  %s = trunc i64 %bytes to i32
  %pushed = call i32 %push(ptr %context)
  %result = call i32 %run(ptr %chosen, i32 %x, i32 1, i32 1, i32 %t, i32 1, i32 1, i32 %s, ptr %stream, ptr %places, ptr null)
  %gone = call i32 %pop(ptr %popped)
  %failed = icmp ne i32 %result, 0
  br i1 %failed, label %report, label %done
report:
  %error = fetch ptr, i64, ptr %first, i64 %count
  %code = zext i32 %result to i64
  store i64 %code, ptr %error
  br label %done
done:
  ret void
}
""")


TWIN = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))     # (number, where to write bytes) -> function


class Twins:
    """Kernels by number, for launches whose addresses are not aligned."""

    def __init__(self) -> None:
        self.known: list[tuple[GpuKernel, Pass, int]] = []
        self.numbers: dict[tuple[str, int, int], int] = {}
        self.callback = TWIN(self.find)

    def number(self, kernel: GpuKernel, one: Pass, index: int) -> int:
        key = (one.function, one.warps, index)
        if key not in self.numbers:
            self.known.append((kernel, one, index))
            self.numbers[key] = len(self.known) - 1
        return self.numbers[key]

    def find(self, number: int, shared: Any) -> int:
        """The function that takes any address, and at `shared` how much shared memory it needs, which differs; called from machine code."""
        kernel, one, index = self.known[number]
        counters["native"]["unaligned_launches"] += 1
        device(index).load([(kernel, one, False)])
        handle, shared[0] = device(index).function(one, False)
        return handle


twins = Twins()


@functools.cache
def _table() -> Any:
    """Addresses of the functions that the launcher calls."""
    names = ("cuLaunchKernel", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    callback = ctypes.cast(twins.callback, ctypes.c_void_p).value or 0
    return (ctypes.c_int64 * 4)(*(driver().address(name) for name in names), callback)


@functools.cache
def _launcher() -> int:
    return cpu.compile_text(LAUNCHER, "fs_cuda_launch")


def load(kernels: Sequence[tuple[GpuKernel, str]]) -> dict[str, tuple[DeviceLaunch, ...]]:
    """The launches of kernels on their devices, by the nests' names."""
    with timed("compile_kernels"):
        by_device: dict[int, list[tuple[GpuKernel, Pass, bool]]] = {}
        for kernel, where in kernels:
            by_device.setdefault(device_index(where), []).extend((kernel, one, True) for one in kernel.passes)
        for index, wanted in by_device.items():
            device(index).load(wanted)
        return {kernel.name: launches(kernel, where) for kernel, where in kernels}


def launches(kernel: GpuKernel, where: str) -> tuple[DeviceLaunch, ...]:
    """How the functions of a loaded kernel are launched."""
    index = device_index(where)
    own = device(index)
    places, total = _scratch_places(kernel)
    return tuple(_launch(kernel, one, own, where, places, total) for one in kernel.passes)


def _launch(kernel: GpuKernel, one: Pass, own: Device, where: str, places: tuple[Size, ...], total: Size) -> DeviceLaunch:
    handle, shared = own.function(one, True)
    # Triton's functions have two more parameters, scratch memory that ours never use
    before = (ctypes.addressof(_table()), handle, twins.number(kernel, one, own.index), len(kernel.buffers), one.programs, 32 * one.warps,
              shared, f"stream_{own.index}", own.context.value or 0, len(kernel.signature) + 2)
    return DeviceLaunch(_launcher(), kernel.buffers, kernel.symbols, where, before, places, total, (flag().address, 0, 0))


def _scratch_places(kernel: GpuKernel) -> tuple[tuple[Size, ...], Size]:
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


# ---------------------------------------------------------------- errors of kernels, and the host function's start

class Flag:
    """A number in host memory that kernels can write."""

    def __init__(self) -> None:
        self.memory = torch.zeros(1, dtype=torch.int64).pin_memory()
        self.address = self.memory.data_ptr()
        self.word = ctypes.c_int64.from_address(self.address)
        atexit.register(self.report)

    def take(self) -> IndexError:
        """Lowers the flag; the error that it stands for."""
        self.word.value = 0
        return IndexError("index out of range in self (found by a kernel of an earlier call)")

    def report(self) -> None:
        if self.word.value:
            logger.error("an index was out of range in a GPU kernel of the last compiled calls")


@functools.cache
def flag() -> Flag:
    return Flag()


def setup(devices: Sequence[str]) -> Setup:
    """The start of a host function: late errors, and the streams that are current."""
    indices = sorted({device_index(where) for where in devices})
    lines = ("if flag.value: raise index_error_of_earlier()", *(f"stream_{i} = current_stream({i})" for i in indices))
    return Setup(lines, {"flag": flag().word, "index_error_of_earlier": flag().take, "current_stream": torch._C._cuda_getCurrentRawStream})
