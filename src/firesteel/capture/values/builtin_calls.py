"""Python's builtins, and the small functions of operator, functools and itertools, on Values: rows of `CALLS`."""
from __future__ import annotations

import collections
import functools
import operator
import types
import typing
from collections.abc import Callable
from typing import Any

import torch

from firesteel.capture import polyfills
from firesteel.capture.guards import Guard
from firesteel.capture.meanings import CALLS
from firesteel.capture.polyfills import EXTREMES
from firesteel.capture.protocols import Machine
from firesteel.capture.python_operators import BINARY, COMPARE, IN_PLACE, OPERATORS, UNARY_OPERATORS
from firesteel.capture.source import Attr
from firesteel.capture.values.arrays import number_now
from firesteel.capture.values.attributes import mro_lookup
from firesteel.capture.values.base import CallableObject, IdKey, UserRaise, Value
from firesteel.capture.values.class_statements import make_class_of
from firesteel.capture.values.const import NONE, ConstValue, boolean, fold, is_none
from firesteel.capture.values.containers import ListValue, Sequence, SizeValue, SliceValue, TupleValue, gives_none, sorted_items
from firesteel.capture.values.exceptions import ExceptionValue
from firesteel.capture.values.functions import Args, Handler, Kwargs, PartialValue
from firesteel.capture.values.generators import GeneratorValue, given
from firesteel.capture.values.iterators import EnumerateIterator, FilterIterator, MapIterator, ZipIterator
from firesteel.capture.values.known_data import known_data
from firesteel.capture.values.mappings import DictValue, SetValue, pairs_of
from firesteel.capture.values.number import SymNumber, converted, symbolic_call
from firesteel.capture.values.objects import ObjectValue
from firesteel.capture.values.tensor import TensorValue, read_number
from firesteel.capture.values.torch_calls import call_graph
from firesteel.capture.values.truths import asked, is_same
from firesteel.errors import Break

# -- questions about objects --------------------------------------------------------------------------------------------
CALLS.row(len)(lambda m, args, kwargs: args[0].length(m))


TENSOR_KIND = type(torch.FloatTensor)


def class_list(m: Machine, value: Value) -> tuple[type, ...]:
    """The second argument of isinstance: a class, or tuples of them."""
    if isinstance(value, Sequence):
        return tuple(c for item in value.items for c in class_list(m, m.look(item)))
    found = value.identity() if not value.is_constant() else value.constant()
    if isinstance(found, type):
        return (found,)
    if hasattr(found, "__args__"):      # int | float
        return tuple(found.__args__)
    raise Break("introspection", name="isinstance")


