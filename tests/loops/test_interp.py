"""The reference interpreter, on programs written by hand."""
import pytest
import torch
from interp import run, run_plan

from firesteel.loops.ir import Axis, Buffer, Extern, Nest, Phase, Program, Reduce, Store, View, acc, check_index, load, masked
from firesteel.loops.plan import plan
from firesteel.loops.scalars import S, literal, to
from firesteel.sym.expr import const, lt, symbol

aten = torch.ops.aten


def program(buffers, *steps, inputs=("x",), outputs=None, symbols=None):
    made = {b.name: b for b in buffers}
    views = tuple(View(b.name, b.shape, b.strides, 0, b.dtype) for b in buffers if b.kind == "output") if outputs is None else outputs
    return Program(made, steps, inputs, views, symbols or {})


def row_softmax(n, m):
    """The example of loops/ir.py."""
    x, y = Buffer("x", "f32", (n, m), (m, 1), "input"), Buffer("y", "f32", (n, m), (m, 1), "output")
    i, r, s, t = Axis("i", n), Axis("r", m), Axis("s", m), Axis("t", m)
    top = Reduce("m0", "max", load(x, (i.value, r.value)), "f32")
    total = Reduce("s0", "sum", S.exp(S.sub(load(x, (i.value, s.value)), acc(top))), "f32")
    value = S.div(S.exp(S.sub(load(x, (i.value, t.value)), acc(top))), acc(total))
    return (x, y), Nest("softmax", (i,), (Phase("reduce", (r,), (top,)), Phase("reduce", (s,), (total,)),
                                         Phase("map", (t,), (), (Store("y", (i.value, t.value), value),))))


def test_phases():
    buffers, nest = row_softmax(4, 5)
    x = torch.randn(4, 5)
    torch.testing.assert_close(run(program(buffers, nest), [x])[0], x.softmax(1))


def test_symbols_are_read_from_inputs():
    n, m = symbol("s0"), symbol("s1")
    buffers, nest = row_softmax(n, m)
    made = program(buffers, nest, symbols={"s0": (0, "shape", 0), "s1": (0, "shape", 1)})
    for shape in ((4, 5), (2, 9), (1, 1)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(made, [x])[0], x.softmax(1))
        torch.testing.assert_close(run_plan(plan(made), [x])[0], x.softmax(1))


def test_a_scan_sees_the_running_value():
    x, y = Buffer("x", "i64", (6,), (1,), "input"), Buffer("y", "i64", (6,), (1,), "output")
    r = Axis("r", 6)
    total = Reduce("a", "sum", load(x, (r.value,)), "i64")
    nest = Nest("scan", (), (Phase("scan", (r,), (total,), (Store("y", (r.value,), acc(total)),)),))
    assert run(program((x, y), nest), [torch.arange(6)])[0].tolist() == [0, 1, 3, 6, 10, 15]


def test_an_empty_reduction_gives_the_identity():
    x, y = Buffer("x", "f32", (3, 0), (1, 1), "input"), Buffer("y", "f32", (3,), (1,), "output")
    i, r = Axis("i", 3), Axis("r", 0)
    for op, expected in (("sum", 0.0), ("prod", 1.0), ("max", -torch.inf), ("min", torch.inf)):
        total = Reduce("a", op, load(x, (i.value, r.value)), "f32")
        nest = Nest("empty", (i,), (Phase("reduce", (r,), (total,)), Phase("map", (), (), (Store("y", (i.value,), acc(total)),))))
        assert run(program((x, y), nest), [torch.empty(3, 0)])[0].tolist() == [expected] * 3


def test_masked_loads_do_not_touch_memory():
    x, y = Buffer("x", "f32", (3,), (1,), "input"), Buffer("y", "f32", (5,), (1,), "output")
    i = Axis("i", 5)
    value = masked(x, (i.value,), lt(i.value, 3), literal(7.0, "f32"))
    nest = Nest("pad", (i,), (Phase("map", (), (), (Store("y", (i.value,), value),)),))
    assert run(program((x, y), nest), [torch.arange(3.0)])[0].tolist() == [0, 1, 2, 7, 7]
    outside = masked(x, (i.value,), lt(i.value, 4), literal(7.0, "f32"))
    with pytest.raises(AssertionError, match="leaves the buffer"):
        run(program((x, y), Nest("bad", (i,), (Phase("map", (), (), (Store("y", (i.value,), outside),)),))), [torch.arange(3.0)])


def test_a_load_outside_is_found():
    x, y = Buffer("x", "f32", (3,), (1,), "input"), Buffer("y", "f32", (5,), (1,), "output")
    i = Axis("i", 5)
    nest = Nest("bad", (i,), (Phase("map", (), (), (Store("y", (i.value,), load(x, (i.value,))),)),))
    with pytest.raises(AssertionError, match="leaves its buffer"):
        run(program((x, y), nest), [torch.arange(3.0)])


