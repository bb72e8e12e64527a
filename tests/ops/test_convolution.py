"""Convolutions of a GPU are decomposed: their biases are additions, and the gradients of those sums."""
import pytest
import torch
import torch.nn.functional as F

from firesteel.ops import convolution

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(convolution, "on_gpu", lambda x: True)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_bias_is_added(dims, transposed):
    x, weight, bias = torch.randn(2, 3, *[7] * dims), torch.randn(*((3, 4) if transposed else (4, 3)), *[3] * dims), torch.randn(4)
    how = [2] * dims, [1] * dims, [1] * dims, transposed, [0] * dims, 1
    torch.testing.assert_close(convolution.decompose_convolution(x, weight, bias, *how), aten.convolution.default(x, weight, bias, *how))


@pytest.mark.parametrize("mask", [(True, True, True), (False, True, True), (False, False, True)])
def test_its_gradient_is_a_sum(mask):
    x, weight = torch.randn(2, 3, 7, 7), torch.randn(4, 3, 3, 3)
    args = torch.randn(2, 4, 7, 7), x, weight, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, list(mask)
    for got, want, asked in zip(convolution.decompose_convolution_backward(*args), aten.convolution_backward.default(*args), mask):
        assert (got is None) is not asked
        if asked:
            torch.testing.assert_close(got, want)


def test_what_the_library_adds_itself_is_left_to_it():
    """Convolutions channel by channel round once; of other types the sum would have another."""
    x, weight, bias = torch.randn(2, 4, 7, 7), torch.randn(4, 1, 3, 3), torch.randn(4)
    how = [1, 1], [1, 1], [1, 1], False, [0, 0]
    assert convolution.decompose_convolution(x, weight, bias, *how, 4) is NotImplemented
    assert convolution.decompose_convolution(x, torch.randn(4, 4, 3, 3), None, *how, 1) is NotImplemented
    assert convolution.decompose_convolution(x, torch.randn(4, 4, 3, 3), bias.double(), *how, 1) is NotImplemented
    assert convolution.decompose_convolution(x[:, :0], torch.randn(4, 0, 3, 3), bias, *how, 1) is NotImplemented


def test_on_the_host_a_bias_stays_in_the_call(monkeypatch):
    import firesteel as fs
    monkeypatch.undo()
    before = fs.counters["native"]["kernels"]
    x, weight, bias = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    torch.testing.assert_close(fs.compile(lambda x: F.conv2d(x, weight, bias))(x), F.conv2d(x, weight, bias))
    assert fs.counters["native"]["kernels"] == before
