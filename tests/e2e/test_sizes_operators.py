"""Operators whose C++ code or signature has plain sizes: compiled once with symbols, they serve all sizes, forward and backward.

A row is a program and its inputs for a number n.
"""
import pytest
import torch
import torch.nn.functional as F

import firesteel as fs


@pytest.fixture(autouse=True)
def _count_from_zero():
    fs.reset()


R = torch.randn
WINDOW = torch.hann_window(16)

PROGRAMS = {
    # numbers of elements as arguments
    "linspace": (lambda x: x + torch.linspace(0, 1, x.shape[0]), lambda n: (R(n),)),
    "logspace": (lambda x: x + torch.logspace(0, 1, steps=x.shape[0], dtype=torch.float64), lambda n: (R(n),)),
    "windows": (lambda x: x * torch.hann_window(x.shape[0]) * torch.hamming_window(x.shape[0], False, 0.6) + torch.kaiser_window(x.shape[0]),
                lambda n: (R(n),)),
    "signal windows": (lambda x: x * torch.signal.windows.gaussian(x.shape[0], std=2.0), lambda n: (R(n),)),
    "frequencies": (lambda x: torch.fft.fft(x).abs() * torch.fft.fftfreq(x.shape[0], 0.5), lambda n: (R(n),)),
    "upper indices": (lambda x: x[tuple(torch.triu_indices(x.shape[0], x.shape[1], 1))], lambda n: (R(n, n + 1),)),
    "lower indices": (lambda x: x[tuple(torch.tril_indices(x.shape[0], x.shape[1], -1))], lambda n: (R(n + 2, n),)),
    "range": (lambda x: x * torch.range(1, x.shape[0]), lambda n: (R(n),)),
    "one_hot": (lambda i, y: F.one_hot(i, y.shape[0]) * y, lambda n: (torch.arange(n), R(n))),
    # linear algebra
    "solve": (lambda a, b: torch.linalg.solve(a @ a.mT + torch.eye(a.shape[-1]), b), lambda n: (R(2, n, n), R(2, n, 3))),
    "solve vectors": (lambda a, b: torch.linalg.solve(a @ a.mT + torch.eye(a.shape[-1]), b), lambda n: (R(n, n), R(n))),
    "factors": (lambda a: torch.linalg.lu(a)[1:], lambda n: (R(n + 1, n),)),
    "pinv": (lambda a: torch.linalg.pinv(a), lambda n: (R(n, n + 2),)),
    "slogdet": (lambda a: torch.linalg.slogdet(a)[1], lambda n: (R(2, n, n),)),
    "matrix_exp": (lambda a: torch.linalg.matrix_exp(a / 4), lambda n: (R(n, n),)),
    "norms": (lambda a: torch.linalg.matrix_norm(a, "nuc") + torch.linalg.norm(a, 2) + torch.linalg.matrix_norm(a, -1), lambda n: (R(n, n + 1),)),
    "kron": (lambda a, b: torch.ops.aten.kron(a, b), lambda n: (R(n, 2), R(n + 1))),
    "multi_dot": (lambda a, b, c, d: torch.linalg.multi_dot([a, b, c, d]), lambda n: (R(n), R(n, 2 * n), R(2 * n, 3), R(3, n))),
    "block_diag": (lambda a, b: torch.block_diag(a, b), lambda n: (R(n, n + 1), R(n + 2))),
    "corrcoef": (lambda a: torch.corrcoef(a) + a.cov(), lambda n: (R(n, n + 2),)),
    "cdist": (lambda a, b: torch.cdist(a, b), lambda n: (R(n + 24, 3), R(n + 26, 3))),
    # along a dimension
    "cumprod": (lambda x: x.cumprod(1), lambda n: (R(3, n),)),
    "cumprod of zeros": (lambda x: x.relu().cumprod(-1), lambda n: (R(4, 3, n),)),
    "gradient": (lambda x, t: (*torch.gradient(x, spacing=0.5, edge_order=2), *torch.gradient(x, spacing=(t,), dim=1)),
                 lambda n: (R(n + 3, n + 4), R(n + 4).abs().cumsum(0).detach())),
    "tensor_split": (lambda x: x.tensor_split(3, 1), lambda n: (R(2, n + 3),)),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 1), lambda n: (R(n, n + 1), torch.arange(n)[None] % 2 - 1)),
    "combinations": (lambda x: (torch.combinations(x), torch.combinations(x, 1)), lambda n: (R(n + 1),)),
    # Fourier transforms
    "lengths": (lambda x: torch.fft.fft(x, n=6).abs() + torch.fft.irfft(torch.fft.rfft(x), n=x.shape[-1]).sum(), lambda n: (R(2, n + 3),)),
    "lengths of two": (lambda x: torch.fft.rfft2(x, s=(6, 7)).abs(), lambda n: (R(n + 3, n + 4),)),
    "stft": (lambda x: torch.stft(x, 16, window=WINDOW, return_complex=True).abs(), lambda n: (R(2, 5 * n + 40),)),
    "istft": (lambda x: torch.istft(torch.stft(x, 16, window=WINDOW, return_complex=True), 16, window=WINDOW, length=x.shape[-1]),
              lambda n: (R(2, 5 * n + 40),)),
    # networks
    "max_pool1d": (lambda x: F.max_pool1d(x, 2, padding=1), lambda n: (R(n, 3, n + 4),)),
    "adaptive max": (lambda x: F.adaptive_max_pool3d(x, (None, 2, None), return_indices=True), lambda n: (R(2, 3, n + 4, n + 2, n + 2),)),
    "area": (lambda x: F.interpolate(x, scale_factor=1.5, mode="area"), lambda n: (R(2, 3, n + 4),)),
    "scales": (lambda x: torch.ops.aten.upsample_bilinear2d.vec(x, None, False, [2.0, 1.5]), lambda n: (R(2, 3, n + 1, n + 3),)),
    "fold": (lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1), lambda n: (R(2, 3, n + 2, n + 3),)),
    "affine_grid": (lambda t, x: F.grid_sample(x, F.affine_grid(t, x.shape, align_corners=False), align_corners=False),
                    lambda n: (R(12, 2, 3), R(12, 3, n + 1, n + 2))),
    "embedding_bag": (lambda i, w: F.embedding_bag(i, w, mode="max"), lambda n: (torch.arange(4 * n).reshape(n, 4) % 10, R(10, 5))),
    "ctc": (lambda x, t, a, b: F.ctc_loss(x.log_softmax(2), t, a, b),
            lambda n: (R(n + 10, n, 7), 1 + torch.arange(4 * n).reshape(n, 4) % 6, torch.full((n,), n + 10), torch.full((n,), 4))),
    "ctc of numbers": (lambda x, t: F.ctc_loss(x.log_softmax(2), t, (15,) * 3, (4, 3, 4)), lambda n: (R(15, 3, n + 7), torch.ones(3, 4, dtype=torch.int64))),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), lambda n: (R(n, 5), R(n, 1))),
    "bilinear": (lambda x, y, w: F.bilinear(x, y, w), lambda n: (R(n, 3), R(n, 4), R(5, 3, 4))),
    "conv_tbc": (lambda x, w, b: torch.conv_tbc(x, w, b, 1), lambda n: (R(n + 2, n, 4), R(3, 4, 5), R(5))),
    "masked_select": (lambda x: torch.masked_select(x, x[0] > 0), lambda n: (R(n, n + 3),)),
}


