"""Runs nests as GPU kernels: on the GPU where there is one, else emulated.  `device` says where tensors belong."""
from __future__ import annotations

from collections.abc import Mapping

import emulated
import torch

from firesteel.codegen.triton import print_nest
from firesteel.loops.ir import Buffer, Nest

device = "cuda" if torch.cuda.is_available() else "cpu"


class Runner:
    """A compiled kernel: `runner(tensors, symbols)` runs it and returns the error flag.  Tensors lie on the CPU; those that a kernel
    changes are copied back."""

    def __init__(self, nest: Nest, buffers: Mapping[str, Buffer]):
        self.kernel = print_nest(nest, buffers)
        if device == "cuda":
            from firesteel.runtime import gpu
            self.launch = gpu.launcher(self.kernel)

    def __call__(self, tensors: Mapping[str, torch.Tensor], symbols: Mapping[str, int | float] = {}) -> int:
        if device == "cpu":
            return emulated.run(self.kernel, tensors, symbols)
        moved = {name: _to_gpu(tensor) for name, tensor in tensors.items()}
        error = self.launch(moved, symbols)
        for name, tensor in tensors.items():
            if not 0 in tensor.stride():
                tensor.copy_(moved[name])
        return error


def _to_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same layout, its storage included."""
    storage = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0).cuda()
    return torch.as_strided(storage, tensor.shape, tensor.stride(), tensor.storage_offset())


def run(nest: Nest, buffers: Mapping[str, Buffer], tensors: Mapping[str, torch.Tensor], symbols: Mapping[str, int | float] = {}) -> int:
    return Runner(nest, buffers)(tensors, symbols)
