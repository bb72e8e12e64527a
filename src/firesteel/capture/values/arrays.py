"""NumPy arrays: the user's own, and the memory of a tensor seen as an array.

What is captured is what means the same in both: metadata, and the way from a tensor to an array and back, which copies nothing.  The user's array
becomes an input of the graph by `torch.from_numpy`; `tensor.numpy()` is written, where it leaves the region, as the call of that method.  All
else that NumPy computes breaks, and is computed by NumPy.

    torch.from_numpy(array) * 2         # one graph
    x.sin().numpy()                     # one graph; the array is made of its output
"""
from __future__ import annotations

from typing import Any

import numpy as np
import torch

from firesteel.capture.guards import Guard
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Attr, Call
from firesteel.capture.values.base import ObjectKey, OpaqueValue, Value
from firesteel.capture.values.const import ConstValue, fresh, is_none
from firesteel.capture.values.containers import TupleValue
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.tensor import TENSOR_METHODS, TensorValue, size_of
from firesteel.capture.values.torch_calls import call_graph
from firesteel.errors import Break
from firesteel.targets import on_host

CONSTANTS = ("shape", "ndim", "size", "itemsize", "nbytes")


class ArrayValue(OpaqueValue):
    """An array of the user's.  Its data is not looked at; metadata is guarded where it is read."""

    memory: Value | None = None     # the first tensor over it

    def getattr(self, m: Machine, name: str) -> Value:
        if name in CONSTANTS:
            found = getattr(self.obj, name)
            m.guard(Guard(Attr(self.source, name), "equals", found))
            return fresh(m, found)
        if name == "dtype":
            return m.read_attribute(self, name)
        if name == "__class__":
            return m.constant_object(np.ndarray)
        return super().getattr(m, name)

    def length(self, m: Machine) -> Value:
        return self.getattr(m, "shape").getitem(m, ConstValue(0)) if self.obj.ndim else super().length(m)

    def tensor(self, m: Machine) -> Value:
        """torch.from_numpy(self): a new tensor in each call."""
        if self.memory is not None:
            return call_graph(m, "call_method", "detach", [self.memory], {})
        try:
            real = torch.from_numpy(self.obj)
        except Exception as error:      # the real call raises it
            raise Break("array", name="torch.from_numpy") from error
        m.effects.change(self, "memory", m.read(real, Call(self.source, torch.from_numpy)))
        return self.memory      # type: ignore[return-value]  # it was just set


class TensorArray(Value):
    """tensor.numpy()"""

    cls = np.ndarray

    def __init__(self, memory: TensorValue):
        self.memory = memory

    def describe(self) -> str:
        return f"array over a {self.memory.describe()}"

    def hash_key(self, m: Machine) -> Any:
        return ObjectKey(self)

    def constant(self) -> Any:
        raise Break("numpy", name="What is done with an array")

    def getattr(self, m: Machine, name: str) -> Value:
        shape = size_of(m, self.memory).iterate(m)
        if name == "shape":
            return TupleValue(shape)
        if name == "ndim":
            return ConstValue(len(shape))
        if name == "dtype":
            return m.constant_object(dtype_of(self.memory))
        if name == "__class__":
            return m.constant_object(np.ndarray)
        raise Break("numpy", name=f"ndarray.{name}")

    def length(self, m: Machine) -> Value:
        shape = size_of(m, self.memory).iterate(m)
        return shape[0] if shape else super().length(m)

    def tensor(self, m: Machine) -> Value:
        return call_graph(m, "call_method", "detach", [self.memory], {})

    def rebuild(self, e: Emitter) -> str:
        return f"{e.expr(self.memory)}.numpy()"


def dtype_of(tensor: TensorValue) -> Any:
    return torch.empty(0, dtype=tensor.abstract.dtype).numpy().dtype


@TENSOR_METHODS.row("numpy")
def method_numpy(m: Machine, tensor: TensorValue, args: Args, kwargs: Kwargs) -> Value:
    if args or set(kwargs) - {"force"}:
        raise Break("numpy", name="Tensor.numpy")
    if kwargs and m.truth_now(m.look(kwargs["force"])):
        tensor = tensor if not tensor.abstract.requires_grad else call_graph(m, "call_method", "detach", [tensor], {})      # type: ignore[assignment]
    abstract = tensor.abstract
    plain = tensor.python_type() in (torch.Tensor, torch.nn.Parameter) and not abstract.is_conj() and not abstract.is_neg()
    if not plain or abstract.requires_grad or not on_host(abstract) or not has_twin(abstract.dtype):
        raise Break("numpy", name="Tensor.numpy")
    return TensorArray(tensor)


def has_twin(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:       # bfloat16
        return False
    return True


CALLS.row(torch.from_numpy)(lambda m, args, kwargs: memory_of(m, args[0], "torch.from_numpy"))


def memory_of(m: Machine, value: Value, name: str) -> Value:
    array = m.look(value)
    if not isinstance(array, (ArrayValue, TensorArray)) or m.modes.entered:
        raise Break("array", name=name)
    return array.tensor(m)


def is_array(m: Machine, args: Args, kwargs: Kwargs) -> bool:
    return isinstance(m.look((args or [*kwargs.values()])[0]), (ArrayValue, TensorArray))


def copied_array(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """torch.tensor(array, dtype=..., device=...)"""
    if len(args) != 1 or set(kwargs) - {"dtype", "device"}:
        raise Break("array", name="torch.tensor")
    copy = call_graph(m, "call_method", "clone", [memory_of(m, args[0], "torch.tensor")], {"memory_format": ConstValue(torch.contiguous_format)})
    return converted(m, copy, kwargs)


def converted(m: Machine, tensor: Value, settings: Kwargs) -> Value:
    given = {name: value for name, value in settings.items() if not is_none(m.look(value))}
    return call_graph(m, "call_method", "to", [tensor], given) if given else tensor


def _shared(function: Any) -> Any:
    """torch.as_tensor(array) shares the memory where nothing is converted."""
    def call(m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if not is_array(m, args, kwargs):
            return call_graph(m, "call_function", function, args, kwargs)
        if len(args) != 1 or set(kwargs) - {"dtype", "device"}:
            raise Break("array", name=f"torch.{function.__name__}")
        return converted(m, memory_of(m, args[0], f"torch.{function.__name__}"), kwargs)
    return call


for _function in (torch.as_tensor, torch.asarray):
    CALLS.add(_function, _shared(_function))


@CALLS.row(np.asarray)
def call_asarray(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    given = m.look(args[0]) if args else None
    if len(args) != 1 or kwargs or not isinstance(given, (TensorValue, ArrayValue, TensorArray)):
        raise Break("array", name="numpy.asarray")
    return method_numpy(m, given, [], {}) if isinstance(given, TensorValue) else given


@CALLS.row(np.dtype)
def call_dtype(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    return m.constant_object(m.run_real(np.dtype, *map(m.known, args), **{name: m.known(value) for name, value in kwargs.items()}))
