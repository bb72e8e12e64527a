"""The verifier refuses each kind of broken program, and names the rule."""
from dataclasses import replace

import pytest

from firesteel.errors import InternalError
from firesteel.loops.ir import Axis, Buffer, Extern, Nest, Phase, Program, Reduce, Store, View, acc, check_index, load, masked
from firesteel.loops.scalars import S, literal, to
from firesteel.loops.verify import verify_nest, verify_program
from firesteel.sym.expr import const, make, symbol

I, R = Axis("i0", 4), Axis("r0", 5)
X = Buffer("x", "f32", (4, 5), (5, 1), "input")
N = Buffer("n", "i64", (4,), (1,), "input")
Y = Buffer("y", "f32", (4,), (1,))
C = Buffer("c", "f32", (4, 5), (5, 1), "constant")
BUFFERS = {b.name: b for b in (X, N, Y, C)}
VALUE = load(X, (I.value, R.value))
SUM = Reduce("a0", "sum", VALUE, "f32")
REDUCE = Phase("reduce", (R,), (SUM,))
STORE = Store("y", (I.value,), acc(SUM))
LAST = Phase("map", (), (), (STORE,))
NEST = Nest("rows", (I,), (REDUCE, LAST))
PROGRAM = Program(BUFFERS, (NEST,), ("x", "n"), (View("y", (4,), (1,), 0, "f32"),), {})


def stored(value, index=(I.value,), mode="set", axes=(I,)):
    return Nest("bad", axes, (Phase("map", (), (), (Store("y", index, value, mode),)),))


def test_a_right_program_passes():
    verify_program(PROGRAM)
    assert verify_nest(NEST, BUFFERS) == {"y"}


FIRST = load(X, (I.value, const(0)))
BROKEN_NESTS = {
    "a nest has a phase": Nest("bad", (I,), ()),
    "axis names are unique": Nest("bad", (I,), (Phase("reduce", (I,), (SUM,)), LAST)),
    "a phase is map, reduce or scan": Nest("bad", (I,), (Phase("sweep", (), (), ()),)),
    "a map phase has no accumulators": Nest("bad", (I,), (Phase("map", (R,), (SUM,)), LAST)),
    "a scan has one axis": Nest("bad", (I,), (Phase("scan", (), (SUM,)),)),
    "an accumulator has a row": Nest("bad", (I,), (Phase("reduce", (R,), (replace(SUM, op="argmax"),)), LAST)),
    "accumulators have different names": Nest("bad", (I,), (Phase("reduce", (R,), (SUM, SUM)), LAST)),
    "an accumulator takes values of its own dtype": Nest("bad", (I,), (Phase("reduce", (R,), (replace(SUM, dtype="f64"),)), LAST)),
    "an accumulator is read after its phase": Nest("bad", (I,), (LAST, REDUCE)),
    "an axis is visible in its own phase": Nest("bad", (I,), (REDUCE, Phase("map", (), (), (Store("y", (I.value,), VALUE),)))),
    "a store is into a buffer": Nest("bad", (I,), (Phase("map", (), (), (Store("z", (I.value,), FIRST),)),)),
    "constants are not written": Nest("bad", (I, R), (Phase("map", (), (), (Store("c", (I.value, R.value), VALUE),)),)),
    "a store has the buffer's dtype": stored(to(FIRST, "f64")),
    "a store sets or adds": stored(FIRST, mode="max"),
    "an index has an Expr for each dimension": stored(load(X, (I.value,))),
    "an index is i64": stored(load(X, (I.value, to(I.value, "i32")))),
    "each element is set at most once": stored(VALUE, axes=(I, R)),
    "a load is from a buffer": stored(make("load", "f32", (I.value,), "z")),
    "a load has the buffer's dtype": stored(to(make("load", "f64", (I.value, const(0)), "x"), "f32")),
    "a masked load takes a bool": stored(masked(X, (I.value, const(0)), I.value, literal(0, "f32"))),
    "check_index takes two i64": stored(load(X, (I.value, check_index(to(I.value, "i32"), 5)))),
    "add takes arguments of one dtype": stored(make("add", "f32", (FIRST, literal(1, "i64")))),
    "a node has the dtype that its row derives": stored(to(make("add", "f64", (FIRST, FIRST)), "f32")),
    "an operator has a row in OPS": stored(make("frobnicate", "f32", (FIRST,))),
    "a size is an int": Nest("bad", (Axis("i0", literal(4.0, "f32")),), (LAST,)),
    "a size holds no axis, load": Nest("bad", (Axis("i0", make("add", "i64", (load(N, (const(0),)), const(1)))),), (LAST,)),
}


@pytest.mark.parametrize("rule", list(BROKEN_NESTS))
def test_a_broken_nest_is_refused(rule):
    with pytest.raises(InternalError, match=rule.replace("(", r"\(")):
        verify_nest(BROKEN_NESTS[rule], BUFFERS)


def test_adding_may_collide():
    assert verify_nest(stored(VALUE, mode="add", axes=(I, R)), BUFFERS) == {"y"}


def test_a_symbol_must_be_readable():
    n = symbol("s0")
    nest = Nest("dynamic", (Axis("i0", n),), (Phase("map", (), (), (Store("y", (I.value,), FIRST),)),))
    program = replace(PROGRAM, steps=(nest,))
    with pytest.raises(InternalError, match="a symbol is read from an input"):
        verify_program(program)
    verify_program(replace(program, symbols={"s0": (0, "shape", 0)}))


VIEW = View("y", (4,), (1,), 0, "f32")
BROKEN_PROGRAMS = {
    "a buffer is written before it is read": replace(PROGRAM, steps=()),
    "a view is of a buffer": replace(PROGRAM, outputs=(replace(VIEW, buffer="z"),)),
    "a view has a stride for each dimension": replace(PROGRAM, outputs=(replace(VIEW, strides=()),)),
    "a view is inside of its buffer": replace(PROGRAM, outputs=(replace(VIEW, offset=1),)),
    "an input is a buffer or a symbol": replace(PROGRAM, inputs=("x", "w")),
    "a buffer stands under its own name": replace(PROGRAM, buffers={**BUFFERS, "w": X}),
    "a buffer has a stride for each dimension": replace(PROGRAM, buffers={**BUFFERS, "y": replace(Y, strides=())}),
    "only inputs and constants have an offset": replace(PROGRAM, buffers={**BUFFERS, "y": replace(Y, offset=1)}),
    "a call mutates a buffer that exists": replace(PROGRAM, steps=(NEST, Extern("call", (), print, (VIEW,), mutates=("w",)))),
}


@pytest.mark.parametrize("rule", list(BROKEN_PROGRAMS))
def test_a_broken_program_is_refused(rule):
    with pytest.raises(InternalError, match=rule):
        verify_program(BROKEN_PROGRAMS[rule])


def test_a_load_of_an_earlier_phase():
    """A phase may load what an earlier phase of the same nest stored; not the other way round."""
    again = Phase("map", (), (), (Store("z", (I.value,), S.add(load(Y, (I.value,)), 1)),))
    buffers = {**BUFFERS, "z": replace(Y, name="z")}
    assert verify_nest(Nest("two", (I,), (REDUCE, LAST, again)), buffers, {"x"}) == {"y", "z"}
    with pytest.raises(InternalError, match="written before it is read"):
        verify_nest(Nest("two", (I,), (again, REDUCE, LAST)), buffers, {"x"})
