"""fs.config.freeze: what is computed once of parameters and buffers gives eager's values, before and after each way in which they change."""
import copy
import gc
import random
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firesteel as fs
from firesteel.artifacts import counters


@pytest.fixture(autouse=True)
def _freezing():
    fs.reset()
    counters["frozen"].clear()
    with fs.config.patch(freeze=True):
        yield


def with_statistics(model):
    """In eval mode, with statistics that are no defaults."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            with torch.no_grad():
                module.weight.uniform_(0.5, 2)
                module.bias.normal_()
    return model.eval()


class Residual(nn.Module):
    def __init__(self, inside, outside, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.short(x))


def resnet():
    return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Residual(8, 8), Residual(8, 16, 2),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


class Inverted(nn.Module):
    def __init__(self, width, wide):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        self.depth = nn.Sequential(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        self.squeeze = nn.Sequential(nn.Conv2d(wide, wide // 4, 1), nn.ReLU(), nn.Conv2d(wide // 4, wide, 1), nn.Hardsigmoid())
        self.project = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.depth(self.expand(x))
        return x + self.project(y * self.squeeze(y.mean((2, 3), keepdim=True)))


def mobilenet():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Inverted(8, 16), nn.LeakyReLU(0.2), Inverted(8, 16))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU())
        self.up, self.norm = nn.ConvTranspose2d(16, 8, 2, 2), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x):
        y = F.silu(self.down(x))
        z = self.norm(self.up(self.deep(F.avg_pool2d(y, 2))))
        return self.last(torch.cat([y, z], 1))


class Signals(nn.Module):
    """Convolutions of signals and volumes, and a linear layer behind which a norm stands."""

    def __init__(self):
        super().__init__()
        self.signal, self.norm1 = nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6)
        self.volume, self.norm3 = nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4)
        self.linear, self.norm = nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x):
        a = self.norm1(self.signal(x[:, :, 0]))
        b = self.norm3(self.volume(x[:, None])).relu()
        return a, b, self.norm(self.linear(x[:, 0, 0])), self.scale * self.linear(x) - 1.5


NETS = {"resnet": (resnet, {}), "mobilenet": (mobilenet, {"rtol": 1e-4, "atol": 1e-4}), "unet": (UNet, {}), "signals": (Signals, {})}


def same(model, compiled, x, **tolerance):
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), **{"rtol": 1e-4, "atol": 1e-5, **tolerance})


@pytest.mark.parametrize("name", NETS)
def test_values_are_eagers(name):
    make, tolerance = NETS[name]
    model = with_statistics(make())
    compiled = fs.compile(model)
    x = torch.randn(2, 3, 8, 8)
    same(model, compiled, x, **tolerance)
    assert counters["frozen"]["scales and shifts folded into weights"] >= 2
    if name in ("resnet", "mobilenet") and torch.backends.mkldnn.is_available():
        assert counters["frozen"]["weights reordered"] >= 6
    same(model, compiled, torch.randn(2, 3, 8, 8), **tolerance)
    assert counters["frozen"]["times computed"] == 1


def test_it_is_off_by_default():
    assert fs.config.describe() and not type(fs.config)().freeze
    with fs.config.patch(freeze=False):
        model = with_statistics(resnet())
        same(model, fs.compile(model), torch.randn(2, 3, 8, 8))
    assert not counters["frozen"]


@pytest.mark.parametrize("options", [{"freeze": True}, {"freezing": True}])
def test_an_option_says_it_for_one_callable(options):
    model = with_statistics(resnet())
    with fs.config.patch(freeze=False):
        same(model, fs.compile(model, options=options), torch.randn(2, 3, 8, 8))
        assert counters["frozen"]["times computed"] == 1
    same(model, fs.compile(model, options=dict.fromkeys(options, False)), torch.randn(2, 3, 8, 8))
    assert counters["frozen"]["times computed"] == 1


def step(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sum(out.sum() for out in torch.utils._pytree.tree_leaves(model(x))).backward()
    optimizer.step()


def load(model, x):
    model.load_state_dict({name: value + 0.25 if value.is_floating_point() else value for name, value in model.state_dict().items()})


def assign(model, x):
    model.load_state_dict({name: value + 0.25 if value.is_floating_point() else value for name, value in model.state_dict().items()}, assign=True)


@torch.no_grad()
def set_data(model, x):
    """Twice: the second memory may be where the first was."""
    for _ in range(2):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9 + 0.01


@torch.no_grad()
def set_storage(model, x):
    model[0].weight.set_(torch.randn_like(model[0].weight))


@torch.no_grad()
def copy_in(model, x):
    model[3].conv1.weight.copy_(torch.randn_like(model[3].conv1.weight))


def buffer(model, x):
    model[1].running_mean += 1


def another_buffer(model, x):
    model[1].running_var = torch.rand(8) + 0.5


def another_parameter(model, x):
    model[0].weight = nn.Parameter(torch.randn(8, 3, 3, 3))


def another_module(model, x):
    model[3] = with_statistics(Residual(8, 8))


def train_meanwhile(model, x):
    model.train()
    model(x)
    model.eval()


CHANGES = (step, load, assign, set_data, set_storage, copy_in, buffer, another_buffer, another_parameter, another_module, train_meanwhile)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    model = with_statistics(resnet())
    compiled, x = fs.compile(model), torch.randn(2, 3, 8, 8)
    same(model, compiled, x)
    graphs = counters["stats"]["unique_graphs"]
    before = model(x).detach()
    change(model, x)
    assert not torch.allclose(model(x), before, rtol=1e-3)
    same(model, compiled, x)
    assert counters["frozen"]["times computed"] == 2
    assert counters["stats"]["unique_graphs"] == graphs, "values changed, not the program"


def test_batch_norms_that_are_trained_are_not_folded():
    model = with_statistics(resnet()).train()
    other = copy.deepcopy(model)
    compiled, x = fs.compile(model), torch.randn(4, 3, 8, 8)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), other(x), rtol=1e-4, atol=1e-4)
    assert counters["frozen"]["scales and shifts folded into weights"] == 0
    for one, two in zip(model.buffers(), other.buffers()):
        torch.testing.assert_close(one, two)
    model.eval(), other.eval()
    same(other, compiled, x)
    assert counters["frozen"]["scales and shifts folded into weights"] > 0


def test_gradients_are_untouched():
    model = with_statistics(resnet())
    x = torch.randn(2, 3, 8, 8)
    fs.compile(model)(x).sum().backward()
    assert not counters["frozen"]
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for mine, parameter in zip(ours, model.parameters()):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-3)


def test_parameters_that_need_no_gradient_are_frozen_with_grad_mode_on():
    model = with_statistics(resnet()).requires_grad_(False)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(fs.compile(model)(x), model(x), rtol=1e-4, atol=1e-5)
    assert counters["frozen"]["times computed"] == 1


def test_call_arguments_are_not_frozen():
    compiled = fs.compile(lambda x, w: x @ (w * 2).t())
    with torch.no_grad():
        compiled(torch.randn(2, 3), nn.Parameter(torch.randn(4, 3)))
    assert not counters["frozen"]


def test_results_are_the_callers():
    """Who writes to one must not write to what is kept."""
    class Shown(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

        def forward(self, x):
            doubled = self.w * 2
            return doubled, doubled[0], doubled.expand(3, 4, 4), x @ doubled.t() + self.b.exp(), self.w.t()
    model = Shown()
    compiled = fs.compile(model)
    with torch.no_grad():
        for _ in range(3):
            found = compiled(torch.ones(2, 4))
            torch.testing.assert_close(found, model(torch.ones(2, 4)))
            found[0].zero_(), found[1].zero_(), found[3].zero_()
    assert found[4]._base is model.w or found[4].data_ptr() == model.w.data_ptr()


def test_shared_parameters():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6))
    model[2].weight = model[0].weight
    with_statistics(model)
    compiled = fs.compile(model)
    for _ in range(2):
        same(model, compiled, torch.randn(5, 6))
        with torch.no_grad():
            model[0].weight.mul_(1.5)


def test_layers_that_share_code_have_values_each():
    @fs.compile
    def run(layer, x):
        return layer(x)
    layers = [with_statistics(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))) for _ in range(4)]
    with torch.no_grad():
        for _ in range(3):
            for layer in layers:
                same(layer, lambda x, layer=layer: run(layer, x), torch.randn(5, 6))
    assert counters["frozen"]["times computed"] == 4


def test_what_is_kept_goes_with_the_module():
    @fs.compile
    def run(layer, x):
        return layer(x)

    def one():
        layer = with_statistics(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
        with torch.no_grad():
            run(layer, torch.randn(5, 6))
        return weakref.ref(layer), weakref.ref(layer[0].weight)
    refs = [ref for _ in range(3) for ref in one()]
    with torch.no_grad():
        run(with_statistics(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))), torch.randn(5, 6))
    gc.collect()
    assert not any(ref() is not None for ref in refs)


def test_threads():
    model = with_statistics(resnet())
    compiled, x = fs.compile(model), torch.randn(2, 3, 8, 8)
    same(model, compiled, x)
    with torch.no_grad():
        model[0].weight.mul_(2)
        wanted = model(x)
    found = []

    def work():
        with torch.no_grad():
            for _ in range(20):
                found.append(compiled(x))
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    for value in found:
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)


def test_symbolic_sizes():
    model = with_statistics(resnet())
    compiled = fs.compile(model, dynamic=True)
    for batch, size in ((2, 8), (3, 12), (5, 10)):
        same(model, compiled, torch.randn(batch, 3, size, size))
    assert counters["frozen"]["scales and shifts folded into weights"] > 0 and counters["frozen"]["times computed"] == 1


@pytest.mark.parametrize("size", [8, 64])
def test_bfloat16(size):
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(),
                                          nn.Linear(8 * 64, size))).bfloat16()
    same(model, fs.compile(model), torch.randn(2, 3, 8, 8, dtype=torch.bfloat16), rtol=0.05, atol=0.05)
    assert counters["frozen"]["scales and shifts folded into weights"] == 1


def test_roundings_that_are_asked_for_stay():
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).bfloat16()
    with fs.config.patch(eager_rounding=True):
        same(model, fs.compile(model), torch.randn(2, 3, 8, 8, dtype=torch.bfloat16), rtol=0.01, atol=0.01)
    assert counters["frozen"]["scales and shifts folded into weights"] == 0


def test_automatic_casts_of_weights_are_made_once():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    compiled, x = fs.compile(model), torch.randn(5, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.05)
    assert counters["frozen"]["values computed once"] >= 2


def test_doubles_are_folded_only():
    model = with_statistics(resnet()).double()
    same(model, fs.compile(model), torch.randn(2, 3, 8, 8, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert counters["frozen"]["weights reordered"] == 0


def test_without_the_library():
    model = with_statistics(resnet())
    with torch.backends.mkldnn.flags(enabled=False):
        same(model, fs.compile(model), torch.randn(2, 3, 8, 8))
    assert counters["frozen"]["weights reordered"] == 0 and counters["frozen"]["scales and shifts folded into weights"] > 0


def test_large_linear_layers():
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256, bias=False)).eval()
    compiled = fs.compile(model)
    for batch in (64, 96):
        same(model, compiled, torch.randn(batch, 256))
    if torch.backends.mkldnn.is_available():
        assert counters["frozen"]["weights reordered"] == 2


def test_inference_mode():
    model = with_statistics(resnet())
    compiled, x = fs.compile(model), torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
            model[0].weight.mul_(1.5)
    same(model, compiled, x)


def test_parameters_made_in_inference_mode_are_not_frozen():
    with torch.inference_mode():
        model = with_statistics(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
        compiled, x = fs.compile(model), torch.randn(5, 6)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
            model[0].weight.mul_(2)
    assert not counters["frozen"]["times computed"]


def test_a_part_behind_a_break():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = with_statistics(resnet()), with_statistics(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))

        def forward(self, x):
            y = self.first(x)
            fs.graph_break()
            return self.second(y)
    model = Broken().eval()
    compiled, x = fs.compile(model), torch.randn(2, 3, 8, 8)
    for _ in range(2):
        same(model, compiled, x)
        with torch.no_grad():
            model.second[0].weight.mul_(2)
            model.first[7].bias.add_(1)


def test_large_expansions_are_not_kept():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(300, 1))

        def forward(self, x):
            return x + self.w.exp() * self.w.t().exp() * 2
    model = Wide()
    compiled = fs.compile(model)
    same(model, compiled, torch.randn(300, 300))
    assert counters["frozen"]["values computed once"] == 2      # two vectors, not the matrix


def test_nan_stays_nan():
    """The library's relu gives 0 for it: that one is not used."""
    model = with_statistics(mobilenet())
    x = torch.randn(1, 3, 8, 8)
    x[0, 0, 3, 3] = torch.nan
    with torch.no_grad():
        torch.testing.assert_close(fs.compile(model)(x).isnan(), model(x).isnan())


