"""Hooks in captured code: on inputs, parameters and intermediates, their handles, and those of modules; every backend, against eager."""
import copy
import functools
import weakref

import pytest
import torch

import firesteel as fs
from firesteel.testing import CompileCounter, CompileCounterWithBackend

BACKENDS = ["eager", "aot_eager", "native"]


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()


def both(fn, *inputs, backend="aot_eager", graphs=1, fullgraph=True, calls=2):
    """Runs `fn(log, *inputs)` and the backward of what it returns, eagerly and compiled; values, gradients and logs are equal."""
    counter = CompileCounterWithBackend(backend)
    compiled = fs.compile(fn, backend=counter, fullgraph=fullgraph)
    for _ in range(calls):
        found = []
        for run in (fn, compiled):
            log, given = [], [copy.deepcopy(x) for x in inputs]
            out = run(log, *given)
            out = out if isinstance(out, tuple) else (out,)
            total = sum(o.sum() * (n + 1) for n, o in enumerate(out) if isinstance(o, torch.Tensor))
            total.backward()
            leaves = [p for x in given for p in (x.parameters() if isinstance(x, torch.nn.Module) else [x])]
            found.append((out, log, [leaf.grad for leaf in leaves]))
        (expected, expected_log, expected_grads), (out, log, grads) = found
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(grads, expected_grads)
        assert len(log) == len(expected_log)
        torch.testing.assert_close(log, expected_log)
    assert counter.frame_count == graphs
    return compiled


def leaf():
    torch.manual_seed(0)
    return torch.randn(4, requires_grad=True)


every_backend = pytest.mark.parametrize("backend", BACKENDS)


# -- inputs -------------------------------------------------------------------------------------------------------------
@every_backend
def test_on_an_input(backend):
    def fn(log, x):
        x.register_hook(lambda g: log.append(g.clone()) or g * 2)
        return x.sin()
    both(fn, leaf(), backend=backend)


@every_backend
def test_on_an_input_that_is_no_leaf_and_is_overwritten(backend):
    def inner(log, y):
        y.register_hook(lambda g: log.append(g.clone()) or g * 2)
        y.mul_(3)
        y.register_hook(lambda g: log.append(g.clone()) or g + 1)
        return y * y
    compiled = fs.compile(inner, backend=backend)
    found = []
    for run in (inner, compiled):
        x, log = leaf(), []
        run(log, x * 1).sum().backward()
        found.append((x.grad, log))
    torch.testing.assert_close(found[1], found[0])


def test_a_tensor_without_gradient_raises_as_eager():
    def fn(x):
        y = x + 1
        try:
            y.register_hook(lambda g: g)
        except RuntimeError as error:
            return y, str(error)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        fs.compile(lambda x: x.register_hook(lambda g: g), backend="eager")(torch.ones(2))
    assert fs.compile(fn, backend="eager")(torch.ones(2))[1] == fn(torch.ones(2))[1]


@every_backend
def test_post_accumulate(backend):
    def fn(log, x):
        x.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone()))
        return x * 3
    both(fn, leaf(), backend=backend)


# -- intermediates ------------------------------------------------------------------------------------------------------
@every_backend
def test_on_an_intermediate(backend):
    def fn(log, x):
        y = x * 2
        y.register_hook(lambda g: log.append(g.clone()) or g * 10)
        return y.sin()
    both(fn, leaf(), backend=backend)


@every_backend
def test_registered_after_its_uses(backend):
    def fn(log, x):
        y = x * 2
        z = y.sin()
        w = y.view(2, 2).exp()
        y.register_hook(lambda g: log.append(g.clone()) or g * 10)
        return z, w, y
    both(fn, leaf(), backend=backend)


@every_backend
def test_several_run_in_order(backend):
    def fn(log, x):
        y = x * 2
        y.register_hook(lambda g: log.append(1.0) or g + 1)
        y.register_hook(lambda g: log.append(2.0) or g * 5)
        z = y * 3
        z.register_hook(lambda g: log.append(3.0))
        return z
    both(fn, leaf(), backend=backend)


