"""RULES and what every family of rules shares: registration by name, dimensions, broadcasting, promotion of dtypes.

A rule has the signature of its operator, with Specs for tensors and sizes (int or Expr) for SymInts, and returns a Spec, a
tuple or list of them, or a plain value.  It raises RuntimeError or IndexError where eager would.  A rule knows nothing of
in-place variants: those are derived from the functional operator's row.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from firesteel.errors import DataAccess  # noqa: F401  # also known from here
from firesteel.graph.sizes import current, expands_alone, less, same, unknown
from firesteel.graph.spec import (
    Shape,
    Spec,
    channels_last_strides,
    contiguous_strides,
    elementwise_strides,
    like,
    make_spec,
    preserved_strides,
    suggests_channels_last,
)
from firesteel.operators import Facet
from firesteel.sym.expr import Expr, Size, max_, min_
from firesteel.targets import HOST, on_host

RULES: Facet[Callable[..., Any]] = Facet("shape rule")
PROBED: Facet[bool] = Facet("probed by its kernel")         # eager's kernel is asked about dtypes, on tensors of one element
ONE_DEVICE: Facet[bool] = Facet("takes one device")


def rule(names: str, *, probed: bool = False, one_device: bool = False) -> Callable[[Callable], Callable]:
    """Decorator: the rule of each of the operators named, and what else is checked before it runs (`refusals.py`)."""
    def register(function: Callable) -> Callable:
        if probed:
            PROBED.named(names)(True)
        if one_device:
            ONE_DEVICE.named(names)(True)
        return RULES.named(names)(function)
    return register


probed_rule = functools.partial(rule, probed=True)
device_rule = functools.partial(rule, one_device=True)


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


def is_integral(dtype: torch.dtype) -> bool:
    """Integers and bool."""
    return dtype in _INTEGRAL


@functools.cache
def promote(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    return a if a is b or b is None else b if a is None else torch.promote_types(a, b)


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

# ---------------------------------------------------------------- pointwise operators

def elementwise(operands: list[Spec], dtype: torch.dtype) -> Spec:
    """The fresh result of a pointwise operator over tensors; without any, it is one number."""
    if not operands:
        return make_spec((), dtype, HOST)
    first = operands[0]
    shape, device = first.shape, first.device
    if all(op.shape == shape and op.strides == first.strides for op in operands) and first.strides == contiguous_strides(shape):
        return _with(first, dtype) if device == operands[-1].device else _checked_device(operands, shape, first.strides, dtype)
    for op in operands[1:]:
        shape = broadcast(shape, op.shape)
    return _checked_device(operands, shape, elementwise_strides(shape, operands), dtype)


def _with(spec: Spec, dtype: torch.dtype) -> Spec:
    if spec.dtype is dtype and spec.offset == 0:   # an Expr is never equal to a number
        return spec
    return Spec(spec.shape, spec.strides, 0, dtype, spec.device)


def _checked_device(operands: list[Spec], shape, strides, dtype: torch.dtype) -> Spec:
    return Spec(shape, strides, 0, dtype, common_device(operands))


def common_device(operands: list[Spec]) -> torch.device:
    """The device of the operands; a 0-dim CPU tensor may join any."""
    device = operands[0].device
    for op in operands[1:]:
        if op.device != device:
            if not op.shape and on_host(op):
                continue
            check(device.type == HOST.type and all(not o.shape for o in operands if o.device == device),
                  f"Expected all tensors to be on the same device, but found at least two devices, {device} and {op.device}!")
            device = op.device
    return device


def converted(operand: Spec, dtype: torch.dtype) -> Spec:
    """On CPU an operand of another dtype is copied first, which makes a non-dense one dense."""
    if operand.dtype is dtype or not on_host(operand) or operand.strides == contiguous_strides(operand.shape):
        return operand
    return operand._replace(strides=preserved_strides(operand))


def tensors_of(*args: Any) -> list[Spec]:
    return [a for a in args if type(a) is Spec]


DtypeRule = Callable[[torch.dtype], torch.dtype]


def same_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype


def to_bool(dtype: torch.dtype) -> torch.dtype:
    return torch.bool


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return TO_REAL.get(dtype, dtype)


def unary(dtype_rule: DtypeRule) -> Callable[..., Spec]:
    """The rule of a pointwise operator of one tensor."""
    def rule_of_unary(x: Spec, *args: Any, **kwargs: Any) -> Spec:
        dtype = dtype_rule(x.dtype)
        if x.strides == contiguous_strides(x.shape):
            return _with(x, dtype)
        return Spec(x.shape, elementwise_strides(x.shape, [x]), 0, dtype, x.device)
    return rule_of_unary


def into_empty_like(x: Spec, *args: Any, **kwargs: Any) -> Spec:
    """The rule of a pointwise operator that eager computes into `empty_like`: a dense tensor's strides stay, those of sizes of 1 too."""
    return like(x)


def binary(dtype_rule: DtypeRule, numbers: bool = True) -> Callable[..., Spec]:
    """The rule of a pointwise operator of two tensors, or of a tensor and a number.  `numbers`: eager makes a tensor of a number, whose shape is not
    its neighbour's, so that the strides of dimensions of size 1 count."""
    def rule_of_binary(a: Any, b: Any = None, *args: Any, **kwargs: Any) -> Spec:
        if type(a) is Spec and type(b) is Spec:
            if a.dtype is b.dtype:
                return elementwise([a, b], dtype_rule(a.dtype))
            common = result_dtype((a, b))
            return elementwise([converted(a, common), converted(b, common)], dtype_rule(common))
        common = result_dtype((a, b))
        return elementwise([converted(x, common) for x in tensors_of(a, b)] + [A_NUMBER] * numbers, dtype_rule(common))
    return rule_of_binary


def joined(*operands: Any) -> Spec:
    """The result of a pointwise operator for which eager first makes all of its operands one dtype, each dense."""
    common = result_dtype(operands)
    return elementwise([converted(x, common) for x in tensors_of(*operands)], common)


A_NUMBER = Spec((), (), 0, torch.float64, HOST)


def suggested(x: Spec, shape: tuple[Size, ...] | None = None, dtype: torch.dtype | None = None) -> Spec:
    """A fresh tensor in the memory format that eager would suggest for x."""
    shape = x.shape if shape is None else shape
    strides = channels_last_strides(shape) if len(shape) in (4, 5) and suggests_channels_last(x) else contiguous_strides(shape)
    return Spec(shape, strides, 0, dtype or x.dtype, x.device)


def each(value: Any, n: int) -> list[Any]:
    """One size for each of n dimensions: of a number, or of a list with one item, for all."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * n if len(values) == 1 else values
