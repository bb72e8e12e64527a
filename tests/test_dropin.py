"""fs.install(), FIRESTEEL_INSTALL=1, torch.compile around and inside of ours, and our backend under the peer's capture."""
import functools
import subprocess
import sys

import pytest
import torch

import firesteel as fs
from firesteel import dropin, options
from firesteel.errors import UserError
from firesteel_autoload import PATCHED, PATCHED_LATER

on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="choices for a GPU have an effect there")


@pytest.fixture
def installed():
    fs.install()
    yield
    fs.uninstall()


def graphs():
    return fs.counters["stats"]["unique_graphs"]


def test_every_patched_name_has_a_replacement_and_comes_back():
    import torch._dynamo
    names = (*PATCHED, *PATCHED_LATER)
    before = {name: getattr(*dropin.place(torch, name), None) for name in names}      # some are not in every torch
    fs.install()
    fs.install()
    assert dropin.is_installed()
    assert {name: getattr(*dropin.place(torch, name)) for name in names} == {name: dropin.REPLACEMENTS[name] for name in names}
    fs.uninstall()
    fs.uninstall()
    assert {name: getattr(*dropin.place(torch, name), None) for name in names} == before and not dropin.is_installed()


@pytest.mark.parametrize("keywords", [{}, {"backend": "inductor"}, {"backend": "firesteel"}, {"mode": "max-autotune"}, {"dynamic": True}, {"name": "mine", "isolate_recompiles": True},
                                      {"backend": "aot_eager"}, {"options": {"fallback_random": True}}])
def test_functions_and_decorators(installed, keywords):
    fs.reset()
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(torch.compile(lambda x: x * 2 + 1, **keywords)(x), x * 2 + 1)

    @torch.compile(**keywords)
    def double(x):
        return x * 2
    double(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2] and graphs() == 2


def test_modules_compile_in_place(installed):
    fs.reset()
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    expected = layer(x)
    layer.compile()
    assert torch.allclose(layer(x), expected) and graphs() == 1


class LightningModule(torch.nn.Module):
    """As the framework's base class: it knows modules by their class, and its loop calls their steps."""
    def training_step(self, batch): ...
    def test_step(self, batch): ...


class Steps(LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x)

    def training_step(self, batch):
        return self(batch).square().mean()


def test_steps_that_a_framework_calls(installed):
    fs.reset()
    module, x = Steps(), torch.randn(3, 4)
    compiled = torch.compile(module, fullgraph=True)
    loss = compiled.training_step(x)
    loss.backward()
    expected = module.training_step(x)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(module.linear.weight.grad, torch.autograd.grad(expected, module.linear.weight)[0])
    assert graphs() == 1 and fs.counters["stats"]["calls_captured"] == 3        # the loss too
    assert compiled.training_step.__wrapped__ is Steps.training_step and type(compiled).test_step is LightningModule.test_step


@pytest.mark.parametrize("in_place", [False, True])
def test_equal_modules_share_a_graph_and_different_ones_no_limit(installed, in_place):
    """As diffusers' compile_repeated_blocks and accelerate's regional compilation do: each block by itself."""
    fs.reset()
    modules = [torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(count))) for count in (1, 1, 1, *range(2, 11))]
    x = torch.randn(2, 4)
    expected = [module(x) for module in modules]
    for module in modules:
        module.compile() if in_place else None
    for module, want in zip(modules, expected):
        assert torch.allclose((module if in_place else torch.compile(module))(x), want, atol=1e-6)
    assert graphs() == 10 and not fs.counters["recompile_limit"]


def test_unknown_keywords_and_options_raise(installed):
    with pytest.raises(UserError, match="no options nonsense"):
        torch.compile(len, options={"nonsense": 1})
    with pytest.raises(UserError, match="no mode 'fast'"):
        torch.compile(mode="fast")
    with pytest.raises(UserError, match="no backend 'nowhere'"):
        torch.compile(len, backend="nowhere")
    with pytest.raises(UserError, match="no backend 'nowhere'"):
        torch.compiler.set_default_backend("nowhere")
    with pytest.raises(TypeError, match="surprise"):
        torch.compile(len, surprise=1)


