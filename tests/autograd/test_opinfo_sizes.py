"""Torch's operator database with symbolic sizes: one graph serves all sizes, with eager's values and gradients.

What needs more graphs stands in GRAPHS, what fixes sizes in SPECIALIZED, what is not captured as one graph in REFUSED; these lists only shrink.  A run
checks one sample of an eighth of the operators; FIRESTEEL_FULL_SWEEP=1 checks twelve samples of each.
"""
import os

import opinfo_checks as checks
import opinfo_sizes as sizes
import pytest

import firesteel as fs

FULL = bool(os.environ.get("FIRESTEEL_FULL_SWEEP"))
BLOCKS = 8

# operator -> why a size is fixed
SPECIALIZED = {
    "linalg.householder_product": "the C++ code of its gradient is a loop over the columns",
    "ormqr": "as linalg.householder_product",
    "as_strided_copy": "the C++ code of the gradient of places that overlap counts them with plain numbers",
}

# operator -> why sizes need more than one graph
GRAPHS = {
    "chunk": "how many parts there are depends on the size",
    "unsafe_chunk": "as chunk",
    "split": "as chunk",
    "unsafe_split": "as chunk",
    "unbind": "as chunk",
    "unbind_copy": "as chunk",
    "nn.functional.linear_cross_entropy.chunked": "a loop over parts of the batch",
    "nn.functional.linear_cross_entropy.chunked_none": "a loop over parts of the batch",
    "nn.functional.fractional_max_pool2d": "its signature takes the output size as plain numbers, which here follow from the input's",
    "nn.functional.fractional_max_pool3d": "as nn.functional.fractional_max_pool2d",
    "as_strided.partial_views": "places are counted from the start of a storage in which other samples lie elsewhere",
    # two graphs, for an eager algorithm that is another one for the smallest of the sizes
    "istft": "frames that fill their storage", "nn.functional.conv2d": "one element in a channel", "nn.functional.conv3d": "one element in a channel",
    "cumulative_trapezoid": "a single step", "fft.hfft": "no inner frequency", "fft.hfft2": "no inner frequency", "fft.hfftn": "no inner frequency",
    "fft.irfft": "no inner frequency", "fft.irfft2": "no inner frequency", "fft.irfftn": "no inner frequency",
    "nn.functional.glu": "a half of one element", "gradient": "no inner place",
}

# operator -> what a graph cannot hold
REFUSED = {
    "allclose": "returns a Python bool that data tells", "equal": "returns a Python bool that data tells",
    "cov": "weights are read to see that none is negative",
    "tensor_split": "how many parts there are stands in a tensor",
    "resize_": "a storage that gets other elements",
    "to_sparse": "sparse tensors",
    "linalg.lstsq": "residuals are there for full rank only", "linalg.lstsq.grad_oriented": "residuals are there for full rank only",
    "nn.functional.gaussian_nll_loss": "variances are read to see that none is negative",
    "nn.functional.embedding_bag": "offsets that grow with the sample are not in order: eager's own values are arbitrary",
}


def block(number):
    return [op for op in checks.database.op_db if checks.in_part(checks.name_of(op), BLOCKS, number)]


@pytest.mark.parametrize("number", range(BLOCKS) if FULL else (3,))
def test_one_graph_for_all_sizes(number):
    wrong, checked = [], 0
    for op in block(number):
        name = checks.name_of(op)
        if name in REFUSED:
            continue
        outcome = sizes.check(op, samples=12 if FULL else 1)
        checked += outcome.samples
        if outcome.text:
            wrong.append(f"{name}: {outcome.text}")
        if outcome.specialized and name not in SPECIALIZED:
            wrong.append(f"{name} fixes sizes")
        if outcome.graphs > 1 and name not in GRAPHS and name not in SPECIALIZED:
            wrong.append(f"{name}: {outcome.graphs} graphs")
        fs.reset()
    assert checked > 60
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [*SPECIALIZED, *REFUSED] if FULL else ["ormqr"])
def test_the_lists_are_true(name):
    op = next(op for op in checks.database.op_db if checks.name_of(op) == name)
    outcome = sizes.check(op, samples=12)
    assert outcome.specialized if name in SPECIALIZED else outcome.text, f"take {name} off the list"


def test_the_lists_only_shrink():
    assert len(SPECIALIZED) <= 3 and len(GRAPHS) <= 24 and len(REFUSED) <= 10
