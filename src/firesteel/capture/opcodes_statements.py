"""Instructions of single statements: `del`, `try`, `with`, `match`, class bodies, `yield from`, async; further rows of `OPCODES`.

The rules are those of `opcodes.py`.  `BREAKS_ON_PURPOSE` names the instructions that are not captured, with the reason; every other
normalised instruction has a handler (a test compares both with the table of versions.py).
"""
from __future__ import annotations

import collections.abc
import functools

import torch

from firesteel.capture.frames import Frame
from firesteel.capture.instr import Instr
from firesteel.capture.meanings import CALLS
from firesteel.capture.opcodes import OPCODES, is_none, then_drop
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import PENDING, HandledValue, UserRaise, Value
from firesteel.capture.values.class_objects import ClassValue
from firesteel.capture.values.const import NONE, ConstValue, boolean
from firesteel.capture.values.containers import Sequence, TupleValue
from firesteel.capture.values.exceptions import ExceptionValue, handled_exception
from firesteel.capture.values.generators import let_go, send_into
from firesteel.capture.values.groups import prepare_reraise, split_group
from firesteel.capture.values.iterators import IteratorValue
from firesteel.capture.values.mappings import DictValue
from firesteel.capture.values.objects import ObjectValue
from firesteel.capture.values.overrides import enter_device
from firesteel.errors import Break

# instruction -> what it belongs to
BREAKS_ON_PURPOSE = {
    "GET_AWAITABLE": "await", "GET_AITER": "async for", "GET_ANEXT": "async for", "END_ASYNC_FOR": "async for", "BEFORE_ASYNC_WITH": "async with",
    "ASYNC_GEN_WRAP": "yield in an async generator", "IMPORT_STAR": "import *", "PRINT_EXPR": "the interactive prompt",
    "CALL_INTRINSIC_2": "type parameters",
}


def _refuse(what: str, m: Machine, f: Frame, i: Instr) -> None:
    raise Break("opcode", name=f"{i.opname} ({what})")


for _name, _what in BREAKS_ON_PURPOSE.items():
    OPCODES.add(_name, functools.partial(_refuse, _what))


# -- deleting variables --------------------------------------------------------------------------------------------------
@OPCODES.row("DELETE_FAST")
def op_delete_fast(m: Machine, f: Frame, i: Instr) -> None:
    if i.argval not in f.slots:
        raise m.raise_real(UnboundLocalError(f"cannot access local variable {i.argval!r} where it is not associated with a value"))
    old = f.slots.pop(i.argval)
    if isinstance(old, IteratorValue):
        let_go(m, old, lambda: f.slots.update({i.argval: old}))


OPCODES.row("DELETE_DEREF")(lambda m, f, i: f.slots[i.argval].set(m, None))     # type: ignore[attr-defined]  # a cell
OPCODES.row("DELETE_GLOBAL")(lambda m, f, i: m.store_global(f.scope, i.argval, None))


# -- match --------------------------------------------------------------------------------------------------------------
TEXTS = (str, bytes, bytearray)
# classes whose one positional pattern is the object itself
WHOLE = (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)


OPCODES.row("MATCH_MAPPING")(lambda m, f, i: f.stack.append(boolean(issubclass(f.stack[-1].python_type(), collections.abc.Mapping))))


@OPCODES.row("MATCH_SEQUENCE")
def op_match_sequence(m: Machine, f: Frame, i: Instr) -> None:
    kind = f.stack[-1].python_type()
    f.stack.append(boolean(issubclass(kind, collections.abc.Sequence) and not issubclass(kind, TEXTS)))


@OPCODES.row("MATCH_KEYS")
def op_match_keys(m: Machine, f: Frame, i: Instr) -> None:
    subject, keys = f.stack[-2:]
    found = [match_key(m, subject, m.look(key)) for key in keys.iterate(m)]
    f.stack.append(NONE if any(value is None for value in found) else TupleValue(found))        # type: ignore[arg-type]  # no None among them


def match_key(m: Machine, subject: Value, key: Value) -> Value | None:
    if isinstance(subject, DictValue):
        return subject.find(m, key)
    missing = ConstValue(MISSING_KEY)
    found = m.call_now(subject.getattr(m, "get"), [key, missing], {})
    return None if found is missing else found


