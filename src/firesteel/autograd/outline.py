"""What is known of a traced program (`Joint`), and what a cache of programs keeps of it between processes: its outline, beside its compiled graphs.

`aot.py` asks a `ProgramCache` for the place of a captured graph; what it finds there it does not trace again, and what it makes it keeps there.
`programcache.py` has the one on disk.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Protocol

from torch.fx import GraphModule

from firesteel.autograd.alias import AliasPlan
from firesteel.autograd.edges import Tangent
from firesteel.graph.wrappers import Packing, width
from firesteel.records import dataclass

Program = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Origin:
    """Where a program returns one of the forward's values: it is what input `place` holds afterwards ("input"), output `place`
    ("output"), or what output `place` is a view of ("base")."""
    kind: str
    place: int

    def find(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        if self.kind == "input":
            return inputs[self.place]
        return outputs[self.place] if self.kind == "output" else outputs[self.place]._base


@dataclass
class Joint:
    """A traced program.  Without tangents `gm` is an inference graph."""
    gm: GraphModule
    plan: AliasPlan
    tangents: list[Tangent]
    differentiated: list[bool]              # for each input: has the joint graph a gradient for it?
    non_differentiable: list[int]           # forward values that are floating but carry no gradient
    origins: list[Origin]                   # for each tangent: where the program returns the value that it is the gradient of
    example_inputs: list[Any]               # abstract, of the placeholders
    packing: Packing | None = None          # where tensor subclasses take part
    refusal: tuple[str, str] | None = None  # (counter, reason) where only eager can run the program
    severed: tuple[int, ...] = ()           # inputs that require a gradient and that no result has in its history: the program detaches them
    reaches: list[int] = field(default_factory=list)        # for each input the bit set of tangents from which it gets a gradient

    @property
    def num_fwd_outputs(self) -> int:
        return self.plan.num_values if self.packing is None else sum(map(width, self.packing.values))

    @property
    def num_primals(self) -> int:
        """Placeholders before the tangents."""
        return self.plan.num_inputs if self.packing is None else sum(map(width, self.packing.inputs))


@dataclass
class Outline:
    """What is known of a program that was traced and partitioned: with compiled graphs, all that its callable is made of."""
    joint: Joint                    # without its graph and examples
    boxed: bool = False             # an inference graph that takes its inputs in one list
    facts: dict[str, Any] = field(default_factory=dict)     # fields of its TrainingGraph, where it has gradients
    ranks: dict[str, list[Any]] = field(default_factory=dict)       # its collectives, where ranks compare them (ranks.py)


class ProgramEntry(Protocol):
    """A place in a cache for what is made of one captured graph."""

    def outline(self) -> Outline | None: ...
    def traced(self, joint: Joint) -> Outline | None: ...
    def forward(self) -> Callable: ...
    def backward(self) -> Callable | None: ...
    def claim_backward(self) -> Callable | None: ...
    def let_go(self) -> None: ...
    def backward_graph(self) -> GraphModule: ...
    def keep(self, outline: Outline, forward: Callable, backward_graph: GraphModule | None) -> None: ...
    def keep_backward(self, backward: Callable) -> None: ...


ProgramCache = Callable[[GraphModule, Sequence[Any]], ProgramEntry | None]
