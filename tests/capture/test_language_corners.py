"""Corners of the language and of small libraries that real programs reach: reflection, locals, ids, copies, heaps, patterns; one graph each, eager's values."""
# ruff: noqa: B018, C408, F841, PLW0603  (the constructs are what is tested)
import abc
import bisect
import collections
import contextvars
import copy
import dataclasses
import functools
import gc
import heapq
import inspect
import json
import logging
import re
import threading
import types
import typing
import warnings
import weakref

import numpy as np
import pytest
import torch
import typing_extensions
from harness import capture, check, make_test, same
from torch.nn.attention import SDPBackend, sdpa_kernel

import firesteel as fs
from firesteel.capture.opcodes import find_module
from firesteel.errors import Unsupported

one = functools.partial(make_test, fullgraph=True)
SCALE = contextvars.ContextVar("SCALE", default=3)


Message = typing_extensions.TypedDict("Message", {"name": str, "value": torch.Tensor})


class Point:
    def __init__(self, a):
        self.a = a


@one
def test_locals_and_globals(x):
    y = 3

    def inner():
        return y
    return x + locals()["y"], "torch" in globals(), sorted(locals()), vars()["y"], globals()["SCALE"] is SCALE, inner(), sorted(dir())


def test_locals_after_a_break():
    def f(x):
        kept = 4
        print(end="")
        return x * locals()["kept"]
    check(f, torch.randn(3), graphs=1)


def test_eval_sees_the_programs_names():
    def f(x):
        y = 3
        return x * eval("y + 1 + len(OrderedNames)")
    check(f, torch.randn(3), graphs=1)


OrderedNames = ("a", "b")


@one
def test_ids(x):
    y, items = x, [x, 1]
    seen = {id(x): "first"}
    return id(x) == id(y), id(items) != id(x), seen[id(items[0])], id(x) in seen, x + 1


def test_ids_as_numbers():
    def f(x, thing, number, known):
        return x + 1 if id(thing) == number else x - 1, id(thing) in known
    compiled, _ = capture(f, fullgraph=True)
    x, one_thing, other = torch.zeros(2), Point(1), Point(1)
    for thing, number in ((one_thing, id(one_thing)), (other, id(one_thing)), (other, id(other)), (one_thing, 3)):
        args = (x, thing, number, {id(one_thing)})
        same(compiled(*args), f(*args))


def test_functions_allowed_in_the_graph_run_each_time():
    calls = []

    @fs.allow_in_graph
    def look():
        calls.append(torch.is_grad_enabled())

    def f(x):
        look()
        return x + 1
    compiled, _ = capture(f, fullgraph=True)
    for _ in range(3):
        compiled(torch.ones(1))
    assert len(calls) >= 3


def test_methods_of_generators_break():
    def f(x):
        state = torch.default_generator.get_state()
        y = torch.rand(3) + x
        torch.default_generator.set_state(state)
        return y, torch.rand(3)
    check(f, torch.randn(3), graphs=None)


@one
def test_copies_of_tensors(x):
    shared, own = copy.copy(x), copy.deepcopy({"a": [x, x]})
    shared.add_(1)
    point = Point([x])
    other, deep = copy.copy(point), copy.deepcopy(point)
    other.a.append(1)
    return x, shared, own, own["a"][0] is own["a"][1], len(point.a), len(deep.a)


@one
def test_attributes_on_tensors(x):
    y = x + 1
    y.tag = [3]
    y.tag.append(4)
    return y.tag, hasattr(y, "tag"), hasattr(x, "nope"), getattr(x, "nope", 4), y


def test_attributes_stay_on_returned_tensors():
    def f(x):
        y = x + 1
        y.tag = "kept"
        x.seen = True
        return y
    compiled, _ = capture(f, fullgraph=True)
    x = torch.ones(2)
    assert compiled(x).tag == "kept" and x.seen


@one
def test_functions_made_inside_are_inspected(x):
    n = 3

    def f(a, b=2, *c, d=3, **e):
        return n
    f.mark = 1
    return (x * f.__closure__[0].cell_contents, f.__dict__, list(inspect.signature(f).parameters), inspect.isfunction(f), inspect.isclass(Point),
            inspect.signature(f).parameters["b"].default, inspect.getfullargspec(f).args, f.__globals__["OrderedNames"])


class Counting(type):
    def __call__(cls, *args):
        made = super().__call__(*args)
        made.extra = 5
        return made

    def __getitem__(cls, key):
        return key * 2


