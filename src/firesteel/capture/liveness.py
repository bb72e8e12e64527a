"""Which slots of a frame are still read after an instruction: only those are handed to a continuation.

    live_slots(f.__code__, index)       # frozenset of names
"""
from __future__ import annotations

import types

from firesteel.capture.code import per_code, program
from firesteel.capture.instr import Instr

READS = frozenset({"LOAD_FAST", "LOAD_FAST_AND_CLEAR", "DELETE_FAST", "LOAD_CLOSURE", "LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF",
                   "LOAD_FROM_DICT_OR_DEREF", "MAKE_CELL"})
KILLS = frozenset({"STORE_FAST"})
READ_ALL = frozenset({"locals", "vars", "eval", "exec", "dir"})
STOPS = frozenset({"RETURN_VALUE", "RAISE_VARARGS", "RERAISE", "JUMP"})


def live_slots(code: types.CodeType, index: int) -> frozenset[str]:
    """The slots that instruction `index` or a later one may read before writing."""
    found = _liveness(code)[index]
    return found | _always(code)


def _always(code: types.CodeType) -> frozenset[str]:
    """super() reads the first argument and __class__ without an instruction that says so; locals() reads all."""
    if not READ_ALL.isdisjoint(code.co_names):
        return frozenset(code.co_varnames)
    return frozenset({code.co_varnames[0], "__class__"}) if "__class__" in code.co_freevars and code.co_argcount else frozenset()


@per_code
def _liveness(code: types.CodeType) -> list[frozenset[str]]:
    """By a backward fixed point over the normalised instructions."""
    instrs = program(code)
    live: list[frozenset[str]] = [frozenset()] * (len(instrs) + 1)
    changed = True
    while changed:
        changed = False
        for instr in reversed(instrs):
            found = _before(instr, live)
            if found != live[instr.index]:
                live[instr.index], changed = found, True
    return live


def _before(instr: Instr, live: list[frozenset[str]]) -> frozenset[str]:
    after = frozenset() if instr.opname in STOPS else live[instr.index + 1]
    if instr.target is not None:
        after |= live[instr.target.index]
    if instr.opname in KILLS:
        after -= {instr.argval}
    if instr.opname in READS:
        after |= {instr.argval}
    if instr.handler is not None:
        after |= live[instr.handler.target.index]
    return after
