"""Random whole programs, compiled natively, against eager: forward, backward, aliasing and written inputs, two sets of sizes each.

`FIRESTEEL_FUZZ=20000` runs more of them, `FIRESTEEL_FUZZ_DEVICE=cuda` runs them there.  `fuzz.py` runs them by the thousand and reduces what fails; a failure here prints
the program as a file.
"""
import contextlib
import os

import fuzz
import program_writer
import pytest
import torch
from program_grammar import ROWS
from program_inputs import LAYOUTS, PARTS, tensor
from program_shrink import shrink
from program_writer import drawn, write

COUNT = int(os.environ.get("FIRESTEEL_FUZZ", "48"))
DEVICE = os.environ.get("FIRESTEEL_FUZZ_DEVICE", "cpu")
BLOCK = 8


def check_seed(seed):
    program = write(seed)
    found = fuzz.fails(program, DEVICE)
    assert found is None, f"{found}\n{program.source()}"


@pytest.mark.parametrize("first", range(0, COUNT, BLOCK))
def test_equals_eager(first):
    for seed in range(first, min(first + BLOCK, COUNT)):
        check_seed(seed)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {"device": lambda: torch.device(DEVICE), "float64": lambda: default_dtype(torch.float64), "bfloat16": lambda: default_dtype(torch.bfloat16)}


@pytest.mark.parametrize("mode", MODES)
def test_equals_eager_under_defaults(mode):
    with MODES[mode]():
        for seed in range(1000, 1000 + max(COUNT // 16, 3)):
            check_seed(seed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part", ["", *PARTS])
def test_inputs_have_their_shape_and_a_leaf(layout, part):
    for shape in ((), (3,), (2, 3), (2, 1, 3), (2, 3, 4, 4), (0, 3)):
        made = tensor(shape, torch.float32, layout, "inner", part, 1)
        assert made.arg.shape == shape and made.leaf.is_leaf and made.arg.requires_grad
        assert tensor(shape, torch.float32, layout, "leaf", part, 1).arg.is_leaf


def test_the_same_seed_is_the_same_program():
    assert write(5).source() == write(5).source() != write(6).source()


def test_what_eager_gets_wrong_in_inference_mode_is_not_drawn_there(monkeypatch):
    monkeypatch.setattr(program_writer, "NOT_IN_INFERENCE", ())
    seed = next(seed for seed in range(33, 1000) if (program := drawn(seed)) is not None and dict(program.options)["inference"])
    monkeypatch.setattr(program_writer, "NOT_IN_INFERENCE", ("t",))      # all statements
    assert not dict(drawn(seed).options)["inference"]


def test_names_of_rows_are_unique():
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_a_failing_program_is_made_smaller():
    program = write(2)
    last = program.statements[-1]
    small = shrink(program, lambda one: last in one.statements)
    assert last in small.statements and len(small.statements) <= 2 < len(program.statements)
