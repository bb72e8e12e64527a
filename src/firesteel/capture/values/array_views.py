"""Basic indices of an array whose memory is read backwards in some dimensions: `a[::-1]`, which torch's tensors cannot be.

Such a view is a view of torch's, in the memory's own order, and the dimensions of it that are turned round.

    turned_view((slice(None, None, -2),), [lambda: 5], frozenset())     # key [0:5:2], turned {0}: 4, 2, 0 are 0, 2, 4 read backwards
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from firesteel.records import dataclass

WHOLE = slice(None)
BACKWARDS = slice(None, None, -1)


@dataclass(frozen=True)
class TurnedView:
    key: tuple[Any, ...]            # for the memory's view
    turned: frozenset[int]          # dimensions of what it gives


def is_basic(key: tuple[Any, ...]) -> bool:
    return all(item is None or item is Ellipsis or type(item) in (int, slice) for item in key) and key.count(Ellipsis) < 2


def goes_backwards(key: tuple[Any, ...]) -> bool:
    return any(type(item) is slice and type(item.step) is int and item.step < 0 for item in key)


def turned_view(key: tuple[Any, ...], sizes: Sequence[Callable[[], int]], turned: frozenset[int]) -> TurnedView:
    """What a basic index of a view gives, in the memory's order.  A size is asked for where other than a whole dimension is taken."""
    taken = sum(item is not None and item is not Ellipsis for item in key)
    if taken > len(sizes):
        raise IndexError("too many indices for array")
    rest = [WHOLE] * (len(sizes) - taken)
    place = key.index(Ellipsis) if Ellipsis in key else len(key)
    items = [*key[:place], *rest, *key[place + 1:]]
    found: list[Any] = []
    made, dim = set(), 0
    for item in items:
        if item is not None:
            item, backwards = _one(item, sizes[dim], dim in turned)
            dim += 1
            if backwards:
                made.add(sum(type(one) is not int for one in found))
        found.append(item)
    return TurnedView(tuple(found), frozenset(made))


def _one(item: Any, size: Callable[[], int], turned: bool) -> tuple[Any, bool]:
    """An index of one dimension: the memory's, and whether what it gives is read backwards."""
    if item in (WHOLE, BACKWARDS):
        return WHOLE, turned != (item == BACKWARDS)
    count = size()
    if type(item) is int:
        if not -count <= item < count:
            raise IndexError(f"index {item} is out of bounds for axis with size {count}")
        place = item % count
        return count - 1 - place if turned else place, False
    places = range(count)[item]
    if turned:
        places = range(count - 1 - places.start, count - 1 - places.stop, -places.step)
    if not places:
        return slice(0, 0), False
    backwards = places.step < 0
    first, last = (places[-1], places[0]) if backwards else (places[0], places[-1])
    return slice(first, last + 1, abs(places.step)), backwards
