"""Facts of a TrainingGraph, from the graphs of its program: which gradients it has, what reaches them, what is saved."""
from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from firesteel.autograd.arrived import tangent_bits
from firesteel.autograd.outline import Joint
from firesteel.graph.build import results_of
from firesteel.graph.wrappers import Pack, Packing, places_of


def without_graph(joint: Joint) -> Joint:
    return dataclasses.replace(joint, gm=None, example_inputs=[])       # type: ignore[arg-type]


def of_wrappers(packing: Packing, places: list[int | None], reaches: list[int]) -> tuple[list[int | None], list[int], list[Pack | None]]:
    """`gradients` and `reaches` of a TrainingGraph, which the graph has for its placeholders, for the program's inputs; and how the backward's
    results are put together."""
    found: list[int | None] = []
    bits: list[int] = []
    packs: list[Pack | None] = []
    for k, pack in enumerate(packing.gradients):
        parts = [p for place in places_of(packing.gradients, k) if (p := places[place]) is not None]
        found.append(len(bits) if parts else None)
        if parts:
            bits.append(functools.reduce(operator.or_, (reaches[p] for p in parts)))
            packs.append(pack)
    return found, bits, packs


def saved_results(joint: Joint, results: Sequence[Any]) -> dict[int, int]:
    """Place among what is saved -> version with which it is, for what is a result too."""
    if joint.packing is not None:
        return {}
    first = {node: k for k, node in enumerate(results[:joint.num_fwd_outputs])}
    return {place: joint.plan.versions.get(first[node], 0) for place, node in enumerate(results[joint.num_fwd_outputs:]) if node in first}


def keep_gradients(bw: GraphModule) -> list[int | None]:
    """Takes the Nones out of the backward's results; says for each input at which place its gradient is."""
    output, results = bw.graph.output_node(), results_of(bw)
    kept = [r for r in results if r is not None]
    if len(kept) != len(results):
        output.args = (tuple(kept),)
        output.meta["val"] = tuple(n.meta.get("val") for n in kept)
        bw.recompile()
    places = iter(range(len(kept)))
    return [None if r is None else next(places) for r in results]


def reached_by_tangents(bw: GraphModule, numbers: Sequence[int], joint: Joint, places: Sequence[int | None]) -> list[int]:
    """For each result of the backward the bit set of tangents from which eager's engine would give it."""
    bits = tangent_bits(bw, numbers)
    found = [bits[node] for node in results_of(bw)]
    if joint.packing is None:
        for reach, place in zip(joint.reaches, places):
            if place is not None:
                found[place] |= reach
    return found


def read_and_written(joint: Joint) -> list[int]:
    """Inputs that the program overwrites and on whose old value gradients depend: kept by copy for higher orders."""
    written = {w.input for w in joint.plan.writes}
    if not written:
        return []
    results = results_of(joint.gm)[joint.num_fwd_outputs:]
    needed, stack = set(), [r for r in results if isinstance(r, Node)]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    placeholders = [node for node in joint.gm.graph.nodes if node.op == "placeholder"]
    packs = joint.packing.inputs if joint.packing is not None else None
    return [i for i in sorted(written) if any(placeholders[p] in needed for p in places_of(packs, i))]
