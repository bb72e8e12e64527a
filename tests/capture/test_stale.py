"""Compiled code is not used where the program has changed under it: each case calls, changes one thing, calls again."""
import collections
import types

import pytest
import torch
from harness import capture, same

ZERO = torch.zeros(1)


def shadowed(x):
    return x + len([1, 2])


def replaced(x):
    return x + 1


def calls_replaced(x):
    return replaced(x)


def test_builtin_shadowed_by_a_global(monkeypatch):
    compiled, _ = capture(shadowed)
    assert compiled(ZERO).item() == 2
    monkeypatch.setitem(globals(), "len", lambda items: 10)
    assert compiled(ZERO).item() == 10


def test_global_function_replaced(monkeypatch):
    compiled, _ = capture(calls_replaced)
    assert compiled(ZERO).item() == 1
    monkeypatch.setitem(globals(), "replaced", lambda x: x + 7)
    assert compiled(ZERO).item() == 7


def test_function_code_replaced():
    def callee(x):
        return x + 1
    compiled, _ = capture(lambda x: callee(x))
    assert compiled(ZERO).item() == 1
    callee.__code__ = (lambda x: x + 3).__code__
    assert compiled(ZERO).item() == 3


def test_defaults_replaced():
    def f(x, k=1):
        return x + k
    compiled, _ = capture(lambda x: f(x))
    assert compiled(ZERO).item() == 1
    f.__defaults__ = (9,)
    assert compiled(ZERO).item() == 9


def test_closure_variable_rebound():
    n = 1
    compiled, _ = capture(lambda x: x + n)
    assert compiled(ZERO).item() == 1
    n = 5
    assert compiled(ZERO).item() == 5


def test_two_lists_become_one():
    def f(a, b, x):
        a.append(1)
        return x + len(b)
    compiled, _ = capture(f)
    assert compiled([], [], ZERO).item() == 0
    both = []
    assert compiled(both, both, ZERO).item() == 1 and both == [1]


@pytest.mark.parametrize("make", [list, dict, types.SimpleNamespace, lambda: torch.zeros(1)])
def test_is_answered_no_before(make):
    compiled, _ = capture(lambda a, b, x: x + 1 if a is b else x + 2)
    one = make()
    assert compiled(one, make(), ZERO).item() == 2
    assert compiled(one, one, ZERO).item() == 1


def test_forward_set_on_the_instance():
    model = torch.nn.Linear(1, 1)
    compiled, _ = capture(lambda x: model(x))
    compiled(ZERO)
    model.forward = lambda x: x + 5
    assert compiled(ZERO).item() == 5


def test_class_attribute_changed_then_shadowed():
    class Scaled(torch.nn.Module):
        scale = 2.0

        def forward(self, x):
            return x + self.scale
    model = Scaled()
    compiled, _ = capture(model)
    assert compiled(ZERO).item() == 2
    Scaled.scale = 3.0
    assert compiled(ZERO).item() == 3
    model.scale = 4.0
    assert compiled(ZERO).item() == 4


def test_attribute_appears():
    class Thing:
        pass
    thing = Thing()
    compiled, _ = capture(lambda x: x + (1 if hasattr(thing, "extra") else 0))
    assert compiled(ZERO).item() == 0
    thing.extra = True
    assert compiled(ZERO).item() == 1


def test_dict_changes():
    compiled, _ = capture(lambda x, d: x + sum(d.values()) + d.get("k", 100))
    assert compiled(ZERO, {"a": 1}).item() == 101
    assert compiled(ZERO, {"a": 1, "k": 2}).item() == 5
    assert compiled(ZERO, {"a": 1}).item() == 101


def test_hook_registered_later():
    model = torch.nn.Linear(1, 1)
    compiled, _ = capture(model)
    compiled(ZERO)
    handle = model.register_forward_hook(lambda module, args, output: output * 0 + 8)
    assert compiled(ZERO).item() == 8
    handle.remove()
    assert compiled(ZERO).item() == model(ZERO).item()