@every_backend
def test_before_an_overwrite(backend):
    def fn(log, x):
        y = x * 2
        y.register_hook(lambda g: log.append(g.clone()) or g * 10)
        y.mul_(3)
        y.register_hook(lambda g: log.append(g.clone()) or g + 1)
        return y * y
    both(fn, leaf(), backend=backend)


@every_backend
def test_on_one_of_several_results(backend):
    def fn(log, x):
        a, b = x.split(2)
        b.register_hook(lambda g: log.append(g.clone()) or g * 7)
        values, places = (x * 2).sort()
        values.register_hook(lambda g: log.append(g.clone()) or g * 3)
        return a * b, values * values
    both(fn, leaf(), backend=backend)


@every_backend
def test_closure_over_an_intermediate(backend):
    def fn(log, x):
        y = x.sin()
        y.register_hook(lambda g: g + y)
        return y.sin()
    both(fn, leaf(), backend=backend)


@every_backend
def test_partial_method_and_callable_object(backend):
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, g):
            return g * self.factor

        def method(self, g):
            return g + self.factor

    def add(g, *, k):
        return g + k

    def fn(log, x):
        y = x * 2
        y.register_hook(functools.partial(add, k=3))
        y.register_hook(Scale(2))
        y.register_hook(Scale(5).method)
        return y * 3
    both(fn, leaf(), backend=backend)


@every_backend
def test_retain_grad(backend):
    def fn(log, x):
        y = x * 2
        y.retain_grad()
        log.append(y)
        return y.sin()
    logs = []
    for run in (fn, fs.compile(fn, backend=backend, fullgraph=True)):
        log, x = [], leaf()
        run(log, x).sum().backward()
        logs.append((log[0].grad, x.grad))
    torch.testing.assert_close(logs[1], logs[0])


@every_backend
def test_under_no_grad_blocks_and_dynamic_sizes(backend):
    def fn(log, x):
        with torch.no_grad():
            scale = x.abs().max()
        y = x * scale
        with torch.no_grad():
            y.register_hook(lambda g: log.append(g.clone()) or g * 2)
            norm = y.norm()
        return y.sin() / norm * x.shape[0]
    counter = CompileCounterWithBackend(backend)
    compiled = fs.compile(fn, backend=counter, fullgraph=True, dynamic=True)
    for size in (4, 7, 9):
        found = []
        for run in (fn, compiled):
            torch.manual_seed(0)
            x, log = torch.randn(size, requires_grad=True), []
            run(log, x).sum().backward()
            found.append((x.grad, log))
        torch.testing.assert_close(found[1], found[0])
    assert counter.frame_count == 1


@every_backend
def test_second_order_passes_the_hook(backend):
    def fn(x):
        y = x * x
        y.register_hook(lambda g: g * g)
        return y.sin()
    found = []
    for run in (fn, fs.compile(fn, backend=backend, fullgraph=True)):
        x = leaf()
        (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        found.append((first, second))
    torch.testing.assert_close(found[1], found[0])


# -- handles ------------------------------------------------------------------------------------------------------------
@every_backend
@pytest.mark.parametrize("inside", [False, True], ids=["input", "intermediate"])
def test_handles(backend, inside):
    def fn(x, keep):
        y = x * 2 if inside else x
        first = y.register_hook(lambda g: g * 3)
        second = y.register_hook(lambda g: g * 5)
        third = y.register_hook(lambda g: g * 7)
        first.remove()
        keep.append(second)
        return y * 1.0, {"third": third, "again": third}
    counter = CompileCounterWithBackend(backend)
    compiled = fs.compile(fn, backend=counter, fullgraph=True)
    for drop in (False, True):
        grads = []
        for run in (fn, compiled):
            x, keep = leaf(), []
            out, handles = run(x, keep)
            assert isinstance(handles["third"], torch.utils.hooks.RemovableHandle) and handles["third"] is handles["again"]
            if drop:
                keep[0].remove()
                handles["third"].remove()
            out.sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(grads[1], grads[0])
    assert counter.frame_count == 1


@every_backend
def test_a_hook_that_removes_itself(backend):
    def fn(log, x):
        y = x * 2

        def once(g):
            log.append(g.clone())
            handle.remove()
            return g * 3
        handle = y.register_hook(once)
        other = x.register_hook(lambda g: other.remove())
        return y.sin()
    both(fn, leaf(), backend=backend)


def test_a_handle_in_a_module_attribute():
    class Holder(torch.nn.Module):
        handle = None

        def forward(self, x):
            self.handle = x.register_hook(lambda g: g * 2)
            return x * 1.0
    module = Holder()
    compiled = fs.compile(module, backend="aot_eager", fullgraph=True)
    x = leaf()
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((4,), 2.0))
    module.handle.remove()
    x.grad = None
    (x * 1.0).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4))


