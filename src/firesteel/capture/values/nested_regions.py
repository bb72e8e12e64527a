"""torch.compiler.nested_compile_region: a function whose body is captured as a graph of its own and compiled once for all equal calls.

Each call is executed symbolically; one whose graph is that of an earlier call calls that one's body (`region_of` of autograd/branches.py), with its
own parameters as inputs.  Where the body breaks, has seams, writes to what was there before, or gives views or numbers, the function is inlined.

    block(block(x, w1), w2)             # region(x, w1); region(region_1, w2)       with one body
"""
from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from firesteel.autograd.branches import facts, joined_like, region_of
from firesteel.autograd.regions import module_of
from firesteel.capture.meanings import BY_NAME
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import UserRaise, Value
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.containers import Sequence
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.mappings import DictValue
from firesteel.capture.values.tensor import TensorValue, wrap_item
from firesteel.capture.values.torch_calls import run_abstract
from firesteel.capture.values.transforms import Body, as_value, plain
from firesteel.errors import Break
from firesteel.sym.symint import SYMBOLIC, from_sym

Node = torch.fx.Node


@BY_NAME.row("torch._higher_order_ops.invoke_subgraph.invoke_subgraph_placeholder")
def call_region(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    fn, mark = m.look(args[0]), m.checkpoint()
    try:
        return as_one_call(m, fn, args[1:], kwargs)
    except (Break, UserRaise):
        m.rollback(mark)
        return fn.call(m, args[1:], kwargs)


def as_one_call(m: Machine, fn: Value, args: Args, kwargs: Kwargs) -> Value:
    given = [leaf for value in (*args, *kwargs.values()) for leaf in leaves_of(m, value)]
    leaves = run_abstract(m, copies, [[leaf.abstract if isinstance(leaf, TensorValue) else None for leaf in given]], {}, "a nested region")
    before = [(val, val._version) for val, _ in m.record.tensors.values()]
    body = Body(m, fn, args, kwargs, leaves)
    read = [*(leaf for leaf in leaves if leaf is not None), *(node.meta["val"] for node in body.lifted)]
    output: Any = body.module.graph.output_node().args[0]
    results, structure = pytree.tree_flatten(plain(output))
    made = [node.meta["val"] for node in results if isinstance(node, Node)]
    written = any(val._version != version for val, version in before) or any(leaf is not None and leaf._version for leaf in leaves)
    if written or not made or not is_apart(m, made, read):
        raise Break("transform", name="by a nested region that writes to tensors, or gives views or numbers")
    out = tuple(run_abstract(m, joined_like, [val, val], {}, "a nested region") for val in made)
    if any(val is None for val in out):
        raise Break("transform", name="by a nested region that gives tensors of unusual strides")
    module = alone(body, read, [leaf is not None for leaf in leaves], [node for node in results if isinstance(node, Node)])
    target = m.regions.setdefault(print_of(module), region_of(module))
    node = m.record.call_function(target, (*(leaf.node for leaf in given if isinstance(leaf, TensorValue)), *body.lifted), {}, out)
    items = iter([wrap_item(m, val, node, place) for place, val in enumerate(out)])
    return as_value(pytree.tree_unflatten([next(items) if isinstance(result, Node) else ConstValue(result) for result in results], structure))


def leaves_of(m: Machine, value: Value) -> list[Value]:
    """In the order in which a Body takes them."""
    value = m.look(value)
    inside = value.items if isinstance(value, Sequence) else [v for _, v in value.know_all(m).values()] if isinstance(value, DictValue) else None
    return [value] if inside is None else [leaf for item in inside for leaf in leaves_of(m, item)]


def copies(tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if t is None else t.clone() for t in tensors]


def is_apart(m: Machine, made: list[Any], read: list[Any]) -> bool:
    """Are the results tensors over memory of their own?"""
    if not all(isinstance(val, torch.Tensor) for val in made):
        return False
    memories = [m.world.memory(val) for val in made]
    others = {m.world.memory(val) for val in read if isinstance(val, torch.Tensor)}
    return len(set(memories)) == len(memories) and others.isdisjoint(memories)


def alone(body: Body, read: list[Any], is_tensor: list[bool], results: list[Node]) -> torch.fx.GraphModule:
    """The body as a graph of the tensors that it is given and of what it reads outside."""
    graph = torch.fx.Graph()
    inputs = body.module.graph.find_nodes(op="placeholder")
    wanted = [node for node, kept in zip(inputs, [*is_tensor, *[True] * len(body.lifted)]) if kept]
    copied: dict[Node, Node] = {}
    for place, (node, val) in enumerate(zip(wanted, read)):
        copied[node] = graph.placeholder(f"given_{place}")
        copied[node].meta.update(val=val, **({} if getattr(val, "_is_param", False) else {"held": True}))
    for node in body.module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[node] for node in results))
    return module_of(graph, "Body")


def print_of(module: torch.fx.GraphModule) -> tuple[Any, ...]:
    """Equal for graphs that compute the same of inputs described alike."""
    places = {node: place for place, node in enumerate(module.graph.nodes)}

    def described(val: Any) -> Any:
        if isinstance(val, torch.Tensor):
            return *map(sized, facts(val)), val.requires_grad, getattr(val, "_is_param", False)
        return tuple(map(described, val)) if isinstance(val, (list, tuple)) else sized(val)

    def sized(part: Any) -> Any:
        return tuple(map(sized, part)) if isinstance(part, tuple) else str(from_sym(part)) if isinstance(part, SYMBOLIC) else part
    return tuple((node.op, node.target if node.op != "placeholder" else None, described(node.meta.get("val")),
                  repr(torch.fx.node.map_arg((node.args, node.kwargs), places.__getitem__))) for node in module.graph.nodes)
