"""Gradients that a program takes itself: the functions that a captured graph calls for `backward()` and `torch.autograd.grad`.

They are ordinary functions of tensors, real or abstract: whoever traces a graph records torch's own backward through them.  What always
holds: between a gradient call and what it differentiates nothing may cut a graph, since a compiled part has a history of its own.

    grads = gradients((loss,), (None,), (w, b), False, False)       # None where loss does not depend on it
    w.grad = fresh_gradient(w, grads[0])                            # as torch's AccumulateGrad makes the first one
"""
from __future__ import annotations

import contextlib
import heapq
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from firesteel.records import dataclass
from firesteel.sym.layout import is_dense
from firesteel.tracebacks import hiding

engine = torch.autograd.Variable._execution_engine


def gradients(outputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor],
              retain_graph: bool, create_graph: bool) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a captured call; the hooks of the leaves do not run, since the graph holds what they do."""
    with without_hooks(inputs):
        return engine_gradients(outputs, tangents, inputs, retain_graph, create_graph)


def engine_gradients(outputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor],
                     retain_graph: bool, create_graph: bool) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad with allow_unused, straight from the engine: the public function first imports a symbolic algebra package."""
    if not inputs:
        return ()
    arriving = tuple(torch.ones_like(out) if given is None else given for out, given in zip(outputs, tangents))
    return engine.run_backward(tuple(outputs), arriving, retain_graph, create_graph, tuple(inputs), True, accumulate_grad=False)


def try_backward(outputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> None:
    """Runs through a history, which stays, and asks for no gradient: raises what torch raises for it."""
    engine.run_backward(tuple(outputs), tuple(tangents), True, False, (), True, accumulate_grad=True)


@contextlib.contextmanager
def without_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context in which the leaves have no hooks."""
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
    if gradient.layout is not torch.strided:
        return gradient.clone()
    if has_layout_of(gradient, leaf):
        return gradient.clone()
    if is_dense(leaf.shape, leaf.stride(), operator.eq, operator.lt):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=gradient.dtype, device=gradient.device).copy_(gradient)
    return gradient.clone(memory_format=torch.contiguous_format)


fresh_gradient.__firesteel_allowed__ = True      # type: ignore[attr-defined]  # one call of a graph: it looks at strides


# -- hooks of leaves ----------------------------------------------------------------------------------------------------
def gradient_hooks(leaf: torch.Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple((leaf._backward_hooks or {}).values())


def after_hooks(leaf: torch.Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple((leaf._post_accumulate_grad_hooks or {}).values())


def late_gradient_hooks(leaf: torch.Tensor, known: int) -> tuple[Any, ...]:
    """Hooks on the gradient of a leaf that other hooks have put there since the backward was described, when it had `known` of them."""
    return gradient_hooks(leaf)[known:]


def late_after_hooks(leaf: torch.Tensor, known: int) -> tuple[Any, ...]:
    """The same for hooks behind the accumulation."""
    return after_hooks(leaf)[known:]


def has_layout_of(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Are the strides the same, but for sizes of 1, where they do not matter?"""
    return all(one == other or type(size) is int and size == 1 for size, one, other in zip(leaf.shape, gradient.stride(), leaf.stride()))


AccumulateGrad: Any = torch._C._functions.AccumulateGrad       # type: ignore[attr-defined]  # not in torch's stubs
GRADIENT_CALLS = (gradients, torch.autograd.grad)


def is_gradient_call(node: Node) -> bool:
    return node.op == "call_function" and node.target in GRADIENT_CALLS


def takes_gradients(gm: GraphModule) -> bool:
    """Does a graph take gradients, or make leaves to take them of?"""
    return any(is_gradient_call(node) or node.op == "call_method" and node.target == "requires_grad_" for node in gm.graph.nodes)


class ResultOfOperator(torch.autograd.Function):
    """Gives a tensor that autograd knows as a result, in any strides: it stands for the history that a tensor has from before the region."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


# -- what a history holds -----------------------------------------------------------------------------------------------
@dataclass
class History:
    """All that a backward from some tensors would reach: leaves in the order in which the engine gets to them."""
    leaves: list[torch.Tensor]
    outside: list[Any]          # functions that stand for more, from before the region
    python: bool                # are there functions of the user's, whose gradients may be anything?


def history_of(roots: Sequence[torch.Tensor], until: torch.Tensor | None = None) -> History:
    """Engine order: AccumulateGrad first, then descending sequence number.  What is behind `until`
    is left out."""
    starts: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    leaves = {id(root): root for root in roots if root.grad_fn is None}
    last = until.grad_fn if until is not None else None
    waiting = dependencies(starts, last)
    ready: list[tuple[float, int, Any]] = [(-fn._sequence_nr(), n, fn) for n, fn in enumerate(dict.fromkeys(starts)) if not waiting[fn]]
    heapq.heapify(ready)
    count = len(ready)
    while ready:
        _, _, fn = heapq.heappop(ready)
        if is_accumulator(fn):
            leaves.setdefault(id(fn.variable), fn.variable)
        for after, _ in fn.next_functions if fn is not last else ():
            if after is not None:
                waiting[after] -= 1
                if not waiting[after]:
                    count += 1
                    first = float("-inf") if is_accumulator(after) else -after._sequence_nr()
                    heapq.heappush(ready, (first, count, after))
    own = [fn for fn in waiting if isinstance(fn, torch._C._FunctionBase)]
    return History(list(leaves.values()), [fn for fn in own if is_outside(fn) and fn is not last], bool(own))


def is_outside(fn: Any) -> bool:
    return getattr(fn, "_forward_cls", None) is ResultOfOperator


def is_accumulator(fn: Any) -> bool:
    return isinstance(fn, AccumulateGrad)


def dependencies(starts: list[Any], last: Any = None) -> dict[Any, int]:
    """How many others each function of a history waits for; what only `last` leads to is left out."""
    waiting, stack = dict.fromkeys(starts, 0), list(dict.fromkeys(starts))
    while stack:
        fn = stack.pop()
        for after, _ in fn.next_functions if fn is not last else ():
            if after is not None:
                if after not in waiting:
                    waiting[after] = 0
                    stack.append(after)
                waiting[after] += 1
    return waiting


# -- results that can be differentiated no more -------------------------------------------------------------------------
OVERWRITTEN = "modified by an inplace operation"
SPENT = ("through the graph a second time", OVERWRITTEN)     # what torch says of them


def is_spent(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SPENT)


class Spent(torch.autograd.Function):
    """Gives a tensor the history of one whose graph was freed: a gradient that arrives raises what torch said of the original.  Without
    words it is a history that leads to no tensor of the caller's."""

    @staticmethod
    def forward(ctx: Any, box: list[torch.Tensor], words: str, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.words, ctx.count = words, len(inputs)
        ctx.set_materialize_grads(False)
        return box[0]           # in a list, so that it is no input: the result is this very tensor

    @staticmethod
    @hiding
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if ctx.words and gradient is not None:
            raise RuntimeError(ctx.words)
        return (None,) * (2 + ctx.count)


def spent(tensor: torch.Tensor, words: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """`inputs`: those that its history led to, so that who asks for their gradients comes here."""
    with torch.enable_grad():
        return Spent.apply([tensor], words, torch.empty(0, requires_grad=True), *inputs)
