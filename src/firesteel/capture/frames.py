"""Frame: one Python frame that is executed symbolically, running or suspended."""
from __future__ import annotations

import linecache
import types
from collections.abc import Sequence
from typing import Any

from firesteel.autograd.regions import Tags
from firesteel.capture.code import program
from firesteel.capture.instr import Instr
from firesteel.capture.values.base import PENDING, Value
from firesteel.tracebacks import CodeLine

PROLOGUE = frozenset({"MAKE_CELL", "COPY_FREE_VARS", "RETURN_GENERATOR", "RESUME"})     # before these a frame cannot be resumed


class Discard:
    """The `returns` of a frame whose result nobody wants."""


class Frame:
    """A suspended or running Python frame.  Mutable."""

    __slots__ = ("code", "program", "pc", "slots", "stack", "scope", "closure", "returns", "module", "tags", "generator", "birth", "namespace")

    def __init__(self, code: types.CodeType, scope: dict[str, Any], slots: dict[str, Value], closure: Sequence[Any] = (),
                 pc: int = 0, birth: int = 0):
        self.code, self.scope, self.slots, self.closure, self.pc, self.birth = code, scope, slots, closure, pc, birth
        self.program: list[Instr] = program(code)
        self.stack: list[Value] = []
        self.returns: Any = None                        # None: push the result; a Value: push that instead; Discard
        self.module: tuple[str, str, type] | None = None    # (key, name, class) of the nn.Module whose forward this is
        self.tags: Tags | None = None                   # meta of the nodes made here and in the frames above
        self.generator: Any = None
        self.namespace: Any = None                      # of a class body

    def finish(self, count: int, result: Value) -> None:
        """Pops the operands and pushes the result; a pending one is pushed when the callee returns."""
        if count:
            del self.stack[-count:]
        if result is not PENDING:
            self.stack.append(result)

    def instr(self) -> Instr:
        """The instruction that is being executed (pc is one ahead)."""
        return self.program[self.pc - 1]

    def place(self, index: int) -> CodeLine:
        """Of the instruction there."""
        return self.code.co_filename, self.program[index].lineno or self.code.co_firstlineno, self.code.co_qualname

    def __repr__(self) -> str:
        return f"<Frame {self.code.co_qualname} at {self.pc}>"


def trace_line(code: types.CodeType, line: int | None) -> str:
    text = linecache.getline(code.co_filename, line).strip() if line else ""
    return f'  File "{code.co_filename}", line {line}, in {code.co_qualname}\n    {text}\n'


def restore_frame(frame: Frame, state: tuple[int, list[Value], dict[str, Value]]) -> None:
    frame.pc, frame.stack, frame.slots = state[0], list(state[1]), dict(state[2])
