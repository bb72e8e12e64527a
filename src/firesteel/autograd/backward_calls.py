"""What the graph of a captured backward calls: the engine's own derivatives, hooks, custom backwards, gradient accumulation.

`autograd/compiled.py` records calls of these functions; whoever compiles the graph captures them like any user code: a `BackwardOp` is
one call of the graph, the functions are inlined, so that a hook is captured where the engine would run it and, where it cannot be,
the graph breaks there.  Each does what torch's engine does in its place, its checks of what a hook returns included.

    grad = tensor_hook(hook, grad)                      # a hook that returns None changes nothing
    grads = custom_backward(ctx, saved, True, grad)     # MyFunction.backward(ctx, grad), with these tensors as ctx.saved_tensors
    accumulate_grad(p, grad)                            # p.grad = ..., or p.grad += ...
"""
from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from firesteel.autograd.backwards import fresh_gradient
from firesteel.autograd.recomputations import recompute
from firesteel.graph.abstract import AbstractTensor
from firesteel.targets import HOST

# what torch must offer for backwards to be captured; in torch 2.11 to 2.15 it does
NEEDED = ("set_autograd_compiler", "set_verbose_logger", "clear_cache", "call_cpp_tensor_pre_hooks")


def find_door(home: Any) -> Any:
    """torch's door for compilers of backwards, under one of the names that it has had; None where this torch has none that we know."""
    found = (getattr(home, name, None) for name in ("compiled_autograd", "autograd_compiler"))
    return next((module for module in found if all(hasattr(module, name) for name in NEEDED)), None)


door = find_door(torch._C._dynamo)


class BackwardOp:
    """A derivative that the engine gave as a function: `op(grads, *saved)` returns one gradient an input.  One node of a graph."""

    __firesteel_allowed__ = True

    def __init__(self, name: str, fn: Callable[..., Any], calls_the_user: bool = False):
        self.fn, self.calls_the_user = fn, calls_the_user
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)

    def __repr__(self) -> str:
        return self.__name__


# -- hooks --------------------------------------------------------------------------------------------------------------
def tensor_hook(hook: Callable[[torch.Tensor], Any], grad: torch.Tensor) -> torch.Tensor:
    """A hook of a tensor (`Tensor.register_hook`)."""
    result = hook(grad)
    return grad if result is None else checked(hook, grad, result)


def node_pre_hook(hook: Callable[[tuple], Any], grads: Sequence[torch.Tensor | None]) -> tuple:
    """A hook that runs before a node (`Node.register_prehook`)."""
    result = hook(tuple(grads))
    return tuple(grads) if result is None else checked_all(hook, grads, result)


def node_post_hook(hook: Callable[[tuple, tuple], Any], results: Sequence[torch.Tensor | None], grads: Sequence[torch.Tensor | None]) -> tuple:
    """A hook that runs behind a node (`Node.register_hook`): what the node computed, and what it was given."""
    result = hook(tuple(results), tuple(grads))
    return tuple(results) if result is None else checked_all(hook, results, result)


def accumulated_hook(hook: Callable[[torch.Tensor], Any], leaf: torch.Tensor) -> torch.Tensor:
    """A hook behind the accumulation of a leaf's gradient (`Tensor.register_post_accumulate_grad_hook`)."""
    if hook(leaf) is not None:
        raise RuntimeError("Tensor post accumulate grad hooks should return None.")
    return leaf


def unpack_hook(hook: Callable[[Any], torch.Tensor], packed: Any) -> torch.Tensor:
    """The unpacking half of `torch.autograd.graph.saved_tensors_hooks`."""
    result = hook(packed)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"Output of saved tensor unpack_hook expected to be a Tensor but got result of type {type(result)}")
    return result


def checked_all(hook: Callable, before: Sequence[torch.Tensor | None], result: Any) -> tuple:
    """What a hook of a node returned, as a tuple that fits."""
    after = result if isinstance(result, tuple) else (result,)
    if len(after) != len(before):
        raise RuntimeError(f"hook '{hook_name(hook)}' has returned an incorrect number of values (got {len(after)}, but expected {len(before)})")
    return tuple(checked(hook, old, new) for old, new in zip(before, after))


