"""Tensor subclasses that wrap tensors, as inputs, outputs and parameters of compiled programs: classes, values, gradients, writes are eager's."""
import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import firesteel as fs
from firesteel.autograd import aot

BACKENDS = ("eager", "aot_eager", "native")


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()


def two(*shape, requires_grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TwoTensor(*(torch.randn(shape, generator=generator) for _ in range(2))).requires_grad_(requires_grad)


def leaf(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, TwoTensor):
        assert ours.requires_grad == theirs.requires_grad
        same(ours.a, theirs.a)
        same(ours.b, theirs.b)
    elif isinstance(ours, (tuple, list)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs):
            same(mine, other)
    else:
        torch.testing.assert_close(ours, theirs)


def observed(fn, make, backward=True):
    """Results, inputs as they are afterwards, and their gradients."""
    leaves = make()
    out = fn(*[t * 1 if t.requires_grad else t for t in leaves])
    results = out if isinstance(out, tuple) else (out,)
    if backward:
        sum(r.sum() for r in results if r.requires_grad).backward()
    return [list(results), leaves, [t.grad for t in leaves]]


def made_inside(x, y):
    both = TwoTensor(x.sin(), y.cos())
    return both * 2, both.a + 1


def written(x):
    x.mul_(3)
    return x.cos()


class Part(torch.autograd.Function):
    """A part of a wrapper, as DTensor.to_local gives it: a view of it, with a history of its own."""

    @staticmethod
    def forward(ctx, both):
        return both.a.view_as(both.a)

    @staticmethod
    def backward(ctx, grad):
        return TwoTensor(grad * 1, grad * 1)


PROGRAMS = {
    "a part with a history": (lambda x: Part.apply(x), lambda: [two(3, requires_grad=True)]),
    "pointwise": (lambda x: x.sin() * 2, lambda: [two(3, 4, requires_grad=True)]),
    "with a plain one": (lambda x, w: F.relu(x @ w), lambda: [two(3, 4, requires_grad=True), leaf(4, 5)]),
    "two": (lambda x, y: torch.cat([x, y]).softmax(-1), lambda: [two(3, 4, requires_grad=True), two(2, 4, requires_grad=True, seed=2)]),
    "several results": (lambda x, w: (x.sum(), w * 2, x.exp()), lambda: [two(3, requires_grad=True), leaf(3)]),
    "reductions": (lambda x: x.sum(0) + x.mean(), lambda: [two(3, 4, requires_grad=True)]),
    "views inside": (lambda x: x.t().reshape(-1)[2:].sin(), lambda: [two(3, 4, requires_grad=True)]),
    "a part read": (lambda x: x.a * 2 + x.get_elem_a(), lambda: [two(3)]),
    "written": (written, lambda: [two(3, requires_grad=True)]),
    "written without gradient": (written, lambda: [two(3)]),
    "part of a tuple": (lambda x: (x * 2, x.b.clone()), lambda: [two(3, requires_grad=True)]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, backend):
    fn, make = PROGRAMS[name]
    backward = any(t.requires_grad for t in make())
    same(observed(fs.compile(fn, backend=backend, fullgraph=True), make, backward), observed(fn, make, backward))


@pytest.mark.parametrize("backend", BACKENDS)
def test_made_inside(backend):
    make = lambda: [torch.randn(3, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    same(observed(fs.compile(made_inside, backend=backend, fullgraph=True), make, False), observed(made_inside, make, False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameter(backend):
    def step(call, layer):
        layer.zero_grad()
        call(torch.ones(2, 4)).sum().backward()
        return [layer.weight.grad, layer.bias.grad]
    layer = torch.nn.Linear(4, 3)
    layer.weight = torch.nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach() * 2))
    compiled = fs.compile(layer, backend=backend, fullgraph=True)
    assert isinstance(layer.weight, torch.nn.Parameter)
    for _ in range(2):
        same(step(compiled, layer), step(layer, layer))
        with torch.no_grad():
            layer.weight -= 0.1 * layer.weight.grad


def test_other_sizes_and_kinds_compile_again():
    counter = fs.testing.CompileCounterWithBackend("aot_eager")
    compiled = fs.compile(lambda x: x * 2, backend=counter)
    for x in (two(3), two(3, seed=4), two(5), torch.ones(3), TwoTensor(two(3), two(3))):
        same(compiled(x), x * 2)
    assert counter.frame_count == 4


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x.t()[1:], lambda x: x.detach(), lambda x: x.unbind(1)[2], lambda x: x.view(4, 3) * 2],
                         ids=["t", "two", "detach", "item", "fresh"])
def test_views_that_come_back_are_eager_s(view):
    def run(fn):
        x = two(3, 4, requires_grad=True)
        y = x * 1
        out, more = fn(y)
        more.sum().backward(retain_graph=True)
        if out.requires_grad:
            out.sum().backward()
        return out, out._base is y, out._is_view(), out.requires_grad, x.grad
    program = lambda x: (view(x), x.sin())
    for ours, theirs in zip(run(fs.compile(program, backend="aot_eager", fullgraph=True)), run(program)):
        same(ours, theirs)
    assert fs.counters["aot"]["ok"] == fs.counters["aot"]["total"]


def test_views_of_written_inputs():
    def program(x):
        x.mul_(2)
        return x.t()
    mine, theirs = two(3, 4), two(3, 4)
    out = fs.compile(program, backend="aot_eager", fullgraph=True)(mine)
    same(out, program(theirs))
    same(mine, theirs)
    assert out._base is mine and fs.counters["aot"]["ok"] == 1


def test_a_returned_input_is_the_same_object():
    x = two(3)
    out, again = fs.compile(lambda x: (x.add_(1), x), backend="aot_eager", fullgraph=True)(x)
    assert out is x and again is x


def test_second_order():
    x = two(3, requires_grad=True)
    slope, = torch.autograd.grad(aot.function(lambda x: x ** 3, aot.nop)(x).sum(), x, create_graph=True)
    curve, = torch.autograd.grad(slope.sum(), x)
    same(curve, (6 * x).detach())


def test_a_tangent_of_another_kind():
    x, plain = two(3, requires_grad=True), torch.ones(3)
    ours, = torch.autograd.grad(aot.function(lambda x: x.sin(), aot.nop)(x), x, TwoTensor(plain, plain * 2))
    theirs, = torch.autograd.grad(x.sin(), x, TwoTensor(plain, plain * 2))
    same(ours, theirs)
    w = leaf(3)
    out = aot.function(lambda w, x: (w * 2, x * 2), aot.nop)(w, x)
    same(torch.autograd.grad(out[0], w, TwoTensor(plain, plain))[0], TwoTensor(plain * 2, plain * 2))


def test_parts_that_are_one_tensor():
    def twin():
        x = torch.ones(3)
        return TwoTensor(x, x)
    ours, theirs = twin(), twin()
    same(fs.compile(written, backend="aot_eager", fullgraph=True)(ours), written(theirs))
    same(ours, theirs)


class Loud(torch.Tensor):
    """Has a __torch_function__ of its own."""

    @classmethod
    def __torch_function__(cls, fn, types, args=(), kwargs=None):
        return super().__torch_function__(fn, types, args, kwargs)


def test_other_subclasses_run_as_they_are():
    x = torch.ones(3).as_subclass(Loud)
    assert type(fs.compile(lambda x: x.sin() * 2)(x)) is Loud


class Rounded(torch.Tensor):
    """Integers and a scale, with functions of torch in a table, as quantised weights are."""

    FUNCTIONS = {}

    def __new__(cls, whole, scale, kind):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)

    def __init__(self, whole, scale, kind):
        self.whole, self.scale, self.kind = whole, scale, kind

    @classmethod
    def of(cls, x, kind="rows"):
        scale = x.abs().amax(1, keepdim=True) / 127 if kind == "rows" else x.abs().amax().reshape(1, 1) / 127
        return cls((x / scale).round().to(torch.int8), scale, kind)

    def plain(self):
        return self.whole.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self):
        return ["whole", "scale"], self.kind

    @classmethod
    def __tensor_unflatten__(cls, parts, kind, size, strides):
        return cls(parts["whole"], parts["scale"], kind)

    @classmethod
    def __torch_function__(cls, fn, types, args=(), kwargs=None):
        if fn in cls.FUNCTIONS:
            return cls.FUNCTIONS[fn](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return fn(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, op, types, args, kwargs=None):
        if op is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale, args[0].kind)
        if op is torch.ops.aten.copy_.default:
            new = cls.of(args[1], args[0].kind)
            args[0].whole.copy_(new.whole)
            args[0].scale.copy_(new.scale)
            return args[0]
        return op(*pytree.tree_map_only(Rounded, Rounded.plain, args), **(kwargs or {}))


