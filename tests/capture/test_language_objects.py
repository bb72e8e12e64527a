"""User classes: attributes, descriptors, operators, containers, construction; one graph each, eager's values."""
# ruff: noqa: B007, B009, B010, SLOT000, PLW1641  (the constructs are what is tested)
import abc
import collections
import dataclasses
import enum
import functools
import threading
import typing

import numpy as np
import torch
from harness import capture, make_test

import firesteel as fs

one = functools.partial(make_test, fullgraph=True)


class Vector:
    def __init__(self, *parts):
        self.parts = list(parts)

    def __add__(self, other):
        if not isinstance(other, Vector):
            return NotImplemented
        return Vector(*[a + b for a, b in zip(self.parts, other.parts)])

    def __radd__(self, other):
        return Vector(*[other + a for a in self.parts])

    def __mul__(self, k):
        return Vector(*[a * k for a in self.parts])

    __rmul__ = __mul__

    def __iadd__(self, other):
        self.parts = [a + other for a in self.parts]
        return self

    def __neg__(self):
        return Vector(*[-a for a in self.parts])

    def __abs__(self):
        return sum(self.parts)

    def __matmul__(self, other):
        return sum(a * b for a, b in zip(self.parts, other.parts))

    def __getitem__(self, i):
        return self.parts[i]

    def __setitem__(self, i, value):
        self.parts[i] = value

    def __delitem__(self, i):
        del self.parts[i]

    def __len__(self):
        return len(self.parts)

    def __iter__(self):
        return iter(self.parts)

    def __contains__(self, item):
        return any(item is p for p in self.parts)

    def __eq__(self, other):
        return isinstance(other, Vector) and len(self) == len(other)

    def __lt__(self, other):
        return len(self) < len(other)

    def __hash__(self):
        return hash(len(self.parts))

    def __bool__(self):
        return len(self.parts) > 0

    def __call__(self, k, *, bias=0):
        return self * k + Vector(*[bias] * len(self))

    def __repr__(self):
        return f"Vector of {len(self)}"

    def __reversed__(self):
        return reversed(self.parts)

    def __int__(self):
        return len(self.parts)

    def __index__(self):
        return len(self.parts)

    def __format__(self, spec):
        return f"<{spec}>"


@one
def test_operators_of_user_classes(x):
    v, w = Vector(x, 2), Vector(1, x)
    total = v + w
    scaled = 3 * v * 2
    v += 5
    return (total.parts, scaled.parts, v.parts, (-w).parts, abs(w), v @ w, (1 + w).parts, v == w, v != w, v < w, w > v, bool(Vector()),
            sorted([Vector(1, 2), Vector(1)])[0].parts)


@one
def test_container_protocol_of_user_classes(x):
    v = Vector(x, x + 1, 3)
    v[2] = 7
    del v[0]
    first, second = v
    text = f"{v} {v!r} {v:spec}"
    return len(v), list(v), x in v, v[-1], v[0:1], [*v], first, second, text, list(reversed(v)), int(v), [1, 2, 3][v], v(2, bias=1).parts


@one
def test_user_keys_in_dicts_and_sets(x):
    table = {Vector(1, 2): x, Vector(1): x + 1}
    return table[Vector(5, 6)], len({Vector(1), Vector(2)}), Vector(3) in table


class OldIterable:
    def __getitem__(self, i):
        if i >= 3:
            raise IndexError
        return i * 2


class Countdown:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n


class Lazy:
    def __iter__(self):
        yield 1
        yield 2


@one
def test_iteration_protocols(x):
    return [x * i for i in OldIterable()], list(Countdown(3)), sum(Lazy()), 2 in Lazy(), 4 in OldIterable(), dict(zip("ab", Countdown(2)))


class Celsius:
    def __get__(self, obj, owner):
        return owner if obj is None else obj.kelvin - 273

    def __set__(self, obj, value):
        obj.kelvin = value + 273


class Named:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, obj, owner):
        return getattr(obj, self.name, 10)


class Temperature:
    celsius = Celsius()
    label = Named()
    __slots__ = ("kelvin", "_label")

    def __init__(self, kelvin):
        self.kelvin = kelvin

    @property
    def double(self):
        return self.kelvin * 2

    @double.setter
    def double(self, value):
        self.kelvin = value / 2

    @double.deleter
    def double(self):
        self.kelvin = 0

    @functools.cached_property
    def never(self):
        return 1


