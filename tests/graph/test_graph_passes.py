"""Passes keep the meaning and remove what they promise; the verifier finds what is wrong."""
import operator

import pytest
import torch
import torch.nn.functional as F
from tracing import trace

from firesteel.config import config
from firesteel.errors import InternalError
from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.passes import clean, fold_constants, merge_equal, remove_dead, remove_noops
from firesteel.graph.verify import verify

aten = torch.ops.aten


def traced(fn, *tensors):
    world = AbstractWorld()
    return trace(fn, [world.wrap(t, "x", None) for t in tensors]).gm


def targets(gm):
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


X = torch.arange(24.0).view(4, 6)


def test_dead_nodes_go():
    gm = traced(lambda a: [(a + 1, a.sin().cos())[0]], X)
    assert remove_dead(gm.graph) == 2 and targets(gm) == [aten.add.Tensor]


def test_draws_of_random_numbers_stay():
    gm = traced(lambda a: [(a + 1, torch.rand(3))[0]], X)
    assert remove_dead(gm.graph) == 0
    with config.patch(eager_rng=False):
        assert remove_dead(gm.graph) == 1


def test_equal_nodes_become_one_but_draws_do_not():
    gm = traced(lambda a: [a.sin() + a.sin(), F.dropout(a, 0.5) + F.dropout(a, 0.5)], X)
    merge_equal(gm.graph)
    assert targets(gm).count(aten.sin.default) == 1 and targets(gm).count(aten.bernoulli.p) == 2


def test_numbers_of_other_types_are_other_arguments():
    gm = traced(lambda a: [a * 1, a * 1.0, a * True], torch.arange(3))
    assert merge_equal(gm.graph) == 0


def test_views_of_two_tensors_stay_views_of_two():
    gm = traced(lambda a: [(a + 1).view(24), a + 1, (a + 1).t()], X)
    clean(gm)
    assert len({out.data_ptr() for out in gm(X)}) == 3


def test_two_outputs_stay_two_tensors():
    gm = traced(lambda a: [a + 1, a + 1, (a + 1) * 2], X)
    clean(gm)
    first, second, third = gm(X)
    assert first.data_ptr() != second.data_ptr() and torch.equal(third, second * 2)


def test_views_that_show_the_same_go():
    gm = traced(lambda a: [a.t().t() * 1, a.view(4, 6).expand(4, 6).permute(0, 1)[:] * 2, a.transpose(0, 1).transpose(1, 0) * 3], X)
    remove_noops(gm.graph)
    remove_dead(gm.graph)
    assert set(targets(gm)) == {aten.mul.Tensor}


def test_views_that_show_something_else_stay():
    gm = traced(lambda a: [a.permute(1, 0) * 1, a[1:] * 2, a.view(6, 4) * 3, a.t() * 4], X)
    before = len(gm.graph.nodes)
    assert remove_noops(gm.graph) == 0 and len(gm.graph.nodes) == before


def test_reading_back_what_was_written():
    def fn(a):
        b = a * 2
        b[1].add_(1)
        return [b, b[1] * 3]
    gm = traced(fn, X)
    clean(gm)
    assert targets(gm).count(aten.select.int) == 1
    for got, want in zip(gm(X), fn(X)):
        assert torch.equal(got, want)


def test_views_of_what_was_read_back_begin_where_it_begins():
    """x[1:] lies behind the start of its storage, the value written through it does not."""
    def write(a, strided=False):
        rest = a[1:]
        column = rest[:, 1]
        column.mul_(2)
        column[0] = 5.0
        return [rest, column, rest.as_strided((2,), (1,), 7)] if strided else [rest, column]
    for strided in (False, True):
        gm = traced(lambda a, strided=strided: write(a * 1, strided), X)
        clean(gm)
        verify(gm, "aten")
        assert all(map(torch.equal, gm(X), write(X.clone(), strided)))


def test_literals_become_numbers_in_the_graph():
    gm = traced(lambda a: [a * torch.tensor(2.5), a + torch.tensor(3)], X)
    assert fold_constants(gm.graph) == 2
    remove_dead(gm.graph)
    assert not [n for n in gm.graph.nodes if n.op == "get_attr"]
    assert torch.equal(gm(X)[0], X * 2.5)


def test_cleaning_twice_changes_nothing():
    gm = traced(lambda a: [F.gelu(a.t()).t().sum(0), F.softmax(a, 1)], X)
    clean(gm)
    assert clean(gm) == 0


# ---------------------------------------------------------------- the verifier

def good():
    return traced(lambda a: [a.sin() + 1, a.split(2)[1]], X)


def test_a_good_graph_passes_every_level():
    for level in ("torch", "aten", "joint"):
        verify(good(), level)


def _written(gm):
    node = next(n for n in gm.graph.nodes if n.target is aten.sin.default)
    with gm.graph.inserting_after(node):
        gm.graph.call_function(aten.sin_.default, (node,)).meta.update(val=node.meta["val"], phase="forward")


def _method(gm):
    node = next(n for n in gm.graph.nodes if n.target is aten.sin.default)
    with gm.graph.inserting_after(node):
        gm.graph.call_method("sin", (node,)).meta.update(val=node.meta["val"], phase="forward")


def _wrong_spec(gm):
    node = next(n for n in gm.graph.nodes if n.target is aten.sin.default)
    node.meta["val"] = node.meta["val"].world.make(node.meta["val"].spec.to(torch.float64))


def _no_value(gm):
    del next(n for n in gm.graph.nodes if n.target is aten.sin.default).meta["val"]


def _python_function(gm):
    node = next(n for n in gm.graph.nodes if n.target is aten.sin.default)
    node.target = torch.sin


def _nested_output(gm):
    output = next(iter(reversed(gm.graph.nodes)))
    output.args = (([output.args[0][0]],),)


def _phases(gm):
    next(n for n in gm.graph.nodes if n.target is aten.sin.default).meta["phase"] = "backward"


@pytest.mark.parametrize("spoil, text", [
    (_written, "writes"), (_method, "only function calls"), (_wrong_spec, "its rule says"), (_no_value, "meta"),
    (_python_function, "neither an operator"), (_nested_output, "flat"), (_phases, "forward reads")], ids=lambda v: getattr(v, "__name__", ""))
def test_the_verifier_finds(spoil, text):
    gm = good()
    spoil(gm)
    with pytest.raises(InternalError, match=text):
        verify(gm, "joint")


def test_getitem_of_a_list_is_allowed():
    assert operator.getitem in targets(good())
