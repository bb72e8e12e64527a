"""torch.func: grad, grad_and_value, vjp, jvp, vmap and the Jacobians.  A transformed call is one node.

The function is executed symbolically on the tensors as it sees them inside (one example for vmap).  What that records is taken out of the
graph and becomes a graph of its own, the *body*; tensors that it reads from outside become further inputs of it.  The node then calls torch's
transform on the body: for real in a backend that runs the graph as it is, on abstract tensors where it is traced, so what follows sees plain
operators.  A break inside, or an effect on the user's objects, is a break of the whole call.

    torch.vmap(f)(x)            # vmap_call((x,), {}, ())       with the body of f behind vmap_call
"""
# boundary: recognises torch.func.grad, torch.func.vmap and their relatives
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from firesteel.autograd.regions import Tags, module_of, put_tags
from firesteel.autograd.seams import is_seam_function
from firesteel.capture.meanings import BY_NAME
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.containers import ListValue, Sequence, TupleValue
from firesteel.capture.values.functions import TRANSFORMED, Args, Kwargs
from firesteel.capture.values.mappings import DictValue
from firesteel.capture.values.tensor import TensorValue, wrap_item
from firesteel.capture.values.torch_calls import run_abstract
from firesteel.errors import Break

Node = torch.fx.Node


