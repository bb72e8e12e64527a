"""One break makes exactly one split, wherever it stands: two graphs, and not one operator of torch outside of them."""
# ruff: noqa: B007, C416, C417, SIM117  (the constructs are what is tested)
import contextlib
import functools

import pytest
import torch
from harness import Marking, outside, same

from firesteel.artifacts import breaks
from firesteel.capture.entry import compile_function
from firesteel.graph.abstract import AbstractWorld


def stop(i=2):
    if i == 2:
        print(end="")


def in_for(x):
    for i in range(4):
        x = x + i
        stop(i)
        x = x * 2
    return x


def in_while(x):
    i = 0
    while i < 4:
        x = x + i
        stop(i)
        i += 1
    return x * 2


def in_nested_loops(x):
    for i in range(3):
        for j in [1, 2, 3]:
            x = x + i * j
            if i == 1:
                stop(j)
    return x * 2


def in_while_else(x):
    i = 0
    while i < 3:
        i += 1
        x = x + i
    else:
        stop()
        x = x * 2
    return x + 1


@contextlib.contextmanager
def scaled(log):
    log.append("in")
    try:
        yield 3
    finally:
        log.append("out")


class Manager:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("in")

    def __exit__(self, *error):
        self.log.append("out")


def in_with(x):
    log = []
    with Manager(log), torch.no_grad():
        x = x + 1
        stop()
        x = x * 2
    return x - 1, log


def in_generator_with(x):
    log = []
    with scaled(log) as n:
        x = x + n
        stop()
        x = x * 2
    return x - 1, log


class StopsIn(Manager):
    def __enter__(self):
        stop()


class StopsOut(Manager):
    def __exit__(self, *error):
        stop()


def in_enter(x):
    x = x + 1
    with StopsIn([]):
        x = x * 2
    return x - 1


def in_exit(x):
    with StopsOut([]):
        x = x * 2
    return x - 1


def over_a_dict(x):
    for name, n in {"a": 1, "b": 2, "c": 3}.items():
        x = x + n + len(name)
        stop(n)
    for n in dict.fromkeys([1, 2]).keys() | {5}:
        x = x * n
    return x


def over_enumerate(x):
    for i, (a, b) in enumerate(zip([1, 2, 3], (x, x * 2, x * 3))):
        x = x + a * b
        stop(i + 1)
    return x


def over_zip(x):
    items = iter([1, 2, 3, 4])
    for (a, b), t in zip(zip(items, items), (x, x * 2)):
        x = x + a * b * t
        stop(b)
    return x


def over_map_and_filter(x):
    for n in map(lambda v: v + 1, filter(lambda v: v % 2, [1, 2, 3, 4, 5])):
        x = x + n
        stop(n)
    return x


def over_reversed(x):
    for n in reversed([1, 2, 3]):
        x = x + n
        stop(n)
    for n in reversed(range(2)):
        x = x * (n + 1)
    return x


def in_try(x):
    try:
        x = x + 1
        stop()
        x = x * 2
    except ValueError:
        x = x * 100
    else:
        x = x - 1
    finally:
        x = x + 3
    return x


def in_except(x):
    try:
        x = x + 1
        raise ValueError("v")
    except ValueError as e:
        stop()
        x = x * len(e.args)
    return x - 1


def in_finally(x):
    try:
        x = x + 1
    finally:
        stop()
        x = x * 2
    return x


def stopping(x, i):
    y = x + i
    stop(i)
    return y * 2


def in_list_comprehension(x):
    items = [stopping(x, i) for i in range(4)]
    return sum(items)


def in_dict_comprehension(x):
    items = {i: stopping(x, i) for i in range(4)}
    return items[2] + items[3]


def in_nested_comprehension(x):
    items = [[stopping(x, i * 2 + j) for j in range(2)] for i in range(2)]
    return items[1][1] + items[0][0]


def in_generator_expression(x):
    total = x
    for item in (stopping(x, i) for i in range(4)):
        total = total + item
    return total


def produce(x):
    for i in range(4):
        stop(i)
        yield x + i


def in_generator(x):
    total = x * 2
    for item in produce(x):
        total = total + item
    return total


def delegate(x):
    yield x
    yield from produce(x)


def in_yield_from(x):
    total = x * 2
    for item in delegate(x):
        total = total + item
    return total


def in_branch(x):
    x = x + 1
    if x.shape[0] == 3:
        stop()
        x = x * 2
    return x - 1


def one(x):
    return two(x + 1) * 2


def two(x):
    return three(x * 3) - 1


def three(x):
    y = x + 1
    stop()
    return y * 5


def at_depth_three(x):
    return one(x) + 1


