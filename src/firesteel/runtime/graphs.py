"""A host function recorded as a CUDA graph: one launch for all kernels and library calls of a call.  fs.compile(mode="reduce-overhead").

In: a Plan and its host function.  Out: a callable of the same inputs, or the host function itself where `refusal` names a reason.

How
 1. The first two calls run as always.  Small inputs that are only read and whose addresses differ between them move; the others stay.
 2. The third call records: what moves is copied into memory of the graph's first, what stays is used, and mutated, in place.
 3. Later calls compare the addresses of what stays, copy what moves, and replay.  A small input whose address changes after all becomes one that
    moves, and the call records again.  Where a large or written one does (the cache of the next text), the next call that finds it there records.
 4. Recording costs some calls' time: a program that is not recorded in MOST_WAITED calls, or whose recordings were replayed less than PAYS times
    MOST_RECORDINGS times in a row, is left to the host function.
 5. Results are copied out of the graph's memory, so that they live as long as eager's, but for those that are lent.
 6. Lent is what a forward saves for its backward, and what a backward returns: the graph's memory itself.  As long as somebody holds one of them (a
    second forward before the backward, gradients that are summed over several steps) the host function runs.  So forwards are replayed into the same
    memory, and backwards find their inputs where they were recorded.
What always holds: a call on another stream or device than the recorded one, while another thread replays, or inside of somebody else's capture runs
the host function.  Versions of written inputs rise as if it had run.  An index out of range is reported as by the host function, a call later.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
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


def recorded(plan: Plan, call: Callable[..., tuple], lent: Collection[int] = ()) -> Callable[..., tuple]:
    """The host function, recorded where that is safe and pays.  `lent`: results that are given out as they lie in the graph's memory."""
    lent = _with_aliases(plan, lent)
    why = refusal(plan, lent)
    if why:
        _tell(f"a program is not recorded as a CUDA graph: {why}")
        return call
    return Recording(plan, call, lent)


def _tell(what: str) -> None:
    artifacts.log("perf", lambda: what)


def _with_aliases(plan: Plan, lent: Collection[int]) -> frozenset[int]:
    """Of results that share memory all are lent, or none."""
    outputs = plan.program.outputs
    memory = {outputs[k].buffer for k in lent if isinstance(outputs[k], View)}
    return frozenset(k for k, output in enumerate(outputs) if isinstance(output, View) and output.buffer in memory)


