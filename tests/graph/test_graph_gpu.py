"""The rules and the tracer against eager on a GPU, where eager has other kernels: cuDNN, flash and efficient attention."""
import pytest
import torch
import torch.nn.functional as F
from graph_cases import CASES
from graph_compare import RuleChecker, run_with_grads
from torch.nn.attention import SDPBackend, sdpa_kernel
from tracing import trace

from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.decomp import core_decompositions
from firesteel.graph.verify import verify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-9, torch.bfloat16: 5e-2, torch.float16: 5e-3}


GPU_CASES = [name for name in CASES if name != "layer_norm mixed"]       # eager's GPU kernel refuses mixed dtypes


def on_gpu(tensor):
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda").copy_(tensor.detach())
    return made.requires_grad_(tensor.requires_grad)


def with_grads(function):
    """run_with_grads with its weights on the GPU."""
    def run(*tensors):
        with torch.device("cuda"):
            return run_with_grads(function, tensors)
    return run


def check_rules(function, tensors):
    checker = RuleChecker()
    with checker:
        with_grads(function)(*tensors)
    assert not checker.wrong, "\n".join(checker.wrong)


def check_traced(function, tensors, decompositions):
    run = with_grads(function)
    world = AbstractWorld()
    traced = trace(run, [world.wrap(t, "x", None) for t in tensors], decompositions=decompositions)
    verify(traced.gm, "joint")
    torch.manual_seed(0)
    found = traced.gm(*[on_gpu(t).detach() for t in tensors])
    torch.manual_seed(0)
    expected = run(*[on_gpu(t) for t in tensors])
    coarsest = max(TOLERANCE.get(t.dtype, 0) for t in tensors)
    for got, want in zip(found, expected):
        tolerance = max(TOLERANCE.get(want.dtype, 0), coarsest)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", GPU_CASES)
def test_rules_on_a_gpu(name):
    function, tensors = CASES[name]
    check_rules(function, [on_gpu(t) for t in tensors])


@pytest.mark.parametrize("table", ["plain", "core"])
@pytest.mark.parametrize("name", GPU_CASES)
def test_trace_on_a_gpu(name, table):
    function, tensors = CASES[name]
    check_traced(function, [on_gpu(t) for t in tensors], core_decompositions() if table == "core" else None)


PERMUTED = {
    "batch_norm": lambda a, w: F.batch_norm(a, None, None, w, training=True), "batch_norm plain": lambda a, w: F.batch_norm(a, None, None, training=True),
    "batch_norm of statistics": lambda a, w: F.batch_norm(a, w.detach(), w.detach() ** 2, w), "rms_norm": lambda a, w: F.rms_norm(a, a.shape[-1:]),
    "batch_norm by cuDNN": lambda a, w: F.batch_norm(a, None, None, w, w, training=True),
    "nearest": lambda a, w: F.interpolate(a, size=(7, 3)) if a.dim() == 4 else a * 1, "hardswish": lambda a, w: F.hardswish(a),
}


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (6, 4, 3, 5)])
@pytest.mark.parametrize("name", PERMUTED)
def test_permuted_inputs_on_a_gpu(name, shape):
    """Results lie in memory as eager's kernels lay them out, as operators and decomposed."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(shape[::-1], generator=generator).permute(*range(len(shape))[::-1]).requires_grad_()
    tensors = [on_gpu(a), torch.rand(4, generator=generator).cuda().requires_grad_()]
    check_rules(PERMUTED[name], tensors)
    world = AbstractWorld()
    traced = trace(PERMUTED[name], [world.wrap(t, "x", None) for t in tensors], decompositions=core_decompositions())
    assert traced.gm(*tensors)[0].stride() == PERMUTED[name](*tensors).stride()


def test_default_eps_on_a_gpu():
    small = torch.full((2, 8), 1e-3, device="cuda", dtype=torch.bfloat16)
    check_traced(lambda a: F.rms_norm(a, (8,)), [small], core_decompositions())


def heads(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16).requires_grad_()


ATTENTION = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "dropout": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3),
    "transposed": lambda q, k, v: F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True),
}


@pytest.mark.parametrize("what", ["rules", "trace"])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_on_a_gpu(kind, backend, what):
    tensors = [heads(2, 4, 64, 32, seed=i) for i in range(3)]
    with sdpa_kernel(getattr(SDPBackend, backend)):
        if what == "rules":
            check_rules(ATTENTION[kind], tensors)
        else:
            check_traced(ATTENTION[kind], tensors, None)


def test_attention_with_a_mask_on_a_gpu():
    mask = heads(2, 4, 64, 64).detach()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        check_rules(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), [heads(2, 4, 64, 32, seed=i) for i in range(3)])


@pytest.mark.parametrize("table", ["plain", "core"])
def test_random_numbers_on_a_gpu(table):
    def fn(a):
        return F.dropout(a, 0.4), torch.rand_like(a), torch.randn(5, device="cuda")
    check_traced(fn, [heads(8, 16)], core_decompositions() if table == "core" else None)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 5)

    def forward(self, a):
        return self.head(F.max_pool2d(F.relu(self.norm(self.conv(a))), 2).mean((2, 3)))


@pytest.mark.parametrize("table", ["plain", "core"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_small_net_on_a_gpu(layout, dtype, table):
    net = Net().to("cuda", dtype, memory_format=layout)
    names, tensors = zip(*[*net.named_parameters(), *net.named_buffers()])
    image = torch.randn(4, 3, 8, 8).to("cuda", dtype, memory_format=layout)

    def fn(a, *state):
        return torch.func.functional_call(net, dict(zip(names, state)), (a,))
    check_rules(fn, [image, *[on_gpu(t) for t in tensors]])
    check_traced(fn, [image, *tensors], core_decompositions() if table == "core" else None)


def test_autocast_on_a_gpu():
    def fn(a, w):
        with torch.autocast("cuda", torch.bfloat16):
            return F.softmax(a @ w, -1)
    check_traced(fn, [torch.randn(4, 8, device="cuda", requires_grad=True), torch.randn(8, 8, device="cuda", requires_grad=True)], None)
