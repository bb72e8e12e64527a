"""Programs through ahead-of-time autograd with a compiler that runs graphs as they are: values, gradients, aliasing, errors are eager's."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firesteel as fs
from firesteel.artifacts import counters
from firesteel.autograd import aot

PARTITIONERS = {"default": aot.default_partition, "min_cut": aot.min_cut_partition}


def compiled(fn, partition="min_cut", **options):
    return aot.function(fn, aot.nop, partition_fn=PARTITIONERS[partition], **options)


def copies(tensors):
    return [t.detach().clone(memory_format=torch.preserve_format).requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in tensors]


def flat(outputs):
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def same(a, b):
    if a is None or b is None:
        return a is b
    if not isinstance(a, torch.Tensor):
        return a == b
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.allclose(a, b, equal_nan=True)


def run(fn, inputs, seed=0):
    """Outputs, and gradients of all differentiable outputs' sum with different weights."""
    torch.manual_seed(seed)
    outputs = flat(fn(*inputs))
    loss = sum(((k + 1) * o).sum() for k, o in enumerate(outputs) if isinstance(o, torch.Tensor) and o.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    return outputs, [t.grad if isinstance(t, torch.Tensor) and t.is_leaf else None for t in inputs]


def check(fn, *inputs, partition="min_cut", calls=2):
    other = compiled(fn, partition)
    for seed in range(calls):
        mine, theirs = copies(inputs), copies(inputs)
        want, want_grads = run(fn, theirs, seed)
        got, got_grads = run(other, mine, seed)
        assert len(got) == len(want)
        for g, w in zip(got, want):
            assert same(g, w), (g, w)
            if isinstance(w, torch.Tensor):
                assert g.requires_grad == w.requires_grad and g.is_leaf == w.is_leaf
        for place, (g, w) in enumerate(zip(got_grads, want_grads)):
            assert same(g, w), (place, g, w)
        for m, t in zip(mine, theirs):
            assert same(m, t)


def leaf(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def data(*shape, **options):
    return leaf(*shape, **options).detach()


PROGRAMS = {
    "sin": (lambda x: x.sin(), lambda: [leaf(3, 4)]),
    "chain": (lambda x, y: (x.sin() * y.cos()).exp().sum(), lambda: [leaf(3, 4), leaf(3, 4, seed=1)]),
    "matmul": (lambda x, w, b: F.gelu(x @ w + b), lambda: [leaf(4, 8), leaf(8, 8), leaf(8)]),
    "linear3d": (lambda x, w, b: F.linear(x, w, b).tanh(), lambda: [leaf(2, 4, 8), leaf(6, 8), leaf(6)]),
    "softmax": (lambda x: F.softmax(x, -1) * 2, lambda: [leaf(4, 8)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), lambda: [leaf(4, 8), leaf(8), leaf(8, seed=2)]),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([1, 2, 0, 3])) if False else F.log_softmax(x, 1).mean(), lambda: [leaf(4, 8)]),
    "embedding": (lambda w, i: F.embedding(i, w).sin(), lambda: [leaf(10, 4), torch.tensor([1, 3, 3])]),
    "conv": (lambda x, w: F.conv2d(x, w, padding=1).relu(), lambda: [leaf(2, 3, 6, 6), leaf(4, 3, 3, 3)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), lambda: [leaf(1, 2, 4, 8, seed=s) for s in range(3)]),
    "broadcast": (lambda x, y: x * y + y, lambda: [leaf(3, 1), leaf(4)]),
    "reduce": (lambda x: (x.mean(0), x.amax(1), x.var(1)), lambda: [leaf(3, 4)]),
    "int_output": (lambda x: (x.sin(), x.argmax(1)), lambda: [leaf(3, 4)]),
    "constant_output": (lambda x: (x * 2, 3, None), lambda: [leaf(3)]),
    "no_grad_output": (lambda x, y: (x * 2, y * 2), lambda: [leaf(3), data(3)]),
    "detach": (lambda x: (x.sin().detach() * x, x.detach()), lambda: [leaf(3)]),
    "no_grad_region": (lambda x: x * no_grad_norm(x), lambda: [leaf(3)]),
    "unused_input": (lambda x, y: x * 2, lambda: [leaf(3), leaf(3)]),
    "same_output_twice": (lambda x: (lambda y: (y, y))(x * 2), lambda: [leaf(3)]),
    "input_returned": (lambda x: (x, x * 2), lambda: [leaf(3)]),
    "view_of_input": (lambda x: (x.view(-1), x.t(), x[0]), lambda: [leaf(3, 4)]),
    "view_of_intermediate": (lambda x: (x * 2).view(-1), lambda: [leaf(3, 4)]),
    "views_sharing": (lambda x: (lambda y: (y, y.view(-1), y[1]))(x * 2), lambda: [leaf(3, 4)]),
    "views_of_hidden": (lambda x: (lambda y: (y.view(-1), y[1]))(x * 2), lambda: [leaf(3, 4)]),
    "detached_alias": (lambda x: (lambda y: (y, y.detach()))(x * 2), lambda: [leaf(3, 4)]),
    "chunk": (lambda x: (x * 2).chunk(2, 1), lambda: [leaf(3, 4)]),
    "inplace_intermediate": (lambda x: (lambda y: y.mul_(3).add_(x))(x * 2), lambda: [leaf(3)]),
    "inplace_through_view": (lambda x: inplace_view(x), lambda: [leaf(3, 4)]),
    "inplace_on_data": (lambda x, y: (y.add_(1), x * y), lambda: [leaf(3), data(3)]),
    "inplace_makes_grad": (lambda x, y: y.mul_(x).sin(), lambda: [leaf(3), data(3)]),
    "mutated_only": (lambda x, y: y.copy_(x.sum(0)).sum() * 0 + x.sum(), lambda: [leaf(3, 3), data(3)]),
    "expand": (lambda x: x.expand(4, 3) * 2, lambda: [leaf(1, 3)]),
    "cat": (lambda x, y: torch.cat([x, y, x]), lambda: [leaf(2, 3), leaf(1, 3)]),
    "index": (lambda x, i: x[i] * 2, lambda: [leaf(5, 3), torch.tensor([0, 4, 4])]),
    "where": (lambda x, y: torch.where(x > 0, x, y), lambda: [leaf(5), leaf(5, seed=1)]),
    "split_heads": (lambda x: x.view(2, 3, 2, 2).transpose(1, 2).reshape(2, -1) * 2, lambda: [leaf(2, 3, 4)]),
    "transposed_output": (lambda x: (x * 2).t(), lambda: [leaf(3, 4)]),
    "channels_last": (lambda x: x * 2, lambda: [leaf(2, 3, 4, 4).detach().to(memory_format=torch.channels_last).requires_grad_()]),
    "dropout": (lambda x: F.dropout(x, 0.5, True) * x, lambda: [leaf(20)]),
    "double": (lambda x: x.sin().double() * 2, lambda: [leaf(3)]),
    "new_constant": (lambda x: x * torch.arange(3) + torch.ones(3), lambda: [leaf(3)]),
}


