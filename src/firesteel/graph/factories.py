"""Factories whose C++ signature has plain numbers where a program may have symbols: torch.linspace(0, 1, x.shape[0]).

They read no tensor, so autograd has nothing to record: a call with a symbol goes straight to the rule of the operator, past the conversion of its
arguments to numbers.  A row is a function of torch and its operator.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode

from firesteel import transaction
from firesteel.graph.functions import FUNCTIONS
from firesteel.sym.symint import SYMBOLIC

aten = torch.ops.aten

FACTORIES: dict[Callable[..., Any], Any] = {
    torch.linspace: aten.linspace, torch.logspace: aten.logspace, torch.bartlett_window: aten.bartlett_window,
    torch.blackman_window: aten.blackman_window, torch.hamming_window: aten.hamming_window, torch.hann_window: aten.hann_window,
    torch.kaiser_window: aten.kaiser_window, torch.fft.fftfreq: aten.fft_fftfreq, torch.fft.rfftfreq: aten.fft_rfftfreq,
    torch.triu_indices: aten.triu_indices, torch.tril_indices: aten.tril_indices,
}


def _factory(packet: Any) -> Callable[..., Any]:
    every = (getattr(packet, name) for name in packet.overloads())
    overloads = [op for op in every if not any(str(a.type) == "Tensor" for a in op._schema.arguments)]

    def make(*args: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if not any(type(v) in SYMBOLIC for v in values) or any(isinstance(v, torch.Tensor) for v in values):
            return NotImplemented
        found = next((call for op in overloads if (call := _as_call(op, args, kwargs)) is not None), None)
        if found is None or not hasattr(_get_current_dispatch_mode(), "world"):
            return NotImplemented
        with _outside_of_mode() as mode:
            result = mode.world.run(*found)
        return result.requires_grad_() if requires_grad else result
    return make


@transaction.context
def _outside_of_mode() -> Iterator[Any]:
    """Takes the innermost dispatch mode off the stack."""
    mode = torch._C._pop_torch_dispatch_stack(None)
    try:
        yield mode
    finally:
        torch._C._push_on_torch_dispatch_stack(mode)


def _as_call(op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> tuple[OpOverload, tuple, dict[str, Any]] | None:
    """The call of an overload with these arguments; None where they do not fit."""
    free = [a for a in op._schema.arguments if not a.kwarg_only]
    named = {a.name: v for a, v in zip(free, args)} | kwargs
    missing = any(a.name not in named and not a.has_default_value() for a in free)
    if missing or len(args) > len(free) or not named.keys() <= {a.name for a in op._schema.arguments}:
        return None
    return op, tuple(named.pop(a.name) if a.name in named else a.default_value for a in free), named


for _function, _packet in FACTORIES.items():
    FUNCTIONS.add(_function, _factory(_packet))
