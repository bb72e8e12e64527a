"""Numbers computed from symbols: as elements and as sizes of compiled programs, one graph for all, and as exact as Python's own."""
import math

import pytest
import torch

import firesteel as fs


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()


FORMULAS = {
    "power": lambda n: 2 ** n, "power of itself": lambda n: n ** n, "float power": lambda n: (n / 3) ** 2.5, "root": lambda n: n ** 0.5,
    "shifts": lambda n: (1 << n) + (1000 >> n), "bits": lambda n: (n & 6) + (n | 9) + (n ^ 5), "inverted": lambda n: ~n,
    "negative //": lambda n: (3 - n) // 4, "negative %": lambda n: (3 - n) % 4, "float //": lambda n: (3 - n / 2) // 1.5, "float %": lambda n: (3 - n / 2) % 1.5,
    "quotient": lambda n: n / 7, "least": lambda n: min(n, 5), "greatest": lambda n: max(n, 5.5), "size": lambda n: abs(5 - n),
    "rounded": lambda n: round(n / 2), "rounded to a digit": lambda n: round(n / 3, 1), "floor": lambda n: math.floor(-n / 2.5),
    "ceil": lambda n: math.ceil(-n / 2.5), "trunc": lambda n: math.trunc(-n / 2.5), "int": lambda n: int(n * 0.7),
    "bool as int": lambda n: (n > 3) + (n > 8), "int of bool": lambda n: int(n > 3), "negative bool": lambda n: -(n > 3), "bool is one": lambda n: abs(n > 3),
    "choice": lambda n: torch.sym_ite(n > 5, n, 3),
    "exp": math.exp, "expm1": math.expm1, "log": math.log, "log to a base": lambda n: math.log(n, 3), "log2": math.log2, "log10": math.log10,
    "log1p": math.log1p, "sqrt": math.sqrt, "sin": math.sin, "cos": math.cos, "tan": math.tan, "asin": lambda n: math.asin(n / 20),
    "acos": lambda n: math.acos(n / 20), "atan": math.atan, "sinh": math.sinh, "cosh": math.cosh, "tanh": math.tanh, "asinh": math.asinh,
    "acosh": math.acosh, "atanh": lambda n: math.atanh(n / 20), "erf": math.erf, "gamma": math.gamma, "pow": lambda n: math.pow(n, 2.5),
    "fabs": lambda n: math.fabs(3 - n), "isnan": lambda n: math.isnan(n / 1), "isinf": lambda n: math.isinf(n / 1), "isfinite": lambda n: math.isfinite(n / 1),
    "radians": math.radians, "degrees": math.degrees, "prod": lambda n: math.prod([n, 2, n]),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_as_an_element(name):
    formula, x = FORMULAS[name], torch.zeros(3, dtype=torch.float64)
    compiled = fs.compile(lambda x, n: x + formula(n), fullgraph=True, dynamic=True)
    for n in (2, 5, 9, 12):
        torch.testing.assert_close(compiled(x, n), x + formula(n), rtol=1e-15, atol=0)
    assert fs.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", FORMULAS)
def test_as_a_size(name):
    formula = FORMULAS[name]
    compiled = fs.compile(lambda n: torch.zeros(int(abs(formula(n)))) + 1, fullgraph=True, dynamic=True)
    sizes = [n for n in (2, 5, 9, 12) if abs(formula(n)) < 10 ** 5]
    for n in sizes:
        torch.testing.assert_close(compiled(n), torch.ones(int(abs(formula(n)))))
    assert fs.counters["stats"]["unique_graphs"] <= 2       # a size of 1 may be a variant of its own


OUTSIDE = {"sqrt": (math.sqrt, -1), "log": (math.log, 0), "acos": (math.acos, 3), "power": (lambda n: math.pow(n, 0.5), -2)}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_error_of_math_is_the_program_s(name):
    formula, number = OUTSIDE[name]

    def guarded(x, n):
        try:
            return x + formula(n)
        except ValueError:
            return x - 1
    compiled, x = fs.compile(guarded, fullgraph=True, dynamic=True), torch.zeros(2)
    for n in (number, 1, number):
        torch.testing.assert_close(compiled(x, n), guarded(x, n))


def test_math_of_a_number_read_from_data():
    with fs.config.patch(capture_scalar_outputs=True):
        fn = lambda x: x * math.sqrt(x.sum()) + math.exp(-x.sum().item())
        compiled = fs.compile(fn, fullgraph=True)
        for x in (torch.ones(3), torch.full((3,), 2.5)):
            torch.testing.assert_close(compiled(x), fn(x))
    assert fs.counters["stats"]["unique_graphs"] == 1


def test_symbols_are_never_taken_for_dtypes():
    with fs.config.patch(capture_scalar_outputs=True):
        fn = lambda x: torch.cat([torch.full((n + 1,), n) for n in x.tolist()])     # u0, u1, ..., u8, ..., u16
        x = torch.arange(18)
        torch.testing.assert_close(fs.compile(fn, fullgraph=True)(x), fn(x))


# -- tensors as indices --------------------------------------------------------------------------------------------------
def spline(x, t):
    place = torch.bucketize(t, torch.arange(5.)).sub(1).clamp(0, 4)
    return x[..., place, :] * 2 + torch.arange(5.)[place]


def written_through(x, t):
    y = x.clone()
    y[t.long()[()]].add_(1)
    y[:, 0, t.int()] = x[1, 0, 0]
    return y


ONE_PLACE = {
    "spline": spline, "written": written_through, "best row": lambda x, t: x[x.sum((1, 2)).argmax()], "from the end": lambda x, t: x[t.long() - 3],
    "beside a list": lambda x, t: x[t.long(), torch.tensor([0, 2])], "beside none": lambda x, t: x[None, :, t.long()], "twice": lambda x, t: x[t.short(), :, t.long()]}


@pytest.mark.parametrize("backend", ["native", "eager", "aot_eager"])
@pytest.mark.parametrize("name", ONE_PLACE)
def test_a_tensor_of_no_dimension_is_one_place(name, backend):
    fn, x = ONE_PLACE[name], torch.randn(3, 5, 4, requires_grad=True)
    compiled = fs.compile(fn, fullgraph=True, backend=backend)
    for place in (1.5, 2.0, 0.0):
        found, expected = compiled(x, torch.tensor(place)), fn(x, torch.tensor(place))
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), x), torch.autograd.grad(expected.square().sum(), x))
    assert fs.counters["stats"]["unique_graphs"] == 1


