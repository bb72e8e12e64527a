"""The context that a user's graph compiler finds while it runs."""
import copy

import torch
from torch._guards import TracingContext, detect_fake_mode

import firesteel as fs
from firesteel.graph.abstract import AbstractTensor
from firesteel.graph.tracing_context import ContextMode


def test_a_backend_runs_operators_abstractly():
    seen = []

    def backend(gm, inputs):
        mode = detect_fake_mode(inputs)
        with mode:
            seen.append(gm(*inputs)[0] + torch.zeros(3))
        seen.append(mode.from_tensor(torch.randn(5)))
        assert isinstance(mode, ContextMode) and mode.shape_env is inputs[0].world.env and mode.allow_non_fake_inputs
        return gm.forward
    x = torch.randn(2, 3)
    assert torch.equal(fs.compile(lambda x: x.sin() * 2, backend=backend)(x), x.sin() * 2)
    assert [(type(t), tuple(t.shape)) for t in seen] == [(AbstractTensor, (2, 3)), (AbstractTensor, (5,))]
    assert TracingContext.try_get() is None


def test_graph_compilers_too_also_when_the_backward_is_compiled():
    modes = []

    def compiler(gm, inputs):
        modes.append(detect_fake_mode(inputs))
        return gm.forward
    x = torch.randn(3, requires_grad=True)
    fs.compile(lambda x: x.sin(), backend=fs.aot.backend(fw_compiler=compiler))(x).sum().backward()
    fs.aot.function(lambda x: x.sin(), compiler)(x).sum().backward()
    assert len(modes) == 4 and all(type(mode) is ContextMode for mode in modes)


def test_dead_random_operators_stay():
    def backend(gm, inputs):
        for graph_module in (gm, copy.deepcopy(gm)):
            graph_module.graph.eliminate_dead_code()
            assert [n.name for n in graph_module.graph.nodes if n.op.startswith("call")] == ["rand_like", "sin"]
        return gm.forward

    def f(x):
        torch.rand_like(x)
        x + 1
        return x.sin()
    fs.compile(f, backend=backend)(torch.randn(3))


def test_nodes_have_their_tensors_under_the_name_that_backends_read():
    def mine(gm, example_inputs):
        assert [node.meta["example_value"].shape for node in gm.graph.nodes if node.op != "output"] == [(3,), (3,)]
        return gm.forward
    assert fs.compile(lambda x: x + 1, backend=mine)(torch.ones(3)).tolist() == [2, 2, 2]
