"""The maximum flow and the partitioners, on graphs written by hand: no tracing is needed to test them."""
import operator
import random

import pytest
import torch
from torch.fx import Graph, GraphModule

from firesteel.autograd import aot
from firesteel.autograd.maxflow import SINK, SOURCE, Network
from firesteel.autograd.partition import Roles, choose_saved, default_partition, min_cut_partition, saved_bytes

aten = torch.ops.aten


class Joint:
    """Builds a joint graph; values of nodes are found by running them on meta tensors."""

    def __init__(self):
        self.graph = Graph()

    def input(self, name, *shape, dtype=torch.float32):
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def op(self, target, *args, **kwargs):
        node = self.graph.create_node("call_function", target, args, kwargs, name=target.__name__.split(".")[0])
        value = lambda a: a.meta["val"] if isinstance(a, torch.fx.Node) else a
        node.meta["val"] = target(*torch.fx.node.map_arg(args, value), **torch.fx.node.map_arg(kwargs, value))
        return node

    def done(self, *results):
        self.graph.output(results)
        return GraphModule({}, self.graph)


def names(gm):
    return [n.name for n in gm.graph.nodes if n.op == "placeholder"]


def targets(gm):
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def run_both(fw, bw, primals, tangents, num_fwd_outputs):
    results = fw(*primals)
    return list(results[:num_fwd_outputs]), list(bw(*results[num_fwd_outputs:], *tangents))


def check(gm, primals, tangents, num_fwd_outputs, partition, **options):
    expected = list(gm(*primals, *tangents))
    fw, bw = partition(gm, [primals, tangents], num_fwd_outputs=num_fwd_outputs, **options)
    outputs, gradients = run_both(fw, bw, primals, tangents, num_fwd_outputs)
    for got, want in zip(outputs + gradients, expected):
        assert (got is None and want is None) or torch.equal(got, want)
    return fw, bw


def sin_sin_mm():
    """y = sin(sin(x)) @ w, with its gradients."""
    j = Joint()
    x, w, t = j.input("primals_1", 8, 8), j.input("primals_2", 8, 8), j.input("tangents_1", 8, 8)
    a = j.op(aten.sin.default, x)
    b = j.op(aten.sin.default, a)
    y = j.op(aten.mm.default, b, w)
    gw = j.op(aten.mm.default, j.op(aten.t.default, b), t)
    gb = j.op(aten.mm.default, t, j.op(aten.t.default, w))
    ga = j.op(aten.mul.Tensor, gb, j.op(aten.cos.default, a))
    gx = j.op(aten.mul.Tensor, ga, j.op(aten.cos.default, x))
    return j.done(y, gx, gw)


def matrices(n, size=8):
    torch.manual_seed(0)
    return [torch.randn(size, size) for _ in range(n)]


def test_default_saves_what_the_backward_reads():
    fw, bw = check(sin_sin_mm(), matrices(2), matrices(1), 1, default_partition)
    assert names(bw) == ["primals_1", "primals_2", "sin", "sin_1", "tangents_1"]
    assert aten.sin.default not in targets(bw)


def test_min_cut_recomputes_the_chain_from_the_input():
    fw, bw = check(sin_sin_mm(), matrices(2), matrices(1), 1, min_cut_partition)
    assert names(bw) == ["primals_1", "primals_2", "tangents_1"]
    assert targets(bw).count(aten.sin.default) == 2
    assert aten.mm.default in targets(fw) and targets(bw).count(aten.mm.default) == 2


def test_heavy_results_are_saved_not_recomputed():
    j = Joint()
    x, w, t = j.input("primals_1", 8, 8), j.input("primals_2", 8, 8), j.input("tangents_1", 8, 8)
    m = j.op(aten.mm.default, x, w)
    y = j.op(aten.sin.default, m)
    gm_ = j.op(aten.mul.Tensor, t, j.op(aten.cos.default, m))
    gm = j.done(y, j.op(aten.mm.default, gm_, j.op(aten.t.default, w)), None)
    fw, bw = check(gm, matrices(2), matrices(1), 1, min_cut_partition)
    assert names(bw) == ["primals_2", "mm", "tangents_1"]


