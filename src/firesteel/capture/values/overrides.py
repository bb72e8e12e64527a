"""__torch_function__: subclasses of Tensor, other objects that override torch's functions, and torch function modes.

A call of torch whose arguments override it, or that is made under a mode, is not put into the graph: the override is run like any Python
function.  Which function object the override is given, and with which arguments, is learnt from torch itself: the call is made on
stand-ins whose own override reports what it got (`intercepted`).  A subclass's tensor is an object around the tensor in the graph, so changing the
class costs no node; where it leaves the region it gets its class by `as_subclass`.

    class Logged(torch.Tensor): ...             # SubclassValue(Logged, <tensor>)
"""
from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions
from torch.utils._device import DeviceContext, _device_constructors

from firesteel.capture.guards import Guard
from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Call, Source
from firesteel.capture.values.attributes import MISSING, bind, mro_lookup
from firesteel.capture.values.base import CannotRebuild, Value
from firesteel.capture.values.class_objects import INSTANTIATE, initialised, new_then_init
from firesteel.capture.values.const import FALSE, NONE, ConstValue, boolean, is_constant_object, is_none
from firesteel.capture.values.containers import Sequence, SliceValue, TupleValue, gives_none
from firesteel.capture.values.contexts import ContextValue, ExitValue
from firesteel.capture.values.functions import NATIVE_CALLS, Args, Kwargs
from firesteel.capture.values.mappings import DictValue
from firesteel.capture.values.number import SymNumber
from firesteel.capture.values.objects import BINARY_METHODS, COMPARE_METHODS, UNARY_METHODS, ObjectValue
from firesteel.capture.values.tensor import TENSOR_METHODS, TensorValue
from firesteel.capture.values.torch_calls import call_graph
from firesteel.errors import Break

NAME = "__torch_function__"
DISABLED = torch._C._disabled_torch_function_impl


# -- what torch hands to an override ------------------------------------------------------------------------------------
class Reported(Exception):
    """Carries (function, args, kwargs) out of a stand-in's override."""


