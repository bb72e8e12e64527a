"""Builder: a real Python object, read through a Source, becomes a Value; the guards for that are installed.

`WRAPPERS` maps a type to the function that wraps it; `BASES` does so for subclasses.  Objects are wrapped when they are first
looked at, and only as deep as they are looked at: items and attributes stay lazy.  The same object read through two sources is
one Value, under a guard that the two stay the same.

    value = build(m, model.layers, Local("self").attr("layers"))
"""
from __future__ import annotations

import _thread
import collections
import collections.abc
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from firesteel.capture import marks, polyfills
from firesteel.capture.frames import Frame
from firesteel.capture.guards import Guard, SizeQuestion, TensorFacts
from firesteel.capture.meanings import TYPES, CallMeaning, Sort, handler_of, meaning
from firesteel.capture.policy import VARYING
from firesteel.capture.protocols import Machine
from firesteel.capture.region_code import HANDLED, HANDLED_AGAIN, VALUE
from firesteel.capture.region_code import NULL as NULL_SLOT
from firesteel.capture.source import Attr, Call, Fixed, Item, Nth, Source, Stride
from firesteel.capture.suspended import EMPTY, REAL, status_of, values_of
from firesteel.capture.values.arrays import ArrayNumber
from firesteel.capture.values.base import LASTI, NULL, FixedObject, HandledValue, LazyValue, OpaqueValue, Value
from firesteel.capture.values.class_objects import ClassValue, is_plain
from firesteel.capture.values.const import BARE, CONSTANT_TYPE_SET, NONE, ConstValue, UnusedConstant, is_constant_object
from firesteel.capture.values.containers import ListValue, NamedTupleValue, SizeValue, SliceValue, TupleValue
from firesteel.capture.values.exceptions import ExceptionValue
from firesteel.capture.values.functions import (
    ON_FUNCTION,
    BoundMethodValue,
    BuiltinValue,
    NumpyFunction,
    PartialValue,
    function_value,
)
from firesteel.capture.values.generators import GeneratorValue
from firesteel.capture.values.jagged import NestedTensor, wrap_jagged
from firesteel.capture.values.library import DequeValue
from firesteel.capture.values.mappings import DictValue, ProxyValue, SetValue
from firesteel.capture.values.messages import CachedFunction
from firesteel.capture.values.modules import ModuleValue
from firesteel.capture.values.natives import NativeItem, NativeObject, is_native_instance, native_base
from firesteel.capture.values.number import INT64, SymNumber
from firesteel.capture.values.objects import ObjectValue
from firesteel.capture.values.overrides import wrap_subclass
from firesteel.capture.values.python_modules import PythonModuleValue
from firesteel.capture.values.python_random import RANDOM
from firesteel.capture.values.quantised import kind_of
from firesteel.capture.values.scripted import ScriptedValue
from firesteel.capture.values.tensor import TensorValue
from firesteel.capture.values.torch_calls import TorchFunctionValue, run_abstract
from firesteel.capture.values.torch_states import CoreFunction
from firesteel.capture.values.wrappers import guard_parts, is_wrapper_class
from firesteel.capture.world import STATIC
from firesteel.homes import home_of, is_in_package, is_in_private, is_library
from firesteel.sym.expr import Expr, eq, free_symbols, row_major, symbol
from firesteel.sym.symint import from_sym, to_symint
from firesteel.table import Table

Wrapper = Callable[["Machine", Any, Source], Value]

WRAPPERS: Table[Wrapper] = Table("wrapper of a type", "capture/builder.py")
BASES: Table[Wrapper] = Table("wrapper of a base class", "capture/builder.py")      # in order of trying
BY_CLASS: Table[Wrapper] = Table("wrapper of a class known by name", "capture/torch_objects.py")


def build(m: Machine, obj: Any, source: Source) -> Value:
    """The Value of an object; see the module's text."""
    known = m.same_object(obj)
    if known is not None:
        if known.source is not None and known.source != source and not is_fixed(source):
            # the Value of a fixed object may be that of what it wraps
            m.guard(Guard(source, "identity", obj) if is_fixed(known.source) else Guard(source, "same", known.source))
        return known
    value = wrapper_of(obj)(m, obj, source)
    m.remember(obj, value)
    return value


