"""Loads that lanes can make in a row: needless masks, copies of small strided buffers, reductions of a few elements."""
from __future__ import annotations

import torch
from traced import check

from firesteel.loops.ir import Nest, all_loads


def nests(program) -> list[Nest]:
    return [step.nest for step in program.steps if step.nest]


def test_a_mask_on_what_is_inside_is_a_choice():
    program = check(lambda x, w: torch.triu(x * w, 1).sum(1), torch.randn(6, 6), torch.randn(6))
    assert "masked" not in str(nests(program)[0]) and len(nests(program)) == 1


def test_what_may_be_outside_stays_masked():
    program = check(lambda x: torch.nn.functional.pad(x, (1, 2)) * 2, torch.randn(6, 6))
    assert "masked" in str(nests(program)[0])


def test_a_small_buffer_is_read_along_its_rows():
    program = check(lambda x: (x[:, None] - x[None]).square().sum(-1), torch.randn(80, 3))
    copy, distances = nests(program)
    assert {load.attr for load in all_loads(distances.exprs()) if "i1" in str(load)} == set(copy.writes())


def test_few_reads_need_no_copy():
    assert len(nests(check(lambda x, y: x.t() + y, torch.randn(80, 70), torch.randn(70, 80)))) == 1
    assert len(nests(check(lambda x: (x[:, None] - x[None]).square().sum(-1), torch.randn(6, 3)))) == 1


def test_a_reduction_of_a_few_is_pointwise():
    for reduced in (lambda x: x.exp().sum(1), lambda x: x.amax(1, True), lambda x: x.prod(1), lambda x: x.mean((0, 1)), lambda x: x.bfloat16().sum(1)):
        program = check(reduced, torch.randn(2, 2, 9))
        assert [phase.kind for nest in nests(program) for phase in nest.phases] == ["map"]


def test_reductions_across_each_other_stay_apart():
    program = check(lambda x: x.exp().sum(0) + x.exp().sum(1), torch.randn(300, 300))
    assert len(nests(program)) > 1
