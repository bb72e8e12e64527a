"""The runtime: what a compiled graph is when it is called.

`inference(...)` runs a forward graph and carries out the alias plan.  `training(...)` does so through a
`torch.autograd.Function` made for the graph, which saves what the partition chose and runs the backward graph, compiled
at its first use.  What always holds:
  - saved tensors go through `save_for_backward`: version checks, saved-tensor hooks and the error of a second backward are torch's
  - a gradient of an input that depends on no tangent that arrived is None, as in eager
  - tangents reach the graph with the strides it was traced for
  - under create_graph=True the gradients come from `second_order`, a function of (inputs, tangents) that is
    differentiable itself, so gradients of any order work

    run = training(TrainingGraph(...))
    outputs = run(*inputs)
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad

from firesteel.artifacts import counters
from firesteel.autograd.alias import Plan, overlaps, write_unrecorded
from firesteel.graph.wrappers import Pack, Packing, is_wrapper, pack_all, pack_of, parts_of, width

Compiled = Callable[..., Sequence[Any]]
has_storage = torch._C._has_storage
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph      # does the caller want a second backward?


@dataclass(frozen=True)
class Dense:
    """Strides over symbolic sizes: dense in this order of dimensions."""
    order: tuple[int, ...]          # slowest first
    back: tuple[int, ...]           # the inverse of the order


@dataclass(frozen=True)
class Tangent:
    """What the backward graph expects for one forward output."""
    value: int                      # which forward output
    strides: tuple | Dense | None   # as traced; None where they hold symbols and are contiguous
    pack: Pack | None = None        # where the output is a tensor subclass
    parts: tuple = ()               # the strides of its parts


@dataclass
class TrainingGraph:
    """All that a call needs.  `backward` is filled at the first backward."""
    plan: Plan
    forward: Compiled
    tangents: list[Tangent]
    num_saved_tensors: int
    num_saved_sizes: int
    non_differentiable: list[int]           # forward outputs that are floating but do not require grad
    gradients: list[int | None]             # input -> place among the backward's results
    reaches: list[int]                      # place among the backward's results -> bit set of tangents it depends on
    compile_backward: Callable[[], Compiled] | None      # dropped, with the graph it holds, once used
    second_order: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
    unstored: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]      # the same for tangents without memory (batched ones)
    copied: list[int]                       # inputs that the graph overwrites and whose old value second_order reads
    draws_random: bool
    eager: Callable[..., Sequence[Any]]     # the captured program, for rule 9 of alias.py
    backward: Compiled | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ready_backward(self) -> Compiled:
        with self.lock:
            compiled = self.backward
            if compiled is None:
                assert self.compile_backward is not None
                compiled = self.backward = self.compile_backward()
                self.compile_backward = None
        return compiled


def plain_call(compiled: Compiled) -> Compiled:
    """A graph compiler may return a function that takes all inputs in one list (marked `_boxed_call`).  Where automatic casting was on
    when the program was traced, it is when this is called; the casts are in the graph."""
    call = (lambda *args: compiled(list(args))) if getattr(compiled, "_boxed_call", False) else compiled
    return without_casting(call) if casts() else call


def boxed_call(compiled: Compiled) -> Callable[[list], Sequence[Any]]:
    """The compiled graph as a function of one list, which it may empty in order to free what it has used.  A backward may be started
    inside of a region with automatic casting."""
    call = compiled if getattr(compiled, "_boxed_call", False) else lambda args: compiled(*args)
    quiet = without_casting(call)
    return lambda args: quiet(args) if casts() else call(args)


casts = torch._C._is_any_autocast_enabled


def without_casting(fn: Callable) -> Callable:
    def run(*args):
        with torch._C._DisableAutocast():
            return fn(*args)
    return run


peek_transform = torch._C._functorch.peek_interpreter_stack


def is_transformed() -> bool:
    """Is a function transform (vmap, grad, forward-mode) at work?  Then tensors may be wrapped: the program itself is run."""
    return peek_transform() is not None or forward_ad._current_level >= 0


def guarded(plan: Plan, run: Callable, eager: Callable) -> Callable:
    """Rule 9 of alias.py, for graphs that write to inputs."""
    mutated = [w.input for w in plan.writes]
    if not mutated:
        return run

    def call(*inputs):
        if overlaps(inputs, mutated):
            counters["aot"]["overlapping_inputs"] += 1
            return tuple(eager(*inputs))
        return run(*inputs)
    return call


def inference(plan: Plan, forward: Compiled, eager: Callable) -> Callable:
    """The callable for a graph without gradients.  Inputs may require grad all the same (the program detaches them, say), so
    the graph runs with recording off; views of inputs are made again with the caller's mode."""
    forward, assemble, writes, finish = plain_call(forward), plan.assemble, plan.writes, plan.finish()
    recording, record = torch.is_grad_enabled, torch._C._set_grad_enabled

    def run(*inputs):
        if peek_transform() is not None or forward_ad._current_level >= 0:     # is_transformed(), without the call
            return tuple(eager(*inputs))
        before = recording()
        if before:
            record(False)
        try:
            values = forward(*inputs)
            if writes:
                write_unrecorded(writes, inputs, values)
            if finish is not None:
                values = finish(values)
        finally:
            if before:
                record(True)
        return assemble(inputs, values)
    return guarded(plan, run, eager)


