"""Building fx graphs quickly: appending a call costs 4 us instead of 25, and a module's Python code is made when first called.

`torch.fx.Graph.call_function` searches its arguments for symbolic numbers and spells a name from the target's text; a tracer that
has checked its arguments and knows a name needs neither.  `append_call` does the remaining work; where this torch's Graph is
built otherwise, it calls `create_node`.

    node = append_call(graph, aten.add.Tensor, (x, y), {})     # named add, add_1, ...
    gm = make_module(graph, {})
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule


@functools.cache
def call_name(target: Any) -> str:
    """add for aten.add.Tensor; getitem for operator.getitem."""
    full = getattr(target, "_opname", None) or getattr(target, "__name__", "call")
    return str(full).strip("_") or "call"


def _append_fast(graph: Graph, target: Any, args: tuple, kwargs: dict[str, Any]) -> Node:
    names = graph._graph_namespace
    name = names.create_name(call_name(target), None)
    node = Node(graph, name, "call_function", target, args, kwargs, None)
    names.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def _append_plain(graph: Graph, target: Any, args: tuple, kwargs: dict[str, Any]) -> Node:
    return graph.create_node("call_function", target, args, kwargs, name=call_name(target))


def _choose() -> Callable[[Graph, Any, tuple, dict[str, Any]], Node]:
    """The fast way, if a graph built by it is a sound one in this torch."""
    graph = Graph()
    try:
        x = graph.placeholder("x")
        y = _append_fast(graph, torch.neg, (x,), {})
        graph.output((y,))
        graph.lint()
        return _append_fast if len(graph.nodes) == 3 and graph.find_nodes(op="call_function", target=torch.neg) == [y] else _append_plain
    except (AttributeError, TypeError, RuntimeError, AssertionError):
        return _append_plain


append_call = _choose()


class LazyModule(_LazyGraphModule):
    """Its code is written when it is first called; that call does not go through `__call__`, where hooks on all modules wait."""

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.real_recompile()
        return self.forward(*args, **kwargs)

    forward = _lazy_forward


def make_module(graph: Graph, attributes: Mapping[str, Any], name: str = "GraphModule") -> GraphModule:
    """A GraphModule over a graph.  Printing its code or calling it generates the code; passing it on does not."""
    return LazyModule(dict(attributes), graph, name)


def write_code(gm: GraphModule) -> GraphModule:
    """The module with its code generated, for who keeps its `forward`."""
    if isinstance(gm, LazyModule):
        gm.real_recompile()
    return gm


def results_of(gm: GraphModule) -> list[Any]:
    """What a graph returns: nodes, numbers, None."""
    returned: Any = gm.graph.output_node().args[0]
    return list(returned)