def test_the_default_backend(installed):
    seen = []

    def mine(gm, example_inputs):
        seen.append(gm)
        return gm.forward
    torch.compiler.set_default_backend(mine)
    torch.compile(lambda x: x + 1)(torch.zeros(2))
    assert len(seen) == 1 and torch.compiler.get_default_backend() is mine
    torch.compiler.set_default_backend(None)
    assert torch.compiler.get_default_backend() == "inductor" and "native" in torch.compiler.list_backends()


def test_settings_of_the_peer_are_followed_and_put_back(installed):
    import torch._dynamo.config as theirs
    limit = fs.config.recompile_limit
    fn = torch.compile(lambda x, text: x + len(text))
    theirs.cache_size_limit = 2
    try:
        for text in ("a", "bb", "ccc"):
            fn(torch.zeros(1), text)
        assert fs.config.recompile_limit == 2 and sum(fs.counters["recompile_limit"].values()) == 1
    finally:
        theirs.cache_size_limit = 8
    torch.compile(lambda x: x * 3)(torch.zeros(1))
    assert fs.config.recompile_limit == limit
    theirs.recompile_limit = 3
    torch.compile(lambda x: x * 4)(torch.zeros(1))
    fs.uninstall()
    theirs.recompile_limit = 8
    assert fs.config.recompile_limit == limit


def test_the_peers_error_at_the_limit(installed):
    import torch._dynamo.config as theirs
    fn = torch.compile(lambda x, text: x + len(text))
    with theirs.patch(fail_on_recompile_limit_hit=True, recompile_limit=2), pytest.raises(fs.errors.RecompileLimitExceeded):
        for text in ("a", "bb", "ccc"):
            fn(torch.zeros(1), text)
    assert fn(torch.zeros(1), "dddd").item() == 4


def test_other_settings_of_the_peer(installed, caplog):
    """Those with a counterpart of another name are followed; what has none is named once; `disable` is read by torch.compile."""
    import torch._dynamo.config as capture
    import torch._functorch.config as autograd
    import torch._inductor.config as code
    options._said.clear()
    with capture.patch(optimize_ddp=False, disable=True), autograd.patch(activation_memory_budget=0.5), code.patch(freezing=True, fallback_random=True):
        assert torch.compile(len) is len
        for n in (1, 2):
            fs.compile(lambda x: x * n)(torch.zeros(1))
        assert fs.config.memory_budget == 0.5 and fs.config.freeze
    fs.compile(lambda x: x * 5)(torch.zeros(1))
    assert fs.config.memory_budget == 1 and not fs.config.freeze
    named = [record.args[1] for record in caplog.records]
    assert sorted(named) == ["torch._dynamo.config.disable", "torch._dynamo.config.optimize_ddp"]


def test_the_signature_is_torchs(installed):
    import inspect
    assert inspect.signature(torch.compile) == inspect.signature(dropin._torchs["compile"])


def test_whoever_keeps_the_function_has_torchs_after_uninstall():
    fs.install()
    kept, wrapped = torch.compile, lambda *args, **kwargs: kept(*args, **kwargs)
    torch.compile = wrapped
    try:
        assert hasattr(torch.compile(lambda x: x), "__firesteel_root__")
        fs.uninstall()
        assert torch.compile is wrapped and torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
        assert not hasattr(torch.compile(lambda x: x, backend="eager"), "__firesteel_root__")
    finally:
        torch.compile = dropin._torchs["compile"]


def test_backends_registered_for_the_peer(installed):
    import torch._dynamo
    seen = []

    @torch._dynamo.register_backend
    def theirs_for_test(gm, example_inputs):
        seen.append(gm)
        return gm.forward
    x = torch.ones(2)
    with torch.compiler.set_stance(force_backend="theirs_for_test"):
        assert torch.compile(lambda x: x + 1)(x).tolist() == [2, 2]
    with torch.compiler.set_stance(force_backend="inductor"):
        torch.compile(lambda x: x + 2)(x)
    assert len(seen) == 1 and "theirs_for_test" in torch.compiler.list_backends()


