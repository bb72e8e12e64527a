"""firesteel.records.dataclass does what the standard library's does, for every way in which it is used here."""
import copy
import dataclasses
import pickle
from dataclasses import field

import pytest

from firesteel import records

SETTINGS = [{}, {"frozen": True}, {"slots": True}, {"frozen": True, "slots": True}, {"eq": False}, {"frozen": True, "eq": False}]


def definitions(dataclass, **settings):
    @dataclass(**settings)
    class Point:
        x: int
        y: int = 2
        note: str = field(default="", compare=False)
        parts: list = field(default_factory=list, compare=False, repr=False)

    @dataclass(**settings)
    class Pixel(Point):
        color: str = "red"

        def length(self):
            return self.x + self.y
    return Point, Pixel


def outcome(call):
    try:
        return call()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_as_the_standard_library(settings):
    asked = []
    for dataclass in (dataclasses.dataclass, records.dataclass):
        Point, Pixel = definitions(dataclass, **settings)
        p, q, r = Point(1), Point(1, note="other"), Pixel(1, color="blue")
        asked.append([
            repr(p), repr(r), p == q, p == Point(2), p == r, p != "p", outcome(lambda: hash(p) == hash(q)), r.length(), p.parts, p.parts is q.parts,
            repr(dataclasses.replace(r, y=5)), [f.name for f in dataclasses.fields(r)], dataclasses.is_dataclass(Point),
            outcome(lambda: setattr(p, "x", 3)), outcome(lambda: delattr(Point(1), "y")), outcome(lambda: Point()),
            outcome(lambda: Point(1, 2, "", [], 5)), outcome(lambda: Point(z=1)), repr(copy.copy(q)), repr(copy.deepcopy(r)), Point.__match_args__,
            hasattr(p, "__dict__"), p.y, q.note, *(() if settings.get("slots") else (Point.y, outcome(lambda: setattr(p, "z", 3)))),
        ])
    assert asked[0] == asked[1]


def test_what_is_made_after_init():
    @records.dataclass
    class Made:
        x: int
        double: int = field(init=False)

        def __post_init__(self):
            self.double = 2 * self.x
    assert Made(2).double == 4 and Made(2) == Made(2) and Made.__hash__ is None


def test_methods_of_the_class_stay():
    @records.dataclass(frozen=True)
    class Named:
        x: int

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 7

        def __repr__(self):
            return "named"
    assert Named(1) == Named(2) and hash(Named(1)) == 7 and repr(Named(1)) == "named"


@records.dataclass(frozen=True, slots=True)
class Stored:
    x: int


def test_it_can_be_pickled():
    assert pickle.loads(pickle.dumps(Stored(3))) == Stored(3)


def test_a_mutable_default_is_refused():
    with pytest.raises(ValueError):
        @records.dataclass
        class Shared:
            parts: list = []
