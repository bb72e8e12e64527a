"""The stages of the compiler, as one list: from a region of the user's program to the function that runs it.

    captured -> graph -> joint -> forward, backward -> program -> simplify -> fuse -> plan -> kernels -> host

Each row says which function makes what of what, how the product is verified (where fs.config.verify is on) and how it is written
(fs.config.dump_dir) and read back (`firesteel replay`).  `stages.py` does all that; capture and autograd run the rows above `program`, since a
break, a seam or a tensor that needs no gradient decides there which come next, and `compile_native` runs the rest in a row.
"""
from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.fx

from firesteel import artifacts, stages
from firesteel.artifacts import counters
from firesteel.autograd.edges import casts
from firesteel.codegen import hosted
from firesteel.codegen.zones import ZONE
from firesteel.config import config
from firesteel.records import dataclass
from firesteel.runtime import cpu
from firesteel.stages import STAGES, Stage
from firesteel.table import Table
from firesteel.targets import CPU, CUDA

if TYPE_CHECKING:
    from firesteel.autograd.outline import Joint
    from firesteel.capture.region_code import RegionCode
    from firesteel.loops.ir import Nest, Program
    from firesteel.loops.plan import Plan


def later(module: str, name: str) -> Callable[..., Any]:
    """A function whose module is loaded when it is first called: a process that finds its programs in the cache runs none of these stages."""
    return lambda *args, **kwargs: operator.attrgetter(name)(importlib.import_module(f"firesteel.{module}"))(*args, **kwargs)


def compile_native(gm: torch.fx.GraphModule, example_inputs: list, recorded: bool | None = None, tuned: bool = False) -> Callable[..., tuple]:
    """A graph compiler for `autograd.aot`: native code for the graph's device.  `recorded`: with small kernels side by side, and each program one
    CUDA graph where that is safe and pays; None: inference alone, where that is certain.  `tuned`: with choices that are measured meanwhile."""
    made = gm.meta.pop("printed", None) or print_graph(gm, example_inputs, bool(recorded))
    if made is None:
        return _run_by_torch(gm)
    plan, target = made.plan, _known_target(made.plan.program)
    kernels = target.tune(plan, made.kernels) if tuned else made.kernels
    if target.begin(plan, kernels) and "then" in gm.meta:
        _print_next(gm.meta.pop("then"), plan, bool(recorded))
    call = stages.run("host", plan, kernels)
    call.counts = made.counts
    if recorded is not False:
        call = target.record(plan, call, gm.meta.get("lent", ()), gm.meta.get("inference", False), recorded)
    return target.improve(plan, made.kernels, call, partial(build_host, plan)) if tuned else call


@dataclass(frozen=True)
class Printed:
    """A graph of which all is made but machine code."""
    plan: Plan
    kernels: list[Any]
    counts: dict[str, int]


def print_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], recorded: bool) -> Printed | None:
    """None for a graph that torch runs."""
    before = {name: counters["native"][name] for name in COUNTED}
    product = stages.run("program", gm, example_inputs)
    target = target_of(product)
    if target is None:
        return None
    for name in LOOP_STAGES:
        product = stages.run(name, product)
    kernels = stages.run("kernels", product)
    if recorded:
        kernels = target.gather(product, kernels)
    return Printed(product, kernels, {name: counters["native"][name] - count for name, count in before.items()})