def wrapper_of(obj: Any) -> Wrapper:
    row = WRAPPERS.get(type(obj))
    if row is not None:
        return row
    for base, wrapper in BASES.items():
        if is_of(obj, base):
            return wrapper
    return wrap_object


def is_of(obj: Any, base: type) -> bool:
    """isinstance would ask the object for its class, and may be told another one.  Tensors are asked: a mark makes them buffers."""
    return issubclass(type(obj), base) or (issubclass(type(obj), torch.Tensor) and isinstance(obj, base))


def is_fixed(source: Source) -> bool:
    """Is it an object known when the code is generated, so that nothing is to be guarded?"""
    return type(source) is Fixed


def guard(m: Machine, source: Source, kind: str, data: Any = None) -> None:
    if not is_fixed(source):
        m.guard(Guard(source, kind, data))


def guarded(kind: str, make: Callable[[Any, Source], Value]) -> Wrapper:
    """Guards the object's type, or which object it is, and reads nothing of it."""
    def wrap(m: Machine, obj: Any, source: Source) -> Value:
        guard(m, source, kind, type(obj) if kind == "type" else obj)
        return make(obj, source)
    return wrap


opaque = guarded("type", OpaqueValue)        # an object that is only passed around; the program may ask for its type


# -- constants ----------------------------------------------------------------------------------------------------------
def wrap_constant(m: Machine, obj: Any, source: Source) -> Value:
    if type(obj) in VARYING and not is_fixed(source) and m.becomes_symbol(source, obj):
        if source not in m.number_symbols:
            m.number_symbols[source] = (symbol_input if type(obj) in (int, float) else array_number)(m, obj, source)
        return m.number_symbols[source]
    if is_fixed(source) or obj is None:
        guard(m, source, "equals", obj)
        return ConstValue(obj, None if type(obj) in BARE else source)
    guard(m, source, "type", type(obj))
    return UnusedConstant(obj, source, lambda: guard(m, source, "equals", obj))


def symbol_input(m: Machine, obj: int | float, source: Source) -> Value:
    """A number that changed between calls: a symbol, and a placeholder where the graph uses it."""
    name = m.symbol_name(source)
    expr = m.world.env.create_symbol(obj, name, *INT64, dtype="i64" if type(obj) is int else "f64")
    sym = to_symint(expr, m.world.env)
    guard(m, source, "type", type(obj))
    return SymNumber(sym, lambda: m.record.placeholder(name, source, sym, obj), source)


def array_number(m: Machine, obj: Any, source: Source) -> Value:
    """The same of NumPy's: the graph is given its memory."""
    guard(m, source, "type", type(obj))
    memory: Any = m.read(memory_of_number(obj), Call(source, memory_of_number))
    return ArrayNumber(memory, type(obj), source, obj)


def memory_of_number(number: np.generic) -> torch.Tensor:
    return torch.from_numpy(np.array(number))


WRAPPERS.row(*CONSTANT_TYPE_SET)(wrap_constant)
BASES.add(enum.Enum, wrap_constant)


# -- tensors ------------------------------------------------------------------------------------------------------------
def wrap_tensor(m: Machine, obj: torch.Tensor, source: Source) -> Value:
    """A placeholder.  Its sizes are constants or symbols, as `m.dimension_policy` says."""
    if obj.layout is not torch.strided or obj.is_quantized or obj.is_nested or obj._is_zerotensor():      # the last has no memory
        return opaque(m, obj, source)
    if obj.is_conj() or obj.is_neg():
        return wrap_with_bit(m, obj, source, torch._conj if obj.is_conj() else torch._neg_view)
    policy = m.dimension_policy(obj, source)
    name = m.input_name(source)
    abstract = m.world.wrap(obj, name, policy, m.policy.strides(source, obj.dim()))
    facts = TensorFacts.of(obj, *guarded_dimensions(obj, abstract))
    m.guard(Guard(source, "tensor", facts))
    m.note_sizes(name, source, policy)
    guard_strides(m, abstract, source)
    if m.world.env is not None:
        m.wished += [(name, source, dim, wish) for dim, wish in m.policy.wishes(obj, source).items() if wish[0] == "dynamic"]
    node = m.record.placeholder(name, source, abstract, obj)
    value = TensorValue(node, abstract, source, obj)
    m.record.own(abstract, value)
    return value


