"""A break: what the generated code does at the instruction that could not be captured, and where the program continues.

`ACTIONS` has a row for each instruction that can be executed for real in generated Python: its text, and the exits after it (how
the stack has changed, which instruction is next).  Each exit is a continuation: the state of *all* frames, of which only live
slots are handed over.  An instruction without a row is not executed here: the rest of the program runs eagerly from it.

Numbered rules:
1. All live values are written before the action, so that an object is made once, whoever holds it.
2. If a frame has a handler around its instruction, the action stands in a try; the handler is a continuation as well.
3. A frame outside waits for the result of the one inside; only the innermost has the action's result on its stack.
"""
from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import field
from typing import Any

from firesteel.capture.emit import WRITERS
from firesteel.capture.frames import Frame
from firesteel.capture.instr import Instr
from firesteel.capture.liveness import live_slots
from firesteel.capture.opcodes import call_parts
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.region_code import END, HANDLED, HANDLED_AGAIN, RUNNING, SUSPENDED, UNSTARTED, VALUE, FrameSpec, Spec
from firesteel.capture.region_code import LASTI as LASTI_SLOT
from firesteel.capture.region_code import NULL as NULL_SLOT
from firesteel.capture.suspended import shell, suspend
from firesteel.capture.values.base import LASTI, NULL, HandledValue, Value
from firesteel.capture.values.class_objects import ClassValue
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.functions import BoundMethodValue
from firesteel.capture.values.generators import GeneratorValue
from firesteel.capture.values.mappings import DictValue
from firesteel.homes import is_library
from firesteel.records import dataclass
from firesteel.table import Table


@dataclass
class Exit:
    """One way out of an action."""
    next: int                           # index of the instruction to go on with, in the innermost frame
    pops: int
    results: list[str] = field(default_factory=list)    # texts of what is pushed
    condition: str = ""                 # empty: otherwise


@dataclass
class Action:
    lines: list[str]
    exits: list[Exit]


ActionRow = Callable[[Emitter, "Machine", "Frame", Instr], Action]
ACTIONS: Table[ActionRow] = Table("action of a break", "capture/breaks.py")


def simple(e: Emitter, i: Instr, text: str, pops: int, pushes: bool = True) -> Action:
    """An expression (or, with nothing pushed, a statement)."""
    if not pushes:
        return Action([text], [Exit(i.index + 1, pops)])
    name = e.name()
    return Action([f"{name} = {text}"], [Exit(i.index + 1, pops, [name])])


# -- calls --------------------------------------------------------------------------------------------------------------
def call_text(e: Emitter, m: Machine, fn: Value, args: list[Value], kwargs: dict[str, Value]) -> str:
    named = [f"{k}={e.expr(v)}" if k.isidentifier() else f"**{{{k!r}: {e.expr(v)}}}" for k, v in kwargs.items()]
    return f"{callee_text(e, m, fn)}({', '.join([*map(e.expr, args), *named])})"


def callee_text(e: Emitter, m: Machine, fn: Value) -> str:
    part = None if m.part is None else m.part(callee(fn))
    return e.expr(fn) if part is None else e.constant(part)


def callee(fn: Value) -> Any:
    """The object that is called; None for one made inside."""
    if isinstance(fn, BoundMethodValue) and isinstance(fn.owner, ClassValue):
        own = fn.fn.identity()
        return None if own is None else types.MethodType(own, fn.owner.cls)
    return fn.identity()


@ACTIONS.row("CALL")
def act_call(e: Emitter, m: Machine, f: Frame, i: Instr) -> Action:
    fn, args, kwargs = call_parts(f, i)
    if fn.identity() is super and not args:     # it would look for __class__ in the generated function
        return simple(e, i, m.implicit_super().rebuild(e), i.arg + 2)
    if not args and is_one_of(fn, locals, globals):
        return simple(e, i, e.expr(fn.call(m, [], {})), i.arg + 2)
    if is_one_of(fn, eval, exec) and len(args) == 1:    # it would see the generated function's names
        args = [*args, m.scope_value(f.scope), DictValue({n: (ConstValue(n), v) for n, v in m.local_variables().items()})]
    return simple(e, i, call_text(e, m, fn, args, kwargs), i.arg + 2)


def is_one_of(fn: Value, *known: Any) -> bool:
    """By identity: an object of the user's may have an __eq__."""
    return any(fn.identity() is one for one in known)


