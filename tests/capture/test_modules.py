"""Modules in captured code: what is made, changed, shared and replaced, before, between and inside of compiled calls."""
import collections
import copy
import io
import pickle

import pytest
import torch
from torch import nn

import firesteel as fs
from firesteel.testing import CompileCounter


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()


def agree(module, compiled, *inputs):
    """A call of a copy of the module, eagerly, and one of the compiled module: values, gradients, state."""
    module.zero_grad()
    twin = copy.deepcopy(module)
    torch.manual_seed(0)
    expected = twin(*inputs)
    torch.manual_seed(0)
    out = compiled(*inputs)
    torch.testing.assert_close(out, expected)
    if out.requires_grad:
        expected.sum().backward()
        out.sum().backward()
    assert list(module.state_dict()) == list(twin.state_dict())
    torch.testing.assert_close(dict(module.state_dict()), dict(twin.state_dict()))
    for (name, mine), (_, theirs) in zip(module.named_parameters(), twin.named_parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    assert {k: v for k, v in vars(module).items() if isinstance(v, (int, str, list))} == {
        k: v for k, v in vars(twin).items() if isinstance(v, (int, str, list))}
    return out


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.lin = nn.Linear(4, 4)
        self.scale = 2.0
        self.mode = "plus"
        self.count = 0

    def forward(self, x):
        self.count += 1
        out = self.lin(x) * self.scale
        return out + 1 if self.mode == "plus" else out - 1


def x24():
    torch.manual_seed(5)
    return torch.randn(2, 4)


def test_attributes_changed_between_calls():
    module = Block()
    compiled = fs.compile(module, backend="aot_eager", fullgraph=True)
    agree(module, compiled, x24())
    for name, value in [("scale", 3.0), ("mode", "minus"), ("scale", 3), ("mode", "plus"), ("count", 7)]:
        setattr(module, name, value)
        agree(module, compiled, x24())
    compiled.scale = 11.0
    agree(module, compiled, x24())
    assert module.count == 8 + 1


def test_replaced_and_deleted_parts():
    module = Block()
    compiled = fs.compile(module, backend="aot_eager", fullgraph=True)
    agree(module, compiled, x24())
    module.lin = nn.Linear(4, 4, bias=False)
    agree(module, compiled, x24())
    module.lin = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    agree(module, compiled, x24())
    module.lin[0].weight = nn.Parameter(torch.ones(3, 4))
    agree(module, compiled, x24())
    module.lin.append(nn.Linear(3, 2))
    agree(module, compiled, x24())
    module.lin.weight = nn.Parameter(torch.ones(1))
    agree(module, compiled, x24())
    module.forward = lambda x: x * 5
    torch.testing.assert_close(compiled(x24()), x24() * 5)
    del module.forward
    agree(module, compiled, x24())


def test_train_and_eval():
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    counter = CompileCounter()
    compiled = fs.compile(module, backend=counter, fullgraph=True)
    for training in (True, False, True, False):
        module.train(training)
        agree(module, compiled, x24())
    assert counter.frame_count == 2
    module[1].eval()
    agree(module, compiled, x24())


def test_requires_grad_switched():
    module = Block()
    compiled = fs.compile(module, backend="aot_eager", fullgraph=True)
    agree(module, compiled, x24())
    module.lin.weight.requires_grad_(False)
    module.zero_grad()
    agree(module, compiled, x24())
    assert module.lin.weight.grad is None or not module.lin.weight.grad.any()


def test_moved_to_another_dtype():
    module = Block()
    compiled = fs.compile(module, backend="aot_eager", fullgraph=True)
    agree(module, compiled, x24())
    module.double()
    agree(module, compiled, x24().double())


class Lazily(nn.Module):
    """A buffer that is made at the first call, and grows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", None)
        self.table = None

    def forward(self, x):
        if self.seen is None:
            self.seen = torch.zeros(x.shape[-1])
        if self.table is None or self.table.shape[0] < x.shape[0]:
            self.table = torch.arange(x.shape[0], dtype=x.dtype)
        self.seen = self.seen + x.sum(0).detach()
        return x * self.table[:x.shape[0], None] + self.seen


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_buffers_made_lazily(backend):
    module = Lazily()
    compiled = fs.compile(module, backend=backend, fullgraph=True)
    for rows in (2, 2, 3, 1):
        agree(module, compiled, torch.randn(rows, 4))
    assert list(module.state_dict()) == ["seen"]


class Registers(nn.Module):
    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((4,), 2.0))
            self.register_buffer("hidden", torch.ones(4), persistent=False)
            self.weight = nn.Parameter(torch.full((4,), 3.0))
            self.inner = nn.Linear(4, 4, bias=False)
            nn.init.ones_(self.inner.weight)
        return self.inner(x * self.scale * self.weight + self.hidden)


def test_parameters_buffers_and_modules_made_inside():
    module, twin = Registers(), Registers()
    compiled = fs.compile(module, backend="aot_eager")
    for _ in range(3):
        x = x24()
        expected = twin(x)
        torch.testing.assert_close(compiled(x), expected)
        assert list(module.state_dict()) == list(twin.state_dict())
        assert [n for n, _ in module.named_parameters()] == [n for n, _ in twin.named_parameters()]
        assert [n for n, _ in module.named_buffers()] == [n for n, _ in twin.named_buffers()]
        assert isinstance(module.weight, nn.Parameter)
        expected.sum().backward()
        compiled(x).sum().backward()
        torch.testing.assert_close(module.weight.grad, twin.weight.grad)
        module.zero_grad(), twin.zero_grad()


def test_lazy_modules():
    module = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    compiled = fs.compile(module, backend="aot_eager")
    out = compiled(x24())
    assert type(module[0]) is nn.Linear and module[0].weight.shape == (3, 4)
    torch.testing.assert_close(out, module(x24()))
    torch.testing.assert_close(compiled(x24()), module(x24()))


def test_parametrizations():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).T

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled = fs.compile(module, backend="aot_eager")
    agree(module, compiled, x24())
    nn.utils.parametrize.register_parametrization(module[0], "weight", Symmetric())
    agree(module, compiled, x24())
    agree(module, compiled, x24())
    torch.nn.utils.parametrizations.weight_norm(module[1])
    agree(module, compiled, x24())
    with nn.utils.parametrize.cached():
        agree(module, compiled, x24())
    nn.utils.parametrize.remove_parametrizations(module[0], "weight")
    agree(module, compiled, x24())


def test_spectral_norm_updates_its_buffers():
    module = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    compiled = fs.compile(module, backend="aot_eager")
    for _ in range(3):
        agree(module, compiled, x24())


def test_functional_call():
    module = Block()
    parameters = {name: torch.randn_like(p) for name, p in module.named_parameters()}

    def fn(parameters, x):
        return torch.func.functional_call(module, parameters, (x,))
    compiled = fs.compile(fn, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(parameters, x24()), fn(parameters, x24()))
        torch.testing.assert_close(list(module.parameters()), list(Block().parameters()))
        parameters = {name: p * 2 for name, p in parameters.items()}


def test_functional_call_outside():
    module = Block()
    compiled = fs.compile(module, backend="aot_eager")
    agree(module, compiled, x24())
    parameters = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    expected = torch.func.functional_call(module, parameters, (x24(),))
    torch.testing.assert_close(torch.func.functional_call(compiled, parameters, (x24(),)), expected)
    agree(module, compiled, x24())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(self.embed(ids).tanh())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_shared_parameters(backend):
    module = Tied()
    compiled = fs.compile(module, backend=backend, fullgraph=True)
    ids = torch.tensor([[1, 2, 3]])
    agree(module, compiled, ids)
    module.zero_grad()
    module.out.weight = nn.Parameter(torch.randn(10, 4))       # not shared any more
    agree(module, compiled, ids)
    module.zero_grad()
    module.embed.weight = module.out.weight
    agree(module, compiled, ids)


def test_one_module_under_two_names():
    shared = nn.Linear(4, 4)
    module = nn.ModuleDict({"a": shared, "b": shared})

    def fn(x):
        return module["b"](module["a"](x).relu())
    compiled = fs.compile(fn, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x24()), fn(x24()))
    module["b"] = nn.Linear(4, 4)
    torch.testing.assert_close(compiled(x24()), fn(x24()))


def test_copies_are_compiled_and_their_own():
    module = Block()
    compiled = fs.compile(module, backend="aot_eager")
    compiled(x24())
    twin = copy.deepcopy(compiled)
    twin.lin.weight.data.mul_(2)
    twin.scale = 1.0
    torch.testing.assert_close(compiled(x24()), Block()(x24()))
    assert not torch.equal(twin(x24()), compiled(x24()))
    agree(twin._firesteel_original, twin, x24())
    shallow = copy.copy(module)
    torch.testing.assert_close(fs.compile(shallow, backend="eager")(x24()), module(x24()))


def test_pickled_and_saved():
    module = Block()
    compiled = fs.compile(module, backend="aot_eager")
    compiled(x24())
    loaded = pickle.loads(pickle.dumps(compiled))
    assert type(loaded) is Block
    torch.testing.assert_close(loaded(x24()), compiled(x24()))
    buffer = io.BytesIO()
    torch.save(compiled.state_dict(), buffer)
    buffer.seek(0)
    fresh = Block()
    fresh.lin.weight.data.zero_()
    fs.compile(fresh).load_state_dict(torch.load(buffer))
    torch.testing.assert_close(fresh(x24()), compiled(x24()))


def test_parts_compiled_on_their_own():
    module = nn.Sequential(Block(), Block())
    module[0] = fs.compile(module[0], backend="aot_eager")
    assert list(module.state_dict()) == ["0.lin.weight", "0.lin.bias", "1.lin.weight", "1.lin.bias"]
    expected = nn.Sequential(Block(), Block())(x24())
    torch.testing.assert_close(module(x24()), expected)
    torch.testing.assert_close(fs.compile(module, backend="aot_eager", fullgraph=True)(x24()), expected)


def test_loops_over_parts():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.gains = nn.ParameterList(nn.Parameter(torch.tensor(float(i))) for i in range(3))
            self.named = nn.ParameterDict({"b": nn.Parameter(torch.ones(4)), "a": nn.Parameter(torch.zeros(4))})

        def forward(self, x):
            for (name, layer), gain in zip(self.layers.named_children(), self.gains):
                x = layer(x) * gain + int(name)
            for name, p in self.named.items():
                x = x + p if name == "a" else x - p
            total = sum(p.numel() for p in self.parameters())
            return x * total + len(list(self.modules())) + sum(b.sum() for b in self.buffers())
    module = Stack()
    compiled = fs.compile(module, backend="aot_eager", fullgraph=True)
    agree(module, compiled, x24())
    module.layers.append(nn.Linear(4, 4))
    module.gains.append(nn.Parameter(torch.tensor(2.0)))
    agree(module, compiled, x24())
    module.register_buffer("extra", torch.ones(2))
    agree(module, compiled, x24())


def test_an_int_that_differs_between_layers_is_no_variant_each():
    class Layer(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.index = index
            self.lin = nn.Linear(4, 4)

        def forward(self, x, cache):
            cache.append(self.index)
            return self.lin(x)
    counter = CompileCounter()
    layers = [fs.compile(Layer(i), backend=counter) for i in range(12)]
    cache = []
    x = x24()
    for layer in layers:
        x = layer(x, cache)
    assert cache == list(range(12))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("breaks", [False, True])
def test_a_module_without_parameters_made_inside(breaks):
    def fn(x, y):
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        act = nn.Sequential(nn.Tanh(), nn.Softplus(beta=2))
        if breaks:
            fs.graph_break()
        act.eval()
        return loss(act(x), y) + (1 if act[0].training else 2)
    counter = CompileCounter()
    compiled = fs.compile(fn, backend=counter, fullgraph=not breaks)
    for _ in range(2):
        torch.testing.assert_close(compiled(x24(), torch.tensor([0, 3])), fn(x24(), torch.tensor([0, 3])))
    assert counter.frame_count == 1


def test_buffers_changed_through_their_table():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x):
            self.total = self.total + 1
            seen = sum(b.sum() for b in self.buffers())
            self._buffers["total"] = self.total * 2
            return x + self.total * seen + dict(self.named_buffers())["total"]
    module = Counts()
    compiled = fs.compile(module, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        agree(module, compiled, x24())


class Wrapper(nn.Module):
    """Gives the attributes of what it wraps as its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x):
        return self.inner(x) * self.scale


