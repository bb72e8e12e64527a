"""compile() and its friends: what users call.

    compiled = fs.compile(model)            # nothing is traced yet
    compiled(x)                             # capture, compile, run; later calls look for an entry whose guards hold
"""
from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch.compiler import is_dynamo_compiling

from firesteel import artifacts, stages
from firesteel.backends import (
    BACKENDS,
    FOR_GPU,
    FREEZING,
    BudgetBackend,
    checked,
    expect_kernels,
    is_native,
    is_ours,
    lookup_backend,
    native,
    with_keywords,
)
from firesteel.capture import entry, marks
from firesteel.config import config
from firesteel.errors import UserError
from firesteel.homes import LaterModule
from firesteel.options import check_keywords, check_types, say_once, wants_freezing, wants_recording, wants_tuning
from firesteel.runtime import cpu
from firesteel.targets import CUDA, in_use

if TYPE_CHECKING:
    from firesteel import tiers
    from firesteel.autograd import engine
    from firesteel.autograd.budget import MemoryReport
    from firesteel.capture import shape_specs
    from firesteel.graph import abstract
else:
    abstract, engine = LaterModule("firesteel.graph.abstract"), LaterModule("firesteel.autograd.engine")
    shape_specs, tiers = LaterModule("firesteel.capture.shape_specs"), LaterModule("firesteel.tiers")

logger = logging.getLogger("firesteel")


def compile(model: Any = None, *, fullgraph: bool = False, dynamic: bool | None = None, backend: str | Callable = "native",
            mode: str | None = None, options: dict | None = None, disable: bool = False, name: str | None = None,
            recompile_limit: int | None = None, isolate_recompiles: bool = False, shapes_spec: Any = None, tiered: bool = False) -> Any:
    """Compiles a function or an nn.Module at its first call; with no model, a decorator.  A class stays one: its instances' calls are compiled.

    `name` stands in logs and counters; `recompile_limit` is this callable's own, instead of the setting.  Modules of one class share
    variants, and so do functions, partials and methods that differ in a number they hold, unless `isolate_recompiles`.  `tiered`: calls for which
    nothing is compiled yet run eagerly, and what serves them is compiled on another thread meanwhile (tiers.py)."""
    chosen = lookup_backend(backend)
    check_types(dynamic=dynamic, name=name, options=options)
    dynamic = None if dynamic is None else bool(dynamic)
    check_keywords(mode, options, recompile_limit, "native" if chosen is native else "ours" if is_ours(chosen) else "another's")
    if shapes_spec is not None and dynamic is not None:
        raise UserError("dynamic= and shapes_spec= are given both.", hint="Leave one out: a specification says of every size whether it is dynamic.")
    if model is None:
        return functools.partial(compile, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options, disable=disable,
                                 name=name, recompile_limit=recompile_limit, isolate_recompiles=isolate_recompiles, shapes_spec=shapes_spec,
                                 tiered=tiered)
    if not callable(model):
        raise UserError(f"fs.compile takes a function or a module, not {type(model).__name__}.", hint="Pass the callable itself.")
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("fs.compile takes no module of torch.jit.", hint="Compile the module that it was made of.")
    if disable:
        return model
    wanted = wants_recording(mode, options), wants_tuning(mode, options)
    if chosen is native:
        for_gpu, freezing = wanted != (None, False) and CUDA in in_use(), wants_freezing(options)
        chosen = FOR_GPU[wanted] if for_gpu else native if freezing is None else FREEZING[freezing]
        if for_gpu and freezing:
            say_once("option", "freeze", "beside choices for a GPU it is read from fs.config.freeze")
        if torch.cuda.is_initialized():     # the first call will want a GPU's kernels
            expect_kernels()
    elif not is_ours(chosen):
        chosen = with_keywords(chosen, mode, options)
    settings = {"backend": chosen, "fullgraph": fullgraph, "dynamic": dynamic, "backwards": config.compiled_autograd,
                "name": name, "recompile_limit": recompile_limit, "isolated": object() if isolate_recompiles else None,
                "later": tiers.schedule if tiered else None, "spec": None if shapes_spec is None else shape_specs.ShapeSpec(shapes_spec, model)}
    if isinstance(model, torch.nn.Module):
        return _compile_module(model, settings)
    if getattr(model, "__func__", None) is torch.nn.Module._call_impl:      # module.compile()
        return _with_first(_module_call(model.__self__, settings, model.__func__), model.__self__, model)
    if isinstance(model, type):
        return _compile_class(model, settings)
    alone = isolate_recompiles or shapes_spec is not None
    return not alone and (_compile_method(model, settings) or _compile_closure(model, settings)) or compile_callable(model, settings)