# -- no recompiles ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inside", [False, True], ids=["input", "intermediate"])
def test_neither_identity_nor_payload_recompiles(inside):
    hook = None

    def fn(x, payload):
        y = x * 2 if inside else x
        y.register_hook(hook)
        y.register_hook(functools.partial(add, k=payload))
        y.register_hook(lambda g: g * payload[0])
        return y * 3.0

    def add(g, k):
        return g + k[0]
    counter = CompileCounter()
    compiled = fs.compile(fn, backend=counter, fullgraph=True)
    for hook, payload in [(lambda g: g * 2, [1.0]), (lambda g: g - 1, [torch.tensor(3.0)])]:     # noqa: B007  fn reads the hook
        grads = []
        for run in (fn, compiled):
            x = leaf()
            run(x, payload).sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(grads[1], grads[0])
    assert counter.frame_count == 1


def test_layers_with_equal_hooks_share_code():
    counter = CompileCounter()
    layers = [torch.nn.Linear(4, 4) for _ in range(12)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        layer.register_full_backward_hook(lambda module, grads, outs: None)
    x = leaf()
    expected = x
    for layer in layers:
        expected = layer(expected)
    out = x
    compiled = [fs.compile(layer, backend=counter) for layer in layers]
    for layer in compiled:
        out = layer(out)
    torch.testing.assert_close(out, expected)
    assert counter.frame_count == 1


def test_nothing_is_kept_alive():
    def fn(x, payload):
        y = x * 2
        y.register_hook(lambda g: g * payload.factor)
        return y * 3

    class Payload:
        factor = 2
    compiled = fs.compile(fn, backend="aot_eager")
    payload = Payload()
    gone = weakref.ref(payload)
    out = compiled(leaf(), payload)
    out.sum().backward()
    del out, payload
    assert gone() is None


# -- modules ------------------------------------------------------------------------------------------------------------
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)

    def forward(self, x, *, scale=1.0):
        return self.b(self.a(x).relu() * scale)


LOG = []


def forward_hook(module, args, out):
    LOG.append("forward")
    return out * 2


def forward_hook_kwargs(module, args, kwargs, out):
    LOG.append(("forward", sorted(kwargs)))
    return out + 1


def pre_hook(module, args):
    LOG.append("pre")
    return (args[0] + 1,)


def pre_hook_kwargs(module, args, kwargs):
    LOG.append(("pre", sorted(kwargs)))
    return args, {**kwargs, "scale": 3.0}


def backward_hook(module, grad_in, grad_out):
    LOG.append(("backward", type(module).__name__, [None if g is None else g.clone() for g in (*grad_in, *grad_out)]))
    return tuple(None if g is None else g * 2 for g in grad_in)


def backward_pre_hook(module, grad_out):
    LOG.append(("backward pre", [g.clone() for g in grad_out]))
    return tuple(g * 3 for g in grad_out)


REGISTER = {
    "forward": lambda net: net.a.register_forward_hook(forward_hook),
    "forward_kwargs": lambda net: net.register_forward_hook(forward_hook_kwargs, with_kwargs=True),
    "forward_prepend": lambda net: (net.a.register_forward_hook(forward_hook), net.a.register_forward_hook(lambda m, a, o: o + 5, prepend=True)),
    "pre": lambda net: net.b.register_forward_pre_hook(pre_hook),
    "pre_kwargs": lambda net: net.register_forward_pre_hook(pre_hook_kwargs, with_kwargs=True),
    "backward": lambda net: net.a.register_full_backward_hook(backward_hook),
    "backward_pre": lambda net: net.b.register_full_backward_pre_hook(backward_pre_hook),
    "backward_both": lambda net: (net.register_full_backward_hook(backward_hook), net.register_full_backward_pre_hook(backward_pre_hook)),
    "backward_nested": lambda net: [m.register_full_backward_hook(backward_hook) for m in net.modules()],
    "mixed": lambda net: (net.a.register_forward_hook(forward_hook), net.a.register_full_backward_hook(backward_hook), net.register_forward_pre_hook(pre_hook)),
}


