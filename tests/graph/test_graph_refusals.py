"""What eager refuses for metadata alone is refused while tracing: all wrong calls of torch's operator database, on abstract tensors."""
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from graph_compare import abstract
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree

import firesteel as fs
from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.rules.refusals import can_hold

# (operator, words of eager's sentence): found at run time only, or about out= tensors.
FOUND_LATER = [
    ("gather", "out of bounds"), ("scatter", "out of bounds"), ("scatter_add", "out of bounds"),        # the data
    ("multinomial", "probability"), ("multinomial", "invalid multinomial distribution"),
    ("as_strided_scatter", "setStorage"), ("histogramdd", "size of bins"),
    ("arange", "step must be nonzero"), ("aminmax", "out tensor"), ("gather", "out tensor"), ("complex", "'out'"), ("amax", "and out"), ("amin", "and out"), ("multinomial", "tensor out"),
    ("", "more than one element of the written-to tensor"), ("", "some elements of the input tensor and the written-to tensor"),
]
OPERATORS = [op for op in database.op_db if op.error_inputs_func is not None]


def is_strided(value):
    return not any(isinstance(t, torch.Tensor) and (t.layout != torch.strided or t.is_quantized) for t in pytree.tree_leaves(value))


def error_of(op, args, kwargs):
    try:
        op(*args, **kwargs)
    except Exception as error:
        return error
    return None


def wrong_calls(op):
    """(arguments, eager's error)"""
    for wrong in op.error_inputs("cpu"):
        sample = wrong.sample_input
        call = ((sample.input, *sample.args), sample.kwargs)
        error = error_of(op, *call) if is_strided(call) else None
        if error is not None:
            yield call, error


@pytest.mark.parametrize("part", range(8))
def test_wrong_calls_are_refused_while_tracing(part):
    accepted = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in OPERATORS[part::8]:
            for call, error in wrong_calls(op):
                world = AbstractWorld()
                args, kwargs = abstract(world, call)
                with world.active():
                    found = error_of(op, args, kwargs)
                if found is None and not any(name in ("", op.name) and words in str(error) for name, words in FOUND_LATER):
                    accepted.append(f"{op.name}: {error}")
    assert not accepted, "\n".join(accepted)