@ACTIONS.row("CALL_FUNCTION_EX")
def act_call_function_ex(e: Emitter, m: Machine, f: Frame, i: Instr) -> Action:
    named = i.arg & 1
    x, y = f.stack[-3 - named:len(f.stack) - 1 - named]
    fn, first = (y, []) if x is NULL else (x, [] if y is NULL else [y])
    parts = [*map(e.expr, first), f"*{e.expr(f.stack[-1 - named])}"] + ([f"**{e.expr(f.stack[-1])}"] if named else [])
    return simple(e, i, f"{callee_text(e, m, fn)}({', '.join(parts)})", 3 + named)


# -- attributes, items, operators ---------------------------------------------------------------------------------------
# instruction -> (text over the operands {0}, {1}, ... and the argument {arg}, how many items it takes, does it push one?)
TEXTS: dict[str, tuple[str, int, bool]] = {
    "LOAD_ATTR": ("({0}).{arg}", 1, True), "STORE_ATTR": ("{1}.{arg} = {0}", 2, False), "DELETE_ATTR": ("del {0}.{arg}", 1, False),
    "BINARY_SUBSCR": ("{0}[{1}]", 2, True), "STORE_SUBSCR": ("{1}[{2}] = {0}", 3, False), "DELETE_SUBSCR": ("del {0}[{1}]", 2, False),
    "UNARY_NEGATIVE": ("-{0}", 1, True), "UNARY_POSITIVE": ("+{0}", 1, True), "UNARY_INVERT": ("~{0}", 1, True), "UNARY_NOT": ("not {0}", 1, True),
    "COMPARE_OP": ("{0} {arg} {1}", 2, True), "TO_BOOL": ("bool({0})", 1, True), "GET_ITER": ("iter({0})", 1, True),
    "FORMAT_SIMPLE": ("format({0})", 1, True), "FORMAT_WITH_SPEC": ("format({0}, {1})", 2, True), "CONVERT_VALUE": ("{arg.__name__}({0})", 1, True),
}


def _as_text(text: str, pops: int, pushes: bool) -> ActionRow:
    return lambda e, m, f, i: simple(e, i, text.format(*map(e.expr, f.stack[-pops:]), arg=i.argval), pops, pushes)


for _name, _row in TEXTS.items():
    ACTIONS.add(_name, _as_text(*_row))
ACTIONS.row("LOAD_SUPER_ATTR")(lambda e, m, f, i: simple(e, i, f"super({e.expr(f.stack[-2])}, {e.expr(f.stack[-1])}).{i.argval}", 3))


@ACTIONS.row("BINARY_OP")
def act_binary_op(e: Emitter, m: Machine, f: Frame, i: Instr) -> Action:
    a, b = map(e.expr, f.stack[-2:])
    if i.argval[-1] != "=":
        return simple(e, i, f"{a} {i.argval} {b}", 2)
    name = e.name()
    return Action([f"{name} = {a}", f"{name} {i.argval} {b}"], [Exit(i.index + 1, 2, [name])])


@ACTIONS.row("CONTAINS_OP")
def act_contains_op(e: Emitter, m: Machine, f: Frame, i: Instr) -> Action:
    a, b = map(e.expr, f.stack[-2:])
    return simple(e, i, f"{a} {'not in' if i.arg else 'in'} {b}", 2)


ACTIONS.row("BUILD_STRING")(lambda e, m, f, i: simple(e, i, f"''.join(({''.join(e.expr(v) + ', ' for v in f.stack[-i.arg:])}))", i.arg))


@ACTIONS.row("IMPORT_NAME")
def act_import_name(e: Emitter, m: Machine, f: Frame, i: Instr) -> Action:
    level, names = map(e.expr, f.stack[-2:])
    return simple(e, i, f"__import__({i.argval!r}, {e.constant(f.scope)}, None, {names}, {level})", 2)


# -- branches and loops -------------------------------------------------------------------------------------------------
def _branch(negated: bool, e: Emitter, m: Machine, f: Frame, i: Instr) -> Action:
    name = e.name()
    condition = f"not {name}" if negated else name
    return Action([f"{name} = bool({e.expr(f.stack[-1])})"], [Exit(i.target.index, 1, [], condition), Exit(i.index + 1, 1)])


ACTIONS.add("POP_JUMP_IF_TRUE", functools.partial(_branch, False))
ACTIONS.add("POP_JUMP_IF_FALSE", functools.partial(_branch, True))

