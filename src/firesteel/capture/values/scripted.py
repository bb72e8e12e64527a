"""Scripted modules, and scripted functions that were loaded: one call of the graph, made for real between two compiled graphs.

There is no Python code of them; what a call gives is learnt by making it on abstract tensors.  It is a seam (autograd/seams.py), so gradients reach
what the module holds as in eager.  A scripted module may branch on data (graph/answers.py).

    scripted = scripted(x); sin = scripted.sin()
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