def test_artifacts_of_the_cache(installed, tmp_path, caplog):
    with fs.config.patch(cache_dir=str(tmp_path / "first")):
        assert torch.compiler.save_cache_artifacts() is None
        fs.reset()
        torch.compile(lambda x: x * 2 + 41)(torch.ones(3))
        saved, info = torch.compiler.save_cache_artifacts()
    with fs.config.patch(cache_dir=str(tmp_path / "second")):
        assert torch.compiler.load_cache_artifacts(saved).artifacts == info.artifacts and info.artifacts["firesteel"]
        assert torch.compiler.save_cache_artifacts()[1].artifacts == info.artifacts
        assert torch.compiler.load_cache_artifacts(b"else") is None and "not used" in caplog.text
    with fs.config.patch(cache_dir=""):
        assert torch.compiler.save_cache_artifacts() is None and torch.compiler.load_cache_artifacts(saved) is None


def test_functions_of_the_peer_itself(installed, monkeypatch):
    import torch._dynamo as peer
    monkeypatch.setattr(fs.capture.marks, "SUBSTITUTES", {})
    from torch._dynamo.utils import counters
    fs.reset()
    counters.clear()

    def helper(x):
        return x + 1

    @peer.substitute_in_graph(helper)
    def other(x):
        return x + 2

    def fn(x):
        print(end="")
        return helper(x) + int(torch.compiler.is_compiling())
    x = torch.zeros(1)
    compiled = peer.optimize("inductor", dynamic=False)(fn)
    assert hasattr(compiled, "__firesteel_root__") and compiled(x) == 3
    assert counters["stats"]["unique_graphs"] == 1 and sum(counters["graph_break"].values()) == 1
    with peer.set_stance("force_eager"):
        assert compiled(x) == 1
    with pytest.raises(fs.errors.Unsupported):
        peer.optimize_assert("eager")(fn)(x)
    found = peer.explain(fn)(x)
    assert (found.graph_count, found.graph_break_count) == (1, 1) and isinstance(found, fs.tools.explain.Explanation)
    peer.reset()
    assert graphs() == 0
    compiled(x)
    assert counters["stats"]["unique_graphs"] >= 2
    fs.uninstall()
    assert peer.optimize.__module__ == "torch._dynamo.eval_frame"


def test_blocks_in_which_a_break_is_an_error():
    from torch._dynamo import error_on_graph_break, graph_break

    def breaks(x):
        graph_break()
        return x + 1

    def block(x):
        with error_on_graph_break(True):
            return breaks(x)

    def leaves_it(x):
        with error_on_graph_break(True):
            with error_on_graph_break(False):
                x = breaks(x)
            return x * 2
    x = torch.ones(1)
    for fn in (block, error_on_graph_break(True)(breaks), lambda x: error_on_graph_break(True)(breaks)(x)):
        with pytest.raises(fs.errors.Unsupported):
            fs.compile(fn)(x)
        assert fn(x) == 2
    assert fs.compile(leaves_it)(x) == 4 and fs.compile(breaks)(x) == 2
    with error_on_graph_break(True), pytest.raises(fs.errors.Unsupported):
        fs.compile(lambda x: breaks(x) * 2)(x)
    assert fs.compile(lambda x: breaks(x) * 3)(x) == 6


