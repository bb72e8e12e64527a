"""fs.checkpoint_budget: the limit is kept, gradients stay, less memory is never bought for nothing, and the choice is told."""
import pathlib
import sys

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

import firesteel as fs
from firesteel.autograd import optimes
from firesteel.autograd.budget import Budget, held_bytes
from firesteel.autograd.partition import Roles, choose_saved

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

import programs  # noqa: E402

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Times that do not depend on the machine: a library call takes a nanosecond for each byte of its result."""
    fs.reset()
    monkeypatch.setattr(optimes, "measured", lambda node: optimes.bytes_of(node) * 1e-9)
    monkeypatch.setattr(optimes, "bytes_a_second", lambda device: 1e11)


def gpt():
    return programs.PROGRAMS["gpt"](**programs.SMALL["gpt"][0])


def saved_by(fn, program):
    """Bytes of the storages saved for backward that are no parameters, measured."""
    held = {t.untyped_storage().data_ptr() for t in (*program.leaves, *program.inputs)}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = fn(*program.inputs)
    total = sum(found.values())
    loss.sum().backward()
    return total


def gradients(fn, program):
    programs.step(fn, program, train=True)
    return [leaf.grad.clone() for leaf in program.leaves]


def test_budgets_are_kept_and_gradients_stay():
    program = gpt()
    model = program.fn
    expected = gradients(fs.compile(model), program)
    unlimited = saved_by(fs.compile(model), program)
    before = None
    for share in (2.0, 1.0, 0.7, 0.4, 0.2, 0.05):
        compiled = fs.checkpoint_budget(model, bytes=share * unlimited)
        for got, want in zip(gradients(compiled, program), expected):
            torch.testing.assert_close(got, want)
        choice, = fs.memory_report(compiled).choices
        assert saved_by(compiled, program) <= share * unlimited and choice.bytes <= share * unlimited
        assert before is None or choice.bytes <= before.bytes and choice.seconds >= before.seconds
        assert (choice.seconds == 0 and not choice.recomputed) == (share >= 1.0)
        before = choice


def test_equal_layers_change_one_by_one():
    """A limit between all and none of the layers' values is used, rather than all of them recomputed."""
    program = programs.PROGRAMS["mlp"](batch=16, width=64, layers=8)
    unlimited = saved_by(fs.compile(program.fn), program)
    for share in (0.9, 0.6, 0.3):
        compiled = fs.checkpoint_budget(program.fn, bytes=share * unlimited)
        assert saved_by(compiled, program) >= (share - 0.25) * unlimited


def test_the_report_says_what_was_chosen():
    program = gpt()
    compiled = fs.checkpoint_budget(program.fn, bytes=100_000)
    assert "no graph" in str(fs.memory_report(compiled)) and "100,000" in str(fs.memory_report(compiled))
    program.fn = compiled
    programs.step(compiled, program, train=True)
    choice, = fs.memory_report(compiled).choices
    text = str(fs.memory_report(compiled))
    assert "limit 100,000" in text and f"{choice.bytes:,} bytes" in text and "programs.py:" in text
    assert {entry.operator for entry in choice.recomputed} >= {"addmm"} and all(entry.seconds > 0 for entry in choice.recomputed)
    assert choice.bytes < choice.unlimited and choice.seconds > 0


def test_a_limit_that_cannot_be_met_names_the_smallest_figure():
    def f(x):
        return torch.nn.functional.dropout(x.sin(), 0.5).cos()      # a draw runs once: its mask is saved
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(fs.errors.UserError, match=r"100 bytes are too few.*smallest reachable figure for this graph is 16,384[\s\S]*Raise bytes="):
        fs.checkpoint_budget(f, bytes=100)(x)
    compiled = fs.checkpoint_budget(f, bytes=16384)
    compiled(x).sum().backward()
    assert fs.memory_report(compiled).choices[0].bytes == 16384


def test_checkpointed_regions_stay_and_hand_on_less():
    """Without a limit each region keeps its input; a lower limit takes these too."""
    layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(6))

    def f(x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()
    program = programs.Program(f, (torch.randn(16, 32),), list(layers.parameters()))
    expected, unlimited = gradients(f, program), saved_by(fs.compile(f), program)
    for share in (1.0, 0.5, 0.0):
        compiled = fs.checkpoint_budget(f, bytes=share * unlimited)
        for got, want in zip(gradients(compiled, program), expected):
            torch.testing.assert_close(got, want)
        assert saved_by(compiled, program) <= share * unlimited


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_partitioned"])
def test_other_backends_that_partition(backend):
    program = gpt()
    expected = gradients(program.fn, program)
    compiled = fs.checkpoint_budget(program.fn, bytes=100_000, backend=backend, fullgraph=True)
    for got, want in zip(gradients(compiled, program), expected):
        torch.testing.assert_close(got, want)
    assert saved_by(compiled, program) <= 100_000


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), "1GB", None, True])
def test_wrong_limits(wrong):
    with pytest.raises(fs.errors.UserError, match="takes a number of bytes"):
        fs.checkpoint_budget(torch.sin, bytes=wrong)


