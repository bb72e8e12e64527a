"""What tests of compiled programs need: backends that count, and comparisons.

    counter = fs.testing.CompileCounter()
    fs.compile(f, backend=counter)(x)
    assert counter.frame_count == 1 and counter.op_count == 3
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from firesteel import tiers
from firesteel.backends import lookup_backend
from firesteel.targets import CPU

CALLS = ("call_function", "call_method", "call_module")


wait_for_tiers = tiers.wait     # until nothing is compiled in the background (fs.compile(..., tiered=True))


class CompileCounterWithBackend:
    """A backend that counts graphs and calls, keeps the graphs, and lets another backend do the work."""

    def __init__(self, backend: str | Callable):
        self.backend = backend
        self.frame_count = 0
        self.op_count = 0
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        self.frame_count += 1
        self.op_count += sum(node.op in CALLS for node in gm.graph.nodes)
        self.graphs.append(gm)
        return lookup_backend(self.backend)(gm, example_inputs)

    def clear(self) -> None:
        self.frame_count = self.op_count = 0
        self.graphs = []


class CompileCounter(CompileCounterWithBackend):
    """Counts; graphs are run as they are."""

    def __init__(self) -> None:
        super().__init__("eager")


def same(a: Any, b: Any, tol: float = 1e-4, *, equal_nan: bool = True) -> bool:
    """Are two nests of tensors and plain values equal, tensors to within `tol`?"""
    left, left_spec = pytree.tree_flatten(a)
    right, right_spec = pytree.tree_flatten(b)
    return left_spec == right_spec and all(_same_leaf(x, y, tol, equal_nan) for x, y in zip(left, right))


def _same_leaf(x: Any, y: Any, tol: float, equal_nan: bool) -> bool:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return type(x) is type(y) and (x == y or x != x and y != y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.is_floating_point() or x.is_complex():
        return torch.allclose(x, y, rtol=tol, atol=tol, equal_nan=equal_nan)
    return torch.equal(x, y)


def rand_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = CPU,
                 extra_size: int = 0) -> torch.Tensor:
    """A random tensor with exactly this size and stride."""
    needed = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if all(size) else 0
    shape = (needed + extra_size,)
    if dtype.is_floating_point or dtype.is_complex:
        storage = torch.randn(shape, dtype=dtype, device=device)
    else:
        storage = torch.randint(0, 2 if dtype is torch.bool else 5, shape, device=device).to(dtype)
    return torch.as_strided(storage, size, stride)
