"""From a program and example inputs to one graph that computes its outputs and gradients.

`trace_program` runs the program on abstract tensors with torch's C++ autograd at work, looks at what came out (alias.py says what
matters), and, where something differentiable came out, asks `torch.autograd.grad` for gradients while the recorder still
listens.  The result is a `Joint`: an inference graph (no tangents) or a joint graph, and the Plan around it.

What always holds
  - placeholders are primals_0.. (one an input, in order) and tangents_0..; results are the forward's values, then one gradient an input
  - the forward's values are: new contents of written inputs, then fresh outputs, hidden bases of views, and sizes that views need
  - no value is a placeholder, and no two are the same node

    joint = trace_program(lambda x: x.sin(), [torch.randn(3, requires_grad=True)])
    joint.gm.code        # primals_0, tangents_0 -> sin(primals_0), tangents_0 * cos(primals_0)
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from firesteel.artifacts import timed
from firesteel.autograd.alias import Plan
from firesteel.autograd.function import Dense, Tangent
from firesteel.autograd.outcome import Origin, Outcome, Program
from firesteel.backwards import engine, is_spent
from firesteel.errors import DataDependentError, FiresteelError
from firesteel.graph.abstract import ResultOfOperator, bare_view, is_bare_view
from firesteel.graph.build import make_module
from firesteel.graph.rules.base import DataAccess
from firesteel.graph.sizes import static
from firesteel.graph.spec import Spec, contiguous_strides, dense_order, is_dense
from firesteel.graph.tensor import AbstractTensor, find_world
from firesteel.graph.trace import TraceWorld, tracing
from firesteel.graph.wrappers import Packing, is_wrapper, pack_of, parts_of, places_of, width

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
UNTRACEABLE = (DataAccess, DataDependentError, NotImplementedError)     # what tracing raises for programs that it cannot follow


class Undifferentiable(Exception):
    """The forward could be traced, its backward not; the cause says why."""


@dataclass
class Joint:
    """A traced program.  Without tangents `gm` is an inference graph."""
    gm: GraphModule
    plan: Plan
    tangents: list[Tangent]
    differentiated: list[bool]              # for each input: has the joint graph a gradient for it?
    non_differentiable: list[int]           # forward values that are floating but carry no gradient
    origins: list[Origin]                   # for each tangent: where the program shows the value that it is the gradient of
    example_inputs: list[Any]               # abstract, of the placeholders
    packing: Packing | None = None          # where tensor subclasses take part
    refusal: tuple[str, str] | None = None  # (counter, reason) where only eager can run the program

    @property
    def num_fwd_outputs(self) -> int:
        return self.plan.num_values if self.packing is None else sum(map(width, self.packing.values))

    @property
    def num_primals(self) -> int:
        """Placeholders before the tangents."""
        return self.plan.num_inputs if self.packing is None else sum(map(width, self.packing.inputs))


def trace_program(program: Program, inputs: Sequence[Any], *, decompositions: Mapping[OpOverload, Callable] | None = None,
                  gradients: bool | None = None, turns_on: bool = False, spends: bool = False, shown: bool = False) -> Joint:
    """Traces `program(*inputs) -> flat sequence`.  Gradients are traced where an input requires them and grad mode is on, or the program
    turns it on.  `spends`: it takes gradients itself, after which those of some results cannot be taken again."""
    at_start = torch.is_grad_enabled() if gradients is None else gradients
    examples = [v for v in inputs if isinstance(v, torch.Tensor)]
    recording = at_start or turns_on
    wanted = recording and any(t.requires_grad for t in examples)
    recording = recording and (wanted or spends)
    world = TraceWorld(_env_of(inputs), decompositions)
    leaves = [_add_input(world, value, f"primals_{i}") for i, value in enumerate(inputs)]
    made = [isinstance(v, torch.Tensor) and v.requires_grad and not v.is_leaf for v in inputs]      # asked of a view, its trace may be asked too
    with tracing(world), torch.set_grad_enabled(recording):
        with timed("trace_forward"):
            leaves = [_as_taken(leaf, value) for leaf, value in zip(leaves, inputs)]
            values = [_as_made(world, leaf) if is_made and torch.is_grad_enabled() else leaf for leaf, is_made in zip(leaves, made)]
            with torch.set_grad_enabled(recording and at_start):
                outcome = Outcome(world, program, values, shown)
        if spends:
            put_back_flags(leaves, inputs)
            _mark_spent(outcome, wanted)
        tangents: list[Tangent] = []
        grads: list[Any] = []
        if wanted and any(v.differentiable for v in outcome.values):
            with timed("trace_backward"):
                try:
                    tangents, grads = _differentiate(world, outcome, leaves)
                except UNTRACEABLE as error:
                    raise Undifferentiable(str(error)) from error
                except RuntimeError as error:       # eager raises it too, but when the gradient is asked for, and for that output alone
                    if isinstance(error, FiresteelError):
                        raise
                    raise Undifferentiable(str(error)) from error
    return _finish(world, outcome, tangents, grads, leaves)


def _add_input(world: TraceWorld, value: Any, name: str) -> Any:
    """A placeholder, or one for each part of a wrapper."""
    pack = pack_of(value)
    if pack is None:
        return world.add_input(value, name)
    leaf = pack.build(iter([world.add_input(part, f"{name}_{k}") for k, part in enumerate(parts_of(value))]))
    return leaf.requires_grad_(value.requires_grad)


def _env_of(inputs: Sequence[Any]) -> Any:
    world = find_world([part for v in inputs if isinstance(v, torch.Tensor) for part in parts_of(v)])
    if world is not None:
        return world.env
    return next((v.node.env for v in inputs if isinstance(v, _SYMBOLIC)), None)


def _as_taken(leaf: Any, example: Any) -> Any:
    """The input as a view without a history, where it is one for the caller: such a leaf refuses in-place writes with another sentence."""
    if type(leaf) is not AbstractTensor or not is_bare_view(example):
        return leaf
    taken: Any = bare_view(leaf.requires_grad_(False), example)
    taken.record = leaf.record
    return taken


def _as_made(world: TraceWorld, leaf: Any) -> Any:
    """The input as the program sees it: what is a result of an operator for the caller must not be a leaf here either, since only
    leaves refuse in-place writes.  The copy that makes it one is not recorded."""
    if type(leaf) is AbstractTensor:
        result = ResultOfOperator.apply(leaf, lambda: world.make(leaf.spec))
        result.record = leaf.record
        return result
    copy = leaf.clone()
    for made, part in zip(parts_of(copy), parts_of(leaf)):
        node, made.record = made.record.node, part.record
        world.graph.erase_node(node)
    return copy


def put_back_flags(leaves: Sequence[Any], inputs: Sequence[Any]) -> None:
    """A program may set requires_grad of its inputs; the caller's are as they came, when it is called."""
    for leaf, given in zip(leaves, inputs):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad != given.requires_grad:
            leaf.requires_grad_(given.requires_grad)


