"""Whole graphs: inputs, outputs, views, constants, rounding, symbolic sizes, and small models forward and backward."""
import operator

import pytest
import torch
import torch.nn.functional as F
from interp import run, run_plan
from optable import Val, graph_of
from torch.fx import Graph, GraphModule
from tracing import trace

from firesteel import pipeline
from firesteel.artifacts import counters
from firesteel.config import config
from firesteel.graph.abstract import AbstractWorld
from firesteel.graph.decomp import core_decompositions
from firesteel.loops.fuse import fuse
from firesteel.loops.ir import Extern, Nest, View
from firesteel.loops.lower import lower_graph
from firesteel.loops.plan import plan
from firesteel.loops.simplify import simplify
from firesteel.loops.verify import verify_program
from firesteel.sym.env import ShapeEnv
from firesteel.sym.expr import Expr, postorder
from firesteel.sym.symint import to_symint

aten = torch.ops.aten


def check(build, *inputs):
    """Lowers a hand-made graph, runs it, compares with eager; returns the program."""
    gm, expected = graph_of(build, list(inputs))
    program = lower_graph(gm, list(inputs))
    verify_program(program)
    for got, want in zip(run(program, inputs), expected):
        if want is None:
            assert got is None
            continue
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride() and got.dtype is want.dtype
    return program


def nests(program):
    return [step for step in program.steps if isinstance(step, Nest)]


def calls(program):
    return [step for step in program.steps if isinstance(step, Extern)]


# ---------------------------------------------------------------- outputs

def test_an_input_is_returned_as_itself():
    program = check(lambda call, x: (x,), torch.randn(3, 4))
    assert program.steps == () and program.outputs[0].buffer == "x0"


def test_outputs_twice_and_none():
    program = check(lambda call, x: (y := call(aten.neg.default, x), y, None), torch.randn(3))
    assert program.outputs[0] == program.outputs[1] and program.outputs[2] is None
    assert len(program.steps) == 1 and program.buffers["neg_default"].kind == "output"


def test_a_view_is_returned_on_its_buffer():
    program = check(lambda call, x: (call(aten.t.default, call(aten.neg.default, x)),), torch.randn(3, 4))
    assert program.outputs[0] == View("neg_default", (4, 3), (1, 4), 0, "f32")
    assert len(program.steps) == 1 and program.buffers["neg_default"].kind == "output"


def test_a_view_of_an_input_that_is_a_view():
    base = torch.randn(40)
    program = check(lambda call, x: (call(aten.select.int, x, 0, 1),), base[3:27].view(4, 6).t())
    assert program.steps == () and program.outputs[0].offset == 4


def test_a_constant_is_made_when_it_is_returned():
    program = check(lambda call: (call(aten.full.default, [2, 3], 1.5),))
    assert len(nests(program)) == 1


def test_an_expanded_output():
    program = check(lambda call, x: (call(aten.expand.default, x, [3, 4]),), torch.randn(1, 4))
    assert program.outputs[0].strides == (0, 1)


def test_channels_last_stays():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    program = check(lambda call, x: (call(aten.neg.default, x),), x)
    assert program.buffers["neg_default"].strides == x.stride()


# ---------------------------------------------------------------- what is left out, what is not

def test_dead_nodes_are_not_lowered():
    def build(call, x):
        call(aten.exp.default, x)
        return (call(aten.neg.default, x),)
    assert len(check(build, torch.randn(3)).steps) == 1


def test_dead_random_numbers_are_drawn():
    def build(call, x):
        call(aten.rand_like.default, x)
        return (call(aten.neg.default, x),)
    assert len(calls(check(build, torch.randn(3)))) == 1


def test_unused_inputs():
    program = check(lambda call, x, y: (call(aten.neg.default, y),), torch.randn(3), torch.randn(3))
    assert program.inputs == (None, "x1")


def test_unused_results_are_not_stored():
    program = check(lambda call, x: (call(operator.getitem, call(aten.max.dim, x, 1), 0),), torch.randn(3, 4))
    assert [len(phase.stores) for phase in program.steps[0].phases][-1] == 1
    program = check(lambda call, x: (call(operator.getitem, call(aten.sort.default, x), 1),), torch.randn(3, 4))
    assert program.steps[0].outputs[0] is None


# ---------------------------------------------------------------- views

