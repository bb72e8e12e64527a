"""Jagged nested tensors in one graph: values, gradients, sizes and errors as eager's."""
import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nested import nested_tensor_from_jagged
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

import firesteel as fs

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = ((2, 3, 4), (5, 1, 3), (7, 2, 2), (3, 4))
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def jagged(*lengths, size=4, requires_grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, size, generator=generator) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=requires_grad)


def make_of(tensor):
    return tensor._ragged_idx, tensor._lengths is None, tensor._maybe_min_seqlen, tensor._maybe_max_seqlen, tensor._values.stride()


def same(ours, theirs):
    ours, theirs = tree_leaves(ours), tree_leaves(theirs)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor) and b.is_nested:
            assert make_of(a) == make_of(b) and a.requires_grad == b.requires_grad
            a, b = (a._values, a._offsets), (b._values, b._offsets)
        torch.testing.assert_close(a, b)


def gradient(result, x):
    values = [t.values() if t.is_nested else t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    found = torch.autograd.grad(sum((v * torch.arange(v.numel()).view(v.shape)).sum() for v in values), x)[0]
    assert found.shape == x.shape
    return found.values()


def check(fn, batches=BATCHES, graphs=2, differentiates=True, **settings):
    fs.reset()
    compiled = fs.compile(fn, **{"fullgraph": True, **settings})
    for lengths in batches:
        x = jagged(*lengths, requires_grad=True)
        torch.manual_seed(0)
        theirs = fn(x)
        torch.manual_seed(0)
        ours = compiled(x)
        same(ours, theirs)
        if differentiates:
            torch.testing.assert_close(gradient(ours, x), gradient(theirs, x))
    assert fs.counters["stats"]["unique_graphs"] == graphs
    assert not fs.counters["graph_break"]


def heads(x):
    return x.unflatten(-1, (2, 2)).transpose(1, 2)


PROGRAMS = {
    "pointwise": lambda x: (x.sin() * 2 + x).relu(), "broadcast": lambda x: x + torch.ones(4), "values": lambda x: x.values().cos(),
    "rebuilt": lambda x: nested_tensor_from_jagged(x.values() * 2, x.offsets()) + x, "sum of all": lambda x: x.sum(),
    "mean of the last": lambda x: x.mean(-1, keepdim=True), "softmax": lambda x: F.softmax(x, -1), "amax": lambda x: x.amax(1),
    "padded": lambda x: x.to_padded_tensor(0.0), "padded by torch.nested": lambda x: torch.nested.to_padded_tensor(x, 0.5) * 2,
    "linear": lambda x: F.linear(x, WEIGHT), "matmul": lambda x: x @ WEIGHT, "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)), "dropout": lambda x: F.dropout(x, 0.5), "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0), "cat": lambda x: torch.cat([x, x], -1), "chunk": lambda x: x.chunk(2, -1)[1],
    "view": lambda x: x.view(x.size(0), x.size(1), 2, 2), "view with -1": lambda x: x.view(x.shape[0], -1, 2, 2),
    "transpose": lambda x: x.transpose(1, 2).contiguous(), "unsqueeze": lambda x: x.unsqueeze(-1).squeeze(-1), "to": lambda x: x.to(torch.float64),
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x * 2)).transpose(1, 2).flatten(-2),
    "ones_like": lambda x: torch.ones_like(x) + x, "numel": lambda x: x.sum() / x.numel(),
    "in place": lambda x: x.sin().mul_(2) + 1, "cross_entropy": lambda x: F.cross_entropy(x.values(), torch.zeros(x.values().shape[0]).long()),
    "sizes": lambda x: x * x.shape[0] + x.dim() + x.shape[-1] + len(x), "same raggedness": lambda x: x + 1 if x.size(1) == x.sin().size(1) else x,
    "questions": lambda x: x * 2 if x.is_nested and x.requires_grad and x.layout is torch.jagged and isinstance(x, torch.Tensor) else x,
    "unbind": lambda x: [F.linear(part, WEIGHT) + part.mean(0) for part in x.sin().unbind()], "iterated": lambda x: torch.cat([F.softmax(t, 0) for t in x]),
    "an item": lambda x: x[0] * 2 + x[-1].sum(), "containers": lambda x: (x.sin(), {"a": x.cos(), "b": x.offsets()}), "under no_grad": lambda x: x * torch.no_grad()(torch.sin)(x),
    "checkpoint": lambda x: checkpoint.checkpoint(lambda t: t.sin().cos(), x, use_reentrant=False) * 2,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_one_graph(name):
    """Two: one for the first number of sequences, one for any."""
    check(PROGRAMS[name])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends(backend):
    check(PROGRAMS["attention"], BATCHES[:2], 1, backend=backend)


