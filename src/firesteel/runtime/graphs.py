"""A host function recorded as a CUDA graph: one launch for all kernels and library calls of a call.  fs.compile(mode="reduce-overhead"), and by
default inference whose time is the host's (`default_refusal`).

In: a Plan and its host function.  Out: a callable of the same inputs, or the host function itself where `refusal` names a reason.  What a recording
needs to know of a program is its `RecordedFacts`, which the cache on disk keeps.

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
 7. Inference that lends nothing shares memory with other such programs of its device and stream: their results are copied before the next one runs.
What always holds: a call on another stream or device than the recorded one, with other settings of cuDNN, while another thread replays, or inside of
somebody else's capture runs the host function.  Versions of written inputs rise as if it had run.  An index out of range is reported as by the host
function, a call later.
"""
from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from firesteel import artifacts
from firesteel.artifacts import counters
from firesteel.loops.group import keeps_order
from firesteel.loops.ir import Expr, Extern, Given, View
from firesteel.loops.plan import Plan, numbytes
from firesteel.records import dataclass
from firesteel.runtime import cuda, gpu
from firesteel.targets import on_gpu

MOST_COPIED = 32 << 20          # bytes of results, and of inputs that move
MOST_RECORDINGS = 4
MOST_WAITED = 64
PAYS = 16                       # replays that are worth a recording
FEW_STEPS = 4                   # fewer are launched as quickly one by one
WARM_CALLS = 2
THREAD_LOCAL = 1                # what other threads do meanwhile is their own
MANY_STEPS = 12                 # by default: enough that a replay saves more than it costs,
BYTES_A_STEP = 16 << 20         # where a step writes less on average, for which a GPU takes no longer than its host,
MOST_HELD = 512 << 20           # and buffers are not larger in all: a graph keeps its memory
CAPTURED = frozenset(f"aten.{name}" for name in (         # library calls of which it is known that they can be recorded
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention"))


@dataclass(frozen=True)
class RecordedFacts:
    """What a recording knows of its program; all are numbers, places of inputs and results."""
    index: int                  # of the device
    boxed: bool
    tensors: tuple[int, ...]
    written: tuple[int, ...]
    lent: tuple[int, ...]       # results that are given out as they lie in the graph's memory
    given_back: tuple[tuple[int, int], ...]     # result, input that it is
    shares: bool                # memory

    @classmethod
    def of(cls, plan: Plan, lent: Collection[int], shares: bool) -> RecordedFacts:
        program = plan.program
        tensors = tuple(k for k, name in enumerate(program.inputs) if name is not None and name in program.buffers)
        written = {name for step in program.steps for name in step.writes()}
        places = {program.inputs[k]: k for k in reversed(tensors)}
        back = [(k, places[program.outputs[k].buffer]) for k in lent if program.outputs[k].buffer in places]
        index = gpu.device_index(next(iter(program.buffers.values())).device)
        changed = tuple(k for k in tensors if program.inputs[k] in written)
        return cls(index, program.boxed, tensors, changed, tuple(lent), tuple(back), shares and not lent)

    def words(self) -> list[Any]:
        """As JSON."""
        return list(dataclasses.astuple(self))

    @classmethod
    def read(cls, words: Sequence[Any]) -> RecordedFacts:
        return cls(*_tuples(words))


def _tuples(word: Any) -> Any:
    return tuple(map(_tuples, word)) if isinstance(word, (list, tuple)) else word


def recorded(plan: Plan, call: Callable[..., tuple], lent: Collection[int] = (), inference: bool = False,
             asked: bool | None = True) -> Callable[..., tuple]:
    """The host function, recorded where that is safe and pays; `asked` is None where nobody asked.  `lent`: results that are given out as they lie
    in the graph's memory."""
    if asked is None and not inference:
        return call
    own, lent = lent, _with_aliases(plan, lent)
    why = refusal(plan, lent) or asked is None and (default_refusal(plan) or not lent <= set(own) and "it returns what it writes to an input")
    if why:
        _tell(f"a program is not recorded as a CUDA graph: {why}")
        return call
    return Recording(RecordedFacts.of(plan, lent, inference), call)


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
        "memory is not cached": bool(os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")),
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


def default_refusal(plan: Plan) -> str:
    """Why a program is not recorded where nobody asked for it."""
    program = plan.program
    sizes = [numbytes(buffer) for buffer in program.buffers.values() if buffer.kind not in ("input", "constant")]
    held = sum(size for size in sizes if isinstance(size, int))
    unknown = [name for step in program.steps if step.call and (name := str(step.call.target).rpartition(".")[0]) not in CAPTURED]
    reasons = {
        "it has few steps": len(program.steps) < MANY_STEPS,
        "its kernels take longer than their launches": held > BYTES_A_STEP * len(program.steps),
        "it would hold much memory": held > MOST_HELD,
        f"it calls {', '.join(unknown)}": bool(unknown),
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

    def __init__(self, facts: RecordedFacts, call: Callable[..., tuple]):
        self.facts, self.call = facts, call
        self.tensors, self.written, self.lent, self.index = facts.tensors, facts.written, facts.lent, facts.index
        self.given_back = dict(facts.given_back)
        self._boxed_call, self.source, self.counts = facts.boxed, getattr(call, "source", ""), getattr(call, "counts", {})
        self.lock = _shared(self.index).lock if facts.shares else threading.Lock()
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
        self.settings: tuple = ()
        self.measuring = False                  # may `call` change? (tuning.py)

    def renew(self, call: Callable[..., tuple]) -> None:
        """From now on it runs another function, which computes the same."""
        with self.lock:
            self.call = call
            self._forget()

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
            ready = self.stream == torch._C._cuda_getCurrentRawStream(self.index) and self.settings == _settings() and self._is_free()
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
        with torch.inference_mode(False):       # they are written in other modes too
            self.moving = {k: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for k in self.moves for x in (inputs[k],)}
        self.stream, self.settings = torch._C._cuda_getCurrentRawStream(self.index), _settings()
        graph = _shared(self.index).graph_on(self.index, self.stream) if self.facts.shares else CapturedCall(self.index, self.stream)
        before = self._versions(inputs)
        own = [self.moving.get(k, x) for k, x in enumerate(inputs)]
        try:
            results = graph.capture(lambda: self.call([*own]) if self._boxed_call else self.call(*own))
        except RuntimeError as error:       # a library call that waits for the device, say
            return self._give_up(str(error), given)
        self.graph, self.results = graph, results
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


class CapturedCall:
    """What a call asks of a device on one stream, as a CUDA graph.  Not torch's own: while that one captures no other thread may draw random numbers,
    and nobody if it fails; and it gives all cached memory back first."""

    def __init__(self, index: int, stream: int, pool: Any = None):
        self.index, self.stream, self.pool = index, ctypes.c_void_p(stream), pool or torch.cuda.graph_pool_handle()
        self.program, self.holds_pool = ctypes.c_void_p(), False

    def capture(self, call: Callable[[], tuple]) -> tuple:
        torches: Any = torch._C
        with torch.cuda.stream(_capture_stream(self.index, self.stream.value or 0)):
            torches._cuda_beginAllocateCurrentThreadToPool(self.index, self.pool)
            self.holds_pool = True
            try:
                return self._capture(ctypes.c_void_p(torches._cuda_getCurrentRawStream(self.index)), call)
            finally:
                torches._cuda_endAllocateToPool(self.index, self.pool)

    def _capture(self, stream: Any, call: Callable[[], tuple]) -> tuple:
        driver, graph = cuda.driver().call, ctypes.c_void_p()
        driver("cuStreamBeginCapture_v2", stream, THREAD_LOCAL)
        try:
            results = call()
        finally:
            driver("cuStreamEndCapture", stream, ctypes.byref(graph))
        driver("cuGraphInstantiateWithFlags", ctypes.byref(self.program), graph, ctypes.c_uint64(0))
        driver("cuGraphDestroy", graph)
        return results

    def replay(self) -> None:
        cuda.driver().call("cuGraphLaunch", self.program, self.stream)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):        # the process ends, say
            if self.program.value:
                cuda.driver().call("cuGraphExecDestroy", self.program)
            if self.holds_pool:
                torch._C._cuda_releasePool(self.index, self.pool)


@functools.cache
def _capture_stream(index: int, stream: int) -> Any:
    """One for each stream that graphs run on: libraries have memory of their own for each."""
    return torch.cuda.Stream(index)


class _Shared:
    """Memory of graphs that lend none of it, and who may replay one of them."""

    def __init__(self) -> None:
        self.lock, self.stream = threading.Lock(), -1
        self.pool: Any = None
        self.graphs: weakref.WeakSet[CapturedCall] = weakref.WeakSet()      # those that hold the pool; torch takes no pool again that all let go

    def graph_on(self, index: int, stream: int) -> CapturedCall:
        """One that shares memory; not on another stream than the first one: the two could run at the same time."""
        if not self.graphs:
            self.stream, self.pool = stream, torch.cuda.graph_pool_handle()
        if stream != self.stream:
            return CapturedCall(index, stream)
        self.graphs.add(made := CapturedCall(index, stream, self.pool))
        return made


@functools.cache
def _shared(index: int) -> _Shared:
    return _Shared()


def _settings() -> tuple:
    """What a library's choice of kernels depends on, and capture does not guard."""
    get: Any = torch._C
    return get._get_cudnn_allow_tf32(), get._get_cudnn_deterministic(), get._get_cudnn_benchmark(), get._get_cudnn_enabled()


def _copied(result: Any, inputs: Sequence[Any]) -> Any:
    """What the next replay does not overwrite."""
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device).copy_(result)


def _lent(result: Any, inputs: Sequence[Any]) -> Any:
    """The same memory, with a version of its own."""
    return result.data
