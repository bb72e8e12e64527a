"""Instances of Python classes over list, dict, tuple, set, str, int, ...: an object with attributes, and a payload that is the builtin part.

The class's Python methods come first, by Python's own rules; what the class leaves to the builtin is asked of the payload, a Value of
the builtin's kind.  A builtin method called unbound (`dict.__setitem__(self, k, v)`, `super().append(x)`) goes to the payload as well.
What always holds: the payload has the object as its `holder`, and is written as it; effects on the user's objects are replayed through
the builtin's own methods, so an overriding method runs exactly as often as the program runs it.

    class Output(OrderedDict): ...
    out = Output(); out["loss"] = loss      # a NativeObject whose payload is a DictValue
"""
from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

from firesteel.capture.meanings import CALLS
from firesteel.capture.protocols import Emitter, Machine
from firesteel.capture.source import Constants, Source
from firesteel.capture.values.attributes import MISSING, mro_lookup
from firesteel.capture.values.base import Value
from firesteel.capture.values.class_objects import INSTANTIATE, ClassValue, new_then_init
from firesteel.capture.values.const import ConstValue
from firesteel.capture.values.containers import Container, ListValue, NamedTupleValue, Sequence, TupleValue
from firesteel.capture.values.functions import NATIVE_CALLS, Args, Kwargs
from firesteel.capture.values.mappings import DictValue, SetValue
from firesteel.capture.values.objects import ObjectValue
from firesteel.errors import Break
from firesteel.table import Table

# builtin class -> function(machine, args, kwargs) -> payload, as its constructor makes it
PAYLOADS: Table[Callable[..., Value]] = Table("builtin base class", "capture/values/natives.py")
IMMUTABLE = (tuple, frozenset, int, float, str, bytes)      # made whole by __new__; the others are filled by __init__

# special methods that no builtin function of a number, a text or a tuple calls
OUTSIDE = ("__new__", "__init__", "__init_subclass__", "__class_getitem__", "__getattr__", "__setattr__", "__reduce__", "__annotate__")

SPECIAL: dict[str, Callable[..., Value | None]] = {
    "__len__": lambda m, p: p.length(m), "__contains__": lambda m, p, item: p.contains(m, item),
    "__getitem__": lambda m, p, key: p.getitem(m, key), "__iter__": lambda m, p: p.iterator(m),
    "__setitem__": lambda m, p, key, value: p.setitem(m, key, value), "__delitem__": lambda m, p, key: p.delitem(m, key),
    "__eq__": lambda m, p, other: m.compare("==", p, builtin_part(other)),
    "__ne__": lambda m, p, other: m.compare("!=", p, builtin_part(other)),
    "__add__": lambda m, p, other: m.binary("+", p, builtin_part(other)), "__or__": lambda m, p, other: m.binary("|", p, builtin_part(other)),
    "__mul__": lambda m, p, other: m.binary("*", p, builtin_part(other)),
}


def native_base(cls: type) -> type | None:
    """The builtin class that a class is made over, if it is one of PAYLOADS."""
    return next((base for base in cls.__mro__ if base in PAYLOADS), None)


def builtin_part(value: Value) -> Value:
    return value.payload if isinstance(value, NativeObject) else value


class NativeItem(Source):
    """The item of an object as its builtin base has it, past a __getitem__ of the class; the key is (base class, key)."""

    __slots__ = ()

    def write(self, base: str, constants: Constants) -> str:
        return f"{constants.bind(self.key[0])}.__getitem__({base}, {constants.name(self.key[1])})"

    def step(self, base: Any) -> Any:
        return self.key[0].__getitem__(base, self.key[1])

    @property
    def name(self) -> str:
        return f"{self.base.name}[{self.key[1]!r}]"