@pytest.mark.parametrize("dynamic", [True, False])
def test_dynamic_settings(dynamic):
    check(PROGRAMS["padded"], BATCHES, 1 if dynamic else 4, dynamic=dynamic)


def in_pieces(fn, x):
    return torch.cat([fn(part) for part in x.values().split(x.offsets().diff().tolist())])


RAGGED = {"softmax": lambda t: F.softmax(t, -2), "sum": lambda t: t.sum(-2, keepdim=True), "mean": lambda t: t.mean(-2, keepdim=True)}


@pytest.mark.parametrize("name", RAGGED)
def test_over_the_ragged_dimension(name):
    """Values are eager's.  Eager has wrong gradients of softmax and none of the others: they are those of the sequences one by one."""
    fs.reset()
    compiled = fs.compile(RAGGED[name], fullgraph=True)
    for lengths in BATCHES:
        x = jagged(*lengths, requires_grad=True)
        ours, pieces = compiled(x), in_pieces(RAGGED[name], x)
        same(ours, RAGGED[name](x))
        plain = ours.values() if ours.is_nested else ours.reshape(pieces.shape)
        weights = torch.randn(pieces.shape)
        torch.testing.assert_close(torch.autograd.grad((plain * weights).sum(), x)[0].values(),
                                   torch.autograd.grad((pieces * weights).sum(), x)[0].values())
    assert fs.counters["stats"]["unique_graphs"] == 2


def test_results_go_with_the_inputs():
    compiled = fs.compile(lambda x: (x.sin(), x.offsets(), x.shape, x), fullgraph=True)
    for lengths in BATCHES:
        x = jagged(*lengths)
        made, offsets, size, itself = compiled(x)
        same(made + x, x.sin() + x)
        assert offsets is x.offsets() and itself is x and size == x.shape and type(size) is torch.Size


def test_several_inputs():
    """Sizes are equal where the offsets are one tensor."""
    def add(a, b):
        return (a + b).sin() * a

    compiled = fs.compile(add, fullgraph=True)
    for lengths in BATCHES:
        a = jagged(*lengths)
        b = nested_tensor_from_jagged(torch.randn(sum(lengths), 4), a.offsets())
        same(compiled(a, b), add(a, b))
    a, b = jagged(2, 3, 4), jagged(2, 3, 4)
    for fn in (add, compiled, fs.compile(add)):
        with pytest.raises(RuntimeError, match="cannot call binary pointwise function add"):
            fn(a, b)


def test_made_inside():
    def run(values, offsets):
        made = nested_tensor_from_jagged(values, offsets)
        return (made * 2).sum(), made + made, made

    compiled = fs.compile(run, fullgraph=True)
    for n in (5, 7, 8):
        values, offsets = torch.randn(n, 4, requires_grad=True), torch.tensor([0, 2, n])
        ours, theirs = compiled(values, offsets), run(values, offsets)
        same(ours, theirs)
        assert ours[1].shape == theirs[1].shape and ours[1].offsets() is offsets
        torch.testing.assert_close(*(torch.autograd.grad(r[1].values().sum() + r[0], values) for r in (ours, theirs)))


