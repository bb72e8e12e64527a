"""Lowerings of the operators that compute each element of the result from the elements at the same place.

A row says only the scalar body.  Tensors arrive in it as Exprs, broadcast and converted; plain numbers stay numbers (the
builders of `S` make constants of them); a size of the graph arrives as an Expr converted like a tensor's element.  The
result is rounded to the dtype of the node's Spec, which is torch's promoted one.

How arguments are converted (`to`):
    "result"   to the compute dtype of the result: arithmetic
    "common"   to the compute dtype of the arguments' common dtype: comparisons
    "bool"     to truth values: logical operators
    "own"      to the compute dtype of each argument itself
`raw` names argument positions that are handed over without conversion (the condition of `where`).  `rounds` names positions and keywords at
which eager's kernels for the host round a number, or a tensor without dimensions, to bf16 or f16 before they compute: `x > 0.1` compares with
what 0.1 is in bf16.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from firesteel.loops.lower.build import Builder, broadcast_index, lowering, supported
from firesteel.loops.lower.value import Index, Operand
from firesteel.loops.scalars import DTYPES, SHORT, STORAGE_FLOATS, S, compute_dtype, from_size, is_float, literal, number, to
from firesteel.sym.expr import Expr
from firesteel.targets import on_gpu

# ---------------------------------------------------------------- the machinery

def pointwise(names: str, *, convert: str = "result", raw: tuple[int, ...] = (), rounds: tuple[int | str, ...] = (),
              cuda: Callable[..., Expr] | None = None) -> Callable:
    """Decorator: a scalar body, as the lowering of the operators named; `cuda` is that of a GPU, where eager's kernel there has other constants."""
    def register(body: Callable[..., Expr]) -> Callable[..., Expr]:
        def lower(b: Builder, out: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = cuda if cuda is not None and on_gpu(out) else body
            return lower_pointwise(b, out, chosen, convert, raw, args, kwargs, () if on_gpu(out) else rounds)
        lowering(names)(lower)
        return body
    return register


def lower_pointwise(b: Builder, out: Any, body: Callable, convert: str, raw: tuple[int, ...], args: tuple, kwargs: dict,
                    rounds: tuple[int | str, ...] = ()) -> Any:
    result = SHORT.get(out.dtype, "")
    tensors = [a for a in args if type(a) is Operand] + [a for a in kwargs.values() if type(a) is Operand]
    if any(t.spec.device != out.device for t in tensors):
        return NotImplemented       # kernels read memory of one device; eager also takes CPU scalars beside GPU tensors
    if not supported(result, *[t.dtype for t in tensors]) or not any(type(a) in (Operand, Expr) for a in args):
        return NotImplemented       # numbers alone are computed by the library
    dtype = CONVERSIONS[convert](result, args)
    sources = [b.readable(a) if type(a) is Operand else a for a in args]
    options = {k: b.readable(v) if type(v) is Operand else v for k, v in kwargs.items()}

    def element(index: Index) -> Expr:
        values = [_scalar(a, index, None if n in raw else dtype, n in rounds if rounds else None) for n, a in enumerate(sources)]
        named = {k: _scalar(v, index, dtype, k in rounds if rounds else None) for k, v in options.items()}
        return body(*values, **named)
    try:
        return b.map(out, element)
    except Impossible:
        return NotImplemented


class Impossible(Exception):
    """Raised by a body for which no loop nest will do; nothing has been emitted by then."""


def _scalar(value: Any, index: Index, dtype: str | None, rounds: bool | None = None) -> Any:
    """Of a number or a tensor without dimensions, `rounds` says what eager's kernel does with it; None where that is not known."""
    if rounds is not None and dtype in STORAGE_FLOATS and not getattr(value, "shape", ()):
        return _one_number(value, dtype, rounds)
    if type(value) is Operand:
        loaded = value.load(broadcast_index(index, value.shape))
        return loaded if dtype is None else truth(loaded) if dtype == "truth" else _operand(loaded, dtype or value.dtype)
    if isinstance(value, Expr) and dtype is not None:
        return number(value, compute_dtype(dtype or value.dtype)) if dtype != "truth" else truth(from_size(value))
    return value


def _one_number(value: Any, dtype: str, rounds: bool) -> Any:
    """A number, a size or a tensor without dimensions, in the dtype in which values of `dtype` are computed."""
    if type(value) in (int, float):
        return literal(value, dtype).attr if rounds else value
    if type(value) is Operand:
        value = value.load(())
    elif isinstance(value, Expr):
        value = number(value, compute_dtype(dtype))
    if not isinstance(value, Expr):
        return value
    return to(to(value, dtype) if rounds else value, compute_dtype(dtype))


def _operand(value: Expr, dtype: str) -> Expr:
    """A tensor's element in the dtype in which values of `dtype` are computed.  Eager converts integers to `dtype` itself first."""
    if dtype in STORAGE_FLOATS and value.dtype in ("i64", "i32", "i16"):
        value = to(value, dtype)
    return to(value, compute_dtype(dtype))


def truth(value: Expr) -> Expr:
    """value != 0, in the dtype in which it can be compared."""
    if value.dtype == "bool":
        return value
    return S.ne(to(value, compute_dtype(value.dtype)), 0)


CONVERSIONS: dict[str, Callable[[str, tuple], str]] = {
    "result": lambda result, args: result,
    "common": lambda result, args: common_dtype(args),
    "bool": lambda result, args: "truth",
    "own": lambda result, args: "",
}


@functools.cache
def promote(x: str, y: str) -> str:
    return SHORT[torch.promote_types(DTYPES[x], DTYPES[y])] if x and y else x or y


def common_dtype(args: tuple) -> str:
    """torch's promotion: dimensioned tensors first; 0-d tensors, then numbers, only count if of a higher kind."""
    dimensioned = zero_d = number = ""
    for a in args:
        if type(a) is Operand:
            if a.shape:
                dimensioned = promote(a.dtype, dimensioned)
            else:
                zero_d = promote(a.dtype, zero_d)
        elif a is not None:
            number = promote(_number_dtype(a), number)
    result = dimensioned
    for weaker in (zero_d, number):
        if weaker and (not result or _kind(weaker) > _kind(result)):
            result = weaker
    return result


def _number_dtype(value: Any) -> str:
    if isinstance(value, Expr):
        return value.dtype if value.dtype != "f64" else SHORT[torch.get_default_dtype()]
    return "bool" if isinstance(value, bool) else "i64" if isinstance(value, int) else SHORT[torch.get_default_dtype()]


def _kind(dtype: str) -> int:
    return 2 if is_float(dtype) else 0 if dtype == "bool" else 1


# ---------------------------------------------------------------- arithmetic

def times(value: Any, factor: Any) -> Any:
    """value * factor, without the multiplication where the factor is 1."""
    if isinstance(factor, Expr):
        return S.mul(value, to(factor, value.dtype)) if isinstance(value, Expr) else S.mul(literal(value, factor.dtype), factor)
    if factor == 1:
        return value
    return S.mul(value, factor) if isinstance(value, Expr) else value * factor


def as_element(value: Any, like: Expr) -> Expr:
    return value if isinstance(value, Expr) else literal(value, like.dtype)
