"""Fusion: what becomes one nest, how many sweeps it takes, and that the meaning stays."""
import random
import time
from textwrap import dedent

import interp
import pytest
import torch
import torch.nn.functional as F
from traced import check, fused, lowered, nests, run_watched, text

from firesteel.config import config
from firesteel.loops.fuse import fuse
from firesteel.loops.ir import Axis, Buffer, Extern, Nest, Phase, Program, Store, View, axis, load, masked
from firesteel.loops.scalars import S
from firesteel.loops.simplify import simplify
from firesteel.loops.verify import verify_program
from firesteel.sym.expr import const

X = torch.randn(12, 16)


def layer_norm(x, w, b):
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + 1e-5)
    return (x - mean) * scale * w + b, mean, scale


def sweeps(nest: Nest) -> int:
    return sum(bool(phase.axes) for phase in nest.phases)


# ---------------------------------------------------------------- golden text

def golden(program, want):
    assert text(program) == dedent(want).strip()


def test_a_chain_is_one_body():
    golden(check(lambda x: torch.relu(x * 2 + 1) - x, X), """
        nest sub [i0 < 12, i1 < 16]
          map []
            sub[i0, i1] = max(0.0, load(arg0_1, i0, i1) * 2.0 + 1.0) - load(arg0_1, i0, i1)
        return sub""")


def test_a_chain_goes_through_a_view_as_another_dtype():
    golden(check(lambda x: (x + 1).view(torch.int32) * 2, X), """
        nest mul [i0 < 12, i1 < 16]
          map []
            mul[i0, i1] = as_i32(load(arg0_1, i0, i1) + 1.0) * 2
        return mul""")


def test_a_chain_goes_into_a_reduction():
    golden(check(lambda x: (x.exp() * 2).sum(0), X), """
        nest sum_1 [i1 < 16]
          reduce [r0 < 12]
            a0 = sum(math.exp(load(arg0_1, r0, i1)) * 2.0)
          map []
            sum_1[i1] = acc(a0)
        return sum_1""")


def test_softmax_from_parts_is_three_sweeps():
    def softmax(x):
        e = (x - x.amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)
    golden(check(softmax, X), """
        nest div [i0 < 12]
          reduce [r1 < 16]
            a0 = max(load(arg0_1, i0, r1))
          reduce [r1_1 < 16]
            a1 = sum(math.exp(load(arg0_1, i0, r1_1) - acc(a0)))
            exp[i0, r1_1] = math.exp(load(arg0_1, i0, r1_1) - acc(a0))
          map [r1_2 < 16]
            div[i0, r1_2] = div(load(exp, i0, r1_2), acc(a1))
        return div""")


@pytest.mark.parametrize("rows, shape, count", [(4096, (16,), 2), (16, (16,), 1), (4096, (4096, 1), 1)], ids=["lanes", "few rows", "a row's start"])
def test_a_root_is_not_taken_in_every_lane(rows, shape, count):
    """It is where many rows read it side by side: at no row's start could it be computed once."""
    program = check(lambda x, v: x * torch.rsqrt(v + 1e-5), torch.randn(rows, 16), torch.rand(shape))
    assert len(nests(program)) == count


def test_an_expensive_prologue_is_computed_once_and_read_back():
    program = check(lambda x, w, b: layer_norm(F.gelu(x), w, b), X, torch.randn(16), torch.randn(16))
    nest, = nests(program)
    assert sweeps(nest) == 3 and text(program).count("erf") == 3      # one value, stored and summed twice
    assert "gelu" in program.buffers


def test_large_rows_for_nobody_else_are_computed_again():
    def softmax(x):
        e = (x - x.amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)
    program = fused(softmax, torch.randn(600, 700))
    assert {b.kind for b in program.buffers.values()} == {"input", "output"} and text(program).count("exp(") == 2


def test_row_results_stay_in_registers():
    program = check(lambda x, w, b: layer_norm(x, w, b)[0], X, torch.randn(16), torch.randn(16))
    assert len(nests(program)) == 1 and {b.kind for b in program.buffers.values()} == {"input", "output"}


# ---------------------------------------------------------------- groups

def test_independent_reductions_share_a_sweep():
    program = check(lambda x: (x.sum(1), x.amax(1), (x * x).sum(1)), X)
    nest, = nests(program)
    assert sweeps(nest) == 1 and len(nest.phases[0].reduces) == 3


