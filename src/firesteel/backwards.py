"""Gradients that a program takes itself: the functions that a captured graph calls for `backward()` and `torch.autograd.grad`.

They are ordinary functions of tensors, real or abstract: whoever traces a graph records torch's own backward through them.  What always
holds: between a gradient call and what it differentiates nothing may cut a graph, since a compiled part has a history of its own.

    grads = gradients((loss,), (None,), (w, b), False, False)       # None where loss does not depend on it
    w.grad = fresh_gradient(w, grads[0])                            # as torch's AccumulateGrad makes the first one
"""
from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    if lies_like(gradient, leaf):
        return gradient.clone()
    if is_dense(leaf):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=gradient.dtype, device=gradient.device).copy_(gradient)
    return gradient.clone(memory_format=torch.contiguous_format)


def lies_like(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Are the strides the same, but for sizes of 1, where they do not matter?"""
    return all(one == other or type(size) is int and size == 1 for size, one, other in zip(leaf.shape, gradient.stride(), leaf.stride()))


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
    """Does a graph take gradients, or make leaves to take them of?"""
    return any(is_gradient_call(node) or node.op == "call_method" and node.target == "requires_grad_" for node in gm.graph.nodes)


# -- what a history holds -----------------------------------------------------------------------------------------------
@dataclass
class History:
    """All that a backward from some tensors would reach: leaves in the order in which the engine gets to them."""
    leaves: list[torch.Tensor]
    outside: list[Any]          # functions that stand for more, from before the region
    python: bool                # are there functions of the user's, whose gradients may be anything?


def history_of(roots: Sequence[torch.Tensor]) -> History:
    """Walks as the engine does: of what is ready, what was made last comes first, and leaves before everything."""
    starts: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    leaves = {id(root): root for root in roots if root.grad_fn is None}
    waiting = dependencies(starts)
    ready: list[tuple[float, int, Any]] = [(-fn._sequence_nr(), n, fn) for n, fn in enumerate(dict.fromkeys(starts)) if not waiting[fn]]
    heapq.heapify(ready)
    count = len(ready)
    while ready:
        _, _, fn = heapq.heappop(ready)
        if is_accumulator(fn):
            leaves.setdefault(id(fn.variable), fn.variable)
        for after, _ in fn.next_functions:
            if after is not None:
                waiting[after] -= 1
                if not waiting[after]:
                    count += 1
                    first = float("-inf") if is_accumulator(after) else -after._sequence_nr()
                    heapq.heappush(ready, (first, count, after))
    own = [fn for fn in waiting if isinstance(fn, torch._C._FunctionBase)]
    return History(list(leaves.values()), [fn for fn in own if type(fn).__name__ == "_ResultOfOperatorBackward"], bool(own))


def is_accumulator(fn: Any) -> bool:
    return type(fn).__name__ == "AccumulateGrad"


def dependencies(starts: list[Any]) -> dict[Any, int]:
    """How many others each function of a history waits for."""
    waiting, stack = dict.fromkeys(starts, 0), list(dict.fromkeys(starts))
    while stack:
        fn = stack.pop()
        for after, _ in fn.next_functions:
            if after is not None:
                if after not in waiting:
                    waiting[after] = 0
                    stack.append(after)
                waiting[after] += 1
    return waiting


# -- results that can be differentiated no more -------------------------------------------------------------------------
SPENT = ("through the graph a second time", "modified by an inplace operation")     # what torch says of them


def is_spent(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SPENT)


class Spent(torch.autograd.Function):
    """Gives a tensor the history of one whose graph was freed: to ask for its gradient raises what torch said of the original.  Without
    words it is a history that leads to no tensor of the caller's."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, box: list[torch.Tensor], words: str) -> torch.Tensor:
        ctx.words = words
        return box[0]           # in a list, so that it is no input: the result is this very tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.words:
            raise RuntimeError(ctx.words)
        return None, None, None


def spent(tensor: torch.Tensor, words: str) -> torch.Tensor:
    with torch.enable_grad():
        return Spent.apply(torch.empty(0, requires_grad=True), [tensor], words)