class Counted(metaclass=Counting):
    def __init__(self, a):
        self.a = a


@one
def test_metaclass_with_call(x):
    made = Counted(x)
    return made.a + made.extra, Counted[4]


class Marked(type):
    def __instancecheck__(cls, obj):
        return getattr(obj, "mark", 0) == 3


class HasMark(metaclass=Marked):
    pass


@one
def test_metaclass_with_instancecheck(x):
    marked = Point(1)
    marked.mark = 3
    return x + isinstance(marked, HasMark), isinstance(Point(1), HasMark), isinstance(marked, (int, HasMark))


class Doubled:
    def __get__(self, owner, cls=None):
        return self if owner is None else owner.__dict__.get("_value", 0)

    def __set__(self, owner, value):
        owner.__dict__["_value"] = value * 2

    def __delete__(self, owner):
        del owner.__dict__["_value"]


class HasDoubled:
    value = Doubled()


@one
def test_descriptor_with_delete(x):
    h = HasDoubled()
    h.value = x
    y = h.value
    del h.value
    return y, h.value


@one
def test_classes_made_by_type_and_with_slots(x):
    made = type("Made", (Point,), {"z": 3})

    class Slotted:
        __slots__ = ("a", "b")

        def __init__(self, a):
            self.a = a
    s = Slotted(x)
    try:
        s.b
    except AttributeError as e:
        missing = type(e).__name__
    return made(x).a * made.z, made.__name__, s.a, missing


@one
def test_dataclass_with_factory_inside(x):
    @dataclasses.dataclass
    class D:
        a: int
        b: list = dataclasses.field(default_factory=list)

        def __post_init__(self):
            self.c = self.a * 2
    d = D(2)
    d.b.append(1)
    return x * dataclasses.replace(d, a=4).c, D(1).b, dataclasses.asdict(d), dataclasses.astuple(d), [f.name for f in dataclasses.fields(d)]


@one
def test_namedtuple_inside(x):
    pair = collections.namedtuple("pair", "a b", defaults=[3])
    p = pair(x)
    return p.a + 1, p._replace(b=4).b, p._fields, pair._make([1, 2]).a, pair.__module__


@one
def test_exceptions_with_their_own_init(x):
    class Own(Exception):
        def __init__(self, text, code):
            super().__init__(text)
            self.code = code
    try:
        raise Own("a", 3)
    except Own as e:
        e.add_note("more")
        return x * e.code, e.args, repr(e), str(e), e.__notes__


@one
def test_containers_that_change_while_iterated(x):
    found = []
    table, numbers = {"a": 1}, {1}
    try:
        for _ in table.items():
            table["b"] = 2
    except RuntimeError as e:
        found.append(str(e))
    try:
        for _ in numbers:
            numbers.add(2)
    except RuntimeError as e:
        found.append(str(e))
    items = [1, 2]
    for i in items:
        if len(items) < 5:
            items.append(i + 1)
    return x + 1, found, items


@one
def test_small_libraries(x):
    heap = [5, 3, 8, 1, 9, 2]
    heapq.heapify(heap)
    heapq.heappush(heap, 4)
    order = [heapq.heappop(heap), heapq.heapreplace(heap, 7), heapq.heappushpop(heap, 0)]
    m = re.match(r"(\w+)_(\d+)", "layer_12")
    pattern = re.compile("a")
    return (x * int(m.group(2)), m.group(1), m.groups(), pattern.sub("b", "banana"), re.findall(r"\d", "a1b2"), heap, order, bisect.bisect([1, 2, 3], 2),
            json.dumps({"a": 1}), json.loads('{"a": [1, 2]}'), ",".join(map(str, [1, 2])), "-".join(c for c in "ab"), collections.defaultdict.fromkeys("ab", 1),
            collections.OrderedDict(a=1) | {"b": 2})


@one
def test_matches_of_patterns(x):
    """As packaging.version parses a release: methods of a pattern give matches, or None."""
    pattern = re.compile(r"(?P<major>\d+)\.(?P<minor>\w+)")
    found, missed = pattern.fullmatch("4.56"), pattern.match("none")
    numbers = [int(each["major"]) for each in pattern.finditer("1.a 2.b")] + [each.span() for each in re.finditer("a", "banana")]
    return x * int(found.group("major")), found.groupdict(), found.lastgroup, missed, numbers, pattern.search("v2.0").start()


