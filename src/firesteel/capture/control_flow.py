"""Where the two ways of a branch meet again, and which cycle one of them enters, read off the bytecode.

    meeting_places(code, successors(jump), index)[0]        # the instruction at which both ways of the jump at `index` go on; EXIT: both return
    cycle_entered(code, index)                              # the loop that one way of it starts or goes on with

Inside of a loop's round the program ends where that ends: `ends` are instructions that stand for EXIT.
"""
from __future__ import annotations

import types
from collections.abc import Iterable, Sequence

from firesteel.capture.code import per_code, program
from firesteel.capture.instr import Instr
from firesteel.records import dataclass

EXIT = -1
NOWHERE: frozenset[int] = frozenset()
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
def _known(code: types.CodeType) -> dict[frozenset[int], list[int]]:
    return {}


def _always_behind(code: types.CodeType, ends: frozenset[int] = NOWHERE) -> list[int]:
    """For each instruction, and last for EXIT, the set (as bits) of those that every way from it to EXIT passes; all where none leads there."""
    known = _known(code)
    if ends not in known:
        known[ends] = _find_behind(code, ends)
    return known[ends]


def _find_behind(code: types.CodeType, ends: frozenset[int]) -> list[int]:
    instrs = program(code)
    end = len(instrs)
    everything = (1 << (end + 1)) - 1
    behind = [everything] * end + [1 << end]
    changed = True
    while changed:
        changed = False
        for instr in reversed(instrs):
            found = everything
            for place in [EXIT] if instr.index in ends else successors(instr):
                found &= behind[place]
            if (found := found | 1 << instr.index) != behind[instr.index]:
                behind[instr.index], changed = found, True
    return behind


def only_raises(code: types.CodeType, index: int) -> bool:
    """Does every way from here end in an exception?"""
    behind = _always_behind(code)
    return behind[index] == (1 << len(behind)) - 1


def meeting_places(code: types.CodeType, starts: Sequence[int], ends: frozenset[int] = NOWHERE, index: int | None = None) -> list[int]:
    """The nearest first; none that is met only after a way led back to the jump at `index`: a loop."""
    if any(only_raises(code, start) for start in starts):
        return []
    return [place for place in _common(code, starts, ends) if index not in _reached(code, starts, ends | {place})]


def _common(code: types.CodeType, starts: Sequence[int], ends: frozenset[int]) -> list[int]:
    """What every way from each of the starts passes, the nearest first."""
    behind, common = _always_behind(code, ends), -1
    for start in starts:
        common &= behind[start]
    places = [place for place in range(len(behind)) if common >> place & 1]
    places.sort(key=lambda place: -behind[place].bit_count())
    return [EXIT if place == len(behind) - 1 or place in ends else place for place in places]


def _reached(code: types.CodeType, starts: Iterable[int], stops: frozenset[int]) -> dict[int, list[int]]:
    """The instructions that ways from the starts come to before they come to one of `stops`, each with those that it is reached from."""
    instrs, todo = program(code), [place for place in starts if place not in stops]
    reached: dict[int, list[int]] = {place: [] for place in todo}
    while todo:
        place = todo.pop()
        for behind in successors(instrs[place]):
            if behind != EXIT and behind not in stops:
                if behind not in reached:
                    todo.append(behind)
                reached.setdefault(behind, []).append(place)
    return reached


@dataclass(frozen=True)
class Cycle:
    """A loop: each round comes to `start`, or leaves to one of `exits`."""
    start: int
    exits: tuple[int, ...]


def cycle_entered(code: types.CodeType, index: int, ends: frozenset[int] = NOWHERE) -> Cycle | None:
    """The loop that one way of the jump starts or goes on with, while the other leaves it; the first exit is that way's."""
    ways = successors(program(code)[index])
    meet = _common(code, ways, ends)[:1]
    for start, other in (ways, ways[::-1]):
        reached = _reached(code, [start], ends.union(meet))
        inside: set[int] = set()
        todo = list(reached.get(start, ()))
        while todo:
            place = todo.pop()
            if place not in inside:
                inside.add(place)
                todo += reached[place]
        leaving = [place for member in sorted(inside) for place in successors(program(code)[member]) if place not in inside]
        exits = tuple(dict.fromkeys([other, *(place for place in leaving if not only_raises(code, place))]))
        if inside and other not in inside and len(exits) <= 2 and EXIT not in exits:
            return Cycle(start, exits)
    return None
