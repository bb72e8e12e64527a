"""SymNumber: a Python number that is a symbol: a size of a dynamic dimension, an int or float argument that changed.

It holds the `torch.SymInt`/`SymFloat`/`SymBool` of the shape environment; operators are executed on that, and every
yes/no question about it is answered (and recorded as a guard) by the environment.  Nodes for it appear in the graph
only where it is used as an argument of a torch call.
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from firesteel.capture.values.base import Value
from firesteel.capture.values.const import ConstValue, is_constant_object
from firesteel.errors import Break, DataDependentError
from firesteel.sym.symint import sym_ite

if TYPE_CHECKING:
    from firesteel.capture.emit import Emitter
    from firesteel.capture.machine import Machine

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
PYTHON_TYPES = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}

LOGICAL = frozenset("&|^")      # of two bools they give a bool; all other operators take bools as 0 and 1
CONVERSIONS: dict[type, Callable[[Any], Any]] = {int: torch.sym_int, float: torch.sym_float}

MakeNode = Callable[[], torch.fx.Node]


def number(m: Machine, result: Any, make_node: MakeNode) -> Value:
    """The Value of a number that an operation on symbols gave; `make_node` computes it in the graph if asked."""
    if isinstance(result, SYMBOLIC):
        return SymNumber(result, make_node)
    if is_constant_object(result):
        return ConstValue(result)
    raise Break("object", name=type(result).__qualname__)


def symbolic_call(m: Machine, fn: Callable[..., Any], operands: list[Value]) -> Value:
    """fn on numbers of which some are symbols."""
    reals = [m.number_of(v) for v in operands]
    result = ask(fn, *reals)
    made = number(m, result, lambda: m.record.call_function(fn, tuple(v.as_arg(m)[0] for v in operands), {}, result))
    if isinstance(made, SymNumber):
        made.operands = tuple(v for v in operands if isinstance(v, SymNumber))
    return made


def ask(fn: Callable[..., Any], *args: Any) -> Any:
    """Executes something on symbols; a question that only run time can answer is a break."""
    try:
        return fn(*args)
    except DataDependentError as error:
        raise Break("data_branch", error=error, value=error.reason) from None


def converted(m: Machine, value: Value, cls: type) -> Value:
    """int(value) or float(value) of a number."""
    if not isinstance(value, SymNumber):
        return ConstValue(cls(value.constant()))
    if value.python_type() is cls:
        return value
    if value.python_type() is bool:
        value = symbolic_call(m, sym_ite, [value, ConstValue(1), ConstValue(0)])
        return value if cls is int else symbolic_call(m, torch.sym_float, [value])
    return symbolic_call(m, CONVERSIONS[cls], [value])


class SymNumber(Value):
    """A symbolic int, float or bool."""

    operands: tuple[SymNumber, ...] = ()        # what it was computed from

    def __init__(self, sym: Any, make_node: MakeNode, source: Any = None):
        self.sym, self.make_node, self.source = sym, make_node, source

    def python_type(self) -> type:
        return PYTHON_TYPES[type(self.sym)]

    def describe(self) -> str:
        return f"symbolic {self.python_type().__name__} {self.sym}"

    def specialize(self, m: Machine) -> ConstValue:
        """The number itself, under a guard."""
        return ConstValue(ask(self.python_type(), self.sym))

    def hash_key(self, m: Machine) -> Any:
        return self.specialize(m).value

    def truth(self, m: Machine) -> bool:
        return ask(bool, self.sym)

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        if not is_number(other):
            return None
        operands = [other, self] if reflected else [self, other]
        if op not in LOGICAL or any(v.python_type() is not bool for v in operands):
            operands = [converted(m, v, int) if v.python_type() is bool else v for v in operands]
        return symbolic_call(m, m.operators[op], operands)

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        if not is_number(other):
            return None
        return symbolic_call(m, m.operators[op], [self, other])

    def unary(self, m: Machine, op: str) -> Value:
        if op == "not":
            return ConstValue(not self.truth(m))
        number = converted(m, self, int) if self.python_type() is bool else self
        if op == "~":       # torch's carriers cannot
            return symbolic_call(m, operator.sub, [ConstValue(-1), number])
        return symbolic_call(m, m.unary_operators[op], [number])

    def getattr(self, m: Machine, name: str) -> Value:
        return self.specialize(m).getattr(m, name)

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        return m.record.node_of(self), self.sym

    def rebuild(self, e: Emitter) -> str:
        return e.graph_output(self)


def is_number(value: Value) -> bool:
    return isinstance(value, SymNumber) or (isinstance(value, ConstValue) and isinstance(value.value, (int, float)))
