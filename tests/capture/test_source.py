"""Sources: the same chain as text, as value, as name."""
import builtins
import collections
import types

import pytest
import torch
from harness import member

from firesteel.capture.source import (
    Attr,
    Call,
    CellContents,
    Constants,
    DimSize,
    Fixed,
    Item,
    Local,
    Nth,
    SourceWriter,
    StorageOffset,
    Stride,
    Type,
    build_function,
    global_source,
    identifier,
    literal,
)

MARKER = object()


def model():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    inner.blocks = torch.nn.ModuleDict({"odd name": torch.nn.Linear(1, 1)})
    return inner


def closing(value):
    def inner(a, b=MARKER, *, c=7):
        return value
    return inner


x = Local("x")
CASES = [
    # source, arguments, readable name
    (x, {"x": 5}, "x"),
    (Local(".0"), {".0": 6}, ".0"),
    (x.attr("real"), {"x": 5}, "x.real"),
    (Attr(x, "odd name"), {"x": types.SimpleNamespace(**{"odd name": 3})}, "x.odd name"),
    (x.item(1), {"x": [4, 5]}, "x[1]"),
    (x.item("k").item((1, "a")), {"x": {"k": {(1, "a"): 9}}}, "x['k'][(1, 'a')]"),
    (Item(x, MARKER), {"x": {MARKER: 2}}, None),
    (member(x, "0", "weight"), {"x": model()}, "x[0].weight"),
    (member(x, "1", "running_mean", table="_buffers"), {"x": model()}, "x[1].running_mean"),
    (member(x, "blocks", "odd name", table="_modules"), {"x": model()}, "x.blocks.odd name"),
    (Type(x), {"x": 5}, "type(x)"),
    (Call(x, len), {"x": "abc"}, "len(x)"),
    (Nth(x, 1), {"x": {"a": 1, "b": 2}}, "list(x)[1]"),
    (Nth(x, 2), {"x": collections.deque([1, 2, 3])}, "list(x)[2]"),
    (DimSize(x, 1), {"x": torch.zeros(2, 3)}, "x.size(1)"),
    (Stride(x, 0), {"x": torch.zeros(2, 3)}, "x.stride(0)"),
    (StorageOffset(x), {"x": torch.zeros(4)[2:]}, "x.storage_offset()"),
    (Fixed(MARKER, "marker"), {}, "marker"),
    (global_source("MARKER", globals()), {}, "MARKER"),
    (Item(Fixed(builtins.__dict__, "builtins"), "len"), {}, "len"),
    (CellContents(Item(Attr(x, "__closure__"), 0), "value"), {"x": closing(MARKER)}, "value"),
    (CellContents(Fixed(types.CellType(3), "cell")), {}, "cell.cell_contents"),
    (Item(Attr(x, "__defaults__"), 0), {"x": closing(1)}, "x.__defaults__[0]"),
    (Item(Attr(x, "__kwdefaults__"), "c"), {"x": closing(1)}, "x.__kwdefaults__['c']"),
]


def evaluate(source, arguments):
    constants = Constants()
    text = source.text(constants)
    return build_function("f", [identifier(name) for name in arguments], [f"return {text}"], constants)(*arguments.values())


@pytest.mark.parametrize("source, arguments, name", CASES, ids=range(len(CASES)))
def test_text_value_and_name_agree(source, arguments, name):
    fetched, evaluated = source.fetch(arguments), evaluate(source, arguments)
    assert evaluated is fetched or evaluated == fetched
    assert name is None or source.name == name


def test_equal_sources_are_one_key():
    a, b = (member(Local("m"), "0", "weight") for _ in range(2))
    assert a == b and hash(a) == hash(b) and a is not b and len({a, b}) == 1
    assert a != member(Local("m"), "0", "bias") and a != member(Local("n"), "0", "weight")
    assert Item(x, 1) != Item(x, True)
    assert Attr(x, "a") != Item(x, "a")


def test_fixed_is_by_identity():
    first, second = [1], [1]
    assert Fixed(first) != Fixed(second) and Fixed(first) == Fixed(first)


def test_sources_are_frozen():
    with pytest.raises(AttributeError, match="frozen"):
        x.key = 3


def test_chain_and_root():
    source = x.attr("a").item(0)
    assert source.root is x and [s.name for s in source.chain()] == ["x", "x.a", "x.a[0]"]


@pytest.mark.parametrize("value", [1, True, None, ..., "a'b\n", b"\0", 1.5, -0.0, (), (1,), (1, (None, "x"))])
def test_literals_are_exact(value):
    again = eval(literal(value))
    assert again == value and type(again) is type(value) and repr(again) == repr(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1], {}, (1, [2]), int, torch.float32, collections.Counter()])
def test_no_literal(value):
    assert literal(value) is None


def test_names_do_not_collide():
    """A user's variable may be called like a temporary or a constant of generated code."""
    constants = Constants()
    marker = constants.bind(MARKER, "x")
    names = ["t_0", marker, "x"]
    emitter = SourceWriter(constants)
    sources = [Local(name).attr("v").attr(which) for name in names for which in ("real", "imag")]
    emitter.share(sources)
    loads = [emitter.load(source) for source in sources]
    f = build_function("f", map(identifier, names), [*emitter.lines, f"return [{', '.join(loads)}]"], constants)
    assert f(*[types.SimpleNamespace(v=n) for n in (1, 2, 3)]) == [1, 0, 2, 0, 3, 0]


def test_shared_prefixes_are_read_once():
    class Counting:
        reads = 0

        @property
        def inner(self):
            Counting.reads += 1
            return types.SimpleNamespace(a=1, b=2, c=types.SimpleNamespace(d=3))
    emitter = SourceWriter(Constants())
    inner = x.attr("inner")
    sources = [inner.attr("a"), inner.attr("b"), inner.attr("c").attr("d")]
    emitter.share(sources)
    text = ", ".join(emitter.load(source) for source in sources)
    f = build_function("f", ["a_x"], [*emitter.lines, f"return ({text})"], emitter.constants)
    assert f(Counting()) == (1, 2, 3) and Counting.reads == 1


def test_local_gives_a_name_once():
    emitter = SourceWriter(Constants())
    source = x.attr("y")
    name = emitter.local(source)
    assert name.isidentifier() and emitter.local(source) == name == emitter.load(source) and len(emitter.lines) == 1
    assert emitter.local(x) == "a_x"


def test_constants_bind_objects_once():
    constants = Constants()
    value = [1]
    assert constants.bind(value) == constants.bind(value) != constants.bind([1])
    assert constants.namespace[constants.bind(value)] is value
    assert constants.name(3) == "3"
