"""fs.debug: the first operator, line and element that differ; the smallest program that shows it; failures leave such a program."""
import subprocess
import sys

import pytest
import torch

import firesteel as fs
from firesteel.loops.lower.build import LOWERINGS
from firesteel.tools.cases import Case, copied

aten = torch.ops.aten


def raising(*args, **kwargs):
    raise ZeroDivisionError("no such loop")


@pytest.fixture
def sabotaged(monkeypatch):
    """`sabotaged(aten.tanh.default, by)`: the lowering of an operator is another's."""
    fs.reset()

    def replace(op, by):
        monkeypatch.setitem(LOWERINGS._rows, op._name, by)
    yield replace
    monkeypatch.undo()
    fs.reset()


def program(x, w):
    y = x @ w
    z = torch.tanh(y)           # wrong where it is sabotaged
    return (z.exp() * 2).sum(), z


def arguments():
    torch.manual_seed(1)
    return torch.randn(5, 8) + 1, torch.randn(8, 8, requires_grad=True)


def test_equal_programs_are_equal():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.GELU())
    before, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    page = fs.debug.compare(model)(torch.randn(5, 8))
    assert page.equal and page.graphs == 1 and str(page).startswith("equal to eager: 13 values")
    assert all(p.grad is None and torch.equal(p, b) for p, b in zip(model.parameters(), before))
    assert fs.debug.compare(program)(*arguments()).equal
    torch.set_rng_state(state)


def test_the_first_operator_that_differs_is_named(sabotaged):
    sabotaged(aten.tanh.default, LOWERINGS[aten.sin.default])
    page = fs.debug.compare(program)(*arguments())
    assert not page.equal
    (one,) = page.differences
    assert one.operator == "torch.tanh" and one.failure.phase == "forward"
    assert one.location.source() == "z = torch.tanh(y)           # wrong where it is sabotaged"
    assert "element [" in str(page) and "of 40 differ" in str(page) and __file__ in str(page)


def test_a_wrong_gradient_is_of_the_backward(sabotaged):
    sabotaged(aten.threshold_backward.default, LOWERINGS[aten.add.Tensor])

    def f(x):
        return (x * 3).relu().sum()
    page = fs.debug.compare(f)(torch.randn(6, requires_grad=True))
    assert page.failure.phase == "backward" and page.failure.what == "the gradient of argument 0"
    (one,) = page.differences
    assert one.failure.phase == "backward" and "relu" in one.operator


def test_a_normalisation_before_it_is_not_blamed(sabotaged):
    """For tangents of ones its gradients are rounding errors alone, in which any two programs differ."""
    sabotaged(aten.erf.default, LOWERINGS[aten.tanh.default])
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def f(x):
        y = second(first(x).sigmoid())
        return y.erf().sum(0)
    (one,) = fs.debug.compare(f)(torch.randn(4, 8, requires_grad=True)).differences
    assert one.operator == "Tensor.erf" and one.failure.phase == "forward"


def test_two_graphs_and_a_failing_compiler(sabotaged):
    sabotaged(aten.tanh.default, raising)

    def f(x):
        y = x.cos()
        fs.graph_break()
        return (y + 1).tanh().exp()
    page = fs.debug.compare(f)(torch.randn(6))
    assert page.failure.error == "ZeroDivisionError" and page.graphs == 2
    (one,) = page.differences
    assert one.graph == 2 and one.operator == "Tensor.tanh"


def run(path):
    return subprocess.run([sys.executable, str(path)], text=True, capture_output=True)


def test_minify_leaves_the_operator_that_fails(sabotaged, tmp_path):
    sabotaged(aten.tanh.default, LOWERINGS[aten.sin.default])

    def f(x, w):
        a = (x @ w).relu() + 1
        b = a.exp().sum(1, keepdim=True)
        return torch.tanh(a * 3).mean(), b
    path = fs.debug.minify(f, arguments(), path=tmp_path / "small.py")
    text = path.read_text()
    body = [line for line in text.split("def program")[1].split("def inputs")[0].splitlines() if " = " in line]
    assert len(body) == 1 and "torch.tanh(" in body[0] and "test_debug.py" in body[0]
    done = run(path)        # in a process that is not sabotaged
    assert done.returncode == 0 and done.stdout.startswith("equal to eager"), done.stderr


