"""What the code of a region is made of, where nothing is captured: suspended frames as data, jumps to them, and the code itself.

A process that finds its regions in the cache (regioncache.py) needs this much of capture and no more: the machine and its values are loaded when
the first region is captured.

    spec = (FrameSpec(f.__code__, index, f.__globals__, ("x", "total"), (VALUE,), "push"),)
    input_names(spec)                   # ["x", "total", "stack item 0"]
"""
from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from firesteel.records import dataclass

if TYPE_CHECKING:
    import torch

    from firesteel.capture.guard_function import GuardFunction

# What a stack slot holds.
VALUE = "value"         # an object: the argument
NULL = "null"           # no argument
HANDLED = "handled"     # what PUSH_EXC_INFO put below the exception; the argument is the exception being handled since then.
                        # After POP_EXCEPT took a copy of it, the slot is VALUE with None: nothing reads it any more
HANDLED_AGAIN = "handled again"     # a copy of the topmost HANDLED slot below it, about to be popped; no argument
LASTI = "lasti"         # the place of an exception, which only tracebacks read; no argument
# How a generator's frame stands.
SUSPENDED = "suspended"     # at a yield
UNSTARTED = "unstarted"     # before its first instruction
RUNNING = "running"         # it is being executed by the frame outside

END: Any = object()      # what a loop's iterator gives when it is exhausted


@dataclass(frozen=True)
class FrameSpec:
    """A suspended frame without its values: the part of a continuation that is fixed."""
    code: types.CodeType
    index: int                          # the instruction to go on with
    scope: Any                          # globals, by identity
    slots: tuple[str, ...]
    stack: tuple[str, ...]              # kinds
    returns: str                        # push, discard, or made: the result is an object that is handed over
    module: tuple[str, str, type] | None = None
    generator: str = ""                 # of a generator: how it stands (the words of resume.py)

    def __hash__(self) -> int:
        return hash((id(self.code), self.index, self.slots, self.stack, self.returns))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrameSpec) and self.code is other.code and self.scope is other.scope and (
            (self.index, self.slots, self.stack, self.returns, self.module, self.generator)
            == (other.index, other.slots, other.stack, other.returns, other.module, other.generator))


Spec = tuple[FrameSpec, ...]            # outermost frame first


def input_names(spec: Spec) -> list[str]:
    """The names of a continuation's inputs: slots, then stack items, frame by frame from the outermost."""
    names: list[str] = []
    for depth, frame in enumerate(spec):
        suffix = "" if depth == len(spec) - 1 else f"_{len(spec) - 1 - depth}"
        names += [f"{name}{suffix}" for name in frame.slots]
        for n, kind in enumerate(frame.stack):
            if kind == VALUE:
                names.append(f"stack item {n}{suffix}")
            elif kind == HANDLED:
                names += [f"previous{n}{suffix}", f"handled{n}{suffix}"]
        if frame.returns == "made":
            names.append(f"made{suffix}")
        if frame.generator == RUNNING:
            names.append(f"generator{suffix}")
    return unique(names)


def unique(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    result = []
    for name in names:
        count = seen.get(name, -1) + 1
        seen[name] = count
        result.append(name if count == 0 else f"{name}__{count}")
    return result


class Jump:
    """What a run function returns at a break: where to go on, with which values."""

    __slots__ = ("region", "inputs")

    def __init__(self, region: Any, inputs: tuple[Any, ...]):
        self.region, self.inputs = region, inputs

    def go(self) -> Any:
        """Runs the continuation, which alone holds the values: it may let them go."""
        return self.region.step(self._take())

    def _take(self) -> tuple[Any, ...]:
        inputs, self.inputs = self.inputs, ()
        return inputs


@dataclass
class RegionCode:
    """A region's new code."""
    guard: GuardFunction
    run: Callable[..., Any]
    graph: Callable[[], torch.fx.GraphModule | None]
    broke: str
    keep: bool          # False: code that only raises, not to be used again
    boxed: bool         # the run function takes its values in one list, which it empties
