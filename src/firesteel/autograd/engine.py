"""Who runs a backward: the eager engine, or a compiled graph of it.

`requested(...)`, behind fs.compiled_autograd, makes every backward started inside, by this thread, go through torch's door for compilers: see
`compiled.py`.  While one such context is open anywhere, `Engine` stands in the place of torch's Python engine object; it opens the door
for the one call and closes it again, so that other threads, and backwards started inside of a captured one, are eager's.

    with requested(Request(compiler, dynamic=False)):       # compiler: GraphModule, dynamic -> callable(inputs, sizes, scalars, hooks, packed)
        loss.backward()

What always holds
  - until a captured graph has begun to run, nothing has happened: whatever fails before, the eager engine runs that backward, counted
    in counters["compiled_autograd"]["by_eager"], and raises its own errors
  - the engine keeps a captured graph by its structure alone, so one is compiled once for each compiler that meets it
"""
from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from types import FunctionType
from typing import Any

import torch
from torch.autograd.variable import Variable
from torch.fx import GraphModule

from firesteel import artifacts, transaction
from firesteel.artifacts import counters, timed
from firesteel.autograd.backward_calls import door
from firesteel.autograd.compiled import REASONS, BackwardCapture, CapturedGraph, Refused
from firesteel.autograd.engine_order import eager_ranks
from firesteel.autograd.function import has_storage, peek_transform
from firesteel.autograd.recomputations import take_regions
from firesteel.records import dataclass
from firesteel.tracebacks import without_ours

GraphCompiler = Callable[[GraphModule, bool], Callable[..., Sequence[Any]]]     # (graph, do sizes change?) -> callable of the five lists


@dataclass(frozen=True)
class Request:
    """What one context asks for."""
    compiler: GraphCompiler
    dynamic: bool               # are all sizes symbols from the start, or when they have changed?


class _EngineState(threading.local):
    requests: tuple[Request | None, ...] = ()       # innermost last; None: switched off
    task: Task | None = None                        # the captured backward that is running


@dataclass
class Task:
    """One backward that goes through the door."""
    request: Request
    roots: Sequence[Any]
    wanted: Sequence[Any]
    keeps: bool                                     # retain_graph
    open: bool = False                              # does this thread hold the door open?
    started: bool = False                           # has its graph begun to run?
    callbacks: list[Callable[[], None]] = field(default_factory=list)


_state = _EngineState()
_opening = transaction.Lock()        # held while the door is open: it is one for all threads
_contexts = 0                       # open contexts of all threads


# ---------------------------------------------------------------- contexts

@contextlib.contextmanager
def requested(request: Request | None) -> Iterator[None]:
    """Backwards started inside by this thread go to this compiler; None: to the eager engine."""
    before = _state.requests
    _state.requests = (*before, request)
    _installing.holding(_count, 1)
    try:
        yield
    finally:
        _state.requests = before
        _installing.holding(_count, -1)


def current_request() -> Request | None:
    return _state.requests[-1] if _state.requests else None


def in_compiled_autograd_region() -> bool:
    """Is a captured backward running on this thread?"""
    return _state.task is not None and _state.task.started


def reset() -> None:
    """Forgets every captured backward."""
    if door is not None:
        door.clear_cache()


def _count(change: int) -> None:
    global _contexts
    _contexts += change
    if door is not None:
        door.set_verbose_logger(REASONS if artifacts.logging_enabled("autograd") else None)
    Variable._execution_engine = ENGINE if _contexts else EAGER


_installing = transaction.Lock()


# ---------------------------------------------------------------- the engine

EAGER = Variable._execution_engine
EagerEngine: Any = type(EAGER)


class Engine(EagerEngine):
    """torch's engine as Python sees it, with a compiler behind it for the threads that asked for one."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        request = current_request()
        if request is None or not self.captures():
            return _by_eager(super().run_backward, args, kwargs)
        reason = _reason_for_eager(*args)
        if reason is not None:
            _count_eager(reason)
            return _by_eager(super().run_backward, args, kwargs)
        try:
            return self._run_compiled(request, args, kwargs)
        except BaseException as error:
            without_ours(error)
            raise

    def captures(self) -> bool:
        """Does a backward that this thread starts now go to a compiler?  Asked by who captures a call of backward()."""
        return current_request() is not None and _state.task is None

    def _run_compiled(self, request: Request, args: Any, kwargs: Any) -> Any:
        task = _state.task = Task(request, args[0], _wanted(*args, **kwargs), args[2])
        try:
            _open_door(task)
            return super().run_backward(*args, **kwargs)
        except Exception as error:
            if task.started:
                raise
            _count_eager(f"{type(error).__name__}: {error}")
        finally:
            _close_door(task)
            _state.task = None
        return super().run_backward(*args, **kwargs)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Runs at the end of the backward that is under way."""
        task = _state.task
        if task is None:
            super().queue_callback(callback)
        else:
            task.callbacks.append(callback)


