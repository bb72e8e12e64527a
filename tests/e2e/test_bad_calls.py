"""A bad call raises what eager raises, loses nothing, and the next good call works: each program, wrong in many ways, before and after
it was compiled."""
import pathlib
import sys

import pytest
import torch

import firesteel as fs

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

import programs  # noqa: E402

# What is done to the arguments of a good call.
WRONG = {
    "none": lambda inputs: (None, *inputs[1:]),
    "a list": lambda inputs: (inputs[0].detach().tolist(), *inputs[1:]),
    "a string": lambda inputs: ("x", *inputs[1:]),
    "a number": lambda inputs: (3.5, *inputs[1:]),
    "missing": lambda inputs: inputs[:-1],
    "one more": lambda inputs: (*inputs, inputs[0]),
    "narrower": lambda inputs: (inputs[0][..., 1:], *inputs[1:]),
    "no dimensions": lambda inputs: (inputs[0].flatten()[0], *inputs[1:]),
    "one dimension more": lambda inputs: (inputs[0][None, None, :, :, None], *inputs[1:]),
    "another dtype": lambda inputs: (inputs[0].detach().to(torch.int32 if inputs[0].is_floating_point() else torch.float64), *inputs[1:]),
    "complex": lambda inputs: (inputs[0].detach().to(torch.complex64), *inputs[1:]),
    "another device": lambda inputs: (inputs[0].detach().to("meta"), *inputs[1:]),
    "out of range": lambda inputs: tuple((i.clone() + 10_000) if i.dtype == torch.int64 else i for i in inputs),
}


def outcome(fn, inputs):
    """The result, or the type and first sentence of the error."""
    try:
        return fn(*inputs)
    except Exception as error:
        return type(error), str(error).splitlines()[0] if str(error) else ""


def same(got, want, inputs):
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"eager gives a tensor, compiled {got}"
        assert got.dtype == want.dtype and got.shape == want.shape and got.device == want.device
        if not any(isinstance(i, torch.Tensor) and i.is_meta for i in inputs):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    else:
        assert got == want


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", list(programs.PROGRAMS))
def test_bad_call(name, wrong, dynamic):
    fs.reset()
    make = lambda: programs.PROGRAMS[name](**programs.SMALL[name][0])  # noqa: E731
    expected, program = make(), make()
    if isinstance(program.fn, torch.nn.Module):
        expected.fn.eval(), program.fn.eval()
    bad, good = WRONG[wrong](program.inputs), program.inputs
    compiled = fs.compile(program.fn, dynamic=dynamic)
    want, right = outcome(expected.fn, WRONG[wrong](expected.inputs)), expected.fn(*expected.inputs)
    for inputs, result in [(bad, want), (good, right), (bad, want), (good, right)]:
        same(outcome(compiled, inputs), result, inputs)