WRONG = {
    "a kernel that does not know the dtype": lambda x: x.bool().neg(),
    "a bool difference": lambda x: x.bool() - x.bool(),
    "a complex order": lambda x: x.to(torch.complex64).clamp(0),
    "bits of floats": lambda x: x & 1,
    "a reduction without order": lambda x: x.to(torch.complex64).amax(0),
    "mixed parameters": lambda x: F.layer_norm(x, (6,), torch.zeros(6, dtype=torch.float64)),
    "a format of another rank": lambda x: x.to(memory_format=torch.channels_last),
    "classes that are no numbers": lambda x: F.cross_entropy(x, x[:, 0]),
    "an exact out": lambda x: torch.amax(x, 0, out=torch.zeros(6, dtype=torch.int32)),
    "a copy onto itself": lambda x: (y := x[:, :4].clone()).copy_(y.t()),
    "no pixels": lambda x: F.interpolate(x[None, None], size=(0, 3)),
    "least squares of other rows": lambda x: torch.linalg.lstsq(x, x.t())[0],
    "least squares of another batch": lambda x: torch.linalg.lstsq(x[None], x[:2, None, :4])[0],
    "rows of another width": lambda x: written(x, torch.tensor([0, 2]), torch.ones(3)),
    "more rows than places": lambda x: written(x, torch.tensor([0, 2]), torch.ones(3, 6)),
    "a part of another width": lambda x: written(x, (torch.tensor([0, 2]), slice(0, 2)), torch.ones(3)),
    "a mask of another height": lambda x: written(x, torch.ones(5, dtype=torch.bool), torch.ones(())),
    "a row of another width": lambda x: torch.select_scatter(x, torch.ones(7), 0, 1),
    "rows of another number": lambda x: torch.slice_scatter(x, torch.ones(7, 6), 0, 1, 3),
    "a longer diagonal": lambda x: torch.diagonal_scatter(x, torch.ones(7)),
    "neighbours added in place": lambda x: x[1:].add_(x[:-1]),
    "neighbours as an argument in the middle": lambda x: x[1:].addcmul_(x[1:], x[:-1]),
    "neighbours copied": lambda x: x[1:].copy_(x[:-1]),
    "neighbours as an out": lambda x: torch.mul(x[1:], 2, out=x[:-1]),
    "itself in another order": lambda x: (y := x[:, :4].clone()).mul_(y.t()),
    "its own part at places": lambda x: x.index_put_((torch.tensor([0]),), x[1:2]),
    "its own part added at places": lambda x: x.index_add_(0, torch.tensor([0]), x[1:2]),
    "far behind the storage": lambda x: x.as_strided((4,), (1,), 2**40) + 1,
    "more than the storage": lambda x: x.as_strided((100,), (1,)) + 1,
    "before the storage": lambda x: x.as_strided((4,), (1,), -3) + 1,
    "a copy of more than the storage": lambda x: torch.as_strided_copy(x, (5, 6), (6, 1)) + 1,
    "a write behind the storage": lambda x: torch.as_strided_scatter(x, torch.ones(100), (100,), (1,)),
    "behind the storage of a view": lambda x: x[1:].as_strided((4, 6), (6, 1)) + 1,
    "a class too high": lambda x: F.one_hot(x.long().flatten() + 5, 5),
    "a class too low": lambda x: F.one_hot(x.long().flatten() - 1, 5),
    "nothing to take": lambda x: x[:0].take(torch.tensor([0])),
    "a dimension flipped twice": lambda x: x.flip(0, 0),
    "a dimension that is not there": lambda x: x.flip(2),
    "reflections of what is not there": lambda x: F.pad(x[None], (6, 6), mode="reflect"),
    "more than is there cut off": lambda x: F.pad(x, (-8, 8)),
    "no probabilities": lambda x: F.binary_cross_entropy(x + 2, x),
    "targets that are no probabilities": lambda x: F.binary_cross_entropy(x, x + 2),
    "a full overflow of int64": lambda x: torch.full((3,), 2**63),
    "a full overflow": lambda x: torch.full((3,), 300, dtype=torch.uint8),
    "an overflow like it": lambda x: torch.full_like(x, 300, dtype=torch.int8),
    "an out of another kind": lambda x: torch.add(x, x, out=torch.empty(4, 6, dtype=torch.int32)),
    "pixels that do not divide": lambda x: F.pixel_shuffle(x[None], 3),
    "an outer product of more dimensions": lambda x: torch.addr(x[None], x[:, 0], x[0]),
    "a mode that nobody knows": lambda x: (torch.div(x, x, rounding_mode="trunc"), torch.div(x, x, rounding_mode="up")),
    "two devices": lambda x: torch.mv(x, torch.ones(6, device="meta")),
    "an overflow at places": lambda x: x.to(torch.uint8).index_fill(0, torch.tensor([1]), 300),
    "an overflow of a tensor at places": lambda x: x.to(torch.uint8).index_fill(0, torch.tensor([1]), x.sum().long() + 300),
    "an overflow of a tensor under a mask": lambda x: x.half().masked_fill(x > 0, x.sum() + 1e6),
    "a mask on another device": lambda x: torch.ops.aten.native_dropout_backward(x, (x > 0).to("meta"), 2.0),
    "an overflow that is scattered": lambda x: x.to(torch.uint8).scatter(0, torch.zeros(1, 6, dtype=torch.int64), 300),
    "a number too large for half precision": lambda x: torch.full((2,), 1e6, dtype=torch.float16),
    "an exact out of a product": lambda x: torch.mm(x, x.t(), out=torch.empty(4, 4, dtype=torch.float64)),
    "an exact out of indices": lambda x: torch.max(x, 0, out=(torch.empty(6), torch.empty(6))),
    "integers in one dimension": lambda x: F.max_pool1d(x.long(), 2),
    "weights of another dtype": lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.int64), torch.ones(6, dtype=torch.float64)),
    "no classes": lambda x: F.one_hot(x.long(), 0),
    "a place that one number does not have": lambda x: x[0, 0].gather(0, torch.tensor(1)),
    "a cumulative product along nothing": lambda x: x.clone().requires_grad_().cumprod(3),
    "a norm of nothing": lambda x: torch.linalg.vector_norm(x[:0], float("inf")),
}