@on_the_cpu
def test_settings_of_the_peers_code_generator_are_read_by_each_call(installed, caplog):
    import torch._inductor.config as code
    options._said.clear()
    with code.patch(max_autotune=True):
        call = torch.compile(lambda x: x * 7)
        assert [record.args[1] for record in caplog.records] == ["max_autotune"]        # on the CPU, an option without effect
        call(torch.ones(1))
        torch.compile(lambda x: x * 8, mode="default")(torch.ones(1))
    with code.patch({"triton.cudagraphs": True}):
        call(torch.ones(2, 2))
    assert "set it before torch.compile is called" in caplog.text


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_the_environment_turns_it_off(installed, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert torch.compile(len) is len


@on_the_cpu
def test_the_peers_variables_of_the_environment(installed, monkeypatch, caplog):
    options._said.clear()
    kept = fs.config.cache_dir
    for name in ("TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_FREEZING", "TORCH_COMPILE_FORCE_DISABLE_CACHES"):
        monkeypatch.setenv(name, "1")
    torch.compile(lambda x: x * 9)(torch.zeros(1))
    assert fs.config.freeze and fs.config.cache_dir == "" and "'max_autotune' has no effect" in caplog.text
    fs.uninstall()
    assert not fs.config.freeze and fs.config.cache_dir == kept


def test_settings_of_the_peer_that_are_read_by_each_call(installed, caplog):
    import torch._dynamo.config as capture
    import torch.compiler.config as common
    options._said.clear()
    with capture.patch(compiled_autograd=True):
        backward = torch.compile(lambda x: (x * 2).sum().backward())
    x = torch.ones(2, requires_grad=True)
    before = dict(fs.counters["compiled_autograd"])
    backward(x)
    assert x.grad.tolist() == [2, 2] and fs.counters["compiled_autograd"] != before
    with common.patch(dynamic_sources="L['x']", recompile_limit=3):
        torch.compile(lambda x: x * 10)(torch.zeros(1))
        assert fs.config.recompile_limit == 3
    assert "torch.compiler.config.dynamic_sources" in caplog.text


def test_arguments_of_mark_dynamic_without_effect_are_named_once(caplog, monkeypatch):
    import torch._dynamo
    monkeypatch.setattr(fs.capture.marks, "_said", set())
    for _ in range(2):
        x = torch.ones(4)
        torch._dynamo.mark_dynamic(x, 0, specialize_on=[lambda size: size == 8])
        assert fs.compile(lambda x: x * 2)(x).tolist() == [2] * 4
    assert caplog.text.count("the argument 'mark_dynamic(specialize_on=)' has no effect") == 1
    caplog.clear()
    x = torch.ones(4)
    torch._dynamo.mark_dynamic(x, 0)
    fs.compile(lambda x: x * 3)(x)
    assert not caplog.text


def test_what_torch_export_sets_is_not_named(installed, caplog):
    options._said.clear()
    x, n = torch.randn(3, 4), torch.export.Dim("n")
    torch.export.export(torch.compile(torch.nn.Linear(4, 4)), (x,), dynamic_shapes={"input": {0: n}})
    assert "firesteel" not in {record.name for record in caplog.records}


@pytest.mark.parametrize("value,firesteel_is_it", [("1", True), ("0", False), ("", False)])
def test_by_the_environment(value, firesteel_is_it):
    """What torch calls at its import, through the entry point that the package declares."""
    code = ("import firesteel_autoload, torch; firesteel_autoload.autoload()\n"
            "import sys; early = 'firesteel' in sys.modules\n"
            f"compiled = torch.compile(lambda x: x * 2) if {firesteel_is_it} else None\n"
            "print(early, 'firesteel' in sys.modules and hasattr(compiled, '__firesteel_root__'))")
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env={**__import__("os").environ, "FIRESTEEL_INSTALL": value})
    assert done.stdout.split() == ["False", str(firesteel_is_it)], done.stderr


@pytest.mark.parametrize("code", ["import torch._dynamo as peer; print(hasattr(peer.optimize()(len), '__firesteel_root__'))",
                                  "import torch; torch.compile(len); import torch._dynamo as peer; print(hasattr(peer.optimize()(len), '__firesteel_root__'))",
                                  "import firesteel, torch; firesteel.uninstall(); import torch._dynamo as peer; print(peer.optimize.__module__ == 'torch._dynamo.eval_frame')",
                                  "import firesteel, torch; print(hasattr(torch.compile, '__firesteel_original__'))"])
@pytest.mark.parametrize("by", ["torch", "firesteel"])
def test_who_installs_and_what_the_program_imports_later(code, by):
    """torch may be told not to look for what installs itself."""
    first = "import firesteel_autoload; firesteel_autoload.autoload()" if by == "torch" else "import firesteel"
    variables = {"FIRESTEEL_INSTALL": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", f"{first}\n{code}"], text=True, capture_output=True, env={**__import__("os").environ, **variables})
    assert done.stdout.split() == ["True"], done.stderr


def test_uninstall_takes_what_the_environment_has_put_away():
    code = ("import firesteel_autoload, torch; firesteel_autoload.autoload(); before = torch.compile\n"
            "import firesteel as fs; fs.uninstall(); print(before is torch.compile, torch.compile.__module__, before.__name__)")
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env={**__import__("os").environ, "FIRESTEEL_INSTALL": "1"})
    assert done.stdout.split() == ["False", "torch", "compile"], done.stderr


