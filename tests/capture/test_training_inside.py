"""Whole training steps, gradients, checkpoints, custom operators and modes inside of the compiled function."""
from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from harness import capture, same

import firesteel as fs


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss
    return step


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
def test_whole_training_step(cls: Any, backend: str) -> None:
    torch.manual_seed(0)
    mine = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    theirs = copy.deepcopy(mine)
    ours = fs.compile(train_step(mine, cls(mine.parameters(), lr=0.01)), backend=backend)
    eager = train_step(theirs, cls(theirs.parameters(), lr=0.01))
    for _ in range(4):
        x, y = torch.randn(3, 4), torch.randn(3, 2)
        torch.testing.assert_close(ours(x, y), eager(x, y))
        for p, q in zip(mine.parameters(), theirs.parameters()):
            torch.testing.assert_close(p, q)
            torch.testing.assert_close(p.grad, q.grad)


def test_keys_that_are_objects_are_guarded() -> None:
    def fn(x: torch.Tensor, seen: dict) -> torch.Tensor:
        return x * 2 if x in seen else x * 3

    compiled, _ = capture(fn)
    x, seen = torch.ones(2), {}
    assert torch.equal(compiled(x, seen), x * 3)
    seen[x] = 1
    assert torch.equal(compiled(x, seen), x * 2)
    assert torch.equal(compiled(x, {}), x * 3)


def test_a_gradient_set_to_none_stays_none() -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def fn(x: torch.Tensor) -> Any:
        weight.grad = None
        (weight * x).sum().backward()
        found = weight.grad.clone()
        weight.grad = None
        return found, weight.grad

    compiled, _ = capture(fn)
    for _ in range(2):
        x = torch.randn(3)
        found, after = compiled(x)
        assert torch.equal(found, x) and after is None and weight.grad is None


def test_grad_is_part_of_the_graph() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = (x ** 3).sum()
        slope, = torch.autograd.grad(y, x, create_graph=True)
        return slope * 2

    compiled, backend = capture(fn, fullgraph=True)
    x = torch.randn(3, requires_grad=True)
    compiled(x).sum().backward()
    assert torch.allclose(x.grad, 12 * x)
    assert len(backend.graphs) == 1


