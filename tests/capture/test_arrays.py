"""NumPy arrays: the way from tensors to arrays and back and many functions are captured, metadata is guarded, what else NumPy computes breaks once."""
from __future__ import annotations

import copy
import functools
import re
from typing import Any

import numpy as np
import pytest
import torch
from harness import capture

import firesteel as fs
from firesteel.capture.values import arrays

BACKENDS = ["eager", "aot_eager", "native"]


def written_through_a_tensor(a, b):
    t = torch.from_numpy(a)
    t.add_(1)
    return t * 2, torch.from_numpy(b) * 2


def two_tensors_over_one(a, b):
    t, u = torch.from_numpy(a), torch.as_tensor(a)
    t.add_(1)
    return u * 2, t is u


def copies(a, b):
    t = torch.tensor(a)
    t.add_(1)
    return t, torch.tensor(a, dtype=torch.float64), torch.as_tensor(a, dtype=torch.int64), torch.tensor(a.shape)


def there_and_back(a, b):
    x = torch.as_tensor(b) + 1
    array = x.numpy()
    y = torch.from_numpy(array)
    y.mul_(3)
    return y, array, array.shape, array.dtype == np.float32, len(array)


def handed_on(a, b):
    return torch.ones(2) + 1, a, [b]


PROGRAMS: list[Any] = [written_through_a_tensor, two_tensors_over_one, copies, there_and_back, handed_on]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("program", PROGRAMS, ids=[p.__name__ for p in PROGRAMS])
def test_captured(program, shared, backend):
    def run(fn):
        a = np.arange(6, dtype=np.float32)
        b = a[1:5] if shared else np.ones(4, dtype=np.float32)
        out = [fn(a, b) for _ in range(2)]
        return [[item.copy() if isinstance(item, np.ndarray) else item for item in row] for row in out], a, b

    ours, theirs = run(fs.compile(program, backend=backend, fullgraph=True)), run(program)
    for mine, eager in zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs)):
        assert type(mine) is type(eager)
        if isinstance(mine, np.ndarray):
            np.testing.assert_array_equal(mine, eager)
        elif isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine, eager)
        else:
            assert mine == eager


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_over_one_array(backend):
    """Two storages, one memory."""
    def f(t, u):
        t.add_(1)
        return u * 2

    array = np.ones(5, dtype=np.float32)
    out = fs.compile(f, backend=backend)(torch.from_numpy(array[:4]), torch.from_numpy(array[1:]))
    assert out.tolist() == [4.0, 4.0, 4.0, 2.0]


def test_metadata_is_guarded_and_data_is_not():
    def f(a, x):
        return x * (a.ndim + len(a)) if a.dtype == np.float64 else x - 1

    compiled, backend = capture(f, fullgraph=True)
    for array in (np.ones(3), np.zeros(3), np.ones((3, 2)), np.ones(4), np.ones(3, dtype=np.int32), np.ones(3)):
        torch.testing.assert_close(compiled(array, torch.ones(2)), f(array, torch.ones(2)))
    assert len(backend.graphs) == 4


def test_numpy_function_is_one_split():
    def f(x):
        y = x.sin()
        return torch.from_numpy(np.interp(y.numpy(), [0, 1], [0, 3])) * 2 + y

    compiled, backend = capture(f)
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(3)), f(torch.ones(3)))
    assert len(backend.graphs) == 2
    with pytest.raises(fs.errors.Unsupported, match=r"numpy\.interp hands data to NumPy"):
        capture(f, fullgraph=True)[0](torch.ones(3))


@pytest.mark.parametrize("make", [lambda: torch.ones(2, requires_grad=True), lambda: torch.ones(2, dtype=torch.bfloat16)], ids=["gradient", "bfloat16"])
def test_tensors_that_have_no_array_raise_as_eager(make):
    def f(x):
        try:
            return (x + 1).numpy()
        except (RuntimeError, TypeError) as error:
            return type(error)

    assert capture(f)[0](make()) is f(make())


def test_sizes_of_arrays_become_symbols():
    def f(a):
        return torch.as_tensor(a) * 2

    compiled, backend = capture(f, fullgraph=True)
    for n in (2, 3, 4, 5):
        assert compiled(np.ones(n)).shape == (n,)
    assert len(backend.graphs) == 2


