"""Frames as data: what a continuation runs for real, and generators that cross a break, so that a later region can go on inside of them.

At a break a generator of the region becomes a real one (`shell`), which delegates to a `GeneratorState`: the suspended frame as a
specification and values.  Real code that calls next, send, throw or close on it gets a resumed real frame; a region that is
captured later reads the state, runs the frame symbolically and writes the new state back.

    gen = shell("name", started=True)       # looks and acts like the user's generator
    suspend(gen, spec, values)
"""
from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

from firesteel.capture.code import program
from firesteel.capture.region_code import HANDLED, SUSPENDED, VALUE
from firesteel.capture.resume import resume_function


class GeneratorState:
    """Mutable.  With a `spec` the frame is data; with `real` it is a generator of CPython; with neither it is finished or running."""

    __slots__ = ("spec", "values", "real", "_priming")

    def __init__(self) -> None:
        self.spec: Any = None       # a FrameSpec of region_code.py
        self.values: tuple[Any, ...] = ()
        self.real: Generator | None = None
        self._priming = False

    def _frame(self) -> Generator:
        if self.real is None:
            self.real = revive(self.spec, self.values) if self.spec is not None else _finished()
            self.spec, self.values = None, ()
        return self.real

    # -- what `yield from` calls -----------------------------------------------------------------------------------
    def __iter__(self) -> GeneratorState:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        if self._priming:
            self._priming = False
            return None
        return self._frame().send(value)

    def throw(self, *error: Any) -> Any:
        return self._frame().throw(*error)

    def close(self) -> None:
        self._frame().close()


def _finished() -> Generator:
    made = (_ for _ in ())
    next(made, None)
    return made


def _delegate(state: GeneratorState) -> Generator:
    return (yield from state)


SHELL_CODE = _delegate.__code__


def shell(name: str, started: bool) -> Generator:
    """A generator object over a new state; one that has started stands inside of its `yield from`."""
    state = GeneratorState()
    made: Any = _delegate(state)
    made.__name__ = made.__qualname__ = name
    if started:
        state._priming = True
        next(made)
    return made


def state_of(gen: Any) -> GeneratorState | None:
    """The state behind a shell; None for any other generator, and for one that is finished."""
    if type(gen) is not types.GeneratorType or gen.gi_code is not SHELL_CODE or gen.gi_frame is None:
        return None
    inner: Any = gen.gi_yieldfrom
    return inner if inner is not None else gen.gi_frame.f_locals["state"]


EMPTY, REAL = "empty", "real"


def status_of(gen: Any) -> Any:
    """The suspended frame behind a generator where it is data; EMPTY for a frame that runs or is finished; else REAL."""
    state = state_of(gen)
    if state is None or state.real is not None:
        return REAL
    return EMPTY if state.spec is None else state.spec


def values_of(gen: Any) -> tuple[Any, ...]:
    return state_of(gen).values     # type: ignore[union-attr]  # it is a shell, and not finished


def suspend(gen: Any, spec: Any, values: tuple[Any, ...]) -> None:
    """Written at the end of a region that ran the generator; no spec: it is finished, or runs."""
    state = state_of(gen)
    if state is not None:
        state.spec, state.values, state.real = spec, values, None


# -- real frames --------------------------------------------------------------------------------------------------------
def split_values(spec: Any, given: Any) -> tuple[dict[str, Any], list[Any]]:
    """Slots and real stack items out of the values of a suspended frame."""
    slots = {name: next(given) for name in spec.slots}
    items = []
    for kind in spec.stack:
        if kind == HANDLED:
            next(given)
        if kind in (VALUE, HANDLED):
            items.append(traced(next(given)))
    return slots, items


def traced(item: Any) -> Any:
    """An exception that goes into a real frame has been raised: CPython's exit of a with block takes its traceback for granted."""
    if isinstance(item, BaseException) and item.__traceback__ is None:
        try:
            raise item
        except BaseException:
            return item
    return item


def revive(spec: Any, values: tuple[Any, ...]) -> Generator:
    """A generator of CPython that stands where the suspended frame does."""
    slots, items = split_values(spec, iter(values))
    made = rest_of(spec, slots)(*items)
    if spec.generator == SUSPENDED:
        next(made)
    return made


def rest_of(spec: Any, slots: dict[str, Any], awaits: int | None = None, drops: bool = False) -> Callable[..., Any]:
    """What a suspended frame still has to do, as a function of its stack items."""
    cells = {name: value for name, value in slots.items() if isinstance(value, types.CellType)}
    names = [name for name in spec.code.co_varnames if name in slots and name not in cells]
    resumed = resume_function(spec.code, spec.index, names, list(spec.stack), spec.scope, cells, awaits, drops, spec.generator)
    return functools.partial(resumed, *[slots[name] for name in names])


def run_frames(spec: Sequence[Any], inputs: tuple[Any, ...]) -> Any:
    """The frames of a continuation, for real, the innermost first inside of the others."""
    given = iter(inputs)
    calls = [(frame, *split_values(frame, given), next(given) if frame.returns == "made" or frame.generator else None) for frame in spec]
    inside: Callable[[], Any] | None = None
    for n, (frame, slots, items, extra) in reversed(list(enumerate(calls))):
        drops = n < len(calls) - 1 and calls[n + 1][0].returns == "discard"
        if n < len(calls) - 1 and calls[n + 1][0].generator:
            frame, items, inside = *_before_asking(frame, items), None
        inside = _frame_call(frame, slots, items, extra, inside, drops)
        if frame.generator:
            state: Any = state_of(extra)
            state.real = inside()       # started by the frame outside, when it asks for the next element
    assert inside is not None, spec
    return inside()


def _before_asking(frame: Any, items: list[Any]) -> tuple[Any, list[Any]]:
    """A frame that waits for a generator's next element, at the instruction that asks for it, and its stack there."""
    sends = program(frame.code)[frame.index - 1].opname == "SEND"
    return dataclasses.replace(frame, index=frame.index - 1, stack=(*frame.stack, *[VALUE] * sends)), items + [None] * sends


def _frame_call(frame: Any, slots: dict[str, Any], items: list[Any], made: Any, inside: Callable[[], Any] | None,
                drops: bool) -> Callable[[], Any]:
    rest = rest_of(frame, slots, frame.index - 1 if inside is not None else None, drops)

    def call() -> Any:
        result = rest(*items, *([inside] if inside is not None else []))
        return made if frame.returns == "made" else result
    return call
