"""Class statements inside of the captured function: metaclasses, hooks of class making, and the classes of Python's libraries."""
# ruff: noqa: PLW1641, F821  (the constructs are what is tested)
import abc
import dataclasses
import enum
import functools
import typing
from typing import Generic, NamedTuple, Protocol, TypeVar

import pytest
import torch
from harness import Counting, capture, make_test, same

one = functools.partial(make_test, fullgraph=True)
T = TypeVar("T")
LOG: list[str] = []


@one
def test_protocol(x):
    class Goes(Protocol):
        def go(self, x): ...

    class Car(Goes):
        def go(self, x):
            return x + 1

    return Car().go(x)


@one
def test_runtime_protocol_with_members_that_are_data(x):
    @typing.runtime_checkable
    class Named(Protocol):
        name: str

        def hello(self): ...

    class Person:
        def __init__(self, name):
            self.name = name

        def hello(self):
            return 1

    class Stone:
        pass

    return x + 1 if isinstance(Person("a"), Named) and not isinstance(Stone(), Named) else x


@one
def test_generic_class_and_its_alias(x):
    class Box(Generic[T]):
        def __init__(self, content):
            self.content = content

        def get(self):
            return self.content * 2

    box = Box[int](x)
    return box.get() + Box(x).get(), box.__orig_class__.__args__, len(Box.__parameters__)


class Outside(Generic[T]):
    def __init__(self, content):
        self.content = content


@one
def test_alias_of_a_class_made_outside(x):
    return Outside[int](x).content + 1


@one
def test_init_subclass_runs_once_with_its_settings(x):
    names, registry = [], {}

    class Base:
        def __init_subclass__(cls, scale=1, **settings):
            super().__init_subclass__(**settings)
            cls.scale = scale
            names.append(cls.__name__)
            registry[cls.__name__] = cls

    class Double(Base, scale=2):
        def run(self, x):
            return x * self.scale

    class Triple(Double, scale=3):
        def run(self, x):
            return super().run(x) + 1

    return sum(cls().run(x) for cls in registry.values()), names


class Noted:
    def __init_subclass__(cls, **settings):
        LOG.append(cls.__name__)


def test_init_subclass_of_a_class_made_outside():
    def f(x):
        class Child(Noted, flag=1):
            k = 3
        return x * Child.k

    LOG.clear()
    assert capture(f, fullgraph=True)[0](torch.ones(2))[0] == 3 and LOG == ["Child"]


@one
def test_init_subclass_of_an_abstract_base(x):
    made = []

    class Base(abc.ABC):
        def __init_subclass__(cls):
            made.append(cls)

        @abc.abstractmethod
        def run(self, x): ...

    class A(Base):
        def run(self, x):
            return x + 1

    return sum(cls().run(x) for cls in made)


@one
def test_metaclass_methods_in_order(x):
    said, offset = [], 4

    class Meta(type):
        def __new__(mcs, name, bases, namespace, **settings):
            said.append(("new", name, settings))
            return super().__new__(mcs, name, bases, {**namespace, "added": 5})

        def __init__(cls, name, bases, namespace, **settings):
            said.append(("init", name))
            super().__init__(name, bases, namespace)

        def __getitem__(cls, key):
            return key * 3

        def __iter__(cls):
            return iter([1, 2])

        def __contains__(cls, item):
            return item == 5

        def __len__(cls):
            return offset

        @property
        def offset(cls):
            return offset

    class A(metaclass=Meta, flag=True):
        pass

    class B(A):
        pass

    return x * B[2] + sum(B) + len(A) + A.offset + B.added, 5 in A, said


@one
def test_metaclass_that_keeps_one_instance(x):
    class Single(type):
        made = {}

        def __call__(cls, *args):
            if cls not in cls.made:
                cls.made[cls] = super().__call__(*args)
            return cls.made[cls]

    class Config(metaclass=Single):
        def __init__(self, value):
            self.value = value

    return Config(x).value + 1 if Config(x) is Config(x * 2) else x


@one
def test_metaclass_that_prepares_the_namespace(x):
    class Meta(type):
        @classmethod
        def __prepare__(mcs, name, bases):
            return {"given": 7}

    class A(metaclass=Meta):
        k = given

    return x * A.k


@one
def test_metaclass_over_abcmeta(x):
    class Meta(abc.ABCMeta):
        def __new__(mcs, name, bases, namespace):
            return super().__new__(mcs, name, bases, {**namespace, "k": 2})

    class A(metaclass=Meta):
        @abc.abstractmethod
        def f(self): ...

    class B(A):
        def f(self):
            return self.k

    try:
        A()
    except TypeError:
        x = x + 1
    return x * B().f()


def test_class_whose_making_has_effects_is_made_once():
    """It leaves the region, so the statement is executed as it is."""
    class Meta(type):
        def __new__(mcs, name, bases, namespace):
            LOG.append(name)
            return super().__new__(mcs, name, bases, namespace)

    def f(x):
        class A(metaclass=Meta):
            k = 2
        return x * A.k, A

    LOG.clear()
    compiled, backend = capture(f)
    out, cls = compiled(torch.ones(3))
    assert LOG == ["A"] and cls.k == 2 and type(cls) is Meta and out[0] == 2
    assert len(backend.graphs) == 1


