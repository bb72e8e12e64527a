"""States of torch around and inside compiled code (random generators, autocast, inference mode, determinism, anomaly detection), and what
the runtime does with saved tensors and tangents: as eager."""
import operator
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F

import firesteel as fs
from firesteel.autograd import aot
from firesteel.backends import native
from firesteel.graph.decomp import core_decompositions

BACKENDS = ("aot_eager", "native")

# ---------------------------------------------------------------- random numbers

RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.4).sin(),
    "dropout of another layout": lambda x: F.dropout(x.t() * 1, 0.4).sin(),
    "two draws": lambda x: F.dropout(x, 0.5) + x * torch.rand_like(x),
    "randn": lambda x: x * torch.randn(4, 6) + torch.rand(6),
    "randint": lambda x: x * torch.randint(0, 9, (4, 6)),
    "randperm": lambda x: x[torch.randperm(4)],
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "normal_": lambda x: x + torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 2),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(2.0),
    "multinomial": lambda x: x + torch.multinomial(x.detach().softmax(-1), 6, replacement=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "unused": lambda x: (torch.rand(3), x * torch.rand_like(x))[1],
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.3),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_eager_s(name, backend):
    def observed(fn):
        torch.manual_seed(3)
        x = torch.randn(4, 6, requires_grad=True)
        first, second = fn(x), fn(x)
        (first.sum() + (second * second).sum()).backward()
        return first, second, x.grad, torch.rand(4)     # the generator goes on as in eager
    fs.reset()
    for got, want in zip(observed(fs.compile(RANDOM[name], backend=backend)), observed(RANDOM[name])):
        torch.testing.assert_close(got, want)


# ---------------------------------------------------------------- modes

def linear_then_sum(x, w):
    return (x @ w).exp().sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inside", [False, True])
def test_autocast(backend, inside):
    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return x @ w

    def observed(fn):
        torch.manual_seed(0)
        x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            out = fn(x, w)
        out.float().sum().backward()
        return out, x.grad, w.grad
    fs.reset()
    for got, want in zip(observed(fs.compile(f, backend=backend)), observed(f)):
        torch.testing.assert_close(got, want)       # dtypes too


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_mode(backend):
    f = lambda x: (x * 2, x[0])
    fs.reset()
    compiled = fs.compile(f, backend=backend)
    x = torch.randn(3, 3, requires_grad=True)
    with torch.inference_mode():
        got, want = compiled(x), f(x)
    assert [t.is_inference() for t in got] == [t.is_inference() for t in want]
    torch.testing.assert_close(got, want)
    assert compiled(x)[0].requires_grad and not compiled(x)[0].is_inference()


def test_deterministic_mode_is_obeyed():
    def f(x, i):
        return x.index_add(0, i, x[:2])
    fs.reset()
    compiled = fs.compile(f, backend="native")
    x, i = torch.randn(4, 3), torch.tensor([1, 1])
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(compiled(x, i), f(x, i), rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_anomaly_detection_finds_nan_in_a_compiled_backward(backend):
    f = lambda x: x.sqrt() * 0.0
    fs.reset()
    x = torch.zeros(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values"):
            fs.compile(f, backend=backend)(x).sum().backward()


# ---------------------------------------------------------------- saved tensors and tangents

def training_case(backend):
    fs.reset()
    fn = fs.compile(lambda x, w: ((x @ w).sin(), (x * 2).exp()), backend=backend)
    torch.manual_seed(0)
    return fn, torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_retain_graph_and_the_error_of_a_second_backward(backend):
    fn, x, w = training_case(backend)
    loss = fn(x, w)[0].sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], first)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        torch.autograd.grad(loss, x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_partial_outputs_and_none_gradients(backend):
    fn, x, w = training_case(backend)
    fn(x, w)[1].sum().backward()
    assert w.grad is None
    torch.testing.assert_close(x.grad, 2 * (x * 2).exp())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tangent", [lambda: torch.randn(4, 4).t(), lambda: torch.tensor(2.0).expand(4, 4), lambda: torch.randn(8, 8)[::2, ::2]])
def test_tangents_of_any_layout(backend, tangent):
    fn, x, w = training_case(backend)
    torch.manual_seed(1)
    g = tangent()
    torch.testing.assert_close(torch.autograd.grad(fn(x, w)[0], (x, w), g), torch.autograd.grad((x @ w).sin(), (x, w), g))


@pytest.mark.parametrize("backend", BACKENDS)
def test_saved_tensor_hooks(backend):
    fn, x, w = training_case(backend)
    fn(x, w)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t.double(), lambda t: t.float()):
        out = fn(x, w)[0]
    out.sum().backward()
    assert seen
    torch.testing.assert_close(x.grad, torch.cos(x @ w) @ w.t())


def test_saved_tensors_are_freed_with_the_backward():
    saved = []

    def compiler(gm, example_inputs):
        def run(*args):
            results = gm(*args)
            saved.extend(weakref.ref(t) for t in results[1:] if isinstance(t, torch.Tensor) and not any(t is a for a in args))
            return results
        return run
    fn = aot.function(lambda x: x.exp().sin().exp().sum(), compiler, aot.nop)
    out = fn(torch.randn(5, requires_grad=True))
    assert saved and all(r() is not None for r in saved)
    out.backward()
    assert all(r() is None for r in saved)


# ---------------------------------------------------------------- what cannot be traced, and where graphs are cut