def whole(a, x):
    b = np.sin(a) + np.exp(x.numpy()).mean(axis=0)
    c = np.concatenate([a, b], axis=0)
    return torch.from_numpy(np.where(c > 0, c, -c).reshape(-1, 2).T + 1) * 2, np.linalg.norm(a), np.dot(a, b.T)


FUNCTIONS = {
    "whole": whole, "numbers": lambda a, x: (a.mean(), a[1, 2], a.sum() * 2, np.max(a), a.argmax()), "operators": lambda a, x: (a * 2 + 1) / 3 - a ** 2 // 2 % 3,
    "reflected": lambda a, x: (1 - a, 2 / (a + 9), -a, +a), "compared": lambda a, x: (a < 0, a == a, (a > 0) & (a < 1), ~(a != 0)),
    "integers": lambda a, x: ((a * 10).astype(np.int32).sum(), np.sin((a * 10).astype("int64")), np.mean(a.astype(np.int64))),
    "parts": lambda a, x: (a[1:, 0], a[None, :, 1], a[..., ::2], a.T[0]), "axes": lambda a, x: (a.std(axis=1, keepdims=True), np.sum(a, axis=(0, 1)), a.max(0)),
    "made": lambda a, x: (np.zeros_like(a, dtype=np.int64), np.ones_like(a), np.full_like(a, 3)),
    "shapes": lambda a, x: (np.stack([a, a]), np.broadcast_to(a[0], (3, 4)), np.expand_dims(a, 1), a.ravel(), a.flatten(), np.tile(a, 2), a.squeeze()),
    "views": lambda a, x: (a.T.base is None, a.reshape(2, 6).shape, np.transpose(a).strides), "rounded": lambda a, x: (np.round(a, 2), np.clip(a, -1, 0.5), a.clip(min=0)),
    "products": lambda a, x: (np.outer(a[0], a[1]), np.einsum("ij,kj->ik", a, a), np.tensordot(a, a), np.inner(a, a)), "both": lambda a, x: a * x.numpy()[0],
}
WITH_BREAKS = {"views"}         # what an array's memory is like is asked of the real one


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_on_arrays(name):
    fn = FUNCTIONS[name]
    compiled = fs.compile(fn, fullgraph=name not in WITH_BREAKS)
    for seed in range(2):
        torch.manual_seed(seed)
        a, x = torch.randn(3, 4).numpy(), torch.randn(5, 4)
        for mine, eager in zip(torch.utils._pytree.tree_leaves(compiled(a, x)), torch.utils._pytree.tree_leaves(fn(a, x))):
            assert type(mine) is type(eager) and getattr(mine, "dtype", None) == getattr(eager, "dtype", None)
            assert np.shape(mine) == np.shape(eager)
            np.testing.assert_allclose(np.asarray(mine), np.asarray(eager), rtol=1e-5, atol=1e-5)


def test_functions_on_arrays_of_sizes_that_change():
    def f(a):
        return np.concatenate([a, np.tanh(a) * a.mean(axis=0)]).sum(axis=1)
    compiled, backend = capture(f, fullgraph=True)
    for n in (2, 3, 4, 7):
        a = np.linspace(0, 1, n * 3).reshape(n, 3)
        np.testing.assert_allclose(compiled(a), f(a))
    assert len(backend.graphs) == 2


def test_writes_and_errors_are_numpys():
    def writes(a):
        b = np.sin(a)
        b += 1
        b[0] = 5
        return b, np.sort(b)

    def wrong(a):
        return a.reshape(5, 5)
    a = np.ones((3, 4))
    for mine, eager in zip(fs.compile(writes)(a), writes(a)):
        np.testing.assert_allclose(mine, eager)
    with pytest.raises(ValueError, match="cannot reshape array of size 12"):
        fs.compile(wrong)(a)


def test_a_tensor_given_to_numpy_stays_a_call_of_numpy():
    def f(x):
        return np.sin(x + 1), np.add(x.numpy(), np.float64(2))
    x = torch.ones(3)
    mine, eager = fs.compile(f)(x), f(x)
    assert [type(part) for part in mine] == [type(part) for part in eager] and mine[1].dtype == eager[1].dtype


def test_a_view_is_a_view():
    def f(a):
        return a.T, a[1:]
    a = np.zeros((3, 4))
    turned, part = fs.compile(f, fullgraph=True)(a)
    a += 1
    assert turned.sum() == 12 and part.sum() == 8 and np.shares_memory(turned, a)


