"""Functions, methods, closures and builtins as Values; binding arguments; the calls that are rows of a table.

A Python function is called by pushing a frame (PENDING); builtins that mean something here are rows of `CALLS`, keyed by the
callable itself; other builtins are executed if their arguments are known, and break otherwise.

    @CALLS.row(len)
    def call_len(m, args, kwargs): return args[0].length(m)
"""
from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from firesteel.capture import marks, polyfills
from firesteel.capture.effects import DELETED
from firesteel.capture.guards import Guard
from firesteel.capture.meanings import BY_CODE, CALLS, CallMeaning, Sort, meaning, meaning_of_code
from firesteel.capture.protocols import Args, Emitter, Kwargs, Machine
from firesteel.capture.source import Attr, Fixed, Item, Source
from firesteel.capture.values.base import CallableObject, LazyValue, ObjectKey, Value
from firesteel.capture.values.const import ConstValue, fold, run_for_program
from firesteel.capture.values.containers import TupleValue
from firesteel.capture.values.iterators import IteratorValue
from firesteel.capture.values.mappings import DictValue
from firesteel.errors import Break
from firesteel.table import Table

Handler = Callable[["Machine", Args, Kwargs], Value]

# kind of object -> function(machine, method descriptor, args, kwargs) -> Value or None: unbound methods and class methods of builtin classes
NATIVE_CALLS: Table[Callable[..., Value | None]] = Table("unbound builtin method", "capture/values/natives.py")
NATIVE_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)

# name of the code of a function that a transform of torch.func gave -> function(machine, its closure by name) -> what captures calls of it
TRANSFORMED: Table[Callable[[Machine, dict[str, Value]], Value]] = Table("transformed function", "capture/values/transforms.py")


class CellValue(Value):
    """A closure cell."""

    words = "cell"

    def __init__(self, content: Value | None, source: Source | None = None, obj: Any = None):
        self.content, self.source, self.obj = content, source, obj

    def get(self, m: Machine) -> Value | None:
        """The content, looked at; None where the cell is empty."""
        if self.content is not None:
            self.content = m.look(self.content)
        return self.content

    def getattr(self, m: Machine, name: str) -> Value:
        if name != "cell_contents":
            return super().getattr(m, name)
        found = self.get(m)
        if found is None:
            raise m.raise_real(ValueError("Cell is empty"))
        return found

    def set(self, m: Machine, value: Value | None) -> None:
        m.effects.change(self, "content", value)
        if value is None:
            m.effects.log("empty_cell", self)
        else:
            m.effects.log("cell", self, value)

    def rebuild(self, e: Emitter) -> str:
        name = e.write_as(self, e.assign(f"{e.constant(types.CellType)}()"))
        if self.content is not None:
            e.line(f"{name}.cell_contents = {e.expr(self.content)}")
        return name


class ScopeValue(Value):
    """The globals of a Python module, as the target of stores."""

    words = "globals()"
    cls = dict

    def __init__(self, scope: dict[str, Any]):
        self.scope, self.source = scope, Fixed(scope, str(scope.get("__name__", "globals")))

    def identity(self) -> Any:
        return self.scope

    def getitem(self, m: Machine, key: Value) -> Value:
        name = m.known(key)
        if not m.has_global(self.scope, name):
            raise m.raise_real(KeyError(name))
        return m.read_global(self.scope, name)

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        m.store_global(self.scope, m.known(key), value)

    def contains(self, m: Machine, item: Value) -> Value:
        return ConstValue(m.has_global(self.scope, m.known(item)))


