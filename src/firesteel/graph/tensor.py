"""AbstractTensor: a torch.Tensor without data, and what rules see of it.

A call on it runs torch's C++ code and arrives at its world (`abstract.py`), which makes it and knows the rules.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from firesteel.errors import DataAccess
from firesteel.graph.spec import Spec, spec_of
from firesteel.graph.wrappers import has_wrapper
from firesteel.sym.symint import SYMBOLIC, from_sym

DATA: Any = torch.Tensor.data       # torch's own attribute
BITS = frozenset({torch.ops.aten._conj.default, torch.ops.aten._neg_view.default})      # views that only flip a bit


class AbstractTensor(torch.Tensor):
    """A tensor without data.  `spec` says what is known; `world` made it; `value` is its data where it is a literal of the
    program (`torch.tensor(3)`), else None; `record` belongs to the tracer."""

    spec: Spec
    world: Any          # the AbstractWorld that made it
    value: torch.Tensor | None
    record: Any
    first_spec: Spec | None = None              # what it was, where its sizes have changed in place since
    given: torch.Tensor | None = None           # as an example: the data that it has in every call, where that is known
    memory: AbstractTensor | None = None        # outside of the tracer: the tensor that lay there first, where this one is a view
    has_data: bool = False                      # of the first tensor in a memory: x.data was asked of one
    bits: frozenset[Any] = frozenset()          # likewise: the operators of BITS whose bit eager's tensor has
    born: Any       # the graph node whose value this object is, while tracing

    __torch_function__ = torch._C._disabled_torch_function_impl     # type: ignore[assignment]  # torch's own way to say "none"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:     # type: ignore[override]  # torch's is static
        if has_wrapper(types):
            return NotImplemented
        world = find_world(args, kwargs)
        assert world is not None, op        # one of the arguments is abstract
        return world.run(op, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:      # type: ignore[override]  # mypy loses the keyword's name
        return f"AbstractTensor({self.spec})"

    def tolist(self) -> Any:
        return self._literal("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise DataAccess("numpy")

    def __array__(self, dtype: Any = None) -> Any:
        raise DataAccess("numpy.array")

    def data_ptr(self) -> int:
        raise DataAccess("data_ptr")

    @property
    def data(self) -> Any:
        memory_of(self).has_data = True
        return DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.world.set_data(self, value)

    @property
    def uncounted(self) -> bool:
        """May writes raise no version, since they go through x.data?"""
        return memory_of(self).has_data

    def requires_grad_(self, requires_grad: bool = True) -> AbstractTensor:
        self.world.leaves_made += requires_grad and not self.requires_grad
        super().requires_grad_(requires_grad)
        return self

    def _literal(self, operator: str) -> torch.Tensor:
        if self.value is None:
            raise DataAccess(operator)
        return self.value


def memory_of(tensor: Any) -> Any:
    """The tensor that first lay in a tensor's memory."""
    found = getattr(tensor, "memory", None)
    return tensor if found is None else found


def find_world(args: Any, kwargs: Any = None) -> Any:
    """The world of the first abstract tensor among the arguments."""
    for a in args:
        if type(a) is AbstractTensor:
            return a.world
        if isinstance(a, (list, tuple)) and (world := find_world(a)) is not None:
            return world
    return find_world(tuple(kwargs.values())) if kwargs else None


# ---------------------------------------------------------------- specs in and out

def to_spec(value: Any) -> Any:
    """An argument as rules see it: Specs for tensors, sizes for SymInts."""
    kind = type(value)
    if kind is AbstractTensor:
        return value.spec
    if kind is list or kind is tuple or isinstance(value, (list, tuple)):
        return [to_spec(v) for v in value]
    if kind in SYMBOLIC:
        return from_sym(value)
    return spec_of(value) if isinstance(value, torch.Tensor) else value


def tensors_in(value: Any) -> Iterator[AbstractTensor]:
    if type(value) is AbstractTensor:
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v)
