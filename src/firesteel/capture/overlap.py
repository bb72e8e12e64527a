"""Inputs that alias, one of which is mutated: what the mutation does to the others is part of the compiled program.

In: the tensors that a graph reads, with what the capture did to them.  Out: those of each shared storage that is written, marked so that no
backward computes from them again, and one guard for each, which says which of the tensors in it overlap.
What always holds: a program that writes no shared input has no such guard.

    f(x[:5], x[4:9])        # writes its first argument: "a and b share memory"
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from firesteel.capture.guards import KINDS, RELATION, Guard, Kind, Writer
from firesteel.capture.source import Source
from firesteel.records import dataclass

if TYPE_CHECKING:
    from firesteel.capture.record import GraphInput

Pairs = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Overlap:
    """Tensors by their sources, and the pairs of them that share memory."""
    sources: tuple[Source, ...]
    pairs: Pairs


def written_groups(inputs: Sequence[GraphInput]) -> list[list[GraphInput]]:
    """Inputs that share a storage of which the capture wrote a part, marked as held: a backward does not find what the forward read of them."""
    groups: dict[int, list[GraphInput]] = {}
    for i in inputs:
        if isinstance(i.real, torch.Tensor) and i.source is not None and torch._C._has_storage(i.real):
            groups.setdefault(i.real.untyped_storage()._cdata, []).append(i)
    written = [group for group in groups.values() if len(group) > 1 and any(i.abstract._version for i in group)]
    for one in (one for group in written for one in group):
        one.node.meta["held"] = True
    return written


def overlap_guards(groups: Sequence[Sequence[GraphInput]]) -> Iterator[Guard]:
    for group in groups:
        yield Guard(None, "overlap", Overlap(tuple(i.source for i in group), overlapping([i.real for i in group])))


def overlapping(tensors: Sequence[torch.Tensor]) -> Pairs:
    """The pairs whose memory meets, taken as ranges from a tensor's first to its last element."""
    spans = [_span(t) for t in tensors]
    return frozenset((i, j) for j, (a, b) in enumerate(spans) for i, (c, d) in enumerate(spans[:j]) if a < d and c < b)


def _span(t: torch.Tensor) -> tuple[int, int]:
    if not t.numel():
        return 0, 0
    start, size = t.data_ptr(), t.element_size()
    return start, start + size * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())))


def _check(x: str, data: Overlap, w: Writer) -> str:
    return f"{w.bind(overlapping, 'overlapping')}(({', '.join(map(w.load, data.sources))})) == {w.bind(data.pairs, 'pairs')}"


def _sentence(name: str, data: Overlap, now: Any) -> str:
    names = [source.name for source in data.sources]
    shown = ", ".join(f"{names[i]} with {names[j]}" for i, j in sorted(data.pairs))
    return f"which of {', '.join(names)} share memory has changed; the code, which writes one of them, is for {shown or 'none'}"


KINDS.add("overlap", Kind(RELATION, _check, _sentence, sources=lambda data: data.sources))
