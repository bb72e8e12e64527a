"""Functions of torch whose C++ code takes sizes as plain numbers, or another way for tensors without data: the same, by operators that do as eager.

A row has the signature of its function and returns NotImplemented where it has nothing to say: then the function itself runs, and what
it asks as a number is fixed by a guard (`abstract.py`).  Who runs the node of a graph asks `symbolic_form`; a mode, which costs
microseconds a call, does it for a program that is no graph yet.

    symbolic_form(F.interpolate)(x, scale_factor=2)         # x: f32[s0, 3, s1, s2]; its row stands in resampling.py
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from firesteel.table import Table

FUNCTIONS: Table[Callable[..., Any]] = Table("function with symbolic sizes", "graph/")


def symbolic_form(fn: Any, symbols: bool = True) -> Any:
    """What to call instead of `fn` where sizes may be symbols.  Functions in Python may call others that have a row: if there are `symbols`, they
    run under the mode."""
    owner = fn.__self__ if isinstance(fn, BuiltinFunctionType) else None
    if isinstance(owner, torch.Tensor):
        row = FUNCTIONS.get(getattr(torch.Tensor, fn.__name__, None))
        return fn if row is None else partial(_either, partial(row, owner), fn)
    row = FUNCTIONS.get(_function_of(fn) if isinstance(fn, (OpOverload, OpOverloadPacket, HigherOrderOperator)) else fn)
    plain = partial(_under_mode, fn) if symbols and isinstance(fn, FunctionType) else fn
    return plain if row is None else partial(_either, row, plain)


def _function_of(op: Any) -> Any:
    """The function of the same name, whose row an operator shares; the name of one of higher order, whose module few programs import."""
    if isinstance(op, HigherOrderOperator):
        return op.name()
    packet = op.overloadpacket if isinstance(op, OpOverload) else op
    namespace, _, name = packet._qualified_op_name.partition("::")
    return getattr(torch, name, op) if namespace == "aten" and op not in FUNCTIONS else op


def _under_mode(fn: FunctionType, *args: Any, **kwargs: Any) -> Any:
    body = fn
    if _asks(fn):
        body = FunctionType(fn.__code__, {**fn.__globals__, **_ASKED}, fn.__name__, fn.__defaults__, fn.__closure__)
        body.__kwdefaults__ = fn.__kwdefaults__
    with SymbolicFunctions():
        return body(*args, **kwargs)


def _asks(fn: Any) -> bool:
    """Does it ask for overrides?  Not a method around one of the same name in C++ (`super().unflatten`), which the mode would take for itself."""
    if not isinstance(fn, FunctionType) or "super" in fn.__code__.co_names:
        return False
    return not _ASKED.keys().isdisjoint(fn.__code__.co_names) and _ASKED.keys() <= fn.__globals__.keys()


def _has_override(values: Any) -> bool:
    """What torch's Python functions ask before they do anything, without modes: to the mode here they would hand themselves."""
    plain = torch._C._disabled_torch_function_impl
    return any(type(v) is not torch.Tensor and getattr(type(v), "__torch_function__", plain) is not plain for v in values)


_ASKED = {"has_torch_function": _has_override, "has_torch_function_unary": lambda value: _has_override((value,)),
          "has_torch_function_variadic": lambda *values: _has_override(values)}


def _either(row: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = row(*args, **kwargs)
    return fn(*args, **kwargs) if result is NotImplemented else result


def has_symbols(*values: Any) -> bool:
    """Has a tensor among them symbolic sizes or strides, as torch's C++ code sees it?  One whose symbols a guard has made numbers still has."""
    return any(v._has_symbolic_sizes_strides for v in values if isinstance(v, torch.Tensor))


def symbolic_row(*functions: Any) -> Callable[[Callable], Callable]:
    """Rows that are used where a tensor among the arguments, or in a list that is the first of them, has a symbolic size."""
    def add(row: Callable) -> Callable:
        @wraps(row)
        def where_symbolic(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args and isinstance(args[0], (list, tuple)) else ()
            return row(*args, **kwargs) if has_symbols(*first, *args, *kwargs.values()) else NotImplemented
        for function in functions:
            FUNCTIONS.add(function, where_symbolic)
        return row
    return add


class SymbolicFunctions(TorchFunctionMode):
    """Calls the symbolic form of every function."""

    def __torch_function__(self, fn: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return symbolic_form(fn, symbols=_asks(fn))(*args, **(kwargs or {}))