def written(a, x):
    b = np.zeros_like(a)
    b[0], b[1, 2], b[:, 1] = a[1], 7, [1, 2, 3]
    b[2:] += 2
    b[a > 0] = -1
    b[[0, 2]] = b[[2, 0]]
    row = b[1]
    row *= 3
    b.reshape(-1)[0] = 9
    return b, row


def argument_written(a, x):
    a[0] = 5
    a -= 1
    a[:, 1:].fill(0.5)
    x.numpy()[0] = 4
    return a * 2, x + 1


def by_out(a, x):
    b = np.empty((3, 4))
    np.add(a, a, out=b)
    np.sqrt(np.abs(b), out=b)
    c = -b
    c.sort(axis=0)
    return b, c, np.sort(b), [row * 2 for row in b], b.size


def copies_are_not_written(a, x):
    same = a.astype(np.float64), a.flatten(), +a, np.array(a), np.atleast_2d(a), np.asarray(a), a.ravel(), np.round(a), np.copy(a)
    a[0, 0] = 100
    return same


def numbers_of_numpy(a, x):
    half = a.astype(np.float32)
    return half * np.float64(2), np.float32(3) * a, half * 2.5, half + np.ones(4), a.astype(np.int32) / 2, a.astype(int) + np.int8(1), (a > 0) + 1, half * np.pi


WRITES: list[Any] = [written, argument_written, by_out, copies_are_not_written, numbers_of_numpy]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", WRITES, ids=[p.__name__ for p in WRITES])
def test_writes_to_arrays(program, backend):
    compiled = fs.compile(program, backend=backend, fullgraph=True)
    for seed in range(2):
        given = [(np.random.default_rng(seed).normal(size=(3, 4)), torch.ones(3, 4, dtype=torch.float64)) for _ in range(2)]
        results = [fn(*args) for fn, args in zip((program, compiled), given)]
        check_equal([results[0], given[0]], [results[1], given[1]])


def check_equal(want, got):
    want, got = torch.utils._pytree.tree_leaves(want), torch.utils._pytree.tree_leaves(got)
    assert len(want) == len(got)
    for one, other in zip(want, got):
        assert type(one) is type(other)
        if isinstance(one, (np.ndarray, np.generic)):
            assert one.dtype == other.dtype and one.shape == other.shape
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-12)
        elif isinstance(one, torch.Tensor):
            torch.testing.assert_close(other, one)
        else:
            assert one == other


def read_only(a):
    try:
        a[0] = 1
    except ValueError:
        return "refused"
    return a


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_an_array_that_is_not_writeable_is_not_written():
    compiled = fs.compile(read_only)
    for writeable in (True, False):
        array = np.zeros(3)
        array.setflags(write=writeable)
        out = compiled(array)
        assert (array[0] == 1) == writeable and (isinstance(out, str) != writeable)


def test_an_in_place_operator_makes_no_lesser_kind_of_numbers():
    def f(a):
        try:
            a += 1.5
        except TypeError as error:
            return type(error).__name__
        return a

    for array in (np.ones(3), np.ones(3, dtype=np.float32), np.ones(3, dtype=np.int64)):
        check_equal([f(array.copy())], [fs.compile(f)(array.copy())])


