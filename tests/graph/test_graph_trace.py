"""A traced graph computes what eager computes: forward, gradients, written inputs; with decompositions and without."""
import pytest
import torch
import torch.nn.functional as F
from graph_cases import CASES
from graph_compare import fresh_copy, run_with_grads
from tracing import trace

from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.decomp import DECOMPOSITIONS, core_decompositions
from firesteel.graph.functional import PUT_BACK
from firesteel.graph.passes import clean
from firesteel.graph.record import RECORDERS, SOLID
from firesteel.graph.rules.base import RULES
from firesteel.graph.schemas import facts
from firesteel.graph.spec import spec_of
from firesteel.graph.trace import interpret
from firesteel.graph.verify import verify
from firesteel.ops.normalise import refuse_rms_norm

aten = torch.ops.aten
TABLES = {"plain": None, "core": core_decompositions(), "all": DECOMPOSITIONS}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2}


def wrapped(tensors):
    world = AbstractWorld()
    return [world.wrap(t, f"x{i}", None) for i, t in enumerate(tensors)]


def check_traced(fn, tensors, decompositions=None, passes=True):
    """Traces fn and compares results, gradients and written inputs with eager."""
    traced = trace(fn, wrapped(tensors), decompositions=decompositions)
    verify(traced.gm, "joint")
    if passes:
        clean(traced.gm)
        verify(traced.gm, "joint")
    reals = [fresh_copy(t) for t in tensors]
    torch.manual_seed(0)
    found = traced.gm(*[fresh_copy(t).detach() for t in tensors])
    torch.manual_seed(0)
    expected = fn(*reals)
    written = [reals[m.input] for m in traced.mutations if m.value is not None]
    assert len(found) == len(expected) + len(written)
    coarsest = max((TOLERANCE.get(t.dtype, 0) for t in tensors), default=0)
    for got, want in zip(found, [*expected, *written]):
        tolerance = max(TOLERANCE.get(want.dtype, 0), coarsest)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert got.stride() == want.stride(), f"strides {got.stride()}, eager {want.stride()}, of {tuple(want.shape)}"
    for got, result in zip(found, traced.results):
        assert spec_of(got) == result.tensor.spec
    return traced


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", CASES)
def test_trace_agrees_with_eager(name, table):
    function, tensors = CASES[name]
    check_traced(lambda *ts: run_with_grads(function, ts), tensors, TABLES[table])


def test_core_leaves_nothing_that_has_a_decomposition():
    by_library = {aten.mm.default, aten.addmm.default, aten.mv.default, aten.dot.default, aten.convolution.default, aten.convolution_backward.default}
    for function, tensors in CASES.values():
        traced = trace(lambda *ts, function=function: run_with_grads(function, ts), wrapped(tensors), decompositions=core_decompositions())
        left = {n.target for n in traced.gm.graph.nodes if n.op == "call_function"} & set(core_decompositions())
        assert left <= by_library | {aten.reflection_pad1d.default, aten._log_softmax.default}, left


# ---------------------------------------------------------------- writing in place

def x(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _slices(a):
    b = a * 2
    b[1].add_(1)
    b[:, 1:3].mul_(3)
    b.view(-1)[::5] = 7
    b.t()[0].copy_(torch.arange(4.0))
    b.diagonal().zero_()
    return [b, b.t(), b[1], b.view(2, -1)]


def _splits(a):
    b = a.clone()
    first, second = b.split(2, 0)
    first.add_(second)
    for row in b.unbind(1):
        row.mul_(2)
    return [b, first, second]


def _strided(a):
    b = a.clone()
    b.as_strided((2, 2), (1, 6), 3).fill_(5)
    c = b.transpose(0, 1).as_strided((3,), (2,), 1)
    c.neg_()
    return [b, c]


def _aliases(a):
    b = a + 1
    c = b.detach()
    d = b.view(-1)
    c.mul_(2)
    d.sub_(1)
    b.unsqueeze(0).squeeze(0).exp_()
    return [b, c, d]


def _write_inputs(a, b):
    a.add_(1)
    b[0].copy_(a[1])
    c = a.t()
    c.mul_(b.sum())
    return [c, a + b]


def _inplace_metadata(a):
    b = a * 1
    b.t_()
    b.unsqueeze_(0)
    b.squeeze_(0)
    b.transpose_(0, 1)
    b.add_(1)
    return [b, b.t()]


def _promotion(a):
    b = a.to(torch.bfloat16)
    b.add_(a)
    c = torch.ones(4, 6, dtype=torch.float64)
    c.mul_(a).sub_(3)
    i = torch.arange(6)
    i.add_(2).mul_(i)
    return [b, c, i]


def _out(a):
    b = torch.empty(4, 6)
    torch.add(a, 1, out=b)
    c = torch.zeros(8, 6)
    torch.mul(a, 2, out=c[2:6])
    return [b, c, torch.sum(a, 0, out=torch.empty(6))]


def _strides_kept(a):
    b = torch.zeros(6, 4).t()
    b.copy_(a)
    b.add_(a)
    c = torch.zeros(4, 6)
    c.copy_(a.t().contiguous().t())
    return [b, b.t().view(-1), c.view(-1)]


def _literals(a):
    c = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    c.add_(1)
    return [a + c, a * torch.tensor(2.5), torch.full((3,), 2), torch.arange(5), c]


def _random(a):
    return [F.dropout(a, 0.5), torch.rand(3), torch.randn_like(a), torch.empty(5).uniform_(1, 2), torch.empty(4).normal_(), torch.randperm(5)]


def _index_writes(a):
    b = a.clone()
    b[torch.tensor([0, 2])] = 3
    b[b > 1] = 0
    b.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 6))
    b.scatter_(1, torch.zeros(4, 1, dtype=torch.long), 9.0)
    b.masked_fill_(b < -1, 4)
    return [b]


