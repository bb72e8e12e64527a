"""Tensors made of numbers alone: branches on them, numbers read of them and shapes that depend on them are known while capturing."""
import pytest
import torch

import firesteel as fs

X = torch.tensor([0.5, -1.0, 2.0])


def check(fn, *args, breaks=0):
    fs.reset()
    fs.counters.clear()
    torch.testing.assert_close(fs.compile(fn)(*args), fn(*args))
    assert sum(fs.counters["graph_break"].values()) == breaks, fs.counters["graph_break"]
    assert fs.counters["stats"]["unique_graphs"] == breaks + 1


def steps(x):
    t, i = torch.linspace(0, 1, 4), 0
    while t[i] < 0.5:
        i += 1
        x = x + t[i]
    return x * i


def numbers(x):
    t = torch.arange(3)
    return x[:int(t.max())] * float(t[1]) + t.sum().item(), t.tolist(), bool(t[1] > 0), [int(n) for n in (t * 2).unsqueeze(0)[0]]


def shapes(x):
    t = torch.tensor([3.0, 1.0, 1.0])
    values, counts = t.unique(return_counts=True)
    return x[:len(values)] * values + counts, t.nonzero(), t[t > 1.0], torch.tensor([], dtype=torch.float64).unique(return_counts=True)[1]


def written_through_a_view(x):
    t = torch.zeros(3)
    view = t[0:1]
    if view.sum() == 0:
        x = x + 1
    t.add_(1)
    if view.sum() == 0:
        x = x + 10
    return x


def sizes(x):
    n = torch.div(x.shape[0] + 1, 2, rounding_mode="trunc")
    return x.new_ones((n, 2)), x[1:].view(n, -1), x[:n], [x * k for k in range(n)], len([x, "ab"][n - 1]), torch.arange(n), x.unsqueeze(n - 1), torch.as_strided(x, [n], stride=[n - 1])


def under_a_device(x):
    with torch.device("meta"):
        shape = torch.zeros(3).shape
    return x + shape[0]


@pytest.mark.parametrize("fn", [steps, numbers, shapes, sizes, written_through_a_view, under_a_device])
def test_known(fn):
    check(fn, X)


def test_what_is_not_known():
    def of_an_input(x, t):
        return x + 1 if t.sum().item() > 0 else x

    def of_a_draw(x):
        return x * 0 if torch.rand(1).item() < 2 else x
    check(of_an_input, X, torch.ones(2), breaks=1)
    check(of_a_draw, X, breaks=1)


def test_extremes_of_tensors():
    def fn(x):
        return max(x[0], x[1], x[2]) * 2, min(x[0], x[1]) + max(torch.tensor(1.0), torch.tensor(2.0))
    for sign in (1, -1):
        check(fn, X * sign)
    x = X.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(fs.compile(lambda x: max(x[0], x[1]))(x), x), torch.autograd.grad(max(x[0], x[1]), x))


@pytest.mark.parametrize("fn", [
    lambda x, t: torch.add(x, x.sin(), alpha=t), lambda x, t: torch.sub(x, x.sin(), alpha=t), lambda x, t: x.add(x.sin(), alpha=t),
    lambda x, t: x.clone().sub_(x.sin(), alpha=t), lambda x, t: torch.add(x, x[0], alpha=t), lambda x, t: torch.add(x, 3.0, alpha=2.0)])
def test_alpha_that_is_a_tensor(fn):
    for dtype in (torch.float32, torch.float64):
        check(fn, X, torch.tensor(0.25, dtype=dtype))


def test_alpha_that_is_written_later():
    def fn(x, t):
        y = torch.add(x, x.sin(), alpha=t)
        t.add_(1)
        return y * t
    (x, twin), t = (X.clone().requires_grad_() for _ in range(2)), torch.tensor(0.5)
    fs.compile(fn)(x, t.clone()).sum().backward()
    fn(twin, t.clone()).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)


# -- a literal that was written ---------------------------------------------------------------------------------------------
def added(t, x):
    t += 1


def added_by_out(t, x):
    torch.add(t, 1, out=t)


def added_in_a_list(t, x):
    torch._foreach_add_([t], 1)


def moved(t, x):
    t.set_(x.sum())


def added_by_a_view(t, x):
    t.view(1)[0] = 9


def added_by_data(t, x):
    t.data.mul_(4)


def added_by_data_of_a_view(t, x):
    t.view(1).data.mul_(4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
@pytest.mark.parametrize("read", [lambda t: t.item(), lambda t: (t * 2).item(), lambda t: 1.0 if t > 2.5 else -1.0], ids=["item", "of a product", "branch"])
@pytest.mark.parametrize("write", [added, added_by_out, added_in_a_list, moved, added_by_a_view, added_by_data, added_by_data_of_a_view])
def test_a_written_literal_is_read_anew(write, read, backend):
    def fn(x):
        t = torch.tensor(2.)
        write(t, x)
        return x * read(t), t
    x = torch.ones(3)
    for captured in (False, True):
        with fs.config.patch(capture_scalar_outputs=captured):
            torch.testing.assert_close(fs.compile(fn, backend=backend)(x), fn(x))


@pytest.mark.parametrize("dynamic", [None, True])
def test_masks_of_known_data(dynamic):
    """The elements that they choose are known places."""
    def fn(x, y):
        mask = torch.arange(3) < torch.tensor([2, 3, 1])[:, None]
        return x[mask], y[:, mask], y[torch.tensor([True, False]), :, 1], x[mask.logical_not(), ...], y[..., mask & False]
    compiled = fs.compile(fn, fullgraph=dynamic is None, dynamic=dynamic)
    for wrong in (0, 1):
        given = [torch.randn(3, 3 + wrong, 4, requires_grad=True), torch.randn(2, 3, 3, requires_grad=True)]
        if wrong:
            with pytest.raises(IndexError, match="shape of the mask"):
                fn(*given)
            with pytest.raises(IndexError, match="shape of the mask"):
                fs.compile(fn, dynamic=dynamic)(*given)
            continue
        found, expected = compiled(*given), fn(*given)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(sum(part.square().sum() for part in parts), given) for parts in (found, expected)))
