"""Containers, text, and the small libraries of Python: one graph each, eager's values; what cannot be captured is a break by name."""
# ruff: noqa: B007, C401, C402, C403, C404, C405, C406, C408, C414, C416, C417, C419, UP030, UP031, UP032  (the constructs are what is tested)
import bisect
import collections
import copy
import functools
import heapq
import itertools
import logging
import math
import operator
import random
import time
import warnings

import numpy as np
import pytest
import torch
from harness import capture, check, make_test, same

import firesteel as fs
from firesteel.artifacts import breaks

one = functools.partial(make_test, fullgraph=True)


# -- containers ---------------------------------------------------------------------------------------------------------
@one
def test_lists(x):
    a = [3, 1, 2]
    a.sort(reverse=True)
    a.insert(1, 9)
    a.extend((7, 8))
    popped = a.pop(0), a.pop()
    a.remove(7)
    a.reverse()
    b = a.copy() + [0] * 2
    b[1:2] = [5, 6, 7]
    del b[0]
    a.clear()
    nested = [[1, 2], [3]]
    return x + 1, popped, a, b, nested[0][1], b.index(6), b.count(0), [1, 2] < [1, 3], [1] == [1], 2 in [1, 2], sorted("cab"), list(range(5))[::-2]


@one
def test_tuples_and_slices(x):
    t = (1, x, "c")
    s = slice(0, 2)
    return x + 1, t[s], t + (4,), t * 2, (1, "c").index("c"), (1, 1).count(1), s.start, s.stop, len(t), tuple([1, 2]), (1, 2) < (1, 3), hash((1, 2)) == hash((1, 2))


@one
def test_dicts(x):
    d = {"a": x, "b": 2}
    d.update(c=3, **{"d": 4})
    d |= {"e": 5}
    e = d | {"a": 1}
    popped = d.pop("b"), d.pop("zz", None), d.popitem()
    default = d.setdefault("f", []), d.get("nope"), d.get("nope", 3)
    del d["c"]
    made = dict(zip("xy", [1, 2])), dict([("k", x)]), dict.fromkeys("ab", 0), {v: k for k, v in {"p": 1}.items()}
    return (x + 1, d, e, popped, default, made, list(d.keys()), list(d.items()), list(d.values()), "a" in d, len(d), list(reversed(d)),
            d.keys() & {"a"}, {"a": 1} == {"a": 1}, sorted(d), max(d), [*d])


@one
def test_sets(x):
    s = {1, 2, 3}
    s.add(4)
    s.discard(9)
    s.remove(1)
    s.update([7], (8,))
    t = frozenset([2, 3])
    s -= {8}
    s |= {10}
    s ^= {10, 11}
    s &= {2, 3, 4, 7, 11}
    return (x * len(s), s, t, s & t, s | t, s - t, s ^ t, t <= s, s > t, t.issubset(s), s.issuperset(t), s.isdisjoint({99}), s.union([5]),
            s.intersection([2]), s.difference([2]), s.symmetric_difference([2]), 3 in t, sorted(s), {2, 3} == t, {frozenset([1]): 2}[frozenset([1])], min(s))


@one
def test_deques(x):
    d = collections.deque([1, 2, 3], maxlen=4)
    d.append(x)
    d.appendleft(0)
    d.extend([5])
    d.extendleft([6])
    d.rotate(1)
    left, right = d.popleft(), d.pop()
    return x + 1, len(d), left, right, d.maxlen, [type(i).__name__ for i in d], collections.deque([x])[0], d[0], 99 in [i for i in d if isinstance(i, int)], bool(d)


@one
def test_ordered_default_counter_chainmap(x):
    o = collections.OrderedDict(b=1, a=x)
    o.move_to_end("b")
    dd = collections.defaultdict(list)
    dd["k"].append(x)
    dd["l"] += [1]
    counts = collections.Counter("abca")
    counts["z"] += 2
    counts.update("ab")
    chain = collections.ChainMap({"a": 1}, {"a": 2, "b": x})
    first = o.popitem(last=False)
    return x + 1, o, first, dd, counts["a"], counts["none"], counts.most_common(2), sum(counts.values()), chain["a"], chain["b"], dict(dd), type(dd).__name__


# -- builtins -----------------------------------------------------------------------------------------------------------
@one
def test_reductions_with_keys_and_defaults(x):
    words = ["pear", "fig", "banana"]
    return (sorted(words, key=len, reverse=True), min(words, key=len), max(words, key=lambda w: -len(w)), min([], default=x), sum([x, x], start=1),
            sum([[1], [2]], []), any(w == "fig" for w in words), all([]), max(1, 5, 3), min(3, x.shape[0]), sorted([(2, "b"), (1, "a")]),
            sorted({"b": 1, "a": 2}.items(), key=lambda p: p[1]), list(reversed(words)), max([x.shape[0], 2]), divmod(7, 3), pow(2, 5, 7), round(2.567, 1),
            abs(-3), bin(5), hex(255), ord("a"), chr(98), bool([]), int("12"), float("1.5"), complex(1, 2), str(12), repr("q"), ascii("é"))


