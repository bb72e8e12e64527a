"""Checkpointed regions in captured graphs: the call that holds one, the tags of its nodes, and what runs them as they are.

A region is one call of torch's `tag_activation_checkpoint` on a graph of its own, the body, and on the tensors that this reads:

    body = self.checkpoint_body;  out = tag_activation_checkpoint(body, x, w);  getitem(out, 0)

Tracing goes through the call (graph/trace.py): the body's nodes give their tags to what is recorded for them, and the partitioner obeys.
Run on real tensors the call is torch's checkpoint, with the settings in the body's meta.  The tags of a node:
    recompute   a row of WISHES: shall the backward compute it again?
    region      name of the outermost region that it is in: the inner ones of nested regions are recomputed with it
    policies    (name, context_fn) of each selective region around it, the outermost first (graph/policies.py)
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch._higher_order_ops import wrap
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from firesteel.graph.build import make_module

REGION_CALL = wrap.tag_activation_checkpoint
Tags = dict[str, Any]

# what a policy may answer -> the tag, from "compute it again in any case" to "save it in any case"; of two answers the later row wins
WISHES = {"MUST_RECOMPUTE": "must", "PREFER_RECOMPUTE": "prefer", "PREFER_SAVE": "avoid", "MUST_SAVE": "never"}
AGAIN = ("must", "prefer")      # the wishes for a second computation


# ---------------------------------------------------------------- tags

def nested(outer: Tags, inner: Mapping[str, Any]) -> Tags:
    """The tags of nodes of a nested region."""
    return {**outer, "policies": outer["policies"] + inner.get("policies", ())}


def put_tags(graph: Graph, tags: Tags) -> None:
    """Tags the calls of a region, those of the regions inside of it included."""
    for node in graph.nodes:
        if node.op == "get_attr":
            put_tags(node.meta["val"].graph, tags)
        elif node.op not in ("placeholder", "output"):
            node.meta.update(nested(tags, node.meta))


# ---------------------------------------------------------------- modules

class RegionModule(GraphModule):
    """A captured graph with regions.  Its forward does not call torch's own `tag_activation_checkpoint`, which recomputes other random numbers."""

    def recompile(self) -> Any:
        code = super().recompile()
        type(self).forward = run_nodes      # each instance has a class of its own
        return code


def module_of(graph: Graph, name: str) -> GraphModule:
    """The module over captured nodes; the bodies of its regions are its attributes."""
    held = bodies(graph.nodes)
    return RegionModule(held, graph, name) if held else make_module(graph, {}, name)


def bodies(nodes: Iterable[Node]) -> dict[str, Any]:
    return {str(node.target): node.meta["val"] for node in nodes if node.op == "get_attr"}


def checkpointed(body: GraphModule, *args: Any) -> Any:
    """A region on real tensors."""
    return torch.utils.checkpoint.checkpoint(partial(run_nodes, body), *args, **body.meta["checkpoint"])


def run_nodes(gm: GraphModule, *args: Any, region: Callable[..., Any] = checkpointed, by: Callable[[Any], Any] = lambda fn: fn) -> Any:
    """Runs a captured graph; `region` runs the regions in it, `by` says what to call in place of a function."""
    values: dict[Node, Any] = {}
    supplied = iter(args)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(supplied)
        elif node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(gm)
        else:
            given, named = map_arg(node.args, values.__getitem__), map_arg(node.kwargs, values.__getitem__)
            if node.op == "output":
                return given[0]
            fn = region if node.target is REGION_CALL else by(node.target) if node.op == "call_function" else getattr(given[0], node.target)
            values[node] = fn(*(given if node.op == "call_function" else given[1:]), **named)
    raise AssertionError("a graph without an output node")


def inlined(by: Callable[[Any], Any]) -> Callable[..., Any]:
    """Runs a graph on abstract tensors, through all of its regions."""
    def run(gm: GraphModule, *args: Any) -> Any:
        return run_nodes(gm, *args, region=run, by=by)
    return run
