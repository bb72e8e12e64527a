"""Images lie channels-last between convolutions; what a program can see of its strides, values and draws is eager's."""
import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import firesteel as fs
from firesteel import backends
from firesteel.graph import layouts
from firesteel.graph.decomp import core_decompositions
from firesteel.graph.spec import channels_last_strides

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()


class Pair(torch.nn.Module):
    """Two convolutions with something between and something behind."""

    def __init__(self, between, behind, groups=1):
        super().__init__()
        self.first = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.second = torch.nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.norm = torch.nn.BatchNorm2d(8)
        self.between, self.behind = between, behind

    def forward(self, x):
        return self.behind(self.second(self.between(self, self.first(x))))


def norm_and_relu(self, y):
    return F.relu(self.norm(y))


BETWEEN = {
    "nothing": lambda self, y: y,
    "norm": norm_and_relu,
    "views": lambda self, y: y.view(2, 8, 36).sin().view(2, 8, 6, 6),
    "memory": lambda self, y: y.as_strided((2, 8, 6, 6), (288, 36, 1, 6)),
    "draw": lambda self, y: F.dropout(y, 0.5) + torch.rand_like(y),
    "pools": lambda self, y: F.max_pool2d(y, 3, 1, 1) + F.avg_pool2d(y, 3, 1, 1),
    "cat": lambda self, y: torch.cat([y[:, :4], y[:, 4:].cos()], 1),
    "mixed": lambda self, y: y * torch.arange(576.0).view(2, 8, 6, 6) + y.mean((2, 3), keepdim=True),
    "permuted": lambda self, y: y.permute(0, 1, 3, 2).exp(),
    "softmax": lambda self, y: y.softmax(1) + F.interpolate(y[..., ::2, ::2], scale_factor=2.0),
    "padded": lambda self, y: F.pad(y, (1, 1, 1, 1))[..., 1:-1, 1:-1].flip(3),
    "written": lambda self, y: y.clone().mul_(2).index_fill_(1, torch.tensor([1]), 0.5),
}
BEHIND = {"image": lambda y: y, "rows": lambda y: y.flatten(1) @ torch.full((288, 3), 0.01), "several": lambda y: (y.relu(), y.t() if y.ndim == 2 else y.mT, y.sum((2, 3)))}


def observed(fn, model, x):
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    out = fn(x)
    outs = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward([o.sin().sum() for o in outs])
    found = [*(o.detach() for o in outs), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
    return found, [None if t is None else t.stride() for t in found]


@pytest.mark.parametrize("between, behind, groups", [*((b, "image", 1) for b in BETWEEN), ("norm", "rows", 1), ("norm", "several", 4), ("nothing", "several", 1)])
def test_values_strides_and_draws_are_eagers(between, behind, groups):
    torch.manual_seed(0)
    model = Pair(BETWEEN[between], BEHIND[behind], groups)
    twin = copy.deepcopy(model)
    x = torch.randn(2, 4, 6, 6)
    fs.counters["native"].clear()
    expected, found = observed(model, model, x), observed(fs.compile(twin, fullgraph=True), twin, x)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert found[1] == expected[1]
    assert not fs.counters["native"]["restrided"]
    with torch.no_grad():
        torch.manual_seed(1)
        expected = model.eval()(x)
        torch.manual_seed(1)
        torch.testing.assert_close(fs.compile(twin.eval(), fullgraph=True)(x), expected, rtol=1e-4, atol=1e-4)


def images_of(model, x, partition=fs.aot.min_cut_partition):
    """The strides of the images that the convolutions of a training graph and of its backward read."""
    seen = []

    def note(joint, *args, **kwargs):
        for node in joint.graph.nodes:
            if node.target in (aten.convolution.default, aten.convolution_backward.default):
                seen.extend(arg.meta["val"].spec for arg in node.args[:1 + (node.target is aten.convolution_backward.default)])
        return partition(joint, *args, **kwargs)
    backend = lambda gm, inputs: backends.aot.compile_aot(gm, inputs, fw_compiler=backends.aot.nop, partition_fn=note, rewrite=layouts.channels_last,
                                                             decompositions=core_decompositions())
    fs.compile(model, backend=backend)(x)
    return seen


def test_convolutions_read_and_write_channels_last():
    seen = images_of(Pair(norm_and_relu, BEHIND["image"]), torch.randn(2, 4, 6, 6))
    assert len(seen) == 6 and all(spec.strides == channels_last_strides(spec.shape) for spec in seen)


def test_one_convolution_is_left_alone():
    seen = images_of(torch.nn.Conv2d(4, 8, 3), torch.randn(2, 4, 6, 6))
    assert seen and not any(spec.strides == channels_last_strides(spec.shape) for spec in seen)


def test_doubles_and_signals_are_left_alone():
    for model, x in ((Pair(norm_and_relu, BEHIND["image"]).double(), torch.randn(2, 4, 6, 6).double()),
                     (torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3), torch.nn.Conv1d(4, 4, 3)), torch.randn(2, 4, 9))):
        assert all(spec.strides != channels_last_strides(spec.shape) for spec in images_of(model, x) if len(spec.shape) == 4)


