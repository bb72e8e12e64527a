"""What is computed of frozen inputs alone leaves the graph: which operators stay, what is kept, and that both together compute what the graph did."""
import pytest
import torch
import torch.nn.functional as F

from firesteel import backends
from firesteel.autograd.frozen_call import FrozenCall
from firesteel.autograd.joint import trace_program
from firesteel.graph.decomp import core_decompositions
from firesteel.graph.frozen import freeze
from firesteel.graph.passes import clean
from firesteel.graph.verify import verify

aten, mkldnn = torch.ops.aten, torch.ops.mkldnn
onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")


def frozen(fn, *inputs, rewrite=False):
    """The graph of `fn` with all inputs but the first frozen: its operators, what is kept, and that values are those of before."""
    with torch.no_grad():
        joint = trace_program(lambda *given: [fn(*given)], list(inputs), decompositions=core_decompositions())
        clean(joint.gm)
        if rewrite:
            backends.rewrite(joint.gm)
        kept = freeze(joint.gm, range(1, len(inputs)))
        verify(joint.gm, "aten")
        wanted = fn(*inputs)
        if kept is None:
            return operators(joint.gm), []
        call = FrozenCall(joint.gm.forward, kept.once, kept.places, kept.layouts)
        for _ in range(2):
            torch.testing.assert_close(call(*inputs)[0], wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
        return operators(joint.gm), call.last.tensors


def operators(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


W, B, G = torch.randn(5, 4), torch.randn(5), torch.rand(5) + 0.5
CONV = torch.randn(6, 4, 3, 3)

# name -> (program, frozen inputs, operators that stay)
FOLDED = {
    "scale behind": (lambda x, w, g: (x @ w.t()) * g, (W, G), [aten.mm.default]),
    "shift behind": (lambda x, w, b: x @ w.t() + b, (W, B), [aten.addmm.default]),
    "a number": (lambda x, w: (x @ w.t()) * 0.5 - 2, (W,), [aten.addmm.default]),
    "taken from": (lambda x, w, b, g: b - F.linear(x, w, g) / g, (W, B, G), [aten.addmm.default]),
    "views between": (lambda x, w, g: F.linear(x.view(3, 2, 4), w) * g, (W, G), [aten.mm.default]),
    "weights made": (lambda x, w, g: x @ (w * g[:, None] / w.norm()).t(), (W, G), [aten.mm.default]),
}
KEPT_APART = {
    "read twice": (lambda x, w, g: (lambda y: y * g + y.sin())(x @ w.t()), (W, G), 3),
    "not of channels": (lambda x, w, g: (x @ w.t()) * g, (W, torch.rand(6, 5)), 1),
    "of another dtype": (lambda x, w, g: (x @ w.t()) * g, (W, torch.rand(5, dtype=torch.float64)), 1),
    "widened": (lambda x, w, g: (x @ w.t())[:, None] + g[:, None], (W, G), 2),
}


@pytest.mark.parametrize("name", FOLDED)
def test_scales_and_shifts_are_folded(name):
    fn, given, stay = FOLDED[name]
    found, _ = frozen(fn, torch.randn(6, 4), *given)
    assert [op for op in found if op not in (aten.t.default, aten.view.default)] == stay


@pytest.mark.parametrize("name", KEPT_APART)
def test_what_is_not_for_each_channel_stays(name):
    fn, given, least = KEPT_APART[name]
    found, _ = frozen(fn, torch.randn(6, 4), *given)
    assert len([op for op in found if op not in (aten.t.default, aten.mm.default)]) >= least


@pytest.mark.parametrize("groups,transposed", [(1, False), (2, False), (1, True), (2, True)])
def test_convolutions(groups, transposed):
    weight = torch.randn(4, 6 // groups, 3, 3) if transposed else torch.randn(6, 4 // groups, 3, 3)
    convolve = F.conv_transpose2d if transposed else F.conv2d
    found, _ = frozen(lambda x, w, b, g: convolve(x, w, b, groups=groups) * g.view(1, -1, 1, 1) + 1, torch.randn(2, 4, 5, 5), weight,
                      torch.randn(6), torch.rand(6))
    assert (aten.mul.Tensor in found) == (groups == 2 and transposed)


def test_batch_norm():
    found, kept = frozen(lambda x, w, m, v, g, b: F.batch_norm(F.conv2d(x, w), m, v, g, b, False, 0.1, 1e-5), torch.randn(2, 4, 5, 5), CONV,
                         torch.randn(6), torch.rand(6), torch.rand(6), torch.randn(6))
    assert found == [aten.convolution.default] and [tuple(t.shape) for t in kept] in ([(6, 4, 3, 3), (6,)], [(6,), (6, 4, 3, 3)])


@onednn
def test_weights_of_channels_last_convolutions_are_reordered():
    def run(x, w, v):
        return F.leaky_relu(F.conv2d(F.hardswish(F.conv2d(x, w)), v).relu(), 0.1)
    found, kept = frozen(run, torch.randn(2, 4, 8, 8), CONV, torch.randn(6, 6, 1, 1), rewrite=True)
    assert found.count(mkldnn._convolution_pointwise.default) == 2 and aten.hardswish.default not in found
    assert aten.relu.default in found       # the library's gives 0 for NaN
    assert [value.layout for value in kept] == [torch._mkldnn] * 2


@onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [F.hardswish, lambda x: F.leaky_relu(x, 0.1), F.hardsigmoid, F.relu, F.relu6])
def test_activations_of_the_library_are_eagers(activation, dtype):
    """Also of what is no number."""
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3.0, -3.0, 7.0, 1e30, -1e30, 0.5])
    x, w = torch.zeros(1, 16, 2, 16, dtype=dtype), torch.zeros(16, 16, 1, 1, dtype=dtype)
    x[0, 0, 0, :len(values)], w[0, 0] = values, 1
    found, kept = frozen(lambda x, w, v: activation(F.conv2d(F.conv2d(x, w), v)), x, w, w.clone(), rewrite=True)
    assert mkldnn._convolution_pointwise.default in found


@onednn
def test_only_large_products_of_floats_are_reordered():
    large, small = torch.randn(512, 256), torch.randn(16, 256)
    assert mkldnn._linear_pointwise.default in frozen(lambda x, w: x @ w.t(), torch.randn(64, 256), large)[0]
    assert mkldnn._linear_pointwise.default not in frozen(lambda x, w: x @ w.t(), torch.randn(64, 256), small)[0]


def test_products_one_behind_the_other():
    found, _ = frozen(lambda x, w, g, v: ((x @ w.t()) * g) @ v * 2, torch.randn(6, 4), W, G, torch.randn(5, 3))
    assert [op for op in found if op is not aten.t.default] == [aten.mm.default, aten.mm.default]


def test_views_of_parameters_and_draws_are_not_kept():
    assert frozen(lambda x, w: x @ w.t().view(4, 5), torch.randn(6, 4), W)[1] == []
    torch.manual_seed(0)
    found, kept = frozen(lambda x, w: x + w.sin() * 0, torch.randn(5, 4), W)
    assert len(kept) == 1


def test_parts_at_an_offset_get_memory_of_their_own():
    def run(x, w):
        first, second = (w * 2).chunk(2)
        return x * first + second.t().exp().t()
    _, kept = frozen(run, torch.randn(2, 4), torch.randn(4, 4))
    assert all(value.storage_offset() == 0 for value in kept)


def test_results_are_never_kept():
    found, kept = frozen(lambda x, w: (w * 2)[1:], torch.randn(2), W)
    assert kept == [] and aten.mul.Tensor in found
