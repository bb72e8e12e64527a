"""Random numbers: torch.Generator objects, and the seeds and states of generators.

1. A generator is an input of the graph.  Its type and device are guarded; which one it is, and its state, are not: draws stand in the graph in
   the order of the program, so it makes no difference whether two inputs are one generator.
2. One made inside is an input too, whose source makes a new one in each call.
3. A call that sets a seed or a state, or reads a state, is a seam (autograd/seams.py): it happens between the draws before and behind it.
4. Abstract calls get a stand-in: no generator of the program is touched while capturing.

    def noisy(x, g): return x + torch.randn(x.shape, generator=g.manual_seed(3))
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from firesteel.autograd.seams import seed_all_here, seed_here, set_state_here, state_here
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Machine
from firesteel.capture.source import Call, Fixed, Source
from firesteel.capture.values.base import MethodOfOwner, RealObject, Value
from firesteel.capture.values.class_objects import INSTANTIATE
from firesteel.capture.values.const import NONE, ConstValue
from firesteel.capture.values.containers import gives_none
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.capture.values.number import SymNumber
from firesteel.capture.values.tensor import TensorValue, wrap_output
from firesteel.capture.values.torch_calls import run_abstract
from firesteel.errors import Break
from firesteel.records import dataclass
from firesteel.table import Table
from firesteel.targets import CUDA, HOST


class RandomGenerator(RealObject):
    """A torch.Generator."""

    words = "generator of random numbers on {self.obj.device}"
    always_true = True

    def __init__(self, m: Machine, obj: torch.Generator, source: Source):
        super().__init__(obj, source)
        self.stand_in = torch.Generator(obj.device)
        self.node = m.record.placeholder(m.input_name(source), source, self.stand_in, obj)

    def getattr(self, m: Machine, name: str) -> Value:
        if name == "device":
            return ConstValue(self.obj.device)
        if name == "__class__":
            return m.constant_object(torch.Generator)
        if callable(getattr(torch.Generator, name, None)):
            return RandomMethod(self, name)
        if not hasattr(torch.Generator, name):
            raise m.raise_real(AttributeError(f"'torch._C.Generator' object has no attribute {name!r}"))
        return super().getattr(m, name)

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        return self.node, self.stand_in


class RandomMethod(MethodOfOwner):
    """A bound method of a generator: a row of GENERATOR_METHODS, or called for real."""

    words = "Generator.{self.name}"

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        row, given = GENERATOR_METHODS.get(self.name), [m.look(value) for value in (*args, *kwargs.values())]
        if row is None or len(given) != row.arguments:
            raise Break("random_state", name=self.describe())
        return row.call(m, self.owner, *given)


@dataclass(frozen=True)
class RandomRow:
    call: Callable[..., Value]
    arguments: int


GENERATOR_METHODS: Table[RandomRow] = Table("method of a generator", "capture/values/randomness.py")


def set_seed(m: Machine, generator: RandomGenerator, seed: Value) -> Value:
    m.record.call_function(seed_here, (generator.node, seed_of(m, seed)), {}, None)
    return generator


def read_state(m: Machine, generator: RandomGenerator) -> Value:
    size = generator.stand_in.get_state().numel()
    state = run_abstract(m, torch.empty, [size], {"dtype": torch.uint8, "device": HOST}, "Generator.get_state")
    return wrap_output(m, state, m.record.call_function(state_here, (generator.node,), {}, state))


def set_generator_state(m: Machine, generator: RandomGenerator, state: Value) -> Value:
    if not isinstance(state, TensorValue) or state.abstract.dtype is not torch.uint8:
        raise Break("random_state", name="Generator.set_state")
    m.record.call_function(set_state_here, (generator.node, state.node), {}, None)
    return generator


GENERATOR_METHODS.add("manual_seed", RandomRow(set_seed, 1))
GENERATOR_METHODS.add("get_state", RandomRow(read_state, 0))
GENERATOR_METHODS.add("set_state", RandomRow(set_generator_state, 1))


def seed_of(m: Machine, seed: Value) -> Any:
    """A seed as the graph holds it: a number that changes between calls is an input."""
    if isinstance(seed, SymNumber) and seed.python_type() is int:
        return seed.as_arg(m)[0]
    number = m.known(seed)
    if not isinstance(number, int) or not -2**63 <= number < 2**64:
        raise Break("random_state", name="manual_seed")
    return number


# -- the generators of the devices ----------------------------------------------------------------------------------------
def default_generator(m: Machine) -> Any:
    return m.constant_object(torch.default_generator)


@CALLS.row(torch.manual_seed)
def call_manual_seed(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """That of every device is seeded; what comes back is the CPU's."""
    seed = seed_of(m, m.look(*args, *kwargs.values()))
    m.record.call_function(seed_all_here, (seed,), {}, None)
    return default_generator(m)


@CALLS.row(torch.cuda.device_count)
def call_device_count(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """Of the machine, asked for by fork_rng; torch loads a library of the driver's to find out."""
    return m.fresh(torch.cuda.device_count())


CALLS.row(torch.get_rng_state)(lambda m, args, kwargs: read_state(m, default_generator(m)))


CALLS.row(torch.set_rng_state)(
    gives_none(lambda m, args, kwargs: set_generator_state(m, default_generator(m), m.look(*args, *kwargs.values()))))


def cuda_generator(m: Machine, device: Value | None) -> Any:
    """That of a GPU, once there is one."""
    where = torch.device(m.known(device) if device is not None else CUDA) if torch.cuda.is_initialized() else None
    if where is None:
        raise Break("random_state", name="a random number state of a GPU that is not in use yet")
    return m.constant_object(torch.cuda.default_generators[torch.cuda.current_device() if where.index is None else where.index])


CALLS.row(torch.cuda.get_rng_state)(
    lambda m, args, kwargs: read_state(m, cuda_generator(m, args[0] if args else kwargs.get("device"))))


@CALLS.row(torch.cuda.set_rng_state)
def call_cuda_set_rng_state(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    given = dict(zip(("new_state", "device"), args)) | kwargs
    set_generator_state(m, cuda_generator(m, given.get("device")), m.look(given["new_state"]))
    return NONE


def _made_for_real(name: str, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    raise Break("random_state", name=name)


CALLS.add(torch.seed, functools.partial(_made_for_real, "torch.seed"))
CALLS.add(torch.initial_seed, functools.partial(_made_for_real, "torch.initial_seed"))


# -- generators made inside -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Wanted:
    """A generator to be made in each call; one object a generator, so that no two are taken for the same."""
    device: torch.device


def make_generator(wanted: Wanted) -> torch.Generator:
    return torch.Generator(wanted.device)


@INSTANTIATE.row("generator of random numbers")
def new_generator(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value | None:
    if cls is not torch.Generator:
        return None
    device = m.run_real(torch.Generator, *map(m.known, args), **{name: m.known(value) for name, value in kwargs.items()}).device
    wanted = Wanted(device)
    made = make_generator(wanted)
    value = RandomGenerator(m, made, Call(Fixed(wanted), make_generator))
    m.remember(made, value)
    return value