def test_views_make_no_nests():
    def build(call, x, y):
        rows = call(aten.view.default, call(aten.permute.default, x, [1, 0, 2]), [3, 2, 2, 2])
        part = call(aten.slice.Tensor, call(aten.unsqueeze.default, rows, 0), 2, 1, 2)
        return (call(aten.add.Tensor, call(aten.squeeze.dim, part, 0), y),)
    assert len(check(build, torch.randn(2, 3, 4), torch.randn(2, 2)).steps) == 1


def test_a_reshape_of_a_reshape_is_one():
    def build(call, x):
        there = call(aten.view.default, x, [24])
        return (call(aten.neg.default, call(aten.view.default, there, [4, 6])),)
    program = check(build, torch.randn(4, 6))
    assert all(node.op in ("axis", "load") for node in postorder(program.steps[0].phases[0].stores[0].value) if node.op != "neg")


@pytest.mark.usefixtures("library_products")
def test_a_reshape_that_copies_is_copied_for_a_library_call():
    """aten.reshape of a transposed tensor has no strides of its own: a matrix product needs a copy, a nest does not."""
    def product(call, x):
        flat = call(aten.reshape.default, call(aten.t.default, x), [2, 6])
        return (call(aten.mm.default, flat, call(aten.t.default, flat)),)
    program = check(product, torch.randn(4, 3))
    assert len(nests(program)) >= 1 and len(calls(program)) == 1
    program = check(lambda call, x: (call(aten.exp.default, call(aten.reshape.default, call(aten.t.default, x), [2, 6])),), torch.randn(4, 3))
    assert len(program.steps) == 1


@pytest.mark.usefixtures("library_products")
def test_library_calls_read_views_by_strides():
    def build(call, x, y):
        return (call(aten.mm.default, call(aten.t.default, call(aten.exp.default, x)), call(aten.expand.default, y, [4, 5])),)
    program = check(build, torch.randn(4, 3), torch.randn(1, 5))
    assert calls(program)[0].out and calls(program)[0].args[1].strides == (0, 1)
    assert len(nests(program)) == 1


def test_windows_over_an_expanded_input():
    """The input's storage has less than its shape says: only a copy by torch can read such a window."""
    x = torch.randn(1, 4).expand(3, 4)
    program = check(lambda call, x: (call(aten.neg.default, call(aten.as_strided.default, x, [2, 2], [2, 1], 0)),), x)
    assert len(calls(program)) == 1


def test_windows_that_leave_an_input():
    """A window may reach storage before and behind the tensor that was given."""
    x = torch.randn(20)[5:15]
    program = check(lambda call, x: (call(aten.neg.default, call(aten.as_strided.default, x, [3, 2], [2, 1], 2)),), x)
    assert len(calls(program)) == 1
    program = check(lambda call, x: (call(aten.neg.default, call(aten.as_strided.default, x, [3, 2], [2, 1], 7)),), x)
    assert not calls(program)


@pytest.mark.parametrize("old,new,read_by_loops", [(torch.float32, torch.int32, True), (torch.float16, torch.int16, True), (torch.float16, torch.bfloat16, True),
                                                   (torch.int64, torch.float64, True), (torch.uint8, torch.int8, True), (torch.uint8, torch.bool, False),
                                                   (torch.float64, torch.int32, False), (torch.int16, torch.float32, False)])
def test_bits_read_as_another_dtype(old, new, read_by_loops):
    """Elements of one size are read as they are; for others the library makes a copy."""
    x = torch.randint(0, 2, (3, 4)).to(old)
    program = check(lambda call, x: (call(aten.logical_not.default, call(aten.view.dtype, x, new)),), x)
    assert len(calls(program)) == (0 if read_by_loops else 1) and len(nests(program)) == 1


def test_bits_behind_views_and_in_front_of_them():
    def build(call, x, y):
        turned = call(aten.view.dtype, call(aten.t.default, call(aten.neg.default, x)), torch.int32)
        padded = call(aten.constant_pad_nd.default, call(aten.view.dtype, call(aten.view.dtype, x, torch.int32), torch.float32), [1, 1])
        full = call(aten.view.dtype, call(aten.full.default, [3, 4], 1.5, dtype=torch.float32), torch.int32)
        return (call(aten.slice.Tensor, turned, 0, 1, 3), call(aten.add.Tensor, turned, call(aten.t.default, y)), padded, call(aten.add.Tensor, full, y))
    program = check(build, torch.randn(3, 4), torch.randint(0, 9, (3, 4), dtype=torch.int32))
    assert not calls(program)


