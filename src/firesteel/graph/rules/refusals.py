"""What eager refuses: conditions on the arguments of operators, beside those that rules need for their own sums.

A row has the signature of its operator, as a rule has, and raises where eager raises for metadata alone; what depends on data is found at run
time.  The sentence is short: whoever reports the error to a user lets eager say it.

    refuses("gather")       # runs before the rule of gather
"""
from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from firesteel import transaction
from firesteel.graph.rules.base import ONE_DEVICE, PROBED, RULES, DataAccess, check, is_integral, real_dtype, result_dtype
from firesteel.graph.sizes import must, must_match
from firesteel.graph.spec import Spec
from firesteel.operators import Facet
from firesteel.sym.expr import Expr, Size, ge, le
from firesteel.targets import HOST, on_host

REFUSALS: Facet[Callable[..., None]] = Facet("refusal")
refuses = REFUSALS.named


def checked_rule(op: OpOverload) -> Callable[..., Any] | None:
    """The rule of an operator behind its refusals."""
    rule, refusal = RULES.get(op), REFUSALS.get(op)
    if rule is None:
        return None
    checks: list[Callable[..., None]] = [functools.partial(ask_kernel, op)] if op in PROBED else []
    if op in ONE_DEVICE:
        checks.append(on_one_device)
    if refusal is not None:
        checks.append(lambda args, kwargs: refusal(*args, **kwargs))
    if not checks:
        return rule

    @functools.wraps(rule)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for check_ in checks:
            check_(args, kwargs)
        return rule(*args, **kwargs)
    return checked


# ---------------------------------------------------------------- devices

def on_one_device(args: tuple, kwargs: dict[str, Any]) -> None:
    """All tensors are on one device; a 0-dim CPU tensor may join any.  A kernel cannot read addresses of another device."""
    device = None
    for x in args:
        if type(x) is Spec and x.device != device and (x.shape or not on_host(x)):
            check(device is None, f"Expected all tensors to be on the same device, but found at least two devices, {device} and {x.device}!")
            device = x.device


def known(value: Any) -> bool:
    """Is it a number now?"""
    return isinstance(value, (int, float))


def within(value: Any, low: Any, high: Any, message: str) -> None:
    """low <= value <= high, with None for no limit; sizes may be symbols."""
    for condition in (ge(value, low) if low is not None else True, le(value, high) if high is not None else True):
        must(condition, message)


def same_shape(a: Sequence[Size], b: Sequence[Size], message: str) -> None:
    check(len(a) == len(b), message)
    for m, n in zip(a, b):
        must_match(m, n, message)


def as_many(part: Spec | None, numel: Size, what: str) -> None:
    if part is not None:
        must_match(part.numel(), numel, f"Expected {numel} elements of {what}, got {list(part.shape)}")


def must_be_float(x: Spec, name: str, *others: torch.dtype) -> None:
    check(x.dtype.is_floating_point or x.dtype in others, f'"{name}" not implemented for {x.dtype}')


# ---------------------------------------------------------------- dtypes that a kernel does not know

COMMON = (torch.float32, torch.float64)
# what some kernels do not take, and numbers that do not fit
SPECIAL: dict[type, Callable[[Any], Any]] = {str: str, torch.dtype: lambda d: d, bool: type, complex: type, int: lambda n: not -2**63 <= n < 2**63,
                                             float: lambda x: torch.finfo(torch.float32).max < abs(x) < math.inf}
_fine: set[tuple] = set()       # (operator, dtype, what is special and where) of calls with tensors of one common dtype


