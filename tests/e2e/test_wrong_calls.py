"""Where eager raises, a compiled program raises an error of the same type: samples of the operator database with one argument changed.

What abstract tensors refuse is run by eager and needs no test; what they accept is compiled.  A run takes a fixed part of the operators;
FIRESTEEL_FULL_SWEEP=1 takes all, with more samples.
"""
import hashlib
import os
import pathlib
import re
import sys

import pytest
import torch
from wrong_calls import CRASHES, copied, database, error_of, name_of, wrong_calls

import firesteel as fs
from firesteel.graph.abstract import AbstractWorld

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "graph"))

from graph_compare import abstract  # noqa: E402

FULL = bool(os.environ.get("FIRESTEEL_FULL_SWEEP"))
BLOCKS = 24

# operator -> why a value comes back where eager raises
ACCEPTED: dict[str, str] = {}


def block(number):
    for op in database.op_db:
        if name_of(op) not in CRASHES and int(hashlib.sha1(name_of(op).encode()).hexdigest(), 16) % BLOCKS == number:
            yield op


def dtype_of(op):
    supported = op.supported_dtypes("cpu")
    return next((d for d in (torch.float32, torch.int64) if d in supported), None)


def accepted(op, samples):
    """One call of each sentence of eager's that abstract tensors accept."""
    seen = set()
    for wrong in wrong_calls(op, dtype_of(op), samples):
        sentence = re.sub(r"[\d.]+", "#", str(wrong.error).split("\n")[0])[:80]
        world = AbstractWorld()
        args, kwargs = abstract(world, (wrong.args, wrong.kwargs))
        with world.active():
            refused = sentence in seen or error_of(op, *args, **kwargs) is not None
        if not refused:
            seen.add(sentence)
            yield wrong


def outcome(wrong, dynamic):
    """What a compiled call does otherwise than eager, or ''."""
    program, tensors = wrong.program()
    torch.manual_seed(0)
    found = error_of(fs.compile(program, dynamic=dynamic), *copied(tensors))
    return "" if type(found) is type(wrong.error) else f"{wrong.text}: eager {wrong.error!r}, compiled {found!r}"


@pytest.mark.parametrize("number", range(BLOCKS) if FULL else (3, 7))
def test_wrong_calls_raise_as_in_eager(number):
    found = []
    for op in block(number):
        if dtype_of(op) is None or name_of(op) in ACCEPTED:
            continue
        for wrong in accepted(op, 3 if FULL else 1):
            fs.reset()
            found += [f"{name_of(op)}: {text}" for text in [outcome(wrong, dynamic=False)] if text]
    assert not found, "\n".join(found)
