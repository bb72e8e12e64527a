"""The same samples through compiled kernels: printers and interpreter must agree on the one table.

All samples of an operator make one graph, so that they are compiled together.
"""
import pytest
import torch
import torch.utils._pytree as pytree
from optable import SAMPLES, graph_of, one_op_graph

from firesteel.pipeline import compile_native

MOST = 12       # samples of an operator: enough to meet each layout and dtype once


def spread(samples):
    """Up to MOST samples, evenly over the list."""
    step = max(1, -(-len(samples) // MOST))
    return samples[::step]


def together(samples):
    """One graph of all samples: (graph, inputs, eager's results)."""
    made = [pytree.tree_flatten(sample.make()) for sample in samples]
    inputs = [leaf for leaves, _ in made for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def build(call, *nodes):
        rest, outputs = iter(nodes), []
        for sample, (leaves, tree) in zip(samples, made):
            args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree)
            outputs.append(call(sample.op, *args, **kwargs))
        return tuple(outputs)
    gm, expected = graph_of(build, inputs)
    return gm, inputs, list(expected)


@pytest.mark.parametrize("op", list(SAMPLES), ids=str)
def test_kernels_agree_with_eager(op):
    samples = spread(SAMPLES[op])
    args, kwargs = samples[0].make()
    if isinstance(op(*args, **kwargs), (tuple, list)):
        cases = [one_op_graph(sample) for sample in samples]
    else:
        cases = [together(samples)]
    for gm, inputs, expected in cases:
        actual = compile_native(gm, inputs)(*inputs)
        for got, want in zip(actual, expected, strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)
            assert got.stride() == want.stride() and got.dtype is want.dtype
