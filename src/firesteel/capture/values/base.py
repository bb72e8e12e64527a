"""Value: what the machine knows of one Python object while it executes a program symbolically.

A Value answers the questions of the bytecode (call, attribute, item, operator, truth, iteration).  Every default
answer here is a `Break`: "this cannot be captured", so an unknown object is safe by construction.  What always holds:

1. A Value with a `source` stands for an object that existed before the region; its text recreates it.
2. A Value without one was made inside; `rebuild` writes Python that makes it for real.
3. An operation computes first and mutates last: when it raises Break, nothing has changed.
4. An operation may return PENDING: it pushed a frame, whose return value will be the result.
5. Only objects of Python that are mutable have mutable Values; every change goes through `m.effects`.

    value.getattr(m, "shape").getitem(m, ConstValue(0))
"""
from __future__ import annotations

import types
from typing import Any, TypeAlias

from firesteel.capture.python_operators import OPERATORS
from firesteel.errors import Break

Machine: TypeAlias = Any        # protocols.py, which builds on this file, says what these have
Emitter: TypeAlias = Any


class Pending:
    """The type of PENDING: "a frame was pushed, its return value is the result"."""

    def __repr__(self) -> str:
        return "PENDING"


PENDING: Any = Pending()


class UserRaise(Exception):
    """The captured program raises; `value` is the Value of the exception object."""

    def __init__(self, value: Value):
        self.value = value
        super().__init__(repr(value))


class CannotRebuild(Exception):
    """A live Value cannot be written as Python at a break: the step that made it must break instead."""

    def __init__(self, value: Value, birth: int):
        self.value, self.birth = value, birth
        super().__init__(repr(value))


