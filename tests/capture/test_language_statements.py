"""Statements of the language: patterns, class bodies, generators, closures, star arguments, contexts; one graph each, eager's values."""
# ruff: noqa: B007, B023, B904, E731, SIM105, SIM108, SIM117, UP031, UP032  (the constructs are what is tested)
import dataclasses
import functools
import sys

import pytest
import torch
from harness import capture, check, make_test, same

import firesteel as fs

one = functools.partial(make_test, fullgraph=True)


# -- match --------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Point:
    x: object
    y: object


class Tagged:
    __match_args__ = ("tag",)

    def __init__(self, tag, extra):
        self.tag, self.extra = tag, extra


def classify(subject):
    match subject:
        case None:
            return "none"
        case True | False:
            return "bool"
        case 0 | 1:
            return "small"
        case int(n) if n > 100:
            return f"big {n}"
        case int() | float():
            return "number"
        case "a" | "b" as letter:
            return f"letter {letter}"
        case str(text):
            return f"text {text}"
        case []:
            return "empty"
        case [single]:
            return ("single", single)
        case [first, *middle, last]:
            return ("many", first, len(middle), last)
        case {"kind": "move", "by": by, **rest}:
            return ("move", by, len(rest))
        case {"kind": kind}:
            return ("kind", kind)
        case Point(x=0, y=y):
            return ("on axis", y)
        case Point(x, y):
            return ("point", x, y)
        case Tagged(tag, extra=extra):
            return ("tagged", tag, extra)
        case _:
            return "other"


@one
def test_match_all_patterns(x):
    subjects = [None, True, 1, 200, 5, 2.5, "a", "zz", [], (x,), [x, 1, 2, x + 1], {"kind": "move", "by": x, "more": 1}, {"kind": x},
                {"other": 1}, Point(0, x), Point(1, x), Tagged("t", x), object]
    return [classify(s) for s in subjects], x * 2


@one
def test_match_on_tensors_and_sizes(x):
    match x.shape:
        case (rows, columns) if rows > columns:
            return x.t()
        case (4, columns):
            return x * columns
    return x


@one
def test_match_value_and_nested_patterns(x):
    class Names:
        first = "one"
    results = []
    for item in [("one", x), ("two", [x, {"deep": (1, x)}]), ("three",)]:
        match item:
            case (Names.first, value):
                results.append(value + 1)
            case (str() as name, [a, {"deep": (1, b)}]):
                results.append((name, a - b))
            case _:
                results.append(None)
    return results, x.sin()


# -- class statements ---------------------------------------------------------------------------------------------------
@one
def test_class_in_a_function(x):
    scale = 3

    class Scaler:
        """Multiplies."""
        kind = "plain"
        table = [i * 2 for i in range(3)]

        def __init__(self, bias=1):
            self.bias = bias

        def __call__(self, t):
            return t * scale + self.bias

        @staticmethod
        def twice(t):
            return t * 2

        @classmethod
        def make(cls, bias):
            return cls(bias)

        @property
        def doubled(self):
            return self.bias * 2

    class Wider(Scaler):
        def __call__(self, t):
            return super().__call__(t) - 1

    s = Wider.make(5)
    return s(x), Scaler.twice(x), s.doubled, Scaler.kind, Scaler.table, isinstance(s, Scaler), Scaler.__name__


@one
def test_class_body_reads_closure_and_globals(x):
    size = x.shape[0]

    class Settings:
        width = size * 2
        limit = LIMIT
        if size > 2:
            extra = "large"
        else:
            extra = "small"
        del limit

    return x * Settings.width, Settings.extra, hasattr(Settings, "limit")


LIMIT = 7


@one
def test_class_with_decorators_and_a_dataclass(x):
    def register(cls):
        cls.registered = True
        return cls

    @register
    class Local:
        pass

    @dataclasses.dataclass
    class Pair:
        a: int
        b: int = 2

    p = Pair(1)
    return x + p.a + p.b, Local.registered


