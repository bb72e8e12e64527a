"""Attributes of torch.Tensor that the program replaces: compiled code obeys them, before and after they are replaced and put back."""
from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest
import torch

import firesteel as fs
from firesteel.capture import replaced
from firesteel.capture.class_reads import version_of


def own_sum(self, *args):
    return torch.full((), 5.0)


@functools.wraps(torch.Tensor.split)
def own_split(self, *args, **kwargs):
    return [self * 7]


def added(x):
    y = x * 1
    y += 2
    return y


REPLACED = {
    "relu": (lambda self: self * 7, lambda x: x.relu() + 1),
    "sum": (own_sum, lambda x: x.sum() + 1),
    "split": (own_split, lambda x: x.split(1)[0]),
    "size": (lambda self, *args: 5, lambda x: x * x.size(0)),
    "shape": (property(lambda self: (9,)), lambda x: x * x.shape[0]),
    "T": (property(lambda self: self * 9), lambda x: x.mT if x.dim() > 1 else x.T * 2),
    "mine": (lambda self: self * 9, lambda x: x.mine() if hasattr(x, "mine") else x * 3),
    "__add__": (lambda self, other: self * 9, lambda x: x + 1),
    "__radd__": (lambda self, other: self * 9, lambda x: 1 + x),
    "__iadd__": (lambda self, other: self * 9, added),
    "__neg__": (lambda self: self * 9, lambda x: -x),
    "__lt__": (lambda self, other: self * 9, lambda x: x < 0),
    "__getitem__": (lambda self, key: self * 9, lambda x: x[0] * 2),
    "__len__": (lambda self: 9, lambda x: x * len(x)),
    "__iter__": (lambda self: iter([self * 9]), lambda x: [y * 2 for y in x][0]),
    "__bool__": (lambda self: True, lambda x: x * 2 if x.sum() < -100 else x * 3),
}


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@pytest.mark.parametrize("name", [name for name in REPLACED if not name.startswith("__")])
def test_it_means_what_the_program_says(name):
    check(name)


def test_special_methods():
    """In a process of their own: Python leaves a class changed whose special methods were replaced and put back."""
    code = "import test_replaced; [test_replaced.check(name) for name in test_replaced.REPLACED if name.startswith('__')]"
    path = os.pathsep.join([os.path.dirname(__file__), os.path.dirname(os.path.dirname(fs.__file__))])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check(name):
    own, program = REPLACED[name]
    x = torch.tensor([-1.0, 2.0])
    early = fs.compile(program)
    assert torch.equal(early(x), program(x))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, name, own, raising=False)
        assert name in replaced.replaced()
        assert torch.equal(early(x), program(x))
        assert torch.equal(fs.compile(program)(x), program(x))
        patch.setattr(torch.Tensor, name, REPLACED["relu"][0] if name == "mine" else own)
        assert torch.equal(early(x), program(x))
    assert not replaced.replaced() and replaced.state() == ""
    assert torch.equal(early(x), program(x))


def test_what_it_costs_the_program_is_told(monkeypatch):
    x = torch.ones(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "shape", property(lambda self: (9,)))
        before = sum(count for reason, count in fs.counters["eager_calls"].items() if "torch.Tensor.shape" in reason)
        fs.compile(lambda x: x * 2)(x)
        assert sum(count for reason, count in fs.counters["eager_calls"].items() if "torch.Tensor.shape" in reason) == before + 1


def test_another_function_of_the_same_name_is_another_state(monkeypatch):
    states = set()
    for _ in range(2):
        monkeypatch.setattr(torch.Tensor, "relu", lambda self: self, raising=False)
        states.add(replaced.state())
    assert len(states) == 2


def test_the_number_of_a_class_is_where_python_has_it():
    class Changing:
        pass
    number = version_of(Changing)
    seen = []
    for value in range(3):
        Changing.value = value
        assert Changing.value == value and hasattr(Changing, "value")
        seen.append(number.value)
    assert len({*seen}) == 3 and 0 not in seen


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_forward_of_torch_replaced_behind_the_capture(backend, monkeypatch):
    layer, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()), torch.randn(2, 3)
    compiled = fs.compile(layer, backend=backend)
    before = compiled(x)
    plain = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: plain(self, x) + 1)
    torch.testing.assert_close(compiled(x), layer(x))
    monkeypatch.undo()
    torch.testing.assert_close(compiled(x), before)
    torch.testing.assert_close(layer(x), before)


def one_more(self, x, *args, **kwargs):
    return x + 1


CHANGED_LATER = {
    "__call__": (torch.nn.Module, "__call__", one_more, lambda: torch.nn.Linear(3, 3)),
    "_call_impl": (torch.nn.Module, "_call_impl", one_more, lambda: torch.nn.Linear(3, 3)),
    "a method that forward calls": (torch.nn.BatchNorm1d, "_check_input_dim", lambda self, x: x.add_(1), lambda: torch.nn.BatchNorm1d(3)),
    "a container's method": (torch.nn.Sequential, "__iter__", lambda self: iter([torch.nn.ReLU()]), lambda: torch.nn.Sequential(torch.nn.Linear(3, 3))),
    "a function that forward calls": (torch.nn.functional, "linear", lambda x, *args: x + 1, lambda: torch.nn.Linear(3, 3)),
    "a distribution's property": (torch.distributions.Normal, "mean", property(lambda self: self.loc + 1), lambda: lambda x: torch.distributions.Normal(x, 1.0).mean),
}


@pytest.mark.parametrize("case", CHANGED_LATER)
def test_what_torch_itself_calls_replaced_behind_the_capture(case, monkeypatch):
    home, name, mine, make = CHANGED_LATER[case]
    program, x = make(), torch.randn(2, 3)
    compiled = fs.compile(program)
    before = compiled(x.clone())
    monkeypatch.setattr(home, name, mine)
    torch.testing.assert_close(compiled(x.clone()), program(x.clone()))
    monkeypatch.undo()
    torch.testing.assert_close(compiled(x.clone()), before)
