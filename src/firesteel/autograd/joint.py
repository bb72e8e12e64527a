"""From a program and example inputs to one graph that computes its outputs and gradients.

`trace_program` runs the program on abstract tensors with torch's C++ autograd at work, looks at what came out (alias.py says what
matters), and, where something differentiable came out, asks `torch.autograd.grad` for gradients while the recorder still
listens.  The result is a `Joint`: an inference graph (no tangents) or a joint graph, and the AliasPlan around it.

What always holds
  - placeholders are primals_0.. (one an input, in order) and tangents_0..; results are the forward's values, then one gradient an input
  - the forward's values are: new contents of written inputs, then fresh outputs, hidden bases of views, and sizes that views need
  - no value is a placeholder, and no two are the same node

    joint = trace_program(lambda x: x.sin(), [torch.randn(3, requires_grad=True)])
    joint.gm.code        # primals_0, tangents_0 -> sin(primals_0), tangents_0 * cos(primals_0)
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from firesteel.artifacts import timed
from firesteel.autograd.alias import Spending
from firesteel.autograd.arrived import engine_reach, spread
from firesteel.autograd.backwards import OVERWRITTEN, ResultOfOperator, engine_gradients, history_of, is_spent, try_backward
from firesteel.autograd.edges import Dense, Tangent
from firesteel.autograd.outcome import TraceOutcome
from firesteel.autograd.outline import Joint, Program
from firesteel.errors import DataDependentError, FiresteelError
from firesteel.graph.abstract import bare_view, is_bare_view
from firesteel.graph.build import make_module
from firesteel.graph.rules.base import DataAccess
from firesteel.graph.sizes import static
from firesteel.graph.spec import Spec, contiguous_strides, dense_order, is_dense
from firesteel.graph.tensor import AbstractTensor, find_world
from firesteel.graph.trace import TraceWorld, tracing
from firesteel.graph.wrappers import Packing, is_wrapper, pack_of, parts_of, places_of, rebuilt
from firesteel.layouts import loss_parallel, of_gradient
from firesteel.sym.symint import SYMBOLIC
from firesteel.torchstate import has_history

UNTRACEABLE = (DataAccess, DataDependentError, NotImplementedError)     # what tracing raises for programs that it cannot follow


class Undifferentiable(Exception):
    """The forward could be traced, its backward not; the cause says why."""


def trace_program(program: Program, inputs: Sequence[Any], *, decompositions: Mapping[OpOverload, Callable] | None = None,
                  gradients: bool | None = None, turns_on: bool = False, spends: bool = False, shown: bool = False) -> Joint:
    """Traces `program(*inputs) -> flat sequence`.  Gradients are traced where an input requires them and grad mode is on, or the program
    turns it on.  `spends`: it takes gradients itself, or overwrites what they need, after which those of some results cannot be taken again."""
    at_start = torch.is_grad_enabled() if gradients is None else gradients
    examples = [v for v in inputs if isinstance(v, torch.Tensor)]
    recording = at_start or turns_on
    wanted = recording and any(t.requires_grad for t in examples)
    recording = recording and (wanted or spends)
    world = TraceWorld(_env_of(inputs), decompositions)
    leaves = [_add_input(world, value, f"primals_{i}") for i, value in enumerate(inputs)]
    asked = [isinstance(v, torch.Tensor) and v.requires_grad for v in inputs]     # now: a write may give one a history
    made = [isinstance(v, torch.Tensor) and v.requires_grad and has_history(v) for v in inputs]      # asked of a view, its trace may be asked too
    with tracing(world), torch.set_grad_enabled(recording):
        with timed("trace_forward"):
            leaves = [_as_taken(leaf, value) for leaf, value in zip(leaves, inputs)]
            values = [_as_made(world, leaf) if is_made and torch.is_grad_enabled() else leaf for leaf, is_made in zip(leaves, made)]
            world.taken = [value for value in values if type(value) is AbstractTensor and value.spec.offset != 0]
            with torch.set_grad_enabled(at_start):      # also where nothing requires a gradient: a result that is a view knows its mode
                outcome = TraceOutcome(world, program, values, shown)
        if spends:
            put_back_flags(leaves, inputs)
            _mark_spent(world, outcome, wanted, leaves)
        tangents: list[Tangent] = []
        grads: list[Any] = []
        reaches: list[int] = []
        severed: tuple[int, ...] = ()
        if wanted and any(v.differentiable for v in outcome.values):
            with timed("trace_backward"), loss_parallel(getattr(program, "loss_parallel", False)):
                try:
                    tangents, grads, reaches = _differentiate(world, outcome, [leaf if asks else None for leaf, asks in zip(leaves, asked)])
                except UNTRACEABLE as error:
                    raise Undifferentiable(str(error)) from error
                except RuntimeError as error:       # eager raises it too, but when the gradient is asked for, and for that output alone
                    if isinstance(error, FiresteelError):
                        raise
                    if not spends and is_spent(error) and _saves_as_traced(world) and _spent_for_all(outcome, leaves):
                        return trace_program(program, inputs, decompositions=decompositions, gradients=gradients, turns_on=turns_on,
                                             spends=True, shown=shown)
                    raise Undifferentiable(str(error)) from error
            severed = _severed(outcome, leaves, [asks and grad is None for asks, grad in zip(asked, grads)])
    return replace(_finish(world, outcome, tangents, grads, leaves), severed=severed, reaches=reaches)


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
    return next((v.node.env for v in inputs if isinstance(v, SYMBOLIC)), None)


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
    result = ResultOfOperator.apply(leaf, lambda: _made_again(world, leaf))
    for made, part in zip(parts_of(result), parts_of(leaf)):
        made.record = part.record
    return result


def _made_again(world: TraceWorld, leaf: Any) -> Any:
    return rebuilt(leaf, lambda name, part: _made_again(world, part)) if is_wrapper(leaf) else world.make(leaf.spec)


def put_back_flags(leaves: Sequence[Any], inputs: Sequence[Any]) -> None:
    """A program may set requires_grad of its inputs; the caller's are as they came, when it is called.  One that a write gave a history keeps it."""
    for leaf, given in zip(leaves, inputs):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad != given.requires_grad and not has_history(leaf):
            leaf.requires_grad_(given.requires_grad)


