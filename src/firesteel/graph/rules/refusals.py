"""What eager refuses: conditions on the arguments of operators, beside those that rules need for their own sums.

A row has the signature of its operator, as a rule has, and raises where eager raises for metadata alone; what depends on data is found at run
time.  The sentence is short: whoever reports the error to a user lets eager say it.

    refuses("gather")       # runs before the rule of gather
"""
from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from firesteel.graph.rules.base import RULES, broadcast, check, find, is_integral, wrap_dim
from firesteel.graph.sizes import must, must_match, product, same
from firesteel.graph.spec import Spec
from firesteel.sym.expr import Expr, Size, ge, le, ne
from firesteel.table import Table

REFUSALS: Table[Callable[..., None]] = Table("refusal", "graph/rules/refusals.py")
MOST_DIMS = 64      # of a tensor that a reduction's bit set of dimensions can name


def refuses(names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: a row for each of the operators named, those of other torch versions left out."""
    def register(function: Callable[..., None]) -> Callable[..., None]:
        for name in names.split():
            op = find(name)
            if op is not None:
                REFUSALS.add(op, function)
        return function
    return register


def checked_rule(op: OpOverload) -> Callable[..., Any] | None:
    """The rule of an operator behind its refusals."""
    rule, refusal = RULES.get(op), REFUSALS.get(op)
    if rule is None:
        return None
    probed = rule.__module__ in PROBED and op not in NOT_PROBED
    if refusal is None and not probed:
        return rule

    @functools.wraps(rule)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if probed:
            ask_kernel(op, args, kwargs)
        if refusal is not None:
            refusal(*args, **kwargs)
        return rule(*args, **kwargs)
    return checked


def known(value: Any) -> bool:
    """Is it a number now?"""
    return isinstance(value, (int, float))


def within(value: Any, low: Any, high: Any, message: str) -> None:
    """low <= value <= high, with None for no limit; sizes may be symbols."""
    for condition in (ge(value, low) if low is not None else True, le(value, high) if high is not None else True):
        must(condition, message)


# ---------------------------------------------------------------- dtypes that a kernel does not know

PROBED = ("firesteel.graph.rules.pointwise", "firesteel.graph.rules.reduce")        # whose operators take sizes of 1
NOT_PROBED = frozenset(find(name) for name in (       # these need more elements, or warn of a single one
    "topk", "kthvalue", "copy", "_amp_update_scale_", "var", "std", "var.dim", "std.dim", "var.correction", "std.correction",
    "var_mean.correction", "std_mean.correction"))
COMMON = (torch.float32, torch.float64)
_fine: set[tuple[int, torch.dtype]] = set()     # operators that take tensors of one common dtype, whatever the numbers beside them


def ask_kernel(op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises what eager's kernel raises for these dtypes and numbers: it is called on tensors of one element, once for each kind of call."""
    operands = [a for a in (*args, *kwargs.values()) if type(a) is Spec]
    first = operands[0].dtype if operands else torch.float32
    common = first in COMMON and all(x.dtype is first for x in operands)
    if common and (id(op), first) in _fine or any(x.device.type != "cpu" for x in operands):
        return
    error = _kernel_error(op, tuple(map(_kind, args)), tuple((k, _kind(v)) for k, v in kwargs.items()))
    if error is not None:
        raise type(error)(*error.args)
    if common:
        _fine.add((id(op), first))


def _kind(value: Any) -> Any:
    """An argument, as far as it matters here, hashable; its type is part of it, since 1, 1.0 and True are equal."""
    if type(value) is Spec:
        return Spec, value.dtype, len(value.shape)
    if type(value) is Expr:
        return float if value.dtype == "f64" else int, 1
    return (list, tuple(map(_kind, value))) if isinstance(value, (list, tuple)) else (type(value), value)


def _example(kind: Any) -> Any:
    if kind[0] is Spec:
        return torch.ones((1,) * kind[2], dtype=kind[1])
    return [_example(k) for k in kind[1]] if kind[0] is list else kind[1]


@functools.lru_cache(4096)
def _kernel_error(op: OpOverload, args: tuple, kwargs: tuple) -> Exception | None:
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            op(*map(_example, args), **{k: _example(v) for k, v in kwargs})
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            return error.with_traceback(None)
    return None


# ---------------------------------------------------------------- pointwise

@refuses("softshrink")
def softshrink(x: Spec, lambd: Any = 0.5) -> None:
    check(not known(lambd) or lambd >= 0, f"lambda must be greater or equal to 0, but found to be {lambd}.")


@refuses("gelu")
def gelu(x: Spec, *, approximate: str = "none") -> None:
    check(approximate in ("none", "tanh"), "approximate argument must be either none or tanh.")


@refuses("huber_loss")
def huber_loss(x: Spec, target: Spec, reduction: int = 1, delta: float = 1.0) -> None:
    check(not known(delta) or delta > 0, "huber_loss does not support non-positive values for delta.")


@refuses("smooth_l1_loss")
def smooth_l1_loss(x: Spec, target: Spec, reduction: int = 1, beta: float = 1.0) -> None:
    check(not known(beta) or beta >= 0, "smooth_l1_loss does not support negative values for beta.")


@refuses("multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(x: Spec, target: Spec, reduction: int) -> None:
    shapes = f"target size: {list(target.shape)} for input of size: {list(x.shape)}"
    check(len(x.shape) <= 2 and x.shape[-1:] != (0,), f"Expected non-empty vector or matrix with optional 0-dim batch size, but got: {list(x.shape)}")
    check(len(target.shape) == len(x.shape) or len(x.shape) < 2 and product(target.shape) == product(x.shape), f"inconsistent {shapes}")
    for wanted, given in zip(x.shape, target.shape):
        must_match(wanted, given, f"inconsistent {shapes}")


@refuses("masked_fill.Tensor")
def masked_fill_tensor(x: Spec, mask: Spec, value: Spec) -> None:
    check(not value.shape, f"masked_fill_ only supports a 0-dimensional value tensor, but got tensor with {len(value.shape)} dimension(s).")
    check(torch.can_cast(value.dtype, x.dtype) or not value.dtype.is_complex, f"value cannot be converted to type {x.dtype} without overflow")


@refuses("masked_fill.Scalar")
def masked_fill_scalar(x: Spec, mask: Spec, value: Any) -> None:
    check(not isinstance(value, complex) or x.dtype.is_complex, f"value cannot be converted to type {x.dtype} without overflow")
    if type(value) is int and is_integral(x.dtype) and x.dtype is not torch.bool:
        limits = torch.iinfo(x.dtype)
        check(min(limits.min, -limits.max) <= value <= limits.max, f"value cannot be converted to type {x.dtype} without overflow")


# ---------------------------------------------------------------- reductions

@refuses("amax amin aminmax")
def amax(x: Spec, dim: Any = (), keepdim: bool = False) -> None:
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    check(len(x.shape) <= MOST_DIMS, f"only tensors with up to {MOST_DIMS} dims are supported")
    check(not x.dtype.is_complex, "amax is not implemented for complex tensors")
    if not dims:
        not_nothing(x)
    not_empty(x, dims)


def not_empty(x: Spec, dims: Sequence[int]) -> None:
    for dim in dims:
        place = wrap_dim(dim, len(x.shape))
        if x.shape and same(x.shape[place], 0):
            raise IndexError(f"Expected reduction dim {place} to have non-zero size.")


@refuses("median nanmedian")
def median_all(x: Spec) -> None:
    check(not x.dtype.is_complex, "median is not implemented for complex tensors")


@refuses("max min")
def max_all(x: Spec) -> None:
    check(not x.dtype.is_complex, "max is not implemented for complex tensors")
    not_nothing(x)


def not_nothing(x: Spec) -> None:
    for size in x.shape:
        must(ne(size, 0), "Expected reduction dim to be specified for input.numel() == 0.")


@refuses("max.dim min.dim argmax argmin")
def max_dim(x: Spec, dim: int | None = None, keepdim: bool = False) -> None:
    check(not x.dtype.is_complex, "max is not implemented for complex tensors")
    if dim is None:
        not_nothing(x)
    else:
        not_empty(x, [dim])


@refuses("median.dim nanmedian.dim mode")
def median_dim(x: Spec, dim: int = -1, keepdim: bool = False) -> None:
    not_empty(x, [dim])


@refuses("kthvalue")
def kthvalue(x: Spec, k: Any, dim: int = -1, keepdim: bool = False) -> None:
    size = x.shape[wrap_dim(dim, len(x.shape))] if x.shape else 1
    within(k, 1, size, f"kthvalue(): selected number k out of range for dimension {dim}")


@refuses("topk")
def topk(x: Spec, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> None:
    size = x.shape[wrap_dim(dim, len(x.shape))] if x.shape else 1
    within(k, 0, size, "selected index k out of range")


@refuses("var std var.dim std.dim var.correction std.correction var_mean.correction std_mean.correction")
def moments(x: Spec, *rest: Any, **options: Any) -> None:
    check(x.dtype.is_floating_point or x.dtype.is_complex, "std and var only support floating point and complex dtypes")


@refuses("linalg_vector_norm norm.Scalar norm.ScalarOpt_dim")
def vector_norm(x: Spec, *rest: Any, **options: Any) -> None:
    check(x.dtype.is_floating_point or x.dtype.is_complex, f"norm: Expected a floating point or complex tensor as input. Got {x.dtype}")


# ---------------------------------------------------------------- indices

def same_rank(index: Spec, other: Spec, name: str) -> None:
    check(0 in index.shape or max(len(index.shape), 1) == max(len(other.shape), 1), f"Index tensor must have as many dimensions as {name} tensor")


def no_larger(index: Spec, other: Spec, but: int | None, name: str) -> None:
    if 0 in index.shape:
        return
    for d, (a, b) in enumerate(zip(index.shape, other.shape)):
        if d != but:
            within(a, None, b, f"Size does not match at dimension {d}: expected index {list(index.shape)} to be no larger than {name}")


def is_index(index: Spec, name: str) -> None:
    check(index.dtype in (torch.int64, torch.int32) or 0 in index.shape, f"{name}(): Expected dtype int32/int64 for index, but got {index.dtype}")


@refuses("gather")
def gather(x: Spec, dim: int, index: Spec, *, sparse_grad: bool = False) -> None:
    is_index(index, "gather")
    same_rank(index, x, "input")
    no_larger(index, x, wrap_dim(dim, len(x.shape)), "self")


@refuses("scatter.src scatter.reduce scatter_add scatter_reduce.two scatter.value scatter.value_reduce")
def scatter(x: Spec, dim: int, index: Spec, src: Any, reduce: str | None = None, **options: Any) -> None:
    is_index(index, "scatter")
    place = wrap_dim(dim, len(x.shape))
    same_rank(index, x, "self")
    no_larger(index, x, place, "self")
    if type(src) is Spec:
        same_rank(index, src, "src")
        no_larger(index, src, None, "src")
        check(src.dtype is x.dtype, "scatter(): Expected self.dtype to be equal to src.dtype")


def is_vector_index(index: Spec, name: str, dtypes: Sequence[torch.dtype] = (torch.int64, torch.int32)) -> None:
    check(len(index.shape) <= 1, f"{name}(): Index is supposed to be a vector")
    check(index.dtype in dtypes, f"{name}(): Expected dtype int32/int64 for index")


@refuses("index_select")
def index_select(x: Spec, dim: int, index: Spec) -> None:
    is_vector_index(index, "index_select")


@refuses("index_add index_reduce")
def index_add(x: Spec, dim: int, index: Spec, source: Spec, *rest: Any, **options: Any) -> None:
    is_vector_index(index, "index_add")
    same_dtype(x, source, "index_add")
    place = wrap_dim(dim, len(x.shape))
    message = "source tensor shape must match self tensor shape, excluding the specified dimension."
    check(len(x.shape) == len(source.shape) or not x.shape or not source.shape, message)
    for d, (a, b) in enumerate(zip(x.shape, source.shape)):
        if d != place:
            must_match(a, b, message)
    if source.shape:
        must_match(index.numel(), source.shape[place], "index_add_(): Number of indices should be equal to source.size(dim)")


def same_dtype(x: Spec, source: Spec, name: str) -> None:
    check(x.dtype is source.dtype, f"{name}(): self and source expected to have the same dtype, but got (self) {x.dtype} and (source) {source.dtype}")


@refuses("index_copy")
def index_copy(x: Spec, dim: int, index: Spec, source: Spec) -> None:
    is_vector_index(index, "index_copy", (torch.int64,))
    same_dtype(x, source, "index_copy")
    place = wrap_dim(dim, len(x.shape))
    check(len(x.shape) == len(source.shape) or not x.shape or not source.shape,
          "index_copy_(): When source and destination are not scalars, their dimensionality must match.")
    for d, (a, b) in enumerate(zip(x.shape, source.shape)):
        if d != place:
            must_match(a, b, "index_copy_(): Source/destination tensor must have same slice shapes.")
    must_match(index.numel(), source.shape[place] if source.shape else 1, "index_copy_(): Number of indices should be equal to source.size(dim)")


@refuses("index_fill.int_Scalar")
def index_fill(x: Spec, dim: int, index: Spec, value: Any) -> None:
    check(len(index.shape) <= 1, "Index has to be a vector/scalar")
    check(index.dtype is torch.int64, "index_fill_(): Expected dtype int64 for index.")
    check(not isinstance(value, complex) or x.dtype.is_complex, "index_fill_(): Converting complex Scalar to non-complex type is not supported")
    wrap_dim(dim, len(x.shape))


@refuses("index_fill.int_Tensor")
def index_fill_tensor(x: Spec, dim: int, index: Spec, value: Spec) -> None:
    check(not value.shape, "index_fill_ only supports a 0-dimensional value tensor")
    index_fill(x, dim, index, None)


@refuses("take")
def take(x: Spec, index: Spec) -> None:
    check(index.dtype is torch.int64, f"take(): Expected a long tensor for index, but got {index.dtype}")


@refuses("put")
def put(x: Spec, index: Spec, source: Spec, accumulate: bool = False) -> None:
    check(index.dtype is torch.int64, f"put_(): Expected a long tensor for index, but got {index.dtype}")
    same_dtype(x, source, "put_")
    must_match(product(index.shape), product(source.shape), "put_(): Expected source and index to have the same number of elements")


@refuses("masked_scatter")
def masked_scatter(x: Spec, mask: Spec, source: Spec) -> None:
    check(mask.dtype is torch.bool, f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    check(x.dtype is source.dtype, "masked_scatter: expected self and source to have same dtypes")


@refuses("bucketize.Tensor")
def bucketize(x: Any, boundaries: Spec, **options: Any) -> None:
    check(len(boundaries.shape) == 1, f"boundaries tensor must be 1 dimension, but got dim({len(boundaries.shape)})")


@refuses("searchsorted.Tensor")
def searchsorted(boundaries: Spec, x: Spec, **options: Any) -> None:
    message = "the first N-1 dimensions of boundaries tensor and input value tensor must match"
    check(len(boundaries.shape) == 1 or len(boundaries.shape) == len(x.shape), message)
    for a, b in zip(boundaries.shape[:-1], x.shape):
        must_match(a, b, message)


@refuses("index_put _unsafe_index_put")
def index_put(x: Spec, indices: Sequence[Spec | None], values: Spec, accumulate: bool = False) -> None:
    check(len(indices) <= len(x.shape), f"too many indices for tensor of dimension {len(x.shape)} (got {len(indices)})")
    check(all(i is None or not i.dtype.is_floating_point for i in indices), "tensors used as indices must be long, int, byte or bool tensors")


# ---------------------------------------------------------------- random numbers

RANDOM: dict[str, tuple[Callable[..., bool], str]] = {      # operator: (are its numbers right?, what they must be)
    "exponential": (lambda lambd=1.0: lambd > 0, "exponential_ expects lambda > 0.0"),
    "geometric": (lambda p: 0 < p < 1, "geometric_ expects p to be in (0, 1)"),
    "cauchy": (lambda median=0.0, sigma=1.0: sigma > 0, "cauchy_ expects sigma > 0.0"),
    "log_normal": (lambda mean=1.0, std=2.0: std > 0, "log_normal_ expects std > 0.0"),
    "normal_functional": (lambda mean=0.0, std=1.0: std >= 0, "normal expects std >= 0.0"),
    "uniform": (lambda low=0.0, high=1.0: low <= high, "uniform_ expects to return a [from, to) range"),
    "bernoulli.p": (lambda p=0.5: 0 <= p <= 1, "bernoulli_ expects p to be in [0, 1]"),
}


def _refuse_numbers(right: Callable[..., bool], message: str) -> Callable[..., None]:
    def refuse(x: Spec, *numbers: Any, generator: Any = None, **named: Any) -> None:
        values = (*numbers, *named.values())
        check(not all(map(known, values)) or right(*values), message)
    return refuse


for _name, _row in RANDOM.items():
    refuses(_name)(_refuse_numbers(*_row))


@refuses("multinomial")
def multinomial(x: Spec, count: Size, replacement: bool = False, *, generator: Any = None) -> None:
    check(len(x.shape) in (1, 2), "prob_dist must be 1 or 2 dim")
    check(x.dtype.is_floating_point, f"multinomial only supports floating-point dtypes for input, got: {x.dtype}")
    within(count, 1, None, "cannot sample n_sample <= 0 samples")
    within(x.shape[-1], None, 2**24, "number of categories cannot exceed 2^24")
    if not replacement:
        within(count, None, x.shape[-1], "cannot sample n_sample > prob_dist.size(-1) samples without replacement")


# ---------------------------------------------------------------- normalisation, pooling, convolution

@refuses("native_layer_norm")
def native_layer_norm(x: Spec, normalized: Sequence[Size], weight: Spec | None, bias: Spec | None, eps: float) -> None:
    n = len(normalized)
    check(n > 0, "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element")
    message = f"Given normalized_shape={list(normalized)}, expected input that ends with it, but got input of size{list(x.shape)}"
    check(len(x.shape) >= n, message)
    for a, b in zip(x.shape[len(x.shape) - n:], normalized):
        must_match(a, b, message)
    same_or_wider(x, weight, bias)
    for name, part in (("weight", weight), ("bias", bias)):
        if part is not None:
            message = f"Expected {name} to be of same shape as normalized_shape"
            check(len(part.shape) == n, message)
            for a, b in zip(part.shape, normalized):
                must_match(a, b, message)


def same_or_wider(x: Spec, *parameters: Spec | None) -> None:
    """Parameters of a normalisation on the CPU: in the input's dtype, or in float32 where the input is narrower."""
    wider = x.dtype in (torch.float16, torch.bfloat16)
    for p in parameters:
        check(p is None or x.device.type != "cpu" or p.dtype is x.dtype or wider and p.dtype is torch.float32,
              "mixed dtype (CPU): expect parameter to have scalar type of Float")


@refuses("native_group_norm")
def native_group_norm(x: Spec, weight: Spec | None, bias: Spec | None, n: Size, c: Size, hxw: Size, group: int, eps: float) -> None:
    same_or_wider(x, weight, bias)
    for p in (weight, bias):
        if p is not None:
            check(len(p.shape) == 1, "Expected weight to be a vector of size equal to the number of channels in input")
            must_match(p.shape[0], c, "Expected weight to be a vector of size equal to the number of channels in input")


@refuses("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional")
def native_batch_norm(x: Spec, weight: Spec | None, bias: Spec | None, mean: Spec | None, var: Spec | None, *rest: Any) -> None:
    same_or_wider(x, weight, bias, mean, var)
    check(len(x.shape) >= 2, "Expected at least 2 dimensions")


@refuses("nll_loss_forward nll_loss2d_forward")
def nll_loss(x: Spec, target: Spec, weight: Spec | None, reduction: int, ignore_index: Size) -> None:
    check(target.dtype in (torch.int64, torch.uint8), f"expected target dtype to be Long or Byte, but got {target.dtype}")
    check(len(target.shape) == max(len(x.shape) - 1, 0) or len(x.shape) == 1 and len(target.shape) == 1, "target has a wrong number of dimensions")
    for a, b in zip(target.shape, (*x.shape[:1], *x.shape[2:]) if len(x.shape) > 1 else (1,)):
        must_match(a, b, f"size mismatch (got input: {list(x.shape)}, target: {list(target.shape)})")
    if weight is not None:
        check(len(weight.shape) == 1, "weight tensor should be defined either for all classes or no classes")
        must_match(weight.shape[0], x.shape[1] if len(x.shape) > 1 else x.shape[0], "weight tensor should be defined for all classes or no classes")


@refuses("upsample_nearest1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d")
def upsample(x: Spec, size: Sequence[Size], *rest: Any) -> None:
    check(len(x.shape) == len(size) + 2, f"It is expected that input has {len(size) + 2} dimensions, but got {list(x.shape)}")
    for s in (*size, *x.shape[2:]):
        within(s, 1, None, f"Input and output sizes should be greater than 0, but got input {list(x.shape[2:])} output {list(size)}")


def pool(n: int, name: str, x: Spec, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1) -> None:
    """A window's numbers: (kernel, stride, padding, dilation) of `n` dimensions, each given once or for each."""
    kernel, padding, dilation = _each(kernel, n), _each(padding, n), _each(dilation, n)
    stride = _each(stride, n) if stride != () and stride != [] else kernel
    for given, what in ((kernel, "kernel_size"), (stride, "stride"), (padding, "padding"), (dilation, "dilation")):
        check(len(given) == n, f"{name}: {what} must either be a single int, or a tuple of {n} ints")
    for k, s, p, d in zip(kernel, stride, padding, dilation):
        within(k, 1, None, "kernel size should be greater than zero")
        within(s, 1, None, "stride should not be zero")
        within(d, 1, None, "dilation should be greater than zero")
        within(p, 0, None, f"pad must be non-negative, but got pad: {p}")
        within(2 * p, None, d * (k - 1) + 1, f"pad should be at most half of effective kernel size, but got pad={p}")
    check(0 not in x.shape[-n - 1:], f"Expected input's non-batch dimensions to have positive length, but input has a shape of {list(x.shape)}")


def _each(value: Any, n: int) -> list[Any]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * n if len(values) == 1 else values


def large_enough(rule: Callable[..., Any], n: int, x: Spec, args: tuple, kwargs: dict) -> None:
    out = rule(x, *args, **kwargs)
    out = out if type(out) is Spec else out[0]
    for size in out.shape[-n:]:
        within(size, 1, None, f"Given input size: {list(x.shape)}. Calculated output size: {list(out.shape)}. Output size is too small")


@refuses("max_pool2d_with_indices")
def max_pool2d(x: Spec, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> None:
    pool(2, "max_pool2d", x, kernel, stride, padding, dilation)
    large_enough(RULES[torch.ops.aten.max_pool2d_with_indices.default], 2, x, (kernel, stride, padding, dilation, ceil_mode), {})


@refuses("max_pool3d_with_indices")
def max_pool3d(x: Spec, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> None:
    pool(3, "max_pool3d", x, kernel, stride, padding, dilation)
    large_enough(RULES[torch.ops.aten.max_pool3d_with_indices.default], 3, x, (kernel, stride, padding, dilation, ceil_mode), {})


@refuses("avg_pool2d")
def avg_pool2d(x: Spec, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False, include: bool = True, divisor: Any = None) -> None:
    check(divisor is None or divisor != 0, "divisor must be not zero")
    pool(2, "avg_pool2d", x, kernel, stride, padding)
    large_enough(RULES[torch.ops.aten.avg_pool2d.default], 2, x, (kernel, stride, padding, ceil_mode), {})


@refuses("avg_pool3d")
def avg_pool3d(x: Spec, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False, include: bool = True, divisor: Any = None) -> None:
    check(divisor is None or divisor != 0, "divisor must be not zero")
    pool(3, "avg_pool3d", x, kernel, stride, padding)
    large_enough(RULES[torch.ops.aten.avg_pool3d.default], 3, x, (kernel, stride, padding, ceil_mode), {})


@refuses("_adaptive_avg_pool2d adaptive_max_pool2d")
def adaptive_pool2d(x: Spec, size: Sequence[Size]) -> None:
    check(len(size) == 2, "adaptive_pool2d(): output_size must be 2")
    check(len(x.shape) in (3, 4), f"adaptive_pool2d(): Expected 3D or 4D tensor, but got {list(x.shape)}")
    check(0 not in x.shape[1:], f"adaptive_pool2d(): Expected non-zero size for non-batch dimensions, but input has sizes {list(x.shape)}")
    for s in size:
        within(s, 0, None, f"Trying to create tensor with negative dimension {s}")


@refuses("max_unpool2d")
def max_unpool2d(x: Spec, indices: Spec, output_size: Sequence[Size]) -> None:
    check(indices.dtype is torch.int64, f"elements in indices should be type int64 but got: {indices.dtype}")
    message = f"Expected shape of indices to be same as that of the input tensor ({list(x.shape)})"
    check(len(x.shape) == len(indices.shape), message)
    for a, b in zip(x.shape, indices.shape):
        must_match(a, b, message)
    check(len(output_size) == 2, "There should be exactly two elements (height, width) in output_size")
    check(len(x.shape) in (3, 4), f"Input to max_unpooling2d should be a 3d or 4d Tensor, but got a tensor with {len(x.shape)} dimensions.")


@refuses("convolution")
def convolution(x: Spec, weight: Spec, bias: Spec | None, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any,
                groups: int) -> None:
    for p in padding:
        within(p, 0, None, "negative padding is not supported")
    for s in stride:
        within(s, 1, None, "non-positive stride is not supported")
    for d in dilation:
        within(d, 1, None, "dilation should be greater than zero")
    within(groups, 1, None, "non-positive groups is not supported")
    if bias is not None:
        wanted = weight.shape[1] * groups if transposed else weight.shape[0]
        check(len(bias.shape) == 1, "expected bias to be 1-dimensional")
        must_match(bias.shape[0], wanted, f"Given weight of size {list(weight.shape)}, expected bias to be 1-dimensional with {wanted} elements")
        check(bias.dtype is x.dtype or transposed or len(weight.shape) > 4, f"Input type ({x.dtype}) and bias type ({bias.dtype}) should be the same")


# ---------------------------------------------------------------- shapes

@refuses("roll")
def roll(x: Spec, shifts: Any, dims: Sequence[int] = ()) -> None:
    shifts, dims = _each(shifts, 1), _each(dims, 1)
    check(len(shifts) > 0, "`shifts` required")
    if not dims and len(shifts) == 1:
        return
    check(len(shifts) == len(dims), f"shifts and dimensions must align. shifts: {len(shifts)}, dims:{len(dims)}")
    if 0 in x.shape and len(dims) == 1:
        return
    for dim in dims:
        if not x.shape:
            raise IndexError(f"Dimension specified as {dim} but tensor has no dimensions")
        wrap_dim(dim, len(x.shape))


@refuses("rot90")
def rot90(x: Spec, k: int = 1, dims: Sequence[int] = (0, 1)) -> None:
    check(len(dims) == 2, f"expected total rotation dims == 2, but got dims = {len(dims)}")
    check(len(x.shape) >= 2, f"expected total dims >= 2, but got total dims = {len(x.shape)}")
    check(wrap_dim(dims[0], len(x.shape)) != wrap_dim(dims[1], len(x.shape)), "expected rotation dims to be different")


@refuses("narrow_copy")
def narrow_copy(x: Spec, dim: int, start: Size, length: Size) -> None:
    check(len(x.shape) > 0, "narrow() cannot be applied to a 0-dim tensor.")
    size = x.shape[wrap_dim(dim, len(x.shape))]
    if known(start) and known(size) and not -size <= start <= size:
        raise IndexError(f"start out of range (expected to be in range of [{-size}, {size}], but got {start})")
    begin = start + size if known(start) and start < 0 else start
    within(length, 0, size - begin, f"start ({start}) + length ({length}) exceeds dimension size ({size}).")


@refuses("arange.start_step")
def arange_step(start: Any, end: Any, step: Any = 1, **options: Any) -> None:
    if all(known(v) for v in (start, end, step)):
        if step == 0:
            raise ValueError("step must be nonzero")
        check((end - start) * step >= 0, "upper bound and lower bound inconsistent with step sign")


@refuses("addmv")
def addmv(x: Spec, a: Spec, b: Spec, **options: Any) -> None:
    check(len(a.shape) == 2 and len(b.shape) == 1, f"vector + matrix @ vector expected, got {len(x.shape)}, {len(a.shape)}, {len(b.shape)}")
    check(broadcast(x.shape, a.shape[:1]) == a.shape[:1] or any(type(s) is Expr for s in (*x.shape, *a.shape)), "size mismatch")
    check(x.dtype is a.dtype and a.dtype is b.dtype, f"addmv: expected one dtype, got {x.dtype}, {a.dtype} and {b.dtype}")


@refuses("mv")
def mv(a: Spec, b: Spec) -> None:
    check(a.dtype is b.dtype, f"expected one dtype, got {a.dtype} and {b.dtype}")


@refuses("baddbmm addbmm")
def baddbmm(x: Spec, a: Spec, b: Spec, **options: Any) -> None:
    check(len(a.shape) == 3 and len(b.shape) == 3, "batch1 and batch2 must be 3D tensors")
    check(x.dtype is a.dtype and a.dtype is b.dtype, f"expected one dtype, got {x.dtype}, {a.dtype} and {b.dtype}")
    must_match(a.shape[0], b.shape[0], "batch1 and batch2 must have same number of batches")
    must_match(a.shape[2], b.shape[1], "Incompatible matrix sizes for bmm")


@refuses("addr")
def addr(x: Spec, a: Spec, b: Spec, **options: Any) -> None:
    check(len(a.shape) == 1 and len(b.shape) == 1, f"addr: Expected 1-D vectors, got {len(a.shape)}-D and {len(b.shape)}-D")
    broadcast(x.shape, (a.shape[0], b.shape[0]))


@refuses("linalg_lstsq")
def lstsq(a: Spec, b: Spec, rcond: Any = None, *, driver: str | None = None) -> None:
    check(len(a.shape) >= 2 and len(b.shape) >= 1, "input must have at least 2 dimensions, other at least 1")
    check(len(a.shape) - len(b.shape) in (0, 1), "input.dim() must be greater or equal to other.dim() and (input.dim() - other.dim()) <= 1")
    is_vector = len(b.shape) < len(a.shape)
    must_match(a.shape[-2], b.shape[-1 if is_vector else -2], "input.size(-2) should match other.size(-2)")
    if is_vector:
        for n, m in zip(a.shape[:-2], b.shape):
            must_match(n, m, "input.size(-2) should match other.size(-2)")
    check(a.dtype is b.dtype, f"Expected input and other to have the same dtype, but got {a.dtype} and {b.dtype}")
    check(driver in (None, "gels", "gelsy", "gelsd", "gelss"), "parameter `driver` should be one of (gels, gelsy, gelsd, gelss)")
