"""Every rule knows what eager gives: shape, strides, offset, dtype, of every sample and of every operator in every case."""
import pytest
import torch
from graph_cases import CASES
from graph_compare import RuleChecker, check_rule, run_with_grads
from optable import SAMPLES

from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.rules import RULES

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