def test_a_small_budget_runs_heavy_operators_again():
    j = Joint()
    x, w, t = j.input("primals_1", 8, 8), j.input("primals_2", 8, 8), j.input("tangents_1", 8, 8)
    value = x
    saved = []
    for _ in range(4):
        m = j.op(aten.mm.default, value, w)
        saved.append(m)
        value = j.op(aten.sin.default, m)
    g = t
    for m in reversed(saved):
        g = j.op(aten.mm.default, j.op(aten.mul.Tensor, g, j.op(aten.cos.default, m)), j.op(aten.t.default, w))
    gm = j.done(value, g, None)
    full = saved_bytes(choose_saved(Roles.of(gm, 1)))
    assert full == 4 * 256
    for budget, most in ((1.0, 4), (0.5, 2), (0.0, 0)):
        fw, bw = check(gm, matrices(2), matrices(1), 1, min_cut_partition, memory_budget=budget)
        assert sum(name.startswith("mm") for name in names(bw)) <= most


def test_random_operators_run_once():
    j = Joint()
    x, t = j.input("primals_1", 8, 8), j.input("tangents_1", 8, 8)
    mask = j.op(aten.bernoulli.default, x)
    y = j.op(aten.mul.Tensor, x, mask)
    gm = j.done(y, j.op(aten.mul.Tensor, t, mask))
    fw, bw = min_cut_partition(gm, None, num_fwd_outputs=1)
    assert names(bw) == ["bernoulli", "tangents_1"] and aten.bernoulli.default not in targets(bw)


def test_views_are_not_saved():
    j = Joint()
    x, t = j.input("primals_1", 8, 8), j.input("tangents_1", 64)
    m = j.op(aten.mm.default, x, x)
    v = j.op(aten.view.default, m, [64])
    y = j.op(aten.sin.default, v)
    g = j.op(aten.mul.Tensor, t, j.op(aten.cos.default, v))
    gm = j.done(y, j.op(aten.view.default, g, [8, 8]))
    fw, bw = check(gm, matrices(1), [torch.ones(64)], 1, min_cut_partition)
    assert names(bw) == ["mm", "tangents_1"]


def test_items_of_a_tuple_are_saved_one_by_one():
    j = Joint()
    x, t = j.input("primals_1", 8, 8), j.input("tangents_1", 8, 2)
    both = j.op(aten.topk.default, x, 2)
    values = j.op(operator.getitem, both, 0)
    places = j.op(operator.getitem, both, 1)
    g = j.op(aten.scatter.src, j.op(aten.full.default, [8, 8], 0.0), 1, places, t)
    gm = j.done(values, g)
    for partition in (default_partition, min_cut_partition):
        fw, bw = check(gm, matrices(1), [torch.ones(8, 2)], 1, partition)
        assert names(bw) == ["getitem_1", "tangents_1"]


def test_small_results_of_reductions_are_kept():
    j = Joint()
    x, t = j.input("primals_1", 8, 64), j.input("tangents_1", 8, 1)
    m = j.op(aten.mm.default, x, j.input("primals_2", 64, 64))
    s = j.op(aten.sum.dim_IntList, m, [1], True)
    y = j.op(aten.sin.default, s)
    gm = j.done(y, j.op(aten.mul.Tensor, t, j.op(aten.cos.default, s)), None)
    fw, bw = min_cut_partition(gm, None, num_fwd_outputs=1)
    assert names(bw) == ["sum_1", "tangents_1"]


def test_an_overwritten_input_is_copied_before_it_is_saved():
    j = Joint()
    x, t = j.input("primals_1", 8, 8), j.input("tangents_1", 8, 8)
    x.meta["mutated"] = True
    y = j.op(aten.sin.default, x)
    gm = j.done(j.op(aten.add.Tensor, x, 1), y, j.op(aten.mul.Tensor, t, j.op(aten.cos.default, x)))
    for partition in (default_partition, min_cut_partition):
        fw, bw = check(gm, matrices(1), matrices(1), 2, partition)
        assert aten.clone.default in targets(fw)


