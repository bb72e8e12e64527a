"""What eager refuses for metadata alone is refused while tracing: all wrong calls of torch's operator database, on abstract tensors."""
import warnings

import pytest
import torch
import torch.nn.functional as F
from graph_compare import abstract
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree

import firesteel as fs
from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.rules.base import RULES
from firesteel.graph.rules.refusals import REFUSALS

# (operator, words of eager's sentence): found at run time only, or about out= tensors.
FOUND_LATER = [
    ("gather", "out of bounds"), ("scatter", "out of bounds"), ("scatter_add", "out of bounds"),        # the data
    ("multinomial", "probability"), ("multinomial", "invalid multinomial distribution"),
    ("as_strided_scatter", "setStorage"), ("histogramdd", "size of bins"),
    ("arange", "step must be nonzero"), ("aminmax", "out tensor"), ("gather", "out tensor"), ("complex", "'out'"), ("amax", "and out"), ("amin", "and out"), ("multinomial", "tensor out"),
    ("", "more than one element of the written-to tensor"), ("", "some elements of the input tensor and the written-to tensor"),
]
OPERATORS = [op for op in database.op_db if op.error_inputs_func is not None]


def is_strided(value):
    return not any(isinstance(t, torch.Tensor) and (t.layout != torch.strided or t.is_quantized) for t in pytree.tree_leaves(value))


def error_of(op, args, kwargs):
    try:
        op(*args, **kwargs)
    except Exception as error:
        return error
    return None


def wrong_calls(op):
    """(arguments, eager's error)"""
    for wrong in op.error_inputs("cpu"):
        sample = wrong.sample_input
        call = ((sample.input, *sample.args), sample.kwargs)
        error = error_of(op, *call) if is_strided(call) else None
        if error is not None:
            yield call, error


@pytest.mark.parametrize("part", range(8))
def test_wrong_calls_are_refused_while_tracing(part):
    accepted = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in OPERATORS[part::8]:
            for call, error in wrong_calls(op):
                world = AbstractWorld()
                args, kwargs = abstract(world, call)
                with world.active():
                    found = error_of(op, args, kwargs)
                if found is None and not any(name in ("", op.name) and words in str(error) for name, words in FOUND_LATER):
                    accepted.append(f"{op.name}: {error}")
    assert not accepted, "\n".join(accepted)


def test_refusals_belong_to_rules():
    assert not [op for op in REFUSALS if op not in RULES]


WRONG = {
    "a kernel that does not know the dtype": lambda x: x.bool().neg(),
    "a bool difference": lambda x: x.bool() - x.bool(),
    "a complex order": lambda x: x.to(torch.complex64).clamp(0),
    "bits of floats": lambda x: x & 1,
    "a reduction without order": lambda x: x.to(torch.complex64).amax(0),
    "mixed parameters": lambda x: F.layer_norm(x, (6,), torch.zeros(6, dtype=torch.float64)),
    "a format of another rank": lambda x: x.to(memory_format=torch.channels_last),
    "classes that are no numbers": lambda x: F.cross_entropy(x, x[:, 0]),
    "an exact out": lambda x: torch.amax(x, 0, out=torch.zeros(6, dtype=torch.int32)),
    "a copy onto itself": lambda x: (y := x[:, :4].clone()).copy_(y.t()),
    "no pixels": lambda x: F.interpolate(x[None, None], size=(0, 3)),
    "least squares of other rows": lambda x: torch.linalg.lstsq(x, x.t())[0],
    "least squares of another batch": lambda x: torch.linalg.lstsq(x[None], x[:2, None, :4])[0],
}


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize("name", WRONG)
def test_the_sentence_is_eagers_and_the_next_call_works(name, backend):
    def program(x, wrong):
        return WRONG[name](x) if wrong else x + 1
    x = torch.rand(4, 6)
    with pytest.raises(Exception) as eager:
        program(x, True)
    compiled = fs.compile(program, backend=backend)
    with pytest.raises(eager.type) as ours:
        compiled(x, True)
    assert str(ours.value) == str(eager.value)
    assert torch.equal(compiled(x, False), x + 1)
