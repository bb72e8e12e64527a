"""Float arguments of torch's functions as symbols: blocks that differ in one share a graph, with eager's values, gradients, buffers and random numbers."""
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firesteel as fs

LABELS = torch.tensor([0, 3, -100, 7])


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()


class Block(nn.Module):
    def __init__(self, fn, value):
        super().__init__()
        self.linear, self.fn, self.value = nn.Linear(8, 8), fn, value

    def forward(self, x):
        return self.fn(self.linear(x), self.value)


def heads(x):
    return x.view(1, 2, 2, 8)


FUNCTIONS = {
    "layer_norm": lambda x, v: F.layer_norm(x, (8,), eps=v), "layer_norm in half": lambda x, v: F.layer_norm(x.bfloat16(), (8,), eps=v).float(),
    "rms_norm": lambda x, v: F.rms_norm(x, (8,), eps=v), "group_norm": lambda x, v: F.group_norm(x, 2, eps=v),
    "batch_norm": lambda x, v: F.batch_norm(x, None, None, training=True, eps=v), "instance_norm": lambda x, v: F.instance_norm(x.view(4, 2, 4), eps=v),
    "attention's scale": lambda x, v: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), scale=v),
    "attention's dropout": lambda x, v: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), dropout_p=v, is_causal=True),
    "dropout": lambda x, v: F.dropout(x, v), "dropout in evaluation": lambda x, v: F.dropout(x, v, training=False) + 1,
    "dropout1d": lambda x, v: F.dropout1d(x.view(2, 2, 8), v), "alpha_dropout": lambda x, v: F.alpha_dropout(x, v, True),
    "feature_alpha_dropout": lambda x, v: F.feature_alpha_dropout(x.view(2, 2, 8), v, True),
    "drop path": lambda x, v: x * x.new_empty(4, 1).bernoulli_(1 - v) / (1 - v), "normal_": lambda x, v: x + torch.empty(20).normal_(1.0, v)[:8],
    "normal": lambda x, v: x + torch.normal(0.5, v, (8,)), "uniform_": lambda x, v: x + torch.empty(8).uniform_(-v, v),
    "smooth_l1_loss": lambda x, v: F.smooth_l1_loss(x, 2 * x.detach(), beta=v), "huber_loss": lambda x, v: F.huber_loss(x, 2 * x.detach(), delta=v),
    "cross_entropy": lambda x, v: F.cross_entropy(x, LABELS, label_smoothing=v),
    "cross_entropy, weighted": lambda x, v: F.cross_entropy(x, LABELS, torch.arange(1., 9.), label_smoothing=v),
    "cross_entropy, each": lambda x, v: F.cross_entropy(x, LABELS, label_smoothing=v, reduction="none"),
    "cross_entropy of chances": lambda x, v: F.cross_entropy(x, x.detach().softmax(1), label_smoothing=v, reduction="sum"),
    "margin_ranking_loss": lambda x, v: F.margin_ranking_loss(x, x.detach() * 2, torch.ones_like(x), margin=v),
    "triplet_margin_loss": lambda x, v: F.triplet_margin_loss(x, x * 2, x + 1, margin=v, swap=True), "pairwise_distance": lambda x, v: F.pairwise_distance(x, -x, eps=v),
    "lerp": lambda x, v: torch.lerp(x, x * 2, v), "power": lambda x, v: x.abs() ** v, "celu": F.celu, "logit": lambda x, v: torch.logit(x.sigmoid(), v),
    "nan_to_num": lambda x, v: torch.nan_to_num(x.masked_fill(x > 0, math.nan), v, -v), "isclose": lambda x, v: x * torch.isclose(x, x * 1.2, v, 0.01),
    "cosine_similarity": lambda x, v: F.cosine_similarity(x, x * x, eps=v),
    "bernoulli": lambda x, v: x * torch.bernoulli(x.detach(), v), "exponential_": lambda x, v: x + torch.empty(8).exponential_(v),
    "hinge_embedding_loss": lambda x, v: F.hinge_embedding_loss(x, x.detach().sign(), margin=v),
    "cosine_embedding_loss": lambda x, v: F.cosine_embedding_loss(x, x * x, torch.tensor([1, -1, -1, 1]), margin=v),
    "triplet_margin_loss's eps": lambda x, v: F.triplet_margin_loss(x, x * 2, x + 1, eps=v), "pad": lambda x, v: F.pad(x, (1, 2), value=v) * 2,
    "rrelu in evaluation": lambda x, v: F.rrelu(x, 0.1, v), "quantile": lambda x, v: torch.quantile(x, v, dim=1), "nanquantile": lambda x, v: x.nanquantile(v),
    "correction": lambda x, v: x.std(dim=1, correction=v), "correction of both": lambda x, v: torch.var_mean(x, dim=1, correction=v)[0],
}