def test_what_only_the_backward_needs_is_computed_there():
    j = Joint()
    x, t = j.input("primals_1", 8, 8), j.input("tangents_1", 8, 8)
    y = j.op(aten.sin.default, x)
    heavy = j.op(aten.mm.default, x, x)
    gm = j.done(y, j.op(aten.mul.Tensor, t, heavy))
    for partition in (default_partition, min_cut_partition):
        fw, bw = check(gm, matrices(1), matrices(1), 1, partition)
        assert aten.mm.default not in targets(fw) and names(bw) == ["primals_1", "tangents_1"]


def test_checkpointed_values_are_recomputed_and_marked_ones_saved():
    gm = sin_sin_mm()
    for node in gm.graph.nodes:
        if node.name in ("sin", "sin_1"):
            node.meta["recompute"] = "never"
    fw, bw = check(gm, matrices(2), matrices(1), 1, min_cut_partition)
    assert "sin" in names(bw) and "sin_1" in names(bw)


def test_gradient_that_is_an_input_or_none():
    for partition in (default_partition, min_cut_partition):
        j = Joint()
        x, t = j.input("primals_1", 8, 8), j.input("tangents_1", 8, 8)
        gm = j.done(j.op(aten.add.Tensor, x, 1), t, x, None)
        check(gm, matrices(1), matrices(1), 1, partition)


def brute_force_cut(n, edges):
    best = None
    for bits in range(1 << (n - 2)):
        side = [True, False] + [bool(bits >> i & 1) for i in range(n - 2)]
        value = sum(c for a, b, c in edges if side[a] and not side[b])
        best = value if best is None else min(best, value)
    return best


@pytest.mark.parametrize("seed", range(25))
def test_flow_finds_the_minimum_cut(seed):
    rng = random.Random(seed)
    n = 7
    edges = [(a, b, rng.randint(1, 9)) for a in range(n) for b in range(n) if a != b and b != SOURCE and a != SINK and rng.random() < 0.4]
    net = Network()
    for _ in range(n - 2):
        net.vertex()
    for a, b, c in edges:
        net.edge(a, b, c)
    side = net.sink_side()
    assert SOURCE not in side
    assert sum(c for a, b, c in edges if a not in side and b in side) == brute_force_cut(n, edges)


def test_flow_on_a_long_chain_does_not_recurse():
    net = Network()
    before = SOURCE
    for _ in range(5000):
        v = net.vertex()
        net.edge(before, v, 5)
        before = v
    net.edge(before, SINK, 4)
    assert net.sink_side() == {SINK}


@pytest.mark.parametrize("partition", [default_partition, min_cut_partition])
def test_a_checkpointed_region_is_recomputed_but_what_leaves_it_is_saved(partition):
    j = Joint()
    x, w, t = j.input("primals_1", 8, 8), j.input("primals_2", 8, 8), j.input("tangents_1", 8, 8)
    inner = j.op(aten.mm.default, x, w)
    middle = j.op(aten.sin.default, inner)
    edge = j.op(aten.mm.default, middle, w)
    for node in (inner, middle, edge):
        node.meta.update(recompute="must", region=1)
    y = j.op(aten.sin.default, edge)
    g = j.op(aten.mul.Tensor, t, j.op(aten.cos.default, edge))
    g = j.op(aten.mul.Tensor, j.op(aten.mm.default, g, j.op(aten.t.default, w)), j.op(aten.cos.default, inner))
    for node in list(j.graph.nodes)[list(j.graph.nodes).index(y) + 1:]:
        node.meta["phase"] = "backward"
    gm = j.done(y, j.op(aten.mm.default, g, j.op(aten.t.default, w)), None)
    fw, bw = check(gm, matrices(2), matrices(1), 1, partition)
    assert names(bw) == ["primals_1", "primals_2", "mm_1", "tangents_1"]
    assert targets(bw).count(aten.mm.default) == 3      # one of them computes `inner` again


@pytest.mark.parametrize("partition", [default_partition, min_cut_partition])
def test_saved_view_of_a_written_input_is_copied(partition):
    def f(x):
        row = x[:, 1]
        row.sin_()
        return row * 2

    def gradient(fn):
        leaf = torch.arange(6.0).view(2, 3).requires_grad_()
        fn(leaf * 1.0).sum().backward()
        return leaf.grad
    torch.testing.assert_close(gradient(aot.function(f, aot.nop, partition_fn=partition)), gradient(f))
