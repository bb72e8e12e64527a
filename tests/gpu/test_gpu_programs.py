"""The reference programs on a GPU against eager.  Without one: their kernels emulated inside of the CPU's host function."""
from __future__ import annotations

import copy
import ctypes
import pathlib
import sys
from dataclasses import replace

import emulated
import pytest
import torch
import torch.nn.functional as F

import firesteel as fs
from firesteel import pipeline
from firesteel.codegen import host, triton
from firesteel.codegen.side_by_side import side_by_side
from firesteel.codegen.zones import ZONE
from firesteel.loops.plan import Plan, extent
from firesteel.loops.scalars import DTYPES
from firesteel.ops import index, matmul, scatter
from firesteel.sym.expr import evaluate
from firesteel.targets import KINDS

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

import programs  # noqa: E402

cuda = torch.cuda.is_available()
gpu_only = pytest.mark.skipif(not cuda, reason="needs a GPU")
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2}


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
    torch.backends.cuda.matmul.allow_tf32 = before


# ---------------------------------------------------------------- without a GPU

class Emulated:
    """A kernel that the CPU's host function calls by address."""

    def __init__(self, kernel: triton.GpuKernel, plan: Plan):
        self.kernel, self.buffers = kernel, plan.program.buffers
        self.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.run)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value
        self.failed: list[BaseException] = []
        self.kinds = dict(zip(self.kernel.symbols, self.kernel.signature[len(self.kernel.buffers) + len(self.kernel.scratch):]))

    def run(self, args: int) -> None:
        names, symbols = self.kernel.buffers, self.kernel.symbols
        words = (ctypes.c_int64 * (len(names) + len(symbols) + 1)).from_address(args)
        numbers = {s: ctypes.c_double.from_address(ctypes.addressof(words) + 8 * (len(names) + k)).value if self.kinds[s] == "fp64" else words[len(names) + k]
                   for k, s in enumerate(symbols)}
        try:
            tensors = {name: self.tensor(name, words[k], numbers) for k, name in enumerate(names)}
            ctypes.c_int64.from_address(words[-1]).value = emulated.run(self.kernel, tensors, numbers)
        except BaseException as error:      # an exception cannot cross machine code
            self.failed.append(error)

    def tensor(self, name: str, address: int, symbols: dict) -> torch.Tensor:
        """The memory of a buffer."""
        buffer = self.buffers[name]
        try:
            count = evaluate(extent(buffer), symbols)
        except KeyError:        # sizes that the kernel itself does not use
            count = 1 << 20
        memory = (ctypes.c_uint8 * max(count * DTYPES[buffer.dtype].itemsize, 8)).from_address(address or ctypes.addressof(_NOTHING))
        return torch.frombuffer(memory, dtype=DTYPES[buffer.dtype])


_NOTHING = ctypes.c_int64()
kernels_run: list[Emulated] = []


def load_emulated(plan: Plan, kernels: list[triton.GpuKernel]):
    emulated_kernels = [Emulated(kernel, plan) for kernel in kernels]
    kernels_run.extend(emulated_kernels)
    return {k.kernel.name: host.Launch(k.address, k.kernel.buffers, k.kernel.symbols) for k in emulated_kernels}, None


@pytest.fixture
def emulation(monkeypatch):
    monkeypatch.setitem(pipeline.TARGETS._rows, "cpu", pipeline.CodeTarget(triton.print_nest, load_emulated, ZONE))
    kernels_run.clear()
    yield
    failed = [error for kernel in kernels_run for error in kernel.failed]
    if failed:
        raise failed[0]


# ---------------------------------------------------------------- programs against eager

def to_device(program: programs.Program, device: str) -> programs.Program:
    module = isinstance(program.fn, torch.nn.Module)
    if module:
        program.fn.to(device)
    inputs = tuple(x.detach().to(device).requires_grad_(x.requires_grad) for x in program.inputs)
    return programs.Program(program.fn, inputs, list(program.fn.parameters()) if module else [x for x in inputs if x.requires_grad])


def state(program: programs.Program, fn, train: bool) -> list[torch.Tensor]:
    result = programs.step(fn, program, train)
    gradients = [leaf.grad for leaf in program.leaves] if train else []
    buffers = [b.clone() for b in program.fn.buffers()] if isinstance(program.fn, torch.nn.Module) else []
    return [result, *gradients, *buffers]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype and got.device == want.device
    if want.is_floating_point():
        scale = want.abs().max().item() if want.numel() else 1.0
        difference = (got - want).abs().max().item() if want.numel() else 0.0
        assert difference <= tolerance * max(scale, 1e-3), f"differs by {difference} of {scale}"
    else:
        assert torch.equal(got, want)


