"""What a capture keeps besides its frames, its graph and its effects: the states of torch that it set, torch function modes, leaves.

Each is a small object of the machine (`m.states`, `m.modes`, `m.leaves`), changed through `m.effects.change`, so that a speculation undoes it.

    m.states.set([(("grad",), False)])      # for the abstract run, and as a node of the graph
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

import torch
from torch.autograd import forward_ad

from firesteel import torchstate, transaction
from firesteel.capture.effects import Effects
from firesteel.capture.guards import Guard
from firesteel.capture.record import Recorder
from firesteel.capture.source import Call, Fixed
from firesteel.capture.values.base import Value
from firesteel.records import dataclass
from firesteel.table import Table

Key = tuple[Any, ...]               # (row of STATES, further arguments of its functions)
Changes = list[tuple[Key, Any]]


@dataclass(frozen=True)
class TorchState:
    get: Callable[..., Any]
    set: Callable[..., Any]
    shared: bool = False        # by all threads of the process?


STATES: Table[TorchState] = Table("state of torch", "capture/services.py")
STATES.add("grad", TorchState(torch.is_grad_enabled, torch._C._set_grad_enabled))
STATES.add("default_dtype", TorchState(torch.get_default_dtype, torch._C._set_default_dtype, True))
STATES.rows({name: TorchState(*functions, True) for name, functions in torchstate.ATTENTION.items()})
if not torch.backends.cudnn.is_available():        # else these decide what a library call does, when it runs
    for _name in ("enabled", "benchmark", "deterministic", "allow_tf32", "depthwise_kernel"):
        if hasattr(torch._C, f"_set_cudnn_{_name}"):
            STATES.add(f"cudnn_{_name}", TorchState(getattr(torch._C, f"_get_cudnn_{_name}"), getattr(torch._C, f"_set_cudnn_{_name}"), True))
    if hasattr(torch._C, "_set_fp32_precision_setter"):
        STATES.add("cudnn_precision", TorchState(torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter, True))
ALWAYS_GUARDED = ("grad", "default_dtype")      # by the guard on the global state


def set_autocast(device: str, enabled: bool) -> None:
    """Also lets go of the converted parameters that torch keeps, as leaving the outermost block does: they may change before the next."""
    torch.set_autocast_enabled(device, enabled)
    if not enabled and not torch._C._is_any_autocast_enabled():
        torch.clear_autocast_cache()


STATES.add("autocast", TorchState(torch.is_autocast_enabled, set_autocast))
STATES.add("autocast_dtype", TorchState(torch.get_autocast_dtype, torch.set_autocast_dtype))
STATES.add("autocast_cache", TorchState(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled))


def get_state(key: Key) -> Any:
    return STATES[key[0]].get(*key[1:])


def set_state(key: Key, value: Any) -> None:
    if STATES[key[0]].shared and transaction.is_beside() and get_state(key) != value:
        raise transaction.NeedsCaller(f"the program sets {key[0]}, which all threads share")
    STATES[key[0]].set(*key[1:], value)


class States:
    """The states of torch that the program has set.  Mutable."""

    def __init__(self, guard: Callable[[Guard], None], record: Recorder, effects: Effects):
        self._guard, self._record, self._effects = guard, record, effects
        self.initial: dict[Key, Any] = {}

    def set(self, changes: Changes) -> None:
        """Sets states for the abstract run, and in the graph."""
        for key, value in changes:
            before = get_state(key)
            self.guard(key)
            self.initial.setdefault(key, before)
            if before != value:
                set_state(key, value)
                self._effects.on_undo(set_state, key, before)
                node = self._record.call_function(STATES[key[0]].set, (*key[1:], value), {}, None)
                node.meta["state"] = (key, self.initial[key])

    def guard(self, key: Key) -> None:
        """What a state was at the start is used: it is set back to that."""
        if key not in self.initial and key[0] not in ALWAYS_GUARDED:
            self._guard(Guard(Call(Fixed(key, key[0]), get_state), "equals", get_state(key)))

    def changed(self) -> Changes:
        """States that are not as they were at the start."""
        now = [(key, get_state(key)) for key in self.initial]
        return [(key, value) for key, value in now if value != self.initial[key]]

    def restore(self) -> None:
        for key, value in self.initial.items():
            set_state(key, value)


@dataclass
class Modes:
    """Torch function modes, inference mode, and the level of forward-mode AD (values/duals.py)."""
    off: bool = False                       # are overrides of torch's functions switched off?
    entered: tuple[Value, ...] = ()         # the modes that are on, innermost last
    outer: tuple[Value, ...] = ()           # those that were on before the region
    asking: int = 0                         # how many are asked just now: off the stack, and put back by torch's own code
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    started_in_inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    grad_in_inference: bool = field(default_factory=lambda: torch.is_inference_mode_enabled() and torch.is_grad_enabled())     # regions run without
    outer_level: int = field(default_factory=lambda: forward_ad._current_level)
    in_dual_level: bool = False
    tangents_lost: bool = False


@dataclass
class Leaves:
    """Leaves made inside: see values/leaves.py."""
    filled: tuple[Any, ...] = ()
    turned: tuple[Any, ...] = ()
    at_once: list[Any] = field(default_factory=list)
    real: frozenset[int] = frozenset()      # steps that make real ones
