"""Special values of every dtype, every scalar operator that kernels compute, and how far results may lie from eager's.

`VALUES[dtype]`: zeros of both signs, denormals, limits, infinities, NaN, halfway cases, arguments at which functions change their way.
`UNARY`, `BINARY`, `TERNARY`: name -> (function, dtypes).  `LOOSE`: the table of tolerances, each with its reason.
"""
import math

import torch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
BOOL = (torch.bool,)
NUMBERS, ALL = FLOATS + INTS, FLOATS + INTS + BOOL

_PLAIN = (0.0, -0.0, 0.1, -0.3, 0.5, -0.5, 0.75, 1.0, -1.0, 1.5, -1.5, 2.0, 2.5, -2.5, 3.0, 3.5, -3.5, 5.0, -6.0, 7.0, 9.5, 20.5, -20.5, 33.0, 87.0, -87.5, 89.0,
          -103.5, 127.0, 128.0, -128.0, 129.0, 255.0, 256.0, 300.0, -300.0, 709.5, -745.5, 1e3, -1e4, 3e4, math.pi, -math.pi / 2, 1e5)
_LARGE = (2.0**31 - 129, 2.0**31 + 1, 2.0**32 + 3, -(2.0**31) - 1, 2.0**33 + 255, 2.0**31 - 1.5, 2.0**31, -(2.0**31), 2.0**32 + 2**16, 1e10, -1e15, 2.0**53, 2.0**63, -(2.0**63), 1e19, -1e20, 1e30, 1e-10, -1e-20, 1e-37)


def _floats(dtype):
    info = torch.finfo(dtype)
    edges = (info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 2, -info.smallest_normal / 4, info.eps, 1 + info.eps, 1 - info.eps / 2,
             -1 + info.eps / 2, math.inf, -math.inf, math.nan)
    return torch.tensor([*_PLAIN, *_LARGE, *edges], dtype=torch.float64).to(dtype)


def _ints(dtype):
    info = torch.iinfo(dtype)
    wanted = (0, 1, -1, 2, -2, 3, -3, 5, 7, -7, 8, 9, 15, 16, 31, 32, 33, 63, 64, 65, 100, 127, -128, 255, 256, 2**15 - 1, 2**31 - 1, -(2**31), 2**53 + 1)
    return torch.tensor(sorted({v for v in (*wanted, info.min, info.max, info.min + 1, info.max - 1) if info.min <= v <= info.max}), dtype=dtype)


VALUES = {dtype: _floats(dtype) for dtype in FLOATS} | {dtype: _ints(dtype) for dtype in INTS} | {torch.bool: torch.tensor([False, True])}

_F = torch.nn.functional
_special = torch.special
UNARY = {name: (getattr(torch, name), FLOATS) for name in (
    "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh",
    "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", "lgamma", "digamma", "reciprocal", "frac", "logit", "deg2rad", "rad2deg", "sinc")}
UNARY |= {name: (getattr(torch, name), NUMBERS) for name in (
    "neg", "abs", "sign", "floor", "ceil", "round", "trunc", "square", "positive", "nan_to_num", "angle", "signbit", "isnan", "isinf", "isfinite")}
UNARY |= {"logical_not": (torch.logical_not, ALL), "bitwise_not": (torch.bitwise_not, INTS + BOOL)}
UNARY |= {name: (getattr(_F, name), FLOATS) for name in (
    "relu6", "hardtanh", "hardsigmoid", "hardswish", "leaky_relu", "elu", "celu", "selu", "softplus", "softshrink", "hardshrink", "silu", "mish", "gelu",
    "logsigmoid", "softsign", "tanhshrink")}
UNARY |= {"gelu_tanh": (lambda x: _F.gelu(x, approximate="tanh"), FLOATS), "relu": (torch.relu, NUMBERS), "entr": (_special.entr, FLOATS),
          "round2": (lambda x: torch.round(x, decimals=2), FLOATS), "nan_to_num3": (lambda x: torch.nan_to_num(x, 2.0, 3.0, -4.0), FLOATS)}
UNARY |= {f"pow{e}": (lambda x, e=e: x.pow(e), FLOATS) for e in (0, 0.5, 1, 2, 3, 4, -0.5, -1, -2, 1.5, -3)}
UNARY |= {f"pow{e}i": (lambda x, e=e: x.pow(e), INTS) for e in (0, 1, 2, 3, 5)}
UNARY |= {f"to_{str(d)[6:]}": (lambda x, d=d: x.to(d), ALL) for d in ALL}
UNARY |= {f"over{c}": (lambda x, c=c: torch.div(x, c, rounding_mode="floor"), NUMBERS) for c in (3, -3)}
UNARY |= {f"cut{c}": (lambda x, c=c: torch.div(x, c, rounding_mode="trunc"), NUMBERS) for c in (3, -3)}
UNARY |= {f"rest{c}": (lambda x, c=c: torch.remainder(x, c), NUMBERS) for c in (3, -3)}
UNARY |= {f"fmod{c}": (lambda x, c=c: torch.fmod(x, c), NUMBERS) for c in (3, -3)}
UNARY |= {f"shl{c}": (lambda x, c=c: x << c, INTS) for c in (0, 1, 7)}
UNARY |= {f"shr{c}": (lambda x, c=c: x >> c, INTS) for c in (0, 1, 7, 8, 31, 63)}
UNARY |= {"clamp0": (lambda x: x.clamp(0, 1), NUMBERS), "clamp_min": (lambda x: x.clamp(min=0), NUMBERS), "clamp_max": (lambda x: x.clamp(max=0), NUMBERS),
          "threshold": (lambda x: _F.threshold(x, 0.5, -2.0), FLOATS)}
