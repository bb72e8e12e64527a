"""The reference programs, compiled natively, against eager: values and gradients, several sizes, static and dynamic."""
import pathlib
import sys

import pytest
import torch

import firesteel as fs

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

import more_programs  # noqa: E402
import programs  # noqa: E402

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()


def close(a, b, tolerance):
    """The largest difference, relative to the largest value."""
    scale = b.abs().max().item() if b.numel() else 1.0
    difference = (a - b).abs().max().item() if b.numel() else 0.0
    assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
    assert difference <= tolerance * max(scale, 1e-3), f"differs by {difference} of {scale}"


def state(program, fn, train):
    """Result, gradients and buffers after one step."""
    result = programs.step(fn, program, train)
    gradients = [leaf.grad for leaf in program.leaves] if train else []
    buffers = [b.clone() for b in program.fn.buffers()] if isinstance(program.fn, torch.nn.Module) else []
    return [result, *gradients, *buffers]


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("name", list(programs.PROGRAMS))
def test_equals_eager(name, train, dtype, dynamic):
    make = programs.PROGRAMS[name]
    compiled = None
    for sizes in programs.SMALL[name] * 2:       # the second time round both sizes are met again
        expected_program, program = make(dtype=dtype, **sizes), make(dtype=dtype, **sizes)
        if compiled is None:
            holder = program
            compiled = fs.compile(program.fn, dynamic=dynamic, fullgraph=True)
        else:
            program = programs.Program(holder.fn, program.inputs,
                                       holder.leaves if isinstance(holder.fn, torch.nn.Module) else program.leaves)
            if isinstance(holder.fn, torch.nn.Module):
                holder.fn.load_state_dict(expected_program.fn.state_dict())
        for got, want in zip(state(program, compiled, train), state(expected_program, expected_program.fn, train), strict=True):
            close(got, want, TOLERANCE[dtype])
    expected_graphs = {None: 2, True: 1, False: 2}[dynamic]
    assert fs.counters["stats"]["unique_graphs"] == expected_graphs


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_bad_call_raises_what_eager_raises_and_loses_nothing(name):
    program = programs.PROGRAMS[name](**programs.SMALL[name][0])
    compiled = fs.compile(program.fn)
    bad = {"mlp": (torch.randn(4, 7),), "gpt": (torch.randint(0, 50, (2, 17)).float(),)}[name]
    with pytest.raises(Exception) as eager:
        program.fn(*bad)
    with pytest.raises(type(eager.value)) as ours:
        compiled(*bad)
    assert str(ours.value) == str(eager.value)
    torch.testing.assert_close(compiled(*program.inputs), program.fn(*program.inputs))
    with pytest.raises(type(eager.value)):
        compiled(*bad)
    torch.testing.assert_close(compiled(*program.inputs), program.fn(*program.inputs))


def test_cost_of_compiling_grows_linearly():
    """Four times the layers: four times the nodes and distinct kernels stay the same (times are measured in bench/)."""
    nodes = []
    kernels = []
    for layers in (2, 8):
        fs.reset()
        program = programs.PROGRAMS["gpt"](batch=2, length=17, layers=layers, width=32, vocabulary=50)
        programs.step(fs.compile(program.fn), program, train=True)
        nodes.append(fs.counters["stats"]["calls_captured"])
        kernels.append(fs.counters["native"]["distinct_kernels"])
    assert nodes[1] <= 4.5 * nodes[0]
    assert kernels[1] <= kernels[0] + 2


def test_one_tensor_as_several_parts_of_a_cat() -> None:
    x = torch.randn(3, 4)
    compiled = fs.compile(lambda a: torch.cat((a, a), -1))
    torch.testing.assert_close(compiled(x), torch.cat((x, x), -1))


@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("name", list(more_programs.MORE))
def test_more_programs_equal_eager(name, train):
    expected, program = (more_programs.MORE[name](**more_programs.SMALL[name]) for _ in range(2))
    compiled = fs.compile(program.fn, fullgraph=True)
    for got, want in zip(state(program, compiled, train), state(expected, expected.fn, train), strict=True):
        close(got, want, 1e-4)
    assert fs.counters["stats"]["unique_graphs"] == 1
