"""Seams: calls of a captured graph that are made for real, between two compiled graphs.

A hook on an intermediate tensor must see, at run time, all of its gradient, and may change it.  A compiled backward has no such
place; the border between two compiled graphs has.  So capture puts a call of a *seam function* into the graph, right behind the
node that makes the tensor, and `compile_in_segments` compiles what lies between seams on its own.  A backend that runs the graph as it
is needs to know nothing: seam functions are ordinary functions of real tensors.

The seed or state of a generator of random numbers is set, and read, at a seam too: draws before it lie in one graph, those behind it in another.
So is the memory of a tensor exchanged (`tensor.data = other`).

What always holds: a seam of a hook comes before every use of its tensor, so that no gradient passes it by; what the hook is, is told after
the graph has run (`LateHook.hook`, `BackwardHook.user_hooks`), so it is no part of the graph and never compiled again for.

    late = graph.call_function(hook_here, (y,))         # y -> LateHook; the run function then says late.hook = the user's function
    run = compile_in_segments(gm, backend)              # backend(part, example_inputs) -> callable
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils.hooks import BackwardHook

from firesteel.table import Table

# function -> what it is for
SEAMS: Table[str] = Table("seam function", "seams.py")


# -- what runs at a seam ------------------------------------------------------------------------------------------------
class LateHook:
    """A hook that is registered before it is known.  `handle` is what registering gave."""

    __slots__ = ("handle", "hook", "__weakref__")

    def __init__(self) -> None:
        self.hook: Callable[[torch.Tensor], Any] | None = None
        self.handle: Any = None

    def __call__(self, gradient: torch.Tensor) -> Any:
        return None if self.hook is None else self.hook(gradient)


def hook_here(tensor: torch.Tensor) -> LateHook:
    """tensor.register_hook(a hook told later)"""
    late = LateHook()
    late.handle = tensor.register_hook(late)
    return late


def retain_here(tensor: torch.Tensor) -> None:
    """tensor.retain_grad()"""
    tensor.retain_grad()


def module_starts(count: int, places: tuple[int, ...], *tensors: torch.Tensor) -> tuple[Any, ...]:
    """The inputs of a module with backward hooks: (BackwardHook, the tensors to go on with).  It has `count` arguments, of which those
    at `places` are tensors; its module and its hooks are told later."""
    hook = BackwardHook(None, [], [])
    given = hook.setup_input_hook(_arguments(count, places, tensors))
    return (hook, *(given[place] for place in places))


def module_ends(hook: BackwardHook | None, inputs: int, count: int, places: tuple[int, ...], *tensors: torch.Tensor) -> tuple[Any, ...]:
    """The outputs of such a module.  No hook: none of the inputs required a gradient."""
    if hook is None:
        hook = BackwardHook(None, [], [])
        hook.n_inputs = inputs
    given = hook.setup_output_hook(_arguments(count, places, tensors))
    return (hook, *(given[place] for place in places))


def seed_here(generator: torch.Generator, seed: int) -> None:
    """generator.manual_seed(seed)"""
    generator.manual_seed(seed)


def seed_all_here(seed: int) -> None:
    """torch.manual_seed(seed)"""
    torch.manual_seed(seed)


def state_here(generator: torch.Generator) -> torch.Tensor:
    """generator.get_state()"""
    return generator.get_state()


def set_state_here(generator: torch.Generator, state: torch.Tensor) -> None:
    """generator.set_state(state)"""
    generator.set_state(state)


def set_data_here(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """tensor.data = data"""
    tensor.data = data
    return tensor


def _arguments(count: int, places: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    arguments: list[Any] = [None] * count
    for place, tensor in zip(places, tensors):
        arguments[place] = tensor
    return tuple(arguments)


SEAMS.add(hook_here, "a hook on an intermediate tensor")
SEAMS.add(retain_here, "retain_grad of an intermediate tensor")
SEAMS.add(module_starts, "backward hooks of a module, at its inputs")
SEAMS.add(module_ends, "backward hooks of a module, at its outputs")
SEAMS.add(seed_here, "the seed of a generator")
SEAMS.add(seed_all_here, "the seed of every device's generator")
SEAMS.add(state_here, "the state of a generator, read")
SEAMS.add(set_state_here, "the state of a generator, set")
SEAMS.add(set_data_here, "the memory of a tensor, exchanged")


# -- compiling around seams ---------------------------------------------------------------------------------------------
def is_seam(node: Node) -> bool:
    return node.op == "call_function" and node.target in SEAMS


def has_seams(gm: GraphModule) -> bool:
    return any(is_seam(node) for node in gm.graph.nodes)


def results_of(gm: GraphModule) -> Sequence[Any]:
    """What a captured graph returns: nodes and constants."""
    results: Any = gm.graph.output_node().args[0]
    return results


def results_gone_on_with(gm: GraphModule) -> frozenset[Node]:
    """The nodes that are returned, require a gradient and from which others that do are made: the caller may put a hook on such a tensor,
    which must see the gradient of all that was made from it."""
    results = {node for node in results_of(gm) if isinstance(node, Node) and is_tracked(node)}
    return frozenset(node for node in results if any(map(may_be_tracked, node.users)))


def may_be_tracked(node: Node) -> bool:
    """Is the node's value, or part of it, differentiable?"""
    return any(isinstance(val, torch.Tensor) and val.requires_grad for val in pytree.tree_leaves(node.meta.get("val")))