def no_grad_norm(x):
    with torch.no_grad():
        return x.norm()


def inplace_view(x):
    y = x * 2
    y[0].mul_(3)
    y.t()[1] = x[:, 0]
    return y.sin()


@pytest.mark.parametrize("partition", PARTITIONERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, partition):
    fn, make = PROGRAMS[name]
    check(fn, *make(), partition=partition)


def check_module(model, *inputs, partition="min_cut"):
    """Trains a module two steps in eager and compiled; parameters, buffers, gradients, outputs are equal."""
    import copy
    other = copy.deepcopy(model)
    run_other = aot.module(other, aot.nop, partition_fn=PARTITIONERS[partition])
    for step in range(2):
        torch.manual_seed(step)
        want = model(*inputs)
        torch.manual_seed(step)
        got = run_other(*inputs)
        assert same(got, want)
        want.square().mean().backward()
        got.square().mean().backward()
    for (name, a), b in zip(model.named_parameters(), other.parameters()):
        assert same(a.grad, b.grad), name
    for (name, a), b in zip(model.named_buffers(), other.buffers()):
        assert same(a, b), name


@pytest.mark.parametrize("partition", PARTITIONERS)
def test_batch_norm_trains(partition):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2))
    check_module(model, torch.randn(2, 3, 5, 5), partition=partition)


