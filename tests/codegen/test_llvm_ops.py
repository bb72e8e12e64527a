"""Every scalar operator through a compiled kernel, as vectors and in the masked rest, against its meaning on torch tensors."""
from __future__ import annotations

import math

import pytest
import torch
from native_nests import Runner, buffer, contiguous, pointwise, run

from firesteel.loops.ir import Axis, Nest, Phase, Store
from firesteel.loops.scalars import DTYPES, FLOATS, OPS, S, as_bits, literal, to

LOOP_DTYPES = ("f32", "f64", "i64", "i32", "i16", "i8", "u8", "bool")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, math.inf, -math.inf, math.nan, 1e-30, -1e-30, 1e30, 3.0, 100.0, -100.0]
CASES = [(name, dtype) for name, row in OPS.items() for dtype in sorted(row.allowed & set(LOOP_DTYPES))]


def sample(interval: tuple[float, float], dtype: str, n: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    low, high = interval
    if dtype == "bool":
        return torch.randint(0, 2, (n,), generator=g).bool()
    x = torch.rand(n, generator=g, dtype=torch.float64) * (high - low) + low
    if dtype == "u8":
        x = x.abs()
    return (x if dtype in FLOATS else x.round()).to(DTYPES[dtype])


def tensors_of(name: str, dtype: str, n: int) -> list[torch.Tensor]:
    first = ["bool"] if name == "where" else []
    kinds = first + [dtype] * (OPS[name].arity - len(first))
    return [sample(OPS[name].domain[k], kind, n, 7 * k + 1) for k, kind in enumerate(kinds)]


def apply(name: str, inputs: list[torch.Tensor], out: torch.dtype) -> torch.Tensor:
    result = torch.empty(inputs[0].shape, dtype=out)
    names = [f"x{k}" for k in range(len(inputs))]
    nest, buffers = pointwise(lambda *v: getattr(S, name)(*v), buffer("y", result), *(buffer(n, t) for n, t in zip(names, inputs)))
    assert run(nest, buffers, {"y": result, **dict(zip(names, inputs))}) == 0
    return result


def tolerance(dtype: str) -> float:
    return {"f32": 1.5e-6, "f64": 1e-13}.get(dtype, 0.0)


def assert_near(got: torch.Tensor, want: torch.Tensor, rtol: float) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * 0.05 if rtol else 0, equal_nan=True)


LOOSE = {"digamma": 300.0, "trigamma": 1e4, "pow": 4.0, "tan": 4.0, "erfc": 200.0, "floordiv": 1.0}


@pytest.mark.parametrize("name,dtype", CASES, ids=lambda v: str(v))
def test_operator(name, dtype):
    inputs = tensors_of(name, dtype, 83)
    want = OPS[name].meaning(*inputs)
    got = apply(name, inputs, want.dtype)
    exact = name in ("add", "sub", "mul", "div", "neg", "abs", "recip", "floor", "ceil", "round", "trunc", "where", "max", "min", "copysign")
    assert_near(got, want, 0.0 if exact else tolerance(dtype) * LOOSE.get(name, 1.0))


@pytest.mark.parametrize("name,dtype", [case for case in CASES if case[1] in ("f32", "f64")], ids=lambda v: str(v))
def test_scalars_have_the_bits_of_lanes(name, dtype):
    """Whatever lies in the lanes beside: a value that another kernel computes again must be equal to itself."""
    inputs = [torch.cat((t, t[:14] if t.dtype is torch.bool else torch.tensor(SPECIAL, dtype=t.dtype), t)) for t in tensors_of(name, dtype, 83)]
    if name == "lgamma":
        inputs = [torch.cat((inputs[0], -inputs[0][::3]))]
    lanes = apply(name, inputs, OPS[name].meaning(*inputs).dtype)
    scalars = torch.empty_like(lanes)
    names = [f"x{k}" for k in range(len(inputs))]
    runner = Runner(*pointwise(lambda *v: getattr(S, name)(*v), buffer("y", scalars[0]), *(buffer(n, t[0]) for n, t in zip(names, inputs))))
    for k in range(len(lanes)):
        assert runner({"y": scalars[k], **{n: t[k] for n, t in zip(names, inputs)}}) == 0
    assert ((scalars == lanes) | lanes.isnan() & scalars.isnan()).all()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", [n for n, row in OPS.items() if row.arity == 1 and row.allowed >= FLOATS and n not in ("lgamma", "digamma", "trigamma", "erfinv")])