@one
def test_properties_slots_and_descriptors(x):
    t = Temperature(x)
    before = t.double
    t.double = x * 8
    t.celsius = t.celsius + 1
    label = t.label
    t._label = "named"
    result = t.kelvin
    del t.double
    return before, result, label, t.label, t.kelvin, hasattr(t, "missing"), Temperature.celsius is Temperature


class Cached:
    def __init__(self, x):
        self.x, self.count = x, 0

    @functools.cached_property
    def value(self):
        self.count += 1
        return self.x * 2


@one
def test_cached_property(x):
    c = Cached(x)
    return c.value + c.value, c.count, "value" in vars(c)


class Dynamic:
    def __init__(self):
        self.known = 1

    def __getattr__(self, name):
        if name.startswith("get_"):
            return lambda t: t * len(name)
        raise AttributeError(name)

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value if name == "known" else value + 1)

    def __delattr__(self, name):
        object.__setattr__(self, "deleted_count", 5)
        object.__delattr__(self, name)


class Intercepted:
    def __init__(self):
        self.plain = 2

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        return value * 10 if name == "plain" else value


@one
def test_getattr_setattr_delattr(x):
    d = Dynamic()
    d.other = 4
    d.gone = 1
    del d.gone
    names = [hasattr(d, "known"), hasattr(d, "nothing"), getattr(d, "nothing", "default"), hasattr(d, "gone")]
    return d.get_it(x), d.other, names, Intercepted().plain, d.deleted_count


class TwiceSet:
    @property
    def twice(self):
        return self.kept

    @twice.setter
    def twice(self, value):
        self.kept = value * 2


@one
def test_deleting_and_setting_by_methods_of_the_user_in_a_loop(x):
    """What is called by them leaves nothing on the loop's stack."""
    d, net, seen = Dynamic(), torch.nn.Linear(2, 2), TwiceSet()
    for number in (1, 2):
        d.gone = number
        delattr(d, "gone")
        delattr(net, "weight")
        net.weight = x * number
        object.__setattr__(seen, "twice", number)
    return d.deleted_count, net.weight, seen.kept


class Base:
    registry = []

    def __init_subclass__(cls, **kwargs):
        cls.registered = True

    def __new__(cls, *args, **kwargs):
        made = super().__new__(cls)
        made.born = cls.__name__
        return made

    def __init__(self, x):
        self.x = x

    def describe(self):
        return "base", self.x

    @classmethod
    def build(cls, x):
        return cls(x)


class Middle(Base):
    def describe(self):
        return ("middle", *super().describe())


class Other(Base):
    def describe(self):
        return ("other", *super().describe())


class Bottom(Middle, Other):
    def __init__(self, x, extra):
        super().__init__(x + extra)
        self.extra = extra

    def describe(self):
        return ("bottom", *super(Bottom, self).describe())


@one
def test_new_init_super_and_mro(x):
    b = Bottom(x, 2)
    return b.describe(), b.born, b.registered, Other.build(x).describe(), [c.__name__ for c in Bottom.__mro__], issubclass(Bottom, Base)


class Single:
    instance = None

    def __new__(cls, value):
        made = object.__new__(cls)
        made.value = value
        return made


@one
def test_new_without_init(x):
    return Single(x + 1).value


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...

    @property
    def double(self):
        return self.area() * 2


class Square(Shape):
    def __init__(self, side):
        self.side = side

    def area(self):
        return self.side * self.side


@one
def test_abstract_classes(x):
    s = Square(x)
    try:
        Shape()
    except TypeError:
        return s.double, isinstance(s, Shape)


# -- dataclasses, named tuples, enums -----------------------------------------------------------------------------------
@dataclasses.dataclass
class Config:
    width: int
    items: list = dataclasses.field(default_factory=list)
    name: str = "plain"
    derived: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.derived = self.width * 2


@dataclasses.dataclass(frozen=True, order=True)
class Frozen:
    a: int
    b: float = 1.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Slotted:
    left: object
    right: object = None