def step(run, net, requires_grad=True):
    LOG.clear()
    x = torch.arange(8.0).view(2, 4).requires_grad_(requires_grad)
    net.zero_grad()
    out = run(x, scale=2.0)
    out.sum().backward()
    return out.detach(), x.grad, [p.grad for p in net.parameters()], list(LOG)


def flat(found):
    return torch.utils._pytree.tree_leaves(found)


def agree(found, expected):
    found, expected = flat(found), flat(expected)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs)
        else:
            assert mine == theirs


@every_backend
@pytest.mark.parametrize("kind", list(REGISTER))
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_module_hooks_before_and_after_compiling(kind, backend):
    net = Net()
    compiled = fs.compile(net, backend=backend, fullgraph=True)
    agree(step(compiled, net), step(net, net))
    handles = REGISTER[kind](net)                  # after compiling
    for requires_grad in (True, False):
        expected = step(net, net, requires_grad)
        assert expected[-1] or kind == "forward_prepend"
        agree(step(compiled, net, requires_grad), expected)
    for handle in handles if isinstance(handles, (tuple, list)) else [handles]:
        handle.remove()
    expected = step(net, net)
    assert not expected[-1]
    agree(step(compiled, net), expected)


GLOBAL = {
    "forward": lambda: torch.nn.modules.module.register_module_forward_hook(lambda m, a, o: LOG.append("all") or o + 1),
    "pre": lambda: torch.nn.modules.module.register_module_forward_pre_hook(lambda m, a: LOG.append("all pre")),
    "backward": lambda: torch.nn.modules.module.register_module_full_backward_hook(backward_hook),
    "backward_pre": lambda: torch.nn.modules.module.register_module_full_backward_pre_hook(backward_pre_hook),
}


@pytest.mark.parametrize("kind", list(GLOBAL))
def test_global_module_hooks(kind):
    net = Net()
    compiled = fs.compile(net, backend="aot_eager")
    agree(step(compiled, net), step(net, net))
    handle = GLOBAL[kind]()
    try:
        expected = step(net, net)
        assert expected[-1]
        agree(step(compiled, net), expected)
    finally:
        handle.remove()
    agree(step(compiled, net), step(net, net))


def test_legacy_backward_hooks():
    net = Net()
    compiled = fs.compile(net, backend="aot_eager")
    net.a.register_backward_hook(backward_hook)
    agree(step(compiled, net), step(net, net))


def test_always_called_hooks_run_when_forward_raises():
    class Raises(torch.nn.Module):
        def forward(self, x):
            if x.shape[0] == 3:
                raise ValueError("three")
            return x + 1
    module = Raises()
    module.register_forward_hook(lambda m, a, o: LOG.append("always"), always_call=True)
    compiled = fs.compile(module, backend="eager")
    LOG.clear()
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert LOG == ["always"]
    with pytest.raises(ValueError, match="three"):
        compiled(torch.ones(3))
    assert LOG == ["always", "always"]


def test_break_between_the_two_ends_of_backward_hooks(capsys):
    class Prints(torch.nn.Module):
        def forward(self, x):
            y = x.sin()
            print("here")
            return y * 2
    module = Prints()
    module.register_full_backward_hook(backward_hook)
    found = []
    for run in (module, fs.compile(module, backend="aot_eager")):
        LOG.clear()
        x = leaf()
        run(x).sum().backward()
        found.append((x.grad, list(LOG)))
    agree(found[1], found[0])


def test_registered_removed_and_called_inside():
    class Features(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            seen = []
            handle = self.layer.register_forward_hook(lambda m, a, out: seen.append(out * 2))
            out = self.layer(x)
            handle.remove()
            return out, seen
    module = Features()
    x = leaf()
    for run in (fs.compile(module, backend="eager"),) * 2:
        out, seen = run(x)
        expected, expected_seen = module(x)
        torch.testing.assert_close((out, seen), (expected, expected_seen))
        assert not module.layer._forward_hooks
