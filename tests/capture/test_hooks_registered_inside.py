"""Hooks that a forward registers on modules: they fire in the same call, in one graph, and are there afterwards unless they were removed."""
import copy

import pytest
import torch
from torch import nn

import firesteel as fs


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()


class Layers(nn.Module):
    """Registers by `register(layers, log)`, calls its layers, and removes the handles where `keep` is not set."""

    def __init__(self, register, keep):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.register, self.keep = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), register, keep

    def forward(self, x):
        log = []
        handles = self.register(self.layers, log)
        for layer in self.layers:
            x = layer(x).sin()
        if not self.keep:
            for handle in handles:
                handle.remove()
        return x, log, handles


def forward(layers, log):
    return [layer.register_forward_hook(lambda m, args, out, n=n: log.append((n, args[0], out))) for n, layer in enumerate(layers)]


def changing(layers, log):
    return [layers[0].register_forward_hook(lambda m, args, out: out * 2), layers[0].register_forward_hook(lambda m, args, out: out + 1, prepend=True),
            layers[1].register_forward_pre_hook(lambda m, args: args[0] * 3), layers[1].register_forward_pre_hook(hook=lambda m, args: (args[0] + 1,))]


def with_kwargs(layers, log):
    def before(m, args, kwargs):
        log.append(sorted(kwargs))
        return args, kwargs

    def after(m, args, kwargs, out):
        return out - len(kwargs) - 1
    return [layers[0].register_forward_pre_hook(before, with_kwargs=True), layers[2].register_forward_hook(after, with_kwargs=True, always_call=True)]


def backward(layers, log):
    def after(m, grads, out_grads):
        log.append((grads[0].sum(), out_grads[0].sum()))
        return (grads[0] * 2,)
    return [layers[1].register_full_backward_hook(after), layers[2].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 3,)),
            layers[1].register_full_backward_hook(lambda m, grads, out: log.append(len(grads)), prepend=True)]


def one_that_holds_its_handle(layers, log):
    def once(m, args, out):
        log.append(out)
        handle.remove()
    handle = layers[0].register_forward_hook(once)
    return [handle]


def hooks_of(module):
    return [[len(table) for table in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks, m._forward_hooks_with_kwargs,
                                      m._forward_pre_hooks_with_kwargs, m._forward_hooks_always_called)] for m in module.layers]


def outcome(module, run, calls=2):
    found = []
    for _ in range(calls):
        x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
        out, log, handles = run(x)
        out.sum().backward()
        found.append((out.detach(), x.grad, list(log), hooks_of(module)))
        for handle in handles:
            handle.remove()
        assert hooks_of(module) == [[0] * 7] * 3
    return found


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("register", [forward, changing, with_kwargs, backward, one_that_holds_its_handle])
def test_as_eager(register, keep):
    module = Layers(register, keep)
    twin = copy.deepcopy(module)
    got, want = outcome(module, fs.compile(module, fullgraph=True)), outcome(twin, twin)
    torch.testing.assert_close(got, want)
    assert fs.counters["stats"]["unique_graphs"] == (2 if register is backward else 1)        # the first call changes the kind of backward hooks from none


def test_beside_hooks_that_were_there():
    def run(module, call):
        log = []
        handle = module.layers[0].register_forward_hook(lambda m, args, out: (log.append(1), out * 5)[1])
        found = outcome_with(call), list(log)
        handle.remove()
        return found

    def outcome_with(call):
        out, log, _ = call(torch.ones(2, 4))
        return out, log
    module = Layers(forward, keep=False)
    torch.testing.assert_close(run(module, fs.compile(module, fullgraph=True)), run(module, module))


def test_a_hook_that_stays_is_seen_by_the_next_call():
    module = nn.Sequential(nn.Linear(4, 4))

    def add(module, x):
        module[0].register_forward_hook(lambda m, args, out: out + 1)
        return module(x)
    twin, x = copy.deepcopy(module), torch.ones(2, 4)
    compiled = fs.compile(add, fullgraph=True)
    for count in (1, 2, 3):
        torch.testing.assert_close(compiled(module, x), add(twin, x))
        assert len(module[0]._forward_hooks) == count


def test_a_break_between_registering_and_removing():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def look(x):
        seen = []
        handle = module[0].register_forward_hook(lambda m, args, out: seen.append(out))
        y = module(x)
        fs.graph_break()
        y = module(y)
        handle.remove()
        return module(y), seen
    x = torch.ones(2, 4)
    torch.testing.assert_close(fs.compile(look)(x), look(x))
    assert not module[0]._forward_hooks


def test_wrong_calls_are_errors_as_in_eager():
    module = nn.Linear(4, 4)

    def wrong(x):
        module.register_forward_hook(print, sometimes=True)
        return x
    with pytest.raises(TypeError, match="sometimes"):
        fs.compile(wrong)(torch.ones(2))
    assert not module._forward_hooks
