"""`backward()` inside of the compiled function: one graph, and everything that eager leaves behind: gradients, states, hooks, errors."""
from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from harness import capture, same
from torch import nn

import firesteel as fs
from firesteel.artifacts import breaks, counters
from firesteel.autograd.backwards import ResultOfOperator, history_of, is_accumulator, is_outside
from firesteel.graph.abstract import AbstractWorld
from firesteel.sym.env import ShapeEnv

BACKENDS = ["eager", "aot_eager", "native"]


class World:
    """What the programs below use; `model` has a tied and a frozen weight."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
        self.model[2].weight = self.model[0].weight
        self.model[3].weight.requires_grad_(False)
        self.w, self.v = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.x, self.g = torch.randn(5, 4), torch.randn(5, 3)
        self.seen: list[str] = []
        self.opt: Any = None

    def left(self) -> Any:
        leaves = [*self.model.parameters(), self.w, self.v, self.turned]
        return [(p.detach(), p.grad, None if p.grad is None else p.grad.stride()) for p in leaves], self.seen


def simple(s: World) -> Any:
    loss = s.model(s.x).square().mean()
    loss.backward()
    return loss.detach()


def result_is_spent(s: World) -> Any:
    hidden = s.model(s.x)
    loss = hidden.square().mean()
    loss.backward()
    return loss, hidden, hidden.view(-1)[2:]


def clipped(s: World) -> Any:
    s.model(s.x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(s.model.parameters(), 0.01)
    return norm, [p.grad is None for p in s.model.parameters()]


def micro_batches(s: World) -> Any:
    total = 0.0
    for x in s.x.split(2):
        loss = s.model(x).square().mean() / 3
        loss.backward()
        total = total + loss.detach()
    return total


def under_no_grad(s: World) -> Any:
    loss = (s.w * s.w).sum()
    with torch.no_grad():
        loss.backward()
    return s.w.grad * 2


def of_a_gradient(s: World) -> Any:
    s.w.grad = None
    (s.w ** 3).sum().backward(create_graph=True)
    second = (s.w.grad ** 2).sum()
    s.w.grad = None
    second.backward()
    return second.detach()


def some_inputs(s: World) -> Any:
    s.model(s.x).sum().backward(inputs=s.model[0].parameters())


def given_gradients(s: World) -> Any:
    y = s.model(s.x)
    y.backward(s.g, retain_graph=True)
    torch.autograd.backward([y, y.sum()], [s.g * 2, None])


def one_gradient_for_two(s: World) -> Any:
    (s.w + s.v).sum().backward()
    (s.w.view(3, 1) * 2 + s.v.view(3, 1) * 2).sum().backward()
    (s.w + s.v).backward(s.g[0])
    return s.w.grad is s.v.grad


def strides_of_the_leaf(s: World) -> Any:
    (s.x @ s.turned).sum().backward()


def in_a_checkpoint(s: World) -> Any:
    for reentrant in (False, True):
        torch.utils.checkpoint.checkpoint(s.model, s.x * s.w.sum(), use_reentrant=reentrant).sum().backward()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.saved_tensors[0].cos() * 2


def through_a_function(s: World) -> Any:
    Doubled.apply(s.w * 2).sum().backward()


def retained(s: World) -> Any:
    y = s.w * 2
    y.retain_grad()
    z = y.sin()
    z.retain_grad()
    z.sum().backward()
    return y.grad, z.grad


def leaf_made_inside(s: World) -> Any:
    w = torch.ones(3, requires_grad=True)
    (w * s.w).sum().backward()
    return w.grad, w


def loop_of_steps(s: World) -> Any:
    s.opt = s.opt or torch.optim.SGD(s.model.parameters(), lr=0.1)
    for _ in range(2):
        s.opt.zero_grad(set_to_none=False)
        loss = s.model(s.x).square().mean()
        loss.backward()
        s.opt.step()
    return loss.detach()


PROGRAMS = [simple, result_is_spent, clipped, micro_batches, under_no_grad, of_a_gradient, some_inputs, given_gradients, one_gradient_for_two,
            strides_of_the_leaf, in_a_checkpoint, through_a_function, retained, leaf_made_inside, loop_of_steps]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_eager(program: Callable[[World], Any], backend: str) -> None:
    ours, theirs = World(), World()
    compiled = fs.compile(program, backend=backend, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            same(compiled(ours), program(theirs))
            same(ours.left(), theirs.left())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_whose_graph_was_freed(backend: str) -> None:
    s = World()
    for result in fs.compile(result_is_spent, backend=backend, fullgraph=True)(s):
        assert result.grad_fn is not None
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            result.sum().backward()


def test_asking_for_one_leaf_of_a_freed_graph() -> None:
    def fn(w: torch.Tensor) -> torch.Tensor:
        loss = (w ** 3).sum()
        loss.backward()
        return loss

    w = torch.randn(3, requires_grad=True)
    loss = fs.compile(fn, fullgraph=True)(w)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        torch.autograd.grad(loss + w.sum(), w)


def test_a_retained_graph_is_differentiable_again() -> None:
    def fn(w: torch.Tensor) -> torch.Tensor:
        loss = (w ** 3).sum()
        loss.backward(retain_graph=True)
        return loss

    w = torch.randn(3, requires_grad=True)
    fs.compile(fn, fullgraph=True)(w).backward()
    torch.testing.assert_close(w.grad, 6 * w.detach() ** 2)


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_hooks_of_leaves(backend: str) -> None:
    def double(p: torch.Tensor) -> None:
        p.grad.mul_(2)

    def hooked(s: World) -> World:
        s.w.register_hook(lambda g: g * 3)
        s.w.register_hook(lambda g: s.seen.append("w"))
        s.v.register_hook(lambda g: s.seen.append("v"))
        s.w.register_post_accumulate_grad_hook(lambda p: s.seen.append("after w"))
        s.v.register_post_accumulate_grad_hook(double)
        return s

    def fn(s: World) -> None:
        ((s.w * 2).sin() * s.v).sum().backward()

    ours, theirs = hooked(World()), hooked(World())
    compiled = fs.compile(fn, backend=backend, fullgraph=True)
    for _ in range(2):
        compiled(ours)
        fn(theirs)
        same(ours.left(), theirs.left())
    late = [s.v.register_hook(lambda g: g * 0) for s in (ours, theirs)]
    compiled(ours)
    fn(theirs)
    same(ours.left(), theirs.left())
    for handle in late:
        handle.remove()
    compiled(ours)
    fn(theirs)
    same(ours.left(), theirs.left())


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_hooks_put_on_leaves_inside(backend: str) -> None:
    def fn(s: World) -> Any:
        handle = s.w.register_hook(lambda g: g * 3)
        s.v.register_post_accumulate_grad_hook(lambda p: s.seen.append("v"))
        (s.w * s.v).sum().backward()
        handle.remove()
        (s.w * s.v).sum().backward()
        return torch.autograd.grad((s.w * s.v).sum(), s.w)

    ours, theirs = World(), World()
    compiled = fs.compile(fn, backend=backend, fullgraph=True)
    for _ in range(2):
        same(compiled(ours), fn(theirs))
        same(ours.left(), theirs.left())


def test_an_optimiser_that_steps_in_the_backward() -> None:
    def prepare() -> Any:
        s = World()
        opts = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in s.model.parameters() if p.requires_grad}

        def step(p: torch.Tensor) -> None:
            opts[p].step()
            opts[p].zero_grad()
        for p in opts:
            p.register_post_accumulate_grad_hook(step)
        return s

    ours, theirs = prepare(), prepare()
    compiled = fs.compile(simple, fullgraph=True)
    for _ in range(3):
        same(compiled(ours), simple(theirs))
        same(ours.left(), theirs.left())


def test_the_gradient_object_is_kept() -> None:
    w = nn.Parameter(torch.randn(3))

    def fn() -> torch.Tensor:
        (w * w).sum().backward()
        return w.grad

    compiled = fs.compile(fn, fullgraph=True)
    first = compiled()
    once = first.clone()
    assert first is w.grad and compiled() is first
    torch.testing.assert_close(first, once * 2)
    w.grad = None
    assert compiled() is not first


def test_a_history_from_before_is_a_break() -> None:
    def fn(y: torch.Tensor) -> torch.Tensor:
        (y * y).sum().backward()
        return y * 1

    compiled, backend = capture(fn)
    for factor, graphs in ((1, 1), (3, 3), (1, 3)):
        x = torch.randn(3, requires_grad=True)
        compiled(x * factor if factor > 1 else x)
        torch.testing.assert_close(x.grad, 2 * factor ** 2 * x.detach())
        assert len(backend.graphs) == graphs


def test_a_hook_on_an_intermediate_is_a_break() -> None:
    def fn(w: torch.Tensor) -> Any:
        y = w * 2
        y.register_hook(lambda g: g * 5)
        y.sum().backward()
        return w.grad

    w = torch.randn(3, requires_grad=True)
    assert torch.equal(fs.compile(fn)(w), torch.full((3,), 10.0))


def not_scalar(w: torch.Tensor, x: torch.Tensor) -> Any:
    (w * x).backward()


def without_gradient(w: torch.Tensor, x: torch.Tensor) -> Any:
    (x * x).sum().backward()


def twice(w: torch.Tensor, x: torch.Tensor) -> Any:
    loss = (w * w).sum()
    loss.backward()
    loss.backward()


def of_another_shape(w: torch.Tensor, x: torch.Tensor) -> Any:
    (w * x).backward(torch.ones(2))


def no_inputs(w: torch.Tensor, x: torch.Tensor) -> Any:
    (w * x).sum().backward(inputs=[])


def overwritten(w: torch.Tensor, x: torch.Tensor) -> Any:
    loss = (w * w).sum()
    with torch.no_grad():
        w.add_(1)
    loss.backward()


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("fn", [not_scalar, without_gradient, twice, of_another_shape, no_inputs, overwritten], ids=lambda f: f.__name__)
def test_errors_are_those_of_eager(fn: Callable[..., Any], fullgraph: bool) -> None:
    told = []
    for run in (fn, fs.compile(fn, fullgraph=fullgraph)):
        w = torch.ones(3, requires_grad=True)
        with pytest.raises(RuntimeError) as error:
            run(w, torch.ones(3))
        told.append((str(error.value), w, w.grad))
    same(*told)


@pytest.mark.parametrize(("cls", "settings"), [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01}),
                                               (torch.optim.AdamW, {"lr": 0.01})], ids=["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_ten_steps_with_a_scheduler(cls: Any, settings: dict, backend: str) -> None:
    def prepare() -> Any:
        model = World().model
        opt = cls(model.parameters(), **settings)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            return loss.detach()
        return model, opt, torch.optim.lr_scheduler.StepLR(opt, 2, 0.5), step

    ours, theirs = prepare(), prepare()
    compiled = fs.compile(ours[3], backend=backend, fullgraph=True)
    counters["stats"].clear()
    for _ in range(10):
        x, y = torch.randn(5, 4), torch.randn(5, 3)
        same(compiled(x, y), theirs[3](x, y))
        same([p.grad for p in ours[0].parameters()], [p.grad for p in theirs[0].parameters()])
        ours[2].step()
        theirs[2].step()
    same([p.detach() for p in ours[0].parameters()], [p.detach() for p in theirs[0].parameters()])
    same(copy.copy(ours[1].state_dict()), copy.copy(theirs[1].state_dict()))
    assert counters["stats"]["unique_graphs"] == 2      # without states, and with


def test_a_scaler_keeps_its_states_by_the_optimisers_id() -> None:
    def prepare() -> Any:
        s = World()
        opt, scaler = torch.optim.SGD(s.model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

        def step() -> Any:
            opt.zero_grad()
            loss = s.model(s.x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            norm = nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            return loss.detach(), norm
        return s, step

    (ours, step), (theirs, eager) = prepare(), prepare()
    compiled = fs.compile(step)
    for _ in range(2):
        same(compiled(), eager())
        same(ours.left(), theirs.left())


def test_the_gradient_of_a_result_is_none_and_told() -> None:
    def fn(w: torch.Tensor) -> Any:
        y = w * 2
        y.sum().backward()
        return y.grad

    compiled = fs.compile(fn, fullgraph=True)
    with pytest.warns(UserWarning, match="not a leaf Tensor"):
        assert compiled(torch.ones(3, requires_grad=True)) is None


# -- histories from before the region -------------------------------------------------------------------------------------
def grad_through_the_past(y, w):
    return torch.autograd.grad((y * y * w).sum(), w)[0]


def grad_of_the_past_alone(y, w):
    return torch.autograd.grad((y * y).sum(), w, allow_unused=True)[0]


def grads_of_one_behind_the_other(y, w):
    return torch.autograd.grad((y * y * w).sum(), [w, y])


def backward_into_the_past(y, w):
    (y * y * w).sum().backward()
    return y.detach() + 1


def backward_into_one(y, w):
    (y * y * w).sum().backward(inputs=[w])
    return y.detach() + 1


def grad_of_what_came_in(y, w):
    return torch.autograd.grad((y * y).sum(), y)[0]


def grad_of_what_was_made_here(y, w):
    z = y * 3
    return torch.autograd.grad((z * z * y).sum(), z)[0]


@pytest.mark.parametrize("fn,stops", [
    (grad_through_the_past, True), (grad_of_the_past_alone, True), (grads_of_one_behind_the_other, True), (backward_into_the_past, True), (backward_into_one, True),
    (grad_of_what_came_in, False), (grad_of_what_was_made_here, False)])
def test_gradients_that_lead_behind_the_region(fn, stops):
    """A leaf may lie behind a tensor that came in: the graph does not know, the engine does."""
    found = []
    breaks.clear()
    for call in (fn, capture(fn)[0]):
        w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        found.append((call(w * 2, w), w.grad))
    torch.testing.assert_close(found[1], found[0])
    assert bool([stop for stop in breaks if "history from before" in str(stop)]) == stops


def test_what_a_history_consists_of_is_recognised():
    w = torch.ones(2, requires_grad=True)
    y = ResultOfOperator.apply(w, lambda: torch.ones(2))
    assert is_outside(y.grad_fn) and not is_outside((w * 2).grad_fn) and is_accumulator(y.grad_fn.next_functions[0][0])
    assert history_of([(y * 2).sum()]).outside == [y.grad_fn] and history_of([(y * 2).sum()], y).outside == []
    world = AbstractWorld(ShapeEnv())
    assert is_outside(world.wrap(w * 2, "x").grad_fn) and world.wrap(w, "x").grad_fn is None
