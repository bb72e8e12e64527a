"""Normal form of nests: indices under the ranges of their axes, trivial axes, names, axes that are taken apart."""
import interp
import torch
from traced import check, text

from firesteel.loops.ir import Axis, Buffer, Nest, Phase, Program, Reduce, Store, View, acc, axis, check_index, load, masked
from firesteel.loops.scalars import S
from firesteel.loops.simplify import simplify, simplify_nest, split_nest
from firesteel.sym.expr import const, symbol

I, J, K = axis("i"), axis("j"), axis("k")


def f32(name, *shape, kind="input"):
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return Buffer(name, "f32", shape, tuple(reversed(strides)), kind)


def nest(axes, index, value, name="n"):
    return Nest(name, tuple(Axis(n, e) for n, e in axes), (Phase("map", stores=(Store("y", index, value),)),))


def value_of(n: Nest) -> str:
    return str(n.phases[0].stores[0].value)


def test_indices_are_simplified_under_ranges():
    x = f32("x", 4)
    flat = S.add(S.mul(I, 8), J)
    n = simplify_nest(nest([("i", 4), ("j", 8)], (I, J), load(x, (S.floordiv(flat, 8),))))
    assert value_of(n) == "load(x, i)"
    m = symbol("s0")
    n = simplify_nest(nest([("i", 4), ("j", m)], (I, J), load(f32("x", 4, m), ((I * m + J) // m, (I * m + J) % m))))
    assert value_of(n) == "load(x, i, j)"


def test_plain_nests_are_left_as_they_are():
    n = nest([("i", 4)], (I,), S.exp(load(f32("x", 4), (I,))))
    assert simplify_nest(n) is n


def test_axes_of_extent_one_vanish():
    n = simplify_nest(nest([("i", 4), ("j", 1)], (I, J), load(f32("x", 4, 1), (I, J))))
    assert [a.name for a in n.axes] == ["i"] and value_of(n) == "load(x, i, 0)" and str(n.phases[0].stores[0].index[1]) == "0"


def test_a_map_phase_alone_has_no_axes_of_its_own():
    n = Nest("n", (Axis("i", 4),), (Phase("map", (Axis("j", 5),), (), (Store("y", (I, J), load(f32("x", 4, 5), (I, J))),)),))
    assert [a.name for a in simplify_nest(n).axes] == ["i", "j"] and not simplify_nest(n).phases[0].axes


def test_known_masks_and_checks_disappear():
    x = f32("x", 8)
    n = simplify_nest(nest([("i", 8)], (I,), masked(x, (I,), S.lt(I, 8), const(0.0, "f32"))))
    assert value_of(n) == "load(x, i)"
    n = simplify_nest(nest([("i", 8)], (I,), masked(x, (I,), S.lt(I, 0), const(0.0, "f32"))))
    assert value_of(n) == "0.0"
    n = simplify_nest(nest([("i", 8)], (I,), load(x, (check_index(S.add(I, 0), 8),))))
    assert value_of(n) == "load(x, i)"
    n = simplify_nest(nest([("i", 8)], (I,), load(x, (check_index(S.add(I, 1), 8),))))
    assert "check_index" in value_of(n)


def test_integer_data_is_not_simplified():
    """Data may wrap: (x * 4) // 4 is not x."""
    x = Buffer("x", "i64", (8,), (1,), "input")
    data = S.floordiv(S.mul(load(x, (S.add(I, 0),)), 4), 4)
    n = simplify_nest(nest([("i", 8)], (I,), data))
    assert n.phases[0].stores[0].value.op == "floordiv"


def test_names_become_unique():
    y, z = f32("y", 4, kind="output"), f32("z", 4, kind="output")
    steps = (nest([("i", 4)], (I,), const(1.0, "f32"), "n"), Nest("n", (Axis("i", 4),), (Phase("map", stores=(Store("z", (I,), const(2.0, "f32")),)),)))
    program = Program({"y": y, "z": z}, steps, (), (), {})
    assert [s.name for s in simplify(program).steps] == ["n", "n_2"]


def test_axes_taken_apart_become_two():
    x = f32("x", 4, 128, 6)
    n = Nest("n", (Axis("j", 6),), (
        Phase("reduce", (Axis("i", 512),), (Reduce("a", "sum", load(x, (S.floordiv(I, 128), S.mod(I, 128), J)), "f32"),)),
        Phase("map", stores=(Store("y", (J,), acc(Reduce("a", "sum", const(0.0, "f32"), "f32"))),))))
    n = split_nest(n, {})
    assert [(a.name, a.extent) for a in n.phases[0].axes] == [("i", 4), ("i_r", 128)]
    assert str(n.phases[0].reduces[0].value) == "load(x, i, i_r, j)"


def test_masks_follow_the_split():
    x = f32("x", 8, 32)
    value = masked(x, (S.floordiv(J, 32), S.mod(J, 32)), S.le(J, 255), const(0.0, "f32"))
    n = split_nest(simplify_nest(nest([("j", 768)], (J,), value)), {})
    assert [a.extent for a in n.axes] == [24, 32] and value_of(n) == "masked(x, j <= 7, 0.0, j, j_r)"


def test_splits_in_symbolic_sizes():
    b, t = symbol("s0"), symbol("s1")
    n = split_nest(simplify_nest(nest([("i", b * t)], (I,), load(f32("x", b, t), (I // t, I % t)))), {})
    assert [str(a.extent) for a in n.axes] == ["s0", "s1"] and value_of(n) == "load(x, i, i_r)"


def test_split_programs_keep_their_meaning():
    program = check(lambda x: torch.cat([x.flip(1).reshape(3, 128), x.reshape(3, 128)], 1).sum(0), torch.randn(3, 8, 16))
    assert "//" not in text(program)
    program = check(lambda x: x.permute(2, 0, 1).reshape(15, 8) * 2, torch.randn(6, 4, 5))
    assert len(program.steps) == 1


def test_whole_programs_run_the_same():
    y = f32("y", 3, 4, kind="output")
    x = f32("x", 12)
    flat = S.add(S.mul(I, 4), J)
    program = Program({"x": x, "y": y}, (nest([("i", 3), ("j", 4)], (I, J), load(x, (S.mod(S.add(flat, 5), 12),))),), ("x",), (View("y", (3, 4), (4, 1), 0, "f32"),), {})
    tx = torch.randn(12)
    assert torch.equal(interp.run(simplify(program), [tx])[0], interp.run(program, [tx])[0])
