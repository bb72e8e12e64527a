"""Backwards captured from the autograd engine: values, `.grad`, hooks and errors are the eager engine's, and equal graphs are captured once."""
import contextlib
import logging
import operator
import os
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from backward_programs import compare
from captured import Doubles, Nothing, OnlySecond, Scale, captured_by, check_captured, difference, forget, grads, mlp, seeded
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

import firesteel as fs
from firesteel import artifacts, counters
from firesteel.autograd import engine
from firesteel.autograd.backward_calls import NEEDED, find_door
from firesteel.autograd.compiled import BackwardCapture
from firesteel.autograd.inlined import InlinedBackward

BACKENDS = ("eager", "aot_eager", "native")
FUZZ = int(os.environ.get("FIRESTEEL_FUZZ", "20"))


_fresh = pytest.fixture(forget, autouse=True)


def captured(fn, backend="native", fullgraph=True, dynamic=None):
    """What fn() returns when its backwards are captured."""
    with captured_by(backend, fullgraph=fullgraph, dynamic=dynamic):
        return seeded(fn)


def check(fn, captures=1, backends=BACKENDS, fullgraph=True, **settings):
    check_captured(fn, backends, captures, fullgraph=fullgraph, **settings)


# -- the door -----------------------------------------------------------------------------------------------------------
def test_a_torch_without_the_door_leaves_backwards_to_the_eager_engine(monkeypatch):
    monkeypatch.setattr(engine, "door", None)
    check(lambda: seeded(lambda: torch.autograd.grad((x := torch.ones(2, requires_grad=True)).exp().sum(), x)), captures=0, by_eager=1)


def test_the_door_is_found_by_what_it_offers():
    names = dict.fromkeys(NEEDED)
    assert find_door(SimpleNamespace()) is None
    assert find_door(SimpleNamespace(compiled_autograd=SimpleNamespace())) is None
    other = SimpleNamespace(autograd_compiler=SimpleNamespace(**names))
    assert find_door(other) is other.autograd_compiler and find_door(torch._C._dynamo) is engine.door


# -- gradients ----------------------------------------------------------------------------------------------------------
def test_parameters_get_their_gradients():
    def fn():
        m = mlp()
        m(torch.randn(2, 4)).sum().backward()
        return grads(m)
    check(fn)


def test_an_equal_graph_of_other_tensors_is_captured_once():
    def fn():
        out = []
        for _ in range(3):
            m = mlp()
            m(torch.randn(2, 4)).sum().backward()
            out.append(grads(m))
        return out
    check(fn)


def test_gradients_are_added_in_place():
    def fn():
        m = mlp()
        m(torch.randn(2, 4)).sum().backward()
        first = grads(m)
        m(torch.randn(2, 4)).sum().backward()
        assert all(one is other for one, other in zip(first, grads(m)))
        return first
    check(fn, captures=2)       # with and without a gradient that is there


def test_a_size_that_changes_is_captured_twice():
    def fn():
        out = []
        for n in (10, 100, 10, 15, 20):
            x = torch.randn(n, 4, requires_grad=True)
            x.tanh().sum().backward()
            out.append(x.grad)
        return out
    check(fn, captures=2)


def test_sizes_are_symbols_from_the_start_where_asked_for():
    with fs.compiled_autograd(dynamic=True):
        for n in (10, 20, 30):
            x = torch.randn(n, requires_grad=True)
            x.sin().sum().backward()
            torch.testing.assert_close(x.grad, x.detach().cos())
    assert counters["compiled_autograd"]["captures"] == 1


def test_grad_of_some_leaves_runs_no_other_path():
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise AssertionError("not asked for")

    def fn():
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        found = torch.autograd.grad((Raises.apply(x) * y).sum(), [y])
        assert x.grad is None and y.grad is None
        return list(found)
    check(fn)


