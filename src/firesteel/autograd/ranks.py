"""Do all ranks compile the same collectives?  Ranks that do not would deadlock; here they raise an error.

When a function, or what follows one of its breaks, is compiled in a process group, each rank writes the row of its collectives into the group's store
and reads those of the others: an operator, its dtype and sizes, for each call.
 1. Ranks meet at a place: a function, or one of its breaks (both ways out of a branch are one place).  They meet again where a later compilation
    makes other collectives than all before it: the n-th such row of one rank is compared with the n-th of another.
 2. A rank waits for the others for `fs.config.rank_wait` seconds at most; one that is later is only warned about, since it may be slow.  A rank
    without collectives does not wait, and nobody waits behind a break for a rank that has none there.
 3. Rows are compared as far as both go: a graph may end early at a break, and the rest comes in another.
 4. A program that comes out of the cache brings the rows with it: some ranks may find it there and others not.

    compare_ranks(rows_of(joint.gm), RankPlace("step (train.py:12)"))      # DifferentPrograms: Ranks 0 and 1 compile different programs ...
"""
from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from firesteel.artifacts import logger
from firesteel.config import config
from firesteel.errors import DifferentPrograms
from firesteel.operators import collective

UNEVEN = frozenset({"all_to_all_single"})       # sizes may differ between ranks
BETWEEN_TWO = frozenset({"firesteel::send", "firesteel::recv"})     # other calls on the other rank


Rows = dict[str, list[Any]]     # name of a group, "" for that of all ranks -> its calls


def follow(ranks: RankPlace, names: Iterable[Any]) -> None:
    """The regions that go on behind a region, among the names of its run function, are compared behind its place."""
    for rest in names:
        if getattr(rest, "resumes", False) and rest.ranks is None:
            rest.ranks = RankPlace(ranks.after, "", (*ranks.path[-3:], ranks.name))


def rows_of(gm: GraphModule) -> Rows:
    rows: Rows = {"": []}
    everybody = torch.distributed.distributed_c10d._get_default_group().group_name
    for node in gm.graph.nodes:
        if collective(node.target) == "start" and node.target._schema.name not in BETWEEN_TWO:
            group: Any = node.args[-1]
            name = getattr(group, "group_name", group)
            rows.setdefault("" if name == everybody else name, []).append(described(node))
    return rows


class RankPlace(NamedTuple):
    """Where ranks meet."""
    name: str
    after: str = ""             # the break that follows, if any
    path: Sequence[str] = ()    # behind a break: the places before it, the last ones


def compare_ranks(rows: Rows, place: Sequence[Any]) -> None:
    world: Any = torch.distributed.distributed_c10d
    for name, calls in rows.items():
        name = name or world._get_default_group().group_name
        ranks = world.get_process_group_ranks(world._resolve_process_group(name))
        Meeting(world._get_default_store(), name, RankPlace(*place), torch.distributed.get_rank(), ranks).hold(calls)


def described(node: Node) -> list[Any]:
    """[operator, what else its arguments say, dtype, sizes]; -1 for a size that is a symbol."""
    name = node.target._schema.name.partition("::")[2]      # type: ignore[union-attr]  # a collective is an OpOverload
    read: Any = node.args[0] if node.args else None
    tensors = read if isinstance(read, (list, tuple)) else [read]
    specs = [t.meta["val"].spec for t in tensors if isinstance(t, Node)] if name not in UNEVEN else []
    rest = [arg for arg in node.args[1:-1] if isinstance(arg, (int, str))]
    return [name, rest, [str(s.dtype) for s in specs], [[n if type(n) is int else -1 for n in s.shape] for s in specs]]


class Meeting:
    """The ranks of a group at one place.  Keys of the store: PLACE/RANK/N, its N-th row; PLACE/RANK/to/BREAK and
    BREAK/RANK/comes, where it goes on."""

    def __init__(self, store: Any, group: str, place: RankPlace, rank: int, ranks: Sequence[int]):
        self.store, self.group, self.place, self.rank, self.ranks = store, group, place, rank, ranks

    def key(self, rank: int, what: Any, place: str | None = None) -> str:
        return f"firesteel/{self.group}/{place or self.place.name}/{rank}/{what}"

    def hold(self, calls: list[Any]) -> None:
        if self.place.after:
            self.store.set(self.key(self.rank, f"to/{self.place.after}"), "")
            self.store.set(self.key(self.rank, "comes", self.place.after), "")
        known = self.key(self.rank, f"had/{zlib.crc32(json.dumps([[*call[:3], list(map(len, call[3]))] for call in calls]).encode())}")
        if self.store.check([known]):
            return
        self.store.set(known, "")
        number = self.store.add(self.key(self.rank, "count"), 1) - 1
        self.store.set(self.key(self.rank, number), json.dumps([calls, not self.place.after]))
        until = time.monotonic() + config.rank_wait
        late = [rank for rank in self.ranks if rank != self.rank and calls and not self._met(rank, number, calls, until)]
        if late:
            logger.warning("rank %d has compiled collectives in %s, and ranks %s did not within %g s; if they run another program, "
                           "this one will hang", self.rank, self.place.name, late, config.rank_wait)

    def _met(self, rank: int, number: int, calls: list[Any], until: float) -> bool:
        """Was its row compared, or is none to come?"""
        row = self.key(rank, number)
        while not self.store.check([row]):
            if self._goes_elsewhere(rank):
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        self._compare(rank, calls, not self.place.after, *json.loads(self.store.get(row)))
        return True

    def _goes_elsewhere(self, rank: int) -> bool:
        """Did it leave our path, as far as it has come, without a break that leads here?"""
        steps = list(zip(self.place.path, [*self.place.path[1:], self.place.name]))
        reached = next(((here, there) for here, there in reversed(steps) if self.store.check([self.key(rank, 0, here)])), None)
        ways = [self.key(rank, "comes")] if reached is None else [self.key(rank, "comes"), self.key(rank, f"to/{reached[1]}", reached[0])]
        return reached is not None and not any(self.store.check([way]) for way in ways)

    def _compare(self, rank: int, ours: list[Any], whole: bool, theirs: list[Any], theirs_whole: bool) -> None:
        shared = min(len(ours), len(theirs))
        place = next((k for k in range(shared) if not alike(ours[k], theirs[k])), shared)
        if place < shared or whole and theirs_whole and len(ours) != len(theirs):
            here, there = (text_of(row[place]) if place < len(row) else "none" for row in (ours, theirs))
            raise DifferentPrograms(
                f"Ranks {self.rank} and {rank} compile different programs: collective {place + 1} of {self.place.name} is {here} on rank {self.rank} "
                f"and {there} on rank {rank}.",
                hint="Make the same collectives in the same order on all ranks, or set fs.config.rank_wait = 0 where they compile in another order.")


def alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """The same call, as far as sizes are known."""
    same = a[:3] == b[:3] and list(map(len, a[3])) == list(map(len, b[3]))
    return same and all(m == n or -1 in (m, n) for x, y in zip(a[3], b[3]) for m, n in zip(x, y))


def text_of(call: Sequence[Any]) -> str:
    name, rest, dtypes, shapes = call
    tensors = [f"{dtype.removeprefix('torch.')}{shape}".replace("-1", "?") for dtype, shape in zip(dtypes, shapes)]
    return f"{name}({', '.join([*tensors, *map(str, rest)])})"
