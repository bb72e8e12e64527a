"""Inputs that are copied, changed and copied back are written where they lie."""
import pytest
import torch

import firesteel as fs
from firesteel import backends, pipeline
from firesteel.loops import fuse as fuse_module
from firesteel.loops.inplace import COPY, write_in_place


def keeping_writes(gm, example_inputs):
    """The native backend with the writes to inputs in the program."""
    return backends._native(gm, example_inputs, inference_compiler=pipeline.compile_native, keep_inference_input_mutations=True)


def one_row(cache, at, row):
    cache.index_copy_(0, at, row)
    return (cache * 2).sum(1)


def one_place(cache, at, row):
    cache[at] = row
    return torch.mm(cache, cache.t())


def of_a_product(cache, at, row):
    cache.index_copy_(0, at, torch.mm(row, row.t() @ row))
    return cache + 1


def read_before(cache, at, row):
    before = cache.sum(0)
    cache.index_copy_(0, at, row)
    return before, cache.sum(0)


def all_of_it(cache, at, row):
    cache.mul_(2)
    return cache.sum(0)


def returned_too(cache, at, row):
    new = cache.index_copy(0, at, row)
    cache.copy_(new)
    return new


@pytest.mark.parametrize("fn,copies", [(one_row, 0), (one_place, 0), (of_a_product, 0), (read_before, 1), (all_of_it, 1), (returned_too, 1)],
                         ids=lambda value: getattr(value, "__name__", ""))
def test_a_cache_is_written_as_in_eager(fn, copies, monkeypatch):
    left = []

    def noted(program):
        new = write_in_place(program)
        left.append(sum(step.call is not None and step.call.target is COPY for step in new.steps))
        return new

    monkeypatch.setattr(fuse_module, "write_in_place", noted)
    torch.manual_seed(0)
    cache, at, row = torch.randn(6, 5), torch.tensor([2]), torch.randn(1, 5)
    ours, compiled = cache.clone(), fs.compile(fn, backend=keeping_writes, fullgraph=True)
    with torch.no_grad():
        for step in range(3):
            got, want = compiled(ours, at, row + step), fn(cache, at, row + step)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(ours, cache)
            assert ours._version == cache._version
    assert left == [copies]
