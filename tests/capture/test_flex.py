"""flex_attention with functions of scores and masks: one graph, values of eager, gradients of the dense formula."""
import math
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import firesteel as fs

B, H, M, N, E = 2, 4, 24, 24, 8
torch.manual_seed(0)
BIAS, TABLE, DOCUMENT = torch.randn(H), torch.randn(H, M + N), torch.randint(0, 3, (B, M))
SCORES = {
    "none": None, "relative": lambda s, b, h, i, j: s + (i - j) * 0.1, "alibi": lambda s, b, h, i, j: s + BIAS[h] * (i - j),
    "cap": lambda s, b, h, i, j: torch.tanh(s / 5) * 5, "table": lambda s, b, h, i, j: s + TABLE[h, i - j + N],
    "where": lambda s, b, h, i, j: torch.where(i % 2 == 0, s, s * 2)}
MASKS = {"none": None, "causal": lambda b, h, i, j: i >= j, "documents": lambda b, h, i, j: (DOCUMENT[b, i] == DOCUMENT[b, j]) & (i >= j),
         "empty rows": lambda b, h, i, j: (i >= j) & (i > 3)}


def dense(q, k, v, score, mask):
    """The meaning, with indices that broadcast."""
    places = [torch.arange(n).view([-1 if d == k else 1 for k in range(4)]) for d, n in enumerate((B, H, M, N))]
    scores = q @ k.transpose(-2, -1) / math.sqrt(E)
    scores = scores if score is None else score(scores, *places)
    if mask is not None:
        scores = scores.masked_fill(~mask(*places), -math.inf)
    return torch._safe_softmax(scores, -1) @ v


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_flex_attention(score, mask):
    blocks = None if MASKS[mask] is None else create_block_mask(MASKS[mask], B, H, M, N, device="cpu")

    def f(q, k, v):
        return flex_attention(q, k, v, score_mod=SCORES[score], block_mask=blocks).sin()
    given = [torch.randn(B, H, n, E) for n in (M, N, N)]
    compiled = fs.compile(f, fullgraph=True)
    want = dense(*given, SCORES[score], MASKS[mask]).sin()
    torch.testing.assert_close(compiled(*given), want)
    tracked = [t.clone().requires_grad_() for t in given]
    ours = torch.autograd.grad(compiled(*tracked).square().sum(), tracked)
    theirs = torch.autograd.grad(dense(*tracked, SCORES[score], MASKS[mask]).sin().square().sum(), tracked)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_as_eager_says():
    blocks = create_block_mask(MASKS["causal"], B, H, M, N, device="cpu")

    def f(q, k, v):
        return flex_attention(q, k, v, score_mod=SCORES["alibi"], block_mask=blocks, scale=0.3, enable_gqa=True)
    given = [torch.randn(B, H, M, E), torch.randn(B, 2, N, E), torch.randn(B, 2, N, E)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(fs.compile(f, fullgraph=True)(*given), f(*given))


def test_a_learnt_bias_gets_a_gradient():
    bias = torch.randn(H, requires_grad=True)

    def f(q):
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + bias[h] * (i - j))
    q = torch.randn(B, H, M, E)
    ours = torch.autograd.grad(fs.compile(f, fullgraph=True)(q).square().sum(), bias)
    theirs = torch.autograd.grad(dense(q, q, q, lambda s, b, h, i, j: s + bias[h] * (i - j), None).square().sum(), bias)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