def _mark_spent(outcome: Outcome, wanted: bool) -> None:
    """Tries every result on its own.  What the tries record is read by nobody.  `wanted`: do inputs require gradients?  Where not, what still
    has a history got it from leaves that the program made."""
    for k, value in enumerate(outcome.values):
        if value.differentiable:
            try:
                engine.run_backward((value.tensor,), (torch.ones_like(value.tensor),), True, False, (), True, accumulate_grad=True)
            except RuntimeError as error:
                if not is_spent(error):
                    raise
                outcome.plan.spent[k] = f"{error}"
            if not wanted:
                outcome.plan.spent.setdefault(k, "")
            if k in outcome.plan.spent:
                value.tensor = None


def _differentiate(world: TraceWorld, outcome: Outcome, leaves: list[Any]) -> tuple[list[Tangent], list[Any]]:
    """Makes the tangents and records torch's own backward."""
    places = [k for k, value in enumerate(outcome.values) if value.differentiable]
    first_call = next(node for node in world.graph.nodes if node.op != "placeholder")
    tangents, arriving = [], []
    with world.graph.inserting_before(first_call):
        for number, k in enumerate(places):
            tangent, made = _add_tangent(world, outcome.values[k].tensor, k, f"tangents_{number}")
            tangents.append(tangent)
            arriving.append(made)
    wanted = [leaf if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None for leaf in leaves]
    draws, last = world.draws, next(iter(reversed(world.graph.nodes)))
    general = world.env.in_general() if world.env is not None else nullcontext()
    with general, torch._C._DisableAutocast():       # a backward runs outside of the forward's autocast
        if outcome.made_leaves:     # histories that lead to no input: where they raise an error, eager shall
            engine.run_backward(tuple(outcome.values[k].tensor for k in places), tuple(arriving), True, False, (), True, accumulate_grad=True)
        found = iter(engine_gradients([outcome.values[k].tensor for k in places], [leaf for leaf in wanted if leaf is not None], arriving))
    if world.draws > draws:
        _mark_late(last)
    return tangents, [None if leaf is None else next(found) for leaf in wanted]


