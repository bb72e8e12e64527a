"""Where the two ways of a branch meet again, read off the bytecode.

    meeting_places(code, index)[0]      # the instruction at which both ways of the jump at `index` go on; EXIT: both return
"""
from __future__ import annotations

import types

from firesteel.capture.code import per_code, program
from firesteel.capture.instr import Instr

EXIT = -1
RAISES = frozenset({"RAISE_VARARGS", "RERAISE"})


def successors(instr: Instr) -> list[int]:
    """The instructions that may come next where nothing is raised; EXIT behind a return."""
    if instr.opname == "RETURN_VALUE":
        return [EXIT]
    if instr.opname in RAISES:
        return []
    after = [] if instr.opname == "JUMP" else [instr.index + 1]
    return after if instr.target is None else [instr.target.index, *after]


@per_code
def _always_behind(code: types.CodeType) -> list[int]:
    """For each instruction, and last for EXIT, the set (as bits) of those that every way from it to EXIT passes; all where none leads there."""
    instrs = program(code)
    end = len(instrs)
    everything = (1 << (end + 1)) - 1
    behind = [everything] * end + [1 << end]
    changed = True
    while changed:
        changed = False
        for instr in reversed(instrs):
            found = everything
            for place in successors(instr):
                found &= behind[place]
            if (found := found | 1 << instr.index) != behind[instr.index]:
                behind[instr.index], changed = found, True
    return behind


def only_raises(code: types.CodeType, index: int) -> bool:
    """Does every way from here end in an exception?"""
    behind = _always_behind(code)
    return behind[index] == (1 << len(behind)) - 1


def meeting_places(code: types.CodeType, index: int) -> list[int]:
    """The nearest first; none that is met only after a way led back to the jump: a loop."""
    behind, starts = _always_behind(code), successors(program(code)[index])
    common = -1
    for start in starts:
        common &= behind[start]
    places = [place for place in range(len(behind)) if common >> place & 1]
    if any(only_raises(code, start) for start in starts):
        return []
    places.sort(key=lambda place: -behind[place].bit_count())
    named = [EXIT if place == len(behind) - 1 else place for place in places]
    return [place for place in named if not _reaches(code, starts, index, place)]


def _reaches(code: types.CodeType, starts: list[int], wanted: int, stop: int) -> bool:
    instrs, todo, seen = program(code), list(starts), {stop, EXIT}
    while todo:
        place = todo.pop()
        if place not in seen:
            if place == wanted:
                return True
            seen.add(place)
            todo += successors(instrs[place])
    return False
