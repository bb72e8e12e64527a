"""Training programs whose backwards are captured from the engine: values, the order of hooks and what an error leaves are the eager engine's."""
import copy
import threading
import warnings
import weakref

import pytest
import torch
from captured import Doubles, OnlySecond, difference, forget, grads, mlp
from captured import check_captured as check
from torch import nn
from torch.utils.checkpoint import checkpoint

import firesteel as fs
from firesteel import counters

_fresh = pytest.fixture(forget, autouse=True)


def state(module):
    return [p.detach().clone() for p in module.parameters()]


def train(model, optimizer, batch, steps=3):
    """Losses and the parameters behind them."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [losses, state(model)]


# -- distributed training -----------------------------------------------------------------------------------------------
class Bucket:
    """Gradients of some parameters in one flat tensor, reduced when all are there."""

    def __init__(self, params, log):
        self.params, self.log, self.ready = params, log, 0
        self.flat = torch.zeros(sum(p.numel() for p in params))
        self.offsets = {}
        for p in params:
            self.offsets[p] = sum(q.numel() for q in self.offsets)
            p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p):
        start = self.offsets[p]
        self.flat[start:start + p.numel()].copy_(p.grad.view(-1))
        self.ready += 1
        if self.ready == len(self.params):
            self.reduce()

    def reduce(self):
        self.flat.div_(2)
        self.log.append(self.flat.clone())
        for p in self.params:
            p.grad.copy_(self.flat[self.offsets[p]:self.offsets[p] + p.numel()].view_as(p))
        self.ready = 0


def test_buckets_of_gradients_that_are_reduced_when_full():
    def fn():
        log = []
        model = mlp()
        params = list(model.parameters())[::-1]
        buckets = [Bucket(params[:3], log), Bucket(params[3:], log)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return [*train(model, optimizer, lambda: torch.randn(2, 4)), log, [b.flat for b in buckets]]
    check(fn)


def test_gradients_that_are_views_of_a_bucket():
    def fn():
        model = mlp()
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        start = 0
        for p in model.parameters():
            p.grad = flat[start:start + p.numel()].view_as(p)
            start += p.numel()
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
        assert all(p.grad._base is flat for p in model.parameters())
        return [flat, grads(model)]
    check(fn)


# -- fine-tuning --------------------------------------------------------------------------------------------------------
class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + (x @ self.a.t()) @ self.b.t()


@pytest.mark.parametrize("compiled", [False, True])
def test_low_rank_adapters_over_frozen_leaves(compiled):
    def fn():
        model = nn.Sequential(LoRA(nn.Linear(4, 8)), nn.GELU(), nn.LayerNorm(8).requires_grad_(False), LoRA(nn.Linear(8, 3)))
        called = fs.compile(model) if compiled else model
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            called(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
        return [state(model), grads(model)]
    check(fn)


# -- several losses and optimisers --------------------------------------------------------------------------------------
def penalty(critic, real, fake):
    between = (real * 0.3 + fake * 0.7).requires_grad_()
    grad, = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((grad.norm(2, dim=1) - 1) ** 2).mean()


def test_adversarial_training_with_a_gradient_penalty():
    def fn():
        generator, critic = mlp(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (generator, critic)]
        for _ in range(3):
            real, fake = torch.randn(5, 3), generator(torch.randn(5, 4))
            optimizers[1].zero_grad()
            (critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty(critic, real, fake.detach())).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (-critic(fake).mean()).backward()
            optimizers[0].step()
        return [state(generator), state(critic)]
    check(fn)


def test_gradients_accumulated_over_micro_batches():
    def fn():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(4):
                (model(torch.randn(2, 4)).square().mean() / 4).backward()
            optimizer.step()
        return [state(model), grads(model)]
    check(fn, captures=2)


def test_several_losses_over_a_retained_graph():
    def fn():
        model = mlp()
        hidden = model[:2](torch.randn(2, 4))
        losses = [model[2](hidden).sum(), hidden.square().sum(), (hidden * 3).sum()]
        out = []
        for loss in losses:
            loss.backward(retain_graph=True)
            out.append([None if g is None else g.clone() for g in grads(model)])
        return out
    check(fn)


def test_tied_weights_and_a_parameter_that_is_used_many_times():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, tokens):
            x = self.embed(tokens)
            for _ in range(5):
                x = torch.tanh(x * self.scale) + x
            return self.head(x)

    def fn():
        model = Tied()
        log = []
        model.scale.register_hook(lambda g: log.append(g.clone()))
        return [*train(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: torch.randint(7, (2, 3))), log]
    check(fn)


# -- optimiser steps inside of the backward -----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_optimiser_in_the_backward(kind):
    def fn():
        model = mlp()
        optimizers = {p: kind([p], lr=0.1) for p in model.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
        return [state(model), grads(model)]
    check(fn)


# -- saved tensors ------------------------------------------------------------------------------------------------------
def test_saved_tensors_kept_elsewhere():
    def fn():
        model, store, log = mlp(), {}, []

        def pack(t):
            store[len(store)] = t.detach().clone()
            return len(store) - 1

        def unpack(key):
            log.append(key)
            return store[key]
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
        return [grads(model), log]
    check(fn)


def test_saved_tensors_on_the_host():
    def fn():
        model = mlp()
        for _ in range(2):
            with torch.autograd.graph.save_on_cpu():
                loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
        return grads(model)
    check(fn)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    def fn():
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.5)) for _ in range(2))
        log = []
        blocks[0][0].weight.register_hook(lambda g: log.append(g.clone()))
        for _ in range(2):
            x = torch.randn(2, 4, requires_grad=True)
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=reentrant)
            y.square().sum().backward()
        return [grads(blocks), x.grad, log]
    check(fn)


# -- hooks that hooks register -----------------------------------------------------------------------------------------
def doubles_gradient(log):
    return lambda g: log.append(g.clone()) or g * 2


def doubles_accumulated(log):
    def hook(p):
        log.append(p.grad.clone())
        p.grad.mul_(2)
    return hook


LATE_HOOKS = {"register_hook": doubles_gradient, "register_post_accumulate_grad_hook": doubles_accumulated}


@pytest.mark.parametrize("method", LATE_HOOKS)
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("known", [0, 1])
def test_a_hook_on_a_leaf_that_a_hook_registers_acts_in_this_backward(method, breaks, known):
    def fn():
        log, found = [], []
        x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        for number in range(known):
            getattr(x, method)(lambda t, number=number: log.append(number))

        def register(grad):
            if breaks:
                fs.graph_break()
            handles.append(getattr(x, method)(LATE_HOOKS[method](log)))
        for _ in range(2):
            handles = []
            y = (x.sin() * w).exp()
            y.register_hook(register)
            y.sum().backward()
            found += [x.grad, w.grad]
            handles[0].remove()
            y = (x.sin() * w).cos()
            y.sum().backward()          # without it
            found += [x.grad.clone(), w.grad.clone()]
        return [found, log]
    check(fn)


@pytest.mark.parametrize("method", LATE_HOOKS)
def test_a_hook_of_a_leaf_that_registers_one_of_its_kind_there(method):
    """Eager has settled by then which of them run."""
    def fn():
        log, x = [], torch.randn(3, requires_grad=True)

        def register(t):
            log.append("registers")
            getattr(x, method)(LATE_HOOKS[method](log))
        getattr(x, method)(register)
        for _ in range(2):
            x.sin().sum().backward()
        return [x.grad, log]
    check(fn)


def test_hooks_register_hooks_on_other_leaves_in_turn():
    def fn():
        log, params = [], [torch.randn(3, requires_grad=True) for _ in range(3)]
        h = torch.ones(3)
        for p in params:
            h = (h * p).sin()

        def chain(number):
            def hook(p):
                log.append((number, p.grad.clone()))
                if number:
                    params[number - 1].register_post_accumulate_grad_hook(chain(number - 1))
            return hook
        params[2].register_post_accumulate_grad_hook(chain(2))
        h.sum().backward()
        params[2].register_hook(lambda g: log.append("late for none"))
        return [log, [p.grad for p in params]]
    check(fn)


def test_a_hook_for_a_leaf_whose_gradient_is_there_waits_for_the_next_backward():
    def fn():
        log, x, w = [], torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        x.register_post_accumulate_grad_hook(lambda p: (w.register_hook(lambda g: log.append(g.clone())), None)[1])
        (x.sin().exp() * w).sum().backward()
        first = len(log)
        (x.sin().exp() * w).sum().backward()
        return [first, log, x.grad, w.grad]
    check(fn)


# -- models -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_takes_weak_references(reentrant):
    def fn():
        refs, x = [], torch.randn(3, 4, requires_grad=True)

        def body(t):
            y = t.sin()
            refs.append(weakref.ref(y))
            return y.cos()
        checkpoint(body, x, use_reentrant=reentrant).sum().backward()
        return [x.grad, len(refs)]
    check(fn)


def test_recurrent_network():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5, num_layers=2, batch_first=True), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    def fn():
        model = Model()
        return train(model, torch.optim.Adam(model.parameters(), lr=0.01), lambda: torch.randn(2, 3, 4))
    check(fn)


def test_transformer():
    def fn():
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False)
        return train(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: torch.randn(2, 3, 8))
    check(fn)


def test_convolutions_and_batch_norm():
    def fn():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
        return [*train(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: torch.randn(2, 3, 8, 8)), list(model.buffers())]
    check(fn)


def test_autocast():
    def fn():
        model = mlp()
        out = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(2, 4)).float().square().mean()
            loss.backward()
            out.append([g.dtype for g in grads(model)])
        return [[g.float() for g in grads(model)], out]
    torch.manual_seed(0)
    expected = fn()
    fs.reset()
    torch.manual_seed(0)
    with fs.compiled_autograd():
        found = fn()
    assert expected[1] == found[1] and counters["compiled_autograd"]["by_eager"] == 0
    torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=1e-2)


def test_sparse_gradients_of_an_embedding():
    def fn():
        table = nn.Embedding(6, 3, sparse=True)
        out = []
        for _ in range(2):
            table(torch.tensor([1, 4, 1])).square().sum().backward()
            out.append((table.weight.grad.layout, table.weight.grad.to_dense()))
        return out
    torch.manual_seed(0)
    expected = fn()
    fs.reset()
    torch.manual_seed(0)
    with fs.compiled_autograd():
        assert difference(expected, fn()) is None


def test_complex_parameters():
    def fn():
        w = torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)
        b = torch.randn(3, requires_grad=True)
        for _ in range(2):
            y = w @ torch.complex(b, b.sin())
            (y.abs().sum() + y.real.sum() + torch.view_as_real(w).square().sum()).backward()
        return [torch.view_as_real(w.grad), w.grad.dtype, b.grad]
    check(fn)


# -- module hooks -------------------------------------------------------------------------------------------------------
def test_module_hooks_that_change_gradients():
    def fn():
        model, log = mlp(), []
        model[0].register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))
        model[1].register_full_backward_hook(lambda m, gi, go: (log.append(("inner", gi[0].clone(), go[0].clone())), (gi[0] + 1,))[1])
        model.register_full_backward_hook(lambda m, gi, go: log.append(("outer", None if gi[0] is None else gi[0].clone(), go[0].clone())))
        x = torch.randn(2, 4, requires_grad=True)
        for _ in range(2):
            model(x).square().sum().backward()
        return [grads(model), x.grad, log]
    check(fn)


# -- hooks that come and go ---------------------------------------------------------------------------------------------
def test_a_hook_that_removes_itself():
    def fn():
        log, x = [], torch.randn(3, requires_grad=True)

        def once(grad):
            log.append(grad.clone())
            handle.remove()
            return grad * 2
        handle = x.register_hook(once)
        for _ in range(3):
            (x * x).sum().backward()
        return [x.grad, log]
    check(fn)


def test_a_hook_that_registers_others_for_the_next_backward():
    def fn():
        log, x = [], torch.randn(3, requires_grad=True)
        y = x * 2

        def first(grad):
            log.append("first")
            if len(log) == 1:
                y.register_hook(lambda g: log.append(("later", g.clone())))
        y.register_hook(first)
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()
        return [x.grad, log[-2:]]
    check(fn)


def test_hooks_that_return_nothing():
    def fn():
        log, x = [], torch.randn(3, requires_grad=True)
        y = x.sin()
        y.register_hook(lambda g: None)
        y.register_hook(lambda g: log.append(g.clone()))
        y.grad_fn.register_prehook(lambda gs: None)
        y.grad_fn.register_hook(lambda results, gs: None)
        (y * y).sum().backward()
        return [x.grad, log]
    check(fn)


def test_undefined_gradients():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.set_materialize_grads(False)
            return x * 2, y * 3

        @staticmethod
        def backward(ctx, a, b):
            return None if a is None else a * 2, None if b is None else b * 3

    def fn():
        log = []
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        a, b = Half.apply(x.sin(), y.sin())
        a.grad_fn.register_prehook(lambda gs: log.append([None if g is None else g.clone() for g in gs]))
        a.grad_fn.register_hook(lambda results, gs: log.append([None if g is None else g.clone() for g in (*results, *gs)]))
        a.sum().backward()
        return [x.grad, y.grad, log]
    check(fn)


def test_zeros_for_gradients_that_a_custom_function_did_not_give():
    def fn():
        log, out = [], []
        layer = nn.Linear(3, 3)
        layer.register_full_backward_hook(lambda m, gi, go: log.append(go[0].clone()))
        for n in (2, 4, 5):
            x, y = torch.randn(n, 3, requires_grad=True), torch.randn(n, 3, requires_grad=True)
            z = Doubles.apply(layer(x))
            z.retain_grad()
            (OnlySecond.apply(z, y) + OnlySecond.apply(x * 2, y)).sum().backward()
            out += [x.grad, y.grad, z.grad]
        return [out, log, grads(layer)]
    check(fn)


NOT_DIFFERENTIABLE = {"rounded": torch.round, "integers": torch.Tensor.long, "truths": torch.Tensor.bool, "double": torch.Tensor.double, "places": lambda x: x.argmax(1)}


@pytest.mark.parametrize("kind", NOT_DIFFERENTIABLE)
@pytest.mark.parametrize("compiled", [False, True])
def test_zeros_for_an_output_that_is_not_differentiable(kind, compiled):
    log = []

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            other = NOT_DIFFERENTIABLE[kind](x)
            ctx.mark_non_differentiable(other)
            return x * 2, other

        @staticmethod
        def backward(ctx, grad, none):
            log.append((none.shape, none.dtype, none.sum()) if none is not None else None)
            return grad * 2

    def fn():
        log.clear()
        out, apply = [], fs.compile(Two.apply) if compiled else Two.apply
        for n in (2, 4, 5):
            x = torch.randn(n, 3, requires_grad=True)
            apply(x)[0].sum().backward()
            out.append(x.grad)
        return [out, list(log)]
    check(fn)


def test_gradients_of_gradients_through_saved_tensor_hooks():
    def fn():
        x = torch.randn(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            y = x * x * x
        first, = torch.autograd.grad(y.sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.sum(), x)]
    check(fn, by_eager=1)


def test_a_differentiable_gradient_of_a_graph_that_is_not_kept():
    def fn():
        x = torch.randn(3, requires_grad=True)
        first, = torch.autograd.grad((x ** 3).sum(), x, create_graph=True, retain_graph=False)
        first.sum().backward()
        return [first, x.grad]
    check(fn, by_eager=1)


# -- errors in the middle -----------------------------------------------------------------------------------------------
def test_gradients_that_were_there_before_an_error_stay():
    def fn():
        log = []
        x, w, v = (torch.randn(3, requires_grad=True) for _ in range(3))
        h = x * w
        w.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone()))

        def fails(grad):
            log.append("fails")
            raise ValueError("no more")
        h.register_hook(fails)
        v.register_hook(lambda g: log.append(("v", g.clone())))
        with pytest.raises(ValueError, match="no more"):
            (h * v).sum().backward()
        return [x.grad, w.grad, v.grad, log]
    check(fn)


def test_effects_before_an_index_that_is_out_of_range_stay():
    def fn():
        log, a, b = [], torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        place = torch.tensor([7])
        h = a.sin()
        h.register_hook(lambda g: g + g[place].sum())
        b.register_hook(lambda g: log.append(g.clone()))
        with pytest.raises(IndexError) as caught:
            (h * 1 + b.cos()).sum().backward()
        return [str(caught.value), a.grad, b.grad, log]
    check(fn)


@pytest.mark.parametrize("place", ["tensor", "before", "behind", "accumulated", "module", "custom"])
def test_errors_in_hooks_of_every_kind(place):
    class Fails(Doubles):
        @staticmethod
        def backward(ctx, grad):
            if place == "custom":
                raise KeyError("custom")
            return grad * 2

    def fn():
        log, counts = [], {"n": 0}
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))

        def fails(*args):
            counts["n"] += 1
            raise KeyError(place)
        h = Fails.apply(model[:2](torch.randn(2, 3)))
        register = {"tensor": h.register_hook, "before": h.grad_fn.register_prehook, "behind": h.grad_fn.register_hook, "custom": lambda f: None,
                    "accumulated": model[2].weight.register_post_accumulate_grad_hook, "module": model[2].register_full_backward_hook}
        register[place](fails)
        for n, p in enumerate(model.parameters()):
            p.register_hook(lambda g, n=n: log.append((n, g.clone())))
        for _ in range(2):
            with pytest.raises(KeyError, match=place):
                model[2:](h).square().sum().backward(retain_graph=True)
        return [grads(model), log, counts["n"]]
    check(fn)


# -- anomaly mode -------------------------------------------------------------------------------------------------------
def test_anomaly_mode_names_the_function_and_the_line():
    def fn():
        with torch.autograd.set_detect_anomaly(True):
            x = torch.zeros(3, requires_grad=True)
            y = (x.sqrt() * 0).sum()
            with pytest.raises(RuntimeError) as error:
                y.backward()
            return str(error.value).partition("\n")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = fn()
        with fs.compiled_autograd():
            assert fn() == expected
    assert "SqrtBackward0" in expected and counters["compiled_autograd"]["by_eager"] == 1


# -- many gradients at once ---------------------------------------------------------------------------------------------
def test_batched_gradients():
    def fn():
        x = torch.randn(3, requires_grad=True)
        y = x.sin() * x
        return list(torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True))
    torch.manual_seed(0)
    expected = fn()
    torch.manual_seed(0)
    with fs.compiled_autograd():
        assert difference(expected, fn()) is None


def test_jacobians_and_hessians():
    def fn():
        x = torch.randn(3)
        f = lambda t: (t.sin() * t).sum()
        return [torch.autograd.functional.hessian(f, x), torch.autograd.functional.jacobian(torch.tanh, x),
                torch.autograd.functional.vjp(torch.tanh, x, torch.ones(3))[1]]
    check(fn)


# -- compiled and eager parts -------------------------------------------------------------------------------------------
def test_compiled_and_eager_parts_of_one_model():
    def fn():
        model, log = nn.Sequential(mlp(), nn.Linear(3, 4), mlp()), []
        parts = [fs.compile(model[0]), model[1], fs.compile(model[2])]
        for n in (2, 3, 4):
            x = torch.randn(n, 4)
            for part in parts:
                x = part(x)
                x.register_hook(lambda g: log.append(g.clone()) or g * 0.5)
            x.square().mean().backward()
        return [grads(model), log]
    check(fn)


def test_a_step_compiled_as_a_whole():
    def fn():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fs.config.patch(compiled_autograd=True):
            @fs.compile
            def step(x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()
        return [[step(torch.randn(2, 4)) for _ in range(3)], state(model)]
    torch.manual_seed(0)
    model = mlp()
    expected = train(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: torch.randn(2, 4))
    fs.reset()
    torch.manual_seed(0)
    assert difference(expected, fn()) is None
    assert counters["compiled_autograd"]["captures"]


# -- threads ------------------------------------------------------------------------------------------------------------
def test_threads_with_contexts_of_their_own():
    model = mlp()
    found, inputs = {}, [torch.randn(2, 4) for _ in range(4)]

    def work(n):
        own = copy.deepcopy(model)
        with fs.compiled_autograd():
            for _ in range(3):
                own(inputs[n]).square().sum().backward()
        found[n] = grads(own)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        own = copy.deepcopy(model)
        for _ in range(3):
            own(inputs[n]).square().sum().backward()
        torch.testing.assert_close(found[n], grads(own))
