"""`fs.aot`: ahead-of-time autograd, for backends and for users with graph compilers of their own.

`compile_aot` is the path from a captured graph to a callable: trace (joint.py), partition, compile the forward, make the runtime
(function.py).  A graph compiler is `fn(gm, example_inputs) -> callable`; its graph is functional ATen.

    my_backend = fs.aot.backend(fw_compiler=my_compiler)
    f = fs.aot.function(lambda x: x.sin(), fs.aot.nop)
    f(torch.randn(3, requires_grad=True)).sum().backward()
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from firesteel import artifacts, stages
from firesteel.artifacts import counters, timed
from firesteel.autograd import function as runtime
from firesteel.autograd import kept
from firesteel.autograd.alias import overlaps
from firesteel.autograd.backwards import takes_gradients
from firesteel.autograd.exact import mark_exact
from firesteel.autograd.facts import keep_gradients, of_wrappers, reached_by_tangents, read_and_written, saved_results, without_graph
from firesteel.autograd.frozen_call import FrozenCall
from firesteel.autograd.joint import UNTRACEABLE, Undifferentiable, trace_program
from firesteel.autograd.outline import Joint, Outline, Program, ProgramCache, ProgramEntry
from firesteel.autograd.partition import PartitionFn, default_partition, min_cut_partition
from firesteel.autograd.ranks import compare_ranks, rows_of
from firesteel.autograd.recompute import is_size, op_class
from firesteel.autograd.seams import may_stand_alone
from firesteel.autograd.second_order import autocast_state, kind_of
from firesteel.autograd.segments import compile_in_segments, has_seams, results_gone_on_with
from firesteel.autograd.signature import Signature, signature_of
from firesteel.errors import Unsupported, UserError
from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.build import results_of
from firesteel.graph.functional import Unfollowable
from firesteel.graph.functions import SymbolicFunctions
from firesteel.graph.passes import clean
from firesteel.graph.policies import OtherContexts
from firesteel.graph.trace import interpret
from firesteel.graph.tracing_context import GraphCompiler, with_tracing_context
from firesteel.graph.wrappers import Pack, width
from firesteel.layouts import set_loss_parallel
from firesteel.records import dataclass
from firesteel.sym.env import LateQuestion, ShapeEnv

if TYPE_CHECKING:
    from firesteel.graph.frozen import Frozen

__all__ = ["backend", "compile_aot", "default_partition", "export_joint", "function", "min_cut_partition", "module", "module_simplified", "nop"]


def nop(gm: GraphModule, example_inputs: list) -> Callable:
    """The compiler that does nothing: PyTorch runs the graph."""
    return gm.forward


@dataclass(frozen=True)
class Compilers:
    """What `compile_aot` is given; passed on as one thing."""
    forward: GraphCompiler
    backward: GraphCompiler
    inference: GraphCompiler
    partition: PartitionFn
    decompositions: Mapping | None
    keep_mutations: bool
    whole: bool             # the user asked for fullgraph: a backward that cannot be traced is an error
    boxed: bool = False     # the inputs of an inference graph come in one list, which may be emptied
    rewrite: Callable[[GraphModule], Any] | None = None     # of a whole graph, before it is partitioned
    freeze: Callable[[GraphModule, Sequence[int]], Any] | None = None       # takes out of an inference graph what is computed of frozen inputs alone
    hands_on: bool = False  # gradients are wanted as they are made
    cache: ProgramCache | None = None

    @classmethod
    def of(cls, fw_compiler: GraphCompiler, bw_compiler: GraphCompiler | None = None, inference_compiler: GraphCompiler | None = None,
           partition_fn: PartitionFn | None = None, decompositions: Mapping | None = None, keep_inference_input_mutations: bool = False,
           whole: bool = False, rewrite: Callable[[GraphModule], Any] | None = None, cache: ProgramCache | None = None,
           freeze: Callable[[GraphModule, Sequence[int]], Any] | None = None) -> Compilers:
        return cls(fw_compiler, bw_compiler or fw_compiler, inference_compiler or fw_compiler, partition_fn or default_partition,
                   decompositions() if callable(decompositions) else decompositions, keep_inference_input_mutations, whole, rewrite=rewrite,
                   cache=cache, freeze=freeze)


def of_user(forward: GraphCompiler, backward: GraphCompiler | None, inference: GraphCompiler | None) -> tuple[Any, Any, Any]:
    """Compilers that the user wrote find a context of torch's while they run (graph/tracing_context.py)."""
    def own(compiler: GraphCompiler | None) -> GraphCompiler | None:
        return compiler if compiler is None or compiler is nop else with_tracing_context(compiler)
    return own(forward), own(backward), own(inference)


