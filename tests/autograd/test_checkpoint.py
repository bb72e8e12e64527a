"""Checkpointed regions, from the user's call to the two graphs: what is saved, what is recomputed, and whose numbers come out."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import firesteel as fs

aten = torch.ops.aten
BACKENDS = ["eager", "aot_eager", "aot_eager_partitioned", "native"]


class Block(torch.nn.Module):
    """A residual block with dropout, of which the mask is drawn in the region."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm, self.up, self.down, self.dropout = torch.nn.LayerNorm(8), torch.nn.Linear(8, 32), torch.nn.Linear(32, 8), dropout

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, bias: torch.Tensor | None = None) -> torch.Tensor:
        inner = F.dropout(F.gelu(self.up(self.norm(x))), self.dropout)
        out = x + F.dropout(self.down(inner), self.dropout) * scale
        return out if bias is None else out + bias


def observed(fn: Callable[..., Any], modules: torch.nn.Module, *others: torch.Tensor) -> list[Any]:
    """Result, gradients, and the generator's state afterwards."""
    modules.zero_grad()
    x = torch.linspace(-1, 1, 48).view(6, 8).requires_grad_()
    torch.manual_seed(3)
    out = fn(x, *others)
    out.sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in modules.parameters()), torch.get_rng_state()]


def counting(counts: dict[str, list[Any]]) -> Callable[..., Any]:
    """A backend that notes the operators of the forward and of the backward graph, and what is saved."""
    def note(name: str) -> Callable[..., Any]:
        def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            counts[name] = [node.target for node in gm.graph.nodes if node.op == "call_function"]
            counts[f"{name}_inputs"] = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
            return gm
        return compiler
    return fs.aot.backend(fw_compiler=note("forward"), bw_compiler=note("backward"), partition_fn=fs.aot.min_cut_partition)


# -- programs -----------------------------------------------------------------------------------------------------------
with torch.random.fork_rng():
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(Block() for _ in range(2))


