"""Helper: a function as a functional ATen graph, with what it wrote and whose storage its results show."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from firesteel.graph.build import make_module
from firesteel.graph.functional import ViewStep
from firesteel.graph.schemas import EMPTY_VIEWS
from firesteel.graph.spec import Spec
from firesteel.graph.tensor import AbstractTensor, find_world
from firesteel.graph.trace import TraceWorld, tracing


@dataclass
class Mutation:
    """A written input.  `value` is the node of its final value (None where only its metadata changed); `spec` its final Spec."""
    input: int
    value: Node | None
    metadata: bool
    spec: Spec


@dataclass
class Result:
    """An output of the traced function: which input's storage it shows (None: its own), and by which views."""
    tensor: Any
    source: int | None = None
    steps: tuple[ViewStep, ...] = ()
    cell: Any = None


@dataclass
class Traced:
    """The graph, whose outputs are those of the function and then the final values of `mutations`, in order."""
    gm: GraphModule
    results: list[Result]
    mutations: list[Mutation] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)      # the abstract values that the function was called with


def trace(fn: Callable[..., Any], inputs: Sequence[Any], *, decompositions: Mapping[OpOverload, Callable] | None = None) -> Traced:
    """Runs `fn(*inputs)` on fresh abstract inputs and records it.  `fn` returns a flat list or tuple, or one tensor."""
    known = find_world([v for v in inputs if isinstance(v, torch.Tensor)])
    world = TraceWorld(known.env if known is not None else None, decompositions)
    values = [world.add_input(value) for value in inputs]
    with tracing(world):
        outputs = fn(*values)
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    mutations = mutations_of(world)
    nodes = [world.to_node(o) for o in outputs]
    world.graph.output(tuple(nodes + [m.value for m in mutations if m.value is not None])).meta["val"] = None
    return Traced(make_module(world.graph, world.constants), [result_of(o) for o in outputs], mutations, values)


def mutations_of(world: TraceWorld) -> list[Mutation]:
    """The inputs written so far (data or metadata)."""
    found = []
    for number, value in enumerate(world.inputs):
        if type(value) is AbstractTensor:
            cell, steps = value.record.cell, value.record.steps
            original = cell.source == number and not any(s.op not in EMPTY_VIEWS for s in steps)
            if cell.version or not original:
                found.append(Mutation(number, world.to_node(value) if cell.version or cell.source != number else None, not original, value.spec))
    return found


def result_of(output: Any) -> Result:
    if type(output) is not AbstractTensor or output.record is None:
        return Result(output)
    place = output.record
    return Result(output, place.cell.source, place.steps, place.cell)