# ---------------------------------------------------------------- the path

def compile_aot(gm: GraphModule, example_inputs: Sequence[Any], fw_compiler: GraphCompiler, bw_compiler: GraphCompiler | None = None,
                inference_compiler: GraphCompiler | None = None, partition_fn: PartitionFn | None = None,
                decompositions: Mapping | None = None, keep_inference_input_mutations: bool = False, hookable_results: bool = False,
                rewrite: Callable[[GraphModule], Any] | None = None, cache: ProgramCache | None = None,
                freeze: Callable[[GraphModule, Sequence[int]], Any] | None = None) -> Callable:
    """A captured graph as a callable(*inputs) -> tuple.  With `hookable_results` the graph is cut behind results that it continues with, so
    that a hook that the caller puts on one sees all of its gradient.  `rewrite` changes each functional graph before it is partitioned.  What
    `cache` has of a graph is not compiled.  `freeze` is asked where inputs of an inference graph are marked frozen."""
    compilers = Compilers.of(fw_compiler, bw_compiler, inference_compiler, partition_fn, decompositions, keep_inference_input_mutations,
                             gm.meta.get("fullgraph", False), rewrite, cache, freeze)
    compilers = dataclasses.replace(compilers, boxed=gm.meta.get("boxed", False) and not has_seams(gm), hands_on=gm.meta.get("hands_on", False))
    cuts = results_gone_on_with(gm) if hookable_results and not takes_gradients(gm) else frozenset()
    if cuts or has_seams(gm):
        return compile_in_segments(gm, lambda part, inputs: compile_segment(gm, part, inputs, compilers), cuts)
    return compile_graph(gm, example_inputs, compilers)


def compile_segment(gm: GraphModule, part: GraphModule, example_inputs: Sequence[Any], compilers: Compilers) -> Callable:
    """A segment of a captured graph."""
    stages.done("graph", part, gm)
    compiled = compile_graph(part, example_inputs, compilers)
    gm.meta.setdefault("part_keys", []).append(part.meta.get("program_key"))
    return compiled


def compile_graph(gm: GraphModule, example_inputs: Sequence[Any], compilers: Compilers) -> Callable:
    """A captured graph without seams.  Where the backward of a user's operator or function cannot be traced, or gives a sparse gradient, that
    call is made for real."""
    program, turns_on, spends = program_of(gm)
    try:
        return compile_program(program, example_inputs, compilers, eager=gm.forward,
                               turns_on=turns_on, spends=spends, raises=not spends and any(map(may_stand_alone, gm.graph.nodes)), graph=gm)
    except Undifferentiable as error:
        counters["aot"]["backwards_by_eager"] += 1
        reason = str(error)
        artifacts.log("aot", lambda: f"{reason}: operators of the user's, and those with sparse gradients, run in eager")
        return compile_in_segments(gm, lambda part, inputs: compile_segment(gm, part, inputs, compilers), seams=may_stand_alone)


def program_of(gm: GraphModule) -> tuple[Program, bool, bool]:
    """A captured graph as a program; whether it turns grad mode on; whether it takes gradients itself."""
    states = [node for node in gm.graph.nodes if "state" in node.meta]
    turns_on = not torch.is_grad_enabled() and any(node.meta["state"][0] == ("grad",) and node.args[-1] is True for node in states)
    program = functools.partial(interpret, gm)
    return putting_back(program, states) if states else program, turns_on, takes_gradients(gm)


def putting_back(program: Program, states: Sequence[Node]) -> Program:
    """The program, after which the states of torch that its nodes set are as before: a graph that ends at a break leaves some set."""
    def run(*inputs: Any) -> Any:
        try:
            return program(*inputs)
        finally:
            for node in states:
                node.target(*node.args[:-1], node.meta["state"][1])     # type: ignore[operator]  # a function that sets a state
    run.loss_parallel = any(node.target is set_loss_parallel for node in states)        # type: ignore[attr-defined]  # its backward needs it
    return run


