"""Functions of torch's core that ask for a state of torch (`STATE_QUERIES` of meanings.py).

What the program asked for is guarded: the same question has the same answer in later calls.  A function of which nothing says that it only
asks is called for real, at a break.  States that a program may change inside of a region have rows of their own (contexts.py).

    if torch.is_anomaly_enabled(): ...          # a guard; torch.backends.cudnn.enabled is read in the same way
"""
from __future__ import annotations

from typing import Any

import torch

from firesteel.capture.guards import Guard, StateQuery, answer, question
from firesteel.capture.protocols import Machine
from firesteel.capture.services import STATES, set_state
from firesteel.capture.source import Call, Fixed
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import is_constant_object
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.torch_calls import TorchFunctionValue

CHANGED_INSIDE = frozenset(row.get for row in STATES.values()) | {torch.is_inference_mode_enabled}


class CoreFunction(TorchFunctionValue):
    """A function of torch's core that only asks."""

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if not all(m.look(value).is_constant() for value in (*args, *kwargs.values())):
            return super().call(m, args, kwargs)
        asked = StateQuery(self.fn, tuple(map(m.known, args)), tuple((key, m.known(value)) for key, value in kwargs.items()))
        found = m.run_real(answer, asked)
        if not is_constant_object(found):
            return super().call(m, args, kwargs)
        if self.fn not in CHANGED_INSIDE:
            guard_answer(m, asked)
        return m.fresh(found)


def guard_answer(m: Machine, asked: StateQuery) -> None:
    m.guard(Guard(Call(Fixed(question(asked), asked.fn.__name__), answer), "equals", answer_at_start(m, asked)))


def answer_at_start(m: Machine, asked: StateQuery) -> Any:
    """What it was before the program changed states inside of the region."""
    changed = m.states.changed()
    for key, _ in changed:
        set_state(key, m.states.initial[key])
    try:
        return answer(asked)
    finally:
        for key, value in changed:
            set_state(key, value)
