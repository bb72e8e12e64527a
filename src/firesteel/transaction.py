"""Compiling is a transaction: an exception at any line, Ctrl-C included, leaves no trace; and locks that survive an exception and a fork.

`atomic(function, *args)` reads the states of this thread that compiling changes (rows of `STATES`; those of torch are in `torchstate.py`),
calls the function, and where that raises puts them back.  `finally` alone does not do it: an interrupt that arrives as the block begins skips
the block.  What always holds:

 1. Reading a state changes nothing, so before the call there is nothing to undo; after it the function's own blocks have put all states back.
 2. Contexts on the way are made by `context`: a generator that an exception left suspended is finished by the transaction.  Else it would be
    finished whenever the exception's traceback is freed, and put back states that are old by then.
 3. Undoing twice is undoing once: an interrupt while undoing starts it again.
 4. Code of others that an interrupt would leave broken (a library that frees memory in Python) runs `aside`, on a thread where none arrives.
 5. On a thread that compiles beside the program (`beside`), what the process shares is neither set nor put back: the program goes on with it.
 6. A `Lock` is given back by an exception at any line, and is free in a forked child, where the threads that held it are not.

    entry = atomic(lock.holding, compile, inputs)
"""
from __future__ import annotations

import _thread
import concurrent.futures
import contextlib
import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from firesteel.records import dataclass
from firesteel.table import Table


@dataclass(frozen=True)
class ThreadState:
    """Something of this thread, or of the process (`shared`), that compiling changes.  `put` sets what `read` read."""
    read: Callable[[], Any]
    put: Callable[[Any], Any]
    shared: bool = False


NEVER = 2 ** 31 - 1         # how many collections of middle-aged objects bring about one of all
YOUNG = 200_000             # how many new objects bring about a collection of the young ones

STATES: Table[ThreadState] = Table("state that a failed compilation puts back", "transaction.py")


class _Begun(threading.local):
    undo: list[Callable[[], Any]] | None = None     # of the innermost transaction, the latest last
    beside = False


_begun = _Begun()


