"""Memory plans: text, liveness, reuse, and execution with real overlapping memory in which freed bytes are poisoned."""
import random
from dataclasses import replace

import interp
import pytest
import torch
from test_fuse import layer_norm, random_program
from traced import fused, lowered

from firesteel.loops.fuse import fuse
from firesteel.loops.ir import Axis, Buffer, Extern, Nest, Phase, Program, Reduce, Store, View, acc, axis, load
from firesteel.loops.plan import Alloc, Free, Plan, Return, Run, extent, plan
from firesteel.loops.scalars import DTYPES, S
from firesteel.loops.simplify import simplify
from firesteel.sym.expr import symbol

aten = torch.ops.aten


def execute_plan(plan: Plan, inputs) -> list:
    """Runs the plan's steps with the interpreter: arena places are views of one tensor, freed memory is filled with rubbish."""
    machine = interp.Interpreter(plan.program, inputs)
    arena = torch.full((machine.size(plan.arena),), 0xAB, dtype=torch.uint8)
    for step in plan.steps:
        if isinstance(step, Alloc):
            machine.memory[step.buffer] = _memory(machine, step, arena)
        elif isinstance(step, Run):
            machine.step(step.step)
        elif isinstance(step, Free):
            memory = machine.memory[step.buffer]
            if memory.numel():
                memory.view(-1)[:].fill_(99) if memory.is_contiguous() else memory.fill_(99)
        else:
            assert isinstance(step, Return)
            return [machine.resolve(output) for output in step.outputs]
    raise AssertionError("a plan ends with a return")


def _memory(machine, step: Alloc, arena: torch.Tensor) -> torch.Tensor:
    buffer = machine.buffers[step.buffer]
    if step.reuse is not None:
        return machine.memory[step.reuse].as_strided([machine.size(n) for n in buffer.shape], [machine.size(n) for n in buffer.strides])
    if step.at is None:
        return machine.allocate(buffer)
    dtype, start = DTYPES[buffer.dtype], machine.size(step.at)
    count = machine.size(extent(buffer))
    assert start % 64 == 0 and start + count * dtype.itemsize <= len(arena)
    part = arena[start:start + count * dtype.itemsize].view(dtype)
    return part.as_strided([machine.size(n) for n in buffer.shape], [machine.size(n) for n in buffer.strides])


