"""Samples of ATen operators: one table for every stage that must agree with eager.

`SAMPLES[overload]` is a list of `Sample`s: arguments in which tensors are descriptions (`t(shape, dtype, ...)`), made real by
`sample.make()`.  Shapes cover broadcasting, 0-d, empty, size 1, and non-contiguous layouts; dtypes f32 f64 bf16 i64 i32 u8 bool.

    for sample in SAMPLES[aten.add.Tensor]:
        args, kwargs = sample.make()
        expected = sample.op(*args, **kwargs)

`graph_of(fn, inputs)` records a hand-made fx graph with the Specs of real tensors as meta["val"], so that a stage can be
tested without the stages before it.
"""
from __future__ import annotations

import math
import operator
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, GraphModule, Interpreter, Node

from firesteel.loops.lower.value import TensorSpec
from firesteel.table import Table

aten = torch.ops.aten

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64,
          "i32": torch.int32, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16, "bool": torch.bool, "c64": torch.complex64}


# ---------------------------------------------------------------- descriptions of arguments

@dataclass(frozen=True)
class T:
    """A tensor to be made: values from [lo, hi), in one of a few layouts."""
    shape: tuple[int, ...]
    dtype: str = "f32"
    lo: float = -3.0
    hi: float = 3.0
    layout: str = "plain"       # plain, transposed, sliced, expanded, channels_last
    special: bool = False       # put NaN, infinities and zeros of both signs among the values

    def make(self, generator: torch.Generator) -> torch.Tensor:
        return LAYOUTS[self.layout](self, generator)

    def values(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        dtype = DTYPES[self.dtype]
        if dtype is torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if not dtype.is_floating_point and not dtype.is_complex:
            lo, hi = (max(self.lo, 0), max(self.hi, 1)) if dtype is torch.uint8 else (self.lo, self.hi)
            return torch.randint(int(lo), max(int(hi), int(lo) + 1), shape, generator=generator).to(dtype)
        made = (torch.rand(shape, generator=generator, dtype=torch.float64) * (self.hi - self.lo) + self.lo).to(dtype)
        if self.special and made.numel() >= 6:
            made.view(-1)[:5] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0], dtype=dtype)
        return made


def _plain(t: T, g: torch.Generator) -> torch.Tensor:
    return t.values(t.shape, g)


def _transposed(t: T, g: torch.Generator) -> torch.Tensor:
    return t.values(t.shape[::-1], g).permute(*range(len(t.shape))[::-1])


def _sliced(t: T, g: torch.Generator) -> torch.Tensor:
    """Every second element of a bigger tensor, from an offset on."""
    big = t.values(tuple(2 * n + 1 for n in t.shape), g)
    return big[tuple(slice(1, None, 2) for _ in t.shape)]


def _expanded(t: T, g: torch.Generator) -> torch.Tensor:
    return t.values((1, *t.shape[1:]), g).expand(t.shape)


def _channels_last(t: T, g: torch.Generator) -> torch.Tensor:
    return t.values(t.shape, g).contiguous(memory_format=torch.channels_last)


LAYOUTS = {"plain": _plain, "transposed": _transposed, "sliced": _sliced, "expanded": _expanded, "channels_last": _channels_last}


def t(*shape: int, dtype: str = "f32", **more: Any) -> T:
    return T(shape, dtype, **more)


