"""Do all ranks compile the same collectives?  Ranks that do not would deadlock; here they raise an error.

When a function is compiled for the first time in a process group, each rank writes the row of its collectives into the group's store and reads
those of the others: an operator, its dtype and sizes, for each call.  It waits for them for `fs.config.rank_wait` seconds at most; a rank that is
later is only warned about, since it may be slow.  Rows are compared as far as both go: a graph may end early at a break, and the rest comes in
another.  A program that comes out of the cache brings the rows with it: some ranks may find it there and others not.

    compare_ranks(rows_of(joint.gm), "step:12", whole=True)      # DifferentPrograms: Ranks 0 and 1 compile different programs ...
"""
from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from firesteel.artifacts import logger
from firesteel.config import config
from firesteel.errors import DifferentPrograms
from firesteel.operators import collective

UNEVEN = frozenset({"all_to_all_single"})       # sizes may differ between ranks


Rows = dict[str, list[Any]]     # name of a group, "" for that of all ranks -> its calls


def rows_of(gm: GraphModule) -> Rows:
    rows: Rows = {"": []}
    everybody = torch.distributed.distributed_c10d._get_default_group().group_name
    for node in gm.graph.nodes:
        if collective(node.target) == "start":
            group: Any = node.args[-1]
            name = getattr(group, "group_name", group)
            rows.setdefault("" if name == everybody else name, []).append(described(node))
    return rows


def compare_ranks(rows: Rows, region: str, whole: bool) -> None:
    """`whole`: no break follows in the function."""
    world: Any = torch.distributed.distributed_c10d
    for name, calls in rows.items():
        name = name or world._get_default_group().group_name
        ranks = world.get_process_group_ranks(world._resolve_process_group(name))
        Meeting(world._get_default_store(), f"firesteel/{name}/{region}", region, torch.distributed.get_rank(), ranks).hold(calls, whole)


def described(node: Node) -> list[Any]:
    """[operator, what else its arguments say, dtype, sizes]; -1 for a size that is a symbol."""
    name = node.target._schema.name.partition("::")[2]      # type: ignore[union-attr]  # a collective is an OpOverload
    read: Any = node.args[0] if node.args else None
    tensors = read if isinstance(read, (list, tuple)) else [read]
    specs = [t.meta["val"].spec for t in tensors if isinstance(t, Node)] if name not in UNEVEN else []
    rest = [arg for arg in node.args[1:-1] if isinstance(arg, (int, str))]
    return [name, rest, [str(s.dtype) for s in specs], [[n if type(n) is int else -1 for n in s.shape] for s in specs]]


class Meeting:
    """The ranks of a group at one function."""

    def __init__(self, store: Any, prefix: str, region: str, rank: int, ranks: Sequence[int]):
        self.store, self.prefix, self.region, self.rank, self.ranks = store, prefix, region, rank, ranks

    def hold(self, calls: list[Any], whole: bool) -> None:
        """Compares, the first time.  A rank without a collective says so, and does not wait."""
        if self.store.check([f"{self.prefix}/{self.rank}"]):
            return
        self.store.set(f"{self.prefix}/{self.rank}", json.dumps([calls, whole]))
        others = [rank for rank in self.ranks if rank != self.rank] if calls else []
        try:
            if others:
                self.store.wait([f"{self.prefix}/{rank}" for rank in others], datetime.timedelta(seconds=config.rank_wait))
        except RuntimeError:        # torch's DistStoreError
            logger.warning("rank %d has compiled collectives in %s, and not all of ranks %s did within %g s; if they run another program, "
                           "this one will hang", self.rank, self.region, others, config.rank_wait)
            return
        for rank in others:
            self._compare(rank, calls, whole, *json.loads(self.store.get(f"{self.prefix}/{rank}")))

    def _compare(self, rank: int, ours: list[Any], whole: bool, theirs: list[Any], theirs_whole: bool) -> None:
        shared = min(len(ours), len(theirs))
        place = next((k for k in range(shared) if not alike(ours[k], theirs[k])), shared)
        if place < shared or whole and theirs_whole and len(ours) != len(theirs):
            here, there = (text_of(row[place]) if place < len(row) else "none" for row in (ours, theirs))
            raise DifferentPrograms(
                f"Ranks {self.rank} and {rank} compile different programs: collective {place + 1} of {self.region} is {here} on rank {self.rank} "
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
