"""Guards in machine code say what the same guards say as Python text, about the objects they were written for and about any others."""
import collections
import gc
import itertools
import sys
import types

import pytest
import torch
from harness import member
from torch import nn

from firesteel.capture import native_guards
from firesteel.capture.class_reads import MISSING, ClassFacts
from firesteel.capture.guard_function import MachineCode, build_guards
from firesteel.capture.guards import Guard, TensorFacts
from firesteel.capture.source import Attr, CellContents, Fixed, HiddenDict, Item, Local, Nth, OwnDict, Type
from firesteel.runtime import cpu

box = Local("box")
inside = Item(box, "v")


@pytest.fixture(autouse=True, scope="module")
def _compiler():
    cpu.jit()


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    monkeypatch.setattr(native_guards, "WORTH_IT", 1)


def both(guards, returns=(), **arguments):
    """The guard function with machine code, checked to have it, and the one without."""
    machine = build_guards(guards, list(arguments), list(returns), MachineCode(cpu.compile_text, arguments))
    assert machine.walks
    return machine.check, build_guards(guards, list(arguments), list(returns)).check


class Strange(dict):
    def __getitem__(self, key):
        return 3

    def __contains__(self, key):
        return True

    def __len__(self):
        return 2


class Equal:
    def __eq__(self, other):
        return True

    __hash__ = None


class Number(int):
    pass


def function(a=1, *, b=2):
    return a


def other_function():
    return 2


def closure():
    content = [3]
    return lambda: content


VALUES = [None, True, False, 0, 1, 3, 2**70, 3.0, 0.0, -0.0, float("nan"), float("inf"), "a", "b", b"a", (), (1, 2), [], [1, 2], {}, {"a": 1}, {"v": None},
          collections.OrderedDict(), collections.OrderedDict(a=1), Strange(), Equal(), Number(3), int, Strange, function, other_function, 3 + 0j, object(),
          torch.device("cpu"), torch.device("cpu"), torch.device("cpu", 0), torch.device("cuda")]
KINDS = {"type": type, "identity": lambda v: v, "none": lambda v: None, "equals": lambda v: v, "length": lambda v: len(v), "keys": lambda v: tuple(v),
         "has_key": lambda v: "a", "no_key": lambda v: "a", "code": lambda v: v.__code__}


@pytest.mark.parametrize("kind", KINDS)
def test_says_what_python_says_of_any_value(kind):
    made = 0
    for first in VALUES:
        try:
            guard = Guard(inside, kind, KINDS[kind](first))
            assert build_guards([guard], ["box"]).check({"v": first})
        except (TypeError, AttributeError, AssertionError):     # no such guard of such a value
            continue
        machine, python = both([guard, Guard(box, "type", dict), Guard(Item(box, "w"), "none")], box={"v": first, "w": None})
        for value in VALUES:
            assert machine({"v": value, "w": None}) == python({"v": value, "w": None}), (kind, first, value)
        assert machine({}) is python({}) is None
        made += 1
    assert made


def test_keys_in_their_order():
    class Key(str):
        pass
    first = {"v": {"a": 1, "".join(["b", "c"]): 2}}
    machine, python = both([Guard(inside, "keys", ("a", "bc"))], box=first)
    for value in ({"a": 3, "bc": 4}, {"bc": 1, "a": 1}, {"a": 1}, {"a": 1, "bc": 1, "d": 1}, {}, {"a": 1, "bd": 1}, {"a": 1, 5: 1}, {Key("a"): 1, "bc": 2},
                  collections.OrderedDict(a=1, bc=2), collections.OrderedDict(bc=1, a=2), ["a", "bc"], 5):
        assert machine({"v": value}) == python({"v": value}), value
    assert machine(first) == ()


def test_every_check_is_of_a_kind_that_is_tested_here():
    assert set(native_guards.CHECKS) == {*KINDS, "same", "no_hooks", "has_object", "class"}