@one
def test_dataclasses(x):
    c = Config(3)
    c.items.append(x)
    d = dataclasses.replace(c, width=5)
    f, g = Frozen(1), Frozen(1, 2.0)
    try:
        f.a = 5
    except dataclasses.FrozenInstanceError:
        caught = True
    s = Slotted(left=x)
    s.right = 3
    return (x * c.derived, d.width, d.derived, len(d.items), f == Frozen(1), f < g, hash(f) == hash(Frozen(1)), caught, s.left, s.right,
            [field.name for field in dataclasses.fields(c)], dataclasses.is_dataclass(c), repr(g), dataclasses.asdict(f), dataclasses.astuple(g))


class Typed(typing.NamedTuple):
    a: object
    b: int = 3

    def total(self):
        return self.a + self.b


Plain = collections.namedtuple("Plain", "left right", defaults=[9])


@one
def test_named_tuples(x):
    t, p = Typed(x), Plain(x)
    left, right = p
    return (t.total(), t._replace(b=5), p.right, p._asdict(), left, right, t[1], t._fields, len(p), Plain._make([1, 2]), Typed(a=x, b=1).b,
            isinstance(t, tuple), p == (x, 9) if False else p[1] == 9)


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    @property
    def warm(self):
        return self is Color.RED

    @classmethod
    def parse(cls, text):
        return cls[text.upper()]


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 5


class Perm(enum.Flag):
    R = enum.auto()
    W = enum.auto()


class Kind(str, enum.Enum):
    SUM = "sum"


@one
def test_enums(x):
    table = {Color.RED: x, Color.BLUE: x + 1}
    return (table[Color(2)], Color.parse("red").warm, Color.RED.name, Color.RED.value, [c.name for c in Color], x * Level.HIGH,
            Level.LOW < Level.HIGH, bool(Perm.R & Perm.W), (Perm.R | Perm.W).value, Perm.R in (Perm.R | Perm.W), Kind.SUM == "sum", len(Color),
            Color.RED in table, "RED" in Color.__members__, isinstance(Color.RED, Color), Color["BLUE"] is Color.BLUE)


# -- introspection ------------------------------------------------------------------------------------------------------
@one
def test_introspection(x):
    v = Vector(x)
    setattr(v, "extra", 3)
    has = hasattr(v, "extra")
    delattr(v, "extra")
    return (x + 1, has, hasattr(v, "extra"), getattr(v, "extra", x), type(v) is Vector, type(v).__name__, callable(v), callable(3), callable(len),
            isinstance(v, (int, Vector)), issubclass(Vector, object), sorted(vars(v)), v.__class__.__name__, "parts" in dir(v), v is v,
            isinstance(x, torch.Tensor), Vector.__len__(v), type(x).__name__, isinstance(3, int | str), v.__dict__.keys() == {"parts"})


@one
def test_type_hints_are_no_ops(x):
    items: list[torch.Tensor] = []
    count: int
    items.append(typing.cast(torch.Tensor, x))
    T = typing.TypeVar("T")

    def identity(value: T, more: typing.Optional[int] = None) -> T:  # noqa: UP045
        return value
    count = 3
    return identity(items[0]) * count


# -- subclasses of builtins ---------------------------------------------------------------------------------------------
class Bag(dict):
    def __missing__(self, key):
        return key * 2

    def total(self):
        return sum(self.values())


class Stack(list):
    def push(self, item):
        self.append(item)
        return self


class Text(str):
    def shout(self):
        return self.upper() + "!"


class UserBag(collections.UserDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value + 1)


@one
def test_subclasses_of_builtins(x):
    b = Bag(a=x, b=2)
    s = Stack([1]).push(x).push(3)
    u = UserBag({"k": x})
    u["l"] = 2
    return b["a"], b["zz"], b.total(), len(s), s[1], s[::2], Text("hi").shout(), u["k"], u["l"], list(u), isinstance(s, list)


class WithMethods:
    def method(self):
        return 1

    @classmethod
    def of_class(cls):
        return 2


FIRST, SECOND, ITEMS = WithMethods(), WithMethods(), [1]
READ_BEFORE = FIRST.method


@one
def test_methods_are_equal_that_are_bound_to_the_same_object(x):
    same = (FIRST.method == FIRST.method, FIRST.method in [SECOND.method, FIRST.method], FIRST.method == READ_BEFORE, ITEMS.append == ITEMS.append,
            WithMethods.of_class == FIRST.of_class, x.sin == x.sin, {FIRST.method: 1}.get(READ_BEFORE) == 1)
    other = (FIRST.method == SECOND.method, FIRST.method == FIRST.of_class, ITEMS.append == [].append, ITEMS.append == ITEMS.pop, x.sin == x.cos)
    return x + sum(same) - 10 * sum(other)


