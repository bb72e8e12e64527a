"""Torch's operator database through ahead-of-time autograd: values, gradients and gradients of gradients are eager's.

What is known to fail stands in FAILURES; the test fails where one of these passes, and where one that is not listed fails.  A run checks
one sample of each operator in float32: a third through `fs.compile(backend="aot_eager")`, the others straight through `fs.aot`; gradients of all,
of gradients for a third; and a seventh in float64.  FIRESTEEL_FULL_SWEEP=1 checks up to twelve samples of each, all in both dtypes and both
ways, gradients of gradients for all, in-place variants, and decomposed graphs; it takes half an hour (`opinfo_checks.py` does it in parts).
"""
import contextlib
import os

import opinfo_checks as checks
import pytest
import torch

import firesteel as fs

FULL = bool(os.environ.get("FIRESTEEL_FULL_SWEEP"))
BLOCKS = 8

# operator -> what is missing
FAILURES: dict[str, str] = {
    "index_reduce.prod": "its second gradient asks whether a zero is among the data: that gradient is run by eager",
    "prod": "the second gradient of a single element is None, not the zero that eager computes",
    "scatter_reduce.prod": "as index_reduce.prod",
    "sparse.mm.reduce": "sparse inputs have no abstract form: run by eager",
    "sparse.sampled_addmm": "as sparse.mm.reduce",
}


def block(number):
    return [op for op in checks.operators() if checks.in_part(checks.name_of(op), BLOCKS, number)]


def plans(name, way):
    """(dtype, way, highest order of gradients, samples) of the checks of an operator in this run."""
    if FULL:
        return [(dtype, w, 2, 12) for dtype in (torch.float32, torch.float64) for w in ((way,) if way else ("aot", "compile"))]
    if name in FAILURES:
        return [(torch.float32, way or "aot", 2, 12)]
    chosen = way or ("compile" if checks.in_part(name, 3, 1) else "aot")
    level = 2 if checks.in_part(name, 3, 0) else 1
    return [(torch.float32, chosen, level, 1)] + ([(torch.float64, chosen, 2, 1)] if not way and checks.in_part(name, 7, 0) else [])


def sweep(number, way=None, **options):
    """Checks the operators of a block; what went wrong, by name, and how many were checked."""
    found, checked = {}, 0
    for op in block(number):
        name = checks.name_of(op)
        for dtype, chosen, level, samples in plans(name, way):
            with contextlib.suppress(checks.Refused):
                outcome = checks.check(op, dtype, samples=samples, level=level, way=chosen, **options)
                checked += 1
                if outcome.text:
                    found[name] = outcome.text
        fs.reset()
    return found, checked


def compare(number, found):
    """Just the listed operators fail."""
    expected = {checks.name_of(op) for op in block(number)} & FAILURES.keys()
    new = {name: text for name, text in found.items() if name not in FAILURES}
    assert not new, "\n".join(f"{name}: {text}" for name, text in new.items())
    assert expected <= found.keys(), f"these pass now, take them out of FAILURES: {sorted(expected - found.keys())}"


@pytest.mark.parametrize("number", range(BLOCKS))
def test_operators(number):
    found, checked = sweep(number)
    assert checked > 60
    compare(number, found)


@pytest.mark.parametrize("number", range(BLOCKS) if FULL else range(1))
def test_operators_decomposed(number):
    found, checked = sweep(number, "decomposed")
    assert checked > 60
    compare(number, found)


@pytest.mark.parametrize("number", range(BLOCKS) if FULL else range(1, 2))
def test_inplace_variants(number):
    found, checked = sweep(number, inplace=True)
    assert checked > 10
    new = {name: text for name, text in found.items() if name not in FAILURES}
    assert not new, "\n".join(f"{name}: {text}" for name, text in new.items())


def test_few_fail():
    assert len(FAILURES) <= 0.03 * len(checks.operators())


def test_a_wrong_gradient_is_found():
    """The checker itself: an operator whose compiled form differs is reported."""
    op = next(op for op in checks.operators() if op.name == "sin")
    case = checks.Sample(op, checks.samples_of(op, torch.float32, 1)[0], op)
    want = case.run(case.program, 2)
    case.call = lambda x: x.sin() + 1e-3 * x.detach()
    assert "outputs" in checks.difference(case.run(case.program, 2), want)
    case.call = lambda x: x.sin() + 1e-3 * (x - x.detach())
    assert "gradients" in checks.difference(case.run(case.program, 2), want)
    case.call = lambda x: x.sin() + 0.5 * (x - x.detach()) ** 2
    assert "second gradients" in checks.difference(case.run(case.program, 2), want)
