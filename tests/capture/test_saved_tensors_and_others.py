"""Programs of users in one graph: hooks on saved tensors, scripted modules, comparisons of versions, questions about the thread."""
import collections
import copy
import io
import pickle
import threading

import pytest
import torch

import firesteel as fs
from firesteel.testing import CompileCounter

X = torch.linspace(-1, 2, 12).reshape(3, 4)


def one_graph(f, *args):
    counter = CompileCounter()
    got = fs.compile(f, backend=counter, fullgraph=True)(*args)
    torch.testing.assert_close(got, f(*args))
    assert counter.frame_count == 1


# -- hooks on saved tensors ---------------------------------------------------------------------------------------------
def with_hooks(x):
    y = x.cos()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = y.sin() * x.exp()
    return y.tanh()


SEEN = []


def pack(tensor):
    SEEN.append("pack")
    return tensor * 2


def unpack(packed):
    SEEN.append("unpack")
    return packed / 2


def made_inside(x):
    scale = 3
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * scale, lambda t: t / scale):
        return (x.sin() * x).exp()


def on_the_cpu(x):
    with torch.autograd.graph.save_on_cpu():
        y = x.sin() * x
    return y * y


@pytest.mark.parametrize("program", [with_hooks, made_inside, on_the_cpu], ids=lambda f: f.__name__)
def test_saved_tensors_hooks_entered_inside(program):
    compiled = fs.compile(program, fullgraph=True)
    for _ in range(2):
        results = []
        for f in (program, compiled):
            SEEN.clear()
            x = X.clone().requires_grad_()
            out = f(x)
            results.append((out.detach(), torch.autograd.grad(out.sum(), x)))
            assert (program is not with_hooks) or SEEN.count("pack") == SEEN.count("unpack") > 0
        torch.testing.assert_close(results[1], results[0])


def test_hooks_are_gone_behind_the_block():
    compiled = fs.compile(with_hooks, fullgraph=True)
    compiled(X.clone().requires_grad_())
    SEEN.clear()
    X.clone().requires_grad_().sin()
    assert not SEEN


# -- scripted modules ---------------------------------------------------------------------------------------------------
def loaded(module):
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: loaded(torch.jit.script(m)), lambda m: torch.jit.trace(m, X)],
                         ids=["scripted", "loaded", "traced"])
def test_a_scripted_module_is_one_call(make):
    inner = make(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), inner, torch.nn.Linear(4, 2))
    counter = CompileCounter()
    one_graph(model, X)
    compiled = fs.compile(model, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(X).sum(), list(model.parameters())),
                               torch.autograd.grad(model(X).sum(), list(model.parameters())))
    fs.compile(model, backend=counter, fullgraph=True)(X)
    assert counter.op_count == 3


@pytest.mark.filterwarnings("ignore")
def test_state_of_a_scripted_module_changes_once_a_call():
    eager = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    ours, theirs = (torch.jit.script(copy.deepcopy(eager)) for _ in range(2))
    compiled = fs.compile(lambda x: ours(x).sin(), fullgraph=True)
    for seed in range(3):
        results = []
        for f in (lambda x: theirs(x).sin(), compiled):
            torch.manual_seed(seed)
            results.append(f(X))
        torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(list(ours.buffers()), list(theirs.buffers()))


class Doubled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        if bool(x.sum() > 0):
            x = self.linear(x)
        return x * 2 if bool((x > -1).all()) else x + self.linear(x)


class Narrower(torch.nn.Module):
    def forward(self, x):
        return x + 1 if bool(x.sum() > 0) else x[:1]


class Itself(torch.nn.Module):
    def forward(self, x):
        return x if bool(x.sum() > 0) else x * 2


class Grown(torch.nn.Module):
    def forward(self, x):
        while bool(x.abs().sum() < 100):
            x = x * 2
        return x


def called_by(inner):
    def run(x):
        y = x.sin()
        z = inner(y)
        return y + (z is y), z.cos()
    return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make, breaks", [(Doubled, False), (Narrower, True), (Itself, True), (Grown, True)])
def test_a_scripted_module_that_branches_on_data(make, breaks):
    """One call where every way gives the same kind of tensor; a break where not."""
    fs.reset()
    run = called_by(torch.jit.script(make()))
    compiled = fs.compile(run, fullgraph=not breaks)
    for rows in (3, 3, 5, 6):
        for sign in (1, -1, 0.1):
            x = (sign * torch.rand(rows, 4, dtype=torch.float64)).requires_grad_()      # doubling eight times makes roundings of single precision count
            ours, theirs = compiled(x), run(x)
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(torch.autograd.grad(sum(o.sum() for o in ours), x), torch.autograd.grad(sum(o.sum() for o in theirs), x))
    assert breaks or fs.counters["stats"]["unique_graphs"] == 2


# -- small things -------------------------------------------------------------------------------------------------------
def versions(x):
    if torch.__version__ >= (2, 0):
        x = x + 1
    if torch.__version__ == (1, 0):
        x = x * 100
    return x * 2 if (1, x.shape[0]) < (2, 0) else x


def pickled(x):
    return x + len(pickle.dumps((1, "a")))


def thread(x):
    return x + len({threading.get_ident(): 1})


def ordered(x):
    for value in collections.OrderedDict(a=1, b=2).values():
        x = x * value
    return x


@pytest.mark.parametrize("program", [versions, pickled, thread, ordered], ids=lambda f: f.__name__)
def test_small_things(program):
    one_graph(program, X)