def compile_program(program: Program, example_inputs: Sequence[Any], compilers: Compilers, eager: Callable, turns_on: bool = False,
                    spends: bool = False, raises: bool = False, graph: GraphModule | None = None) -> Callable:
    """A program over a flat list of inputs as a callable(*inputs) -> tuple.  `eager` is the same program on real tensors.  `turns_on`: it
    is called with grad mode off and turns it on; `spends`: it takes gradients itself; `raises`: a backward that cannot be traced is an
    error, and the caller knows what to do; `graph`: what the program runs, with marks on its inputs."""
    if runtime.is_transformed():
        return Later(program, example_inputs, compilers, eager)
    counters["aot"]["total"] += 1
    if any(isinstance(v, torch.Tensor) and v.layout is not torch.strided for v in example_inputs):
        return run_by_eager("sparse_inputs", "an input is sparse", eager)
    entry = compilers.cache(graph, example_inputs) if compilers.cache is not None and graph is not None else None
    if entry is not None and (outline := entry.outline()) is not None:
        counters["aot"]["ok"] += 1
        mark_histories(graph, outline.joint)
        if graph is not None and "ranks" in graph.meta:
            compare_ranks(outline.ranks, graph.meta["ranks"])
        return kept.in_grad_mode(kept.from_cache(outline, entry, program, eager, late_graphs(compilers)), turns_on, outline.joint)
    try:
        with timed("joint"):
            joint = trace_program(program, example_inputs, decompositions=compilers.decompositions, turns_on=turns_on, spends=spends)
    except Undifferentiable as error:
        if raises and isinstance(error.__cause__, UNTRACEABLE) and not (compilers.whole and getattr(error.__cause__, "is_pointer", False)):
            raise
        if compilers.whole and isinstance(error.__cause__, UNTRACEABLE):
            raise Unsupported(f"The backward cannot be traced: {error}.", hint="Change the backward, or compile without fullgraph=True.") from error
        return run_by_eager("untraceable_backwards", str(error), eager)
    except Unfollowable as error:
        if compilers.whole and isinstance(error, OtherContexts):
            raise Unsupported(f"{error}.", hint="Use create_selective_checkpoint_contexts, or compile without fullgraph=True.") from error
        return run_by_eager(error.counter, str(error), eager)
    if joint.packing is None and graph is not None:
        mark_inputs(joint.gm, graph)
    tidy(joint, compilers.rewrite)
    mark_histories(graph, joint)
    if joint.refusal is not None:
        return run_by_eager(*joint.refusal, eager)
    stages.done("joint", joint, graph)
    if graph is not None and "ranks" in graph.meta:
        joint.gm.meta["ranks"] = rows_of(joint.gm)
        compare_ranks(joint.gm.meta["ranks"], graph.meta["ranks"])
    if entry is not None and (outline := entry.traced(joint)) is not None:
        counters["aot"]["ok"] += 1
        return kept.in_grad_mode(kept.from_cache(outline, entry, program, eager, late_graphs(compilers)), turns_on, joint)
    compiled = runtime.training(training_graph(joint, program, compilers, eager, entry)) if joint.tangents else \
        _compile_inference(joint, compilers, eager, entry)
    counters["aot"]["ok"] += 1
    return kept.in_grad_mode(compiled, turns_on, joint)


def mark_inputs(gm: GraphModule, captured: GraphModule) -> None:
    """Marks inputs of a traced graph as those of the captured one: which the caller may overwrite before the backward runs, which are frozen."""
    for node, given in zip(gm.graph.find_nodes(op="placeholder"), captured.graph.find_nodes(op="placeholder")):
        node.meta.update({mark: True for mark in ("held", "frozen") if given.meta.get(mark)})


def mark_histories(graph: GraphModule | None, joint: Joint) -> None:
    """Marks which inputs of a captured graph are mutated such that they get a grad_fn, and which results have none."""
    if graph is not None:
        plan, tracked = joint.plan, {*(tangent.value for tangent in joint.tangents), *joint.plan.spent}
        graph.meta["given_histories"] = [write.input for write in plan.writes if write.how == "grad"]
        graph.meta["untracked"] = [place for place, result in enumerate(plan.results) if plan.is_made_without(tracked, result)]


