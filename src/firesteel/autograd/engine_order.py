"""The order in which torch's engine runs the nodes of a backward, found by walking its graph from Python.

Of the nodes that are ready the eager engine runs the one that was made last (the highest sequence number; AccumulateGrad has the highest of
all); ties fall as the binary heap of C++ lets them.  The engine's door for compilers describes the nodes last in, first out.  Hooks are
observed in the eager order, and gradients are summed in it, so a captured backward is put into it.

    ranks = eager_ranks(roots, wanted, names)       # place in the door's order -> rank in the eager one; None where they do not fit
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.autograd.graph import GradientEdge, get_gradient_edge

ROOT = "torch::autograd::GraphRoot"


class EngineWalk:
    """One backward: its nodes, how many others each waits for, and which of them run."""

    def __init__(self, roots: Sequence[Any], wanted: Sequence[Any]):
        self.roots = [node_of(root) for root in roots]
        self.edges: dict[Any, list[Any]] = {}
        self.waiting: dict[Any, int] = {}
        for root in self.roots:
            self._visit(root)
            self.waiting[root] = self.waiting.get(root, 0) + 1      # for the edge from the engine's own root
        self.runs = self._leading_to({node_of(target) for target in wanted}) if wanted else None

    def _visit(self, root: Any) -> None:
        stack = [] if root in self.edges else [root]
        while stack:
            node = stack.pop()
            if node in self.edges:
                continue
            after = self.edges[node] = [fn for fn, _ in node.next_functions if fn is not None]
            for fn in after:
                self.waiting[fn] = self.waiting.get(fn, 0) + 1
            stack += after

    def _leading_to(self, targets: set[Any]) -> set[Any]:
        """Nodes from which a target is reached."""
        before: dict[Any, list[Any]] = {}
        for node, after in self.edges.items():
            for fn in after:
                before.setdefault(fn, []).append(node)
        found, stack = set(), [target for target in targets if target in self.edges]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += before.get(node, ())
        return found

    def order(self, push: Callable[[list, Any], None], pop: Callable[[list], Any]) -> list[Any]:
        """Runs them all, with this queue of what is ready."""
        waiting = dict(self.waiting)
        ready: list[Any] = []
        done = []
        self._release(self.roots, waiting, ready, push)
        while ready:
            node = pop(ready)
            done.append(node)
            self._release(self.edges[node], waiting, ready, push)
        return done

    def _release(self, nodes: Iterable[Any], waiting: dict[Any, int], ready: list, push: Callable[[list, Any], None]) -> None:
        for node in nodes:
            waiting[node] -= 1
            if not waiting[node] and (self.runs is None or node in self.runs):
                push(ready, node)


def eager_ranks(roots: Sequence[Any], wanted: Sequence[Any], names: Sequence[str]) -> list[int] | None:
    """For each node that the door names, in its order, the rank in the eager order; the engine's own root comes first in both."""
    walk = EngineWalk(roots, wanted)
    described = walk.order(list.append, list.pop)
    if [ROOT, *(node.name() for node in described)] != list(names):
        return None
    ranks = {node: rank for rank, node in enumerate(walk.order(push_heap, pop_heap), 1)}
    return [0, *(ranks[node] for node in described)]


def node_of(start: Any) -> Any:
    """The node of a tensor's gradient, or of a GradientEdge."""
    return start.node if isinstance(start, GradientEdge) else get_gradient_edge(start).node


# -- the binary heap of C++'s priority queue, where ties fall as there ---------------------------------------------------
def number(node: Any) -> int:
    return node._sequence_nr()


def push_heap(heap: list[Any], node: Any) -> None:
    heap.append(node)
    _sift_up(heap, len(heap) - 1, node)


def pop_heap(heap: list[Any]) -> Any:
    first, last = heap[0], heap.pop()
    if heap:
        _fill(heap, last)
    return first


def _sift_up(heap: list[Any], hole: int, node: Any) -> None:
    while hole and number(heap[(hole - 1) // 2]) < number(node):
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = node


def _fill(heap: list[Any], node: Any) -> None:
    """Moves the greater child up from the root to a leaf, then the node from there to its place."""
    hole, count = 0, len(heap)
    while (child := 2 * hole + 2) < count:
        child -= number(heap[child]) < number(heap[child - 1])
        heap[hole] = heap[child]
        hole = child
    if child == count:
        heap[hole] = heap[child - 1]
        hole = child - 1
    _sift_up(heap, hole, node)
