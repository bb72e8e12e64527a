"""Regions that an eager forward checkpointed, found in a captured backward, so that their recomputation becomes part of its graph.

torch.utils.checkpoint (not reentrant) saves a holder in the place of each tensor.  All holders of a region share one frame, and the hook that
unpacks the first of them runs the region's function again and keeps what that saves, in order.  In a captured backward such hooks are found here,
before it runs, and each region becomes one call of `recompute`, just before the first node that reads a tensor of it:

    t = unpack_hook(hooks[3], packed[3])        # becomes: saved = recompute(hooks[3], [inputs[8]]); t = saved[0]

What always holds
  - a region's tensor arguments move to the list of inputs, which is emptied as they are read: nothing else keeps them longer than eager would
  - what a graph relies on is its key: which holders belong together, and the place of each among those of its frame
  - a function that cannot be captured is called for real by eager's own hooks, with eager's checks and errors
"""
from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch.fx import GraphModule

from firesteel.autograd.regions import run_nodes
from firesteel.homes import is_operator_of_the_user
from firesteel.records import dataclass
from firesteel.targets import CPU, HOST

# the unpacking halves of the hooks of a checkpoint
UNPACKING = frozenset(code for code in torch.utils.checkpoint._checkpoint_hook.__init__.__code__.co_consts
                      if isinstance(code, types.CodeType) and code.co_varnames[:1] == ("holder",))
SavedTensor: Any = torch._C._autograd.SavedTensor
current_group: Callable[[], Any] = getattr(torch._C, "_get_graph_exec_group", lambda: None)     # backwards that share recomputations


@dataclass(frozen=True)
class Regions:
    """Which of the calls that unpack belong to which region."""
    calls: tuple[tuple[int, tuple[int, ...]], ...]      # of each region: the place in `hooks` of its Recomputation, its arguments' places in `inputs`
    unpacked: tuple[tuple[int, int] | None, ...]        # of each call: (region, place among the tensors that it saves)


