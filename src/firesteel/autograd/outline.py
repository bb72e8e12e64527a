"""What a cache of programs keeps between processes: the outline of a traced program, beside its compiled graphs.

`aot.py` asks a `ProgramCache` for the place of a captured graph; what it finds there it does not trace again, and what it makes it keeps there.
`programcache.py` has the one on disk.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Protocol

from torch.fx import GraphModule

from firesteel.autograd.joint import Joint
from firesteel.records import dataclass


@dataclass
class Outline:
    """What is known of a program that was traced and partitioned: with compiled graphs, all that its callable is made of."""
    joint: Joint                    # without its graph and examples
    boxed: bool = False             # an inference graph that takes its inputs in one list
    facts: dict[str, Any] = field(default_factory=dict)     # fields of its TrainingGraph, where it has gradients


class ProgramEntry(Protocol):
    """A place in a cache for what is made of one captured graph."""

    def outline(self) -> Outline | None: ...
    def forward(self) -> Callable: ...
    def backward(self) -> Callable | None: ...
    def claim_backward(self) -> Callable | None: ...
    def let_go(self) -> None: ...
    def backward_graph(self) -> GraphModule: ...
    def keep(self, outline: Outline, forward: Callable, backward_graph: GraphModule | None) -> None: ...
    def keep_backward(self, backward: Callable) -> None: ...


ProgramCache = Callable[[GraphModule, Sequence[Any]], ProgramEntry | None]