class FunctionValue(Value):
    """A Python function: one of the user's (`fn` and a source) or one made inside (code, closure and defaults as Values)."""

    words = "function {self.code.co_qualname}"
    cls = types.FunctionType
    always_true = True

    def __init__(self, fn: types.FunctionType | None, source: Source | None, code: types.CodeType, scope: dict[str, Any],
                 defaults: list[Value], kwdefaults: dict[str, Value], closure: list[CellValue], name: str = ""):
        self.fn, self.source, self.code, self.scope = fn, source, code, scope
        self.defaults, self.kwdefaults, self.closure = defaults, kwdefaults, closure
        self.name = name or code.co_name
        self.found: CallMeaning | None = None           # of the function as an object; else the code alone counts
        self.shell: types.FunctionType | None = None    # the empty function that stands for it in a class; see classes.py

    def identity(self) -> Any:
        return self.fn

    def use(self, m: Machine) -> None:
        """Something depends on which function it is; one that is only handed on (a hook) may be another each time."""
        if self.source is not None and type(self.source) is not Fixed:
            m.guard(Guard(self.source, "code", self.code))

    def hash_key(self, m: Machine) -> Any:
        self.use(m)
        return ObjectKey(self.fn if self.fn is not None else self)

    def getattr(self, m: Machine, name: str) -> Value:
        self.use(m)
        written = m.effects.written(self, name)
        if written is not None and written is not DELETED:
            return written
        if name == "__get__":
            return FunctionBinder(self)
        if name in ("__name__", "__qualname__"):
            return ConstValue(self.name if name == "__name__" else self.code.co_qualname)
        if self.fn is not None and hasattr(self.fn, name):
            return m.read_attribute(self, name)
        if self.fn is None and name == "__dict__":
            own = {n: v for n, v in m.effects.attributes(self).items() if v is not DELETED and not hasattr(types.FunctionType, n)}
            return DictValue({n: (ConstValue(n), v) for n, v in own.items()})
        if self.fn is None and name in MADE_ATTRIBUTES:
            return m.look(MADE_ATTRIBUTES[name](self))
        if self.fn is not None or not hasattr(types.FunctionType, name):
            raise m.raise_real(AttributeError(f"'function' object has no attribute {name!r}"))
        raise Break("attribute", name=name, value=self.describe())

    def setattr(self, m: Machine, name: str, value: Value) -> None:
        m.effects.store_attr(self, name, value)

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if self.found is None:
            return self.inline(m, args, kwargs)
        self.use(m)
        return ON_FUNCTION[self.found.sort](m, self, self.found, args, kwargs)

    def inline(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        """A call that goes by the code alone."""
        self.use(m)
        found = meaning_of_code(self.code, self.scope)
        return ON_FUNCTION[found.sort](m, self, found, args, kwargs)

    def rebuild(self, e: Emitter) -> str:
        closure, defaults = ("".join(f"{e.expr(value)}, " for value in values) for values in (self.closure, self.defaults))
        kwdefaults = ", ".join(f"{name!r}: {e.expr(value)}" for name, value in self.kwdefaults.items())
        if (known := e.written(self)) is not None:      # a cell of its closure holds the function itself
            return known
        parts = [e.constant(self.code), e.constant(self.scope), repr(self.name), f"({defaults})", f"{{{kwdefaults}}}", f"({closure})"]
        return e.with_attributes(self, e.write_as(self, e.assign(f"{e.constant(real_function)}({', '.join(parts)})")))


def real_function(code: types.CodeType, scope: dict[str, Any], name: str, defaults: tuple, kwdefaults: dict, closure: tuple) -> types.FunctionType:
    """For generated code."""
    function = types.FunctionType(code, scope, name, defaults or None, closure or None)
    function.__kwdefaults__ = kwdefaults or None
    return function


# attribute of a function made inside -> its value
MADE_ATTRIBUTES: dict[str, Callable[[FunctionValue], Value]] = {
    "__module__": lambda f: ConstValue(f.scope.get("__name__")), "__code__": lambda f: ConstValue(f.code),
    "__doc__": lambda f: ConstValue(documentation(f.code)),
    "__defaults__": lambda f: TupleValue(list(f.defaults)) if f.defaults else ConstValue(None),
    "__kwdefaults__": lambda f: DictValue({k: (ConstValue(k), v) for k, v in f.kwdefaults.items()}) if f.kwdefaults else ConstValue(None),
    "__closure__": lambda f: TupleValue(list(f.closure)) if f.closure else ConstValue(None), "__globals__": lambda f: ScopeValue(f.scope),
    "__annotations__": lambda f: DictValue({}), "__type_params__": lambda f: TupleValue([]),
}


def documentation(code: types.CodeType) -> str | None:
    """The docstring, as MAKE_FUNCTION takes it from the constants."""
    first = code.co_consts[0] if code.co_consts else None
    return first if isinstance(first, str) else None


# -- what a call means (meanings.py) --------------------------------------------------------------------------------------
def enter(m: Machine, fn: FunctionValue, found: CallMeaning, args: Args, kwargs: Kwargs) -> Value:
    slots = bind(m, fn, args, kwargs)
    whole = m.part is not None and m.frames and getattr(fn.fn, marks.WHOLE, False)      # no frames: the region's own
    return m.run_whole(fn, slots) if whole else m.enter(fn, slots)


def refuse(m: Machine, fn: FunctionValue, found: CallMeaning, args: Args, kwargs: Kwargs) -> Value:
    raise Break(found.data, name=getattr(fn.fn, "__qualname__", fn.code.co_qualname), text=found.text)


def run_once(m: Machine, fn: FunctionValue, found: CallMeaning, args: Args, kwargs: Kwargs) -> Value:
    return m.constant_object(run_for_program(m, fn.fn, *map(m.known, args), **{k: m.known(v) for k, v in kwargs.items()}))     # type: ignore[arg-type]


def call_transformed(m: Machine, fn: FunctionValue, found: CallMeaning, args: Args, kwargs: Kwargs) -> Value:
    """torch's function transforms keep a stack of levels while they run: they are called for real, as a whole."""
    made = TRANSFORMED.get(fn.code.co_qualname)
    if made is None:
        raise Break("transform", name=f"by {fn.name}")
    cells = zip(fn.code.co_freevars, fn.closure)
    return made(m, {name: content for name, cell in cells if (content := cell.get(m)) is not None}).call(m, args, kwargs)


ON_FUNCTION: dict[Sort, Callable[[Machine, FunctionValue, CallMeaning, Args, Kwargs], Value]] = {
    Sort.INLINED: enter, Sort.BREAK: refuse, Sort.CONSTANT: run_once, Sort.TRANSFORM: call_transformed,
    Sort.BY_CODE: lambda m, fn, found, args, kwargs: found.data(m, fn, args, kwargs),
}


# of the wrapper of every dataclass's repr, which keeps a set of ids against endless recursion; taken from a class, as its home differs by version
@BY_CODE.row(dataclasses.make_dataclass("Any", ()).__repr__.__code__)
def call_recursive_repr(m: Machine, fn: FunctionValue, args: Args, kwargs: Kwargs) -> Value:
    return m.constant_object(fn.fn.__wrapped__).call(m, args, kwargs)       # type: ignore[union-attr]  # set by functools.wraps


@BY_CODE.row(functools.singledispatch(repr).__code__)       # type: ignore[attr-defined]  # of the wrapper that looks for the implementation
def call_dispatching(m: Machine, fn: FunctionValue, args: Args, kwargs: Kwargs) -> Value:
    if not args:
        return fn.inline(m, args, kwargs)
    return m.constant_object(fn.fn.dispatch(args[0].python_type())).call(m, args, kwargs)      # type: ignore[union-attr]  # it has one


def function_value(m: Machine, fn: types.FunctionType, source: Source, found: CallMeaning | None = None) -> FunctionValue:
    """A function of the user's; defaults and closure are looked at only when used."""
    defaults: Args = [LazyValue(value, Item(Attr(source, "__defaults__"), i)) for i, value in enumerate(fn.__defaults__ or ())]
    kwdefaults: Kwargs = {name: LazyValue(value, Item(Attr(source, "__kwdefaults__"), name)) for name, value in (fn.__kwdefaults__ or {}).items()}
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or ())
    closure = [m.cell(cell, Item(Attr(source, "__closure__"), i), name) for i, (name, cell) in enumerate(cells)]
    made = FunctionValue(fn, source, fn.__code__, fn.__globals__, defaults, kwdefaults, closure, fn.__name__)
    made.found = found
    return made


