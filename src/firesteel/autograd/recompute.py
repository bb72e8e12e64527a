"""What may be computed a second time in the backward, and what it costs to keep a value: the policy of the partitioner.

Each operator of a joint graph belongs to one class; a class is a row of `POLICIES` that says whether its result may be
recomputed and whether it may be saved.  Operators find their class by a row of `CLASS_OF`, by torch's own marks (view,
pointwise, random), or are taken for heavy.  An operator that nobody knows is never run twice.

The cost of saving a value is counted in passes over its bytes:
  an input, a result 1   read again by the backward (the caller holds it anyway)
  one in memory      2   held, and read again
  one never stored   3   a fused kernel would have kept it in registers: written, held, and read again
  not of the forward 4   only the backward computes it; the forward would have to do so in its place
Times 8 for a value that the user would rather have recomputed.

    policy(node).recompute, policy(node).save
    save_cost(bytes_of(node), is_held=False, in_memory=True, in_forward=True)
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from firesteel.autograd.regions import AGAIN
from firesteel.graph.schemas import drops_nothing
from firesteel.operators import Facet
from firesteel.records import dataclass
from firesteel.sym.symint import SYMBOLIC
from firesteel.table import Table


@dataclass(frozen=True)
class RecomputePolicy:
    """May a value of this class be recomputed; may it be saved; does a fused kernel take it in?"""
    recompute: bool
    save: bool
    fusible: bool


POLICIES: Table[RecomputePolicy] = Table("recompute policy", "autograd/recompute.py")
POLICIES.rows({
    "view": RecomputePolicy(recompute=True, save=False, fusible=True),       # its base is saved instead: the same memory, fewer names
    "create": RecomputePolicy(recompute=True, save=False, fusible=True),     # full, arange: nothing to read
    "pointwise": RecomputePolicy(recompute=True, save=True, fusible=True),
    "move": RecomputePolicy(recompute=True, save=True, fusible=True),        # gather, cat, pad, cast: reads no more than it writes
    "reduce": RecomputePolicy(recompute=True, save=True, fusible=True),      # but see `reads_much_more`
    "random": RecomputePolicy(recompute=False, save=True, fusible=False),    # a second draw would give other numbers
    "heavy": RecomputePolicy(recompute=False, save=True, fusible=False),     # matmul, convolution, attention, sort, custom operators
    "size": RecomputePolicy(recompute=False, save=True, fusible=True),       # an int; saved aside of the tensors
})

CLASS_OF: Facet[str] = Facet("recompute class")

_RANDOM = torch.Tag.nondeterministic_seeded
_REDUCE = getattr(torch.Tag, "reduction", None)


def op_class(node: Node) -> str:
    """The name of the node's class."""
    if is_size(node):
        return "size"
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return op_class(node.args[0])
    found = _class_of(node.target)
    return "heavy" if found == "random" and drops_nothing(node.target, node.args, node.kwargs) else found


@functools.cache
def _class_of(target: Any) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return "heavy"
    if _RANDOM in target.tags:
        return "random"
    if (name := CLASS_OF.of(target)) is not None:
        return name
    if getattr(target, "is_view", False):
        return "view"
    if torch.Tag.pointwise in target.tags:
        return "pointwise"
    return "reduce" if _REDUCE is not None and _REDUCE in target.tags else "heavy"


def policy(node: Node) -> RecomputePolicy:
    """The node's row, or that of the user's wish: `meta["recompute"]` is set in checkpointed regions (regions.py).
      must      recomputed, never saved
      prefer    the same, unless a value of a fraction of the bytes can be saved in place of what it is computed from (see `save_cost`)
      avoid     saved, but where a memory budget asks for less
      never     saved
    A draw is recomputed from the state of its generator, which is saved in its place.  A view that shall be saved stands for its base."""
    name, wish = op_class(node), node.meta.get("recompute")
    row = POLICIES[name]
    if wish is None or name == "size":
        return row
    if wish in AGAIN:
        return RecomputePolicy(recompute=True, save=wish == "prefer" and row.save and name != "random", fusible=row.fusible)
    if name == "view" and base_of(node).meta.get("recompute") not in AGAIN:
        return row
    return RecomputePolicy(recompute=False, save=True, fusible=row.fusible)


def base_of(node: Node) -> Node:
    """The result of a chain of views."""
    while node.op == "call_function" and op_class(node) == "view" and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def find_entries(nodes: Sequence[Node]) -> set[Node]:
    """The values that checkpointed regions take from other regions, or from what was computed from other regions.  They are saved, as in eager:
    else one region's recomputation would set off that of all regions before it, and all of them would be in memory at once."""
    entries: set[Node] = set()
    tagged: set[Node] = set()       # what depends on a recomputed value
    for node in nodes:
        wish, region = node.meta.get("recompute"), node.meta.get("region")
        if node.op != "call_function" or node.meta.get("phase") == "backward":
            continue
        again = wish in AGAIN and op_class(node) != "create"
        for read in node.all_input_nodes:
            if again and read in tagged and read.meta.get("region") != region:
                entries.add(base_of(read))
        if again or any(read in tagged for read in node.all_input_nodes):
            tagged.add(node)
    return {node for node in entries if node.op == "call_function" and not is_size(node)}


NUMBERS = (int, float, bool, *SYMBOLIC)


def is_size(node: Node) -> bool:
    """Is the node's value a number rather than a tensor?  A generator of random numbers is kept for the backward in the same way."""
    value = node.meta.get("val")
    return isinstance(value, NUMBERS) or type(value) is torch.Generator


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


def save_cost(size: int, is_held: bool, in_memory: bool, in_forward: bool, unwanted: bool = False) -> int:
    """Cost of keeping a value of `size` bytes for the backward; at least 1, so that a saved value is never free.  `is_held`: the caller
    has it anyway, an input or a result."""
    return max(1, size * (1 if is_held else 2 if in_memory else 3 if in_forward else 4) * (8 if unwanted else 1))