@one
def test_iterators(x):
    it = iter([1, 2, 3])
    first = next(it)
    z = list(zip([1, 2], "ab", (x, x)))
    f = list(filter(None, [0, 1, "", 2])), list(filter(lambda v: v > 1, [1, 2, 3]))
    e = list(enumerate("ab", start=5))
    m = list(map(lambda a, b: a * b, [x, x], [1, 2])), list(map(str, [1, 2]))
    calls = iter(lambda c=itertools.count(): next(c), 3)
    unzipped = list(zip(*[(1, "a"), (2, "b")]))
    return first, list(it), next(it, "end"), z, f, e, m, list(calls), unzipped, list(range(10, 0, -3)), list(zip([1, 2], [3, 4], strict=True))


@one
def test_itertools(x):
    i = itertools
    groups = [(k, list(g)) for k, g in i.groupby([1, 1, 2, 1], key=lambda v: v * 2)]
    return (list(i.chain([1], "a", (x,))), list(i.chain.from_iterable([[1], [2]])), list(i.product("ab", [1, 2])), list(i.islice(i.count(3, 2), 1, 6, 2)),
            list(i.accumulate([1, 2, 3])), list(i.accumulate([x, x], lambda a, b: a * b)), groups, list(i.zip_longest("ab", [1], fillvalue=x)),
            list(i.repeat(x, 2)), list(i.starmap(operator.mul, [(x, 2), (3, 4)])), list(i.pairwise([1, 2, 3])), list(i.permutations([1, 2, 3], 2)),
            list(i.combinations("abc", 2)), list(i.combinations_with_replacement("ab", 2)), list(i.takewhile(lambda v: v < 2, [1, 2, 1])),
            list(i.dropwhile(lambda v: v < 2, [1, 2, 1])), list(i.filterfalse(lambda v: v % 2, range(4))), list(i.compress("abc", [1, 0, 1])),
            [next(c) for c in [i.cycle([1, 2])] for _ in range(5)], [list(t) for t in i.tee([1, 2])], list(i.accumulate([1, 2], initial=10)))


@one
def test_operator_module(x):
    o = operator
    return (o.itemgetter(1)([1, 2]), o.itemgetter("a", "b")({"a": x, "b": 2}), o.attrgetter("shape")(x), o.methodcaller("sum", dim=0)(x), o.add(x, 1),
            o.neg(x), o.getitem([1, 2], 0), o.contains([1], 1), o.not_(0), o.truth([1]), o.is_(None, None), o.index(3), o.concat([1], [2]), o.lt(1, 2),
            sorted([(2, "a"), (1, "b")], key=o.itemgetter(0)), o.mul(3, x), o.iadd([1], [2]), o.attrgetter("a.b", "a")(Nested()))


class Inner:
    b = 3

    def __eq__(self, other):
        return isinstance(other, Inner)


class Nested:
    a = Inner()


@functools.lru_cache(maxsize=None)
def cached(n):
    return n * 2


@functools.singledispatch
def dispatched(value):
    return "object"


@dispatched.register(int)
def _(value):
    return "int"


@functools.total_ordering
class Ordered:
    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return self.n == other.n

    def __lt__(self, other):
        return self.n < other.n


@one
def test_functools(x):
    p = functools.partial(torch.add, x, alpha=2)
    q = functools.partial(p, x)
    compare = functools.cmp_to_key(lambda a, b: b - a)
    return (p(x), q(), p.args[0] is x, p.keywords, functools.reduce(lambda a, b: a * b, [x, 2, 3]), functools.reduce(operator.add, [], 5), cached(4),
            cached(4), sorted([1, 3, 2], key=compare), Ordered(2) >= Ordered(1), Method().twice(x))


class Method:
    def scale(self, k, t):
        return t * k

    twice = functools.partialmethod(scale, 2)


@one
def test_singledispatch(x):
    return x + 1, dispatched(3), dispatched("s")


@one
def test_copies(x):
    a = [1, [2, x]]
    shallow, deep = copy.copy(a), copy.deepcopy({"k": [1, 2], "t": (1, "s")})
    box = Box(x)
    other = copy.copy(box)
    other.value = 1
    return shallow[1] is a[1], shallow is a, deep, box.value + 1, other.value


