"""What the tests of captured backwards share: how eager's backward and a captured one are compared, and small functions with a backward of their own."""
import torch

import firesteel as fs


# -- comparing ----------------------------------------------------------------------------------------------------------
def difference(one, other, path=""):
    """The first place in which two observations differ; None where there is none."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
        return None if same else f"{path}: {one} against {other}"
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((found for key in one if (found := difference(one[key], other[key], f"{path}.{key}"))), None)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return next((found for n, (a, b) in enumerate(zip(one, other)) if (found := difference(a, b, f"{path}[{n}]"))), None)
    return None if type(one) is type(other) and one == other else f"{path}: {one} against {other}"


def grads(module):
    return [p.grad for p in module.parameters()]


def counted():
    """(captures, backwards of the eager engine, graphs whose order is not known)"""
    numbers = fs.counters["compiled_autograd"]
    return numbers["captures"], numbers["by_eager"], numbers["unknown_order"]


def seeded(fn):
    """What fn() returns, with random numbers from the start."""
    torch.manual_seed(0)
    return fn()


def forget():
    """For a fixture of each test: what one has captured is unknown to the next."""
    fs.reset()
    yield
    fs.reset()


def check_captured(fn, backends=(None,), captures=None, by_eager=0, run=seeded, same=None, **settings):
    """fn() gives the same with and without captured backwards: as many of them as `captures` (None: some), and `by_eager` left to the eager engine.
    A backend of None is the compiler that fs.compiled_autograd takes by itself."""
    same = same or (lambda expected, found: difference(expected, found) is None)
    expected = run(fn)
    for backend in backends:
        fs.reset()
        with captured_by(backend, **settings):
            found = run(fn)
        assert same(expected, found), difference(expected, found)
        made, *others = counted()
        assert made == captures if captures is not None else made
        assert others == [by_eager, 0]


def captured_by(backend, **settings):
    return fs.compiled_autograd() if backend is None else fs.compiled_autograd(lambda gm: fs.compile(gm, backend=backend, **settings))


def mlp(wide=4):
    return torch.nn.Sequential(torch.nn.Linear(4, wide), torch.nn.Tanh(), torch.nn.Linear(wide, 3))


# -- custom functions ---------------------------------------------------------------------------------------------------
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.sin() * factor

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return grad * x.cos() * ctx.factor, None


class OnlySecond(torch.autograd.Function):
    """Its first input never gets a gradient."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y * 2

    @staticmethod
    def backward(ctx, grad):
        return None, grad * 2


class Doubles(torch.autograd.Function):
    """Others have its forward, and a backward of their own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Nothing(Doubles):
    """Its input never gets a gradient."""

    @staticmethod
    def backward(ctx, grad):
        return None
