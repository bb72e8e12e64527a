"""Quantised modules of torch.ao are a node each; what is around them is compiled."""
import pytest
import torch

import firesteel as fs

quantising = torch.ao.quantization
pytestmark = pytest.mark.filterwarnings("ignore")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def test_quantised_layers_are_a_node_each():
    fs.reset()
    model = quantising.quantize_dynamic(torch.nn.Sequential(Block(), Block(), torch.nn.Linear(8, 4)), {torch.nn.Linear}, dtype=torch.qint8)
    compiled = fs.compile(model, fullgraph=True)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 6, 8)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
    assert fs.counters["stats"]["unique_graphs"] == 2
    x = torch.randn(3, 6, 8, requires_grad=True)
    assert compiled(x).requires_grad == model(x).requires_grad


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant, self.sum = quantising.QuantStub(), quantising.DeQuantStub(), torch.ao.nn.quantized.FloatFunctional()
        self.first, self.norm, self.relu = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU()
        self.second, self.pool, self.last = torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Linear(4, 2)

    def forward(self, x):
        x = self.relu(self.norm(self.first(self.quant(x))))
        x = self.sum.add(x, self.second(x))
        return self.dequant(self.last(self.pool(x).flatten(1)))


class Inside(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.before, self.net, self.after = torch.nn.Conv2d(3, 3, 1), net, torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.after(self.net(self.before(x).relu())).tanh()


def static():
    net = Net().eval()
    net.qconfig = quantising.get_default_qconfig("x86")
    net = quantising.prepare(quantising.fuse_modules(net, [["first", "norm", "relu"]]))
    net(torch.randn(4, 3, 8, 8))
    return Inside(quantising.convert(net))


def by_fx():
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 2)).eval()
    net = prepare_fx(net, quantising.get_default_qconfig_mapping("x86"), (torch.randn(2, 3, 8, 8),))
    net(torch.randn(4, 3, 8, 8))
    return Inside(convert_fx(net))


@pytest.mark.parametrize("make", [static, by_fx])
def test_a_quantised_module_inside_of_another(make):
    fs.reset()
    torch.manual_seed(0)
    model = make()
    compiled = fs.compile(model, fullgraph=True)
    for rows in (2, 2, 5):
        x = torch.randn(rows, 3, 8, 8)
        drawn = torch.get_rng_state()
        torch.testing.assert_close(compiled(x), model(x))
        assert torch.equal(drawn, torch.get_rng_state())
    assert fs.counters["stats"]["unique_graphs"] == 2
    compiled(x).sum().backward()
    mine = [p.grad.clone() for p in model.after.parameters()]
    model.after.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(mine, [p.grad for p in model.after.parameters()])
    assert model.before.weight.grad is None         # eager, too, has no gradient through what is quantised


def test_a_quantised_model_as_a_whole():
    model = static().net
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(fs.compile(model, fullgraph=True)(x), model(x))


def test_hooks_inside_are_called_once():
    model, seen, x = static(), [], torch.randn(2, 3, 8, 8)
    expected = model(x)
    model.net.first.register_forward_hook(lambda module, given, result: seen.append(tuple(result.shape)))
    torch.testing.assert_close(fs.compile(model)(x), expected)
    assert seen == [(2, 4, 8, 8)]


def test_recurrent_layers_and_embeddings():
    fs.reset()
    torch.manual_seed(0)
    cells = quantising.quantize_dynamic(torch.nn.ModuleDict({"lstm": torch.nn.LSTM(4, 4), "gru": torch.nn.GRU(4, 4)}), {torch.nn.LSTM, torch.nn.GRU})
    bags = torch.nn.ModuleDict({"bag": torch.nn.EmbeddingBag(10, 4, mode="sum", include_last_offset=True), "rows": torch.nn.Embedding(10, 4)})
    bags.qconfig = quantising.float_qparams_weight_only_qconfig
    bags = quantising.convert(quantising.prepare(bags))

    def f(x, places, offsets):
        y, (h, c) = cells["lstm"](x + 1)
        z, last = cells["gru"](y * 2)
        return z.sin(), h + c, last, bags["bag"](places, offsets) * 2, bags["rows"](places).cos()
    given = torch.randn(5, 2, 4), torch.tensor([1, 2, 9, 4]), torch.tensor([0, 2, 4])
    torch.testing.assert_close(fs.compile(f, fullgraph=True)(*given), f(*given))
    assert fs.counters["stats"]["unique_graphs"] == 1