def test_sizes_and_views_of_dictionaries_from_outside():
    views = [kind(table) for table in ({"a": 1, "b": 2}, collections.OrderedDict(a=1, b=2)) for kind in (dict.keys, dict.values, dict.items)]

    def fn(x, size, keys, values, items):
        return x * size.numel() + sum(values) + len(keys), "b" in keys, [name for name, _ in items], keys
    for three in (views[:3], views[3:]):
        compiled, _ = capture(fn, fullgraph=True)
        given = torch.ones(2), torch.Size([2, 3]), *three
        found = compiled(*given)
        same(found, fn(*given))
        assert found[-1] is three[0]


def test_views_are_read_anew():
    table = {"a": 1}
    compiled, _ = capture(lambda x, values: x + sum(values), fullgraph=True)
    view = table.values()
    same(compiled(torch.zeros(2), view), torch.ones(2))
    table["b"] = 5
    same(compiled(torch.zeros(2), view), torch.full((2,), 6.0))


class Kind(abc.ABCMeta):
    """A metaclass over ABCMeta, whose __instancecheck__ is ABCMeta's."""


class Shape(metaclass=Kind):
    pass


class Square(Shape):
    pass


@one
def test_instances_of_abstract_classes_with_a_metaclass_of_their_own(x):
    return x + isinstance(Square(), Shape), isinstance(x, Shape), isinstance(3, (Shape, int))


@one
def test_typed_dictionaries_of_typing_extensions(x):
    made = Message(name="a", value=x)
    made["value"] = made["value"] + 1
    return made["value"], made, type(made)


def test_imports_of_what_a_package_has_not_loaded():
    """`from package import part` loads the part, which is an effect: a break.  A name that is nowhere is an ImportError."""
    assert find_module({}, "collections", 0, ("OrderedDict", "abc")) is collections
    assert find_module({}, "collections", 0, ("part_that_is_not_loaded",)) is None

    def fn(x):
        from collections import part_that_is_nowhere
        return x * part_that_is_nowhere
    with pytest.raises(ImportError, match="cannot import name 'part_that_is_nowhere' from 'collections'"):
        capture(fn)[0](torch.ones(2))


@one
def test_loggers_and_context_variables(x):
    logger = logging.getLogger("firesteel.tests.quiet")
    if logger.isEnabledFor(logging.DEBUG):
        x = x * 100
    return x + SCALE.get()


def test_context_variables_are_read_anew():
    compiled, _ = capture(lambda x: x + SCALE.get(), fullgraph=True)
    same(compiled(torch.zeros(2)), torch.full((2,), 3.0))
    token = SCALE.set(5)
    try:
        same(compiled(torch.zeros(2)), torch.full((2,), 5.0))
    finally:
        SCALE.reset(token)


@one
def test_states_as_functions(x):
    @torch.no_grad()
    def quiet(t):
        return torch.is_grad_enabled(), t * 2

    @torch.enable_grad()
    def loud(t):
        return torch.is_grad_enabled(), t * 2
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    wide = torch.ones(2)
    torch.set_default_dtype(before)
    return quiet(x), loud(x), wide, torch.is_inference_mode_enabled(), x.is_complex(), x.type(torch.DoubleTensor), x.type(), (3).__class__, x.nbytes


@one
def test_set_grad_enabled_as_a_decorator(x):
    with torch.set_grad_enabled(False):
        @torch.set_grad_enabled(True)
        def loud(t):
            return torch.is_grad_enabled(), t * 2
        inside = torch.is_grad_enabled()
        out = loud(x)
    return out, inside, torch.is_grad_enabled()


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_kernels_of_attention_are_chosen_inside(backend):
    def f(q):
        with sdpa_kernel([SDPBackend.MATH]):
            y = torch.nn.functional.scaled_dot_product_attention(q, q, q)
            chosen = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
        return y, chosen, torch.backends.cuda.flash_sdp_enabled()
    q = torch.randn(1, 2, 4, 8)
    compiled = fs.compile(f, backend=backend, fullgraph=True)
    for _ in range(2):
        same(compiled(q), f(q))
    assert torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        same(compiled(q), f(q))
        assert not torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize("call", [lambda: torch.set_num_threads(torch.get_num_threads()), lambda: torch._C._set_mkldnn_enabled(True)],
                         ids=["set_num_threads", "setter"])