def _foreach(a):
    parts = [a * 1, a * 2]
    torch._foreach_add_(parts, 1.0)
    torch._foreach_mul_(parts, [a, a + 1])
    torch._foreach_addcmul_(parts, parts, [a, a], 0.5)
    torch._foreach_addcdiv_(parts, [a, a], [p.abs() + 1 for p in parts], [0.5, 2.0])
    torch._foreach_lerp_(parts, [a, a], 0.3)
    torch._foreach_maximum_(parts, -1.0)
    torch._foreach_pow_(parts, 2)
    zeros = [torch.ones(3), torch.ones(2)]
    torch._foreach_zero_(zeros)
    return [*parts, *zeros, *torch._foreach_sqrt([p.abs() for p in parts]), *torch._foreach_norm(parts), *torch._foreach_pow(2.0, parts)]


def _inplace_activations(a):
    b = F.silu(a * 1, inplace=True)
    return [F.hardtanh_(b), (a * 1).addcmul_(a, a), (a * 1).lerp_(b, 0.7), torch.rsub(a, 2)]


def _twins(a):
    """In-place operators whose functional twins have another name, or take their arguments in another order."""
    i = (a * 0).long() + 3
    i <<= 2
    i >>= i - 10
    return [i, (a.abs() + 1).polygamma_(1), F.rrelu(a * 1, training=True, inplace=True), F.rrelu(a * 1, inplace=True)]


def _optimizer(a):
    """Adam's step over lists, as torch.optim writes it."""
    step, mean, square, grad = torch.tensor(3.0), [a * 0.1], [a * a], [a + 1]
    torch._foreach_lerp_(mean, grad, 0.1)
    torch._foreach_mul_(square, 0.99)
    torch._foreach_addcmul_(square, grad, grad, 0.01)
    root = torch._foreach_sqrt(square)
    torch._foreach_div_(root, (1 - 0.99 ** step).sqrt())
    torch._foreach_add_(root, 1e-8)
    new = [a.clone()]
    torch._foreach_addcdiv_(new, mean, root, -0.01)
    return [*new, *mean, *square]


def _decomposed(a):
    b = F.group_norm(a.cumsum(0), 1)
    b.view(-1)[0] = 1.5
    return [b]


WRITES = {f.__name__.strip("_"): f for f in (_slices, _splits, _strided, _aliases, _inplace_metadata, _promotion, _out, _strides_kept, _literals,
                                               _random, _index_writes, _foreach, _inplace_activations, _twins, _optimizer, _decomposed)}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", WRITES)
def test_writes_become_values(name, table):
    traced = check_traced(WRITES[name], [x(4, 6)], TABLES[table])
    if table == "all":
        assert not [n for n in traced.gm.graph.nodes if n.op == "call_function" and n.target in DECOMPOSITIONS]


def test_every_view_can_be_written_through():
    """What a view operator with a rule is recorded as: itself, the single views that it gives a list of, or what its recorder makes of it."""
    views = {op for op in RULES if isinstance(op, torch._ops.OpOverload) and facts(op).kind == "view" and not facts(op).returns_list}
    composite = {aten.positive.default}         # C++ returns its argument before anything is recorded
    assert views - composite - set(SOLID) - set(RECORDERS) <= set(PUT_BACK)


def test_written_inputs_are_reported():
    traced = check_traced(_write_inputs, [x(4, 4), x(4, 4).t()])
    assert [(m.input, m.metadata) for m in traced.mutations] == [(0, False), (1, False)]


def test_a_changed_shape_of_an_input_is_reported():
    traced = trace(lambda a: [a.t_() * 1], wrapped([x(4, 6)]))
    (mutation,) = traced.mutations
    assert mutation.metadata and mutation.value is None and mutation.spec.shape == (6, 4)


