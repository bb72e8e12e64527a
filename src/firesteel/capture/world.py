"""TensorWorld: what capture needs to know about tensors, without seeing `graph/`.

Capture runs the user's torch calls on abstract tensors to learn the shape, dtype, strides and aliasing of every
result.  Somebody gives it a world to do so: `graph/abstract.py`.

    world = make_world(ShapeEnv())
    t = world.wrap(real_tensor, "a0", dims=(None, "dynamic"))
    with world.active():
        u = torch.zeros(3) + t          # every tensor made inside is abstract
"""
from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from firesteel.sym.env import ShapeEnv

STATIC, DYNAMIC, UNBACKED = "static", "dynamic", "unbacked"
DimPolicy = str | tuple[str, int | None, int | None]     # one of the three words above, for one dimension; or with least and greatest size


class TensorWorld(Protocol):
    """One world lasts for one capture."""

    env: Any    # sym.env.ShapeEnv, or None where every size is static
    draws: int  # how often random numbers were drawn so far

    def wrap(self, tensor: torch.Tensor, source_text: str, dims: tuple[DimPolicy, ...], strides: Collection[int] = ()) -> torch.Tensor:
        """An abstract tensor with the metadata of `tensor`; dimension d is a symbol where dims[d] says so.  A stride that does not
        follow from the sizes is a symbol where its dimension is in `strides`, else a constant."""

    def unwritten(self, wrapped: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """The abstract tensor of an input without the history that a write gave it."""

    def memory(self, tensor: torch.Tensor) -> int:
        """The same number for abstract tensors that share memory."""

    def literal(self, value: Any) -> torch.Tensor | None:
        """The data of an abstract tensor that is a literal of the program, such as torch.tensor(3), and not written yet."""

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """What to call on abstract tensors instead of a function of torch; mostly itself."""

    def active(self) -> AbstractContextManager[None]:
        """Inside, torch calls work on abstract tensors, and factory functions make abstract tensors."""


MakeWorld = Callable[["ShapeEnv"], TensorWorld]
