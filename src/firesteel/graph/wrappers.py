"""Tensor subclasses that wrap other tensors: `__torch_dispatch__`, `__tensor_flatten__` and `__tensor_unflatten__` (TwoTensor of torch's tests).

An operator on one runs the class's own dispatch, which calls operators on its parts: those are what a graph holds.  Autograd works
outside of it, on the wrapper.  So a wrapper enters a graph as its parts, and leaves it as parts that are put together again.

    parts_of(t)                     # [t.a, t.b], and the parts of those that are wrappers themselves
    pack = pack_of(t)               # how t is made of them; None for a plain tensor
    pack.build(iter(new_parts))     # a tensor of the same kind

Parts that are no tensors (the mesh of a DTensor) are constants: the objects themselves, wherever the class wants them back.
A tensor that waits for its collective when it is used first (AsyncCollectiveTensor) has waited when it is taken apart, and when it is put together.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from firesteel.layouts import is_named_tuple
from firesteel.records import dataclass


def is_wrapper_class(cls: type) -> bool:
    return hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def is_wrapper(value: Any) -> bool:
    return type(value) is not torch.Tensor and isinstance(value, torch.Tensor) and is_wrapper_class(type(value))


def has_wrapper(types: Iterable[type]) -> bool:
    """Has one of the classes that take part in a call a dispatch of its own?"""
    return any(map(is_wrapper_class, types))


def has_arrived(value: Any) -> bool:
    """Nothing to wait for?"""
    return getattr(value, "completed", True) or not hasattr(value, "trigger_wait")


def put_together(cls: Any, parts: dict[str, Any], context: Any, size: Any, strides: Any) -> Any:
    made = cls.__tensor_unflatten__(parts, context, size, strides)
    if not has_arrived(made):
        made.completed = True
    return made


def as_plain(gradient: Any) -> Any:
    """What a wrapper's class makes of it where a plain tensor is expected; itself where that is nothing."""
    fit = getattr(gradient, "__coerce_same_metadata_as_tangent__", None)
    plain = None if fit is None else fit(None, torch.Tensor)
    return gradient if plain is None else plain


def taken_apart(value: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any], Any]:
    """The parts of a wrapper that are tensors, those that are not, and its context."""
    if not has_arrived(value):
        value.trigger_wait()
    names, context = value.__tensor_flatten__()
    parts = {name: getattr(value, name) for name in names}
    tensors = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    return tensors, {name: part for name, part in parts.items() if name not in tensors}, context


@dataclass(frozen=True)
class Pack:
    """How a tensor is made of its parts; `others` are those that are no tensors.
    `size` and `strides` are the wrapper's; None where they are symbols, and then those of its first part."""
    cls: Any
    context: Any
    names: tuple[str, ...]
    others: dict[str, Any]
    inner: tuple[Pack | None, ...]
    size: tuple[int, ...] | None
    strides: tuple[int, ...] | None

    def build(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        made = {name: next(parts) if pack is None else pack.build(parts) for name, pack in zip(self.names, self.inner)}
        first = made[self.names[0]]
        return put_together(self.cls, {**made, **self.others}, self.context, self.size or first.shape, self.strides or first.stride())

    def like(self, other: Pack | None) -> bool:
        """The same kind of wrapper, whatever its sizes and strides?"""
        return other is not None and self._make() == other._make() and all(
            mine is None and theirs is None or mine is not None and mine.like(theirs) for mine, theirs in zip(self.inner, other.inner))

    def _make(self) -> tuple[Any, ...]:
        return self.cls, without_strides(self.context), self.names, self.others


def without_strides(context: Any) -> Any:
    """A context as it is compared: a DTensor's holds the strides of the whole, of which its part has its own."""
    if is_named_tuple(context):
        return context._replace(stride=None) if hasattr(context, "stride") else context
    return tuple(map(without_strides, context)) if type(context) is tuple else context


def pack_of(value: Any) -> Pack | None:
    if not is_wrapper(value):
        return None
    tensors, others, context = taken_apart(value)
    size, strides = ((tuple(n) if all(type(s) is int for s in n) else None) for n in (value.shape, value.stride()))
    return Pack(type(value), context, tuple(tensors), others, tuple(map(pack_of, tensors.values())), size, strides)


def parts_of(value: Any) -> list[Any]:
    """The plain tensors in a value; a value that is no wrapper is its own part."""
    if not is_wrapper(value):
        return [value]
    return [part for whole in taken_apart(value)[0].values() for part in parts_of(whole)]


def rebuilt(value: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """The same wrapper over changed parts."""
    tensors, others, context = taken_apart(value)
    changed = {name: change(name, part) for name, part in tensors.items()}
    return put_together(type(value), {**changed, **others}, context, value.shape, value.stride())


def pack_all(packs: Sequence[Pack | None], parts: Iterable[Any]) -> list[Any]:
    """Flat values put together: as many as there are packs."""
    source = iter(parts)
    return [next(source) if pack is None else pack.build(source) for pack in packs]


def width(pack: Pack | None) -> int:
    """How many plain tensors a value is made of."""
    return 1 if pack is None else sum(map(width, pack.inner))


@dataclass(frozen=True)
class Packing:
    """Which of a program's values are wrappers, that is, several values of the graph."""
    inputs: list[Pack | None]
    values: list[Pack | None]
    gradients: list[Pack | None]

    @classmethod
    def of(cls, inputs: Sequence[Any], values: Sequence[Any], gradients: Sequence[Any]) -> Packing | None:
        found = cls(*([pack_of(v) for v in group] for group in (inputs, values, gradients)))
        return found if any(found.inputs) or any(found.values) or any(found.gradients) else None


def places_of(packs: Sequence[Pack | None] | None, place: int) -> range:
    """The places in the graph of the parts of one value."""
    if packs is None:
        return range(place, place + 1)
    start = sum(map(width, packs[:place]))
    return range(start, start + width(packs[place]))
