"""The backward of a compiled function inside of a larger graph that is captured (compiled.py): its operators stand there, with what it saved.

    gradients = InlinedBackward(graph)(saved, sizes, tangents)      # one gradient an input
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from firesteel.autograd.edges import fit
from firesteel.autograd.function import PartialBackward, TrainingGraph
from firesteel.graph.sizenodes import size_function
from firesteel.graph.tensor import AbstractTensor
from firesteel.graph.trace import interpret, is_recording
from firesteel.homes import is_operator_of_the_user
from firesteel.sym.expr import Expr
from firesteel.sym.node import as_size, is_const
from firesteel.sym.symint import from_sym


class InlinedBackward:
    """The backward graph of a compiled function as one call of a larger graph: (saved tensors, sizes, tangents) -> one gradient an input."""

    __firesteel_allowed__ = True
    __module__ = __name__

    def __init__(self, graph: TrainingGraph):
        self.graph = graph
        self.__name__ = self.__qualname__ = "compiled_backward"

    @property
    def calls_the_user(self) -> bool:
        """Is an operator of the user's in it?"""
        return any(is_operator_of_the_user(node.target) for node in self.graph.backward_graph.graph.nodes)

    def __call__(self, saved: Sequence[torch.Tensor], sizes: Sequence[int], tangents: Sequence[torch.Tensor | None]) -> tuple:
        graph = self.graph
        arrived = sum(1 << place for place, expected in enumerate(graph.tangents) if tangents[expected.value] is not None)
        if not arrived:
            return (None,) * len(graph.gradients)
        results = self.known() if isinstance(next(iter(saved), None), AbstractTensor) and not is_recording() else None
        if results is not None:
            return tuple([None if k is None or not graph.reaches[k] & arrived else results[k] for k in graph.gradients])
        return self.run(saved, sizes, [tangents[expected.value] for expected in graph.tangents], graph.part(arrived))

    def run(self, saved: Sequence[torch.Tensor], sizes: Sequence[int], given: Sequence[torch.Tensor | None], part: PartialBackward | None) -> tuple:
        graph = self.graph
        known = self.sizes([*saved, *sizes, *given]) if None in given else {}
        fitted = [zeros_of(self.example(k), known) if tangent is None else fit(tangent, graph.tangents[k].strides) for k, tangent in enumerate(given)]
        args = [*saved, *sizes, *fitted]
        with torch._C._DisableAutocast():       # the casts are in the graph
            if part is not None:
                zeros = {i: zeros_of(self.result(k), known) for i, k in part.only_zeros.items()}
                return part.sorted(interpret(part.part.gm, *part.pick(args)), zeros)
            results = interpret(graph.backward_graph, *args)
        return tuple([None if k is None else results[k] for k in graph.gradients])

    def known(self) -> Sequence[torch.Tensor] | None:
        """Results as they were traced, for who only asks what they are; None where they depend on sizes."""
        results: Any = self.graph.backward_graph.graph.output_node().args[0]
        specs: list[Any] = [getattr(node.meta["val"], "spec", None) for node in results]
        if not all(spec is not None and all(type(n) is int for n in (*spec.shape, *spec.strides)) for spec in specs):
            return None
        return [torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=spec.device) for spec in specs]

    def example(self, place: int) -> torch.Tensor:
        """The tangent for which the graph was traced."""
        placeholders = [node for node in self.graph.backward_graph.graph.nodes if node.op == "placeholder"]
        return placeholders[len(placeholders) - len(self.graph.tangents) + place].meta["val"]

    def sizes(self, values: Sequence[Any]) -> dict[Any, Any]:
        """The symbols of the trace, bound to the values of this call."""
        nodes = [node for node in self.graph.backward_graph.graph.nodes if node.op == "placeholder"]
        pairs = [(node.meta["val"], value) for node, value in zip(nodes, values) if value is not None]
        sizes = [pair for about, value in pairs for pair in (zip(about.shape, value.shape) if isinstance(about, torch.Tensor) else [(about, value)])]
        return {from_sym(about): value for about, value in sizes if isinstance(about, torch.SymInt)}

    def result(self, k: int) -> torch.Tensor:
        results: Any = self.graph.backward_graph.graph.output_node().args[0]
        return results[k].meta["val"]

    def fits(self, tangents: Sequence[torch.Tensor | None]) -> bool:
        """Can it be called: are the gradients plain tensors, and the sizes of those that do not arrive bound by others?"""
        missing = [place for place, expected in enumerate(self.graph.tangents) if tangents[expected.value] is None]
        plain = self.graph.packs is None and not any(expected.pack for expected in self.graph.tangents)
        examples = [node.meta["val"] for node in self.graph.backward_graph.graph.nodes if node.op == "placeholder"]
        first = len(examples) - len(self.graph.tangents)
        known = self.sizes([None if place - first in missing else example for place, example in enumerate(examples)])
        return plain and all(is_bound(from_sym(size), known) for place in missing for size in examples[first + place].shape)


def zeros_of(like: torch.Tensor, known: Mapping[Any, Any]) -> torch.Tensor:
    """Zeros for a value of the trace, in this call's sizes."""
    return torch.zeros([size_from(from_sym(size), known) for size in like.shape], dtype=like.dtype, device=like.device)


def size_from(size: Any, known: Mapping[Any, Any]) -> Any:
    """A size of the trace over what is known of this call's."""
    size = as_size(size)
    if not isinstance(size, Expr) or size in known:
        return known.get(size, size)
    return size_function(size)(*(size_from(arg, known) for arg in size.args))


def is_bound(size: Any, known: Mapping[Any, Any]) -> bool:
    """Can `size_from` answer?"""
    return is_const(size) or size in known or bool(size.args) and all(is_bound(arg, known) for arg in size.args)