def training(graph: TrainingGraph) -> Callable:
    """The callable for a graph with gradients."""
    plan = graph.plan
    assemble, function = plan.assemble, make_function(graph)
    base: Any = super(torch.autograd.Function, function)
    apply, eager = base.apply, graph.eager      # Function.apply first asks what `run` asks, 1.5 us slower

    def run(*inputs):
        if peek_transform() is not None or forward_ad._current_level >= 0:
            return tuple(eager(*inputs))
        return assemble(inputs, apply(*inputs))
    return guarded(plan, run, graph.eager)


def make_function(graph: TrainingGraph) -> type[torch.autograd.Function]:
    """The autograd function of one graph.  Its forward returns a value for each forward output, None for those that only a
    write without recording reads."""
    forward, writes = plain_call(graph.forward), [w for w in graph.plan.writes if w.how != "grad"]
    hidden, finish = [w.value for w in writes], graph.plan.finish()
    count, tensors_end = graph.plan.num_values, graph.plan.num_values + graph.num_saved_tensors
    sizes, quiet, copied, draws_random = graph.num_saved_sizes, graph.non_differentiable, graph.copied, graph.draws_random

    class CompiledFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            if draws_random:
                ctx.random_state = random_state(inputs)
            ctx.inputs = inputs if not copied else with_copies(inputs, copied)
            results = forward(*inputs)
            values = list(results[:count])
            if writes:
                write_unrecorded(writes, inputs, values)
                for k in hidden:
                    values[k] = None
            if finish is not None:
                values = finish(values)
            ctx.save_for_backward(*results[count:tensors_end])
            if sizes:
                ctx.sizes = results[tensors_end:]
            if quiet:
                ctx.mark_non_differentiable(*[values[k] for k in quiet])
            ctx.set_materialize_grads(False)
            return tuple(values)

        @staticmethod
        def backward(ctx, *tangents):
            if torch.is_grad_enabled():
                return second_order_gradients(graph, ctx, tangents)
            return first_order_gradients(graph, ctx, tangents)

    return CompiledFunction


def with_copies(inputs: Sequence[Any], copied: Sequence[int]) -> tuple:
    """The inputs, those that will be overwritten as copies which have their history."""
    with torch.enable_grad():
        return tuple([t.clone() if i in copied else t for i, t in enumerate(inputs)])


def first_order_gradients(graph: TrainingGraph, ctx: Any, tangents: Sequence[torch.Tensor | None]) -> tuple:
    """Runs the backward graph on what was saved; what is freed by torch afterwards is let go before."""
    args = list(ctx.saved_tensors)
    arrived, fitted = fit_tangents(graph, ctx, tangents)
    if fitted is None:
        return second_order_gradients(graph, ctx, tangents, graph.unstored)
    if not keeps_graph():
        ctx.inputs = None
        ctx.maybe_clear_saved_tensors()
    if not arrived:
        return (None,) * len(graph.gradients)
    if graph.num_saved_sizes:
        args += ctx.sizes
    args += fitted
    everything = arrived == (1 << len(graph.tangents)) - 1
    del fitted
    results = (graph.backward or graph.ready_backward())(args)
    if everything:
        return tuple([None if k is None else results[k] for k in graph.gradients])
    return tuple([None if k is None or not graph.reaches[k] & arrived else results[k] for k in graph.gradients])


