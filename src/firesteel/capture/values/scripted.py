"""Scripted modules, scripted functions that were loaded, and quantised layers: one call of the graph, made for real between two compiled graphs.

There is no Python code of them; what a call gives is learnt by making it on abstract tensors, or, of a quantised layer, whose weights torch keeps
packed in an object of C++, from its sizes.  It is a seam (autograd/seams.py), so gradients reach what the module holds as in eager.
A scripted module may branch on data (graph/answers.py).

    scripted = scripted(x); sin = scripted.sin()
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from firesteel.capture.protocols import Args, Kwargs, Machine
from firesteel.capture.values.base import OpaqueValue, Value
from firesteel.capture.values.torch_calls import call_graph


class ScriptedValue(OpaqueValue):
    """Known by its identity."""

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        function: Any = self.function(self.obj)
        function.made_for_real = True
        return call_graph(m, "call_function", function, [m.look(arg) for arg in args], {name: m.look(arg) for name, arg in kwargs.items()})

    def function(self, obj: Any) -> Callable[..., Any]:
        def scripted(*args: Any, **kwargs: Any) -> Any:
            return obj(*args, **kwargs)

        scripted.branches_on_data = True        # type: ignore[attr-defined]
        return scripted


class QuantisedLinear(ScriptedValue):
    """A layer of torch.ao.quantization.quantize_dynamic."""

    def getattr(self, m: Machine, name: str) -> Value:
        return m.constant_object(type(self.obj)) if name == "__class__" else super().getattr(m, name)

    def function(self, obj: Any) -> Callable[..., Any]:
        def quantised(x: torch.Tensor) -> torch.Tensor:
            return obj(x)

        def on_abstract(x: torch.Tensor) -> torch.Tensor:
            if not x.dim() or x.shape[-1] != obj.in_features or x.dtype is not torch.float32:
                raise RuntimeError("not what the layer was made for")
            return x.select(-1, 0).unsqueeze(-1).expand(*x.shape[:-1], obj.out_features).clone()

        quantised.on_abstract = on_abstract     # type: ignore[attr-defined]
        return quantised


QUANTISED = {f"torch.ao.nn.{name}": QuantisedLinear for name in (
    "quantized.dynamic.modules.linear.Linear", "intrinsic.quantized.dynamic.modules.linear_relu.LinearReLU")}