def checked(hook: Callable, before: torch.Tensor | None, after: Any) -> Any:
    """What a hook returned in the place of a gradient."""
    if after is None:
        return None
    if before is None:
        raise RuntimeError(f"can't replace a None gradient with a non-None value (hook '{hook_name(hook)}')")
    if not isinstance(after, torch.Tensor):
        raise TypeError(f"expected Variable, but hook '{hook_name(hook)}' returned {type(after).__name__}")
    if before.dtype != after.dtype or before.device.type != after.device.type:
        raise RuntimeError(f"hook '{hook_name(hook)}' has changed the type of value (was {before.type()} got {after.type()})")
    if before.shape != after.shape:
        raise RuntimeError(f"hook '{hook_name(hook)}' has changed the size of value")
    return after


def hook_name(hook: Any) -> str:
    return getattr(hook, "__name__", "<unknown>")


def native_hooks(place: int, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Hooks of a tensor that are written in C++ (`Tensor.retain_grad`), made for real.  They want a gradient."""
    if grad is None:
        return None
    result = grad if isinstance(grad, AbstractTensor) else door.call_cpp_tensor_pre_hooks(place, grad)
    return result.clone(memory_format=torch.contiguous_format)      # what comes back may be the same tensor, expanded: no memory of its own


native_hooks.made_for_real = native_hooks.__firesteel_allowed__ = True      # type: ignore[attr-defined]


# -- custom functions ---------------------------------------------------------------------------------------------------
class BackwardContext:
    """`ctx` of a custom function while its backward is captured: the real one, but for its saved tensors, which the graph is given."""

    def __init__(self, ctx: Any, saved: Sequence[torch.Tensor | None]):
        object.__setattr__(self, "_ctx", ctx)
        object.__setattr__(self, "saved_tensors", tuple(saved))

    def __getattr__(self, name: str) -> Any:
        if name == "saved_variables":
            warnings.warn("'saved_variables' is deprecated; use 'saved_tensors'", DeprecationWarning)   # noqa: B028  eager's level
            return self.saved_tensors
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the class itself has (`needs_input_grad`) belongs to this call; all else to the function's own context."""
        if hasattr(type(self._ctx), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._ctx, name, value)


def custom_backward(ctx: Any, saved: Sequence[torch.Tensor | None], zeros: Sequence[bool], *grads: torch.Tensor | None) -> tuple:
    """The backward of a `torch.autograd.Function` of the user's, which may be called vjp; `zeros` for a gradient that is not there?"""
    cls = ctx._forward_cls
    backward = cls.backward if cls.vjp is Function.vjp else cls.vjp
    grads = tuple([zeros_for(ctx, place) if grad is None and zeros[place] else grad for place, grad in enumerate(grads)])
    results = backward(BackwardContext(ctx, saved), *grads)
    return results if isinstance(results, tuple) else (results,)


def zeros_for(ctx: Any, place: int) -> torch.Tensor | None:
    """The gradient of an output that got none."""
    about = ctx._input_metadata[place]
    return None if about is None else zeros_of(about.shape, about.dtype, about.device)


def zeros_of(shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | None) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def makes_zeros(ctx: Any) -> list[bool] | None:
    """For which outputs does the function want zeros where a gradient is not there?  None where its node cannot be asked."""
    places = flag_place("materialize_grads"), flag_place("_materialize_non_diff_grads")
    if None in places:
        return None
    wants, wants_all = (ctypes.string_at(id(ctx) + place, 1) != b"\0" for place in places)     # type: ignore[operator]  # looked at above
    return [wants and (wants_all or not is_unknown(about)) for about in ctx._input_metadata]


def is_unknown(about: Any) -> bool:
    """What the engine knows of an output that is not differentiable: nothing, which looks like this."""
    return about is not None and (tuple(about.shape), about.dtype, about.device) == ((), torch.float32, HOST)


@functools.cache
def flag_place(name: str) -> int | None:
    """Where a node of Python's keeps a flag that torch lets be set and not read: the one byte that follows when it is set."""
    node: Any = BackwardCFunction()
    size = torch._C._FunctionBase.__basicsize__

    def picture(value: bool) -> bytes:
        setattr(node, name, value)
        return ctypes.string_at(id(node), size)

    pictures = [picture(value) for value in (False, True, False, True)]
    found = [place for place in range(size) if [one[place] for one in pictures] == [0, 1, 0, 1]]
    return found[0] if len(found) == 1 else None


# -- views written in place ---------------------------------------------------------------------------------------------
def copy_slices_prologue(grads: Sequence[torch.Tensor | None], base_sizes: Sequence[int], base_strides: Sequence[int], base_offset: int,
                         view_sizes: Sequence[int], view_strides: Sequence[int], view_offset: int) -> tuple:
    """The gradient of a base that was written through a view: (all of it, the view's part, a copy of that part)."""
    grad, = grads
    if grad is None:
        return None, None, None
    whole = grad.new_empty_strided(base_sizes, base_strides).copy_(grad)
    part = whole.as_strided(view_sizes, view_strides, view_offset - base_offset)
    return whole, part, part.clone()


def copy_slices_epilogue(wanted: Sequence[bool], whole: torch.Tensor | None, results: Sequence[torch.Tensor | None],
                         part: torch.Tensor | None) -> tuple:
    """Puts the gradient that the written function gave for the view into that of the base."""
    grads = [result if want else None for result, want in zip(results, wanted)]
    if whole is not None and part is not None and wanted[0] and results[0] is not None:
        part.copy_(results[0])
        grads[0] = whole
    return tuple(grads)


# -- leaves -------------------------------------------------------------------------------------------------------------
def accumulate_grad(leaf: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Sets `leaf.grad` or adds to it.  The engine, which is C++, does so below the functions that the leaf's class overrides."""
    if grad is None:
        return None
    return accumulate_below(leaf, grad) if overrides_functions(type(leaf)) else accumulate(leaf, grad)


def hooked_accumulate_grad(leaf: torch.Tensor, grad: torch.Tensor | None, late: Sequence[Callable[[torch.Tensor], Any]]) -> torch.Tensor | None:
    """The same, first through hooks that were put on the leaf while this backward ran."""
    if grad is not None:
        for hook in late:
            grad = tensor_hook(hook, grad)
    return accumulate_grad(leaf, grad)


def late_accumulated_hooks(leaf: torch.Tensor, grad: torch.Tensor | None, late: Sequence[Callable[[torch.Tensor], Any]]) -> None:
    """Hooks behind the accumulation that were put on the leaf while this backward ran."""
    if grad is not None:
        for hook in late:
            accumulated_hook(hook, leaf)


def overrides_functions(cls: type) -> bool:
    """Has it a `__torch_function__` of its own?"""
    own, plain = (getattr(kind.__torch_function__, "__func__", None) for kind in (cls, torch.Tensor))     # type: ignore[attr-defined]
    return own is not None and own is not plain


overrides_functions.__firesteel_constant__ = True       # type: ignore[attr-defined]


def accumulate_below(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        return accumulate(leaf, grad)


accumulate_below.__firesteel_disabled__ = "the leaf's class overrides functions of torch, and the engine works below them"  # type: ignore[attr-defined]


def accumulate(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """In place, unless the gradient itself may be differentiated or becomes dense."""
    if leaf.grad is None:
        leaf.grad = fresh_gradient(leaf, grad)
    elif torch.is_grad_enabled() or fills_sparse(leaf.grad, grad):
        leaf.grad = add_gradients(leaf.grad, grad)
    else:
        leaf.grad.add_(grad)
    return leaf.grad


def add_gradients(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """What two nodes sent to the same input of a third; a derivative may give no gradient."""
    if one is None or other is None:
        return other if one is None else one
    return other + one if fills_sparse(one, other) else one + other


def fills_sparse(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Is a dense gradient added to a sparse one?  torch adds only the other way round."""
    return one.layout is not torch.strided and other.layout is torch.strided


# calls that run code of the user's: their order is observed
OF_THE_USER = frozenset({tensor_hook, node_pre_hook, node_post_hook, accumulated_hook, unpack_hook, recompute, native_hooks, custom_backward})

for _call in OF_THE_USER - {native_hooks, recompute}:
    _call.__firesteel_whole__ = True        # type: ignore[attr-defined]  # one that breaks runs for real: the graph is split there once
