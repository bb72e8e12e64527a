"""Signature: what the inputs and results of an exported joint graph are called and what they are for.

    gm, signature = fs.aot.export_joint(model, [x])
    print(signature)            # a table, a line an input, a tangent and an output
"""
from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from firesteel.autograd.alias import Constant, Result
from firesteel.autograd.outline import Joint
from firesteel.graph.wrappers import Pack, places_of
from firesteel.records import dataclass


@dataclass(frozen=True)
class Signature:
    """The names of a joint graph's inputs and results.  `outputs` says what the program returns: a result of the graph, an input, a view of one of
    them (`primals_0.t()`), or a constant."""
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    user_inputs: tuple[str, ...]            # placeholders of what the user passes
    inputs_to_parameters: dict[str, str]    # placeholder -> parameter
    inputs_to_buffers: dict[str, str]
    tangents: dict[str, str]                # placeholder -> result it is the gradient of
    outputs: tuple[str, ...]
    mutated_inputs: dict[str, str]          # result -> placeholder it is written to
    gradients: dict[str, str]               # result -> placeholder it is the gradient of

    def __str__(self) -> str:
        return "\n".join([*self._input_lines(), *(f"tangent    {t:14} of {r}" for t, r in self.tangents.items()),
                          *(f"output     {text}" for text in self.outputs)])

    def _input_lines(self) -> list[str]:
        gradient = {place: result for result, place in self.gradients.items()}
        written = {place: result for result, place in self.mutated_inputs.items()}
        rows = [("parameter", *item) for item in self.inputs_to_parameters.items()]
        rows += [("buffer", *item) for item in self.inputs_to_buffers.items()]
        rows += [("input", place, "") for place in self.user_inputs]
        lines = []
        for kind, place, name in rows:
            becomes = f"  becomes {written[place]}" if place in written else ""
            slope = f"  gradient {gradient[place]}" if place in gradient else ""
            lines.append(f"{kind:10} {place:14} {name}{becomes}{slope}".rstrip())
        return lines


def signature_of(joint: Joint, results: Sequence[Any], parameters: Sequence[str], buffers: Sequence[str]) -> Signature:
    """`results` are those of the joint graph.  A tensor subclass that wraps tensors is there by its parts: `weight.a`, `weight.b`."""
    placeholders = [node.name for node in joint.gm.graph.nodes if node.op == "placeholder"]
    names = [r.name if isinstance(r, Node) else str(r) for r in results]
    inputs = Parts(joint.packing.inputs if joint.packing is not None else [None] * joint.plan.num_inputs)
    values = Parts(joint.packing.values if joint.packing is not None else [None] * joint.plan.num_values)
    slopes = Parts(joint.packing.gradients if joint.packing is not None else [None] * joint.plan.num_inputs)
    primals, gradients = placeholders[:joint.num_primals], results[joint.num_fwd_outputs:]
    groups = [[(primals[place], f"{name}{path}") for place, path in inputs.of(k)] for k, name in enumerate([*parameters, *buffers])]
    returned = [place for tangent in joint.tangents for place, _ in values.of(tangent.value)]
    user = primals[sum(map(len, groups)):]
    return Signature(
        tuple(parameters), tuple(buffers), tuple(user),
        dict(itertools.chain(*groups[:len(parameters)])), dict(itertools.chain(*groups[len(parameters):])),
        {place: names[value] for place, value in zip(placeholders[joint.num_primals:], returned)},
        tuple(output_text(joint, result, inputs, values, primals, names) for result in joint.plan.results),
        {names[value]: primals[place] for w in joint.plan.writes for (value, _), (place, _) in zip(values.of(w.value), inputs.of(w.input))},
        {gradients[g].name: primals[place] for k in range(joint.plan.num_inputs) for (g, _), (place, _) in zip(slopes.of(k), inputs.of(k))
         if gradients and gradients[g] is not None})


class Parts:
    """Where in the graph the parts of values are, and by which attributes."""

    def __init__(self, packs: Sequence[Pack | None]):
        self.packs = packs

    def of(self, number: int) -> list[tuple[int, str]]:
        """(place, attribute) of each part: (3, ".a")."""
        return list(zip(places_of(self.packs, number), paths_of(self.packs[number])))

    def text(self, number: int, names: Sequence[str]) -> str:
        """The value in the names of the graph: sin, or TwoTensor(a=sin, b=sin_1)."""
        pack, parts = self.packs[number], self.of(number)
        if pack is None:
            return names[parts[0][0]]
        return f"{pack.cls.__name__}({', '.join(f'{path[1:]}={names[place]}' for place, path in parts)})"


def paths_of(pack: Pack | None) -> list[str]:
    if pack is None:
        return [""]
    return [f".{name}{rest}" for name, inner in zip(pack.names, pack.inner) for rest in paths_of(inner)]


def output_text(joint: Joint, result: Result, inputs: Parts, values: Parts, primals: Sequence[str], names: Sequence[str]) -> str:
    """A result of the program, in the names of the graph."""
    if isinstance(result, Constant):
        return repr(result.value)
    return re.sub(r"([iv])\[(\d+)\]", lambda found: inputs.text(int(found[2]), primals) if found[1] == "i" else values.text(int(found[2]), names),
                  joint.plan.text_of(result))