class Recomputation:
    """One region: its function, its arguments but for the tensors, and the state in which it runs again."""

    def __init__(self, hook: Any, frame: Any, holders: dict[int, Any]):
        enclosed = closure_of(frame.recompute_fn)
        self.hook, self.frame, self.count = hook, frame, len(frame.weak_holders)
        self.holders = holders          # of this backward, by their places among all of the frame
        self.fn, self.kwargs = enclosed["fn"], enclosed["kwargs"]
        self.args = [None if isinstance(arg, SavedTensor) else arg for arg in frame.saved_args]
        self.tensors = tuple(place for place, arg in enumerate(frame.saved_args) if isinstance(arg, SavedTensor))
        self.early_stop, self.expected = frame.early_stop, frame.x_metadatas
        self.autocasts = autocasts_of(enclosed)
        self.states = states_of(enclosed)

    def for_real(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """By eager's hook, which counts and compares what is saved."""
        before = self.frame.saved_args
        self.frame.saved_args = list(self.args)
        for place, tensor in zip(self.tensors, tensors):
            self.frame.saved_args[place] = tensor
        try:
            return [self.hook(self.holders[place]) if place in self.holders else None for place in range(self.count)]
        finally:
            self.frame.saved_args = before


def autocasts_of(enclosed: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of the autocasts around the region, the outermost first; without those that change nothing."""
    found = {enclosed["device_type"]: enclosed["device_autocast_kwargs"], CPU: enclosed["cpu_autocast_kwargs"]}
    return [{"device_type": device, **settings} for device, settings in found.items()
            if settings and (settings["enabled"] or torch.is_autocast_enabled(device))]


def states_of(enclosed: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """(device, state of its generator) from which it draws."""
    if not enclosed["preserve_rng_state"]:
        return []
    found = [(CPU, enclosed["fwd_cpu_state"])]
    if enclosed["had_device_in_fwd"]:
        found += [(f"{enclosed['device_type']}:{index}", state) for index, state in zip(enclosed["fwd_devices"], enclosed["fwd_device_states"])]
    return found


def swap_state(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Sets the state of a device's generator; what it was."""
    found = torch.default_generator if device == HOST else torch.get_device_module(device).default_generators[device.index]
    now = found.get_state()
    found.set_state(state)
    return now


class Enough(Exception):
    """All that eager saved is there."""


class SavedTensors:
    """What autograd saves while the body of a region runs, up to the last tensor that eager saved.  One call of a graph."""

    __firesteel_allowed__ = True
    __module__ = __name__

    def __init__(self, body: GraphModule, tracked: Sequence[bool], count: int, early_stop: bool, devices: Sequence[str]):
        self.body, self.tracked, self.count, self.early_stop, self.devices = body, tracked, count, early_stop, [torch.device(d) for d in devices]
        self.__name__ = self.__qualname__ = "recompute_region"

    @property
    def calls_the_user(self) -> bool:
        """Is an operator of the user's in it?  All else takes what the forward has checked."""
        return any(is_operator_of_the_user(node.target) for node in self.body.graph.nodes)

    def leave_contexts(self) -> None:
        """Leaves the states of torch as the end of the body does."""
        for node in self.body.graph.nodes:
            if "state" in node.meta:
                node.target(*node.args)

    def __call__(self, args: Sequence[Any], states: Sequence[torch.Tensor], run: Callable[..., Any] = run_nodes,
                 swap: Callable[..., Any] = swap_state, put_back: Callable[..., Any] = swap_state) -> tuple[torch.Tensor, ...]:
        """`run` runs the body; `swap` and `put_back` set the state of a generator, the first returns what it was."""
        before = [swap(state, device) for state, device in zip(states, self.devices)]
        kept: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.detach())
            if self.early_stop and len(kept) == self.count:
                raise Enough
            return tensor
        given = [arg.detach().requires_grad_(tracks) if isinstance(arg, torch.Tensor) else arg for arg, tracks in zip(args, self.tracked)]
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
                run(self.body, *given)
        except Enough:
            self.leave_contexts()
        for state, device in zip(before, self.devices):
            put_back(state, device)
        if len(kept) != self.count:
            raise ValueError(f"{len(kept)} tensors are saved where eager saved {self.count}")
        return tuple(kept)


def recompute(region: Recomputation, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """What a region saves, run again on its arguments.  A call of captured backwards, captured by `capture/values/checkpoints.py`."""
    return region.for_real(tensors)


# ---------------------------------------------------------------- finding them

def take_regions(places: Sequence[tuple[int, int]], inputs: list[Any], hooks: list[Any], packed: list[Any], keeps: bool) -> Regions | None:
    """Finds regions among the calls that unpack, each a pair of places in `hooks` and `packed`, and takes them out of these lists."""
    groups: dict[int, list[int]] = {}
    frames = [frame_of(hooks[hook]) for hook, _ in places]
    for call, frame in enumerate(frames):
        if frame is not None:
            groups.setdefault(id(frame), []).append(call)
    if not groups or current_group() is not None or any(map(has_packed_arguments, filter(None, frames))):
        return None         # what an outer region or a hook of the user's packed is unpacked when eager would
    calls: list[tuple[int, tuple[int, ...]]] = []
    unpacked: list[tuple[int, int] | None] = [None] * len(places)
    for group in groups.values():
        frame, first = frames[group[0]], places[group[0]][0]
        arguments = arguments_of(frame)
        if arguments is None:
            continue
        number = {id(ref()): place for place, ref in enumerate(frame.weak_holders)}
        region = Recomputation(hooks[first], frame, {number[id(holder := packed[places[call][1]])]: holder for call in group})
        for call in group:
            unpacked[call] = (len(calls), number[id(packed[places[call][1]])])
            hooks[places[call][0]] = packed[places[call][1]] = None
        hooks[first] = region
        calls.append((first, tuple(range(len(inputs), len(inputs) + len(arguments)))))
        inputs.extend(arguments)
        if not keeps and len(region.holders) == sum(ref() is not None for ref in frame.weak_holders):
            frame.saved_args = []
    return Regions(tuple(calls), tuple(unpacked)) if calls else None


def frame_of(hook: Any) -> Any:
    """The frame of a checkpoint whose hook it is; None for other hooks, and where torch keeps a frame's arguments in another way."""
    frame = closure_of(hook)["frame"] if getattr(hook, "__code__", None) in UNPACKING else None
    return frame if hasattr(frame, "saved_args") else None


def closure_of(fn: Any) -> dict[str, Any]:
    """What it encloses; a variable that has no value yet is left out."""
    found = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            pass
    return found


def has_packed_arguments(frame: Any) -> bool:
    return any(isinstance(arg, SavedTensor) and arg.unpack_hook is not None for arg in frame.saved_args)


def arguments_of(frame: Any) -> list[torch.Tensor] | None:
    """The tensors that the region was called with; None where only eager can run it again: its contexts are the user's, or one was overwritten."""
    enclosed = closure_of(frame.recompute_fn)
    contexts = [enclosed.get(name) for name in ("recompute_context", "device_ctx")]
    if frame.unpack_error_cb is not None or enclosed.get("is_non_strict_tracing") \
            or not all(isinstance(context, nullcontext) for context in contexts):
        return None
    try:
        return [arg.unpack() for arg in frame.saved_args if isinstance(arg, SavedTensor)]
    except RuntimeError:        # raised again when eager would
        return None
