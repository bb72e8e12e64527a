"""The runtime: what a compiled graph is when it is called.

`inference(...)` runs a forward graph and carries out the alias plan.  `training(...)` does so through a
`torch.autograd.Function` made for the graph, which saves what the partition chose and runs the backward graph, compiled
at its first use.  What always holds:
  - saved tensors go through `save_for_backward`: version checks, saved-tensor hooks and the error of a second backward are torch's
  - a gradient of an input that depends on no tangent that arrived is None, as in eager; where some are missing, a smaller backward
    runs (arrived.py), which reads no saved tensor that eager's engine would not
  - tangents reach the graph with the strides it was traced for
  - under create_graph=True the gradients come from `second_order`, a function of (inputs, tangents) that is
    differentiable itself, so gradients of any order work

    run = training(TrainingGraph(...))
    outputs = run(*inputs)
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch.autograd import forward_ad, profiler
from torch.fx import GraphModule

from firesteel import stages, transaction
from firesteel.artifacts import counters
from firesteel.autograd.alias import AliasPlan, overlap_check, unrecorded_writer
from firesteel.autograd.edges import (
    Tangent,
    casts,
    detaching,
    fit,
    in_all_places,
    is_transformed,
    keeps_graph,
    peek_transform,
    without_casting,
)
from firesteel.autograd.groups import GradientGroup, groups_of, in_groups, spare
from firesteel.graph.wrappers import Pack, Packing, as_plain, is_wrapper, pack_all, pack_of, parts_of, width
from firesteel.records import dataclass
from firesteel.targets import on_gpu
from firesteel.torchstate import has_saving_hooks
from firesteel.tracebacks import without_ours

Compiled = Callable[..., Sequence[Any]]


@dataclass
class TrainingGraph:
    """All that a call needs.  `backward` is filled at the first backward."""
    plan: AliasPlan
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
    read_backward: Callable[[], GraphModule]                # what `backward` is compiled from, for who captures it into a larger graph
    compile_part: Callable[[GraphModule, GraphModule], Compiled]    # compiles the backward of some tangents, given the whole
    tangent_numbers: list[int]              # for the last inputs of the backward graph: which tangent they are, or are a part of
    saved_results: dict[int, int]           # place among saved tensors -> version, for those that the forward returns too
    hands_on: bool = False                  # are gradients wanted as they are made?
    severed: tuple[int, ...] = ()           # inputs whose history no result has
    packs: list[Pack | None] | None = None  # how its results are put together, where gradients are tensor subclasses
    backward: Compiled | None = None
    parts: dict[Any, PartialBackward] = field(default_factory=dict)     # see `part`
    numbers: dict[int, int] = field(default_factory=dict)   # of its backward's structure, by groups (groups.py)
    lock: transaction.Lock = field(default_factory=transaction.Lock)
    name: str = field(default_factory=stages.name)          # of the program's function, for traces

    @functools.cached_property
    def backward_graph(self) -> GraphModule:
        return self.read_backward()

    @functools.cached_property
    def groups(self) -> list[GradientGroup]:
        return groups_of(self)

    def structure(self, group: int = -1) -> int:
        """A number that functions of the same backward share, so that equal models do."""
        if group not in self.numbers:
            self.numbers[group] = _structures.setdefault((group, self._structure()), FIRST_STRUCTURE + len(_structures))
        return self.numbers[group]

    def _structure(self) -> Hashable:
        """Equal for functions whose backwards compute the same."""
        nodes = list(self.backward_graph.graph.nodes)
        if any(node.op == "get_attr" for node in nodes):        # it holds tensors of its own
            return id(self)
        from firesteel.graph.passes import frozen  # what few calls need is loaded for them
        place = {node: number for number, node in enumerate(nodes)}
        given = [str(getattr(node.meta["val"], "spec", type(node.meta["val"]))) for node in nodes if node.op == "placeholder"]
        return (*((node.target, frozen(node.args, place), frozen(node.kwargs, place)) for node in nodes if node.op != "placeholder"),
                *given, f"{self.tangents} {self.gradients} {self.reaches}")

    def part(self, arrived: int, asked: frozenset[int] | None = None) -> PartialBackward | None:
        """The backward of the tangents that arrived, for the inputs that are asked for, or all; None where it is the whole."""
        if asked is None and arrived == (1 << len(self.tangents)) - 1 or self.packs is not None:
            return None
        found = self.parts.get((arrived, asked))
        if found is None:
            found = self.parts[arrived, asked] = PartialBackward(self, arrived, asked)
        return found

    def ready_backward(self) -> Compiled:
        return self.backward or transaction.atomic(self.lock.holding, self._make_backward)

    def _make_backward(self) -> Compiled:
        if self.backward is None:
            assert self.compile_backward is not None
            self.backward = self.compile_backward()
        self.compile_backward = None
        return self.backward


CAN_UNPACK_ONE = hasattr(torch._C._autograd.SavedTensor, "unpack")      # torch 2.11 unpacks all saved tensors or none
FIRST_STRUCTURE = 1 << 40       # beyond the numbers that torch gives to custom functions
_structures: dict[Hashable, int] = {}


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


def guarded(plan: AliasPlan, run: Callable, eager: Callable) -> Callable:
    """Rule 9 of alias.py, for graphs that write to inputs; rule 14, where hooks may have kept what was overwritten."""
    overlaps, spent = overlap_check([w.input for w in plan.writes]), bool(plan.spent)
    if not plan.writes and not spent:
        return run

    def call(*inputs):
        if spent and has_saving_hooks():
            return tuple(eager(*inputs))
        if overlaps(inputs):
            counters["aot"]["overlapping_inputs"] += 1
            return tuple(eager(*inputs))
        return run(*inputs)
    return call


def inference(plan: AliasPlan, forward: Compiled, eager: Callable) -> Callable:
    """The callable for a graph without gradients.  Inputs may require grad all the same (the program detaches them, say), so
    the graph runs with recording off; views of inputs are replayed with the caller's mode."""
    forward, assemble, writes, finish = plain_call(forward), plan.assemble, plan.writes, plan.finish()
    write = unrecorded_writer(writes)
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
                write(inputs, values)
            if finish is not None:
                values = finish(values)
        finally:
            if before:
                record(True)
        return assemble(inputs, values)
    return guarded(plan, run, eager)