def agree(program: Program, inputs) -> Plan:
    made = plan(program)
    for got, want in zip(execute_plan(made, inputs), interp.run(program, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7, equal_nan=True)
    return made


def chain(n, length=5, read=lambda n: axis("i")):
    """x -> t0 -> t1 ... -> y, each twice the one before, whose element `read(n)` it reads."""
    names = ["x", *(f"t{i}" for i in range(length)), "y"]
    buffers = {name: Buffer(name, "f32", (n,), (1,), {"x": "input", "y": "output"}.get(name, "temp")) for name in names}
    i = (axis("i"),)
    steps = tuple(Nest(f"n{k}", (Axis("i", n),), (Phase("map", stores=(Store(b, i, S.mul(load(buffers[a], (read(n),)), 2.0)),)),))
                  for k, (a, b) in enumerate(zip(names, names[1:])))
    symbols = {} if isinstance(n, int) else {n.attr: (0, "shape", 0)}
    return Program(buffers, steps, ("x",), (View("y", (n,), (1,), 0, "f32"),), symbols)


def mirrored(n):
    return S.sub(n - 1, axis("i"))


def test_text():
    assert str(plan(chain(100, 2, mirrored))).splitlines() == [
        "arena 896 bytes", "alloc t0 at 0", "run n0", "alloc t1 at 448", "run n1", "free t0", "alloc y", "run n2", "free t1", "return y"]
    assert str(plan(chain(100, 2))).splitlines() == [
        "arena 448 bytes", "alloc t0 at 0", "run n0", "alloc t1 at 0 reusing t0", "run n1", "alloc y", "run n2", "free t1", "return y"]


@pytest.mark.parametrize("n", [0, 1, 5, 100])
def test_two_places_do_for_a_chain(n):
    made = agree(chain(n, read=mirrored), [torch.randn(n)])
    assert len({step.at for step in made.steps if isinstance(step, Alloc) and step.at is not None}) == 2


def test_symbolic_sizes_are_used_again_where_they_are_equal():
    program = chain(symbol("s0"), read=mirrored)
    for n in (0, 1, 7, 33):
        made = agree(program, [torch.randn(n)])
    assert len({str(step.at) for step in made.steps if isinstance(step, Alloc) and step.at is not None}) == 2


def test_outputs_are_tensors_of_their_own():
    program = fused(lambda x: (x.exp(), x.exp().sum(1), x.sin() @ x.t()), torch.randn(6, 6))
    made = plan(program)
    outputs = {view.buffer for view in program.outputs}
    placed = {step.buffer: step for step in made.steps if isinstance(step, Alloc)}
    assert all(placed[name].at is None and placed[name].reuse is None for name in outputs if name in placed)
    assert not any(isinstance(step, Free) and step.buffer in outputs for step in made.steps)


def test_a_view_keeps_its_buffer_alive():
    """y is a window on t, which is therefore never freed."""
    x, t = Buffer("x", "f32", (4, 4), (4, 1), "input"), Buffer("t", "f32", (4, 4), (4, 1), "output")
    i = (axis("i"), axis("j"))
    steps = (Nest("n", (Axis("i", 4), Axis("j", 4)), (Phase("map", stores=(Store("t", i, load(x, i)),)),)),)
    program = Program({"x": x, "t": t}, steps, ("x",), (View("t", (2, 4), (8, 1), 4, "f32"),), {})
    assert "free" not in str(plan(program))
    tx = torch.randn(4, 4)
    assert torch.equal(execute_plan(plan(program), [tx])[0], tx[1::2])


def test_library_calls_that_may_return_an_alias_are_not_reused():
    def steps(target):
        names = ["x", "a", "b", "c", "y"]
        kinds = {"x": "input", "y": "output"}
        buffers = {n: Buffer(n, "f32", (4, 4), (4, 1), kinds.get(n, "temp")) for n in names}
        view = {n: View(n, (4, 4), (4, 1), 0, "f32") for n in names}
        calls = (Extern("m0", ("a",), aten.mm.out, (view["x"], view["x"]), out=True), Extern("c", ("b",), target, (view["a"],)),
                 Extern("m1", ("c",), aten.mm.out, (view["x"], view["x"]), out=True), Extern("m2", ("y",), aten.mm.out, (view["b"], view["c"]), out=True))
        return Program(buffers, calls, ("x",), (view["y"],), {})
    assert "reusing" not in str(plan(steps(aten.contiguous.default)))


@pytest.mark.usefixtures("library_products")
def test_dead_results_of_products_are_reused():
    program = lowered(lambda x: x @ x @ x @ x @ x, torch.randn(4, 4))
    made = agree(program, [torch.randn(4, 4)])
    assert "reusing" in str(made)


def test_a_training_like_program():
    inputs = [torch.randn(12, 16), torch.randn(16), torch.randn(16), torch.randn(16, 16)]
    program = fused(lambda x, w, b, m: layer_norm((layer_norm(x @ m, w, b)[0].exp() @ m).sin(), w, b)[0] + x, *inputs)
    made = agree(program, inputs)
    assert made.arena == 0 or isinstance(made.arena, int)


@pytest.mark.parametrize("seed", range(25))
def test_random_programs(seed):
    torch.manual_seed(seed)
    fn = random_program(random.Random(1000 + seed))
    inputs = [torch.randn(9, 8, dtype=torch.float64), torch.randn(9, 8, dtype=torch.float64)]
    program = simplify(lowered(fn, *inputs))
    agree(program, inputs)              # many temporaries
    agree(fuse(program), inputs)


def test_a_nest_without_points_is_not_run():
    got = plan(fused(lambda x: x[:, 1:1] + 1, torch.randn(40, 2)))
    assert not any(isinstance(step, Run) for step in got.steps) and any(isinstance(step, Alloc) for step in got.steps)


def rows(nest, u=(4, 6)):
    """x -> t (doubled) -> u, by a nest over the rows of t -> y (doubled)."""
    buffers = {"x": Buffer("x", "f32", (4, 6), (6, 1), "input"), "t": Buffer("t", "f32", (4, 6), (6, 1)),
               "u": Buffer("u", "f32", u, (u[1], 1)), "y": Buffer("y", "f32", (4, 6), (6, 1), "output")}
    i, j = axis("i"), axis("j")
    twice = lambda name, a, b, index: Nest(name, (Axis("i", 4), Axis("j", 6)), (Phase("map", stores=(
        Store(b, (i, j), S.mul(load(buffers[a], index), 2.0)),)),))
    last = (i, j) if u == (4, 6) else (S.floordiv(S.add(S.mul(i, 6), j), 8), S.mod(S.add(S.mul(i, 6), j), 8))
    steps = (twice("first", "x", "t", (i, j)), nest(buffers), twice("last", "u", "y", last))
    return Program(buffers, steps, ("x",), (View("y", (4, 6), (6, 1), 0, "f32"),), {})


def shifted(part):
    """u[i, j] = t at `part` of (i, j)."""
    i, j = axis("i"), axis("j")
    return lambda b: Nest("u", (Axis("i", 4), Axis("j", 6)), (Phase("map", stores=(Store("u", (i, j), load(b["t"], part(i, j))),)),))


def normalised(b, late=False, row=lambda i: i):
    """u[i, r] = t[i, r] - sum of a row of t; with `late` a third phase reads t after u was written."""
    i, r, q = axis("i"), axis("r"), axis("q")
    total = Reduce("a", "sum", load(b["t"], (row(i), q)), "f32")
    stores = (Store("u", (i, r), S.sub(load(b["t"], (i, r)), acc(total))),)
    phases = (Phase("reduce", (Axis("q", 6),), (total,)), Phase("map", (Axis("r", 6),), stores=stores))
    again = Reduce("b", "sum", load(b["t"], (i, axis("p"))), "f32")
    return Nest("u", (Axis("i", 4),), (*phases, Phase("reduce", (Axis("p", 6),), (again,))) if late else phases)


@pytest.mark.parametrize("nest, overwrites", [
    (shifted(lambda i, j: (i, j)), True),
    (shifted(lambda i, j: (i, S.sub(5, j))), False),                # another point of the row reads it
    (normalised, True),                                             # an earlier phase reads only the row that the point writes
    (lambda b: normalised(b, late=True), False),
    (lambda b: normalised(b, row=lambda i: S.sub(3, i)), False),    # another row, perhaps of another thread
])
def test_the_last_reader_overwrites_what_it_reads(nest, overwrites):
    made = agree(rows(nest), [torch.randn(4, 6)])
    assert ("alloc u at 0 reusing t" in str(made)) == overwrites


def test_memory_is_overwritten_by_a_buffer_of_another_shape():
    """t is 4 x 6, and u is 3 x 8 over the same bytes."""
    i, j = axis("i"), axis("j")
    flat = S.add(S.mul(i, 8), j)

    def regrouped(b):
        index = (S.floordiv(flat, 6), S.mod(flat, 6))
        return Nest("u", (Axis("i", 3), Axis("j", 8)), (Phase("map", stores=(Store("u", (i, j), load(b["t"], index)),)),))
    agree(rows(regrouped, u=(3, 8)), [torch.randn(4, 6)])


@pytest.mark.usefixtures("library_products")
def test_large_dead_tensors_do_not_wait_while_other_memory_is_taken():
    """The first product dies, then memory of another size is taken: to keep the first for the last would add to the peak."""
    for size, reused in ((8, True), (256, False)):
        inputs = [torch.randn(a * size, b * size) for a, b in ((1, 1), (1, 1), (1, 2), (2, 3), (3, 1))]
        made = agree(lowered(lambda x, a, b, c, d: x @ a @ b @ c @ d @ a, *inputs), [t / 100 for t in inputs])
        assert ("reusing mm" in str(made)) == reused


def test_large_temporaries_are_held_only_while_they_live():
    """They are tensors: the arena is held for the whole call."""
    assert plan(chain(16384, read=mirrored)).arena > 0
    made = plan(chain(16385, read=mirrored))
    assert made.arena == 0 and "reusing" in str(made)


def written(function, *inputs):
    """The plan of a program whose first result is written to its first input."""
    program = fused(function, *inputs)
    return plan(replace(program, into=((program.outputs[0].buffer, program.inputs[0]),)))


@pytest.mark.parametrize("function, place", [
    (lambda x, y: (x * 0.9 + y, (x * 0.9 + y).exp()), True),            # both are computed at a point before one is stored
    (lambda x, y: (x * 0.9 + y, y.sum()), True),
    (lambda x, y: (x.flip(0) + y, y), False),                           # elements that are still to be read
    (lambda x, y: (y + x.sum(0), x @ y), False),                        # somebody reads the old values later
    (lambda x, y: (y + 1, y[torch.arange(6) + x.long()[0]]), False),    # eager may have to run it again
])
def test_results_are_written_to_the_inputs_they_replace(function, place):
    made = written(function, torch.zeros(6, 6), torch.randn(6, 6))
    given = made.program.inputs[0]
    assert any(isinstance(step, Alloc) and step.reuse == given for step in made.steps) == place
