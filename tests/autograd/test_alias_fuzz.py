"""Random programs of views, in-place writes and results that share storage: what a caller can observe is eager's.

`alias_programs.py` makes them and says what is observed: values, sizes, strides and offsets, versions, which results are the same object, share
storage, are views of which, requires_grad, is_leaf, whether there is a history, gradients, and all that again after a further
write.  Where eager refuses a program, the compiled one is refused with the same sentence.
"""
import functools
import os
import random

import alias_programs as programs
import pytest

import firesteel as fs
from firesteel import pipeline
from firesteel.autograd import aot
from firesteel.graph.decomp import core_decompositions

NATIVE = {"fw_compiler": pipeline.compile_native, "partition_fn": aot.min_cut_partition, "decompositions": core_decompositions()}
WAYS = {
    "whole": {"fw_compiler": aot.nop},
    "cut": {"fw_compiler": aot.nop, "partition_fn": aot.min_cut_partition},
    "dynamic": {"fw_compiler": aot.nop, "dynamic": True},
    "native": NATIVE,
    "native_dynamic": {**NATIVE, "dynamic": True},
}


def traced(way, program, inputs):
    return aot.function(lambda *inputs: programs.run_program(program, inputs), **WAYS[way])(*inputs)


def captured(backend, dynamic, program, inputs):
    return fs.compile(lambda inputs: programs.run_program(program, inputs), backend=backend, dynamic=dynamic)(inputs)


def check_seed(seed, run, free=False, **kinds):
    """Compares one random program with eager; False where eager refuses it.  `free`: a size may be 1 as it happens, and then its stride is that of
    the general program (docs/contracts.md, Sizes 0 and 1)."""
    program = programs.make_program(random.Random(seed), **kinds)
    want, got = programs.attempt(program, programs.run_program), programs.attempt(program, run)
    want, got = (programs.freely(want), programs.freely(got)) if free else (want, got)
    assert programs.close(got, want), (seed, program, got, want)
    return not isinstance(want, tuple)


def seeds(block, blocks, usual):
    """FIRESTEEL_FUZZ says how many programs in all."""
    size = int(os.environ.get("FIRESTEEL_FUZZ", usual)) // blocks
    return range(block * size, (block + 1) * size)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("way", WAYS)
def test_random_programs(way, block):
    run = functools.partial(traced, way)
    mine = seeds(block, 4, 120)
    assert sum(check_seed(seed, run, free=way == "native_dynamic") for seed in mine) > len(mine) // 4


# inputs in the middle of a storage, written and then viewed or saved; sizes that come out as 1
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [1565, 2664, 2940, 3368, 3890, 3961])
@pytest.mark.parametrize("way", WAYS)
def test_programs_that_once_differed(way, seed):
    check_seed(seed, functools.partial(traced, way), free=way == "native_dynamic")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend,dynamic", [("aot_eager", None), ("aot_eager", True), ("native", None), ("native", True)])
def test_random_programs_are_captured(backend, dynamic):
    for seed in seeds(0, 1, 24):
        fs.reset()
        check_seed(seed, functools.partial(captured, backend, dynamic), rare=0, without=("dirty",))
