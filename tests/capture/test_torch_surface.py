"""What torch offers is captured in one graph: every operator of torch's database as a function, as a method and in place, and what lies around them."""
from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import Marking, capture, outside, same
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch.utils import _pytree as pytree

import firesteel as fs
from firesteel.capture import marks

pytest.importorskip("expecttest")       # torch's own samples need it
from torch.testing._internal import common_methods_invocations as database  # noqa: E402

DTYPES = (torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool)
PARTS = 6

# Read data, or give a result whose size depends on it: a break, with eager's result.
DATA = {"item", "allclose", "equal", "combinations", "masked_select", "tensor_split", "unique", "unique_consecutive", "bincount", "nonzero", "argwhere",
        "nn.functional.one_hot", "nn.functional.gaussian_nll_loss"}
# Releases of torch that are not the newest: quantile asks whether a tensor q lies in [0, 1]; scan leaves its dimension in front.
OLDER = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)
DATA |= {"quantile", "nanquantile"} if OLDER else set()
SPARSE = {"sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"}
UNINITIALIZED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def forms(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The ways to call an operator; methods of one in three."""
    yield "function", op.op
    for kind, fn in (("method", op.method_variant), ("in place", op.inplace_variant)):
        if fn is not None and len(op.name) % 3 == 0:
            yield kind, fn


def copied(nest: Any) -> Any:
    return pytree.tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, nest)


def first_sample(op: Any) -> tuple[Any, Any] | None:
    dtype = next((d for d in DTYPES if d in op.supported_dtypes("cpu")), None)
    if dtype is None:
        return None
    torch.manual_seed(0)
    sample = next(iter(op.sample_inputs("cpu", dtype, requires_grad=False)))
    return (sample.input, *sample.args), sample.kwargs


def difference(fn: Callable[..., Any], sample: tuple[Any, Any], compare: bool) -> str:
    theirs, ours = copied(sample), copied(sample)
    torch.manual_seed(1)
    try:
        expected = fn(*theirs[0], **theirs[1])
    except Exception:       # this form does not take this sample
        return ""
    compiled, _ = capture(lambda args, kwargs: fn(*args, **kwargs), fullgraph=True)
    torch.manual_seed(1)
    try:
        found = compiled(*ours)
        if compare:
            same(pytree.tree_leaves((found, ours)), pytree.tree_leaves((expected, theirs)))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_are_captured(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))     # a seed set inside is another matter
    wrong = {}
    for op in database.op_db[part::PARTS]:
        name = name_of(op)
        if name in DATA | SPARSE or (sample := first_sample(op)) is None:
            continue
        for kind, fn in forms(op):
            if text := difference(fn, sample, name not in UNINITIALIZED):
                wrong[f"{name} ({kind})"] = text
    assert not wrong, wrong


# -- around them ----------------------------------------------------------------------------------------------------------
@torch.jit.script
def scripted(x: torch.Tensor, n: int = 3) -> torch.Tensor:
    return x.sin() * n if n > 2 else x


traced = torch.jit.trace(lambda x: x.cos() + 1, torch.ones(3))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


torch.manual_seed(0)
exported = torch.export.export(Net(), (torch.ones(3, 4),)).module()
symbolic = torch.fx.symbolic_trace(Net())
distributions = torch.distributions
net = Net()


def called_twice(x: torch.Tensor) -> Any:
    return inner(x) + (lambda y: inner(y))(x)


@fs.compile
def inner(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def new_data(x: torch.Tensor) -> Any:
    y, z = x.clone(), torch.complex(x, x)
    y.data = x * 2
    y += 1
    z.real, z.imag = x * 3, z.real
    return y, z, y.data


def new_by_size(x: torch.Tensor) -> Any:
    """A torch.Size is a shape where a tuple is data."""
    return (x.new(x.shape).fill_(1), x.new(torch.Size([2])).fill_(2), x.new([1, 2]), torch.Tensor(x.size()).zero_(), torch.Tensor([1, 2]),
            torch.LongTensor([3, 4]), torch.FloatTensor(2, 3).zero_(), torch.IntTensor().shape)


def laplace(x: torch.Tensor) -> Any:
    made = distributions.Laplace(x, x.abs() + 1, validate_args=False)
    return made.rsample(), made.log_prob(x)


CAPTURED = [
    called_twice, new_data, new_by_size, laplace,
    lambda x: torch.vmap(torch.vmap(lambda a: a * 2 + 1.5))(x),
    lambda x: torch.func.vjp(lambda v: (v.sin() * v, v.cos()), x, has_aux=True)[::2],
    lambda x: torch.func.vjp(lambda v: (v.sin() * v, v.cos()), x, has_aux=True)[1](torch.ones_like(x)),
    lambda x: torch.func.jvp(lambda v: (v.sin() * v, v.cos()), (x,), (x + 1,), has_aux=True),
    lambda x: torch.func.jacrev(lambda v: (v.sin() * v[0], v.cos()), has_aux=True, chunk_size=2)(x[0]),
    lambda x: torch.func.jacfwd(lambda v: (v.sin() * v[0], v.cos()), has_aux=True)(x[0]),
    lambda x: torch.func.functionalize(lambda v: v.clone().add_(1))(x),
    lambda x: scripted(x) + scripted(x, 1) + traced(x), lambda x: exported(x), lambda x: symbolic(x),
    lambda x: x + 1 if torch.__version__ >= "2" else x,
    lambda x: torch.nn.functional.triplet_margin_with_distance_loss(x, x + 1, x.sin(), distance_function=torch.nn.PairwiseDistance()),
    lambda x: torch.cov(x, fweights=torch.tensor([1, 2, 3, 0])) + torch.corrcoef(x) + x.cov(correction=0),
    lambda x: torch.istft(torch.stft(x.repeat(1, 8), 16, window=torch.hann_window(16), return_complex=True), 16, window=torch.hann_window(16)),
    lambda x: (torch.tensor([x[0, 0], x[1, 1] + 1]), torch.tensor([[x[0, 0], 2], [1, x[1, :1]]], dtype=torch.float64)),
    lambda x: (operator.is_(x, None), operator.is_not(x, 1), operator.contains([1], 1), operator.truth([]), x + 1),
    lambda x: fs.compile(inner)(x) + fs.compile(fullgraph=True)(inner)(x) + torch.compile(inner)(x) + fs.compile(net)(x),
    lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
]


@pytest.mark.parametrize("fn", CAPTURED, ids=[f"{k}-{fn.__code__.co_names[min(1, len(fn.__code__.co_names) - 1)]}" for k, fn in enumerate(CAPTURED)])
def test_captured(fn: Callable[..., Any]) -> None:
    x = torch.linspace(-1, 2, 12).reshape(3, 4)
    for backend in ("eager", "aot_eager"):
        compiled = fs.compile(fn, fullgraph=True, backend=backend)
        for _ in range(2):
            torch.manual_seed(0)
            expected = fn(x)
            torch.manual_seed(0)
            same(compiled(x), expected)


# operators that take functions, and what they give: called eagerly, they load another compiler
HIGHER_ORDER = [
    (lambda x: torch.cond(True, torch.sin, torch.cos, (x,)), torch.sin),
    (lambda x: torch.cond(x.shape[0] == 2, torch.sin, torch.cos, (x,)), torch.cos),
    (lambda x: torch_map(lambda row, y: (row.sin() + y, {"a": row * 2}), x, x[0]), lambda x: (x.sin() + x[0], {"a": x * 2})),
    (lambda x: scan(lambda carry, row: (carry + row, {"a": carry * row}), x[0] * 0, x), lambda x: (x.sum(0), {"a": (x.cumsum(0) - x) * x})),
    (lambda x: scan(lambda carry, row: (carry + row, carry + 1), x[:, 0] * 0, x, dim=1, reverse=True),
     lambda x: (x.sum(1), (x.sum(1, keepdim=True) - x.cumsum(1) + 1).permute((1, 0) if OLDER else (0, 1)))),
    (lambda x: associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic"), lambda x: x.cumsum(0)),
    (lambda x: torch.while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, y * 2), (0, x)), lambda x: (3, x * 8)),
]


@pytest.mark.parametrize("fn, meaning", HIGHER_ORDER, ids=["cond", "cond-size", "map", "scan", "scan-back", "associative-scan", "while"])
def test_operators_that_take_functions(fn: Callable[..., Any], meaning: Callable[..., Any]) -> None:
    x = torch.linspace(-1, 2, 12).reshape(3, 4)
    same(fs.compile(fn, fullgraph=True, backend="aot_eager")(x), meaning(x))


def test_conditions_that_are_tensors_are_in_the_graph() -> None:
    def fn(x: torch.Tensor) -> Any:
        y = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x * 2,))
        return torch.while_loop(lambda a: a.sum() < 9, lambda a: (a + 1,), (y,))[0] * 2

    compiled = fs.compile(fn, backend=Marking(), fullgraph=True)
    for x in (torch.ones(3), -torch.ones(3)):
        found = (x * 2).sin() if x.sum() > 0 else (x * 2).cos()
        while found.sum() < 9:
            found = found + 1
        torch.testing.assert_close(compiled(x), found * 2)
    x = torch.ones(3)
    assert outside(lambda: compiled(x)) == []


def test_data_of_an_argument_is_set() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.data = y
        x.mul_(2)
        return y + 1, x

    x, y = torch.zeros(2), torch.arange(3.0)
    out, found = fs.compile(fn, fullgraph=True)(x, y)
    same([out, x, y], [torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0.0, 2.0, 4.0]), torch.tensor([0.0, 2.0, 4.0])])
    assert found is x and x.data_ptr() == y.data_ptr()


def test_checks_of_data_are_made() -> None:
    compiled = fs.compile(lambda x, w: torch.cov(x, fweights=w), fullgraph=True)
    with pytest.raises(RuntimeError, match="fweights cannot be negative"):
        compiled(torch.randn(2, 3), torch.tensor([1, -1, 1]))


@pytest.mark.parametrize("fn, operation", [
    (lambda x: torch.Tensor.item(x.sum()), "Tensor.item turns"),
    (lambda x: torch.tensor_split(x, torch.tensor([1, 2])), "torch.tensor_split reads"),
    (lambda x: torch.nn.functional.one_hot(x.long().abs()), "one_hot reads")], ids=["item", "tensor_split", "one_hot"])
def test_reading_data_breaks(fn: Callable[..., Any], operation: str) -> None:
    x = torch.linspace(-1, 2, 12).reshape(3, 4)
    same(fs.compile(fn, backend="eager")(x), fn(x))
    with pytest.raises(fs.errors.Unsupported, match=operation):
        fs.compile(fn, fullgraph=True, backend="eager")(x)


def test_a_loss_that_checks_its_arguments_is_in_the_graph() -> None:
    """A Python function of torch that asks for data is executed, and a branch that only raises is a check."""
    loss = functools.partial(torch.nn.functional.gaussian_nll_loss, full=True)
    compiled, backend = capture(lambda x: loss(x * 2, x, x.abs() + 1) + 1)
    x = torch.randn(4)
    torch.testing.assert_close(compiled(x), loss(x * 2, x, x.abs() + 1) + 1)
    assert len(backend.graphs) == 1 and backend.ops > 8


def test_forward_of_a_compiled_module_is_compiled() -> None:
    model, x = Net(), torch.randn(3, 4)
    backend = Marking()
    compiled = fs.compile(model, backend=backend)
    model.register_forward_hook(lambda module, args, out: out * 2)
    same(compiled.forward(x), model.forward(x))
    assert backend.graphs == 1 and outside(lambda: compiled.forward(x)) == []
    same(compiled(x), model(x))
    same(fs.compile(lambda y: compiled.forward(y) + compiled(y), fullgraph=True, backend="eager")(x), model.forward(x) + model(x))
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)


def test_marks_on_builtins() -> None:
    fs.allow_in_graph(torch.sub)
    try:
        fs.forbid_in_graph(torch.hypot)
        same(fs.compile(lambda x: torch.sub(x, 1), fullgraph=True, backend="eager")(torch.ones(2)), torch.zeros(2))
        with pytest.raises(fs.errors.Unsupported, match="torch.hypot is marked with fs.forbid_in_graph"):
            fs.compile(lambda x: torch.hypot(x, x), fullgraph=True, backend="eager")(torch.ones(2))
    finally:
        marks.NOTED.clear()


def checked_distributions(x: torch.Tensor) -> Any:
    """With their checks, and with properties that they make of others."""
    words = distributions.Categorical(logits=x)
    points = distributions.MultivariateNormal(x, scale_tril=torch.eye(3))
    return (words.log_prob(torch.zeros(x.shape[0])), words.probs, distributions.kl_divergence(words, distributions.Categorical(logits=x * 2)),
            points.log_prob(x + 1), points.precision_matrix, points.rsample(), distributions.Normal(x, x.exp()).log_prob(x),
            isinstance(distributions.Categorical.logits, property))


def test_distributions_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)     # the peer switches it off once it is loaded
    fs.reset()
    fs.counters.clear()
    compiled = fs.compile(checked_distributions, fullgraph=True)
    for count in (2, 4, 5, 6):
        x = torch.randn(count, 3)
        torch.manual_seed(0)
        ours = compiled(x)
        torch.manual_seed(0)
        torch.testing.assert_close(ours, checked_distributions(x))
    assert fs.counters["stats"]["unique_graphs"] == 2
    with pytest.raises(ValueError, match="Expected parameter"):
        compiled(torch.full((2, 3), float("nan")))