def test_data_is_kept_where_random_numbers_do_not_show_it(sabotaged, tmp_path, monkeypatch):
    sabotaged(aten.relu.default, LOWERINGS[aten.abs.default])
    x = torch.tensor([1.0, -100.0])
    monkeypatch.setattr("firesteel.dumps.random_tensor", lambda shape, strides, dtype, device, offset=0: torch.ones(shape, dtype=dtype))
    path = fs.debug.minify(lambda x: x.relu() + 1, (x,), path=tmp_path / "small.py")
    assert "data=[1.0, -100.0]" in path.read_text()


def test_nothing_to_minify(tmp_path):
    with pytest.raises(fs.errors.UserError, match="No graph of the program fails by itself"):
        fs.debug.minify(program, arguments(), path=tmp_path / "small.py")


def test_a_failing_compiler_leaves_a_program(sabotaged, tmp_path):
    sabotaged(aten.tanh.default, raising)
    with fs.config.patch(cache_dir=str(tmp_path)), pytest.raises(fs.errors.BackendError, match="ZeroDivisionError: no such loop") as error:
        fs.compile(program, dynamic=True)(*arguments())
    (note,) = error.value.__notes__
    (path,) = (tmp_path / "failures").iterdir()
    assert note.endswith(f"A program that reproduces it: python {path}")
    done = run(path)
    assert done.returncode == 0 and done.stdout.startswith("equal to eager: 5 values"), done.stderr


def test_a_failing_backward_leaves_one_too(sabotaged, tmp_path):
    sabotaged(aten.threshold_backward.default, raising)
    with fs.config.patch(cache_dir=str(tmp_path)), pytest.raises(ZeroDivisionError) as error:
        fs.compile(lambda x: (x * 3).relu().sum())(torch.randn(6, requires_grad=True)).backward()
    assert "python " in error.value.__notes__[0]
    assert "threshold_backward" in next((tmp_path / "failures").iterdir()).read_text()


def test_an_error_of_the_user_leaves_none(tmp_path):
    with fs.config.patch(cache_dir=str(tmp_path)), pytest.raises(RuntimeError, match="shape") as error:
        fs.compile(lambda x: x @ x)(torch.randn(2, 3))
    assert not getattr(error.value, "__notes__", None) and not (tmp_path / "failures").exists()


def plain(x):
    return x.sin() + 1


def test_a_failing_capture_leaves_the_function(tmp_path, monkeypatch):
    from firesteel.capture import translate
    fs.reset()
    monkeypatch.setattr(translate, "_write", raising)
    translate_globals = {**raising.__globals__, "__name__": "firesteel.capture.broken"}
    monkeypatch.setattr(translate, "_write", type(raising)(raising.__code__, translate_globals))
    with fs.config.patch(cache_dir=str(tmp_path)), pytest.raises(ZeroDivisionError) as error:
        fs.compile(plain)(torch.randn(3))
    assert "failure of firesteel itself" in error.value.__notes__[0]
    (path,) = (tmp_path / "failures").iterdir()
    monkeypatch.undo()
    assert "return x.sin() + 1" in path.read_text() and run(path).returncode == 0


def test_suppressed_failures_run_eagerly(sabotaged):
    sabotaged(aten.tanh.default, raising)
    x = torch.randn(3)
    with fs.config.patch(suppress_errors=True):
        torch.testing.assert_close(fs.compile(lambda x: x.tanh() + 1)(x), x.tanh() + 1)
    assert sum(fs.counters["suppressed"].values()) == 1


def test_copies_share_memory_as_the_originals_do():
    base = torch.randn(6, requires_grad=True)
    plain, view = copied([base.detach(), base.detach()[2:]])
    plain[2] = 7.0
    assert view[0] == 7.0
    leaf, result = copied([base, base * 2])
    assert leaf.is_leaf and leaf.requires_grad and not result.is_leaf


def test_what_no_file_can_hold_is_said():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(lambda t: t * 2, (x,)),))
    with pytest.raises(fs.errors.UserError, match="no file can hold it"):
        Case(torch.fx.GraphModule({}, graph), (torch.ones(2),)).failure()
