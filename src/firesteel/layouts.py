"""How distributed tensors and modules lie on ranks, as text, and back: meshes, placements, classes of `fully_shard`.

A placement is written as what makes it.  A mesh is written by all that a program reads of it, but for this rank's place, which decides what some
programs cut out of a tensor (`places_in`); it is found again among the meshes whose text this process has written, as it does for every key
that holds one.

    mesh_text(mesh)                         # "('cpu', [0, 1], None, ['0'])"
    mesh_of(mesh_text(mesh)) is mesh        # True
    places_in(text of a graph over it)      # "[[0]]"
    placement_parts(Shard(1))               # ("Shard", {"dim": 1})
"""
from __future__ import annotations

import ast
import contextlib
import re
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

Placement: Any = getattr(getattr(torch._C, "_distributed", None), "Placement", None)
DeviceMesh: Any = getattr(getattr(torch.distributed, "device_mesh", None), "DeviceMesh", None)
HOME = "torch.distributed.tensor.placement_types"
# name -> arguments; a mask of an embedding's rows lasts while an operator runs
PLACEMENTS: dict[str, tuple[str, ...]] = {"Shard": ("dim",), "Replicate": (), "Partial": ("reduce_op",), "_StridedShard": ("dim", "split_factor"),
                                          "_MaskPartial": ("reduce_op", "offset_shape", "offset_dim")}
MESHES: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def mesh_text(mesh: Any) -> str:
    groups = [group.group_name for group in mesh.get_all_groups()]
    text = repr((mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names, groups))
    MESHES[text] = mesh
    return text


def mesh_of(text: str) -> Any:
    return MESHES[text]


def places_in(text: str) -> str:
    """Where this rank stands in the meshes that a text names; "" where it names none."""
    found = dict.fromkeys(re.findall(r"""\bmesh_of\(("[^"]*"|'[^']*')\)""", text))
    places = [mesh_of(ast.literal_eval(one)).get_coordinate() for one in found]
    return str([place if place is None else list(place) for place in places]) if found else ""


def placement_parts(placement: Any) -> tuple[str, dict[str, Any]] | None:
    """Its class and arguments; None where it is of another class than these."""
    name = type(placement).__name__
    if name not in PLACEMENTS or getattr(sys.modules.get(HOME), name, None) is not type(placement):
        return None
    parts = {argument: getattr(placement, argument) for argument in PLACEMENTS[name]}
    return name, {argument: tuple(value) if isinstance(value, tuple) else value for argument, value in parts.items()}


def new_placement(name: str, arguments: dict[str, Any]) -> Any:
    return getattr(sys.modules[HOME], name)(**{argument: tuple(value) if type(value) is list else value for argument, value in arguments.items()})


def of_gradient(context: Any) -> Any:
    """The context of a DTensor's gradient: each rank's term of a sum has the gradient of the sum."""
    if Placement is not None and isinstance(context, Placement):
        return new_placement("Replicate", {}) if context.is_partial() else context
    return tuple(map(of_gradient, context)) if type(context) is tuple else context


def take_masks(tensor: Any) -> bool:
    """Has a DTensor rows of an embedding, or of `gather`, that are still to be masked?  The mask is part of its placement, which torch keeps for
    later calls of the operator: of an abstract tensor none may stay."""
    spec: Any = getattr(tensor, "_spec", None) if spec_class() is not None else None
    placements = spec.placements if is_layout(spec) else ()
    buffers = [placement.mask_buffer for placement in placements if hasattr(placement, "mask_buffer")]
    masked = [buffer for buffer in buffers if buffer.refcount]
    for buffer in masked:
        buffer.data, buffer.refcount = None, 0
    return bool(masked)


def is_layout(obj: Any) -> bool:
    """A mesh, a placement, or both with a shape (`_spec` of a DTensor)?"""
    return DeviceMesh is not None and isinstance(obj, (DeviceMesh, Placement, spec_class() or ()))


def spec_class() -> type | None:
    return getattr(sys.modules.get("torch.distributed.tensor._dtensor_spec"), "DTensorSpec", None)


# -- loss_parallel: while it is entered, DTensors have other operators for cross entropy, forward and backward
def loss_module() -> Any:
    return sys.modules.get("torch.distributed.tensor.parallel.loss")


def is_loss_parallel() -> bool:
    module = loss_module()
    return module is not None and module.customized_loss_ops.keys() <= module.DTensor._op_dispatcher._custom_op_handlers.keys()


def set_loss_parallel(on: bool) -> None:
    if on != is_loss_parallel():
        loss_module()._enable_custom_loss_ops() if on else loss_module()._disable_custom_loss_ops()


@contextlib.contextmanager
def loss_parallel(on: bool) -> Iterator[None]:
    """Entered where it is asked for, and left as it was."""
    before = is_loss_parallel()
    try:
        set_loss_parallel(on or before)
        yield
    finally:
        set_loss_parallel(before)


def sharded_classes() -> dict[type, type]:
    """Class of a module -> the one that `fully_shard` made of it."""
    return getattr(sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard"), "cls_to_fsdp_cls", {})


def unsharded(cls: type) -> type | None:
    return next((base for base in cls.__mro__[1:] if sharded_classes().get(base) is cls), None)


def is_named_tuple(value: Any) -> bool:
    """One of torch's, which a DTensor's context holds?"""
    return isinstance(value, tuple) and hasattr(value, "_fields") and type(value).__module__.partition(".")[0] == "torch"