# ---------------------------------------------------------------- the peer inside, around and in front

class Method:
    @torch.compile(backend="eager")
    def call(self, x):
        return x * 3


layer = torch.nn.Linear(4, 4)
in_place = torch.nn.Linear(4, 4)
in_place.compile(backend="eager")
INSIDE = {
    "function": (torch.compile(lambda x: x.cos() * 2, backend="eager"), lambda x: x.cos() * 2),
    "module": (torch.compile(layer, backend="eager"), layer),
    "method": (Method().call, lambda x: x * 3),
    "module in place": (in_place, lambda x: torch.nn.functional.linear(x, in_place.weight, in_place.bias)),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_the_peer_was_to_compile_is_inlined(name):
    inner, plain = INSIDE[name]
    fs.reset()
    x = torch.randn(2, 4)
    torch.testing.assert_close(fs.compile(lambda x: inner(x) + 1, fullgraph=True)(x), plain(x) + 1)
    assert graphs() == 1
    torch.testing.assert_close(fs.compile(inner)(x), plain(x))


@pytest.mark.parametrize("made", [lambda: fs.compile(lambda x: layer(x) * 5), lambda: fs.compile(torch.nn.Sequential(layer, torch.nn.ReLU()))])
def test_the_peer_around_ours_calls_it(made):
    ours, x = made(), torch.randn(2, 4)
    torch.testing.assert_close(torch.compile(lambda x: ours(x) + 1, backend="eager")(x), ours(x) + 1)


def wrapped(fn):
    @functools.wraps(fn)
    def call(x):
        return fn(x) * 2
    return call


@pytest.mark.parametrize("compile", [fs.compile, lambda fn: torch.compile(fn, backend="eager")])
def test_a_wrapper_around_a_compiled_function_is_not_skipped(compile):
    fn, x = wrapped(compile(lambda x: layer(x) * 5)), torch.randn(2, 4)
    for outer in (fn, lambda x: fn(x) + 1):
        torch.testing.assert_close(fs.compile(outer)(x), outer(x))


class Holder(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


@pytest.mark.parametrize("made", [lambda: fs.compile(lambda x: layer(x) * 5), lambda: fs.compile(torch.nn.Sequential(layer, torch.nn.ReLU())),
                                  lambda: Holder(fs.compile(layer)), lambda: Holder(fs.compile(torch.nn.Sequential(layer, torch.nn.ReLU()))),
                                  lambda: Holder(fs.compile(lambda x: layer(x) * 5))])
def test_the_whole_graph_of_the_peer_has_ours_in_it(made):
    ours, x, fs.counters["stats"]["unique_graphs"] = made(), torch.randn(2, 4), 0
    found = torch.compile(ours, backend="eager", fullgraph=True)(x)
    assert graphs() == 0
    torch.testing.assert_close(found, ours(x))


def test_symbolic_trace_of_what_holds_a_compiled_module():
    holder, x = Holder(fs.compile(torch.nn.Sequential(layer, torch.nn.ReLU()))), torch.randn(2, 4)
    holder.inner.register_forward_hook(lambda module, args, out: out * 3)
    traced = torch.fx.symbolic_trace(holder)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["inner.0", "inner.1"]
    torch.testing.assert_close(traced(x), holder(x))


def test_our_backend_under_the_capture_of_the_peer():
    fs.reset()
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), torch.randn(2, 4)
    compiled = torch.compile(model, backend=dropin.peer_backend)
    torch.testing.assert_close(compiled(x), model(x))
    grads = []
    for call in (model, compiled):
        call(x).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(grads[1], grads[0])
    assert graphs() == 1


def checkpointed(x, w):
    return torch.utils.checkpoint.checkpoint(lambda x: torch.nn.functional.dropout(x @ w, 0.5).sin(), x, use_reentrant=False) * 2


def checkpointed_by_choice(x, w):
    saved = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return torch.utils.checkpoint.checkpoint(lambda x: (x @ w).sin().cos(), x, use_reentrant=False, context_fn=saved)


def under_autocast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ w
    return y.float() @ w


@pytest.mark.parametrize("fn", [checkpointed, checkpointed_by_choice, under_autocast])
def test_operators_of_the_peers_graphs_are_one_graph(fn):
    fs.reset()
    results, x, w = [], torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    for call in (fn, torch.compile(fn, backend=dropin.peer_backend)):
        torch.manual_seed(0)
        out = call(x, w)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, w))])
    torch.testing.assert_close(*results)
    assert graphs() == 1 and not fs.counters["graph_break"]


