"""A user's torch.autograd.Function after capture: a graph of its forward, one of its backward, and what leads from one to the other.

In: what capture recorded of the two (capture/values/autograd.py), or its text (dumps.py).  Out: the function that captured graphs call, whose
attribute `firesteel_function` makes it of another way to run the graphs: a trace runs them on its own tensors.

    apply = CustomFunction("Double", "__main__", False, False, forward, backward, 1, [ValueRef(True, 0, True)], [], [], [0], 1).applied()
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.autograd.function import once_differentiable

from firesteel.records import dataclass


@dataclass(frozen=True)
class ValueRef:
    """Where the backward finds something: an input or a result of the forward; saved as the user did (checked for later writes) or just kept."""
    is_input: bool
    number: int
    saved: bool


@dataclass(frozen=True)
class CustomFunction:
    """What a captured function consists of."""
    name: str
    module: str
    once: bool                  # is its backward differentiable once alone?
    vmap_rule: bool
    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    outputs: int                # tensors that the user's forward gives; behind them come values that only the backward reads
    reads: list[ValueRef]          # of the backward, behind the gradients
    dirty: list[int]            # inputs
    constant: list[int]         # results that carry no gradient
    tensors: list[int]          # arguments that are tensors: the first inputs
    inputs: int

    def applied(self) -> Callable[..., Any]:
        """What a graph calls."""
        made: Any = self.function(call_body)

        def apply(*inputs: Any) -> Any:
            return made.apply(*inputs)

        apply.__name__ = apply.__qualname__ = f"{self.name}_apply"
        vars(apply).update(firesteel_function=self.function, custom=self)
        return apply

    def function(self, run: Callable[..., Any]) -> type[torch.autograd.Function]:
        """A torch.autograd.Function whose graphs are run by `run`."""
        backward = functools.partial(self._backward, run)
        made: dict[str, Any] = {
            "forward": staticmethod(lambda *inputs: tuple(run(self.forward, *inputs))), "setup_context": staticmethod(self._setup),
            "backward": staticmethod(once_differentiable(backward) if self.once else backward),
            "generate_vmap_rule": self.vmap_rule, "__module__": self.module}
        kind: Any = type(torch.autograd.Function)
        return kind(self.name, (torch.autograd.Function,), made)

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        found = [(inputs if place.is_input else results)[place.number] for place in self.reads]
        checked = [place.saved and isinstance(value, torch.Tensor) for place, value in zip(self.reads, found)]
        ctx.save_for_backward(*[value for value, yes in zip(found, checked) if yes])
        ctx.kept = [(None if yes else value, yes) for value, yes in zip(found, checked)]
        if self.dirty:
            ctx.mark_dirty(*[inputs[k] for k in self.dirty])
        constant = [results[k] for k in self.constant if isinstance(results[k], torch.Tensor)]
        if constant:
            ctx.mark_non_differentiable(*constant)

    def _backward(self, run: Callable[..., Any], ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        read = [next(saved) if yes else value for value, yes in ctx.kept]
        found = run(self.backward, *gradients[:self.outputs], *read)
        given = [found[k] for k in self.tensors]
        return (*given, *[None] * (self.inputs - len(given)))


def call_body(body: torch.fx.GraphModule, *inputs: Any) -> Any:
    return body(*inputs)
