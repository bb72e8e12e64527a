"""The warps of GPU kernels, measured.  fs.compile(mode="max-autotune").

In: a Plan and its kernels.  Out: the kernels, each with the number of warps that ran it fastest.  A kernel of known size and one function is compiled
for half, twice and four times as many warps as the cost model gave it, and each of them runs `LAUNCHES` times as a CUDA graph, on memory of its own
(zeros) of the sizes that the program has.  The best is kept in memory and in the cache on disk, by the kernel's text and size and the device's name.

    tuned(plan, kernels)
"""
from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from firesteel import artifacts
from firesteel.artifacts import counters
from firesteel.codegen.triton import GpuKernel
from firesteel.loops.plan import Plan, numbytes
from firesteel.runtime import cuda, diskcache, gpu

MOST_WARPS = 16
LAUNCHES, ROUNDS = 10, 3
GAIN = 0.97             # of the time that the cost model's choice takes: less is noise
MOST_BYTES = 8 << 30    # of memory to measure in

_chosen: dict[str, int] = {}        # `_key` -> warps


def tuned(plan: Plan, kernels: Sequence[GpuKernel]) -> list[GpuKernel]:
    """The kernels with the best of their warps, equal ones measured once."""
    if torch.cuda.is_current_stream_capturing():
        return list(kernels)
    device = cuda.device(torch.cuda.current_device())
    name = torch.cuda.get_device_name(device.index)
    measured = {_key(kernel, name): (kernel, sizes) for kernel in kernels if (sizes := _sizes(plan, kernel))}
    new = {key: found for key, found in measured.items() if _known(key) is None}
    gpu.load_functions(device, [(candidate, candidate.passes[0], True) for kernel, _ in new.values() for candidate in candidates(kernel)])
    for key, (kernel, sizes) in new.items():
        try:
            _keep(key, _best(kernel, functools.partial(_time, device, sizes)))
        except RuntimeError as error:       # there is too little memory, say
            artifacts.logger.warning("%s was not measured and keeps the cost model's warps: %s", kernel.title or kernel.symbol, error)
    return [with_warps(kernel, _known(key) or kernel.passes[0].warps) if (key := _key(kernel, name)) in measured else kernel for kernel in kernels]


def _sizes(plan: Plan, kernel: GpuKernel) -> list[int]:
    """Bytes of the buffers of a kernel that is measured; nothing of others."""
    found = [numbytes(plan.program.buffers[name]) for name in kernel.buffers]
    known = [size for size in found if isinstance(size, int)]
    measured = len(kernel.passes) == 1 and not kernel.symbols and not kernel.scratch and len(known) == len(found) and sum(known) <= MOST_BYTES
    return known if measured else []


def candidates(kernel: GpuKernel) -> list[GpuKernel]:
    """The cost model's choice first."""
    warps = kernel.passes[0].warps
    return [with_warps(kernel, count) for count in (warps, warps // 2, 2 * warps, 4 * warps) if 1 <= count <= MOST_WARPS]


def with_warps(kernel: GpuKernel, warps: int) -> GpuKernel:
    return replace(kernel, passes=(replace(kernel.passes[0], warps=warps),))


def _best(kernel: GpuKernel, time: Any) -> int:
    times = {candidate.passes[0].warps: time(candidate) for candidate in candidates(kernel)}
    first, best = kernel.passes[0].warps, min(times, key=lambda warps: times[warps])
    counters["native"]["measured_kernels"] += 1
    shown = {warps: round(1e3 * spent, 2) for warps, spent in times.items()}
    artifacts.log("perf", lambda: f"{kernel.title or kernel.symbol}: microseconds by warps {shown}")
    return best if times[best] < GAIN * times[first] else first


def _time(device: cuda.Device, sizes: Sequence[int], kernel: GpuKernel) -> float:
    """Milliseconds of a launch, the best round's."""
    memory = [torch.zeros(max(size, 16), dtype=torch.uint8, device=f"cuda:{device.index}") for size in sizes]
    words = [ctypes.c_uint64(word) for word in (*(m.data_ptr() for m in memory), cuda.flag().address, 0, 0)]
    places = (ctypes.c_void_p * len(words))(*map(ctypes.addressof, words))
    one = kernel.passes[0]
    handle, shared = device.loaded[gpu.key_of(one, True)]
    graph, start, end = torch.cuda.CUDAGraph(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device.index)        # the memory is zero
    with torch.cuda.stream(torch.cuda.Stream(device.index)):       # torch.cuda.graph would empty the allocator's cache
        stream = ctypes.c_void_p(torch.cuda.current_stream(device.index).cuda_stream)
        launch = functools.partial(cuda.driver().call, "cuLaunchKernel", ctypes.c_void_p(handle), one.programs, 1, 1, 32 * one.warps, 1, 1, shared,
                                   stream, places, None)
        launch()        # the driver loads a function at its first launch, which a capture may not do
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(LAUNCHES):
                launch()
        finally:
            graph.capture_end()
        return min([_replayed(graph, start, end) for _ in range(ROUNDS + 1)][1:])


def _replayed(graph: Any, start: Any, end: Any) -> float:
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / LAUNCHES


# ---------------------------------------------------------------- what is known

def _key(kernel: GpuKernel, name: str) -> str:
    return f"{kernel.symbol} {kernel.passes[0].programs} {name}"


def _known(key: str) -> int | None:
    if key not in _chosen and (found := diskcache.kernels(".tuned").get(key)) is not None:
        _chosen[key] = int(found)
    return _chosen.get(key)


def _keep(key: str, warps: int) -> None:
    _chosen[key] = warps
    diskcache.kernels(".tuned").put(key, str(warps).encode())