def test_attributes_found_by_the_class_s_own_getattr():
    inner = nn.Linear(2, 2)
    inner.scale = torch.ones(1)
    module = Wrapper(inner)
    compiled, x = fs.compile(module, backend="eager", fullgraph=True), torch.randn(2)
    agree(module, compiled, x)
    inner.scale = torch.ones(1) * 2
    agree(module, compiled, x)
    module.scale = torch.ones(1) * 3
    agree(module, compiled, x)
    del module.scale
    module._buffers["scale"] = torch.ones(1) * 4
    agree(module, compiled, x)


class Tripled(nn.Module):
    """Reads its parameter and its buffer by a method of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 2.0))
        self.register_buffer("shift", torch.ones(2))

    def __getattr__(self, name):
        found = super().__getattr__(name)
        return found * 3 if name in ("scale", "shift") else found

    def forward(self, x):
        return x * self.scale + self.shift


@pytest.mark.parametrize("make", (Tripled, lambda: Wrapper(Tripled()), lambda: Wrapper(Wrapper(Tripled()))))
def test_parameters_read_by_the_class_s_own_getattr(make):
    module = make()
    agree(module, fs.compile(module, backend="eager", fullgraph=True), torch.randn(2))


def test_lazy_modules_are_compiled_from_their_second_call_on():
    fs.reset()
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d(), torch.nn.ReLU())
    compiled = fs.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(5, 7)
    compiled(x)
    assert model[0].weight.shape == (4, 7) and fs.counters["stats"]["unique_graphs"] == 0
    expected = copy.deepcopy(model)
    torch.testing.assert_close(compiled(x), expected(x))
    assert fs.counters["stats"]["unique_graphs"] == 1 and compiled.state_dict().keys() == expected.state_dict().keys()


# -- state made or exchanged in forward ---------------------------------------------------------------------------------
class MakesState(nn.Module):
    """Makes what it needs at its first call."""

    def __init__(self):
        super().__init__()
        self.w = None
        self.register_parameter("q", None)
        self.layers = nn.ModuleList()
        self.weights = nn.ParameterList()

    def forward(self, x):
        if self.w is None:
            self.w = nn.Parameter(torch.full((x.shape[-1],), 2.0))
            self.q = nn.Parameter(torch.ones(x.shape[-1]))
            self.register_buffer("scale", torch.full((x.shape[-1],), 3.0))
            self.scale = self.scale + 1
            self.act = nn.ReLU()
            self.layers.append(nn.Identity())
            self.weights.append(nn.Parameter(torch.ones(1)))
        return self.layers[0](self.act(x * self.w)) * self.q * self.scale + self.weights[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_state_made_in_forward(backend):
    ours, theirs, x = MakesState(), MakesState(), torch.arange(4.0)
    compiled = fs.compile(ours, backend=backend, fullgraph=True)
    for _ in range(3):
        compiled(x).sum().backward()
        theirs(x).sum().backward()
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["q", "w", "scale", "weights.0"]
    assert [name for name, _ in ours.named_children()] == [name for name, _ in theirs.named_children()]
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a.grad, b.grad)
    assert "w" not in vars(ours) and "scale" not in vars(ours)


def test_children_and_buffers_are_exchanged_and_deleted():
    def run(module, x):
        y = module.first(x)
        module.first = nn.Identity()
        del module.extra
        module.register_buffer("extra", x + 1)
        module.extra = module.extra * 2
        module.second.bias = None
        return module.second(module.first(y)) + module.extra

    def make():
        torch.manual_seed(0)
        module = nn.Module()
        module.first, module.second = nn.Linear(4, 4), nn.Linear(4, 4)
        module.register_buffer("extra", torch.zeros(4))
        return module

    ours, theirs, x = make(), make(), torch.arange(4.0)
    compiled = fs.compile(run, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(ours, x), run(theirs, x))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert type(ours.first) is nn.Identity


def test_state_dict_inside_has_its_metadata():
    def f(module, x):
        state = module.state_dict()
        return state["weight"].sum() + x, state._metadata[""]["version"], state

    module = nn.Linear(2, 2)
    out = fs.compile(f, backend="eager", fullgraph=True)(module, torch.ones(2))
    assert out[1] == 1 and out[2]._metadata == module.state_dict()._metadata


def test_tables_of_the_users_kind():
    """As libraries do that gather parameters when they are read."""
    read = []

    class Gathering(collections.OrderedDict):
        def __getitem__(self, key):
            read.append(key)
            return super().__getitem__(key)

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for part in module.modules():
        part._parameters = Gathering(part._parameters)

    def f(module, x):
        return module(x) * len(list(module.parameters()))

    x = torch.ones(4)
    expected, n = f(module, x), len(read)
    compiled = fs.compile(f, backend="eager", fullgraph=True)
    for _ in range(2):
        read.clear()
        torch.testing.assert_close(compiled(module, x), expected)
        assert len(read) == n > 0


class MakesAtFirstCall(nn.modules.lazy.LazyModuleMixin, nn.Module):
    """A lazy module whose parameters are not there at all before."""

    def initialize_parameters(self, x):
        self.weight = nn.Parameter(torch.full(x.shape, 0.5))

    def forward(self, x):
        return x * self.weight


def test_lazy_module_without_placeholders_for_its_parameters():
    module = MakesAtFirstCall()
    compiled = fs.compile(module, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 0.5))
    assert list(module.state_dict()) == ["weight"]


class Doubled:
    """A descriptor that is no property."""

    def __set_name__(self, owner, name):
        self.name = f"_{name}"

    def __get__(self, obj, cls=None):
        return getattr(obj, self.name) * 2

    def __set__(self, obj, value):
        setattr(obj, self.name, value + 1)


class WithDescriptor(nn.Module):
    scale = Doubled()

    def __init__(self):
        super().__init__()
        self.scale = 3

    def forward(self, x):
        self.scale = self.scale + 1
        return x * self.scale


def test_descriptors_of_a_module_are_set():
    eager, module = WithDescriptor(), WithDescriptor()
    compiled = fs.compile(module, fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(torch.ones(2)), eager(torch.ones(2)))
    assert module.__dict__["_scale"] == eager.__dict__["_scale"] and "scale" not in module.__dict__