# -- what the function sees ---------------------------------------------------------------------------------------------
def differentiated(args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """The leaves of the arguments inside of a derivative."""
    numbers = options.get("argnums", 0)
    wanted = {n % len(args) for n in (numbers if isinstance(numbers, tuple) else (numbers,))}
    seen = [_tracked(leaf) if place in wanted else leaf for place, arg in enumerate(args) for leaf in pytree.tree_leaves(arg)]
    return seen + pytree.tree_leaves(kwargs)


def _tracked(leaf: Any) -> Any:
    return leaf.detach().requires_grad_() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def one_of(batch: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor like each of the batch, which may be empty."""
    if type(batch.shape[dim]) is int and batch.shape[dim] > 0:
        return batch.select(dim, 0)
    sizes, strides = ([n for k, n in enumerate(numbers) if k != dim % batch.dim()] for numbers in (batch.shape, batch.stride()))
    return torch.empty_strided(sizes, strides, dtype=batch.dtype, device=batch.device).requires_grad_(batch.requires_grad)


def examples(args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """The leaves of one example of a batch."""
    leaves, spec = pytree.tree_flatten(args)
    places = options.get("in_dims", 0)
    dims = pytree._broadcast_to_and_flatten(places if isinstance(places, int) else tuple(places), spec)
    if dims is None:
        raise Break("transform", name="by torch.vmap with in_dims that do not fit the arguments")
    named = pytree.tree_leaves(kwargs)
    return [leaf if dim is None else one_of(leaf, dim) for leaf, dim in zip([*leaves, *named], [*dims, *[0] * len(named)])]


INSIDE: dict[str, Callable[..., list[Any]]] = {"grad": differentiated, "grad_and_value": differentiated, "jacrev": differentiated,
                                               "jacfwd": differentiated, "hessian": differentiated, "vmap": examples}


# -- the body -----------------------------------------------------------------------------------------------------------
def argument(place: int) -> None:
    """Stands for an argument of the body while it is recorded."""


class Body:
    """A captured function of flat leaves: its graph, and the nodes outside that it reads.  In a checkpointed region its nodes carry `tags`."""

    def __init__(self, m: Machine, fn: Value, args: Args, kwargs: Kwargs, leaves: list[Any], tags: Tags | None = None):
        self.tags = tags
        mark = m.checkpoint()
        leaves_before, draws_before = m.leaves.filled, m.draws
        owned = {id(leaf): m.record.tensors.get(id(leaf)) for leaf in leaves}
        m.bodies += 1
        try:
            source = enumerate(leaves)
            inside = [self._inside(m, value, source) for value in args]
            named = {name: self._inside(m, value, source) for name, value in kwargs.items()}
            result = m.look(m.call_now(fn, inside, named)).as_arg(m)[0]
            if not put_back(m, mark[1][0]):
                raise Break("transform", name="whose function changes objects outside of it")
            if m.draws is not draws_before:
                raise Break("transform", name="whose function draws random numbers of Python")
            if m.leaves.filled is not leaves_before:
                raise Break("transform", name="whose function makes a parameter")
            self.lifted: list[Node] = []
            nodes = m.record.nodes[mark[0][0]:]
            if any(is_seam_function(node.target) for node in nodes if node.op == "call_function"):
                raise Break("transform", name="with hooks or seeds inside")
            self.module = self._module(nodes, len(leaves), result)
        finally:
            m.bodies -= 1
            m.rollback(mark)
            m.record.tensors.update({key: known for key, known in owned.items() if known is not None})

    def _inside(self, m: Machine, value: Value, leaves: Iterator[tuple[int, Any]]) -> Value:
        value = m.look(value)
        if isinstance(value, Sequence):
            return type(value)([self._inside(m, item, leaves) for item in value.items]) if type(value) in (TupleValue, ListValue) else _refuse(value)
        if isinstance(value, DictValue):
            return DictValue({key: (k, self._inside(m, v, leaves)) for key, (k, v) in value.know_all(m).items()})
        place, leaf = next(leaves)
        if not isinstance(value, TensorValue):
            return value
        made = TensorValue(m.record.call_function(argument, (place,), {}, leaf), leaf)
        m.record.own(leaf, made)
        return made

    def _module(self, nodes: list[Node], count: int, result: Any) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        given = [graph.placeholder(f"argument_{place}") for place in range(count)]
        copies: dict[Node, Node] = {node: given[place] for node in nodes if node.target is argument and isinstance(place := node.args[0], int)}
        inside = set(nodes)
        read = [before for node in nodes for before in node.all_input_nodes] + _nodes_in(result)
        for node in dict.fromkeys(n for n in read if n not in inside):
            self.lifted.append(node)
            copies[node] = graph.placeholder(f"outside_{node.name}")
        for node in nodes:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(torch.fx.node.map_arg(result, copies.__getitem__))
        if self.tags is not None:
            put_tags(graph, self.tags)
        return module_of(graph, "Body")


def put_back(m: Machine, start: int) -> bool:
    """Have all effects from `start` on been undone again?  torch.func.functional_call lends a module other parameters."""
    touched = {id(effect.target) for effect in m.effects.entries[:start]}
    last: dict[Any, tuple[DictValue, Any, Value]] = {}
    for effect in m.effects.entries[start:]:
        target = effect.target
        if effect.kind != "setitem" or not isinstance(target, DictValue) or target.obj is None or id(target) in touched:
            return False
        last[id(target), m.known(effect.data[0])] = (target, m.known(effect.data[0]), effect.data[1])
    return all(key in target.obj and m.look(value).identity() is target.obj[key] for target, key, value in last.values())


def _refuse(value: Value) -> Value:
    raise Break("transform", name=f"with {value.describe()}")


def _nodes_in(nest: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(nest, found.append)
    return found


# -- the node -----------------------------------------------------------------------------------------------------------
def transformed(m: Machine, name: str, body: Body, use: Callable[..., Any], *given: Any) -> Value:
    """A node that calls `use(the body as a function, *given)`; `given` are pairs of (argument of a node, abstract value)."""
    structure: list[Any] = [None]

    def call(lifted: Any, *args: Any) -> list[Any]:
        leaves, structure[0] = pytree.tree_flatten(use(lambda *a, **k: body.module(*pytree.tree_leaves((a, k)), *lifted), *map(plain, args)))
        return leaves

    call.__name__ = call.__qualname__ = f"{name}_call"
    lifted = tuple(node.meta["val"] for node in body.lifted)
    out = run_abstract(m, call, [lifted, *(real for _, real in given)], {}, f"{name} of a function")
    node = m.record.call_function(call, (tuple(body.lifted), *(arg for arg, _ in given)), {}, out)
    return items_of(m, node, out, structure[0])


def items_of(m: Machine, node: Node, out: Iterable[Any], structure: Any) -> Value:
    """What a node that gives flat leaves stands for."""
    return as_value(pytree.tree_unflatten([wrap_item(m, leaf, node, i) for i, leaf in enumerate(out)], structure))


def plain(nest: Any) -> Any:
    """Arguments without the containers of torch.fx, which are pytrees of other kinds."""
    if isinstance(nest, dict):
        return {key: plain(item) for key, item in nest.items()}
    if isinstance(nest, list):
        return [plain(item) for item in nest]
    return tuple(map(plain, nest)) if type(nest) is tuple else nest


def as_value(nest: Any) -> Value:
    """A nest of Values as one."""
    if isinstance(nest, Value):
        return nest
    if type(nest) is dict:
        return DictValue({key: (ConstValue(key), as_value(item)) for key, item in nest.items()})
    if type(nest) in (tuple, list):
        return (TupleValue if type(nest) is tuple else ListValue)([as_value(item) for item in nest])
    raise Break("object", name=type(nest).__qualname__)


def as_args(m: Machine, args: Args, kwargs: Kwargs) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Positional and named arguments, each as (arguments of a node, abstract values)."""
    given, named = TupleValue(args).as_arg(m), {name: m.look(value).as_arg(m) for name, value in kwargs.items()}
    return given, ({name: pair[0] for name, pair in named.items()}, {name: pair[1] for name, pair in named.items()})


class TransformValue(Value):
    """torch.func.grad(f), torch.vmap(f), ..."""

    words = "torch.func.{self.name} of a function"
    always_true = True

    def __init__(self, name: str, fn: Value, options: dict[str, Any]):
        self.name, self.fn, self.options = name, fn, options

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        given, named = as_args(m, args, kwargs)
        leaves = run_abstract(m, INSIDE[self.name], [given[1], named[1], self.options], {}, f"torch.func.{self.name}")
        body, options, name = Body(m, self.fn, args, kwargs, leaves), self.options, self.name
        return transformed(m, name, body, lambda fn, a, k: getattr(torch.func, name)(fn, **options)(*a, **k), given, named)

    def rebuild(self, e: Emitter) -> str:
        return f"{e.constant(getattr(torch.func, self.name))}({e.expr(self.fn)}, **{e.constant(self.options)})"


class DerivativeValue(Value):
    """The function that torch.func.vjp or torch.func.linearize gives: `differentiate(the function, primals, its arguments)`."""

    always_true = True

    def __init__(self, name: str, body: Body, primals: tuple[Any, Any], differentiate: Callable[..., Any]):
        self.name, self.body, self.primals, self.differentiate = name, body, primals, differentiate

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        return transformed(m, self.name, self.body, self.differentiate, self.primals, as_args(m, args, kwargs)[0])


# -- the functions ------------------------------------------------------------------------------------------------------
def _maker(name: str, names: tuple[str, ...], m: Machine, args: Args, kwargs: Kwargs) -> Value:
    given = {**dict(zip(names, args)), **kwargs}
    fn = given.pop("func", None)
    if fn is None or given.keys() - set(names):
        raise Break("transform", name=f"by torch.func.{name} with settings of its own")
    return TransformValue(name, m.look(fn), {option: m.known(m.look(value)) for option, value in given.items()})


def _made_outside(name: str, names: tuple[str, ...], defaults: dict[str, Any], m: Machine, closure: dict[str, Value]) -> Value:
    """torch.vmap(f) made outside of the region: the same by its closure.  Settings that we do not take must have their defaults."""
    if any(m.known(closure[option]) != default for option, default in defaults.items() if option in closure):
        raise Break("transform", name=f"by torch.func.{name} with settings of its own")
    return _maker(name, names, m, [], {option: value for option, value in closure.items() if option in names})


for _name, _inner, _names, _defaults in (       # _inner: the name of the function that the transform gives
        ("grad", "wrapper", ("func", "argnums", "has_aux"), {}),
        ("grad_and_value", "wrapper", ("func", "argnums", "has_aux"), {}),
        ("vmap", "wrapped", ("func", "in_dims", "out_dims", "randomness", "chunk_size"), {}),
        ("jacrev", "wrapper_fn", ("func", "argnums", "has_aux", "chunk_size"), {"_preallocate_and_copy": False}),
        ("jacfwd", "wrapper_fn", ("func", "argnums", "has_aux", "randomness"), {}),
        ("hessian", "", ("func", "argnums"), {})):      # gives a function of jacfwd's
    BY_NAME.add(f"torch.func.{_name}", functools.partial(_maker, _name, _names))
    if _inner:
        TRANSFORMED.add(f"{_name}.<locals>.{_inner}", functools.partial(_made_outside, _name, _names, _defaults))


@BY_NAME.row("torch.func.functionalize")
def call_functionalize(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """The function itself: what the graph makes of mutations is not the program's affair."""
    return m.look(args[0] if args else kwargs["func"])


@BY_NAME.row("torch.func.vjp")
def call_vjp(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    has_aux = known_settings(m, "vjp", kwargs, ("has_aux",)).get("has_aux", False)
    primals, _ = as_args(m, args[1:], {})
    leaves = run_abstract(m, differentiated, [primals[1], {}, {"argnums": tuple(range(len(args) - 1))}], {}, "torch.func.vjp")
    out, pull_back = value_and_derivative(m, "vjp", args, primals, leaves,
                                          lambda fn, primals, cotangents: torch.func.vjp(fn, *primals, has_aux=has_aux)[1](*cotangents))
    if not has_aux:
        return TupleValue([out, pull_back])
    if not isinstance(out, TupleValue) or len(out.items) != 2:
        raise Break("transform", name="by torch.func.vjp with has_aux of a function that does not give a pair")
    return TupleValue([out.items[0], pull_back, out.items[1]])


@BY_NAME.row("torch.func.linearize")
def call_linearize(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if kwargs:
        raise Break("transform", name="by torch.func.linearize with settings of its own")
    primals, _ = as_args(m, args[1:], {})
    leaves = run_abstract(m, pytree.tree_leaves, [primals[1]], {}, "torch.func.linearize")
    return TupleValue([*value_and_derivative(m, "linearize", args, primals, leaves,
                                             lambda fn, primals, tangents: torch.func.jvp(fn, primals, tangents)[1])])


def value_and_derivative(m: Machine, name: str, args: Args, primals: tuple[Any, Any], leaves: list[Any],
                         differentiate: Callable[..., Any]) -> tuple[Value, Value]:
    """The value and each call of the derivative run the function again."""
    draws = m.world.draws
    body = Body(m, m.look(args[0]), args[1:], {}, leaves)
    if m.world.draws > draws:
        raise Break("transform", name=f"by torch.func.{name} of a function that draws random numbers")
    return transformed(m, f"{name}_value", body, lambda fn, primals: fn(*primals), primals), DerivativeValue(name, body, primals, differentiate)


def known_settings(m: Machine, name: str, kwargs: Kwargs, allowed: tuple[str, ...]) -> dict[str, Any]:
    if kwargs.keys() - set(allowed):
        raise Break("transform", name=f"by torch.func.{name} with settings of its own")
    return {option: m.known(m.look(value)) for option, value in kwargs.items()}


@BY_NAME.row("torch.func.jvp")
def call_jvp(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if len(args) != 3:
        raise Break("transform", name="by torch.func.jvp with settings of its own")
    settings = known_settings(m, "jvp", kwargs, ("has_aux", "strict"))
    primals, tangents = (m.look(value) for value in args[1:])
    if not isinstance(primals, TupleValue) or not isinstance(tangents, TupleValue):
        raise Break("transform", name="by torch.func.jvp without tuples")
    given, directions = primals.as_arg(m), tangents.as_arg(m)
    body = Body(m, m.look(args[0]), primals.items, {}, run_abstract(m, pytree.tree_leaves, [given[1]], {}, "torch.func.jvp"))
    return transformed(m, "jvp", body, functools.partial(torch.func.jvp, **settings), given, directions)