def ask_kernel(op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises what eager's kernel raises for these dtypes and numbers: it is called on tensors of one element, once for each kind of call."""
    operands = [a for a in (*args, *kwargs.values()) if type(a) is Spec]
    first = operands[0].dtype if operands else torch.float32
    common = first in COMMON and all(x.dtype is first for x in operands)
    places = (*enumerate(args), *kwargs.items())
    key = (id(op), first, *[(place, SPECIAL[type(a)](a)) for place, a in places if type(a) in SPECIAL])
    if common and key in _fine or any(not on_host(x) for x in operands):
        return
    for number in (a for a in args if type(a) is Expr and operands):
        fits_in(number, result_dtype(operands))
    error = _kernel_error(op, tuple(map(_kind, args)), tuple((k, _kind(v)) for k, v in kwargs.items()))
    if error is not None:
        raise type(error)(*error.args)
    if common:
        _fine.add(key)


def _kind(value: Any) -> Any:
    """An argument, as far as it matters here, hashable; its type is part of it, since 1, 1.0 and True are equal."""
    if type(value) is Spec:
        return Spec, value.dtype, len(value.shape)
    if type(value) is Expr:
        return float if value.dtype == "f64" else int, 1
    return (list, tuple(map(_kind, value))) if isinstance(value, (list, tuple)) else (type(value), value)


def _example(kind: Any) -> Any:
    if kind[0] is Spec:
        return torch.ones((1,) * kind[2], dtype=kind[1])
    return [_example(k) for k in kind[1]] if kind[0] is list else kind[1]


@functools.lru_cache(4096)
def _kernel_error(op: OpOverload, args: tuple, kwargs: tuple) -> Exception | None:
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd(), contextlib.ExitStack() as stack:
        if not transaction.is_beside():     # all threads share what becomes of warnings
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        try:
            op(*map(_example, args), **{k: _example(v) for k, v in kwargs})
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            return error.with_traceback(None)
    return None


def refuse_out(op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises what eager raises for an out= tensor of a dtype other than the result's: some kernels convert, others insist.  A call that wants more
    than one element is refused, too, and so left to eager."""
    error = _kernel_error(op, tuple(map(_kind, args)), tuple((k, _kind(v)) for k, v in kwargs.items()))
    if error is not None:
        raise type(error)(*error.args)


# ---------------------------------------------------------------- numbers that a dtype does not hold

def fits_in(value: Any, dtype: torch.dtype) -> None:
    """A number that fills a tensor: eager converts it, or says that it overflows."""
    if type(value) is Expr:
        if value.dtype == "i64" and is_integral(dtype) and dtype not in (torch.bool, torch.int64):
            limits = torch.iinfo(dtype)
            within(value, min(limits.min, -limits.max), limits.max, f"value cannot be converted to type {dtype} without overflow")
    elif isinstance(value, (int, float, complex)) and not _holds(dtype, str(type(value)), value):
        raise RuntimeError(f"value cannot be converted to type {dtype} without overflow")


def surely_holds(value: Spec, dtype: torch.dtype) -> None:
    """A tensor of one number that fills another: eager reads it, and says where it overflows.  Only the data decides, unless the dtype does."""
    if not can_hold(dtype, value.dtype):
        raise DataAccess(f"a value of {value.dtype} that fills a tensor of {dtype}, which may not hold it")


def can_hold(dtype: torch.dtype, source: torch.dtype) -> bool:
    """Does a dtype hold each number of another, without an overflow?"""
    if dtype is source or dtype is torch.bool or source is torch.bool:
        return True
    if source.is_complex and not dtype.is_complex or source.is_floating_point and is_integral(dtype):
        return False
    (least, most), (low, high) = _limits(source), _limits(real_dtype(dtype))
    return min(low, -high) <= least and most <= high


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    dtype = real_dtype(dtype)
    about = torch.iinfo(dtype) if is_integral(dtype) else torch.finfo(dtype)
    return about.min, about.max


@functools.lru_cache(4096)
def _holds(dtype: torch.dtype, kind: str, value: Any) -> bool:
    with torch._C._DisableTorchDispatch():
        try:
            torch.ops.aten.full.default([2], value, dtype=dtype, device=HOST)
        except (RuntimeError, OverflowError):
            return False
    return True
