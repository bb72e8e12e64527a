"""Functions of torch's core that neither take nor give tensors: they ask for a state of torch, or change one.

What the program asked for is guarded: the same question has the same answer in later calls.  A function of which nothing says that it only
asks is called for real, at a break.  States that a program may change inside of a region have rows of their own (contexts.py).

    if torch.is_anomaly_enabled(): ...          # a guard; torch.backends.cudnn.enabled is read in the same way
"""
from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from firesteel.capture.guards import Guard
from firesteel.capture.source import Call, Fixed
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import NONE, is_constant_object
from firesteel.capture.values.contexts import STATES, set_state
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.torch_calls import SETTERS, TorchFunctionValue
from firesteel.errors import Break

if TYPE_CHECKING:
    from firesteel.capture.machine import Machine

OPERATORS = ("torch._C._nn", "torch._C._fft", "torch._C._linalg", "torch._C._special", "torch._C._sparse", "torch._C._nested")
CHANGES = SETTERS | {"enable", "disable", "start", "stop", "init", "add", "register", "begin", "end"}
ASKS = re.compile(r"(?:^|_)(?:is|are|get|has|can|len|current|will|num|supports|promote|result|maybe)(?:_|[A-Z]|$)"
                  r"|enabled|available|allowed|count|version")
NO_MEANING = frozenset({"_log_api_usage_once", "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"})     # inside of one graph
CHANGED_INSIDE = frozenset(row.get for row in STATES.values()) | {torch.is_inference_mode_enabled}


def is_core_function(fn: Any) -> bool:
    """Is it a function of torch._C or a module in it, but no operator?"""
    home, name = getattr(fn, "__module__", None) or "", getattr(fn, "__name__", "")
    if getattr(torch._C, name, None) is fn:
        return not hasattr(torch._C._VariableFunctions, name)
    if not home.startswith("torch._C._") or home in OPERATORS:
        return False
    module: Any = torch
    for part in home.split(".")[1:]:
        module = getattr(module, part, None)
    return getattr(module, name, None) is fn


@dataclass(frozen=True)
class Question:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@functools.cache
def question(asked: Question) -> Question:
    """The same object for the same question, so that it is guarded once."""
    return asked


def answer(asked: Question) -> Any:
    return asked.fn(*asked.args, **dict(asked.kwargs))


class CoreFunction(TorchFunctionValue):
    """A function of torch's core."""

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        name = self.fn.__name__
        if not all(m.look(value).is_constant() for value in (*args, *kwargs.values())):
            return super().call(m, args, kwargs)
        if name in NO_MEANING:
            return NONE
        if not CHANGES.isdisjoint(name.split("_")) or not ASKS.search(name):
            raise Break("call", name=name)
        asked = Question(self.fn, tuple(map(m.known, args)), tuple((key, m.known(value)) for key, value in kwargs.items()))
        found = m.run_real(answer, asked)
        if not is_constant_object(found):
            return super().call(m, args, kwargs)
        if self.fn not in CHANGED_INSIDE:
            m.guard(Guard(Call(Fixed(question(asked), name), answer), "equals", answer_at_start(m, asked)))
        return m.fresh(found)


def answer_at_start(m: Machine, asked: Question) -> Any:
    """What it was before the program changed states inside of the region."""
    changed = m.changed_states()
    for key, _ in changed:
        set_state(key, m.initial_states[key])
    try:
        return answer(asked)
    finally:
        for key, value in changed:
            set_state(key, value)
