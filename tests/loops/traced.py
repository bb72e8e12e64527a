"""Helpers: functions traced to Programs, fused, and compared with what they were and with eager; and an interpreter that checks
that a nest reads back only what the same point of its parallel axes has stored in an earlier phase."""
import contextlib

import interp
import torch
from tracing import trace

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
    for got, expected in zip(run_watched(program, inputs), want, strict=True):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
        assert got.stride() == expected.stride()


def nests(program: Program) -> list[Nest]:
    return [step for step in program.steps if isinstance(step, Nest)]


def text(program: Program) -> str:
    return str(program).strip()


# ---------------------------------------------------------------- rows of their own

def run_watched(program: Program, inputs) -> list:
    with _owners_watched():
        return interp.run(program, list(inputs))


@contextlib.contextmanager
def _owners_watched():
    """While a nest runs, every element it stores belongs to the point of the parallel axes that stored it."""
    load, store = interp.PhaseRun.load, interp.PhaseRun.store

    def points(phase) -> torch.Tensor:
        outer = phase.sweep.outer
        ids = torch.arange(int(torch.tensor(outer).prod()) if outer else 1)
        return ids.reshape(*outer, *[1] * len(phase.inner)) if phase.grid else ids.reshape(())

    def places(phase, index, target) -> torch.Tensor:
        linear = torch.zeros((), dtype=torch.int64)
        for part, size in zip(index, target.shape):
            linear = linear * size + phase.value(part)
        return linear.expand(phase.grid)

    def watched_load(phase, node):
        owners = getattr(phase.sweep, "owners", {}).get(node.attr)
        if owners is not None and 0 not in phase.grid:
            found = owners[places(phase, node.args, phase.machine.tensor(node.attr))]
            assert torch.equal(found, points(phase).expand(phase.grid)), f"{phase.sweep.nest.name} reads {node!r} of another row, or before it is stored"
        return load(phase, node)

    def watched_store(phase, what):
        store(phase, what)
        if 0 not in phase.grid and what.mode == "set":
            target = phase.machine.tensor(what.buffer)
            pending = phase.__dict__.setdefault("pending", {})
            pending[what.buffer] = torch.full((max(target.numel(), 1),), -1)
            pending[what.buffer][places(phase, what.index, target)] = points(phase).expand(phase.grid)

    def watched_run(phase):
        run(phase)
        phase.sweep.__dict__.setdefault("owners", {}).update(phase.__dict__.get("pending", {}))

    run = interp.PhaseRun.run
    interp.PhaseRun.store, interp.PhaseRun.run = watched_store, watched_run
    interp._LEAVES["load"] = watched_load
    try:
        yield
    finally:
        interp.PhaseRun.store, interp.PhaseRun.run = store, run
        interp._LEAVES["load"] = load
