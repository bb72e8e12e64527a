"""Either: a number or a tensor of no dimension, or an int or a float, as the two ways of a branch on data left it (joins.py).

    ratio = 1 if norm == 0 else weight_norm / norm      # an int or a tensor
    step.mul_(-rate * ratio)                            # where(flag, -rate * 1, -rate * quotient)

Arithmetic with numbers gives another one.  Beside tensors of its dtype, torch takes both alike, so it is given one tensor.  Beside floats, an int
or a float is a float.  All else breaks: the run function decides then which of the two it is.
"""
from __future__ import annotations

from typing import Any

import torch

from firesteel.capture.protocols import Args, Emitter, Machine
from firesteel.capture.python_operators import OPERATORS
from firesteel.capture.values.base import UserRaise, Value
from firesteel.capture.values.number import is_number
from firesteel.capture.values.tensor import TensorValue
from firesteel.capture.values.torch_calls import call_graph
from firesteel.errors import Break

DTYPES = frozenset({torch.float32, torch.float64})      # in which torch computes with numbers as they are


class OfTwo(Value):
    """A number, or `other` where `flag`, a tensor, is false."""

    is_argument = is_either = True

    def __init__(self, flag: TensorValue, number: Value, other: Any):
        self.flag, self.number, self.other = flag, number, other

    def one(self, m: Machine) -> Value:
        """Both as one value, for whoever makes no difference between them."""
        raise NotImplementedError

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        if isinstance(other, TensorValue):
            return call_graph(m, "call_function", OPERATORS[op], [other, self] if reflected else [self, other], {})
        return self.with_number(m, op, other, reflected, m.binary) if is_number(other) else None

    def with_number(self, m: Machine, op: str, other: Value, reflected: bool, operate: Any) -> Value | None:
        raise NotImplementedError

    def truth(self, m: Machine) -> bool:
        raise Break("data_branch", value=self.describe())

    def decided_by(self, m: Machine) -> Value:
        return self.one(m)

    def rebuild(self, e: Emitter) -> str:
        return f"({e.expr(self.number)} if {e.graph_output(self.flag)} else {e.expr(self.other)})"


class Either(OfTwo):
    """A number, or a tensor of no dimension."""

    words = "a number or a tensor"

    @staticmethod
    def may_be(number: Value, tensor: torch.Tensor) -> bool:
        return is_number(number) and number.python_type() is not bool and not tensor.dim() and tensor.dtype in DTYPES

    def one(self, m: Machine) -> Value:
        return call_graph(m, "call_function", torch.where, [self.flag, self.number, self.other], {})

    def beside(self, m: Machine, others: Args) -> Value:
        dtypes = {other.abstract.dtype for other in others if isinstance(other, TensorValue)}
        return self.one(m) if dtypes == {self.other.abstract.dtype} else self

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        if isinstance(other, TensorValue):
            return self.binary(m, op, other)
        return self.with_number(m, op, other, False, m.compare) if is_number(other) else None

    def with_number(self, m: Machine, op: str, other: Value, reflected: bool, operate: Any) -> Value | None:
        try:
            number, tensor = (operate(op, *((other, mine) if reflected else (mine, other))) for mine in (self.number, self.other))
        except UserRaise:       # of one of the two
            raise Break("operator", name=op, value=self.describe()) from None
        return Either(self.flag, number, tensor)


class IntOrFloat(OfTwo):
    """An int that is known, or a float; `other` is it as a float."""

    words = "an int or a float"

    @staticmethod
    def may_be(number: Value) -> bool:
        return number.is_constant() and type(number.constant()) is int and abs(number.constant()) < 2 ** 53

    def one(self, m: Machine) -> Value:
        return self.other

    def beside(self, m: Machine, others: Args) -> Value:
        tensors = [other.abstract for other in others if isinstance(other, TensorValue)]
        return self.other if tensors and all(tensor.is_floating_point() for tensor in tensors) else self

    def with_number(self, m: Machine, op: str, other: Value, reflected: bool, operate: Any) -> Value | None:
        if other.python_type() is not float or op not in ("+", "-", "*", "/"):
            raise Break("operator", name=op, value=self.describe())
        return operate(op, *((other, self.other) if reflected else (self.other, other)))