MISSING_KEY = object()


@OPCODES.row("MATCH_CLASS")
def op_match_class(m: Machine, f: Frame, i: Instr) -> None:
    subject, cls, names = f.stack[-3:]
    if not CALLS[isinstance](m, [subject, cls], {}).truth(m):
        f.finish(3, NONE)
        return
    found = match_attributes(m, subject, cls, i.arg, m.known(names))
    f.finish(3, NONE if found is None else TupleValue(found))


def match_attributes(m: Machine, subject: Value, cls: Value, count: int, names: tuple[str, ...]) -> list[Value] | None:
    """The values of `count` positional patterns and of the named ones; None where an attribute is missing."""
    positional: tuple[str, ...] = ()
    found: list[Value] = []
    if count and isinstance(cls, ClassValue) and not hasattr(cls.cls, "__match_args__") and issubclass(cls.cls, WHOLE):
        found, count = [subject], count - 1
    if count:
        positional = m.known(cls.getattr(m, "__match_args__")) if hasattr(cls.constant(), "__match_args__") else ()
    if count > len(positional):
        raise m.raise_real(TypeError(f"{cls.constant().__name__}() accepts {len(positional)} positional sub-patterns ({count} given)"))
    try:
        return found + [m.finish_now(subject.getattr(m, name)) for name in (*positional[:count], *names)]
    except UserRaise as raised:
        if issubclass(raised.value.python_type(), AttributeError):
            return None
        raise


# -- class bodies -------------------------------------------------------------------------------------------------------
def namespace_of(f: Frame) -> DictValue:
    if f.namespace is None:
        raise Break("opcode", name="a name outside of a class body")
    return f.namespace


OPCODES.row("LOAD_NAME")(lambda m, f, i: f.stack.append(namespace_of(f).find(m, ConstValue(i.argval)) or m.read_global(f.scope, i.argval)))
OPCODES.row("STORE_NAME")(then_drop(1, lambda m, f, i: namespace_of(f).setitem(m, ConstValue(i.argval), f.stack[-1])))


@OPCODES.row("DELETE_NAME")
def op_delete_name(m: Machine, f: Frame, i: Instr) -> None:
    if namespace_of(f).find(m, ConstValue(i.argval)) is None:
        raise m.raise_real(NameError(f"name {i.argval!r} is not defined"))
    f.namespace.delitem(m, ConstValue(i.argval))


OPCODES.row("LOAD_LOCALS")(lambda m, f, i: f.stack.append(namespace_of(f)))


@OPCODES.row("LOAD_FROM_DICT_OR_DEREF")
def op_load_from_dict_or_deref(m: Machine, f: Frame, i: Instr) -> None:
    found = f.stack[-1].find(m, ConstValue(i.argval)) or f.slots[i.argval].get(m)       # type: ignore[attr-defined]  # a dict; a cell
    if found is None:
        raise m.raise_real(NameError(f"cannot access free variable {i.argval!r} where it is not associated with a value in enclosing scope"))
    f.finish(1, found)


OPCODES.row("LOAD_FROM_DICT_OR_GLOBALS")(
    lambda m, f, i: f.finish(1, f.stack[-1].find(m, ConstValue(i.argval)) or m.read_global(f.scope, i.argval)))     # type: ignore[attr-defined]


@OPCODES.row("SETUP_ANNOTATIONS")
def op_setup_annotations(m: Machine, f: Frame, i: Instr) -> None:
    name = ConstValue("__annotations__")
    if namespace_of(f).find(m, name) is None:
        f.namespace.setitem(m, name, DictValue({}))


# -- except* ------------------------------------------------------------------------------------------------------------
@OPCODES.row("CHECK_EG_MATCH")
def op_check_eg_match(m: Machine, f: Frame, i: Instr) -> None:
    rest, match = split_group(m, f.stack[-2], f.stack[-1])
    f.stack[-2:] = [rest, match]
    if not is_none(match):
        m.handling = match


OPCODES.row("PREP_RERAISE_STAR")(lambda m, f, i: f.finish(2, prepare_reraise(m, f.stack[-2], f.stack[-1].iterate(m))))


