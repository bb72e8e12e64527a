"""What was compiled and how long it took: counters, stage timers and log artifacts.

`counters` are what users and tests read; `timed` marks a stage; `log` prints an artifact where FIRESTEEL_LOGS or
`set_logs` asked for it.  Nothing here knows the stages' data.
"""
from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from firesteel import transaction
from firesteel.errors import Location
from firesteel.records import dataclass

logger = logging.getLogger("firesteel")

LOG_NAMES = ("graph_breaks", "recompiles", "guards", "graph", "aot", "joint", "kernels", "schedule", "autograd", "perf", "cache")


class Counters(dict):
    """Group -> Counter; a group is made when first named."""

    def __missing__(self, group: str) -> collections.Counter:
        counter = self[group] = collections.Counter()
        return counter


counters: dict[str, collections.Counter] = Counters()

@dataclass(frozen=True)
class BreakRecord:
    """A graph break that was compiled: why, where, and what to change."""
    reason: str
    location: str
    hint: str
    source: str = ""        # the line itself


breaks: collections.deque[BreakRecord] = collections.deque(maxlen=1000)

_times: collections.Counter = collections.Counter()     # stage -> seconds, own time only
_runs: collections.Counter = collections.Counter()      # stage -> number of runs
_open = threading.local()                               # .stack: list of [child seconds]
transaction.keep("open stages", _open)
_enabled_logs: set[str] = set()


# called for each stage as it begins and, with the time of its end, as it ends: fn(stage, start, end, how many stages are around it)
WATCHERS: list[Callable[[str, float, float | None, int], Any]] = []


def _watch(stage: str, start: float, end: float | None, depth: int) -> None:
    for watch in WATCHERS:
        watch(stage, start, end, depth)


@transaction.context
def timed(stage: str) -> Iterator[None]:
    """Adds the time spent inside, less that of stages within it, to the stage's total."""
    stack = _open.__dict__.setdefault("stack", [])
    stack.append(0.0)
    start = time.perf_counter()
    _watch(stage, start, None, len(stack) - 1)
    try:
        yield
    finally:
        spent = time.perf_counter() - start
        _watch(stage, start, start + spent, len(stack) - 1)
        inner = stack.pop()
        _times[stage] += spent - inner
        _runs[stage] += 1
        if stack:
            stack[-1] += spent


def stage_times() -> dict[str, float]:
    """Seconds of own time a stage, since the start or the last reset."""
    return dict(_times)


def note_break(reason: str, location: object, hint: str) -> None:
    """Counts, keeps and logs a graph break."""
    counters["graph_break"][reason] += 1
    record = BreakRecord(reason, str(location), hint, location.source() if isinstance(location, Location) else "")
    breaks.append(record)
    log("graph_breaks", lambda: f"{record.reason}\n  at {record.location}\n  Hint: {record.hint}")


def reset() -> None:
    breaks.clear()
    for counter in counters.values():
        counter.clear()
    counters.clear()
    _times.clear()
    _runs.clear()


def set_logs(**wanted: bool) -> None:
    """Turns log artifacts on or off: set_logs(graph=True, guards=False)."""
    for name, on in wanted.items():
        if name not in LOG_NAMES:
            raise ValueError(f"no log artifact {name!r}; there are {', '.join(LOG_NAMES)}")
        (_enabled_logs.add if on else _enabled_logs.discard)(name)
    if _enabled_logs and logger.level == logging.NOTSET:
        logger.setLevel(logging.DEBUG)
        if not logger.handlers and not logging.getLogger().handlers:
            logger.addHandler(logging.StreamHandler())


def log(artifact: str, text: Callable[[], str] | str) -> None:
    """Logs an artifact if it was asked for; `text` may be a function, called only then."""
    if artifact in _enabled_logs:
        logger.debug("[%s] %s", artifact, text() if callable(text) else text)


def logging_enabled(artifact: str) -> bool:
    return artifact in _enabled_logs


def _logs_from_environment() -> None:
    names = [n.strip() for n in os.environ.get("FIRESTEEL_LOGS", "").split(",") if n.strip()]
    if unknown := [name for name in names if name not in LOG_NAMES]:
        logger.warning("FIRESTEEL_LOGS: there is no log %s; there are %s", ", ".join(unknown), ", ".join(LOG_NAMES))
    if known := [name for name in names if name in LOG_NAMES]:
        set_logs(**dict.fromkeys(known, True))


_logs_from_environment()