@ACTIONS.row("FOR_ITER")
def act_for_iter(e: Emitter, m: Machine, f: Frame, i: Instr) -> Action:
    name, end, iterator = e.name(), e.constants.bind(END, "end"), e.expr(f.stack[-1])
    exits = [Exit(i.target.index, 1, [], f"{name} is {end}"), Exit(i.index + 1, 0, [name])]
    return Action([f"{name} = next({iterator}, {end})"], exits)


def unpack(value: Any, count: int) -> tuple[Any, ...]:
    """Exactly `count` items, the last first; Python's own error otherwise."""
    items = tuple(value)
    if len(items) > count:
        raise ValueError(f"too many values to unpack (expected {count})")
    if len(items) < count:
        raise ValueError(f"not enough values to unpack (expected {count}, got {len(items)})")
    return items[::-1]


@ACTIONS.row("UNPACK_SEQUENCE")
def act_unpack_sequence(e: Emitter, m: Machine, f: Frame, i: Instr) -> Action:
    names = [e.name() for _ in range(i.arg)]
    line = f"({''.join(n + ', ' for n in names)}) = {e.constant(unpack)}({e.expr(f.stack[-1])}, {i.arg})"
    return Action([line], [Exit(i.index + 1, 1, names)])


@ACTIONS.row("BEFORE_WITH")
def act_before_with(e: Emitter, m: Machine, f: Frame, i: Instr) -> Action:
    manager, leave, entered = e.expr(f.stack[-1]), e.name(), e.name()
    lines = [f"{leave} = {manager}.__exit__", f"{entered} = type({manager}).__enter__({manager})"]
    return Action(lines, [Exit(i.index + 1, 1, [leave, entered])])


@ACTIONS.row("WITH_EXCEPT_START")
def act_with_except_start(e: Emitter, m: Machine, f: Frame, i: Instr) -> Action:
    leave, exc = e.expr(f.stack[-4]), e.expr(f.stack[-1])
    return simple(e, i, f"{leave}(type({exc}), {exc}, {exc}.__traceback__)", 0)


# -- states of frames ---------------------------------------------------------------------------------------------------
@dataclass
class FramesState:
    """A continuation with the texts of its values, in the order of `input_names`."""
    spec: Spec
    values: list[str]


def frame_state(e: Emitter, m: Machine, f: Frame, index: int, stack: list[Value], extra: list[str]) -> tuple[FrameSpec, list[str]]:
    """One frame that continues at `index` with `stack`, and above it values whose texts are `extra`."""
    live = live_slots(f.code, index) | (live_elsewhere(f) if f is not m.frames[-1] else frozenset())
    slots, kinds, values = written_values(e, f, live, stack)
    kinds += [VALUE] * len(extra)
    values += extra
    returns = "push" if f.returns is None else "made" if isinstance(f.returns, Value) else "discard"
    if returns == "made":
        values.append(e.expr(f.returns))
    if f.generator is not None:
        values.append(e.expr(f.generator))
    return FrameSpec(f.code, index, f.scope, slots, tuple(kinds), returns, f.module, RUNNING if f.generator is not None else ""), values


def written_values(e: Emitter, f: Frame, live: frozenset[str], stack: list[Value]) -> tuple[tuple[str, ...], list[str], list[str]]:
    """Names of the live slots, kinds of the stack items, and the texts of all these values."""
    slots = tuple(name for name in f.slots if name in live or is_watched(f.slots[name]))
    values = [e.expr(f.slots[name]) for name in slots]
    kinds = []
    for n, item in enumerate(stack):
        kind, texts = (HANDLED_AGAIN, []) if is_handled(item) and any(item is below for below in stack[:n]) else stack_item(e, item)
        kinds.append(kind)
        values += texts
    return slots, kinds, values


def is_watched(value: Any) -> bool:
    """May the program see when the object dies?  A variable keeps it alive that nothing reads any more."""
    obj = value.obj
    referred = obj is not None and not is_library(type(obj).__module__) and weakref.getweakrefcount(obj) > 0
    return referred or value.watched or hasattr(value.cls, "__del__")