def _mark_spent(world: TraceWorld, outcome: TraceOutcome, wanted: bool, leaves: Sequence[Any]) -> None:
    """Tries every result on its own.  `wanted`: do inputs require gradients?  Where not, what still
    has a history got it from leaves that the program made."""
    for k, value in enumerate(outcome.values):
        if value.differentiable:
            words = _refusal(lambda: _try(world, (value.tensor,), (torch.ones_like(value.tensor),)))       # noqa: B023  # called at once
            if OVERWRITTEN in words and not _saves_as_traced(world):
                raise Undifferentiable(words)
            if words or not wanted:
                outcome.plan.spent[k] = Spending(words, _inputs_of(value.tensor, leaves))
                value.tensor = None


def _try(world: TraceWorld, outputs: Sequence[Any], tangents: Sequence[Any]) -> None:
    """Raises what a backward raises.  What it records goes at the end, collectives and random draws too."""
    last = next(iter(reversed(world.graph.nodes)))
    try_backward(outputs, tangents)
    world.tried += iterate_after(last)


def _refusal(backward: Callable[[], Any]) -> str:
    """What torch says of a history that is used up; "" where it is not."""
    try:
        backward()
    except RuntimeError as error:
        if not is_spent(error):
            raise
        return f"{error}"
    return ""


def _inputs_of(result: Any, leaves: Sequence[Any]) -> tuple[int, ...]:
    """The inputs that a result's history leads to."""
    reached = {id(leaf) for leaf in history_of([result]).leaves}
    return tuple(i for i, leaf in enumerate(leaves) if id(leaf) in reached)


def _saves_as_traced(world: TraceWorld) -> bool:
    """Does eager save what the trace does?  A checkpointed region computes it again, so that a write does not matter."""
    return not any("recompute" in node.meta for node in world.graph.nodes)


def _spent_for_all(outcome: TraceOutcome, leaves: Sequence[Any]) -> bool:
    """Do results whose backward raises have no gradient of any input?  One that has some is left to eager."""
    def ways(result: Any) -> set[bool]:
        tangent = torch.ones_like(result)
        return {bool(_refusal(lambda: engine_gradients((result,), (tangent,), (leaves[i],), True, False))) for i in _inputs_of(result, leaves)}     # noqa: B023
    return all(len(ways(value.tensor)) < 2 for value in outcome.values if value.differentiable)


def _differentiate(world: TraceWorld, outcome: TraceOutcome, leaves: list[Any]) -> tuple[list[Tangent], list[Any], list[int]]:
    """Makes the tangents and records torch's own backward: (tangents, gradients, from which tangents each comes).  `leaves`: the inputs that have
    a gradient, None for others."""
    places = [k for k, value in enumerate(outcome.values) if value.differentiable]
    first_call = next(node for node in world.graph.nodes if node.op != "placeholder")
    tangents, arriving = [], []
    with world.graph.inserting_before(first_call):
        for number, k in enumerate(places):
            tangent, made = _add_tangent(world, outcome.values[k].tensor, k, f"tangents_{number}")
            tangents.append(tangent)
            arriving.append(made)
    wanted = [leaf if leaf is not None and leaf.requires_grad else None for leaf in leaves]
    general = world.env.in_general() if world.env is not None else nullcontext()
    with general, torch._C._DisableAutocast():       # a backward runs outside of the forward's autocast
        if outcome.made_leaves:     # histories that lead to no input: where they raise an error, eager shall
            _try(world, [outcome.values[k].tensor for k in places], arriving)
        draws, last = world.draws, next(iter(reversed(world.graph.nodes)))
        backward = Backward(world, [outcome.values[k].tensor for k in places], [leaf for leaf in wanted if leaf is not None], arriving)
        found, reaches = iter(backward.gradients), iter(backward.reaches(last))
    if world.draws > draws:
        _mark_late(last)
    return tangents, [None if leaf is None else next(found) for leaf in wanted], [0 if leaf is None else next(reaches) for leaf in wanted]


