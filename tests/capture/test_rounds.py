"""`while` on data and torch.while_loop: one round in one graph, values, gradients and effects as in eager."""
import pytest
import torch
from test_joins import X, same
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

import firesteel as fs
from firesteel.testing import CompileCounter


def plain(x):
    while x.sum() < 100:
        x = x * 2 + 1
    return x.sin()


def counted(x):
    n, scale = 0, 1.0
    while x.sum() < 100:
        x = x * 2 + 1
        n += 1
        scale *= 0.5
    return x * n, n, scale


def two_conditions(x):
    n = 0
    while x.sum() < 1e9 and n < 5:
        x = x * 2 + 1
        n += 1
    return x


def number_first(x):
    n = 0
    while n < 5 and x.sum() < 60:
        x = x * 2 + 1
        n += 1
    return x, n


def either(x):
    n = 0
    while x.sum() < 60 or n < 3:
        x = x * 1.5 + 1
        n += 1
    return x, n


def both_tensors(x):
    while x.sum() < 200 and x.max() < 40:
        x = x * 1.5 + 1
    return x


def left_by_break(x):
    y = x
    while True:
        y = y * 2 + 1
        if y.sum() > 100:
            break
    return y * x


def broken_and_asked(x):
    y = x
    while y.sum() < 300:
        y = y * 2 + 1
        if y.max() > 50:
            break
        y = y + x
    return y


def continued(x):
    n = 0
    while x.sum() < 300:
        x = x + 4
        if x.max() > 12:
            continue
        x = x * 2
        n += 1
    return x, n


def left_by_return(x):
    while x.sum() < 300:
        x = x * 2 + 1
        if x.max() > 50:
            return x.cos()
    return x.sin()


def with_else(x):
    while x.sum() < 300:
        x = x * 2 + 1
        if x.max() > 50:
            break
    else:
        x = x - 7
    return x * 2


def branch_inside(x):
    n = 0
    while x.sum() < 100:
        if x.max() > 3:
            x = x + 5
            n += 1
        else:
            x = x * 2 + 1
    return x * n


def nested(x):
    y, rounds = x, 0
    while y.sum() < 300:
        z = y
        while z.sum() < 100:
            z = z + 3
            rounds += 1
        y = y + z
    return y, rounds


def in_a_for_loop(x):
    for k in range(3):
        while x.sum() < 50 * (k + 1):
            x = x * 1.5 + 1
    return x


def in_a_function(x):
    def grow(t, limit):
        while t.sum() < limit:
            t = t * 2 + 1
        return t
    return grow(x, 50) + grow(x * 2, 100)


def written(x):
    y = x.clone()
    while y.sum() < 100:
        y.mul_(2).add_(1)
    return y + x


def converging(x):
    error, y = torch.tensor(1.0), x
    while error > 1e-3:
        new = (y + 1 / (y.abs() + 1)) / 2
        error = (new - y).abs().max()
        y = new
    return y, error


def exchanged(x):
    a, b = x, x + 1
    while a.sum() < 100:
        a, b = b, a + b
    return a, b


def pairs(x):
    state = (x, 0)
    while state[0].sum() < 100:
        state = (state[0] * 2 + 1, state[1] + 1)
    return state


def closed_over(x):
    n = 0

    def count():
        nonlocal n
        n += 1
    while x.sum() < 100:
        x = x * 2 + 1
        count()
    return x * n


def unchanged_values(x):
    w, kind = x.cos(), "a"
    while x.sum() < 100:
        x = x * 2 + w.exp() if kind == "a" else x
    return x


def without_gradients(x):
    y = x
    with torch.no_grad():
        while y.sum() < 100:
            y = y * 2 + 1
    return y + x


def not_converged(x):
    while not (x > 20).all():
        x = x * 2 + 1
    return x


def of_a_number_in_a_tensor(x):
    i = torch.tensor(0)
    while i < 5:
        x = x * 1.5
        i = i + 1
    return x, i


def starts_without_gradient(x):
    y = torch.ones(4)
    while y.sum() < 100:
        y = y * 2 + x[0].exp()
    return y


PROGRAMS = [plain, counted, two_conditions, number_first, either, both_tensors, left_by_break, broken_and_asked, continued, left_by_return, with_else,
            branch_inside, nested, in_a_for_loop, in_a_function, written, converging, exchanged, pairs, closed_over, unchanged_values, without_gradients,
            not_converged, of_a_number_in_a_tensor, starts_without_gradient]
ROWS = [(X,), (X * 5,), (X * 40,), (X - 0.7,)]


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_in_one_graph(fn):
    same(fn, *ROWS)


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_with_symbolic_sizes(fn):
    compiled = fs.compile(fn, fullgraph=True, dynamic=True)
    for x in (X, X * 40, torch.linspace(0.1, 2, 20).reshape(5, 4)):
        torch.testing.assert_close(compiled(x), fn(x))


def test_a_module_that_counts():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.rounds = nn.Linear(4, 4), 0

        def forward(self, x):
            x = self.linear(x)
            while x.abs().sum() < 100:
                x = x * 2 + self.linear(x).relu()
                self.rounds += 1
            return x
    torch.manual_seed(0)
    model, other = Model(), Model()
    other.load_state_dict(model.state_dict())
    compiled = fs.compile(model, fullgraph=True)
    for (x,) in ROWS:
        results = []
        for m, call in ((model, compiled), (other, other)):
            m.zero_grad()
            call(x).sum().backward()
            results.append([m.rounds, *(p.grad for p in m.parameters() if p.grad is not None)])
        torch.testing.assert_close(*results)


