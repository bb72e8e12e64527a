"""The scalar operators: dtype rules, meanings, and decompositions that agree with them."""
import math

import pytest
import torch
from interp import meaning

from firesteel.loops.decompose import DECOMPOSED
from firesteel.loops.scalars import (
    DTYPES,
    FLOATS,
    LOOP_DTYPES,
    OPS,
    REDUCE_OPS,
    S,
    from_size,
    is_float,
    literal,
    number,
    result_dtype,
    to,
)
from firesteel.sym.expr import Expr, const, make, postorder, symbol, truediv


def leaf(n: int, dtype: str) -> Expr:
    return symbol(f"x{n}", dtype)


def evaluate(root: Expr, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The meaning of an expression over leaves x0, x1, ..."""
    done: dict[Expr, torch.Tensor] = {}
    for node in postorder(root):
        if node.op == "symbol":
            done[node] = values[node.attr]
        elif node.op == "const":
            done[node] = torch.tensor(node.attr, dtype=DTYPES[node.dtype])
        else:
            done[node] = meaning(node, [done[a] for a in node.args])
    return done[root]


def operand(interval: tuple[float, float], dtype: str, count: int = 101) -> torch.Tensor:
    lo, hi = interval
    if dtype == "u8":
        lo = max(lo, 0.0)
    line = torch.linspace(lo, hi, count, dtype=torch.float64)
    return (line > (lo + hi) / 2) if dtype == "bool" else line.to(DTYPES[dtype])


def operands(name: str, dtype: str) -> dict[str, torch.Tensor]:
    """A grid over the test domain: every argument runs at its own pace."""
    row = OPS[name]
    generator = torch.Generator().manual_seed(0)
    made = {}
    for n, interval in enumerate(row.domain):
        kind = "bool" if name == "where" and n == 0 else dtype
        made[f"x{n}"] = operand(interval, kind)[torch.randperm(101, generator=generator) if n else slice(None)]
    return made


@pytest.mark.parametrize("name", list(OPS))
def test_the_meaning_has_the_dtype_of_the_rule(name):
    row = OPS[name]
    for dtype in sorted(row.allowed):
        values = operands(name, dtype)
        node = getattr(S, name)(*[leaf(n, "bool" if name == "where" and n == 0 else dtype) for n in range(row.arity)])
        assert result_dtype(node) == node.dtype
        assert evaluate(node, values).dtype is DTYPES[node.dtype]


# errors of the decompositions in units of the last place of f64; what is built on exp and log alone is rougher
TOLERANCE = {"expm1": 1e-12, "log1p": 1e-12, "asin": 1e-12, "acos": 1e-12, "erf": 1e-12, "erfc": 1e-12, "erfinv": 1e-10, "lgamma": 1e-9, "digamma": 1e-9, "trigamma": 1e-9,
             "atanh": 1e-12, "pow": 1e-12, "acosh": 1e-12, "asinh": 1e-12, "exp2": 1e-12, "sinh": 1e-13, "cosh": 1e-13}


@pytest.mark.parametrize("name", list(DECOMPOSED))
def test_a_decomposition_means_the_same(name):
    row = OPS[name]
    for dtype in sorted(row.allowed & FLOATS):
        values = operands(name, dtype)
        body = DECOMPOSED[name](*[leaf(n, dtype) for n in range(row.arity)])
        assert name not in {node.op for node in postorder(body)}
        assert all(result_dtype(node) == node.dtype for node in postorder(body) if node.args)
        expected = row.meaning(*[values[f"x{n}"] for n in range(row.arity)])
        rtol = 2e-5 if dtype == "f32" else TOLERANCE.get(name, 1e-13)
        torch.testing.assert_close(evaluate(body, values), expected, rtol=rtol, atol=rtol, equal_nan=True)


SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5], dtype=torch.float64)


@pytest.mark.parametrize("name", ["sign", "round", "trunc", "ceil", "tanh", "sigmoid", "isnan", "isinf", "rsqrt", "recip", "neg", "sinh", "cosh", "erf", "erfinv", "asinh", "digamma"])
def test_decompositions_at_special_values(name):
    body = DECOMPOSED[name](leaf(0, "f64"))
    expected = OPS[name].meaning(SPECIAL)
    actual = evaluate(body, {"x0": SPECIAL})
    torch.testing.assert_close(actual, expected, equal_nan=True)
    if is_float(body.dtype) and name != "sign":
        assert torch.equal(torch.signbit(actual[:5])[expected[:5] == 0], torch.signbit(expected[:5])[expected[:5] == 0])


@pytest.mark.parametrize("name", ["mod", "floordiv"])
def test_division_by_all_signs(name):
    x, y = torch.meshgrid(torch.tensor([-7.0, -6.0, -0.5, 0.0, 0.3, 6.0, 7.5]), torch.tensor([-2.5, -2.0, 2.0, 2.5, 0.1]), indexing="ij")
    x, y = x.flatten().double(), y.flatten().double()
    body = DECOMPOSED[name](leaf(0, "f64"), leaf(1, "f64"))
    torch.testing.assert_close(evaluate(body, {"x0": x, "x1": y}), OPS[name].meaning(x, y))


def test_arguments_of_different_dtypes_are_refused():
    for node in (make("add", "f32", (leaf(0, "f32"), leaf(1, "i64"))), make("exp", "i64", (leaf(0, "i64"),)), make("add", "bf16", (leaf(0, "bf16"), leaf(1, "bf16"))),
                 make("where", "f32", (leaf(0, "i64"), leaf(1, "f32"), leaf(2, "f32"))), make("not", "f32", (leaf(0, "f32"),)), make("neg", "f32", (leaf(0, "f32"), leaf(1, "f32")))):
        with pytest.raises(TypeError, match=node.op):
            result_dtype(node)


def test_integers_wrap():
    x = {"x0": torch.tensor([2**63 - 1]), "x1": torch.tensor([1])}
    assert evaluate(S.add(leaf(0, "i64"), leaf(1, "i64")), x).item() == -2**63


def test_minimum_and_maximum_give_nan():
    x = {"x0": torch.tensor([math.nan, 1.0]), "x1": torch.tensor([1.0, math.nan])}
    for build in (S.min, S.max):
        assert evaluate(build(leaf(0, "f32"), leaf(1, "f32")), x).isnan().all()


@pytest.mark.parametrize("name", list(REDUCE_OPS))
def test_identities(name):
    """Taking an identity in changes nothing, and the reduction is the repeated operator."""
    row = REDUCE_OPS[name]
    dtypes = ["bool"] if name in ("any", "all") else ["f32", "i64"]
    for dtype in dtypes:
        values = operand((-4.0, 4.0), dtype, 7)
        start = torch.tensor(row.identity(dtype), dtype=DTYPES[dtype])
        combine = OPS[row.combine].meaning
        assert torch.equal(combine(start, values), values)
        folded = start
        for value in values:
            folded = combine(folded, value)
        torch.testing.assert_close(row.along(values, (0,)), folded)
        torch.testing.assert_close(row.running(values, 0)[-1], folded)


def test_conversion_of_constants_is_torchs():
    assert to(const(3, "i64"), "f32") is literal(3.0, "f32")
    assert to(const(0.1, "f64"), "f32").attr == torch.tensor(0.1).item()
    assert to(to(const(0.1, "f64"), "bf16"), "f32").attr == torch.tensor(0.1).bfloat16().float().item()
    assert to(const(300, "i64"), "u8").op == "to"       # wraps
    assert to(const(2.7, "f64"), "i64") is literal(2, "i64")
    assert str(literal(-0.0, "f32").attr) == "-0.0" and str(literal(0.0, "f32").attr) == "0.0"
    assert to(const(float("nan"), "f64"), "i64").op == "to"
    assert to(literal(2.0, "f32"), "f32") is literal(2.0, "f32")


def test_loose_and_strict_rounding_differ():
    x = leaf(0, "f32")
    assert to(x, "bf16", loose=True) is not to(x, "bf16")
    assert to(x, "f64", loose=True) is to(x, "f64")     # nothing is lost: there is nothing to be loose about


def test_sizes_become_bodies():
    n, m = symbol("s0"), symbol("s1")
    body = from_size(truediv(n, m))
    assert body.dtype == "f64" and all(result_dtype(node) == node.dtype for node in postorder(body) if node.args)
    assert evaluate(body, {"s0": torch.tensor(7), "s1": torch.tensor(2)}).item() == 3.5
    assert number(n, "f32").op == "to" and number(2, "f32") is literal(2.0, "f32")


def test_every_dtype_has_one_name():
    assert len(set(DTYPES.values())) == len(DTYPES)
    assert set(LOOP_DTYPES) <= set(DTYPES)
