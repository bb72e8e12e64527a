"""torch.tensor, torch.as_tensor and torch.asarray of arrays and numbers: Python's, NumPy's, symbols, in lists of any depth.

NumPy's numbers decide the dtype by their own, Python's by their type, as in eager; those that only run time knows are stacked as the lists are.

    torch.tensor([n, 2 * n]); torch.as_tensor(np.linalg.norm(array)); torch.tensor([np.float64(1), 2.0])    # of float64
"""
from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Args, Kwargs, Machine
from firesteel.capture.values.arrays import ArrayNumber, ArrayValue, TensorArray, converted, memory_of, torch_dtype
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import NONE, ConstValue, is_none
from firesteel.capture.values.containers import ListValue, Sequence
from firesteel.capture.values.number import SymNumber
from firesteel.capture.values.torch_calls import call_graph, call_or_inline
from firesteel.errors import Break


def call_made(function: Any, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    data = m.look((args or [*kwargs.values()])[0])
    if isinstance(data, (ArrayNumber, ArrayValue, TensorArray)):
        return of_array(m, function, data, args, kwargs)
    numbers = numbers_in(m, data)
    check_numbers(m, numbers, kwargs)
    stacked = any(isinstance(number, (SymNumber, ArrayNumber)) for number in numbers)
    if (stacked or any(map(is_of_numpy, numbers))) and is_none(m.look(kwargs.get("dtype", NONE))):
        kwargs = {**kwargs, "dtype": ConstValue(functools.reduce(torch.promote_types, map(dtype_of, numbers)))}
    if not stacked:
        return call_or_inline(m, "call_function", function, args, kwargs, function)
    if "requires_grad" in kwargs and m.known(kwargs["requires_grad"]):
        raise Break("leaf", name=f"{function.__name__} of symbols with requires_grad")
    return tensor_of_numbers(m, data, {name: value for name, value in kwargs.items() if name in ("dtype", "device")})


for _function in (torch.tensor, torch.as_tensor, torch.asarray):
    CALLS.add(_function, functools.partial(call_made, _function))


def of_array(m: Machine, function: Any, array: Any, args: Args, kwargs: Kwargs) -> Value:
    """Only torch.tensor copies; of the others a number has memory of its own."""
    if len(args) != 1 or set(kwargs) - {"dtype", "device"}:
        raise Break("array", name=f"torch.{function.__name__}")
    check_numbers(m, [array], kwargs)
    memory = array.memory if isinstance(array, ArrayNumber) else memory_of(m, array, f"torch.{function.__name__}")
    if function is torch.tensor or isinstance(array, ArrayNumber):
        memory = call_graph(m, "call_method", "clone", [memory], {"memory_format": ConstValue(torch.contiguous_format)})
    return converted(m, memory, kwargs)


# -- numbers in lists ---------------------------------------------------------------------------------------------------
def numbers_in(m: Machine, data: Value) -> list[Value]:
    data = m.look(data)
    return [number for item in data.items for number in numbers_in(m, item)] if isinstance(data, Sequence) else [data]


def check_numbers(m: Machine, numbers: list[Value], settings: Kwargs) -> None:
    """Torch makes no ints of NumPy's floats but float64: eager's error."""
    wish = m.look(settings.get("dtype", NONE))
    for number in numbers if not is_none(wish) else ():
        if isinstance(number, ArrayNumber):
            m.run_real(torch.tensor, number.cls(1), dtype=m.known(wish))


def is_of_numpy(number: Value) -> bool:
    return isinstance(number, ArrayNumber) or isinstance(number, ConstValue) and isinstance(number.constant(), np.generic)


def dtype_of(number: Value) -> torch.dtype:
    if isinstance(number, ArrayNumber):
        return number.memory.abstract.dtype
    if is_of_numpy(number):
        return torch_dtype(number.constant().dtype)
    default = torch.get_default_dtype()
    found = {bool: torch.bool, int: torch.int64, float: default, complex: default.to_complex()}.get(number.python_type())
    if found is None:
        raise Break("arguments", name="torch.tensor of symbols and other objects")
    return found


def tensor_of_numbers(m: Machine, data: Value, settings: Kwargs) -> Value:
    data = m.look(data)
    if isinstance(data, Sequence):
        return call_graph(m, "call_function", torch.stack, [ListValue([tensor_of_numbers(m, item, settings) for item in data.items])], {})
    if isinstance(data, ArrayNumber):
        return converted(m, data.memory, settings)
    return call_graph(m, "call_function", torch.scalar_tensor, [data], settings)