class NativeObject(ObjectValue):
    """See the module's text."""

    def __init__(self, cls: type, base: type, payload: Any, obj: Any = None, source: Source | None = None):
        super().__init__(cls, obj, source)
        self.base, self.payload = base, payload
        payload.holder = self

    def fill(self, m: Machine, args: Args, kwargs: Kwargs) -> None:
        """The builtin's __init__."""
        if self.base in IMMUTABLE:
            return
        made = PAYLOADS[self.base](m, args, kwargs)
        for field in ("entries", "_items", "factory"):
            if hasattr(made, field):
                m.effects.change(self.payload, field, getattr(made, field))

    def _ask(self, m: Machine, name: str, *args: Value) -> Any:
        """A special method: the class's, or the builtin's."""
        method = self.method(m, name)
        return SPECIAL[name](m, self.payload, *args) if method is None else method.call(m, list(args), {})

    def getitem(self, m: Machine, key: Value) -> Value:
        method = self.method(m, "__getitem__")
        return self.item(m, key) if method is None else method.call(m, [key], {})

    def item(self, m: Machine, key: Value) -> Value:
        """As the builtin finds it: a dict's asks a __missing__ of the class."""
        missing = self.method(m, "__missing__") if isinstance(self.payload, DictValue) else None
        found = self.payload.find(m, key) if missing is not None else None
        return found or (self.payload.getitem(m, key) if missing is None else missing.call(m, [key], {}))

    def length(self, m: Machine) -> Value:
        return self._ask(m, "__len__")

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        found = super().compare(m, op, other)
        return self.payload.compare(m, op, builtin_part(other)) if found is None else found

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        found = super().binary(m, op, other, reflected)
        return self.payload.binary(m, op, builtin_part(other), reflected) if found is None else found

    def inplace(self, m: Machine, op: str, other: Value) -> Value | None:
        found = super().inplace(m, op, other)
        if found is None:
            found = self.payload.inplace(m, op, builtin_part(other))
        return self if found is self.payload else found

    def unary(self, m: Machine, op: str) -> Value:
        return super().unary(m, op) if self.base not in (int, float) else self.payload.unary(m, op)

    def builtin_alone(self) -> Value:
        """The payload, where the class leaves all special methods to the builtin."""
        own = (part for cls in self.cls.__mro__ if cls not in self.base.__mro__ for part in vars(cls).items())
        return self if any(callable(part) and name.startswith("__") and name not in OUTSIDE for name, part in own) else self.payload

    def hash_key(self, m: Machine) -> Any:
        if isinstance(mro_lookup(self.cls, "__hash__"), types.FunctionType) or mro_lookup(self.cls, "__eq__") is not self.base.__eq__:
            raise Break("operator", name="hash()", value=self.describe())
        return self.payload.hash_key(m)

    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        return self.payload.as_arg(m)

    def rebuild(self, e: Emitter) -> str:
        cls, base = e.class_text(self.cls), e.constant(self.base)
        if self.base in IMMUTABLE:
            name = e.write_as(self, e.assign(f"{base}.__new__({cls}, {self.payload.rebuild(e)})"))
        else:
            name = e.write_as(self, e.assign(f"{base}.__new__({cls})"))
            e.line(f"{e.constant(fill_native)}({name}, {base}, {self.payload.rebuild(e)})")
        return self.filled(e, name)


def fill_native(obj: Any, base: Any, content: Any) -> None:
    """For generated code: puts items into an object over dict, list or set, past its class's own methods."""
    if not issubclass(base, dict):
        (base.extend if issubclass(base, list) else base.update)(obj, content)
        return
    if isinstance(content, collections.defaultdict):
        obj.default_factory = content.default_factory
    for key, value in content.items():
        base.__setitem__(obj, key, value)


def _unless_defined(name: str, methods: tuple[str, ...]) -> Callable[..., Any]:
    def ask(self: NativeObject, m: Machine, *args: Value) -> Any:
        defined = any(self.method(m, method) is not None for method in methods)
        return getattr(ObjectValue, name)(self, m, *args) if defined else getattr(self.payload, name)(m, *args)
    return ask


# what the builtin part answers, unless the class has one of these methods
for _name, _methods in {"setitem": ("__setitem__",), "delitem": ("__delitem__",), "contains": ("__contains__", "__iter__"), "iterator": ("__iter__",),
                        "iterate": ("__iter__",), "truth": ("__bool__", "__len__")}.items():
    setattr(NativeObject, _name, _unless_defined(_name, _methods))


