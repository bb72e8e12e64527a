"""What each normalised instruction does to a symbolic frame: one function a row of `OPCODES`.

A handler takes (machine, frame, instr); the frame's pc already points behind the instruction.  It computes first and changes
the frame last, so that a Break leaves the frame as it was.  Nothing here depends on the version of Python.
"""
from __future__ import annotations

import builtins
import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from firesteel.capture.frames import Discard, Frame
from firesteel.capture.instr import Instr
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import NULL, PENDING, LazyValue, Undecided, Value
from firesteel.capture.values.class_objects import ClassValue, SuperValue
from firesteel.capture.values.const import NONE, ConstValue, boolean, fold, fresh, is_none
from firesteel.capture.values.containers import ListValue, SliceValue, TupleValue, list_append
from firesteel.capture.values.functions import CellValue, make_function
from firesteel.capture.values.generators import GeneratorValue, drop, iterate_into, let_go
from firesteel.capture.values.iterators import IteratorValue
from firesteel.capture.values.mappings import DictValue, SetValue, dict_update, pairs_of, set_add, set_update
from firesteel.capture.values.truths import is_same
from firesteel.errors import Break
from firesteel.table import Table

Handler = Callable[["Machine", "Frame", Instr], None]

OPCODES: Table[Handler] = Table("instruction", "capture/opcodes.py")


def then_drop(count: int, act: Handler) -> Handler:
    """An instruction that acts on the topmost items of the stack, and leaves nothing of them."""
    def run(m: Machine, f: Frame, i: Instr) -> None:
        act(m, f, i)
        del f.stack[-count:]
    return run


OPCODES.row("NOP", "RESUME")(lambda m, f, i: None)


# -- the stack ----------------------------------------------------------------------------------------------------------
@OPCODES.row("POP_TOP")
def op_pop_top(m: Machine, f: Frame, i: Instr) -> None:
    value = f.stack.pop()
    if isinstance(value, IteratorValue):
        let_go(m, value, lambda: f.stack.append(value))


OPCODES.row("PUSH_NULL")(lambda m, f, i: f.stack.append(NULL))
OPCODES.row("COPY")(lambda m, f, i: f.stack.append(f.stack[-i.arg]))


@OPCODES.row("SWAP")
def op_swap(m: Machine, f: Frame, i: Instr) -> None:
    stack, n = f.stack, -i.arg
    stack[-1], stack[n] = stack[n], stack[-1]


OPCODES.row("LOAD_CONST")(lambda m, f, i: f.stack.append(NONE if i.argval is None else fresh(m, i.argval)))


# -- variables ----------------------------------------------------------------------------------------------------------
@OPCODES.row("LOAD_FAST")
def op_load_fast(m: Machine, f: Frame, i: Instr) -> None:
    value = f.slots.get(i.argval)
    if type(value) is LazyValue or type(value) is Undecided and not is_handed_on(f):
        value = f.slots[i.argval] = m.look(value)
    if value is None:
        raise m.raise_real(UnboundLocalError(f"cannot access local variable {i.argval!r} where it is not associated with a value"))
    f.stack.append(value)


def is_handed_on(f: Frame) -> bool:
    """Does the program do nothing with what it loads but move it, return it or put it into a tuple or list?"""
    place = f.pc
    while f.program[place].opname in ("LOAD_FAST", "LOAD_CONST"):
        place += 1
    taker = f.program[place]
    return {"RETURN_VALUE": 1, "STORE_FAST": 1, "BUILD_TUPLE": taker.arg, "BUILD_LIST": taker.arg}.get(taker.opname, 0) > place - f.pc


OPCODES.row("LOAD_FAST_AND_CLEAR")(lambda m, f, i: f.stack.append(f.slots.pop(i.argval, NULL)))


@OPCODES.row("STORE_FAST")
def op_store_fast(m: Machine, f: Frame, i: Instr) -> None:
    value, old = f.stack.pop(), f.slots.get(i.argval)
    if value is NULL:
        f.slots.pop(i.argval, None)
    else:
        f.slots[i.argval] = value
    if isinstance(old, IteratorValue) and old is not value:
        let_go(m, old, lambda: [f.slots.update({i.argval: old}), f.stack.append(value)])       # type: ignore[func-returns-value]


