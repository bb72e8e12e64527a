"""Operators that are called rather than lowered.

Two kinds, counted apart in `fs.counters["native"]`: those for which the library's kernel is the right answer
("library_calls": matrix products, convolutions, attention, sorting, FFT, random numbers), and those for which nobody has
written a row ("fallbacks", and "fallback:<operator>" for each).  Matrix products write into memory of ours (`out=`).
"""
from __future__ import annotations

from typing import Any

import torch

from firesteel.artifacts import counters
from firesteel.loops.lower.build import LOWERINGS, Builder
from firesteel.loops.lower.value import Tensor
from firesteel.loops.lower.views import lower_window

aten = torch.ops.aten

LIBRARY = frozenset([
    # products
    "mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "vdot", "addbmm", "ger", "outer", "_addmm_activation", "_int_mm", "linear",
    "_scaled_mm", "_cdist_forward", "_cdist_backward",
    # convolutions
    "convolution", "convolution_backward", "_convolution", "conv1d", "conv2d", "conv3d", "mkldnn_convolution", "cudnn_convolution",
    # attention
    "scaled_dot_product_attention", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
    # sorting and searching
    "sort", "topk", "kthvalue", "median", "mode", "unique_dim", "_unique2", "searchsorted", "bucketize", "msort", "argsort", "histc",
    # Fourier transforms
    "_fft_c2c", "_fft_r2c", "_fft_c2r", "stft",
    # random numbers
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "uniform", "normal",
    "normal_functional", "exponential", "geometric", "cauchy", "log_normal", "multinomial", "poisson", "native_dropout",
    "_fused_dropout", "rrelu_with_noise_functional", "firesteel::functional_aten_bernoulli__float",
    "firesteel::functional_aten_random__from",
    # pooling and resampling
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "max_pool3d_with_indices", "max_pool3d_with_indices_backward",
    "avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward",
    "adaptive_max_pool2d", "adaptive_max_pool2d_backward", "upsample_nearest2d", "upsample_nearest2d_backward",
    "upsample_bilinear2d", "upsample_bilinear2d_backward", "grid_sampler_2d", "grid_sampler_2d_backward",
    # linear algebra
    "cholesky", "cholesky_solve", "linalg_cholesky_ex", "linalg_eigh", "_linalg_eigh", "linalg_lu_factor_ex", "lu_unpack", "linalg_qr",
    "_linalg_svd", "linalg_inv_ex", "linalg_solve_triangular", "_linalg_solve_ex", "_linalg_det", "_linalg_slogdet",
    "triangular_solve", "linalg_matrix_exp",
    # writes at places that data says
    "embedding_dense_backward", "scatter_add", "index_put", "index_add", "scatter_reduce", "_embedding_bag", "_embedding_bag_backward",
    # sequences
    "_ctc_loss", "_ctc_loss_backward", "firesteel::recurrent", "firesteel::recurrent_backward",
    # results whose value or size Python needs
    "_local_scalar_dense", "nonzero", "masked_select",
])

LIBRARY_FAMILIES = ("linalg_", "_linalg_", "_fft_", "upsample_", "_upsample_", "adaptive_", "_adaptive_", "max_unpool", "fractional_max_pool",
                    "conv_", "slow_conv", "_slow_conv", "unique", "_unique", "histogram", "_flash_attention", "_efficient_attention", "_grouped_mm",
                    "_pdist", "_embedding_bag", "cholesky", "random", "binomial")

OUT_VARIANTS = {aten.mm.default: aten.mm.out, aten.bmm.default: aten.bmm.out, aten.addmm.default: aten.addmm.out,
                aten.baddbmm.default: aten.baddbmm.out}

_is_view: dict[Any, bool] = {}


@LOWERINGS.row(aten._conj.default)
def lower_conj(b: Builder, out: Any, x: Any) -> Any:
    """A lazy conjugate shares its argument's bytes but not its values: it is computed.  A number's gradient formula asks for that of the number."""
    if type(x) is not Tensor:
        return b.call(aten.scalar_tensor.default, (complex(x).conjugate(),), {"dtype": out.dtype}, out)
    return b.call(aten._conj_physical.default, (x,), {}, out)


def lower_call(b: Builder, out: Any, target: Any, args: tuple, kwargs: dict) -> Any:
    """The operator itself.  A view operator is a window on its argument's storage, described by its Spec."""
    if _returns_view(target):
        return _window(b, out, args[0])
    count(target)
    variant = OUT_VARIANTS.get(target)
    if variant is not None:
        return b.call(variant, args, kwargs, out, writes_out=True)
    return b.call(target, args, kwargs, out, written=_written(target, args, kwargs))


def _written(target: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The arguments that the operator writes to, by its schema."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    named = {a.name: v for a, v in zip(target._schema.arguments, args)} | kwargs
    values = [named.get(a.name) for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for v in values for t in (v if isinstance(v, (list, tuple)) else [v]) if type(t) is Tensor]


def count(target: Any) -> None:
    native, name = counters["native"], operator_name(target)
    if name in LIBRARY or name.startswith(LIBRARY_FAMILIES):
        native["library_calls"] += 1
    else:
        native["fallbacks"] += 1
        native[f"fallback:{name}"] += 1


def operator_name(target: Any) -> str:
    """aten operators by their bare name, all others in full."""
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema.name
        return schema.removeprefix("aten::")
    return getattr(target, "__name__", str(target))


def _returns_view(target: Any) -> bool:
    """Does every result alias an argument that is not written?"""
    found = _is_view.get(target)
    if found is None:
        returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
        found = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        _is_view[target] = found
    return found


def _window(b: Builder, out: Any, x: Tensor) -> Any:
    if isinstance(out, (tuple, list)) and not hasattr(out, "strides"):
        return tuple(lower_window(b, spec, x) for spec in out)
    return lower_window(b, out, x)
