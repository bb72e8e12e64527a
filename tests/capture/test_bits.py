"""Inputs whose negative or conjugate bit is set: kernels read memory, where the sign is that of the other side."""
import pytest
import torch
import torch.nn.functional as F

import firesteel as fs

Z = torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))


def negative():
    return Z.clone().conj().imag


def conjugate():
    return Z.clone().conj()


def write_part(v):
    v[1:].mul_(2)
    return v * 1


def branch(v):
    return v * 2 if v.is_neg() or v.is_conj() else v * 3


PROGRAMS = {
    "flip": lambda v: v.flip(0) * 3, "clone": lambda v: v.clone(), "contiguous": lambda v: v.contiguous(), "view": lambda v: v[1:],
    "itself": lambda v: v, "both": lambda v: (v, v + 1, v[2:]), "add_": lambda v: v.add_(1), "write_part": write_part, "branch": branch,
    "cat": lambda v: torch.cat([v, v]), "resolved": lambda v: v.resolve_neg().resolve_conj() + 1, "index": lambda v: v[torch.tensor([0, 2])],
    "product": lambda v: torch.outer(v, v), "detached": lambda v: v.detach(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("given", [negative, conjugate])
@pytest.mark.parametrize("name", PROGRAMS)
def test_inputs_with_a_bit(name, given, dynamic):
    program, mine, theirs = PROGRAMS[name], given(), given()
    ours, eager = fs.compile(program, dynamic=dynamic)(mine), program(theirs)
    for o, e in zip(ours if isinstance(ours, tuple) else (ours,), eager if isinstance(eager, tuple) else (eager,)):
        torch.testing.assert_close(o, e)
        assert (o.is_neg(), o.is_conj(), o.stride()) == (e.is_neg(), e.is_conj(), e.stride())
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("part", [lambda v: v.imag * 3, lambda v: v.real * 3, lambda v: torch.view_as_real(v.resolve_conj()) * 3])
def test_parts_of_a_conjugate(part):
    torch.testing.assert_close(fs.compile(part)(conjugate()), part(conjugate()))


def test_beside_an_input_without_it():
    function = lambda z, v: z.real + v
    torch.testing.assert_close(fs.compile(function)(Z, negative()), function(Z, negative()))
    held = negative()
    torch.testing.assert_close(fs.compile(lambda x: x + held)(torch.ones(5)), 1 + held)


def test_the_bit_is_guarded():
    compiled = fs.compile(lambda v: v * 2)
    for v in (Z.imag, negative(), Z.imag, negative()):
        torch.testing.assert_close(compiled(v), v * 2)


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("function", [lambda v: v.sin() * v, lambda v: v.flip(0) * v, lambda v: v.clone(), lambda v: v[1:] * 1])
def test_gradients_through_an_input_with_the_bit(function, leaf):
    def run(fn):
        z = Z.clone().requires_grad_()
        v = negative().requires_grad_() if leaf else z.conj().imag
        out = fn(v)
        return out, *torch.autograd.grad((out * torch.arange(1.0, len(out) + 1)).sum(), v if leaf else z)
    for ours, eager in zip(run(fs.compile(function)), run(function)):
        torch.testing.assert_close(ours, eager)


RESOLVED = {
    "convolution": lambda x: F.conv1d(x, torch.ones(2, x.shape[1], 3), padding=1),
    "transposed convolution": lambda x: F.conv_transpose1d(x, torch.ones(x.shape[1], 2, 3)),
    "exp": torch.exp,
    "exp of a view": lambda x: x.mT.exp(),
    "part": lambda x: x.unbind(0)[1].exp(),
    "sum of two": lambda x: x + x,
    "scatter": lambda x: x.select_scatter(torch.zeros(x.shape[1:]), 0, 0),
    "known to the operator": torch.zeros_like,
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", RESOLVED)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_operator_that_does_not_know_a_bit_gets_a_copy(name, inside, channels):
    """Its layout decides about the result's."""
    z = torch.randn(2, 4, channels, dtype=torch.complex64).transpose(1, 2)

    def program(x):
        return RESOLVED[name](x.conj().imag if inside else x)
    x = z if inside else z.conj().imag
    expected, result = program(x), fs.compile(program)(x)
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)


def test_the_engine_takes_the_real_part_of_a_conjugate():
    """A gradient of a real input of a complex function; in eager it has a bit there, which a trace resolves."""
    x = torch.randn(5, 7, requires_grad=True)
    before = fs.counters["aot"]["untraceable_backwards"]
    out = fs.compile(lambda x: torch.fft.hfft(x), fullgraph=True)(x)
    assert fs.counters["aot"]["untraceable_backwards"] == before
    grad, = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(torch.fft.hfft(x).square().sum(), x)[0])


def test_an_input_of_zeros_without_memory():
    """Kernels have nothing to read there; also behind a call with ordinary memory."""
    compiled = fs.compile(lambda x: x * 2 + 1)
    for given in (torch._efficientzerotensor((3,)), torch.ones(3), torch._efficientzerotensor((3,))):
        assert torch.equal(compiled(given), given * 2 + 1)