@on_the_cpu
def test_keywords_of_our_backend_under_the_peer(caplog):
    options._said.clear()
    assert torch.compile(lambda x: x * 2, backend=dropin.peer_backend, mode="reduce-overhead")(torch.ones(1)) == 2
    assert "'reduce-overhead' has no effect" in caplog.text
    with pytest.raises(Exception, match="There are no options nonsense"):
        torch.compile(lambda x: x * 3, backend=dropin.peer_backend, options={"nonsense": 1})(torch.ones(1))


def test_sizes_that_the_peer_made_symbolic():
    fs.reset()
    compiled = torch.compile(lambda x: (x.view(-1, 2) * x.shape[0]).sum(), backend=dropin.peer_backend, dynamic=True)
    for n in (4, 6, 8):
        x = torch.randn(n, requires_grad=True)
        compiled(x).backward()
        assert x.grad.tolist() == [n] * n
    assert graphs() == 1


def test_torch_jit_trace_sees_the_operators_of_a_compiled_module():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    compiled = fs.compile(model)
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    compiled(x)
    traced = torch.jit.trace(compiled, x)
    torch.testing.assert_close(traced(y), model(y))
    function = fs.compile(lambda a: a.sin() * 2)
    torch.testing.assert_close(torch.jit.trace(function, x)(y), y.sin() * 2)


def test_torch_export_of_a_compiled_module():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    exported = torch.export.export(fs.compile(model), (x,))
    torch.testing.assert_close(exported.module()(y), model(y))


def test_nested_compile_region():
    @torch.compiler.nested_compile_region
    def block(x, w):
        return (x @ w).relu()

    def f(x, w):
        return block(block(block(x, w), w), w)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    torch.testing.assert_close(fs.compile(f, fullgraph=True)(x, w), f(x, w))


def doubled(x):
    return x * 2


def test_torch_jit_script_takes_what_was_compiled():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    x = torch.randn(2, 4)
    for compiled, plain in ((fs.compile(model), model), (fs.compile(doubled), doubled), (fs.compile(torch.nn.Sequential(fs.compile(model))), model),
                            (fs.compile(model[0]), model[0])):      # its forward has names of its module
        torch.testing.assert_close(torch.jit.script(compiled)(x), plain(x))


@pytest.mark.parametrize("called", [False, True])
def test_torch_fx_sees_the_operators_of_what_was_compiled(called):
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4)
    for compiled, plain in ((fs.compile(model), model), (fs.compile(doubled), doubled)):
        if called:
            compiled(x)
        traced = torch.fx.symbolic_trace(compiled)
        torch.testing.assert_close(traced(x), plain(x))
        assert len(traced.graph.nodes) > 2


def test_programs_ask_a_compiled_module_for_the_original():
    model = torch.nn.Linear(4, 4)
    compiled = fs.compile(model)
    assert compiled._orig_mod is model and fs.compile(compiled)._orig_mod is model
    assert list(compiled.state_dict()) == list(model.state_dict()) and "_orig_mod" not in dict(compiled.named_modules())


@torch.compiler.nested_compile_region
def nested_block(x, w, options):
    y = torch.nn.functional.dropout(x @ w, options["p"]).relu()
    return y, {"norm": y.square().mean(), "name": "layer"}


def nested_blocks(x, weights):
    norms = []
    for w in weights:
        x, more = nested_block(x, w, {"p": 0.5})
        norms.append(more["norm"])
    return x, sum(norms), more["name"]