@OPCODES.row("MAKE_CELL")
def op_make_cell(m: Machine, f: Frame, i: Instr) -> None:
    f.slots[i.argval] = CellValue(f.slots.get(i.argval))


OPCODES.row("COPY_FREE_VARS")(lambda m, f, i: f.slots.update(zip(f.code.co_freevars, f.closure)))
OPCODES.row("LOAD_CLOSURE")(lambda m, f, i: f.stack.append(f.slots[i.argval]))


@OPCODES.row("LOAD_DEREF")
def op_load_deref(m: Machine, f: Frame, i: Instr) -> None:
    value = f.slots[i.argval].get(m)        # type: ignore[attr-defined]  # a cell
    if value is None:
        raise m.raise_real(NameError(f"cannot access free variable {i.argval!r} where it is not associated with a value"))
    f.stack.append(value)


OPCODES.row("STORE_DEREF")(then_drop(1, lambda m, f, i: f.slots[i.argval].set(m, f.stack[-1])))     # type: ignore[attr-defined]  # a cell
OPCODES.row("LOAD_GLOBAL")(lambda m, f, i: f.stack.append(m.read_global(f.scope, i.argval)))
OPCODES.row("STORE_GLOBAL")(then_drop(1, lambda m, f, i: m.store_global(f.scope, i.argval, f.stack[-1])))
OPCODES.row("LOAD_ASSERTION_ERROR")(lambda m, f, i: f.stack.append(ClassValue(AssertionError)))


# -- attributes and items -----------------------------------------------------------------------------------------------
OPCODES.row("LOAD_ATTR")(lambda m, f, i: f.finish(1, f.stack[-1].getattr(m, i.argval)))
OPCODES.row("LOAD_SUPER_ATTR")(lambda m, f, i: f.finish(3, SuperValue(f.stack[-2].constant(), m.look(f.stack[-1])).getattr(m, i.argval)))


@OPCODES.row("STORE_ATTR")
def op_store_attr(m: Machine, f: Frame, i: Instr) -> None:
    value, owner = f.stack[-2:]
    result = owner.setattr(m, i.argval, value)
    del f.stack[-2:]
    discard_pending(m, result)


def discard_pending(m: Machine, result: Value | None) -> None:
    """The result of a user's method that was just called is not wanted."""
    if result is PENDING:
        m.frames[-1].returns = Discard


@OPCODES.row("DELETE_ATTR")
def op_delete_attr(m: Machine, f: Frame, i: Instr) -> None:
    result = f.stack[-1].delattr(m, i.argval)
    f.stack.pop()
    discard_pending(m, result)


OPCODES.row("BINARY_SUBSCR")(lambda m, f, i: f.finish(2, f.stack[-2].getitem(m, f.stack[-1])))
OPCODES.row("STORE_SUBSCR")(then_drop(3, lambda m, f, i: f.stack[-2].setitem(m, f.stack[-1], f.stack[-3])))
OPCODES.row("DELETE_SUBSCR")(then_drop(2, lambda m, f, i: f.stack[-2].delitem(m, f.stack[-1])))


# -- operators ----------------------------------------------------------------------------------------------------------
UNARY = {"UNARY_NEGATIVE": "-", "UNARY_POSITIVE": "+", "UNARY_INVERT": "~", "UNARY_NOT": "not"}
OPCODES.row(*UNARY)(lambda m, f, i: f.finish(1, m.unary(UNARY[i.opname], f.stack[-1])))
OPCODES.row("TO_BOOL")(lambda m, f, i: f.finish(1, boolean(f.stack[-1].truth(m))))


@OPCODES.row("BINARY_OP")
def op_binary_op(m: Machine, f: Frame, i: Instr) -> None:
    a, b = f.stack[-2:]
    op = i.argval
    f.finish(2, m.inplace(op[:-1], a, b) if op[-1] == "=" else m.binary(op, a, b))


OPCODES.row("COMPARE_OP")(lambda m, f, i: f.finish(2, m.compare(i.argval, f.stack[-2], f.stack[-1])))
OPCODES.row("IS_OP")(lambda m, f, i: f.finish(2, is_same(m, f.stack[-2], f.stack[-1], negated=bool(i.arg))))
OPCODES.row("CONTAINS_OP")(lambda m, f, i: f.finish(2, boolean(f.stack[-1].contains(m, f.stack[-2]).truth(m) != bool(i.arg))))


