"""An index out of range is told also where the element does not depend on it."""
import pytest
import torch
import torch.nn.functional as F

import firesteel as fs
from firesteel.loops import fuse as fuse_module
from firesteel.loops.ir import CHECKING
from firesteel.loops.simplify import split_axes

PROGRAMS = {
    "a constant": lambda x, i: torch.zeros(4, 6)[i],
    "a constant of one byte": lambda x, i: torch.zeros(4, 6, dtype=torch.bool)[i],
    "a constant in half precision": lambda x, i: torch.zeros(4, 6, dtype=torch.bfloat16)[i] + 1,
    "a sum of constants": lambda x, i: torch.zeros(4, 6)[i].sum(),
    "rows of one number": lambda x, i: torch.full((4,), 2.0).index_select(0, i) * 2,
    "an embedding of ones": lambda x, i: F.embedding(i, torch.ones(4, 6)),
    "an expanded row": lambda x, i: x[:1].expand(4, 6)[i],
    "a gather from it": lambda x, i: x[:1].expand(4, 6).gather(0, i[:, None]),
    "one element expanded": lambda x, i: x[:1, :1].expand(2, 3).take(i),
    "a repeated row": lambda x, i: x[:1].repeat(4, 1)[i],
    "a broadcast sum": lambda x, i: (x[:1] + torch.zeros(4, 1))[i],
    "one class": lambda x, i: F.cross_entropy(x[:2, :1], i),
    "one row of logarithms": lambda x, i: x[:1].log_softmax(0)[i],
    "not taken": lambda x, i: torch.where(x[:2] > 2, torch.ones(4, 6)[i], x[:2]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_check_is_kept(name, dynamic):
    program, x = PROGRAMS[name], torch.rand(4, 6)
    compiled = fs.compile(program, dynamic=dynamic)
    right, wrong = torch.tensor([0, 0]), torch.tensor([0, 7])
    torch.testing.assert_close(compiled(x, right), program(x, right))
    with pytest.raises((IndexError, RuntimeError)) as eager:
        program(x, wrong)
    with pytest.raises(eager.type):
        compiled(x, wrong)


def test_indices_along_a_dimension_wrap_as_often_as_it_takes():
    x, places = torch.rand(4, 6), torch.tensor([[7], [-9], [-1]])
    program = lambda x, places: torch.take_along_dim(x, places, 0)      # noqa: E731
    assert torch.equal(fs.compile(program, dynamic=True)(x, places), program(x, places))


def repeated(x):
    return x[torch.arange(x.shape[0] * 3) % x.shape[0]]


def reflected(x):
    return x[(torch.arange(x.shape[0] + 3) - 3).abs()]


def from_the_end(x):
    return x[torch.arange(-1, -x.shape[0] - 1, -1)]


def turned(x):
    return x[torch.arange(x.shape[0] - 1, -1, -1)]


def beyond(x):
    return x[torch.arange(x.shape[0]) - 3]


@pytest.mark.parametrize("fn", [repeated, reflected, from_the_end, turned, beyond], ids=lambda fn: fn.__name__)
def test_an_index_known_to_be_inside_is_not_checked(fn, monkeypatch):
    programs = []
    monkeypatch.setattr(fuse_module, "split_axes", lambda program, woven: programs.append(program) or split_axes(program, woven))
    kept, fs.config.cache_dir = fs.config.cache_dir, ""
    try:
        x = torch.randn(8)
        torch.testing.assert_close(fs.compile(fn, fullgraph=True, dynamic=False)(x), fn(x))
    finally:
        fs.config.cache_dir = kept
    checked = any(expr.holds & CHECKING for program in programs for step in program.steps for expr in step.nest.exprs())
    assert checked is (fn is beyond)        # which counts from the end for a part of the points