def _print_next(gm: torch.fx.GraphModule, before: Plan, recorded: bool) -> None:
    """Prints the backward of a graph whose kernels are being compiled, and has its own compiled behind them: they will be needed soon.  Not where
    sizes are symbols, about which it must ask nothing before the guards are made, nor where stages are kept in their order.  What fails will fail
    again when the backward is compiled."""
    if before.program.symbols or stages.current() is not None or casts():
        return
    with contextlib.suppress(Exception), torch.no_grad():
        made = print_graph(gm, [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")], recorded)
        if made is not None:
            gm.meta["printed"] = made
            _known_target(made.plan.program).begin(made.plan, made.kernels)


COUNTED = ("kernels", "distinct_kernels", "library_calls", "fallbacks")     # counters of a program, not of its compilation
LOOP_STAGES = ("simplify", "fuse", "plan")      # of one argument, each on the product of the one before


# ---------------------------------------------------------------- targets

@dataclass(frozen=True)
class CodeTarget:
    """A kind of device: how nests are printed for it, and how their kernels are loaded: launches by the nests' names, and what a host
    function begins with."""
    print_nest: Callable[..., Any]
    load: Callable[[Plan, Sequence[Any]], tuple[dict[str, Any], Any]]
    zone: int = 0           # bytes of guard zones, where verifiers run
    gather: Callable[[Plan, list[Any]], list[Any]] = lambda plan, kernels: kernels      # to fewer launches
    tune: Callable[[Plan, list[Any]], list[Any]] = lambda plan, kernels: kernels        # by earlier measurements,
    improve: Callable[..., Any] = lambda plan, kernels, call, build: call       # and by those that are made while the program runs
    begin: Callable[[Plan, list[Any]], bool] = lambda plan, kernels: False      # has kernels compiled while this process goes on; are there any?
    record: Callable[..., Any] = lambda plan, call, *more: call         # all launches of a call as one


def _load_for_cpu(plan: Plan, kernels: Sequence[Any]) -> tuple[dict[str, Any], Any]:
    from firesteel.codegen.host import Launch
    return {k.name: Launch(a, k.buffers, k.symbols) for k, a in zip(kernels, cpu.load(kernels))}, None


def _load_for_cuda(plan: Plan, kernels: Sequence[Any]) -> tuple[dict[str, Any], Any]:
    from firesteel.runtime import gpu
    devices = _devices(plan)
    launches: dict[str, Any] = dict.fromkeys(devices, ())       # of those that another's launch runs too
    return launches | gpu.load([(kernel, devices[kernel.name]) for kernel in kernels]), gpu.setup(list(devices.values()))


def _devices(plan: Plan) -> dict[str, str]:
    """Where each nest runs."""
    buffers = plan.program.buffers
    return {nest.name: buffers[next(s.buffer for phase in nest.phases for s in phase.stores)].device for nest in nests_of(plan)}


def _begin_for_cuda(plan: Plan, kernels: Sequence[Any]) -> bool:
    from firesteel.runtime import gpu
    devices = _devices(plan)
    return gpu.compile_ahead([(kernel, devices[kernel.name]) for kernel in kernels])


TARGETS: Table[CodeTarget] = Table("target", "pipeline.py")
TARGETS.add(CPU, CodeTarget(later("codegen.llvm", "print_nest"), _load_for_cpu, ZONE))
TARGETS.add(CUDA, CodeTarget(later("codegen.triton", "print_nest"), _load_for_cuda, gather=later("codegen.side_by_side", "side_by_side"),
                             tune=later("runtime.tuning", "tuned"), improve=later("runtime.tuning", "improving"), begin=_begin_for_cuda,
                             record=later("runtime.graphs", "recorded")))


def target_of(program: Program) -> CodeTarget | None:
    """The one kind of device that a program's kernels run on; None for several kinds, or one without kernels."""
    written = {store.buffer for step in program.steps if step.nest for store in step.nest.stores()}
    kinds = {program.buffers[name].device.split(":")[0] for name in written} or {CPU}
    return TARGETS.get(kinds.pop()) if len(kinds) == 1 else None


def nests_of(plan: Plan) -> list[Nest]:
    from firesteel.loops.plan import Run
    return [step.step.nest for step in plan.steps if isinstance(step, Run) and step.step.nest]


def plan_memory(program: Program) -> Plan:
    """The plan; with guard zones around buffers where verifiers run."""
    return later("loops.plan", "plan")(program, _known_target(program).zone if config.verify else 0)


def print_kernels(plan: Plan) -> list[Any]:
    """The text of every nest."""
    printed = _known_target(plan.program).print_nest
    kernels = [printed(nest, plan.program.buffers) for nest in nests_of(plan)]
    counters["native"]["kernels"] += len(kernels)
    counters["native"]["distinct_kernels"] += len({k.symbol for k in kernels})
    return kernels


def build_host(plan: Plan, kernels: Sequence[Any]) -> Callable[..., tuple]:
    """Machine code of the kernels, equal ones once, and the host function that launches it."""
    launches, setup = _known_target(plan.program).load(plan, kernels)
    return later("codegen.host", "build")(plan, launches, cpu.compile_text, *([setup] if setup is not None else []))


def _known_target(program: Program) -> CodeTarget:
    target = target_of(program)
    assert target is not None
    return target


def _run_by_torch(gm: torch.fx.GraphModule) -> Callable[..., tuple]:
    """Every operator is a library call: for graphs that compute on several kinds of devices, or on one that has no kernels."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    counters["native"]["fallbacks"] += len(calls)
    artifacts.log("perf", lambda: f"a graph of {len(calls)} calls computes on several kinds of devices, or on one without kernels: torch runs it")
    keep_layouts(gm)
    return gm.forward


def keep_layouts(gm: torch.fx.GraphModule) -> None:
    """Puts results into the strides for which the graph was traced: a library may choose others on its device than was predicted, and
    views were recorded for those."""
    made = [node for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
            and not any(result.alias_info for result in node.target._schema.returns)]
    parts = [user for node in made for user in node.users if user.target is operator.getitem]
    for node in (*made, *parts):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.layout is torch.strided and all(type(s) is int for s in val.stride()):
            with gm.graph.inserting_after(node):
                kept = gm.graph.call_function(hosted.laid_out, (node, tuple(val.stride())))
            kept.meta = dict(node.meta)
            node.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)
    gm.recompile()


# ---------------------------------------------------------------- the list

def _joint_text(joint: Joint) -> str:
    """The graph, and what a partitioner needs to know of it."""
    return later("dumps", "graph_text")(joint.gm, num_primals=joint.num_primals, num_fwd_outputs=joint.num_fwd_outputs)


def _captured_text(captured: RegionCode) -> str:
    return "\n".join([*(f"# guard: {guard}" for guard in captured.guard.guards), captured.run.__source__])     # type: ignore[attr-defined]


_lower = later("loops.lower.graph", "lower_graph")
_code = operator.attrgetter("code")
_verify_program: Any = later("loops.verify", "verify_program")
_verify: Any = later("graph.verify", "verify")
_aten = partial(_verify, level="aten")
_finish, _trace = later("capture.record", "Recorder.finish"), later("autograd.joint", "trace_program")
_partition = later("autograd.partition", "min_cut_partition")
_graph: Any = partial(Stage, text=later("dumps", "graph_text"), extension="py", read=later("dumps", "read_graph"))
_loops: Any = partial(Stage, text=later("dumps", "records_text"), extension="loops", read=later("dumps", "read_records"))

for _row in (
    Stage("captured", later("capture.translate", "translate"), "a region and its inputs", "guards and a run function", _captured_text, "py"),
    _graph("graph", _finish, "what was recorded of it", "a torch-level graph", verify=partial(_verify, level="torch"), log="graph",
           show=lambda gm: gm.print_readable(print_output=False)),
    _graph("joint", _trace, "the graph as a program", "a Joint: forward and backward in one ATen graph", text=_joint_text,
           verify=lambda joint: _verify(joint.gm, "joint" if joint.tangents else "aten"), log="joint", show=lambda joint: joint.gm.code),
    _graph("forward", _partition, "the joint graph", "an ATen graph of results and saved tensors", verify=_aten,
           log="aot", show=_code),
    _graph("backward", _partition, "the joint graph", "an ATen graph of gradients", verify=_aten, log="aot", show=_code),
    _loops("program", _lower, "a forward or backward graph", "a Program: nests and library calls", verify=_verify_program),
    _loops("simplify", later("loops.simplify", "simplify"), "a Program", "a Program", verify=_verify_program),
    _loops("fuse", later("loops.fuse", "fuse"), "a Program", "a Program of fewer steps", verify=_verify_program),
    _loops("plan", plan_memory, "a Program", "a Plan: when memory is allocated and freed", extension="plan", log="schedule"),
    Stage("kernels", print_kernels, "a Plan", "LLVM or Triton text of each nest", later("dumps", "kernels_text"), "txt",
          later("dumps", "read_kernels"), log="kernels", show=lambda kernels: "\n".join(kernel.text for kernel in kernels)),
    Stage("host", build_host, "a Plan and its kernels", "the host function", lambda fn: fn.source, "py"),
):
    STAGES.add(_row.name, _row)