def test_special_values(name, dtype):
    x = torch.tensor(SPECIAL, dtype=DTYPES[dtype])
    if name in ("sin", "cos", "tan"):
        x = x[x.abs().nan_to_num(0) < 1e10]
    want = OPS[name].meaning(x)
    assert_near(apply(name, [x], want.dtype), want, tolerance(dtype) * 4)


@pytest.mark.parametrize("old,new", [("f16", "i16"), ("bf16", "i16"), ("i16", "f16"), ("i16", "bf16"), ("f16", "bf16"), ("f16", "f16"), ("bf16", "bf16")])
def test_bits_of_halves(old, new):
    """All of them, as vectors and in the rest; moved alone, a NaN keeps its payload."""
    bits = torch.arange(-2**15, 2**15 - 1).to(torch.int16)
    result = torch.empty(bits.shape, dtype=DTYPES[new])
    nest, buffers = pointwise(lambda v: as_bits(v, new), buffer("y", result), buffer("x", bits.view(DTYPES[old])))
    assert run(nest, buffers, {"y": result, "x": bits.view(DTYPES[old])}) == 0
    assert torch.equal(result.view(torch.int16), bits)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["neg", "abs"])
def test_signs_of_halves(name, dtype):
    """Of all their bits, NaN with its payload."""
    bits = torch.arange(-2**15, 2**15 - 1).to(torch.int16)
    x = bits.view(DTYPES[dtype])
    result = torch.empty_like(x)
    nest, buffers = pointwise(lambda v: to(getattr(S, name)(to(v, "f32")), dtype), buffer("y", result), buffer("x", x))
    assert run(nest, buffers, {"y": result, "x": x}) == 0
    assert torch.equal(result.view(torch.int16), bits ^ -2**15 if name == "neg" else bits & 0x7fff)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_selected_halves_keep_their_bits(dtype):
    bits = torch.arange(-2**15, 2**15 - 1).to(torch.int16)
    x, y, mask = bits.view(DTYPES[dtype]), bits.flip(0).view(DTYPES[dtype]), bits % 3 == 0
    result = torch.empty_like(x)
    nest, buffers = pointwise(S.where, buffer("z", result), buffer("m", mask), buffer("x", x), buffer("y", y))
    assert run(nest, buffers, {"z": result, "m": mask, "x": x, "y": y}) == 0
    assert torch.equal(result.view(torch.int16), torch.where(mask, x.view(torch.int16), y.view(torch.int16)))


@pytest.mark.parametrize("name", ["min", "max", "mod", "fmod", "floordiv", "div", "lt", "eq", "ne", "ge", "pow", "atan2", "copysign", "nextafter"])
def test_special_pairs(name):
    pairs = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL))
    a, b = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    if name in ("mod", "fmod", "floordiv"):
        keep = (b != 0) & ~((a.abs() == 1e30) & (b.abs() < 1))     # eager's vector fmod gives up on such ratios
        a, b = a[keep], b[keep]
    want = OPS[name].meaning(a, b)
    assert_near(apply(name, [a, b], want.dtype), want, 2e-6)


def floats(dtype: str, n: int, seed: int) -> torch.Tensor:
    """Of random bits: every exponent, NaN, infinities, denormals."""
    whole = torch.int64 if dtype == "f64" else torch.int32
    limits = torch.iinfo(whole)
    return torch.randint(limits.min, limits.max, (n,), generator=torch.Generator().manual_seed(seed), dtype=whole).view(DTYPES[dtype])


