"""The CUDA driver: contexts, functions out of machine code, and how they are launched.

In: a `Binary`, machine code of one function, and the device that it is for.  Out: a `Function`, whose numbers are words of the host functions'
recipes: `LAUNCHER` is machine code that hands a kernel to the driver on the stream that is current at the call, without the GIL.  Nothing here
compiles: programs out of the cache or a package need no other file for a GPU.
 - Kernels are compiled for addresses that are multiples of 16, which all fresh tensors have.  A launch with another address
   (an input that is a view) runs a twin that assumes nothing, loaded when it is first needed.
 - An index out of range sets a flag in host memory.  A launch does not wait, so neither does the check: IndexError is raised by the
   next call of a program compiled for a GPU, or logged when the process ends.  (Eager's assertion on the device would end the process's use of it.)
 - Recipes are written without addresses: what a word of them is in this process, `FINDERS` says, a row a kind.

    loaded(device(0), key, binary, find_twin).handle
"""
from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from firesteel import transaction
from firesteel.artifacts import counters, logger
from firesteel.config import config
from firesteel.native_method import Word, spelled_out
from firesteel.records import dataclass
from firesteel.table import Table

ALIGNMENT = 16          # of the addresses that kernels are compiled for


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code of one function."""
    name: str
    shared: int         # bytes of shared memory
    cubin: bytes


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
        self.capability = capability(index)
        self.context = ctypes.c_void_p()
        handle = ctypes.c_int()
        driver().call("cuInit", 0)
        driver().call("cuDeviceGet", ctypes.byref(handle), index)
        driver().call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), handle)
        self.lock = transaction.Lock()
        self.loaded: dict[tuple, tuple[int, int]] = {}      # what machine code is known by -> (handle, shared bytes)

    def load(self, binary: Binary) -> int:
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

    def known(self, key: tuple, binary: Binary) -> tuple[int, int]:
        """(handle, shared bytes) of machine code, loaded once."""
        return self.loaded[key] if key in self.loaded else self.lock.holding(self._known, key, binary)

    def _known(self, key: tuple, binary: Binary) -> tuple[int, int]:
        if key not in self.loaded:
            self.loaded[key] = self.load(binary), binary.shared
        return self.loaded[key]


def key_of(function: str, warps: int, aligned: bool) -> tuple:
    """What one piece of machine code is known by."""
    return function, warps, aligned, config.code_key()


@functools.cache
def device(index: int) -> Device:
    return Device(index)


def capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@functools.cache
def triton_version() -> str:
    """Without importing Triton."""
    for name in ("triton", "pytorch-triton"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "?"


def facts() -> dict[str, str]:
    """What programs for a GPU depend on, for the keys of caches."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"GPUs": ", ".join(f"sm_{capability(index)}" for index in range(count)) or "none", "Triton": triton_version()}


# ---------------------------------------------------------------- launching

# Arguments of the launcher, each an i64: the table of functions; the kernel, and the number of its twin for any address; how many
# addresses there are, programs, threads, bytes of shared memory; stream, context; the number of parameters, and the parameters,
# addresses first; the host's error slot.
LAUNCHER = spelled_out(r"""
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
  if sgt i64 %programs, 0 then %next else %done
next:
  %i = phi i64 [0, %entry], [%i.next, %take]
  %bits = phi i64 [0, %entry], [%bits.next, %take]
  if slt i64 %i, %count then %take else %ready
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
  if eq i64 %rest, 0 then %launch else %unaligned
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
  if ne i32 %result, 0 then %report else %done
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
FindTwin = Callable[[], tuple[int, int]]        # its (handle, shared bytes)


class Twins:
    """Functions by number, for launches whose addresses are not aligned."""

    def __init__(self) -> None:
        self.known: list[FindTwin] = []
        self.numbers: dict[tuple, int] = {}
        self.callback = TWIN(self.find)

    def number(self, key: tuple, find: FindTwin) -> int:
        if key not in self.numbers:
            self.known.append(find)
            self.numbers[key] = len(self.known) - 1
        return self.numbers[key]

    def find(self, number: int, shared: Any) -> int:
        """The function that takes any address, and at `shared` how much shared memory it needs, which differs; called from machine code."""
        counters["native"]["unaligned_launches"] += 1
        handle, shared[0] = self.known[number]()
        return handle


twins = Twins()


@functools.cache
def table() -> Any:
    """Addresses of the functions that the launcher calls."""
    names = ("cuLaunchKernel", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    callback = ctypes.cast(twins.callback, ctypes.c_void_p).value or 0
    return (ctypes.c_int64 * 4)(*(driver().address(name) for name in names), callback)


class Function(NamedTuple):
    """A loaded function, as launches name it."""
    handle: int
    shared: int
    twin: int       # number
    place: int      # of its device among all


def loaded(own: Device, key: tuple, binary: Binary, find_twin: FindTwin) -> Function:
    return Function(*own.known(key, binary), twins.number((own.index, *key), find_twin), own.index)


# ---------------------------------------------------------------- errors of kernels, and what host functions name

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


def scope() -> dict[str, Any]:
    """What a host function names that launches kernels."""
    return {"flag": flag().word, "index_error_of_earlier": flag().take, "current_stream": torch._C._cuda_getCurrentRawStream}


# ---------------------------------------------------------------- words of recipes

FINDERS: Table[Callable[[Function], int]] = Table("word of a launch", "runtime/cuda.py")
FINDERS.rows({
    "table": lambda function: ctypes.addressof(table()), "function": lambda function: function.handle, "shared": lambda function: function.shared,
    "twin": lambda function: function.twin, "context": lambda function: device(function.place).context.value or 0,
    "flag": lambda function: flag().address,
})


def word(kind: str, function: Function, name: Any) -> Word:
    """A word of a function's launch, which is written as (kind, name)."""
    return Word.of(FINDERS[kind](function), kind, name)


def found(cell: Sequence[Any], functions: Sequence[Function]) -> int:
    """The word that was written so, in this process; names are places in `functions`."""
    kind, place = cell
    return word(kind, functions[place], place)
