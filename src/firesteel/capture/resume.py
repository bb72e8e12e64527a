"""Running the rest of a frame eagerly: real code that starts in the middle.

In: a code object, the index of a normalised instruction, which locals are bound, and the stack there.  Out: a function that
takes those locals and stack items, puts them back and jumps.  Only needed where a continuation is not compiled: at the recompile limit,
under stance force_eager, or when a compiler failed.

    resume = resume_function(f.__code__, index, ["x", "total"], [VALUE], f.__globals__)
    resume(x, total, iterator)          # continues as f's frame would have

What always holds:
1. The code behind the jump is the user's, instruction by instruction, with its lines, columns and exception table.
2. Cells are handed over as cells (all become free variables), so closures made before the break see later assignments.
3. A stack item's argument is unbound once it is on the stack: nothing lives longer than in the original frame.
4. `awaits` is for a frame suspended in a call: a function given as last argument is called first, inside the try blocks around the
   awaited instruction, and its result is pushed; frames of a continuation nest this way, innermost last.

The start is not before the function's RESUME: what stands before it (making cells) has been done.
A generator is resumed as a generator (`gen`): SUSPENDED stands at its yield once it was started by a first next(), the others go on at the
instruction with the first next().  Coroutines cannot be resumed; asking for it is a ValueError.
"""
from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from firesteel.capture import versions
from firesteel.capture.code import assemble, copy_instrs, decode, per_code, program
from firesteel.capture.instr import Instr, Position
from firesteel.capture.region_code import HANDLED, HANDLED_AGAIN, LASTI, NULL, SUSPENDED, UNSTARTED, VALUE
from firesteel.records import dataclass

_UNRESUMABLE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
_THUNK = ".awaited"
_SELF = ".self"


@dataclass(frozen=True)
class Resume:
    """Code that starts in the middle: `parameters` are its arguments, `cells` the names of its closure."""
    code: types.CodeType
    parameters: tuple[str, ...]
    cells: tuple[str, ...]
    self_cell: str = ""     # the cell whose content is wanted as first argument (see _self_cell)


class _FrameLayout:
    """The slots and constants of the new code."""

    def __init__(self, code: types.CodeType, parameters: Sequence[str]):
        self.free = (*code.co_cellvars, *code.co_freevars)
        others = [name for name in code.co_varnames if name not in self.free and name not in parameters]
        self.locals = (*parameters, *others)
        self.slots = {name: n for n, name in enumerate((*self.locals, *self.free))}
        self.names, self.consts = code.co_names, list(code.co_consts)

    def const(self, value: Any) -> int:
        for n, known in enumerate(self.consts):
            if known is value:
                return n
        self.consts.append(value)
        return len(self.consts) - 1


def make_resume(code: types.CodeType, index: int, locals: Sequence[str], stack: Sequence[str], awaits: int | None = None,
                unset_cells: Sequence[str] = (), drop: bool = False, gen: str = "") -> Resume:
    """Code that continues at normalised instruction `index` with these locals bound and these kinds of stack items.

    With `drop` the awaited result is not pushed (a user's `__setattr__`, say).

    `unset_cells` are slots in co_cellvars that hold no cell now (between the instructions of an inlined comprehension).
    """
    if code.co_flags & _UNRESUMABLE or bool(code.co_flags & inspect.CO_GENERATOR) != bool(gen):
        raise ValueError(f"{code.co_name} is a coroutine, or a generator of which it is not said how it stands: its frame cannot be resumed")
    self_cell = _self_cell(code)
    items = [f".stack{n}" for n, kind in enumerate(stack) if kind in (VALUE, HANDLED)]
    known = [name for name in code.co_varnames if name in set(locals) and name not in code.co_cellvars]
    parameters = (*([_SELF] if self_cell else []), *known, *items, *([_THUNK] if awaits is not None else []))
    layout = _FrameLayout(code, parameters)
    body = _moved(code, layout)
    prologue = _prologue(code, layout, body, index, stack, awaits, unset_cells, drop, gen)
    new = assemble(prologue + body, code, co_varnames=layout.locals, co_nlocals=len(layout.locals), co_cellvars=(), co_freevars=layout.free,
                   co_argcount=len(parameters), co_posonlyargcount=0, co_kwonlyargcount=0, co_consts=tuple(layout.consts),
                   co_flags=code.co_flags & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS),
                   co_stacksize=max(code.co_stacksize, len(stack)) + 3)
    return Resume(new, parameters, layout.free, self_cell)


@per_code
def _made(code: types.CodeType) -> dict[tuple, Resume]:
    """What was made of a code object before: a continuation that runs eagerly does so at every call."""
    return {}


def _self_cell(code: types.CodeType) -> str:
    """super() without arguments reads the frame's first argument: where that one is a cell, its content must come first."""
    first = code.co_varnames[0] if code.co_argcount else ""
    return first if "__class__" in code.co_freevars and first in code.co_cellvars else ""


def resume_function(code: types.CodeType, index: int, locals: Sequence[str], stack: Sequence[str], globals: dict[str, Any],
                    cells: Mapping[str, types.CellType] | None = None, awaits: int | None = None, drop: bool = False,
                    gen: str = "") -> Callable[..., Any]:
    """A function of the locals (in the order of co_varnames, cells left out), the stack items that have one (bottom first) and, with `awaits`,
    the function to call first.  `cells` gives the cell of each name in co_cellvars and co_freevars that has one."""
    cells = cells or {}
    unset = tuple(name for name in (*code.co_cellvars, *code.co_freevars) if name not in cells)
    key = (index, tuple(locals), tuple(stack), awaits, unset, drop, gen)
    resume = _made(code).get(key)
    if resume is None:
        resume = _made(code)[key] = make_resume(code, index, locals, stack, awaits, unset, drop, gen)
    closure = tuple(cells[name] if name in cells else types.CellType() for name in resume.cells)
    function = types.FunctionType(resume.code, globals, code.co_name, None, closure)
    if not resume.self_cell:
        return function
    first = cells[resume.self_cell]
    return lambda *args: function(first.cell_contents, *args)


