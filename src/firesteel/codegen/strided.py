"""Lanes that are a few elements apart: memory is read and written in whole vectors, and shuffles pick elements out of them or weave them together.

In: accesses of a phase whose lanes step by a small number, as those of x[:, 0] and x[:, 1] of an x of two columns do.  What lies between the
first and the last element of such loads of one buffer is read once for all of them.  Stores are woven where they fill memory without gaps.
No element outside of the first and the last one that the program reads is touched, nor any of a lane that is masked.

    a = x[0], x[3], x[6], x[9]      load x[0:4], x[4:8], x[6:10]      a: lanes 0 and 3 of the first, 2 of the second, 3 of the third
    b = x[1], x[4], x[7], x[10]     (one vector more where both are read: the window of a and b ends at x[10])
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from firesteel.codegen.flat import Address, FlatPhase, FlatStore
from firesteel.records import dataclass
from firesteel.sym.expr import Expr, postorder

MOST_STEP = 12      # between lanes
ALONE = 4           # the most vectors that are read for one of them


@dataclass(frozen=True, slots=True)
class ReadWindow:
    """The places of loads that share their vectors: from `first` to `last` for the first lane, the others `step` further each."""
    first: int
    last: int
    step: int

    def starts(self, lanes: int) -> list[int]:
        """Of the vectors that cover it, the last of which ends where the window does."""
        count = self._elements(lanes)
        return [*range(0, count - lanes, lanes), count - lanes]

    def homes(self, address: Address, lanes: int) -> list[tuple[int, int]]:
        """For each lane of a load its (vector, lane of that)."""
        places = [_base(address) - self.first + k * self.step for k in range(lanes)]
        last, count = len(self.starts(lanes)) - 1, self._elements(lanes)
        return [(p // lanes, p % lanes) if p // lanes < last else (last, p - count + lanes) for p in places]

    def owners(self, start: int, lanes: int) -> list[int | None]:
        """The lane to whose places the elements of a vector belong: none for what lies between those of two lanes."""
        return [p // self.step if p % self.step <= self.last - self.first else None for p in range(start, start + lanes)]

    def _elements(self, lanes: int) -> int:
        return (lanes - 1) * self.step + self.last - self.first + 1


def lane_step(address: Address, irregular: Sequence[Expr], lane: str | None) -> int:
    """By how many elements neighbouring lanes are apart, where that is a small number other than 0 and 1; else 0."""
    step = address.coefficient(lane) if lane and not irregular else 0
    return step if type(step) is int and 2 <= step <= MOST_STEP and type(address.base) is int else 0


def windows(phase: FlatPhase, lane: str | None) -> dict[tuple[int, Address], ReadWindow]:
    """(buffer, address) of a load -> the window that it is read from."""
    found: dict[tuple[int, tuple, int], set[Address]] = {}
    for node in postorder(*phase.roots()):
        if node.op == "at" and (step := lane_step(node.attr[1], node.args, lane)):
            found.setdefault((node.attr[0], node.attr[1].terms, step), set()).add(node.attr[1])
    return {(buffer, address): window for (buffer, _, step), addresses in found.items() for near in _near(sorted(addresses, key=_base), step)
            if step <= ALONE or len(near) * ALONE >= step for window in [ReadWindow(_base(near[0]), _base(near[-1]), step)] for address in near}


def _base(address: Address) -> int:
    assert type(address.base) is int
    return address.base


def _near(addresses: list[Address], step: int) -> Iterable[list[Address]]:
    """Runs that lie within one step."""
    while addresses:
        near = [address for address in addresses if _base(address) - _base(addresses[0]) < step]
        yield near
        addresses = addresses[len(near):]


def is_apart(phase: FlatPhase, lane: str | None) -> bool:
    """Does the phase read or write what this file is for?"""
    return bool(windows(phase, lane)) or any(len(stores) > 1 for stores in woven(phase.stores, lane))


def woven(stores: Sequence[FlatStore], lane: str | None) -> list[list[FlatStore]]:
    """The stores, those that together fill memory without gaps as one list."""
    groups: dict[object, list[FlatStore]] = {}
    for number, store in enumerate(stores):
        step = lane_step(store.address, store.irregular, lane) if store.mode == "set" else 0
        groups.setdefault((store.buffer, store.address.terms, _base(store.address) // step, step) if step else number, []).append(store)
    found = []
    for group in groups.values():
        step = lane_step(group[0].address, group[0].irregular, lane)
        if step:
            group = sorted(group, key=lambda store: _base(store.address))
        whole = len(group) > 1 and [_base(store.address) for store in group] == list(range(_base(group[0].address), _base(group[0].address) + step))
        found += [group] if whole else [[store] for store in group]
    return found


def woven_homes(count: int, part: int, lanes: int) -> list[tuple[int, int]]:
    """Vectors that take turns: element p of what is stored is lane p // count of the vector p % count."""
    return [(p % count, p // count) for p in range(part * lanes, (part + 1) * lanes)]
