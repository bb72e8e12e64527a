"""torch.utils.checkpoint inside of the program.

`checkpoint` is one node over a graph of the function (transforms.py), whose nodes are
tagged, so that the partitioner recomputes them in the backward; a backend that runs the graph as it is calls torch's own checkpoint.  Where the
function breaks, has hooks, or changes the user's objects, it is inlined instead, and its nodes are tagged all the same.
"""
from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree

from firesteel.capture import polyfills
from firesteel.capture.values.base import PENDING, Value
from firesteel.capture.values.const import NONE, ConstValue
from firesteel.capture.values.functions import CALLS, Args, Kwargs
from firesteel.capture.values.messages import replay
from firesteel.capture.values.tensor import TensorValue
from firesteel.capture.values.transforms import Body, as_args, transformed
from firesteel.errors import Break

if TYPE_CHECKING:
    from firesteel.capture.machine import Machine

OPTIONS = ("use_reentrant", "context_fn", "preserve_rng_state", "determinism_check", "debug", "early_stop")


@CALLS.row(torch.utils.checkpoint.checkpoint)
def call_checkpoint(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    rest = {name: value for name, value in kwargs.items() if name not in options}
    if "context_fn" in options or "debug" in options and m.truth_now(options["debug"]):
        raise Break("call", name="checkpoint with settings of its own")
    given = options.get("use_reentrant", NONE)
    if given is NONE:
        say(m, "torch.utils.checkpoint.checkpoint was called without use_reentrant: True is taken.")
    if given is NONE or m.truth_now(given):
        if rest:
            raise Break("call", name="a reentrant checkpoint with keyword arguments")
        if not any(map(needs_gradient, args[1:])):
            say(m, "No argument of a reentrant checkpoint requires grad: there will be no gradients.")
            args = [m.constant_object(polyfills.without_gradients), *args]
    tags = {"recompute": "must", "region": f"checkpoint_{m.steps}"}
    try:
        return checkpoint_node(m, args, rest, {name: m.known(m.look(value)) for name, value in options.items()}, tags)
    except Break:       # then the call is no whole
        return inlined(m, args, rest, tags)


def checkpoint_node(m: Machine, args: Args, kwargs: Kwargs, options: dict[str, Any], tags: dict[str, str]) -> Value:
    given, named = as_args(m, args[1:], kwargs)
    body = Body(m, args[0], args[1:], kwargs, pytree.tree_leaves((given[1], named[1])), tags)
    settings = {**options, "use_reentrant": False}      # the other way forbids gradients that are taken in the graph, and gives the same ones
    return transformed(m, "checkpoint", body, lambda fn, a, k: torch.utils.checkpoint.checkpoint(fn, *a, **settings, **k), given, named,
                       inline=lambda fn, a, k: fn(*a, **k))


def inlined(m: Machine, args: Args, kwargs: Kwargs, tags: dict[str, str]) -> Value:
    result = args[0].call(m, args[1:], kwargs)
    if result is PENDING:
        m.frames[-1].tags = tags
    return result


def say(m: Machine, text: str) -> None:
    replay(m, warnings.warn, [ConstValue(text)], {})


def needs_gradient(value: Value) -> bool:
    """A reentrant checkpoint looks at its own arguments, not into lists."""
    return isinstance(value, TensorValue) and value.abstract.requires_grad
