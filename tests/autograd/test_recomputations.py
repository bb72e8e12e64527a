"""Regions that an eager forward checkpointed, in a captured backward: recomputed in its graph, late, with eager's numbers; else by eager's hooks."""
import functools

import pytest
import torch
from captured import check_captured, forget, grads
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointError,
    GraphExecGroup,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import firesteel as fs
from firesteel import counters

pytestmark = pytest.mark.skipif("saved_args" not in torch.utils.checkpoint._CheckpointFrame.__init__.__code__.co_names,
                                reason="this torch keeps the arguments of a checkpoint elsewhere: eager recomputes")
_fresh = pytest.fixture(forget, autouse=True)
again, reentrant = (functools.partial(checkpoint, use_reentrant=value) for value in (False, True))


def check(fn, fullgraph=True, captures=1, backends=("aot_eager", "native"), **settings):
    """fn() is eager's, and the generator of random numbers is where eager leaves it; under `fullgraph` nothing is left to eager."""
    check_captured(lambda: [fn(), torch.rand(1)], backends, captures, fullgraph=fullgraph, **settings)


class Block(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.norm, self.inner, self.drop = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(drop)

    def forward(self, x):
        return x + self.drop(torch.nn.functional.gelu(self.inner(self.norm(x))))


def stack(blocks, x, run=again):
    for block in blocks:
        x = run(block, x)
    return x


# -- in the graph -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"preserve_rng_state": False}, {"determinism_check": "none"}])
def test_regions_are_recomputed_in_the_one_graph(drop, options):
    def fn():
        blocks = nn.ModuleList(Block(drop) for _ in range(3))
        x = torch.randn(2, 4, requires_grad=True)
        stack(blocks, x, functools.partial(again, **options)).sin().sum().backward()
        return [x.grad, grads(blocks)]
    check(fn)


def test_new_models_of_the_same_structure_share_the_graph():
    def fn():
        found = []
        for _ in range(3):
            blocks = nn.ModuleList(Block(0.5) for _ in range(2))
            stack(blocks, torch.randn(2, 4)).sum().backward()
            found.append(grads(blocks))
        return found
    check(fn)
    assert counters["stats"]["unique_graphs"] == 1


def test_another_function_is_another_recomputation():
    def fn():
        found = []
        for scale in (2.0, 3.0):
            x = torch.randn(3, requires_grad=True)
            again(lambda t, scale=scale: (t * scale).sin().cos(), x).sum().backward()
            found.append(x.grad)
        return found
    check(fn)


def test_sizes_that_change():
    def fn():
        block, found = Block(0.5), []
        for size in (2, 3, 5):
            x = torch.randn(size, 4, requires_grad=True)
            again(block, x).sin().sum().backward()
            found.append(x.grad)
        return [found, grads(block)]
    check(fn, captures=3)


def test_arguments_of_all_kinds():
    def region(x, pair, scale, flag=False, *, more, name):
        y = x * pair[0] + more["weight"] if flag else x
        return (y.exp() * scale).sin(), {"other": y.cos(), "name": name}

    def fn():
        x, a, w = (torch.randn(3, requires_grad=True) for _ in range(3))
        frozen = torch.randn(3)
        one, rest = again(region, x, (a, 2), 3.0, True, more={"weight": w}, name="n")
        two, _ = again(region, frozen, (a, 2), 0.5, more={"weight": w}, name="n")
        (one.sum() + rest["other"].prod() + (two * a).sum()).backward()
        return [x.grad, a.grad, w.grad]
    check(fn)


def test_closures_views_and_shared_parameters():
    def fn():
        weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
        h = x
        for number in range(3):
            h = again(lambda t, number=number: torch.tanh(t.view(4, 2).T.reshape(2, 4) @ weight * number) + t[:, :1], h)
        h.sum().backward()
        return [x.grad, weight.grad]
    check(fn)


def test_statistics_are_updated_as_by_eager():
    def fn():
        blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU()) for _ in range(2))
        stack(blocks, torch.randn(2, 2, 4, 4)).sum().backward()
        return [grads(blocks), [b.clone() for b in blocks.buffers()]]
    check(fn)


