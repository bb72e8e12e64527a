"""Generators whose frames the machine runs: next, send, throw, close, and `yield from` between them.

A `for` loop or a `yield from` over a generator pushes its frame, so a break inside is one split like any other.  Other
callers (`list(gen)`, `next(gen)`) need the element at once and run the frame to its next yield.  A generator that crosses a break is
written as a real one with its state beside it (`suspended.py`), and read back as a frame.

    value = throw_into(m, generator, exception)     # what it yields next; None when it has returned
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from firesteel.capture import polyfills
from firesteel.capture.effects import Effect
from firesteel.capture.frames import Frame
from firesteel.capture.instr import Instr
from firesteel.capture.liveness import live_slots
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Source
from firesteel.capture.values.base import MethodOfOwner, UserRaise, Value
from firesteel.capture.values.class_objects import ClassValue
from firesteel.capture.values.const import NONE
from firesteel.capture.values.exceptions import ExceptionValue
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.iterators import EnumerateIterator, FilterIterator, IteratorValue, MapIterator, ZipIterator
from firesteel.errors import Break
from firesteel.table import Table

GENERATOR_TYPE = type(_ for _ in ())


class GeneratorValue(IteratorValue):
    """A generator; the user's frame is `frame`, None when it is finished."""

    words = "generator {self.name}"
    cls = GENERATOR_TYPE

    def __init__(self, frame: Frame | None, name: str, source: Source | None = None, obj: Any = None):
        self.frame: Any = frame
        self.name = name
        self.result: Value = NONE   # what it returned
        self.source, self.obj = source, obj
        self.touched = False        # has the frame run here?

    def next(self, m: Machine) -> Value | None:
        return m.resume_generator(self, NONE)

    def getattr(self, m: Machine, name: str) -> Value:
        row = METHODS.get(name)
        if row is not None:
            return GeneratorMethod(self, name)
        if name in ("__name__", "__qualname__"):
            return m.fresh(self.name)
        return super().getattr(m, name)

    # -- the frame -------------------------------------------------------------------------------------------------
    def started(self) -> bool:
        return self.frame is not None and self.frame.instr().opname != "RETURN_GENERATOR"

    def delegate(self) -> Value | None:
        """What a generator that is suspended in `yield from` waits for."""
        frame = self.frame
        if frame is None or frame.pc < 2 or frame.instr().opname != "YIELD_VALUE" or frame.program[frame.pc - 2].opname != "SEND":
            return None
        return frame.stack[-2]

    def end_delegation(self, result: Value) -> None:
        """The inner iterator returned: the frame continues behind its `yield from`."""
        self.frame.stack[-2:] = [result]
        self.frame.pc = self.frame.program[self.frame.pc - 2].target.index

    def rebuild(self, e: Emitter) -> str:
        return e.new_generator(self)


class GeneratorMethod(MethodOfOwner):
    """gen.send, gen.throw or gen.close"""

    words = "generator.{self.name}"
    cls = type((_ for _ in ()).send)

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        return METHODS[self.name](m, self.owner, args)


METHODS: Table[Any] = Table("generator method", "capture/values/generators.py")


def given(m: Machine, generator: GeneratorValue, item: Value | None) -> Value:
    """What next, send and throw return: an element, or StopIteration with what the generator returned."""
    if item is not None:
        return item
    result = generator.result
    m.effects.change(generator, "result", NONE)
    raise UserRaise(ExceptionValue(StopIteration, [] if result is NONE else [result]))