def written(x, where, what):
    x = x.clone()
    x[where] = what
    return x


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize("name", WRONG)
def test_the_sentence_is_eagers_and_the_next_call_works(name, backend):
    def program(x, wrong):
        return WRONG[name](x) if wrong else x + 1
    x = torch.rand(4, 6)
    with pytest.raises(Exception) as eager:
        program(x, True)
    compiled = fs.compile(program, backend=backend)
    with pytest.raises(eager.type) as ours:
        compiled(x, True)
    assert str(ours.value) == str(eager.value)
    assert torch.equal(compiled(x, False), x + 1)


# (program of a number or a tensor beside x, a right argument, a wrong one): both are symbols, so that one graph serves them.
SYMBOLIC = {
    "a negative size": (lambda x, n: torch.ones(3).expand(n, 3) + x[0, 0], 4, -2),
    "the size that is there": (lambda x, n: torch.ones(3).expand(n, 3) + x[0, 0], 4, -1),
    "rows of another width": (lambda x, v: written(x, torch.tensor([0, 2]), v), torch.ones(2, 6), torch.ones(3, 6)),
    "columns of another height": (lambda x, v: written(x, (slice(None), torch.tensor([0, 2])), v), torch.ones(4, 2), torch.ones(3, 2)),
    "a source of another height": (lambda x, v: torch.slice_scatter(x, v, 0, 1, 3), torch.ones(2, 6), torch.ones(3, 6)),
    "a source of another width": (lambda x, v: torch.select_scatter(x, v, 0, 1), torch.ones(6), torch.ones(7)),
    "a longer diagonal": (lambda x, v: torch.diagonal_scatter(x, v), torch.ones(4), torch.ones(5)),
    "behind the storage": (lambda x, n: x.as_strided((n, 2), (2, 1)) + 1, 6, 13),
    "an offset behind it": (lambda x, n: x.as_strided((2, 2), (2, 1), n) + 1, 6, 2**40),
    "a negative offset": (lambda x, n: x.as_strided((2, 2), (2, 1), n) + 1, 6, -2),
    "reflections of what is not there": (lambda x, n: F.pad(x[None], (n, n), mode="reflect"), 3, 6),
    "a class too high": (lambda x, n: F.one_hot(x.long().flatten() + 4, n), 6, 4),
    "an overflow": (lambda x, n: torch.full((3,), n, dtype=torch.uint8) + x.long().sum(), 200, 300),
    "an overflow of a sum": (lambda x, n: x.to(torch.uint8) + n, 200, 300),
    "negative repeats": (lambda x, n: x.repeat(n, 2), 2, -1),
    "a negative part": (lambda x, n: x.split([n, 4 - n])[0] + 1, 2, -1),
    "a window too large": (lambda x, n: x.unfold(0, n, 1) + 1, 2, 5),
    "a dimension too high": (lambda x, n: torch.take_along_dim(x, torch.zeros(4, 1, dtype=torch.int64), n), 1, 2),
    "a range that ends before its start": (lambda x, n: torch.arange(1.5, n * 1.0, 2.0) + x[0, 0], 4, 1),
    "coordinates of another number": (lambda x, v: torch.gradient(x, spacing=(v,), dim=0)[0], torch.arange(4.0), torch.arange(1.0)),
    "an index too high": (lambda x, n: x.select(0, n) + 1, 2, 4),
    "neighbours added in place": (lambda x, n: x[:2].add_(x[n:n + 2]), 2, 1),
    "more rows than there are": (lambda x, n: x.narrow(0, 1, n) + 1, 2, 4),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbols_are_checked_too(name):
    program, right, wrong = SYMBOLIC[name]
    x = torch.rand(4, 6)
    compiled = fs.compile(program, dynamic=True)
    assert torch.equal(compiled(x, right), program(x, right))
    error = error_of(program, (x, wrong), {})
    found = error_of(compiled, (x, wrong), {})
    assert type(found) is type(error), f"eager {error!r}, compiled {found!r}"
    assert torch.equal(compiled(x, right), program(x, right))


def test_which_dtypes_hold_which():
    """Against eager, for the largest and the least number of each: what is held is not refused; what is not, is for one of them."""
    dtypes = (torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for target, source in itertools.product(dtypes, repeat=2):
        about = torch.finfo(source) if source.is_floating_point else torch.iinfo(source)
        numbers = [about.min, about.max, *([float("inf"), float("nan")] if source.is_floating_point else [])]
        assert any(overflows(target, source, n) for n in numbers) == (not can_hold(target, source)), (target, source)


def overflows(target, source, number):
    try:
        torch.zeros(2, dtype=target).fill_(torch.tensor(number, dtype=source).item())
    except RuntimeError:
        return True
    return False


def test_values_that_fit_fill_in_one_graph():
    def program(x, v):
        return x.masked_fill(x > 0, v), x.index_fill(0, torch.tensor([0]), v)
    x = torch.rand(4, 6)
    compiled = fs.compile(program, fullgraph=True)
    torch.testing.assert_close(compiled(x, torch.tensor(3)), program(x, torch.tensor(3)))


SHARED = {
    "itself": lambda x: x.add_(x), "the same part": lambda x: x[1:].mul_(x[1:]), "apart": lambda x: x[:2].add_(x[2:]), "nothing": lambda x: x[2:2].add_(x[3:3]),
    "a conjugate": lambda x: (z := torch.view_as_complex(x.view(4, 3, 2))).add_(z.conj()),
    "halves": lambda x: x[:x.shape[0] // 2].sub_(x[x.shape[0] // 2:]), "of another storage": lambda x: x[1:].add_((x * 1)[:-1]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_memory_that_may_be_shared(name, dynamic):
    """Eager computes in place where both are the same elements, or share none."""
    compiled = fs.compile(SHARED[name], dynamic=dynamic)
    one, two = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6)
    assert torch.equal(compiled(two), SHARED[name](one)) and torch.equal(one, two)


@pytest.mark.parametrize("fn", [lambda x: torch.empty(2**40, 2**10).sum() + x, lambda x: (x.expand(2**50, 3) * 1).sum(), lambda x: torch.arange(2**55).sum() + x])
def test_what_no_memory_holds_is_refused(fn):
    """A kernel that needs no memory for it would run for years."""
    with pytest.raises(RuntimeError, match="allocate|memory"):
        fn(torch.ones(3))
    with pytest.raises(RuntimeError, match="allocate|memory"):
        fs.compile(fn)(torch.ones(3))


@pytest.mark.parametrize("good, bad", [
    (lambda x: x.clamp(max=2.0), lambda x: x.clamp(max=1e39)), (lambda x: torch.add(x, x, alpha=2.0), lambda x: torch.add(x, x, alpha=1e39)),
    (lambda x: torch.add(x, True), lambda x: torch.add(x, x, alpha=True)), (lambda x: F.threshold(x, 1.0, 2.0), lambda x: F.threshold(x, 1.0, 1e39)),
    (lambda x: torch.addcmul(x, x, x, value=2.0), lambda x: torch.addcmul(x, x, x, value=1e39))])
def test_a_good_call_before_says_nothing_of_numbers_that_do_not_fit(good, bad):
    x = torch.ones(3)
    assert torch.equal(fs.compile(good)(x), good(x))
    with pytest.raises(RuntimeError) as eager:
        bad(x)
    with pytest.raises(RuntimeError) as ours:
        fs.compile(bad)(x)
    assert str(ours.value).split("\n")[0] == str(eager.value).split("\n")[0]