# -- generators ---------------------------------------------------------------------------------------------------------
def running_total():
    total = 0
    while True:
        got = yield total
        if got is None:
            return total
        total = total + got


@one
def test_generator_send(x):
    g = running_total()
    next(g)
    a = g.send(x)
    b = g.send(x * 2)
    try:
        g.send(None)
    except StopIteration as stop:
        return a, b, stop.value


def guarded(log):
    try:
        yield 1
        yield 2
    except ValueError as error:
        log.append(str(error))
        yield 3
    finally:
        log.append("closed")


@one
def test_generator_throw_and_close(x):
    log = []
    g = guarded(log)
    first = next(g)
    third = g.throw(ValueError("thrown"))
    g.close()
    h = guarded(log)
    next(h)
    h.close()
    fresh = guarded(log)
    fresh.close()
    return x + first + third, log, next(h, "done")


def inner(x):
    got = yield x
    got = yield got * 2
    return got + 1


def outer(x):
    result = yield from inner(x)
    yield result
    yield from [x, x + 1]
    return "end"


@one
def test_yield_from_passes_values_both_ways(x):
    g = outer(x)
    a = next(g)
    b = g.send(x + 3)
    c = g.send(x + 4)
    rest = list(g)
    return a, b, c, rest


def throwing_inner(log):
    try:
        yield 1
    except KeyError:
        log.append("inner")
        yield 2


def throwing_outer(log):
    yield from throwing_inner(log)
    yield 3


@one
def test_throw_into_yield_from(x):
    log = []
    g = throwing_outer(log)
    return next(g), g.throw(KeyError("k")), next(g), log, x + 1


@one
def test_generator_expressions_and_unpacking(x):
    pairs = ((i, x * i) for i in range(3))
    (a, _), *rest = pairs
    total = sum(t.sum() for t in (x, x + 1) if t is not None)
    return a, [t for _, t in rest], total, max(i for i in range(4)), tuple(i for i in "ab")


@one
def test_generator_raises_in_the_middle(x):
    def gen():
        yield x
        raise ValueError("middle")
    seen = []
    try:
        for t in gen():
            seen.append(t)
    except ValueError as e:
        return seen, str(e), x + 1


@one
def test_stop_iteration_inside_a_generator_is_a_runtime_error(x):
    def gen():
        yield 1
        next(iter([]))
    try:
        list(gen())
    except RuntimeError as e:
        return x + 1, str(e)


# -- functions ----------------------------------------------------------------------------------------------------------
def everything(a, b=2, /, c=3, *rest, d, e=5, **more):
    return a + b + c + sum(rest) + d + e + sum(more.values())


@one
def test_star_arguments(x):
    args, kwargs = [1, 2], {"d": 4, "z": 7}
    first = everything(x, *args, **kwargs)
    second = everything(x, *args, *[3, 4], d=1, **{"e": 2}, **{"y": 3})
    third = (lambda *a, **k: (len(a), sorted(k)))(*args, x, **kwargs)
    return first, second, third


@one
def test_walrus_and_conditional_expressions(x):
    if (n := x.shape[0]) > 2 and (m := n * 2):
        x = x * m
    values = [y := 1, y + 1, y ** 2]
    last = [z for i in range(4) if (z := i * 2) > 2]
    return x, n, values, last, z


@one
def test_nonlocal_counters(x):
    count = 0

    def step(t):
        nonlocal count
        count += 1

        def deeper():
            nonlocal count
            count += 10
            return count
        return t * deeper()

    return step(x), step(x), count


@one
def test_late_binding_and_defaults(x):
    late = [lambda t: t * i for i in range(3)]
    early = [lambda t, i=i: t * i for i in range(3)]
    kw = lambda t, *, k=2: t + k
    return [f(x) for f in late], [f(x) for f in early], kw(x), kw(x, k=5)


def traced(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs) + 1
    return wrapper


def scaled_by(factor):
    def decorate(fn):
        @functools.wraps(fn)
        def wrapper(x):
            return fn(x) * factor
        return wrapper
    return decorate