LOCAL = threading.local()
LOCAL.factor, LOCAL.options = 2, {"shift": 3}


class Defaults(threading.local):
    def __init__(self):
        self.factor = 5


DEFAULTS = Defaults()


@one
def test_the_dict_of_a_thread_local(x):
    own = LOCAL.__dict__
    return (x * own["factor"] + own["options"]["shift"], own.get("missing", 7), "factor" in vars(LOCAL), len(own), list(own), own is LOCAL.__dict__,
            DEFAULTS.__dict__["factor"], hasattr(LOCAL, "missing"))


def test_the_dict_of_a_thread_local_is_that_of_the_calling_thread():
    compiled, counting = capture(lambda x: x * LOCAL.__dict__["factor"])
    x, found = torch.ones(2), []

    def elsewhere():
        LOCAL.factor = 9
        found.append(compiled(x))

    assert torch.equal(compiled(x), x * 2)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert torch.equal(found[0], x * 9) and torch.equal(compiled(x), x * 2)


class Names(set):
    def both(self, others):
        return self & others

    def add(self, item):
        super().add(item * 2)


class Fixed(frozenset):
    pass


class Thing:
    pass


def sets_of_the_users(x, names, fixed, things, thing):
    names.add(7)
    names.discard(1)
    names |= {40}
    known = thing in things
    things.add(thing)
    both = sorted(names.both({14, 2, 40}))
    return (x * len(names) + sum(both) + (3 in fixed) + len(fixed | {9}), both, known, thing in things, len(things), type(names) is Names, type(names & {2}),
            type(fixed | {9}), sorted(fixed), names == {2, 14, 40})


def test_sets_of_the_users():
    first, second = Thing(), Thing()

    def run(fn):
        names, fixed, things = Names([1, 2]), Fixed([3, 4]), {first, torch.nn.ReLU}
        return [fn(torch.ones(2), names, fixed, things, thing) for thing in (first, first, second, second)], sorted(names), things

    compiled = fs.compile(sets_of_the_users, fullgraph=True)
    ours, theirs = run(compiled), run(sets_of_the_users)
    assert ours[1:] == theirs[1:]
    for mine, eager in zip(ours[0], theirs[0]):
        torch.testing.assert_close(mine[0], eager[0])
        assert mine[1:] == eager[1:]


def test_another_object_that_is_not_in_a_set():
    things = {Thing(), Thing()}
    compiled = fs.compile(lambda x, thing: x + 1 if thing in things else x, fullgraph=True)
    for thing in (Thing(), *things, Thing()):
        assert compiled(torch.zeros(()), thing).item() == (thing in things)


def test_a_set_of_tensors_is_passed_on():
    def f(x, given):
        return x + 1, given
    given = {torch.ones(2)}
    assert fs.compile(f, fullgraph=True)(torch.ones(2), given)[1] is given


class Doubled(list):
    def append(self, item):
        super().append(item * 2)


class Entries(dict):
    def __setitem__(self, key, item):
        super().__setitem__(key, item * 2)


def test_methods_of_a_class_over_a_builtin_run_once():
    def f(x, items, entries):
        items.append(7)
        entries["a"] = 3
        items[0] = x
        return x + len(items)

    items, entries, x = Doubled([1]), Entries(), torch.ones(2)
    fs.compile(f, fullgraph=True)(x, items, entries)
    assert items[1:] == [14] and items[0] is x and entries == {"a": 6}


class ClassProperty(property):
    def __get__(self, obj, owner):
        return self.fget(owner)


class Doubling(property):
    def __get__(self, obj, owner):
        return self if obj is None else self.fget(obj) * 2

    def __set__(self, obj, value):
        obj.kept = value + 1

    def __delete__(self, obj):
        del obj.kept


class OneMore(classmethod):
    def __get__(self, obj, owner):
        return lambda number: self.__func__(owner, number) + 1


class Tripled(functools.cached_property):
    def __get__(self, obj, owner=None):
        return super().__get__(obj, owner) * 3


class Described:
    kept = 1
    count = ClassProperty(lambda cls: [cls.kept])
    value = Doubling(lambda self: self.kept)
    more = OneMore(lambda cls, number: cls.kept + number)
    slow = Tripled(lambda self: 7)
    slow.__set_name__(None, "slow")


