"""Operators that are called rather than lowered.

Two kinds, counted apart in `fs.counters["native"]`: those for which the library's kernel is the right answer
("library_calls": matrix products, convolutions, attention, sorting, FFT, random numbers), and those for which nobody has
written a row ("fallbacks", and "fallback:<operator>" for each).  Matrix products write into memory of ours (`out=`).
"""
from __future__ import annotations

import functools
from typing import Any

from torch._ops import OpOverload

from firesteel.artifacts import counters
from firesteel.loops.lower.build import Builder, is_group
from firesteel.loops.lower.value import Operand
from firesteel.loops.lower.views import lower_window
from firesteel.operators import Facet

LIBRARY: Facet[bool] = Facet("library call")

OUT_VARIANTS: Facet[OpOverload] = Facet("variant that writes into memory of ours")


def lower_call(b: Builder, out: Any, target: Any, args: tuple, kwargs: dict) -> Any:
    """The operator itself.  A view operator is a window on its argument's storage, described by its Spec."""
    if is_view(target):
        return tuple([lower_window(b, spec, args[0]) for spec in out]) if is_group(out) else lower_window(b, out, args[0])
    count(target)
    variant = OUT_VARIANTS.get(target)
    if variant is not None:
        return b.call(variant, args, kwargs, out, writes_out=True)
    return b.call(target, args, kwargs, out, written=_written(target, args, kwargs))


def _written(target: Any, args: tuple, kwargs: dict) -> list[Operand]:
    """The arguments that the operator writes to, by its schema."""
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:
        return []
    named = {a.name: v for a, v in zip(target._schema.arguments, args)} | kwargs
    values = [named.get(a.name) for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for v in values for t in (v if isinstance(v, (list, tuple)) else [v]) if type(t) is Operand]


def count(target: Any) -> None:
    """aten operators are named by their bare name, all others in full."""
    native, ours = counters["native"], isinstance(target, OpOverload)
    if ours and LIBRARY.of(target):
        native["library_calls"] += 1
    else:
        native["fallbacks"] += 1
        native[f"fallback:{target._schema.name.removeprefix('aten::') if ours else getattr(target, '__name__', str(target))}"] += 1


@functools.cache
def is_view(target: Any) -> bool:
    """Does every result alias an argument that is not written?"""
    returns = target._schema.returns if isinstance(target, OpOverload) else ()
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
