"""Every scalar operator on special values of every dtype, against eager; values, operators and tolerances are in `special_values.py`.

Eager's vector code and its scalar code (a strided tensor, the tail) disagree at some of these values: either answer is right.  So is one
that lies nearer to the value computed in float64 than eager's, where it is no NaN.
"""
import pytest
import torch
from special_values import ALL, BINARY, EXACT, FLOATS, LOOSE, TERNARY, ULPS, UNARY, VALUES

import firesteel as fs

AT_ONCE = 16            # operators in one compiled function
SIZES = (1, 7, 16, 33)  # a scalar, a tail alone, one vector, vectors and a tail


def _steps(e, o):
    """How many numbers of the dtype lie between; infinite between NaN and a number, and between zeros of different signs."""
    if not e.dtype.is_floating_point:
        return (e != o).double()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[e.element_size()]
    a, b = (torch.where(b < 0, torch.iinfo(kind).min - b, b) for b in (t.contiguous().view(kind).to(torch.int64) for t in (e, o)))
    apart = torch.where((a < 0) == (b < 0), (a - b).abs().double(), a.double().abs() + b.double().abs())
    steps = torch.where(e == o, 0.0, apart)
    steps = torch.where((e.isnan() != o.isnan()) | ((e == 0) & (o == 0) & (e.signbit() != o.signbit())), torch.inf, steps)
    return torch.where(e.isnan() & o.isnan(), 0.0, steps)


def _wrong(name, function, args, ours):
    """Where ours is none of the right answers."""
    eager = function(*args)
    assert eager.dtype == ours.dtype, (name, eager.dtype, ours.dtype)
    limit = 0 if name in EXACT or not eager.dtype.is_floating_point else ULPS[eager.dtype]
    wrong = _steps(eager, ours) > limit
    if not wrong.any():
        return wrong
    one_by_one = function(*[a.repeat_interleave(2)[::2] for a in args])
    wrong &= _steps(one_by_one, ours) > limit
    if not eager.dtype.is_floating_point or name in EXACT or not args[0].dtype.is_floating_point:
        return wrong
    return wrong & ~_nearer(function, args, eager, ours, limit) & ~_excused(name, function, args, eager, ours)


def _nearer(function, args, eager, ours, limit):
    if eager.dtype is torch.float64:
        return torch.zeros_like(ours, dtype=torch.bool)
    exact = function(*[a.double() for a in args]).to(ours.dtype)
    off = _steps(exact, ours)
    return (off <= limit) | (off <= _steps(exact, eager)) & off.isfinite()


def _excused(name, function, args, eager, ours):
    if name not in LOOSE:
        return torch.zeros_like(ours, dtype=torch.bool)
    if name in ("fmod", "remainder"):
        return eager.isnan() & (args[0] / args[1]).isinf()
    if name in ("fmax", "fmin"):
        return ours == eager
    if name == "digamma" and bool(((args[0] - args[0].round()).abs() < 1e-9).any()):
        eager = torch.where((args[0] < 0) & ((args[0] - args[0].round()).abs() < 1e-9), ours, eager)
    size = torch.stack([a.double().abs() for a in args]).amax(0) if name not in ("addcmul", "add_alpha") else _largest_term(name, args)
    size = size.clamp(min=1.0) if name in ("digamma", "logaddexp", "logaddexp2", "mish_backward") else size
    near = (ours.double() - eager.double()).abs() <= LOOSE[name][0] * torch.finfo(ours.dtype).eps * size
    return near | size.to(ours.dtype).isinf()


def _largest_term(name, args):
    x, *factors = (a.to(torch.float64).abs() for a in args)
    product = 2 * factors[0] if name == "add_alpha" else factors[0] * factors[1]
    return torch.maximum(x, product)


def _arguments(dtype, arity):
    values = VALUES[dtype]
    if arity == 3:
        values = values[::max(1, len(values) // 12)]
    return [t.reshape(-1).contiguous() for t in torch.meshgrid(*[values] * arity, indexing="ij")]


def _check(table, names, args, compiled):
    for name, ours in zip(names, compiled(*args)):
        wrong = _wrong(name, table[name][0], args, ours)
        shown = [(name, *[a[i].item() for a in args], table[name][0](*args)[i].item(), ours[i].item()) for i in wrong.nonzero().flatten()[:3].tolist()]
        assert not shown, f"(operator, arguments, eager's, ours): {shown}"


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("arity", [1, 2, 3])
def test_operators_on_special_values(arity, dtype):
    table = (UNARY, BINARY, TERNARY)[arity - 1]
    args, possible = _arguments(dtype, arity), [name for name, (_, dtypes) in table.items() if dtype in dtypes]
    for k in range(0, len(possible), AT_ONCE):
        names = possible[k:k + AT_ONCE]
        function = lambda *a, names=names: tuple(table[name][0](*a) for name in names)
        _check(table, names, args, fs.compile(function))
        if arity == 1:
            compiled = fs.compile(function, dynamic=True)
            for size in SIZES:
                _check(table, names, [args[0][-size:].clone()], compiled)


MIXED = {"add": torch.add, "mul": torch.mul, "lt": torch.lt, "maximum": torch.maximum, "where": lambda x, y: torch.where(y > x, x, y),
         "true_divide": torch.true_divide, "eq": torch.eq}


@pytest.mark.parametrize("left", ALL, ids=str)
def test_promotion_on_special_values(left):
    """Pairs of dtypes: what each is converted to before the operator sees it."""
    x = VALUES[left]
    others = [VALUES[dtype][torch.arange(len(x)) % len(VALUES[dtype])] for dtype in ALL]
    compiled = fs.compile(lambda x, *ys: tuple(f(x, y) for y in ys for f in MIXED.values()))
    results = iter(compiled(x, *others))
    for y in others:
        for name, function in MIXED.items():
            wrong = _wrong("div" if name == "true_divide" else name, function, (x, y), next(results))
            assert not wrong.any(), (name, y.dtype, x[wrong][:3], y[wrong][:3])


@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_conversions_out_of_range(source):
    values = torch.tensor([0.5, -0.5, 255.9, 256.0, -1.5, -129.7, 32768.5, -32769.9, 2.0**31, 2.0**31 + 1, -(2.0**31) - 1, 2.0**32 + 3, -(2.0**32) - 7,
                           2.0**40 + 12345, 2.0**62, 2.0**63, -(2.0**63), 1e19, 1e300, torch.inf, -torch.inf, torch.nan], dtype=torch.float64).to(source)
    targets = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    function = lambda x: tuple(x.to(dtype) for dtype in targets)
    compiled = fs.compile(function, dynamic=True)
    for x in (values, values[:1], values[-7:]):
        for ours, eager in zip(compiled(x), function(x)):
            assert torch.equal(ours, eager), ours.dtype
