"""A backward in which some tangents are missing: eager's engine does not run what lies behind them."""
import pytest
import torch

import firesteel as fs
from firesteel.autograd.arrived import engine_reach, paths


def infinite(x):
    return x.sqrt(), x * 2, x.log().sum()


def transposed(x):
    """The sum of gradients has other strides than what is left of it."""
    y = x.t() * 1.5
    return (y.t().sqrt() + 1), y.sum(0), y * 2


def signs(x):
    return torch.sgn(x.sum()), x.index_add(0, torch.tensor([0, 0]), x[:2])


def cancelled(x):
    y = x.sin()
    return y - y, y * 2


def items(x):
    one, other = x.split(x.shape[0] // 2)
    return one.sqrt(), other * 2, torch.cat([one, other]).sin()


class Halved(torch.autograd.Function):
    """No gradient for the second input."""

    @staticmethod
    def forward(ctx, x, w):
        return x * 0.5

    @staticmethod
    def backward(ctx, g):
        return g * 0.5, None


def none_of_one(x):
    w = x * 3
    return Halved.apply(x.detach(), w), w.exp(), x * 1


PROGRAMS = {fn.__name__: fn for fn in (infinite, transposed, signs, cancelled, items, none_of_one)}


def gradients(function, which, size, **options):
    x = torch.zeros(size, 3, requires_grad=True)
    out = function(x)
    wanted = [out[k] for k in which if out[k].requires_grad]
    return torch.autograd.grad(wanted, x, [torch.ones_like(o) for o in wanted], allow_unused=True, **options)[0] if wanted else "no history"


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_what_did_not_arrive_is_not_run(program, dynamic):
    compiled = fs.compile(program, dynamic=dynamic)
    count = len(program(torch.zeros(4, 3)))
    for size in (4, 6):
        for which in ([k for k in range(count) if bits >> k & 1] for bits in range(1, 1 << count)):
            expected, found = gradients(program, which, size), gradients(compiled, which, size)
            assert (found is None) == (expected is None), which
            if isinstance(expected, torch.Tensor):
                torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda text, which=which: f"{which}: {text}")


def test_gradients_that_are_differentiated_again():
    for which in ((0,), (1,), (0, 2)):
        torch.testing.assert_close(gradients(fs.compile(transposed), which, 4, create_graph=True),
                                   gradients(transposed, which, 4, create_graph=True), equal_nan=True)


def test_inside_a_captured_backward():
    results = []
    for function in (infinite, fs.compile(infinite)):
        x = torch.zeros(4, requires_grad=True)
        with fs.compiled_autograd() if function is not infinite else torch.enable_grad():
            function(x)[1].sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(results[1], results[0])


def test_a_saved_tensor_that_is_not_read_may_be_overwritten():
    def program(x):
        return x.cumprod(0), x * 2
    x = torch.ones(4, requires_grad=True)
    y, z = fs.compile(program)(x)
    with torch.no_grad():
        y.mul_(2)
    z.sum().backward(retain_graph=True)
    torch.testing.assert_close(x.grad, torch.full((4,), 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_saved_result_that_is_read_is_checked_alone():
    """y and z are both saved as results; z's backward reads z."""
    def program(x):
        return x.cumprod(0), x.sin().cumprod(0)
    x = torch.ones(4, requires_grad=True)
    y, z = fs.compile(program)(x)
    with torch.no_grad():
        y.mul_(2)
    z.sum().backward()
    again = torch.ones(4, requires_grad=True)
    torch.testing.assert_close(x.grad, torch.autograd.grad(again.sin().cumprod(0).sum(), again)[0])


def test_a_function_without_any_gradient_unpacks_nothing():
    """The second stretch has no gradient for what it reads of the first."""
    def program(x, n):
        t = torch.tanh(x).cumprod(1)
        s = t * n.sum().item()
        t[..., 1:].add_(s.mean())
        return torch.log_softmax(x * 0.5, 1)
    grads = []
    for function in (program, fs.compile(program)):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        function(x * 1, torch.ones(3, dtype=torch.int64)).sin().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_ways_of_a_history():
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    roots = [x * y, x.sin().sum(), torch.sgn(y)]
    assert paths(roots) == {id(x): 0b011, id(y): 0b101}
    asked = []

    def alone(k):
        asked.append(k)
        return torch.autograd.grad(roots[k], (x, y), torch.ones_like(roots[k]), allow_unused=True, retain_graph=True)
    assert engine_reach(roots, (x, y), [0b011, 0b001], alone) == [0b011, 0b101] and asked == [2]


def apart(a, b):
    y = b.exp()
    return (a.sin() * 2).sum() + (y * 3).sum(), y


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("way", ["grad of a", "grad of b", "backward to a", "backward"])
def test_gradients_that_are_not_asked_for_need_no_saved_tensor(way, create_graph):
    """Eager's engine runs what leads to the leaves that it is asked for: an overwritten tensor that only others read does not matter."""
    def gradient(function):
        a, b = torch.linspace(0, 1, 3).requires_grad_(), torch.linspace(1, 2, 3).requires_grad_()
        loss, y = function(a * 1, b * 1)
        with torch.no_grad():
            y.add_(1)
        if way.startswith("grad"):
            return torch.autograd.grad(loss, a if way[-1] == "a" else b, create_graph=create_graph)[0]
        loss.backward(inputs=[a] if way[-1] == "a" else None, create_graph=create_graph)
        return a.grad
    compiled = fs.compile(apart)
    if way[-1] == "a":
        torch.testing.assert_close(gradient(compiled), gradient(apart))
        return
    for function in (apart, compiled):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(function)


@pytest.mark.parametrize("of", ["a", "b", "ab"])
def test_leaves_that_are_asked_for_beside_an_overwritten_result(of):
    def program(a, b):
        y = b @ b
        return a.sin().sum() + (y @ y).sum(), y

    def gradients(function):
        leaves = {"a": torch.linspace(0, 1, 3).requires_grad_(), "b": torch.eye(3).requires_grad_()}
        loss, y = function(*leaves.values())
        with torch.no_grad():
            y.add_(1)
        return torch.autograd.grad(loss, [leaves[name] for name in of])
    compiled = fs.compile(program)
    if of == "a":
        torch.testing.assert_close(gradients(compiled), gradients(program))
        return
    for function in (program, compiled):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(function)


def test_a_second_backward_of_a_freed_graph_is_refused_where_one_leaf_is_asked_for():
    a, b = torch.ones(3).requires_grad_(), torch.ones(3).requires_grad_()
    loss, _ = fs.compile(apart)(a, b)
    torch.autograd.grad(loss, a)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, a)
