"""mode=, options=, recompile_limit= and the stances: obeyed, named once, or refused."""
import logging

import pytest
import torch

import firesteel as fs
from firesteel import options
from firesteel.errors import RecompileLimitExceeded, UserError


@pytest.fixture(autouse=True)
def unsaid():
    options._said.clear()


@pytest.mark.parametrize("keywords,word", [({"mode": "max-autotune"}, "max-autotune"), ({"options": {"shape_padding": True}}, "shape_padding"),
                                           ({"options": {"triton.cudagraph_trees": True}}, "triton.cudagraph_trees")])
def test_what_has_no_effect_is_named_once(keywords, word, caplog, monkeypatch):
    monkeypatch.setattr(options, "in_use", lambda: ("cpu",))
    with caplog.at_level(logging.WARNING, "firesteel"):
        for _ in range(3):
            fs.compile(lambda x: x, **keywords)
    assert [record.getMessage().count(word) for record in caplog.records] == [1]


@pytest.mark.parametrize("keywords", [{"mode": "default"}, {"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}, {"options": {}}, {"options": {"fallback_random": True}}, {"options": {"shape_padding": False}}])
def test_what_is_done_anyway_is_not_named(keywords, caplog):
    fs.compile(lambda x: x, **keywords)
    assert not caplog.records


@pytest.mark.parametrize("keywords,match", [({"mode": "turbo"}, "no mode"), ({"options": {"turbo": 1}}, "no options"), ({"shapes_spec": {}}, "Shape"),
                                            ({"mode": "default", "options": {"dce": True}}, "both"), ({"recompile_limit": 0}, "recompile_limit=0")])
def test_what_cannot_be_obeyed_raises(keywords, match):
    with pytest.raises(UserError, match=match):
        fs.compile(lambda x: x, **keywords)


def test_a_limit_of_its_own():
    fn = fs.compile(lambda x, text: x + len(text), fullgraph=True, recompile_limit=2)
    for text in ("a", "bb"):
        fn(torch.zeros(1), text)
    with pytest.raises(RecompileLimitExceeded):
        fn(torch.zeros(1), "ccc")


def test_a_name_of_its_own():
    fs.reset()
    fn = fs.compile(lambda x, text: x + len(text), name="adder")
    for text in ("a", "bb"):
        fn(torch.zeros(1), text)
    assert dict(fs.counters["recompiles"]) == {"adder": 1}


def test_isolated_modules_share_nothing():
    fs.reset()
    layer = torch.nn.Linear(2, 2)
    for keywords, count in (({}, 1), ({}, 1), ({"isolate_recompiles": True}, 2)):
        fs.compile(layer, **keywords)(torch.zeros(1, 2))
        assert fs.counters["stats"]["unique_graphs"] == count


@pytest.mark.parametrize("stance,backend", [("eager_then_compile", "eager"), ("aot_eager_then_compile", "aot_eager")])
def test_the_first_call_shows_what_varies(stance, backend):
    """Two calls, one compilation, dynamic in the size that changed between them."""
    fs.reset()
    given = []

    def mine(gm, example_inputs):
        given.append(example_inputs[0].shape)
        return gm.forward
    fn = fs.compile(lambda x: x * 2, backend=mine)
    with fs.set_stance(stance):
        for n in (3, 5, 7, 9):
            assert fn(torch.ones(n)).shape == (n,)
    assert len(given) == 1 and not isinstance(given[0][0], int)


def test_a_forced_backend():
    given = []

    def mine(gm, example_inputs):
        given.append(gm)
        return gm.forward
    fn, x = fs.compile(lambda x: x * 2), torch.ones(3)
    with fs.set_stance(force_backend=mine):
        fn(x)
        fn(x)
    fn(x)
    assert len(given) == 1
    with pytest.raises(UserError, match="forced together"):
        fs.set_stance("force_eager", force_backend="eager")


def test_guards_are_never_skipped(caplog):
    with fs.set_stance(skip_guard_eval_unsafe=True):
        pass
    assert "skip_guard_eval_unsafe" in caplog.text
