"""What an inference graph computes of parameters and buffers alone is taken out of it, to be computed once (fs.config.freeze).

In: a functional graph, and which of its inputs are frozen.  Out: the graph, in which more inputs, behind its own, stand for what was taken out, and
`Frozen`: a function that computes their values from the frozen inputs.  `autograd/frozen_call.py` runs it, and again when one of those has changed.

    conv(x, w) * g           the graph before, w and g frozen
    conv(x, f)               the graph
    f = w * g                Frozen.once

What always holds
 - The graph's own inputs keep their places, its results their values up to rounding, dtypes, shapes and strides.
 - A result of the graph is never memory that is kept: the caller may write to it.
 - Views of a parameter are not kept: they cost nothing.  How much is kept is bounded (known.py).

`folding.py` and `reordering.py` write more into the graph that can be taken out.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from firesteel.graph.build import results_of
from firesteel.graph.folding import fold
from firesteel.graph.known import KnownNodes, numbers
from firesteel.graph.passes import move_views, remove_dead, spec, view_chain, viewed
from firesteel.graph.reordering import is_opaque, reorder
from firesteel.records import dataclass


@dataclass(frozen=True)
class Frozen:
    """What is computed once of some of the inputs."""
    once: str                       # a function in Python, `forward(self, ...)`, that knows nothing but torch
    places: tuple[int, ...]         # numbers of the inputs that it reads
    layouts: list[Any]              # strides of its results; None of those in the library's own format
    counts: dict[str, int]          # what was done, in words


def freeze(gm: GraphModule, frozen: Iterable[int]) -> Frozen | None:
    """Takes out of the graph what it computes of the frozen inputs alone; None where there is nothing."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    known = KnownNodes(gm.graph, [placeholders[place] for place in frozen])
    counts = {"scales and shifts folded into weights": fold(gm.graph, known), "weights reordered": reorder(gm.graph, known)}
    shown = {view for result in results_of(gm) if isinstance(result, Node) for view in view_chain(result)[:-1]}
    kept = {}
    for node in list(gm.graph.nodes):
        if node in known and node.op == "call_function" and spec(node) is not None and viewed(node).op != "placeholder":
            readers = [user for user in node.users if user not in known and user.op != "output" and user not in shown]
            if readers and _may_move(node, readers):
                kept[node] = readers
    if not kept:
        return None
    once, read = _text_of(list(kept), placeholders)
    for node, given in zip(kept, _more_inputs(gm.graph, placeholders, list(kept))):
        for reader in kept[node]:
            reader.replace_input_with(node, given)
    remove_dead(gm.graph)
    gm.recompile()
    layouts = [None if is_opaque(node) else numbers(node.meta["val"]).strides for node in kept]        # type: ignore[union-attr]  # tensors
    return Frozen(once, read, layouts, {**counts, "values computed once": len(kept)})


def _may_move(node: Node, readers: Sequence[Node]) -> bool:
    """Can its readers have it at the start of a memory of its own?"""
    own: Any = spec(node)
    return own.offset == 0 or len(readers) == len(node.users) and move_views(node, own._replace(offset=0))


def _more_inputs(graph: Graph, placeholders: Sequence[Node], kept: Sequence[Node]) -> list[Node]:
    """An input for each value, behind those that the graph has."""
    made = []
    last = placeholders[-1]
    for node in kept:
        with graph.inserting_after(last):
            last = graph.placeholder(f"frozen_{node.name}")
        own: Any = numbers(node.meta["val"])
        last.meta["val"] = node.meta["val"].world.make(own._replace(offset=0))
        made.append(last)
    return made


def _text_of(kept: Sequence[Node], placeholders: Sequence[Node]) -> tuple[str, tuple[int, ...]]:
    """The function that computes these values, and which inputs it reads."""
    needed, stack = set[Node](), list(kept)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    graph, copies = Graph(), dict[Node, Node]()
    for node in kept[0].graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in kept))
    return graph.python_code("self").src, tuple(place for place, node in enumerate(placeholders) if node in needed)