def checkpoint_budget(model: Any = None, *, bytes: float, backend: str = "native", **settings: Any) -> Any:
    """fs.compile(model, **settings), whose graphs each save at most `bytes` for their backward beyond the inputs: what is saved and what is
    recomputed is chosen by measured run times.  `fs.memory_report(compiled)` says what was chosen; with no model, a decorator.

    The limit is for what lives between forward and backward, not for the peak: recomputed values, temporaries and gradients come on top
    while the backward runs.  A lower limit may have a higher peak; measure it (`bench/memory.py --modes limit=12e6`, docs/autograd.md)."""
    if isinstance(bytes, bool) or not isinstance(bytes, (int, float)) or not 0 <= bytes < math.inf:
        raise UserError(f"fs.checkpoint_budget takes a number of bytes, not {bytes!r}.", hint="Say for instance bytes=200e6.")
    if model is None:
        return functools.partial(checkpoint_budget, bytes=bytes, backend=backend, **settings)
    limited = BudgetBackend(backend, int(bytes))
    compiled = compile(model, backend=limited, **settings)
    if compiled is not model and not isinstance(model, torch.nn.Module):
        compiled._firesteel_settings = {"backend": limited}
    return compiled


def memory_report(compiled: Any) -> MemoryReport:
    """What fs.checkpoint_budget chose for the graphs of this callable so far."""
    limited = getattr(compiled, "_firesteel_settings", {}).get("backend")
    if not isinstance(limited, BudgetBackend):
        raise UserError("fs.memory_report takes what fs.checkpoint_budget returned.", hint="Call it on the compiled callable.")
    return limited.partition.report


def reset() -> None:
    """Forgets every compiled artifact, guard, counter and record of changing sizes in this process, and gives machine code back."""
    entry.reset()
    _closure_calls.clear()
    _method_calls.clear()
    _module_calls.clear()
    tiers.reset()
    engine.reset()
    cpu.reset()
    artifacts.reset()
    stages.reset()


class set_stance(marks.Stance):
    """What compiled callables do from now on; also a context manager and a decorator that put it back.  `force_backend` compiles for another
    backend than each callable's own."""

    def __init__(self, stance: str = "default", *, skip_guard_eval_unsafe: bool = False, force_backend: str | Callable | None = None):
        if skip_guard_eval_unsafe:
            say_once("stance", "skip_guard_eval_unsafe", "guards are always checked; they cost about a microsecond a call")
        super().__init__(stance, force_backend=None if force_backend is None else checked(lookup_backend(force_backend)))


@functools.cache
def _first_backends() -> dict[str, Callable]:
    """Stance -> who compiles for the first call."""
    return {"eager_then_compile": checked(BACKENDS["eager"]), "aot_eager_then_compile": checked(BACKENDS["aot_eager"])}


def compile_callable(fn: Callable, settings: dict, steals: int | None = None) -> Callable:
    own = {name: value for name, value in settings.items() if name not in ("backwards", "isolated")}
    is_kept = is_native(settings["backend"]) and settings.get("spec") is None
    compiled = entry.compile_function(fn, make_world=_make_world, native_compiler=cpu.compiler_at_hand, steals=steals,
                                      first_backends=_first_backends(), kept=_kept_regions if is_kept else lambda: None,
                                      **{**own, "backend": checked(settings["backend"])})
    return _capturing_backwards(compiled, settings) if settings["backwards"] else compiled


def _make_world(*args: Any) -> abstract.AbstractWorld:
    return abstract.AbstractWorld(*args)


def _kept_regions() -> Any:
    """Where captured regions are kept between processes."""
    if not config.cache_dir:
        return None
    from firesteel import regioncache  # with what reads and writes them
    return regioncache


def _compile_class(cls: Any, settings: dict) -> type:
    """The class that was decorated: calls of its instances run compiled code."""
    found = marks.own_functions(cls, ("__call__",))
    if not found:
        logger.warning("nothing of the class %s is compiled: its instances cannot be called", cls.__qualname__)
    for name, function in found.items():
        setattr(cls, name, compile_callable(function, {**settings, "name": settings["name"] or cls.__qualname__}))
    return cls