def test_one_place_is_a_view():
    x = torch.zeros(4, 5)
    compiled = fs.compile(lambda x, t: x[t], fullgraph=True)
    compiled(x, torch.tensor(2)).add_(1)
    assert x[2].sum() == x.sum() == 5
    with pytest.raises(IndexError):
        compiled(x, torch.tensor(4))


def test_one_place_of_each_in_a_batch():
    x, places = torch.arange(20.).view(4, 5), torch.tensor([1, 3])
    fn = lambda x, places: torch.func.vmap(lambda t: x[t])(places)
    torch.testing.assert_close(fs.compile(fn)(x, places), fn(x, places))


# -- conditions ----------------------------------------------------------------------------------------------------------
def counted(x):
    z = x.nonzero()
    torch._check(z.size(0) == 4)
    return z + 3


def counted_late(x):
    z = x.nonzero()
    y = z * 2
    torch._check(z.size(0) == 4)
    return y + 3


def paired(x, y):
    a, b = x.nonzero(), y.nonzero()
    torch._check(a.size(0) == b.size(0))
    return a + b


FOUR, NONE = torch.tensor([0, 1, 3, 4, 2, 0, 0]), torch.zeros(7, dtype=torch.int64)
STATED = {"size": (counted, (FOUR,), (NONE,)), "size, stated late": (counted_late, (FOUR,), (NONE,)), "two sizes": (paired, (FOUR, FOUR + 0), (FOUR, NONE))}


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("name", STATED)
def test_nothing_runs_before_its_condition_is_checked(name, backend):
    fn, good, bad = STATED[name]
    with fs.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = fs.compile(fn, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(*good), fn(*good))
        with pytest.raises(RuntimeError):
            compiled(*bad)
        torch.testing.assert_close(compiled(*good), fn(*good))
    assert fs.counters["stats"]["unique_graphs"] == 1


def test_a_truth_value_read_from_data():
    fn = lambda x, b: x * 2 + b.item()
    with fs.config.patch(capture_scalar_outputs=True):
        compiled = fs.compile(fn, fullgraph=True)
        for b in (True, False):
            torch.testing.assert_close(compiled(torch.ones(3), torch.tensor(b)), fn(torch.ones(3), torch.tensor(b)))
    assert fs.counters["stats"]["unique_graphs"] == 1


def test_sizes_of_data_in_a_backward():
    def fn(x, y):
        return torch.cat([x[x > 0], y[y > 0]]) * 2, x[x > -2].std(0)
    with fs.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = fs.compile(fn, fullgraph=True)
        for x, y in ((torch.tensor([1.0, -1.0, 2.0]), torch.tensor([3.0, -3.0])), (torch.tensor([-5.0, -6.0, 1.0]), torch.tensor([-1.0, -1.0]))):
            results = []
            for f in (compiled, fn):
                a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
                whole, spread = f(a, b)
                results.append((whole, spread, *torch.autograd.grad(whole.sin().sum() + spread, (a, b))))
            torch.testing.assert_close(*results, equal_nan=True)       # the spread of one number is not one
    assert fs.counters["stats"]["unique_graphs"] == 1


def outcome(fn, *args):
    """The result, or the type of the error."""
    try:
        return fn(*args)
    except Exception as error:
        return type(error)


