"""The algebra on small examples: folding, canonical sums, index expressions, text."""
import copy
import math
import pickle

import pytest

from firesteel.sym import expr as E
from firesteel.sym.expr import Expr, const, context_of, make, substitute, symbol

n, m, T, C = (symbol(name) for name in ("s0", "s1", "T", "C"))
i, j, b, f = (make("axis", "i64", (), name) for name in "ijbf")


def simplify(expr, ranges):
    return context_of(ranges).simplify(expr) if type(expr) is Expr else expr


def test_numbers_stay_numbers():
    assert E.add(2, 3) == 5 and type(E.add(2, 3)) is int
    assert E.floordiv(-7, 2) == -4 and E.mod(-7, 2) == 1
    assert E.lt(1, 2) is True and E.product([2, 3, 4]) == 24 and E.product([]) == 1
    assert E.sum_([1, 2]) == 3 and E.where(True, 1, 2) == 1 and E.ceildiv(7, 2) == 4
    assert E.truediv(1, 2) == 0.5 and E.sqrt(4) == 2.0 and E.min_(3, 2) == 2


def test_hash_consing():
    assert n + 1 is n + 1
    assert const(float("nan")) is const(float("nan"))
    assert const(0.0) is not const(-0.0) and const(1) is not const(True) and const(1) is not const(1.0)
    assert pickle.loads(pickle.dumps(n * m + 1)) is n * m + 1
    assert copy.deepcopy(n + m) is n + m
    with pytest.raises(AttributeError):
        n.op = "axis"
    with pytest.raises(TypeError, match="truth value"):
        bool(n < m)