def _wanted(tensors: Any, grads: Any, keep_graph: bool, create_graph: bool, inputs: Sequence[Any] = (), *rest: Any, **kwargs: Any) -> Sequence[Any]:
    return inputs


ENGINE = Engine()


def _reason_for_eager(tensors: Any, grads: Sequence[torch.Tensor | None], keep_graph: bool, create_graph: bool, *rest: Any) -> str | None:
    """Why the eager engine must run a backward, where that is known before."""
    if door is None:
        return "this torch has no door for compilers"
    if torch.is_anomaly_enabled():
        return "anomaly mode looks at every node"
    if peek_transform() is not None or not all(grad is None or has_storage(grad) for grad in grads):
        return "gradients of a function transform"
    if create_graph and not keep_graph:         # the door frees it before it is known whether its graph can be differentiated
        return "create_graph=True of a graph that is not kept"
    return None


def _count_eager(reason: str) -> None:
    counters["compiled_autograd"]["by_eager"] += 1
    artifacts.log("autograd", lambda: f"{reason}: the eager engine runs this backward")


ON_ITS_WAY = "within another compiled autograd call"        # torch says, before anything of that backward has run


def _by_eager(run_backward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Another thread's backward may be on its way through the door: the hook serves every thread that arrives, so this one waits, and again where the
    door was opened in between."""
    while _state.task is None:
        _opening.holding(bool)
        try:
            return run_backward(*args, **kwargs)
        except NotImplementedError as error:
            if ON_ITS_WAY not in str(error):
                raise
    return run_backward(*args, **kwargs)


def _open_door(task: Task) -> None:
    _opening.acquire()
    task.open = True
    door.set_autograd_compiler(_begin, task.request.dynamic)     # it calls methods by their names


def _close_door(task: Task) -> None:
    """The captured graph begins to run, or there is none."""
    if task.open:
        door.set_autograd_compiler(None, False)
        task.open = False
        _opening.release()


def _close_in_child() -> None:
    """The thread that opened it is not there.  Locks of ours are free in a child."""
    if _contexts and door is not None:
        door.set_autograd_compiler(None, False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


# ---------------------------------------------------------------- captured backwards

def _begin() -> BackwardCapture:
    return BackwardCapture(_end)


def _end(graph: CapturedGraph) -> tuple[Callable, Any]:
    return _run, CapturedBackward(graph)


class CapturedBackward:
    """A captured backward, compiled for each compiler that meets it."""

    def __init__(self, graph: CapturedGraph):
        self.graph = graph
        self.order: tuple[int, ...] | None = None           # of its first run
        self.compiled: dict[Any, tuple[GraphCompiler, Callable]] = {}       # by what a compiler does: a loop may create it again each time

    def __call__(self, inputs: list, sizes: Sequence, scalars: Sequence, hooks: list, packed: list) -> Sequence[Any]:
        task = _state.task
        assert task is not None
        compiler = task.request.compiler
        if self.graph.observable or not self.compiled:
            self.order = self._order(task)
        unpacks = self.graph.unpacks
        regions = take_regions(list(unpacks.values()), inputs, hooks, packed, task.keeps) if unpacks else None
        known = self.compiled.get(key := (compiler_key(compiler), self.order, regions))
        if known is None:
            counters["compiled_autograd"]["compiles"] += 1
            with timed("describe"):
                known = self.compiled[key] = (compiler, compiler(self.graph.module(self.order, regions), self.graph.dynamic))
        return known[1](inputs, sizes, scalars, hooks, packed)

    def _order(self, task: Task) -> tuple[int, ...] | None:
        """That of the eager engine, which may differ for graphs of one structure.  Without it, hooks may run in another."""
        ranks = eager_ranks(task.roots, task.wanted, self.graph.names)
        if ranks is None:
            counters["compiled_autograd"]["unknown_order"] += 1
            artifacts.log("autograd", lambda: "the order of the eager engine is not known: nodes run in the order of the door")
        return None if ranks is None else tuple(ranks)


def compiler_key(compiler: Any) -> Any:
    """Equal for functions of the same code over the same objects."""
    if not isinstance(compiler, FunctionType) or compiler.__kwdefaults__:
        return id(compiler)
    held = [cell.cell_contents for cell in compiler.__closure__ or ()]
    return (compiler.__code__, *(id(obj) if obj is compiler else compiler_key(obj) for obj in held), *map(id, compiler.__defaults__ or ()))


def _run(captured: CapturedBackward, inputs: list, sizes: Sequence, scalars: Sequence, hooks: Sequence, packed: Sequence) -> list[Any]:
    """What the engine calls in the place of a backward."""
    task = _state.task
    assert task is not None
    _close_door(task)
    if captured.graph.first_order and torch.is_grad_enabled():
        raise Refused("create_graph=True through a compiled function or saved-tensor hooks")
    task.started = True
    results = list(captured(inputs, sizes, scalars, list(hooks), list(packed)))
    for callback in task.callbacks:         # it may grow while it is walked
        callback()
    return results