@dataclass(frozen=True)
class Sample:
    op: Any
    args: tuple
    kwargs: dict = field(default_factory=dict)

    def make(self) -> tuple[tuple, dict]:
        """The arguments, the same ones each time."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.op} {self.args} {self.kwargs}".encode()))
        real = lambda a: a.make(generator) if isinstance(a, T) else a
        return pytree.tree_map(real, (self.args, self.kwargs), is_leaf=lambda a: isinstance(a, T))

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))}, {self.kwargs})"


SAMPLES: Table[list[Sample]] = Table("samples", "tests/optable.py")
DECOMPOSED: Table[list[Sample]] = Table("samples of a decomposition", "tests/optable.py")       # of operators that are not lowered as a whole


def sample(op: Any, *args: Any, table: Table[list[Sample]] = SAMPLES, **kwargs: Any) -> None:
    if op not in table:
        table.add(op, [])
    table[op].append(Sample(op, args, kwargs))


def decomposed(op: Any, *args: Any) -> None:
    sample(op, *args, table=DECOMPOSED)


# ---------------------------------------------------------------- one argument

POSITIVE, UNIT = (0.05, 5.0), (-0.95, 0.95)
FLOAT_UNARY = {
    "exp": (-5.0, 5.0), "exp2": (-5.0, 5.0), "expm1": (-3.0, 3.0), "log": POSITIVE, "log2": POSITIVE, "log10": POSITIVE, "log1p": POSITIVE,
    "sqrt": POSITIVE, "rsqrt": POSITIVE, "reciprocal": POSITIVE, "sin": (-9.0, 9.0), "cos": (-9.0, 9.0), "tan": (-1.2, 1.2),
    "asin": UNIT, "acos": UNIT, "atan": (-9.0, 9.0), "sinh": (-4.0, 4.0), "cosh": (-4.0, 4.0), "tanh": (-4.0, 4.0),
    "asinh": (-9.0, 9.0), "acosh": (1.1, 9.0), "atanh": UNIT, "sigmoid": (-9.0, 9.0), "erf": (-3.0, 3.0), "erfc": (-3.0, 3.0),
    "erfinv": UNIT, "lgamma": POSITIVE, "digamma": POSITIVE, "deg2rad": (-9.0, 9.0), "rad2deg": (-9.0, 9.0), "sinc": (-3.0, 3.0),
    "i0": (-12.0, 12.0), "special_i0e": (-12.0, 12.0), "special_i1": (-12.0, 12.0), "special_i1e": (-12.0, 12.0),
}
for _name, (_lo, _hi) in FLOAT_UNARY.items():
    _op = getattr(aten, _name).default
    for _case in (t(4, 5), t(), t(0, 3), t(3, 1, dtype="f64"), t(4, 6, layout="transposed"), t(3, 4, layout="sliced"), t(5, dtype="bf16"),
                  t(2, 7, dtype="f16")):
        sample(_op, T(_case.shape, _case.dtype, _lo, _hi, _case.layout))
    if _name not in ("acosh", "atanh", "asin", "acos", "erfinv", "tan"):
        sample(_op, T((3, 4), "i64", max(_lo, 1), max(_hi, 3)))
    sample(_op, T((3, 4), "f32", _lo, _hi, special=True))

for _name in ("floor", "ceil", "round", "trunc", "neg", "abs", "sign", "relu", "square", "positive"):
    _op = getattr(aten, _name).default
    for _case in (t(4, 5, lo=-6.0, hi=6.0), t(), t(0,), t(3, 4, dtype="i64"), t(3, 4, dtype="bf16"), t(2, 3, 4, layout="transposed"), t(3, 4, special=True)):
        sample(_op, _case)
sample(aten.round.default, t(41, lo=-10.25, hi=10.25))
sample(aten.round.decimals, t(9), decimals=2)
sample(aten.round.decimals, t(9, lo=-300.0, hi=300.0), decimals=-1)
sample(aten.frac.default, t(4, 5))
sample(aten.sign.default, t(3, 4, dtype="u8"))
sample(aten.abs.default, t(3, 4, dtype="u8"))
for _name in ("isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit"):
    for _case in (t(4, 5, special=True), t(3, dtype="i64"), t(2, 4, dtype="bf16", special=True)):
        sample(getattr(aten, _name).default, _case)
sample(aten.nan_to_num.default, t(4, 5, special=True))
sample(aten.nan_to_num.default, t(4, 5, special=True), 1.0, 2.0, -3.0)
sample(aten.logical_not.default, t(4, 5, lo=0.0, hi=2.0))
sample(aten.logical_not.default, t(4, 5, dtype="i64", lo=0, hi=2))
sample(aten.bitwise_not.default, t(4, 5, dtype="i64"))
sample(aten.bitwise_not.default, t(4, 5, dtype="bool"))
sample(aten.logit.default, t(5, lo=0.1, hi=0.9))
sample(aten.logit.default, t(5, lo=-0.1, hi=1.1), 0.2)
for _case in (t(4, 5, lo=-3.0, hi=9.0), t(4, 6, dtype="f64", layout="transposed", lo=-9.0, hi=3.0), t(3, dtype="i64", lo=-2, hi=4)):
    sample(aten.special_erfcx.default, _case)
    sample(aten.special_log_ndtr.default, _case)
for _order in (0, 1):
    sample(aten.polygamma.default, _order, t(4, 5, lo=0.1, hi=9.0))
    sample(aten.polygamma.default, _order, t(5, dtype="bf16", lo=0.1, hi=9.0))
sample(aten.special_entr.default, t(5, lo=-1.0))

# ---------------------------------------------------------------- two arguments

PAIRS = [(t(4, 5), t(4, 5)), (t(4, 5), t(5)), (t(4, 1), t(1, 5)), (t(2, 3, 4), t(3, 1)), (t(), t(4)), (t(), t()), (t(0, 3), t(3)),
         (t(4, 6, layout="transposed"), t(4, 6)), (t(4, 6, layout="sliced"), t(6, layout="sliced")), (t(3, 4, layout="expanded"), t(3, 4))]
for _name in ("add", "sub", "mul"):
    _op = getattr(aten, _name).Tensor
    for _x, _y in [*PAIRS, (t(4, 5, dtype="bf16"), t(5, dtype="bf16")), (t(4, dtype="i64"), t(4, dtype="i64")), (t(4, dtype="i64"), t(4)),
                   (t(4, dtype="bf16"), t(4)), (t(4, dtype="f64"), t(4)), (t(4), t(dtype="f64")), (t(4, dtype="i32"), t(4, dtype="i64")),
                   (t(4, dtype="u8", hi=250), t(4, dtype="u8", hi=250)), (t(3, 4, special=True), t(3, 4))]:
        sample(_op, _x, _y)
    sample(_op, t(4, 5), 2.5)
    sample(_op, t(4, 5, dtype="i64"), 3)
    sample(_op, t(4, 5, dtype="i64"), 2.5)
    sample(_op, t(4, 5, dtype="bf16"), 0.1)
for _name in ("add", "mul"):
    sample(getattr(aten, _name).Tensor, t(4, dtype="bool"), t(4, dtype="bool"))
    sample(getattr(aten, _name).Tensor, t(4, dtype="bool"), t(4, dtype="i64"))
sample(aten.add.Tensor, t(4, 5), t(5), alpha=2)
sample(aten.sub.Tensor, t(4, 5), t(5), alpha=0.5)
sample(aten.add.Tensor, t(4, dtype="i64"), t(4, dtype="i64"), alpha=-3)
sample(aten.rsub.Scalar, t(4, 5), 1.0)
sample(aten.add.Scalar, t(4, 5), 1.5)
sample(aten.mul.Scalar, t(4, 5), 1.5)
for _x, _y in [*PAIRS, (t(4, dtype="i64", lo=-9, hi=9), t(4, dtype="i64", lo=1, hi=4)), (t(4, dtype="bf16"), t(4, dtype="bf16", lo=1.0)), (t(4), 3)]:
    sample(aten.div.Tensor, _x, _y)
for _mode in ("floor", "trunc", None):
    sample(aten.div.Tensor_mode, t(9, lo=-9.0, hi=9.0), t(9, lo=0.3, hi=4.0), rounding_mode=_mode)
    sample(aten.div.Tensor_mode, t(9, dtype="i64", lo=-9, hi=9), 4, rounding_mode=_mode)
    sample(aten.div.Tensor_mode, t(9, dtype="i64", lo=-9, hi=9), -4, rounding_mode=_mode)
for _op in (aten.remainder, aten.fmod):
    sample(_op.Tensor, t(9, lo=-9.0, hi=9.0), t(9, lo=0.3, hi=4.0))
    sample(_op.Tensor, t(9, lo=-9.0, hi=9.0), t(9, lo=-4.0, hi=-0.3))
    sample(_op.Scalar, t(9, dtype="i64", lo=-9, hi=9), 4)
    sample(_op.Scalar, t(9, dtype="i64", lo=-9, hi=9), -4)
    sample(_op.Scalar, t(9, lo=-9.0, hi=9.0), 2.5)
sample(aten.floor_divide.default, t(9, lo=-9.0, hi=9.0), t(9, lo=0.3, hi=4.0))
sample(aten.floor_divide.default, t(9, dtype="i64", lo=-9, hi=9), 3)
for _name in ("maximum", "minimum", "fmax", "fmin", "atan2", "hypot", "logaddexp", "logaddexp2", "nextafter"):
    _op = getattr(aten, _name).default
    for _x, _y in [*PAIRS[:4], (t(3, 4, special=True), t(3, 4))]:
        sample(_op, _x, _y)
for _name in ("maximum", "minimum"):
    for _d in ("i64", "bool", "bf16", "u8"):
        sample(getattr(aten, _name).default, t(3, 4, dtype=_d), t(4, dtype=_d))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _packet = getattr(aten, _name)
    for _x, _y in [(t(4, 5, dtype="i64"), t(5, dtype="i64")), (t(4, 5), t(5)), (t(4, dtype="bool"), t(4, dtype="bool")), (t(4, dtype="i64"), t(4)),
                   (t(4, dtype="bf16"), t(4, dtype="bf16")), (t(3, 4, special=True), t(3, 4, special=True)), (t(4, dtype="u8"), t(4, dtype="i64")),
                   (t(4, dtype="i64"), t(lo=0.2, hi=0.3)), (t(4, dtype="f64"), t(4))]:
        sample(_packet.Tensor, _x, _y)
    for _x, _y in [(t(4, 5, dtype="i64"), 1), (t(4, 5, dtype="i64"), 0.5), (t(4, 5), 0), (t(4, dtype="bool"), True), (t(7, dtype="bf16"), 0.1)]:
        sample(_packet.Scalar, _x, _y)
for _name in ("and", "or", "xor"):
    sample(getattr(aten, f"logical_{_name}").default, t(4, 5, dtype="i64", lo=0, hi=2), t(5, lo=0.0, hi=2.0))
    sample(getattr(aten, f"bitwise_{_name}").Tensor, t(4, 5, dtype="i64"), t(5, dtype="i64"))
    sample(getattr(aten, f"bitwise_{_name}").Tensor, t(4, 5, dtype="bool"), t(5, dtype="bool"))
    sample(getattr(aten, f"bitwise_{_name}").Scalar, t(4, 5, dtype="i64"), 5)
for _name in ("left", "right"):
    sample(getattr(aten, f"bitwise_{_name}_shift").Tensor, t(9, dtype="i64", lo=-99, hi=99), t(9, dtype="i64", lo=0, hi=9))
    sample(getattr(aten, f"bitwise_{_name}_shift").Tensor_Scalar, t(9, dtype="i32", lo=-99, hi=99), 3)
    sample(getattr(aten, f"bitwise_{_name}_shift").Tensor, t(9, dtype="u8", lo=0, hi=99), t(9, dtype="u8", lo=0, hi=9))
for _e in (0, 0.5, 1, 2, 3, 4, -0.5, -1, -2, 2.5):
    sample(aten.pow.Tensor_Scalar, t(4, 5, lo=0.2), _e)
    sample(aten.pow.Tensor_Scalar, t(5, lo=0.2, dtype="bf16"), _e)
for _e in (0, 1, 2, 3, 7):
    sample(aten.pow.Tensor_Scalar, t(4, 5, dtype="i64"), _e)
sample(aten.pow.Tensor_Tensor, t(4, 5, lo=0.2), t(5))
sample(aten.pow.Scalar, 2, t(4, 5))
sample(aten.xlogy.Tensor, t(4, 5, lo=0.0), t(5, lo=0.1))
sample(aten.copysign.Tensor, t(4, 5), t(5))
sample(aten.heaviside.default, t(4, 5, special=True), t(5))

sample(aten.special_xlog1py.default, t(4, 5, lo=0.0), t(5, lo=0.1))
sample(aten.ldexp.Tensor, t(4, 5), t(5, dtype="i64"))
sample(aten.bitwise_left_shift.Scalar_Tensor, 3, t(5, dtype="i64", lo=0, hi=9))
sample(aten.angle.default, t(4, 5, special=True))

# ---------------------------------------------------------------- three arguments and options

for _cond in (t(4, 5, dtype="bool"), t(5, dtype="bool"), t(4, 1, dtype="bool"), t(dtype="bool")):
    sample(aten.where.self, _cond, t(4, 5), t(5))
sample(aten.where.self, t(4, dtype="bool"), t(4, dtype="i64"), t(4))
sample(aten.where.self, t(4, dtype="bool"), t(4, dtype="bf16"), t(4, dtype="bf16"))
sample(aten.where.ScalarOther, t(4, dtype="bool"), t(4), 2.0)
sample(aten.where.ScalarSelf, t(4, dtype="bool"), 2.0, t(4))
for _lo, _hi in ((-1, 1), (None, 0.5), (-0.5, None)):
    sample(aten.clamp.default, t(4, 5), _lo, _hi)
    sample(aten.clamp.default, t(4, 5, dtype="bf16"), _lo, _hi)
    sample(aten.clamp.default, t(3, 4, special=True), _lo, _hi)
sample(aten.clamp.default, t(4, 5, dtype="i64"), -1, 1)
sample(aten.clamp.Tensor, t(4, 5), t(5, hi=0.0), t(5, lo=0.0))
sample(aten.clamp_min.default, t(4, 5), 0.5)
sample(aten.clamp_max.default, t(4, 5), 0.5)
sample(aten.masked_fill.Scalar, t(4, 5), t(5, dtype="bool"), -math.inf)
sample(aten.masked_fill.Tensor, t(4, 5), t(4, 5, dtype="bool"), t())
sample(aten.addcmul.default, t(4, 5), t(5), t(4, 1), value=2)
sample(aten.addcdiv.default, t(4, 5), t(5), t(4, 1, lo=0.5), value=0.5)
sample(aten.lerp.Scalar, t(4, 5), t(4, 5), 0.3)
sample(aten.lerp.Scalar, t(4, 5), t(4, 5), 0.7)
sample(aten.lerp.Tensor, t(4, 5), t(4, 5), t(5, lo=0.0, hi=1.0))
ACTIVATIONS = {
    "relu6": [()], "hardtanh": [(), (-2.0, 0.5)], "hardsigmoid": [()], "hardswish": [()], "leaky_relu": [(), (0.2,)],
    "elu": [(), (1.5,)], "softplus": [(), (2.0, 1.0)], "softshrink": [()], "hardshrink": [()], "threshold": [(0.1, -2.0)], "silu": [()], "mish": [()],
    "gelu": [()],
}
for _name, _options in ACTIVATIONS.items():
    for _option in _options:
        sample(getattr(aten, _name).default, t(4, 5, lo=-5.0, hi=5.0), *_option)
        sample(getattr(aten, _name).default, t(7, dtype="bf16"), *_option)
sample(aten.gelu.default, t(4, 5), approximate="tanh")
BACKWARDS = {
    "gelu_backward": [()], "silu_backward": [()], "sigmoid_backward": [()], "tanh_backward": [()], "threshold_backward": [(0,)],
    "hardtanh_backward": [(-1.0, 1.0)], "hardsigmoid_backward": [()], "hardswish_backward": [()], "leaky_relu_backward": [(0.1, False)],
    "softplus_backward": [(1.0, 20.0)], "softshrink_backward": [(0.5,)], "hardshrink_backward": [(0.5,)],
}
for _name, _options in BACKWARDS.items():
    for _option in _options:
        sample(getattr(aten, _name).default, t(4, 5), t(4, 5, lo=-4.0, hi=4.0), *_option)
        sample(getattr(aten, _name).default, t(4, dtype="bf16"), t(4, dtype="bf16"), *_option)
sample(aten.gelu_backward.default, t(4, 5), t(4, 5), approximate="tanh")
sample(aten.elu_backward.default, t(4, 5), 1.0, 1.0, 1.0, False, t(4, 5))
sample(aten.elu_backward.default, t(4, 5), 1.5, 1.0, 1.0, True, t(4, 5, lo=-1.0))
sample(aten.celu.default, t(4, 5), 1.5)
sample(aten.logit_backward.default, t(5), t(5, lo=-0.1, hi=1.1))
sample(aten.logit_backward.default, t(5), t(5, lo=-0.1, hi=1.1), 0.2)

# ---------------------------------------------------------------- copies and conversions

for _src in ("f32", "f64", "bf16", "f16", "i64", "i32", "u8", "bool"):
    for _dst in ("f32", "f64", "bf16", "f16", "i64", "i32", "u8", "bool"):
        if _src != _dst:
            sample(aten._to_copy.default, t(3, 4, dtype=_src, lo=0.0, hi=9.0), dtype=DTYPES[_dst])
for _case in (t(4, 5), t(4, 5, layout="transposed"), t(4, 5, layout="sliced"), t(4, 5, layout="expanded"), t(), t(0, 3), t(2, 3, 4, 5, layout="channels_last")):
    sample(aten.clone.default, _case)
    sample(aten.clone.default, _case, memory_format=torch.contiguous_format)
sample(aten.clone.default, t(2, 3, 4, 5), memory_format=torch.channels_last)
sample(aten.copy.default, t(4, 5), t(5, dtype="i64"))

# ---------------------------------------------------------------- reductions

REDUCED = [t(4, 5), t(3, 4, layout="transposed"), t(2, 3, 4, layout="sliced"), t(5, 1, 3), t(4, 5, dtype="f64"), t(4, 5, dtype="bf16"), t(6, 7, dtype="i64"), t(4, 5, dtype="i32")]
for _case in REDUCED:
    for _dims in ([0], [-1], [0, 1], [], None):
        for _keep in (False, True):
            sample(aten.sum.dim_IntList, _case, _dims, _keep)
            if _dims is not None:
                sample(aten.amax.default, _case, _dims, _keep)
                sample(aten.amin.default, _case, _dims, _keep)
            if not _case.dtype.startswith("i"):
                sample(aten.mean.dim, _case, _dims, _keep)
    sample(aten.sum.default, _case)
    sample(aten.prod.default, _case)
    sample(aten.prod.dim_int, _case, 1)
    sample(aten.prod.dim_int, _case, 0, True)
    sample(aten.max.default, _case)
    sample(aten.min.default, _case)
    sample(aten.any.default, _case)
    sample(aten.all.default, _case)
    sample(aten.any.dim, _case, 1)
    sample(aten.all.dim, _case, 0, True)
    for _op in (aten.argmax.default, aten.argmin.default):
        for _dim in (0, -1, None):
            sample(_op, _case, _dim)
        sample(_op, _case, 1, True)
    for _op in (aten.max.dim, aten.min.dim):
        sample(_op, _case, 0)
        sample(_op, _case, -1, True)
sample(aten.sum.dim_IntList, t(2, 3, 4, 5), [1, 3])
sample(aten.sum.default, t())
sample(aten.sum.dim_IntList, t(), [0])
sample(aten.sum.default, t(0, 3))
sample(aten.sum.dim_IntList, t(0, 3), [0])
sample(aten.sum.dim_IntList, t(0, 3), [1])
sample(aten.sum.default, t(4, 5, dtype="bool"))
sample(aten.sum.default, t(4, 5, dtype="i32"), dtype=torch.float32)
sample(aten.mean.default, t(4, 5))
sample(aten.mean.default, t(4, 5, dtype="i64"), dtype=torch.float32)
sample(aten.mean.dim, t(0, 3), [0])
sample(aten.any.dim, t(4, 5, dtype="bool"), -1, True)
sample(aten.any.dims, t(2, 3, 4, dtype="bool"), [0, 2])
sample(aten.all.dims, t(2, 3, 4, dtype="bool"), [0, 2])
for _op in (aten._is_all_true.default, aten._is_any_true.default):
    for _shape in ((3, 5), (), (0, 2)):
        sample(_op, t(*_shape, dtype="bool"))
sample(aten.amax.default, t(4, 5, dtype="bool"), [1])
sample(aten.amax.default, t(3, 4, special=True), [1])
sample(aten.argmax.default, t(3, 4, special=True), 1)
sample(aten.argmax.default, t(4, 9, dtype="i64", lo=0, hi=3), 1)
sample(aten.argmin.default, t(4, 9, dtype="i64", lo=0, hi=3), 1)
sample(aten.max.dim, t(4, 9, dtype="i64", lo=0, hi=3), 1)
sample(aten.aminmax.default, t(4, 5), dim=1)
sample(aten.aminmax.default, t(4, 5))
sample(aten.nansum.default, t(3, 4, special=True), [0])
sample(aten.nansum.default, t(3, 4, dtype="i64"))
sample(aten.count_nonzero.dim_IntList, t(4, 5, dtype="i64", lo=0, hi=2), [1])
for _op in (aten.var.correction, aten.std.correction, aten.var_mean.correction):
    for _correction in (0, 1, None):
        sample(_op, t(4, 5), [1], correction=_correction)
        sample(_op, t(2, 3, 4), [0, 2], correction=_correction, keepdim=True)
    sample(_op, t(4, 5), None, correction=1)
sample(aten.var.dim, t(4, 5), [1], False, True)
for _ord in (2, 1, 0, math.inf, -math.inf, 3):
    sample(aten.linalg_vector_norm.default, t(4, 5), _ord, [1])
sample(aten.linalg_vector_norm.default, t(4, 5), 2, None, True)
for _op in (aten._softmax.default, aten._log_softmax.default):
    for _case in (t(4, 5), t(2, 3, 4, layout="transposed"), t(4, 5, dtype="bf16"), t(3, 1)):
        sample(_op, _case, -1, False)
        sample(_op, _case, 0, False)
for _op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
    sample(_op, t(4, 5), t(4, 5, lo=0.0, hi=1.0), 1, torch.float32)
sample(aten.logsumexp.default, t(4, 5), [1])
sample(aten.logsumexp.default, t(4, 5), [0, 1], True)
for _case in (t(4, 5), t(4, 5, layout="transposed"), t(4, 5, dtype="i64"), t(3, 1), t(7, dtype="bf16"), t(0, 3), t(), t(4, dtype="bool")):
    for _dim in (0, -1):
        sample(aten.cumsum.default, _case, _dim)
        sample(aten.cumprod.default, _case, _dim)

# ---------------------------------------------------------------- views (each read through an addition by the tests)

sample(aten.permute.default, t(2, 3, 4), [2, 0, 1])
sample(aten.permute.default, t(2, 3, 4), [-1, 0, -2])
sample(aten.transpose.int, t(2, 3, 4), 0, -1)
sample(aten.t.default, t(2, 3))
sample(aten.t.default, t(3))
sample(aten.alias.default, t(2, 3))
sample(aten.detach.default, t(2, 3))
sample(aten.expand.default, t(3, 1), [2, 3, 4])
sample(aten.expand.default, t(3, 1), [-1, 4])
sample(aten.expand.default, t(), [2, 2])
sample(aten.unsqueeze.default, t(2, 3), 1)
sample(aten.unsqueeze.default, t(2, 3), -1)
sample(aten.unsqueeze.default, t(), 0)
sample(aten.squeeze.default, t(1, 3, 1))
sample(aten.squeeze.dim, t(1, 3, 1), 0)
sample(aten.squeeze.dim, t(1, 3, 1), 1)
sample(aten.squeeze.dims, t(1, 3, 1, 2), [0, 2])
for _from, _into in (((4, 6), [24]), ((4, 6), [2, 2, 6]), ((4, 6), [4, 2, 3]), ((4, 6), [3, 8]), ((2, 3, 4), [6, 4]), ((2, 3, 4), [2, 12]), ((6,), [2, 3]),
                     ((1,), []), ((), [1, 1]), ((2, 1, 3), [3, 1, 2]), ((0, 3), [3, 0]), ((4, 6), [-1, 2])):
    sample(aten.view.default, T(_from), _into)
    sample(aten._unsafe_view.default, T(_from), _into)
sample(aten.view.default, t(4, 6, layout="sliced"), [4, 2, 3])
for _args in ((0, 1, 3), (0, -2, None), (1, None, 2), (1, 0, 99), (1, 1, 5, 2), (0, 2, 1), (-1, 4, 9)):
    sample(aten.slice.Tensor, t(4, 5), *_args)
sample(aten.select.int, t(4, 5), 0, 2)
sample(aten.select.int, t(4, 5), -1, -2)
sample(aten.unbind.int, t(3, 2), 0)
sample(aten.unbind.int, t(3, 2), -1)
sample(aten.split.Tensor, t(7, 2), 3)
sample(aten.split.Tensor, t(2, 6), 2, 1)
sample(aten.split_with_sizes.default, t(7, 2), [2, 5])
sample(aten.unsafe_split.Tensor, t(7, 2), 3)
sample(aten.unsafe_split_with_sizes.default, t(2, 7), [2, 5], -1)
sample(aten.diagonal.default, t(4, 5))
sample(aten.diagonal.default, t(2, 4, 5), 1, 1, 2)
sample(aten.diagonal.default, t(4, 5), -2)
sample(aten.unfold.default, t(7), 0, 3, 2)
sample(aten.unfold.default, t(2, 7), -1, 3, 2)
sample(aten.as_strided.default, t(4, 6), [3, 2], [6, 1], 1)
sample(aten.as_strided.default, t(4, 6), [3, 3], [2, 1], 0)
sample(aten.as_strided.default, t(4, 6, layout="transposed"), [2, 3], [4, 1], 2)
sample(aten.as_strided.default, t(4, 6, layout="sliced"), [2, 2], [2, 1], 3)
sample(aten.view.dtype, t(4, 6), torch.int32)
sample(aten.view.dtype, t(4, 6, layout="transposed"), torch.int32)
sample(aten.view.dtype, t(4, 6), torch.int16)
sample(aten.permute.default, t(3, 2, dtype="i64"), [1, 0])

# ---------------------------------------------------------------- tensors from nothing

sample(aten.full.default, [2, 3], 2.5)
sample(aten.full.default, [2, 3], 7)
sample(aten.full.default, [], True)
sample(aten.full.default, [2], 0.1, dtype=torch.bfloat16)
sample(aten.full_like.default, t(2, 3, layout="transposed"), 3)
sample(aten.zeros.default, [2, 3])
sample(aten.zero.default, t(2, 3))
sample(aten.zeros_like.default, t(2, 3, dtype="i64"))
sample(aten.ones.default, [3], dtype=torch.bool)
sample(aten.ones_like.default, t(2, 3))
sample(aten.new_zeros.default, t(2, 3), [4])
sample(aten.new_ones.default, t(2, 3), [4])
sample(aten.new_full.default, t(2, 3), [4], 2.0)
sample(aten.scalar_tensor.default, 2.5)
sample(aten.fill.Scalar, t(2, 3), 2)
sample(aten.fill.Tensor, t(2, 3), t())
sample(aten.arange.default, 7)
sample(aten.arange.start, 2, 9)
sample(aten.arange.start_step, 2, 12, 3)
sample(aten.arange.start_step, 0.0, 1.0, 0.1)
sample(aten.arange.start_step, 5, -3, -2)
sample(aten.linspace.default, -1.0, 2.0, 7)
sample(aten.linspace.default, -1.0, 2.0, 1)
sample(aten.eye.default, 4)
sample(aten.eye.m, 3, 5)

# ---------------------------------------------------------------- putting together

for _count in (1, 2, 3, 4, 6):
    sample(aten.cat.default, [T((n + 1, 3)) for n in range(_count)])
    sample(aten.cat.default, [T((3, n + 1), layout="transposed") for n in range(_count)], -1)
sample(aten.cat.default, [t(0), t(2, 3), t(1, 3)])
sample(aten.cat.default, [t(2), t(3, dtype="i64")])
sample(aten.cat.default, [t(2, dtype="bf16"), t(3, dtype="bf16")])
sample(aten.constant_pad_nd.default, t(3, 4), [1, 2])
sample(aten.constant_pad_nd.default, t(3, 4), [1, 2, 0, 3], 2.5)
sample(aten.constant_pad_nd.default, t(5, 4), [-1, 2, 1, -2])
sample(aten.slice_scatter.default, t(5, 4), t(2, 4), 0, 1, 3)
sample(aten.slice_scatter.default, t(5, 4), t(5, 2), 1, 0, 4, 2)
sample(aten.slice_scatter.default, t(5, 4), t(5, 2), 1, -2)
sample(aten.slice_scatter.default, t(5, 1), t(5, 1), 1)
sample(aten.select_scatter.default, t(5, 4), t(4), 0, 2)
sample(aten.select_scatter.default, t(5, 4), t(5), 1, -1)
sample(aten.diagonal_scatter.default, t(4, 5), t(4), 0)
sample(aten.diagonal_scatter.default, t(4, 5), t(2), -2)
sample(aten.diagonal_scatter.default, t(4, 5), t(4), 1)
for _k in range(-1, 4):
    sample(aten.rot90.default, t(3, 4), _k, [0, 1])
    sample(aten.rot90.default, t(2, 3, 4), _k, [2, 0])
sample(aten.flip.default, t(3, 4), [0])
sample(aten.flip.default, t(3, 4), [0, -1])
sample(aten.linalg_cross.default, t(4, 3), t(4, 3))
sample(aten.linalg_cross.default, t(3, 1, 5), t(3, 4, 5), dim=0)
sample(aten.linalg_cross.default, t(4, 3, dtype="i64"), t(1, 3, dtype="i64"))
sample(aten.roll.default, t(3, 4), [1], [0])
sample(aten.roll.default, t(3, 4), [1, -2], [0, 1])
sample(aten.roll.default, t(3, 4), [5])
sample(aten.permute_copy.default, t(2, 3, 4), [2, 0, 1])
sample(aten.expand_copy.default, t(3, 1), [2, 3, 4])
sample(aten.slice_copy.Tensor, t(4, 5), 1, 1, 5, 2)
sample(aten.view_copy.default, t(4, 6), [3, 8])
sample(aten.unbind_copy.int, t(3, 2), 1)
sample(aten.repeat.default, t(3, 4), [2, 2])
sample(aten.repeat.default, t(3, 1), [2, 1, 3])
for _op in (aten.tril.default, aten.triu.default):
    sample(_op, t(4, 5))
    sample(_op, t(2, 4, 4), 1)
    sample(_op, t(4, 4), -1)

# ---------------------------------------------------------------- indices that are data

_index = lambda *shape, n=4, lo=0: T(shape, "i64", lo, n)
sample(aten.embedding.default, t(6, 3), _index(2, 5, n=6))
sample(aten.embedding.default, t(6, 3), T((4,), "i32", 0, 6))
sample(aten.gather.default, t(4, 5), 1, _index(4, 3, n=5))
sample(aten.gather.default, t(4, 5), 0, _index(2, 5))
sample(aten.gather.default, t(4, 5), -1, _index(2, 2))
sample(aten.index_copy.default, t(4, 5), 1, T((1,), "i64", 0, 4), t(4, 1))
sample(aten.take.default, t(4, 5), _index(3, 2, n=20, lo=-20))
sample(aten.index_fill.int_Scalar, t(4, 5), 1, _index(2), 2.5)
sample(aten.index_fill.int_Tensor, t(4, 5), -2, _index(2), t())
sample(aten.index_select.default, t(4, 5), 0, _index(6))
sample(aten.index_select.default, t(4, 5), -1, _index(2))
sample(aten.index_select.default, t(4, 5), 1, _index())
sample(aten.index.Tensor, t(4, 5), [_index(6, lo=-4)])
sample(aten.index.Tensor, t(4, 5), [None, _index(2, 3)])
sample(aten.index.Tensor, t(4, 5), [_index(3, 1), _index(2)])
sample(aten.index.Tensor, t(4, 5, 4), [_index(3), None, _index(3)])
sample(aten.index.Tensor, t(2, 4, 5, 4), [None, _index(3), _index(2, 1, 3)])
sample(aten.index_put.default, t(4, 5), [_index(1)], t(5))
sample(aten.index_put.default, t(4, 5), [None, _index(1)], t())
sample(aten.index_put.default, t(4, 20), [_index(7)], t(7, 20), True)
sample(aten.index_put.default, t(3, 4, 20), [None, _index(7)], t(20), True)
sample(aten.index_add.default, t(4, 20), 0, _index(7), t(7, 20))
sample(aten.index_add.default, t(3, 4, 20), -2, _index(7), t(3, 7, 20), alpha=2)
sample(aten.embedding_dense_backward.default, t(3, 4, 20), _index(3, 4, n=6), 6, -1, False)
sample(aten.embedding_dense_backward.default, t(3, 4, 20), _index(3, 4, n=6), 6, 2, False)
sample(aten.index_put.default, t(4, 5), [t(4, 5, dtype="bool")], t())
sample(aten.index_put.default, t(4, 5), [t(4, dtype="bool")], t())
sample(aten.scatter.value, t(4, 5), 1, _index(4, 2), 2.5)
sample(aten.scatter.src, t(4, 5), 1, _index(4, 1), t(4, 2))
# ---------------------------------------------------------------- the other overloads of what has samples above

for _op, *_args in [
    (aten.sgn.default, t(4, 5)), (aten.sub.Scalar, t(4, 5), 1.5), (aten.rsub.Tensor, t(4, 5), t(5)), (aten.div.Scalar, t(4, 5), 3),
    (aten.true_divide.Tensor, t(4, 5), t(5, lo=0.5)), (aten.floor_divide.Scalar, t(9, dtype="i64", lo=-9, hi=9), 4), (aten.fix.default, t(4, 5)),
    (aten.remainder.Scalar_Tensor, 7, t(5, lo=1.0)), (aten.copysign.Scalar, t(4, 5), -1.0), (aten.xlogy.Scalar_Self, 2.0, t(5, lo=0.1)),
    (aten.xlogy.Scalar_Other, t(5), 2.0), (aten.special_xlog1py.self_scalar, 2.0, t(5, lo=0.1)), (aten.special_xlog1py.other_scalar, t(5), 2.0),
    (aten.clamp_min.Tensor, t(4, 5), t(5)), (aten.clamp_max.Tensor, t(4, 5), t(5)), (aten.bitwise_and.Scalar_Tensor, 5, t(9, dtype="i64")),
    (aten.bitwise_or.Scalar_Tensor, 5, t(9, dtype="i64")), (aten.bitwise_xor.Scalar_Tensor, 5, t(9, dtype="i64")),
    (aten.bitwise_right_shift.Scalar_Tensor, 99, t(9, dtype="i64", lo=0, hi=9)), (aten.__lshift__.Tensor, t(9, dtype="i64"), t(9, dtype="i64", lo=0, hi=9)),
    (aten.__lshift__.Scalar, t(9, dtype="i64"), 3), (aten.__rshift__.Tensor, t(9, dtype="i64"), t(9, dtype="i64", lo=0, hi=9)),
    (aten.__rshift__.Scalar, t(9, dtype="i64"), 3), (aten._prelu_kernel.default, t(4, 5), t(5)),
    (aten.reshape.default, t(4, 6), [3, 8]), (aten._reshape_alias.default, t(4, 6), [3, 8], [8, 1]), (aten.flatten.using_ints, t(2, 3, 4)),
    (aten.lift_fresh.default, t(3)), (aten.lift_fresh_copy.default, t(3)), (aten.lift.default, t(3)), (aten.view_as.default, t(4, 6), t(3, 8)),
    (aten.resolve_conj.default, t(3)), (aten.resolve_neg.default, t(3)), (aten.numpy_T.default, t(3, 4)), (aten.mT.default, t(2, 3, 4)),
    (aten.narrow.default, t(4, 5), 1, 1, 3), (aten.chunk.default, t(4, 5), 2), (aten.split.sizes, t(4, 5), [1, 3]), (aten.contiguous.default, t(4, 5)),
    (aten.tensor_split.sections, t(4, 5), 2), (aten.real.default, t(3)), (aten._neg_view.default, t(3)), (aten.transpose_copy.int, t(3, 4), 0, 1),
    (aten.t_copy.default, t(3, 4)), (aten.alias_copy.default, t(3)), (aten.detach_copy.default, t(3)), (aten.unsqueeze_copy.default, t(3), 0),
    (aten.squeeze_copy.default, t(3, 1)), (aten.squeeze_copy.dim, t(3, 1), 1), (aten.squeeze_copy.dims, t(3, 1), [1]), (aten.select_copy.int, t(3, 4), 1, 2),
    (aten.split_copy.Tensor, t(4, 5), 2), (aten.split_with_sizes_copy.default, t(4, 5), [1, 3]), (aten.diagonal_copy.default, t(3, 4)),
    (aten.unfold_copy.default, t(7), 0, 3, 2), (aten._unsafe_index.Tensor, t(4, 5), [_index(7)]), (aten.count_nonzero.default, t(4, 5, dtype="i64")),
    (aten.std.dim, t(4, 5), [0]), (aten.var.default, t(4, 5)), (aten.std.default, t(4, 5)), (aten.std_mean.correction, t(4, 5), [1]),
    (aten._unsafe_index_put.default, t(4, 5), [_index(1)], t(1, 5)),
    (aten.avg_pool2d.default, t(2, 3, 6, 5), [2, 2]), (aten.avg_pool2d.default, t(3, 7, 6), [3, 2], [2, 1], [1, 1], True, False),
    (aten.avg_pool2d_backward.default, t(2, 3, 3, 2), t(2, 3, 6, 5), [2, 2], [2, 2], [0, 0], False, True, None),
    (aten.avg_pool2d_backward.default, t(3, 4, 7), t(3, 7, 6), [3, 2], [2, 1], [1, 1], True, False, None),
    (aten.avg_pool3d.default, t(2, 2, 4, 4, 5), [2, 2, 2], [2, 1, 2], [0, 1, 0], False, True, 3),
    (aten.avg_pool3d_backward.default, t(2, 2, 2, 3), t(2, 4, 4, 6), [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None),
    (aten.avg_pool2d.default, t(2, 3, 9, 8), [5, 4], [1, 3], [2, 1]), (aten.avg_pool2d.default, t(2, 3, 9, 8), [9, 8]),
    (aten._adaptive_avg_pool2d.default, t(2, 3, 6, 5), [3, 2]), (aten._adaptive_avg_pool2d_backward.default, t(2, 3, 4, 7), t(2, 3, 6, 5)),
    (aten._adaptive_avg_pool3d.default, t(2, 3, 6, 5, 3), [2, 3, 4]), (aten._adaptive_avg_pool3d_backward.default, t(3, 4, 3, 1), t(3, 6, 5, 3)),
    (aten.upsample_nearest1d.default, t(1, 2, 4), [7]), (aten.upsample_nearest2d.default, t(1, 2, 3, 4), [5, 9]),
    (aten.upsample_nearest2d.default, t(1, 2, 3, 4), [6, 12], 2.0, 3.0), (aten.upsample_nearest3d.default, t(1, 2, 2, 3, 2), [4, 3, 5]),
    (aten._upsample_nearest_exact1d.default, t(1, 2, 4), [7]), (aten._upsample_nearest_exact2d.default, t(1, 2, 3, 4), [5, 9]),
    (aten._upsample_nearest_exact3d.default, t(1, 2, 2, 3, 2), [4, 3, 5]), (aten.upsample_nearest1d_backward.default, t(1, 2, 8), [8], [1, 2, 4]),
    (aten.upsample_nearest2d_backward.default, t(1, 2, 6, 4), [6, 4], [1, 2, 3, 4]), (aten._upsample_nearest_exact1d_backward.default, t(1, 2, 8), [8], [1, 2, 4]),
    (aten._upsample_nearest_exact2d_backward.default, t(1, 2, 6, 4), [6, 4], [1, 2, 3, 4], 2.0, 1.0),
    (aten.upsample_nearest3d_backward.default, t(1, 2, 4, 3, 4), [4, 3, 4], [1, 2, 2, 3, 2]),
    (aten.im2col.default, t(2, 3, 6, 5), [3, 2], [1, 2], [1, 0], [2, 1]), (aten.im2col.default, t(3, 6, 5), [2, 2], [1, 1], [0, 0], [1, 1]),
    (aten.col2im.default, t(2, 12, 20), [6, 5], [2, 2], [1, 1], [0, 0], [1, 1]), (aten.col2im.default, t(18, 9), [6, 5], [3, 3], [1, 1], [1, 1], [2, 2]),
    (aten.upsample_linear1d.default, t(1, 2, 4), [7], False), (aten.upsample_linear1d_backward.default, t(1, 2, 7), [7], [1, 2, 4], False),
    (aten.upsample_bilinear2d.default, t(1, 2, 3, 4), [5, 9], True), (aten.upsample_bilinear2d_backward.default, t(1, 2, 5, 9), [5, 9], [1, 2, 3, 4], True),
    (aten.upsample_bicubic2d.default, t(1, 2, 3, 4), [6, 3], False, 2.0, 0.8), (aten.upsample_bicubic2d_backward.default, t(1, 2, 6, 3), [6, 3], [1, 2, 3, 4], False),
    (aten.upsample_trilinear3d.default, t(1, 2, 2, 3, 2), [4, 2, 5], False),
    (aten.upsample_trilinear3d_backward.default, t(1, 2, 4, 2, 5), [4, 2, 5], [1, 2, 2, 3, 2], False),
    (aten._upsample_nearest_exact3d_backward.default, t(1, 2, 4, 3, 4), [4, 3, 4], [1, 2, 2, 3, 2]),
]:
    sample(_op, *_args)
sample(aten.div.Scalar_mode, t(9, lo=-9.0, hi=9.0), 4, rounding_mode="floor")

# ---------------------------------------------------------------- operators that are decomposed

ALL, BATCH = [True, True, True], t(3, 4, 5)
STATS = T((4,), lo=0.5, hi=1.5)
for _op, *_args in [
    (aten.log_sigmoid_forward.default, t(4, 5)), (aten.log_sigmoid_forward.default, t(4, 6, layout="transposed")), (aten.glu.default, t(3, 6)),
    (aten.log_sigmoid_backward.default, t(4, 5), t(4, 5, lo=0.0, hi=0.0), t(4, 5, lo=1.0, hi=1.0)), (aten.glu.default, t(4, 6, dtype="bf16"), 0),
    (aten.mse_loss.default, t(4, 5), t(4, 5), 0), (aten.mse_loss.default, t(4, 5), t(4, 5)), (aten.smooth_l1_loss.default, t(4, 5), t(4, 5), 0),
    (aten.smooth_l1_loss.default, t(4, 5), t(4, 5), 2, 0.5), (aten.trace.default, t(4, 5)), (aten.trace.default, t(5, 3, dtype="i64")),
    (aten.diag_embed.default, t(3)), (aten.diag_embed.default, t(2, 3), 1), (aten.diag_embed.default, t(2, 3), -1, 0, 2),
    (aten._prelu_kernel_backward.default, t(4, 5), t(4, 5), t(4, 5)), (aten.mish_backward.default, t(4, 5), t(4, 5)),
    (aten.glu_backward.default, t(3, 3), t(3, 6), 1), (aten.native_dropout_backward.default, t(4, 5), t(4, 5, dtype="bool"), 2.0),
    (aten.stack.default, [t(3, 4), t(3, 4)], 1), (aten.pixel_shuffle.default, t(2, 8, 3, 3), 2), (aten.pixel_unshuffle.default, t(2, 3, 4, 6), 2),
    (aten.reflection_pad1d.default, t(2, 5), [2, 1]), (aten.reflection_pad2d.default, t(2, 4, 5), [1, 2, 2, 1]),
    (aten.reflection_pad3d.default, t(2, 3, 4, 5), [1, 2, 2, 1, 1, 1]), (aten.replication_pad1d.default, t(2, 5), [2, 1]),
    (aten.replication_pad2d.default, t(2, 4, 5), [1, 2, 2, 1]), (aten.replication_pad3d.default, t(2, 3, 4, 5), [1, 2, 2, 1, 1, 1]),
    (aten.mv.default, t(3, 4), t(4)), (aten.addmv.default, t(3), t(3, 4), t(4)), (aten.addr.default, t(3, 4), t(3), t(4)), (aten.dot.default, t(5), t(5)),
    (aten.vdot.default, t(5), t(5)), (aten.nll_loss_forward.default, t(4, 5), _index(4, n=5), None, 1, -100),
    (aten.nll_loss2d_forward.default, t(2, 5, 3, 3), _index(2, 3, 3, n=5), t(5, lo=0.1), 1, 2),
    (aten.nll_loss_backward.default, t(), t(4, 5), _index(4, n=5), t(5, lo=0.1), 2, -100, t(lo=1.0)),
    (aten.nll_loss2d_backward.default, t(2, 3, 3), t(2, 5, 3, 3), _index(2, 3, 3, n=5), None, 0, 2, t(lo=1.0)),
    (aten.mse_loss_backward.default, t(), t(4, 5), t(4, 5), 1), (aten.smooth_l1_loss_backward.default, t(4, 5), t(4, 5), t(4, 5), 0, 0.5),
    (aten.huber_loss.default, t(4, 5), t(4, 5), 2, 0.5), (aten.huber_loss_backward.default, t(), t(4, 5), t(4, 5), 2, 0.5),
    (aten.soft_margin_loss.default, t(4, 5), t(4, 5)), (aten.soft_margin_loss_backward.default, t(), t(4, 5), t(4, 5), 1),
    (aten.binary_cross_entropy.default, t(4, 5, lo=0.1, hi=0.9), t(4, 5, lo=0.0, hi=1.0), t(5)),
    (aten.binary_cross_entropy_backward.default, t(), t(4, 5, lo=0.1, hi=0.9), t(4, 5, lo=0.0, hi=1.0), None, 1),
    (aten.binary_cross_entropy_with_logits.default, t(4, 5), t(4, 5, lo=0.0, hi=1.0), None, t(5, lo=0.5)),
    (aten.native_layer_norm.default, BATCH, [4, 5], t(4, 5), t(4, 5), 1e-5), (aten._fused_rms_norm.default, BATCH, [5], t(5), 1e-5),
    (aten.native_layer_norm_backward.default, BATCH, BATCH, [5], t(3, 4, 1), t(3, 4, 1, lo=0.5), t(5), t(5), ALL),
    (aten.native_group_norm.default, BATCH, t(4), t(4), 3, 4, 5, 2, 1e-5),
    (aten.native_group_norm_backward.default, BATCH, BATCH, t(3, 2), t(3, 2, lo=0.5), t(4), 3, 4, 5, 2, ALL),
    (aten.native_batch_norm.default, BATCH, STATS, t(4), t(4), STATS, False, 0.1, 1e-5), (aten._native_batch_norm_legit.no_stats, BATCH, STATS, t(4), True, 0.1, 1e-5),
    (aten._native_batch_norm_legit_no_training.default, BATCH, STATS, t(4), t(4), STATS, 0.1, 1e-5),
    (aten._native_batch_norm_legit_functional.default, BATCH, STATS, t(4), t(4), STATS, True, 0.1, 1e-5),
    (aten.native_batch_norm_backward.default, BATCH, BATCH, STATS, t(4), STATS, t(4), STATS, True, 1e-5, ALL),
    (aten._safe_softmax.default, t(4, 5), 1), (aten.slice_backward.default, t(2, 5), [4, 5], 0, 1, 3, 1),
    (aten.select_backward.default, t(5), [4, 5], 0, 2), (aten.diagonal_backward.default, t(4), [4, 5], 0, 0, 1), (aten.unfold_backward.default, t(3, 4), [8], 0, 4, 2),
]:
    decomposed(_op, *_args)
for _op, _lr in [(aten._fused_adam.default, 0.1), (aten._fused_adam.tensor_lr, T((), lo=0.1)), (aten._fused_adamw.default, 0.1), (aten._fused_adamw.tensor_lr, T((), lo=0.1))]:
    for _largest in (True, False):
        sample(_op, *([t(3, 4), t(5)] for _ in range(3)), *([t(3, 4, lo=0.1), t(5, lo=0.1)] for _ in range(1 + _largest)), *([[]] * (not _largest)),
               [T((), lo=3.0, hi=3.0)] * 2, table=DECOMPOSED, lr=_lr, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=_largest, maximize=_largest)
for _lr in (0.1, T((), lo=0.1)):
    _lists, _kind = [[t(3, 4), t(5)] for _ in range(2)], "tensor_lr" if isinstance(_lr, T) else "default"
    for _first in (True, False):
        sample(getattr(aten._fused_sgd, _kind), *_lists, [t(3, 4), t(5)], table=DECOMPOSED, lr=_lr, weight_decay=0.1, momentum=0.9, dampening=0.1,
               nesterov=_first, maximize=_first, is_first_step=_first)
    sample(getattr(aten._fused_sgd, _kind), *_lists, [], table=DECOMPOSED, lr=_lr, weight_decay=0.0, momentum=0.0, dampening=0.0,
           nesterov=False, maximize=False, is_first_step=False)
    sample(getattr(aten._fused_adagrad, _kind), *_lists, [t(3, 4, lo=0.1), t(5, lo=0.1)], [T((), lo=3.0, hi=3.0)] * 2, table=DECOMPOSED, lr=_lr, lr_decay=0.1,
           weight_decay=0.1, eps=1e-8, maximize=True)
for _kernel, _stride, _padding, _ceil in [(2, 2, 0, False), (3, 2, 1, True), (2, 1, 1, False)]:
    sample(aten.max_pool2d_with_indices.default, t(2, 3, 7, 8), [_kernel] * 2, [_stride] * 2, [_padding] * 2, [1, 1], _ceil)
sample(aten.max_pool3d_with_indices.default, t(1, 2, 4, 5, 6), [2, 2, 2], [2, 2, 2])
for _layout in ("plain", "transposed", "sliced"):
    sample(aten.mm.default, t(3, 4), t(4, 5, layout=_layout))
    sample(aten.mm.default, t(17, 20, layout=_layout), t(20, 7))
    sample(aten.addmm.default, t(5), t(3, 4, layout=_layout), t(4, 5))
    sample(aten.addmm.default, t(3, 5, layout=_layout), t(3, 4), t(4, 5))
    sample(aten.bmm.default, t(2, 3, 4, layout=_layout), t(2, 4, 5, layout=_layout))
    sample(aten.baddbmm.default, t(2, 3, 5, layout=_layout), t(2, 3, 4), t(2, 4, 5))
LIBRARY_SAMPLES = [Sample(op, args) for op, *args in [
    (aten.index_put.default, t(4, 5), [_index(7)], t(7, 5), True),
    (aten.scatter_add.default, t(4, 5), 1, _index(4, 3), t(4, 3)), (aten.index_add.default, t(4, 20), 1, _index(7), t(4, 7)),
    (aten.embedding_dense_backward.default, t(3, 4, 2), _index(3, 4, n=6), 6, -1, False),
    (aten.mm.default, t(50, 70), t(70, 20)), (aten.mm.default, t(50, 70, layout="transposed"), t(70, 20, layout="sliced")),
    (aten.bmm.default, t(2, 40, 70), t(2, 70, 20)), (aten.addmm.default, t(20), t(50, 70), t(70, 20)), (aten.addmm.default, t(50, 20), t(50, 70), t(70, 20)),
    (aten.baddbmm.default, t(2, 40, 20), t(2, 40, 70), t(2, 70, 20)),
    (aten.convolution.default, t(2, 3, 8, 8), t(4, 3, 3, 3), t(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    (aten.cholesky_inverse.default, T((1, 1), lo=1.0)), (aten._upsample_bilinear2d_aa.default, t(1, 2, 3, 3), [6, 6], False),
    (aten.sort.default, t(4, 5), -1), (aten.topk.default, t(4, 5), 2), (aten.max_pool2d_with_indices.default, t(1, 2, 6, 6), [5, 5], [1, 1]),
]]


# ---------------------------------------------------------------- graphs made by hand

class Val:
    """Stands in for an abstract tensor: has a Spec."""

    def __init__(self, tensor: torch.Tensor):
        self.spec = TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype, tensor.device)


def vals(tree: Any) -> Any:
    return pytree.tree_map(lambda a: Val(a) if isinstance(a, torch.Tensor) else a, tree)


class _Recorder(Interpreter):
    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        n.meta["val"] = vals(result)
        return result


def graph_of(build: Any, inputs: list[torch.Tensor]) -> tuple[GraphModule, Any]:
    """`build(call, *nodes) -> outputs` makes a graph with `call(op, *args, **kwargs)`; returned with eager's results."""
    graph = Graph()
    nodes = [graph.placeholder(f"x{n}") for n in range(len(inputs))]
    graph.output(build(lambda op, *args, **kwargs: graph.call_function(op, args, kwargs), *nodes))
    gm = GraphModule(torch.nn.Module(), graph)
    return gm, _Recorder(gm).run(*inputs)


def one_op_graph(sample: Sample) -> tuple[GraphModule, list[torch.Tensor], Any]:
    """The graph of one operator on one sample: (graph, inputs, eager's flat results)."""
    leaves, tree = pytree.tree_flatten(sample.make())
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def build(call: Any, *nodes: Node) -> Any:
        rest = iter(nodes)
        args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree)
        result = call(sample.op, *args, **kwargs)
        count = _results(sample)
        return (result,) if count is None else tuple(call(operator.getitem, result, n) for n in range(count))
    gm, expected = graph_of(build, inputs)
    return gm, inputs, list(expected)


def _results(sample: Sample) -> int | None:
    """How many results the operator has; None for one that is not in a tuple."""
    args, kwargs = sample.make()
    result = sample.op(*args, **kwargs)
    return len(result) if isinstance(result, (tuple, list)) else None
