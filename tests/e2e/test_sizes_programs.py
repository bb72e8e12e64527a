"""One graph for ten sizes: what programs do with sizes, compiled once with dynamic=True, against eager on each size, gradients too."""
import math
import pathlib
import sys

import pytest
import torch
import torch.nn.functional as F

import firesteel as fs

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

import programs  # noqa: E402

R = torch.randn


def ints(*shape, high=20):
    return torch.randint(0, high, shape)


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()
    torch.manual_seed(0)
    with fs.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def padded_to_stride(x, kernel=5, stride=2):
    size = x.shape[-1]
    missing = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
    return F.pad(x, [missing // 2, missing - missing // 2]) if missing > 0 else x


def second_half_written(x):
    n = x.size(0)
    return torch.slice_scatter(torch.ones(8, n), torch.zeros(8, n // 2), 1, n // 2, 2 * (n // 2))


def upsampled(x):
    rows = math.ceil((2 * ((x.shape[1] - 1) // 8) + 2) / 1)
    return F.interpolate(torch.zeros(x.shape[0], 4, rows, x.shape[2]), scale_factor=2, mode="nearest")


def longest(lengths):
    return torch.arange(0, lengths.max()).type_as(lengths).repeat(lengths.numel(), 1).lt(lengths.unsqueeze(1))


def kept(x):
    rows = (x > 0).nonzero().squeeze(-1)
    return x[rows] * 2


IMAGES = lambda n: (R(n, 3, n + 4, n + 5),)
ROWS = lambda n: (R(n, 4),)
LINE = lambda n: (R(n),)
W2, W1 = R(4, 3, 3, 3), R(4, 3, 3)
# name: (program, inputs for a size)
PROGRAMS = {
    "constants of a size": (lambda x: (torch.full(x.shape, -1.0) + 2) * x.shape[0] * x, ROWS),
    "largest length": (longest, lambda n: (ints(n, high=30) + 1,)),
    "padded to a stride": (padded_to_stride, lambda n: (R(2, 3, n + 3),)),
    "second half written": (second_half_written, LINE),
    "a bound that changes its sign": (lambda x, y: x[:abs(y.shape[0] - y.shape[1])] * (y.shape[0] - y.shape[1]), lambda n: (R(32, 3), R(n, 13 - n))),
    "stride": (lambda x: x * (x + 1).stride(0), lambda n: (R(n, n + 1),)),
    "as_strided": (lambda x: x.detach().as_strided((x.shape[0] - 1, 2), (1, 1)) * 2, LINE),
    "expand": (lambda x, y: x.expand(y.shape[0], -1) * y, lambda n: (R(1, 3), R(n, 3))),
    "last row": (lambda x: x[x.shape[0] - 1] * 2, ROWS),
    "second half": (lambda x: x[x.shape[0] // 2:, :-1] * 2, ROWS),
    "narrow": (lambda x: x.narrow(0, 1, x.shape[0] - 1) * 2, ROWS),
    "split": (lambda x: [t * 2 for t in torch.split(x, x.shape[0] // 2 + 1)], lambda n: (R(n + 4),)),
    "chunk": (lambda x: [t * 2 for t in torch.chunk(x, 2)], lambda n: (R(2 * n),)),
    "cat": (lambda x, y: torch.cat([x, y, x]), lambda n: (R(n, 3), R(n + 2, 3))),
    "view": (lambda x: x.view(2, x.shape[0] // 2, -1) * 2, lambda n: (R(2 * n, 4),)),
    "reshape": (lambda x: x.transpose(0, 1).reshape(-1, x.shape[0]) * 2, lambda n: (R(n, 4, n),)),
    "roll": (lambda x: torch.roll(x, x.shape[0] // 2, 0), ROWS),
    "flip": (lambda x: x.flip(0) + 1, ROWS),
    "repeat": (lambda x: x.repeat(x.shape[0], 2), ROWS),
    "tril": (lambda x: torch.tril(x, diagonal=x.shape[0] - 2), lambda n: (R(n, n + 1),)),
    "arange": (lambda x: torch.arange(0, x.shape[0], 2) + torch.arange(x.shape[0], 0, -1)[::2], LINE),
    "pad by a size": (lambda x: F.pad(x, (1, x.shape[0])), ROWS),
    "pad, cut": (lambda x: F.pad(x, (-1, x.shape[0] - 5)), lambda n: (R(n, 12),)),
    "pad reflect": (lambda x: F.pad(x, (1, 2), mode="reflect"), lambda n: (R(n, n + 3),)),
    "convolution": (lambda x: F.conv2d(x, W2, padding=1).relu(), IMAGES),
    "convolution, stride": (lambda x: F.conv2d(x, W2, stride=2), IMAGES),
    "convolution, lines": (lambda x: F.conv1d(x, W1), lambda n: (R(n, 3, n + 5),)),
    "max pooling": (lambda x: F.max_pool2d(x, 3, 2, 1), IMAGES),
    "average pooling": (lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGES),
    "pooling to a size": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), lambda n: (R(n, 3, 2 * n + 4, 3 * n + 5),)),
    "upsampled": (upsampled, lambda n: (R(4, n + 10, n + 12),)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGES),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic", align_corners=True), IMAGES),
    "to the size of another": (lambda x, y: F.interpolate(x, size=y.shape[-2:], mode="nearest"), lambda n: (R(n, 3, n + 4, n + 5), R(n + 7, n + 9))),
    "linear upsampling": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), lambda n: (R(n, 3, n + 4),)),
    "trilinear upsampling": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), lambda n: (R(2, 3, n, n + 1, 2),)),
    "exact upsampling": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), IMAGES),
    "scan": (lambda x: x.cumsum(0) + x.logcumsumexp(1), lambda n: (R(n, n + 2),)),
    "sort": (lambda x: x.sort(0), ROWS),
    "topk": (lambda x: x.topk(x.shape[0] // 2), lambda n: (R(n, n + 3),)),
    "gather and scatter": (lambda x, i: torch.zeros_like(x).scatter_add(0, i, x.gather(0, i)), lambda n: (R(n, 3), ints(n, 3, high=max(n, 1)))),
    "index": (lambda x, i: x[i, :, None] * 2, lambda n: (R(n, 3), ints(n + 4, high=max(n, 1)))),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k), lambda n: (R(n, 2, n + 1, 8), R(n, 2, n + 3, 8))),
    "products": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), lambda n: (R(n, 4, n), R(n, n, 5))),
    "norm": (lambda x: F.layer_norm(x, (x.shape[-1],)), lambda n: (R(3, n),)),
    "cross entropy": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), lambda n: (R(n, 20), ints(n))),
    "statistics": (lambda x: (x.var(0), x.std(), x.mean(), x.norm()), lambda n: (R(n, n + 1),)),
    "mean by hand": (lambda x: x.sum() / x.numel() * math.sqrt(x.shape[0]), lambda n: (R(n, n + 3),)),
    "dropout": (lambda x: F.dropout(x, 0.5, True), lambda n: (R(n, n + 3),)),
    "factors": (lambda x: (torch.linalg.cholesky(x.detach() @ x.detach().mT + torch.eye(x.shape[0])), torch.linalg.qr(x.detach())[1].abs()),
                lambda n: (R(n, n),)),
    "inverse": (lambda x: (torch.linalg.inv(x.detach() @ x.detach().mT + torch.eye(x.shape[0])), torch.linalg.eigvalsh(x.detach() @ x.detach().mT)),
                lambda n: (R(n, n),)),
    "histogram": (lambda x: torch.histc(x.detach(), 5, -1, 1), LINE),
    "sampled": (lambda x, g: F.grid_sample(x.detach(), g.detach(), align_corners=False), lambda n: (R(n, 2, n + 3, n + 4), R(n, 5, n, 2))),
    "kept rows": (kept, LINE),
    "rows of a mask": (lambda x, b: x[b].sum(0), lambda n: (R(n, 3), R(n) > 0)),
    "computed parts": (lambda x, s: [t.sum() * 2 for t in x.split(s.tolist())], lambda n: (R(2 * n + 1), torch.tensor([n, n + 1]))),
    "computed repeats": (lambda x, r: torch.repeat_interleave(x, r, dim=0) * 2, lambda n: (R(n, 3), ints(n, high=4))),
    "unique": (lambda x: x.unique() * 2, lambda n: (ints(n),)),
    "least and greatest size": (lambda x, y: torch.zeros(min(x.shape[0], y.shape[0]), max(x.shape[0], 5)), lambda n: (R(n), R(7))),
    "as many as the difference": (lambda x, y: x[: y.shape[0] - y.shape[1]] * 2, lambda n: (R(32, 3), R(n, 13 - n))),
    "a quarter": (lambda x: x[x.shape[0] // 4 : x.shape[0] // 2] * 2, ROWS),
    "parts of nearly one size": (lambda x: [t * 2 for t in torch.tensor_split(x, 3)], ROWS),
    "filled up to a multiple": (lambda x: F.pad(x, (0, 0, 0, -x.shape[0] % 4)).view((x.shape[0] + -x.shape[0] % 4) // 4, 4, 4).cumsum(1), ROWS),
    "linspace": (lambda x: x * torch.linspace(0, 1, x.shape[0])[:, None], ROWS),
    "flattened": (lambda x: x.flatten(1) * 2, lambda n: (R(n, 3, n + 1),)),
    "even size": (lambda x: x * 2 if x.shape[0] % 2 == 0 else x, lambda n: (R(2 * n),)),
}


# Equal strides are put in order by the sizes, so that the first three sizes give another layout.
TWICE = {"as_strided"}
# Programs that are others for a size of 1: a reshape shows what else it copies, C++ code of a gradient has a way of its own, a layout
# that is not row-major is another one.
OTHER_AT_1 = {"linspace", "filled up to a multiple", "as_strided", "reshape", "repeat", "pad reflect", "scan", "products", "statistics", "factors", "computed repeats"}
# ... and of 0: there is no part to return, C++ code asks whether there are elements.
OTHER_AT_0 = {"linspace", "filled up to a multiple", "chunk", "repeat", "scan", "attention", "products", "statistics", "dropout"}


def step(fn, args):
    """Results, and gradients where there are any."""
    args = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    torch.manual_seed(1)
    out = fn(*args)
    results = [t for t in (out if isinstance(out, (list, tuple)) else [out]) if t.requires_grad]
    if results:
        sum((t * torch.arange(t.numel()).view(t.shape).sin()).sum() for t in results).backward()
    return out, [a.grad for a in args]


@pytest.mark.parametrize("name", PROGRAMS)
def test_ten_sizes(name):
    fn, inputs = PROGRAMS[name]
    compiled = fs.compile(fn, dynamic=True, fullgraph=True)
    for n in (*range(2, 12), 1, 0):
        args = inputs(n)
        try:
            want, want_grads = step(fn, args)
        except (RuntimeError, IndexError, ValueError):
            assert n < 2
            continue
        got, got_grads = step(compiled, args)
        torch.testing.assert_close(list(got) if isinstance(got, (list, tuple)) else got, list(want) if isinstance(want, (list, tuple)) else want,
                                   rtol=1e-4, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(got_grads, want_grads, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert fs.counters["stats"]["unique_graphs"] <= 1 + sum(name in others for others in (TWICE, OTHER_AT_1, OTHER_AT_0))


def test_a_traced_function_takes_symbols():
    graphs = []
    fn = lambda x: F.interpolate(x.sin(), scale_factor=2, mode="bilinear")
    traced = fs.aot.function(fn, lambda gm, inputs: graphs.append(gm) or gm.forward, dynamic=True)
    for n in (2, 3, 5):
        x = R(n, 3, n + 4, n + 5)
        torch.testing.assert_close(traced(x), fn(x))
    assert len(graphs) == 1


def test_a_backward_tells_what_it_fixed():
    """The C++ code of this gradient is a loop over the columns: the guard has the line of the forward, and is counted."""
    x = R(7, 4, requires_grad=True)
    compiled = fs.compile(lambda x: torch.linalg.householder_product(x, x[0]), dynamic=True, fullgraph=True)
    compiled(x).sum().backward()
    assert fs.counters["aot"]["specialized_by_op"] >= 1
    with fs.config.patch(error_on_recompile=True), pytest.raises(fs.errors.RecompileError, match="test_sizes_programs.py"):
        compiled(R(7, 3, requires_grad=True))


# -- the reference programs, sizes 0 and 1 among others -------------------------------------------------------------------
BATCHES = {
    "pointwise": lambda n: {"rows": n, "columns": 16},
    "mlp": lambda n: {"batch": n, "width": 16, "layers": 2},
    "gpt": lambda n: {"batch": n, "length": 6, "layers": 1, "width": 32, "vocabulary": 20},
    "lstm": lambda n: {"batch": n, "steps": 3, "inside": 8, "hidden": 12},
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_the_reference_programs(name):
    make = programs.PROGRAMS[name]
    fn = make(**BATCHES[name](4)).fn
    for sizes, most in ((range(1, 9), 3), (range(9), 4)):
        fs.reset()
        compiled = fs.compile(fn)
        for n in sizes:
            inputs = make(**BATCHES[name](n)).inputs
            with torch.no_grad():
                torch.testing.assert_close(compiled(*inputs), fn(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)
        assert fs.counters["stats"]["unique_graphs"] <= most
