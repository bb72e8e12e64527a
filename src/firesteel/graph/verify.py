"""verify: is a graph of the level it claims to be?  On in tests; a failure is a bug of ours (InternalError).

Levels
  torch   what capture hands over: any call; every node but the output has meta["val"]; the output is flat.
  aten    functional: OpOverloads that write nothing, getitem, functions of sizes, get_attr; Specs agree with the rules.
  joint   aten, and every node says its phase; nothing of the forward reads what the backward computes.

    verify(gm, "aten")
"""
from __future__ import annotations

import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from firesteel.errors import InternalError
from firesteel.graph.abstract import AbstractTensor
from firesteel.graph.schemas import facts
from firesteel.graph.sizenodes import SIZE_FUNCTIONS
from firesteel.graph.sizes import asking
from firesteel.graph.spec import Spec
from firesteel.sym.expr import eq
from firesteel.sym.symint import FLOAT_FUNCTIONS, SYMBOLIC, from_sym
from firesteel.table import Table

SIZE_TARGETS = frozenset({*SIZE_FUNCTIONS.values(), *FLOAT_FUNCTIONS.values(), torch.sym_float, torch.sym_int, torch.sym_sum, operator.getitem})
LEVELS: Table = Table("graph level", "graph/verify.py")


def verify(gm: GraphModule, level: str) -> None:
    """Raises InternalError, naming the node, where the graph is not of the level."""
    gm.graph.lint()
    check_node = LEVELS[level]
    for node in gm.graph.nodes:
        if node.op == "output":
            _check_output(node)
        else:
            if "val" not in node.meta:
                _fail(node, "it has no meta['val']")
            check_node(node)


def _fail(node: Node, why: str) -> None:
    raise InternalError(f"{node.format_node()}: {why}")


def _check_output(node: Node) -> None:
    if not isinstance(node.args[0], (tuple, list)) or any(isinstance(o, (tuple, list, dict)) for o in node.args[0]):
        _fail(node, "the output is not a flat tuple")


@LEVELS.row("torch")
def _check_torch(node: Node) -> None:
    if node.op not in ("placeholder", "call_function", "call_method", "get_attr", "call_module"):
        _fail(node, "an unknown kind of node")


@LEVELS.row("aten")
def _check_aten(node: Node) -> None:
    if node.op in ("placeholder", "get_attr"):
        return
    if node.op != "call_function":
        _fail(node, "only function calls may stand in a functional graph")
    if isinstance(node.target, OpOverload):
        _check_operator(node)
    elif node.target not in SIZE_TARGETS:
        _fail(node, "neither an operator nor a function of sizes")


def _check_operator(node: Node) -> None:
    fact = facts(node.target)       # type: ignore[arg-type]  # the caller has looked
    if fact.writes:
        _fail(node, "the operator writes to its arguments")
    if fact.rule is None:
        return
    world = next((n.meta["val"].world for n in (node, *node.all_input_nodes) if type(n.meta.get("val")) is AbstractTensor), None)
    env = world.env if world is not None else None
    with asking(env):
        if env is not None:
            env.replay(node.meta.get("unbacked"))
        found = fact.rule(*_specs(node.args), **{k: _specs(v) for k, v in node.kwargs.items()})
    _compare(node, found, _specs(node.meta["val"]), env)


def _specs(value: Any) -> Any:
    if isinstance(value, Node):
        return _specs(value.meta["val"])
    if type(value) is AbstractTensor:
        return value.spec
    if type(value) is Spec:
        return value
    if isinstance(value, (list, tuple)):
        return [_specs(v) for v in value]
    return from_sym(value) if isinstance(value, SYMBOLIC) else value


def _compare(node: Node, found: Any, have: Any, env: Any) -> None:
    if type(found) is Spec:
        if type(have) is not Spec or found != have and not _equal(found, have, env, node.meta.get("relaid", False)):
            _fail(node, f"its Spec is {have}, its rule says {found}")
    elif isinstance(found, (list, tuple)):
        if len(found) != len(have):
            _fail(node, f"it has {len(have)} results, its rule says {len(found)}")
        for f, h in zip(found, have):
            _compare(node, f, h, env)


def _equal(a: Spec, b: Spec, env: Any, relaid: bool) -> bool:
    """Equal by what is known at the end: guards that came behind a node may have settled its sizes.  The stride of a size that came out
    as 1 is free, and so are those of a tensor without elements, and all where the rule was asked with eager's layout of an argument (`relaid`)."""
    if (a.dtype, a.device, len(a.shape)) != (b.dtype, b.device, len(b.shape)):
        return False

    def same(x: Any, y: Any) -> bool:
        return x == y or env is not None and env.known(eq(env.simplify(x), env.simplify(y)))
    empty = any(same(size, 0) for size in a.shape)
    strides = [(s, t) for size, s, t in zip(a.shape, a.strides, b.strides) if not (empty or relaid or same(size, 1))]
    return all(same(x, y) for x, y in [*zip(a.shape, b.shape), *strides, (a.offset, b.offset)])


@LEVELS.row("joint")
def _check_joint(node: Node) -> None:
    _check_aten(node)
    phase = node.meta.get("phase")
    if phase not in ("forward", "backward"):
        _fail(node, f"its phase is {phase!r}")
    if phase == "forward" and any(n.meta.get("phase") == "backward" and not n.name.startswith("tangent") for n in node.all_input_nodes):
        _fail(node, "the forward reads what the backward computes")