def tidy(joint: Joint, rewrite: Callable[[GraphModule], Any] | None) -> None:
    """What is done to each traced graph before it is compiled."""
    with timed("clean"):
        clean(joint.gm)
        if rewrite is not None:
            rewrite(joint.gm)
        mark_exact(joint.gm)


def run_by_eager(counter: str, reason: str, eager: Callable) -> Callable:
    """What cannot be compiled runs as it is; it is counted, and logged."""
    counters["aot"][counter] += 1
    artifacts.log("aot", lambda: f"{reason}: the program runs in eager")
    return eager


class Later:
    """A program met under a function transform, where nothing can be traced: compiled at its first call outside of one."""

    def __init__(self, program: Program, example_inputs: Sequence[Any], compilers: Compilers, eager: Callable):
        self.make = functools.cache(lambda: _compile_late(program, example_inputs, compilers, eager))
        self.eager = eager

    def __call__(self, *inputs: Any) -> tuple:
        return tuple(self.eager(*inputs)) if runtime.is_transformed() else self.make()(*inputs)


def _compile_late(program: Program, example_inputs: Sequence[Any], compilers: Compilers, eager: Callable) -> Callable:
    """After the guards were made: where tracing needs an answer that they do not give, the program runs in eager."""
    try:
        return compile_program(program, example_inputs, compilers, eager)
    except LateQuestion as question:
        _log_late("program", question)
        return eager


def _log_late(part: str, question: LateQuestion) -> None:
    counters["aot"]["late_questions"] += 1
    artifacts.log("aot", lambda: f"{part}: {question}")


def _compile_inference(joint: Joint, compilers: Compilers, eager: Callable, entry: ProgramEntry | None) -> Callable:
    boxed = joint.gm.meta["boxed"] = compilers.boxed and joint.packing is None
    frozen = freeze_inputs(joint, compilers)
    stages.done("forward", joint.gm, joint)
    if compilers.keep_mutations and joint.packing is None:
        write_in_graph(joint)
    elif joint.packing is None:
        joint.gm.meta["into"] = joint.gm.meta["lent"] = joint.plan.written_alone()
    joint.gm.meta["inference"] = True
    with timed("compile_forward"):
        forward = compilers.inference(joint.gm, joint.example_inputs)
    if frozen is not None:
        forward = FrozenCall(forward, frozen.once, frozen.places, frozen.layouts)
    if entry is not None:
        entry.keep(Outline(without_graph(joint), boxed, ranks=joint.gm.meta.get("ranks", {})), forward, None)
    return kept.inference(joint, boxed, forward, eager)


def freeze_inputs(joint: Joint, compilers: Compilers) -> Frozen | None:
    """Takes out of an inference graph what it computes of frozen inputs alone; inputs that the program writes are none."""
    placeholders = joint.gm.graph.find_nodes(op="placeholder")
    written = {write.input for write in joint.plan.writes}
    marked = [place for place, node in enumerate(placeholders) if node.meta.get("frozen") and place not in written]
    if compilers.freeze is None or joint.packing is not None or not marked:
        return None
    with timed("freeze"):
        frozen = compilers.freeze(joint.gm, marked)
    if frozen is None:
        return None
    joint.example_inputs += [node.meta["val"] for node in joint.gm.graph.find_nodes(op="placeholder")[len(placeholders):]]
    counters["frozen"].update(frozen.counts)
    artifacts.log("aot", lambda: f"frozen: {', '.join(f'{count} {what}' for what, count in frozen.counts.items())}")
    return frozen


def write_in_graph(joint: Joint) -> None:
    """Puts the writes to inputs into an inference graph, as copy_ calls at its end, for compilers that can write in place."""
    graph = joint.gm.graph
    values, results = results_of(joint.gm), results_of(joint.gm)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    kept = []
    with graph.inserting_before(graph.output_node()):
        for write in joint.plan.writes:
            if write.how == "no_grad":
                graph.call_function(torch.ops.aten.copy_.default, (placeholders[write.input], values[write.value]))
                results[write.value] = None         # nobody else takes it
            else:
                kept.append(write)
    graph.output_node().args = (tuple(results),)
    joint.plan.writes = kept
    joint.gm.recompile()


