"""Processor time of scalar functions, eager's kernel against a compiled one, on one thread.

    OMP_NUM_THREADS=1 python bench/functions.py --match "fmod|lgamma" --dtypes float32,float64

Of 256x256 elements: both are measured in turns, the least of a few times is shown, and what is slower than eager is marked.  About 2 us
of each are the call.
"""
from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import special

import firesteel as fs

SHAPE = 256, 256
Interval = tuple[float, float]
WIDE, POSITIVE, UNIT = (-5.0, 5.0), (0.1, 6.0), (-0.99, 0.99)

FLOATS: dict[str, tuple[Callable[..., Any], Interval | tuple[Interval, ...]]] = {
    **{name: (getattr(torch, name), WIDE) for name in ("exp", "expm1", "sin", "tan", "atan", "sinh", "cosh", "tanh", "asinh", "sigmoid", "erf", "erfc", "neg",
                                                       "abs", "lgamma", "digamma", "i0")},
    **{name: (getattr(torch, name), POSITIVE) for name in ("log", "log1p", "sqrt", "rsqrt")},
    **{name: (getattr(torch, name), UNIT) for name in ("asin", "acos", "atanh", "erfinv")},
    **{name: (getattr(special, name), WIDE) for name in ("i0e", "i1", "i1e", "erfcx", "log_ndtr")},
    **{name: (getattr(torch, name), (WIDE, WIDE)) for name in ("fmod", "remainder", "floor_divide", "nextafter", "copysign", "atan2", "hypot")},
    "lgamma, x > 0": (torch.lgamma, POSITIVE), "polygamma(1)": (lambda x: torch.polygamma(1, x), POSITIVE), "pow": (torch.pow, (POSITIVE, WIDE)),
    "x ** 2.5": (lambda x: x ** 2.5, POSITIVE), "xlogy": (torch.xlogy, (WIDE, POSITIVE)),
}
INTS: dict[str, tuple[Callable[..., Any], Interval | tuple[Interval, ...]]] = {
    **{name: (getattr(torch, name), ((-50, 50), (1, 20))) for name in ("remainder", "fmod", "floor_divide", "gcd")},
    "truncated": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), ((-50, 50), (1, 20))), "x // 7": (lambda x: x // 7, (-50, 50)),
}


def values(interval: Interval, dtype: torch.dtype) -> torch.Tensor:
    low, high = interval
    return (torch.rand(SHAPE, dtype=torch.float64) * (high - low) + low).to(dtype)


def least(function: Callable[[], Any], seconds: float) -> float:
    """Microseconds of a call: of a few runs of calls, the shortest."""
    begin, count = time.process_time(), 0
    while time.process_time() - begin < seconds:
        function()
        count += 1
    return (time.process_time() - begin) / count * 1e6


def compare(name: str, function: Callable[..., Any], intervals: Any, dtype: torch.dtype) -> str:
    fs.reset()
    args = [values(i, dtype) for i in (intervals if isinstance(intervals[0], tuple) else (intervals,))]
    try:
        function(*args)
    except (NotImplementedError, RuntimeError):
        return ""           # eager has no kernel of this dtype
    compiled = fs.compile(lambda *given: function(*given))
    compiled(*args)
    rounds = [(least(lambda: function(*args), 0.02), least(lambda: compiled(*args), 0.02)) for _ in range(5)]
    eager, ours = (min(column) for column in zip(*rounds))
    return f"{name:16s} {str(dtype)[6:]:9s} {eager:9.1f} {ours:9.1f} {eager / ours:7.2f}{' <' if eager < ours else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default=".*", help="functions whose whole name matches")
    parser.add_argument("--dtypes", default="float32,float64,bfloat16,int64,int32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'function':16s} {'dtype':9s} {'eager us':>9s} {'ours us':>9s} {'eager/ours':>7s}")
    for dtype in (getattr(torch, name) for name in options.dtypes.split(",")):
        for name, (function, intervals) in (FLOATS if dtype.is_floating_point else INTS).items():
            row = compare(name, function, intervals, dtype) if re.fullmatch(options.match, name) else ""
            if row:
                print(row, flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