class Box:
    def __init__(self, value):
        self.value = value


# -- text ---------------------------------------------------------------------------------------------------------------
@one
def test_text(x):
    s = "Hello, World"
    return (x + 1, s.upper(), s.split(", "), s.replace("l", "L"), s[::-1], s.find("W"), s.startswith(("He", "x")), "-".join(["a", "b"]), s.strip("Hd"),
            "a" in s, len(s), "%s is %d and %.2f" % ("pi", 3, 3.14159), "{0!r:>5} {k:03d}".format("a", k=7),
            f"{3.14159:.2f} {s!r:>20} {10:#x} {'nested':{'<'}{10}} {1_000:,}", s.lower().title().swapcase(), "a,b,,c".partition(","), s.encode()[:3],
            "x" * 3, "ab" < "b", sorted("bca"), "12".zfill(5), "12".isdigit(), s.casefold().count("l"), f"{x.shape} {x.dtype} {x.dim()=}",
            "%(a)s" % {"a": 1}, "tab\t".expandtabs(4), "a b".split(), "l1\nl2".splitlines(), s.translate(str.maketrans("l", "1")), str.join("", ["p", "q"]),
            f"{x.shape[0]:>4}|{tuple(x.shape)}", "{:>{w}}".format("r", w=4), "{a.real}".format(a=3), "{0[k]}".format({"k": "v"}))