def test_descriptors_over_builtin_ones():
    """Their own __get__, __set__ and __delete__ run, not those of the class below."""
    def fn(x, described):
        described.value = 4
        total = described.value
        del described.value
        return x + total + len(Described.count) + described.count[0] * 10 + described.more(2) * 100 + Described.more(3) * 1000 + described.slow

    x, ours = torch.zeros(1), fs.compile(fn, fullgraph=True)
    assert ours(x, Described()) == fn(x, Described())
    before, Described.count = Described.__dict__["count"], ClassProperty(lambda cls: [2, 3])
    try:
        assert ours(x, Described()) == fn(x, Described())
    finally:
        Described.count = before


def test_class_methods_of_object_by_an_instance():
    class Plain:
        pass

    def fn(x):
        plain = Plain()
        return x * sum(callable(getattr(plain, name)) for name in ("__init_subclass__", "__subclasshook__"))
    assert fs.compile(fn, fullgraph=True)(torch.ones(2)).tolist() == [2, 2]


def test_functions_under_errstate_are_one_break():
    @np.errstate(over="ignore")
    def scale():
        return 2.0

    def fn(x):
        return (x + 1) * scale()
    fs.counters.clear()
    assert fs.compile(fn)(torch.ones(2)).tolist() == [4, 4]
    assert sum(fs.counters["graph_break"].values()) == 1


class Height(int):
    def up(self):
        return Height(self + 1)


class Degrees(float):
    def __new__(cls, value, unit="C"):
        made = super().__new__(cls, value)
        made.unit = unit
        return made


class Spelled(int):
    def __str__(self):
        return f"level {int(self)}"

    def __abs__(self):
        return 77


class Label(str):
    def ended(self):
        return self + "!"


class Corners(tuple):
    @property
    def area(self):
        return (self[1] - self[0]).prod()

    def __add__(self, other):
        return Corners(part + other for part in self)


def test_objects_over_numbers_texts_and_tuples_come_in():
    def numbers(x, level, degrees, spelled):
        table = {3: "three"}
        return (x.repeat(level).view(level, 2), x * degrees, level.up() + 1, degrees.unit, [level, degrees], [1, 2, 3, 4][level], table[level],
                round(degrees), hash(level), f"{degrees:.2f} {level:3d} {level} {spelled} {spelled:d}", abs(Height(-3)), abs(spelled), list(range(level)),
                type(level).__name__, isinstance(level, int), level // 2, max(level, 1), float(degrees), divmod(level, 2), x * 2 if level else x)

    def texts(x, label, corners):
        moved = corners + 1
        return x * len(label), label.ended(), {"ab": 1}[label], label == "ab", label[0], moved.area, type(moved).__name__, corners, len(corners), corners[0]

    x = torch.randn(2)
    for fn, given in ((numbers, (Height(3), Degrees(21.5), Spelled(4))), (texts, (Label("ab"), Corners((x, x + 2))))):
        found, wanted = fs.compile(fn, fullgraph=True)(x, *given), fn(x, *given)
        torch.testing.assert_close([part for part in found if isinstance(part, torch.Tensor)], [part for part in wanted if isinstance(part, torch.Tensor)])
        assert str(found) == str(wanted) and list(map(type, found)) == list(map(type, wanted))


def test_an_object_over_a_number_or_tuple_that_changed():
    compiled, x = fs.compile(lambda x, level, pair: x * level + pair[1], fullgraph=True), torch.ones(2)
    for level, pair in ((Height(3), (1, 2)), (Height(4), (1, 2)), (Height(4), (1, 5)), (Spelled(4), (1, 5, 6))):
        assert compiled(x, level, Corners(pair)).tolist() == [level + pair[1]] * 2


class Squares(dict):
    def __missing__(self, key):
        self[key] = key * key
        return self[key]


def test_a_builtin_method_asks_for_missing_keys():
    def fn(x, given):
        made = Squares()
        read = made.__getitem__
        return x * read(3), made[4], dict.__getitem__(made, 5), made.get(9), list(map(made.__getitem__, [3, 6])), given.__getitem__(2), given, made

    found, wanted = fs.compile(fn, fullgraph=True)(torch.ones(2), Squares()), fn(torch.ones(2), Squares())
    assert torch.equal(found[0], wanted[0]) and found[1:] == wanted[1:] and type(found[-1]) is Squares