def test_in_place_operators_inside():
    def fn():
        x = torch.randn(4, requires_grad=True)
        again(lambda t: (t * 2).relu_().mul_(3).sin(), x).sum().backward()
        return x.grad
    check(fn)


def test_autocast_of_the_forward():
    def fn():
        blocks = nn.ModuleList(Block() for _ in range(2))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = stack(blocks, torch.randn(2, 4))
        out.sum().backward()
        return grads(blocks)
    check(fn, same=lambda expected, found: all(torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in zip(expected[0], found[0])))    # bfloat16


def test_a_custom_function_inside():
    class Cube(torch.autograd.Function):
        forward = staticmethod(lambda x: x ** 3)
        setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
        backward = staticmethod(lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad)

    def fn():
        x = torch.randn(4, requires_grad=True)
        again(lambda t: Cube.apply(t.sin()).cos(), x).sum().backward()
        return x.grad
    check(fn)


def test_hooks_between_regions_keep_their_order():
    def fn():
        log, x = [], torch.randn(3, requires_grad=True)
        h = x
        for number in range(3):
            h = again(lambda t: t.sin().exp(), h)
            h.register_hook(lambda g, number=number: log.append((number, g.clone())))
        h.sum().backward()
        return [x.grad, log]
    check(fn)


def test_a_graph_that_is_kept_is_recomputed_each_time():
    def fn():
        block, x = Block(0.5), torch.randn(2, 4, requires_grad=True)
        loss = again(block, x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad, grads(block)]
    check(fn, captures=2)


def test_two_backwards_through_parts_of_a_region():
    def fn():
        x = torch.randn(3, requires_grad=True)
        one, two = again(lambda t: (t.sin().exp(), t.cos().exp()), x)
        one.sum().backward()
        two.sum().backward()
        return x.grad
    check(fn, captures=2)


def test_gradients_of_some_leaves():
    def fn():
        block, x = Block(), torch.randn(2, 4, requires_grad=True)
        return torch.autograd.grad(again(block, x).sum(), [x, block.inner.bias])
    check(fn)


def test_what_a_region_read_is_let_go():
    """When the gradient of the last leaf is there, nothing holds the arguments of regions: neither a list, nor a frame."""
    def step():
        x = torch.randn(2, 4, requires_grad=True)
        h, refs, log = x, [], []
        for _ in range(3):
            h = h * 2
            refs.append(StorageWeakRef(h.untyped_storage()))
            h = again(lambda t: t.sin().exp(), h)
        loss = h.sum()
        del h
        x.register_hook(lambda g: log.append([r.expired() for r in refs]))
        loss.backward()
        return [x.grad, log]
    check(lambda: [step(), step()][1], fullgraph=False, backends=("native",))       # the first one compiles


# -- reentrant ----------------------------------------------------------------------------------------------------------
def test_reentrant_regions_are_recomputed_and_differentiated_in_the_one_graph():
    def fn():
        blocks, found = nn.ModuleList(Block() for _ in range(3)), []
        for _ in range(2):
            x = torch.randn(2, 4, requires_grad=True)
            stack(blocks, x, reentrant).sin().sum().backward()
            found.append(x.grad)
        return [found, grads(blocks)]
    check(fn)


def test_reentrant_regions_with_other_arguments_and_several_outputs():
    def region(x, scale, w, name):
        return (x * w).exp() * scale, x.detach(), w.cos()

    def fn():
        x, w, log = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True), []
        one, _, two = reentrant(region, x * 2, 3.0, w, "n")
        one.register_hook(lambda g: log.append(g.clone()))
        (one.sum() + two.prod()).backward()
        return [x.grad, w.grad, log]
    check(fn)