class StandInObject:
    """Stands for an object that is no tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Reported(func, args, kwargs)


class StandIn(StandInObject, torch.Tensor):
    """A tensor that stands for one of a subclass."""


class StandInMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Reported(func, args, kwargs)


def _refuse(self: Any, *args: Any) -> Any:
    raise TypeError("a symbolic number is computed with before an override is asked")


def _opaque_number(base: type) -> Any:
    """A class of numbers that stand for symbols: torch takes them where it takes numbers, and Python code that computes with one fails, since the
    result would stand for nothing."""
    names = [name for name, method in vars(base).items() if isinstance(method, types.WrapperDescriptorType) and name not in KEPT]
    return type(f"Symbolic{base.__name__}", (base,), dict.fromkeys(names, _refuse))


KEPT = frozenset({"__new__", "__repr__", "__hash__", "__getattribute__", "__index__"})
SYMBOLIC_TOKENS = {int: _opaque_number(int), float: _opaque_number(float)}


class Tokens:
    """Real objects that stand for Values in one call, and the way back."""

    def __init__(self, m: Machine):
        self.m = m
        self.known: dict[int, tuple[Any, Value]] = {}

    def token(self, value: Value) -> Any:
        value = self.m.look(value)
        made = self._made(value)
        if not is_constant_object(made) or isinstance(value, (Sequence, SliceValue)):
            self.known[id(made)] = (made, value)
        return made

    def _made(self, value: Value) -> Any:
        if isinstance(value, TensorValue):
            return torch.empty(0).as_subclass(StandIn) if overrides(value) else torch.empty(0)
        if overrides(value):
            return StandInObject()
        if isinstance(value, Sequence):
            return value.make([self.token(item) for item in value.items])
        if isinstance(value, SliceValue):
            return slice(*map(self.token, value.parts))
        if isinstance(value, SymNumber) and value.python_type() in SYMBOLIC_TOKENS:
            return SYMBOLIC_TOKENS[value.python_type()](1)
        return self.m.known(value) if isinstance(value, SymNumber) else value.constant()

    def value(self, obj: Any) -> Value:
        found = self.known.get(id(obj))
        if found is not None:
            return found[1]
        if type(obj) is tuple:
            return TupleValue([self.value(item) for item in obj])
        if type(obj) is dict:
            return DictValue({key: (ConstValue(key), self.value(item)) for key, item in obj.items()})
        return self.m.constant_object(obj)


def intercepted(m: Machine, fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> tuple[Any, Value, Value] | None:
    """(function, args, kwargs) as torch gives them to an override; None where it asks none."""
    tokens = Tokens(m)
    given, named = [tokens.token(a) for a in args], {k: tokens.token(v) for k, v in kwargs.items()}
    try:
        if m.modes.entered:
            with StandInMode():
                fn(*given, **named)
        else:
            fn(*given, **named)
    except Reported as report:
        func, func_args, func_kwargs = report.args
        return func, tokens.value(tuple(func_args)), NONE if func_kwargs is None else tokens.value(dict(func_kwargs))
    except Exception as error:
        raise Break("override", name=f"the call on stand-ins says {error!r:.80}") from None
    return None


# -- asking the overrides -----------------------------------------------------------------------------------------------
def overrides(value: Value) -> bool:
    """Does the object have a __torch_function__ of its own?"""
    if isinstance(value, SubclassValue):
        return mro_lookup(value.cls, NAME) is not DISABLED
    return isinstance(value, ObjectValue) and mro_lookup(value.cls, NAME) is not MISSING


def overriders(m: Machine, args: Args, kwargs: Kwargs) -> list[Any]:
    """The arguments to ask, one of a class, subclasses before their bases."""
    found: list[Any] = []
    value: Any
    for value in flat(m, [*args, *kwargs.values()]):
        if overrides(value) and all(value.cls is not other.cls for other in found):
            place = next((i for i, other in enumerate(found) if issubclass(value.cls, other.cls)), len(found))
            found.insert(place, value)
    return found


def flat(m: Machine, values: list[Value]) -> list[Value]:
    """The values, and those in lists and tuples among them."""
    return [item for value in values for item in (map(m.look, value.items) if isinstance(value, Sequence) else [value])]


def overridden(m: Machine, kind: str, target: Any, args: Args, kwargs: Kwargs) -> Value | None:
    """The result of a call of torch as overrides give it; None where there are none to ask."""
    if m.modes.off or not m.modes.entered and not any(isinstance(a, (SubclassValue, ObjectValue)) for a in flat(m, [*args, *kwargs.values()])):
        return None
    found = overriders(m, args, kwargs)
    if not found and not m.modes.entered:
        return None
    report = intercepted(m, method_caller(target) if kind == "call_method" else target, args, kwargs)
    if report is not None and isinstance(target, types.FunctionType) and report[0] is not target:
        raise Break("override", name=f"overrides are asked inside of {target.__qualname__} only")
    return None if report is None else ask(m, found, *report)


def method_caller(name: str) -> Callable[..., Any]:
    return lambda owner, *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def ask(m: Machine, found: list[Any], func: Any, args: Value, kwargs: Value) -> Value:
    kinds = TupleValue([m.constant_object(value.cls) for value in found])
    given = [m.constant_object(func), kinds, args, kwargs]
    if m.modes.entered:
        result = ask_mode(m, given)
        if not is_not_implemented(result):
            return result
    for value in found:
        method = bind(m, mro_lookup(value.cls, NAME), value, value.cls, NAME)
        result = m.call_now(method, given, {})
        if not is_not_implemented(result):
            return result
    raise m.raise_real(TypeError(f"no implementation found for '{func}' on types that implement __torch_function__: {[v.cls for v in found]}"))


def ask_mode(m: Machine, given: Args) -> Value:
    """The innermost mode, which does not see its own calls."""
    modes = m.modes.entered
    m.effects.change(m.modes, "entered", modes[:-1])
    m.modes.asking += 1
    try:
        return m.call_now(modes[-1].getattr(m, NAME), given, {})
    finally:
        m.modes.entered = modes
        m.modes.asking -= 1


def is_not_implemented(result: Value) -> bool:
    return result.is_constant() and result.constant() is NotImplemented


def attribute(m: Machine, tensor: Value, name: str) -> Value | None:
    """tensor.name where that is asked of an override: a property of torch's."""
    if m.modes.off or not m.modes.entered and not overrides(tensor):
        return None
    if callable(getattr(torch.Tensor, name, None)) or not hasattr(torch.Tensor, name):
        return None
    report = intercepted(m, getattr, [tensor, ConstValue(name)], {})
    return None if report is None else ask(m, [tensor] if overrides(tensor) else [], *report)