def fit_tangents(graph: TrainingGraph, ctx: Any, tangents: Sequence[torch.Tensor | None]) -> tuple[int, list[torch.Tensor] | None]:
    """(bit set of those that arrived, all of them with the strides of the trace); None where one has no memory of its own, or is another
    kind of tensor than its output."""
    arrived, fitted = 0, []
    for place, expected in enumerate(graph.tangents):
        tangent = tangents[expected.value]
        if expected.pack is not None:
            if not expected.pack.like(pack_of(tangent)):
                return 0, None
            arrived |= 1 << place
            fitted += [fit(part, strides) for part, strides in zip(parts_of(tangent), expected.parts)]
            continue
        if tangent is None:
            about = ctx._input_metadata[expected.value]
            tangent = torch.zeros(about.shape, dtype=about.dtype, device=about.device)
        else:
            if not has_storage(tangent) or is_wrapper(tangent):
                return 0, None
            arrived |= 1 << place
        fitted.append(fit(tangent, expected.strides))
    return arrived, fitted


def fit(tangent: torch.Tensor, strides: tuple | Dense | None) -> torch.Tensor:
    if tangent.is_conj() or tangent.is_neg():
        tangent = tangent.resolve_conj().resolve_neg()
    if strides is None:
        return tangent.contiguous()
    if isinstance(strides, Dense):
        return tangent.permute(strides.order).contiguous().permute(strides.back)
    if tangent.stride() == strides:
        return tangent
    return torch.empty_strided(tangent.shape, strides, dtype=tangent.dtype, device=tangent.device).copy_(tangent)


def packed_forward(forward: Compiled, packing: Packing) -> Compiled:
    """A graph over parts as a function of the program's tensors; what is saved stays as the graph gives it."""
    count = sum(map(width, packing.values))

    def run(*inputs):
        results = forward(*[part for value in inputs for part in parts_of(value)])
        return [*pack_all(packing.values, results[:count]), *results[count:]]
    return run


def packed_backward(backward: Callable[[list], Sequence[Any]], packs: list[Pack | None]) -> Callable[[list], Sequence[Any]]:
    return lambda args: pack_all(packs, backward(args))


def second_order_gradients(graph: TrainingGraph, ctx: Any, tangents: Sequence[torch.Tensor | None], gradients: Callable | None = None) -> tuple:
    """Gradients that can be differentiated again.  Unpacking the saved tensors makes torch complain where it should:
    after they were freed, or after one was overwritten."""
    ctx.saved_tensors  # noqa: B018
    wanted = [tangents[t.value] for t in graph.tangents]
    if gradients is None:
        gradients = graph.second_order if all(t is None or has_storage(t) for t in wanted) else graph.unstored
    if not graph.draws_random:
        return tuple(gradients(ctx.inputs, wanted))
    with drawing_again(ctx.random_state):
        return tuple(gradients(ctx.inputs, wanted))


RandomState = list[tuple[torch.Generator, torch.Tensor]]


def random_state(inputs: Sequence[Any]) -> RandomState:
    """The states of the generators that a graph on these inputs may draw from: the devices' own, and those among the inputs."""
    devices = sorted({t.device.index for t in inputs if isinstance(t, torch.Tensor) and t.device.type == "cuda"})
    given = [value for value in inputs if isinstance(value, torch.Generator)]
    return states_of([torch.default_generator, *(torch.cuda.default_generators[d] for d in devices), *given])


def states_of(generators: Sequence[torch.Generator]) -> RandomState:
    return [(generator, generator.get_state()) for generator in generators]


@contextlib.contextmanager
def drawing_again(states: RandomState) -> Iterator[None]:
    """Inside, the generators draw what they drew when `states` was taken; afterwards they go on where they were."""
    now = states_of([generator for generator, _ in states])
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in now:
            generator.set_state(state)
