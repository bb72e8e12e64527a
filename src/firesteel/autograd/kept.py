"""The callable of a compiled program, of its outline and its graphs: just made (aot.py), or out of the cache, where nothing is traced.

Graphs that only some calls need, a backward for a part of the tangents or gradients of gradients, are asked of `LateGraphs` when one comes.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from firesteel import stages
from firesteel.artifacts import counters
from firesteel.autograd import function as runtime
from firesteel.autograd.outline import Joint, Outline, Program, ProgramEntry
from firesteel.autograd.ranks import compare_ranks
from firesteel.autograd.second_order import Compile, SecondOrder
from firesteel.graph.wrappers import Pack, pack_all
from firesteel.records import dataclass


@dataclass(frozen=True)
class LateGraphs:
    """What is compiled when it is first needed, if ever."""
    backward: Callable[..., Callable]       # (graph, how its results are put together, for whom stages are kept, the cache's entry)
    part: Callable[..., Callable]           # (for whom stages are kept, a part of the backward, the whole)
    gradients: Compile                      # of a program that computes gradients
    unstored: Compile                       # the same over tensors without memory


def compile_kept(entry: ProgramEntry, program: Program, eager: Callable, late: LateGraphs, turns_on: bool,
                 ranks: Sequence[Any] | None) -> Callable | None:
    """What `aot.compile_aot` makes of a captured graph without seams whose program is in a cache; None where it is not there.  `turns_on` is
    what `aot.program_of` said of it, `ranks` at which place ranks compare it."""
    outline = None if runtime.is_transformed() else entry.outline()
    if outline is None:
        return None
    counters["aot"].update(total=1, ok=1)
    if ranks:
        compare_ranks(outline.ranks, ranks)
    return in_grad_mode(from_cache(outline, entry, program, eager, late), turns_on, outline.joint)


def from_cache(outline: Outline, entry: ProgramEntry, program: Program, eager: Callable, late: LateGraphs) -> Callable:
    joint, forward = outline.joint, entry.forward()
    joint.plan.prepare()
    if not joint.tangents:
        return inference(joint, outline.boxed, forward, eager)
    compilation = stages.current()

    def compile_backward() -> Callable:
        found = entry.backward()
        packs = outline.facts["packs"]
        if found is None:
            return late.backward(entry.backward_graph(), packs, compilation, entry)
        return put_together(runtime.boxed_call(found), packs)
    return runtime.training(training_graph(outline, forward, program, eager, entry.backward_graph, compile_backward, late))


def put_together(backward: Callable, packs: list[Pack | None] | None) -> Callable:
    """A backward whose results are parts of tensor subclasses."""
    return backward if packs is None else lambda args: pack_all(packs, backward(args))


def inference(joint: Joint, boxed: bool, forward: Callable, eager: Callable) -> Callable:
    forward = runtime.packed_forward(forward, joint.packing)
    return runtime.boxed_inference(joint.plan, forward, eager) if boxed else runtime.inference(joint.plan, forward, eager)


def training_graph(outline: Outline, forward: Callable, program: Program, eager: Callable, read_backward: Callable[[], GraphModule],
                   compile_backward: Callable[[], Callable], late: LateGraphs) -> runtime.TrainingGraph:
    joint = outline.joint
    gradients, unstored = (SecondOrder(program, joint, compiler, eager) for compiler in (late.gradients, late.unstored))
    return runtime.TrainingGraph(
        plan=joint.plan, forward=runtime.packed_forward(forward, joint.packing), eager=eager, compile_backward=compile_backward,
        read_backward=read_backward, compile_part=functools.partial(late.part, stages.current()), second_order=gradients, unstored=unstored,
        **outline.facts)


def in_grad_mode(compiled: Callable, turns_on: bool, joint: Joint) -> Callable:
    return torch.enable_grad()(compiled) if turns_on and joint.tangents else compiled
