"""A host function recorded as a CUDA graph: one launch for all kernels and library calls of a call.  fs.compile(mode="reduce-overhead").

In: a Plan and its host function.  Out: a callable of the same inputs, or the host function itself where `refusal` names a reason.

How
 1. The first two calls run as always.  Small inputs that are only read and whose addresses differ between them move; the others stay.
 2. The third call records: what moves is copied into memory of the graph's first, what stays is used, and mutated, in place.
 3. Later calls compare the addresses of what stays, copy what moves, and replay.  A small input whose address changes after all becomes one that
    moves, and the call records again.  Where a large or written one does (the cache of the next text), the next call that finds it there records.
 4. Recording costs some calls' time: a program that is not recorded in MOST_WAITED calls, or whose recordings were replayed less than PAYS times
    MOST_RECORDINGS times in a row, is left to the host function.
 5. Results are copied out of the graph's memory, so that they live as long as eager's.
What always holds: a call on another stream or device than the recorded one, while another thread replays, or inside of somebody else's capture runs
the host function.  Versions of written inputs rise as if it had run.  An index out of range is reported as by the host function, a call later.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel import artifacts
from firesteel.artifacts import counters
from firesteel.loops.group import keeps_order
from firesteel.loops.ir import Expr, Extern, Given, View
from firesteel.loops.plan import Plan, numbytes
from firesteel.runtime import cuda, gpu
from firesteel.targets import on_gpu

MOST_COPIED = 32 << 20          # bytes of results, and of inputs that move
MOST_RECORDINGS = 4
MOST_WAITED = 64
PAYS = 16                       # replays that are worth a recording
FEW_STEPS = 4                   # fewer are launched as quickly one by one
WARM_CALLS = 2


def recorded(plan: Plan, call: Callable[..., tuple]) -> Callable[..., tuple]:
    """The host function, recorded where that is safe and pays."""
    why = refusal(plan)
    if why:
        artifacts.log("perf", lambda: f"a program is not recorded as a CUDA graph: {why}")
        return call
    return Recording(plan, call)


def refusal(plan: Plan) -> str:
    """Why a program is not recorded; "" if it is."""
    program, buffers = plan.program, plan.program.buffers
    calls = [step.call for step in program.steps if step.call]
    results = [output for output in program.outputs if isinstance(output, View)]
    sizes = [numbytes(buffers[output.buffer]) for output in results]
    reasons = {
        "it has few steps": len(program.steps) < FEW_STEPS,
        "its sizes are symbols": bool(program.symbols) or any(isinstance(output, Expr) for output in program.outputs),
        "its inputs are given away": program.boxed,
        "its buffers are on several devices": len({buffer.device for buffer in buffers.values()}) != 1,
        "it draws random numbers or meets other ranks": any(keeps_order(step.target) and not _drops_nothing(step) for step in calls),
        "its sizes depend on data": any(step.bound_symbols(buffers) for step in calls),
        "it takes a generator": any(isinstance(arg, Given) for step in calls for arg in step.arguments()),
        "results are views": any(buffers[r.buffer].kind in ("input", "constant") for r in results) or len({r.buffer for r in results}) < len(results),
        "copies of its results would cost too much": sum(size for size in sizes if isinstance(size, int)) > MOST_COPIED,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _drops_nothing(step: Extern) -> bool:
    """Is it attention, which draws random numbers only to drop weights, and drops none?"""
    names = [argument.name for argument in step.target._schema.arguments] if isinstance(step.target, torch._ops.OpOverload) else []
    if "dropout_p" not in names:
        return False
    given = dict(zip(names, step.args)) | step.kwargs
    return given.get("dropout_p", 0.0) == 0.0


class Recording:
    """The callable; holds the graph when there is one."""
    _boxed_call = False

    def __init__(self, plan: Plan, call: Callable[..., tuple]):
        self.call, program = call, plan.program
        self.tensors = [k for k, name in enumerate(program.inputs) if name is not None and name in program.buffers]
        written = {name for step in program.steps for name in step.writes()}
        self.written = [k for k in self.tensors if program.inputs[k] in written]
        self.index = gpu.device_index(next(iter(program.buffers.values())).device)
        self.lock = threading.Lock()
        self.waited = 0                         # calls of the host function since the last recording; those before the first count there
        self.recordings = self.replays = self.poor = 0      # in all; since the last recording; recordings in a row that did not pay
        self.addresses: list[int] = []          # of `tensors`, at the last call that looked
        self.moving: dict[int, Any] = {}        # input -> the graph's copy
        self.graph: Any = None
        self.rises: list[int] = []              # written inputs, each as often as its version rises
        self.stream = 0
        self.results: tuple = ()
        self.fresh: list[int] = []              # those in the graph's memory
        self.source = getattr(call, "source", "")

    def __call__(self, *inputs: Any) -> tuple:
        if self.waited < 0 or not self.lock.acquire(blocking=False):
            return self.call(*inputs)
        try:
            return self._run(inputs)
        finally:
            self.lock.release()

    def _run(self, inputs: Sequence[Any]) -> tuple:
        if torch.cuda.is_current_stream_capturing() or torch.cuda.current_device() != self.index:
            return self.call(*inputs)
        addresses = [inputs[k].data_ptr() for k in self.tensors]
        moved = self._moved(addresses)
        if self.graph is not None and not moved:
            return self._replay(inputs) if self.stream == torch._C._cuda_getCurrentRawStream(self.index) else self.call(*inputs)
        self.addresses = addresses
        self.waited += 1
        held = [k for k in moved if not self._can_move(k, inputs)]
        if self.waited > WARM_CALLS and not held:
            return self._record(inputs)
        self.graph, self.results = None, ()
        if self.waited > MOST_WAITED:
            return self._give_up("addresses of inputs that are large, mutated or self-overlapping change with each call", inputs)
        return self.call(*inputs)

    def _moved(self, addresses: Sequence[int]) -> list[int]:
        """Inputs whose address has changed, except for those known to move."""
        if addresses == self.addresses:
            return []
        return [k for k, old, new in zip(self.tensors, self.addresses, addresses) if old != new and k not in self.moving]

    def _can_move(self, k: int, inputs: Sequence[Any]) -> bool:
        """Makes an input one that is copied, where that is possible."""
        if k in self.written or torch._debug_has_internal_overlap(inputs[k]) or sum(inputs[i].nbytes for i in (k, *self.moving)) > MOST_COPIED:
            return False
        self.moving[k] = None
        return True

    def _record(self, inputs: Sequence[Any]) -> tuple:
        self.graph, self.results = None, ()
        self.poor = self.poor + 1 if self.recordings and self.replays < PAYS else 0
        if self.poor >= MOST_RECORDINGS:
            return self._give_up("addresses of its inputs change after a few calls", inputs)
        self.recordings, self.replays, self.waited = self.recordings + 1, 0, WARM_CALLS
        self.moving = {k: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for k in self.moving for x in (inputs[k],)}
        graph, before = torch.cuda.CUDAGraph(), self._versions(inputs)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = self.call(*(self.moving.get(k, x) for k, x in enumerate(inputs)))
        except RuntimeError as error:       # a library call that waits for the device, say
            return self._give_up(str(error), inputs)
        self.graph, self.results, self.stream = graph, results, torch._C._cuda_getCurrentRawStream(self.index)
        self.fresh = [k for k, result in enumerate(results) if isinstance(result, torch.Tensor) and on_gpu(result)]
        self.rises = [k for k, new in self._versions(inputs).items() for _ in range(new - before[k])]
        counters["native"]["recorded_graphs"] += 1
        return self._launch(inputs)

    def _give_up(self, why: str, inputs: Sequence[Any]) -> tuple:
        self.waited = -1
        artifacts.log("perf", lambda: f"a program is not recorded as a CUDA graph: {why}")
        return self.call(*inputs)

    def _versions(self, inputs: Sequence[Any]) -> dict[int, int]:
        """Of the written inputs; inference tensors have none."""
        return {k: inputs[k]._version for k in self.written if not inputs[k].is_inference()}

    def _replay(self, inputs: Sequence[Any]) -> tuple:
        if cuda.flag().word.value:
            raise cuda.flag().take()
        results = self._launch(inputs)
        if self.rises:
            torch.autograd.graph.increment_version([inputs[k] for k in self.rises])
        return results

    def _launch(self, inputs: Sequence[Any]) -> tuple:
        if self.moving:
            torch._foreach_copy_(list(self.moving.values()), [inputs[k] for k in self.moving])
        self.graph.replay()
        counters["native"]["replays"] += 1
        self.replays += 1
        results = list(self.results)
        for k in self.fresh:
            results[k] = _copied(results[k])
        return tuple(results)


def _copied(result: Any) -> Any:
    """What the next replay does not overwrite."""
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device).copy_(result)
