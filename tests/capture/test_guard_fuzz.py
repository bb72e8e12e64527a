"""Randomised test of guards: something that a program can reach is changed, and the compiled result must stay eager's.

The program reads attributes, container items, flags, globals, closures, defaults, class attributes and methods in many ways, so that what it
returns depends on nearly all of them.  Each step draws one change from a table; a change that makes eager raise must make the compiled
function raise the same.
"""
import functools
import math
import random
import types

import pytest
import torch
from torch import nn

import firesteel as fs
from firesteel import programcache, regioncache
from firesteel.artifacts import counters
from firesteel.capture import native_guards
from firesteel.runtime import cpu
from firesteel.testing import CompileCounter

SCALE, TABLE, ACTIVE = 2.0, {"a": 1.0, "b": [1, 2]}, True
FUNCTIONS = [torch.sin, torch.tanh]


def helper(x, by=3.0, *, sign=1):
    return x * by * sign


def other_helper(x, by=5.0, *, sign=2):
    return x + by - sign


class Settings:
    level = 1
    names = ("x", "y")

    def __init__(self):
        self.gain, self.mode, self.parts, self.nested = 1.5, "sum", [1, 2.5, 3], {"deep": {"value": 4}}
        self.maybe, self.flags, self.fn = None, {"on"}, helper

    def weight(self):
        return self.gain * 2

    @property
    def half(self):
        return self.gain / 2

    def __len__(self):
        return len(self.parts)


class Net(nn.Module):
    kind = "plain"

    def __init__(self):
        super().__init__()
        self.lin, self.drop, self.norm = nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.ReLU()])
        self.register_buffer("shift", torch.ones(3))
        self.extra, self.settings, self.steps = None, Settings(), 0

    def forward(self, x):
        x = self.lin(x) + self.shift
        for layer in self.layers:
            x = layer(x)
        if self.extra is not None:
            x = x + self.extra
        if self.training:
            x = x + 0.25
        if hasattr(self, "found"):
            x = x * self.found
        if "break" in self.settings.flags:
            print(end="")
        x = self.norm(x) if self.norm.training else x - self.norm.eps
        return x * (2 if self.kind == "plain" else 3) + self.drop.p


def make_program():
    offset, bag = 1.0, {"k": 2.0}

    def program(net, settings, x, *more, flag=False):
        x = net(x) * SCALE + offset
        if ACTIVE and "on" in settings.flags:
            x = x + TABLE["a"] + len(TABLE["b"])
        for part in settings.parts:
            x = x + part
        x = settings.fn(x) * settings.weight() + settings.half
        x = x * settings.level + len(settings) + len(settings.names)
        if settings.mode == "sum":
            x = x + settings.nested["deep"]["value"]
        elif settings.mode.startswith("p"):
            x = x - 1
        if settings.maybe:
            x = x * settings.maybe
        if "break" in settings.flags:
            print(end="")
        for name, value in sorted(bag.items()):
            x = x + len(name) * value
        for fn in FUNCTIONS:
            x = fn(x)
        if hasattr(settings, "late"):
            x = x + settings.late
        if isinstance(settings.gain, int):
            x = x * 7
        return x + sum(more) + (1 if flag else 0), getattr(settings, "word", "none"), settings.parts[-1], net.settings is settings

    def change_offset(value):
        nonlocal offset
        offset = value
    return program, change_offset, bag


class World:
    """All that can be changed; one for eager and one for compiled, changed alike."""

    def __init__(self):
        torch.manual_seed(0)
        self.net, self.settings = Net(), Settings()
        self.program, self.set_offset, self.bag = make_program()
        self.inputs, self.flag, self.shape, self.dtype = (), False, (4, 3), torch.float32
        self.handles = []


def tables(net):
    return vars(net), net._parameters, net._buffers


def set_global(name, value):
    globals()[name] = value


def set_defaults(world, value):
    helper.__defaults__ = (value,)
    helper.__kwdefaults__ = {"sign": int(value)}


