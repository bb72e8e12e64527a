"""Scans: running sums, products and extremes along a dimension."""
from __future__ import annotations

from typing import Any

import torch

from firesteel.graph.rules.base import wrap_dim
from firesteel.graph.spec import Spec, fresh
from firesteel.loops.ir import Axis, Phase, Reduce, Store, acc
from firesteel.loops.lower.build import Builder, exprs
from firesteel.loops.lower.value import Operand
from firesteel.loops.scalars import SHORT, is_float, to
from firesteel.ops.block import loop_lowering, operator, probed_rule
from firesteel.ops.reduce import sum_dtype

operator("cummax.* cummin.* _cummax_helper.* _cummin_helper.*", decides=True)


@probed_rule("cumsum cumprod")
def cumsum(x: Spec, dim: int, *, dtype: torch.dtype | None = None) -> Spec:
    wrap_dim(dim, len(x.shape))
    return fresh(x, dtype=dtype or sum_dtype(x.dtype))


def _scan(b: Builder, out: Any, x: Operand, dim: int, op: str) -> Any:
    rank, dtype = len(x.shape), SHORT[out.dtype]
    kind = "f64" if is_float(dtype) else dtype      # eager's running value is a double for every float
    if not rank:
        return b.map(out, lambda i: to(to(x.load(i), kind), dtype))
    dim = dim + rank if dim < 0 else dim
    axes = {d: Axis(f"i{d}" if d != dim else f"r{d}", n) for d, n in enumerate(x.shape) if n != 1 or d == dim}
    index = tuple([axes[d].value if d in axes else 0 for d in range(rank)])
    running = Reduce("a0", op, to(x.load(index), kind), kind)
    buffer = b.buffer(out)
    store = Store(buffer.name, exprs(index), to(acc(running), dtype, b.loose))
    outer = [a for d, a in axes.items() if d != dim]
    b.nest(outer, Phase("scan", (axes[dim],), (running,), (store,)))
    return Operand.of(buffer, out)


loop_lowering("cumsum")(lambda b, out, x, dim, *, dtype=None: _scan(b, out, x, dim, "sum"))


@probed_rule("logcumsumexp")
def logcumsumexp(x: Spec, dim: int) -> Spec:
    wrap_dim(dim, len(x.shape))
    return fresh(x)


@probed_rule("cummax cummin")
def cummax(x: Spec, dim: int) -> tuple[Spec, Spec]:
    wrap_dim(dim, len(x.shape))
    values = fresh(x)
    return values, values.to(torch.int64)


loop_lowering("cumprod")(lambda b, out, x, dim, *, dtype=None: _scan(b, out, x, dim, "prod"))
