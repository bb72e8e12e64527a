"""Which size symbols a graph mentions, and which of them its inputs bind.

A later stage reads every symbol from an input: a size, stride or offset that is just that symbol, or an int.  A backward graph
mentions symbols (in the shapes of its values) that none of the tensors saved for it need bind: `s0` cannot be read from a size `3*s0`.
The partitioner therefore saves those that are missing as ints.

    missing_symbols(nodes, placeholders)      # {s0}
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from firesteel.autograd.recompute import tensors_of
from firesteel.sym.expr import Expr, free_symbols
from firesteel.sym.symint import SYMBOLIC, from_sym


def environment(nodes: Iterable[Node]) -> Any:
    """The ShapeEnv behind the first value that has one; None where all sizes are numbers."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, SYMBOLIC):
            return value.node.env
        env = getattr(getattr(value, "world", None), "env", None)
        if env is not None:
            return env
    return None


def sizes_of(value: Any, env: Any) -> Iterator[Any]:
    """All sizes in a value, as the environment knows them now."""
    if isinstance(value, SYMBOLIC):
        yield env.simplify(from_sym(value))
    for tensor in tensors_of(value):
        spec = getattr(tensor, "spec", None)
        if spec is not None:
            for size in (*spec.shape, *spec.strides, spec.offset):
                if type(size) is Expr:
                    yield env.simplify(size)


def missing_symbols(nodes: Collection[Node], placeholders: Iterable[Node], env: Any) -> list[Expr]:
    """The symbols that values of `nodes` mention and that neither `placeholders` bind nor `nodes` themselves read from data, in the
    order of their creation."""
    bound = {size for node in placeholders for size in sizes_of(node.meta.get("val"), env) if is_symbol(size)}
    bound.update(symbol for node in nodes for symbol in node.meta.get("unbacked", ()))
    mentioned: set[Expr] = set()
    for size in {size for node in nodes for size in sizes_of(node.meta.get("val"), env)}:
        mentioned |= free_symbols(size)
    return sorted(mentioned - bound, key=lambda symbol: env.symbols[symbol].number)


def is_symbol(size: Any) -> bool:
    return type(size) is Expr and size.op == "symbol"


def where_bound(symbol: Expr, placeholders: Iterable[Node], env: Any) -> tuple[Node, Any, int] | None:
    """(placeholder, how to ask it, dimension) for a symbol that is a size or stride of an input."""
    aten = torch.ops.aten
    for node in placeholders:
        spec = getattr(node.meta.get("val"), "spec", None)
        if spec is None:
            continue
        for op, sizes in ((aten.sym_size.int, spec.shape), (aten.sym_stride.int, spec.strides)):
            for dim, size in enumerate(sizes):
                if type(size) is Expr and env.simplify(size) is symbol:
                    return node, op, dim
    return None
