"""Compiled code is not used where the program has changed under it: each case calls, changes one thing, calls again."""
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
