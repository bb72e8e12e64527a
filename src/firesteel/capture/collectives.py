"""torch.distributed in captured programs: process groups are constants, their rank, size and name facts; collectives are nodes.

Each row of `COLLECTIVES` is the Python that a function of torch.distributed means: a functional collective starts, and its result is written to the
tensor that eager writes.  The wait stands there too; where it takes place, the scheduler decides (`loops/lower/graph.py: with_late_waits`).
An asynchronous one returns a work object that has nothing left to wait for.  Autograd sees none of it, as in eager.

    work = dist.all_reduce(x, async_op=True)    # x.detach().copy_(wait_tensor(all_reduce(x.detach(), "sum", "0")))
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from firesteel.capture.builder import BASES, guarded
from firesteel.capture.meanings import CALLABLES, CALLS, PYTHON_MODULES, breaks
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.values.base import FixedObject, MethodOfOwner, UserRaise, Value
from firesteel.capture.values.const import TRUE
from firesteel.capture.values.functions import Args, Handler, Kwargs
from firesteel.errors import Break

c10d: Any = getattr(torch.distributed, "distributed_c10d", None)        # a torch without distributed has none
ops: Any = torch.ops._c10d_functional
own: Any = torch.ops.firesteel      # ops/collectives.py


# -- process groups -------------------------------------------------------------------------------------------------------
class GroupValue(FixedObject):
    """A ProcessGroup: which one it is, is guarded, and what is asked of it never changes."""

    def getattr(self, m: Machine, name: str) -> Value:
        return GroupFact(self, name) if name in ("rank", "size", "name") else super().getattr(m, name)


class GroupFact(MethodOfOwner):
    """group.rank"""

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        return m.fresh(m.run_real(getattr(self.owner.obj, self.name)))


# -- collectives ----------------------------------------------------------------------------------------------------------
class FinishedWork:
    """What an asynchronous collective of a graph returns."""

    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> None:
        return None

    synchronize = block_current_stream = exception

    def result(self) -> list[Tensor]:
        return self.tensors

    def get_future(self) -> Any:
        return finished_future(self.tensors)


def finished_future(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return future


class FutureValue(Value):
    """work.get_future(), and what follows it: known to be done."""

    def __init__(self, result: Value):
        self.result = result

    def python_type(self) -> type:
        return torch.futures.Future

    def getattr(self, m: Machine, name: str) -> Value:
        return FutureMethod(self, name) if name in ("wait", "value", "done", "then") else super().getattr(m, name)

    def rebuild(self, e: Emitter) -> str:
        return e.assign(f"{e.constant(finished_future)}({e.expr(self.result)})")


class FutureMethod(MethodOfOwner):
    """future.wait"""

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if self.name == "done":
            return TRUE
        if self.name != "then":
            return self.owner.result
        try:
            return FutureValue(m.call_now(args[0], [self.owner], {}))
        except UserRaise:
            raise Break("call", name="Future.then with a function that raises") from None


CALLS.row(finished_future)(lambda m, args, kwargs: FutureValue(args[0]))


class StartedWork(FinishedWork):
    """What isend and irecv of a graph return: the program says where it waits, since another rank may wait for what comes in between."""

    def __init__(self, made: Tensor, target: Tensor | None):
        self.made, self.target, self.done = made, target, False

    def wait(self, timeout: Any = None) -> bool:
        if not self.done:
            self.done = True
            made = ops.wait_tensor(self.made)
            if self.target is not None:
                self.target.detach().copy_(made)
        return True

    is_completed = is_success = wait

    def result(self) -> list[Tensor]:
        self.wait()
        return [] if self.target is None else [self.target]


def write(target: Tensor, made: Tensor, async_op: bool) -> FinishedWork | None:
    target.detach().copy_(ops.wait_tensor(made).view(target.shape))
    return FinishedWork([target]) if async_op else None


def outside(group: Any, name: str) -> bool:
    """Has this rank no part in it?"""
    if not c10d._rank_not_in_group(group):
        return False
    c10d._warn_not_in_group(name)
    return True


def all_reduce(tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> FinishedWork | None:
    c10d._check_single_tensor(tensor, "tensor")
    if outside(group, "all_reduce"):
        return None
    group = group or c10d._get_default_group()
    return write(tensor, ops.all_reduce(tensor.detach(), reduction(op), group.group_name), async_op)


def reduction(op: Any) -> str:
    return "sum" if op is None else op.name.lower()


def broadcast(tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None) -> FinishedWork | None:
    group = group or c10d._get_default_group()
    group_src = c10d._canonicalize_group_rank(group, src, group_src, return_global=False)
    c10d._check_single_tensor(tensor, "tensor")
    if outside(group, "broadcast"):
        return None
    return write(tensor, ops.broadcast(tensor.detach(), group_src, group.group_name), async_op)


def all_gather_single(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> FinishedWork | None:
    c10d._check_single_tensor(input_tensor, "input_tensor")
    c10d._check_single_tensor(output_tensor, "output_tensor")
    if outside(group, "all_gather_single"):
        return None
    group = group or c10d._get_default_group()
    return write(output_tensor, ops.all_gather_into_tensor(input_tensor.detach(), group.size(), group.group_name), async_op)


def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> FinishedWork | None:
    c10d._check_tensor_list(tensor_list, "tensor_list")
    c10d._check_single_tensor(tensor, "tensor")
    if outside(group, "all_gather"):
        return None
    group = group or c10d._get_default_group()
    made = ops.wait_tensor(ops.all_gather_into_tensor(tensor.detach().reshape(1, *tensor.shape), group.size(), group.group_name))
    for target, part in zip(tensor_list, made.unbind()):
        target.detach().copy_(part)
    return FinishedWork(tensor_list) if async_op else None


def reduce_scatter_single(output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> FinishedWork | None:
    c10d._check_single_tensor(output, "output")
    c10d._check_single_tensor(input, "input")
    if outside(group, "reduce_scatter_single"):
        return None
    group = group or c10d._get_default_group()
    return write(output, ops.reduce_scatter_tensor(input.detach(), reduction(op), group.size(), group.group_name), async_op)


def reduce_scatter(output: Tensor, input_list: list[Tensor], op: Any = None, group: Any = None, async_op: bool = False) -> FinishedWork | None:
    c10d._check_tensor_list(input_list, "input_list")
    if all(part.shape == input_list[0].shape for part in input_list):
        return reduce_scatter_single(output, torch.stack([part.detach() for part in input_list]), op, group, async_op)
    if outside(group, "reduce_scatter"):
        return None
    group = group or c10d._get_default_group()
    made = [own.reduce(part.detach(), reduction(op), place, group.group_name) for place, part in enumerate(input_list)]
    return write(output, [ops.wait_tensor(result) for result in made][group.rank()], async_op)


def all_to_all_single(output: Tensor, input: Tensor, output_split_sizes: list[int] | None = None, input_split_sizes: list[int] | None = None,
                      group: Any = None, async_op: bool = False) -> FinishedWork | None:
    c10d._check_single_tensor(output, "output")
    c10d._check_single_tensor(input, "input")
    if outside(group, "all_to_all_single"):
        return None
    group = group or c10d._get_default_group()
    received = output_split_sizes or [output.shape[0] // group.size()] * group.size()
    sent = input_split_sizes or [input.shape[0] // group.size()] * group.size()
    return write(output, ops.all_to_all_single(input.detach(), received, sent, group.group_name), async_op)


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> FinishedWork | None:
    if outside(group, "barrier"):
        return None
    group = group or c10d._get_default_group()
    torch.ops.firesteel.barrier(group.group_name)
    return FinishedWork([]) if async_op else None


def all_to_all(output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Any = None, async_op: bool = False) -> FinishedWork | None:
    c10d._check_tensor_list(output_tensor_list, "output_tensor_list")
    c10d._check_tensor_list(input_tensor_list, "input_tensor_list")
    c10d._ensure_all_tensors_same_dtype(output_tensor_list, input_tensor_list)
    if outside(group, "all_to_all"):
        return None
    group = group or c10d._get_default_group()
    received, sent = ([part.numel() for part in parts] for parts in (output_tensor_list, input_tensor_list))
    whole = torch.cat([part.detach().reshape(-1) for part in input_tensor_list])
    made = ops.wait_tensor(ops.all_to_all_single(whole, received, sent, group.group_name))
    for target, part in zip(output_tensor_list, made.split(received)):
        target.detach().copy_(part.view(target.shape))
    return FinishedWork(output_tensor_list) if async_op else None


def reduce(tensor: Tensor, dst: int | None = None, op: Any = None, group: Any = None, async_op: bool = False,
           group_dst: int | None = None) -> FinishedWork | None:
    group = group or c10d._get_default_group()
    group_dst = c10d._canonicalize_group_rank(group, dst, group_dst, return_global=False)
    c10d._check_single_tensor(tensor, "tensor")
    if outside(group, "reduce"):
        return None
    return write(tensor, own.reduce(tensor.detach(), reduction(op), group_dst, group.group_name), async_op)


def gather(tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int | None = None, group: Any = None, async_op: bool = False,
           group_dst: int | None = None) -> FinishedWork | None:
    c10d._check_single_tensor(tensor, "tensor")
    targets = gather_list or []
    c10d._ensure_all_tensors_same_dtype(tensor, targets)
    group = group or c10d._get_default_group()
    if outside(group, "gather"):
        return None
    group_dst = c10d._canonicalize_group_rank(group, 0 if dst is None and group_dst is None else dst, group_dst, return_global=False)
    c10d._validate_output_list_for_rank(group.rank(), group_dst, targets)
    made = ops.wait_tensor(own.gather(tensor.detach(), group_dst, [len(targets)], group.group_name))
    for number, target in enumerate(targets):
        target.detach().copy_(made[number])
    return FinishedWork(targets) if async_op else None


def scatter(tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int | None = None, group: Any = None, async_op: bool = False,
            group_src: int | None = None) -> FinishedWork | None:
    c10d._check_single_tensor(tensor, "tensor")
    parts = scatter_list or []
    c10d._ensure_all_tensors_same_dtype(tensor, parts)
    group = group or c10d._get_default_group()
    if outside(group, "scatter"):
        return None
    group_src = c10d._canonicalize_group_rank(group, 0 if src is None and group_src is None else src, group_src, return_global=False)
    return write(tensor, own.scatter(tensor.detach(), [part.detach() for part in parts], group_src, group.group_name), async_op)


def all_reduce_coalesced(tensors: list[Tensor], op: Any = None, group: Any = None, async_op: bool = False) -> FinishedWork | None:
    for tensor in tensors:
        all_reduce(tensor, op, group)
    return FinishedWork(tensors) if async_op and not c10d._rank_not_in_group(group) else None


def all_gather_coalesced(output_tensor_lists: list[list[Tensor]], input_tensor_list: list[Tensor], group: Any = None,
                         async_op: bool = False) -> FinishedWork | None:
    for number, tensor in enumerate(input_tensor_list):
        all_gather([targets[number] for targets in output_tensor_lists], tensor, group)
    return FinishedWork([]) if async_op and not c10d._rank_not_in_group(group) else None


# -- between two ranks ----------------------------------------------------------------------------------------------------
def isend(tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> StartedWork | None:
    group = group or c10d._get_default_group()
    group_dst = c10d._canonicalize_group_rank(group, dst, group_dst)
    c10d._check_single_tensor(tensor, "tensor")
    return None if outside(group, "isend") else StartedWork(own.send(tensor.detach(), group_dst, tag, group.group_name), None)


def irecv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> StartedWork | None:
    c10d._check_single_tensor(tensor, "tensor")
    group = group or c10d._get_default_group()
    group_src = c10d._canonicalize_group_rank(group, src, group_src)
    return None if outside(group, "irecv") else StartedWork(own.recv(tensor.detach(), group_src, tag, group.group_name), tensor)


def send(tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> None:
    group = group or c10d._get_default_group()
    c10d._check_not_self_rank(group, c10d._canonicalize_group_rank(group, dst, group_dst), "destination")
    work = isend(tensor, dst, group, tag, group_dst)
    if work is not None:
        work.wait()


def recv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> int:
    work = irecv(tensor, src, group, tag, group_src)
    if work is None:
        return -1
    work.wait()
    return c10d.get_global_rank(group or c10d._get_default_group(), group_src) if src is None else src


def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
    c10d._check_p2p_op_list(p2p_op_list)
    works = [isend(one.tensor, None, one.group, one.tag, one.group_peer) if one.op is c10d.isend else
             irecv(one.tensor, None, one.group, one.tag, one.group_peer) for one in p2p_op_list]
    return [work for work in works if work is not None]


COLLECTIVES: dict[str, Callable[..., Any]] = {fn.__name__: fn for fn in (
    all_reduce, broadcast, all_gather_single, all_gather, reduce_scatter_single, reduce_scatter, all_to_all_single, all_to_all, reduce, gather,
    scatter, all_reduce_coalesced, all_gather_coalesced, barrier, isend, irecv, send, recv, batch_isend_irecv)}
COLLECTIVES |= {"all_gather_into_tensor": all_gather_single, "reduce_scatter_tensor": reduce_scatter_single}


def captured(fn: Callable[..., Any]) -> Handler:
    names = list(inspect.signature(fn).parameters)

    def call(m: Machine, args: Args, kwargs: Kwargs) -> Value:
        given = {**dict(zip(names, args)), **kwargs}
        if fn in (recv, irecv) and all(is_none(m.look(given[name])) for name in ("src", "group_src") if name in given):
            raise Break("call", name=f"torch.distributed.{fn.__name__} from any rank")
        for name, value in given.items():
            if not MEANT.get(name, anything)(m.look(value)):
                raise Break("call", name=f"torch.distributed.{fn.__name__} with this {name}")
        return m.constant_object(fn).call(m, args, kwargs)
    return call


def anything(value: Value) -> bool:
    return True


def is_none(value: Value) -> bool:
    return value.is_constant() and value.constant() is None


def is_group(value: Value) -> bool:
    group = value.constant() if value.is_constant() else value.identity()
    return group is None or isinstance(group, c10d.ProcessGroup) or group is c10d.GroupMember.NON_GROUP_MEMBER


# parameter -> which of its values graphs know; the others are for the call itself
MEANT: dict[str, Callable[[Value], bool]] = {
    "op": lambda value: is_none(value) or isinstance(value.identity(), c10d.ReduceOp.RedOpType), "device_ids": is_none, "timeout": is_none,
    "group": is_group, "p2p_op_list": lambda value: c10d.get_backend() == "gloo"}       # others send them together


if c10d is not None:
    BASES.add(c10d.ProcessGroup, guarded("identity", GroupValue))
    for _name, _fn in COLLECTIVES.items():
        if hasattr(c10d, _name):
            CALLS.add(getattr(c10d, _name), captured(_fn))


# -- other calls that speak to other ranks: one break each -------------------------------------------------------------------
for _name in ("monitored_barrier", "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "send_object_list",
              "recv_object_list", "new_group", "new_subgroups", "split_group", "init_process_group", "destroy_process_group"):
    if hasattr(c10d, _name):
        CALLABLES.add(getattr(c10d, _name), breaks("outside"))

# -- modules around modules: what they do before and after a forward runs as it is, one break each; the module between is one graph ------
for _name in ("_runtime_utils", "_fully_shard._fsdp_common", "_fully_shard._fsdp_state", "_fully_shard._fsdp_param_group"):
    PYTHON_MODULES.add(f"torch.distributed.fsdp.{_name}", breaks("outside"))
HAND_ON: set[Any] = set()       # code of functions around whose graphs gradients are wanted as they are made
if c10d is not None:
    HAND_ON.add(torch.nn.parallel.DistributedDataParallel.forward.__code__)
    for _fn in (torch.nn.parallel.DistributedDataParallel._pre_forward, torch.nn.parallel.DistributedDataParallel._post_forward):
        CALLABLES.add(_fn, breaks("outside"))