def test_explain_says_what_was_frozen():
    model = with_statistics(resnet())
    with torch.no_grad():
        page = fs.explain(model)(torch.randn(2, 3, 8, 8))
    assert any("scales and shifts folded into weights" in line for line in page.frozen)
    assert "frozen:" in str(page)


def test_packages_read_parameters_at_each_call(tmp_path):
    model, x = with_statistics(resnet()), torch.randn(2, 3, 8, 8)
    fs.package(model, (x,), str(tmp_path / "model.fs"))
    torch.testing.assert_close(fs.load(str(tmp_path / "model.fs"))(x), model(x), rtol=1e-4, atol=1e-5)
    assert not counters["frozen"]


class Affine(nn.Module):
    """One of several changes of channels."""

    def __init__(self, channels, kind):
        super().__init__()
        self.scale, self.shift, self.kind = nn.Parameter(torch.rand(channels, 1, 1) + 0.5), nn.Parameter(torch.randn(channels, 1, 1)), kind

    def forward(self, x):
        changes = (lambda: x * self.scale, lambda: self.shift - x, lambda: x / self.scale + 1, lambda: x * self.scale.exp() - self.shift.sin())
        return changes[self.kind]()


def random_net(draw, channels=4):
    layers = []
    for _ in range(draw.randint(2, 6)):
        outside = draw.choice([4, 8, 16])
        kind, bias = draw.randrange(5), draw.random() < 0.5
        if kind < 2:
            groups = draw.choice([group for group in (1, 2, channels) if outside % group == 0])
            layers.append(nn.Conv2d(channels, outside, 3, padding=1, groups=groups, bias=bias))
        elif kind == 2:
            layers.append(nn.ConvTranspose2d(channels, outside, 3, padding=1, groups=draw.choice([1, 2]), bias=bias))
        else:
            outside = channels
            layers.append(nn.BatchNorm2d(channels, affine=bias) if kind == 3 else Affine(channels, draw.randrange(4)))
        channels = outside
        layers.append(draw.choice([nn.ReLU, nn.Hardswish, nn.SiLU, nn.LeakyReLU, nn.Identity, nn.Identity])())
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("seed", range(16))
def test_random_nets(seed):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = random_net(draw)
    compiled = fs.compile(model, dynamic=draw.choice([None, True]))
    layout = draw.choice([torch.contiguous_format, torch.channels_last])
    for size in (6, 6, 7):
        x = torch.randn(2, 4, size, size).to(memory_format=layout)
        with torch.no_grad():
            found, wanted = compiled(x), model(x)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * max(1.0, wanted.abs().max().item()))
            assert found.stride() == wanted.stride()
            for parameter in model.parameters():
                parameter.mul_(1.1)