# ---------------------------------------------------------------- closures

_closure_calls: dict[Any, Any] = {}     # the latest KEPT
# Function of a class -> (class of the object, *settings) -> compiled code for the method of all of them, while one of them lives
_method_calls: weakref.WeakKeyDictionary[types.FunctionType, weakref.WeakValueDictionary[tuple, Any]] = weakref.WeakKeyDictionary()
KEPT = 64
CROWDED = 4     # variants: a float that differs has become a symbol by then, if it can


NUMBERS = (int, float)
DEEP = 3        # functions that a function holds are compared like itself, and what these hold, so far down


def held_by(fn: Any) -> list[Any]:
    """What a function holds besides its code, contents of its closure and defaults; what a partial holds."""
    if type(fn) is functools.partial:
        return [fn.func, *fn.args, *fn.keywords.values()]
    cells = [cell.cell_contents for cell in fn.__closure__ or () if cell != types.CellType()]
    return [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]


def likeness(held: Any, depth: int = 0) -> Any:
    """What functions that share compiled code have in common: of a number, its type."""
    kind = type(held)
    if kind in NUMBERS:
        return kind
    if kind not in (types.FunctionType, functools.partial) or depth == DEEP:
        return id(held), kind
    own = (held.__code__, id(held.__globals__)) if kind is types.FunctionType else tuple(held.keywords)
    return kind, *own, *(likeness(part, depth + 1) for part in held_by(held))


def holds_number(alike: Any) -> bool:
    return alike in NUMBERS or type(alike) is tuple and any(map(holds_number, alike))


def is_made_anew(fn: Any) -> bool:
    """May a program make many of it?  A function of a module is one."""
    return type(fn) is functools.partial or type(fn) is types.FunctionType and "<locals>" in fn.__qualname__


def call_closure(fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """What is captured for a function that holds numbers: it is an argument, so that others of the same code are served too."""
    return fn(*args, **kwargs)


def _compile_closure(fn: Any, settings: dict) -> Callable | None:
    """Functions of the same code that differ in numbers share compiled code; the guards decide.  None where there is no such number."""
    alike = likeness(fn) if is_made_anew(fn) else None
    if not holds_number(alike):
        return None
    key, inner = (alike, *settings.values()), fn.func if type(fn) is functools.partial else fn
    call = _closure_calls.pop(key, None)
    if call is None or any(len(region.entries) >= CROWDED for region in call.__firesteel_root__.all_regions()):
        name = settings["name"] or getattr(inner, "__qualname__", None) or type(inner).__qualname__
        call = compile_callable(call_closure, {**settings, "name": name, "code": entry.code_of(inner), "names": ("fn", *entry.own_names(fn))})
    _closure_calls[key] = call
    if len(_closure_calls) > KEPT:
        del _closure_calls[next(iter(_closure_calls))]
    return _with_first(call, fn, fn)


def _compile_method(fn: Any, settings: dict) -> Callable | None:
    """Methods of a class's objects share compiled code, whose first argument is the object: of modules, and of what has numbers as attributes.
    None for other callables."""
    method = fn if isinstance(fn, types.MethodType) else fn.__call__
    own, function = getattr(method, "__self__", None), getattr(method, "__func__", None)
    if not isinstance(function, types.FunctionType) or isinstance(own, type) or hasattr(type(own), "_firesteel_original"):
        return None
    named = {**settings, "name": settings["name"] or function.__qualname__}
    if isinstance(own, torch.nn.Module):
        return _with_first(_module_call(own, named, function), own, fn)
    if not any(type(value) in NUMBERS for value in getattr(own, "__dict__", {}).values()):
        return None
    calls, key = _method_calls.setdefault(function, weakref.WeakValueDictionary()), (type(own), *named.values())
    call = calls.get(key)
    if call is None or any(len(region.entries) >= CROWDED for region in call.__firesteel_root__.all_regions()):
        call = calls[key] = compile_callable(function, named)
    return _with_first(call, own, fn)


def _with_first(call: Any, first: Any, fn: Callable) -> Callable:
    """`fn`, whose compiled code is shared and takes as its first argument what differs."""
    @functools.wraps(fn)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return call(first, *args, **kwargs)

    marks.stands_for(compiled, fn)
    compiled.__firesteel_root__ = call.__firesteel_root__       # type: ignore[attr-defined]  # read by fs.explain
    return compiled


# ---------------------------------------------------------------- compiled autograd

def compiled_autograd(compiler: Callable[[torch.fx.GraphModule], Callable] | None = None, *, dynamic: bool | None = None
                      ) -> contextlib.AbstractContextManager[None]:
    """Context: every backward started inside by this thread is captured from the engine as one graph, hooks and accumulation included,
    and handed to `compiler`; without one, to fs.compile.  With dynamic=True no size is a constant, else only those that never changed."""
    if compiler is not None and not callable(compiler):
        raise UserError(f"fs.compiled_autograd takes a function of a GraphModule, not {type(compiler).__name__}.")
    return engine.requested(engine.Request(_compile_backward if compiler is None else (lambda gm, dynamic: compiler(gm)), bool(dynamic)))


def disable_compiled_autograd() -> contextlib.AbstractContextManager[None]:
    """Context: backwards started inside are the eager engine's."""
    return engine.requested(None)


def _compile_backward(gm: torch.fx.GraphModule, dynamic: bool) -> Callable:
    return compile(gm, dynamic=dynamic or None)


def _capturing_backwards(compiled: Callable, settings: dict) -> Callable:
    """The compiled callable, whose backwards, wherever they start inside, are captured as graphs for the same backend."""
    def compile_backward(gm: torch.fx.GraphModule, dynamic: bool) -> Callable:
        with config.patch(compiled_autograd=False):
            return compile(gm, backend=settings["backend"], dynamic=dynamic or settings["dynamic"])
    request = engine.Request(compile_backward, settings["dynamic"] is True)

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        with engine.requested(request):
            return compiled(*args, **kwargs)
    return call


# ---------------------------------------------------------------- modules

# Class of a module -> the subclass whose calls run compiled code.  It lives as long as a module of it: nothing here keeps a user's class, or what
# its methods hold, alive.
_compiled_classes: weakref.WeakKeyDictionary[type, weakref.ref[Any]] = weakref.WeakKeyDictionary()
# Class of a module -> (function, parts, *settings) -> compiled code for all its modules, while one of them lives
_module_calls: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[tuple, Any]] = weakref.WeakKeyDictionary()


