"""Collectives: calls that all ranks of a process group make, in the same order.  The functional ones of torch start and return memory that is filled
meanwhile; `wait_tensor` waits for it.  A group is known by its name, which is the same on all ranks.
"""
from __future__ import annotations

from typing import Any

import torch

from firesteel.graph.autofunctional import library
from firesteel.graph.spec import Spec, make_spec
from firesteel.operators import COLLECTIVES
from firesteel.ops.block import decomposition, operator, rule
from firesteel.sym.expr import Size

STARTS = " ".join(f"_c10d_functional::{name}" for name in (
    "all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce_coalesced",
    "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"))

library.define("barrier(str group_name) -> ()")


@torch.library.impl(library, "barrier", "CompositeExplicitAutograd")
def barrier(group_name: str) -> None:
    torch.distributed.barrier(torch.distributed.distributed_c10d._resolve_process_group(group_name))      # type: ignore[arg-type]  # a NewType


COLLECTIVES.named(f"{STARTS} firesteel::barrier")("start")
COLLECTIVES.named("_c10d_functional::wait_tensor")("wait")
operator("_c10d_functional::*", library=True)


def _contiguous(x: Spec, first: Size) -> Spec:
    return make_spec((first, *x.shape[1:]), x.dtype, x.device)


@rule("_c10d_functional::all_reduce _c10d_functional::broadcast")
def all_reduce(x: Spec, how: Any, group: Any) -> Spec:
    return make_spec(x.shape, x.dtype, x.device)


@rule("_c10d_functional::wait_tensor")
def wait_tensor(x: Spec) -> Spec:
    return x


@decomposition("_c10d_functional::_wrap_tensor_autograd")
def decompose_wrap(x: torch.Tensor) -> torch.Tensor:
    """In eager a tensor that waits at its first use."""
    return torch.ops._c10d_functional.wait_tensor.default(x)


@rule("_c10d_functional::all_gather_into_tensor")
def all_gather_into_tensor(x: Spec, ranks: int, group: Any) -> Spec:
    return _contiguous(x, x.shape[0] * ranks) if x.shape else make_spec((ranks,), x.dtype, x.device)


@rule("_c10d_functional::reduce_scatter_tensor")
def reduce_scatter_tensor(x: Spec, how: str, ranks: int, group: Any) -> Spec:
    return _contiguous(x, x.shape[0] // ranks)


rule("_c10d_functional::all_to_all_single")(lambda x, received, sent, group: _contiguous(x, sum(received)))
rule("_c10d_functional::all_reduce_coalesced")(lambda xs, how, group: [all_reduce(x, how, group) for x in xs])
rule("_c10d_functional::all_gather_into_tensor_coalesced")(lambda xs, ranks, group: [all_gather_into_tensor(x, ranks, group) for x in xs])
rule("_c10d_functional::reduce_scatter_tensor_coalesced")(
    lambda xs, how, ranks, group: [reduce_scatter_tensor(x, how, ranks, group) for x in xs])
rule("firesteel::barrier")(lambda group: None)
