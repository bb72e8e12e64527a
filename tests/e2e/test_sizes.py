"""Sizes that change, and sizes that only run time knows, compiled natively: values, gradients, numbers of graphs, errors."""
import math
import pathlib
import sys

import pytest
import torch
import torch.nn.functional as F

import firesteel as fs
from firesteel.errors import ConstraintViolation, DataDependentError
from firesteel.graph.meta import SHAPES

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

import programs  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()


@pytest.fixture
def symbols_from_data():
    with fs.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def check(fn, calls, **settings):
    """All calls through one compiled function, against eager; the number of graphs."""
    compiled = fs.compile(fn, fullgraph=True, **settings)
    for args in calls:
        torch.testing.assert_close(compiled(*args), fn(*args), equal_nan=True)
    return fs.counters["stats"]["unique_graphs"]


def gradients(fn, args):
    leaves = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    out = fn(*leaves)
    sum(o.sum() for o in (out if isinstance(out, tuple) else (out,))).backward()
    return [leaf.grad for leaf in leaves]


def check_gradients(fn, calls):
    compiled = fs.compile(fn, fullgraph=True)
    for args in calls:
        torch.testing.assert_close(gradients(compiled, args), gradients(fn, args))
    assert fs.counters["stats"]["unique_graphs"] == 1


MASK = torch.tensor([True, False, True, True, False])


def two_parts(values, lengths):
    a, b = lengths.tolist()
    x, y = torch.split(values, [a, b])
    return x * 2, y + 1


def stated(x, n):
    k = n.item()
    torch._check(k > 0)
    torch._check(k <= x.shape[0])
    return x[:k].view(k, 1) * k


def written(x, n):
    y = x.clone()
    y[n.item()] = 7.0
    return y


def squares(n):
    k = n.item()
    return torch.ones(1, k) @ torch.ones(k, 1), k * 2, torch.full((k,), k)


T = torch.tensor
DATA = {
    "item": (lambda x: x.item() + 1, [(T(3),), (T(5),)]),
    "float item, inf": (lambda x, y: y * x.item(), [(T(3.5), torch.randn(4)), (T(math.inf), torch.ones(4)), (T(math.nan), torch.ones(4))]),
    "bool item": (lambda x: x.item(), [(T(True),), (T(False),)]),
    "factory": (lambda x: torch.ones(x.item()) * 2, [(T(3),), (T(5),), (T(0),), (T(1),)]),
    "nonzero": (lambda x: x.nonzero() * 2, [(MASK,), (~MASK,), (MASK & False,)]),
    "mask": (lambda x, b: x[b] * 2 + 1, [(torch.randn(5, 3), MASK), (torch.randn(5, 3), ~MASK), (torch.randn(5, 3), MASK & False)]),
    "masked_select": (lambda x, b: x.masked_select(b) + 1, [(torch.randn(5), MASK), (torch.randn(5), ~MASK)]),
    "unique": (lambda x: torch.unique(x, return_inverse=True, return_counts=True), [(T([1, 2, 2, 3]),), (T([1, 1, 1, 1]),)]),
    "unique dim": (lambda x: torch.unique(x, dim=0) * 2, [(T([[1, 2], [2, 3], [1, 2]]),)]),
    "repeat_interleave": (lambda x, r: torch.repeat_interleave(x, r, dim=0) * 2, [(torch.randn(3, 2), T([1, 2, 3])), (torch.randn(3, 2), T([0, 2, 3]))]),
    "bincount": (lambda x: torch.bincount(x) + 1, [(T([1, 2, 2, 3]),), (T([9, 2, 2, 3]),)]),
    "split": (two_parts, [(torch.randn(8), T([3, 5])), (torch.randn(8), T([2, 6]))]),
    "slice to": (lambda x, n: x[:n.item()] * 2, [(torch.randn(8), T(n)) for n in (3, 12, -2, -20)]),
    "slice from": (lambda x, n: x[n.item():] * 2, [(torch.randn(8), T(n)) for n in (3, 12, -2, -20)]),
    "select": (lambda x, n: x[n.item()] * 2, [(torch.randn(8), T(3)), (torch.randn(8), T(-1))]),
    "write": (written, [(torch.randn(8), T(3)), (torch.randn(8), T(-1))]),
    "arange": (lambda n: torch.arange(n.item()) * 2, [(T(3),), (T(0),)]),
    "matmul, returned numbers": (squares, [(T(3),), (T(7),)]),
    "cat": (lambda x: torch.cat([torch.zeros(x[0].item()), torch.ones(x[1].item())]), [(T([2, 3]),), (T([5, 0]),)]),
    "pad": (lambda x, n: F.pad(x, (0, n.item())), [(torch.randn(8), T(3)), (torch.randn(8), T(5))]),
    "stated": (stated, [(torch.randn(8), T(3)), (torch.randn(8), T(5))]),
    "int and float": (lambda x, y: y * int(x) + float(x), [(T(3.5), torch.randn(4)), (T(-3.5), torch.randn(4))]),
    "tolist": (lambda x: x.sum(0).tolist(), [(torch.ones(3, 4, dtype=torch.int64),)]),
    "tensor of a sum": (lambda x: T(sum(x.tolist())), [(torch.arange(5),)]),
    "softmax of a mask": (lambda x, b: torch.softmax(x[b], -1).mean(0), [(torch.randn(5, 3), MASK), (torch.randn(5, 3), ~MASK)]),
}