# -- tensors of subclasses ----------------------------------------------------------------------------------------------
class SubclassValue(TensorValue):
    """A tensor of a subclass, around the tensor in the graph.  Python's operators call the subclass's own methods, else torch's."""

    asks_its_class = True

    def __init__(self, cls: type, inner: TensorValue, source: Source | None = None, real: Any = None):
        self.cls, self.inner, self.source, self.real = cls, inner, source, real

    @property
    def inference(self) -> bool:        # type: ignore[override]  # the inner tensor's, which alone may set it
        return self.inner.inference

    @property
    def node(self) -> Any:
        return self.inner.node

    @node.setter
    def node(self, node: Any) -> None:
        self.inner.node = node

    @property
    def abstract(self) -> Any:          # type: ignore[override]  # as above
        return self.inner.abstract

    def python_type(self) -> type:
        return self.cls

    def describe(self) -> str:
        return f"{self.cls.__name__} {super().describe()}"

    def getattr(self, m: Machine, name: str) -> Value:
        written = m.effects.written(self, name)
        if written is not None:
            return written
        own = self.own(m, name)
        if own is not None:
            return own
        if self.real is not None and name in vars(self.real):
            return m.read_attribute(self, name)
        return super().getattr(m, name)

    def own(self, m: Machine, name: str) -> Value | None:
        """What the subclass has under the name, bound; None where it is torch's."""
        own = self.cls.__mro__[:self.cls.__mro__.index(torch.Tensor)]
        found = next((vars(base)[name] for base in own if name in vars(base)), MISSING)
        return None if found is MISSING else bind(m, found, self, self.cls, name)

    # -- operators -------------------------------------------------------------------------------------------------
    def _operate(self, m: Machine, name: str, args: Args, otherwise: Callable[[], Any]) -> Any:
        """By a method of the subclass; `otherwise` is torch's way.  None stands for NotImplemented."""
        method = self.own(m, name)
        if method is None:
            return otherwise()
        result = m.call_now(method, args, {})
        return None if is_not_implemented(result) else result

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        name = f"__{'r' if reflected else ''}{BINARY_METHODS[op]}__"
        return self._operate(m, name, [other], lambda: super(SubclassValue, self).binary(m, op, other, reflected))

    def inplace(self, m: Machine, op: str, other: Value) -> Value | None:
        if not hasattr(self.cls, name := f"__i{BINARY_METHODS[op]}__"):
            return None
        return self._operate(m, name, [other], lambda: super(SubclassValue, self).inplace(m, op, other))

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        return self._operate(m, COMPARE_METHODS[op], [other], lambda: super(SubclassValue, self).compare(m, op, other))

    def unary(self, m: Machine, op: str) -> Value:
        return super().unary(m, op) if op == "not" else self._operate(m, UNARY_METHODS[op], [], lambda: super(SubclassValue, self).unary(m, op))

    def truth(self, m: Machine) -> bool:
        method = self.own(m, "__bool__")
        return super().truth(m) if method is None else m.call_now(method, [], {}).truth(m)

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        method = self.own(m, "__call__")
        return super().call(m, args, kwargs) if method is None else m.call_now(method, args, kwargs)

    # -- as a container --------------------------------------------------------------------------------------------
    def getitem(self, m: Machine, key: Value) -> Value:
        return self._operate(m, "__getitem__", [key], lambda: super(SubclassValue, self).getitem(m, key))

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        self._operate(m, "__setitem__", [key, value], lambda: super(SubclassValue, self).setitem(m, key, value))

    def contains(self, m: Machine, item: Value) -> Value:
        return self._operate(m, "__contains__", [item], lambda: super(SubclassValue, self).contains(m, item))

    def length(self, m: Machine) -> Value:
        return self._operate(m, "__len__", [], lambda: super(SubclassValue, self).length(m))

    def iterator(self, m: Machine) -> Value:
        return self._operate(m, "__iter__", [], lambda: super(SubclassValue, self).iterator(m))

    def iterate(self, m: Machine) -> list[Value]:
        if self.own(m, "__iter__") is not None:
            return self.iterator(m).iterate(m)
        return self.getattr(m, "unbind").call(m, [ConstValue(0)], {}).iterate(m) if overrides(self) else super().iterate(m)

    # -- leaving ---------------------------------------------------------------------------------------------------

    def rebuild(self, e: Emitter) -> str:
        return e.with_attributes(self, e.assign(f"{e.expr(self.inner)}.as_subclass({e.class_text(self.cls)})"))


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def wrap_subclass(m: Machine, obj: torch.Tensor, source: Source, wrap: Callable[..., Value]) -> Value | None:
    """An input; None where its class does more than override functions."""
    if type(obj).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return None
    inner = wrap(m, plain_tensor(obj), Call(source, plain_tensor))
    if not isinstance(inner, TensorValue):
        return None
    m.guard(Guard(source, "type", type(obj)))
    return SubclassValue(type(obj), inner, source, obj)