def test_child_and_parameter_replaced():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    compiled, _ = capture(model)
    compiled(ZERO)
    model[1] = torch.nn.Sigmoid()
    assert torch.equal(compiled(ZERO), model(ZERO))
    model[0].bias = torch.nn.Parameter(torch.full((1,), 3.0))
    assert torch.equal(compiled(ZERO), model(ZERO))
    model[0].bias = None
    assert torch.equal(compiled(ZERO), model(ZERO))


def test_an_unchanged_program_is_not_compiled_again():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    compiled, backend = capture(model)
    for _ in range(3):
        compiled(torch.zeros(1))
    assert len(backend.graphs) == 1


def test_a_method_put_into_a_subclass_later_is_seen():
    class Base:
        def scale(self, x):
            return x * 2

    class Derived(Base):
        def both(self, x):
            return super().scale(x) + self.scale(x)

    def f(thing, x):
        return thing.both(x)
    compiled, _ = capture(f)
    x = torch.ones(2)
    same(compiled(Derived(), x), x * 4)
    Derived.scale = lambda self, x: x * 10
    same(compiled(Derived(), x), x * 12)
    Base.scale = lambda self, x: x * 3
    same(compiled(Derived(), x), x * 13)


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.w


@pytest.mark.parametrize("cls", (torch.nn.Module, Plain))
def test_a_way_to_parameters_put_there_later(cls, monkeypatch):
    own = torch.nn.Module.__getattr__
    module = Plain()
    compiled, _ = capture(module)
    assert compiled(torch.ones(3)).tolist() == [1, 1, 1]
    monkeypatch.setattr(cls, "__getattr__", lambda self, name: own(self, name) * (3 if name == "w" else 1), raising=False)
    assert compiled(torch.ones(3)).tolist() == [3, 3, 3]


@pytest.mark.parametrize("name, method", [("__len__", lambda self: 0), ("__bool__", lambda self: False), ("__eq__", lambda self, other: False)])
def test_a_special_method_put_there_later(name, method):
    class Thing:
        pass
    thing = Thing()
    compiled, _ = capture(lambda x: x + (1 if thing and thing == thing else 2))
    assert compiled(ZERO).item() == 1
    setattr(Thing, name, method)
    assert compiled(ZERO).item() == 2


class Base:
    pass


def make_seven(cls):
    made = object.__new__(cls)
    made.k = 7
    return made


def set_plus_four(self, name, value):
    object.__setattr__(self, name, value + 4)


class WithMissing(type):
    def __getattr__(cls, name):
        return 1


class Answer:
    def __get__(self, owner, cls=None):
        return 1


def stored(cls, x):
    thing = cls()
    thing.k = 3
    return x + thing.k


LATER = {       # (what the class has, the program over it, the class's new attribute)
    "read by a function": ({}, lambda a, cls, x: x + a.k, "__getattribute__", lambda self, name: 7),
    "read by another function": ({"__getattribute__": lambda self, name: object.__getattribute__(self, name)}, lambda a, cls, x: x + a.k,
                                 "__getattribute__", lambda self, name: 7),
    "found by another function": ({"__getattr__": lambda self, name: 1}, lambda a, cls, x: x + a.missing, "__getattr__", lambda self, name: 7),
    "a property over an instance's": ({}, lambda a, cls, x: x + a.k, "k", property(lambda self: 7)),
    "constructed": ({"__init__": lambda self: None, "n": 1}, lambda a, cls, x: x + cls().n, "__init__", lambda self: setattr(self, "n", 7)),
    "constructed by itself": ({"k": 1}, lambda a, cls, x: x + cls().k, "__new__", make_seven),
    "stored by a function": ({"k": 1}, lambda a, cls, x: stored(cls, x), "__setattr__", set_plus_four),
    "asked of the class": ({}, lambda a, cls, x: x + hasattr(cls, "q"), "q", 7),
    "in the class's dict": ({"q": 1}, lambda a, cls, x: x + vars(cls)["q"], "q", 7),
    "listed": ({}, lambda a, cls, x: x + len(dir(cls)), "q", 7),
    "its name": ({}, lambda a, cls, x: x + len(cls.__name__), "__name__", "A longer name"),
    "a descriptor's way": ({"d": Answer()}, lambda a, cls, x: x + a.d, "d", property(lambda self: 7)),
}


