"""Guard zones: a pattern before and behind every buffer that a host function allocates on the CPU, looked at after every kernel.

A Plan whose `zone` is not 0 (fs.config.verify) leaves that many bytes on both sides of each place in the arena; the host function then
makes a `Zones` a call, runs its kernels one by one, and looks at all zones after each: a hit is an InternalError that names the
kernel and the buffer.  Tensors that leave the call are copied out, so that users see storages of the usual size and offset.

    zones = Zones(empty)
    b_y = zones.empty("y", (s0, 4), (4, 1), torch.float32)
    if run_0(...): raise index_error()
    zones.check("kernel mul_1")
    b_y = zones.leave(b_y)
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from firesteel.errors import InternalError

ZONE = 256      # bytes: what the widest vectors of a row write, and a multiple of the arena's alignment
PATTERN = bytes((37 * k + 0xA5) % 256 for k in range(ZONE))

Empty = Callable[[tuple, tuple, torch.dtype], torch.Tensor]


class Zones:
    """The zones of one call: buffer -> (address before it, address behind it)."""

    __slots__ = ("_empty", "_held", "_storages")

    def __init__(self, empty: Empty):
        self._empty = empty                         # of the host function: it passes by modes of the user's
        self._held: dict[str, tuple[int, int]] = {}
        self._storages: set[int] = set()            # addresses of the tensors' storages

    def empty(self, name: str, shape: tuple, strides: tuple, dtype: torch.dtype) -> torch.Tensor:
        """Fresh memory between two zones, which is a storage of its own: library calls count offsets from its start."""
        size = _extent(shape, strides) * dtype.itemsize
        whole = self._empty((size + 2 * ZONE,), (1,), torch.uint8)
        inside = whole.untyped_storage()[ZONE:ZONE + size]
        self._storages.add(whole.data_ptr() + ZONE)
        self.place(name, whole.data_ptr() + ZONE, size)
        with torch._C._DisableTorchDispatch():
            return self._empty((0,), (1,), dtype).set_(inside, 0, shape, strides)

    def place(self, name: str, address: int, size: int) -> None:
        """Paints the zones around bytes that were allocated together with them."""
        before, behind = address - ZONE, address + max(size, 0)
        for start in (before, behind):
            ctypes.memmove(start, PATTERN, ZONE)
        self._held[name] = before, behind

    def drop(self, *names: str) -> None:
        """The buffers' memory is given back."""
        for name in names:
            self._held.pop(name, None)

    def move(self, old: str, new: str) -> None:
        """The buffer's memory becomes another's."""
        if old in self._held:
            self._held[new] = self._held.pop(old)

    def check(self, step: str) -> None:
        """Has the kernel, or the library call, that just ran written outside of a buffer?"""
        for name, zones in self._held.items():
            for where, start in zip(("before", "behind"), zones):
                if ctypes.string_at(start, ZONE) != PATTERN:
                    raise InternalError(f"The {step} wrote {where} the buffer {name}: {_hit(start, where)}.")

    def meets(self, call: str, result: torch.Tensor, shape: tuple, dtype: torch.dtype) -> None:
        """Is the result of a library call what its rule said?"""
        if tuple(result.shape) != shape or result.dtype is not dtype:
            raise InternalError(f"The library call {call} returned {result.dtype} {list(result.shape)}, its rule says {dtype} {list(shape)}.")

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in a storage without zones; one that a library call made, and that is no alias, is itself."""
        if tensor.untyped_storage().data_ptr() not in self._storages:
            return tensor
        fresh = self._empty(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        ctypes.memmove(fresh.data_ptr(), tensor.data_ptr(), _extent(tensor.shape, tensor.stride()) * tensor.itemsize)
        return fresh


def _extent(shape: tuple, strides: tuple) -> int:
    """Elements from the first to behind the last."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides))


def _hit(start: int, where: str) -> str:
    """How far from the buffer the bytes are that changed."""
    found = ctypes.string_at(start, ZONE)
    changed = [k for k in range(ZONE) if found[k] != PATTERN[k]]
    near, far = (changed[0], changed[-1] + 1) if where == "behind" else (ZONE - 1 - changed[-1], ZONE - changed[0])
    return f"{len(changed)} bytes, {near} to {far} bytes away from it"
