"""Seams: calls of a captured graph that are made for real, between two compiled graphs.

A hook on an intermediate tensor must see, at run time, all of its gradient, and may change it.  A compiled backward has no such
place; the border between two compiled graphs has.  So capture puts a call of a *seam function* into the graph, right behind the
node that makes the tensor, and what is between seams is compiled on its own (autograd/segments.py).  A backend that runs the graph as it
is needs to know nothing: seam functions are ordinary functions of real tensors.

The seed or state of a generator of random numbers is set, and read, at a seam too: draws before it are in one graph, those after it in another.
So is the memory of a tensor exchanged (`tensor.data = other`).

What always holds: a seam of a hook comes before every use of its tensor, so that no gradient passes it by; which hook it is, is set after
the graph has run (`LateHook.hook`, `BackwardHook.user_hooks`), so it is no part of the graph and never compiled again for.

    late = graph.call_function(hook_here, (y,))         # y -> LateHook; the run function then says late.hook = the user's function
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch.utils.hooks import BackwardHook

from firesteel.homes import home_of, is_in_package
from firesteel.table import Table
from firesteel.tracebacks import without_ours

# function -> what it is for
SEAMS: Table[str] = Table("seam function", "autograd/seams.py")


# -- what runs at a seam ------------------------------------------------------------------------------------------------
class LateHook:
    """A hook that is registered before it is known.  `handle` is what registering gave."""

    __slots__ = ("handle", "hook", "__weakref__")

    def __init__(self) -> None:
        self.hook: Callable[[torch.Tensor], Any] | None = None
        self.handle: Any = None

    def __call__(self, gradient: torch.Tensor) -> Any:
        try:
            return None if self.hook is None else self.hook(gradient)
        except BaseException as error:
            without_ours(error)
            raise


def hook_here(tensor: torch.Tensor) -> LateHook:
    """tensor.register_hook(a hook that is set later)"""
    late = LateHook()
    late.handle = tensor.register_hook(late)
    return late


def retain_here(tensor: torch.Tensor) -> None:
    """tensor.retain_grad()"""
    tensor.retain_grad()


def module_starts(count: int, places: tuple[int, ...], *tensors: torch.Tensor) -> tuple[Any, ...]:
    """The inputs of a module with backward hooks: (BackwardHook, the tensors to go on with).  It has `count` arguments, of which those
    at `places` are tensors; its module and its hooks are set later."""
    hook = BackwardHook(None, [], [])
    given = hook.setup_input_hook(_arguments(count, places, tensors))
    return (hook, *(given[place] for place in places))


def module_ends(hook: BackwardHook | None, inputs: int, count: int, places: tuple[int, ...], *tensors: torch.Tensor) -> tuple[Any, ...]:
    """The outputs of such a module.  No hook: none of the inputs required a gradient."""
    if hook is None:
        hook = BackwardHook(None, [], [])
        hook.n_inputs = inputs
    given = hook.setup_output_hook(_arguments(count, places, tensors))
    return (hook, *(given[place] for place in places))


def seed_here(generator: torch.Generator, seed: int) -> None:
    """generator.manual_seed(seed)"""
    generator.manual_seed(seed)


def seed_all_here(seed: int) -> None:
    """torch.manual_seed(seed)"""
    torch.manual_seed(seed)


def state_here(generator: torch.Generator) -> torch.Tensor:
    """generator.get_state()"""
    return generator.get_state()


def set_state_here(generator: torch.Generator, state: torch.Tensor) -> None:
    """generator.set_state(state)"""
    generator.set_state(state)


def set_data_here(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """tensor.data = data"""
    tensor.data = data
    return tensor


def _arguments(count: int, places: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    arguments: list[Any] = [None] * count
    for place, tensor in zip(places, tensors):
        arguments[place] = tensor
    return tuple(arguments)


SEAMS.add(hook_here, "a hook on an intermediate tensor")
SEAMS.add(retain_here, "retain_grad of an intermediate tensor")
SEAMS.add(module_starts, "backward hooks of a module, at its inputs")
SEAMS.add(module_ends, "backward hooks of a module, at its outputs")
SEAMS.add(seed_here, "the seed of a generator")
SEAMS.add(seed_all_here, "the seed of every device's generator")
SEAMS.add(state_here, "the state of a generator, read")
SEAMS.add(set_state_here, "the state of a generator, set")
SEAMS.add(set_data_here, "the memory of a tensor, exchanged")


def is_seam_function(target: Any) -> bool:
    """Is it a row of SEAMS, or a function that capture has marked?"""
    return target in SEAMS or getattr(target, "made_for_real", False)


# functions with a flag for sparse gradients -> where it stands among positional arguments
SPARSE = {torch.nn.functional.embedding: 6, torch.nn.functional.embedding_bag: 7, torch.embedding: 4, torch.embedding_bag: 5}


def may_stand_alone(node: torch.fx.Node) -> bool:
    """Is it a call that is made for real where a backward cannot be traced: of the user's code, or one whose gradient is sparse?"""
    place = SPARSE.get(node.target) if node.op == "call_function" else None       # type: ignore[arg-type]  # whatever it is
    is_sparse = node.kwargs.get("sparse") is True or node.kwargs.get("sparse_grad") is True
    return is_sparse or place is not None and node.args[place:place + 1] == (True,) or runs_users_code(node)


def runs_users_code(node: torch.fx.Node) -> bool:
    """Is the node a call of a function or an operator that is neither torch's nor ours?"""
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return not str(node.target).startswith(("aten.", "prims."))
    return not is_in_package(home_of(node.target), "torch", "_operator", "builtins", "math", "firesteel")
