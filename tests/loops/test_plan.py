"""Memory plans: text, liveness, reuse, and execution with real overlapping memory in which freed bytes are poisoned."""
import random

import pytest
import torch
from test_fuse import layer_norm, random_program
from traced import fused, lowered

from firesteel.loops import interp
from firesteel.loops.fuse import fuse
from firesteel.loops.ir import Axis, Buffer, Extern, Nest, Phase, Program, Store, View, axis, load
from firesteel.loops.ops import DTYPES, S
from firesteel.loops.plan import Alloc, Free, Plan, Return, Run, extent, plan
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
    if step.reuse is not None:
        return machine.memory[step.reuse]
    buffer = machine.buffers[step.buffer]
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


def chain(n, length=5, kind=lambda i: 1):
    """x -> t0 -> t1 ... -> y, each twice the one before; kind(i) scales the size of t_i."""
    names = ["x", *(f"t{i}" for i in range(length)), "y"]
    buffers = {name: Buffer(name, "f32", (n,), (1,), {"x": "input", "y": "output"}.get(name, "temp")) for name in names}
    i = (axis("i"),)
    steps = tuple(Nest(f"n{k}", (Axis("i", n),), (Phase("map", stores=(Store(b, i, S.mul(load(buffers[a], i), 2.0)),)),))
                  for k, (a, b) in enumerate(zip(names, names[1:])))
    symbols = {} if isinstance(n, int) else {n.attr: (0, "shape", 0)}
    return Program(buffers, steps, ("x",), (View("y", (n,), (1,), 0, "f32"),), symbols)


def test_text():
    assert str(plan(chain(100, 2))).splitlines() == [
        "arena 896 bytes", "alloc t0 at 0", "run n0", "alloc t1 at 448", "run n1", "free t0", "alloc y", "run n2", "free t1", "return y"]


@pytest.mark.parametrize("n", [0, 1, 5, 100])
def test_two_places_do_for_a_chain(n):
    made = agree(chain(n), [torch.randn(n)])
    assert len({step.at for step in made.steps if isinstance(step, Alloc) and step.at is not None}) == 2


def test_symbolic_sizes_are_used_again_where_they_are_equal():
    program = chain(symbol("s0"))
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
