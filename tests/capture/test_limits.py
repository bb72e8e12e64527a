"""At the recompile limit: one warning with the guard, the values and the change; a dynamic variant where that helps; eager calls are counted."""
import functools
import logging
import threading

import pytest
import torch
from harness import capture, same

from firesteel.artifacts import counters
from firesteel.capture.entry import TRIED_FIRST
from firesteel.config import config
from firesteel.errors import RecompileLimitExceeded


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if "recompile_limit" in r.getMessage()]


def counted(kind):
    return sum(n for name, n in counters["recompile_limit"].items() if name.endswith(kind))


@pytest.fixture(autouse=True)
def clean():
    counters["recompile_limit"].clear()


def test_the_warning_names_guard_values_and_change(caplog):
    def f(x, name):
        return x + len(name)

    compiled, backend = capture(f)
    with config.patch(recompile_limit=2), caplog.at_level(logging.WARNING, "firesteel"):
        for n in range(6):
            same(compiled(torch.ones(2), "a" * n), f(torch.ones(2), "a" * n))
    assert len(backend.graphs) == 2
    (text,) = warnings_of(caplog)
    assert "name is 'aa'" in text and "'a'" in text and "''" in text and "Keep it constant" in text and "eagerly" in text
    assert counted("eager") == 4


@pytest.mark.parametrize("vary", ["size", "int", "float"])
def test_what_varied_becomes_dynamic_at_the_limit(vary, caplog):
    def f(x, k):
        return x * k + x.shape[0]

    calls = [(torch.ones(3 + n if vary == "size" else 3), {"int": n + 2, "float": n + 0.5}.get(vary, 2)) for n in range(8)]
    compiled, backend = capture(f)
    with config.patch(recompile_limit=3, automatic_dynamic_shapes=False, specialize_int=True, specialize_float=True), \
            caplog.at_level(logging.WARNING, "firesteel"):
        for x, k in calls:
            same(compiled(x, k), f(x, k))
    assert len(backend.graphs) == 4
    assert counted("made dynamic") == 1 and counted("eager") == 0
    assert len(warnings_of(caplog)) == 1


def test_dynamic_false_is_respected(caplog):
    compiled, backend = capture(lambda x: x + 1, dynamic=False)
    with config.patch(recompile_limit=2):
        for n in range(2, 8):
            same(compiled(torch.ones(n)), torch.full((n,), 2.0))
    assert len(backend.graphs) == 2
    assert counted("eager") == 4
    assert "mark_dynamic" in warnings_of(caplog)[0]


def test_fullgraph_raises_at_the_limit():
    compiled, _ = capture(lambda x, s: x + len(s), fullgraph=True)
    with config.patch(recompile_limit=1), pytest.raises(RecompileLimitExceeded, match="s is 'bb'"):
        compiled(torch.ones(2), "a")
        compiled(torch.ones(2), "bb")


def test_a_stance_applies_at_the_limit():
    from firesteel.capture import marks
    from firesteel.errors import RecompileError

    def f(x, name):
        return x + len(name)
    compiled, backend = capture(f)
    x = torch.ones(2)
    with config.patch(recompile_limit=2):
        for n in range(2):
            compiled(x, "a" * n)
        with marks.Stance("eager_on_recompile"):
            same(compiled(x, "abc"), f(x, "abc"))
        with marks.Stance("fail_on_recompile"), pytest.raises(RecompileError, match="name is 'abc'"):
            compiled(x, "abc")
        with marks.Stance("fail_on_recompile"):
            same(compiled(x, "a"), f(x, "a"))
    assert len(backend.graphs) == 2 and counted("eager") == 0


def test_variants_made_before_the_limit_stay_in_use(caplog):
    def f(x, name):
        return x + len(name)
    compiled, backend = capture(f)
    x = torch.ones(2)
    with config.patch(recompile_limit=2), caplog.at_level(logging.WARNING, "firesteel"):
        for name in ("a", "bb", "ccc", "a", "bb", "ccc", "dddd"):
            same(compiled(x, name), f(x, name))
    assert len(backend.graphs) == 2 and len(warnings_of(caplog)) == 1 and counted("eager") == 3


def test_the_most_general_entry_also_serves_after_a_break(caplog):
    def f(x, n):
        y = x * 2
        print(end="")
        return y + n
    compiled, backend = capture(f)
    with config.patch(recompile_limit=3, automatic_dynamic_shapes=False, specialize_int=True), caplog.at_level(logging.WARNING, "firesteel"):
        for n in range(2, 10):
            same(compiled(torch.ones(n), n), f(torch.ones(n), n))
    assert counted("eager") == 0 and counted("made dynamic") == 2
    assert len(backend.graphs) == 8


# -- which variant is tried first -----------------------------------------------------------------------------------------
def many_variants(count):
    compiled, _ = capture(lambda x, name: x + len(name))
    names = ["n" * n for n in range(1, count + 1)]
    with config.patch(recompile_limit=count + 1):
        for name in names:
            compiled(torch.ones(2), name)
    (region,) = compiled.__firesteel_root__.all_regions()
    assert len(region.entries) == len(region.order) == count
    return compiled, names, region


def checks_of(compiled, region, name):
    """How many Entries are tried."""
    tried = []
    for entry in region.entries:
        entry.check = functools.partial(lambda check, *inputs: tried.append(1) or check(*inputs), entry.guard.check)
    assert torch.equal(compiled(torch.ones(2), name), torch.ones(2) + len(name))
    for entry in region.entries:
        entry.check = entry.guard.check
    return len(tried)


def test_variants_are_ordered_by_use():
    compiled, names, region = many_variants(60)
    assert checks_of(compiled, region, names[-1]) == TRIED_FIRST + 1, "the newest was used last"
    assert checks_of(compiled, region, names[30]) > TRIED_FIRST + 1
    assert checks_of(compiled, region, names[30]) == TRIED_FIRST + 1
    assert checks_of(compiled, region, names[-1]) == TRIED_FIRST + 2
    assert [checks_of(compiled, region, name) for name in names[:TRIED_FIRST]] == [*range(1, TRIED_FIRST + 1)], "the first keep their places"
    assert region.entries != list(region.order) and set(region.entries) == set(region.order)
    assert region.why((torch.ones(2), names[0])) == region.entries[-1].guard.explain((torch.ones(2), names[0]))


def test_threads_may_reorder_variants_at_once():
    compiled, names, region = many_variants(20)
    wrong = []

    def work(seed):
        for n in range(200):
            name = names[(n * seed) % len(names)]
            if not torch.equal(compiled(torch.ones(2), name), torch.ones(2) + len(name)):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(region.entries) == len(names) and sorted(map(id, region.entries)) == sorted(map(id, region.order))
