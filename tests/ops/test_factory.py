"""New memory under deterministic algorithms: eager fills it."""
import pytest
import torch

import firesteel as fs


def empties(x):
    dtypes = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool)
    made = [torch.empty(3, dtype=dtype) for dtype in dtypes]
    return [*made, torch.empty_like(x), x.new_empty(2), torch.empty_strided((2, 2), (1, 2)), x.new_empty_strided((2, 2), (2, 1)), torch.empty_permuted((2, 3), (1, 0)), x + 1]


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_new_memory_is_filled_by_deterministic_algorithms(deterministic):
    compiled, x = fs.compile(empties), torch.ones(2)
    torch.testing.assert_close(compiled(x), empties(x), equal_nan=True, rtol=0, atol=0)
    torch.use_deterministic_algorithms(False)
    compiled(x)
    torch.use_deterministic_algorithms(True)
    torch.testing.assert_close(compiled(x), empties(x), equal_nan=True, rtol=0, atol=0)


def test_filling_is_guarded(deterministic):
    compiled, x = fs.compile(lambda x: torch.empty(3) + x), torch.ones(3)
    assert compiled(x).isnan().all()
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        assert not compiled(x).isnan().any()      # any values will do: zeros here
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert compiled(x).isnan().all()


@pytest.mark.usefixtures("library_products")
def test_drawn_numbers_need_no_memory_filled_before():
    """Dropout: a mask is drawn into memory that holds nothing, and multiplied in one kernel, each way."""
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Dropout(), torch.nn.Linear(8, 8, bias=False), torch.nn.Dropout())
    x = torch.randn(4, 8)
    torch.manual_seed(0)
    want = layers(x)
    gradients = torch.autograd.grad(want.sum(), list(layers.parameters()))
    kept, fs.config.cache_dir = fs.config.cache_dir, ""
    try:
        before = fs.counters["native"]["kernels"]
        torch.manual_seed(0)
        got = fs.compile(lambda x: layers(x), fullgraph=True)(x)
        torch.testing.assert_close((got, *torch.autograd.grad(got.sum(), list(layers.parameters()))), (want, *gradients))
    finally:
        fs.config.cache_dir = kept
    assert fs.counters["native"]["kernels"] - before == 4


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("bounds", [(1.0, 5.000001, 2.0), (0, 4.9), (-0.9, 3.9), (0.5, 4.9, 1.5), (3.9, -0.9, -1.5)])
def test_integers_from_floats(bounds, dtype):
    """Those of 64 bits are counted from what is cast, others from the numbers as they are."""
    program = lambda x: torch.arange(*bounds, dtype=dtype) + x
    got, want = fs.compile(program)(torch.zeros((), dtype=dtype)), program(torch.zeros((), dtype=dtype))
    assert got.tolist() == want.tolist()
