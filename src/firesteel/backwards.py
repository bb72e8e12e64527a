"""Gradients that a program takes itself: the functions that a captured graph calls for `backward()` and `torch.autograd.grad`.

They are ordinary functions of tensors, real or abstract: whoever traces a graph records torch's own backward through them.  What always
holds: between a gradient call and what it differentiates nothing may cut a graph, since a compiled part has a history of its own.

    grads = gradients((loss,), (None,), (w, b), False, False)       # None where loss does not depend on it
    w.grad = fresh_gradient(w, grads[0])                            # as torch's AccumulateGrad makes the first one
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

engine = torch.autograd.Variable._execution_engine


def gradients(outputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor],
              retain_graph: bool, create_graph: bool) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad with allow_unused, straight from the engine: the public function first imports a symbolic algebra package."""
    arriving = tuple(torch.ones_like(out) if given is None else given for out, given in zip(outputs, tangents))
    with without_hooks(inputs):
        return engine.run_backward(tuple(outputs), arriving, retain_graph, create_graph, tuple(inputs), True, accumulate_grad=False)


@contextlib.contextmanager
def without_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """The graph holds what the hooks of the leaves do, so here they do not run."""
    hooks = [(leaf, leaf._backward_hooks) for leaf in leaves if leaf._backward_hooks and leaf.is_leaf]
    for leaf, _ in hooks:
        leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, own in hooks:
            leaf._backward_hooks = own


def fresh_gradient(leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The first gradient of a leaf: a tensor of its own, with the leaf's strides where these are dense, else contiguous."""
    if leaf.stride() == gradient.stride():
        return gradient.clone()
    if is_dense(leaf):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=gradient.dtype, device=gradient.device).copy_(gradient)
    return gradient.clone(memory_format=torch.contiguous_format)


def is_dense(tensor: torch.Tensor) -> bool:
    """Do the elements fill their memory without holes?"""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


GRADIENT_CALLS = (gradients, torch.autograd.grad)


def is_gradient_call(node: Node) -> bool:
    return node.op == "call_function" and node.target in GRADIENT_CALLS


def takes_gradients(gm: GraphModule) -> bool:
    return any(map(is_gradient_call, gm.graph.nodes))


# -- results that can be differentiated no more -------------------------------------------------------------------------
SPENT = ("through the graph a second time", "modified by an inplace operation")     # what torch says of them


def is_spent(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SPENT)


class Spent(torch.autograd.Function):
    """Gives a tensor the history of one whose graph was freed: to ask for its gradient raises what torch said of the original."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, box: list[torch.Tensor], words: str) -> torch.Tensor:
        ctx.words = words
        return box[0]           # in a list, so that it is no input: the result is this very tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(ctx.words)


def spent(tensor: torch.Tensor, words: str) -> torch.Tensor:
    with torch.enable_grad():
        return Spent.apply(torch.empty(0, requires_grad=True), [tensor], words)
