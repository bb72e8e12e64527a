"""Instr: one bytecode instruction, real or normalised, with its exception handler and its place in the source."""
from __future__ import annotations

import dis
from typing import Any

from firesteel.records import dataclass

Position = tuple[int | None, int | None, int | None, int | None]    # line, end line, column, end column
NOWHERE: Position = (None, None, None, None)


class Handler:
    """Where an exception goes: the stack is cut to `depth`, `lasti` pushes the place, then the exception, then `target` runs."""

    __slots__ = ("target", "depth", "lasti")

    def __init__(self, target: Instr, depth: int, lasti: bool):
        self.target, self.depth, self.lasti = target, depth, lasti

    def __repr__(self) -> str:
        return f"Handler(-> {self.target.index}, depth={self.depth}, lasti={self.lasti})"


@dataclass(slots=True, eq=False)
class Instr:
    """One instruction, real or normalised; compared by identity."""
    opname: str
    arg: Any = None                     # an int, where the instruction has one
    argval: Any = None                  # the constant, the name, the operator's symbol, a pair of names, ...
    target: Any = None                  # of a jump: an Instr
    handler: Handler | None = None      # innermost exception handler around it
    position: Position = NOWHERE
    index: int = -1                     # in its list
    kwnames: tuple[str, ...] = ()       # of a normalised CALL
    raw: int = -1                       # normalised: index of the first real instruction of its run,
    raw_next: int = -1                  #   and of the one behind the run;
    part: int = 0                       #   its place among the normalised instructions of that run
    prefixes: int = 0                   # real: EXTENDED_ARGs to have at least; compilers leave some that are not needed

    @property
    def lineno(self) -> int | None:
        return self.position[0]

    @property
    def opcode(self) -> int:
        return dis.opmap[self.opname]

    def __repr__(self) -> str:
        shown = [self.opname]
        if self.target is not None:
            shown.append(f"-> {self.target.index}")
        elif self.argval is not None:
            shown.append(repr(self.argval))
        elif self.arg is not None:
            shown.append(str(self.arg))
        return f"<{self.index}: {' '.join(shown)}>"
