"""The maximum flow and the partitioners, on graphs written by hand: no tracing is needed to test them."""
import operator
import random

import pytest
import torch
from torch.fx import Graph, GraphModule

from firesteel.autograd import aot
from firesteel.autograd.maxflow import SINK, SOURCE, Network
from firesteel.autograd.partition import Roles, choose_saved, default_partition, min_cut_partition, saved_bytes
from firesteel.autograd.recompute import op_class

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


def test_a_result_that_the_backward_reads_is_saved_rather_than_its_input():
    """The caller holds both; from the result less is computed."""
    j = Joint()
    x, t = j.input("primals_0", 8, 8), j.input("tangents_0", 8, 8)
    y = j.op(aten._softmax.default, x, -1, False)
    gm = j.done(y, j.op(aten._softmax_backward_data.default, t, y, -1, torch.float32))
    fw, bw = check(gm, [torch.randn(8, 8)], [torch.randn(8, 8)], 1, min_cut_partition)
    assert targets(bw) == [aten._softmax_backward_data.default]


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


@pytest.mark.parametrize("partition", [default_partition, min_cut_partition])
def test_what_a_dead_result_was_computed_from_is_saved(partition):
    """Eager computed it in the forward: the program may overwrite the input before the backward runs."""
    j = Joint()
    x, t = j.input("primals_0", 4, 4), j.input("tangents_0", 4, 4)
    exp = j.op(aten.exp.default, x)
    x.meta["held"], exp.meta["phase"] = True, "forward"
    gm = j.done(j.op(aten.full.default, [4, 4], 0.0), j.op(aten.mul.Tensor, t, exp))
    _, bw = check(gm, matrices(1, 4), matrices(1, 4), 1, partition)
    assert names(bw) == ["exp", "tangents_0"]


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


def regions_with(between):
    """mm, sin, mm in each of two regions, `between` them one more sin where that is asked for."""
    j = Joint()
    x, w, t = j.input("primals_1", 8, 8), j.input("primals_2", 8, 8), j.input("tangents_1", 8, 8)
    forward = []        # (input, inner, result) of each region
    y = x
    for region in (1, 2):
        inner = j.op(aten.mm.default, y, w)
        edge = j.op(aten.mm.default, j.op(aten.sin.default, inner), w)
        for node in (inner, inner.next, edge):
            node.meta.update(recompute="must", region=region)
        forward.append((y, inner, edge))
        y = j.op(aten.sin.default, edge) if between or region == 2 else edge
    last = y
    g = t
    for number, (_, inner, edge) in reversed(list(enumerate(forward))):
        if between or number == 1:
            g = j.op(aten.mul.Tensor, g, j.op(aten.cos.default, edge))
        g = j.op(aten.mul.Tensor, j.op(aten.mm.default, g, j.op(aten.t.default, w)), j.op(aten.cos.default, inner))
        g = j.op(aten.mm.default, g, j.op(aten.t.default, w))
    node = last
    while (node := node.next).op != "root":
        node.meta["phase"] = "backward"
    return j.done(last, g, None)


@pytest.mark.parametrize("partition", [default_partition, min_cut_partition])
def test_a_region_is_recomputed_and_what_another_region_reads_is_saved(partition):
    fw, bw = check(regions_with(between=False), matrices(2), matrices(1), 1, partition)
    assert names(bw) == ["primals_1", "primals_2", "mm_1", "tangents_1"]
    assert targets(bw).count(aten.mm.default) == 7      # four of the gradients, `inner` of both regions, the last one of the second


@pytest.mark.parametrize("partition", [default_partition, min_cut_partition])
def test_what_a_region_reads_is_saved_where_it_was_computed_from_another_region(partition):
    fw, bw = check(regions_with(between=True), matrices(2), matrices(1), 1, partition)
    assert names(bw) == ["primals_1", "primals_2", "sin_1", "tangents_1"]     # `sin_1` lies between; to save less would run all regions at once
    assert targets(bw).count(aten.mm.default) == 8


def chain_of_products(wish):
    j = Joint()
    x, w, t = j.input("primals_1", 64, 64), j.input("primals_2", 64, 64), j.input("tangents_1", 64, 64)
    inner = j.op(aten.mm.default, x, w)
    y = j.op(aten.sin.default, inner)
    inner.meta.update(recompute=wish, region=1)
    y.meta.update(recompute="must", region=1)
    g = j.op(aten.mul.Tensor, t, j.op(aten.cos.default, inner))
    for node in (g.args[1], g):
        node.meta["phase"] = "backward"
    return j.done(y, j.op(aten.mm.default, g, j.op(aten.t.default, w)), None)


@pytest.mark.parametrize("wish, budget, saved", [("must", 1.0, False), ("prefer", 1.0, False), ("avoid", 1.0, True), ("never", 1.0, True),
                                                 ("avoid", 0.0, False), ("never", 0.0, True)])
