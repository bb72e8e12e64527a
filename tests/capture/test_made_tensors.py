"""Tensors made of NumPy's numbers, operators of tensors with these, and branches on them: one graph, in eager's dtypes."""
from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import firesteel as fs

BACKENDS = ["eager", "native"]
PROGRAMS = {
    "as_tensor": lambda x, a: (torch.as_tensor(a.sum()), torch.asarray(np.linalg.norm(a)), torch.as_tensor(a.mean(), dtype=torch.float16)),
    "tensor": lambda x, a: (torch.tensor(a.max()), torch.tensor(a.any()), torch.tensor(np.float16(2.5)), torch.tensor(a.sum(), dtype=torch.int64)),
    "lists": lambda x, a: (torch.tensor([a.sum(), 1.0]), torch.tensor([[a.min(), a.max()], [1, 2]]), torch.as_tensor((np.float32(3), a.sum()))),
    "constants": lambda x, a: (torch.tensor([np.sqrt(2.0), 1.0]), torch.tensor([1.0, np.float32(0.1)]), torch.tensor([np.int8(1), 2]), torch.tensor([np.True_])),
    "operators": lambda x, a: (x * a.mean(), a.mean() * x, x + a.max(), a.max() - x, x > a.mean(), a.min() < x, x ** a.min(), x / a.sum()),
    "of 0 dimensions": lambda x, a: (x.sum() * a.mean(), x[0] + a.sum(), a.mean() - x[0]),
    "in place": lambda x, a: x.to(torch.float32).mul_(a.mean()).sub_(a.min()),
    "functions": lambda x, a: (torch.full((3,), a.min()), x.clamp(max=a.mean()), torch.where(x > 0, x, a.min()), torch.add(x, a.max(), alpha=2)),
    "conversions": lambda x, a: (x + int(a.max()), x * float(a.mean()), x + math.sqrt(abs(a.shape[0]) + float(a.max()) ** 2), int(a.any())),
    "comparison as a number": lambda x, a: x + (a > 1).sum(),
    "branch": lambda x, a: x + 1 if np.isnan(a).any() else x * 2,
    "branch on an array": lambda x, a: x + 1 if a[:1] else x * 3,
    "not": lambda x, a: x + 1 if not (a > 100).any() else x * 3,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32"), ("int64", "float32"), ("float32", "int32"), ("bool", "float64"), ("bfloat16", "float32")],
                         ids="-".join)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_that_run_time_knows(name, dtypes, backend):
    program, (mine, theirs) = PROGRAMS[name], dtypes
    compiled = fs.compile(program, backend=backend, fullgraph=True)
    for start in (1, 3, -2):
        x, a = (torch.arange(start, start + 4) / 2 + 0.25).to(getattr(torch, mine)), (np.arange(start, start + 5) * 0.75).astype(theirs)
        try:
            expected = program(x, a)
        except (RuntimeError, TypeError) as error:      # `-` of bools
            with pytest.raises(type(error)):
                fs.compile(program, backend=backend)(x, a)
            continue
        found = compiled(x, a)
        for one, other in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected)):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_tensor_of_a_number_has_memory_of_its_own():
    def f(a):
        total = a.sum()
        made, also = torch.as_tensor(total), torch.tensor(total)
        made += 1
        return made, also, total
    found = fs.compile(f, fullgraph=True)(np.ones(3))
    assert [float(part) for part in found] == [4, 3, 3] and type(found[2]) is np.float64


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "uint8"])
def test_a_number_that_changes_becomes_an_input(dtype):
    class State:
        number = np.dtype(dtype).type(3)

    def f(state, x):
        number, state.number = state.number, state.number + np.dtype(dtype).type(1)
        return x * number, math.sqrt(number), int(number) + 1, number * number

    ours, eager, x = State(), State(), torch.randn(3)
    fs.counters.clear()
    compiled = fs.compile(f)
    for _ in range(12):
        found, expected = compiled(ours, x), f(eager, x)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1:] == expected[1:] and list(map(type, found)) == list(map(type, expected))
        assert ours.number == eager.number and type(ours.number) is type(eager.number)
    assert fs.counters["stats"]["unique_graphs"] <= 3 and not fs.counters["graph_break"] and not fs.counters["recompile_limit"]


def test_a_changed_number_that_must_be_known_is_guarded():
    def f(x, number):
        return x + len("a" * int(number)) + {2: 10, 3: 20, 4: 30}[number]
    compiled, x = fs.compile(f), torch.zeros(2)
    for number in (2, 3, 4, 3):
        assert compiled(x, np.int64(number)).tolist() == f(x, np.int64(number)).tolist()