def test_complex_numbers_are_left_to_torch():
    def build(call, x):
        return (call(aten.mul.Tensor, x, x), call(aten.add.Tensor, call(aten.select.int, call(aten.view_as_real.default, x), -1, 1), 1.0))
    program = check(build, torch.randn(4, dtype=torch.complex64))
    assert len(calls(program)) == 2


def test_a_lazy_conjugate_is_computed():
    x = torch.randn(4, dtype=torch.complex64)
    gm, _ = graph_of(lambda call, x: (call(aten.mul.Tensor, call(aten._conj.default, x), x),), [x])
    torch.testing.assert_close(run(lower_graph(gm, [x]), [x])[0], x.conj() * x)


def test_a_view_operator_without_a_row_is_a_window():
    program = check(lambda call, x: (call(aten.neg.default, call(aten.swapdims.default, x, 0, 1)),), torch.randn(3, 4))
    assert len(program.steps) == 1 and not calls(program)


# ---------------------------------------------------------------- constants

def module_with(tensor, op):
    graph = Graph()
    x = graph.placeholder("x")
    constant = graph.get_attr("weight")
    made = graph.call_function(op, (x, constant))
    graph.output((made,))
    root = torch.nn.Module()
    root.register_buffer("weight", tensor)
    gm = GraphModule(root, graph)
    value = torch.randn(3)
    x.meta["val"], made.meta["val"] = Val(value), Val(op(value, tensor))
    return gm, value


def test_tensors_of_the_module_are_constants():
    gm, x = module_with(torch.randn(3), aten.mul.Tensor)
    program = lower_graph(gm, [x])
    verify_program(program)
    assert program.buffers["weight"].kind == "constant"
    torch.testing.assert_close(run(program, [x])[0], gm(x)[0])


def test_one_number_of_the_module_is_folded():
    gm, x = module_with(torch.tensor(2.5), aten.mul.Tensor)
    program = lower_graph(gm, [x])
    assert "weight" not in program.buffers
    torch.testing.assert_close(run(program, [x])[0], x * 2.5)


# ---------------------------------------------------------------- errors of indices

@pytest.mark.parametrize("op, args", [(aten.embedding.default, ()), (aten.index_select.default, (0,))])
def test_an_index_out_of_range_is_an_index_error(op, args):
    build = lambda call, w, i: (call(op, w, *args, i),)
    gm, _ = graph_of(build, [torch.randn(4, 3), torch.tensor([1, 2])])
    program = lower_graph(gm, [])
    for bad in (4, -1):
        with pytest.raises(IndexError):
            run(program, [torch.randn(4, 3), torch.tensor([1, bad])])


def test_indexing_wraps_negative_indices():
    check(lambda call, x, i: (call(aten.index.Tensor, x, [i]),), torch.randn(4, 3), torch.tensor([-1, -4, 3]))


def test_integer_division_by_a_tensor_is_checked():
    """Eager raises for a zero divisor; the loop reports an index out of range, after which eager is asked."""
    program = check(lambda call, x, y: (call(aten.remainder.Tensor, x, y),), torch.tensor([7, -7]), torch.tensor([2, 3]))
    assert len(nests(program)) == 1
    with pytest.raises(IndexError):
        run(program, [torch.tensor([7, -7]), torch.tensor([2, 0])])
    program = check(lambda call, x: (call(aten.remainder.Scalar, x, 3),), torch.tensor([7, -7]))
    assert len(nests(program)) == 1


# ---------------------------------------------------------------- rounding

def bf16_chain(call, x):
    return (call(aten.exp.default, call(aten.sin.default, x)),)


def roundings(program):
    stored = [store.value for nest in nests(program) for phase in nest.phases for store in phase.stores]
    return [node.attr for value in stored for node in postorder(value) if node.op == "to" and node.dtype == "bf16"]


def test_roundings_between_operators_are_loose():
    x = torch.randn(8, dtype=torch.bfloat16)
    assert roundings(check(bf16_chain, x)) == ["loose", "loose"]
    with config.patch(eager_rounding=True):
        assert roundings(check(bf16_chain, x)) == [None, None]


def test_a_rounding_that_was_asked_for_is_strict():
    def build(call, x):
        return (call(aten._to_copy.default, call(aten._to_copy.default, x, dtype=torch.bfloat16), dtype=torch.float32),)
    x = torch.randn(64)
    program = check(build, x)
    assert roundings(program) == [None]
    fused = fuse(simplify(program))
    assert torch.equal(run(fused, [x])[0], x.bfloat16().float())


