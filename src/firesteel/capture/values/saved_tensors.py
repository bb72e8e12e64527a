"""torch.autograd.graph.saved_tensors_hooks and save_on_cpu entered inside: the hooks are set and taken away for real, at seams.

What is between them is compiled on its own (autograd/segments.py), and what its autograd function saves goes through the hooks, as all that is
saved does.  Which tensors those are is the partitioner's choice, not eager's.

    with save_on_cpu(): y = x.sin() * x         # set_hooks(); y = ...; take_hooks()
"""
from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import NONE
from firesteel.capture.values.functions import Args, BoundMethodValue, FunctionValue, Kwargs
from firesteel.errors import Break

SET, TAKE = torch._C._autograd._push_saved_tensors_default_hooks, torch._C._autograd._pop_saved_tensors_default_hooks


def real_function(m: Machine, value: Value) -> Callable[..., Any]:
    """The function itself; one made inside is made now, where all that it holds is known."""
    value = m.look(value)
    if isinstance(value, BoundMethodValue) and value.owner.identity() is None:
        raise Break("argument", value=value.describe())
    if not isinstance(value, FunctionValue) or value.identity() is not None:
        return m.real_object(value)
    cells = tuple(types.CellType(_held(m, cell.get(m))) for cell in value.closure)
    made = types.FunctionType(value.code, value.scope, value.name, tuple(_held(m, v) for v in value.defaults) or None, cells or None)
    made.__kwdefaults__ = {name: _held(m, v) for name, v in value.kwdefaults.items()} or None
    return made


def _held(m: Machine, value: Value | None) -> Any:
    if value is None:
        raise Break("argument", value="a function with an empty cell")
    return real_function(m, value) if isinstance(m.look(value), FunctionValue) else m.real_object(value)


@CALLS.row(SET)
def call_set(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if m.region_tags():
        raise Break("hook", name="hooks on saved tensors inside of a checkpointed region")
    pack, unpack = (real_function(m, value) for value in args)

    def set_hooks() -> None:
        SET(pack, unpack)

    set_hooks.made_for_real = set_hooks.on_saved_tensors = True     # type: ignore[attr-defined]
    m.record.call_function(set_hooks, (), {}, None)
    return NONE


@CALLS.row(TAKE)
def call_take(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    m.record.call_function(take_hooks, (), {}, None)
    return NONE


def take_hooks() -> None:
    TAKE()


take_hooks.made_for_real = True         # type: ignore[attr-defined]
