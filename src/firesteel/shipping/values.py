"""Values of a compiled program as JSON, and back: numbers, containers, dtypes, operators, functions that have a name, records, tensors.

What has no text is refused in words.  Reading looks functions up in torch, firesteel and Python's `operator` and `math` alone, and operators
among those that are registered.  Tensors are numbers of a list, which is kept beside the text.

    encode((1, torch.float32, torch.mm), tensors)       # {"tuple": [1, {"torch": "float32"}, {"function": ["torch", "mm"]}]}
"""
from __future__ import annotations

import dataclasses
import importlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel.errors import PackageError
from firesteel.homes import is_in_package
from firesteel.table import Table

HOMES = ("torch", "torch.nn.functional", "torch._C._nn", "torch._C._special", "torch._C._fft", "torch._C._linalg", "torch.Tensor")
TRUSTED = ("torch", "firesteel", "operator", "_operator", "math")      # packages whose functions a file may name
NAMED = (torch.dtype, torch.layout, torch.memory_format)        # attributes of torch


def home_of(value: Any) -> tuple[str, str] | None:
    """(module, name) that find a function or a class again."""
    own = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    qualified = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    for home, name in ((own, qualified), *((home, getattr(value, "__name__", "")) for home in HOMES)):
        if home and name and find(home, name) is value:
            return home, name
    return None


def find(home: str, name: str) -> Any:
    """The object of this name in a module; a class of torch's counts as one.  None where there is none."""
    try:
        found = torch.Tensor if home == "torch.Tensor" else importlib.import_module(home)
        return operator.attrgetter(name)(found)
    except (ImportError, AttributeError):
        return None


# ---------------------------------------------------------------- writing

def encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """JSON of a value; tensors are added to the list."""
    for kind, write in WRITERS.items():
        if isinstance(value, kind):
            return write(value, tensors)
    if type(value).__name__ in RECORDS and dataclasses.is_dataclass(value):
        fields = {field.name: encode(getattr(value, field.name), tensors) for field in dataclasses.fields(value) if field.init}
        return {"record": type(value).__name__, "fields": fields}
    home = home_of(value) if callable(value) else None
    if home is None or not any(is_in_package(home[0], trusted) for trusted in TRUSTED):
        raise PackageError(f"The program holds {value!r:.100}, a {type(value).__name__}, which cannot be written into a package.",
                           hint="Pass tensors, numbers, texts and containers of them.")
    return {"function": list(home)}


def _encode_tensor(value: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
    place = next((k for k, known in enumerate(tensors) if known is value), len(tensors))
    if place == len(tensors):
        tensors.append(value)
    return {"tensor": place}


def _items(values: Sequence[Any], tensors: list[torch.Tensor]) -> list[Any]:
    return [encode(value, tensors) for value in values]


WRITERS: Table[Callable[[Any, list[torch.Tensor]], Any]] = Table("kind of value in a package", "shipping/values.py")
WRITERS.rows({
    (bool, str, type(None)): lambda v, t: v,
    int: lambda v, t: int(v),
    float: lambda v, t: float(v) if math.isfinite(v) else {"float": repr(float(v))},
    complex: lambda v, t: {"complex": [encode(v.real, t), encode(v.imag, t)]},
    list: lambda v, t: _items(v, t),
    tuple: lambda v, t: {"tuple": _items(v, t)},
    dict: lambda v, t: {"dict": [_items(pair, t) for pair in v.items()]},
    slice: lambda v, t: {"slice": _items((v.start, v.stop, v.step), t)},
    NAMED: lambda v, t: {"torch": str(v).removeprefix("torch.")},
    torch.device: lambda v, t: {"device": str(v)},
    torch._ops.OpOverload: lambda v, t: {"operator": str(v)},
    torch.Tensor: _encode_tensor,
})


# ---------------------------------------------------------------- reading

RECORDS: Table[Callable[..., Any]] = Table("record in a package", "shipping/values.py")     # filled by who writes and reads them


def decode(data: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(data, list):
        return [decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    kind, content = next(iter(data.items()))
    if kind == "tensor":
        return tensors[content]
    if kind == "record":
        return RECORDS[content](**{name: decode(item, tensors) for name, item in data["fields"].items()})
    return READERS[kind](content if kind in PLAIN else decode(content, tensors))


def _operator(name: str) -> Any:
    try:
        return operator.attrgetter(name)(torch.ops)
    except (AttributeError, RuntimeError):
        raise PackageError(f"The package calls the operator {name}, which is not registered in this process.",
                           hint="Import the library that registers it, or use the release of torch that made the package.") from None


def _function(home: Sequence[str]) -> Any:
    found = find(*home) if any(is_in_package(home[0], trusted) for trusted in TRUSTED) else None
    if found is None:
        raise PackageError(f"The package calls {'.'.join(home)}, which is not there.", hint="Use the releases that made the package.")
    return found


def _torch(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, NAMED):
        raise PackageError(f"The package names torch.{name}, which this release of torch does not have.")
    return found


PLAIN = ("float", "torch", "device", "operator", "function")      # whose content is read as it is
READERS: Table[Callable[[Any], Any]] = Table("kind of value in a package that is read", "shipping/values.py")
_readers: dict[str, Callable[[Any], Any]] = {"float": float, "complex": lambda v: complex(*v), "tuple": tuple, "dict": dict,
                                            "slice": lambda v: slice(*v), "torch": _torch,
                                            "device": torch.device, "operator": _operator, "function": _function}
READERS.rows(_readers)