# ---------------------------------------------------------------- counters

@pytest.mark.usefixtures("library_products")
def test_fallbacks_and_library_calls_are_counted_apart():
    def build(call, x):
        return (call(aten.mm.default, x, x), call(operator.getitem, call(aten.cummax.default, x, 0), 0))
    before = dict(counters["native"])
    check(build, torch.randn(3, 3))
    gained = {k: v - before.get(k, 0) for k, v in counters["native"].items() if v != before.get(k, 0)}
    assert gained == {"library_calls": 1, "fallbacks": 1, "fallback:cummax": 1}


# ---------------------------------------------------------------- symbolic sizes

def dynamic(fn, first, others, dims):
    """Traces fn with symbols for `dims` of each input, lowers once, and runs at every size."""
    world = AbstractWorld(ShapeEnv())
    abstract = [world.wrap(x, f"x{n}", d) for n, (x, d) in enumerate(zip(first, dims))]
    traced = trace(fn, abstract, decompositions=core_decompositions())
    program = lower_graph(traced.gm, first)
    verify_program(program)
    for inputs in (first, *others):
        for got, want in zip(run(program, inputs), fn(*inputs)):
            torch.testing.assert_close(got, want) if isinstance(want, torch.Tensor) else None
            assert got == want if not isinstance(want, torch.Tensor) else got.stride() == want.stride()
    return program