A, B, I = np.linspace(0.1, 0.9, 12).reshape(3, 4)[::-1].copy(), np.linspace(0.8, 0.2, 12).reshape(3, 4), np.arange(12).reshape(3, 4) % 5 + 1
SQUARE = A[:, :3] @ A[:, :3].T + np.eye(3)
GIVEN: dict[str, list[Any]] = {
    "bitwise_and": [I, 3], "bitwise_or": [I, 3], "bitwise_xor": [I, 3], "invert": [I], "left_shift": [I, 1], "right_shift": [I, 1], "ldexp": [A, I],
    "floor_divide": [A, B], "matmul": [A, B.T], "clip": [A, 0.2, 0.5], "where": [A > B, A, B], "isclose": [A, B], "concatenate": [[A, B]], "stack": [[A, B]],
    "vstack": [[A, B]], "hstack": [[A, B]], "dstack": [[A, B]], "column_stack": [[A, B]], "append": [A, B], "split": [A, 3], "array_split": [A, 2], "hsplit": [A, 2],
    "vsplit": [A, 3], "dsplit": [A[None], 2], "dot": [A, B.T], "vdot": [A, B], "outer": [A[0], B[0]], "inner": [A, B], "tensordot": [A, B],
    "einsum": ["ij,kj->ik", A, B], "kron": [A, B], "cross": [A[:, :3], B[:, :3]], "convolve": [A[0], B[0]], "correlate": [A[0], B[0]], "reshape": [A, (4, 3)],
    "expand_dims": [A, 1], "swapaxes": [A, 0, 1], "moveaxis": [A, 0, 1], "broadcast_to": [A[0], (3, 4)], "broadcast_arrays": [A, A[0]],
    "tile": [A, 2], "repeat": [A, 2], "roll": [A, 1], "pad": [A, ((1, 2), (0, 1))], "take": [A, [0, 2]], "take_along_axis": [A, I % 3, 0],
    "argsort": [A], "searchsorted": [np.sort(A[0]), 0.3], "meshgrid": [A[0], B[0]], "full_like": [A, 3], "trace": [A], "diag": [A], "vander": [A[0]],
    "percentile": [A, 40], "quantile": [A, 0.3], "gradient": [A[0]], "linalg.matrix_power": [SQUARE, 2], "linalg.multi_dot": [[A, B.T, A]],
    "linalg.solve": [SQUARE, A], "zeros": [3], "ones": [(2, 3)], "empty": [0], "full": [(2, 3), 7], "arange": [0, 1.5, 0.5], "linspace": [0, 1, 4], "eye": [3, 4],
    "identity": [3], "array": [[[1, 2], [3, 4]]], "hamming": [5], "hanning": [5], "blackman": [5], "bartlett": [5],
    "indices": [(2, 3)], "fft.fftfreq": [4], "fft.rfftfreq": [4], "arccosh": [A + 1],
}


def given(name):
    function = arrays.found_in(np, name)
    return GIVEN.get(name) or ([A] * function.nin if isinstance(function, np.ufunc) else [SQUARE] if name.startswith("linalg.") else [A])


@pytest.mark.parametrize("name", [*arrays.FUNCTIONS, *arrays.MAKERS])
def test_every_function_of_the_tables(name):
    function, args = arrays.found_in(np, name), given(name)
    if name == "empty_like":
        return
    if name == "linalg.svd":
        function = functools.partial(function, compute_uv=False)
    by_numpy = function(*args)
    compiled = fs.compile(lambda *args: function(*args), backend="eager", fullgraph=True)
    check_equal([by_numpy], [compiled(*copy.deepcopy(args))])