class Thing:
    def __init__(self, x):
        self.x = x + 1
        stop()
        self.y = self.x * 2

    @property
    def value(self):
        return self.y + 1


class Base:
    def run(self, x):
        y = x + 1
        stop()
        return y * 2


class Derived(Base):
    def run(self, x):
        return super().run(x * 3) - 1

    def __call__(self, x):
        return self.run(x) + 4

    @property
    def stopped(self):
        stop()
        return 3

    def __getitem__(self, key):
        stop()
        return key

    @classmethod
    def made(cls, x):
        stop()
        return cls().run_quietly(x)

    def run_quietly(self, x):
        return x + 7


def in_init(x):
    return Thing(x * 2).value - 1


def in_super(x):
    return Derived()(x) * 2


def in_property(x):
    y = x + 1
    return y * Derived().stopped


def in_getitem(x):
    y = x + 1
    return y * Derived()[4]


def in_classmethod(x):
    return Derived.made(x + 1) * 2


def decorate(fn):
    @functools.wraps(fn)
    def run(*args, **kwargs):
        before = args[0] + 1
        stop()
        return fn(before, **kwargs) * 2
    return run


@decorate
def in_decorator(x):
    return x - 1


def in_closure_and_lambda(x):
    n = 1

    def bump():
        nonlocal n
        n += 1
        stop()
        return n
    f = lambda t: t * bump()        # noqa: E731
    return f(x + 1) + n


def in_arguments(x):
    def value(n):
        stop(n)
        return n
    return torch.add(x + 1, value(1)) + (lambda *a, **k: a[0] * k["b"])(x * 3, b=value(2))


def in_recursion(x, n=4):
    if n == 0:
        return x
    stop(n)
    return in_recursion(x + n, n - 1) * 2


MODULE = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))


class Stopping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = MODULE

    def forward(self, x):
        y = self.inner[0](x)
        stop()
        return self.inner[2](self.inner[1](y))


NESTED = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Tanh(), Stopping()), torch.nn.Tanh())


def in_modules(x):
    return NESTED(x * 2) + 1


def in_match(x):
    x = x + 1
    match {"k": [1, 2]}:
        case {"k": [1, n]}:
            stop(n)
            x = x * n
    return x - 1


def in_assertion_and_walrus(x):
    x = x + 1
    assert (n := Derived()[2]) == 2, "not here"
    return x * n


PLACES = [in_for, in_while, in_nested_loops, in_while_else, in_with, in_generator_with, in_enter, in_exit, over_a_dict,
          over_enumerate, over_zip, over_map_and_filter, over_reversed, in_try, in_except, in_finally, in_list_comprehension,
          in_dict_comprehension, in_nested_comprehension, in_generator_expression, in_generator, in_yield_from, in_branch, at_depth_three, in_init, in_super,
          in_property, in_getitem, in_classmethod, in_decorator, in_closure_and_lambda, in_arguments, in_recursion, in_modules, in_match,
          in_assertion_and_walrus]


@pytest.mark.parametrize("fn", PLACES, ids=lambda fn: fn.__name__)
def test_one_break_is_one_split(fn):
    x = torch.randn(3)
    backend = Marking()
    breaks.clear()
    compiled = compile_function(fn, backend=backend, make_world=AbstractWorld)
    same(compiled(x), fn(x))
    assert (backend.graphs, len(breaks)) == (2, 1), [(b.reason, b.location) for b in breaks]
    assert outside(lambda: compiled(x)) == []
    same(compiled(x), fn(x))
    assert backend.graphs == 2


def printing_loop(x):
    for i in range(4):
        x = x + i
        print(i, end="")
        x = x * 2
    return x * 2


def test_print_in_a_loop_of_four():
    x, backend = torch.randn(3), Marking()
    compiled = compile_function(printing_loop, backend=backend, make_world=AbstractWorld)
    same(compiled(x), printing_loop(x))
    assert backend.graphs <= 5
    assert outside(lambda: compiled(x)) == []


@pytest.mark.parametrize("loop", ["enumerate(items)", "zip(items, items)", "map(abs, items)", "enumerate(zip(items, items))", "table.items()", "table"])
def test_a_break_in_each_turn_needs_few_variants(loop):
    items, table = list(range(1, 31)), {n: n for n in range(30)}
    scope = {"items": items, "table": table}
    exec(f"def fn(x):\n    for item in {loop}:\n        x = x * 2\n        print(end='')\n        x = x + 1\n    return x", scope)
    x, backend = torch.randn(3), Marking()
    compiled = compile_function(scope["fn"], backend=backend, make_world=AbstractWorld)
    same(compiled(x), scope["fn"](x))
    assert backend.graphs <= 5