def boxed_inference(plan: AliasPlan, forward: Compiled, eager: Callable) -> Callable:
    """The same as a function of one list, which it empties: inputs are freed while the graph runs, but for those that results are made of."""
    forward, assemble, writes, finish, kept = boxed_call(forward), plan.assemble, plan.writes, plan.finish(), plan.kept_inputs()
    overlaps, write = overlap_check([w.input for w in writes]), unrecorded_writer(writes)

    def run(box):
        if is_transformed() or writes and overlaps(box) or plan.spent and has_saving_hooks():
            inputs = list(box)
            box.clear()
            return tuple(eager(*inputs))
        inputs = [value if place in kept else None for place, value in enumerate(box)]
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            values = forward(box)
            if writes:
                write(inputs, values)
            if finish is not None:
                values = finish(values)
        finally:
            torch._C._set_grad_enabled(before)
        return assemble(inputs, values)
    run._boxed_call = True      # type: ignore[attr-defined]
    return run


def training(graph: TrainingGraph) -> Callable:
    """The callable for a graph with gradients."""
    plan = graph.plan
    if transaction.is_beside():
        graph.ready_backward()      # the program shall not wait for it later
    assemble, function = plan.assemble, make_function(graph)
    base: Any = super(torch.autograd.Function, function)
    apply, eager = base.apply, graph.eager      # Function.apply first asks what `run` asks, 1.5 us slower
    if len(graph.groups) > 1:
        apply = in_groups(apply, graph, function)
    elif graph.packs is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        from firesteel.autograd.pieces import handing_on
        apply = handing_on(apply, graph, function, gradients_of)
    if graph.severed:
        apply = detaching(apply, graph.severed)
    if len(plan.recorded_values()) < plan.num_values:
        apply = in_all_places(apply, plan)

    def run(*inputs):
        if peek_transform() is not None or forward_ad._current_level >= 0:
            return tuple(eager(*inputs))
        return assemble(inputs, apply(*inputs))
    return guarded(plan, run, graph.eager)