def test_a_class_that_changes():
    class Thing:
        def method(self):
            return 1
    facts = ClassFacts(Thing, {"method": vars(Thing)["method"], "__len__": MISSING, "plain": MISSING})
    machine, python = both([Guard(Fixed(Thing), "class", facts)], box={})
    kept = Thing.method
    for name, value, holds in [("other", 1, True), ("plain", 1, False), ("other", 2, False), ("method", kept, False)]:
        setattr(Thing, name, value)
        assert (machine({}) == ()) == (python({}) == ()) == holds, name
    del Thing.plain
    assert machine({}) == python({}) == ()
    Thing.method = lambda self: 2
    assert machine({}) is python({}) is None
    Thing.method = kept
    assert machine({}) == python({}) == ()


class Plain:
    def __init__(self):
        self.v = 3

    def method(self):
        return self.v


class Slotted:
    __slots__ = ("v",)

    def __init__(self):
        self.v = 3


class Guarded(Plain):
    def __getattribute__(self, name):
        raise AssertionError("guards run no code of the user's")


def guarded():
    made = object.__new__(Guarded)
    object.__setattr__(made, "v", 3)
    return made


class Other:
    v = 4


class Derived(Plain):
    word = "own"


# source, objects of which the first is what the code is written for
READS = {
    "own dict": (OwnDict(box).item("v"), [Plain(), Plain(), Other(), 3, Derived(), guarded()]),
    "hidden dict": (HiddenDict(box).item("v"), [guarded(), Plain(), Other(), Derived()]),
    "list": (Item(box, 1), [[1, 2], [2, 3, 4], [1], (1, 2), {1: 2}, None]),
    "tuple": (Item(box, 0), [(1,), (2, 3), (), [1], "a"]),
    "dict": (Item(box, "v"), [{"v": 3}, {}, Strange(), collections.OrderedDict(v=3), collections.defaultdict(int)]),
    "defaults": (Item(Attr(box, "__defaults__"), 0), [function, other_function, lambda a=1: a, lambda a=2: a, len]),
    "keyword defaults": (Item(Attr(box, "__kwdefaults__"), "b"), [function, other_function, len, types.SimpleNamespace(__kwdefaults__={"b": 2})]),
    "code": (Attr(box, "__code__"), [function, other_function, len]),
    "closure": (CellContents(Item(Attr(box, "__closure__"), 0)), [closure(), closure(), function]),
    "class": (Attr(box, "word"), [Derived, Plain, type("Mine", (Derived,), {}), type("Mine", (), {"word": 1}), Derived(), None]),
    "type": (Type(box), [Plain(), Other(), 3, guarded()]),
    "attribute": (Attr(box, "v"), [Plain(), Plain(), Other(), Slotted(), 3, Derived(), guarded(), object.__new__(Plain)]),
    "method's object": (Attr(box, "__self__"), [Plain().method, Plain().method, len, function, types.SimpleNamespace(__self__=1)]),
    "method's function": (Attr(box, "__func__"), [Plain().method, Derived().method, len, function]),
}


@pytest.mark.parametrize("name", READS)
def test_reads_what_python_reads(name):
    source, objects = READS[name]
    always = Guard(Item(Fixed({"x": None}), "x"), "none")
    machine, python = both([always], [source], box=objects[0])
    (found,) = machine(objects[0])
    assert found is source.fetch({"box": objects[0]})
    for other in objects:
        mine, theirs = machine(other), python(other)
        assert mine == theirs and (mine is None or mine[0] is theirs[0]), other


def test_every_read_is_tested_here():
    kinds = {type(step) for source, _ in READS.values() for step in source.chain()}
    assert set(native_guards.READS) <= kinds


def test_class_attributes_that_change_are_seen():
    cls = type("Cls", (), {"f": function, "c": classmethod(lambda cls: 1)})
    guards = [Guard(Attr(Fixed(cls), "f"), "identity", function)]
    machine, python = both(guards, box=1)
    assert machine(1) == python(1) == ()
    cls.f = other_function
    assert machine(1) is python(1) is None
    cls.f = function
    assert machine(1) == ()
    del cls.f
    assert machine(1) is python(1) is None


