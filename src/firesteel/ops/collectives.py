"""Collectives: calls that all ranks of a process group make, in the same order, and those between two ranks.  The functional ones of torch start and
return memory that is filled meanwhile; `wait_tensor` waits for it.  Those that torch has none of are operators of ours, of the same kind.  A group is
known by its name, which is the same on all ranks.
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



def own(schema: str) -> Any:
    """An operator of ours: its meaning is the decorated function."""
    library.define(schema)
    return torch.library.impl(library, schema.partition("(")[0], "CompositeExplicitAutograd")


def group_of(name: str) -> Any:
    return torch.distributed.distributed_c10d._resolve_process_group(name)      # type: ignore[arg-type]  # a NewType


def filled(memory: torch.Tensor, work: Any) -> torch.Tensor:
    """Memory for which `wait_tensor` waits."""
    torch._C._distributed_c10d._register_work(memory, work)
    return memory


@own("barrier(str group_name) -> ()")
def barrier(group_name: str) -> None:
    torch.distributed.barrier(group_of(group_name))


@own("reduce(Tensor x, str how, int dst, str group_name) -> Tensor")
def reduce(x: torch.Tensor, how: str, dst: int, group_name: str) -> torch.Tensor:
    made = x.clone(memory_format=torch.contiguous_format)
    op = getattr(torch.distributed.ReduceOp, how.upper())
    return filled(made, torch.distributed.reduce(made, op=op, group=group_of(group_name), group_dst=dst, async_op=True))


@own("gather(Tensor x, int dst, int[] received, str group_name) -> Tensor")
def gather(x: torch.Tensor, dst: int, received: list[int], group_name: str) -> torch.Tensor:
    """`received`: how many; none but on the rank that gets them."""
    made = x.new_empty((*received, *x.shape))
    work = torch.distributed.gather(x.contiguous(), list(made.unbind()) or None, group=group_of(group_name), group_dst=dst, async_op=True)
    return filled(made, work)


@own("scatter(Tensor like, Tensor[] parts, int src, str group_name) -> Tensor")
def scatter(like: torch.Tensor, parts: list[torch.Tensor], src: int, group_name: str) -> torch.Tensor:
    made = torch.empty_like(like, memory_format=torch.contiguous_format)
    given = [part.contiguous() for part in parts] or None
    return filled(made, torch.distributed.scatter(made, given, group=group_of(group_name), group_src=src, async_op=True))


@own("send(Tensor x, int dst, int tag, str group_name) -> Tensor")
def send(x: torch.Tensor, dst: int, tag: int, group_name: str) -> torch.Tensor:
    """What it returns is waited for, and nothing else."""
    return filled(x.new_empty(0), torch.distributed.isend(x.contiguous(), group=group_of(group_name), tag=tag, group_dst=dst))


@own("recv(Tensor like, int src, int tag, str group_name) -> Tensor")
def recv(like: torch.Tensor, src: int, tag: int, group_name: str) -> torch.Tensor:
    made = torch.empty_like(like, memory_format=torch.contiguous_format)
    return filled(made, torch.distributed.irecv(made, group=group_of(group_name), tag=tag, group_src=src))


OWN = " ".join(f"firesteel::{name}" for name in ("barrier", "reduce", "gather", "scatter", "send", "recv"))
COLLECTIVES.named(f"{STARTS} {OWN}")("start")
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
rule("firesteel::reduce")(lambda x, how, dst, group: make_spec(x.shape, x.dtype, x.device))
rule("firesteel::gather")(lambda x, dst, received, group: make_spec((*received, *x.shape), x.dtype, x.device))
rule("firesteel::scatter")(lambda like, parts, src, group: make_spec(like.shape, like.dtype, like.device))
rule("firesteel::send")(lambda x, dst, tag, group: make_spec((0,), x.dtype, x.device))
rule("firesteel::recv")(lambda like, src, tag, group: make_spec(like.shape, like.dtype, like.device))
