"""Intervals of a nest's integers: indices are exact, what is made of data may wrap around."""
import pytest

from firesteel.codegen.bounds import INT64, NestIntervals
from firesteel.codegen.flat import FlatNest
from firesteel.loops.ir import Axis, axis, check_index
from firesteel.loops.scalars import S
from firesteel.sym.expr import make, symbol

I, J = axis("i"), axis("j")
DATA = make("at", "i64", (), (0, "some address"))


@pytest.fixture
def intervals():
    return NestIntervals(FlatNest((Axis("i", 10), Axis("j", symbol("s0"))), (), ("i64",)))


def test_indices(intervals):
    assert intervals.of(S.add(S.mul(I, 4), 3)) == (3, 39) and intervals.of(S.sub(I, 20)) == (-20, -11)
    assert intervals.of(S.mul(J, I)) == (0, None) and intervals.of(S.mod(J, 7)) == (0, 6) and intervals.of(S.floordiv(I, 4)) == (0, 2)
    assert intervals.of(S.where(S.lt(I, 3), I, -1)) == (-1, 9)
    assert intervals.fits(I, 0, 9) and not intervals.fits(I, 0, 8) and intervals.reach(S.sub(I, 20)) == 20


def test_data_may_wrap_around(intervals):
    positive = S.max(DATA, 0)
    assert intervals.of(DATA) == INT64 == intervals.of(symbol("s0")) and intervals.of(positive) == (0, INT64[1])
    assert intervals.of(S.min(positive, 5)) == (0, 5) and intervals.of(check_index(DATA, 8)) == (0, 7)
    for sum_ in (S.add(positive, positive), S.add(positive, J), S.mul(positive, 2), S.abs(DATA)):
        assert intervals.of(sum_) == INT64 and not intervals.natural(S.floordiv(sum_, 3))
    assert intervals.natural(S.floordiv(positive, 3)) and intervals.natural(S.mod(S.add(I, J), 4))