def test_attributes_that_a_class_takes_over_are_seen():
    cls = type("Cls", (), {})
    made = cls()
    made.v = 3
    machine, python = both([Guard(Attr(box, "v"), "equals", 3)], [Attr(box, "v")], box=made)
    assert machine(made) == python(made) == (3,)
    cls.v = property(lambda self: 4)
    assert machine(made) is python(made) is None
    del cls.v
    assert machine(made) == (3,)
    made.v = 5
    assert machine(made) is python(made) is None


def test_descriptors_of_the_users_are_left_to_python():
    class Descriptor:
        def __get__(self, owner, cls):
            raise AssertionError("asked while guards are built")
    cls = type("Cls", (), {"d": Descriptor(), "c": classmethod(len), "p": property(len), "f": function, "__call__": function})
    made = native_guards.Steps(["box"], {"box": cls})
    assert [name for name in ("d", "c", "p", "f", "__call__", "__init__") if made.reads(Attr(box, name)) is not None] == ["p", "f", "__call__", "__init__"]


class Key:
    pass


KEYS = [Key() for _ in range(4)]


def numbered(cls, keys):
    return cls([(key, [n]) for n, key in enumerate(keys)])


@pytest.mark.parametrize("made", [dict, lambda pairs: collections.defaultdict(list, pairs)])
def test_entries_by_objects(made):
    """All of a dictionary are read in one pass; where its keys are others, or in another order, Python looks them up."""
    sources = [*[Nth(inside, n) for n in range(3)], *[Item(inside, key) for key in KEYS[:3]]]
    guards = [Guard(inside, "has_object", Item(box, "key")), Guard(Item(Item(inside, KEYS[2]), 0), "equals", 2)]
    first = {"v": numbered(made, KEYS[:3]), "key": KEYS[1]}
    machine, python = both(guards, sources, box=first)
    assert machine(first) == python(first) == (*KEYS[:3], [0], [1], [2])
    others = [numbered(cls, keys) for cls in (made, dict, collections.OrderedDict, Strange)
              for keys in (KEYS[:3], KEYS, KEYS[:2], KEYS[1:], [KEYS[1], KEYS[0], KEYS[2]], [KEYS[3], *KEYS[:3]], [])]
    for value, key in itertools.product([*others, None, [1, 2, 3]], [KEYS[1], KEYS[0], KEYS[3], 7, None]):
        assert machine({"v": value, "key": key}) == python({"v": value, "key": key}), (value, key)
    moved = collections.OrderedDict(numbered(dict, KEYS[:3]))
    machine, python = both([*guards, Guard(Item(box, "key"), "type", Key)], sources, box={"v": moved, "key": KEYS[1]})
    moved.move_to_end(KEYS[0])
    assert machine({"v": moved, "key": KEYS[1]}) == python({"v": moved, "key": KEYS[1]}) is not None


def test_gradients_of_parameters(monkeypatch):
    held = {"p": nn.Parameter(torch.zeros(3)), "n": 1000001}
    held["p"].grad = torch.ones(3)
    guards = [Guard(Item(box, "n"), "equals", 1000001)]
    machine, python = both(guards, [Attr(Item(box, "p"), "grad")], box=held)
    (found,) = machine(held)
    assert found is held["p"].grad
    plain = torch.zeros(2, requires_grad=True)
    for other in (nn.Parameter(torch.zeros(4)), plain, torch.zeros(1), held["p"], nn.Buffer(torch.zeros(2)), types.SimpleNamespace(grad=5), None):
        mine, theirs = machine({"p": other, "n": 1000001}), python({"p": other, "n": 1000001})
        assert mine == theirs and (mine is None or mine[0] is theirs[0]), other
    count = sys.getrefcount(found)
    for _ in range(100):
        machine(held), machine({**held, "n": 2}), machine({**held, "n": 1.5})
    assert sys.getrefcount(found) == count
    monkeypatch.setattr(nn.Parameter, "grad", property(lambda p: 7), raising=False)
    assert machine(held) == python(held) == (7,)