# what -> function(world, random): the change; those of `globals` are made once for both worlds
CHANGES = {
    "gain": lambda w, r: setattr(w.settings, "gain", r.choice([1.5, 2.5, 3, 0.0, True])),
    "mode": lambda w, r: setattr(w.settings, "mode", r.choice(["sum", "prod", "none", "p"])),
    "parts append": lambda w, r: setattr(w.settings, "parts", [*w.settings.parts, r.choice([1, 2.0])]),
    "parts item": lambda w, r: w.settings.parts.__setitem__(0, r.choice([1, 2, 3.5])) if isinstance(w.settings.parts, list) else None,
    "parts new": lambda w, r: setattr(w.settings, "parts", r.choice([[1], [2, 3.0], (1, 2)])),
    "parts in place": lambda w, r: w.settings.parts.append(r.choice([1, 2.0])) if isinstance(w.settings.parts, list) else None,
    "nested": lambda w, r: w.settings.nested["deep"].__setitem__("value", r.choice([4, 5, 6.5])),
    "nested missing": lambda w, r: w.settings.nested["deep"].pop("value", None),
    "nested new": lambda w, r: w.settings.nested.__setitem__("deep", {"value": r.choice([1, 9])}),
    "maybe": lambda w, r: setattr(w.settings, "maybe", r.choice([None, 0, 2, 3.5])),
    "maybe tensor": lambda w, r: setattr(w.settings, "maybe", torch.tensor(float(r.choice([0, 2])))),
    "flags": lambda w, r: r.choice([w.settings.flags.add, w.settings.flags.discard])("on"),
    "fn": lambda w, r: setattr(w.settings, "fn", r.choice([helper, other_helper, torch.sigmoid, functools.partial(helper, by=2.0), lambda x: x * 11])),
    "late": lambda w, r: setattr(w.settings, "late", r.choice([1, 2.0])),
    "not late": lambda w, r: vars(w.settings).pop("late", None),
    "word": lambda w, r: setattr(w.settings, "word", r.choice(["a", "b"])),
    "own level": lambda w, r: setattr(w.settings, "level", r.choice([1, 2])),
    "no own level": lambda w, r: vars(w.settings).pop("level", None),
    "own method": lambda w, r: setattr(w.settings, "weight", types.MethodType(lambda self: 4.0, w.settings)),
    "no own method": lambda w, r: vars(w.settings).pop("weight", None),
    "train": lambda w, r: w.net.train(r.random() < 0.5),
    "norm mode": lambda w, r: w.net.norm.train(r.random() < 0.5),
    "drop p": lambda w, r: setattr(w.net.drop, "p", r.choice([0.1, 0.5])),
    "norm eps": lambda w, r: setattr(w.net.norm, "eps", r.choice([1e-5, 1e-3])),
    "buffer": lambda w, r: setattr(w.net, "shift", torch.full((3,), float(r.choice([1, 2])))),
    "buffer shape": lambda w, r: setattr(w.net, "shift", torch.ones(1 if r.random() < 0.5 else 3)),
    "parameter": lambda w, r: setattr(w.net.lin, "weight", nn.Parameter(torch.eye(3) * r.choice([1, 2]))),
    "bias": lambda w, r: setattr(w.net.lin, "bias", nn.Parameter(torch.ones(3)) if r.random() < 0.5 else None),
    "requires grad": lambda w, r: w.net.lin.weight.requires_grad_(r.random() < 0.5),
    "data in place": lambda w, r: w.net.lin.weight.data.fill_(r.choice([0.5, 0.25])),
    "layers append": lambda w, r: w.net.layers.append(r.choice([nn.ReLU, nn.Tanh])()) if len(w.net.layers) < 6 else None,
    "layers replace": lambda w, r: w.net.layers.__setitem__(-1, r.choice([nn.ReLU, nn.Tanh, nn.Identity])()),
    "extra": lambda w, r: setattr(w.net, "extra", r.choice([None, 1, 2.5])),
    "kind": lambda w, r: setattr(w.net, "kind", r.choice(["plain", "other"])),
    "no own kind": lambda w, r: vars(w.net).pop("kind", None),
    "found": lambda w, r: setattr(w.net, "found", r.choice([2, 3.5, torch.full((3,), 2.0), nn.Parameter(torch.full((3,), 3.0))])),
    "not found": lambda w, r: delattr(w.net, "found") if any("found" in table for table in tables(w.net)) else None,
    "same settings": lambda w, r: setattr(w.net, "settings", w.settings),
    "new settings": lambda w, r: setattr(w, "settings", Settings()),
    "hook": lambda w, r: w.handles.append(w.net.register_forward_hook(lambda m, a, out: out + 1)),
    "hook off": lambda w, r: w.handles.pop().remove() if w.handles else None,
    "offset": lambda w, r: w.set_offset(r.choice([1.0, 2.0, 3])),
    "bag": lambda w, r: w.bag.__setitem__(r.choice(["k", "kk", "z"]), r.choice([1.0, 2])),
    "bag off": lambda w, r: w.bag.pop("z", None),
    "more": lambda w, r: setattr(w, "inputs", r.choice([(), (1,), (2,), (1, 2.5)])),
    "flag": lambda w, r: setattr(w, "flag", r.random() < 0.5),
    "shape": lambda w, r: setattr(w, "shape", r.choice([(4, 3), (5, 3), (2, 3), (2, 4, 3)])),
    "dtype": lambda w, r: (setattr(w, "dtype", d := r.choice([torch.float32, torch.float64])), w.net.to(d)),
}
GLOBAL_CHANGES = {
    "SCALE": lambda r: set_global("SCALE", r.choice([2.0, 3.0, 4])),
    "ACTIVE": lambda r: set_global("ACTIVE", r.random() < 0.5),
    "TABLE item": lambda r: TABLE.__setitem__("a", r.choice([1.0, 2.0])),
    "TABLE list": lambda r: TABLE["b"].append(1) if len(TABLE["b"]) < 5 else TABLE["b"].clear(),
    "TABLE": lambda r: set_global("TABLE", {"a": 1.0, "b": [1, 2]}),
    "FUNCTIONS": lambda r: FUNCTIONS.__setitem__(0, r.choice([torch.sin, torch.cos])),
    "FUNCTIONS length": lambda r: FUNCTIONS.append(torch.atan) if len(FUNCTIONS) < 4 else FUNCTIONS.pop(),
    "defaults": lambda r: set_defaults(None, r.choice([3.0, 4.0])),
    "class level": lambda r: setattr(Settings, "level", r.choice([1, 2, 3])),
    "class names": lambda r: setattr(Settings, "names", r.choice([("x", "y"), ("x",)])),
    "class method": lambda r: setattr(Settings, "weight", r.choice([lambda self: self.gain * 2, lambda self: self.gain + 3])),
    "class found": lambda r: setattr(Net, "found", r.choice([4, 5.0])),
    "no class found": lambda r: delattr(Net, "found") if "found" in vars(Net) else None,
    "class kind": lambda r: setattr(Net, "kind", r.choice(["plain", "other"])),
    "helper": lambda r: set_global("other_helper", r.choice([other_helper, lambda x, by=1: x - by])),
}
KEPT = {name: globals()[name] for name in ("SCALE", "ACTIVE", "TABLE", "FUNCTIONS", "helper", "other_helper")}
CLASS_KEPT = [(Settings, "level", 1), (Settings, "names", ("x", "y")), (Settings, "weight", Settings.weight), (Net, "kind", "plain")]