def test_no_round_gives_what_came_in():
    def f(x, w):
        while x.sum() < 1:
            x = x * w
        return x
    compiled = fs.compile(f, fullgraph=True)
    w = torch.full((4,), 3.0, requires_grad=True)
    for x in (torch.ones(4), torch.full((4,), 0.01)):
        assert compiled(x, w).requires_grad == f(x, w).requires_grad
    x = torch.ones(4)
    assert compiled(x, w) is x


def test_random_numbers():
    def f(x):
        while x.sum() < 100:
            x = x + torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)
        return x
    same(f, *ROWS)


def test_a_write_to_the_input():
    def f(x):
        while x.sum() < 100:
            x.add_(3)
        return x * 2
    same(f, *ROWS, grad=False)


def test_an_error_inside():
    def f(x):
        while x.sum() < 100:
            x = x * 2 + 1
            if x.max() > 60:
                raise ValueError("too large")
        return x
    compiled = fs.compile(f, fullgraph=True)
    torch.testing.assert_close(compiled(X), f(X))
    y = X.clone()
    y[0, 0] = 35
    y[1:] = -9
    for call in (compiled, f):
        with pytest.raises(ValueError, match="too large"):
            call(y)


def splits(fn, *rows):
    """Values as in eager, with breaks; one clear error under fullgraph."""
    compiled = fs.compile(fn)
    for row in rows:
        torch.testing.assert_close(compiled(*row), fn(*row))
    with pytest.raises(fs.errors.Unsupported, match="depends on the data of a tensor"):
        fs.compile(fn, fullgraph=True)(*rows[0])


def test_what_grows_is_not_captured():
    def kept(x):
        out = []
        while x.sum() < 100:
            x = x * 2 + 1
            out.append(x)
        return out

    def longer(x):
        while x.sum() < 100:
            x = torch.cat([x, x + 1])
        return x

    def of_another_type(x):
        y = x.int()
        while y.sum() < 100:
            y = y * 2.5 + 1
        return y
    for fn in (kept, longer, of_another_type):
        splits(fn, (X,), (X * 40,))


def test_a_write_behind_the_loop():
    """The result may be the input: a write to either is seen in both."""
    def f(x):
        y = x
        while y.sum() < 100:
            y = y * 2 + 1
        y.add_(1)
        return x * 2, y
    compiled = fs.compile(f)
    for scale in (1, 40):
        x, z = X * scale, X * scale
        torch.testing.assert_close([*compiled(x), x], [*f(z), z])


# -- torch.while_loop ---------------------------------------------------------------------------------------------------
STEP = torch.linspace(0.1, 0.4, 4)


def looped(i, x):
    i, x = while_loop(lambda i, x: (x.sum() < 100) & (i < 50), lambda i, x: (i + 1, x * 2 + STEP.sum()), (i, x + 1))
    return i, x.sin()


def in_python(i, x):
    x = x + 1
    while (x.sum() < 100) & (i < 50):
        i, x = i + 1, x * 2 + STEP.sum()
    return i, x.sin()


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph(dynamic):
    compiled = fs.compile(looped, fullgraph=True, dynamic=dynamic)
    for n, start in ((4, 1.0), (4, 3.0), (4, 50.0), (5, 1.0), (7, 0.5)):
        x, i = torch.full((n,), start), torch.tensor(0)
        torch.testing.assert_close(compiled(i, x), in_python(i, x))
    counter = CompileCounter()
    fs.compile(looped, backend=counter, fullgraph=True)(i, x)
    assert counter.frame_count == 1


def test_without_gradients_of_a_parameter():
    w = torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        ours = fs.compile(lambda x: while_loop(lambda x: x.sum() < 50, lambda x: (x + w,), (x * w,)), fullgraph=True)(STEP)
    want = STEP * w
    while want.sum() < 50:
        want = want + w
    torch.testing.assert_close(ours, (want.detach(),))


def test_gradients_pass_through_all_rounds():
    """Also where only what the body reads outside has one, so that the first round takes a tensor without."""
    def looped(x, w):
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, (y * w).tanh()), (torch.tensor(0), x))[1] * x

    def plain(x, w):
        y = x
        for _ in range(3):
            y = (y * w).tanh()
        return y * x
    compiled = fs.compile(looped, fullgraph=True)
    for tracked in (False, True):
        x, w = STEP.clone().requires_grad_(tracked), (STEP + 1).requires_grad_()
        wanted = [x, w] if tracked else [w]
        first = [torch.autograd.grad(fn(x, w).sum(), wanted, create_graph=True) for fn in (compiled, plain)]
        torch.testing.assert_close(*first)
        torch.testing.assert_close(*(torch.autograd.grad(sum(g.sum() for g in grads), wanted) for grads in first))


def test_gradients_of_a_loop_of_no_round_and_of_many():
    compiled = fs.compile(lambda x: while_loop(lambda x: x.sum() < 50, lambda x: (x * 2,), (x,)), fullgraph=True)
    for scale in (1, 100, 0.01):
        x = (STEP * scale).requires_grad_()
        got = compiled(x)[0]
        (grad,) = torch.autograd.grad(got.sum(), x)
        torch.testing.assert_close(grad, (got / x).detach())