def step(fn, args):
    """Results and gradients."""
    args = [a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args]
    out = fn(*args)
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    ends = [o for o in outs if o.requires_grad]
    starts = [torch.ones_like(o) + torch.arange(o.numel()).reshape(o.shape) / 8 for o in ends]
    return outs, torch.autograd.grad(ends, [a for a in args if a.requires_grad], starts, allow_unused=True)


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_one_graph_for_all_sizes(name):
    if name == "solve" and torch.__version__ < (2, 13):
        pytest.skip("an older solve asks for plain numbers")
    fn, inputs = PROGRAMS[name]
    with fs.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = fs.compile(fn, dynamic=True, fullgraph=True, backend="native" if name in NATIVE else "aot_eager")
        for n in (3, 4, 9, 6):
            torch.manual_seed(n)
            args = inputs(n)
            torch.testing.assert_close(step(compiled, args), step(fn, args), rtol=1e-3, atol=1e-3)
    assert fs.counters["stats"]["unique_graphs"] == 1 and fs.counters["aot"]["specialized_by_op"] == 0


NATIVE = {"linspace", "windows", "upper indices", "solve", "cumprod of zeros", "lengths", "istft", "ctc", "adaptive max"}


def test_second_gradients_of_a_product_of_zeros():
    """The gradient of a cumulative product is differentiated in a form that holds at zeros too."""
    x = torch.tensor([[1.5, 0.0, 2.0, 0.0, 3.0], [0.5, 1.0, -2.0, 0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    compiled = fs.compile(lambda x: x.cumprod(1), fullgraph=True, dynamic=True, backend="aot_eager")

    def second(fn):
        first, = torch.autograd.grad(fn(x).pow(2).sum() + fn(x).sum(), x, create_graph=True)
        return first.detach(), torch.autograd.grad(first.sin().sum(), x)[0]
    torch.testing.assert_close(second(compiled), second(lambda x: x.cumprod(1)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_place_in_the_storage_is_guarded(dynamic):
    base = torch.arange(40.0)
    for fn in (lambda x: x.as_strided((2, 2), (1, 2), 1) * 1, lambda x: x[2:].storage_offset() + x):
        compiled = fs.compile(fn, dynamic=dynamic, fullgraph=True, backend="aot_eager")
        for start in (5, 3, 0):
            x = base[start:start + 10]
            torch.testing.assert_close(compiled(x), fn(x))
    fs.reset()
    relative = fs.compile(lambda x: x.as_strided((2, 2), (1, 2)) * 1, dynamic=dynamic, fullgraph=True, backend="aot_eager")
    for start in (5, 3, 0):
        relative(base[start:start + 10])
    assert fs.counters["stats"]["unique_graphs"] == 1


def test_resizing_to_other_elements_runs_between_graphs():
    def fn(x, y):
        z = x.sin()
        z.resize_as_(y)
        return z[:1, :2] * 2

    def whole(x):
        return x.clone().resize_(x.shape[1], x.shape[0]) * 2
    compiled = fs.compile(fn, dynamic=True, backend="aot_eager")
    for n in (3, 5):
        x, y = R(2, n), R(4, n)
        torch.testing.assert_close(compiled(x, y), fn(x, y))
    one = fs.compile(whole, dynamic=True, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(one(x), whole(x))
    with pytest.raises(fs.errors.Unsupported, match="resize_as_ to another number of elements"):
        fs.compile(fn, fullgraph=True)(x, y)


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
def test_operators_on_numbers_alone(backend):
    """An operator that is given no tensor makes one of one element, in the dtype of its numbers."""
    aten = torch.ops.aten

    def fn(a, b):
        return aten.add(a, b), aten.mul(b, a), aten.div(a, 3, rounding_mode="floor"), aten.div(a, b, rounding_mode=None), torch.add(2, 3)
    compiled = fs.compile(fn, fullgraph=True, backend=backend)
    for a, b in ((4, 3.5), (1024, 2.5), (7, 0.5)):
        torch.testing.assert_close(compiled(a, b), fn(a, b))


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
def test_conjugates(backend):
    """A conjugate that is computed has a layout of its own; a number has one too."""
    def fn(x):
        part = x[:, 1:4].conj()
        return (part * 2j).sum(0) + part.reshape(-1)[:3]
    compiled = fs.compile(fn, fullgraph=True, dynamic=True, backend=backend)
    for n in (4, 5):
        x = R(n, n + 3, dtype=torch.complex64, requires_grad=True)
        torch.testing.assert_close(compiled(x), fn(x))
        torch.testing.assert_close(torch.autograd.grad(compiled(x).abs().sum(), x), torch.autograd.grad(fn(x).abs().sum(), x))
