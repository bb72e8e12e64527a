"""States of torch that compiling changes: rows that a failed compilation puts back, and stacks that are taken away for a while.

What C++ objects hold and give back when they die (inference mode, excluded dispatch keys) needs no row, as long as no Python object that a
traceback keeps alive holds them: `with torch._C._InferenceMode(False)`, not `with torch.inference_mode(False)`.

    hooks = take_saved_tensor_hooks()
    ...
    hooks.put_back()
"""
from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._python_dispatch as dispatch_modes
from torch.autograd import forward_ad

from firesteel import transaction
from firesteel.transaction import STATES, ThreadState


def _stack(size: Callable[[], int], at: Callable[[int], Any], push: Callable[[Any], Any], pop: Callable[[], Any]) -> ThreadState:
    def read() -> list[Any]:
        return [at(i) for i in range(size())]

    def put(items: Sequence[Any]) -> None:
        now = read()
        if len(now) != len(items) or any(a is not b for a, b in zip(now, items)):
            for _ in now:
                pop()
            for item in items:
                push(item)
    return ThreadState(read, put)


_C = torch._C
# which kernels attention may use: name -> (get, set)
ATTENTION: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    f"sdp_{name}": (getattr(_C, f"_get_{name}_sdp_enabled"), getattr(_C, f"_set_sdp_use_{name}"))
    for name in ("flash", "math", "mem_efficient", "cudnn", "overrideable") if hasattr(_C, f"_get_{name}_sdp_enabled")}
STATES.add("grad mode", ThreadState(torch.is_grad_enabled, _C._set_grad_enabled))
STATES.add("view replay", ThreadState(_C._is_view_replay_enabled, _C._set_view_replay_enabled))
STATES.add("threads of the backward", ThreadState(_C._is_multithreading_enabled, _C._set_multithreading_enabled))
STATES.add("default dtype", ThreadState(torch.get_default_dtype, _C._set_default_dtype, True))
STATES.add("random numbers", ThreadState(torch.default_generator.get_state, torch.default_generator.set_state, True))
STATES.add("dispatch modes", _stack(_C._len_torch_dispatch_stack, _C._get_dispatch_stack_at, _C._push_on_torch_dispatch_stack,
                                    functools.partial(_C._pop_torch_dispatch_stack, None)))
FUNCTION_MODES = _stack(_C._len_torch_function_stack, _C._get_function_stack_at, _C._push_on_torch_function_stack, _C._pop_torch_function_stack)
STATES.add("function modes", FUNCTION_MODES)


count_modes = torch._C._len_torch_function_stack


def current_modes() -> tuple[Any, ...]:
    return tuple(FUNCTION_MODES.read())


def without_modes(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` with all torch function modes off the stack.  No context: an interrupt as one is left would leave them off."""
    modes = current_modes()
    try:
        FUNCTION_MODES.put(())
        result = fn(*args)
        FUNCTION_MODES.put(modes)
        return result
    except BaseException:
        FUNCTION_MODES.put(modes)
        raise


@transaction.context
def outside_inference() -> Iterator[None]:
    """Abstract tensors have versions and histories, which inference mode would take from them; without it, no gradients is what is left."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch._C._InferenceMode(False), torch.no_grad():       # torch.inference_mode, interrupted as it is left, stays on in the traceback
        yield


def _read_flags() -> dict[str, bool]:
    """torch's notes on which kinds of dispatch modes are on; leaving a mode puts them back one by one."""
    return {name: value for name, value in vars(dispatch_modes).items() if name.startswith("_is_in_") and type(value) is bool}


STATES.add("flags of dispatch modes", ThreadState(_read_flags, vars(dispatch_modes).update, True))


# Where a program hands a compiled function to the peer, that sees every frame, those of this compiler too.
_frames = getattr(getattr(_C, "_dynamo", None), "eval_frame", None)
_set_watcher: Callable[[Any], Any] = getattr(_frames, "set_eval_frame", lambda watcher: None)
_get_watcher: Callable[[], Any] = getattr(_frames, "get_eval_frame_callback", lambda: None)
STATES.add("who watches frames", ThreadState(_get_watcher, _set_watcher))


def unwatched(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, which the peer does not see: to trace a compiler takes long, and fails on some Pythons."""
    watcher = _get_watcher()
    try:
        _set_watcher(None)
        return function(*args)
    finally:
        _set_watcher(watcher)


def leave_dual_levels(level: int) -> None:
    """Leaves the levels of forward-mode AD above this one."""
    while forward_ad._current_level > level:
        forward_ad.exit_dual_level()


STATES.add("level of forward-mode AD", ThreadState(lambda: forward_ad._current_level, leave_dual_levels, True))


class Taken:
    """A stack of torch, of which only the top can be seen, taken away and put back.  Each is one call of C for all items: no interrupt comes between
    an item's leaving the stack and its arriving in the list."""

    def __init__(self, top: Callable[[], Any], pop: Callable[[], Any], push: Callable[..., Any], arguments: Callable[[tuple[Any, Any]], tuple]):
        """`arguments` of (top(), pop()) are what the item is pushed with again."""
        self.top, self.pop, self.push = top, pop, push
        self.items: list[tuple] = []        # the innermost first
        transaction.on_failure(self.put_back)
        self.items.extend(map(arguments, self._take()))

    def _take(self) -> Iterator[tuple[Any, Any]]:
        return zip(iter(self.top, None), itertools.starmap(self.pop, itertools.repeat(())))

    def put_back(self) -> None:
        if self.items:      # else nothing was there, or nothing was taken
            collections.deque(self._take(), maxlen=0)
            collections.deque(itertools.starmap(self.push, reversed(self.items)), maxlen=0)


def take_saved_tensor_hooks() -> Taken:
    """The pairs of hooks that are in force."""
    c = _C._autograd
    return Taken(functools.partial(c._top_saved_tensors_default_hooks, False), c._pop_saved_tensors_default_hooks,
                 c._push_saved_tensors_default_hooks, operator.itemgetter(0))


def has_saving_hooks() -> bool:
    return _C._autograd._top_saved_tensors_default_hooks(False) is not None


def take_transforms() -> Taken:
    """The transforms of torch.func that are running."""
    c = _C._functorch
    return Taken(c.peek_interpreter_stack, c.pop_dynamic_layer_stack, c.push_dynamic_layer_stack, operator.itemgetter(slice(1, 2)))


def is_stale(tensor: torch.Tensor) -> bool:
    """Is it a view whose base was written since in a way that eager forbids?  Then to ask for its history is an error, then and here."""
    try:
        tensor.grad_fn  # noqa: B018
    except RuntimeError:
        return True
    return False


def is_tracked(tensor: torch.Tensor) -> bool:
    """Has autograd recorded how the tensor came about?  A view that was taken under no_grad requires grad but has no history."""
    return tensor.requires_grad and not is_stale(tensor) and tensor.grad_fn is not None


def has_history(tensor: torch.Tensor) -> bool:
    """Is it a result of an operator?  To ask that of a view taken under no_grad, whose base was written since with recording on, is an error; where
    nothing is recorded, eager does not ask."""
    try:
        return not tensor.is_leaf
    except RuntimeError:
        if torch.is_grad_enabled():
            raise
        return False
