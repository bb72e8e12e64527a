"""Marks that users put on functions and tensors: disable, graph_break, allow_in_graph, mark_dynamic, ...

A mark is an attribute on the function (or, for tensors, on the tensor), so that capture recognises it without tables
of objects that would keep them alive.  Marks of the peer found in user programs mean the same.

    @disable
    def log_shape(x): ...
    mark_dynamic(batch, 0)
"""
from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from firesteel import transaction
from firesteel.errors import UserError
from firesteel.homes import home_of, is_in_package

logger = logging.getLogger("firesteel")

DISABLED = "__firesteel_disabled__"
ALLOWED = "__firesteel_allowed__"
FORBIDDEN = "__firesteel_forbidden__"
CONSTANT = "__firesteel_constant__"
WHOLE = "__firesteel_whole__"           # a break inside is one of the call, made for real: see parts.py
COMPILED = "__firesteel_compiled__"     # on a compiled wrapper: the function it was made of
TRACED = "__firesteel_traced__"         # on a function: what to call in its place where torch.fx.symbolic_trace looks on
HIDDEN = "__firesteel_hidden__"         # on a function of ours that the peer takes for disabled
DIMENSIONS = "__firesteel_dimensions__"

STANCES = ("default", "force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile", "aot_eager_then_compile")

class _MarksOfThread(threading.local):
    """What holds on one thread."""
    eager = False           # compiled callables are to run eagerly
    compiling = 0           # how many captures are under way


_state = _MarksOfThread()
transaction.keep("marks", _state)
_stance = "default"
_backend: Any = None        # what a stance forces, instead of each callable's own
SUBSTITUTES: dict[Any, Callable[..., Any]] = {}


# -- functions ----------------------------------------------------------------------------------------------------------
class _Disabled(contextlib.AbstractContextManager):
    """disable() as a context: compiled callables called inside run eagerly."""

    def __init__(self, recursive: bool, reason: str | None):
        self.recursive, self.reason = recursive, reason

    def __enter__(self) -> None:
        self._outer = _state.eager
        _state.eager = True

    def __exit__(self, *exc: object) -> None:
        _state.eager = self._outer

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return disable(fn, recursive=self.recursive, reason=self.reason)


def eager_only() -> bool:
    """Are compiled callables to run eagerly on this thread?"""
    return _state.eager or _stance == "force_eager"


def is_unusual() -> bool:
    """Is a call to go another way than to the callable's own compiled code: eagerly, which torch.jit.trace must see too, or to a backend
    that is forced?"""
    return _state.eager or _stance == "force_eager" or _backend is not None or _is_tracing()


_is_tracing: Callable[[], bool] = torch._C._is_tracing


def is_symbolic(inputs: Iterable[Any]) -> bool:
    """Does torch.fx.symbolic_trace look on?"""
    return any(isinstance(x, torch.fx.Proxy) for x in inputs)


def forced_backend() -> Any:
    return _backend


def disable(fn: Callable[..., Any] | None = None, *, recursive: bool = True, reason: str | None = None) -> Any:
    """This code runs eagerly; calling it from compiled code is one graph break.  Decorator, or context with no function."""
    if fn is None:
        return _Disabled(recursive, reason)
    if isinstance(fn, (torch.nn.Module, type)):
        return _disable_methods(fn, recursive, reason)
    if not callable(fn):
        raise UserError(f"fs.disable takes a function, a module or a class, not {type(fn).__name__}.", hint="Pass the callable itself.")

    @functools.wraps(fn)
    def disabled(*args: Any, **kwargs: Any) -> Any:
        if not recursive:
            return fn(*args, **kwargs)
        outer = _state.eager
        try:
            _state.eager = True
            return fn(*args, **kwargs)
        finally:        # no context: it may be interrupted before its exit begins
            _state.eager = outer

    setattr(disabled, DISABLED, reason or "")
    return disabled