# -- generators ---------------------------------------------------------------------------------------------------------
def suspended_frame(e: Emitter, generator: GeneratorValue) -> tuple[FrameSpec, list[str]]:
    """The frame of a generator that stands at a yield; what is sent to it comes on top of the stack."""
    f = generator.frame
    stands = SUSPENDED if generator.started() else UNSTARTED
    slots, kinds, values = written_values(e, f, live_slots(f.code, f.pc) | live_elsewhere(f), f.stack[:-1])
    return FrameSpec(f.code, f.pc, f.scope, slots, tuple(kinds), "push", None, stands), values


@WRITERS.row("generator")
def new_generator(e: Emitter, generator: GeneratorValue) -> str:
    """A real generator object, whose state is written after it has a name: its frame may hold it."""
    started = generator.frame is None or generator.started() or generator.frame in e.m.frames
    name = e.write_as(generator, e.assign(f"{e.constant(shell)}({generator.name!r}, {started})"))
    write_generator(e, generator, name)
    return name


def write_generator(e: Emitter, generator: GeneratorValue, name: str) -> None:
    if generator.frame is None or generator.frame in e.m.frames:
        e.line(f"{e.constant(suspend)}({name}, None, ())")
        return
    spec, values = suspended_frame(e, generator)
    e.line(f"{e.constant(suspend)}({name}, {e.constants.bind(spec, 'spec')}, ({''.join(f'{text}, ' for text in values)}))")


def write_generators(e: Emitter, m: Machine) -> None:
    """The new states of generators from outside that ran here."""
    for generator in m.known_values(GeneratorValue):
        if generator.touched and generator.source is not None:
            write_generator(e, generator, e.expr(generator))


def live_elsewhere(f: Frame) -> frozenset[str]:
    """What a frame that waits for a call reads if it does not go on behind the call: in the handler around it, or behind the loop over a
    generator that gives nothing more."""
    instr = f.instr()
    places = [place.target.index for place in (instr.handler, instr) if place is not None and place.target is not None]
    return frozenset[str]().union(*(live_slots(f.code, place) for place in places))


def is_handled(item: Value) -> bool:
    return isinstance(item, HandledValue) and not item.over


def stack_item(e: Emitter, item: Value) -> tuple[str, list[str]]:
    if item is NULL:
        return NULL_SLOT, []
    if item is LASTI:
        return LASTI_SLOT, []
    if isinstance(item, HandledValue) and item.over:       # nothing reads it any more
        return VALUE, ["None"]
    if isinstance(item, HandledValue):
        return HANDLED, [e.expr(item.previous), e.expr(item.current)]
    return VALUE, [e.expr(item)]


def continue_state(e: Emitter, m: Machine, depth: int, index: int, stack: list[Value], extra: list[str]) -> FramesState:
    """The frames up to `depth`, the innermost of them going on at `index`."""
    specs, values = [], []
    for f in m.frames[:depth]:
        spec, texts = frame_state(e, m, f, f.pc, f.stack, [])
        specs.append(spec)
        values += texts
    spec, texts = frame_state(e, m, m.frames[depth], index, stack, extra)
    return FramesState((*specs, spec), values + texts)


def exit_state(e: Emitter, m: Machine, leave: Exit) -> FramesState:
    """The frames after the action, on one exit."""
    f = m.frames[-1]
    stack = f.stack[:-leave.pops] if leave.pops else f.stack
    return continue_state(e, m, len(m.frames) - 1, leave.next, stack, leave.results)


def handler_state(e: Emitter, m: Machine, error: str) -> FramesState | None:
    """Where an exception of the action goes, if any frame handles it."""
    for depth in range(len(m.frames) - 1, -1, -1):
        f = m.frames[depth]
        # the innermost frame stands at its instruction, the others behind theirs
        instr = f.program[f.pc if depth == len(m.frames) - 1 else f.pc - 1]
        if instr.handler is not None:
            stack = f.stack[:instr.handler.depth] + ([LASTI] if instr.handler.lasti else [])
            return continue_state(e, m, depth, instr.handler.target.index, stack, [error])
    return None


def current_state(e: Emitter, m: Machine) -> FramesState:
    """All frames as they are: to go on eagerly at the instruction itself."""
    f = m.frames[-1]
    return continue_state(e, m, len(m.frames) - 1, f.pc, f.stack, [])


def action_of(e: Emitter, m: Machine) -> Action | None:
    f = m.frames[-1]
    instr = f.program[f.pc]
    row = ACTIONS.get(instr.opname)
    return row(e, m, f, instr) if row is not None else None