# -- building -----------------------------------------------------------------------------------------------------------
def take(f: Frame, count: int) -> list[Value]:
    return f.stack[-count:] if count else []


OPCODES.row("BUILD_TUPLE")(lambda m, f, i: f.finish(i.arg, TupleValue(take(f, i.arg))))
OPCODES.row("BUILD_LIST")(lambda m, f, i: f.finish(i.arg, ListValue(take(f, i.arg))))
OPCODES.row("BUILD_SET")(lambda m, f, i: f.finish(i.arg, SetValue.of(m, take(f, i.arg))))


@OPCODES.row("BUILD_MAP")
def op_build_map(m: Machine, f: Frame, i: Instr) -> None:
    items = take(f, 2 * i.arg)
    f.finish(2 * i.arg, DictValue({k.hash_key(m): (k, v) for k, v in zip(items[::2], items[1::2])}))


@OPCODES.row("BUILD_CONST_KEY_MAP")
def op_build_const_key_map(m: Machine, f: Frame, i: Instr) -> None:
    keys = f.stack[-1].iterate(m)
    values = f.stack[-1 - i.arg:-1]
    f.finish(i.arg + 1, DictValue({k.hash_key(m): (k, v) for k, v in zip(keys, values)}))


OPCODES.row("BUILD_STRING")(lambda m, f, i: f.finish(i.arg, ConstValue("".join(part.constant() for part in take(f, i.arg)))))
OPCODES.row("BUILD_SLICE")(lambda m, f, i: f.finish(i.arg, SliceValue(*take(f, i.arg), *[NONE] * (3 - i.arg))))
for _name, _add in {"LIST_APPEND": list_append, "SET_ADD": set_add, "SET_UPDATE": set_update, "DICT_UPDATE": dict_update}.items():
    OPCODES.add(_name, then_drop(1, lambda m, f, i, add=_add: add(m, f.stack[-1 - i.arg], [f.stack[-1]], {})))      # type: ignore[misc]
OPCODES.row("MAP_ADD")(then_drop(2, lambda m, f, i: f.stack[-2 - i.arg].setitem(m, f.stack[-2], f.stack[-1])))
OPCODES.row("LIST_EXTEND")(then_drop(1, lambda m, f, i: f.stack[-1 - i.arg].inplace(m, "+", f.stack[-1])))


@OPCODES.row("DICT_MERGE")
def op_dict_merge(m: Machine, f: Frame, i: Instr) -> None:
    target, pairs = f.stack[-1 - i.arg], pairs_of(m, f.stack[-1])
    for key, _ in pairs:
        if key.hash_key(m) in target.entries:
            raise m.raise_real(TypeError(f"got multiple values for keyword argument {key.constant()!r}"))
    for key, value in pairs:
        target.setitem(m, key, value)
    f.stack.pop()


OPCODES.row("LIST_TO_TUPLE")(lambda m, f, i: f.finish(1, TupleValue(list(f.stack[-1].items))))      # type: ignore[attr-defined]  # a list


@OPCODES.row("UNPACK_SEQUENCE")
def op_unpack_sequence(m: Machine, f: Frame, i: Instr) -> None:
    items = f.stack[-1].iterate(m)
    if len(items) != i.arg:
        few = len(items) < i.arg
        text = f"not enough values to unpack (expected {i.arg}, got {len(items)})" if few else f"too many values to unpack (expected {i.arg})"
        raise m.raise_real(ValueError(text))
    looked = [m.look(item) for item in reversed(items)]
    f.stack.pop()
    f.stack.extend(looked)


@OPCODES.row("UNPACK_EX")
def op_unpack_ex(m: Machine, f: Frame, i: Instr) -> None:
    before, after = i.argval
    items = [m.look(item) for item in f.stack[-1].iterate(m)]
    if len(items) < before + after:
        raise m.raise_real(ValueError(f"not enough values to unpack (expected at least {before + after}, got {len(items)})"))
    middle = len(items) - after
    f.stack.pop()
    f.stack.extend([*items[:before], ListValue(items[before:middle]), *items[middle:]][::-1])