@one
def test_set_name_and_descriptors_made_in_the_body(x):
    """Once, the descriptor was taken for a plain attribute: the instance's own value came back."""
    class Field:
        def __init__(self, default):
            self.default = default

        def __set_name__(self, owner, name):
            self.name = name
            owner.fields = (*getattr(owner, "fields", ()), name)

        def __get__(self, obj, cls=None):
            return self if obj is None else obj.__dict__.get(self.name, self.default) * 2

        def __set__(self, obj, value):
            obj.__dict__[self.name] = value + 1

    class A:
        a = Field(1)
        b = Field(2)

    obj = A()
    obj.a = x
    return obj.a + obj.b, A.fields


@one
def test_named_tuple(x):
    class Pair(NamedTuple):
        a: torch.Tensor
        b: int = 2

        def product(self):
            return self.a * self.b

    pair = Pair(x)
    a, b = pair
    return pair.product() + a * b, pair._replace(b=5).product(), Pair._fields


@one
def test_typed_dict(x):
    class Sizes(typing.TypedDict):
        a: int

    return x * Sizes(a=4)["a"]


@one
def test_enums(x):
    class Op(enum.Enum):
        ADD = "+"
        MUL = "*"

        def run(self, a, b):
            return a + b if self is Op.ADD else a * b

    class Level(enum.IntEnum):
        LOW = 1
        HIGH = enum.auto()

    class Flag(enum.Flag):
        A = enum.auto()
        B = enum.auto()

    return Op.ADD.run(x, 1) + Op("*").run(x, Level.HIGH), [o.name for o in Op], (Flag.A | Flag.B).value


def test_enum_member_that_leaves_is_one_of_the_class_that_leaves():
    def f(x):
        class Kind(enum.Enum):
            A = 1
        return x + 1, Kind.A, Kind

    out = capture(f, fullgraph=True)[0](torch.ones(2))
    assert out[1] is out[2].A


@one
def test_autograd_function_made_inside(x):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    return Double.apply(x)


@make_test(graphs=2)
def test_autograd_function_with_a_closure_breaks_once(x):
    k = 3.0
    y = x + 1

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * k

        @staticmethod
        def backward(ctx, grad):
            return grad * k

    return y * 2


@one
def test_subclass_of_tensor(x):
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            out = super().__torch_function__(func, types, args, kwargs or {})
            return out * 2 if func is torch.sin else out

    return torch.sin(x.as_subclass(Loud)).as_subclass(torch.Tensor)


@one
def test_cached_property(x):
    calls = []

    class A:
        @functools.cached_property
        def k(self):
            calls.append(1)
            return 5

    a = A()
    return x * a.k * a.k, calls


@one
def test_dataclass_over_a_generic_base(x):
    class Base(Generic[T]):
        pass

    @dataclasses.dataclass
    class D(Base[int]):
        a: int = 2
        b: list = dataclasses.field(default_factory=list)

    d = D(a=3)
    d.b.append(1)
    return x * d.a + len(d.b), dataclasses.asdict(D())


def test_class_that_leaves_has_its_bases_and_settings():
    def f(x):
        class Box(Generic[T]):
            def get(self):
                return 1

        class P(NamedTuple):
            a: int = 3
        return x + 1, Box, P

    compiled, backend = capture(f, fullgraph=True)
    assert isinstance(backend, Counting)
    _, box, pair = compiled(torch.ones(2))
    assert box.__orig_bases__ == (Generic[T],) and box[int]().get() == 1 and pair().a == 3


# -- classes made outside whose attributes the program sets -------------------------------------------------------------
class Counted:
    count = 0

    def get(self):
        return 1


class CountedMore(Counted):
    pass


@pytest.fixture
def counted():
    yield
    Counted.count, Counted.get = 0, original_get
    for name in ("count", "added"):
        for cls in (Counted, CountedMore):
            if name in vars(cls) and (cls, name) != (Counted, "count"):
                delattr(cls, name)


original_get = Counted.get


def sets_a_number(x):
    Counted.count += 1
    obj = CountedMore()
    obj.count += 10
    return x * CountedMore.count, obj.count, CountedMore().count


def adds_an_attribute(x):
    Counted.added = 5
    CountedMore.count = 7
    return x * CountedMore().added, CountedMore().count, Counted().count


def exchanges_a_method(x):
    Counted.get = lambda self: 7
    return x * CountedMore().get()


@pytest.mark.parametrize("program", [sets_a_number, adds_an_attribute, exchanges_a_method])
def test_instances_see_what_was_set_on_their_class(program, counted):
    """Once, instances were given the value from before the region."""
    compiled, _ = capture(program, fullgraph=True)
    ours = [compiled(torch.ones(2)) for _ in range(2)]
    seen = (Counted.count, CountedMore.count)
    Counted.count = 0
    same(ours, [program(torch.ones(2)) for _ in range(2)])
    assert (Counted.count, CountedMore.count) == seen


class Slotted:
    __slots__ = ("a",)


@one
def test_objects_without_a_dict_have_no_other_attributes(x):
    obj = Slotted()
    obj.a = x
    try:
        obj.b = 1
    except AttributeError:
        return obj.a + 1
    return x


class Whole:
    def __init__(self, n):
        self.n = n

    def __index__(self):
        return self.n

    def __round__(self, digits=0):
        return 10 * self.n + digits

    def __divmod__(self, other):
        return self.n, other


@one
def test_numbers_of_the_users_kind(x):
    return x * round(Whole(3), 2) + divmod(Whole(4), 5)[1], list(range(Whole(1), Whole(3)))
