"""Operators without a rule: torch's meta kernel says what they return.

It takes plain sizes.  Where a row of SHAPES gives the shapes for all sizes, the kernel is asked for those of the example call, and each result gets
the row's shape in the order of dimensions that the kernel chose; else the symbols are fixed to their hints by guards and counted in
counters["aot"]["specialized_by_op"].  A row has the signature of its operator, as a rule has, and returns the shape of the result, or a list of
shapes, None for a result that is not there.

    shape("linalg_cross")       # two batches of vectors -> their broadcast shape
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from firesteel.artifacts import counters
from firesteel.errors import InternalError
from firesteel.graph.plain_numbers import plain_numbers
from firesteel.graph.sizes import current, fixed, hint
from firesteel.graph.spec import Shape, Spec, spec_of, strides_in_order
from firesteel.graph.tensor import AbstractTensor, tensors_in, to_spec
from firesteel.operators import Facet
from firesteel.sym.expr import Expr, Size
from firesteel.sym.symint import SYMBOLIC, from_sym
from firesteel.targets import HOST

SHAPES: Facet[Callable[..., Any]] = Facet("shape of a library operator's results")
shape = SHAPES.named


def with_shapes(op: OpOverload, shapes: Any, example: Any) -> Any:
    """The Specs of the results: `example` has them for the sizes of the example call, `shapes` are the row's."""
    if type(example) is Spec:
        return _with_shape(op, tuple(shapes), example)
    if not isinstance(example, (list, tuple)):
        return example
    if len(shapes) != len(example):
        raise InternalError(f"{op} has {len(example)} results; its row has {len(shapes)}")
    return type(example)(with_shapes(op, s, e) if s is not None else None for s, e in zip(shapes, example))


def _with_shape(op: OpOverload, sizes: Shape, example: Spec) -> Spec:
    if tuple(hint(s) for s in sizes) != example.shape:
        raise InternalError(f"{op} gives {list(example.shape)}; its row says {list(sizes)}")
    if sizes == example.shape:
        return example
    order = sorted(range(len(sizes)), key=lambda d: (example.strides[d], example.shape[d], -d))
    return example._replace(shape=sizes, strides=strides_in_order(sizes, order))


def as_first(x: Spec, *rest: Any, **options: Any) -> Shape:
    return x.shape


def as_second(grad: Spec, x: Spec, *rest: Any, **options: Any) -> Shape:
    return x.shape


def as_third(a: Spec, b: Spec, x: Spec, *rest: Any, **options: Any) -> Shape:
    return x.shape


def meta_specs(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """The Specs of the results."""
    counters["aot"]["meta_kernels"] += 1
    specs = [t.spec for t in tensors_in((args, kwargs))]
    symbolic = any(map(is_symbolic, specs)) or any(type(v) in SYMBOLIC for v in _values((args, kwargs)))
    shapes = SHAPES.get(op) if symbolic else None
    if shapes is not None and all(current.env.has_hint(size) for spec in specs for size in (*spec.shape, *spec.strides)):
        example = _by_meta_kernel(op, args, kwargs, hint)
        return with_shapes(op, shapes(*to_spec(args), **{k: to_spec(v) for k, v in kwargs.items()}), example)
    if symbolic:
        count_specialized(op)
    return _by_meta_kernel(op, args, kwargs, partial(fixed, why=f"{op} has no rule for symbolic sizes"))


def _values(value: Any) -> Iterator[Any]:
    """All that is no list."""
    for v in value.values() if isinstance(value, dict) else value:
        if isinstance(v, (list, tuple, dict)):
            yield from _values(v)
        else:
            yield v


def is_symbolic(spec: Spec) -> bool:
    for size in spec.shape:
        if type(size) is Expr:
            return True
    return type(spec.offset) is Expr or any(type(s) is Expr for s in spec.strides)


def count_specialized(op: OpOverload) -> None:
    counters["aot"]["specialized_by_op"] += 1
    counters["aot"][f"specialized_by_op:{op}"] += 1


def _by_meta_kernel(op: OpOverload, args: tuple, kwargs: dict, number: Callable[[Size], int]) -> Any:
    try:
        with plain_numbers():
            results = op(*as_meta(args, number), **as_meta(kwargs, number))
    except NotImplementedError as error:
        raise NotImplementedError(f"no shape rule for {op}: add a row in graph/rules/ ({error})") from error
    return _specs_on(results, _device_of(args, kwargs))


def as_meta(value: Any, number: Callable[[Size], int] = fixed) -> Any:
    """Arguments for torch's meta kernel; `number` makes plain ints of symbolic sizes."""
    if isinstance(value, torch.Tensor):
        spec = value.spec if type(value) is AbstractTensor else spec_of(value)
        shape, strides = (tuple([number(s) for s in sizes]) for sizes in (spec.shape, spec.strides))
        return torch.empty_strided(shape, strides, dtype=spec.dtype, device="meta")
    if isinstance(value, dict):
        return {k: as_meta(v, number) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_meta(v, number) for v in value)
    if type(value) in SYMBOLIC:
        return number(from_sym(value))
    return torch.device("meta") if isinstance(value, torch.device) else None if type(value) is torch.Generator else value


def _device_of(args: tuple, kwargs: dict) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    devices = [t.spec.device for t in tensors_in((args, kwargs))]
    return next((d for d in devices if d.type != HOST.type), devices[0] if devices else HOST)


def _specs_on(results: Any, device: torch.device) -> Any:
    if isinstance(results, torch.Tensor):
        return spec_of(results)._replace(device=device)
    if isinstance(results, (list, tuple)):
        return type(results)(_specs_on(r, device) for r in results) if type(results) in (list, tuple) else tuple(
            _specs_on(r, device) for r in results)
    return results