def bind(m: Machine, fn: FunctionValue, args: Args, kwargs: Kwargs) -> dict[str, Value]:
    """Arguments to slots, by Python's rules; a call that does not fit breaks, so that the real one raises."""
    code = fn.code
    names = code.co_varnames
    positional, keyword_only = code.co_argcount, code.co_kwonlyargcount
    if positional == len(args) and not kwargs and not keyword_only and not code.co_flags & 12:
        return dict(zip(names, args))
    slots = dict(zip(names[:positional], args))
    rest = dict(kwargs)
    for name in names[code.co_posonlyargcount:positional + keyword_only]:
        if name in rest:
            if name in slots:
                raise _does_not_fit(fn)
            slots[name] = rest.pop(name)
    _fill_defaults(fn, slots, names[:positional], names[positional:positional + keyword_only])
    extra = positional + keyword_only
    if code.co_flags & inspect.CO_VARARGS:
        slots[names[extra]] = TupleValue(list(args[positional:]))
        extra += 1
    elif len(args) > positional:
        raise _does_not_fit(fn)
    if code.co_flags & inspect.CO_VARKEYWORDS:
        slots[names[extra]] = DictValue({k: (ConstValue(k), v) for k, v in rest.items()})
    elif rest:
        raise _does_not_fit(fn)
    return slots


