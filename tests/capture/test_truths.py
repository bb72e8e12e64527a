"""bool(tensor), `not tensor` and the item of a flag: numbers that run time knows, in one graph; what depends on them is a branch on data."""
import pytest
import torch
from test_joins import X, same

import firesteel as fs


def either(x):
    if bool(x.isnan().any()) or bool((x > 100).all()):
        return x * 2
    return x + 1


def asked_first(x):
    positive = bool((x > 0).any())
    y = x * 2
    if positive:
        y = y + 1
    return y


def negated(x):
    none = not (x > 0).any()
    return (x + 1 if none else x - 1), none


def negated_twice(x):
    return x * 2, bool(x.sum().relu()), not torch.equal(x, x.abs())


def while_on_one(x):
    while bool((x.abs() < 4).any()):
        x = x * 2
    return x


def of_a_number(x):
    return x * 2, bool(x.sum().relu()), bool(x.sum().relu().long())


def item_of_a_flag(x):
    found = (x > 0).any().item()
    return x * (3 if found else 5), x * int((x > 0).all()), found


def compared(x):
    flag = bool((x > 0).all())
    y = x * 2 if flag is True else x.sin()
    return y, flag is not False, flag is None, torch.equal(x, x.abs()) is flag


def kept_in_a_dict(x):
    seen = {"positive": bool((x > 0).any())}
    return x.exp() if seen["positive"] and seen["positive"] is not None else x


def counted_flags(x):
    return x + sum(bool(row.sum() > 0) for row in x)


PROGRAMS = [either, asked_first, negated, negated_twice, while_on_one, of_a_number, item_of_a_flag, compared, kept_in_a_dict, counted_flags]


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_in_one_graph(fn, backend):
    same(fn, (X,), (-X,), (X - 1.2,), (X * 200,), backend=backend)


def test_the_answers_are_bools():
    def f(x):
        return bool(x.sum()), not x.sum(), (x > 0).all().item(), not bool(x.sum())
    for x in (X, -X, X * 0):
        found = fs.compile(f, fullgraph=True)(x)
        assert found == f(x) and [type(answer) for answer in found] == [bool] * 4


def test_of_more_than_one_element_eager_raises():
    for fn in (lambda x: bool(x), lambda x: not x):
        with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
            fs.compile(fn)(X)


def test_under_vmap_torch_raises():
    def f(x):
        return torch.func.vmap(lambda row: row * 2 if bool(row.sum() > 0) else row)(x)
    with pytest.raises(RuntimeError, match="data-dependent control flow"):
        fs.compile(f)(X)


def accumulated(tensors):
    total, scaled = 0.0, []
    for number, x in enumerate(tensors):
        total += number * x.norm().item()
        scaled.append(x.mul(total))
        x.add_(1, alpha=float(x.sum()) / 3)
    return total, scaled


def test_floats_read_in_a_loop_are_in_its_graph():
    compiled = fs.compile(accumulated, fullgraph=True)
    for seed in range(2):
        torch.manual_seed(seed)
        given = [torch.randn(3), torch.randn(2, 2), torch.randn(())]
        copies = [x.clone() for x in given]
        torch.testing.assert_close(compiled(given), accumulated(copies))
        torch.testing.assert_close(given, copies)


def test_a_long_loop_that_reads_floats_is_left_at_a_break():
    fs.reset()
    fs.counters.clear()
    given = [torch.randn(2) for _ in range(400)]
    copies = [x.clone() for x in given]
    torch.testing.assert_close(fs.compile(accumulated, backend="eager")(given), accumulated(copies))
    assert 0 < sum(fs.counters["graph_break"].values()) < 5 and not fs.counters["recompile_limit"]


def test_numbers_read_elsewhere_break():
    for program in (lambda x: x * x.sum().item(), lambda x: [x * x.argmax().item() for _ in range(2)]):
        with pytest.raises(fs.errors.Unsupported, match="turns the data of a tensor into a Python number"):
            fs.compile(program, fullgraph=True)(torch.randn(3))
