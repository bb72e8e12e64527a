"""Sizes and numbers that change: symbols, guards on them, few recompiles."""
import pytest
import torch
from harness import capture, same
from torch import nn

import firesteel as fs
from firesteel.capture import marks
from firesteel.errors import ConstraintViolation
from firesteel.testing import CompileCounter


def run(fn, calls, **settings):
    compiled, backend = capture(fn, **settings)
    for args in calls:
        same(compiled(*args), fn(*args))
    return compiled, backend


def test_dynamic_true_one_graph_for_all_sizes():
    def f(x):
        return x.view(x.shape[0] * 2, -1).sum(1) * x.size(0)
    _, backend = run(f, [(torch.randn(n, 4),) for n in (3, 5, 8)], dynamic=True)
    assert len(backend.graphs) == 1


def test_automatic_dynamic_after_the_first_change():
    def f(x):
        return torch.cat([x, x.new_zeros(x.shape[0], 1)], 1).reshape(-1)
    _, backend = run(f, [(torch.randn(n, 4),) for n in (3, 5, 8, 13)])
    assert len(backend.graphs) == 2


def test_dynamic_false_compiles_each_size():
    _, backend = run(lambda x: x * 2, [(torch.randn(n),) for n in (2, 3, 4)], dynamic=False)
    assert len(backend.graphs) == 3


def test_questions_about_sizes_are_guards():
    def f(x):
        return x + 1 if x.shape[0] > 6 else x - 1
    _, backend = run(f, [(torch.randn(n),) for n in (3, 4, 5, 7, 9, 3)], dynamic=True)
    assert len(backend.graphs) == 2


def test_two_inputs_of_the_same_new_size():
    _, backend = run(lambda x, y: x + y, [(torch.randn(n, 2), torch.randn(n, 2)) for n in (3, 4, 5)], dynamic=True)
    assert len(backend.graphs) == 1


def test_int_argument_becomes_a_symbol():
    def f(x, n):
        return x[:n] * n
    _, backend = run(f, [(torch.randn(20), n) for n in (3, 4, 5, 6, 9)])
    assert len(backend.graphs) == 2


def test_float_argument_becomes_a_symbol():
    _, backend = run(lambda x, lr: x - lr * x, [(torch.randn(4), lr) for lr in (0.1, 0.2, 0.3, 0.4)])
    assert len(backend.graphs) <= 2


def test_int_attribute_that_differs_between_layers():
    class Layer(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.n = n

        def forward(self, x):
            return x * self.n

    compiled, backend = capture(lambda layer, x: layer(x))
    for n in range(2, 14):
        same(compiled(Layer(n), torch.ones(2)), torch.full((2,), float(n)))
    assert len(backend.graphs) == 2


def test_loop_over_a_size_specialises_it():
    def f(x):
        total = x[0]
        for i in range(1, x.shape[0]):
            total = total + x[i]
        return total
    _, backend = run(f, [(torch.randn(n, 2),) for n in (3, 4, 5)], dynamic=True)
    assert len(backend.graphs) == 3


def test_sizes_one_and_zero():
    _, backend = run(lambda x: x.sum(0), [(torch.randn(n, 2),) for n in (4, 5, 1, 0, 6)])
    assert len(backend.graphs) <= 4


def test_symbolic_size_crosses_a_break():
    def f(x):
        n = x.shape[0] * 2
        y = x + 1
        print(end="")
        return y.sum() * n, n
    _, backend = run(f, [(torch.randn(n, 2),) for n in (3, 4, 5, 6)], dynamic=True)
    assert len(backend.graphs) <= 3


def test_marks():
    def f(x):
        return x * 2
    compiled, backend = capture(f)
    for n in (3, 4, 5):
        x = torch.randn(n, 2)
        marks.mark_dynamic(x, 0)
        same(compiled(x), f(x))
    assert len(backend.graphs) == 1
    y = torch.randn(3, 7)
    marks.mark_static(y)
    same(compiled(y), f(y))


def test_a_mark_that_the_program_contradicts():
    def f(x):
        return x.reshape(5, -1) if x.shape[0] == 5 else x
    compiled, _ = capture(f)
    x = torch.randn(5, 2)
    marks.mark_dynamic(x, 0)
    with pytest.raises(ConstraintViolation, match=r"x.size\(0\) was marked as dynamic") as error:
        compiled(x)
    assert "x.shape[0] == 5" in str(error.value)


@pytest.mark.parametrize("expression", ["n // 2", "n % 3", "-n", "n * n - 1", "max(n, 4)", "min(n, 100)", "int(n / 2)", "abs(n)", "n ** 2",
                                        "float(n)", "n if n > 3 else 0", "f'{n}'", "[n] * 2", "n == 4", "divmod(n, 2)", "n + 0.5", "range(n)[-1]"])
def test_arithmetic_on_sizes(expression):
    scope = {}
    exec(f"def f(x):\n    n = x.shape[0]\n    return x, {expression}", scope)
    run(scope["f"], [(torch.randn(n, 2),) for n in (3, 4, 5, 7)], dynamic=True)


def test_compiled_versions_of_a_function_share_what_changed():
    fs.reset()
    counts = []
    for offset in (1.0, 2.0, 3.0):
        def f(x, y):
            return x * y + offset       # noqa: B023

        backend = CompileCounter()
        compiled = fs.compile(f, backend=backend)
        for n, y in ((2, 2.0), (3, 3.0), (4, 4.0)):
            torch.testing.assert_close(compiled(torch.ones(n), y), torch.full((n,), y + offset))
        counts.append(backend.frame_count)
    assert counts == [2, 1, 1]
    fs.reset()
    backend = CompileCounter()
    compiled = fs.compile(f, backend=backend)
    for n in (2, 3):
        compiled(torch.ones(n), 2.0)
    assert backend.frame_count == 2


def test_modules_do_not_share_what_changed():
    class One(nn.Module):
        def forward(self, x):
            return x + 1

    class Two(nn.Module):
        def forward(self, x):
            return x + 2

    counts = []
    for module in (One(), Two()):
        backend = CompileCounter()
        compiled = fs.compile(module, backend=backend)
        for n in (2, 3, 4):
            compiled(torch.ones(n))
        counts.append(backend.frame_count)
    assert counts == [2, 2]


@pytest.mark.parametrize("make", [lambda v: (lambda x: x * v + v), lambda v: (lambda x, scale=v: x * scale)], ids=["closure", "default"])
def test_functions_that_differ_in_a_float_share_graphs(make):
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward
    x = torch.randn(4)
    for n in range(12):
        fn = make(n * 0.31)
        compiled = fs.compile(fn, backend=backend)
        torch.testing.assert_close(compiled(x), fn(x))
    assert len(graphs) <= 3
    isolated = fs.compile(fn, backend=backend, isolate_recompiles=True)
    torch.testing.assert_close(isolated(x), fn(x))
    assert len(graphs) <= 4


def test_a_float_that_decides_costs_its_function_nothing():
    """Each has its own variants where the float cannot be a symbol: none is dropped to eager."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    def make(p):
        return lambda x: torch.full((int(p * 10),), p) + x.sum()
    x = torch.randn(4)
    for n in range(1, 13):
        fn = make(n * 0.1)
        torch.testing.assert_close(fs.compile(fn, backend=backend)(x), fn(x))
    assert not fs.counters["recompile_limit"]
