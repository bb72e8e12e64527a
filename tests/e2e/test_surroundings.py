"""Calls under the states of torch that surround a program: values, dtypes, strides, devices, views, requires_grad and types of errors are eager's.

A run takes a fixed part of torch's database of operators; FIRESTEEL_FULL_SWEEP=1 takes all.
"""
import contextlib
import hashlib
import itertools
import math
import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from wrong_calls import CRASHES, database, name_of

import firesteel as fs

FULL = bool(os.environ.get("FIRESTEEL_FULL_SWEEP"))
BLOCKS = 64
aten = torch.ops.aten


@contextlib.contextmanager
def setting(put, value, back):
    put(value)
    try:
        yield
    finally:
        put(back)


STATES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default device": lambda: setting(torch.set_default_device, "cpu", None),
    "meta device": lambda: torch.device("meta"),
    "default dtype": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
}
TOLERANCES = {torch.bfloat16: 8e-2, torch.float16: 2e-2, torch.float32: 1e-4, torch.complex64: 1e-4}        # of eager's own rounding inside of an operator

# operator -> why values are not compared
UNCOMPARED = {
    **dict.fromkeys(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"), "uninitialised memory"),
    "svd_lowrank": "of random projections in eager's lower precision", "pca_lowrank": "likewise", "nn.functional.bilinear": "eager rounds inside",
}
# operator -> why it is not called
SKIPPED = dict.fromkeys(("unsafe_split", "unsafe_chunk"), "under inference mode eager's parts of a plain tensor raise once they are looked at")


def described(value):
    """All that can be seen of a result but its data."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return (type(value), value.dtype, value.shape, value.stride(), value.storage_offset(), value.device, value.requires_grad, value.is_leaf, value._is_view(),
                value.is_conj(), value.is_neg(), value.is_inference())
    if isinstance(value, (list, tuple)):
        return [described(v) for v in value]
    return (value.layout, value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)


def outcome(function, inputs, state):
    torch.manual_seed(0)
    given = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_(t.requires_grad) for t in inputs]
    try:
        with state():
            return function(*given)
    except Exception as error:
        return error


def difference(function, inputs, state, compares=True, **options):
    """What a compiled call shows otherwise than eager, or ''."""
    want, got = outcome(function, inputs, state), outcome(fs.compile(function, **options), inputs, state)
    if isinstance(want, Exception) or isinstance(got, Exception):
        return "" if type(want) is type(got) else f"eager {want!r}, compiled {got!r}"
    if described(want) != described(got):
        return f"eager {described(want)}, compiled {described(got)}"
    for a, b in zip(pytree.tree_leaves(want), pytree.tree_leaves(got)) if compares else ():
        if isinstance(a, torch.Tensor) and a.layout is torch.strided and a.device.type != "meta":
            tolerance = TOLERANCES.get(a.dtype, 1e-7)
            if not torch.allclose(a.detach(), b.detach(), rtol=tolerance, atol=tolerance, equal_nan=True):
                return f"eager {a}, compiled {b}"
    return ""


def t(*shape, dtype=torch.float32, grad=False):
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 7 * 0.25 - 0.5).reshape(shape).to(dtype).requires_grad_(grad)


CASES = {
    "parts that are no views": ("no_grad", lambda x: torch.unsafe_split(x, 2), t(6, 4, grad=True)),
    "chunks that are no views": ("no_grad", lambda x: torch.unsafe_chunk(x, 2), t(6, 4, grad=True)),
    "sizes that are no views": ("no_grad", lambda x: torch.unsafe_split_with_sizes(x, [2, 4]), t(6, 4, grad=True)),
    "one part": ("no_grad", lambda x: torch.unsafe_split(x, 6), t(6, 4, grad=True)),
    "parts of nothing": ("no_grad", lambda x: torch.unsafe_chunk(x, 2), t(0, 5, grad=True)),
    "a norm of no order": ("no_grad", lambda x: [torch.linalg.vector_norm(part, math.nan) for part in (x, x[:1], x[:0])], t(3)),
    "a shape that is no view": ("no_grad", lambda x: aten._unsafe_view(x, [24]), t(6, 4, grad=True)),
    "pooled rows are no view": ("no_grad", lambda x: F.max_pool1d(x, 2), t(2, 3, 8, grad=True)),
    "overlapping memory": ("no_grad", lambda x: x.new_empty_strided((5, 5, 5), (2, 0, 1)).fill_(1), t(1)),
    "memory with holes": ("no_grad", lambda x: torch.empty_strided((3, 4), (8, 2)).fill_(1) + x, t(1)),
    "permuted memory": ("no_grad", lambda x: torch.empty_permuted((5, 3, 1), (2, 1, 0)).fill_(1), t(1)),
    "a permutation that is none": ("no_grad", lambda x: torch.empty_permuted((5, 3), (0, 0)), t(1)),
    "a permutation too short": ("no_grad", lambda x: torch.empty_permuted((5, 3), (0,)), t(1)),
    "a permutation too wide": ("no_grad", lambda x: torch.empty_permuted((5, 3), (0, 2)), t(1)),
    "pseudo-inverse": ("autocast bfloat16", torch.linalg.pinv, t(4, 4) + torch.eye(4)),
    "pseudo-inverse, symmetric": ("autocast float16", lambda x: torch.linalg.pinv(x + x.mT, hermitian=True), t(4, 4) + torch.eye(4)),
    "pseudo-inverse in float64": ("autocast bfloat16", torch.linalg.pinv, t(4, 4, dtype=torch.float64) + torch.eye(4)),
    "rolled halves": ("autocast bfloat16", lambda x: torch.roll(x, 1, 0), t(4, 4, dtype=torch.float16)),
    "rolled halves of the dtype": ("autocast bfloat16", lambda x: torch.roll(x, 1, 0), t(4, 4, dtype=torch.bfloat16)),
    "shifted halves": ("autocast float16", torch.fft.fftshift, t(4, 4, dtype=torch.bfloat16)),
    "group norm of a row": ("no_grad", lambda x, w: torch.native_group_norm(x, w, w, 2, 4, 9, 2, 1e-5), t(72), t(4)),
    "group norm of other ranks": ("no_grad", lambda x, w: torch.native_group_norm(x, w, w, 2, 4, 9, 2, 1e-5), t(8, 3, 3), t(4)),
}


@pytest.mark.parametrize("dynamic", (None, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", CASES)
def test_is_as_in_eager(name, dynamic):
    state, function, *inputs = CASES[name]
    assert difference(function, inputs, STATES[state], dynamic=dynamic) == ""


@pytest.mark.parametrize("split", (lambda x: torch.unsafe_split(x, 2), lambda x: torch.unsafe_split(x, 6), lambda x: torch.unsafe_chunk(x, 3)))
def test_unsafe_parts_may_be_written(split):
    def written(split):
        x = t(6, 4, grad=True)
        parts = split(x)
        parts[0].mul_(2)
        sum(p.sum() for p in parts).backward()
        return [*parts, x.grad]
    assert all(map(torch.equal, written(split), written(fs.compile(split))))


def test_rows_pooled_without_gradients_may_be_written():
    with torch.no_grad():
        y = fs.compile(lambda x: F.max_pool1d(x, 2))(t(2, 3, 8, grad=True))
    assert y.add_(t(2, 3, 4, grad=True)).requires_grad


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("given", FLOATS, ids=str)
@pytest.mark.parametrize("said", FLOATS, ids=str)
def test_dtypes_of_gradients(given, said):
    """The operators of backwards, called by the user."""
    grad, out, mask = t(3, 4, dtype=given), t(3, 4).softmax(-1).to(given), (t(3, 4) > 0).to(said)
    for function in (lambda g, y, m: torch._softmax_backward_data(g, y, -1, said), lambda g, y, m: torch._log_softmax_backward_data(g, y, -1, said),
                     lambda g, y, m: aten.native_dropout_backward(g, m, 1 / 0.9)):
        assert difference(function, (grad, out, mask), contextlib.nullcontext) == ""


def sampled(number):
    """(operator, its call as a function of tensors, these) for two samples of each operator of a block."""
    for op in database.op_db:
        if int(hashlib.sha1(name_of(op).encode()).hexdigest(), 16) % BLOCKS != number or name_of(op) in CRASHES or op.name in SKIPPED:
            continue
        dtype = next((d for d in (torch.float32, torch.int64) if d in op.supported_dtypes("cpu")), None)
        torch.manual_seed(0)
        found = [] if dtype is None else list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype.is_floating_point), 12))
        for sample in found[::max(1, len(found) - 1)]:
            flat, structure = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
            places = [n for n, v in enumerate(flat) if isinstance(v, torch.Tensor)]

            def run(*tensors, op=op, flat=tuple(flat), structure=structure, places=places):
                values = list(flat)
                for n, given in zip(places, tensors):
                    values[n] = given
                args, kwargs = pytree.tree_unflatten(values, structure)
                return op(*args, **kwargs)
            yield op, run, [flat[n] for n in places]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("number", range(BLOCKS) if FULL else (11,))
def test_samples(number, state):
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, run, inputs in sampled(number):
            fs.reset()
            what = difference(run, inputs, STATES[state], compares=op.name not in UNCOMPARED)
            found += [f"{name_of(op)}: {what}"] if what else []
    assert not found, "\n".join(found)