def test_grad_through_a_history_from_outside() -> None:
    def fn(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((y * 2).sum(), x)[0] + 1

    x = torch.randn(3, requires_grad=True)
    compiled, _ = capture(fn)
    assert torch.allclose(compiled(x * 5, x), torch.full((3,), 11.0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_grad_of_a_tensor_with_a_history(backend: str) -> None:
    layer = torch.nn.Linear(3, 1)

    def fn(h: torch.Tensor) -> torch.Tensor:
        slope, = torch.autograd.grad(layer(h).sin().sum(), h, create_graph=True)
        return slope.square().sum()

    x = torch.randn(2, 3, requires_grad=True)
    found = []
    for run in (fn, fs.compile(fn, backend=backend, fullgraph=True)):
        result = run(x * 2)
        found.append((result.detach(), *torch.autograd.grad(result, [x, *layer.parameters()])))
    torch.testing.assert_close(*found)


def several(w: torch.Tensor, v: torch.Tensor) -> Any:
    y = (w ** 3 * v)
    first, second = torch.autograd.grad([y, y.sum()], (w, v), [torch.ones(3), None], create_graph=True)
    again = torch.autograd.grad(outputs=first.sum(), inputs=[v, w], retain_graph=True)
    return first, second, again, torch.autograd.grad(first, w, torch.eye(3), is_grads_batched=True)


def unused(w: torch.Tensor, v: torch.Tensor) -> Any:
    y = (w * 2).sum()
    return torch.autograd.grad(y, [w, v], allow_unused=True, retain_graph=True), torch.autograd.grad(y, [w, v], materialize_grads=True)


def hooked(w: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.autograd.grad((w * v).sum(), [w, v])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
@pytest.mark.parametrize("fn", [several, unused, hooked], ids=lambda f: f.__name__)
def test_settings_of_grad(fn: Callable[..., Any], backend: str) -> None:
    w, v = (torch.arange(3.0).add(n).requires_grad_() for n in (1, 2))
    if fn is hooked:
        w.register_hook(lambda g: g * 3)
    same(fs.compile(fn, backend=backend, fullgraph=True)(w, v), fn(w, v))


@pytest.mark.parametrize("fullgraph", [True, False])
def test_errors_of_grad(fullgraph: bool) -> None:
    def unused(w: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.autograd.grad((w * 2).sum(), [w, v])

    def not_scalar(w: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.autograd.grad(w * v, w)

    def without(w: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.autograd.grad((w * v).sum(), v.detach())

    for fn in (unused, not_scalar, without):
        told = []
        for run in (fn, fs.compile(fn, fullgraph=fullgraph)):
            with pytest.raises(RuntimeError) as error:
                run(torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True))
            told.append(str(error.value))
        same(*told)


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_checkpoint(backend: str) -> None:
    layer = torch.nn.Linear(3, 3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda a: torch.relu(layer(a)).sin(), x, use_reentrant=False).sum()

    compiled = fs.compile(fn, fullgraph=True, backend=backend)
    x = torch.randn(2, 3)
    compiled(x).backward()
    ours, layer.weight.grad = layer.weight.grad, None
    fn(x).backward()
    torch.testing.assert_close(ours, layer.weight.grad)


def test_a_checkpoint_is_one_tagged_call() -> None:
    compiled, backend = capture(lambda x: torch.utils.checkpoint.checkpoint(torch.nn.Sigmoid(), x, use_reentrant=False) + 1, fullgraph=True)
    compiled(torch.ones(2, requires_grad=True))
    call, _, add = (n for n in backend.graphs[0].graph.nodes if n.op == "call_function")
    assert call.meta["recompute"] == "must" and "recompute" not in add.meta
    body = getattr(backend.graphs[0], call.args[0].name)
    assert [n.meta.get("recompute") for n in body.graph.nodes if n.op == "call_function"] == ["must"]


def test_a_graph_that_runs_as_it_is_checkpoints() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda a: F.dropout(a.sin().cos().exp(), 0.5), x, use_reentrant=False).sum()

    def observed(call: Callable[..., Any]) -> tuple[int, torch.Tensor]:
        kept: list[int] = []
        x = torch.ones(2, requires_grad=True)
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(1) or t, lambda t: t):
            out = call(x)
        return len(kept), torch.autograd.grad(out, x)[0]
    ours, theirs = observed(fs.compile(fn, backend="eager", fullgraph=True)), observed(fn)
    assert ours[0] == theirs[0]
    torch.testing.assert_close(ours[1], theirs[1])


def test_a_checkpoint_that_breaks_is_run_by_eager(capsys: pytest.CaptureFixture[str]) -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print("here")
        return y.cos()
    compiled, backend = capture(lambda x: torch.utils.checkpoint.checkpoint(inside, x * 2, use_reentrant=False) + 1)
    x = torch.ones(2, requires_grad=True)
    out = compiled(x)
    torch.testing.assert_close(out, (x * 2).sin().cos() + 1)
    assert [n.target for g in backend.graphs for n in g.graph.nodes if n.op == "call_function"] == [operator.mul, operator.add]
    assert capsys.readouterr().out == "here\n"
    out.sum().backward()
    assert capsys.readouterr().out == "here\n"      # the recomputation, which is eager's


def test_a_checkpoint_that_breaks_tells_the_line() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        fs.graph_break()
        return x.cos()
    with pytest.raises(fs.errors.Unsupported, match=r"left to eager's checkpointing: fs.graph_break was called") as error:
        fs.compile(lambda x: torch.utils.checkpoint.checkpoint(inside, x, use_reentrant=False), fullgraph=True)(torch.ones(2))
    assert error.value.location.line == inside.__code__.co_firstlineno + 1


def test_an_argument_of_a_checkpoint_stays_itself() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        z, same = torch.utils.checkpoint.checkpoint(lambda a, b: (a + b, b), x, y, use_reentrant=False)
        y.add_(1)
        return z, same, same is y
    for backend in ("eager", "aot_eager"):
        x, y = torch.ones(2, requires_grad=True), torch.ones(2)
        z, same, known = fs.compile(fn, backend=backend)(x, y)
        assert same is y and known and torch.equal(y, torch.full((2,), 2.0)) and torch.equal(z, y)


def gradients(fn: Callable[..., Any], layer: torch.nn.Module, x: torch.Tensor) -> list[Any]:
    x.grad = layer.weight.grad = None
    out = fn(x)
    if out.requires_grad:
        out.sum().backward()
    return [out.detach(), out.requires_grad, x.grad, layer.weight.grad]


@pytest.mark.parametrize("requires", [True, False])
@pytest.mark.parametrize("options", [{}, {"use_reentrant": True}, {"use_reentrant": False}], ids=["default", "reentrant", "not reentrant"])
def test_kinds_of_checkpoints(options: dict[str, bool], requires: bool) -> None:
    layer = torch.nn.Linear(3, 3)
    fn = lambda x: torch.utils.checkpoint.checkpoint(lambda a: layer(a).sin(), x, **options)
    x = torch.randn(2, 3).requires_grad_(requires)
    compiled = fs.compile(fn, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("always")
        found = gradients(compiled, layer, x)
    with warnings.catch_warnings(record=True) as theirs:
        warnings.simplefilter("always")
        torch.testing.assert_close(found, gradients(fn, layer, x))
    assert len(ours) == len(theirs)


def test_custom_operators_are_nodes() -> None:
    @torch.library.custom_op("firesteel_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    compiled, backend = capture(lambda x: twice(x) + torch.ops.firesteel_tests.twice(x), fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
    assert backend.ops == 3


def test_inference_mode_in_and_around() -> None:
    def fn(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            y = x.relu() + 1
        return x * 2, y.is_inference()

    x = torch.randn(3, requires_grad=True)
    compiled = fs.compile(fn)
    ours, inside = compiled(x)
    assert ours.requires_grad and inside
    with torch.inference_mode():
        assert fs.compile(lambda a: a * 3)(x).is_inference()


def test_masked_reductions_are_nodes() -> None:
    compiled, backend = capture(lambda x, keep: torch.masked.sum(x, 1, mask=keep) + torch.masked.softmax(x, 0, mask=keep).nansum(), fullgraph=True)
    x, keep = torch.randn(3, 4), torch.rand(3, 4) > 0.3
    torch.testing.assert_close(compiled(x, keep), torch.masked.sum(x, 1, mask=keep) + torch.masked.softmax(x, 0, mask=keep).nansum())
    assert backend.ops == 4


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["then", "else"])
def test_control_flow_operators_are_in_the_graph(sign: float) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return torch.cond(y.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (y,)) + 1

    x = torch.full((3,), sign)
    compiled, backend = capture(fn)
    torch.testing.assert_close(compiled(x), ((x * 2).sin() if sign > 0 else (x * 2).cos()) + 1)
    assert len(backend.graphs) == 1
    torch.testing.assert_close(fs.compile(fn, fullgraph=True)(x), compiled(x))