def test_wishes_of_a_policy(wish, budget, saved):
    fw, bw = check(chain_of_products(wish), [torch.randn(64, 64) for _ in range(2)], [torch.randn(64, 64)], 1, min_cut_partition, memory_budget=budget)
    assert ("mm" in names(bw)) is saved and targets(bw).count(aten.mm.default) == 2 - saved


def test_a_small_value_is_saved_where_recomputation_is_preferred():
    j = Joint()
    x, t = j.input("primals_1", 64, 64), j.input("tangents_1")
    total = j.op(aten.sum.default, x)
    total.meta.update(recompute="prefer", region=1)
    y = j.op(aten.sin.default, total)
    g = j.op(aten.mul.Tensor, t, j.op(aten.cos.default, total))
    for node in (g.args[1], g):
        node.meta.update(phase="backward", recompute="must", region=1)
    fw, bw = check(j.done(y, j.op(aten.expand.default, g, [64, 64])), [torch.randn(64, 64)], [torch.randn(())], 1, min_cut_partition)
    assert names(bw) == ["sum_1", "tangents_1"]


@pytest.mark.parametrize("partition", [default_partition, min_cut_partition])
def test_a_draw_is_made_again_from_the_state_of_the_generator(partition):
    j = Joint()
    x, t = j.input("primals_1", 8, 8), j.input("tangents_1", 8, 8)
    earlier = j.op(aten.rand_like.default, x)
    mask = j.op(aten.bernoulli.p, j.op(aten.sin.default, x), 0.5)
    mask.meta.update(recompute="must", region=1)
    y = j.op(aten.add.Tensor, j.op(aten.mul.Tensor, x, mask), earlier)
    g = j.op(aten.mul.Tensor, t, mask)
    g.meta["phase"] = "backward"
    mask.meta["val"] = torch.empty(8, 8)        # a draw on the CPU
    fw, bw = partition(j.done(y, g), None, num_fwd_outputs=1)
    assert aten.bernoulli.p in targets(bw) and "bernoulli" not in names(bw)
    x = torch.full((8, 8), 5.0)
    out, *saved = fw(x)
    torch.rand(3)
    before = torch.get_rng_state()
    (gradient,) = bw(*saved, torch.ones(8, 8))
    assert torch.equal(torch.get_rng_state(), before)       # as if nothing had been drawn
    rest = out - x * gradient       # what was drawn earlier, in [0, 1)
    assert rest.min() >= 0 and rest.max() < 1 and 0 < gradient.sum() < 64


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


def two_regions(edge_of_first):
    """y = f2(f1(x)) of two checkpointed regions, with the gradient of each; `edge_of_first` ends the first one."""
    j = Joint()
    x, w, t = j.input("primals_1", 8, 8), j.input("primals_2", 8, 8), j.input("tangents_1", 8, 8)
    first = [j.op(aten.mm.default, x, w)]
    edge_of_first(j, first)
    second = [j.op(aten.mm.default, first[-1], w)]
    second.append(j.op(aten.sin.default, second[0]))
    for region, nodes in enumerate((first, second)):
        for node in nodes:
            node.meta.update(recompute="must", region=region)
    start = len(j.graph.nodes)
    g = j.op(aten.mm.default, j.op(aten.mul.Tensor, t, j.op(aten.cos.default, second[0])), j.op(aten.t.default, w))
    g = j.op(aten.mul.Tensor, g, j.op(aten.cos.default, first[0]))
    for node in list(j.graph.nodes)[start:]:
        node.meta["phase"] = "backward"
    return j.done(second[-1], j.op(aten.mm.default, g, j.op(aten.t.default, w)), None), first


@pytest.mark.parametrize("edge", [(aten.add.Tensor, 1.0), (aten.t.default,)])
def test_a_region_is_not_recomputed_from_the_region_before_it(edge):
    """What leaves a region is cheap to compute from values inside of it, but for those the whole region would run again, and those before it.
    Where a view leaves, its base is kept."""
    gm, first = two_regions(lambda j, nodes: nodes.append(j.op(edge[0], nodes[-1], *edge[1:])))
    fw, bw = check(gm, matrices(2), matrices(1), 1, min_cut_partition)
    kept = first[0] if edge[0] is aten.t.default else first[-1]
    assert names(bw) == ["primals_1", "primals_2", kept.name, "tangents_1"][kept is first[0]:]


def test_attention_without_dropout_is_not_random():
    graph = Graph()
    q = graph.placeholder("q")
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert op_class(graph.call_function(attention, (q, q, q))) == "heavy"
    assert op_class(graph.call_function(attention, (q, q, q, 0.0, True))) == "heavy"
    assert op_class(graph.call_function(attention, (q, q, q), {"dropout_p": 0.1})) == "random"
    assert op_class(graph.call_function(aten.bernoulli.p, (q, 0.0))) == "random"