def _disable_methods(owner: Any, recursive: bool, reason: str | None) -> Any:
    """A module, or a class whose instances are made and called."""
    if isinstance(owner, type):
        for name, function in own_functions(owner, ("__init__", "__call__")).items():
            setattr(owner, name, disable(function, recursive=recursive, reason=reason))
    elif "forward" not in vars(owner) and (found := own_functions(type(owner), ("forward",))):
        disabled = disable(found["forward"], recursive=recursive, reason=reason)
        owner.forward = types.MethodType(disabled, owner)       # of which a copy of the module has its own
    else:
        owner.forward = disable(owner.forward, recursive=recursive, reason=reason)
    return owner


def own_functions(cls: type, names: Iterable[str]) -> dict[str, types.FunctionType]:
    """Those methods that are functions in Python, inherited ones included."""
    found = {name: next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None) for name in names}
    return {name: function for name, function in found.items() if isinstance(function, types.FunctionType)}


def graph_break(msg: str = "") -> None:
    """A graph break here; does nothing in eager code."""


def _marked(fn: Any, mark: str) -> Any:
    if isinstance(fn, (list, tuple)):
        return [_marked(f, mark) for f in fn]
    if not callable(fn):
        raise UserError(f"{fn!r} cannot be called, so the mark has no meaning")
    try:
        setattr(fn, mark, True)
    except AttributeError:      # a builtin
        NOTED.setdefault(mark, set()).add(fn)
    return fn


NOTED: dict[str, set[Any]] = {}      # mark -> builtins that carry it


# boundary: recognises torch._dynamo.trace_rules, where torch.compiler.allow_in_graph and its relatives note functions by their id
# mark -> (the attribute that the peer's mark leaves on a function, the peer's set of ids)
PEER_MARKS = {ALLOWED: ("", "_allowed_callable_ids"), FORBIDDEN: ("_dynamo_forbidden", "_disallowed_callable_ids"),
              CONSTANT: ("_dynamo_marked_constant", "")}


def is_marked(fn: Any, mark: str) -> bool:
    """Has the user put this mark on the function?  The peer's counts too."""
    attribute, ids = PEER_MARKS[mark]
    if getattr(fn, mark, False) or (attribute and getattr(fn, attribute, False) is True):
        return True
    if mark in NOTED and isinstance(fn, Hashable) and fn in NOTED[mark]:
        return True
    peer = sys.modules.get("torch._dynamo.trace_rules")
    return bool(ids) and peer is not None and id(fn) in getattr(peer, ids)


def allow_in_graph(fn: Any) -> Any:
    """Calls of fn become one node of the graph."""
    return _marked(fn, ALLOWED)


def forbid_in_graph(fn: Any) -> Any:
    """A call of fn while capturing is an error."""
    return _marked(fn, FORBIDDEN)


def assume_constant_result(fn: Any) -> Any:
    """fn is called while capturing, and its result is a constant of the compiled code."""
    return _marked(fn, CONSTANT)