def test_equal_reductions_are_made_once():
    def fn(x):
        return (x.exp() - x.exp().sum(1, keepdim=True)) / (x.sin() + x.exp().sum(1, keepdim=True))
    program = check(fn, X, tolerance=1e-3)
    assert text(program).count("sum(") == 1


def test_layer_norm_backward():
    def backward(g, x, mean, scale, w):
        xh, gw = (x - mean) * scale, g * w
        dx = (gw * 16 - gw.sum(-1, keepdim=True) - xh * (gw * xh).sum(-1, keepdim=True)) * (scale / 16)
        return dx, (g * xh).sum(0), g.sum(0)
    rows, columns = nests(check(backward, X, torch.randn(12, 16), torch.randn(12, 1), torch.rand(12, 1), torch.randn(16)))
    assert sweeps(rows) == 2 and sweeps(columns) == 1
    assert [a.extent for a in rows.axes] == [12] and [a.extent for a in columns.axes] == [16]


def test_batch_norm_is_one_nest():
    def batch_norm(x, w, b):
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
        return torch.relu((x - mean) * torch.rsqrt(variance + 1e-5) * w + b), mean * 0.1, variance * 0.1
    program = check(batch_norm, torch.randn(4, 8, 3, 5), torch.randn(1, 8, 1, 1), torch.randn(1, 8, 1, 1))
    nest, = nests(program)
    assert sweeps(nest) == 3 and [a.extent for a in nest.axes] == [8]


def test_rows_and_columns_stay_apart():
    rows, columns = nests(check(lambda x: ((x + 1).sum(0), (x + 1).sum(1)), X))
    assert len(rows.axes) == len(columns.axes) == 1 and rows.axes[0].extent != columns.axes[0].extent


@pytest.mark.usefixtures("library_products")
def test_a_value_with_many_readers_is_computed_once():
    program = check(lambda x: (x.exp(), x.exp() + 1), X)
    assert len(nests(program)) == 1
    program = check(lambda x: (lambda e: (e, e.sin(), e @ x.t()))(x.exp()), X)
    assert len(nests(program)) == 1 and text(program).count("exp(") == 2


@pytest.mark.usefixtures("library_products")
def test_not_across_a_library_call():
    """y depends on the product, which depends on e: e and y cannot be one nest."""
    def fn(x):
        e = x.exp()
        return (e @ e.t()).sum(1, keepdim=True) * e
    program = check(fn, X)
    assert [type(step) for step in program.steps] == [Nest, Extern, Nest]


@pytest.mark.usefixtures("library_products")
def test_paths_through_merged_groups_are_seen():
    """b joins a's group; then c, which a library call puts after b, must not."""
    def fn(x):
        a = x.exp()
        b = a.sum(1, keepdim=True) * a
        m = b @ x.t()
        return a, b, (m.sum(1, keepdim=True) + a).sin()
    program = check(fn, X)
    assert [type(step) for step in program.steps] == [Nest, Extern, Nest]


def test_full_reductions_do_not_take_parallel_work_along():
    big = torch.randn(200, 400)
    first, second = nests(check(lambda x: (x.exp(), x.exp().sum()), big, tolerance=1e-2))
    assert sorted([len(first.axes), len(second.axes)]) == [0, 2]


def test_axes_are_split_to_fit():
    x, w = torch.randn(3, 4, 16), torch.randn(16)
    nest, = nests(check(lambda x, w: torch.softmax(F.gelu(x.view(12, 16)).view(3, 4, 16), -1) * w, x, w))
    assert [a.extent for a in nest.axes] == [3, 4]
    nest, = nests(check(lambda x, w: torch.softmax(F.gelu(x).view(12, 16), -1) * w, x, w))
    assert [a.extent for a in nest.axes] == [3, 4]


def test_the_watching_interpreter_sees_other_rows():
    x, t, y = (Buffer(n, "f32", (4, 3), (3, 1), k) for n, k in (("x", "input"), ("t", "temp"), ("y", "output")))
    i, r, s = axis("i"), axis("r"), axis("s")

    def program(row):
        phases = (Phase("map", (Axis("r", 3),), stores=(Store("t", (i, r), load(x, (i, r))),)), Phase("map", (Axis("s", 3),), stores=(Store("y", (i, s), load(t, (row, s))),)))
        return Program({b.name: b for b in (x, t, y)}, (Nest("n", (Axis("i", 4),), phases),), ("x",), (View("y", (4, 3), (3, 1), 0, "f32"),), {})
    tx = torch.randn(4, 3)
    assert torch.equal(run_watched(program(i), [tx])[0], tx)
    with pytest.raises(AssertionError, match="of another row"):
        run_watched(program(S.sub(const(3), i)), [tx])


