"""Each kind of graph break: one split with eager's values, a record with sentence, the user's line and a hint; fullgraph=True raises the same text."""
import pathlib
import re
import sys
import threading

import numpy as np
import pytest
import torch

import firesteel as fs
from firesteel.artifacts import breaks
from firesteel.errors import BREAKS, FiresteelError

LOCK = threading.Lock()


@fs.disable(reason="it logs")
def disabled(x):
    return x + 1


def recursive(x, n):
    return x if n == 0 else recursive(x, n - 1) + 1     # deep


def opcode(x):
    y = x + 1
    import colorsys  # an import is an effect
    return y * 2, colorsys.__name__


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
    if y.sum() > 0:                                     # data decides
        return y * 2
    return y * 3


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
    z = np.sort(y.numpy())                              # NumPy
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
    with LOCK:                                          # a context
        y = y * 2
    return y + 1


def depth(x):
    y = x + 1
    return recursive(y, 250)


# kind -> (program, what the sentence says)
PROGRAMS = {
    "opcode": (opcode, "import of colorsys"), "call": (call, "getcwd"), "output": (output, "print writes output"),
    "asked": (asked, "for a reason"), "disabled": (is_disabled, "disabled is marked with fs.disable: it logs"),
    "data_branch": (data_branch, "A branch depends on the data"), "data_scalar": (data_scalar, "Tensor.item"),
    "data_read": (data_read, "tensor_split reads the data"), "argument": (argument, "of type Tensor as an argument"), "numpy": (numpy_data, "numpy.sort"),
    "data_shape": (data_shape, "nonzero"), "attribute": (attribute, "_version"), "object": (unknown_object, "lock"),
    "constant": (constant, "tensor (3,) torch.float32 is not while capturing"), "operator": (an_operator, "memoryview"), "store": (store, "attribute cpu"), "iterate": (iterate, "memoryview"),
    "abstract_failure": (abstract_failure, "failing failed on abstract tensors"), "context": (context, "lock"), "depth": (depth, "nested deeper"),
}


def flat(out):
    return [t for item in out for t in flat(item)] if isinstance(out, tuple) else [out]


def test_every_kind_has_a_program():
    assert set(PROGRAMS) == set(BREAKS)


@pytest.mark.parametrize("kind", list(PROGRAMS))
def test_break(kind, capsys):
    program, words = PROGRAMS[kind]
    sys.modules.pop("colorsys", None)
    x = torch.ones(3)
    want = flat(program(x))
    sys.modules.pop("colorsys", None)
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
    sys.modules.pop("colorsys", None)
    breaks.clear()
    x = torch.ones(3)
    fs.compile(program, backend="eager")(x)
    record = breaks[0]
    sys.modules.pop("colorsys", None)
    with pytest.raises(FiresteelError) as error:
        fs.compile(program, backend="eager", fullgraph=True)(x)
    text = str(error.value)
    if kind not in ("data_shape",):         # says which question was asked, in a DataDependentError
        assert text.startswith(record.reason)
        assert record.hint in text
    assert __file__ in text and record.location.split(" in ")[0] in text
    assert "#" in error.value.location.source() and error.value.location.source() in text       # the lines that break are marked so
