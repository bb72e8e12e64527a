"""A limit on the bytes saved for backward: `fs.checkpoint_budget`.

In: a joint graph and a limit in bytes.  Out: the two graphs of a partition whose saved tensors are at most that large, inputs not counted, and
a `Choice` that says what was saved, what is recomputed and how long that takes.  The choice is a minimum cut in which a saved value costs
`price` for each byte and a recomputed operator its measured time (optimes.py): a higher price saves fewer bytes, never more, and each cut is the
fastest one for its bytes.  The lowest price whose cut keeps within the limit is found by bisection.

What always holds: draws of random numbers, operators of the user's and what a policy says must be saved run once; what is in a checkpointed
region is recomputed as without a limit; what the ordinary partition saves is saved where it is within the limit.

    partition = Budget(200_000_000)
    fw, bw = partition(joint, inputs, num_fwd_outputs=1)
    print(partition.report)
"""
from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from firesteel import artifacts
from firesteel.autograd.optimes import seconds
from firesteel.autograd.partition import Partition, Roles, Terms, build, choose_saved, minimum_cut
from firesteel.autograd.recompute import bytes_of, is_size, op_class
from firesteel.errors import UserError
from firesteel.records import dataclass
from firesteel.targets import kind_of

PRICES = 34             # the highest price is 2 ** PRICES units
STEPS = 16              # of the bisection: distinguishes prices that differ by a thousandth
UNIT = 10               # a price is in picoseconds / 2 ** UNIT a byte
TILT = 0.25             # by how much the last operator of a graph seems slower than the first: equal layers then change one by one
MOST = 1 << 56          # below what the network takes for infinite
_LIBRARY = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class ReportLine:
    """A value that is saved, or an operator that runs again."""
    operator: str
    shape: str
    bytes: int
    seconds: float
    line: str               # of the user's program

    def __str__(self) -> str:
        return f"{self.operator} {self.shape}" + (f"  {self.line}" if self.line else "")


@dataclass(frozen=True)
class Choice:
    """What was chosen for one graph."""
    limit: int
    unlimited: int                      # bytes that would be saved without a limit
    saved: tuple[ReportLine, ...]            # largest first
    recomputed: tuple[ReportLine, ...]       # library calls that would not run twice without a limit, slowest first
    seconds: float                      # that recomputation adds to each backward, of all operators, estimated

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.saved)

    def __str__(self) -> str:
        head = (f"saved for backward: {self.bytes:,} bytes in {len(self.saved)} tensors (limit {self.limit:,}, without it {self.unlimited:,}); "
                f"recomputation adds about {self.seconds * 1e3:.2f} ms")
        return "\n".join([head, *_lines("saved", self.saved, lambda e: f"{e.bytes:,} bytes"),
                          *_lines("again", self.recomputed, lambda e: f"{e.seconds * 1e3:.3f} ms")])


def _lines(word: str, entries: Sequence[ReportLine], figure: Any) -> list[str]:
    """A line for equal entries, with their number."""
    return [f"  {word} {count:3d} x {figure(entry):>18}  {entry}" for entry, count in _counted(entries)]


def _counted(entries: Sequence[ReportLine]) -> list[tuple[ReportLine, int]]:
    counts = Counter(str(entry) for entry in entries)
    first = {str(entry): entry for entry in reversed(entries)}
    return [(first[text], count) for text, count in counts.items()]


@dataclass
class MemoryReport:
    """What was chosen for each graph that was compiled so far; prints as a page."""
    limit: int
    choices: list[Choice] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"graph {number}: {choice}" for number, choice in enumerate(self.choices, 1)]
        return "\n".join(parts or [f"no graph with a backward was compiled yet (limit {self.limit:,} bytes)"])


class Budget:
    """A partitioner with a limit; its report grows with each graph."""

    def __init__(self, limit: int):
        self.limit, self.report = limit, MemoryReport(limit)

    def __call__(self, joint: GraphModule, inputs: Any = None, *, num_fwd_outputs: int, **_: Any) -> Partition:
        roles = Roles.of(joint, num_fwd_outputs)
        ordinary = choose_saved(roles)
        prices = Prices(roles)
        saved = ordinary if held_bytes(ordinary) <= self.limit else prices.fit(self.limit)
        choice = prices.choice(self.limit, ordinary, saved)
        self.report.choices.append(choice)
        artifacts.log("aot", lambda: str(choice))
        return build(roles, saved)


def held_bytes(saved: Sequence[Node]) -> int:
    return sum(map(held, saved))