def refusal(plan: Plan, lent: Collection[int] = ()) -> str:
    """Why a program is not recorded; "" if it is."""
    program, buffers = plan.program, plan.program.buffers
    calls = [step.call for step in program.steps if step.call]
    results = [output for output in program.outputs if isinstance(output, View)]
    copied = [output for k, output in enumerate(program.outputs) if isinstance(output, View) and k not in lent]
    sizes = [numbytes(buffers[output.buffer]) for output in copied]
    reasons = {
        "it has few steps": len(program.steps) < FEW_STEPS,
        "its sizes are symbols": bool(program.symbols) or any(isinstance(output, Expr) for output in program.outputs),
        "its inputs are given away": program.boxed and not lent,
        "its buffers are on several devices": len({buffer.device for buffer in buffers.values()}) != 1,
        "it draws random numbers or meets other ranks": any(keeps_order(step.target) and not drops_nothing(step) for step in calls),
        "other streams may read gradients": bool(lent) and torch.distributed.is_available() and torch.distributed.is_initialized(),
        "its sizes depend on data": any(step.bound_symbols(buffers) for step in calls),
        "it takes a generator": any(isinstance(arg, Given) for step in calls for arg in step.arguments()),
        "results are views": any(buffers[r.buffer].kind in ("input", "constant") for r in copied) or len({r.buffer for r in copied}) < len(copied),
        "results are constants, or inputs of another type": any(
            buffers[r.buffer].kind == "constant" or buffers[r.buffer].kind == "input" and r.dtype != buffers[r.buffer].dtype for r in results),
        "copies of its results would cost too much": sum(size for size in sizes if isinstance(size, int)) > MOST_COPIED,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def drops_nothing(step: Extern) -> bool:
    """Is it attention, which draws random numbers only to drop weights, and drops none?"""
    names = [argument.name for argument in step.target._schema.arguments] if isinstance(step.target, torch._ops.OpOverload) else []
    if "dropout_p" not in names:
        return False
    given = dict(zip(names, step.args)) | step.kwargs
    return given.get("dropout_p", 0.0) == 0.0


class Recording:
    """The callable; holds the graph when there is one."""

    def __init__(self, plan: Plan, call: Callable[..., tuple], lent: Collection[int] = ()):
        self.call, program = call, plan.program
        self._boxed_call = program.boxed
        self.tensors = [k for k, name in enumerate(program.inputs) if name is not None and name in program.buffers]
        written = {name for step in program.steps for name in step.writes()}
        self.written = [k for k in self.tensors if program.inputs[k] in written]
        self.lent = lent
        places = {program.inputs[k]: k for k in reversed(self.tensors)}
        self.given_back = {k: places[program.outputs[k].buffer] for k in lent if program.outputs[k].buffer in places}     # result -> input
        self.index = gpu.device_index(next(iter(program.buffers.values())).device)
        self.lock = threading.Lock()
        self.waited = 0                         # calls of the host function since the last recording; those before the first count there
        self.recordings = self.replays = self.poor = 0      # in all; since the last recording; recordings in a row that did not pay
        self.seen: list[int] = []               # addresses of `tensors`, at the last call,
        self.addresses: list[int] = []          # and where the graph expects them
        self.moves: set[int] = set()            # inputs to copy,
        self.moving: dict[int, Any] = {}        # and the graph's copies of them
        self.graph: Any = None
        self.rises: list[int] = []              # written inputs, each as often as its version rises
        self.stream = 0
        self.results: tuple = ()
        self.makers: list[Callable[[Any, Sequence[Any]], Any]] = []     # (result of the graph, inputs) -> result
        self.loans: list[tuple[int, int]] = []  # storages that are lent, and how many hold each while nobody else does
        self.source = getattr(call, "source", "")

    def __call__(self, *given: Any) -> tuple:
        if self.waited < 0 or not self.lock.acquire(blocking=False):
            return self.call(*given)
        try:
            return self._run(given)
        finally:
            self.lock.release()

    def _run(self, given: Sequence[Any]) -> tuple:
        inputs = given[0] if self._boxed_call else given
        if torch.cuda.is_current_stream_capturing() or torch.cuda.current_device() != self.index:
            return self.call(*given)
        addresses = [inputs[k].data_ptr() for k in self.tensors]
        if self.graph is not None and not self._elsewhere(addresses, self.addresses, self.moving):
            self.seen, self.waited = addresses, WARM_CALLS
            ready = self.stream == torch._C._cuda_getCurrentRawStream(self.index) and self._is_free()
            return self._replay(inputs) if ready else self.call(*given)
        held = [k for k in self._elsewhere(addresses, self.seen, self.moves) if not self._can_move(k, inputs)]
        self.seen = addresses
        self.waited += 1
        if self.waited > WARM_CALLS and not held:
            return self._record(given, inputs)
        if self.waited > MOST_WAITED:
            return self._give_up("addresses of inputs that are large, mutated or self-overlapping change with each call", given)
        return self.call(*given)

    def _elsewhere(self, addresses: Sequence[int], before: Sequence[int], moving: Collection[int]) -> list[int]:
        """Inputs whose address has changed, except for those that move."""
        if addresses == before:
            return []
        return [k for k, old, new in zip(self.tensors, before, addresses) if old != new and k not in moving]

    def _can_move(self, k: int, inputs: Sequence[Any]) -> bool:
        """Makes an input one that is copied, where that is possible."""
        if k in self.written or torch._debug_has_internal_overlap(inputs[k]) or sum(inputs[i].nbytes for i in (k, *self.moves)) > MOST_COPIED:
            return False
        self.moves.add(k)
        return True

    def _is_free(self) -> bool:
        """Is nothing of the last replay in use that the next one overwrites?"""
        count: Any = torch._C._storage_Use_Count
        return all(count(storage) == alone for storage, alone in self.loans)

    def _record(self, given: Sequence[Any], inputs: Sequence[Any]) -> tuple:
        self._forget()
        self.poor = self.poor + 1 if self.recordings and self.replays < PAYS else 0
        if self.poor >= MOST_RECORDINGS:
            return self._give_up("addresses of its inputs change after a few calls", given)
        self.recordings, self.replays, self.waited, self.addresses = self.recordings + 1, 0, WARM_CALLS, self.seen
        self.moving = {k: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for k in self.moves for x in (inputs[k],)}
        graph, before = torch.cuda.CUDAGraph(), self._versions(inputs)
        own = [self.moving.get(k, x) for k, x in enumerate(inputs)]
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results = self.call([*own]) if self._boxed_call else self.call(*own)
        except RuntimeError as error:       # a library call that waits for the device, say
            return self._give_up(str(error), given)
        self.graph, self.results, self.stream = graph, results, torch._C._cuda_getCurrentRawStream(self.index)
        self.makers = [self._maker(k, result, own) for k, result in enumerate(results)]
        lent = {result.untyped_storage()._cdata for k, result in enumerate(results) if k in self.lent and k not in self.given_back}
        self.loans = [(storage, torch._C._storage_Use_Count(storage)) for storage in lent]
        self.rises = [k for k, new in self._versions(inputs).items() for _ in range(new - before[k])]
        counters["native"]["recorded_graphs"] += 1
        return self._launch(inputs)

    def _maker(self, k: int, result: Any, inputs: Sequence[Any]) -> Callable[[Any, Sequence[Any]], Any]:
        """How a result of each call is made of the recorded one."""
        if k in self.given_back:
            place, source = self.given_back[k], inputs[self.given_back[k]]
            if result is source:
                return lambda _, inputs: inputs[place]
            shape, strides, offset = result.shape, result.stride(), result.storage_offset() - source.storage_offset()
            return lambda _, inputs: inputs[place].as_strided(shape, strides, inputs[place].storage_offset() + offset)
        if not isinstance(result, torch.Tensor) or not on_gpu(result):
            return lambda result, _: result
        return _lent if k in self.lent else _copied

    def _forget(self) -> None:
        self.graph, self.results, self.loans = None, (), []

    def _give_up(self, why: str, given: Sequence[Any]) -> tuple:
        self.waited = -1
        self._forget()
        _tell(f"a program is not recorded as a CUDA graph: {why}")
        return self.call(*given)

    def _versions(self, inputs: Sequence[Any]) -> dict[int, int]:
        """Of the written inputs; inference tensors have none."""
        return {k: inputs[k]._version for k in self.written if not inputs[k].is_inference()}

    def _replay(self, inputs: Sequence[Any]) -> tuple:
        if cuda.flag().word.value:
            raise cuda.flag().take()
        rises = [inputs[k] for k in self.rises]
        results = self._launch(inputs)
        if rises:
            torch.autograd.graph.increment_version(rises)
        return results

    def _launch(self, inputs: Sequence[Any]) -> tuple:
        if self.moving:
            torch._foreach_copy_(list(self.moving.values()), [inputs[k] for k in self.moving])
        self.graph.replay()
        counters["native"]["replays"] += 1
        self.replays += 1
        made = {id(result): maker(result, inputs) for result, maker in zip(self.results, self.makers)}      # one object twice stays one
        if isinstance(inputs, list):        # given away
            inputs.clear()
        return tuple([made[id(result)] for result in self.results])


def _copied(result: Any, inputs: Sequence[Any]) -> Any:
    """What the next replay does not overwrite."""
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device).copy_(result)


def _lent(result: Any, inputs: Sequence[Any]) -> Any:
    """The same memory, with a version of its own."""
    return result.data
