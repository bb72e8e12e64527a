"""Torch's operator database through ahead-of-time autograd: values, gradients and gradients of gradients are eager's.

What is known to fail stands in FAILURES; the test fails where one of these passes, and where one that is not listed fails.  A run checks
one sample of each operator: gradients of all, of gradients for a fixed third.  FIRESTEEL_FULL_SWEEP=1 checks up to four samples of each,
float64 too, gradients of gradients for all, in-place variants, and decomposed graphs; it takes minutes (`opinfo_checks.py` does it in parts).
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
}


def block(number):
    return [op for op in checks.operators() if checks.in_part(checks.name_of(op), BLOCKS, number)]


def sweep(number, **options):
    """Checks the operators of a block; what went wrong, by name."""
    found, checked = {}, 0
    for op in block(number):
        name = checks.name_of(op)
        for dtype in (torch.float32, torch.float64) if FULL else (torch.float32,):
            with contextlib.suppress(checks.Refused):
                level = 2 if FULL or checks.in_part(name, 3, 0) else 1
                text = checks.check(op, dtype, samples=4 if FULL else 1, level=level, **options)
                checked += 1
                if text:
                    found[name] = text
        fs.reset()
    return found, checked


def compare(number, found):
    names = {checks.name_of(op) for op in block(number)}
    expected = {name for name in FAILURES if name in names}
    new = {name: text for name, text in found.items() if name not in FAILURES}
    assert not new, "\n".join(f"{name}: {text}" for name, text in new.items())
    if FULL:
        assert not expected - set(found), f"these pass now, take them out of FAILURES: {sorted(expected - set(found))}"


@pytest.mark.parametrize("number", range(BLOCKS))
def test_operators(number):
    found, checked = sweep(number)
    assert checked > 60
    compare(number, found)


@pytest.mark.parametrize("number", range(BLOCKS) if FULL else range(1))
def test_operators_decomposed(number):
    found, checked = sweep(number, decompose=True)
    assert checked > 60
    compare(number, found)


@pytest.mark.parametrize("number", range(BLOCKS) if FULL else range(1, 2))
def test_inplace_variants(number):
    found, checked = sweep(number, inplace=True)
    assert checked > 10
    compare(number, found)


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