@pytest.mark.parametrize("partition", PARTITIONERS)
def test_mlp_trains(partition):
    torch.manual_seed(0)
    check_module(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 2)), torch.randn(3, 4), partition=partition)


def test_unused_output_leaves_none():
    fn = compiled(lambda x, y: (x * 2, y.sin()))
    x, y = leaf(3), leaf(3)
    fn(x, y)[0].sum().backward()
    assert y.grad is None and torch.equal(x.grad, torch.full((3,), 2.0))


def test_hooks_on_inputs_and_outputs():
    log = []
    x = leaf(3)
    x.register_hook(lambda g: log.append(("in", g.clone())))
    y = compiled(lambda x: x * 3)(x)
    y.register_hook(lambda g: g * 2)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 6.0)) and [name for name, _ in log] == ["in"]


def test_saved_tensor_hooks_see_what_is_saved():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = compiled(lambda x: x.sin())(x := leaf(3))
    assert len(packed) == 1
    y.sum().backward()
    assert torch.allclose(x.grad, x.cos())


def test_second_backward():
    y = compiled(lambda x: x.sin().sum())(leaf(3))
    y.backward(retain_graph=True)
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_overwritten_saved_input_is_refused():
    x = leaf(3)
    y = compiled(lambda x: x.sin().sum())(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_strange_tangents():
    x = leaf(3, 4)
    z = leaf(3, 4)
    compiled(lambda x: x.sin())(x).backward(torch.ones(()).expand(3, 4))
    z.sin().backward(torch.ones(3, 4))
    assert torch.allclose(x.grad, z.grad)
    x.grad = None
    compiled(lambda x: x.sin())(x).backward(torch.ones(4, 3).t())
    assert torch.allclose(x.grad, z.grad)


def test_grad_mode_off_gives_an_inference_graph():
    graphs = []
    fn = aot.function(lambda x: x.sin(), lambda gm, inputs: graphs.append(gm) or gm.forward)
    with torch.no_grad():
        y = fn(leaf(3))
    assert not y.requires_grad and len(graphs) == 1
    fn(leaf(3)).sum().backward()
    assert len(graphs) == 3


def test_backward_is_compiled_at_its_first_use():
    made = []
    fn = aot.function(lambda x: x.sin(), aot.nop, lambda gm, inputs: made.append(gm) or gm.forward)
    y = fn(leaf(3))
    assert not made
    y.sum().backward()
    assert len(made) == 1


def test_mutations_stay_in_an_inference_graph_where_asked():
    def add_one(gm, inputs):
        graphs.append(gm)
        return gm.forward
    gm = torch.fx.symbolic_trace(lambda x, y: (x.add_(1) * y,))
    for keep in (True, False):
        graphs = []
        x, y = data(3), data(3, seed=1)
        run = aot.backend(fw_compiler=add_one, keep_inference_input_mutations=keep)(gm, [x, y])
        want, version = x + 1, x._version
        assert torch.equal(run(x, y)[0], want * y) and torch.equal(x, want) and x._version == version + 1
        assert ("copy_" in graphs[0].code) == keep


def test_boxed_compilers():
    def boxed(gm, inputs):
        def run(args):
            assert isinstance(args, list)
            return gm.forward(*args)
        run._boxed_call = True
        return run
    x = leaf(3)
    aot.function(lambda x: x.sin(), boxed)(x).sum().backward()
    assert torch.allclose(x.grad, x.cos())


def test_module_simplified_records_hooks_that_the_module_registers():
    class Hooked(torch.nn.Module):
        def forward(self, x):
            x.register_hook(lambda grad: grad + 3)
            return (x * 6,)
    x = torch.ones(4, requires_grad=True)
    out, = aot.module_simplified(Hooked(), [x], aot.nop)(x)
    out.sum().backward()
    assert x.grad.tolist() == [9] * 4


def test_module_simplified_and_export():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.randn(5, 4)
    want = model(x)
    model[1].reset_running_stats()
    out, = aot.module_simplified(model, [x], aot.nop)(x)
    assert torch.allclose(out, want)
    joint, signature = aot.export_joint(model, [x])
    assert signature.parameters == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert set(signature.mutated_inputs.values()) == {name for name, b in signature.inputs_to_buffers.items()}
    assert sorted(signature.gradients.values()) == sorted(signature.inputs_to_parameters)
    assert len(signature.tangents) == 1 and list(signature.tangents.values()) == list(signature.outputs)
    inference, signature = aot.export_joint(model, [x], trace_joint=False)
    assert not signature.tangents and not signature.gradients


def test_a_signature_can_be_read():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, 3))
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x):
            self.seen.add_(x.detach())
            y = (self.weight * x).sin()
            return y.sum(), self.weight.t(), x, None, y[0], y[1:, 2]
    _, signature = aot.export_joint(Both(), [leaf(3)])
    assert str(signature).split("\n") == [
        "parameter  primals_0      weight  gradient mul_3",
        "buffer     primals_1      seen  becomes add",
        "input      primals_2        gradient view",
        "tangent    tangents_0     of sum_1",
        "tangent    tangents_1     of select",
        "tangent    tangents_2     of select_1",
        "output     sum_1",
        "output     primals_0.t()",
        "output     primals_2",
        "output     None",
        "output     select",
        "output     select_1"]