def as_class(tensor: Value, cls: type) -> Value:
    """tensor.as_subclass(cls)"""
    inner = tensor.inner if isinstance(tensor, SubclassValue) else tensor
    if not isinstance(inner, TensorValue):
        raise Break("override", name="Tensor.as_subclass")
    return inner if cls is torch.Tensor else SubclassValue(cls, inner)


TENSOR_METHODS.row("as_subclass")(lambda m, tensor, args, kwargs: as_class(tensor, m.known((args or [*kwargs.values()])[0])))


@CALLS.row(torch.Tensor._make_subclass)
def call_make_subclass(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if len(args) > 2 and m.known(args[2]) or kwargs:
        raise Break("override", name="_make_subclass with settings")
    return as_class(call_graph(m, "call_method", "detach", [as_class(args[1], torch.Tensor)], {}), args[0].constant())


@INSTANTIATE.row("tensor")
def new_subclass(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value | None:
    """cls(tensor, ...) for a subclass of Tensor with a __new__ in Python, or none."""
    if not issubclass(cls, torch.Tensor) or type(cls) is not type(torch.Tensor) or issubclass(cls, torch.nn.Parameter) or cls is torch.Tensor:
        return None
    if isinstance(cls.__new__, types.FunctionType):
        return new_then_init(m, cls, args, kwargs)
    if kwargs or (plain := by_torch(m, list(map(m.look, args)))) is None:
        return None
    made = as_class(plain, cls)
    return initialised(m, made, cls, args, kwargs) if isinstance(mro_lookup(cls, "__init__"), types.FunctionType) else made


def by_torch(m: Machine, args: Args) -> Value | None:
    """torch.Tensor.__new__: of a tensor, or of sizes, as which it also takes what is an int in another class."""
    if len(args) == 1 and isinstance(args[0], TensorValue):
        return None if args[0].abstract.requires_grad else call_graph(m, "call_method", "detach", [as_class(args[0], torch.Tensor)], {})
    if not all(issubclass(arg.python_type(), int) for arg in args):
        return None
    sizes: Args = [arg if isinstance(arg, SymNumber) else ConstValue(int(arg.constant())) for arg in args]
    return call_graph(m, "call_function", torch.empty, sizes or [ConstValue(0)], {"dtype": ConstValue(torch.get_default_dtype())})


# -- torch's own override, and switching overrides off ------------------------------------------------------------------
@CALLS.row(torch.Tensor.__torch_function__.__func__)        # type: ignore[attr-defined]  # a classmethod
def call_default_override(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """Calls the function with overrides off, and gives the results the class."""
    given = dict(zip(("cls", "func", "types", "args", "kwargs"), args)) | kwargs
    cls, func = given["cls"].constant(), given["func"]
    if not all(issubclass(cls, m.known(kind)) for kind in given["types"].iterate(m)):
        return ConstValue(NotImplemented)
    inputs = list(map(m.look, given["args"].iterate(m))) if "args" in given else []
    named = given.get("kwargs", NONE)
    settings = {} if is_none(named) else {k.constant(): m.look(v) for k, v in named.know_all(m).values()}
    result = without_overrides(m, lambda: m.call_now(func, inputs, settings))
    if func.identity() in get_default_nowrap_functions():
        return result
    return classed(m, result, cls, [v for v in inputs if isinstance(v, SubclassValue)])


def classed(m: Machine, result: Value, cls: type, inputs: list[SubclassValue]) -> Value:
    """The result with the class; an argument that comes back, from a call in place, is that argument."""
    same = next((value for value in inputs if value is result or value.inner is result), None)
    if same is not None:
        return same
    if isinstance(result, TensorValue):
        return result if issubclass(result.python_type(), cls) else as_class(result, cls)
    if isinstance(result, Sequence) and any(isinstance(m.look(item), TensorValue) for item in result.items):
        return result.like([classed(m, m.look(item), cls, inputs) for item in result.items])
    return result


def without_overrides(m: Machine, run: Callable[[], Value]) -> Value:
    before = m.modes.off
    m.effects.change(m.modes, "off", True)
    try:
        return run()
    finally:
        m.modes.off = before


class OffContext(ContextValue):
    """torch._C.DisableTorchFunctionSubclass() and DisableTorchFunction()"""

    def __init__(self, cls: type, birth: int):
        super().__init__(cls, [], {}, [])
        self.birth = birth

    def enter(self, m: Machine) -> tuple[Value, Value]:
        restore = ModesExit(m.modes.off, m.modes.entered, m.steps)
        m.effects.change(m.modes, "off", True)
        if self.cls is torch._C.DisableTorchFunction:
            m.effects.change(m.modes, "entered", ())
        return restore, NONE


class ModesExit(ExitValue):
    """The end of a block that changed the modes.  At a break inside, the step that entered is the one to break."""

    def __init__(self, off: bool, modes: tuple[Value, ...], birth: int):
        super().__init__(())
        self.off, self.modes, self.birth = off, modes, birth

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        m.effects.change(m.modes, "off", self.off)
        m.effects.change(m.modes, "entered", self.modes)
        return FALSE

    def rebuild(self, e: Emitter) -> str:
        raise CannotRebuild(self, self.birth)


for _cls in (torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction):
    CALLS.add(_cls, lambda m, args, kwargs, cls=_cls: OffContext(cls, m.steps))


# -- questions and modes ------------------------------------------------------------------------------------------------
def _has_override(one_by_one: bool, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    values = args if one_by_one else args[0].iterate(m)
    return boolean(not m.modes.off and (bool(m.modes.entered) or bool(overriders(m, list(map(m.look, values)), {}))))


for _fn, _one in ((torch.overrides.has_torch_function, False), (torch.overrides.has_torch_function_unary, True),
                  (torch.overrides.has_torch_function_variadic, True)):
    CALLS.add(_fn, functools.partial(_has_override, _one))


@CALLS.row(torch.overrides.handle_torch_function)
def call_handle(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    found = overriders(m, [m.look(item) for item in args[1].iterate(m)], {})
    named = DictValue({k: (ConstValue(k), v) for k, v in kwargs.items()})
    return ask(m, found, args[0].identity(), TupleValue(list(args[2:])), named)


CALLS.row(torch._C._push_on_torch_function_stack)(
    gives_none(lambda m, args, kwargs: m.effects.change(m.modes, "entered", (*m.modes.entered, args[0]))))


@CALLS.row(torch._C._pop_torch_function_stack)
def call_pop_mode(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if not m.modes.entered:
        raise Break("override", name="_pop_torch_function_stack")
    top = m.modes.entered[-1]
    m.effects.change(m.modes, "entered", m.modes.entered[:-1])
    return top


def write_modes(m: Machine, e: Emitter) -> None:
    """At a break, and at the end: the real stack of modes becomes what the program has made of it."""
    before, after = m.modes.outer, m.modes.entered
    same = next((n for n, (a, b) in enumerate(zip(before, after)) if a is not b), min(len(before), len(after)))
    for _ in before[same:]:
        e.line(f"{e.constant(torch._C._pop_torch_function_stack)}()")
    for mode in after[same:]:
        e.line(f"{e.constant(torch._C._push_on_torch_function_stack)}({e.expr(mode)})")


def enter_device(m: Machine, device: Value) -> tuple[Value, Value]:
    """(exit function, result of __enter__).  There is one device, and it is asked last."""
    leave = ModesExit(m.modes.off, m.modes.entered, m.steps)
    made = m.call_now(m.constant_object(DeviceContext), [device], {})
    m.effects.change(m.modes, "entered", (made, *(mode for mode in m.modes.entered if mode.python_type() is not DeviceContext)))
    return leave, device


@CALLS.row(DeviceContext.__torch_function__)
def call_device_override(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """A function that makes tensors gets the device, where the call names none."""
    given = dict(zip(("self", "func", "types", "args", "kwargs"), args)) | kwargs
    func, named = given["func"], given.get("kwargs", NONE)
    settings = {} if is_none(named) else {k.constant(): m.look(v) for k, v in named.know_all(m).values()}
    if func.identity() in _device_constructors() and is_none(settings.get("device", NONE)):
        settings["device"] = given["self"].getattr(m, "device")
    return func.call(m, list(map(m.look, given["args"].iterate(m))), settings)


CALLS.row(torch._C._len_torch_function_stack)(lambda m, args, kwargs: ConstValue(len(m.modes.entered)))
CALLS.row(torch._C._get_function_stack_at)(lambda m, args, kwargs: m.modes.entered[m.known(args[0])])


@NATIVE_CALLS.row("properties of tensors")
def call_property(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Value | None:
    """torch.Tensor.shape.__get__(tensor)"""
    owner = getattr(fn, "__self__", None)
    if not isinstance(owner, (types.GetSetDescriptorType, property)) or fn.__name__ != "__get__" or not isinstance(args[0], TensorValue):
        return None
    name = owner.__name__ if isinstance(owner, types.GetSetDescriptorType) else next(n for n, v in vars(torch.Tensor).items() if v is owner)
    return args[0].getattr(m, name)