# -- the builtin part ---------------------------------------------------------------------------------------------------
_base: Any
for _base in (dict, collections.OrderedDict, collections.defaultdict, list, set, frozenset, tuple):
    PAYLOADS.add(_base, lambda m, args, kwargs, base=_base: CALLS[base](m, args, kwargs))
for _base in (int, float, str, bytes):
    PAYLOADS.add(_base, lambda m, args, kwargs, base=_base: ConstValue(m.run_real(base, *map(m.known, args))))


@INSTANTIATE.row("native")
def new_native(m: Machine, cls: type, args: Args, kwargs: Kwargs) -> Value | None:
    """cls(*args, **kwargs) for a class over a builtin; None where it is none."""
    base = native_base(cls)
    if base in IMMUTABLE and base is not cls and isinstance(cls.__new__, types.FunctionType) and not hasattr(cls, "_fields"):
        return new_then_init(m, cls, args, kwargs)
    if base is None or base is cls or cls.__new__ is not base.__new__ or type(cls).__call__ is not type.__call__:
        return None
    init = mro_lookup(cls, "__init__")
    own_init = isinstance(init, types.FunctionType)
    made = make_native(m, cls, base, args, {} if own_init else kwargs)
    if own_init:
        return m.call_returning(m.constant_object(init), [made, *args], kwargs, made)
    made.fill(m, args, kwargs)
    return made


def make_native(m: Machine, cls: type, base: type, args: Args, kwargs: Kwargs) -> NativeObject:
    """base.__new__(cls, *args)"""
    payload = PAYLOADS[base](m, args, kwargs) if base in IMMUTABLE else PAYLOADS[base](m, [], {})
    if type(payload) is TupleValue or isinstance(payload, (Sequence, SetValue)):
        payload = own_copy(payload)
    return NativeObject(cls, base, payload)


def own_copy(payload: Value) -> Value:
    """tuple(t) is t: the payload of an object must be its own."""
    if isinstance(payload, TupleValue):
        return TupleValue(list(payload.items))
    return ListValue(list(payload.items)) if isinstance(payload, ListValue) else payload


# -- builtin methods, unbound -------------------------------------------------------------------------------------------
@NATIVE_CALLS.row("containers")
def call_native_method(m: Machine, fn: Any, args: Args, kwargs: Kwargs) -> Value | None:
    """dict.update(d, ...), list.__len__(x): None where the first argument has no such part."""
    if not args or not isinstance(args[0], (NativeObject, Container)) or getattr(fn, "__objclass__", None) not in PAYLOADS:
        return None
    payload, name = builtin_part(args[0]), fn.__name__
    if name == "__init__" and isinstance(args[0], NativeObject):
        args[0].fill(m, args[1:], kwargs)
        return ConstValue(None)
    if name == "__getitem__" and isinstance(args[0], NativeObject):
        return args[0].item(m, *args[1:])
    if name in SPECIAL:
        return SPECIAL[name](m, payload, *args[1:]) or ConstValue(None)
    return payload.getattr(m, name).call(m, args[1:], kwargs)


@CALLS.row(*dict.fromkeys(base.__new__ for base in PAYLOADS))
def call_native_new(m: Machine, args: Args, kwargs: Kwargs) -> Value:
    """list.__new__(cls, ...)"""
    cls: Any = args[0].cls if isinstance(args[0], ClassValue) else None
    base = native_base(cls) if cls is not None else None
    if base is None:
        raise Break("instance", name="__new__ of a builtin")
    if base is tuple and hasattr(cls, "_fields"):
        return NamedTupleValue(cls, args[1].iterate(m))
    return PAYLOADS[base](m, args[1:], kwargs) if base is cls else make_native(m, cls, base, args[1:], kwargs)


def is_native_instance(cls: type) -> bool:
    """Are instances of cls an object over one builtin, all other bases being Python classes?"""
    base = native_base(cls)
    if base is None or base is cls:
        return False
    return all(b in (object, *base.__mro__) or b.__flags__ & (1 << 9) for b in cls.__mro__) and mro_lookup(cls, "__class__") is not MISSING