class Peeks(torch.autograd.Function):
    """Its backward looks at memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        assert g.data_ptr()
        return g * 2


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_a_backward_that_cannot_be_traced_runs_between_compiled_graphs(backend):
    def program(a):
        return Peeks.apply(a.sin() * 2).exp() + 1

    fs.reset()

    def run(fn):
        x = torch.ones(3, requires_grad=True)
        fn(x).sum().backward()
        return x.grad

    torch.testing.assert_close(run(fs.compile(program, backend=backend, fullgraph=True)), run(program))
    assert fs.counters["aot"]["ok"] == 2
    assert fs.counters["stats"]["unique_graphs"] == 1


def test_a_result_is_no_border_where_no_gradient_comes_back():
    def f(x):
        y = x * x
        with torch.no_grad():
            return y.clone(), y
    quiet, loud = fs.compile(f, backend="aot_eager", fullgraph=True)(torch.ones(3, requires_grad=True))
    assert not quiet.requires_grad
    gradient, = (g for g in loud.grad_fn.apply(None, torch.ones(3)) if g is not None)
    assert torch.equal(gradient, torch.full((3,), 2.0))


# ---------------------------------------------------------------- what the user sees of a compiled graph

def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8), torch.nn.LayerNorm(8))


@pytest.mark.parametrize("decompositions", [None, core_decompositions()], ids=["aten", "decomposed"])
def test_every_node_tells_where_it_comes_from(decompositions):
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward
    backend = aot.backend(fw_compiler=keep, decompositions=decompositions)
    fs.compile(small_model(), backend=backend, fullgraph=True)(torch.randn(4, 8)).sum().backward()
    assert len(graphs) == 2
    for gm in graphs:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                assert "test_state" in node.meta["stack_trace"] or "torch/nn/modules" in node.meta["stack_trace"], node
                assert type(node.meta["seq_nr"]) is int and node.meta["nn_module_stack"], node
    forward, backward = ({n.meta["seq_nr"] for n in gm.graph.nodes if n.op == "call_function"} for gm in graphs)
    assert forward & backward


def saved_bytes(budget):
    """Bytes that the forward of a model keeps beyond its inputs, and its gradients."""
    fs.reset()
    model, x = small_model(), torch.ones(64, 8)
    known, kept = {p.data_ptr() for p in model.parameters()} | {x.data_ptr()}, []

    def pack(t):
        kept.append(t.nbytes if t.data_ptr() not in known else 0)
        return t
    with fs.config.patch(memory_budget=budget), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fs.compile(model, backend="aot_eager_partitioned")(x)
    out.square().sum().backward()
    return sum(kept), [p.grad for p in model.parameters()]


def test_a_smaller_memory_budget_saves_less():
    full, gradients = saved_bytes(1.0)
    for budget in (0.5, 0.0):
        some, same = saved_bytes(budget)
        assert some <= budget * full
        for g, h in zip(gradients, same):
            torch.testing.assert_close(g, h)


@pytest.mark.parametrize("backend", BACKENDS)
def test_profiler_ranges(backend):
    def f(x):
        with torch.profiler.record_function("inner"):
            y = x.sin()
        return y * 2
    x = torch.randn(4, requires_grad=True)
    compiled = fs.compile(f, backend=backend, fullgraph=True)
    with torch.autograd.profiler.profile() as seen, torch.profiler.record_function("outer"):
        compiled(x).sum().backward()
    assert torch.allclose(x.grad, 2 * x.cos())
    assert {"outer", "CompiledFunction", "CompiledFunctionBackward"} <= {event.name for event in seen.function_events}


def test_an_operator_whose_backward_cannot_be_traced_is_refused_under_fullgraph():
    with torch.library._scoped_library("firesteel_test_peeks", "DEF") as lib:
        lib.define("peek(Tensor x) -> Tensor")
        lib.impl("peek", Peeks.apply, "CompositeImplicitAutograd")
        f = lambda x: torch.ops.firesteel_test_peeks.peek(x.sin())
        with pytest.raises(fs.errors.Unsupported, match="Cannot access data pointer"):
            fs.compile(f, backend="aot_eager", fullgraph=True)(torch.ones(3, requires_grad=True))
        x = torch.ones(3, requires_grad=True)
        fs.compile(f, backend="aot_eager")(x).sum().backward()
        torch.testing.assert_close(x.grad, 2 * torch.ones(3).cos())


def test_operators_that_save_and_set_the_random_state():
    """torch's own operators of higher order, as they stand in graphs that other tracers made."""
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    saved = graph.call_function(run_and_save_rng_state, (torch.ops.aten.rand_like.default, x))
    state, drawn = (graph.call_function(operator.getitem, (saved, k)) for k in range(2))
    other = graph.call_function(torch.ops.aten.rand.default, ([3],))
    again = graph.call_function(run_with_rng_state, (state, torch.ops.aten.rand_like.default, x))
    graph.output((drawn, other, again))
    compiled = native(torch.fx.GraphModule({}, graph), [torch.zeros(4)])
    torch.manual_seed(0)
    drawn, other, again = compiled(torch.zeros(4))
    behind = torch.rand(2)
    torch.manual_seed(0)
    assert torch.equal(drawn, again) and torch.equal(drawn, torch.rand(4)) and torch.equal(other, torch.rand(3)) and torch.equal(behind, torch.rand(2))