UNARY |= {"clamp": (lambda x: x.clamp(1, 5), NUMBERS), "true_divide": (lambda x: x / 3, NUMBERS), "plus_float": (lambda x: x + 0.5, ALL)}

BINARY = {name: (getattr(torch, name), NUMBERS) for name in ("add", "mul", "sub", "maximum", "minimum", "fmax", "fmin", "eq", "ne", "lt", "le", "gt", "ge")}
BINARY |= {name: (getattr(torch, name), ALL) for name in ("logical_and", "logical_or", "logical_xor")}
BINARY |= {name: (getattr(torch, name), INTS + BOOL) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")}
BINARY |= {name: (getattr(torch, name), INTS) for name in ("bitwise_left_shift", "bitwise_right_shift")}
BINARY |= {name: (getattr(torch, name), FLOATS) for name in (
    "div", "pow", "atan2", "hypot", "copysign", "floor_divide", "remainder", "fmod", "logaddexp", "logaddexp2", "xlogy", "heaviside", "nextafter")}
BINARY |= {"xlog1py": (_special.xlog1py, FLOATS), "truncated": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), FLOATS),
           "ldexp": (torch.ldexp, FLOATS[:2]), "bool_add": (torch.add, BOOL), "bool_mul": (torch.mul, BOOL), "bool_max": (torch.maximum, BOOL),
           "add_alpha": (lambda x, y: torch.add(x, y, alpha=2), NUMBERS), "rsub": (torch.rsub, NUMBERS), "true_div": (torch.true_divide, INTS)}
TERNARY = {"addcmul": (torch.addcmul, FLOATS), "addcdiv": (torch.addcdiv, FLOATS), "lerp": (torch.lerp, FLOATS[:2]),
           "where": (lambda x, y, z: torch.where(x > y, y, z), NUMBERS), "clamp_tensor": (lambda x, y, z: torch.clamp(x, y, z), NUMBERS)}

_aten = torch.ops.aten
BACKWARD = {
    "threshold": lambda g, x: _aten.threshold_backward(g, x, 0.5), "hardtanh": lambda g, x: _aten.hardtanh_backward(g, x, -1.0, 1.0),
    "hardsigmoid": _aten.hardsigmoid_backward, "hardswish": _aten.hardswish_backward,
    "leaky_relu": lambda g, x: _aten.leaky_relu_backward(g, x, 0.01, False), "elu": lambda g, x: _aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "softplus": lambda g, x: _aten.softplus_backward(g, x, 1.0, 20.0), "softshrink": lambda g, x: _aten.softshrink_backward(g, x, 0.5),
    "hardshrink": lambda g, x: _aten.hardshrink_backward(g, x, 0.5), "silu": _aten.silu_backward, "gelu": _aten.gelu_backward,
    "sigmoid": _aten.sigmoid_backward, "tanh": _aten.tanh_backward, "mish": _aten.mish_backward, "logit": lambda g, x: _aten.logit_backward(g, x, 0.1),
}
BINARY |= {f"{name}_backward": (function, FLOATS) for name, function in BACKWARD.items()}
BINARY |= {"mse": (lambda x, y: _F.mse_loss(x, y, reduction="none"), FLOATS), "smooth_l1": (lambda x, y: _F.smooth_l1_loss(x, y, reduction="none"), FLOATS)}

# What may differ from eager by more than `ULPS`: the error allowed in units of eps times the size of the arguments, and why.
ULPS = {torch.float32: 4, torch.float64: 4, torch.bfloat16: 1, torch.float16: 1}
EXACT = frozenset({
    "neg", "abs", "sign", "floor", "ceil", "round", "trunc", "square", "positive", "nan_to_num", "nan_to_num3", "relu", "relu6", "hardtanh", "clamp", "clamp0",
    "clamp_min", "clamp_max", "threshold", "add", "sub", "mul", "div", "maximum", "minimum", "copysign", "nextafter", "where", "clamp_tensor",
    "heaviside", "reciprocal", "frac"})
LOOSE = {
    "gelu": (4, "x * (1 + erf(x)) / 2: below 0 the sum cancels, and the error of erf stays"),
    "gelu_tanh": (4, "as gelu, with tanh"),
    "gelu_backward": (16, "as gelu; the density is added"),
    "tanhshrink": (4, "x - tanh(x) cancels: the error of tanh stays"),
    "mish_backward": (64, "exp, log1p and tanh one after the other, and a difference of them"),
    "logaddexp": (4, "max + log1p cancels where the result is near 0"),
    "logaddexp2": (4, "as logaddexp"),
    "digamma": (16, "a difference near its zeros; eager has no digits next to its poles"),
    "add_alpha": (1, "eager's build multiplies and adds with one rounding where the machine has the instruction"),
    "addcmul": (1, "as add_alpha"),
    "fmax": (0, "of zeros with different signs eager takes the first in f32 and f64, the second in bf16"),
    "fmin": (0, "as fmax"),
    "remainder": (0, "as fmod"),
    "fmod": (0, "eager's vectors give NaN where the quotient is no number that the dtype has"),
}
