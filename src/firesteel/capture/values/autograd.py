"""torch.autograd.Function: a call of `apply` becomes one node, if its forward could be captured.

The node's target is the class's own `apply`, so the engine differentiates through the user's backward.  Before that the forward is
executed symbolically on trial: a break in it, or an effect of it on the user's objects, is a break of the whole call.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from firesteel.capture.values.base import Value
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.objects import ObjectValue
from firesteel.capture.values.torch_calls import call_graph
from firesteel.errors import Break

if TYPE_CHECKING:
    from firesteel.capture.emit import Emitter
    from firesteel.capture.machine import Machine


class TrialContext:
    """Stands for `ctx` while the forward is tried."""

    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_dirty(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


@functools.cache
def apply_of(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """cls.apply as a function of its own: fx writes a method of torch by a name that is not there."""
    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    apply.__name__ = apply.__qualname__ = f"{cls.__name__}_apply"
    apply.__module__ = cls.__module__
    return apply


class ApplyValue(Value):
    """cls.apply"""

    def __init__(self, cls: type[torch.autograd.Function]):
        self.cls = cls

    def describe(self) -> str:
        return f"{self.cls.__qualname__}.apply"

    def python_type(self) -> type:
        return type(self.cls.apply)

    def truth(self, m: Machine) -> bool:
        return True

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        self._try_forward(m, args, kwargs)
        return call_graph(m, "call_function", apply_of(self.cls), args, kwargs)

    def _try_forward(self, m: Machine, args: Args, kwargs: Kwargs) -> None:
        mark = m.checkpoint()
        trial: Value = ObjectValue(TrialContext)
        separate = self.cls.setup_context is not torch.autograd.function._SingleLevelFunction.setup_context
        forward = m.constant_object(self.cls.forward)
        try:
            out = m.call_now(forward, args if separate else [trial, *args], kwargs)
            if separate:
                m.call_now(m.constant_object(self.cls.setup_context), [trial, m.tuple_of(args), out], {})
            if len(m.effects.entries) > mark[1][0]:
                raise Break("call", name=f"{self.describe()}, whose forward changes objects outside of it,")
        finally:
            m.rollback(mark)

    def rebuild(self, e: Emitter) -> str:
        return f"{e.constant(self.cls)}.apply"


