"""Graphs that are compiled in stretches: each knows the sizes that it uses, also where nothing that it reads has them."""
import pytest
import torch

import firesteel as fs


def folded(x, w):
    """Returns what it goes on with, so it is cut there; the second stretch reads sizes that are computed from the input's."""
    y = (x * w).unfold(0, 4, 2).contiguous()
    return y, y.sum(1) * x.shape[0]


def hooked(x, w):
    y = torch.nn.functional.pad((x * w)[::3], (1, 0))
    y.register_hook(lambda g: g * 2)
    return y.cumsum(0) + x.shape[0]


@pytest.mark.parametrize("program", [folded, hooked], ids=lambda p: p.__name__)
@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_sizes_reach_every_stretch(program, backend):
    compiled = fs.compile(program, backend=backend, dynamic=True)
    fs.counters.clear()
    for n in (9, 12, 20, 31):
        found = []
        for fn in (program, compiled):
            x, w = torch.arange(float(n)).requires_grad_(), torch.full((), 0.5, requires_grad=True)
            out = fn(x, w)
            sum(t.square().sum() for t in (out if isinstance(out, tuple) else (out,))).backward()
            found.append((out, x.grad, w.grad))
        torch.testing.assert_close(found[1], found[0])
    assert fs.counters["stats"]["unique_graphs"] == 1


def test_a_view_of_a_written_tensor_goes_into_a_stretch():
    def program(x, m):
        y = x * 2
        view = y[:, :2]
        y.mul_(3)
        return y, torch.where(m, view, 0.0).sum() + y.sum()

    def run(fn):
        x = torch.ones(3, 4, requires_grad=True)
        first, second = fn(x, torch.ones(3, 2, dtype=torch.bool))
        (first.sum() + second).backward()
        return first, second, x.grad

    torch.testing.assert_close(run(fs.compile(program)), run(program))


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_a_stretch_in_which_the_program_has_turned_gradients_on(backend):
    """The caller records none; a result that the graph goes on with cuts it in the midst of the block."""
    def program(x):
        with torch.enable_grad():
            y = x.sin()
            z = y.cos()
        return y, z

    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        results = fs.compile(program, backend=backend)(x)
    for found, expected in zip(results, program(x)):
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x, retain_graph=True), torch.autograd.grad(expected.sum(), x, retain_graph=True))


# -- literals that a later stretch reads as numbers -----------------------------------------------------------------------
SEEDED = torch.Generator()


def with_hook(x):
    y = x * 2
    y.register_hook(lambda gradient: gradient)
    return y


def alpha_after_a_seed(x):
    a = torch.tensor(2.0)
    SEEDED.manual_seed(3)
    return torch.add(x * 1, x, alpha=a) * a


def alpha_after_a_hook(x):
    a = torch.tensor(0.5)
    return torch.add(with_hook(x * a), x, alpha=a)


def sizes_after_a_hook(x):
    n = torch.tensor(2)
    y = with_hook(x)
    return y.view(1, 3).expand(n, 3) + x.roll(n) + torch.zeros((n, 3)) + y[n]


def alpha_that_is_written_later(x):
    a = torch.tensor(2.0)
    y = with_hook(x)
    z = torch.add(y, x, alpha=a)
    a.add_(1)
    return z * a


def alpha_whose_view_is_written_later(x):
    a = torch.tensor(2.0)
    z = torch.add(with_hook(x), x, alpha=a)
    a.view(1).add_(1)
    return with_hook(z) * a


def alpha_in_two_stretches(x):
    a = torch.tensor(2.0)
    return torch.add(with_hook(torch.add(with_hook(x), x, alpha=a)), x, alpha=a)


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize("fn", [alpha_after_a_seed, alpha_after_a_hook, sizes_after_a_hook, alpha_that_is_written_later, alpha_whose_view_is_written_later,
                                alpha_in_two_stretches])
def test_literals_are_numbers_behind_a_seam_too(fn, backend):
    x, twin = (torch.tensor([0.3, 1.2, -0.5], requires_grad=True) for _ in range(2))
    compiled = fs.compile(fn, backend=backend, fullgraph=True)
    for _ in range(2):
        expected, given = fn(x), compiled(twin)
        torch.testing.assert_close(given, expected)
        expected.sum().backward()
        given.sum().backward()
        torch.testing.assert_close(twin.grad, x.grad)


# -- the conjugate bit ----------------------------------------------------------------------------------------------------
class Conjugated(torch.autograd.Function):
    """Its backward reads data, so the call is a seam."""

    @staticmethod
    def forward(ctx, z):
        return z.conj()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.conj() * (2 if gradient.abs().sum().item() > 0 else 1)


@pytest.mark.parametrize("program", [lambda z: Conjugated.apply(z * 2) * z, lambda z: (Conjugated.apply(z * 2), z.conj(), z.conj() * z)])
def test_what_comes_out_of_a_seam_has_no_bit_for_kernels(program):
    def run(fn):
        z = torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = fn(z)
        out = out if isinstance(out, tuple) else (out,)
        sum(t.imag.sum() + 2 * t.real.sum() for t in out).backward()
        return out, z.grad
    torch.testing.assert_close(run(fs.compile(program)), run(program))


class Scaled(torch.nn.Module):
    """Overwrites its parameter behind a result that the program continues with."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, data):
        t = torch.tanh(self.w)
        with torch.no_grad():
            (self.w.data if data else self.w).mul_(1.5)
        return t, t.mean()


@pytest.mark.parametrize("data", [False, True])
def test_a_later_stretch_may_overwrite_a_parameter(data):
    grads = []
    for make in (lambda module: module, fs.compile):
        module = Scaled()
        sum(t.sum() for t in make(module)(data)).backward()
        grads.append(module.w.grad)
    torch.testing.assert_close(grads[1], grads[0])