def of_function(tangents: Sequence[Tangent], plan: AliasPlan) -> list[Tangent]:
    """Tangents of forward outputs as those of the autograd function's outputs."""
    places = {value: place for place, value in enumerate(sorted(plan.recorded_values()))}
    return [replace(tangent, value=places[tangent.value]) for tangent in tangents]


def make_function(graph: TrainingGraph) -> type[torch.autograd.Function]:
    """The autograd function of one graph.  Its forward returns the forward outputs that autograd must see: what only a write without
    recording reads is no part of the engine's graph."""
    forward, writes = plain_call(graph.forward), [w for w in graph.plan.writes if w.how != "grad"]
    write = unrecorded_writer(writes)
    finish, recorded = graph.plan.finish(), sorted(graph.plan.recorded_values())
    count, tensors_end = graph.plan.num_values, graph.plan.num_values + graph.num_saved_tensors
    sizes, quiet, copied, draws_random = graph.num_saved_sizes, graph.non_differentiable, graph.copied, graph.draws_random

    class CompiledFunction(torch.autograd.Function):
        compiled = graph

        @staticmethod
        def _compiled_autograd_key(ctx):
            """What a captured backward of which this is a part depends on: the backward's structure, and the sizes that it saved."""
            return (graph.structure(), *ctx.sizes) if sizes else (graph.structure(),)

        @staticmethod
        def forward(ctx, *inputs):
            if draws_random:
                ctx.random_state = random_state(inputs)
            ctx.inputs = inputs if not copied else with_copies(inputs, copied)
            results = forward(*inputs)
            values = list(results[:count])
            if writes:
                write(inputs, values)
            if finish is not None:
                values = finish(values)
            ctx.save_for_backward(*results[count:tensors_end])
            if not CAN_UNPACK_ONE:
                ctx.versions = [t._version for t in results[count:tensors_end]]
            if sizes:
                ctx.sizes = results[tensors_end:]
            if quiet:
                ctx.mark_non_differentiable(*[values[k] for k in quiet])
            ctx.set_materialize_grads(False)
            return tuple([values[k] for k in recorded] if writes else values)

        @staticmethod
        def backward(ctx, *tangents):
            try:
                return gradients_of(graph, ctx, tangents)
            except BaseException as error:
                without_ours(error)
                raise

    return CompiledFunction


def gradients_of(graph: TrainingGraph, ctx: Any, tangents: Sequence[torch.Tensor | None], take: Callable[[list], Any] | None = None,
                 in_range: bool = False) -> Any:
    """One gradient an input.  `take` gets the inputs of the backward graph instead, where that is what would run (pieces.py)."""
    if profiler._is_profiler_enabled and not in_range:
        with torch._C._profiler._RecordFunctionFast(f"firesteel backward of {graph.name}"):
            return gradients_of(graph, ctx, tangents, take, True)
    return second_order_gradients(graph, ctx, tangents) if torch.is_grad_enabled() else first_order_gradients(graph, ctx, tangents, take)


def with_copies(inputs: Sequence[Any], copied: Sequence[int]) -> tuple:
    """The inputs, those that will be overwritten as copies which have their history."""
    with torch.enable_grad():
        return tuple([t.clone() if i in copied else t for i, t in enumerate(inputs)])