def test_reentrant_regions_under_autocast_and_with_statistics():
    def fn():
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2))
        x = torch.randn(3, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = stack(blocks, x, reentrant)
        out.sum().backward()
        return [x.grad, *grads(blocks), *blocks.buffers()]
    check(fn, same=lambda expected, found: all(torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in zip(expected[0], found[0])))    # bfloat16


def test_reentrant_regions_with_hooks_on_parameters_or_random_numbers():
    def fn():
        blocks, log = nn.ModuleList([Block(), Block(0.5)]), []
        blocks[0].inner.weight.register_hook(lambda g: log.append(g.clone()))
        blocks[1].inner.weight.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone()))
        x = torch.randn(2, 4, requires_grad=True)
        stack(blocks, x, reentrant).sum().backward()
        return [x.grad, grads(blocks), log]
    check(fn, fullgraph=False)


def test_reentrant_regions_raise_as_in_eager():
    def some_leaves():
        x = torch.randn(3, requires_grad=True)
        torch.autograd.grad(reentrant(torch.exp, x).sum(), x)

    def no_gradient():
        x = torch.randn(3, requires_grad=True)
        reentrant(torch.Tensor.detach, x).sum().backward()
    for fn, text in ((some_leaves, "incompatible with .grad"), (no_gradient, "none of output has requires_grad=True")):
        with pytest.raises(RuntimeError, match=text):
            fn()
        with fs.compiled_autograd(), pytest.raises(RuntimeError, match=text):
            fn()


# -- by eager's hooks ---------------------------------------------------------------------------------------------------
def test_effects_on_objects_of_the_user_are_made_for_real():
    def fn():
        log, x = [], torch.randn(3, requires_grad=True)

        def region(t):
            log.append("run")
            return t.sin().exp()
        again(region, x).sum().backward()
        return [x.grad, log]
    check(fn, fullgraph=False)


def test_regions_inside_of_regions():
    def fn():
        inner, outer, x = Block(0.5), Block(0.5), torch.randn(2, 4, requires_grad=True)
        again(lambda t: outer(again(inner, t)), x).sum().backward()
        return [x.grad, grads(inner), grads(outer)]
    check(fn, fullgraph=False)


def test_selective_contexts_and_debugging():
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def fn():
        blocks, x = nn.ModuleList(Block() for _ in range(3)), torch.randn(2, 4, requires_grad=True)
        h = again(blocks[0], again(blocks[1], x, context_fn=policy))
        again(blocks[2], h, debug=True).sum().backward()
        return [x.grad, grads(blocks)]
    check(fn, fullgraph=False)


def test_hooks_of_the_user_around_a_region():
    def fn():
        log, x = [], torch.randn(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: log.append("pack") or t, lambda t: log.append("unpack") or t):
            out = again(lambda t: t.sin().exp(), x * 2).sum()
        out.backward()
        return [x.grad, log]
    check(fn, fullgraph=False)


def test_groups_of_backwards_share_a_recomputation():
    def fn():
        runs, x = [], torch.randn(3, requires_grad=True)

        def region(t):
            runs.append(1)
            return t.sin().exp(), t.cos().exp()
        one, two = again(region, x)
        with GraphExecGroup():
            one.sum().backward()
            two.sum().backward()
        return [x.grad, len(runs)]
    check(fn, fullgraph=False, captures=2)


def test_a_region_that_changes_its_mind_raises_as_in_eager():
    calls = []

    def region(t):
        calls.append(1)
        return t.sin().exp() if len(calls) % 2 else t.sin()

    def fn():
        with set_checkpoint_early_stop(False):
            again(region, torch.randn(3, requires_grad=True)).sum().backward()
    with pytest.raises(CheckpointError, match="A different number of tensors"):
        fn()
    with fs.compiled_autograd(), pytest.raises(CheckpointError, match="A different number of tensors"):
        fn()


def test_an_argument_that_was_overwritten_raises_as_in_eager():
    def fn():
        x = torch.randn(3, requires_grad=True) * 1
        out = again(lambda t: t.sin().exp(), x).sum()
        with torch.no_grad():
            x.mul_(2)
        out.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fn()
    with fs.compiled_autograd(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fn()
