"""bool(value), `not value`, `flag is True`: a number where only run time knows the answer, so that a branch on it is one on data (joins.py).

    bad = bool(x.isnan().any())         # bad = x.isnan().any().item()
"""
from __future__ import annotations

import operator

import torch

from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import ConstValue, boolean
from firesteel.capture.values.number import SymNumber, ask, symbolic_call
from firesteel.capture.values.tensor import TensorValue
from firesteel.capture.values.torch_calls import call_graph
from firesteel.capture.values.wrappers import is_wrapper_class
from firesteel.config import config
from firesteel.errors import Break


def asked(m: Machine, value: Value, negated: bool = False) -> Value:
    """bool(value), or `not value`."""
    try:
        return boolean(value.truth(m) != negated)
    except Break as stop:
        answer = at_run_time(m, value) if stop.kind == "data_branch" else None
        if answer is None:
            raise
    return symbolic_call(m, torch.sym_not, [answer]) if negated else answer


def is_same(m: Machine, a: Value, b: Value, negated: bool = False) -> Value:
    """a is b, or `a is not b`.  There is one True, also where only run time knows which a flag is."""
    a, b = m.look(a), m.look(b)
    if SymNumber in (type(a), type(b)) and a.python_type() is b.python_type() is bool:
        return m.compare("!=" if negated else "==", a, b)
    return boolean(m.identical(a, b) != negated)


def at_run_time(m: Machine, value: Value) -> Value | None:
    """The answer as a number that run time knows; None where the graph cannot have it."""
    if isinstance(value, SymNumber):
        return value if value.python_type() is bool else value.compare(m, "!=", ConstValue(0))
    if not isinstance(value, TensorValue) or is_wrapper_class(type(value.abstract)) or m.world.env is None or m.bodies or m.modes.entered:
        return None
    if value.abstract.dtype.is_complex or not ask(bool, value.abstract.shape.numel() == 1):
        return None
    flag = value if value.abstract.dtype is torch.bool else call_graph(m, "call_function", operator.ne, [value, ConstValue(0)], {})
    with config.patch(capture_scalar_outputs=True):
        return call_graph(m, "call_method", "item", [flag], {})
