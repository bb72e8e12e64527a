"""Every rule knows what eager gives: shape, strides, offset, dtype, of every sample and of every operator in every case."""
import pytest
import torch
import torch.nn.functional as F
from graph_cases import CASES
from graph_compare import RuleChecker, check_rule, run_with_grads
from optable import SAMPLES

import firesteel as fs
from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.rules.base import RULES

aten = torch.ops.aten


@pytest.mark.parametrize("op", list(SAMPLES), ids=str)
def test_rule_agrees_with_eager_on_samples(op):
    for sample in SAMPLES[op]:
        args, kwargs = sample.make()
        check_rule(op, args, kwargs)


@pytest.mark.parametrize("name", CASES)
def test_rules_agree_with_eager_inside_of_programs(name):
    function, tensors = CASES[name]
    checker = RuleChecker()
    with checker:
        run_with_grads(function, tensors)
    assert not checker.wrong, "\n".join(checker.wrong)
    assert checker.checked


def test_most_rules_are_checked():
    """A rule that no sample reaches can not be trusted; this number may only grow."""
    checked = set(SAMPLES)
    for function, tensors in CASES.values():
        checker = RuleChecker()
        with checker:
            run_with_grads(function, tensors)
        checked |= checker.checked
    assert len(checked & set(RULES)) >= 330


@pytest.mark.parametrize("pool", [F.max_pool1d, torch.max_pool1d], ids=["functional", "torch"])
def test_pooling_without_gradients_gives_a_contiguous_result(pool):
    x = torch.randn(2, 7, 3).transpose(1, 2)
    compiled = fs.compile(lambda x: pool(x, 2), backend="aot_eager")
    for case in (x, x.detach().requires_grad_()):
        assert compiled(case).stride() == pool(case, 2).stride()
    with torch.no_grad():
        assert compiled(case).stride() == pool(case, 2).stride()
    torch.testing.assert_close(fs.compile(lambda x: F.max_pool1d(x, 3, None, 1, ceil_mode=True), backend="aot_eager")(x), F.max_pool1d(x, 3, None, 1, ceil_mode=True))


@pytest.mark.parametrize("call", [
    lambda: aten.add.Tensor(torch.zeros(3), torch.zeros(4)),
    lambda: aten.mm.default(torch.zeros(3, 4), torch.zeros(3, 4)),
    lambda: aten.mm.default(torch.zeros(3, 4), torch.zeros(4, 3, dtype=torch.float64)),
    lambda: aten.view.default(torch.zeros(3, 4), [5]),
    lambda: aten.view.default(torch.zeros(3, 4).t(), [12]),
    lambda: aten.select.int(torch.zeros(3, 4), 0, 3),
    lambda: aten.permute.default(torch.zeros(3, 4), [0, 0]),
    lambda: aten.sum.dim_IntList(torch.zeros(3), [1]),
    lambda: aten.cat.default([torch.zeros(3, 4), torch.zeros(3, 5)], 0),
    lambda: aten.expand.default(torch.zeros(3), [4]),
    lambda: aten.add_.Tensor(torch.zeros(3), torch.zeros(2, 3)),
    lambda: aten.add_.Tensor(torch.zeros(3, dtype=torch.int64), torch.zeros(3)),
    lambda: aten.convolution.default(torch.zeros(1, 3, 4, 4), torch.zeros(2, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
], ids=range(13))
def test_a_bad_call_raises_as_eager_does(call):
    with pytest.raises((RuntimeError, IndexError)) as eager:
        call()
    with AbstractWorld().active(), pytest.raises((RuntimeError, IndexError)) as ours:
        call()
    assert ours.type is eager.type or ours.type is RuntimeError


T = torch.rand(4, 5).t()
LAST = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
ROWS, PLACES = torch.tensor([0, 1]), torch.zeros(5, 4, dtype=torch.int64)


@pytest.mark.parametrize("call", {
    "masked_fill": lambda f: f(aten.masked_fill.Scalar, T, T > 0.5, 1.0),
    "masked_fill_last": lambda f: f(aten.masked_fill.Scalar, LAST, LAST > 0.5, 1.0),
    "masked_scatter": lambda f: f(aten.masked_scatter.default, T, T > 0.5, torch.rand(20)),
    "scatter": lambda f: f(aten.scatter.src, T, 0, PLACES, T),
    "scatter_add": lambda f: f(aten.scatter_add.default, T, 0, PLACES, T),
    "index_add": lambda f: f(aten.index_add.default, T, 0, ROWS, T[:2]),
    "index_copy": lambda f: f(aten.index_copy.default, T, 0, ROWS, T[:2]),
    "index_fill": lambda f: f(aten.index_fill.int_Scalar, T, 0, ROWS, 1.0),
    "roll": lambda f: f(aten.roll.default, T, [1], [0]),
    "roll_last": lambda f: f(aten.roll.default, LAST, [1, 2], [0, 1]),
    "roll_flat": lambda f: f(aten.roll.default, T, [1]),
    "safe_softmax": lambda f: f(aten._safe_softmax.default, T, 0),
    "bce": lambda f: f(aten.binary_cross_entropy.default, T, T, None, 0),
    "bce_with_logits": lambda f: f(aten.binary_cross_entropy_with_logits.default, T.contiguous(), T.double(), None, None, 0),
    "soft_margin": lambda f: f(aten.soft_margin_loss.default, T.bfloat16(), T, 0),
    "huber": lambda f: f(aten.huber_loss.default, T, T.double(), 0, 1.0),
    "bernoulli": lambda f: f(aten.bernoulli.default, T),
    "normal": lambda f: f(aten.normal.Tensor_Tensor, T, T.double()),
    "normal_std": lambda f: f(aten.normal.float_Tensor, 0.0, T),
}.items(), ids=lambda item: item[0])
def test_rules_know_layouts_and_dtypes_of_mixed_calls(call):
    call[1](lambda op, *args: check_rule(op, args, {}))
