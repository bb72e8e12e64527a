"""Quantised modules of torch.ao: one call of the graph, made for real between two compiled graphs (autograd/seams.py).

Torch keeps their weights packed in objects of C++, and has no kernels without data for tensors of quantised dtypes.  So what a call gives is learnt
from the layer's sizes (dynamically quantised Linear layers), or by making it once, on zeros: then sizes are those of this call, under guards.

    self.quant, self.layers, self.dequant       # the module that holds both stubs is one call, with float tensors on both sides

Which modules these are: `kind_of`.  A quantised layer that is called with quantised tensors outside of such a module is a break.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from firesteel.capture.protocols import Machine
from firesteel.capture.source import MODULE_HOOKS
from firesteel.capture.values.attributes import instance_dict
from firesteel.capture.values.base import Value
from firesteel.capture.values.scripted import ScriptedValue
from firesteel.torchstate import without_modes

STUBS = {torch.ao.nn.quantized.Quantize, torch.ao.nn.quantized.DeQuantize}
QUANTISING = {torch.quantize_per_tensor, torch.quantize_per_channel, torch.quantize_per_tensor_dynamic}


class QuantisedModule(ScriptedValue):
    """Float tensors and indices come in, float tensors go out."""

    def getattr(self, m: Machine, name: str) -> Value:
        return m.constant_object(type(self.obj)) if name == "__class__" else super().getattr(m, name)

    def function(self, obj: Any) -> Callable[..., Any]:
        def quantised(*args: Any, **kwargs: Any) -> Any:
            return obj(*args, **kwargs)

        def on_abstract(*args: Any, **kwargs: Any) -> Any:
            return self.on_abstract(*args, **kwargs)

        quantised.on_abstract = on_abstract     # type: ignore[attr-defined]
        return quantised

    def on_abstract(self, *args: Any, **kwargs: Any) -> Any:
        """Sizes and dtypes of a call on zeros."""
        given, structure = tree_flatten((args, kwargs))
        plain = [(tuple(map(int, arg.shape)), arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in given]
        with _disable_current_modes():
            made, structure = without_modes(self.made_once, [isinstance(arg, torch.Tensor) for arg in given], plain, structure)
        return tree_unflatten([torch.empty_strided(part[0], part[1], dtype=part[2]) if type(part) is tuple else part for part in made], structure)

    @torch.no_grad()
    def made_once(self, are_tensors: list[bool], given: list[Any], structure: Any) -> tuple[list[Any], Any]:
        if any(getattr(module, table) for module in self.obj.modules() for table in MODULE_HOOKS):
            raise RuntimeError("a hook would be called")
        with torch.random.fork_rng(devices=()):
            args, kwargs = tree_unflatten([torch.zeros(part[0], dtype=part[1]) if is_tensor else part for is_tensor, part in zip(are_tensors, given)],
                                          structure)
            made, structure = tree_flatten(self.obj(*args, **kwargs))
        if any(isinstance(part, torch.Tensor) and part.is_quantized for part in made):
            raise RuntimeError("a quantised tensor comes out")
        return [(part.shape, part.stride(), part.dtype) if isinstance(part, torch.Tensor) else part for part in made], structure


class QuantisedLinear(QuantisedModule):
    """A layer of torch.ao.quantization.quantize_dynamic, for all sizes."""

    def on_abstract(self, x: torch.Tensor) -> torch.Tensor:
        if not x.dim() or x.shape[-1] != self.obj.in_features or x.dtype is not torch.float32:
            raise RuntimeError("not what the layer was made for")
        return x.select(-1, 0).unsqueeze(-1).expand(*x.shape[:-1], self.obj.out_features).clone()


BY_CLASS: dict[str, type[ScriptedValue]] = {
    "torch.ao.nn.quantized.dynamic.modules.linear.Linear": QuantisedLinear,
    "torch.ao.nn.intrinsic.quantized.dynamic.modules.linear_relu.LinearReLU": QuantisedLinear,
    **{f"torch.ao.nn.quantized.dynamic.modules.rnn.{name}": QuantisedModule for name in ("LSTM", "GRU", "LSTMCell", "GRUCell", "RNNCell")},
    **{f"torch.ao.nn.quantized.modules.embedding_ops.{name}": QuantisedModule for name in ("Embedding", "EmbeddingBag")},
}


def kind_of(module: torch.nn.Module) -> type[ScriptedValue] | None:
    if (found := BY_CLASS.get(f"{type(module).__module__}.{type(module).__qualname__}")) is not None:
        return found
    if isinstance(module, torch.fx.GraphModule):
        quantises = any(node.target in QUANTISING for node in module.graph.nodes)
    else:
        quantises = {type(child) for child in (instance_dict(module) or {}).get("_modules", {}).values()} >= STUBS
    return QuantisedModule if quantises else None