def training_graph(joint: Joint, program: Program, compilers: Compilers, eager: Callable, entry: ProgramEntry | None = None) -> runtime.TrainingGraph:
    """The forward compiled, the backward ready to be."""
    count, packing = joint.num_primals, joint.packing
    inputs = joint.example_inputs
    with timed("partition"):
        fw, bw = compilers.partition(joint.gm, [inputs[:count], inputs[count:]], num_fwd_outputs=joint.num_fwd_outputs)
        gradients = keep_gradients(bw)
    bw.meta["boxed"] = True
    stages.done("forward", fw, joint)
    stages.done("backward", bw, joint)
    saved = results_of(fw)[joint.num_fwd_outputs:]
    fw.meta["lent"] = [*range(joint.num_fwd_outputs, len(results_of(fw))), *joint.plan.written_alone()]
    sizes = sum(is_size(node) for node in saved)
    numbers = [k for k, tangent in enumerate(joint.tangents) for _ in range(width(tangent.pack))]
    reaches, packs = reached_by_tangents(bw, numbers, joint, gradients), None
    fw.meta["then"] = bw
    with timed("compile_forward"):
        forward = compilers.forward(fw, inputs[:count])
    fw.meta.pop("then", None)
    if packing is not None:
        gradients, reaches, packs = of_wrappers(packing, gradients, reaches)
    outline = Outline(without_graph(joint), facts={
        "tangents": runtime.of_function(joint.tangents, joint.plan), "num_saved_tensors": len(saved) - sizes, "num_saved_sizes": sizes,
        "non_differentiable": joint.non_differentiable, "gradients": gradients, "reaches": reaches, "tangent_numbers": numbers,
        "saved_results": saved_results(joint, results_of(fw)), "copied": read_and_written(joint),
        "draws_random": any(op_class(node) == "random" for node in fw.graph.nodes if node.op == "call_function"),
        "severed": joint.severed, "packs": packs, "hands_on": compilers.hands_on}, ranks=joint.gm.meta.get("ranks", {}))
    if entry is not None:
        entry.keep(outline, forward, bw)
    late = late_graphs(compilers)
    compile_backward = functools.partial(late.backward, bw, packs, stages.current(), entry)
    return kept.training_graph(outline, forward, program, eager, lambda: bw, compile_backward, late)


def late_graphs(compilers: Compilers) -> kept.LateGraphs:
    return kept.LateGraphs(functools.partial(_compile_backward, compilers), functools.partial(_compile_part, compilers),
                           functools.partial(_compile_gradients, compilers), functools.partial(_compile_gradients, Compilers.of(nop)))


def _compile_backward(compilers: Compilers, bw: GraphModule, packs: list[Pack | None] | None, compilation: stages.Compilation | None,
                      entry: ProgramEntry | None = None) -> Callable:
    with stages.kept_by(compilation):
        compiled = _compile_plain_backward(bw, compilers, entry)
    return kept.put_together(compiled, packs)


def _compile_part(compilers: Compilers, compilation: stages.Compilation | None, part: GraphModule, bw: GraphModule) -> Callable:
    """A part of the backward, for the tangents that arrived."""
    part.meta["boxed"] = True
    with stages.kept_by(compilation):
        stages.done("backward", part, bw)
        return _compile_plain_backward(part, compilers)


def _compile_plain_backward(bw: GraphModule, compilers: Compilers, entry: ProgramEntry | None = None) -> Callable:
    bw.meta["lent"] = range(len(results_of(bw)))
    with timed("compile_backward"):
        inputs = [node.meta["val"] for node in bw.graph.nodes if node.op == "placeholder"]
        try:
            if entry is not None and (found := entry.claim_backward()) is not None:
                return runtime.boxed_call(found)
            compiled = compilers.backward(bw, inputs)
            if entry is not None:
                entry.keep_backward(compiled)
            return runtime.boxed_call(compiled)
        except LateQuestion as question:    # the guards are made: this backward is right for all sizes only as PyTorch runs it
            _log_late("backward", question)
            return runtime.boxed_call(nop(bw, inputs))
        except Exception as error:
            stages.failed("note_graph", error, bw, inputs)
            raise
        finally:
            if entry is not None:
                entry.let_go()


def _compile_gradients(compilers: Compilers, program: Program, example_inputs: list[Any], eager: Callable) -> Callable:
    """Differentiable gradients of a program (second_order.py) are a program."""
    try:
        return compile_program(program, example_inputs, compilers, eager)
    except UNTRACEABLE as error:
        return run_by_eager("untraceable_gradients", str(error), eager)