DYNAMIC = ("dynamic", "dynamic")
FUNCTIONS = {
    "pointwise": lambda x: [torch.relu(x + 1) * x.sum(0)],
    "mean": lambda x: [x.mean(), x.mean(1), x.var(0)],
    "softmax": lambda x: [x.softmax(-1), x.log_softmax(0)],
    "merge": lambda x: [x.flatten().exp(), x.t().reshape(-1).exp()],
    "split": lambda x: [x.unsqueeze(1).expand(-1, 3, -1).reshape(-1, x.shape[1]).sum(0)],
    "slices": lambda x: [x[1:] - x[:-1], x[-1], x[:, ::2].exp()],
    "cat": lambda x: [torch.cat([x, x * 2, x[:1]]), torch.cat([x] * 6, 1)],
    "pad": lambda x: [F.pad(x, (1, 2)), F.pad(x, (-1, 0))],
    "triangle": lambda x: [x.tril(), x.triu(1)],
    "numbers": lambda x: [x / x.shape[0], x * x.shape[1] ** 0.5, torch.full((x.shape[0],), x.shape[1]), torch.arange(x.shape[0]) * 2],
    "sizes": lambda x: [x.exp(), x.shape[0], x.shape[0] * x.shape[1] + 1],
    "cumsum": lambda x: [x.cumsum(0), x.cumsum(1)],
    "argmax": lambda x: [x.argmax(1), x.argmax(), x.max(0).values],
    "matmul": lambda x: [x @ x.t(), (x.t() @ x).exp()],
    "flip": lambda x: [x.flip(0), x.roll(1, 0), x.repeat(2, 1)],
    "gather": lambda x: [x.gather(1, x.argsort(1)), x[torch.arange(x.shape[0] - 1)]],
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_symbolic_sizes(name):
    program = dynamic(FUNCTIONS[name], [torch.randn(5, 7)], [[torch.randn(3, 4)], [torch.randn(8, 2)]], [DYNAMIC])
    assert set(program.symbols) == {"s0", "s1"}


def test_symbols_that_turned_out_equal_are_one():
    program = dynamic(lambda x, y: [x.exp() + y], [torch.randn(5), torch.randn(5)], [[torch.randn(3), torch.randn(3)]], [("dynamic",), ("dynamic",)])
    extents = {axis.extent for nest in nests(program) for axis in nest.axes}
    assert len(extents) == 1 and set(program.symbols) == {"s0"}


def test_numbers_as_inputs():
    env = ShapeEnv()
    world = AbstractWorld(env)
    n = to_symint(env.create_symbol(4, "n"), env)
    traced = trace(lambda x, n: [x * n, torch.ones(n) + x, n + 1], [world.wrap(torch.randn(1), "x"), n])
    program = lower_graph(traced.gm, [])
    verify_program(program)
    assert program.symbols == {"s0": (1, "value", 0)} and isinstance(program.outputs[2], Expr)
    x = torch.randn(1)
    for n in (4, 9):
        got = run(program, [x, n])
        torch.testing.assert_close(got[:2], [x * n, torch.ones(n) + x])
        assert got[2] == n + 1


def test_a_number_read_from_data_becomes_a_symbol():
    """x.sum().item() as a fresh symbol: given by the library call, used by later steps and as an output."""
    env = ShapeEnv()
    n = to_symint(env.create_unbacked(), env)
    graph = Graph()
    x = graph.placeholder("x")
    read = graph.call_function(aten._local_scalar_dense.default, (x,))
    made = graph.call_function(aten.full.default, ([3], read))
    graph.output((made, read))
    value = torch.tensor(7)
    x.meta["val"], read.meta["val"], made.meta["val"] = Val(value), n, Val(torch.full([3], 7))
    program = lower_graph(GraphModule(torch.nn.Module(), graph), [value])
    verify_program(program)
    filled, number = run(program, [value])
    assert filled.tolist() == [7, 7, 7] and number == 7


@torch.library.custom_op("firesteel_test::double_in_place", mutates_args={"x"})
def double_in_place(x: torch.Tensor, y: torch.Tensor) -> None:
    x.mul_(2).add_(y)


def test_operators_that_write_say_so():
    def build(call, x, y):
        copied = call(aten.clone.default, x)
        call(torch.ops.firesteel_test.double_in_place.default, copied, y)
        return (call(aten.neg.default, copied),)
    program = check(build, torch.randn(3), torch.randn(3))
    assert calls(program)[0].mutates == ("clone_default",)


# ---------------------------------------------------------------- small models, forward and backward, through all of loops/

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 11)

    def forward(self, tokens):
        h = self.norm(self.embed(tokens))
        q = h.view(*h.shape[:-1], 2, 4).transpose(1, 2)
        h = h + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(h.shape)
        logits = self.second(F.gelu(self.first(h)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4)
        self.last = torch.nn.Linear(4, 5)

    def forward(self, x):
        h = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.last(h.mean((2, 3))).log_softmax(1).square().sum()


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.LSTMCell(4, 6)

    def forward(self, xs):
        h = c = torch.zeros(xs.shape[1], 6)
        for x in xs:
            h, c = self.cell(x, (h, c))
        return (h * c).sum()


MODELS = {
    "block": (Block, [lambda n: torch.arange(n * 7).reshape(n, 7) % 11]),
    "convolutions": (Convolutions, [lambda n: torch.randn(n, 3, 6, 6)]),
    "recurrent": (Recurrent, [lambda n: torch.randn(3, n, 4)]),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_models_forward_and_backward(name):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def joint(*values):
        leaves = dict(zip(parameters, values))
        state = dict(zip(buffers, values[len(leaves):]))
        loss = torch.func.functional_call(model, {**leaves, **state}, values[len(leaves) + len(state):])
        return [loss, *torch.autograd.grad(loss, list(leaves.values()))]

    values = [*parameters.values(), *[b.clone() for b in buffers.values()], *[i(3) for i in inputs]]
    fallbacks = counters["native"]["fallbacks"]
    gm = trace(joint, values, decompositions=core_decompositions()).gm
    program = lower_graph(gm, values)
    assert counters["native"]["fallbacks"] == fallbacks
    expected = joint(*[v.clone() if not v.requires_grad else v for v in values])
    fused = fuse(simplify(program))
    for made in (program, fused):
        verify_program(made)
        compare(run(made, values), expected)
    compare(run_plan(plan(fused), values), expected)
    assert len(nests(fused)) < len(nests(program))


def compare(actual, expected):
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)
        assert got.stride() == want.stride()


def test_a_graph_that_torch_runs_keeps_the_layouts_it_was_traced_with():
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    conv = graph.call_function(torch.ops.aten.convolution.default, (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1))
    conv.meta["val"] = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    view = graph.call_function(torch.ops.aten.view.default, (graph.call_function(torch.ops.aten.permute.default, (conv, [0, 2, 3, 1])), [32, 3]))
    graph.output((view,))
    gm = torch.fx.GraphModule({}, graph)
    pipeline.keep_layouts(gm)
    x, w = torch.randn(2, 5, 4, 4), torch.randn(3, 5, 1, 1)
    (found,) = gm(x, w)
    torch.testing.assert_close(found, torch.nn.functional.conv2d(x, w).permute(0, 2, 3, 1).reshape(32, 3))