@pytest.fixture(autouse=True)
def _restore():
    fs.reset()
    yield
    set_global("SCALE", 2.0), set_global("ACTIVE", True), set_global("TABLE", {"a": 1.0, "b": [1, 2]})
    set_global("FUNCTIONS", [torch.sin, torch.tanh]), set_global("other_helper", KEPT["other_helper"])
    helper.__defaults__, helper.__kwdefaults__ = (3.0,), {"sign": 1}
    GLOBAL_CHANGES["no class found"](None)
    for cls, name, value in CLASS_KEPT:
        setattr(cls, name, value)


def outcome(fn, world):
    torch.manual_seed(1)
    x = torch.randn(world.shape, dtype=world.dtype)
    try:
        out, *rest = fn(world.net, world.settings, x, *world.inputs, flag=world.flag)
        return out, out.requires_grad, rest, dict(world.net.state_dict())
    except Exception as error:
        return type(error), str(error)


def same(mine, theirs):
    assert len(mine) == len(theirs), (mine, theirs)
    if len(mine) == 2:
        assert mine[0] is theirs[0], (mine, theirs)
        return
    torch.testing.assert_close(mine[0], theirs[0], equal_nan=True)
    assert mine[1:3] == theirs[1:3]
    torch.testing.assert_close(mine[3], theirs[3])