def test_an_element_set_twice_is_found():
    x, y = Buffer("x", "f32", (4,), (1,), "input"), Buffer("y", "f32", (4,), (1,), "output")
    i = Axis("i", 4)
    nest = Nest("bad", (i,), (Phase("map", (), (), (Store("y", (i.value // 2,), load(x, (i.value,))),)),))
    with pytest.raises(AssertionError, match="sets an element of y twice"):
        run(program((x, y), nest), [torch.arange(4.0)])


def test_adding_collides_rightly():
    x, k, y = Buffer("x", "f32", (6,), (1,), "input"), Buffer("k", "i64", (6,), (1,), "input"), Buffer("y", "f32", (3,), (1,), "output")
    i, j = Axis("i", 6), Axis("j", 3)
    zero = Nest("zero", (j,), (Phase("map", (), (), (Store("y", (j.value,), literal(0, "f32")),)),))
    add = Nest("add", (i,), (Phase("map", (), (), (Store("y", (check_index(load(k, (i.value,)), 3),), load(x, (i.value,)), "add"),)),))
    made = program((x, k, y), zero, add, inputs=("x", "k"))
    assert run(made, [torch.arange(6.0), torch.tensor([0, 1, -1, 0, 1, 2])])[0].tolist() == [3, 5, 7]
    with pytest.raises(IndexError):
        run(made, [torch.arange(6.0), torch.tensor([0, 1, 3, 0, 1, 2])])


def test_strict_checks_refuse_negative_indices():
    k, y = Buffer("k", "i64", (1,), (1,), "input"), Buffer("y", "i64", (1,), (1,), "output")
    value = check_index(load(k, (const(0),)), 3, strict=True)
    made = program((k, y), Nest("strict", (), (Phase("map", (), (), (Store("y", (const(0),), value),)),)), inputs=("k",))
    assert run(made, [torch.tensor([2])])[0].tolist() == [2]
    with pytest.raises(IndexError):
        run(made, [torch.tensor([-1])])


def test_library_calls_see_strided_windows():
    x, y = Buffer("x", "f32", (4, 6), (6, 1), "input", offset=2), Buffer("y", "f32", (3, 3), (3, 1), "output")
    window, turned = View("x", (3, 4), (1, 6), 3, "f32"), View("x", (4, 3), (6, 1), 3, "f32")
    call = Extern("mm", ("y",), aten.mm.out, (window, turned), out=True)
    base = torch.randn(2 + 24)
    x_value = base[2:].view(4, 6)
    inner = x_value[:, 1:4]
    torch.testing.assert_close(run(program((x, y), call), [x_value])[0], inner.t() @ inner)


def test_results_of_calls_get_the_promised_layout():
    x, y = Buffer("x", "f32", (2, 3), (3, 1), "input"), Buffer("y", "f32", (2, 3), (1, 2), "output")
    call = Extern("neg", ("y",), aten.neg.default, (View("x", (2, 3), (3, 1), 0, "f32"),))
    value = torch.randn(2, 3)
    result = run(program((x, y), call), [value])[0]
    assert result.stride() == (1, 2) and torch.equal(result, -value)


def test_bf16_is_rounded_where_it_is_stored():
    x, y = Buffer("x", "bf16", (9,), (1,), "input"), Buffer("y", "bf16", (9,), (1,), "output")
    i = Axis("i", 9)
    value = to(S.mul(S.exp(to(load(x, (i.value,)), "f32")), 3), "bf16")
    value_in = torch.randn(9, dtype=torch.bfloat16)
    nest = Nest("round", (i,), (Phase("map", (), (), (Store("y", (i.value,), value),)),))
    assert torch.equal(run(program((x, y), nest), [value_in])[0], (value_in.float().exp() * 3).bfloat16())


def test_a_plan_that_frees_too_early_is_found_out():
    """Freed memory is overwritten at once."""
    x = Buffer("x", "f32", (4,), (1,), "input")
    t, y = Buffer("t", "f32", (4,), (1,)), Buffer("y", "f32", (4,), (1,), "output")
    i = Axis("i", 4)
    one = Nest("one", (i,), (Phase("map", (), (), (Store("t", (i.value,), S.add(load(x, (i.value,)), 1)),)),))
    two = Nest("two", (i,), (Phase("map", (), (), (Store("y", (i.value,), S.mul(load(t, (i.value,)), 2)),)),))
    made = plan(program((x, t, y), one, two))
    value = torch.arange(4.0)
    assert torch.equal(run_plan(made, [value])[0], (value + 1) * 2)
    steps = list(made.steps)
    free = next(s for s in steps if str(s) == "free t")
    steps.remove(free)
    steps.insert(next(n for n, s in enumerate(steps) if str(s) == "run two"), free)
    broken = type(made)(made.program, tuple(steps), made.arena)
    assert not torch.equal(run_plan(broken, [value])[0], (value + 1) * 2)