Rounded.FUNCTIONS[F.linear] = lambda x, weight, bias=None: (x @ weight.whole.to(x.dtype).t()) * weight.scale.t() * (1 if weight.kind == "rows" else 1.0) + (0 if bias is None else bias)


@pytest.mark.parametrize("backend", BACKENDS)
def test_functions_of_a_wrapper(backend):
    layers = [torch.nn.Linear(4, 3) for _ in range(3)]
    for layer, kind in zip(layers, ("rows", "rows", "whole")):
        layer.weight = torch.nn.Parameter(Rounded.of(layer.weight.detach(), kind), requires_grad=False)
    compiled, x = fs.compile(lambda layer, x: layer(x).relu(), backend=backend, fullgraph=True), leaf(2, 4)
    for layer in layers:
        found, expected = compiled(layer, x), layer(x).relu()
        same(found, expected)
        same(torch.autograd.grad(found.sum(), [x, layer.bias]), torch.autograd.grad(expected.sum(), [x, layer.bias]))
    layers[0].weight = torch.nn.Parameter(Rounded.of(torch.randn(3, 4)), requires_grad=False)
    same(compiled(layers[0], x), layers[0](x).relu())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_of_rounded_numbers(backend):
    def step(state, grad):
        mean = (state + 0.0).lerp(grad, 0.1)
        state.copy_(mean)
        return mean * 2
    states = [Rounded.of(torch.ones(3, 4) * torch.arange(1, 4).unsqueeze(1)) for _ in range(2)]
    compiled = fs.compile(step, backend=backend, fullgraph=True)
    for seed in range(3):
        grad = leaf(3, 4, seed=seed).detach()
        same(compiled(states[0], grad), step(states[1], grad))
        same((states[0].whole, states[0].scale), (states[1].whole, states[1].scale))


