"""torch.utils.checkpoint inside of the program.

A call of `checkpoint` is one node over a graph of the function (autograd/regions.py), whose nodes are tagged, so that the partitioner recomputes
them in the backward.  Where the function has hooks, or changes the user's objects, it is inlined instead, and its nodes are tagged
all the same.  Where it breaks, the call is the break: a part of a region cannot be recomputed, so eager's checkpointing runs it.

Selective checkpointing: the context_fn is called when the region is traced.  What it reads is not guarded beyond its code: a policy that changes
its mind later keeps the values that it chose at first.
"""
from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree

from firesteel.autograd.recomputations import UNPACKING, SavedTensors, recompute
from firesteel.autograd.regions import REGION_CALL, Tags, inlined, nested
from firesteel.capture import polyfills
from firesteel.capture.meanings import BY_CODE, CALLS
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import NONE, ConstValue
from firesteel.capture.values.containers import Sequence
from firesteel.capture.values.functions import Args, BoundMethodValue, FunctionValue, Kwargs, PartialValue
from firesteel.capture.values.mappings import DictValue
from firesteel.capture.values.messages import replay
from firesteel.capture.values.tensor import TensorValue
from firesteel.capture.values.torch_calls import run_abstract
from firesteel.capture.values.transforms import Body, as_args, items_of, plain
from firesteel.errors import Break

OPTIONS = ("use_reentrant", "context_fn", "preserve_rng_state", "determinism_check", "debug", "early_stop")
PLAIN = torch.utils.checkpoint.noop_context_fn