# ---------------------------------------------------------------- public functions

def backend(*, fw_compiler: GraphCompiler, bw_compiler: GraphCompiler | None = None, inference_compiler: GraphCompiler | None = None,
            partition_fn: PartitionFn | None = None, decompositions: Mapping | None = None,
            keep_inference_input_mutations: bool = True) -> Callable[[GraphModule, list], Callable]:
    """A backend for fs.compile made of graph compilers."""
    compilers = of_user(fw_compiler, bw_compiler, inference_compiler)

    def aot_backend(gm: GraphModule, example_inputs: list) -> Callable:
        return compile_aot(gm, example_inputs, *compilers, partition_fn, decompositions, keep_inference_input_mutations)
    return aot_backend


def function(fn: Callable, fw_compiler: GraphCompiler, bw_compiler: GraphCompiler | None = None, *, partition_fn: PartitionFn | None = None,
             decompositions: Mapping | None = None, dynamic: bool = False, inference_compiler: GraphCompiler | None = None) -> Callable:
    """`fn` traced and compiled at its first call with inputs of each kind; differentiable."""
    compilers = Compilers.of(*of_user(fw_compiler, bw_compiler, inference_compiler), partition_fn, decompositions)
    return functools.wraps(fn)(Traced(fn, compilers, dynamic))


class Traced:
    """A function of nests of tensors, compiled for each kind of call."""

    def __init__(self, fn: Callable, compilers: Compilers, dynamic: bool = False):
        self.fn, self.compilers, self.dynamic = fn, compilers, dynamic
        self.variants: dict[tuple, list[Variant]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, structure = pytree.tree_flatten((args, kwargs))
        unique, places = deduplicate(flat)
        casting = tuple(autocast_state()) if runtime.casts() else ()
        key = (structure, tuple(places), torch.is_grad_enabled(), casting, *(self._key(v) for v in unique))
        variants = self.variants.setdefault(key, [])
        found = next((v for v in variants if v.holds(unique)), None)
        if found is None:
            found = self._compile(unique, places, structure)
            variants.append(found)
        return pytree.tree_unflatten(found.run(*unique), found.structure[0])

    def _key(self, value: Any) -> Any:
        if self.dynamic and isinstance(value, torch.Tensor):
            return value.dim(), value.dtype, value.device, value.requires_grad, value.is_leaf
        return kind_of(value)

    def _compile(self, unique: list[Any], places: list[int], structure: Any) -> Variant:
        results: list[Any] = [None]

        def program(*inputs: Any) -> list[Any]:
            args, kwargs = pytree.tree_unflatten([inputs[p] for p in places], structure)
            with SymbolicFunctions() if self.dynamic else contextlib.nullcontext():
                outputs, results[0] = pytree.tree_flatten(self.fn(*args, **kwargs))
            return outputs
        env = ShapeEnv() if self.dynamic else None
        examples = unique if env is None else with_symbols(unique, env)
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled()), stages_kept():
                run = compile_program(program, examples, self.compilers, eager=program)
        except RuntimeError:
            if not overlaps(unique, range(len(unique))):
                raise
            run = run_by_eager("overlapping_inputs", "inputs share memory, and the program has an error that may depend on it", program)
        return Variant(run, results, size_check(env))


def stages_kept() -> contextlib.AbstractContextManager[Any]:
    """Inside, products of stages are kept as in fs.compile, for who calls these functions himself."""
    return stages.kept_by(stages.current() or stages.wanted("aot"))


@dataclass(frozen=True)
class Variant:
    run: Callable
    structure: list[Any]
    holds: Callable[[Sequence[Any]], bool]


def with_symbols(values: Sequence[Any], env: ShapeEnv) -> list[Any]:
    """Abstract inputs each size of which is a symbol."""
    world = AbstractWorld(env)
    return [world.wrap(v, f"inputs[{i}]", ("dynamic",) * v.dim()) if isinstance(v, torch.Tensor) else v for i, v in enumerate(values)]


def size_check(env: ShapeEnv | None) -> Callable[[Sequence[Any]], bool]:
    """The guards of a traced program as one function of its inputs."""
    if env is None:
        return lambda inputs: True
    text = " and ".join(f"({guard.text(env.sources())})" for guard in env.guards()) or "True"
    return eval(f"lambda inputs: {text}", {"math": math})


