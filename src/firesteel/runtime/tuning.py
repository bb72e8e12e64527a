"""Tiles and warps of GPU kernels, measured beside the program.  fs.compile(mode="max-autotune").

In: a Plan, its kernels and the function that runs them.  Out: a function that runs the same with the cost model's choices at first, and with what was
quickest once that is known.  A kernel of known sizes is printed with other tiles than the cost model gave it (`triton.tilings`); then the quickest,
where it is one function, is compiled for half, twice and four times as many warps.  Candidates take turns, `LAUNCHES` launches each as a CUDA graph,
on memory of their own (zeros) of the sizes that the program has.  What is best is kept in memory and in the cache on disk, by the kernel's text and
size and the device's name: the next process begins with it.
 - One thread measures, on a stream of its own; it takes no memory that the program would miss, and disturbs no capture.
 - What fails is logged; the cost model's choices stay.  At the end of the process what waits is dropped.

    call = improving(plan, kernels, call, build)        # build: kernels -> a function that runs them
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from firesteel import artifacts
from firesteel.artifacts import counters
from firesteel.codegen.triton import GpuKernel, count_tilings, print_nest
from firesteel.loops.ir import Nest
from firesteel.loops.plan import Plan, Run, numbytes
from firesteel.runtime import cuda, diskcache, gpu, graphs

MOST_WARPS = 16
LAUNCHES, ROUNDS = 10, 6
GAIN = 0.97             # of the time that the cost model's choice takes: less is noise
MOST_BYTES = 8 << 30    # of memory to measure in,
SPARE = 4               # and one part in so many of what is free
RELAXED = 2             # a thread's calls while others capture: allowed

_chosen: dict[str, tuple[int, int]] = {}        # `_key` -> number of its tiling, warps (0: the cost model's)
Measured = tuple[GpuKernel, Sequence[int], list[GpuKernel]]     # a kernel, bytes of its buffers, it with every tiling


def tuned(plan: Plan, kernels: Sequence[GpuKernel]) -> list[GpuKernel]:
    """The kernels as they are known to be quickest."""
    name, nests = torch.cuda.get_device_name(torch.cuda.current_device()), _nests(plan)
    return [_as_chosen(kernel, nests.get(kernel.name), plan, _key(kernel, name)) for kernel in kernels]


def improving(plan: Plan, kernels: Sequence[GpuKernel], call: Any, build: Callable[[list[GpuKernel]], Any]) -> Any:
    """The function, which changes to quicker kernels when they are found; `kernels` are the cost model's."""
    index = torch.cuda.current_device()
    if not _asked(plan, kernels, torch.cuda.get_device_name(index)):
        return call
    made = call if isinstance(call, graphs.Recording) else Improving(call)
    made.measuring = True
    _background.submit(_improve, plan, kernels, index, made, build)
    return made


class Improving:
    """A host function that another one may take the place of."""
    measuring = False

    def __init__(self, call: Any):
        self.call, self.source, self.counts, self._boxed_call = call, call.source, call.counts, call._boxed_call

    def __call__(self, *given: Any) -> tuple:
        return self.call(*given)

    def renew(self, call: Any) -> None:
        self.call = call


# ---------------------------------------------------------------- on the other thread

class Background:
    """The thread that measures."""

    def __init__(self) -> None:
        self.start()
        with contextlib.suppress(AttributeError, RuntimeError):      # runs before threads are waited for, which atexit does not
            threading._register_atexit(lambda: self.jobs.shutdown(wait=False, cancel_futures=True))     # type: ignore[attr-defined]

    def start(self) -> None:
        self.jobs = ThreadPoolExecutor(1, "firesteel-tuning")

    def submit(self, job: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):     # the process ends
            self.jobs.submit(job, *args)

    def wait(self) -> None:
        """Until all is measured that was to be."""
        self.jobs.submit(lambda: None).result()


_background = Background()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_background.start)       # the thread is the parent's


def _improve(plan: Plan, kernels: Sequence[GpuKernel], index: int, made: Any, build: Callable[[list[GpuKernel]], Any]) -> None:
    try:
        with torch.cuda.device(index):
            before = tuned(plan, kernels)
            best = measured(plan, kernels)
            if best != before:
                call = build(best)
                call.counts = made.counts
                made.renew(call)
                counters["native"]["improved_programs"] += 1
    except Exception as error:      # there is too little memory, say
        titles = ", ".join(kernel.title or kernel.symbol for kernel in kernels)
        artifacts.logger.warning("%s: not measured, the cost model's choices stay: %s", titles, error)