def is_tracked(node: Node) -> bool:
    val = node.meta.get("val")
    return node.op != "placeholder" and isinstance(val, torch.Tensor) and val.requires_grad


def compile_in_segments(gm: GraphModule, backend: Callable[[GraphModule, list], Callable], cuts: Collection[Node] = ()) -> Callable[..., tuple]:
    """A graph with seams as a callable: every stretch between seams, and behind a node of `cuts`, is compiled by `backend`; seams are
    called as they are."""
    steps = [make_step(stretch, backend) for stretch in with_states(stretches(gm, cuts)) if not all("state" in node.meta for node in stretch[1])]
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    results = results_of(gm)
    last_use = {node: n for n, step in enumerate(steps) for node in step.reads}
    dead = [[node for node in step.reads if last_use[node] == n and node not in results] for n, step in enumerate(steps)]

    def run(*inputs: Any) -> tuple:
        values = dict(zip(placeholders, inputs))
        for step, over in zip(steps, dead):
            step.run(values)
            for node in over:
                del values[node]
        return tuple([values[node] if isinstance(node, Node) else node for node in results])
    return run


def stretches(gm: GraphModule, cuts: Collection[Node] = ()) -> list[list[Node]]:
    """The calls of a graph in order, cut before and behind each seam and behind `cuts`.  Item reads stay with the call they read."""
    parts: list[list[Node]] = [[]]
    home: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if is_seam(node):
            parts += [[node], []]
            home[node] = parts[-2]
        elif is_item_read(node):
            home[node] = home[node.args[0]]
            home[node].append(node)
        else:
            home[node] = parts[-1]
            parts[-1].append(node)
        if node in cuts:
            parts.append([])
    return [part for part in parts if part]


def is_item_read(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], Node) and isinstance(node.args[0].meta.get("val"), (tuple, list))


StateCall = tuple[Any, tuple[Any, ...]]     # a function and its arguments
Stretch = tuple[list[StateCall], list[Node], list[StateCall]]


def with_states(parts: list[list[Node]]) -> list[Stretch]:
    """Each stretch with the states of torch (grad mode, autocast) to set before it and to put back behind it: a stretch is compiled
    for the states in which the region began."""
    found: list[Stretch] = []
    current: dict[Any, tuple[StateCall, StateCall]] = {}        # state -> (as it is now, as it was at first)
    for part in parts:
        before = [now for now, _ in current.values()]
        for node in part:
            if "state" in node.meta:
                key, first = node.meta["state"]
                began = current[key][1] if key in current else (node.target, (*node.args[:-1], first))
                current[key] = ((node.target, node.args), began)
        found.append((before, part, [began for _, began in current.values()]))
    return found


class Step:
    """One compiled stretch, or one seam: reads values of nodes, adds values of nodes."""

    def __init__(self, fn: Callable[..., Sequence[Any]], reads: list[Node], writes: list[Node]):
        self.fn, self.reads, self.writes = fn, reads, writes

    def run(self, values: dict[Node, Any]) -> None:
        results = self.fn(*[values[node] for node in self.reads])
        for node, result in zip(self.writes, results):
            values[node] = result


def make_step(stretch: Stretch, backend: Callable[[GraphModule, list], Callable]) -> Step:
    gm, reads, writes = as_module(*stretch)
    seam = any(is_seam(node) for node in stretch[1])
    fn = gm.forward if seam else backend(gm, [node.meta["val"] for node in reads])
    return Step(fn, reads, writes)


def as_module(before: list[StateCall], nodes: list[Node], behind: list[StateCall]) -> tuple[GraphModule, list[Node], list[Node]]:
    """The nodes as a graph of their own: (graph, nodes it reads, nodes it gives)."""
    inside = set(nodes)
    reads = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    writes = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for node in reads:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for fn, args in before:
        graph.call_function(fn, args)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for fn, args in behind:
        graph.call_function(fn, args)
    graph.output(tuple(copies[node] for node in writes))
    return GraphModule({}, graph, "Segment"), reads, writes