def test_a_joint_graph_over_parts_has_a_signature():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(two(2, 3))
            self.register_buffer("seen", two(3))

        def forward(self, x, y):
            self.seen.add_(x.detach())
            return (self.weight * x).sin(), y.sum()
    gm, signature = aot.export_joint(Scaled(), [two(3, requires_grad=True), leaf(2)])
    assert str(signature).split("\n") == [
        "parameter  primals_0_0    weight.a  gradient mul_6",
        "parameter  primals_0_1    weight.b  gradient mul_7",
        "buffer     primals_1_0    seen.a  becomes add",
        "buffer     primals_1_1    seen.b  becomes add_1",
        "input      primals_2_0      gradient view",
        "input      primals_2_1      gradient view_1",
        "input      primals_3        gradient expand",
        "tangent    tangents_0_0   of sin",
        "tangent    tangents_0_1   of sin_1",
        "tangent    tangents_1     of sum_1",
        "output     TwoTensor(a=sin, b=sin_1)",
        "output     sum_1"]
    inputs = [torch.randn(p.meta["val"].shape) for p in gm.graph.nodes if p.op == "placeholder"]
    assert torch.equal(gm(*inputs)[2], (inputs[0] * inputs[4]).sin())


class Outside(torch.Tensor):
    """Its data is in another tensor, which torch cannot ask it for."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, strides=data.stride())

    def __init__(self, data):
        self.inside = data

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(Outside, lambda t: t.inside, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, op(*args, **kwargs))


class Named(torch.Tensor):
    pass


TANGENTS = {"a dispatch of its own": Outside, "a plain subclass": lambda t: t.as_subclass(Named), "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
            "zeros without memory": lambda t: torch._efficientzerotensor(t.shape), "expanded": lambda t: t[:1].expand(3, 3)}


@pytest.mark.parametrize("create_graph", (False, True), ids=("first order", "second order"))
@pytest.mark.parametrize("name", TANGENTS)
def test_tangents_of_another_class(name, create_graph):
    def gradients(fn):
        torch.manual_seed(0)
        x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
        return torch.autograd.grad(fn(x, w), (x, w), TANGENTS[name](torch.randn(3, 3)), create_graph=create_graph)
    program = lambda x, w: torch.nn.functional.layer_norm(x @ w, (3,)).relu() + w.sin()
    for want, got in zip(gradients(program), gradients(fs.compile(program))):
        assert type(want) is type(got)
        want, got = (getattr(t, "inside", t).detach().as_subclass(torch.Tensor) for t in (want, got))
        torch.testing.assert_close(got, want)