def test_counters():
    counters["aot"].clear()
    compiled(lambda x: x.sin())(leaf(3))
    assert counters["aot"]["total"] == counters["aot"]["ok"] == 1


def test_program_that_changes_an_input_s_strides_runs_in_eager():
    counters["aot"].clear()
    x = data(3, 4)
    y = compiled(lambda x: x.t_() * 2)(x)
    assert x.shape == (4, 3) and torch.equal(y, x * 2) and counters["aot"]["reshaped_inputs"] == 1


# ---------------------------------------------------------------- aliasing (alias.py, by the numbers of its rules)

def test_rule_1_input_is_the_same_object():
    x = leaf(3)
    assert compiled(lambda x: (x, x * 2))(x)[0] is x


def test_rule_2_view_of_an_input():
    x = leaf(3, 4)
    v = compiled(lambda x: x.view(-1))(x)
    assert v._base is x and v._is_view()
    x2 = data(3, 4)
    w = compiled(lambda x: x[1])(x2)
    w.zero_()
    assert torch.equal(x2[1], torch.zeros(4))


def test_rule_3_outputs_share_storage():
    y, v = compiled(lambda x: (lambda y: (y, y.view(-1)))(x * 2))(leaf(3, 4))
    assert v._base is y
    with torch.no_grad():
        v[0] = 7
    assert y[0, 0] == 7


def test_rule_4_view_of_an_intermediate_can_be_written():
    x = leaf(3, 4)
    v = compiled(lambda x: (x * 2).view(-1))(x)
    v.mul_(3).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 6.0))


def test_rule_5_same_object():
    a, b = compiled(lambda x: (lambda y: (y, y))(x * 2))(leaf(3))
    assert a is b


def test_rule_7_versions_and_history():
    x, y = leaf(3), data(3)
    before = y._version
    out = compiled(lambda x, y: y.mul_(x) * 2)(x, y)
    assert y._version == before + 1 and y.requires_grad
    (out.sum() + y.sum()).backward()
    assert x.grad is not None


