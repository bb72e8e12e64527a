"""Inputs that are copied, changed and copied back are written where they lie."""
import pytest
import torch

import firesteel as fs
from firesteel import backends, pipeline
from firesteel.loops import fuse as fuse_module
from firesteel.loops import inplace
from firesteel.loops.inplace import COPY, write_in_place, write_to_inputs


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


def repeated(cache, at, row):
    cache.index_copy_(0, at, row)
    return (cache[:, None].expand(6, 3, 5).reshape(18, 5) * 2).sum(1)


def read_between(cache, at, row):
    cache.index_copy_(0, at, row)
    between = cache.t().contiguous()
    cache.index_copy_(0, at, row + 1)
    return between.exp(), cache.sum(0)


FUNCTIONS = [(one_row, 0), (one_place, 0), (of_a_product, 0), (read_before, 1), (all_of_it, 1), (returned_too, 1), (repeated, 0), (read_between, 1)]


@pytest.mark.parametrize("by_kernels", [False, True], ids=["library", "kernels"])
@pytest.mark.parametrize("fn,copies", FUNCTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_cache_is_written_as_in_eager(fn, copies, by_kernels, monkeypatch):
    left = []
    if by_kernels:      # as on other devices
        monkeypatch.setattr(inplace, "CPU", "")

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
    assert left == [0 if by_kernels else copies]


def test_what_is_written_before_is_read_where_it_lies():
    """The repeated cache is no buffer of its own: nobody writes the cache behind the repetition."""
    compiled, before = fs.compile(repeated, backend=keeping_writes, fullgraph=True), fs.counters["native"]["kernels"]
    with torch.no_grad():
        compiled(torch.randn(6, 5), torch.tensor([2]), torch.randn(1, 5))
    assert fs.counters["native"]["kernels"] - before == 2


# ---------------------------------------------------------------- results that the caller writes to inputs

def rows_of_a_part(cache, at, row):
    cache[:2, at:at + 2] = row
    return torch.mm(cache[0, :at + 2], cache[0, :at + 2].t())


def one_of_a_part(cache, at, row):
    cache[1][at] = row[0]
    return cache[1].sum(0)


def by_tensor(cache, at, row):
    cache.index_put_((torch.tensor([0, 2]), torch.tensor([1, 1])), row)
    return cache.expand(2, *cache.shape)


def a_part_scaled(cache, at, row):
    cache[:, at:at + 2].mul_(2)
    return row + 1


def every_other(cache, at, row):
    cache[:, ::2] = row[:1]
    return row + 1


def an_old_part_read(cache, at, row):
    before = cache[0] * 2
    cache[1:] = row[0]
    return before.sum() * cache.sum()


def another_place_read(cache, at, row):
    cache[1:] = cache[:-1] + 1
    return row + 1


CACHES = [(rows_of_a_part, 1), (one_of_a_part, 2), (by_tensor, 1), (a_part_scaled, 2), (every_other, None), (an_old_part_read, None),
          (another_place_read, None)]


@pytest.mark.usefixtures("library_products")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn,kernels", CACHES, ids=lambda value: getattr(value, "__name__", ""))
def test_parts_of_a_cache_are_written_as_in_eager(fn, kernels, dynamic, monkeypatch):
    written = []

    def noted(program):
        new = write_to_inputs(program)
        written.append((any(name in step.writes() for _, name in new.into for step in new.steps), sum(step.nest is not None for step in new.steps)))
        return new

    monkeypatch.setattr(fuse_module, "write_to_inputs", noted)
    fs.config.cache_dir, kept = "", fs.config.cache_dir
    try:
        torch.manual_seed(0)
        cache, row = torch.randn(3, 6, 4), torch.randn(2, 4)
        ours, compiled = cache.clone(), fs.compile(fn, fullgraph=True, dynamic=dynamic)
        with torch.no_grad():
            for step in range(3):
                got, want = compiled(ours, 3, row + step), fn(cache, 3, row + step)
                torch.testing.assert_close(got, want)
                torch.testing.assert_close(ours, cache)
                assert ours._version == cache._version
    finally:
        fs.config.cache_dir = kept
    in_place, nests = written[0]
    if fn is one_of_a_part and dynamic:
        kernels = None          # whether there is a row 1 only a guard says
    assert len(written) == 1 and in_place is (kernels is not None) and (kernels is None or nests <= kernels)


def test_a_failed_write_by_data_leaves_the_rest_as_it_was():
    def put(cache, at, row):
        cache.index_put_((at,), row)
        return cache.sum()
    cache, at, row = torch.zeros(4, 3), torch.tensor([1, 9]), torch.ones(2, 3)
    compiled = fs.compile(put, fullgraph=True)
    with pytest.raises(IndexError):
        compiled(cache, at, row)
    assert not cache[[0, 2, 3]].any()
    compiled(cache, torch.tensor([1, 2]), row)
    assert cache.sum(1).tolist() == [0, 3, 3, 0]


def test_an_earlier_error_leaves_the_input_as_it_was(monkeypatch):
    """The lookup has nothing to do with the write, and its kernel is launched together with that one."""
    monkeypatch.setattr(fs.config, "verify", False)     # guard zones end launches

    def step(table, at, cache, row):
        found = table[at] * 2
        cache[1:3].mul_(2).add_(row)
        return found
    cache, compiled = torch.ones(4, 3), fs.compile(step, fullgraph=True)
    table, row = torch.randn(5, 3), torch.ones(3)
    compiled(table, torch.tensor([1, 2]), cache, row)
    assert cache.tolist() == [[1] * 3, [3] * 3, [3] * 3, [1] * 3]
    with pytest.raises(IndexError):
        compiled(table, torch.tensor([1, 9]), cache, row)
    assert cache.tolist() == [[1] * 3, [3] * 3, [3] * 3, [1] * 3]


# ---------------------------------------------------------------- results that are written everywhere: first groups, then the input's memory

def momentum(p, m, g, rate):
    m.mul_(0.9).add_(g)
    p.sub_(m, alpha=rate)


def each_of_the_other(p, m, g, rate):
    old = p.clone()
    p.copy_(m * 2)
    m.copy_(old + g)


def turned(p, m, g, rate):
    old = p.t() + g
    p.add_(1)
    m.copy_(old)


def sums_of_columns(p, m, g, rate):
    total = p.sum(0)
    p.mul_(2)
    m.add_(total)


@pytest.mark.parametrize("fn,kernels", [(momentum, 1), (each_of_the_other, None), (turned, None), (sums_of_columns, None)],
                         ids=lambda value: getattr(value, "__name__", ""))
def test_whole_inputs_are_written_as_in_eager(fn, kernels):
    fs.reset()
    torch.manual_seed(0)
    given = [torch.randn(6, 6) for _ in range(3)]
    ours, before = [x.clone() for x in given], fs.counters["native"]["kernels"]
    compiled = fs.compile(fn, fullgraph=True)
    with torch.no_grad():
        for rate in (0.1, 0.1, 0.1):
            compiled(*ours, rate)
            fn(*given, rate)
            torch.testing.assert_close(ours, given)
            assert [x._version for x in ours] == [x._version for x in given]
    assert kernels is None or fs.counters["native"]["kernels"] - before == kernels
