"""Inputs that share memory, through fs.compile: which do is guarded where one of them is written."""
import torch

import firesteel as fs


def add_one_to_each(*tensors):
    for t in tensors:
        t.add_(1)
    return tensors[0] * 2


def recompiles():
    return sum(fs.counters["recompiles"].values())


def run(fn, cuts, compiled=None):
    compiled = compiled or fs.compile(fn, backend="aot_eager", dynamic=True)
    base, expected = torch.arange(20.0), torch.arange(20.0)
    got, want = compiled(*(base[c] for c in cuts)), fn(*(expected[c] for c in cuts))
    assert torch.equal(got, want) and torch.equal(base, expected)
    return compiled


def test_another_overlap_is_another_program():
    fs.reset()
    compiled = run(add_one_to_each, [slice(5), slice(7, 13), slice(9, 20)])
    run(add_one_to_each, [slice(5), slice(6, 12), slice(8, 20)], compiled)
    assert recompiles() == 0
    run(add_one_to_each, [slice(5), slice(7, 13), slice(13, 17)], compiled)
    assert recompiles() == 1


def test_what_is_not_written_may_overlap_as_it_likes():
    fs.reset()
    compiled = run(lambda a, b: a + b, [slice(5), slice(5)])
    run(lambda a, b: a + b, [slice(5), slice(4, 9)], compiled)
    assert recompiles() == 0
