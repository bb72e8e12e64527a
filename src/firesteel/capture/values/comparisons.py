"""torch.equal and torch.allclose: questions about data, asked for real between two compiled graphs (autograd/seams.py).

The answer is a bool that is known at run time only: a branch on it is one on data (joins.py).

    if torch.equal(x, y): ...           # equal = torch.equal(x, y); branch(equal, ...)
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from firesteel.autograd.seams import SEAMS
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import Value
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.number import SymNumber
from firesteel.capture.values.tensor import TENSOR_METHODS, TensorValue
from firesteel.capture.values.torch_calls import call_graph
from firesteel.capture.values.wrappers import is_wrapper_class
from firesteel.sym.symint import to_symint


def asked(fn: Callable[..., bool]) -> Callable[[Machine, Args, Kwargs], Value]:
    def ask(m: Machine, args: Args, kwargs: Kwargs) -> Value:
        overridden = m.overridden("call_function", fn, args, kwargs)
        if overridden is not None:
            return overridden
        given, named = [m.look(value) for value in args], {name: m.look(value) for name, value in kwargs.items()}
        plain = all(isinstance(value, TensorValue) and not is_wrapper_class(type(value.abstract)) for value in given[:2])
        if m.world.env is None or not plain or len(given) < 2:
            return call_graph(m, "call_function", fn, args, kwargs)
        symbol = m.world.env.create_unbacked(None, None, f"torch.{fn.__name__}", "bool")
        answer = to_symint(symbol, m.world.env)
        node = m.record.call_function(fn, tuple(value.as_arg(m)[0] for value in given), {name: value.as_arg(m)[0] for name, value in named.items()},
                                      answer)
        node.meta["unbacked"] = [symbol]
        return SymNumber(answer, lambda: node)
    return ask


def _method(ask: Callable[[Machine, Args, Kwargs], Value]) -> Callable[..., Value]:
    return lambda m, tensor, args, kwargs: ask(m, [tensor, *args], kwargs)


_fn: Any
for _fn in (torch.equal, torch.allclose):
    SEAMS.add(_fn, "a question about the data of tensors")
    CALLS.add(_fn, asked(_fn))
    TENSOR_METHODS.add(_fn.__name__, _method(asked(_fn)))