class Backward:
    """One recorded run of the engine."""

    def __init__(self, world: TraceWorld, outputs: Sequence[Any], leaves: Sequence[Any], tangents: Sequence[Any]):
        self.world, self.outputs, self.leaves, self.tangents = world, tuple(outputs), tuple(leaves), tuple(tangents)
        self.gradients = self._run(self.outputs, self.tangents, len(outputs) > 1)

    def _run(self, outputs: tuple, tangents: tuple, keep_graph: bool) -> Sequence[Any]:
        return engine_gradients(outputs, tangents, self.leaves, keep_graph, False)      # hooks that the program registered are recorded

    def reaches(self, last: Node) -> list[int]:
        """For each leaf the bit set of tangents from which its gradient comes.  `last`: the node before the backward's."""
        if len(self.outputs) == 1:
            return [1] * len(self.leaves)
        nodes = [[self.world.to_node(part) for part in parts_of(gradient)] if gradient is not None else [] for gradient in self.gradients]
        bits = {self.world.to_node(part): 1 << k for k, tangent in enumerate(self.tangents) for part in parts_of(tangent)}
        spread(iterate_after(last), bits)
        known = [functools.reduce(operator.or_, (bits.get(node, 0) for node in found), 0) for found in nodes]
        return engine_reach(self.outputs, self.leaves, known, self._alone)

    def _alone(self, k: int) -> Sequence[Any]:
        """The gradients of one output; what is recorded is erased."""
        last = next(iter(reversed(self.world.graph.nodes)))
        found = self._run(self.outputs[k:k + 1], self.tangents[k:k + 1], True)
        for node in reversed(list(iterate_after(last))):
            self.world.graph.erase_node(node)
        return found


def iterate_after(node: Node) -> Iterator[Node]:
    while (node := node.next).op != "root":
        yield node


def _severed(outcome: TraceOutcome, leaves: Sequence[Any], without: Sequence[bool]) -> tuple[int, ...]:
    """Of the inputs that get no gradient, those that no history leads to: the engine must not run the nodes behind them."""
    written = {write.input for write in outcome.plan.writes}
    found = [i for i, yes in enumerate(without) if yes and i not in written]
    if not found:
        return ()
    reached = {id(leaf) for leaf in history_of([value.tensor for value in outcome.values if value.differentiable]).leaves}
    return tuple(i for i in found if id(leaves[i]) not in reached)


def _mark_late(last: Node) -> None:
    """Marks what follows: random numbers that a backward draws, it draws when it runs, even where they depend on no gradient."""
    for node in iterate_after(last):
        node.meta["late"] = True


def _add_tangent(world: TraceWorld, output: Any, value: int, name: str) -> tuple[Tangent, Any]:
    """What is expected for one output, and its placeholder: for a wrapper a wrapper of the same kind."""
    pack = pack_of(output)
    if pack is None:
        spec, strides = tangent_spec(output.spec)
        return Tangent(value, strides), world.add_input(world.make(spec), name)
    specs = [tangent_spec(part.spec) for part in parts_of(output)]
    parts = [world.add_input(world.make(spec), f"{name}_{k}") for k, (spec, _) in enumerate(specs)]
    pack = replace(pack, strides=None, context=of_gradient(pack.context))
    made = pack.build(iter(parts)).requires_grad_(False)        # some note in their context whether they require a gradient
    return Tangent(value, None, pack_of(made), tuple(strides for _, strides in specs)), made


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


def _finish(world: TraceWorld, outcome: TraceOutcome, tangents: list[Tangent], grads: list[Any], leaves: list[Any]) -> Joint:
    nodes = [node for value in outcome.values for node in value.nodes]
    nodes += [None if part is None else world.to_node(part) for g in grads for part in parts_of(g)]
    output = world.graph.output(tuple(nodes))
    output.meta["val"] = tuple(n.meta["val"] if isinstance(n, Node) else n for n in nodes)
    for node in reversed(world.tried):
        if not node.users:
            world.graph.erase_node(node)
    packing = Packing.of(leaves, [value.made for value in outcome.values], grads)
    placeholders = [node for node in world.graph.nodes if node.op == "placeholder"]
    for write in outcome.plan.writes:
        for place in places_of(packing.inputs if packing is not None else None, write.input):
            placeholders[place].meta["mutated"] = True
    quiet = [k for k, v in enumerate(outcome.values) if v.quiet and k in outcome.plan.recorded_values()]
    world.taken = ()
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

    def run(*args: Any) -> list[Any]:
        inputs, tangents = args[:count], args[count:]
        with torch.enable_grad():
            passed = [_unwritten(t) if i in written else t for i, t in enumerate(inputs)]
            outputs = list(program(*passed))
            starts = [origin.find(passed, outputs) for origin in origins]
            with loss_parallel(getattr(program, "loss_parallel", False)):
                return list(engine_gradients(starts, tangents, [inputs[i] for i in wanted], True, True))
    return run


def _unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that the program may overwrite: the caller's tensor was written by the first forward already."""
    if is_wrapper(tensor):
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
