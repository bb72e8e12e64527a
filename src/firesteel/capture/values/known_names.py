"""Functions of torch and of the peer that are recognised by name, since this package does not import them: rows of `BY_NAME`."""
# boundary: recognises torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch._dynamo.external_utils.is_compiling
# boundary: recognises torch.compile, called inside of what is compiled
# boundary: recognises torch._dynamo.graph_break, torch._dynamo.mark_dynamic
# boundary: recognises torch._dynamo.mutation_guard.GenerationTracker.tag, by which the peer, once imported, counts every module that is made
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from firesteel.capture import marks
from firesteel.capture.meanings import BY_NAME, CALLS
from firesteel.capture.protocols import Machine
from firesteel.capture.values.base import Value
from firesteel.capture.values.const import NONE, ConstValue
from firesteel.capture.values.functions import Args, CellValue, Handler, Kwargs
from firesteel.capture.values.hooks import has_always_called
from firesteel.capture.values.number import SymNumber, ask
from firesteel.errors import Break
from firesteel.homes import is_in_package
from firesteel.sym.symint import from_symint

_fn: Any


def answer(value: Any) -> Handler:
    return lambda m, args, kwargs: ConstValue(value)


CALLS.add(marks.is_compiling, answer(True))
# what these return or set is not observable inside of one graph
for _fn in (torch._C._log_api_usage_once, torch._C._autograd._saved_tensors_hooks_disable, torch._C._autograd._saved_tensors_hooks_enable):
    CALLS.add(_fn, answer(None))
for _name, _value in {
    "torch.compiler.is_dynamo_compiling": True, "torch._utils.is_compiling": True,
    "torch._dynamo.external_utils.is_compiling": True, "torch.compiler.is_exporting": False,
    "torch._dynamo.decorators.mark_dynamic": None, "torch._dynamo.decorators.maybe_mark_dynamic": None,
    "torch._dynamo.decorators.mark_static": None, "torch._dynamo.decorators.mark_unbacked": None,
    "torch._dynamo.mutation_guard.GenerationTracker.tag": None,
    "torch.distributed.nn.functional._not_supported_under_compile": None,       # it is, here
}.items():
    BY_NAME.add(_name, answer(_value))
CALLS.row(marks.mark_dynamic, marks.maybe_mark_dynamic, marks.mark_static, marks.mark_unbacked)(answer(None))


@BY_NAME.row("torch.compiler.is_compiling")
def call_is_compiling(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """Yes; but a module's call that knew it would leave out hooks that are to run when forward raises."""
    frame = m.frames[-1]
    module = frame.slots.get("self")
    if frame.code is not torch.nn.Module._call_impl.__code__ or not isinstance(module, CellValue):
        return ConstValue(True)
    return ConstValue(not has_always_called(module.get(m).identity()))      # type: ignore[union-attr]  # a method's self is bound


@BY_NAME.row("firesteel.api.compile", "torch.compile")
def call_compile(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """Compiled inside of what is being compiled: the function itself."""
    model = args[0] if args else kwargs.get("model", NONE)
    return model if model is not NONE else m.constant_object(itself)


def itself(model: Any) -> Any:
    """What a decorator with settings does here."""
    return model


@CALLS.row(marks.graph_break)
@BY_NAME.row("torch._dynamo.decorators.graph_break")
def call_graph_break(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """The user's wish is granted; torch's own library asks for breaks to help its own compiler, which means nothing here."""
    if is_in_package(m.frames[-1].scope.get("__name__", ""), "torch"):
        return NONE
    given = args or list(kwargs.values())
    said = given[0].constant() if given and given[0].is_constant() else ""
    raise Break("asked", text=f": {said}" if said else "")


def _answers_for_real(fn: Callable[..., Any], m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """A function that only looks at its arguments (and at what never changes of them): executed while capturing."""
    return m.constant_object(m.run_real(fn, *map(m.real_object, args), **{k: m.real_object(v) for k, v in kwargs.items()}))


for _fn in (inspect.signature, inspect.isfunction, inspect.ismethod, inspect.isclass, inspect.isbuiltin, inspect.iscoroutinefunction,
            inspect.isgeneratorfunction, inspect.unwrap, inspect.getfullargspec, inspect.getmro, inspect.isroutine, inspect.ismodule):
    CALLS.add(_fn, functools.partial(_answers_for_real, _fn))


def _checks(fn: Callable[..., Any], error: type[Exception], m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """torch._check and its relatives: a fact about unbacked symbols is assumed by the environment, not guarded, and
    stands in the graph."""
    condition = args[0]
    if isinstance(condition, SymNumber) and not m.world.env.is_backed(from_symint(condition.sym)):
        ask(m.world.env.assume, from_symint(condition.sym))
        m.record.call_function(fn, (m.record.node_of(condition),), {}, None)
        return NONE
    if condition.truth(m):
        return NONE
    message = args[1] if len(args) > 1 else kwargs.get("message")
    text = m.known(m.call_now(message, [], {})) if message is not None else "Expected cond to be True, but got False."
    raise m.raise_real(error(text))


for _fn, _error in {torch._check: RuntimeError, torch._check_value: ValueError, torch._check_index: IndexError,
                    torch._check_type: TypeError, torch._check_not_implemented: NotImplementedError}.items():
    CALLS.add(_fn, functools.partial(_checks, _fn, _error))


CALLS.row(torch._check_is_size)(
    lambda m, args, kwargs: _checks(torch._check, RuntimeError, m, [m.compare(">=", args[0], ConstValue(0)), *args[1:]], kwargs))
