"""A branch on data that leaves a number in one way and a tensor of no dimension in the other."""
import pytest
import torch
from test_joins import X, same

import firesteel as fs


def trust_ratio(x, w):
    weight, step = w.detach().norm(), x.detach().norm()         # an alpha has no gradient
    ratio = 1 if weight == 0 or step == 0 else weight / step
    return x * ratio, ratio, w.add(x, alpha=-0.1 * ratio)


def clipped(x, w):
    return x / max(1.0, w.norm() / 0.5), w.clone().div_(max(1e-3, x.norm())), min(2, x.sum()) * 0.5 - 1


def stored(x, w):
    state = {"scale": 3}
    if w.sum() > 0:
        state["scale"] = w.sum()
    return x.mul(state["scale"]).sum() + state["scale"], state


def asked(x, w):
    scale = max(0.1, w.sum())
    return (x * 2 if scale > 1 else x * 3), scale


def helper(w):
    if w.sum() > 0:
        return w.max()
    return 0.25


def returned(x, w):
    scale = helper(w)
    return x - 2 * scale, x.addcmul(x, w, value=1.5), -1 * scale


def of_both_ways(x, w):
    ratio = 1.0
    if x.sum() > 0:
        if w.sum() > 0:
            ratio = w.max()
    elif w.sum() > 0:
        ratio = w.min()
    return x * ratio, ratio


ROWS = [(X, X.flip(0)), (X, -X), (-X, X), (-X, -X), (X * 10, X * 0), (X * 0, X)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fn", [trust_ratio, clipped, stored, asked, returned, of_both_ways], ids=lambda fn: fn.__name__)
def test_in_one_graph(fn, dtype):
    rows = [tuple(t.to(dtype) for t in row) for row in ROWS]
    same(fn, *rows)
    compiled = fs.compile(fn)
    for row in rows:
        found, expected = (torch.utils._pytree.tree_leaves(f(*row)) for f in (compiled, fn))
        assert [(type(one), getattr(one, "dtype", None)) for one in found] == [(type(one), getattr(one, "dtype", None)) for one in expected]


def other_dtype(x, w):
    return x.double() * max(0.1, w.sum())       # the number has more digits than the tensor


def whole_numbers(x, w):
    return x.int() * max(2, w.sum())


def half(x, w):
    return x.half() * max(0.1, w.half().sum())


def of_three(x, w):
    return x * max(0.5, min(w.sum(), 2.0))


def looked_at(x, w):
    scale = max(1.0, w.sum())
    return x * scale if isinstance(scale, float) else x - scale


@pytest.mark.parametrize("fn", [other_dtype, whole_numbers, half, of_three, looked_at], ids=lambda fn: fn.__name__)
def test_where_the_two_are_not_alike(fn):
    compiled = fs.compile(fn)
    for row in ROWS:
        found, expected = compiled(*row), fn(*row)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
