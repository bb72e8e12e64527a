"""What the sources know by name only (functions and classes of torch and of the peer, modules, attributes, operators) is there under that name: a name
that nothing has any more makes a check that never speaks."""
import ast
import importlib
import pathlib

import pytest
import torch

import firesteel
from firesteel.capture import builder, machine, meanings, native_guards, source, torch_objects
from firesteel.capture.values import class_statements, functions, tensor, torch_calls
from firesteel.graph import random_state, recurrent_library
from firesteel.graph.autofunctional import functional_form
from firesteel.operators import FACETS, find

SRC = pathlib.Path(firesteel.__file__).parent


def resolve(name):
    """The object of a full name, by its longest module."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize("name", [*meanings.BY_NAME, *builder.BY_CLASS])
def test_callables_and_classes(name):
    found = resolve(name)
    assert f"{found.__module__}.{found.__qualname__}" == name, "it is looked for by its own name"


def test_functions_that_transforms_make():
    made = {getattr(torch.func, name)(torch.sin).__code__.co_qualname for name in ("grad", "grad_and_value", "vmap", "jacrev", "jacfwd")}
    assert set(functions.TRANSFORMED) == made


MODULES = {*meanings.PYTHON_MODULES, *meanings.NATIVE_MODULES, *builder.CHANGING, *class_statements.KNOWN_HOOKS}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules(name):
    if name in meanings.WITHOUT_TENSORS:
        pytest.importorskip(name)
    assert resolve(name) if "." in name else importlib.import_module(name)


OF_TENSORS = (set(tensor.BREAKING) | tensor.GRAPH_ATTRIBUTES | set(tensor.TENSOR_METHODS) | set(tensor.TENSOR_STORES)
              | torch_calls.READS_OFFSET - {"as_strided_copy"})


@pytest.mark.parametrize("name", sorted(OF_TENSORS))
def test_attributes_of_tensors(name):
    assert hasattr(torch.Tensor, name)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older releases lack some")
@pytest.mark.parametrize("name", sorted({name for names in meanings.STATE_QUERIES.values() for name in names.split()}))
def test_states_of_torch(name):
    stubs = pathlib.Path(torch.__file__).parent.joinpath("_C").rglob("*.pyi")       # a build lacks the functions of other devices
    assert any(hasattr(home, name) for home in meanings.STATE_QUERIES) or any(f"def {name}(" in stub.read_text() for stub in stubs) or name in UNSTUBBED


UNSTUBBED = {"_cuda_isInBadFork", "_cuda_hasPrimaryContext", "_cuda_isCurrentStreamCapturing", "_xpu_isInBadFork"}      # torch.cuda calls them


def test_tables_of_modules():
    assert {*source.MODULE_TABLES, *source.MODULE_HOOKS} <= set(vars(torch.nn.Linear(1, 1)))


# operators of other torch versions
# and those that a module of torch defines when it is imported
ELSEWHERE: set[str] = {"_c10d_functional::_wrap_tensor_autograd"}


@pytest.mark.parametrize("facet", FACETS, ids=lambda facet: facet.name)
def test_operators(facet):
    recurrent_library.operators()       # ours are defined at their first use
    random_state.operators()
    for written in (torch.ops.aten.bernoulli_.float, getattr(torch.ops.aten.random_, "from")):
        functional_form(written)
    known = [name if "." in name else f"{name}." for name in torch._C._dispatch_get_all_op_names()]
    assert {name for name in facet._rows if isinstance(name, str) and find(name) is None} <= ELSEWHERE
    assert [start for start in facet.patterns if not any(name.startswith(start) for name in known)] == []


def test_functions_of_python():
    assert len(native_guards._functions()) == len(native_guards.FUNCTIONS)


def names_of_types_compared(tree):
    """Lines that tell a class by the text of its name."""
    for node in ast.walk(tree):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        of_type = [side for side in sides if isinstance(side, ast.Attribute) and side.attr in ("__name__", "__qualname__") and isinstance(side.value, ast.Call)
                   and getattr(side.value.func, "id", "") == "type"]
        if of_type and any(isinstance(side, (ast.Constant, ast.Tuple)) for side in sides):
            yield node.lineno


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_classes_are_compared_and_not_their_names(path):
    assert not list(names_of_types_compared(ast.parse(path.read_text())))


def test_such_a_line_would_be_found():
    assert list(names_of_types_compared(ast.parse('type(fn).__name__ == "AccumulateGrad"'))) == [1]
    assert machine and torch_objects     # imported, so that every table is full
