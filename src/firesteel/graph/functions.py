"""Functions of torch whose C++ code takes sizes as plain numbers, or another way for tensors without data: the same, by operators that do as eager.

A row has the signature of its function and returns NotImplemented where it has nothing to say: then the function itself runs, and what
it asks as a number is fixed by a guard (`abstract.py`).  Who runs the node of a graph asks `symbolic_form`; a mode, which costs
microseconds a call, does it for a program that is no graph yet.

    symbolic_form(F.interpolate)(x, scale_factor=2)         # x: f32[s0, 3, s1, s2]
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from firesteel.table import Table

aten = torch.ops.aten
FUNCTIONS: Table[Callable[..., Any]] = Table("function with symbolic sizes", "graph/functions.py")


def symbolic_form(fn: Any, symbols: bool = True) -> Any:
    """What to call instead of `fn` where sizes may be symbols.  Functions in Python may call others that have a row: if there are `symbols`, they
    run under the mode."""
    owner = fn.__self__ if isinstance(fn, BuiltinFunctionType) else None
    if isinstance(owner, torch.Tensor):
        row = FUNCTIONS.get(getattr(torch.Tensor, fn.__name__, None))
        return fn if row is None else partial(_either, partial(row, owner), fn)
    row = FUNCTIONS.get(fn) if isinstance(fn, (FunctionType, BuiltinFunctionType)) else None
    if row is not None:
        return partial(_either, row, fn)
    return partial(_under_mode, fn) if symbols and isinstance(fn, FunctionType) else fn


def _under_mode(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with SymbolicFunctions():
        return fn(*args, **kwargs)


def _either(row: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = row(*args, **kwargs)
    return fn(*args, **kwargs) if result is NotImplemented else result


def has_symbols(*values: Any) -> bool:
    """Has a tensor among them a symbolic size?"""
    return any(type(s) is torch.SymInt for v in values if isinstance(v, torch.Tensor) for s in v.shape)


def symbolic_row(*functions: Any) -> Callable[[Callable], Callable]:
    """Rows that are used where a tensor among the arguments, or in a list that is the first of them, has a symbolic size."""
    def add(row: Callable) -> Callable:
        @wraps(row)
        def where_symbolic(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args and isinstance(args[0], (list, tuple)) else ()
            return row(*args, **kwargs) if has_symbols(*first, *args, *kwargs.values()) else NotImplemented
        for function in functions:
            FUNCTIONS.add(function, where_symbolic)
        return row
    return add


class SymbolicFunctions(TorchFunctionMode):
    """Calls the symbolic form of every function."""

    def __torch_function__(self, fn: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return symbolic_form(fn, symbols=False)(*args, **(kwargs or {}))


# ---------------------------------------------------------------- pooling

@FUNCTIONS.row(torch.max_pool1d, F.max_pool1d)
def max_pool1d(input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
               return_indices: bool = False) -> Any:
    """Without gradients the CPU has a kernel of its own, whose result is contiguous; the general one keeps the layout of its input."""
    if return_indices or input.device.type != "cpu" or (input.requires_grad and torch.is_grad_enabled()):
        return NotImplemented
    return torch.max_pool1d_with_indices(input.contiguous(), kernel_size, [] if stride is None else stride, padding, dilation, ceil_mode)[0]


# ---------------------------------------------------------------- resampling
# (dimensions, mode, antialias) -> operator, and does it take align_corners
RESAMPLERS = {
    (3, "nearest", False): (aten.upsample_nearest1d.default, False),
    (4, "nearest", False): (aten.upsample_nearest2d.default, False),
    (5, "nearest", False): (aten.upsample_nearest3d.default, False),
    (3, "nearest-exact", False): (aten._upsample_nearest_exact1d.default, False),
    (4, "nearest-exact", False): (aten._upsample_nearest_exact2d.default, False),
    (5, "nearest-exact", False): (aten._upsample_nearest_exact3d.default, False),
    (3, "linear", False): (aten.upsample_linear1d.default, True),
    (4, "bilinear", False): (aten.upsample_bilinear2d.default, True),
    (4, "bicubic", False): (aten.upsample_bicubic2d.default, True),
    (5, "trilinear", False): (aten.upsample_trilinear3d.default, True),
    (4, "bilinear", True): (aten._upsample_bilinear2d_aa.default, True),
    (4, "bicubic", True): (aten._upsample_bicubic2d_aa.default, True),
}


@FUNCTIONS.row(F.interpolate)
def interpolate(input: torch.Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
                recompute_scale_factor: bool | None = None, antialias: bool = False) -> Any:
    """What is wrong, or has no row, is left to the function itself."""
    op, has_corners = RESAMPLERS.get((input.dim(), mode, antialias), (None, False))
    given = _each(size if size is not None else scale_factor, input.dim() - 2)
    if op is None or given is None or (size is None) == (scale_factor is None) or (align_corners is not None and not has_corners):
        return NotImplemented
    sizes = given
    scales: list[float | None] = [None] * len(given)
    if size is None:
        sizes = [torch.sym_int(n * scale) for n, scale in zip(input.shape[2:], given)]
        scales = scales if recompute_scale_factor else [float(scale) for scale in given]
    return op(input, sizes, *([bool(align_corners)] if has_corners else []), *scales)


def _each(value: Any, count: int) -> list[Any] | None:
    """One value for each dimension; None where there are too many or too few."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    return values if len(values) == count else None