def call_module(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """What is captured for a module: its whole call, hooks included."""
    return module(*args, **kwargs)


def call_traced(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Its call for torch.fx.symbolic_trace, which knows the compiled module and the parts of both, not the module below."""
    return module._call_impl(*args, **kwargs)


setattr(call_module, marks.TRACED, call_traced)


def call_forward(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """What is captured where a program calls a module's forward itself."""
    forward = class_forward(module) if "forward" in vars(module) else module.forward
    return forward(*args, **kwargs)


METHODS = {call_module: "forward", call_forward: "forward"}      # whose arguments have the names that people see


def class_forward(module: torch.nn.Module) -> Any:
    """The forward of the module's class.  The instance's own may be a wrapper that the user set around it: it must not be called by itself."""
    found = next(vars(base)["forward"] for base in type(module).__mro__ if "forward" in vars(base))
    return found.__get__(module, type(module)) if hasattr(found, "__get__") else found


def _compile_module(module: torch.nn.Module, settings: dict) -> torch.nn.Module:
    """The same module with a compiled call: an object of a subclass that shares the original's attribute dictionary, so that
    state_dict keys, isinstance, train(), assignments and the original itself all stay one thing."""
    original: Any = getattr(module, "_firesteel_original", module)
    cls = _compiled_class(type(original))
    compiled: Any = object.__new__(cls)
    object.__setattr__(compiled, "__dict__", original.__dict__)
    for name in ("_firesteel_original", "_orig_mod"):       # the latter is what programs ask a module of torch.compile for
        object.__setattr__(compiled, name, original)
    object.__setattr__(compiled, "_firesteel_settings", settings)
    object.__setattr__(compiled, "_firesteel_call", _module_call(original, settings, call_module))
    object.__setattr__(compiled, "_firesteel_forward", _module_call(original, settings, call_forward))
    return compiled


def _module_call(original: torch.nn.Module, settings: dict, function: Callable) -> Callable:
    """Modules of one class that are compiled alike and have the same parts share compiled code, as long as one lives: guards say what it is
    good for.  (Many Sequentials of different parts would reach the limit of one.)"""
    known = original.named_modules() if "_modules" in vars(original) else ()       # a copy in the making has none yet
    parts = tuple((name, type(part).__qualname__) for name, part in known)
    key, calls = (function, parts, *settings.values()), _module_calls.setdefault(type(original), weakref.WeakValueDictionary())
    call = calls.get(key)
    if call is None:
        boxed = isinstance(original, torch.fx.GraphModule) and original.meta.get("boxed", False)
        shown = getattr(type(original), METHODS.get(function, function.__name__), function)
        named = {**settings, "name": settings["name"] or type(original).__qualname__, "names": entry.own_names(shown)}
        call = calls[key] = compile_callable(function, named, steals=1 if boxed else None)
    original.__dict__.setdefault(CompiledCode.NAME, CompiledCode()).calls.add(call)
    return call


class CompiledCode:
    """An attribute of a module that was compiled: keeps its code while it lives, so that fs.compile(model)(x) in a loop compiles once.  A
    copy of the module starts without."""
    NAME = "_firesteel_code"

    def __init__(self) -> None:
        self.calls: set[Callable] = set()

    def __reduce__(self) -> tuple:
        return CompiledCode, ()


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


# class of a framework -> methods of a module that its loops call in place of the module itself: what the user overrides of these is compiled too
STEPS = {"LightningModule": ("training_step", "validation_step", "test_step", "predict_step")}


def steps_of(cls: type) -> list[str]:
    found = [(base, name) for base in cls.__mro__ for name in STEPS.get(base.__name__, ())]
    return [name for base, name in found if getattr(cls, name, None) is not getattr(base, name, None)]


@functools.cache
def call_step(name: str) -> Callable:
    def call_method(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(module, name)(*args, **kwargs)
    call_method.__name__ = name
    return call_method


def _compiled_step(cls: Any, name: str) -> Callable:
    @functools.wraps(getattr(cls, name))
    def step(self, *args, **kwargs):
        call = _module_call(self._firesteel_original, {**self._firesteel_settings, "spec": None}, call_step(name))
        return call(self._firesteel_original, *args, **kwargs)

    marks.hide_from_the_peer(step)
    return step


def _in_scope_of(fn: Any, wrapper: Any) -> Any:
    """The wrapper, which needs no globals of its own, with those of `fn`: torch.jit.script reads the text of `fn`, and looks up its names there."""
    made = types.FunctionType(wrapper.__code__, getattr(fn, "__globals__", globals()), wrapper.__name__, None, wrapper.__closure__)
    return functools.update_wrapper(made, fn)


def _make_compiled_class(cls: Any) -> Any:
    inlined = is_dynamo_compiling       # torch.compile inlines the module itself

    def call(self, *args, **kwargs):
        if inlined():
            return super(made, self).__call__(*args, **kwargs)
        return self._firesteel_call(self._firesteel_original, *args, **kwargs)

    @functools.partial(_in_scope_of, cls.forward)
    def forward(self, *args, **kwargs):
        if inlined():
            return super(made, self).forward(*args, **kwargs)
        return self._firesteel_forward(self._firesteel_original, *args, **kwargs)

    def deepcopy(self, memo):
        return _compile_module(copy.deepcopy(self._firesteel_original, memo), self._firesteel_settings)

    def shallow_copy(self):
        return _compile_module(copy.copy(self._firesteel_original), self._firesteel_settings)

    def load(self, state_dict, prefix, *args):
        before = f"{prefix}_orig_mod."      # in what a module of torch.compile wrote
        for key in [key for key in state_dict if key.startswith(before) and "_orig_mod" not in self._modules]:
            state_dict[prefix + key.removeprefix(before)] = state_dict.pop(key)
        super(made, self)._load_from_state_dict(state_dict, prefix, *args)

    def reduce(self, protocol):
        return _loaded, (self._firesteel_original,)     # a pickle holds the original

    body = {"__slots__": ("_firesteel_original", "_orig_mod", "_firesteel_settings", "_firesteel_call", "_firesteel_forward"),
            "__call__": call, "forward": forward, **{name: _compiled_step(cls, name) for name in steps_of(cls)},
            "__deepcopy__": deepcopy, "__copy__": shallow_copy, "__reduce_ex__": reduce, "_load_from_state_dict": load,
            "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: Any = type(cls.__name__, (cls,), body)
    return made