def test_other_rows_are_not_read_in_the_same_nest():
    """Read at its own row and, after a split that fits the first read, at another one."""
    x = torch.randn(12, 16, dtype=torch.float64)

    def fn(x):
        e = x.exp().sin()
        return e.view(3, 4, 16) + e.flip(0).view(3, 4, 16)
    assert len(nests(check(fn, x))) == 2
    assert len(nests(check(lambda x: (lambda e: e + e.flip(0))(x.exp().sin()), x))) == 2


def test_group_norm_is_one_nest():
    def group_norm(x, w, b):
        y = x.reshape(2, 4, -1)
        variance, mean = torch.var_mean(y, -1, correction=0, keepdim=True)
        return ((y - mean) * torch.rsqrt(variance + 1e-5)).reshape(x.shape) * w + b
    nest, = nests(check(group_norm, torch.randn(2, 8, 6, 6), torch.randn(8, 1, 1), torch.randn(8, 1, 1)))
    assert sweeps(nest) == 3 and [a.extent for a in nest.axes] == [2, 4]


@pytest.mark.usefixtures("library_products")
def test_biases_are_added_by_readers():
    w, b = torch.randn(5, 16), torch.randn(5)
    program = check(lambda x, w, b: torch.relu(F.linear(x, w, b)), X, w, b)
    assert "addmm" not in text(program).split(" = ")[1] and len(program.steps) == 2 and "load(arg2_1, i1)" in text(program)
    program = check(lambda x, w, b: F.linear(x, w, b), X, w, b)
    assert len(program.steps) == 1
    program = check(lambda x, w, b: F.linear(x, w, b) @ w, X, w, b)
    assert len(program.steps) == 2


def test_lstm_cell_is_one_nest():
    def cell(gates, c):
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    assert len(nests(check(cell, torch.randn(8, 64), torch.randn(8, 16)))) == 1


# ---------------------------------------------------------------- inlining

def test_masks_are_conjoined():
    program = check(lambda x: torch.cat([torch.relu(x), F.pad(x * 2, (1, 1))], 1) + 1, X)
    assert len(nests(program)) == 1 and " and " in text(program)


def test_what_may_fault_does_not_go_through_a_mask():
    """y[i] = (a[i-1] % b[i-1] if i >= 1 else 0): a masked b would be 0."""
    a, b, t = (Buffer(n, "i64", (4,), (1,), k) for n, k in (("a", "input"), ("b", "input"), ("t", "temp")))
    y, i = Buffer("y", "i64", (5,), (1,), "output"), axis("i")
    steps = (Nest("mod", (Axis("i", 4),), (Phase("map", stores=(Store("t", (i,), S.mod(load(a, (i,)), load(b, (i,)))),)),)),
             Nest("pad", (Axis("i", 5),), (Phase("map", stores=(Store("y", (i,), masked(t, (S.sub(i, 1),), S.ge(i, 1), const(0))),)),)))
    program = Program({x.name: x for x in (a, b, t, y)}, steps, ("a", "b"), (View("y", (5,), (1,), 0, "i64"),), {})
    new = fuse(simplify(program))
    assert len(new.steps) == 2
    assert interp.run(new, [torch.tensor([5, 6, 7, 8]), torch.tensor([2, 3, 4, 5])])[0].tolist() == [0, 1, 0, 3, 3]


def test_gathers_go_where_all_is_read():
    index = torch.randint(0, 12, (7,))
    assert len(nests(check(lambda i, w: F.embedding(i, w) * 2, index, X))) == 1
    assert len(nests(check(lambda i, w: F.embedding(i, w)[2:] * 2, index, X))) == 2


def test_what_nobody_reads_any_more_is_dropped():
    """Where indices were simplified, loads vanish: nothing of a column lies above the diagonal."""
    column = torch.randn(6, 1)
    for fn in (lambda x: x.softmax(0).triu(1), lambda x: (x.exp() / x.exp().sum(0)).triu(1) + x.sum(), lambda x: x.cumsum(0).softmax(0).triu(1)):
        program = check(fn, column)
        assert not any("softmax" in nest.name or "div" in nest.name for nest in nests(program)), text(program)