def _fill_defaults(fn: FunctionValue, slots: dict[str, Value], positional: tuple[str, ...], keyword_only: tuple[str, ...]) -> None:
    first = len(positional) - len(fn.defaults)
    for i, name in enumerate(positional):
        if name not in slots:
            if i < first:
                raise _does_not_fit(fn)
            slots[name] = fn.defaults[i - first]
    for name in keyword_only:
        if name not in slots:
            if name not in fn.kwdefaults:
                raise _does_not_fit(fn)
            slots[name] = fn.kwdefaults[name]


def _does_not_fit(fn: FunctionValue) -> Break:
    return Break("arguments", name=fn.describe())


class BoundMethodValue(Value):
    """A method bound to its object."""

    cls = types.MethodType
    always_true = True

    def __init__(self, fn: Value, owner: Value, source: Source | None = None, obj: Any = None, name: str = ""):
        self.fn, self.owner, self.source, self.obj, self.name = fn, owner, source, obj, name

    def describe(self) -> str:
        return f"method {self.name or self.fn.describe()}"

    def hash_key(self, m: Machine) -> Any:
        return (self.fn.hash_key(m), self.owner.hash_key(m))

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        """Each read of a method makes a new object; they are equal where function and object are the same."""
        if op not in ("==", "!=") or not isinstance(other, BoundMethodValue):
            return None
        return ConstValue((m.identical(self.owner, other.owner) and m.identical(self.fn, other.fn)) == (op == "=="))

    def getattr(self, m: Machine, name: str) -> Value:
        if name in ("__self__", "__func__"):
            return self.owner if name == "__self__" else self.fn
        return self.fn.getattr(m, name)

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        return self.fn.call(m, [self.owner, *args], kwargs)

    def rebuild(self, e: Emitter) -> str:
        if self.name:
            return f"{e.expr(self.owner)}.{self.name}"
        return f"{e.constant(types.MethodType)}({e.expr(self.fn)}, {e.expr(self.owner)})"


class FunctionBinder(Value):
    """function.__get__"""

    def __init__(self, fn: FunctionValue):
        self.fn = fn

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        unbound = args[0].is_constant() and args[0].constant() is None
        return self.fn if unbound else BoundMethodValue(self.fn, args[0])


CALLS.row(types.MethodType)(lambda m, args, kwargs: BoundMethodValue(args[0], args[1]))


class PartialValue(Value):
    """functools.partial(fn, *args, **kwargs)"""

    always_true = True

    def __init__(self, cls: type, fn: Value, args: Args, kwargs: Kwargs, source: Source | None = None, obj: Any = None):
        self.cls, self.fn, self.args, self.kwargs, self.source, self.obj = cls, fn, args, kwargs, source, obj

    def getattr(self, m: Machine, name: str) -> Value:
        if name == "func":
            return self.fn
        if name == "args":
            return TupleValue(self.args)
        if name == "keywords":
            return DictValue({k: (ConstValue(k), v) for k, v in self.kwargs.items()})
        written = m.effects.written(self, name)
        if written is not None and written is not DELETED:
            return written
        if not any(name in vars(base) for base in self.cls.__mro__) and not (self.obj is not None and hasattr(self.obj, name)):
            raise m.raise_real(AttributeError(f"{self.cls.__name__!r} object has no attribute {name!r}"))
        return super().getattr(m, name)

    def setattr(self, m: Machine, name: str, value: Value) -> None:
        m.effects.store_attr(self, name, value)

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        looked = {k: m.look(v) for k, v in self.kwargs.items()}
        return m.look(self.fn).call(m, [*map(m.look, self.args), *args], {**looked, **kwargs})

    def rebuild(self, e: Emitter) -> str:
        parts = [e.expr(self.fn), *map(e.expr, self.args), *(f"**{{{k!r}: {e.expr(v)}}}" for k, v in self.kwargs.items())]
        return e.with_attributes(self, e.assign(f"{e.constant(self.cls)}({', '.join(parts)})"))


