"""Every module of torch.nn, compiled natively as one graph, against eager: results, gradients and buffers, static and symbolic.

Inputs are torch's own samples for its modules; `FIRESTEEL_MODULE_SAMPLES=100` runs all of them instead of a few for each module.
"""
import copy
import os

import pytest
import torch
import torch.utils._pytree as pytree

import firesteel as fs

pytest.importorskip("expecttest")       # torch's own samples need it

from torch.testing._internal.common_modules import module_db  # noqa: E402

SAMPLES = int(os.environ.get("FIRESTEEL_MODULE_SAMPLES", "3"))

# Modules, or uses of them, that read the data of a tensor in Python or pass what a graph cannot hold: refused under fullgraph=True.
BREAKS = {
    "nn.BatchNorm1d": "momentum=None counts batches in a tensor", "nn.BatchNorm2d": "the same", "nn.BatchNorm3d": "the same",
    "nn.GaussianNLLLoss": "checks that variances are positive", "nn.CTCLoss": "lengths are data",
    "nn.TransformerEncoder": "compares the mask with a causal one", "nn.Transformer": "the same",
    "nn.LinearCrossEntropyLoss": "its options are an object of their own, which no graph can hold",
}


def spread(values):
    """Some of them, evenly over the list."""
    return values[::max(1, -(-len(values) // SAMPLES))]


def run(module, call, args, kwargs):
    torch.manual_seed(0)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, kwargs))
    outputs = [o for o in pytree.tree_leaves(call(*args, **kwargs)) if isinstance(o, torch.Tensor)]
    inputs = [t for t in (*pytree.tree_leaves((args, kwargs)), *module.parameters()) if isinstance(t, torch.Tensor) and t.requires_grad]
    roots = [o for o in outputs if o.requires_grad]
    gradients = torch.autograd.grad(roots, inputs, [torch.ones_like(o) for o in roots], allow_unused=True) if roots and inputs else ()
    return [*[o.detach() for o in outputs], *gradients, *[b.clone() for b in module.buffers()]]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_equals_eager(info, dynamic):
    torch.manual_seed(0)
    samples = [s for s in info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
               if s.forward_input is not None]
    for sample in spread(samples):
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        expected = copy.deepcopy(module)
        args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
        try:
            want = run(expected, expected, args, kwargs)
        except (RuntimeError, ValueError, AssertionError, NotImplementedError):     # not for this device, or a sample of a mistake
            continue
        fs.reset()
        try:
            got = run(module, fs.compile(module, fullgraph=True, dynamic=dynamic), args, kwargs)
        except (fs.errors.Unsupported, fs.errors.DataDependentError):
            assert info.name in BREAKS
            continue
        for ours, theirs in zip(got, want, strict=True):
            if theirs is None:
                assert ours is None
            else:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_training_for_quantisation(backend):
    """The first call gives the observers their size, and breaks there; later ones are one graph."""
    class Quantised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.linear, self.after = torch.ao.quantization.QuantStub(), torch.nn.Linear(8, 4), torch.ao.quantization.DeQuantStub()

        def forward(self, x):
            return self.after(self.linear(self.before(x))) + 1

    fs.reset()
    module = Quantised()
    module.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    eager = torch.ao.quantization.prepare_qat(module)
    ours = copy.deepcopy(eager)
    compiled = fs.compile(ours, backend=backend)
    for _ in range(3):
        x = torch.randn(3, 8)
        results = [fn(x) for fn in (eager, compiled)]
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))
        grads = [torch.autograd.grad(out.sum(), [*model.parameters()]) for out, model in zip(results, (eager, ours))]
        torch.testing.assert_close(grads[1], grads[0])
    assert sum(fs.counters["graph_break"].values()) == 1