def first_order_gradients(graph: TrainingGraph, ctx: Any, tangents: Sequence[torch.Tensor | None], take: Callable[[list], Any] | None = None) -> Any:
    """Runs the backward graph on what was saved; what is freed by torch afterwards is let go before."""
    arrived, fitted = fit_tangents(graph, ctx, tangents)
    if fitted is None:
        return second_order_gradients(graph, ctx, tangents)
    if not arrived:     # an edge from another compiled function that has no gradient for it: eager's engine would not come here
        return (None,) * len(graph.gradients)
    part, args = unpack_saved(graph, ctx, arrived)
    zeros = part.zeros(ctx.inputs) if part is not None else {}
    if not keeps_graph():
        if part is None or not spare(graph, ctx, arrived, args):
            ctx.inputs = None
        ctx.maybe_clear_saved_tensors()
    if graph.num_saved_sizes:
        args += ctx.sizes
    args += fitted
    del fitted
    if part is not None:
        return part.gradients(args, zeros)
    if take is not None:
        return take(args)
    results = (graph.backward or graph.ready_backward())(args)
    if graph.packs is None:
        return tuple([None if k is None else results[k] for k in graph.gradients])
    return tuple([None if k is None or not graph.reaches[k] & arrived else results[k] for k in graph.gradients])


def unpack_saved(graph: TrainingGraph, ctx: Any, arrived: int) -> tuple[PartialBackward | None, list[Any]]:
    """(the part of the backward to run, None for all of it; the saved tensors).  Where one was overwritten: the part for gradients that the engine
    asks for (`torch.autograd.grad` of one leaf), since eager would not unpack what the others read."""
    part = graph.part(arrived)
    try:
        return part, list(ctx.saved_tensors) if part is None else part.saved(ctx)
    except RuntimeError:
        if (spared := getattr(ctx, "spared", None)) is not None and not arrived & ~spared.tangents:
            return part, spared.unpack(part)
        part = graph.part(arrived, asked_for(ctx)) if ctx.inputs is not None else None      # no inputs: the graph was freed
        if part is None:
            raise
        return part, part.saved(ctx)


def asked_for(ctx: Any) -> frozenset[int]:
    """The inputs whose gradients the running backward needs."""
    places = [i for i, value in enumerate(ctx.inputs) if isinstance(value, torch.Tensor)]
    return frozenset(i for i, (fn, _) in zip(places, ctx.next_functions) if fn is not None and is_asked_for(fn))