def plainly(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """checkpoint without the checkpoint."""
    return block(*args, **{k: v for k, v in kwargs.items() if k not in ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop")})


def in_a_row(x, run):
    for block in blocks:
        x = run(block, x, use_reentrant=False)
    return x.sin()


def with_keywords(x, run):
    return run(blocks[0], x, 0.5, use_reentrant=False, preserve_rng_state=False, early_stop=False, bias=x.sin())


def reentrant(x, run):
    return run(blocks[1], run(blocks[0], x, use_reentrant=True), 2.0, use_reentrant=True)


def of_a_closure(x, run):
    scale = x.cos()
    return run(lambda a: blocks[0](a) * scale + scale, x, use_reentrant=False)


def of_containers(x, run):
    def inner(pair: tuple[torch.Tensor, dict[str, torch.Tensor]], count: int) -> Any:
        return {"sum": blocks[0](pair[0]) * count, "both": [pair[1]["b"], pair[0] + 1], "name": "y", "nothing": None}
    found = run(inner, (x.sin(), {"b": x.cos()}), 3, use_reentrant=False)
    return found["sum"] * found["both"][0] + found["both"][1] if found["name"] == "y" and found["nothing"] is None else x


def one_in_another(x, run):
    def inner(a):
        return run(blocks[1], blocks[0](a).sin(), use_reentrant=False).cos()
    return run(inner, x, use_reentrant=False) * 2


def of_one_block_often(x, run):
    for _ in range(3):
        x = run(blocks[0], x, use_reentrant=False)
    return x


def of_a_method(x, run):
    return run(blocks[0].forward, x, use_reentrant=False) + run(torch.sin, x, use_reentrant=False)


def without_gradients_inside(x, run):
    def inner(a):
        with torch.no_grad():
            factor = blocks[1](a)
        return blocks[0](a) * factor
    return run(inner, x, use_reentrant=False)


def with_views_across(x, run):
    y = run(lambda a: blocks[0](a).t(), x, use_reentrant=False)
    return run(lambda a: blocks[1](a.t()), y, use_reentrant=False)


def with_writes(x, run):
    def inner(a):
        y = blocks[0](a)
        y.mul_(2).add_(a)
        y[:, 0] = a[:, 1]
        return y.relu_()
    return run(inner, x * 1, use_reentrant=False)


PROGRAMS = [in_a_row, with_keywords, reentrant, of_a_closure, of_containers, one_in_another, of_one_block_often, of_a_method,
            without_gradients_inside, with_views_across, with_writes]


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_eagers(program: Callable[..., Any]) -> None:
    expected = observed(lambda x: program(x, checkpoint), blocks)
    for backend in ("aot_eager", "native"):
        found = observed(fs.compile(lambda x: program(x, checkpoint), backend=backend, fullgraph=True), blocks)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_without_checkpoints_to_the_bit(program: Callable[..., Any]) -> None:
    with_regions = observed(fs.compile(lambda x: program(x, checkpoint), fullgraph=True), blocks)
    without = observed(fs.compile(lambda x: program(x, plainly), fullgraph=True), blocks)
    if program is of_one_block_often:       # gradients of one weight are added up in another order: one product of all where no regions are
        torch.testing.assert_close(with_regions, without, rtol=1e-5, atol=1e-5)
    else:
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(with_regions, without))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_drawn_again_as_in_eager(backend: str, dynamic: bool) -> None:
    model = torch.nn.Sequential(*(Block(0.3) for _ in range(3)))

    def fn(x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return F.dropout(x, 0.1).cos()
    expected = observed(fn, model)
    fs.counters["native"].clear()
    torch.testing.assert_close(observed(fs.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic), model), expected, rtol=1e-4, atol=1e-4)
    assert not fs.counters["native"]["fallbacks"]


def test_a_generator_of_the_users_own() -> None:
    def inner(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.bernoulli(x.sigmoid(), generator=generator) * x.sin() + torch.rand(x.shape, generator=generator)

    def run(fn: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        x = torch.linspace(-2, 2, 40).requires_grad_()
        out = fn(x, generator)
        out.sum().backward()
        return out.detach(), x.grad, generator.get_state()
    fn = lambda x, generator: checkpoint(inner, x, generator, use_reentrant=False)
    plain = run(inner)
    for backend in ("aot_eager", "native"):
        torch.testing.assert_close(run(fs.compile(fn, backend=backend)), plain)


def test_a_mask_is_drawn_again_without_what_it_masks() -> None:
    model, counts = Block(0.5), {}
    observed(fs.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend=counting(counts), fullgraph=True), model)
    assert counts["forward"].count(aten.addmm.default) == 2 and counts["backward"].count(aten.addmm.default) == 1
    assert counts["backward"].count(aten.bernoulli.p) == 2
    assert not any("bernoulli" in name or "gelu" in name or "addmm" in name for name in counts["backward_inputs"])


def test_checkpoint_sequential() -> None:
    model = torch.nn.Sequential(*(Block(0.2) for _ in range(4)))
    fn = lambda x: checkpoint_sequential(model, 2, x, use_reentrant=False)
    torch.testing.assert_close(observed(fs.compile(fn, fullgraph=True), model), observed(fn, model), rtol=1e-4, atol=1e-4)


def test_a_model_that_checkpoints_saves_the_inputs_of_its_blocks() -> None:
    model, counts = torch.nn.Sequential(*(Block() for _ in range(4))), {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False).relu()
        return x
    observed(fs.compile(fn, backend=counting(counts), fullgraph=True), model)
    assert [name for name in counts["backward_inputs"] if not name.startswith(("primals", "tangents"))] == ["relu", "relu_1", "relu_2"]


# -- selective ----------------------------------------------------------------------------------------------------------
def of_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(torch.selu(x @ y @ y)).relu() * y


def selective(fn: Callable[..., Any], contexts: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(fn, *args, use_reentrant=False, context_fn=contexts)


def run_counted(fn: Callable[..., Any], *args: torch.Tensor) -> dict[str, list[Any]]:
    """Compares with eager, and gives the operators of both graphs."""
    counts: dict[str, list[Any]] = {}
    found = []
    for call in (fn, fs.compile(fn, backend=counting(counts), fullgraph=True)):
        leaves = [a.detach().clone().requires_grad_() for a in args]
        torch.manual_seed(0)
        out = call(*leaves)
        out.sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(found[1], found[0])
    return counts


def test_operators_of_a_list_are_saved() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default, aten.sigmoid.default])
    counts = run_counted(selective(of_products, contexts), torch.randn(4, 4), torch.randn(4, 4))
    assert counts["backward"].count(aten.mm.default) == 4 and aten.sigmoid.default not in counts["backward"]


@pytest.mark.parametrize("answer, products", [(CheckpointPolicy.MUST_SAVE, 4), (CheckpointPolicy.PREFER_SAVE, 4), (True, 4),
                                              (CheckpointPolicy.PREFER_RECOMPUTE, 6), (CheckpointPolicy.MUST_RECOMPUTE, 6), (False, 6)])
def test_answers_of_a_policy(answer: Any, products: int) -> None:
    policy = lambda ctx, op, *args, **kwargs: answer if op is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
    counts = run_counted(selective(of_products, lambda: create_selective_checkpoint_contexts(policy)), torch.randn(4, 4), torch.randn(4, 4))
    assert counts["backward"].count(aten.mm.default) == products


def test_a_policy_that_counts() -> None:
    def contexts() -> Any:
        seen = {"mm": 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            seen["mm"] += op is aten.mm.default
            return op is aten.mm.default and seen["mm"] == 2
        return create_selective_checkpoint_contexts(policy)
    counts = run_counted(selective(lambda x, y: (x @ y).sin() @ y, contexts), torch.randn(4, 4), torch.randn(4, 4))
    assert counts["backward"].count(aten.mm.default) == 5


class Dispatched(TorchDispatchMode):
    """Notes what arrives below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is not aten.detach.default:
            self.ops.append(op)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_a_policy_sees_the_operators_of_eager_in_order(backend: str) -> None:
    layer, norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)

    def inner(x: torch.Tensor) -> torch.Tensor:
        y = norm(F.dropout(F.gelu(layer(x)), 0.5)).add_(1)
        return F.scaled_dot_product_attention(y.view(1, 2, -1, 8), y.view(1, 2, -1, 8), y.view(1, 2, -1, 8)).softmax(-1)

    asked: list[Any] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        assert ctx.is_recompute is False
        asked.append(op)
        return False
    fn = selective(inner, lambda: create_selective_checkpoint_contexts(policy))
    fs.compile(fn, backend=backend, fullgraph=True)(torch.randn(6, 8, requires_grad=True))
    x = torch.randn(6, 8, requires_grad=True)
    with Dispatched() as mode:
        inner(x)
    assert asked == mode.ops


def test_a_policy_is_not_asked_without_gradients() -> None:
    asked: list[Any] = []
    policy = lambda ctx, op, *args, **kwargs: bool(asked.append(op))
    fn = selective(torch.sin, lambda: create_selective_checkpoint_contexts(policy))
    with torch.no_grad():
        fs.compile(fn, backend="aot_eager", fullgraph=True)(torch.ones(3))
    assert not asked


def test_contexts_made_in_the_program() -> None:
    ops = [aten.mm.default]

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            return op in ops
        return checkpoint(of_products, x, y, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    assert run_counted(fn, torch.randn(4, 4), torch.randn(4, 4))["backward"].count(aten.mm.default) == 4

    def with_partial(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default])
        return checkpoint(of_products, x, y, use_reentrant=False, context_fn=contexts)
    assert run_counted(with_partial, torch.randn(4, 4), torch.randn(4, 4))["backward"].count(aten.mm.default) == 4


def test_of_two_policies_the_one_that_saves_wins() -> None:
    saving = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default])
    nothing = functools.partial(create_selective_checkpoint_contexts, lambda ctx, op, *args, **kwargs: False)
    inner = lambda x, y: torch.sin(x @ y)
    for outer, within, products in ((saving, nothing, 4), (nothing, saving, 4), (nothing, nothing, 5)):      # the last product is read by nobody
        counts = run_counted(selective(lambda x, y: selective(inner, within)(x, y) @ y, outer), torch.randn(4, 4), torch.randn(4, 4))  # noqa: B023
        assert counts["backward"].count(aten.mm.default) == products


def test_a_saved_draw_and_one_that_is_made_again() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.native_dropout(torch.sigmoid(x), 0.5, True)[0])
    for answer, draws in ((True, 0), (False, 1)):
        policy = lambda ctx, op, *args, **kwargs: op is aten.sigmoid.default or answer and op is aten.native_dropout.default    # noqa: B023
        counts = run_counted(selective(inner, lambda: create_selective_checkpoint_contexts(policy)), torch.randn(4, 4))     # noqa: B023
        assert counts["forward"].count(aten.native_dropout.default) == 1 and aten.sigmoid.default not in counts["backward"]
        assert counts["backward"].count(aten.native_dropout.default) == draws


def test_contexts_that_are_none_of_selective_checkpointing() -> None:
    class Noting:
        entered = 0

        def __enter__(self) -> None:
            Noting.entered += 1

        def __exit__(self, *args: Any) -> None:
            pass
    fn = selective(lambda x: x.sin().cos(), lambda: (Noting(), Noting()))
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(fs.errors.Unsupported, match="must generate a tuple of two `TorchDispatchMode`s"):
        fs.compile(fn, fullgraph=True)(x)
    torch.testing.assert_close(fs.compile(fn)(x), x.sin().cos())
    assert Noting.entered == 1      # eager runs it, under the contexts
    torch.testing.assert_close(fs.compile(fn, backend="eager", fullgraph=True)(x), x.sin().cos())
    assert Noting.entered == 2


# -- hooks --------------------------------------------------------------------------------------------------------------
def with_a_hook(x: torch.Tensor, log: list[Any]) -> torch.Tensor:
    y = blocks[0](x)
    y.register_hook(lambda gradient: log.append(gradient.shape) or gradient * 2)
    return y.sin()


def with_saved_tensor_hooks(x: torch.Tensor, log: list[Any]) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: log.append("pack") or t, lambda t: log.append("unpack") or t):
        return blocks[0](x).exp()


@pytest.mark.parametrize("inner", [with_a_hook, with_saved_tensor_hooks])
def test_hooks_inside_of_a_region(inner: Callable[..., Any]) -> None:
    found, logs = [], []
    for wrap in (lambda fn: fn, fs.compile):
        log: list[Any] = []
        found.append(observed(wrap(lambda x: checkpoint(inner, x, log, use_reentrant=False) * 2), blocks[0]))       # noqa: B023
        logs.append(log)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert logs[0] == logs[1]


def test_a_module_hook_inside_of_a_region() -> None:
    model = torch.nn.Sequential(Block(), Block())
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.shape) or out * 2)
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    fn = lambda x: checkpoint(model, x, use_reentrant=False)
    torch.testing.assert_close(observed(fs.compile(fn), model), observed(fn, model), rtol=1e-4, atol=1e-4)


# -- other ways to a region -----------------------------------------------------------------------------------------------
class Scaled(torch.nn.Module):
    """A parametrization that is a region."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda w: w.tanh() * 2, weight, use_reentrant=False)


def test_use_reentrant_may_be_unset() -> None:
    fn = lambda x: checkpoint(blocks[0], x)
    with pytest.warns(Warning, match="use_reentrant"):
        expected = observed(fn, blocks[0])
    torch.testing.assert_close(observed(fs.compile(fn), blocks[0]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"determinism_check": "none"}, {"determinism_check": "default"}, {"early_stop": True}, {"early_stop": False},
                                     {"debug": False}])
def test_settings_of_eagers_checking(options: dict[str, Any]) -> None:
    fn = lambda x: checkpoint(blocks[0], x, use_reentrant=False, **options)
    torch.testing.assert_close(observed(fs.compile(fn, fullgraph=True), blocks[0]), observed(fn, blocks[0]), rtol=1e-4, atol=1e-4)


def test_checkpoint_wrapper() -> None:
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model, counts = torch.nn.Sequential(*(wrapper.checkpoint_wrapper(Block()) for _ in range(2))), {}
    torch.testing.assert_close(observed(fs.compile(model, fullgraph=True), model), observed(model, model), rtol=1e-4, atol=1e-4)
    observed(fs.compile(model, backend=counting(counts), fullgraph=True), model)
    assert counts["forward"].count(aten.addmm.default) == 4 and counts["backward"].count(aten.addmm.default) == 2


def test_a_region_inside_of_a_parametrization() -> None:
    layer = torch.nn.Linear(8, 8)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Scaled())
    fn = lambda x: layer(layer(x))
    torch.testing.assert_close(observed(fs.compile(fn, fullgraph=True), layer), observed(fn, layer), rtol=1e-4, atol=1e-4)


@fs.disable
def print_nothing(y: torch.Tensor) -> None:
    assert y.shape == (6, 8)


def with_a_break(x: torch.Tensor) -> torch.Tensor:
    y = blocks[0](x)
    print_nothing(y)
    return y.cos()


def test_a_break_inside_of_a_region() -> None:
    """Eager's checkpointing runs the call; what is before and behind it is compiled; fullgraph names the line."""
    fn = lambda x: checkpoint(with_a_break, x.sin(), use_reentrant=False) * 2
    expected = observed(fn, blocks[0])
    fs.reset()
    fs.counters.clear()
    compiled = fs.compile(fn)
    for _ in range(2):
        torch.testing.assert_close(observed(compiled, blocks[0]), expected, rtol=1e-4, atol=1e-4)
    assert sum(fs.counters["graph_break"].values()) == 1
    line = with_a_break.__code__.co_firstlineno + 2
    with pytest.raises(fs.errors.Unsupported, match=rf"test_checkpoint.py:{line} in with_a_break\n +print_nothing\(y\)"):
        fs.compile(fn, fullgraph=True)(torch.randn(6, 8, requires_grad=True))


def test_a_memory_budget_goes_beyond_what_was_preferred() -> None:
    for answer, again in ((CheckpointPolicy.PREFER_SAVE, True), (CheckpointPolicy.MUST_SAVE, False)):
        policy = lambda ctx, op, *args, **kwargs: answer if op is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE    # noqa: B023
        fn = selective(of_products, lambda: create_selective_checkpoint_contexts(policy))      # noqa: B023
        with fs.config.patch(memory_budget=0.1):
            products = run_counted(fn, torch.randn(4, 4), torch.randn(4, 4))["backward"].count(aten.mm.default)
        assert (products > 4) == again


def test_tensor_subclasses_in_a_region() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def run(fn: Callable[..., Any]) -> list[torch.Tensor]:
        x = TwoTensor(torch.linspace(0, 1, 16).view(4, 4), torch.linspace(1, 2, 16).view(4, 4)).requires_grad_()
        out = fn(x)
        out.sum().backward()
        return [out.a, out.b, x.grad.a, x.grad.b]
    contexts = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default])
    for options in ({}, {"context_fn": contexts}):
        fn = lambda x: checkpoint(lambda a: (a.sin() @ a).relu() * a, x, use_reentrant=False, **options)     # noqa: B023
        torch.testing.assert_close(run(fs.compile(fn, fullgraph=True)), run(fn))
