"""NumPy arrays: the way from tensors to arrays and back is captured, metadata is guarded, what NumPy computes breaks once."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import capture

import firesteel as fs

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
        return torch.from_numpy(np.cos(y.numpy())) * 2 + y

    compiled, backend = capture(f)
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(3)), f(torch.ones(3)))
    assert len(backend.graphs) == 2
    with pytest.raises(fs.errors.Unsupported, match=r"numpy\.cos hands data to NumPy"):
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