def test_wrong_calls():
    with pytest.raises(fs.errors.UserError, match="no partitioner"):
        fs.checkpoint_budget(torch.sin, bytes=1, backend="eager")
    with pytest.raises(fs.errors.UserError, match="what fs.checkpoint_budget returned"):
        fs.memory_report(fs.compile(torch.nn.Linear(2, 2)))
    with pytest.raises(fs.errors.UserError, match="takes a function or a module"):
        fs.checkpoint_budget(3, bytes=1)


def test_decorator_and_disable():
    @fs.checkpoint_budget(bytes=1000)
    def f(x):
        return x.sin()
    assert torch.equal(f(torch.ones(3)), torch.ones(3).sin())
    assert fs.memory_report(f).choices == []
    assert fs.checkpoint_budget(torch.sin, bytes=0, disable=True) is torch.sin


def slow_and_fast(budget):
    """Two library calls save as many bytes; mm takes longer than bmm by the test's clock.  One must run again."""
    graph = Graph()
    value = lambda *shape: torch.empty(shape, device="meta")

    def made(target, *args, shape):
        node = graph.call_function(target, args)
        node.meta["val"] = value(*shape)
        return node
    x, y, t = (graph.placeholder(name) for name in ("primals_0", "primals_1", "tangents_0"))
    x.meta["val"], y.meta["val"], t.meta["val"] = value(8, 8), value(2, 4, 8), value(8, 8)
    slow, quick = made(aten.mm.default, x, x, shape=(8, 8)), made(aten.bmm.default, y, y, shape=(2, 4, 8))
    out = made(aten.add.Tensor, made(aten.sin.default, slow, shape=(8, 8)), made(aten.sum.default, made(aten.sin.default, quick, shape=(2, 4, 8)), shape=()),
               shape=(8, 8))
    gx = made(aten.mul.Tensor, t, made(aten.cos.default, slow, shape=(8, 8)), shape=(8, 8))
    gy = made(aten.mul.Tensor, made(aten.sum.default, t, shape=()), made(aten.cos.default, quick, shape=(2, 4, 8)), shape=(2, 4, 8))
    graph.output((out, gx, gy))
    gm = GraphModule({}, graph)
    assert held_bytes(choose_saved(Roles.of(gm, 1))) == 512
    return Budget(budget)(gm, num_fwd_outputs=1)


def test_the_quicker_operator_runs_again(monkeypatch):
    for slow in (aten.mm.default, aten.bmm.default):
        monkeypatch.setattr(optimes, "measured", lambda node: 1e-3 if node.target is slow else 1e-4)
        _, bw = slow_and_fast(300)
        assert [node.target for node in bw.graph.nodes if node.target in (aten.mm.default, aten.bmm.default)] == \
            [aten.bmm.default if slow is aten.mm.default else aten.mm.default]


def test_library_calls_are_measured_once_for_a_shape(monkeypatch):
    monkeypatch.undo()
    optimes._times.clear()
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(32, 32, device="meta")
    calls = [graph.call_function(aten.mm.default, (x, x)) for _ in range(2)]
    for call in calls:
        call.meta["val"] = torch.empty(32, 32, device="meta")
    assert optimes.seconds(calls[0]) > 0 and optimes.seconds(calls[0]) == optimes.seconds(calls[1])
    assert len(optimes._times) == 1
    wrong = graph.call_function(aten.mm.default, (x, calls[0], 3))
    wrong.meta["val"] = torch.empty(32, 32, device="meta")
    before = fs.counters["aot"]["unmeasured_operators"]
    assert optimes.seconds(wrong) > 0 and fs.counters["aot"]["unmeasured_operators"] == before + 1


def test_what_a_kernel_keeps_in_registers_takes_less_time_than_what_it_writes():
    graph = Graph()
    x = graph.placeholder("x")
    inner = graph.call_function(aten.sin.default, (x,))
    view = graph.call_function(aten.view.default, (inner, [64]))
    summed = graph.call_function(aten.add.Tensor, (view, view))
    operand = graph.call_function(aten.cos.default, (inner,))
    graph.output((graph.call_function(aten.mm.default, (operand, operand)), summed))
    for node in graph.nodes:
        node.meta["val"] = torch.empty((64,) if node in (view, summed) else (8, 8), device="meta")
    assert optimes.seconds(operand) == optimes.seconds(summed) == optimes.REGISTERS * optimes.seconds(inner) > 0


@pytest.mark.parametrize("later", [[0.4], [0.2, 0.1], [0.004, 0.002, 0.003, 0.005, 0.009, 0.003, 0.003]])
def test_neither_setting_a_library_up_nor_interruptions_count(monkeypatch, later):
    spent = [0.001, *later]
    monkeypatch.setattr(optimes, "_once", lambda call, wait: spent.pop(0))
    assert optimes.timed(lambda: None, torch.device("cpu")) == min(later) and not spent


def test_less_memory_is_no_gain_of_time_where_convolutions_are_followed_by_cheap_operators():
    program = programs.PROGRAMS["resnet"](**programs.SMALL["resnet"][0])
    unlimited = saved_by(fs.compile(program.fn), program)
    costs = []
    for share in (1.0, 0.7, 0.4):
        compiled = fs.checkpoint_budget(program.fn, bytes=share * unlimited)
        gradients(compiled, program)
        costs.append(fs.memory_report(compiled).choices[0].seconds)
    assert costs[0] == 0 and costs == sorted(costs) and costs[1] > 0
