"""Programs that are wrong, each in its way: one clear message at the user's line, frames of the compiler hidden, the next call works."""
from __future__ import annotations

import functools
import inspect
import os
import threading
import traceback

import pytest
import torch

import firesteel as fs

LOCK = threading.Lock()
OURS = os.path.dirname(fs.__file__)


def good():
    return torch.arange(1.0, 4.0)


def counts_by_data(x):
    for _ in range(int(x.sum())):       # wrong
        x = x + 1
    return x


def asks_a_lock(x):
    return x * 2, not LOCK              # wrong


def mixes_dtypes(x, w=None):
    y = x + 1
    return y if w is None else y @ w    # wrong


def looks_up(table, x):
    return x * table["missing"]         # wrong


def helped(x, table=None):
    y = x + 1
    return y if table is None else looks_up(table, y)


def raises(x, bad=False):
    y = x.sin()
    if bad:
        raise ValueError("my own")      # wrong
    return y


def takes_an_index(x, index=None):
    return x * 2 if index is None else x[index] + 1     # wrong


def again(x):
    return again(x + 1)                 # wrong


def recursive(x, deep=False):
    return again(x) if deep else x * 2


def pairs(x):
    yield x
    yield x + 1


def takes_three(x, count=2):
    numbers = pairs(x)
    return [next(numbers) for _ in range(count)]        # wrong


class Frozen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x, write=False):
        if write:
            self.layer.weight.add_(1)   # wrong
        return self.layer(x)


class Hooked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.armed = torch.nn.Linear(3, 3), False
        self.layer.register_forward_hook(self.look)

    def look(self, module, args, result):
        if self.armed:
            raise OSError("the hook is broken")         # wrong

    def forward(self, x, armed=False):
        self.armed = armed
        return self.layer(x)


def written_to(x, shared=None):
    if shared is not None:
        shared.add_(x)                  # wrong
    return x * 2


# name -> (the program, what is wrong of the call, the error, its text)
CALLS = {
    "an index out of range": (takes_an_index, {"index": torch.tensor([7])}, IndexError, "index 7 is out of bounds"),
    "another dtype": (mixes_dtypes, {"w": torch.ones(3, dtype=torch.float64)}, RuntimeError, "same dtype"),
    "an error of a helper": (helped, {"table": {}}, KeyError, "missing"),
    "an exception": (raises, {"bad": True}, ValueError, "my own"),
    "a recursion without end": (recursive, {"deep": True}, RecursionError, "recursion"),
    "a generator at its end": (takes_three, {"count": 3}, StopIteration, ""),
    "a write to a weight": (Frozen, {"write": True}, RuntimeError, "a leaf Variable that requires grad"),
    "a hook that raises": (Hooked, {"armed": True}, OSError, "the hook is broken"),
    "a write to memory that is shared": (written_to, {"shared": torch.ones(1).expand(3)}, RuntimeError, "single memory location"),
    "a keyword that is none": (raises, {"worse": True}, TypeError, "unexpected keyword argument 'worse'"),
}
# name -> (the program, the error, the hint)
WHOLE = {
    "a loop over data": (counts_by_data, fs.errors.Unsupported, "Keep the value a tensor"),
    "an object of no meaning": (asks_a_lock, fs.errors.Unsupported, "Pass tensors, numbers, containers or modules instead"),
}


def line_of(program):
    """Of the comment that says what is wrong."""
    lines, first = inspect.getsourcelines({"helped": looks_up, "recursive": again}.get(program.__name__, program))
    return next((first + n for n, line in enumerate(lines) if "# wrong" in line), None)


def met(call):
    with pytest.raises(BaseException) as found:        # noqa: B017, PT011  # which one, the caller looks at
        call()
    return found.value


