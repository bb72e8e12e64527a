"""Helpers: functions traced to Programs, fused, and compared with what they were and with eager."""
import torch

from firesteel.graph.trace import trace
from firesteel.loops import interp
from firesteel.loops.fuse import fuse
from firesteel.loops.ir import Nest, Program
from firesteel.loops.lower.graph import lower_graph
from firesteel.loops.simplify import simplify
from firesteel.loops.verify import verify_program


def lowered(fn, *inputs) -> Program:
    return lower_graph(trace(fn, list(inputs)).gm, list(inputs))


def fused(fn, *inputs) -> Program:
    program = simplify(lowered(fn, *inputs))
    verify_program(program)
    program = fuse(program)
    verify_program(program)
    return program


def check(fn, *inputs, tolerance=1e-4) -> Program:
    """The fused program, after its results were compared with eager's."""
    program = fused(fn, *inputs)
    same(program, inputs, fn(*inputs), tolerance)
    return program


def same(program, inputs, want, tolerance=1e-4) -> None:
    want = want if isinstance(want, (tuple, list)) else (want,)
    for got, expected in zip(interp.run(program, list(inputs)), want, strict=True):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
        assert got.stride() == expected.stride()


def nests(program: Program) -> list[Nest]:
    return [step for step in program.steps if isinstance(step, Nest)]


def text(program: Program) -> str:
    return str(program).strip()