class Value:
    """A symbolic Python object."""

    obj: Any = None                 # the real object that it stands for, where there is one now
    cls: Any = None                 # its Python class, where that is known
    always_true = False             # as most objects are
    is_argument = False             # do operators of tensors take it for a number?
    is_either = False               # is it a number or a tensor (either.py)?
    words = ""                      # what messages call it, over {self}
    form = ""                       # the Python that makes it, over its attributes
    source: Any = None
    holder: Value | None = None     # the object whose builtin part this is; see natives.py
    watched = False                 # has the program taken a weak reference to it?
    asks_its_class = False          # do operators call methods of a class of the user's?

    # -- what it is ------------------------------------------------------------------------------------------------
    def builtin_alone(self) -> Value:
        """What counts where a number or a text is needed."""
        return self

    def python_type(self) -> type:
        """The type that type(x) would give."""
        if self.cls is not None:
            return self.cls
        raise Break("operator", name="type()", value=self.describe())

    def describe(self) -> str:
        """A few words for messages."""
        return self.words.format(self=self) if self.words else type(self).__name__.removesuffix("Value")

    def __format__(self, spec: str) -> str:
        return self.describe()

    def is_constant(self) -> bool:
        """Is its Python object known exactly and immutable (numbers, strings, dtypes, tuples of those, ...)?"""
        return False

    def constant(self) -> Any:
        raise Break("constant", value=self.describe())

    def identity(self) -> Any:
        """The real object, where there is one now; else None."""
        return self.obj

    def hash_key(self, m: Machine) -> Any:
        """A hashable that is equal for two Values exactly when Python's == and hash say so."""
        raise Break("operator", name="hash()", value=self.describe())

    def as_key(self, m: Machine, container: Any) -> Value:
        """The Value to look for in a dict or set."""
        return self

    def as_index(self, m: Machine, alone: bool) -> Value:
        """The Value to index a tensor with, or with a tuple of which this is a part."""
        return self

    def use(self, m: Machine) -> None:
        """Something depends on which object it is: guards that, where being looked at did not."""

    # -- operations ------------------------------------------------------------------------------------------------
    def truth(self, m: Machine) -> Any:
        """A bool, or PENDING where a user's method decides."""
        if self.always_true:
            return True
        raise Break("operator", name="bool()", value=self.describe())

    def decided_by(self, m: Machine) -> Value:
        """The tensor or number that run time knows, which decides a branch on this."""
        return self

    def call(self, m: Machine, args: list[Value], kwargs: dict[str, Value]) -> Value:
        raise Break("call", name=self.describe())

    def enter(self, m: Machine) -> tuple[Value, Value]:
        """What a `with` statement puts on the stack: the exit function and the block's value."""
        raise Break("context", name=self.describe())

    def getattr(self, m: Machine, name: str) -> Value:
        raise Break("attribute", name=name, value=self.describe())

    def setattr(self, m: Machine, name: str, value: Value) -> Value | None:
        raise Break("store", name=f"attribute {name}", value=self.describe())

    def delattr(self, m: Machine, name: str) -> Value | None:
        raise Break("store", name=f"deletion of {name}", value=self.describe())

    def getitem(self, m: Machine, key: Value) -> Value:
        raise Break("operator", name="[]", value=self.describe())

    def setitem(self, m: Machine, key: Value, value: Value) -> None:
        raise Break("store", name="an item", value=self.describe())

    def delitem(self, m: Machine, key: Value) -> None:
        raise Break("store", name="deletion of an item", value=self.describe())

    def binary(self, m: Machine, op: str, other: Value, reflected: bool = False) -> Value | None:
        """self op other (other op self if reflected); None stands for NotImplemented."""
        return None

    def inplace(self, m: Machine, op: str, other: Value) -> Value | None:
        """self op= other; None where the plain operator serves."""
        return None

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        """self op other for < <= == != > >=; None stands for NotImplemented."""
        return None

    def unary(self, m: Machine, op: str) -> Value:
        raise Break("operator", name=op, value=self.describe())

    def contains(self, m: Machine, item: Value) -> Value:
        raise Break("operator", name="in", value=self.describe())

    def length(self, m: Machine) -> Value:
        raise Break("operator", name="len()", value=self.describe())

    def iterate(self, m: Machine) -> list[Value]:
        """All elements at once; for unpacking, and for iterators over it."""
        raise Break("iterate", value=self.describe())

    def iterator(self, m: Machine) -> Value:
        raise Break("iterate", value=self.describe())

    def next(self, m: Machine) -> Value | None:
        """For iterators: the next element, advancing; None at the end."""
        raise Break("iterate", value=self.describe())

    size_name = ""

    def size_now(self) -> int:
        """Of dicts and sets, which must not change their size while they are iterated over."""
        return 0

    # -- leaving the machine ---------------------------------------------------------------------------------------
    def as_arg(self, m: Machine) -> tuple[Any, Any]:
        """(argument of a graph node, object for the abstract call)."""
        raise Break("argument", name=self.describe())

    def beside(self, m: Machine, others: list[Value]) -> Value:
        """What torch is given of it beside other arguments."""
        return self

    def as_output(self, m: Machine) -> Any:
        """The node that gives it, for what leaves the graph."""
        return self.as_arg(m)[0]

    def rebuild(self, e: Emitter) -> str:
        """Python text that makes the object; called at most once an object by `e.expr`."""
        if not self.form:
            raise Break("object", name=self.describe())
        return self.form.format_map(WrittenParts(self, e))

    def __repr__(self) -> str:
        return f"<{self.describe()}{'' if self.source is None else f' from {self.source}'}>"


class WrittenParts:
    """The attributes of a Value as Python text, for its `form`."""

    def __init__(self, value: Value, e: Emitter):
        self.value, self.e = value, e

    def __getitem__(self, name: str) -> str:
        """A Value as what makes it, several separated by commas, a name as it is, another object as a constant."""
        part = getattr(self.value, name)
        if isinstance(part, (list, tuple)):
            return ", ".join(map(self.e.expr, part))
        return self.e.expr(part) if isinstance(part, Value) else part if isinstance(part, str) else self.e.constant(part)


class NullValue(Value):
    """The NULL that CPython puts on the stack beside a callable; also the mark of an unbound local."""

    words = "NULL"


NULL = NullValue()


class LastiValue(Value):
    """The place of an exception, which only tracebacks read."""


LASTI = LastiValue()


class HandledValue(Value):
    """What PUSH_EXC_INFO leaves below the exception: the one handled before."""

    def __init__(self, previous: Value, current: Value):
        self.previous, self.current = previous, current
        self.over = False       # has POP_EXCEPT taken (a copy of) it?


class RealObject(Value):
    """An object that existed before the region, or is known exactly, compared by identity."""

    def __init__(self, obj: Any, source: Any):
        self.obj, self.source = obj, source

    def python_type(self) -> type:
        return type(self.obj)

    def hash_key(self, m: Machine) -> Any:
        return ObjectKey(self.obj)


