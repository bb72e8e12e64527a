"""fs.compile as users call it: decorators, modules that stay themselves, backends, explain."""
import copy
import functools
import gc
import importlib.metadata
import pickle
import types
import weakref

import pytest
import torch

import firesteel as fs
from firesteel.backends import native


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())


def test_a_compiled_module_is_the_same_module_to_its_user():
    model = make_model()
    compiled = fs.compile(model, backend="eager")
    assert isinstance(compiled, torch.nn.Sequential) and type(compiled).__name__ == "Sequential"
    assert list(compiled.state_dict()) == list(model.state_dict()) == ["0.weight", "0.bias"]
    compiled.eval()
    assert not model.training
    compiled.extra = 3
    assert model.extra == 3 and compiled[0] is model[0]
    assert len(compiled) == 2 and [id(p) for p in compiled.parameters()] == [id(p) for p in model.parameters()]


def test_copies_and_pickles():
    compiled = fs.compile(make_model(), backend="eager")
    x = torch.randn(2, 4)
    twin = copy.deepcopy(compiled)
    assert twin[0].weight is not compiled[0].weight
    torch.testing.assert_close(twin(x), compiled(x))
    loaded = pickle.loads(pickle.dumps(compiled))
    assert type(loaded) is torch.nn.Sequential
    torch.testing.assert_close(loaded(x), compiled(x))
    beside = copy.copy(compiled)
    beside.training = False
    assert compiled.training and type(beside) is type(compiled) and beside[0] is compiled[0]
    torch.testing.assert_close(beside(x), compiled(x))


@pytest.mark.parametrize("around", [lambda module: module, torch.nn.Sequential])
def test_checkpoints_of_torch_compile_are_loaded(around):
    theirs, ours = around(torch.compile(make_model(), backend="eager")), around(fs.compile(make_model(), backend="eager"))
    assert any("_orig_mod." in key for key in theirs.state_dict())
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other)
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict({"_orig_mod.nothing": torch.ones(1)})


def test_modules_of_one_class_share_compiled_code():
    counter = fs.testing.CompileCounter()
    layers = [fs.compile(torch.nn.Linear(4, 4), backend=counter) for _ in range(3)]
    x = torch.randn(2, 4)
    for layer in layers:
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert counter.frame_count == 1


def scaled(x, factor, *, more=1):
    return x * factor + more


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    def other(self, x):
        return x + 2 * self.factor


