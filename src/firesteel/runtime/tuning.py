"""Tiles and warps of GPU kernels, measured.  fs.compile(mode="max-autotune").

In: a Plan and its kernels.  Out: the kernels, each as it ran fastest.  A kernel of known sizes is printed with other tiles than the cost model gave
it (`triton.tilings`); then the quickest, where it is one function, is compiled for half, twice and four times as many warps.  Each candidate runs
`LAUNCHES` times as a CUDA graph, on memory of its own (zeros) of the sizes that the program has.  What is best is kept in memory and in the cache on
disk, by the kernel's text and size and the device's name.

    tuned(plan, kernels)
"""
from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from firesteel import artifacts
from firesteel.artifacts import counters
from firesteel.codegen.triton import GpuKernel, count_tilings, print_nest
from firesteel.loops.ir import Nest
from firesteel.loops.plan import Plan, Run, numbytes
from firesteel.runtime import cuda, diskcache, gpu

MOST_WARPS = 16
LAUNCHES, ROUNDS = 10, 3
GAIN = 0.97             # of the time that the cost model's choice takes: less is noise
MOST_BYTES = 8 << 30    # of memory to measure in

_chosen: dict[str, tuple[int, int]] = {}        # `_key` -> number of its tiling, warps (0: the cost model's)
Measured = tuple[GpuKernel, Sequence[int], list[GpuKernel]]     # a kernel, bytes of its buffers, it with every tiling


def tuned(plan: Plan, kernels: Sequence[GpuKernel]) -> list[GpuKernel]:
    """The kernels as they are quickest, equal ones measured once."""
    if torch.cuda.is_current_stream_capturing():
        return list(kernels)
    device = cuda.device(torch.cuda.current_device())
    name = torch.cuda.get_device_name(device.index)
    nests = {step.step.name: step.step.nest for step in plan.steps if isinstance(step, Run) and step.step.nest}
    measured = {_key(kernel, name): (kernel, sizes, nests.get(kernel.name)) for kernel in kernels if (sizes := _sizes(plan, kernel))}
    new: dict[str, Measured] = {key: (kernel, sizes, tiled(kernel, nest, plan)) for key, (kernel, sizes, nest) in measured.items() if not _known(key)}
    try:
        _measure(device, new)
    except RuntimeError as error:       # there is too little memory, say
        titles = ", ".join(kernel.title or kernel.symbol for kernel, _, _ in new.values())
        artifacts.logger.warning("%s: not measured, the cost model's choices stay: %s", titles, error)
    return [_as_chosen(kernel, nests.get(kernel.name), plan, _key(kernel, name)) for kernel in kernels]


def tiled(kernel: GpuKernel, nest: Nest | None, plan: Plan) -> list[GpuKernel]:
    """The kernel with every tiling, its own first; alone where it is of several nests."""
    buffers = plan.program.buffers
    if nest is None or print_nest(nest, buffers).symbol != kernel.symbol:
        return [kernel]
    return [kernel, *(print_nest(nest, buffers, number) for number in range(1, count_tilings(nest, buffers)))]


def _as_chosen(kernel: GpuKernel, nest: Nest | None, plan: Plan, key: str) -> GpuKernel:
    number, warps = _known(key) or (0, 0)
    if number and nest is not None:
        kernel = print_nest(nest, plan.program.buffers, number)
    return with_warps(kernel, warps) if warps else kernel


def _measure(device: cuda.Device, new: Mapping[str, Measured]) -> None:
    """First tiles, then warps; what is compiled for all of them is compiled side by side."""
    best = _quickest(device, {key: (options, sizes) for key, (_, sizes, options) in new.items()})
    warps = _quickest(device, {key: (candidates(options[best[key]]), sizes) for key, (_, sizes, options) in new.items()})
    for key, (_, _, options) in new.items():
        chosen = candidates(options[best[key]])[warps[key]]
        _keep(key, best[key], chosen.passes[0].warps if warps[key] else 0)


