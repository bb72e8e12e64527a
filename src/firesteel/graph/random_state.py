"""Random numbers drawn a second time when a region is recomputed: the operators that read and set the state of a generator.  And noise
whose chance is a symbol: operators of torch take it as a plain number.

    state = firesteel::random_state("cpu");  mask = aten::bernoulli.p(x, 0.5)              # in the forward
    now = firesteel::swap_random_state(state, "cpu");  mask = aten::bernoulli.p(x, 0.5)    # in the backward: the same numbers
    firesteel::put_back_random_state(now, "cpu")

They are tagged as draws themselves, so all that keeps draws in order keeps these in their places.  A state is a tensor of bytes on the CPU: 5056 of
a generator for the CPU, 16 of one for CUDA.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from firesteel.graph.autofunctional import library
from firesteel.graph.functions import FUNCTIONS
from firesteel.graph.rules.base import RULES
from firesteel.graph.spec import Spec, make_spec
from firesteel.targets import HOST

library.define("zeros_and_ones(Tensor like, Scalar chance) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
library.impl("zeros_and_ones", lambda like, chance: torch.empty_like(like).bernoulli_(float(chance)), "CompositeExplicitAutograd")
ZEROS_AND_ONES = torch.ops.firesteel.zeros_and_ones.default


class Operators(NamedTuple):
    read: Any
    swap: Any
    put_back: Any


@functools.cache
def operators() -> Operators:
    """Defined at the first use."""
    tags = (torch.Tag.nondeterministic_seeded,)
    where = "Device device, Generator? generator=None"
    for name, schema, run in (("random_state", f"({where}) -> Tensor", _read), ("swap_random_state", f"(Tensor state, {where}) -> Tensor", _swap),
                              ("put_back_random_state", f"(Tensor state, {where}) -> ()", _put_back)):
        library.define(name + schema, tags=tags)
        library.impl(name, run, "CompositeExplicitAutograd")
    made = Operators(torch.ops.firesteel.random_state.default, torch.ops.firesteel.swap_random_state.default,
                     torch.ops.firesteel.put_back_random_state.default)
    RULES.add(made.read, lambda device, generator=None: state_spec(device))
    RULES.add(made.swap, lambda state, device, generator=None: state_spec(device))
    RULES.add(made.put_back, lambda state, device, generator=None: None)
    return made


@FUNCTIONS.row("run_and_save_rng_state")
def run_and_save_rng_state(op: Any, *args: Any, **kwargs: Any) -> Any:
    return operators().read(_device_of(args, kwargs)), op(*args, **kwargs)


@FUNCTIONS.row("run_with_rng_state")
def run_with_rng_state(state: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
    device = _device_of(args, kwargs)
    now = operators().swap(state, device)
    result = op(*args, **kwargs)
    operators().put_back(now, device)
    return result


def _device_of(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    """Where a draw takes its numbers from."""
    tensor = next((value for value in args if isinstance(value, torch.Tensor)), None)
    return torch.device(kwargs.get("device") or (HOST if tensor is None else tensor.device))


def state_spec(device: Any) -> Spec:
    return make_spec((_size(torch.device(device).type),), torch.uint8, HOST)


@functools.cache
def _size(kind: str) -> int:
    return torch.Generator(kind).get_state().numel()


def _generator(device: torch.device, generator: torch.Generator | None) -> torch.Generator:
    if generator is not None:
        return generator
    if device.type == HOST.type:
        return torch.default_generator
    module = getattr(torch, device.type)
    return module.default_generators[device.index if device.index is not None else module.current_device()]


def _read(device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
    return _generator(device, generator).get_state()


def _swap(state: torch.Tensor, device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
    found = _generator(device, generator)
    now = found.get_state()
    found.set_state(state)
    return now


def _put_back(state: torch.Tensor, device: torch.device, generator: torch.Generator | None = None) -> None:
    _generator(device, generator).set_state(state)
