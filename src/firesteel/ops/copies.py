"""Copies: clone, conversions of dtype and device, copies onto another tensor."""
from __future__ import annotations

from typing import Any

from firesteel.graph.rules.base import check, expands_to
from firesteel.graph.spec import Spec, like
from firesteel.loops.lower.build import Builder, broadcast_index, supported
from firesteel.loops.lower.value import Operand
from firesteel.loops.scalars import SHORT, to
from firesteel.ops.block import lowering, operator, probed_rule, rule

operator("_to_copy.* clone.* copy.*", recompute="move")


@rule("copy")
def copy(x: Spec, source: Spec, non_blocking: bool = False) -> Spec:
    check(expands_to(source.shape, x.shape), f"The expanded size of the tensor {x.shape} must match {source.shape}")
    return Spec(x.shape, x.strides, 0, x.dtype, x.device)


@lowering("copy")
def lower_copy_onto(b: Builder, out: Any, x: Operand, source: Operand, *_: Any) -> Any:
    """copy(x, source): source's values, broadcast, in x's place and dtype."""
    if not supported(SHORT.get(out.dtype, ""), source.dtype) or source.spec.device != out.device:
        return NotImplemented
    source, dtype = b.readable(source), SHORT[out.dtype]
    return b.map(out, lambda index: to(source.load(broadcast_index(index, source.shape)), dtype))


probed_rule("clone")(lambda x, *, memory_format=None: like(x, memory_format=memory_format))


@lowering("clone _to_copy contiguous")
def lower_copy(b: Builder, out: Any, x: Operand, *_: Any, **__: Any) -> Any:
    """A copy in the layout and dtype of `out`.  The rounding was asked for by the program: it is never loose."""
    if not supported(SHORT.get(out.dtype, ""), x.dtype) or x.spec.device != out.device:
        return NotImplemented
    x, dtype = b.readable(x), SHORT[out.dtype]
    return b.map(out, lambda index: to(x.load(index), dtype))


@probed_rule("_to_copy")
def to_copy(x: Spec, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None) -> Spec:
    return like(x, dtype=dtype, device=device, memory_format=memory_format)
