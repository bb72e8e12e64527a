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
                                           ({"options": {"triton.cudagraph_trees": True}}, "triton.cudagraph_trees"),
                                           ({"mode": "reduce-overhead"}, "reduce-overhead"), ({"options": {"triton.cudagraphs": True}}, "triton.cudagraphs"),
                                           ({"options": {"epilogue_fusion": False}}, "epilogue_fusion"), ({"options": {"b2b_gemm_pass": True}}, "b2b_gemm_pass"),
                                           ({"options": {"guard_filter_fn": len}}, "guard_filter_fn"), ({"mode": "lite"}, "lite"), ({"mode": "reduce-overhead", "backend": "eager"}, "reduce-overhead")])
def test_what_has_no_effect_is_named_once(keywords, word, caplog, monkeypatch):
    monkeypatch.setattr(options, "in_use", lambda: ("cpu",))
    with caplog.at_level(logging.WARNING, "firesteel"):
        for _ in range(3):
            fs.compile(lambda x: x, **keywords)
    assert [record.getMessage().count(word) for record in caplog.records] == [1]


def test_options_may_be_any_mapping():
    """A configuration's own class of mappings."""
    import collections
    fn = fs.compile(lambda x: x + 1, options=collections.UserDict(fallback_random=True))
    assert fn(torch.ones(1)) == 2


@pytest.mark.parametrize("keywords", [{"mode": "default"}, {"options": {"triton.cudagraphs": False}}, {"options": {}}, {"options": {"fallback_random": True}}, {"options": {"shape_padding": False}}])
def test_what_is_done_anyway_is_not_named(keywords, caplog):
    fs.compile(lambda x: x, **keywords)
    assert not caplog.records


@pytest.mark.parametrize("keywords,match", [({"mode": "turbo"}, "no mode"), ({"options": {"turbo": 1}}, "no options"), ({"shapes_spec": 3}, "no specification"), ({"shapes_spec": {"y": None}}, "does not take"), ({"shapes_spec": {}, "dynamic": True}, "both"),
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


# ---------------------------------------------------------------- backends of others, shape specifications

def test_anothers_backend_is_given_its_mode_and_options():
    seen = []

    def mine(gm, example_inputs, **given):
        seen.append(given)
        return gm.forward
    for keywords in ({}, {"mode": "default"}, {"mode": "fastest"}, {"options": {"precision": "fp16"}}):
        fs.compile(lambda x: x + 1, backend=mine, **keywords)(torch.zeros(2))
    assert seen == [{}, {}, {"mode": "fastest"}, {"options": {"precision": "fp16"}}]


spec = pytest.importorskip("torch.fx.experimental.dynamic_spec")
N, LIMITED = spec.ShapeVar("n"), spec.ShapeVar("n", min=2, max=8)
layer = torch.nn.Linear(4, 4)
SPECIFIED = {
    "a parameter": (lambda x: x * 2, {"x": spec.TensorSpec([N, None])}, lambda n: (torch.randn(n, 4),)),
    "bounds": (lambda x: x * 2, spec.ParamsSpec({"x": spec.TensorSpec([LIMITED])}), lambda n: (torch.randn(n),)),
    "an int": (lambda x, n: x * n, {"n": spec.IntVar()}, lambda n: (torch.ones(3), n)),
    "a module": (layer, spec.ShapesSpec({"input": spec.TensorSpec([N, 4])}), lambda n: (torch.randn(n, 4),)),
    "more arguments": (lambda *args: args[0] + args[1], {"*args": [None, spec.TensorSpec([N])]}, lambda n: (torch.ones(1), torch.randn(n))),
    "an item": (lambda d: d["x"] * 2, {"d": spec.DictSpec({"x": spec.TensorSpec([N])})}, lambda n: ({"x": torch.randn(n)},)),
    "an expression": (lambda x: x[0] * 2, {"x": spec.SeqSpec([spec.TensorSpec([2 * N])])}, lambda n: ([torch.randn(2 * n)],)),
}


@pytest.mark.parametrize("name", SPECIFIED)
def test_what_a_specification_calls_dynamic_is_from_the_first_call_on(name):
    fn, given, made = SPECIFIED[name]
    fs.reset()
    compiled = fs.compile(fn, shapes_spec=given)
    for n in (3, 5, 7):
        args = made(n)
        torch.testing.assert_close(compiled(*args), fn(*args))
    assert fs.counters["stats"]["unique_graphs"] == 1


def test_what_a_specification_does_not_name_is_a_constant():
    fs.reset()
    compiled = fs.compile(lambda x: x * 2, shapes_spec={})
    for n in (3, 5, 7):
        compiled(torch.zeros(n))
    assert fs.counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize("fn,dims,match", [(lambda x: x + 1, [4], "is not what shapes_spec says"), (lambda x: x + x.view(3), [N], "the program fixes it to 3"),
                                           (lambda x: x + 1, [spec.ShapeVar("n", max=2)], "marked as dynamic from None to 2")])
def test_what_contradicts_a_specification_raises(fn, dims, match):
    with pytest.raises(fs.errors.FiresteelError, match=match):
        fs.compile(fn, shapes_spec={"x": spec.TensorSpec(dims)})(torch.zeros(3))
    with pytest.raises(UserError, match="Assumptions"):
        fs.compile(fn, shapes_spec=spec.ShapesSpec({"x": spec.TensorSpec(dims)}, assumptions=[N > 1]))


def test_the_bounds_of_the_peers_marks():
    import torch._dynamo
    x = torch.zeros(5)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=4)
    with pytest.raises(fs.errors.ConstraintViolation, match="from 2 to 4"):
        fs.compile(lambda x: x + 1)(x)
