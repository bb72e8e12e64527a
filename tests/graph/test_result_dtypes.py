"""The dtypes of results are eager's for every operator of torch's database and every dtype, also of the operators that it is decomposed into.

A run takes a fixed part of the operators; FIRESTEEL_FULL_SWEEP=1 takes all.
"""
import hashlib
import itertools
import os
import warnings

import pytest
import torch
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree
from tracing import trace

import firesteel as fs
from firesteel.errors import DataDependentError
from firesteel.graph.decomp import core_decompositions
from firesteel.graph.rules.base import DataAccess

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
          torch.complex64)
BLOCKS = 48
FULL = bool(os.environ.get("FIRESTEEL_FULL_SWEEP"))
database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)     # it would set the seed inside of a graph


def block(number):
    for op in database.op_db:
        if int(hashlib.sha1(f"{op.name}.{op.variant_test_name}".encode()).hexdigest(), 16) % BLOCKS == number and not any(word in op.name for word in ("sparse", "jiterator")):
            yield op


def calls(op):
    """(dtype, program, its tensors, eager's results) of the first samples of each dtype that eager takes."""
    for dtype in sorted(set(DTYPES) & op.supported_dtypes("cpu"), key=str):
        torch.manual_seed(0)
        for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 2):
            flat, structure = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
            places = [n for n, v in enumerate(flat) if isinstance(v, torch.Tensor)]

            def program(*tensors, flat=tuple(flat), structure=structure, places=tuple(places)):
                values = list(flat)
                for n, t in zip(places, tensors):
                    values[n] = t
                args, kwargs = pytree.tree_unflatten(values, structure)
                return pytree.tree_leaves(op(*args, **kwargs))
            tensors = [flat[n].clone() for n in places]
            try:
                yield dtype, program, tensors, program(*[t.clone() for t in tensors])
            except (RuntimeError, NotImplementedError):
                continue        # eager does not take it


def decomposed(program, tensors):
    """The results' dtypes as the decomposed graph has them."""
    gm = trace(lambda *inputs: [t for t in program(*inputs) if isinstance(t, torch.Tensor)], tensors, decompositions=core_decompositions()).gm
    output = next(iter(reversed(gm.graph.nodes)))
    return [n.meta["val"].dtype for n in pytree.tree_leaves(output.args) if isinstance(n, torch.fx.Node)]


@pytest.mark.parametrize("number", range(BLOCKS) if FULL else (0, 5))
def test_dtypes_of_results(number):
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in block(number):
            for dtype, program, tensors, results in calls(op):
                want = [t.dtype for t in results if isinstance(t, torch.Tensor)]
                try:
                    found = decomposed(program, tensors)
                except (DataAccess, DataDependentError, RuntimeError) as error:
                    if type(error) is RuntimeError and "data is not allocated" not in str(error):
                        wrong.append(f"{op.name} of {dtype}: {error}")
                    continue        # asks for data: capture splits it
                if found[:len(want)] != want:
                    wrong.append(f"{op.name} of {dtype}: {found}, not {want}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("numbers", [{}, {"beta": 0}, {"beta": 2, "alpha": 3}, {"beta": 2, "alpha": -2}])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float32])
def test_addr_is_computed_in_the_dtype_of_all_three(dtype, numbers):
    x, a, b = torch.ones(3, 4).to(dtype), torch.tensor([0, 1, 1]).to(dtype), torch.tensor([1, 0, 1, 1], dtype=torch.bool)
    program = lambda x, a, b: torch.addr(x, a, b, **numbers)        # noqa: E731
    found, want = fs.compile(program)(x, a, b), program(x, a, b)
    assert found.dtype is want.dtype and torch.equal(found, want)