class Refusing(torch.Tensor):
    """Refuses every function of torch, its attributes included."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called by the engine")


def test_the_engine_works_below_functions_that_a_leaf_overrides():
    def fn():
        data = torch.ones(3, requires_grad=True)
        leaf = data.detach().as_subclass(Refusing)
        with torch._C.DisableTorchFunctionSubclass():
            leaf.requires_grad_()
            loss = (leaf * data * 2).sum()
        loss.backward()
        with torch._C.DisableTorchFunctionSubclass():
            return leaf.grad, data.grad

    check(fn, fullgraph=False)


def test_gradients_of_each_sample_by_expanded_weights():
    def fn():
        m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
        call_for_per_sample_grads(m, loss_reduction="sum")(torch.randn(5, 4)).sum().backward()
        return [p.grad_sample for p in m.parameters()]

    check(fn, fullgraph=False)


def test_leaves_wanted_by_backward():
    def fn():
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        (x * y).sum().backward(inputs=[x])
        return [x.grad, y.grad]
    check(fn)


def test_a_view_written_in_place():
    def fn():
        x = torch.randn(4, 3, requires_grad=True)
        y = x * 2
        y[1:3] *= 3
        y.t()[0].mul_(5)
        y.sum().backward()
        return [x.grad]
    check(fn)


def test_a_retained_graph_serves_both_engines():
    x = torch.tensor(2.0, requires_grad=True)
    y = x ** 2
    for n in range(4):
        x.grad = torch.zeros(())
        if n % 2:
            captured(lambda: y.backward(retain_graph=True))
        else:
            y.backward(retain_graph=True)
        assert x.grad == 4


def test_gradients_of_gradients():
    def fn():
        x = torch.randn(5, requires_grad=True)
        first, = torch.autograd.grad((x ** 3).sum(), x, create_graph=True)
        second, = torch.autograd.grad(first.sum(), x, create_graph=True)
        third, = torch.autograd.grad(second.sum(), x)
        return [first, second, third]
    torch.manual_seed(0)
    expected = fn()
    for backend in BACKENDS:
        assert difference(expected, captured(fn, backend, fullgraph=False)) is None


def test_gradients_of_gradients_through_a_compiled_function():
    compiled = fs.compile(lambda x: torch.sin(x) * x)

    def fn():
        x = torch.randn(5, requires_grad=True)
        first, = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.sum(), x)]
    torch.manual_seed(0)
    expected = fn()
    fs.reset()
    assert difference(expected, captured(fn)) is None
    assert counters["compiled_autograd"]["by_eager"] == 1


# -- compiled forwards --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_a_compiled_forward_is_inlined(backend):
    def fn():
        m = torch.nn.Sequential(mlp(), torch.nn.LayerNorm(3))
        compiled = fs.compile(m, backend=backend)
        for _ in range(3):
            m.zero_grad()
            compiled(torch.randn(2, 4)).square().sum().backward()
        return grads(m)
    check(fn)


def test_equal_compiled_models_share_a_capture():
    def fn():
        out = []
        for _ in range(2):
            m = mlp()
            fs.compile(m, backend="aot_eager")(torch.randn(2, 4)).sum().backward()
            out.append(grads(m))
        return out
    check(fn)


def test_values_that_carry_no_gradient_are_no_part_of_the_engines_graph():
    """The first region makes the model and writes its parameters; the later ones only read them: one backward for both."""
    def train():
        torch.manual_seed(1)
        m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid())
        found = []
        for _ in range(3):
            m(torch.randn(1, 4)).sum().backward()
            found += [m[0].weight.grad, m[0].bias.grad]
            m.zero_grad()
        return found

    with fs.config.patch(compiled_autograd=True):
        compiled = fs.compile(train)
    assert difference(train(), compiled()) is None
    assert counters["compiled_autograd"]["captures"] == 1


def test_a_compiled_forward_with_changing_sizes():
    def fn():
        torch.manual_seed(1)
        m = mlp()
        compiled = fs.compile(m, dynamic=True)
        for n in (5, 6, 7, 9):
            compiled(torch.randn(n, 4)).square().sum().backward()
            m.zero_grad(set_to_none=True) if n != 9 else None
        return grads(m)
    check(fn, captures=2)


def test_an_output_that_no_gradient_reaches():
    compiled = fs.compile(lambda x, y: (x.sin(), y.cos()))

    def fn():
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        compiled(x, y)[0].sum().backward()
        return [x.grad, y.grad]
    check(fn)


# -- hooks --------------------------------------------------------------------------------------------------------------
def test_every_kind_of_hook_runs_in_its_place():
    def fn():
        log = []
        m = mlp()
        x = torch.randn(2, 4, requires_grad=True)
        h = m[0](x)
        h.register_hook(lambda g: log.append(("tensor", g.clone())) or g * 2)
        h.grad_fn.register_prehook(lambda gs: log.append(("before", gs[0].clone())))
        h.grad_fn.register_hook(lambda results, gs: log.append(("behind", gs[0].clone())))
        m[0].weight.register_hook(lambda g: log.append(("leaf", g.clone())) or g + 1)
        m[0].weight.register_post_accumulate_grad_hook(lambda p: log.append(("accumulated", p.grad.clone())))
        m[2].register_full_backward_hook(lambda mod, gi, go: log.append(("module", go[0].clone())))
        m[2](h.relu()).sum().backward()
        return [grads(m), x.grad, log]
    check(fn)


def test_another_hook_of_the_same_kind_takes_effect():
    def fn():
        out = []
        for factor in (2.0, 3.0, 5.0):
            x = torch.ones(3, requires_grad=True)
            x.register_hook(lambda g: g * factor)
            (x * 2).sum().backward()
            out.append(x.grad)
        return out
    check(fn)


def test_retain_grad():
    def fn():
        x = torch.randn(3, requires_grad=True)
        y = x * 2
        y.retain_grad()
        (y ** 2).sum().backward()
        return [x.grad, y.grad]
    check(fn)


def test_hooks_over_several_tensors_split_the_graph():
    def fn():
        log = []
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        torch.autograd.graph.register_multi_grad_hook([x, y], lambda gs: log.extend(g.clone() for g in gs))
        (x * y).sum().backward()
        return [x.grad, y.grad, log]
    check(fn, fullgraph=False)


def test_saved_tensor_hooks():
    def fn():
        log = []
        x = torch.randn(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: ("packed", t * 2), lambda p: log.append(p[0]) or p[1] / 2):
            y = (x * x).exp()
        y.sum().backward()
        return [x.grad, log]
    check(fn)


def checkpointed_steps(reentrant, look):
    """Three checkpointed blocks, run by eager; what `look` sees at the start of each run of a block."""
    log, refs = [], []

    def block(layer):
        def run(x):
            log.append(look(refs))
            y = layer(x).sin()
            if not reentrant:
                refs.append(weakref.ref(y))
            return y.cos() * 2
        return run

    x = torch.ones(2, 4, requires_grad=True)
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    h = x
    for number, layer in enumerate(layers):
        h = torch.utils.checkpoint.checkpoint(block(layer), h, use_reentrant=reentrant)
        h.register_hook(lambda g, number=number: log.append(f"gradient of block {number}"))
    h.sum().backward()
    return log, x.grad, [layer.weight.grad for layer in layers]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_an_eager_forward_are_recomputed_late(reentrant):
    """Each just before its own nodes run, when what the one behind it saved is gone."""
    check(lambda: checkpointed_steps(reentrant, lambda refs: sum(r() is not None for r in refs)), fullgraph=False)


def test_callbacks_run_at_the_end():
    def fn():
        log = []
        x = torch.randn(3, requires_grad=True)

        def hook(grad):
            torch.autograd.Variable._execution_engine.queue_callback(lambda: log.append("end"))
            log.append("hook")
        x.register_hook(hook)
        (x * 2).sum().backward()
        return [x.grad, log]
    check(fn)


def test_a_hook_that_cannot_be_captured_runs_for_real():
    def fn():
        log = []
        x = torch.randn(3, requires_grad=True)
        y = x * 2
        y.register_hook(lambda g: log.append(g.sum().item() > 0))
        (y * y).sum().backward()
        return [x.grad, log]
    check(fn, fullgraph=False)


def test_a_hook_with_breaks_splits_the_graph_once():
    """Its own graphs are compiled apart, so what it reads is not guarded by the graphs around it."""
    def fn():
        x = torch.arange(3., requires_grad=True)
        y = x * 2

        def hook(g):
            g = g.sin()
            fs.graph_break()
            g = g.cos()
            fs.graph_break()
            return g * 2
        y.register_hook(hook)
        (y * y).sum().backward()
        return x.grad

    check(fn, fullgraph=False)
    assert counters["stats"]["unique_graphs"] == 5      # before it, three inside, behind it


def test_optimizer_in_the_backward():
    def fn():
        m = mlp()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in m.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            m(torch.randn(2, 4)).sum().backward()
        return list(m.parameters())
    check(fn, fullgraph=False)


def test_what_a_hook_may_not_return():
    def fn(result):
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda g: result)
        (x * 2).sum().backward()
    for result in (torch.ones(4), torch.ones(3, dtype=torch.float64)):
        with pytest.raises(RuntimeError) as eager:
            fn(result)
        with pytest.raises(RuntimeError) as ours:
            captured(lambda: fn(result), fullgraph=False)
        assert str(eager.value).partition("(")[0] == str(ours.value).partition("(")[0]


def test_retain_grad_of_an_expanded_gradient():
    def fn():
        x = torch.randn(3, 4, requires_grad=True)
        y = x.sin()
        y.retain_grad()
        z = torch.zeros(3, 4, requires_grad=True) * y
        z.retain_grad()
        (y.sum() + z.sum()).backward()
        return [x.grad, y.grad, z.grad]
    check(fn)


def test_retain_grad_where_no_gradient_arrives():
    def fn():
        x = torch.randn(3, requires_grad=True)
        y = x * 2
        y.retain_grad()
        OnlySecond.apply(y, x).sum().backward()
        return [x.grad, y.grad]
    check(fn)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_function_whose_second_gradient_turns_out_missing(dynamic):
    compiled = fs.compile(lambda x, y: (x * y, torch.cat([x.sin(), y])), dynamic=dynamic)

    def fn():
        out = []
        for n in (3, 5, 6):
            x, y = torch.randn(n, 2, requires_grad=True), torch.randn(n, 2, requires_grad=True)
            a, b = compiled(x, y)
            (a.sum() + Nothing.apply(b).sum()).backward()
            out += [x.grad, y.grad]
        return out
    torch.manual_seed(0)
    expected = fn()
    for backend in BACKENDS:
        assert difference(expected, captured(fn, backend)) is None


def test_a_missing_gradient_whose_size_others_tell():
    compiled = fs.compile(lambda x, y: (x * y, torch.cat([x.sin(), y, y[:2]])), dynamic=True)

    def fn():
        out = []
        for n in (3, 4, 5):
            x, y = torch.randn(n, 2, requires_grad=True), torch.randn(n, 2, requires_grad=True)
            compiled(x.exp(), y)[0].sum().backward()
            out += [x.grad, y.grad]
        return out
    check(fn, captures=2)


def test_a_backward_that_is_refused_keeps_its_saved_tensors(monkeypatch):
    monkeypatch.setattr(InlinedBackward, "fits", lambda self, tangents: False)
    compiled = fs.compile(lambda x, y: x.sin() * y)

    def fn():
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        compiled(x.exp(), y).sum().backward()
        return [x.grad, y.grad]
    check(fn, by_eager=1)


# -- custom functions ---------------------------------------------------------------------------------------------------
def test_custom_functions():
    def fn():
        x = torch.randn(5, requires_grad=True)
        Scale.apply(x * 2, 3.0).sum().backward()
        return [x.grad]
    check(fn)


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone(), x * 2

    @staticmethod
    def backward(ctx, one, other):
        return one + other


def test_zeros_for_a_gradient_that_is_not_there_follow_the_sizes():
    def fn():
        found = []
        for n in (3, 4, 5, 6):
            x = torch.arange(float(n), requires_grad=True)
            TwoOutputs.apply(x)[0].sum().backward()
            found.append(x.grad)
        return found

    check(fn, captures=2)


@pytest.mark.parametrize("zeros", [True, False])
def test_a_custom_function_is_asked_whether_it_wants_zeros(zeros):
    """Its gradient turns out to be missing while the graph runs; how it said so is not seen in its names."""
    says = getattr(torch.autograd.function.FunctionCtx, "set_" + "materialize_" + "grads")

    class Asked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            says(ctx, zeros)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad if grad is None else grad + 1

    def fn():
        x = torch.ones(2, requires_grad=True)
        Nothing.apply(Asked.apply(x)).sum().backward()
        return x.grad

    check(fn)


def test_custom_function_with_a_break():
    class Prints(Doubles):
        @staticmethod
        def backward(ctx, grad):
            fs.graph_break()
            return grad * 2

    def fn():
        x = torch.randn(5, requires_grad=True)
        Prints.apply(x.sin()).sum().backward()
        return [x.grad]
    check(fn, fullgraph=False)


def test_an_error_in_a_custom_backward_leaves_the_engine_usable():
    class Fails(Doubles):
        @staticmethod
        def backward(ctx, grad):
            raise ValueError("no gradient today")

    def fn():
        x = torch.randn(5, requires_grad=True)
        Fails.apply(x.sin()).sum().backward()
    with pytest.raises(ValueError, match="no gradient today"):
        captured(fn, fullgraph=False)
    test_parameters_get_their_gradients()


# -- contexts, the setting, threads -------------------------------------------------------------------------------------
@torch.library.custom_op("compiled_autograd::refuses", mutates_args=())
def refuses(x: torch.Tensor) -> torch.Tensor:
    if (x > 1).all():
        raise ValueError("too much")
    return x.clone()


@refuses.register_fake
def _(x):
    return torch.empty_like(x)


class Refused(Doubles):
    @staticmethod
    def backward(ctx, grad):
        return refuses(grad) * 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_an_operator_that_raises_in_the_midst_leaves_what_eager_leaves(times, compiled):
    """Hooks before it were called and leaves have their gradients; those behind it were not, and have none."""
    apply = fs.compile(Refused.apply, backend="eager") if compiled else Refused.apply

    def fn():
        log = []
        a, b, c = (torch.ones(3, requires_grad=True) for _ in range(3))
        b.register_post_accumulate_grad_hook(lambda p: log.append("b has its gradient"))
        a.register_hook(lambda g: log.append("a gets its gradient"))
        y = apply(a)
        y.register_hook(lambda g: log.append("the result gets its gradient"))
        try:
            (y * (c * times) * b).sum().backward()
        except ValueError as error:
            log.append(str(error))
        return log, a.grad, b.grad, c.grad

    check(fn, fullgraph=False)


def test_contexts_nest():
    x = torch.ones(3, requires_grad=True)
    assert not fs.in_compiled_autograd_region()
    inside = []
    x.register_hook(lambda g: inside.append(fs.in_compiled_autograd_region()))
    with fs.compiled_autograd():
        with fs.disable_compiled_autograd():
            (x * 2).sum().backward()
        assert counters["compiled_autograd"]["captures"] == 0
        (x * 2).sum().backward()
    assert counters["compiled_autograd"]["captures"] == 1
    (x * 2).sum().backward()
    assert counters["compiled_autograd"]["captures"] == 1
    assert inside == [False, True, False]


def test_the_setting_is_latched_by_compile():
    def step(x):
        y = (x * 2).sum()
        y.backward()
        return y

    plain = fs.compile(step, backend="aot_eager")
    with fs.config.patch(compiled_autograd=True):
        latched = fs.compile(step, backend="aot_eager")
    for compiled, captures in ((plain, 0), (latched, 1), (plain, 1), (latched, 1)):
        x = torch.randn(3, requires_grad=True)
        compiled(x)
        torch.testing.assert_close(x.grad, torch.full((3,), 2.0))
        assert counters["compiled_autograd"]["captures"] == captures


def test_other_threads_are_the_eager_engines():
    found = []

    def work():
        x = torch.ones(3, requires_grad=True)
        for _ in range(20):
            (x * 2).sum().backward()
        found.append(x.grad)

    with fs.compiled_autograd(lambda gm: fs.compile(gm, backend="eager")):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
    assert all(torch.equal(grad, torch.full((3,), 40.0)) for grad in found) and len(found) == 4
    assert counters["compiled_autograd"]["captures"] == 2       # without and with a gradient that is there


def test_a_backward_inside_of_a_backward_is_eager():
    class Reentrant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = ctx.x ** 2
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                ctx.y.backward(grad)
            return ctx.x.grad

    def fn():
        x = torch.randn(3, requires_grad=True)
        Reentrant.apply(x * 2).sum().backward()
        return [x.grad]
    check(fn, fullgraph=False)


def test_a_compiler_is_given_a_graph_module():
    seen = []
    with fs.compiled_autograd(lambda gm: seen.append(gm) or gm):
        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()
    assert isinstance(seen[0], torch.fx.GraphModule) and torch.equal(x.grad, torch.full((3,), 2.0))


def test_what_is_no_compiler_is_refused():
    with pytest.raises(fs.errors.UserError, match="GraphModule"):
        fs.compiled_autograd(3)


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("seed", range(FUZZ))
def test_random_graphs_with_hooks(seed, backend):
    assert compare(seed, backend) is None


# -- memory -------------------------------------------------------------------------------------------------------------
def test_saved_tensors_are_handed_over():
    """The list of inputs is emptied before the graph runs, so that the graph alone holds what was saved."""
    left = []

    def compiler(gm):
        compiled = fs.compile(gm)

        def run(inputs, *rest):
            out = compiled(inputs, *rest)
            left.append(len(inputs))
            return out
        return run
    with fs.compiled_autograd(compiler):
        x = torch.randn(5, requires_grad=True)
        (x.tanh() * x.sin()).sum().backward()
    assert left == [0]


def test_a_compiled_backward_frees_what_it_has_read():
    held = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            held.append(storage() is not None)
            return grad
    compiled = fs.compile(lambda x: x.tanh().exp())
    x = torch.randn(1000, requires_grad=True)
    out = compiled(Watch.apply(x))
    storage = weakref.ref(out.grad_fn.saved_tensors[0].untyped_storage())
    out.sum().backward()
    assert held == [False]


# -- what the log says --------------------------------------------------------------------------------------------------
def test_the_log_names_nodes_in_order_and_reasons(caplog):
    def step(n, hook=None):
        x = torch.randn(n, 4, requires_grad=True)
        if hook is not None:
            x.register_hook(hook)
        x.sin().sum().backward()
    artifacts.set_logs(autograd=True)
    try:
        with caplog.at_level(logging.DEBUG, "firesteel"), fs.compiled_autograd(lambda gm: gm):
            step(3)
            step(4)
            step(4, lambda g: g * 2)
    finally:
        artifacts.set_logs(autograd=False)
    texts = [record.getMessage() for record in caplog.records]
    reasons = [text.partition("captures a backward: ")[2] for text in texts if "captures a backward" in text]
    assert reasons == ["no backward so far had GraphRoot as node 0 behind the same nodes", "3 of 3 sizes have changed and are symbols from now on",
                       "node 3, AccumulateGrad, has other constants, hooks or inputs than before"]
    names = [line.partition(": ")[2] for line in texts[1].splitlines() if "# node" in line]
    assert names == ["GraphRoot", "SumBackward0", "SinBackward0", "AccumulateGrad"]


# -- the door of other torch versions -----------------------------------------------------------------------------------
def described(*accumulated):
    """(The graph of a capture in which a leaf, input 0, gets a gradient, input 1; does the engine get a result?); `accumulated` are the places
    of what it passes."""
    graphs = []
    capture = BackwardCapture(lambda graph: graphs.append(graph.module(None)))
    _, stand_ins, _, _ = capture.begin_capture([torch.ones(3), torch.ones(3)], [], [], [[], [], []])
    capture.set_node_origin("torch::autograd::AccumulateGrad", 0, None)
    result = capture.accumulate_grad(*(stand_ins[place] if isinstance(place, int) else None for place in accumulated), False)
    capture.end_capture([])
    return graphs[0].code, result is not None


def test_accumulation_with_and_without_the_gradient_that_is_there():
    """torch 2.11 passes no gradient that is there, and insists on None."""
    (older, result), (newer, its_result) = described(0, 1), described(0, None, 1)
    assert older == newer and not result and its_result


def test_arithmetic_of_the_engine_on_sizes():
    capture = BackwardCapture(lambda graph: None)
    _, _, (size,), _ = capture.begin_capture([], [3], [], [[], [], []])
    total = capture.node(size * 2 + 1)
    assert (total.target, total.args[0].target, total.args[1]) == (operator.add, operator.mul, 1)
    capture.close()


@pytest.mark.parametrize("flag,expected", [("set_materialize_grads", [True, True]), ("_materialize_non_diff_grads", [False, True]), (None, [False, False])])
def test_which_missing_gradients_are_none(flag, expected):
    """Gradients of (an output that nobody uses, one that is not differentiable): is it None?  torch lets both flags be set and not read."""
    seen = []

    class Three(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            outs = x.clone(), x * 2, x * 3
            ctx.mark_non_differentiable(outs[2])
            if flag == "set_materialize_grads":
                ctx.set_materialize_grads(False)
            elif flag is not None:
                ctx._materialize_non_diff_grads = False
            return outs

        @staticmethod
        def backward(ctx, first, unused, other):
            seen.append([unused is None, other is None])
            return first
    for context in (contextlib.nullcontext(), fs.compiled_autograd()):
        x = torch.ones(2, requires_grad=True)
        with context:
            Three.apply(x)[0].sum().backward()
        assert x.grad.tolist() == [1, 1]
    assert seen[0] == expected and all(one == expected for one in seen)


def test_an_eager_backward_for_which_the_door_is_opened_in_between_runs_again():
    calls = []

    def run_backward(*args):
        calls.append(args)
        if len(calls) == 1:
            raise NotImplementedError("Trying to run compiled autograd within another compiled autograd call, this is not supported yet.")
        return "done"
    assert engine._by_eager(run_backward, (1,), {}) == "done" and calls == [(1,), (1,)]
