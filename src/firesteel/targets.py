"""Targets: the kinds of devices that programs run on, a row of facts each.  No other file names a kind.

Shape rules ask `on_host(x)` and `on_gpu(x)`, since eager's kernels differ; the planner, the host function and the partitioner read the row.
What makes code for a kind is a row of `pipeline.TARGETS`.

    kind_of("cuda:1").arena      # False
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from firesteel.records import dataclass
from firesteel.table import Table

CPU, CUDA = "cpu", "cuda"
HOST = torch.device(CPU)


@dataclass(frozen=True)
class DeviceKind:
    arena: bool                     # temporaries of a call share one allocation, with guard zones; elsewhere the allocator keeps freed memory
    block: int                      # bytes: the allocator gives whole blocks
    wait: Callable[[], Any]         # until the device has done what it was asked for
    images: tuple[torch.dtype, ...]     # its library convolves images of these channels-last, and copies others into that format


KINDS: Table[DeviceKind] = Table("kind of device", "targets.py")
KINDS.add(CPU, DeviceKind(True, 1, lambda: None, (torch.float32, torch.bfloat16) if torch.backends.mkldnn.is_available() else ()))
KINDS.add(CUDA, DeviceKind(False, 512, torch.cuda.synchronize, (torch.float16, torch.bfloat16)))


def kind_of(device: str | torch.device) -> DeviceKind | None:
    return KINDS.get(torch.device(device).type)


def has_arena(device: str | torch.device) -> bool:
    return (kind := kind_of(device)) is not None and kind.arena


def on_host(x: Any) -> bool:
    """Is a tensor, or its Spec, in the memory of the host?"""
    return x.device.type == CPU


def on_gpu(x: Any) -> bool:
    return x.device.type == CUDA


def in_use() -> tuple[str, ...]:
    """The kinds that this process can compute on."""
    return (CPU, CUDA) if torch.cuda.is_available() else (CPU,)


def is_the_only_gpu(device: str) -> bool:
    """Is the current device always this one?"""
    return torch.device(device).type == CUDA and torch.cuda.device_count() == 1
