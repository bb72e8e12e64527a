"""Every lowering row, on every sample: lower a one-operator graph, verify, interpret, compare with eager."""
import pytest
import torch
from interp import run
from optable import LIBRARY_SAMPLES, SAMPLES, Sample, one_op_graph
from tracing import trace

from firesteel.artifacts import counters
from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.spec import spec_of
from firesteel.loops.ir import Extern
from firesteel.loops.lower import LOWERINGS, lower_graph
from firesteel.loops.verify import verify_program

aten = torch.ops.aten


def check(sample: Sample):
    gm, inputs, expected = one_op_graph(sample)
    program = lower_graph(gm, inputs)
    verify_program(program)
    actual = run(program, inputs)
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m: f"{sample}\n{m}\n{program.steps}")
        assert got.stride() == want.stride(), str(sample)
    return program


@pytest.mark.parametrize("op", list(SAMPLES), ids=str)
def test_row_agrees_with_eager(op):
    assert op in LOWERINGS
    for sample in SAMPLES[op]:
        program = check(sample)
        called = [step for step in program.steps if isinstance(step, Extern)]
        assert not called, f"{sample} was not lowered to a nest: {called}"


@pytest.mark.parametrize("sample", LIBRARY_SAMPLES, ids=str)
def test_library_calls(sample):
    before = counters["native"]["library_calls"], counters["native"]["fallbacks"]
    program = check(sample)
    assert sum(isinstance(step, Extern) for step in program.steps) == 1
    assert (counters["native"]["library_calls"], counters["native"]["fallbacks"]) == (before[0] + 1, before[1])


def test_an_operator_without_a_row_is_called_and_counted():
    before = counters["native"]["fallback:cummax"]
    program = check(Sample(aten.cummax.default, (torch.randn(3, 4), 0)))
    assert [type(step) for step in program.steps] == [Extern]
    assert counters["native"]["fallback:cummax"] == before + 1


@pytest.mark.parametrize("op", [aten.hardswish.default, aten.hardsigmoid.default])
def test_a_sixth_is_a_float_on_a_gpu(op):
    """Eager's CUDA kernel multiplies doubles by the float nearest to 1/6; the CPU's divides by 6."""
    x = torch.linspace(-2.5, 2.5, 7, dtype=torch.float64)
    example = AbstractWorld().make(spec_of(x)._replace(device=torch.device("cuda")))
    program = lower_graph(trace(op, [example]).gm, [example])
    sixth = torch.tensor(1 / 6, dtype=torch.float32).double()
    assert str(float(sixth)) in str(program)
    assert ", 6.0)\nreturn" in str(lower_graph(trace(op, [x]).gm, [x]))