def test_hooks_and_same_objects():
    layer, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    first, second = Item(box, "first"), Item(box, "second")
    guards = [Guard(OwnDict(first), "no_hooks"), Guard(OwnDict(first).item("_parameters").item("weight"), "same", OwnDict(second).item("_parameters").item("weight"))]
    twin.weight = layer.weight
    here = {"first": layer, "second": twin}
    machine, python = both(guards, box=here)
    assert machine(here) == ()
    for name in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"):
        handle = getattr(layer, name)(lambda *args: None)
        assert machine(here) is python(here) is None, name
        handle.remove()
        assert machine(here) == ()
    twin.weight = nn.Parameter(torch.zeros(2, 2))
    assert machine(here) is python(here) is None
    del layer._forward_hooks
    assert machine(here) is python(here) is None


def test_tensors_are_handed_over_in_a_row_and_checked():
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    places = [member(box, str(n), name) for n in range(2) for name in ("weight", "bias")]
    tensors = [place.fetch({"box": layers}) for place in places]
    guards = [Guard(place, "tensor", TensorFacts.of(tensor)) for place, tensor in zip(places, tensors)]
    guards.append(Guard(member(box, "0", table="_modules").attr("out_features"), "equals", 3))
    guards.append(Guard(OwnDict(box).item("training"), "equals", True))
    for returns in (places, places[::-1], places[1:3], [*places, box], []):
        machine, python = both(guards, returns, box=layers)
        found = machine(layers)
        assert len(found) == len(returns) and all(a is b for a, b in zip(found, python(layers)))
    layers[1].bias = nn.Parameter(torch.zeros(5))
    assert machine(layers) is python(layers) is None


def test_references_are_kept_in_balance():
    values = {"a": object(), "b": (1, 2), "n": 1000001}
    guards = [Guard(Item(box, "n"), "equals", 1000001), Guard(Item(box, "b"), "length", 2)]
    check, _ = both(guards, [Item(box, "a"), Item(box, "b")], box=values)
    wrong, unsure = {**values, "n": 5}, {**values, "n": 1.5}
    counted = [None, False, True, values["a"], values["b"], wrong, unsure, ()]

    def counts():
        for _ in range(3):      # what one collection frees may free more in the next
            gc.collect()
        return [sys.getrefcount(value) for value in counted]
    before = counts()
    for _ in itertools.repeat(None, 2000):
        check(values), check(wrong), check(unsure), check({})
    drift = [now - then for now, then in zip(counts(), before)]
    assert all(abs(change) < 1500 for change in drift), drift      # others count None too


def test_a_walk_lives_as_long_as_its_function():
    values = {f"key{n}": object() for n in range(50)}
    machine, _ = both([Guard(Item(box, name), "type", object) for name in values], box=values)
    gc.collect()
    assert machine(values) == ()
    assert machine({**values, "key7": 1}) is None


def test_a_new_sort_of_object_is_no_reason_to_fail():
    machine, python = both([Guard(Item(inside, "a"), "equals", 1)], box={"v": {"a": 1}})
    assert machine({"v": collections.OrderedDict(a=1)}) == python({"v": collections.OrderedDict(a=1)}) == ()


@pytest.mark.parametrize("count", [native_guards.MOST - 2, native_guards.MOST + 3, 40_000])
def test_more_values_than_a_walk_has_slots(count):
    items = list(range(1000, 1000 + count))
    sources = [Item(box, i) for i in range(count)]
    machine, text = both([Guard(source, "equals", item) for source, item in zip(sources, items)], sources, box=items)
    assert machine(items) == text(items) == tuple(items)
    for place in (0, native_guards.MOST - 1, count - 1):
        if place < count:
            other = [*items]
            other[place] = -1
            assert machine(other) is None and text(other) is None


def test_more_arguments_than_a_walk_has_slots():
    arguments = {f"a{n}": [n] for n in range(40_000)}
    guards = [Guard(Item(Local(name), 0), "equals", n) for n, name in enumerate(arguments)]
    check = build_guards(guards, list(arguments), [guard.source for guard in guards], MachineCode(cpu.compile_text, arguments)).check
    assert check(*arguments.values()) == tuple(range(40_000))
    assert check(*list(arguments.values())[:-1], [0]) is None