def test_what_sets_a_state_for_good_breaks(call):
    def f(x):
        y = x + 1
        call()
        return y * 2 + torch.rand(3)
    check(f, torch.randn(3), graphs=2)
    strict, _ = capture(f, fullgraph=True)
    with pytest.raises(Unsupported):
        strict(torch.randn(3))


def test_thread_locals():
    local = threading.local()
    local.v = 3

    def f(x):
        local.w = x + local.v
        return local.w * 2, hasattr(local, "none")
    compiled, backend = capture(f, fullgraph=True)
    x, others = torch.randn(3), []
    same(compiled(x), f(x))
    local.v = 4
    same(compiled(x), f(x))

    def elsewhere():
        local.v = 7
        others.append((compiled(x), f(x)))
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    same(*others[0])
    assert len(backend.graphs) == 2


def test_warnings_are_caught_inside():
    def f(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("quiet", stacklevel=1)
            y = x + 1
        warnings.warn("loud", stacklevel=1)
        return y * 2
    compiled, backend = capture(f, fullgraph=True)
    x, before = torch.randn(3), list(warnings.filters)
    for _ in range(2):
        with pytest.warns(UserWarning) as seen:
            same(compiled(x), (x + 1) * 2)
        assert [str(w.message) for w in seen] == ["loud"]
    assert list(warnings.filters) == before and len(backend.graphs) <= 2


# -- inputs and objects of more kinds -----------------------------------------------------------------------------------
class Whole(int):
    pass


class Pair(tuple):
    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


@one
def test_subclasses_with_new_and_numbers(x):
    return x * Whole(3), Pair(1, x)[1], len(Pair(1, 2)), Whole(2) + 1, isinstance(Pair(1, 2), tuple)


def test_namespaces():
    def f(x, ns):
        ns.c = 3
        made = types.SimpleNamespace(t=x, n=2)
        made.n += ns.b[0]
        del ns.gone
        return x * ns.a + made.n, hasattr(ns, "gone"), vars(made)["n"], made
    check(f, torch.randn(3), types.SimpleNamespace(a=2, b=[1, 2], gone=0), fullgraph=True)


def test_bound_methods_of_tensors_and_numbers_of_numpy():
    def f(x, method, scale, count):
        return method(), x * scale + count, np.float32(2.0).item(), x * float(np.sqrt(4.0)), x * int(np.prod([2, 3])), scale * x
    x = torch.randn(3)
    compiled, backend = capture(f, fullgraph=True)
    for scale in (np.float32(2.5), np.float32(2.5), np.float64(1.5)):
        args = (x, x.sin, scale, np.int64(3))
        same(compiled(*args), f(*args))
    assert len(backend.graphs) == 2


@one
def test_class_variables_and_caches_of_the_region(x):
    class Kept:
        n = 0
        items = []

        @classmethod
        def more(cls):
            cls.n += 1
            return cls.n

    @functools.lru_cache(None)
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)
    Kept.more()
    Kept.items.append(x)
    point = Point(4)
    reference = weakref.ref(point)
    return x * Kept.more(), len(Kept.items), Kept().n, x * fib(6), reference().a, reference() is point, slice(None, None, 2).indices(5)


@one
def test_abstract_class_made_inside(x):
    class Abstract(abc.ABC):
        @abc.abstractmethod
        def f(self):
            ...

    class Concrete(Abstract):
        def f(self):
            return 2
    try:
        Abstract()
    except TypeError as e:
        return x * Concrete().f(), type(e).__name__


class Overriding(typing.NamedTuple):
    a: torch.Tensor
    b: int

    def __getitem__(self, key):
        return "not an item"


class Typed(typing.TypedDict):
    n: int
    t: torch.Tensor


class Open(collections.namedtuple("Open", "a b")):
    """Has a __dict__ of its own."""


@one
def test_named_tuple_with_attributes(x):
    pair = Open(x, 2)
    pair.more = x * 3
    return pair, pair.more + pair.b, collections.OrderedDict.fromkeys("ab", value=x)


class Checked(collections.namedtuple("Checked", "a b")):
    def __new__(cls, a, b=None):
        return super().__new__(cls, *((a * 2, 5) if b is None else (a, b)))


@one
def test_named_tuple_with_its_own_new(x):
    pair = Checked(x)
    return pair, Checked(x, b=3), pair.a + pair.b, type(pair) is Checked, Checked._make([x, 1])


