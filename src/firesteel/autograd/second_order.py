"""Gradients of gradients: the backward of a program as a program of its inputs and tangents, compiled at its first use.

A compiled backward is not differentiable.  Where somebody asks for a gradient of a gradient (`create_graph`), the program is traced again together
with its gradients, and the result is compiled like any other.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel import stages
from firesteel.autograd.function import has_storage
from firesteel.autograd.outline import Joint, Program
from firesteel.graph.wrappers import is_wrapper
from firesteel.records import dataclass
from firesteel.targets import in_use

Compile = Callable[[Program, list[Any], Callable], Callable]        # (program, example inputs, the same in eager) -> callable


class SecondOrder:
    """Differentiable gradients of a program, compiled for each kind of call: (inputs, tangents) -> one gradient an input."""

    def __init__(self, program: Program, joint: Joint, compile: Compile, eager: Callable):
        self.program, self.joint, self.compile, self.eager = program, joint, compile, eager
        self.wanted = [i for i, yes in enumerate(joint.differentiated) if yes]
        self.count = joint.plan.num_inputs
        self.compilation = stages.current()
        self.autocast = autocast_state()        # the program is traced again, later, perhaps outside of the region it was met in
        self.compiled: dict[tuple, Callable] = {}

    def __call__(self, inputs: Sequence[Any], tangents: Sequence[torch.Tensor | None]) -> list[Any]:
        present = [k for k, t in enumerate(tangents) if t is not None]
        args = [*inputs, *(tangents[k] for k in present)]
        key = (torch.is_grad_enabled(), *present, *(kind_of(a) for a in args))
        run = self.compiled.get(key)
        if run is None:
            run = self.compiled[key] = self._compile(args, present)
        found = dict(zip(self.wanted, run(*args)))
        return [found.get(i) for i in range(self.count)]

    def _compile(self, args: list[Any], present: list[int]) -> Callable:
        from firesteel.autograd.joint import gradient_program  # with what traces
        program, eager = (gradient_program(p, self.joint, self.wanted, present) for p in (self.program, self.eager))
        with stages.kept_by(self.compilation), contextlib.ExitStack() as stack:
            for device, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            return self.compile(program, [_example(a) for a in args], eager)


def autocast_state() -> list[tuple[str, torch.dtype, bool]]:
    """(device, dtype, is it on) for every device on which automatic casting is or can be on."""
    return [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in in_use()]


def _example(value: Any) -> Any:
    """What to trace with: for a tensor without memory, one of its shape."""
    if isinstance(value, torch.Tensor) and not has_storage(value):
        return torch.empty(value.shape, dtype=value.dtype, device=value.device).requires_grad_(value.requires_grad)
    return value


def kind_of(value: Any) -> Any:
    """What a compiled program depends on, of one input."""
    if is_wrapper(value):
        names, context = value.__tensor_flatten__()
        return type(value), kind_of(context), value.shape, value.requires_grad, value.is_leaf, *(kind_of(getattr(value, name)) for name in names)
    if isinstance(value, torch.Tensor):
        layout = value.stride() if value.layout is torch.strided else value.layout
        return value.shape, layout, value.dtype, value.device, value.requires_grad, value.is_leaf
    if isinstance(value, torch.Generator):      # which one it is, and its state, matter at run time only
        return torch.Generator, value.device
    try:
        hash(value)
    except TypeError:
        return type(value), repr(value) if type(value) is slice else Identity(value)
    return type(value), value


@dataclass(frozen=True)
class Identity:
    """A key that equals itself only, kept alive by being a key."""
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
