"""Branches on data that leave different Python values: numbers are results of the branch, others are decided when the program uses them."""
import pytest
import torch
from test_joins import X, same

import firesteel as fs


class Holder:
    pass


def counted(x):
    n, scale = 0, 0.5
    for row in x:
        if row.sum() > 0:
            n += 1
            scale = scale * 2
    return x * n + scale, n, scale


def flag(x):
    positive = False
    if x.sum() > 0:
        positive = True
    return x * 2, positive


def flag_asked_for(x):
    positive = x.sum() > 0
    small = True
    if x.max() > 1:
        small = False
    y = x * 2 if positive else x * 3
    return (y + 1 if small else y - 1), small


def number_in_a_question(x):
    n = 1
    if x.sum() > 0:
        n = 3
    if n > 2:
        return x.sin()
    return x.cos() * n


def attribute_of_an_object(x):
    held = Holder()
    held.n = 0
    if x.sum() > 0:
        held.n += 2
    return x + held.n


def cell(x):
    n = 0

    def count():
        nonlocal n
        n += 1
    if x.sum() > 0:
        count()
    return x * n


def texts(x):
    name = "negative"
    if x.sum() > 0:
        name = "positive"
    return x * 2, name


def nothing(x):
    y = None
    if x.sum() > 0:
        y = x * 2
    return x + 1, y


def nothing_returned(x):
    if x.sum() > 0:
        return x * 2
    return None


def tuple_from_before(x):
    pair = (x, 1)
    if x.sum() > 0:
        pair = (x * 2, 2)
    return pair[0] * pair[1]


def asked_again(x):
    positive = x.sum() > 0
    if positive:
        y = x * 2
    z = x + 1
    z = y + z if positive else z - 1
    return z * 2 if not positive else z


def layers_dropped(x):
    for _ in range(3):
        skip = torch.rand([]) < 0.5
        if not skip:
            out = (x * 2, x + 1)
            x = out[0]
        if skip:
            out = (None, None)
    return x


def condition_written(x):
    positive = x.sum() > 0
    if positive:
        positive.zero_()
        return x * 2 if positive else x * 3
    return x


def condition_written_through_data(x):
    positive = x.sum() > 0
    if positive:
        positive.data.zero_()
        return x * 2 if positive else x * 3
    return x


def condition_written_in_a_loop(x):
    positive = x.sum() > 0
    if positive:
        while x.abs().sum() < 100:
            x = x * 2 if positive else x * 3
            positive.zero_()
    return x


def tuples_and_nothing(x):
    out, kept = None, [x]
    if x.sum() > 0:
        out, kept = (x * 2, [x + 1, None]), None
    return x + 1, out, kept


@pytest.mark.parametrize("fn", [counted, flag, flag_asked_for, number_in_a_question, attribute_of_an_object, cell, texts, nothing, nothing_returned,
                                tuple_from_before, asked_again, layers_dropped, condition_written, condition_written_through_data, tuples_and_nothing], ids=lambda fn: fn.__name__)
def test_in_one_graph(fn):
    same(fn, (X,), (-X,), (X - 1.2,))


def test_values_that_the_program_looks_at():
    """What a number or a text decides while capturing breaks, once, behind the branch."""
    def f(x):
        n, name = 1, "a"
        if x.sum() > 0:
            n, name = 3, "b"
        return x.repeat(n, 1) if name == "b" else x.sum() + n
    compiled = fs.compile(f)
    for x in (X, -X, X):
        torch.testing.assert_close(compiled(x), f(x))
    with pytest.raises(fs.errors.Unsupported, match="depends on the data of a tensor"):
        fs.compile(f, fullgraph=True)(X)


def test_int_and_float_are_not_joined():
    def f(x):
        n = 1
        if x.sum() > 0:
            n = 2.5
        return x * n
    compiled = fs.compile(f)
    for x in (X.int(), -X.int()):
        torch.testing.assert_close(compiled(x), f(x))


def test_sizes_that_are_symbols():
    def f(x):
        n = x.shape[0]
        if x.sum() > 0:
            n = n + 1
        return x * n, n
    compiled = fs.compile(f, fullgraph=True, dynamic=True)
    for x in (X, -X, torch.ones(5, 4), -torch.ones(7, 4)):
        torch.testing.assert_close(compiled(x), f(x))


def entries_added(x):
    found = {"first": 1}
    if x.sum() > 0:
        found["scale"], found["y"] = 2, x * 2
    else:
        found["scale"], found["y"] = 3, x * 3
    return found["y"] + found["scale"], found


def entries_added_in_another_order(x):
    found = {}
    if x.sum() > 0:
        found["a"], found["b"] = x * 2, x * 3
    else:
        found["b"], found["a"] = x * 5, x * 7
    return found


def test_entries_that_both_ways_add_to_a_dict_made_here():
    same(entries_added, (X,), (-X,))
    compiled = fs.compile(entries_added_in_another_order)
    for x in (X, -X):
        found, expected = compiled(x), entries_added_in_another_order(x)
        assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


@fs.config.patch(capture_scalar_outputs=True)
def test_a_way_that_takes_the_product_of_a_number_that_changes():
    def f(holder, x):
        rate = 1e-3 * holder.rate
        total = x.abs().sum().item()
        y = x.add(x, alpha=rate)
        if total != 0:
            y = y.add(x, alpha=rate * total)
        return y
    compiled, holder = fs.compile(f, fullgraph=True), Holder()
    for rate in (1.0, 2.0, 3.0):
        holder.rate = rate
        for x in (X, X * 0):
            torch.testing.assert_close(compiled(holder, x), f(holder, x))


def undecided_by_what_was_written(x):
    positive, out = x.sum() > 0, None
    if positive:
        out = x * 2
    positive.data.zero_()
    return out


def a_draw_that_was_written(x):
    p = torch.rand([]) < 0
    p.data.fill_(1)
    return x * 2 if p else x * 3


def joined_and_written(x):
    y = x * 2
    z = y if x.sum() > 0 else x * 3
    z.data.zero_()
    return z, y


@pytest.mark.parametrize("fn", [undecided_by_what_was_written, a_draw_that_was_written, joined_and_written, condition_written_in_a_loop], ids=lambda fn: fn.__name__)
def test_writes_that_raise_no_version(fn):
    compiled = fs.compile(fn)
    for x in (X, -X, X):
        torch.testing.assert_close(compiled(x), fn(x))