def _quickest(device: cuda.Device, asked: Mapping[str, tuple[list[GpuKernel], Sequence[int]]]) -> dict[str, int]:
    """Which of some kernels is the quickest, by its number: the first but for clear gains."""
    several = [kernel for options, _ in asked.values() if len(options) > 1 for kernel in options]
    gpu.load_functions(device, [(kernel, one, True) for kernel in several for one in kernel.passes])
    return {key: _best(options, functools.partial(_time, device, sizes)) if len(options) > 1 else 0 for key, (options, sizes) in asked.items()}


def _sizes(plan: Plan, kernel: GpuKernel) -> list[int]:
    """Bytes of the buffers of a kernel that is measured; nothing of others."""
    found = [numbytes(plan.program.buffers[name]) for name in kernel.buffers]
    known = [size for size in found if isinstance(size, int)]
    return known if not kernel.symbols and len(known) == len(found) and sum(known) <= MOST_BYTES else []


def candidates(kernel: GpuKernel) -> list[GpuKernel]:
    """With other warps, the cost model's choice first; alone where it is several functions."""
    if len(kernel.passes) > 1:
        return [kernel]
    warps = kernel.passes[0].warps
    return [with_warps(kernel, count) for count in (warps, warps // 2, 2 * warps, 4 * warps) if 1 <= count <= MOST_WARPS]


def with_warps(kernel: GpuKernel, warps: int) -> GpuKernel:
    return replace(kernel, passes=(replace(kernel.passes[0], warps=warps),))


def _best(options: Sequence[GpuKernel], time: Any) -> int:
    times = [time(option) for option in options]
    best = min(range(len(times)), key=times.__getitem__)
    counters["native"]["measured_kernels"] += 1
    shown = [f"{option.passes[0].programs} x {option.passes[0].warps} warps {1e3 * spent:.2f}" for option, spent in zip(options, times)]
    artifacts.log("perf", lambda: f"{options[0].title or options[0].symbol}: microseconds of {', '.join(shown)}")
    return best if times[best] < GAIN * times[0] else 0


def _time(device: cuda.Device, sizes: Sequence[int], kernel: GpuKernel) -> float:
    """Milliseconds of a kernel, the best round's."""
    places, scratch = gpu.scratch_places(kernel)
    memory = [torch.zeros(max(size, 16), dtype=torch.uint8, device=f"cuda:{device.index}") for size in (*sizes, int(scratch))]      # type: ignore[arg-type]
    addresses = [m.data_ptr() for m in memory]
    words = [ctypes.c_uint64(word) for word in (*addresses[:-1], *(addresses[-1] + place for place in places), cuda.flag().address, 0, 0)]      # type: ignore[arg-type]
    parameters = (ctypes.c_void_p * len(words))(*map(ctypes.addressof, words))
    graph, start, end = torch.cuda.CUDAGraph(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device.index)        # the memory is zero
    with torch.cuda.stream(torch.cuda.Stream(device.index)):       # torch.cuda.graph would empty the allocator's cache
        stream = ctypes.c_void_p(torch.cuda.current_stream(device.index).cuda_stream)

        def launch() -> None:
            for one in kernel.passes:
                handle, shared = device.loaded[gpu.key_of(one, True)]
                cuda.driver().call("cuLaunchKernel", ctypes.c_void_p(handle), one.programs, 1, 1, 32 * one.warps, 1, 1, shared, stream, parameters,
                                   None)
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
    return f"tiles {kernel.symbol} {kernel.passes[0].programs} {name}"


def _known(key: str) -> tuple[int, int] | None:
    if key not in _chosen and (found := diskcache.kernels(".tuned").get(key)) is not None:
        number, warps = map(int, found.split())
        _chosen[key] = number, warps
    return _chosen.get(key)


def _keep(key: str, number: int, warps: int) -> None:
    _chosen[key] = number, warps
    diskcache.kernels(".tuned").put(key, f"{number} {warps}".encode())