# -- yield from ---------------------------------------------------------------------------------------------------------
OPCODES.row("SEND")(lambda m, f, i: send_into(m, f, f.stack[-2], f.stack[-1], i))


@OPCODES.row("END_SEND")
def op_end_send(m: Machine, f: Frame, i: Instr) -> None:
    del f.stack[-2]


@OPCODES.row("CLEANUP_THROW")
def op_cleanup_throw(m: Machine, f: Frame, i: Instr) -> None:
    exception = f.stack[-1]
    if exception.python_type() is not StopIteration:
        raise UserRaise(exception)
    f.stack[-3:] = [NONE, exception.getattr(m, "value")]


# -- intrinsics ---------------------------------------------------------------------------------------------------------
@OPCODES.row("CALL_INTRINSIC_1")
def op_call_intrinsic_1(m: Machine, f: Frame, i: Instr) -> None:
    if i.argval != "STOPITERATION_ERROR":
        raise Break("opcode", name=f"CALL_INTRINSIC_1 ({i.argval})")
    f.finish(1, m.generator_error(f.stack[-1]))


# -- exceptions ---------------------------------------------------------------------------------------------------------
@OPCODES.row("RAISE_VARARGS")
def op_raise_varargs(m: Machine, f: Frame, i: Instr) -> None:
    if i.arg == 0:
        if handled_exception(m, "raise") is NONE:
            raise m.raise_real(RuntimeError("No active exception to reraise"))
        raise UserRaise(m.handling)
    exception = f.stack[-i.arg]
    if isinstance(exception, ClassValue):
        exception = m.call_now(exception, [], {})
    if not isinstance(exception, ExceptionValue):
        raise m.raise_real(TypeError("exceptions must derive from BaseException"))
    if i.arg == 2:
        cause = f.stack[-1]
        m.effects.store_attr(exception, "__cause__", m.call_now(cause, [], {}) if isinstance(cause, ClassValue) else cause)
    if m.handling is not exception and not is_none(m.handling) and exception.source is None:
        m.effects.store_attr(exception, "__context__", m.handling)
    raise UserRaise(exception)


@OPCODES.row("PUSH_EXC_INFO")
def op_push_exc_info(m: Machine, f: Frame, i: Instr) -> None:
    exception = f.stack.pop()
    f.stack += [HandledValue(m.handling, exception), exception]
    m.handling = exception


@OPCODES.row("POP_EXCEPT")
def op_pop_except(m: Machine, f: Frame, i: Instr) -> None:
    handled = f.stack.pop()
    m.effects.change(handled, "over", True)
    m.handling = handled.previous       # type: ignore[attr-defined]  # what PUSH_EXC_INFO left


@OPCODES.row("CHECK_EXC_MATCH")
def op_check_exc_match(m: Machine, f: Frame, i: Instr) -> None:
    exception, wanted = f.stack[-2:]
    classes = [m.look(c) for c in wanted.items] if isinstance(wanted, Sequence) else [wanted]
    f.stack[-1] = boolean(issubclass(exception.python_type(), tuple(c.constant() for c in classes)))


@OPCODES.row("RERAISE")
def op_reraise(m: Machine, f: Frame, i: Instr) -> None:
    raise UserRaise(f.stack[-1])


# -- with ---------------------------------------------------------------------------------------------------------------
@OPCODES.row("BEFORE_WITH")
def op_before_with(m: Machine, f: Frame, i: Instr) -> None:
    manager = f.stack[-1]
    if isinstance(manager.identity(), torch.device):
        f.stack[-1:] = enter_device(m, manager)
        return
    if not isinstance(manager, ObjectValue):
        f.stack[-1:] = manager.enter(m)
        return
    leave, enter = manager.method(m, "__exit__"), manager.method(m, "__enter__")
    if leave is None or enter is None:
        raise Break("context", name=manager.describe())
    entered = enter.call(m, [], {})
    f.stack[-1] = leave
    if entered is not PENDING:
        f.stack.append(entered)


@OPCODES.row("WITH_EXCEPT_START")
def op_with_except_start(m: Machine, f: Frame, i: Instr) -> None:
    leave, exception = f.stack[-4], f.stack[-1]
    f.finish(0, leave.call(m, [m.constant_object(exception.python_type()), exception, NONE], {}))
