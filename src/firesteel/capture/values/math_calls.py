"""Functions of `math`, and `round`, on symbolic numbers: rows of `CALLS`.

A row of `ROWS` takes the numbers as Values and gives a Value.  `domain` says where the function is defined: for a number outside of it the
function is executed, so that the program meets its own error.  What has no row takes the number itself, under a guard.

    math.log(x.shape[0], 2)         # log(s0) / log(2), symbolic
"""
from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Machine
from firesteel.capture.values.arrays import number_now
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import ConstValue, fold
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.number import SymNumber, converted, symbolic_call
from firesteel.capture.values.objects import ObjectValue
from firesteel.capture.values.tensor import TensorValue, read_number
from firesteel.capture.values.torch_calls import call_graph
from firesteel.sym import expr as E
from firesteel.sym.symint import MATH_ON_SYMBOLS, from_sym, sym_ite

Domain = Callable[[Any], Any]
DOMAINS: dict[str, Domain] = {
    **dict.fromkeys(("log", "log2", "log10", "gamma"), lambda x: E.gt(x, 0.0)),
    **dict.fromkeys(("asin", "acos"), lambda x: E.le(E.abs_(x), 1.0)),
    "sqrt": lambda x: E.ge(x, 0.0), "log1p": lambda x: E.gt(x, -1.0), "acosh": lambda x: E.ge(x, 1.0), "atanh": lambda x: E.lt(E.abs_(x), 1.0),
}


def is_defined(m: Machine, domain: Domain | None, value: Value) -> bool:
    """Guarded; a number that only run time knows is taken to be inside."""
    if domain is None or not isinstance(value, SymNumber):
        return True
    return m.world.env.decide_or(domain(E.to_float(from_sym(value.sym))), True)


def _one(name: str) -> Callable[[Machine, Value], Value]:
    return lambda m, x: symbolic_call(m, MATH_ON_SYMBOLS[name], [x])


def _log(m: Machine, x: Value, base: Value | None = None) -> Value:
    log = _one("log")
    return log(m, x) if base is None else m.binary("/", log(m, x), log(m, base))


def _power(m: Machine, x: Value, y: Value) -> Value:
    return symbolic_call(m, operator.pow, [converted(m, x, float), converted(m, y, float)])


def _size(m: Machine, x: Value) -> Value:
    """math.fabs"""
    x = converted(m, x, float)
    return symbolic_call(m, operator.abs, [x]) if isinstance(x, SymNumber) else fold(m, abs, x.constant())


def _times(factor: float) -> Callable[[Machine, Value], Value]:
    return lambda m, x: m.binary("*", converted(m, x, float), ConstValue(factor))


ROWS: dict[Callable[..., Any], tuple[Callable[..., Value], Domain | None]] = {
    **{getattr(math, name): (_one(name), DOMAINS.get(name)) for name in MATH_ON_SYMBOLS if name != "log"},
    **{fn: ((lambda m, x, fn=fn: symbolic_call(m, fn, [x])), None) for fn in (math.floor, math.ceil, math.trunc)},
    math.log: (_log, DOMAINS["log"]),
    math.pow: (_power, lambda x: E.ge(x, 0.0)),
    math.fabs: (_size, None),
    math.isnan: (lambda m, x: m.compare("!=", x, x), None),
    math.isinf: (lambda m, x: m.compare("==", _size(m, x), ConstValue(math.inf)), None),
    math.isfinite: (lambda m, x: m.compare("<", _size(m, x), ConstValue(math.inf)), None),
    math.radians: (_times(math.pi / 180.0), None),
    math.degrees: (_times(180.0 / math.pi), None),
}


def _on_symbols(fn: Callable[..., Any], row: Callable[..., Value], domain: Domain | None, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    args = [read_number(m, a, f"math.{fn.__name__}()") if isinstance(a, TensorValue) else number_now(m, a) or a for a in args]
    if any(isinstance(a, SymNumber) for a in args) and is_defined(m, domain, args[0]):
        return row(m, *args)
    return fold(m, fn, *map(m.known, args), **{k: m.known(v) for k, v in kwargs.items()})


for _fn, (_row, _domain) in ROWS.items():
    CALLS.add(_fn, functools.partial(_on_symbols, _fn, _row, _domain))


CALLS.row(torch.sym_ite)(lambda m, args, kwargs: symbolic_call(m, sym_ite, args))


@CALLS.row(math.prod)
def call_prod(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    result = kwargs.get("start", ConstValue(1))
    for item in args[0].iterate(m):
        result = m.binary("*", result, m.look(item))
    return result


@CALLS.row(round)
def call_round(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if isinstance(args[0], TensorValue):
        return call_graph(m, "call_method", "round", args, kwargs)
    if isinstance(args[0], ObjectValue) and (method := args[0].method(m, "__round__")) is not None:
        return method.call(m, args[1:], kwargs)
    digits = args[1] if len(args) > 1 else kwargs.get("ndigits", ConstValue(None))
    if isinstance(args[0], SymNumber) and digits.is_constant():
        return symbolic_call(m, round, [args[0]] if digits.constant() is None else [args[0], digits])
    return fold(m, round, *map(m.known, args), **{k: m.known(v) for k, v in kwargs.items()})


# -- numbers that torch takes as tensors too ----------------------------------------------------------------------------
def _with_tensor_rate(fn: Callable[..., Any], m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """A fused step of an optimiser: a symbolic learning rate is given as a tensor, since as a number it would be fixed."""
    rate = m.look(kwargs["lr"]) if "lr" in kwargs else None
    if isinstance(rate, SymNumber):
        kwargs = {**kwargs, "lr": call_graph(m, "call_function", torch.scalar_tensor, [rate], {"dtype": ConstValue(torch.float64)})}
    return call_graph(m, "call_function", fn, args, kwargs)


for _name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
    if hasattr(torch, _name) and "tensor_lr" in getattr(torch.ops.aten, _name).overloads():
        CALLS.add(getattr(torch, _name), functools.partial(_with_tensor_rate, getattr(torch, _name)))