def same_bits(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    whole = torch.int64 if got.dtype is torch.float64 else torch.int32
    return (got.view(whole) == want.view(whole)) | got.isnan() & want.isnan()


def rest(x: float, y: float) -> float:
    return math.nan if math.isinf(x) or y == 0 else math.fmod(x, y)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("kind", ["bits", "near", "denormal", "special"])
def test_fmod_is_exact(kind, dtype):
    """Quotients just above and below integers, of any size; a quotient too large for the quick way takes the C library's."""
    a, b = floats(dtype, 5000, 0), floats(dtype, 5000, 1)
    if kind == "near":
        b = b.abs().clamp(1e-9, 1e9).nan_to_num(3.0)
        a = (a.abs().clamp(1e-9, 1e15).nan_to_num(5.0) / b).round() * b
        a = torch.where(a < 2.0 ** 60, torch.nextafter(a, torch.where(a.frac() < 0.3, 0.0, math.inf)), a)
    elif kind == "denormal":
        a, b = (floats(dtype, 5000, seed).abs().nan_to_num(1.0) * torch.finfo(DTYPES[dtype]).tiny * 1e-30 for seed in (0, 1))
    elif kind == "special":
        pairs = torch.cartesian_prod(torch.tensor(SPECIAL, dtype=DTYPES[dtype]), torch.tensor(SPECIAL, dtype=DTYPES[dtype]))
        a, b = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    want = torch.tensor([rest(x, y) for x, y in zip(a.tolist(), b.tolist())], dtype=DTYPES[dtype])
    assert same_bits(apply("fmod", [a, b], want.dtype), want).all()
    moved = torch.where((want != 0) & ((want < 0) != (b < 0)), want + b, want)
    assert same_bits(apply("mod", [a, b], want.dtype), moved).all()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_nextafter_is_exact(dtype):
    pairs = torch.cartesian_prod(torch.tensor(SPECIAL, dtype=DTYPES[dtype]), torch.tensor(SPECIAL, dtype=DTYPES[dtype]))
    a, b = torch.cat((pairs[:, 0], floats(dtype, 5000, 0))), torch.cat((pairs[:, 1], floats(dtype, 5000, 1)))
    want = torch.tensor([math.nextafter(x, y) for x, y in zip(a.tolist(), b.tolist())], dtype=DTYPES[dtype]) if dtype == "f64" else torch.nextafter(a, b)
    assert same_bits(apply("nextafter", [a, b], a.dtype), want).all()


def dense(name: str, dtype: str) -> torch.Tensor:
    """The whole range: dense where values change, close to 0 and to poles, tiny and huge."""
    tiny, huge = (-37, 36) if dtype == "f32" else (-300, 300)
    small = torch.logspace(tiny, -1, 700, dtype=torch.float64)
    if name == "erfinv":
        half = torch.cat((torch.linspace(0, 1, 3001, dtype=torch.float64)[:-1], small, 1 - torch.logspace(-7 if dtype == "f32" else -15, -1, 700, dtype=torch.float64)))
        return torch.cat((half, -half)).to(DTYPES[dtype])
    poles = -torch.arange(12).repeat_interleave(20) + torch.logspace(-6, -1, 20, dtype=torch.float64).repeat(12)
    x = torch.cat((torch.linspace(-9, 20, 5000, dtype=torch.float64), small, -small, poles, -poles, torch.logspace(0, huge, 300, dtype=torch.float64)))
    return x.to(DTYPES[dtype])


def units(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """How far in units of the last place of `got`, where `want` has a value of its dtype."""
    known = want.isfinite() & (want.abs() < torch.finfo(got.dtype).max)
    place = torch.nextafter(want.to(got.dtype).abs(), torch.tensor(math.inf, dtype=got.dtype)) - want.to(got.dtype).abs()
    return ((got.double() - want.double()).abs() / place.double())[known]


@pytest.mark.parametrize("name", ["lgamma", "digamma", "erfinv", "i0", "i0e", "i1", "i1e", "erfcx", "log_ndtr"])
def test_special_functions_in_f32(name):
    """Rounded rightly but for ties, also beside zeros; erfinv in f32 arithmetic."""
    x = dense(name, "f32")
    want = OPS[name].meaning(x.double())
    got = apply(name, [x], x.dtype)
    assert torch.equal(got.isfinite(), want.float().isfinite())
    assert units(got, want).max() <= (2.5 if name == "erfinv" else 0.53)


@pytest.mark.parametrize("name,most", [("lgamma", 6.0), ("erfinv", 3.5), ("i0", 8.0), ("i0e", 8.0), ("i1", 14.0), ("i1e", 14.0)])
def test_special_functions_in_f64(name, most):
    """Eager's own lgamma is off by six in between the zeros below -2, its i1 by ten."""
    x = dense(name, "f64")
    want = OPS[name].meaning(x)
    got = apply(name, [x], x.dtype)
    assert torch.equal(got.isfinite(), want.isfinite())
    assert units(got, want).max() <= most


def test_trigamma():
    """By its recurrence and its reflection: eager's own has nine digits."""
    x = dense("trigamma", "f64")
    x = x[(x > 0.01) & (x < 1e3)]
    low, high = (apply("trigamma", [t], torch.float64) for t in (x, x + 1))
    assert ((low - high) * x * x - 1).abs().lt(1e-15 * (1 + x * x * high)).all()
    turned = apply("trigamma", [-x], torch.float64)
    near = (x < 60) & ((x - x.round()).abs() > 1e-3)
    sine = (math.pi * (x - x.round())).sin()
    assert (turned + low - 1 / x ** 2 - (math.pi / sine) ** 2).abs().lt(1e-14 * (turned.abs() + 1 / x ** 2))[near].all()
    at_poles = apply("trigamma", [torch.tensor([0.0, -0.0, -1.0, -3.0, -1e300, math.inf, -math.inf, math.nan], dtype=torch.float64)], torch.float64)
    assert str(at_poles.tolist()) == "[inf, inf, inf, inf, inf, 0.0, nan, nan]"
    half = x[::7].float()
    assert units(apply("trigamma", [half], torch.float32), apply("trigamma", [half.double()], torch.float64)).max() <= 0.51
    assert apply("trigamma", [torch.ones(1, dtype=torch.float64)], torch.float64).item() == math.pi ** 2 / 6


def test_digamma_in_f64():
    """By its recurrence and its reflection, and its zero: eager's own is no measure to the last places."""
    x = dense("digamma", "f64")
    x = x[(x > 0.01) & (x < 1e6)]
    low, high = (apply("digamma", [t], torch.float64) for t in (x, x + 1))
    assert ((high - low) * x - 1 < 4e-16 * (2 + x * high.abs())).all() and ((high - low) * x - 1 > -4e-16 * (2 + x * high.abs())).all()
    turned = apply("digamma", [-x], torch.float64)
    near = (x < 60) & ((x - x.round()).abs() > 1e-3)
    angle = math.pi * (x - x.round())
    assert ((turned - low - 1 / x - math.pi / angle.tan()).abs() < 2e-14 * (1 + turned.abs() + 1 / x))[near].all()
    root = torch.tensor([1.4616321449683622], dtype=torch.float64)
    assert apply("digamma", [root], torch.float64).item() == pytest.approx(-9.241265521729427e-17, rel=1e-12)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", ["lgamma", "digamma", "erfinv", "i0", "i0e", "i1", "i1e", "erfcx", "log_ndtr"])
def test_special_functions_at_their_edges(name, dtype):
    x = torch.tensor([*SPECIAL, 2.0, -2.0, -3.0, -7.0, -2.0 ** 24, -2.0 ** 60, 2.0 ** 60, 1e-40, -1e-40, torch.finfo(DTYPES[dtype]).max, torch.finfo(DTYPES[dtype]).min], dtype=DTYPES[dtype])
    want = OPS[name].meaning(x.double()).to(x.dtype)
    got = apply(name, [x], x.dtype)
    assert_near(got, want, 2e-15 if dtype == "f64" else 2e-7)
    assert torch.equal(got.signbit()[want == 0], want.signbit()[want == 0])


@pytest.mark.parametrize("dtype", ["i64", "i32", "i8"])
@pytest.mark.parametrize("name", ["floordiv", "mod", "fmod"])
def test_integer_division_signs(name, dtype):
    a = torch.arange(-40, 41).repeat_interleave(8).to(DTYPES[dtype])
    b = torch.tensor([-7, -2, -1, 1, 2, 3, 7, 11]).repeat(81).to(DTYPES[dtype])
    want = OPS[name].meaning(a, b)
    assert_near(apply(name, [a, b], want.dtype), want, 0)


@pytest.mark.parametrize("dtype", ["i64", "i32", "i16", "i8", "u8"])
@pytest.mark.parametrize("name", ["floordiv", "mod", "fmod"])
def test_integer_division_of_all_sizes(name, dtype):
    """Numbers of every length; multiples of the divisor, where a float's quotient could be rounded up, and their neighbours."""
    g = torch.Generator().manual_seed(0)
    whole = DTYPES[dtype]
    a, b = ((torch.randint(-2**62, 2**62, (4001,), generator=g) >> torch.randint(0, 63, (4001,), generator=g)).to(whole) for _ in range(2))
    b[(b == 0) | (b == -1)] = 3
    near = a // b * b
    a, b = torch.cat((a, near, near + 1, near - 1)), b.repeat(4)
    want = OPS[name].meaning(a, b)
    assert torch.equal(apply(name, [a, b], whole), want)


def test_integer_division_by_zero_does_not_trap():
    a, b = torch.tensor([5, -5, -2**63]), torch.tensor([0, 0, -1])
    for name in ("floordiv", "mod", "fmod"):
        apply(name, [a, b], torch.int64)


ALL_DTYPES = ("f32", "f64", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool")


@pytest.mark.parametrize("source", ALL_DTYPES)
@pytest.mark.parametrize("target", ALL_DTYPES)
def test_conversion(source, target):
    x = (torch.linspace(0, 120, 83, dtype=torch.float64) if "u8" in (source, target) else torch.linspace(-120, 120, 83, dtype=torch.float64)).to(DTYPES[source])
    y = torch.empty(x.shape, dtype=DTYPES[target])
    nest, buffers = pointwise(lambda v: to(v, target), buffer("y", y), buffer("x", x))
    run(nest, buffers, {"x": x, "y": y})
    assert torch.equal(y, x.to(DTYPES[target]))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_half_rounding_is_to_nearest_even(kind):
    bits = torch.randint(-2**31, 2**31 - 1, (5000,), generator=torch.Generator().manual_seed(0), dtype=torch.int64).to(torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.00390625, 1.01171875])])
    y = torch.empty(x.shape, dtype=DTYPES[kind])
    nest, buffers = pointwise(lambda v: to(v, kind), buffer("y", y), buffer("x", x))
    run(nest, buffers, {"x": x, "y": y})
    assert torch.equal(y.nan_to_num(7.0), x.to(DTYPES[kind]).nan_to_num(7.0)) and torch.equal(y.isnan(), x.isnan())


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_half_arithmetic_in_float(kind):
    a, b = (torch.randn(77, generator=torch.Generator().manual_seed(s)).to(DTYPES[kind]) for s in (0, 1))
    y = torch.empty_like(a)
    nest, buffers = pointwise(lambda v, w: to(S.add(S.mul(to(v, "f32"), to(w, "f32")), to(v, "f32")), kind), buffer("y", y), buffer("a", a), buffer("b", b))
    run(nest, buffers, {"a": a, "b": b, "y": y})
    assert torch.equal(y, (a.float() * b.float() + a.float()).to(DTYPES[kind]))