@CALLS.row(isinstance)
def call_isinstance(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if kwargs or len(args) != 2:
        raise m.raise_real(TypeError(f"isinstance expected 2 arguments, got {len(args) + len(kwargs)}"))
    obj = args[0].identity()
    classes = class_list(m, args[1])
    if isinstance(args[0], TensorValue) and any(isinstance(cls, TENSOR_KIND) for cls in classes):
        like = torch.empty(0, dtype=args[0].abstract.dtype, device=args[0].abstract.device)
        return boolean(isinstance(like, classes))
    for cls in classes:
        check = mro_lookup(type(cls), "__instancecheck__")
        if isinstance(check, types.FunctionType) and check.__module__ not in ("abc", "typing", "torch.nn.parameter"):
            if m.call_now(m.constant_object(check), [m.constant_object(cls), args[0]], {}).truth(m):
                return boolean(True)
            classes = tuple(c for c in classes if c is not cls)
    if obj is not None and not isinstance(args[0], (TensorValue, SymNumber)):
        return boolean(isinstance(obj, classes))
    known = args[0].python_type()
    if isinstance(args[0], TensorValue) and torch.nn.Parameter in classes and is_marked(m, args[0]):
        return boolean(True)
    return boolean(any(follows(m, args[0], c) if is_protocol(c) else is_subclass(known, c) for c in classes))


def is_marked(m: Machine, tensor: TensorValue) -> bool:
    """A parameter of another class than Parameter has an attribute that says so."""
    if tensor.source is None or type(tensor.real) in (torch.Tensor, torch.nn.Parameter):
        return False
    marked = getattr(tensor.real, "_is_param", None)
    m.guard(Guard(tensor.source, "no_attr", "_is_param") if marked is None else Guard(Attr(tensor.source, "_is_param"), "equals", marked))
    return bool(marked)


def is_protocol(cls: Any) -> bool:
    return bool(cls.__dict__.get("_is_protocol")) and bool(getattr(cls, "_is_runtime_protocol", False))


def follows(m: Machine, value: Value, protocol: Any) -> bool:
    """isinstance(value, protocol): has it all members, none of the methods being None?"""
    if protocol in value.python_type().__mro__:
        return True
    names = getattr(protocol, "__protocol_attrs__", None) or typing._get_protocol_attrs(protocol)      # type: ignore[attr-defined]  # Python 3.11
    for name in sorted(names):
        if not m.finish_now(CALLS[hasattr](m, [value, ConstValue(name)], {})).truth(m):
            return False
        if callable(getattr(protocol, name, None)) and is_none(m.finish_now(value.getattr(m, name))):
            return False
    return True


CALLS.row(type.__instancecheck__)(lambda m, args, kwargs: boolean(args[0].constant() in args[1].python_type().__mro__))


def is_subclass(known: type, cls: type) -> bool:
    if cls is torch.nn.Parameter or cls is torch.Tensor or issubclass(known, torch.Tensor):
        return cls in known.__mro__ or (cls is not torch.nn.Parameter and issubclass(known, cls))
    return issubclass(known, cls)


CALLS.row(issubclass)(lambda m, args, kwargs: boolean(issubclass(args[0].constant(), class_list(m, args[1]))))
CALLS.row(type)(lambda m, args, kwargs: make_class_of(m, *args) if len(args) == 3 else m.constant_object(args[0].python_type()))
CALLS.row(callable)(lambda m, args, kwargs: boolean("__call__" in dir(args[0].python_type())))
CALLS.row(id)(lambda m, args, kwargs: IdValue(args[0]))


class IdValue(Value):
    """id(x): two of them are compared as the objects; where the number itself matters, it is guarded that the object is this one."""

    words = "id of {self.owner}"
    cls = int
    always_true = True
    form = "id({owner})"

    def __init__(self, owner: Value):
        self.owner = owner

    def hash_key(self, m: Machine) -> Any:
        return IdKey(self.owner if self.owner.identity() is None else self.owner.identity())

    def as_key(self, m: Machine, container: Any) -> Value:
        """Beside other ids it is the object; beside numbers, the number."""
        if self.owner.identity() is None or container.source is None and not any(type(key) is int for key in container.entries):
            return self
        return ConstValue(id(m.real_object(self.owner)))

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        if op in ("==", "!=") and isinstance(other, IdValue):
            return boolean(m.identical(self.owner, other.owner) == (op == "=="))
        if isinstance(other, IdValue) or self.owner.identity() is None:
            raise Break("introspection", name="id")
        return fold(m, OPERATORS[op], id(m.real_object(self.owner)), m.known(other))


@CALLS.row(hash)
def call_hash(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    method = args[0].method(m, "__hash__") if isinstance(args[0], ObjectValue) else None
    if method is not None:
        return method.call(m, [], {})
    if isinstance(args[0], TupleValue) and not args[0].is_constant():
        return fold(m, hash, args[0].hash_key(m))
    return fold(m, hash, m.known(args[0]))


# -- attributes ---------------------------------------------------------------------------------------------------------
@CALLS.row(getattr)
def call_getattr(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    name = m.known(args[1])
    if len(args) < 3:
        return args[0].getattr(m, name)
    try:
        return m.finish_now(args[0].getattr(m, name))
    except UserRaise as raised:
        if issubclass(raised.value.python_type(), AttributeError):
            return args[2]
        raise


@CALLS.row(hasattr)
def call_hasattr(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    name = m.known(args[1])
    if isinstance(args[0], TensorValue) and hasattr(torch.Tensor, name):
        return boolean(True)
    try:
        m.finish_now(args[0].getattr(m, name))
    except UserRaise as raised:
        if issubclass(raised.value.python_type(), AttributeError):
            return boolean(False)
        raise
    return boolean(True)


CALLS.row(setattr)(gives_none(lambda m, args, kwargs: args[0].setattr(m, m.known(args[1]), args[2])))
CALLS.row(delattr)(gives_none(lambda m, args, kwargs: args[0].delattr(m, m.known(args[1]))))


# -- numbers ------------------------------------------------------------------------------------------------------------
def _converts(cls: type, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if args and isinstance(args[0], TensorValue):
        return converted(m, read_number(m, args[0], f"{cls.__name__}()"), cls)
    if args and (number := number_now(m, args[0])) is not None and cls in (int, float):
        return converted(m, number, cls)
    if args and isinstance(args[0], ObjectValue):
        return m.constant_object(getattr(args[0].python_type(), f"__{cls.__name__}__")).call(m, args, kwargs)
    return fold(m, cls, *map(m.known, args), **{k: m.known(v) for k, v in kwargs.items()})


for _cls in (int, float, complex):
    CALLS.add(_cls, functools.partial(_converts, _cls))


@CALLS.row(bool)
def call_bool(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if not args:
        return boolean(False)
    try:
        return asked(m, args[0])
    except Break as stop:
        if stop.kind == "data_branch" and isinstance(args[0], TensorValue):
            raise Break("data_scalar", name="bool()") from None
        raise


@CALLS.row(abs)
def call_abs(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if isinstance(args[0], TensorValue):
        return call_graph(m, "call_function", abs, args, {})
    if isinstance(args[0], SymNumber):
        return symbolic_call(m, operator.abs, [converted(m, args[0], int) if args[0].python_type() is bool else args[0]])
    if isinstance(args[0], ObjectValue) and args[0].builtin_alone() is args[0]:
        return args[0]._tail(m, "__abs__", [], "abs()")
    return fold(m, abs, m.known(args[0]))


@CALLS.row(divmod)
def call_divmod(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if isinstance(args[0], ObjectValue) and (method := args[0].method(m, "__divmod__")) is not None:
        return method.call(m, [args[1]], {})
    return TupleValue([m.binary("//", *args), m.binary("%", *args)])


CALLS.row(pow)(lambda m, args, kwargs: m.binary("**", *args) if len(args) == 2 else fold(m, pow, *map(m.known, args)))


def _extreme(fn: Callable[..., Any], op: str, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    items = [m.look(i) for i in (args[0].iterate(m) if len(args) == 1 else args)]
    key = kwargs.get("key")
    if not items:
        if "default" in kwargs:
            return kwargs["default"]
        raise m.raise_real(ValueError(f"{fn.__name__}() arg is an empty sequence"))
    keys = items if key is None or key is NONE else [m.call_now(key, [item], {}) for item in items]
    best = 0
    for i in range(1, len(items)):
        if keys is items and (isinstance(keys[i], SymNumber) or isinstance(keys[best], SymNumber)):
            return _symbolic_extreme(m, fn, items)
        larger = m.compare(op, keys[i], keys[best])
        if keys is items and isinstance(larger, TensorValue) and known_data(m, larger) is None:      # branches on data, which may be joined
            return m.constant_object(EXTREMES[fn]).call(m, items[best:best + 1] + items[i:], {})
        if larger.truth(m):
            best = i
    return items[best]


def _symbolic_extreme(m: Machine, fn: Callable[..., Any], items: Args) -> Value:
    total = items[0]
    for item in items[1:]:
        total = symbolic_call(m, torch.sym_max if fn is max else torch.sym_min, [total, item])
    return total


CALLS.add(max, functools.partial(_extreme, max, ">"))
CALLS.add(min, functools.partial(_extreme, min, "<"))


@CALLS.row(sum)
def call_sum(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    total = args[1] if len(args) > 1 else kwargs.get("start", ConstValue(0))
    for item in args[0].iterate(m):
        total = m.binary("+", total, m.look(item))
    return total


def _first_that_is(wanted: bool, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """any looks for a true item, all for a false one."""
    iterator = args[0].iterator(m)
    while (item := m.next_now(iterator)) is not None:
        if item.truth(m) == wanted:
            return boolean(wanted)
    return boolean(not wanted)


CALLS.add(any, functools.partial(_first_that_is, True))
CALLS.add(all, functools.partial(_first_that_is, False))


# -- containers ---------------------------------------------------------------------------------------------------------
CALLS.row(list)(lambda m, args, kwargs: ListValue(list(args[0].iterate(m)) if args else []))


@CALLS.row(tuple)
def call_tuple(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if args and type(args[0]) is TupleValue:
        return args[0]
    return TupleValue(list(args[0].iterate(m)) if args else [])


CALLS.row(torch.Size)(lambda m, args, kwargs: SizeValue([m.look(item) for item in args[0].iterate(m)] if args else []))


def _makes_dict(cls: type, m: Machine, args: Args, kwargs: Kwargs) -> Value:
    pairs = pairs_of(m, args[0]) if args else []
    entries = {k.hash_key(m): (k, v) for k, v in pairs}
    entries.update({k: (ConstValue(k), v) for k, v in kwargs.items()})
    return DictValue(entries, cls=cls)


CALLS.add(dict, functools.partial(_makes_dict, dict))
CALLS.add(collections.OrderedDict, functools.partial(_makes_dict, collections.OrderedDict))


@CALLS.row(collections.defaultdict)
def call_defaultdict(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    factory = args[0] if args and args[0] is not NONE else None
    made: Any = _makes_dict(collections.defaultdict, m, args[1:], kwargs)
    made.factory = factory
    return made


CALLS.row(set)(lambda m, args, kwargs: SetValue.of(m, args[0].iterate(m) if args else []))
CALLS.row(frozenset)(lambda m, args, kwargs: SetValue.of(m, args[0].iterate(m) if args else [], frozenset))


@CALLS.row(slice)
def call_slice(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    parts = [NONE, *args, NONE] if len(args) == 1 else [*args, NONE][:3]
    return SliceValue(*parts)


@CALLS.row(range)
def call_range(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    numbers = [m.finish_now(arg.getattr(m, "__index__").call(m, [], {})) if isinstance(arg, (ObjectValue, TensorValue)) else arg for arg in args]
    return fold(m, range, *map(m.known, numbers))


CALLS.row(sorted)(lambda m, args, kwargs: ListValue(sorted_items(m, args[0].iterate(m), kwargs)))


@CALLS.row(reversed)
def call_reversed(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if isinstance(args[0], ObjectValue):
        method = args[0].method(m, "__reversed__")
        if method is not None:
            return method.call(m, [], {})
    return m.iterate_over(TupleValue(args[0].iterate(m)[::-1]))


# -- iterators ----------------------------------------------------------------------------------------------------------
@CALLS.row(iter)
def call_iter(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    if len(args) > 1:
        return m.constant_object(polyfills.call_iterator).call(m, args, kwargs)
    return args[0].iterator(m)


@CALLS.row(next)
def call_next(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    runs = isinstance(args[0], GeneratorValue) and args[0].frame is not None
    item = m.next_now(args[0])
    if item is not None:
        return item
    if len(args) > 1:
        return args[1]
    if runs:
        return given(m, args[0], None)      # type: ignore[arg-type]  # a generator
    raise UserRaise(ExceptionValue(StopIteration, []))


@CALLS.row(enumerate)
def call_enumerate(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    start = args[1] if len(args) > 1 else kwargs.get("start", ConstValue(0))
    return EnumerateIterator(args[0].iterator(m), start)


CALLS.row(zip)(lambda m, args, kwargs: ZipIterator([a.iterator(m) for a in args], bool(kwargs) and kwargs["strict"].truth(m)))
CALLS.row(map)(lambda m, args, kwargs: MapIterator(args[0], [a.iterator(m) for a in args[1:]]))
CALLS.row(filter)(lambda m, args, kwargs: FilterIterator(args[0], args[1].iterator(m)))


# -- text ---------------------------------------------------------------------------------------------------------------
def _text(fn: Callable[..., str]) -> Callable[..., Value]:
    method = "__str__" if fn is str else "__repr__"

    def make(m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if args and isinstance(args[0], ObjectValue):
            found = args[0].method(m, method) or (args[0].method(m, "__repr__") if method == "__str__" else None)
            if found is not None:
                return found.call(m, [], {})
            if not isinstance(args[0], ExceptionValue) and args[0].holder is None and not hasattr(args[0], "payload"):
                raise Break("introspection", name=fn.__name__)
            if hasattr(args[0], "payload"):
                return fold(m, fn, m.known(args[0].payload))
        return fold(m, fn, *(known_object(m, value) for value in args))
    return make


def known_object(m: Machine, value: Value) -> Any:
    """As m.known; also of a function of torch or a builtin, of which there is one."""
    return value.fn if isinstance(value, CallableObject) else m.known(value)


CALLS.add(str, _text(str))
CALLS.add(repr, _text(repr))
CALLS.row(format)(lambda m, args, kwargs: format_value(m, args[0], m.known(args[1]) if len(args) > 1 else ""))


def format_value(m: Machine, value: Value, spec: str) -> Value:
    """format(value, spec); a user's __format__ or __str__ runs."""
    if not isinstance(value, ObjectValue):
        return fold(m, format, known_object(m, value), spec)
    method = value.method(m, "__format__")
    if method is not None:
        return method.call(m, [ConstValue(spec)], {})
    if spec and hasattr(value, "payload"):
        return fold(m, format, m.known(value.payload), spec)
    return CALLS[str](m, [value], {}) if not spec else fold(m, format, m.known(m.finish_now(CALLS[str](m, [value], {}))), spec)


# -- functools, operator ------------------------------------------------------------------------------------------------
CALLS.row(functools.partial)(lambda m, args, kwargs: PartialValue(functools.partial, args[0], list(args[1:]), dict(kwargs)))


def _applies(method: str, symbol: str) -> Handler:
    """A function of `operator` is the machine's own operator."""
    return lambda m, args, kwargs: getattr(m, method)(symbol, *args)


for _method, _operators in {"binary": BINARY, "compare": COMPARE, "unary": UNARY_OPERATORS}.items():
    for _symbol, _fn in _operators.items():
        CALLS.add(_fn, _applies(_method, _symbol))
for _symbol, _fn in IN_PLACE.items():
    CALLS.add(_fn, _applies("inplace", _symbol[:-1]))


QUESTIONS: dict[Any, Callable[..., Value]] = {      # what instructions ask for programs that do not call these
    operator.is_: is_same, operator.is_not: lambda m, a, b: is_same(m, a, b, negated=True),
    operator.truth: asked, operator.contains: lambda m, a, b: boolean(a.contains(m, b).truth(m))}
for _fn, _decide in QUESTIONS.items():
    CALLS.add(_fn, lambda m, args, kwargs, decide=_decide: decide(m, *args))


CALLS.row(operator.getitem)(lambda m, args, kwargs: args[0].getitem(m, args[1]))
CALLS.row(operator.setitem)(gives_none(lambda m, args, kwargs: args[0].setitem(m, args[1], args[2])))
CALLS.row(operator.index)(lambda m, args, kwargs: args[0] if isinstance(args[0], SymNumber) else fold(m, operator.index, m.known(args[0])))


# -- what torch asks about the compiler ---------------------------------------------------------------------------------
for _fn, _answer in {torch.jit.is_scripting: False, torch.jit.is_tracing: False, torch._C._get_tracing_state: None}.items():
    CALLS.add(_fn, lambda m, args, kwargs, answer=_answer: ConstValue(answer))