@one
def test_math_on_constants_and_sizes(x):
    n = x.shape[0]
    return (x * math.sqrt(n), math.floor(2.7), math.ceil(n / 3), math.log(2.0), math.prod([2, n]), math.gcd(12, n), math.isclose(0.1, 0.1), math.inf > 1,
            math.pi, math.isnan(math.nan), math.factorial(4), math.comb(4, 2), math.hypot(3, 4), math.fsum([0.1] * 3), math.trunc(-2.5), math.exp(0.0), n // 3, -n % 3)


def test_math_on_symbols():
    def fn(x):
        n = x.shape[0]
        return x * math.sqrt(n) + math.floor(n / 2) + math.ceil(n / 3) + int(n * 1.5) + max(n, 3)

    for settings in ({"dynamic": True}, {"dynamic": None}):
        compiled, backend = capture(fn, fullgraph=True, **settings)
        for n in (5, 8, 9, 12):
            x = torch.randn(n)
            torch.testing.assert_close(compiled(x), fn(x))
        assert len(backend.graphs) <= 2


# -- effects, or breaks by name -----------------------------------------------------------------------------------------
def test_logging_happens_in_order(caplog):
    logger = logging.getLogger("language")

    def fn(x):
        y = x + 1
        logger.warning("first %s", 1)
        y = y * 2
        logger.info("second")
        return y

    with caplog.at_level(logging.INFO, "language"):
        compiled, backend = capture(fn)
        x = torch.ones(3)
        same(compiled(x), fn(x))
    texts = [r.getMessage() for r in caplog.records if r.name == "language"]
    assert texts == ["first 1", "second"] * 2


def test_warnings_happen():
    def fn(x):
        y = x + 1
        warnings.warn("careful", UserWarning, stacklevel=2)
        return y * 2

    compiled, _ = capture(fn)
    x = torch.ones(3)
    for _ in range(2):
        with pytest.warns(UserWarning, match="careful"):
            same(compiled(x), torch.full((3,), 4.0))


BREAKING = {
    "numpy": (lambda x: torch.from_numpy(np.unwrap(x.numpy())), "numpy"),
    "random": (lambda x: x * random.choice([2]), "choice"),
    "time": (lambda x: x + (time.time() < 0), "time"),
    "id": (lambda x: x + (id(x) < 0), "id"),
}


@pytest.mark.parametrize("name", BREAKING)
def test_what_breaks_says_so(name):
    call, word = BREAKING[name]

    def fn(x):
        return call(x * 2).cos() + 1

    check(fn, torch.randn(4), graphs=None)
    assert any(word in b.reason for b in breaks), [b.reason for b in breaks]
    assert not any("deferred" in b.reason for b in breaks)


def test_random_of_python_follows_its_seed():
    def fn(x):
        return x * random.random()

    compiled, _ = capture(fn)
    x = torch.ones(2)
    for seed in (1, 2):
        random.seed(seed)
        expected = fn(x)
        random.seed(seed)
        same(compiled(x), expected)


def test_warnings_that_are_recorded_inside():
    """Once, the list was still empty where the program looked at it."""
    def f(x):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            warnings.warn("careful", stacklevel=2)
        return x + len(seen)

    assert capture(f)[0](torch.zeros(1)).item() == 1


def test_warnings_that_are_errors():
    def f(x):
        try:
            warnings.warn("careful", stacklevel=2)
        except UserWarning:
            return x - 1
        return x + 1

    compiled, _ = capture(f)
    for action, expected in (("ignore", 1), ("error", -1), ("ignore", 1)):
        with warnings.catch_warnings():
            warnings.resetwarnings()
            warnings.simplefilter(action)
            assert compiled(torch.zeros(1)).item() == expected


# -- order ----------------------------------------------------------------------------------------------------------------
@functools.total_ordering
class Ranked:
    __hash__ = None

    def __init__(self, rank):
        self.rank = rank

    def __lt__(self, other):
        return self.rank < other.rank

    def __eq__(self, other):
        return self.rank == other.rank


class Unordered:
    pass


def ranks(items):
    return [getattr(item, "rank", item) for pair in items for item in pair]


@one
def test_sorted_asks_objects_only_where_they_decide(x):
    some = [(2, 1), (1, Ranked(3)), (0, 5), (1, Ranked(2))]
    words = [("b", Ranked(1)), ("a", 1), ("a", 0)]
    unordered = [(3, Unordered()), (1, 2), (2, Unordered())]
    tensors = [(3, x), (1, 2), (2, x)]
    again = [*some]
    again.sort(reverse=True)
    return (x + 1, ranks(sorted(some)), ranks(sorted(words)), [pair[0] for pair in sorted(unordered)], [pair[0] for pair in sorted(tensors)], ranks(again),
            sorted([Ranked(3), Ranked(1)], key=lambda r: (0, r))[0].rank, sorted([(1, (2, Ranked(3))), (1, (2, Ranked(1)))])[0][1][1].rank)


@one
def test_least_and_greatest_of_tuples_with_objects(x):
    pairs = [(1, Ranked(3)), (1, Ranked(1)), (2, 0)]
    return (x + 1, min(pairs)[1].rank, max((1, Ranked(3)), (1, Ranked(1)), (0, 0))[1].rank, min([Ranked(3), Ranked(1)], key=lambda r: (0, r)).rank,
            max([x.shape[0], 2], [3, 4]), max(torch.Size([x.shape[0], 2]), torch.Size([3, 4])))


@one
def test_sequences_compare_item_by_item(x):
    a, b = Ranked(1), Ranked(2)
    return (x + 1, (1, a) < (1, b), [1, a] <= [1, Ranked(1)], (1, a, 3) > (1, a), (1, a) >= (1, b), (1, (2, a)) < (1, (2, b)), [a] < [a, b], (1, Unordered()) < (2, 3),
            (x.shape[0], 1) < (x.shape[0], 2), (x, 1) < (x, 2))


@one
def test_heaps_and_bisections_of_tuples_with_objects(x):
    heap = [(1, Ranked(3)), (1, Ranked(1)), (2, 2)]
    heapq.heapify(heap)
    heapq.heappush(heap, (1, Ranked(2)))
    row = [(1, Ranked(1)), (1, Ranked(3)), (2, 2)]
    places = bisect.bisect(row, (1, Ranked(2))), bisect.bisect_left(row, (1, Ranked(3))), bisect.bisect_right(row, 1, key=lambda pair: pair[0])
    bisect.insort(row, (1, Ranked(2)))
    bisect.insort_left(row, (0, 0), key=lambda pair: pair[0])
    return (x + 1, ranks([heapq.heappop(heap) for _ in range(4)]), ranks(row), places, bisect.bisect([1, 2, 2, 3], 2, 0, 3), bisect.bisect_left("abc", "b"),
            ranks(heapq.nsmallest(2, row)), ranks(heapq.nlargest(1, row)), ranks(heapq.merge([(1, Ranked(1))], [(1, Ranked(0)), (3, 3)])))


UNORDERED = {
    "objects": lambda x: sorted([(1, Unordered()), (1, Unordered())]), "operator": lambda x: (1, Unordered()) < (1, Unordered()),
    "their own error": lambda x: sorted([(1, Ranked(1)), (1, "a")]), "kinds": lambda x: (1, Ranked(1)) < [1, Ranked(1)], "plain": lambda x: sorted([1, "a"]),
    "bisect": lambda x: bisect.bisect([1], 1, -1), "tensors": lambda x: sorted([(1, x), (1, x + 1)]),
}


@pytest.mark.parametrize("fn", UNORDERED.values(), ids=UNORDERED)
def test_what_has_no_order_raises_as_in_eager(fn):
    x = torch.ones(3)
    with pytest.raises(Exception) as expected:
        fn(x)
    with pytest.raises(expected.type) as given:
        fs.compile(fn, backend="eager")(x)
    assert str(given.value) == str(expected.value)