def name_of(target: Any) -> str:
    name = target if isinstance(target, str) else getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or str(target)
    return name.replace("_VariableFunctionsClass.", "torch.").replace("TensorBase.", "Tensor.")


class BuiltinValue(CallableObject):
    """A builtin function or method: a row of CALLS, or executed when its arguments are known."""

    def describe(self) -> str:
        return f"builtin {getattr(self.fn, '__qualname__', self.fn)}"

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        found = meaning(self.fn)
        if found.sort is Sort.HANDLED:
            return call_row(m, self.fn, found.data, args, kwargs)
        of_class = isinstance(getattr(self.fn, "__self__", None), type)
        for native in NATIVE_CALLS.values() if of_class or isinstance(self.fn, NATIVE_METHODS) else ():
            if (result := native(m, self.fn, args, kwargs)) is not None:
                return result
        if found.sort is not Sort.PURE:
            raise Break(found.data or "call", name=name_of(self.fn), text=found.text)
        return fold(m, self.fn, *map(m.known, args), **{k: m.known(v) for k, v in kwargs.items()})


def call_row(m: Machine, fn: Any, row: Handler, args: Args, kwargs: Kwargs) -> Value:
    """A row of CALLS.  Where a function or a generator of the program breaks that the builtin runs, a Python loop takes its place, so that the
    break is a split like any other."""
    if fn not in polyfills.STEPWISE and fn not in polyfills.DRAINING:
        return row(m, args, kwargs)
    mark = m.checkpoint()
    try:
        return row(m, args, kwargs)
    except Break as stop:
        if not stop.inside or fn in polyfills.DRAINING and not (args and isinstance(args[0], IteratorValue)):
            raise
    m.rollback(mark)
    if fn in polyfills.DRAINING:
        return m.constant_object(polyfills.drained).call(m, [m.constant_object(fn), *args], kwargs)
    return m.constant_object(polyfills.STEPWISE[fn]).call(m, args, kwargs)


class NumpyFunction(CallableObject):
    """A function of NumPy: executed while capturing when its arguments are known and its result is a number."""

    words = "numpy.{self.fn.__name__}"

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        if any(m.look(value).python_type() is np.ndarray for value in (*args, *kwargs.values())):
            raise Break("numpy", name=self.describe())
        return fold(m, self.fn, *map(m.known, args), **{k: m.known(v) for k, v in kwargs.items()})


class BoundBuiltin(Value):
    """A builtin with its first arguments fixed, such as iterator.__next__."""

    words = "builtin {self.fn.__name__}"

    def __init__(self, fn: Callable[..., Any], first: Value):
        self.fn, self.first = fn, first

    def getattr(self, m: Machine, name: str) -> Value:
        return self.first if name == "__self__" else super().getattr(m, name)

    def call(self, m: Machine, args: Args, kwargs: Kwargs) -> Value:
        return BuiltinValue(self.fn).call(m, [self.first, *args], kwargs)

    def rebuild(self, e: Emitter) -> str:
        if self.fn is next:
            return f"{e.expr(self.first)}.__next__"
        if not isinstance(self.fn, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            raise Break("object", name=self.describe())
        return f"{e.expr(self.first)}.{self.fn.__name__}"


def make_function(m: Machine, code: types.CodeType, scope: dict[str, Any], flags: int, parts: list[Value]) -> FunctionValue:
    """MAKE_FUNCTION: `parts` are what `flags` say, in order."""
    taken: Iterator[Any] = iter(parts)
    defaults = next(taken).iterate(m) if flags & 1 else []
    kwdefaults = {k.constant(): v for k, v in next(taken).entries.values()} if flags & 2 else {}
    if flags & 4:
        next(taken)
    closure = next(taken).items if flags & 8 else []
    return FunctionValue(None, None, code, scope, list(defaults), kwdefaults, list(closure))