def substitute_in_graph(original: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function below is captured wherever `original` is called."""
    _need_function(original, "fs.substitute_in_graph")

    def register(substitute: Callable[..., Any]) -> Callable[..., Any]:
        _need_function(substitute, "The decorator of fs.substitute_in_graph")
        SUBSTITUTES[original] = substitute
        return substitute
    return register


def _need_function(given: Any, taker: str) -> None:
    if not callable(given):
        raise UserError(f"{taker} takes a function, not {type(given).__name__}.", hint="Pass the function itself.")


# -- tensors ------------------------------------------------------------------------------------------------------------
def _mark_dimensions(tensor: torch.Tensor, dims: int | Iterable[int], wish: str, **limits: int | None) -> None:
    wishes = dict(getattr(tensor, DIMENSIONS, {}))
    for dim in [dims] if isinstance(dims, int) else dims:
        if not -tensor.dim() <= dim < tensor.dim():
            raise UserError(f"a tensor with {tensor.dim()} dimensions has no dimension {dim}")
        wishes[dim % tensor.dim()] = (wish, limits.get("min"), limits.get("max"))
    setattr(tensor, DIMENSIONS, wishes)


def mark_dynamic(tensor: torch.Tensor, dims: int | Iterable[int], *, min: int | None = None, max: int | None = None) -> None:
    """These sizes are symbols from the next call on; a program that fixes one is an error."""
    _mark_dimensions(tensor, dims, "dynamic", min=min, max=max)


def maybe_mark_dynamic(tensor: torch.Tensor, dims: int | Iterable[int]) -> None:
    """These sizes are symbols unless the program fixes them."""
    _mark_dimensions(tensor, dims, "maybe")


def mark_static(tensor: torch.Tensor, dims: int | Iterable[int] | None = None) -> None:
    """These sizes (all, with None) are constants; a change is a recompile."""
    _mark_dimensions(tensor, range(tensor.dim()) if dims is None else dims, "static")


def mark_unbacked(tensor: torch.Tensor, dims: int | Iterable[int]) -> None:
    """These sizes are symbols about which no question may be asked while compiling."""
    _mark_dimensions(tensor, dims, "unbacked")


# boundary: recognises torch._dynamo.mark_dynamic and its relatives (by the attributes they leave on a tensor)
PEER_WISHES = {"_dynamo_dynamic_indices": "dynamic", "_dynamo_weak_dynamic_indices": "maybe", "_dynamo_unbacked_indices": "unbacked",
               "_dynamo_static_indices": "static"}


IGNORED = {"_specialize_on": "specialize_on=", "_dynamo_hint_overrides": "hint_override="}      # attribute -> argument of mark_dynamic
_said: set[str] = set()


def name_ignored(own: dict[str, Any]) -> None:
    for name in IGNORED.keys() & own.keys() - _said:
        if any(own[name].values()):
            _said.add(name)
            logger.warning("the %s %r has no effect: %s", "argument", f"mark_dynamic({IGNORED[name]})", "no program is tuned for one size or hint")


def dimension_wishes(tensor: torch.Tensor) -> dict[int, tuple[str, int | None, int | None]]:
    """Dimension -> (wish, least, greatest)."""
    own = tensor.__dict__
    if not own:
        return {}
    name_ignored(own)
    theirs: dict[int, Any] = {dim: (wish, None, None) for name, wish in PEER_WISHES.items() for dim in own.get(name, ())}
    theirs |= {limits.dim: ("dynamic", limits.min, limits.max) for limits in own.get("_dynamo_dynamic_range", ())}
    return {**theirs, **own.get(DIMENSIONS, {})}


# -- state --------------------------------------------------------------------------------------------------------------
def is_compiling() -> bool:
    """True while code is being captured or compiled; capture answers it for user code without calling it."""
    return _state.compiling > 0


@transaction.context
def compiling() -> Any:
    _state.compiling += 1
    try:
        yield
    finally:
        _state.compiling -= 1


def stance() -> str:
    return _stance


class Stance:
    """Sets what compiled callables do from now on; also a context manager and a decorator that put it back."""

    def __init__(self, stance: str = "default", *, force_backend: Any = None):
        if stance not in STANCES:
            raise UserError(f"no stance {stance!r}; there are {', '.join(STANCES)}")
        if force_backend is not None and stance != "default":
            raise UserError(f"A backend is forced together with the stance {stance!r}.", hint='Force it with the stance "default" alone.')
        self.wanted, self._before = (stance, force_backend), (_stance, _backend)
        self.__enter__()

    def __enter__(self) -> Stance:
        global _stance, _backend
        _stance, _backend = self.wanted
        return self

    def __exit__(self, *exc: object) -> None:
        global _stance, _backend
        _stance, _backend = self._before

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        stance, backend = self.wanted
        self.__exit__()

        @functools.wraps(fn)
        def under_stance(*args: Any, **kwargs: Any) -> Any:
            with Stance(stance, force_backend=backend):
                return fn(*args, **kwargs)
        return under_stance


# boundary: recognises torch._dynamo.error_on_graph_break by the name that it writes
def breaks_are_errors(written: Callable[[dict[str, Any], str], Any] = lambda scope, name: None) -> bool:
    """Does a block of the peer's say so?  `written(scope, name)` is the value that the program has given a global name, if any."""
    scope, name = vars(sys.modules.get("torch._dynamo.utils", object)), "_error_on_graph_break"
    value = written(scope, name) if name in scope else None
    return bool(scope.get(name) if value is None else value.constant())


# the code of the wrapper that torch puts around functions of its own, such as Optimizer.zero_grad
TORCH_DISABLED = torch._disable_dynamo(len).__code__


def looks_disabled(fn: Any) -> str | None:
    """The reason (perhaps empty) why fn must run eagerly, or None; the peer's mark counts too."""
    # boundary: recognises torch.compiler.disable, torch._dynamo.disable (by the attribute they leave on a function)
    reason = getattr(fn, DISABLED, None)
    if reason is None and getattr(fn, "_torchdynamo_disable", False) and not hasattr(fn, HIDDEN):
        reason = getattr(fn, "_torchdynamo_disable_msg", None) or ""
    return reason


def before_the_peer(fn: Any) -> Any:
    """The function that the peer was to compile, or an optimiser's function on which it, once loaded, put marks of its own.  None for all others."""
    # boundary: recognises the attributes that torch.compile and torch._dynamo.disable leave on a function
    original = getattr(fn, "_torchdynamo_orig_callable", None)
    if original is None or not has_own_marks(fn) or getattr(fn, "_torchdynamo_disable", False) and not is_in_package(home_of(fn), "torch.optim"):
        return None
    return original


def has_own_marks(fn: Any) -> bool:
    """Not those of a function that it is wrapped around: functools.wraps copies them.  (The peer has not always written whose they are.)"""
    fn = getattr(fn, "__func__", fn)
    return getattr(fn, "_torchdynamo_wrapper_id", None) in (None, id(fn))


def compiled_of(fn: Any) -> Any:
    """The function below a compiled wrapper; None for all others."""
    return getattr(fn, COMPILED, None) if has_own_marks(fn) else None


def stands_for(compiled: Any, fn: Callable[..., Any]) -> None:
    """Marks a compiled wrapper of a function: torch.jit.script takes the function, as it does behind torch.jit.script_if_tracing; so does
    torch.compile(compiled)."""
    setattr(compiled, COMPILED, fn)
    # boundary: the attributes by which torch.compile finds the function below a wrapper that it is given
    vars(compiled).update({"__original_fn": fn, "__script_if_tracing_wrapper": True, "_torchdynamo_orig_callable": fn,
                           "_torchdynamo_wrapper_id": id(compiled)})
    hide_from_the_peer(compiled)


def hide_from_the_peer(fn: Any) -> None:
    """torch.compile around a call of this function calls it as it is, and looks at no frame that it calls."""
    # boundary: the mark of torch._dynamo.disable, and the engine's own table of what is skipped
    fn._torchdynamo_disable = True
    fn._torchdynamo_disable_msg = "it is compiled by firesteel: hand over the module or function that was given to fs.compile"
    setattr(fn, HIDDEN, True)
    if _SKIP is not None:
        _frames.set_code_exec_strategy(fn.__code__, _SKIP)


_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP) if hasattr(_frames, "set_code_exec_strategy") else None


def is_module_of_the_peer(cls: type) -> bool:
    """What torch.compile makes of a module; its `_orig_mod` is the module."""
    # boundary: recognises torch._dynamo.eval_frame.OptimizedModule by its name
    return cls.__name__ == "OptimizedModule" and cls.__module__ == "torch._dynamo.eval_frame"
