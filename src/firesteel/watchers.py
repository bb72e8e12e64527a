"""Observers of the beginning and end of each stage: a progress line on a terminal, ranges in torch.profiler's traces.

A compilation of more than a second shows one line, which the next replaces and its end removes:

    firesteel: compiling, fuse, 1.3 s
    firesteel: compiling, compile_kernels, 12 of 40 kernels, 2.1 s

Nothing is written where stderr is no terminal, or with fs.config.progress off (FIRESTEEL_PROGRESS=0).
"""
from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch

from firesteel import artifacts
from firesteel.config import config

AFTER = 1.0         # seconds of silence


class ProgressLine:
    """The line of the one compilation that shows it; others that run at the same time are silent."""

    def __init__(self) -> None:
        self.owner, self.begun, self.stage, self.shown = 0, 0.0, "", False

    def watch(self, stage: str, start: float, end: float | None, depth: int) -> None:
        if end is None and depth == 0 and not self.owner:
            self.owner, self.begun = threading.get_ident(), start
        if self.owner != threading.get_ident():
            return
        if end is None:
            self.stage = stage
            self.show()
        elif depth == 0:
            self.owner = 0
            self.clear()

    def show(self, what: str = "") -> None:
        """`what` is done so far of the stage."""
        seconds = time.perf_counter() - self.begun
        if self.owner and seconds > AFTER and config.progress:
            self.shown = self._write(f"\r\x1b[Kfiresteel: compiling, {self.stage}{f', {what}' if what else ''}, {seconds:.1f} s") or self.shown

    def clear(self) -> None:
        if self.shown:
            self.shown = False
            self._write("\r\x1b[K")

    def _write(self, text: str) -> bool:
        """Is there a terminal that shows it?  It may have been closed."""
        try:
            if sys.stderr is None or not sys.stderr.isatty():
                return False
            sys.stderr.write(text)
            sys.stderr.flush()
            return True
        except (OSError, ValueError):
            return False


progress = ProgressLine()
_ranges = threading.local()


def ranges(stage: str, start: float, end: float | None, depth: int) -> None:
    """Each stage is a range of the trace that is being recorded."""
    opened: list[Any] = _ranges.__dict__.setdefault("opened", [])
    if end is not None:
        while opened and opened[-1][0] >= depth:
            opened.pop()[1].__exit__(None, None, None)
    elif torch.autograd._profiler_enabled():
        one = torch._C._profiler._RecordFunctionFast(f"firesteel compiles: {stage}")      # no operator, which a trace would record
        one.__enter__()
        opened.append((depth, one))


artifacts.WATCHERS += [progress.watch, ranges]
