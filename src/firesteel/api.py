"""compile() and its friends: what users call.

    compiled = fs.compile(model)            # nothing is traced yet
    compiled(x)                             # capture, compile, run; later calls look for an entry whose guards hold
"""
from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from firesteel import artifacts
from firesteel.backends import OURS, lookup_backend
from firesteel.capture import entry
from firesteel.config import config
from firesteel.errors import BackendError, FiresteelError, UserError
from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.guest import hosted
from firesteel.runtime import cpu
from firesteel.testing import CompileCounterWithBackend

MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def compile(model: Any = None, *, fullgraph: bool = False, dynamic: bool | None = None, backend: str | Callable = "native",
            mode: str | None = None, options: dict | None = None, disable: bool = False) -> Any:
    """Compiles a function or an nn.Module at its first call; with no model, a decorator."""
    if model is None:
        return functools.partial(compile, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options, disable=disable)
    if disable:
        return model
    _check_arguments(model, mode, options)
    settings = {"backend": lookup_backend(backend), "fullgraph": fullgraph, "dynamic": dynamic}
    if isinstance(model, torch.nn.Module):
        return _compile_module(model, settings)
    return _compile_function(model, settings)


def reset() -> None:
    """Forgets every compiled artifact, guard, counter and record of changing sizes in this process."""
    entry.reset()
    for made in _compiled_classes.values():
        if (cls := made()) is not None:
            cls._firesteel_calls.clear()
    artifacts.reset()


def explain(fn: Callable, **settings: Any) -> Callable[..., artifacts.Explanation]:
    """`explain(fn)(*args, **kwargs)` compiles and runs `fn` once and tells what became of it."""
    def explained(*args: Any, **kwargs: Any) -> artifacts.Explanation:
        settings.setdefault("backend", "eager")
        counter = CompileCounterWithBackend(settings.pop("backend"))
        compiled = compile(fn, backend=counter, **settings)
        breaks_before, times_before = len(artifacts.breaks), artifacts.stage_times()
        compiled(*args, **kwargs)
        times = {stage: seconds - times_before.get(stage, 0.0) for stage, seconds in artifacts.stage_times().items()}
        root = getattr(compiled, "_firesteel_call", compiled).__firesteel_root__
        guards = [guard for region in root.all_regions() for entry in region.variants() for guard in entry.guard.guards]
        special = [text for guard in guards if (text := guard.specialization())]
        return artifacts.Explanation(counter.graphs, list(map(str, guards)), list(artifacts.breaks)[breaks_before:], times, counter.op_count, special)
    return explained


def _check_arguments(model: Any, mode: str | None, options: dict | None) -> None:
    if not callable(model):
        raise UserError(f"fs.compile takes a function or a module, not {type(model).__name__}.", hint="Pass the callable itself.")
    if mode not in MODES:
        raise UserError(f"There is no mode {mode!r}.", hint=f"Use one of {', '.join(map(repr, MODES))}.")
    if options:
        raise UserError(f"There are no options {', '.join(options)}.", hint="Settings are attributes of fs.config.")
    if config.compiled_autograd:
        warnings.warn("fs.config.compiled_autograd is not there yet: backwards are compiled as without it.", stacklevel=3)


def _checked(backend: Callable) -> Callable:
    """The backend, whose failures reach the user as a BackendError that names it."""
    hosting = backend if backend in OURS else hosted(backend)

    @functools.wraps(backend, updated=())
    def compile_graph(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        try:
            compiled = hosting(gm, example_inputs)
        except FiresteelError:
            raise
        except Exception as e:
            raise BackendError(f"The backend {_name(backend)} failed on a graph: {type(e).__name__}: {e}") from e
        if not callable(compiled):
            raise BackendError(f"The backend {_name(backend)} returned {type(compiled).__name__}, not a callable.")
        return compiled
    return compile_graph


def _name(backend: Callable) -> str:
    return getattr(backend, "__name__", type(backend).__name__)


def _compile_function(fn: Callable, settings: dict) -> Callable:
    return entry.compile_function(fn, make_world=AbstractWorld, native_compiler=cpu.compiler_at_hand,
                                  **{**settings, "backend": _checked(settings["backend"])})


# ---------------------------------------------------------------- modules

# Class of a module -> the subclass whose calls run compiled code.  It lives as long as a module of it: nothing here keeps a user's class, or what
# its methods hold, alive.
_compiled_classes: weakref.WeakKeyDictionary[type, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def call_module(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """What is captured for a module: its whole call, hooks included."""
    return module(*args, **kwargs)


def call_forward(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """What is captured where a program calls a module's forward itself."""
    return module.forward(*args, **kwargs)


def _compile_module(module: torch.nn.Module, settings: dict) -> torch.nn.Module:
    """The same module with a compiled call: an object of a subclass that shares the original's attribute dictionary, so that
    state_dict keys, isinstance, train(), assignments and the original itself all stay one thing."""
    original: Any = getattr(module, "_firesteel_original", module)
    cls = _compiled_class(type(original))
    compiled: Any = object.__new__(cls)
    object.__setattr__(compiled, "__dict__", original.__dict__)
    object.__setattr__(compiled, "_firesteel_original", original)
    object.__setattr__(compiled, "_firesteel_settings", settings)
    object.__setattr__(compiled, "_firesteel_call", _module_call(cls, settings, call_module))
    object.__setattr__(compiled, "_firesteel_forward", _module_call(cls, settings, call_forward))
    return compiled


def _module_call(cls: Any, settings: dict, function: Callable) -> Callable:
    """Modules of one class that are compiled alike share compiled code, as long as one lives: guards say what it is good for."""
    key = (function, *settings.values())
    call = cls._firesteel_calls.get(key)
    if call is None:
        call = cls._firesteel_calls[key] = _compile_function(function, settings)
    return call


def _loaded(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _compiled_class(cls: type) -> Any:
    """The subclass of the module's class whose calls run compiled code."""
    known = _compiled_classes.get(cls)
    made = known() if known is not None else None
    if made is None:
        made = _make_compiled_class(cls)
        _compiled_classes[cls] = weakref.ref(made)
    return made


def _make_compiled_class(cls: Any) -> Any:
    def call(self, *args, **kwargs):
        return self._firesteel_call(self._firesteel_original, *args, **kwargs)

    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        return self._firesteel_forward(self._firesteel_original, *args, **kwargs)

    def deepcopy(self, memo):
        return _compile_module(copy.deepcopy(self._firesteel_original, memo), self._firesteel_settings)

    def reduce(self, protocol):
        return _loaded, (self._firesteel_original,)     # a pickle holds the original

    body = {"__slots__": ("_firesteel_original", "_firesteel_settings", "_firesteel_call", "_firesteel_forward"),
            "_firesteel_calls": weakref.WeakValueDictionary(), "__call__": call, "forward": forward,
            "__deepcopy__": deepcopy, "__reduce_ex__": reduce,
            "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), body)
