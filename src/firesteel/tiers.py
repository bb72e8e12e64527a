"""Tiered start, fs.compile(..., tiered=True): calls run eagerly while what serves them is compiled on another thread, then switch to it.

A call for which no Entry's guards hold hands its inputs to `schedule` and runs eagerly.  One thread captures and compiles for one region after the
other, the backward included, under the grad mode, inference mode and automatic casting of the call, and adds the Entry, which the next call finds.
What always holds:
 - Eager or compiled code runs a region, never both; the thread changes nothing that the program can see (`transaction.beside`).  What it reads of
   the program's objects is guarded: where the program has changed them since, the Entry does not serve.
 - What cannot be compiled beside the program is compiled where it is called, as without `tiered`: calls under modes, transforms and stances of
   their own thread, and programs that set what all threads share.
 - A failure is logged once, counted in fs.counters["tiered"], and tried again at most `TRIES` times; the program goes on by eager.
 - At the end of the process what is under way is finished and the rest dropped; a forked child starts anew.
"""
from __future__ import annotations

import collections
import contextlib
import gc
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from firesteel import transaction
from firesteel.artifacts import counters
from firesteel.autograd import engine
from firesteel.capture import marks
from firesteel.config import config
from firesteel.records import dataclass
from firesteel.targets import in_use
from firesteel.torchstate import has_saving_hooks

logger = logging.getLogger("firesteel")
TRIES = 3


@dataclass
class Tier:
    """How far the compilation of a region is."""
    pending: bool = False
    failures: int = 0
    at_once: bool = False       # only the caller's thread can compile it


@dataclass(frozen=True)
class CallState:
    """What holds on the calling thread and is to hold where its code is captured."""
    grad: bool
    inference: bool
    casting: tuple[tuple[str, torch.dtype, bool], ...]

    @classmethod
    def of_this_thread(cls) -> CallState:
        casting = tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in in_use())
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casting)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._C._InferenceMode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype, enabled in self.casting:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield


@dataclass(frozen=True)
class Job:
    region: Any
    inputs: tuple[Any, ...]
    state: CallState


def is_ordinary() -> bool:
    """Has this thread no state but those of CallState?"""
    return not (transaction.is_beside() or marks.is_compiling() or marks.stance() != "default" or config.error_on_recompile
                or torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack() or not torch._C._is_torch_function_enabled()
                or torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
                or has_saving_hooks() or engine.current_request() is not None
                or engine.in_compiled_autograd_region())


# ---------------------------------------------------------------- the thread

_lock = threading.Lock()
_jobs: collections.deque[Job] = collections.deque()
_worker: threading.Thread | None = None
_closing = False
_threshold: tuple[int, int, int] | None = None      # of garbage collections, while compiling puts them off


def schedule(region: Any, inputs: tuple[Any, ...]) -> bool:
    """Is the call to run eagerly, since its code is or will be compiled on the other thread, or cannot be?  False: it is to be compiled now."""
    if not is_ordinary():
        return False
    with _lock:
        tier = region.tier = region.tier or Tier()
        if tier.at_once:
            return False
        counters["tiered"]["eager_calls"] += 1
        if not tier.pending and tier.failures < TRIES and not _closing:
            tier.pending = True
            _jobs.append(Job(region, inputs, CallState.of_this_thread()))
            start()
    return True


def start() -> None:
    """Has a thread work the jobs off, with the lock held.  It ends with the last job, so that none waits at the end of the process."""
    global _worker
    if _worker is None:
        _worker = threading.Thread(target=_work, name="firesteel-tiers")
        try:
            _worker.start()
        except RuntimeError:        # the process ends, or the system has no thread to give
            _worker = None
            _drop()


def _work() -> None:
    while (job := _next()) is not None:
        run(job)
        del job     # lets the call's tensors go


def _next() -> Job | None:
    global _worker
    with _lock:
        if _jobs:
            return _jobs.popleft()
        _worker = None
        return None


def run(job: Job) -> None:
    """Compiles for a region."""
    global _threshold
    tier = job.region.tier or Tier()
    _threshold = gc.get_threshold()
    try:
        with transaction.beside(), job.state.entered():
            made = job.region.prepare(job.inputs)
        tier.failures = 0 if made else tier.failures + 1
        counters["tiered"]["compiled" if made else "not_compiled"] += 1
    except transaction.NeedsCaller as reason:
        tier.at_once = True
        logger.info("%s is compiled when it is called next: %s", job.region.name, reason)
    except BaseException as error:
        tier.failures += 1
        if not _closing:        # libraries refuse work at the end of the process
            _report(job.region.name, error)
    finally:
        _threshold = None
        tier.pending = False


def _report(name: str, error: BaseException) -> None:
    """Once for each message."""
    text = f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    counters["tiered"]["failures"] += 1
    counters["tiered"][text] += 1
    if counters["tiered"][text] == 1:
        logger.warning("compiling in the background failed, the program goes on by eager: %s", text, exc_info=error)


def wait(timeout: float | None = None) -> bool:
    """Until nothing is compiled in the background any more; is that so?"""
    while (worker := _worker) is not None:
        worker.join(timeout)
        if worker.is_alive():
            return False
    return True


def _drop() -> None:
    while _jobs:
        job = _jobs.popleft()
        job.region.tier.pending = False


def reset() -> None:
    """Drops what waits; what is under way comes to its end."""
    with _lock:
        _drop()
    wait()


def _close() -> None:
    global _closing
    with _lock:
        _closing = True
        _drop()


def _after_fork() -> None:
    """In a child: the thread is not here, and what it had put off goes on."""
    global _lock, _worker, _threshold
    _lock, _worker = threading.Lock(), None
    _drop()
    if _threshold is not None:
        gc.set_threshold(*_threshold)
        _threshold = None


try:
    getattr(threading, "_register_atexit", lambda function: None)(_close)       # before threads are waited for, which atexit is not
except RuntimeError:        # they are waited for already
    _close()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
