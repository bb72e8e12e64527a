"""torch.while_loop on data: one call of the graph that holds a graph of the condition and one of the body (`loop_of` of autograd/branches.py).

Both are compiled once, with their backwards; the host code runs the loop, and gradients pass through all rounds.  Captured where the carried values
are tensors and the body gives tensors described as those it took; else the loop is the Python that it means (polyfills.py), which breaks at each
question.

    while_loop(lambda i, x: x.sum() < 100, lambda i, x: (i + 1, x * 2), (i, x))         # loop((False, True), i, x)
"""
from __future__ import annotations

from typing import Any

import torch
import torch.fx

from firesteel.autograd.branches import joined_like, loop_of
from firesteel.autograd.regions import module_of
from firesteel.capture.meanings import CALLS
from firesteel.capture.polyfills import while_loop
from firesteel.capture.protocols import Machine
from firesteel.capture.source import Fixed
from firesteel.capture.values.base import UserRaise, Value
from firesteel.capture.values.containers import Sequence, TupleValue
from firesteel.capture.values.functions import Args, Kwargs, function_value
from firesteel.capture.values.tensor import TensorValue
from firesteel.capture.values.torch_calls import run_abstract
from firesteel.capture.values.transforms import Body
from firesteel.errors import Break

Node = torch.fx.Node


@CALLS.row(while_loop)
def call_while_loop(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    mark = m.checkpoint()
    try:
        return as_one_call(m, *args, **kwargs)
    except (Break, UserRaise):
        m.rollback(mark)
        python: Any = while_loop
        return function_value(m, python, Fixed(python)).inline(m, args, kwargs)


def as_one_call(m: Machine, condition: Value, body: Value, carried: Value, additional: Value | None = None, **settings: Value) -> Value:
    taken, given = tensors_in(m, carried), [] if additional is None else tensors_in(m, additional)
    vals = [value.abstract for value in (*taken, *given)]
    leaves = run_abstract(m, copies, [vals, [False] * len(vals)], {}, "while_loop")
    while True:
        asks, steps = (Body(m, m.look(fn), [*taken, *given], {}, list(leaves)) for fn in (condition, body))
        results = outputs_of(steps)
        tracked = [getattr(node.meta.get("val"), "requires_grad", False) and not leaf.requires_grad for node, leaf in zip(results, leaves)]
        if not any(tracked):
            break       # what comes in with a gradient, from outside or from the round before, is known
        leaves = run_abstract(m, copies, [leaves, [*tracked, *[False] * len(leaves)]], {}, "while_loop")
    alike = [run_abstract(m, joined_like, [val, node.meta.get("val", val)], {}, "while_loop") for val, node in zip(leaves, results)]
    if len(results) != len(taken) or any(val is None for val in alike) or any(leaf._version for leaf in leaves):
        raise Break("transform", name="by while_loop whose body gives other tensors than it takes")
    outside = list(dict.fromkeys([*asks.lifted, *steps.lifted]))
    modules = [alone(one, leaves, outside) for one in (asks, steps)]
    wanted = tuple(leaf.requires_grad for leaf in leaves[:len(taken)])
    node = m.record.call_function(loop_of(*modules), (wanted, *(value.node for value in (*taken, *given)), *outside), {}, tuple(alike))
    return m.wrap_output(tuple(alike), node)


def copies(tensors: list[torch.Tensor], tracked: list[bool]) -> list[torch.Tensor]:
    """Tensors for the body to work on; those `tracked` require gradients."""
    return [t.detach().requires_grad_().clone() if now else t.clone() for t, now in zip(tensors, tracked)]


def tensors_in(m: Machine, value: Value) -> list[TensorValue]:
    value = m.look(value)
    items = [m.look(item) for item in value.items] if isinstance(value, Sequence) else []
    if not isinstance(value, TupleValue) or not all(isinstance(item, TensorValue) for item in items):
        raise Break("transform", name="by while_loop of something else than tensors")
    return items        # type: ignore[return-value]  # just asked


def outputs_of(body: Body) -> list[Node]:
    found: Any = body.module.graph.output_node().args[0]
    return list(found) if isinstance(found, (tuple, list)) else [found]


def alone(body: Body, leaves: list[torch.Tensor], outside: list[Node]) -> torch.fx.GraphModule:
    """The body as a graph of the carried tensors, the further ones and all that condition or body read."""
    graph = torch.fx.Graph()
    given = [graph.placeholder(f"argument_{place}") for place in range(len(leaves))]
    read = {node: graph.placeholder(node.name) for node in outside}
    for placeholder, val in (*zip(given, leaves), *((read[node], node.meta["val"]) for node in outside)):
        placeholder.meta["val"] = val
    inputs = body.module.graph.find_nodes(op="placeholder")
    copies = dict(zip(inputs, [*given, *(read[node] for node in body.lifted)]))
    for node in body.module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs_of(body)))
    return module_of(graph, "Body")