def test_results_tell_whose_storage_they_show():
    traced = trace(lambda a, b: [a[1], a * 2, b, a.detach()], wrapped([x(4, 6), x(3)]))
    assert [r.source for r in traced.results] == [0, None, 1, 0]
    assert [s.op for s in traced.results[0].steps] == [aten.select.int]


def test_autograd_through_writes():
    def fn(a, w):
        y = a * w
        y[1].mul_(w[0])
        v = y.view(-1)
        v[3:5].mul_(2)
        y[:, 0] = w.sum()
        loss = (y * y).sum()
        return [loss, *torch.autograd.grad(loss, [w])]
    check_traced(fn, [x(4, 6), x(6).requires_grad_()])


def test_backward_replays_views_instead_of_strides():
    """With eager's default, the gradient of a write through a view is made with as_strided, which no kernel can fuse."""
    def fn(a):
        y = a * 2
        y[1].mul_(3)
        return list(torch.autograd.grad(y.sum(), [a]))
    traced = check_traced(fn, [x(4, 6).requires_grad_()])
    assert not traced.gm.graph.find_nodes(op="call_function", target=aten.as_strided.default)


def test_second_derivatives_in_one_graph():
    def fn(a):
        (g,) = torch.autograd.grad(torch.tanh(a).pow(3).sum(), [a], create_graph=True)
        return [g, *torch.autograd.grad((g * g).sum(), [a])]
    check_traced(fn, [x(4, 6).requires_grad_()])


def test_no_graph_writes_in_place():
    for fn in WRITES.values():
        traced = trace(fn, wrapped([x(4, 6)]))
        assert not [n for n in traced.gm.graph.nodes if n.op == "call_function" and getattr(getattr(n.target, "_schema", None), "is_mutable", False)]


# ---------------------------------------------------------------- where nodes come from

def test_nodes_carry_the_meta_of_the_torch_level_node():
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    b = graph.call_function(torch.tanh, (a,))
    c = graph.call_method("sum", (b,))
    graph.output((c,))
    b.meta.update(stack_trace="line of tanh", nn_module_stack={"m": ("m", object)})
    c.meta.update(stack_trace="line of sum")
    gm = torch.fx.GraphModule({}, graph)

    def joint(x):
        (y,) = interpret(gm, x)
        return [y, *torch.autograd.grad(y, [x])]
    traced = trace(joint, wrapped([x(4, 6).requires_grad_()]))
    by_target = {n.target: n for n in traced.gm.graph.nodes if n.op == "call_function"}
    assert by_target[aten.tanh.default].meta["stack_trace"] == "line of tanh"
    assert by_target[aten.sum.default].meta["stack_trace"] == "line of sum"
    backward = by_target[aten.tanh_backward.default]
    assert backward.meta["phase"] == "backward" and backward.meta["stack_trace"] == "line of tanh" and "m" in backward.meta["nn_module_stack"]
    assert backward.meta["seq_nr"] == by_target[aten.tanh.default].meta["seq_nr"]
    assert by_target[aten.tanh.default].meta["phase"] == "forward"


def on_a_gpu(tensor):
    """Abstract: no GPU is needed."""
    return AbstractWorld().make(spec_of(tensor)._replace(device=torch.device("cuda")))


def test_batch_norm_keeps_strides_on_a_gpu():
    """Eager's CUDA kernel does; the CPU's and cuDNN's have a memory format."""
    image, weight = torch.randn(3, 5, 4, 2).permute(3, 2, 1, 0), torch.rand(4)
    for table in (None, core_decompositions()):
        for make, strides in ((on_a_gpu, image.stride()), (lambda t: AbstractWorld().wrap(t, "x", None), (60, 15, 3, 1))):
            traced = trace(lambda a, w: torch.native_batch_norm(a, w, None, None, None, True, 0.1, 1e-5), [make(image), make(weight)], decompositions=table)
            assert traced.gm.graph.output_node().args[0][0].meta["val"].stride() == strides


def test_rms_norm_as_the_kernel_of_a_gpu():
    """Row-major, and the default eps is that of float32 for smaller types."""
    small = torch.full((8, 2), 1e-3, dtype=torch.bfloat16).t()
    out, _ = DECOMPOSITIONS[torch.ops.aten._fused_rms_norm.default](small, [8], None, None)
    assert out.is_contiguous() and out.dtype is torch.bfloat16
    torch.testing.assert_close(out, torch.full((2, 8), (1 + 0.119) ** -0.5, dtype=torch.bfloat16), rtol=0.02, atol=0)


def test_sizes_of_rms_norm_on_a_gpu_may_be_bits_of_symbols():
    """torch compares symbolic sizes with the input's, then hands them to an operator of plain ints."""
    x = spec_of(torch.randn(3, 8))
    refuse_rms_norm(x, [-2 ** 63 + 4096], None, None)
    refuse_rms_norm(x, [8], None, None)
    for wrong in (7, -1):
        with pytest.raises(RuntimeError, match="normalized_shape"):
            refuse_rms_norm(x, [wrong], None, None)