def wrap_with_bit(m: Machine, obj: torch.Tensor, source: Source, flip: Callable[[torch.Tensor], torch.Tensor]) -> Value:
    """A tensor whose conjugate or negative bit is set: kernels read memory, so the graph is given a view without the bit, and flips it
    first of all: the tensor had its bit, and its history, before a grad mode was set."""
    with torch.set_grad_enabled(m.states.initial.get(("grad",), torch.is_grad_enabled())):
        memory = m.look(LazyValue(without_bit(obj), Call(source, without_bit)))
        assert isinstance(memory, TensorValue), memory
        abstract = run_abstract(m, flip, [memory.abstract], {}, flip)
    m.guard(Guard(source, "tensor", TensorFacts.of(obj, *guarded_dimensions(obj, memory.abstract))))
    value = TensorValue(m.record.view_of_input(memory.node, flip, abstract), abstract, source, obj)
    m.record.own(abstract, value)
    return value


def without_bit(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor whose bit is set.  Taken with gradients on, whatever the program runs under: a view that was taken without
    would refuse to return its history after a write.  Views of the tensor are taken of itself (ViewCall): of a view
    through two flips torch would find the place in a gradient by the offset in the tensor's memory."""
    with torch.enable_grad():
        memory: Any = torch._conj(tensor) if tensor.is_conj() else torch._neg_view(tensor)
    memory.with_bit = tensor
    return memory


def guard_strides(m: Machine, abstract: torch.Tensor, source: Source) -> None:
    """Strides that follow from symbolic sizes must do so in later calls too."""
    if not any(isinstance(s, torch.SymInt) for s in abstract.stride()):
        return
    shape, strides = [from_sym(n) for n in abstract.shape], [from_sym(n) for n in abstract.stride()]
    if tuple(strides) == row_major(shape):
        m.guard(Guard(source, "contiguous"))
        return
    known = {size.attr: source.size(d) for d, size in enumerate(shape) if isinstance(size, Expr)}
    for d, stride in enumerate(strides):
        symbols = [s.attr for s in free_symbols(stride)]
        if symbols and all(name in known for name in symbols):
            fact = eq(symbol(f"stride{d}"), stride)
            m.guard(Guard(None, "expr", SizeQuestion(fact, ((f"stride{d}", Stride(source, d)), *[(name, known[name]) for name in symbols]))))


def guarded_dimensions(obj: torch.Tensor, abstract: torch.Tensor) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Sizes and strides to guard as numbers; None where the abstract tensor has a symbol."""
    sizes = tuple(n if type(s) is int else None for n, s in zip(obj.shape, abstract.shape))
    strides = tuple(n if type(s) is int else None for n, s in zip(obj.stride(), abstract.stride()))
    return sizes, strides


WRAPPERS.add(torch.Tensor, wrap_tensor)
WRAPPERS.add(torch.nn.Parameter, wrap_tensor)
BASES.add(torch.nn.parameter.Buffer, wrap_tensor)


@BASES.row(torch.Tensor)
def wrap_tensor_subclass(m: Machine, obj: torch.Tensor, source: Source) -> Value:
    if isinstance(obj, NestedTensor):
        return wrap_jagged(m, obj, source, symbol_input if m.world.env is not None and m.policy.dynamic is not False else wrap_constant)
    if is_wrapper_class(type(obj)):
        return wrap_wrapper(m, obj, source)
    return wrap_subclass(m, obj, source, wrap_tensor) or opaque(m, obj, source)


def wrap_wrapper(m: Machine, obj: torch.Tensor, source: Source) -> Value:
    """A tensor around tensors: a placeholder of constant sizes."""
    name = m.input_name(source)
    abstract = m.world.wrap(obj, name, (STATIC,) * obj.dim())
    m.guard(Guard(source, "tensor", TensorFacts.of(obj)))
    guard_parts(m, obj, source)
    value = TensorValue(m.record.placeholder(name, source, abstract, obj), abstract, source, obj)
    m.record.own(abstract, value)
    return value


# -- containers ---------------------------------------------------------------------------------------------------------
def lazy_items(m: Machine, obj: Any, source: Source) -> list[Value]:
    return [LazyValue(item, Item(source, i)) for i, item in enumerate(obj)]


@WRAPPERS.row(tuple)
def wrap_tuple(m: Machine, obj: tuple, source: Source) -> Value:
    guard_sequence(m, obj, source)
    return TupleValue(lazy_items(m, obj, source), source, obj)


def guard_sequence(m: Machine, obj: Any, source: Source) -> None:
    guard(m, source, "type", type(obj))
    guard(m, source, "length", len(obj))


@WRAPPERS.row(list)
def wrap_list(m: Machine, obj: list, source: Source) -> Value:
    guard(m, source, "type", list)
    return ListValue(lazy_items(m, obj, source), source, obj, lambda: m.guard(Guard(source, "length", len(obj))))


@WRAPPERS.row(collections.deque)
def wrap_deque(m: Machine, obj: collections.deque, source: Source) -> Value:
    guard_sequence(m, obj, source)
    guard(m, Attr(source, "maxlen"), "equals", obj.maxlen)
    return DequeValue(lazy_items(m, obj, source), obj.maxlen, source, obj)


@WRAPPERS.row(torch.Size)
def wrap_size(m: Machine, obj: torch.Size, source: Source) -> Value:
    guard_sequence(m, obj, source)
    m.policy.read_shape(source, len(obj))
    return SizeValue(lazy_items(m, obj, source), source, obj)


@BASES.row(tuple)
def wrap_namedtuple(m: Machine, obj: Any, source: Source) -> Value:
    if not hasattr(obj, "_fields") and type(obj).__module__ != "torch.return_types":
        return wrap_object(m, obj, source)
    guard(m, source, "type", type(obj))
    if type(obj).__getitem__ is not tuple.__getitem__:
        items: list[Value] = [LazyValue(item, NativeItem(source, (tuple, i))) for i, item in enumerate(tuple.__iter__(obj))]
        return NamedTupleValue(type(obj), items, source, obj)
    return NamedTupleValue(type(obj), lazy_items(m, obj, source), source, obj)


def wrap_dict(m: Machine, obj: dict, source: Source) -> Value:
    """The keys are guarded when they are asked for."""
    entries = lazy_entries(m, obj, source)
    factory = getattr(obj, "default_factory", None)
    made = m.look(LazyValue(factory, Attr(source, "default_factory"))) if factory is not None else None
    return DictValue(entries, source, obj, type(obj), made)


def lazy_entries(m: Machine, obj: Any, source: Source, fixed: bool = False) -> dict[Any, tuple[Value, Value]]:
    guard(m, source, "type", type(obj))
    keys = [known_key(m, key, source, i) for i, key in enumerate(obj)]
    return {value.hash_key(m): (value, LazyValue(item, Fixed(item) if fixed else Item(source, key)))
            for value, (key, item) in zip(keys, obj.items())}


def known_key(m: Machine, key: Any, source: Source, index: int) -> Value:
    if is_constant_object(key):
        return ConstValue(key)
    if isinstance(key, tuple) and all(map(is_constant_object, key)):
        return m.fresh(tuple(key))
    if isinstance(key, type):
        return ClassValue(key)
    return m.look(LazyValue(key, Nth(source, index)))


WRAPPERS.row(dict, collections.OrderedDict, collections.defaultdict)(wrap_dict)
WRAPPERS.row(types.MappingProxyType)(
    lambda m, obj, source: ProxyValue(lazy_entries(m, obj, source, is_fixed(source)), source, obj, types.MappingProxyType))


@WRAPPERS.row(set)
def wrap_set(m: Machine, obj: set, source: Source) -> Value:
    if not all(map(is_element, obj)):
        return opaque(m, obj, source)
    guard(m, source, "type", type(obj))
    return SetValue(elements(m, obj, source), source, obj)


def is_element(item: Any) -> bool:
    """Is it a constant, or an object that is equal to itself alone?  A tensor is new in each call."""
    if type(item) is weakref.ref:
        return (referent := item()) is not None and not is_constant_object(referent) and is_element(referent)
    return is_constant_object(item) or type(item).__hash__ is object.__hash__ and type(item).__eq__ is object.__eq__


def elements(m: Machine, obj: Any, source: Source) -> dict[Any, Value]:
    """What a set, or the set part of an object, holds."""
    if all(map(is_constant_object, obj)):
        m.guard(Guard(source, "equals", type(obj)(obj)))
        return {item: ConstValue(item) for item in obj}
    guard(m, source, "length", len(obj))
    found = {}
    for i, item in enumerate(obj):
        guard(m, Nth(source, i), "equals" if is_constant_object(item) else "identity", item)
        value = known_key(m, item, source, i)
        found[value.hash_key(m)] = value
    return found


@WRAPPERS.row(slice)
def wrap_slice(m: Machine, obj: slice, source: Source) -> Value:
    parts = [m.look(LazyValue(getattr(obj, name), Attr(source, name))) for name in ("start", "stop", "step")]
    guard(m, source, "type", slice)
    return SliceValue(*parts)


# -- functions and classes ----------------------------------------------------------------------------------------------
def wrap_callable(m: Machine, obj: Any, source: Source) -> Value:
    return known_callable(m, obj, source, meaning(obj))


def known_callable(m: Machine, obj: Any, source: Source, found: CallMeaning) -> Value:
    """A callable that is known as an object and not by its code."""
    guard_callable(m, obj, source)
    if found.sort is Sort.REPLACED:
        return build(m, found.data, Fixed(found.data))
    return CALLABLES.get(found.sort, BuiltinValue)(obj, source)


def guard_callable(m: Machine, obj: Any, source: Source) -> None:
    """Which object it is.  A bound method of native code is a new object at each lookup: its owner and its name are guarded."""
    if type(obj) not in BOUND or isinstance(obj.__self__, (types.ModuleType, type)) or obj.__self__ is None:
        guard(m, source, "identity", obj)
        return
    guard(m, source, "type", type(obj))
    guard(m, Attr(source, "__self__"), "identity", obj.__self__)
    guard(m, Attr(source, "__name__"), "equals", obj.__name__)


BOUND_BY_OWNER = (*RANDOM, _thread.LockType, _thread.RLock)      # whose methods, also bound ones that are kept, are known by the object
BOUND = frozenset({types.BuiltinMethodType, types.MethodWrapperType})

CALLABLES: dict[Sort, Callable[[Any, Source], Value]] = {
    Sort.NODE: TorchFunctionValue, Sort.STATE: CoreFunction, Sort.NUMPY: NumpyFunction, Sort.CACHED: CachedFunction}


@WRAPPERS.row(types.FunctionType)
def wrap_function(m: Machine, obj: types.FunctionType, source: Source) -> Value:
    found = meaning(obj)
    if found.sort not in ON_FUNCTION:
        return known_callable(m, obj, source, found)
    guard(m, source, "type", types.FunctionType)
    return function_value(m, obj, source, found)


@WRAPPERS.row(types.MethodType)
def wrap_method(m: Machine, obj: types.MethodType, source: Source) -> Value:
    if type(obj.__self__) in RANDOM:
        return wrap_builtin(m, obj, source)
    guard(m, source, "type", types.MethodType)
    fn = build(m, obj.__func__, Attr(source, "__func__"))
    owner = build(m, obj.__self__, Attr(source, "__self__"))
    return BoundMethodValue(fn, owner, source, obj)


def wrap_builtin(m: Machine, obj: Any, source: Source) -> Value:
    owner = getattr(obj, "__self__", None)
    if isinstance(owner, (list, dict, set)) and handler_of(obj) is None and not is_fixed(source):
        return build(m, owner, Attr(source, "__self__")).getattr(m, obj.__name__)
    if isinstance(owner, torch.Tensor) or type(owner) in BOUND_BY_OWNER:
        return build(m, owner, Fixed(owner) if is_fixed(source) else Attr(source, "__self__")).getattr(m, obj.__name__)
    return wrap_callable(m, obj, source)


WRAPPERS.row(*dict.fromkeys((types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.MethodWrapperType,
                             types.ClassMethodDescriptorType, type(np.random.default_rng))))(wrap_builtin)      # NumPy 1 has a builtin there
WRAPPERS.row(*TYPES)(wrap_callable)


@WRAPPERS.row(torch.library.CustomOpDef)
def wrap_custom_operator(m: Machine, obj: Any, source: Source) -> Value:
    guard(m, source, "identity", obj)
    return CustomOperator(obj._opoverload, obj)


class CustomOperator(TorchFunctionValue):
    """An operator made by torch.library.custom_op: a call is one of the operator, attributes are those of its definition."""

    def __init__(self, fn: Any, definition: Any):
        super().__init__(fn, Fixed(fn))
        self.definition = definition

    def getattr(self, m: Machine, name: str) -> Value:
        return m.static_attribute(self.definition, name)


BASES.add(type, WRAPPERS.add(type, guarded("identity", ClassValue)))


@WRAPPERS.row(functools.partial)
def wrap_partial(m: Machine, obj: functools.partial, source: Source) -> Value:
    guard(m, source, "type", functools.partial)
    guard(m, Attr(source, "args"), "length", len(obj.args))
    guard(m, Attr(source, "keywords"), "keys", tuple(obj.keywords))
    fn = LazyValue(obj.func, Attr(source, "func"))
    args = lazy_items(m, obj.args, Attr(source, "args"))
    kwargs: dict[str, Value] = {k: LazyValue(v, Item(Attr(source, "keywords"), k)) for k, v in obj.keywords.items()}
    return PartialValue(functools.partial, fn, args, kwargs, source, obj)


WRAPPERS.row(types.CellType)(lambda m, obj, source: m.cell(obj, source))


# -- modules, objects ---------------------------------------------------------------------------------------------------
BASES.add(types.ModuleType, guarded("identity", PythonModuleValue))


@BASES.row(torch.nn.Module)
def wrap_module(m: Machine, obj: torch.nn.Module, source: Source) -> Value:
    called = ScriptedValue if isinstance(obj, torch.jit.ScriptModule) else kind_of(obj)
    if called is not None:
        guard(m, source, "identity", obj)
        return called(obj, source)
    if not hasattr(obj, "_modules"):
        return opaque(m, obj, source)
    m.guard(Guard(source, "type", type(obj)))
    return ModuleValue(obj, source)


@BASES.row(BaseException)
def wrap_exception(m: Machine, obj: BaseException, source: Source) -> Value:
    guard(m, source, "type", type(obj))
    return ExceptionValue(type(obj), lazy_items(m, obj.args, Attr(source, "args")), obj, source)


# -- frames -------------------------------------------------------------------------------------------------------------
def as_cell(m: Machine, value: Value) -> Value:
    """Cells are recognised at once, since instructions reach into them."""
    obj = value.identity()
    return m.cell(obj, value.source) if isinstance(obj, types.CellType) else value


def stack_values(m: Machine, kinds: tuple[str, ...], given: Iterator[Value], unread: bool = False) -> list[Value]:
    """The stack of a suspended frame; with `unread`, the next instruction does not look at the top of it."""
    stack: list[Value] = []
    for n, kind in enumerate(kinds):
        if kind == VALUE and unread and n == len(kinds) - 1:
            stack.append(as_cell(m, next(given)))
        elif kind == HANDLED_AGAIN:
            stack.append(next(item for item in reversed(stack) if isinstance(item, HandledValue)))
        else:
            stack.append(stack_value(m, kind, given))
    return stack


def stack_value(m: Machine, kind: str, given: Iterator[Value]) -> Value:
    if kind == VALUE:
        return m.look(as_cell(m, next(given)))
    if kind == HANDLED:
        return HandledValue(m.look(next(given)), m.look(next(given)))
    return NULL if kind == NULL_SLOT else LASTI


@WRAPPERS.row(types.GeneratorType)
def wrap_generator(m: Machine, obj: Any, source: Source) -> Value:
    """One of ours from before a break has its frame as data; of another nothing is known."""
    status = status_of(obj)
    if status == REAL or is_fixed(source):
        return opaque(m, obj, source)
    guard(m, Call(source, status_of), "equals", status)
    made = GeneratorValue(None, obj.__name__, source, obj)
    if status != EMPTY:
        m.remember(obj, made)           # before the frame is read: it may hold the generator
        made.frame = suspended_frame(m, made, status, values_of(obj))
    return made


def suspended_frame(m: Machine, generator: GeneratorValue, spec: Any, values: tuple[Any, ...]) -> Any:
    given = iter([LazyValue(value, Item(Call(generator.source, values_of), n)) for n, value in enumerate(values)])
    slots = {name: as_cell(m, next(given)) for name in spec.slots}
    frame = Frame(spec.code, spec.scope, slots, pc=spec.index)
    frame.stack = [*stack_values(m, spec.stack, given), NONE]
    frame.generator = generator
    return frame


@BASES.row(property, classmethod, staticmethod)
def wrap_descriptor(m: Machine, obj: Any, source: Source) -> Value:
    """Of a class of the user's over one of these, whose own methods read its functions."""
    if not isinstance(type(obj).__dict__.get("__get__"), types.FunctionType):
        return opaque(m, obj, source)
    guard(m, source, "type", type(obj))
    return ObjectValue(type(obj), obj, source)


wrap_fixed = guarded("identity", FixedObject)


def wrap_object(m: Machine, obj: Any, source: Source) -> Value:
    """Instances of Python classes are read attribute by attribute; anything else is only passed around."""
    if is_native_instance(type(obj)):
        return wrap_native_object(m, obj, source)
    if is_in_package(home_of(type(obj)), "torch") and isinstance(getattr(type(obj), "__members__", None), dict):     # an enum of torch's, made in C++
        return wrap_fixed(m, obj, source)
    if callable(obj) and marks.is_marked(obj, marks.ALLOWED):
        return wrap_callable(m, obj, source)
    if not is_plain(type(obj)) or is_in_private(home_of(type(obj)), "torch"):
        return BY_CLASS.get(f"{type(obj).__module__}.{type(obj).__qualname__}", opaque)(m, obj, source)
    guard(m, source, "type", type(obj))
    return ObjectValue(type(obj), obj, source)


def wrap_native_object(m: Machine, obj: Any, source: Source) -> Value:
    """An instance of a class over dict, list, ...: the builtin part is read past the class's own methods."""
    base: Any = native_base(type(obj))
    part = next((kind for kind in PART if issubclass(base, kind)), None)
    if is_fixed(source) or part is None:
        return opaque(m, obj, source)
    guard(m, source, "type", type(obj))
    native = Call(source, PART[part])
    if part in (set, frozenset):
        if not all(map(is_element, PART[part](obj))):
            return opaque(m, obj, source)
        return NativeObject(type(obj), base, SetValue(elements(m, PART[part](obj), native), source, obj, part), obj, source)
    if part in (list, tuple):
        guard(m, native, "length", part.__len__(obj))
        items: list[Value] = [LazyValue(part.__getitem__(obj, i), Item(native, i)) for i in range(part.__len__(obj))]
        return NativeObject(type(obj), base, {list: ListValue, tuple: TupleValue}[part](items, source, obj), obj, source)
    if part is not dict:
        guard(m, native, "equals", PART[part](obj))
        return NativeObject(type(obj), base, ConstValue(PART[part](obj)), obj, source)
    keys = list(dict.keys(obj))
    if not all(map(is_constant_object, keys)):
        return opaque(m, obj, source)
    guard(m, native, "keys", tuple(keys))
    entries: dict[Any, tuple[Value, Value]] = {
        key: (ConstValue(key), LazyValue(dict.__getitem__(obj, key), NativeItem(source, (dict, key)))) for key in keys}
    return NativeObject(type(obj), base, NativeEntries(entries, source, obj, base), obj, source)


def dict_part(obj: Any) -> dict:
    return dict(dict.items(obj))


def list_part(obj: Any) -> list:
    return list(list.__iter__(obj))


def set_part(obj: Any) -> set:
    return set(set.__iter__(obj))


def frozenset_part(obj: Any) -> frozenset:
    return frozenset(frozenset.__iter__(obj))


def tuple_part(obj: Any) -> tuple:
    return tuple(tuple.__iter__(obj))


PART: dict[type, Callable[[Any], Any]] = {
    dict: dict_part, list: list_part, set: set_part, frozenset: frozenset_part, tuple: tuple_part,
    int: int.__int__, float: float.__float__, str: str.__str__, bytes: bytes.__bytes__}


class NativeEntries(DictValue):
    """The dict part of an object of the user's; its keys are guarded from the start."""

    def find(self, m: Machine, key: Value) -> Value | None:
        entry = self.entries.get(key.hash_key(m))
        return None if entry is None else m.look(entry[1])

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        hashed = key.hash_key(m)
        self.change(m, {**self.entries, hashed: (key, value)}, "setitem", key, value)

    def know_all(self, m: Machine) -> dict[Any, tuple[Value, Value]]:
        return self.entries


CHANGING = ("__main__", "warnings", "torch.utils._device")      # programs set globals of these


def is_trusted_scope(scope: dict[str, Any]) -> bool:
    """Globals of torch and of the standard library are taken as fixed."""
    name = scope.get("__name__", "")
    return is_library(name) and not is_in_package(name, *CHANGING) or name == polyfills.__name__
