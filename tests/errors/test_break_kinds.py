"""Each kind of graph break: one split with eager's values, a record with sentence, the user's line and a hint; fullgraph=True raises the same text."""
import ast
import copy
import dataclasses
import decimal
import functools
import multiprocessing
import os
import pathlib
import re
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import firesteel as fs
from firesteel.artifacts import breaks
from firesteel.capture.values.tensor import BREAKING
from firesteel.errors import BREAKS, FiresteelError

LOCK = threading.Lock()
SEMAPHORE = multiprocessing.Lock()._semlock


@fs.disable(reason="it logs")
def disabled(x):
    return x + 1


def recursive(x, n):
    return x if n == 0 else recursive(x, n - 1) + 1     # deep


def opcode(x):
    y = x + 1
    try:
        import no_such_module  # noqa: F401  (an import that fails)
    except ImportError:
        return y * 2


def call(x):
    y = x + 1
    where = pathlib.os.getcwd()                         # the world outside
    return y * 2, where


def output(x):
    y = x + 1
    print("shown")                                      # output
    return y * 2


def asked(x):
    y = x + 1
    fs.graph_break("for a reason")                      # asked for
    return y * 2


def is_disabled(x):
    return disabled(x * 2) * 3                          # disabled


def data_branch(x):
    y = x + 1
    if y.sum() > 0:                                     # data decides on the shape
        return y * 2
    return y[0] * 3


def data_scalar(x):
    y = x + 1
    n = y.sum().item()                                  # a number
    return y * n


def data_read(x):
    y = x + 1
    parts = torch.tensor_split(y, y.long()[:1] - 1)     # places by data
    return y * 2, *parts


def argument(x):
    y = x + 1
    z = torch.add(y, SPARSE)                            # an argument
    return y * 2 + z


SPARSE = torch.ones(3).to_sparse()


def numpy_data(x):
    y = x + 1
    z = np.unwrap(y.numpy())                            # NumPy
    return y * 2 + torch.from_numpy(z)


def data_shape(x):
    y = x + 1
    z = y.nonzero()                                     # size by data
    return y * 2, z + 1


def attribute(x):
    y = x + 1
    version = y._version                                # an attribute
    return y * 2, version >= 0


def unknown_object(x):
    y = x + 1
    flag = not LOCK                                     # an object
    return y * 2, flag


def constant(x):
    y = x + 1
    text = format(y)                                    # a text of data
    return y * 2, text


def an_operator(x):
    y = x + 1
    size = OPAQUE[1]                                    # an operator
    return y * 2, size


OPAQUE = memoryview(b"abcd")


def store(x):
    y = x + 1
    y.cpu = None                                        # a store
    return y * 2


def iterate(x):
    y = x + 1
    total = sum(OPAQUE)                                 # iteration
    return y * 2 + total


def abstract_failure(x):
    y = x + 1
    z = failing(y)                                      # no rule
    return y * 2 + z


@fs.allow_in_graph
def failing(x):
    return x if type(x) is torch.Tensor else x.no_such_method()


def context(x):
    y = x + 1
    with SEMAPHORE:                                     # a context
        y = y * 2
    return y + 1


def region(x):
    y = x + 1
    return checkpoint(is_disabled, y, use_reentrant=False) * 2          # a region


def depth(x):
    y = x + 1
    return recursive(y, 250)


@fs.forbid_in_graph
def unwelcome(x):
    return x * 2


def forbidden(x):
    y = x + 1
    return unwelcome(y) * 3                             # forbidden


def introspection(x):
    y = x + 1
    names = dir(y)                                      # what it has
    return y * 2, names


def outside(x):
    y = x + 1
    with open(os.devnull):                              # a file
        return y * 2


def warning(x):
    y = x + 1
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn("careful", stacklevel=1)          # recorded
    return y * 2, len(seen)


def code(x):
    y = x + 1
    made = compile("1 + 1", "<made>", "eval")           # code
    return y * 2, made.co_name


SEEN = []


@functools.cache
def remembered(n):
    SEEN.append(n)
    return n


def cache(x):
    y = x + 1
    n = remembered(3)                                   # a cache
    return y * n


def arguments(x):
    y = x + 1
    try:
        y = unwelcome_not(y, y)                         # one too many
    except TypeError:
        pass
    return y * 2


def unwelcome_not(x):
    return x


def instance(x):
    y = x + 1
    number = decimal.Decimal(3)                         # an instance
    return y * 2, number


class Point:
    x: int


def class_making(x):
    y = x + 1
    made = dataclasses.dataclass(Point)                 # a class
    return y * 2, made.__name__


class Slotted:
    __slots__ = ("a",)


SLOTTED = Slotted()


def a_copy(x):
    y = x + 1
    twin = copy.copy(SLOTTED)                           # a copy
    return y * 2, type(twin).__name__


def counting(x):
    yield x


def generator(x):
    y = x + 1
    try:
        counting(y).throw(3)                            # no exception
    except TypeError:
        pass
    return y * 2


async def waiting():
    pass


def coroutine(x):
    y = x + 1
    made = waiting()                                    # a coroutine
    made.close()
    return y * 2


def own_name():
    return sys._getframe(0).f_code.co_name


def frames(x):
    y = x + 1
    name = own_name()                                   # frames
    return y * 2, name


def storage(x):
    y = x + 1
    held = y.untyped_storage()                          # a storage
    return y * 2, held.nbytes()


def torch_state(x):
    y = x + 1
    torch._C._set_warnAlways(False)                     # a state
    return y * 2


GENERATOR = torch.Generator()


def random_state(x):
    y = x + 1
    GENERATOR.clone_state()                             # a generator
    return y * 2