def test_regions_keep_no_copies():
    """A copy into the format is made again with its checkpointed region."""
    model = Pair(norm_and_relu, BEHIND["image"])
    for wrap in (lambda x: checkpoint(model, x, use_reentrant=False), lambda x: model(checkpoint(torch.sin, x, use_reentrant=False))):
        x = torch.randn(2, 4, 6, 6)
        expected, found = observed(wrap, model, x), observed(fs.compile(wrap, fullgraph=True), model, x)
        torch.testing.assert_close(found[0][:2], expected[0][:2], rtol=1e-4, atol=1e-4)


def test_images_normalised_by_groups_are_laid_out_on_the_host():
    model = torch.nn.Sequential(*(layer for _ in range(3) for layer in (torch.nn.Conv2d(8, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.SiLU())))
    seen = images_of(model, torch.randn(2, 8, 12, 12))
    assert sum(spec.strides == channels_last_strides(spec.shape) for spec in seen) > len(seen) // 2


class Residual(torch.nn.Module):
    """Blocks that add to an image from outside."""

    def __init__(self, inside):
        super().__init__()
        self.convolutions = torch.nn.ModuleList(torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.inside = inside

    def forward(self, x):
        for convolution in self.convolutions:
            x = self.inside(x, convolution(x))
        return x


RESIDUAL = {
    "added": lambda x, y: x + y, "added to": lambda x, y: y + x * 2, "rows": lambda x, y: x + (y.permute(0, 2, 3, 1) @ torch.full((8, 8), 0.1)).permute(0, 3, 1, 2),
    "with another": lambda x, y: x * torch.arange(576.0).view(2, 8, 6, 6) / 576 + y, "seen": lambda x, y: x.view(2, 8, 36).sin().view(2, 8, 6, 6) + y + x.mean(),
}


@pytest.mark.parametrize("inside", RESIDUAL)
def test_blocks_that_add_to_their_input(inside):
    torch.manual_seed(0)
    model = Residual(RESIDUAL[inside])
    twin, x = copy.deepcopy(model), torch.randn(2, 8, 6, 6)
    expected, found = observed(model, model, x), observed(fs.compile(twin, fullgraph=True), twin, x)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert found[1] == expected[1]


def test_an_input_that_is_written_to_is_written_itself():
    model = Residual(RESIDUAL["added"])
    def fn(x):
        y = model(x)
        x.add_(y)
        return x * 2
    given, twin = (torch.randn(2, 8, 6, 6) for _ in range(2))
    twin.copy_(given)
    with torch.no_grad():
        torch.testing.assert_close((fs.compile(fn)(given), given), (fn(twin), twin), rtol=1e-4, atol=1e-4)


def test_a_block_s_input_is_copied_once():
    """What is added to the copy is channels-last: the next block needs no copy, and the result is put back."""
    copies = []

    def note(joint, *args, **kwargs):
        copies.extend(node.kwargs["memory_format"] for node in joint.graph.nodes if node.target is aten.clone.default)
        return fs.aot.min_cut_partition(joint, *args, **kwargs)
    backend = lambda gm, inputs: backends.aot.compile_aot(gm, inputs, fw_compiler=backends.aot.nop, partition_fn=note, rewrite=layouts.channels_last,
                                                             decompositions=core_decompositions())
    model = Residual(RESIDUAL["rows"])
    fs.compile(model, backend=backend)(torch.randn(2, 8, 6, 6))
    forward = copies[:copies.index(torch.contiguous_format)]
    assert forward == [torch.channels_last]
