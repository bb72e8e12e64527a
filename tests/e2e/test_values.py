"""Calls whose values once differed from eager's, in one place: reductions of equal rows, integer conversions, results of one byte, literals."""
import pytest
import torch
import torch.nn.functional as F

import firesteel as fs


def shifted(x):
    return x >> 8, x << 8, x >> 7


def equal_rows(x):
    return torch.std(x, 0), torch.var(x, 0)


CALLS = {
    "shifts of bytes by their width": (shifted, lambda: torch.tensor([255, 1, 128, 0], dtype=torch.uint8)),
    "large doubles as bytes": (lambda x: x.to(torch.uint8), lambda: torch.tensor([2.0**31 + 1, 2.0**33 + 7, 255.0, 3.7], dtype=torch.float64)),
    "an outer product of bools": (lambda x: torch.addr(x[:, None] & x, x, x), lambda: torch.tensor([True, False, True])),
    "infinity as a number of half precision": (lambda x: torch.nan_to_num(x), lambda: torch.tensor([float("inf"), -float("inf"), float("nan")]).half()),
    "infinity as a number of bfloat16": (lambda x: torch.nan_to_num(x), lambda: torch.tensor([float("inf"), 1.0]).bfloat16()),
    "the inverse error function near 1": (lambda x: torch.erfinv(x), lambda: torch.tensor([1 - 2.0**-53, -(1 - 2.0**-50), 0.5], dtype=torch.float64)),
    "equal rows": (equal_rows, lambda: torch.linspace(0.1, 7.3, 13).expand(9, 13).contiguous()),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_equals_eager(name, dynamic):
    program, make = CALLS[name]
    found, expected = fs.compile(program, dynamic=dynamic)(make()), program(make())
    torch.testing.assert_close(found, expected)
    assert [t.dtype for t in (found if isinstance(found, tuple) else (found,))] == [t.dtype for t in (expected if isinstance(expected, tuple) else (expected,))]


def test_gradient_of_equal_rows_is_zero():
    x = torch.linspace(0.1, 7.3, 13).repeat(9, 1).requires_grad_()
    result = fs.compile(lambda x: torch.std(x, 0))(x)
    assert torch.equal(result, torch.zeros(13))
    assert torch.equal(torch.autograd.grad(result.sum(), x)[0].nan_to_num(), torch.zeros(9, 13))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_results_of_one_byte_beside_vector_math_stay_in_their_buffers(dtype):
    """The tail of a store of bools; guard zones are on in tests."""
    compiled = fs.compile(lambda x: (x.log() > 0, torch.erf(torch.sin(x)), x > 1), dynamic=True)
    for n in (5, 8, 100, 33, 1, 7, 16, 17):
        x = torch.rand(n, dtype=dtype) * 2
        torch.testing.assert_close(compiled(x), (x.log() > 0, torch.erf(torch.sin(x)), x > 1))


def test_a_literal_tensor_as_a_factor_behind_a_seam():
    half = torch.tensor(0.5)

    def program(x):
        n = x[x > 0].sum()
        return torch.add(x, n, alpha=half.item()), torch.sub(x, x, alpha=torch.tensor(2))
    x = torch.linspace(-1, 1, 6)
    torch.testing.assert_close(fs.compile(program)(x), program(x))


def test_a_write_through_a_view_of_a_group_norm():
    def program(x):
        b = F.group_norm(x.cumsum(0), 1)
        b.view(-1)[0] = 1.5
        return b * 2
    compiled = fs.compile(program, dynamic=True)
    for n in (4, 6):
        x = torch.rand(n, 3, 5)
        torch.testing.assert_close(compiled(x), program(x))


def test_a_triangle_of_columns_of_one_element():
    """No axis is long enough for a vector."""
    program = lambda x: x.clone().triu(1).softmax(-2)  # noqa: E731
    compiled = fs.compile(program, dynamic=True)
    for n in (4, 5):
        one, two = (torch.linspace(-1, 1, n * n).view(n, 1, n, 1).requires_grad_() for _ in range(2))
        expected, found = program(one), compiled(two)
        torch.testing.assert_close(found, expected)
        weights = torch.linspace(0, 1, n * n).view(n, 1, n, 1)
        torch.testing.assert_close(*(torch.autograd.grad((y * weights).sum(), x)[0] for x, y in ((two, found), (one, expected))))


MODULES = {
    "cross entropy": (lambda: torch.nn.CrossEntropyLoss(), lambda n: (torch.linspace(-1, 1, 7 * n).view(n, 7), torch.arange(n) % 7)),
    "batch norm": (lambda: torch.nn.BatchNorm1d(4), lambda n: (torch.linspace(-1, 1, 12 * n).view(n, 4, 3),)),
    "group norm": (lambda: torch.nn.GroupNorm(2, 4), lambda n: (torch.linspace(-1, 1, 12 * n).view(n, 4, 3),)),
    "transformer": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), lambda n: (torch.linspace(-1, 1, 24 * n).view(n, 3, 8),)),
    "fractional pool": (lambda: torch.nn.FractionalMaxPool3d(2, 2, _random_samples=torch.full((2, 1, 3), 0.5).bfloat16()),
                        lambda n: (torch.linspace(-1, 1, 2 * n ** 3).view(2, 1, n, n, n),)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_bfloat16_once_several_shapes_were_seen(name):
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    module = make().bfloat16()
    compiled = fs.compile(module)
    for n in (4, 6, 5):
        grads = []
        for run in (module, compiled):
            x, *rest = inputs(n)
            x = x.bfloat16().requires_grad_()
            y = run(x, *rest)
            grads.append((y, *torch.autograd.grad((y * torch.linspace(0, 1, y.numel()).view(y.shape).bfloat16()).sum(), x)))
        torch.testing.assert_close(grads[1], grads[0], rtol=0.05, atol=0.05)


def momentum(x, y):
    x.mul_(0.9).add_(y)
    y.sub_(x)


def old_and_new(x, y):
    before = x * 2
    x.add_(1)
    return before


def result_and_input(x, y):
    z = y.exp()
    x.copy_(z)
    return z


def turned(x, y):
    x.copy_(x.flip(0))
    y.copy_(x)


@pytest.mark.parametrize("function", [momentum, old_and_new, result_and_input, turned], ids=lambda function: function.__name__)
def test_inputs_written_in_place(function):
    """Values, versions and memory are as eager leaves them, and a result is no alias."""
    torch.manual_seed(0)
    given, found = (torch.randn(40, 50), torch.randn(40, 50)), []
    for fn in (function, fs.compile(function, fullgraph=True)):
        inputs = [x.clone() for x in given]
        memory = [x.data_ptr() for x in inputs]
        result = fn(*inputs)
        assert memory == [x.data_ptr() for x in inputs] and (result is None or result.data_ptr() not in memory)
        found.append((result, inputs, [x._version for x in inputs]))
    torch.testing.assert_close(found[1], found[0])
