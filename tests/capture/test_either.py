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


def projected(x, w):
    for view in (x, w):
        if view.sum() > 0:
            return x - w * 0.5, 0.1
    return x, 1


def int_or_float(x, w):
    y, decay = projected(x, w)
    return y * (1 - 0.5 * decay), decay, y.detach().add(w.detach(), alpha=decay), decay / 4.0


def left_early(x, w):
    found, scale = None, 2
    for view in [x, w, x + w]:
        if view.max() > 1:
            found, scale = view * 2, 0.5
            break
    else:
        found = x
    return found * scale, scale


ROWS = [(X, X.flip(0)), (X, -X), (-X, X), (-X, -X), (X * 10, X * 0), (X * 0, X)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fn", [trust_ratio, clipped, stored, asked, returned, of_both_ways, int_or_float, left_early], ids=lambda fn: fn.__name__)
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


def whole_tensors(x, w):
    return x.int() * projected(x, w)[1]


def added_to_an_int(x, w):
    return x + (3 + projected(x, w)[1])


def long_loop(x, w):
    for _ in range(50):
        x = x + 1
        if x.sum() > w.sum() + 40:
            return x * 2
    return x


def iterator_used_again(x, w):
    rest = iter([x, w, x * 2])
    for view in rest:
        if view.sum() > 0:
            break
    return sum(rest, torch.zeros(()))


@pytest.mark.parametrize("fn", [other_dtype, whole_tensors, added_to_an_int, long_loop, iterator_used_again, whole_numbers, half, of_three, looked_at], ids=lambda fn: fn.__name__)
def test_where_the_two_are_not_alike(fn):
    compiled = fs.compile(fn)
    for row in ROWS:
        found, expected = compiled(*row), fn(*row)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
