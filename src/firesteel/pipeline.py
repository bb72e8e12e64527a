"""From a functional ATen graph to a callable: the stages, as one list.

    graph --lower--> Program --simplify--> Program --fuse--> Program --plan--> Plan --target--> callable(*inputs) -> tuple

Each stage maps one printable thing to the next; its verifier runs where fs.config.verify is on, its product is written where
fs.config.dump_dir is set, its time is in fs.stage_times().
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx

from firesteel import artifacts
from firesteel.artifacts import counters, timed
from firesteel.codegen import host, llvm, triton
from firesteel.config import config
from firesteel.loops.fuse import fuse
from firesteel.loops.ir import Nest, Program
from firesteel.loops.lower.graph import lower_graph
from firesteel.loops.plan import Plan, Run, plan
from firesteel.loops.simplify import simplify
from firesteel.loops.verify import verify_program
from firesteel.runtime import cpu, gpu
from firesteel.table import Table


@dataclass(frozen=True)
class Stage:
    name: str
    run: Callable[[Any], Any]
    verify: Callable[[Any], None] | None
    extension: str                          # of its dumps


def _nothing(product: Any) -> None:
    """A product whose maker checks it."""


STAGES = (
    Stage("simplify", simplify, verify_program, "loops"),
    Stage("fuse", fuse, verify_program, "loops"),
    Stage("plan", plan, _nothing, "plan"),
)

TARGETS: Table[Callable[[Plan], Callable]] = Table("target", "pipeline.py")


def compile_native(gm: torch.fx.GraphModule, example_inputs: list) -> Callable[..., tuple]:
    """A graph compiler for `autograd.aot`: native code for the graph's device."""
    with timed("lower"):
        program = lower_graph(gm, example_inputs)
    target = _target(program)
    if target is None:
        return _run_by_torch(gm)
    _finish("lower", "loops", verify_program, program)
    product: Any = program
    for stage in STAGES:
        with timed(stage.name):
            product = stage.run(product)
        _finish(stage.name, stage.extension, stage.verify, product)
    artifacts.log("schedule", lambda: str(product))
    return target(product)


def _finish(name: str, extension: str, verify: Callable | None, product: Any) -> None:
    artifacts.dump(name, extension, lambda: str(product))
    if verify is not None and config.verify:
        with timed("verify"):
            verify(product)


def _target(program: Program) -> Callable[[Plan], Callable] | None:
    """Who makes code for the one kind of device that a program's kernels run on; None for several kinds, or one without kernels."""
    written = {store.buffer for step in program.steps if isinstance(step, Nest) for phase in step.phases for store in phase.stores}
    kinds = {program.buffers[name].device.split(":")[0] for name in written} or {"cpu"}
    return TARGETS.get(kinds.pop()) if len(kinds) == 1 else None


def _run_by_torch(gm: torch.fx.GraphModule) -> Callable[..., tuple]:
    """Every operator is a library call: for graphs that compute on several kinds of devices, or on one that has no kernels."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    counters["native"]["fallbacks"] += len(calls)
    artifacts.log("perf", lambda: f"a graph of {len(calls)} calls computes on several kinds of devices, or on one without kernels: torch runs it")
    keep_layouts(gm)
    return gm.forward


def keep_layouts(gm: torch.fx.GraphModule) -> None:
    """Puts results into the strides for which the graph was traced: a library may choose others on its device than was foretold, and
    views were recorded for those."""
    made = [node for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
            and not any(result.alias_info for result in node.target._schema.returns)]
    parts = [user for node in made for user in node.users if user.target is operator.getitem]
    for node in (*made, *parts):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.layout is torch.strided and all(type(s) is int for s in val.stride()):
            with gm.graph.inserting_after(node):
                kept = gm.graph.call_function(host.laid_out, (node, tuple(val.stride())))
            kept.meta = dict(node.meta)
            node.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)
    gm.recompile()


@TARGETS.row("cpu")
def compile_for_cpu(plan: Plan) -> Callable[..., tuple]:
    """LLVM text for every nest, equal ones once; then the host function."""
    nests = [step.step for step in plan.steps if isinstance(step, Run) and isinstance(step.step, Nest)]
    with timed("print"):
        kernels = [llvm.print_nest(nest, plan.program.buffers) for nest in nests]
    counters["native"]["kernels"] += len(kernels)
    counters["native"]["distinct_kernels"] += len({k.symbol for k in kernels})
    for kernel in kernels:
        artifacts.log("kernels", lambda: kernel.text)
        artifacts.dump("print", "ll", lambda: kernel.text)
    addresses = cpu.load(kernels)
    launches = {k.name: host.Launch(a, k.buffers, k.symbols) for k, a in zip(kernels, addresses)}
    with timed("host"):
        return host.build(plan, launches, cpu.compile_text)


@TARGETS.row("cuda")
def compile_for_cuda(plan: Plan) -> Callable[..., tuple]:
    """Triton text for every nest, equal ones once; then the host function."""
    buffers = plan.program.buffers
    nests = [step.step for step in plan.steps if isinstance(step, Run) and isinstance(step.step, Nest)]
    with timed("print"):
        kernels = [triton.print_nest(nest, buffers) for nest in nests]
    devices = [buffers[next(s.buffer for phase in nest.phases for s in phase.stores)].device for nest in nests]
    counters["native"]["kernels"] += len(kernels)
    counters["native"]["distinct_kernels"] += len({k.symbol for k in kernels})
    for kernel in kernels:
        artifacts.log("kernels", lambda: kernel.text)
        artifacts.dump("print", "triton.py", lambda: kernel.text)
    launches = gpu.load(list(zip(kernels, devices)))
    with timed("host"):
        return host.build(plan, launches, cpu.compile_text, gpu.setup(devices))