def test_checks_of_indices_stay_where_nobody_reads_the_result():
    index, rows = torch.tensor([0, 2]), torch.randn(3, 1)
    program = check(lambda i, w: F.embedding(i, w).softmax(0).triu(1), index, rows)
    assert "check_index" in text(program)
    with pytest.raises(IndexError):
        interp.run(program, [torch.tensor([0, 3]), rows])


def test_scans_take_their_prologue():
    assert len(nests(check(lambda x: (torch.relu(x) * 2).cumsum(1), X))) == 1


def test_loose_roundings_are_dropped_and_strict_ones_kept():
    half = X.to(torch.bfloat16)
    assert text(fused(lambda x: (x + 1) * 3, half)).count("to(") == 2       # widen, round once
    assert text(fused(lambda x: (x.float() + 1).to(torch.bfloat16).float() * 3, half)).count("to(") == 3
    with config.patch(eager_rounding=True):
        check(lambda x: (x + 1) * 3, half, tolerance=0)


def test_permuted_and_reshaped_readers():
    program = check(lambda x: (x * 2).t().reshape(4, 48) + 1, X)
    assert len(nests(program)) == 1


def test_a_buffer_written_twice_is_left_alone():
    x, t, y = (Buffer(n, "f32", (4,), (1,), k) for n, k in (("x", "input"), ("t", "temp"), ("y", "output")))
    i = (axis("i"),)

    def nest(name, store, extent=4):
        return Nest(name, (Axis("i", extent),), (Phase("map", stores=(store,)),))
    steps = (nest("a", Store("t", i, load(x, i))), nest("b", Store("t", (S.add(axis("i"), 2),), S.mul(load(x, i), 10.0)), 2), nest("c", Store("y", i, load(t, i))))
    program = Program({b.name: b for b in (x, t, y)}, steps, ("x",), (View("y", (4,), (1,), 0, "f32"),), {})
    tx = torch.arange(4.0)
    got, = interp.run(fuse(simplify(program)), [tx])
    assert got.tolist() == [0, 1, 0, 10] and len(fuse(simplify(program)).steps) == 3


def test_mutation_keeps_its_place():
    """A library call overwrites x between two readers of it."""
    x, y = Buffer("x", "f32", (4,), (1,), "input"), Buffer("y", "f32", (4,), (1,), "output")
    a, z = Buffer("a", "f32", (4,), (1,), "temp"), Buffer("z", "f32", (4,), (1,), "output")
    i = (axis("i"),)
    whole = View("x", (4,), (1,), 0, "f32")

    def nest(name, store):
        return Nest(name, (Axis("i", 4),), (Phase("map", stores=(store,)),))
    steps = (nest("n1", Store("a", i, S.mul(load(x, i), 2.0))), Extern("fill", (None,), torch.ops.aten.fill_.Scalar, (whole, 7.0), mutates=("x",)),
             nest("n2", Store("y", i, load(a, i))), nest("n3", Store("z", i, load(x, i))))
    program = Program({b.name: b for b in (x, y, a, z)}, steps, ("x",), (View("y", (4,), (1,), 0, "f32"), View("z", (4,), (1,), 0, "f32")), {})
    verify_program(program)
    got = interp.run(fuse(simplify(program)), [torch.arange(4.0)])
    assert got[0].tolist() == [0, 2, 4, 6] and got[1].tolist() == [7, 7, 7, 7]


# ---------------------------------------------------------------- the whole

def test_fuel_stops_fusing():
    def fn(x):
        return torch.softmax(torch.relu(x * 2 + 1), 1) + x.sum(1, keepdim=True)
    counts = []
    for fuel in (0, 1, 2, 3, -1):
        with config.patch(fusion_fuel=fuel):
            counts.append(len(check(fn, X).steps))
    assert counts == sorted(counts, reverse=True) and counts[0] == len(lowered(fn, X).steps) and counts[0] - counts[1] == 1


def test_repeatable():
    fn = lambda x, w, b: layer_norm(F.gelu(x), w, b)
    args = X, torch.randn(16), torch.randn(16)
    assert text(fused(fn, *args)) == text(fused(fn, *args))


