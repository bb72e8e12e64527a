"""KnownNodes: the nodes of a functional graph that are computed from frozen inputs alone (frozen.py), and how passes add such nodes.

What always holds: a known node is a pure call of sizes that are numbers, draws nothing, and its inputs are known; its value is at most MOST times as
large as its inputs, but for what is small, since it may be kept.

    known = KnownNodes(gm.graph, [w, b])
    with gm.graph.inserting_before(node):
        half = known.call(aten.mul.Tensor, (w, 0.5))
"""
from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from firesteel.config import config
from firesteel.graph.build import append_call
from firesteel.graph.schemas import facts
from firesteel.graph.sizes import asking
from firesteel.graph.spec import Spec
from firesteel.graph.tensor import AbstractTensor, to_spec
from firesteel.operators import collective
from firesteel.targets import on_host

MOST = 2            # a weight in bfloat16 may be kept as floats; one of 8 bits may not, who has such wants the memory
SMALL = 1 << 16     # bytes


class KnownNodes:
    """A set of nodes; a builder of more of them."""

    def __init__(self, graph: Graph, inputs: Iterable[Node]):
        self.graph = graph
        self.nodes = {node for node in inputs if numbers(node.meta.get("val")) is not None}
        self.world = next((node.meta["val"].world for node in self.nodes), None)
        for node in graph.nodes if self.nodes else ():
            if node.op == "call_function" and self._knows_all(node.all_input_nodes) and _is_pure(node) and _is_bounded(node):
                self.nodes.add(node)

    def _knows_all(self, nodes: list[Node]) -> bool:
        return bool(nodes) and self.nodes.issuperset(nodes)

    def __contains__(self, node: object) -> bool:
        return node in self.nodes

    def call(self, target: OpOverload, args: tuple, **kwargs: Any) -> Node:
        """A call on known values, at the graph's insert point."""
        node = append_call(self.graph, target, args, kwargs)
        node.meta["val"] = self.value(target, args, kwargs)
        self.nodes.add(node)
        return node

    def value(self, target: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What a call gives, by its operator's rule."""
        assert self.world is not None
        rule: Any = facts(target).rule
        with asking(self.world.env):
            return self.world.make(rule(*map(_seen, args), **{key: _seen(value) for key, value in kwargs.items()}))


def _seen(value: Any) -> Any:
    """An argument as rules see it."""
    return to_spec(map_arg(value, lambda node: node.meta["val"]))


def _is_pure(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "prims") or "unbacked" in node.meta:
        return False
    fact = facts(node.target)
    return fact.kind in ("pure", "view") and not fact.random and collective(node.target) is None


def _is_bounded(node: Node) -> bool:
    size = _size(node)
    return size is not None and (size <= SMALL or size <= MOST * sum(_size(read) or 0 for read in node.all_input_nodes))


def _size(node: Node) -> int | None:
    """Bytes of a value; None where it is no tensor of known sizes on the host, nor several."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    specs = [numbers(item) for item in values if item is not None]
    sizes: list[Any] = [math.prod(spec.shape) * spec.dtype.itemsize for spec in specs if spec is not None]
    return sum(sizes) if specs and len(sizes) == len(specs) else None


def rounds(node: Node) -> bool:
    """Must its value be rounded where eager rounds it?"""
    value = node.meta.get("val")
    narrow = isinstance(value, AbstractTensor) and value.spec.dtype.itemsize < torch.float32.itemsize
    return narrow and bool(config.eager_rounding or node.meta.get("exact"))


def numbers(value: Any) -> Spec | None:
    """The Spec of a tensor on the host, where all of its sizes are known to be numbers: a buffer's are symbols first, where all sizes are."""
    if type(value) is not AbstractTensor or not on_host(value.spec):
        return None
    spec, env = value.spec, value.world.env

    def simple(size: Any) -> Any:
        return size if type(size) is int else env.simplify(size)
    found = Spec(tuple(map(simple, spec.shape)), tuple(map(simple, spec.strides)), simple(spec.offset), spec.dtype, spec.device)
    return found if all(type(size) is int for size in (*found.shape, *found.strides, found.offset)) else None
