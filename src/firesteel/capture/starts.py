"""Where the machine starts: the first frames of a region, with the values of its inputs.

    start_function(m, fn, values, {})       # a call of the region's function
    start_frames(m, spec, iter(values))     # the frames of a continuation, suspended at a break
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from firesteel.capture.builder import as_cell, build, stack_values
from firesteel.capture.frames import Discard, Frame
from firesteel.capture.machine import SymbolicMachine
from firesteel.capture.region_code import Spec
from firesteel.capture.source import Fixed
from firesteel.capture.values.base import PENDING, CallableObject, HandledValue, Value
from firesteel.errors import Break


def start_function(m: SymbolicMachine, fn: Callable[..., Any], values: list[Value], kwargs: dict[str, Value]) -> Value | None:
    target = build(m, fn, Fixed(fn))
    if isinstance(target, CallableObject):      # there is no frame whose instructions look at them
        values, kwargs = list(map(m.look, values)), {name: m.look(value) for name, value in kwargs.items()}
    result = target.call(m, values, kwargs)
    return None if result is PENDING else result


def start_frames(m: SymbolicMachine, spec: Spec, given: Iterator[Value]) -> None:
    try:
        _build_frames(m, spec, given)
    except Break:
        m.frames.clear()        # some are missing: there is no state to go on with, all of it runs eagerly
        raise


def _build_frames(m: SymbolicMachine, spec: Spec, given: Iterator[Value]) -> None:
    for frame_spec in spec:
        f = Frame(frame_spec.code, frame_spec.scope, {}, pc=frame_spec.index)
        for name in frame_spec.slots:
            f.slots[name] = as_cell(m, next(given))
        last = frame_spec is spec[-1] and f.program[f.pc].opname in ("STORE_FAST", "POP_TOP")
        f.stack = stack_values(m, frame_spec.stack, given, last)
        m.handling = next((item.current for item in reversed(f.stack) if isinstance(item, HandledValue)), m.handling)
        f.returns = {"push": None, "discard": Discard}.get(frame_spec.returns, frame_spec.returns)
        if f.returns == "made":
            f.returns = m.look(next(given))
        f.module = frame_spec.module
        if frame_spec.generator:
            generator: Any = m.look(next(given))
            f.generator, generator.frame, generator.touched = generator, f, True
        m.frames.append(f)
