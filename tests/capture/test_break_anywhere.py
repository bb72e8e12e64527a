"""Whatever instruction breaks, the program means the same: each small program is captured with a break forced at each of its steps."""
# ruff: noqa: B007, B904, C416, C417, UP031, UP032  (the constructs are what is tested)
import copy
import dataclasses

import pytest
import torch
from harness import capture, same

from firesteel.capture import translate
from firesteel.capture.machine import SymbolicMachine


def straight(x):
    y = x + 1
    z = {"a": y, "b": [y * 2, 3]}
    z["c"] = z["b"][0] - x[0]
    return z, f"{x.shape[0]}!"


def loops(x):
    total = x
    for i, (a, b) in enumerate(zip([1, 2, 3], (x, x + 1, x + 2))):
        if i == 1:
            continue
        total = total + a * b
    while total.dim() < 4:
        total = total[None]
    return total


def add(a, b=2, *rest, c=3, **more):
    return a * b + c + len(rest) + sum(more.values())


def calls(x):
    args, kwargs = (x, 4, 5), {"c": 1, "d": 2}
    return add(x), add(*args, **kwargs), (lambda v: v + 1)(x), [add(v) for v in (x, x)], {k: k for k in "ab"}


def closures(x):
    count = 0

    def bump(by):
        nonlocal count
        count += by
        return x + count
    first = bump(1)
    second = bump(2)
    return first, second, count


class Box:
    def __init__(self, value):
        self.value = value

    @property
    def twice(self):
        return self.value * 2

    def __enter__(self):
        self.value = self.value + 1
        return self

    def __exit__(self, kind, error, trace):
        self.value = self.value - 1
        return kind is ValueError

    def __getitem__(self, key):
        return self.value + key


class Deep(Box):
    def __init__(self, value):
        super().__init__(value)
        self.extra = 1


def objects(x):
    box = Deep(x)
    box.extra += 1
    del box.value
    box.value = x * 3
    return box.twice + box.extra, box, box[2]


def blocks(x):
    box = Box(x)
    with box as inner:
        y = inner.value * 2
    with torch.no_grad():
        z = y + 1
    with box:
        y = y + 1
        raise ValueError("swallowed")
    return y, z, box


def handlers(x):
    seen = []
    try:
        try:
            seen.append({}["missing"])
        except KeyError as error:
            seen.append(error.args[0])
            raise ValueError("again")
        finally:
            seen.append("finally")
    except (TypeError, ValueError):
        x = x + 1
    else:
        x = x - 1
    return x, seen


def unpacking(x):
    a, *b = [x, x + 1, x + 2]
    (c, d), e = (1, 2), 3
    s = [*b, a]
    s += (c, d)
    s[1:2] = [e]
    del s[0]
    return s, {*[c, d]}, not s, c in (c, d), -c, c < d <= e, c is d, a if c else d


def generators(x):
    def rows(n):
        for i in range(n):
            yield x + i
    return list(rows(2)), [r for r in rows(2)], sum(v for v in rows(3))


def existing(x, items, table, box):
    items.append(x)
    items[0] = 7
    table["n"] = table.get("n", 0) + 1
    box.value = len(items)
    for key, value in table.items():
        items.append((key, value))
    return x * box.value, items, table


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int


def corners(x):
    class First:
        def scale(self, t):
            return t * 2

    class Second(First):
        def scale(self, t):
            return super().scale(t) + 1
    try:
        Frozen(2).a = 3
    except dataclasses.FrozenInstanceError as e:
        text = str(e)
    items, y = [1, 2], 3
    for i in items:
        if len(items) < 4:
            items.append(i + y)
    return Second().scale(x), text, items, locals()["y"], id(x) in {id(x)}, {"a": 1}.keys() == {"a"}, (5).real, sorted({"b": 1}.items(), key=None)


def groups(x):
    try:
        raise ExceptionGroup("both", [ValueError(1), TypeError(2)])
    except* ValueError as e:
        first = len(e.exceptions)
    except* TypeError as e:
        second = str(e.exceptions[0])
    return x * first, second


PROGRAMS = [straight, loops, calls, closures, objects, blocks, handlers, unpacking, generators, existing, corners, groups]


def arguments(fn):
    torch.manual_seed(0)
    x = torch.randn(2, 3)
    return (x, [1, 2], {"m": 1}, Box(3)) if fn is existing else (x,)


class BreakingMachine(SymbolicMachine):
    """Breaks at one step of the first region it runs."""

    at, used = 0, False

    def __init__(self, make_world, policy, break_at=frozenset()):
        super().__init__(make_world, policy, break_at if BreakingMachine.used and not break_at else break_at | {BreakingMachine.at})
        BreakingMachine.used = True
        BreakingMachine.last = self


def steps_of(fn, monkeypatch):
    monkeypatch.setattr(translate, "SymbolicMachine", BreakingMachine)
    BreakingMachine.at, BreakingMachine.used = -1, False
    compiled, _ = capture(fn)
    compiled(*arguments(fn))
    return BreakingMachine.last.steps


@pytest.mark.parametrize("fn", PROGRAMS)
def test_break_at_every_step(fn, monkeypatch, capsys):
    steps = steps_of(fn, monkeypatch)
    theirs = arguments(fn)
    expected = fn(*theirs)
    for at in range(1, steps + 1):
        BreakingMachine.at, BreakingMachine.used = at, False
        ours = copy.deepcopy(arguments(fn))
        compiled, _ = capture(fn)
        try:
            same(compiled(*ours), expected)
            same(list(ours), list(theirs))
        except Exception as error:
            raise AssertionError(f"break at step {at} of {steps}: {type(error).__name__}: {error}") from error