def test_made_of_a_list():
    def run(parts):
        x = torch.nested.nested_tensor(parts, layout=torch.jagged)
        return x.sin(), x.to_padded_tensor(0.0), torch.nested.as_nested_tensor(parts, layout=torch.jagged).cos()

    compiled = fs.compile(run, fullgraph=True)
    for lengths in BATCHES:
        parts = [torch.randn(n, 4) for n in lengths]
        same(compiled(parts), run(parts))


def test_holes_and_other_ragged_dimensions():
    fs.reset()
    compiled = fs.compile(lambda x: (x * 2).sin(), fullgraph=True)
    for n in (6, 7, 9):
        x = torch.nested.narrow(torch.randn(3, n, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]), layout=torch.jagged)
        assert x.lengths() is not None
        same(compiled(x), (x * 2).sin())
        assert compiled(x).shape == x.shape
        y = jagged(n, 2).transpose(1, 2)
        same(compiled(y), (y * 2).sin())
    assert fs.counters["stats"]["unique_graphs"] == 2


def test_layouts_that_change():
    """Each has its own graph; other kinds of arguments too."""
    fs.reset()
    compiled = fs.compile(lambda x: [part * 2 for part in x.unbind()])
    for n in (6, 7, 9):
        holes = torch.nested.narrow(torch.randn(3, n, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]), layout=torch.jagged)
        for x in (holes, jagged(n, 2).transpose(1, 2), jagged(n, 0, 1), jagged(n, 2, size=8).chunk(2, -1)[0], torch.ones(n, 2)):
            same(compiled(x), [part * 2 for part in x.unbind()])


def test_lengths_that_are_not_known():
    """to_padded_tensor then pads to the number of all values."""
    compiled = fs.compile(lambda x: x.to_padded_tensor(0.0) + 1, fullgraph=True)
    for x in (nested_tensor_from_jagged(torch.randn(5, 4), torch.tensor([0, 2, 5])), jagged(2, 3), jagged(4, 0)):
        same(compiled(x), x.to_padded_tensor(0.0) + 1)


def test_writes():
    def write(x):
        x.mul_(2)
        y = x.transpose(1, 2)
        y.add_(1)
        return x.sum(), y

    compiled = fs.compile(write, fullgraph=True)
    for lengths in BATCHES:
        x, y = jagged(*lengths), jagged(*lengths)
        ours, theirs = compiled(x), write(y)
        same((ours, x), (theirs, y))
        assert ours[1]._values.data_ptr() == x._values.data_ptr()


def test_inference():
    compiled = fs.compile(lambda x: x.sin(), fullgraph=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = jagged(2, 3)
            same(compiled(x), x.sin())
            assert compiled(x).is_inference() == x.sin().is_inference()


def branches(x):
    return (x * 2 if x.sum() > 0 else x * 3).sin()


def split_in_the_middle(x):
    y = x.sin()
    fs.graph_break()
    return y.cos() + x


def greatest(x):
    return [part.max(0).values for part in x.sin().unbind()]


def hooked(x):
    y = x.sin()
    y.register_hook(lambda gradient: gradient * 2)
    return y * 2


def hooked_values_of_another(x):
    values = x.values() * 1
    y = torch.nested.nested_tensor_from_jagged(values, x.offsets())
    y.register_hook(lambda gradient: gradient * 5)
    return y * values.sum()


def a_leaf(x):
    return (x.detach().requires_grad_() * 2).requires_grad, x * 2


def written(x):
    y = x * 1
    fs.graph_break()
    y.mul_(2)
    return y.sin()


def test_hooks_see_nested_gradients():
    seen = []

    def program(x):
        y = x.sin()
        y.register_hook(lambda gradient: seen.append((gradient.is_nested, gradient.offsets().tolist())))
        y.register_hook(lambda gradient: gradient * 2)
        return y.cos() + y, y * 3

    compiled = fs.compile(program, fullgraph=True)
    for lengths in BATCHES:
        x = jagged(*lengths, requires_grad=True)
        ours, theirs = (torch.autograd.grad(sum(part.values().square().sum() for part in fn(x)), x)[0] for fn in (compiled, program))
        torch.testing.assert_close(ours.values(), theirs.values())
        assert seen.pop() == seen.pop() == (True, x.offsets().tolist())


@pytest.mark.parametrize("program", [written, branches, split_in_the_middle, greatest, hooked, hooked_values_of_another, a_leaf])
def test_breaks(program):
    compiled = fs.compile(program)
    for lengths in BATCHES:
        x = jagged(*lengths, requires_grad=True)
        ours, theirs = compiled(x), program(x)
        same(ours, theirs)
        torch.testing.assert_close(gradient(ours, x), gradient(theirs, x))


def test_errors_are_eagers():
    compiled = fs.compile(lambda x: F.mse_loss(x, x * 2))
    with pytest.raises(NotImplementedError, match="mse_loss"):
        compiled(jagged(2, 3))
    causal = lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True)     # noqa: E731
    for fn in (lambda x: x[5], lambda x: x.unbind(1), lambda x: x[0:1], causal):
        with pytest.raises((RuntimeError, IndexError)) as theirs:
            fn(jagged(2, 3))
        with pytest.raises(theirs.type, match=re.escape(str(theirs.value)[:40])):
            fs.compile(fn)(jagged(2, 3))