@pytest.mark.parametrize("backend", BACKENDS)
def test_named_tuples_of_numpy(backend):
    def fn(x):
        parts = np.linalg.qr(x.numpy())
        q, r = np.linalg.qr(x.numpy(), mode="complete")
        return type(parts).__name__, parts, parts.R * 2, q @ r, np.linalg.slogdet(x.numpy()[:3]).logabsdet + 1
    x = torch.linspace(-1, 2, 12).reshape(4, 3).square() + torch.eye(4, 3)
    name, *found = fs.compile(fn, backend=backend, fullgraph=True)(x)
    wanted, *expected = fn(x)
    assert name == wanted == "QRResult" and type(found[0]) is type(expected[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# -- views that read memory backwards -------------------------------------------------------------------------------------
def written_behind(a):
    b = a[::-1]
    a[0] = 7
    return b, b + 1, np.flip(a, axis=1)


def written_through(a):
    b, c = a[::-1], np.rot90(a)
    b[0] = 5
    b[1, ::-1] = np.arange(4.0)
    c += 1
    c[:, 1] = -1
    return a, b, c


def stored_backwards(a):
    a[::-1, 1:3] = np.arange(2.0)
    a[:, ::-2] = a[:, ::2]
    a[1, ::-1] = 9
    return a


def parts_of_views(a):
    b = a[::-1]
    return b[0, 1], b[1], b[-1, ::-1], b[::-1], b[None, ..., 1], b[1:], a[2:0:-2], a[0:0:-1], b[[0, 1]], [row * 2 for row in b], len(b), b.shape


def turned(a):
    return [np.rot90(a, k) for k in range(-1, 5)], np.rot90(a, 1, (1, 0)), np.flip(a), np.flip(a, (0, -1)), np.flipud(a), np.fliplr(np.flipud(a))


def computed_from_views(a):
    b = a[::-1]
    return (np.concatenate([b, a]), np.where(b > 3, a, 0), b @ a.T, -b, np.cumsum(b, 0), b.copy(), b.reshape(-1), b.astype(np.float32), np.ascontiguousarray(b),
            np.convolve(a[0], a[1, ::-1]), b.mean(0), torch.from_numpy(b.copy()) * 2)


BACKWARDS = [written_behind, written_through, stored_backwards, parts_of_views, turned, computed_from_views]


def strides_of(found):
    arrays = [part for part in torch.utils._pytree.tree_leaves(found) if isinstance(part, np.ndarray) and part.size]
    return [[step for step, size in zip(part.strides, part.shape) if size > 1] for part in arrays]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", BACKWARDS, ids=[p.__name__ for p in BACKWARDS])
def test_views_that_read_memory_backwards(program, backend, dynamic):
    compiled = fs.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (3, 3, 4):
        ours, theirs = np.arange(rows * 4.0).reshape(rows, 4), np.arange(rows * 4.0).reshape(rows, 4)
        found, wanted = compiled(ours), program(theirs)
        check_equal([wanted, theirs], [found, ours])
        assert strides_of(found) == strides_of(wanted)


def test_a_view_that_torch_refuses_breaks():
    for fn in (lambda a: torch.from_numpy(a[::-1]), lambda a: np.flip(a, 3), lambda a: a[::-1][7]):
        compiled, a = fs.compile(fn), np.ones((3, 4))
        with pytest.raises((ValueError, IndexError)) as wanted:
            fn(a)
        with pytest.raises(type(wanted.value), match=re.escape(str(wanted.value))):
            compiled(a)


ROWS, TABLE = np.array([0, 2]), np.array([[0, 1], [2, 1]], dtype=np.int32)


def tensors_indexed_by_arrays(x):
    y = x.clone()
    y[np.array([0, 1]), ROWS] = x[0, :2]
    y[ROWS] += 1
    return y, x[ROWS], x[:, np.arange(2)], x[TABLE, ], x[1, TABLE], x[np.argsort(x[0].numpy())]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_indexed_by_arrays(backend):
    compiled = fs.compile(tensors_indexed_by_arrays, backend=backend, fullgraph=True)
    for rows in (3, 4, 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), tensors_indexed_by_arrays(x))


def test_arrays_that_torch_converts_break():
    x = torch.randn(3, 3)
    torch.testing.assert_close(fs.compile(lambda x: x[TABLE] * 2)(x), x[TABLE] * 2)
    torch.testing.assert_close(fs.compile(lambda x: x[np.array([0.0, 1.0])])(x), x[:2])


# -- sizes that only run time knows ---------------------------------------------------------------------------------------
def places(x):
    a = x.numpy()
    return np.nonzero(a > 0)[0], np.argwhere(a > 0), np.flatnonzero(a > 0), (a > 0).nonzero()[1], a[np.where(a > 0)], a[a > 0].sum()


def without_repeats(x):
    a = x.numpy().round()
    i = np.nan_to_num(a).astype(np.int64)
    return np.unique(a), np.unique(i), *np.unique(i, return_inverse=True, return_counts=True), torch.from_numpy(np.unique(i)) * 2


def data_rows():
    x = torch.linspace(-3, 4, 20).reshape(5, 4)
    nan = x.clone()
    nan[1:3, 0] = float("nan")
    return x, -x, torch.zeros(5, 4), nan


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("fn", [places, without_repeats])
def test_functions_whose_size_is_data(fn, whole):
    """In one graph where torch's own would be, else a break at each."""
    with fs.config.patch(capture_dynamic_output_shape_ops=whole):
        compiled = fs.compile(fn, fullgraph=whole)
        for x in data_rows():
            found, expected = compiled(x), fn(x)
            assert [type(part) for part in found] == [type(part) for part in expected]
            torch.testing.assert_close(found, expected, equal_nan=True)


def test_unique_that_torch_has_not_breaks():
    def with_counts(x):
        return np.unique(x.numpy(), return_counts=True)

    def along_rows(x):
        return np.unique(x.numpy(), axis=0)
    for fn in (with_counts, along_rows):
        compiled = fs.compile(fn)
        for x in data_rows():
            torch.testing.assert_close(compiled(x), fn(x), equal_nan=True)
        with fs.config.patch(capture_dynamic_output_shape_ops=True), pytest.raises(fs.errors.Unsupported, match="numpy.unique hands data to NumPy"):
            fs.compile(fn, fullgraph=True)(data_rows()[0])