def test_rounding_in_between_is_kept():
    x = torch.randn(99, generator=torch.Generator().manual_seed(0))
    y = torch.empty_like(x)
    nest, buffers = pointwise(lambda v: S.mul(to(to(v, "bf16"), "f32"), 3.0), buffer("y", y), buffer("x", x))
    run(nest, buffers, {"x": x, "y": y})
    assert torch.equal(y, x.bfloat16().float() * 3.0)


def test_constants_of_every_kind():
    for dtype, value in (("f32", math.nan), ("f32", -math.inf), ("f32", 0.1), ("f64", 0.1), ("f32", 1e300), ("i64", -2**63), ("u8", 255), ("bool", True), ("bf16", 1.5)):
        y = torch.empty(21, dtype=DTYPES[dtype])
        out = contiguous("y", (21,), dtype)
        nest = Nest("fill", (Axis("i", 21),), (Phase("map", (), (), (Store("y", (Axis("i", 21).value,), literal(value, dtype)),)),))
        run(nest, {"y": out}, {"y": y})
        want = torch.full((21,), value if value != 1e300 else math.inf, dtype=DTYPES[dtype])
        assert torch.equal(y.nan_to_num(5), want.nan_to_num(5)), dtype


def test_many_arguments():
    x = torch.randn(40, generator=torch.Generator().manual_seed(0))
    y = torch.empty_like(x)
    nest, buffers = pointwise(lambda v: S.add(S.mul(v, v, v), S.max(v, literal(0.0, "f32"), literal(0.25, "f32")), v), buffer("y", y), buffer("x", x))
    run(nest, buffers, {"x": x, "y": y})
    torch.testing.assert_close(y, x * x * x + x.clamp_min(0.25) + x)