def random_program(rng: random.Random):
    """A function of random pointwise operators, reductions, broadcasts, views and products on two inputs."""
    unary = [torch.relu, torch.sin, lambda v: v.exp().clamp(max=9.0), lambda v: v * 0.5, lambda v: v + 1, lambda v: v.t().contiguous().t(), lambda v: v.flip(1)]
    reduce = [lambda v: v.sum(1, keepdim=True) * 0.1, lambda v: v.amax(1, keepdim=True), lambda v: v.mean(0, keepdim=True), lambda v: v.sum() * 0.01]
    whole = [lambda v: torch.softmax(v, 1), lambda v: v @ v.t() @ v * 1e-3, lambda v: torch.cat([v[:, :6], v[:, 6:] * 2], 1), lambda v: v.cumsum(1) * 0.1]
    plan = [(rng.randrange(10), rng.random(), rng.random(), rng.random()) for _ in range(rng.randrange(4, 14))]
    returned = rng.randrange(1, 4)

    def fn(x, y):
        pool = [x, y]
        for kind, a, b, c in plan:
            left, right = pool[int(a * len(pool))], pool[int(b * len(pool))]
            if kind < 3:
                pool.append(unary[int(c * len(unary))](left))
            elif kind < 6:
                pool.append(reduce[int(c * len(reduce))](left) + right)
            elif kind < 8:
                pool.append(left * right * 0.5)
            else:
                pool.append(whole[int(c * len(whole))](left))
        return tuple(v.clone() for v in pool[-returned:])
    return fn


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_keep_their_meaning(seed):
    torch.manual_seed(seed)
    fn = random_program(random.Random(seed))
    inputs = torch.randn(9, 8, dtype=torch.float64), torch.randn(9, 8, dtype=torch.float64)
    program = lowered(fn, *inputs)
    new = fuse(simplify(program))
    verify_program(new)
    for got, want in zip(run_watched(new, inputs), interp.run(program, list(inputs)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)
    assert len(new.steps) <= len(program.steps)


def chain(count: int, readers: int) -> Program:
    """`count` nests; each reads the one before and one further back, every seventh is an output."""
    buffers = {"x": Buffer("x", "f32", (64, 64), (64, 1), "input")}
    steps, outputs, i = [], [], (axis("i"), axis("j"))
    names = ["x"]
    for n in range(count):
        kind = "output" if n % 7 == 6 or n == count - 1 else "temp"
        new = buffers[f"t{n}"] = Buffer(f"t{n}", "f32", (64, 64), (64, 1), kind)
        value = S.add(S.exp(load(buffers[names[-1]], i)), load(buffers[names[-min(len(names), readers)]], i))
        steps.append(Nest(f"n{n}", (Axis("i", 64), Axis("j", 64)), (Phase("map", stores=(Store(new.name, i, value),)),)))
        names.append(new.name)
        if kind == "output":
            outputs.append(View(new.name, (64, 64), (64, 1), 0, "f32"))
    return Program(buffers, tuple(steps), ("x",), tuple(outputs), {})


def test_draws_stay_in_order():
    """The two kernels around the second draw share an operand; fused, they would come before the first draw, and the second before them."""
    def draw(x):
        s = x.sigmoid()
        return torch.bernoulli(s), s * torch.rand(x.shape) + 1
    calls = [step.target for step in fused(draw, torch.randn(300, 300)).steps if isinstance(step, Extern)]
    assert calls == [torch.ops.aten.bernoulli.default, torch.ops.aten.rand.default]


def test_cost_is_nearly_linear():
    def seconds(count):
        program = chain(count, 3)
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            fuse(simplify(program))
            best = min(best, time.perf_counter() - start)
        return best
    small, large = seconds(100), seconds(1000)
    assert large < 25 * small + 0.05, (small, large)


def order(program):
    return [step.name for step in program.steps]


@pytest.mark.usefixtures("library_products")
def test_kernels_that_take_memory_do_not_overtake_library_calls():
    def f(x, y, w):
        return (x @ w).sum(), y.cos() @ w
    for size, early in ((16, True), (256, False)):
        names = order(fused(f, *(torch.randn(size, size) for _ in range(3))))
        assert (names.index("cos") < names.index("mm")) == early


def test_kernels_do_not_move_far_for_a_shared_read():
    """Their results would be held until they are needed."""
    def f(steps):
        def program(x, w):
            first, value = x.exp().sum(1), w
            for _ in range(steps):
                value = value @ w
            return first, value, x.cos().sum(1)
        return program
    inputs = torch.randn(64, 64), torch.randn(64, 64)
    assert len(nests(fused(f(2), *inputs))) == 1
    assert len(nests(fused(f(12), *inputs))) == 2