def test_packed_sequences_are_made_inside():
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(4, 2, 3), torch.tensor([4, 2]))

    def f(packed, scale):
        return type(packed)(packed.data * scale, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    check(f, packed, torch.tensor(2.0), fullgraph=True)


def test_named_tuple_with_attributes_over_a_break():
    def f(x):
        pair = Open(x + 1, 2)
        pair.more = 3
        print(end="")
        pair.late = 4
        return pair.a * pair.more + pair.late, pair
    compiled, backend = capture(f)
    x = torch.randn(3)
    for _ in range(2):
        out, pair = compiled(x)
        assert (pair.more, pair.late) == (3, 4)
        same(out, f(x)[0])
    assert len(backend.graphs) == 2


def test_named_tuple_with_its_own_getitem():
    check(lambda t: t.a * t.b, Overriding(torch.randn(3), 2), fullgraph=True)


@one
def test_typed_dicts_words_and_classes_as_arguments(x):
    made = Typed(n=2, t=x)
    made["n"] += 1
    drawn = torch.zeros(3).uniform_(**{"from": 0.0, "to": 1.0})
    items = iter(["a", "b", "c"])
    try:
        [1, 2].index(5)
    except ValueError as e:
        text = str(e)
    return ((x * 5).to(bool).to(float).to(int), torch.zeros(2, dtype=int), made["t"] * made["n"], drawn, "b" in items, next(items), text,
            torch.add in frozenset({torch.add, len}), len in frozenset({len}), isinstance(x, torch.FloatTensor), isinstance(x, torch.LongTensor))


def test_weak_references_are_read_anew():
    def f(x, reference):
        return x + 1 if reference() is not None else x - 1
    compiled, _ = capture(f, fullgraph=True)
    x, kept = torch.zeros(2), Point(1)
    reference = weakref.ref(kept)
    same(compiled(x, reference), x + 1)
    del kept
    gc.collect()
    same(compiled(x, reference), x - 1)


def test_the_type_of_what_is_only_passed_on_is_guarded():
    def f(x, m):
        return x + 1 if isinstance(m, np.ndarray) else x - 1
    compiled, _ = capture(f, fullgraph=True)
    x = torch.zeros(2)
    for other in (np.arange(2), x, memoryview(b"a")):
        same(compiled(x, other), f(x, other))


def test_a_leaf_made_inside_gets_its_gradient():
    def f(x):
        leaf = torch.ones(2, requires_grad=True)
        return leaf, leaf * 2 * x
    leaf, out = fs.compile(f, backend="aot_eager")(torch.ones(2))
    out.sum().backward()
    same(leaf.grad, torch.full((2,), 2.0))


def test_functions_of_torch_are_compiled_themselves():
    compiled, backend = capture(torch.sin, fullgraph=True)
    x = torch.randn(3)
    same(compiled(x), torch.sin(x))
    assert len(backend.graphs) == 1


# -- weak containers ------------------------------------------------------------------------------------------------------
def test_weak_sets():
    known, first, second, zero = weakref.WeakSet(), Thing(), Thing(), torch.zeros(())
    known.add(first)

    def member(x, thing):
        return x + 1 if thing in known else x - 1
    compiled = fs.compile(member, fullgraph=True)
    assert [compiled(zero, thing).item() for thing in (first, second, first, second, Thing())] == [1, -1, 1, -1, -1]
    known.add(second)
    assert [compiled(zero, thing).item() for thing in (first, second)] == [1, 1]

    def change(x, thing, seen):
        known.discard(thing)
        seen.extend(known)
        known.add(thing)
        return x + len(known)
    seen = []
    assert fs.compile(change, fullgraph=True)(zero, second, seen).item() == 2 and seen == [first] and second in known


def test_weak_sets_keep_nothing_alive():
    known, things, zero = weakref.WeakSet(), [Thing(), Thing()], torch.zeros(())
    known.update(things)
    compiled = fs.compile(lambda x: x + len(known) + sum(thing.size for thing in known), fullgraph=True)
    assert compiled(zero).item() == 4
    things.pop()
    gc.collect()
    assert len(known) == 1 and compiled(zero).item() == 2


def test_weak_dictionaries():
    sizes, first, second, zero = weakref.WeakKeyDictionary(), Thing(), Thing(), torch.zeros(())
    sizes[first] = 3.0
    compiled = fs.compile(lambda x, thing: x + sizes.get(thing, 0.0), fullgraph=True)
    assert [compiled(zero, thing).item() for thing in (first, second, first)] == [3, 0, 3]


class Thing:
    size = 1