class LazyValue(Value):
    """An object of the user that nobody has looked at yet: no guard, no placeholder.  `m.look` replaces it."""

    def __init__(self, obj: Any, source: Any):
        self.obj, self.source = obj, source

    def describe(self) -> str:
        return f"unread {type(self.obj).__name__}"


class Unjoinable(Exception):
    """Found out too late to go back: the capture starts again without joining the branch at this step (joins.py)."""

    def __init__(self, step: int):
        self.step = step


class Undecided(LazyValue):
    """What a branch on data leaves in a place of an object: only the run function knows which.  Reading it makes the branch a break."""

    def __init__(self, step: int, condition: Value, when_false: Value, when_true: Value):
        super().__init__(None, None)
        self.step, self.condition, self.when_false, self.when_true = step, condition, when_false, when_true

    def rebuild(self, e: Emitter) -> str:
        return f"({e.expr(self.when_true)} if {e.graph_output(self.condition)} else {e.expr(self.when_false)})"


class OpaqueValue(RealObject):
    """An object that is only passed around; every operation on it is a Break, executed for real."""

    def describe(self) -> str:
        return f"object of type {type(self.obj).__qualname__}"

    def truth(self, m: Machine) -> Any:
        raise Break("object", name=type(self.obj).__qualname__)

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        if type(self.obj).__eq__ is not object.__eq__:
            raise Break("operator", name=op, value=self.describe())
        return None

    def getattr(self, m: Machine, name: str) -> Value:
        return m.attribute_of_opaque(self, name) or super().getattr(m, name)


class FixedObject(OpaqueValue):
    """An object that never changes, such as a type variable or a generic alias: known exactly, but of no use to a graph."""

    def is_constant(self) -> bool:
        return True

    def constant(self) -> Any:
        return self.obj

    def truth(self, m: Machine) -> bool:
        return True

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        return m.fresh(m.run_real(OPERATORS[op], self.obj, other.constant())) if other.is_constant() else None

    def getattr(self, m: Machine, name: str) -> Value:
        found = getattr(type(self.obj), name, None)
        if isinstance(found, types.MethodDescriptorType):
            return m.bound_builtin(found, self)
        return m.static_attribute(self.obj, name)

    def getitem(self, m: Machine, key: Value) -> Value:
        return m.constant_object(self.obj[m.known(key)])


class CallableObject(Value):
    """A callable that is known as an object and not by its code: a builtin, a function of torch, a cached function."""

    always_true = True
    form = "{fn}"

    def __init__(self, fn: Any, source: Any = None):
        self.fn, self.source = fn, source

    def python_type(self) -> type:
        return type(self.fn)

    def identity(self) -> Any:
        return self.fn

    def hash_key(self, m: Machine) -> Any:
        return self.fn if isinstance(self.fn, types.MethodWrapperType) else ObjectKey(self.fn)

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        """A bound builtin is a new object at each lookup, equal to the last: torch.Tensor.ndim.__get__."""
        known = op in ("==", "!=") and isinstance(other, CallableObject)
        return m.fresh(m.run_real(OPERATORS[op], self.fn, other.fn)) if known else None     # type: ignore[attr-defined]

    def getattr(self, m: Machine, name: str) -> Value:
        return m.static_attribute(self.fn, name)


class MethodOfOwner(Value):
    """A method bound to its object: each read makes a new one, and two are equal where owner and name are the same."""

    always_true = True
    form = "{owner}.{name}"

    def __init__(self, owner: Any, name: str, fn: Any = None):
        self.owner, self.name, self.fn = owner, name, fn        # fn(machine, owner, args, kwargs), where the class has no call of its own

    def call(self, m: Machine, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return super().call(m, args, kwargs) if self.fn is None else self.fn(m, self.owner, args, kwargs)

    def compare(self, m: Machine, op: str, other: Value) -> Value | None:
        if op not in ("==", "!=") or type(other) is not type(self):
            return None
        return m.fresh((self.name == other.name and m.identical(self.owner, other.owner)) == (op == "=="))


class ObjectKey:
    """Hash and equality by identity, for dict keys that are objects without an own __eq__."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any):
        self.obj = obj

    def __hash__(self) -> int:
        return id(self.obj)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectKey) and other.obj is self.obj


class IdKey(ObjectKey):
    """The id of an object as a key."""

    __slots__ = ()