# -- text ---------------------------------------------------------------------------------------------------------------
OPCODES.row("CONVERT_VALUE")(
    lambda m, f, i: f.finish(1, CALLS[i.argval](m, [f.stack[-1]], {}) if i.argval in CALLS else fold(m, i.argval, m.known(f.stack[-1]))))
OPCODES.row("FORMAT_SIMPLE")(lambda m, f, i: f.finish(1, CALLS[format](m, [f.stack[-1]], {})))
OPCODES.row("FORMAT_WITH_SPEC")(lambda m, f, i: f.finish(2, CALLS[format](m, f.stack[-2:], {})))


# -- calls --------------------------------------------------------------------------------------------------------------
def callee(x: Value, y: Value) -> tuple[Value, list[Value]]:
    """The two items below the arguments: which is called, and the first argument if the other is one."""
    if x is NULL:
        return y, []
    return (x, []) if y is NULL else (x, [y])


def call_parts(f: Frame, i: Instr) -> tuple[Value, list[Value], dict[str, Value]]:
    """Function, arguments and keywords of a CALL."""
    count = i.arg
    fn, args = callee(*f.stack[-count - 2:len(f.stack) - count])
    args = args + take(f, count)
    if not i.kwnames:
        return fn, args, {}
    split = len(args) - len(i.kwnames)
    return fn, args[:split], dict(zip(i.kwnames, args[split:]))


@OPCODES.row("CALL")
def op_call(m: Machine, f: Frame, i: Instr) -> None:
    fn, args, kwargs = call_parts(f, i)
    f.finish(i.arg + 2, fn.call(m, args, kwargs))


@OPCODES.row("CALL_KW")
def op_call_kw(m: Machine, f: Frame, i: Instr) -> None:
    names = m.known(f.stack[-1])
    fn, args = callee(*f.stack[-i.arg - 3:-i.arg - 1])
    args = args + f.stack[-i.arg - 1:-1]
    split = len(args) - len(names)
    f.finish(i.arg + 3, fn.call(m, args[:split], dict(zip(names, args[split:]))))


def spread_parts(m: Machine, f: Frame, i: Instr) -> tuple[Value, list[Value], dict[str, Value], int]:
    """Function, arguments, keywords of a CALL_FUNCTION_EX, and how many items it takes."""
    named = i.arg & 1
    kwargs = {m.known(k): m.look(v) for k, v in pairs_of(m, f.stack[-1])} if named else {}
    args = [m.look(item) for item in f.stack[-1 - named].iterate(m)]
    fn, first = callee(*f.stack[-3 - named:len(f.stack) - 1 - named])
    return fn, first + args, kwargs, 3 + named


@OPCODES.row("CALL_FUNCTION_EX")
def op_call_function_ex(m: Machine, f: Frame, i: Instr) -> None:
    fn, args, kwargs, count = spread_parts(m, f, i)
    f.finish(count, fn.call(m, args, kwargs))


@OPCODES.row("MAKE_FUNCTION")
def op_make_function(m: Machine, f: Frame, i: Instr) -> None:
    flags = i.arg or 0
    count = 1 + (flags & 15).bit_count()
    f.finish(count, make_function(m, f.stack[-1].constant(), f.scope, flags, f.stack[-count:-1]))


OPCODES.row("LOAD_BUILD_CLASS")(lambda m, f, i: f.stack.append(m.constant_object(builtins.__build_class__)))


# -- jumps and loops ----------------------------------------------------------------------------------------------------
@OPCODES.row("JUMP")
def op_jump(m: Machine, f: Frame, i: Instr) -> None:
    f.pc = i.target.index


def _jump_if(wanted: bool, m: Machine, f: Frame, i: Instr) -> None:
    try:
        answer = f.stack[-1].truth(m)
    except Break as stop:
        if stop.kind != "data_branch" or not m.join(f, i):
            raise
        return
    f.stack.pop()
    if answer == wanted:
        f.pc = i.target.index


OPCODES.add("POP_JUMP_IF_TRUE", functools.partial(_jump_if, True))
OPCODES.add("POP_JUMP_IF_FALSE", functools.partial(_jump_if, False))


def _jump_if_none(wanted: bool, m: Machine, f: Frame, i: Instr) -> None:
    if is_none(f.stack.pop()) == wanted:
        f.pc = i.target.index


