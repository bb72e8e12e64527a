"""How far the values of a program may be from eager's: what rounding explains.

Eager runs again with the result of every operator that rounds changed by one unit at random, and once on inputs that are no views, so that gradients are summed in
another order.  What that changes in a result (an ill-conditioned program, a rounding that is dropped between two operators), times `FACTOR`, is what the compiled one
may differ by.

An operator that adds up many terms may do so in any order: its result also changes by units of the sum of the terms' magnitudes, which the same operator finds from the
magnitudes of its operands (`SUMS`), one unit for each doubling of their number.  What the bound still finds, test_bound.py tells.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from program_inputs import Made
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FACTOR = 8
EPS = {torch.float64: 2.0 ** -50, torch.float32: 2.0 ** -22, torch.bfloat16: 2.0 ** -7, torch.complex64: 2.0 ** -22, torch.complex128: 2.0 ** -50, torch.float16: 2.0 ** -10}
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}      # what terms are added in

EXACT = {"amax", "amin", "max", "min", "maximum", "minimum", "sort", "topk", "gather", "index", "index_select", "where", "masked_fill", "clone", "copy", "cat", "stack", "relu", "neg", "abs",
         "fill", "zeros", "ones", "full", "arange", "zero", "empty", "empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "scatter", "triu", "tril", "flip", "roll", "max_pool2d_with_indices",
         "upsample_nearest2d", "upsample_nearest1d", "threshold_backward", "new_empty_strided", "slice_scatter", "select_scatter", "slice_backward", "select_backward", "embedding",
         "constant_pad_nd", "reflection_pad1d", "repeat", "eye", "lift_fresh", "masked_select", "scalar_tensor", "empty_strided", "new_empty", "resolve_conj", "sign", "sgn", "conj_physical",
         "randn_like", "repeat_interleave", "unfold_backward", "cummax"}


# kernels that scale and shift their operand, and so cancel inside what a rounding of it explains
INSIDE = {"native_group_norm", "native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
          "_softmax_backward_data", "_log_softmax_backward_data"}
# kernels that add up terms -> the operand in which they are linear, None for all
SUMS = dict.fromkeys(["sum", "mean", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm", "convolution", "convolution_backward", "cumsum", "trace", "avg_pool2d",
                      "avg_pool2d_backward", "_adaptive_avg_pool2d", "upsample_bilinear2d"])
SUMS |= dict.fromkeys(["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"], 2)
# kernels that add to memory, one term at a time: each addition may round, half a unit in the same direction
ADDITIONS = {"index_add", "index_put", "_index_put_impl", "scatter_add", "scatter_reduce", "embedding_dense_backward", "upsample_nearest1d_backward", "upsample_nearest2d_backward",
             "upsample_bilinear2d_backward", "_adaptive_avg_pool2d_backward", "col2im"}
MANY = 2 * FACTOR       # additions to one element: from there on their half units are more than FACTOR times the unit of the result
# kernels of many roundings in which nothing cancels
CHAINS = {"var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "prod", "cumprod"}
# kernels that subtract a mean -> the power of its rounding error that is left where all elements are equal
DEVIATIONS = {"var": 2, "var_mean": 2, "std": 1, "std_mean": 1}
# kernels whose result is a sum that may cancel -> how large its terms are: gelu's is 1 and an error function (or hyperbolic tangent) near -1, times half of x
CANCELLING: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": lambda x, **_: x / 2, "gelu_backward": lambda grad, x, **_: grad / 2, "lerp": lambda x, end, weight: x.abs() + (weight * end).abs(),
    "addcmul": lambda x, a, b, value=1: x.abs() + (value * a * b).abs()}
# gradients of a scaled value -> the places of gradient, scale and weight, whose product cancels
SCALED = {"native_layer_norm_backward": (0, 4, 5), "native_group_norm_backward": (0, 3, 4), "native_batch_norm_backward": (0, 6, 2)}


def with_memory(t: Any) -> Any:
    """Zeros that autograd makes without memory (the gradient of `sgn`) reach a mode below the key that knows them: kernels would read address 0."""
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device) if isinstance(t, torch.Tensor) and t._is_zerotensor() else t


def magnitude(t: Any) -> Any:
    return (t.abs().to(t.dtype) if t.dtype in EPS else t.clone()) if isinstance(t, torch.Tensor) else t


def one_for_each(value: Any) -> Any:
    """An argument with which a kernel of ADDITIONS counts what it adds to each element."""
    if isinstance(value, torch.Tensor):
        return torch.ones(value.shape, dtype=WIDER.get(value.dtype, value.dtype), device=value.device) if value.dtype in EPS else value.clone()
    return "sum" if value == "mean" else value


def inner_eps(t: torch.Tensor) -> float:
    return EPS[WIDER.get(t.dtype, t.dtype)]


def doublings(given: list[torch.Tensor]) -> float:
    return 1 + math.log2(max([1, *(t.numel() for t in given)]))


def parameters_of_layer_norm(grad: torch.Tensor, x: torch.Tensor, shape: Any, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, *_: Any) -> list[torch.Tensor]:
    """The errors of the gradients of weight and bias, to which eager adds row by row in the dtype of these."""
    rows = tuple(range(x.dim() - len(shape)))
    unit = EPS[weight.dtype] * max(1, math.prod(x.shape[:len(rows)]) / MANY)
    terms = [grad.double() * (x.double() - mean) * rstd, grad.double()]
    return [unit * (t.abs().sum(rows) if rows else t.abs()) for t in terms]


class Noise(TorchDispatchMode):
    """Each operator that rounds rounds once more, at random."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(with_memory, (args, kwargs or {}))
        name = func._schema.name.split("::")[1].rstrip("_")
        if name in INSIDE:
            args = (self.rounded(args[0].clone()), *args[1:])
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        errors = self.errors(name, func, args, kwargs, given)
        out = func(*args, **kwargs)
        for t, error in itertools.zip_longest(tree_leaves(out), errors):
            if isinstance(t, torch.Tensor) and t.dtype in EPS and t.numel() and not t._is_zerotensor() and self.rounds(name, func, t, given):
                kept = [(n, s) for n, s in zip(t.shape, t.stride()) if s]
                chain = doublings(given) * inner_eps(t) / EPS[t.dtype] if name in CHAINS else 0.0
                self.rounded(torch.as_strided(t, *zip(*kept)) if kept else t.as_strided((), ()), 1.0 + chain)
                if isinstance(error, torch.Tensor) and 0 not in t.stride():
                    t.add_((error * (self.drawn(t).abs() if name in DEVIATIONS else self.drawn(t))).to(t.dtype))
        return out

    def errors(self, name: str, func: Any, args: tuple, kwargs: dict, given: list[torch.Tensor]) -> list[Any]:
        """How far each result may be off by what is rounded before it."""
        if name in SCALED:
            parts = [args[place] for place in SCALED[name] if isinstance(args[place], torch.Tensor)]
            of_input = torch.tensor(inner_eps(args[0]) * math.prod(map(largest, parts)), dtype=torch.float64, device=args[0].device)
            return [of_input, *(parameters_of_layer_norm(*args) if name == "native_layer_norm_backward" and args[5] is not None else ())]
        if name in DEVIATIONS:
            off = (doublings(given) * inner_eps(args[0]) * largest(args[0])) ** DEVIATIONS[name]
            return [torch.tensor(off, dtype=torch.float64, device=args[0].device)]
        if name in CANCELLING:
            return [CANCELLING[name](*args, **kwargs).abs().double() * inner_eps(args[0])]
        if name not in SUMS and name not in ADDITIONS:
            return []
        linear = SUMS.get(name)
        sizes = [t.abs() if isinstance(t, torch.Tensor) and t.dtype in EPS else None for t in tree_leaves(
            func(*(tree_map(magnitude, a) if linear in (None, place) else a for place, a in enumerate(args)), **tree_map(magnitude, kwargs)))]
        if name in SUMS:
            return [None if t is None else t.double() * doublings(given) * inner_eps(t) for t in sizes]
        counts = func(*tree_map(one_for_each, args), **tree_map(one_for_each, kwargs))
        return [None if t is None else t.double() * EPS[t.dtype] * (counts.double() / MANY).clamp(min=1) for t in sizes]

    def drawn(self, like: torch.Tensor) -> torch.Tensor:
        """From a half to one, of either sign."""
        noise = torch.rand(like.shape, generator=self.generator, dtype=torch.float64, device="cpu") * 2 - 1
        return ((noise + noise.sign()) / 2).to(like.device)

    def rounded(self, t: torch.Tensor, units: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            return t.mul_((1 + EPS[t.dtype] * units * self.drawn(t)).to(torch.float64 if t.dtype in (torch.float64, torch.complex128) else torch.float32))

    def rounds(self, name: str, func: Any, t: torch.Tensor, given: list[torch.Tensor]) -> bool:
        writes = func._schema.is_mutable
        if not writes and any(t.untyped_storage()._cdata == one.untyped_storage()._cdata for one in given):
            return False
        narrowed = any(one.dtype in EPS and EPS[one.dtype] < EPS[t.dtype] for one in given)
        return narrowed or name not in EXACT | {"_to_copy"}


def largest(t: torch.Tensor) -> float:
    return float(t.abs().double().nan_to_num(0, 0, 0).max()) if t.numel() and t.dtype in EPS else 0.0


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite where one is not finite and the other is, or another infinity."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(float("inf"), float("inf"))
    return float(gap.max()) if gap.numel() else 0.0


def first_bound(want: torch.Tensor) -> float:
    """A few units in the last place of the largest element, and as many of the smallest denormals."""
    if want.dtype not in EPS:
        return 0.0
    numbers = torch.finfo(want.dtype)
    return EPS[want.dtype] * largest(want) + FACTOR * numbers.smallest_normal * numbers.eps


class NoView(torch.autograd.Function):
    """The same memory, as a tensor that is no view for autograd."""

    @staticmethod
    def forward(ctx, x):
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def without_views(made: list[Made]) -> list[Made]:
    """A compiled graph sums the gradients of an input at that input; eager sums those of a view that was written at the view, then at its base."""
    return [Made(NoView.apply(one.arg), one.leaf) if one.arg._is_view() and not one.arg.is_leaf and not one.arg.is_neg() and not one.arg.is_conj() else one
            for one in made]


class Explained:
    """How far each value of a program may be from eager's: computed when it is first asked for."""

    def __init__(self, again: Callable[..., Any]):
        self.again, self._runs = again, None

    @property
    def runs(self) -> list[Any]:
        if self._runs is None:
            try:
                self._runs = [self.again(without_views)]
            except RuntimeError:        # eager refuses the program with other histories
                self._runs = []
            for seed in range(4):
                with Noise(seed):
                    self._runs.append(self.again())
        return self._runs

    def bound(self, want: torch.Tensor, of: Callable[[Any], Any]) -> float:
        return max(FACTOR * (apart(found, want) if isinstance(found := of(run), torch.Tensor) else 0.0) for run in self.runs)