def held(node: Node) -> int:
    """Bytes that live longer because the value is saved: none for an input, but for the copy of one that is overwritten."""
    if is_size(node) or node.op == "get_attr" or node.op == "placeholder" and not node.meta.get("mutated"):
        return 0
    value = node.meta.get("val")
    block = kind.block if isinstance(value, torch.Tensor) and (kind := kind_of(value.device)) else 1
    return -(-bytes_of(node) // block) * block


class Prices:
    """The cuts of one graph for different prices of a byte."""

    def __init__(self, roles: Roles):
        self.roles, self.times = roles, dict[Node, float]()
        self.place = {node: number / len(roles.nodes) for number, node in enumerate(roles.nodes)}

    def fit(self, limit: int) -> list[Node]:
        """The cut of the lowest price that saves at most `limit` bytes."""
        best = self.cut(1 << PRICES)
        if held_bytes(best) > limit:
            raise UserError(f"{limit:,} bytes are too few for the backward: the smallest reachable figure for this graph is {held_bytes(best):,}.",
                            hint=f"Raise bytes=.  The largest values that cannot be recomputed: {', '.join(map(_text, _largest(best)))}.")
        low, high = 0.0, float(PRICES)
        for _ in range(STEPS):
            middle = (low + high) / 2
            tried = self.cut(int(2 ** middle))
            if held_bytes(tried) <= limit:
                high, best = middle, tried
            else:
                low = middle
        return best

    def cut(self, price: int) -> list[Node]:
        return minimum_cut(self.roles, Terms(self._again, lambda node: self.roles.policy(node).save,
                                             lambda node: min(max(1, held(node) * price >> UNIT), MOST), self._picoseconds))

    def _again(self, node: Node) -> bool:
        """May it run twice?  So may what a checkpointed region hands on: it is saved only because that is cheaper."""
        if node.op != "call_function":
            return node.op == "get_attr"
        if node not in self.roles.forward and not is_size(node):
            return True
        kind, wish = op_class(node), node.meta.get("recompute")
        if kind in ("size", "random") or wish == "never" or self.roles.policy(node).recompute:
            return self.roles.policy(node).recompute and not (kind == "reduce" and wish is None and node.meta.get("exact"))
        return getattr(_maker(node).target, "namespace", "") == "aten"

    def _picoseconds(self, node: Node) -> int:
        return 0 if node not in self.roles.forward else int(self.time(node) * 1e12 * (1 + TILT * self.place[node]))

    def time(self, node: Node) -> float:
        if node not in self.times:
            self.times[node] = seconds(node)
        return self.times[node]

    def choice(self, limit: int, ordinary: list[Node], saved: list[Node]) -> Choice:
        usual, again = self._recomputed(ordinary), self._recomputed(saved)
        added = [node for node in self.roles.nodes if node in again and node not in usual]
        calls = [self._entry(node) for node in added if op_class(node) == "heavy" and _maker(node) is node]
        return Choice(limit, held_bytes(ordinary), tuple(sorted((self._entry(n) for n in saved if held(n)), key=lambda e: -e.bytes)),
                      tuple(sorted(calls, key=lambda e: -e.seconds)), sum(map(self.time, added)) - sum(self.time(n) for n in usual - again))

    def _recomputed(self, saved: list[Node]) -> set[Node]:
        """Operators of the forward that the backward runs too."""
        stop, seen = set(saved), set[Node]()
        stack = [node for node in self.roles.read_by_backward() if node not in stop]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack += [before for before in self.roles.reads[node] if before not in stop]
        return {node for node in seen if node in self.roles.forward and node.op == "call_function"}

    def _entry(self, node: Node) -> ReportLine:
        value: Any = node.meta.get("val")
        shape = str(list(value.shape)) if isinstance(value, torch.Tensor) else ""
        return ReportLine(_operator(node), shape, held(node), self.time(node) if op_class(node) == "heavy" else 0.0, _line(node))


def _maker(node: Node) -> Node:
    """The operator whose result, or one of whose results, the value is."""
    made: Any = node.args[0] if node.target is operator.getitem else node
    return made


def _operator(node: Node) -> str:
    return f"copy of {node.name}" if node.op == "placeholder" else str(_maker(node).target).removeprefix("aten.").removesuffix(".default")


def _line(node: Node) -> str:
    """The innermost line of the user's program, outside of torch, that the operator is from."""
    frames = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")]
    places = [frame.removeprefix('File "').partition('", line ') for frame in frames]
    own = [f"{file}:{rest.partition(',')[0]}" for file, _, rest in places if not file.startswith(_LIBRARY)]
    return own[-1] if own else ""


def _largest(saved: list[Node]) -> list[Node]:
    return sorted((node for node in saved if held(node)), key=lambda node: -held(node))[:3]


def _text(node: Node) -> str:
    return f"{_operator(node)} ({held(node):,} bytes)"