def is_asked_for(fn: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(fn)
    except RuntimeError:        # of a leaf whose gradient `torch.autograd.grad` returns
        return True


class PartialBackward:
    """The backward of the tangents that arrived, where not all did, for the inputs `asked`, or all: it needs nothing of what eager's engine would not
    unpack."""

    def __init__(self, graph: TrainingGraph, arrived: int, asked: frozenset[int] | None):
        from firesteel.autograd.arrived import backward_of
        self.graph = graph
        gradients = [k if asked is None or i in asked else None for i, k in enumerate(graph.gradients)]
        self.part = part = backward_of(graph.backward_graph, graph.tangent_numbers, arrived, gradients)
        self.read = [place for place in part.reads if place < graph.num_saved_tensors]
        place_of = {k: place for place, k in enumerate(part.gives)}
        reached = {i: k for i, k in enumerate(gradients) if k is not None and graph.reaches[k] & arrived}
        self.places = [place_of.get(reached[i]) if i in reached else None for i in range(len(graph.gradients))]    # input -> place among results
        self.only_zeros = {i: k for i, k in reached.items() if k not in place_of}       # the engine gets there, on ways along which zeros come
        self.compiled: Compiled | None = None

    def saved(self, ctx: Any) -> list[Any]:
        """The saved tensors; None for those that are not read, where one of them was overwritten."""
        try:
            return list(ctx.saved_tensors)
        except RuntimeError:
            found: list[Any] = [None] * self.graph.num_saved_tensors
            for place in self.read:
                found[place] = self._unpack(ctx, place)
            return found

    def _unpack(self, ctx: Any, place: int) -> torch.Tensor:
        raw, version = ctx._raw_saved_tensors[place], self.graph.saved_results.get(place)
        if version is None and CAN_UNPACK_ONE:
            return raw.unpack()
        if raw.unpack_hook is not None:
            return raw.unpack_hook(raw.data)
        version = ctx.versions[place] if version is None else version
        if raw.data._version != version:        # torch unpacks a result of the function, and torch 2.11 any, only together with all others
            return ctx.saved_tensors[place]
        return raw.data

    def zeros(self, inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
        return {i: torch.zeros_like(inputs[i]) for i in self.only_zeros}

    def gradients(self, args: list[Any], zeros: Mapping[int, torch.Tensor]) -> tuple:
        """`args`: those of the whole backward."""
        read = self.pick(args)
        args.clear()
        results = (self.compiled or self.ready())(read)
        return self.sorted(results, zeros)

    def pick(self, args: Sequence[Any]) -> list[Any]:
        return [args[place] for place in self.part.reads]

    def sorted(self, results: Sequence[Any], zeros: Mapping[int, torch.Tensor]) -> tuple:
        """One gradient an input."""
        return tuple([zeros.get(i) if place is None else results[place] for i, place in enumerate(self.places)])

    def ready(self) -> Compiled:
        return transaction.atomic(self.graph.lock.holding, self._compile)

    def _compile(self) -> Compiled:
        if self.compiled is None:
            self.compiled = self.graph.compile_part(self.part.gm, self.graph.backward_graph)
        return self.compiled


def has_storage(tensor: torch.Tensor) -> bool:
    """Has it memory, or parts that have?  Tensors of zeros alone, and those whose class has a dispatch of its own, say so without having any."""
    if not torch._C._has_storage(tensor) or tensor._is_zerotensor():
        return False
    cls = type(tensor)
    return cls is torch.Tensor or cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or is_wrapper(tensor)


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
        if tangent is not None and is_wrapper(tangent):
            tangent = as_plain(tangent)
        if tangent is None:
            about = getattr(ctx, "looks", ctx._input_metadata)[expected.value]
            tangent = torch.zeros(about.shape, dtype=about.dtype, device=about.device)
        else:
            if not has_storage(tangent) or is_wrapper(tangent):
                return 0, None
            arrived |= 1 << place
        fitted.append(fit(tangent, expected.strides))
    return arrived, fitted


def packed_forward(forward: Compiled, packing: Packing | None) -> Compiled:
    """A graph over parts as a function of the program's tensors; what is saved stays as the graph gives it."""
    if packing is None:
        return forward
    count, call = sum(map(width, packing.values)), plain_call(forward)

    def run(*inputs):
        results = call(*[part for value in inputs for part in parts_of(value)])
        return [*pack_all(packing.values, results[:count]), *results[count:]]
    return run


def second_order_gradients(graph: TrainingGraph, ctx: Any, tangents: Sequence[torch.Tensor | None]) -> tuple:
    """Gradients that can be differentiated again.  Unpacking the saved tensors makes torch complain where it should:
    after they were freed, or after one was overwritten."""
    wanted = [tangents[t.value] for t in graph.tangents]
    arrived = sum(1 << k for k, tangent in enumerate(wanted) if tangent is not None)
    if not arrived:
        return (None,) * len(graph.gradients)
    unpack_saved(graph, ctx, arrived)
    gradients = graph.second_order if all(t is None or has_storage(t) for t in wanted) else graph.unstored
    if not graph.draws_random:
        return tuple(gradients(ctx.inputs, wanted))
    with drawing_again(ctx.random_state):
        return tuple(gradients(ctx.inputs, wanted))


RandomState = list[tuple[torch.Generator, torch.Tensor]]


def random_state(inputs: Sequence[Any]) -> RandomState:
    """The states of the generators that a graph on these inputs may draw from: the devices' own, and those among the inputs."""
    devices = sorted({t.device.index for t in inputs if isinstance(t, torch.Tensor) and on_gpu(t)})
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
