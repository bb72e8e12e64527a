"""Wrong calls of torch's operators: the samples of the operator database with one argument changed, kept where eager raises.

    for wrong in wrong_calls(op, torch.float32, samples=1):
        wrong.text      # "input: one row more"
        wrong.call()    # raises wrong.error
"""
from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree

database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)     # it would set the seed inside of a graph

# Operators whose eager kernels end the process for some wrong arguments, or that take tensors without an abstract form.
CRASHES = {
    "lu_unpack", "nn.functional.embedding_bag", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "_segment_reduce.lengths", "_segment_reduce.offsets",
    "linalg.eigvals", "linalg.eig", "sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse", "jiterator_unary", "torch._scaled_mm", "torch._scaled_mm_v2",
    "torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward", "nn.functional.batch_norm.without_cudnn",
}


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def _more(t: torch.Tensor, d: int) -> torch.Tensor:
    return torch.cat([t, t.narrow(d, 0, 1)], d)


def _shapes(t: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for d in {0, t.ndim - 1} if t.ndim else ():
        if t.shape[d] > 0:
            yield f"one row more in dimension {d}", _more(t, d)
            yield f"one row less in dimension {d}", t.narrow(d, 0, t.shape[d] - 1)
            yield f"no rows in dimension {d}", t.narrow(d, 0, 0)
    yield "one dimension more", t.unsqueeze(0)
    if t.ndim and t.shape[0]:
        yield "one dimension less", t[0]
    if t.numel():
        yield "a single element", t.flatten()[0]


def _dtypes(t: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for dtype in (torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64):
        if dtype is not t.dtype:
            yield f"as {dtype}", t.to(dtype)


def _values(t: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if t.dtype in (torch.int64, torch.int32):
        changed = (lambda v: v + 1000, lambda v: v - 1000, lambda v: -v - 1, lambda v: v + 1, lambda v: v * 0)
    elif t.is_floating_point():
        changed = (lambda v: v * 10 + 2, lambda v: -v.abs() - 1, lambda v: v * float("nan"), lambda v: v * 0)
    else:
        changed = ()
    for k, change in enumerate(changed):
        yield f"other values {k}", change(t)


def tensor_changes(t: torch.Tensor) -> Iterator[tuple[str, Any]]:
    if t.layout != torch.strided or t.is_quantized:
        return
    yield from _shapes(t)
    yield from _dtypes(t)
    yield from _values(t)
    yield "on another device", t.to("meta")


NUMBERS: dict[type, Callable[[Any], list[Any]]] = {
    bool: lambda v: [],
    int: lambda v: [v + 1, v - 1, v + 3, v - 5, 0, -1, 100],
    float: lambda v: [-1.0, 0.0, 2.5, float("nan"), -v],
    str: lambda v: ["nonsense"],
    torch.dtype: lambda v: [torch.int32, torch.bool, torch.complex64, torch.float16],
}


def changes(value: Any) -> Iterator[tuple[str, Any]]:
    """(what is wrong, the argument instead) for one argument."""
    if isinstance(value, torch.Tensor):
        yield from tensor_changes(value)
    elif isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        yield from _list_changes(value)
    else:
        for other in NUMBERS.get(type(value), lambda v: [])(value):
            if other != value:
                yield f"{other!r} for {value!r}", other


def _list_changes(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    for n, part in enumerate(value[:3]):
        for text, other in changes(part):
            yield f"[{n}] {text}", kind((*value[:n], other, *value[n + 1:]))
    if value:
        yield "one less", value[:-1]
        yield "the last one twice", kind((*value, value[-1]))
        yield "the first one again", kind((*value[:-1], value[0]))


@dataclass
class Wrong:
    """A call that eager refuses."""
    op: Any
    text: str
    args: tuple
    kwargs: dict[str, Any]
    error: Exception

    def program(self) -> tuple[Callable[..., Any], list[torch.Tensor]]:
        """The call as a function of its tensors."""
        flat, structure = pytree.tree_flatten((self.args, self.kwargs))
        places = [n for n, v in enumerate(flat) if isinstance(v, torch.Tensor)]
        def run(*tensors: torch.Tensor) -> Any:
            values = list(flat)
            for n, t in zip(places, tensors):
                values[n] = t
            args, kwargs = pytree.tree_unflatten(values, structure)
            return self.op(*args, **kwargs)
        return run, [flat[n] for n in places]


def error_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return error
    return None


def copied(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value)


def variants(args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[str, tuple, dict[str, Any]]]:
    for n, arg in enumerate(args):
        for text, other in changes(arg):
            yield f"{n}: {text}", (*args[:n], other, *args[n + 1:]), kwargs
    for name, arg in kwargs.items():
        for text, other in changes(arg):
            yield f"{name}: {text}", args, {**kwargs, name: other}


def wrong_calls(op: Any, dtype: torch.dtype, samples: int = 1) -> Iterator[Wrong]:
    """What eager refuses of the first samples with one argument changed."""
    torch.manual_seed(0)
    found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 12))
    chosen = found if len(found) <= samples else [found[k * (len(found) - 1) // max(1, samples - 1)] for k in range(samples)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(chosen):
            for text, args, kwargs in variants((sample.input, *sample.args), sample.kwargs):
                torch.manual_seed(0)
                error = error_of(op, *copied(args), **copied(kwargs))
                if error is not None:
                    yield Wrong(op, f"sample {number}, {text}", args, kwargs, error)