@traced
@scaled_by(3)
def decorated(x):
    """Documented."""
    return x.sin()


@one
def test_decorators(x):
    @traced
    def local(t, k=2):
        return t * k
    return decorated(x), local(x), local(x, k=3), decorated.__name__, local.__name__, decorated.__doc__


@one
def test_function_attributes(x):
    def f(t):
        return t * f.scale
    f.scale = 4
    return f(x), f.__name__, f.__qualname__.endswith("f"), hasattr(f, "missing")


@one
def test_assert_del_pass_and_chained_comparison(x):
    assert 0 < x.dim() <= 2 < 3, "never"
    a = b = x + 1
    del a
    pass
    b[0] = b[1] = 0
    return b


@one
def test_augmented_assignment_targets(x):
    class Box:
        pass
    box, items, table = Box(), [1, 2], {"k": x}
    box.v = 1
    box.v += 2
    items[0] -= 5
    table["k"] *= 2
    x += 1
    items[1:] += [7, 8]
    return box.v, items, table, x


@one
def test_unpacking_forms(x):
    (a, (b, *c)), d = (1, (2, 3, 4)), x
    *init, last = "abc"
    [e, f] = {"k": 1, "l": 2}
    merged = [*c, *init, last]
    table = {**{"a": 1}, "b": 2, **{"a": 3}}
    swap = (a, b) = (b, a)
    return d + a + b, merged, e, f, table, swap, {*c, *init} == {3, 4, "a", "b"}


@one
def test_loops_with_else(x):
    for i in range(3):
        if i == 5:
            break
    else:
        x = x + 1
    n = 0
    while n < 3:
        n += 1
        if n == 2:
            break
    else:
        x = x * 100
    for i, (j, k) in enumerate(zip("ab", [x, x + 1])):
        x = x + k * i
    return x, n, j


@one
def test_nested_comprehensions(x):
    rows = [[x[i, j] * (i + j) for j in range(2)] for i in range(2)]
    flat = [v for row in rows for v in row]
    table = {(i, j): i * j for i in range(2) for j in range(3) if i != j}
    return rows, flat, table, {len(r) for r in rows}


@one
def test_global_statement(x):
    global COUNTER
    COUNTER = 1
    COUNTER += 2
    return x * COUNTER


COUNTER = 0


@one
def test_imports_inside(x):
    import math
    from collections import OrderedDict as Ordered
    from math import sqrt as root

    import torch.nn.functional as F
    return F.relu(x) * root(16) + math.floor(2.5), Ordered(a=1)


def test_a_module_that_is_not_imported_yet(monkeypatch, tmp_path):
    (tmp_path / "brought_along.py").write_text("factor = 3")

    def fn(x):
        from brought_along import factor
        return x * factor

    def after_an_effect(x):
        sys.path.append(str(tmp_path))
        from brought_along import factor
        return x * factor
    monkeypatch.setattr(sys, "path", list(sys.path))
    for program, breaks in ((after_an_effect, 1), (fn, 0)):
        sys.modules.pop("brought_along", None)
        fs.reset()
        fs.counters.clear()
        assert fs.compile(program)(torch.ones(2)).tolist() == [3, 3]
        assert sum(fs.counters["graph_break"].values()) == breaks
    sys.modules.pop("brought_along")


# -- async --------------------------------------------------------------------------------------------------------------
def test_coroutines_break_honestly():
    async def later(x):
        return x + 1

    def run(x):
        y = x * 2
        coroutine = later(y)
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value * 3

    x = torch.randn(4)
    compiled, backend = capture(run)
    same(compiled(x), run(x))
    from firesteel.errors import Unsupported
    strict, _ = capture(run, fullgraph=True)
    with pytest.raises(Unsupported, match="later"):
        strict(x)


def test_async_generator_breaks_honestly():
    async def produce(x):
        yield x
        yield x + 1

    async def consume(x):
        total = 0
        async for t in produce(x):
            total = total + t
        return total

    def run(x):
        coroutine = consume(x * 2)
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value + 1

    check(run, torch.randn(4), graphs=None)
