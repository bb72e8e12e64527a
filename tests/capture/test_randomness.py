"""Random numbers in captured programs: the values, the gradients and the states of all generators end as in eager."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from harness import capture
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import firesteel as fs

SHARED = torch.Generator()
BACKENDS = ["native", "aot_eager", "eager"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(g: torch.Generator | None = None) -> torch.Tensor:
    return torch.rand(4, 5, generator=g)


class Noise(torch.autograd.Function):
    """Draws in the forward what only the backward reads, and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
        ctx.noise, ctx.g = draw(), g
        return x * draw(g)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        draw()
        first, second = draw(ctx.g), draw()
        return grad * ctx.noise + first * second, None


def again(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    state = g.get_state()
    first = draw(g)
    return x * first + draw(g.set_state(state))


def forked(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = draw()
    return x * first + draw()


def state_of_default(x: torch.Tensor, g: torch.Generator) -> Any:
    state = torch.get_rng_state()
    first = draw()
    torch.set_rng_state(state)
    return x * first + draw(), state


def made_inside(x: torch.Tensor, g: torch.Generator) -> Any:
    mine, other = torch.Generator(), torch.Generator("cpu").manual_seed(2)
    return x * draw(mine) + draw(mine) * draw(other), other


def inner_gradient(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    y = Noise.apply(x, g) * draw()
    return x * torch.autograd.grad(y.sum(), x)[0] * draw()


# (x, generator) -> results; each is one graph
PROGRAMS = {
    "rand": lambda x, g: x + torch.rand(x.shape, generator=g),
    "integers": lambda x, g: x * torch.randint(0, 9, (4, 5), generator=g) + torch.randint(5, (5,), generator=g),
    "randperm": lambda x, g: x[torch.randperm(4, generator=g)],
    "normal": lambda x, g: torch.normal(x, 1.0, generator=g) + torch.normal(0.0, 1.0, (4, 5), generator=g),
    "bernoulli": lambda x, g: x * torch.bernoulli(x.detach(), generator=g) + torch.bernoulli(x.detach(), 0.3, generator=g),
    "multinomial": lambda x, g: x[:, 0] * torch.multinomial(x.detach(), 2, generator=g)[:, 0],
    "poisson": lambda x, g: x * torch.poisson(x.detach() * 4, generator=g),
    "like": lambda x, g: x + torch.rand_like(x, generator=g),
    "in place": lambda x, g: x * torch.empty(4, 5).normal_(generator=g) + torch.empty(5, 4).t().uniform_(generator=g),
    "in place, integers": lambda x, g: x * torch.empty(4, 5).random_(2, 9, generator=g),
    "init": lambda x, g: x + torch.nn.init.xavier_uniform_(torch.empty(4, 5), generator=g),
    "shared": lambda x, g: x + draw(SHARED) * draw(g),
    "default": lambda x, g: x + draw(torch.default_generator) * draw(),
    "device": lambda x, g: x + torch.rand(4, 5, generator=g, device=g.device),
    "seed": lambda x, g: x * draw(g) + draw(g.manual_seed(3)) * draw(g),
    "state": again,
    "made inside": made_inside,
    "seed of all": lambda x, g: x * draw() + draw(torch.manual_seed(3)) * draw(),
    "state of default": state_of_default,
    "fork_rng": forked,
    "custom function": lambda x, g: Noise.apply(x, g) * draw(),
    "inner gradient": inner_gradient,
    "nobody reads": lambda x, g: (draw(g), x * draw(g))[1],
    "checkpoint": lambda x, g: checkpoint(lambda y: F.dropout(y.sin(), 0.5) * draw(), x, use_reentrant=False) + draw(),
    "vmap": lambda x, g: torch.vmap(lambda row: row * torch.rand(5), randomness="different")(x),
}


def observed(fn: Any, calls: int = 2) -> list[Any]:
    """What is to be seen of some calls: values, gradients, and how the generators are left."""
    torch.manual_seed(7)
    SHARED.manual_seed(8)
    seen: list[Any] = []
    for call in range(calls):
        x, g = draw(generator(call)).requires_grad_(), generator(call + 10)
        results = torch.utils._pytree.tree_leaves(fn(x, g))
        sum(r.sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad).backward()
        seen += [r.get_state() if isinstance(r, torch.Generator) else r.detach() for r in results]
        seen += [x.grad, g.get_state(), SHARED.get_state(), torch.get_rng_state()]
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, backend):
    expected = observed(PROGRAMS[name])
    graphs = fs.counters["stats"]["unique_graphs"]
    torch.testing.assert_close(observed(fs.compile(PROGRAMS[name], backend=backend, fullgraph=True)), expected)
    assert fs.counters["stats"]["unique_graphs"] == graphs + 1      # a new generator is no reason to compile


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_arguments_may_be_one_generator(backend):
    def two(x, a, b):
        return x + draw(a) * draw(b) + draw(a)
    compiled = fs.compile(two, backend=backend, fullgraph=True)
    for same in (False, True, False):
        found = []
        for fn in (two, compiled):
            a = generator(1)
            b = a if same else generator(2)
            found.append([fn(torch.ones(4, 5), a, b), a.get_state(), b.get_state()])
        torch.testing.assert_close(found[1], found[0])


def test_one_generator_for_two_arguments_is_asked_for_by_is():
    def which(x, a, b):
        return x + (1 if a is b else 2)
    compiled, counting = capture(which, fullgraph=True)
    g, x = generator(1), torch.zeros(2)
    assert [compiled(x, g, h)[0].item() for h in (generator(1), g, generator(2))] == [2, 1, 2]
    assert len(counting.graphs) == 2


def test_a_seed_that_changes_is_compiled_for_once_more():
    def seeded(x, seed):
        return x * draw() + draw(torch.manual_seed(seed))
    compiled, counting = capture(seeded, fullgraph=True)
    for seed in (1, 2, 3, 4):
        torch.manual_seed(0)
        expected = seeded(torch.ones(4, 5), seed)
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(torch.ones(4, 5), seed), expected)
    assert len(counting.graphs) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_gradients_draw_the_same_again(backend):
    def program(x, g):
        return (x.sin() * draw(g)).exp() * F.dropout(x, 0.5) * draw(g)

    def twice(fn):
        return lambda x, g: torch.autograd.grad(fn(x, g).sum(), x, create_graph=True)[0].pow(2)
    torch.testing.assert_close(observed(twice(fs.compile(program, backend=backend, fullgraph=True))), observed(twice(program)))


def test_what_only_run_time_knows_breaks_once():
    def program(x, g):
        return x * draw(g) + g.initial_seed()
    compiled, counting = capture(program)
    torch.testing.assert_close(observed(compiled, 1), observed(program, 1))
    assert len(counting.graphs) == 2


def test_a_vjp_that_draws_is_called_for_real():
    """Its value and its pullback would each draw."""
    def program(x):
        out, pullback = torch.func.vjp(lambda y: F.dropout(y, 0.5), x)
        return out, pullback(torch.ones_like(out))[0], pullback(out)[0]
    found = []
    for fn in (program, capture(program)[0]):
        torch.manual_seed(0)
        found.append([fn(torch.ones(4, 5)), torch.get_rng_state()])
    torch.testing.assert_close(found[1], found[0])


def test_ahead_of_time_functions_take_generators():
    outside = generator(4)

    def program(x, g):
        return x * draw(g) * draw(outside)
    compiled = fs.aot.function(program, fs.aot.nop)
    expected = observed(program)
    outside.manual_seed(4)
    torch.testing.assert_close(observed(compiled), expected)


# -- random numbers of Python and NumPy -----------------------------------------------------------------------------------
OWN = random.Random(3)


def python_state(x: torch.Tensor) -> Any:
    state = random.getstate()
    first = random.random()
    random.setstate(state)
    return x * first * random.random(), state


def python_seed(x: torch.Tensor) -> torch.Tensor:
    random.seed(3)
    np.random.seed(4)
    return x * random.random() * np.random.uniform()


def made_by_python(x: torch.Tensor) -> torch.Tensor:
    mine, numpys = random.Random(3), np.random.default_rng(1)
    mine.seed(5)
    return x * mine.random() * random.Random(6).random() * numpys.normal()


def written_by_numpy(x):
    noise = np.random.rand(5)
    noise[1:] += 1
    return x + torch.from_numpy(noise), noise


PYTHON = {
    "numbers": lambda x: x * random.random() + draw() * random.uniform(1, 2) + random.randint(1, 6),
    "returned": lambda x: (x + 1, random.random(), random.randrange(9)),
    "nobody reads": lambda x: (random.random(), x + random.gauss(0, 1))[1],
    "own": lambda x: x * OWN.random() + OWN.uniform(1, 2),
    "arithmetic": lambda x: x * (random.random() + 2) + max(random.random(), 0.5) + int(random.random() * 10),
    "tensors": lambda x: x * torch.tensor([random.random() for _ in range(5)]) + torch.full((5,), random.random()),
    "sizes": lambda x: x[:random.randint(1, 3)].sum(),
    "seed": python_seed,
    "state": python_state,
    "made inside": made_by_python,
    "numpy": lambda x: x * np.random.rand() + np.random.randint(1, 5) * np.random.normal(1.0, scale=2.0),
    "array": lambda x: x * torch.from_numpy(np.random.uniform(0, 1, (4, 5))).float() + torch.from_numpy(np.random.randn(4, 5)),
    "array, computed with": lambda x: x + torch.from_numpy(np.sin(np.random.rand(5) * 2) + np.arange(5)),
    "array, written": written_by_numpy, "array, returned": lambda x: (x * 2, np.random.rand(3), np.random.normal(size=(2, 2))),
    "indices": lambda x: x[torch.from_numpy(np.random.permutation(4))] + x[torch.from_numpy(np.random.randint(0, 4, size=4))],
    "array of an own generator": lambda x: x * torch.from_numpy(np.random.default_rng(3).random(5)) + torch.from_numpy(np.random.RandomState(2).rand(5)),
}
BREAKING = {
    "branch": lambda x: x * 2 if random.random() < 0.5 else x.sin(),
    "choice": lambda x: (x + 1) * random.choice([1, 2, 3]),
    "shuffled": lambda x: x * random.sample(range(10), 2)[0],
    "numpy's choice": lambda x: x * float(np.random.choice([1, 2, 3])),
    "sizes of data": lambda x: x[0] * torch.from_numpy(np.random.rand(int(x.abs().sum()) + 1))[:1].float(),
    "transform": lambda x: torch.vmap(lambda row: row * random.random())(x),
}


def observed_of_python(fn: Any, calls: int) -> list[Any]:
    random.seed(1)
    OWN.seed(2)
    np.random.seed(3)
    seen = []
    for call in range(calls):
        x = draw(generator(call)).requires_grad_()
        results = fn(x)
        results = results if isinstance(results, tuple) else (results,)
        results[0].sum().backward()
        seen += [x.grad, *results, random.getstate(), OWN.getstate(), np.random.get_state()[1]]
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*PYTHON, *BREAKING])
def test_random_numbers_of_python(name, backend):
    whole = name in PYTHON
    fn = PYTHON[name] if whole else BREAKING[name]
    torch.manual_seed(0)
    expected = observed_of_python(fn, 4)
    graphs = fs.counters["stats"]["unique_graphs"]
    torch.manual_seed(0)
    torch.testing.assert_close(observed_of_python(fs.compile(fn, backend=backend, fullgraph=whole), 4), expected)
    assert not whole or fs.counters["stats"]["unique_graphs"] == graphs + 1


DRAWN = {
    "rand": lambda x: torch.rand(3), "randn": lambda x: torch.randn(x.shape), "randint": lambda x: torch.randint(5, (3,)), "randint low": lambda x: torch.randint(2, 5, (3,)),
    "randperm": lambda x: torch.randperm(5), "rand_like": torch.rand_like, "bernoulli": torch.bernoulli, "normal": lambda x: torch.normal(x, x), "generator": lambda x: draw(generator(3)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_draw_is_no_write(name):
    found = []
    for function in (DRAWN[name], fs.compile(DRAWN[name])):
        torch.manual_seed(0)
        found.append(function(torch.full((3,), 0.5)))
    assert torch.equal(found[1], found[0]) and found[1]._version == found[0]._version and found[1].dtype is found[0].dtype
