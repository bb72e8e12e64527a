"""Recorder: the fx graph that one capture builds, and what each of its nodes stands for.

In: torch calls with their nodes and abstract results.  Out: a `torch.fx.GraphModule` with one placeholder a tensor that
was read, and the placeholders' sources and values in the same order.  What always holds: every node has `val`,
`stack_trace` and `nn_module_stack` in its meta; calls made after a mark vanish on `rollback(mark)`, inputs stay; an abstract tensor
object belongs to exactly one TensorValue, so a function that returns its argument returns the same Value.

    node = record.call_function(torch.relu, (x.node,), {}, abstract_result)
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from firesteel.autograd.regions import module_of
from firesteel.capture.values.base import Value
from firesteel.layouts import take_masks
from firesteel.sym.symint import SYMBOLIC

Node = torch.fx.Node
Meta = Callable[[], dict[str, Any]]     # the user's place: stack_trace and nn_module_stack


class GraphInput:
    """A placeholder: the node, where its value comes from, its abstract value and its real one at capture."""

    __slots__ = ("node", "source", "abstract", "real")

    def __init__(self, node: Node, source: Any, abstract: Any, real: Any):
        self.node, self.source, self.abstract, self.real = node, source, abstract, real


class Recorder:
    """Builds the graph of one region."""

    def __init__(self, place: Meta):
        self.graph = torch.fx.Graph()
        self.inputs: list[GraphInput] = []
        self.nodes: list[Node] = []                     # in order of making, placeholders and views of these left out
        self.tensors: dict[int, tuple[Any, Value]] = {} # id(abstract) -> (abstract, its Value)
        self.known: dict[Node, Any] = {}                # what nodes give whose data has been asked for and is known (known_data.py)
        self.place = place
        self._number_nodes: dict[int, tuple[Value, Node]] = {}     # id(SymNumber) -> its node
        self._held: dict[int, Value] = {}                           # id(SymNumber) -> it, of which `all_hold` was said
        self._undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._last_placeholder: Node | None = None
        self._views: list[Node] = []                                # of inputs

    # -- making nodes ----------------------------------------------------------------------------------------------
    def placeholder(self, name: str, source: Any, abstract: Any, real: Any) -> Node:
        anchor = self._last_placeholder or self.graph._root
        with self.graph.inserting_after(anchor):
            node = self.graph.placeholder(name)
        self._last_placeholder = node
        node.meta.update(val=abstract, **self.place())
        self.inputs.append(GraphInput(node, source, abstract, real))
        return node

    def call_function(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> Node:
        return self._made(self.graph.create_node("call_function", fn, args, kwargs), val)

    def call_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> Node:
        return self._made(self.graph.create_node("call_method", name, args, kwargs), val)

    def body(self, name: str, module: torch.fx.GraphModule) -> Node:
        """A graph that a call takes, as an attribute that is named like its node."""
        node = self.graph.create_node("get_attr", name, (), {}, name=name)
        node.target = node.name
        return self._made(node, module)

    def view_of_input(self, anchor: Node, fn: Callable[..., Any], val: Any) -> Node:
        """A view of what came in, made first of all.  It stands for an input: going back leaves both."""
        with self.graph.inserting_after(anchor):
            node = self.graph.create_node("call_function", fn, (anchor,), {})
        node.meta.update(val=val, **self.place())
        self._views.append(node)
        return node

    def insert_after(self, anchor: Node, fn: Callable[..., Any], args: tuple[Any, ...]) -> Node:
        """A call right behind an earlier node, giving no tensor."""
        with self.graph.inserting_after(anchor):
            return self.call_function(fn, args, {}, None)

    def behind(self, anchor: Node) -> list[Node]:
        """The calls made after a node; all of them, where it is a placeholder."""
        return self.nodes[self.nodes.index(anchor) + 1:] if anchor in self.nodes else self.nodes

    def drop(self, node: Node) -> None:
        """A call that gave nothing is not made."""
        self._undo.append((setattr, (node, "target", node.target)))
        node.target = dropped

    def _made(self, node: Node, val: Any) -> Node:
        node.meta["val"] = val
        node.meta.update(self.place())
        self.nodes.append(node)
        return node

    # -- what nodes stand for --------------------------------------------------------------------------------------
    def own(self, abstract: torch.Tensor, value: Value) -> None:
        self.tensors[id(abstract)] = (abstract, value)

    def owner(self, abstract: torch.Tensor) -> Value | None:
        found = self.tensors.get(id(abstract))
        return found[1] if found is not None else None

    def renode(self, value: Any, node: Node) -> None:
        """After an in-place call, `value` is what the call returned: later uses come after it."""
        self._undo.append((setattr, (value, "node", value.node)))
        value.node = node

    def all_hold(self, number: Any, holds: Callable[[Any], bool]) -> bool:
        """Does it hold of a symbolic number and of all that it was computed from?  Asked once of each."""
        stack, asked = [number], {}
        while stack:
            top = stack.pop()
            if id(top) not in self._held and id(top) not in asked:
                if not holds(top):
                    return False
                asked[id(top)] = top
                stack += top.operands
        self._held.update(asked)
        self._undo += [(self._held.pop, (key,)) for key in asked]
        return True

    def node_of(self, number: Any) -> Node:
        """The node that computes a symbolic number, made at its first use; first those of what it was computed from (sums may be long)."""
        nodes, stack = self._number_nodes, [number]
        while stack:
            top = stack[-1]
            missing = [n for n in top.operands if id(n) not in nodes]
            if missing and id(top) not in nodes:
                stack += missing
                continue
            stack.pop()
            if id(top) not in nodes:
                nodes[id(top)] = (top, top.make_node())
                self._undo.append((nodes.pop, (id(top),)))
        return nodes[id(number)][1]

    # -- speculation -----------------------------------------------------------------------------------------------
    def mark(self) -> tuple[int, int]:
        return len(self.nodes), len(self._undo)

    def rollback(self, mark: tuple[int, int]) -> None:
        nodes, undo = mark
        while len(self._undo) > undo:
            fn, args = self._undo.pop()
            fn(*args)
        while len(self.nodes) > nodes:
            self.graph.erase_node(self.nodes.pop())

    # -- the end ---------------------------------------------------------------------------------------------------
    def finish(self, outputs: list[Node]) -> tuple[torch.fx.GraphModule, list[GraphInput]]:
        """Closes the graph: unused placeholders and unused item reads go, `outputs` come back as a tuple."""
        self.graph.output(tuple(outputs))
        for node in outputs:
            take_masks(node.meta.get("val"))
        for node in reversed(self.nodes):
            if not node.users and is_pure_read(node):
                self.graph.erase_node(node)
        for view in reversed(self._views):
            if not view.users:
                self.graph.erase_node(view)
        used = [i for i in self.inputs if i.node.users]
        for unused in self.inputs:
            if not unused.node.users:
                self.graph.erase_node(unused.node)
        return module_of(self.graph, "Captured"), used

    def release(self) -> None:
        """Drops what was kept for building only."""
        self.tensors.clear()
        self.known.clear()
        self._undo.clear()
        self._number_nodes.clear()
        self._held.clear()
        self.place = dict
        for used in self.inputs:
            used.real = None

    def call_count(self) -> int:
        """How many calls there are; those that set a state of torch are done for real behind a graph, and are nothing by themselves."""
        return sum(1 for n in self.graph.nodes if n.op in ("call_function", "call_method") and "state" not in n.meta)


def dropped(*args: Any) -> None:
    """The target of a call that was taken back."""


def is_pure_read(node: Node) -> bool:
    """Item reads of a multi-output call, and size arithmetic: dropped where nobody uses them."""
    if node.op != "call_function" or node.target is dropped:
        return node.op == "call_function"
    if node.target is operator.getitem:
        read: Any = node.args[0]        # a node
        return not isinstance(read.meta.get("val"), torch.Tensor)
    return isinstance(node.meta.get("val"), SYMBOLIC)