def results(block, call, x):
    torch.manual_seed(3)
    out = call(x)
    return [out.detach(), *torch.autograd.grad(out.cos().sum(), [*block.parameters()]), torch.get_rng_state(), *block.buffers()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_that_differ_in_a_float_share_a_graph(name):
    compiled = fs.compile(lambda block, x: block(x), fullgraph=True)
    for value in (0.1, 0.25, 0.4):
        block, x = Block(FUNCTIONS[name], value), torch.randn(4, 8)
        for want, got in zip(results(block, block, x), results(block, lambda x: compiled(block, x), x)):
            torch.testing.assert_close(got, want, **{"rtol": 2e-2, "atol": 2e-2} if "half" in name else {})
    assert fs.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("keyword", ["momentum", "eps"])
def test_running_statistics(keyword):
    compiled = fs.compile(lambda block, x: block(x), fullgraph=True)
    for value in (0.1, 0.2, 0.3):
        eager = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, **{keyword: value}))
        block, x = copy.deepcopy(eager), torch.randn(4, 8)
        for want, got in zip(results(eager, eager, x), results(block, lambda x: compiled(block, x), x)):
            torch.testing.assert_close(got, want)
        block.eval()
        eager.eval()
        torch.testing.assert_close(compiled(block, x), eager(x))
    assert fs.counters["stats"]["unique_graphs"] <= 4


WRONG = {
    "layer_norm": lambda x, v: F.layer_norm(x, (4,), eps=v), "group_norm": lambda x, v: F.group_norm(x, 3, eps=v), "rms_norm": lambda x, v: F.rms_norm(x, (7,), eps=v),
    "batch_norm": lambda x, v: F.batch_norm(x, None, None, training=False, eps=v), "huber_loss": lambda x, v: F.huber_loss(x, x, delta=-v),
    "dropout": lambda x, v: F.dropout(x, 1 + v), "cross_entropy": lambda x, v: F.cross_entropy(x, LABELS, label_smoothing=1 + v),
    "margin": lambda x, v: F.triplet_margin_loss(x, x, x, margin=-v), "isclose": lambda x, v: torch.isclose(x, x, -v),
    "quantile": lambda x, v: torch.quantile(x, 1 + v), "bernoulli": lambda x, v: torch.bernoulli(x, 1 + v), "exponential_": lambda x, v: torch.empty(2).exponential_(-v),
    "cosine_embedding_loss": lambda x, v: F.cosine_embedding_loss(x, x, x, margin=v),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_errors_all_the_same(name):
    compiled = fs.compile(WRONG[name], dynamic=True)
    for value in (0.1, 0.2):
        for call in (WRONG[name], compiled):
            with pytest.raises((RuntimeError, ValueError)):
                call(torch.randn(4, 8), value)


def test_a_logit_whose_ends_have_changed_places():
    for eps in (0.6, 0.7, 0.8):
        x = torch.rand(40)
        torch.testing.assert_close(fs.compile(torch.logit)(x, eps), torch.logit(x, eps))


def test_methods_in_python_around_one_in_c():
    """multi_head_attention_forward calls Tensor.unflatten, which calls super().unflatten."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0)
    x = torch.randn(3, 3, 8)
    torch.testing.assert_close(fs.compile(layer, dynamic=True, fullgraph=True)(x), layer(x))
