"""The `_foreach_` operators as what they mean: the plain operator on each tensor of the lists.

`run_foreach` is how both worlds run them, so a graph holds only plain operators, which fuse; symbols among the scalars stay symbols.

    _foreach_add_.List(xs, ys, alpha=a)       # aten.add_(x, y, alpha=a) for each x, y
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from firesteel.graph.functions import FUNCTIONS
from firesteel.graph.schemas import Facts
from firesteel.graph.wrappers import is_wrapper

aten = torch.ops.aten
PREFIX = "aten::_foreach_"
VALUES = ("addcdiv", "addcmul", "addcdiv_", "addcmul_")     # their last argument is a keyword of the plain operator
LEFT_ALONE = ("powsum",)
# the plain operators of these names take no numbers
WITH_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max", "maximum_": "clamp_min_", "minimum_": "clamp_max_"}


def is_foreach(fact: Facts) -> bool:
    name = fact.op._schema.name
    return name.startswith(PREFIX) and fact.kind != "out" and name[len(PREFIX):] not in LEFT_ALONE


def run_foreach(world: Any, fact: Facts, args: tuple, kwargs: dict[str, Any]) -> Any:
    op = fact.op
    name, arguments = op._schema.name[len(PREFIX):], op._schema.arguments
    lists = [str(a.type).endswith("[]") or "[]" in str(a.type) or str(a.type).startswith("List") for a in arguments]
    count = len(args[lists.index(True)])
    single = single_operator(WITH_NUMBERS.get(name, name) if op._overloadname in ("Scalar", "ScalarList") else name)
    results = []
    with world._mode:       # outside of a mode, torch loads its distributed tensors, and with them much else, to ask for their class
        for n in range(count):
            given = [a[n] if lists[i] else a for i, a in enumerate(args)]
            if op._overloadname == "Tensor" and name in VALUES:
                given[-1] = given[-1][n]        # one tensor with a number for each
            results.append(single(*given, **kwargs))
    if name.endswith("_"):      # torch counts a write to each, in its kernels
        torch.autograd.graph.increment_version([x for x in args[0] if not x.is_inference()])
    return results if op._schema.returns else None


def numbers_of_tensors(name: str, function: Callable[..., Any], xs: Any, a: Any, b: Any, scalars: Any = 1, **more: Any) -> Any:
    """Numbers that are tensors while compiling, as the steps of an optimiser are: one tensor of all of them.  Distributed tensors refuse a plain
    tensor, but not a number that is one."""
    stacked = isinstance(scalars, Tensor)
    if not stacked and not (isinstance(scalars, (list, tuple)) and any(isinstance(number, Tensor) for number in scalars)):
        return NotImplemented
    if any(map(is_wrapper, xs)):
        made = [scaled(name, *row) for row in zip(xs, a, b, scalars)]
        return xs if name.endswith("_") else made
    return NotImplemented if stacked else function(xs, a, b, torch.stack([torch.as_tensor(number) for number in scalars]), **more)


for _name in VALUES:
    _function = getattr(torch, f"_foreach_{_name}")
    FUNCTIONS.add(_function, functools.partial(numbers_of_tensors, _name, _function))


def single_operator(name: str) -> Callable[..., Any]:
    """The plain operator with the arguments of the list operator."""
    if name in VALUES:
        return lambda x, a, b, value=1: scaled(name, x, a, b, value)
    if name == "norm":
        return lambda x, ord=2, dtype=None: aten.linalg_vector_norm.default(x, ord, None, False, dtype=dtype)
    packet: Any = getattr(aten, name, None)
    if packet is None and name.endswith("_"):
        pure = getattr(aten, name[:-1])
        return lambda x, *rest, **more: aten.copy_.default(x, pure(x, *rest, **more))
    return packet


def scaled(name: str, x: Tensor, a: Tensor, b: Tensor, value: Any) -> Tensor:
    """addcdiv and addcmul, also where the number is a tensor."""
    if not isinstance(value, Tensor):
        return getattr(aten, name)(x, a, b, value=value)
    change = value * (a / b if name.startswith("addcdiv") else a * b)
    return aten.add_.Tensor(x, change) if name.endswith("_") else aten.add.Tensor(x, change)
