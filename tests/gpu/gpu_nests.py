"""Runs nests as GPU kernels: on the GPU where there is one, else emulated.  `device` says where tensors belong."""
from __future__ import annotations

from collections.abc import Mapping

import emulated
import torch

from firesteel.codegen import hosted
from firesteel.codegen.triton import print_nest
from firesteel.loops.ir import Buffer, Nest
from firesteel.runtime import cpu, cuda, gpu
from firesteel.sym.expr import evaluate

device = "cuda" if torch.cuda.is_available() else "cpu"


class Runner:
    """A compiled kernel: `runner(tensors, symbols)` runs it and returns the error flag.  Tensors lie on the CPU; those that a kernel
    changes are copied back."""

    def __init__(self, nest: Nest, buffers: Mapping[str, Buffer]):
        self.kernel = print_nest(nest, buffers)
        if device == "cuda":
            (self.launches,) = gpu.load([(self.kernel, "cuda")]).values()

    def __call__(self, tensors: Mapping[str, torch.Tensor], symbols: Mapping[str, int | float] = {}) -> int:
        if device == "cpu":
            return emulated.run(self.kernel, tensors, symbols)
        moved = {name: _to_gpu(tensor) for name, tensor in tensors.items()}
        error = self.launch(moved, symbols)
        for name, tensor in tensors.items():
            if 0 not in tensor.stride():
                tensor.copy_(moved[name])
        return error


    def launch(self, tensors: Mapping[str, torch.Tensor], symbols: Mapping[str, int | float]) -> int:
        """The kernel's functions through the native launcher, one after the other."""
        scratch = torch.empty(max(evaluate(self.launches[0].scratch_bytes, symbols), 1), dtype=torch.uint8, device="cuda")
        for launch in self.launches:
            stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
            words = [stream if isinstance(w, str) else evaluate(w, symbols) for w in launch.before]
            words += [tensors[b].data_ptr() for b in launch.buffers] + [scratch.data_ptr() + evaluate(p, symbols) for p in launch.scratch]
            words += [hosted.as_word(symbols[s]) for s in launch.symbols] + list(launch.after)
            recipe = [1, len(words) + 1, launch.address, len(words) + 1, *(part for word in words for part in (-2, word)), -1, 0]
            assert hosted.launcher(recipe, cpu.compile_text)() == 0
        torch.cuda.synchronize()
        result, cuda.flag().word.value = cuda.flag().word.value, 0
        return result


def _to_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same layout, its storage included."""
    storage = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0).cuda()
    return torch.as_strided(storage, tensor.shape, tensor.stride(), tensor.storage_offset())


def run(nest: Nest, buffers: Mapping[str, Buffer], tensors: Mapping[str, torch.Tensor], symbols: Mapping[str, int | float] = {}) -> int:
    return Runner(nest, buffers)(tensors, symbols)