def test_rule_7_leaf_written_under_no_grad():
    def step(p, g):
        with torch.no_grad():
            p.sub_(g)
        return p * 2
    p, g = leaf(3), data(3, seed=3)
    want = p.detach() - g
    out = compiled(step)(p, g)
    assert p.is_leaf and p.requires_grad and torch.equal(p.detach(), want)
    out.sum().backward()
    assert torch.equal(p.grad, torch.full((3,), 2.0))


def test_rule_9_overlapping_inputs_run_eagerly():
    def fn(a, b):
        a.add_(1)
        return b * 2
    base, base2 = data(6), data(6)
    want = fn(base[:4], base[2:])
    counters["aot"]["overlapping_inputs"] = 0
    got = compiled(fn)(base2[:4], base2[2:])
    assert torch.equal(want, got) and torch.equal(base, base2) and counters["aot"]["overlapping_inputs"] == 1


def test_rule_11_one_tensor_twice():
    x = leaf(3)
    graphs = []
    fn = aot.function(lambda a, b: a * b, lambda gm, inputs: graphs.append(gm) or gm.forward)
    fn(x, x).sum().backward()
    assert torch.allclose(x.grad, 2 * x)
    y, z = leaf(3), leaf(3, seed=1)
    assert torch.equal(fn(y, z), y * z)


# ---------------------------------------------------------------- higher order

def second_order(fn, inputs):
    outputs = flat(fn(*inputs))
    wanted = [t for t in inputs if t.requires_grad]
    grads = torch.autograd.grad(sum(o.square().sum() for o in outputs), wanted, create_graph=True)
    loss = sum(g.square().sum() for g in grads if g.requires_grad)
    return [*grads, *torch.autograd.grad(loss, wanted, allow_unused=True)]


HIGHER = {
    "cube": (lambda x: x ** 3, lambda: [leaf(4)]),
    "mlp": (lambda x, w, v: F.softplus(x @ w).tanh() @ v, lambda: [leaf(3, 4), leaf(4, 5), leaf(5, 2)]),
    "norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), lambda: [leaf(3, 4), leaf(4), leaf(4, seed=3)]),
    "no_grad": (lambda x: x / no_grad_norm(x) + x.sin().detach() * x, lambda: [leaf(4)]),
    "view": (lambda x: (x ** 3).view(-1), lambda: [leaf(3, 4)]),
    "two": (lambda x, y: (x * y, x.exp()), lambda: [leaf(3), leaf(3, seed=1)]),
    "softmax": (lambda x: F.softmax(x, 0) ** 2, lambda: [leaf(5)]),
}


@pytest.mark.parametrize("name", HIGHER)
def test_second_order(name):
    fn, make = HIGHER[name]
    mine, theirs = copies(make()), copies(make())
    for got, want in zip(second_order(compiled(fn), mine), second_order(fn, theirs)):
        assert (got is None and want is None) or torch.allclose(got, want, atol=1e-5)


def test_third_order():
    x = leaf(4)
    y = compiled(lambda x: x.sin())(x).sum()
    for _ in range(2):
        y, = torch.autograd.grad(y, x, create_graph=True)
        y = y.sum()
    third, = torch.autograd.grad(y, x)
    assert torch.allclose(third, -x.cos())


def test_second_order_of_dropout_uses_the_same_mask():
    x, z = leaf(50), leaf(50)
    fn = lambda x: (F.dropout(x, 0.5, True) ** 3).sum()
    torch.manual_seed(5)
    want = second_order(fn, [z])
    torch.manual_seed(5)
    got = second_order(compiled(fn), [x])
    assert all(torch.allclose(a, b) for a, b in zip(got, want))


def test_module_simplified_with_arguments_that_are_one_tensor():
    mod = torch.fx.symbolic_trace(lambda a, b: (a * b,))
    x, y = leaf(3), leaf(3, seed=1)
    run = aot.module_simplified(mod, [x, y], aot.nop)
    assert torch.equal(run(x, y)[0], x * y)
    run(x, x)[0].sum().backward()
    assert torch.allclose(x.grad, 2 * x)