@pytest.mark.parametrize("case", LATER)
def test_an_attribute_put_into_a_class_later(case):
    own, program, name, value = LATER[case]
    cls = type("Thing", (Base,), own)
    thing = cls()
    thing.__dict__["k"] = 1

    def f(x):
        return program(thing, cls, x)
    compiled, _ = capture(f)
    assert compiled(ZERO).item() == f(ZERO).item()
    before = f(ZERO).item()
    setattr(cls, name, value)
    assert compiled(ZERO).item() == f(ZERO).item() != before


@pytest.mark.parametrize("made", ["Answer.__get__", "WithMissing.__getattr__"])
def test_a_method_of_a_descriptor_or_a_metaclass_replaced(made, monkeypatch):
    class Thing(metaclass=WithMissing):
        d = Answer()
    compiled, _ = capture(lambda x: x + Thing.d + Thing.other)
    assert compiled(ZERO).item() == 2
    monkeypatch.setattr(*{"Answer.__get__": (Answer, "__get__", lambda self, owner, cls=None: 7),
                          "WithMissing.__getattr__": (WithMissing, "__getattr__", lambda cls, name: 7)}[made])
    assert compiled(ZERO).item() == 8


@pytest.mark.parametrize("name, value", [("w", 7), ("training", property(lambda self: 7)), ("__getattribute__", lambda self, name: 7)])
def test_an_attribute_put_into_a_module_class_later(name, value):
    class Module(Plain):
        def forward(self, x):
            return x + self.w * self.training
    module = Module()
    compiled, _ = capture(lambda x: Module.forward(module, x))
    assert compiled(torch.zeros(3)).tolist() == [1, 1, 1]
    setattr(Module, name, value)
    assert compiled(torch.zeros(3)).tolist() == Module.forward(module, torch.zeros(3)).tolist() != [1, 1, 1]


def test_what_torch_modules_store_by_replaced(monkeypatch):
    class Module(Plain):
        def forward(self, x):
            self.k = 1
            return x + self.k
    compiled, _ = capture(Module())
    assert compiled(ZERO).item() == 1
    monkeypatch.setattr(torch.nn.Module, "__setattr__", lambda self, name, value: object.__setattr__(self, name, 7 if name == "k" else value))
    assert compiled(ZERO).item() == 7


def test_a_property_over_a_named_tuples_field():
    class Pair(collections.namedtuple("Pair", "a b")):
        @property
        def b(self):
            return 5
    pair = Pair(1, 2)
    compiled, _ = capture(lambda x: x + pair.a + pair.b)
    assert compiled(ZERO).item() == 6
    Pair.a = property(lambda self: 7)
    assert compiled(ZERO).item() == 12


def test_another_attribute_of_a_class_changes_nothing():
    class Thing:
        k, calls = 1, 0

        def scale(self, x):
            return x + self.k
    thing = Thing()
    compiled, backend = capture(lambda x: thing.scale(x))
    for _ in range(4):
        Thing.calls += 1
        Thing.unrelated = lambda self: 3
        assert compiled(ZERO).item() == 1
    assert len(backend.graphs) == 1
    Thing.k = 2
    assert compiled(ZERO).item() == 2


def test_an_object_that_says_it_is_of_another_class():
    class Proxy:
        k = 3
        __class__ = property(lambda self: torch.Tensor)
    proxy = Proxy()
    compiled, _ = capture(lambda x: x + proxy.k)
    assert compiled(ZERO).item() == 3


def test_a_constant_of_a_class_of_torchs(monkeypatch):
    normal = torch.distributions.Normal(ZERO, ZERO + 1)
    compiled, _ = capture(lambda x: x + normal.has_rsample)
    assert compiled(ZERO).item() == 1
    monkeypatch.setattr(torch.distributions.Normal, "has_rsample", False)
    assert compiled(ZERO).item() == 0
