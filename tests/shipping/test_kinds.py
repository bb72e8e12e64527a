"""Packages with a backward: gradients, random numbers, written buffers and training loops, against eager."""
import copy
import platform
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import firesteel as fs
from firesteel.errors import PackageError

pytestmark = pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="packages are for x86-64")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 12, bias=False), torch.nn.BatchNorm1d(12)     # of a bias before a norm the gradient is noise
        self.last = torch.nn.Linear(12, 3)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x, keep=None):
        h = F.dropout(F.silu(self.norm(self.first(x))), 0.2)
        return self.last(h) + self.frozen, h.detach(), x * 2


def packaged(model, args, path, **settings):
    fs.package(model, args, path, **settings)
    return fs.load(path)


def close(a, b):
    assert (a is None) == (b is None)
    if a is not None:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def gradients(model, x, seed, use):
    torch.manual_seed(seed)
    model.zero_grad()
    x = x.clone().requires_grad_()
    results = model(x)
    use(results).backward()
    return [*[t.detach() for t in results], x.grad, *[p.grad for p in model.parameters()]]


USES = {"the first result": lambda r: r[0].square().sum(), "two results": lambda r: r[0].mean() + (r[2] ** 3).sum(), "the last": lambda r: r[2].sum()}


@pytest.mark.parametrize("use", USES)
def test_gradients_are_eagers(use, tmp_path):
    torch.manual_seed(0)        # two rows may lie so close that their norm is mostly rounding
    model = Net()
    program = packaged(model, (torch.randn(5, 6, requires_grad=True),), tmp_path / "p", dynamic={"x": {0: (2, 40)}})
    assert [p.requires_grad for p in program.parameters()] == [p.requires_grad for p in model.parameters()]
    for rows in (5, 2, 33):
        x = torch.randn(rows, 6)
        for a, b in zip(gradients(program, x, rows, USES[use]), gradients(model, x, rows, USES[use]), strict=True):
            close(a, b)
    for a, b in zip(program.buffers(), model.buffers(), strict=True):
        close(a, b)
    assert not program(x)[1].requires_grad and program(x)[0].requires_grad
    with torch.no_grad():
        assert not program(x)[0].requires_grad


def test_a_training_loop(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 2))
    program = packaged(model, (torch.randn(8, 4),), tmp_path / "p")
    data = torch.randn(8, 4), torch.randint(0, 2, (8,))
    losses = []
    for trained in (model, program):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.02)
        losses.append([])
        for _ in range(15):
            optimizer.zero_grad()
            loss = F.cross_entropy(trained(data[0]), data[1])
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0][-1] < losses[0][0]
    model.load_state_dict(program.state_dict())


def test_views_and_writes_with_a_history(tmp_path):
    def program(x, y):
        z = y * 2
        z[0] = x.sum()
        y.mul_(3)
        return z.t(), z, y, x[1:]
    loaded = packaged(program, (torch.randn(3, requires_grad=True), torch.randn(2, 3)), tmp_path / "p")
    outcomes = []
    for run in (program, loaded):
        torch.manual_seed(0)
        x, y = torch.randn(3, requires_grad=True), torch.randn(2, 3)
        results = run(x, y)
        assert results[2] is y and results[3]._base is x and results[0]._base is results[1]
        (results[0].sum() + results[3].prod()).backward()
        outcomes.append([*[r.detach() for r in results], x.grad, y])
    for a, b in zip(*outcomes, strict=True):
        close(a, b)


def test_the_graph_is_freed_and_kept_as_eagers(tmp_path):
    program = packaged(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sigmoid()), (torch.randn(2, 3),), tmp_path / "p")
    loss = program(torch.randn(2, 3)).sum()
    loss.backward(retain_graph=True)
    first = next(program.parameters()).grad.clone()
    loss.backward()
    close(next(program.parameters()).grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_gradients_are_refused(tmp_path):
    program = packaged(lambda x: x.exp().sum(), (torch.randn(3, requires_grad=True),), tmp_path / "p")
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(PackageError, match="gradient of a gradient"):
        torch.autograd.grad(program(x), x, create_graph=True)


def test_an_argument_that_had_no_gradient(tmp_path):
    program = packaged(torch.nn.Linear(3, 3), (torch.randn(2, 3),), tmp_path / "p")
    with pytest.raises(PackageError, match="input requires a gradient; the package was recorded for input without a gradient"):
        program(torch.randn(2, 3, requires_grad=True))


def test_a_whole_training_step_is_refused(tmp_path):
    model = torch.nn.Linear(3, 3)

    def step(x):
        model(x).sum().backward()
        return x * 2
    with pytest.raises(fs.errors.FiresteelError, match="changes"):
        fs.package(step, (torch.randn(2, 3),), tmp_path / "p")
    held = copy.deepcopy(model)

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = held

        def forward(self, x):
            self.model(x).sum().backward()
            return x * 2
    with pytest.raises(fs.errors.FiresteelError, match="changes"):
        fs.package(Step(), (torch.randn(2, 3),), tmp_path / "p")
    assert held.weight.grad is None


FRESH = """
import sys, torch, firesteel as fs
program, x = fs.load(sys.argv[1]), torch.load(sys.argv[2])
program(x).square().sum().backward()
torch.save([p.grad for p in program.parameters()], sys.argv[3])
heavy = [m for m in sys.modules if m.split(".")[0] in ("llvmlite", "triton", "sympy") or m in ("firesteel.pipeline", "firesteel.graph.trace")]
assert not heavy, heavy
"""


def test_a_fresh_process_trains_without_a_compiler(tmp_path):
    model, x = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.GELU(), torch.nn.Linear(12, 3)), torch.randn(7, 6)
    fs.package(model, (torch.randn(3, 6),), tmp_path / "p", dynamic={0: {0: True}})
    torch.save(x, tmp_path / "in")
    done = subprocess.run([sys.executable, "-c", FRESH, tmp_path / "p", tmp_path / "in", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model(x).square().sum().backward()
    for a, b in zip(torch.load(tmp_path / "out"), [p.grad for p in model.parameters()], strict=True):
        close(a, b)