@pytest.mark.parametrize("machine_code", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_change_is_seen(seed, machine_code, monkeypatch):
    cpu.jit()
    monkeypatch.setattr(native_guards, "POSSIBLE", machine_code)
    choose = random.Random(2 * seed + machine_code)
    mine, theirs = World(), World()
    counter = CompileCounter()
    names = [*CHANGES, *GLOBAL_CHANGES]
    done = []
    with fs.config.patch(recompile_limit=1000):
        compiled = fs.compile(mine.program, backend=counter)
        for _ in range(40):
            same_after = outcome(compiled, mine), outcome(theirs.program, theirs)
            try:
                same(*same_after)
            except AssertionError as error:
                raise AssertionError(f"after {done}") from error
            name, pick = choose.choice(names), choose.randrange(1 << 30)
            done.append(name)
            change(name, pick, mine, theirs)
    assert counter.frame_count > 1
    assert machine_code == any(entry.guard.walks for region in compiled.__firesteel_root__.all_regions() for entry in region.entries)


def change(name, pick, *worlds):
    """The same change of each world, or of what they share."""
    if name in GLOBAL_CHANGES:
        GLOBAL_CHANGES[name](random.Random(pick))
        return
    for world in worlds:
        CHANGES[name](world, random.Random(pick))


def test_calling_again_without_a_change_compiles_nothing():
    world, counter = World(), CompileCounter()
    compiled = fs.compile(world.program, backend=counter)
    outcome(compiled, world)
    before = counter.frame_count
    for _ in range(3):
        outcome(compiled, world)
    assert counter.frame_count == before == 1


def doubled(world):
    """In double precision, so that compiled code gives nearly the same numbers."""
    world.dtype = torch.float64
    world.net.to(torch.float64)


@pytest.mark.parametrize("how", ["whole", "with symbols", "with breaks"])
@pytest.mark.parametrize("seed", range(2))
def test_any_change_is_seen_in_another_process(seed, how, tmp_path, monkeypatch):
    """All that is known of the program is forgotten before each call, but for what is kept on disk."""
    monkeypatch.setattr(regioncache, "STARTED", math.inf)
    programcache.versions.cache_clear()
    choose, hits, done = random.Random(seed), 0, []
    mine, theirs = World(), World()
    for world in (mine, theirs):
        world.net.norm.train(how != "with symbols")     # where it computes a number from a size, which is not kept
        for settings in (world.settings, world.net.settings):
            settings.flags.update(["break"] if how == "with breaks" else [])
    names = [name for name in (*CHANGES, *GLOBAL_CHANGES) if name != "dtype"]
    with fs.config.patch(verify=False, cache_dir=str(tmp_path)):
        for _ in range(12):
            doubled(mine), doubled(theirs)
            for _ in range(2):
                fs.reset()
                try:
                    same(outcome(fs.compile(mine.program, dynamic=how == "with symbols" or None), mine), outcome(theirs.program, theirs))
                except AssertionError as error:
                    raise AssertionError(f"after {done}") from error
                hits += counters["native"]["region_hits"]
            name, pick = choose.choice(names), choose.randrange(1 << 30)
            done.append(name)
            change(name, pick, mine, theirs)
    programcache.versions.cache_clear()
    assert hits > 3