def deduplicate(values: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """(each tensor once, for each value its place among them)."""
    unique: list[Any] = []
    seen: dict[int, int] = {}
    places = []
    for value in values:
        place = seen.setdefault(id(value), len(unique)) if isinstance(value, torch.Tensor) else len(unique)
        if place == len(unique):
            unique.append(value)
        places.append(place)
    return unique, places


def module(mod: torch.nn.Module, fw_compiler: GraphCompiler, bw_compiler: GraphCompiler | None = None, *, partition_fn: PartitionFn | None = None,
           decompositions: Mapping | None = None, dynamic: bool = False) -> Callable:
    """A module's call, traced and compiled; its parameters and buffers are inputs of the graph."""
    call = function(functools.partial(call_with_state, mod), fw_compiler, bw_compiler, partition_fn=partition_fn,
                    decompositions=decompositions, dynamic=dynamic)

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(state_of(mod), args, kwargs)
    return run


def state_of(mod: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(mod.named_parameters(remove_duplicate=False)), **dict(mod.named_buffers(remove_duplicate=False))}


def call_with_state(mod: torch.nn.Module, state: Mapping[str, torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a module with these tensors in the place of its parameters and buffers."""
    with _reparametrize_module(mod, dict(state)):
        return mod(*args, **kwargs)


def module_simplified(mod: torch.nn.Module, example_args: Sequence[Any], fw_compiler: GraphCompiler, bw_compiler: GraphCompiler | None = None, *,
                      partition_fn: PartitionFn | None = None, decompositions: Mapping | None = None,
                      inference_compiler: GraphCompiler | None = None, keep_inference_input_mutations: bool = False) -> Callable:
    """A captured module (flat tensors in, a flat tuple out), compiled at once for these arguments, parameters lifted."""
    state = state_of(mod)
    names, lifted = list(state), list(state.values())
    compilers = Compilers.of(*of_user(fw_compiler, bw_compiler, inference_compiler), partition_fn, decompositions, keep_inference_input_mutations)
    variants: dict[tuple[int, ...], Callable] = {}      # by which of the arguments are the same tensor

    def prepare(args: Sequence[Any]) -> tuple[Callable, list[Any]]:
        unique, places = deduplicate([*lifted, *args])
        run = variants.get(key := tuple(places))
        if run is None:
            program = functools.partial(call_flat, mod, names, places)
            with stages_kept():
                run = variants[key] = compile_program(program, unique, compilers, eager=program)
        return run, unique

    def forward(*args: Any) -> tuple:
        run, unique = prepare(args)
        return run(*unique)
    prepare(example_args)
    return forward


def call_flat(mod: torch.nn.Module, names: Sequence[str], places: Sequence[int], *inputs: Any) -> list[Any]:
    """Calls a module with state and arguments given as one list, in which each tensor stands once."""
    values = [inputs[p] for p in places]
    outputs = call_with_state(mod, dict(zip(names, values)), values[len(names):], {})
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


# ---------------------------------------------------------------- export

def export_joint(mod: Any, args: Sequence[Any], *, trace_joint: bool = True, decompositions: Mapping | None = None) -> tuple[GraphModule, Signature]:
    """The joint graph of a module or function over flat arguments, parameters and buffers first, and its signature."""
    is_module = isinstance(mod, torch.nn.Module)
    parameters = dict(mod.named_parameters()) if is_module else {}
    buffers = dict(mod.named_buffers()) if is_module else {}
    names = [*parameters, *buffers]

    def program(*inputs: Any) -> list[Any]:
        user = inputs[len(names):]
        outputs = call_with_state(mod, dict(zip(names, inputs)), user, {}) if is_module else mod(*user)
        return list(pytree.tree_leaves(outputs))
    joint = trace_program(program, [*parameters.values(), *buffers.values(), *args], decompositions=decompositions, gradients=trace_joint,
                          shown=True)
    clean(joint.gm)
    if joint.refusal is not None:
        raise UserError(f"The program has no joint graph: {joint.refusal[1]}.", hint="Change inputs by in-place operators that keep their sizes.")
    return joint.gm, signature_of(joint, results_of(joint.gm), list(parameters), list(buffers))