@CALLS.row(polyfills.finished)
def call_finished(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if isinstance(args[0], GeneratorValue):
        return given(m, args[0], None)
    raise UserRaise(ExceptionValue(StopIteration, []))


@METHODS.row("send")
def generator_send(m: Machine, self: GeneratorValue, args: Args) -> Value:
    if self.frame is not None and not self.started() and args[0] is not NONE:
        raise m.raise_real(TypeError("can't send non-None value to a just-started generator"))
    return given(m, self, m.resume_generator(self, args[0]))


@METHODS.row("throw")
def generator_throw(m: Machine, self: GeneratorValue, args: Args) -> Value:
    error = args[1] if len(args) > 1 and isinstance(args[1], ExceptionValue) else args[0]
    if isinstance(error, ClassValue):
        error = m.call_now(error, list(args[1:2]), {})
    if not isinstance(error, ExceptionValue):
        raise Break("generator", name="throw")
    return given(m, self, throw_into(m, self, error))


@METHODS.row("close")
def generator_close(m: Machine, self: GeneratorValue, args: Args) -> Value:
    if self.frame is None:
        return NONE
    if not self.started():
        m.finish_generator(self)
        return NONE
    try:
        item = throw_into(m, self, ExceptionValue(GeneratorExit, []))
    except UserRaise as raised:
        if issubclass(raised.value.python_type(), (GeneratorExit, StopIteration)):
            return NONE
        raise
    if item is not None:
        raise m.raise_real(RuntimeError("generator ignored GeneratorExit"))
    return NONE


def throw_into(m: Machine, self: GeneratorValue, error: Value) -> Value | None:
    """Raises in the generator where it stands; what it yields next, None when it returns."""
    inner = self.delegate()
    if isinstance(inner, GeneratorValue):
        if issubclass(error.python_type(), GeneratorExit):
            generator_close(m, inner, [])
        else:
            try:
                item = throw_into(m, inner, error)
            except UserRaise as raised:
                return m.resume_generator(self, NONE, raised.value)
            return item if item is not None else m.resume_generator(self, NONE, after=inner.result)
    return m.resume_generator(self, NONE, error)


def send_into(m: Machine, f: Frame, iterator: Value, value: Value, i: Instr) -> None:
    """SEND: the iterator's next element, or the end of the delegation."""
    if isinstance(iterator, GeneratorValue) and m.push_generator(iterator, value):
        f.stack.pop()
        return
    if value is NONE or isinstance(iterator, GeneratorValue):
        item = m.next_now(iterator)
    else:
        item = _sent(m, iterator, value)
    if item is not None:
        f.stack[-1] = item
        return
    f.stack[-2:] = [iterator.result if isinstance(iterator, GeneratorValue) else NONE]
    f.pc = i.target.index


def _sent(m: Machine, iterator: Value, value: Value) -> Value | None:
    try:
        return m.call_now(iterator.getattr(m, "send"), [value], {})
    except UserRaise as raised:
        if raised.value.python_type() is StopIteration:
            return None
        raise


def iterate_into(m: Machine, f: Frame, i: Instr) -> None:
    """FOR_ITER"""
    iterator = f.stack[-1]
    if isinstance(iterator, EnumerateIterator) and isinstance(iterator.part, (MapIterator, FilterIterator, GeneratorValue)):
        iterator = in_steps(m, f)       # a real one that comes out of a break could not be looked into
    if isinstance(iterator, GeneratorValue) and m.push_generator(iterator, NONE):
        return
    item = m.next_now(iterator)
    if item is None:
        f.stack.pop()
        f.pc = i.target.index
    else:
        f.stack.append(item)


# -- where something breaks inside of an iterator -------------------------------------------------------------------------
def in_steps(m: Machine, f: Frame) -> Value:
    """A generator that takes the iterator's place in a loop, so that a break inside of it is a split like any other; the iterator itself where
    there is none.  What else holds the iterator sees it advance, since its parts do; but for the count of an enumerate."""
    iterator = f.stack[-1]
    steps = STEPS.get(type(iterator))
    if steps is not None and not (isinstance(iterator, EnumerateIterator) and is_held(m, iterator)):
        f.stack[-1] = m.call_now(m.constant_object(steps[0]), steps[1](iterator), {})
    return f.stack[-1]


def is_held(m: Machine, iterator: Value) -> bool:
    """Has a frame got it in a variable that it will read again?"""
    slots = [value for frame in m.frames for name, value in frame.slots.items() if name in live_slots(frame.code, frame.pc)]
    return any(value is iterator or getattr(value, "content", None) is iterator for value in slots)


# iterator -> (generator function that gives the same, its arguments)
STEPS: dict[type, tuple[Any, Any]] = {
    ZipIterator: (polyfills.zip_steps, lambda iterator: iterator.parts),
    MapIterator: (polyfills.map_steps, lambda iterator: [iterator.fn, *iterator.parts]),
    FilterIterator: (polyfills.filter_steps, lambda iterator: [iterator.fn, iterator.part]),
    EnumerateIterator: (polyfills.enumerate_steps, lambda iterator: [iterator.part, iterator.count])}


def loop_in_steps(m: Machine, f: Frame) -> bool:
    before = f.stack[-1]
    return in_steps(m, f) is not before


def drain(m: Machine, f: Frame) -> bool:
    """A list of its elements takes the iterator's place."""
    if not isinstance(f.stack[-1], IteratorValue):
        return False
    m.constant_object(polyfills.list_steps).call(m, [f.stack.pop()], {})
    return True


# instruction in which something broke that an iterator runs -> what to do before it is executed again; False where there is nothing to do
AGAIN: dict[str, Callable[[Machine, Frame], bool]] = {
    "FOR_ITER": loop_in_steps, "LIST_EXTEND": drain, "SET_UPDATE": drain, "UNPACK_SEQUENCE": drain, "UNPACK_EX": drain}


def exhausted(caller: Frame, result: Value) -> None:
    """The generator that a caller waits for has returned."""
    instr = caller.instr()
    if instr.opname == "FOR_ITER":
        caller.stack.pop()
    else:
        caller.stack[-1:] = [result]
    caller.pc = instr.target.index


# -- generators that are dropped ----------------------------------------------------------------------------------------
def drop(m: Machine, value: Value, leaving: Any = None) -> None:
    """A reference to an iterator is gone, with `leaving` all those of that frame: where it was the last, Python closes the generator in it."""
    if not isinstance(value, GeneratorValue):
        for part in parts_of(value):
            for iterator in part if isinstance(part, list) else [part]:
                if isinstance(iterator, IteratorValue):
                    drop(m, iterator, leaving)
        return
    if value.source is not None or value.frame is None or value.frame in m.frames:
        return
    held = [local for local in (*value.frame.slots.values(), *value.frame.stack) if isinstance(local, IteratorValue)]
    if not held and not waits_in_a_block(value) or is_reachable(m, value, leaving):
        return
    try:
        if waits_in_a_block(value):
            generator_close(m, value, [])
    except UserRaise as raised:
        raise Break("generator", name="end, which raises when it is dropped,") from raised
    for iterator in held:
        drop(m, iterator, leaving)


def let_go(m: Machine, value: Value, undo: Callable[[], Any]) -> None:
    """`drop` for an instruction that has changed its frame already."""
    try:
        drop(m, value)
    except BaseException:
        undo()
        raise


def waits_in_a_block(generator: GeneratorValue) -> bool:
    """Would closing it run anything: a finally, an except, the end of a with block?"""
    inner = generator.delegate()
    return generator.started() and (generator.frame.instr().handler is not None or isinstance(inner, GeneratorValue) and waits_in_a_block(inner))


def is_reachable(m: Machine, target: Value, leaving: Any) -> bool:
    """Can the program still reach it?"""
    frames = [frame for frame in m.frames if frame is not leaving]
    todo: list[Any] = [m.effects.entries, m.effects._attributes, *([f.slots, f.stack, f.closure, f.returns, f.generator] for f in frames)]
    if leaving is not None:
        todo.append(leaving.stack)
    seen: set[int] = set()
    while todo:
        item = todo.pop()
        if item is target:
            return True
        if id(item) in seen:
            continue
        seen.add(id(item))
        todo += parts_of(item)
    return False


def parts_of(item: Any) -> list[Any]:
    if isinstance(item, (list, tuple)):
        return list(item)
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, Effect):
        return [item.target, *item.data]
    if isinstance(item, GeneratorValue) and item.frame is not None:
        return [item.frame.slots, item.frame.stack]
    return list(vars(item).values()) if isinstance(item, Value) and hasattr(item, "__dict__") else []
