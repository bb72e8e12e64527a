"""What a call of a callable means: one row a question of `meaning`, in its order."""
import functools
import math
import operator
import os
import traceback
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import firesteel as fs
from firesteel.capture import machine, marks
from firesteel.capture.meanings import CALLABLES, CLASSES, NATIVE_MODULES, PYTHON_MODULES, TYPES, Sort, meaning
from firesteel.errors import BREAKS


def plain(x):
    return x


@fs.disable(reason="slow")
def disabled(x):
    return x


@fs.assume_constant_result
def constant():
    return 3


@fs.allow_in_graph
def allowed(x):
    return x


@fs.forbid_in_graph
def forbidden(x):
    return x


@functools.cache
def cached(x):
    return x


async def coroutine():
    pass


MEANINGS = [
    (len, Sort.HANDLED), (fs.graph_break, Sort.HANDLED), (torch.compile, Sort.HANDLED), (int, Sort.HANDLED), (types.SimpleNamespace, Sort.MADE),
    (fs.compile(plain), Sort.REPLACED), (torch.optim.Optimizer.zero_grad, Sort.REPLACED), (forbidden, "forbidden"), (allowed, Sort.NODE),
    (torch.is_tensor, Sort.NODE), (torch.relu, Sort.NODE), (torch.ops.aten.relu.default, Sort.NODE), (F.gelu, Sort.NODE), (F.layer_norm, Sort.NODE),
    (torch.Tensor.add, Sort.NODE), (torch.linalg.norm, Sort.NODE), (torch.get_num_threads, Sort.STATE), (torch._C._get_mkldnn_enabled, Sort.STATE),
    (torch.set_num_threads, "torch_state"), (torch._C._set_mkldnn_enabled, "torch_state"), (torch._C._functorch._vmap_increment_nesting, "torch_state"),
    (math.hypot, Sort.PURE), (operator.concat, Sort.PURE), (str.upper, Sort.PURE), ("x".join, Sort.PURE), (np.interp, Sort.NUMPY), (cached, Sort.CACHED),
    (disabled, "disabled"), (constant, Sort.CONSTANT), (torch.vmap(plain), Sort.TRANSFORM), (torch.func.functional_call, Sort.INLINED),
    (traceback.format_exc, "outside"), (open, "outside"), (print, "output"), (eval, "code"), (coroutine, "coroutine"), (os.getcwd, "call"),
    (plain, Sort.INLINED), (F.__dict__["_pair"], Sort.INLINED),
]


@pytest.mark.parametrize(("fn", "expected"), MEANINGS, ids=[getattr(fn, "__qualname__", str(fn)) for fn, _ in MEANINGS])
def test_meaning(fn, expected):
    found = meaning(fn)
    assert (found.data if found.sort is Sort.BREAK else found.sort) == expected


def test_breaks_in_tables_are_kinds():
    rows = [row for table in (CALLABLES, TYPES, CLASSES, NATIVE_MODULES, PYTHON_MODULES) for row in table.values()]
    assert {row.data for row in rows if row.sort is Sort.BREAK} <= set(BREAKS)


def test_the_name_of_a_function_says_nothing():
    """Wrapped by the user, a function of torch is the user's; one that is called like a setter is none."""
    def set_scale(x):
        return x * 2
    assert meaning(set_scale).sort is Sort.INLINED
    assert machine and marks.SUBSTITUTES is not None      # importing the machine fills the tables
