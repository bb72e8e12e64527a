"""Branches: one call of a captured graph with two bodies, of which data known only at run time chooses one.

A branch is a seam (autograd/seams.py): the host code reads the condition between two compiled graphs and calls one body.  Each body is a
captured graph of its own over values of the graph around it, and gives a tuple; here both are compiled, forward and backward.  Gradients
pass through the body that ran.  A backend that runs the graph as it is needs to know nothing: a branch is a function of real tensors.

    branch(condition, x, w)         # bodies[bool(condition)](x, w)

A branch of which one way only raises is a check: a seam that leaves the whole graph, and the run function continues at the check in eager.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from firesteel.autograd.regions import module_of

StateCall = tuple[Any, tuple[Any, ...], tuple[Any, Any]]     # a function, its arguments, and the meta of such a node: (state, as it was at first)


def branch_of(when_false: Callable[..., Any], when_true: Callable[..., Any]) -> Callable[..., Any]:
    bodies = (when_false, when_true)

    def branch(condition: Any, *inputs: Any) -> Any:
        return bodies[bool(condition)](*inputs)

    branch.bodies, branch.made_for_real = bodies, True      # type: ignore[attr-defined]
    return branch


def loop_of(body: Callable[..., Any]) -> Callable[..., Any]:
    """A loop whose condition is data: of the carried values and the inputs the body gives the next carried ones, and whether another round comes.
    It is compiled for gradients of those `tracked`, which the first round need not have."""

    def loop(tracked: Sequence[bool], going: Any, *values: Any) -> Any:
        carried, inputs = values[:len(tracked)], values[len(tracked):]
        if going:
            carried = tuple(leaf(t) if wanted else t for t, wanted in zip(carried, tracked))
        while going:
            *carried, going = body(*carried, *inputs)
        return tuple(carried)

    loop.bodies, loop.made_for_real = (body,), True         # type: ignore[attr-defined]
    return loop


def region_of(body: Callable[..., Any]) -> Callable[..., Any]:
    """A nested region: the body, which other calls share."""

    def region(*inputs: Any) -> Any:
        return body(*inputs)

    region.bodies, region.made_for_real = (body,), True     # type: ignore[attr-defined]
    return region


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with a gradient where it has none."""
    return tensor if tensor.requires_grad or not torch.is_grad_enabled() else tensor.detach().requires_grad_()


class Left(BaseException):
    """The program leaves the graph at a check: where to go on, with which values of the graph.  No Exception: nobody else catches it."""

    def __init__(self, exit: Any, values: tuple[Any, ...]):
        self.exit, self.values = exit, values


def check_of(exit: Any, leaves: bool) -> Callable[..., Any]:
    """A condition under which the program continues in the graph, and else at `exit`."""
    def check(condition: Any, *values: Any) -> None:
        if bool(condition) == leaves:
            raise Left(exit, values)

    check.exit, check.made_for_real = exit, True            # type: ignore[attr-defined]
    return check


MAKERS: dict[str, Callable[..., Any]] = {"branch": branch_of, "loop": loop_of, "region": region_of}


def has_bodies(node: Node) -> bool:
    return node.op == "call_function" and hasattr(node.target, "bodies")


def inside_bodies(nodes: Sequence[Node]) -> Iterator[Node]:
    """The nodes of the bodies of the calls among the nodes, nested ones too."""
    for node in nodes:
        for body in getattr(node.target, "bodies", ()) if node.op == "call_function" else ():
            yield from body.graph.nodes
            yield from inside_bodies(body.graph.nodes)


def compile_bodies(nodes: Sequence[Node], compiler: Callable[[GraphModule], Callable], sizes: Sequence[Node], before: Sequence[StateCall],
                   behind: Sequence[StateCall], known: dict[Any, Callable]) -> None:
    """Gives each call among the nodes the compiled bodies.  They take `sizes` too, and run under the states of torch that `before` sets.  Calls that
    share a body (`known`) share what it is compiled to."""
    for node in nodes:
        if has_bodies(node):
            target: Any = node.target
            node.args = (*node.args, *sizes)
            key = target, tuple(str(size.meta["val"]) for size in sizes), repr((before, behind))
            if key not in known:
                known[key] = MAKERS[target.__name__](*(compiler(as_graph(body, sizes, before, behind)) for body in target.bodies))
            node.target = known[key]


def as_graph(body: GraphModule, sizes: Sequence[Node], before: Sequence[StateCall], behind: Sequence[StateCall]) -> GraphModule:
    """The body with further inputs and under states of torch."""
    if not before and not sizes:
        return body
    graph = Graph()
    inputs = body.graph.find_nodes(op="placeholder")
    copies = {node: graph.node_copy(node) for node in inputs}
    for size in sizes:
        graph.placeholder(size.name).meta["val"] = size.meta["val"]
    _set_states(graph, before)
    for node in body.graph.nodes:
        if node.op == "output":
            _set_states(graph, behind)
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return module_of(graph, "Body")


def _set_states(graph: Graph, calls: Sequence[StateCall]) -> None:
    for fn, args, state in calls:
        graph.call_function(fn, args).meta.update(val=None, state=state)


def joined_like(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """A tensor that is described as the results of both bodies are; None where these differ."""
    with torch.enable_grad():
        made = (one if one.requires_grad or not other.requires_grad else other).clone()
    return made if facts(made) == facts(one) == facts(other) else None


def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.layout, tensor.is_conj(), tensor.is_neg()