def own_frames(error):
    return [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(OURS) or frame.filename.startswith("<firesteel")]


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_one_message_at_its_line(name):
    fs.reset()
    program, wrong, kind, text = CALLS[name]
    made = program() if isinstance(program, type) else program
    compiled, expected = fs.compile(made), made(good())
    for _ in range(2):                  # while it is compiled, and from its cache
        error = met(functools.partial(compiled, good(), **wrong))
        assert type(error) is kind and text in str(error)
        assert {frame.name for frame in own_frames(error)} <= {"compiled", "call", "call_module"}, own_frames(error)
        if kind is not TypeError:
            assert line_of(program) in [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
        torch.testing.assert_close(compiled(good()), expected)


@pytest.mark.parametrize("name", WHOLE)
def test_what_no_graph_holds_says_what_to_change(name):
    fs.reset()
    program, kind, hint = WHOLE[name]
    error = met(lambda: fs.compile(program, fullgraph=True)(good()))
    assert type(error) is kind and hint in error.hint and error.location.line == line_of(program) and error.location.file == __file__
    assert [frame.name for frame in own_frames(error)] == ["compiled"]
    torch.testing.assert_close(fs.compile(program)(good()), program(good()))


def broken(gm, inputs):
    raise ArithmeticError("no luck")


@pytest.mark.parametrize("backend, text", [(broken, "The backend broken failed on a graph: ArithmeticError: no luck"),
                                           (lambda gm, inputs: 3, "returned int, not a callable"),
                                           (lambda gm, inputs: lambda *args: gm(*args)[0], "returned Tensor; the graph has 1 result."),
                                           (lambda gm, inputs: lambda *args: [*gm(*args), None], "returned list of 2; the graph has 1 result."), ("nonsense", "There is no backend 'nonsense'")])
def test_a_bad_backend_is_named_and_is_not_called_ours(backend, text):
    fs.reset()
    error = met(lambda: fs.compile(raises, backend=backend)(good()))
    assert text in str(error) and not getattr(error, "__notes__", None)
    torch.testing.assert_close(fs.compile(raises)(good()), raises(good()))


def test_a_gradient_hook_that_raises_loses_nothing():
    model = torch.nn.Linear(3, 3)
    handle = model.weight.register_hook(lambda grad: grad / 0 if False else {}["nothing"])
    compiled = fs.compile(model)
    error = met(compiled(good()).sum().backward)
    assert type(error) is KeyError and model.weight.grad is None
    handle.remove()
    model.zero_grad()
    compiled(good()).sum().backward()
    torch.testing.assert_close(model.weight.grad, good().expand(3, 3))


def test_a_value_that_a_backward_needs_is_written():
    compiled, leaf = fs.compile(lambda x: x.square()), good().requires_grad_()
    x = leaf.clone()
    out = compiled(x)
    with torch.no_grad():
        x.add_(1)
    assert "modified by an inplace operation" in str(met(out.sum().backward)) and leaf.grad is None
    compiled(leaf.clone()).sum().backward()
    torch.testing.assert_close(leaf.grad, good() * 2)


@pytest.mark.parametrize("call, kind, text", [
    (lambda: fs.compile(3), fs.errors.UserError, "fs.compile takes a function or a module, not int"),
    (lambda: fs.compile(raises, fullgaph=True), TypeError, "unexpected keyword argument 'fullgaph'"),
    (lambda: fs.compile(raises, mode="fastest"), fs.errors.UserError, "There is no mode 'fastest'"),
    (lambda: setattr(fs.config, "recompile_limt", 3), AttributeError, "no setting 'recompile_limt'"),
    (lambda: setattr(fs.config, "recompile_limit", 0), TypeError, "takes an int from 1, not 0"),
    (lambda: setattr(fs.config, "memory_budget", float("nan")), TypeError, "takes a float from 0 to 1, not nan"),
    (lambda: fs.mark_dynamic(good(), 4), fs.errors.UserError, "no dimension 4"),
    (lambda: fs.set_stance("fast"), fs.errors.UserError, "no stance 'fast'"),
    (lambda: fs.report("/no/such/folder/report.html"), FileNotFoundError, "/no/such/folder/report.html"),
])
def test_a_bad_argument_of_ours_is_named(call, kind, text):
    error = met(call)
    assert type(error) is kind and text in str(error)


def test_frames_of_ours_are_shown_on_request():
    with fs.config.patch(internal_frames=True):
        error = met(lambda: fs.compile(raises)(good(), bad=True))
    assert len(own_frames(error)) > 2


def test_a_bug_of_ours_keeps_its_frames(monkeypatch, tmp_path):
    from firesteel.loops.lower.build import LOWERINGS
    fs.reset()
    monkeypatch.setitem(LOWERINGS._rows, torch.ops.aten.sin.default._name, lambda *args, **kwargs: {}["a bug"])
    with fs.config.patch(cache_dir=str(tmp_path)):
        error = met(lambda: fs.compile(raises)(good()))
    assert type(error) is fs.errors.BackendError and len(own_frames(error)) > 2 and "A program that reproduces it" in error.__notes__[0]


# ---------------------------------------------------------------- backwards

@torch.library.custom_op("bad_programs::twice", mutates_args=())
def op_twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("bad_programs::fails", mutates_args=())
def op_fails(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("my own")


op_twice.register_fake(torch.empty_like)
op_fails.register_fake(torch.empty_like)
op_twice.register_autograd(lambda ctx, gradient: op_fails(gradient))


def fails_in_a_hook(x):
    y = x * 2
    y.register_hook(lambda gradient: {}["nothing"])
    return y * 3


def two_histories(x, y):
    return op_twice(x), y.exp()


def backward_of(program, times=1, **settings):
    x = good().requires_grad_()
    out = fs.compile(program, **settings)(x).sum()
    for _ in range(times):
        out.backward()


def overwritten():
    x = good().requires_grad_().clone()
    out = fs.compile(torch.square)(x).sum()
    with torch.no_grad():
        x.add_(1)
    out.backward()


def compiled_autograd():
    out = fails_in_a_hook(good().requires_grad_()).sum()
    with fs.compiled_autograd():
        out.backward()


BACKWARDS = {
    "an operator of the user's": (lambda: backward_of(op_twice), ValueError), "a hook": (lambda: backward_of(fails_in_a_hook), KeyError),
    "two groups": (lambda: fs.compile(two_histories)(good().requires_grad_(), good().requires_grad_())[0].sum().backward(), ValueError),
    "a second time": (lambda: backward_of(torch.square, 2), RuntimeError), "a saved tensor that was written": (overwritten, RuntimeError),
    "a gradient of a gradient": (lambda: torch.autograd.grad(fs.compile(op_twice)(x := good().requires_grad_()).sum(), x, create_graph=True), ValueError),
    "compiled autograd": (compiled_autograd, KeyError),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_an_error_in_a_backward_has_no_frame_of_ours(name):
    call, kind = BACKWARDS[name]
    for _ in range(2):
        error = met(call)
        assert type(error) is kind and own_frames(error) == []
    with fs.config.patch(internal_frames=True):
        assert own_frames(met(call))


def test_a_bug_of_ours_in_a_backward_keeps_its_frames(monkeypatch):
    from firesteel.autograd import function
    monkeypatch.setattr(function, "unpack_saved", lambda *args: None)
    error = met(lambda: backward_of(torch.square))
    assert type(error) is TypeError and len(own_frames(error)) >= 2