def atomic(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, or an exception and nothing else."""
    before = [(row.put, row.read()) for row in STATES.values() if not (row.shared and _begun.beside)]
    undo: list[Callable[[], Any]] = []
    outer = _begun.undo
    try:
        _begun.undo = undo
        result = _rarely_collecting(function, *args)
        _begun.undo = outer
        return result
    except BaseException:
        try:
            _undo(undo, outer, before)
        except BaseException:       # interrupted once more
            _undo(undo, outer, before)
            raise
        raise


def _rarely_collecting(function: Callable[..., Any], *args: Any) -> Any:
    """Most objects that loading the compiler and compiling make live on, or are freed by their counts.  Young objects are collected rarely, all of
    them never: what was counted meanwhile would bring about a look through all that the process holds (0.1 s after `import torch`) at the end."""
    before = gc.get_threshold()
    gc.set_threshold(before[0] and max(before[0], YOUNG), before[1], NEVER)
    result = function(*args)
    _put_threshold(before)
    return result


FROZEN_BY_PYTHON = 1000     # Python 3.12 begins with some hundreds of frozen objects; a program that freezes has thousands


def loaded(function: Callable[..., Any], *args: Any) -> Any:
    """`atomic`, of loading parts of the compiler: all objects are old then, unless a program keeps some apart itself.  Else collections of the
    young would look through what `import torch` and the compiler made, 40 ms of a first call."""
    result = atomic(function, *args)
    if gc.get_freeze_count() < FROZEN_BY_PYTHON:
        gc.freeze()
        gc.unfreeze()
    return result


def _put_threshold(threshold: tuple[int, int, int]) -> None:
    if threshold[2] != NEVER:           # else another transaction put them off and will end that
        gc.set_threshold(*threshold)


STATES.add("garbage collections", ThreadState(gc.get_threshold, _put_threshold))


class NeedsCaller(BaseException):
    """Compiling would change what the process shares: it can be done only where the program waits for it."""


def is_beside() -> bool:
    """Does this thread compile while the program goes on?"""
    return _begun.beside


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """Inside, this thread does (rule 5)."""
    _begun.beside = True
    try:
        yield
    finally:
        _begun.beside = False


def _undo(undo: list[Callable[[], Any]], outer: list[Callable[[], Any]] | None, before: list[tuple[Callable, Any]]) -> None:
    while undo:
        undo[-1]()
        undo.pop()
    for put, value in before:
        put(value)
    _begun.undo = outer


def on_failure(action: Callable[[], Any]) -> None:
    """Calls `action` where the transaction under way fails.  It may be called after its work is done already, or twice."""
    if _begun.undo is not None:
        _begun.undo.append(action)


def context(function: Callable[..., Any]) -> Callable[..., Any]:
    """contextlib.contextmanager for contexts that are entered while compiling (rule 2)."""
    make = contextlib.contextmanager(function)

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        manager: Any = make(*args, **kwargs)
        on_failure(manager.gen.close)       # nothing happens where it is finished, or was not begun
        return manager
    return made


def aside(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` on a thread of its own.  Who waits for it may be interrupted; it is not, and comes to its end.  Threads and events of
    `threading` are Python, which an interrupt would leave broken; a plain lock is not.

    Nobody waits for what the thread does after its last line, so Python may end meanwhile.  Then it must not free an object there: where that
    lets the global lock go, as a tensor's memory does, the process would be aborted.  So it holds nothing any more by then."""
    results: list[Any] = []
    errors: list[BaseException] = []
    call = [(function, args)]
    del function, args
    done = threading.Lock()
    done.acquire()
    try:
        _thread.start_new_thread(_work, (call, results, errors, done.release))
    except RuntimeError:        # Python is shutting down, or the system has no thread to give
        _work(call, results, errors, done.release)
    done.acquire()
    if errors:
        raise errors.pop()
    return results.pop()


def _work(call: list[Any], results: list[Any], errors: list[BaseException], tell: Callable[[], None]) -> None:
    """Takes the call out of its list, and leaves what came of it in the caller's lists alone."""
    function, args = call.pop()
    try:
        results.append(function(*args))
    except BaseException as error:
        errors.append(error)
    finally:
        del function, args
        tell()


def side_by_side(function: Callable[[Any], Any], items: list[Any], threads: int) -> list[Any]:
    """`function` of each item, on several threads; one after another where Python, which ends, starts no thread any more."""
    if threads <= 1:
        return [function(item) for item in items]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        try:
            futures = [pool.submit(function, item) for item in items]
        except RuntimeError:
            return [function(item) for item in items]
        return [future.result() for future in futures]


# ---------------------------------------------------------------- states

def keep(name: str, local: threading.local) -> None:
    """The attributes of a threading.local of ours; of lists their items."""
    def read() -> dict[str, Any]:
        return {key: list(value) if type(value) is list else value for key, value in vars(local).items()}

    def put(values: dict[str, Any]) -> None:
        own = vars(local)
        for key in [key for key in own if key not in values and type(own[key]) is not list]:
            del own[key]
        for key, value in own.items():
            if type(value) is list:
                value[:] = values.get(key, ())
            else:
                own[key] = values[key]
    STATES.add(name, ThreadState(read, put))


# ---------------------------------------------------------------- locks

class Lock:
    """A lock that its thread may take again.  See rule 6."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def holding(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)` with the lock held."""
        outer = self.held()
        try:
            with self._lock:
                return function(*args)
        except BaseException:
            if not outer:
                self.let_go()
            raise

    def holding_if_free(self, function: Callable[..., Any], *args: Any) -> None:
        """`function(*args)` with the lock held; nothing where another thread holds it."""
        outer = self.held()
        try:
            if self._lock.acquire(blocking=False):
                function(*args)
                self._lock.release()
        except BaseException:
            if not outer:
                self.let_go()
            raise

    def held(self) -> bool:
        """By this thread?"""
        return self._lock._is_owned()       # type: ignore[attr-defined]  # what threading.Condition asks

    def let_go(self) -> None:
        """However often this thread holds it."""
        while self.held():
            self._lock.release()

    def acquire(self) -> None:
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def renew(self) -> None:
        self._lock._at_fork_reinit()        # type: ignore[attr-defined]  # what threading does with its own


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: nobody holds a lock here."""
    _begun.undo = None
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
