"""Losses of two tensors of different dtypes: the result's dtype, its value and the errors are eager's."""
import pytest
import torch
import torch.nn.functional as F

import firesteel as fs

DTYPES = (torch.bool, torch.int64, torch.float16, torch.float32, torch.float64)
LOSSES = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.binary_cross_entropy_with_logits, F.l1_loss)


def outcome(run, x, target):
    try:
        result = run(x, target)
        if result.requires_grad:
            result.sum().backward()
    except Exception as error:
        return type(error), None, None
    return result.dtype, result.detach(), x.grad


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_two_dtypes(loss, reduction):
    run = lambda x, target: loss(x, target, reduction=reduction)
    for first in DTYPES:
        for second in DTYPES if reduction == "none" else (torch.bool, torch.float16, torch.float64):
            given = [(torch.linspace(-2, 2, 6).to(first).requires_grad_(first.is_floating_point), torch.linspace(0, 1, 6).to(second)) for _ in range(2)]
            (kind, *values), (wanted, *expected) = outcome(fs.compile(run), *given[0]), outcome(run, *given[1])
            assert kind is wanted, (first, second)
            torch.testing.assert_close(values, expected, rtol=3e-3, atol=3e-3, msg=lambda text: f"{first}, {second}: {text}")        # noqa: B023


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2)])
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 0.5])])
def test_targets_of_one_byte(shape, weight):
    """Numbers of classes, not masks; images take none."""
    run = lambda x, target: F.nll_loss(x, target, weight, reduction="sum")
    target = torch.zeros((shape[0], *shape[2:]), dtype=torch.uint8)
    target[1:3] = 2
    given = [torch.linspace(-1, 1, 24)[: 12 * (len(shape) - 1)].view(shape).requires_grad_() for _ in range(2)]
    got, want = (outcome(function, x, target) for function, x in zip((fs.compile(run), run), given))
    assert got[0] is want[0]
    torch.testing.assert_close(got[1:], want[1:])