OPCODES.add("POP_JUMP_IF_NONE", functools.partial(_jump_if_none, True))
OPCODES.add("POP_JUMP_IF_NOT_NONE", functools.partial(_jump_if_none, False))
OPCODES.row("GET_ITER", "GET_YIELD_FROM_ITER")(lambda m, f, i: f.finish(1, f.stack[-1].iterator(m)))
OPCODES.row("FOR_ITER")(lambda m, f, i: iterate_into(m, f, i))
OPCODES.row("GET_LEN")(lambda m, f, i: f.stack.append(f.stack[-1].length(m)))


# -- leaving a frame ----------------------------------------------------------------------------------------------------
@OPCODES.row("RETURN_VALUE")
def op_return_value(m: Machine, f: Frame, i: Instr) -> None:
    for local in f.slots.values():
        if isinstance(local, IteratorValue):
            drop(m, local, f)
    value = f.stack.pop()
    m.frames.pop()
    if f.generator is not None:
        m.generator_returns(f, value)
    else:
        m.give(f, value)


@OPCODES.row("RETURN_GENERATOR")
def op_return_generator(m: Machine, f: Frame, i: Instr) -> None:
    if not f.code.co_flags & 0x20:
        raise Break("opcode", name="a coroutine")
    generator = GeneratorValue(f, f.code.co_name)
    m.frames.pop()
    m.give(f, generator)
    f.generator, f.returns = generator, None
    f.stack.append(NONE)


@OPCODES.row("YIELD_VALUE")
def op_yield_value(m: Machine, f: Frame, i: Instr) -> None:
    value = f.stack[-1]
    f.stack[-1] = NONE
    m.frames.pop()
    m.give(f, value)


# -- imports ------------------------------------------------------------------------------------------------------------
@OPCODES.row("IMPORT_NAME")
def op_import_name(m: Machine, f: Frame, i: Instr) -> None:
    level, names = m.known(f.stack[-2]), m.known(f.stack[-1])
    module = find_module(f.scope, i.argval, level, names) or imported(m, f.scope, i.argval, level, names)
    if module is None:
        raise Break("opcode", name=f"import of {i.argval}")
    m.imported[module.__name__] = (*m.imported.get(module.__name__, ()), *(names or ()))
    f.finish(2, m.constant_object(module))


def imported(m: Machine, scope: dict[str, Any], name: str, level: int, names: Any) -> types.ModuleType | None:
    """A module that is imported now, as it would be by the call; None where it cannot be, or effects that it may see come first."""
    if m.joining or any(is_seen_by_imports(effect.target.obj) for effect in m.effects.entries):
        return None
    try:
        __import__(name, scope, None, names, level)
    except Exception:       # raised by the import itself, at a break
        return None
    return find_module(scope, name, level, names)


def is_seen_by_imports(obj: Any) -> bool:
    """May a module that is being imported read it: a module, its names, a class, what says where modules are?"""
    return obj is None or isinstance(obj, (types.ModuleType, type, type(os.environ))) or isinstance(obj, dict) and "__name__" in obj \
        or obj is sys.path or obj is sys.modules or obj is sys.meta_path


def find_module(scope: dict[str, Any], name: str, level: int, names: Any) -> types.ModuleType | None:
    """A module that is imported already."""
    package = scope.get("__package__") or ""
    if level:
        package = package.rsplit(".", level - 1)[0] if level > 1 else package
        name = f"{package}.{name}" if name else package
    module = sys.modules.get(name)
    if module is None or any(not hasattr(module, part) for part in names or () if part != "*"):     # `part` is a module that is not imported
        return None
    return module if names or level else sys.modules[name.partition(".")[0]]


@OPCODES.row("IMPORT_FROM")
def op_import_from(m: Machine, f: Frame, i: Instr) -> None:
    module = m.look(f.stack[-1]).identity()
    if isinstance(module, types.ModuleType) and not hasattr(module, i.argval):
        where = getattr(module, "__file__", None)
        raise m.raise_real(ImportError(f"cannot import name {i.argval!r} from {module.__name__!r} ({where or 'unknown location'})",
                                       name=module.__name__, path=where))
    f.finish(0, f.stack[-1].getattr(m, i.argval))