@pytest.mark.parametrize("name", DATA)
def test_numbers_and_sizes_from_data(name, symbols_from_data):
    fn, calls = DATA[name]
    with fs.config.patch(verify=True):
        assert check(fn, calls) == 1


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def weighted(x, w):
    a, b = x.tolist()
    return torch.cat([torch.ones(a) * w, torch.ones(b) * w * w])


GRADIENTS = {
    "mask": (lambda x, b: (x[b] * x[b]).sin(), [(leaf(5, 3), MASK), (leaf(5, 3), ~MASK)]),
    "cat": (weighted, [(T([4, 9]), leaf(1)), (T([2, 0]), leaf(1))]),
    "slice": (lambda x, n: x[:n.item()].sin() * n.item(), [(leaf(8), T(n)) for n in (3, 5, -1)]),
    "split": (two_parts, [(leaf(8), T([3, 5])), (leaf(8), T([2, 6]))]),
    "repeat": (lambda x, r: torch.repeat_interleave(x, r, dim=0).sin(), [(leaf(3, 2), T([1, 2, 3])), (leaf(3, 2), T([0, 2, 3]))]),
    "float": (lambda x, n: (x * n.sum().item()).sin(), [(leaf(3, 2), T([1.5, 2])), (leaf(3, 2), T([0.0, 2]))]),
    "linear": (lambda x, b, w: F.linear(x[b], w).relu().sum(0), [(leaf(5, 3), MASK, leaf(2, 3)), (leaf(5, 3), ~MASK, leaf(2, 3))]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_through_sizes_from_data(name, symbols_from_data):
    check_gradients(*GRADIENTS[name])


def test_a_condition_is_checked_at_run_time(symbols_from_data):
    compiled = fs.compile(stated, fullgraph=True)
    compiled(torch.randn(8), T(3))
    with pytest.raises(RuntimeError):
        compiled(torch.randn(8), T(9))
    with pytest.raises(IndexError):
        fs.compile(lambda x, n: x[n.item()], fullgraph=True)(torch.randn(8), T(11))


def test_a_question_that_only_run_time_answers(symbols_from_data):
    def branches(x):
        u = x.item()
        rounding = "floor" if u > 3 else "trunc"        # no graph has both arms
        y = torch.div(x, 2, rounding_mode=rounding)
        return y + y - y                    # long enough that Python compiles it once, behind both
    with pytest.raises(DataDependentError, match=r"torch\._check\(u0 >= 4\)") as error:
        fs.compile(branches, fullgraph=True)(T(5))
    assert "u > 3" in str(error.value)
    assert [fs.compile(branches)(T(n)).item() for n in (5, -5)] == [2, -2]


def test_without_the_settings_it_is_a_break():
    fn = fs.compile(lambda x, b: x[b] * 2)
    x = torch.randn(5)
    torch.testing.assert_close(fn(x, MASK), x[MASK] * 2)
    assert sum(fs.counters["graph_break"].values()) == 1


# -- which sizes are symbols ---------------------------------------------------------------------------------------------
LINEAR = torch.nn.Linear(4, 4)
BATCHES = {"pointwise": lambda x: x * 2 + 1, "sum": lambda x: x.sum(0), "linear": lambda x: LINEAR(x).relu(), "softmax": lambda x: torch.softmax(x, 1),
           "cat": lambda x: torch.cat([x, x]), "reshape": lambda x: x.reshape(-1), "norm": lambda x: F.layer_norm(x, (4,)), "product": lambda x: x @ x.t()}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_one_and_none(name):
    for sizes, most in ((range(1, 9), 3), (range(8, 0, -1), 3), (range(9), 4), (range(8, -1, -1), 4)):
        for dynamic in (None, True):
            fs.reset()
            assert check(BATCHES[name], [(torch.randn(n, 4),) for n in sizes], dynamic=dynamic) <= most


def test_six_lengths_two_graphs():
    assert check(lambda x: (x * 2).sum(), [(torch.randn(n),) for n in (3, 4, 5, 6, 7, 8)]) == 2


def test_numbers_become_symbols():
    assert check(lambda x, n: x * n, [(torch.ones(3), n) for n in (3, 4, 5, 1, 0, -2)]) == 2
    fs.reset()
    assert check(lambda x, n: x * n, [(torch.ones(3), n) for n in (3.0, 4.0, math.inf, math.nan, 0.0)]) == 2


LAYOUTS = [torch.randn(3, 4, 5), torch.randn(4, 3, 5).transpose(0, 1), torch.randn(3, 4, 10)[:, :, ::2], torch.randn(3, 8, 5)[:, ::2],
           torch.randn(6, 4, 5)[::2], torch.randn(3, 1, 5).expand(3, 4, 5)]


def test_other_strides_are_noticed():
    check(lambda x: x * 2 + x.sum(0), [(x,) for x in LAYOUTS], dynamic=True)


def test_strides_that_change_become_symbols():
    assert check(lambda x: x * 2, [(torch.randn(8, n)[:, :3],) for n in (10, 11, 12, 13)]) == 2


def test_strides_that_changed_in_a_tensor_of_more_dimensions():
    """What was learned of a third dimension says nothing of a tensor that has two."""
    wide = [torch.randn(2, 3, n)[..., ::2] for n in (10, 12)] + [torch.randn(2, 3, 4, 5)[..., :k] for k in (3, 4)]
    check(lambda x: x * 2, [(x,) for x in (*wide, torch.randn(2, 3), torch.randn(4), torch.randn(()), torch.randn(2, 3, 14)[..., ::2])])


def test_gradients_that_vanish_under_symbolic_sizes():
    fn = lambda x: x.clone().triu(1).softmax(-2)
    compiled = fs.compile(fn, fullgraph=True, dynamic=True)
    for n in (4, 6):
        args = (torch.randn(n, 1, n, 1, requires_grad=True),)
        torch.testing.assert_close(gradients(compiled, args), gradients(fn, args))


RELATED = {
    "multiple": (lambda x, n: x * 2 if x.shape[0] == 4 * n else x, [(torch.randn(12), 3), (torch.randn(20), 5)]),
    "quotient": (lambda x, n: x * 2 if x.shape[0] == 256 // n else x, [(torch.randn(32), 8), (torch.randn(64), 4)]),
    "used again": (lambda x, n: x.view(4, x.shape[0] // 4) * 2 if x.shape[0] == 4 * n else x, [(torch.randn(12), 3), (torch.randn(20), 5)]),
    "two inputs": (lambda x, y, n: x + y.repeat(2) if x.shape[0] == 4 * n else x, [(torch.randn(4 * n), torch.randn(2 * n), n) for n in (3, 5)]),
}


@pytest.mark.parametrize("name", RELATED)
def test_a_size_known_by_a_number_that_the_graph_does_not_take(name):
    assert check(*RELATED[name], dynamic=True) == 1


def test_marks_with_bounds():
    fn = fs.compile(lambda x: x * 2)
    x = torch.randn(5, 2)
    fs.mark_dynamic(x, 0, min=2, max=5)
    fn(x)
    for n in (2, 3, 4):
        fn(torch.randn(n, 2))
    assert fs.counters["stats"]["unique_graphs"] == 1
    fn(torch.randn(6, 2))
    assert fs.counters["stats"]["unique_graphs"] == 2
    with pytest.raises(ConstraintViolation, match="from 2 to 10.*x.size\\(0\\) <= 5"):
        x = torch.randn(5, 2)
        fs.mark_dynamic(x, 0, min=2, max=10)
        fs.compile(lambda x: x * 2 if x.shape[0] < 6 else x)(x)


def test_an_unbacked_size_is_never_asked_about():
    fn = fs.compile(lambda x: x.sum(0) * 2, fullgraph=True)
    x = torch.randn(6, 2)
    fs.mark_unbacked(x, 0)
    fn(x)
    for n in (2, 1, 0, 5):
        y = torch.randn(n, 2)
        torch.testing.assert_close(fn(y), y.sum(0) * 2)
    assert fs.counters["stats"]["unique_graphs"] == 1


def test_explain_lists_specialisations(monkeypatch):
    monkeypatch.delitem(SHAPES._rows, "aten::linalg_matrix_exp")     # as for an operator of which nobody told the shape

    def fn(x):
        return torch.linalg.matrix_exp(x) if x.shape[0] > 3 else x
    found = fs.explain(fn, dynamic=True)(torch.randn(6, 6)).specializations
    assert any("matrix_exp" in text and "test_sizes.py" in text for text in found)
    assert fs.counters["aot"]["specialized_by_op"] >= 1


# -- the reference programs ----------------------------------------------------------------------------------------------
REFERENCE = {
    "pointwise": lambda n: {"rows": n, "columns": 2 * n},
    "mlp": lambda n: {"batch": n, "width": 16, "layers": 2},
    "resnet": lambda n: {"batch": n, "size": 16},
    "gpt": lambda n: {"batch": n, "length": n + 5, "layers": 1, "width": 32, "vocabulary": 20},
    "lstm": lambda n: {"batch": n, "steps": 3, "inside": 8, "hidden": 12},
}


@pytest.mark.parametrize("name", list(programs.PROGRAMS))
def test_one_graph_for_ten_sizes(name):
    make, holder = programs.PROGRAMS[name], None
    for n in range(2, 12):
        program = make(**REFERENCE[name](n))
        holder = holder or program
        fn = holder.fn
        compiled = fs.compile(fn, dynamic=True, fullgraph=True) if n == 2 else compiled     # noqa: F821
        is_module = isinstance(fn, torch.nn.Module)
        program = programs.Program(fn, program.inputs, holder.leaves if is_module else program.leaves)
        state = {k: v.clone() for k, v in fn.state_dict().items()} if is_module else {}
        results = []
        for version in (compiled, fn):
            if is_module:
                fn.load_state_dict(state)
            value = programs.step(version, program, train=True)
            results.append([value, *[leaf.grad.clone() for leaf in program.leaves]])
        for got, want in zip(*results):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    assert fs.counters["stats"]["unique_graphs"] == 1


def test_sizes_may_be_symbols_from_the_first_call_on_by_a_setting():
    with fs.config.patch(assume_static_by_default=False):
        assert check(lambda x: x.sin() * 2, [(torch.randn(n),) for n in (3, 4, 5)]) == 1


FOUND_BY_SYMBOLS = {
    "pool with ceil_mode": (lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1, ceil_mode=True), lambda n: torch.randn(2, 3, n, n + 1)),
    "average with ceil_mode": (lambda x: torch.nn.functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True), lambda n: torch.randn(2, 3, n, n + 1)),
    "groups that are a size": (lambda x: torch.nn.functional.conv2d(x, torch.ones(x.shape[1], 1, 2, 2), groups=x.shape[1]),
                               lambda n: torch.randn(2, n, 5, 5)),
    "a view of nothing": (lambda x: x[:, 4:].view(len(x), -1, 4), lambda n: torch.randn(n, 4, 4, 4)),
}


@pytest.mark.parametrize("name", FOUND_BY_SYMBOLS)
def test_sizes_that_rules_once_took_for_numbers(name):
    fn, make = FOUND_BY_SYMBOLS[name]
    compiled = fs.compile(fn, dynamic=True, fullgraph=True)
    for n in (6, 7, 9):
        torch.testing.assert_close(compiled(make(n)).shape, fn(make(n)).shape)
        x = make(n)
        torch.testing.assert_close(compiled(x), fn(x))


@pytest.mark.parametrize("lay_out", [lambda n: torch.randn(4, n).t(), lambda n: torch.randn(2, n, 4).permute(2, 0, 1),
                                     lambda n: torch.randn(n, 3, n + 1, 4).to(memory_format=torch.channels_last)], ids=["transposed", "permuted", "channels"])
def test_gradients_lie_as_in_eager(lay_out):
    fn = lambda x: (x.relu() * 2).sigmoid()
    compiled = fs.compile(fn, dynamic=True, fullgraph=True)
    for n in (5, 7, 3):
        x = lay_out(n).requires_grad_()
        (got,), (want,) = (torch.autograd.grad(f(x).sum(), x) for f in (compiled, fn))
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    assert fs.counters["stats"]["unique_graphs"] == 1
