"""What may be computed a second time in the backward, and what it costs to keep a value: the policy of the partitioner.

Each operator of a joint graph belongs to one class; a class is a row of `POLICIES` that says whether its result may be
recomputed and whether it may be saved.  Operators find their class by a row of `CLASS_OF`, by torch's own marks (view,
pointwise, random), or are taken for heavy.  An operator that nobody knows is never run twice.

The cost of saving a value is counted in passes over its bytes:
  an input           1   read again by the backward (the caller holds it anyway)
  one in memory      2   held, and read again
  one never stored   3   a fused kernel would have kept it in registers: written, held, and read again
  not of the forward 4   only the backward computes it; the forward would have to do so in its place

    policy(node).recompute, policy(node).save
    save_cost(bytes_of(node), is_input=False, in_memory=True, in_forward=True)
"""
from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from firesteel.table import Table

aten = torch.ops.aten


@dataclass(frozen=True)
class Policy:
    """May a value of this class be computed again; may it be saved; does a fused kernel take it in?"""
    recompute: bool
    save: bool
    fusible: bool


POLICIES: Table[Policy] = Table("recompute policy", "autograd/recompute.py")
for _name, _policy in {
    "view": Policy(recompute=True, save=False, fusible=True),       # its base is saved instead: the same memory, fewer names
    "create": Policy(recompute=True, save=False, fusible=True),     # full, arange: nothing to read
    "pointwise": Policy(recompute=True, save=True, fusible=True),
    "move": Policy(recompute=True, save=True, fusible=True),        # gather, cat, pad, cast: reads no more than it writes
    "reduce": Policy(recompute=True, save=True, fusible=True),      # but see `reads_much_more`
    "random": Policy(recompute=False, save=True, fusible=False),    # a second draw would give other numbers
    "heavy": Policy(recompute=False, save=True, fusible=False),     # matmul, convolution, attention, sort, custom operators
    "size": Policy(recompute=False, save=True, fusible=True),       # an int; saved aside of the tensors
}.items():
    POLICIES.add(_name, _policy)

CLASS_OF: Table[str] = Table("recompute class", "autograd/recompute.py")


def _classify(name: str, operators: str) -> None:
    for text in operators.split():
        packet = getattr(aten, text, None)      # some exist only in newer versions of torch
        if packet is not None:
            CLASS_OF.add(packet, name)


_classify("create", "full zeros ones empty arange linspace logspace eye scalar_tensor full_like zeros_like ones_like empty_like new_full "
                    "new_zeros new_ones new_empty empty_strided new_empty_strided tril_indices triu_indices")
_classify("move", "_to_copy cat stack constant_pad_nd index index_select gather embedding clone copy slice_scatter select_scatter diagonal_scatter "
                  "as_strided_scatter flip roll repeat tril triu lift_fresh_copy slice_backward select_backward expand_copy view_copy "
                  "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d pixel_shuffle pixel_unshuffle _unsafe_index "
                  "upsample_nearest1d upsample_nearest2d channel_shuffle index_put _unsafe_view")
_classify("reduce", "sum mean amax amin prod any all var std var_mean std_mean argmax argmin logsumexp linalg_vector_norm max min "
                    "_softmax _log_softmax native_layer_norm count_nonzero nansum")
_classify("pointwise", "leaky_relu_backward hardtanh_backward elu_backward softplus_backward hardsigmoid_backward hardswish_backward "
                       "native_dropout_backward bucketize convert_element_type _log_softmax_backward_data _softmax_backward_data")
_classify("size", "sym_size sym_stride sym_numel sym_storage_offset")

_RANDOM = torch.Tag.nondeterministic_seeded
_REDUCE = getattr(torch.Tag, "reduction", None)
_class_of_target: dict[Any, str] = {}


def op_class(node: Node) -> str:
    """The name of the node's class."""
    if node.target is operator.getitem and isinstance(node.args[0], Node) and not is_size(node):
        return op_class(node.args[0])
    if is_size(node):
        return "size"
    found = _class_of_target.get(node.target)
    if found is None:
        found = _class_of_target[node.target] = _find_class(node.target)
    return found


def _find_class(target: Any) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return "heavy"
    if _RANDOM in target.tags:
        return "random"
    if (name := CLASS_OF.get(target.overloadpacket)) is not None:
        return name
    if getattr(target, "is_view", False):
        return "view"
    if torch.Tag.pointwise in target.tags:
        return "pointwise"
    return "reduce" if _REDUCE is not None and _REDUCE in target.tags else "heavy"


def policy(node: Node) -> Policy:
    """The node's row; what the user asked for goes before it.  `meta["recompute"]` is set in checkpointed regions, of which
    `meta["region"]` is the name: "must" is recomputed, but for what is read outside of the region, which eager
    keeps; "never" is saved where it is needed."""
    row = POLICIES[op_class(node)]
    wish = node.meta.get("recompute")
    if wish is None or op_class(node) in ("random", "size"):
        return row
    if wish == "must":
        return row if leaves_region(node) else Policy(recompute=True, save=False, fusible=row.fusible)
    return Policy(recompute=False, save=True, fusible=row.fusible)


def leaves_region(node: Node) -> bool:
    """Does the forward read the value outside of the checkpointed region that computes it?"""
    region = node.meta.get("region")
    return any(user.op != "output" and user.meta.get("phase") != "backward" and
               (user.meta.get("recompute") is None or user.meta.get("region") != region) for user in node.users)


def is_size(node: Node) -> bool:
    """Is the node's value a number rather than a tensor?  A generator of random numbers is kept for the backward in the same way."""
    value = node.meta.get("val")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


UNKNOWN_SIZE = 4096     # stands for a size that only run time knows


def element_count(tensor: torch.Tensor) -> int:
    """How many elements, symbols by their hints."""
    spec = getattr(tensor, "spec", None)
    if spec is None:
        return tensor.numel()
    count = 1
    for size in spec.shape:
        if type(size) is not int:
            env = tensor.world.env      # type: ignore[attr-defined]  # what has a spec has a world
            size = env.hint(size) if env.has_hint(size) else UNKNOWN_SIZE
        count *= size
    return count


def bytes_of(node: Node) -> int:
    """Size of the node's value in memory."""
    value = node.meta.get("val")
    tensors = (value,) if isinstance(value, torch.Tensor) else tensors_of(value)
    return sum(element_count(tensor) * tensor.dtype.itemsize for tensor in tensors)


def reads_much_more(node: Node) -> bool:
    """Does the node read at least four times what it writes?  Then keeping the result is cheaper than reading all of it again."""
    return 4 * bytes_of(node) <= sum(map(bytes_of, node.all_input_nodes))


def save_cost(size: int, is_input: bool, in_memory: bool, in_forward: bool) -> int:
    """Cost of keeping a value of `size` bytes for the backward; at least 1, so that a saved value is never free."""
    return max(1, size * (1 if is_input else 2 if in_memory else 3 if in_forward else 4))
