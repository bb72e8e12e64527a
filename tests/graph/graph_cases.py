"""Calls of torch functions, with the tensors they take: what the rules, the tracer and the decompositions must agree with eager on.

`CASES[name]` is (function, tensors).  The function takes the tensors and gives a tensor or several; those that require grad are
differentiated too.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

CASES: dict[str, tuple[Callable[..., object], Callable[[], list[Tensor]]]] = {}


def x(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True, seed: int = 0) -> Tensor:
    """Values around zero, none at a kink of an activation."""
    generator = torch.Generator().manual_seed(sum(shape) * 7 + seed)
    made = (torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2.0137).to(dtype)
    return made.requires_grad_(grad)


def positive(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return x(*shape, dtype=dtype, grad=False).abs().add(0.05).div(2.2).requires_grad_(grad)


def index(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


def last(t: Tensor) -> Tensor:
    """In channels-last format."""
    return t.detach().contiguous(memory_format=torch.channels_last).requires_grad_(t.requires_grad)


def case(name: str, function: Callable[..., object], *tensors: Tensor) -> None:
    assert name not in CASES, name
    CASES[name] = function, tensors


BF16, F64 = torch.bfloat16, torch.float64

# ---------------------------------------------------------------- normalisation

for _dtype in (torch.float32, F64, BF16):
    _n = str(_dtype).removeprefix("torch.")
    case(f"layer_norm {_n}", lambda a, w, b: F.layer_norm(a, (6,), w, b), x(2, 3, 6, dtype=_dtype), x(6, dtype=_dtype), x(6, dtype=_dtype))
    case(f"group_norm {_n}", lambda a, w, b: F.group_norm(a, 2, w, b), x(2, 4, 5, dtype=_dtype), x(4, dtype=_dtype), x(4, dtype=_dtype))
    case(f"rms_norm {_n}", lambda a, w: F.rms_norm(a, (6,), w), x(2, 3, 6, dtype=_dtype), x(6, dtype=_dtype))
    case(f"softmax {_n}", lambda a: F.softmax(a, 1), x(3, 5, 2, dtype=_dtype))
    case(f"log_softmax {_n}", lambda a: F.log_softmax(a, -1), x(3, 5, dtype=_dtype))
case("layer_norm two dims, no affine", lambda a: F.layer_norm(a, (3, 6)), x(2, 3, 6))
case("layer_norm of a transpose", lambda a, w, b: F.layer_norm(a.transpose(0, 2), (2,), w, b), x(2, 3, 6), x(2), x(2))
case("layer_norm mixed", lambda a, w, b: F.layer_norm(a, (6,), w, b), x(2, 3, 6, dtype=BF16), x(6), x(6))
case("group_norm channels last", lambda a, w, b: F.group_norm(a, 2, w, b), last(x(2, 4, 3, 3)), x(4), x(4))
case("group_norm no affine", lambda a: F.group_norm(a, 2), x(2, 4, 3, 3))
case("softmax transposed", lambda a: F.softmax(a.t(), 0), x(3, 5))
case("softmax in float32", lambda a: F.softmax(a, -1, dtype=torch.float32), x(3, 5, dtype=BF16))
case("logsumexp", lambda a: (torch.logsumexp(a, 1), torch.logsumexp(a, (0, 1), keepdim=True)), x(3, 5))


def _batch_norm(training: bool) -> Callable[..., object]:
    return lambda a, w, b, m, v: F.batch_norm(a, m, v, w, b, training, 0.3)


for _training in (True, False):
    _t = "train" if _training else "eval"
    case(f"batch_norm 2d {_t}", _batch_norm(_training), x(4, 3, 5, 5), x(3), x(3), x(3, grad=False), positive(3, grad=False))
    case(f"batch_norm 1d {_t}", _batch_norm(_training), x(4, 3), x(3), x(3), x(3, grad=False), positive(3, grad=False))
    case(f"batch_norm channels last {_t}", _batch_norm(_training), last(x(4, 3, 5, 5)), x(3), x(3), x(3, grad=False), positive(3, grad=False))
    case(f"batch_norm bf16 {_t}", _batch_norm(_training), x(4, 3, 5, dtype=BF16), x(3), x(3), x(3, grad=False), positive(3, grad=False))
    case(f"batch_norm no affine {_t}", lambda a, m, v, training=_training: F.batch_norm(a, m, v, None, None, training),
         x(4, 3, 5), x(3, grad=False), positive(3, grad=False))
case("batch_norm no statistics", lambda a, w, b: F.batch_norm(a, None, None, w, b, True), x(4, 3, 5), x(3), x(3))
case("instance_norm", lambda a, w, b: F.instance_norm(a, None, None, w, b), x(2, 3, 4, 4), x(3), x(3))

# ---------------------------------------------------------------- losses

for _reduction in ("none", "mean", "sum"):
    case(f"mse {_reduction}", lambda a, b, r=_reduction: F.mse_loss(a, b, reduction=r), x(3, 4), x(3, 4, seed=1))
    case(f"l1 {_reduction}", lambda a, b, r=_reduction: F.l1_loss(a, b, reduction=r), x(3, 4), x(3, 4, seed=1))
    case(f"smooth_l1 {_reduction}", lambda a, b, r=_reduction: F.smooth_l1_loss(a, b, reduction=r, beta=0.7), x(3, 4), x(3, 4, seed=1))
    case(f"huber {_reduction}", lambda a, b, r=_reduction: F.huber_loss(a, b, reduction=r, delta=0.6), x(3, 4), x(3, 4, seed=1))
    case(f"bce {_reduction}", lambda a, b, w, r=_reduction: F.binary_cross_entropy(a, b, w, reduction=r), positive(3, 4),
         positive(3, 4, grad=False), positive(4, grad=False))
    case(f"bce logits {_reduction}", lambda a, b, w, r=_reduction: F.binary_cross_entropy_with_logits(a, b, pos_weight=w, reduction=r),
         x(3, 4), positive(3, 4, grad=False), positive(4, grad=False))
    case(f"cross_entropy {_reduction}", lambda a, i, r=_reduction: F.cross_entropy(a, i, reduction=r), x(5, 4), index(4, 5))
    case(f"cross_entropy weighted {_reduction}", lambda a, i, w, r=_reduction: F.cross_entropy(a, i, w, reduction=r, ignore_index=1),
         x(5, 4), index(4, 5), positive(4, grad=False))
    case(f"cross_entropy 2d {_reduction}", lambda a, i, r=_reduction: F.cross_entropy(a, i, reduction=r, ignore_index=0), x(2, 4, 3, 3), index(4, 2, 3, 3))
    case(f"soft_margin {_reduction}", lambda a, b, r=_reduction: F.soft_margin_loss(a, b, reduction=r), x(3, 4), x(3, 4, grad=False, seed=1).sign())
case("cross_entropy smoothed", lambda a, i: F.cross_entropy(a, i, label_smoothing=0.1), x(5, 4), index(4, 5))
case("cross_entropy of one row", lambda a, i: F.cross_entropy(a, i), x(4), index(4))
case("kl_div", lambda a, b: F.kl_div(F.log_softmax(a, -1), b, reduction="batchmean"), x(3, 4), positive(3, 4, grad=False))
case("nll bf16", lambda a, i: F.cross_entropy(a, i), x(5, 4, dtype=BF16), index(4, 5))

# ---------------------------------------------------------------- activations

for _name in ("gelu", "silu", "mish", "elu", "celu", "selu", "relu", "relu6", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid",
              "softplus", "logsigmoid", "softshrink", "hardshrink", "tanhshrink", "softsign", "sigmoid", "tanh"):
    _fn = getattr(F, _name) if hasattr(F, _name) else getattr(torch, _name)
    case(_name, _fn, x(4, 5))
    case(f"{_name} bf16", _fn, x(4, 5, dtype=BF16))
case("gelu tanh", lambda a: F.gelu(a, approximate="tanh"), x(4, 5))
case("glu", lambda a: F.glu(a, 1), x(3, 6, 2))
case("prelu", F.prelu, x(3, 4, 2), x(4))
case("threshold", lambda a: F.threshold(a, 0.1, 20.0), x(4, 5))
case("inplace relu", lambda a: F.relu(a * 1.5, inplace=True), x(4, 5))

# ---------------------------------------------------------------- convolution, pooling, resampling

case("conv2d", lambda a, w, b: F.conv2d(a, w, b, stride=2, padding=1), x(2, 3, 7, 7), x(4, 3, 3, 3), x(4))
case("conv2d channels last", lambda a, w: F.conv2d(a, w, padding=1), last(x(2, 3, 7, 7)), x(4, 3, 3, 3))
case("conv2d groups", lambda a, w, b: F.conv2d(a, w, b, groups=2, dilation=2), x(2, 4, 7, 7), x(4, 2, 3, 3), x(4))
case("conv2d unbatched", lambda a, w, b: F.conv2d(a, w, b), x(3, 7, 7), x(4, 3, 3, 3), x(4))
case("conv1d", lambda a, w, b: F.conv1d(a, w, b, padding=1), x(2, 3, 7), x(4, 3, 3), x(4))
case("conv1d transposed weight", lambda a, w: F.conv1d(a, w.transpose(1, 2)), x(2, 3, 7), x(4, 3, 3))
case("conv1d of one channel, transposed", lambda a, w: F.conv1d(a.transpose(1, 2), w), x(2, 7, 1), x(4, 1, 3))
case("conv1d of a transpose", lambda a, w: F.conv1d(a.transpose(1, 2), w), x(2, 7, 3), x(4, 3, 3))
case("conv_transpose1d transposed weight", lambda a, w: F.conv_transpose1d(a, w.transpose(1, 2)), x(2, 3, 7), x(3, 3, 4))
case("conv3d", lambda a, w, b: F.conv3d(a, w, b), x(1, 2, 4, 4, 4), x(3, 2, 2, 2, 2), x(3))
case("conv_transpose2d", lambda a, w, b: F.conv_transpose2d(a, w, b, stride=2, output_padding=1), x(2, 3, 4, 4), x(3, 2, 3, 3), x(2))
case("max_pool2d", lambda a: F.max_pool2d(a, 2), x(2, 3, 6, 6))
case("max_pool2d ceil", lambda a: F.max_pool2d(a, 3, 2, padding=1, ceil_mode=True), x(2, 3, 6, 6))
case("max_pool1d", lambda a: F.max_pool1d(a, 2), x(2, 3, 6))
case("max_pool1d of a transpose", lambda a: F.max_pool1d(a.transpose(1, 2), 2), x(2, 7, 3))
case("avg_pool2d", lambda a: F.avg_pool2d(a, 2, padding=1), x(2, 3, 6, 6))
case("avg_pool2d channels last", lambda a: F.avg_pool2d(a, 2), last(x(2, 3, 6, 6)))
case("adaptive_avg_pool2d one", lambda a: F.adaptive_avg_pool2d(a, 1), x(2, 3, 6, 6))
case("adaptive_avg_pool2d", lambda a: F.adaptive_avg_pool2d(a, (3, 2)), x(2, 3, 6, 6))
case("adaptive_max_pool2d", lambda a: F.adaptive_max_pool2d(a, 3), x(2, 3, 6, 6))
case("interpolate nearest", lambda a: F.interpolate(a, scale_factor=2), x(2, 3, 4, 4))
case("interpolate nearest size", lambda a: F.interpolate(a, size=(5, 7)), x(2, 3, 4, 4))
case("interpolate bilinear", lambda a: F.interpolate(a, size=(5, 7), mode="bilinear"), x(2, 3, 4, 4))
case("pad constant", lambda a: F.pad(a, (1, 2, 0, 1), value=1.5), x(3, 4, 5))
case("pad reflect", lambda a: F.pad(a, (1, 2), mode="reflect"), x(3, 4, 5))
case("pad replicate", lambda a: F.pad(a, (1, 2), mode="replicate"), x(3, 4, 5))
case("pixel_shuffle", lambda a: F.pixel_shuffle(a, 2), x(2, 8, 3, 3))
case("pixel_unshuffle", lambda a: F.pixel_unshuffle(a, 2), x(2, 2, 6, 6))
case("unfold", lambda a: F.unfold(a, 2), x(2, 3, 4, 4))

# ---------------------------------------------------------------- products, attention, recurrent cells

case("linear", F.linear, x(2, 3, 4), x(5, 4), x(5))
case("linear no bias", F.linear, x(3, 4), x(5, 4))
case("matmul broadcast", torch.matmul, x(2, 1, 3, 4), x(5, 4, 2))
case("matmul vector", torch.matmul, x(3, 4), x(4))
case("baddbmm", lambda a, b, c: torch.baddbmm(a, b, c, beta=0.5, alpha=2), x(2, 3, 5), x(2, 3, 4), x(2, 4, 5))
case("addmv", lambda a, b, c: torch.addmv(a, b, c, beta=0.5), x(3), x(3, 4), x(4))
case("addmv of nothing", lambda a, b, c, d: (torch.addmv(a, c, d), torch.addmv(b, c, d, beta=0.5), torch.addmv(b, c, d, beta=0)),
     x(3, grad=False), x(1, grad=False), x(3, 0, grad=False), x(0, grad=False))
case("dot", torch.dot, x(5), x(5, seed=1))
case("outer", torch.outer, x(5), x(3))
case("einsum", lambda a, b: torch.einsum("bij,bjk->bik", a, b), x(2, 3, 4), x(2, 4, 5))
case("bilinear", F.bilinear, x(3, 4), x(3, 5), x(2, 4, 5), x(2))
case("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), x(2, 2, 4, 8), x(2, 2, 4, 8, seed=1), x(2, 2, 4, 8, seed=2))
case("attention causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), x(2, 2, 4, 8), x(2, 2, 4, 8, seed=1), x(2, 2, 4, 8, seed=2))
case("attention of views", lambda a: F.scaled_dot_product_attention(*(t.view(2, 4, 2, 8).transpose(1, 2) for t in a.split(16, 2)), is_causal=True), x(2, 4, 48))
case("attention mask", lambda q, k, m: F.scaled_dot_product_attention(q, k, k, attn_mask=m), x(2, 2, 4, 8), x(2, 2, 4, 8, seed=1), x(4, 4, grad=False) > 0.5)
case("lstm_cell", lambda a, h, c, w, u, p, q: torch.lstm_cell(a, (h, c), w, u, p, q), x(3, 4), x(3, 5), x(3, 5, seed=1), x(20, 4), x(20, 5), x(20), x(20, seed=1))
case("gru_cell", torch.gru_cell, x(3, 4), x(3, 5), x(15, 4), x(15, 5), x(15), x(15, seed=1))

# ---------------------------------------------------------------- linear algebra, Fourier transforms

case("ormqr", lambda a, b: torch.ormqr(*torch.geqrf(a), b), x(2, 4, 3, grad=False), x(2, 4, 5, grad=False))
case("lstsq of a batch", lambda a, b, c: (torch.linalg.lstsq(a, b)[0], torch.linalg.lstsq(a, c)[0]), x(2, 3, 4, grad=False), x(2, 3, 5, grad=False), x(2, 3, grad=False))
case("lstsq, batches broadcast", lambda a, b: torch.linalg.lstsq(a, b)[0], x(1, 3, 4, grad=False), x(2, 3, 5, grad=False))
for _dims in ((0, 1), (2, 0), (0, 1, 2), (2, 0, 1), (1,)):
    case(f"rfftn {_dims}", lambda a, dim=_dims: (torch.fft.rfftn(a, dim=dim), torch.fft.rfftn(a.transpose(0, 2), dim=dim)), x(4, 6, 3, grad=False))
    case(f"irfftn {_dims}", lambda a, dim=_dims: (torch.fft.irfftn(a, dim=dim), torch.fft.irfftn(a.transpose(0, 2), dim=dim)), x(4, 6, 3, grad=False).to(torch.complex64))
    case(f"fftn {_dims}", lambda a, dim=_dims: (torch.fft.fftn(a, dim=dim), torch.fft.ifftn(a.mT, dim=dim)), x(4, 6, 3, grad=False).to(torch.complex64))
case("fftn of four dims", lambda a: torch.fft.fftn(a.permute(1, 3, 0, 2)), x(2, 3, 4, 5, grad=False).to(torch.complex64))
case("irfft of expanded batches", lambda a: torch.fft.irfft(a.expand(5, 3, 4, 2), dim=1), x(3, 1, 1, grad=False).to(torch.complex64))

# ---------------------------------------------------------------- indexing and views

case("embedding", lambda w, i: F.embedding(i, w, padding_idx=2), x(7, 4), index(7, 3, 2))
case("index", lambda a, i: a[:, i], x(3, 5, 2), index(5, 4))
case("index two", lambda a, i, j: a[i, :, j], x(3, 5, 2), index(3, 4), index(2, 4))
case("gather", lambda a, i: a.gather(1, i), x(3, 5), index(5, 3, 2))
case("index_select", lambda a, i: a.index_select(1, i), x(3, 5), index(5, 4))
case("scatter_add", lambda a, i, b: a.scatter_add(1, i, b), x(3, 5), index(5, 3, 2), x(3, 2))
case("index_add", lambda a, i, b: a.index_add(0, i, b), x(5, 3), index(5, 4), x(4, 3))
case("masked_fill", lambda a, m: a.masked_fill(m, -1e9), x(3, 4), x(3, 4, grad=False) > 0)
case("where", lambda m, a, b: torch.where(m, a, b), x(3, 1, grad=False) > 0, x(3, 4), x(4))
case("views", lambda a: (a.t()[1:].reshape(-1), a.unfold(0, 2, 1), a.diagonal(), a[None, :, ::2].expand(3, -1, -1), a.flatten().unflatten(0, (2, -1))), x(4, 6))
case("split and join", lambda a: torch.cat([torch.stack(a.unbind(0), 1), *a.t().chunk(2, 1)], 1), x(4, 6))
case("roll, flip, tril", lambda a: a.roll(2, 1).flip(0).tril() + a.triu(1), x(4, 4))
case("repeat", lambda a: (a.repeat(2, 3), a.repeat_interleave(2, 0)), x(2, 3))
case("cumulative", lambda a: (a.cumsum(0), a.cumprod(1), torch.logcumsumexp(a, 1)), x(3, 4))
case("sort", lambda a: (a.sort(1)[0], a.topk(2, 0)[0]), x(3, 4))
case("extremes", lambda a: (a.amax(1), a.max(0)[0], a.min(), a.detach().aminmax(dim=1)[0], a.argmax(1)), x(3, 4))
case("moments", lambda a: (a.var(1), a.std(), torch.var_mean(a, (0, 1), correction=0)[0], a.norm(), a.norm(3, 1), a.mean(1)), x(3, 4))
case("products", lambda a: (a.prod(1), a.prod(), torch.nansum(a, 0)), x(3, 4))
case("lerp and addc", lambda a, b, c: (a.lerp(b, 0.3), a.lerp(b, c), a.addcmul(b, c, value=2), a.addcdiv(b, c.abs() + 1, value=0.5)), x(3, 4), x(3, 4, seed=1), x(3, 4, seed=2))
case("clamp", lambda a, b: (a.clamp(-0.5, 0.5), a.clamp(max=b), a.clamp_min(0.1)), x(3, 4), x(4))
case("dropout of nothing", lambda a: F.dropout(a, 0.0, True), x(3, 4))
case("casts", lambda a: (a.double() * 2).to(torch.bfloat16).float() + a.long(), x(3, 4))
case("diag_embed, trace", lambda a: (torch.diag_embed(a, 1), torch.diag_embed(a).sum(0).trace()), x(3, 4))
case("complex", lambda a: torch.view_as_real(torch.complex(a, a * 2) * 1j).sum() + torch.view_as_complex(a.view(2, 2, 2)).abs().sum(), x(4, 2))
