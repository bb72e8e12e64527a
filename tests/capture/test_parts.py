"""Calls made for real whose Python code is compiled on its own: forwards of custom functions, functions that are not split."""
import pytest
import torch

import firesteel as fs
from firesteel import counters
from firesteel.capture import marks


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()
    yield
    fs.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


class Everything(torch.autograd.Function):
    """Says all that a forward can say, around a break."""

    @staticmethod
    def forward(ctx, x, scale, note=None):
        y = x.sin() * scale
        fs.graph_break()
        ctx.scale, ctx.extra = scale, y + 1
        ctx.save_for_backward(x, y)
        positive = y > 0
        ctx.mark_non_differentiable(positive)
        ctx.set_materialize_grads(False)
        return y, positive, x.cos() if ctx.needs_input_grad[0] else x

    @staticmethod
    def backward(ctx, grad, none, other):
        x, y = ctx.saved_tensors
        assert none is None
        own = 0 if other is None else other * -x.sin()
        return grad * x.cos() * ctx.scale + own + 0 * ctx.extra, None, None


class Doubled(torch.autograd.Function):
    """Writes its input."""

    @staticmethod
    def forward(ctx, x):
        fs.graph_break()
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Apart(torch.autograd.Function):
    """With a setup_context."""

    @staticmethod
    def forward(x, by=3):
        fs.graph_break()
        return x * by

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.by, None


def everything(x):
    y, positive, z = Everything.apply(x * 1, 3.0)
    return y * 2 + z, positive


def doubled(x):
    y = x * 1
    return Doubled.apply(y) + y


def apart(x):
    return Apart.apply(x + 1) * 2


@pytest.mark.parametrize("fn", [everything, doubled, apart])
def test_the_forward_of_a_custom_function_that_breaks_is_compiled(fn):
    def results(call):
        x = torch.arange(-2., 3., requires_grad=True)
        out = call(x)
        first = out[0] if isinstance(out, tuple) else out
        first.sum().backward()
        return [t.detach() for t in (out if isinstance(out, tuple) else (out,))] + [x.grad], first.grad_fn.next_functions[0][0].name()

    (expected, node), (found, its_node) = results(fn), results(fs.compile(fn, backend="eager"))
    torch.testing.assert_close(found, expected)
    assert its_node == node
    assert graphs() >= 3        # before, inside, behind


def test_a_custom_function_as_the_compiled_callable():
    compiled = fs.compile(Apart.apply, backend="eager")
    x = torch.randn(3, requires_grad=True)
    out = compiled(x)
    assert torch.equal(out, x * 3) and type(out.grad_fn) is Apart._backward_cls and graphs() == 1
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.))


def test_a_class_that_watches_its_subclasses_is_left_alone():
    seen = []

    class Watched(torch.autograd.Function):
        def __init_subclass__(cls, **kwargs):
            seen.append(cls)

        @staticmethod
        def forward(ctx, x):
            fs.graph_break()
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.randn(3, requires_grad=True)
    assert torch.equal(fs.compile(lambda x: Watched.apply(x), backend="eager")(x), x * 2)
    assert seen == [] and graphs() == 0


def test_a_whole_function_is_not_split_into_its_caller():
    def inner(x):
        y = x.sin()
        fs.graph_break()
        z = y.cos()
        fs.graph_break()
        return z * 2

    setattr(inner, marks.WHOLE, True)

    def outer(x):
        return inner(x + 1) * 3

    x = torch.randn(3)
    compiled = fs.compile(outer, backend="eager")
    assert torch.equal(compiled(x), outer(x)) and torch.equal(compiled(x), outer(x))
    assert graphs() == 5        # before the call; three inside; behind it


def test_a_whole_function_without_a_break_is_inlined():
    def inner(x):
        return x.sin()

    setattr(inner, marks.WHOLE, True)
    x = torch.randn(3)
    assert torch.equal(fs.compile(lambda x: inner(x) * 2, backend="eager", fullgraph=True)(x), x.sin() * 2)
    assert graphs() == 1