class Scaling(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def over(held):
    return lambda x: x * held + held


def around(held):
    inner = over(held)
    return lambda x: inner(x) + 1


FRESH = {
    "an int of a closure": lambda n: over(n + 2),
    "a float of a closure": lambda n: over(n + 0.5),
    "of a function that a closure holds": lambda n: around(n + 2),
    "a positional argument of a partial": lambda n: functools.partial(scaled, n + 2),
    "an argument of a partial": lambda n: functools.partial(scaled, factor=n + 0.5),
    "of a function in a partial": lambda n: functools.partial(over(n + 2)),
    "an attribute of a method's object": lambda n: Scale(n + 2).other,
    "an attribute of a callable object": lambda n: Scale(n + 0.5),
    "an attribute of a module, one method compiled": lambda n: Scaling(n + 2).forward,
}


@pytest.mark.parametrize("made", FRESH)
def test_callables_that_differ_in_a_number_share_graphs(made):
    counter, x, kept = fs.testing.CompileCounter(), torch.randn(3), []
    for n in range(12):
        fn = FRESH[made](n)
        kept.append((fn, fs.compile(fn, backend=counter, fullgraph=True)))
        torch.testing.assert_close(kept[-1][1](x), fn(x))
    for fn, compiled in kept:
        torch.testing.assert_close(compiled(x), fn(x))
    assert counter.frame_count == 2


def test_alike_callables_that_hold_other_things_have_their_own_values():
    x, held = torch.randn(3), [torch.randn(3), 2, True, 2.5, torch.sin(torch.ones(3)), torch.nn.Parameter(torch.ones(3))]
    for thing in held:
        torch.testing.assert_close(fs.compile(over(thing), backend="eager")(x), over(thing)(x))
        torch.testing.assert_close(fs.compile(Scale(thing).other, backend="eager")(x), Scale(thing).other(x))
    counts = [fs.compile(lambda x, n=n: sum(x + i for i in range(n)), backend="eager")(x) for n in range(1, 7)]
    for n, found in enumerate(counts, 1):
        torch.testing.assert_close(found, sum(x + i for i in range(n)))


def test_a_methods_object_dies_with_it():
    one = Scale(2)
    compiled = fs.compile(one.other, backend="eager")
    compiled(torch.randn(3))
    seen = weakref.ref(one)
    del one, compiled
    gc.collect()
    assert seen() is None


def test_decorators():
    @fs.compile
    def plain(x):
        return x + 1

    @fs.compile(backend="eager", fullgraph=True)
    def with_arguments(x):
        return x * 2

    x = torch.randn(3)
    torch.testing.assert_close(plain(x), x + 1)
    torch.testing.assert_close(with_arguments(x), x * 2)
    assert plain.__name__ == "plain"


def test_a_decorated_class_stays_one(caplog):
    @fs.compile(fullgraph=True)
    class Net(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.linear = torch.nn.Linear(4, size)

        def forward(self, x):
            return self.linear(x) + int(fs.is_compiling())

    x = torch.randn(2, 4)
    for net in (Net(2), Net(3)):
        assert isinstance(net, Net)
        torch.testing.assert_close(net(x), net.linear(x) + 1)
    torch.testing.assert_close(fs.compile(torch.nn.Sequential(Net(4), Net(2)), fullgraph=True)(x).shape, (2, 2))
    assert fs.compile(dict) is dict and "cannot be called" in caplog.text


def test_disabled_classes_and_modules():
    @fs.disable
    class Scale:
        def __call__(self, x):
            return x + int(fs.is_compiling())

    scale, x, layer = Scale(), torch.ones(2, 4), fs.disable(torch.nn.Linear(4, 4))
    assert isinstance(scale, Scale) and fs.compile(lambda x: scale(x) * 2)(x).tolist() == [[2] * 4] * 2
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
    torch.testing.assert_close(twin(x), twin.bias.expand(2, 4))
    with pytest.raises(fs.errors.Unsupported, match=r"Linear\.forward is marked with fs\.disable"):
        fs.compile(lambda x: layer(x) * 2, fullgraph=True)(x)


def test_disabled_compile_is_the_function_itself():
    def f(x):
        return x
    assert fs.compile(f, disable=True) is f


@pytest.mark.parametrize("arguments, text", [
    ({"backend": "no such"}, "no backend 'no such'"),
    ({"mode": "fastest"}, "no mode 'fastest'"),
    ({"options": {"a": 1}}, "no options a"), ({"options": ["a"]}, "Give a dict of settings"), ({"options": {1: 2}}, "Give a dict of settings"),
    ({"backend": 3}, "a name or a callable, not int"), ({"backend": []}, "not list"), ({"dynamic": "yes"}, "Give True, False or None"), ({"name": 3}, "Give a text"),
])
def test_bad_arguments_are_named(arguments, text):
    with pytest.raises(fs.errors.UserError, match=text):
        fs.compile(lambda x: x, **arguments)
    with pytest.raises(fs.errors.UserError, match="not int"):
        fs.compile(3)
    with pytest.raises(fs.errors.UserError, match=r"torch\.jit"):
        fs.compile(torch.jit.script(make_model()))
    with pytest.raises(fs.errors.UserError, match="not int"):
        fs.disable(3)
    with pytest.raises(fs.errors.UserError, match="not int"):
        fs.substitute_in_graph(3)
    with pytest.raises(fs.errors.UserError, match="not str"):
        fs.substitute_in_graph(len)("text")


def test_a_failing_backend_is_named_and_the_next_one_works():
    def broken(gm, inputs):
        raise ValueError("no luck")

    def f(x):
        return x.sin()

    x = torch.randn(3)
    with pytest.raises(fs.errors.BackendError, match="broken failed on a graph: ValueError: no luck"):
        fs.compile(f, backend=broken)(x)
    with pytest.raises(fs.errors.BackendError, match="returned NoneType"):
        fs.compile(f, backend=lambda gm, inputs: None)(x)
    torch.testing.assert_close(fs.compile(f, backend="eager")(x), x.sin())


def test_registered_backends():
    @fs.register_backend(name="mine_for_test")
    def mine(gm, example_inputs):
        return gm.forward

    assert "mine_for_test" in fs.list_backends() and fs.lookup_backend("mine_for_test") is mine
    x = torch.randn(3)
    torch.testing.assert_close(fs.compile(torch.sin, backend="mine_for_test")(x), x.sin())
    with pytest.raises(ValueError, match="there already"):
        fs.register_backend(mine, name="mine_for_test")


def test_explain_names_breaks_and_times(tmp_path, capsys):
    def f(x):
        y = x + 1
        print("a line of the program")
        return y * 2

    page = fs.explain(f)(torch.randn(3))
    capsys.readouterr()
    assert page.graph_count == 2 and page.graph_break_count == 1 and page.op_count == 2
    reason = page.break_reasons[0]
    assert "test_api.py" in reason.location and reason.hint
    assert "2 graph(s)" in str(page) and page.guards and page.compile_times
    page.to_html(tmp_path / "page.html")
    assert "a line of the program" in (tmp_path / "page.html").read_text() and "graph 2" in (tmp_path / "page.html").read_text()


def test_settings_are_typed_and_patched():
    with pytest.raises(AttributeError, match="no setting 'unknown'"):
        fs.config.unknown = 1
    with pytest.raises(TypeError, match="takes an int"):
        fs.config.recompile_limit = "many"
    before = fs.config.recompile_limit
    with fs.config.patch(recompile_limit=3):
        assert fs.config.recompile_limit == 3
    assert fs.config.recompile_limit == before
    assert "recompile_limit" in fs.config.describe()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_nothing_keeps_a_module_or_its_class_alive(backend):
    def use():
        held = []

        class Model(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x) + len(held)
        model = Model(4, 4)
        compiled = fs.compile(model, backend=backend)
        held.append(compiled)       # the class itself holds the module
        compiled(torch.randn(2, 4))
        assert type(fs.compile(Model(4, 4), backend=backend)) is type(compiled)
        return [weakref.ref(thing) for thing in (model, compiled, Model, type(compiled))]
    references = use()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_marks_of_torch_compiler_on_functions_count():
    @functools.lru_cache
    @torch.compiler.assume_constant_result
    def installed():
        return len(importlib.metadata.version("torch"))

    @torch.compiler.allow_in_graph
    def opaque(x):
        return torch.tensor(list(x.shape)).sum() + x if isinstance(x, torch.Tensor) else None

    @torch._dynamo.forbid_in_graph
    def forbidden(x):
        return x

    x = torch.ones(3)
    assert fs.compile(lambda x: x + installed(), fullgraph=True)(x).tolist() == [1.0 + installed()] * 3
    graphs = []
    fs.compile(lambda x: opaque(x) * 2, fullgraph=True, backend=lambda gm, inputs: graphs.append(gm) or gm.forward)(x)
    assert opaque in [node.target for node in graphs[0].graph.nodes]
    with pytest.raises(fs.errors.Unsupported, match="forbid_in_graph"):
        fs.compile(lambda x: forbidden(x) * 2, fullgraph=True)(x)


# -- a forward that the user sets -----------------------------------------------------------------------------------------
def doubled(forward):
    @functools.wraps(forward)
    def wrapped(*args, **kwargs):
        return forward(*args, **kwargs) * 2
    return wrapped


def set_bound(module):
    module.forward = doubled(module.forward)


def set_unbound(module):
    module.forward = types.MethodType(doubled(module.forward.__func__), module)


def set_partial(module):
    module.forward = functools.partial(lambda forward, x: forward(x) * 2, module.forward)


def set_of_class(module):
    module.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 2, module)


def set_and_replaced(module):
    first = module.forward
    module.forward = doubled(doubled(first))
    module.forward = first
    module.forward = doubled(module.forward)


def set_and_deleted(module):
    set_bound(module)
    del module.forward
    set_bound(module)


@pytest.mark.parametrize("patch", [set_bound, set_unbound, set_partial, set_of_class, set_and_replaced, set_and_deleted])
@pytest.mark.parametrize("called_before", [False, True])
def test_a_forward_set_on_a_compiled_module_may_call_the_one_before(patch, called_before):
    counter = fs.testing.CompileCounter()
    model = make_model()
    compiled, x = fs.compile(model, backend=counter, fullgraph=True), torch.randn(2, 4)
    expected = model(x) * 2
    if called_before:
        compiled(x)
    counter.clear()
    patch(compiled)
    torch.testing.assert_close(compiled(x), expected)
    assert counter.frame_count == 1, "the wrapper is part of the graph"
    torch.testing.assert_close(compiled.forward(x), expected)
    torch.testing.assert_close(model(x), expected, msg="the original is the same module")
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        twin[0].weight.zero_()
    torch.testing.assert_close(compiled(x), expected)
    del compiled.forward
    torch.testing.assert_close(compiled(x), expected / 2)


def test_a_static_forward_may_be_wrapped_too():
    class Module(torch.nn.Module):
        forward = staticmethod(lambda x: x * 3)

    compiled, x = fs.compile(Module(), backend="eager"), torch.randn(3)
    set_bound(compiled)
    torch.testing.assert_close(compiled(x), x * 6)
    torch.testing.assert_close(compiled.forward(x), x * 6)


def test_a_graph_that_takes_nested_containers():
    class Nested(torch.nn.Module):
        def forward(self, a, others):
            return {"sum": a + others[0], "rest": [others[1] * 2]}
    tracer = torch.fx.Tracer()
    root, leaf = Nested(), torch.fx.PH
    gm = torch.fx.GraphModule(root, tracer.trace(root, {"others": [leaf, leaf]}))
    inputs = [torch.randn(3), [torch.randn(3), torch.randn(2)]]
    torch.testing.assert_close(native(gm, inputs)(*inputs), root(*inputs))
