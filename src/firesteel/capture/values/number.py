"""SymNumber: a Python number that is a symbol: a size of a dynamic dimension, an int or float argument that changed.

It holds the `torch.SymInt`/`SymFloat`/`SymBool` of the shape environment; operators are executed on that, and every
yes/no question about it is answered (and recorded as a guard) by the environment.  Nodes for it appear in the graph
only where it is used as an argument of a torch call.
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.python_operators import OPERATORS, UNARY_OPERATORS
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import ConstValue, fold, is_constant_object
from firesteel.capture.values.known_data import writes
from firesteel.errors import Break, DataDependentError
from firesteel.records import dataclass
from firesteel.sym.expr import free_symbols
from firesteel.sym.symint import FLOAT_FUNCTIONS, SYMBOLIC, from_sym, sym_ite

PYTHON_TYPES = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}

LOGICAL = frozenset("&|^")      # of two bools they give a bool; all other operators take bools as 0 and 1
CONVERSIONS: dict[type, Callable[[Any], Any]] = {int: torch.sym_int, float: torch.sym_float}

MakeNode = Callable[[], torch.fx.Node]
INT64 = (-2**63, 2**63 - 1)         # what a graph computes with; Python's ints have no end


def fits(number: int | float) -> bool:
    """Is it a float, or an int of 64 bits?"""
    return isinstance(number, float) or INT64[0] <= number <= INT64[1]


def number(m: Machine, result: Any, make_node: MakeNode) -> Value:
    """The Value of a number that an operation on symbols gave; `make_node` computes it in the graph if asked."""
    if isinstance(result, SYMBOLIC):
        return SymNumber(result, make_node)
    if is_constant_object(result):
        return ConstValue(result)
    raise Break("object", name=type(result).__qualname__)


def number_of(value: Value) -> Any:
    """The number or symbol behind a number."""
    return value.sym if isinstance(value, SymNumber) else value.constant()


def symbolic_call(m: Machine, fn: Callable[..., Any], operands: list[Value]) -> Value:
    """fn on numbers of which some are symbols."""
    reals = [number_of(v) for v in operands]
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


def writes_to(value: Value) -> int | None:
    """How often it was written, of a tensor: what was known of it holds until then."""
    tensor = getattr(value, "abstract", None)
    return 0 if tensor is None else writes(tensor)


def answered(m: Machine, value: Value) -> bool | None:
    """Its truth, where one of the ways of a branch on it is followed."""
    return next((truth for one, count, truth in m.answers if one is value and count is not None and count == writes_to(value)), None)


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
        known = answered(m, self)
        return ask(bool, self.sym) if known is None else known

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        if not is_number(other):
            return None
        operands = [other, self] if reflected else [self, other]
        if op not in LOGICAL or any(v.python_type() is not bool for v in operands):
            operands = [converted(m, v, int) if v.python_type() is bool else v for v in operands]
        if op not in ON_FLOATS or all(v.python_type() is not float for v in operands):
            return symbolic_call(m, OPERATORS[op], operands)
        if not ON_FLOATS[op].is_float(*map(number_of, operands)):
            return fold(m, OPERATORS[op], *map(m.known, operands))
        return symbolic_call(m, ON_FLOATS[op].function, operands)

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        if not is_number(other):
            return None
        operands = [converted(m, v, int) if v.python_type() is bool else v for v in (self, other)]
        return symbolic_call(m, OPERATORS[op], operands)

    def unary(self, m: Machine, op: str) -> Value:
        if op == "not":
            return ConstValue(not self.truth(m))
        number = converted(m, self, int) if self.python_type() is bool else self
        if op == "~":       # torch's carriers cannot
            return symbolic_call(m, operator.sub, [ConstValue(-1), number])
        return symbolic_call(m, UNARY_OPERATORS[op], [number])

    def getattr(self, m: Machine, name: str) -> Value:
        return self.specialize(m).getattr(m, name)

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        if not m.record.all_hold(self, lambda number: number.fits(m)):
            return self.specialize(m).as_arg(m)
        return m.record.node_of(self), self.sym

    def as_output(self, m: Machine) -> Any:
        return m.record.node_of(self)       # Python computes it, so any number of digits is fine

    def fits(self, m: Machine) -> bool:
        """Does it fit into 64 bits?  What is not known for certain is asked, and so guarded: a program may compute any number from those it
        is given, while sizes come from tensors that are there."""
        if type(self.sym) is not torch.SymInt or self.source is not None or not self._of_numbers(m):
            return True
        low, high = m.world.env.interval(from_sym(self.sym))
        small = low is not None and low >= INT64[0] or ask(bool, self.sym >= INT64[0])
        return small and (high is not None and high <= INT64[1] or ask(bool, self.sym <= INT64[1]))

    def _of_numbers(self, m: Machine) -> bool:
        given = {from_sym(value.sym) for value in m.number_symbols.values() if isinstance(value, SymNumber)}
        return any(leaf in given for leaf in free_symbols(from_sym(self.sym)))

    def rebuild(self, e: Emitter) -> str:
        return e.graph_output(self)


@dataclass(frozen=True)
class OnFloats:
    """An operator of which torch's SymFloat has another meaning than Python."""
    function: Callable[[Any, Any], Any]
    is_float: Callable[[Any, Any], bool]        # a question: is the result a float, and no error and no complex number?


ON_FLOATS = {
    "//": OnFloats(FLOAT_FUNCTIONS["floordiv"], lambda a, b: ask(bool, b != 0)),
    "**": OnFloats(FLOAT_FUNCTIONS["pow"], lambda a, b: type(b) is int and b >= 0 or ask(bool, a > 0)),
}


def is_number(value: Value) -> bool:
    return isinstance(value, SymNumber) or (isinstance(value, ConstValue) and isinstance(value.value, (int, float)))