def _moved(code: types.CodeType, layout: _FrameLayout) -> list[Instr]:
    """The original instructions over the new slots; two-slot instructions are taken apart, their slots may be past the 16 that fit."""
    body: list[Instr] = []
    for instr in copy_instrs(decode(code)):
        if instr.opname in versions.PAIRS:
            second = _split_pair(instr)
            body += [instr, second]
            instr.arg, second.arg = layout.slots[instr.argval], layout.slots[second.argval]
            continue
        if instr.arg is not None and instr.opcode in versions.HAS_SLOT:
            instr.arg = layout.slots[instr.argval]
        body.append(instr)
    return body


def _split_pair(instr: Instr) -> Instr:
    """Leaves the first half in place, since jumps point to it; returns the second."""
    first_name, second_name = versions.PAIRS[instr.opname]
    first, second = instr.argval
    instr.opname, instr.argval = first_name, first
    return Instr(second_name, argval=second, handler=instr.handler, position=instr.position)


class _Prologue:
    """Writes instructions, all at one place of the user's source."""

    def __init__(self, layout: _FrameLayout, position: Position):
        self.layout, self.position = layout, position
        self.instrs: list[Instr] = []

    def add(self, opname: str, arg: int | None = None, target: Instr | None = None, like: Instr | None = None) -> None:
        self.instrs.append(Instr(opname, arg, None, target, like.handler if like is not None else None, self.position))

    def spell(self, part: Instr, target: Instr | None = None, like: Instr | None = None) -> None:
        """A normalised instruction in real ones."""
        layout = self.layout
        for opname, what in versions.SPELLINGS[part.opname]:
            arg = {"": lambda: None, "jump": lambda: None, "arg": lambda: part.arg, "slot": lambda: layout.slots[part.argval],
                   "name": lambda: layout.names.index(part.argval) << versions.NAME_SHIFT.get(opname, 0),
                   "const": lambda: layout.const(part.argval)}.get(what, lambda: int(what))()
            self.add(opname, arg, target if what == "jump" else None, like)

    def take(self, parameter: str) -> None:
        """Moves an argument onto the stack."""
        self.add("LOAD_FAST", self.layout.slots[parameter])
        self.add("DELETE_FAST", self.layout.slots[parameter])


def _prologue(code: types.CodeType, layout: _FrameLayout, body: list[Instr], index: int, stack: Sequence[str], awaits: int | None,
              unset_cells: Sequence[str], drop: bool, gen: str) -> list[Instr]:
    steps, raw = program(code), decode(code)
    # a run of the body's list: pairs were taken apart, so real indices are found by the copies' own index
    at = {instr.index: instr for instr in body if instr.index >= 0}
    here = steps[index]
    write = _Prologue(layout, steps[awaits].position if awaits is not None else here.position)
    if layout.free:
        write.add("COPY_FREE_VARS", len(layout.free))
    if gen:
        write.add("RETURN_GENERATOR")
        write.add("POP_TOP")
    write.add("RESUME", 0)
    for name in unset_cells:
        write.add("DELETE_FAST", layout.slots[name])
    _restore_stack(write, stack)
    if gen in (SUSPENDED, UNSTARTED):
        write.add("LOAD_CONST", layout.const(None))
    if gen == SUSPENDED:
        yielded = at[steps[index - 1].raw]
        write.add("YIELD_VALUE", yielded.arg, like=yielded)
        write.add("RESUME", 1)
    if awaits is not None:
        _call_awaited(write, at[steps[awaits].raw])
        if drop:
            write.add("POP_TOP")
    if here.part == 0:
        write.add("JUMP_FORWARD", None, at[here.raw])
        return write.instrs
    while steps[index].raw == here.raw:
        part = steps[index]
        write.spell(part, at[part.target.raw] if part.target is not None else None, at[here.raw])
        index += 1
        if part.opname == "RETURN_VALUE":
            return write.instrs
        if index == len(steps):
            break
    if here.raw_next < len(raw):
        write.add("JUMP_FORWARD", None, at[here.raw_next])
    return write.instrs


def _restore_stack(write: _Prologue, stack: Sequence[str]) -> None:
    for n, kind in enumerate(stack):
        if kind == VALUE:
            write.take(f".stack{n}")
        elif kind == HANDLED:
            write.take(f".stack{n}")
            write.add("PUSH_EXC_INFO")      # puts the slot below the exception, which is the handled one from here on
            write.add("POP_TOP")            # where the program still has the exception itself, it is the next item
        elif kind == HANDLED_AGAIN:
            write.add("COPY", n - max(below for below in range(n) if stack[below] == HANDLED))
        elif kind == NULL:
            write.add("PUSH_NULL")
        elif kind == LASTI:
            write.add("LOAD_CONST", write.layout.const(0))
        else:
            raise ValueError(f"{kind!r} is no kind of stack item")


def _call_awaited(write: _Prologue, awaited: Instr) -> None:
    null, load = Instr("PUSH_NULL"), Instr("LOAD_FAST", argval=_THUNK)
    for part in ((load, null) if versions.NULL_ABOVE else (null, load)):
        write.spell(part)
    # inside of the block too: Python 3.13 looks for the handler of an error in a callee at the instruction before the call
    write.add("DELETE_FAST", write.layout.slots[_THUNK], like=awaited)
    write.spell(Instr("CALL", 0), like=awaited)
