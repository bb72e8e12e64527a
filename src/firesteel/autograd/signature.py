"""Signature: what the inputs and results of an exported joint graph are called and what they are for.

    gm, signature = fs.aot.export_joint(model, [x])
    print(signature)            # a table, a line an input, a tangent and an output
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from firesteel.autograd.alias import Constant, Result
from firesteel.autograd.joint import Joint


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
    """`results` are those of the joint graph."""
    placeholders = [node.name for node in joint.gm.graph.nodes if node.op == "placeholder"]
    names = [r.name if isinstance(r, Node) else str(r) for r in results]
    count, lifted = joint.plan.num_inputs, len(parameters) + len(buffers)
    primals, gradients = placeholders[:count], results[joint.num_fwd_outputs:]
    return Signature(
        tuple(parameters), tuple(buffers), tuple(primals[lifted:]), dict(zip(primals, parameters)), dict(zip(primals[len(parameters):], buffers)),
        {place: names[tangent.value] for place, tangent in zip(placeholders[count:], joint.tangents)},
        tuple(output_text(joint, result, primals, names) for result in joint.plan.results),
        {names[w.value]: primals[w.input] for w in joint.plan.writes},
        {g.name: place for g, place in zip(gradients, primals) if g is not None})


def output_text(joint: Joint, result: Result, primals: Sequence[str], names: Sequence[str]) -> str:
    """A result of the program, in the names of the graph."""
    if isinstance(result, Constant):
        return repr(result.value)
    text = joint.plan.text_of(result)
    return re.sub(r"([iv])\[(\d+)\]", lambda found: (primals if found[1] == "i" else names)[int(found[2])], text)