def test_write_behind_an_expand():
    def fn(x, z):
        y = x.expand(3, *x.shape)
        y[1, 1].mul_(5)
        return y * z
    check(fn, data(6), leaf(6))


# ---------------------------------------------------------------- function transforms, lifetimes

def test_batched_gradients():
    x = leaf(3)
    y = compiled(lambda x: x.sin() * x)(x)
    want = torch.diag(x.cos() * x + x.sin())
    got, = torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
    assert torch.allclose(got, want)
    assert torch.allclose(torch.autograd.functional.jacobian(compiled(lambda x: x.sin() * x), x, vectorize=True), want)


def test_function_transforms_run_the_program():
    fn = compiled(lambda x: x.sin() * 2)
    x = data(4, 3)
    want = torch.func.vmap(lambda x: x.sin() * 2)(x)
    assert torch.equal(torch.func.vmap(fn)(x), want)                # met first under a transform
    assert torch.equal(fn(x), x.sin() * 2) and torch.equal(torch.func.vmap(fn)(x), want)
    assert torch.allclose(torch.func.grad(lambda x: fn(x).sum())(x), x.cos() * 2)
    primal, tangent = torch.func.jvp(fn, (x,), (torch.ones_like(x),))
    assert torch.allclose(tangent, x.cos() * 2)
    with torch.autograd.forward_ad.dual_level():
        dual = fn(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.allclose(torch.autograd.forward_ad.unpack_dual(dual).tangent, x.cos() * 2)


def test_nothing_is_kept_alive():
    import weakref
    fn = compiled(lambda x: (x.sin() * x).sum())
    x = leaf(3)
    for backward in (False, True):
        middle = x * 2
        gone = weakref.ref(middle)
        loss = fn(middle)
        if backward:
            loss.backward()
            del middle
            assert gone() is None, "freed by the backward, though the loss lives"
        else:
            del middle, loss
            assert gone() is None


def test_written_input_makes_no_cycle():
    import weakref
    fn = compiled(lambda x, y: y.mul_(x) * 2)
    x, y = leaf(3), data(3)
    gone = weakref.ref(y)
    out = fn(x, y)
    del out, y
    assert gone() is None


def test_saved_tensors_can_be_freed_while_the_backward_runs():
    import weakref
    alive = []

    def boxed(gm, inputs):
        def run(args):
            first = weakref.ref(args[0])
            results = gm.forward(*args)
            args.clear()
            alive.append(first() is not None)
            return results
        run._boxed_call = True
        return run
    x = leaf(3)
    aot.function(lambda x: (x * 2).exp().sin(), aot.nop, boxed, partition_fn=aot.default_partition)(x).sum().backward()
    assert alive == [False]


def test_second_order_under_autocast():
    def fn(x, w):
        return (x @ w).sin().sum()
    results = []
    for f in (fn, compiled(fn)):
        x, w = leaf(4, 4), leaf(4, 4, seed=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = f(x, w)
        g, = torch.autograd.grad(y, x, create_graph=True)
        h, = torch.autograd.grad(g.sum(), w)
        results.append((y, g, h))
    for got, want in zip(*results):
        assert got.dtype == want.dtype and torch.allclose(got, want, rtol=0.05, atol=0.05)


def test_threads_compile_at_the_same_time():
    from concurrent.futures import ThreadPoolExecutor

    def work(k):
        x = leaf(4, seed=k)
        for n in range(3):
            fn = compiled(lambda x: (x.sin() * (k + n)).cumsum(0).exp() * x)
            want, = torch.autograd.grad(((x.sin() * (k + n)).cumsum(0).exp() * x).sum(), x)
            got, = torch.autograd.grad(fn(x).sum(), x)
            assert torch.allclose(got, want)
        return True
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
    counter = fs.testing.CompileCounter()
    fs.compile(lambda x: x.sin(), backend=counter)(leaf(3))
    assert counter.frame_count == 1     # the threads leave nothing behind


# ---------------------------------------------------------------- sizes inside of a backward that depend on data

@pytest.mark.parametrize("fn", [
    lambda x, v, i, m: x.index_fill(0, i, v),
    lambda x, v, i, m: torch.trace(x[:, :4]) * v,
    lambda x, v, i, m: torch.index_put(x, (m,), v),
    lambda x, v, i, m: x.clone().masked_scatter_(m, x * v),
], ids=["index_fill", "trace", "index_put", "masked_scatter"])
@pytest.mark.parametrize("partition", PARTITIONERS)
def test_a_backward_may_have_sizes_that_depend_on_data(fn, partition):
    x, v, index, mask = leaf(4, 6), leaf(seed=1), torch.tensor([2, 0, 2]), leaf(4, 6, seed=2).detach() > 0
    before = counters["aot"]["untraceable_backwards"] + counters["aot"]["untraceable_gradients"]
    check(fn, x, v, index, mask, partition=partition)

    def second(f):
        tangent = torch.ones_like(f(x, v, index, mask)).requires_grad_()
        first = torch.autograd.grad(f(x, v, index, mask), [x, v], tangent, create_graph=True, allow_unused=True)
        return torch.autograd.grad([g.sum() for g in first if g is not None], [tangent])
    assert all(map(same, second(compiled(fn, partition)), second(fn)))
    assert counters["aot"]["untraceable_backwards"] + counters["aot"]["untraceable_gradients"] == before


def test_second_order_through_an_overwritten_input():
    def fn(x):
        x.mul_(2)
        return x.cos()

    def orders(call):
        x = torch.arange(3.0).requires_grad_()
        first, = torch.autograd.grad(call(x * 1).sum(), x, create_graph=True)
        return first.detach(), torch.autograd.grad(first.sum(), x)[0]
    for ours, theirs in zip(orders(compiled(fn)), orders(fn)):
        torch.testing.assert_close(ours, theirs)


def test_views_of_a_base_without_history_do_not_require_grad():
    """The base is not returned itself, and other results of the same graph require grad."""
    def fn(x):
        with torch.no_grad():
            base = x.clone()
        flat = base.view(-1)
        return flat.unsqueeze(0), x * base.sum(), flat
    check(fn, leaf(2, 4))


def test_a_backward_that_cannot_run_is_an_error_when_it_is_asked_for():
    """Eager lets a saved tensor be overwritten as long as nobody asks for that gradient."""
    def fn(x, w):
        y = x.exp()
        bad = y * y
        y.mul_(2)
        return bad, w * 2
    texts, grads = [], []
    for f in (fn, compiled(fn)):
        x, w = leaf(3), leaf(3, seed=1)
        bad, good = f(x, w)
        good.sum().backward()
        with pytest.raises(RuntimeError) as error:
            bad.sum().backward()
        texts.append(str(error.value))
        grads.append(w.grad)
    assert texts[0] == texts[1] and torch.equal(*grads)


def test_second_gradient_through_the_real_part_of_a_conjugate():
    def curvature(fn):
        x = leaf(5)
        y = fn(x)
        gradient, = torch.autograd.grad(y.sum() * y[0], x, create_graph=True)
        return torch.autograd.grad(gradient.pow(2).sum(), x)[0]

    torch.testing.assert_close(curvature(compiled(torch.fft.hfft)), curvature(torch.fft.hfft))


def test_the_engine_does_not_run_what_lies_behind_a_detached_input():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise AssertionError("no history leads here")

    for backend in ("aot_eager", "native"):
        compiled = fs.compile(lambda x, w: (x.detach() * w).sin(), backend=backend)
        x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        out = compiled(Fails.apply(x), w)
        grad, = torch.autograd.grad(out.sum(), w, create_graph=True)
        grad.sum().backward()
        out = compiled(Fails.apply(x), w)
        out.sum().backward()
        assert x.grad is None and w.grad is not None
