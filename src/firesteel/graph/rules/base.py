"""RULES and what every family of rules shares: registration by name, dimensions, broadcasting, promotion of dtypes.

A rule has the signature of its operator, with Specs for tensors and sizes (int or Expr) for SymInts, and returns a Spec, a
tuple or list of them, or a plain value.  It raises RuntimeError or IndexError where eager would.  A rule knows nothing of
in-place variants: those are derived from the functional operator's row.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from firesteel.errors import DataAccess  # noqa: F401  # also known from here
from firesteel.graph.sizes import current, expands_alone, less, same, unknown
from firesteel.graph.spec import Shape, Spec
from firesteel.sym.expr import Expr, Size, max_, min_
from firesteel.table import Table

aten = torch.ops.aten
RULES: Table[Callable[..., Any]] = Table("shape rule", "graph/rules/")


def find(name: str) -> torch._ops.OpOverload | None:
    """The overload "add.Tensor" or "relu" (its default); None where this torch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


def rule(names: str) -> Callable[[Callable], Callable]:
    """Decorator: a row for each of the operators named, those of other torch versions left out."""
    def register(function: Callable) -> Callable:
        for name in names.split():
            op = find(name)
            if op is not None:
                RULES.add(op, function)
        return function
    return register


# ---------------------------------------------------------------- dimensions

def wrap_dim(dim: int, ndim: int) -> int:
    limit = ndim or 1
    if not -limit <= dim < limit:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], but got {dim})")
    return dim + limit if dim < 0 else dim


def wrap_dims(dims: Iterable[int], ndim: int) -> list[int]:
    result = [wrap_dim(d, ndim) for d in dims]
    if len(set(result)) != len(result):
        raise RuntimeError(f"dim {result} appears multiple times in the list of dims")
    return result


CHOICES = frozenset(("where", "min", "max", "abs"))


def clamp_size(value: Size, low: Size | None, high: Size | None) -> Size:
    """The value, not below `low` nor above `high`.  Where only run time knows which it is, or the value is a choice by symbols already, the
    result is a min or max."""
    for bound, choose, below in ((low, max_, True), (high, min_, False)):
        if bound is None or bound is value:
            continue
        if unknown(value, bound) or type(value) is Expr and value.op in CHOICES:
            value = current.env.simplify(choose(value, bound))
        elif less(value, bound) if below else less(bound, value):
            value = bound
    return value


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


# ---------------------------------------------------------------- broadcasting

def broadcast_size(a: Size, b: Size) -> Size:
    if a is b or (type(b) is int and b == 1):
        return a
    if type(a) is int and a == 1:
        return b
    if expands_alone(a, b):
        return b if type(a) is Expr else a
    if type(a) is Expr and same(a, 1):
        return b
    if type(b) is Expr and same(b, 1):
        return a
    raise RuntimeError(f"The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension")


def broadcast(a: Shape, b: Shape) -> Shape:
    if a == b:
        return a
    if len(a) < len(b):
        a, b = b, a
    missing = len(a) - len(b)
    return a[:missing] + tuple(map(broadcast_size, a[missing:], b))


def expands_to(shape: Shape, full: Shape) -> bool:
    """Can `shape` be expanded to `full`?"""
    result = broadcast(shape, full)
    return len(result) == len(full) and all(map(same, result, full))


def broadcast_all(shapes: Iterable[Shape]) -> Shape:
    result: Shape = ()
    for shape in shapes:
        result = broadcast(result, shape)
    return result


# ---------------------------------------------------------------- dtypes

_INTEGRAL = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
                       torch.uint16, torch.uint32, torch.uint64})
TO_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}
_TO_COMPLEX = {torch.float16: torch.complex32, torch.bfloat16: torch.complex64, torch.float32: torch.complex64, torch.float64: torch.complex128}
_promoted: dict[tuple, torch.dtype] = {}


def is_integral(dtype: torch.dtype) -> bool:
    """Integers and bool."""
    return dtype in _INTEGRAL


def promote(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    if a is b or b is None:
        return a
    if a is None:
        return b
    result = _promoted.get((a, b))
    if result is None:
        result = _promoted[a, b] = torch.promote_types(a, b)
    return result


def scalar_dtype(value: Any) -> torch.dtype:
    """The dtype a Python number brings into promotion."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, (int, torch.SymInt)):
        return torch.int64
    if isinstance(value, Expr):
        return torch.int64 if value.dtype == "i64" else torch.bool if value.dtype == "bool" else torch.get_default_dtype()
    return _TO_COMPLEX[torch.get_default_dtype()] if isinstance(value, complex) else torch.get_default_dtype()


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """Eager's rule for categories: a lower category (0-dim tensor, number) only changes the kind of dtype, not its width."""
    if higher is None or lower is None:
        return higher or lower
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return _TO_COMPLEX[higher] if lower.is_complex else higher
    if higher is torch.bool or lower.is_floating_point or lower.is_complex:
        return promote(higher, lower)
    return higher


def result_dtype(operands: Iterable[Any]) -> torch.dtype:
    """Type promotion over Specs and Python numbers."""
    dims = zeros = numbers = None
    for operand in operands:
        if type(operand) is Spec:
            if operand.shape:
                dims = promote(dims, operand.dtype)
            else:
                zeros = promote(zeros, operand.dtype)
        elif operand is not None:
            numbers = promote(numbers, scalar_dtype(operand))
    return _combine(dims, _combine(zeros, numbers))     # type: ignore[return-value]  # there is an operand


def floating(dtype: torch.dtype) -> torch.dtype:
    """Integers become the default floating dtype."""
    return torch.get_default_dtype() if dtype in _INTEGRAL else dtype