@pytest.mark.parametrize("got, want", [
    (n + 3 - n, 3), (n + m, m + n), (n * m, m * n), (2 * n + n, 3 * n), (n - n, 0), ((n + 1) * (n - 1), n * n - 1), (0 * n, 0),
    (n * 4 // 4, n), ((n * 4 + 3) // 4, n), ((4 * n + 5) % 4, 1), ((6 * n + 4) // 4, (3 * n + 2) // 2), (n // 1, n), (n % 1, 0),
    (n // 2 * 2 + n % 2, n), (n * m // m, n), ((n * m + 3) % m, 3 % m), (n // 2 // 3, n // 6), (n % 12 % 4, n % 4), (n // -1, -n),
    ((n + 1) * m // (n + 1), m), (0 - (-n), n), (n < n + 1, True), (n >= n, True), (n > n, False),
    (E.eq(2 * n, 5), False), (E.eq(2 * n, 4), E.eq(n, 2)), (E.eq(n, m), E.eq(m, n)), (n < 5, n <= 4), (E.not_(n < 5), n >= 5), (2 * n < 5, n <= 2),
    (E.ne(n, n), False), (E.min_(n, n + 1), n), (E.max_(n, n + 1), n + 1), (E.min_(n, m), E.min_(m, n)), (E.not_(E.eq(n, m)), E.ne(n, m)),
    (E.and_(n < m, True), n < m), (E.and_(n < m, n >= m), False), (E.or_(n < m, n < m), n < m), (E.where(n < m, n, n), n),
    (E.floor(E.truediv(n, 2)), n // 2), (E.ceil(E.truediv(n, 2)), E.ceildiv(n, 2)), (E.lshift(n, 3), 8 * n), (E.rshift(n, 1), n // 2), (E.pow_(n, 2), n * n),
    (E.abs_(n - m), E.abs_(m - n)), (E.sum_([n, m, n, 1]), 2 * n + m + 1), (E.to_int(n), n),
])
def test_canonical(got, want):
    assert got is want or (type(got) is type(want) and type(got) is not E.Expr and got == want)


def test_connectives_of_integers_are_bitwise():
    six, three = const(6), const(3)
    for bits in (make("and", "i64", (six, three)), make("or", "i64", (n, const(0))), make("not", "i64", (make("and", "i64", (n, three)),))):
        assert simplify(bits, {}) is bits


ROWS = {i: (0, T - 1), j: (0, C - 1)}


@pytest.mark.parametrize("given, ranges, want", [
    (i // T, ROWS, 0), (i % T, ROWS, i), ((b * T + i) // T, ROWS, b), ((b * T + i) % T, ROWS, i), ((i * C + j) // C, ROWS, i),
    ((i * C + j) % C, ROWS, j), ((i * C + j) // (T * C), ROWS, 0), ((i * C + j) % (T * C), ROWS, i * C + j), ((i * C + j) // (2 * C), ROWS, i // 2),
    ((b * T * C + i * C + j) // C % T, ROWS, i), (((f // (T * C)) * T + (f // C) % T) * C + f % C, {T: (1, None), C: (1, None)}, f),
    (f // C % T, {f: (0, T * C - 1), T: (0, None), C: (0, None)}, f // C), ((8 * i + j) // 16, {j: (0, 7)}, i // 2),
    ((8 * i + j) % 16, {j: (0, 7)}, 8 * (i % 2) + j), (f % (4 * C) // C, {C: (1, None)}, f // C % 4), (E.min_(i, T), ROWS, i), (i < T, ROWS, True),
    (E.where(i < T, i, 0), ROWS, i), (i // 8, {i: (8, 15)}, 1), (i % 8, {i: (8, 15)}, i - 8), (i // 8, {i: (-8, -1)}, -1), (i, {i: (3, 3)}, 3),
    ((T - 1 - i) // T, ROWS, 0), ((T - 1 - i) % T, ROWS, T - 1 - i),
])
def test_simplify_with_ranges(given, ranges, want):
    got = simplify(given, ranges)
    assert got is want or (type(got) is int and got == want), f"{given} -> {got}, wanted {want}"


def test_simplify_keeps_what_it_cannot_know():
    assert simplify(i // T, {i: (0, T)}) is i // T
    assert simplify(i % T, {i: (-1, T - 1)}) is i % T
    assert simplify(f // C // T, {}) is f // C // T      # C or T might be negative
    load = make("load", "i64", (i,), "x")
    assert simplify(load % 8, {load: (0, 7)}) is load


def test_simplify_inside_of_opaque_nodes():
    load = make("load", "f32", ((i * C + j) // C,), "x")
    assert simplify(load, ROWS).args == (i,)


def test_substitute_and_evaluate():
    expr = (n * m + 3) // 2
    assert substitute(expr, {n: 4, m: 5}) == 11
    assert substitute(expr, {n: m}) is (m * m + 3) // 2
    assert E.evaluate(expr, {"s0": -4, "s1": 5}) == (-20 + 3) // 2
    assert E.evaluate(E.truediv(n, 2) * 1.5, {"s0": 3}) == 2.25
    shared = n
    for _ in range(200):
        shared = E.max_(shared % 7 + m, shared // 3)     # 2**200 paths
    assert type(substitute(shared, {n: 10, m: 1})) is int
    assert E.free_symbols(shared) == {n, m}


def test_long_sums_do_not_recurse():
    many = [symbol(f"x{k}") for k in range(3000)]
    total = E.sum_(many)
    assert E.evaluate(total, {f"x{k}": 1 for k in range(3000)}) == 3000
    assert substitute(total, {many[0]: 5}) is E.sum_([5, *many[1:]])


@pytest.mark.parametrize("expr, text", [
    (n + 3, "s0 + 3"), (3 - n, "-s0 + 3"), (2 * n * m - m, "2*s0*s1 - s1"), ((n + m) // 2 % m, "(s0 + s1) // 2 % s1"), (n // (m * 2), "s0 // (2*s1)"),
    (n > 3, "s0 >= 4"), (n <= m, "s0 <= s1"), (E.ne(n, m), "s0 != s1"), (E.ceildiv(n, 4), "-(-s0 // 4)"), (n + (-m) // 4, "s0 + -s1 // 4"),
    (E.and_(n > 3, E.not_(E.eq(m, 2))), None), (E.where(n > 3, n, 0), "(s0 if s0 >= 4 else 0)"), (E.truediv(n, m), "float(s0) / float(s1)"),
    (E.sqrt(n), "math.sqrt(float(s0))"), (E.max_(n, 3), "max(s0, 3)"),
])
def test_text(expr, text):
    if text is not None:
        assert str(expr) == repr(expr) == text
    values = {"s0": 7, "s1": 3}
    assert eval(E.python_text(expr), {"math": math}, values) == E.evaluate(expr, values)


def test_mixed_numbers():
    assert (n * 1.5).dtype == "f64" and (n + True) is n + 1
    assert E.evaluate(n * 1.5, {"s0": 2}) == 3.0
    with pytest.raises(ZeroDivisionError):
        n // 0
    x = make("load", "f32", (i,), "x")
    assert (x + 1).dtype == "f32" and (x < 2).dtype == "bool"
    with pytest.raises(TypeError, match="convert"):
        x + n


def test_a_choice_between_truths_is_a_truth():
    """Also after the same choice between 1 and 0, which are equal to True and False."""
    chosen = make("where", "bool", (i < 3, E.as_expr(True), E.as_expr(False)))
    assert simplify(E.where(i < 3, 1, 0), {i: (0, 9)}).dtype == "i64"
    assert simplify(chosen, {i: (0, 9)}) is (i < 3)
