"""DTensor in captured programs: placements and meshes are constants; conversions between local and distributed tensors are one node each.

A DTensor is a tensor around a tensor (`values/wrappers.py`).  Its methods that communicate are not executed symbolically: the node calls them on the
abstract tensor, where torch's own dispatch writes functional collectives into the graph, and its own autograd functions differentiate them.

    DTensor.from_local(x, mesh, [Shard(0)])     # a node: a function of x alone, which keeps the mesh and the placements
"""
from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from firesteel.capture.builder import BASES, WRAPPERS, guarded
from firesteel.capture.meanings import BY_NAME
from firesteel.capture.protocols import Machine
from firesteel.capture.services import STATES, TorchState
from firesteel.capture.values.base import FixedObject, MethodOfOwner, Value
from firesteel.capture.values.class_objects import INSTANTIATE
from firesteel.capture.values.const import NONE, ConstValue
from firesteel.capture.values.contexts import ContextValue
from firesteel.capture.values.functions import Args, Handler, Kwargs
from firesteel.capture.values.torch_calls import call_graph
from firesteel.errors import Break
from firesteel.layouts import DeviceMesh, Placement, is_loss_parallel, loss_module, set_loss_parallel, spec_class
from firesteel.records import dataclass

HOME = "torch.distributed.tensor._api"

# methods of meshes and placements that only ask: these never change
FACTS = frozenset({"size", "get_rank", "get_local_rank", "get_coordinate", "get_group", "is_shard", "is_replicate", "is_partial"})


class LayoutValue(FixedObject):
    """A mesh or a placement."""

    def getattr(self, m: Machine, name: str) -> Value:
        return LayoutFact(self, name) if name in FACTS and hasattr(self.obj, name) else super().getattr(m, name)


class LayoutFact(MethodOfOwner):
    """mesh.size"""

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        fact = m.run_real(getattr(self.owner.obj, self.name), *map(m.known, args), **{name: m.known(value) for name, value in kwargs.items()})
        return m.fresh(fact) if isinstance(fact, (int, list, type(None))) else m.constant_object(fact)


if DeviceMesh is not None:
    WRAPPERS.add(DeviceMesh, guarded("identity", LayoutValue))      # it is a context manager too, which has a row among the bases
if Placement is not None:
    BASES.add(Placement, guarded("equals", LayoutValue))


@INSTANTIATE.row("placement")
def new_placement(m: Machine, cls: Any, args: Args, kwargs: Kwargs) -> Value | None:
    """Shard(0), DTensorSpec(mesh, placements)"""
    if Placement is None or not issubclass(cls, Placement) and cls is not spec_class():
        return None
    return m.constant_object(m.run_real(cls, *map(m.known, args), **{name: m.known(value) for name, value in kwargs.items()}))


@dataclass(eq=False)
class WithConstants:
    """A function of a tensor, together with arguments that a graph cannot hold."""
    fn: Any
    constants: dict[str, Any]

    def __post_init__(self) -> None:
        self.__name__, self.__qualname__, self.__module__ = self.fn.__name__, self.fn.__qualname__, __name__

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self.fn(tensor, **self.constants)


@INSTANTIATE.row("distributed tensor")
def new_dtensor(m: Machine, cls: Any, args: Args, kwargs: Kwargs) -> Value | None:
    """DTensor(local, spec, requires_grad=False): what distribute_tensor ends with."""
    if cls is not getattr(sys.modules.get(HOME), "DTensor", None) or len(args) != 2:
        return None
    constants = {"spec": m.look(args[1]).identity(), **{name: m.known(value) for name, value in kwargs.items()}}
    if constants.get("requires_grad"):
        raise Break("instance", name="DTensor that requires a gradient")
    return call_graph(m, "call_function", WithConstants(cls, constants), [of_fixed_size(m, args[0])], {})


def conversion(name: str) -> Handler:
    def call(m: Machine, args: Args, kwargs: Kwargs) -> Value:
        fn = getattr(sys.modules[HOME].DTensor, name)
        tensor, *given = inspect.signature(fn).bind(*args, **kwargs).arguments.items()
        constants = {key: m.known(value) for key, value in given}
        if name == "from_local" and constants.get("device_mesh") is None:
            raise Break("call", name="DTensor.from_local with the mesh of the context")
        if "async_op" in constants:
            constants["async_op"] = False       # waits are late in any case
        return call_graph(m, "call_function", WithConstants(fn, constants), [of_fixed_size(m, tensor[1])], {})
    return call


def of_fixed_size(m: Machine, value: Value) -> Value:
    """A tensor that becomes a distributed one: torch plans the layout of each operator's results for sizes that are numbers."""
    tensor = getattr(m.look(value), "abstract", None)
    if tensor is None or not tensor._has_symbolic_sizes_strides:
        return value
    return call_graph(m, "call_method", "view", [value, *[ConstValue(int(size)) for size in tensor.shape]], {})


for _name in ("from_local", "to_local", "redistribute", "full_tensor"):
    BY_NAME.add(f"{HOME}.DTensor.{_name}", conversion(_name))


# -- loss_parallel entered inside ---------------------------------------------------------------------------------------
STATES.add("loss_parallel", TorchState(is_loss_parallel, set_loss_parallel, True))


class LossParallel(ContextValue):
    """with loss_parallel():"""

    def enter(self, m: Machine) -> tuple[Value, Value]:
        return super().enter(m)[0], NONE


@BY_NAME.row("torch.distributed.tensor.parallel.loss.loss_parallel")
def call_loss_parallel(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    return LossParallel(loss_module().loss_parallel, [], {}, [(("loss_parallel",), True)])