def _mark_late(last: Node) -> None:
    """Marks what follows: random numbers that a backward draws, it draws when it runs, even where they depend on no gradient."""
    while (last := last.next).op != "root":
        last.meta["late"] = True


def _add_tangent(world: TraceWorld, output: Any, value: int, name: str) -> tuple[Tangent, Any]:
    """What is expected for one output, and its placeholder: for a wrapper a wrapper of the same kind."""
    pack = pack_of(output)
    if pack is None:
        spec, strides = tangent_spec(output.spec)
        return Tangent(value, strides), world.add_input(world.make(spec), name)
    specs = [tangent_spec(part.spec) for part in parts_of(output)]
    parts = [world.add_input(world.make(spec), f"{name}_{k}") for k, (spec, _) in enumerate(specs)]
    return Tangent(value, None, pack, tuple(strides for _, strides in specs)), replace(pack, strides=None).build(iter(parts))


def engine_gradients(outputs: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any], create_graph: bool = False) -> Sequence[Any]:
    """torch.autograd.grad with allow_unused, straight from the engine: the public function first imports a symbolic algebra
    package (2 s) in order to compare the shapes of outputs and tangents, which agree here."""
    if not inputs:
        return ()
    return engine.run_backward(tuple(outputs), tuple(tangents), create_graph, create_graph, tuple(inputs), True, accumulate_grad=False)


def tangent_spec(output: Spec) -> tuple[Spec, tuple | Dense | None]:
    """The gradient of an output is expected with the output's strides, if these cover memory without holes, else contiguous.
    Second: what the runtime makes of those that arrive; where strides hold symbols, an order of dimensions."""
    contiguous = contiguous_strides(output.shape)
    if output.strides == contiguous:
        return output._replace(offset=0), contiguous if static(contiguous) else None
    if static(output.strides):
        strides = output.strides if is_dense(output) else contiguous
        return output._replace(strides=strides, offset=0), strides if static(strides) else None
    order = dense_order(output)
    if order is None:
        return output._replace(strides=contiguous, offset=0), contiguous if static(contiguous) else None
    order.reverse()
    return output._replace(offset=0), Dense(tuple(order), tuple(order.index(d) for d in range(len(order))))


def _finish(world: TraceWorld, outcome: Outcome, tangents: list[Tangent], grads: list[Any], leaves: list[Any]) -> Joint:
    nodes = [node for value in outcome.values for node in value.nodes]
    nodes += [None if part is None else world.to_node(part) for g in grads for part in parts_of(g)]
    output = world.graph.output(tuple(nodes))
    output.meta["val"] = tuple(n.meta["val"] if isinstance(n, Node) else n for n in nodes)
    packing = Packing.of(leaves, [value.made for value in outcome.values], grads)
    placeholders = [node for node in world.graph.nodes if node.op == "placeholder"]
    for write in outcome.plan.writes:
        for place in places_of(packing.inputs if packing is not None else None, write.input):
            placeholders[place].meta["mutated"] = True
    quiet = [k for k, v in enumerate(outcome.values) if v.quiet and k in outcome.plan.recorded_values()]
    world.forget_history()
    outcome.plan.prepare()
    return Joint(make_module(world.graph, world.constants), outcome.plan, tangents, [g is not None for g in grads] or [False] * len(leaves),
                 quiet, [outcome.values[t.value].origin for t in tangents], [node.meta["val"] for node in placeholders],
                 packing, outcome.refusal)


# ---------------------------------------------------------------- gradients as a program

def gradient_program(program: Program, joint: Joint, wanted: Sequence[int], present: Sequence[int]) -> Program:
    """The program (inputs, tangents) -> gradients of the inputs `wanted`, itself differentiable; it runs on abstract and on real
    tensors.  `present` says which of the tangents, in the order of Joint.tangents, arrive; torch's create_graph does the rest."""
    count, written = joint.plan.num_inputs, {w.input for w in joint.plan.writes}
    origins = [joint.origins[k] for k in present]

    def gradients(*args: Any) -> list[Any]:
        inputs, tangents = args[:count], args[count:]
        with torch.enable_grad():
            passed = [_unwritten(t) if i in written else t for i, t in enumerate(inputs)]
            outputs = list(program(*passed))
            starts = [origin.find(passed, outputs) for origin in origins]
            return list(engine_gradients(starts, [inputs[i] for i in wanted], tangents, create_graph=True))
    return gradients


def _unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that the program may overwrite: the caller's tensor was written by the first forward already."""
    if is_wrapper(tensor):
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
