"""Context managers that change a state of torch: no_grad, enable_grad, set_grad_enabled, inference_mode, autocast, ...

Each is a list of (state, value) pairs; a state is a row of `STATES`: how to read and set it.  Entering sets the states for the
abstract run and as nodes in the graph; leaving puts the old ones back.  At a break inside, generated code sets the states for
real, so the breaking call and the continuation run under them; the exit is a `ModeExit`, recognised again on resuming.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from firesteel.capture import polyfills
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.services import STATES, Changes, Key, get_state, set_state
from firesteel.capture.source import Source
from firesteel.capture.values.base import CannotRebuild, MethodOfOwner, Value
from firesteel.capture.values.const import FALSE, NONE, ConstValue
from firesteel.capture.values.functions import Args, Kwargs
from firesteel.errors import Break


class ModeExit:
    """The real exit function of a captured context, between a break and the end of its block."""

    __slots__ = ("restore",)

    def __init__(self, restore: tuple[tuple[Key, Any], ...]):
        self.restore = restore

    def __call__(self, *exc: object) -> None:
        for key, value in self.restore:
            set_state(key, value)


def set_states(m: Machine, changes: Changes) -> None:
    """A region runs without gradients for inference mode: to switch them on there, which marks views alone, is left to torch."""
    if m.modes.inference and (("grad",), True) in changes:
        raise Break("context", name="enable_grad under inference mode")
    m.states.set(changes)


class ContextValue(Value):
    """A context manager object of torch that has not been entered."""

    words = "context {self.cls.__name__}"

    def __init__(self, cls: type, args: Args, kwargs: Kwargs, changes: Changes, source: Source | None = None, obj: Any = None):
        self.cls, self.args, self.kwargs, self.changes, self.source, self.obj = cls, args, kwargs, changes, source, obj
        self.entered: tuple[tuple[Value, int], ...] = ()        # by a call of __enter__: its exit, and the step of the call

    def enter(self, m: Machine) -> tuple[Value, Value]:
        """(exit function, result of __enter__)"""
        restore = tuple((key, get_state(key)) for key, _ in self.changes)
        set_states(m, self.changes)
        return ExitValue(restore), NONE if self.cls in GRAD_MODES else self

    def getattr(self, m: Machine, name: str) -> Value:
        if name in CONTEXT_METHODS:
            return MethodOfOwner(self, name, CONTEXT_METHODS[name])
        if name == "__class__":
            return m.constant_object(self.cls)
        return super().getattr(m, name)

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        """As a decorator."""
        return decorated(m, args[0], self)

    def clone(self) -> ContextValue:
        return ContextValue(self.cls, self.args, self.kwargs, self.changes)

    def enter_by_call(self, m: Machine) -> Value:
        """cls.__enter__(self), as contextlib.ExitStack does."""
        step = m.steps
        leave, result = self.enter(m)
        m.effects.change(self, "entered", (*self.entered, (leave, step)))
        return result

    def exit_by_call(self, m: Machine) -> Value:
        if not self.entered:
            raise Break("context", name=f"{self.describe()}, left before it is entered")
        leave, _ = self.entered[-1]
        m.effects.change(self, "entered", self.entered[:-1])
        return m.finish_now(leave.call(m, [], {}))

    def rebuild(self, e: Emitter) -> str:
        if self.entered:
            raise CannotRebuild(self, self.entered[0][1])
        parts = [*map(e.expr, self.args), *(f"{k}={e.expr(v)}" for k, v in self.kwargs.items())]
        return f"{e.constant(self.cls)}({', '.join(parts)})"


CONTEXT_METHODS: dict[str, Callable[[Machine, ContextValue, Args, Kwargs], Value]] = {
    "clone": lambda m, context, args, kwargs: context.clone(),
    "_recreate_cm": lambda m, context, args, kwargs: context,
    "__enter__": lambda m, context, args, kwargs: context.enter_by_call(m),
    "__exit__": lambda m, context, args, kwargs: context.exit_by_call(m),
}


class ExitValue(Value):
    """The exit function of an entered context."""

    words = "exit of a context"

    def __init__(self, restore: tuple[tuple[Key, Any], ...], source: Source | None = None, obj: Any = None):
        self.restore, self.source, self.obj = restore, source, obj

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        m.states.set(list(self.restore))
        return FALSE

    def rebuild(self, e: Emitter) -> str:
        return e.constant(ModeExit(self.restore))


def decorated(m: Machine, fn: Value, context: ContextValue) -> Value:
    return m.call_now(m.constant_object(polyfills.run_within), [fn, context], {})


GRAD_MODES = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)


def _sets_grad_mode(cls: type, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    context = ContextValue(cls, [], {}, [(("grad",), cls is torch.enable_grad)])
    return decorated(m, args[0], context) if args else context


for _mode in (torch.no_grad, torch.enable_grad):
    CALLS.add(_mode, functools.partial(_sets_grad_mode, _mode))


class GradSetting(ContextValue):
    """torch.set_grad_enabled(mode): sets it when made; its exit puts back what was before that."""

    def __init__(self, mode: bool, before: bool):
        super().__init__(torch.set_grad_enabled, [ConstValue(mode)], {}, [(("grad",), mode)])
        self.before = before

    def enter(self, m: Machine) -> tuple[Value, Value]:
        set_states(m, self.changes)
        return ExitValue(((("grad",), self.before),)), NONE

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        """As a decorator it puts back what it set when it was made."""
        m.states.set([(("grad",), self.before)])
        (key, mode), = self.changes
        return decorated(m, args[0], ContextValue(torch.enable_grad if mode else torch.no_grad, [], {}, [(key, mode)]))


@CALLS.row(torch.set_grad_enabled)
def call_set_grad_enabled(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    mode = bool(m.known((args or [*kwargs.values()])[0]))
    setting = GradSetting(mode, torch.is_grad_enabled())
    set_states(m, setting.changes)
    return setting


def _sets(key: Key, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    set_states(m, [((*key, *map(m.known, args[:-1])), m.known(args[-1]))])
    return NONE


def _reads(name: str, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    key = (name, *map(m.known, args))
    m.states.guard(key)
    return ConstValue(get_state(key) or key == ("grad",) and m.modes.grad_in_inference and key not in m.states.initial)


for _name, _row in STATES.items():
    CALLS.add(_row.set, functools.partial(_sets, (_name,)))
    CALLS.add(_row.get, functools.partial(_reads, _name))


class InferenceContext(ContextValue):
    """torch.inference_mode(mode): no gradients, and tensors made inside are marked, so that they leave as inference tensors."""

    def __init__(self, mode: bool):
        super().__init__(torch.inference_mode, [ConstValue(mode)], {}, [(("grad",), not mode)])
        self.mode = mode

    def clone(self) -> ContextValue:
        return InferenceContext(self.mode)

    def getattr(self, m: Machine, name: str) -> Value:
        return ConstValue(self.mode) if name == "mode" else super().getattr(m, name)

    def enter(self, m: Machine) -> tuple[Value, Value]:
        if m.modes.started_in_inference and not self.mode:
            raise Break("context", name="inference_mode(False) under inference mode")
        leave = InferenceExit(tuple((key, get_state(key)) for key, _ in self.changes), m.modes.inference, m.steps)
        m.states.set(self.changes)
        m.effects.change(m.modes, "inference", self.mode)
        return leave, NONE


class InferenceExit(ExitValue):
    """At a break inside, the step that entered is the one to break: real code then runs under the real mode."""

    def __init__(self, restore: tuple[tuple[Key, Any], ...], before: bool, birth: int):
        super().__init__(restore)
        self.before, self.birth = before, birth

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        m.effects.change(m.modes, "inference", self.before)
        return super().call(m, args, kwargs)

    def rebuild(self, e: Emitter) -> str:
        raise CannotRebuild(self, self.birth)


@CALLS.row(torch.inference_mode)
def call_inference_mode(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    given = args or [*kwargs.values()]
    if given and not given[0].is_constant():
        return decorated(m, given[0], InferenceContext(True))
    return InferenceContext(bool(m.known(given[0])) if given else True)


CALLS.row(torch.is_inference_mode_enabled)(lambda m, args, kwargs: ConstValue(m.modes.inference))


AUTOCASTS = (torch.autocast, torch.cuda.amp.autocast, torch.cpu.amp.autocast)
AUTOCAST_PARTS = ("device", "fast_dtype", "_enabled", "_cache_enabled")     # attributes of such an object that say what it does


def autocast_changes(made: torch.autocast) -> Changes:
    device, dtype, enabled, cache = (getattr(made, name) for name in AUTOCAST_PARTS)
    return [(("autocast", device), enabled), (("autocast_dtype", device), dtype), (("autocast_cache",), cache)]


def _makes_autocast(cls: type, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    made = m.run_real(cls, *map(m.known, args), **{name: m.known(value) for name, value in kwargs.items()})
    return ContextValue(cls, args, kwargs, autocast_changes(made))


for _cls in AUTOCASTS:
    CALLS.add(_cls, functools.partial(_makes_autocast, _cls))


@CALLS.row(torch.set_autocast_enabled)
def call_set_autocast_enabled(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    given = [*map(m.known, args), *map(m.known, kwargs.values())]
    if len(given) != 2:         # the old form, for one kind of device
        raise Break("torch_state", name="torch.set_autocast_enabled without a device")
    m.states.set([(("autocast", given[0]), given[1])])
    return NONE


@CALLS.row(torch.autograd.profiler.record_function)
def call_record_function(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """A label for the profiler, which has no meaning inside of one graph: compiled code carries its own."""
    return ContextValue(torch.autograd.profiler.record_function, args, kwargs, [])


def _on_context(name: str, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    context = m.look(args[0]) if args else None
    if not isinstance(context, ContextValue):
        raise Break("context", name=f"{name} of an object that is not known")
    return context.enter_by_call(m) if name == "__enter__" else context.exit_by_call(m)


KNOWN = (*GRAD_MODES, torch.inference_mode, *AUTOCASTS, torch.autograd.profiler.record_function)
for _name in ("__enter__", "__exit__"):
    for _method in dict.fromkeys(getattr(_cls, _name) for _cls in KNOWN):
        CALLS.add(_method, functools.partial(_on_context, _name))


def context_of(obj: Any, source: Source) -> Value:
    """A context manager object of the user's; the caller guards its type."""
    if type(obj) is torch.inference_mode:
        context = InferenceContext(obj.mode)
        context.source, context.obj = source, obj
        return context
    if type(obj) is torch.autograd.profiler.record_function:
        return ContextValue(type(obj), [], {}, [], source, obj)
    if type(obj) is torch.no_grad or type(obj) is torch.enable_grad:
        return ContextValue(type(obj), [], {}, [(("grad",), type(obj) is torch.enable_grad)], source, obj)
    if type(obj) in AUTOCASTS:
        return ContextValue(type(obj), [], {}, autocast_changes(obj), source, obj)
    raise Break("context", name=type(obj).__qualname__)