def a_leaf(x):
    y = x + 1
    p = torch.nn.Parameter(y[:1].expand(3))             # a leaf
    return y * 2, p.detach()


LEAF = torch.ones(3, requires_grad=True)
HISTORY = LEAF * 2


def gradient(x):
    y = x + 1
    z = (HISTORY * y).sum()
    return y * 2, *torch.autograd.grad(z, LEAF, retain_graph=True)      # a gradient


MODULE = torch.nn.ReLU()


def a_hook(x):
    y = x + 1
    handle = MODULE.register_backward_hook(unwelcome_not)       # a hook
    handle.remove()
    return y * 2


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        SEEN.append(1)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def autograd_function(x):
    y = x + 1
    z = Noting.apply(LEAF)                              # a function
    return y * 2, z.detach()


def noting(x):
    SEEN.append(1)
    return x * 2


def transform(x):
    y = x + 1
    z = torch.vmap(noting)(y)                           # a transform
    return y * 2, z


class Sub(torch.Tensor):
    pass


def override(x):
    y = x + 1
    z = torch.Tensor._make_subclass(Sub, y, True)       # a subclass
    return y * 2, z.as_subclass(torch.Tensor).detach()


def an_array(x):
    y = x + 1
    z = torch.asarray(y.numpy(), copy=True)             # an array
    return y * 2, z.shape


# kind -> (program, what the sentence says)
PROGRAMS = {
    "opcode": (opcode, "import of no_such_module"), "call": (call, "getcwd"), "output": (output, "print writes output"),
    "asked": (asked, "for a reason"), "disabled": (is_disabled, "disabled is marked with fs.disable: it logs"),
    "data_branch": (data_branch, "A branch depends on the data"), "data_scalar": (data_scalar, "Tensor.item"),
    "data_read": (data_read, "tensor_split reads the data"), "argument": (argument, "of type Tensor as an argument"), "numpy": (numpy_data, "numpy.unwrap"),
    "data_shape": (data_shape, "nonzero"), "attribute": (attribute, "_version"), "object": (unknown_object, "lock"),
    "constant": (constant, "tensor (3,) torch.float32 is not while capturing"), "operator": (an_operator, "memoryview"), "store": (store, "attribute cpu"), "iterate": (iterate, "memoryview"),
    "abstract_failure": (abstract_failure, "failing failed on abstract tensors"), "context": (context, "SemLock"), "region": (region, "left to eager's checkpointing"), "depth": (depth, "nested deeper"),
    "forbidden": (forbidden, "unwelcome is marked"), "introspection": (introspection, "dir"), "outside": (outside, "open"), "warning": (warning, "warn"),
    "code": (code, "compile"), "cache": (cache, "remembered"), "arguments": (arguments, "unwelcome_not"), "instance": (instance, "Decimal"),
    "class_making": (class_making, "dataclass"), "copy": (a_copy, "slots"), "generator": (generator, "throw"), "coroutine": (coroutine, "waiting"),
    "frames": (frames, "own_name"), "storage": (storage, "Tensor.untyped_storage"), "torch_state": (torch_state, "_set_warnAlways"),
    "random_state": (random_state, "clone_state"), "leaf": (a_leaf, "not dense"), "gradient": (gradient, "history from before"),
    "hook": (a_hook, "register_backward_hook"), "autograd_function": (autograd_function, "changes objects"), "transform": (transform, "changes objects"),
    "override": (override, "_make_subclass"), "array": (an_array, "torch.asarray"),
}


def flat(out):
    return [t for item in out for t in flat(item)] if isinstance(out, tuple) else [out]


def test_every_kind_has_a_program():
    assert set(PROGRAMS) == set(BREAKS)


def kinds_raised():
    """The kinds that the sources write: Break("..."), and rows of tables of meanings."""
    for path in pathlib.Path(fs.__file__).parent.joinpath("capture").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Break", "breaks", "Meaning"):
                yield from (part.value for arg in node.args for part in ast.walk(arg) if isinstance(part, ast.Constant))


def test_every_kind_is_raised_and_has_a_hint():
    assert set(BREAKS) <= {*kinds_raised(), *BREAKING.values()}
    assert all(row.sentence and row.hint for row in BREAKS.values())


@pytest.mark.parametrize("kind", list(PROGRAMS))
def test_break(kind, capsys):
    program, words = PROGRAMS[kind]
    x = torch.ones(3)
    want = flat(program(x))
    counter = fs.testing.CompileCounter()
    breaks.clear()
    got = flat(fs.compile(program, backend=counter)(x))
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(got, want, strict=True))
    record = breaks[0]
    assert words in record.reason and record.hint == BREAKS[kind].hint
    assert counter.frame_count >= 1
    pattern = re.escape(BREAKS[kind].sentence).replace(r"\{", "{").replace(r"\}", "}")
    assert re.fullmatch(re.sub(r"\{\w+\}", ".*", pattern), record.reason, re.DOTALL)


@pytest.mark.parametrize("kind", [kind for kind in PROGRAMS if kind != "abstract_failure"])
def test_fullgraph_raises_the_same_text(kind):
    program, words = PROGRAMS[kind]
    breaks.clear()
    x = torch.ones(3)
    fs.compile(program, backend="eager")(x)
    record = breaks[0]
    with pytest.raises(FiresteelError) as error:
        fs.compile(program, backend="eager", fullgraph=True)(x)
    text = str(error.value)
    if kind not in ("data_shape",):         # says which question was asked, in a DataDependentError
        assert text.startswith(record.reason)
        assert record.hint in text
    assert __file__ in text and record.location.split(" in ")[0] in text
    assert "#" in error.value.location.source() and error.value.location.source() in text       # the lines that break are marked so