def agree(given, expected):
    if isinstance(expected, torch.Tensor):
        return isinstance(given, torch.Tensor) and given.dtype == expected.dtype and torch.allclose(given, expected, rtol=1e-15, atol=0, equal_nan=True)
    return type(given) is type(expected) and given == expected


WIDE = (2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70, -2**63, -2**63 - 1)
OF_INTS = {
    "sum": lambda x, n: x + n, "product": lambda x, n: x * n, "successor": lambda x, n: x + (n + 1), "square": lambda x, n: x + n * n,
    "by way of a square": lambda x, n: x * (n * n // max(n, 1)), "shift": lambda x, n: x + (n << 3), "remainder": lambda x, n: x + n * n * n % 1000,
    "handed back": lambda x, n: n * n + 1, "compared": lambda x, n: x + 1 if n * n > 2**63 else x, "slice": lambda x, n: x[:n], "index": lambda x, n: x[n],
    "quotient": lambda x, n: x + n / 2, "negated": lambda x, n: x * -n, "clamp": lambda x, n: x.clamp(max=n),
}


@pytest.mark.filterwarnings("ignore:Truncating the start")
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("fn", OF_INTS.values(), ids=OF_INTS)
def test_ints_of_any_number_of_digits(fn, dtype):
    x = torch.ones(3, dtype=dtype)
    for wide in WIDE:
        compiled = fs.compile(fn, dynamic=True)
        for n in (3, 4, wide, 5):
            assert agree(outcome(compiled, x, n), outcome(fn, x, n)), (n, outcome(compiled, x, n), outcome(fn, x, n))


def test_ints_of_64_bits_share_a_graph():
    compiled, x = fs.compile(lambda x, n: x + n, dynamic=True), torch.ones(3, dtype=torch.int64)
    for n in (7, 2**40, -2**63, 2**63 - 1):
        assert torch.equal(compiled(x, n), x + n)
    assert fs.counters["stats"]["unique_graphs"] == 1


OF_FLOATS = {
    "//": lambda x, v: x + v // 0.1, "reflected //": lambda x, v: x + 1.0 // v, "int //": lambda x, v: x + 7 // v, "divmod": lambda x, v: x + divmod(v, 0.1)[0],
    "cube": lambda x, v: x + v ** 3, "inverse": lambda x, v: x + v ** -1, "root": lambda x, v: x + v ** 0.5, "power of two": lambda x, v: x + 2.0 ** v,
    "%": lambda x, v: x + v % 0.3, "int": lambda x, v: x + int(v), "threefold int": lambda x, v: x * (int(v) * 3), "round": lambda x, v: x + round(v, 1),
}


@pytest.mark.parametrize("fn", OF_FLOATS.values(), ids=OF_FLOATS)
def test_floats_as_python_computes_them(fn):
    compiled, x = fs.compile(fn, dynamic=True), torch.ones(3, dtype=torch.float64)
    with fs.config.patch(recompile_limit=50):
        compiled(x, 1.5)
        for v in (2.5, 1.0, 0.7, -0.7, -1.0, 0.3, -0.0, 0.0, 9.3e18, 1e300, -1e300, math.inf, -math.inf, math.nan, 1e-320):
            assert agree(outcome(compiled, x, v), outcome(fn, x, v)), (v, outcome(compiled, x, v), outcome(fn, x, v))


class Dropped(torch.nn.Module):
    def __init__(self, p):
        super().__init__()
        self.linear, self.drop = torch.nn.Linear(8, 8), torch.nn.Dropout(p)

    def forward(self, x):
        return self.drop(self.linear(x)).sin()


def with_gradients(module, fn, x):
    torch.manual_seed(3)
    out = fn(x)
    return out.detach(), *torch.autograd.grad(out.sum(), [*module.parameters()]), torch.get_rng_state()


def test_a_dropout_whose_chance_changes_is_one_graph_more():
    module = Dropped(0.1)
    compiled = fs.compile(module, fullgraph=True)
    for chance in (0.1, 0.2, 0.3, 0.45, 0.9):
        module.drop.p = chance
        x = torch.randn(16, 8)
        for got, want in zip(with_gradients(module, compiled, x), with_gradients(module, module, x)):
            torch.testing.assert_close(got, want)
    assert fs.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("chance", [0.0, 1.0, 0, 1, True, -0.1, 1.5, float("nan")])
def test_chances_that_are_others(chance):
    """Nothing is dropped, all is, or it is an error."""
    def drop(x, p):
        return torch.nn.functional.dropout(x, p)
    compiled, x = fs.compile(drop), torch.randn(4, 8)
    for p in (0.2, 0.3):
        compiled(x, p)
    try:
        want = drop(x, chance)
    except (ValueError, RuntimeError) as error:
        with pytest.raises(type(error), match=str(error)[:40].replace("(", r"\(")):
            compiled(x, chance)
    else:
        torch.testing.assert_close(compiled(x, chance), want)