def measured(plan: Plan, kernels: Sequence[GpuKernel]) -> list[GpuKernel]:
    """The kernels as they are quickest, equal ones measured once."""
    device = cuda.device(torch.cuda.current_device())
    cuda.driver().call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(RELAXED)))
    nests, asked = _nests(plan), _asked(plan, kernels, torch.cuda.get_device_name(device.index))
    _measure(device, {key: (kernel, sizes, tiled(kernel, nests.get(kernel.name), plan)) for key, (kernel, sizes) in asked.items()})
    return tuned(plan, kernels)


def _nests(plan: Plan) -> dict[str, Nest]:
    return {step.step.name: step.step.nest for step in plan.steps if isinstance(step, Run) and step.step.nest}


def _asked(plan: Plan, kernels: Sequence[GpuKernel], name: str) -> dict[str, tuple[GpuKernel, Sequence[int]]]:
    """Kernels that are to be measured and the bytes of their buffers, by key."""
    found = {_key(kernel, name): (kernel, sizes) for kernel in kernels if (sizes := _sizes(plan, kernel))}
    return {key: asked for key, asked in found.items() if not _known(key)}


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
    return {key: _best(device, options, sizes) if len(options) > 1 else 0 for key, (options, sizes) in asked.items()}


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


def _best(device: cuda.Device, options: Sequence[GpuKernel], sizes: Sequence[int]) -> int:
    """They take turns: what the program does meanwhile hits all of them alike."""
    memory = _memory(device, sizes)
    clocks = [_clock(device, memory, option) for option in options]
    times = [min(round) for round in zip(*([clock() for clock in clocks] for _ in range(ROUNDS)))]
    best = min(range(len(times)), key=times.__getitem__)
    counters["native"]["measured_kernels"] += 1
    shown = [f"{option.passes[0].programs} x {option.passes[0].warps} warps {1e3 * spent:.2f}" for option, spent in zip(options, times)]
    artifacts.log("perf", lambda: f"{options[0].title or options[0].symbol}: microseconds of {', '.join(shown)}")
    return best if times[best] < GAIN * times[0] else 0


def _memory(device: cuda.Device, sizes: Sequence[int]) -> list[torch.Tensor]:
    free, _ = torch.cuda.mem_get_info(device.index)
    if sum(sizes) > free // SPARE:
        raise RuntimeError(f"{sum(sizes)} bytes are needed, and {free} are free")
    return [torch.zeros(max(size, 16), dtype=torch.uint8, device=f"cuda:{device.index}") for size in sizes]


def _clock(device: cuda.Device, memory: Sequence[torch.Tensor], kernel: GpuKernel) -> Callable[[], float]:
    """What tells the milliseconds of a launch, on average over some of them."""
    places, scratch = gpu.scratch_places(kernel)
    own = torch.zeros(max(int(scratch), 16), dtype=torch.uint8, device=f"cuda:{device.index}")      # type: ignore[arg-type]
    addresses = [*(m.data_ptr() for m in memory), *(own.data_ptr() + int(place) for place in places)]       # type: ignore[arg-type]
    words = [ctypes.c_uint64(word) for word in (*addresses, cuda.flag().address, 0, 0)]
    parameters = (ctypes.c_void_p * len(words))(*map(ctypes.addressof, words))
    stream, start, end = torch.cuda.Stream(device.index), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph = graphs.CapturedCall(device.index, stream.cuda_stream)
    torch.cuda.current_stream(device.index).synchronize()       # the memory is zero

    def launch(times: int) -> tuple:
        where = ctypes.c_void_p(torch.cuda.current_stream(device.index).cuda_stream)
        for one in kernel.passes * times:
            handle, shared = device.loaded[gpu.key_of(one, True)]
            cuda.driver().call("cuLaunchKernel", ctypes.c_void_p(handle), one.programs, 1, 1, 32 * one.warps, 1, 1, shared, where, parameters, None)
        return ()

    def once() -> float:
        with torch.cuda.stream(stream):
            start.record()
            graph.replay()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / LAUNCHES
    with torch.cuda.stream(stream):
        launch(1)       # the driver loads a function at its first launch, which a capture may not do
    stream.synchronize()
    graph.capture(lambda: launch(LAUNCHES))
    once.held = own, words, parameters      # type: ignore[attr-defined]        # as long as the graph
    return once


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