def test_a_gradient_of_a_gradient():
    def twice(fn, x):
        first = torch.autograd.grad((fn(x) ** 2).values().sum(), x, create_graph=True)[0]
        return torch.autograd.grad((first.values() ** 2).sum(), x)[0]

    x = jagged(2, 3, requires_grad=True)
    same(twice(fs.compile(torch.sin, fullgraph=True), x), twice(torch.sin, x))


class Block(nn.Module):
    def __init__(self, size=16, count=4):
        super().__init__()
        self.count, self.before, self.middle = count, nn.LayerNorm(size), nn.LayerNorm(size)
        self.inputs, self.output, self.up, self.down = nn.Linear(size, 3 * size), nn.Linear(size, size), nn.Linear(size, 32), nn.Linear(32, size)

    def forward(self, x):
        parts = [part.contiguous().unflatten(-1, [self.count, -1]).transpose(1, 2) for part in self.inputs(self.before(x)).chunk(3, -1)]
        x = x + self.output(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.middle(x))))


def test_training_a_transformer():
    torch.manual_seed(0)
    fs.reset()
    theirs = nn.Sequential(Block(), Block())
    ours = copy.deepcopy(theirs)
    compiled = fs.compile(ours, fullgraph=True)
    for lengths in (*BATCHES, *BATCHES):
        x = jagged(*lengths, size=16)
        for model, fn in ((theirs, theirs), (ours, compiled)):
            (fn(x).values() ** 2).mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-4, atol=1e-5)
    assert fs.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_attention_with_dropout(dropout_p):
    """Draws, results, gradients, and what is drawn next."""
    f = lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x * 2), dropout_p=dropout_p)     # noqa: E731
    compiled = fs.compile(f, fullgraph=True)
    for lengths in ((3, 5), (2, 7, 4), (3, 5), (1, 6, 2)):
        found = []
        for call in (compiled, f):
            torch.manual_seed(3)
            x = jagged(*lengths, requires_grad=True)
            out = call(x).transpose(1, 2).values()
            out.square().sum().backward()
            found.append((out.detach(), x.grad.values(), torch.rand(1)))
        torch.testing.assert_close(*found)


def test_masked_select():
    f = lambda x, mask: torch.nested.masked_select(x, mask) * 2     # noqa: E731
    compiled = fs.compile(f, fullgraph=True)
    for seed in range(3):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed))
        ours, theirs = compiled(x, x > 0), f(x, x > 0)
        torch.testing.assert_close((ours.values(), ours.offsets()), (theirs.values(), theirs.offsets()))