def check(name: str, train: bool, dtype: torch.dtype, dynamic: bool | None, device: str, sizes: list[dict]) -> None:
    make = programs.PROGRAMS[name]
    holder = compiled = None
    for size in sizes:
        expected, program = (to_device(make(dtype=dtype, **size), device) for _ in range(2))
        if holder is None:
            holder, compiled = program, fs.compile(program.fn, dynamic=dynamic, fullgraph=True)
        elif isinstance(holder.fn, torch.nn.Module):
            holder.fn.load_state_dict(expected.fn.state_dict())
            program = programs.Program(holder.fn, program.inputs, holder.leaves)
        for got, want in zip(state(program, compiled, train), state(expected, expected.fn, train), strict=True):
            close(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("name", list(programs.PROGRAMS))
def test_emulated_programs_equal_eager(name, train, dynamic, emulation):
    sizes = [{"batch": 2, "size": 8}] if name == "resnet" else programs.SMALL[name][:1]
    check(name, train, torch.float32, dynamic, "cpu", sizes)
    assert kernels_run


ADDED = {
    "index_put": lambda x, i, v: x.index_put((i,), v, accumulate=True), "scatter_add": lambda x, i, v: x.scatter_add(0, i[:, None].expand(-1, 4), v),
    "embedding": lambda x, i, v: torch.ops.aten.embedding_dense_backward(v, i, 3, -1, False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", ADDED)
def test_terms_are_added_in_float32(name, dtype, request, monkeypatch):
    """600 ones: a sum in the dtype itself ends at 256 (bfloat16), and goes on in steps of 2 at 2048 (float16)."""
    if not cuda:
        request.getfixturevalue("emulation")
        monkeypatch.setattr(index, "adds_by_library", lambda out, row=0: False)
        monkeypatch.setattr(scatter, "adds_by_library", lambda out, row=0: False)
    device = "cuda" if cuda else "cpu"
    count = 600 if dtype is torch.bfloat16 else 3001
    x, v, i = torch.zeros(3, 4, dtype=dtype, device=device), torch.ones(count, 4, dtype=dtype, device=device), torch.zeros(count, dtype=torch.long, device=device)
    got = fs.compile(ADDED[name], fullgraph=True)(x, i, v)
    assert got.dtype is dtype and torch.equal(got[0], torch.full((4,), float(count), device=device).to(dtype)) and not got[1:].any()


# ---------------------------------------------------------------- kernels side by side

class Decoder(torch.nn.Module):
    """Three products of one vector, of which two are written to a cache and read again, and what no other kernel waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(64, n, bias=False, dtype=torch.bfloat16) for n in (64, 32, 32))

    def forward(self, x, keys, values, at, more):
        x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        q, k, v = self.q(x), self.k(x), self.v(x)
        keys.index_copy_(0, at, k)
        values.index_copy_(0, at, v)
        weights = torch.softmax((q[0, :32].float() * keys.float()).sum(-1), 0)
        return (weights[:, None] * values.float()).sum(0), more.sin() + 1, q.relu()


def decoding(device: str) -> tuple:
    torch.manual_seed(0)
    tensors = torch.randn(1, 64), torch.randn(16, 32), torch.randn(16, 32)
    return *(t.to(device, torch.bfloat16) for t in tensors), torch.tensor([3], device=device), torch.randn(5000, device=device)


def decodes_as_eager(model: torch.nn.Module, compiled, device: str) -> None:
    mine, eager = decoding(device), decoding(device)
    with torch.no_grad():
        for got, want in zip((*compiled(*mine), *mine), (*model(*eager), *eager), strict=True):
            close(got, want, 2e-2)


def test_emulated_kernels_side_by_side(monkeypatch, emulation):
    """Memory is a tensor each, as on a GPU, where no arena shares bytes; products of one row are kernels, as there."""
    def load(plan, kernels):
        joint = side_by_side(plan, kernels)
        launched.append((len(kernels), len(joint)))
        launches, _ = load_emulated(plan, joint)
        return dict.fromkeys((kernel.name for kernel in kernels), ()) | launches, None
    launched: list[tuple[int, int]] = []
    monkeypatch.setitem(pipeline.TARGETS._rows, "cpu", pipeline.CodeTarget(triton.print_nest, load))
    monkeypatch.setitem(KINDS._rows, "cpu", replace(KINDS["cpu"], arena=False))
    monkeypatch.setattr(matmul, "on_gpu", lambda x: True)
    with fs.config.patch(verify=False):
        model = Decoder()
        decodes_as_eager(model, fs.compile(model, fullgraph=True), "cpu")
    assert launched[0][0] >= launched[0][1] + 3, launched


@gpu_only
def test_kernels_side_by_side():
    model = Decoder().cuda()
    compiled = fs.compile(model, mode="reduce-overhead")
    for _ in range(6):
        decodes_as_eager(model, compiled, "cuda")


@gpu_only
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("name", list(programs.PROGRAMS))
def test_programs_equal_eager(name, train, dtype, dynamic):
    check(name, train, dtype, dynamic, "cuda", programs.SMALL[name] + programs.SMALL[name][:1])


@gpu_only
@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "lstm"])
def test_programs_in_bfloat16(name, train):
    check(name, train, torch.bfloat16, None, "cuda", programs.SMALL[name][:1])


@gpu_only
@pytest.mark.parametrize("groups", [0, 2], ids=["batch norm", "group norm"])
def test_images_in_bfloat16(groups):
    """Convolved channels-last between contiguous inputs and results."""
    torch.manual_seed(0)
    norm = lambda: torch.nn.GroupNorm(groups, 16) if groups else torch.nn.BatchNorm2d(16)
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1), norm(), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1), norm()).cuda()
    x = torch.randn(4, 16, 12, 12, device="cuda")
    results = []
    for dtype, compiled in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        twin = copy.deepcopy(model).to(dtype)
        y = (fs.compile(twin, fullgraph=True) if compiled else twin)(x.to(dtype))
        y.sin().sum().backward()
        results.append([y.detach(), *(p.grad for p in twin.parameters())])
    for exact, eager, ours in zip(*results):
        assert ours.stride() == eager.stride()
        assert (ours.double() - exact).norm() <= 2 * (eager.double() - exact).norm() + 1e-2 * exact.norm()


TIES = {
    "softplus amax": lambda x: F.softplus(x).amax(0), "gelu max": lambda x: F.gelu(x).max(1).values,
    "masked by maximum": lambda x: (lambda t: torch.where(t == t.amax(1, keepdim=True), t, 0.0))(torch.tanh(x)),
}


def check_ties(name: str, device: str) -> None:
    """A value that is compared keeps its rounding wherever it is computed."""
    compiled, results = fs.compile(TIES[name]), []
    for fn in (compiled, TIES[name]):
        x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16).requires_grad_()
        y = fn(x)
        y.float().sum().backward()
        results.append((y.detach(), x.grad))
    for got, want in zip(*results):
        close(got, want, 2e-2)


@pytest.mark.parametrize("name", TIES)
def test_emulated_ties(name, emulation):
    check_ties(name, "cpu")


@gpu_only
@pytest.mark.parametrize("name", TIES)
def test_ties(name):
    check_ties(name, "cuda")


def check_nothing_between(device: str) -> None:
    """Differences of a single mean are none: what else is made of it is computed all the same."""
    def program(x):
        mean = x.mean(1, keepdim=True)
        return torch.softmax(mean, -1, dtype=torch.float32), mean.diff(dim=-1), mean
    x = torch.randn(1, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    with fs.config.patch(eager_rounding=True):
        for got, want in zip(fs.compile(program, dynamic=True)(x), program(x), strict=True):
            assert got.dtype is want.dtype and got.shape == want.shape
            torch.testing.assert_close(got, want)


def test_emulated_nothing_between(emulation):
    check_nothing_between("cpu")


@gpu_only
def test_nothing_between():
    check_nothing_between("cuda")


@gpu_only
def test_an_index_out_of_range_is_an_index_error_of_the_next_call():
    table = torch.randn(10, 4, device="cuda")
    compiled = fs.compile(lambda i: torch.nn.functional.embedding(i, table) * 2)
    good = torch.tensor([1, 2], device="cuda")
    compiled(good)
    compiled(torch.tensor([1, 99], device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="out of range"):
        compiled(good)
    torch.testing.assert_close(compiled(good), table[good] * 2)


@gpu_only
def test_kernels_run_on_the_current_stream():
    compiled = fs.compile(lambda x: torch.exp(x) + 1)
    x = torch.randn(1 << 20, device="cuda")
    compiled(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x2 = x * 2
        y = compiled(x2)
    stream.synchronize()
    torch.testing.assert_close(y, torch.exp(x * 2) + 1)


@gpu_only
def test_kernels_can_be_captured_in_a_cuda_graph():
    compiled = fs.compile(lambda x: torch.softmax(x * 2, -1))
    x = torch.randn(64, 128, device="cuda")
    compiled(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compiled(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(y, torch.softmax(x * 2, -1))


@gpu_only
def test_a_number_on_the_cpu_among_gpu_tensors():
    compiled = fs.compile(lambda x, s: x * s + 1)
    x, s = torch.randn(100, device="cuda"), torch.tensor(3.0)
    torch.testing.assert_close(compiled(x, s), x * s + 1)


@gpu_only
def test_calls_from_another_thread():
    import concurrent.futures
    compiled = fs.compile(lambda x: torch.tanh(x).sum(0))
    x = torch.randn(100, 7, device="cuda")
    want = torch.tanh(x).sum(0)
    compiled(x)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for y in pool.map(lambda _: compiled(x), range(4)):
            torch.testing.assert_close(y, want)