@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
def test_a_nested_region_is_compiled_once(train):
    """All equal calls, with weights of their own; values, gradients and random numbers as in eager."""
    x, weights = torch.randn(4, 4), [torch.randn(4, 4) for _ in range(6)]
    results, graphs = [], []

    def counted(gm, inputs):
        graphs.append(gm)
        return fs.backends.lookup_backend("native")(gm, inputs)
    for f in (nested_blocks, fs.compile(nested_blocks, backend=counted, fullgraph=True)):
        given = [x.clone().requires_grad_(train), *(w.clone().requires_grad_(train) for w in weights)]
        torch.manual_seed(0)
        out, norm, name = f(given[0], given[1:])
        assert name == "layer"
        if train:
            (out.sum() + norm).backward()
        results.append([out, norm, *(t.grad for t in given)])
    torch.testing.assert_close(*results)
    (graph,) = graphs
    assert len({node.target for node in graph.graph.nodes if getattr(node.target, "bodies", ())}) == 1
    assert sum(bool(getattr(node.target, "bodies", ())) for node in graph.graph.nodes) == 6


def test_nested_regions_that_are_inlined():
    """One that writes to what it is given, one that gives a view, one that breaks."""
    @torch.compiler.nested_compile_region
    def writes(x):
        return x.add_(1) * 2

    @torch.compiler.nested_compile_region
    def views(x):
        return x[0]

    @torch.compiler.nested_compile_region
    def breaks(x):
        return x * x.sum().item()
    for region in (writes, views, breaks):
        compiled, x, y = fs.compile(lambda t, region=region: region(t) + region(t + 1)), torch.ones(3, 3), torch.ones(3, 3)
        torch.testing.assert_close(compiled(x), region(y) + region(y + 1))
        torch.testing.assert_close(x, y)


def test_nested_regions_of_modules_and_sizes():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        @torch.compiler.nested_compile_region
        def forward(self, x):
            return x + self.linear(x).tanh()
    model = torch.nn.Sequential(*(Block() for _ in range(3)))
    compiled = fs.compile(model, fullgraph=True, dynamic=True)
    for rows in (2, 5, 7):
        x = torch.randn(rows, 4)
        results = []
        for f in (compiled, model):
            model.zero_grad()
            out = f(x)
            out.sum().backward()
            results.append([out, *(p.grad for p in model.parameters())])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("written_by_user", [False, True])
def test_backends_over_the_autograd_of_the_peer(written_by_user, dynamic):
    """They trace by means of torch's fake tensors: they are given the inputs of a call, whose sizes are torch's symbols where ours are."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import aot_module_simplified
    compiled = []

    def compiler(gm, example_inputs):
        compiled.append(gm)
        return gm.forward
    backend = (lambda gm, inputs: aot_module_simplified(gm, inputs, fw_compiler=compiler)) if written_by_user else aot_autograd(fw_compiler=compiler)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    call = fs.compile(model, backend=backend, dynamic=dynamic)
    for count in (2, 2, 3):
        x = torch.randn(count, 3)
        ours, theirs = (torch.autograd.grad(fn(x).square().sum(), model.parameters()) for fn in (call, model))
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(call(x), model(x))
    assert len(compiled) == (2 if dynamic else 4)       # forward and backward, with None for one size and for all others


def test_what_the_autograd_of_the_peer_fixes_is_compiled_again():
    """Guards that it puts on its symbols: a size of 1, two sizes that must be equal, a branch; and strides of which we say nothing."""
    from torch._dynamo.backends.common import aot_autograd
    compiled = []

    def compiler(gm, example_inputs):
        compiled.append(gm)
        return gm.forward

    def fn(x, y, n):
        return (x @ y if x.shape[0] > 4 else x @ y + 1) * n, x.sum(0) * y.shape[1]
    call = fs.compile(fn, backend=aot_autograd(fw_compiler=compiler), dynamic=True)
    for rows, inner, columns, n in ((3, 4, 5, 2), (4, 5, 6, 3), (8, 8, 8, 4), (9, 6, 2, 5), (1, 6, 2, 7), (0, 6, 2, 7)):
        x, y = torch.randn(rows, inner, requires_grad=True), torch.randn(columns, inner).t()
        found, wanted = call(x, y, n), fn(x, y, n)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(out[0].square().sum() + out[1].sum(), x) for out in (found, wanted)))
    assert len(compiled) == 8       # of either branch, of one row, of none
