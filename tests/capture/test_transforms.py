"""torch.func inside of captured programs: one graph, and values, gradients and structure as in eager."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import capture, same
from torch.utils._pytree import tree_flatten

import firesteel as fs

WEIGHT = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
LAYER = torch.nn.Linear(3, 3)


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(LAYER, params, (x,)).sin().sum()


def pulled(x: torch.Tensor) -> Any:
    out, pullback = torch.func.vjp(lambda a, b: (a.sin() * b, a.sum()), x, x.cos())
    return out, pullback((torch.ones(3), torch.tensor(2.0)))


def named(x: torch.Tensor) -> Any:
    def inside(a: torch.Tensor, scale: float, *, shift: torch.Tensor) -> torch.Tensor:
        return (a * scale + shift).tanh().sum()
    return torch.func.grad(inside)(x, 2.0, shift=x * 3)


PROGRAMS = {
    "grad": lambda x: torch.func.grad(lambda a: (a ** 3).sum())(x) * 2,
    "closure": lambda x: torch.func.grad(lambda a: (a ** 3 * x.sin() * WEIGHT).sum())(x + 1),
    "twice": lambda x: torch.func.grad(lambda a: torch.func.grad(lambda b: (b ** 3).sum())(a).sum())(x),
    "several": lambda x: torch.func.grad_and_value(lambda a, b: (a * b).sum(), argnums=(0, 1))(x, x.cos()),
    "aux": lambda x: torch.func.grad(lambda a: ((a ** 2).sum(), {"y": a * 2}), has_aux=True)(x),
    "named": named,
    "vjp": pulled,
    "jvp": lambda x: torch.func.jvp(lambda a: a.sin() * 2, (x,), (torch.ones(3),)),
    "vmap": lambda x: torch.vmap(lambda a: a.sin().sum())(x.expand(2, 3)),
    "in_dims": lambda x: torch.vmap(lambda a, b: a * b.sum(), in_dims=(0, None))(x, x),
    "nested in_dims": lambda x: torch.vmap(lambda d: d["a"] + d["b"], in_dims=({"a": 0, "b": None},))({"a": x, "b": x}),
    "out_dims": lambda x: torch.vmap(lambda a: a * WEIGHT, in_dims=1, out_dims=1)(x.outer(x)),
    "jacrev": lambda x: torch.func.jacrev(lambda a: a.sin() * a.sum())(x),
    "jacfwd": lambda x: torch.func.jacfwd(lambda a: a.sin() * a.sum())(x),
    "hessian": lambda x: torch.func.hessian(lambda a: (a.sin() * a.sum()).sum())(x),
    "each example": lambda x: torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(LAYER.named_parameters()), x.expand(2, 3)),
}


def observed(fn: Any, requires: bool) -> list[Any]:
    x = torch.arange(3.0).requires_grad_(requires)
    leaves, structure = tree_flatten(fn(x))
    tracked = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    gradient = torch.autograd.grad(sum(t.sum() for t in tracked), x)[0] if requires else None
    return [structure, len(tracked), [t.detach() if isinstance(t, torch.Tensor) else t for t in leaves], gradient]


@pytest.mark.parametrize("requires", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, backend: str, requires: bool) -> None:
    fn = PROGRAMS[name]
    ours, theirs = observed(fs.compile(fn, backend=backend, fullgraph=True), requires), observed(fn, requires)
    assert ours[:2] == theirs[:2]
    torch.testing.assert_close(ours[2:], theirs[2:])


def test_one_node() -> None:
    compiled, backend = capture(lambda x: torch.vmap(lambda a: (a * 2).sin().cos())(x) + 1, fullgraph=True)
    compiled(torch.ones(2, 3))
    calls = [n for n in backend.graphs[0].graph.nodes if n.op == "call_function"]
    assert [getattr(n.target, "__name__", "") for n in calls] == ["vmap_call", "getitem", "add"]


def test_what_the_function_reads_is_guarded() -> None:
    scale = {"value": 2}
    compiled, _ = capture(lambda x: torch.vmap(lambda a: a * scale["value"])(x), fullgraph=True)
    x = torch.ones(3, 2)
    assert torch.equal(compiled(x), x * 2)
    scale["value"] = 5
    assert torch.equal(compiled(x), x * 5)


def test_an_argument_stays_itself() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        slope = torch.func.grad(lambda a, b: (a * b).sum())(x, y)
        return slope, y.add_(1)
    y = torch.ones(2)
    slope, same = fs.compile(fn, backend="aot_eager", fullgraph=True)(torch.ones(2), y)
    assert same is y and torch.equal(y, torch.full((2,), 2.0)) and torch.equal(slope, torch.ones(2))


def test_breaks_and_effects_inside_are_breaks_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def printing(x: torch.Tensor) -> torch.Tensor:
        def inside(a: torch.Tensor) -> torch.Tensor:
            print("inside")
            seen.append(a.dim())
            return (a ** 2).sum()
        return torch.func.grad(inside)(x * 2) + 1
    compiled, backend = capture(printing)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 5.0))
    assert seen == [1, 1] and capsys.readouterr().out == "inside\ninside\n"
    assert len(backend.graphs) == 2
    with pytest.raises(fs.errors.Unsupported):
        fs.compile(printing, fullgraph=True)(torch.ones(3))


def test_sizes_may_change() -> None:
    counter = fs.testing.CompileCounterWithBackend("native")
    compiled = fs.compile(lambda x: torch.vmap(lambda a: a.sin().sum())(x), backend=counter, fullgraph=True)
    for n in (2, 3, 4, 5):
        x = torch.randn(n, n + 1)
        torch.testing.assert_close(compiled(x), x.sin().sum(1))
    assert counter.frame_count == 2


def _loss(w, x):
    return (torch.tanh(x @ w)).square().sum()


MADE_OUTSIDE = {
    "grad": torch.func.grad(_loss), "grad_and_value": torch.func.grad_and_value(_loss, argnums=1),
    "vmap": torch.vmap(_loss, in_dims=(None, 0)), "per sample": torch.vmap(torch.func.grad(_loss), (None, 0)),
    "jacrev": torch.func.jacrev(_loss), "jacfwd": torch.func.jacfwd(_loss), "hessian": torch.func.hessian(_loss),
}


@pytest.mark.parametrize("name", MADE_OUTSIDE)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_transforms_made_outside_of_the_region(name, backend):
    fs.reset()
    w, x = torch.randn(3, 2), torch.randn(4, 3)
    transform = MADE_OUTSIDE[name]
    want = transform(w, x)
    for fn in (transform, lambda w, x: transform(w, x)):
        torch.testing.assert_close(fs.compile(fn, fullgraph=True, backend=backend)(w, x), want)


def test_vmap_over_a_batch_that_may_be_empty():
    def pairs(x):
        count = x.shape[0] // 16 - 1
        return torch.func.vmap(lambda a: a @ a.T)(x[:count * 2].reshape(count, 2, 3))

    compiled = fs.compile(pairs, fullgraph=True, dynamic=True)
    for n in (17, 33, 40, 16, 80):
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(x), pairs(x))


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x), "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, x + 1])),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x + 1,)), "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.tensor(2.0)),
    "grad of grad": lambda f, x: torch.func.grad(lambda y: torch.func.grad(f)(y).sum())(x)}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_compiled_function_is_transformed(name: str, backend: str) -> None:
    weight = torch.randn(3, requires_grad=True)

    def fn(x: torch.Tensor, breaks: bool) -> torch.Tensor:
        y = (x * weight).sin()
        if breaks:
            print(end="")
        return (y * y).sum()

    x = torch.randn(3)
    compiled = fs.compile(fn, backend=backend)
    for breaks in (False, True, False):
        same(TRANSFORMS[name](functools.partial(compiled, breaks=breaks), x), TRANSFORMS[name](functools.partial(fn, breaks=breaks), x))
        same(compiled(x, breaks), fn(x, breaks))


def test_linearize():
    def f(x, v):
        out, push_forward = torch.func.linearize(lambda a: a.sin() * a.sum(), x * 2)
        return out, push_forward(v), push_forward(v * 3)
    x, v = torch.randn(4), torch.randn(4)
    torch.testing.assert_close(fs.compile(f, fullgraph=True)(x, v), f(x, v))