@CALLS.row(torch.utils.checkpoint.checkpoint)
def call_checkpoint(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    rest = {name: value for name, value in kwargs.items() if name not in options}
    context_fn = real_callable(m, options.pop("context_fn")) if "context_fn" in options else PLAIN
    if "debug" in options and options["debug"].truth(m):
        raise Break("region", text="checkpoint with debug=True")
    given = options.get("use_reentrant", NONE)
    if given is NONE:
        say(m, "torch.utils.checkpoint.checkpoint was called without use_reentrant: True is taken.")
    if given is NONE or given.truth(m):
        if rest or context_fn is not PLAIN:
            raise Break("region", text="a reentrant checkpoint with keyword arguments")
        if not any(map(needs_gradient, args[1:])):
            say(m, "No argument of a reentrant checkpoint requires grad: there will be no gradients.")
            args = [m.constant_object(polyfills.without_gradients), *args]
    settings = {name: m.known(m.look(value)) for name, value in options.items()} | {"context_fn": context_fn}
    return region(m, args, rest, settings, tags_of(m, context_fn))


@BY_CODE.row(*UNPACKING)
def call_unpacking(m: Machine, fn: Value, args: Args, kwargs: Kwargs) -> Value:
    """Where a region is not recomputed as a whole (autograd/recomputations.py), eager does it: it counts the tensors that are saved."""
    raise Break("disabled", name="the recomputation of a checkpoint", text=": its tensors are saved one by one")


@BY_CODE.row(torch.utils.checkpoint.CheckpointFunction.backward.__code__)
def call_reentrant(m: Machine, fn: Value, args: Args, kwargs: Kwargs) -> Value:
    """Run again, and differentiated, inside of the graph.  A backward to some leaves alone is an error of eager's."""
    if not torch.autograd._is_checkpoint_valid():
        raise Break("region", text="a reentrant checkpoint in a backward to some leaves")
    draws = m.world.draws
    result = m.call_now(m.constant_object(polyfills.reentrant_backward), args, kwargs)
    if m.world.draws > draws:
        raise Break("random_state", name="a reentrant checkpoint that draws random numbers")
    return result


# -- regions that eager checkpointed --------------------------------------------------------------------------------------
@CALLS.row(recompute)
def call_recompute(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """One node: the region's function on its arguments, and out of it what autograd saves while it runs, up to the last tensor that eager saved."""
    region, tensors = m.look(args[0]), m.look(args[1])
    fields: Any = {name: m.look(region.getattr(m, name)) for name in FIELDS}
    draws = m.world.draws
    body, given = body_of(m, fields, tensors)
    states: Any = [m.look(pair) for pair in fields["states"].items] if m.world.draws > draws else []
    drawn = [m.look(pair.items[1]).as_arg(m) for pair in states]
    saving = SavedTensors(body, [getattr(leaf, "requires_grad", False) for _, leaf in given], m.known(fields["count"]),
                          m.known(fields["early_stop"]), [m.known(pair.items[0]) for pair in states])
    run = functools.partial(saving, run=inlined(m.world.function), swap=nothing, put_back=nothing)
    out = run_abstract(m, run, [[leaf for _, leaf in given], [leaf for _, leaf in drawn]], {}, "checkpoint of a function")
    check_saved(out, region.identity().expected)
    node = m.record.call_function(saving, ([node for node, _ in given], [node for node, _ in drawn]), {}, out)
    return items_of(m, node, out, pytree.tree_structure(out))


FIELDS = ("fn", "kwargs", "args", "tensors", "autocasts", "states", "count", "early_stop")      # of a Recomputation


def body_of(m: Machine, fields: Any, tensors: Any) -> tuple[torch.fx.GraphModule, list[tuple[Any, Any]]]:
    """The graph of a region's function, and what it takes: nodes, with what they are."""
    args = list(fields["args"].items)
    for place, tensor in zip(m.known(fields["tensors"]), tensors.items):
        args[place] = tensor
    kwargs = {key: value for key, (_, value) in fields["kwargs"].know_all(m).items()}
    given, named = as_args(m, args, kwargs)
    nodes, abstract = pytree.tree_leaves((given[0], named[0])), pytree.tree_leaves((given[1], named[1]))
    leaves = run_abstract(m, pytree.tree_map_only, [torch.Tensor, tracked, abstract], {}, "checkpoint of a function")
    fn = PartialValue(functools.partial, m.constant_object(polyfills.run_again), [fields["fn"], fields["autocasts"]], {})
    body = Body(m, fn, args, kwargs, leaves)
    if any(node.target is REGION_CALL or getattr(node.target, "on_saved_tensors", False) for node in body.module.graph.nodes):
        raise Break("region", text="a checkpoint of eager with checkpoints or hooks on saved tensors inside")
    make_flat(body.module, leaves)
    return body.module, [*((node, leaf) for node, leaf in zip(nodes, leaves) if isinstance(leaf, torch.Tensor)),
                         *((node, node.meta["val"]) for node in body.lifted)]


def check_saved(found: Any, expected: list[dict[str, Any] | None]) -> None:
    """Are they what eager saved?"""
    for tensor, about in zip(found, expected):
        if about is not None and (tensor.dtype, tensor.device, tensor.dim()) != (about["dtype"], about["device"], len(about["shape"])):
            raise Break("region", text="a checkpoint of eager that saves other tensors when it runs again")


def nothing(state: torch.Tensor, device: torch.device) -> None:
    """Abstract tensors are drawn from no generator."""


def tracked(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().requires_grad_(leaf.requires_grad)


# -- the region ---------------------------------------------------------------------------------------------------------
def region(m: Machine, args: Args, kwargs: Kwargs, settings: dict[str, Any], tags: Tags) -> Value:
    try:
        return region_node(m, args, kwargs, settings, tags)
    except Break:       # then the call is no whole
        pass
    try:
        return inline(m, args, kwargs, tags)
    except Break as stop:
        raise Break("region", location=stop.location, text=stop.sentence) from stop


def region_node(m: Machine, args: Args, kwargs: Kwargs, settings: dict[str, Any], tags: Tags) -> Value:
    given, named = as_args(m, args[1:], kwargs)
    nodes, leaves = pytree.tree_leaves((given[0], named[0])), pytree.tree_leaves((given[1], named[1]))
    tags = tags_inside(m, tags)
    body = Body(m, args[0], args[1:], kwargs, leaves, tags)
    if any(getattr(node.target, "on_saved_tensors", False) for node in body.module.graph.nodes):
        raise Break("hook", name="hooks on saved tensors inside of a checkpointed region")     # they see what eager's recomputation saves
    structure = make_flat(body.module, leaves)
    body.module.meta["checkpoint"] = {**settings, "use_reentrant": False}   # reentrant checkpoints forbid gradients taken in the graph
    tensors = [(node, leaf) for node, leaf in zip(nodes, leaves) if isinstance(leaf, torch.Tensor)]
    tensors += [(node, node.meta["val"]) for node in body.lifted]
    out = run_abstract(m, functools.partial(inlined(m.world.function), body.module), [leaf for _, leaf in tensors], {}, "checkpoint of a function")
    attribute = m.record.body("checkpoint_body", body.module)
    node = m.record.call_function(REGION_CALL, (attribute, *(node for node, _ in tensors)), {}, out)
    node.meta.update(tags)
    return items_of(m, node, out, structure)


def make_flat(module: torch.fx.GraphModule, leaves: list[Any]) -> Any:
    """Makes the body a function of its tensors that gives a flat tuple; the structure of what it gave."""
    graph = module.graph
    for placeholder, leaf in zip(list(graph.nodes), leaves):
        if not isinstance(leaf, torch.Tensor):      # its value was taken in
            graph.erase_node(placeholder)
    output = graph.output_node()
    results, structure = pytree.tree_flatten(plain(output.args[0]))
    output.args = (tuple(results),)
    module.recompile()
    return structure


def inline(m: Machine, args: Args, kwargs: Kwargs, tags: Tags) -> Value:
    before = len(m.frames)
    result = args[0].call(m, args[1:], kwargs)
    if len(m.frames) > before:
        m.frames[-1].tags = tags
    return m.finish_now(result)


def say(m: Machine, text: str) -> None:
    replay(m, warnings.warn, [ConstValue(text)], {})


def needs_gradient(value: Value) -> bool:
    """A reentrant checkpoint looks at its own arguments, not into lists."""
    return isinstance(value, TensorValue) and value.abstract.requires_grad


# -- policies -----------------------------------------------------------------------------------------------------------
def tags_of(m: Machine, context_fn: Any) -> Tags:
    name = f"checkpoint_{m.steps}"
    return {"recompute": "must", "region": name, "policies": () if context_fn is PLAIN else ((name, context_fn),)}


def tags_inside(m: Machine, tags: Tags) -> Tags:
    """The tags of a region, with those of a region around it that was inlined."""
    outer = m.region_tags()
    return nested(outer, tags) if outer else tags


def real_callable(m: Machine, value: Value) -> Any:
    """The object itself, or for one that was made inside its like: functions with their closures, partials, containers."""
    value = m.look(value)
    if isinstance(value, PartialValue) and value.obj is None:
        named = {name: real_callable(m, v) for name, v in value.kwargs.items()}
        return value.cls(real_callable(m, value.fn), *(real_callable(m, v) for v in value.args), **named)
    if isinstance(value, FunctionValue):
        value.use(m)
        return value.fn if value.fn is not None else real_function(m, value)
    if isinstance(value, BoundMethodValue):
        return types.MethodType(real_callable(m, value.fn), real_callable(m, value.owner))
    if isinstance(value, Sequence):
        return value.make([real_callable(m, item) for item in value.items])
    if isinstance(value, DictValue):
        return {real_callable(m, key): real_callable(m, item) for key, item in value.know_all(m).values()}
    return m.known(value) if value.is_constant() else m.real_object(value)


def real_function(m: Machine, value: FunctionValue) -> types.FunctionType:
    cells = tuple(types.CellType() if (content := cell.get(m)) is None else types.CellType(real_callable(m, content)) for cell in value.closure)
    made = types.FunctionType(value.code, value.scope, value.name, tuple(real_callable(m, d) for d in value.defaults), cells)
    made.__kwdefaults__ = {name: real_callable(m, d) for name, d in value.kwdefaults.items()} or None
    return made
